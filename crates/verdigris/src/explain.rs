//! Why this engine, and why not those: a survey as text.

use std::fmt;

use crate::select::{Ranked, Survey};

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
        let notes = &self.notes;
        let sums = format!("sums in {}{}", notes.accumulator, if notes.reduced_sums { ", fewer bits kept" } else { "" });
        let down_convert = notes.down_convert.map(|dtype| format!("operands rounded to {dtype}"));
        let words = [
            notes.tensor_core.then(|| "tensor cores".to_owned()),
            Some(sums),
            down_convert,
            notes.split_operands.then(|| "operands split".to_owned()),
            (!notes.deterministic).then(|| "not repeatable bit for bit".to_owned()),
        ];
        write!(f, "; {}", words.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}
