//! Float sums into one place, where results are to have the same bits each time.

use super::launches::{kernel, launch, pointer};
use crate::{Lines, Planted, SCHEDULES, caught, caught_sometimes, cluster, cta, memory, plant};
use verdigris_kir::face::Val;
use verdigris_kir::inst::{Atomic, BulkReduce, Order, Scope};
use verdigris_kir::interp::FindingKind::UnorderedSums;
use verdigris_kir::interp::{Kernels, Options, run};
use verdigris_kir::ir::Ty;
use verdigris_kir::program::{Arg, Program, Residency, Step};

const SAID: &[&str] = &["added to by", "nothing orders the two: rounding depends on which comes first"];
const RELAXED: Order = Order::Relaxed(Scope::Gpu);

/// Zeros in the first 128 words of the output, which one CTA has written.
fn zeros(p: Planted<'_>) {
    p.k.st_global(p.y.at(p.k.thread() & 127u32, 4), 0, p.k.constant(0.0f32));
    p.k.bar_sync();
}

fn one(p: Planted<'_>) -> [Val<'_, f32>; 1] {
    [p.index().to_f32()]
}

#[test]
fn lanes_add_to_one_place() {
    caught(UnorderedSums, SAID, cta(32).ordered_sums(), |p, lines| {
        zeros(p);
        let own = p.index() * (p.fault ^ 1u32);
        lines.here(line!() + 2);
        lines.also(line!() + 1);
        p.k.red_global(Atomic::Add, p.y.at(own, 4), 0, &one(p), RELAXED);
    });
}

#[test]
fn warps_add_in_no_order() {
    caught(UnorderedSums, SAID, cta(64).ordered_sums(), |p, lines| {
        let k = p.k;
        zeros(p);
        let lane = k.thread() & 31u32;
        let add = |warp: u32| {
            k.when((k.thread() >> 5).eq(warp), || k.red_global(Atomic::Add, p.y.at(lane, 4), 0, &one(p), RELAXED));
        };
        lines.also(line!() - 2);
        lines.here(line!() - 3);
        add(1);
        p.unless(|| k.bar_sync());
        add(0);
    });
}

#[test]
fn what_was_added_to_shared_memory_in_no_order_is_read() {
    caught(
        UnorderedSums,
        &["of shared sum here, floats that were added up in no order, the last one by"],
        cta(64).ordered_sums(),
        |p, lines| {
            let k = p.k;
            let sum = k.shared("sum", 128, 16);
            let place = sum.address() + (k.thread() & 31u32) * 4u32;
            let add = || _ = k.atom_shared::<f32>(Atomic::Add, place, 0, one(p)[0], RELAXED);
            k.when(k.thread().lt(32u32), || k.st_shared(place, 0, k.constant(0.0f32)));
            k.bar_sync();
            k.when(k.thread().lt(32u32), add);
            p.unless(|| k.bar_sync());
            k.when(k.thread().ge(32u32), add);
            k.bar_sync();
            lines.here(line!() + 1);
            let value = k.ld_shared::<f32>(place, 0);
            k.st_global(p.y.at(k.thread(), 4), 0, value);
        },
    );
}

/// Nobody reads what was added up: it is in no result.
#[test]
fn sums_that_nobody_reads_need_no_order() {
    let planting = plant(cta(64).ordered_sums(), |p, _| {
        let k = p.k;
        let sum = k.shared("sum", 128, 16);
        let place = sum.address() + (k.thread() & 31u32) * 4u32;
        k.when(k.thread().lt(32u32), || k.st_shared(place, 0, k.constant(0.0f32)));
        k.bar_sync();
        let _ = k.atom_shared::<f32>(Atomic::Add, place, 0, one(p)[0], RELAXED);
        k.bar_sync();
        k.when(k.thread().lt(32u32), || k.st_shared(place, 0, k.constant(1.0f32)));
        k.bar_sync();
        let value = k.ld_shared::<f32>(place, 0);
        k.st_global(p.y.at(k.thread(), 4), 0, value);
    });
    planting.clean(|_| {});
}

#[test]
fn ctas_of_a_cluster_add_in_no_order() {
    caught(UnorderedSums, SAID, cluster(2, 32).ordered_sums(), |p, lines| {
        let k = p.k;
        let rank = k.cluster_rank();
        k.when(rank.eq(0u32), || k.st_global(p.y.at(k.thread(), 4), 0, k.constant(0.0f32)));
        k.cluster_sync();
        lines.also(line!() + 1);
        k.when(rank.eq(0u32), || k.red_global(Atomic::Add, p.y.at(k.thread(), 4), 0, &one(p), RELAXED));
        p.unless(|| k.cluster_sync());
        lines.here(line!() + 1);
        k.when(rank.eq(1u32), || k.red_global(Atomic::Add, p.y.at(k.thread(), 4), 0, &one(p), RELAXED));
    });
}

