//! `verdigris matrix`: which machines, drivers and frameworks were measured together, from the records, and which of them is this one.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use verdigris_cuda::Driver;

use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, say};

/// What `python -m verdigris.bench render` makes of the records.
const TESTED: &str = include_str!("../../../docs/performance/tested.json");

/// Options of `matrix`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Print the rows as JSON.
    #[arg(long)]
    json: bool,
}

/// A combination that was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Tested {
    machine: String,
    driver: String,
    #[serde(default)]
    torch: String,
    #[serde(default)]
    cudnn: String,
    #[serde(default)]
    cublaslt: String,
    suites: Vec<String>,
    runs: u64,
    rows: u64,
    /// Rows with a wrong result of ours.
    wrong: u64,
    first: String,
    last: String,
    /// Whether this machine has such a device.
    #[serde(default)]
    is_here: bool,
}

/// Carries out `matrix`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let mut rows: Vec<Tested> = serde_json::from_str(TESTED).context("the table of what was tested, inside this program")?;
    let here: Vec<String> = Driver::load()
        .and_then(|driver| driver.devices())
        .map(|devices| devices.iter().map(|device| device.properties().name.clone()).collect())
        .unwrap_or_default();
    rows.iter_mut().for_each(|row| row.is_here = here.contains(&row.machine));
    if arguments.json {
        say!("{}", serde_json::to_string_pretty(&serde_json::json!({ "tested": rows, "here": here }))?);
        return Ok(Verdict::Good);
    }
    let day = |date: &str| date.get(..10).unwrap_or(date).to_owned();
    let cells: Vec<Vec<String>> = (rows.iter())
        .map(|row| {
            vec![
                row.machine.clone(),
                row.driver.clone(),
                row.torch.clone(),
                row.cudnn.clone(),
                row.suites.join(" "),
                row.rows.to_string(),
                row.wrong.to_string(),
                day(&row.last),
                if row.is_here { "this machine".to_owned() } else { String::new() },
            ]
        })
        .collect();
    let head = [
        ("device", Align::Left),
        ("driver", Align::Left),
        ("torch", Align::Left),
        ("cudnn", Align::Left),
        ("suites", Align::Left),
        ("rows", Align::Right),
        ("wrong", Align::Right),
        ("last", Align::Left),
        ("", Align::Left),
    ];
    table::print(&head, &cells);
    if !rows.iter().any(|row| row.is_here) {
        let what = if here.is_empty() { "no device is here".to_owned() } else { format!("not measured: {}", here.join(", ")) };
        say!("{what}; everything else is untested, and `verdigris canary` tells whether it works");
    }
    Ok(Verdict::Good)
}
