//! Shared memory of other CTAs: their exit, copies that nobody waits for, multicast, `st.async`, `red.async`, and waits whose scope is too small.

use crate::{Planted, Shows, caught, caught_sometimes, cluster, cta, plant, words};
use verdigris_kir::face::{AsVal, LoadOptions, Mbarrier, RemoteMbarrier, TensorMap, Val};
use verdigris_kir::inst::{Atomic, Fence, Op, Scope, TestWait};
use verdigris_kir::interp::FindingKind;
use verdigris_kir::ir::{Access, MapDecl, MapType, Swizzle, Ty};
use verdigris_kir::program::{Address, Arg, Fill, L2Promotion, MapSpec};
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};

fn leads<'k>(p: Planted<'k>) -> Val<'k, bool> {
    p.k.thread().eq(0u32)
}

// ---- after the exit ------------------------------------------------------------------------------------------------

#[test]
fn a_store_that_nothing_orders_before_the_peers_exit() {
    caught(FindingKind::RemoteAfterExit, &["shared memory of CTA"], cluster(2, 32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        let remote = k.mapa(tile.address() + k.thread() * 4u32, k.cluster_rank() ^ 1u32);
        k.cluster_sync();
        lines.here(line!() + 1);
        k.st_cluster_vector(remote, 0, &[k.thread()]);
        p.unless(|| k.cluster_sync());
    });
}

#[test]
fn a_load_that_nothing_orders_before_the_peers_exit() {
    caught(FindingKind::RemoteAfterExit, &["shared memory of CTA"], cluster(2, 32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        k.st_shared(tile.address() + k.thread() * 4u32, 0, k.thread());
        let remote = k.mapa(tile.address() + k.thread() * 4u32, k.cluster_rank() ^ 1u32);
        k.cluster_sync();
        lines.here(line!() + 1);
        let value = k.ld_cluster_vector::<u32>(remote, 0, 1)[0];
        p.unless(|| k.cluster_sync());
        k.st_global(p.y.at(k.cta() * 32u32 + k.thread(), 4), 0, value);
    });
}

/// A ring whose stages are shared by all of a cluster, or by pairs of CTAs: who fills them does not wait until all have left them.
fn a_stage_left_after_the_peers_exit(ctas: u32, scope: RingScope) {
    caught(FindingKind::RemoteAfterExit, &["CTA"], cluster(ctas, 64), |p, lines| {
        let k = p.k;
        let ring = Ring::new(k, 2, 1, scope);
        k.when(leads(p), || ring.init());
        publish_barriers(k);
        let fill = || {
            let cursor = ring.cursor();
            k.when(leads(p), || {
                k.range(k.constant(3u32), |_| {
                    cursor.acquire(0u32);
                    cursor.advance();
                });
                p.unless(|| cursor.drain());
            });
        };
        let leave = || {
            let cursor = ring.cursor();
            k.range(k.constant(3u32), |_| {
                cursor.wait();
                lines.here(line!() + 1);
                cursor.release(cursor.stage(), k.thread() & 31u32);
                cursor.advance();
            });
        };
        k.when_else(k.thread().lt(32u32), fill, leave);
    });
}

#[test]
fn a_stage_of_the_clusters_ring_that_is_left_after_the_peers_exit() {
    a_stage_left_after_the_peers_exit(2, RingScope::Cluster);
}

#[test]
fn a_stage_of_a_pairs_ring_that_is_left_after_the_peers_exit() {
    a_stage_left_after_the_peers_exit(4, RingScope::Peers(2));
}

#[test]
fn an_arrival_that_nothing_orders_before_the_peers_exit() {
    caught(FindingKind::RemoteAfterExit, &["CTA"], cluster(2, 32), |p, lines| {
        let k = p.k;
        let done = p.barriers("done", 1, 1);
        k.when(leads(p), || done.init());
        publish_barriers(k);
        k.when(leads(p), || {
            let peer = done.at(0u32).peer(k.cluster_rank() ^ 1u32);
            lines.here(line!() + 1);
            peer.arrive();
        });
        p.unless(|| done.at(0u32).wait_cluster(0u32));
    });
}

