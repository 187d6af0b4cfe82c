//! Copies by asynchronous units without a tensor map: `cp.async`, bulk copies and reductions, stores to another CTA.

use super::kit::{check, column, imm, load, operand, own, probe, results, rule_of, thread_of_grid};
use super::values::{Domain, Random, value};
use super::{Contents, Probe, Rule};
use std::sync::Arc;
use verdigris_kir::face::{Header, Kernel, MbarrierArray, Val};
use verdigris_kir::inst::{BulkReduce, Cache, Fence, Op};
use verdigris_kir::inst_samples::samples;
use verdigris_kir::ir::{Operand, Target};

const THREADS: usize = 64;

pub(super) fn probes() -> Vec<Probe> {
    let mut probes = vec![cp_async(), cp_async_arrive()];
    probes.push(bulk_loads(false));
    probes.push(bulk_loads(true));
    probes.push(bulk_stores());
    let reductions: Vec<Op> = samples().into_iter().map(|sample| sample.op).filter(|op| matches!(op, Op::BulkReduceStore { .. })).collect();
    for (part, ops) in reductions.chunks(8).enumerate() {
        probes.push(bulk_reductions(part, ops));
    }
    probes.push(to_peer());
    probes.push(async_stores());
    probes
}

/// Initialized mbarriers that every thread of the CTA (of the cluster) may use; each completes after `arrivals` arrivals.
#[track_caller]
pub(super) fn barriers<'k>(k: Kernel<'k>, count: u32, arrivals: u64) -> MbarrierArray<'k> {
    let bars = k.mbarrier_array("bars", count);
    bars.arrivals().set(arrivals);
    k.when(k.thread().eq(0u32), || bars.init());
    k.fence(Fence::MbarrierInit);
    if k.cluster_ctas() > 1 {
        k.cluster_sync();
    } else {
        k.bar_sync();
    }
    bars
}

/// Copies `bytes` bytes of shared memory to global memory, 16 by each thread and turn.
#[track_caller]
pub(super) fn copy_out<'k>(k: Kernel<'k>, shared: Val<'k, u32>, global: Val<'k, u64>, bytes: u32) {
    k.range_step(k.thread() * 16, bytes, k.threads() * 16, |at| {
        let words: Vec<Val<'_, u32>> = k.ld_shared_vector(shared + at, 0, 4);
        k.st_global_vector(global + at.widen(), 0, &words, Cache::Default);
    });
}

/// Copies `bytes` bytes of global memory to shared memory, and meets.
#[track_caller]
pub(super) fn copy_in<'k>(k: Kernel<'k>, global: Val<'k, u64>, shared: Val<'k, u32>, bytes: u32) {
    k.range_step(k.thread() * 16, bytes, k.threads() * 16, |at| {
        let words: Vec<Val<'_, u32>> = k.ld_global_vector(global + at.widen(), 0, 4, Cache::Default);
        k.st_shared_vector(shared + at, 0, &words);
    });
}

/// Each size, whole and cut short, in groups that are waited for one after the other.
fn cp_async() -> Probe {
    let name = "bulk/cp-async";
    let mut random = Random::new(name);
    let ops: Vec<Op> = samples().into_iter().map(|sample| sample.op).filter(|op| matches!(op, Op::CpAsync { .. })).collect();
    let input = random.bytes(THREADS * 16);
    let sizes: Vec<u8> = (0..THREADS).flat_map(|_| (random.below(17) as u32).to_le_bytes()).collect();
    let checks = ops
        .iter()
        .enumerate()
        .map(|(place, op)| {
            let Op::CpAsync { bytes, .. } = op else { return check("", &[], column(2, 0, 0, 0, 0), Rule::Bits) };
            let names = ["CpAsync", "CpAsyncCommit", "CpAsyncWait", "SharedAddress"];
            let result = column(2, place * THREADS * 16, 16, 16, THREADS);
            let mut check = check(format!("{op:?}, {bytes} bytes or fewer"), &names, result, Rule::Bits);
            check.operands = vec![column(0, 0, 16, 16, THREADS), column(1, 0, 4, 4, THREADS)];
            check
        })
        .collect();
    let buffers = vec![Contents::Bytes(input), Contents::Bytes(sizes), results(ops.len() * THREADS * 16)];
    let header = Header { name: name.into(), threads: THREADS as u32, ..Header::default() };
    let ops: Arc<[Op]> = ops.into();
    probe(header, 1, buffers, checks, move |k| {
        let (input, sizes, output) = (k.input("data", 256), k.input("sizes", 256), k.output("results", 256));
        let piece = k.shared("data", (ops.len() * THREADS * 16) as u32, 128);
        let to = piece.address() + k.thread() * 16;
        let step = THREADS * 16;
        let zero = k.constant(0x1234_5678u32);
        for place in 0..ops.len() {
            k.st_shared_vector(to, (place * step) as i64, &[zero; 4]);
        }
        k.bar_sync();
        let size: Val<'_, u32> = k.ld_global(sizes.at(k.thread(), 4), 0);
        let from = own(k, input, 16);
        for (place, op) in ops.iter().enumerate() {
            let Op::CpAsync { bytes, .. } = op else { continue };
            let ins = [operand(to), imm((place * step) as u64), from, imm(0), operand(size.min(u32::from(*bytes)))];
            k.instruction(op.clone(), &[], &ins);
            k.cp_async_commit();
        }
        for place in 0..ops.len() {
            k.cp_async_wait((ops.len() - 1 - place) as u32);
            let words: Vec<Val<'_, u32>> = k.ld_shared_vector(to, (place * step) as i64, 4);
            k.st_global_vector(output.at(k.thread(), 16), (place * step) as i64, &words, Cache::Default);
        }
    })
}

