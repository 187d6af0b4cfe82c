//! Gradients of functions, by the rules of differentiation of their ops.

use verdigris_graph::{GraphBuilder, Uid};
use verdigris_tensor::Layout;

use super::view::{in_format, is_channels_last, like};
use super::{Drawing, Function, Gradient, Input, MAX_INPUTS, Outcome, Saved, Seen, Stored, unfit};
use crate::error::Error;

/// Draws the function, takes its gradient, and keeps the part that computes it from what is given.
pub(super) fn draw(gradient: &Gradient, given: [Option<Input>; MAX_INPUTS]) -> Result<Drawing, Error> {
    draw_several(&[gradient], given)
}

/// The gradients of one call of a normalization as one graph, whose op computes them together; `None` of other functions.
pub(super) fn draw_as_one(functions: &[Function], given: &[Option<Input>]) -> Result<Option<Drawing>, Error> {
    let gradients: Vec<&Gradient> = functions
        .iter()
        .filter_map(|function| if let Function::Gradient(gradient) = function { Some(&**gradient) } else { None })
        .collect();
    let [first, others @ ..] = &gradients[..] else { return Ok(None) };
    let is_one = !others.is_empty()
        && gradients.len() == functions.len()
        && matches!(first.of, Function::Norm { .. })
        && others.iter().all(|other| (&other.of, &other.saved) == (&first.of, &first.saved));
    let mut room = [None; MAX_INPUTS];
    match room.get_mut(..given.len()) {
        Some(places) if is_one => {
            places.copy_from_slice(given);
            draw_several(&gradients, room).map(Some)
        }
        _ => Ok(None),
    }
}

/// The gradients of one call with respect to several of its tensors.
fn draw_several(gradients: &[&Gradient], given: [Option<Input>; MAX_INPUTS]) -> Result<Drawing, Error> {
    let Some(&Gradient { of, saved, .. }) = gradients.first() else { return Err(Error::NoResult) };
    let dy = given[0].ok_or_else(|| unfit("the gradient of the result is missing", "it is the first tensor of the call"))?;
    let behind = |at: usize| given.get(at + 1).copied().flatten();
    let mut read = [None; MAX_INPUTS];
    for (at, saved) in saved.iter().enumerate() {
        if let Saved::Tensor(place) = *saved
            && let Some(read) = read.get_mut(place)
        {
            *read = behind(at);
        }
    }
    let mut tensors = Vec::new();
    for gradient in gradients {
        let wanted = gradient.with_respect_to;
        let Some(slot) = read.get_mut(wanted) else {
            return Err(unfit(format_args!("the gradient with respect to tensor {wanted}"), "a function reads at most 6"));
        };
        tensors.push((
            wanted,
            match *slot {
                Some(tensor) => tensor,
                None => *slot.insert(unsaved(gradient, dy, &given)?),
            },
        ));
    }
    let names = || tensors.iter().map(|(wanted, _)| wanted.to_string()).collect::<Vec<_>>().join(", ");

    let alone = if let [(wanted, _)] = tensors[..] { Some(wanted) } else { None };
    let mut forward = Drawing::of(of, &read, alone)?;
    let mut inputs: [Option<Seen>; MAX_INPUTS] = [None; MAX_INPUTS];
    for (at, saved) in saved.iter().enumerate() {
        let Some((place, tensor)) = inputs.get_mut(at + 1).zip(behind(at)) else { continue };
        *place = match *saved {
            Saved::Tensor(place) => forward.inputs.get(place).copied().flatten(),
            Saved::Result(number) => Some(forward.result_is(number, tensor)?),
        };
    }
    let Some(&Stored { outcome: Outcome { uid: y, .. }, view }) = forward.results.first() else { return Err(Error::NoResult) };
    // A result that is not given takes the type of its gradient, so that no op casts dy to the type of the result.
    if !saved.contains(&Saved::Result(0)) {
        forward.g.set_dtype(y, dy.dtype)?;
    }
    let (seen, dy) = forward.tensor_as(dy, "dy", view)?;
    inputs[0] = Some(seen);
    let seen: Vec<Seen> =
        tensors.iter().map(|&(wanted, _)| forward.inputs[wanted].ok_or_else(|| constant(of, wanted))).collect::<Result<_, Error>>()?;
    let uids: Vec<Uid> = seen.iter().map(|seen| seen.uid).collect();
    let made = forward.g.gradient_from(&[(y, dy)], &uids)?;
    forward.results.clear();
    for (((&dx, x), (_, tensor)), gradient) in made.iter().zip(&seen).zip(&tensors).zip(gradients) {
        forward.store_as(dx, "gradient", gradient.dtype.unwrap_or(tensor.dtype), as_tensor(of, &tensor.layout)?, x.view)?;
    }

    let given_uids: Vec<Uid> = inputs.iter().flatten().map(|seen| seen.uid).collect();
    let graph = forward.g.finish()?.part(&made, &given_uids)?;
    let is_read = |uid: Uid| graph.nodes.iter().any(|node| node.op.inputs().contains(&uid));
    if let Some(place) =
        (0..MAX_INPUTS).find(|&place| forward.inputs[place].is_some_and(|input| is_read(input.uid) && !given_uids.contains(&input.uid)))
    {
        let what = format!("the gradient of `{}` with respect to tensor {}, which reads tensor {place}", of.name(), names());
        return Err(unfit(what, "what a gradient reads is saved"));
    }
    // Tensors that the gradient does not read are not bound.
    let inputs = inputs.map(|input| input.filter(|input| is_read(input.uid)));
    Ok(Drawing { g: GraphBuilder::from(graph), given, inputs, results: forward.results, wanted: None })
}

