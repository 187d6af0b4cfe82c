//! `bench conv`: convolutions, each beside the matrix product of the same extents.
//!
//! The product is computed by whoever is faster, our engine or the peer's library: what a convolution could hope for if its operands were
//! matrices already. Of a strided dgrad, the product is as deep as the taps that meet an output.

use anyhow::{Context, Result};
use verdigris::{Config, Handle, Limits};
use verdigris_graph::{ConvProblem, Direction, GemmProblem, Matrix, Order, Problem, Slot};
use verdigris_reference::conv_list::ConvBenchProblem;

use super::RunArguments;
use super::conv_sample;
use super::data::{Operands, Source};
use super::measure::{self, Side};
use super::peers::{Answer, Peer};
use super::record::Row;
use super::run::{self, Ceilings, Fastest, Ours, SEED};
use verdigris_cli::selection::{self, ConvSelection};
use verdigris_cli::{Verdict, device};

/// Options of `bench conv`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    problems: ConvSelection,
    #[command(flatten)]
    run: RunArguments,
}

/// Carries out `bench conv`.
pub(super) fn run(arguments: &Arguments) -> Result<Verdict> {
    let problems = arguments.problems.problems()?;
    arguments.run.check()?;
    let config = Config::from_environment()?;
    let Some(handle) = device::open("bench conv", &config, arguments.run.json)? else {
        return Ok(Verdict::Good);
    };
    let peer = if arguments.run.peer == super::Peer::None { None } else { Peer::open(&handle, &config)? };
    let mut source = Source::new(&handle, SEED);
    let (machine, ceilings) = run::calibrate(&handle, &mut source, peer.as_ref())?;
    let mut bench = Bench { handle: &handle, arguments: &arguments.run, source, peer, ceilings };
    let names: Vec<String> = problems.iter().map(|row| format!("{} {}", row.dtype.name(), row.name)).collect();
    run::all(&handle, &arguments.run, &machine, "conv", &names, |i| bench.problem(&problems[i]))
}

/// The product of the same extents, with the orders that the convolution has; a batch of them for groups.
fn product(problem: &ConvProblem) -> Result<GemmProblem> {
    let extents = problem.gemm_extents();
    let dense = 2.0 * extents.m as f64 * extents.n as f64 * extents.k as f64 * extents.groups as f64;
    let k = ((extents.k as f64 * (problem.flops() / dense).min(1.0)).round() as u64).max(1);
    let (m, n) = (extents.m, extents.n);
    let (a_order, b_order) = match problem.direction {
        Direction::Fprop => (Order::RowMajor, Order::ColumnMajor),
        Direction::Dgrad => (Order::RowMajor, Order::RowMajor),
        Direction::Wgrad => (Order::ColumnMajor, Order::RowMajor),
    };
    let [(_, first, _), (_, second, _)] = problem.operands();
    let matrix = |slot, dtype, order, rows: u64, columns: u64| {
        let leading = if order == Order::RowMajor { columns } else { rows };
        Matrix { batch_strides: vec![rows * columns], ..Matrix::with_leading_dimension(Slot(slot), dtype, order, leading) }
    };
    let gemm = GemmProblem {
        batch: vec![extents.groups],
        m,
        n,
        k,
        precision: problem.precision,
        determinism: problem.determinism,
        a: matrix(0, first.dtype, a_order, m, k),
        b: matrix(1, second.dtype, b_order, k, n),
        d: matrix(2, problem.result().dtype, Order::RowMajor, m, n),
        ..GemmProblem::packed(m, n, k, first.dtype, problem.result().dtype)?
    };
    Ok(gemm.canonical()?)
}

struct Bench<'h> {
    handle: &'h Handle,
    arguments: &'h RunArguments,
    source: Source<'h>,
    peer: Option<Peer>,
    ceilings: Ceilings,
}

/// The product, by whoever is faster.
struct Product {
    operands: Operands,
    ours: Option<(f64, verdigris::ProblemPlan)>,
    theirs: Option<Answer>,
}

