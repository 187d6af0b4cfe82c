//! Movements: the same values in other places.
//!
//! | | result |
//! |---|---|
//! | reshape | the elements in the row-major order of their indices, under other dims |
//! | transpose | `y[i₀, …] = x[…]` where dim `j` of `y` is dim `permutation[j]` of `x` |
//! | slice | `y[i] = x[start + i · step]` along each dim, `⌈(stop − start) / step⌉` of them |
//! | concat | the inputs one behind the other along one axis |
//! | pad | `x` with `before` and `after` elements of `value` around it |
//! | broadcast | `x` repeated along dims of 1 and along new leading dims |
//!
//! Every stored element type; the result has the type of the input, bit for bit (NaN payloads included), and `value` is rounded to that
//! type. A cast is [`crate::UnaryOp::Identity`]. These are logical: where the elements lie in memory is said by strides alone, so a
//! tensor that is merely seen otherwise needs no op at all, only another [`TensorDesc`].

use serde::{Deserialize, Serialize};
use verdigris_tensor::MAX_RANK;

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::Graph;
use crate::op::{Operation, Real, Role};
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{attribute, axis, broadcasts_to, data, same_dims};

/// One movement; the module's head has the rules.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Movement {
    /// Other dims, as many elements; the dims are those of `y`.
    Reshape {
        /// Read.
        x: Uid,
        /// Written.
        y: Uid,
    },
    /// The dims in another order.
    Transpose {
        /// Which dim of `x` each dim of `y` is.
        permutation: Vec<u32>,
        /// Read.
        x: Uid,
        /// Written.
        y: Uid,
    },
    /// A part of each dim.
    Slice {
        /// The first index taken, one for each dim.
        starts: Vec<u64>,
        /// The first index not taken; not below the start, at most the extent.
        stops: Vec<u64>,
        /// From one index taken to the next; at least 1.
        steps: Vec<u64>,
        /// Read.
        x: Uid,
        /// Written.
        y: Uid,
    },
    /// One behind the other.
    Concat {
        /// The dim along which extents add up; the others are equal.
        axis: u32,
        /// Read; at least one.
        xs: Vec<Uid>,
        /// Written.
        y: Uid,
    },
    /// A border.
    Pad {
        /// Elements before the first, one for each dim.
        before: Vec<u64>,
        /// Elements after the last.
        after: Vec<u64>,
        /// What they hold; finite.
        value: Real,
        /// Read.
        x: Uid,
        /// Written.
        y: Uid,
    },
    /// Repetition to the dims of `y`.
    Broadcast {
        /// Read.
        x: Uid,
        /// Written.
        y: Uid,
    },
}

