//! The reference against itself and against errors planted on purpose: a right answer passes, each kind of wrong one does not.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use verdigris_graph::{BinaryOp, EpilogueStep, GemmProblem, HostScalar, Matrix, Order, Precision, Problem, Real, Slot, UnaryOp};
use verdigris_reference::compare::{Report, compare};
use verdigris_reference::data::{self, Distribution};
use verdigris_reference::run::{Expected, Inputs, Positions, RunError, run};
use verdigris_reference::{bench_list, cases};
use verdigris_tensor::{DType, num};

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

struct Setting {
    problem: Problem,
    inputs: Inputs,
    expected: Expected,
    before: Vec<u8>,
    right: Vec<u8>,
}

impl Setting {
    fn new(gemm: GemmProblem, distribution: Distribution) -> Setting {
        let problem = Problem::Gemm(gemm.canonical().unwrap());
        let inputs = data::inputs(&problem, distribution, 7);
        let expected = run(&problem, &inputs, Positions::All).unwrap().pop().unwrap();
        let before = data::output_buffer(&expected, &inputs);
        let right = expected.rounded(&before);
        Setting { problem, inputs, expected, before, right }
    }

    fn judge(&self, after: &[u8]) -> Report {
        compare(&self.expected, &self.before, after)
    }
}

/// The same sums in f32, k from the last to the first, by a formula of our own: what an honest engine might answer.
fn honest_f32(gemm: &GemmProblem, inputs: &Inputs, before: &[u8]) -> Vec<u8> {
    let read = |matrix: &Matrix, row, column| {
        let start = matrix.offset(&[], row, column) as usize * matrix.dtype.bytes();
        num::read_element(matrix.dtype, &inputs.buffers[&matrix.slot][start..]).unwrap() as f32
    };
    let mut after = before.to_vec();
    for row in 0..gemm.m {
        for column in 0..gemm.n {
            let mut sum = 0f32;
            for k in (0..gemm.k).rev() {
                sum = read(&gemm.a, row, k).mul_add(read(&gemm.b, k, column), sum);
            }
            let start = gemm.d.offset(&[], row, column) as usize * gemm.d.dtype.bytes();
            num::write_element(gemm.d.dtype, f64::from(sum), &mut after[start..]).unwrap();
        }
    }
    after
}

fn packed(d: DType) -> GemmProblem {
    GemmProblem::packed(9, 12, 200, DType::Bf16, d).unwrap()
}

#[test]
fn a_small_product_by_hand() {
    let gemm = GemmProblem {
        a: Matrix::with_leading_dimension(Slot(0), DType::F32, Order::ColumnMajor, 2),
        c: Some(Matrix::row_major(Slot(3), DType::F32, 2)),
        alpha: HostScalar::Fixed(Real(2.0)),
        beta: HostScalar::Bound(Slot(4)),
        epilogue: vec![
            EpilogueStep::Store { target: Matrix::row_major(Slot(5), DType::F32, 2) },
            EpilogueStep::Binary {
                f: BinaryOp::Sub,
                operand: Matrix { row_stride: 0, ..Matrix::row_major(Slot(6), DType::F32, 2) },
                v_is_right: true,
            },
            EpilogueStep::Unary(UnaryOp::Relu),
        ],
        ..GemmProblem::packed(2, 2, 3, DType::F32, DType::F32).unwrap()
    };
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let mut inputs = Inputs::default();
    // A = [1 2 3; 4 5 6], column by column; B = [1 0; 0 1; 1 1]; so A·B = [4 5; 10 11].
    inputs.buffers.insert(Slot(0), bytes(&[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]));
    inputs.buffers.insert(Slot(1), bytes(&[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]));
    inputs.buffers.insert(Slot(3), bytes(&[10.0, 20.0, 30.0, 40.0]));
    inputs.buffers.insert(Slot(6), bytes(&[10.0, 50.0]));
    inputs.scalars.insert(Slot(4), -0.5);
    let problem = Problem::Gemm(gemm.canonical().unwrap());
    let outputs = run(&problem, &inputs, Positions::All).unwrap();
    let values = |i: usize| outputs[i].values.iter().map(|v| v.value).collect::<Vec<_>>();
    assert_eq!(values(0), [3.0, 0.0, 5.0, 2.0]);
    assert_eq!(values(1), [7.0, 50.0, 5.0, 48.0]);
    assert_eq!(outputs[0].magnitudes, [4.0, 5.0, 10.0, 11.0]);
    let chosen = run(&problem, &inputs, Positions::Some(&[2, 99])).unwrap();
    assert_eq!((chosen[1].positions.as_slice(), chosen[1].values[0].value), (&[2][..], 5.0));

    // beta = 0 at run time: C may hold anything, or be absent.
    inputs.scalars.insert(Slot(4), 0.0);
    inputs.buffers.remove(&Slot(3));
    let outputs = run(&problem, &inputs, Positions::All).unwrap();
    assert_eq!(outputs[0].values[0].value, 8.0);

    inputs.buffers.insert(Slot(1), bytes(&[1.0]));
    assert!(matches!(run(&problem, &inputs, Positions::All), Err(RunError::ShortBuffer { name: "b", have_bytes: 4, need_bytes: 24, .. })));
    inputs.buffers.remove(&Slot(1));
    assert!(matches!(run(&problem, &inputs, Positions::All), Err(RunError::NoBuffer { name: "b", .. })));
    inputs.buffers.insert(Slot(1), bytes(&[0.0; 6]));
    inputs.scalars.clear();
    assert_eq!(run(&problem, &inputs, Positions::All), Err(RunError::NoScalar { slot: Slot(4) }));
}