/// Copies that arrive on an mbarrier, of which a neighbour reads the bytes.
fn cp_async_arrive() -> Probe {
    let name = "bulk/cp-async-arrive";
    let mut random = Random::new(name);
    let bytes = THREADS * 16;
    let names = ["CpAsyncArrive", "MbarrierInit", "MbarrierWait"];
    let checks = vec![
        check("cp.async.mbarrier.arrive.noinc", &names, column(1, 0, 16, 16, THREADS), Rule::Bits),
        check("cp.async.mbarrier.arrive", &["CpAsyncArrive", "MbarrierArrive"], column(1, bytes, 16, 16, THREADS), Rule::Bits),
    ];
    let buffers = vec![Contents::Bytes(random.bytes(bytes)), results(2 * bytes)];
    let header = Header { name: name.into(), target: Target::Sm90, threads: THREADS as u32, ..Header::default() };
    probe(header, 1, buffers, checks, move |k| {
        let (input, output) = (k.input("data", 256), k.output("results", 256));
        let piece = k.shared("data", 2 * bytes as u32, 128);
        let bars = barriers(k, 2, THREADS as u64);
        let to = piece.address() + k.thread() * 16;
        let neighbour = piece.address() + (k.thread() ^ 33) * 16;
        for (turn, no_increment) in [true, false].into_iter().enumerate() {
            let bar = bars.at(turn as u32);
            k.cp_async(to, (turn * bytes) as i64, input.at(k.thread(), 16), 0, 16, 16u32);
            k.instruction(Op::CpAsyncArrive { no_increment }, &[], &[operand(bar.address()), imm(0)]);
            if !no_increment {
                // That arrival was added to the count first: the barrier's own is still due.
                bar.arrive();
            }
            bar.wait(0u32);
            let words: Vec<Val<'_, u32>> = k.ld_shared_vector(neighbour, (turn * bytes) as i64, 4);
            k.st_global_vector(output.at(k.thread(), 16), (turn * bytes) as i64, &words, Cache::Default);
        }
    })
}

const BULK: [u32; 4] = [16, 48, 1024, 2032];
const BULK_SLOT: u32 = 2048;

