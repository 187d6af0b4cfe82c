//! The kernel: a thread for each block of elements.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::inst::Cache;
use verdigris_kir::params::Divide;

use crate::fuse::value::{AnyVal, elements_of, load_words, store_values};
use crate::layout::space::Access;

use super::super::axis::{elements_along, share_of};
use super::super::tensor::TensorArgs;
use super::{Along, Spec, THREADS};

verdigris_kir::parameters! {
    /// Of every kernel here.
    pub(super) struct Gradient / GradientArgs of Spec as spec {
        pub(super) blocks: u32,
        /// Channels, or vectors of them.
        pub(super) channels: Divide,
        pub(super) blocks_high: Divide,
        pub(super) blocks_wide: Divide,
        /// Rows and columns of `dx`, and of `dy`.
        pub(super) extents: [u32; 2],
        pub(super) out: [u32; 2],
        pub(super) dy: TensorArgs = Access { written: false, bytes: spec.together * spec.lanes() * spec.dtype.bytes() as u32 },
        pub(super) dx: TensorArgs = Access { written: true, bytes: spec.along.vector() * spec.dtype.bytes() as u32 },
    }
}

/// Neighbouring windows along a dim.
#[derive(Clone, Copy, Debug)]
struct Windows<'k> {
    /// The first of them; in place of those that are not there, others that are.
    first: Val<'k, u32>,
    are_there: Val<'k, bool>,
}

impl<'k> Windows<'k> {
    /// Those from `number` behind window `base` on, `many` of them, of which `out` has all or none.
    fn of(base: Val<'k, u32>, number: i32, many: u32, out: Val<'k, u32>) -> Self {
        // In front of the first window numbers are as large as they get.
        let first = (base.signed() + number).unsigned();
        Windows { first: first.min(out - many), are_there: first.lt(out) }
    }
}

/// The kernel that a spec says.
pub(super) fn build<'k>(spec: &Spec, k: Kernel<'k>) {
    let Gradient { blocks, channels, blocks_high, blocks_wide, extents, out, dy, dx } = Gradient::declare(k, spec);
    let block = k.cta() * THREADS + k.thread();
    let [high, wide] = spec.block();
    k.when(block.lt(blocks), || {
        // Threads run along what lies side by side.
        let place = |number| {
            let (rest, column) = blocks_wide.split(number);
            let (plane, row) = blocks_high.split(rest);
            (plane, row, column)
        };
        let (image, channel, row, column) = match spec.along {
            Along::Channels { .. } => {
                let (rest, channel) = channels.split(block);
                let (image, row, column) = place(rest);
                (image, channel, row, column)
            }
            Along::Columns { .. } => {
                let (plane, row, column) = place(block);
                let (image, channel) = channels.split(plane);
                (image, channel, row, column)
            }
        };
        let sums = sums(spec, k, [row, column], extents, out, |at| dy.element(dy.plane(image, channel), at[0], at[1]));
        let plane = dx.plane(image, channel);
        // Cells of one access: neighbours along the row, if not channels.
        let cells = (spec.along.vector() / spec.lanes()) as usize;
        for (y, sums) in (0u32..).zip(&sums) {
            for (x, sums) in (0u32..).step_by(cells).zip(sums.chunks(cells)) {
                let [row, column] = [row * high + y, column * wide + x];
                let values: Vec<AnyVal<'k>> = sums.iter().flatten().map(|&sum| AnyVal::of(sum)).collect();
                k.when(row.lt(extents[0]) & column.lt(extents[1]), || {
                    store_values(k, spec.dtype, dx.element(plane, row, column), &values);
                });
            }
        }
    });
}

/// What a block's elements get: rows of them, each of as many channels as a thread has.
fn sums<'k>(
    spec: &Spec,
    k: Kernel<'k>,
    block: [Val<'k, u32>; 2],
    extents: [Val<'k, u32>; 2],
    out: [Val<'k, u32>; 2],
    dy: impl Fn([Val<'k, u32>; 2]) -> Val<'k, u64>,
) -> Vec<Vec<Vec<Val<'k, f32>>>> {
    let ([high, wide], lanes) = (spec.block(), spec.lanes());
    let [base_row, base_column] = [0, 1].map(|axis| block[axis] * (spec.block()[axis] / spec.stride[axis]));
    let zeros = vec![k.constant(0.0f32); lanes as usize];
    let mut sums: Vec<Vec<Option<Vec<Val<'k, f32>>>>> = vec![vec![None; wide as usize]; high as usize];
    for row in spec.windows(0) {
        let rows = Windows::of(base_row, row, 1, out[0]);
        for (column, many) in accesses(spec) {
            let columns = Windows::of(base_column, column, many, out[1]);
            let words = load_words(k, dy([rows.first, columns.first]), many * lanes * spec.dtype.bytes() as u32, Cache::Default);
            let there = rows.are_there & columns.are_there;
            let words: Vec<Val<'k, u32>> = words.into_iter().map(|word| k.select(there, word, 0u32)).collect();
            let given = elements_of(k, spec.dtype, &words, many * lanes);
            for (i, given) in (0u32..).zip(given.chunks(lanes as usize)) {
                let share = share(spec, k, [rows.first, columns.first + i], extents);
                let given: Vec<Val<'k, f32>> = given.iter().map(|&raw| AnyVal::Stored(spec.dtype, raw).get::<f32>(k) * share).collect();
                let column = column + i as i32;
                for (y, x) in (0..high).flat_map(|y| (0..wide).map(move |x| (y, x))) {
                    if spec.holds(0, row, y) && spec.holds(1, column, x) {
                        let sum = &mut sums[y as usize][x as usize];
                        let terms = |so_far: &Vec<Val<'k, f32>>| so_far.iter().zip(&given).map(|(&sum, &given)| sum + given).collect();
                        *sum = Some(sum.as_ref().map_or_else(|| given.clone(), terms));
                    }
                }
            }
        }
    }
    let whole = |row: Vec<Option<Vec<Val<'k, f32>>>>| row.into_iter().map(|sum| sum.unwrap_or_else(|| zeros.clone())).collect();
    sums.into_iter().map(whole).collect()
}

/// The columns of windows that hold elements of a block, by accesses: the first of each, and how many it has.
fn accesses(spec: &Spec) -> Vec<(i32, u32)> {
    let together = spec.together as i32;
    let is_within = |window: &i32| together > 1 && (0..together).contains(window);
    let windows = spec.windows(1);
    windows
        .filter(|window| !is_within(window) || *window == 0)
        .map(|window| (window, if is_within(&window) { spec.together } else { 1 }))
        .collect()
}

/// What a window's gradient is multiplied with: the reciprocal of its taps, or of those that are elements.
fn share<'k>(spec: &Spec, k: Kernel<'k>, window: [Val<'k, u32>; 2], extents: [Val<'k, u32>; 2]) -> Val<'k, f32> {
    if spec.padded {
        return k.constant(1.0 / (spec.taps[0] * spec.taps[1]) as f32);
    }
    let [high, wide] = [0, 1].map(|axis| elements_along(window[axis], [spec.taps[axis], spec.stride[axis]], spec.pad[axis], extents[axis]));
    share_of(k, high * wide)
}
