//! What a caller asks of a graph's plan beside its values: limits, and how the choice is made.
//!
//! ```
//! use std::time::Duration;
//! use verdigris::{Knobs, Limits, Mode, Pin, Policy, Tuning};
//!
//! // The same bits at every run, in at most 64 MiB, by the clock, half a second a part.
//! let tuning = Tuning { budget: Duration::from_millis(500), ..Tuning::default() };
//! let limits = Limits { workspace_bytes: Some(64 << 20), ..Limits::default() };
//! let measured = Policy { limits, deterministic: true, mode: Mode::Measured(tuning), ..Policy::default() };
//! assert!(measured.remember && tuning.candidates == 12);
//! // The first part by an engine that is named.
//! let pin = Pin { part: Some(0), engine: "gemm.simt".to_owned(), knobs: Knobs::default() };
//! assert_ne!(measured, Policy { mode: Mode::Pinned(vec![pin]), ..Policy::default() });
//! ```

use std::time::Duration;

use verdigris_engines::engine::Knobs;

use crate::select::Limits;

/// How to plan a graph.
#[derive(Clone, PartialEq, Debug)]
pub struct Policy {
    /// What every part must keep. `workspace_bytes` is for the whole plan, temporaries included; `engine` and `settings` are not asked
    /// ([`Mode::Pinned`] is for that).
    pub limits: Limits,
    /// Asks for the same bits each time, whatever the graph says. Such a plan runs in the chosen way or not at all: less workspace is an error, and so is an
    /// address that is less aligned than the way relies on, but for what maps read. Planning waits for the compiler.
    pub deterministic: bool,
    /// How the choice is made.
    pub mode: Mode,
    /// Whether choices that were measured before are taken, and new ones kept: of this machine in every mode, and those that ship with the
    /// library in [`Mode::Instant`] (in [`Mode::Measured`] where [`Tuning::shipped`] says so).
    pub remember: bool,
}

impl Default for Policy {
    /// Everything that the graph itself allows; remembered choices, else by estimate.
    fn default() -> Policy {
        Policy { limits: Limits::default(), deterministic: false, mode: Mode::Instant, remember: true }
    }
}

/// How a way is chosen from all that engines offer.
#[derive(Clone, PartialEq, Debug)]
pub enum Mode {
    /// By estimate: nothing is run.
    Instant,
    /// By the clock: candidates are run on the device, unless this machine remembers an earlier choice. What ships with the library does not
    /// stand in its way: it was measured elsewhere.
    Measured(Tuning),
    /// By name.
    Pinned(Vec<Pin>),
}

/// How candidates are measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tuning {
    /// Most candidates of each part: those with the least estimates; and the best of each engine, and what would be chosen at once.
    pub candidates: usize,
    /// About how long each part may take. Kernels that need a compiler are begun, the promising ones first, until six tenths of it are gone;
    /// candidates without theirs are left out. What would be chosen at once is compiled and measured however long it takes.
    pub budget: Duration,
    /// Measure although an earlier choice is remembered.
    pub again: bool,
    /// Take a choice that ships with the library in place of measuring, where there is one.
    pub shipped: bool,
}

impl Default for Tuning {
    /// Twelve candidates, a second, whatever ships.
    fn default() -> Tuning {
        Tuning { candidates: 12, budget: Duration::from_secs(1), again: false, shipped: false }
    }
}

/// An engine, and perhaps its setting, for one part or for every part that it takes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pin {
    /// The part, counted from 0; `None` is every part that the engine takes and no earlier pin has.
    pub part: Option<usize>,
    /// The engine's name.
    pub engine: String,
    /// Values of knobs that the setting must have; empty leaves the engine its choice.
    pub knobs: Knobs,
}
