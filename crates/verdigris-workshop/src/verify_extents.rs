//! The part of `verify` that puts rows, images and matrices more than 2³² bytes apart, on every engine.
//!
//! The problems of `cases/extents/` and a few products are small; a dim of all their tensors at a time is stretched ([`far`]), and what the engine
//! leaves is judged by the reference of the graph before that. Memory of the interpreter is sparse, and holds NaN (all ones) wherever no element
//! lies. An address that was counted in 32 bits reads that, or is out of bounds, or writes where nothing may be written.
//!
//! An engine may refuse such strides, but not unseen: a test holds how many problems each engine takes and refuses for which reason.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result};
use rayon::prelude::*;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Engine, Reason};
use verdigris_engines::interpret::{PartConfig, Parts};
use verdigris_graph::problem::Access;
use verdigris_graph::{Graph, GraphBuilder, Precision, Uid};
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_reference::data::Distribution;
use verdigris_reference::far;
use verdigris_reference::graph::Selection;
use verdigris_reference::graph_cases::{self, GraphCase};
use verdigris_reference::judge::Trial;
use verdigris_tensor::{DType, Layout};

use crate::classes::class;
use crate::verify::{Fault, panic_text, schedule_of};

/// The problems, by family.
const PROBLEMS: [(&str, &str); 12] = [
    ("conv", include_str!("../../../cases/extents/conv.toml")),
    ("pointwise", include_str!("../../../cases/extents/pointwise.toml")),
    ("movement", include_str!("../../../cases/extents/movement.toml")),
    ("reduction", include_str!("../../../cases/extents/reduction.toml")),
    ("scan", include_str!("../../../cases/extents/scan.toml")),
    ("pool", include_str!("../../../cases/extents/pool.toml")),
    ("softmax", include_str!("../../../cases/extents/softmax.toml")),
    ("norm", include_str!("../../../cases/extents/norm.toml")),
    ("batch_norm", include_str!("../../../cases/extents/batch_norm.toml")),
    ("attention", include_str!("../../../cases/extents/attention.toml")),
    ("resample", include_str!("../../../cases/extents/resample.toml")),
    ("append", include_str!("../../../cases/extents/append.toml")),
];
/// Bytes wherever no element lies: NaN in every floating-point type.
const BETWEEN: u8 = 0xff;
/// SMs of the virtual device.
const SMS: u32 = 3;

/// A graph with one of its dims stretched.
pub(crate) struct FarCase {
    /// The case, with the dim.
    pub(crate) id: String,
    case: GraphCase,
    far: Graph,
}

/// Which engine refuses which stretched problem, and why.
type Refusals = BTreeSet<(&'static str, String, &'static str)>;

/// What came of it.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) runs: u64,
    pub(crate) faults: Vec<Fault>,
    pub(crate) kernels: BTreeSet<String>,
    /// Stretched problems that each engine took.
    pub(crate) taken: BTreeMap<&'static str, u64>,
    pub(crate) refused: Refusals,
}

/// All problems, each with every dim that can be stretched, whose id contains the filter.
///
/// # Errors
/// A case file or a graph that is wrong.
pub(crate) fn cases(filter: &str) -> Result<Vec<FarCase>> {
    let mut near = products()?;
    for (family, text) in PROBLEMS {
        near.extend(graph_cases::load(family, text).with_context(|| format!("cases/extents/{family}.toml"))?);
    }
    let mut list = Vec::new();
    for case in near {
        for (dim, outward) in (0..verdigris_tensor::MAX_RANK).flat_map(|dim| [(dim, false), (dim, true)]) {
            let id = format!("extents/{}/far-dim{dim}{}", case.id, if outward { "-outward" } else { "" });
            if let Some(far) = far::stretch(&case.graph, dim, outward).filter(|_| id.contains(filter)) {
                list.push(FarCase { id, case: case.clone(), far });
            }
        }
    }
    Ok(list)
}

