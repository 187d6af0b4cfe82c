//! Every case of `cases/gemm.toml` on the portable GEMM engines, by the interpreter, against the reference.

mod harness;

use std::collections::BTreeMap;
use std::path::Path;

use harness::{Outcome, execute_with, verify, verify_where};
use rayon::prelude::*;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Knobs, Reason};
use verdigris_engines::layout::batch::{BatchIndexArgs, BatchStridesBytes, Chunk};
use verdigris_graph::{GemmProblem, HostScalar, Precision, Problem, Slot};
use verdigris_kir::face::{Header, build};
use verdigris_kir::inst::Special;
use verdigris_kir::interp::matrix::Accumulation;
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_kir::ir::Target;
use verdigris_kir::params::Write;
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_reference::cases::{Case, load_file};
use verdigris_reference::data;
use verdigris_reference::run::{Inputs, Positions, run};
use verdigris_tensor::DType;

fn cases() -> Vec<Case> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cases/gemm.toml");
    load_file(&path).expect("the case file is valid")
}

/// Runs all cases on an engine, and returns how many it refused, by reason.
fn all_cases_on(name: &str) -> BTreeMap<&'static str, usize> {
    let engine = verdigris_engines::engine(name).expect("the engine is registered");
    let arch = Arch::virtual_device(4);
    let kernels = Kernels::new();
    let mut refused = BTreeMap::new();
    let mut failures = Vec::new();
    let mut taken = 0;
    let cases = cases();
    let outcomes = cases.par_iter().enumerate().map(|(number, case)| verify(engine, case, &arch, &kernels, number as u64));
    for outcome in outcomes.collect::<Vec<_>>() {
        match outcome {
            Ok(Outcome::Refused(refusal)) => *refused.entry(refusal.reason.name()).or_insert(0) += 1,
            Ok(Outcome::Passed) => taken += 1,
            Err(failure) => failures.push(failure),
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    assert!(taken > 0, "{name} takes nothing: {refused:?}");
    refused
}

#[test]
fn simt_takes_every_case_and_is_right() {
    assert_eq!(all_cases_on("gemm.simt"), BTreeMap::new());
}

#[test]
fn mma_is_right_where_it_takes_a_case() {
    let refused = all_cases_on("gemm.mma");
    // Strides in both directions, f32 and fp8 without loss, rows of bytes that no copy can take: what `gemm.simt` is there for.
    assert!(refused.keys().all(|reason| ["alignment", "layout", "precision"].contains(reason)), "{refused:?}");
}

#[test]
fn lines_that_begin_anywhere_meet_in_no_bank_on_their_way() {
    let engine = verdigris_engines::engine("gemm.wgmma").expect("the engine is registered");
    let groups = ["bf16-anywhere-deep", "tf32-anywhere-rows-deep"];
    let of_group: Vec<Case> = cases().into_iter().filter(|case| groups.iter().any(|group| case.id.contains(group))).collect();
    let mut seen = 0;
    for case in of_group {
        let problem = &case.problem;
        let candidate = engine.accept(problem, &Arch::virtual_device(12)).expect("it is taken");
        let aligns = |knobs: &&Knobs| knobs.value("aligns").is_some() && knobs.value("parts").is_some();
        // Where parts are kept as they are, nothing else passes shared memory.
        let Some(knobs) = candidate.knobs().configs().iter().find(aligns).cloned() else { continue };
        let program = candidate.program(&knobs).expect("listed");
        let mut memory = Memory::new();
        for operand in problem.buffers().expect("canonical") {
            memory.add(&vec![0; operand.layout.span_elements() as usize * operand.dtype.bytes()]);
        }
        let report = interp::run(&program, &Kernels::new(), &mut memory, &Options::schedule(1)).expect("no findings");
        let counted = &report.launches[0].1;
        assert!(counted.shared_wavefronts > 0);
        assert_eq!(counted.bank_conflicts, 0, "{}: of {} turns", case.id, counted.shared_wavefronts);
        seen += 1;
    }
    assert!(seen > 4, "{seen} are offered in parts");
}

/// On a machine of more SMs than the cases see elsewhere, where tiles are few enough to be split so.
#[test]
fn parts_are_added_up_by_a_launch_of_their_own() {
    let engine = verdigris_engines::engine("gemm.wgmma").expect("the engine is registered");
    let kernels = Kernels::new();
    for (id, sms) in [("bf16-deep-batch", 36), ("bf16-deep-anywhere", 12), ("bf16-deepest", 20)] {
        let of_group: Vec<Case> = cases().into_iter().filter(|case| case.id.contains(id)).collect();
        assert!(!of_group.is_empty(), "{id}");
        of_group.par_iter().enumerate().for_each(|(number, case)| {
            let arch = Arch::virtual_device(sms);
            let candidate = engine.accept(&case.problem, &arch).expect("it is taken");
            let in_parts = |knobs: &Knobs| knobs.value("parts").is_some();
            let configs = candidate.knobs().configs().iter().filter(|knobs| in_parts(knobs)).count();
            assert!(configs >= 4, "{}: {configs} configs have a split-K reduction", case.id);
            let outcome = verify_where(engine, case, &arch, &kernels, number as u64, in_parts);
            assert!(matches!(outcome, Ok(Outcome::Passed)), "{:?}", outcome.err());
        });
    }
}

/// Of two CTAs that share a tile, the later one waits for what the earlier one keeps, at whatever moment of that it comes.
#[test]
fn two_parts_of_a_tile_wait_for_each_other() {
    let engine = verdigris_engines::engine("gemm.wgmma").expect("the engine is registered");
    let (arch, kernels) = (Arch::virtual_device(5), Kernels::new());
    let case = cases().into_iter().find(|case| case.id.contains("bf16-one-tile-deep") && case.id.contains("65x128x640")).expect("a case");
    let in_two = |knobs: &Knobs| knobs.value("split") == Some(3) && knobs.value("along") == Some(0);
    let candidate = engine.accept(&case.problem, &arch).expect("it is taken");
    assert!(candidate.knobs().configs().iter().any(in_two), "no config has two parts of a tile");
    (0..24u64).into_par_iter().for_each(|schedule| {
        let outcome = verify_where(engine, &case, &arch, &kernels, schedule, in_two);
        assert!(matches!(outcome, Ok(Outcome::Passed)), "{:?}", outcome.err());
    });
}

/// The rounding model does not see whether an operand is rounded to tf32 or more exact than that; the bits do.
#[test]
fn operands_are_rounded_to_tf32_without_tensor_cores() {
    let engine = verdigris_engines::engine("gemm.simt").expect("the engine is registered");
    let (arch, kernels) = (Arch::virtual_device(2), Kernels::new());
    let case = cases().into_iter().find(|case| case.id == "gemm/tf32/nt/64x40x64").expect("a case");
    let Problem::Gemm(problem) = &case.problem else { panic!("a product") };
    let inputs = data::inputs(&case.problem, data::Distribution::Normal, case.seed);
    // To nearest, ties away from zero: 13 bits of the fraction are dropped.
    let round = |word: [u8; 4]| ((u32::from_le_bytes(word).wrapping_add(0x1000)) & !0x1fff).to_le_bytes();
    let mut rounded = inputs.clone();
    for slot in [problem.a.slot, problem.b.slot] {
        let buffer = rounded.buffers.get_mut(&slot).expect("an operand");
        let words = buffer.chunks_exact(4).flat_map(|word| round(word.try_into().expect("four bytes"))).collect();
        assert_ne!(*buffer, words, "some operand needs more bits than tf32 has");
        *buffer = words;
    }
    let candidate = engine.accept(&case.problem, &arch).expect("it is taken");
    for knobs in candidate.knobs().configs() {
        let program = candidate.program(knobs).expect("a config of its own");
        let result = |given: &Inputs| result(&case, &program, given, &arch, &kernels);
        assert!(result(&inputs) == result(&rounded), "{knobs}");
    }
}

/// What `gemm.wgmma` makes of row-major f32 operands under the policy `fp32`, on a tensor core that cuts sums off; the whole depth in one chain.
fn sums_of_terms(operands: DType, [m, n, k]: [usize; 3], a: &[f32], b: &[f32]) -> Vec<f32> {
    let engine = verdigris_engines::engine("gemm.wgmma").expect("the engine is registered");
    let packed = GemmProblem::packed(m as u64, n as u64, k as u64, operands, DType::F32).expect("a valid problem");
    let problem = GemmProblem { precision: Precision::Fp32, ..packed }.canonical().expect("a valid problem");
    let candidate = engine.accept(&Problem::Gemm(problem), &Arch::virtual_device(4)).unwrap_or_else(|refusal| panic!("{refusal}"));
    // Shapes from 26 on split the depth among a cluster's CTAs.
    let whole = |knobs: &&Knobs| {
        knobs.value("split") == Some(0) && knobs.value("parts").is_none() && knobs.value("shape").is_some_and(|shape| shape < 26)
    };
    let knobs = candidate.knobs().configs().iter().find(whole).expect("a config without a split").clone();
    let notes = candidate.notes(&knobs).expect("listed");
    assert_eq!((notes.split_operands, notes.down_convert), (operands == DType::F32, None));
    let bytes = |values: &[f32]| -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| if operands == DType::F32 { value.to_le_bytes().to_vec() } else { value.to_le_bytes()[2..].to_vec() })
            .collect()
    };
    let mut memory = Memory::new();
    memory.add(&bytes(a));
    memory.add(&bytes(b));
    let d = memory.add(&vec![0xA5; m * n * 4]);
    let options = Options { sms: 4, accumulation: Accumulation::Hopper, ..Options::schedule(5) };
    let program = candidate.program(&knobs).expect("a listed config has a program");
    interp::run(&program, &Kernels::new(), &mut memory, &options).unwrap_or_else(|findings| panic!("{findings}"));
    memory.to_vec(d).chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().expect("four bytes"))).collect()
}

