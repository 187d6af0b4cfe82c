//! Small kernels as text, kept beside the test, and accepted by the assembler without a remark.

use super::{assembler, kernels};
use crate::ir::KernelBody;
use crate::ptx::{Isa, print::print_body};
use std::path::Path;

pub(crate) fn check_snapshot(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ptx/tests/snapshots").join(name);
    if std::env::var_os("VERDIGRIS_BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
        return;
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    if kept != text {
        let line = kept.lines().zip(text.lines()).position(|(a, b)| a != b).unwrap_or(kept.lines().count().min(text.lines().count()));
        panic!(
            "{name} differs from line {} on:\n  kept {:?}\n  new  {:?}\nVERDIGRIS_BLESS=1 takes the new text over",
            line + 1,
            kept.lines().nth(line),
            text.lines().nth(line)
        );
    }
}

fn check(name: &str, body: KernelBody) {
    let text = print_body(&body, Isa::V9_0);
    assert_eq!(text, print_body(&body, Isa::V9_0));
    check_snapshot(&format!("{name}.ptx"), &text);
    check_snapshot(&format!("{name}.kir"), &crate::text::print(&body));
    check_assembly(name, body.target.ptx(), &text);
}

fn check_assembly(name: &str, arch: &str, text: &str) {
    match assembler::find() {
        Err(why) => eprintln!("not assembled: {why}"),
        Ok(ptxas) => {
            let said = assembler::assemble(&ptxas, arch, text).unwrap_or_else(|said| panic!("{name}: {said}\n{text}"));
            assert!(!said.contains("(C7") && said.contains("0 bytes spill stores"), "{name}: {said}");
        }
    }
}

#[test]
fn a_loop_over_elements() {
    check("scale", kernels::scale());
}

#[test]
fn roles_with_tma_and_a_product() {
    check("tile", kernels::tile());
}

#[test]
fn every_kind_of_control_flow() {
    check("control", kernels::control());
}

#[test]
fn a_kernel_written_in_the_language() {
    let body = kernels::bias_relu();
    // Not kept as a snapshot, since it holds the lines of the language's own source.
    let verified = crate::verify::verify(body.clone()).unwrap();
    let text = crate::ptx::print(&verified, Isa::V9_0);
    assert_eq!(text, print_body(&body, Isa::V9_0));
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    assert!(lines.contains(&".param .u64 .ptr .global .align 16 arg_x,"), "{text}");
    assert!(lines.iter().any(|line| line.starts_with("ld.global.nc.v4.b32 {")), "{text}");
    check_assembly("bias_relu", "sm_80", &text);
}
