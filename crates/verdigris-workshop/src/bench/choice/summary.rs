//! How near the choice at once comes to the fastest config that was measured.

use std::collections::BTreeMap;

use serde::Serialize;

use verdigris_cli::say;
use verdigris_cli::table::{self, Align};

/// Within this of the best counts as near.
const NEAR: f64 = 1.15;
/// Beyond this of the best is not allowed.
const FAR: f64 = 1.5;
/// So many of the worst are told.
const WORST: usize = 10;

/// One problem's outcome.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Outcome {
    pub(super) kind: &'static str,
    pub(super) dtype: &'static str,
    pub(super) words: String,
    /// Whose config is taken at once.
    pub(super) engine: &'static str,
    /// Whose config is the fastest.
    pub(super) best_engine: &'static str,
    /// Time of the choice at once over the least: at least 1.
    pub(super) ratio: f64,
}

/// Figures of a set of problems.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(super) struct Nearness {
    pub(super) problems: usize,
    pub(super) geometric_mean: f64,
    /// Part of the problems whose ratio is at most 1.15.
    pub(super) within_15_percent: f64,
    /// Problems whose ratio is above 1.5.
    pub(super) beyond_1_5: usize,
    pub(super) worst: f64,
}

impl Nearness {
    /// Of the ratios; `None` of none.
    fn of(ratios: &[f64]) -> Option<Nearness> {
        let worst = ratios.iter().copied().reduce(f64::max)?;
        let count = ratios.len() as f64;
        Some(Nearness {
            problems: ratios.len(),
            geometric_mean: (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / count).exp(),
            within_15_percent: ratios.iter().filter(|ratio| **ratio <= NEAR).count() as f64 / count,
            beyond_1_5: ratios.iter().filter(|ratio| **ratio > FAR).count(),
            worst,
        })
    }
}

/// Figures of a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Summary {
    pub(super) all: Option<Nearness>,
    pub(super) by_kind: BTreeMap<String, Nearness>,
    pub(super) by_dtype: BTreeMap<String, Nearness>,
    /// By the engine that is taken at once.
    pub(super) by_engine: BTreeMap<String, Nearness>,
    /// The furthest from the best, the worst first.
    pub(super) worst: Vec<Outcome>,
    /// Problems that no engine takes, that have no measured choice, and that no time was left for.
    pub(super) not_taken: usize,
    pub(super) not_measured: usize,
    pub(super) not_reached: usize,
    /// Choices at once that left their output as it was.
    pub(super) unwritten: usize,
}

impl Summary {
    pub(super) fn of(outcomes: &[Outcome]) -> Summary {
        let by = |name: fn(&Outcome) -> String| {
            let mut ratios: BTreeMap<String, Vec<f64>> = BTreeMap::new();
            for outcome in outcomes {
                ratios.entry(name(outcome)).or_default().push(outcome.ratio);
            }
            ratios.into_iter().filter_map(|(name, ratios)| Some((name, Nearness::of(&ratios)?))).collect()
        };
        let mut worst = outcomes.to_vec();
        worst.sort_by(|a, b| b.ratio.total_cmp(&a.ratio));
        worst.truncate(WORST);
        Summary {
            all: Nearness::of(&outcomes.iter().map(|outcome| outcome.ratio).collect::<Vec<_>>()),
            by_kind: by(|outcome| outcome.kind.to_owned()),
            by_dtype: by(|outcome| outcome.dtype.to_owned()),
            by_engine: by(|outcome| outcome.engine.to_owned()),
            worst,
            not_taken: 0,
            not_measured: 0,
            not_reached: 0,
            unwritten: 0,
        }
    }

    pub(super) fn print(&self) {
        let head = [
            ("problems", Align::Left),
            ("count", Align::Right),
            ("mean", Align::Right),
            ("within 15 %", Align::Right),
            ("beyond 1.5", Align::Right),
            ("worst", Align::Right),
        ];
        let row = |name: String, near: &Nearness| {
            vec![
                name,
                near.problems.to_string(),
                format!("{:.3}", near.geometric_mean),
                format!("{:.1} %", 100.0 * near.within_15_percent),
                near.beyond_1_5.to_string(),
                format!("{:.2}", near.worst),
            ]
        };
        let mut rows: Vec<Vec<String>> = self.all.iter().map(|all| row("all".to_owned(), all)).collect();
        for group in [&self.by_kind, &self.by_dtype, &self.by_engine] {
            rows.extend(group.iter().map(|(name, near)| row(name.clone(), near)));
        }
        say!("time of the choice at once over that of the fastest config");
        table::print(&head, &rows);
        say!();
        let head = [("ratio", Align::Right), ("at once", Align::Left), ("best", Align::Left), ("problem", Align::Left)];
        let worst = self.worst.iter();
        let rows: Vec<Vec<String>> = worst
            .map(|one| vec![format!("{:.2}", one.ratio), one.engine.to_owned(), one.best_engine.to_owned(), one.words.clone()])
            .collect();
        table::print(&head, &rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(kind: &'static str, engine: &'static str, ratio: f64) -> Outcome {
        Outcome { kind, dtype: "bf16", words: format!("{kind} {ratio}"), engine, best_engine: "best", ratio }
    }

    #[test]
    fn figures_of_planted_ratios() {
        let outcomes = [
            outcome("product", "a", 1.0),
            outcome("product", "a", 4.0),
            outcome("convolution", "b", 1.15),
            outcome("convolution", "b", 1.5),
            outcome("convolution", "b", 1.151),
        ];
        let summary = Summary::of(&outcomes);
        let product = summary.by_kind["product"];
        assert!((product.geometric_mean - 2.0).abs() < 1e-12);
        assert_eq!((product.problems, product.within_15_percent, product.beyond_1_5, product.worst), (2, 0.5, 1, 4.0));
        let convolution = summary.by_engine["b"];
        assert!((convolution.geometric_mean - (1.15_f64 * 1.5 * 1.151).cbrt()).abs() < 1e-12);
        assert_eq!((convolution.problems, convolution.beyond_1_5, convolution.worst), (3, 0, 1.5), "1.5 itself is allowed");
        assert!((convolution.within_15_percent - 1.0 / 3.0).abs() < 1e-12, "1.15 itself is near");
        assert_eq!(summary.all.map(|all| (all.problems, all.beyond_1_5)), Some((5, 1)));
        let worst: Vec<f64> = summary.worst.iter().map(|one| one.ratio).collect();
        assert_eq!(worst, [4.0, 1.5, 1.151, 1.15, 1.0]);
    }

    #[test]
    fn the_worst_are_ten_and_nothing_has_no_figures() {
        let many: Vec<Outcome> = (0..30).map(|i| outcome("product", "a", 1.0 + f64::from(i) / 100.0)).collect();
        let summary = Summary::of(&many);
        assert_eq!((summary.worst.len(), summary.worst[0].ratio), (WORST, 1.29));
        let none = Summary::of(&[]);
        assert_eq!((none.all, none.by_kind.len(), none.worst.len()), (None, 0, 0));
    }
}
