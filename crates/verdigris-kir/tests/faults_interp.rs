//! Planted faults for the interpreter: each kernel passes the verifier, and goes wrong in one way when its launch says so. The interpreter
//! names the kind, the kernel's own line and the other line involved; the same kernel without the fault runs clean under every schedule.
#![allow(clippy::erasing_op, reason = "a fault that is switched off is its switch times nothing")]
#![allow(clippy::enum_variant_names, reason = "variants are the ways in which the thing named goes wrong")]

mod faults_interp {
    mod clusters;
    mod copies;
    mod grid;
    mod lanes;
    mod launches;
    mod matrices;
    mod memory;
    mod sums;
    mod sync;
    mod uniform;
    mod whole_tile;
}

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use verdigris_kir::face::{Header, Kernel, MbarrierArray, Pointer, Val, build};
use verdigris_kir::interp::{Finding, FindingKind, Findings, Memory, Options, Report, run_kernel};
use verdigris_kir::ir::{KernelBody, Target, Ty};
use verdigris_kir::program::{Address, Arg};
use verdigris_kir::verify::{Verified, verify};

/// Schedules that every kernel runs under.
pub(crate) const SCHEDULES: u64 = 20;
/// Words of the input, each of which holds its own index.
pub(crate) const INPUT_WORDS: u32 = 4096;
/// Bytes of the output, which nothing has written.
pub(crate) const OUTPUT_BYTES: u64 = 16384;

/// The lines that a planted fault is about.
#[derive(Default)]
pub(crate) struct Lines {
    first: Cell<u32>,
    second: Cell<u32>,
}

impl Lines {
    /// The line at fault.
    pub(crate) fn here(&self, line: u32) {
        self.first.set(line);
    }

    /// The other line that the finding must name.
    pub(crate) fn also(&self, line: u32) {
        self.second.set(line);
    }
}

/// A kernel that goes wrong where its launch says so.
#[derive(Clone, Copy)]
pub(crate) struct Planted<'k> {
    pub(crate) k: Kernel<'k>,
    /// [`INPUT_WORDS`] words, each its own index: what is loaded from here is unknown to the verifier.
    pub(crate) x: Pointer<'k>,
    /// [`OUTPUT_BYTES`] bytes that nothing has written.
    pub(crate) y: Pointer<'k>,
    /// 1 where the fault happens, else 0.
    pub(crate) fault: Val<'k, u32>,
}

impl<'k> Planted<'k> {
    /// Runs `body` where the fault does not happen.
    #[track_caller]
    pub(crate) fn unless(&self, body: impl Fn()) {
        self.k.when(self.fault.eq(0u32), body);
    }

    /// Runs `body` where the fault happens.
    #[track_caller]
    pub(crate) fn when(&self, body: impl Fn()) {
        self.k.when(self.fault.ne(0u32), body);
    }

    /// This thread's index in the grid, out of memory: no rule of the verifier knows it.
    #[track_caller]
    pub(crate) fn index(&self) -> Val<'k, u32> {
        let i = self.k.cta() * self.k.threads() + self.k.thread();
        self.k.ld_global::<u32>(self.x.at(i, 4), 0)
    }

    /// An array of mbarriers.
    #[track_caller]
    pub(crate) fn barriers(&self, name: &'static str, count: u32, arrivals: u64) -> MbarrierArray<'k> {
        let barriers = self.k.mbarrier_array(name, count);
        barriers.arrivals().set(arrivals);
        barriers
    }
}

/// How a kernel is launched.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) threads: u32,
    pub(crate) cluster: u32,
    pub(crate) ctas: u32,
    pub(crate) step_budget: u64,
    /// Results are to have the same bits each time.
    pub(crate) ordered_sums: bool,
    /// Arguments behind input, output and fault.
    pub(crate) more: Vec<Arg>,
}

/// One CTA, or one cluster.
pub(crate) fn cta(threads: u32) -> Setup {
    Setup { threads, cluster: 1, ctas: 1, step_budget: 100_000, ordered_sums: false, more: Vec::new() }
}

/// One cluster of CTAs.
pub(crate) fn cluster(ctas: u32, threads: u32) -> Setup {
    Setup { cluster: ctas, ctas, ..cta(threads) }
}

impl Setup {
    pub(crate) fn ctas(self, ctas: u32) -> Self {
        Setup { ctas, ..self }
    }

    pub(crate) fn steps(self, step_budget: u64) -> Self {
        Setup { step_budget, ..self }
    }

    pub(crate) fn ordered_sums(self) -> Self {
        Setup { ordered_sums: true, ..self }
    }

    pub(crate) fn with(mut self, arg: Arg) -> Self {
        self.more.push(arg);
        self
    }
}

/// How often schedules show a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shows {
    /// Under every schedule.
    Always,
    /// Under some of 100 schedules; others pass, or find one of the kinds named beside it.
    Sometimes,
}

pub(crate) struct Planting {
    setup: Setup,
    body: Arc<Verified<KernelBody>>,
    lines: Lines,
}

pub(crate) fn input() -> Vec<u8> {
    (0..INPUT_WORDS).flat_map(u32::to_le_bytes).collect()
}

pub(crate) fn memory() -> Memory {
    let mut memory = Memory::new();
    memory.add(&input());
    memory.add_unwritten(OUTPUT_BYTES);
    memory
}

pub(crate) fn words(memory: &mut Memory, slot: usize, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; 4 * count];
    memory.read(slot, 0, &mut bytes);
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}