/// The description of a tensor that is not saved: the type of `dy`, and the memory format of a saved result, which is that of the tensor.
fn unsaved(gradient: &Gradient, dy: Input, given: &[Option<Input>; MAX_INPUTS]) -> Result<Input, Error> {
    let result = gradient.saved.iter().zip(&given[1..]).find(|(saved, _)| matches!(saved, Saved::Result(_)));
    let told_by = result.and_then(|(_, given)| *given);
    let layout = match (&gradient.dims, told_by) {
        (None, Some(result)) => result.layout,
        (None, None) => dy.layout,
        (Some(dims), Some(result)) => in_format(dims, is_channels_last(&result.layout))?,
        (Some(dims), None) => in_format(dims, given.iter().flatten().any(|given| is_channels_last(&given.layout)))?,
    };
    Ok(Input { dtype: dy.dtype, layout, alignment_bytes: None })
}

/// How the gradient of a tensor lies: as the function's results do beside such a tensor.
fn as_tensor(of: &Function, layout: &Layout) -> Result<Layout, Error> {
    match of {
        Function::Gradient(inner) => as_tensor(&inner.of, layout),
        Function::Linear(..) => in_format(layout.dims(), false),
        Function::ConvFprop(..)
        | Function::ConvDgrad(..)
        | Function::MaxPool(..)
        | Function::FractionalMaxPool(..)
        | Function::AveragePool(..)
        | Function::Resample(_)
        | Function::Shuffle(_)
        | Function::Pad { .. } => in_format(layout.dims(), is_channels_last(layout)),
        _ => like(layout),
    }
}

/// A gradient that the function does not have, since it does not read the tensor.
fn constant(of: &Function, wanted: usize) -> Error {
    let tensor = format!("tensor {wanted}");
    verdigris_graph::Error::Constant { op: of.name().to_owned(), tensor, rule: "the function does not read the tensor" }.into()
}

impl Drawing {
    /// A result that is given, as it lies there.
    fn result_is(&mut self, number: usize, given: Input) -> Result<Seen, Error> {
        let Some(&Stored { outcome: Outcome { uid, .. }, view }) = self.results.get(number) else {
            return Err(unfit(
                format_args!("result {number} of a function of {}", self.results.len()),
                "what is saved is one of its results",
            ));
        };
        let Some(layout) = view.of(&given.layout)? else {
            return Err(unfit(format_args!("a saved result of {}", given.layout), "it has one stride for its leading dims"));
        };
        self.g.store_as(uid, "saved", given.dtype, layout)?;
        if let Some(bytes) = given.alignment_bytes {
            self.g.align(uid, bytes.max(given.dtype.bytes() as u64))?;
        }
        Ok(Seen { uid, view })
    }
}

