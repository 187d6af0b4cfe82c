"""Advisories on the crates of Cargo.lock: RustSec's database, pinned by deploy/advisory-db.toml, read by cargo-audit and by cargo-deny.

Neither the programs nor the database is made up for where they are not there: the check is told as skipped, with the reason.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

from . import Skipped, program

PIN = "deploy/advisory-db.toml"
FETCH_SECONDS = 60
# A database that is older is told.
OLD_DAYS = 90
# The folder that cargo-deny looks for under `db-path`: the address's name and a hash of it.
DENY_FOLDER = "advisory-db-3157b0e258782691"


def git(folder, *arguments, seconds=FETCH_SECONDS):
    """Exit code and output of git in a folder, which asks nobody for a password."""
    command = ["git", "-c", f"safe.directory={folder}", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {seconds} s"
    return done.returncode, (done.stdout + done.stderr).strip()


def fetched(folder, pin):
    """The pinned commit in a folder, fetched where it is not there yet; raises `Skipped` where it cannot be had."""
    code, head = git(folder, "rev-parse", "HEAD") if (folder / ".git").exists() else (1, "")
    if code == 0 and head == pin["commit"]:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in (["init", "--quiet"], ["fetch", "--quiet", "--depth", "1", pin["url"], pin["commit"]], ["checkout", "--quiet", "FETCH_HEAD"]):
        code, output = git(folder, *command)
        if code != 0:
            shutil.rmtree(folder, ignore_errors=True)
            said = " ".join(output.split())[:200]
            raise Skipped(f"no database: {pin['url']} at {pin['commit'][:8]} cannot be fetched ({said}); --advisories names a copy")
    return folder


def database(tree, pin):
    """The folder of the database, and its commit's time: that of `--advisories`, else the pinned one under target/."""
    folder = tree.advisories or fetched(tree.root / "target/advisory-db", pin)
    code, output = git(folder, "show", "--no-patch", "--format=%H %cI", "HEAD")
    found = re.fullmatch(r"([0-9a-f]{40}) (\S+)", output)
    if code != 0 or not found:
        raise ValueError(f"{folder} is no git repository with a commit: {output[-200:]}")
    if not (folder / "crates").is_dir():
        raise ValueError(f"{folder} has no folder `crates`, as RustSec's database has")
    return folder, found[1], datetime.datetime.fromisoformat(found[2])


def by_audit(tree, audit, folder, ignored):
    """What cargo-audit finds of versions in Cargo.lock."""
    command = [audit, "audit", "--db", folder, "--no-fetch", "--stale", "--no-yanked", "--json", "--file", tree.root / "Cargo.lock"]
    _, output = tree.run(*command, *(word for one in ignored for word in ("--ignore", one)), cwd=tree.root)
    start = output.find('{"database"')
    if start < 0:
        return "", [f"cargo-audit: {output.strip()[-400:]}"]
    said, _ = json.JSONDecoder().raw_decode(output[start:])
    findings = [
        f"{row['package']['name']} {row['package']['version']}: {row['advisory']['id']}, {row['advisory']['title']}"
        f" (patched: {', '.join(row['versions']['patched']) or 'in no version'})"
        for row in said["vulnerabilities"]["list"]
    ]
    counts = f"{said['database']['advisory-count']} advisories, {said['lockfile']['dependency-count']} crates"
    warnings = sum(len(rows) for rows in said["warnings"].values())
    return f"cargo-audit ({counts}, {warnings} warnings)", findings


def by_deny(tree, deny, folder):
    """What cargo-deny finds by the rules of deny.toml: crates that nobody keeps and versions that were taken back, as well."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(folder, Path(place) / "dbs" / DENY_FOLDER, symlinks=True)
        text = tree.text("deny.toml")
        config = Path(place) / "deny.toml"
        config.write_text(text.replace("[advisories]\n", f"[advisories]\ndb-path = {json.dumps(place + '/dbs')}\n", 1), encoding="utf-8")
        code, output = tree.run(deny, "--format", "json", "--offline", "--locked", "--config", config, "check", "advisories", cwd=tree.root)
    said = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    fields = [one.get("fields", {}) for one in said]
    errors = [one["message"] for one in fields if str(one.get("severity", one.get("level"))).lower() == "error"]
    return "cargo-deny", [f"cargo-deny: {error}" for error in errors or [output.strip()[-400:]]] if code != 0 else []


def advisories(tree):
    """No crate of Cargo.lock has an advisory, by a database that is not older than the pinned one."""
    pin = tomllib.loads(tree.text(PIN))
    programs = {}
    for name in ("cargo-audit", "cargo-deny"):
        try:
            programs[name] = program(name, package=f"cargo install {name} --locked")
        except Skipped:
            continue
    if not programs:
        raise Skipped("neither cargo-audit nor cargo-deny is installed (deploy/requirements.txt has both; or cargo install cargo-audit --locked)")
    folder, commit, time = database(tree, pin)
    if commit != pin["commit"] and time.date() < pin["date"]:
        return "", [f"the database {folder} is of {time.date()}, and {PIN} pins one of {pin['date']}"]
    ignored = tomllib.loads(tree.text("deny.toml"))["advisories"]["ignore"]
    ignored = [one if isinstance(one, str) else one["id"] for one in ignored if isinstance(one, str) or "id" in one]
    told, findings = [], []
    if "cargo-audit" in programs:
        by, found = by_audit(tree, programs["cargo-audit"], folder, ignored)
        told, findings = [*told, by], findings + found
    if "cargo-deny" in programs:
        by, found = by_deny(tree, programs["cargo-deny"], folder)
        told, findings = [*told, by], findings + found
    days = (datetime.datetime.now(datetime.timezone.utc) - time).days
    age = f"{days} days old: advisories since then are not judged, renew {PIN}" if days > OLD_DAYS else f"{days} days old"
    return f"by {' and '.join(told)}, RustSec of {time.date()} ({commit[:8]}), {age}", findings
