//! Mbarriers, copies by async units, proxies, clusters.

use super::*;
use crate::face::MbarrierArray;
use crate::inst::{Fence, Scope};
use crate::tile::ring::publish_barriers;

const BYTES: u32 = 2048;

fn barrier<'k>(k: Kernel<'k>, name: &'static str, arrivals: u64) -> MbarrierArray<'k> {
    let barrier = k.mbarrier_array(name, 1);
    barrier.arrivals().set(arrivals);
    barrier
}

fn memory() -> Memory {
    let mut memory = Memory::new();
    memory.add(&words(&(0..BYTES).map(|i| i * 5 + 2).collect::<Vec<_>>()));
    memory.add_unwritten(u64::from(4 * BYTES));
    memory
}

const ARGS: [fn() -> Arg; 2] = [|| pointer(0), || pointer(1)];

fn args() -> Vec<Arg> {
    ARGS.iter().map(|make| make()).collect()
}

/// What may be wrong with the loading kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Load {
    Right,
    NoWait,
    TooManyBytes,
    TooFewBytes,
    NoInit,
    NoFence,
    NoOrderAfterInit,
    SecondArrival,
    PlainStore,
    WaitAtTheEndMissing,
}

/// One thread loads 2 KiB, all wait and copy them out.
fn load(fault: Load, plant: &Plant) -> KernelBody {
    kernel(128, 1, |k| {
        let x = k.input("x", 16);
        let y = k.output("y", 16);
        let tile = k.shared("tile", BYTES, 128);
        let full = barrier(k, "full", 1);
        let (i, zero) = (k.thread(), k.constant(0u32));
        let leader = i.eq(0u32);
        k.when(leader, || {
            if fault != Load::NoInit {
                full.init();
            }
        });
        match fault {
            Load::NoFence => k.bar_sync(),
            Load::NoOrderAfterInit => k.fence(Fence::MbarrierInit),
            _ => publish_barriers(k),
        }
        k.when(leader, || {
            let expected = match fault {
                Load::TooManyBytes => BYTES + 16,
                Load::TooFewBytes => BYTES - 16,
                _ => BYTES,
            };
            full.at(zero).arrive_expect_tx(expected);
            if fault == Load::SecondArrival {
                plant!(plant);
                full.at(zero).arrive();
            }
            if matches!(fault, Load::NoFence | Load::WaitAtTheEndMissing) {
                plant!(plant);
                k.bulk_load(tile.address(), x.address(), BYTES, full.at(zero));
            } else {
                k.bulk_load(tile.address(), x.address(), BYTES, full.at(zero));
            }
            if fault == Load::PlainStore {
                plant!(plant);
                k.st_shared(full.at(zero).address(), 0, k.constant(1u32));
            }
        });
        if fault == Load::WaitAtTheEndMissing {
            return;
        }
        if fault != Load::NoWait {
            if matches!(fault, Load::TooManyBytes | Load::NoOrderAfterInit) {
                plant!(plant);
                full.at(zero).wait(0u32);
            } else {
                full.at(zero).wait(0u32);
            }
        }
        let copy_out = || {
            k.range(BYTES / 512, |part| {
                let at = part * 128u32 + i;
                let value = k.ld_shared::<u32>(tile.address() + at * 4u32, 0);
                k.st_global(y.at(at, 4), 0, value);
            });
        };
        if fault == Load::NoWait {
            // The warp that issued it, so that early copies have landed by then.
            k.when(k.warp().eq(0u32), copy_out);
        } else {
            copy_out();
        }
    })
}

#[test]
fn one_cta_copies_right() {
    let body = load(Load::Right, &Plant::default());
    passes(&body, 1, &args(), memory, |memory, report| {
        assert_eq!(read_words(memory, 1)[..512], (0..512).map(|i| i * 5 + 2).collect::<Vec<u32>>()[..]);
        assert_eq!(report.total.global_load_bytes, u64::from(BYTES));
    });
}

