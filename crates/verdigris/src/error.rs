//! Everything that can go wrong between a request and its result, by whose fault it is.

use verdigris_engines::engine::Refusal;
use verdigris_graph::Uid;

/// Why a request was not served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request breaks a rule of its own: the caller's fault.
    #[error(transparent)]
    Graph(#[from] verdigris_graph::Error),

    /// No engine takes the problem under the given limits: nobody's fault, and each says why.
    #[error("no engine takes the problem:{}", list(.0))]
    NoEngine(Vec<Refusal>),

    /// There is no engine of that name.
    #[error("there is no engine `{name}`; the engines are {}", known.join(", "))]
    UnknownEngine {
        /// The name asked for.
        name: String,
        /// All names.
        known: Vec<&'static str>,
    },

    /// The machine's fault: no driver, no device, no memory, a failed call.
    #[error(transparent)]
    Device(#[from] verdigris_cuda::Error),

    /// What was bound to a plan does not suit its problem.
    #[error(transparent)]
    Binding(#[from] BindingError),

    /// What the CPU device does not take: the caller's fault.
    #[error(transparent)]
    Cpu(#[from] verdigris_cpu::Error),

    /// A name of no device.
    #[error("there is no device `{name}`; devices are `cpu`, `cuda` and `cuda:N`")]
    DeviceName {
        /// The name.
        name: String,
    },

    /// A tensor that lies elsewhere.
    #[error("tensor `{tensor}` lies on {on}, but is used with {needed}; a tensor is used on the device that made it")]
    ForeignDevice {
        /// The tensor.
        tensor: String,
        /// Where it is.
        on: String,
        /// Where it should be.
        needed: String,
    },

    /// A tensor of another type, or of other dims or strides, than the graph's.
    #[error("tensor `{tensor}` is {given}, the graph has {needed}")]
    TensorMismatch {
        /// The tensor.
        tensor: String,
        /// Type, dims and strides of what was given.
        given: String,
        /// What the graph has.
        needed: String,
    },

    /// Too few bytes, or a wrong number of elements, for a tensor.
    #[error("{given_bytes} bytes are given for a tensor of {needed_bytes}")]
    TensorBytes {
        /// Bytes given.
        given_bytes: u64,
        /// Bytes spanned.
        needed_bytes: u128,
    },

    /// A function that was given no tensors, or gives none.
    #[error("a function needs a tensor to read and one to write")]
    NoResult,

    /// So much workspace cannot be lent, or the limits do not leave it.
    #[error("{needed_bytes} bytes of workspace are needed, {lent_bytes} can be had")]
    NoWorkspace {
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes that can be had.
        lent_bytes: u64,
    },

    /// A pin that no part of the graph takes.
    #[error("no part of the graph is computed by `{engine}` {knobs}:{}", list(.refusals))]
    Pin {
        /// The engine.
        engine: String,
        /// The setting.
        knobs: verdigris_engines::engine::Knobs,
        /// What it said of each part.
        refusals: Vec<Refusal>,
    },

    /// A variable of the environment that has no meaning.
    #[error("{variable} is `{value}`; {rule}")]
    Config {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        rule: &'static str,
    },
}

/// What was bound to a plan does not suit its problem; found before anything is submitted.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindingError {
    /// Not one binding a slot.
    #[error("{given} bindings are given, the problem has {needed} slots; bind each, in the order of the slots")]
    Count {
        /// Bindings given.
        given: usize,
        /// Slots of the problem.
        needed: usize,
    },
    /// A number where memory is needed, or the other way round.
    #[error("slot {slot} is {needed}, but {given} is bound to it")]
    Kind {
        /// The slot.
        slot: usize,
        /// What it is.
        needed: &'static str,
        /// What was bound.
        given: &'static str,
    },
    /// A buffer that ends before its operand does.
    #[error("slot {slot} spans {needed_bytes} bytes, but {given_bytes} are bound to it")]
    Length {
        /// The slot.
        slot: usize,
        /// Bytes bound.
        given_bytes: u64,
        /// Bytes spanned.
        needed_bytes: u64,
    },
    /// An output that shares bytes with another operand. The same matrix in the same place is allowed: read before it is written.
    #[error("the output in slot {output} and slot {other} share bytes; only the same elements in the same place may be shared")]
    Overlap {
        /// The slot written.
        output: usize,
        /// The other one.
        other: usize,
    },
    /// A tensor of the graph is not bound.
    #[error("tensor `{tensor}` ({uid}) is not bound")]
    Missing {
        /// Its name.
        tensor: String,
        /// Its uid.
        uid: Uid,
    },
    /// A uid that the plan does not bind: no tensor of the graph, a virtual one, or one that no op reads or writes.
    #[error("tensor {uid} is bound, but the plan has no such tensor to bind")]
    Unknown {
        /// The uid.
        uid: Uid,
    },
    /// A uid that is bound more than once.
    #[error("tensor {uid} is bound twice")]
    Twice {
        /// The uid.
        uid: Uid,
    },
    /// A number where memory is needed, or the other way round.
    #[error("tensor `{tensor}` is {needed}, but {given} is bound to it")]
    TensorKind {
        /// The tensor.
        tensor: String,
        /// What it is.
        needed: &'static str,
        /// What was bound.
        given: &'static str,
    },
    /// A buffer that ends before its tensor does.
    #[error("tensor `{tensor}` spans {needed_bytes} bytes, but {given_bytes} are bound to it")]
    TensorLength {
        /// The tensor.
        tensor: String,
        /// Bytes bound.
        given_bytes: u64,
        /// Bytes spanned.
        needed_bytes: u64,
    },
    /// A null pointer.
    #[error("tensor `{tensor}` is bound to a null pointer")]
    Null {
        /// The tensor.
        tensor: String,
    },
    /// Memory of another device, or none of any.
    #[error("tensor `{tensor}` is bound to {address:#x}, which is {}; the plan runs on device {needed}", whose(*.found))]
    Foreign {
        /// The tensor.
        tensor: String,
        /// The address.
        address: u64,
        /// The number of the device whose memory it is.
        found: Option<u32>,
        /// The number of the plan's device.
        needed: u32,
    },
    /// A buffer, or the workspace, that is not aligned as the plan relies on.
    #[error("tensor `{tensor}` is at {address:#x}, not a multiple of the {alignment_bytes} bytes that the plan relies on")]
    TensorAlignment {
        /// The tensor.
        tensor: String,
        /// Its address.
        address: u64,
        /// The alignment needed.
        alignment_bytes: u64,
    },
    /// An output that shares bytes with another tensor.
    #[error(
        "output `{output}` and tensor `{other}` share bytes; an output may only take the place of an input of the same elements that is \
         not read after it is written"
    )]
    TensorOverlap {
        /// The tensor written.
        output: String,
        /// The other one.
        other: String,
    },
    /// Too little workspace.
    #[error("the workspace has {given_bytes} bytes, the plan needs {needed_bytes}, and {least_bytes} at the least as things stand")]
    Workspace {
        /// Bytes given.
        given_bytes: u64,
        /// Bytes that the chosen ways need.
        needed_bytes: u64,
        /// Bytes without which nothing goes: a captured or pinned execution takes no other ways than the chosen.
        least_bytes: u64,
    },
}