/// Over 16,384 products on a tensor core that cuts off: within 4 times 2⁻²⁴ · √(K/6) of the sums in f64, the error that one chain of f32 multiply-adds
/// has in the mean. Sums of 16-bit operands, which stay in the accumulators, lie outside, so this would tell.
#[test]
fn sums_of_terms_are_as_close_as_multiply_adds_however_deep() {
    let extents @ [m, n, k] = [64, 32, 16384];
    let mut random = data::Random::new(77);
    let mut draw =
        |count: usize| -> Vec<f32> { (0..count).map(|_| (random.below(1 << 24) as f32 - (1 << 23) as f32) / (1 << 23) as f32).collect() };
    let (a, b) = (draw(m * k), draw(k * n));
    let error = |operands: DType, a: &[f32], b: &[f32]| {
        let out = sums_of_terms(operands, extents, a, b);
        let (mut wrong, mut whole) = (0.0, 0.0);
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let sum: f64 = (0..k).map(|i| f64::from(a[row * k + i]) * f64::from(b[i * n + column])).sum();
            wrong += (f64::from(out[row * n + column]) - sum).powi(2);
            whole += sum * sum;
        }
        (wrong / whole).sqrt()
    };
    let bound = 4.0 * 2f64.powi(-24) * (k as f64 / 6.0).sqrt();
    let terms = error(DType::F32, &a, &b);
    assert!(terms < bound, "{terms:e}, allowed is {bound:e}");
    let halves = |values: &[f32]| -> Vec<f32> { values.iter().map(|value| f32::from_bits(value.to_bits() & 0xffff_0000)).collect() };
    let in_place = error(DType::Bf16, &halves(&a), &halves(&b));
    assert!(in_place > bound, "sums kept in accumulators have only {in_place:e}: the model of the tensor core does not cut off");
}

