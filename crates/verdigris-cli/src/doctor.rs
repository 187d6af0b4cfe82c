//! `doctor`: what is here, what works here, and why the rest does not.

use anyhow::Result;
use serde_json::{Value, json};
use verdigris::config::VARIABLES;
use verdigris::{Config, Handle, Limits, survey};
use verdigris_cuda::peers::CublasLt;
use verdigris_cuda::{Device, DiskCache, Driver};
use verdigris_engines::arch::Arch;
use verdigris_graph::{GemmProblem, Matrix, Order, Precision, Problem, Slot};
use verdigris_tensor::DType;

use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, say};

/// Options of `doctor`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Print everything as one JSON object.
    #[arg(long)]
    json: bool,
}

/// Carries out `doctor`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let config = Config::from_environment();
    let mut report = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "source": verdigris_engines::SOURCE_HASH,
        "variables": VARIABLES.iter().map(|variable| json!({ "name": variable.name, "meaning": variable.meaning, "default": variable.default })).collect::<Vec<_>>(),
    });
    let config = match config {
        Ok(config) => config,
        Err(error) => {
            report["configuration"] = json!({ "error": error.to_string() });
            Config::default()
        }
    };
    report["cache"] = cache(&config);
    report["pack"] = match &config.pack {
        None => json!({ "state": "off: kernels come from the cache or the compiler" }),
        Some(file) if file.exists() => json!({ "file": file, "state": "there; each device tells whether it can use it" }),
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
            report["engines"] = engines(&Arch::h200());
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
    if arguments.json {
        say!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print(&report);
    }
    Ok(Verdict::Good)
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
            value["engines"] = engines(handle.arch());
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

/// For each kind of product, who takes it and who refuses.
fn engines(arch: &Arch) -> Value {
    let kinds = [
        ("f64", DType::F64, DType::F64, Precision::F64),
        ("f32 ieee", DType::F32, DType::F32, Precision::Ieee),
        ("f32", DType::F32, DType::F32, Precision::Fp32),
        ("tf32", DType::F32, DType::F32, Precision::Tf32),
        ("bf16", DType::Bf16, DType::Bf16, Precision::Fp32),
        ("f16", DType::F16, DType::F16, Precision::Fp32),
        ("f16 sums", DType::F16, DType::F16, Precision::F16),
        ("e4m3 fast", DType::E4m3, DType::Bf16, Precision::Fp8Fast),
        ("e4m3 promoted", DType::E4m3, DType::Bf16, Precision::Fp8Promoted),
        ("i8", DType::I8, DType::I32, Precision::I32),
    ];
    let rows = kinds.iter().map(|&(kind, operands, result, precision)| {
        let problem = GemmProblem::packed(1024, 1024, 1024, operands, result).and_then(|packed| {
            GemmProblem { precision, b: Matrix::with_leading_dimension(Slot(1), operands, Order::ColumnMajor, 1024), ..packed }.canonical()
        });
        match problem {
            Err(error) => json!({ "kind": kind, "error": error.to_string() }),
            Ok(problem) => {
                let survey = survey(&Problem::Gemm(problem), arch, &Limits::default());
                json!({
                    "kind": kind,
                    "engines": survey.ranked.iter().map(|way| way.engine.name).collect::<Vec<_>>(),
                    "refusals": survey.refusals.iter().map(|refusal| json!({ "engine": refusal.engine.name, "reason": refusal.reason.name(), "seen": refusal.seen })).collect::<Vec<_>>(),
                })
            }
        }
    });
    rows.collect()
}

fn print(report: &Value) {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    say!("verdigris {} (sources {})", text(&report["version"]), text(&report["source"]).chars().take(12).collect::<String>());
    if let Some(error) = report["configuration"].get("error") {
        say!("configuration: {}", text(error));
    }
    for (name, value) in [
        ("kernel cache", &report["cache"]),
        ("kernel pack", &report["pack"]),
        ("assembler", &report["assembler"]),
        ("driver", &report["driver"]),
    ] {
        let words: Vec<String> = value.as_object().into_iter().flatten().map(|(key, value)| format!("{key} {}", text(value))).collect();
        say!("{name}: {}", words.join(", "));
    }
    match &report["devices"] {
        Value::Array(devices) => {
            for device in devices {
                let Some(fields) = device.as_object() else { continue };
                say!("\ndevice {}: {}", device["number"], text(&device["name"]));
                for (key, value) in fields.iter().filter(|(key, _)| !matches!(key.as_str(), "engines" | "name" | "number")) {
                    say!("  {key}: {}", text(value));
                }
                print_engines(&device["engines"]);
            }
        }
        Value::Null => {
            say!("\nengines on {}", text(&report["engines_on"]));
            print_engines(&report["engines"]);
        }
        other => say!("devices: {}", text(&other["error"])),
    }
    say!("\nvariables of the environment");
    let rows: Vec<Vec<String>> =
        VARIABLES.iter().map(|variable| vec![variable.name.to_owned(), variable.meaning.to_owned(), variable.default.to_owned()]).collect();
    table::print(&[("name", Align::Left), ("meaning", Align::Left), ("default", Align::Left)], &rows);
}

fn print_engines(engines: &Value) {
    let names = |value: &Value, field: Option<&str>| -> String {
        let list = value.as_array().map(Vec::as_slice).unwrap_or_default();
        let words = list.iter().filter_map(|item| match field {
            None => item.as_str().map(str::to_owned),
            Some(field) => Some(format!("{} ({}: {})", item["engine"].as_str()?, item[field].as_str()?, item["seen"].as_str()?)),
        });
        words.collect::<Vec<_>>().join(", ")
    };
    let rows: Vec<Vec<String>> = engines
        .as_array()
        .into_iter()
        .flatten()
        .map(|row| {
            vec![row["kind"].as_str().unwrap_or("").to_owned(), names(&row["engines"], None), names(&row["refusals"], Some("reason"))]
        })
        .collect();
    say!();
    table::print(&[("1024³ product", Align::Left), ("taken by, best first", Align::Left), ("refused by", Align::Left)], &rows);
}
