//! The floors: which crate may depend on which, and what a manifest must say.

use std::collections::BTreeSet;

use toml::{Table, Value};

use super::Finding;
use crate::tree::Tree;

/// One crate of the house.
struct Room {
    name: &'static str,
    /// 1 is the ground; every arrow of `may_use` goes down.
    floor: u8,
    /// Crates of this workspace that it may depend on.
    may_use: &'static [&'static str],
    /// Further ones for its tests alone. They may stand on the same floor, never above.
    tests_may_use: &'static [&'static str],
}

/// The whole house. An edge that is not here does not exist; a crate that is not here is not admitted.
const HOUSE: &[Room] = &[
    Room { name: "verdigris-tensor", floor: 1, may_use: &[], tests_may_use: &[] },
    Room { name: "verdigris-graph", floor: 2, may_use: &["verdigris-tensor"], tests_may_use: &[] },
    Room { name: "verdigris-kir", floor: 2, may_use: &["verdigris-tensor"], tests_may_use: &[] },
    Room { name: "verdigris-reference", floor: 3, may_use: &["verdigris-graph", "verdigris-tensor"], tests_may_use: &[] },
    Room {
        name: "verdigris-engines",
        floor: 3,
        may_use: &["verdigris-graph", "verdigris-kir", "verdigris-tensor"],
        // Engines are judged by the reference on the interpreter; no driver, even here.
        tests_may_use: &["verdigris-reference"],
    },
    // Kernels for those who work on the language: the workshop runs them, the assembly check assembles them.
    Room { name: "verdigris-probes", floor: 3, may_use: &["verdigris-kir", "verdigris-tensor"], tests_may_use: &[] },
    Room { name: "verdigris-cuda", floor: 3, may_use: &["verdigris-kir", "verdigris-tensor"], tests_may_use: &[] },
    Room { name: "verdigris-cpu", floor: 3, may_use: &["verdigris-graph", "verdigris-tensor"], tests_may_use: &["verdigris-reference"] },
    Room {
        name: "verdigris",
        floor: 4,
        // The reference is what guards hold results against.
        may_use: &[
            "verdigris-cpu",
            "verdigris-cuda",
            "verdigris-engines",
            "verdigris-graph",
            "verdigris-kir",
            "verdigris-reference",
            "verdigris-tensor",
        ],
        tests_may_use: &[],
    },
    // Exporters: what the library tells, brought to those who watch. NVTX stands where libraries are loaded.
    Room { name: "verdigris-telemetry", floor: 5, may_use: &["verdigris", "verdigris-cuda"], tests_may_use: &[] },
    // The inference service.
    Room { name: "verdigris-serve", floor: 6, may_use: &["verdigris"], tests_may_use: &[] },
    Room {
        name: "verdigris-cli",
        floor: 7,
        // The reference lends the problem lists and seeded numbers; kir prints what a program launches.
        may_use: &[
            "verdigris",
            "verdigris-cuda",
            "verdigris-engines",
            "verdigris-graph",
            "verdigris-kir",
            "verdigris-reference",
            "verdigris-serve",
            "verdigris-telemetry",
            "verdigris-tensor",
        ],
        tests_may_use: &[],
    },
    Room { name: "verdigris-capi", floor: 7, may_use: &["verdigris", "verdigris-graph", "verdigris-tensor"], tests_may_use: &[] },
    Room { name: "verdigris-cudnn", floor: 7, may_use: &["verdigris", "verdigris-graph", "verdigris-tensor"], tests_may_use: &[] },
    Room {
        name: "verdigris-python",
        floor: 7,
        // Streams and memory of others come in through it, and the CPU is run on them in place.
        may_use: &[
            "verdigris",
            "verdigris-cpu",
            "verdigris-cuda",
            "verdigris-engines",
            "verdigris-graph",
            "verdigris-telemetry",
            "verdigris-tensor",
        ],
        tests_may_use: &[],
    },
    Room {
        name: "verdigris-workshop",
        floor: 8,
        // Tools that judge and measure every floor below. The command line lends problems, tables and records, so that both programs
        // read the same arguments.
        may_use: &[
            "verdigris",
            "verdigris-cli",
            "verdigris-cpu",
            "verdigris-cuda",
            "verdigris-engines",
            "verdigris-graph",
            "verdigris-kir",
            "verdigris-probes",
            "verdigris-reference",
            "verdigris-serve",
            "verdigris-telemetry",
            "verdigris-tensor",
        ],
        tests_may_use: &[],
    },
    // The repository's own commands look at what is printed, never at a device. Of the driver's layer they use the format of packs
    // alone, so that the writer and the reader are one.
    Room {
        name: "xtask",
        floor: 8,
        may_use: &["verdigris-cuda", "verdigris-engines", "verdigris-kir", "verdigris-probes"],
        tests_may_use: &[],
    },
];

