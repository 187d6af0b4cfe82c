//! NVML itself.

use std::time::Duration;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError as Raw;
use nvml_wrapper::{Device, Nvml as Wrapper};

use super::{Clocks, EccErrors, Memory, Nvml, NvmlError, ProcessMemory, Reading, Throttling, Utilization, Xid, XidNews};

/// `libnvidia-ml`, which comes with the driver.
///
/// ```
/// use verdigris_telemetry::nvml::{Nvml, NvmlError, NvmlLibrary};
///
/// match NvmlLibrary::load() {
///     Ok(nvml) => println!("{} devices", nvml.device_count()?),
///     Err(reason) => assert!(matches!(reason, NvmlError::NotThere { .. })),
/// }
/// # Ok::<(), NvmlError>(())
/// ```
#[derive(Debug)]
pub struct NvmlLibrary {
    nvml: Wrapper,
}

impl NvmlLibrary {
    /// Loads and initializes it. This makes no context on any device, and takes none of its memory.
    ///
    /// # Errors
    /// [`NvmlError::NotThere`] where there is no library or no driver.
    pub fn load() -> Result<NvmlLibrary, NvmlError> {
        // The name with its version is there without the files for developers.
        let by_version = || Wrapper::builder().lib_path("libnvidia-ml.so.1".as_ref()).init();
        let nvml = if cfg!(windows) { Wrapper::init() } else { by_version().or_else(|_| Wrapper::init()) };
        nvml.map(|nvml| NvmlLibrary { nvml }).map_err(|error| NvmlError::NotThere { detail: error.to_string() })
    }

    fn device(&self, number: u32) -> Result<Device<'_>, NvmlError> {
        self.nvml.device_by_index(number).map_err(ours)
    }
}

fn ours(error: Raw) -> NvmlError {
    match error {
        Raw::NotSupported | Raw::FunctionNotFound | Raw::FailedToLoadSymbol(_) | Raw::VgpuEccNotSupported => NvmlError::NotSupported,
        Raw::GpuLost | Raw::ResetRequired => NvmlError::Lost { detail: error.to_string() },
        Raw::Uninitialized | Raw::DriverNotLoaded | Raw::LibraryNotFound => NvmlError::NotThere { detail: error.to_string() },
        other => NvmlError::Other { detail: other.to_string() },
    }
}

fn part(percent: u32) -> f64 {
    f64::from(percent) / 100.0
}

fn hertz(mega: u32) -> u64 {
    u64::from(mega) * 1_000_000
}

fn throttling(reasons: ThrottleReasons) -> Throttling {
    Throttling {
        power: reasons.contains(ThrottleReasons::SW_POWER_CAP),
        thermal: reasons.intersects(ThrottleReasons::SW_THERMAL_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN),
        hw_slowdown: reasons.intersects(ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN),
        sync_boost: reasons.contains(ThrottleReasons::SYNC_BOOST),
        // An idle device has low clocks too, but nothing holds them down.
        other: reasons.intersects(ThrottleReasons::APPLICATIONS_CLOCKS_SETTING | ThrottleReasons::DISPLAY_CLOCK_SETTING),
    }
}

fn read_processes(device: &Device<'_>) -> Result<Vec<ProcessMemory>, Raw> {
    let processes = device.running_compute_processes()?;
    let known = processes.into_iter().map(|process| match process.used_gpu_memory {
        UsedGpuMemory::Used(used_bytes) => Ok(ProcessMemory { process: process.pid, used_bytes }),
        // A sum without it would be wrong.
        UsedGpuMemory::Unavailable => Err(Raw::NotSupported),
    });
    known.collect()
}

impl Nvml for NvmlLibrary {
    fn device_count(&self) -> Result<u32, NvmlError> {
        self.nvml.device_count().map_err(ours)
    }

    fn uuid(&self, device: u32) -> Result<String, NvmlError> {
        self.device(device)?.uuid().map_err(ours)
    }

