//! Which mutant is on, in a copy of the sources that holds them all (`cargo xtask mutants`).

use std::io::Write;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

static CHOSEN: LazyLock<u64> =
    LazyLock::new(|| std::env::var("VERDIGRIS_MUTANT").ok().and_then(|number| number.parse().ok()).unwrap_or(0));
static REACHED: AtomicBool = AtomicBool::new(false);

/// Whether the mutant of this number is on. The first time that it is, the program says so: its text was reached.
#[inline]
pub fn is(number: u64) -> bool {
    *CHOSEN == number && reached()
}

#[cold]
fn reached() -> bool {
    if !REACHED.swap(true, Ordering::Relaxed) {
        // Not by `eprintln`, which test programs capture.
        let _ = std::io::stderr().write_all(b"mutant reached\n");
    }
    true
}
