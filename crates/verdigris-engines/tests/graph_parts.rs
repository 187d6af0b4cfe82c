//! The graphs of `cases/` that are convolutions, maps, reductions, pooling and softmax, cut into problems: every part on engines that take
//! it, by the interpreter, against the reference.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Knobs;
use verdigris_engines::engines;
use verdigris_graph::pattern::{Subgraph, partition};
use verdigris_graph::{ChainStep, GraphBuilder, HostScalar, Problem, Real, ReductionOp, Slot, Uid, UnaryOp};
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_kir::ir::Target;
use verdigris_kir::program::KernelRef;
use verdigris_kir::ptx::{Isa, print};
use verdigris_reference::compare::compare;
use verdigris_reference::data::graph_inputs;
use verdigris_reference::data::output_buffer;
use verdigris_reference::graph::{Selection, evaluate};
use verdigris_reference::graph_cases::{GraphCase, load_file};
use verdigris_tensor::{DType, Layout};

fn cases(family: &str) -> Vec<GraphCase> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../cases/{family}.toml"));
    let filter = std::env::var("VERDIGRIS_CASE").unwrap_or_default();
    load_file(&path).expect("the corpus loads").into_iter().filter(|case| case.id.contains(&filter)).collect()
}

/// What a run of a case is about.
#[derive(Clone, Copy)]
enum Turn {
    /// The setting of this number of the first engine that takes a part.
    Setting(usize),
    /// One of the engines that take a part, under one of its settings, as the case's seed and this number say.
    Drawn(usize),
}

/// The settings of each engine that takes a part.
fn settings(part: &Subgraph, arch: &Arch) -> Result<Vec<(&'static str, Vec<Knobs>)>, String> {
    let mut refusals = Vec::new();
    let mut taken = Vec::new();
    for engine in engines() {
        match engine.accept(&part.problem, arch) {
            Ok(candidate) => taken.push((engine.id().name, candidate.knobs().settings().to_vec())),
            Err(refusal) => refusals.push(refusal.to_string()),
        }
    }
    if taken.is_empty() { Err(format!("no engine takes {}: {}", part.problem.kind(), refusals.join("; "))) } else { Ok(taken) }
}

/// Runs a case with every part as `turn` says; how many turns the part with the most has.
fn run(case: &GraphCase, turn: Turn, arch: &Arch, kernels: &Kernels) -> Result<usize, String> {
    let inputs = graph_inputs(&case.graph, case.distribution, case.seed);
    let expected = evaluate(&case.graph, &inputs, Selection::All).map_err(|error| error.to_string())?;
    let partition = partition(&case.graph).map_err(|error| error.to_string())?;
    let mut buffers: HashMap<Uid, Vec<u8>> = inputs.buffers.clone().into_iter().collect();
    let mut before = HashMap::new();
    for output in &expected {
        let bytes = output_buffer(output, &inputs);
        before.insert(output.id, bytes.clone());
        buffers.insert(output.id, bytes);
    }
    for temporary in &partition.temporaries {
        buffers.insert(temporary.uid, vec![0xa5; temporary.layout.span_bytes(temporary.dtype) as usize]);
    }
    let mut most = 1;
    for (number, part) in partition.parts.iter().enumerate() {
        let taken = settings(part, arch)?;
        let ((engine, settings), place, turns) = match turn {
            Turn::Setting(number) => (&taken[0], number, taken[0].1.len()),
            Turn::Drawn(number) => {
                let seed = case.seed as usize + number;
                (&taken[seed % taken.len()], seed / taken.len(), 1)
            }
        };
        most = most.max(turns);
        let knobs = &settings[place % settings.len()];
        let fail = |what: String| format!("part {number} on {engine} with {knobs}: {what}\n{:?}", part.problem);
        let candidate = verdigris_engines::engine(engine).ok_or("an engine")?.accept(&part.problem, arch).map_err(|e| e.to_string())?;
        let program = candidate.program(knobs).map_err(|refusal| fail(refusal.to_string()))?;
        let mut memory = Memory::new();
        let mut host_scalars = Vec::new();
        for uid in &part.bindings {
            memory.add(buffers.get(uid).map_or(&[][..], Vec::as_slice));
            host_scalars.push(inputs.scalars.get(uid).copied().unwrap_or(0.0));
        }
        let options = Options { sms: arch.sm_count, host_scalars, ..Options::schedule(case.seed + number as u64) };
        interp::run(&program, kernels, &mut memory, &options).map_err(|findings| fail(findings.to_string()))?;
        for (slot, uid) in part.bindings.iter().enumerate() {
            if buffers.contains_key(uid) {
                buffers.insert(*uid, memory.to_vec(slot));
            }
        }
    }
    for output in &expected {
        let report = compare(output, &before[&output.id], &buffers[&output.id]);
        if !report.passes() {
            let parts: Vec<String> = partition.parts.iter().map(|part| format!("{:?}", part.problem)).collect();
            return Err(format!("{report}\n{}", parts.join("\n")));
        }
    }
    Ok(most)
}

