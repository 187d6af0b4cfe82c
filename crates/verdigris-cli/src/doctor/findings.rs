//! What is not as it should be, and the one command that mends it.

use serde::Serialize;
use serde_json::Value;
use verdigris_cli::say;
use verdigris_cli::table::wrapped;

/// Something that a user or operator may want to mend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Finding {
    /// What `--require` calls it.
    pub(super) need: &'static str,
    /// Whether what needs it cannot be had; else all works, slower or less surely.
    pub(super) is_missing: bool,
    /// What is the matter.
    pub(super) what: String,
    /// The command that mends it, or what to do where there is none.
    pub(super) mend: String,
}

fn finding(need: &'static str, is_missing: bool, what: impl Into<String>, mend: impl Into<String>) -> Finding {
    Finding { need, is_missing, what: what.into(), mend: mend.into() }
}

/// What a report tells that is not as it should be.
pub(super) fn of(report: &Value) -> Vec<Finding> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let mut found = Vec::new();
    let in_container = std::path::Path::new("/.dockerenv").exists() || std::path::Path::new("/run/.containerenv").exists();
    if let Some(error) = text(&report["driver"]["error"]) {
        let is_old = error.contains("supports CUDA");
        let mend = match (is_old, in_container) {
            (true, _) => "apt-get install nvidia-driver-580 # on the host, 525 at the least; then reboot",
            (false, true) => "docker run --gpus all … # in Kubernetes: nvidia.com/gpu: 1 in the pod's limits",
            (false, false) => "apt-get install nvidia-driver-580 # with a GPU; without one all runs on `--device cpu`",
        };
        found.push(finding("gpu", true, error, mend));
    }
    if let Some(error) = text(&report["devices"]["error"]) {
        found.push(finding("gpu", true, error, "nvidia-smi -L # and CUDA_VISIBLE_DEVICES, which may hide all of them"));
    }
    let devices = report["devices"].as_array().into_iter().flatten();
    let mut usable = 0;
    for device in devices {
        let name = text(&device["name"]).unwrap_or_default();
        match text(&device["error"]) {
            Some(error) => {
                // Another device may serve.
                found.push(finding(
                    "gpu",
                    false,
                    format!("device {} ({name}): {error}", device["number"]),
                    "nvidia-smi -q # says what holds it",
                ));
            }
            None => usable += 1,
        }
        if let Some(error) = text(&device["pack"]["error"]) {
            found.push(finding(
                "pack",
                true,
                error,
                "cargo xtask pack # beside the sources of this build; or take the pack of its release",
            ));
        }
    }
    if report["devices"].is_array() && usable == 0 && !found.iter().any(|finding| finding.is_missing && finding.need == "gpu") {
        found.push(finding("gpu", true, "no device can be used", "nvidia-smi -q # says what holds them"));
    }
    if let Some(error) = text(&report["pack"]["error"]) {
        let cure = text(&report["pack"]["mend"]).unwrap_or_else(|| "export VERDIGRIS_PACK=/path/of/verdigris-sm_90a.pack".to_owned());
        found.push(finding("pack", true, error, cure));
    }
    if text(&report["pack"]["state"]).is_some_and(|state| state.contains("not there") || state.starts_with("off")) {
        found.push(finding(
            "pack",
            true,
            "there is no pack of kernels: first calls wait for the compiler",
            "export VERDIGRIS_PACK=/path/of/verdigris-sm_90a.pack",
        ));
    }
    for (name, need) in [("cache", "cache"), ("plans", "plans")] {
        if let Some(error) = text(&report[name]["error"]) {
            let variable = if need == "cache" { "VERDIGRIS_CACHE" } else { "VERDIGRIS_PLANS" };
            let cure = text(&report[name]["mend"]).unwrap_or_else(|| format!("export {variable}=/a/path/that/this/user/can/write"));
            found.push(finding(need, true, error, cure));
        } else if text(&report[name]["state"]).is_some_and(|state| state.starts_with("off")) {
            let variable = if need == "cache" { "VERDIGRIS_CACHE" } else { "VERDIGRIS_PLANS" };
            found.push(finding(need, true, format!("{variable} is off"), format!("unset {variable}")));
        }
    }
    if let Some(error) = text(&report["configuration"]["error"]) {
        found.push(finding("gpu", false, error, "env | grep VERDIGRIS_ # and mend the value"));
    }
    found
}

/// The findings under each other.
pub(super) fn print(findings: &[Finding], columns: usize) {
    if findings.is_empty() {
        say!("\nnothing to mend");
        return;
    }
    say!("\nto mend");
    for Finding { need, is_missing, what, mend } in findings {
        let state = if *is_missing { "missing" } else { "warning" };
        say!("{}", wrapped(&format!("  {need} ({state}): {what}"), 4, columns));
        say!("      {mend}");
    }
}
