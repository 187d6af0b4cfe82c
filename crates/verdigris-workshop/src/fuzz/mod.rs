//! `workshop fuzz`: what is read from files and clients, with bytes that nobody would write.
//!
//! Inputs are made from those of `corpora/` and from what the program's own writers write, by changes drawn at random under a seed ([`mutate`]); where a format
//! has hashes, they are put right, so that what lies behind them is reached. What a reader takes joins the inputs. A reader that panics, or computes for more than a
//! second, is a finding; its input is written into a folder, and belongs into the corpus once the reader is mended.

mod formats;
mod mutate;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use verdigris_reference::data::Random;

use self::formats::{FORMATS, Format};
use verdigris_cli::table::{self, Align, alarm};
use verdigris_cli::{Verdict, say};

/// An input that takes a reader this long is a finding.
const SLOW: Duration = Duration::from_secs(1);
/// Inputs that were taken and are changed further.
const MOST_TAKEN: usize = 512;
/// Findings of one format, after which it ends.
const MOST_FINDINGS: usize = 10;

/// Options of `fuzz`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only these formats; all, if none is named.
    formats: Vec<String>,
    /// How long each.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Other inputs for another number.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where inputs are written that find something.
    #[arg(long, value_name = "FOLDER", default_value = "fuzz-findings")]
    out: PathBuf,
    /// Print a JSON object a format.
    #[arg(long)]
    json: bool,
}

/// What came of one format.
#[derive(Debug, Default, Serialize)]
struct Outcome {
    format: &'static str,
    seed: u64,
    executions: u64,
    /// Inputs that the reader took.
    taken: u64,
    seconds: f64,
    slowest_ms: f64,
    findings: Vec<Finding>,
}

/// An input that a reader does not stand.
#[derive(Debug, Serialize)]
struct Finding {
    /// What it did.
    what: String,
    #[serde(skip)]
    input: Vec<u8>,
}

/// Carries out `fuzz`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let known: Vec<&str> = FORMATS.iter().map(|format| format.name).collect();
    if let Some(unknown) = arguments.formats.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("no format `{unknown}`; there are {}", known.join(", "));
    }
    let chosen = FORMATS.iter().filter(|format| arguments.formats.is_empty() || arguments.formats.iter().any(|name| name == format.name));
    let mut outcomes = Vec::new();
    // What panics is told below.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    for format in chosen {
        let outcome = fuzz(format, arguments.seed, Duration::from_secs(arguments.seconds))?;
        for (number, finding) in outcome.findings.iter().enumerate() {
            std::fs::create_dir_all(&arguments.out).with_context(|| format!("making {}", arguments.out.display()))?;
            let path = arguments.out.join(format!("{}-{}-{number}", format.name, arguments.seed));
            std::fs::write(&path, &finding.input).with_context(|| format!("writing {}", path.display()))?;
            eprintln!("{}: {}; the input is {}", format.name, finding.what, path.display());
        }
        if arguments.json {
            say!("{}", serde_json::to_string(&outcome)?);
        }
        outcomes.push((format, outcome));
    }
    std::panic::set_hook(hook);
    if !arguments.json {
        print(&outcomes);
    }
    Ok(if outcomes.iter().all(|(_, outcome)| outcome.findings.is_empty()) { Verdict::Good } else { Verdict::Bad })
}

fn print(outcomes: &[(&Format, Outcome)]) {
    let row = |(format, outcome): &(&Format, Outcome)| {
        vec![
            format.name.to_owned(),
            format.what.to_owned(),
            format!("{:.0}", outcome.seconds),
            outcome.executions.to_string(),
            outcome.taken.to_string(),
            format!("{:.1}", outcome.slowest_ms),
            if outcome.findings.is_empty() { "none".to_owned() } else { alarm(&outcome.findings.len().to_string()) },
        ]
    };
    let head = [
        ("format", Align::Left),
        ("what", Align::Left),
        ("seconds", Align::Right),
        ("executions", Align::Right),
        ("taken", Align::Right),
        ("slowest ms", Align::Right),
        ("findings", Align::Right),
    ];
    table::print(&head, &outcomes.iter().map(row).collect::<Vec<_>>());
}

/// Reads inputs for so long.
fn fuzz(format: &Format, seed: u64, time: Duration) -> Result<Outcome> {
    let folder = tempfile::tempdir().context("a folder for the files that are read")?;
    let mut random = Random::new(seed);
    let mut inputs: Vec<Vec<u8>> = format.corpus.iter().chain(format.refused).map(|bytes| bytes.to_vec()).chain((format.more)()).collect();
    let first = inputs.len();
    let mut outcome = Outcome { format: format.name, seed, ..Outcome::default() };
    let begun = Instant::now();
    // As they are, once, and then changed.
    for input in inputs.clone() {
        examine(format, folder.path(), input, &mut outcome);
    }
    while begun.elapsed() < time && outcome.findings.len() < MOST_FINDINGS {
        let mut input = mutate::mutate(&mut random, &inputs);
        // Now and then with hashes that are wrong.
        if random.below(8) > 0 {
            (format.mend)(&mut input);
        }
        let is_small = input.len() < 1 << 13;
        if examine(format, folder.path(), input.clone(), &mut outcome) && is_small && random.below(16) == 0 {
            if inputs.len() - first < MOST_TAKEN {
                inputs.push(input);
            } else {
                let place = first + random.below(MOST_TAKEN as u64) as usize;
                inputs[place] = input;
            }
        }
    }
    outcome.seconds = begun.elapsed().as_secs_f64();
    Ok(outcome)
}

