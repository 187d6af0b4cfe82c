//! Batch normalization: in training with running statistics that are replaced where they lie, its gradient, and with statistics that are given.

use verdigris_graph::{BatchNorm, BatchNormBackward, BatchNormed, BinaryOp, Real, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

use super::view::{View, in_format, like};
use super::{Drawing, Function, unfit};
use crate::error::Error;

/// Attributes of batch normalization in training.
///
/// ```
/// use verdigris::recipe::{BatchNormGradient, BatchNormSpec, Function, Input, draw};
/// use verdigris::{DType, Layout, Real, UnaryOp};
///
/// let tensor = |dtype, dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype, layout, alignment_bytes: None }));
/// let (x, vector) = (tensor(DType::Bf16, &[8, 16, 7, 7])?, tensor(DType::F32, &[16])?);
/// let norm = Function::BatchNorm(BatchNormSpec { eps: Real(1e-5), momentum: Real(0.1), activation: Some(UnaryOp::Relu) });
/// let recipe = draw(&norm, &[x, vector, vector, None, vector, vector])?;
/// // y, mean, inv, and the running statistics in the places of the fifth and sixth tensor.
/// let places: Vec<_> = recipe.results.iter().map(|result| result.in_place_of).collect();
/// assert_eq!(places, [None, None, None, Some(4), Some(5)]);
///
/// // dy, x, scale, mean, inv, bias: the gradients of x, scale and bias.
/// let gradient = BatchNormGradient { activation: Some(UnaryOp::Relu), reads_result: false, wanted: [true, true, true, false] };
/// let recipe = draw(&Function::BatchNormBackward(gradient), &[x, x, vector, vector, vector, vector])?;
/// assert_eq!((recipe.results.len(), recipe.graph.nodes.len()), (3, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BatchNormSpec {
    /// Added to the variance before its root.
    pub eps: Real,
    /// The part of the new running statistics that is this batch's.
    pub momentum: Real,
    /// What stands behind the normalization; ReLU alone where something is added.
    pub activation: Option<UnaryOp>,
}

/// The op's attributes `relu` and `activation`.
fn parted(activation: Option<UnaryOp>) -> (bool, Option<UnaryOp>) {
    (activation == Some(UnaryOp::Relu), activation.filter(|&f| f != UnaryOp::Relu))
}

/// Which gradients of batch normalization are wanted, and how what passed ReLU is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchNormGradient {
    /// What stood behind the normalization.
    pub activation: Option<UnaryOp>,
    /// With ReLU: the last tensor is the result, and not the bias.
    pub reads_result: bool,
    /// Of `x`, of the scale, of the bias, and of what was added.
    pub wanted: [bool; 4],
}

/// Where a call has the tensors that the gradients of batch normalization are computed from.
#[derive(Clone, Copy)]
pub(super) struct Places {
    pub(super) dy: usize,
    pub(super) x: usize,
    pub(super) scale: usize,
    pub(super) mean: usize,
    pub(super) inv: usize,
    /// The result or the bias.
    pub(super) last: usize,
}

impl Places {
    const ALONE: Places = Places { dy: 0, x: 1, scale: 2, mean: 3, inv: 4, last: 5 };
}

/// The gradients of batch normalization in the graph; that of what was added with ReLU alone.
#[derive(Clone, Copy)]
pub(super) struct Gradients {
    pub(super) dx: Uid,
    dscale: Uid,
    dbias: Uid,
    dadd: Option<Uid>,
}

/// The number of dims of a tensor, and its channels.
fn channels(dims: &[u64]) -> Result<(usize, u64), Error> {
    match dims.get(1) {
        Some(&channels) => Ok((dims.len(), channels)),
        None => Err(unfit(format_args!("a tensor of dims {dims:?}"), "it has the dims [n, c, spatial…]")),
    }
}

impl Drawing {
    pub(super) fn batch_norms(&mut self, function: &Function) -> Result<(), Error> {
        match *function {
            Function::BatchNorm(spec) => self.batch_norm(spec),
            Function::BatchNormBackward(spec) => self.batch_norm_backward(spec),
            Function::BatchNormInference { eps, activation } => self.batch_norm_inference(eps, activation),
            _ => Ok(()),
        }
    }

    /// What has one value a channel, of a tensor of these dims.
    fn of_channels(&mut self, place: usize, dims: &[u64], name: &str) -> Result<Option<Uid>, Error> {
        let (rank, channels) = channels(dims)?;
        let Some(given) = self.given[place] else { return Ok(None) };
        if given.layout.dims() != [channels] {
            let what = format!("{name} of dims {:?} for {channels} channels", given.layout.dims());
            return Err(unfit(what, "there is one value a channel"));
        }
        self.input_as(place, name, View::Channel { rank, axis: 1 }).map(Some)
    }

    /// An optional tensor of these dims.
    fn beside(&mut self, place: usize, dims: &[u64], name: &str) -> Result<Option<Uid>, Error> {
        let Some(given) = self.given[place] else { return Ok(None) };
        if given.layout.dims() != dims {
            let what = format!("{name} of dims {:?} beside {dims:?}", given.layout.dims());
            return Err(unfit(what, "both have the same dims"));
        }
        self.input(place, name).map(Some)
    }

