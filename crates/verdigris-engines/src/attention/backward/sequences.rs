//! Sequences of ragged tensors, as the three launches of the gradient share them.
//!
//! In the workspace a block of 64 queries of one sequence that begins in row `r` has the number `r / 64`, and the block in which sequence `n` ends, if it is not
//! whole, the number `rows / 64 + n`; of a sequence without queries that is its only one. Whole blocks without a row in common begin 64 rows apart at least,
//! in whichever order their sequences lie: none shares a number with another, and whatever offsets hold, numbers are below `rows / 64 + sequences`.

use verdigris_graph::{AttentionProblem, Corner};
use verdigris_kir::face::{Kernel, Val};

use super::super::ragged::{OfKeys, OffsetsArgs, Sequence};
use super::spec::QUERIES;

verdigris_kir::parameters! {
    /// Where sequences lie, and where in the workspace.
    pub(super) struct Sequences / #[derive(Clone, Copy, Debug)] SequencesArgs of () as _spec {
        offsets: OffsetsArgs = OfKeys::Told,
        /// Queries and keys of one, at most.
        longest: [u32; 2],
        /// Blocks of queries of a head in the workspace.
        blocks_of_head: u32,
        /// Those of them that are numbered by rows.
        whole_blocks: u32,
        /// 1 if the diagonal ends at a sequence's last query and key, 0 if it begins at its first.
        bottom_right: i32,
    }
}

/// One of them, the same for all threads of a CTA.
#[derive(Clone, Copy)]
pub(super) struct Own<'k> {
    pub(super) queries: Sequence<'k>,
    pub(super) keys: Sequence<'k>,
    /// Blocks of queries, and those of them that are whole.
    pub(super) blocks: Val<'k, u32>,
    whole: Val<'k, u32>,
    /// Of a head's blocks in the workspace, the first whole one, and the one that is not.
    first_block: Val<'k, u32>,
    last_block: Val<'k, u32>,
    /// Keys more than queries.
    pub(super) shift: Val<'k, i32>,
    /// From a query to its diagonal's key.
    pub(super) corner: Val<'k, i32>,
}

/// Blocks of queries that a head of ragged tensors has in the workspace.
pub(super) fn blocks_of_head(p: &AttentionProblem) -> u64 {
    whole_blocks(p) + p.b
}

fn whole_blocks(p: &AttentionProblem) -> u64 {
    p.q_rows / u64::from(QUERIES)
}

impl SequencesArgs {
    /// Those of `p`, if its tensors are ragged.
    pub(super) fn of(p: &AttentionProblem) -> Option<SequencesArgs> {
        Some(SequencesArgs {
            offsets: OffsetsArgs::of(p)?,
            longest: [p.s_q, p.s_kv].map(|longest| longest as u32),
            blocks_of_head: blocks_of_head(p) as u32,
            whole_blocks: whole_blocks(p) as u32,
            bottom_right: i32::from(p.corner == Corner::BottomRight),
        })
    }
}

impl<'k> Sequences<'k> {
    /// Sequence `n`.
    #[track_caller]
    pub(super) fn of_batch(&self, k: Kernel<'k>, n: Val<'k, u32>) -> Own<'k> {
        let same = |sequence: Sequence<'k>| Sequence { begin: k.uniform(sequence.begin), count: k.uniform(sequence.count) };
        let [queries, keys] = self.offsets.of_batch(k, n, self.longest).map(same);
        let log2 = QUERIES.trailing_zeros();
        let shift = (keys.count - queries.count).signed();
        Own {
            queries,
            keys,
            blocks: (queries.count + (QUERIES - 1)) >> log2,
            whole: queries.count >> log2,
            first_block: queries.begin >> log2,
            last_block: self.whole_blocks + n,
            shift,
            corner: shift * self.bottom_right,
        }
    }

    /// The number of a block of a sequence among those of all heads.
    #[track_caller]
    pub(super) fn block_number(&self, own: &Own<'k>, head: Val<'k, u32>, block: Val<'k, u32>) -> Val<'k, u32> {
        let k = head.kernel();
        let of_head = k.select(block.lt(own.whole), own.first_block + block, own.last_block);
        head * self.blocks_of_head + of_head
    }
}