/// Who may tell of what happens: the library, and those above it.
const TELLERS: &[&str] =
    &["verdigris", "verdigris-telemetry", "verdigris-serve", "verdigris-cli", "verdigris-python", "verdigris-workshop"];

/// Why no one else may.
const LOWER: &str = "lower floors return what they know; they do not log";

/// Outside crates that only some rooms may use, with the reason.
const RESERVED: &[(&str, &[&str], &str)] = &[
    ("cudarc", &["verdigris-cuda"], "only verdigris-cuda knows the driver"),
    ("libloading", &["verdigris-cuda", "verdigris-cudnn"], "libraries are loaded in verdigris-cuda, and replaced in the drop-in door"),
    ("log", TELLERS, LOWER),
    ("metrics", TELLERS, LOWER),
    ("tracing", TELLERS, LOWER),
];

/// Crates that may have a build script, with the reason.
const BUILD_SCRIPTS: &[(&str, &str)] = &[
    ("verdigris-engines", "hashes the sources of kir and engines for the cubin key"),
    ("verdigris-capi", "sets its soname"),
    ("verdigris-cudnn", "sets its soname"),
    ("verdigris-python", "sets its soname"),
];

const LICENCE: &str = "MIT OR Apache-2.0";

/// The rules `floors`, `manifest` and `dependency-reason`.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut outside: BTreeSet<(String, String)> = BTreeSet::new();
    for (path, text) in tree.files() {
        if path != "Cargo.toml" && !path.ends_with("/Cargo.toml") {
            continue;
        }
        let manifest: Table = match text.parse() {
            Ok(manifest) => manifest,
            Err(error) => {
                found.push(Finding::new("manifest", path, 0, format!("{error}")));
                continue;
            }
        };
        if path == "Cargo.toml" {
            root_manifest(&manifest, &mut found);
        }
        if manifest.contains_key("package") {
            member(tree, path, &manifest, &mut found, &mut outside);
        }
    }
    reasons(tree, &outside, &mut found);
    found
}

fn root_manifest(manifest: &Table, found: &mut Vec<Finding>) {
    let licence = lookup(manifest, &["workspace", "package", "license"]).and_then(Value::as_str);
    if licence != Some(LICENCE) {
        let message = format!("workspace.package.license is {licence:?}, not {LICENCE:?}");
        found.push(Finding::new("manifest", "Cargo.toml", 0, message));
    }
}

fn member(tree: &Tree, path: &str, manifest: &Table, found: &mut Vec<Finding>, outside: &mut BTreeSet<(String, String)>) {
    let mut say = |rule, message| found.push(Finding::new(rule, path, 0, message));
    let name = lookup(manifest, &["package", "name"]).and_then(Value::as_str).unwrap_or("");
    let folder = path.strip_suffix("/Cargo.toml").unwrap_or("");
    let folder_name = folder.rsplit('/').next().unwrap_or("");
    if folder_name != name {
        say("manifest", format!("crate `{name}` stands in the folder `{folder_name}`; they carry one name"));
    }
    let inherits = |keys: &[&str]| lookup(manifest, keys).and_then(Value::as_bool) == Some(true);
    if !inherits(&["package", "license", "workspace"]) && lookup(manifest, &["package", "license"]).and_then(Value::as_str) != Some(LICENCE)
    {
        say("manifest", format!("`license.workspace = true` is missing; every crate is {LICENCE}"));
    }
    if !inherits(&["lints", "workspace"]) {
        say("manifest", "`[lints] workspace = true` is missing: the crate escapes the house's lints".to_string());
    }
    if lookup(manifest, &["lib", "proc-macro"]).and_then(Value::as_bool) == Some(true) {
        say("manifest", "proc-macros of our own are deliberately absent".to_string());
    }
    if tree.text(&format!("{folder}/build.rs")).is_some() && !BUILD_SCRIPTS.iter().any(|(allowed, _)| *allowed == name) {
        say("manifest", format!("`{name}` may have no build script; see BUILD_SCRIPTS in this rule"));
    }

    let Some(room) = HOUSE.iter().find(|room| room.name == name) else {
        say("floors", format!("`{name}` stands on no floor; add its row to HOUSE, with its reason in DESIGN.md"));
        return;
    };
    for edge in edges(manifest) {
        if edge.target == "verdigris" || edge.target.starts_with("verdigris-") {
            // Tests of a crate may ask for features of the crate itself.
            let of_tests = edge.target == name || room.tests_may_use.contains(&edge.target.as_str());
            let allowed = room.may_use.contains(&edge.target.as_str()) || (edge.tests_only && of_tests);
            if !allowed {
                let kind = if edge.tests_only { "its tests" } else { "it" };
                let may = if room.may_use.is_empty() { "nothing of this workspace".to_string() } else { room.may_use.join(", ") };
                say(
                    "floors",
                    format!("`{name}` (floor {}) depends on `{}` in [{}]; {kind} may use {may}", room.floor, edge.target, edge.section),
                );
            }
        } else {
            if let Some((_, rooms, reason)) = RESERVED.iter().find(|(n, _, _)| *n == edge.target)
                && !rooms.contains(&name)
            {
                say("floors", format!("`{name}` depends on `{}`: {reason}", edge.target));
            }
            outside.insert((edge.target, path.to_string()));
        }
    }
}