/// Infinities, NaN, the largest and the smallest numbers go through terms as through multiply-adds.
#[test]
fn terms_keep_what_is_special() {
    let extents @ [m, n, k] = [70, 24, 72];
    let (mut a, mut b) = (vec![0.0f32; m * k], vec![1.0f32; k * n]);
    let largest = f32::MAX;
    let specials =
        [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, largest, -largest, 2f32.powi(-109) * 1.234_567, 2f32.powi(-126), 2f32.powi(-134)];
    for (row, special) in specials.into_iter().enumerate() {
        a[row * k + 71 - row] = special;
    }
    // An infinity meets an infinity of the other sign in the same sum, and in another step.
    a[20 * k + 1] = f32::INFINITY;
    a[20 * k + 70] = f32::NEG_INFINITY;
    for i in 0..k {
        b[i * n + 1] = 0.0;
        b[i * n + 2] = -1.0;
        b[i * n + 3] = 0.5;
    }
    b[71 * n + 4] = f32::NEG_INFINITY;
    let out = sums_of_terms(DType::F32, extents, &a, &b);
    for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
        let expected = (0..k).map(|i| f64::from(a[row * k + i]) * f64::from(b[i * n + column])).sum::<f64>() as f32;
        let got = out[row * n + column];
        let near = (f64::from(got) - f64::from(expected)).abs() <= 2f64.powi(-22) * f64::from(expected).abs() + 2f64.powi(-134);
        assert!(got == expected || got.is_nan() && expected.is_nan() || near, "{row}, {column}: {got:e}, expected {expected:e}");
    }
}

