//! Barriers, mbarriers, proxies; kernels that hang, run for ever, or stop themselves.

use crate::{Planted, Shows, caught, caught_sometimes, cluster, cta, plant};
use verdigris_kir::face::{AsVal, Mbarrier, Val};
use verdigris_kir::inst::{Cache, Fence, Op, Order, Scope, TestWait};
use verdigris_kir::interp::FindingKind;
use verdigris_kir::ir::Operand;
use verdigris_kir::tile::ring::publish_barriers;

/// One barrier at a place that only the launch knows, out of two that are made alike.
fn member<'k>(p: Planted<'k>, barriers: verdigris_kir::face::MbarrierArray<'k>) -> Mbarrier<'k> {
    barriers.at(p.fault)
}

fn is_leader<'k>(p: Planted<'k>) -> Val<'k, bool> {
    p.k.thread().eq(0u32)
}

// ---- proxy fences --------------------------------------------------------------------------------------------------

#[test]
fn a_bulk_store_of_bytes_that_were_not_fenced() {
    caught(FindingKind::ProxyFence, &["async proxy", "may see the old bytes"], cta(128), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 512, 128);
        lines.also(line!() + 1);
        k.st_shared(tile.address() + k.thread() * 4u32, 0, k.thread());
        p.unless(|| k.fence_proxy_async());
        k.bar_sync();
        k.when(is_leader(p), || {
            lines.here(line!() + 1);
            k.bulk_store(p.y.address(), tile.address(), 512u32);
            k.bulk_commit();
            k.bulk_wait_read(0);
        });
    });
}

#[test]
fn only_one_thread_fences() {
    caught(FindingKind::ProxyFence, &["by the writer"], cta(128), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 512, 128);
        lines.also(line!() + 1);
        k.st_shared(tile.address() + k.thread() * 4u32, 0, k.thread());
        let fencing = k.select(p.fault.ne(0u32), 1u32, 128u32);
        k.when(p.index().lt(fencing), || k.fence_proxy_async());
        k.bar_sync();
        k.when(is_leader(p), || {
            lines.here(line!() + 1);
            k.bulk_store(p.y.address(), tile.address(), 512u32);
            k.bulk_commit();
            k.bulk_wait_read(0);
        });
    });
}

#[test]
fn a_copy_onto_an_mbarrier_that_was_not_fenced() {
    caught(FindingKind::ProxyFence, &["mbarrier full[0]", "fence.mbarrier_init"], cta(64), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 512, 128);
        let full = p.barriers("full", 1, 1);
        k.when(is_leader(p), || {
            lines.also(line!() + 1);
            full.init();
        });
        p.unless(|| k.fence(Fence::MbarrierInit));
        k.bar_sync();
        k.when(is_leader(p), || {
            full.at(0u32).arrive_expect_tx(512u32);
            lines.here(line!() + 1);
            k.bulk_load(tile.address(), p.x.address(), 512u32, full.at(0u32));
        });
        full.at(0u32).wait(0u32);
    });
}

#[test]
fn a_bulk_load_of_global_bytes_that_were_not_fenced() {
    caught(FindingKind::ProxyFence, &["async proxy", "of buffer 1"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        let full = p.barriers("full", 1, 1);
        k.when(is_leader(p), || full.init());
        lines.also(line!() + 1);
        k.st_global(p.y.at(k.thread(), 4), 0, k.thread());
        p.unless(|| k.fence(Fence::ProxyAsyncGlobal));
        publish_barriers(k);
        k.when(is_leader(p), || {
            full.at(0u32).arrive_expect_tx(128u32);
            lines.here(line!() + 1);
            k.bulk_load(tile.address(), p.y.address(), 128u32, full.at(0u32));
        });
        full.at(0u32).wait(0u32);
    });
}

// ---- mbarriers -----------------------------------------------------------------------------------------------------

