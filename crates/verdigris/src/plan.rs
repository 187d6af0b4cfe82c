//! A chosen way to compute a problem, ready to run.

use std::sync::Arc;

use verdigris_cuda::{Bindings, DeviceBuffer, DeviceSlice, Executable, LoadReport, Loaded, Stream};
use verdigris_engines::engine::{Cost, EngineId, Knobs, Notes};
use verdigris_graph::{Access, Problem, Slot};
use verdigris_tensor::layout::ranges_overlap;

use crate::error::{BindingError, Error};
use crate::select::Ranked;

/// Most slots of a problem: bindings are laid out on the stack.
pub const MAX_SLOTS: usize = 32;

/// What one slot of a problem is bound to.
#[derive(Clone, Copy, Debug)]
pub enum Binding<'a> {
    /// Memory, from the operand's first element on.
    Buffer(DeviceSlice<'a>),
    /// A host scalar; rounded to f32 where kernels compute in f32.
    Scalar(f64),
}

/// A program on a device, with all that its caller may want to know of it. It never changes: any number of threads may execute it at
/// once, on any streams, each execution with a workspace of its own; a stream that captures records it.
#[derive(Debug)]
pub struct Plan {
    engine: EngineId,
    knobs: Knobs,
    notes: Notes,
    cost: Cost,
    executable: Executable,
    reports: Vec<(String, LoadReport)>,
    slots: Vec<SlotFact>,
    sharing: Vec<Sharing>,
    nothing: Arc<DeviceBuffer>,
}

/// What a slot must be bound to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SlotFact {
    /// At least so many bytes.
    Buffer {
        bytes: u64,
    },
    Scalar,
}

/// An output and an operand in another slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sharing {
    output: usize,
    other: usize,
    /// Both are the same elements, if they begin at the same place; and the other one is only read.
    same_elements: bool,
}

impl Plan {
    pub(crate) fn new(problem: &Problem, way: &Ranked, loaded: Loaded, nothing: Arc<DeviceBuffer>) -> Result<Plan, Error> {
        let slots = slot_facts(problem)?;
        Ok(Plan {
            engine: way.engine,
            knobs: way.knobs.clone(),
            notes: way.notes,
            cost: way.cost,
            executable: loaded.executable,
            reports: loaded.reports,
            sharing: sharing(problem)?,
            slots,
            nothing,
        })
    }

    /// Whose algorithm it is.
    pub fn engine(&self) -> EngineId {
        self.engine
    }

    /// The engine's setting.
    pub fn knobs(&self) -> &Knobs {
        &self.knobs
    }

    /// What the result is like beyond its values.
    pub fn notes(&self) -> &Notes {
        &self.notes
    }

    /// The time that was estimated when it was chosen.
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// The workspace that each execution needs, at a multiple of 256 bytes.
    pub fn workspace_bytes(&self) -> u64 {
        self.executable.workspace_bytes()
    }

    /// The program on the device.
    pub fn executable(&self) -> &Executable {
        &self.executable
    }

    /// For each launch in order: the kernel, and where it came from.
    pub fn reports(&self) -> &[(String, LoadReport)] {
        &self.reports
    }

