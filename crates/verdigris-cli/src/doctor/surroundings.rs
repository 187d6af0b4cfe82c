//! What `doctor` reads of the machine around the program: the container, MIG, frameworks and device files.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use verdigris_telemetry::nvml::{Nvml, NvmlLibrary};

/// Versions of distributions that Python knows by their metadata: nothing is imported, for PyTorch takes seconds to load.
const VERSIONS: &str = r#"
import importlib.metadata as found, json, re, sys
names = re.compile(r"torch|nvidia[-_]cudnn[-_]cu\d+|nvidia[-_]cudnn|verdigris")
versions = {one.metadata["Name"].lower().replace("_", "-"): one.version for one in found.distributions() if names.fullmatch(one.metadata["Name"].lower())}
print(json.dumps({"python": sys.version.split()[0], "versions": versions}))
"#;

/// Device files without which a process reaches no GPU; a number follows `nvidia` for each device.
const DEVICE_FILES: &[&str] = &["nvidiactl", "nvidia-uvm"];

/// In which kind of container we are, by what a runtime leaves behind, and what NVIDIA's runtime was asked for.
pub(super) fn container(root: &Path, variable: impl Fn(&str) -> Option<String>) -> Value {
    let is_there = |name: &str| root.join(name).exists();
    let groups = std::fs::read_to_string(root.join("proc/1/cgroup")).unwrap_or_default();
    let named = ["kubepods", "docker", "containerd", "libpod"].into_iter().find(|word| groups.contains(word));
    let (kind, by) = if variable("KUBERNETES_SERVICE_HOST").is_some() {
        ("kubernetes", "KUBERNETES_SERVICE_HOST")
    } else if is_there(".dockerenv") {
        ("docker", "/.dockerenv")
    } else if is_there("run/.containerenv") {
        ("podman", "/run/.containerenv")
    } else if named.is_some() {
        ("container", "/proc/1/cgroup")
    } else {
        return json!({ "kind": "none" });
    };
    json!({
        "kind": kind,
        "by": by,
        "visible_devices": variable("NVIDIA_VISIBLE_DEVICES"),
        "driver_capabilities": variable("NVIDIA_DRIVER_CAPABILITIES"),
    })
}

/// Which devices are partitioned, by NVML, which counts all of the machine's; and how many parts this process may see.
pub(super) fn mig() -> Value {
    let nvml = match NvmlLibrary::load() {
        Ok(nvml) => nvml,
        Err(error) => return json!({ "error": error.to_string() }),
    };
    let count = match nvml.device_count() {
        Ok(count) => count,
        Err(error) => return json!({ "error": error.to_string() }),
    };
    let of = |number: u32| {
        let mode = nvml.read(number).and_then(|reading| reading.is_mig);
        match mode {
            Ok(is_on) => json!({ "number": number, "is_on": is_on }),
            Err(error) => json!({ "number": number, "error": error.to_string() }),
        }
    };
    json!({ "devices": (0..count).map(of).collect::<Vec<_>>() })
}

/// Which Python is first in the path, and what of PyTorch, cuDNN and our package it knows; else why that is not known.
pub(super) fn frameworks() -> Value {
    let unknown = |why: String| json!({ "error": why });
    let output = match Command::new("python3").args(["-c", VERSIONS]).stdin(Stdio::null()).output() {
        Ok(output) => output,
        Err(error) => return unknown(format!("python3 cannot be started: {error}")),
    };
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr);
        return unknown(format!("python3 ended with {}: {}", output.status, told.lines().last().unwrap_or_default()));
    }
    let Ok(found) = serde_json::from_slice::<Value>(&output.stdout) else {
        return unknown("python3 did not answer in JSON".to_owned());
    };
    let version = |wanted: &dyn Fn(&str) -> bool| {
        let versions = found["versions"].as_object();
        versions.and_then(|versions| versions.iter().find(|(name, _)| wanted(name)).map(|(_, version)| version.clone()))
    };
    let or_why = |version: Option<Value>| version.unwrap_or_else(|| json!({ "error": "not installed for this python3" }));
    json!({
        "python3": found["python"],
        "torch": or_why(version(&|name| name == "torch")),
        "cudnn": or_why(version(&|name| name.starts_with("nvidia-cudnn"))),
        "verdigris": or_why(version(&|name| name == "verdigris")),
    })
}

/// Whether this user may open the driver's device files; they are opened and closed, which changes nothing.
pub(super) fn permissions(devices: &Path) -> Value {
    let listed = std::fs::read_dir(devices).into_iter().flatten().filter_map(Result::ok);
    let is_device =
        |name: &str| name.strip_prefix("nvidia").is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()));
    let mut names: Vec<String> = listed.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| is_device(name)).collect();
    names.sort();
    if names.is_empty() {
        return json!({ "state": format!("there are no device files {}", devices.join("nvidia0").display()) });
    }
    names.extend(DEVICE_FILES.iter().map(|&name| name.to_owned()));
    let of = |name: &String| {
        let path = devices.join(name);
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(_) => json!({ "path": path, "state": "can be opened" }),
            Err(error) => json!({ "path": path, "error": error.to_string() }),
        }
    };
    json!({ "files": names.iter().map(of).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_known_by_what_its_runtime_leaves() {
        let root = tempfile::tempdir().expect("a folder");
        let of = |variables: &[(&str, &str)]| {
            container(root.path(), |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(of(&[]), json!({ "kind": "none" }));
        std::fs::create_dir_all(root.path().join("proc/1")).expect("a folder");
        std::fs::write(root.path().join("proc/1/cgroup"), "0::/init.scope\n").expect("writes");
        assert_eq!(of(&[])["kind"], "none");
        std::fs::write(root.path().join("proc/1/cgroup"), "1:name=systemd:/docker/abc\n").expect("writes");
        assert_eq!((&of(&[])["kind"], &of(&[])["by"]), (&json!("container"), &json!("/proc/1/cgroup")));
        std::fs::write(root.path().join(".dockerenv"), "").expect("writes");
        let docker = of(&[("NVIDIA_DRIVER_CAPABILITIES", "utility")]);
        assert_eq!((&docker["kind"], &docker["driver_capabilities"]), (&json!("docker"), &json!("utility")));
        assert_eq!(of(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1")])["kind"], "kubernetes");
    }

    #[test]
    fn device_files_are_told_with_what_keeps_us_from_them() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(permissions(folder.path())["state"].as_str().is_some_and(|state| state.contains("nvidia0")));
        for name in ["nvidia0", "nvidiactl", "nvidia-modeset", "nvidiax"] {
            std::fs::write(folder.path().join(name), "").expect("writes");
        }
        // Nobody may write a folder as a file, whoever runs this.
        std::fs::create_dir(folder.path().join("nvidia1")).expect("a folder");
        let files = permissions(folder.path())["files"].clone();
        let told: Vec<(String, bool)> = (files.as_array().expect("a list").iter())
            .map(|file| (file["path"].as_str().expect("a path").rsplit('/').next().expect("a name").to_owned(), file["error"].is_string()))
            .collect();
        let wanted = [("nvidia0", false), ("nvidia1", true), ("nvidiactl", false), ("nvidia-uvm", true)];
        assert_eq!(told, wanted.map(|(name, is_refused)| (name.to_owned(), is_refused)));
    }
}
