//! What the GPUs say of themselves, by NVIDIA's management library (NVML), which is loaded at run time.
//!
//! [`Nvml`] is what we read; the library itself is behind it ([`NvmlLibrary`], feature `nvml`), and tests put devices there that do as they are
//! told. A [`Collector`] reads at an interval and sets the metrics `verdigris_gpu_…`. What a device does not support is absent, not 0.

mod collector;
#[cfg(feature = "nvml")]
mod library;

use std::time::Duration;

pub use collector::{Collector, DeviceNames};
#[cfg(feature = "nvml")]
pub use library::NvmlLibrary;

/// Why something could not be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvmlError {
    /// The library is not there, or finds no driver.
    #[error("NVML is not there: {detail}")]
    NotThere {
        /// What it says.
        detail: String,
    },
    /// The device, or this library, has no such thing.
    #[error("not supported")]
    NotSupported,
    /// The device has fallen off the bus, or needs a reset.
    #[error("the device is lost: {detail}")]
    Lost {
        /// What the library says.
        detail: String,
    },
    /// Something else.
    #[error("{detail}")]
    Other {
        /// What the library says.
        detail: String,
    },
}

/// How busy a device was in its last sampling period, from 0 to 1.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Utilization {
    /// Part of the time in which a kernel ran.
    pub gpu: f64,
    /// Part of the time in which memory was read or written.
    pub memory: f64,
}

/// Device memory of all processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// In use.
    pub used_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
}

/// Clocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Clocks {
    /// Of the multiprocessors.
    pub sm_hertz: u64,
    /// Of the memory.
    pub memory_hertz: u64,
}

/// What holds clocks down.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Throttling {
    /// The limit on power.
    pub power: bool,
    /// Heat.
    pub thermal: bool,
    /// The board's own protection: heat, the power supply, or an external brake.
    pub hw_slowdown: bool,
    /// Another device of the same group, whose clock is kept.
    pub sync_boost: bool,
    /// A clock that was set.
    pub other: bool,
}

/// Memory errors since the driver was loaded or the device was reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EccErrors {
    /// Repaired.
    pub corrected: u64,
    /// Not repaired: what was computed with them is wrong, and its process was ended.
    pub uncorrected: u64,
}

/// Device memory of one process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessMemory {
    /// Its number, as the host counts.
    pub process: u32,
    /// What it uses.
    pub used_bytes: u64,
}

/// All that is read of one device at one moment, each thing with its own reason where it is not there.
#[derive(Clone, PartialEq, Debug)]
pub struct Reading {
    /// How busy it was.
    pub utilization: Result<Utilization, NvmlError>,
    /// Its memory.
    pub memory: Result<Memory, NvmlError>,
    /// Its clocks.
    pub clocks: Result<Clocks, NvmlError>,
    /// What holds the clocks down.
    pub throttling: Result<Throttling, NvmlError>,
    /// Of the chip.
    pub temperature_celsius: Result<f64, NvmlError>,
    /// Drawn now.
    pub power_watts: Result<f64, NvmlError>,
    /// Memory errors.
    pub ecc_errors: Result<EccErrors, NvmlError>,
    /// Who uses its memory for computing.
    pub processes: Result<Vec<ProcessMemory>, NvmlError>,
    /// Whether it is partitioned.
    pub is_mig: Result<bool, NvmlError>,
}

impl Reading {
    /// Nothing, for one reason.
    pub fn nothing(error: &NvmlError) -> Reading {
        Reading {
            utilization: Err(error.clone()),
            memory: Err(error.clone()),
            clocks: Err(error.clone()),
            throttling: Err(error.clone()),
            temperature_celsius: Err(error.clone()),
            power_watts: Err(error.clone()),
            ecc_errors: Err(error.clone()),
            processes: Err(error.clone()),
            is_mig: Err(error.clone()),
        }
    }
}

/// A critical event that the driver reported, by NVIDIA's number for it (79: the device has fallen off the bus).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Xid {
    /// The device, as NVML counts; none where the device can no longer be asked.
    pub device: Option<u32>,
    /// The number; none where NVML does not know it.
    pub number: Option<u64>,
}

/// What is heard while critical events are waited for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum XidNews {
    /// Events of this device are waited for.
    Watched(u32),
    /// This device's are not, and those of the others are.
    Refused(u32, NvmlError),
    /// One came.
    Event(Xid),
    /// None came for a while.
    Pause,
}

/// What we read of NVML. Devices are counted as NVML does, by their place on the bus.
pub trait Nvml: Send + Sync {
    /// How many there are.
    ///
    /// # Errors
    /// What the library says.
    fn device_count(&self) -> Result<u32, NvmlError>;

    /// A device's identity, such as `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
    ///
    /// # Errors
    /// What the library says.
    fn uuid(&self, device: u32) -> Result<String, NvmlError>;

    /// Reads a device; an error is that of the device as a whole.
    ///
    /// # Errors
    /// [`NvmlError::Lost`] where the device does not answer, and what else the library says.
    fn read(&self, device: u32) -> Result<Reading, NvmlError>;

    /// Waits for critical events and hands on what is heard, until `tell` returns false: of each device whether it is watched, each event, and
    /// [`XidNews::Pause`] whenever `pause` is over without one.
    ///
    /// # Errors
    /// [`NvmlError::NotSupported`] where there are no events, and what else the library says: nothing is watched then, until it is called again.
    fn watch_xids(&self, pause: Duration, tell: &mut dyn FnMut(XidNews) -> bool) -> Result<(), NvmlError>;
}
