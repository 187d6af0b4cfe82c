//! A problem and its inputs → what its outputs must be.

use std::collections::BTreeMap;

use verdigris_graph::{EpilogueStep, GemmProblem, HostScalar, Matrix, Precision, Problem, Scale, Slot, UnaryOp};
use verdigris_tensor::{DType, Layout, num};

use crate::ops::matmul::{Elements, Sum, sum_of_products};
use crate::philox::{Numbers, State};
use crate::tolerance::{self, Bounded};

/// What the slots of a problem, or with [`verdigris_graph::Uid`]s the tensors of a graph, are bound to.
#[derive(Clone, PartialEq, Debug)]
pub struct Inputs<Id = Slot> {
    /// Bytes of the buffers that are read, from the first element on; they may be longer than needed.
    pub buffers: BTreeMap<Id, Vec<u8>>,
    /// Host scalars.
    pub scalars: BTreeMap<Id, f64>,
}

impl<Id> Default for Inputs<Id> {
    fn default() -> Inputs<Id> {
        Inputs { buffers: BTreeMap::new(), scalars: BTreeMap::new() }
    }
}

/// Which elements of the outputs are wanted.
#[derive(Clone, Copy, Debug)]
pub enum Positions<'a> {
    /// All of them.
    All,
    /// These, counted row-major over `[batch…, m, n]`: for outputs too large to compute whole. Positions past the end are skipped.
    Some(&'a [u64]),
}

/// Inputs that do not fit the problem.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RunError {
    /// A slot that is read has no buffer.
    #[error("{name} ({slot}) is read, but no buffer is bound to it")]
    NoBuffer {
        /// The operand.
        name: &'static str,
        /// Its slot.
        slot: Slot,
    },
    /// A buffer ends before the operand does.
    #[error("{name} ({slot}) spans {need_bytes} bytes, but its buffer has {have_bytes}")]
    ShortBuffer {
        /// The operand.
        name: &'static str,
        /// Its slot.
        slot: Slot,
        /// Bytes bound.
        have_bytes: u64,
        /// Bytes needed.
        need_bytes: u128,
    },
    /// A host scalar is not bound.
    #[error("{slot} is a host scalar, but no value is bound to it")]
    NoScalar {
        /// Its slot.
        slot: Slot,
    },
    /// A kind of problem whose truth is that of the graph it was cut from.
    #[error("a problem of kind {kind} has no reference of its own; evaluate its graph")]
    Kind {
        /// The kind.
        kind: &'static str,
    },
    /// Strides that cannot be.
    #[error(transparent)]
    Layout(#[from] verdigris_tensor::LayoutError),
}

/// What one output must be.
#[derive(Clone, PartialEq, Debug)]
pub struct Expected<Id = Slot> {
    /// The output: the slot of its buffer in a problem, its uid in a graph.
    pub id: Id,
    /// Its element type.
    pub dtype: DType,
    /// Its elements in the buffer; `[batch…, m, n]` in a GEMM.
    pub layout: Layout,
    /// Row-major position of each entry below. Ascending for [`Positions::All`].
    pub positions: Vec<u64>,
    /// Value and error bound of each element, before rounding to `dtype`.
    pub values: Vec<Bounded>,
    /// `Σ|a|·|b|` of each element; empty for a graph.
    pub magnitudes: Vec<f64>,
}

impl<Id> Expected<Id> {
    /// A copy of `before` in which every expected element is written, correctly rounded: the best answer there is.
    pub fn rounded(&self, before: &[u8]) -> Vec<u8> {
        let mut after = before.to_vec();
        for (position, bounded) in self.positions.iter().zip(&self.values) {
            let place = self.layout.offset_of_position(*position).map(|offset| offset as usize * self.dtype.bytes());
            if let Some(bytes) = place.and_then(|start| after.get_mut(start..)) {
                // A buffer too short is what `compare` reports.
                let _ = num::write_element(self.dtype, bounded.value, bytes);
            }
        }
        after
    }
}

/// Computes a problem's outputs, auxiliary ones first, D last (the order of [`GemmProblem::outputs`]).
///
/// # Errors
/// A buffer or scalar that is missing or too short.
pub fn run(problem: &Problem, inputs: &Inputs, positions: Positions<'_>) -> Result<Vec<Expected>, RunError> {
    match problem {
        Problem::Gemm(gemm) => run_gemm(gemm, inputs, positions),
        _ => Err(RunError::Kind { kind: problem.kind() }),
    }
}

