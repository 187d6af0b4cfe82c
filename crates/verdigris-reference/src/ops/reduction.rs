//! Reductions: one result at a time, over all elements that go into it.

use verdigris_graph::{Error, Pointwise, Reduction, ReductionOp};
use verdigris_tensor::DType;
use verdigris_tensor::num::power_of_two;

use crate::fuzz::Draft;
use crate::operation::{Evaluation, GraphError, Operation};
use crate::source::{Formula, Source, advance};
use crate::tolerance::{Bounded, roundoff};

/// A reduction with what it reads.
pub(crate) struct Reduced<'a> {
    f: ReductionOp,
    axes: Vec<usize>,
    x: Source<'a>,
    compute: DType,
}

impl<'a> Reduced<'a> {
    pub(crate) fn new(reduction: &Reduction, x: Source<'a>) -> Reduced<'a> {
        let compute = Pointwise::compute_dtype([x.dtype()]);
        Reduced { f: reduction.f, axes: reduction.axes.iter().map(|&axis| axis as usize).collect(), x, compute }
    }
}

/// A sum of values that may carry errors, in any order.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SumInAnyOrder {
    value: f64,
    /// Of the finite terms.
    magnitude: f64,
    error: f64,
    count: u64,
    has_nan: bool,
}

impl SumInAnyOrder {
    /// Adds a term.
    pub(crate) fn add(&mut self, term: Bounded) {
        self.value += term.value;
        if term.value.is_finite() {
            self.magnitude += term.value.abs() + term.error;
        }
        self.error += term.error;
        self.count += 1;
        self.has_nan |= term.value.is_nan();
    }

    /// How many terms were added.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The sum, `(K + 2) · ε · Σ|x|` and the terms' own errors away from the truth; a single term is itself.
    pub(crate) fn finish(self, compute: DType) -> Bounded {
        let limit = if compute == DType::F64 { f64::MAX } else { power_of_two(127) };
        if !self.value.is_finite() {
            // Finite terms whose sum overflows on the way, in one order or another, make NaN of an infinity, or an infinity where there is none.
            let is_exact = self.error < f64::INFINITY && (self.has_nan || self.magnitude <= limit);
            return Bounded { value: self.value, error: if is_exact { 0.0 } else { f64::INFINITY } };
        }
        let rounding = if self.count > 1 { (self.count as f64 + 2.0) * roundoff(compute) * self.magnitude } else { 0.0 };
        let error = if self.magnitude > limit { f64::INFINITY } else { self.error + rounding };
        Bounded::new(self.value, error, compute)
    }
}

impl Formula for Reduced<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let extents: Vec<u64> = self.axes.iter().map(|&axis| self.x.dims()[axis]).collect();
        let count: u64 = extents.iter().product();
        let mut place = index.to_vec();
        let mut inner = vec![0; extents.len()];
        let elements = (0..count).map(|_| {
            for (&axis, &i) in self.axes.iter().zip(&inner) {
                place[axis] = i;
            }
            advance(&mut inner, &extents);
            self.x.read(self.x.offset(&place), self.compute)
        });
        let compute = self.compute;
        let epsilon = roundoff(compute);
        match self.f {
            ReductionOp::Add => sum(elements, compute),
            ReductionOp::Norm1 => sum(elements.map(Bounded::magnitude), compute),
            ReductionOp::Avg => sum(elements, compute).shared_out(count as f64, compute),
            ReductionOp::Norm2 => {
                let square = |x: Bounded| {
                    let value = x.value * x.value;
                    let limit = if compute == DType::F64 { f64::MAX } else { power_of_two(127) };
                    let rounding = epsilon * value + if value == 0.0 { 0.0 } else { power_of_two(-149) };
                    let error = if value > limit { f64::INFINITY } else { x.error * (2.0 * x.value.abs() + x.error) + rounding };
                    Bounded { value, error: if x.error < f64::INFINITY && !x.value.is_finite() { 0.0 } else { error } }
                };
                let sum = sum(elements.map(square), compute);
                let value = sum.value.sqrt();
                if sum.error == f64::INFINITY {
                    return Bounded { value, ..sum };
                }
                // A root is steep near 0: of a sum that may be 0, either side may be the farther one.
                let (least, most) = ((sum.value - sum.error).max(0.0).sqrt(), (sum.value + sum.error).sqrt());
                let reach = (value - least).max(most - value);
                let own = if compute == DType::F64 { power_of_two(-48) } else { power_of_two(-21) } * value;
                Bounded::new(value, if value.is_finite() { reach + own } else { sum.error }, compute)
            }
            ReductionOp::Mul => product(elements, compute),
            ReductionOp::MulNoZeros => {
                // What may be 0 or not may be a factor or not.
                let mut is_doubtful = false;
                let factors: Vec<Bounded> = elements
                    .filter(|x| {
                        is_doubtful |= x.error > 0.0 && x.value.abs() <= x.error;
                        x.value != 0.0
                    })
                    .collect();
                let result = product(factors.into_iter(), compute);
                if is_doubtful { Bounded { error: f64::INFINITY, ..result } } else { result }
            }
            ReductionOp::Max => greatest(elements, f64::NEG_INFINITY),
            ReductionOp::Amax => greatest(elements.map(Bounded::magnitude), 0.0),
            ReductionOp::Min => greatest(elements.map(Bounded::negated), f64::NEG_INFINITY).negated(),
        }
    }

    fn compute(&self) -> DType {
        self.compute
    }
}

