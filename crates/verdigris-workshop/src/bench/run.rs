//! What the suites share: the loop over problems and its record, this run's ceilings, and our fastest way to compute a problem.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use verdigris::explain::ChosenBy;
use verdigris::{Binding, Handle, Limits, ProblemPlan, Ranked, Settings, Survey};
use verdigris_cuda::DeviceSlice;
use verdigris_graph::{GemmProblem, Matrix, Order, Precision, Problem, Slot};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::correctness::{Judgement, Sample};
use super::data::{Operands, Source};
use super::measure::{self, Side};
use super::peers::Peer;
use super::record::{self, Machine, Row, Variant};
use super::{RunArguments, report};
use verdigris_cli::record::{Record, now};
use verdigris_cli::{Verdict, say};

/// Where the data of a run begin.
pub(super) const SEED: u64 = 0x7665_7264;

/// Bytes that the streaming copy reads, and writes as many.
const COPY_BYTES: u64 = 2 << 30;

/// Microseconds of replay for each setting with --all-knobs.
const TRIAL_US: f64 = 3000.0;

/// Of a way that takes longer, the first run is trial enough.
const SLOW_US: f64 = 50_000.0;

/// What this run's machine reaches.
#[derive(Clone, Copy)]
pub(super) struct Ceilings {
    bf16_tflops: Option<f64>,
    copy_gb_per_s: f64,
}

impl Ceilings {
    /// The least time by the ceilings of this run: all bytes once at the copy's rate, or all products at the rate of the bf16 product,
    /// twice that for 8-bit operands and half for tf32. `None` for types that tensor cores do not multiply at such a rate.
    pub(super) fn least_us(&self, precision: Precision, operands: DType, flops: f64, bytes: f64) -> Option<f64> {
        use Precision as P;
        let factor = match precision {
            P::Fp8Fast | P::Fp8Promoted | P::I32 => 2.0,
            P::Tf32 => 0.5,
            P::Fp32 | P::F16 if operands.bytes() == 2 => 1.0,
            P::Fp32 | P::F16 | P::Ieee | P::F64 => return None,
        };
        let copy_us = bytes / self.copy_gb_per_s * 1e-3;
        let product_us = self.bf16_tflops.map_or(0.0, |tflops| flops / (tflops * factor) * 1e-6);
        Some(copy_us.max(product_us))
    }
}

/// Measures the ceilings, and says what machine this is.
pub(super) fn calibrate(handle: &Handle, source: &mut Source<'_>, peer: Option<&Peer>) -> Result<(Machine, Ceilings)> {
    let date = now();
    let mut ceilings = Ceilings { bf16_tflops: None, copy_gb_per_s: copy_gb_per_s(handle)? };
    let gemm = GemmProblem {
        b: Matrix::with_leading_dimension(Slot(1), DType::Bf16, Order::ColumnMajor, 8192),
        ..GemmProblem::packed(8192, 8192, 8192, DType::Bf16, DType::Bf16)?
    };
    if let Some(peer) = peer {
        let operands = Operands::new(source, &gemm)?;
        let answer = peer.best(handle, &gemm, &operands).context("the peer on the ceiling's product, bf16 8192³")?;
        let submit = |i: u64| peer.run(handle, &answer, &operands, i);
        let samples = measure::interleave(handle, operands.copies, 0.3, &[Side { brief_us: answer.trial_us, submit: &submit }])?;
        ceilings.bf16_tflops = Some(gemm.flops() / samples[0].median() * 1e-6);
    }
    let properties = handle.context().properties();
    let clocks = record::clocks(&properties.uuid);
    let ours = format!("verdigris {} ({})", env!("CARGO_PKG_VERSION"), &verdigris_engines::SOURCE_HASH[..12]);
    let theirs = peer.map(|peer| format!(", cuBLASLt {}", peer.version())).unwrap_or_default();
    let machine = Machine {
        machine: format!("{} {}", properties.name, properties.uuid),
        driver: format!("{}.{}", properties.driver_version / 1000, properties.driver_version % 1000 / 10),
        versions: ours + &theirs,
        date,
        clocks,
        gemm_ceiling_tflops: ceilings.bf16_tflops,
        copy_gb_per_s: ceilings.copy_gb_per_s,
    };
    Ok((machine, ceilings))
}