/// The bytes that a program leaves in D, of a case without host scalars.
fn result(case: &Case, program: &Program, given: &Inputs, arch: &Arch, kernels: &Kernels) -> Vec<u8> {
    let Problem::Gemm(problem) = &case.problem else { panic!("a product") };
    let expected = run(&case.problem, given, Positions::All).expect("a reference").remove(0);
    let mut memory = Memory::new();
    for slot in (0..3).map(Slot) {
        memory.add(&if slot == problem.d.slot { data::output_buffer(&expected, given) } else { given.buffers[&slot].clone() });
    }
    let options = Options { sms: arch.sm_count, ..Options::schedule(1) };
    interp::run(program, kernels, &mut memory, &options).unwrap_or_else(|findings| panic!("{findings}"));
    memory.to_vec(problem.d.slot.0 as usize)
}

/// Nor does the rounding model see sums that are kept more exact than in f16, which the precision is; again the bits do, where D has more of them.
#[test]
fn sums_in_f16_are_numbers_of_f16() {
    let (arch, kernels) = (Arch::virtual_device(2), Kernels::new());
    let case = cases().into_iter().find(|case| case.id == "gemm/f16-sums-wide/nt/64x32x48").expect("a case");
    let inputs = data::inputs(&case.problem, case.distribution, case.seed);
    for engine in ["gemm.simt", "gemm.mma", "gemm.wgmma"] {
        let engine = verdigris_engines::engine(engine).expect("the engine is registered");
        let candidate = engine.accept(&case.problem, &arch).expect("it is taken");
        for knobs in candidate.knobs().configs() {
            let program = candidate.program(knobs).expect("a config of its own");
            let bytes = result(&case, &program, &inputs, &arch, &kernels);
            let words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")));
            // An f32 that is a number of f16 has its last 13 bits free. Behind D the buffer goes on.
            let wrong = words.take(64 * 32).filter(|word| word & 0x1fff != 0).count();
            assert_eq!(wrong, 0, "{} with {knobs}: so many of {} sums are none of f16", engine.id(), 64 * 32);
        }
    }
}

/// What tensor maps cannot describe is refused for that, before anything asks for a map of it: a depth of 0, and two batch dims. So is what the tensor
/// cores do not multiply as precisely as asked.
#[test]
fn what_hopper_cannot_multiply_is_refused_for_that() {
    let engine = verdigris_engines::engine("gemm.wgmma").expect("the engine is registered");
    for (id, reason, seen) in [
        ("gemm/f16-tiny/nn/8x8x0", Reason::Extent, "m, n, k = 8, 8, 0; none may be 0"),
        ("gemm/f16-batch-two-dims/nn/17x24x16", Reason::Batch, "2 batch dims, takes at most 1"),
        ("gemm/f32-ieee/nt/67x35x41", Reason::Precision, "Ieee of f32 and f32"),
    ] {
        let case = cases().into_iter().find(|case| case.id == id).expect("a case");
        let refusal = engine.accept(&case.problem, &Arch::virtual_device(2)).err().expect("it is refused");
        assert!(refusal.reason == reason && refusal.seen == seen, "{id}: {refusal}");
    }
}