#[test]
fn faults_of_a_load() {
    for (fault, kind) in [
        (Load::TooManyBytes, FindingKind::Deadlock),
        (Load::NoFence, FindingKind::ProxyFence),
        (Load::SecondArrival, FindingKind::MbarrierMisuse),
        (Load::PlainStore, FindingKind::MbarrierMisuse),
        (Load::WaitAtTheEndMissing, FindingKind::AsyncAfterExit),
    ] {
        let plant = Plant::default();
        let body = load(fault, &plant);
        fails(&body, 1, &args(), memory, kind, &plant);
    }
}

/// Every schedule finds something, and something of these kinds.
fn finds(body: &KernelBody, kinds: &[FindingKind], must: FindingKind) {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..SEEDS {
        let options = Options { step_budget: 20_000, ..Options::schedule(seed) };
        let findings = run_unchecked(body, 1, &args(), &mut memory(), &options).expect_err("a finding");
        assert!(kinds.contains(&findings.first().kind), "{findings}");
        seen.insert(findings.first().kind);
    }
    assert!(seen.contains(&must), "{seen:?}");
}

#[test]
fn a_copy_that_nobody_waits_for_is_a_race_whenever_it_lands() {
    let body = load(Load::NoWait, &Plant::default());
    finds(&body, &[FindingKind::Race, FindingKind::UnwrittenMemory], FindingKind::Race);
    let body = load(Load::TooFewBytes, &Plant::default());
    finds(&body, &[FindingKind::Race, FindingKind::UnwrittenMemory, FindingKind::Deadlock], FindingKind::Deadlock);
    finds(&load(Load::NoInit, &Plant::default()), &[FindingKind::MbarrierMisuse], FindingKind::MbarrierMisuse);
    let body = load(Load::NoOrderAfterInit, &Plant::default());
    finds(&body, &[FindingKind::Race, FindingKind::MbarrierMisuse], FindingKind::Race);
}

/// What may be wrong with the storing kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Store {
    Right,
    NoProxyFence,
    FenceByOneThread,
    NoBarrier,
    NoWait,
    OverwrittenTooEarly,
    /// The thread has waited for the reads, and writes where the bytes go.
    WrittenBehindTheReads,
}

fn store(fault: Store, plant: &Plant) -> KernelBody {
    kernel(128, 1, |k| {
        let _ = k.input("x", 16);
        let y = k.output("y", 16);
        let tile = k.shared("tile", 512, 128);
        let i = k.thread();
        let leader = i.eq(0u32);
        k.st_shared(tile.address() + i * 4u32, 0, i);
        match fault {
            Store::NoProxyFence => {}
            Store::FenceByOneThread => k.when(leader, || k.fence_proxy_async()),
            _ => k.fence_proxy_async(),
        }
        if fault != Store::NoBarrier {
            k.bar_sync();
        }
        k.when(leader, || {
            plant!(plant);
            k.bulk_store(y.address(), tile.address(), 512u32);
            k.bulk_commit();
            if !matches!(fault, Store::NoWait | Store::OverwrittenTooEarly) {
                k.bulk_wait_read(0);
            }
            if fault == Store::WrittenBehindTheReads {
                k.st_global(y.address(), 0, i);
            }
        });
        if matches!(fault, Store::Right | Store::OverwrittenTooEarly) {
            k.bar_sync();
            k.st_shared(tile.address() + i * 4u32, 0, i + 1u32);
            k.when(leader, || k.bulk_wait_read(0));
        }
    })
}

#[test]
fn a_store_that_is_fenced_and_waited_for() {
    passes(&store(Store::Right, &Plant::default()), 1, &args(), memory, |memory, _| {
        assert_eq!(read_words(memory, 1)[..128], (0..128).collect::<Vec<u32>>()[..]);
    });
}

