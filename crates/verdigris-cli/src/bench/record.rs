//! The record of a run: JSON lines, one object a row, written as the rows are measured.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
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

/// The file that rows go to; appended to, so that runs of one day share it.
pub(crate) struct Record {
    file: File,
    pub(crate) path: PathBuf,
}

impl Record {
    /// Opens the file that was asked for, else `bench/record/DEVICE/DATE-SUITE.jsonl`.
    pub(crate) fn open(path: Option<&Path>, device: &str, date: &str, suite: &str) -> Result<Record> {
        let path = path.map_or_else(|| default_path(device, date, suite), Path::to_path_buf);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).with_context(|| format!("making the folder {}", folder.display()))?;
        }
        let file =
            OpenOptions::new().create(true).append(true).open(&path).with_context(|| format!("opening the record {}", path.display()))?;
        Ok(Record { file, path })
    }

    /// Writes a line through to the file.
    pub(crate) fn write(&mut self, line: &str) -> Result<()> {
        writeln!(self.file, "{line}")
            .and_then(|()| self.file.flush())
            .with_context(|| format!("writing the record {}", self.path.display()))
    }
}

fn default_path(device: &str, date: &str, suite: &str) -> PathBuf {
    let words: Vec<String> = device
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty() && *word != "NVIDIA")
        .map(str::to_ascii_lowercase)
        .collect();
    let day = date.get(..10).unwrap_or(date);
    ["bench", "record", &words.join("-"), &format!("{day}-{suite}.jsonl")].iter().collect()
}

/// Now, as `YYYY-MM-DDTHH:MM:SSZ`.
pub(crate) fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    date(seconds)
}

/// Seconds since 1970 as a date of the Gregorian calendar.
fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut left) = (1970, days);
    loop {
        let length = 365 + u64::from(is_leap(year));
        if left < length {
            break;
        }
        left -= length;
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while left >= lengths[month] {
        left -= lengths[month];
        month += 1;
    }
    format!("{year:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", month + 1, left + 1, rest / 3600, rest / 60 % 60, rest % 60)
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
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(date(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(date(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn a_device_has_a_folder_of_its_own() {
        assert_eq!(default_path("NVIDIA H200", "2026-01-02T03:04:05Z", "gemm"), Path::new("bench/record/h200/2026-01-02-gemm.jsonl"));
        let hard = default_path("NVIDIA H100 80GB HBM3/../x", "2026-01-02", "gemm");
        assert_eq!(hard, Path::new("bench/record/h100-80gb-hbm3-x/2026-01-02-gemm.jsonl"));
    }

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
