//! Movements: which element of which input stands at an index of the result.

use verdigris_graph::{Error, Movement, Op};
use verdigris_tensor::{DType, num};

use crate::fuzz::{Draft, Value};
use crate::operation::{Evaluation, GraphError, Operation};
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

impl Operation for Movement {
    const DRAWS: u64 = 3;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let inputs = Op::Movement(self.clone()).inputs().into_iter().map(|uid| at.source(uid)).collect::<Result<_, _>>()?;
        let y = at.described(self.output())?;
        at.put(y.uid, Moved::new(self, y.dtype, inputs, y.layout.dims()))
    }

    fn draw(draft: &mut Draft, nth: u64) -> Result<(), Error> {
        // Rows that are appended stand beside movements.
        if nth == 2 && draft.one_in(2) { draft.append() } else { draft.movement() }
    }
}

impl Draft {
    fn movement(&mut self) -> Result<(), Error> {
        let x = self.with_axis(false)?;
        let name = self.name("move");
        let rank = x.dims.len();
        let (y, dims) = match self.below(6) {
            0 => {
                let dims = match self.below(3) {
                    0 => vec![x.dims.iter().product()],
                    1 => vec![1].into_iter().chain(x.dims.iter().copied()).collect(),
                    _ => x.dims.iter().rev().copied().collect::<Vec<u64>>(),
                };
                (self.builder.reshape(&name, x.uid, &dims)?, dims)
            }
            1 => {
                let mut permutation: Vec<u32> = (0..rank as u32).collect();
                for i in (1..rank).rev() {
                    let j = self.below(i as u64 + 1) as usize;
                    permutation.swap(i, j);
                }
                let y = self.builder.transpose(&name, x.uid, &permutation)?;
                (y, permutation.iter().map(|&dim| x.dims[dim as usize]).collect())
            }
            2 => {
                let starts: Vec<u64> = x.dims.iter().map(|&dim| self.random.below(dim + 1)).collect();
                let stops: Vec<u64> = starts.iter().zip(&x.dims).map(|(&start, &dim)| dim - self.random.below(dim - start + 1)).collect();
                let steps: Vec<u64> = (0..rank).map(|_| 1 + self.random.below(3)).collect();
                let dims = (0..rank).map(|i| (stops[i] - starts[i]).div_ceil(steps[i])).collect();
                (self.builder.slice(&name, x.uid, &starts, &stops, &steps)?, dims)
            }
            3 => {
                let axis = self.below(rank as u64) as usize;
                let mut other = x.dims.clone();
                other[axis] = 1 + self.below(4);
                let fits = |value: &Value| {
                    value.dtype == x.dtype && value.dims.len() == rank && (0..rank).all(|i| i == axis || value.dims[i] == x.dims[i])
                };
                let second = self.value(fits, x.dtype, &other)?;
                let y = self.builder.concat(&name, &[x.uid, second.uid], axis as u32)?;
                self.note_read(&[second.uid]);
                let mut dims = x.dims.clone();
                dims[axis] += second.dims[axis];
                (y, dims)
            }
            4 => {
                let mut list = || -> Vec<u64> { (0..rank).map(|_| self.random.below(3)).collect() };
                let (before, after) = (list(), list());
                let value = self.real().0;
                let dims = (0..rank).map(|i| before[i] + x.dims[i] + after[i]).collect();
                (self.builder.pad(&name, x.uid, &before, &after, value)?, dims)
            }
            _ => {
                let mut dims: Vec<u64> = x.dims.iter().map(|&dim| if dim == 1 { 1 + self.random.below(4) } else { dim }).collect();
                if rank < 5 && self.one_in(2) {
                    dims.insert(0, 2);
                }
                (self.builder.broadcast(&name, x.uid, &dims)?, dims)
            }
        };
        self.note_read(&[x.uid]);
        self.result(y, &dims, x.dtype, &[]).map(drop)
    }
}
