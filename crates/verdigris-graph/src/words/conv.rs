//! Convolutions in words.

use verdigris_tensor::DType;

use super::codec::{Layouts, Text, error};
use super::gemm::{determinism, epilogue, precision};
use crate::error::Error;
use crate::ops::conv::ConvDirection;
use crate::ops::matmul::Precision;
use crate::problem::{Channels, ConvProblem, Determinism, Slot, Statistics, Tensor, output_extent};

/// What reading fills in: a convolution in which nothing happens.
pub(super) fn blank() -> ConvProblem {
    let nothing = Tensor { slot: Slot(0), dtype: DType::F32, strides: [0; 5] };
    ConvProblem {
        direction: ConvDirection::Fprop,
        n: 0,
        c: 0,
        k: 0,
        groups: 1,
        input: [1; 3],
        filter: [1; 3],
        output: [1; 3],
        pads_before: [0; 3],
        pads_after: [0; 3],
        strides: [1; 3],
        dilations: [1; 3],
        flip: false,
        precision: Precision::Fp32,
        determinism: Determinism::Any,
        x: nothing.clone(),
        w: nothing.clone(),
        y: nothing,
        prologue: Vec::new(),
        epilogue: Vec::new(),
        statistics: None,
    }
}

pub(super) fn describe(text: &mut Text<'_>, problem: &mut ConvProblem) -> Result<(), Error> {
    text.named("`fprop`, `dgrad` or `wgrad`", &mut problem.direction)?;
    text.usual_type(|| problem.operands()[0].1.dtype)?;
    let usual = usual_layout(text, problem)?;
    let mut is_solid = [problem.input[0], problem.filter[0], problem.strides[0], problem.dilations[0]] != [1; 4]
        || [problem.pads_before[0], problem.pads_after[0]] != [0; 2];
    text.flag("3d", &mut is_solid);
    let first = if is_solid { 0 } else { 1 };
    text.field("n", &mut problem.n, None)?;
    text.field("c", &mut problem.c, None)?;
    for (name, extent) in ["d", "h", "w"].iter().zip(&mut problem.input).skip(first) {
        text.field(name, extent, None)?;
    }
    text.field("k", &mut problem.k, None)?;
    for (name, extent) in ["t", "r", "s"].iter().zip(&mut problem.filter).skip(first) {
        text.field(name, extent, None)?;
    }
    text.field("groups", &mut problem.groups, Some(1))?;
    spatial(text, "stride", &mut problem.strides[first..], &[1; 3][first..])?;
    spatial(text, "pad", &mut problem.pads_before[first..], &[0; 3][first..])?;
    spatial(text, "dilation", &mut problem.dilations[first..], &[1; 3][first..])?;
    // As much as in front, as far as the output reads it.
    let behind: [u64; 3] = std::array::from_fn(|dim| needed_behind(problem, dim).min(problem.pads_before[dim]));
    spatial(text, "pad_after", &mut problem.pads_after[first..], &behind[first..])?;
    for dim in 0..3 {
        problem.output[dim] = extent_of_output(problem, dim, problem.pads_after[dim]);
    }
    text.flag("flip", &mut problem.flip);
    let (x, w, y) = (problem.x_extents(), problem.w_extents(), problem.y_extents());
    let ((x, x_dims), (w, w_dims), (y, y_dims)) = ((&mut problem.x, x), (&mut problem.w, w), (&mut problem.y, y));
    let [(name, first_operand, dims), second, result] = match problem.direction {
        ConvDirection::Fprop => [("x", x, x_dims), ("filter", w, w_dims), ("y", y, y_dims)],
        ConvDirection::Dgrad => [("y", y, y_dims), ("filter", w, w_dims), ("x", x, x_dims)],
        ConvDirection::Wgrad => [("y", y, y_dims), ("x", x, x_dims), ("filter", w, w_dims)],
    };
    text.operand(name, first_operand, &layouts(usual, dims))?;
    text.operand(second.0, second.1, &layouts(usual, second.2))?;
    precision(text, &mut problem.precision, [first_operand.dtype, second.1.dtype])?;
    determinism(text, &mut problem.determinism);
    let of_result = layouts(usual, result.2);
    epilogue(text, "<", &mut problem.prologue, &vectors())?;
    epilogue(text, "+", &mut problem.epilogue, &of_result)?;
    text.operand(result.0, result.1, &of_result)?;
    statistics(text, &mut problem.statistics)
}

