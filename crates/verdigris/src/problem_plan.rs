//! One problem planned on a GPU: the program of the chosen way, loaded.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use verdigris_cuda::{Bindings, DeviceBuffer, DeviceSlice, LoadReport, LoadedProgram, Stream};
use verdigris_engines::engine::{Cost, EngineId, Knobs, Notes};
use verdigris_graph::binding::BoundTensor;
use verdigris_graph::{Access, Problem, Slot, Uid};
use verdigris_kir::execution::HostValue;
use verdigris_kir::ir::Ty;
use verdigris_tensor::DType;

use crate::binding::{Binding, Bound, Pair};
use crate::error::Error;
use crate::observe::{Meter, Wants, Watch};
use crate::select::Ranked;

/// Most slots of a problem: bindings are laid out on the stack.
pub const MAX_SLOTS: usize = 32;

/// A problem on a GPU, with all that its caller may want to know of it. It never changes: any number of threads may execute it at
/// once, on any streams, each execution with a workspace of its own; a stream that captures records it.
#[derive(Debug)]
pub struct ProblemPlan {
    engine: EngineId,
    knobs: Knobs,
    notes: Notes,
    cost: Cost,
    program: LoadedProgram,
    /// Slots as tensors, whose uids are their numbers.
    bound: Bound,
    nothing: Arc<DeviceBuffer>,
    meter: Arc<Meter>,
    watch: Arc<Watch>,
    /// Executions while somebody listened.
    turns: AtomicU64,
}

impl ProblemPlan {
    pub(crate) fn new(
        problem: &Problem,
        way: &Ranked,
        program: LoadedProgram,
        nothing: Arc<DeviceBuffer>,
        watch: &Arc<Watch>,
    ) -> Result<ProblemPlan, Error> {
        let mut bound = bound(problem)?;
        // Who binds a problem's slots gives an integer where a kernel takes one.
        for need in program.numbers().iter().filter(|need| !matches!(need.ty, Ty::F32 | Ty::F64)) {
            if let Some(tensor) = bound.tensors.get_mut(need.index) {
                tensor.dtype = DType::I64;
            }
        }
        for (tensor, need) in bound.tensors.iter_mut().zip(program.slots()) {
            tensor.bytes = tensor.bytes.max(need.bytes);
            (tensor.alignment_bytes, tensor.least_alignment_bytes) = (need.alignment_bytes, need.alignment_bytes);
        }
        let (engine, knobs, notes, cost) = (way.engine, way.knobs.clone(), way.notes, way.cost);
        let (meter, watch, turns) = (watch.meter(problem, way), Arc::clone(watch), AtomicU64::new(0));
        Ok(ProblemPlan { engine, knobs, notes, cost, program, bound, nothing, meter, watch, turns })
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
        self.program.workspace_bytes()
    }

    /// The program on the device.
    pub fn program(&self) -> &LoadedProgram {
        &self.program
    }

    /// For each launch in order: the kernel, and where it came from.
    pub fn reports(&self) -> &[(String, LoadReport)] {
        self.program.reports()
    }

