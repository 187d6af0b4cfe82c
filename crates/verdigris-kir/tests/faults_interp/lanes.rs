//! What single lanes know: sets of lanes that wait for one another in parts, and bytes that share a word.

use crate::{Planted, caught, cta};
use verdigris_kir::inst::{Cache, Fence, Op, Order, Scope};
use verdigris_kir::interp::FindingKind;
use verdigris_kir::ir::Operand;
use verdigris_kir::tile::ring::publish_barriers;

/// The lanes from `first` on, as many as `mask` has, wait for one another.
fn wait_among(p: Planted<'_>, first: u32, mask: u32) {
    let lane = p.k.thread() - first;
    p.k.when(lane.lt(mask.count_ones()), || p.k.instruction(Op::WarpSync {}, &[], &[Operand::Imm(u64::from(mask))]));
}

#[test]
fn what_a_lane_did_behind_its_own_part_of_the_wait() {
    caught(FindingKind::Race, &["written by lane 0 of warp 0"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 16, 16);
        // In the kernel without the fault lane 0 writes in front of its wait, and lane 1 carries that on to lane 2.
        p.unless(|| k.when(k.thread().eq(0u32), || k.st_shared(tile.address(), 0, k.thread())));
        wait_among(p, 0, 0b011);
        lines.also(line!() + 1);
        p.when(|| k.when(k.thread().eq(0u32), || k.st_shared(tile.address(), 0, k.thread())));
        wait_among(p, 1, 0b110);
        lines.here(line!() + 1);
        k.when(k.thread().eq(2u32), || k.st_global(p.y.address(), 0, k.ld_shared::<u32>(tile.address(), 0)));
    });
}

#[test]
fn what_the_lane_beside_has_waited_for() {
    caught(FindingKind::Race, &["of shared tile"], cta(96), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 16, 16);
        let full = p.barriers("full", 2, 1);
        k.when(k.thread().eq(0u32), || full.init());
        publish_barriers(k);
        let warp = k.thread() >> 5;
        k.when((k.thread() & 31u32).eq(0u32) & warp.gt(0u32), || {
            lines.also(line!() + 1);
            k.st_shared(tile.address() + warp * 4u32, 0, warp);
            full.at(warp - 1u32).arrive();
        });
        k.when(k.thread().eq(0u32), || full.at(0u32).wait(0u32));
        k.when(k.thread().eq(1u32), || full.at(1u32).wait(0u32));
        // Lane 0 has waited for the first word alone.
        lines.here(line!() + 1);
        k.when(k.thread().eq(0u32), || k.st_global(p.y.address(), 0, k.ld_shared::<u32>(tile.address() + p.fault * 4u32, 4)));
    });
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FencedBy {
    Writer,
    Reader,
}

/// A message through a flag in global memory, from one warp to another, by relaxed accesses and fences.
fn message(p: Planted<'_>, lines: &crate::Lines, wrong: FencedBy) {
    let k = p.k;
    let (data, flag) = (p.y.address(), p.y.at(64u32, 4));
    k.when(k.thread().eq(0u32), || k.st_global_with(flag, 0, k.constant(0u32), Order::Relaxed(Scope::Gpu), Cache::Default));
    k.bar_sync();
    let lane = k.thread() & 31u32;
    let meet = |by: FencedBy| if wrong == by { p.unless(|| k.warp_sync()) } else { k.warp_sync() };
    k.when_else(
        k.thread().lt(32u32),
        || {
            lines.also(line!() + 1);
            k.when(lane.eq(0u32), || k.st_global(data, 0, lane + 7u32));
            meet(FencedBy::Writer);
            k.fence(Fence::AcqRel(Scope::Gpu));
            let one = k.constant(1u32);
            k.when(lane.eq(1u32), || k.st_global_with(flag, 0, one, Order::Relaxed(Scope::Gpu), Cache::Default));
        },
        || {
            k.when(lane.eq(0u32), || {
                k.repeat_until(|| k.ld_global_with::<u32>(flag, 0, Order::Relaxed(Scope::Gpu), Cache::Default).ne(0u32));
            });
            k.fence(Fence::AcqRel(Scope::Gpu));
            meet(FencedBy::Reader);
            lines.here(line!() + 1);
            k.when(lane.eq(1u32), || k.st_global(p.y.at(65u32, 4), 0, k.ld_global::<u32>(data, 0)));
        },
    );
}

