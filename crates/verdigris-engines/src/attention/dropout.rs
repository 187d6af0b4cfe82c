//! Dropout between the softmax and the values: which pairs are dropped, drawn anew wherever they are needed ([`DropoutMask`] has the rule).
//!
//! A block of the generator has the words of four pairs, queries and keys 8 apart. In the registers of a tensor core's product they are a thread's own, in two
//! blocks of 8 columns that follow each other, whether rows are queries or keys: each word that is drawn is used by the thread that drew it. That is a
//! quarter of seven rounds, about seven instructions, for each score, of which those that look at one operand's place alone are made once. They run while products do: a
//! forward kernel draws while the values of the block in front are added, a backward kernel draws the bits of the next turn while the gradients of this
//! one are multiplied, and holds them as one word.

use std::ops::Range;
use std::panic::Location;

use verdigris_graph::{AttentionProblem, DropoutMask, Slot};
use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::params::{AtExecution, HostNumber, Read};
use verdigris_kir::tile::fragment::Fragment;

use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::philox::Generator;
use crate::layout::space::element;

verdigris_kir::parameters! {
    /// The random state, and which words drop their pairs.
    pub(super) struct Dropout / DropoutArgs of () as _spec {
        /// By value.
        seed: AtExecution<i64> = (),
        offset: AtExecution<i64> = (),
        /// In memory, four i32 so many bytes apart.
        state: Read = 4,
        state_stride: u64,
        in_memory: u32,
        /// Heads of a batch.
        heads: u32,
        last_dropped: u32,
        /// By which probabilities that are kept are multiplied.
        pub(super) factor: f64,
    }
}

verdigris_kir::parameters! {
    /// The same for kernels that drop pairs or not: the launch says which.
    pub(super) struct DropoutIfAny / DropoutIfAnyArgs of () as _spec {
        pub(super) dropout: DropoutArgs = (),
        pub(super) is_any: u32,
    }
}

/// Instructions that draw a pair's word and use it.
pub(super) const INSTRUCTIONS: f64 = 9.0;

/// For engines that drop nothing.
///
/// # Errors
/// A refusal if the problem has dropout.
pub(super) fn require_none(id: EngineId, p: &AttentionProblem) -> Result<(), Refusal> {
    id.require(p.dropout.is_none(), Reason::Epilogue, "dropout, taken without")
}

impl DropoutArgs {
    /// That of `p`, if it drops anything.
    pub(super) fn of(p: &AttentionProblem) -> Option<DropoutArgs> {
        let DropoutMask { last_dropped, factor } = DropoutMask::of(p.dropout?.0);
        let word =
            |place: usize| p.dropout_seed.map_or(HostNumber::Fixed(0), |slots: [Slot; 2]| HostNumber::Bound(slots[place].0 as usize));
        // With a state by value, memory that is not read.
        let state = p.dropout_state.as_ref().unwrap_or(&p.q);
        Some(DropoutArgs {
            seed: word(0),
            offset: word(1),
            state: element(state, []),
            state_stride: state.strides[0] * 4,
            in_memory: u32::from(p.dropout_state.is_some()),
            heads: p.h as u32,
            last_dropped,
            factor,
        })
    }
}

impl DropoutIfAnyArgs {
    /// That of `p`; where it drops nothing, probabilities keep their size.
    pub(super) fn of(p: &AttentionProblem) -> DropoutIfAnyArgs {
        let (seed, offset) = (HostNumber::Fixed(0), HostNumber::Fixed(0));
        let none = || DropoutArgs {
            seed,
            offset,
            state: element(&p.q, []),
            state_stride: 0,
            in_memory: 0,
            heads: p.h as u32,
            last_dropped: 0,
            factor: 1.0,
        };
        DropoutIfAnyArgs { dropout: DropoutArgs::of(p).unwrap_or_else(none), is_any: u32::from(p.dropout.is_some()) }
    }
}

/// The number of a query or a key among those that have blocks of their own: [`DropoutMask::fold`].
fn fold<'k>(x: Val<'k, u32>) -> Val<'k, u32> {
    ((x >> 4) << 3) | (x & 7)
}