#[test]
fn more_arrivals_than_a_phase_counts() {
    caught(FindingKind::MbarrierMisuse, &["mbarrier full[0]", "1 arrivals", "0 of 32 are pending"], cta(64), |p, lines| {
        let k = p.k;
        let full = p.barriers("full", 2, 32);
        let other = p.barriers("other", 1, 1);
        k.when(is_leader(p), || {
            full.init();
            other.init();
        });
        publish_barriers(k);
        // Bytes are missing, so that the phase cannot end in between.
        k.when(is_leader(p), || full.at(0u32).expect_tx(16u32));
        k.bar_sync();
        let come = k.select(p.fault.ne(0u32), 33u32, 32u32);
        k.when(p.index().lt(come), || {
            lines.here(line!() + 1);
            full.at(p.index() & 0u32).arrive();
        });
        k.bar_sync();
        k.when(is_leader(p), || complete(p, full.at(0u32), 16));
        full.at(0u32).wait(0u32);
    });
}

/// `mbarrier.complete_tx` by hand.
#[track_caller]
fn complete(p: Planted<'_>, barrier: Mbarrier<'_>, bytes: u64) {
    let at = barrier.address();
    let op = Op::MbarrierComplete { space: verdigris_kir::inst::Space::Shared };
    p.k.instruction(op, &[], &[at.operand(), Operand::Imm(0), Operand::Imm(bytes)]);
}

#[test]
fn a_store_over_a_live_mbarrier() {
    caught(FindingKind::MbarrierMisuse, &["memory of mbarrier full[0] is stored here as plain bytes"], cta(32), |p, lines| {
        let k = p.k;
        let full = p.barriers("full", 1, 1);
        let tile = k.shared("tile", 128, 16);
        k.when(is_leader(p), || {
            lines.also(line!() + 1);
            full.init();
        });
        publish_barriers(k);
        let to = k.select(p.fault.ne(0u32), full.at(0u32).address(), tile.address());
        k.when(is_leader(p), || {
            lines.here(line!() + 1);
            k.st_shared(to, 0, k.constant(9u32));
            full.at(0u32).arrive();
        });
        full.at(0u32).wait(0u32);
    });
}

#[test]
fn an_mbarrier_that_was_not_initialized() {
    caught(FindingKind::MbarrierMisuse, &["mbarrier full[1]", "nothing has initialized it"], cta(32), |p, lines| {
        let k = p.k;
        let full = p.barriers("full", 2, 32);
        k.when(is_leader(p), || p.unless(|| full.init()));
        k.when(is_leader(p), || {
            p.when(|| {
                let at = full.at(0u32).address();
                k.instruction(Op::MbarrierInit {}, &[], &[at.operand(), Operand::Imm(0), full.arrivals().value().operand()]);
            });
        });
        publish_barriers(k);
        lines.here(line!() + 1);
        member(p, full).arrive();
        full.at(p.fault).wait(0u32);
    });
}

#[test]
fn an_mbarrier_that_is_initialized_twice() {
    caught(FindingKind::MbarrierMisuse, &["is initialized here and was at", "invalidate it first"], cta(32), |p, lines| {
        let k = p.k;
        let full = p.barriers("full", 1, 32);
        k.when(is_leader(p), || {
            lines.also(line!() + 1);
            full.init();
            p.when(|| {
                lines.here(line!() + 1);
                full.init();
            });
        });
        publish_barriers(k);
        full.at(0u32).arrive();
        full.at(0u32).wait(0u32);
    });
}