fn all_of(family: &str, turn_of: impl Fn(usize) -> Turn) {
    let arch = Arch::virtual_device(4);
    let kernels = Kernels::new();
    let mut wrong = Vec::new();
    let mut runs = 0;
    for case in cases(family).into_iter().filter(|case| !case.device_only) {
        let start = std::time::Instant::now();
        let mut turn = 0;
        loop {
            runs += 1;
            match run(&case, turn_of(turn), &arch, &kernels) {
                Ok(most) if turn + 1 < most => turn += 1,
                Ok(_) => break,
                Err(what) => {
                    wrong.push(format!("{}: {}", case.id, what.chars().take(1500).collect::<String>()));
                    break;
                }
            }
        }
        if start.elapsed().as_millis() > 3000 {
            eprintln!("slow: {} {:?}", case.id, start.elapsed());
        }
    }
    assert!(wrong.is_empty(), "{} of {runs} wrong:\n{}", wrong.len(), wrong.join("\n\n"));
    eprintln!("{family}: {runs} runs");
    assert!(runs > 0, "no case was run");
}

/// Each case on one of the engines that take it; `VERDIGRIS_TURN` draws others.
#[test]
fn conv() {
    let draw = std::env::var("VERDIGRIS_TURN").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    all_of("conv", |turn| Turn::Drawn(turn + draw));
}

#[test]
fn pointwise() {
    all_of("pointwise", Turn::Setting);
}

#[test]
fn movement() {
    all_of("movement", Turn::Setting);
}

#[test]
fn reduction() {
    all_of("reduction", Turn::Setting);
}

#[test]
fn softmax() {
    all_of("softmax", Turn::Setting);
}

#[test]
fn pool() {
    all_of("pool", Turn::Setting);
}

/// What is wrong with a kernel: it is verified, and assembled where there is an assembler.
fn fault_of(kernel: &KernelRef) -> Option<String> {
    let verified = verdigris_kir::verify::verify(kernel.build()).unwrap_or_else(|faults| panic!("{}: {faults}", kernel.name()));
    let ptxas = std::env::var_os("VERDIGRIS_PTXAS")?;
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let source = std::env::temp_dir().join(format!("kernel-{}-{number}.ptx", std::process::id()));
    std::fs::write(&source, print(&verified, Isa::V9_0)).expect("a writable temporary folder");
    let output = std::process::Command::new(ptxas).args(["-v", "-arch=sm_80", "-o", "/dev/null"]).arg(&source).output();
    let output = output.expect("ptxas runs");
    let words = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let _ = std::fs::remove_file(source);
    let clean = output.status.success() && !["(C75", "(C76", "warning"].iter().any(|word| words.contains(word));
    let fits = words.contains(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads");
    (!clean || !fits).then(|| format!("{}: {words}", kernel.name()))
}

/// Every kernel of the catalogs is verified, and assembled where there is an assembler.
#[test]
fn catalogs_are_verified_and_assemble_without_spills() {
    if std::env::var_os("VERDIGRIS_PTXAS").is_none() {
        eprintln!("not assembled: VERDIGRIS_PTXAS is not set");
    }
    let mut faults = Vec::new();
    for name in ["map.simt", "reduce.simt", "softmax.rows", "pool.direct"] {
        let catalog = verdigris_engines::engine(name).expect("registered").catalog(Target::Sm90);
        assert!(!catalog.is_empty() && catalog.len() <= 150, "{name} has {} kernels", catalog.len());
        faults.extend(catalog.iter().filter_map(fault_of));
    }
    assert!(faults.is_empty(), "{} kernels\n{}", faults.len(), faults.join("\n"));
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
            for knobs in candidate.knobs().settings() {
                let program = candidate.program(knobs).expect("a setting of its own");
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
        for (number, knobs) in candidate.knobs().settings().iter().enumerate() {
            let mut memory = Memory::new();
            memory.add(&bytes(&values));
            memory.add(&vec![0xa5; 4 * greatest.len()]);
            let program = candidate.program(knobs).expect("a setting of its own");
            let options = Options { sms: arch.sm_count, ..Options::schedule(number as u64) };
            interp::run(&program, &kernels, &mut memory, &options)
                .unwrap_or_else(|findings| panic!("{dims:?} {axes:?} {knobs}: {findings}"));
            assert!(memory.to_vec(0) == bytes(&halves) && memory.to_vec(1) == bytes(&greatest), "{dims:?} {axes:?} {knobs}");
        }
    }
}
