//! Queries, keys and values of 8 bits: their factors, and the launch in front that turns the values.
//!
//! `wgmma` has no transposed form for operands of a byte: both lie along the depth that is summed over, which of the second product is keys. So a launch in
//! front writes values as `[batch][head][element][key]` into the workspace, with zeros for the keys that do not count. Within 16 keys they stand in the order in
//! which a thread has its scores: an accumulator gives lane `t` of four the columns `8i + 2t` and `8i + 2t + 1`, an operand A of bytes takes `4t` to `4t + 3`, and
//! so P stays in its registers if position `4t + e` is that of key `8 · (e / 2) + 2t + e mod 2`.

use verdigris_graph::{AttentionProblem, View};
use verdigris_kir::face::{Header, Kernel, Pointer, Val, build};
use verdigris_kir::inst::Cache;
use verdigris_kir::ir::{MapDecl, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{Address, KernelRef, Launch, MapSpec, Program};
use verdigris_tensor::DType;

use super::super::half::Half;
use super::super::mapped;
use super::super::tile::head_map;
use crate::engine::{EngineId, Reason, Refusal};
use crate::layout::space::element;

/// Probabilities are rounded to e4m3 as 2⁸ times their size: the greatest is 256, of numbers up to 448.
pub(super) const LIFT: f32 = 8.0;

/// Keys that a thread turns: those whose order is another within the values that are turned.
const GROUP: u32 = 16;

const THREADS: u32 = 128;

verdigris_kir::parameters! {
    /// f32, one of each batch and head of keys, with the bytes from one to the next; and whether they are there.
    pub(super) struct Descales / #[derive(Clone, Copy, Debug)] DescaleArgs of () as _spec {
        q: Read = 4,
        q_strides: [u64; 2],
        k: Read = 4,
        k_strides: [u64; 2],
        v: Read = 4,
        v_strides: [u64; 2],
        given: [u32; 3],
    }
}

/// The factors of a head.
#[derive(Clone, Copy)]
pub(super) struct HeadDescales<'k> {
    /// Of queries times that of keys.
    of_products: Val<'k, f32>,
    pub(super) v: Val<'k, f32>,
}

impl DescaleArgs {
    pub(super) fn of(p: &AttentionProblem) -> DescaleArgs {
        let all = [&p.q_descale, &p.k_descale, &p.v_descale];
        let [q, k, v] = all.map(|view| element(view.as_ref().unwrap_or(&p.q), []));
        let [q_strides, k_strides, v_strides] = all.map(|view| view.as_ref().map_or([0; 2], |view| [0, 1].map(|i| view.strides[i] * 4)));
        DescaleArgs { q, q_strides, k, k_strides, v, v_strides, given: all.map(|view| u32::from(view.is_some())) }
    }
}

impl<'k> Descales<'k> {
    pub(super) fn of_head(&self, k: Kernel<'k>, batch: Val<'k, u32>, kv_head: Val<'k, u32>) -> HeadDescales<'k> {
        let factor = |at: Pointer<'k>, [of_batch, of_head]: [Val<'k, u64>; 2], given: Val<'k, u32>| {
            let factor = k.var_named("descale", 1.0f32);
            let at = at.moved(batch.widen() * of_batch + kv_head.widen() * of_head);
            k.when(given.ne(0), || factor.set(k.ld_global::<f32>(at.address(), 0)));
            factor.get()
        };
        let of_q = factor(self.q, self.q_strides, self.given[0]);
        let of_k = factor(self.k, self.k_strides, self.given[1]);
        HeadDescales { of_products: of_q * of_k, v: factor(self.v, self.v_strides, self.given[2]) }
    }
}