#[cfg(test)]
mod tests {
    use verdigris_graph::pattern::partition;
    use verdigris_graph::{BinaryOp, CrossEntropyBackward, CrossEntropySpec, LossReduction, NormKind, NormSpec};
    use verdigris_graph::{Conv, ConvDirection, Graph, Matmul, PoolBackward, PoolMode, PoolWindows, Precision, ReductionOp, UnaryOp};
    use verdigris_tensor::DType;

    use super::super::{Convolution, Divisor, LossForm, draw, draw_together};
    use super::*;

    fn input(dtype: DType, dims: &[u64]) -> Option<Input> {
        Some(Input { dtype, layout: in_format(dims, false).unwrap(), alignment_bytes: None })
    }

    fn half(dims: &[u64]) -> Option<Input> {
        input(DType::F16, dims)
    }

    fn problems(graph: &Graph) -> Vec<String> {
        partition(graph).unwrap().parts.iter().map(|part| format!("{:?}", part.problem)).collect()
    }

    /// A graph drawn by hand, from tensors like those given.
    fn by_hand(given: &[Option<Input>], build: impl FnOnce(&mut GraphBuilder, &[Uid]) -> (Uid, Layout)) -> Vec<String> {
        let mut g = GraphBuilder::new("by hand");
        let uids: Vec<Uid> = given.iter().flatten().map(|given| g.tensor("input", given.dtype, given.layout)).collect();
        let (result, layout) = build(&mut g, &uids);
        g.store_as(result, "result", DType::F16, layout).unwrap();
        problems(&g.finish().unwrap())
    }

    fn drawn(of: Function, with_respect_to: usize, saved: &[Saved], dims: Option<&[u64]>, given: &[Option<Input>]) -> Vec<String> {
        let gradient = Gradient { of, with_respect_to, saved: saved.to_vec(), dims: dims.map(<[u64]>::to_vec), dtype: None };
        problems(&draw(&Function::Gradient(Box::new(gradient)), given).unwrap().graph)
    }

    const ALL: [Saved; 3] = [Saved::Tensor(0), Saved::Tensor(1), Saved::Tensor(2)];

