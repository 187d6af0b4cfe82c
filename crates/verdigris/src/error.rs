//! Everything that can go wrong between a request and its result, by whose fault it is.
//!
//! ```
//! use verdigris::{Config, Device, Error, Policy};
//!
//! let error = Device::open("tpu", &Config::default(), Policy::default()).unwrap_err();
//! assert!(matches!(&error, Error::DeviceName { name } if name == "tpu"));
//! assert_eq!(error.to_string(), "there is no device `tpu`; devices are `cpu`, `cuda` and `cuda:N`");
//! assert!(!error.is_lack_of_memory());
//! assert!(Error::NoWorkspace { needed_bytes: 512, lent_bytes: 256, least_bytes: None, account: None }.is_lack_of_memory());
//! ```

use verdigris_engines::engine::Refusal;

use crate::observe::MemoryAccount;

pub use verdigris_tensor::{BindingError, BindingRule};

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

    /// What was bound to a plan does not suit it; found before anything runs.
    #[error(transparent)]
    Binding(#[from] BindingError),

    /// What the CPU device does not take: the caller's fault.
    #[error(transparent)]
    Cpu(verdigris_cpu::Error),

    /// A name of no device.
    #[error("there is no device `{name}`; devices are `cpu`, `cuda` and `cuda:N`")]
    DeviceName {
        /// The name.
        name: String,
    },

    /// Tensors that a function cannot take: the caller's fault.
    #[error("{what}; {rule}")]
    Operand {
        /// What was given.
        what: String,
        /// What it may be.
        rule: &'static str,
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
    #[error("{needed_bytes} bytes of workspace are needed, {lent_bytes} can be had{}", beside(*least_bytes, *account))]
    NoWorkspace {
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes that can be had.
        lent_bytes: u64,
        /// The least workspace that the plan can do with, where there is a plan.
        least_bytes: Option<u64>,
        /// Who holds the device's memory, where it could be asked.
        account: Option<MemoryAccount>,
    },

    /// The device has no memory left for a plan's workspace, or the pool's limit leaves no room for it.
    #[error("{source}{}", beside(Some(*least_bytes), *account))]
    OutOfMemory {
        /// What the device or the pool said.
        source: Box<verdigris_cuda::Error>,
        /// Bytes of workspace that were asked for last.
        asked_bytes: u64,
        /// The least workspace that the plan can do with.
        least_bytes: u64,
        /// Who holds the device's memory, where it could be asked.
        account: Option<MemoryAccount>,
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

impl Error {
    /// There is no engine of that name; these there are.
    pub(crate) fn unknown_engine(name: &str) -> Error {
        let known = verdigris_engines::engines().map(|engine| engine.id().name).collect();
        Error::UnknownEngine { name: name.to_owned(), known }
    }

    /// By whose fault it is, as the label `kind` of `verdigris_errors_total` has it: one of a closed list.
    ///
    /// ```
    /// # use verdigris::Error;
    /// assert_eq!(Error::NoWorkspace { needed_bytes: 512, lent_bytes: 256, least_bytes: None, account: None }.kind(), "out_of_memory");
    /// ```
    pub fn kind(&self) -> &'static str {
        use verdigris_cuda::Error as Device;
        match self {
            error if error.is_lack_of_memory() => "out_of_memory",
            Error::Graph(_) => "graph",
            Error::NoEngine(_) => "no_engine",
            Error::UnknownEngine { .. } | Error::Pin { .. } => "pin",
            Error::Binding(_) | Error::Device(Device::Binding(_)) => "binding",
            Error::Device(Device::NoDriver { .. } | Device::NoDevice | Device::NoSuchDevice { .. }) => "driver_missing",
            Error::Device(
                Device::DriverTooOld { .. } | Device::MissingSymbol { .. } | Device::UnsupportedChip { .. } | Device::PtxVersion { .. },
            ) => "driver_old",
            Error::Device(error) if error.is_loss_of_context() => "device_lost",
            Error::Device(_) => "device",
            Error::Cpu(_) => "cpu",
            Error::Config { .. } => "config",
            // Both of the last lack memory.
            Error::DeviceName { .. }
            | Error::Operand { .. }
            | Error::TensorBytes { .. }
            | Error::NoResult
            | Error::NoWorkspace { .. }
            | Error::OutOfMemory { .. } => "request",
        }
    }

    /// A lack of workspace, with the least that the plan can do with and who holds the memory; any other error as it is.
    pub(crate) fn of_workspace(self, asked_bytes: u64, least_bytes: u64, account: Option<MemoryAccount>) -> Error {
        match self {
            Error::NoWorkspace { needed_bytes, lent_bytes, .. } => {
                Error::NoWorkspace { needed_bytes, lent_bytes, least_bytes: Some(least_bytes), account }
            }
            error if !error.is_lack_of_memory() => error,
            Error::Device(source) => Error::OutOfMemory { source: Box::new(source), asked_bytes, least_bytes, account },
            error => error,
        }
    }

    /// Whether this says that memory is lacking, so that less may help.
    pub fn is_lack_of_memory(&self) -> bool {
        use verdigris_cuda::Error as Device;
        matches!(
            self,
            Error::NoWorkspace { .. }
                | Error::OutOfMemory { .. }
                | Error::Device(Device::OutOfMemory { .. } | Device::PoolLimit { .. })
                | Error::Cpu(verdigris_cpu::Error::OutOfMemory { .. })
        )
    }
}

/// A graph that breaks a rule, or a binding that does, is told in the same way whichever device found it.
impl From<verdigris_cpu::Error> for Error {
    fn from(error: verdigris_cpu::Error) -> Error {
        match error {
            verdigris_cpu::Error::Graph(error) => Error::Graph(error),
            verdigris_cpu::Error::Binding(error) => Error::Binding(error),
            error => Error::Cpu(error),
        }
    }
}

/// What is said behind a lack of workspace.
fn beside(least_bytes: Option<u64>, account: Option<MemoryAccount>) -> String {
    let least = match least_bytes {
        None => String::new(),
        Some(0) => "; the plan's smallest ways need none".to_owned(),
        Some(least) => format!("; the plan's smallest ways need {least}"),
    };
    account.map_or_else(|| least.clone(), |account| format!("{least}; of the device's {account}"))
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