fn sum(terms: impl Iterator<Item = Bounded>, compute: DType) -> Bounded {
    let mut sum = SumInAnyOrder::default();
    terms.for_each(|term| sum.add(term));
    sum.finish(compute)
}

/// A product of values that may carry errors, in any order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductInAnyOrder {
    value: f64,
    most: f64,
    least: f64,
    /// The product of the finite factors above 1, and of those below it.
    above_one: f64,
    below_one: f64,
    count: f64,
    has_unknown: bool,
    has_nan: bool,
    has_infinity: bool,
    has_zero: bool,
    /// A factor is 0, or its error may make it so.
    may_be_zero: bool,
}

impl Default for ProductInAnyOrder {
    fn default() -> Self {
        ProductInAnyOrder {
            value: 1.0,
            most: 1.0,
            least: 1.0,
            above_one: 1.0,
            below_one: 1.0,
            count: 0.0,
            has_unknown: false,
            has_nan: false,
            has_infinity: false,
            has_zero: false,
            may_be_zero: false,
        }
    }
}

impl ProductInAnyOrder {
    /// Takes in a factor.
    pub(crate) fn multiply(&mut self, x: Bounded) {
        let size = x.value.abs();
        self.value *= x.value;
        self.most *= size + x.error;
        self.least *= (size - x.error).max(0.0);
        if size.is_finite() {
            self.above_one *= (size + x.error).max(1.0);
        }
        self.below_one *= size.min(1.0);
        self.has_unknown |= x.error == f64::INFINITY;
        self.has_nan |= x.value.is_nan();
        self.has_infinity |= x.value.is_infinite();
        self.has_zero |= x.value == 0.0 && x.error == 0.0;
        self.may_be_zero |= size <= x.error;
        self.count += 1.0;
    }

    /// The product: `K · ε` of it, and what is lost where a part of it leaves the range of normal numbers.
    pub(crate) fn finish(self, compute: DType) -> Bounded {
        let ProductInAnyOrder { value, most, least, above_one, below_one, count, .. } = self;
        let unknown = Bounded { value, error: f64::INFINITY };
        if self.has_unknown {
            return unknown;
        }
        if self.has_nan || self.has_infinity && self.has_zero {
            return Bounded::exact(f64::NAN);
        }
        let (limit, smallest, underflow) = match compute {
            DType::F64 => (power_of_two(1023), power_of_two(-1074), power_of_two(-1022)),
            _ => (power_of_two(127), power_of_two(-149), power_of_two(-126)),
        };
        if self.has_infinity {
            // A part of the rest that vanishes would make NaN of ∞.
            return if self.may_be_zero || below_one < underflow { unknown } else { Bounded::exact(value) };
        }
        if above_one > limit {
            // Whether it overflows on the way is a matter of the order, and in f64 the reference's own order is one of many. An exact 0
            // among the factors may then meet ∞.
            return unknown;
        }
        let rounding = if count > 1.0 { (count + 1.0) * roundoff(compute) * most } else { 0.0 };
        let lost = if below_one < underflow && value != 0.0 { count * smallest * above_one } else { 0.0 };
        let reach = if most == least {
            0.0
        } else {
            (most - value.abs()).max(value.abs() - least).max(if least == 0.0 { most + value.abs() } else { 0.0 })
        };
        Bounded::new(value, reach + if value == 0.0 { 0.0 } else { rounding + lost }, compute)
    }
}

fn product(factors: impl Iterator<Item = Bounded>, compute: DType) -> Bounded {
    let mut product = ProductInAnyOrder::default();
    factors.for_each(|factor| product.multiply(factor));
    product.finish(compute)
}

/// The greatest of values that may carry errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Greatest {
    value: f64,
    low: f64,
    high: f64,
    has_nan: bool,
    is_unknown: bool,
}

impl Greatest {
    /// Of no values.
    pub(crate) fn of_nothing(value: f64) -> Greatest {
        Greatest { value, low: value, high: value, has_nan: false, is_unknown: false }
    }