impl Bench<'_> {
    fn problem(&mut self, named: &ConvBenchProblem) -> Result<Row> {
        let (handle, arguments) = (self.handle, self.arguments);
        let conv = &named.problem;
        let mut row = Row {
            suite: "conv",
            class: named.class.clone(),
            problem: named.name.clone(),
            dtype: named.dtype.name().to_owned(),
            ..Row::default()
        };
        if conv.is_empty() || conv.flops() == 0.0 {
            row.remark = Some("nothing is computed".to_owned());
            return Ok(row);
        }
        let problem = selection::as_planned(conv);
        let survey = run::ways(handle, arguments, &problem, &mut row)?;
        let [(_, first, first_extents), (_, second, second_extents)] = conv.operands();
        let result = conv.result();
        let bytes = |tensor: &verdigris_graph::Tensor, extents| -> Result<u64> {
            Ok(u64::try_from(tensor.layout(extents)?.span_bytes(tensor.dtype))?)
        };
        // Slots of a product are numbered as its operands stand, which of these three kinds is the order of the convolution's own.
        let mut operands = Operands::of(
            &mut self.source,
            [
                (first.dtype, bytes(first, first_extents)?),
                (second.dtype, bytes(second, second_extents)?),
                (result.dtype, bytes(result, conv.result_extents())?),
            ],
        )?;
        let (a, b) = (&operands.a.contents, &operands.b.contents);
        let sample = conv_sample::sample(conv, &|offset| a.at(offset), &|offset| b.at(offset), SEED)?;
        let best = run::fastest(handle, &mut self.source, &problem, &survey.ranked, &mut operands, Some(&sample), &mut row)?;
        if !arguments.all_knobs {
            row.variants.clear();
        }
        let Some(Fastest { us, plan, way, judgement }) = best else { return Ok(row) };
        let product = if arguments.peer == super::Peer::None { None } else { self.product(conv, &mut row)? };

        let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes())?;
        let ours = Ours { plan: &plan, operands: &operands, workspace: workspace.slice() };
        let submit_ours = |i: u64| ours.submit(handle, i % operands.copies);
        let product_plan = product.as_ref().and_then(|product| product.ours.as_ref().map(|(_, plan)| plan));
        let product_bytes = product_plan.map_or(0, verdigris::ProblemPlan::workspace_bytes);
        let product_workspace = handle.pool().alloc(handle.stream(), product_bytes)?;
        let submit_product = |i: u64| -> Result<()> {
            let Some(product) = &product else { return Ok(()) };
            let copy = i % product.operands.copies;
            match (&product.ours, &product.theirs, &self.peer) {
                (Some((_, plan)), ..) => {
                    Ours { plan, operands: &product.operands, workspace: product_workspace.slice() }.submit(handle, copy)
                }
                (None, Some(answer), Some(peer)) => peer.run(handle, answer, &product.operands, copy),
                _ => Ok(()),
            }
        };
        let mut sides = vec![Side { brief_us: us, submit: &submit_ours as &dyn Fn(u64) -> Result<()> }];
        sides.extend(product.as_ref().map(|product| Side {
            brief_us: product.ours.as_ref().map_or_else(|| product.theirs.as_ref().map_or(us, |answer| answer.trial_us), |(us, _)| *us),
            submit: &submit_product as &dyn Fn(u64) -> Result<()>,
        }));
        let copies = product.as_ref().map_or(operands.copies, |product| operands.copies.max(product.operands.copies));
        let mut samples = measure::interleave(handle, copies, arguments.seconds, &sides)?.into_iter();
        if let Some(times) = samples.next() {
            let us = times.median();
            row.engine = Some(way.engine.name);
            row.knobs = Some(way.knobs.clone());
            row.us = Some(us);
            row.tflops = Some(conv.flops() / us * 1e-6);
            row.gb_per_s = Some(conv.traffic_bytes() / us * 1e-3);
            row.estimate_us = Some(way.cost.us);
            row.error = judgement.as_ref().map(|judgement| judgement.relative_error);
            row.worst_in_tolerances = judgement.as_ref().map(|judgement| judgement.worst_in_tolerances);
            row.workspace_bytes = Some(plan.workspace_bytes());
            let least_us = self.ceilings.least_us(conv.precision, first.dtype, conv.flops(), conv.traffic_bytes());
            row.of_ceiling = least_us.map(|least| least / us);
            row.spread = Some(times.spread());
            if let Some(theirs) = samples.next() {
                let ratios = theirs.over(&times);
                row.peer_us = Some(theirs.median());
                row.ratio = Some(ratios.median());
                row.spread = Some(ratios.spread());
            }
        }
        handle.stream().synchronize()?;
        Ok(row)
    }

    /// The product of the same extents, by our fastest engine by estimate and by the peer; the slower one is dropped.
    fn product(&mut self, conv: &ConvProblem, row: &mut Row) -> Result<Option<Product>> {
        let handle = self.handle;
        let gemm = product(conv)?;
        let problem = Problem::Gemm(gemm.clone());
        let mut operands = Operands::new(&mut self.source, &gemm)?;
        let survey = handle.survey(&problem, &Limits::default())?;
        let mut unused = Row::default();
        let first = &survey.ranked[..survey.ranked.len().min(1)];
        let ours = run::fastest(handle, &mut self.source, &problem, first, &mut operands, None, &mut unused)?;
        let mut theirs = None;
        if let Some(peer) = &self.peer {
            match peer.best(handle, &gemm, &operands) {
                Ok(answer) => theirs = Some(answer),
                Err(error) => {
                    handle.stream().synchronize().with_context(|| format!("after the peer failed with: {error:#}"))?;
                    row.remark.get_or_insert_with(|| format!("no peer: {error:#}"));
                }
            }
        }
        let is_theirs = theirs.as_ref().is_some_and(|answer| ours.as_ref().is_none_or(|ours| answer.trial_us < ours.us));
        let (ours, theirs) = if is_theirs { (None, theirs) } else { (ours.map(|best| (best.us, best.plan)), None) };
        let by = if is_theirs { "cublaslt" } else { "ours" };
        row.peer = Some(format!("gemm of the same extents, {by}"));
        Ok((ours.is_some() || theirs.is_some()).then_some(Product { operands, ours, theirs }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: ConvSelection,
    }

    #[test]
    fn products_have_the_convolutions_work() {
        for row in Line::parse_from(["x", "--dtype", "bf16"]).arguments.problems().expect("rows") {
            let gemm = product(&row.problem).expect("a product");
            let ratio = gemm.flops() / row.problem.flops();
            // A depth is a whole number.
            assert!((0.9..=1.1).contains(&ratio) || gemm.k < 16, "{}: {ratio}", row.name);
        }
    }
}
