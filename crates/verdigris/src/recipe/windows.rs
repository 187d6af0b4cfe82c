//! Windows as dims of their own: what im2col, col2im and un-pooling as functions are made of. The windows of a tensor are a strided view of it, in which elements share memory.

use verdigris_graph::{BinaryOp, Real, ReductionOp, TernaryOp, Uid, UnaryOp};

use super::view::{View, in_format};
use super::{Drawing, Function, unfit};
use crate::error::Error;

impl Drawing {
    pub(super) fn windows(&mut self, function: &Function) -> Result<(), Error> {
        let given = self.given(0)?;
        let dims = given.layout.dims();
        let x = self.input(0, "x")?;
        let summed = match *function {
            Function::WindowSums(0) => {
                let y = self.g.unary("windows", UnaryOp::Identity, x)?;
                return self.store_in(y, "y", given.dtype, false);
            }
            Function::WindowSums(summed) | Function::WindowPick(summed) => summed,
            _ => return Ok(()),
        };
        let Some(kept) = dims.len().checked_sub(summed as usize).map(|kept| &dims[..kept]) else {
            return Err(unfit(format_args!("sums over {summed} dims of {dims:?}"), "there are as many dims"));
        };
        let x = if matches!(function, Function::WindowPick(_)) { self.picked(x, dims, kept)? } else { x };
        let axes: Vec<u32> = (kept.len() as u32..dims.len() as u32).collect();
        let sums = self.g.reduction("sums", ReductionOp::Add, x, &axes)?;
        self.store_as(sums, "y", given.dtype, in_format(kept, false)?, View::Behind { ones: axes.len() })
    }

    /// The elements of windows `x` whose positions are their window's index, and 0 in place of the others. A select, since the others may hold infinities.
    fn picked(&mut self, x: Uid, dims: &[u64], kept: &[u64]) -> Result<Uid, Error> {
        let (index, positions) = (self.given(1)?.layout, self.given(2)?.layout);
        if positions.dims() != dims || index.dims() != kept {
            let what = format!("windows of {dims:?}, positions of {:?} and an index of {:?}", positions.dims(), index.dims());
            return Err(unfit(what, "there is a position for each element, and an index for each window"));
        }
        let positions = self.input(2, "positions")?;
        let index = self.input_as(1, "index", View::Behind { ones: dims.len() - kept.len() })?;
        let is_it = self.g.binary("is_it", BinaryOp::Eq, positions, index)?;
        let zero = self.g.unary("zero", UnaryOp::Affine { scale: Real(0.0), shift: Real(0.0) }, is_it)?;
        Ok(self.g.ternary("picked", TernaryOp::Select, x, zero, is_it)?)
    }
}

#[cfg(test)]
mod tests {
    use verdigris_engines::arch::Arch;
    use verdigris_graph::pattern::partition;
    use verdigris_tensor::{DType, Layout};

    use super::super::{Input, draw};
    use super::*;

    fn view(dtype: DType, dims: &[u64], strides: &[u64]) -> Option<Input> {
        Some(Input { dtype, layout: Layout::new(dims, strides).expect("a layout"), alignment_bytes: None })
    }

    /// The number of launched parts of a function's graph, each of which an engine takes, and the dims of its result.
    fn parts(function: &Function, given: &[Option<Input>]) -> (usize, Vec<u64>) {
        let recipe = draw(function, given).unwrap_or_else(|error| panic!("{function:?}: {error}"));
        let parts = partition(&recipe.graph).expect("cut").parts;
        for part in &parts {
            let taken = verdigris_engines::engines().any(|engine| engine.accept(&part.problem, &Arch::h200()).is_ok());
            assert!(taken, "{function:?}: {:?}", part.problem);
        }
        (parts.len(), recipe.results[0].layout.dims().to_vec())
    }

    #[test]
    fn windows_that_overlap_are_one_launch() {
        for dtype in [DType::Bf16, DType::F32, DType::F64] {
            // Of 2 × 3 images of 8 × 9 elements: 6 × 4 windows of 3 × 3 under the strides 1 and 2.
            let windows = view(dtype, &[2, 3, 3, 3, 6, 4], &[216, 72, 9, 1, 9, 2]);
            assert_eq!(parts(&Function::WindowSums(0), &[windows]), (1, vec![2, 3, 3, 3, 6, 4]));
            // Rows, rows of a stride, columns, columns of a stride, then the windows around them.
            let around = view(dtype, &[6, 3, 2, 3, 2, 2, 2], &[600, 10, 100, 2, 50, 90, 30]);
            assert_eq!(parts(&Function::WindowSums(2), &[around]), (1, vec![6, 3, 2, 3, 2]));
        }
    }

    #[test]
    fn what_an_index_names_is_picked() {
        for dtype in [DType::Bf16, DType::F64] {
            let (dims, strides) = ([2, 3, 3, 3, 2, 2], [216, 72, 18, 2, 9, 1]);
            let (windows, positions) = (view(dtype, &dims, &strides), view(DType::I64, &dims, &[0, 0, 18, 2, 9, 1]));
            for index in [DType::I32, DType::I64] {
                let index = view(index, &dims[..4], &[27, 9, 3, 1]);
                let (count, result) = parts(&Function::WindowPick(2), &[windows, index, positions]);
                assert!(count <= 2 && result == dims[..4], "{count} parts, {result:?}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let told = |function: Function, given: &[Option<Input>]| draw(&function, given).unwrap_err().to_string();
        let x = view(DType::F32, &[2, 3], &[3, 1]);
        assert!(told(Function::WindowSums(3), &[x]).contains("sums over 3 dims of [2, 3]"));
        let index = view(DType::I64, &[3], &[1]);
        assert!(told(Function::WindowPick(1), &[x, index, view(DType::I64, &[2, 3], &[0, 1])]).contains("an index of [3]"));
        assert!(told(Function::WindowPick(1), &[x, index]).contains("tensor 2 of the call is missing"));
    }
}