/// Every outside crate has a row in the table of DESIGN.md (a line that opens with "| `name` |", below the heading
/// `## Dependencies`), and every row a crate.
fn reasons(tree: &Tree, outside: &BTreeSet<(String, String)>, found: &mut Vec<Finding>) {
    let design = tree.text("DESIGN.md").unwrap_or("");
    let rows: Vec<(usize, &str)> = design
        .lines()
        .enumerate()
        .skip_while(|(_, line)| *line != "## Dependencies")
        .filter_map(|(index, line)| Some((index + 1, line.strip_prefix("| `")?.split_once("` |")?.0)))
        .collect();
    let mut missing = BTreeSet::new();
    for (name, path) in outside {
        if !rows.iter().any(|(_, row)| row == name) && missing.insert(name) {
            let message = format!("`{name}` has no row in the dependency table of DESIGN.md");
            found.push(Finding::new("dependency-reason", path, 0, message));
        }
    }
    for (line, row) in rows {
        if !outside.iter().any(|(name, _)| name == row) {
            let message = format!("no crate depends on `{row}` any more: remove its row");
            found.push(Finding::new("dependency-reason", "DESIGN.md", line, message));
        }
    }
}

struct Edge {
    target: String,
    section: String,
    tests_only: bool,
}

/// All dependencies of a manifest: plain, for tests, for the build script, and per target.
fn edges(manifest: &Table) -> Vec<Edge> {
    const SECTIONS: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];
    let mut tables = vec![(String::new(), manifest)];
    if let Some(targets) = manifest.get("target").and_then(Value::as_table) {
        for (condition, table) in targets {
            if let Some(table) = table.as_table() {
                tables.push((format!("target.{condition}."), table));
            }
        }
    }
    let mut edges = Vec::new();
    for (prefix, table) in tables {
        for section in SECTIONS {
            let Some(dependencies) = table.get(section).and_then(Value::as_table) else {
                continue;
            };
            for (key, value) in dependencies {
                // `package` undoes a renaming, so that an alias is no way around the floors.
                let target = value.get("package").and_then(Value::as_str).unwrap_or(key);
                edges.push(Edge {
                    target: target.to_string(),
                    section: format!("{prefix}{section}"),
                    tests_only: section == "dev-dependencies",
                });
            }
        }
    }
    edges
}

