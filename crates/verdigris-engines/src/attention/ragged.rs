//! Ragged tensors: sequences of different lengths behind each other, whose rows offsets tell.
//!
//! Offsets are data, which nobody has checked. Whatever they are, a sequence lies within its tensors: that is worked out here, once for all kernels.

use verdigris_graph::{AttentionProblem, View};
use verdigris_kir::face::{Kernel, Pointer, Val};
use verdigris_kir::inst::Cache;
use verdigris_kir::params::{Read, Write};
use verdigris_kir::tile::staging::{STAGE_ROWS, Staging};

use super::tile::PANEL;
use crate::engine::{EngineId, Reason, Refusal};
use crate::hopper::WARPGROUP;
use crate::layout::space::element;

/// Whether offsets tell where keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OfKeys {
    /// Keys lie behind each other.
    Told,
    /// Every sequence has all keys, in pages.
    Paged,
}

verdigris_kir::parameters! {
    /// Where sequences lie; those of keys unless they are paged.
    pub(super) struct Offsets / #[derive(Clone, Copy, Debug)] OffsetsArgs of OfKeys as of_keys {
        /// i32, one more than sequences; the elements from one to the next.
        q_offsets: Read = 4,
        kv_offsets: Option<Read> = (*of_keys == OfKeys::Told).then_some(4),
        strides: [u32; 2],
        /// Rows of the tensors.
        rows: [u32; 2],
    }
}

verdigris_kir::parameters! {
    /// Where sequences lie, for kernels that take tensors which are ragged or not: the launch says which.
    pub(super) struct OffsetsIfAny / #[derive(Clone, Copy, Debug)] OffsetsIfAnyArgs of () as _spec {
        offsets: OffsetsArgs = OfKeys::Told,
        /// Whether queries are ragged, and whether keys are.
        is_ragged: [u32; 2],
    }
}

verdigris_kir::parameters! {
    /// Rows of a tensor that is written, a row at a time where a sequence ends.
    pub(super) struct RowsOut / #[derive(Clone, Copy, Debug)] RowsOutArgs of () as _spec {
        at: Write = 16,
        /// Bytes from one head to the next, and from one row to the next.
        strides_bytes: [u64; 2],
        /// Elements of a row: a multiple of eight.
        elements: u32,
    }
}

/// Rows of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Sequence<'k> {
    pub(super) begin: Val<'k, u32>,
    pub(super) count: Val<'k, u32>,
}

impl OffsetsArgs {
    /// Those of `p`, if its queries are ragged.
    pub(super) fn of(p: &AttentionProblem) -> Option<OffsetsArgs> {
        let (of_q, of_kv) = (p.q_offsets.as_ref()?, p.kv_offsets.as_ref());
        let stride = |view: &View| view.strides[0] as u32;
        Some(OffsetsArgs {
            q_offsets: element(of_q, []),
            kv_offsets: of_kv.map(|view| element(view, [])),
            strides: [stride(of_q), of_kv.map_or(0, stride)],
            rows: [p.q_rows, p.kv_rows].map(|rows| rows as u32),
        })
    }

    /// Where queries lie alone.
    pub(super) fn of_queries(p: &AttentionProblem) -> Option<OffsetsArgs> {
        OffsetsArgs::of(p).map(|offsets| OffsetsArgs { kv_offsets: None, ..offsets })
    }
}

impl OffsetsIfAnyArgs {
    /// Those of `p`; some address of the problem stands for what it does not have.
    pub(super) fn of(p: &AttentionProblem) -> OffsetsIfAnyArgs {
        let none = OffsetsArgs { q_offsets: element(&p.q, []), kv_offsets: None, strides: [0; 2], rows: [0; 2] };
        let offsets = OffsetsArgs::of(p).unwrap_or(none);
        let is_ragged = [p.q_offsets.is_some(), offsets.kv_offsets.is_some()].map(u32::from);
        OffsetsIfAnyArgs { offsets: OffsetsArgs { kv_offsets: offsets.kv_offsets.or(Some(offsets.q_offsets)), ..offsets }, is_ragged }
    }
}

impl RowsOutArgs {
    /// Rows of `elements` elements of two bytes.
    pub(super) fn new(view: &View, elements: u64) -> RowsOutArgs {
        RowsOutArgs { at: element(view, []), strides_bytes: [1, 2].map(|i| view.strides[i] * 2), elements: elements as u32 }
    }
}

impl OfKeys {
    /// What kernels of ragged queries are told of keys.
    pub(super) const fn of(paged: bool) -> OfKeys {
        if paged { OfKeys::Paged } else { OfKeys::Told }
    }
}

impl<'k> Offsets<'k> {
    /// The queries and the keys of a sequence, of which none has more than `longest`; of paged keys, all of them.
    pub(super) fn of_batch(&self, k: Kernel<'k>, batch: Val<'k, u32>, longest: [Val<'k, u32>; 2]) -> [Sequence<'k>; 2] {
        let of = |which: usize, offsets: Pointer<'k>| self.sequence(k, offsets, which, batch, longest[which]);
        let all = Sequence { begin: k.constant(0), count: longest[1] };
        [of(0, self.q_offsets), self.kv_offsets.map_or(all, |offsets| of(1, offsets))]
    }

    /// The rows of a sequence of queries (`which` is 0) or of keys (1), of which there are up to `longest`.
    fn sequence(&self, k: Kernel<'k>, offsets: Pointer<'k>, which: usize, batch: Val<'k, u32>, longest: Val<'k, u32>) -> Sequence<'k> {
        let at = |n: Val<'k, u32>| {
            let offset = k.ld_global::<i32>(offsets.at(n * self.strides[which], 4), 0);
            offset.max(0).min(self.rows[which].signed())
        };
        let (begin, end) = (at(batch), at(batch + 1));
        Sequence { begin: begin.unsigned(), count: (end - begin).max(0).min(longest.signed()).unsigned() }
    }
}