    /// The rules lead to the problems that a backward pass asks for by hand, so that the same kernels run: one part each, no copy.
    #[test]
    fn gradients_by_rule_are_the_problems_that_one_would_ask_for() {
        let row_major = |dims: &[u64]| in_format(dims, false).unwrap();

        let linear = || Function::Linear(Precision::Fp32, UnaryOp::Identity);
        let (x, w, bias, dy) = (half(&[6, 5, 8]), half(&[16, 8]), half(&[16]), half(&[6, 5, 16]));
        let got = drawn(linear(), 0, &ALL, None, &[dy, x, w, bias]);
        let want = by_hand(&[half(&[30, 16]), w], |g, u| {
            (g.matmul_with("dx", Matmul::new(u[0], u[1], Uid(0), Precision::Fp32)).unwrap(), row_major(&[30, 8]))
        });
        assert_eq!(got, want);
        let got = drawn(linear(), 1, &ALL, None, &[dy, x, w, bias]);
        let want = by_hand(&[half(&[30, 16]), half(&[30, 8])], |g, u| {
            let turned = g.transpose("turned", u[0], &[1, 0]).unwrap();
            (g.matmul_with("dw", Matmul::new(turned, u[1], Uid(0), Precision::Fp32)).unwrap(), row_major(&[16, 8]))
        });
        assert_eq!(got, want);
        let got = drawn(linear(), 2, &ALL, None, &[dy, x, w, bias]);
        let want = by_hand(&[half(&[30, 16])], |g, u| (g.reduction("db", ReductionOp::Add, u[0], &[0]).unwrap(), row_major(&[1, 16])));
        assert_eq!(got, want);

        let attributes = Convolution {
            strides: vec![2, 1],
            pads_before: vec![1, 0],
            pads_after: vec![1, 0],
            dilations: vec![1, 1],
            groups: 2,
            precision: Precision::Fp32,
        };
        let conv = |direction, x, w, y| Conv {
            strides: vec![2, 1],
            pads_before: vec![1, 0],
            pads_after: vec![1, 0],
            groups: 2,
            ..Conv::new(direction, x, w, y, 2, Precision::Fp32)
        };
        let function = || Function::ConvFprop(attributes.clone(), UnaryOp::Identity);
        let (x, w, bias, dy) = (half(&[2, 4, 7, 6]), half(&[8, 2, 3, 3]), half(&[8]), half(&[2, 8, 4, 4]));
        let want = by_hand(&[dy, w], |g, u| {
            let conv = conv(ConvDirection::Dgrad, Uid(0), u[1], u[0]);
            (g.conv_dgrad("dx", conv, &[2, 4, 7, 6]).unwrap(), row_major(&[2, 4, 7, 6]))
        });
        assert_eq!(drawn(function(), 0, &ALL, None, &[dy, x, w, bias]), want);
        let want = by_hand(&[x, dy], |g, u| {
            let conv = conv(ConvDirection::Wgrad, u[0], Uid(0), u[1]);
            (g.conv_wgrad("dw", conv, &[8, 2, 3, 3]).unwrap(), row_major(&[8, 2, 3, 3]))
        });
        assert_eq!(drawn(function(), 1, &ALL, None, &[dy, x, w, bias]), want);
        let want = by_hand(&[dy], |g, u| (g.reduction("db", ReductionOp::Add, u[0], &[0, 2, 3]).unwrap(), row_major(&[1, 8, 1, 1])));
        assert_eq!(drawn(function(), 2, &ALL, None, &[dy, x, w, bias]), want);

        let windows = || PoolWindows::tiles(&[2, 2]);
        let (index, dy, dims) = (input(DType::I32, &[2, 3, 2, 3]), half(&[2, 3, 2, 3]), [2, 3, 5, 6]);
        for (mode, function, saved, given) in [
            (PoolMode::Max, Function::MaxPool(windows(), Some(DType::I32)), &[Saved::Result(1)][..], vec![dy, index]),
            (PoolMode::Average { count_include_pad: true }, Function::AveragePool(windows(), Divisor::Taps), &[], vec![dy]),
        ] {
            let want = by_hand(&given, |g, u| {
                let back = PoolBackward { mode, windows: windows(), dy: u[0], x: None, index: u.get(1).copied(), dx: Uid(0) };
                (g.pool_backward("dx", back, &dims).unwrap(), row_major(&dims))
            });
            assert_eq!(drawn(function, 0, saved, Some(&dims), &given), want);
        }

        let (y, dy) = (half(&[4, 9]), half(&[4, 9]));
        let want = by_hand(&[dy, y], |g, u| (g.softmax_backward("dx", u[1], u[0], 1, true).unwrap(), row_major(&[4, 9])));
        assert_eq!(drawn(Function::Softmax(1, true), 0, &[Saved::Result(0)], None, &[dy, y]), want);
        let want = by_hand(&[dy, y], |g, u| (g.binary("dx", BinaryOp::Backward(UnaryOp::Mish), u[0], u[1]).unwrap(), row_major(&[4, 9])));
        assert_eq!(drawn(Function::Activation(UnaryOp::Mish), 0, &ALL[..1], None, &[dy, y]), want);

        let spec = CrossEntropySpec::new(1, LossReduction::Mean);
        let (labels, lse) = (input(DType::I64, &[4, 1]), input(DType::F32, &[4, 1]));
        let want = by_hand(&[half(&[1, 1]), y, labels, lse], |g, u| {
            let [dloss, logits, labels, lse] = u[..] else { unreachable!() };
            let back = CrossEntropyBackward { spec, logits, labels, dloss, lse: Some(lse), dlogits: Uid(0) };
            (g.cross_entropy_backward("dlogits", back).unwrap(), row_major(&[4, 9]))
        });
        let saved = [Saved::Tensor(0), Saved::Tensor(1), Saved::Result(1)];
        let given = [half(&[]), y, input(DType::I64, &[4]), input(DType::F32, &[4])];
        assert_eq!(drawn(Function::CrossEntropy(spec, LossForm::WithLse), 0, &saved, None, &given), want);
    }

