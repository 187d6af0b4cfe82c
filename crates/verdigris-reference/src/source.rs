//! The elements of one tensor of a graph, as the formulas of [`crate::ops`] read them: values with error bounds, at strides.

use std::rc::Rc;

use verdigris_tensor::{DType, Layout, num};

use crate::tolerance::Bounded;

/// What one element of an op's result is, in terms of its inputs.
pub(crate) trait Formula {
    /// The element at `index`, which lies inside the result's dims, before it is rounded to the result's type.
    fn at(&self, index: &[u64]) -> Bounded;

    /// The type in which it is computed: results of that type are not rounded again.
    fn compute(&self) -> DType;
}

/// A tensor to read from.
#[derive(Clone)]
pub(crate) struct Source<'a> {
    dtype: DType,
    dims: Vec<u64>,
    strides: Vec<u64>,
    held: Held<'a>,
}

/// Where the elements come from.
#[derive(Clone)]
enum Held<'a> {
    /// Numbers at hand; `errors` is empty if all are exact.
    Dense { values: Rc<Vec<f64>>, errors: Rc<Vec<f64>> },
    /// Bytes too many to hold twice, converted at each read.
    Raw(&'a [u8]),
    /// Finite numbers that are known without being held, by their offset.
    Known(&'a (dyn Fn(u64) -> f64 + Sync)),
    /// A result too large to hold, computed at each read. Offsets are row-major positions in these dims.
    Computed { formula: Rc<dyn Formula + 'a>, dims: Rc<Vec<u64>> },
}

/// Buffers and results up to this many elements are held as numbers.
pub(crate) const HELD_LIMIT_ELEMENTS: u64 = 1 << 23;

impl<'a> Source<'a> {
    /// A stored tensor that is bound to `bytes`; `None` if they are too few.
    pub(crate) fn stored(dtype: DType, layout: &Layout, bytes: &'a [u8]) -> Option<Source<'a>> {
        if (bytes.len() as u128) < layout.span_bytes(dtype) {
            return None;
        }
        let bytes = &bytes[..layout.span_bytes(dtype) as usize];
        let held = if layout.span_elements() > HELD_LIMIT_ELEMENTS {
            Held::Raw(bytes)
        } else {
            let values = bytes.chunks_exact(dtype.bytes()).filter_map(|chunk| num::read_element(dtype, chunk)).collect();
            Held::Dense { values: Rc::new(values), errors: Rc::default() }
        };
        Some(Source { dtype, dims: layout.dims().to_vec(), strides: layout.strides().to_vec(), held })
    }

    /// A tensor whose elements, finite numbers all, are given by their offsets.
    pub(crate) fn known(dtype: DType, layout: &Layout, at: &'a (dyn Fn(u64) -> f64 + Sync)) -> Source<'a> {
        Source { dtype, dims: layout.dims().to_vec(), strides: layout.strides().to_vec(), held: Held::Known(at) }
    }

    /// The result of an op, rounded to its type: held if it is not too large, else computed whenever it is read.
    pub(crate) fn computed(dtype: DType, dims: &[u64], formula: impl Formula + 'a) -> Source<'a> {
        let elements: u64 = dims.iter().product();
        if elements > HELD_LIMIT_ELEMENTS {
            return Source::computed_when_read(dtype, dims, formula);
        }
        let formula = Rounded { dtype, formula };
        let (mut values, mut errors) = (Vec::with_capacity(elements as usize), Vec::with_capacity(elements as usize));
        let mut index = vec![0; dims.len()];
        for _ in 0..elements {
            let element = formula.at(&index);
            values.push(element.value);
            errors.push(element.error);
            advance(&mut index, dims);
        }
        if errors.iter().all(|&error| error == 0.0) {
            errors.clear();
        }
        let held = Held::Dense { values: Rc::new(values), errors: Rc::new(errors) };
        Source { dtype, dims: dims.to_vec(), strides: packed(dims), held }
    }

    /// The result of an op, rounded to its type, each element computed whenever it is read: for results of which few are.
    pub(crate) fn computed_when_read(dtype: DType, dims: &[u64], formula: impl Formula + 'a) -> Source<'a> {
        let held = Held::Computed { formula: Rc::new(Rounded { dtype, formula }), dims: Rc::new(dims.to_vec()) };
        Source { dtype, dims: dims.to_vec(), strides: packed(dims), held }
    }

    /// The type that the values are held in.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The extents.
    pub(crate) fn dims(&self) -> &[u64] {
        &self.dims
    }

    /// Steps of [`Source::get`] from one index of each dim to the next.
    pub(crate) fn strides(&self) -> &[u64] {
        &self.strides
    }

    /// The same elements broadcast from the right to `dims`, to which they fit.
    pub(crate) fn broadcast(&self, dims: &[u64]) -> Source<'a> {
        let lead = dims.len() - self.dims.len();
        let stride = |(i, &dim): (usize, &u64)| match i.checked_sub(lead) {
            Some(own) if self.dims[own] == dim => self.strides[own],
            _ => 0,
        };
        Source { strides: dims.iter().enumerate().map(stride).collect(), dims: dims.to_vec(), ..self.clone() }
    }

    /// The offset of an element.
    #[inline]
    pub(crate) fn offset(&self, index: &[u64]) -> u64 {
        index.iter().zip(&self.strides).map(|(i, stride)| i * stride).sum()
    }

    /// The element at `index`.
    #[inline]
    pub(crate) fn at(&self, index: &[u64]) -> Bounded {
        self.get(self.offset(index))
    }

    /// The element at an offset.
    #[inline]
    pub(crate) fn get(&self, offset: u64) -> Bounded {
        let place = offset as usize;
        match &self.held {
            Held::Dense { values, errors } => Bounded { value: values[place], error: errors.get(place).copied().unwrap_or(0.0) },
            Held::Raw(bytes) => {
                let rest = bytes.get(place * self.dtype.bytes()..).unwrap_or_default();
                Bounded::exact(num::read_element(self.dtype, rest).unwrap_or(f64::NAN))
            }
            Held::Known(at) => Bounded::exact(at(offset)),
            Held::Computed { formula, dims } => {
                let mut index = vec![0; dims.len()];
                let mut rest = offset;
                for (i, dim) in index.iter_mut().zip(dims.iter()).rev() {
                    *i = rest % dim;
                    rest /= dim;
                }
                formula.at(&index)
            }
        }
    }

    /// All elements by their offsets, if they are numbers at hand and exact.
    pub(crate) fn exact(&self) -> Option<&[f64]> {
        match &self.held {
            Held::Dense { values, errors } if errors.is_empty() => Some(values),
            _ => None,
        }
    }

    /// The element at an offset, as arithmetic in `compute` reads it: f32 does not hold every integer.
    #[inline]
    pub(crate) fn read(&self, offset: u64, compute: DType) -> Bounded {
        let element = self.get(offset);
        if compute == DType::F32 && matches!(self.dtype, DType::I32 | DType::I64) { element.rounded(DType::F32, compute) } else { element }
    }

    /// Whether every element is known to be a finite number, without computing any.
    pub(crate) fn is_finite(&self) -> bool {
        match &self.held {
            Held::Dense { values, .. } => values.iter().all(|value| value.is_finite()),
            Held::Known(_) => true,
            Held::Raw(_) | Held::Computed { .. } => false,
        }
    }
}

/// Strides of a row-major result.
fn packed(dims: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; dims.len()];
    for dim in (1..dims.len()).rev() {
        strides[dim - 1] = strides[dim] * dims[dim];
    }
    strides
}

/// The next index in row-major order; the first one behind the last.
pub(crate) fn advance(index: &mut [u64], dims: &[u64]) {
    for (i, &dim) in index.iter_mut().zip(dims).rev() {
        *i += 1;
        if *i < dim {
            return;
        }
        *i = 0;
    }
}

/// A formula with its result's type.
struct Rounded<F> {
    dtype: DType,
    formula: F,
}

impl<F: Formula> Formula for Rounded<F> {
    fn at(&self, index: &[u64]) -> Bounded {
        self.formula.at(index).held_as(self.dtype, self.formula.compute())
    }

    fn compute(&self) -> DType {
        self.formula.compute()
    }
}