    /// Submits the computation to the stream and returns without waiting. `bindings` has one entry a slot of the problem, in their order.
    ///
    /// Checked before anything is submitted: kinds and lengths of the bindings, declared alignments, the workspace, and that no output
    /// shares bytes with another operand (but for the same elements in the same place). Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Binding`], [`Error::Device`].
    pub fn execute(&self, stream: &Stream, bindings: &[Binding<'_>], workspace: DeviceSlice<'_>) -> Result<(), Error> {
        let mut buffers = [self.nothing.slice(); MAX_SLOTS];
        let mut scalars = [0.0_f64; MAX_SLOTS];
        let (given, needed) = (bindings.len(), self.slots.len());
        if given != needed {
            return Err(BindingError::Count { given, needed }.into());
        }
        for (slot, (binding, fact)) in bindings.iter().zip(&self.slots).enumerate() {
            match (binding, fact) {
                (Binding::Buffer(slice), SlotFact::Buffer { bytes }) => {
                    if slice.len_bytes() < *bytes {
                        return Err(BindingError::Length { slot, given_bytes: slice.len_bytes(), needed_bytes: *bytes }.into());
                    }
                    buffers[slot] = *slice;
                }
                (Binding::Scalar(value), SlotFact::Scalar) => scalars[slot] = *value,
                (Binding::Buffer(_), SlotFact::Scalar) => {
                    return Err(BindingError::Kind { slot, needed: "a host scalar", given: "a buffer" }.into());
                }
                (Binding::Scalar(_), SlotFact::Buffer { .. }) => {
                    return Err(BindingError::Kind { slot, needed: "a buffer", given: "a host scalar" }.into());
                }
            }
        }
        for &Sharing { output, other, same_elements } in &self.sharing {
            let range = |slot: usize| match self.slots[slot] {
                SlotFact::Buffer { bytes } => (buffers[slot].address(), u128::from(bytes)),
                SlotFact::Scalar => (0, 0),
            };
            let same_place = same_elements && buffers[output].address() == buffers[other].address();
            if !same_place && ranges_overlap(range(output), range(other)) {
                return Err(BindingError::Overlap { output, other }.into());
            }
        }
        self.submit(stream, &buffers[..needed], &scalars[..needed], workspace)
    }

    /// Submits with bindings that were checked.
    pub(crate) fn submit(
        &self,
        stream: &Stream,
        buffers: &[DeviceSlice<'_>],
        host_scalars: &[f64],
        workspace: DeviceSlice<'_>,
    ) -> Result<(), Error> {
        Ok(self.executable.execute(stream, &Bindings { buffers, workspace, host_scalars })?)
    }
}

/// What each slot must be bound to, by number.
fn slot_facts(problem: &Problem) -> Result<Vec<SlotFact>, Error> {
    let count = problem.slots().iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0);
    if count > MAX_SLOTS {
        return Err(verdigris_graph::Error::Attribute {
            op: problem.kind().to_owned(),
            attribute: "slots",
            value: count.to_string(),
            rule: "a problem has at most 32 operands and host scalars",
        }
        .into());
    }
    let mut facts = vec![SlotFact::Buffer { bytes: 0 }; count];
    for operand in problem.buffers()? {
        if let SlotFact::Buffer { bytes: known } = &mut facts[operand.slot.0 as usize] {
            *known = u64::try_from(operand.span_bytes()).unwrap_or(u64::MAX).max(*known);
        }
    }
    for slot in problem.scalars() {
        facts[slot.0 as usize] = SlotFact::Scalar;
    }
    Ok(facts)
}

/// Every output beside every operand of another slot.
fn sharing(problem: &Problem) -> Result<Vec<Sharing>, Error> {
    let buffers = problem.buffers()?;
    let is_written = |slot: Slot| buffers.iter().any(|other| other.slot == slot && other.access == Access::Written);
    let mut list = Vec::new();
    for output in buffers.iter().filter(|operand| operand.access == Access::Written) {
        for other in &buffers {
            if other.slot == output.slot || (is_written(other.slot) && other.slot < output.slot) {
                continue;
            }
            let same_elements = other.access == Access::ReadInPlace && !is_written(other.slot) && other.is_same_elements(output);
            let pair = Sharing { output: output.slot.0 as usize, other: other.slot.0 as usize, same_elements };
            if !list.contains(&pair) {
                list.push(pair);
            }
        }
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::{BinaryOp, EpilogueStep, GemmProblem, HostScalar, Matrix, Real};
    use verdigris_tensor::DType;

    fn problem() -> Problem {
        let mut gemm = GemmProblem::packed(3, 4, 5, DType::F32, DType::F32).expect("a plain product");
        gemm.c = Some(Matrix::row_major(Slot(2), DType::F32, 4));
        gemm.alpha = HostScalar::Bound(Slot(3));
        gemm.beta = HostScalar::Fixed(Real(1.0));
        let bias = Matrix { row_stride: 0, column_stride: 1, ..Matrix::row_major(Slot(4), DType::F32, 4) };
        gemm.epilogue.push(EpilogueStep::Binary { f: BinaryOp::Add, operand: bias, v_is_right: false });
        gemm.d.slot = Slot(5);
        Problem::Gemm(gemm.canonical().expect("canonical"))
    }

    #[test]
    fn slots_know_their_kind_and_length() {
        let facts = slot_facts(&problem()).expect("six slots");
        let buffer = |bytes| SlotFact::Buffer { bytes };
        assert_eq!(facts, [buffer(60), buffer(80), buffer(48), SlotFact::Scalar, buffer(16), buffer(48)]);
    }

    #[test]
    fn only_what_is_read_element_by_element_may_lie_under_an_output() {
        let pairs = sharing(&problem()).expect("a canonical problem");
        let same: Vec<usize> = pairs.iter().filter(|pair| pair.same_elements).map(|pair| pair.other).collect();
        assert_eq!(same, [2], "C lies as D does; the bias does not; A and B never may");
        assert_eq!(pairs.len(), 4);
        assert!(pairs.iter().all(|pair| pair.output == 5));
    }
}