#[test]
fn a_load_that_is_not_waited_for() {
    caught(
        FindingKind::AsyncAfterExit,
        &["shared memory", "the bytes land in memory that may belong to another CTA"],
        cta(32),
        |p, lines| {
            let k = p.k;
            let tile = k.shared("tile", 1024, 128);
            let full = p.barriers("full", 1, 1);
            k.when(leads(p), || full.init());
            publish_barriers(k);
            k.when(leads(p), || {
                full.at(0u32).arrive_expect_tx(1024u32);
                lines.here(line!() + 1);
                k.bulk_load(tile.address(), p.x.address(), 1024u32, full.at(0u32));
            });
            p.unless(|| full.at(0u32).wait(0u32));
        },
    );
}

#[test]
fn a_store_whose_reads_are_not_waited_for() {
    caught(FindingKind::AsyncAfterExit, &["cp.async.bulk.wait_group.read"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        k.st_shared(tile.address() + k.thread() * 4u32, 0, k.thread());
        k.fence_proxy_async();
        k.warp_sync();
        k.when(leads(p), || {
            lines.here(line!() + 1);
            k.bulk_store(p.y.address(), tile.address(), 128u32);
            k.bulk_commit();
            p.unless(|| k.bulk_wait_read(0));
        });
    });
}

#[test]
fn a_group_that_is_not_closed_is_not_waited_for() {
    caught(FindingKind::AsyncAfterExit, &["this bulk copy reads shared memory"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        k.st_shared(tile.address() + k.thread() * 4u32, 0, k.thread());
        k.fence_proxy_async();
        k.warp_sync();
        k.when(leads(p), || {
            lines.here(line!() + 1);
            k.bulk_store(p.y.address(), tile.address(), 128u32);
            p.unless(|| k.bulk_commit());
            k.bulk_wait(0);
        });
    });
}

#[test]
fn a_message_that_the_peer_does_not_wait_for() {
    caught(FindingKind::AsyncAfterExit, &["shared memory"], cluster(2, 32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        let full = p.barriers("full", 1, 1);
        k.when(leads(p), || full.init());
        publish_barriers(k);
        k.when(leads(p), || full.at(0u32).arrive_expect_tx(128u32));
        k.warp_sync();
        let peer = k.cluster_rank() ^ 1u32;
        let to = k.mapa(tile.address() + k.thread() * 4u32, peer);
        lines.here(line!() + 1);
        k.st_async(to, full.at(0u32).peer(peer), &[k.thread()]);
        p.unless(|| full.at(0u32).wait_cluster(0u32));
        // The cluster meets, and yet the bytes may come later.
        k.cluster_sync();
    });
}

// ---- st.async ------------------------------------------------------------------------------------------------------

/// What may be wrong with a message, chosen while building; whether it is, at launch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Message {
    ReadTooEarly,
    BarrierOfAnotherCta,
    FewerBytesThanExpected,
}