#[test]
fn an_honest_f32_answer_passes_whatever_the_data() {
    for d in [DType::F32, DType::Bf16, DType::F16, DType::E4m3] {
        for distribution in [
            Distribution::Uniform,
            Distribution::Normal,
            Distribution::SmallIntegers,
            Distribution::SameSign,
            Distribution::Cancellation,
            Distribution::Denormals,
            Distribution::Special,
            Distribution::Zeros,
            Distribution::WideRange,
        ] {
            let setting = Setting::new(packed(d), distribution);
            let Problem::Gemm(gemm) = &setting.problem else { panic!("{} is no gemm", setting.problem.kind()) };
            let report = setting.judge(&honest_f32(gemm, &setting.inputs, &setting.before));
            assert!(report.passes(), "{d} {distribution:?}: {report}");
            assert_eq!(report.elements, 108);
            assert!(setting.judge(&setting.right).passes());
        }
    }
}

#[test]
fn special_values_are_there_and_must_be_right() {
    let setting = Setting::new(packed(DType::F32), Distribution::Special);
    let kinds = |test: fn(f64) -> bool| setting.expected.values.iter().filter(|v| test(v.value)).count();
    assert!(kinds(f64::is_nan) > 0 && kinds(f64::is_finite) > 0, "the data must have both");
    let nan_at = setting.expected.values.iter().position(|v| v.value.is_nan()).unwrap();
    let mut after = setting.right.clone();
    after[nan_at * 4..][..4].copy_from_slice(&1f32.to_le_bytes());
    assert_eq!(setting.judge(&after).failures, 1);
    let finite_at = setting.expected.values.iter().position(|v| v.value.is_finite()).unwrap();
    for wrong in [f32::NAN, f32::INFINITY] {
        let mut after = setting.right.clone();
        after[finite_at * 4..][..4].copy_from_slice(&wrong.to_le_bytes());
        assert_eq!(setting.judge(&after).failures, 1);
    }
}

#[test]
fn a_lost_term_is_seen() {
    // One product of 200 left out of one element.
    for (d, distribution) in
        [(DType::F32, Distribution::SmallIntegers), (DType::F32, Distribution::Normal), (DType::Bf16, Distribution::SmallIntegers)]
    {
        let setting = Setting::new(packed(d), distribution);
        let Problem::Gemm(gemm) = &setting.problem else { panic!("{} is no gemm", setting.problem.kind()) };
        let mut lossy = setting.inputs.clone();
        let a = lossy.buffers.get_mut(&Slot(0)).unwrap();
        // Row 4, k = 150: the row's other columns lose it too, so that row alone may fail.
        let start = (4 * 200 + 150) * 2;
        a[start..start + 2].fill(0);
        let report = setting.judge(&honest_f32(gemm, &lossy, &setting.before));
        assert!(report.failures > 0 && report.failures <= 12, "{d} {distribution:?}: {report}");
        assert_eq!(report.worst.unwrap().index[0], 4);
    }
}

