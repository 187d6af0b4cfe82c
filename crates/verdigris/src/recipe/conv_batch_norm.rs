//! A convolution with the batch normalization of training behind it, and the gradients of both together: each one graph, so that a layer of a
//! network is one call and one node of automatic differentiation.

use verdigris_graph::{ConvDirection, Uid, UnaryOp};
use verdigris_tensor::DType;

use super::batch_norm::{BatchNormSpec, Places};
use super::view::{in_format, is_channels_last};
use super::{Convolution, Drawing, Function};
use crate::error::Error;

/// Which gradients of a convolution with batch normalization are wanted, and what they are computed from.
///
/// ```
/// use verdigris::recipe::{BatchNormSpec, ConvBatchNormGradient, Convolution, Function, Input, draw};
/// use verdigris::{DType, Layout, Precision, Real, UnaryOp};
///
/// let tensor = |dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype: DType::F32, layout, alignment_bytes: None }));
/// let (x, w, y, vector) = (tensor(&[8, 3, 7, 7])?, tensor(&[16, 3, 1, 1])?, tensor(&[8, 16, 7, 7])?, tensor(&[16])?);
/// let list = || Vec::new();
/// let conv = Convolution {
///     strides: list(), pads_before: list(), pads_after: list(), dilations: list(), groups: 1, precision: Precision::Fp32,
/// };
/// let norm = BatchNormSpec { eps: Real(1e-5), momentum: Real(0.1), activation: Some(UnaryOp::Silu) };
/// // x, w, scale, bias, add, and the running statistics, which are replaced: y, mean, inv, the convolution's result.
/// let forward = Function::ConvBatchNorm { conv: conv.clone(), norm };
/// let recipe = draw(&forward, &[x, w, vector, vector, None, vector, vector])?;
/// let places: Vec<_> = recipe.results.iter().map(|result| result.in_place_of).collect();
/// assert_eq!(places, [None, None, None, Some(5), Some(6), None]);
///
/// // dy, x, w, the convolution's result, scale, mean, inv, bias: the gradients of x, w, scale and bias.
/// let wanted = [true, true, true, true, false];
/// let gradient = ConvBatchNormGradient { conv, activation: Some(UnaryOp::Silu), reads_result: false, wanted, filter_dtype: None };
/// let recipe = draw(&Function::ConvBatchNormBackward(gradient), &[y, x, w, y, vector, vector, vector, vector])?;
/// assert_eq!((recipe.results.len(), recipe.graph.nodes.len()), (4, 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConvBatchNormGradient {
    /// The convolution.
    pub conv: Convolution,
    /// What stood behind the normalization.
    pub activation: Option<UnaryOp>,
    /// With ReLU: the last tensor is the result, and not the bias.
    pub reads_result: bool,
    /// Of `x`, the filter, the scale, the bias, and of what was added.
    pub wanted: [bool; 5],
    /// The element type of the filter's gradient where it is not the filter's own: the type that the filter had before it was rounded for the
    /// convolution, so that its gradient is rounded once.
    pub filter_dtype: Option<DType>,
}

/// Places of the tensors that both read.
const FILTER: usize = 1;

impl Drawing {
    pub(super) fn conv_batch_norms(&mut self, function: &Function) -> Result<(), Error> {
        match function {
            Function::ConvBatchNorm { conv, norm } => self.conv_batch_norm(conv, *norm),
            Function::ConvBatchNormBackward(spec) => self.conv_batch_norm_backward(spec),
            _ => Ok(()),
        }
    }

    fn conv_batch_norm(&mut self, conv: &Convolution, norm: BatchNormSpec) -> Result<(), Error> {
        let (given, filter) = (self.given(0)?, self.given(FILTER)?);
        let (x, w) = (self.input(0, "x")?, self.input(FILTER, "w")?);
        let z = self.g.conv_fprop("conv", conv.op(ConvDirection::Fprop, [x, w, Uid(0)], given.layout.rank()))?;
        let layout = in_format(&self.dims_of(z), is_channels_last(&given.layout) || is_channels_last(&filter.layout))?;
        // The normalization reads what is stored, so that its gradients, which read it again, belong to the same numbers.
        self.g.set_dtype(z, given.dtype)?;
        self.batch_normalized(z, given.dtype, layout, 2, norm)?;
        self.store(z, "z", given.dtype, layout)
    }

