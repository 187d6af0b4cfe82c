//! The kernel: a thread for the outputs of neighbouring elements of some rows, or of neighbouring channels of an element in some rows.

use verdigris_kir::face::{Kernel, Pointer, Val};
use verdigris_kir::inst::Cache;
use verdigris_kir::params::Read;

use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::strided::{self, Packed, Strided};
use crate::fuse::value::AnyVal;
use crate::layout::space::Extents;

use super::along::Along;
use super::{ROWS, SCALE, Spec, THREADS};

verdigris_kir::parameters! {
    /// Of every kernel here.
    pub(super) struct Upsample / UpsampleArgs of Spec as spec {
        pub(super) points: u32,
        /// In the order that threads run through: rows in groups of a thread, the innermost in vectors.
        pub(super) extents: Extents = 5,
        /// Of what is read.
        pub(super) height: u32,
        pub(super) width: u32,
        /// Of rows and of columns, each output's weights.
        pub(super) weights: Vec<Option<Read>> = spec.axes.iter().map(|along| (!along.is_single()).then_some(16)).collect::<Vec<_>>(),
        pub(super) operands: Vec<OperandArgs> = spec.operands(),
    }
}

impl Spec {
    fn operands(&self) -> Vec<OperandDecl> {
        let [from, to] = self.types;
        let written = if self.last { self.vector } else { self.vector * self.axes[1].outputs() as u32 };
        vec![strided::lines_declaration(from, 4, self.vector, false), strided::lines_declaration(to, 4, written, true)]
    }
}

/// Elements beside each other that a row of outputs is made of: of one channel for each lane.
type Cells<'k> = Vec<Vec<AnyVal<'k>>>;

/// The kernel that a spec says.
pub(super) fn build<'k>(spec: &Spec, k: Kernel<'k>) {
    let Upsample { points, extents, height, width, weights, operands } = Upsample::declare(k, spec);
    let point = k.cta() * THREADS + k.thread();
    k.when(point.lt(points), || {
        let mut index = [k.constant(0u32); 5];
        for (&dim, at) in spec.order().iter().zip(extents.index(point)) {
            index[dim] = at;
        }
        let [image, channel, depth, group, column] = index;
        let lead = if spec.last { vec![image, depth] } else { vec![image, channel, depth] };
        let planes: Vec<Strided<'k>> = Strided::all(&spec.types, operands.clone()).iter().map(|operand| operand.at(&lead)).collect();
        let block = Block { k, spec, width, channel, column };
        let [rows_along, columns_along] = &spec.axes;
        let [above, below] = rows_along.reach();
        let first = group * ROWS;
        // All of them are on their way before the first is used.
        let loaded: Vec<Vec<Packed<'k>>> =
            (0..ROWS + above + below).map(|i| block.load(&planes[0], place(k, first + i, above, height))).collect();
        let columns = block.weights(columns_along, weights[1], column * block.columns(), block.columns());
        // Each row of elements is filtered along the row once, whatever rows of outputs read it.
        let lines: Vec<Cells<'k>> = loaded.iter().map(|row| block.along_row(row, &columns)).collect();
        for i in 0..ROWS {
            let row = first + i;
            k.when(row.lt(height), || {
                let weights = block.weights(rows_along, weights[0], row, 1);
                for (j, &begin) in (0u32..).zip(&rows_along.firsts) {
                    let begin = (i + above).wrapping_add_signed(begin) as usize;
                    let read = &lines[begin..begin + rows_along.taps as usize];
                    let cells = (0..read[0].len()).map(|cell| {
                        let lanes = 0..read[0][cell].len();
                        lanes.map(|lane| block.mixed(&weights[j as usize], read.iter().map(|line| line[cell][lane]))).collect()
                    });
                    block.store(&planes[1], row * rows_along.outputs() as u32 + j, &cells.collect::<Vec<_>>());
                }
            });
        }
    });
}

/// The row or column `before` ones in front of one, or the outermost in place of one that is not there.
fn place<'k>(k: Kernel<'k>, at: Val<'k, u32>, before: u32, extent: Val<'k, u32>) -> Val<'k, u32> {
    let at = if before == 0 { at } else { k.select(at.gt(before), at - before, 0u32) };
    at.min(extent - 1)
}

/// What a thread takes.
#[derive(Clone, Copy)]
struct Block<'a, 'k> {
    k: Kernel<'k>,
    spec: &'a Spec,
    width: Val<'k, u32>,
    /// In vectors, channels-last.
    channel: Val<'k, u32>,
    /// In vectors, channels-first.
    column: Val<'k, u32>,
}

