//! Which keys a query attends to: a band around a diagonal, of lengths that each batch has; and sinks.

use verdigris_graph::{AttentionProblem, Corner, View};
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::Address;
use verdigris_tensor::DType;

use super::half::Half;
use super::mapped::UNBOUNDED;
use crate::engine::{EngineId, Reason, Refusal};
use crate::layout::space::element;

verdigris_kir::parameters! {
    /// A band: query `i` attends to keys from `i + corner + before` to below `i + corner + behind`, and below the length.
    pub(super) struct Band / #[derive(Clone, Copy, Debug)] BandArgs of () as _spec {
        pub(super) before: i32,
        pub(super) behind: i32,
        /// 1 if the corner is that of the last query and key, 0 for the first.
        pub(super) bottom_right: i32,
        /// Keys of a block.
        pub(super) block: Divide,
        /// Lengths of each batch (i32), the elements from one to the next, and whether there are any.
        pub(super) q_lengths: Read = 4,
        pub(super) kv_lengths: Read = 4,
        pub(super) length_strides: [u32; 2],
        pub(super) has_lengths: [u32; 2],
    }
}

/// The band of one batch: query `i` attends to keys from `i + before` to below `i + behind`.
#[derive(Clone, Copy)]
pub(super) struct BatchBand<'k> {
    /// Queries and keys that count.
    pub(super) queries: Val<'k, u32>,
    pub(super) keys: Val<'k, u32>,
    pub(super) before: Val<'k, i32>,
    pub(super) behind: Val<'k, i32>,
}

impl BandArgs {
    /// What `p` says of its band, to a kernel that takes `block` keys at a time.
    pub(super) fn new(p: &AttentionProblem, block: u32) -> BandArgs {
        let lengths = [&p.q_lengths, &p.kv_lengths];
        BandArgs {
            before: p.left.map_or(-UNBOUNDED, |left| -(left as i32)),
            behind: p.right.map_or(UNBOUNDED, |right| right as i32 + 1),
            bottom_right: i32::from(p.corner == Corner::BottomRight),
            block,
            q_lengths: at(p, &p.q_lengths),
            kv_lengths: at(p, &p.kv_lengths),
            length_strides: lengths.map(|view| view.as_ref().map_or(0, |view| view.strides[0] as u32)),
            has_lengths: lengths.map(|view| u32::from(view.is_some())),
        }
    }
}

