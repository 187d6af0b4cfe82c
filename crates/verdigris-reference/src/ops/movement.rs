//! Movements: which element of which input stands at an index of the result.

use verdigris_graph::Movement;
use verdigris_tensor::{DType, num};

use crate::source::{Formula, Source};
use crate::tolerance::Bounded;

/// A movement with what it reads.
pub(crate) struct Moved<'a> {
    movement: Movement,
    dtype: DType,
    inputs: Vec<Source<'a>>,
    /// The dims of the result.
    out: Vec<u64>,
}

impl<'a> Moved<'a> {
    /// `inputs` in the order of the op's fields, all of type `dtype`.
    pub(crate) fn new(movement: &Movement, dtype: DType, mut inputs: Vec<Source<'a>>, out: &[u64]) -> Moved<'a> {
        if let (Movement::Broadcast { .. }, Some(input)) = (movement, inputs.first_mut()) {
            *input = input.broadcast(out);
        }
        Moved { movement: movement.clone(), dtype, inputs, out: out.to_vec() }
    }
}

impl Formula for Moved<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let x = &self.inputs[0];
        let place: Vec<u64> = match &self.movement {
            Movement::Reshape { .. } => {
                let mut position = index.iter().zip(&self.out).fold(0, |position, (i, dim)| position * dim + i);
                let mut place: Vec<u64> = (x.dims().iter().rev())
                    .map(|dim| {
                        let i = position % dim;
                        position /= dim;
                        i
                    })
                    .collect();
                place.reverse();
                place
            }
            Movement::Transpose { permutation, .. } => {
                let mut place = vec![0; index.len()];
                for (i, &dim) in index.iter().zip(permutation) {
                    place[dim as usize] = *i;
                }
                place
            }
            Movement::Slice { starts, steps, .. } => (0..index.len()).map(|dim| starts[dim] + index[dim] * steps[dim]).collect(),
            Movement::Concat { axis, .. } => {
                let axis = *axis as usize;
                let mut place = index.to_vec();
                for input in &self.inputs {
                    if place[axis] < input.dims()[axis] {
                        return input.at(&place);
                    }
                    place[axis] -= input.dims()[axis];
                }
                return Bounded::exact(f64::NAN);
            }
            Movement::Pad { before, value, .. } => {
                let inside = |dim: usize| index[dim].checked_sub(before[dim]).filter(|&i| i < x.dims()[dim]);
                match (0..index.len()).map(inside).collect::<Option<Vec<u64>>>() {
                    Some(place) => place,
                    None => return Bounded::exact(num::round_to(self.dtype, value.0)),
                }
            }
            Movement::Broadcast { .. } => index.to_vec(),
        };
        x.at(&place)
    }

    fn compute(&self) -> DType {
        self.dtype
    }
}