fn lookup<'t>(table: &'t Table, keys: &[&str]) -> Option<&'t Value> {
    let (first, rest) = keys.split_first()?;
    let mut value = table.get(*first)?;
    for key in rest {
        value = value.get(key)?;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::spoken;

    fn manifest(name: &str, rest: &str) -> String {
        format!("[package]\nname = \"{name}\"\nlicense.workspace = true\n[lints]\nworkspace = true\n{rest}")
    }

    fn findings(name: &str, rest: &str) -> Vec<String> {
        let path = format!("crates/{name}/Cargo.toml");
        let found = check(&Tree::of(&[(&path, &manifest(name, rest))]));
        found.iter().map(Finding::to_string).collect()
    }

    #[test]
    fn the_table_itself_keeps_the_law() {
        let floor = |name: &str| HOUSE.iter().find(|room| room.name == name).unwrap_or_else(|| panic!("{name} is not in HOUSE")).floor;
        for room in HOUSE {
            for below in room.may_use {
                assert!(floor(below) < room.floor, "{} -> {below}", room.name);
            }
            for beside in room.tests_may_use {
                assert!(floor(beside) <= room.floor, "{} (tests) -> {beside}", room.name);
            }
        }
    }

    #[test]
    fn a_downward_edge_of_the_table_is_welcome() {
        assert_eq!(findings("verdigris-graph", "[dependencies]\nverdigris-tensor.workspace = true"), [""; 0]);
    }

    #[test]
    fn upward_sideways_and_hidden_edges_are_found() {
        for (name, rest) in [
            ("verdigris-tensor", "[dependencies]\nverdigris-graph.workspace = true"),
            ("verdigris-kir", "[dependencies]\nverdigris-graph = { path = \"../verdigris-graph\" }"),
            ("verdigris-engines", "[dependencies]\nverdigris-reference.workspace = true"),
            ("verdigris-engines", "[dev-dependencies]\nverdigris-cuda.workspace = true"),
            ("verdigris-reference", "[build-dependencies]\nverdigris-engines.workspace = true"),
            ("verdigris-kir", "[target.'cfg(unix)'.dependencies]\nverdigris-engines.workspace = true"),
            ("verdigris-kir", "[dependencies]\nharmless = { path = \"x\", package = \"verdigris\" }"),
        ] {
            let found = findings(name, rest);
            assert_eq!(found.len(), 1, "{name}: {rest}: {found:?}");
            assert!(found[0].contains("[floors]"), "{found:?}");
        }
    }

    #[test]
    fn tests_of_engines_may_ask_the_reference() {
        let rest = "[dev-dependencies]\nverdigris-reference.workspace = true";
        assert_eq!(findings("verdigris-engines", rest), [""; 0]);
    }

    #[test]
    fn tests_alone_may_ask_features_of_their_own_crate() {
        let own =
            |section: &str| findings("verdigris-graph", &format!("[{section}]\nverdigris-graph = {{ path = \".\", features = [\"x\"] }}"));
        assert_eq!(own("dev-dependencies"), [""; 0]);
        assert_eq!(own("dependencies").len(), 1);
    }

    #[test]
    fn the_driver_stays_in_its_room() {
        let found = findings("verdigris-engines", "[dependencies]\ncudarc = \"0.1\"");
        assert!(found[0].contains("only verdigris-cuda knows the driver"), "{found:?}");
    }

    #[test]
    fn an_unknown_crate_is_not_admitted() {
        let found = findings("verdigris-extra", "");
        assert!(found[0].contains("stands on no floor"), "{found:?}");
    }

    #[test]
    fn a_dependency_needs_its_row() {
        let text = manifest("verdigris-tensor", "[dependencies]\nrayon = \"1\"");
        let path = "crates/verdigris-tensor/Cargo.toml";
        let without = Tree::of(&[(path, &text), ("DESIGN.md", "rayon is nice\n")]);
        assert_eq!(spoken(&check(&without)), [format!("dependency-reason {path}:0")]);
        let with = Tree::of(&[(path, &text), ("DESIGN.md", "| `x` | a word |\n## Dependencies\n| `rayon` | threads |\n")]);
        assert_eq!(check(&with), []);
        let stale = Tree::of(&[("DESIGN.md", "## Dependencies\n| `rayon` | threads |\n")]);
        assert_eq!(spoken(&check(&stale)), ["dependency-reason DESIGN.md:2"]);
    }

    #[test]
    fn manifests_say_what_they_must() {
        let path = "crates/verdigris-kir/Cargo.toml";
        let cases = [
            ("[package]\nname = \"verdigris-kir\"\n[lints]\nworkspace = true\n", "license"),
            ("[package]\nname = \"verdigris-kir\"\nlicense = \"GPL-3.0\"\n[lints]\nworkspace = true\n", "license"),
            ("[package]\nname = \"verdigris-kir\"\nlicense.workspace = true\n", "lints"),
            ("[package]\nname = \"verdigris-tensor\"\nlicense.workspace = true\n[lints]\nworkspace = true\n", "folder"),
            (
                "[package]\nname = \"verdigris-kir\"\nlicense.workspace = true\n[lints]\nworkspace = true\n[lib]\nproc-macro = true\n",
                "proc-macro",
            ),
            ("[package\n", "TOML"),
        ];
        for (text, word) in cases {
            let found = check(&Tree::of(&[(path, text)]));
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert!(found[0].to_string().contains(word), "{found:?}");
        }
        let script = Tree::of(&[(path, &manifest("verdigris-kir", "")), ("crates/verdigris-kir/build.rs", "fn main() {}")]);
        assert!(check(&script)[0].message.contains("build script"));
        let root = Tree::of(&[("Cargo.toml", "[workspace.package]\nlicense = \"MIT\"\n")]);
        assert_eq!(spoken(&check(&root)), ["manifest Cargo.toml:0"]);
    }
}
