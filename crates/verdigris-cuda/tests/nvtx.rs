//! NVTX with a profiler that is made on the spot: a small library, compiled here, that writes down what it hears.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Command;

use verdigris_cuda::nvtx::{Nvtx, NvtxError};

/// What every such library has: it adds lines to the file beside it.
const WRITES: &str = r#"
use std::ffi::{c_char, c_int, c_void, CStr};
use std::io::Write;
fn write(line: &str) {
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(env!("HEARD")).unwrap();
    writeln!(file, "{line}").unwrap();
}
unsafe extern "C" fn push(name: *const c_char) -> c_int {
    write(&format!("push {}", unsafe { CStr::from_ptr(name) }.to_str().unwrap()));
    0
}
unsafe extern "C" fn pop() -> c_int { write("pop"); 0 }
"#;

/// A profiler as NVTX documents it, which also insists on a table that we never call.
const INJECTION: &str = r#"
#[repr(C)]
struct Callbacks { size: usize, functions: unsafe extern "C" fn(c_int, *mut *mut *mut *const c_void, *mut u32) -> c_int }
#[unsafe(no_mangle)]
unsafe extern "C" fn InitializeInjectionNvtx2(tables: unsafe extern "C" fn(u32) -> *const c_void) -> c_int {
    unsafe {
        let callbacks = tables(1) as *const Callbacks;
        assert!((*callbacks).size >= std::mem::size_of::<Callbacks>());
        assert!(tables(99).is_null() && !tables(3).is_null());
        for module in [5, 1] {
            let (mut table, mut size) = (std::ptr::null_mut(), 0);
            if ((*callbacks).functions)(module, &mut table, &mut size) == 0 || size < 12 { return 0; }
            if module == 1 {
                **table.add(9) = push as *const c_void;
                **table.add(11) = pop as *const c_void;
            }
        }
    }
    write("initialized");
    ANSWER
}
"#;

fn library(folder: &Path, name: &str, source: &str) -> PathBuf {
    let (file, out) = (folder.join(format!("{name}.rs")), folder.join(format!("lib{name}.so")));
    std::fs::write(&file, source).expect("written");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let done = Command::new(compiler)
        .args(["--edition", "2024", "--crate-type", "cdylib", "-A", "warnings", "-C", "panic=abort", "-o"])
        .args([&out, &file])
        .env("HEARD", folder.join("heard"))
        .status()
        .expect("the compiler that builds this test is there");
    assert!(done.success(), "{name} compiles");
    out
}

#[test]
fn a_profiler_hears_ranges_and_declines_or_is_declined() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let heard = || std::fs::read_to_string(folder.join("heard")).unwrap_or_default();

    // One that says no.
    let declines = library(folder, "declines", &format!("{WRITES}{}", INJECTION.replace("ANSWER", "0")));
    let error = Nvtx::load(Some(&declines)).expect_err("it declined");
    assert!(matches!(error, NvtxError::Declined { .. }), "{error}");

    let listens = library(folder, "listens", &format!("{WRITES}{}", INJECTION.replace("ANSWER", "1")));
    std::fs::remove_file(folder.join("heard")).expect("removed");
    let nvtx = Nvtx::load(Some(&listens)).expect("it listens");
    assert_eq!(nvtx.path(), listens);
    nvtx.push("step 1");
    // A second door of one process uses what is there.
    let again = Nvtx::load(Some(&listens)).expect("the same");
    again.push("zero\0byte");
    again.pop();
    let long = "é".repeat(300);
    nvtx.push(&long);
    nvtx.pop();
    nvtx.pop();
    let cut = "é".repeat(127);
    assert_eq!(heard(), format!("initialized\npush step 1\npush zero\npop\npush {cut}\npop\npop\n"));

    // A second profiler cannot have the process too.
    let second = library(folder, "second", &format!("{WRITES}{}", INJECTION.replace("ANSWER", "1")));
    let error = Nvtx::load(Some(&second)).expect_err("taken");
    assert!(matches!(&error, NvtxError::Taken { first, .. } if *first == listens), "{error}");
}
