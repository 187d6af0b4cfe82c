//! Copies that transpose: of the two dims along which the elements of the read and of the written tensor are neighbours, tiles in shared memory.
//!
//! **What.** One load and one store of one type of one, two or four bytes, whose neighbours lie along two different dims. The other dims are a batch.
//!
//! **Method.** That of [`Transposing`]: whole accesses on both sides, wherever the lines of either tensor begin.
//!
//! **When it wins.** Wherever neither dim is short: the tiles of `map.simt`, which take chains of any steps, read and write an element at a time.
//!
//! **Numbers.** Bits are moved.

use verdigris_graph::{ChainStep, Matrix, Problem, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Program};

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::Work;
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::layout::space::element;
use crate::layout::transposing::{self, Transposing};
use verdigris_tensor::DType;

/// Elements below which a dim is left to points and small tiles.
const LEAST: u64 = 8;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Transpose {
    copy: Transposing,
    from: Address,
    to: Address,
    slots: usize,
}

impl Algorithm for Transpose {
    const ID: EngineId = super::ID;
    const VERSION: u32 = 2;
    /// Blocks of a thread.
    type Config = u32;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Map(map) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is map", problem.kind())));
        };
        Self::ID.require(arch.runs(Target::Sm90), Reason::Target, "tiles are transposed for sm_90")?;
        let [ChainStep::Load { from, window: None }, ChainStep::Store { to, x: 0, at: None }] = map.chain.steps.as_slice() else {
            return Err(Self::ID.refusal(Reason::Epilogue, format_args!("{} steps, taken are a load and a store", map.chain.steps.len())));
        };
        Self::ID.require(from.dtype == to.dtype, Reason::DType, format_args!("{} to {}, taken is one type", from.dtype, to.dtype))?;
        let dims = &map.dims;
        let along = |view: &View| (0..dims.len()).find(|&dim| view.strides[dim] == 1 && dims[dim] >= LEAST);
        let found = along(from).zip(along(to)).filter(|(read, written)| read != written);
        let Some((read, written)) = found else {
            return Err(Self::ID.refusal(Reason::Layout, "taken are neighbours along two dims"));
        };
        let outer: Vec<usize> = (0..dims.len()).filter(|&dim| dim != read && dim != written && dims[dim] != 1).collect();
        let matrix = |view: &View| Matrix {
            slot: view.slot,
            dtype: view.dtype,
            row_stride: view.strides[written],
            column_stride: view.strides[read],
            batch_strides: outer.iter().map(|&dim| view.strides[dim]).collect(),
        };
        let batch: Vec<u64> = outer.iter().map(|&dim| dims[dim]).collect();
        let first = element(to, []).offset_bytes / to.dtype.bytes() as u64;
        let copy = Transposing::of([&matrix(from), &matrix(to)], [dims[written], dims[read]], &batch, dims[written], first);
        let Some(copy) = copy else {
            return Err(Self::ID.refusal(Reason::Extent, "taken are elements of 1, 2 and 4 bytes, below 2^30 along each of the two dims"));
        };
        Ok(Transpose { copy, from: element(from, []), to: element(to, []), slots: map.slots().len() })
    }

    fn configs(&self) -> Vec<u32> {
        // What it takes to find a block is shared by two.
        if self.copy.has_many_tiles() { vec![2, 1] } else { vec![1, 2] }
    }

    fn knobs(turns: &u32) -> Knobs {
        Knobs::new([("tiles", *turns)])
    }

    fn notes(&self, _: &u32) -> Notes {
        Notes::of(DType::F32)
    }

    fn work(&self, &turns: &u32) -> Work {
        Work::default().beside([self.copy.clone().in_turns(turns).work()])
    }

    fn lower(&self, &turns: &u32) -> Result<Program, Refusal> {
        let mut program = Program { buffer_alignment_bytes: vec![1; self.slots], ..Program::default() };
        self.copy.clone().in_turns(turns).launches(self.from, self.to).into_iter().for_each(|launch| program.launch(launch));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let kinds = [(false, 1), (false, 2), (true, 1), (true, 2)];
        let all = kinds.into_iter().flat_map(|(shifted, turns)| transposing::catalog_of([1, 2, 4], shifted, turns));
        all.filter(|_| Target::Sm90 <= target).collect()
    }
}