/// Loads of several sizes with and without a policy; multicast to both CTAs of a cluster.
fn bulk_loads(multicast: bool) -> Probe {
    let name = if multicast { "bulk/load-multicast" } else { "bulk/load" };
    let ctas: u32 = if multicast { 2 } else { 1 };
    let mut random = Random::new(name);
    let cases: Vec<(bool, u32)> = [false, true].iter().flat_map(|&hint| BULK.map(|bytes| (hint, bytes))).collect();
    let total = cases.len() as u32 * BULK_SLOT;
    let mut checks = Vec::new();
    for cta in 0..ctas {
        for (place, (hint, bytes)) in cases.iter().enumerate() {
            let what = format!("{:?} of {bytes} bytes, CTA {cta}", Op::BulkLoad { multicast, hint: *hint });
            let names = ["BulkLoad", "BulkPrefetch", "MbarrierArriveExpect", "MbarrierWait"];
            let result = column(1, (cta * total) as usize + place * BULK_SLOT as usize, 16, 16, *bytes as usize / 16);
            checks.push(check(what, &names, result, Rule::Bits));
        }
    }
    let buffers = vec![Contents::Bytes(random.bytes(total as usize)), results((ctas * total) as usize)];
    // ptxas warns of multicast on the portable target.
    let target = if multicast { Target::Sm90a } else { Target::Sm90 };
    let header = Header { name: name.into(), target, threads: THREADS as u32, cluster: ctas, ..Header::default() };
    probe(header, ctas, buffers, checks, move |k| {
        let (input, output) = (k.input("data", 256), k.output("results", 256));
        let piece = k.shared("data", total, 128);
        let bars = barriers(k, cases.len() as u32, 1);
        let rank = if multicast { k.cluster_rank() } else { k.constant(0u32) };
        k.when(k.thread().eq(0u32), || {
            k.instruction(Op::BulkPrefetch {}, &[], &[operand(input.address()), imm(total.into())]);
            for (place, &(hint, bytes)) in cases.iter().enumerate() {
                let bar = bars.at(place as u32);
                bar.arrive_expect_tx(bytes);
                let offset = place as u32 * BULK_SLOT;
                let issue = || {
                    let mut ins = vec![
                        operand(piece.address() + offset),
                        operand(input.address() + u64::from(offset)),
                        imm(bytes.into()),
                        operand(bar.address()),
                    ];
                    if multicast {
                        ins.push(imm(3));
                    }
                    if hint {
                        ins.push(operand(k.create_policy(place % 2 == 0)));
                    }
                    k.instruction(Op::BulkLoad { multicast, hint }, &[], &ins);
                };
                if multicast {
                    k.when(rank.eq(place as u32 % 2), issue);
                } else {
                    issue();
                }
            }
        });
        for (place, &(_, bytes)) in cases.iter().enumerate() {
            bars.at(place as u32).wait(0u32);
            let offset = place as u32 * BULK_SLOT;
            let to = output.at(rank, total) + u64::from(offset);
            copy_out(k, piece.address() + offset, to, bytes);
        }
        if multicast {
            k.cluster_sync();
        }
    })
}

/// Stores in groups: with and without a policy, waiting for the reading and for the writing, and a load behind a fence of global memory.
fn bulk_stores() -> Probe {
    let name = "bulk/store";
    let mut random = Random::new(name);
    let total = 2 * 4 * BULK_SLOT;
    let cases: Vec<(bool, u32)> = [false, true].iter().flat_map(|&hint| BULK.map(|bytes| (hint, bytes))).collect();
    let mut checks: Vec<_> = cases
        .iter()
        .enumerate()
        .map(|(place, (hint, bytes))| {
            let what = format!("{:?} of {bytes} bytes", Op::BulkStore { hint: *hint });
            let names = ["BulkStore", "BulkCommit", "BulkWait", "MemoryFence", "CreatePolicy"];
            check(what, &names, column(1, place * BULK_SLOT as usize, 16, 16, *bytes as usize / 16), Rule::Bits)
        })
        .collect();
    let back = total as usize;
    let names = ["MemoryFence", "BulkLoad"];
    checks.push(check(
        "a bulk load of what the thread stored before fence.proxy.async.global",
        &names,
        column(1, back, 4, 4, 64),
        Rule::Bits,
    ));
    checks.push(check("the same with fence.proxy.async", &names, column(1, back + 256, 4, 4, 64), Rule::Bits));
    checks.push(check("what the thread stored", &names, column(1, back + 512, 4, 4, 128), Rule::Bits));
    let buffers = vec![Contents::Bytes(random.bytes(total as usize)), results(back + 1024)];
    let header = Header { name: name.into(), target: Target::Sm90, threads: THREADS as u32, ..Header::default() };
    probe(header, 1, buffers, checks, move |k| {
        let (input, output) = (k.input("data", 256), k.in_out("results", 256));
        let piece = k.shared("data", total, 128);
        let tail = k.shared("tail", 512, 128);
        let bars = barriers(k, 2, 1);
        copy_in(k, input.address(), piece.address(), total);
        k.fence_proxy_async();
        k.bar_sync();
        k.when(k.thread().eq(0u32), || {
            for (place, &(hint, bytes)) in cases.iter().enumerate() {
                let offset = place as u32 * BULK_SLOT;
                let mut ins = vec![operand(output.address() + u64::from(offset)), operand(piece.address() + offset), imm(bytes.into())];
                if hint {
                    ins.push(operand(k.create_policy(place % 2 == 0)));
                }
                k.instruction(Op::BulkStore { hint }, &[], &ins);
                k.bulk_commit();
                match place {
                    1 => k.bulk_wait_read(1),
                    2 => k.bulk_wait_read(0),
                    3 => k.bulk_wait(1),
                    _ => {}
                }
            }
            k.bulk_wait(0);
            for (turn, fence) in [Fence::ProxyAsyncGlobal, Fence::ProxyAsync].into_iter().enumerate() {
                let from = output.address() + (u64::from(total) + 512 + 256 * turn as u64);
                for word in 0..16i64 {
                    let words: Vec<Val<'_, u32>> = k.ld_global_vector(input.address(), 16 * word, 4, Cache::Default);
                    k.st_global_vector(from, 16 * word, &words, Cache::Default);
                }
                k.fence(fence);
                let bar = bars.at(turn as u32);
                bar.arrive_expect_tx(256u32);
                k.bulk_load(tail.address() + 256 * turn as u32, from, 256u32, bar);
            }
        });
        for turn in 0..2u32 {
            bars.at(turn).wait(0u32);
            copy_out(k, tail.address() + 256 * turn, output.address() + u64::from(total + 256 * turn), 256);
        }
    })
}

