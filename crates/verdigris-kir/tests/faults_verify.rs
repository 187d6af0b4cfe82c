//! Planted faults for the verifier: each kernel is wrong in one way, and the verifier names the rule and the line. Beside them stand
//! kernels that come close to the fault without committing it, which must pass.

mod faults_verify {
    mod cut;
    mod limits;
    mod mma;
    mod proxy;
    mod publish;
    mod scope;
    mod sync;
    mod types;
    mod uniform;
}

use std::cell::Cell;
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::inst::{MatrixType, WgmmaShape};
use verdigris_kir::ir::{Access, KernelBody, Loc, MapDecl, MapType, Swizzle, Target};
use verdigris_kir::verify::{Fault, verify};

/// The lines that a planted fault is about.
#[derive(Default)]
pub(crate) struct Lines {
    first: Cell<u32>,
    second: Cell<u32>,
}

impl Lines {
    /// The line at fault.
    pub(crate) fn here(&self, line: u32) {
        self.first.set(line);
    }

    /// The other line that the message must name.
    pub(crate) fn also(&self, line: u32) {
        self.second.set(line);
    }
}

pub(crate) fn header(target: Target, threads: u32) -> Header {
    Header { name: "planted".into(), target, threads, ..Header::default() }
}

pub(crate) fn faults_of(body: KernelBody) -> Vec<Fault> {
    match verify(body) {
        Ok(_) => Vec::new(),
        Err(faults) => faults.faults,
    }
}

/// Builds a kernel with one planted fault and checks that this fault, and no other rule, is reported on its line.
#[track_caller]
pub(crate) fn caught(rule: &str, words: &[&str], header: Header, describe: impl for<'k> Fn(Kernel<'k>, &Lines)) -> Fault {
    let lines = Lines::default();
    let body = build(header, |k| describe(k, &lines));
    caught_in(rule, words, body, &lines)
}

#[track_caller]
pub(crate) fn caught_in(rule: &str, words: &[&str], body: KernelBody, lines: &Lines) -> Fault {
    let positions = body.locations.clone();
    let faults = faults_of(body);
    assert!(!faults.is_empty(), "no fault was found, expected [{rule}]");
    assert!(faults.iter().all(|fault| fault.rule == rule), "expected [{rule}] alone, found {faults:#?}");
    let fault = faults[0].clone();
    let line = |Loc(index): Loc| positions[index as usize].line;
    if lines.first.get() != 0 {
        assert_eq!(line(fault.loc), lines.first.get(), "{}", fault.message);
        assert!(fault.message.starts_with(&positions[fault.loc.0 as usize].to_string()), "{}", fault.message);
    }
    if lines.second.get() != 0 {
        let second = fault.second.unwrap_or_else(|| panic!("no second line in {fault:?}"));
        assert_eq!(line(second), lines.second.get(), "{}", fault.message);
    }
    for word in words {
        assert!(fault.message.contains(word), "{word:?} is not in {}", fault.message);
    }
    fault
}

/// Checks that a correct kernel passes.
#[track_caller]
pub(crate) fn clean(header: Header, describe: impl for<'k> Fn(Kernel<'k>)) {
    let faults = faults_of(build(header, describe));
    assert!(faults.is_empty(), "false faults: {faults:#?}");
}

/// A product of 64×`n`×16 in bf16 with f32 accumulators, both operands in shared memory.
pub(crate) const fn product(n: u32) -> WgmmaShape {
    WgmmaShape {
        n,
        a: MatrixType::Bf16,
        b: MatrixType::Bf16,
        d: MatrixType::F32,
        a_in_registers: false,
        transpose_a: false,
        transpose_b: false,
        negate_a: false,
        negate_b: false,
        saturate: false,
        sparse: false,
    }
}

/// A K-major tile of bf16 with 128-byte rows, as a map.
pub(crate) fn tile_map(rows: u32) -> MapDecl {
    MapDecl { ty: MapType::Bf16, rank: 2, box_dims: vec![64, rows], im2col: false, swizzle: Swizzle::B128, access: Access::ReadWrite }
}
