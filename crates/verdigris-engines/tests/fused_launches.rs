//! Launches that graphs fuse and no catalog holds: they verify, assemble, and may store in the place of what they read.

use std::sync::atomic::{AtomicUsize, Ordering};

use verdigris_engines::arch::Arch;
use verdigris_engines::{engine, engines};
use verdigris_graph::pattern::partition;
use verdigris_graph::{
    Access, BinaryOp, ChainStep, CrossEntropyBackward, CrossEntropySpec, GraphBuilder, HostScalar, LossReduction, Precision, Problem,
    RandomState, Real, ReductionOp, Slot, Uid, UnaryOp,
};
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_kir::program::{KernelRef, Program};
use verdigris_kir::ptx::{Isa, print, read_back};
use verdigris_tensor::{DType, Layout};

/// What is wrong with a kernel: it is verified, its text is read back, and assembled where there is an assembler.
fn fault_of(kernel: &KernelRef) -> Option<String> {
    let verified = verdigris_kir::verify::verify(kernel.build()).unwrap_or_else(|faults| panic!("{}: {faults}", kernel.name()));
    let text = print(&verified, Isa::V9_0);
    if let Err(differs) = read_back(&verified, &text, Isa::V9_0) {
        return Some(format!("{}: {differs}", kernel.name()));
    }
    let ptxas = std::env::var_os("VERDIGRIS_PTXAS")?;
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let source = std::env::temp_dir().join(format!("kernel-{}-{number}.ptx", std::process::id()));
    let target = text.lines().find_map(|line| line.strip_prefix(".target ")).expect("a target").trim().to_owned();
    std::fs::write(&source, text).expect("a writable temporary folder");
    let output = std::process::Command::new(ptxas).args(["-v", "-o", "/dev/null", "-arch", &target]).arg(&source).output();
    let output = output.expect("ptxas runs");
    let words = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let _ = std::fs::remove_file(source);
    let clean = output.status.success() && !["(C75", "(C76", "warning"].iter().any(|word| words.contains(word));
    let fits = match kernel.build().allowed_spill_bytes {
        0 => words.contains(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"),
        allowed => [" bytes spill stores", " bytes spill loads"].iter().all(|what| {
            let before = words.split(what).next().and_then(|before| before.rsplit([' ', ',']).next());
            before.and_then(|bytes| bytes.parse::<u32>().ok()).is_some_and(|bytes| bytes <= allowed)
        }),
    };
    (!clean || !fits).then(|| format!("{}: {words}", kernel.name()))
}

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("a small layout")
}

/// The only part of a graph.
fn only_part(g: GraphBuilder) -> Problem {
    let mut parts = partition(&g.finish().expect("valid")).expect("cut").parts;
    assert_eq!(parts.len(), 1, "one launch");
    parts.remove(0).problem
}

/// The kernels of what is fused into one launch, which stand in no catalog.
#[test]
fn fused_launches_assemble_without_spills() {
    let mut problems = Vec::new();
    for dtype in [DType::F16, DType::F32] {
        for (dims, axes) in [(&[64, 4096][..], &[0, 1][..]), (&[4096, 64], &[0]), (&[512, 64], &[1])] {
            let mut g = GraphBuilder::new("unscale");
            let gradient = g.tensor("gradient", dtype, rows(dims));
            let factor = g.host_scalar("factor", DType::F32);
            let unscaled = g.scale("unscale", gradient, HostScalar::Bound(factor)).expect("fits");
            let finite = g.unary("finite", UnaryOp::IsFinite, unscaled).expect("fits");
            let all = g.reduction("all", ReductionOp::Min, finite, axes).expect("fits");
            g.store(unscaled, "unscaled", DType::F32).expect("stores");
            g.store(all, "all_finite", DType::F32).expect("stores");
            problems.push(only_part(g));
        }
    }
    for dtype in [DType::Bf16, DType::F32] {
        let mut g = GraphBuilder::new("bias, gelu, dropout, add");
        let [x, residual] = ["x", "residual"].map(|name| g.tensor(name, dtype, rows(&[512, 64])));
        let (bias, state) = (g.tensor("bias", dtype, rows(&[1, 64])), g.tensor("state", DType::I32, rows(&[4])));
        let biased = g.binary("bias", BinaryOp::Add, x, bias).expect("fits");
        let active = g.unary("gelu", UnaryOp::GeluErf, biased).expect("fits");
        let dropped = g.dropout("dropout", active, state, 0.1).expect("fits");
        let y = g.binary("add", BinaryOp::Add, dropped, residual).expect("fits");
        g.store(y, "y", dtype).expect("stores");
        problems.push(only_part(g));
    }
    for dtype in [DType::I8, DType::Bf16, DType::F32, DType::F64] {
        let mut g = GraphBuilder::new("concat");
        let inputs: Vec<Uid> = (1..9).map(|i| g.tensor("x", dtype, rows(&[6, 16 * i, 9, 8]))).collect();
        let y = g.concat("y", &inputs, 1).expect("fits");
        g.store(y, "y", dtype).expect("stores");
        problems.push(only_part(g));
    }
    let mut faults = Vec::new();
    for problem in &problems {
        let candidates = engines().filter_map(|engine| engine.accept(problem, &Arch::virtual_device(4)).ok());
        for candidate in candidates {
            for knobs in candidate.knobs().configs() {
                let program = candidate.program(knobs).expect("a config of its own");
                faults.extend(program.launches().filter_map(|launch| fault_of(&launch.kernel)));
            }
        }
    }
    assert!(faults.is_empty(), "{} kernels\n{}", faults.len(), faults.join("\n"));
}

