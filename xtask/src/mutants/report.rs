//! What became of the mutants: a table, JSON, and lines for a record.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{Outcome, Verdict};

impl Verdict {
    pub(super) fn word(self) -> &'static str {
        match self {
            Verdict::Killed => "killed",
            Verdict::Elsewhere => "found by another rule",
            Verdict::WithoutLine => "found without a line of the kernel",
            Verdict::DependsOnSeed => "depends on the seed",
            Verdict::Survived => "survived",
            Verdict::NotReached => "not reached",
        }
    }
}

impl Outcome<'_> {
    fn mark(&self) -> &'static str {
        let entry = &self.mutant.entry;
        match (&entry.equivalent, &entry.survives) {
            (Some(_), _) => "no mistake",
            (_, Some(_)) => "known to survive",
            _ => "",
        }
    }

    /// Why it is no mistake, or why nothing finds it.
    fn why(&self) -> Option<&str> {
        let entry = &self.mutant.entry;
        entry.equivalent.as_deref().or(entry.survives.as_deref())
    }

    /// What found it, each kind of evidence once.
    pub(super) fn by(&self) -> BTreeSet<&str> {
        self.said.iter().filter_map(|said| said.found.as_ref()).map(|found| found.by.as_str()).collect()
    }

    fn line(&self) -> &str {
        self.said.iter().find_map(|said| said.found.as_ref()).map_or("", |found| &found.line)
    }

    fn seconds(&self) -> f64 {
        self.said.iter().map(|said| said.seconds).sum()
    }

    /// As a line of a record.
    pub(super) fn json(&self) -> Value {
        let entry = &self.mutant.entry;
        json!({
            "mutant": self.mutant.id, "file": entry.file, "mistake": entry.mistake, "run": self.mutant.run.words(),
            "verdict": self.verdict.word(), "mark": self.mark(), "why": self.why(), "good": self.is_good(), "by": self.by(), "line": self.line(),
            "runs": self.said.len(), "found": self.said.iter().filter(|said| said.found.is_some()).count(),
            "seconds": (self.seconds() * 100.0).round() / 100.0,
        })
    }
}

/// Counts over all outcomes.
pub(super) struct Totals {
    pub(super) mutants: usize,
    /// Mutants that are mistakes, and those of them that are killed.
    pub(super) mistakes: usize,
    pub(super) killed: usize,
    pub(super) bad: usize,
}

impl Totals {
    pub(super) fn of(outcomes: &[Outcome<'_>]) -> Totals {
        let mistakes = outcomes.iter().filter(|outcome| outcome.mutant.entry.equivalent.is_none());
        Totals {
            mutants: outcomes.len(),
            mistakes: mistakes.clone().count(),
            killed: mistakes.filter(|outcome| outcome.verdict == Verdict::Killed).count(),
            bad: outcomes.iter().filter(|outcome| !outcome.is_good()).count(),
        }
    }

    pub(super) fn percent(&self) -> f64 {
        100.0 * self.killed as f64 / self.mistakes.max(1) as f64
    }
}

/// The longest message in a table, in characters.
const MESSAGE: usize = 110;

/// Everything as lines for the terminal.
pub(super) fn table(outcomes: &[Outcome<'_>]) -> String {
    let width = outcomes.iter().map(|outcome| outcome.mutant.id.len()).max().unwrap_or(0);
    let mut lines = vec![format!("{:width$}  {:20} {:>6}  first line", "mutant", "caught by", "s")];
    for outcome in outcomes {
        let by = match outcome.verdict {
            Verdict::Killed => outcome.by().into_iter().collect::<Vec<_>>().join(", "),
            verdict => format!("— {}", verdict.word()),
        };
        let line: String = outcome.line().chars().take(MESSAGE).collect();
        lines.push(format!("{:width$}  {by:20} {:6.1}  {line}", outcome.mutant.id, outcome.seconds()).trim_end().to_owned());
    }
    let others: Vec<&Outcome<'_>> = outcomes.iter().filter(|outcome| outcome.verdict != Verdict::Killed || !outcome.is_good()).collect();
    if !others.is_empty() {
        lines.push(String::new());
        lines.push("not killed, or not as said:".to_owned());
    }
    for outcome in others {
        let entry = &outcome.mutant.entry;
        let why = outcome.why().map_or_else(String::new, |why| format!("; {}: {why}", outcome.mark()));
        let by: Vec<&str> = outcome.by().into_iter().collect();
        let by = if by.is_empty() { String::new() } else { format!(" ({})", by.join(", ")) };
        let judged = if outcome.is_good() { "as said" } else { "WRONG" };
        lines.push(format!(
            "{judged}: {} {}{by}: {} [{}]{why}",
            outcome.mutant.id,
            outcome.verdict.word(),
            entry.mistake,
            outcome.mutant.run.words()
        ));
    }
    lines.join("\n")
}