fn message(p: Planted<'_>, lines: &crate::Lines, wrong: Message) {
    let k = p.k;
    let tile = k.shared("tile", 128, 128);
    let full = p.barriers("full", 1, 1);
    k.st_shared(tile.address() + k.thread() * 4u32, 0, k.constant(0u32));
    k.when(leads(p), || full.init());
    k.fence(Fence::AcqRel(Scope::Cluster));
    publish_barriers(k);
    let extra = if wrong == Message::FewerBytesThanExpected { p.fault * 4u32 } else { p.fault * 0u32 };
    k.when(leads(p), || full.at(0u32).arrive_expect_tx(extra + 128u32));
    k.warp_sync();
    let peer = k.cluster_rank() ^ 1u32;
    let to = k.mapa(tile.address() + k.thread() * 4u32, peer);
    let told = if wrong == Message::BarrierOfAnotherCta { k.select(p.fault.ne(0u32), k.cluster_rank(), peer) } else { peer };
    let barrier: RemoteMbarrier<'_> = full.at(0u32).peer(told);
    if wrong == Message::BarrierOfAnotherCta {
        lines.here(line!() + 3);
    }
    lines.also(if wrong == Message::ReadTooEarly { line!() + 1 } else { 0 });
    k.st_async(to, barrier, &[k.thread() + k.cluster_rank() * 100u32]);
    let wait = || {
        if wrong == Message::FewerBytesThanExpected {
            lines.here(line!() + 2);
        }
        full.at(0u32).wait_cluster(0u32);
    };
    if wrong == Message::ReadTooEarly {
        p.unless(wait);
        lines.here(line!() + 4);
    } else {
        wait();
    }
    let value = k.ld_shared::<u32>(tile.address() + k.thread() * 4u32, 0);
    if wrong == Message::ReadTooEarly {
        p.when(|| full.at(0u32).wait_cluster(0u32));
    }
    k.st_global(p.y.at(k.cta() * 32u32 + k.thread(), 4), 0, value);
    k.cluster_sync();
}

#[test]
fn messages_to_a_peer() {
    for (wrong, kind, said) in [
        (Message::ReadTooEarly, FindingKind::Race, "of shared tile"),
        (Message::BarrierOfAnotherCta, FindingKind::IllegalOperand, "are in different CTAs"),
        (Message::FewerBytesThanExpected, FindingKind::Deadlock, "4 bytes are missing"),
    ] {
        let planting = plant(cluster(2, 32), |p, lines| message(p, lines, wrong));
        let want: Vec<u32> = (100..132).chain(0..32).collect();
        planting.clean(|memory| assert_eq!(words(memory, 1, 64), want));
        planting.faulty(Shows::Always, &[kind], &[said]);
    }
}

// ---- red.async -----------------------------------------------------------------------------------------------------

#[test]
fn sums_in_the_peers_memory() {
    // Every lane of both CTAs adds to the first CTA's word.
    let planting = plant(cluster(2, 32), |p, lines| {
        let k = p.k;
        let sum = k.shared("sum", 16, 16);
        let full = p.barriers("full", 1, 1);
        k.when(leads(p), || {
            k.st_shared(sum.address(), 0, k.constant(5u32));
            full.init();
            k.fence(Fence::AcqRel(Scope::Cluster));
        });
        publish_barriers(k);
        k.when(leads(p), || full.at(0u32).arrive_expect_tx(k.select(k.cluster_rank().eq(0u32), 256u32, 0u32)));
        let to = k.mapa(sum.address(), 0u32);
        let barrier = full.at(0u32).peer(0u32).address();
        let add = Op::RedAsync { op: Atomic::Add, ty: Ty::U32 };
        let value = k.thread();
        lines.also(line!() + 1);
        k.instruction(add, &[], &[to.operand(), barrier.operand(), value.operand()]);
        p.unless(|| full.at(0u32).wait_cluster(0u32));
        k.when(leads(p) & k.cluster_rank().eq(0u32), || {
            lines.here(line!() + 1);
            let value = k.ld_shared::<u32>(sum.address(), 0);
            k.st_global(p.y.address(), 0, value);
        });
        full.at(0u32).wait_cluster(0u32);
        k.cluster_sync();
    });
    planting.clean(|memory| assert_eq!(words(memory, 1, 1), [5 + 2 * (0..32).sum::<u32>()]));
    planting.faulty(Shows::Always, &[FindingKind::Race], &["of shared sum"]);
}

// ---- ranks that are not there --------------------------------------------------------------------------------------

