//! Why this engine, and why not those: a survey, or the plan of a graph, as text and as records.
//!
//! ```
//! use verdigris::explain::{ChosenBy, RefusalSummary, describe};
//! use verdigris::{Arch, DType, GemmProblem, Limits, Problem, survey};
//!
//! let problem = Problem::Gemm(GemmProblem::packed(64, 32, 16, DType::F64, DType::F64)?);
//! assert_eq!(describe(&problem), "gemm f64[64×16] f64[16×32] >f64[64×32]");
//! assert_eq!(ChosenBy::Estimate.words(), "by estimate");
//! let survey = survey(&problem, &Arch::h200(), &Limits::default());
//! let refusals: Vec<RefusalSummary> = survey.refusals.iter().map(RefusalSummary::from).collect();
//! assert!(refusals.iter().any(|refusal| (refusal.engine, refusal.reason) == ("gemm.wgmma", "precision")), "{survey}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;

use serde::Serialize;
use verdigris_engines::engine::{Notes, Refusal};
use verdigris_graph::{Access, Key, Problem};

use crate::select::{Ranked, RankedSummary, Survey};
use crate::tune::Measured;

/// The ways in their order, the best first, then every refusal.
impl fmt::Display for Survey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ranked.is_empty() {
            writeln!(f, "no engine takes the problem")?;
        }
        for (place, ranked) in self.ranked.iter().enumerate() {
            writeln!(f, "{:>3}. {ranked}", place + 1)?;
        }
        for refusal in &self.refusals {
            writeln!(f, "  -  {refusal}")?;
        }
        Ok(())
    }
}

/// Engine, knobs, estimate, workspace and notes on one line.
impl fmt::Display for Ranked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let launches = self.program.launches().count();
        let plural = if launches == 1 { "launch" } else { "launches" };
        write!(f, "{} {}: about {:.2} µs, {launches} {plural}", self.engine, self.knobs, self.cost.us)?;
        match self.workspace_bytes() {
            0 => {}
            bytes => write!(f, ", {bytes} bytes of workspace")?,
        }
        write!(f, "; {}", words(&self.notes))
    }
}

/// Notes in words.
fn words(notes: &Notes) -> String {
    let sums = format!("sums in {}{}", notes.accumulator, if notes.reduced_sums { ", fewer bits kept" } else { "" });
    let down_convert = notes.down_convert.map(|dtype| format!("operands rounded to {dtype}"));
    let words = [
        notes.tensor_core.then(|| "tensor cores".to_owned()),
        Some(sums),
        down_convert,
        notes.split_operands.then(|| "operands split".to_owned()),
        (!notes.deterministic).then(|| "not repeatable bit for bit".to_owned()),
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// How a way was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChosenBy {
    /// The least estimate.
    Estimate,
    /// An estimate close to the least, since its kernels are compiled already; those of the least are being compiled for the next time.
    Ready,
    /// The least time, measured now.
    Clock,
    /// The user's plan cache: measured before.
    PlanCache,
    /// The set that ships with the library.
    Shipped,
    /// The caller's word.
    Pin,
}

impl ChosenBy {
    /// In one word, as labels and records have it.
    pub const fn name(self) -> &'static str {
        match self {
            ChosenBy::Estimate => "estimate",
            ChosenBy::Ready => "ready",
            ChosenBy::Clock => "clock",
            ChosenBy::PlanCache => "plan_cache",
            ChosenBy::Shipped => "shipped",
            ChosenBy::Pin => "pin",
        }
    }

    /// In words.
    pub const fn words(self) -> &'static str {
        match self {
            ChosenBy::Estimate => "by estimate",
            ChosenBy::Ready => "by estimate, among those whose kernels are compiled; the best is compiled behind",
            ChosenBy::Clock => "measured now",
            ChosenBy::PlanCache => "from the plan cache",
            ChosenBy::Shipped => "from the set that ships",
            ChosenBy::Pin => "pinned",
        }
    }
}

/// How a graph's plan came to be.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Explanation {
    /// The graph's name.
    pub graph: String,
    /// The device's name.
    pub device: String,
    /// The whole workspace.
    pub workspace_bytes: u64,
    /// What of it the tensors between the parts take.
    pub temporaries_bytes: u64,
    /// The workspace of each set of ways, the chosen first: what the plan can be run with.
    pub ladder_bytes: Vec<u64>,
    /// Its problems, in their order.
    pub parts: Vec<PartExplanation>,
    /// The configs that run where addresses are less aligned than the chosen ones rely on, and the graph declares nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub less_aligned: Vec<String>,
}

