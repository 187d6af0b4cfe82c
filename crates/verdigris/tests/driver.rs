//! F2: a driver that is too old, or missing, is counted by its kind. It is a library of our own in the place of the driver's, or none: this program runs
//! itself again where the linker finds that.
#![forbid(unsafe_code)]
#![cfg(unix)]

use std::path::Path;
use std::process::Command;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use verdigris::observe::{self, Listen};
use verdigris::{Config, Device, Policy};

/// Enough of a driver to be asked for its version: CUDA 11.8.
const OLD: &str =
    "int cuDriverGetVersion(int *version) { *version = 11080; return 0; }\nint cuInit(unsigned flags) { return (int)flags; }\n";

/// The kind that the process started by the tests below is to find.
const WANTED: &str = "VERDIGRIS_TEST_WANTED_KIND";

/// Runs [`the_kind_is_counted`] where libraries are looked for in this folder first.
fn look_in(folder: &Path, kind: &str) {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--exact", "the_kind_is_counted", "--nocapture"]).env("LD_LIBRARY_PATH", folder).env(WANTED, kind);
    let output = command.output().expect("starts");
    assert!(output.status.success(), "{kind}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_old_driver_is_counted_as_driver_old() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("driver.c");
    std::fs::write(&source, OLD).expect("writes");
    match Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(folder.path().join("libcuda.so.1")).arg(&source).output() {
        Ok(output) => assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            eprintln!("skipped: cc is not there ({error})");
            return;
        }
    }
    look_in(folder.path(), "driver_old");
}

/// What stands in the driver's place is no library, so that the linker finds none, on machines that have a driver too.
#[test]
fn a_missing_driver_is_counted_as_driver_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in verdigris_cuda::DRIVER_LIBRARIES {
        std::fs::write(folder.path().join(name), "no library").expect("writes");
    }
    look_in(folder.path(), "driver_missing");
}

/// In a process of its own: what opening a device moves.
#[test]
fn the_kind_is_counted() {
    let Ok(kind) = std::env::var(WANTED) else { return };
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let _listening = observe::listen(Listen::default());
        let Err(error) = Device::open("cuda:0", &Config::default(), Policy::default()) else { panic!("there is no device behind it") };
        assert_eq!(error.kind(), kind, "{error}");
    });
    let errors: Vec<(Vec<String>, u64)> = (snapshotter.snapshot().into_vec().into_iter())
        .filter(|(key, ..)| key.key().name() == "verdigris_errors_total")
        .map(|(key, _, _, value)| {
            let DebugValue::Counter(count) = value else { panic!("{value:?} is no counter") };
            (key.key().labels().map(|label| format!("{}={}", label.key(), label.value())).collect(), count)
        })
        .collect();
    assert_eq!(errors, [(vec![format!("kind={kind}"), "device=cuda:0".to_owned()], 1)]);
}
