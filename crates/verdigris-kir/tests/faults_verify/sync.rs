use crate::{Lines, caught, caught_in, clean, header, tile_map};
use verdigris_kir::face::{Kernel, LoadOptions, Role, Val, Var, build};
use verdigris_kir::ir::Target;

#[test]
fn written_then_read_without_a_barrier() {
    caught("race", &["shared buffer tile", "is read here", "no barrier stands between"], header(Target::Sm80, 128), |k, lines| {
        let tile = k.shared("tile", 512, 16);
        let at = tile.address() + k.thread() * 4u32;
        let other = tile.address() + (k.thread() ^ 127u32) * 4u32;
        lines.also(line!() + 1);
        k.st_shared(at, 0, k.thread());
        lines.here(line!() + 1);
        let _ = k.ld_shared::<u32>(other, 0);
    });
}

#[test]
fn one_thread_writes_for_all_without_a_barrier() {
    caught("race", &["written at", "by thread 0"], header(Target::Sm80, 64), |k, lines| {
        let total = k.shared("total", 4, 4);
        k.when(k.thread().eq(0u32), || {
            lines.also(line!() + 1);
            k.st_shared(total.address(), 0, k.thread());
        });
        lines.here(line!() + 1);
        let _ = k.ld_shared::<u32>(total.address(), 0);
    });
}

/// Lanes of one warp do not wait for each other either.
#[test]
fn one_lane_writes_for_its_warp_without_a_barrier() {
    caught("race", &["shared buffer total", "is read here by thread", "by thread 0"], header(Target::Sm80, 32), |k, lines| {
        let total = k.shared("total", 4, 4);
        k.when(k.thread().eq(0u32), || {
            lines.also(line!() + 1);
            k.st_shared(total.address(), 0, k.thread());
        });
        lines.here(line!() + 1);
        let _ = k.ld_shared::<u32>(total.address(), 0);
    });
}

#[test]
fn a_warp_barrier_where_the_cta_is_meant() {
    caught("race", &["is read here"], header(Target::Sm80, 64), |k, lines| {
        let tile = k.shared("tile", 256, 16);
        let at = tile.address() + k.thread() * 4u32;
        let other = tile.address() + (k.thread() ^ 32u32) * 4u32;
        lines.also(line!() + 1);
        k.st_shared(at, 0, k.thread());
        k.warp_sync();
        lines.here(line!() + 1);
        let _ = k.ld_shared::<u32>(other, 0);
    });
}

#[test]
fn overwritten_before_all_have_read() {
    caught("race", &["is overwritten here"], header(Target::Sm80, 64), |k, lines| {
        let tile = k.shared("tile", 256, 16);
        let at = tile.address() + k.thread() * 4u32;
        let other = tile.address() + (k.thread() ^ 32u32) * 4u32;
        k.st_shared(at, 0, k.thread());
        k.bar_sync();
        lines.also(line!() + 1);
        let value = k.ld_shared::<u32>(other, 0);
        lines.here(line!() + 1);
        k.st_shared(at, 0, value);
    });
}

#[test]
fn shared_memory_behind_barriers() {
    clean(header(Target::Sm80, 64), |k| {
        let tile = k.shared("tile", 256, 16);
        let at = tile.address() + k.thread() * 4u32;
        let own = k.ld_shared::<u32>(at, 0);
        k.st_shared(at, 0, own + 1u32);
        k.warp_sync();
        let _ = k.ld_shared::<u32>(tile.address() + (k.thread() ^ 1u32) * 4u32, 0);
        k.bar_sync();
        let _ = k.ld_shared::<u32>(tile.address() + (k.thread() ^ 32u32) * 4u32, 0);
        k.bar_sync();
        // Two halves: one is written while the other is read.
        k.when_else(
            k.thread().lt(32u32),
            || k.st_shared(at, 0, own),
            || {
                let _ = k.ld_shared::<u32>(at, 0);
            },
        );
    });
}

/// Runs `body` for `steps` turns over a ring of four slots, with the slot and its phase.
fn ring<'k>(k: Kernel<'k>, steps: Val<'k, u32>, body: &dyn Fn(Var<'k, u32>, Var<'k, u32>)) {
    let (stage, phase) = (k.var(0u32), k.var(0u32));
    k.range(steps, |_| {
        body(stage, phase);
        let next = stage.get() + 1u32;
        let wrap = next.eq(4u32);
        stage.set(k.select(wrap, 0u32, next));
        phase.set(phase.get() ^ k.select(wrap, 1u32, 0u32));
    });
}

/// A producer warpgroup and a consumer warpgroup.
fn pipeline(k: Kernel<'_>, produce: &dyn Fn(), consume: &dyn Fn()) {
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: None, body: produce },
        Role { name: "consumer", warps: 4, registers: None, body: consume },
    ]);
}