/// Products of matrices in both orders, alone and in batches.
fn products() -> Result<Vec<GraphCase>> {
    let mut list = Vec::new();
    for (dtype, [m, n, k]) in [
        (DType::Bf16, [5, 40, 24]),
        (DType::Bf16, [40, 5, 24]),
        (DType::F32, [6, 12, 8]),
        (DType::E4m3, [5, 32, 32]),
        (DType::F64, [5, 6, 7]),
    ] {
        for (word, [a_order, b_order]) in [("nn", [[0, 1, 2], [0, 1, 2]]), ("nt", [[0, 1, 2], [0, 2, 1]]), ("tn", [[0, 2, 1], [0, 1, 2]])] {
            for batch in [1, 3] {
                let id = format!("gemm/{dtype}/{word}/b{batch}-{m}x{n}x{k}");
                let mut builder = GraphBuilder::new(&id);
                let a = builder.tensor("a", dtype, Layout::with_order(&[batch, m, k], &a_order)?);
                let b = builder.tensor("b", dtype, Layout::with_order(&[batch, k, n], &b_order)?);
                let Some(precision) = Precision::usual(dtype, dtype) else { continue };
                let d = builder.matmul("product", a, b, precision)?;
                let out = if dtype == DType::E4m3 { DType::Bf16 } else { dtype };
                builder.store_as(d, "d", out, Layout::row_major(&[batch, m, n])?)?;
                let graph = builder.finish()?;
                list.push(GraphCase { id, graph, distribution: Distribution::Normal, seed: 1, device_only: false });
            }
        }
    }
    Ok(list)
}

