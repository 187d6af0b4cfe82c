//! The factors of the operands' blocks, by which promoted sums are multiplied: where a thread's are, and their loads step by step.
//!
//! What they do to the sums, and the source, is in [`crate::hopper::sums`].

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::tile::fragment::Fragment;

use super::super::factors::Factors;
use crate::hopper::sums::StepFactors;
use crate::layout::batch::Indices;

/// How many factors an operand has in a tile and a step of depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scaled {
    /// None.
    No,
    /// One for each row of A in blocks of any height, for each column of B.
    Lines,
    /// One.
    Tile,
}

/// The factors of both operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockFactors<'k> {
    kernel: Kernel<'k>,
    a: Option<Factors<'k>>,
    b: Option<(Factors<'k>, Scaled)>,
}

/// The factors of one tile: where this thread's are.
pub(super) struct TileFactors<'k> {
    of: BlockFactors<'k>,
    /// Of the two rows that the thread has in each block of 64.
    rows: Vec<[Val<'k, u64>; 2]>,
    /// Of B's matrix; of the tile where it has one factor.
    b: Option<Val<'k, u64>>,
    columns: ThreadColumns<'k>,
}

/// The columns of a thread.
struct ThreadColumns<'k> {
    first: Val<'k, u32>,
    last_of_matrix: Val<'k, u32>,
    count: u32,
}

impl<'k> BlockFactors<'k> {
    /// The factors of the operands that have some; `None` if neither has.
    pub(super) fn new(k: Kernel<'k>, [a, b]: [Option<Factors<'k>>; 2], scaled: [Scaled; 2]) -> Option<Self> {
        (scaled != [Scaled::No; 2]).then_some(BlockFactors { kernel: k, a, b: b.map(|b| (b, scaled[1])) })
    }

    /// The factors of a tile whose `blocks` blocks of 64 rows begin at `row` and whose `columns` columns begin at `column`, in a product of
    /// `extents` rows and columns.
    pub(super) fn tile(
        &self,
        indices: Indices<'k>,
        [row, column]: [Val<'k, u32>; 2],
        [blocks, columns]: [u32; 2],
        extents: [Val<'k, u32>; 2],
        thread: Val<'k, u32>,
    ) -> TileFactors<'k> {
        // What lies outside of the product is never stored; its factors are those of the last row and column.
        let [last_row, last_column] = extents.map(|extent| extent - 1);
        let rows = self.a.iter().flat_map(|a| {
            let matrix = a.matrix(indices);
            let row = row + Fragment::<f32>::row(thread);
            (0..blocks).map(move |block| [0, 8].map(|half| matrix + a.outer_bytes((row + (64 * block + half)).min(last_row))))
        });
        let b = self.b.map(|(b, scaled)| match scaled {
            Scaled::Tile => b.matrix(indices) + b.outer_bytes(column.min(last_column)),
            Scaled::No | Scaled::Lines => b.matrix(indices),
        });
        let columns = ThreadColumns { first: column + Fragment::<f32>::column(thread), last_of_matrix: last_column, count: columns };
        TileFactors { of: *self, rows: rows.collect(), b, columns }
    }
}

impl<'k> TileFactors<'k> {
    /// Loads the factors of the step that begins at `depth` of k.
    pub(super) fn load(&self, depth: Val<'k, u32>) -> StepFactors<'k> {
        let k = self.of.kernel;
        let factor = |address: Val<'k, u64>| k.ld_global::<f32>(address, 0);
        let rows = self.of.a.iter().flat_map(|a| {
            let along = a.k_bytes(depth);
            self.rows.iter().map(move |lines| lines.map(|line| factor(line + along)))
        });
        let columns = self.of.b.iter().zip(self.b).flat_map(|((b, scaled), start)| {
            let start = start + b.k_bytes(depth);
            let count = if *scaled == Scaled::Tile { 1 } else { self.columns.count / 4 };
            (0..count).map(move |i| {
                if *scaled == Scaled::Tile {
                    return factor(start);
                }
                let column = (self.columns.first + (i / 2 * 8 + i % 2)).min(self.columns.last_of_matrix);
                factor(start + b.single_bytes(column))
            })
        });
        StepFactors { rows: rows.collect(), columns: columns.collect() }
    }
}