#[test]
fn unwritten_and_stray_bytes_are_seen() {
    for d in [DType::F32, DType::Bf16, DType::F16, DType::E4m3] {
        let mut gemm = packed(d);
        gemm.d.row_stride = 15;
        let setting = Setting::new(gemm, Distribution::Normal);
        assert!(setting.judge(&setting.right).passes());
        let nothing = setting.judge(&setting.before);
        assert_eq!((nothing.failures, nothing.unwritten, nothing.first_unwritten), (108, 108, Some(vec![0, 0])));

        let mut hole = setting.right.clone();
        let place = (3 * 15 + 5) * d.bytes()..(3 * 15 + 6) * d.bytes();
        hole[place.clone()].copy_from_slice(&setting.before[place]);
        let report = setting.judge(&hole);
        assert_eq!((report.failures, report.unwritten, report.first_unwritten), (1, 1, Some(vec![3, 5])));

        // The gap behind row 0, and the guard behind the last element.
        for stray in [12 * d.bytes(), setting.right.len() - 1] {
            let mut after = setting.right.clone();
            after[stray] ^= 1;
            let report = setting.judge(&after);
            assert!(!report.passes());
            assert_eq!((report.stray_bytes, report.first_stray_byte), (1, Some(stray as u64)));
        }
        assert!(!setting.judge(&setting.right[..20]).passes());
    }
}

#[test]
fn a_few_ulps_too_far_are_seen_and_reported() {
    let setting = Setting::new(packed(DType::Bf16), Distribution::Normal);
    let mut after = setting.right.clone();
    let code = u16::from_le_bytes([after[20], after[21]]);
    after[20..22].copy_from_slice(&(code + 2).to_le_bytes());
    let report = setting.judge(&after);
    assert_eq!(report.failures, 1);
    let worst = report.worst.unwrap();
    assert_eq!(worst.index, [0, 10]);
    assert!(report.max_ulp > 1.4 && report.max_ulp < 2.6, "{}", report.max_ulp);
    assert!(report.relative_frobenius > 0.0 && report.relative_frobenius < 0.01);
}

#[test]
fn the_first_wrong_element_is_told_beside_the_worst() {
    let setting = Setting::new(packed(DType::F32), Distribution::Normal);
    assert_eq!(setting.judge(&setting.right).first_wrong, None);
    let put = |after: &mut [u8], position: usize, value: f32| after[4 * position..][..4].copy_from_slice(&value.to_le_bytes());
    let mut after = setting.right.clone();
    // Rows of 12: a small error at [1, 3], a large one behind it.
    let right = f32::from_le_bytes(after[60..64].try_into().expect("four bytes"));
    put(&mut after, 15, right * 1.01 + 0.01);
    put(&mut after, 100, 1e6);
    let report = setting.judge(&after);
    assert_eq!(report.failures, 2);
    assert_eq!(report.first_wrong.as_ref().expect("one").index, [1, 3]);
    assert_eq!(report.worst.as_ref().expect("one").index, [8, 4]);
    let text = report.to_string();
    assert!(text.contains("; first at [1, 3]: got ") && text.contains("; worst at [8, 4]: got 1e6"), "{text}");
    // One wrong element is both.
    let mut after = setting.right.clone();
    put(&mut after, 100, 1e6);
    let text = setting.judge(&after).to_string();
    assert!(text.contains("; first at [8, 4]: got 1e6") && text.ends_with(", which is the worst"), "{text}");
}

#[test]
fn integers_are_exact() {
    let gemm = GemmProblem::packed(5, 6, 70, DType::I8, DType::I32).unwrap();
    let setting = Setting::new(gemm, Distribution::Normal);
    assert!(setting.expected.values.iter().all(|v| v.error == 0.0));
    let mut after = setting.right.clone();
    after[0] ^= 1;
    assert_eq!(setting.judge(&after).failures, 1);
    // Wrapping: 2^31 and more becomes negative.
    let mut sum = GemmProblem::packed(1, 1, 140_000, DType::I8, DType::I32).unwrap();
    sum.b.row_stride = 1;
    let problem = Problem::Gemm(sum.canonical().unwrap());
    let mut inputs = Inputs::default();
    for slot in [0, 1] {
        inputs.buffers.insert(Slot(slot), vec![127; 140_000]);
    }
    let value = run(&problem, &inputs, Positions::All).unwrap()[0].values[0].value;
    assert_eq!(value, f64::from((127i64 * 127 * 140_000) as i32));
}

