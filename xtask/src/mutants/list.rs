//! The mutants as data: what stands in `mutants/*.toml`, and what each file has to keep.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::tree::Tree;

/// Where the lists stand, one file for each family.
pub(super) const FOLDER: &str = "mutants/";

/// Crates that can ask which mutant is on: the one that knows, and those above it.
const CRATES: &[&str] = &["verdigris-kir", "verdigris-engines", "verdigris-probes", "verdigris", "verdigris-workshop"];

/// Everything under `mutants/`.
#[derive(Debug, Default)]
pub(super) struct List {
    pub(super) mutants: Vec<Mutant>,
    pub(super) not_const: Vec<NotConst>,
}

/// A mistake that can be switched on.
#[derive(Clone, Debug)]
pub(super) struct Mutant {
    /// `FILE/NAME`, the file without its ending.
    pub(super) id: String,
    /// What the planted text asks for; follows from the id.
    pub(super) number: u64,
    pub(super) run: Run,
    pub(super) entry: Entry,
}

/// A mutant as it is written down.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    name: String,
    /// The source that has the mistake.
    pub(super) file: String,
    /// A text that stands once in the source: `find` is what comes first behind it.
    #[serde(default)]
    pub(super) after: Option<String>,
    /// An expression, or whole statements with their semicolon; stands once in the source, or is looked for behind `after`.
    pub(super) find: String,
    /// What takes its place.
    pub(super) replace: String,
    /// The mistake in words.
    pub(super) mistake: String,
    /// What may find it: rules of the verifier and of the interpreter, `numbers`, `determinism`, `refusal`, `bounds`, `panic`, `hang`, `text` or
    /// `test`.
    pub(super) expect: BTreeSet<String>,
    run: NamedRun,
    /// Why it is no mistake.
    #[serde(default)]
    pub(super) equivalent: Option<String>,
    /// Why nothing finds it.
    #[serde(default)]
    pub(super) survives: Option<String>,
    /// The mistakes of the [`super::review`] that it is, by number.
    #[serde(default)]
    pub(super) review: BTreeSet<u32>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum NamedRun {
    Name(String),
    Run(Run),
}

/// What is run to find a mutant: one of `verify`, `catalog` and `test`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Run {
    /// `workshop verify` with this filter of cases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) verify: Option<String>,
    /// `workshop verify --catalog`, of this engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) catalog: Option<String>,
    /// With `verify`: only this engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) engine: Option<String>,
    /// With both: only what launches a kernel whose name contains this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kernel: Option<String>,
    /// With `verify`: every setting.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) all: bool,
    /// The test program of this name in `package`; `lib` for its unit tests, `bin` for those of a program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) test: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) package: Option<String>,
    /// With `test`: only tests whose name contains this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    /// With `test`: what a failed test shows, where that is another thing than `test`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) shows: Option<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands it on so")]
fn is_false(value: &bool) -> bool {
    !value
}

/// A constant function that holds mutants: in the copy it is none, for what a constant is cannot depend on the mutant that is on.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NotConst {
    pub(super) file: String,
    /// The head of one function or several, from the word `const` on.
    pub(super) find: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    not_const: Vec<NotConst>,
    #[serde(default)]
    runs: BTreeMap<String, Run>,
    #[serde(default)]
    mutant: Vec<Entry>,
}

impl Run {
    /// Whether it depends on a seed, and so is run under several.
    pub(super) fn has_seed(&self) -> bool {
        self.test.is_none()
    }

    /// Whether what it runs takes a compilation of its own of a crate that is large: unit tests of the engines do, which is minutes, and those of a program.
    pub(super) fn compiles_much_again(&self) -> bool {
        self.test.as_deref() == Some("bin") || (self.package.as_deref() == Some("verdigris-engines") && self.test.as_deref() == Some("lib"))
    }

    fn check(&self) -> Result<()> {
        let kinds = [&self.verify, &self.catalog, &self.test].iter().filter(|kind| kind.is_some()).count();
        ensure!(kinds == 1, "a run has one of `verify`, `catalog` and `test`, and this has {kinds}");
        ensure!(self.test.is_some() == self.package.is_some(), "`test` and `package` come together");
        ensure!(self.test.is_some() || (self.name.is_none() && self.shows.is_none()), "`name` and `shows` belong to `test`");
        ensure!(self.verify.is_some() || (self.engine.is_none() && !self.all), "`engine` and `all` belong to `verify`");
        ensure!(self.test.is_none() || self.kernel.is_none(), "`kernel` does not belong to `test`");
        Ok(())
    }