/// Measures problem after problem, with a progress bar, a record and a table. `names` are those of the problems; `measure` is told the place.
pub(super) fn all(
    handle: &Handle,
    arguments: &RunArguments,
    machine: &Machine,
    suite: &str,
    names: &[String],
    mut measure: impl FnMut(usize) -> Result<Row>,
) -> Result<Verdict> {
    let begun = Instant::now();
    let mut record = match arguments.record.as_deref() {
        Some(path) if path.as_os_str() == "none" => None,
        path => Some(Record::open(path, &handle.arch().name, &machine.date, suite)?),
    };
    let progress = ProgressBar::new(names.len() as u64);
    progress.set_style(
        ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} eta {eta} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let mut rows = Vec::new();
    let mut left = 0;
    let mut broken = None;
    for (i, name) in names.iter().enumerate() {
        if arguments.budget.is_some_and(|budget| begun.elapsed().as_secs_f64() > budget) {
            left += 1;
            continue;
        }
        progress.set_message(name.clone());
        match measure(i) {
            Ok(row) => {
                let line = record::line(&row, machine)?;
                if let Some(record) = &mut record {
                    record.write(&line)?;
                }
                if arguments.json {
                    progress.suspend(|| say!("{line}"));
                }
                rows.push(row);
            }
            Err(error) => {
                // A fault of a kernel takes the context with it: what is measured so far is still told.
                broken = Some(error.context(name.clone()));
                break;
            }
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    if !arguments.json {
        report::print(&rows, machine);
    }
    if left > 0 {
        eprintln!("{left} of {} problems were not measured: --budget was spent", names.len());
    }
    if let Some(record) = &record {
        eprintln!("record: {}", record.path.display());
    }
    match broken {
        Some(error) => Err(error),
        None if rows.iter().any(|row| row.wrong) => Ok(Verdict::Bad),
        None => Ok(Verdict::Good),
    }
}

/// One of our ways, loaded, with the workspace that it runs in.
pub(super) struct Ours<'a> {
    pub(super) plan: &'a ProblemPlan,
    pub(super) operands: &'a Operands,
    pub(super) workspace: DeviceSlice<'a>,
}

impl Ours<'_> {
    /// Runs it on a set of operands.
    pub(super) fn submit(&self, handle: &Handle, copy: u64) -> Result<()> {
        let Operands { a, b, d, .. } = self.operands;
        let bindings = [a.slice(copy)?, b.slice(copy)?, d.slice(copy)?].map(Binding::Buffer);
        Ok(self.plan.execute(handle.stream(), &bindings, self.workspace)?)
    }
}

/// The ways that the options ask for, and in the row why there are none.
pub(super) fn ways(handle: &Handle, arguments: &RunArguments, problem: &Problem, row: &mut Row) -> Result<Survey> {
    if arguments.instant {
        return match handle.choose(problem, &Limits::default()) {
            Ok(chosen) => {
                if chosen.explanation.chosen_by != ChosenBy::Estimate {
                    row.remark = Some(chosen.explanation.chosen_by.words().to_owned());
                }
                Ok(Survey { ranked: vec![chosen.way], refusals: Vec::new() })
            }
            Err(error @ verdigris::Error::NoEngine(_)) => {
                row.remark = Some(error.to_string());
                Ok(Survey { ranked: Vec::new(), refusals: Vec::new() })
            }
            Err(error) => Err(error.into()),
        };
    }
    let settings = match (&arguments.knobs, arguments.all_knobs) {
        (Some(knobs), _) => Settings::Matching(knobs.clone()),
        (None, true) => Settings::All,
        (None, false) => Settings::First,
    };
    let limits = Limits { engine: arguments.engine.clone(), settings, ..Limits::default() };
    let mut survey = handle.survey(problem, &limits)?;
    if !arguments.all_knobs {
        survey.ranked.truncate(1);
    } else if let Some(top) = arguments.top {
        let mut taken: HashMap<&str, usize> = HashMap::new();
        survey.ranked.retain(|way| {
            let count = taken.entry(way.engine.name).or_default();
            *count += 1;
            *count <= top
        });
    }
    if survey.ranked.is_empty() {
        let reasons: Vec<String> = survey.refusals.iter().map(|refusal| format!("{}: {}", refusal.engine, refusal.seen)).collect();
        row.remark = Some(format!("no engine: {}", reasons.join("; ")));
    }
    Ok(survey)
}

