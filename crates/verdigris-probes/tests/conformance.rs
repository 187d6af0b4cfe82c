//! The probes of instructions on the interpreter, and against direct evaluation.

use std::collections::{BTreeMap, BTreeSet};

use verdigris_kir::inst::{Op, TABLE};
use verdigris_kir::inst_samples::samples;
use verdigris_kir::interp::{Options, alu};
use verdigris_kir::ptx::{Isa, print, read_back};
use verdigris_kir::verify;
use verdigris_probes::conformance::{Check, Column, EXCEPTIONS, probes};

/// Runs every probe whose name starts with a family's word and holds it against itself: no finding, nothing written that no check names.
fn family(prefix: &str) {
    let mut failures = Vec::new();
    let mut ran = 0;
    for probe in probes().iter().filter(|probe| probe.name.starts_with(prefix)) {
        ran += 1;
        let mut before: Option<Vec<Vec<u8>>> = None;
        for seed in 0..3 {
            match probe.interpret(&Options::schedule(seed)) {
                Ok(after) => {
                    if let Some((buffer, at)) = probe.stray_byte(&after) {
                        failures.push(format!("{}: byte {at} of buffer {buffer} changed and no check names it", probe.name));
                    }
                    let unwritten: Vec<_> =
                        probe.checks.iter().filter(|check| is_sentinel(check, &after)).map(|check| &check.what).collect();
                    if !unwritten.is_empty() {
                        failures.push(format!("{}: nothing written for {unwritten:?}", probe.name));
                    }
                    // What depends on the schedule could not be compared with a device either.
                    if before.as_ref().is_some_and(|before| *before != after) {
                        failures.push(format!("{}: schedules disagree", probe.name));
                    }
                    before = Some(after);
                }
                Err(findings) => failures.push(format!("{}: {findings}", probe.name)),
            }
            if let Some(magnitudes) = &probe.magnitudes
                && let Err(findings) = magnitudes.interpret(&Options::schedule(seed))
            {
                failures.push(format!("magnitudes of {}: {findings}", probe.name));
            }
        }
    }
    assert!(ran > 0, "no probe is named {prefix}");
    assert!(failures.is_empty(), "{} failures, such as\n{}", failures.len(), failures[..failures.len().min(8)].join("\n"));
}

/// Whether all of a check's results are what the buffer was filled with.
fn is_sentinel(check: &Check, after: &[Vec<u8>]) -> bool {
    let Column { buffer, offset_bytes, stride_bytes, width_bytes, count } = check.result;
    count > 0
        && (0..count).all(|index| {
            let at = offset_bytes + index * stride_bytes;
            after[buffer][at..at + width_bytes].iter().all(|&byte| byte == 0xA5)
        })
}

macro_rules! families {
    ($($test:ident: $prefix:literal;)*) => { $(
        #[test]
        fn $test() {
            family($prefix);
        }
    )* };
}

families! {
    pure_instructions_run: "pure/";
    loads_and_stores_run: "memory/";
    atomics_run: "atomic/";
    exchange_between_lanes_runs: "lanes/";
    warp_products_run: "mma/";
    warpgroup_products_run: "wgmma/";
    bulk_copies_run: "bulk/";
    tensor_copies_run: "tensor/";
    ordering_and_control_run: "order/";
}

#[test]
fn names_are_unique_and_every_kernel_is_verified_and_reads_back() {
    let mut names = BTreeSet::new();
    let mut faults = Vec::new();
    for probe in probes() {
        assert!(names.insert(probe.name.clone()), "two probes are named {}", probe.name);
        for launch in probe.program.launches() {
            match verify::verify(launch.kernel.build()) {
                Ok(body) => faults.extend(read_back(&body, &print(&body, Isa::V9_0), Isa::V9_0).err().map(|differs| differs.to_string())),
                Err(fault) => faults.push(fault.to_string()),
            }
        }
    }
    assert!(faults.is_empty(), "{} kernels, such as\n{}", faults.len(), faults[..faults.len().min(5)].join("\n"));
}

#[test]
fn every_entry_of_the_table_has_a_probe_or_a_reason() {
    let covered: BTreeSet<&str> = probes().iter().flat_map(|probe| &probe.checks).flat_map(|check| check.names.iter().copied()).collect();
    let excepted: BTreeMap<&str, &str> = EXCEPTIONS.iter().copied().collect();
    let missing: Vec<&str> =
        TABLE.iter().map(|(name, _)| *name).filter(|name| !covered.contains(name) && !excepted.contains_key(name)).collect();
    assert!(missing.is_empty(), "neither probed nor excepted: {missing:?}");
    let stale: Vec<&&str> = excepted.keys().filter(|name| covered.contains(*name)).collect();
    assert!(stale.is_empty(), "excepted and probed: {stale:?}");
    let unknown: Vec<&&str> = covered.iter().chain(excepted.keys()).filter(|name| !TABLE.iter().any(|(entry, _)| entry == *name)).collect();
    assert!(unknown.is_empty(), "not in the table: {unknown:?}");
}

#[test]
fn pure_results_are_those_of_direct_evaluation() {
    let mut compared = 0;
    for probe in probes().iter().filter(|probe| probe.name.starts_with("pure/")) {
        let after = probe.interpret(&Options::default()).unwrap();
        let mut by_text: BTreeMap<String, Op> = BTreeMap::new();
        for sample in samples() {
            by_text.insert(format!("{:?}", sample.op), sample.op);
        }
        for check in &probe.checks {
            let Some(op) = by_text.get(&check.what) else { continue };
            let read = |column: &Column, bytes: &[u8], index: usize| {
                let at = column.offset_bytes + index * column.stride_bytes;
                let mut word = [0; 8];
                word[..column.width_bytes].copy_from_slice(&bytes[at..at + column.width_bytes]);
                u64::from_le_bytes(word)
            };
            // Two warps show that the results come from their own operands and land in their own places.
            for warp in [0, 17] {
                let operands: Vec<alu::Lanes> = check
                    .operands
                    .iter()
                    .map(|column| {
                        let bytes = probe.buffers[column.buffer].to_vec();
                        std::array::from_fn(|lane| read(column, &bytes, 32 * warp + lane))
                    })
                    .collect();
                let refs: Vec<&alu::Lanes> = operands.iter().collect();
                let mut outs = vec![[0; 32]; op.signature().outs.len()];
                alu::eval(op, &refs, u32::MAX, &mut outs, None).unwrap();
                for (lane, direct) in outs[0].iter().enumerate() {
                    assert_eq!(read(&check.result, &after[check.result.buffer], 32 * warp + lane), *direct, "{op:?}");
                }
                compared += 32;
            }
        }
    }
    assert!(compared > 10_000, "{compared}");
}
