//! Runs of one kernel on the interpreter, with data that is exact in bf16.

use std::sync::Arc;

use verdigris_kir::interp::{self, AsyncPolicy, Kernels, Memory, Options};
use verdigris_kir::ir::{KernelBody, MapDecl, ParamKind};
use verdigris_kir::program::{Address, Arg, Fill, KernelRef, L2Promotion, Launch, MapSpec, Program, Residency, Step};

/// The schedules under which every probe runs: random moments, the earliest and the latest.
pub(crate) fn schedules() -> Vec<Options> {
    let policies = [AsyncPolicy::Earliest, AsyncPolicy::Latest, AsyncPolicy::Random];
    let residents = [1, 2, 4];
    (0..6u64)
        .map(|seed| Options {
            seed,
            async_policy: policies[seed as usize % 3],
            resident_ctas: residents[(seed as usize / 2) % 3],
            step_budget: 2_000_000,
            ..Options::default()
        })
        .collect()
}

/// A small generator: numbers `i/64` with |i| ≤ 64, exact in bf16.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 33) % 129) as f32 / 64.0 - 1.0
    }

    pub(crate) fn take(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

pub(crate) fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| {
            assert_eq!(value.to_bits() & 0xffff, 0, "{value} is not exact in bf16");
            ((value.to_bits() >> 16) as u16).to_le_bytes()
        })
        .collect()
}

pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(crate) fn u32_bytes(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(crate) fn read_bf16(memory: &mut Memory, slot: usize) -> Vec<f32> {
    memory.to_vec(slot).chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
}

pub(crate) fn read_f32(memory: &mut Memory, slot: usize) -> Vec<f32> {
    memory.to_vec(slot).chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// A tiled map over dense memory: dims innermost first.
pub(crate) fn dense_map(slot: usize, decl: MapDecl, dims: &[u64]) -> Arg {
    let mut strides_bytes = Vec::new();
    let mut stride = u64::from(decl.ty.bytes());
    for dim in &dims[..dims.len() - 1] {
        stride *= dim;
        strides_bytes.push(stride);
    }
    let spec = MapSpec {
        element_strides: vec![1; dims.len()],
        decl,
        dims: dims.to_vec(),
        strides_bytes,
        lower_corner: vec![],
        upper_corner: vec![],
        fill: Fill::Zero,
        l2: L2Promotion::B128,
    };
    Arg::TensorMap(Address::buffer(slot), spec)
}

/// What the tensor map that is parameter `index` was declared as.
pub(crate) fn map_decl(body: &KernelBody, index: usize) -> MapDecl {
    match &body.params[index].kind {
        ParamKind::TensorMap(decl) => decl.clone(),
        other => panic!("parameter {index} of {} is {other:?}", body.name),
    }
}

pub(crate) fn number(n: u32) -> Arg {
    Arg::Scalar(verdigris_kir::ir::Ty::U32, u64::from(n))
}

pub(crate) fn float(x: f32) -> Arg {
    Arg::Scalar(verdigris_kir::ir::Ty::F32, u64::from(x.to_bits()))
}

pub(crate) fn pointer(slot: usize) -> Arg {
    Arg::Pointer(Address::buffer(slot))
}

/// One launch of one kernel.
pub(crate) fn launch(body: KernelBody, grid: [u32; 3], residency: Residency, args: Vec<Arg>) -> Launch {
    let name = body.name.clone();
    let body = Arc::new(body);
    Launch { kernel: KernelRef::new(name, move || KernelBody::clone(&body)), grid, residency, overlap: false, args: args.into() }
}

/// Runs launches under a schedule; findings fail the test.
pub(crate) fn run(launches: &[Launch], kernels: &Kernels, memory: &mut Memory, options: &Options) {
    let program = Program { steps: launches.iter().cloned().map(Step::Launch).collect(), ..Program::default() };
    run_program(&program, kernels, memory, options);
}

/// The same with whatever steps.
pub(crate) fn run_program(program: &Program, kernels: &Kernels, memory: &mut Memory, options: &Options) {
    if let Err(findings) = interp::run(program, kernels, memory, options) {
        panic!("seed {} {:?}: {findings}", options.seed, options.async_policy);
    }
}

/// What f64 says of each element, with its bound.
pub(crate) fn wanted(count: usize, element: impl Fn(usize) -> (f64, f64)) -> Vec<(f64, f64)> {
    (0..count).map(element).collect()
}

/// Compares each element within its own bound; NaN is never within.
pub(crate) fn compare(what: &str, got: &[f32], wanted: &[(f64, f64)]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (index, (&value, &(wanted, bound))) in got.iter().zip(wanted).enumerate() {
        let error = (f64::from(value) - wanted).abs();
        assert!(error <= bound, "{what}[{index}] is {value}, wanted {wanted} ± {bound}");
    }
}