/// A β that is 0 at execution leaves C out, NaN and all, as one does that is known beforehand.
#[test]
fn c_is_not_read_where_beta_is_bound_to_zero() {
    let (arch, kernels) = (Arch::virtual_device(2), Kernels::new());
    let case = cases().into_iter().find(|case| case.id.starts_with("gemm/f16-alpha-beta-bound/")).expect("a case");
    let Problem::Gemm(problem) = &case.problem else { panic!("a product") };
    let (Some(c), HostScalar::Bound(beta)) = (&problem.c, problem.beta) else { panic!("a C, and a β that is bound") };
    let mut inputs = data::inputs(&case.problem, case.distribution, case.seed);
    assert!(inputs.scalars.insert(beta, 0.0).is_some_and(|usual| usual != 0.0));
    inputs.buffers.get_mut(&c.slot).expect("C").fill(0xff);
    let mut taken = 0;
    for engine in ["gemm.simt", "gemm.mma", "gemm.wgmma"] {
        let engine = verdigris_engines::engine(engine).expect("the engine is registered");
        let Ok(candidate) = engine.accept(&case.problem, &arch) else { continue };
        let program = candidate.program(candidate.knobs().default_config()).expect("a config of its own");
        let outcome = execute_with(&case, &inputs, &program, &arch, &kernels, 1);
        assert!(outcome.is_ok(), "{}: {}", engine.id(), outcome.unwrap_err());
        taken += 1;
    }
    assert!(taken >= 2, "{taken} engines take it");
}

verdigris_kir::parameters! {
    /// A product of a batch, and where its number goes.
    struct Product / ProductArguments of () as _spec {
        batch: BatchIndexArgs = (),
        strides: BatchStridesBytes = (),
        y: Write = 4,
    }
}

/// More products than a row of the grid has CTAs, in dims that lie apart: each is taken once, at its own place, and CTAs beyond the last do nothing.
#[test]
fn products_beyond_a_row_of_the_grid_are_each_taken_once() {
    let kernel = KernelRef::new("products", || {
        build(Header { name: "products".into(), target: Target::Sm80, threads: 32, ..Header::default() }, |k| {
            let Product { batch, strides, y } = Product::declare(k, &());
            let indices = batch.of_cta();
            let number = k.special(Special::CtaZ) * k.special(Special::GridY) + k.special(Special::CtaY);
            k.when(k.thread().eq(0), || k.st_global(strides.matrix(y, indices), 0, number));
        })
    });
    // A word is left free behind each run of the innermost dim, and three behind each of the middle one.
    let [outer, middle, inner] = [2u64, 3, 10_923];
    let [run, block] = [inner + 1, middle * (inner + 1) + 3];
    let chunks = Chunk::all(&[outer, middle, inner]);
    let [chunk] = &chunks[..] else { panic!("{} launches", chunks.len()) };
    let args = ProductArguments { batch: chunk.index(), strides: [4 * block, 4 * run, 4], y: Address::buffer(0) };
    let [y, z] = chunk.grid();
    let mut program = Program::default();
    program.launch(Launch::new(kernel, [1, y, z], args.bound(&())));
    let mut memory = Memory::new();
    memory.add_filled(4 * outer * block, 0xff);
    interp::run(&program, &Kernels::new(), &mut memory, &Options::schedule(1)).unwrap_or_else(|findings| panic!("{findings}"));
    let mut wanted = vec![u32::MAX; (outer * block) as usize];
    for number in 0..outer * middle * inner {
        let (i, j, l) = (number / (middle * inner), number / inner % middle, number % inner);
        wanted[(i * block + j * run + l) as usize] = number as u32;
    }
    let got: Vec<u32> = memory.to_vec(0).chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes"))).collect();
    assert!(got == wanted, "the first wrong word is {:?}", got.iter().zip(&wanted).position(|(got, wanted)| got != wanted));
}