impl<'k> OffsetsIfAny<'k> {
    /// The queries and the keys of a batch, of which none has more than `longest`: all of them where these are not ragged.
    pub(super) fn of_batch(&self, k: Kernel<'k>, batch: Val<'k, u32>, longest: [Val<'k, u32>; 2]) -> [Sequence<'k>; 2] {
        let of = |which: usize, offsets: Option<Pointer<'k>>| {
            let (begin, count) = (k.var_named("first row", 0u32), k.var_named("rows", longest[which]));
            let Some(offsets) = offsets else { return Sequence { begin: begin.get(), count: count.get() } };
            k.when(self.is_ragged[which].ne(0), || {
                let own = self.offsets.sequence(k, offsets, which, batch, longest[which]);
                begin.set(own.begin);
                count.set(own.count);
            });
            Sequence { begin: begin.get(), count: count.get() }
        };
        [of(0, Some(self.offsets.q_offsets)), of(1, self.offsets.kv_offsets)]
    }

    /// The batch of queries, and that of keys which are not paged: of ragged tensors all sequences are one.
    pub(super) fn tensor_batches(&self, k: Kernel<'k>, batch: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        self.is_ragged.map(|is_ragged| k.select(is_ragged.ne(0), 0u32, batch))
    }
}

impl<'k> RowsOut<'k> {
    /// Those that begin so many bytes behind.
    pub(super) fn moved(&self, bytes: Val<'k, u64>) -> RowsOut<'k> {
        RowsOut { at: self.at.moved(bytes), ..*self }
    }

    /// Stores the first `count` rows of a stage, which has the elements of panel `panel`, to rows from `first` on: 16 bytes of each thread. Of these, rows from
    /// `counting` on get zeros, where that is given. All threads of a warpgroup call it, after what was written to the stage is seen by all.
    #[track_caller]
    pub(super) fn store(
        &self,
        k: Kernel<'k>,
        staging: &Staging<'k>,
        [stage, thread]: [Val<'k, u32>; 2],
        panel: u32,
        [head, first, count]: [Val<'k, u32>; 3],
        counting: Option<Val<'k, u32>>,
    ) {
        let [of_head, of_row] = self.strides_bytes;
        let head = self.at.moved(head.widen() * of_head);
        k.range_step(thread, (count << 3).min(STAGE_ROWS * 8), WARPGROUP, |number| {
            let (row, chunk) = (number >> 3, number & 7);
            let column = (chunk << 3) + panel * PANEL;
            k.when(column.lt(self.elements), || {
                let mut values = k.ld_shared_vector::<u32>(staging.place(stage, row, chunk), 0, 4);
                if let Some(counting) = counting {
                    values.iter_mut().for_each(|value| *value = k.select(row.lt(counting), *value, 0u32));
                }
                let to = head.moved((first + row).widen() * of_row).at(column, 2);
                k.st_global_vector(to, 0, &values, Cache::Default);
            });
        });
    }

    /// Zeros for `count` rows from `first` on, of up to 256 elements, by so many threads, which all call it: a warp has a row at a time.
    #[track_caller]
    pub(super) fn clear(&self, k: Kernel<'k>, [head, first, count]: [Val<'k, u32>; 3], threads: u32) {
        let [of_head, of_row] = self.strides_bytes;
        let column = k.lane() << 3;
        let to = self.at.moved(head.widen() * of_head + (column << 1).widen());
        k.when(column.lt(self.elements), || {
            k.range_step(k.thread() >> 5, count, threads / 32, |row| {
                k.st_global_vector(to.moved((first + row).widen() * of_row).address(), 0, &[k.constant(0u32); 4], Cache::Default);
            });
        });
    }
}

/// What kernels of tensor cores ask of ragged tensors.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require(id: EngineId, p: &AttentionProblem) -> Result<(), Refusal> {
    for (name, view) in [("q_offsets", &p.q_offsets), ("kv_offsets", &p.kv_offsets)] {
        let Some(view) = view else { continue };
        let is_near = view.strides[0].checked_mul(p.b + 1).is_some_and(|last| last < 1 << 32);
        id.require(is_near, Reason::Layout, format_args!("{name} are {} elements apart", view.strides[0]))?;
    }
    let rows = [p.q_rows, p.kv_rows];
    id.require(
        !p.is_ragged() || p.d_v.is_multiple_of(8),
        Reason::Extent,
        format_args!("ragged tensors with values of {} elements, taken are multiples of 8", p.d_v),
    )?;
    id.require(
        rows.iter().all(|&rows| rows < super::mapped::MOST_ROWS),
        Reason::Extent,
        format_args!("{rows:?} rows of queries and of keys; each must be below 2^28"),
    )
}

#[cfg(test)]
mod tests;