#[test]
fn waiters_that_others_run_past() {
    caught_sometimes(
        &[FindingKind::MbarrierLapped, FindingKind::Deadlock],
        &["mbarrier full[0]", "ran two phases ahead"],
        cta(64),
        |p, lines| {
            let k = p.k;
            let (full, taken) = (p.barriers("full", 1, 1), p.barriers("taken", 1, 1));
            k.when(is_leader(p), || {
                full.init();
                taken.init();
            });
            publish_barriers(k);
            let turns = k.select(p.fault.ne(0u32), 40u32, 1u32);
            k.when_else(
                k.warp().eq(0u32),
                || {
                    k.range(turns, |_| {
                        k.when(is_leader(p), || full.at(0u32).arrive());
                    });
                },
                || {
                    lines.here(line!() + 1);
                    full.at(0u32).wait(0u32);
                    k.when(k.lane().eq(0u32), || taken.at(0u32).arrive());
                },
            );
            taken.at(0u32).wait(0u32);
        },
    );
}

#[test]
fn a_producer_that_does_not_wait_for_empty_stages() {
    caught_sometimes(
        // A second arrival may also meet a phase whose bytes are still missing.
        &[FindingKind::MbarrierLapped, FindingKind::Deadlock, FindingKind::MbarrierMisuse],
        &["mbarrier full[0]", "ran two phases ahead"],
        cta(64),
        |p, lines| {
            let k = p.k;
            let (full, empty) = (p.barriers("full", 1, 1), p.barriers("empty", 1, 1));
            let tiles = k.shared("tiles", 16 * 1024, 128);
            k.when(is_leader(p), || {
                full.init();
                empty.init();
            });
            publish_barriers(k);
            k.when_else(
                k.warp().eq(0u32),
                || {
                    k.when(is_leader(p), || {
                        k.range(64u32, |turn| {
                            p.unless(|| empty.at(0u32).wait((turn & 1u32) ^ 1u32));
                            full.at(0u32).arrive_expect_tx(256u32);
                            k.bulk_load(tiles.address() + turn * 256u32, p.x.address(), 256u32, full.at(0u32));
                        });
                    });
                },
                || {
                    k.range(64u32, |turn| {
                        lines.here(line!() + 1);
                        full.at(0u32).wait(turn & 1u32);
                        k.when(k.lane().eq(0u32), || p.unless(|| empty.at(0u32).arrive()));
                    });
                },
            );
            k.bar_sync();
        },
    );
}

#[test]
fn a_peer_that_runs_past_a_waiter() {
    caught_sometimes(
        &[FindingKind::MbarrierLapped, FindingKind::Deadlock],
        &["mbarrier full[0]", "ran two phases ahead"],
        cluster(2, 32),
        |p, lines| {
            let k = p.k;
            let full = p.barriers("full", 1, 1);
            k.when(is_leader(p), || full.init());
            publish_barriers(k);
            let turns = k.select(p.fault.ne(0u32), 40u32, 1u32);
            k.when_else(
                k.cluster_rank().eq(0u32),
                || {
                    k.range(turns, |_| {
                        k.when(is_leader(p), || full.at(0u32).peer(1u32).arrive());
                    });
                },
                || {
                    lines.here(line!() + 1);
                    full.at(0u32).wait_cluster(0u32);
                },
            );
            k.cluster_sync();
        },
    );
}

// ---- barriers of the CTA and the cluster ---------------------------------------------------------------------------

#[test]
fn a_warp_that_arrives_twice() {
    caught(FindingKind::BarrierMisuse, &["barrier 1", "before the barrier opened"], cta(96), |p, lines| {
        let k = p.k;
        k.when(k.warp().eq(0u32), || {
            lines.also(line!() + 1);
            k.barrier_arrive(1u32, 64);
            p.when(|| {
                lines.here(line!() + 1);
                k.barrier_arrive(1u32, 64);
            });
        });
        k.bar_sync();
        k.when(k.warp().eq(1u32), || k.barrier_sync(1u32, 64));
    });
}

