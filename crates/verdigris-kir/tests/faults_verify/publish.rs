use crate::{caught, clean, header, tile_map};
use verdigris_kir::face::{Header, Kernel, LoadOptions, MbarrierArray, Role};
use verdigris_kir::ir::Target;
use verdigris_kir::verify::notes;

fn barrier<'k>(k: Kernel<'k>, name: &'static str, arrivals: u64) -> MbarrierArray<'k> {
    let barrier = k.mbarrier_array(name, 2);
    barrier.arrivals().set(arrivals);
    barrier
}

#[test]
fn waited_on_before_it_is_handed_over() {
    caught("init", &["barrier full is used here by thread 1", "may not be a barrier yet"], header(Target::Sm90, 128), |k, lines| {
        let full = barrier(k, "full", 128);
        k.when(k.thread().eq(0u32), || {
            lines.also(line!() + 1);
            full.init();
        });
        lines.here(line!() + 1);
        full.at(0u32).arrive();
        full.at(0u32).wait(0u32);
    });
}

#[test]
fn used_by_roles_before_it_is_handed_over() {
    caught("init", &["used here by thread 64"], header(Target::Sm90, 128), |k, lines| {
        let full = barrier(k, "full", 1);
        k.when(k.thread().eq(0u32), || full.init());
        k.warp_roles(&[
            Role { name: "first", warps: 2, registers: None, body: &|| k.when(k.thread().eq(0u32), || full.at(1u32).arrive()) },
            Role {
                name: "second",
                warps: 2,
                registers: None,
                body: &|| {
                    lines.here(line!() + 1);
                    full.at(1u32).wait(0u32);
                },
            },
        ]);
    });
}

#[test]
fn used_by_one_other_thread_before_it_is_handed_over() {
    caught("init", &["used here by thread 32"], header(Target::Sm90, 64), |k, lines| {
        let full = barrier(k, "full", 1);
        let n = k.scalar::<u32>("n");
        k.when(k.thread().eq(0u32), || full.init());
        k.when(k.thread().ge(32u32), || {
            // Which lanes come is the launch's business, but none of them is thread 0.
            k.when(n.gt(k.lane()), || {
                lines.here(line!() + 1);
                full.at(0u32).arrive();
            });
        });
    });
}

#[test]
fn a_member_that_nobody_initialises() {
    caught("init", &["member 1 of barrier full is never initialised, though 1 of 2 are"], header(Target::Sm90, 64), |k, lines| {
        lines.here(line!() + 1);
        let full = k.mbarrier_array("full", 2);
        full.arrivals().set(64);
        let op = verdigris_kir::inst::Op::MbarrierInit {};
        let at = full.at(0u32).address();
        k.when(k.thread().eq(0u32), || {
            use verdigris_kir::face::AsVal;
            k.instruction(op.clone(), &[], &[at.operand(), verdigris_kir::ir::Operand::Imm(0), full.arrivals().value().operand()]);
        });
        k.bar_sync();
        full.at(k.scalar::<u32>("stage")).arrive();
    });
}

fn load<'k>(k: Kernel<'k>, full: MbarrierArray<'k>, expect: u32, options: LoadOptions<'k>) -> impl Fn(&crate::Lines) {
    let map = k.tensor_map("a", tile_map(64));
    let tile = k.shared("a", 8192, 1024);
    let zero = k.constant(0i32);
    move |lines| {
        let at = full.at(0u32);
        at.arrive_expect_tx(expect);
        lines.here(line!() + 1);
        k.tma_load(tile.address(), &map, &[zero, zero], at, options);
    }
}

#[test]
fn loads_that_nobody_waits_for() {
    for plant in 0..3 {
        caught("unwaited", &["bytes are loaded onto barrier full here, but nobody waits on it"], header(Target::Sm90, 128), |k, lines| {
            let (full, other) = (barrier(k, "full", 1), barrier(k, "other", 128));
            let go = load(k, full, 8192, LoadOptions::default());
            k.when(k.thread().eq(0u32), || {
                full.init();
                other.init();
            });
            k.bar_sync();
            match plant {
                0 => k.when(k.thread().eq(0u32), || go(lines)),
                1 => k.range(3u32, |_| k.when(k.thread().eq(0u32), || go(lines))),
                _ => k.when(k.elect(), || k.when(k.scalar::<u32>("n").gt(2u32), || go(lines))),
            }
            other.at(0u32).arrive();
            other.at(0u32).wait(0u32);
        });
    }
}

#[test]
fn multicast_bytes_count_once_for_each_cta() {
    let kernel = |k: Kernel<'_>, expect: u32, lines: &crate::Lines| {
        let full = barrier(k, "full", 1);
        let options = LoadOptions { multicast: Some(k.constant(3u16)), policy: None };
        let go = load(k, full, expect, options);
        k.when(k.thread().eq(0u32), || full.init());
        k.cluster_sync();
        k.when(k.thread().eq(0u32), || go(lines));
        lines.here(0);
        full.at(0u32).wait_cluster(0u32);
        k.cluster_sync();
    };
    let pair = || Header { cluster: 2, ..header(Target::Sm90, 128) };
    clean(pair(), |k| kernel(k, 16384, &crate::Lines::default()));
    caught("bytes", &["expects 8192 bytes here, but 16384 bytes are loaded"], pair(), |k, lines| kernel(k, 8192, lines));
}

#[test]
fn cluster_barriers_out_of_turn() {
    let pair = || Header { cluster: 2, ..header(Target::Sm90, 128) };
    caught("cluster-phase", &["no barrier.cluster.arrive: the waiter hangs"], pair(), |k, lines| {
        lines.here(line!() + 1);
        k.cluster_wait();
    });
    caught("cluster-phase", &["arrived at a second time"], pair(), |k, lines| {
        lines.also(line!() + 1);
        k.cluster_arrive();
        lines.here(line!() + 1);
        k.cluster_arrive_relaxed();
        k.cluster_wait();
    });
    caught("cluster-phase", &["the waiter hangs"], pair(), |k, lines| {
        k.cluster_sync();
        lines.here(line!() + 1);
        k.cluster_wait();
    });
}

#[test]
fn handed_over_in_time() {
    clean(header(Target::Sm90, 128), |k| {
        let full = barrier(k, "full", 1);
        let go = load(k, full, 8192, LoadOptions::default());
        // The thread that makes a barrier may use it at once.
        k.when(k.thread().eq(0u32), || {
            full.init();
            go(&crate::Lines::default());
        });
        k.bar_sync();
        full.at(0u32).wait(0u32);
    });
    let body = verdigris_kir::face::build(header(Target::Sm90, 128), |k| {
        let empty = barrier(k, "empty", 128);
        k.when(k.thread().eq(0u32), || empty.init());
        k.bar_sync();
        empty.at(0u32).arrive();
    });
    let notes = notes(&body);
    assert!(notes.iter().any(|note| note.message.contains("nobody waits on barrier empty")), "{notes:#?}");
    assert!(crate::faults_of(body).is_empty());
}
