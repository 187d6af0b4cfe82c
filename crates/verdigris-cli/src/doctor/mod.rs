//! `doctor`: what is here, what works here, and why the rest does not.

mod findings;
mod matrix;
mod surroundings;

use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};
use verdigris::config::{VARIABLES, container_variable};
use verdigris::{Arch, Config, Handle, PlanCache};
use verdigris_cuda::peers::CublasLt;
use verdigris_cuda::trust::Distrust;
use verdigris_cuda::{Device, DiskCache, Driver};

use verdigris_cli::table::wrapped;
use verdigris_cli::{Verdict, say, telemetry};

/// Options of `doctor`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Print everything as one JSON object.
    #[arg(long)]
    json: bool,
    /// Print every refusal in full: of each op and type, which engines do not take it and why.
    #[arg(long)]
    refusals: bool,
    /// End with 1 where one of these is not as it should be: for init containers and CI.
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    require: Vec<Need>,
}

/// What a program may need of a machine.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Need {
    /// A driver that is new enough, and a device that it opens.
    Gpu,
    /// A folder of compiled kernels that can be used.
    Cache,
    /// A pack of kernels, made of these sources.
    Pack,
    /// A file of measured choices that can be read.
    Plans,
}

/// Columns of a terminal that everything fits but single words that are longer, such as paths.
const COLUMNS: usize = 100;

/// Carries out `doctor`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let config = Config::from_environment();
    let mut report = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "source": verdigris_engines::SOURCE_HASH,
        "variables": VARIABLES.iter().map(|variable| json!({ "name": variable.name, "meaning": variable.meaning, "default": variable.default })).collect::<Vec<_>>(),
    });
    let config = match config {
        Ok(config) => {
            if let Err(error) = telemetry::check(&config) {
                report["configuration"] = json!({ "error": verdigris_cli::chain(&error) });
            }
            config
        }
        Err(error) => {
            report["configuration"] = json!({ "error": error.to_string() });
            Config::default()
        }
    };
    report["cache"] = cache(&config);
    report["pack"] = match &config.pack {
        None => json!({ "state": "off: kernels come from the cache or the compiler" }),
        Some(file) if file.exists() => match verdigris_cuda::trust::open(file) {
            Ok(_) => json!({ "file": file, "state": "there; each device tells whether it can use it" }),
            Err(error) => json!({ "file": file, "error": error.to_string(), "mend": mend(&error) }),
        },
        Some(file) => json!({ "file": file, "state": "not there, so kernels come from the cache or the compiler" }),
    };
    report["assembler"] = match &config.ptxas {
        Some(path) if path.is_file() => json!({ "path": path }),
        Some(path) => json!({ "error": format!("VERDIGRIS_PTXAS names {}, which is no file", path.display()) }),
        None => {
            json!({ "error": "ptxas is neither in PATH nor named by VERDIGRIS_PTXAS; only `workshop inspect --resources` without a GPU needs it" })
        }
    };
    match Driver::load() {
        Err(error) => {
            report["driver"] = json!({ "error": error.to_string() });
            // Without a device, engines can still be asked about the one that they were tuned on.
            report["engines_on"] = json!("a described NVIDIA H200, since there is no device");
            report["engines"] = matrix::rows(&Arch::h200());
        }
        Ok(driver) => {
            let version = driver.version();
            report["driver"] = json!({ "cuda": format!("{}.{}", version / 1000, version % 1000 / 10) });
            match driver.devices() {
                Err(error) => report["devices"] = json!({ "error": error.to_string() }),
                Ok(devices) => report["devices"] = devices.iter().map(|device| describe(device, &config)).collect(),
            }
        }
    }
    report["plans"] = plans(&config);
    report["container"] = surroundings::container(Path::new("/"), container_variable);
    report["mig"] = surroundings::mig();
    report["frameworks"] = surroundings::frameworks();
    report["permissions"] = surroundings::permissions(Path::new("/dev"));
    let findings = findings::of(&report);
    report["findings"] = serde_json::to_value(&findings)?;
    if arguments.json {
        say!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print(&report, arguments.refusals);
        findings::print(&findings, COLUMNS);
    }
    let is_about = |finding: &findings::Finding, need: &Need| finding.need == need.name() || finding.need == findings::CONFIGURATION;
    let is_missing = |need: &Need| findings.iter().any(|finding| is_about(finding, need) && finding.is_missing);
    let missing: Vec<&str> = arguments.require.iter().filter(|need| is_missing(need)).map(|need| need.name()).collect();
    if missing.is_empty() {
        return Ok(Verdict::Good);
    }
    eprintln!("required and not as it should be: {}", missing.join(", "));
    Ok(Verdict::Bad)
}

impl Need {
    const fn name(self) -> &'static str {
        match self {
            Need::Gpu => "gpu",
            Need::Cache => "cache",
            Need::Pack => "pack",
            Need::Plans => "plans",
        }
    }
}