#[test]
fn a_barrier_with_two_counts() {
    caught(FindingKind::BarrierMisuse, &["is used for 96 threads here and for 64"], cta(160), |p, lines| {
        let k = p.k;
        k.when(k.warp().eq(0u32), || {
            lines.also(line!() + 1);
            k.barrier_arrive(1u32, 64);
        });
        k.bar_sync();
        k.when(k.warp().ge(2u32), || {
            lines.here(line!() + 1);
            k.barrier_sync(k.constant(2u32) - p.fault, 96);
        });
        k.bar_sync();
        k.when(k.warp().eq(1u32), || k.barrier_sync(1u32, 64));
    });
}

#[test]
fn two_arrivals_at_the_clusters_barrier() {
    caught(FindingKind::BarrierMisuse, &["arrives at the cluster's barrier again"], cluster(2, 32), |p, lines| {
        let k = p.k;
        k.cluster_arrive();
        p.when(|| {
            lines.here(line!() + 1);
            k.cluster_arrive();
        });
        k.cluster_wait();
    });
}

#[test]
fn a_wait_at_the_clusters_barrier_without_an_arrival() {
    caught(FindingKind::BarrierMisuse, &["without having arrived"], cluster(2, 32), |p, lines| {
        let k = p.k;
        p.unless(|| k.cluster_arrive());
        lines.here(line!() + 1);
        k.cluster_wait();
    });
}

// ---- nothing can go on ---------------------------------------------------------------------------------------------

#[test]
fn bytes_that_never_come() {
    caught(FindingKind::Deadlock, &["mbarrier full[0]", "16 bytes are missing in phase 0"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 512, 128);
        let full = p.barriers("full", 1, 1);
        k.when(is_leader(p), || full.init());
        publish_barriers(k);
        k.when(is_leader(p), || {
            full.at(0u32).arrive_expect_tx(p.fault * 16u32 + 512u32);
            k.bulk_load(tile.address(), p.x.address(), 512u32, full.at(0u32));
        });
        lines.here(line!() + 1);
        full.at(0u32).wait(0u32);
    });
}

#[test]
fn a_barrier_that_some_warps_never_reach() {
    caught(FindingKind::Deadlock, &["barrier 0, where 64 of 96 threads arrived"], cta(96), |p, lines| {
        let k = p.k;
        let warps = k.constant(3u32) - p.fault;
        let warp = k.uniform(p.index() >> 5u32);
        k.when(warp.lt(warps), || {
            lines.here(line!() + 1);
            k.bar_sync();
        });
    });
}

#[test]
fn a_role_that_waits_for_one_turn_too_many() {
    caught(FindingKind::Deadlock, &["mbarrier full[0]", "1 of 1 arrivals"], cta(64), |p, lines| {
        let k = p.k;
        let (full, empty) = (p.barriers("full", 1, 1), p.barriers("empty", 1, 1));
        k.when(is_leader(p), || {
            full.init();
            empty.init();
        });
        publish_barriers(k);
        let turns = p.fault + 3u32;
        k.when_else(
            k.warp().eq(0u32),
            || {
                k.range(3u32, |turn| {
                    k.when(k.lane().eq(0u32), || {
                        empty.at(0u32).wait((turn & 1u32) ^ 1u32);
                        full.at(0u32).arrive();
                    });
                });
            },
            || {
                k.range(turns, |turn| {
                    lines.here(line!() + 1);
                    full.at(0u32).wait(turn & 1u32);
                    k.when(k.lane().eq(0u32), || empty.at(0u32).arrive());
                });
            },
        );
    });
}

#[test]
fn warps_that_wait_for_each_other() {
    let finding = caught(FindingKind::Deadlock, &["warp 0", "warp 1", "mbarrier first[0]", "mbarrier second[0]"], cta(64), |p, _| {
        let k = p.k;
        let (first, second) = (p.barriers("first", 1, 1), p.barriers("second", 1, 1));
        k.when(is_leader(p), || {
            first.init();
            second.init();
        });
        publish_barriers(k);
        let signal = |barrier: verdigris_kir::face::MbarrierArray<'_>| k.when(k.lane().eq(0u32), || barrier.at(0u32).arrive());
        k.when_else(
            k.warp().eq(0u32),
            || {
                p.unless(|| signal(first));
                second.at(0u32).wait(0u32);
                p.when(|| signal(first));
            },
            || {
                first.at(0u32).wait(0u32);
                signal(second);
            },
        );
    });
    assert!(finding.warp.is_some());
}

