//! `verify --refusals`: how many of the corpus's problems each engine takes, and why not the others. Nothing is run.
//!
//! Problems of another kind than an engine's are not counted. A case of products is one problem, a graph as many as it is cut into.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rayon::prelude::*;
use serde::Serialize;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Engine, Reason};
use verdigris_graph::{Problem, pattern};

use crate::{cases, check_graphs};
use verdigris_cli::record::now;
use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, say};

/// Where the record goes unless it is said.
const RECORD: &str = "bench/record/refusals.jsonl";

/// What an engine says of the corpus.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Row {
    suite: &'static str,
    engine: &'static str,
    /// Problems of the engine's kind.
    asked: u64,
    taken: u64,
    /// Refused over asked.
    rate: f64,
    /// Refusals by reason.
    refusals: BTreeMap<&'static str, u64>,
    /// The chip that was asked about.
    arch: String,
    /// The program's version, and the hash of the sources of its kernels.
    version: &'static str,
    source: &'static str,
    date: String,
}

/// Asks every engine about every problem of the corpus whose id contains `filter`, as on an H200.
pub(crate) fn run(filter: &str, engines: &[&'static dyn Engine], record: Option<&Path>, json: bool) -> Result<Verdict> {
    let rows = rows(&problems(filter)?, engines);
    if json {
        for row in &rows {
            say!("{}", serde_json::to_string(row)?);
        }
    } else {
        let cells = |row: &Row| {
            let why: Vec<String> = row.refusals.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
            let rate = format!("{:.1} %", 100.0 * row.rate);
            vec![row.engine.to_owned(), row.asked.to_string(), row.taken.to_string(), rate, why.join(", ")]
        };
        let (left, right) = (Align::Left, Align::Right);
        let head = [("engine", left), ("asked", right), ("taken", right), ("refused", right), ("for", left)];
        table::print(&head, &rows.iter().map(cells).collect::<Vec<_>>());
    }
    let path = match record {
        Some(path) if path.as_os_str() == "none" => return Ok(Verdict::Good),
        // A part of the corpus is not what the record is about.
        None if !filter.is_empty() => return Ok(Verdict::Good),
        path => path.map_or_else(|| PathBuf::from(RECORD), Path::to_path_buf),
    };
    write(&path, &rows).with_context(|| format!("writing the record {}", path.display()))?;
    eprintln!("record: {}", path.display());
    Ok(Verdict::Good)
}

/// The whole record anew: what it said before is in git.
fn write(path: &Path, rows: &[Row]) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut file = std::fs::File::create(path)?;
    for row in rows {
        writeln!(file, "{}", serde_json::to_string(row)?)?;
    }
    Ok(())
}

/// The problems of the cases of products and of graphs, those that only a device can hold among them.
fn problems(filter: &str) -> Result<Vec<Problem>> {
    let graphs = check_graphs::load(filter)?;
    let mut problems = match cases::load(None, None, filter) {
        Ok(cases) => cases.into_iter().map(|case| case.problem).collect(),
        // The filter may name graphs alone.
        Err(_) if !graphs.is_empty() => Vec::new(),
        Err(error) => return Err(error),
    };
    let parts: Vec<Vec<Problem>> = (graphs.par_iter())
        .map(|case| {
            let partition = pattern::partition(&case.graph).with_context(|| case.id.clone())?;
            Ok(partition.parts.into_iter().map(|part| part.problem).collect())
        })
        .collect::<Result<_>>()?;
    problems.extend(parts.into_iter().flatten());
    Ok(problems)
}

fn rows(problems: &[Problem], engines: &[&'static dyn Engine]) -> Vec<Row> {
    let (arch, date) = (Arch::h200(), now());
    let one = |&engine: &&'static dyn Engine| {
        let reasons: Vec<Option<Reason>> =
            problems.par_iter().map(|problem| engine.accept(problem, &arch).err().map(|refusal| refusal.reason)).collect();
        let asked = reasons.iter().filter(|reason| **reason != Some(Reason::Problem)).count() as u64;
        let taken = reasons.iter().filter(|reason| reason.is_none()).count() as u64;
        let mut refusals = BTreeMap::new();
        for reason in reasons.iter().flatten().filter(|reason| **reason != Reason::Problem) {
            *refusals.entry(reason.name()).or_default() += 1;
        }
        Row {
            suite: "refusals",
            engine: engine.id().name,
            asked,
            taken,
            rate: if asked == 0 { 0.0 } else { (asked - taken) as f64 / asked as f64 },
            refusals,
            arch: arch.name.clone(),
            version: env!("CARGO_PKG_VERSION"),
            source: verdigris_engines::SOURCE_HASH,
            date: date.clone(),
        }
    };
    engines.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The record that is kept is of the engines that there are, each with counts that add up.
    #[test]
    fn the_record_is_of_every_engine() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(RECORD);
        let record = std::fs::read_to_string(&path).expect("the record, written by `workshop verify --refusals`");
        let rows: Vec<serde_json::Value> = record.lines().map(|line| serde_json::from_str(line).expect("a row")).collect();
        let recorded: Vec<&str> = rows.iter().map(|row| row["engine"].as_str().expect("a name")).collect();
        let known: Vec<&str> = verdigris_engines::engines().map(|engine| engine.id().name).collect();
        assert_eq!(recorded, known, "`workshop verify --refusals` writes {RECORD} anew");
        for row in &rows {
            let count = |of: &serde_json::Value| of.as_u64().expect("a count");
            let refused: u64 = row["refusals"].as_object().expect("reasons").values().map(count).sum();
            assert_eq!(count(&row["taken"]) + refused, count(&row["asked"]), "{row}");
            assert!(row["date"].is_string() && row["source"].is_string() && row["version"].is_string(), "{row}");
        }
    }

    #[test]
    fn every_problem_of_the_corpus_is_taken_by_somebody_and_counts_add_up() {
        let engines: Vec<&'static dyn Engine> = verdigris_engines::engines().collect();
        let problems = problems("").expect("the corpus");
        let rows = rows(&problems, &engines);
        for row in &rows {
            assert_eq!(row.taken + row.refusals.values().sum::<u64>(), row.asked, "{}", row.engine);
            assert!(row.asked > 0, "{} is never asked", row.engine);
            // Graphs hand filters of one element to the products before an engine is asked; `conv.pointwise` serves problems that were not cut from one.
            let is_expected = row.taken > 0 || row.engine == "conv.pointwise";
            assert!(is_expected, "{} takes nothing of the corpus: {:?}", row.engine, row.refusals);
        }
        let arch = Arch::h200();
        let nobody =
            problems.par_iter().find_any(|problem| !problem.is_empty() && engines.iter().all(|e| e.accept(problem, &arch).is_err()));
        assert!(nobody.is_none(), "{nobody:?}");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("deep/record.jsonl");
        write(&path, &rows).expect("writes");
        write(&path, &rows).expect("writes anew");
        assert_eq!(std::fs::read_to_string(&path).expect("reads").lines().count(), rows.len());
    }
}