#[test]
fn nobody_arrives() {
    caught(
        "arrivals",
        &["barrier full waits for 2 arrivals a phase, but 0 reach it: the waiter hangs"],
        header(Target::Sm90, 128),
        |k, lines| {
            let full = k.mbarrier_array("full", 1);
            full.arrivals().set(2);
            k.when(k.thread().eq(0u32), || full.init());
            k.bar_sync();
            lines.here(line!() + 1);
            full.at(0u32).wait(0u32);
        },
    );
}

#[test]
fn too_few_arrive() {
    for wanted in [2, 4] {
        let said = format!("waits for {wanted} arrivals a phase, but 1 reach it");
        caught("arrivals", &[said.as_str()], header(Target::Sm90, 128), |k, lines| {
            let full = k.mbarrier_array("full", 1);
            full.arrivals().set(wanted);
            k.when(k.thread().eq(0u32), || full.init());
            k.bar_sync();
            k.when(k.thread().eq(0u32), || {
                lines.also(line!() + 1);
                full.at(0u32).arrive();
            });
            lines.here(line!() + 1);
            full.at(0u32).wait(0u32);
        });
    }
}

/// An initialization has the declared count wherever kernels are built here; one that is written down may have another.
#[test]
fn an_initialization_for_another_number_of_arrivals() {
    for declared in [1, 3] {
        let lines = Lines::default();
        let mut body = build(header(Target::Sm90, 128), |k| {
            let full = k.mbarrier_array("full", 1);
            full.arrivals().set(2);
            lines.here(line!() + 1);
            k.when(k.thread().eq(0u32), || full.init());
            k.bar_sync();
            k.when(k.thread().lt(declared), || full.at(0u32).arrive());
            full.at(0u32).wait(0u32);
        });
        body.barriers[0].arrivals = body.late.len() as u32;
        body.late.push(u64::from(declared));
        let said = format!("barrier full is initialised for 2 arrivals, but declared for {declared}");
        caught_in("init", &[said.as_str()], body, &lines);
    }
}

/// The bug of the design's own first draft: one lane of each warp arrives where one of the warpgroup is counted.
#[test]
fn one_lane_of_each_warp_arrives_on_a_barrier_that_counts_warpgroups() {
    caught("arrivals", &["4 arrivals reach barrier empty here at once, but it waits for 1"], header(Target::Sm90a, 256), |k, lines| {
        let full = k.mbarrier_array("full", 4);
        let empty = k.mbarrier_array("empty", 4);
        full.arrivals().set(1);
        empty.arrivals().set(1);
        k.when(k.thread().eq(0u32), || {
            full.init();
            empty.init();
        });
        k.bar_sync();
        let steps = k.scalar::<u32>("steps");
        pipeline(
            k,
            &|| {
                k.when(k.thread().eq(0u32), || {
                    ring(k, steps, &|stage, _| {
                        lines.also(line!() + 1);
                        empty.at(stage).wait(stage.get() & 1u32);
                        full.at(stage).arrive();
                    });
                });
            },
            &|| {
                ring(k, steps, &|stage, _| {
                    full.at(stage).wait(stage.get() & 1u32);
                    k.when(k.elect(), || {
                        lines.here(line!() + 1);
                        empty.at(stage).arrive();
                    });
                });
            },
        );
    });
}

#[test]
fn every_lane_arrives_where_one_is_counted() {
    caught("arrivals", &["128 arrivals reach barrier full here at once, but it waits for 1"], header(Target::Sm90, 128), |k, lines| {
        let full = k.mbarrier_array("full", 1);
        full.arrivals().set(1);
        k.when(k.thread().eq(0u32), || full.init());
        k.bar_sync();
        lines.here(line!() + 1);
        full.at(0u32).arrive();
        full.at(0u32).wait(0u32);
    });
}

#[test]
fn a_barrier_that_nobody_initialises() {
    for plant in 0..3 {
        caught("init", &["barrier full is used here, but no mbarrier.init"], header(Target::Sm90, 128), |k, lines| {
            let full = k.mbarrier_array("full", 2);
            let other = k.mbarrier_array("other", 2);
            full.arrivals().set(128);
            other.arrivals().set(128);
            k.when(k.thread().eq(0u32), || other.init());
            k.bar_sync();
            match plant {
                0 => {
                    lines.here(line!() + 1);
                    full.at(0u32).wait(0u32);
                }
                1 => {
                    lines.here(line!() + 1);
                    full.at(1u32).arrive();
                }
                _ => {
                    lines.here(line!() + 1);
                    full.at(k.scalar::<u32>("stage")).expect_tx(64u32);
                }
            }
        });
    }
}