impl<'k> HeadDescales<'k> {
    /// The scale of the products of a head; above 0, for the scores that are masked are −∞ times it.
    pub(super) fn of_score(&self, scale: Val<'k, f32>) -> Val<'k, f32> {
        (self.of_products * scale).max(f32::MIN_POSITIVE)
    }
}

verdigris_kir::parameters! {
    pub(super) struct Turn / TurnArgs of () as _spec {
        v: Read = 4,
        /// Bytes from one batch, head and key to the next.
        strides_bytes: [u64; 3],
        /// `[batch][head][element][key]`, keys rounded up to whole groups.
        to: Write = 16,
        keys: u32,
        /// Threads that have something to turn: a group of keys by four elements each.
        all: u32,
        groups: Divide,
        /// Fours of elements of a value.
        fours: Divide,
        heads: Divide,
        /// Lengths of each batch (i32), the bytes from one to the next, and whether there are any.
        lengths: Read = 4,
        length_stride: u64,
        has_lengths: u32,
    }
}

/// Turns values; those of keys that do not count become 0, whatever they are.
fn turn(k: Kernel<'_>) {
    let Turn { v, strides_bytes, to, keys, all, groups, fours, heads, lengths, length_stride, has_lengths } = Turn::declare(k, &());
    k.griddep_wait();
    k.griddep_launch();
    let own = k.cta() * THREADS + k.thread();
    k.when(own.lt(all), || {
        let (outer, four) = fours.split(own);
        let (outer, group) = groups.split(outer);
        let (batch, head) = heads.split(outer);
        let count = k.var_named("count", keys);
        k.when(has_lengths.ne(0), || {
            let length = k.ld_global::<i32>(lengths.moved(batch.widen() * length_stride).address(), 0);
            count.set(length.max(0).min(keys.signed()).unsigned());
        });
        let [of_batch, of_head, of_key] = strides_bytes;
        let column = v.moved(batch.widen() * of_batch + head.widen() * of_head + (four << 2).widen());
        // Four elements of each key; the last key stands in for those that are not there.
        let words: Vec<Val<'_, u32>> = (0..GROUP)
            .map(|i| {
                let key = group * GROUP + i;
                let word = k.ld_global::<u32>(column.moved(key.min(keys - 1).widen() * of_key).address(), 0);
                k.select(key.lt(count.get()), word, 0u32)
            })
            .collect();
        // The keys of positions 4t to 4t + 3, and of each of the four elements a word of them.
        let turned = (0..4).map(|t| turn_bytes([0, 1, 8, 9].map(|key: usize| words[key + 2 * t]))).collect::<Vec<_>>();
        let row_bytes = groups.value() * GROUP;
        let row = outer.mul_wide(fours.value() << 2) + (four << 2).widen();
        for element in 0..4 {
            let at = to.moved((row + element as u64) * row_bytes.widen() + (group * GROUP).widen());
            let line: Vec<_> = turned.iter().map(|words| words[element]).collect();
            k.st_global_vector(at.address(), 0, &line, Cache::Default);
        }
    });
}

/// Word `i` of the result has byte `i` of each word.
fn turn_bytes([a, b, c, d]: [Val<'_, u32>; 4]) -> [Val<'_, u32>; 4] {
    let [low, high] = [0x5140u32, 0x7362].map(|pairs| (a.prmt(b, pairs), c.prmt(d, pairs)));
    [low.0.prmt(low.1, 0x5410u32), low.0.prmt(low.1, 0x7632u32), high.0.prmt(high.1, 0x5410u32), high.0.prmt(high.1, 0x7632u32)]
}

/// The kernel that turns values.
pub(super) fn turning() -> KernelRef {
    let name = "attention_forward_e4m3_turn_values".to_owned();
    let header = Header { name: name.clone(), target: Target::Sm90, threads: THREADS, ..Header::default() };
    KernelRef::new(name, move || build(header.clone(), turn))
}

/// Keys of a row of values that are turned.
fn padded(p: &AttentionProblem) -> u64 {
    p.s_kv.next_multiple_of(u64::from(GROUP))
}

/// Threads of the launch that turns values.
fn threads(p: &AttentionProblem) -> u64 {
    (p.b * p.h_kv).saturating_mul(padded(p) / u64::from(GROUP)).saturating_mul(p.d_v / 4)
}

/// Bytes of the values that are turned.
pub(super) fn turned_bytes(p: &AttentionProblem) -> u64 {
    p.b * p.h_kv * p.d_v * padded(p)
}

/// Adds the launch in front to a program: where the values lie that it leaves, and the map through which `decl` reads them.
pub(super) fn add_turning(p: &AttentionProblem, program: &mut Program, decl: MapDecl) -> (Address, MapSpec) {
    let turned = program.add_scratch("values", turned_bytes(p));
    let args = TurnArgs {
        v: element(&p.v, []),
        strides_bytes: [0, 1, 2].map(|i| p.v.strides[i]),
        to: turned,
        keys: p.s_kv as u32,
        all: threads(p) as u32,
        groups: (padded(p) / u64::from(GROUP)) as u32,
        fours: (p.d_v / 4) as u32,
        heads: p.h_kv as u32,
        lengths: element(p.kv_lengths.as_ref().unwrap_or(&p.q), []),
        length_stride: p.kv_lengths.as_ref().map_or(0, |lengths| lengths.strides[0] * 4),
        has_lengths: u32::from(p.kv_lengths.is_some()),
    };
    let ctas = threads(p).div_ceil(u64::from(THREADS)) as u32;
    program.launch(Launch::new(turning(), [ctas, 1, 1], args.bound(&())).overlapping());
    let keys = padded(p);
    (turned, head_map(decl, [keys, p.d_v, p.h_kv, p.b], [keys, keys * p.d_v, keys * p.d_v * p.h_kv]))
}

/// What the engine asks of a problem of 8 bits; gives the type of its result.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require(id: EngineId, p: &AttentionProblem, o: &View) -> Result<Half, Refusal> {
    id.require(p.q.dtype == DType::E4m3, Reason::DType, format_args!("{}, taken of 8 bits is e4m3", p.q.dtype))?;
    let ty = mapped::half(id, o.dtype)?;
    mapped::require_maps(id, p, mapped::MOST_ELEMENTS, &[("q", &p.q), ("k", &p.k), ("v", &p.v), ("o", o)])?;
    id.require(p.d_v.is_multiple_of(4), Reason::Extent, format_args!("values of {} elements of 8 bits, taken are multiples of 4", p.d_v))?;
    id.require(threads(p) < 1 << 31, Reason::Extent, "more values of 8 bits than a launch of 2^31 threads turns")?;
    for (name, given) in [("sequences behind each other", p.is_ragged()), ("paged keys", p.is_paged()), ("dropout", p.dropout.is_some())] {
        id.require(!given, Reason::Layout, format_args!("{name} of 8 bits, taken without"))?;
    }
    Ok(ty)
}