    fn conv_batch_norm_backward(&mut self, spec: &ConvBatchNormGradient) -> Result<(), Error> {
        let ConvBatchNormGradient { conv, activation, reads_result, wanted, filter_dtype } = spec;
        let (x, w, z) = (self.given(1)?, self.given(2)?, self.given(3)?);
        let [of_x, of_filter, of_scale, of_bias, of_add] = *wanted;
        let places = Places { dy: 0, x: 3, scale: 4, mean: 5, inv: 6, last: 7 };
        let made = self.batch_norm_gradients(places, *activation, *reads_result)?;
        self.g.set_dtype(made.dx, z.dtype)?;
        self.g.set_layout(made.dx, z.layout)?;
        let op = |direction, uids| conv.op(direction, uids, x.layout.rank());
        if of_x {
            let w = self.input(2, "w")?;
            let dx = self.g.conv_dgrad("dx", op(ConvDirection::Dgrad, [Uid(0), w, made.dx]), x.layout.dims())?;
            self.store(dx, "dx", x.dtype, in_format(x.layout.dims(), is_channels_last(&x.layout))?)?;
        }
        if of_filter {
            let x = self.input(1, "x")?;
            let dw = self.g.conv_wgrad("dw", op(ConvDirection::Wgrad, [x, Uid(0), made.dx]), w.layout.dims())?;
            self.store(dw, "dw", filter_dtype.unwrap_or(w.dtype), in_format(w.layout.dims(), is_channels_last(&w.layout))?)?;
        }
        self.store_batch_norm_gradients(places, *reads_result, made, [of_scale, of_bias, of_add])
    }
}

#[cfg(test)]
mod tests {
    use verdigris_engines::arch::Arch;
    use verdigris_graph::pattern::partition;
    use verdigris_graph::{Precision, Problem, Real};
    use verdigris_tensor::Layout;

    use super::super::{Input, draw};
    use super::*;

    fn conv() -> Convolution {
        Convolution {
            strides: vec![2, 1],
            pads_before: vec![1, 1],
            pads_after: vec![1, 1],
            dilations: vec![],
            groups: 1,
            precision: Precision::Fp32,
        }
    }

    fn input(dtype: DType, dims: &[u64]) -> Option<Input> {
        Some(Input { dtype, layout: in_format(dims, true).expect("a packed layout"), alignment_bytes: None })
    }

    fn of_channels(channels: u64) -> Option<Input> {
        Some(Input { dtype: DType::F32, layout: Layout::row_major(&[channels]).expect("one dim"), alignment_bytes: None })
    }

    /// The kinds of the problems that a function's graph is cut into, each of which an engine takes, and their images' orders.
    fn kinds(function: &Function, given: &[Option<Input>]) -> Vec<&'static str> {
        let graph = draw(function, given).expect("drawn").graph;
        let parts = partition(&graph).expect("cut").parts;
        for part in &parts {
            let taken = verdigris_engines::engines().any(|engine| engine.accept(&part.problem, &Arch::h200()).is_ok());
            assert!(taken, "{:?}", part.problem);
            if let Problem::Conv(conv) = &part.problem {
                let images = [&conv.x, &conv.y];
                assert!(images.iter().all(|image| image.strides[1] == 1), "channels-last as the tensors are: {conv:?}");
            }
        }
        parts.iter().map(|part| part.problem.kind()).collect()
    }

    #[test]
    fn each_way_is_a_convolution_and_a_normalization_and_nothing_between_them() {
        let channel = of_channels(64);
        let (x, w, y) = (input(DType::Bf16, &[2, 32, 8, 8]), input(DType::Bf16, &[64, 32, 3, 3]), input(DType::Bf16, &[2, 64, 4, 8]));
        let relu = Some(UnaryOp::Relu);
        for (activation, add) in [(None, None), (relu, None), (relu, y), (Some(UnaryOp::HardSwish), None)] {
            let norm = BatchNormSpec { eps: Real(1e-5), momentum: Real(0.1), activation };
            let forward = Function::ConvBatchNorm { conv: conv(), norm };
            assert_eq!(kinds(&forward, &[x, w, channel, channel, add, channel, channel]), ["conv", "batch_norm"]);
            for filter_dtype in [None, Some(DType::F32)] {
                let last = if add.is_some() { y } else { channel };
                let of = |wanted| {
                    let reads_result = add.is_some();
                    let gradient = ConvBatchNormGradient { conv: conv(), activation, reads_result, wanted, filter_dtype };
                    kinds(&Function::ConvBatchNormBackward(gradient), &[y, x, w, y, channel, channel, channel, last])
                };
                assert_eq!(of([true, true, true, true, add.is_some()]), ["batch_norm", "conv", "conv"]);
                assert_eq!(of([false, true, true, true, false]), ["batch_norm", "conv"]);
                assert_eq!(of([false, false, true, false, false]), ["batch_norm"]);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let (x, w, five) = (input(DType::F32, &[2, 3, 4, 4]), input(DType::F32, &[6, 3, 1, 1]), of_channels(5));
        let forward = |given: &[Option<Input>]| {
            let conv = Convolution { strides: vec![], pads_before: vec![], pads_after: vec![], ..conv() };
            let norm = BatchNormSpec { eps: Real(1e-5), momentum: Real(0.1), activation: None };
            draw(&Function::ConvBatchNorm { conv, norm }, given).unwrap_err().to_string()
        };
        assert!(forward(&[x, w, five]).contains("[5] for 6 channels"));
        assert!(forward(&[x, w, None, None, x]).contains("[2, 3, 4, 4] beside [2, 6, 4, 4]"));
        assert!(forward(&[x]).contains("tensor 1 of the call is missing"));
    }
}