    /// A parameter that was rounded for the call has a gradient in its own type, and no launch for that.
    #[test]
    fn a_gradient_may_have_a_wider_type_than_its_tensor() {
        let conv = Convolution {
            strides: vec![],
            pads_before: vec![1, 1],
            pads_after: vec![1, 1],
            dilations: vec![],
            groups: 1,
            precision: Precision::Fp32,
        };
        let (linear, conv) = (Function::Linear(Precision::Fp32, UnaryOp::Identity), Function::ConvFprop(conv, UnaryOp::Identity));
        let images = [half(&[2, 64, 8, 8]), half(&[2, 32, 8, 8]), half(&[64, 32, 3, 3]), half(&[64])];
        for (of, given) in [(linear, [half(&[6, 16]), half(&[6, 8]), half(&[16, 8]), half(&[16])]), (conv, images)] {
            for with_respect_to in 0..3 {
                let of = of.clone();
                let gradient = Gradient { of, with_respect_to, saved: ALL.to_vec(), dims: None, dtype: Some(DType::F32) };
                let recipe = draw(&Function::Gradient(Box::new(gradient)), &given).unwrap();
                assert_eq!(recipe.results[0].dtype, DType::F32);
                assert_eq!(problems(&recipe.graph).len(), 1);
            }
        }
    }

    /// A layer's gradients in one graph: the problems of each, one behind the other, and every tensor of a uid of its own.
    #[test]
    fn gradients_together_are_the_problems_of_each() {
        let gradient = |with_respect_to| {
            let of = Function::Linear(Precision::Fp32, UnaryOp::Identity);
            Function::Gradient(Box::new(Gradient { of, with_respect_to, saved: ALL.to_vec(), dims: None, dtype: None }))
        };
        let given = [half(&[6, 5, 16]), half(&[6, 5, 8]), half(&[16, 8]), half(&[16])];
        let each: Vec<Function> = [0, 1, 2].map(gradient).into();
        let alone: Vec<_> = each.iter().map(|function| draw(function, &given).unwrap()).collect();
        let together = draw_together(&each, &given).unwrap();
        assert_eq!(problems(&together.graph), alone.iter().flat_map(|recipe| problems(&recipe.graph)).collect::<Vec<_>>());
        let dims = |results: &[Outcome]| results.iter().map(|result| result.layout.dims().to_vec()).collect::<Vec<_>>();
        assert_eq!(dims(&together.results), [vec![6, 5, 8], vec![16, 8], vec![16]]);
        let places =
            |recipes: &[super::super::Recipe]| recipes.iter().flat_map(|r| r.inputs.iter().map(|&(_, place)| place)).collect::<Vec<_>>();
        assert_eq!(places(std::slice::from_ref(&together)), places(&alone));
        let uids: std::collections::BTreeSet<Uid> =
            together.inputs.iter().map(|&(uid, _)| uid).chain(together.results.iter().map(|result| result.uid)).collect();
        assert_eq!(uids.len(), together.inputs.len() + 3);
        assert!(uids.iter().all(|&uid| together.graph.tensor(uid).is_some_and(|tensor| !tensor.is_virtual)));
        // The first that is refused refuses all.
        let told = draw_together(&[gradient(0), gradient(7)], &given).unwrap_err().to_string();
        assert!(told.contains("tensor 7"), "{told}");
        assert!(draw_together(&[], &given).is_err());
    }