fn bulk_reductions(part: usize, ops: &[Op]) -> Probe {
    const BYTES: usize = 1024;
    let name = format!("bulk/reduce-{part}");
    let mut random = Random::new(&name);
    let (mut sources, mut memory, mut checks) = (Vec::new(), Vec::new(), Vec::new());
    for (place, op) in ops.iter().enumerate() {
        let Op::BulkReduceStore { op: reduce, ty } = op else { continue };
        let width = ty.bytes() as usize;
        for into in [&mut sources, &mut memory] {
            for _ in 0..BYTES / width {
                into.extend_from_slice(&value(*ty, Domain::Any, &mut random).to_le_bytes()[..width]);
            }
        }
        let arithmetic = matches!(reduce, BulkReduce::Add | BulkReduce::Min | BulkReduce::Max);
        let rule = if arithmetic { rule_of(*ty) } else { Rule::Bits };
        let result = column(1, place * BYTES, width, width, BYTES / width);
        let mut check = check(format!("{op:?}"), &["BulkReduceStore", "BulkCommit", "BulkWait"], result, rule);
        check.operands = vec![result, column(0, place * BYTES, width, width, BYTES / width)];
        checks.push(check);
    }
    let buffers = vec![Contents::Bytes(sources), Contents::Bytes(memory)];
    let header = Header { name, target: Target::Sm90, threads: THREADS as u32, ..Header::default() };
    let ops: Arc<[Op]> = ops.into();
    probe(header, 1, buffers, checks, move |k| {
        let (input, memory) = (k.input("data", 256), k.in_out("memory", 256));
        let total = (ops.len() * BYTES) as u32;
        let piece = k.shared("data", total, 128);
        copy_in(k, input.address(), piece.address(), total);
        k.fence_proxy_async();
        k.bar_sync();
        k.when(k.thread().eq(0u32), || {
            for (place, op) in ops.iter().enumerate() {
                let offset = (place * BYTES) as u32;
                let ins = [operand(memory.address() + u64::from(offset)), operand(piece.address() + offset), imm(BYTES as u64)];
                k.instruction(op.clone(), &[], &ins);
            }
            k.bulk_commit();
            k.bulk_wait(0);
        });
    })
}

