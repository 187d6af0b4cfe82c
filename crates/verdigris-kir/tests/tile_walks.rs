//! Which work a launch's workers take, and how many rows a tile has, on the interpreter against what the words mean: every tile in the order of
//! its walk, every step of its depth once, parts numbered as they follow each other.

use std::collections::BTreeMap;
use verdigris_kir::face::{Header, build};
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_kir::ir::{MapType, Target};
use verdigris_kir::params::Write;
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_kir::tile::clip::{Clip, ClipArgs, ClippedTile};
use verdigris_kir::tile::operand::{Major, OperandTile};
use verdigris_kir::tile::schedule::{RasterArgs, ScheduleArgs};

/// Pieces that a worker writes down at most.
const ROOM: u32 = 16;
/// Words of a piece: row, column, matrix, tile, first step, steps, part, parts.
const WORDS: u32 = 8;

verdigris_kir::parameters! {
    struct Walk / WalkArgs of () as _spec {
        schedule: ScheduleArgs = true,
        pieces: Write = 4,
        counts: Write = 4,
    }
}

fn words(memory: &mut Memory, slot: usize) -> Vec<u32> {
    memory.to_vec(slot).chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}

/// What each worker of a launch takes, in its order.
fn walked(schedule: ScheduleArgs, workers: u32) -> Vec<Vec<[u32; 8]>> {
    let kernel = KernelRef::new("walk", || {
        build(Header { name: "walk".into(), target: Target::Sm90a, threads: 32, ..Header::default() }, |k| {
            let Walk { schedule, pieces, counts } = Walk::declare(k, &());
            let count = k.var(0u32);
            schedule.for_each(|work| {
                let to = pieces.at((k.cta() * ROOM + count.get()) * WORDS, 4);
                let words = [work.row, work.column, work.batch, work.tile, work.first_step, work.steps, work.part, work.parts];
                k.when(k.thread().eq(0), || (0i64..).zip(words).for_each(|(i, word)| k.st_global(to, 4 * i, word)));
                count.set(count + 1);
            });
            k.when(k.thread().eq(0), || k.st_global(counts.at(k.cta(), 4), 0, count.get()));
        })
    });
    let mut memory = Memory::new();
    memory.add_filled(u64::from(workers * ROOM * WORDS * 4), 0xff);
    memory.add_filled(u64::from(workers * 4), 0xff);
    let mut program = Program::default();
    let args = WalkArgs { schedule, pieces: Address::buffer(0), counts: Address::buffer(1) };
    program.launch(Launch::new(kernel, [workers, 1, 1], args.bound(&())));
    interp::run(&program, &Kernels::new(), &mut memory, &Options::default()).expect("runs");
    let (pieces, counts) = (words(&mut memory, 0), words(&mut memory, 1));
    let of_worker = |(room, &count): (&[u32], &u32)| {
        let piece = |words: &[u32]| words.try_into().expect("eight words");
        room.chunks_exact(WORDS as usize).take(count as usize).map(piece).collect()
    };
    pieces.chunks_exact((ROOM * WORDS) as usize).zip(&counts).map(of_worker).collect()
}

/// Row, column and matrix of each tile, in the order of the walk: groups of rows one behind the other, the columns of a group from left to
/// right, each from its first row to its last; or the same with rows and columns exchanged.
fn tiles([rows, columns, matrices]: [u32; 3], group: u32, along_columns: bool) -> Vec<[u32; 3]> {
    let (outer, inner) = if along_columns { (columns, rows) } else { (rows, columns) };
    let mut tiles = Vec::new();
    for matrix in 0..matrices {
        for first in (0..outer).step_by(group as usize) {
            for b in 0..inner {
                for a in first..(first + group).min(outer) {
                    tiles.push(if along_columns { [b, a, matrix] } else { [a, b, matrix] });
                }
            }
        }
    }
    tiles
}

#[test]
fn every_tile_is_walked_once_in_groups_of_which_the_last_may_be_smaller() {
    for (extents, group, along) in [
        ([5, 3, 2], 2, false),
        ([5, 3, 2], 2, true),
        ([7, 4, 1], 3, false),
        ([4, 7, 1], 3, true),
        ([3, 2, 3], 8, false),
        ([1, 6, 1], 1, true),
    ] {
        let [rows, columns, matrices] = extents;
        let all = rows * columns * matrices;
        let workers = 5;
        let schedule = ScheduleArgs::whole(RasterArgs::new(rows, columns, group, along), all, 7);
        let walked = walked(schedule, workers);
        let want = tiles(extents, group, along);
        for (worker, pieces) in (0..).zip(walked) {
            let own: Vec<[u32; 8]> = (worker..all)
                .step_by(workers as usize)
                .map(|tile| {
                    let [row, column, matrix] = want[tile as usize];
                    [row, column, matrix, tile, 0, 7, 0, 1]
                })
                .collect();
            assert_eq!(pieces, own, "{extents:?} in groups of {group}, along columns {along}, worker {worker}");
        }
    }
}

