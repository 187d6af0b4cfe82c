//! `mutants`: mistakes of the kind that experts make, planted one by one, and whether what is to find them does.
//!
//! A mutant is a row of a list under `mutants/`: a text of a source, the wrong text in its place, and the narrowest run that is to find the
//! mistake. All of them are planted into a copy of the sources below `target/mutants`, each behind a switch, and built at once; a process of its
//! own runs each mutant with its switch on. What the copy finds with no mutant on would make the rest worthless, so that is asked first.
//!
//! A mutant counts as *killed* if each of its runs finds it, under each seed asked for (three) where what runs depends on one, by evidence of the kind that
//! its row names, and on a line of the kernel where that is a rule that has one. What only some seeds find survives, and so does what is found by a rule that
//! the row does not name.

mod build;
mod journal;
mod judge;
mod list;
mod plant;
mod report;
mod review;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::tree::Tree;
use build::Programs;
use journal::Journal;
use judge::{Found, Said};
use list::{List, Mutant, Run};
use report::Totals;

/// Options of `mutants`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only mutants whose `FILE/NAME` contains this.
    #[arg(default_value = "")]
    filter: String,
    /// Only so many of them, drawn by the seed; none that unit tests of the engines or of a program are to find, for which that crate is compiled once more.
    #[arg(long)]
    sample: Option<usize>,
    /// Draws the sample of that day, `YYYY-MM-DD`; default today (UTC).
    #[arg(long, value_parser = crate::day::number_of)]
    day: Option<u64>,
    /// Draws the sample; default the number of the day, counted from 1970-01-01.
    #[arg(long, conflicts_with = "day")]
    seed: Option<u64>,
    /// The first of the seeds under which mutants run.
    #[arg(long, default_value_t = 1)]
    first_seed: u64,
    /// Seeds under which a run that depends on one has to find a mutant.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Processes at a time; as many as there are cores by default.
    #[arg(long)]
    jobs: Option<usize>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    /// Write what became of each mutant there, a line each.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Only check that every mutant has its place in the sources.
    #[arg(long)]
    places: bool,
    /// Only plant and build, and note below `target/mutants` what was built, for runs with `--built`.
    #[arg(long, conflicts_with_all = ["places", "built"])]
    build_only: bool,
    /// Run what `--build-only` has built of these sources: for a machine with more processors than this one, which needs no compiler.
    #[arg(long)]
    built: bool,
    /// Remembers what each run said, and goes on from there: what was cut off can be finished.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
}

/// What became of a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Killed,
    /// Found in each run, but not by what its row names.
    Elsewhere,
    /// Found by a rule that names no line of the kernel.
    WithoutLine,
    DependsOnSeed,
    Survived,
    /// No run came to the mutant's text.
    NotReached,
}

/// A mutant and what its runs said.
struct Outcome<'m> {
    mutant: &'m Mutant,
    said: Vec<Said>,
    verdict: Verdict,
}

impl<'m> Outcome<'m> {
    fn new(mutant: &'m Mutant, said: Vec<Said>) -> Self {
        let found = said.iter().filter(|said| said.found.is_some()).count();
        let named = |said: &Said| said.found.as_ref().is_some_and(|found| mutant.entry.expect.contains(&found.by));
        let verdict = match found {
            0 if said.iter().all(|said| !said.reached) => Verdict::NotReached,
            0 => Verdict::Survived,
            _ if found < said.len() => Verdict::DependsOnSeed,
            _ if said.iter().all(named) && !said.iter().all(|said| said.found.as_ref().is_some_and(Found::is_placed)) => {
                Verdict::WithoutLine
            }
            _ if said.iter().all(named) => Verdict::Killed,
            _ => Verdict::Elsewhere,
        };
        Outcome { mutant, said, verdict }
    }

    /// Whether it is as its row says. A mark that is out of date is as wrong as a mutant that survives.
    fn is_good(&self) -> bool {
        let entry = &self.mutant.entry;
        match (entry.equivalent.is_some(), entry.survives.is_some()) {
            (true, _) => self.verdict == Verdict::Survived,
            (_, true) => matches!(self.verdict, Verdict::Survived | Verdict::DependsOnSeed | Verdict::NotReached),
            _ => self.verdict == Verdict::Killed,
        }
    }
}

