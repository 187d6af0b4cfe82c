//! What records say: rows of a canary, and rows with times as `gate` compares them. They are files that users bring.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// What came of one graph of a canary.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CanaryRow {
    /// `canary`.
    pub suite: String,
    /// The family.
    pub class: String,
    /// The graph.
    pub problem: String,
    /// The device's name.
    pub device: String,
    /// The driver's release, of a GPU; earlier records do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// When.
    pub date: String,
    /// Of the library.
    pub version: String,
    /// The engines of its parts.
    pub engines: Vec<String>,
    /// Elements beyond what rounding allows, of [`CanaryRow::elements`].
    pub wrong: u64,
    /// Elements that were compared.
    pub elements: u64,
    /// The greatest distance from the reference over what rounding allows; infinite, in JSON `null`, where a result is NaN or infinite and should not be.
    #[serde(deserialize_with = "infinite_for_null")]
    pub worst: f64,
    /// Whether all runs gave the same bits; `None` where the plan does not promise it.
    pub repeats: Option<bool>,
    /// The median time on the device.
    pub us: f64,
    /// What the engines' estimates add up to; `None` on the CPU.
    pub estimate_us: Option<f64>,
    /// Of the baseline.
    pub before_us: Option<f64>,
    /// What is wrong, in words.
    pub trouble: Option<String>,
}

/// JSON has no infinity: it is written as null.
fn infinite_for_null<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::INFINITY))
}

/// The lines of a record that are rows; lines that begin with `#` say what it is.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
}

/// The rows of a canary's record.
///
/// # Errors
/// The line that is none, with the record's name.
pub fn canary_rows(name: &str, text: &str) -> Result<Vec<CanaryRow>> {
    lines(text).map(|(number, line)| serde_json::from_str(line).with_context(|| format!("{name}, line {}", number + 1))).collect()
}

/// What a row with a time is about.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub struct Name {
    /// Who wrote it: `canary`, `tune` and others.
    pub suite: String,
    /// The family, or the list.
    pub class: String,
    /// The problem's name.
    pub problem: String,
    /// Its element type, where the suite says so.
    pub dtype: String,
}

/// What a record says of it.
#[derive(Clone, PartialEq, Debug)]
pub struct Timed {
    /// Its time, where there is one above 0.
    pub us: Option<f64>,
    /// Who computed it, where the record says so.
    pub engines: String,
    /// What was found wrong with it.
    pub trouble: Option<String>,
}

/// The rows of a text. Lines without a problem, such as summaries, are no rows, and neither are those that begin with `#`.
///
/// # Errors
/// The line that is no JSON, with `whose` it is, and a text without a row.
pub fn timed_rows(whose: &str, text: &str) -> Result<BTreeMap<Name, Timed>> {
    let mut rows = BTreeMap::new();
    for (number, line) in lines(text) {
        let value: Value = serde_json::from_str(line).with_context(|| format!("{whose}, line {}", number + 1))?;
        let word = |field: &str| value[field].as_str().unwrap_or_default().to_owned();
        let name = Name { suite: word("suite"), class: word("class"), problem: word("problem"), dtype: word("dtype") };
        if name.problem.is_empty() {
            continue;
        }
        let us = value["us"].as_f64().filter(|us| *us > 0.0);
        let engines = match &value["engines"] {
            Value::Array(engines) => engines.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" + "),
            _ => {
                [value["engine"].as_str().unwrap_or_default().to_owned(), value["knobs"].as_str().unwrap_or_default().to_owned()].join(" ")
            }
        };
        // What a canary found wrong, slowness beside its own baseline aside: that is judged here.
        let differs = value["repeats"].as_bool() == Some(false);
        let words = value["trouble"].as_str().filter(|_| value["wrong"].as_u64() != Some(0) || differs || us.is_none()).map(str::to_owned);
        // Others may count what is wrong and say nothing of it.
        let counted = match &value["wrong"] {
            wrong if wrong.is_null() || wrong.as_f64() == Some(0.0) => differs.then(|| "bits differ from run to run".to_owned()),
            wrong => Some(format!("{wrong} elements wrong")),
        };
        rows.insert(name, Timed { us, engines, trouble: words.or(counted) });
    }
    if rows.is_empty() {
        bail!("{whose} has no rows: a row is a JSON object a line, with `problem` and `us`");
    }
    Ok(rows)
}
