//! Graphs, built op by op or read from JSON.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use verdigris_graph::{
    Attention, AttentionBackward, AttentionSpec, BatchNorm, BatchNormBackward, BatchNormed, BinaryOp, CrossEntropyBackward, GraphBuilder,
    HostScalar, Matmul, NormGradients, Normalize, NormalizeBackward, PoolBackward, PoolWindows, Precision, Real, Sampling, ScoreFunction,
    ScoreStep, TensorDesc, TernaryOp,
};
use verdigris_tensor::DType;

use crate::errors::{Kind, graph as refuse, raise};
use crate::operands::{Each, Uid, conv, dtype, factor, layout, loss_spec, norm_spec, of, random_state, scale};
use crate::policy::{by_name, precision_named, unary_named};
use crate::spatial;

/// A graph under construction. Results are virtual, stored nowhere, until `store` makes them real.
///
/// Dims are `[n, c, spatial...]` for tensors of convolution and pooling, `[k, c / groups, spatial...]` for filters, `[b..., m, n]` for
/// matrices. Element types are named `f64 f32 f16 bf16 e4m3 e5m2 i8 u8 i32 i64 bool`. Dims and strides are in elements. Each method raises
/// `GraphError` for what it can see at once; `Device.plan` checks the whole.
#[pyclass(module = "verdigris")]
pub(crate) struct Graph {
    source: Source,
}

#[derive(Clone)]
enum Source {
    Builder(Box<GraphBuilder>),
    Finished(Box<verdigris_graph::Graph>),
}

impl Graph {
    /// The graph, checked.
    pub(crate) fn finished(&self) -> PyResult<verdigris_graph::Graph> {
        match &self.source {
            Source::Builder(builder) => builder.as_ref().clone().finish().map_err(refuse),
            Source::Finished(graph) => Ok(graph.as_ref().clone()),
        }
    }

    fn builder(&mut self) -> PyResult<&mut GraphBuilder> {
        match &mut self.source {
            Source::Builder(builder) => Ok(builder),
            Source::Finished(_) => {
                Err(raise(Kind::Graph, "a graph that was read from JSON is complete; ops are added to one that is built here"))
            }
        }
    }

    fn described(&self, uid: verdigris_graph::Uid) -> Option<&TensorDesc> {
        match &self.source {
            Source::Builder(builder) => builder.described(uid),
            Source::Finished(graph) => graph.tensor(uid),
        }
    }

    fn dtype_of(&self, uid: verdigris_graph::Uid) -> Option<DType> {
        self.described(uid).map(|desc| desc.dtype)
    }

    fn precision(&self, name: Option<&str>, a: Uid, b: Uid) -> PyResult<Precision> {
        if let Some(name) = name {
            return precision_named(name);
        }
        let (Some(a_type), Some(b_type)) = (self.dtype_of(a.0), self.dtype_of(b.0)) else {
            return Err(raise(Kind::Graph, format!("{a:?} or {b:?} is no tensor of this graph")));
        };
        Precision::usual(a_type, b_type).ok_or_else(|| {
            raise(
                Kind::Graph,
                format!("no usual precision for products of {a_type} and {b_type}; products are of one type, or of two 8-bit ones"),
            )
        })
    }

    /// What an attention is told; the scale is that of the elements of `q` where it is left out.
    fn attention_spec(
        &self,
        q: Uid,
        scale: Option<&Bound<'_, PyAny>>,
        causal: &str,
        [left, right]: [Option<u32>; 2],
        [longest_q, longest_kv]: [Option<u32>; 2],
        [soft_cap, dropout]: [Option<f64>; 2],
    ) -> PyResult<AttentionSpec> {
        let scale = match scale {
            Some(scale) => factor(scale)?,
            None => {
                let described = self.described(q.0).and_then(|desc| desc.layout.dims().last().copied());
                let Some(elements) = described else { return Err(raise(Kind::Graph, format!("{q:?} is no tensor of this graph"))) };
                HostScalar::Fixed(Real(1.0 / (elements.max(1) as f64).sqrt()))
            }
        };
        let (causal, soft_cap, dropout) = (by_name("causal", causal)?, soft_cap.map(Real), dropout.map(Real));
        Ok(AttentionSpec { scale, causal, left, right, soft_cap, longest_q, longest_kv, dropout })
    }
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "keywords of Python methods")]
impl Graph {
    #[new]
    #[pyo3(signature = (name = "graph"))]
    fn new(name: &str) -> Graph {
        Graph { source: Source::Builder(Box::new(GraphBuilder::new(name))) }
    }

    /// A graph from its JSON text, checked and complete.
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Graph> {
        let graph = verdigris_graph::json::graph_from_json(text).map_err(refuse)?;
        Ok(Graph { source: Source::Finished(Box::new(graph)) })
    }

    /// The graph as JSON text, checked.
    fn to_json(&self) -> PyResult<String> {
        Ok(verdigris_graph::json::graph_to_json(&self.finished()?))
    }

    /// Asks that two executions agree bit for bit.
    fn deterministic(&mut self) -> PyResult<()> {
        self.builder()?.deterministic();
        Ok(())
    }

    /// A stored tensor; packed row-major without `strides`. `alignment_bytes` declares what its address is a multiple of, for tensors
    /// that are aligned to little more than their elements; without it, ways may be chosen that need 16 bytes or more.
    #[pyo3(signature = (name, dtype, dims, strides = None, alignment_bytes = None))]
    fn tensor(
        &mut self,
        name: &str,
        dtype: &str,
        dims: Vec<u64>,
        strides: Option<Vec<u64>>,
        alignment_bytes: Option<u64>,
    ) -> PyResult<Uid> {
        let layout = layout(name, &dims, strides.as_deref())?;
        let builder = self.builder()?;
        let uid = builder.tensor(name, self::dtype(dtype)?, layout);
        if let Some(bytes) = alignment_bytes {
            builder.align(uid, bytes).map_err(refuse)?;
        }
        Ok(Uid(uid))
    }

    /// A scalar that is bound by value at execution.
    #[pyo3(signature = (name, dtype = "f32"))]
    fn host_scalar(&mut self, name: &str, dtype: &str) -> PyResult<Uid> {
        Ok(Uid(self.builder()?.host_scalar(name, self::dtype(dtype)?)))
    }

