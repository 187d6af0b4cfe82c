//! Everything that the environment decides, in one table; no other file of the project reads it.
//!
//! ```
//! use verdigris::Config;
//! use verdigris::config::{VARIABLES, Variable};
//!
//! let names: Vec<&str> = VARIABLES.iter().map(|Variable { name, .. }| *name).collect();
//! assert!(names.contains(&"VERDIGRIS_CACHE"));
//! // A caller may decide in the place of the environment: here, that nothing is kept on disk.
//! let config = Config { cache: None, plans: None, ..Config::from_environment()? };
//! assert!(config.cache.is_none());
//! # Ok::<(), verdigris::Error>(())
//! ```

use std::path::PathBuf;

use crate::error::Error;
use crate::observe::{Guards, Sampling};

/// A variable of the environment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What it decides.
    pub meaning: &'static str,
    /// What holds without it.
    pub default: &'static str,
}

/// Every variable that is read.
pub const VARIABLES: &[Variable] = &[
    Variable { name: "VERDIGRIS_DEVICE", meaning: "number of the device, in the driver's order", default: "0" },
    Variable {
        name: "VERDIGRIS_CACHE",
        meaning: "folder of compiled kernels, made if it is not there; `off` keeps none, and one that others can write is refused",
        default: "verdigris/kernels in the user's cache folder (XDG_CACHE_HOME, else .cache in HOME; LOCALAPPDATA on Windows)",
    },
    Variable {
        name: "VERDIGRIS_PACK",
        meaning: "file of kernels made beforehand (`cargo xtask pack`); `off` uses none, one that is not there is passed over, and one that others can write is refused",
        default: "verdigris/verdigris-sm_90a.pack in the user's cache folder",
    },
    Variable {
        name: "VERDIGRIS_PLANS",
        meaning: "file of measured choices; `off` remembers them while the process lives, and one that others can write is refused",
        default: "verdigris/plans.txt in the user's cache folder",
    },
    Variable {
        name: "VERDIGRIS_SHIPPED",
        meaning: "`off` leaves out the choices that ship with the library: every plan is by estimate or measured here",
        default: "on",
    },
    Variable {
        name: "VERDIGRIS_RECORD",
        meaning: "file to which the problems that a GPU is asked for are appended, with how often they are executed (graphs on the CPU are cut into no problems)",
        default: "none is written",
    },
    Variable {
        name: "VERDIGRIS_METRICS",
        meaning: "where the program serves its metrics: a port, on this machine alone, or an address with one",
        default: "nowhere",
    },
    Variable {
        name: "VERDIGRIS_SAMPLE",
        meaning: "whose time on the device is taken, as N/SECOND: every Nth execution of a plan, at most so many a second; `off` takes none",
        default: "256/50, where somebody listens",
    },
    Variable {
        name: "VERDIGRIS_CHECK_NUMBERS",
        meaning: "whose results are looked through for NaN and infinity, as N/SECOND, where somebody listens",
        default: "nobody's",
    },
    Variable {
        name: "VERDIGRIS_CHECK_DRIFT",
        meaning: "whose results are held against a shadow execution by the reference, as N/SECOND, where somebody listens",
        default: "nobody's",
    },
    Variable { name: "VERDIGRIS_TRACE", meaning: "file of a trace for Perfetto; `%p` is the number of the process", default: "none" },
    Variable { name: "VERDIGRIS_EVENTS", meaning: "file of events as JSON lines; `%p` is the number of the process", default: "none" },
    Variable {
        name: "OTEL_EXPORTER_OTLP_ENDPOINT",
        meaning: "collector of OpenTelemetry to which the program pushes metrics and spans, as http://HOST:PORT; a program that was built without the feature `otlp` refuses it",
        default: "none, and nothing is sent",
    },
    Variable {
        name: "OTEL_EXPORTER_OTLP_HEADERS",
        meaning: "what that collector is sent with each push, as NAME=VALUE,NAME=VALUE",
        default: "none",
    },
    Variable { name: "OTEL_SERVICE_NAME", meaning: "who speaks to that collector", default: "the name of the program" },
    Variable { name: "NVTX_INJECTION64_PATH", meaning: "library of a profiler, which the profiler sets", default: "none" },
    Variable {
        name: "VERDIGRIS_CUBLASLT",
        meaning: "path of libcublasLt.so, which benches compare with",
        default: "what the system's loader finds",
    },
    Variable { name: "VERDIGRIS_PTXAS", meaning: "path of ptxas, for resource reports without a GPU", default: "what PATH finds" },
];

