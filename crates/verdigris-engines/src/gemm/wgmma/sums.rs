//! The sums of a warpgroup: the registers that `wgmma` adds to, and those that hold the results.

use verdigris_kir::face::{AsVal, F16x2, Kernel, Val, WgmmaA};
use verdigris_kir::inst::WgmmaShape;
use verdigris_kir::tile::fragment::Fragment;
use verdigris_tensor::DType;

use super::promote::{self, StepFactors};
use crate::fuse::compute;
use crate::store::Sum;

/// How sums are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Keep {
    /// In the accumulators.
    InPlace,
    /// In the accumulators, as pairs of f16; widened at the end.
    Halves,
    /// In registers of their own, to which the accumulators are added after each step.
    Promoted,
}

/// The registers, a fragment for each 64 rows.
pub(super) struct Sums<'k, T> {
    kernel: Kernel<'k>,
    keep: Keep,
    whole: Vec<Fragment<'k, T>>,
    halves: Vec<Fragment<'k, F16x2>>,
    totals: Vec<Fragment<'k, T>>,
}

impl<'k, T: Sum + AsVal<'k, T>> Sums<'k, T> {
    /// Registers for `blocks` times 64 rows of `columns` columns.
    pub(super) fn new(k: Kernel<'k>, keep: Keep, blocks: u32, columns: u32) -> Self {
        let many = |there: bool| 0..if there { blocks } else { 0 };
        Sums {
            kernel: k,
            keep,
            whole: many(true).map(|_| Fragment::unset(k, columns)).collect(),
            // A register holds two columns.
            halves: many(keep == Keep::Halves).map(|_| Fragment::unset(k, columns / 2)).collect(),
            totals: many(keep == Keep::Promoted).map(|_| Fragment::unset(k, columns)).collect(),
        }
    }

    /// Before the first step of a tile.
    pub(super) fn begin(&self) {
        for register in self.totals.iter().flat_map(|total| total.registers()) {
            register.set(T::ZERO);
        }
    }

    /// One instruction for the 64 rows of block `block`.
    pub(super) fn multiply(&self, block: usize, shape: WgmmaShape, a: Val<'k, u64>, b: Val<'k, u64>, adds: Val<'k, bool>) {
        let (k, a) = (self.kernel, WgmmaA::Shared(a));
        match self.halves.get(block) {
            Some(halves) => k.wgmma(shape, halves.registers(), a, b, adds),
            None => k.wgmma(shape, self.whole[block].registers(), a, b, adds),
        }
    }

    /// Behind a step whose products are complete: adds them to the totals, times the factors.
    pub(super) fn promote(&self, factors: Option<&StepFactors<'k>>) {
        promote::add(self.kernel, &self.totals, &self.whole, factors);
    }

    /// Behind the last step of a tile: the results.
    pub(super) fn finish(&self) -> &[Fragment<'k, T>] {
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