#[test]
fn a_fence_speaks_for_its_own_lane() {
    for wrong in [FencedBy::Writer, FencedBy::Reader] {
        caught(FindingKind::Race, &["byte 0 of buffer 1"], cta(64).steps(20_000), |p, lines| message(p, lines, wrong));
    }
}

#[test]
fn one_lane_waits_for_a_store_and_another_overwrites_its_source() {
    caught(FindingKind::Race, &["of shared tile"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        k.st_shared(tile.address() + k.thread() * 4u32, 0, k.thread());
        k.fence_proxy_async();
        k.warp_sync();
        k.when(k.thread().eq(0u32), || {
            lines.also(line!() + 1);
            k.bulk_store(p.y.address(), tile.address(), 128u32);
            k.bulk_commit();
            k.bulk_wait(0);
        });
        p.unless(|| k.warp_sync());
        lines.here(line!() + 1);
        k.when(k.thread().eq(1u32), || k.st_shared(tile.address(), 4, k.thread()));
    });
}

// ---- bytes of one word ---------------------------------------------------------------------------------------------

/// Each of four warps writes a byte of the output's first word.
#[track_caller]
fn own_bytes(p: Planted<'_>) {
    let (k, index) = (p.k, p.index());
    k.scope(std::panic::Location::caller(), || {
        k.when((index & 31u32).eq(0u32) & index.lt(128u32), || k.st_global_byte(p.y.at(index >> 5, 1), 0, index));
    });
}

#[test]
fn one_of_four_bytes_of_a_word_is_read_too_early() {
    for byte in 0..4u32 {
        caught(FindingKind::Race, &[&format!("byte {byte} of buffer 1")], cta(128), |p, lines| {
            let k = p.k;
            k.when(p.index().eq(0u32), || k.st_global(p.y.address(), 0, k.constant(0u32)));
            k.bar_sync();
            lines.also(line!() + 1);
            own_bytes(p);
            p.unless(|| k.bar_sync());
            k.when(p.index().eq(32 * ((byte + 1) % 4)), || {
                lines.here(line!() + 1);
                let read = k.ld_global_byte(p.y.address(), i64::from(byte), false);
                k.st_global(p.y.address(), 64, read);
            });
        });
    }
}

#[test]
fn a_fifth_warp_writes_one_of_four_bytes() {
    caught(FindingKind::Race, &["either value may stay", "byte 2 of buffer 1"], cta(160), |p, lines| {
        let k = p.k;
        lines.also(line!() + 1);
        own_bytes(p);
        lines.here(line!() + 1);
        k.when(p.index().eq(128u32), || k.st_global_byte(p.y.at((p.fault * 6u32) ^ 4u32, 1), 0, 5u32));
    });
}

/// A thread reads two bytes of a word, one after the other; who overwrites the first must wait for that read too.
#[test]
fn the_earlier_of_two_bytes_that_were_read_is_overwritten() {
    caught(FindingKind::Race, &["byte 0 of buffer 1"], cta(64), |p, lines| {
        let k = p.k;
        k.when(p.index().lt(4u32), || k.st_global_byte(p.y.at(p.index(), 1), 0, 5u32));
        k.bar_sync();
        k.when_else(
            p.index().lt(32u32),
            || {
                let read = |byte: i64| k.st_global(p.y.address(), 64 + 4 * byte, k.ld_global_byte(p.y.address(), byte, false));
                lines.also(line!() - 1);
                k.when(p.index().eq(0u32), || read(0));
                k.warp_sync();
                k.when(p.index().eq(0u32), || read(1));
            },
            || {
                lines.here(line!() + 1);
                k.when(p.index().eq(32u32) & p.fault.ne(0u32), || k.st_global_byte(p.y.address(), 0, 6u32));
            },
        );
    });
}
