//! What is not as it should be, and the one command that mends it.

use serde::Serialize;
use serde_json::Value;
use verdigris_cli::say;
use verdigris_cli::table::wrapped;

/// What a wrong variable of the environment is about: whatever is required cannot be had under it.
pub(super) const CONFIGURATION: &str = "configuration";

/// Something that a user or operator may want to mend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Finding {
    /// What it is about; where it can be required, what `--require` calls it.
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
    let in_container = text(&report["container"]["kind"]).is_some_and(|kind| kind != "none");
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
    found.extend(container(&report["container"]));
    found.extend(mig(report));
    found.extend(frameworks(report));
    found.extend(permissions(report));
    if let Some(error) = text(&report["configuration"]["error"]) {
        // What is judged above is by the defaults, and the programs that start with this environment end at once.
        found.push(finding(CONFIGURATION, true, error, "env | grep -e VERDIGRIS_ -e OTEL_ # and mend the value"));
    }
    found
}

/// A container that asked NVIDIA's runtime for less than computing needs.
fn container(report: &Value) -> Option<Finding> {
    let capabilities = report["driver_capabilities"].as_str()?;
    let has = |wanted: &str| capabilities.split(',').any(|one| one.trim() == wanted);
    let mend = if report["kind"] == "kubernetes" {
        "kubectl set env deployment/NAME NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    } else {
        "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …"
    };
    let what =
        || format!("NVIDIA_DRIVER_CAPABILITIES is `{capabilities}`, without `compute`: the driver's library is kept out of the container");
    (!has("compute") && !has("all")).then(|| finding("container", true, what(), mend))
}

/// Devices that are partitioned, where the process is given no part.
fn mig(report: &Value) -> Option<Finding> {
    let devices = report["mig"]["devices"].as_array()?;
    let partitioned: Vec<String> =
        devices.iter().filter(|device| device["is_on"] == true).map(|device| device["number"].to_string()).collect();
    let has_none = report["devices"]["error"].is_string() || report["devices"].as_array().is_some_and(Vec::is_empty);
    let what = || format!("MIG is on for device {}, and this process has no instance of it", partitioned.join(", "));
    let mend = "nvidia-smi mig -lgi; nvidia-smi -L # an instance's MIG-… goes into CUDA_VISIBLE_DEVICES";
    (has_none && !partitioned.is_empty()).then(|| finding("mig", true, what(), mend))
}

/// A PyTorch that cannot use this machine's GPU.
fn frameworks(report: &Value) -> Option<Finding> {
    let torch = report["frameworks"]["torch"].as_str()?;
    let (_, build) = torch.split_once('+')?;
    let driver = report["driver"]["cuda"].as_str();
    if build == "cpu" {
        let what = format!("PyTorch {torch} is a build without CUDA");
        return driver.is_some().then(|| finding("frameworks", false, what, "python3 -m pip install --force-reinstall torch"));
    }
    // `cu126` is CUDA 12.6; minor versions of one major version run on each other's drivers.
    let digits = build.strip_prefix("cu").filter(|digits| digits.len() >= 3)?;
    let (needed, has) = (digits[..digits.len() - 1].parse::<u32>().ok()?, driver?.split('.').next()?.parse::<u32>().ok()?);
    let what = || format!("PyTorch {torch} needs a driver of CUDA {needed}, and this one has {}", driver.unwrap_or_default());
    let mend = || format!("python3 -m pip install -U torch --index-url https://download.pytorch.org/whl/cu{has}6");
    (needed > has).then(|| finding("frameworks", false, what(), mend()))
}