/// Shares of the depth of the first `split` tiles, laid one behind the other: a share of `share` steps each, of which those beyond a tile's
/// `steps` stand for none.
fn shared_out(schedule: ScheduleArgs) -> BTreeMap<u32, Vec<[u32; 2]>> {
    let mut parts: BTreeMap<u32, Vec<[u32; 2]>> = BTreeMap::new();
    let total = schedule.split_tiles * schedule.counted_steps;
    for first in (0..total).step_by(schedule.share as usize) {
        let steps: Vec<u32> = (first..(first + schedule.share).min(total)).collect();
        for of_tile in steps.chunk_by(|a, b| a / schedule.counted_steps == b / schedule.counted_steps) {
            let (tile, first) = (of_tile[0] / schedule.counted_steps, of_tile[0] % schedule.counted_steps);
            let taken = (first..first + of_tile.len() as u32).filter(|&step| step < schedule.steps).count() as u32;
            if taken > 0 {
                parts.entry(tile).or_default().push([first, taken]);
            }
        }
    }
    parts
}

#[test]
fn every_step_of_a_split_depth_is_taken_once() {
    let raster = RasterArgs::new(3, 2, 2, false);
    let mut cases = Vec::new();
    // Shares that end within a tile and go on in the next, at least so many steps each, some tiles whole.
    for (steps, split_tiles, workers, least) in
        [(7, 4, 5, 1), (7, 6, 5, 1), (5, 6, 7, 3), (9, 2, 4, 1), (4, 3, 8, 1), (16, 1, 6, 1), (3, 6, 4, 5)]
    {
        cases.push((ScheduleArgs::split(raster, 6, steps, split_tiles, workers, least), workers));
    }
    // As many shares in each tile, the last one short.
    for (steps, parts) in [(7, 2), (7, 3), (10, 4), (8, 2), (5, 5)] {
        cases.push((ScheduleArgs::split_evenly(raster, 6, steps, parts).expect("no share is empty"), 6 * parts));
    }
    for (schedule, workers) in cases {
        let want = shared_out(schedule);
        let mut have: BTreeMap<u32, Vec<[u32; 4]>> = BTreeMap::new();
        for [row, column, matrix, tile, first_step, steps, part, parts] in walked(schedule, workers).into_iter().flatten() {
            assert_eq!((row, column, matrix), raster.tile(tile), "{schedule:?}");
            have.entry(tile).or_default().push([part, parts, first_step, steps]);
        }
        for tile in 0..6 {
            let whole = vec![[0, schedule.steps]];
            let want = if tile < schedule.split_tiles { &want[&tile] } else { &whole };
            let want: Vec<[u32; 4]> = (0..).zip(want).map(|(part, &[first, steps])| [part, want.len() as u32, first, steps]).collect();
            let mut have = have.remove(&tile).unwrap_or_default();
            have.sort_unstable();
            assert_eq!(have, want, "tile {tile} of {schedule:?}");
        }
        assert!(have.is_empty(), "{schedule:?}: {have:?}");
    }
}

verdigris_kir::parameters! {
    struct Clipped / ClippedArgs of () as _spec {
        clip: ClipArgs = (),
        rows: Write = 4,
    }
}

/// The last tiles of a cluster may begin beyond the operand: they have no row, and not almost 2³².
#[test]
fn a_tile_has_the_rows_that_are_left_of_its_operand() {
    let tile = ClippedTile { tile: OperandTile { rows: 128, ty: MapType::Bf16, major: Major::Depth }, loaded: 64, pitch: 128 };
    for extent in [1, 63, 64, 65, 128, 129, 300] {
        let kernel = KernelRef::new("rows", move || {
            build(Header { name: "rows".into(), target: Target::Sm90a, threads: 32, ..Header::default() }, |k| {
                let Clipped { clip, rows } = Clipped::declare(k, &());
                k.st_global(rows.at(k.thread(), 4), 0, Clip::new(tile, clip).rows(k.thread() * 64));
            })
        });
        let mut memory = Memory::new();
        memory.add_filled(128, 0xff);
        let mut program = Program::default();
        let args = ClippedArgs { clip: tile.args(extent, extent.div_ceil(128)), rows: Address::buffer(0) };
        program.launch(Launch::new(kernel, [1; 3], args.bound(&())));
        interp::run(&program, &Kernels::new(), &mut memory, &Options::default()).expect("runs");
        let want: Vec<u32> = (0..32).map(|i: u32| extent.saturating_sub(64 * i).min(128)).collect();
        assert_eq!(words(&mut memory, 0), want, "{extent} rows");
    }
}