    fn read(&self, device: u32) -> Result<Reading, NvmlError> {
        let device = self.device(device)?;
        let clocks = || {
            let (sm, memory) = (device.clock_info(Clock::SM)?, device.clock_info(Clock::Memory)?);
            Ok(Clocks { sm_hertz: hertz(sm), memory_hertz: hertz(memory) })
        };
        let ecc_errors = || {
            let count = |kind| device.total_ecc_errors(kind, EccCounter::Volatile);
            Ok(EccErrors { corrected: count(MemoryError::Corrected)?, uncorrected: count(MemoryError::Uncorrected)? })
        };
        let reading = Reading {
            utilization: device
                .utilization_rates()
                .map(|busy| Utilization { gpu: part(busy.gpu), memory: part(busy.memory) })
                .map_err(ours),
            memory: device.memory_info().map(|memory| Memory { used_bytes: memory.used, total_bytes: memory.total }).map_err(ours),
            clocks: clocks().map_err(ours),
            throttling: device.current_throttle_reasons().map(throttling).map_err(ours),
            temperature_celsius: device.temperature(TemperatureSensor::Gpu).map(f64::from).map_err(ours),
            power_watts: device.power_usage().map(|milliwatts| f64::from(milliwatts) / 1e3).map_err(ours),
            ecc_errors: ecc_errors().map_err(ours),
            processes: read_processes(&device).map_err(ours),
            is_mig: device.mig_mode().map(|mode| mode.current != 0).map_err(ours),
        };
        // Memory is what every device tells; where even that finds the device gone, it is gone.
        match &reading.memory {
            Err(error @ NvmlError::Lost { .. }) => Err(error.clone()),
            _ => Ok(reading),
        }
    }

    #[cfg(target_os = "linux")]
    fn watch_xids(&self, pause: Duration, tell: &mut dyn FnMut(XidNews) -> bool) -> Result<(), NvmlError> {
        use nvml_wrapper::bitmasks::event::EventTypes;
        use nvml_wrapper::enums::event::XidError;

        // A set is gone with the first device that refuses, so that each is tried with one of its own.
        let register = |device, events| {
            let device = self.device(device)?;
            device.register_events(EventTypes::CRITICAL_XID_ERROR, events).map_err(|error| ours(error.error))
        };
        let mut events = self.nvml.create_event_set().map_err(ours)?;
        let mut refused = None;
        let mut is_watched = false;
        for device in 0..self.device_count()? {
            let news = match self.nvml.create_event_set().map_err(ours).and_then(|trial| register(device, trial)) {
                Ok(_) => {
                    events = register(device, events)?;
                    is_watched = true;
                    XidNews::Watched(device)
                }
                Err(error) => {
                    refused = Some(error.clone());
                    XidNews::Refused(device, error)
                }
            };
            if !tell(news) {
                return Ok(());
            }
        }
        if let (false, Some(error)) = (is_watched, refused) {
            return Err(error);
        }
        let pause_ms = u32::try_from(pause.as_millis()).unwrap_or(u32::MAX);
        loop {
            let news = match events.wait(pause_ms) {
                Ok(event) => {
                    let number = match event.event_data {
                        Some(XidError::Value(number)) => Some(number),
                        Some(XidError::Unknown) | None => None,
                    };
                    XidNews::Event(Xid { device: event.device.index().ok(), number })
                }
                Err(Raw::Timeout) => XidNews::Pause,
                Err(error) => return Err(ours(error)),
            };
            if !tell(news) {
                return Ok(());
            }
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn watch_xids(&self, _: Duration, _: &mut dyn FnMut(XidNews) -> bool) -> Result<(), NvmlError> {
        Err(NvmlError::NotSupported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_sorted_into_few() {
        let of = |reasons| throttling(reasons);
        assert_eq!(of(ThrottleReasons::NONE), Throttling::default());
        assert_eq!(of(ThrottleReasons::GPU_IDLE), Throttling::default(), "an idle device is not held down");
        assert_eq!(of(ThrottleReasons::SW_POWER_CAP), Throttling { power: true, ..Throttling::default() });
        let hot = ThrottleReasons::HW_THERMAL_SLOWDOWN | ThrottleReasons::HW_SLOWDOWN;
        assert_eq!(of(hot), Throttling { thermal: true, hw_slowdown: true, ..Throttling::default() });
        assert_eq!(of(ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN), Throttling { hw_slowdown: true, ..Throttling::default() });
    }

    #[test]
    fn units_are_those_of_the_table() {
        assert_eq!((part(35), hertz(1980)), (0.35, 1_980_000_000));
    }

    #[test]
    fn errors_are_sorted_into_few() {
        assert_eq!(ours(Raw::NotSupported), NvmlError::NotSupported);
        assert!(matches!(ours(Raw::GpuLost), NvmlError::Lost { .. }));
        assert!(matches!(ours(Raw::DriverNotLoaded), NvmlError::NotThere { .. }));
        assert!(matches!(ours(Raw::Unknown), NvmlError::Other { .. }));
    }
}