/// Reads one input: whether it was taken.
fn examine(format: &Format, folder: &Path, input: Vec<u8>, outcome: &mut Outcome) -> bool {
    let begun = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(|| (format.read)(folder, &input)));
    let mut took = begun.elapsed();
    if result.is_ok() && took > SLOW {
        // Other programs may have had the processor meanwhile: what it is asked again is how long it computes.
        took = took.min(computed(|| (format.read)(folder, &input)));
    }
    outcome.executions += 1;
    outcome.slowest_ms = outcome.slowest_ms.max(took.as_secs_f64() * 1e3);
    let is_taken = *result.as_ref().unwrap_or(&false);
    outcome.taken += u64::from(is_taken);
    let what = match &result {
        Err(panic) => Some(format!("it panics: {}", words(panic.as_ref()))),
        Ok(_) if took > SLOW => Some(format!("it takes {:.1} s", took.as_secs_f64())),
        Ok(_) => None,
    };
    // One of each kind is enough.
    if let Some(what) = what.filter(|what| outcome.findings.iter().all(|known| known.what != *what)) {
        outcome.findings.push(Finding { what, input });
    }
    is_taken
}

/// How long this thread computes at something; where the system does not tell, how long it takes.
fn computed<R>(work: impl FnOnce() -> R) -> Duration {
    // Nanoseconds on a processor, nanoseconds of waiting for one, and turns.
    let ran = || {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
    };
    let (begun, before) = (Instant::now(), ran());
    work();
    before.zip(ran()).map_or_else(|| begun.elapsed(), |(before, after)| after.saturating_sub(before))
}

fn words(panic: &(dyn Any + Send)) -> &str {
    panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without words")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn waiting_is_not_computing() {
        let waited = computed(|| std::thread::sleep(Duration::from_millis(200)));
        assert!(waited < Duration::from_millis(100), "{waited:?}");
        let busy = computed(|| {
            let begun = Instant::now();
            let mut turns = 0u64;
            while begun.elapsed() < Duration::from_millis(50) || turns < 1000 {
                turns = std::hint::black_box(turns + 1);
            }
        });
        assert!(busy > Duration::ZERO, "{busy:?}");
    }

    /// A third of a second each; `workshop fuzz --seconds 600` is the longer run.
    #[test]
    fn no_reader_panics() {
        for format in FORMATS {
            let outcome = fuzz(format, 2026, Duration::from_millis(300)).expect("a folder");
            assert!(outcome.findings.is_empty(), "{}, seed 2026: {:?}", format.name, outcome.findings);
            assert!(outcome.taken > 0, "{}: what its writers write is read", format.name);
        }
    }

    #[test]
    fn every_input_to_begin_with_is_taken() {
        let folder = tempfile::tempdir().expect("a folder");
        for format in FORMATS {
            let inputs: Vec<Vec<u8>> = format.corpus.iter().map(|bytes| bytes.to_vec()).chain((format.more)()).collect();
            assert!(!inputs.is_empty(), "{}", format.name);
            // An empty pack has no kernel to be taken.
            for input in inputs.iter().filter(|input| format.name != "pack" || input.len() > 112) {
                assert!((format.read)(folder.path(), input), "{}: {}", format.name, String::from_utf8_lossy(input));
                let mut mended = input.clone();
                (format.mend)(&mut mended);
                assert!((format.read)(folder.path(), &mended), "{}: hashes are put right as they were", format.name);
            }
            for input in format.refused {
                assert!(!(format.read)(folder.path(), input), "{}: {}", format.name, String::from_utf8_lossy(input));
            }
        }
    }

    /// A reader with a planted mistake: it panics at a NUL, and hangs at nothing.
    #[test]
    fn a_planted_panic_is_found_and_its_input_kept() {
        let planted = Format {
            name: "planted",
            what: "a reader that cannot stand a NUL",
            corpus: &[b"{\"a\": 1}"],
            refused: &[],
            more: Vec::new,
            mend: |_| {},
            read: |_, bytes| {
                assert!(!bytes.contains(&0), "a NUL");
                true
            },
        };
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let outcome = fuzz(&planted, 1, Duration::from_millis(200));
        std::panic::set_hook(hook);
        let outcome = outcome.expect("a folder");
        assert_eq!(outcome.findings.len(), 1, "{:?}", outcome.findings);
        assert!(outcome.findings[0].what.contains("a NUL") && outcome.findings[0].input.contains(&0));
    }
}
