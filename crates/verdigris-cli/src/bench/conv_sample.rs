//! Some elements of a convolution's result by the reference of its graph.

use anyhow::{Context, Result};
use rayon::prelude::*;
use verdigris_graph::ops::conv::{Conv, ConvMode};
use verdigris_graph::{ConvProblem, Direction, Graph, GraphBuilder, Tensor, Uid};
use verdigris_reference::graph::{Selection, evaluate};
use verdigris_reference::run::{Expected, Inputs};
use verdigris_tensor::Layout;

use super::correctness::{Sample, Shape};

/// Products that are summed up on the host for one sample.
const PRODUCTS: u64 = 20_000_000;

/// A convolution without steps before or behind it as a graph, with the uids of the operands in the order of slots, and of the result.
fn graph(problem: &ConvProblem) -> Result<(Graph, [Uid; 2])> {
    let mut g = GraphBuilder::new("conv");
    let layout = |tensor: &Tensor, extents: [u64; 5]| Layout::new(&extents, &tensor.strides);
    let mut uids = Vec::new();
    for (name, tensor, extents) in problem.operands() {
        uids.push(g.tensor(name, tensor.dtype, layout(tensor, extents)?));
    }
    let [first, second] = [uids[0], uids[1]];
    let none = Uid(-1);
    let (x, w, y) = match problem.direction {
        Direction::Fprop => (first, second, none),
        Direction::Dgrad => (none, second, first),
        Direction::Wgrad => (second, none, first),
    };
    let conv = Conv {
        pads_before: problem.pads_before.to_vec(),
        pads_after: problem.pads_after.to_vec(),
        strides: problem.strides.to_vec(),
        dilations: problem.dilations.to_vec(),
        groups: problem.groups,
        mode: if problem.flip { ConvMode::Convolution } else { ConvMode::CrossCorrelation },
        ..Conv::new(problem.direction, x, w, y, 3, problem.precision)
    };
    let made = match problem.direction {
        Direction::Fprop => g.conv_fprop("conv", conv)?,
        Direction::Dgrad => g.conv_dgrad("conv", conv, &problem.x_extents())?,
        Direction::Wgrad => g.conv_wgrad("conv", conv, &problem.w_extents())?,
    };
    let result = problem.result();
    g.store_as(made, "result", result.dtype, layout(result, problem.result_extents())?)?;
    Ok((g.finish()?, [first, second]))
}

/// A sample of a packed result, from the operands that the device holds.
pub(super) fn sample(problem: &ConvProblem, first: Vec<u8>, second: Vec<u8>, seed: u64) -> Result<Sample> {
    let (graph, uids) = graph(problem)?;
    let mut inputs = Inputs::default();
    inputs.buffers.insert(uids[0], first);
    inputs.buffers.insert(uids[1], second);
    let terms = problem.gemm_extents().k.max(1);
    let threads = rayon::current_num_threads() as u64;
    let each = (PRODUCTS / terms).clamp(64, 512).div_ceil(threads) + 32;
    let parts: Vec<Expected<Uid>> = (0..threads)
        .into_par_iter()
        .map(|i| {
            let mut outputs = evaluate(&graph, &inputs, Selection::Sample { count: each, seed: seed + i })?;
            Ok(outputs.remove(0))
        })
        .collect::<Result<_, verdigris_reference::graph::GraphError>>()?;
    let whole = parts.into_iter().reduce(|mut all, part| {
        // Corners are in every part.
        let new: Vec<usize> = (0..part.positions.len()).filter(|&i| !all.positions.contains(&part.positions[i])).collect();
        all.positions.extend(new.iter().map(|&i| part.positions[i]));
        all.values.extend(new.iter().map(|&i| part.values[i]));
        all
    });
    let result = problem.result();
    let elements = problem.result_extents().iter().product();
    Sample::of(Shape::packed(result.dtype, elements), result.slot, whole.context("a sample of at least one part")?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::ConvExtents;
    use verdigris_reference::data::{Distribution, GUARD_BYTES, inputs, sentinel};
    use verdigris_reference::graph::Selection;
    use verdigris_tensor::DType;

    #[test]
    fn a_right_result_passes_and_a_wrong_one_does_not() {
        for direction in Direction::ALL {
            let extents = ConvExtents {
                direction,
                n: 2,
                c: 8,
                k: 16,
                groups: 2,
                input: [1, 9, 8],
                filter: [1, 3, 3],
                pads: [0, 1, 1],
                strides: [1, 2, 1],
                dilations: [1; 3],
            };
            let problem = ConvProblem::packed(extents, DType::Bf16, DType::Bf16).expect("fits");
            let given = inputs(&verdigris_graph::Problem::Conv(problem.clone()), Distribution::Normal, 5);
            let [first, second] = problem.operands().map(|(_, tensor, _)| given.buffers[&tensor.slot].clone());
            let (graph, uids) = graph(&problem).expect("a graph");
            let mut by_uid = Inputs::default();
            by_uid.buffers.insert(uids[0], first.clone());
            by_uid.buffers.insert(uids[1], second.clone());
            let whole = evaluate(&graph, &by_uid, Selection::All).expect("computes").remove(0);
            let bytes = whole.layout.span_elements() as usize * 2 + GUARD_BYTES;
            let before: Vec<u8> = sentinel(DType::Bf16).into_iter().cycle().take(bytes).collect();
            let mut after = whole.rounded(&before);
            let sample = sample(&problem, first, second, 3).expect("samples");
            assert_eq!(sample.judge(&after).fault, None, "{}", direction.name());
            // The first element is a corner, and so in every sample.
            after[1] ^= 0x40;
            assert!(sample.judge(&after).fault.is_some(), "{}", direction.name());
        }
    }
}