#[test]
fn a_rank_that_the_cluster_does_not_have() {
    caught(FindingKind::IllegalOperand, &["mapa to rank 2 in a cluster of 2 CTAs"], cluster(2, 32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        let peer = (k.cluster_rank() ^ 1u32) + p.fault * (k.constant(2u32) - (k.cluster_rank() ^ 1u32));
        k.cluster_sync();
        lines.here(line!() + 1);
        let remote = k.mapa(tile.address() + k.thread() * 4u32, peer);
        k.st_cluster_vector(remote, 0, &[k.thread()]);
        k.cluster_sync();
    });
}

// ---- multicast -----------------------------------------------------------------------------------------------------

fn decl() -> MapDecl {
    MapDecl { ty: MapType::U32, rank: 2, box_dims: vec![32, 4], im2col: false, swizzle: Swizzle::None, access: Access::Read }
}

/// The input as 64 rows of 64 words.
fn map() -> Arg {
    let spec = MapSpec {
        decl: decl(),
        dims: vec![64, 64],
        strides_bytes: vec![256],
        element_strides: vec![1, 1],
        lower_corner: Vec::new(),
        upper_corner: Vec::new(),
        fill: Fill::Zero,
        l2: L2Promotion::None,
    };
    Arg::TensorMap(Address::buffer(0), spec)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Multicast {
    /// The mask names a third CTA.
    Outside,
    /// The mask leaves out the second CTA, which waits.
    LeavesOut,
    /// The second CTA leaves without waiting.
    NotWaitedFor,
    /// The second CTA may not have made its barrier yet.
    BeforeInit,
}

fn multicast(p: Planted<'_>, lines: &crate::Lines, wrong: Multicast) {
    const BYTES: u32 = 512;
    let k = p.k;
    let map: TensorMap<'_> = k.tensor_map("map", decl());
    let tile = k.shared("tile", BYTES, 128);
    let full = p.barriers("full", 1, 1);
    k.when(leads(p), || full.init());
    if wrong == Multicast::BeforeInit {
        p.unless(|| publish_barriers(k));
        p.when(|| {
            k.fence(verdigris_kir::inst::Fence::MbarrierInit);
            k.bar_sync();
        });
    } else {
        publish_barriers(k);
    }
    let mask = match wrong {
        Multicast::Outside => p.fault * 4u32 + 3u32,
        Multicast::LeavesOut => k.constant(3u32) - p.fault * 2u32,
        _ => p.fault * 0u32 + 3u32,
    };
    k.when(leads(p), || {
        full.at(0u32).arrive_expect_tx(BYTES);
        k.when(k.cluster_rank().eq(0u32), || {
            let options = LoadOptions { multicast: Some(mask.low16()), policy: None };
            let at = [k.constant(32i32), k.constant(2i32)];
            if wrong != Multicast::LeavesOut {
                lines.here(line!() + 2);
            }
            k.tma_load(tile.address(), &map, &at, full.at(0u32), options);
        });
    });
    let wait = || {
        if wrong == Multicast::LeavesOut {
            lines.here(line!() + 2);
        }
        full.at(0u32).wait_cluster(0u32);
    };
    if wrong == Multicast::NotWaitedFor {
        k.when(p.fault.eq(0u32) | k.cluster_rank().eq(0u32), wait);
        p.unless(|| copy_out(p, tile.address()));
    } else {
        wait();
        copy_out(p, tile.address());
    }
    k.cluster_sync();
}

fn copy_out<'k>(p: Planted<'k>, tile: Val<'k, u32>) {
    let k = p.k;
    k.range(4u32, |row| {
        let word = row * 32u32 + k.thread();
        k.st_global(p.y.at(k.cta() * 128u32 + word, 4), 0, k.ld_shared::<u32>(tile + word * 4u32, 0));
    });
}