/// What container runtimes and Kubernetes say to the programs inside. They decide nothing here, so that they are none of [`VARIABLES`].
pub const CONTAINER_VARIABLES: &[&str] = &["KUBERNETES_SERVICE_HOST", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"];

/// The value of one of [`CONTAINER_VARIABLES`], where it is set; of any other name nothing.
///
/// ```
/// use verdigris::config::{CONTAINER_VARIABLES, container_variable};
///
/// assert!(CONTAINER_VARIABLES.contains(&"NVIDIA_VISIBLE_DEVICES"));
/// assert_eq!(container_variable("PATH"), None);
/// ```
pub fn container_variable(name: &str) -> Option<String> {
    let is_known = CONTAINER_VARIABLES.contains(&name);
    if is_known { std::env::var(name).ok() } else { None }
}

/// What the environment, or a caller in its place, decides.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Number of the device, in the driver's order.
    pub device: u32,
    /// Folder of compiled kernels; `None` keeps none.
    pub cache: Option<PathBuf>,
    /// File of kernels made beforehand, which need no compiler; passed over while it is not there. `None` uses none.
    pub pack: Option<PathBuf>,
    /// File of measured choices; `None` remembers them while the process lives.
    pub plans: Option<PathBuf>,
    /// Whether the choices that ship with the library are asked where the user's file has none.
    pub shipped: bool,
    /// File to which problems and their executions are appended ([`crate::observe::read_workload`] reads it); `None` records none.
    pub record: Option<PathBuf>,
    /// Where metrics are served.
    pub metrics: Option<String>,
    /// Which executions have their time taken, where somebody listens.
    pub sampling: Sampling,
    /// Whose results are looked at, where somebody listens.
    pub guards: Guards,
    /// File of the trace.
    pub trace: Option<PathBuf>,
    /// File of events.
    pub events: Option<PathBuf>,
    /// Collector of OpenTelemetry.
    pub otlp: Option<String>,
    /// What it is sent with each push; a password may be in it.
    pub otlp_headers: Option<String>,
    /// Who speaks to it.
    pub service: Option<String>,
    /// Library of a profiler.
    pub nvtx_injection: Option<PathBuf>,
    /// Path of cuBLASLt, where the system's loader would not find it.
    pub cublas_lt: Option<PathBuf>,
    /// Path of the offline assembler; `None` where there is none.
    pub ptxas: Option<PathBuf>,
}

impl Default for Config {
    /// The first device, no files, and the choices that ship.
    fn default() -> Config {
        Config {
            device: 0,
            cache: None,
            pack: None,
            plans: None,
            shipped: true,
            record: None,
            metrics: None,
            sampling: Sampling::default(),
            guards: Guards::default(),
            trace: None,
            events: None,
            otlp: None,
            otlp_headers: None,
            service: None,
            nvtx_injection: None,
            cublas_lt: None,
            ptxas: None,
        }
    }
}

