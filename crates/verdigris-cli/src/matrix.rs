//! `verdigris matrix`: which machines, drivers and frameworks were measured together, from the records, and which of them is this one.
//!
//! The records are those of the bench, of `canary` and of `check conformance`. The first records of the last have CUDA's version alone, which many releases
//! share: their rows are never those of a machine. Records of `canary` that name no driver are no rows.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use verdigris_cuda::Driver;

use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, say};

/// What `python3 deploy/check.py --write` makes of the records.
const TESTED: &str = include_str!("../../../docs/performance/tested.json");

/// Options of `matrix`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Print the rows as JSON.
    #[arg(long)]
    json: bool,
    /// End with 1 unless every device of this machine was measured under the driver that it has: for CI and roll-outs.
    #[arg(long)]
    require_tested: bool,
}

/// A combination that was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Tested {
    machine: String,
    /// The driver's release; empty where the record does not say it.
    driver: String,
    /// Then the version of CUDA that it supports.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    cuda: String,
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
    is_device_here: bool,
    /// Whether it has such a device, and this driver.
    #[serde(default)]
    is_here: bool,
}

impl Tested {
    /// The driver, as far as the record says it.
    fn driver(&self) -> String {
        if self.driver.is_empty() { format!("CUDA {}", self.cuda) } else { self.driver.clone() }
    }

    /// What this machine has of it.
    fn standing(&self) -> &'static str {
        match (self.is_here, self.is_device_here, self.driver.is_empty()) {
            (true, _, _) => "this machine",
            (false, true, false) => "this device, another driver",
            (false, true, true) => "this device, release of the driver not recorded",
            (false, false, _) => "",
        }
    }
}

/// What this machine has.
#[derive(Clone, Debug, Default)]
struct Here {
    devices: Vec<String>,
    /// The driver's release; none where it is not known.
    driver: Option<String>,
}

impl Here {
    fn find() -> Here {
        let names = |devices: Vec<verdigris_cuda::Device>| devices.iter().map(|device| device.properties().name.clone()).collect();
        Here {
            devices: Driver::load().and_then(|driver| driver.devices()).map(names).unwrap_or_default(),
            driver: verdigris_cuda::release(),
        }
    }

    /// Marks the rows of this machine.
    fn mark(&self, rows: &mut [Tested]) {
        for row in rows {
            row.is_device_here = self.devices.contains(&row.machine);
            row.is_here = row.is_device_here && !row.driver.is_empty() && self.driver.as_ref() == Some(&row.driver);
        }
    }

    /// Why this machine is not one that was measured; none where it is.
    fn untested(&self, rows: &[Tested]) -> Option<String> {
        if self.devices.is_empty() {
            return Some("no device is here".to_owned());
        }
        let lacking = self.devices.iter().find(|name| !rows.iter().any(|row| row.is_here && row.machine == **name))?;
        let drivers: BTreeSet<String> = rows.iter().filter(|row| row.machine == *lacking).map(Tested::driver).collect();
        let drivers: Vec<String> = drivers.into_iter().collect();
        Some(match (&self.driver, drivers.is_empty()) {
            (_, true) => format!("{lacking} was not measured"),
            (None, false) => format!("{lacking} was measured under driver {}, and which one is here is not known", drivers.join(", ")),
            (Some(driver), false) => format!("{lacking} was measured under driver {}, and here is {driver}", drivers.join(", ")),
        })
    }
}