impl<'k> Block<'_, 'k> {
    /// Neighbouring elements of a row.
    fn columns(&self) -> u32 {
        if self.spec.last { 1 } else { self.spec.vector }
    }

    /// Loads the elements of a row that the block's outputs read, from the first column on.
    fn load(&self, plane: &Strided<'k>, row: Val<'k, u32>) -> Vec<Packed<'k>> {
        let (k, vector) = (self.k, self.spec.vector);
        let [before, behind] = self.spec.axes[1].reach();
        let first = self.column * self.columns();
        if self.spec.last {
            let element = |i| plane.line(&[row, place(k, first + i, before, self.width)], vector).load(self.channel);
            return (0..=before + behind).map(element).collect();
        }
        let line = plane.line(&[row], vector);
        let beside = |column: Val<'k, u32>| line.vectors_from(column, 1).load(k.constant(0));
        let in_front = (0..before).map(|i| beside(place(k, first + i, before, self.width)));
        let after = (0..behind).map(|i| beside(place(k, first + vector + i, 0, self.width)));
        in_front.chain([line.load(self.column)]).chain(after).collect()
    }

    /// The weights of the outputs of some elements along a dim; none where each output is an element.
    fn weights(&self, along: &Along, table: Option<Pointer<'k>>, first: Val<'k, u32>, elements: u32) -> Vec<Vec<Val<'k, f32>>> {
        let (k, outputs) = (self.k, along.outputs() as u32);
        let Some(table) = table else { return vec![Vec::new(); (elements * outputs) as usize] };
        let words = elements * outputs * along.taps;
        let at = table.at(first * (outputs * along.taps), 4);
        // As wide as the weights of an element lie.
        let wide = 4.min(1 << words.trailing_zeros());
        let all: Vec<Val<'k, f32>> = (0..words)
            .step_by(wide)
            .flat_map(|word| k.ld_global_vector::<u32>(at, i64::from(4 * word), wide as u8, Cache::Default))
            .map(|word| word.bitcast())
            .collect();
        all.chunks(along.taps as usize).map(<[_]>::to_vec).collect()
    }

    /// One output's taps along a dim, by weights: an element itself where there are none.
    fn mixed(&self, weights: &[Val<'k, f32>], taps: impl Iterator<Item = AnyVal<'k>>) -> AnyVal<'k> {
        let mut taps = taps;
        if weights.is_empty() {
            return taps.next().expect("an output reads an element");
        }
        let mut sum: Option<Val<'k, f32>> = None;
        for (&weight, tap) in weights.iter().zip(taps) {
            let value = tap.get::<f32>(self.k);
            sum = Some(sum.map_or_else(|| weight * value, |sum| self.k.fma(weight, value, sum)));
        }
        AnyVal::of(sum.expect("weights are of taps"))
    }

    /// The outputs along a row of elements.
    fn along_row(&self, row: &[Packed<'k>], weights: &[Vec<Val<'k, f32>>]) -> Cells<'k> {
        let (k, along) = (self.k, &self.spec.axes[1]);
        let values = |packed: &Packed<'k>| -> Vec<AnyVal<'k>> {
            if self.spec.moved { packed.stored(k) } else { packed.values::<f32>(k).into_iter().map(AnyVal::of).collect() }
        };
        let columns: Cells<'k> =
            if self.spec.last { row.iter().map(values).collect() } else { row.iter().flat_map(values).map(|value| vec![value]).collect() };
        let [before, _] = along.reach();
        let outputs = (0..self.columns())
            .flat_map(|column| along.firsts.iter().map(move |&first| (column + before).wrapping_add_signed(first) as usize));
        let cell = |(begin, weights): (usize, &Vec<Val<'k, f32>>)| {
            let taps = &columns[begin..begin + along.taps as usize];
            (0..taps[0].len()).map(|lane| self.mixed(weights, taps.iter().map(|column| column[lane]))).collect()
        };
        outputs.zip(weights).map(cell).collect()
    }

    /// Stores the block's outputs of a row.
    fn store(&self, plane: &Strided<'k>, row: Val<'k, u32>, cells: &Cells<'k>) {
        let whole = |value: &AnyVal<'k>| if self.spec.is_scaled() { AnyVal::of(value.get::<f32>(self.k) * SCALE as f32) } else { *value };
        let cells: Cells<'k> = cells.iter().map(|cell| cell.iter().map(whole).collect()).collect();
        let (vector, outputs) = (self.spec.vector, self.spec.axes[1].outputs() as u32);
        if self.spec.last {
            for (i, cell) in (0u32..).zip(&cells) {
                plane.line(&[row, self.column * outputs + i], vector).store_values(self.channel, cell);
            }
            return;
        }
        plane.line(&[row], vector * outputs).store_values(self.column, &cells.concat());
    }
}