#[test]
fn one_load_for_a_cluster() {
    let setup = || cluster(2, 32).with(map());
    let row = |row: u32| (32..64).map(move |column| row * 64 + column);
    let want: Vec<u32> = (2..6).flat_map(row).chain((2..6).flat_map(row)).collect();
    for (wrong, kind, said) in [
        (Multicast::Outside, FindingKind::IllegalOperand, "the CTA mask 0x7"),
        (Multicast::LeavesOut, FindingKind::Deadlock, "512 bytes are missing"),
        (Multicast::NotWaitedFor, FindingKind::AsyncAfterExit, "shared memory"),
    ] {
        let planting = plant(setup(), |p, lines| multicast(p, lines, wrong));
        planting.clean(|memory| assert_eq!(words(memory, 1, 256), want));
        planting.faulty(Shows::Always, &[kind], &[said]);
    }
    caught_sometimes(&[FindingKind::MbarrierMisuse, FindingKind::Race], &["mbarrier full[0]"], setup(), |p, lines| {
        multicast(p, lines, Multicast::BeforeInit);
    });
}

// ---- the scope of a wait -------------------------------------------------------------------------------------------

/// Waits for the first phase of a barrier: where the fault happens, acquiring from the own CTA alone.
fn waits<'k>(p: Planted<'k>, barrier: Mbarrier<'k>) {
    p.unless(|| barrier.wait_cluster(0u32));
    p.when(|| barrier.wait(0u32));
}

#[test]
fn a_word_of_a_peer_behind_a_wait_for_the_own_cta() {
    caught(FindingKind::Race, &["of shared tile", "nothing orders the two"], cluster(2, 32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        let told = p.barriers("told", 1, 32);
        k.when(leads(p), || told.init());
        publish_barriers(k);
        let peer = k.cluster_rank() ^ 1u32;
        let to = k.mapa(tile.address() + k.thread() * 4u32, peer);
        lines.also(line!() + 1);
        k.st_cluster_vector(to, 0, &[k.thread()]);
        told.at(0u32).peer(peer).arrive();
        waits(p, told.at(0u32));
        lines.here(line!() + 1);
        let value = k.ld_shared::<u32>(tile.address() + k.thread() * 4u32, 0);
        k.st_global(p.y.at(k.cta() * 32u32 + k.thread(), 4), 0, value);
        k.cluster_sync();
    });
}

#[test]
fn a_poll_acquires_from_the_own_cta() {
    caught(FindingKind::Race, &["of shared tile", "nothing orders the two"], cluster(2, 32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        let told = p.barriers("told", 1, 32);
        k.when(leads(p), || told.init());
        publish_barriers(k);
        let peer = k.cluster_rank() ^ 1u32;
        let to = k.mapa(tile.address() + k.thread() * 4u32, peer);
        lines.also(line!() + 1);
        k.st_cluster_vector(to, 0, &[k.thread()]);
        told.at(0u32).peer(peer).arrive();
        let barrier = told.at(0u32);
        k.while_(|| !barrier.test(TestWait::Try, 0u32), || {});
        p.unless(|| barrier.wait_cluster(0u32));
        lines.here(line!() + 1);
        let value = k.ld_shared::<u32>(tile.address() + k.thread() * 4u32, 0);
        k.st_global(p.y.at(k.cta() * 32u32 + k.thread(), 4), 0, value);
        k.cluster_sync();
    });
}