#[test]
fn faults_of_a_store() {
    for (fault, kind) in [
        (Store::NoProxyFence, FindingKind::ProxyFence),
        (Store::FenceByOneThread, FindingKind::ProxyFence),
        (Store::NoWait, FindingKind::AsyncAfterExit),
        (Store::OverwrittenTooEarly, FindingKind::Race),
        (Store::WrittenBehindTheReads, FindingKind::Race),
    ] {
        let plant = Plant::default();
        fails(&store(fault, &plant), 1, &args(), memory, kind, &plant);
    }
    finds(&store(Store::NoBarrier, &Plant::default()), &[FindingKind::Race, FindingKind::UnwrittenMemory], FindingKind::Race);
}

/// `cp.async` by each thread, read by its neighbour.
fn threads_copy(wait: bool, sync: bool, plant: &Plant) -> KernelBody {
    kernel(64, 1, |k| {
        let x = k.input("x", 16);
        let y = k.output("y", 16);
        let tile = k.shared("tile", 1024, 128);
        let i = k.thread();
        k.cp_async(tile.address() + i * 16u32, 0, x.at(i, 16), 0, 16, 16u32);
        k.cp_async_commit();
        if wait {
            k.cp_async_wait(0);
        }
        if sync {
            k.bar_sync();
        }
        let other = (i + 1u32) & 63u32;
        plant!(plant);
        let value = k.ld_shared::<u32>(tile.address() + other * 16u32, 0);
        k.st_global(y.at(i, 4), 0, value);
    })
}

#[test]
fn copies_by_threads() {
    passes(&threads_copy(true, true, &Plant::default()), 1, &args(), memory, |memory, _| {
        assert_eq!(read_words(memory, 1)[..64], (0..64).map(|i| (i + 1) % 64 * 20 + 2).collect::<Vec<u32>>()[..]);
    });
    for (wait, sync) in [(false, true), (true, false)] {
        finds(&threads_copy(wait, sync, &Plant::default()), &[FindingKind::Race, FindingKind::UnwrittenMemory], FindingKind::Race);
    }
}

/// What a thread copies it may read itself only when it has waited for the copy, and not when its neighbour has.
#[test]
fn a_thread_reads_what_it_copies() {
    let own = |waiting: u32| {
        kernel(32, 1, |k| {
            let (x, y) = (k.input("x", 16), k.output("y", 16));
            let place = k.shared("tile", 128, 128).address() + k.thread() * 4u32;
            k.cp_async(place, 0, x.at(k.thread(), 4), 0, 4, 4u32);
            k.cp_async_commit();
            match waiting {
                0 => {}
                32 => k.cp_async_wait(0),
                lanes => k.when(k.thread().lt(lanes), || k.cp_async_wait(0)),
            }
            k.st_global(y.at(k.thread(), 4), 0, k.ld_shared::<u32>(place, 0));
        })
    };
    passes(&own(32), 1, &args(), memory, |memory, _| {
        assert_eq!(read_words(memory, 1)[..32], (0..32).map(|i| i * 5 + 2).collect::<Vec<u32>>());
    });
    for waiting in [0, 1] {
        finds(&own(waiting), &[FindingKind::Race, FindingKind::UnwrittenMemory], FindingKind::Race);
    }
}

/// Of two groups the later one may be under way behind a wait that leaves one.
#[test]
fn a_wait_covers_the_groups_in_front_of_those_that_it_leaves() {
    let read = |group: i64| {
        kernel(32, 1, |k| {
            let (x, y) = (k.input("x", 16), k.output("y", 16));
            let place = k.shared("tile", 256, 128).address() + k.thread() * 4u32;
            for group in 0..2 {
                k.cp_async(place, 128 * group, x.at(k.thread(), 4), 128 * group, 4, 4u32);
                k.cp_async_commit();
            }
            k.cp_async_wait(1);
            k.st_global(y.at(k.thread(), 4), 0, k.ld_shared::<u32>(place, 128 * group));
            k.cp_async_wait(0);
        })
    };
    passes(&read(0), 1, &args(), memory, |memory, _| {
        assert_eq!(read_words(memory, 1)[..32], (0..32).map(|i| i * 5 + 2).collect::<Vec<u32>>());
    });
    finds(&read(1), &[FindingKind::Race, FindingKind::UnwrittenMemory], FindingKind::Race);
}

