//! Exporters, for programs in Python.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use verdigris::observe::{Guards, Listen, Sampling};
use verdigris_telemetry::{Error, Guard, OtlpCollector, Registry};

use crate::errors::{Kind, raise};

/// Telemetry that runs, until `close()` or the end of a `with` block.
///
/// - `address`: where scrapers find `/metrics`, as `host:port`, or `None`.
/// - `absent`: what was asked for and is not there on this machine, with the reason.
#[pyclass(frozen, module = "verdigris")]
pub(crate) struct Telemetry {
    guard: Mutex<Option<Guard>>,
    registry: std::sync::Arc<Registry>,
    address: Option<String>,
    absent: Vec<String>,
}

#[pymethods]
impl Telemetry {
    #[getter]
    fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    #[getter]
    fn absent(&self) -> Vec<String> {
        self.absent.clone()
    }

    /// All series, as a scraper gets them.
    fn text(&self, py: Python<'_>) -> String {
        py.detach(|| {
            verdigris_telemetry::observe::collect_metrics();
            self.registry.text()
        })
    }

    /// Nobody listens until `resume()`: calls cost what they cost without telemetry, and the endpoint goes on with what was counted.
    fn pause(&self, py: Python<'_>) {
        py.detach(|| self.guard.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map_or((), Guard::pause));
    }

    /// Listens again, as before `pause()`.
    fn resume(&self, py: Python<'_>) {
        py.detach(|| self.guard.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map_or((), Guard::resume));
    }

    /// Ends the endpoint and the files; once more does nothing.
    fn close(&self, py: Python<'_>) {
        // Threads are waited for, and none of them may wait for Python.
        py.detach(|| drop(self.guard.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }

    /// In a child that was forked: gives back what it shares with its parent, which goes on. Another thread of the parent may have held the guard; then
    /// nothing is given back, and nothing is waited for.
    fn _forked(&self) {
        if let Ok(mut guard) = self.guard.try_lock() {
            drop(guard.take());
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _kind: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

/// Where to listen: a port, or an address as text.
#[derive(FromPyObject)]
enum Address {
    Port(u16),
    Text(String),
}

/// Starts what is named, once in a process. `sample` is (N, a second): every Nth execution of a plan has its time taken, at most so many a second; (0, 0)
/// takes none. `check_numbers` likewise says whose results are looked through for NaN and infinity, `check_drift` whose results are held against the reference;
/// without them nobody's. `otlp_endpoint` is the collector that metrics and spans are pushed to; its headers and the name of the service are those of
/// OpenTelemetry's variables, which by themselves start nothing.
#[pyfunction]
#[pyo3(signature = (
    *, prometheus = None, trace = None, events = None, nvml = None, nvtx = None, sample = None, check_numbers = None, check_drift = None,
    otlp_endpoint = None
))]
#[allow(clippy::too_many_arguments, reason = "they are the keywords of one function of Python")]
fn telemetry(
    py: Python<'_>,
    prometheus: Option<Address>,
    trace: Option<PathBuf>,
    events: Option<PathBuf>,
    nvml: Option<f64>,
    nvtx: Option<PathBuf>,
    sample: Option<Bound<'_, PyAny>>,
    check_numbers: Option<Bound<'_, PyAny>>,
    check_drift: Option<Bound<'_, PyAny>>,
    otlp_endpoint: Option<String>,
) -> PyResult<Telemetry> {
    let mut telemetry = verdigris_telemetry::Telemetry::builder();
    if let Some(address) = prometheus {
        let text = match address {
            Address::Port(port) => port.to_string(),
            Address::Text(text) => text,
        };
        telemetry = telemetry.prometheus(text.parse().map_err(exception)?);
    }
    if let Some(path) = trace {
        telemetry = telemetry.trace_file(path);
    }
    if let Some(path) = events {
        telemetry = telemetry.json_lines(path);
    }
    if let Some(seconds) = nvml {
        let interval = Duration::try_from_secs_f64(seconds).ok().filter(|interval| !interval.is_zero());
        let wrong = || PyValueError::new_err(format!("nvml = {seconds}: the seconds between two readings, more than 0"));
        telemetry = telemetry.nvml(interval.ok_or_else(wrong)?);
    }
    if let Some(injection) = nvtx {
        telemetry = telemetry.nvtx(Some(injection));
    }
    if let Some(endpoint) = otlp_endpoint {
        let config = verdigris::Config::from_environment().map_err(|error| raise(Kind::Config, error.to_string()))?;
        let mut collector = OtlpCollector::new(endpoint).headers(config.otlp_headers.as_deref().unwrap_or_default()).map_err(exception)?;
        if let Some(name) = config.service {
            collector = collector.service(name);
        }
        telemetry = telemetry.otlp(collector);
    }
    let usual = Listen::default();
    let listen = Listen {
        sampling: rate("sample", sample)?.unwrap_or(usual.sampling),
        guards: Guards {
            numbers: rate("check_numbers", check_numbers)?.unwrap_or(usual.guards.numbers),
            drift: rate("check_drift", check_drift)?.unwrap_or(usual.guards.drift),
            ..usual.guards
        },
        ..usual
    };
    telemetry = telemetry.listen(listen);
    let guard = py.detach(|| telemetry.install()).map_err(exception)?;
    Ok(Telemetry {
        registry: std::sync::Arc::clone(guard.registry()),
        address: guard.prometheus_address().map(|address| address.to_string()),
        absent: guard.absent().to_vec(),
        guard: Mutex::new(Some(guard)),
    })
}

/// Writes what was counted of the workload that `VERDIGRIS_RECORD` names: devices live as long as the process, and are never dropped.
#[pyfunction]
fn _write_workloads(py: Python<'_>) {
    py.detach(verdigris::observe::write_workloads);
}

/// (N, a second): both more than 0, or both 0 for none.
fn rate(name: &str, value: Option<Bound<'_, PyAny>>) -> PyResult<Option<Sampling>> {
    let Some(value) = value else { return Ok(None) };
    let both = value.extract::<(u32, u32)>().ok().filter(|(every, per_second)| (*every == 0) == (*per_second == 0));
    let Some((every, per_second)) = both else {
        let given = value.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
        let rule = "two whole numbers, as (100, 5) for one run of a plan in 100 and at most 5 a second, or (0, 0) for none";
        return Err(raise(Kind::Config, format!("{name} = {given}: {rule}")));
    };
    Ok(Some(Sampling { every, per_second }))
}

/// Whose fault it is decides the class.
fn exception(error: Error) -> PyErr {
    match &error {
        Error::Address { .. } | Error::Endpoint { .. } | Error::Headers { .. } | Error::Bound { .. } => {
            raise(Kind::Config, error.to_string())
        }
        Error::NotBuilt { .. } => raise(Kind::Unsupported, error.to_string()),
        Error::Listen { .. } | Error::File { .. } | Error::FileInUse { .. } => PyOSError::new_err(error.to_string()),
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Telemetry>()?;
    module.add_function(wrap_pyfunction!(_write_workloads, module)?)?;
    module.add_function(wrap_pyfunction!(telemetry, module)?)
}