/// Whoever counts last adds as well, and only the first CTA has added before: a count that acquires nothing does not order the two.
#[test]
fn the_last_cta_adds_behind_a_relaxed_count() {
    caught_sometimes(&[UnorderedSums], SAID, cta(32).ctas(2).ordered_sums(), |p, lines| {
        let k = p.k;
        let leads = || k.thread().eq(0u32);
        let (sum, count) = (p.x.at(0u32, 4), p.x.at(64u32, 4));
        lines.also(line!() + 1);
        k.when(leads() & k.cta().eq(0u32), || k.red_global(Atomic::Add, sum, 0, &one(p), RELAXED));
        let counted = |order| k.atom_global::<u32>(Atomic::Add, count, 0, 1u32, order);
        let last = k.var(0u32);
        k.when(leads(), || {
            p.unless(|| last.set(counted(Order::AcqRel(Scope::Gpu))));
            p.when(|| last.set(counted(RELAXED)));
        });
        lines.here(line!() + 1);
        k.when(leads() & k.cta().eq(1u32) & last.get().eq(65u32), || k.red_global(Atomic::Add, sum, 0, &one(p), RELAXED));
    });
}

/// Copies that add, one behind the other: the first has been added when it has been waited for, not when its source has been read.
fn copies<'k>(p: Planted<'k>, lines: &Lines) {
    let k = p.k;
    zeros(p);
    let tile = k.shared("tile", 128, 128);
    k.st_shared(tile.address() + k.thread() * 4u32, 0, one(p)[0]);
    k.fence_proxy_async();
    k.bar_sync();
    k.when(k.thread().eq(0u32), || {
        lines.also(line!() + 1);
        k.bulk_reduce(BulkReduce::Add, Ty::F32, p.y.address(), tile.address(), 128u32);
        k.bulk_commit();
        p.unless(|| k.bulk_wait(0));
        p.when(|| k.bulk_wait_read(0));
        lines.here(line!() + 1);
        k.bulk_reduce(BulkReduce::Add, Ty::F32, p.y.address(), tile.address(), 128u32);
        k.bulk_commit();
        k.bulk_wait(0);
    });
}

#[test]
fn a_copy_adds_before_the_one_in_front_has_added() {
    caught(UnorderedSums, SAID, cta(32).ordered_sums(), copies);
}

/// Nobody asks for the same bits; or what is added are integers, or the greatest is kept: no order is asked for.
#[test]
fn sums_that_need_no_order() {
    let free = plant(cta(32), copies);
    let integers = plant(cta(64).ordered_sums(), |p, _| {
        let k = p.k;
        zeros(p);
        k.red_global(Atomic::Add, p.y.address(), 0, &[k.thread()], RELAXED);
        k.red_global(Atomic::Max, p.y.moved(k.constant(64u64)).address(), 0, &[k.thread().signed()], RELAXED);
    });
    for (planting, seed) in [&free, &integers].into_iter().flat_map(|planting| (0..SCHEDULES).map(move |seed| (planting, seed))) {
        if let Err(findings) = planting.run(true, seed, &mut memory()) {
            panic!("false finding: {findings}");
        }
    }
    assert!(
        matches!(plant(cta(32).ordered_sums(), copies).run(true, 0, &mut memory()), Err(findings) if findings.first().kind == UnorderedSums)
    );
}

/// Scratch: what several CTAs add there in no order is a fault where a launch behind reads it, also if one behind them adds alone, unless it is filled anew before.
#[test]
fn scratch_that_is_read_and_scratch_that_is_filled_anew() {
    let adds = kernel("adds", 32, 1, |k| {
        let sum = k.in_out("sum", 4);
        k.red_global(Atomic::Add, sum.at(k.thread(), 4), 0, &[k.cta().to_f32()], RELAXED);
    });
    let reads = kernel("reads", 32, 1, |k| {
        let (sum, y) = (k.input("sum", 4), k.output("y", 4));
        let value = k.ld_global::<f32>(sum.at(k.thread(), 4), 0);
        k.st_global(y.at(k.thread(), 4), 0, value);
    });
    for (is_read, is_filled, is_added_to) in [(true, false, false), (true, true, false), (false, false, false), (true, false, true)] {
        let mut program = Program::default();
        let sum = program.add_scratch("sum", 128);
        let fill = Step::Fill { at: sum, bytes: 128, value: 0 };
        program.steps = vec![fill.clone(), launch(&adds, 3, false, Residency::Any, &[Arg::Pointer(sum)])];
        program.steps.extend(is_filled.then_some(fill));
        program.steps.extend(is_added_to.then(|| launch(&adds, 1, false, Residency::Any, &[Arg::Pointer(sum)])));
        program.steps.extend(is_read.then(|| launch(&reads, 1, false, Residency::Any, &[Arg::Pointer(sum), pointer(1)])));
        for seed in 0..SCHEDULES {
            let options = Options { ordered_sums: true, ..Options::schedule(seed) };
            match (run(&program, &Kernels::new(), &mut memory(), &options), is_read && !is_filled) {
                (Ok(_), false) => {}
                (Err(findings), true) => {
                    let first = findings.first();
                    assert!(
                        first.kind == UnorderedSums && first.message.contains("scratch sum here, floats that were added up in no order"),
                        "{findings}"
                    );
                    assert!(first.second.len() == 1, "{findings}");
                }
                (ran, _) => panic!("read {is_read}, filled {is_filled}, added to {is_added_to}: {ran:?}"),
            }
        }
    }
}