/// Device files that are there and cannot be opened; or none, where there is a driver.
fn permissions(report: &Value) -> Vec<Finding> {
    let permissions = &report["permissions"];
    if permissions["state"].is_string() {
        let has_driver = report["driver"]["cuda"].is_string() && report["devices"].as_array().is_none_or(Vec::is_empty);
        let what = permissions["state"].as_str().unwrap_or_default();
        return if has_driver { vec![finding("permissions", true, what, "nvidia-modprobe -c 0 -u # as root")] } else { Vec::new() };
    }
    let refused = permissions["files"].as_array().into_iter().flatten().filter(|file| file["error"].is_string());
    let of = |file: &Value| {
        let (path, error) = (file["path"].as_str().unwrap_or_default(), file["error"].as_str().unwrap_or_default());
        let mend = if path.ends_with("nvidia-uvm") && error.contains("No such file") {
            "nvidia-modprobe -c 0 -u # as root".to_owned()
        } else {
            format!("usermod -aG \"$(stat -c %G {path})\" \"$(id -un)\" # as root; then log in again")
        };
        finding("permissions", true, format!("{path}: {error}"), mend)
    };
    refused.map(of).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// What is found in a report that is well but for this.
    fn found(key: &str, value: Value) -> Vec<Finding> {
        let mut report = json!({
            "driver": { "cuda": "12.4" },
            "devices": [{ "number": 0, "name": "NVIDIA H100" }],
            "pack": { "state": "there" },
            "cache": { "state": "usable" },
            "plans": { "state": "usable" },
            "container": { "kind": "none" },
            "mig": { "devices": [{ "number": 0, "is_on": false }] },
            "frameworks": { "python3": "3.12.3", "torch": "2.6.0+cu124", "cudnn": "9.1.0.70" },
            "permissions": { "files": [{ "path": "/dev/nvidia0", "state": "can be opened" }] },
        });
        assert_eq!(of(&report), []);
        report[key] = value;
        let findings = of(&report);
        assert!(findings.iter().all(|finding| !finding.mend.is_empty() && !finding.what.is_empty()), "{findings:?}");
        findings
    }

    /// The one finding, which is about the key itself.
    fn one(key: &'static str, value: Value, is_missing: bool, words: [&str; 2]) {
        let findings = found(key, value);
        assert_eq!(findings.iter().map(|finding| (finding.need, finding.is_missing)).collect::<Vec<_>>(), [(key, is_missing)]);
        assert!(findings[0].what.contains(words[0]) && findings[0].mend.contains(words[1]), "{findings:?}");
    }

    #[test]
    fn what_surrounds_the_program_is_found_with_a_command() {
        one("container", json!({ "kind": "docker", "driver_capabilities": "utility" }), true, ["without `compute`", "docker run"]);
        one(
            "container",
            json!({ "kind": "kubernetes", "driver_capabilities": "video,utility" }),
            true,
            ["`video,utility`", "kubectl set env"],
        );
        assert_eq!(found("container", json!({ "kind": "docker", "driver_capabilities": "compute,utility" })), []);
        assert_eq!(found("container", json!({ "kind": "docker", "driver_capabilities": null })), []);

        // A part that is given is a device as any other.
        assert_eq!(found("mig", json!({ "devices": [{ "number": 0, "is_on": true }] })), []);
        assert_eq!(found("mig", json!({ "error": "NVML is not there" })), []);

        one("frameworks", json!({ "torch": "2.9.0+cpu" }), false, ["without CUDA", "pip install"]);
        one("frameworks", json!({ "torch": "2.9.0+cu130" }), false, ["needs a driver of CUDA 13, and this one has 12.4", "/whl/cu126"]);
        assert_eq!(found("frameworks", json!({ "torch": "2.9.0+cu128" })), [], "minor versions run on each other's drivers");
        assert_eq!(found("frameworks", json!({ "error": "python3 cannot be started" })), []);
        assert_eq!(found("frameworks", json!({ "torch": { "error": "not installed" } })), []);

        let files = |name: &str, error: &str| json!({ "files": [{ "path": format!("/dev/{name}"), "error": error }] });
        one("permissions", files("nvidia0", "Permission denied (os error 13)"), true, ["/dev/nvidia0: Permission denied", "usermod"]);
        one("permissions", files("nvidia-uvm", "No such file or directory (os error 2)"), true, ["nvidia-uvm", "nvidia-modprobe"]);
    }

    #[test]
    fn a_wrong_variable_is_missing_and_no_warning() {
        one(CONFIGURATION, json!({ "error": "VERDIGRIS_DEVICE is `first`" }), true, ["`first`", "env | grep"]);
    }

    #[test]
    fn a_partitioned_device_without_a_part_is_told_as_such() {
        let report = json!({
            "driver": { "cuda": "12.4" },
            "devices": { "error": "there is a driver and no device" },
            "mig": { "devices": [{ "number": 0, "is_on": false }, { "number": 1, "is_on": true }] },
            "permissions": { "files": [] },
        });
        let findings = of(&report);
        let mig = findings.iter().find(|finding| finding.need == "mig").expect("found");
        assert!(mig.is_missing && mig.what.contains("device 1,") && mig.mend.contains("nvidia-smi mig -lgi"), "{mig:?}");
    }
}
