//! The version of each engine beside a hash of its kernels' text: `crates/verdigris-engines/versions.txt`.
//!
//! A measured choice is good for one version of its engine. A kernel whose text changes may run at another speed, and only its author knows whether
//! choices still hold; so the change asks for a decision, and the file keeps it. Kernels are hashed in their canonical form
//! ([`crate::canonical`]), for every chip that has a catalog.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use verdigris_engines::engine::Engine;
use verdigris_kir::program::KernelRef;
use verdigris_kir::ptx;
use verdigris_kir::verify::verify;

use crate::canonical::canonical;
use crate::catalog::{self, PTX_ISA};

/// Where the decisions stand.
const FILE: &str = "crates/verdigris-engines/versions.txt";

const HEAD: &str = "\
# Each engine's version, under which measured choices are kept, and a hash of its kernels' text; `cargo xtask versions` compares.
# Where kernels changed, decide: does a config mean something else, or run at another speed beside others? Then raise the engine's VERSION, and
# measure or drop its rows in crates/verdigris/tuned/tuned.txt. Else keep it. `cargo xtask versions --write` takes down the decision.
";

/// What stands behind a choice: an engine's version and its kernels.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Line {
    version: u32,
    kernels: String,
}

type Lines = BTreeMap<String, Line>;

/// How the engines of today differ from what the file says, one finding a line; none if they do not.
///
/// # Errors
/// A file that cannot be read, or a kernel that the verifier refuses.
pub(crate) fn findings(root: &Path) -> Result<Vec<String>> {
    let path = root.join(FILE);
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    Ok(compare(&parse(&text)?, &today()?))
}

/// Takes down the engines of today.
///
/// # Errors
/// A file that cannot be written, or a kernel that the verifier refuses.
pub(crate) fn write(root: &Path) -> Result<()> {
    let path = root.join(FILE);
    let mut text = HEAD.to_owned();
    for (engine, Line { version, kernels }) in today()? {
        let _ = writeln!(text, "{engine} {version} {kernels}");
    }
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}

fn today() -> Result<Lines> {
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    verdigris_engines::engines().map(|engine| Ok((engine.id().name.to_owned(), line(engine, &mut known)?))).collect()
}

/// `known` has the hash of each kernel's text, since engines share kernels.
fn line(engine: &dyn Engine, known: &mut BTreeMap<String, String>) -> Result<Line> {
    let mut kernels: BTreeMap<String, String> = BTreeMap::new();
    for (chip, _) in catalog::CHIPS {
        for kernel in engine.catalog(chip) {
            let name = kernel.name().to_owned();
            let Entry::Vacant(unknown) = kernels.entry(name.clone()) else { continue };
            let hash = match known.get(&name) {
                Some(hash) => hash.clone(),
                None => hash_of(&kernel)?,
            };
            known.insert(name, hash.clone());
            unknown.insert(hash);
        }
    }
    let mut hasher = blake3::Hasher::new();
    for (name, hash) in &kernels {
        hasher.update(format!("{name} {hash}\n").as_bytes());
    }
    Ok(Line { version: engine.version(), kernels: short(&hasher.finalize()) })
}

fn hash_of(kernel: &KernelRef) -> Result<String> {
    let verified = verify(kernel.build()).map_err(|fault| anyhow::anyhow!("{fault}"))?;
    Ok(short(&blake3::hash(canonical(&ptx::print(&verified, PTX_ISA)).join("\n").as_bytes())))
}

fn short(hash: &blake3::Hash) -> String {
    hash.to_hex()[..16].to_owned()
}

fn parse(text: &str) -> Result<Lines> {
    let mut lines = Lines::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        let [engine, version, kernels] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            bail!("{FILE}: `{line}` is no engine with its version and a hash");
        };
        let version = version.parse().with_context(|| format!("{FILE}: `{line}`: the version is no number"))?;
        if lines.insert(engine.to_owned(), Line { version, kernels: kernels.to_owned() }).is_some() {
            bail!("{FILE}: {engine} stands there twice");
        }
    }
    Ok(lines)
}

fn compare(then: &Lines, now: &Lines) -> Vec<String> {
    let mut findings = Vec::new();
    for (engine, line) in now {
        let Line { version, kernels } = line;
        match then.get(engine) {
            None => findings.push(format!("{engine}: not in {FILE}; `cargo xtask versions --write`")),
            Some(old) if old == line => {}
            Some(Line { version: old, .. }) if version < old => {
                findings.push(format!("{engine}: version {version} is less than {old}, which choices were measured with; versions only rise"));
            }
            Some(Line { version: old, kernels: before }) if version == old => findings.push(format!(
                "{engine}: its kernels' text changed ({before} then, {kernels} now) under version {version}. If a config now means something else or \
                 runs at another speed, raise the engine's VERSION and measure or drop its rows in crates/verdigris/tuned/tuned.txt; if not, keep it. \
                 Then `cargo xtask versions --write`"
            )),
            Some(Line { version: old, .. }) => {
                findings.push(format!("{engine}: version {version}, {FILE} says {old}; `cargo xtask versions --write`"));
            }
        }
    }
    let gone = then.keys().filter(|engine| !now.contains_key(*engine));
    findings.extend(gone.map(|engine| format!("{engine}: in {FILE}, and no engine any more; `cargo xtask versions --write`")));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_engine_has_its_version_decided() {
        let findings = findings(&crate::tree::workspace_root().expect("the repository")).expect("kernels can be printed");
        assert!(findings.is_empty(), "{}", findings.join("\n"));
    }

    #[test]
    fn a_change_without_a_decision_is_found() {
        let of = |text: &str| parse(text).expect("reads");
        let then = of("# words\n\na 1 aa\nb 2 bb\nc 3 cc\nd 4 dd\n");
        assert_eq!(compare(&then, &then), Vec::<String>::new());
        let findings = compare(&then, &of("a 1 ab\nb 3 bc\nc 2 cc\ne 1 ee\n")).join("\n");
        for told in [
            "a: its kernels' text changed (aa then, ab now) under version 1.",
            "raise the engine's VERSION",
            "b: version 3, crates/verdigris-engines/versions.txt says 2",
            "c: version 2 is less than 3",
            "d: in crates/verdigris-engines/versions.txt, and no engine any more",
            "e: not in crates/verdigris-engines/versions.txt",
        ] {
            assert!(findings.contains(told), "{told}:\n{findings}");
        }
        assert!(parse("a one aa").is_err() && parse("a 1").is_err() && parse("a 1 aa\na 1 aa").is_err());
    }
}