impl Movement {
    /// The name used in serialized form.
    pub const fn name(&self) -> &'static str {
        match self {
            Movement::Reshape { .. } => "reshape",
            Movement::Transpose { .. } => "transpose",
            Movement::Slice { .. } => "slice",
            Movement::Concat { .. } => "concat",
            Movement::Pad { .. } => "pad",
            Movement::Broadcast { .. } => "broadcast",
        }
    }

    /// The tensor written.
    pub const fn output(&self) -> Uid {
        match self {
            Movement::Reshape { y, .. }
            | Movement::Transpose { y, .. }
            | Movement::Slice { y, .. }
            | Movement::Concat { y, .. }
            | Movement::Pad { y, .. }
            | Movement::Broadcast { y, .. } => *y,
        }
    }

    /// The dims of `y`, from the tensors read in order; the attributes are checked on the way. `None` for reshape and broadcast, whose
    /// dims are the caller's.
    ///
    /// # Errors
    /// Attributes that are not one for each dim or out of range; extents of a concatenation that disagree.
    pub fn infer(&self, op: &str, inputs: &[&TensorDesc]) -> Result<Option<Vec<u64>>, Error> {
        let Some(&x) = inputs.first() else {
            return attribute(op, "xs", "[]", "a concatenation has at least one input");
        };
        let dims = x.layout.dims();
        let one_each = |name: &'static str, list: &[u64]| {
            if list.len() == dims.len() { Ok(()) } else { attribute(op, name, list, "there is one entry for each dim of x") }
        };
        Ok(Some(match self {
            Movement::Reshape { .. } | Movement::Broadcast { .. } => return Ok(None),
            Movement::Transpose { permutation, .. } => {
                let mut sorted = permutation.clone();
                sorted.sort_unstable();
                if !sorted.iter().copied().eq(0..dims.len() as u32) {
                    return attribute(op, "permutation", permutation, "a permutation names each dim of x once");
                }
                permutation.iter().map(|&dim| dims[dim as usize]).collect()
            }
            Movement::Slice { starts, stops, steps, .. } => {
                one_each("starts", starts)?;
                one_each("stops", stops)?;
                one_each("steps", steps)?;
                let mut sliced = Vec::new();
                for (i, &extent) in dims.iter().enumerate() {
                    if steps[i] == 0 {
                        return attribute(op, "steps", steps, "a step is at least 1");
                    }
                    if stops[i] < starts[i] {
                        return attribute(op, "stops", stops, "a stop is not below its start");
                    }
                    if stops[i] > extent {
                        return Err(Error::Mismatch {
                            op: op.to_owned(),
                            tensor: x.name.clone(),
                            quantity: format!("dim {i}"),
                            got: extent,
                            want: stops[i],
                            rule: "a stop lies within the dim; the size expected is the least",
                        });
                    }
                    sliced.push((stops[i] - starts[i]).div_ceil(steps[i]));
                }
                sliced
            }
            Movement::Concat { axis: along, .. } => {
                let along = axis(op, x, *along)?;
                let mut joined = dims.to_vec();
                for other in &inputs[1..] {
                    let mut expected = dims.to_vec();
                    if let (Some(expected), Some(&extent)) = (expected.get_mut(along), other.layout.dims().get(along)) {
                        *expected = extent;
                    }
                    same_dims(op, other, &expected, "concatenated tensors agree in all dims but the axis")?;
                    joined[along] = joined[along].saturating_add(expected[along]);
                }
                joined
            }
            Movement::Pad { before, after, value, .. } => {
                one_each("before", before)?;
                one_each("after", after)?;
                if !value.0.is_finite() {
                    return attribute(op, "value", value.0, "a padding value is finite");
                }
                (0..dims.len()).map(|i| dims[i].saturating_add(before[i]).saturating_add(after[i])).collect()
            }
        }))
    }
}

