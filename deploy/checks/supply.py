"""What comes into a build: crates by `cargo metadata --locked`, their licences by deny.toml, and a bill of materials (CycloneDX 1.5).

cargo-deny judges more (advisories among it) and is used where it is installed; what is here needs cargo alone, so that no change lands with a licence, a
source or a crate that nobody allowed.
"""

import json
import re
import tomllib
import uuid

from . import Skipped, module, program

REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"
PROGRAM = "verdigris-cli"


def metadata(tree, *features):
    """cargo's own view of the workspace with these features, and the checksums of Cargo.lock."""
    def make():
        cargo = program("cargo", package="https://rustup.rs")
        command = [cargo, "metadata", "--locked", "--format-version", "1", *features]
        # A checkout that was built has all that is asked; a fresh one asks the registry.
        code, output = tree.run(*command, "--offline", cwd=tree.root)
        if code != 0:
            code, output = tree.run(*command, cwd=tree.root)
        if code != 0:
            raise Skipped(f"cargo metadata: {output.strip()[-300:]}")
        lock = tomllib.loads(tree.text("Cargo.lock"))
        sums = {(package["name"], package["version"]): package.get("checksum") for package in lock["package"]}
        return json.loads(output[output.index("{"):output.rindex("}") + 1]), sums
    return tree.once(("cargo-metadata", *features), make)


def reached(graph, roots):
    """Packages that builds of these need, by id, with what each needs: no tests' dependencies."""
    nodes = {node["id"]: node for node in graph["resolve"]["nodes"]}
    edges, left = {}, list(roots)
    while left:
        one = left.pop()
        if one not in edges:
            edges[one] = [dep["pkg"] for dep in nodes[one]["deps"] if any(kind["kind"] != "dev" for kind in dep["dep_kinds"])]
            left += edges[one]
    return edges


def allows(expression, allowed):
    """Whether an SPDX expression can be met by licences of a list. (`/` is the old form of OR.)"""
    words = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))
    place = 0

    def peek():
        return words[place] if place < len(words) else None

    def take():
        nonlocal place
        place += 1
        return words[place - 1]

    def one():
        if peek() == "(":
            take()
            value = either()
            if peek() != ")":
                raise ValueError(f"`{expression}` is no SPDX expression")
            take()
            return value
        name = take() if peek() else ""
        if peek() == "WITH":
            take()
            name += f" WITH {take() if peek() else ''}"
        return name in allowed

    def both():
        value = one()
        while peek() == "AND":
            take()
            value = one() and value
        return value

    def either():
        value = both()
        while peek() == "OR":
            take()
            value = both() or value
        return value

    value = either()
    if place != len(words):
        raise ValueError(f"`{expression}` is no SPDX expression")
    return value


def judged(tree):
    """What deny.toml says of the crates of all builds: findings, and how many crates there are."""
    rules, (graph, _) = tomllib.loads(tree.text("deny.toml")), metadata(tree, "--all-features")
    packages = {package["id"]: package for package in graph["packages"]}
    allowed, denied = set(rules["licenses"]["allow"]), {row["crate"]: row["reason"] for row in rules["bans"]["deny"]}
    edges, findings = reached(graph, graph["workspace_members"]), []
    for one in sorted(edges):
        package = packages[one]
        name = f"{package['name']} {package['version']}"
        if package["name"] in denied:
            findings.append(f"{name}: {denied[package['name']]}")
        if package["source"] not in (None, REGISTRY):
            findings.append(f"{name} comes from {package['source']}")
        try:
            if not allows(package["license"] or "", allowed):
                findings.append(f"{name}: deny.toml does not allow `{package['license']}`")
        except ValueError as error:
            findings.append(f"{name}: {error}")
    return findings, len(edges)


def bill(tree, root=PROGRAM):
    """A bill of materials of one crate of the workspace, as CycloneDX 1.5: each crate once, with its licence, hash and what it needs."""
    graph, sums = metadata(tree)
    packages = {package["id"]: package for package in graph["packages"]}
    start = next(one for one in graph["workspace_members"] if packages[one]["name"] == root)
    edges = reached(graph, [start])

    def purl(one):
        return f"pkg:cargo/{packages[one]['name']}@{packages[one]['version']}"

    def component(one):
        package = packages[one]
        row = {
            "type": "application" if one == start else "library", "bom-ref": purl(one), "name": package["name"], "version": package["version"],
            "licenses": [{"expression": (package["license"] or "").replace(" / ", " OR ").replace("/", " OR ")}], "purl": purl(one),
        }
        if package["description"]:
            row["description"] = " ".join(package["description"].split())
        checksum = sums.get((package["name"], package["version"]))
        if checksum:
            row["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        return row

    rows = [component(one) for one in sorted(edges, key=purl) if one != start]
    text = json.dumps(rows, sort_keys=True)
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        # Of the contents, so that the same lock makes the same bill.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, text)}",
        "metadata": {"component": component(start)},
        "components": rows,
        "dependencies": [{"ref": purl(one), "dependsOn": sorted({purl(other) for other in edges[one]})} for one in sorted(edges, key=purl)],
    }


def supply_chain(tree):
    """Licences, bans and sources of all that is built: by cargo-deny where it is installed, and by cargo's own metadata everywhere."""
    findings, count = judged(tree)
    by = "by cargo metadata (cargo-deny is not installed)"
    try:
        deny = program("cargo-deny", package="cargo install cargo-deny --locked")
    except Skipped:
        deny = None
    if deny:
        code, output = tree.run(deny, "--format", "json", "--locked", "check", "licenses", "bans", "sources", cwd=tree.root)
        said = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        errors = [one["fields"]["message"] for one in said if one.get("fields", {}).get("severity") == "error"]
        warnings = sum(one.get("fields", {}).get("severity") == "warning" for one in said)
        findings += (errors or [output.strip()[-2000:]]) if code != 0 else []
        by = f"by cargo metadata and cargo-deny, {warnings} warnings"
    return f"licences, bans, sources of {count} crates, {by}", findings


def bill_of_materials(tree):
    """The bill of materials of the program keeps CycloneDX's schema, and names every crate with a hash and a licence."""
    made = bill(tree)
    findings = [f"{row['name']} {row['version']} has no hash" for row in made["components"] if "hashes" not in row and not row["name"].startswith("verdigris")]
    findings += [f"{row['name']} {row['version']} has no licence" for row in made["components"] if not row["licenses"][0]["expression"]]
    module("cyclonedx.validation.json")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_5).validate_str(json.dumps(made))
    findings += [f"CycloneDX 1.5: {error}"[:600]] if error else []
    return f"{len(made['components'])} crates in verdigris, CycloneDX 1.5", findings