/// What is wrong with the lists, or with the places of mutants, and which mistakes of the review have no row: what `tidy` asks. Each with the path that it is about.
pub(crate) fn stale(tree: &Tree) -> Vec<(String, String)> {
    let list = match List::read(tree) {
        Ok(list) => list,
        Err(error) => return vec![(list::FOLDER.to_owned(), format!("{error:#}"))],
    };
    let mut found: Vec<(String, String)> = (list.mutants.iter())
        .filter_map(|mutant| plant::place(tree, mutant).err().map(|error| (mutant.entry.file.clone(), format!("{error:#}"))))
        .collect();
    if tree.text(review::LIST).is_some() {
        found.extend(review::missing(&list).into_iter().map(|message| (list::FOLDER.to_owned(), message)));
    }
    if found.is_empty() && !list.mutants.is_empty() {
        found.extend(plant::all(tree, &list).err().map(|error| (list::FOLDER.to_owned(), format!("{error:#}"))));
    }
    found
}

/// Plants, builds and runs; `false` if a mutant is not as its row says.
///
/// # Errors
/// Lists that do not fit the sources, a copy that does not build, or one that fails with no mutant on.
pub(crate) fn run(root: &Path, arguments: &Arguments) -> Result<bool> {
    let tree = Tree::read(root)?;
    let list = List::read(&tree)?;
    let stale = stale(&tree);
    if !stale.is_empty() {
        bail!("{}", stale.into_iter().map(|(_, message)| message).collect::<Vec<_>>().join("\n"));
    }
    if arguments.places {
        println!("mutants: {} have their places", list.mutants.len());
        return Ok(true);
    }
    let seed = arguments.seed.or(arguments.day).unwrap_or_else(crate::day::today);
    let selected = select(&list, &arguments.filter, arguments.sample, seed);
    ensure!(!selected.is_empty(), "no mutant has `{}` in its name", arguments.filter);
    if !arguments.json {
        let drawn = match arguments.sample {
            Some(_) => format!(", drawn by --day {} (--seed {seed})", crate::day::name_of(seed)),
            None => String::new(),
        };
        println!("mutants: {} of {}{drawn}", selected.len(), list.mutants.len());
    }
    let programs = match arguments.built {
        true => build::noted(root, &tree, &list)?,
        false => build::programs(root, &tree, &list, &selected)?,
    };
    if !arguments.json {
        println!("mutants: built in {:.0} s", programs.build_seconds);
    }
    if arguments.build_only {
        println!("mutants: {}", build::note(root, &tree, &list, &programs)?.display());
        return Ok(true);
    }
    let begun = Instant::now();
    let jobs = arguments.jobs.unwrap_or_else(crate::cores).max(1);
    let seeds = arguments.first_seed..arguments.first_seed.saturating_add(arguments.seeds);
    let journal = match &arguments.resume {
        Some(path) => Journal::open(path, build::digest(&tree, &list)?)?,
        None => Journal::default(),
    };
    let clean = baseline(&programs, &journal, &selected, seeds.clone(), jobs)?;
    let asked: Vec<(&Run, u64, u64)> =
        selected.iter().flat_map(|one| seeds_of(&one.run, seeds.clone()).map(|seed| (&one.run, seed, one.number))).collect();
    let mut said = all(&programs, &journal, &asked, jobs)?.into_iter();
    let outcomes: Vec<Outcome<'_>> =
        (selected.iter()).map(|one| Outcome::new(one, said.by_ref().take(seeds_of(&one.run, seeds.clone()).count()).collect())).collect();
    tell(arguments, &outcomes, clean, seed, &programs, begun.elapsed().as_secs_f64())
}

