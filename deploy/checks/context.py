"""What of the tree an image's build is sent: the ignore file beside the Containerfile, held against what the crates are compiled of."""

import re
from pathlib import PurePosixPath

IGNORE = "deploy/container/Containerfile.dockerignore"
# Both programs that the image's build compiles are of the workspace, whose members cargo reads whole.
MEMBERS = ("crates/*", "xtask")
INCLUDE = re.compile(r'\binclude(?:_str|_bytes)?!\s*\(\s*(concat!\s*\(\s*)?"((?:[^"\\]|\\.)*)"')
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def pattern(line):
    """A line of an ignore file as an expression for whole paths, by the rules of Docker and Podman: `*` stops at a slash, `**` does not."""
    text, expression, place = line.strip("/"), "", 0
    while place < len(text):
        if text.startswith("**", place):
            place += 2
            slash = text.startswith("/", place)
            place += slash
            expression += "(?:.*/)?" if slash else ".*"
        elif text[place] == "[" and "]" in text[place + 2:]:
            end = text.index("]", place + 2)
            expression += text[place:end + 1]
            place = end + 1
        else:
            expression += {"*": "[^/]*", "?": "[^/]"}.get(text[place], re.escape(text[place]))
            place += 1
    return re.compile(expression)


class Ignored:
    """The rules of an ignore file: the last line that matches a path or a folder above it decides."""

    def __init__(self, text):
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        self.rules = [(line.removeprefix("!").strip(), line.startswith("!"), pattern(line.removeprefix("!").strip())) for line in lines]

    def by(self, path):
        """The line that keeps a path out of the build, or None."""
        own = PurePosixPath(path)
        names, decided = [str(own), *(str(parent) for parent in own.parents if str(parent) != ".")], None
        for line, is_exception, expression in self.rules:
            if any(expression.fullmatch(name) for name in names):
                decided = None if is_exception else line
        return decided


def normal(path):
    """A path within the tree without `..`; None where it leads out of it."""
    parts = []
    for part in PurePosixPath(path).parts:
        if part == "..":
            if not parts:
                return None
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def code_of(text):
    """Rust without its comments of whole lines, which may quote an include."""
    return re.sub(r"^\s*//.*$", "", text, flags=re.M)


def includes(tree):
    """Files that sources include at compile time, as pairs of the source and the path.

    Of what a macro completes (`concat!("../corpora/", $name)`) it is the folder.
    """
    for member in MEMBERS:
        for source in sorted(tree.root.glob(f"{member}/**/*.rs")):
            here = source.relative_to(tree.root)
            for start, name in INCLUDE.findall(code_of(source.read_text(encoding="utf-8"))):
                if start and not name.endswith("/"):
                    name = str(PurePosixPath(name).parent)
                path = normal(here.parent.as_posix() + "/" + name)
                if path:
                    yield here.as_posix(), path


def reads_of_scripts(tree):
    """Files and folders that build scripts name: each of their strings that leads to something, from the crate's folder or the one above it."""
    for member in MEMBERS:
        for script in sorted(tree.root.glob(f"{member}/build.rs")):
            crate = script.parent.relative_to(tree.root).as_posix()
            for source in [script, *sorted((script.parent / "build").glob("**/*.rs"))]:
                for name in STRING.findall(code_of(source.read_text(encoding="utf-8"))):
                    for base in (crate, crate + "/.."):
                        path = normal(f"{base}/{name}") if re.fullmatch(r"[\w./-]*\w", name) else None
                        if path and (tree.root / path).exists():
                            yield source.relative_to(tree.root).as_posix(), path


def sources(tree):
    """What cargo reads of each member, whatever is built: its manifest and its sources."""
    for name in ("Cargo.toml", "Cargo.lock"):
        yield name
    for member in MEMBERS:
        for crate in tree.root.glob(member):
            for path in [*crate.glob("Cargo.toml"), *crate.glob("build.rs"), *crate.glob("src/**/*.rs")]:
                yield path.relative_to(tree.root).as_posix()


def context(tree):
    """How many files the sources include, and what of all that a build reads is kept out of it."""
    ignored = Ignored(tree.text(IGNORE))
    findings, count = [], 0
    for source, path in sorted({*includes(tree), *reads_of_scripts(tree)}):
        count += 1
        line = ignored.by(path)
        if line:
            findings.append(f"`{line}` of {IGNORE} keeps {path} out of the build, and {source} reads it")
    for path in sorted(sources(tree)):
        line = ignored.by(path)
        if line:
            findings.append(f"`{line}` of {IGNORE} keeps {path} out of the build, which cargo compiles")
    return count, findings
