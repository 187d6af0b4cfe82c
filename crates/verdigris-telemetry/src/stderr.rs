//! Warnings and errors on standard error, for whoever reads a service's log.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::{Level, Metadata};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::Registry as Spans;
use tracing_subscriber::util::SubscriberInitExt;

use crate::error::Error;

/// Lines of one level that are written in a second; further ones are counted, and the count is said.
const LINES_PER_SECOND: u32 = 50;

/// The least that is written to standard error.
///
/// ```
/// use verdigris_telemetry::Severity;
///
/// assert_eq!("warning".parse(), Ok(Severity::Warning));
/// assert!("loud".parse::<Severity>().is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Severity {
    /// Nothing.
    Off,
    /// What went wrong: `error`, `overdue`, `memory`, `drift`, a batch that could not be computed.
    Error,
    /// And what may become wrong: `slow`, `switch`, `fallback`, `nonfinite`.
    #[default]
    Warning,
    /// And what an application calls information.
    Information,
}

impl std::str::FromStr for Severity {
    type Err = String;

    fn from_str(text: &str) -> Result<Severity, String> {
        match text {
            "off" => Ok(Severity::Off),
            "error" => Ok(Severity::Error),
            "warning" => Ok(Severity::Warning),
            "information" => Ok(Severity::Information),
            _ => Err(format!("`{text}` is none of off, error, warning and information")),
        }
    }
}

impl std::fmt::Display for Severity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Severity::Off => "off",
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Information => "information",
        })
    }
}

/// Writes events of that severity to standard error and does nothing else, for a program that installs no telemetry of its own work. It becomes the process's
/// subscriber of `tracing`, which can be done once; [`Telemetry::stderr_lines`](crate::Telemetry::stderr_lines) does the same beside other layers.
///
/// # Errors
/// [`Error::SubscriberTaken`].
///
/// ```
/// use verdigris_telemetry::{Severity, log_to_stderr};
///
/// log_to_stderr(Severity::Warning)?;
/// assert!(log_to_stderr(Severity::Off).is_ok() && log_to_stderr(Severity::Error).is_err());
/// # Ok::<(), verdigris_telemetry::Error>(())
/// ```
pub fn log_to_stderr(least: Severity) -> Result<(), Error> {
    match layer(least) {
        None => Ok(()),
        Some(layer) => tracing_subscriber::registry().with(layer).try_init().map_err(|_| Error::SubscriberTaken),
    }
}

/// Events of that severity as lines of JSON on standard error; nothing for [`Severity::Off`].
pub(crate) fn layer(severity: Severity) -> Option<Box<dyn Layer<Spans> + Send + Sync>> {
    let level = match severity {
        Severity::Off => return None,
        Severity::Error => LevelFilter::ERROR,
        Severity::Warning => LevelFilter::WARN,
        Severity::Information => LevelFilter::INFO,
    };
    let lines = tracing_subscriber::fmt::layer().json().with_ansi(false).with_writer(Bounded::new(io::stderr));
    Some(lines.with_filter(Targets::new().with_default(level)).boxed())
}

/// Writes lines, a bounded number of each level a second: a fault that comes with every execution does not fill the disk of a log.
struct Bounded<M> {
    to: M,
    errors: Arc<Mutex<Second>>,
    others: Arc<Mutex<Second>>,
}

/// What was written in one second.
struct Second {
    began: Instant,
    written: u32,
    left_out: u64,
}

impl<M> Bounded<M> {
    fn new(to: M) -> Bounded<M> {
        let second = || Arc::new(Mutex::new(Second { began: Instant::now(), written: 0, left_out: 0 }));
        Bounded { to, errors: second(), others: second() }
    }
}

impl<'a, W: Write, M: Fn() -> W> MakeWriter<'a> for Bounded<M> {
    type Writer = Line<W>;

    fn make_writer(&'a self) -> Line<W> {
        Line { to: (self.to)(), second: Arc::clone(&self.others) }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line<W> {
        let second = if *metadata.level() == Level::ERROR { &self.errors } else { &self.others };
        Line { to: (self.to)(), second: Arc::clone(second) }
    }
}

/// Takes one line.
struct Line<W> {
    to: W,
    second: Arc<Mutex<Second>>,
}

impl<W> Line<W> {
    fn second(&self) -> MutexGuard<'_, Second> {
        self.second.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is room in this second, and how many lines were left out in the one before.
    fn takes(&self, at: Instant) -> (bool, u64) {
        let mut second = self.second();
        let mut before = 0;
        if at.saturating_duration_since(second.began) >= Duration::from_secs(1) {
            before = second.left_out;
            *second = Second { began: at, written: 0, left_out: 0 };
        }
        let is_room = second.written < LINES_PER_SECOND;
        if is_room {
            second.written += 1;
        } else {
            second.left_out += 1;
        }
        (is_room, before)
    }
}

impl<W: Write> Write for Line<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let (is_room, before) = self.takes(Instant::now());
        // A log that cannot be written is no fault of the application.
        if before > 0 {
            let _ = self.to.write_all(
                format!("{{\"level\":\"WARN\",\"fields\":{{\"event\":\"left_out\",\"lines\":{before}}},\"target\":\"verdigris\"}}\n")
                    .as_bytes(),
            );
        }
        if is_room {
            let _ = self.to.write_all(line);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("not poisoned").extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_flood_is_bounded_and_counted_and_leaves_room_for_errors() {
        let kept = Kept::default();
        let to = kept.clone();
        let bounded = Bounded::new(move || to.clone());
        let lines = || {
            String::from_utf8(kept.0.lock().expect("not poisoned").clone()).expect("text").lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let others = || bounded.make_writer();
        for _ in 0..LINES_PER_SECOND + 7 {
            others().write_all(b"warned\n").expect("taken");
        }
        assert_eq!(lines().len(), LINES_PER_SECOND as usize);
        // Errors have a bound of their own.
        Line { to: kept.clone(), second: Arc::clone(&bounded.errors) }.write_all(b"wrong\n").expect("taken");
        assert_eq!(lines().last().map(String::as_str), Some("wrong"));
        // A second later there is room, and what was left out is said.
        others().second().began -= Duration::from_secs(1);
        others().write_all(b"later\n").expect("taken");
        let told = lines();
        let [.., count, later] = told.as_slice() else { panic!("{told:?}") };
        let count: serde_json::Value = serde_json::from_str(count).expect("JSON");
        assert_eq!((&count["fields"]["lines"], later.as_str()), (&7.into(), "later"));
    }

    #[test]
    fn severities_are_read_as_they_are_written() {
        for severity in [Severity::Off, Severity::Error, Severity::Warning, Severity::Information] {
            assert_eq!(severity.to_string().parse(), Ok(severity));
        }
        assert!("WARN".parse::<Severity>().is_err_and(|error| error.contains("`WARN` is none of off, error")));
    }
}
