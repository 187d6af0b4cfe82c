//! The sums of a warpgroup: the registers that `wgmma` adds to, and those that hold the results.
//!
//! **Promotion.** Partial sums of the tensor cores are added in registers of their own after each step of depth, times the factors of the
//! operands' blocks where these have any: `total[m, n] += sA[m, step] · sB[n, step] · sum[m, n]`. A step of depth is 128 elements of fp8:
//! as many as the tensor cores keep in their shorter accumulator, and as the smallest block that is taken along k.
//!
//! Source: DeepSeek-V3 technical report (2024), §3.3, for the formula and the reason.

use verdigris_kir::face::{AsVal, F16x2, Kernel, Val, WgmmaA};
use verdigris_kir::inst::WgmmaShape;
use verdigris_kir::tile::fragment::Fragment;
use verdigris_tensor::DType;

use super::spec::MainLoopSpec;
use crate::fuse::compute;
use crate::store::Sum;

/// How sums are kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Keep {
    /// In the accumulators.
    InPlace,
    /// In the accumulators, as pairs of f16; widened at the end.
    Halves,
    /// In registers of their own, to which the accumulators are added after each step.
    Promoted,
}

/// The factors of one step of depth, in registers.
pub(crate) struct StepFactors<'k> {
    /// Of the two rows that a thread has in each block of 64, or none.
    pub(crate) rows: Vec<[Val<'k, f32>; 2]>,
    /// One for the tile, or two for each block of 8 columns, or none.
    pub(crate) columns: Vec<Val<'k, f32>>,
}

/// The registers, a fragment for each 64 rows.
pub(crate) struct Sums<'k, T> {
    kernel: Kernel<'k>,
    shape: WgmmaShape,
    keep: Keep,
    whole: Vec<Fragment<'k, T>>,
    halves: Vec<Fragment<'k, F16x2>>,
    totals: Vec<Fragment<'k, T>>,
}

impl<'k, T: Sum + AsVal<'k, T>> Sums<'k, T> {
    pub(crate) fn new(k: Kernel<'k>, spec: &MainLoopSpec) -> Self {
        let (keep, columns) = (spec.keep, spec.tile.n);
        let many = |there: bool| 0..if there { spec.tile.blocks() } else { 0 };
        Sums {
            kernel: k,
            shape: spec.shape(),
            keep,
            whole: many(true).map(|_| Fragment::unset(k, columns)).collect(),
            // A register holds two columns.
            halves: many(keep == Keep::Halves).map(|_| Fragment::unset(k, columns / 2)).collect(),
            totals: many(keep == Keep::Promoted).map(|_| Fragment::unset(k, columns)).collect(),
        }
    }

    /// Before the first step of a tile.
    #[track_caller]
    pub(crate) fn begin(&self) {
        set_zero(&self.totals);
    }

    /// The sums of a tile without steps.
    #[track_caller]
    pub(crate) fn clear(&self) {
        // Totals are zero already.
        if self.keep != Keep::Promoted {
            set_zero(&self.whole);
        }
    }

    /// One instruction for the 64 rows of block `block`.
    #[track_caller]
    pub(crate) fn multiply(&self, block: usize, a: Val<'k, u64>, b: Val<'k, u64>, adds: Val<'k, bool>) {
        let (k, a) = (self.kernel, WgmmaA::Shared(a));
        match self.halves.get(block) {
            Some(halves) => k.wgmma(self.shape, halves.registers(), a, b, adds),
            None => k.wgmma(self.shape, self.whole[block].registers(), a, b, adds),
        }
    }

    /// Behind a step whose products are complete: adds them to the totals, times the factors.
    pub(crate) fn promote(&self, factors: Option<&StepFactors<'k>>) {
        let (rows, columns) = factors.map_or((&[][..], &[][..]), |factors| (&factors.rows[..], &factors.columns[..]));
        // The tile's one factor goes with the rows'.
        let of_tile = columns.first().filter(|_| columns.len() == 1);
        for (index, (total, sum)) in self.totals.iter().zip(&self.whole).enumerate() {
            let rows = rows.get(index).map(|rows| rows.map(|row| of_tile.map_or(row, |tile| row * *tile)));
            for (i, (total, sum)) in total.registers().iter().zip(sum.registers()).enumerate() {
                // Register i: row half i/2 mod 2, column 8·(i/4) + i mod 2.
                let row = rows.map(|rows| rows[i / 2 % 2]).or(of_tile.copied());
                let column = if of_tile.is_some() { None } else { columns.get(i / 4 * 2 + i % 2) };
                total.set(match (row, column) {
                    (None, None) => *total + *sum,
                    (Some(factor), None) => T::scaled(self.kernel, sum.get(), factor, total.get()),
                    (None, Some(factor)) => T::scaled(self.kernel, sum.get(), *factor, total.get()),
                    (Some(row), Some(column)) => T::scaled(self.kernel, sum.get(), row * *column, total.get()),
                });
            }
        }
    }

    /// Behind the last step of a tile: the results.
    #[track_caller]
    pub(crate) fn finish(&self) -> &[Fragment<'k, T>] {
        for (halves, whole) in self.halves.iter().zip(&self.whole) {
            for (pair, registers) in halves.registers().iter().zip(whole.registers().chunks(2)) {
                let (low, high) = self.kernel.split16(pair.get().bitcast::<u32>());
                for (register, half) in registers.iter().zip([low, high]) {
                    register.set(T::of_f32(compute::decode_half(DType::F16, half)));
                }
            }
        }
        if self.keep == Keep::Promoted { &self.totals } else { &self.whole }
    }
}

fn set_zero<'k, T: Sum + AsVal<'k, T>>(sums: &[Fragment<'k, T>]) {
    sums.iter().flat_map(|sum| sum.registers()).for_each(|register| register.set(T::ZERO));
}