#[test]
fn bytes_that_do_not_agree() {
    for (expected, word) in
        [(8192u32, "expects 8192 bytes here, but 16384 bytes are loaded"), (32768, "the waiter hangs"), (16383, "before all bytes")]
    {
        caught("bytes", &[word], header(Target::Sm90, 128), |k, lines| {
            let map = k.tensor_map("a", tile_map(64));
            let (a, b) = (k.shared("a", 8192, 1024), k.shared("b", 8192, 1024));
            let full = k.mbarrier_array("full", 1);
            full.arrivals().set(1);
            let zero = k.constant(0i32);
            k.when(k.thread().eq(0u32), || full.init());
            k.bar_sync();
            k.when(k.thread().eq(0u32), || {
                let barrier = full.at(0u32);
                lines.here(line!() + 1);
                barrier.arrive_expect_tx(expected);
                k.tma_load(a.address(), &map, &[zero, zero], barrier, LoadOptions::default());
                k.tma_load(b.address(), &map, &[zero, zero], barrier, LoadOptions::default());
            });
            full.at(0u32).wait(0u32);
        });
    }
}

#[test]
fn bytes_of_a_ring_that_do_not_agree() {
    caught("bytes", &["expects 16384 bytes here, but 8192 bytes are loaded onto it"], header(Target::Sm90, 128), |k, lines| {
        let map = k.tensor_map("a", tile_map(64));
        let tile = k.shared("a", 4 * 8192, 1024);
        let full = k.mbarrier_array("full", 4);
        full.arrivals().set(1);
        let zero = k.constant(0i32);
        k.when(k.thread().eq(0u32), || full.init());
        k.bar_sync();
        let stage = k.var(0u32);
        k.range(k.scalar::<u32>("steps"), |_| {
            k.when(k.thread().eq(0u32), || {
                let barrier = full.at(stage);
                lines.here(line!() + 1);
                barrier.arrive_expect_tx(16384u32);
                k.tma_load(tile.address() + stage.get() * 8192u32, &map, &[zero, zero], barrier, LoadOptions::default());
            });
            full.at(stage).wait(0u32);
            stage.set((stage.get() + 1u32) & 3u32);
        });
    });
}

#[test]
fn named_barriers_that_never_open() {
    caught("named", &["waits for 256 threads, but only 128 ever reach it"], header(Target::Sm80, 256), |k, lines| {
        pipeline(
            k,
            &|| {
                lines.here(line!() + 1);
                k.barrier_sync(1u32, 256);
            },
            &|| k.barrier_sync(2u32, 128),
        );
    });
    caught("named", &["reached by 128 threads here, but waits for 64"], header(Target::Sm80, 256), |k, lines| {
        pipeline(
            k,
            &|| {
                lines.here(line!() + 1);
                k.barrier_sync(1u32, 64);
            },
            &|| k.barrier_sync(2u32, 128),
        );
    });
    caught("named", &["CtaSync waits for the whole CTA, but stands in role consumer"], header(Target::Sm80, 256), |k, lines| {
        pipeline(k, &|| {}, &|| {
            lines.here(line!() + 1);
            k.bar_sync();
        });
    });
}

/// A ring as it should be: one lane of each consumer warp gives a slot back, and the barrier counts them.
#[test]
fn a_protocol_that_holds() {
    clean(header(Target::Sm90a, 256), |k| {
        let map = k.tensor_map("a", tile_map(64));
        let tile = k.shared("a", 4 * 8192, 1024);
        let (full, empty) = (k.mbarrier_array("full", 4), k.mbarrier_array("empty", 4));
        full.arrivals().set(1);
        empty.arrivals().set(4);
        let zero = k.constant(0i32);
        let steps = k.scalar::<u32>("steps");
        k.when(k.thread().eq(0u32), || {
            full.init();
            empty.init();
        });
        k.bar_sync();
        pipeline(
            k,
            &|| {
                k.when(k.warp().eq(0u32), || {
                    k.when(k.elect(), || {
                        ring(k, steps, &|stage, phase| {
                            empty.at(stage).wait(phase.get() ^ 1u32);
                            let barrier = full.at(stage);
                            barrier.arrive_expect_tx(8192u32);
                            k.tma_load(tile.address() + stage.get() * 8192u32, &map, &[zero, zero], barrier, LoadOptions::default());
                        });
                    });
                });
            },
            &|| {
                ring(k, steps, &|stage, phase| {
                    full.at(stage).wait(phase);
                    k.warp_sync();
                    k.when(k.elect(), || empty.at(stage).arrive());
                });
                k.barrier_sync(1u32, 128);
            },
        );
        k.bar_sync();
    });
    // Ping-pong: one side arrives, the other waits, and both are counted.
    clean(header(Target::Sm80, 256), |k| {
        pipeline(
            k,
            &|| {
                k.barrier_arrive(2u32, 256);
                k.barrier_sync(1u32, 256);
            },
            &|| {
                k.barrier_arrive(1u32, 256);
                k.barrier_sync(2u32, 256);
            },
        );
    });
}