/// Carries out `matrix`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let mut rows: Vec<Tested> = serde_json::from_str(TESTED).context("the table of what was tested, inside this program")?;
    let here = Here::find();
    here.mark(&mut rows);
    let untested = here.untested(&rows);
    let verdict = if arguments.require_tested && untested.is_some() { Verdict::Bad } else { Verdict::Good };
    if arguments.json {
        let report = serde_json::json!({ "tested": rows, "here": here.devices, "driver": here.driver, "untested": untested });
        say!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(verdict);
    }
    let day = |date: &str| date.get(..10).unwrap_or(date).to_owned();
    let cells: Vec<Vec<String>> = (rows.iter())
        .map(|row| {
            vec![
                row.machine.clone(),
                row.driver(),
                row.torch.clone(),
                row.cudnn.clone(),
                row.suites.join(" "),
                row.rows.to_string(),
                row.wrong.to_string(),
                day(&row.last),
                row.standing().to_owned(),
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
    if let Some(why) = untested {
        say!("{why}; what was not measured together is untested, and `verdigris canary` tells whether it works");
    }
    Ok(verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Tested> {
        let row = |machine: &str, driver: &str| serde_json::json!({ "machine": machine, "driver": driver, "suites": [], "runs": 1, "rows": 2, "wrong": 0, "first": "", "last": "" });
        let rows = [row("NVIDIA H100", "580.1.2"), row("NVIDIA H100", "570.0.1"), row("NVIDIA H200", "580.1.2")];
        rows.map(|row| serde_json::from_value(row).expect("a row")).to_vec()
    }

    #[test]
    fn a_machine_is_tested_with_its_device_and_its_driver() {
        let of = |devices: &[&str], driver: Option<&str>| {
            let here = Here { devices: devices.iter().map(|name| (*name).to_owned()).collect(), driver: driver.map(str::to_owned) };
            let mut rows = rows();
            here.mark(&mut rows);
            let marks: Vec<(bool, bool)> = rows.iter().map(|row| (row.is_device_here, row.is_here)).collect();
            (here.untested(&rows), marks)
        };
        assert_eq!(of(&["NVIDIA H100"], Some("570.0.1")), (None, vec![(true, false), (true, true), (false, false)]));
        assert_eq!(of(&["NVIDIA H100", "NVIDIA H200"], Some("580.1.2")).0, None);
        let why = |devices: &[&str], driver| of(devices, driver).0.expect("untested");
        assert_eq!(why(&["NVIDIA H200"], Some("570.0.1")), "NVIDIA H200 was measured under driver 580.1.2, and here is 570.0.1");
        assert_eq!(
            why(&["NVIDIA H100"], None),
            "NVIDIA H100 was measured under driver 570.0.1, 580.1.2, and which one is here is not known"
        );
        assert_eq!(why(&["NVIDIA H100", "NVIDIA L4"], Some("580.1.2")), "NVIDIA L4 was not measured");
        assert_eq!(why(&[], None), "no device is here");
    }

    #[test]
    fn a_record_without_the_release_of_its_driver_is_of_no_machine() {
        let mut rows = rows();
        rows.push(Tested { driver: String::new(), cuda: "13.0".to_owned(), ..rows[2].clone() });
        rows.push(rows[2].clone());
        let mut here = Here { devices: vec!["NVIDIA H200".to_owned()], driver: Some("580.1.2".to_owned()) };
        here.mark(&mut rows);
        assert_eq!(
            rows.iter().map(Tested::standing).collect::<Vec<_>>(),
            ["", "", "this machine", "this device, release of the driver not recorded", "this machine"]
        );
        here.driver = Some(String::new());
        here.mark(&mut rows);
        assert!(rows.iter().all(|row| !row.is_here || !row.driver.is_empty()));
        here.driver = Some("570.0.1".to_owned());
        here.mark(&mut rows);
        // Each driver is named once.
        let why = "NVIDIA H200 was measured under driver 580.1.2, CUDA 13.0, and here is 570.0.1";
        assert_eq!((rows[2].standing(), here.untested(&rows).as_deref()), ("this device, another driver", Some(why)));
    }

    #[test]
    fn the_table_inside_the_program_can_be_read() {
        let rows: Vec<Tested> = serde_json::from_str(TESTED).expect("rows");
        assert!(!rows.is_empty() && rows.iter().all(|row| row.driver.is_empty() != row.cuda.is_empty() && !row.is_here));
        for suite in ["canary", "conformance", "nets"] {
            assert!(rows.iter().any(|row| row.suites.iter().any(|named| named == suite)), "no record of {suite}");
        }
    }
}
