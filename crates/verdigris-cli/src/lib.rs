//! What the programs of this repository share: the problems that a command line names, the device that it runs on, tables, records and
//! exit codes. The program `verdigris` is built from it, and so are the developers' tools.
//!
//! Exit codes: 0 all is well (also where a command that needs a GPU is skipped for want of one), 1 something was found wrong, 2 the
//! command could not be carried out, or what it found not be printed. A reader that has gone away (`| head`) changes no code.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::process::ExitCode;

/// Prints a line to stdout; like `println!`, but where that fails there is no panic: see [`table::say_text`].
#[macro_export]
macro_rules! say {
    () => { $crate::table::say_text("\n") };
    ($($words:tt)*) => { $crate::table::say_text(&(format!($($words)*) + "\n")) };
}

/// Prints a line to stdout if that is possible; see [`table::mention_text`].
#[macro_export]
macro_rules! mention {
    () => { $crate::table::mention_text("\n") };
    ($($words:tt)*) => { $crate::table::mention_text(&(format!($($words)*) + "\n")) };
}

pub mod device;
pub mod inspect;
pub mod problem;
pub mod record;
pub mod rows;
pub mod selection;
pub mod table;
pub mod telemetry;
pub mod tensor_files;

/// What a command found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing wrong, or nothing to do.
    Good,
    /// Something is wrong; it was printed.
    Bad,
}

/// The exit code of a command; an error is printed with its causes, after the program's name.
pub fn exit_code(program: &str, done: anyhow::Result<Verdict>) -> ExitCode {
    // Where nobody reads what went wrong either, the code still says that something did.
    let told = |words: &str| {
        let _ = writeln!(std::io::stderr(), "{program}: {words}");
        ExitCode::from(2)
    };
    match (done, table::unsaid()) {
        (Err(error), _) => told(&chain(&error)),
        (Ok(_), Some(error)) => told(&format!("what was found could not be printed: {error}")),
        (Ok(Verdict::Good), None) => ExitCode::SUCCESS,
        (Ok(Verdict::Bad), None) => ExitCode::from(1),
    }
}

/// An error and its causes on one line, without those that the one before has already said.
pub fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let words = cause.to_string();
        if !text.contains(&words) {
            text += if text.is_empty() { "" } else { ": " };
            text += &words;
        }
    }
    text
}
