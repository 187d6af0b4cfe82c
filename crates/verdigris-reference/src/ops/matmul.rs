//! The sum of products in `f64`.

use verdigris_graph::{Error, Graph, HostScalar, Matmul, OperandScale, Precision, Uid};
use verdigris_tensor::DType;
use verdigris_tensor::num;

use crate::fuzz::{Draft, MOST_ELEMENTS, MOST_PRODUCTS, TYPES};
use crate::operation::{Data, Evaluation, GraphError, Operation};
use crate::source::{Formula, Source};
use crate::tolerance::{self, Bounded};
use crate::tolerance_pointwise::pass;

/// The sum of products of one output element, with what a tolerance needs to know of it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sum {
    /// `Σ a·b`.
    pub value: f64,
    /// `Σ |a|·|b|`.
    pub magnitude: f64,
    /// `Σ |a| + |b|`.
    pub sizes: f64,
}

/// Elements of a buffer, as `f64`.
#[derive(Clone, Debug)]
pub enum Elements<'a> {
    /// Converted ahead.
    Decoded(Vec<f64>),
    /// Converted at each read: for buffers too large to hold twice.
    Raw(DType, &'a [u8]),
}

impl<'a> Elements<'a> {
    /// Buffers up to this many elements are converted ahead.
    const DECODE_LIMIT_ELEMENTS: usize = 1 << 23;

    /// The elements of type `dtype` in `bytes`.
    pub fn new(dtype: DType, bytes: &'a [u8]) -> Elements<'a> {
        if bytes.len() / dtype.bytes() > Elements::DECODE_LIMIT_ELEMENTS {
            return Elements::Raw(dtype, bytes);
        }
        let chunks = bytes.chunks_exact(dtype.bytes());
        Elements::Decoded(chunks.filter_map(|chunk| num::read_element(dtype, chunk)).collect())
    }

    /// All elements, if they were converted ahead.
    pub fn decoded(&self) -> Option<&[f64]> {
        match self {
            Elements::Decoded(values) => Some(values),
            Elements::Raw(..) => None,
        }
    }

    /// The element `offset` elements from the first; NaN past the end, which [`crate::run::run`] rules out beforehand.
    #[inline]
    pub fn at(&self, offset: u64) -> f64 {
        match self {
            Elements::Decoded(values) => values.get(offset as usize).copied().unwrap_or(f64::NAN),
            Elements::Raw(dtype, bytes) => {
                (bytes.get(offset as usize * dtype.bytes()..)).and_then(|rest| num::read_element(*dtype, rest)).unwrap_or(f64::NAN)
            }
        }
    }
}

/// The sum of `a(k) · b(k)` over `k` from 0, in order.
#[inline]
pub fn sum_of_products(k: u64, a: impl Fn(u64) -> f64, b: impl Fn(u64) -> f64) -> Sum {
    let mut sum = Sum { value: 0.0, magnitude: 0.0, sizes: 0.0 };
    for i in 0..k {
        let (a, b) = (a(i), b(i));
        let product = a * b;
        sum.value += product;
        sum.magnitude += product.abs();
        sum.sizes += a.abs() + b.abs();
    }
    sum
}

/// A sum of products of values that may carry errors of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SumOfBounded {
    sum: Sum,
    /// What the operands' errors may amount to.
    error: f64,
}

impl Default for SumOfBounded {
    fn default() -> SumOfBounded {
        SumOfBounded { sum: Sum { value: 0.0, magnitude: 0.0, sizes: 0.0 }, error: 0.0 }
    }
}

impl SumOfBounded {
    /// Adds `a · b`.
    #[inline]
    pub(crate) fn add(&mut self, a: Bounded, b: Bounded) {
        let product = a.value * b.value;
        self.sum.value += product;
        self.sum.magnitude += product.abs();
        self.sum.sizes += a.value.abs() + b.value.abs();
        if a.error != 0.0 || b.error != 0.0 {
            self.error += pass(a.error, b.value.abs()) + pass(b.error, a.value.abs() + a.error);
        }
    }

    /// Adds the products of pairs of exact numbers, in order.
    #[inline]
    pub(crate) fn add_exact(&mut self, factors: impl Iterator<Item = (f64, f64)>) {
        let mut sum = self.sum;
        for (a, b) in factors {
            let product = a * b;
            sum.value += product;
            sum.magnitude += product.abs();
            sum.sizes += a.abs() + b.abs();
        }
        self.sum = sum;
    }

