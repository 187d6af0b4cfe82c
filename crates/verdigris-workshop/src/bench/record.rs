//! The rows of a record, and the machine that they were measured on.

use std::process::Command;

use anyhow::Result;
use serde::Serialize;
use verdigris_engines::engine::Knobs;

/// What is the same for all rows of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    /// Device name and the chip's identity.
    pub(crate) machine: String,
    /// What the driver supports, as a CUDA version.
    pub(crate) driver: String,
    /// Ours, the kernels' source hash, and the peer's.
    pub(crate) versions: String,
    /// UTC, `YYYY-MM-DDTHH:MM:SSZ`, at the start of the run.
    pub(crate) date: String,
    /// SM clock, memory clock and power as `nvidia-smi` gave them right after the ceilings were measured, where it is there.
    pub(crate) clocks: Option<String>,
    /// What the peer's 8192³ bf16 product reached in this run; none without a peer.
    pub(crate) gemm_ceiling_tflops: Option<f64>,
    /// What a streaming copy reached in this run, read and written bytes together.
    pub(crate) copy_gb_per_s: f64,
}

/// One problem.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) suite: &'static str,
    pub(crate) class: String,
    pub(crate) problem: String,
    pub(crate) dtype: String,
    pub(crate) engine: Option<&'static str>,
    pub(crate) knobs: Option<Knobs>,
    /// Median microseconds of one execution.
    pub(crate) us: Option<f64>,
    pub(crate) tflops: Option<f64>,
    /// Bytes that must cross the memory bus if each does so once, over the time.
    pub(crate) gb_per_s: Option<f64>,
    /// What the engine's cost model said.
    pub(crate) estimate_us: Option<f64>,
    /// The peer, and which of its answers.
    pub(crate) peer: Option<String>,
    pub(crate) peer_us: Option<f64>,
    /// The peer's time over ours: above 1 we are ahead.
    pub(crate) ratio: Option<f64>,
    /// `‖got − want‖ / ‖want‖` over the sample.
    pub(crate) error: Option<f64>,
    /// The greatest distance from right, in tolerances.
    pub(crate) worst_in_tolerances: Option<f64>,
    pub(crate) peer_error: Option<f64>,
    /// Interquartile range over median: of the ratio where there is a peer, else of our time.
    pub(crate) spread: Option<f64>,
    /// The least time by this run's ceilings, over ours.
    pub(crate) of_ceiling: Option<f64>,
    pub(crate) workspace_bytes: Option<u64>,
    /// What is wrong or left out.
    pub(crate) remark: Option<String>,
    /// A result of ours was wrong.
    pub(crate) wrong: bool,
    /// With --all-knobs: every setting, fastest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) variants: Vec<Variant>,
}

/// One engine's setting on one problem.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Variant {
    pub(crate) engine: &'static str,
    pub(crate) knobs: Knobs,
    pub(crate) us: Option<f64>,
    pub(crate) estimate_us: f64,
    pub(crate) remark: Option<String>,
}

/// A row with what is the same for all of them.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    row: &'a Row,
    #[serde(flatten)]
    machine: &'a Machine,
}

/// A row as one line of JSON.
pub(crate) fn line(row: &Row, machine: &Machine) -> Result<String> {
    Ok(serde_json::to_string(&Line { row, machine })?)
}

/// Clocks and power of the chip now, by `nvidia-smi`; `None` where that is not there.
pub(crate) fn clocks(uuid: &str) -> Option<String> {
    let query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu";
    let output = Command::new("nvidia-smi").args(["-i", uuid, query, "--format=csv,noheader"]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_fields_of_every_record() {
        let machine = Machine {
            machine: "m".into(),
            driver: "13.0".into(),
            versions: "v".into(),
            date: "d".into(),
            clocks: None,
            gemm_ceiling_tflops: Some(700.0),
            copy_gb_per_s: 4000.0,
        };
        let row = Row { suite: "gemm", us: Some(1.5), ..Row::default() };
        let value: serde_json::Value = serde_json::from_str(&line(&row, &machine).expect("prints")).expect("is JSON");
        for field in ["suite", "class", "problem", "dtype", "engine", "us", "peer", "peer_us", "ratio", "error", "spread"] {
            assert!(value.get(field).is_some(), "{field}");
        }
        for field in ["machine", "driver", "versions", "date"] {
            assert!(value.get(field).is_some(), "{field}");
        }
    }
}