    /// `alpha * (a @ b) + beta * c`, over the last two dims, `[b..., m, k]` and `[b..., k, n]`. `alpha` and `beta` are numbers or
    /// host scalars. `precision` is `f64 ieee fp32 tf32 f16 fp8_fast fp8_promoted i32`; `None` is the usual one of the types.
    /// `scale_a`, `scale_b` with `block_a`, `block_b` (`[outer, k]` extents of one factor) are for fp8.
    #[pyo3(signature = (a, b, c = None, *, alpha = None, beta = None, precision = None, scale_a = None, block_a = None, scale_b = None,
        block_b = None, name = "matmul"))]
    fn matmul(
        &mut self,
        a: Uid,
        b: Uid,
        c: Option<Uid>,
        alpha: Option<&Bound<'_, PyAny>>,
        beta: Option<&Bound<'_, PyAny>>,
        precision: Option<&str>,
        scale_a: Option<Uid>,
        block_a: Option<[u64; 2]>,
        scale_b: Option<Uid>,
        block_b: Option<[u64; 2]>,
        name: &str,
    ) -> PyResult<Uid> {
        let precision = self.precision(precision, a, b)?;
        let plain = Matmul::new(a.0, b.0, verdigris_graph::Uid(0), precision);
        let beta = match (beta, c) {
            (Some(beta), _) => factor(beta)?,
            (None, Some(_)) => HostScalar::ONE,
            (None, None) => HostScalar::ZERO,
        };
        let alpha = alpha.map_or(Ok(HostScalar::ONE), factor)?;
        let (scale_a, scale_b) = (scale(scale_a, block_a), scale(scale_b, block_b));
        let matmul = Matmul { c: c.map(|c| c.0), alpha, beta, scale_a, scale_b, ..plain };
        self.builder()?.matmul_with(name, matmul).map(Uid).map_err(refuse)
    }

    /// `f(x)`; attributes as keywords, as in `unary("leaky_relu", x, slope=0.01)`. The names are those of the graph's JSON: `identity neg
    /// abs relu leaky_relu clamp gelu_erf gelu_tanh silu sigmoid tanh clipped_relu elu softplus swish hard_swish hard_sigmoid mish exp log sqrt
    /// rsqrt reciprocal erf sin cos tan ceil floor round sign not is_finite is_nan affine`.
    #[pyo3(signature = (f, x, *, name = "unary", **attributes))]
    fn unary(&mut self, f: &str, x: Uid, name: &str, attributes: Option<&Bound<'_, PyDict>>) -> PyResult<Uid> {
        let f = unary_named(f, attributes)?;
        self.builder()?.unary(name, f, x.0).map(Uid).map_err(refuse)
    }

    /// `f(x, z)`, broadcast from the right: `add sub mul max min div mod floor_mod pow atan2 add_square prelu eq ne gt ge lt le and or`.
    #[pyo3(signature = (f, x, z, *, name = "binary"))]
    fn binary(&mut self, f: &str, x: Uid, z: Uid, name: &str) -> PyResult<Uid> {
        let f: BinaryOp = by_name("the function", f)?;
        self.builder()?.binary(name, f, x.0, z.0).map(Uid).map_err(refuse)
    }

    /// `dy * f'(x)` of an activation; attributes as in `unary`.
    #[pyo3(signature = (f, dy, x, *, name = "backward", **attributes))]
    fn activation_backward(&mut self, f: &str, dy: Uid, x: Uid, name: &str, attributes: Option<&Bound<'_, PyDict>>) -> PyResult<Uid> {
        let f = BinaryOp::Backward(unary_named(f, attributes)?);
        self.builder()?.binary(name, f, dy.0, x.0).map(Uid).map_err(refuse)
    }

    /// `select`: `x` where `t` is not 0, else `z`. `prelu_backward`: `x` where `z > 0`, else `t * x`.
    #[pyo3(signature = (f, x, z, t, *, name = "ternary"))]
    fn ternary(&mut self, f: &str, x: Uid, z: Uid, t: Uid, name: &str) -> PyResult<Uid> {
        let f: TernaryOp = by_name("the function", f)?;
        self.builder()?.ternary(name, f, x.0, z.0, t.0).map(Uid).map_err(refuse)
    }

    /// `factor * x`; the factor is a number or a host scalar.
    #[pyo3(signature = (x, factor, *, name = "scale"))]
    fn scale(&mut self, x: Uid, factor: &Bound<'_, PyAny>, name: &str) -> PyResult<Uid> {
        let factor = self::factor(factor)?;
        self.builder()?.scale(name, x.0, factor).map(Uid).map_err(refuse)
    }

    /// Random numbers in [0, 1), as f32. `state`: four i32, the halves of seed and offset, low ones first; with an `offset`, both are host scalars of i64 that
    /// are given at execution, and `state` is the seed.
    #[pyo3(signature = (dims, state, *, offset = None, name = "random"))]
    fn random_uniform(&mut self, dims: Vec<u64>, state: Uid, offset: Option<Uid>, name: &str) -> PyResult<Uid> {
        self.builder()?.random_uniform(name, &dims, random_state(state, offset)).map(Uid).map_err(refuse)
    }

    /// Random numbers of mean 0 and variance 1, normally distributed, as f32; from the words of which `random_uniform` makes its own.
    #[pyo3(signature = (dims, state, *, offset = None, name = "normal"))]
    fn random_normal(&mut self, dims: Vec<u64>, state: Uid, offset: Option<Uid>, name: &str) -> PyResult<Uid> {
        self.builder()?.random_normal(name, &dims, random_state(state, offset)).map(Uid).map_err(refuse)
    }

    /// 1 with probability `p`, else 0, as f32.
    #[pyo3(signature = (dims, state, p, *, offset = None, name = "bernoulli"))]
    fn bernoulli(&mut self, dims: Vec<u64>, state: Uid, p: f64, offset: Option<Uid>, name: &str) -> PyResult<Uid> {
        self.builder()?.bernoulli(name, &dims, random_state(state, offset), p).map(Uid).map_err(refuse)
    }

    /// `x` with each element dropped (0) with probability `p`, and the others divided by `1 - p`.
    #[pyo3(signature = (x, state, p, *, offset = None, name = "dropout"))]
    fn dropout(&mut self, x: Uid, state: Uid, p: f64, offset: Option<Uid>, name: &str) -> PyResult<Uid> {
        self.builder()?.dropout(name, x.0, random_state(state, offset), p).map(Uid).map_err(refuse)
    }

    /// The coordinate of each element along `axis`, as i64.
    #[pyo3(signature = (dims, axis, *, name = "index"))]
    fn gen_index(&mut self, dims: Vec<u64>, axis: u32, name: &str) -> PyResult<Uid> {
        self.builder()?.gen_index(name, &dims, axis).map(Uid).map_err(refuse)
    }

    /// Convolution (cross-correlation; `flip` turns the filter round): `y [n, k, out...]` from `x [n, c, spatial...]` and
    /// `w [k, c / groups, filter...]`. `stride`, `padding`, `dilation` are one number or one for each spatial dim; `padding_after` where
    /// the sides differ.
    #[pyo3(signature = (x, w, *, stride = Each::One(1), padding = Each::One(0), padding_after = None, dilation = Each::One(1), groups = 1,
        flip = false, precision = None, name = "conv"))]
    fn conv_fprop(
        &mut self,
        x: Uid,
        w: Uid,
        stride: Each,
        padding: Each,
        padding_after: Option<Each>,
        dilation: Each,
        groups: u64,
        flip: bool,
        precision: Option<&str>,
        name: &str,
    ) -> PyResult<Uid> {
        let precision = self.precision(precision, x, w)?;
        let spatial = self.dims(w)?.len().saturating_sub(2);
        let conv = conv(x, w, Uid(verdigris_graph::Uid(0)), spatial, stride, padding, padding_after, dilation, groups, flip, precision);
        self.builder()?.conv_fprop(name, conv).map(Uid).map_err(refuse)
    }

    /// Convolution's gradient with respect to its input, of dims `x_dims`, from `dy` and `w`; also transposed convolution of `dy`.
    #[pyo3(signature = (dy, w, x_dims, *, stride = Each::One(1), padding = Each::One(0), padding_after = None, dilation = Each::One(1),
        groups = 1, flip = false, precision = None, name = "dgrad"))]
    fn conv_dgrad(
        &mut self,
        dy: Uid,
        w: Uid,
        x_dims: Vec<u64>,
        stride: Each,
        padding: Each,
        padding_after: Option<Each>,
        dilation: Each,
        groups: u64,
        flip: bool,
        precision: Option<&str>,
        name: &str,
    ) -> PyResult<Uid> {
        let precision = self.precision(precision, dy, w)?;
        let spatial = x_dims.len().saturating_sub(2);
        let conv = conv(Uid(verdigris_graph::Uid(0)), w, dy, spatial, stride, padding, padding_after, dilation, groups, flip, precision);
        self.builder()?.conv_dgrad(name, conv, &x_dims).map(Uid).map_err(refuse)
    }

    /// Convolution's gradient with respect to its filter, of dims `w_dims`, from `x` and `dy`.
    #[pyo3(signature = (x, dy, w_dims, *, stride = Each::One(1), padding = Each::One(0), padding_after = None, dilation = Each::One(1),
        groups = 1, flip = false, precision = None, name = "wgrad"))]
    fn conv_wgrad(
        &mut self,
        x: Uid,
        dy: Uid,
        w_dims: Vec<u64>,
        stride: Each,
        padding: Each,
        padding_after: Option<Each>,
        dilation: Each,
        groups: u64,
        flip: bool,
        precision: Option<&str>,
        name: &str,
    ) -> PyResult<Uid> {
        let precision = self.precision(precision, x, dy)?;
        let spatial = w_dims.len().saturating_sub(2);
        let conv = conv(x, Uid(verdigris_graph::Uid(0)), dy, spatial, stride, padding, padding_after, dilation, groups, flip, precision);
        self.builder()?.conv_wgrad(name, conv, &w_dims).map(Uid).map_err(refuse)
    }

    /// A reduction over `axes`, which stay with extent 1: `add mul min max amax avg norm1 norm2 mul_no_zeros`.
    #[pyo3(signature = (f, x, axes, *, name = "reduce"))]
    fn reduction(&mut self, f: &str, x: Uid, axes: Vec<u32>, name: &str) -> PyResult<Uid> {
        let f = by_name("the reduction", f)?;
        self.builder()?.reduction(name, f, x.0, &axes).map(Uid).map_err(refuse)
    }

    /// A scan of `x` along `axis`: `add mul min max log_sum_exp` of the elements up to each one. `exclusive` leaves it out of its own result, `reverse` goes
    /// from the last element to the first.
    #[pyo3(signature = (f, x, axis, *, exclusive = false, reverse = false, name = "scan"))]
    fn scan(&mut self, f: &str, x: Uid, axis: u32, exclusive: bool, reverse: bool, name: &str) -> PyResult<Uid> {
        let f = by_name("the scan", f)?;
        self.builder()?.scan(name, f, x.0, axis, exclusive, reverse).map(Uid).map_err(refuse)
    }

    /// `x` with `rows` behind those that it has along `axis`, in its place: `lengths`, i32, say how many there are with the new ones. Gives the tensor with its rows,
    /// which is stored, lies as `x` does and on a GPU is bound to the same memory.
    #[pyo3(signature = (x, rows, lengths, axis, *, name = "append"))]
    fn append(&mut self, x: Uid, rows: Uid, lengths: Uid, axis: u32, name: &str) -> PyResult<Uid> {
        self.builder()?.append(name, x.0, rows.0, lengths.0, axis).map(Uid).map_err(refuse)
    }

    /// Pooling of `x [n, c, spatial...]` with `mode` `"max"` or `"average"`. Lists have one entry for each spatial dim; the stride is the
    /// window where it is not given; `adaptive` gives the output's size instead of a window.
    #[pyo3(signature = (mode, x, window = None, *, stride = None, padding = None, padding_after = None, dilation = None, adaptive = None,
        count_include_pad = true, name = "pool"))]
    fn pool(
        &mut self,
        mode: &str,
        x: Uid,
        window: Option<Vec<u64>>,
        stride: Option<Vec<u64>>,
        padding: Option<Vec<u64>>,
        padding_after: Option<Vec<u64>>,
        dilation: Option<Vec<u64>>,
        adaptive: Option<Vec<u64>>,
        count_include_pad: bool,
        name: &str,
    ) -> PyResult<Uid> {
        let windows = spatial::windows(window, stride, padding, padding_after, dilation, adaptive)?;
        let mode = spatial::pool_mode(mode, count_include_pad)?;
        self.builder()?.pool(name, mode, windows, x.0).map(Uid).map_err(refuse)
    }

    /// Max pooling and the index of each maximum (`index_dtype` `i32` or `i64`: its flat position among the spatial dims): `(y, index)`.
    #[pyo3(signature = (x, window = None, *, stride = None, padding = None, padding_after = None, dilation = None, adaptive = None,
        index_dtype = "i32", name = "max_pool"))]
    fn max_pool_with_index(
        &mut self,
        x: Uid,
        window: Option<Vec<u64>>,
        stride: Option<Vec<u64>>,
        padding: Option<Vec<u64>>,
        padding_after: Option<Vec<u64>>,
        dilation: Option<Vec<u64>>,
        adaptive: Option<Vec<u64>>,
        index_dtype: &str,
        name: &str,
    ) -> PyResult<(Uid, Uid)> {
        let windows = spatial::windows(window, stride, padding, padding_after, dilation, adaptive)?;
        let index_dtype = dtype(index_dtype)?;
        let (y, index) = self.builder()?.max_pool_with_index(name, windows, x.0, index_dtype).map_err(refuse)?;
        Ok((Uid(y), Uid(index)))
    }

    /// Max pooling by `out` windows a dim that begin where `samples [n, c, spatial dims]`, from 0 to 1, say, and the index of each maximum: `(y, index)`.
    #[pyo3(signature = (x, samples, window, out, *, index_dtype = "i32", name = "fractional_max_pool"))]
    fn fractional_max_pool(
        &mut self,
        x: Uid,
        samples: Uid,
        window: Vec<u64>,
        out: Vec<u64>,
        index_dtype: &str,
        name: &str,
    ) -> PyResult<(Uid, Uid)> {
        let index_dtype = dtype(index_dtype)?;
        let (y, index) = self.builder()?.fractional_max_pool(name, x.0, samples.0, (&window, &out), index_dtype).map_err(refuse)?;
        Ok((Uid(y), Uid(index)))
    }

    /// The gradient of pooling, of dims `x_dims`. Max pooling needs either the forward `x` or its `index`; average pooling neither. `fractional`, beside a window, is the size of the
    /// output of fractional windows, whose gradient needs the index.
    #[pyo3(signature = (mode, dy, x_dims, window = None, *, x = None, index = None, stride = None, padding = None, padding_after = None,
        dilation = None, adaptive = None, fractional = None, count_include_pad = true, name = "pool_backward"))]
    fn pool_backward(
        &mut self,
        mode: &str,
        dy: Uid,
        x_dims: Vec<u64>,
        window: Option<Vec<u64>>,
        x: Option<Uid>,
        index: Option<Uid>,
        stride: Option<Vec<u64>>,
        padding: Option<Vec<u64>>,
        padding_after: Option<Vec<u64>>,
        dilation: Option<Vec<u64>>,
        adaptive: Option<Vec<u64>>,
        fractional: Option<Vec<u64>>,
        count_include_pad: bool,
        name: &str,
    ) -> PyResult<Uid> {
        let windows = match (window, fractional) {
            (Some(window), Some(out)) if adaptive.is_none() => PoolWindows::Fractional { window, out },
            (_, Some(_)) => return Err(raise(Kind::Graph, "fractional windows have a window and the output's size, and are not adaptive")),
            (window, None) => spatial::windows(window, stride, padding, padding_after, dilation, adaptive)?,
        };
        let mode = spatial::pool_mode(mode, count_include_pad)?;
        let (x, index) = (of(x), of(index));
        let pool = PoolBackward { mode, windows, dy: dy.0, x, index, dx: verdigris_graph::Uid(0) };
        self.builder()?.pool_backward(name, pool, &x_dims).map(Uid).map_err(refuse)
    }

    /// `x [n, c, spatial...]` in another resolution, `out` with one entry for each spatial dim. `factors`, one for each, are what coordinates then
    /// follow from instead of the sizes; `align_corners` is of `"linear"` and `"cubic"`.
    #[pyo3(signature = (mode, x, out, *, align_corners = false, factors = None, name = "resample"))]
    fn resample(&mut self, mode: &str, x: Uid, out: Vec<u64>, align_corners: bool, factors: Option<Vec<f64>>, name: &str) -> PyResult<Uid> {
        let sampling = spatial::interpolation(mode, out, align_corners, factors)?;
        self.builder()?.resample(name, sampling, x.0).map(Uid).map_err(refuse)
    }

    /// `x [n, c, spatial...]` with a border made of itself, one entry for each spatial dim.
    #[pyo3(signature = (border, x, before, after, *, name = "pad"))]
    fn pad_border(&mut self, border: &str, x: Uid, before: Vec<i64>, after: Vec<i64>, name: &str) -> PyResult<Uid> {
        let sampling = Sampling::Pad { border: spatial::border(border)?, before, after };
        self.builder()?.resample(name, sampling, x.0).map(Uid).map_err(refuse)
    }

    /// The gradient of `resample`, of dims `x_dims`; `out` follows from `dy`.
    #[pyo3(signature = (mode, dy, x_dims, *, align_corners = false, factors = None, name = "resample_backward"))]
    fn resample_backward(
        &mut self,
        mode: &str,
        dy: Uid,
        x_dims: Vec<u64>,
        align_corners: bool,
        factors: Option<Vec<f64>>,
        name: &str,
    ) -> PyResult<Uid> {
        let builder = self.builder()?;
        // A tensor that the graph does not have is told by the builder.
        let out = builder.dims(dy.0).unwrap_or_default().into_iter().skip(2).collect();
        let sampling = spatial::interpolation(mode, out, align_corners, factors)?;
        builder.resample_backward(name, sampling, dy.0, &x_dims).map(Uid).map_err(refuse)
    }

    /// The gradient of `pad_border`.
    #[pyo3(signature = (border, dy, x_dims, before, after, *, name = "pad_backward"))]
    fn pad_border_backward(
        &mut self,
        border: &str,
        dy: Uid,
        x_dims: Vec<u64>,
        before: Vec<i64>,
        after: Vec<i64>,
        name: &str,
    ) -> PyResult<Uid> {
        let sampling = Sampling::Pad { border: spatial::border(border)?, before, after };
        self.builder()?.resample_backward(name, sampling, dy.0, &x_dims).map(Uid).map_err(refuse)
    }

    /// Softmax of `x` along `axis`, or its logarithm.
    #[pyo3(signature = (x, axis, log = false, *, name = "softmax"))]
    fn softmax(&mut self, x: Uid, axis: u32, log: bool, name: &str) -> PyResult<Uid> {
        self.builder()?.softmax(name, x.0, axis, log).map(Uid).map_err(refuse)
    }

    /// The gradient of softmax, or of its logarithm, from its result `y` and `dy`.
    #[pyo3(signature = (y, dy, axis, log = false, *, name = "softmax_backward"))]
    fn softmax_backward(&mut self, y: Uid, dy: Uid, axis: u32, log: bool, name: &str) -> PyResult<Uid> {
        self.builder()?.softmax_backward(name, y.0, dy.0, axis, log).map(Uid).map_err(refuse)
    }

    /// Batch normalization of `x`, `[n, c, spatial...]`, in training: `(y, mean, inv, next_mean, next_var)`. All but `x`, `y` and `add` are
    /// `[1, c, 1...]`; without running statistics there are no next ones, with them these have to be stored. An `activation` other than ReLU is named as in
    /// `unary`, its attributes as keywords.
    #[pyo3(signature = (x, scale = None, bias = None, *, add = None, running_mean = None, running_var = None, momentum = 0.1, eps = 1e-5,
        relu = false, activation = None, name = "batch_norm", **attributes))]
    #[expect(clippy::type_complexity, reason = "what Python sees")]
    fn batch_norm(
        &mut self,
        x: Uid,
        scale: Option<Uid>,
        bias: Option<Uid>,
        add: Option<Uid>,
        running_mean: Option<Uid>,
        running_var: Option<Uid>,
        momentum: f64,
        eps: f64,
        relu: bool,
        activation: Option<&str>,
        name: &str,
        attributes: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<(Uid, Uid, Uid, Option<Uid>, Option<Uid>)> {
        let norm = BatchNorm {
            momentum: Real(momentum),
            relu,
            activation: activation.map(|f| unary_named(f, attributes)).transpose()?,
            scale: of(scale),
            bias: of(bias),
            add: of(add),
            running_mean: of(running_mean),
            running_var: of(running_var),
            ..BatchNorm::new(x.0, eps)
        };
        let BatchNormed { y, mean, inv, next_mean, next_var } = self.builder()?.batch_norm(name, norm).map_err(refuse)?;
        Ok((Uid(y), Uid(mean), Uid(inv), next_mean.map(Uid), next_var.map(Uid)))
    }

    /// The gradients of batch normalization: `(dx, dscale, dbias, dadd)`, the last with `relu` alone. With an `activation`, `bias`; with `relu`, `y` (needed where something was
    /// added) or `bias` tells what passed.
    #[pyo3(signature = (dy, x, mean, inv, *, scale = None, bias = None, y = None, relu = false, activation = None,
        name = "batch_norm_backward", **attributes))]
    fn batch_norm_backward(
        &mut self,
        dy: Uid,
        x: Uid,
        mean: Uid,
        inv: Uid,
        scale: Option<Uid>,
        bias: Option<Uid>,
        y: Option<Uid>,
        relu: bool,
        activation: Option<&str>,
        name: &str,
        attributes: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<(Uid, Uid, Uid, Option<Uid>)> {
        let activation = activation.map(|f| unary_named(f, attributes)).transpose()?;
        let back = BatchNormBackward {
            relu,
            activation,
            y: of(y),
            scale: of(scale),
            bias: of(bias),
            ..BatchNormBackward::new(dy.0, x.0, mean.0, inv.0)
        };
        let (dx, dscale, dbias, dadd) = self.builder()?.batch_norm_backward(name, back).map_err(refuse)?;
        Ok((Uid(dx), Uid(dscale), Uid(dbias), dadd.map(Uid)))
    }

    /// The mean of each channel of `x`, `[n, c, spatial...]`, and the sum of squared deviations from it: `(mean, m2)`, `[1, c, 1...]`.
    #[pyo3(signature = (x, *, name = "batch_norm_statistics"))]
    fn batch_norm_statistics(&mut self, x: Uid, name: &str) -> PyResult<(Uid, Uid)> {
        let (mean, m2) = self.builder()?.batch_norm_statistics(name, x.0).map_err(refuse)?;
        Ok((Uid(mean), Uid(m2)))
    }

    /// The cross-entropy of `logits` and integer `labels` (the dims of the logits with 1 at the class axis) and each row's log-sum-exp:
    /// `(loss, lse)`. `reduction` is `none`, `sum` or `mean`.
    #[pyo3(signature = (logits, labels, axis, *, label_smoothing = 0.0, ignore_index = None, reduction = "mean", name = "cross_entropy"))]
    fn cross_entropy(
        &mut self,
        logits: Uid,
        labels: Uid,
        axis: u32,
        label_smoothing: f64,
        ignore_index: Option<i64>,
        reduction: &str,
        name: &str,
    ) -> PyResult<(Uid, Uid)> {
        let spec = loss_spec(axis, label_smoothing, ignore_index, reduction)?;
        let (loss, lse) = self.builder()?.cross_entropy_with_lse(name, spec, logits.0, labels.0).map_err(refuse)?;
        Ok((Uid(loss), Uid(lse)))
    }

    /// The gradient of cross-entropy with respect to the logits, from `dloss` (the dims of the loss), and `lse` where it was kept.
    #[pyo3(signature = (logits, labels, dloss, axis, *, lse = None, label_smoothing = 0.0, ignore_index = None, reduction = "mean",
        name = "cross_entropy_backward"))]
    fn cross_entropy_backward(
        &mut self,
        logits: Uid,
        labels: Uid,
        dloss: Uid,
        axis: u32,
        lse: Option<Uid>,
        label_smoothing: f64,
        ignore_index: Option<i64>,
        reduction: &str,
        name: &str,
    ) -> PyResult<Uid> {
        let spec = loss_spec(axis, label_smoothing, ignore_index, reduction)?;
        let lse = of(lse);
        let (logits, labels, dloss) = (logits.0, labels.0, dloss.0);
        let loss = CrossEntropyBackward { spec, logits, labels, dloss, lse, dlogits: verdigris_graph::Uid(0) };
        self.builder()?.cross_entropy_backward(name, loss).map(Uid).map_err(refuse)
    }

    /// Rows of `x` normalized by their own statistics: `(y, x + residual, mean, 1 / √(variance + eps))`, the second with a residual, the third of `layer`.
    #[pyo3(signature = (x, axes, eps, *, kind = "layer", groups = 1, residual = None, scale = None, bias = None, zero_centred = false,
        name = "normalize"))]
    fn normalize(
        &mut self,
        x: Uid,
        axes: Vec<u32>,
        eps: f64,
        kind: &str,
        groups: u64,
        residual: Option<Uid>,
        scale: Option<Uid>,
        bias: Option<Uid>,
        zero_centred: bool,
        name: &str,
    ) -> PyResult<(Uid, Option<Uid>, Option<Uid>, Uid)> {
        let spec = norm_spec(kind, axes, eps, groups, zero_centred)?;
        let [residual, scale, bias] = [residual, scale, bias].map(of);
        let made = self.builder()?.normalize(name, Normalize { residual, scale, bias, ..Normalize::new(spec, x.0) }).map_err(refuse)?;
        Ok((Uid(made.y), made.sum.map(Uid), made.mean.map(Uid), Uid(made.inv)))
    }

    /// The gradients of `normalize`: `(dx, dscale, dbias)`, the second with a scale, the third with `bias_dims`. `x` is what was normalized.
    #[pyo3(signature = (x, dy, axes, eps, *, kind = "layer", groups = 1, scale = None, mean = None, inv = None, dsum = None,
        bias_dims = None, zero_centred = false, name = "normalize_backward"))]
    fn normalize_backward(
        &mut self,
        x: Uid,
        dy: Uid,
        axes: Vec<u32>,
        eps: f64,
        kind: &str,
        groups: u64,
        scale: Option<Uid>,
        mean: Option<Uid>,
        inv: Option<Uid>,
        dsum: Option<Uid>,
        bias_dims: Option<Vec<u64>>,
        zero_centred: bool,
        name: &str,
    ) -> PyResult<(Uid, Option<Uid>, Option<Uid>)> {
        let spec = norm_spec(kind, axes, eps, groups, zero_centred)?;
        let [scale, mean, inv, dsum] = [scale, mean, inv, dsum].map(of);
        let back = NormalizeBackward { scale, mean, inv, dsum, ..NormalizeBackward::new(spec, x.0, dy.0) };
        let wanted = NormGradients { dx: true, dscale: scale.is_some(), dbias: bias_dims.as_deref() };
        let made = self.builder()?.normalize_backward(name, back, wanted).map_err(refuse)?;
        let dx = made.dx.ok_or_else(|| raise(Kind::Graph, "the gradient with respect to x is missing"))?;
        Ok((Uid(dx), made.dscale.map(Uid), made.dbias.map(Uid)))
    }

    /// Attention: `softmax(scale * q @ k.T) @ v` of `q` `[b, h, s_q, d]`, `k` `[b, h_kv, s_kv, d]` and `v` `[b, h_kv, s_kv, d_v]`, and the log-sum-exp of
    /// each query: `(o, log_sum_exp)`, with `max_scores=True` a third one, the greatest score of each query, −∞ where no key is attended. `scale` is a number or a host scalar, `1 / sqrt(d)` where it is left out. `left` and `right` count the keys that are
    /// attended on either side of the diagonal. With `q_offsets` and `kv_offsets`, i32 `[b + 1, 1, 1, 1]`, sequences of at most `longest_q` queries and
    /// `longest_kv` keys lie behind each other in `q` `[1, h, rows, d]`, and so do keys and values. With a `page_table`, i32 `[b, entries, 1, 1]`, `k` is
    /// `[pages, h_kv, page_size, d]` and `v` likewise: entries are the pages that hold a sequence's keys, of which `kv_lengths` say how many there are;
    /// with `q_offsets` alone the queries of those sequences lie behind each other.
    /// With `dropout`, probabilities are dropped at random: `dropout_state` is the random state, i32 `[4]`, or with `dropout_offset` the seed, host scalars of i64.
    /// With a `block_map`, i32, which broadcasts to `[b, h, ⌈s_q / block_q⌉, ⌈s_kv / block_kv⌉]`, and `mask_blocks`, u8 `[n, 1, block_q, block_kv / 8]`, pairs are attended to by
    /// blocks: an entry of 0 leaves a block out, -1 takes all of it, `m` the pairs whose bit in mask block `m - 1` is 1.
    /// Queries, keys and values of 8 bits may have factors, `q_descale`, `k_descale` and `v_descale`, f32, which broadcast to `[b, h_kv, 1, 1]`.
    /// `score` are the steps of a function that makes a score of the scaled product of a query and a key, in place of a soft cap; the last one gives it, and each but the last is named by a later one,
    /// by its position: `("given",)`, `("number", x)`, `("operand", n)` (the element of `score_operands[n]`, which broadcasts to the scores), `("gather", n, x)` (of a table `score_operands[n]`, `[b, h, s_q, any]` or broadcast to it, the element at place `x`), `("place", "batch")` (`head`, `query`, `key`),
    /// `("round", "bf16", x)`, and functions by their names in `unary`, `binary` and `ternary`: `("mul", x, z)`, `("affine", x, {"scale": 2.0, "shift": 0.0})`.
    #[pyo3(signature = (q, k, v, *, scale = None, causal = "none", left = None, right = None, soft_cap = None, bias = None, mask = None,
        slopes = None, sinks = None, q_lengths = None, kv_lengths = None, q_offsets = None, kv_offsets = None, longest_q = None,
        longest_kv = None, page_table = None, dropout = None, dropout_state = None, dropout_offset = None, q_descale = None,
        k_descale = None, v_descale = None, block_map = None, mask_blocks = None, score = None, score_operands = None, max_scores = false, name = "attention"))]
    fn attention(
        &mut self,
        py: Python<'_>,
        q: Uid,
        k: Uid,
        v: Uid,
        scale: Option<&Bound<'_, PyAny>>,
        causal: &str,
        left: Option<u32>,
        right: Option<u32>,
        soft_cap: Option<f64>,
        bias: Option<Uid>,
        mask: Option<Uid>,
        slopes: Option<Uid>,
        sinks: Option<Uid>,
        q_lengths: Option<Uid>,
        kv_lengths: Option<Uid>,
        q_offsets: Option<Uid>,
        kv_offsets: Option<Uid>,
        longest_q: Option<u32>,
        longest_kv: Option<u32>,
        page_table: Option<Uid>,
        dropout: Option<f64>,
        dropout_state: Option<Uid>,
        dropout_offset: Option<Uid>,
        q_descale: Option<Uid>,
        k_descale: Option<Uid>,
        v_descale: Option<Uid>,
        block_map: Option<Uid>,
        mask_blocks: Option<Uid>,
        score: Option<Vec<Bound<'_, PyTuple>>>,
        score_operands: Option<Vec<Uid>>,
        max_scores: bool,
        name: &str,
    ) -> PyResult<Py<PyTuple>> {
        let spec = self.attention_spec(q, scale, causal, [left, right], [longest_q, longest_kv], [soft_cap, dropout])?;
        let [bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, page_table, dropout_state, dropout_offset] =
            [bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, page_table, dropout_state, dropout_offset].map(of);
        let [q_descale, k_descale, v_descale, block_map, mask_blocks] = [q_descale, k_descale, v_descale, block_map, mask_blocks].map(of);
        let plain = Attention { q_descale, k_descale, v_descale, ..Attention::new(spec, q.0, k.0, v.0) };
        let plain = Attention { dropout_state, dropout_offset, block_map, mask_blocks, ..plain };
        let (score, score_operands) = score_function(score, score_operands)?;
        let plain = Attention { score, score_operands, ..plain };
        let attention = Attention { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, page_table, ..plain };
        let made = self.builder()?.attention(name, attention).map_err(refuse)?;
        let results = [Some(made.o), Some(made.log_sum_exp), max_scores.then_some(made.max_scores)];
        PyTuple::new(py, results.into_iter().flatten().map(Uid).collect::<Vec<_>>()).map(Bound::unbind)
    }

    /// The gradients of `attention`: `(dq, dk, dv, dbias, dsinks)`, the last two with what they are of. `d_o` is the gradient of `o`. `score` and `score_operands`
    /// are those of `attention`; with `score_gradients=True` those of the operands stand behind the others, in their order, of each that is of reals.
    #[pyo3(signature = (q, k, v, o, log_sum_exp, d_o, *, scale = None, causal = "none", left = None, right = None, soft_cap = None,
        bias = None, mask = None, slopes = None, sinks = None, q_lengths = None, kv_lengths = None, q_offsets = None, kv_offsets = None,
        longest_q = None, longest_kv = None, dropout = None, dropout_state = None, dropout_offset = None, block_map = None, mask_blocks = None,
        score = None, score_operands = None, score_gradients = false, name = "attention_backward"))]
    fn attention_backward(
        &mut self,
        py: Python<'_>,
        q: Uid,
        k: Uid,
        v: Uid,
        o: Uid,
        log_sum_exp: Uid,
        d_o: Uid,
        scale: Option<&Bound<'_, PyAny>>,
        causal: &str,
        left: Option<u32>,
        right: Option<u32>,
        soft_cap: Option<f64>,
        bias: Option<Uid>,
        mask: Option<Uid>,
        slopes: Option<Uid>,
        sinks: Option<Uid>,
        q_lengths: Option<Uid>,
        kv_lengths: Option<Uid>,
        q_offsets: Option<Uid>,
        kv_offsets: Option<Uid>,
        longest_q: Option<u32>,
        longest_kv: Option<u32>,
        dropout: Option<f64>,
        dropout_state: Option<Uid>,
        dropout_offset: Option<Uid>,
        block_map: Option<Uid>,
        mask_blocks: Option<Uid>,
        score: Option<Vec<Bound<'_, PyTuple>>>,
        score_operands: Option<Vec<Uid>>,
        score_gradients: bool,
        name: &str,
    ) -> PyResult<Py<PyTuple>> {
        let spec = self.attention_spec(q, scale, causal, [left, right], [longest_q, longest_kv], [soft_cap, dropout])?;
        let [bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, dropout_state, dropout_offset] =
            [bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, dropout_state, dropout_offset].map(of);
        let plain = AttentionBackward::new(spec, [q.0, k.0, v.0], o.0, log_sum_exp.0, d_o.0);
        let [block_map, mask_blocks] = [block_map, mask_blocks].map(of);
        let (score, score_operands) = score_function(score, score_operands)?;
        let plain = AttentionBackward { dropout_state, dropout_offset, block_map, mask_blocks, score, score_operands, ..plain };
        let back = AttentionBackward { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, ..plain };
        let made = self.builder()?.attention_backward(name, back).map_err(refuse)?;
        let of_op = [Some(made.dq), Some(made.dk), Some(made.dv), made.dbias, made.dsinks];
        let of_score = made.d_score_operands.into_iter().flatten().filter(|_| score_gradients).map(Some);
        PyTuple::new(py, of_op.into_iter().chain(of_score).map(|uid| uid.map(Uid)).collect::<Vec<_>>()).map(Bound::unbind)
    }

    /// The elements of `x` in row-major order under other dims.
    #[pyo3(signature = (x, dims, *, name = "reshape"))]
    fn reshape(&mut self, x: Uid, dims: Vec<u64>, name: &str) -> PyResult<Uid> {
        self.builder()?.reshape(name, x.0, &dims).map(Uid).map_err(refuse)
    }

    /// `x` repeated to `dims`.
    #[pyo3(signature = (x, dims, *, name = "broadcast"))]
    fn broadcast(&mut self, x: Uid, dims: Vec<u64>, name: &str) -> PyResult<Uid> {
        self.builder()?.broadcast(name, x.0, &dims).map(Uid).map_err(refuse)
    }

    /// `x` with its dims in another order.
    #[pyo3(signature = (x, permutation, *, name = "transpose"))]
    fn transpose(&mut self, x: Uid, permutation: Vec<u32>, name: &str) -> PyResult<Uid> {
        self.builder()?.transpose(name, x.0, &permutation).map(Uid).map_err(refuse)
    }

    /// Part of `x`; each list has one entry for each dim.
    #[pyo3(signature = (x, starts, stops, steps, *, name = "slice"))]
    fn slice(&mut self, x: Uid, starts: Vec<u64>, stops: Vec<u64>, steps: Vec<u64>, name: &str) -> PyResult<Uid> {
        self.builder()?.slice(name, x.0, &starts, &stops, &steps).map(Uid).map_err(refuse)
    }

    /// Tensors one behind the other along `axis`.
    #[pyo3(signature = (xs, axis, *, name = "concat"))]
    fn concat(&mut self, xs: Vec<Uid>, axis: u32, name: &str) -> PyResult<Uid> {
        let xs: Vec<verdigris_graph::Uid> = xs.into_iter().map(|uid| uid.0).collect();
        self.builder()?.concat(name, &xs, axis).map(Uid).map_err(refuse)
    }

    /// `x` with a border of `value`; each list has one entry for each dim.
    #[pyo3(signature = (x, before, after, value = 0.0, *, name = "pad"))]
    fn pad(&mut self, x: Uid, before: Vec<u64>, after: Vec<u64>, value: f64, name: &str) -> PyResult<Uid> {
        self.builder()?.pad(name, x.0, &before, &after, value).map(Uid).map_err(refuse)
    }

    /// The gradients of `loss`, a tensor of one element, with respect to tensors of the graph: virtual tensors in the same order, which
    /// `store` makes real in any type. Raises `GraphError`, naming the op and the tensor, for what has no gradient.
    #[pyo3(signature = (loss, with_respect_to))]
    fn gradient(&mut self, loss: Uid, with_respect_to: Vec<Uid>) -> PyResult<Vec<Uid>> {
        let of: Vec<verdigris_graph::Uid> = with_respect_to.into_iter().map(|uid| uid.0).collect();
        let gradients = self.builder()?.gradient(loss.0, &of).map_err(refuse)?;
        Ok(gradients.into_iter().map(Uid).collect())
    }

    /// As `gradient`, from gradients that are given: `results` are pairs of a tensor, of any dims, and the tensor that holds its gradient.
    #[pyo3(signature = (results, with_respect_to))]
    fn gradient_from(&mut self, results: Vec<(Uid, Uid)>, with_respect_to: Vec<Uid>) -> PyResult<Vec<Uid>> {
        let of: Vec<verdigris_graph::Uid> = with_respect_to.into_iter().map(|uid| uid.0).collect();
        let results: Vec<(verdigris_graph::Uid, verdigris_graph::Uid)> = results.into_iter().map(|(y, dy)| (y.0, dy.0)).collect();
        let gradients = self.builder()?.gradient_from(&results, &of).map_err(refuse)?;
        Ok(gradients.into_iter().map(Uid).collect())
    }

    /// Gives a virtual tensor another element type, to which its value is then rounded.
    fn round_to(&mut self, uid: Uid, dtype: &str) -> PyResult<()> {
        let dtype = self::dtype(dtype)?;
        self.builder()?.round_to(uid.0, dtype).map_err(refuse)
    }

    /// Makes a virtual tensor real under a name: rounded to `dtype`, packed row-major without `strides`.
    #[pyo3(signature = (uid, name, dtype, strides = None))]
    fn store(&mut self, uid: Uid, name: &str, dtype: &str, strides: Option<Vec<u64>>) -> PyResult<()> {
        let layout = layout(name, &self.dims(uid)?, strides.as_deref())?;
        let dtype = self::dtype(dtype)?;
        self.builder()?.store_as(uid.0, name, dtype, layout).map_err(refuse)
    }

    /// The dims of a tensor.
    fn dims(&self, uid: Uid) -> PyResult<Vec<u64>> {
        let dims = match &self.source {
            Source::Builder(builder) => builder.dims(uid.0),
            Source::Finished(graph) => graph.tensor(uid.0).map(|tensor| tensor.layout.dims().to_vec()),
        };
        dims.ok_or_else(|| raise(Kind::Graph, format!("{uid:?} is no tensor of this graph")))
    }
}