/// How one problem's way was chosen.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PartExplanation {
    /// The kind of problem and its operands.
    pub problem: String,
    /// The problem's identity.
    pub key: Key,
    /// How it was chosen.
    pub chosen_by: ChosenBy,
    /// Which of the ways.
    pub chosen: usize,
    /// Every way that was looked at.
    pub ways: Vec<WayExplanation>,
    /// Every engine that has none.
    pub refusals: Vec<RefusalSummary>,
    /// What else there is to know: a remembered choice that was passed over, and why; what is being compiled.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    /// Where candidates were measured now: what it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tuning: Option<TuningSummary>,
}

/// What measuring the candidates took.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct TuningSummary {
    /// Which of the ways would have been chosen at once.
    pub instant: usize,
    /// Until the kernels were loaded.
    pub kernels_ms: f64,
    /// In all.
    pub total_ms: f64,
}

/// One way.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct WayExplanation {
    /// Engine, knobs, notes, estimate, workspace, kernels.
    #[serde(flatten)]
    pub summary: RankedSummary,
    /// Its time, where it was measured, now or before.
    pub measured: Option<Measured>,
    /// Why it could not be made ready or measured.
    pub trouble: Option<String>,
}

/// Why an engine has no way.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RefusalSummary {
    /// The engine.
    pub engine: &'static str,
    /// Why, from the closed list.
    pub reason: &'static str,
    /// What was seen.
    pub seen: String,
    /// The source of the requirement.
    pub place: String,
}

impl From<&Refusal> for RefusalSummary {
    fn from(refusal: &Refusal) -> RefusalSummary {
        RefusalSummary {
            engine: refusal.engine.name,
            reason: refusal.reason.name(),
            seen: refusal.seen.clone(),
            place: format!("{}:{}", refusal.file, refusal.line),
        }
    }
}

/// A problem on one line: its kind and its operands, `>` before what is written.
pub fn describe(problem: &Problem) -> String {
    let mut text = problem.kind().to_owned();
    for operand in problem.buffers().unwrap_or_default() {
        let sign = if operand.access == Access::Written { " >" } else { " " };
        let dims: Vec<String> = operand.layout.dims().iter().map(u64::to_string).collect();
        text.push_str(&format!("{sign}{}[{}]{}", operand.dtype, dims.join("×"), if operand.layout.is_row_major() { "" } else { "ˢ" }));
    }
    text
}

/// A table for each part: the chosen way marked, the others in their order, then the refusals.
impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = if self.parts.len() == 1 { "part" } else { "parts" };
        write!(f, "{} on {}: {} {parts}, {} bytes of workspace", self.graph, self.device, self.parts.len(), self.workspace_bytes)?;
        if self.temporaries_bytes > 0 {
            write!(f, ", {} of them for tensors between parts", self.temporaries_bytes)?;
        }
        match self.ladder_bytes.get(1..) {
            Some(others @ [_, ..]) => writeln!(f, "; also runs with {others:?}")?,
            _ => writeln!(f)?,
        }
        if !self.less_aligned.is_empty() {
            writeln!(f, "for addresses that are less aligned: {}", self.less_aligned.join("; "))?;
        }
        for (number, part) in self.parts.iter().enumerate() {
            writeln!(f, "\npart {number}: {} ({})", part.problem, part.chosen_by.words())?;
            write!(f, "{part}")?;
        }
        Ok(())
    }
}

impl fmt::Display for PartExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["", "engine", "config", "estimate", "measured", "workspace", "notes"].map(str::to_owned);
        let mut rows = vec![head];
        for (place, way) in self.ways.iter().enumerate() {
            let measured = match (&way.trouble, way.measured) {
                (_, Some(measured)) => format!("{:.2} µs", measured.us),
                (Some(_), None) => "not had".to_owned(),
                (None, None) => String::new(),
            };
            rows.push([
                if place == self.chosen { "->".to_owned() } else { String::new() },
                way.summary.engine.to_owned(),
                way.summary.knobs.to_string(),
                format!("{:.2} µs", way.summary.estimate_us),
                measured,
                way.summary.workspace_bytes.to_string(),
                words(&way.summary.notes),
            ]);
        }
        let mut widths = [0; 7];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        for row in &rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
                let gap = " ".repeat(width - cell.chars().count());
                // Numbers stand to the right.
                line.push_str(&if (3..6).contains(&column) { format!("  {gap}{cell}") } else { format!("  {cell}{gap}") });
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        for way in self.ways.iter() {
            if let Some(trouble) = &way.trouble {
                writeln!(f, "  !  {} {}: {trouble}", way.summary.engine, way.summary.knobs)?;
            }
        }
        for remark in &self.remarks {
            writeln!(f, "  *  {remark}")?;
        }
        for refusal in &self.refusals {
            writeln!(f, "  -  {}: {}: {} ({})", refusal.engine, refusal.reason, refusal.seen, refusal.place)?;
        }
        Ok(())
    }
}
