//! Spans as ranges, heard by a profiler that is made on the spot: a small library, compiled here, that writes down what it hears.
#![cfg(target_os = "linux")]

use std::process::Command;

use tracing_subscriber::layer::SubscriberExt;
use verdigris_telemetry::NvtxLayer;

const PROFILER: &str = r#"
use std::ffi::{c_char, c_int, c_void, CStr};
use std::io::Write;
fn write(line: &str) {
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(env!("HEARD")).unwrap();
    writeln!(file, "{line}").unwrap();
}
unsafe extern "C" fn push(name: *const c_char) -> c_int { write(unsafe { CStr::from_ptr(name) }.to_str().unwrap()); 0 }
unsafe extern "C" fn pop() -> c_int { write("pop"); 0 }
#[repr(C)]
struct Callbacks { size: usize, functions: unsafe extern "C" fn(c_int, *mut *mut *mut *const c_void, *mut u32) -> c_int }
#[unsafe(no_mangle)]
unsafe extern "C" fn InitializeInjectionNvtx2(tables: unsafe extern "C" fn(u32) -> *const c_void) -> c_int {
    unsafe {
        let callbacks = tables(1) as *const Callbacks;
        let (mut table, mut size) = (std::ptr::null_mut(), 0);
        if ((*callbacks).functions)(1, &mut table, &mut size) == 0 || size < 12 { return 0; }
        **table.add(9) = push as *const c_void;
        **table.add(11) = pop as *const c_void;
    }
    1
}
"#;

#[test]
fn spans_of_the_library_are_ranges_and_others_are_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file("profiler.rs"), PROFILER).expect("written");
    let done = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition", "2024", "--crate-type", "cdylib", "-A", "warnings", "-C", "panic=abort", "-o"])
        .args([file("libprofiler.so"), file("profiler.rs")])
        .env("HEARD", file("heard"))
        .status()
        .expect("the compiler that builds this test is there");
    assert!(done.success(), "the profiler compiles");

    let layer = NvtxLayer::load(Some(&file("libprofiler.so"))).expect("it listens");
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
        let _step = tracing::info_span!(target: "an_application", "step").entered();
        let _plan = tracing::info_span!(target: "verdigris", "plan").entered();
        tracing::info_span!(target: "verdigris::serve", "batch").in_scope(|| tracing::info!("an event is no range"));
    });
    assert_eq!(std::fs::read_to_string(file("heard")).expect("heard"), "plan\nbatch\npop\npop\n");
}