/// The layout of operands that tell none: that of the activations, where it has a name.
fn usual_layout(text: &mut Text<'_>, problem: &ConvProblem) -> Result<&'static str, Error> {
    let (_, activations, dims) = problem.operands()[usize::from(problem.direction == ConvDirection::Wgrad)];
    let lies = |name| activations.strides == strides_of(name, dims);
    let is_first = lies("nchw") && !lies("nhwc");
    let word = text.word("`nhwc` or `nchw`", || if is_first { "nchw" } else { "nhwc" }.to_owned())?;
    ["nhwc", "nchw"].into_iter().find(|name| *name == word).ok_or_else(|| error("`nhwc` or `nchw`", &word))
}

fn strides_of(name: &str, extents: [u64; 5]) -> [u64; 5] {
    let mut tensor = match name {
        "nhwc" => Tensor::channels_last(Slot(0), DType::F32, extents),
        "nchw" => Tensor::channels_first(Slot(0), DType::F32, extents),
        "channel" => Tensor { slot: Slot(0), dtype: DType::F32, strides: [0, 1, 0, 0, 0] },
        _ => Tensor { slot: Slot(0), dtype: DType::F32, strides: [0; 5] },
    };
    tensor.normalize_strides(extents);
    tensor.strides
}

fn layouts(usual: &'static str, extents: [u64; 5]) -> Layouts {
    let other = if usual == "nhwc" { "nchw" } else { "nhwc" };
    [usual, other, "channel", "one"].into_iter().map(|name| (name, strides_of(name, extents).to_vec())).collect()
}

fn vectors() -> Layouts {
    vec![("packed", vec![1]), ("one", vec![0])]
}

/// One number for each spatial dim, one for all where they are equal.
fn spatial(text: &mut Text<'_>, name: &str, values: &mut [u64], usual: &[u64]) -> Result<(), Error> {
    let brief = |values: &[u64]| {
        let is_one = values.iter().all(|value| Some(value) == values.first());
        values[..if is_one { 1 } else { values.len() }].to_vec()
    };
    let mut short = brief(values);
    text.field(name, &mut short, Some(brief(usual)))?;
    if short.len() != 1 && short.len() != values.len() {
        return Err(error(format!("`{name}=` is one number or {}", values.len()), &short.len().to_string()));
    }
    for (dim, value) in values.iter_mut().enumerate() {
        *value = short[dim.min(short.len() - 1)];
    }
    Ok(())
}

fn extent_of_output(problem: &ConvProblem, dim: usize, after: u64) -> u64 {
    let ConvProblem { input, filter, pads_before, strides, dilations, .. } = problem;
    output_extent(input[dim], filter[dim], pads_before[dim], after, strides[dim], dilations[dim]).unwrap_or(0)
}

/// The padding behind that the output of as much padding behind as in front reads.
fn needed_behind(problem: &ConvProblem, dim: usize) -> u64 {
    let output = extent_of_output(problem, dim, problem.pads_before[dim]);
    let reach = output.max(1).saturating_sub(1).saturating_mul(problem.strides[dim]);
    let taps = problem.filter[dim].saturating_sub(1).saturating_mul(problem.dilations[dim]).saturating_add(1);
    reach.saturating_add(taps).saturating_sub(problem.input[dim].saturating_add(problem.pads_before[dim]))
}

fn statistics(text: &mut Text<'_>, statistics: &mut Option<Statistics>) -> Result<(), Error> {
    let (mut sum, mut squares): (Option<Channels>, Option<Channels>) = statistics.map(|both| (both.sum, both.sum_of_squares)).unzip();
    text.optional("sum", &mut sum, &vectors())?;
    text.optional("sum_of_squares", &mut squares, &vectors())?;
    *statistics = match (sum, squares) {
        (Some(sum), Some(sum_of_squares)) => Some(Statistics { sum, sum_of_squares }),
        (None, None) => None,
        _ => return Err(error("`sum=` and `sum_of_squares=` stand together", "one of them")),
    };
    Ok(())
}
