//! Some elements of a convolution's result by the reference's formula, from operands that are known on the host without being held there.

use anyhow::Result;
use rayon::prelude::*;
use verdigris_graph::ops::conv::{Conv, ConvMode};
use verdigris_graph::{ConvProblem, Direction, Tensor, Uid};
use verdigris_reference::graph::Selection;
use verdigris_reference::ops::conv::{Known, elements_at};
use verdigris_reference::run::Expected;
use verdigris_reference::tolerance::Bounded;
use verdigris_tensor::Layout;

use super::correctness::{Sample, Shape};

/// Products that one thread sums up for a sample: some tenths of a second.
const PRODUCTS_PER_THREAD: u64 = 40_000_000;
/// Least and most elements of a sample. The first are enough for all corners.
const ELEMENTS: (u64, u64) = (48, 256);

/// A convolution without steps before or behind it, over three spatial dims. Uids name nothing.
fn described(problem: &ConvProblem) -> Conv {
    let none = Uid(0);
    Conv {
        pads_before: problem.pads_before.to_vec(),
        pads_after: problem.pads_after.to_vec(),
        strides: problem.strides.to_vec(),
        dilations: problem.dilations.to_vec(),
        groups: problem.groups,
        mode: if problem.flip { ConvMode::Convolution } else { ConvMode::CrossCorrelation },
        ..Conv::new(problem.direction, none, none, none, 3, problem.precision)
    }
}

/// A sample of a packed result. `first` and `second` give the elements of the problem's operands, in its order, by their offsets.
pub(super) fn sample(
    problem: &ConvProblem,
    first: &(dyn Fn(u64) -> f64 + Sync),
    second: &(dyn Fn(u64) -> f64 + Sync),
    seed: u64,
) -> Result<Sample> {
    let known = |(_, tensor, extents): (&str, &Tensor, [u64; 5]), at| -> Result<Known<'_>> {
        Ok(Known { dtype: tensor.dtype, layout: Layout::new(&extents, &tensor.strides)?, at })
    };
    let [one, other] = problem.operands();
    let (one, other) = (known(one, first)?, known(other, second)?);
    // The formula names x before y, a problem the gradient before x.
    let operands = if problem.direction == Direction::Wgrad { [other, one] } else { [one, other] };
    let conv = described(problem);
    let (result, out) = (problem.result(), problem.result_extents());

    let threads = rayon::current_num_threads() as u64;
    let count = (threads * PRODUCTS_PER_THREAD / problem.gemm_extents().k.max(1)).clamp(ELEMENTS.0, ELEMENTS.1);
    let positions = Selection::Sample { count, seed }.positions(&out);
    let values: Vec<Bounded> = (positions.par_iter().with_max_len(1))
        .flat_map_iter(|position| elements_at(&conv, operands, result.dtype, &out, std::slice::from_ref(position)))
        .collect();
    let layout = Layout::new(&out, &result.strides)?;
    let expected = Expected { id: result.slot, dtype: result.dtype, layout, positions, values, magnitudes: Vec::new() };
    Sample::of(Shape::packed(result.dtype, out.iter().product()), result.slot, expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::{ConvExtents, Graph, GraphBuilder};
    use verdigris_reference::data::{Distribution, GUARD_BYTES, inputs, sentinel};
    use verdigris_reference::graph::evaluate;
    use verdigris_reference::run::Inputs;
    use verdigris_tensor::{DType, num};

    /// The same convolution as a graph, with the uids of the operands in the order of slots.
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
        let conv = Conv { x, w, y, ..described(problem) };
        let made = match problem.direction {
            Direction::Fprop => g.conv_fprop("conv", conv)?,
            Direction::Dgrad => g.conv_dgrad("conv", conv, &problem.x_extents())?,
            Direction::Wgrad => g.conv_wgrad("conv", conv, &problem.w_extents())?,
        };
        let result = problem.result();
        g.store_as(made, "result", result.dtype, layout(result, problem.result_extents())?)?;
        Ok((g.finish()?, [first, second]))
    }

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
            let element = |bytes: &[u8], i: u64| num::read_element(DType::Bf16, &bytes[2 * i as usize..]).expect("within");
            let sample = sample(&problem, &|i| element(&first, i), &|i| element(&second, i), 3).expect("samples");
            let (graph, uids) = graph(&problem).expect("a graph");
            let mut by_uid = Inputs::default();
            by_uid.buffers.insert(uids[0], first);
            by_uid.buffers.insert(uids[1], second);
            let whole = evaluate(&graph, &by_uid, Selection::All).expect("computes").remove(0);
            let bytes = whole.layout.span_elements() as usize * 2 + GUARD_BYTES;
            let before: Vec<u8> = sentinel(DType::Bf16).into_iter().cycle().take(bytes).collect();
            let mut after = whole.rounded(&before);
            assert_eq!(sample.judge_bytes(&after).fault, None, "{}", direction.name());
            // The first element is a corner, and so in every sample.
            after[1] ^= 0x40;
            assert!(sample.judge_bytes(&after).fault.is_some(), "{}", direction.name());
        }
    }
}