impl Operation for Movement {
    const SPEC: OpSpec = OpSpec {
        name: "movement",
        summary: "The same values in other places; the result has the type of what is moved.",
        forms: &[
            Form {
                name: "reshape",
                formula: "the elements in row-major order under other dims",
                operands: &[OperandSpec::read("x", "of the type of `y`"), OperandSpec::written("y", "any stored type")],
                attributes: &[],
                shape: "those of `y`, which the caller gives; as many elements",
                gradient: "`dy` under the dims of `x`",
                methods: &[Method::new("reshape", r#"x: Uid, dims: Sequence[int], *, name: str = "reshape""#)],
            },
            Form {
                name: "transpose",
                formula: "dim j of y is dim permutation[j] of x",
                operands: &[OperandSpec::read("x", "of the type of `y`"), OperandSpec::written("y", "any stored type")],
                attributes: &[AttributeSpec::new("permutation", "list, one for each dim", "names each dim once", r#"[0, 0]"#)],
                shape: "those of `x` in the order of the permutation",
                gradient: "`dy` under the inverse permutation",
                methods: &[Method::new("transpose", r#"x: Uid, permutation: Sequence[int], *, name: str = "transpose""#)],
            },
            Form {
                name: "slice",
                formula: "y[i] = x[start + i · step] along each dim",
                operands: &[OperandSpec::read("x", "of the type of `y`"), OperandSpec::written("y", "any stored type")],
                attributes: &[
                    AttributeSpec::new("starts", "list, one for each dim", "not above the stop", r#"[11, 0]"#),
                    AttributeSpec::new("stops", "list, one for each dim", "at most the extent", r#"[99, 5]"#),
                    AttributeSpec::new("steps", "list, one for each dim", "at least 1", r#"[0, 1]"#),
                ],
                shape: "`⌈(stop − start) / step⌉` along each dim",
                gradient: "`dy` with zeros between and around",
                methods: &[Method::new(
                    "slice",
                    r#"x: Uid, starts: Sequence[int], stops: Sequence[int], steps: Sequence[int], *, name: str = "slice""#,
                )],
            },
            Form {
                name: "concat",
                formula: "the inputs one behind the other along an axis",
                operands: &[
                    OperandSpec::read("xs", "of the type of `y`; dims equal but for the axis").several(),
                    OperandSpec::written("y", "any stored type"),
                ],
                attributes: &[AttributeSpec::new("axis", "number", "below the number of dims", r#"9"#)],
                shape: "the extents along the axis add up",
                gradient: "the parts of `dy`",
                methods: &[Method::new("concat", r#"xs: Sequence[Uid], axis: int, *, name: str = "concat""#)],
            },
            Form {
                name: "pad",
                formula: "x with elements of a value around it",
                operands: &[OperandSpec::read("x", "of the type of `y`"), OperandSpec::written("y", "any stored type")],
                attributes: &[
                    AttributeSpec::new("before", "list, one for each dim", "one for each dim", r#"[1]"#),
                    AttributeSpec::new("after", "list, one for each dim", "one for each dim", r#"[1]"#),
                    AttributeSpec::new("value", "number", "finite", r#"null"#),
                ],
                shape: "`before + extent + after` along each dim",
                gradient: "the part of `dy` without the border",
                methods: &[Method::new(
                    "pad",
                    r#"x: Uid, before: Sequence[int], after: Sequence[int], value: float = 0.0, *, name: str = "pad""#,
                )],
            },
            Form {
                name: "broadcast",
                formula: "x repeated along dims of 1 and new leading dims",
                operands: &[OperandSpec::read("x", "of the type of `y`"), OperandSpec::written("y", "any stored type")],
                attributes: &[],
                shape: "those of `y`, which the caller gives; `x` broadcasts to them",
                gradient: "`dy` summed over what was repeated",
                methods: &[Method::new("broadcast", r#"x: Uid, dims: Sequence[int], *, name: str = "broadcast""#)],
            },
        ],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        let y = match self {
            Movement::Concat { xs, y, .. } => {
                xs.iter_mut().for_each(|x| visit(Role::Input, x));
                y
            }
            Movement::Reshape { x, y }
            | Movement::Transpose { x, y, .. }
            | Movement::Slice { x, y, .. }
            | Movement::Pad { x, y, .. }
            | Movement::Broadcast { x, y } => {
                visit(Role::Input, x);
                y
            }
        };
        visit(Role::Output, y);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let mut inputs = Vec::new();
        let mut copy = self.clone();
        copy.visit(&mut |role, uid| {
            if role == Role::Input {
                inputs.push(*uid);
            }
        });
        let inputs = inputs.into_iter().map(|uid| data(graph, op, uid)).collect::<Result<Vec<_>, Error>>()?;
        let y = data(graph, op, self.output())?;
        let inferred = self.infer(op, &inputs)?;
        for input in &inputs {
            if input.dtype != y.dtype {
                return Err(Error::DType {
                    op: op.to_owned(),
                    tensor: input.name.clone(),
                    got: input.dtype,
                    rule: "a movement keeps the element type of what it moves; the pointwise identity casts",
                });
            }
        }
        match inferred {
            Some(dims) => same_dims(op, y, &dims, "y has the dims that the movement gives"),
            None if matches!(self, Movement::Broadcast { .. }) => {
                broadcasts_to(op, inputs[0], y.layout.dims(), "x broadcasts to the dims of y")
            }
            None if inputs[0].layout.elements() != y.layout.elements() => Err(Error::Mismatch {
                op: op.to_owned(),
                tensor: y.name.clone(),
                quantity: "the number of elements".to_owned(),
                got: y.layout.elements(),
                want: inputs[0].layout.elements(),
                rule: "a reshape keeps the number of elements",
            }),
            None => Ok(()),
        }
    }

    /// The way back: what was moved goes to where it came from, what was added is dropped, what was repeated is summed.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(dy) = at.of(self.output()) else { return Ok(()) };
        let name = at.name.clone();
        match self {
            // Sums and dims are made right where a gradient is taken in.
            Movement::Reshape { x, .. } if at.wants(*x) => {
                let dims = at.dims(*x)?;
                let dx = at.graph.reshape(&name, dy, &dims)?;
                at.give(*x, dx)
            }
            Movement::Broadcast { x, .. } => at.give(*x, dy),
            Movement::Transpose { permutation, x, .. } if at.wants(*x) => {
                let mut inverse = vec![0; permutation.len()];
                permutation.iter().enumerate().for_each(|(i, &dim)| inverse[dim as usize] = i as u32);
                let dx = at.graph.transpose(&name, dy, &inverse)?;
                at.give(*x, dx)
            }
            Movement::Slice { starts, steps, x, .. } if at.wants(*x) => {
                let dims = at.dims(*x)?;
                let spread = spread(at, dy, starts, steps, &dims)?;
                let have = at.dims(spread)?;
                let after: Vec<u64> = (0..dims.len()).map(|i| dims[i] - starts[i] - have[i]).collect();
                let dx = if have == dims { spread } else { at.graph.pad(&name, spread, starts, &after, 0.0)? };
                at.give(*x, dx)
            }
            Movement::Pad { before, x, .. } if at.wants(*x) => {
                let dims = at.dims(*x)?;
                let stops: Vec<u64> = before.iter().zip(&dims).map(|(start, dim)| start + dim).collect();
                let dx = at.graph.slice(&name, dy, before, &stops, &vec![1; dims.len()])?;
                at.give(*x, dx)
            }
            Movement::Concat { axis, xs, .. } => {
                let along = *axis as usize;
                let (mut starts, mut stops) = (vec![0; at.dims(dy)?.len()], at.dims(dy)?);
                for &x in xs {
                    stops[along] = starts[along] + at.dims(x)?[along];
                    if at.wants(x) {
                        let dx = at.graph.slice(&name, dy, &starts, &stops, &vec![1; starts.len()])?;
                        at.give(x, dx)?;
                    }
                    starts[along] = stops[along];
                }
                Ok(())
            }
            Movement::Reshape { .. } | Movement::Transpose { .. } | Movement::Slice { .. } | Movement::Pad { .. } => Ok(()),
        }
    }
}

/// Elements at their distance again: `steps − 1` zeros after each along each dim, as far as dims that begin at `starts` reach.
fn spread(at: &mut Backward<'_>, x: Uid, starts: &[u64], steps: &[u64], dims: &[u64]) -> Result<Uid, Error> {
    let have = at.dims(x)?;
    let apart: Vec<u64> = (0..have.len()).map(|i| if have[i] > 1 { steps[i] } else { 1 }).collect();
    if apart.iter().all(|&step| step == 1) {
        return Ok(x);
    }
    let name = at.name.clone();
    // [a, b] becomes [a, 1, b, 1], then [a, step, b, step], then [a · step, b · step]. Dims without steps become one with their neighbours, so that two at a time
    // fit any rank.
    let mut joined = x;
    let mut whole = have.clone();
    let stepped: Vec<usize> = (0..have.len()).filter(|&i| apart[i] > 1).collect();
    let at_a_time = if have.len() + stepped.len() <= MAX_RANK { stepped.len() } else { 2 };
    for together in stepped.chunks(at_a_time) {
        let (mut single, mut after) = (Vec::new(), Vec::new());
        let mut is_open = false;
        for (i, &dim) in whole.iter().enumerate() {
            let has_steps = together.contains(&i);
            match single.last_mut().filter(|_| is_open && !has_steps) {
                Some(neighbours) => *neighbours *= dim,
                None => {
                    single.push(dim);
                    after.push(0);
                }
            }
            if has_steps {
                single.push(1);
                after.push(apart[i] - 1);
            }
            is_open = !has_steps;
        }
        let split = at.graph.reshape(&name, joined, &single)?;
        let padded = at.graph.pad(&name, split, &vec![0; single.len()], &after, 0.0)?;
        together.iter().for_each(|&i| whole[i] *= apart[i]);
        joined = at.graph.reshape(&name, padded, &whole)?;
    }
    let stops: Vec<u64> = (0..dims.len()).map(|i| whole[i].min(dims[i] - starts[i])).collect();
    if stops == whole {
        return Ok(joined);
    }
    at.graph.slice(&name, joined, &vec![0; dims.len()], &stops, &vec![1; dims.len()])
}