/// The filler of a stage that a cluster shares goes on when its peers have left it, and loads into their memory.
#[test]
fn a_stage_that_peers_read_behind_a_wait_for_the_own_cta() {
    caught(FindingKind::Race, &["of shared tile", "nothing orders the two"], cluster(2, 32).with(map()), |p, lines| {
        let k = p.k;
        let map: TensorMap<'_> = k.tensor_map("map", decl());
        let tile = k.shared("tile", 512, 128);
        let (full, left) = (p.barriers("full", 1, 1), p.barriers("left", 1, 2));
        k.when(leads(p), || {
            full.init();
            left.init();
        });
        publish_barriers(k);
        let load = || {
            k.when(leads(p), || full.at(0u32).arrive_expect_tx(512u32));
            k.when(leads(p) & k.cluster_rank().eq(0u32), || {
                let options = LoadOptions { multicast: Some((p.fault * 0u32 + 3u32).low16()), policy: None };
                // What the peer holds of the first turn is overwritten by the second.
                lines.here(line!() + 2);
                lines.also(line!() + 1);
                k.tma_load(tile.address(), &map, &[k.constant(32i32), k.constant(2i32)], full.at(0u32), options);
            });
        };
        load();
        // What a load brings to the own CTA is there for whoever waits in it, whichever CTA asked for it.
        full.at(0u32).wait(0u32);
        let value = k.ld_shared::<u32>(tile.address() + k.thread() * 4u32, 0);
        k.st_global(p.y.at(k.cta() * 32u32 + k.thread(), 4), 0, value);
        k.warp_sync();
        k.when(k.thread().lt(2u32), || left.at(0u32).peer(k.thread()).arrive_read());
        k.when(leads(p), || waits(p, left.at(0u32)));
        // Of the second CTA's own turn nothing is left to wait for; the first may be at its own load already.
        load();
        full.at(0u32).wait(1u32);
        k.cluster_sync();
    });
}

#[test]
fn a_message_behind_a_wait_for_the_own_cta() {
    caught(FindingKind::Race, &["of shared tile", "nothing orders the two"], cluster(2, 32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        let full = p.barriers("full", 1, 1);
        k.when(leads(p), || full.init());
        publish_barriers(k);
        k.when(leads(p), || full.at(0u32).arrive_expect_tx(128u32));
        k.warp_sync();
        let peer = k.cluster_rank() ^ 1u32;
        let to = k.mapa(tile.address() + k.thread() * 4u32, peer);
        lines.also(line!() + 1);
        k.st_async(to, full.at(0u32).peer(peer), &[k.thread()]);
        waits(p, full.at(0u32));
        lines.here(line!() + 1);
        let value = k.ld_shared::<u32>(tile.address() + k.thread() * 4u32, 0);
        k.st_global(p.y.at(k.cta() * 32u32 + k.thread(), 4), 0, value);
        p.when(|| full.at(0u32).wait_cluster(0u32));
        k.cluster_sync();
    });
}

/// Waiting for the cluster is handed on within the CTA: others wait for the one that did in the scope of the CTA.
#[test]
fn what_one_thread_acquired_from_the_cluster_its_cta_acquires_of_it() {
    caught(FindingKind::Race, &["of shared tile"], cluster(2, 64), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 256, 128);
        let (told, own) = (p.barriers("told", 1, 64), p.barriers("own", 1, 32));
        k.when(leads(p), || {
            told.init();
            own.init();
        });
        publish_barriers(k);
        let peer = k.cluster_rank() ^ 1u32;
        let to = k.mapa(tile.address() + k.thread() * 4u32, peer);
        lines.also(line!() + 1);
        k.st_cluster_vector(to, 0, &[k.thread()]);
        told.at(0u32).peer(peer).arrive();
        let first = || {
            waits(p, told.at(0u32));
            own.at(0u32).arrive();
        };
        let second = || {
            own.at(0u32).wait(0u32);
            lines.here(line!() + 1);
            let value = k.ld_shared::<u32>(tile.address() + k.thread() * 4u32, 0);
            k.st_global(p.y.at(k.cta() * 64u32 + k.thread(), 4), 0, value);
        };
        k.when_else(k.thread().lt(32u32), first, second);
        k.cluster_sync();
    });
}

/// An arrival that was acquired from the own CTA alone is not ordered before the exit of that CTA.
#[test]
fn an_exit_behind_a_wait_for_the_own_cta() {
    caught(FindingKind::RemoteAfterExit, &["CTA"], cluster(2, 32), |p, lines| {
        let k = p.k;
        let done = p.barriers("done", 1, 1);
        k.when(leads(p), || done.init());
        publish_barriers(k);
        k.when(leads(p), || {
            let peer = done.at(0u32).peer(k.cluster_rank() ^ 1u32);
            lines.here(line!() + 1);
            peer.arrive();
        });
        waits(p, done.at(0u32));
    });
}