    /// Submits the computation to the stream and returns without waiting. `bindings` has one entry a slot of the problem, in their order.
    ///
    /// Checked before anything is submitted: kinds and lengths of the bindings, alignments, the workspace, and that no output
    /// shares bytes with another operand (but for the same elements in the same place). Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Binding`], [`Error::Device`].
    pub fn execute(&self, stream: &Stream, bindings: &[Binding<'_>], workspace: DeviceSlice<'_>) -> Result<(), Error> {
        let mut places = [0; MAX_SLOTS];
        self.bound.check(bindings.len(), |slot| (Uid(slot as i64), &bindings[slot]), &mut places)?;
        crate::workspace::check(self.workspace_bytes(), workspace)?;
        let mut buffers = [self.nothing.slice(); MAX_SLOTS];
        let mut scalars = [HostValue::Real(0.0); MAX_SLOTS];
        for (slot, binding) in bindings.iter().enumerate() {
            binding.lend(&mut buffers[slot], &mut scalars[slot]);
        }
        let submit = || self.submit(stream, &buffers[..bindings.len()], &scalars[..bindings.len()], workspace);
        let samples = self.watch.samples();
        match samples.wants(&self.turns, 1, stream) {
            Wants::Nothing => submit()?,
            Wants::Mark => {
                submit()?;
                samples.mark(&self.meter, self.meter.estimate_us, stream);
            }
            Wants::Times(sampled) => {
                let _execute = sampled.span(&self.meter.name, self.watch.device()).entered();
                sampled.events()[0].record(stream)?;
                submit()?;
                sampled.events()[1].record(stream)?;
                samples.keep(sampled, vec![Arc::clone(&self.meter)], stream);
            }
        }
        Ok(())
    }

    /// What each slot is bound to, as a tensor whose uid is the slot's number. A host scalar that kernels take as an integer is one of `i64`, a
    /// factor one of `f64`.
    pub fn tensors(&self) -> &[BoundTensor] {
        &self.bound.tensors
    }

    pub(crate) fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    /// Submits with bindings that were checked.
    pub(crate) fn submit(
        &self,
        stream: &Stream,
        buffers: &[DeviceSlice<'_>],
        host_scalars: &[HostValue],
        workspace: DeviceSlice<'_>,
    ) -> Result<(), Error> {
        self.meter.count();
        Ok(self.program.execute(stream, &Bindings { buffers, workspace, host_scalars, lists: &[] })?)
    }
}

/// What each slot must be bound to, as tensors in the order of the slots.
fn bound(problem: &Problem) -> Result<Bound, Error> {
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
    let tensor = |slot: usize| BoundTensor {
        uid: Uid(slot as i64),
        name: format!("slot {slot}"),
        dtype: DType::F32,
        is_scalar: false,
        is_written: false,
        bytes: 0,
        alignment_bytes: 1,
        least_alignment_bytes: 1,
    };
    let mut tensors: Vec<BoundTensor> = (0..count).map(tensor).collect();
    for operand in problem.buffers()? {
        let tensor = &mut tensors[operand.slot.0 as usize];
        tensor.dtype = operand.dtype;
        tensor.bytes = u64::try_from(operand.span_bytes()).unwrap_or(u64::MAX).max(tensor.bytes);
        tensor.is_written |= operand.access == Access::Written;
    }
    for slot in problem.scalars() {
        let tensor = &mut tensors[slot.0 as usize];
        // A factor, which a graph may have as an integer; or a random state, which the program tells.
        (tensor.is_scalar, tensor.dtype, tensor.bytes) = (true, DType::F64, 0);
    }
    Ok(Bound::of(tensors, pairs(problem)?))
}

/// Every output beside every operand of another slot.
fn pairs(problem: &Problem) -> Result<Vec<Pair>, Error> {
    let buffers = problem.buffers()?;
    let is_written = |slot: Slot| buffers.iter().any(|other| other.slot == slot && other.access == Access::Written);
    let mut list = Vec::new();
    for output in buffers.iter().filter(|operand| operand.access == Access::Written) {
        for other in &buffers {
            if other.slot == output.slot || (is_written(other.slot) && other.slot < output.slot) {
                continue;
            }
            let may_share = !is_written(other.slot) && other.gives_way_to(output);
            let pair = Pair { output: output.slot.0 as usize, other: other.slot.0 as usize, may_share, must_share: false };
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
        let tensors = bound(&problem()).expect("six slots").tensors;
        let facts: Vec<_> = tensors.iter().map(|tensor| (tensor.is_scalar, tensor.is_written, tensor.bytes)).collect();
        let read = |bytes| (false, false, bytes);
        assert_eq!(facts, [read(60), read(80), read(48), (true, false, 0), read(16), (false, true, 48)]);
    }

    #[test]
    fn only_what_is_read_element_by_element_may_lie_under_an_output() {
        let pairs = pairs(&problem()).expect("a canonical problem");
        let same: Vec<usize> = pairs.iter().filter(|pair| pair.may_share).map(|pair| pair.other).collect();
        assert_eq!(same, [2], "C lies as D does; the bias does not; A and B never may");
        assert_eq!(pairs.len(), 4);
        assert!(pairs.iter().all(|pair| pair.output == 5));
    }
}