impl Config {
    /// Reads the table of [`VARIABLES`].
    ///
    /// # Errors
    /// [`Error::Config`] for a value without a meaning.
    pub fn from_environment() -> Result<Config, Error> {
        Config::from(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from(read: impl Fn(&str) -> Option<std::ffi::OsString>) -> Result<Config, Error> {
        let device = match read("VERDIGRIS_DEVICE") {
            None => 0,
            Some(text) => text.to_str().and_then(|text| text.trim().parse().ok()).ok_or_else(|| Error::Config {
                variable: "VERDIGRIS_DEVICE",
                value: text.to_string_lossy().into_owned(),
                rule: "a device is named by its number, counted from 0",
            })?,
        };
        let base = if cfg!(windows) {
            read("LOCALAPPDATA").map(PathBuf::from)
        } else {
            let named = read("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
            named.or_else(|| read("HOME").map(|home| PathBuf::from(home).join(".cache")))
        };
        let place = |variable: &str, inside: &str| match read(variable) {
            Some(text) if text == "off" => None,
            Some(text) => Some(PathBuf::from(text)),
            None => base.as_ref().map(|base| base.join("verdigris").join(inside)),
        };
        let cache = place("VERDIGRIS_CACHE", "kernels");
        let pack = place("VERDIGRIS_PACK", "verdigris-sm_90a.pack");
        let plans = place("VERDIGRIS_PLANS", "plans.txt");
        let ptxas = read("VERDIGRIS_PTXAS").map(PathBuf::from).or_else(|| {
            let name = if cfg!(windows) { "ptxas.exe" } else { "ptxas" };
            let path = read("PATH")?;
            std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
        });
        let shipped = match read("VERDIGRIS_SHIPPED") {
            None => true,
            Some(text) if text == "on" => true,
            Some(text) if text == "off" => false,
            Some(text) => {
                return Err(Error::Config {
                    variable: "VERDIGRIS_SHIPPED",
                    value: text.to_string_lossy().into_owned(),
                    rule: "the choices that ship are `on` or `off`",
                });
            }
        };
        let file = |variable: &str| read(variable).map(PathBuf::from);
        let text = |variable: &str| read(variable).map(|text| text.to_string_lossy().into_owned());
        let metrics = text("VERDIGRIS_METRICS");
        let sampled = |variable: &'static str, usual: Sampling| match read(variable) {
            None => Ok(usual),
            Some(text) => sampling_of(&text.to_string_lossy()).ok_or_else(|| Error::Config {
                variable,
                value: text.to_string_lossy().into_owned(),
                rule: "samples are two whole numbers as `256/50`, one execution of so many and at most so many a second, or `off`",
            }),
        };
        let sampling = sampled("VERDIGRIS_SAMPLE", Sampling::default())?;
        let off = Guards::default();
        let guards = Guards {
            numbers: sampled("VERDIGRIS_CHECK_NUMBERS", off.numbers)?,
            drift: sampled("VERDIGRIS_CHECK_DRIFT", off.drift)?,
            ..off
        };
        Ok(Config {
            device,
            cache,
            pack,
            plans,
            shipped,
            record: file("VERDIGRIS_RECORD"),
            metrics,
            sampling,
            guards,
            trace: file("VERDIGRIS_TRACE"),
            events: file("VERDIGRIS_EVENTS"),
            otlp: text("OTEL_EXPORTER_OTLP_ENDPOINT"),
            otlp_headers: text("OTEL_EXPORTER_OTLP_HEADERS"),
            service: text("OTEL_SERVICE_NAME"),
            nvtx_injection: file("NVTX_INJECTION64_PATH"),
            cublas_lt: file("VERDIGRIS_CUBLASLT"),
            ptxas,
        })
    }
}

fn sampling_of(text: &str) -> Option<Sampling> {
    if text == "off" {
        return Some(Sampling { every: 0, per_second: 0 });
    }
    let (every, per_second) = text.split_once('/')?;
    Some(Sampling { every: every.trim().parse().ok().filter(|every| *every > 0)?, per_second: per_second.trim().parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_named_by_two_numbers() {
        let sampling = |value| from(&[("VERDIGRIS_SAMPLE", value)]).map(|config| config.sampling);
        assert_eq!(from(&[]).expect("no value is wrong").sampling, Sampling::default());
        assert_eq!(sampling("64/10").ok(), Some(Sampling { every: 64, per_second: 10 }));
        assert_eq!(sampling("off").ok().map(|sampling| sampling.every), Some(0));
        for wrong in ["64", "0/10", "64/x", "-1/10", "/"] {
            let error = sampling(wrong).expect_err("no samples").to_string();
            assert!(error.contains(&format!("VERDIGRIS_SAMPLE is `{wrong}`")), "{error}");
        }
    }

    #[test]
    fn guards_are_off_until_they_are_named() {
        let guards = |values: &[(&str, &str)]| from(values).expect("reads").guards;
        assert!(guards(&[]).are_off());
        let both = guards(&[("VERDIGRIS_CHECK_NUMBERS", "100/5"), ("VERDIGRIS_CHECK_DRIFT", "1000/1")]);
        assert_eq!((both.numbers, both.drift), (Sampling { every: 100, per_second: 5 }, Sampling { every: 1000, per_second: 1 }));
        assert!(guards(&[("VERDIGRIS_CHECK_NUMBERS", "off")]).are_off());
        let error = from(&[("VERDIGRIS_CHECK_DRIFT", "often")]).expect_err("no samples").to_string();
        assert!(error.contains("VERDIGRIS_CHECK_DRIFT is `often`"), "{error}");
    }

    fn from(values: &[(&str, &str)]) -> Result<Config, Error> {
        Config::from(|name| values.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn nothing_set_gives_the_defaults() {
        let config = from(&[]).expect("no value is wrong");
        assert_eq!((config.device, config.cublas_lt, config.ptxas), (0, None, None));
        assert_eq!((config.cache, config.pack, config.plans), (None, None, None), "without a home there is no folder");
    }

    #[test]
    #[cfg(not(windows))]
    fn the_cache_is_where_the_user_wants_it() {
        let cache = |values: &[(&str, &str)]| from(values).expect("reads").cache;
        assert_eq!(cache(&[("HOME", "/h")]), Some(PathBuf::from("/h/.cache/verdigris/kernels")));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]), Some(PathBuf::from("/c/verdigris/kernels")));
        assert_eq!(cache(&[("HOME", "/h"), ("VERDIGRIS_CACHE", "/k")]), Some(PathBuf::from("/k")));
        assert_eq!(cache(&[("HOME", "/h"), ("VERDIGRIS_CACHE", "off")]), None);
    }

    #[test]
    #[cfg(not(windows))]
    fn the_pack_is_beside_the_cache_unless_named() {
        let pack = |values: &[(&str, &str)]| from(values).expect("reads").pack;
        assert_eq!(pack(&[("HOME", "/h")]), Some(PathBuf::from("/h/.cache/verdigris/verdigris-sm_90a.pack")));
        assert_eq!(pack(&[("HOME", "/h"), ("VERDIGRIS_CACHE", "off")]), Some(PathBuf::from("/h/.cache/verdigris/verdigris-sm_90a.pack")));
        assert_eq!(pack(&[("HOME", "/h"), ("VERDIGRIS_PACK", "/p/a.pack")]), Some(PathBuf::from("/p/a.pack")));
        assert_eq!(pack(&[("HOME", "/h"), ("VERDIGRIS_PACK", "off")]), None);
    }

    #[test]
    fn what_ships_is_on_or_off() {
        let shipped = |value| from(&[("VERDIGRIS_SHIPPED", value)]).map(|config| config.shipped);
        assert!(from(&[]).expect("no value is wrong").shipped && Config::default().shipped);
        assert_eq!((shipped("on").ok(), shipped("off").ok()), (Some(true), Some(false)));
        let error = shipped("no").expect_err("neither").to_string();
        assert!(error.contains("VERDIGRIS_SHIPPED is `no`"), "{error}");
    }

    #[test]
    fn a_device_is_a_number() {
        assert_eq!(from(&[("VERDIGRIS_DEVICE", "3")]).expect("a number").device, 3);
        let error = from(&[("VERDIGRIS_DEVICE", "H200")]).expect_err("a name").to_string();
        assert!(error.contains("VERDIGRIS_DEVICE is `H200`"), "{error}");
    }
}
