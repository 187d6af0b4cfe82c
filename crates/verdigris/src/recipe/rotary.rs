//! Rotary positions: pairs of elements, one of each half of a head, turned by an angle of their place in the sequence.

use verdigris_graph::{BinaryOp, Uid};

use super::view::like;
use super::{Drawing, unfit};
use crate::error::Error;

impl Drawing {
    /// See [`Function::Rotary`](super::Function::Rotary).
    ///
    /// What stands across is the other half, with zeros beside it: a load with a window, which a map has, where a concatenation would be a pass of its own.
    pub(super) fn rotary(&mut self, is_gradient: bool) -> Result<(), Error> {
        let given = self.given(0)?;
        let (Some(&elements), rank) = (given.layout.dims().last(), given.layout.rank()) else {
            return Err(unfit("a tensor without dims", "the last dim is that of a head's elements"));
        };
        for place in [1, 2] {
            let dims = self.given(place)?.layout.dims().to_vec();
            let fits = dims.len() == rank && dims.iter().zip(given.layout.dims()).all(|(&own, &dim)| own == dim || own == 1);
            if elements % 2 != 0 || !fits || dims.last() != Some(&elements) {
                let what = format!("angles of dims {dims:?} for heads of {:?}", given.layout.dims());
                return Err(unfit(what, "they broadcast to the heads, and have an element for each of an even number"));
            }
        }
        let (x, cos, sin) = (self.input(0, "x")?, self.input(1, "cos")?, self.input(2, "sin")?);
        let y = if is_gradient {
            let straight = self.g.binary("straight", BinaryOp::Mul, x, cos)?;
            let (low, high) = (self.beside_zeros(x, rank - 1, false)?, self.beside_zeros(x, rank - 1, true)?);
            // Each half meets the sine that it was multiplied by; of the dims of the heads, so that it is a load of the same map.
            let sin = self.g.broadcast("sines", sin, given.layout.dims())?;
            let (of_low, of_high) = (self.beside_zeros(sin, rank - 1, false)?, self.beside_zeros(sin, rank - 1, true)?);
            let (low, high) = (self.g.binary("low", BinaryOp::Mul, low, of_low)?, self.g.binary("high", BinaryOp::Mul, high, of_high)?);
            let across = self.g.binary("across", BinaryOp::Sub, high, low)?;
            self.g.binary("y", BinaryOp::Add, straight, across)?
        } else {
            self.turned(x, cos, sin, rank - 1)?
        };
        self.store(y, "y", given.dtype, like(&given.layout)?)
    }

    /// Pairs of elements turned by their angle, one of each half of the dim `along`: `x · cos + r(x) · sin`, r being the second half, negated, in front of the first.
    /// Cosines and sines broadcast.
    pub(super) fn turned(&mut self, x: Uid, cos: Uid, sin: Uid, along: usize) -> Result<Uid, Error> {
        let straight = self.g.binary("straight", BinaryOp::Mul, x, cos)?;
        let (low, high) = (self.beside_zeros(x, along, false)?, self.beside_zeros(x, along, true)?);
        let other = self.g.binary("other", BinaryOp::Sub, low, high)?;
        let across = self.g.binary("across", BinaryOp::Mul, other, sin)?;
        Ok(self.g.binary("y", BinaryOp::Add, straight, across)?)
    }

    /// One half of the elements along a dim in the place of the other one, with zeros in its own.
    fn beside_zeros(&mut self, x: Uid, last: usize, is_high: bool) -> Result<Uid, Error> {
        let dims = self.dims_of(x);
        let half = dims[last] / 2;
        let mut starts = vec![0; dims.len()];
        let mut stops = dims.clone();
        let (mut before, mut after) = (starts.clone(), starts.clone());
        if is_high {
            (starts[last], after[last]) = (half, half);
        } else {
            (stops[last], before[last]) = (half, half);
        }
        let part = self.g.slice("half", x, &starts, &stops, &vec![1; dims.len()])?;
        Ok(self.g.pad("beside zeros", part, &before, &after, 0.0)?)
    }
}

#[cfg(test)]
mod tests {
    use verdigris_graph::pattern::partition;
    use verdigris_tensor::{DType, Layout};

    use super::super::{Function, Input, draw};

    /// Heads `[batch, heads, positions, 64]` that lie as `[batch, positions, all heads, 64]`.
    fn heads(heads: u64, of: u64) -> Option<Input> {
        let layout = Layout::new(&[2, heads, 48, 64], &[48 * of * 64, 64, of * 64, 1]).expect("a layout");
        Some(Input { dtype: DType::Bf16, layout, alignment_bytes: None })
    }

    fn angles(elements: u64) -> Option<Input> {
        Some(Input { dtype: DType::Bf16, layout: Layout::row_major(&[1, 1, 48, elements]).expect("a layout"), alignment_bytes: None })
    }

    #[test]
    fn heads_are_turned_in_one_pass_and_lie_as_they_did_without_gaps() {
        for is_gradient in [false, true] {
            let recipe = draw(&Function::Rotary { is_gradient }, &[heads(6, 8), angles(64), angles(64)]).expect("drawn");
            let kinds: Vec<_> = partition(&recipe.graph).expect("cut").parts.iter().map(|part| part.problem.kind()).collect();
            assert_eq!(kinds, ["map"]);
            assert_eq!(recipe.results[0].layout.strides(), [48 * 6 * 64, 64, 6 * 64, 1]);
        }
    }

    #[test]
    fn angles_that_do_not_fit_are_told() {
        let told = draw(&Function::Rotary { is_gradient: false }, &[heads(6, 8), angles(64), angles(32)]).unwrap_err();
        assert!(told.to_string().contains("angles of dims [1, 1, 48, 32]"), "{told}");
    }
}
