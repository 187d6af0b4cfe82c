//! Barriers of a whole grid that are wrong in one way: in the kernel, or in what is launched around it.

use super::launches::{kernel, launch, pointer};
use crate::{OUTPUT_BYTES, SCHEDULES, memory, words};
use std::cell::Cell;
use verdigris_kir::inst::{Atomic, Cache, Fence, Order, Scope, Special};
use verdigris_kir::interp::{FindingKind, Kernels, Options, run};
use verdigris_kir::ir::KernelBody;
use verdigris_kir::program::{Address, Arg, Program, Residency, Step};

/// As many as the device of the schedules has SMs.
const CTAS: u32 = 4;
const ROUNDS: u32 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wrong {
    Nothing,
    /// One CTA does not arrive in the last round.
    ArrivalMissing,
    /// One CTA does not come to the barrier at all.
    SomeOnly,
    /// The arrival releases nothing.
    RelaxedArrival,
    /// Who has seen enough arrivals acquires nothing.
    RelaxedWait,
    /// Each round waits for the arrivals of the round before.
    StaleGeneration,
    /// The leader arrives before the other warps of its CTA have written.
    ArrivesAhead,
    /// The counter starts where the launch before left it.
    NotReset,
    /// More CTAs than the device holds at once.
    TooMany,
}

/// In each round every CTA writes its part, all meet, and every CTA reads its neighbour's part of that round.
fn rounds(wrong: Wrong, read: &Cell<u32>) -> KernelBody {
    kernel("rounds", 64, 1, |k| {
        let (y, counter) = (k.in_out("y", 4), k.in_out("counter", 4).address());
        let ctas = k.special(Special::GridX);
        let is_last = (k.cta() + 1u32).eq(ctas);
        k.range(ROUNDS, |round| {
            let part = |cta| y.at((round * ctas + cta) * 64u32 + (k.thread() ^ 32u32), 4);
            k.st_global(y.at((round * ctas + k.cta()) * 64u32 + k.thread(), 4), 0, k.cta());
            if wrong != Wrong::ArrivesAhead {
                k.bar_sync();
            }
            let leads = k.thread().eq(0u32);
            let comes = if wrong == Wrong::SomeOnly { leads & !is_last } else { leads };
            k.when(comes, || {
                let order = if wrong == Wrong::RelaxedArrival { Order::Relaxed(Scope::Gpu) } else { Order::Release(Scope::Gpu) };
                let arrive = || k.red_global(Atomic::Add, counter, 0, &[k.constant(1u32)], order);
                match wrong {
                    Wrong::ArrivalMissing => k.when(!is_last | (round + 1u32).lt(ROUNDS), arrive),
                    _ => arrive(),
                }
                let turns = if wrong == Wrong::StaleGeneration { round } else { round + 1u32 };
                k.repeat_until(|| k.ld_global_with::<u32>(counter, 0, Order::Relaxed(Scope::Gpu), Cache::Default).ge(turns * ctas));
                if wrong != Wrong::RelaxedWait {
                    k.fence(Fence::AcqRel(Scope::Gpu));
                }
            });
            k.bar_sync();
            let next = k.select(is_last, 0u32, k.cta() + 1u32);
            read.set(line!() + 1);
            let value = k.ld_global::<u32>(part(next), 0);
            k.st_global(y.at((round * ctas + k.cta()) * 64u32 + k.thread(), 4), 8192, value);
        });
    })
}

fn program(wrong: Wrong, read: &Cell<u32>) -> Program {
    let body = rounds(wrong, read);
    let mut program = Program::default();
    let counter = program.add_scratch("counter", 4);
    let ctas = if wrong == Wrong::TooMany { CTAS + 1 } else { CTAS };
    let meet = launch(&body, ctas, false, Residency::All, &[pointer(1), Arg::Pointer(counter)]);
    let reset = Step::Fill { at: counter, bytes: 4, value: 0 };
    // Old numbers in the output, so that reading too early is a race and nothing else.
    program.steps = vec![Step::Fill { at: Address::buffer(1), bytes: OUTPUT_BYTES, value: 0xEE }, reset.clone(), meet.clone()];
    if wrong != Wrong::NotReset {
        program.steps.push(reset);
    }
    program.steps.push(meet);
    program
}

#[test]
fn barriers_of_a_grid() {
    for (wrong, kind, said) in [
        (Wrong::ArrivalMissing, FindingKind::Timeout, "a wait for something that never comes"),
        // Who does not come reads too early, before the others have waited long enough to be told.
        (Wrong::SomeOnly, FindingKind::Race, "nothing orders the two"),
        (Wrong::RelaxedArrival, FindingKind::Race, "nothing orders the two"),
        (Wrong::RelaxedWait, FindingKind::Race, "nothing orders the two"),
        (Wrong::StaleGeneration, FindingKind::Race, "nothing orders the two"),
        (Wrong::ArrivesAhead, FindingKind::Race, "nothing orders the two"),
        (Wrong::NotReset, FindingKind::Race, "nothing orders the two"),
        (Wrong::TooMany, FindingKind::Launch, "CTA"),
    ] {
        let read = Cell::new(0);
        let program = program(wrong, &read);
        for seed in 0..SCHEDULES {
            let options = Options { step_budget: 5_000, ..Options::schedule(seed) };
            let findings = match run(&program, &Kernels::new(), &mut memory(), &options) {
                Ok(_) => panic!("{wrong:?}: schedule {seed} found nothing"),
                Err(findings) => findings,
            };
            let first = findings.first();
            assert!(first.kind == kind && first.message.contains(said), "{wrong:?}: {findings}");
            let lines: Vec<u32> = first.at.iter().take(1).chain(first.second.first()).map(|at| at.line).collect();
            assert!(kind != FindingKind::Race || lines.contains(&read.get()), "{wrong:?}, line {}: {findings}", read.get());
        }
    }
}

#[test]
fn a_barrier_of_a_grid_that_holds() {
    let program = program(Wrong::Nothing, &Cell::new(0));
    for seed in 0..SCHEDULES {
        let mut memory = memory();
        if let Err(findings) = run(&program, &Kernels::new(), &mut memory, &Options::schedule(seed)) {
            panic!("false finding: {findings}");
        }
        let all = words(&mut memory, 1, OUTPUT_BYTES as usize / 4);
        for part in 0..(ROUNDS * CTAS) as usize {
            assert_eq!(all[2048 + 64 * part..][..64], [(part as u32 + 1) % CTAS; 64]);
        }
    }
}