impl Error {
    /// There is no engine of that name; these there are.
    pub(crate) fn unknown_engine(name: &str) -> Error {
        let known = verdigris_engines::engines().map(|engine| engine.id().name).collect();
        Error::UnknownEngine { name: name.to_owned(), known }
    }

    /// Whether this says that memory is lacking, so that less may help.
    pub fn is_lack_of_memory(&self) -> bool {
        use verdigris_cuda::Error as Device;
        matches!(
            self,
            Error::NoWorkspace { .. }
                | Error::Device(Device::OutOfMemory { .. } | Device::PoolLimit { .. })
                | Error::Cpu(verdigris_cpu::Error::OutOfMemory { .. })
        )
    }
}

fn whose(device: Option<u32>) -> String {
    device.map_or_else(|| "no memory of a device".to_owned(), |device| format!("memory of device {device}"))
}

fn list(refusals: &[Refusal]) -> String {
    if refusals.is_empty() {
        return " there are none".to_owned();
    }
    refusals.iter().map(|refusal| format!("\n  {refusal}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_engines::engine::{EngineId, Reason};

    #[test]
    fn every_refusal_is_said() {
        let id = EngineId { name: "gemm.none", number: 0 };
        let refusals = vec![id.refusal(Reason::Extent, "k = 0"), id.refusal(Reason::DType, "D of i64")];
        let text = Error::NoEngine(refusals).to_string();
        assert!(text.contains("gemm.none: extent: k = 0") && text.contains("dtype: D of i64"), "{text}");
        assert!(Error::NoEngine(Vec::new()).to_string().ends_with("there are none"));
    }
}