    /// Takes in a value.
    pub(crate) fn take(&mut self, x: Bounded) {
        self.has_nan |= x.value.is_nan();
        self.is_unknown |= x.error == f64::INFINITY;
        self.value = self.value.max(x.value);
        self.low = self.low.max(x.value - x.error);
        self.high = self.high.max(x.value + x.error);
    }

    /// The greatest, NaN if one is NaN.
    pub(crate) fn finish(self) -> Bounded {
        let Greatest { value, low, high, has_nan, is_unknown } = self;
        if is_unknown {
            Bounded { value, error: f64::INFINITY }
        } else if has_nan {
            Bounded::exact(f64::NAN)
        } else if value.is_infinite() || low == high {
            Bounded::exact(value)
        } else {
            Bounded { value, error: (high - value).max(value - low) }
        }
    }
}

/// The greatest of values that may carry errors; NaN if one is NaN, `of_nothing` of none.
pub(crate) fn greatest(elements: impl Iterator<Item = Bounded>, of_nothing: f64) -> Bounded {
    let mut greatest = Greatest::of_nothing(of_nothing);
    elements.for_each(|x| greatest.take(x));
    greatest.finish()
}

impl Operation for Reduction {
    const DRAWS: u64 = 2;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let x = at.source(self.x)?;
        at.put(self.y, Reduced::new(self, x))
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.reduction()
    }
}

impl Draft {
    fn reduction(&mut self) -> Result<(), Error> {
        let x = self.with_axis(false)?;
        let mut axes: Vec<u32> = (0..x.dims.len() as u32).filter(|_| self.random.below(2) == 0).collect();
        if axes.is_empty() {
            axes = vec![x.dims.len() as u32 - 1];
        }
        let f = self.pick(&ReductionOp::ALL);
        let name = self.name(f.name());
        let y = self.builder.reduction(&name, f, x.uid, &axes)?;
        self.note_read(&[x.uid]);
        let dims: Vec<u64> = (0..x.dims.len()).map(|dim| if axes.contains(&(dim as u32)) { 1 } else { x.dims[dim] }).collect();
        self.pointwise_result(y, &dims, &[x.dtype])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product_of(factors: &[f64], compute: DType) -> Bounded {
        product(factors.iter().map(|&x| Bounded::exact(x)), compute)
    }

    fn sum_of(terms: &[f64], compute: DType) -> Bounded {
        sum(terms.iter().map(|&x| Bounded::exact(x)), compute)
    }

    #[test]
    fn what_overflows_in_one_order_and_not_in_another_is_not_judged() {
        for compute in [DType::F32, DType::F64] {
            let large = if compute == DType::F64 { 1e200 } else { 1e25 };
            assert_eq!(product_of(&[large, large, 1.0 / large, 1.0 / large], compute).error, f64::INFINITY, "{compute:?}");
            assert_eq!(product_of(&[large, 1.0 / large, large, 1.0 / large], compute).error, f64::INFINITY, "{compute:?}");
            assert_eq!(product_of(&[f64::INFINITY, large, 1.0 / large, 1.0 / large], compute).error, f64::INFINITY, "∞ · 0, {compute:?}");
            let largest = if compute == DType::F64 { f64::MAX } else { f64::from(f32::MAX) };
            assert_eq!(sum_of(&[largest, largest, -largest], compute).error, f64::INFINITY, "{compute:?}");
            assert_eq!(sum_of(&[f64::INFINITY, -largest, -largest], compute).error, f64::INFINITY, "−∞ + ∞, {compute:?}");
        }
    }

    #[test]
    fn what_is_the_same_in_every_order_is_judged() {
        for compute in [DType::F32, DType::F64] {
            assert_eq!(product_of(&[f64::INFINITY, -2.0, 0.5], compute), Bounded::exact(f64::NEG_INFINITY));
            assert_eq!(sum_of(&[f64::INFINITY, -2.0], compute), Bounded::exact(f64::INFINITY));
            for nan in [
                product_of(&[f64::NAN, 2.0], compute),
                product_of(&[2.0, f64::INFINITY, 0.0], compute),
                sum_of(&[f64::NAN, 1e300, 1e300], compute),
                sum_of(&[f64::INFINITY, f64::NEG_INFINITY], compute),
            ] {
                assert!(nan.value.is_nan() && nan.error == 0.0, "{nan:?}");
            }
            assert!(product_of(&[3.0, 5.0, 0.25], compute).error < 1e-5);
        }
    }

    #[test]
    fn a_factor_that_may_be_zero_leaves_an_infinity_unknown() {
        let factors = [Bounded::exact(f64::INFINITY), Bounded { value: 0.1, error: 0.2 }];
        assert_eq!(product(factors.into_iter(), DType::F32).error, f64::INFINITY);
    }
}
