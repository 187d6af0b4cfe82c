//! Probes through the assembler, and the constructs' machine code.

#[path = "../../verdigris-kir/src/ptx/tests/assembler.rs"]
mod assembler;

use std::path::{Path, PathBuf};
use std::process::Command;

use verdigris_kir::ptx::{self, Isa};
use verdigris_kir::verify;
use verdigris_probes::{conformance, constructs};

/// The assembler, or `None` after saying why there is none.
fn assembler() -> Option<PathBuf> {
    assembler::find().inspect_err(|why| eprintln!("skipped: {why}; `cargo xtask ptxas --install` fetches the tools")).ok()
}

#[test]
fn every_construct_assembles_without_spills_and_without_serialized_products() {
    let Some(ptxas) = assembler() else { return };
    let nvdisasm = ptxas.with_file_name("nvdisasm");
    if !nvdisasm.is_file() {
        return eprintln!("skipped: {} is no file", nvdisasm.display());
    }
    let disassemble = |cubin: &Path| {
        let output = Command::new(&nvdisasm).arg("-c").arg(cubin).output().expect("tools run");
        let code = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{code}{}", String::from_utf8_lossy(&output.stderr));
        code
    };
    for probe in constructs::all() {
        let verified = verify::verify((probe.build)()).expect("kernels are free of faults");
        let text = ptx::print(&verified, Isa::V9_0);
        let (words, code) = assembler::assemble_with(&ptxas, verified.target.ptx(), &text, disassemble)
            .unwrap_or_else(|words| panic!("{}: {words}", probe.name));
        assert!(!words.contains("(C75") && !words.contains("(C76") && !words.contains("warning"), "{}: {words}", probe.name);
        assert!(words.contains(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"), "{}: {words}", probe.name);
        let count = |what: &str| code.lines().filter(|line| line.contains(what)).count();
        let (stages, products) = (count("WARPGROUP.ARRIVE"), count("GMMA."));
        assert_eq!(stages, probe.allowances.wgmma_stages as usize, "{}: stages of wgmma, holding {products} products", probe.name);
        assert_eq!(products > 0, stages > 0, "{}: the disassembler's words have changed", probe.name);
    }
}

#[test]
fn every_conformance_probe_assembles_without_spills_or_serialized_products() {
    let Some(ptxas) = assembler() else { return };
    let mut failures = Vec::new();
    for probe in conformance::probes() {
        for launch in probe.program.launches() {
            let body = verify::verify(launch.kernel.build()).unwrap();
            match assembler::assemble(&ptxas, body.target.ptx(), &ptx::print(&body, Isa::V9_0)) {
                Ok(said) => {
                    let line = said.lines().find(|line| {
                        line.contains("warning")
                            || line.contains("serializ")
                            || (line.contains("spill") && !line.contains(" 0 bytes spill stores"))
                    });
                    if let Some(line) = line {
                        failures.push(format!("{}: {line}", probe.name));
                    }
                }
                Err(said) => failures.push(format!("{}: {}", probe.name, said.lines().next().unwrap_or(""))),
            }
        }
    }
    assert!(failures.is_empty(), "{} of the kernels, such as\n{}", failures.len(), failures[..failures.len().min(20)].join("\n"));
}
