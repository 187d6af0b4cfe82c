//! A run over a list of problems.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use verdigris::{Binding, Config, Handle, Limits, Plan, Ranked, Settings};
use verdigris_cuda::DeviceSlice;
use verdigris_graph::{GemmProblem, Problem};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::correctness::{Judgement, Sample};
use super::data::{self, Operands, Source};
use super::measure::{self, Side};
use super::peers::Peer;
use super::record::{self, Machine, Record, Row, Variant};
use super::{GemmArguments, report};
use crate::Verdict;
use crate::problem::Named;

const SEED: u64 = 0x7665_7264;

/// Bytes that the streaming copy reads, and writes as many.
const COPY_BYTES: u64 = 2 << 30;

/// Microseconds of replay for each setting with --all-knobs.
const TRIAL_US: f64 = 3000.0;

/// Measures the problems.
pub(super) fn run(handle: &Handle, config: &Config, arguments: &GemmArguments, problems: &[Named]) -> Result<Verdict> {
    let begun = Instant::now();
    let peer = if arguments.peer == super::Peer::None { None } else { Peer::open(handle, config)? };
    let mut bench =
        Bench { handle, arguments, source: Source::new(handle, SEED), peer, ceilings: Ceilings { bf16_tflops: None, copy_gb_per_s: 0.0 } };
    let machine = bench.calibrate()?;
    let mut record = match arguments.record.as_deref() {
        Some(path) if path.as_os_str() == "none" => None,
        path => Some(Record::open(path, &handle.arch().name, &machine.date, "gemm")?),
    };
    let progress = ProgressBar::new(problems.len() as u64);
    progress.set_style(
        ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} eta {eta} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let mut rows = Vec::new();
    let mut left = 0;
    let mut broken = None;
    for named in problems {
        if arguments.budget.is_some_and(|budget| begun.elapsed().as_secs_f64() > budget) {
            left += 1;
            continue;
        }
        progress.set_message(format!("{} {}", named.dtype, named.name));
        match bench.problem(named) {
            Ok(row) => {
                let line = record::line(&row, &machine)?;
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
                broken = Some(error.context(format!("{} {}", named.dtype, named.name)));
                break;
            }
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    if !arguments.json {
        report::print(&rows, &machine);
    }
    if left > 0 {
        eprintln!("{left} of {} problems were not measured: --budget was spent", problems.len());
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

/// What this run's machine reaches.
#[derive(Clone, Copy)]
struct Ceilings {
    bf16_tflops: Option<f64>,
    copy_gb_per_s: f64,
}

struct Bench<'h> {
    handle: &'h Handle,
    arguments: &'h GemmArguments,
    source: Source<'h>,
    peer: Option<Peer>,
    ceilings: Ceilings,
}

/// One of our ways, loaded, with the workspace that it runs in.
struct Ours<'a> {
    plan: &'a Plan,
    operands: &'a Operands,
    workspace: DeviceSlice<'a>,
}

impl Ours<'_> {
    fn submit(&self, handle: &Handle, copy: u64) -> Result<()> {
        let Operands { a, b, d, .. } = self.operands;
        let bindings = [a.slice(copy)?, b.slice(copy)?, d.slice(copy)?].map(Binding::Buffer);
        Ok(self.plan.execute(handle.stream(), &bindings, self.workspace)?)
    }
}

impl Bench<'_> {
    /// Measures the ceilings, and says what machine this is.
    fn calibrate(&mut self) -> Result<Machine> {
        let handle = self.handle;
        let date = record::now();
        self.ceilings.copy_gb_per_s = copy_gb_per_s(handle)?;
        let gemm = GemmProblem {
            b: verdigris_graph::Matrix::with_leading_dimension(
                verdigris_graph::Slot(1),
                DType::Bf16,
                verdigris_graph::Order::ColumnMajor,
                8192,
            ),
            ..GemmProblem::packed(8192, 8192, 8192, DType::Bf16, DType::Bf16)?
        };
        if let Some(peer) = &self.peer {
            let operands = Operands::new(&mut self.source, &gemm)?;
            let answer = peer.best(handle, &gemm, &operands).context("the peer on the ceiling's product, bf16 8192³")?;
            let submit = |i: u64| peer.run(handle, &answer, &operands, i);
            let samples = measure::interleave(handle, operands.copies, 0.3, &[Side { brief_us: answer.trial_us, submit: &submit }])?;
            self.ceilings.bf16_tflops = Some(gemm.flops() / samples[0].median() * 1e-6);
        }
        let properties = handle.context().properties();
        let clocks = record::clocks(&properties.uuid);
        let ours = format!("verdigris {} ({})", env!("CARGO_PKG_VERSION"), &verdigris_engines::SOURCE_HASH[..12]);
        let theirs = self.peer.as_ref().map(|peer| format!(", cuBLASLt {}", peer.version())).unwrap_or_default();
        Ok(Machine {
            machine: format!("{} {}", properties.name, properties.uuid),
            driver: format!("{}.{}", properties.driver_version / 1000, properties.driver_version % 1000 / 10),
            versions: ours + &theirs,
            date,
            clocks,
            gemm_ceiling_tflops: self.ceilings.bf16_tflops,
            copy_gb_per_s: self.ceilings.copy_gb_per_s,
        })
    }

    fn problem(&mut self, named: &Named) -> Result<Row> {
        let (handle, arguments) = (self.handle, self.arguments);
        let gemm = &named.problem;
        let problem = Problem::Gemm(gemm.clone());
        let mut row =
            Row { suite: "gemm", class: named.class.clone(), problem: named.name.clone(), dtype: named.dtype.clone(), ..Row::default() };
        if gemm.is_empty() || gemm.k == 0 {
            row.remark = Some("nothing is computed".to_owned());
            return Ok(row);
        }
        let settings = match (&arguments.knobs, arguments.all_knobs) {
            (Some(knobs), _) => Settings::Matching(knobs.clone()),
            (None, true) => Settings::All,
            (None, false) => Settings::First,
        };
        let limits = Limits { engine: arguments.engine.clone(), settings, ..Limits::default() };
        let mut survey = handle.survey(&problem, &limits)?;
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
        let failures = compile(handle, &survey.ranked);
        let mut operands = Operands::new(&mut self.source, gemm)?;
        let (a, b) = (Operands::download(handle, &operands.a)?, Operands::download(handle, &operands.b)?);
        let sample = Sample::new(gemm, a, b, SEED)?;

        // Ours: every way is judged, then timed briefly where there are several.
        let mut best: Option<(f64, Plan, &Ranked, Judgement)> = None;
        for way in &survey.ranked {
            let mut variant =
                Variant { engine: way.engine.name, knobs: way.knobs.clone(), us: None, estimate_us: way.cost.us, remark: None };
            let failed = way.program.launches().find_map(|launch| failures.get(launch.kernel.name()));
            let plan = match failed {
                Some(error) => Err(error.clone()),
                None => handle.prepare(&problem, way).map_err(|error| error.to_string()),
            };
            match plan {
                Err(error) => variant.remark = Some(format!("FAILED: {error}")),
                Ok(plan) => {
                    let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes())?;
                    operands.spoil_d(&mut self.source)?;
                    let ours = Ours { plan: &plan, operands: &operands, workspace: workspace.slice() };
                    ours.submit(handle, 0)?;
                    let judgement = sample.judge(gemm, &operands.download_d(handle)?);
                    if let Some(fault) = &judgement.fault {
                        variant.remark = Some(format!("WRONG: {fault}"));
                    } else {
                        let submit = |i: u64| ours.submit(handle, i % operands.copies);
                        let rough_us = measure::rough_us(handle, &submit)?;
                        let us = measure::brief_us(handle, operands.copies, rough_us, TRIAL_US, &submit)?;
                        variant.us = Some(us);
                        if best.as_ref().is_none_or(|(known, ..)| us < *known) {
                            best = Some((us, plan, way, judgement));
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
        if !arguments.all_knobs {
            row.variants.clear();
        }

        // The peer: its best answer, judged by the same measure.
        let mut answer = None;
        if let Some(peer) = &self.peer {
            match peer.best(handle, gemm, &operands) {
                Ok(found) => {
                    operands.spoil_d(&mut self.source)?;
                    peer.run(handle, &found, &operands, 0)?;
                    let judgement = sample.judge(gemm, &operands.download_d(handle)?);
                    row.peer = Some(format!("cublaslt {} of {}", found.index + 1, found.count));
                    row.peer_error = Some(judgement.relative_error);
                    if let Some(fault) = judgement.fault {
                        row.remark.get_or_insert_with(|| format!("the peer's result: {fault}"));
                    }
                    answer = Some(found);
                }
                Err(error) => {
                    handle.stream().synchronize().with_context(|| format!("after the peer failed with: {error:#}"))?;
                    row.remark.get_or_insert_with(|| format!("no peer: {error:#}"));
                }
            }
        }

        let workspace_bytes = best.as_ref().map_or(0, |(_, plan, ..)| plan.workspace_bytes());
        let workspace = handle.pool().alloc(handle.stream(), workspace_bytes)?;
        let ours = best.as_ref().map(|(_, plan, ..)| Ours { plan, operands: &operands, workspace: workspace.slice() });
        let submit_ours = |i: u64| ours.as_ref().map_or(Ok(()), |ours| ours.submit(handle, i));
        let submit_peer = |i: u64| match (&self.peer, &answer) {
            (Some(peer), Some(answer)) => peer.run(handle, answer, &operands, i),
            _ => Ok(()),
        };
        let mut sides = Vec::new();
        sides.extend(best.as_ref().map(|(us, ..)| Side { brief_us: *us, submit: &submit_ours as &dyn Fn(u64) -> Result<()> }));
        sides.extend(answer.as_ref().map(|answer| Side { brief_us: answer.trial_us, submit: &submit_peer as &dyn Fn(u64) -> Result<()> }));
        if sides.is_empty() {
            return Ok(row);
        }
        let samples = measure::interleave(handle, operands.copies, arguments.seconds, &sides)?;
        let mut samples = samples.into_iter();
        if let Some((_, plan, way, judgement)) = &best
            && let Some(times) = samples.next()
        {
            let us = times.median();
            row.engine = Some(way.engine.name);
            row.knobs = Some(way.knobs.clone());
            row.us = Some(us);
            row.tflops = Some(gemm.flops() / us * 1e-6);
            row.estimate_us = Some(way.cost.us);
            row.error = Some(judgement.relative_error);
            row.worst_in_tolerances = Some(judgement.worst_in_tolerances);
            row.workspace_bytes = Some(plan.workspace_bytes());
            row.of_ceiling = self.least_us(gemm).map(|least| least / us);
            row.spread = Some(times.spread());
            if answer.is_some()
                && let Some(theirs) = samples.next()
            {
                let ratios = theirs.over(&times);
                row.peer_us = Some(theirs.median());
                row.ratio = Some(ratios.median());
                row.spread = Some(ratios.spread());
            }
        } else if let Some(theirs) = samples.next() {
            row.peer_us = Some(theirs.median());
            row.spread = Some(theirs.spread());
        }
        handle.stream().synchronize()?;
        Ok(row)
    }

    /// The least time by the ceilings of this run: all bytes once at the copy's rate, or all products at the rate of the bf16 product,
    /// twice that for 8-bit operands and half for tf32. `None` for types that tensor cores do not multiply at such a rate.
    fn least_us(&self, gemm: &GemmProblem) -> Option<f64> {
        use verdigris_graph::Precision as P;
        let factor = match gemm.precision {
            P::Fp8Fast | P::Fp8Promoted | P::I32 => 2.0,
            P::Tf32 => 0.5,
            P::Fp32 | P::F16 if gemm.a.dtype.bytes() == 2 => 1.0,
            P::Fp32 | P::F16 | P::Ieee | P::F64 => return None,
        };
        let copy_us = data::unique_bytes(gemm) / self.ceilings.copy_gb_per_s * 1e-3;
        let product_us = self.ceilings.bf16_tflops.map_or(0.0, |tflops| gemm.flops() / (tflops * factor) * 1e-6);
        Some(copy_us.max(product_us))
    }
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