    /// Adds a product of something with padding: nothing, but if that something is no number, nothing can be said of the sum.
    pub(crate) fn meet_padding(&mut self, a: Bounded) {
        if !a.value.is_finite() || a.error == f64::INFINITY {
            self.error = f64::INFINITY;
        }
    }

    /// The sum of `terms` products as a precision allows it to be formed. A sum of integers wraps.
    pub(crate) fn finish(self, precision: Precision, operands: DType, terms: u64, scaled: bool) -> Bounded {
        if precision == Precision::I32 {
            let wrapped = f64::from(self.sum.value as i64 as i32);
            // An operand that is not known to be exact may make it wrap, or not.
            return Bounded { value: wrapped, error: if self.error == 0.0 { 0.0 } else { f64::INFINITY } };
        }
        // The rounding of operands that may be larger than they look grows with them.
        let sum = Sum { magnitude: self.sum.magnitude + self.error, ..self.sum };
        let bounded = tolerance::of_sum(precision, operands, terms, scaled, sum);
        let limit = if precision == Precision::F64 { DType::F64 } else { DType::F32 };
        if self.error == 0.0 { bounded } else { Bounded::new(bounded.value, bounded.error + self.error, limit) }
    }
}

/// The `matmul` of a graph, one element at a time, by the formula of `verdigris_graph::ops::matmul`.
pub(crate) struct Multiplied<'a> {
    precision: Precision,
    k: u64,
    a: Source<'a>,
    b: Source<'a>,
    c: Option<Source<'a>>,
    alpha: f64,
    beta: f64,
    scale_a: Option<Factors<'a>>,
    scale_b: Option<Factors<'a>>,
}

/// Dequantization factors, broadcast over batches.
struct Factors<'a> {
    factors: Source<'a>,
    block: Option<[u64; 2]>,
}

impl Factors<'_> {
    fn at(&self, batch: &[u64], outer: u64, k: u64) -> Bounded {
        let Some([outer_block, k_block]) = self.block else {
            return self.factors.get(0);
        };
        let index: Vec<u64> = batch.iter().copied().chain([outer / outer_block, k / k_block]).collect();
        self.factors.at(&index)
    }
}

impl<'a> Multiplied<'a> {
    /// `tensor` gives each tensor, `scalar` each bound factor; `out` are the dims of D.
    pub(crate) fn new<E>(
        matmul: &Matmul,
        out: &[u64],
        mut tensor: impl FnMut(Uid) -> Result<Source<'a>, E>,
        scalar: impl Fn(Uid) -> Result<f64, E>,
    ) -> Result<Multiplied<'a>, E> {
        let (batch, matrix) = out.split_at(out.len() - 2);
        let (a, b) = (tensor(matmul.a)?, tensor(matmul.b)?);
        let k = a.dims()[a.dims().len() - 1];
        let with_batch = |rows: u64, columns: u64| -> Vec<u64> { batch.iter().copied().chain([rows, columns]).collect() };
        let factor = |factor: HostScalar<Uid>| match factor {
            HostScalar::Fixed(real) => Ok(real.0),
            HostScalar::Bound(uid) => scalar(uid),
        };
        let (alpha, beta) = (factor(matmul.alpha)?, factor(matmul.beta)?);
        let c = match matmul.c {
            Some(c) if beta != 0.0 => Some(tensor(c)?.broadcast(out)),
            _ => None,
        };
        let mut factors = |scale: Option<OperandScale>, outer: u64| {
            scale
                .map(|OperandScale { tensor: uid, block }| {
                    let factors = tensor(uid)?;
                    let factors = match block {
                        Some([outer_block, k_block]) => factors.broadcast(&with_batch(outer.div_ceil(outer_block), k.div_ceil(k_block))),
                        None => factors,
                    };
                    Ok(Factors { factors, block })
                })
                .transpose()
        };
        let (scale_a, scale_b) = (factors(matmul.scale_a, matrix[0])?, factors(matmul.scale_b, matrix[1])?);
        let (a, b) = (a.broadcast(&with_batch(matrix[0], k)), b.broadcast(&with_batch(k, matrix[1])));
        Ok(Multiplied { precision: matmul.precision, k, a, b, c, alpha, beta, scale_a, scale_b })
    }
}