/// A waiter whose barrier is driven on by others who do not wait for it.
#[test]
fn a_waiter_that_is_lapped() {
    let plant = Plant::default();
    let body = kernel(64, 1, |k| {
        let (_, _) = (k.input("x", 16), k.output("y", 16));
        let full = barrier(k, "full", 1);
        let zero = k.constant(0u32);
        k.when(k.thread().eq(0u32), || full.init());
        publish_barriers(k);
        k.when_else(
            k.warp().eq(0u32),
            || {
                k.range(40u32, |_| k.when(k.thread().eq(0u32), || full.at(zero).arrive()));
            },
            || {
                plant!(plant);
                full.at(zero).wait(0u32);
            },
        );
    });
    let mut lapped = 0;
    for seed in 0..60 {
        match run_unchecked(&body, 1, &args(), &mut memory(), &Options::schedule(seed)) {
            Ok(_) => {}
            Err(findings) => {
                assert!(matches!(findings.first().kind, FindingKind::MbarrierLapped | FindingKind::Deadlock), "{findings}");
                assert_eq!(findings.first().at[0].line, plant.0.get(), "{findings}");
                lapped += u32::from(findings.first().kind == FindingKind::MbarrierLapped);
            }
        }
    }
    assert!(lapped > 0);
}

/// Each CTA of a cluster writes its peer's shared memory.
fn to_peer(order_before_exit: bool, order_before_read: bool, plant: &Plant) -> KernelBody {
    kernel(32, 2, |k| {
        let _ = k.input("x", 16);
        let y = k.output("y", 16);
        let tile = k.shared("tile", 128, 128);
        let i = k.thread();
        let peer = k.cluster_rank() ^ 1u32;
        let remote = k.mapa(tile.address() + i * 4u32, peer);
        k.cluster_sync();
        plant!(plant);
        k.st_cluster_vector(remote, 0, &[i + k.cluster_rank() * 100u32]);
        if order_before_read {
            k.cluster_sync();
            let value = k.ld_shared::<u32>(tile.address() + i * 4u32, 0);
            k.st_global(y.at(k.cta() * 32u32 + i, 4), 0, value);
        }
        if order_before_exit {
            k.cluster_sync();
        }
    })
}

#[test]
fn clusters_share_memory() {
    passes(&to_peer(false, true, &Plant::default()), 2, &args(), memory, |memory, _| {
        let want: Vec<u32> = (0..32).map(|i| i + 100).chain(0..32).collect();
        assert_eq!(read_words(memory, 1)[..64], want[..]);
    });
    let plant = Plant::default();
    let body = to_peer(false, false, &plant);
    fails(&body, 2, &args(), memory, FindingKind::RemoteAfterExit, &plant);
}

/// What may be wrong where CTAs of a cluster send each other words without a barrier of the cluster behind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Message {
    Right,
    /// The barriers were not fenced before they were handed on.
    NoInitFence,
    /// A word written in front of the relaxed arrival is read by the peer: the fence of the barriers hands on nothing else.
    PlainWord,
    /// The same behind a fence of its own.
    FencedWord,
    /// Nobody waits for the words.
    NotWaitedFor,
}

