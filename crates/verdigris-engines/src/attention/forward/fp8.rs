//! Queries, keys and values of 8 bits: the launch in front that turns the values.
//!
//! `wgmma` has no transposed form for operands of a byte: both lie along the depth that is summed over, which of the second product is keys. So a launch in
//! front writes values as `[batch][head][element][key]` into the workspace, with zeros for the keys that do not count. Within 16 keys they stand in the order in
//! which a thread has its scores: an accumulator gives lane `t` of four the columns `8i + 2t` and `8i + 2t + 1`, an operand A of bytes takes `4t` to `4t + 3`, and
//! so P stays in its registers if position `4t + e` is that of key `8 · (e / 2) + 2t + e mod 2`.
//!
//! That order is what `ldmatrix` gives anyway, transposed: it takes bytes two by two, so that lane `4p + t` has elements `2p` and `2p + 1` of the keys `2t` and
//! `2t + 1` of each eight, which are those of positions `4t` to `4t + 3` of either element. Two permutations of bytes sort them, and `stmatrix` writes them as rows of keys.
//! Tiles come and leave by TMA, in lines of 128 bytes on both sides; it reads zeros where there are no keys or elements, and writes none.

use verdigris_graph::{AttentionProblem, View};
use verdigris_kir::face::{Header, Kernel, LoadOptions, build};
use verdigris_kir::ir::{Access, MapDecl, MapType, Target};
use verdigris_kir::params::{Divide, Map, Read};
use verdigris_kir::program::{Address, KernelRef, Launch, MapSpec, Program, SECTOR_BYTES};
use verdigris_tensor::DType;

use super::super::half::Half;
use super::super::mapped;
use super::super::tile::{HeadTile, head_map};
use crate::engine::{EngineId, Reason, Refusal};
use crate::hopper::roles;
use crate::layout::space::element;

/// Probabilities are rounded to e4m3 as 2⁸ times their size: the greatest is 256, of numbers up to 448.
pub(super) const LIFT: f32 = 8.0;

/// Keys and elements of a tile of values that a CTA turns, in place.
const TILE: HeadTile = HeadTile { rows: 128, elements: 128, ty: MapType::U8 };

/// Keys that a warp turns: two groups of 16.
const OWN_KEYS: u32 = 32;

const THREADS: u32 = TILE.rows / OWN_KEYS * 32;

/// Elements that `ldmatrix` reads of a key.
const STEP: u32 = 16;

/// Bytes 0 and 2 of two words, and with the other bit bytes 1 and 3.
const EVEN: u32 = 0x6420;
const OTHER: u32 = 0x1111;

verdigris_kir::parameters! {
    pub(super) struct Turn / TurnArgs of () as _spec {
        /// `{elements, keys, heads, batch}`.
        v: Map = TILE.map(Access::Read),
        /// `{keys, elements, heads, batch}`.
        to: Map = TILE.map(Access::Write),
        /// Tiles along the elements of a value.
        across: Divide,
        heads: Divide,
        /// Tiles along the keys.
        along: Divide,
        /// Lengths of each batch (i32), the bytes from one to the next, and whether there are any.
        lengths: Read = 4,
        length_stride: u64,
        has_lengths: u32,
    }
}

/// Turns values; those of keys that do not count become 0, whatever they are.
fn turn(k: Kernel<'_>) {
    let Turn { v, to, across, heads, along, lengths, length_stride, has_lengths } = Turn::declare(k, &());
    let tile = k.shared("tile", TILE.bytes(), 1024).address();
    let full = k.mbarrier_array("full", 1);
    full.arrivals().set(1);
    let init = || {
        full.init();
        [&v, &to].into_iter().for_each(|map| k.prefetch_tensormap(map));
    };
    roles::start(k, init, || {});

    // Heads in front of keys: what runs together lies side by side, whichever of the two is the outer dim.
    let (outer, column) = across.split(k.cta());
    let (outer, head) = heads.split(outer);
    let (batch, row) = along.split(outer);
    let (first_element, first_key) = (column * TILE.elements, row * TILE.rows);
    let full = full.at(0);
    k.when(k.thread().eq(0), || {
        full.arrive_expect_tx(TILE.bytes());
        k.tma_load(tile, &v, &[first_element, first_key, head, batch].map(|at| at.signed()), full, LoadOptions::default());
    });
    full.wait(0);
    k.when(has_lengths.ne(0), || {
        // Beyond a length anything may stand: 0 · NaN is NaN.
        let length = k.ld_global::<i32>(lengths.moved(batch.widen() * length_stride).address(), 0);
        let counting = (length.max(0) - first_key.signed()).max(0).unsigned().min(TILE.rows);
        TILE.clear(tile, counting, [0, THREADS]);
        k.bar_sync();
    });

    // Lane 8i + r names row r of matrix i: of what is read, a key of the warp's; of what is written, 16 keys of an element. Elements of the upper half of a
    // matrix are odd where those of the lower one are even, so that its eight rows stand in different banks.
    let (warp, lane) = (k.warp(), k.lane());
    let own_key = warp * OWN_KEYS + lane;
    let bytes = ((lane >> 4) * OTHER) ^ EVEN;
    let turned: Vec<_> = (0..TILE.elements / STEP)
        .map(|step| {
            let keys = k.ldmatrix(4, true, TILE.chunk(tile, own_key, k.constant(step % 2), step / 2), 0);
            [(0, bytes), (0, bytes ^ OTHER), (2, bytes), (2, bytes ^ OTHER)].map(|(group, bytes)| keys[group].prmt(keys[group + 1], bytes))
        })
        .collect();
    k.bar_sync();
    let (matrix, of_matrix) = (lane >> 3, lane & 7);
    let element = of_matrix * 2 + ((matrix & 1) ^ (of_matrix >> 2));
    let group = warp * 2 + (matrix >> 1);
    for (step, words) in (0..).zip(&turned) {
        k.stmatrix(false, TILE.chunk(tile, element + step * STEP, group, 0), 0, words);
    }
    k.fence_proxy_async();
    k.bar_sync();
    k.when(k.thread().eq(0), || {
        k.tma_store(&to, &[first_key, first_element, head, batch].map(|at| at.signed()), tile);
        k.bulk_commit();
        k.bulk_wait(0);
    });
}