impl Formula for Multiplied<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let (batch, place) = index.split_at(index.len() - 2);
        let (row, column) = (place[0], place[1]);
        let start = |source: &Source<'_>, row, column| {
            let index: Vec<u64> = batch.iter().copied().chain([row, column]).collect();
            source.offset(&index)
        };
        let (a, b) = (start(&self.a, row, 0), start(&self.b, 0, column));
        let (a_step, b_step) = (self.a.strides()[batch.len() + 1], self.b.strides()[batch.len()]);
        let mut sum = SumOfBounded::default();
        let scaled = |element: Bounded, factor: Bounded| Bounded {
            value: element.value * factor.value,
            error: pass(element.error, factor.value.abs()) + pass(factor.error, element.value.abs() + element.error),
        };
        for k in 0..self.k {
            let (mut left, mut right) = (self.a.get(a + k * a_step), self.b.get(b + k * b_step));
            if let Some(factors) = &self.scale_a {
                left = scaled(left, factors.at(batch, row, k));
            }
            if let Some(factors) = &self.scale_b {
                right = scaled(right, factors.at(batch, column, k));
            }
            sum.add(left, right);
        }
        let is_scaled = self.scale_a.is_some() || self.scale_b.is_some();
        let mut v = sum.finish(self.precision, self.a.dtype(), self.k, is_scaled);
        let epilogue = self.precision.epilogue();
        if self.precision == Precision::I32 && (self.alpha != 1.0 || self.c.is_some()) {
            v = v.rounded(DType::F32, epilogue);
        }
        if self.alpha != 1.0 {
            v = v.scaled(self.alpha, epilogue);
        }
        if let Some(c) = &self.c {
            let addend = c.read(c.offset(index), epilogue).scaled(self.beta, epilogue);
            v = v.binary(verdigris_graph::BinaryOp::Add, addend, false, 53, epilogue);
        }
        v
    }

    fn compute(&self) -> DType {
        let is_plain = self.alpha == 1.0 && self.c.is_none();
        if is_plain { self.precision.accumulator() } else { self.precision.epilogue() }
    }
}

impl Operation for Matmul {
    const DRAWS: u64 = 2;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let out = at.dims(self.d)?;
        let inputs = at.inputs;
        let scalar = |uid: Uid| inputs.scalars.get(&uid).copied().ok_or(GraphError::NoScalar { uid });
        let formula = Multiplied::new(self, out, |uid| at.source(uid), scalar)?;
        at.put(self.d, formula)
    }

    fn data_of(&self, _: &Graph, uid: Uid) -> Data<'_> {
        let is_scale = [self.scale_a, self.scale_b].iter().flatten().any(|scale| scale.tensor == uid);
        if is_scale { Data::Factors } else { Data::Any(self.a == uid) }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.matmul()
    }
}

impl Draft {
    fn matmul(&mut self) -> Result<(), Error> {
        let (dtype, m, k) = (self.pick(&TYPES[..12]), 1 + self.below(20), 1 + self.below(40));
        let a = self.value(|value| value.dims.len() >= 2 && Precision::usual(value.dtype, value.dtype).is_some(), dtype, &[m, k])?;
        let (batch, rows) = a.dims.split_at(a.dims.len() - 2);
        let mut dims = self.narrower(batch);
        let n = 1 + self.below(20);
        dims.extend([rows[1], n]);
        let b = self.value(|value| value.dims == dims && value.dtype == a.dtype, a.dtype, &dims)?;
        let Some(precision) = self.precision(a.dtype, b.dtype) else { return Ok(()) };
        let out: Vec<u64> = batch.iter().copied().chain([rows[0], n]).collect();
        if out.iter().product::<u64>() > MOST_ELEMENTS || out.iter().product::<u64>() * rows[1] > MOST_PRODUCTS {
            return Ok(());
        }
        let name = self.name("matmul");
        let d = if self.one_in(3) {
            let c = self.second(&out)?;
            let (alpha, beta) = (HostScalar::Fixed(self.real()), HostScalar::Fixed(self.real()));
            let matmul = Matmul { c: Some(c.uid), alpha, beta, ..Matmul::new(a.uid, b.uid, Uid(0), precision) };
            let d = self.builder.matmul_with(&name, matmul)?;
            self.note_read(&[c.uid]);
            d
        } else {
            self.builder.matmul(&name, a.uid, b.uid, precision)?
        };
        self.note_read(&[a.uid, b.uid]);
        self.result(d, &out, precision.accumulator(), &TYPES).map(drop)
    }
}
