//! What is taken, and what is chosen.

use verdigris_graph::Problem;

use super::super::super::ENGINES;
use super::Gradient;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::engine::Reason;

fn parsed(words: &str) -> Problem {
    words.parse().unwrap_or_else(|error| panic!("{words}: {error}"))
}
