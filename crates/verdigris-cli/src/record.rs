//! Where measurements go: a file of JSON lines, one object a row, written as the rows are measured.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

/// The file that rows go to; appended to, so that runs of one day share it.
pub struct Record {
    file: File,
    /// Where it is.
    pub path: PathBuf,
}

impl Record {
    /// Opens the file that was asked for, else `bench/record/DEVICE/DATE-SUITE.jsonl`.
    pub fn open(path: Option<&Path>, device: &str, date: &str, suite: &str) -> Result<Record> {
        let path = path.map_or_else(|| default_path(device, date, suite), Path::to_path_buf);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).with_context(|| format!("making the folder {}", folder.display()))?;
        }
        let file =
            OpenOptions::new().create(true).append(true).open(&path).with_context(|| format!("opening the record {}", path.display()))?;
        Ok(Record { file, path })
    }

    /// Writes a line through to the file.
    pub fn write(&mut self, line: &str) -> Result<()> {
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
pub fn now() -> String {
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
}
