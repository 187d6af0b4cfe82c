//! A graph made ready on either kind of device, run on memory that others own.

use verdigris::error::BindingError;
use verdigris::{Binding, GraphPlan};
use verdigris_cuda::{DeviceSlice, Stream};
use verdigris_graph::{Graph, TensorDesc, Uid};
use verdigris_tensor::layout::ranges_overlap;

use crate::device::{Gpu, State};

/// What is bound to a tensor of the graph.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Bound {
    /// The address of its first element, and the bytes from there.
    Memory { address: u64, bytes: u64 },
    /// The value of a host scalar.
    Scalar(f64),
}

/// A tensor that is bound.
#[derive(Clone, Debug)]
pub(crate) struct Fact {
    pub(crate) desc: TensorDesc,
    pub(crate) is_written: bool,
}

/// A graph made ready.
pub(crate) struct Ready {
    way: Way,
    /// Every tensor that is read or written and not virtual, in the order of the graph's list.
    pub(crate) tensors: Vec<Fact>,
    /// On a GPU, for each of the plan's tensors its place in `tensors`; problems in canonical form may need fewer.
    places: Vec<usize>,
}

pub(crate) enum Way {
    Cpu(Box<verdigris_cpu::Prepared>),
    Gpu(Box<GraphPlan>),
}

/// Memory for an execution.
pub(crate) enum Workspace {
    /// So many bytes from an address on.
    Lent { address: u64, bytes: u64 },
    /// From the device's own pool, in the order of the stream.
    Pool,
}

impl Ready {
    /// Makes a graph ready.
    pub(crate) fn make(
        state: &State,
        graph: &Graph,
        policy: &verdigris::Policy,
        watch: &mut dyn FnMut(verdigris::Progress),
    ) -> Result<Ready, verdigris::Error> {
        let way = match &state.gpu {
            None => Way::Cpu(Box::new(verdigris_cpu::Prepared::new(graph)?)),
            Some(gpu) => Way::Gpu(Box::new(gpu.handle.plan_graph_watched(graph, policy, watch)?)),
        };
        let written: Vec<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
        let read: Vec<Uid> = graph.nodes.iter().flat_map(|node| node.op.inputs()).collect();
        let named = |tensor: &&TensorDesc| !tensor.is_virtual && (written.contains(&tensor.uid) || read.contains(&tensor.uid));
        let fact = |desc: &TensorDesc| Fact { desc: desc.clone(), is_written: written.contains(&desc.uid) };
        let tensors: Vec<Fact> = graph.tensors.iter().filter(named).map(fact).collect();
        let places = match &way {
            Way::Cpu(_) => Vec::new(),
            Way::Gpu(plan) => {
                let place = |uid: Uid| tensors.iter().position(|fact| fact.desc.uid == uid).unwrap_or(0);
                plan.tensors().iter().map(|tensor| place(tensor.uid)).collect()
            }
        };
        Ok(Ready { way, tensors, places })
    }

    pub(crate) fn way(&self) -> &Way {
        &self.way
    }

    /// The workspace of an execution on a GPU, at a multiple of 256 bytes. The CPU keeps its own.
    pub(crate) fn workspace_bytes(&self) -> u64 {
        match &self.way {
            Way::Cpu(_) => 0,
            Way::Gpu(plan) => plan.workspace_bytes(),
        }
    }

    /// Computes on the calling thread, and returns when it is done.
    ///
    /// # Safety
    /// Each address is that of so many bytes of host memory, which nobody writes meanwhile and, where the graph writes them, nobody reads.
    pub(crate) unsafe fn run_on_cpu(&self, bound: &[Bound]) -> Result<Option<verdigris_cpu::RunReport>, verdigris::Error> {
        let Way::Cpu(prepared) = &self.way else { return Ok(None) };
        self.check(bound)?;
        let mut bindings = verdigris_cpu::Bindings::new();
        for (fact, bound) in self.tensors.iter().zip(bound) {
            let uid = fact.desc.uid;
            match *bound {
                Bound::Scalar(value) => {
                    bindings.scalar(uid, value);
                }
                Bound::Memory { address, bytes } => {
                    // An empty slice may not be at null.
                    let start = if bytes == 0 { std::ptr::dangling_mut::<u8>() } else { address as *mut u8 };
                    let bytes = bytes as usize;
                    if fact.is_written {
                        // SAFETY: the caller vouches for the memory, and `check` saw that no other tensor shares a byte with it.
                        bindings.output(uid, unsafe { std::slice::from_raw_parts_mut(start, bytes) });
                    } else {
                        // SAFETY: as above; what is only read may be shared.
                        bindings.input(uid, unsafe { std::slice::from_raw_parts(start, bytes) });
                    }
                }
            }
        }
        Ok(Some(prepared.run(&mut bindings)?))
    }