/// Builds and verifies a kernel.
#[track_caller]
pub(crate) fn plant(setup: Setup, describe: impl for<'k> Fn(Planted<'k>, &Lines)) -> Planting {
    let lines = Lines::default();
    let header = Header { name: "planted".into(), target: Target::Sm90a, threads: setup.threads, min_ctas: 1, cluster: setup.cluster };
    let body = build(header, |k| {
        let x = k.input("x", 128);
        let y = k.in_out("y", 128);
        let fault = k.scalar::<u32>("fault");
        describe(Planted { k, x, y, fault }, &lines);
    });
    let body = verify(body).unwrap_or_else(|faults| panic!("the verifier should leave this to the interpreter: {faults}"));
    Planting { setup, body: Arc::new(body), lines }
}

impl Planting {
    pub(crate) fn run(&self, fault: bool, seed: u64, memory: &mut Memory) -> Result<Report, Findings> {
        let pointer = |slot| Arg::Pointer(Address::buffer(slot));
        let mut args = vec![pointer(0), pointer(1), Arg::Scalar(Ty::U32, u64::from(fault))];
        args.extend(self.setup.more.iter().cloned());
        let Setup { step_budget, ordered_sums, .. } = self.setup;
        let options = Options { step_budget, ordered_sums, ..Options::schedule(seed) };
        run_kernel(Arc::clone(&self.body), [self.setup.ctas, 1, 1], args, memory, &options)
    }

    /// Without its fault the kernel runs clean under every schedule.
    #[track_caller]
    pub(crate) fn clean(&self, check: impl Fn(&mut Memory)) {
        for seed in 0..SCHEDULES {
            let mut memory = memory();
            if let Err(findings) = self.run(false, seed, &mut memory) {
                panic!("false finding: {findings}");
            }
            check(&mut memory);
        }
    }

    /// The finding, of one of the kinds, on the lines that were planted.
    #[track_caller]
    fn check(&self, findings: &Findings, kinds: &[FindingKind], said: &[&str]) -> Finding {
        let finding = findings.first();
        assert!(kinds.contains(&finding.kind), "expected {kinds:?}: {findings}");
        if finding.kind != kinds[0] {
            return finding.clone();
        }
        for word in said {
            assert!(finding.message.contains(word), "{word:?} is not in {findings}");
        }
        let (first, second) = (self.lines.first.get(), self.lines.second.get());
        let own = finding.at.first().unwrap_or_else(|| panic!("no line in {findings}"));
        assert!(own.file.contains("faults_interp"), "the kernel's own file comes first: {findings}");
        if finding.kind == FindingKind::Deadlock && first != 0 {
            // Any of those that wait may be told first; the message names them all.
            assert!(finding.message.contains(&format!(":{first}:")), "line {first} is not in {findings}");
            return finding.clone();
        }
        let (own, other) = (own.line, finding.second.first().map(|at| at.line));
        // Which of two accesses that nothing orders comes last is the schedule's choice.
        let either = matches!(finding.kind, FindingKind::Race | FindingKind::UnorderedSums | FindingKind::NonCoherent) && second != 0;
        if either && other == Some(first) {
            assert_eq!(own, second, "{findings}");
            return finding.clone();
        }
        if first != 0 {
            assert_eq!(own, first, "{findings}");
        }
        if second != 0 {
            assert_eq!(other, Some(second), "{findings}");
        }
        finding.clone()
    }

    /// With its fault every schedule finds the first of the kinds; the last finding.
    #[track_caller]
    pub(crate) fn faulty(&self, shows: Shows, kinds: &[FindingKind], said: &[&str]) -> Finding {
        let mut last = None;
        let mut seen = BTreeSet::new();
        for seed in 0..if shows == Shows::Always { SCHEDULES } else { 100 } {
            match self.run(true, seed, &mut memory()) {
                Ok(_) if shows == Shows::Sometimes => {}
                Ok(_) => panic!("schedule {seed} found nothing, expected {kinds:?}"),
                Err(findings) => {
                    let finding = self.check(&findings, kinds, said);
                    seen.insert(finding.kind);
                    if finding.kind == kinds[0] {
                        last = Some(finding);
                    }
                }
            }
        }
        last.unwrap_or_else(|| panic!("no schedule found {:?}: {seen:?}", kinds[0]))
    }
}

/// Clean without the fault, and found under every schedule with it.
#[track_caller]
pub(crate) fn caught(kind: FindingKind, said: &[&str], setup: Setup, describe: impl for<'k> Fn(Planted<'k>, &Lines)) -> Finding {
    let planting = plant(setup, describe);
    planting.clean(|_| {});
    planting.faulty(Shows::Always, &[kind], said)
}

/// Clean without the fault; with it some schedule finds the first of the kinds, and no schedule finds another than these.
#[track_caller]
pub(crate) fn caught_sometimes(
    kinds: &[FindingKind],
    said: &[&str],
    setup: Setup,
    describe: impl for<'k> Fn(Planted<'k>, &Lines),
) -> Finding {
    let planting = plant(setup, describe);
    planting.clean(|_| {});
    planting.faulty(Shows::Sometimes, kinds, said)
}

#[test]
fn every_word_stands_on_the_page_of_findings() {
    let page = include_str!("../../../docs/faults.md");
    let (rules, findings) = page.split_once("## The interpreter").expect("two tables");
    let stands = |table: &str, word: &str| table.lines().filter(|line| line.starts_with(&format!("| `{word}` |"))).count() == 1;
    for kind in FindingKind::ALL {
        assert!(stands(findings, kind.word()), "{kind} is not in docs/faults.md");
    }
    let head = include_str!("../src/verify/mod.rs");
    let words: Vec<&str> = head.lines().filter_map(|line| line.strip_prefix("//! - `[")?.split(']').next()).collect();
    assert!(words.len() > 30, "{words:?}");
    for word in words {
        assert!(stands(rules, word), "{word} is not in docs/faults.md");
    }
}