/// Runs every case on every engine that takes it: by its default, and by the first setting that leads to a class of kernels to which no setting
/// before led in this case.
pub(crate) fn run(cases: &[FarCase], engines: &[&'static dyn Engine], seed: u64) -> Outcome {
    let kernels = Kernels::new();
    let one = |far: &FarCase| {
        let mut outcome = Outcome::default();
        for &engine in engines {
            let ran = catch_unwind(AssertUnwindSafe(|| on_engine(far, engine, seed, &kernels, &mut outcome)));
            let fault = match ran {
                Ok(Ok(())) => continue,
                Ok(Err(fault)) => fault,
                Err(panic) => (String::new(), panic_text(&*panic)),
            };
            let (knobs, message) = fault;
            let (case, engine) = (far.id.clone(), engine.id().to_string());
            outcome.faults.push(Fault { case, data: Distribution::Normal.to_string(), engine, knobs, seed, message });
        }
        outcome
    };
    cases.par_iter().map(one).reduce(Outcome::default, |mut all, one| {
        all.runs += one.runs;
        all.faults.extend(one.faults);
        all.kernels.extend(one.kernels);
        one.taken.into_iter().for_each(|(engine, count)| *all.taken.entry(engine).or_default() += count);
        all.refused.extend(one.refused);
        all
    })
}

/// Cuts a stretched graph for one engine. `None` if it has another family, or refuses, which the outcome then says.
fn accept(far: &FarCase, engine: &'static dyn Engine, outcome: &mut Outcome) -> Result<Option<Parts>, String> {
    let parts = Parts::all(&far.far, &Arch::virtual_device(SMS), &[engine]).map_err(|error| error.to_string())?;
    if let Some((_, refusal)) = parts.refusals.first() {
        if refusal.reason != Reason::Problem {
            outcome.refused.insert((engine.id().name, far.id.clone(), refusal.reason.name()));
        }
        return Ok(None);
    }
    *outcome.taken.entry(engine.id().name).or_default() += 1;
    Ok(Some(parts))
}

fn on_engine(
    far: &FarCase,
    engine: &'static dyn Engine,
    seed: u64,
    kernels: &Kernels,
    outcome: &mut Outcome,
) -> Result<(), (String, String)> {
    let fail = |message: String| (String::new(), message);
    let Some(parts) = accept(far, engine, outcome).map_err(fail)? else { return Ok(()) };
    let trial =
        Trial::new(&far.case.graph, Distribution::Normal, far.case.seed, Selection::All).map_err(|error| fail(error.to_string()))?;
    let mut classes: BTreeSet<String> = BTreeSet::new();
    for number in 0..parts.variants() {
        let chosen: Vec<&PartConfig> = parts.chosen(number).collect();
        let led_to: Vec<String> = chosen.iter().flat_map(|config| config.kernels()).map(class).collect();
        if led_to.iter().all(|class| classes.contains(class)) && number > 0 {
            continue;
        }
        classes.extend(led_to);
        outcome.runs += 1;
        outcome.kernels.extend(chosen.iter().flat_map(|config| config.kernels()).map(str::to_owned));
        let knobs = || chosen.iter().map(|config| config.knobs.to_string()).collect::<Vec<_>>().join(" then ");
        let options = schedule_of(seed.wrapping_add(number as u64), 0, SMS);
        interpret(far, &parts, &chosen, &trial, kernels, &options).map_err(|message| (knobs(), message))?;
    }
    Ok(())
}

/// Where a tensor lies, near and far; the same for what passes between parts.
fn layouts(far: &FarCase, parts: &Parts, uid: Uid) -> Result<(DType, Layout, Layout), String> {
    let near = far.case.graph.tensor(uid).filter(|tensor| !tensor.is_virtual);
    match (near, far.far.tensor(uid)) {
        (Some(near), Some(far)) => Ok((near.dtype, near.layout, far.layout)),
        _ => {
            let made = parts.partition.temporaries.iter().find(|tensor| tensor.uid == uid);
            made.map(|tensor| (tensor.dtype, tensor.layout, tensor.layout)).ok_or_else(|| format!("{uid} is no tensor"))
        }
    }
}

/// The offsets in bytes of each element, near and far.
fn places(dtype: DType, near: &Layout, far: &Layout) -> impl Iterator<Item = (usize, u64)> {
    let size = dtype.bytes() as u64;
    let (near, far) = (*near, *far);
    (0..near.elements())
        .filter_map(move |position| Some(((near.offset_of_position(position)? * size) as usize, far.offset_of_position(position)? * size)))
}

fn interpret(
    far: &FarCase,
    parts: &Parts,
    chosen: &[&PartConfig],
    trial: &Trial,
    kernels: &Kernels,
    options: &Options,
) -> Result<(), String> {
    let mut near: BTreeMap<Uid, Vec<u8>> = trial.inputs.buffers.clone();
    near.extend(trial.outputs().clone());
    for tensor in &parts.partition.temporaries {
        near.insert(tensor.uid, vec![BETWEEN; tensor.layout.span_bytes(tensor.dtype) as usize]);
    }
    for (part, config) in parts.partition.parts.iter().zip(chosen) {
        let mut memory = Memory::new();
        for uid in &part.bindings {
            let Some(bytes) = near.get(uid) else {
                memory.add_unwritten(0);
                continue;
            };
            let (dtype, here, there) = layouts(far, parts, *uid)?;
            let slot = memory.add_filled(there.span_bytes(dtype) as u64, BETWEEN);
            for (from, to) in places(dtype, &here, &there) {
                memory.write(slot, to, &bytes[from..from + dtype.bytes()]);
            }
        }
        let scalar = |uid: &Uid| trial.inputs.scalars.get(uid).copied().unwrap_or(0.0).into();
        let host_scalars = part.bindings.iter().map(scalar).collect();
        let options = Options { host_scalars, ordered_sums: config.deterministic, ..options.clone() };
        interp::run(&config.program, kernels, &mut memory, &options).map_err(|findings| findings.to_string())?;
        let operands = part.problem.buffers().map_err(|error| error.to_string())?;
        for operand in operands.iter().filter(|operand| operand.access == Access::Written) {
            let slot = operand.slot.0 as usize;
            let Some((uid, bytes)) = part.bindings.get(slot).and_then(|uid| Some((*uid, near.get_mut(uid)?))) else { continue };
            let (dtype, here, there) = layouts(far, parts, uid)?;
            let mut own: BTreeSet<u64> = BTreeSet::new();
            for (to, from) in places(dtype, &here, &there) {
                memory.read(slot, from, &mut bytes[to..to + dtype.bytes()]);
                own.extend(from..from + dtype.bytes() as u64);
            }
            let stray = memory
                .touched_pages(slot)
                .find_map(|(begin, page)| (begin..).zip(page).find(|(at, byte)| **byte != BETWEEN && !own.contains(at)).map(|(at, _)| at));
            if let Some(at) = stray {
                return Err(format!("byte {at} of the output in slot {slot} was written, and belongs to no element"));
            }
        }
    }
    trial.judge(&near).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine, the stretched problems that it takes, and those that it refuses, by reason.
    type Share = (&'static str, u64, &'static [(&'static str, u64)]);

    /// Each engine with the stretched problems that it takes, and those that it refuses by reason: whoever takes fewer says why here.
    #[rustfmt::skip]
    const EXPECTED: &[Share] = &[
        ("attention.backward", 10, &[("direction", 48), ("dtype", 24), ("layout", 14)]),
        ("attention.decode", 10, &[("direction", 48), ("dtype", 24), ("epilogue", 10), ("layout", 4)]),
        ("attention.forward", 14, &[("direction", 48), ("dtype", 24), ("layout", 10)]),
        ("attention.mma", 24, &[("dtype", 36), ("epilogue", 24), ("layout", 12)]),
        ("attention.simt", 96, &[]),
        ("batch_norm.channels", 116, &[]),
        ("conv.depthwise", 30, &[("extent", 167)]),
        ("conv.depthwise_planes", 9, &[("extent", 167), ("layout", 21)]),
        ("conv.direct", 197, &[]),
        ("conv.grouped", 180, &[("dtype", 15), ("extent", 2)]),
        ("conv.halo", 27, &[("alignment", 63), ("dtype", 15), ("extent", 75), ("layout", 17)]),
        ("conv.implicit_gemm", 165, &[("extent", 32)]),
        ("conv.patch", 5, &[("direction", 66), ("dtype", 101), ("extent", 25)]),
        ("conv.patch_gradient", 5, &[("direction", 131), ("dtype", 38), ("extent", 23)]),
        ("conv.pointwise", 1, &[("extent", 162), ("layout", 34)]),
        ("conv.small_channels", 9, &[("extent", 173), ("precision", 15)]),
        ("conv.unfolded", 22, &[("epilogue", 5), ("extent", 143), ("layout", 27)]),
        ("gemm.mma", 27, &[("layout", 32), ("precision", 49)]),
        ("gemm.simt", 107, &[]),
        ("gemm.wgmma", 89, &[("batch", 2), ("precision", 16)]),
        ("map.simt", 83, &[]),
        ("norm.groups", 12, &[("layout", 16)]),
        ("norm.rows", 10, &[("layout", 30)]),
        ("norm.strided", 40, &[]),
        ("pool.blocks", 1, &[("direction", 24), ("extent", 12), ("layout", 11)]),
        ("pool.direct", 96, &[]),
        ("pool.flat", 1, &[("direction", 24), ("extent", 12), ("layout", 11)]),
        ("pool.map", 12, &[("direction", 48), ("extent", 12)]),
        ("pool.planes", 15, &[("extent", 9), ("layout", 72)]),
        ("pool.reduction", 24, &[("direction", 48), ("extent", 12)]),
        ("pool.windows", 3, &[("direction", 48), ("extent", 24), ("layout", 9)]),
        ("reduce.rows", 4, &[("extent", 4), ("layout", 124)]),
        ("reduce.simt", 132, &[]),
        ("resample.gather", 88, &[]),
        ("scan.rows", 109, &[]),
        ("softmax.rows", 88, &[]),
    ];

    /// Engines whose rows lie one behind the other without gaps: no stride of theirs is far.
    const ONE_BEHIND_THE_OTHER: [&str; 1] = ["reduce.short_rows"];

    #[test]
    fn engines_take_and_refuse_what_is_written_down() {
        let cases = cases("").expect("the problems are read");
        let mut found = Vec::new();
        for engine in verdigris_engines::engines() {
            let mut outcome = Outcome::default();
            for far in &cases {
                accept(far, engine, &mut outcome).expect("is cut");
            }
            let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
            outcome.refused.iter().for_each(|(.., reason)| *reasons.entry(reason).or_default() += 1);
            let name = engine.id().name;
            let taken = outcome.taken.get(name).copied().unwrap_or(0);
            if ONE_BEHIND_THE_OTHER.contains(&name) {
                assert_eq!(taken, 0, "{name} takes rows that lie apart");
                continue;
            }
            assert!(taken > 0, "{name} takes no problem with far strides, so that nothing is known of it");
            found.push((name, taken, reasons.into_iter().collect::<Vec<_>>()));
        }
        found.sort();
        let expected: Vec<_> = EXPECTED.iter().map(|&(name, taken, refused)| (name, taken, refused.to_vec())).collect();
        assert!(found == expected, "of {} problems engines take and refuse\n{found:#?}", cases.len());
    }
}