/// The kernel that turns values.
pub(super) fn turning() -> KernelRef {
    let name = "attention_forward_e4m3_turn_values".to_owned();
    let header = Header { name: name.clone(), target: Target::Sm90, threads: THREADS, ..Header::default() };
    KernelRef::new(name, move || build(header.clone(), turn))
}

/// Keys of a row of values that are turned: whole sectors, which are whole groups of 16.
fn padded(p: &AttentionProblem) -> u64 {
    p.s_kv.next_multiple_of(SECTOR_BYTES)
}

/// Tiles of the launch that turns values: along the elements, and along the keys.
fn tiles(p: &AttentionProblem) -> [u64; 2] {
    [p.d_v.div_ceil(u64::from(TILE.elements)), p.s_kv.div_ceil(u64::from(TILE.rows))]
}

/// CTAs of that launch.
fn ctas(p: &AttentionProblem) -> u64 {
    let [across, along] = tiles(p);
    (p.b * p.h_kv).saturating_mul(across * along)
}

/// Bytes of the values that are turned.
pub(super) fn turned_bytes(p: &AttentionProblem) -> u64 {
    p.b * p.h_kv * p.d_v * padded(p)
}

/// Adds the launch in front to a program: the map through which `decl` reads the values that it leaves.
pub(super) fn add_turning(p: &AttentionProblem, program: &mut Program, decl: MapDecl) -> (Address, MapSpec) {
    let turned = program.add_scratch("values", turned_bytes(p));
    let keys = padded(p);
    let map = |decl| (turned, head_map(decl, [keys, p.d_v, p.h_kv, p.b], [keys, keys * p.d_v, keys * p.d_v * p.h_kv]));
    let [across, along] = tiles(p).map(|tiles| tiles as u32);
    let args = TurnArgs {
        v: mapped::map(TILE.map(Access::Read), &p.v, p.dims("v", &p.v)),
        to: map(TILE.map(Access::Write)),
        across,
        heads: p.h_kv as u32,
        along,
        lengths: element(p.kv_lengths.as_ref().unwrap_or(&p.q), []),
        length_stride: p.kv_lengths.as_ref().map_or(0, |lengths| lengths.strides[0] * 4),
        has_lengths: u32::from(p.kv_lengths.is_some()),
    };
    program.launch(Launch::new(turning(), [ctas(p) as u32, 1, 1], args.bound(&())).overlapping());
    map(decl)
}

/// What the engine asks of a problem of 8 bits; gives the type of its result.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require(id: EngineId, p: &AttentionProblem, o: &View) -> Result<Half, Refusal> {
    id.require(p.q.dtype == DType::E4m3, Reason::DType, format_args!("{}, taken of 8 bits is e4m3", p.q.dtype))?;
    let ty = mapped::half(id, o.dtype)?;
    mapped::require_maps(id, p, mapped::MOST_ELEMENTS, &[("q", &p.q), ("k", &p.k), ("v", &p.v), ("o", o)])?;
    id.require(
        ctas(p) < 1 << 31,
        Reason::Extent,
        format_args!("values of 8 bits in {} tiles of 128 × 128, taken are fewer than 2^31", ctas(p)),
    )?;
    for (name, given) in [("sequences behind each other", p.is_ragged()), ("paged keys", p.is_paged()), ("dropout", p.dropout.is_some())] {
        id.require(!given, Reason::Layout, format_args!("{name} of 8 bits, taken without"))?;
    }
    Ok(ty)
}
