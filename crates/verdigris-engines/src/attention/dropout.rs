//! Dropout between the softmax and the values: which pairs are dropped, drawn anew wherever they are needed ([`DropoutMask`] has the rule).
//!
//! A block of the generator has the words of four pairs, queries and keys 8 apart. In the registers of a tensor core's product they are a thread's own, in two
//! blocks of 8 columns that follow each other, whether rows are queries or keys: each word that is drawn is used by the thread that drew it. That is a
//! quarter of seven rounds, about seven instructions, for each score; a forward kernel draws while the values of the block in front are added.

use std::panic::Location;

use verdigris_graph::{AttentionProblem, DropoutMask, Slot};
use verdigris_kir::face::{Kernel, Val};
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

/// Instructions that draw a pair's word and use it.
pub(super) const INSTRUCTIONS: f64 = 13.0;

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

    /// What a head draws from.
    #[track_caller]
    pub(super) fn of_head(&self, k: Kernel<'k>, batch: Val<'k, u32>, head: Val<'k, u32>) -> HeadDraws<'k> {
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
            let counter = k.join32(offset_low, offset_high) + (batch * self.heads + head).widen();
            HeadDraws { key: [low, high], counter, last_dropped: self.last_dropped }
        })
    }
}

/// The random numbers of a head of queries.
#[derive(Clone, Copy)]
pub(super) struct HeadDraws<'k> {
    key: [Val<'k, u32>; 2],
    counter: Val<'k, u64>,
    last_dropped: Val<'k, u32>,
}

impl<'k> HeadDraws<'k> {
    /// Of four pairs, whether they are kept: by query and key, each 8 apart, from these folded numbers on.
    fn four(&self, k: Kernel<'k>, query: Val<'k, u32>, key: Val<'k, u32>) -> [[Val<'k, bool>; 2]; 2] {
        let (low, high) = k.split32(self.counter);
        let [a, b, c, d] = Generator::new(k, self.key, DropoutMask::ROUNDS).words([low, high, query + 1, key]);
        [[a, b], [c, d]].map(|of_query| of_query.map(|word| word.gt(self.last_dropped)))
    }

    /// Whether one pair is kept.
    #[track_caller]
    pub(super) fn is_kept(&self, k: Kernel<'k>, query: Val<'k, u32>, key: Val<'k, u32>) -> Val<'k, bool> {
        k.scope(Location::caller(), || {
            let (low, high) = k.split32(self.counter);
            let [a, b, c, d] = Generator::new(k, self.key, DropoutMask::ROUNDS).words([low, high, fold(query) + 1, fold(key)]);
            let of_query = (query & 8).ne(0);
            let (even, odd) = (k.select(of_query, c, a), k.select(of_query, d, b));
            k.select((key & 8).ne(0), odd, even).gt(self.last_dropped)
        })
    }

    /// Probabilities whose rows are queries, from `query` and 8 behind it, and whose columns are keys, from the block's `first_key`, a multiple of 16, and the
    /// thread's `column` on: those that are dropped become 0.
    #[track_caller]
    pub(super) fn drop_keys(
        &self,
        p: &Fragment<'k, f32>,
        query: Val<'k, u32>,
        first_key: Val<'k, u32>,
        column: Val<'k, u32>,
        columns: u32,
    ) {
        let k = query.kernel();
        k.scope(Location::caller(), || {
            let (query, key) = (fold(query), (first_key >> 1) + column);
            for pair in 0..columns / 16 {
                for odd in [0, 1] {
                    let kept = self.four(k, query, key + (8 * pair + odd));
                    for (half, of_query) in (0..).zip(kept) {
                        for (part, is_kept) in (2 * pair..).zip(of_query) {
                            let element = p.element(part, half, odd);
                            element.set(k.select(is_kept, element, 0.0));
                        }
                    }
                }
            }
        });
    }

    /// Probabilities whose rows are keys, from `key` and 8 behind it, and whose columns are queries: two blocks of 8 columns, step `step`, from `first_query`, which is
    /// the first one's, a multiple of 16, and the thread's `column` on. Of `packed`, the same in the type of the queries, those that are dropped become 0; in
    /// the registers they become negative.
    #[track_caller]
    pub(super) fn drop_queries(
        &self,
        p: &Fragment<'k, f32>,
        step: u32,
        packed: [Val<'k, u32>; 4],
        key: Val<'k, u32>,
        [first_query, column]: [Val<'k, u32>; 2],
    ) -> [Val<'k, u32>; 4] {
        let k = key.kernel();
        k.scope(Location::caller(), || {
            let (query, key) = ((first_query >> 1) + column + 8 * step, fold(key));
            // The halves of the packed words that are kept, in the order of part and half.
            let mut masks = [k.constant(0u32); 4];
            for (odd, bits) in [(0, 0x0000_ffffu32), (1, 0xffff_0000)] {
                let kept = self.four(k, query + odd, key);
                for (part, of_part) in (0..).zip(kept) {
                    for (half, is_kept) in (0..).zip(of_part) {
                        let element = p.element(2 * step + part, half, odd);
                        element.set(k.select(is_kept, element, -element));
                        let mask = &mut masks[(2 * part + half) as usize];
                        *mask = *mask | k.select(is_kept, bits, 0u32);
                    }
                }
            }
            let [a, b, c, d] = packed;
            [a & masks[0], b & masks[1], c & masks[2], d & masks[3]]
        })
    }
}
