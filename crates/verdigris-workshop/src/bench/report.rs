//! What a person reads of a run.

use super::record::{Machine, Row};
use verdigris_cli::say;
use verdigris_cli::table::{self, Align, alarm};

/// Rows that are shown as the worst.
const WORST: usize = 10;

/// The whole table, then what it comes to.
pub(super) fn print(rows: &[Row], machine: &Machine) {
    say!("{}; CUDA {}; {}", machine.machine, machine.driver, machine.versions);
    if let Some(clocks) = &machine.clocks {
        say!("right after the ceilings: {clocks}");
    }
    match machine.gemm_ceiling_tflops {
        Some(tflops) => say!("ceilings of this run: {tflops:.1} TFLOP/s (bf16 8192³), {:.0} GB/s (copy)", machine.copy_gb_per_s),
        None => say!("ceilings of this run: {:.0} GB/s (copy)", machine.copy_gb_per_s),
    }
    say!();
    table(rows);
    say!();
    for row in rows {
        if let Some(remark) = &row.remark {
            let text = format!("{} {}: {remark}", row.dtype, row.problem);
            say!("{}", if row.wrong { alarm(&text) } else { text });
        }
    }
    summary(rows);
}

/// A line a row.
pub(super) fn table(rows: &[Row]) {
    use Align::{Left, Right};
    let head = [
        ("problem", Left),
        ("dtype", Left),
        ("ours µs", Right),
        ("TFLOP/s", Right),
        ("GB/s", Right),
        ("ceiling", Right),
        ("peer µs", Right),
        ("ratio", Right),
        ("spread", Right),
        ("error", Right),
        ("engine and knobs", Left),
    ];
    let cells = |row: &Row| {
        let number = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |value| format!("{value:.digits$}"));
        let percent = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{:.1}%", 100.0 * value));
        let knobs = row.knobs.as_ref().map(ToString::to_string).unwrap_or_default();
        vec![
            row.problem.clone(),
            row.dtype.clone(),
            number(row.us, 2),
            number(row.tflops, 1),
            number(row.gb_per_s, 0),
            percent(row.of_ceiling),
            number(row.peer_us, 2),
            number(row.ratio, 3),
            percent(row.spread),
            if row.wrong { "WRONG".to_owned() } else { row.error.map_or("-".to_owned(), |error| format!("{error:.1e}")) },
            row.engine.map_or("-".to_owned(), |engine| format!("{engine} {knobs}")),
        ]
    };
    table::print(&head, &rows.iter().map(cells).collect::<Vec<_>>());
    for row in rows.iter().filter(|row| !row.variants.is_empty()) {
        say!("\n{} {}: every setting", row.dtype, row.problem);
        let head = [("µs", Right), ("estimate", Right), ("engine and knobs", Left), ("", Left)];
        let cells = row.variants.iter().map(|variant| {
            vec![
                variant.us.map_or("-".to_owned(), |us| format!("{us:.2}")),
                format!("{:.2}", variant.estimate_us),
                format!("{} {}", variant.engine, variant.knobs),
                variant.remark.clone().unwrap_or_default(),
            ]
        });
        table::print(&head, &cells.collect::<Vec<_>>());
    }
}

/// Geometric means, wins and losses, and the worst rows: for all, and for each class and type.
fn summary(rows: &[Row]) {
    let mut groups: Vec<(String, String)> = Vec::new();
    for row in rows {
        let group = (row.class.clone(), row.dtype.clone());
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    use Align::{Left, Right};
    let head =
        [("class", Left), ("dtype", Left), ("compared", Right), ("geomean", Right), ("ahead", Right), ("behind", Right), ("worst", Right)];
    let mut lines: Vec<Vec<String>> = Vec::new();
    let mut add = |class: &str, dtype: &str, ratios: &[f64]| {
        if let Some(totals) = Totals::of(ratios) {
            lines.push(vec![
                class.to_owned(),
                dtype.to_owned(),
                ratios.len().to_string(),
                format!("{:.3}", totals.geometric_mean),
                totals.ahead.to_string(),
                totals.behind.to_string(),
                format!("{:.3}", totals.worst),
            ]);
        }
    };
    for (class, dtype) in &groups {
        let ratios: Vec<f64> = rows.iter().filter(|row| row.class == *class && row.dtype == *dtype).filter_map(|row| row.ratio).collect();
        add(class, dtype, &ratios);
    }
    let mut dtypes: Vec<&String> = groups.iter().map(|(_, dtype)| dtype).collect();
    dtypes.sort();
    dtypes.dedup();
    for dtype in dtypes {
        add("all", dtype, &rows.iter().filter(|row| row.dtype == *dtype).filter_map(|row| row.ratio).collect::<Vec<_>>());
    }
    add("all", "all", &rows.iter().filter_map(|row| row.ratio).collect::<Vec<_>>());
    if !lines.is_empty() {
        say!("ratio: the peer's time over ours; above 1 we are ahead");
        table::print(&head, &lines);
    }
    let mut compared: Vec<&Row> = rows.iter().filter(|row| row.ratio.is_some()).collect();
    if compared.len() > WORST {
        compared.sort_by(|a, b| a.ratio.unwrap_or(0.0).total_cmp(&b.ratio.unwrap_or(0.0)));
        say!("\nthe {WORST} worst");
        table(&compared.into_iter().take(WORST).map(|row| Row { variants: Vec::new(), ..row.clone() }).collect::<Vec<_>>());
    }
}

/// What a set of ratios comes to.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Totals {
    geometric_mean: f64,
    ahead: usize,
    behind: usize,
    worst: f64,
}

impl Totals {
    fn of(ratios: &[f64]) -> Option<Totals> {
        if ratios.is_empty() {
            return None;
        }
        Some(Totals {
            geometric_mean: (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp(),
            ahead: ratios.iter().filter(|&&ratio| ratio >= 1.0).count(),
            behind: ratios.iter().filter(|&&ratio| ratio < 1.0).count(),
            worst: ratios.iter().copied().fold(f64::INFINITY, f64::min),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_geometric() {
        let totals = Totals::of(&[0.5, 2.0, 1.0]).expect("three ratios");
        assert!((totals.geometric_mean - 1.0).abs() < 1e-12);
        assert_eq!((totals.ahead, totals.behind, totals.worst), (2, 1, 0.5));
        assert_eq!(Totals::of(&[]), None);
    }
}
