//! The epilogue of a convolution: the steps of [`super::epilogue`] on operands with five strides.
//!
//! An element of the result has a first index (n, of a filter gradient k), three spatial ones, and a channel. The channel takes the part of a
//! matrix's column: a place is an element, and [`super::epilogue::Place`] reaches from there over the channels.

use std::panic::Location;

use verdigris_graph::{ConvProblem, EpilogueStep, Precision, Slot, Tensor};
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::params::Parameter;
use verdigris_kir::program::{Address, Arg};

use super::compute::Compute;
use super::epilogue::{Epilogue, EpilogueArgs, EpilogueDecl, EpilogueSpec, OperandSpec, Place, StepSpec, Walk};
use super::operand::{Layout, Operand, OperandArgs};

/// An element but for its channel: its first index, depth, height and width.
pub(crate) type Pixel<'k> = [Val<'k, u32>; 4];

impl OperandSpec {
    /// The class of a tensor: its channels are what columns are to a matrix.
    pub(crate) fn of_tensor(tensor: &Tensor) -> OperandSpec {
        let walk = match tensor.strides[1] {
            1 => Walk::Row,
            0 => Walk::PerRow,
            _ => Walk::Strided,
        };
        OperandSpec { dtype: tensor.dtype, walk }
    }
}

impl EpilogueSpec {
    /// The spec of a convolution's epilogue. `pairs` where the strides allow it, provided that each buffer is aligned to two elements.
    pub(crate) fn of_conv(problem: &ConvProblem) -> EpilogueSpec {
        EpilogueSpec {
            double: problem.precision == Precision::F64,
            steps: problem.epilogue.iter().map(|step| StepSpec::of(step, OperandSpec::of_tensor)).collect(),
            exact: problem.is_exact_integer(),
            pairs: tensors(problem).all(pairs_fit),
            ..EpilogueSpec::plain(OperandSpec::of_tensor(problem.result()))
        }
    }

    /// The declaration of its parameters over tensors, for [`Epilogue::at_pixel`]: the spec of [`EpilogueArgs`].
    pub(crate) fn over_tensors(&self) -> EpilogueDecl {
        EpilogueDecl { spec: self.clone(), layout: Layout::Tensors }
    }

    /// Declares the parameters for [`Epilogue::at_pixel`].
    pub(crate) fn declare_conv<'k, T: Compute>(&self, k: Kernel<'k>) -> Epilogue<'k, T> {
        EpilogueArgs::declare(k, "", &self.over_tensors()).of()
    }

    /// The arguments of [`EpilogueSpec::over_tensors`].
    pub(crate) fn conv_arguments(&self, problem: &ConvProblem) -> EpilogueArgs {
        self.arguments_of_steps(&problem.epilogue, problem.result(), |spec, tensor| {
            let [first, channel, depth, height, width] = tensor.strides.map(|stride| stride * tensor.dtype.bytes() as u64);
            OperandArgs {
                operand: Address::buffer(tensor.slot.0 as usize),
                row_strides: vec![first, depth, height, width],
                column_stride: (spec.walk == Walk::Strided).then_some(channel),
                batch: None,
            }
        })
    }

    /// The same, for a launch whose arguments are listed.
    pub(crate) fn conv_args(&self, problem: &ConvProblem) -> Vec<Arg> {
        self.conv_arguments(problem).listed(&self.over_tensors())
    }

    /// The alignment in bytes that the epilogue relies on, by buffer slot.
    pub(crate) fn conv_alignments<'a>(&'a self, problem: &'a ConvProblem) -> impl Iterator<Item = (Slot, u64)> + 'a {
        let many = if self.pairs { 2 } else { 1 };
        tensors(problem).map(move |tensor| (tensor.slot, many * tensor.dtype.bytes() as u64))
    }
}

impl<'k, T: Compute> Epilogue<'k, T> {
    /// Places an epilogue over tensors at a channel of a pixel.
    #[track_caller]
    pub(crate) fn at_pixel(&self, pixel: Pixel<'k>, channel: Val<'k, u32>) -> Place<'_, 'k, T> {
        let at = Location::caller();
        let start = |(_, operand): (OperandSpec, &Operand<'k>)| {
            let strides = operand.row_strides.iter();
            pixel.into_iter().zip(strides).fold(operand.operand.address(), |address, (index, &stride)| address + index.widen() * stride)
        };
        channel.kernel().scope(at, || self.place(None, self.operands().map(start), channel))
    }
}

/// How far an epilogue's operands are from one pixel to another of the same plane.
#[derive(Clone, Debug)]
pub(crate) struct PixelStep<'k>(Vec<Val<'k, u64>>);

impl<'k, T: Compute> Epilogue<'k, T> {
    /// The distance to the pixel `pixels` further along the width, or before.
    #[track_caller]
    pub(crate) fn width_step(&self, pixels: Val<'k, i32>) -> PixelStep<'k> {
        self.step(pixels, 3)
    }

    /// The distance to the pixel `pixels` further along the height, or before.
    #[track_caller]
    pub(crate) fn height_step(&self, pixels: Val<'k, i32>) -> PixelStep<'k> {
        self.step(pixels, 2)
    }

    #[track_caller]
    fn step(&self, pixels: Val<'k, i32>, index: usize) -> PixelStep<'k> {
        let at = Location::caller();
        let bytes = |(_, operand): (OperandSpec, &Operand<'k>)| pixels.widen().unsigned() * operand.row_strides[index];
        pixels.kernel().scope(at, || PixelStep(self.operands().map(bytes).collect()))
    }
}

impl<'k, T: Compute> Place<'_, 'k, T> {
    /// The same channel of the pixel that is a step further; one addition an operand.
    #[track_caller]
    pub(crate) fn along(self, step: &PixelStep<'k>) -> Self {
        self.advanced(&step.0)
    }
}

/// The operands of the steps, and the result.
fn tensors(problem: &ConvProblem) -> impl Iterator<Item = &Tensor> {
    let steps = problem.epilogue.iter().filter_map(|step| match step {
        EpilogueStep::Binary { operand: tensor, .. } | EpilogueStep::Store { target: tensor } => Some(tensor),
        _ => None,
    });
    steps.chain([problem.result()])
}

fn pairs_fit(tensor: &Tensor) -> bool {
    match OperandSpec::of_tensor(tensor).walk {
        Walk::Row => [0, 2, 3, 4].iter().all(|&dim| tensor.strides[dim].is_multiple_of(2)),
        // One element for two channels: no pair access.
        Walk::PerRow => true,
        Walk::Strided => false,
    }
}
