//! Kernels that are right, and kernels with one planted fault each.

mod async_units;
mod halo;
mod matrices;
mod mbarriers;
mod simple;
mod whole_launches;

use super::{FindingKind, Findings, Memory, Options, Report, run_kernel};
use crate::face::{Header, Kernel, build};
use crate::ir::{KernelBody, Target};
use crate::program::{Address, Arg};
use std::cell::Cell;
use std::sync::Arc;

/// Schedules that every kernel here runs under.
const SEEDS: u64 = 18;

/// The line that a fault was planted on.
#[derive(Default)]
struct Plant(Cell<u32>);

/// Notes the line that stands behind it.
macro_rules! plant {
    ($plant:expr) => {
        $plant.0.set(line!() + 1)
    };
}
use plant;

fn kernel(threads: u32, cluster: u32, describe: impl for<'k> FnOnce(Kernel<'k>)) -> KernelBody {
    build(Header { name: "probe".into(), target: Target::Sm90a, threads, min_ctas: 1, cluster }, describe)
}

fn pointer(slot: usize) -> Arg {
    Arg::Pointer(Address::buffer(slot))
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn read_words(memory: &mut Memory, slot: usize) -> Vec<u32> {
    memory.to_vec(slot).chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}

/// Runs a kernel that the verifier may refuse.
fn run_unchecked(body: &KernelBody, ctas: u32, args: &[Arg], memory: &mut Memory, options: &Options) -> Result<Report, Findings> {
    run_kernel(Arc::new(crate::verify::unchecked(body.clone())), [ctas, 1, 1], args.to_vec(), memory, options)
}

/// The kernel is right under every schedule; `check` looks at what it wrote.
fn passes(body: &KernelBody, ctas: u32, args: &[Arg], memory: impl Fn() -> Memory, check: impl Fn(&mut Memory, &Report)) {
    let verified = crate::verify::verify(body.clone()).unwrap_or_else(|faults| panic!("{faults}"));
    let verified = Arc::new(verified);
    for seed in 0..SEEDS {
        let mut memory = memory();
        match run_kernel(Arc::clone(&verified), [ctas, 1, 1], args.to_vec(), &mut memory, &Options::schedule(seed)) {
            Ok(report) => check(&mut memory, &report),
            Err(findings) => panic!("{findings}"),
        }
    }
}

/// The kernel is wrong under every schedule in this way, on the planted line.
fn fails(body: &KernelBody, ctas: u32, args: &[Arg], memory: impl Fn() -> Memory, kind: FindingKind, plant: &Plant) -> Findings {
    let mut last = None;
    for seed in 0..SEEDS {
        let mut memory = memory();
        let options = Options { step_budget: 20_000, ..Options::schedule(seed) };
        let findings = match run_unchecked(body, ctas, args, &mut memory, &options) {
            Ok(_) => panic!("seed {seed}: nothing was found"),
            Err(findings) => findings,
        };
        let first = findings.first();
        assert_eq!(first.kind, kind, "{findings}");
        let line = plant.0.get();
        let lines: Vec<u32> = first.at.iter().take(1).chain(first.second.first()).map(|at| at.line).collect();
        assert!(lines.contains(&line), "planted on line {line}: {findings}");
        last = Some(findings);
    }
    last.expect("at least one schedule")
}