/// A function of scores and what it reads, as Python says them.
fn score_function(
    steps: Option<Vec<Bound<'_, PyTuple>>>,
    operands: Option<Vec<Uid>>,
) -> PyResult<(Option<ScoreFunction>, Vec<verdigris_graph::Uid>)> {
    let steps = steps.map(|steps| steps.iter().map(score_step).collect()).transpose()?;
    Ok((steps.map(|steps| ScoreFunction { steps }), operands.unwrap_or_default().into_iter().map(|uid| uid.0).collect()))
}

/// A step of a function of scores, as Python says it.
fn score_step(step: &Bound<'_, PyTuple>) -> PyResult<ScoreStep> {
    let name = step.get_item(0)?.extract::<String>()?;
    let wrong = || {
        raise(
            Kind::Graph,
            format!(
                "`{step}` is no step of a score function: given, number, operand, gather, place, round, or a function of steps by their positions"
            ),
        )
    };
    let position = |place: usize| step.get_item(place).and_then(|position| position.extract::<u32>()).map_err(|_| wrong());
    Ok(match (name.as_str(), step.len()) {
        ("given", 1) => ScoreStep::Given,
        ("number", 2) => ScoreStep::Number(Real(step.get_item(1)?.extract().map_err(|_| wrong())?)),
        ("operand", 2) => ScoreStep::Operand(position(1)?),
        ("gather", 3) => ScoreStep::Gather { operand: position(1)?, x: position(2)? },
        ("place", 2) => {
            let place = step.get_item(1)?.extract::<String>().map_err(|_| wrong())?;
            ScoreStep::Place(by_name("the place", &place)?)
        }
        ("round", 3) => ScoreStep::Round { dtype: dtype(&step.get_item(1)?.extract::<String>().map_err(|_| wrong())?)?, x: position(2)? },
        (f, 2) => ScoreStep::Unary { f: unary_named(f, None)?, x: position(1)? },
        (f, 3) => match step.get_item(2)?.cast::<PyDict>() {
            Ok(attributes) => ScoreStep::Unary { f: unary_named(f, Some(attributes))?, x: position(1)? },
            Err(_) => ScoreStep::Binary { f: by_name("the function", f)?, x: position(1)?, z: position(2)? },
        },
        (f, 4) => ScoreStep::Ternary { f: by_name("the function", f)?, x: position(1)?, z: position(2)?, t: position(3)? },
        _ => return Err(wrong()),
    })
}
