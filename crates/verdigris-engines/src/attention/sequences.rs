//! Batches with numbers of queries and keys of their own, as the launches of a gradient share them: sequences of ragged tensors, and tensors with lengths.
//!
//! Rows behind those that count hold anything, and get the gradient 0 where they are the batch's own.
//!
//! In the workspace a block of 64 queries of one sequence that begins in row `r` has the number `r / 64`, and the block in which sequence `n` ends, if it is not
//! whole, the number `rows / 64 + n`; of a sequence without queries that is its only one. Whole blocks without a row in common begin 64 rows apart at least,
//! in whichever order their sequences lie: none shares a number with another, and whatever offsets hold, numbers are below `rows / 64 + sequences`. Batches of tensors with
//! lengths are numbered as if they lay behind each other, each as long as may be.

use verdigris_graph::AttentionProblem;
use verdigris_kir::face::{Kernel, Val};

use super::band::BandArgs;
use super::ragged::{OffsetsIfAnyArgs, Sequence};

/// Queries of a block.
pub(super) const QUERIES: u32 = 64;

verdigris_kir::parameters! {
    /// Where sequences lie, how long they are, and where in the workspace.
    pub(super) struct Sequences / #[derive(Clone, Copy, Debug)] SequencesArgs of () as _spec {
        offsets: OffsetsIfAnyArgs = (),
        band: BandArgs = (),
        /// Queries and keys of one, at most.
        longest: [u32; 2],
        /// Blocks of queries of a head in the workspace.
        blocks_of_head: u32,
        /// Those of them that are numbered by rows.
        whole_blocks: u32,
    }
}

/// One of them, the same for all threads of a CTA.
#[derive(Clone, Copy)]
pub(super) struct Own<'k> {
    /// Those that count.
    pub(super) queries: Sequence<'k>,
    pub(super) keys: Sequence<'k>,
    /// The batch of the tensors.
    pub(super) batch: Val<'k, u32>,
    /// Rows of queries and of keys, with those that do not count.
    pub(super) rows: [Val<'k, u32>; 2],
    /// Blocks of queries, and those of them that are whole.
    pub(super) blocks: Val<'k, u32>,
    whole: Val<'k, u32>,
    /// Of a head's blocks in the workspace, the first whole one, and the one that is not.
    first_block: Val<'k, u32>,
    last_block: Val<'k, u32>,
    /// Keys more than queries.
    pub(super) shift: Val<'k, i32>,
    /// Query `i` attends to keys from `i + before` to below `i + behind`.
    pub(super) before: Val<'k, i32>,
    pub(super) behind: Val<'k, i32>,
}

/// Whether batches of `p` have numbers of queries or keys of their own.
pub(super) fn has(p: &AttentionProblem) -> bool {
    p.is_ragged() || p.q_lengths.is_some() || p.kv_lengths.is_some()
}

/// Blocks of queries that a head has in the workspace.
pub(super) fn blocks_of_head(p: &AttentionProblem) -> u64 {
    whole_blocks(p) + p.b
}

fn whole_blocks(p: &AttentionProblem) -> u64 {
    let rows = if p.is_ragged() { p.q_rows } else { p.b * p.s_q };
    rows / u64::from(QUERIES)
}

impl SequencesArgs {
    /// Those of `p`, if its batches have numbers of their own.
    pub(super) fn of(p: &AttentionProblem) -> Option<SequencesArgs> {
        has(p).then(|| SequencesArgs {
            offsets: OffsetsIfAnyArgs::of(p),
            band: BandArgs::new(p, 1),
            longest: [p.s_q, p.s_kv].map(|longest| longest as u32),
            blocks_of_head: blocks_of_head(p) as u32,
            whole_blocks: whole_blocks(p) as u32,
        })
    }
}

impl<'k> Sequences<'k> {
    /// Sequence `n`.
    #[track_caller]
    pub(super) fn of_batch(&self, k: Kernel<'k>, n: Val<'k, u32>) -> Own<'k> {
        let all = self.offsets.of_batch(k, n, self.longest);
        let counting = self.band.of_batch(k, n, all.map(|sequence| sequence.count));
        let of = |which: usize, count: Val<'k, u32>| Sequence { begin: k.uniform(all[which].begin), count: k.uniform(count) };
        let (queries, keys) = (of(0, counting.queries), of(1, counting.keys));
        let [batch, _] = self.offsets.tensor_batches(k, n);
        let log2 = QUERIES.trailing_zeros();
        Own {
            queries,
            keys,
            batch,
            rows: all.map(|sequence| k.uniform(sequence.count)),
            blocks: (queries.count + (QUERIES - 1)) >> log2,
            whole: queries.count >> log2,
            first_block: (queries.begin + batch * self.longest[0]) >> log2,
            last_block: self.whole_blocks + n,
            shift: (keys.count - queries.count).signed(),
            before: k.uniform(counting.before),
            behind: k.uniform(counting.behind),
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

#[cfg(test)]
mod tests;
