//! Batch normalization: in training with running statistics that are replaced where they lie, its gradient, and with statistics that are given.

use verdigris_graph::{BatchNorm, BatchNormBackward, BatchNormed, BinaryOp, Real, Uid, UnaryOp};
use verdigris_tensor::DType;

use super::view::{View, like};
use super::{Drawing, Function, unfit};
use crate::error::Error;

/// Attributes of batch normalization in training.
///
/// ```
/// use verdigris::recipe::{BatchNormGradient, BatchNormSpec, Function, Input, draw};
/// use verdigris::{DType, Layout, Real};
///
/// let tensor = |dtype, dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype, layout, alignment_bytes: None }));
/// let (x, vector) = (tensor(DType::Bf16, &[8, 16, 7, 7])?, tensor(DType::F32, &[16])?);
/// let norm = Function::BatchNorm(BatchNormSpec { eps: Real(1e-5), momentum: Real(0.1), relu: true });
/// let recipe = draw(&norm, &[x, vector, vector, None, vector, vector])?;
/// // y, mean, inv, and the running statistics in the places of the fifth and sixth tensor.
/// let places: Vec<_> = recipe.results.iter().map(|result| result.in_place_of).collect();
/// assert_eq!(places, [None, None, None, Some(4), Some(5)]);
///
/// // dy, x, scale, mean, inv, bias: the gradients of x, scale and bias.
/// let gradient = BatchNormGradient { relu: true, reads_result: false, wanted: [true, true, true, false] };
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
    /// Whether the result is at least 0.
    pub relu: bool,
}

/// Which gradients of batch normalization are wanted, and how what passed ReLU is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchNormGradient {
    /// Whether the result was at least 0.
    pub relu: bool,
    /// With ReLU: the last tensor is the result, and not the bias.
    pub reads_result: bool,
    /// Of `x`, of the scale, of the bias, and of what was added.
    pub wanted: [bool; 4],
}

impl Drawing {
    pub(super) fn batch_norms(&mut self, function: &Function) -> Result<(), Error> {
        match *function {
            Function::BatchNorm(spec) => self.batch_norm(spec),
            Function::BatchNormBackward(spec) => self.batch_norm_backward(spec),
            Function::BatchNormInference { eps, relu } => self.batch_norm_inference(eps, relu),
            _ => Ok(()),
        }
    }

    /// What has one value a channel, of a tensor with the dims of the one at place `of`.
    fn of_channels(&mut self, place: usize, of: usize, name: &str) -> Result<Option<Uid>, Error> {
        let (rank, channels) = self.channels(of)?;
        let Some(given) = self.given[place] else { return Ok(None) };
        if given.layout.dims() != [channels] {
            let what = format!("{name} of dims {:?} for {channels} channels", given.layout.dims());
            return Err(unfit(what, "there is one value a channel"));
        }
        self.input_as(place, name, View::Channel { rank, axis: 1 }).map(Some)
    }

    /// The number of dims of a tensor, and its channels.
    fn channels(&self, of: usize) -> Result<(usize, u64), Error> {
        let dims = self.given(of)?.layout;
        match dims.dims().get(1) {
            Some(&channels) => Ok((dims.rank(), channels)),
            None => Err(unfit(format_args!("a tensor of dims {:?}", dims.dims()), "it has the dims [n, c, spatial…]")),
        }
    }

    /// An optional tensor of the dims of that at place `of`.
    fn beside(&mut self, place: usize, of: usize, name: &str) -> Result<Option<Uid>, Error> {
        let Some(given) = self.given[place] else { return Ok(None) };
        let dims = self.given(of)?.layout;
        if given.layout.dims() != dims.dims() {
            let what = format!("{name} of dims {:?} beside {:?}", given.layout.dims(), dims.dims());
            return Err(unfit(what, "both have the same dims"));
        }
        self.input(place, name).map(Some)
    }

    fn batch_norm(&mut self, BatchNormSpec { eps, momentum, relu }: BatchNormSpec) -> Result<(), Error> {
        let given = self.given(0)?;
        let (rank, channels) = self.channels(0)?;
        let norm = BatchNorm {
            momentum,
            relu,
            scale: self.of_channels(1, 0, "scale")?,
            bias: self.of_channels(2, 0, "bias")?,
            add: self.beside(3, 0, "add")?,
            running_mean: self.of_channels(4, 0, "running_mean")?,
            running_var: self.of_channels(5, 0, "running_var")?,
            ..BatchNorm::new(self.input(0, "x")?, eps.0)
        };
        let BatchNormed { y, mean, inv, next_mean, next_var } = self.g.batch_norm("batch_norm", norm)?;
        self.store(y, "y", given.dtype, like(&given.layout)?)?;
        let wide = self.g.described(mean).map_or(DType::F32, |tensor| tensor.dtype);
        let (vector, view) = (super::view::in_format(&[channels], false)?, View::Channel { rank, axis: 1 });
        self.store_as(mean, "mean", wide, vector, view)?;
        self.store_as(inv, "inv", wide, vector, view)?;
        for (next, place, name) in [(next_mean, 4, "next_mean"), (next_var, 5, "next_var")] {
            if let Some(next) = next {
                self.store_in_place_of(next, place, name, view)?;
            }
        }
        Ok(())
    }

