//! Copies on purpose: im2col loads, tensor maps changed on the device, `cp.async` that arrives on mbarriers.

use crate::{Planted, Shows, caught, cta, plant, words};
use verdigris_kir::face::{AsVal, LoadOptions, TensorMap, Val};
use verdigris_kir::inst::{Fence, MapField, Op, Scope, Space};
use verdigris_kir::interp::FindingKind;
use verdigris_kir::ir::{Access, MapDecl, MapType, Operand, Swizzle};
use verdigris_kir::program::{Address, Arg, Fill, L2Promotion, MapSpec};
use verdigris_kir::tile::im2col::Im2colTile;
use verdigris_kir::tile::ring::publish_barriers;

fn leads<'k>(p: Planted<'k>) -> Val<'k, bool> {
    p.k.thread().eq(0u32)
}

// ---- im2col --------------------------------------------------------------------------------------------------------

const PIXELS: Im2colTile = Im2colTile { pixels: 16, ty: MapType::Bf16, spatial: 2 };

/// The input as images of 4 × 4 pixels of 64 channels, under a filter of 3 × 3 with a border of one pixel.
fn images() -> Arg {
    let spec = MapSpec {
        decl: PIXELS.map(),
        dims: vec![64, 4, 4, 8],
        strides_bytes: vec![128, 512, 2048],
        element_strides: vec![1; 4],
        lower_corner: vec![-1, -1],
        upper_corner: vec![-1, -1],
        fill: Fill::Zero,
        l2: L2Promotion::None,
    };
    Arg::TensorMap(Address::buffer(0), spec)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pixels {
    ReadTooEarly,
    MoreBytesExpected,
    FilterOutOfRange,
    ChannelWithinChunk,
}

/// Loads 16 pixels at filter position (1, 1) of image 1 (that is, the image as it stands) and writes them out in plain order.
fn pixels(p: Planted<'_>, lines: &crate::Lines, wrong: Pixels) {
    const BYTES: u32 = 16 * 128;
    let k = p.k;
    let map = k.tensor_map("images", PIXELS.map());
    let tile = k.shared("pixels", BYTES, 1024);
    let full = p.barriers("full", 1, 1);
    k.range(4u32, |part| k.st_shared(tile.address() + (part * 128u32 + k.thread()) * 4u32, 0, k.constant(0u32)));
    k.when(leads(p), || full.init());
    k.fence_proxy_async();
    publish_barriers(k);
    let factor = |which| if wrong == which { p.fault } else { p.fault * 0u32 };
    k.when(leads(p), || {
        full.at(0u32).arrive_expect_tx(factor(Pixels::MoreBytesExpected) * 16u32 + BYTES);
        let base = [k.constant(-1i32), k.constant(-1i32)];
        let tap = factor(Pixels::FilterOutOfRange) * 999u32 + 1u32;
        let (channel, one, options) = (factor(Pixels::ChannelWithinChunk) * 3u32, k.constant(1u32), LoadOptions::default());
        lines.here(if matches!(wrong, Pixels::FilterOutOfRange | Pixels::ChannelWithinChunk) { line!() + 2 } else { 0 });
        lines.also(if wrong == Pixels::ReadTooEarly { line!() + 1 } else { 0 });
        PIXELS.load(tile.address(), &map, channel, &base, one, &[tap, one], full.at(0u32), options);
    });
    if wrong == Pixels::ReadTooEarly {
        p.unless(|| full.at(0u32).wait(0u32));
    } else {
        lines.here(if wrong == Pixels::MoreBytesExpected { line!() + 1 } else { lines.first.get() });
        full.at(0u32).wait(0u32);
    }
    k.range(4u32, |part| {
        let word = part * 128u32 + k.thread();
        let (row, column) = (word >> 5u32, word & 31u32);
        let chunk = (column >> 2u32) ^ (row & 7u32);
        let from = tile.address() + row * 128u32 + (chunk << 4u32) + ((column & 3u32) << 2u32);
        lines.here(if wrong == Pixels::ReadTooEarly { line!() + 1 } else { lines.first.get() });
        let value = k.ld_shared::<u32>(from, 0);
        k.st_global(p.y.at(word, 4), 0, value);
    });
    if wrong == Pixels::ReadTooEarly {
        p.when(|| full.at(0u32).wait(0u32));
    }
}

#[test]
fn pixels_in_im2col_order() {
    for (wrong, kind, said) in [
        (Pixels::ReadTooEarly, FindingKind::Race, "of shared pixels"),
        (Pixels::MoreBytesExpected, FindingKind::Deadlock, "16 bytes are missing"),
        (Pixels::FilterOutOfRange, FindingKind::IllegalOperand, "the filter offset"),
        (Pixels::ChannelWithinChunk, FindingKind::IllegalOperand, "the innermost coordinate is 3, must be a multiple of 8 (16 bytes)"),
    ] {
        let planting = plant(cta(128).with(images()), |p, lines| pixels(p, lines, wrong));
        planting.clean(|memory| assert_eq!(words(memory, 1, 512), (512..1024).collect::<Vec<u32>>()));
        planting.faulty(Shows::Always, &[kind], &[said]);
    }
}

// ---- tensor maps in memory -----------------------------------------------------------------------------------------

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
enum Changed {
    NotAcquired,
    AcquiredByAnotherLane,
    NotReleased,
    PublishedTooEarly,
    RankChanged,
    OddStride,
}

/// A map is changed to start at row 8, published to the output's last 128 bytes, taken over and used.
fn changed(p: Planted<'_>, lines: &crate::Lines, wrong: Changed) {
    const BYTES: u32 = 512;
    let k = p.k;
    let template = k.tensor_map_template("template", decl());
    let room = k.shared("room", 128, 128);
    let tile = k.shared("tile", BYTES, 128);
    let full = p.barriers("full", 1, 1);
    k.when(leads(p), || full.init());
    publish_barriers(k);
    let place = p.y.moved(k.constant(crate::OUTPUT_BYTES - 128)).address();
    let changed = TensorMap::in_global(place, decl());
    k.when(leads(p), || {
        k.tensormap_copy(room, &template);
        k.tensormap_replace::<u64>(room, MapField::GlobalAddress, p.x.at(8u32 * 64, 4));
        let rank = if wrong == Changed::RankChanged { p.fault + 1u32 } else { p.fault * 0u32 + 1u32 };
        lines.here(if wrong == Changed::RankChanged { line!() + 1 } else { 0 });
        k.tensormap_replace::<u32>(room, MapField::Rank, rank);
        let odd = if wrong == Changed::OddStride { p.fault * 8u32 } else { p.fault * 0u32 };
        lines.also(if wrong == Changed::PublishedTooEarly { line!() + 1 } else { 0 });
        k.tensormap_replace::<u64>(room, MapField::GlobalStride(0), (odd + 256u32).widen());
    });
    let early = wrong == Changed::PublishedTooEarly;
    k.when(p.fault.eq(u32::from(!early)) | p.fault.eq(0u32), || k.warp_sync());
    lines.here(if early { line!() + 4 } else { lines.first.get() });
    if matches!(wrong, Changed::NotAcquired | Changed::AcquiredByAnotherLane) {
        lines.also(line!() + 2);
    }
    k.tensormap_publish(place, room, Scope::Gpu);
    if wrong == Changed::NotReleased {
        // The map is changed once more, where it is.
        k.warp_sync();
        k.when(leads(p), || {
            let op = Op::TensormapReplace { field: MapField::GlobalDim(1), space: Space::Global };
            lines.also(line!() + 1);
            k.instruction(op, &[], &[place.operand(), Operand::Imm(56)]);
            p.unless(|| k.fence(Fence::TensormapRelease(Scope::Gpu)));
        });
    }
    match wrong {
        Changed::NotAcquired => p.unless(|| k.tensormap_acquire(&changed, Scope::Gpu)),
        Changed::AcquiredByAnotherLane => k.when(k.thread().eq(p.fault), || k.tensormap_acquire(&changed, Scope::Gpu)),
        _ => k.tensormap_acquire(&changed, Scope::Gpu),
    }
    k.when(leads(p), || {
        full.at(0u32).arrive_expect_tx(BYTES);
        let at = [k.constant(0i32), k.constant(1i32)];
        if !matches!(wrong, Changed::PublishedTooEarly | Changed::RankChanged) {
            lines.here(line!() + 2);
        }
        k.tma_load(tile.address(), &changed, &at, full.at(0u32), LoadOptions::default());
    });
    full.at(0u32).wait(0u32);
    k.range(4u32, |row| {
        let word = row * 32u32 + k.thread();
        k.st_global(p.y.at(word, 4), 0, k.ld_shared::<u32>(tile.address() + word * 4u32, 0));
    });
}

#[test]
fn tensor_maps_changed_on_the_device() {
    let want: Vec<u32> = (9..13).flat_map(|row| (0..32).map(move |column| row * 64 + column)).collect();
    for (wrong, kind, said) in [
        (Changed::NotAcquired, FindingKind::ProxyFence, "no fence.proxy.tensormap acquire"),
        (Changed::AcquiredByAnotherLane, FindingKind::ProxyFence, "no fence.proxy.tensormap acquire"),
        (Changed::NotReleased, FindingKind::ProxyFence, "no fence.proxy.tensormap release"),
        (Changed::PublishedTooEarly, FindingKind::Race, "of shared room"),
        (Changed::RankChanged, FindingKind::IllegalOperand, "Rank of a tensor map of rank 2 cannot be set to 2"),
        (Changed::OddStride, FindingKind::IllegalOperand, "the byte stride"),
    ] {
        let planting = plant(cta(32).with(map()), |p, lines| changed(p, lines, wrong));
        planting.clean(|memory| assert_eq!(words(memory, 1, 128), want));
        planting.faulty(Shows::Always, &[kind], &[said]);
    }
}

/// The same of a map that stores may use as well.
fn output_map() -> Arg {
    let Arg::TensorMap(address, spec) = map() else { unreachable!("it is a tensor map") };
    Arg::TensorMap(address, MapSpec { decl: MapDecl { access: Access::ReadWrite, ..decl() }, ..spec })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Overwritten {
    PublishedAgain,
    OneWord,
    Replaced,
    ByAnotherWarp,
    UnderAStore,
}

/// A map in the output's last 128 bytes is overwritten while a copy that uses it is under way.
fn overwritten(p: Planted<'_>, lines: &crate::Lines, wrong: Overwritten) {
    const BYTES: u32 = 512;
    let k = p.k;
    let decl = MapDecl { access: Access::ReadWrite, ..decl() };
    let template = k.tensor_map_template("template", decl.clone());
    let (room, tile) = (k.shared("room", 128, 128), k.shared("tile", BYTES, 128));
    let full = p.barriers("full", 1, 1);
    k.when(leads(p), || full.init());
    publish_barriers(k);
    let place = p.y.moved(k.constant(crate::OUTPUT_BYTES - 128)).address();
    let map = TensorMap::in_global(place, decl);
    let first_warp = k.thread().lt(32u32);
    k.when(leads(p), || {
        k.tensormap_copy(room, &template);
        k.tensormap_replace::<u64>(room, MapField::GlobalAddress, p.y.address());
    });
    k.when(first_warp, || {
        k.warp_sync();
        k.tensormap_publish(place, room, Scope::Gpu);
        k.tensormap_acquire(&map, Scope::Gpu);
    });
    k.range(2u32, |half| {
        let word = half * 64u32 + k.thread();
        k.st_shared(tile.address() + word * 4u32, 0, word);
        k.st_global(p.y.at((word >> 5) * 64u32 + (word & 31u32), 4), 0, word);
    });
    k.fence(Fence::ProxyAsync);
    k.bar_sync();
    let at = [k.constant(0i32), k.constant(0i32)];
    k.when(leads(p), || {
        if wrong == Overwritten::UnderAStore {
            lines.also(line!() + 1);
            k.tma_store(&map, &at, tile.address());
            k.bulk_commit();
            p.unless(|| k.bulk_wait_read(0));
        } else {
            full.at(0u32).arrive_expect_tx(BYTES);
            lines.also(line!() + 1);
            k.tma_load(tile.address(), &map, &at, full.at(0u32), LoadOptions::default());
        }
    });
    if wrong != Overwritten::UnderAStore {
        p.unless(|| full.at(0u32).wait(0u32));
    }
    k.bar_sync();
    match wrong {
        Overwritten::PublishedAgain | Overwritten::UnderAStore => k.when(first_warp, || {
            lines.here(line!() + 1);
            k.tensormap_publish(place, room, Scope::Gpu);
        }),
        Overwritten::OneWord => k.when(leads(p), || {
            lines.here(line!() + 1);
            k.st_global(place + 124u64, 0, k.constant(0u32));
        }),
        Overwritten::Replaced => k.when(leads(p), || {
            let op = Op::TensormapReplace { field: MapField::GlobalDim(1), space: Space::Global };
            lines.here(line!() + 1);
            k.instruction(op, &[], &[place.operand(), Operand::Imm(56)]);
        }),
        Overwritten::ByAnotherWarp => k.when(k.thread().eq(32u32), || {
            lines.here(line!() + 1);
            k.st_global(place, 0, k.constant(0u32));
        }),
    }
    match wrong {
        Overwritten::UnderAStore => k.when(leads(p), || k.bulk_wait(0)),
        _ => full.at(0u32).wait(0u32),
    }
}

#[test]
fn tensor_maps_overwritten_under_a_copy() {
    use Overwritten::{ByAnotherWarp, OneWord, PublishedAgain, Replaced, UnderAStore};
    for wrong in [PublishedAgain, OneWord, Replaced, ByAnotherWarp, UnderAStore] {
        let planting = plant(cta(64).with(output_map()), |p, lines| overwritten(p, lines, wrong));
        planting.clean(|_| {});
        planting.faulty(Shows::Always, &[FindingKind::Race], &["of buffer 1 here, read by", "the reader may get the new value"]);
    }
}

// ---- cp.async on mbarriers -----------------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pipeline {
    /// Threads arrive themselves, which says nothing of their copies.
    PlainArrival,
    /// The stage is filled again while the readers are at it.
    NoEmptyWait,
    /// One thread copies and does not arrive.
    OneArrivalMissing,
}

/// Warp 0 fills one stage of 512 bytes four times by `cp.async`; warp 1 reads it.
fn pipeline(p: Planted<'_>, lines: &crate::Lines, wrong: Pipeline) {
    let k = p.k;
    let stage = k.shared("stage", 512, 16);
    let (full, empty) = (p.barriers("full", 1, 32), p.barriers("empty", 1, 32));
    k.range(2u32, |part| k.st_shared(stage.address() + (part * 64u32 + k.thread()) * 4u32, 0, k.constant(0u32)));
    k.when(leads(p), || {
        full.init();
        empty.init();
    });
    publish_barriers(k);
    let lane = k.lane();
    k.when_else(
        k.warp().eq(0u32),
        || {
            k.range(4u32, |turn| {
                let wait = || empty.at(0u32).wait((turn & 1u32) ^ 1u32);
                if wrong == Pipeline::NoEmptyWait {
                    p.unless(wait);
                } else {
                    wait();
                }
                lines.also(if wrong == Pipeline::OneArrivalMissing { 0 } else { line!() + 1 });
                k.cp_async(stage.address() + lane * 16u32, 0, p.x.at((turn * 32u32 + lane) * 4u32, 4), 0, 16, 16u32);
                match wrong {
                    Pipeline::PlainArrival => {
                        k.when_else(p.fault.eq(0u32), || full.at(0u32).cp_async_arrive(), || full.at(0u32).arrive());
                    }
                    Pipeline::OneArrivalMissing => {
                        let come = k.select(p.fault.ne(0u32), 31u32, 32u32);
                        k.when(k.ld_global::<u32>(p.x.at(lane, 4), 0).lt(come), || full.at(0u32).cp_async_arrive());
                    }
                    Pipeline::NoEmptyWait => full.at(0u32).cp_async_arrive(),
                }
            });
            k.cp_async_commit();
            k.cp_async_wait(0);
        },
        || {
            k.range(4u32, |turn| {
                if wrong == Pipeline::OneArrivalMissing {
                    lines.here(line!() + 2);
                }
                full.at(0u32).wait(turn & 1u32);
                if wrong != Pipeline::OneArrivalMissing {
                    lines.here(line!() + 2);
                }
                let values = k.ld_shared_vector::<u32>(stage.address() + (lane ^ 1u32) * 16u32, 0, 4);
                empty.at(0u32).arrive();
                k.st_global(p.y.at(turn * 32u32 + lane, 4), 0, values[3]);
            });
        },
    );
}

#[test]
fn a_pipeline_of_cp_async() {
    let want: Vec<u32> = (0..128).map(|i| (i ^ 1) * 4 + 3).collect();
    for (wrong, kinds, said) in [
        (Pipeline::PlainArrival, &[FindingKind::Race][..], "of shared stage"),
        (Pipeline::OneArrivalMissing, &[FindingKind::Deadlock], "1 of 32 arrivals"),
    ] {
        let planting = plant(cta(64), |p, lines| pipeline(p, lines, wrong));
        planting.clean(|memory| assert_eq!(words(memory, 1, 128), want));
        planting.faulty(Shows::Always, kinds, &[said]);
    }
    let planting = plant(cta(64), |p, lines| {
        pipeline(p, lines, Pipeline::NoEmptyWait);
        // Which of the copies meets which reader is the schedule's choice; a copy may meet the copy before, too.
        lines.here(0);
        lines.also(0);
    });
    planting.clean(|memory| assert_eq!(words(memory, 1, 128), want));
    planting.faulty(Shows::Always, &[FindingKind::Race, FindingKind::MbarrierLapped], &["of shared stage"]);
}

#[test]
fn a_bulk_copy_at_an_odd_place() {
    caught(FindingKind::Misaligned, &["the global address", "is not a multiple of 16"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 256, 128);
        let full = p.barriers("full", 1, 1);
        k.when(leads(p), || full.init());
        publish_barriers(k);
        k.when(leads(p), || {
            full.at(0u32).arrive_expect_tx(256u32);
            lines.here(line!() + 1);
            k.bulk_load(tile.address(), p.x.at(p.fault, 4), 256u32, full.at(0u32));
        });
        full.at(0u32).wait(0u32);
    });
}