    fn batch_norm(&mut self, spec: BatchNormSpec) -> Result<(), Error> {
        let given = self.given(0)?;
        let x = self.input(0, "x")?;
        self.batch_normalized(x, given.dtype, like(&given.layout)?, 1, spec)
    }

    /// Normalizes `x` and stores the result in this type and layout; the scale and what follows it in the call begin at place `first`.
    pub(super) fn batch_normalized(
        &mut self,
        x: Uid,
        dtype: DType,
        layout: Layout,
        first: usize,
        BatchNormSpec { eps, momentum, activation }: BatchNormSpec,
    ) -> Result<(), Error> {
        let dims = self.dims_of(x);
        let (rank, channels) = channels(&dims)?;
        let (relu, activation) = parted(activation);
        let norm = BatchNorm {
            momentum,
            relu,
            activation,
            scale: self.of_channels(first, &dims, "scale")?,
            bias: self.of_channels(first + 1, &dims, "bias")?,
            add: self.beside(first + 2, &dims, "add")?,
            running_mean: self.of_channels(first + 3, &dims, "running_mean")?,
            running_var: self.of_channels(first + 4, &dims, "running_var")?,
            ..BatchNorm::new(x, eps.0)
        };
        let BatchNormed { y, mean, inv, next_mean, next_var } = self.g.batch_norm("batch_norm", norm)?;
        self.store(y, "y", dtype, layout)?;
        let wide = self.g.described(mean).map_or(DType::F32, |tensor| tensor.dtype);
        let (vector, view) = (in_format(&[channels], false)?, View::Channel { rank, axis: 1 });
        self.store_as(mean, "mean", wide, vector, view)?;
        self.store_as(inv, "inv", wide, vector, view)?;
        for (next, place, name) in [(next_mean, first + 3, "next_mean"), (next_var, first + 4, "next_var")] {
            if let Some(next) = next {
                self.store_in_place_of(next, place, name, view)?;
            }
        }
        Ok(())
    }

    fn batch_norm_backward(&mut self, spec: BatchNormGradient) -> Result<(), Error> {
        let BatchNormGradient { activation, reads_result, wanted: [of_x, of_others @ ..] } = spec;
        let x = self.given(Places::ALONE.x)?;
        let made = self.batch_norm_gradients(Places::ALONE, activation, reads_result)?;
        if of_x {
            self.store(made.dx, "dx", x.dtype, like(&x.layout)?)?;
        }
        self.store_batch_norm_gradients(Places::ALONE, reads_result, made, of_others)
    }

    /// The gradients of batch normalization, none of them stored.
    pub(super) fn batch_norm_gradients(
        &mut self,
        places: Places,
        activation: Option<UnaryOp>,
        reads_result: bool,
    ) -> Result<Gradients, Error> {
        let has_activation = activation.is_some();
        let (relu, activation) = parted(activation);
        let dims = self.given(places.x)?.layout;
        let dims = dims.dims();
        let missing = |name: &str| unfit(format_args!("the {name} of the channels is missing"), "the forward call gave it");
        let back = BatchNormBackward {
            relu,
            activation,
            scale: self.of_channels(places.scale, dims, "scale")?,
            y: if has_activation && reads_result { self.beside(places.last, dims, "y")? } else { None },
            bias: if has_activation && !reads_result { self.of_channels(places.last, dims, "bias")? } else { None },
            ..BatchNormBackward::new(
                self.beside(places.dy, dims, "dy")?.ok_or_else(|| missing("gradient"))?,
                self.input(places.x, "x")?,
                self.of_channels(places.mean, dims, "mean")?.ok_or_else(|| missing("mean"))?,
                self.of_channels(places.inv, dims, "inv")?.ok_or_else(|| missing("inverse deviation"))?,
            )
        };
        let (dx, dscale, dbias, dadd) = self.g.batch_norm_backward("batch_norm_backward", back)?;
        Ok(Gradients { dx, dscale, dbias, dadd })
    }

    /// Stores those of the scale, the bias and what was added that are wanted.
    pub(super) fn store_batch_norm_gradients(
        &mut self,
        places: Places,
        reads_result: bool,
        made: Gradients,
        [of_scale, of_bias, of_add]: [bool; 3],
    ) -> Result<(), Error> {
        let (dy, x) = (self.given(places.dy)?, self.given(places.x)?);
        let (rank, channels) = channels(x.layout.dims())?;
        let of_channel = |place: usize| self.given[place].map(|given| given.dtype);
        let scale = of_channel(places.scale);
        let bias = of_channel(places.last).filter(|_| !reads_result).or(scale);
        let vector = in_format(&[channels], false)?;
        for (wanted, uid, name, dtype) in [(of_scale, made.dscale, "dscale", scale), (of_bias, made.dbias, "dbias", bias)] {
            if wanted {
                self.store_as(uid, name, dtype.unwrap_or(x.dtype), vector, View::Channel { rank, axis: 1 })?;
            }
        }
        match made.dadd {
            Some(dadd) if of_add => self.store(dadd, "dadd", dy.dtype, like(&x.layout)?),
            _ => Ok(()),
        }
    }