    fn batch_norm_backward(&mut self, spec: BatchNormGradient) -> Result<(), Error> {
        let BatchNormGradient { relu, reads_result, wanted } = spec;
        let (dy, x) = (self.given(0)?, self.given(1)?);
        let (rank, channels) = self.channels(1)?;
        let missing = |name: &str| unfit(format_args!("the {name} of the channels is missing"), "the forward call gave it");
        let back = BatchNormBackward {
            relu,
            scale: self.of_channels(2, 1, "scale")?,
            y: if relu && reads_result { self.beside(5, 1, "y")? } else { None },
            bias: if relu && !reads_result { self.of_channels(5, 1, "bias")? } else { None },
            ..BatchNormBackward::new(
                self.beside(0, 1, "dy")?.ok_or_else(|| missing("gradient"))?,
                self.input(1, "x")?,
                self.of_channels(3, 1, "mean")?.ok_or_else(|| missing("mean"))?,
                self.of_channels(4, 1, "inv")?.ok_or_else(|| missing("inverse deviation"))?,
            )
        };
        let (dx, dscale, dbias, dadd) = self.g.batch_norm_backward("batch_norm_backward", back)?;
        let vector = super::view::in_format(&[channels], false)?;
        let of_channel = |place: usize| self.given[place].map(|given| given.dtype);
        let dtypes = [of_channel(2).unwrap_or(x.dtype), of_channel(5).filter(|_| !reads_result).or(of_channel(2)).unwrap_or(x.dtype)];
        if wanted[0] {
            self.store(dx, "dx", x.dtype, like(&x.layout)?)?;
        }
        for ((uid, dtype), (wanted, name)) in [dscale, dbias].into_iter().zip(dtypes).zip([(wanted[1], "dscale"), (wanted[2], "dbias")]) {
            if wanted {
                self.store_as(uid, name, dtype, vector, View::Channel { rank, axis: 1 })?;
            }
        }
        match dadd {
            Some(dadd) if wanted[3] => self.store(dadd, "dadd", dy.dtype, like(&x.layout)?),
            _ => Ok(()),
        }
    }

    fn batch_norm_inference(&mut self, eps: Real, relu: bool) -> Result<(), Error> {
        let given = self.given(0)?;
        let missing = || unfit("a running statistic is missing", "normalization with statistics that are given reads both");
        let statistics = [self.of_channels(1, 0, "mean")?.ok_or_else(missing)?, self.of_channels(2, 0, "var")?.ok_or_else(missing)?];
        let (scale, bias, add) = (self.of_channels(3, 0, "scale")?, self.of_channels(4, 0, "bias")?, self.beside(5, 0, "add")?);
        let x = self.input(0, "x")?;
        let mut y = self.g.batch_norm_inference("batch_norm", x, statistics, scale, bias, eps.0)?;
        if let Some(add) = add {
            y = self.g.binary("add", BinaryOp::Add, y, add)?;
        }
        if relu {
            y = self.g.unary("relu", UnaryOp::Relu, y)?;
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
            for relu in [false, true] {
                let norm = Function::BatchNorm(BatchNormSpec { eps: Real(1e-5), momentum: Real(0.1), relu });
                for given in [[x, vector, vector, x, vector, vector], [x, None, None, None, None, None]] {
                    assert_eq!(parts(&norm, &given), 1);
                }
                for (reads_result, last) in [(false, vector), (true, x), (false, None)] {
                    let gradient = BatchNormGradient { relu, reads_result, wanted: [true, true, true, relu] };
                    assert_eq!(parts(&Function::BatchNormBackward(gradient), &[x, x, vector, vector, vector, last]), 1);
                }
                let of = Function::BatchNormInference { eps: Real(1e-5), relu };
                parts(&of, &[x, vector, vector, vector, vector, x]);
                for with_respect_to in [0, 3, 4] {
                    let saved = (0..5).map(Saved::Tensor).collect();
                    let gradient = Gradient { of: of.clone(), with_respect_to, saved, dims: None };
                    parts(&Function::Gradient(Box::new(gradient)), &[x, x, vector, vector, vector, vector]);
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let (x, vector) = (input(DType::F32, &[4, 6, 3]), input(DType::F32, &[5]));
        let told = |function: Function, given: &[Option<Input>]| draw(&function, given).unwrap_err().to_string();
        let norm = || Function::BatchNorm(BatchNormSpec { eps: Real(1e-5), momentum: Real(0.1), relu: false });
        assert!(told(norm(), &[x, vector]).contains("[5] for 6 channels"));
        assert!(told(norm(), &[x, None, None, input(DType::F32, &[4, 6, 1])]).contains("[4, 6, 1] beside [4, 6, 3]"));
        assert!(told(norm(), &[input(DType::F32, &[4])]).contains("[n, c, spatial…]"));
        let inference = Function::BatchNormInference { eps: Real(1e-5), relu: false };
        assert!(told(inference, &[x, None, input(DType::F32, &[6])]).contains("statistic is missing"));
    }
}