#[test]
fn tolerances_follow_the_precision() {
    let error = |operands, precision| {
        let mut gemm = GemmProblem::packed(1, 1, 256, operands, DType::F32).unwrap();
        gemm.precision = precision;
        let setting = Setting::new(gemm, Distribution::SmallIntegers);
        setting.expected.values[0].error / setting.expected.magnitudes[0]
    };
    let ieee = error(DType::F32, Precision::Ieee);
    let ladder = [
        ieee,
        error(DType::Bf16, Precision::Fp32),
        error(DType::F32, Precision::Fp32),
        error(DType::F32, Precision::Tf32),
        error(DType::E4m3, Precision::Fp8Fast),
        error(DType::F16, Precision::F16),
    ];
    assert!(ladder.windows(2).all(|pair| pair[0] < pair[1]), "{ladder:?}");
    assert!((ieee / (258.0 * num::power_of_two(-24)) - 1.0).abs() < 1e-6);
    assert!(error(DType::E4m3, Precision::Fp8Promoted) < error(DType::E4m3, Precision::Fp8Fast));
}

#[test]
fn overflow_wants_an_infinity_or_is_not_judged() {
    let mut gemm = GemmProblem::packed(4, 4, 16, DType::F16, DType::F16).unwrap();
    gemm.alpha = HostScalar::Fixed(Real(1e6));
    let setting = Setting::new(gemm, Distribution::SameSign);
    assert!(setting.judge(&setting.right).passes());
    let mut after = setting.right.clone();
    assert_eq!(after[..2], 0x7c00u16.to_le_bytes());
    after[..2].copy_from_slice(&0x7bffu16.to_le_bytes());
    assert_eq!(setting.judge(&after).failures, 1, "65504 is not the rounding of 1e7");
    after[..2].copy_from_slice(&0xfc00u16.to_le_bytes());
    assert_eq!(setting.judge(&after).failures, 1, "the sign counts");
}

#[test]
fn data_is_the_same_everywhere() {
    let bytes = data::fill(DType::F32, Distribution::Normal, true, 1, 4);
    let values: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(values, [-0.078961454, -0.0075389603, 0.67684484, -0.7917095]);
    let many = data::fill(DType::F64, Distribution::Normal, true, 2, 20_000);
    let values: Vec<f64> = many.chunks(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect();
    let mean = values.iter().sum::<f64>() / 20_000.0;
    let variance = values.iter().map(|v| v * v).sum::<f64>() / 20_000.0;
    assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.04, "{mean} {variance}");
    for dtype in DType::ALL {
        assert_eq!(data::sentinel(dtype).len(), dtype.bytes());
        if dtype.is_float() {
            assert!(num::read_element(dtype, &data::sentinel(dtype)).unwrap().is_nan());
        }
    }
}

#[test]
fn the_case_file_loads_and_its_reference_runs() {
    let cases = cases::load_file(&root("cases/gemm.toml")).unwrap();
    assert!(cases.len() >= 140, "{} cases", cases.len());
    let mut keys = std::collections::HashMap::new();
    for case in &cases {
        // Canonical form is a fixed point, survives its text, and tells problems apart.
        let Problem::Gemm(gemm) = &case.problem else { panic!("{} is no gemm", case.problem.kind()) };
        assert_eq!(gemm.clone().canonical().as_ref(), Ok(gemm), "{}", case.id);
        let text = verdigris_graph::json::problem_to_json(&case.problem);
        assert_eq!(verdigris_graph::json::problem_from_json(&text).as_ref(), Ok(&case.problem), "{}", case.id);
        let known = keys.insert(verdigris_graph::Key::of(&case.problem), &case.problem);
        assert!(known.is_none_or(|known| *known == case.problem), "{}", case.id);

        let inputs = data::inputs(&case.problem, case.distribution, case.seed);
        let outputs = run(&case.problem, &inputs, Positions::All).unwrap_or_else(|e| panic!("{}: {e}", case.id));
        for expected in &outputs {
            let before = data::output_buffer(expected, &inputs);
            let report = compare(expected, &before, &expected.rounded(&before));
            assert!(report.passes(), "{}: {report}", case.id);
            assert!(
                report.elements == 0 || report.unjudged * 4 <= report.elements,
                "{}: {} of {} elements are not judged",
                case.id,
                report.unjudged,
                report.elements
            );
            // The sentinel is never a right answer.
            let idle = compare(expected, &before, &before);
            assert!(report.elements == 0 || !idle.passes(), "{}: an idle engine passes", case.id);
        }
    }
}

