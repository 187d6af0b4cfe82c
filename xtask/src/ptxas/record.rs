//! What has passed the assembler and stands in the repository, so that a machine that has assembled nothing yet need not begin with everything.
//!
//! A line is the beginning of a hash of all that decides an outcome ([`super::memory::hash`], of the text [`without_sources`]), so that a text, an allowance or an assembler that changed is not in
//! it. Whoever changes kernels writes it again behind a run in which all of them passed; a share of what stands there is assembled again each day, which
//! finds a line that nothing stands behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::{Assembly, Toolchain, memory};
use crate::canonical::without_sources;

/// Where it stands.
pub(crate) const FILE: &str = "crates/verdigris-engines/assembled.txt";
const HEAD: &str = "\
# Kernels' texts that have passed NVIDIA's assembler, each by the beginning of a hash of the text, of what it is allowed and of the assembler's version.
# `cargo xtask ptxas --record` writes this behind a run in which all passed; `--every N` assembles what is not here, and of the rest an N-th each day.
";
/// Hexadecimal digits of a line: of six thousand texts two have the same in one tree of two hundred and fifty, and a text that changed has another's in one of seven hundred thousand.
const DIGITS: usize = 8;

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Record(BTreeSet<String>);

impl Record {
    /// Those of the repository.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let path = root.join(FILE);
        Self::parse(&fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?)
    }

    fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<BTreeSet<_>>();
        let is_hash = |line: &String| line.len() == DIGITS && line.bytes().all(|byte| byte.is_ascii_hexdigit());
        match lines.iter().find(|line| !is_hash(line)) {
            Some(line) => bail!("{FILE}: `{line}` is no hash of {DIGITS} digits"),
            None => Ok(Record(lines)),
        }
    }

    /// That of these assemblies, which have passed.
    pub(crate) fn of(toolchain: &Toolchain, assemblies: &[Assembly]) -> Self {
        Record(assemblies.iter().map(|assembly| line(toolchain, assembly)).collect())
    }

    /// Writes it in place of what stood there.
    pub(crate) fn write(&self, root: &Path) -> Result<()> {
        let path = root.join(FILE);
        let lines: String = self.0.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
        fs::write(&path, format!("{HEAD}{lines}")).with_context(|| format!("writing {}", path.display()))
    }

    /// What has to be assembled on a day, counted from 1970: all that is not in the record, and one of every `days` that are.
    pub(crate) fn of_the_day(&self, toolchain: &Toolchain, assemblies: Vec<Assembly>, days: u64, day: u64) -> Vec<Assembly> {
        let mut known = 0;
        let mut has_its_turn = |assembly: &Assembly| {
            if !self.0.contains(&line(toolchain, assembly)) {
                return true;
            }
            known += 1;
            (known + day).is_multiple_of(days.max(1))
        };
        assemblies.into_iter().filter(|assembly| has_its_turn(assembly)).collect()
    }
}

/// Without what the assembler does not read: lines of the source that a text names move with every edit above them.
fn line(toolchain: &Toolchain, assembly: &Assembly) -> String {
    let ptx = without_sources(&assembly.ptx).flat_map(|line| [line, "\n"]).collect();
    memory::hash(toolchain, &Assembly { ptx, ..assembly.clone() }).to_hex()[..DIGITS].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assembly(number: u32) -> Assembly {
        Assembly {
            name: format!("kernel{number}"),
            target: "sm_90a".to_owned(),
            ptx: format!(".version 9.0\nmov {number};\n"),
            allow_spill_bytes: 0,
            max_registers: None,
            demands: None,
        }
    }

    #[test]
    fn what_changed_is_assembled_and_the_rest_in_turn() {
        let toolchain = Toolchain::named("ptxas of a test");
        let all: Vec<Assembly> = (0..12).map(assembly).collect();
        let record = Record::of(&toolchain, &all);
        assert_eq!(
            Record::parse(&(HEAD.to_owned() + &record.0.iter().map(|line| format!("{line}\n")).collect::<String>())).expect("reads"),
            record
        );
        let mut turns: Vec<String> = Vec::new();
        for day in 100..104 {
            let today = record.of_the_day(&toolchain, all.clone(), 4, day);
            assert_eq!(today.len(), 3);
            turns.extend(today.into_iter().map(|assembly| assembly.name));
        }
        turns.sort();
        turns.dedup();
        assert_eq!(turns.len(), 12, "each has had its turn");
        // Another text, another allowance and another assembler are not what passed.
        let mut changed = all.clone();
        changed[5].ptx.push_str("ret;\n");
        changed[7].allow_spill_bytes = 8;
        let names: Vec<String> = record.of_the_day(&toolchain, changed, 1 << 40, 100).into_iter().map(|assembly| assembly.name).collect();
        assert_eq!(names, ["kernel5", "kernel7"]);
        assert_eq!(record.of_the_day(&Toolchain::named("another"), all.clone(), 1 << 40, 100).len(), 12);
        assert_eq!(Record::default().of_the_day(&toolchain, all, 4, 100).len(), 12);
        for text in ["12345678\nxyz\n", "1234567\n", "123456789\n"] {
            assert!(Record::parse(text).is_err(), "{text}");
        }
    }
}