fn run_gemm(gemm: &GemmProblem, inputs: &Inputs, positions: Positions<'_>) -> Result<Vec<Expected>, RunError> {
    let sources = Sources { gemm, inputs };
    let (m, n, k) = (gemm.m, gemm.n, gemm.k);
    let a = sources.matrix("a", &gemm.a, m, k)?;
    let b = sources.matrix("b", &gemm.b, k, n)?;
    let alpha = sources.scalar(gemm.alpha)?;
    let beta = sources.scalar(gemm.beta)?;
    let c = match &gemm.c {
        Some(c) if beta != 0.0 => Some((c, sources.matrix("c", c, m, n)?)),
        _ => None,
    };
    let scale_a = sources.scale("scale_a", gemm.scale_a.as_ref(), m)?;
    let scale_b = sources.scale("scale_b", gemm.scale_b.as_ref(), n)?;
    let is_scaled = gemm.scale_a.is_some() || gemm.scale_b.is_some();
    let steps = sources.steps()?;

    let dims: Vec<u64> = gemm.batch.iter().copied().chain([m, n]).collect();
    let all = Layout::row_major(&dims)?;
    let positions: Vec<u64> = match positions {
        Positions::All => (0..all.elements()).collect(),
        Positions::Some(list) => list.iter().copied().filter(|&position| position < all.elements()).collect(),
    };
    let mut outputs = Vec::new();
    for output in gemm.outputs() {
        outputs.push(Expected {
            id: output.slot,
            dtype: output.dtype,
            layout: output.layout(&gemm.batch, m, n)?,
            positions: positions.clone(),
            values: Vec::with_capacity(positions.len()),
            magnitudes: Vec::with_capacity(positions.len()),
        });
    }

    let epilogue = gemm.precision.epilogue();
    let bits = tolerance::significant_bits(gemm.d.dtype);
    let mut batch = vec![0; gemm.batch.len()];
    for &position in &positions {
        let (row, column) = (position / n % m, position % n);
        let mut rest = position / n / m;
        for (index, &extent) in batch.iter_mut().zip(&gemm.batch).rev() {
            *index = rest % extent;
            rest /= extent;
        }

        let (a_base, b_base) = (gemm.a.offset(&batch, row, 0), gemm.b.offset(&batch, 0, column));
        let (a_step, b_step) = (gemm.a.column_stride, gemm.b.row_stride);
        let sum = match (a.decoded(), b.decoded(), scale_a.whole(), scale_b.whole()) {
            // What nearly every problem is.
            (Some(a), Some(b), Some(scale_a), Some(scale_b)) => {
                let number = |values: &[f64], offset: u64| values.get(offset as usize).copied().unwrap_or(f64::NAN);
                sum_of_products(k, |i| number(a, a_base + i * a_step) * scale_a, |i| number(b, b_base + i * b_step) * scale_b)
            }
            _ => sum_of_products(
                k,
                |i| a.at(a_base + i * a_step) * scale_a.at(&batch, row, i),
                |i| b.at(b_base + i * b_step) * scale_b.at(&batch, column, i),
            ),
        };
        let mut v = tolerance::of_sum(gemm.precision, gemm.a.dtype, k, is_scaled, sum);
        if gemm.precision == Precision::I32 {
            v = integer_sum(sum, gemm.is_exact_integer());
        }
        if alpha != 1.0 {
            v = v.scaled(alpha, epilogue);
        }
        if let Some((c_matrix, c)) = &c {
            let addend = Bounded::exact(c.at(c_matrix.offset(&batch, row, column))).scaled(beta, epilogue);
            v = v.binary(verdigris_graph::BinaryOp::Add, addend, false, bits, epilogue);
        }
        let mut next_output = 0;
        for step in &steps {
            match step {
                Step::Plain(EpilogueStep::Unary(f)) => v = v.unary(*f, bits, epilogue),
                Step::Plain(EpilogueStep::Round { dtype }) => v = v.rounded(*dtype, epilogue),
                Step::Plain(EpilogueStep::Store { .. }) => {
                    outputs[next_output].values.push(v);
                    outputs[next_output].magnitudes.push(sum.magnitude);
                    next_output += 1;
                }
                Step::Plain(EpilogueStep::Binary { .. } | EpilogueStep::Random { .. } | EpilogueStep::Scale { .. }) => {}
                Step::Random { f, v_is_right, number, numbers, through } => {
                    let drawn = numbers.of_number(number.offset(&batch, row, column).into());
                    let drawn = through.iter().fold(drawn, |drawn, f| drawn.unary(*f, bits, epilogue));
                    v = v.binary(*f, drawn, *v_is_right, bits, epilogue);
                }
                Step::Scale(factor) => v = v.scaled(*factor, epilogue),
                Step::Binary { f, operand, elements, v_is_right } => {
                    let z = Bounded::exact(elements.at(operand.offset(&batch, row, column)));
                    v = v.binary(*f, z, *v_is_right, bits, epilogue);
                }
            }
        }
        outputs[next_output].values.push(v);
        outputs[next_output].magnitudes.push(sum.magnitude);
    }
    Ok(outputs)
}

/// An exact sum of small integers: wrapped if it is the result, converted to f32 if the epilogue goes on with it.
fn integer_sum(sum: Sum, is_result: bool) -> Bounded {
    let wrapped = f64::from(sum.value as i64 as i32);
    if is_result { Bounded::exact(wrapped) } else { Bounded::exact(f64::from(wrapped as f32)) }
}