    /// The gradients of a normalization are one problem, with vectors over the last dim and over channels; each by itself is one too.
    #[test]
    fn gradients_of_a_norm_are_one_problem() {
        let of = |per_channel: bool, axes: &[u32]| Function::Norm { spec: NormSpec::new(NormKind::Layer, axes, 1e-5), per_channel };
        for (of, x, vector) in [(of(false, &[1]), half(&[6, 8]), half(&[8])), (of(true, &[2, 3]), half(&[2, 4, 3, 5]), half(&[4]))] {
            let gradient = |with_respect_to| {
                Function::Gradient(Box::new(Gradient { of: of.clone(), with_respect_to, saved: ALL.to_vec(), dims: None, dtype: None }))
            };
            let given = [x, x, vector, vector];
            for wanted in [&[0][..], &[1], &[2], &[0, 1], &[1, 2], &[0, 1, 2]] {
                let functions: Vec<Function> = wanted.iter().map(|&wanted| gradient(wanted)).collect();
                let recipe = draw_together(&functions, &given).unwrap();
                let parts = partition(&recipe.graph).unwrap().parts;
                assert_eq!(parts.iter().map(|part| part.problem.kind()).collect::<Vec<_>>(), ["norm"], "{wanted:?}");
                let dims: Vec<Vec<u64>> = recipe.results.iter().map(|result| result.layout.dims().to_vec()).collect();
                let expected = |place: &usize| given[place + 1].unwrap().layout.dims().to_vec();
                assert_eq!(dims, wanted.iter().map(expected).collect::<Vec<_>>());
            }
        }
        // Those of several calls are several.
        let other = Function::Norm { spec: NormSpec::new(NormKind::Rms, &[1], 1e-5), per_channel: false };
        let gradient = |of: &Function| {
            Function::Gradient(Box::new(Gradient { of: of.clone(), with_respect_to: 0, saved: ALL.to_vec(), dims: None, dtype: None }))
        };
        let (x, vector) = (half(&[6, 8]), half(&[8]));
        let both = draw_together(&[gradient(&of(false, &[1])), gradient(&other)], &[x, x, vector]).unwrap();
        assert_eq!(both.graph.nodes.len(), 2);
    }

    #[test]
    fn what_a_gradient_lacks_is_told() {
        let told = |of: Function, with_respect_to: usize, saved: &[Saved], given: &[Option<Input>]| {
            let gradient = Gradient { of, with_respect_to, saved: saved.to_vec(), dims: None, dtype: None };
            draw(&Function::Gradient(Box::new(gradient)), given).unwrap_err().to_string()
        };
        let x = half(&[4, 9]);
        let softmax = || Function::Softmax(1, false);
        let error = told(softmax(), 0, &[], &[x]);
        assert!(error.contains("reads tensor 0; what a gradient reads is saved"), "{error}");
        let error = told(softmax(), MAX_INPUTS, &[], &[x]);
        assert!(error.contains(&format!("tensor {MAX_INPUTS}")), "{error}");
        let error = told(softmax(), 0, &[Saved::Result(1)], &[x, x]);
        assert!(error.contains("result 1 of a function of 1"), "{error}");
        let error = told(Function::Activation(UnaryOp::Sign), 0, &ALL[..1], &[x, x]);
        assert!(error.contains("constant wherever it has a derivative"), "{error}");
        // The gradient of ReLU's gradient: of dy it is one, of x it is none.
        let inner = |of| {
            let inner = Gradient { of: Function::Activation(of), with_respect_to: 0, saved: ALL[..1].to_vec(), dims: None, dtype: None };
            Function::Gradient(Box::new(inner))
        };
        assert_eq!(drawn(inner(UnaryOp::Relu), 0, &ALL[..2], None, &[x, x, x]).len(), 1);
        let error = told(inner(UnaryOp::Relu), 1, &ALL[..2], &[x, x, x]);
        assert!(error.contains("no gradient"), "{error}");
        let error = told(inner(UnaryOp::Mish), 1, &ALL[..2], &[x, x, x]);
        assert!(error.contains("second derivative of a curved activation"), "{error}");
        let error = told(softmax(), 0, &[], &[None]);
        assert!(error.contains("gradient of the result is missing"), "{error}");
    }
}
