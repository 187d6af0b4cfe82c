//! What the machine can refuse, each as a value that says what to do about it.
//!
//! Three kinds stand apart: the machine cannot serve us at all ([`Error::NoDriver`], [`Error::DriverTooOld`],
//! [`Error::MissingSymbol`], [`Error::NoDevice`], [`Error::UnsupportedChip`]), it could but has no room
//! ([`Error::OutOfMemory`], [`Error::PoolLimit`]), and a call failed ([`Error::Driver`] and the rest). Nothing here is logged;
//! the floor above decides what is told to whom.

use verdigris_kir::program::{Base, Mismatch};
use verdigris_kir::ptx::Isa;
use verdigris_kir::verify::Faults;
use verdigris_tensor::BindingError;

use crate::cache::CacheError;
use crate::launch::LaunchError;
use crate::tensor_map::MapError;

/// The oldest driver interface that this crate runs on (CUDA 12.0: tensor maps, clusters, `sm_90a`), in the driver's own
/// notation (1000 × major + 10 × minor).
pub const MINIMUM_DRIVER_VERSION: u32 = 12_000;

/// Why something on the GPU side could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The NVIDIA driver library could not be loaded.
    #[error("no NVIDIA driver: none of {tried:?} could be loaded ({detail}); install the NVIDIA display driver, or run on the CPU device")]
    NoDriver {
        /// The library names that were tried, in order.
        tried: Vec<String>,
        /// What the system's loader said about the last of them.
        detail: String,
    },

    /// A driver is there, but older than [`MINIMUM_DRIVER_VERSION`].
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, {}.{} is needed; update the display driver (branch 525 or newer, 580 recommended)",
        found / 1000, found % 1000 / 10, required / 1000, required % 1000 / 10
    )]
    DriverTooOld {
        /// The version that the driver reports.
        found: u32,
        /// The version that is needed.
        required: u32,
    },

    /// The driver library does not export a function that was needed.
    #[error(
        "the loaded driver library (version {driver_version}) has no `{symbol}`; update the display driver, or remove a stub or tracing library that stands before it on the library path"
    )]
    MissingSymbol {
        /// The missing function.
        symbol: &'static str,
        /// The version that the library reports, 0 where even that could not be asked.
        driver_version: u32,
    },

    /// The driver runs, but no GPU is visible to this process.
    #[error("no CUDA device is visible; check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and whether the container was started with GPUs")]
    NoDevice,

    /// A device number that does not exist.
    #[error("there is no device {ordinal}: {count} device(s) are visible, numbered from 0")]
    NoSuchDevice {
        /// The number that was asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },

    /// The chip is older than what was asked for needs.
    #[error(
        "{device} has compute capability {}.{}, {needed_for} needs {}.{} or newer; use another device, or a portable engine",
        found.0, found.1, required.0, required.1
    )]
    UnsupportedChip {
        /// The device's name.
        device: String,
        /// Its compute capability.
        found: (u32, u32),
        /// The least that would do.
        required: (u32, u32),
        /// What needs it.
        needed_for: String,
    },

    /// The device has no memory left for the request.
    #[error(
        "out of device memory while {doing} ({}); free buffers, lower the workspace limit, or use a smaller batch",
        match (free_bytes, total_bytes) {
            (Some(free), Some(total)) => format!("{free} of {total} bytes free"),
            _ => "the amount free is unknown".to_owned(),
        }
    )]
    OutOfMemory {
        /// What was being done, with the number of bytes where one was asked for.
        doing: String,
        /// Free device memory right after the failure.
        free_bytes: Option<u64>,
        /// The device's memory.
        total_bytes: Option<u64>,
    },

    /// The pool's own limit forbids the request, whatever the device still has.
    #[error(
        "the memory pool's limit of {limit_bytes} bytes leaves no room for {requested_bytes} more ({used_bytes} in use); raise the limit or free buffers"
    )]
    PoolLimit {
        /// The bytes asked for.
        requested_bytes: u64,
        /// The bytes in use through this pool.
        used_bytes: u64,
        /// The limit that the pool was made with.
        limit_bytes: u64,
    },

    /// The driver refused to compile or link a kernel.
    #[error("the driver could not compile `{kernel}` ({name}):\n{log}")]
    Compile {
        /// The kernel's name.
        kernel: String,
        /// The driver's code by name.
        name: String,
        /// The compiler's error log.
        log: String,
    },

    /// The driver reads no PTX as new as the kernel's instructions.
    #[error(
        "`{kernel}` has instructions of PTX {needed}, the driver (version {driver_version}) reads PTX {found}; update the display driver, or use another engine"
    )]
    PtxVersion {
        /// The kernel's name.
        kernel: String,
        /// The oldest version that has all of its instructions.
        needed: Isa,
        /// The newest version that the driver reads.
        found: Isa,
        /// The driver's version (1000 × major + 10 × minor).
        driver_version: u32,
    },

    /// A range that does not lie within its buffer.
    #[error("{what}: bytes {offset_bytes}..{end_bytes} lie outside a buffer of {buffer_bytes} bytes")]
    OutOfRange {
        /// What was being done.
        what: &'static str,
        /// First byte of the range.
        offset_bytes: u64,
        /// One past its last byte.
        end_bytes: u64,
        /// The buffer's size.
        buffer_bytes: u64,
    },

    /// Two objects of different contexts were used together.
    #[error("{what}: the {left} belongs to another context than the {right}; load and allocate per context")]
    ContextMismatch {
        /// What was being done.
        what: &'static str,
        /// One object.
        left: &'static str,
        /// The other.
        right: &'static str,
    },

    /// The module has no such kernel.
    #[error("the module has no kernel `{kernel}`; its entry name and the name asked for must agree")]
    NoSuchKernel {
        /// The name asked for.
        kernel: String,
    },

    /// A tensor map that the hardware cannot hold.
    #[error(transparent)]
    Map(#[from] MapError),

    /// What was lent to a program does not suit it.
    #[error(transparent)]
    Binding(#[from] BindingError),

    /// A program that reaches past a piece of its own scratch or constants, or names one that it does not have: a defect in its engine.
    #[error("the program reaches to byte {end_bytes} of {base:?}, which has {bytes:?} bytes: a defect in its engine")]
    OwnMemory {
        /// What it names.
        base: Base,
        /// One past the last byte reached.
        end_bytes: u64,
        /// The size; `None` where there is none of that number.
        bytes: Option<u64>,
    },

    /// A kernel that the verifier refuses: a defect in its engine.
    #[error(transparent)]
    Unverified(#[from] Faults),

    /// A launch whose arguments do not fit its kernel: a defect in its engine.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),

    /// A launch outside the limits of the kernel or the chip.
    #[error(transparent)]
    Launch(#[from] LaunchError),

    /// The disk cache could not be opened.
    #[error(transparent)]
    Cache(#[from] CacheError),

    /// Any other failed driver call.
    #[error("{call} failed with {name} ({code}: {text}) while {doing}{}", advice(*code))]
    Driver {
        /// The driver function.
        call: &'static str,
        /// Its status code.
        code: u32,
        /// The code's name, `CUDA_ERROR_…`.
        name: String,
        /// The driver's own description.
        text: String,
        /// What was being done.
        doing: String,
    },
}

impl Error {
    /// Whether the context is gone, and with it all that was on the device: a kernel faulted, the device was reset, or its memory failed.
    /// A new process has to begin anew.
    ///
    /// ```
    /// use verdigris_cuda::Error;
    ///
    /// let failed = |code: u32| Error::Driver { call: "cuStreamSynchronize", code, name: String::new(), text: String::new(), doing: String::new() };
    /// assert!(failed(719).is_loss_of_context() && !failed(600).is_loss_of_context());
    /// ```
    pub fn is_loss_of_context(&self) -> bool {
        matches!(self, Error::Driver { code: 201 | 214 | 220 | 700 | 702 | 709 | 714..=719 | 999, .. })
    }
}

/// What helps against a status code, as the tail of a sentence; empty where there is nothing general to say.
fn advice(code: u32) -> &'static str {
    match code {
        34 => "; a toolkit stub library was loaded: take its folder off the library path",
        46 => "; another process holds the device exclusively: check its compute mode with `nvidia-smi -q`",
        101 => "; check the device number and CUDA_VISIBLE_DEVICES",
        201 | 709 => "; the context is gone: it was destroyed or the device was reset, so make a new one",
        209 => "; the binary was built for another chip: build for this one, or hand over PTX",
        214 | 220 => "; the hardware reported an uncorrectable error: see `nvidia-smi -q` and the system log",
        218 => "; the PTX text is invalid for this driver: assemble it with ptxas for the message",
        221 => "; libnvidia-ptxjitcompiler is missing: install the complete driver package",
        222 => "; the PTX version is newer than the driver: print an older version or update the driver",
        700 | 714..=719 => "; a kernel faulted and the context is lost: run under compute-sanitizer, and make a new context",
        701 => "; the kernel needs more registers or shared memory than a multiprocessor has",
        720 => "; a cooperative grid must fit the device at once: use fewer CTAs",
        801 => "; this device or driver does not offer it",
        802 => "; the driver is still starting (fabric manager not ready): try again later",
        803 => "; the kernel module and the driver library differ in version: reboot after the driver update",
        804 => "; the forward-compatibility package does not support this device: remove it",
        900..=908 => "; that is forbidden while a stream captures: move it out of the capture",
        _ => "",
    }
}

/// A driver call that did not succeed, before anybody has said what it was for.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The library has no such function.
    Missing { call: &'static str, driver_version: u32 },
    /// The function returned a status other than success.
    Status { call: &'static str, code: u32, name: String, text: String },
}

impl Failure {
    /// The status code, or `None` for a missing function.
    pub(crate) fn code(&self) -> Option<u32> {
        match self {
            Self::Missing { .. } => None,
            Self::Status { code, .. } => Some(*code),
        }
    }

    /// The typed error, with what was being done.
    pub(crate) fn into_error(self, doing: String) -> Error {
        match self {
            Self::Missing { call, driver_version } => Error::MissingSymbol { symbol: call, driver_version },
            Self::Status { code: status::OUT_OF_MEMORY, .. } => Error::OutOfMemory { doing, free_bytes: None, total_bytes: None },
            Self::Status { code: status::NO_DEVICE, .. } => Error::NoDevice,
            Self::Status { call, code, name, text } => Error::Driver { call, code, name, text, doing },
        }
    }
}

/// Says what a driver call was for, should it have failed.
pub(crate) trait Doing<T> {
    /// The words complete "… failed while"; they are only made on failure.
    fn doing<S: Into<String>>(self, words: impl FnOnce() -> S) -> Result<T, Error>;
}

impl<T> Doing<T> for Result<T, Failure> {
    fn doing<S: Into<String>>(self, words: impl FnOnce() -> S) -> Result<T, Error> {
        self.map_err(|failure| failure.into_error(words().into()))
    }
}

/// Status codes that are told apart by code.
pub(crate) mod status {
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NO_DEVICE: u32 = 100;
    pub(crate) const NOT_FOUND: u32 = 500;
    pub(crate) const NOT_READY: u32 = 600;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_says_what_to_do() {
        let text = Error::DriverTooOld { found: 11_080, required: MINIMUM_DRIVER_VERSION }.to_string();
        assert!(text.contains("CUDA 11.8") && text.contains("12.0") && text.contains("update"), "{text}");
        let text = Failure::Missing { call: "cuLaunchKernelEx", driver_version: 11_080 }.into_error(String::new()).to_string();
        assert!(text.contains("cuLaunchKernelEx") && text.contains("11080"), "{text}");
        let faulted =
            Failure::Status { call: "cuStreamSynchronize", code: 700, name: "CUDA_ERROR_ILLEGAL_ADDRESS".into(), text: "x".into() };
        let text = faulted.into_error("waiting for the stream".into()).to_string();
        assert!(text.contains("compute-sanitizer") && text.contains("waiting for the stream"), "{text}");
    }

    #[test]
    fn codes_that_have_a_type_get_it() {
        let status = |code| Failure::Status { call: "cuInit", code, name: String::new(), text: String::new() };
        assert!(matches!(status(100).into_error(String::new()), Error::NoDevice));
        assert!(matches!(status(2).into_error("x".into()), Error::OutOfMemory { .. }));
        assert!(matches!(status(999).into_error("x".into()), Error::Driver { code: 999, .. }));
    }
}