    /// In one line.
    pub(super) fn words(&self) -> String {
        let given = |word: &str, value: &Option<String>| value.as_ref().map(|value| format!("{word}{value}"));
        let parts = [
            given("verify ", &self.verify),
            given("verify --catalog --engine ", &self.catalog),
            given("--engine ", &self.engine),
            given("--kernel ", &self.kernel),
            self.all.then(|| "--all".to_owned()),
            given("test ", &self.package),
            given("", &self.test),
            given("", &self.name),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }
}

impl List {
    /// Reads every list of the tree.
    ///
    /// # Errors
    /// A list that cannot be read, or a mutant that lacks something; with the file and the mutant.
    pub(super) fn read(tree: &Tree) -> Result<List> {
        let mut list = List::default();
        for (path, text) in tree.files() {
            let Some(family) = path.strip_prefix(FOLDER).and_then(|name| name.strip_suffix(".toml")) else { continue };
            let file: File = toml::from_str(text).with_context(|| format!("reading {path}"))?;
            let mut used = BTreeSet::new();
            for entry in file.mutant {
                let id = format!("{family}/{}", entry.name);
                let mutant = of_entry(id, entry, &file.runs, &mut used);
                list.mutants.push(mutant.with_context(|| format!("reading {path}"))?);
            }
            if let Some(unused) = file.runs.keys().find(|name| !used.contains(*name)) {
                bail!("reading {path}: no mutant names the run `{unused}`");
            }
            list.not_const.extend(file.not_const);
        }
        let mut numbers = BTreeMap::new();
        for mutant in &list.mutants {
            if let Some(other) = numbers.insert(mutant.number, &mutant.id) {
                bail!("the mutants {other} and {} have one number; give one of them another name", mutant.id);
            }
        }
        Ok(list)
    }
}

fn of_entry(id: String, entry: Entry, runs: &BTreeMap<String, Run>, used: &mut BTreeSet<String>) -> Result<Mutant> {
    let say = || format!("mutant {id}");
    let run = match &entry.run {
        NamedRun::Run(run) => run.clone(),
        NamedRun::Name(name) => {
            used.insert(name.clone());
            runs.get(name).with_context(|| format!("mutant {id}: there is no run `{name}`"))?.clone()
        }
    };
    run.check().with_context(say)?;
    ensure!(entry.find != entry.replace, "mutant {id}: `find` and `replace` are the same");
    ensure!(!entry.find.trim_start().starts_with("let "), "mutant {id}: a `let` cannot be mutated; choose its expression");
    ensure!(entry.equivalent.is_none() || entry.survives.is_none(), "mutant {id}: `equivalent` and `survives` exclude each other");
    let is_marked = entry.equivalent.is_some() || entry.survives.is_some();
    ensure!(is_marked || !entry.expect.is_empty(), "mutant {id}: `expect` names nothing that may find it");
    ensure!(!entry.mistake.is_empty(), "mutant {id}: `mistake` is empty");
    switch_of(&entry.file).with_context(say)?;
    Ok(Mutant { number: number_of(&id), id, run, entry })
}

/// What asks for the mutant in a source: the path of the function.
pub(super) fn switch_of(file: &str) -> Result<&'static str> {
    let name = file.strip_prefix("crates/").and_then(|rest| rest.split_once("/src/")).map(|(name, _)| name);
    match name {
        Some("verdigris-kir") => Ok("crate::mutant::is"),
        Some(name) if CRATES.contains(&name) => Ok("verdigris_kir::mutant::is"),
        _ => bail!("{file} is in no crate that can ask which mutant is on: {}", CRATES.join(", ")),
    }
}

/// The number of a mutant: a hash of its id, so that another mutant more leaves the rest of the copy as it was. Never 0, which is none.
fn number_of(id: &str) -> u64 {
    let hash = blake3::hash(id.as_bytes());
    let bytes: [u8; 8] = std::array::from_fn(|i| hash.as_bytes()[i]);
    u64::from_le_bytes(bytes) >> 16 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "[runs.small]\nverify = \"gemm/\"\n[[mutant]]\nname = \"one\"\nfile = \"crates/verdigris-kir/src/a.rs\"\n\
                         find = \"1\"\nreplace = \"2\"\nmistake = \"two for one\"\nexpect = [\"numbers\"]\nrun = \"small\"\n";

    fn read(text: &str) -> Result<List> {
        List::read(&Tree::of(&[("mutants/family.toml", text), ("mutants/notes.md", "no list")]))
    }

    #[test]
    fn a_list_is_read() {
        let list = read(PLAIN).expect("reads");
        assert_eq!(list.mutants.len(), 1);
        let mutant = &list.mutants[0];
        assert_eq!((mutant.id.as_str(), mutant.run.words().as_str()), ("family/one", "verify gemm/"));
        assert!(mutant.number != 0 && mutant.run.has_seed());
    }

    #[test]
    fn what_a_mutant_lacks_is_told() {
        let told = |text: &str| format!("{:#}", read(text).expect_err("is refused"));
        assert!(told(&PLAIN.replace("run = \"small\"", "run = \"large\"")).contains("family/one: there is no run `large`"));
        assert!(told(&PLAIN.replace("\"2\"", "\"1\"")).contains("`find` and `replace` are the same"));
        assert!(told(&PLAIN.replace("[\"numbers\"]", "[]")).contains("`expect` names nothing"));
        assert!(told(&PLAIN.replace("verify = \"gemm/\"", "kernel = \"x\"")).contains("has one of `verify`, `catalog` and `test`"));
        assert!(told(&PLAIN.replace("verdigris-kir", "verdigris-tensor")).contains("is in no crate that can ask"));
        assert!(told(&PLAIN.replace("find = \"1\"", "find = \"let x = 1;\"")).contains("a `let` cannot be mutated"));
        assert!(told(&PLAIN.replace("mistake", "mystery")).contains("reading mutants/family.toml"));
        assert!(told(&format!("{PLAIN}[runs.other]\ncatalog = \"gemm.simt\"\n")).contains("no mutant names the run `other`"));
        let both = PLAIN.split_once("[[mutant]]").expect("has one").1;
        assert!(told(&format!("{PLAIN}[[mutant]]{both}")).contains("have one number"));
    }
}