#[test]
fn samples_cover_the_corners() {
    let mut gemm = GemmProblem::packed(300, 500, 4, DType::F16, DType::F16).unwrap();
    let positions = data::sample_positions(&gemm, 256, 3);
    assert!(positions.len() > 200 && positions.is_sorted() && *positions.last().unwrap() == 149_999);
    for corner in [0, 499, 299 * 500] {
        assert!(positions.contains(&corner));
    }
    assert!(positions.iter().filter(|&&p| p % 500 == 499).count() > 16);
    gemm.m = 3;
    gemm.n = 7;
    assert_eq!(data::sample_positions(&gemm, 256, 3), (0..21).collect::<Vec<_>>());
    gemm.n = 0;
    assert!(data::sample_positions(&gemm, 256, 3).is_empty());
}

#[test]
fn a_buffer_read_twice_is_long_enough() {
    // A is 4 × 2 and the residual, in the same buffer, 4 × 6.
    let mut gemm = GemmProblem::packed(4, 6, 2, DType::F16, DType::F16).unwrap();
    let operand = Matrix::row_major(Slot(0), DType::F16, 6);
    gemm.epilogue.push(EpilogueStep::Binary { f: BinaryOp::Add, operand, v_is_right: false });
    let setting = Setting::new(gemm, Distribution::Normal);
    assert!(setting.judge(&setting.right).passes());
}

#[test]
fn case_files_are_checked() {
    let fault = |text: &str| cases::load("gemm", text).unwrap_err().to_string();
    let group = |rest: &str| format!("[[group]]\nid = \"g\"\na = \"bf16\"\n{rest}");
    assert!(fault(&group("")).contains("sizes"));
    assert!(fault(&group("sizes = [[1, 1, 1]]\nlayouts = [\"nx\"]")).contains("x; n is row-major"));
    assert!(fault(&group("sizes = [[1, 1, 1]]\nlayouts = [\"n\"]")).contains("two letters"));
    assert!(fault(&group("sizes = [[1, 1, 1]]\nspeed = 3")).contains("speed"));
    assert!(fault(&group("sizes = [[1, 1, 1], [1, 1, 1]]")).contains("gemm/g/nn/1x1x1"));
    assert!(fault(&group("sizes = [[1, 1, 1]]\nalpha = \"free\"")).contains("bound"));
    assert!(fault(&group("sizes = [[1, 1, 1]]\nbroadcast = [\"d\"]")).contains("shared"));
    assert!(fault(&group("sizes = [[1, 1, 1]]\nprecision = \"i32\"")).contains("i8 and u8"));
    assert!(fault(&group("sizes = [[1, 1, 1]]\nscale_a = \"tensor\"")).contains("fp8 operands"));
    let edges = cases::load("gemm", &group("m = [{ around = 8 }]\nn = [1, 2]\nk = [3]")).unwrap();
    assert_eq!(edges.len(), 6);
    assert_eq!(edges[5].id, "gemm/g/nn/9x2x3");
}

#[test]
fn the_bench_list_loads() {
    let list = bench_list::load_file(&root("bench/lists/gemm.toml")).unwrap();
    let count = |class: &str| list.iter().filter(|row| row.class == class).count();
    for class in ["square", "deepbench", "diffusion", "llama", "bert", "moe", "unaligned", "small_m"] {
        assert!(count(class) > 0, "{class}");
    }
    let row = list.iter().find(|row| row.name == "10x9216x77x64-nt").unwrap();
    assert_eq!((row.problem.batch.as_slice(), row.problem.n), (&[10][..], 77));
    let padded = list.iter().find(|row| row.name == "4096x4096x4096-nt-ldb4097").unwrap();
    assert_eq!(padded.problem.b.leading_dimension(), Some(4097));
}