impl<'k> Band<'k> {
    /// The band of a batch, out of `queries` and `keys` in each.
    pub(super) fn of_batch(&self, k: Kernel<'k>, batch: Val<'k, u32>, [queries, keys]: [Val<'k, u32>; 2]) -> BatchBand<'k> {
        let length = |which: usize, extent: Val<'k, u32>| {
            let length = k.var_named("length", extent);
            k.when(self.has_lengths[which].ne(0), || {
                let at = [self.q_lengths, self.kv_lengths][which].at(batch * self.length_strides[which], 4);
                length.set(k.ld_global::<i32>(at, 0).max(0).min(extent.signed()).unsigned());
            });
            length.get()
        };
        let (queries, keys) = (length(0, queries), length(1, keys));
        let corner = (keys - queries).signed() * self.bottom_right;
        BatchBand { queries, keys, before: corner + self.before, behind: corner + self.behind }
    }
}

/// Which keys a thread's two rows of scores attend to.
pub(super) struct Limits<'k> {
    pub(super) kernel: Kernel<'k>,
    /// Whether keys in front of the first are masked.
    pub(super) is_band: bool,
    /// From the thread's first column on: the first key that row `half` attends to, and the first behind those.
    pub(super) before: [Val<'k, i32>; 2],
    pub(super) behind: [Val<'k, i32>; 2],
}

impl<'k> Limits<'k> {
    /// Whether what stands `column` columns behind the thread's first one is not attended to; `first_key` is the block's.
    #[track_caller]
    pub(super) fn of_block(&self, first_key: Val<'k, u32>) -> impl Fn(u32, u32) -> Val<'k, bool> + use<'_, 'k> {
        let k = self.kernel;
        let [before, behind] = [&self.before, &self.behind].map(|limits| limits.map(|limit| limit - first_key.signed()));
        let is_band = self.is_band;
        move |half, column| {
            let column = k.constant(column as i32);
            let outside = behind[half as usize].le(column);
            if is_band { outside | before[half as usize].gt(column) } else { outside }
        }
    }
}

verdigris_kir::parameters! {
    /// One more score of each query of a head.
    pub(super) struct Sinks / SinkArgs of () as _spec {
        pub(super) sinks: Read = 4,
        /// Elements from one head to the next.
        pub(super) stride: u32,
        /// Bytes of an element: 4 for f32, 2 for the type of the queries, 0 where there are no sinks.
        pub(super) bytes: u32,
    }
}

impl SinkArgs {
    /// The sinks of `p`, or that there are none.
    pub(super) fn new(p: &AttentionProblem) -> SinkArgs {
        SinkArgs {
            sinks: at(p, &p.sinks),
            stride: p.sinks.as_ref().map_or(0, |sinks| sinks.strides[1] as u32),
            bytes: p.sinks.as_ref().map_or(0, |sinks| sinks.dtype.bytes() as u32),
        }
    }
}

impl<'k> Sinks<'k> {
    /// The sink of a head: −∞ where there is none.
    pub(super) fn of_head(&self, k: Kernel<'k>, ty: Half, head: Val<'k, u32>) -> Val<'k, f32> {
        let sink = k.var_named("sink", f32::NEG_INFINITY);
        let at = head * self.stride;
        k.when(self.bytes.eq(4), || sink.set(k.ld_global::<f32>(self.sinks.at(at, 4), 0)));
        k.when(self.bytes.eq(2), || {
            let half = k.ld_global::<u16>(self.sinks.at(at, 2), 0);
            sink.set(ty.widen(k, half));
        });
        sink.get()
    }
}

/// Where an optional tensor lies; some address of the problem where there is none.
fn at(p: &AttentionProblem, view: &Option<View>) -> Address {
    view.as_ref().map_or(element(&p.q, []), |view| element(view, []))
}

/// Blocks of keys that tile `tile` of `rows` queries goes through, lengths aside.
pub(super) fn blocks_of_tile(p: &AttentionProblem, rows: u32, block: u32, tile: u64) -> u64 {
    let (rows, block, keys) = (u64::from(rows), i64::from(block), p.s_kv as i64);
    let corner = if p.corner == Corner::BottomRight { keys - p.s_q as i64 } else { 0 };
    let (first, last) = ((tile * rows) as i64, ((tile + 1) * rows).min(p.s_q) as i64 - 1);
    let until = p.right.map_or(keys, |right| (last + corner + i64::from(right) + 1).clamp(0, keys));
    let from = p.left.map_or(0, |left| (first + corner - i64::from(left)).clamp(0, keys));
    ((until + block - 1) / block - from / block).max(1) as u64
}

/// What kernels ask of sinks and lengths that they read, and of the numbers of each query (their names, and where they lie) that they read or write.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require(id: EngineId, p: &AttentionProblem, of_queries: &[(&str, Option<&View>)]) -> Result<(), Refusal> {
    for (name, view) in of_queries.iter().filter_map(|(name, view)| Some((name, (*view)?))) {
        id.require(view.dtype == DType::F32, Reason::DType, format_args!("{name} of {}, taken is f32", view.dtype))?;
    }
    if let Some(sinks) = &p.sinks {
        let is_taken = sinks.dtype == DType::F32 || sinks.dtype == p.q.dtype;
        id.require(is_taken, Reason::DType, format_args!("sinks of {}, taken are f32 and {}", sinks.dtype, p.q.dtype))?;
        // They are read by words of 4 bytes in f32, and the kernel relies on that for both.
        let bytes = sinks.offset * sinks.dtype.bytes() as u64;
        id.require(bytes.is_multiple_of(4), Reason::Alignment, format_args!("sinks begin {bytes} bytes into their buffer"))?;
        let is_near = sinks.strides[1].checked_mul(p.h).is_some_and(|last| last < 1 << 32);
        id.require(is_near, Reason::Layout, format_args!("sinks are {} elements apart", sinks.strides[1]))?;
    }
    for lengths in [&p.q_lengths, &p.kv_lengths].into_iter().flatten() {
        let is_near = lengths.strides[0].checked_mul(p.b).is_some_and(|last| last < 1 << 32);
        id.require(is_near, Reason::Layout, format_args!("lengths are {} elements apart", lengths.strides[0]))?;
    }
    Ok(())
}
