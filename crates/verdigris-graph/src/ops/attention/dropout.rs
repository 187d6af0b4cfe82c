//! Dropout of attention: which pairs of a query and a key are dropped.

use super::RandomState;
use crate::error::Error;
use crate::graph::Graph;
use crate::op::Real;
use crate::ops::pointwise::random;
use crate::tensor::Uid;
use crate::validate::attribute;

/// Which pairs the dropout of attention drops, as a rule of numbers.
///
/// Query `i` and key `j` of head `n` of `h` and batch `b` (of ragged tensors: of sequence `b`, from whose first query and key `i` and `j` count) have word
/// `2 · (⌊i / 8⌋ mod 2) + ⌊j / 8⌋ mod 2` of
///
/// ```text
/// Philox4x32-7(counter = [low(c), high(c), 1 + fold(i), fold(j)], key = [low(seed), high(seed)])
/// c = offset + b · h + n mod 2⁶⁴          fold(x) = 8 · ⌊x / 16⌋ + x mod 8
/// ```
///
/// with seed and offset as [`crate::Pointwise::Random`] has them, and [`DropoutMask::ROUNDS`] rounds of the generator: as many as its authors ask for against
/// all tests of BigCrush (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, 2011); the ten of [`crate::Pointwise::Random`] are their margin, which a
/// coin for each pair does not need. The pair is dropped if the upper 24 bits of its word, over 2²⁴, are below the probability
/// (rounded to f32), as [`crate::GraphBuilder::dropout`] has it: the probability is right to 2⁻²⁴. So a mask depends on state and place alone, not on tiles,
/// engines or the device, and is the same for scores with more queries or keys.
///
/// Attention of `b` batches and `h` heads uses `b · h` offsets; whoever draws again with the same seed adds so many. No other op draws from the same
/// counters under one seed: their third word is 0.
///
/// Four pairs share a block of the generator, those of queries 8 apart and keys 8 apart: on tensor cores one thread has all four of them, in scores and in
/// transposed scores alike, and uses each word that it draws.
///
/// ```
/// use verdigris_graph::DropoutMask;
///
/// assert_eq!((DropoutMask::fold(7), DropoutMask::fold(8), DropoutMask::fold(16)), (7, 0, 8));
/// assert_eq!((DropoutMask::word(3, 5), DropoutMask::word(3, 13), DropoutMask::word(27, 5)), (0, 1, 2));
/// let mask = DropoutMask::of(0.25);
/// assert_eq!((mask.last_dropped, mask.factor), ((1 << 30) - 1, 4.0 / 3.0));
/// assert_eq!(DropoutMask::of(1.0).factor, 0.0);
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DropoutMask {
    /// The greatest word that drops its pair.
    pub last_dropped: u32,
    /// What probabilities that are kept are multiplied by: `1 / (1 − p)`, 0 where all are dropped.
    pub factor: f64,
}

impl DropoutMask {
    /// Rounds of the generator.
    pub const ROUNDS: u32 = 7;

    /// Of a probability above 0 and up to 1.
    pub fn of(p: f64) -> DropoutMask {
        // Above 0, so that at least one of the 2²⁴ numbers is below it.
        let numbers = (f64::from(p as f32) * f64::from(1u32 << 24)).ceil().clamp(1.0, f64::from(1u32 << 24)) as u64;
        DropoutMask { last_dropped: ((numbers << 8) - 1) as u32, factor: if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 } }
    }

    /// The number of a query or a key among those that have blocks of their own.
    pub const fn fold(x: u64) -> u64 {
        x / 16 * 8 + x % 8
    }

    /// Which word of a block a pair has.
    pub const fn word(query: u64, key: u64) -> usize {
        (query / 8 % 2 * 2 + key / 8 % 2) as usize
    }
}

/// What must hold of the probability and the random state.
pub(super) fn check(op: &str, graph: &Graph, p: Option<Real>, [state, offset]: [Option<Uid>; 2]) -> Result<(), Error> {
    let structure = |uid: Uid, rule| Err(Error::Structure { op: op.to_owned(), tensor: graph.tensor_of(op, uid)?.name.clone(), rule });
    let Some(Real(p)) = p else {
        return match state.or(offset) {
            Some(uid) => structure(uid, "a random state of attention comes with a probability of dropout"),
            None => Ok(()),
        };
    };
    random::probability(op, "dropout", p)?;
    match (state, offset) {
        (Some(state), offset) => random::check(op, graph, RandomState { state, offset }),
        (None, Some(offset)) => structure(offset, "an offset by value comes with a seed"),
        (None, None) => attribute(op, "dropout", p, "dropout comes with a random state, or a seed and an offset by value"),
    }
}