/// Functions of maps behind products, whose tiles compute them for every element of a thread: no registers are spilled for them, and for random numbers no
/// more than is declared.
#[test]
fn functions_behind_products_assemble_without_spills() {
    let unary = [
        UnaryOp::Erf,
        UnaryOp::Mish,
        UnaryOp::Log,
        UnaryOp::Exp,
        UnaryOp::Reciprocal,
        UnaryOp::HardSwish,
        UnaryOp::Elu { alpha: Real(0.5) },
        UnaryOp::Softplus { beta: Real(2.0) },
    ];
    let binary = [BinaryOp::Div, BinaryOp::Prelu, BinaryOp::Backward(UnaryOp::GeluErf), BinaryOp::Backward(UnaryOp::Mish)];
    let product = |extent: u64, behind: &dyn Fn(&mut GraphBuilder, Uid) -> Uid| {
        let mut g = GraphBuilder::new("product");
        let (a, b) = (g.tensor("a", DType::Bf16, rows(&[extent, 4096])), g.tensor("b", DType::Bf16, rows(&[4096, extent])));
        let sum = g.matmul("sum", a, b, Precision::Fp32).expect("fits");
        let y = behind(&mut g, sum);
        g.store(y, "y", DType::Bf16).expect("stores");
        only_part(g)
    };
    let mut problems: Vec<Problem> = unary.into_iter().map(|f| product(4096, &|g, sum| g.unary("f", f, sum).expect("fits"))).collect();
    problems.extend(binary.into_iter().map(|f| {
        product(4096, &|g, sum| {
            let z = g.tensor("z", DType::Bf16, rows(&[4096, 4096]));
            g.binary("f", f, sum, z).expect("fits")
        })
    }));
    for by_value in [false, true] {
        // More numbers than these are drawn by a map.
        problems.push(product(512, &|g, sum| {
            let state = match by_value {
                true => RandomState::by_value(g.host_scalar("seed", DType::I64), g.host_scalar("offset", DType::I64)),
                false => g.tensor("state", DType::I32, rows(&[4])).into(),
            };
            let active = g.unary("gelu", UnaryOp::GeluErf, sum).expect("fits");
            let dropped = g.dropout("dropout", active, state, 0.1).expect("fits");
            let residual = g.tensor("residual", DType::Bf16, rows(&[512, 512]));
            g.binary("add", BinaryOp::Add, dropped, residual).expect("fits")
        }));
    }
    let mut faults = Vec::new();
    for (number, problem) in problems.iter().enumerate() {
        assert!(matches!(problem, Problem::Gemm(gemm) if !gemm.epilogue.is_empty()), "the function stands in the epilogue");
        let candidates = engines().filter_map(|engine| engine.accept(problem, &Arch::h200()).ok());
        for candidate in candidates {
            // The best by estimate, and another one for each problem.
            let space = candidate.knobs();
            let configs = space.configs();
            for knobs in [&configs[0], &configs[(7 * number + 1) % configs.len()]] {
                let program = candidate.program(knobs).expect("a config of its own");
                faults.extend(program.launches().filter_map(|launch| fault_of(&launch.kernel)));
            }
        }
    }
    assert!(faults.is_empty(), "{} kernels\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn a_reduction_may_store_in_the_place_of_what_it_reads() {
    let kernels = Kernels::new();
    let arch = Arch::virtual_device(4);
    for (dims, axes) in [([33, 65], &[0, 1][..]), ([33, 65], &[1]), ([257, 40], &[0]), ([2, 5000], &[1]), ([2, 5000], &[0])] {
        let mut g = GraphBuilder::new("in place");
        let x = g.tensor("x", DType::F32, rows(&dims));
        let half = g.scale("half", x, HostScalar::Fixed(Real(0.5))).expect("fits");
        let greatest = g.reduction("greatest", ReductionOp::Max, half, axes).expect("fits");
        g.store(half, "half", DType::F32).expect("stores");
        g.store(greatest, "greatest", DType::F32).expect("stores");
        let Problem::Reduce(mut problem) = only_part(g) else { panic!("a reduction") };
        for step in &mut problem.before.steps {
            if let ChainStep::Store { to, .. } = step {
                to.slot = Slot(0);
            }
        }
        let mut problem = problem.canonical().expect("the same elements");
        problem.number_slots();

        let elements = (dims[0] * dims[1]) as usize;
        let values: Vec<f32> = (0..elements).map(|i| ((i * 7919) % 10007) as f32 - 5000.0).collect();
        let halves: Vec<f32> = values.iter().map(|value| value * 0.5).collect();
        let kept = |i: usize| {
            let (row, column) = (i / dims[1] as usize, i % dims[1] as usize);
            if axes.len() == 2 {
                0
            } else if axes[0] == 0 {
                column
            } else {
                row
            }
        };
        let mut greatest = vec![f32::NEG_INFINITY; (0..elements).map(kept).max().unwrap_or(0) + 1];
        halves.iter().enumerate().for_each(|(i, &half)| greatest[kept(i)] = half.max(greatest[kept(i)]));

        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let problem = Problem::Reduce(problem);
        let candidate = verdigris_engines::engine("reduce.simt").expect("registered").accept(&problem, &arch).expect("takes it");
        for (number, knobs) in candidate.knobs().configs().iter().enumerate() {
            let mut memory = Memory::new();
            memory.add(&bytes(&values));
            memory.add(&vec![0xa5; 4 * greatest.len()]);
            let program = candidate.program(knobs).expect("a config of its own");
            let options = Options { sms: arch.sm_count, ..Options::schedule(number as u64) };
            interp::run(&program, &kernels, &mut memory, &options)
                .unwrap_or_else(|findings| panic!("{dims:?} {axes:?} {knobs}: {findings}"));
            assert!(memory.to_vec(0) == bytes(&halves) && memory.to_vec(1) == bytes(&greatest), "{dims:?} {axes:?} {knobs}");
        }
    }
}

/// A bf16 as f32.
fn widened(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// Where the log-sum-exp is given, the gradient of logits takes their place: no thread reads what another one writes, in whatever form rows are taken.
#[test]
fn the_gradient_of_a_loss_may_lie_in_the_place_of_the_logits() {
    let (kernels, arch) = (Kernels::new(), Arch::virtual_device(4));
    // Rows that are held, long ones, such as begin anywhere, and such as lie side by side, each fewer than a whole number of teams.
    let cases = [([5, 24], 1), ([3, 520], 1), ([5, 261], 1), ([2, 16_400], 1), ([2, 33_001], 1), ([67, 16], 0), ([19, 40], 0), ([3, 9], 1)];
    let reductions = [LossReduction::None, LossReduction::Mean];
    for ((dims, axis), reduction) in cases.into_iter().flat_map(|case| reductions.map(|reduction| (case, reduction))) {
        let laid = |dims: &[u64]| rows(dims);
        let is_mean = reduction == LossReduction::Mean;
        let (rows, classes) = (dims[1 - axis], dims[axis]);
        let of_rows: Vec<u64> = (0..2).map(|dim| if dim == axis { 1 } else { rows }).collect();
        let of_losses = if is_mean { vec![1; 2] } else { of_rows.clone() };
        let mut g = GraphBuilder::new("in place");
        let (logits, labels) = (g.tensor("logits", DType::Bf16, laid(&dims)), g.tensor("labels", DType::I32, laid(&of_rows)));
        let (dloss, lse) = (g.tensor("dloss", DType::F32, laid(&of_losses)), g.tensor("lse", DType::F32, laid(&of_rows)));
        let spec = CrossEntropySpec { ignore_index: Some(-100), ..CrossEntropySpec::new(axis as u32, reduction) };
        let back = CrossEntropyBackward { spec, logits, labels, dloss, lse: Some(lse), dlogits: logits };
        let dlogits = g.cross_entropy_backward("dlogits", back).expect("fits");
        g.store(dlogits, "dlogits", DType::Bf16).expect("stores");
        let problem = only_part(g);
        let operands = problem.buffers().expect("valid");
        let written = operands.iter().position(|operand| operand.access == Access::Written).expect("the gradient");
        let read = operands.iter().position(|operand| operand.access == Access::ReadInPlace).expect("the logits");
        assert!(operands[read].is_same_elements(&operands[written]));

        let elements = (rows * classes) as usize;
        let at = |row: u64, class: u64| (if axis == 1 { row * classes + class } else { class * rows + row }) as usize;
        let values: Vec<u16> = (0..elements).map(|i| ((((i * 7919) % 1009) as f32 / 400.0 - 1.25).to_bits() >> 16) as u16).collect();
        let labels: Vec<i32> = (0..rows).map(|row| if row == 1 { -100 } else { (row * 13 % classes) as i32 }).collect();
        // What each row's loss counts, and what is given of them: of a mean one number, which the rows that are not ignored share.
        let factors: Vec<f32> = (0..rows).map(|row| if is_mean { 3.0 / (rows - 1) as f32 } else { 1.0 + row as f32 }).collect();
        let given: Vec<f32> = if is_mean { vec![3.0] } else { factors.clone() };
        let sums: Vec<f32> =
            (0..rows).map(|row| (0..classes).map(|class| widened(values[at(row, class)]).exp()).sum::<f32>().ln()).collect();
        let contents = |name: &str| -> Vec<u8> {
            match name {
                "logits" => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
                "labels" => labels.iter().flat_map(|value| value.to_le_bytes()).collect(),
                "dloss" => given.iter().flat_map(|value| value.to_le_bytes()).collect(),
                _ => sums.iter().flat_map(|value| value.to_le_bytes()).collect(),
            }
        };
        let candidate = engine("softmax.rows").expect("registered").accept(&problem, &arch).expect("taken");
        for knobs in candidate.knobs().configs() {
            let places: Vec<usize> = (0..operands.len()).map(|i| if i == written { read } else { i }).collect();
            let mut program = Program::default();
            program.append(&candidate.program(knobs).expect("a config of its own"), &places).expect("goes behind nothing");
            for seed in 0..3 {
                let mut memory = Memory::new();
                operands.iter().enumerate().filter(|(i, _)| *i != written).for_each(|(_, operand)| {
                    memory.add(&contents(operand.name));
                });
                let ran = interp::run(&program, &kernels, &mut memory, &Options::schedule(seed));
                ran.unwrap_or_else(|findings| panic!("{dims:?} {reduction:?} {knobs}: {findings}"));
                let found: Vec<f32> =
                    memory.to_vec(read).chunks_exact(2).map(|half| widened(u16::from_le_bytes([half[0], half[1]]))).collect();
                for row in 0..rows {
                    for class in 0..classes {
                        let i = row as usize;
                        let hit = if labels[i] == class as i32 { 1.0 } else { 0.0 };
                        let exact =
                            if labels[i] == -100 { 0.0 } else { factors[i] * ((widened(values[at(row, class)]) - sums[i]).exp() - hit) };
                        let off = (found[at(row, class)] - exact).abs();
                        assert!(off <= 0.005 * exact.abs() + 1e-6, "{dims:?} {knobs}: {off} of {exact} for row {row}, class {class}");
                    }
                }
            }
        }
    }
}