/// Prints what became of the mutants, and writes the record.
fn tell(arguments: &Arguments, outcomes: &[Outcome<'_>], clean: usize, seed: u64, programs: &Programs, seconds: f64) -> Result<bool> {
    let totals = Totals::of(outcomes);
    let head = json!({
        "command": "mutants", "seed": seed, "first_seed": arguments.first_seed, "seeds": arguments.seeds, "mutants": totals.mutants, "mistakes": totals.mistakes,
        "killed": totals.killed, "killed_percent": (totals.percent() * 10.0).round() / 10.0, "wrong": totals.bad, "clean_runs": clean,
        "build_seconds": programs.build_seconds.round(), "seconds": seconds.round(), "source": verdigris_engines::SOURCE_HASH,
    });
    let lines: Vec<String> = std::iter::once(head.to_string()).chain(outcomes.iter().map(|outcome| outcome.json().to_string())).collect();
    if let Some(path) = &arguments.record {
        std::fs::write(path, lines.join("\n") + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    if arguments.json {
        println!("{}", lines.join("\n"));
    } else {
        println!("{}", report::table(outcomes));
        println!(
            "mutants: {} mistakes, {} killed ({:.1} %), {} not as their rows say; {clean} clean runs; {seconds:.0} s",
            totals.mistakes,
            totals.killed,
            totals.percent(),
            totals.bad
        );
    }
    Ok(totals.bad == 0)
}

/// The mutants that the filter names; of them as many as asked for, in an order that the seed chooses.
fn select<'l>(list: &'l List, filter: &str, sample: Option<usize>, seed: u64) -> Vec<&'l Mutant> {
    let mut chosen: Vec<&Mutant> = list.mutants.iter().filter(|mutant| mutant.id.contains(filter)).collect();
    if let Some(count) = sample {
        chosen.retain(|mutant| !mutant.run.compiles_much_again());
        chosen.sort_by_cached_key(|mutant| *blake3::hash(format!("{seed} {}", mutant.id).as_bytes()).as_bytes());
        chosen.truncate(count);
        chosen.sort_by(|one, other| one.id.cmp(&other.id));
    }
    chosen
}

fn seeds_of(run: &Run, seeds: std::ops::Range<u64>) -> std::ops::Range<u64> {
    if run.has_seed() { seeds } else { 0..1 }
}

/// Runs everything with no mutant on; how many runs there were.
///
/// # Errors
/// A run that finds something, or runs nothing.
fn baseline(programs: &Programs, journal: &Journal, selected: &[&Mutant], seeds: std::ops::Range<u64>, jobs: usize) -> Result<usize> {
    let runs: BTreeMap<&Run, &str> = selected.iter().map(|one| (&one.run, one.id.as_str())).collect();
    let asked: BTreeSet<(&Run, u64, u64)> = runs.keys().flat_map(|run| seeds_of(run, seeds.clone()).map(|seed| (*run, seed, 0))).collect();
    let asked: Vec<(&Run, u64, u64)> = asked.into_iter().collect();
    let said = all(programs, journal, &asked, jobs)?;
    let mut wrong = Vec::new();
    for ((run, seed, _), said) in asked.iter().zip(&said) {
        let name = format!("{}, seed {seed}, for {}", run.words(), runs.get(run).copied().unwrap_or_default());
        match &said.found {
            Some(found) => wrong.push(format!("{name}: {} {}", found.by, found.line)),
            None if said.ran == 0 => wrong.push(format!("{name}: runs nothing")),
            None => {}
        }
    }
    ensure!(wrong.is_empty(), "with no mutant on, the copy of the sources fails:\n{}", wrong.join("\n"));
    Ok(asked.len())
}

/// Runs all that is asked, so many at a time; what each said, in their order.
fn all(programs: &Programs, journal: &Journal, asked: &[(&Run, u64, u64)], jobs: usize) -> Result<Vec<Said>> {
    let progress = ProgressBar::new(asked.len() as u64);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} runs {elapsed} eta {eta}");
    progress.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let next = AtomicUsize::new(0);
    let results: Mutex<BTreeMap<usize, Result<Said>>> = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some((run, seed, number)) = asked.get(index) else { return };
                    let said = journal.said(run, *seed, *number).map_or_else(
                        || {
                            let said = judge::run(programs, run, *seed, *number)?;
                            journal.keep(run, *seed, *number, &said)?;
                            Ok(said)
                        },
                        Ok,
                    );
                    if let Ok(mut results) = results.lock() {
                        results.insert(index, said);
                    }
                    progress.inc(1);
                }
            });
        }
    });
    progress.finish_and_clear();
    let results = results.into_inner().map_err(|_| anyhow::anyhow!("a run of a mutant panicked"))?;
    results.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::judge::Place;
    use super::*;

    fn mutant(mark: &str) -> Mutant {
        let text = format!(
            "[[mutant]]\nname = \"m\"\nfile = \"crates/verdigris-kir/src/a.rs\"\nfind = \"1\"\nreplace = \"2\"\nmistake = \"two\"\n\
             expect = [\"race\"]\n{mark}run = {{ verify = \"x\" }}\n"
        );
        List::read(&Tree::of(&[("mutants/f.toml", &text)])).expect("reads").mutants.remove(0)
    }

    fn said(by: Option<&str>, reached: bool) -> Said {
        let found = by.map(|by| Found { by: by.to_owned(), line: "kernel.rs:1:1".to_owned(), place: Place::Kernel });
        Said { found, reached, ran: 1, seconds: 0.5 }
    }

    #[test]
    fn a_mutant_is_killed_by_every_seed_and_the_named_rule_alone() {
        let plain = mutant("");
        let verdict = |said: Vec<Said>| Outcome::new(&plain, said).verdict;
        let race = || said(Some("race"), true);
        assert_eq!(verdict(vec![race(), race(), race()]), Verdict::Killed);
        assert_eq!(verdict(vec![race(), said(None, true), race()]), Verdict::DependsOnSeed);
        assert_eq!(verdict(vec![race(), said(Some("numbers"), true), race()]), Verdict::Elsewhere);
        assert_eq!(verdict(vec![said(None, true), said(None, false)]), Verdict::Survived);
        assert_eq!(verdict(vec![said(None, false)]), Verdict::NotReached);
        let mut lineless = race();
        lineless.found = lineless.found.map(|found| Found { place: Place::Nowhere, ..found });
        assert_eq!(verdict(vec![race(), lineless]), Verdict::WithoutLine);
    }

    #[test]
    fn marks_that_are_out_of_date_are_wrong() {
        let is_good = |mark: &str, said: Said| Outcome::new(&mutant(mark), vec![said]).is_good();
        let (killed, survived, unreached) = (said(Some("race"), true), said(None, true), said(None, false));
        assert!(is_good("", killed.clone()) && !is_good("", survived.clone()) && !is_good("", unreached.clone()));
        let survives = "survives = \"no case\"\n";
        assert!(!is_good(survives, killed.clone()) && is_good(survives, survived.clone()));
        let equivalent = "equivalent = \"the same\"\n";
        assert!(!is_good(equivalent, killed) && is_good(equivalent, survived) && !is_good(equivalent, unreached));
    }

    #[test]
    fn samples_are_drawn_by_the_seed() {
        let one = mutant("");
        let mutants = (0..50).map(|number| Mutant { id: format!("f/{number:02}"), ..one.clone() }).collect();
        let list = List { mutants, ..List::default() };
        let ids = |seed| select(&list, "", Some(10), seed).iter().map(|one| one.id.clone()).collect::<Vec<_>>();
        assert_eq!(ids(1).len(), 10);
        assert_eq!(ids(1), ids(1));
        assert_ne!(ids(1), ids(2));
        assert!(ids(3).is_sorted());
        assert_eq!(select(&list, "f/1", None, 1).len(), 10);
        let of = |test: &str| Run { package: Some("verdigris-engines".to_owned()), test: Some(test.to_owned()), ..Run::default() };
        let mutants = ["lib", "gemm"].map(|test| Mutant { run: of(test), ..one.clone() });
        let list = List { mutants: mutants.into(), ..List::default() };
        assert_eq!((select(&list, "", None, 1).len(), select(&list, "", Some(10), 1).len()), (2, 1));
    }

    #[test]
    fn stale_mutants_are_told_with_their_file() {
        let text = "[[mutant]]\nname = \"m\"\nfile = \"crates/verdigris-kir/src/a.rs\"\nfind = \"one()\"\nreplace = \"two()\"\nmistake = \"two\"\n\
                    expect = [\"race\"]\nrun = { verify = \"x\" }\n";
        let tree = |source: &str| {
            let files = [("mutants/f.toml", text), ("crates/verdigris-kir/src/a.rs", source), ("crates/verdigris-kir/src/lib.rs", "")];
            stale(&Tree::of(&files))
        };
        assert!(tree("one();").is_empty());
        let found = tree("three();");
        assert!(found[0].0 == "crates/verdigris-kir/src/a.rs" && found[0].1.contains("mutant f/m: this stands 0 times"), "{found:?}");
    }
}