    /// Submits to the stream, and returns without waiting.
    ///
    /// # Safety
    /// Each address is that of so many bytes of the device's memory, until the stream's work is done with them.
    pub(crate) unsafe fn submit(&self, gpu: &Gpu, stream: &Stream, bound: &[Bound], workspace: Workspace) -> Result<(), verdigris::Error> {
        let Way::Gpu(plan) = &self.way else { return Ok(()) };
        // Most plans have a handful of tensors, which need no allocation.
        let mut few = [(Uid(0), Binding::Scalar(0.0)); 8];
        let mut many = Vec::new();
        let list: &mut [(Uid, Binding<'_>)] = if plan.tensors().len() <= few.len() {
            &mut few[..plan.tensors().len()]
        } else {
            many.resize(plan.tensors().len(), (Uid(0), Binding::Scalar(0.0)));
            &mut many
        };
        for ((place, tensor), slot) in self.places.iter().zip(plan.tensors()).zip(list.iter_mut()) {
            *slot = (tensor.uid, binding(bound[*place]));
        }
        match workspace {
            Workspace::Pool => plan.execute_from(stream, list, gpu.handle.pool()),
            // SAFETY: the caller vouches for it.
            Workspace::Lent { address, bytes } => plan.execute(stream, list, unsafe { DeviceSlice::from_raw(address, bytes) }),
        }
    }

    /// As [`Ready::submit`] with memory of the pool, and waits: the microseconds of each part.
    ///
    /// # Safety
    /// As [`Ready::submit`].
    pub(crate) unsafe fn time(&self, gpu: &Gpu, stream: &Stream, bound: &[Bound]) -> Result<Vec<f64>, verdigris::Error> {
        let Way::Gpu(plan) = &self.way else { return Ok(Vec::new()) };
        let tensors = self.places.iter().zip(plan.tensors());
        let list: Vec<(Uid, Binding<'_>)> = tensors.map(|(place, tensor)| (tensor.uid, binding(bound[*place]))).collect();
        let workspace = gpu.handle.pool().alloc(stream, plan.workspace_bytes())?;
        plan.execute_timed(stream, &list, workspace.slice())
    }

    /// What the CPU device cannot see in slices: null pointers, and outputs that share bytes with another tensor.
    fn check(&self, bound: &[Bound]) -> Result<(), BindingError> {
        let range = |i: usize| match bound[i] {
            Bound::Memory { address, bytes } => (address, u128::from(bytes)),
            Bound::Scalar(_) => (0, 0),
        };
        for (i, fact) in self.tensors.iter().enumerate() {
            let (address, bytes) = range(i);
            if address == 0 && bytes > 0 {
                return Err(BindingError::Null { tensor: fact.desc.name.clone() });
            }
            if !fact.is_written {
                continue;
            }
            for (j, other) in self.tensors.iter().enumerate() {
                if i != j && !(other.is_written && j < i) && ranges_overlap(range(i), range(j)) {
                    return Err(BindingError::TensorOverlap { output: fact.desc.name.clone(), other: other.desc.name.clone() });
                }
            }
        }
        Ok(())
    }
}

fn binding<'a>(bound: Bound) -> Binding<'a> {
    match bound {
        // SAFETY: the callers of this module's functions vouch for each address.
        Bound::Memory { address, bytes } => Binding::Buffer(unsafe { DeviceSlice::from_raw(address, bytes) }),
        Bound::Scalar(value) => Binding::Scalar(value),
    }
}