/// Shared memory to the other CTA of the cluster.
fn to_peer() -> Probe {
    const BYTES: u32 = 2048;
    let name = "bulk/to-peer";
    let mut random = Random::new(name);
    let names = ["BulkCopyToPeer", "MapShared", "ClusterArrive", "ClusterWait", "MbarrierExpect"];
    let checks = vec![check("a bulk copy to the other CTA", &names, column(1, 0, 16, 16, 2 * BYTES as usize / 16), Rule::Bits)];
    let buffers = vec![Contents::Bytes(random.bytes(2 * BYTES as usize)), results(2 * BYTES as usize)];
    let header = Header { name: name.into(), target: Target::Sm90, threads: THREADS as u32, cluster: 2, ..Header::default() };
    probe(header, 2, buffers, checks, move |k| {
        let (input, output) = (k.input("data", 256), k.output("results", 256));
        let (from, to) = (k.shared("from", BYTES, 128), k.shared("to", BYTES, 128));
        let bars = barriers(k, 1, 1);
        copy_in(k, input.at(k.cta(), BYTES), from.address(), BYTES);
        k.fence_proxy_async();
        k.bar_sync();
        let bar = bars.at(0u32);
        k.when(k.thread().eq(0u32), || {
            bar.expect_tx(BYTES);
            bar.arrive();
            let other = k.cluster_rank() ^ 1;
            k.bulk_copy_to_peer(k.mapa(to.address(), other), from.address(), BYTES, bar.peer(other));
        });
        bar.wait_cluster(0u32);
        copy_out(k, to.address(), output.at(k.cta(), BYTES), BYTES);
        k.cluster_sync();
    })
}

/// Stores and reductions of threads into the other CTA, which complete on its mbarrier by bytes.
fn async_stores() -> Probe {
    let name = "bulk/async-stores";
    let mut random = Random::new(name);
    let ops: Vec<Op> =
        samples().into_iter().map(|sample| sample.op).filter(|op| matches!(op, Op::StAsync { .. } | Op::RedAsync { .. })).collect();
    let lanes = 2 * THREADS;
    let input: Vec<u8> = (0..4 * lanes).flat_map(|_| random.next().to_le_bytes()).collect();
    let step = THREADS * 16;
    let checks = ops
        .iter()
        .enumerate()
        .map(|(place, op)| {
            let names = [op.name(), "MapShared", "MbarrierWait"];
            let mut check = check(format!("{op:?}"), &names, column(1, place * 2 * step, 16, 16, lanes), Rule::Bits);
            check.operands = vec![column(0, 0, 8, 8, lanes)];
            check
        })
        .collect();
    let buffers = vec![Contents::Bytes(input), results(ops.len() * 2 * step)];
    let header = Header { name: name.into(), target: Target::Sm90, threads: THREADS as u32, cluster: 2, ..Header::default() };
    let ops: Arc<[Op]> = ops.into();
    probe(header, 2, buffers, checks, move |k| {
        let (input, output) = (k.input("data", 256), k.output("results", 256));
        let piece = k.shared("data", (ops.len() * step) as u32, 128);
        let bars = barriers(k, ops.len() as u32, 1);
        let mine = piece.address() + k.thread() * 16;
        let from = own(k, input, 8);
        // What is there before: the thread's own first 16 bytes of the input.
        let before: Vec<Val<'_, u32>> = k.ld_global_vector(input.at(thread_of_grid(k), 16), 0, 4, Cache::Default);
        for place in 0..ops.len() {
            k.st_shared_vector(mine, (place * step) as i64, &before);
        }
        let bytes = |op: &Op| -> u32 {
            match op {
                Op::StAsync { ty, count } => ty.bytes() * u32::from(*count),
                Op::RedAsync { ty, .. } => ty.bytes(),
                _ => 0,
            }
        };
        k.when(k.thread().eq(0u32), || {
            for (place, op) in ops.iter().enumerate() {
                bars.at(place as u32).arrive_expect_tx(bytes(op) * THREADS as u32);
            }
        });
        k.cluster_sync();
        let other = k.cluster_rank() ^ 1;
        for (place, op) in ops.iter().enumerate() {
            let there = k.mapa(mine + (place * step) as u32, other);
            let mut ins: Vec<Operand> = vec![operand(there), operand(bars.at(place as u32).peer(other).address())];
            let types = op.signature().ins;
            ins.extend(types[2..].iter().enumerate().map(|(index, ty)| -> Operand { load(k, *ty, from, index * lanes * 8).into() }));
            k.instruction(op.clone(), &[], &ins);
        }
        for place in 0..ops.len() {
            bars.at(place as u32).wait_cluster(0u32);
            let words: Vec<Val<'_, u32>> = k.ld_shared_vector(mine, (place * step) as i64, 4);
            k.st_global_vector(output.at(thread_of_grid(k), 16), (place * 2 * step) as i64, &words, Cache::Default);
        }
        k.cluster_sync();
    })
}
