//! The sum of products in `f64`.

use verdigris_tensor::DType;
use verdigris_tensor::num;

/// The sum of products of one output element, with what a tolerance needs to know of it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sum {
    /// `Σ a·b`.
    pub value: f64,
    /// `Σ |a|·|b|`.
    pub magnitude: f64,
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

/// `Σ a(k) · b(k)` and `Σ |a(k)| · |b(k)|` over `k` from 0, in order.
#[inline]
pub fn sum_of_products(k: u64, a: impl Fn(u64) -> f64, b: impl Fn(u64) -> f64) -> Sum {
    let mut sum = Sum { value: 0.0, magnitude: 0.0 };
    for i in 0..k {
        let product = a(i) * b(i);
        sum.value += product;
        sum.magnitude += product.abs();
    }
    sum
}