/// The command that mends a file which others can write.
fn mend(error: &std::io::Error) -> Option<String> {
    Distrust::of(error).map(Distrust::mend)
}

fn plans(config: &Config) -> Value {
    let Some(file) = &config.plans else { return json!({ "state": "off: measured choices end with the process" }) };
    match PlanCache::open(config.plans.clone()) {
        Err(error) => json!({ "file": file, "error": error.to_string(), "mend": mend(&error.source) }),
        Ok(_) if file.exists() => json!({ "file": file, "state": "usable" }),
        Ok(_) => json!({ "file": file, "state": "not there yet: choices are those that ship, else by estimate" }),
    }
}

fn cache(config: &Config) -> Value {
    match &config.cache {
        None => json!({ "state": "off: every process compiles its kernels anew" }),
        Some(folder) => match DiskCache::open(folder) {
            Ok(_) => json!({ "folder": folder, "state": "usable" }),
            Err(error) => json!({ "folder": folder, "error": error.to_string() }),
        },
    }
}

fn describe(device: &Device, config: &Config) -> Value {
    let p = device.properties();
    let mut value = json!({
        "number": device.ordinal(),
        "name": p.name,
        "uuid": p.uuid,
        "compute_capability": format!("{}.{}", p.compute_capability.0, p.compute_capability.1),
        "sms": p.sm_count,
        "memory_bytes": p.memory_bytes,
        "l2_bytes": p.l2_bytes,
        "shared_memory_per_cta_bytes": p.shared_memory_per_cta_bytes,
        "sm_clock_mhz": device.clocks().map_or(Value::Null, |clocks| json!(clocks.sm_khz / 1000)),
        "ptx_isa": p.ptx_isa.to_string(),
        "cooperative_launch": p.cooperative_launch,
        "memory_pools": p.memory_pools,
    });
    let handle = device.primary_context().map_err(verdigris::Error::from).and_then(|context| Handle::on(&context, config));
    match handle {
        Err(error) => value["error"] = json!(error.to_string()),
        Ok(handle) => {
            value["engines"] = matrix::rows(handle.arch());
            value["pack"] = match handle.pack() {
                Some(Ok(pack)) => json!(format!("usable, {} kernels", pack.len())),
                Some(Err(error)) => json!({ "error": error.to_string() }),
                None => json!("none"),
            };
            if let Ok((free, _)) = handle.context().memory_info() {
                value["free_bytes"] = json!(free);
            }
            let paths: Vec<&std::path::Path> = config.cublas_lt.as_deref().into_iter().collect();
            value["peer"] = match CublasLt::open(handle.context(), &paths) {
                Ok(library) => json!({ "cublaslt": library.version(), "path": library.path() }),
                Err(error) => json!({ "error": error.to_string() }),
            };
        }
    }
    value
}

fn print(report: &Value, with_refusals: bool) {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    say!("verdigris {} (sources {})", text(&report["version"]), text(&report["source"]).chars().take(12).collect::<String>());
    if let Some(error) = report["configuration"].get("error") {
        say!("configuration: {}", text(error));
    }
    for (name, value) in [
        ("kernel cache", &report["cache"]),
        ("kernel pack", &report["pack"]),
        ("measured choices", &report["plans"]),
        ("assembler", &report["assembler"]),
        ("driver", &report["driver"]),
        ("container", &report["container"]),
        ("MIG", &report["mig"]),
        ("frameworks", &report["frameworks"]),
        ("device files", &report["permissions"]),
    ] {
        let words: Vec<String> = value.as_object().into_iter().flatten().map(|(key, value)| format!("{key} {}", text(value))).collect();
        say!("{}", wrapped(&format!("{name}: {}", words.join(", ")), 2, COLUMNS));
    }
    match &report["devices"] {
        Value::Array(devices) => {
            for device in devices {
                let Some(fields) = device.as_object() else { continue };
                say!("\ndevice {}: {}", device["number"], text(&device["name"]));
                for (key, value) in fields.iter().filter(|(key, _)| !matches!(key.as_str(), "engines" | "name" | "number")) {
                    say!("{}", wrapped(&format!("  {key}: {}", text(value)), 4, COLUMNS));
                }
                matrix::print(&device["engines"], with_refusals);
            }
        }
        Value::Null => {
            say!("\nengines on {}", text(&report["engines_on"]));
            matrix::print(&report["engines"], with_refusals);
        }
        other => say!("{}", wrapped(&format!("devices: {}", text(&other["error"])), 2, COLUMNS)),
    }
    say!("\nvariables of the environment");
    for variable in VARIABLES {
        say!("{}", wrapped(&format!("  {}: {}; default {}", variable.name, variable.meaning, variable.default), 4, COLUMNS));
    }
}