/// The fastest way that is right: its time in a brief trial, its plan, and how right it is.
pub(super) struct Fastest<'w> {
    pub(super) us: f64,
    pub(super) plan: ProblemPlan,
    pub(super) way: &'w Ranked,
    pub(super) judgement: Option<Judgement>,
}

/// Judges every way, then times it briefly. The row gets the variants and the first thing that is wrong. Without a sample nothing is judged.
pub(super) fn fastest<'w>(
    handle: &Handle,
    source: &mut Source<'_>,
    problem: &Problem,
    ranked: &'w [Ranked],
    operands: &mut Operands,
    sample: Option<&Sample>,
    row: &mut Row,
) -> Result<Option<Fastest<'w>>> {
    let failures = compile(handle, ranked);
    let mut best: Option<Fastest<'w>> = None;
    for way in ranked {
        let mut variant = Variant { engine: way.engine.name, knobs: way.knobs.clone(), us: None, estimate_us: way.cost.us, remark: None };
        let failed = way.program.launches().find_map(|launch| failures.get(launch.kernel.name()));
        let plan = match failed {
            Some(error) => Err(error.clone()),
            None => handle.load(problem, way).map_err(|error| error.to_string()),
        };
        match plan {
            Err(error) => variant.remark = Some(format!("FAILED: {error}")),
            Ok(plan) => {
                let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes())?;
                operands.spoil_d(source)?;
                let ours = Ours { plan: &plan, operands, workspace: workspace.slice() };
                let first_us = measure::once_us(handle, &|| ours.submit(handle, 0))?;
                let judgement = match sample {
                    Some(sample) => Some(sample.judge(|take| operands.read_d(source, take))?),
                    None => None,
                };
                if let Some(fault) = judgement.as_ref().and_then(|judgement| judgement.fault.as_ref()) {
                    variant.remark = Some(format!("WRONG: {fault}"));
                } else {
                    let submit = |i: u64| ours.submit(handle, i % operands.copies);
                    let us = if first_us > SLOW_US {
                        first_us
                    } else {
                        let rough_us = measure::rough_us(handle, &submit)?;
                        measure::brief_us(handle, operands.copies, rough_us, TRIAL_US, &submit)?
                    };
                    variant.us = Some(us);
                    if best.as_ref().is_none_or(|known| us < known.us) {
                        best = Some(Fastest { us, plan, way, judgement });
                    }
                }
            }
        }
        if let Some(remark) = &variant.remark {
            row.wrong = true;
            row.remark.get_or_insert_with(|| format!("{} {}: {remark}", variant.engine, variant.knobs));
        }
        row.variants.push(variant);
    }
    row.variants.sort_by(|a, b| a.us.unwrap_or(f64::INFINITY).total_cmp(&b.us.unwrap_or(f64::INFINITY)));
    Ok(best)
}

/// Loads the kernels of all ways side by side. Gives what went wrong, by kernel.
fn compile(handle: &Handle, ways: &[Ranked]) -> HashMap<String, String> {
    let mut kernels: HashMap<&str, &KernelRef> = HashMap::new();
    for way in ways {
        kernels.extend(way.program.launches().map(|launch| (launch.kernel.name(), &launch.kernel)));
    }
    let kernels: Vec<&KernelRef> = kernels.into_values().collect();
    let load = |kernel: &&KernelRef| handle.loader().kernel(kernel).err().map(|error| (kernel.name().to_owned(), error.to_string()));
    kernels.par_iter().filter_map(load).collect()
}

/// Read and written bytes a second of a device copy far larger than the L2, in GB/s.
fn copy_gb_per_s(handle: &Handle) -> Result<f64> {
    let from = handle.pool().alloc_zeroed(handle.stream(), COPY_BYTES)?;
    let to = std::cell::RefCell::new(handle.pool().alloc_zeroed(handle.stream(), COPY_BYTES)?);
    let submit = |_: u64| Ok(to.borrow_mut().copy_from(handle.stream(), 0, from.slice())?);
    let rough_us = measure::rough_us(handle, &submit)?;
    let samples = measure::interleave(handle, 1, 0.1, &[Side { brief_us: rough_us, submit: &submit }])?;
    Ok(2.0 * COPY_BYTES as f64 / samples[0].median() * 1e-3)
}