/// Each thread sends its peer in the other CTA a word, which completes on that CTA's mbarrier.
fn message(fault: Message, plant: &Plant) -> KernelBody {
    kernel(32, 2, |k| {
        let _ = k.input("x", 16);
        let y = k.output("y", 16);
        let (inbox, plain) = (k.shared("inbox", 128, 16), k.shared("plain", 128, 16));
        let full = barrier(k, "full", 1);
        let (i, zero) = (k.thread(), k.constant(0u32));
        let peer = k.cluster_rank() ^ 1u32;
        k.when(i.eq(0u32), || full.init());
        k.st_shared(plain.address() + i * 4u32, 0, i);
        if fault == Message::FencedWord {
            k.fence(Fence::AcqRel(Scope::Cluster));
        }
        if fault == Message::NoInitFence {
            k.bar_sync();
            k.cluster_arrive_relaxed();
            k.cluster_wait();
        } else {
            publish_barriers(k);
        }
        if matches!(fault, Message::PlainWord | Message::FencedWord) {
            plant!(plant);
            let word = k.ld_cluster_vector::<u32>(k.mapa(plain.address() + i * 4u32, peer), 0, 1)[0];
            k.st_global(y.at(k.cta() * 32u32 + i, 4), 0, word);
            k.cluster_sync();
            return;
        }
        k.when(i.eq(0u32), || full.at(zero).arrive_expect_tx(128u32));
        let to = k.mapa(inbox.address() + i * 4u32, peer);
        plant!(plant);
        k.st_async(to, full.at(zero).peer(peer), &[i + k.cluster_rank() * 100u32]);
        if fault == Message::NotWaitedFor {
            return;
        }
        full.at(zero).wait_cluster(0u32);
        let word = k.ld_shared::<u32>(inbox.address() + i * 4u32, 0);
        k.st_global(y.at(k.cta() * 32u32 + i, 4), 0, word);
    })
}

#[test]
fn whoever_has_waited_for_its_words_may_leave() {
    passes(&message(Message::Right, &Plant::default()), 2, &args(), memory, |memory, _| {
        let want: Vec<u32> = (0..32).map(|i| i + 100).chain(0..32).collect();
        assert_eq!(read_words(memory, 1)[..64], want[..]);
    });
    passes(&message(Message::FencedWord, &Plant::default()), 2, &args(), memory, |memory, _| {
        let want: Vec<u32> = (0..32).chain(0..32).collect();
        assert_eq!(read_words(memory, 1)[..64], want[..]);
    });
    for (fault, kind) in [(Message::NoInitFence, FindingKind::Race), (Message::PlainWord, FindingKind::Race)] {
        let plant = Plant::default();
        let body = message(fault, &plant);
        fails(&body, 2, &args(), memory, kind, &plant);
    }
    // Whether the words are there by then or not.
    let body = message(Message::NotWaitedFor, &Plant::default());
    for seed in 0..SEEDS {
        let findings = run_unchecked(&body, 2, &args(), &mut memory(), &Options::schedule(seed)).expect_err("a CTA leaves too early");
        assert!(matches!(findings.first().kind, FindingKind::RemoteAfterExit | FindingKind::AsyncAfterExit), "{findings}");
    }
}

#[test]
fn cluster_barrier_out_of_step() {
    let plant = Plant::default();
    let body = kernel(32, 2, |k| {
        let (_, _) = (k.input("x", 16), k.output("y", 16));
        k.cluster_arrive();
        plant!(plant);
        k.cluster_arrive();
        k.cluster_wait();
    });
    fails(&body, 2, &args(), memory, FindingKind::BarrierMisuse, &plant);
    let body = kernel(32, 2, |k| {
        let (_, _) = (k.input("x", 16), k.output("y", 16));
        plant!(plant);
        k.cluster_wait();
    });
    fails(&body, 2, &args(), memory, FindingKind::BarrierMisuse, &plant);
}

#[test]
fn named_barriers_agree_on_their_threads() {
    let plant = Plant::default();
    let body = kernel(128, 1, |k| {
        let (_, _) = (k.input("x", 16), k.output("y", 16));
        k.when_else(
            k.warp().lt(2u32),
            || k.barrier_sync(1u32, 96),
            || {
                plant!(plant);
                k.barrier_sync(1u32, 64);
            },
        );
    });
    // Two warps complete the barrier of 64 between them, or meet the other count: both are wrong, and one hangs.
    finds(&body, &[FindingKind::BarrierMisuse, FindingKind::Deadlock], FindingKind::BarrierMisuse);
}