/// An epilogue step with what it reads.
enum Step<'a> {
    Plain(&'a EpilogueStep),
    Scale(f64),
    Binary { f: verdigris_graph::BinaryOp, operand: &'a Matrix, elements: Elements<'a>, v_is_right: bool },
    Random { f: verdigris_graph::BinaryOp, v_is_right: bool, number: &'a Matrix, numbers: Numbers, through: &'a [UnaryOp] },
}

/// The factors of one operand.
enum Factors<'a> {
    One,
    Tensor(f64),
    Block { outer: u64, k: u64, matrix: &'a Matrix, elements: Elements<'a> },
}

impl Factors<'_> {
    /// The factor, if it is one for all elements.
    fn whole(&self) -> Option<f64> {
        match self {
            Factors::One => Some(1.0),
            Factors::Tensor(factor) => Some(*factor),
            Factors::Block { .. } => None,
        }
    }

    #[inline]
    fn at(&self, batch: &[u64], outer_index: u64, k_index: u64) -> f64 {
        match self {
            Factors::One => 1.0,
            Factors::Tensor(factor) => *factor,
            Factors::Block { outer, k, matrix, elements } => elements.at(matrix.offset(batch, outer_index / outer, k_index / k)),
        }
    }
}

struct Sources<'a> {
    gemm: &'a GemmProblem,
    inputs: &'a Inputs,
}

impl<'a> Sources<'a> {
    fn bytes(&self, name: &'static str, slot: Slot, need_bytes: u128) -> Result<&'a [u8], RunError> {
        if need_bytes == 0 {
            return Ok(&[]);
        }
        let bytes = self.inputs.buffers.get(&slot).ok_or(RunError::NoBuffer { name, slot })?;
        if (bytes.len() as u128) < need_bytes {
            return Err(RunError::ShortBuffer { name, slot, have_bytes: bytes.len() as u64, need_bytes });
        }
        Ok(bytes)
    }

    fn matrix(&self, name: &'static str, matrix: &Matrix, rows: u64, columns: u64) -> Result<Elements<'a>, RunError> {
        let span_bytes = matrix.layout(&self.gemm.batch, rows, columns)?.span_bytes(matrix.dtype);
        Ok(Elements::new(matrix.dtype, self.bytes(name, matrix.slot, span_bytes)?))
    }

    fn scalar(&self, scalar: HostScalar<Slot>) -> Result<f64, RunError> {
        match scalar {
            HostScalar::Fixed(real) => Ok(real.0),
            HostScalar::Bound(slot) => self.inputs.scalars.get(&slot).copied().ok_or(RunError::NoScalar { slot }),
        }
    }

    fn scale(&self, name: &'static str, scale: Option<&'a Scale>, extent: u64) -> Result<Factors<'a>, RunError> {
        match scale {
            None => Ok(Factors::One),
            Some(Scale::Tensor { slot }) => {
                let bytes = self.bytes(name, *slot, 4)?;
                Ok(Factors::Tensor(Elements::new(DType::F32, bytes).at(0)))
            }
            Some(Scale::Block { outer, k, factors }) => {
                let (rows, columns) = (extent.div_ceil(*outer), self.gemm.k.div_ceil(*k));
                let elements = self.matrix(name, factors, rows, columns)?;
                Ok(Factors::Block { outer: *outer, k: *k, matrix: factors, elements })
            }
        }
    }

    fn steps(&self) -> Result<Vec<Step<'a>>, RunError> {
        let gemm = self.gemm;
        (gemm.epilogue.iter())
            .map(|step| match step {
                EpilogueStep::Scale { factor } => Ok(Step::Scale(self.scalar(*factor)?)),
                EpilogueStep::Binary { f, operand, v_is_right } => Ok(Step::Binary {
                    f: *f,
                    operand,
                    elements: self.matrix("epilogue operand", operand, gemm.m, gemm.n)?,
                    v_is_right: *v_is_right,
                }),
                EpilogueStep::Random { f, v_is_right, distribution, number, offset, through } => Ok(Step::Random {
                    f: *f,
                    v_is_right: *v_is_right,
                    number,
                    numbers: match offset {
                        Some(offset) => {
                            let [seed, offset] = [number.slot, *offset].map(|slot| self.scalar(HostScalar::Bound(slot)));
                            Numbers::new(*distribution, State::by_value([seed?, offset?]), &[])
                        }
                        None => {
                            let words = Elements::new(DType::I32, self.bytes("random state", number.slot, 16)?);
                            Numbers::new(*distribution, State::of_words(true, |i| (words.at(i) as i64).rem_euclid(1 << 32) as u64), &[])
                        }
                    },
                    through,
                }),
                plain => Ok(Step::Plain(plain)),
            })
            .collect()
    }
}
