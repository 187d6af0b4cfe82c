//! `bench gemm`: a run over a list of matrix products, against cuBLASLt.

use anyhow::{Context, Result};
use verdigris::{Config, Handle};
use verdigris_graph::Problem;

use super::correctness::Sample;
use super::data::{self, Operands, Source};
use super::measure::{self, Side};
use super::peers::Peer;
use super::record::Row;
use super::run::{self, Ceilings, Ours, SEED};
use super::{GemmArguments, RunArguments};
use verdigris_cli::Verdict;
use verdigris_cli::problem::Named;

/// Measures the problems.
pub(super) fn run(handle: &Handle, config: &Config, arguments: &GemmArguments, problems: &[Named]) -> Result<Verdict> {
    let peer = if arguments.run.peer == super::Peer::None { None } else { Peer::open(handle, config)? };
    let mut source = Source::new(handle, SEED);
    let (machine, ceilings) = run::calibrate(handle, &mut source, peer.as_ref())?;
    let mut bench = Bench { handle, arguments: &arguments.run, source, peer, ceilings };
    let names: Vec<String> = problems.iter().map(|named| format!("{} {}", named.dtype, named.name)).collect();
    run::all(handle, &arguments.run, &machine, "gemm", &names, |i| bench.problem(&problems[i]))
}

struct Bench<'h> {
    handle: &'h Handle,
    arguments: &'h RunArguments,
    source: Source<'h>,
    peer: Option<Peer>,
    ceilings: Ceilings,
}

impl Bench<'_> {
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
        let survey = run::ways(handle, arguments, &problem, &mut row)?;
        let mut operands = Operands::new(&mut self.source, gemm)?;
        let (a, b) = (Operands::download(handle, &operands.a)?, Operands::download(handle, &operands.b)?);
        let sample = Sample::new(gemm, a, b, SEED)?;
        let best = run::fastest(handle, &mut self.source, &problem, &survey.ranked, &mut operands, Some(&sample), &mut row)?;
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
                    let judgement = sample.judge(|take| operands.read_d(&mut self.source, take))?;
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

        let workspace_bytes = best.as_ref().map_or(0, |best| best.plan.workspace_bytes());
        let workspace = handle.pool().alloc(handle.stream(), workspace_bytes)?;
        let ours = best.as_ref().map(|best| Ours { plan: &best.plan, operands: &operands, workspace: workspace.slice() });
        let submit_ours = |i: u64| ours.as_ref().map_or(Ok(()), |ours| ours.submit(handle, i));
        let submit_peer = |i: u64| match (&self.peer, &answer) {
            (Some(peer), Some(answer)) => peer.run(handle, answer, &operands, i),
            _ => Ok(()),
        };
        let mut sides = Vec::new();
        sides.extend(best.as_ref().map(|best| Side { brief_us: best.us, submit: &submit_ours as &dyn Fn(u64) -> Result<()> }));
        sides.extend(answer.as_ref().map(|answer| Side { brief_us: answer.trial_us, submit: &submit_peer as &dyn Fn(u64) -> Result<()> }));
        if sides.is_empty() {
            return Ok(row);
        }
        let samples = measure::interleave(handle, operands.copies, arguments.seconds, &sides)?;
        let mut samples = samples.into_iter();
        if let Some(best) = &best
            && let Some(times) = samples.next()
        {
            let us = times.median();
            row.engine = Some(best.way.engine.name);
            row.knobs = Some(best.way.knobs.clone());
            row.us = Some(us);
            row.tflops = Some(gemm.flops() / us * 1e-6);
            row.estimate_us = Some(best.way.cost.us);
            row.error = best.judgement.as_ref().map(|judgement| judgement.relative_error);
            row.worst_in_tolerances = best.judgement.as_ref().map(|judgement| judgement.worst_in_tolerances);
            row.workspace_bytes = Some(best.plan.workspace_bytes());
            let bytes = data::unique_bytes(gemm);
            row.gb_per_s = Some(bytes / us * 1e-3);
            let least_us = self.ceilings.least_us(gemm.precision, gemm.a.dtype, gemm.flops(), bytes);
            row.of_ceiling = least_us.map(|least| least / us);
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
}