// ---- no end --------------------------------------------------------------------------------------------------------

#[test]
fn a_flag_that_nobody_raises() {
    caught(FindingKind::Timeout, &["has not ended"], cta(64).steps(20_000), |p, lines| {
        let k = p.k;
        let flag = p.x.at(0u32, 4);
        k.when(k.thread().eq(32u32), || {
            p.unless(|| k.st_global_with(flag, 0, k.constant(1u32), Order::Release(Scope::Gpu), Cache::Default));
        });
        k.when(is_leader(p), || {
            lines.here(line!() + 1);
            k.while_(|| k.ld_global_with::<u32>(flag, 0, Order::Acquire(Scope::Gpu), Cache::Default).eq(0u32), || {});
        });
    });
}

#[test]
fn a_loop_that_does_not_advance() {
    caught(FindingKind::Timeout, &["a loop that does not end"], cta(32).steps(20_000), |p, lines| {
        let k = p.k;
        let step = k.constant(1u32) - p.fault;
        let sum = k.var(0u32);
        lines.here(line!() + 1);
        k.range_step(0u32, 8u32, step, |i| sum.set(sum.get() + i));
        k.st_global(p.y.at(k.thread(), 4), 0, sum.get());
    });
}

#[test]
fn polling_an_mbarrier_that_never_completes() {
    caught(FindingKind::Timeout, &["a wait for something that never comes"], cta(64).steps(20_000), |p, lines| {
        let k = p.k;
        let full = p.barriers("full", 1, 1);
        k.when(is_leader(p), || full.init());
        publish_barriers(k);
        k.when_else(
            k.warp().eq(0u32),
            || k.when(k.lane().eq(p.fault * 99u32), || full.at(0u32).arrive()),
            || {
                lines.here(line!() + 1);
                k.repeat_until(|| full.at(0u32).test(TestWait::Test, 0u32));
            },
        );
    });
}

// ---- stops ---------------------------------------------------------------------------------------------------------

#[test]
fn the_kernel_stops_itself() {
    let finding = caught(FindingKind::Trap, &["stops itself"], cta(64), |p, lines| {
        let k = p.k;
        let bad = k.select(p.fault.ne(0u32), 39u32, 99u32);
        k.when(p.index().eq(bad), || {
            lines.here(line!() + 1);
            k.trap();
        });
    });
    assert_eq!((finding.warp, finding.lane), (Some(1), Some(7)));

    let finding = caught(FindingKind::Trap, &["stops itself"], cta(32).ctas(4), |p, lines| {
        let k = p.k;
        p.when(|| {
            k.when(k.cta().eq(2u32), || {
                lines.here(line!() + 1);
                k.trap();
            });
        });
    });
    assert_eq!((finding.cta, finding.lane), ([2, 0, 0], Some(0)));

    caught(FindingKind::Trap, &["stops itself"], cta(32), |p, lines| {
        let k = p.k;
        let turns = p.fault * 3u32 + 2u32;
        k.range(turns, |turn| {
            k.when(turn.gt(3u32), || {
                lines.here(line!() + 1);
                k.trap();
            });
        });
    });
}

#[test]
fn a_finding_names_its_schedule() {
    let planting = plant(cta(32), |p, _| p.when(|| p.k.trap()));
    let findings = planting.run(true, 7, &mut crate::memory()).expect_err("it stops itself");
    assert_eq!(findings.seed, 7);
    assert!(findings.to_string().ends_with("schedule seed 7"), "{findings}");
    assert_eq!(planting.faulty(Shows::Always, &[FindingKind::Trap], &[]).kernel, "planted");
}
