use crate::{caught, clean, header, product};
use verdigris_kir::face::{Role, Val, WgmmaA, build};
use verdigris_kir::ir::Target;
use verdigris_kir::verify::{Uniformity, uniformity};

#[test]
fn the_cta_barrier_under_a_lane_condition() {
    caught("divergent", &["CtaSync", "the whole CTA", "differs between lanes"], header(Target::Sm80, 128), |k, lines| {
        lines.also(line!() + 1);
        k.when(k.lane().lt(16u32), || {
            lines.here(line!() + 1);
            k.bar_sync();
        });
    });
}

#[test]
fn the_cta_barrier_under_a_warp_condition() {
    caught("divergent", &["CtaSync", "differs between its warps"], header(Target::Sm80, 128), |k, lines| {
        lines.also(line!() + 1);
        k.when(k.warp().eq(0u32), || {
            lines.here(line!() + 1);
            k.bar_sync();
        });
    });
}

#[test]
fn the_cta_barrier_in_the_bounds_check() {
    caught("divergent", &["CtaSync"], header(Target::Sm80, 128), |k, lines| {
        let elements = k.scalar::<u32>("elements");
        let i = k.cta() * 128u32 + k.thread();
        lines.also(line!() + 1);
        k.when(i.lt(elements), || {
            lines.here(line!() + 1);
            k.bar_sync();
        });
    });
}

#[test]
fn a_shuffle_under_a_lane_condition() {
    caught("divergent", &["Shfl", "the whole warp"], header(Target::Sm80, 128), |k, lines| {
        let value = k.lane() * 3u32;
        k.when(k.lane().lt(16u32), || {
            lines.here(line!() + 1);
            let _ = k.shfl_bfly::<u32>(value, 1);
        });
    });
}

#[test]
fn an_election_by_one_lane() {
    caught("divergent", &["Elect"], header(Target::Sm90, 128), |k, lines| {
        k.when(k.thread().eq(0u32), || {
            lines.here(line!() + 1);
            let _ = k.elect();
        });
    });
}

#[test]
fn a_named_barrier_by_an_elected_lane() {
    caught("divergent", &["BarSync"], header(Target::Sm90, 128), |k, lines| {
        k.when(k.elect(), || {
            lines.here(line!() + 1);
            k.barrier_sync(1u32, 128);
        });
    });
}

#[test]
fn a_product_by_one_warp() {
    caught("divergent", &["the whole warpgroup"], header(Target::Sm90a, 128), |k, lines| {
        k.when(k.warp().lt(2u32), || {
            lines.here(line!() + 1);
            k.wgmma_fence();
        });
    });
}

#[test]
fn a_product_in_a_role_that_splits_its_warpgroup() {
    caught("divergent", &["role half has warps 0..2"], header(Target::Sm90a, 128), |k, lines| {
        k.warp_roles(&[Role {
            name: "half",
            warps: 2,
            registers: None,
            body: &|| {
                lines.here(line!() + 1);
                k.wgmma_fence();
            },
        }]);
    });
}

#[test]
fn roles_under_a_lane_condition() {
    let body = build(header(Target::Sm80, 64), |k| {
        let warp = k.warp();
        let _ = warp;
        k.when(k.lane().lt(5u32), || k.warp_roles(&[Role { name: "all", warps: 2, registers: None, body: &|| {} }]));
    });
    let faults = crate::faults_of(body);
    assert!(!faults.is_empty() && faults.iter().all(|fault| fault.rule == "divergent"), "{faults:#?}");
    assert!(faults.iter().any(|fault| fault.message.contains("roles are for whole warps")), "{faults:#?}");
}

#[test]
fn descriptors_that_differ_between_lanes() {
    for plant in 0..2 {
        caught("uniform", &["descriptor of", "differs between the lanes"], header(Target::Sm90a, 128), |k, lines| {
            let acc: Vec<_> = (0..8).map(|_| k.var_unset::<f32>(None)).collect();
            let same = k.constant(0x4000_0040_0001_0000u64);
            let differs: Val<'_, u64> = (k.thread() + 5u32).widen();
            let (a, b) = if plant == 0 { (differs, same) } else { (same, differs) };
            k.wgmma_fence();
            lines.here(line!() + 1);
            k.wgmma(product(16), &acc, WgmmaA::Shared(a), b, false);
            k.wgmma_commit();
            k.wgmma_wait(0);
        });
    }
}

#[test]
fn barrier_numbers_that_differ_between_lanes() {
    caught("uniform", &["barrier number"], header(Target::Sm80, 128), |k, lines| {
        let id = k.thread() & 7u32;
        lines.here(line!() + 1);
        k.barrier_sync(id, 64);
    });
}

#[test]
fn stop_where_threads_disagree() {
    caught("uniform", &["stop_when"], header(Target::Sm80, 128), |k, lines| {
        let elements = k.scalar::<u32>("elements");
        let done = (k.cta() * 128u32 + k.thread()).ge(elements);
        lines.here(line!() + 1);
        k.stop_when(done);
    });
    caught("uniform", &["stop_when"], header(Target::Sm80, 128), |k, lines| {
        let done = k.warp().eq(1u32);
        lines.here(line!() + 1);
        k.stop_when(done);
    });
}

#[test]
fn conditions_that_all_lanes_share() {
    clean(header(Target::Sm90a, 256), |k| {
        let n = k.scalar::<u32>("n");
        let warp = k.thread() >> 5;
        k.stop_when(k.cta().ge(n));
        k.when(n.gt(3u32), || k.bar_sync());
        // A warp index that is the same in all lanes without a shuffle.
        k.when(warp.lt(2u32), || {
            k.warp_sync();
            k.when(k.elect(), || k.st_global(k.output("out", 4).address(), 0, n));
            k.barrier_sync(1u32, 64);
        });
        // Both sides arrive.
        k.when_else(warp.lt(4u32), || k.bar_sync(), || k.bar_sync());
        // A guard that a constant makes the same for all, though it is computed from the lane.
        k.range(4u32, |j| {
            let column = j * 32u32 + k.lane();
            k.when(column.lt(128u32), || {
                let _ = k.shfl_bfly::<u32>(column, 1);
            });
        });
        k.warp_roles(&[
            Role { name: "producer", warps: 4, registers: None, body: &|| {} },
            Role { name: "consumer", warps: 4, registers: None, body: &|| k.wgmma_fence() },
        ]);
    });
}

#[test]
fn uniformity_is_inferred() {
    use verdigris_kir::face::AsVal;
    let mut wanted = Vec::new();
    let body = build(header(Target::Sm90, 256), |k| {
        let n = k.scalar::<u32>("n");
        let stage = k.var(0u32);
        k.range(n, |_| stage.set((stage.get() + 1u32) & 3u32));
        let uneven = k.var(0u32);
        k.when(k.lane().lt(3u32), || uneven.set(1u32));
        let mut want = |value: Val<'_, u32>, level| wanted.push((value.operand().reg().expect("a register"), level));
        want(n, Uniformity::Grid);
        want(k.cta() + n, Uniformity::Cta);
        want(k.warp() + n, Uniformity::Warp);
        want((k.thread() >> 7) + n, Uniformity::Warpgroup);
        want(k.thread() + n, Uniformity::Lane);
        want(k.uniform(k.thread() * n), Uniformity::Warp);
        want(stage.get(), Uniformity::Grid);
        want(uneven.get(), Uniformity::Lane);
    });
    let levels = uniformity(&body);
    for (reg, level) in wanted {
        assert_eq!(levels[reg.0 as usize], level, "{reg}");
    }
}
