//! `bench features`: what the cost model reads of the configs that a record of `bench choice` timed, for its fit.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use rayon::prelude::*;
use serde_json::{Value, json};
use verdigris_engines::arch::Arch;
use verdigris_engines::cost;
use verdigris_engines::engine::Knobs;

use verdigris_cli::{Verdict, say};

use super::draw::{Kind, draw};

/// Options of `bench features`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Records of `bench choice`.
    #[arg(required = true)]
    records: Vec<PathBuf>,
    /// Where the samples go: a JSON line with the names of the features, then one for each problem.
    #[arg(long)]
    out: PathBuf,
}

/// Draws the problems of the records anew and writes, for each config that was timed, its kernel, the analytic estimate, the features and the times.
///
/// # Errors
/// A record that cannot be read, or a file that cannot be written. Configs that are no longer offered are counted and left out.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let mut lines: Vec<Value> = Vec::new();
    for path in &arguments.records {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        for line in BufReader::new(file).lines() {
            lines.push(serde_json::from_str(&line?).with_context(|| path.display().to_string())?);
        }
    }
    lines.retain(|line| line["suite"] == "choice" && line["number"].is_u64());
    let done: Vec<Result<(Value, usize, usize)>> = lines.par_iter().map(problem).collect();
    let mut out = BufWriter::new(File::create(&arguments.out).with_context(|| arguments.out.display().to_string())?);
    writeln!(out, "{}", json!({ "features": cost::features::NAMES }))?;
    let (mut kept, mut lost) = (0, 0);
    for one in done {
        let (line, known, unknown) = one?;
        (kept, lost) = (kept + known, lost + unknown);
        writeln!(out, "{line}")?;
    }
    out.flush()?;
    if kept == 0 {
        bail!("none of the {lost} configs in these records is offered any more");
    }
    say!("{kept} configs of {} problems; {lost} that are offered no more", lines.len());
    Ok(Verdict::Good)
}

/// The samples of a problem, how many there are, and how many configs of the record are none any more.
fn problem(line: &Value) -> Result<(Value, usize, usize)> {
    let kind = match line["kind"].as_str() {
        Some("product") => Kind::Product,
        Some("convolution") => Kind::Convolution,
        other => bail!("a problem of the kind {other:?}; known are product and convolution"),
    };
    let (Some(seed), Some(number)) = (line["seed"].as_u64(), line["number"].as_u64()) else { bail!("a problem without seed or number") };
    let drawn = draw(seed, kind, number);
    if line["words"].as_str() != Some(&drawn.words) {
        bail!("problem {number} of seed {seed} was {}, and is drawn as {}", line["words"], drawn.words);
    }
    let arch = Arch::h200();
    let mut candidates = std::collections::BTreeMap::new();
    let (mut samples, mut lost) = (Vec::new(), 0);
    for config in line["configs"].as_array().into_iter().flatten() {
        let (engine, knobs, screen, us) = fields(config);
        let candidate = candidates
            .entry(engine.to_owned())
            .or_insert_with(|| verdigris_engines::engine(engine).and_then(|engine| engine.accept(&drawn.problem, &arch).ok()));
        let work = candidate.as_ref().zip(knobs).and_then(|(candidate, knobs)| candidate.work(&knobs).ok());
        match work.and_then(|work| cost::sample(&work, &arch)) {
            Some((kernel, analytic_us, features)) => samples.push(json!([engine, kernel, analytic_us, screen, us, features])),
            None => lost += 1,
        }
    }
    let known = samples.len();
    let dtype = drawn.dtype.name();
    let key = format!("{seed}/{}/{number}", kind.name());
    Ok((json!({ "problem": key, "dtype": dtype, "words": drawn.words, "samples": samples }), known, lost))
}

/// A config of a record, as an object or as a short row: engine, knobs, and its times.
fn fields(config: &Value) -> (&str, Option<Knobs>, Value, Value) {
    if let Some(row) = config.as_array() {
        let at = |i: usize| row.get(i).cloned().unwrap_or(Value::Null);
        let knobs = row.get(1).and_then(Value::as_str).and_then(parse);
        return (row.first().and_then(Value::as_str).unwrap_or(""), knobs, at(3), at(4));
    }
    let knobs = serde_json::from_value(config["knobs"].clone()).ok();
    (config["engine"].as_str().unwrap_or(""), knobs, config["screen_us"].clone(), config["us"].clone())
}

/// Knobs as they are printed.
fn parse(text: &str) -> Option<Knobs> {
    if text == "default" {
        return Some(Knobs::default());
    }
    let pairs: Option<Vec<(&str, u32)>> =
        text.split(',').map(|pair| pair.split_once('=').and_then(|(name, value)| Some((name, value.parse().ok()?)))).collect();
    pairs.map(Knobs::new)
}