impl<'k> Dropout<'k> {
    /// By which probabilities that are kept are multiplied, in f32.
    #[track_caller]
    pub(super) fn single_factor(&self) -> Val<'k, f32> {
        self.factor.convert(CvtRound::Nearest)
    }

    /// The random state, which all threads of a warp have in common, so that it takes no register of each: they call it together.
    #[track_caller]
    pub(super) fn state(&self, k: Kernel<'k>) -> State<'k> {
        k.scope(Location::caller(), || {
            let State { key, offset, .. } = self.own_state(k);
            let (low, high) = k.split32(offset);
            let [low, high] = [low, high].map(|word| k.uniform(word));
            self.of_words(key.map(|word| k.uniform(word)), k.join32(low, high))
        })
    }

    fn of_words(&self, key: [Val<'k, u32>; 2], offset: Val<'k, u64>) -> State<'k> {
        State { key, offset, heads: self.heads, last_dropped: self.last_dropped }
    }

    /// The random state, read by each thread for itself.
    #[track_caller]
    fn own_state(&self, k: Kernel<'k>) -> State<'k> {
        k.scope(Location::caller(), || {
            let halves = |number: Val<'k, i64>| k.split32(number.unsigned());
            let (seed, offset) = (halves(self.seed), halves(self.offset));
            let words = [seed.0, seed.1, offset.0, offset.1].map(|word| k.var_named("random state", word));
            k.when(self.in_memory.ne(0), || {
                for (place, word) in (0u64..).zip(&words) {
                    word.set(k.ld_global::<u32>(self.state.moved(self.state_stride * place).address(), 0));
                }
            });
            let [low, high, offset_low, offset_high] = words.map(|word| word.get());
            self.of_words([low, high], k.join32(offset_low, offset_high))
        })
    }

    /// What a head draws from, where threads of a warp may have other heads.
    #[track_caller]
    pub(super) fn of_head(&self, k: Kernel<'k>, batch: Val<'k, u32>, head: Val<'k, u32>) -> HeadDraws<'k> {
        self.own_state(k).of_head(k, batch, head)
    }
}

/// The random state of a launch.
#[derive(Clone, Copy)]
pub(super) struct State<'k> {
    key: [Val<'k, u32>; 2],
    offset: Val<'k, u64>,
    heads: Val<'k, u32>,
    last_dropped: Val<'k, u32>,
}

impl<'k> State<'k> {
    /// What a head draws from.
    pub(super) fn of_head(&self, k: Kernel<'k>, batch: Val<'k, u32>, head: Val<'k, u32>) -> HeadDraws<'k> {
        let (low, high) = k.split32(self.offset + (batch * self.heads + head).widen());
        HeadDraws { key: self.key, counter: [low, high], last_dropped: self.last_dropped }
    }
}

/// The words of 16 columns: of the even columns and of the odd ones a block of the generator.
pub(super) type WordsOfKeys<'k> = [[Val<'k, u32>; 4]; 2];

/// The random numbers of a head of queries.
#[derive(Clone, Copy)]
pub(super) struct HeadDraws<'k> {
    key: [Val<'k, u32>; 2],
    counter: [Val<'k, u32>; 2],
    last_dropped: Val<'k, u32>,
}

impl<'k> HeadDraws<'k> {
    fn generator(&self, k: Kernel<'k>) -> Generator<'k> {
        Generator::new(k, self.key, DropoutMask::ROUNDS)
    }

    /// The words of four pairs: by query and key, each 8 apart, from these folded numbers on.
    fn words(&self, generator: &Generator<'k>, query: Val<'k, u32>, key: Val<'k, u32>) -> [Val<'k, u32>; 4] {
        let [low, high] = self.counter;
        generator.words([low, high, query + 1, key])
    }

    /// Whether one pair is kept.
    #[track_caller]
    pub(super) fn is_kept(&self, k: Kernel<'k>, query: Val<'k, u32>, key: Val<'k, u32>) -> Val<'k, bool> {
        k.scope(Location::caller(), || {
            let [low, high] = self.counter;
            let [a, b, c, d] = self.generator(k).words([low, high, fold(query) + 1, fold(key)]);
            let of_query = (query & 8).ne(0);
            let (even, odd) = (k.select(of_query, c, a), k.select(of_query, d, b));
            k.select((key & 8).ne(0), odd, even).gt(self.last_dropped)
        })
    }

    /// The words of some blocks of 16 columns of scores whose rows are queries, from `query` and 8 behind it, and whose columns are keys, from the block's
    /// `first_key`, a multiple of 16, and the thread's `column` on.
    #[track_caller]
    pub(super) fn words_of_keys(
        &self,
        query: Val<'k, u32>,
        first_key: Val<'k, u32>,
        column: Val<'k, u32>,
        blocks: Range<u32>,
    ) -> Vec<WordsOfKeys<'k>> {
        let k = query.kernel();
        k.scope(Location::caller(), || {
            let generator = self.generator(k);
            let (query, key) = (fold(query), (first_key >> 1) + column);
            blocks.map(|block| [0, 1].map(|odd| self.words(&generator, query, key + (8 * block + odd)))).collect()
        })
    }

    /// Probabilities of which these are the words, from the first block of columns on: those that are dropped become 0.
    #[track_caller]
    pub(super) fn drop_keys(&self, k: Kernel<'k>, p: &Fragment<'k, f32>, words: &[WordsOfKeys<'k>]) {
        k.scope(Location::caller(), || {
            for (block, of_block) in (0..).zip(words) {
                for (odd, [a, b, c, d]) in (0..).zip(*of_block) {
                    for (half, of_query) in [(0, [a, b]), (1, [c, d])] {
                        for (part, word) in (2 * block..).zip(of_query) {
                            let element = p.element(part, half, odd);
                            element.set(k.select(word.gt(self.last_dropped), element, 0.0));
                        }
                    }
                }
            }
        });
    }

    /// Draws for a turn of transposed scores, whose rows are keys, from `key` and 8 behind it, and whose columns are so many queries, a multiple of 16 up to 64, from
    /// `first_query`, a multiple of 16, and the thread's `column` on.
    #[track_caller]
    pub(super) fn draw(&self, kept: &KeptQueries<'k>, key: Val<'k, u32>, [first_query, column]: [Val<'k, u32>; 2], columns: u32) {
        let k = key.kernel();
        k.scope(Location::caller(), || {
            let generator = self.generator(k);
            let (query, key) = ((first_query >> 1) + column, fold(key));
            let mut bits = k.constant(0u32);
            for step in 0..columns / 16 {
                for odd in [0, 1] {
                    let [a, b, c, d] = self.words(&generator, query + (8 * step + odd), key);
                    for (part, of_part) in (2 * step..).zip([[a, b], [c, d]]) {
                        for (half, word) in (0..).zip(of_part) {
                            bits = k.select(word.gt(self.last_dropped), bits | KeptQueries::bit(part, half, odd), bits);
                        }
                    }
                }
            }
            kept.bits.set(bits);
        });
    }
}

/// Which pairs of a turn of transposed scores are kept: a bit for each of a thread's elements.
pub(super) struct KeptQueries<'k> {
    bits: Var<'k, u32>,
}

impl<'k> KeptQueries<'k> {
    #[track_caller]
    pub(super) fn new(k: Kernel<'k>) -> Self {
        KeptQueries { bits: k.var_unset(Some("kept")) }
    }

    /// All of them, until others are drawn.
    #[track_caller]
    pub(super) fn all(k: Kernel<'k>) -> Self {
        KeptQueries { bits: k.var_named("kept", u32::MAX) }
    }

    /// That of the element of a block of 8 columns, in a half and a column of it.
    const fn bit(part: u32, half: u32, odd: u32) -> u32 {
        1 << (4 * part + 2 * half + odd)
    }

    /// What is kept of the element's value: all of it, or 0.
    #[track_caller]
    pub(super) fn of(&self, part: u32, half: u32, odd: u32, value: Val<'k, f32>) -> Val<'k, f32> {
        let k = value.kernel();
        k.select((self.bits.get() & Self::bit(part, half, odd)).ne(0), value, 0.0)
    }
}