    fn batch_norm_inference(&mut self, eps: Real, activation: Option<UnaryOp>) -> Result<(), Error> {
        let given = self.given(0)?;
        let dims = given.layout.dims();
        let missing = || unfit("a running statistic is missing", "normalization with statistics that are given reads both");
        let statistics = [self.of_channels(1, dims, "mean")?.ok_or_else(missing)?, self.of_channels(2, dims, "var")?.ok_or_else(missing)?];
        let (scale, bias, add) = (self.of_channels(3, dims, "scale")?, self.of_channels(4, dims, "bias")?, self.beside(5, dims, "add")?);
        let x = self.input(0, "x")?;
        let mut y = self.g.batch_norm_inference("batch_norm", x, statistics, scale, bias, eps.0)?;
        if let Some(add) = add {
            y = self.g.binary("add", BinaryOp::Add, y, add)?;
        }
        if let Some(f) = activation {
            y = self.g.unary("activation", f, y)?;
        }
        self.store(y, "y", given.dtype, like(&given.layout)?)
    }
}

#[cfg(test)]
mod tests {
    use verdigris_engines::arch::Arch;
    use verdigris_graph::pattern::partition;
    use verdigris_tensor::Layout;

    use super::super::{Gradient, Input, Saved, draw};
    use super::*;

    fn input(dtype: DType, dims: &[u64]) -> Option<Input> {
        Some(Input { dtype, layout: Layout::row_major(dims).unwrap(), alignment_bytes: None })
    }

    /// The number of launched parts of a function's graph, each of which an engine takes.
    fn parts(function: &Function, given: &[Option<Input>]) -> usize {
        let graph = draw(function, given).unwrap_or_else(|error| panic!("{function:?}: {error}")).graph;
        let parts = partition(&graph).unwrap().parts;
        for part in &parts {
            let taken = verdigris_engines::engines().any(|engine| engine.accept(&part.problem, &Arch::h200()).is_ok());
            assert!(taken, "{function:?}: {:?}", part.problem);
        }
        parts.len()
    }

    #[test]
    fn each_way_is_one_problem_that_an_engine_takes() {
        for dtype in [DType::Bf16, DType::F64] {
            let (x, vector) = (input(dtype, &[4, 6, 3, 5]), input(DType::F32, &[6]));
            for activation in [None, Some(UnaryOp::Relu), Some(UnaryOp::Silu), Some(UnaryOp::Mish)] {
                let relu = activation == Some(UnaryOp::Relu);
                let is_alone = !relu && activation.is_some();
                let norm = Function::BatchNorm(BatchNormSpec { eps: Real(1e-5), momentum: Real(0.1), activation });
                for given in [[x, vector, vector, x.filter(|_| !is_alone), vector, vector], [x, None, None, None, None, None]] {
                    assert_eq!(parts(&norm, &given), 1);
                }
                for (reads_result, last) in [(false, vector), (true, x), (false, None)] {
                    if reads_result && is_alone {
                        continue;
                    }
                    let gradient = BatchNormGradient { activation, reads_result, wanted: [true, true, true, relu] };
                    assert_eq!(parts(&Function::BatchNormBackward(gradient), &[x, x, vector, vector, vector, last]), 1);
                }
                let of = Function::BatchNormInference { eps: Real(1e-5), activation };
                parts(&of, &[x, vector, vector, vector, vector, x]);
                for with_respect_to in [0, 3, 4] {
                    let saved = (0..5).map(Saved::Tensor).collect();
                    let gradient = Gradient { of: of.clone(), with_respect_to, saved, dims: None, dtype: None };
                    parts(&Function::Gradient(Box::new(gradient)), &[x, x, vector, vector, vector, vector]);
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let (x, vector) = (input(DType::F32, &[4, 6, 3]), input(DType::F32, &[5]));
        let told = |function: Function, given: &[Option<Input>]| draw(&function, given).unwrap_err().to_string();
        let norm = || Function::BatchNorm(BatchNormSpec { eps: Real(1e-5), momentum: Real(0.1), activation: None });
        assert!(told(norm(), &[x, vector]).contains("[5] for 6 channels"));
        assert!(told(norm(), &[x, None, None, input(DType::F32, &[4, 6, 1])]).contains("[4, 6, 1] beside [4, 6, 3]"));
        let silu = Function::BatchNorm(BatchNormSpec { eps: Real(1e-5), momentum: Real(0.1), activation: Some(UnaryOp::Silu) });
        assert!(told(silu, &[x, None, None, x]).contains("behind a sum"));
        assert!(told(norm(), &[input(DType::F32, &[4])]).contains("[n, c, spatial…]"));
        let inference = Function::BatchNormInference { eps: Real(1e-5), activation: None };
        assert!(told(inference, &[x, None, input(DType::F32, &[6])]).contains("statistic is missing"));
    }
}
