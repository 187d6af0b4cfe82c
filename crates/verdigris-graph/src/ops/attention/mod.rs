//! Attention: softmax of scaled products of queries and keys, times the values, and its gradient.
//!
//! `q` is `[b, h, s_q, d]`, `k` is `[b, h_kv, s_kv, d]`, `v` is `[b, h_kv, s_kv, d_v]` and `o` is `[b, h, s_q, d_v]`, each with any strides, so that the order
//! of heads and positions in memory and queries, keys and values packed into one buffer are layouts. `h` is a multiple of `h_kv`: head `n` of the queries
//! reads head `n / (h / h_kv)` of keys and values. Of each batch and head, for query `i` and key `j`:
//!
//! ```text
//! score     t[i, j] = scale · Σ q[i] · k[j]          u = score(t), soft_cap · tanh(t / soft_cap), or t
//!           s[i, j] = u + bias[i, j] − slope · |i + shift − j|          −∞ where j is not attended from i
//! forward   L[i] = ln (Σ e^s[i, j] + e^sink)           p[i, j] = e^(s[i, j] − L[i])           o[i] = Σ p[i, j] · v[j]
//! backward  r[i] = Σ d_o[i] · o[i]          ds[i, j] = p[i, j] · (Σ d_o[i] · v[j] − r[i])          dt = ds · ∂score / ∂t, ds · (1 − (u / soft_cap)²), or ds
//!           dq[i] = scale · Σ dt[i, j] · k[j]       dk[j] = scale · Σ dt[i, j] · q[i]       dv[j] = Σ p[i, j] · d_o[i]
//!           dbias = Σ ds over what `bias` was repeated over          dsinks[h] = −Σ e^(sink − L[i]) · r[i]
//! ```
//!
//! Key `j` is attended from query `i` if `mask[i, j]` is not 0, `i < q_lengths`, `j < kv_lengths` (each where it is there), and `j` is in the window around
//! the diagonal: `i + corner − left ≤ j ≤ i + corner + right`. The diagonal begins in the corner of the first query and the first key (`corner = 0`) for
//! `top_left`, and ends in that of the last ones (`corner = shift`) for `bottom_right`, as it does for windows where nothing is causal; causal is a `right` of 0.
//! `shift` is `s_kv − s_q`, or the difference of the lengths where they are given.
//!
//! The greatest score of a query is that of the keys attended from it, `max s[i, j]`, without the sink; it is a number for those who watch how large scores become, and no gradient goes through it.
//! Where a score is NaN nothing is said of it.
//!
//! A query from which no key is attended has `o = 0`, its greatest score is −∞, and `L = −∞`, or the sink. Queries from `q_lengths` on have `o = 0`, `L = −∞` and a greatest score of −∞, and give nothing to
//! any gradient; nor does a query whose `L` is −∞. A length counts as 0 below 0 and as the extent above it. A key that is not attended may be multiplied by 0:
//! where it, or what is multiplied with it, is NaN or ∞, a result may be NaN.
//!
//! With `q_offsets` and `kv_offsets` tensors are *ragged*: `b` sequences of different lengths lie behind each other, with nothing between them. Then `q` is
//! `[1, h, rows, d]`, `o` `[1, h, rows, d_v]`, `k` `[1, h_kv, rows of keys, d]` and so on, offsets are `[b + 1, 1, 1, 1]`, sequence `n` has the rows from offset
//! `n` to below offset `n + 1`, and `i` and `j` count from the first of them. `s_q` is `longest_q` and `s_kv` is `longest_kv`: no sequence has more, and what is
//! given for scores (bias, mask, slopes, lengths) is of `b`, `s_q` and `s_kv`; the extent that a length counts up to is the sequence's own. Offsets come with the
//! data, and nothing is read or written outside of tensors whatever they are: one counts as 0 below 0 and as the number of rows above that, a sequence whose end
//! lies in front of its begin is empty, and rows beyond `longest_q` or `longest_kv` of a sequence belong to none. What belongs to no sequence is not written on a
//! GPU, and 0 (its log-sum-exp and greatest score −∞) on the CPU; what belongs to two of them has no certain value.
//!
//! With a `page_table` keys and values are *paged*: `k` is `[pages, h_kv, page_size, d]` and `v` `[pages, h_kv, page_size, d_v]`, in any strides, and entry `e` of
//! sequence `n` of the table, `[b, entries, 1, 1]`, is the number of the page that holds its keys from `e · page_size` to below `(e + 1) · page_size`. `s_kv` is
//! `entries · page_size`, and `kv_lengths` say how many of those keys there are. Sequences may share pages. Entries come with the data, and nothing is read
//! outside of tensors whatever they are: one counts as 0 below 0 and as the last page above that. Of a sequence's entries those behind its length select no
//! key. Paged keys come without `kv_offsets`, and their attention has no gradient.
//!
//! With a `page_table` and `q_offsets` alone queries are ragged and keys paged, as in a batch of a serving engine: `q` is `[1, h, rows, d]`, sequence `n` has the
//! rows from offset `n` to below offset `n + 1`, at most `longest_q` of them, and the keys that line `n` of the table and `kv_lengths` tell. `b` is that of
//! the table, one less than offsets, and everything else is as above.
//!
//! With a `block_map` and `mask_blocks` pairs are attended to by blocks, of queries and keys that are neither ragged nor paged: `mask_blocks` are bits, u8
//! `[n, 1, block_q, block_kv / 8]`, key `j` of a block the bit `j % 8` of byte `j / 8`, and `block_map` is i32 and broadcasts to
//! `[b, h, ⌈s_q / block_q⌉, ⌈s_kv / block_kv⌉]`. Its entry of the block that has query `i` and key `j` says whether `j` is attended from `i`, with all that is said
//! above: of an entry of 0 it is not, of one below 0 it is, and of an entry `m` above 0 it is if its bit in mask block `m − 1` is 1. Entries come with the data, and
//! nothing is read outside of tensors whatever they are: one above `n` counts as `n`. Engines skip blocks that no query attends to, and read no mask of those that are
//! attended to as a whole.
//!
//! With a `score` a function of the caller's makes `u` of `t`: straight-line steps ([`ScoreFunction`]), which read `t`, numbers, the elements that belong to the pair of up to four
//! `score_operands`, each of which broadcasts to `[b, h, s_q, s_kv]`, and the pair's batch, head of queries, query and key as numbers. An operand may be a table in place of that,
//! `[b, h, s_q, n]` or what broadcasts to it, read at a place of its last dim that steps make of coordinates, numbers and operands: `table[head, query − key + n / 2]`. The place is rounded to a whole
//! number and brought into the table, whatever it is. Bias, slopes and all that says which
//! keys are attended come behind it, so that a key that is not attended stays so whatever the function gives. It may give −∞, which hides a pair; ∞ and NaN make a row NaN, as
//! a bias of them does. It comes in place of a soft cap, which would be one of its steps: beside each other nothing would say which is first. Its steps compute in the type that attention computes in,
//! and extents whose coordinates it reads in f32 are at most 2²⁴, so that each is exact. Its gradient multiplies by its slope, whose steps follow from its own by the rules of the pointwise ops
//! ([`ScoreFunction::slope`]): kinks are theirs, what a step rounds is passed on as if it did not, and together they are at most 256. A pair whose score is −∞ gives nothing to any gradient, whatever the slope
//! is there. What the function reads has a gradient too, where it is of reals: each element the sum over the pairs that read it, of a table those whose place it is
//! ([`ScoreFunction::operand_slope`]). A place is passed through by none.
//!
//! ```text
//! d_operand[e] = Σ ds[i, j] · ∂score / ∂operand over the pairs that read e
//! ```
//!
//! Values may be a part of the keys: where `v` is a slice of `k`, its first `d_v` elements, as of latent attention in its absorbed form, engines read it where
//! it lies ([`AttentionProblem::has_values_in_keys`](crate::AttentionProblem::has_values_in_keys)), and some of them once for both.
//!
//! With `dropout` each probability is dropped or kept at random, behind the softmax: the sums are of `p · m`, where `m` is 0 of a pair that is dropped and
//! `1 / (1 − dropout)` of one that is kept. The log-sum-exp is the same as without.
//!
//! ```text
//! forward   o[i] = Σ p[i, j] · m[i, j] · v[j]
//! backward  dv[j] = Σ p[i, j] · m[i, j] · d_o[i]          ds[i, j] = p[i, j] · (m[i, j] · Σ d_o[i] · v[j] − r[i])
//! ```
//!
//! Which pairs are dropped follows from a random state and the numbers of batch, head, query and key alone ([`DropoutMask`] has the rule): the gradient, given
//! the same state, draws the same mask, and nothing is stored. Of ragged tensors the batch is the sequence. A value whose probability is dropped is
//! multiplied by 0: where it is NaN or ∞, a result may be NaN.
//!
//! Queries, keys and values may be 8-bit floats, e4m3 or e5m2, and then come with factors, `q_descale`, `k_descale` and `v_descale`, of each batch and head of keys;
//! one that is not given is 1, and all are above 0: of others nothing is said. A head of queries has those of the head of keys that it reads. Tensor cores that multiply such numbers keep about 14 bits of a sum,
//! as `fp8_fast` says of products, and take `p` in e4m3: `2⁸ · p` beside the greatest score so far, rounded, so that the probabilities down to 2⁻¹⁴ keep four bits. There is no gradient.
//!
//! ```text
//! t[i, j] = scale · q_descale · k_descale · Σ q[i] · k[j]          o[i] = v_descale · Σ p[i, j] · v[j]
//! ```
//!
//! Keys and values alone may be 8-bit floats too, beside queries that are not, as a cache of keys and values is that takes half the memory. `k_descale` and `v_descale` may then be
//! given, and `q_descale` may not; keys and values are converted to the type of `q`, which rounds nothing, and everything else is as with keys and values of that type.
//!
//! Data are f16, bf16, f32 or f64, and queries, keys and values 8-bit floats too; `q`, `k` and `v` are alike, but for a cache of 8 bits. Arithmetic is in f32, in f64 if a tensor that is read is f64, and results are rounded once;
//! `p` and `dt` may be rounded to the type of `q` before they are multiplied, as tensor cores take them; a `dt` beyond 65504 may then be infinite in f16, as
//! it is in other libraries, and what it goes into with it (a loss scale that adapts steps over that).

mod build;
mod dropout;
mod read;
mod score;
mod slope;

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::Graph;
use crate::op::{HostScalar, Operation, Real, Role};
use crate::ops::pointwise::RandomState;
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{data, of_type, same_dims};
use read::{LOG_SUM_EXP, MAX_SCORES, Read, check_result};

pub use build::{Attended, AttentionGradients};
pub use dropout::DropoutMask;
pub(crate) use score::{OPERANDS, check_steps, entries_of, is_operand};
pub use score::{ScoreFunction, ScorePlace, ScoreStep};

const ATTRIBUTES: &[AttributeSpec] = &[
    AttributeSpec::new("spec.scale", "`{fixed: number}` or `{bound: uid}` of a host scalar", "finite", r#"{"bound":0}"#),
    AttributeSpec::new("spec.causal", "`none top_left bottom_right`", "", "\"left\"").or("\"none\""),
    AttributeSpec::new("spec.left", "number or null", "below 2³²", "-1").or("null"),
    AttributeSpec::new("spec.right", "number or null", "below 2³²", "-1").or("null"),
    AttributeSpec::new("spec.soft_cap", "number or null", "finite, above 0", "0.0").or("null"),
    AttributeSpec::new("spec.longest_q", "number or null", "below 2³², with `q_offsets`; all rows where it is left out", "-1").or("null"),
    AttributeSpec::new("spec.dropout", "number or null", "from 0 to 1, with `dropout_state`", "1.5").or("null"),
    AttributeSpec::new("spec.longest_kv", "number or null", "below 2³², with `kv_offsets`; all rows where it is left out", "-1").or("null"),
    AttributeSpec::new(
        "score",
        "steps in order, or null: `given`, `{number: x}`, `{operand: n}`, `{gather: {operand: n, x}}`, `{place: batch}` (`head`, `query`, `key`), `{unary: {f, x}}`, `{binary: {f, x, z}}`, `{ternary: {f, x, z, t}}`, \
         `{round: {dtype, x}}`; `x`, `z`, `t` are positions of earlier steps",
        "1 to 64 steps, each but the last named by a later one; without `soft_cap`",
        "[]",
    )
    .or("null"),
];

const SCORES: &str = "broadcasts to `[b, h, s_q, s_kv]`";
const SLOPES: &str = "f32, broadcasts to `[b, h, 1, 1]`";
const SINKS: &str = "`[1, h, 1, 1]`";
const LENGTHS: &str = "i32, `[b, 1, 1, 1]`";

const OFFSETS: &str = "i32, `[b + 1, 1, 1, 1]`; both or none. `q` and what is like it is then `[1, h, rows, d]`, `k` and `v` likewise";

const Q_OFFSETS: &str = "i32, `[b + 1, 1, 1, 1]`; with `kv_offsets` or a `page_table`. `q` and what is like it is then `[1, h, rows, d]`, with `kv_offsets` `k` and `v` likewise";

const KV_OFFSETS: &str = "i32, `[b + 1, 1, 1, 1]`; with `q_offsets`";

const TABLE: &str = "i32, `[b, entries, 1, 1]`, without `kv_offsets`. `k` is then `[pages, h_kv, page_size, d]`, `v` likewise, and `s_kv` is `entries · page_size`";

const BLOCK_MAP: &str = "with `mask_blocks`: i32, broadcasts to `[b, h, ⌈s_q / block_q⌉, ⌈s_kv / block_kv⌉]`; 0 leaves a block of pairs out, −1 takes all of it, `m` those of mask block `m − 1`";
const MASK_BLOCKS: &str =
    "with a `block_map`: u8, `[n, 1, block_q, block_kv / 8]`, a bit for each pair of a block, the first key in the lowest";

const SCORE_OPERANDS: &str = "with a `score`, at most 4: u8, i32, f16, bf16, f32 or f64, each broadcasts to `[b, h, s_q, s_kv]`; `{operand: n}` reads the one of that number; or a table that broadcasts to `[b, h, s_q, any]`, of which `{gather: {operand: n, x}}` reads the element at place `x`";

const DESCALE: &str = "of 8-bit floats: f32, broadcasts to `[b, h_kv, 1, 1]`; 1 where it is left out";

const STATE: &str = "with `dropout`: the random state, i32, `[4]`, or the seed, a host scalar of i64";
const STATE_OFFSET: &str = "with a seed: the offset, a host scalar of i64";

const FLOAT: &str = "attention is of f16, bf16, f32 and f64";

/// What queries, keys and values are.
pub(crate) const MULTIPLIED: &str = "attention is of 8-bit floats, f16, bf16, f32 and f64";

/// What keys and values are, beside queries.
pub(crate) const KEPT: &str =
    "queries, keys and values are of one type, or keys and values of one of 8 bits beside queries that are not, without a gradient";

/// Whether keys, or values, of this type may stand beside such queries.
pub(crate) fn is_kept(queries: DType, kept: DType) -> bool {
    kept == queries || (kept.is_fp8() && !queries.is_fp8())
}

/// Why there is no gradient of queries, keys and values of 8 bits.
const NO_GRADIENT: &str =
    "attention of 8-bit floats has no gradient; queries, keys and values are f16, bf16, f32 or f64 where one is wanted";

/// Whether attention takes data of this type.
pub(crate) fn is_taken(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::Bf16 | DType::F32 | DType::F64)
}

/// Whether queries, keys and values may be of this type.
pub(crate) fn is_multiplied(dtype: DType) -> bool {
    is_taken(dtype) || dtype.is_fp8()
}

fn float(op: &str, graph: &Graph, uid: Uid) -> Result<TensorDesc, Error> {
    let tensor = data(graph, op, uid)?;
    of_type(op, tensor, is_taken, FLOAT)?;
    Ok(tensor.clone())
}

fn multiplied(op: &str, graph: &Graph, uid: Uid) -> Result<TensorDesc, Error> {
    let tensor = data(graph, op, uid)?;
    of_type(op, tensor, is_multiplied, MULTIPLIED)?;
    Ok(tensor.clone())
}

/// Which keys lie behind the diagonal, and where the diagonal lies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Causal {
    /// No key is behind it.
    #[default]
    None,
    /// From the first query and the first key.
    TopLeft,
    /// To the last query and the last key.
    BottomRight,
}

/// What the forward and the backward op have in common besides tensors.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionSpec {
    /// Factor of the products of queries and keys.
    pub scale: HostScalar<Uid>,
    /// Whether keys behind the diagonal are left out.
    #[serde(default, skip_serializing_if = "is_none")]
    pub causal: Causal,
    /// Keys attended before the diagonal; all of them where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<u32>,
    /// Keys attended behind the diagonal; all of them where it is left out, none where the op is causal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub right: Option<u32>,
    /// Scores are kept between this and its negative, by a hyperbolic tangent; finite, above 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soft_cap: Option<Real>,
    /// Queries that the longest sequence of ragged tensors has at most; all rows where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_q: Option<u32>,
    /// Keys that the longest sequence of ragged tensors has at most; all rows where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_kv: Option<u32>,
    /// The probability that a probability is dropped, with a random state; nothing is where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout: Option<Real>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's skip_serializing_if passes a reference")]
fn is_none(causal: &Causal) -> bool {
    *causal == Causal::None
}

impl AttentionSpec {
    /// Every key attended, no cap.
    pub fn new(scale: f64) -> AttentionSpec {
        AttentionSpec {
            scale: HostScalar::Fixed(Real(scale)),
            causal: Causal::None,
            left: None,
            right: None,
            soft_cap: None,
            longest_q: None,
            longest_kv: None,
            dropout: None,
        }
    }

    /// Batch, queries and keys of the scores, from the dims of `q` and `k` and the number of offsets, where they are ragged, and of entries that a sequence
    /// has in the table of pages, where keys are paged.
    pub fn extents(&self, queries: &[u64; 4], keys: &[u64; 4], offsets: Option<u64>, entries: Option<u64>) -> [u64; 3] {
        let longest = |longest: Option<u32>, rows: u64| longest.map_or(rows, |longest| u64::from(longest).min(rows));
        let paged = entries.map(|entries| entries.saturating_mul(keys[2]));
        match offsets {
            None => [queries[0], queries[2], paged.unwrap_or(keys[2])],
            Some(offsets) => {
                let keys = paged.unwrap_or_else(|| longest(self.longest_kv, keys[2]));
                [offsets.saturating_sub(1), longest(self.longest_q, queries[2]), keys]
            }
        }
    }
}

/// Attention; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Scale, window, cap.
    pub spec: AttentionSpec,
    /// `[b, h, s_q, d]`, read.
    pub q: Uid,
    /// `[b, h_kv, s_kv, d]`, read.
    pub k: Uid,
    /// `[b, h_kv, s_kv, d_v]`, read.
    pub v: Uid,
    /// Read; added to the scores, to whose dims it broadcasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Uid>,
    /// Read; u8, broadcasts to the dims of the scores. 0 leaves a key out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<Uid>,
    /// Read; f32, broadcasts to `[b, h, 1, 1]`: what a score loses for each position between query and key (ALiBi).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slopes: Option<Uid>,
    /// Read; `[1, h, 1, 1]`: one more score of each query, with no value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sinks: Option<Uid>,
    /// Read; i32, `[b, 1, 1, 1]`: queries of each batch that count, the first ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q_lengths: Option<Uid>,
    /// Read; i32, `[b, 1, 1, 1]`: keys of each batch that count, the first ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_lengths: Option<Uid>,
    /// Read; i32, `[b + 1, 1, 1, 1]`: where the queries of each sequence begin, and the last ones end; with `kv_offsets` or a `page_table`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q_offsets: Option<Uid>,
    /// Read; i32, `[b + 1, 1, 1, 1]`: where the keys of each sequence begin, and the last ones end; with `q_offsets`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_offsets: Option<Uid>,
    /// Read; i32, `[b, entries, 1, 1]`: the page that holds so many keys and values of each sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_table: Option<Uid>,
    /// Read with `dropout`; the random state, four i32 in memory, or with `dropout_offset` the seed, a host scalar of i64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout_state: Option<Uid>,
    /// Read with a seed; a host scalar of i64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout_offset: Option<Uid>,
    /// Read; f32, broadcasts to `[b, h_kv, 1, 1]`: the factor of queries of 8 bits, of the heads that read a head of keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q_descale: Option<Uid>,
    /// Read; f32, broadcasts to `[b, h_kv, 1, 1]`: the factor of keys of 8 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub k_descale: Option<Uid>,
    /// Read; f32, broadcasts to `[b, h_kv, 1, 1]`: the factor of values of 8 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub v_descale: Option<Uid>,
    /// Read with `mask_blocks`; i32, broadcasts to `[b, h, ⌈s_q / block_q⌉, ⌈s_kv / block_kv⌉]`: which blocks of pairs are attended to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_map: Option<Uid>,
    /// Read with a `block_map`; u8, `[n, 1, block_q, block_kv / 8]`: of blocks that are attended to in part, a bit for each pair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_blocks: Option<Uid>,
    /// Steps that make the score of a scaled product, in place of a soft cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<ScoreFunction>,
    /// Read by the score function; each u8, i32, f16, bf16, f32 or f64, and broadcasts to `[b, h, s_q, s_kv]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub score_operands: Vec<Uid>,
    /// `[b, h, s_q, d_v]`, written.
    pub o: Uid,
    /// Written where asked for; `[b, h, s_q, 1]`: `L` of each query, in natural units.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_sum_exp: Option<Uid>,
    /// Written where asked for; `[b, h, s_q, 1]`: the greatest score of each query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_scores: Option<Uid>,
}

impl Attention {
    /// Of these alone; what is written is put in by [`GraphBuilder::attention`](crate::GraphBuilder::attention).
    pub fn new(spec: AttentionSpec, q: Uid, k: Uid, v: Uid) -> Attention {
        Attention {
            spec,
            q,
            k,
            v,
            bias: None,
            mask: None,
            slopes: None,
            sinks: None,
            q_lengths: None,
            kv_lengths: None,
            q_offsets: None,
            kv_offsets: None,
            page_table: None,
            dropout_state: None,
            dropout_offset: None,
            q_descale: None,
            k_descale: None,
            v_descale: None,
            block_map: None,
            mask_blocks: None,
            score: None,
            score_operands: Vec::new(),
            o: Uid(0),
            log_sum_exp: None,
            max_scores: None,
        }
    }

    fn read(&self) -> Read {
        let &Attention { spec, q, k, v, bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, page_table, .. } = self;
        let dropout = [self.dropout_state, self.dropout_offset];
        let descales = [self.q_descale, self.k_descale, self.v_descale];
        let blocks = [self.block_map, self.mask_blocks];
        Read {
            spec,
            q,
            k,
            v,
            bias,
            mask,
            slopes,
            sinks,
            q_lengths,
            kv_lengths,
            q_offsets,
            kv_offsets,
            page_table,
            dropout,
            descales,
            blocks,
            score: self.score.clone(),
            score_operands: self.score_operands.clone(),
        }
    }
}

impl Operation for Attention {
    const SPEC: OpSpec = OpSpec {
        name: "attention",
        summary: "Softmax of the scaled products of queries and keys, times the values.",
        forms: &[Form {
            name: "",
            formula: "o[i] = Σ p[i, j] · m[i, j] · v[j]          p = e^(s − log_sum_exp)          log_sum_exp = ln (Σ e^s + e^sink)\n\
                      s[i, j] = u + bias − slope · |i + s_kv − s_q − j|, −∞ where j is not attended\n\
                      u = score(scale · q[i] · k[j]), soft_cap · tanh(scale · q[i] · k[j] / soft_cap), or scale · q[i] · k[j]\n\
                      m = 1, with `dropout` 0 or 1 / (1 − dropout)",
            operands: &[
                OperandSpec::read("q", "`[b, h, s_q, d]`, e4m3, e5m2, f16, bf16, f32 or f64"),
                OperandSpec::read("k", "`[b, h_kv, s_kv, d]`, the type of `q`; `h` is a multiple of `h_kv`"),
                OperandSpec::read("v", "`[b, h_kv, s_kv, d_v]`, the type of `q`"),
                OperandSpec::read("bias", SCORES).optional(),
                OperandSpec::read("mask", "u8, broadcasts to `[b, h, s_q, s_kv]`; 0 leaves a key out").optional(),
                OperandSpec::read("slopes", SLOPES).optional(),
                OperandSpec::read("sinks", SINKS).optional(),
                OperandSpec::read("q_lengths", LENGTHS).optional(),
                OperandSpec::read("kv_lengths", LENGTHS).optional(),
                OperandSpec::read("q_offsets", Q_OFFSETS).optional(),
                OperandSpec::read("kv_offsets", KV_OFFSETS).optional(),
                OperandSpec::read("page_table", TABLE).optional(),
                OperandSpec::read("dropout_state", STATE).optional(),
                OperandSpec::read("dropout_offset", STATE_OFFSET).optional(),
                OperandSpec::read("q_descale", DESCALE).optional(),
                OperandSpec::read("k_descale", DESCALE).optional(),
                OperandSpec::read("v_descale", DESCALE).optional(),
                OperandSpec::read("block_map", BLOCK_MAP).optional(),
                OperandSpec::read("mask_blocks", MASK_BLOCKS).optional(),
                OperandSpec::read("score_operands", SCORE_OPERANDS).several().optional(),
                OperandSpec::written("o", "`[b, h, s_q, d_v]`"),
                OperandSpec::written("log_sum_exp", "f32 or f64, `[b, h, s_q, 1]`").optional(),
                OperandSpec::written("max_scores", "f32 or f64, `[b, h, s_q, 1]`: the greatest score of each query").optional(),
            ],
            attributes: ATTRIBUTES,
            shape: "`[b, h, s_q, d_v]`; `left` and `right` count keys from the diagonal, which is that of `bottom_right` where nothing is causal",
            gradient: "`attention_backward`; of 8-bit floats, of `slopes`, of what has a `page_table` and from `log_sum_exp` and `max_scores` refused",
            methods: &[Method::new(
                "attention",
                "q: Uid, k: Uid, v: Uid, *, scale: float | Uid | None = None, \
                 causal: Literal[\"none\", \"top_left\", \"bottom_right\"] = \"none\", left: int | None = None, right: int | None = None, \
                 soft_cap: float | None = None, bias: Uid | None = None, mask: Uid | None = None, slopes: Uid | None = None, \
                 sinks: Uid | None = None, q_lengths: Uid | None = None, kv_lengths: Uid | None = None, \
                 q_offsets: Uid | None = None, kv_offsets: Uid | None = None, longest_q: int | None = None, \
                 longest_kv: int | None = None, page_table: Uid | None = None, dropout: float | None = None, \
                 dropout_state: Uid | None = None, dropout_offset: Uid | None = None, q_descale: Uid | None = None, \
                 k_descale: Uid | None = None, v_descale: Uid | None = None, block_map: Uid | None = None, \
                 mask_blocks: Uid | None = None, score: Sequence[tuple[Any, ...]] | None = None, score_operands: Sequence[Uid] | None = None, \
                 max_scores: bool = False, name: str = \"attention\"",
            )
            .giving("tuple[Uid, Uid, *tuple[Uid, ...]]")],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        for input in [&mut self.q, &mut self.k, &mut self.v] {
            visit(Role::Input, input);
        }
        let options = [
            &mut self.bias,
            &mut self.mask,
            &mut self.slopes,
            &mut self.sinks,
            &mut self.q_lengths,
            &mut self.kv_lengths,
            &mut self.q_offsets,
            &mut self.kv_offsets,
            &mut self.page_table,
            &mut self.dropout_state,
            &mut self.dropout_offset,
            &mut self.q_descale,
            &mut self.k_descale,
            &mut self.v_descale,
            &mut self.block_map,
            &mut self.mask_blocks,
        ];
        for input in options.into_iter().flatten() {
            visit(Role::Input, input);
        }
        for input in &mut self.score_operands {
            visit(Role::Input, input);
        }
        if let HostScalar::Bound(uid) = &mut self.spec.scale {
            visit(Role::Input, uid);
        }
        visit(Role::Output, &mut self.o);
        for output in [&mut self.log_sum_exp, &mut self.max_scores].into_iter().flatten() {
            visit(Role::Output, output);
        }
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let dims = self.read().check(op, graph)?;
        let of_rows = [(self.log_sum_exp, LOG_SUM_EXP), (self.max_scores, MAX_SCORES)];
        check_result(op, graph, dims, self.o, &of_rows.map(|(uid, rules)| uid.map(|uid| (uid, rules))))
    }

    /// One backward op, from the result and the log-sum-exp; both are formed again where the forward op does not write the latter, or not wide enough.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let read = self.read();
        let Some(wanted) = read.floats().find(|&uid| at.wants(uid)) else { return Ok(()) };
        if self.log_sum_exp.is_some_and(|uid| at.of(uid).is_some()) {
            return at.refuse(wanted, "no gradient goes through the log-sum-exp of attention");
        }
        if self.max_scores.is_some_and(|uid| at.of(uid).is_some()) {
            return at.refuse(wanted, "no gradient goes through the greatest scores of attention");
        }
        let Some(d_o) = at.of(self.o) else { return Ok(()) };
        if at.tensor(self.k)?.dtype.is_fp8() {
            return at.refuse(wanted, NO_GRADIENT);
        }
        if self.page_table.is_some() {
            return at
                .refuse(wanted, "attention to paged keys has no gradient; keys and values lie in one tensor each where one is wanted");
        }
        if let Some(slopes) = self.slopes.filter(|&slopes| at.wants(slopes)) {
            return at.refuse(slopes, "the slopes of attention are no variables");
        }
        let compute = at.graph.compute_of(&at.name, &read.floats().collect::<Vec<_>>())?;
        let (o, log_sum_exp) = match self.log_sum_exp {
            Some(log_sum_exp) if at.keeps(log_sum_exp, compute)? => (self.o, log_sum_exp),
            _ => {
                let name = at.named("forward");
                let made = at.graph.attention(&name, Attention { max_scores: None, ..self.clone() })?;
                (made.o, made.log_sum_exp)
            }
        };
        // The gradient is an operand of products beside the values.
        let dtype = at.tensor(self.v)?.dtype;
        let d_o = at.round(d_o, dtype)?;
        let Read { spec, q, k, v, bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, .. } = read;
        let ([dropout_state, dropout_offset], [block_map, mask_blocks]) = (read.dropout, read.blocks);
        let back = AttentionBackward {
            bias,
            mask,
            slopes,
            sinks,
            q_lengths,
            kv_lengths,
            q_offsets,
            kv_offsets,
            dropout_state,
            dropout_offset,
            block_map,
            mask_blocks,
            score: read.score,
            score_operands: read.score_operands,
            ..AttentionBackward::new(spec, [q, k, v], o, log_sum_exp, d_o)
        };
        let of = back.variables();
        let asked: Vec<bool> = of.iter().map(|uid| uid.is_some_and(|uid| at.wants(uid))).collect();
        let name = at.name.clone();
        let given = at.graph.attention_backward_of(&name, back, &asked)?;
        for (of, gradient) in of.into_iter().zip(given) {
            if let (Some(of), Some(gradient)) = (of, gradient) {
                at.give(of, gradient)?;
            }
        }
        Ok(())
    }
}

/// The gradient of attention; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionBackward {
    /// That of the forward op.
    pub spec: AttentionSpec,
    /// `[b, h, s_q, d]`, read.
    pub q: Uid,
    /// `[b, h_kv, s_kv, d]`, read.
    pub k: Uid,
    /// `[b, h_kv, s_kv, d_v]`, read.
    pub v: Uid,
    /// Read where the forward op reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Uid>,
    /// Read where the forward op reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<Uid>,
    /// Read where the forward op reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slopes: Option<Uid>,
    /// Read for `dsinks`; the log-sum-exp holds what the other gradients need of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sinks: Option<Uid>,
    /// Read where the forward op reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q_lengths: Option<Uid>,
    /// Read where the forward op reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_lengths: Option<Uid>,
    /// Read where the forward op reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q_offsets: Option<Uid>,
    /// Read where the forward op reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_offsets: Option<Uid>,
    /// That of the forward op: the mask is drawn again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout_state: Option<Uid>,
    /// Read where the forward op reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout_offset: Option<Uid>,
    /// Read where the forward op reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_map: Option<Uid>,
    /// Read where the forward op reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_blocks: Option<Uid>,
    /// That of the forward op.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<ScoreFunction>,
    /// Read where the forward op reads them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub score_operands: Vec<Uid>,
    /// The forward result, read.
    pub o: Uid,
    /// The forward log-sum-exp, read.
    pub log_sum_exp: Uid,
    /// The gradient of `o`, read; its dims.
    pub d_o: Uid,
    /// Written where asked for; the dims of `q`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dq: Option<Uid>,
    /// Written where asked for; the dims of `k`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dk: Option<Uid>,
    /// Written where asked for; the dims of `v`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dv: Option<Uid>,
    /// Written where asked for; the dims of `bias`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dbias: Option<Uid>,
    /// Written where asked for; the dims of `sinks`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dsinks: Option<Uid>,
    /// Written where asked for, with the number of the score operand; the dims of that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub d_score_operands: Vec<Option<Uid>>,
}

impl AttentionBackward {
    /// Without options; what is written is put in by [`GraphBuilder::attention_backward`](crate::GraphBuilder::attention_backward).
    pub fn new(spec: AttentionSpec, [q, k, v]: [Uid; 3], o: Uid, log_sum_exp: Uid, d_o: Uid) -> AttentionBackward {
        AttentionBackward {
            spec,
            q,
            k,
            v,
            bias: None,
            mask: None,
            slopes: None,
            sinks: None,
            q_lengths: None,
            kv_lengths: None,
            q_offsets: None,
            kv_offsets: None,
            dropout_state: None,
            dropout_offset: None,
            block_map: None,
            mask_blocks: None,
            score: None,
            score_operands: Vec::new(),
            o,
            log_sum_exp,
            d_o,
            dq: None,
            dk: None,
            dv: None,
            dbias: None,
            dsinks: None,
            d_score_operands: Vec::new(),
        }
    }

    /// What there are gradients of, if it is there: queries, keys, values, bias, sinks, and score operands.
    pub(super) fn variables(&self) -> Vec<Option<Uid>> {
        let of_op = [Some(self.q), Some(self.k), Some(self.v), self.bias, self.sinks];
        of_op.into_iter().chain(self.score_operands.iter().copied().map(Some)).collect()
    }

    /// The gradients, in the same order.
    fn gradients(&self) -> impl Iterator<Item = Option<Uid>> {
        [self.dq, self.dk, self.dv, self.dbias, self.dsinks].into_iter().chain(self.d_score_operands.iter().copied())
    }

    fn read(&self) -> Read {
        let &AttentionBackward { spec, q, k, v, bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, .. } = self;
        let (page_table, dropout, descales) = (None, [self.dropout_state, self.dropout_offset], [None; 3]);
        let blocks = [self.block_map, self.mask_blocks];
        Read {
            spec,
            q,
            k,
            v,
            bias,
            mask,
            slopes,
            sinks,
            q_lengths,
            kv_lengths,
            q_offsets,
            kv_offsets,
            page_table,
            dropout,
            descales,
            blocks,
            score: self.score.clone(),
            score_operands: self.score_operands.clone(),
        }
    }

    fn floats(&self) -> impl Iterator<Item = Uid> {
        self.read().floats().chain([self.o, self.log_sum_exp, self.d_o])
    }
}

impl Operation for AttentionBackward {
    const SPEC: OpSpec = OpSpec {
        name: "attention_backward",
        summary: "The gradient of attention.",
        forms: &[Form {
            name: "",
            formula: "ds = p · (m · d_o · v − Σ d_o · o)          p = e^(s − log_sum_exp)          dt = ds · ∂score / ∂t, ds · (1 − (u / soft_cap)²), or ds\n\
                      dq = scale · Σ dt · k          dk = scale · Σ dt · q          dv = Σ p · m · d_o          dbias = Σ ds          \
                      dsinks = −Σ e^(sink − log_sum_exp) · Σ d_o · o          d_score_operand = Σ ds · ∂score / ∂operand",
            operands: &[
                OperandSpec::read("q", "`[b, h, s_q, d]`, f16, bf16, f32 or f64"),
                OperandSpec::read("k", "`[b, h_kv, s_kv, d]`, the type of `q`; `h` is a multiple of `h_kv`"),
                OperandSpec::read("v", "`[b, h_kv, s_kv, d_v]`, the type of `q`"),
                OperandSpec::read("bias", SCORES).optional(),
                OperandSpec::read("mask", "u8, broadcasts to `[b, h, s_q, s_kv]`; 0 leaves a key out").optional(),
                OperandSpec::read("slopes", SLOPES).optional(),
                OperandSpec::read("sinks", SINKS).optional(),
                OperandSpec::read("q_lengths", LENGTHS).optional(),
                OperandSpec::read("kv_lengths", LENGTHS).optional(),
                OperandSpec::read("q_offsets", OFFSETS).optional(),
                OperandSpec::read("kv_offsets", OFFSETS).optional(),
                OperandSpec::read("dropout_state", STATE).optional(),
                OperandSpec::read("dropout_offset", STATE_OFFSET).optional(),
                OperandSpec::read("block_map", BLOCK_MAP).optional(),
                OperandSpec::read("mask_blocks", MASK_BLOCKS).optional(),
                OperandSpec::read("score_operands", SCORE_OPERANDS).several().optional(),
                OperandSpec::read("o", "the forward result, `[b, h, s_q, d_v]`"),
                OperandSpec::read("log_sum_exp", "that of the forward op, f32 or f64, `[b, h, s_q, 1]`"),
                OperandSpec::read("d_o", "the dims of `o`"),
                OperandSpec::written("dq", "the dims of `q`").optional(),
                OperandSpec::written("dk", "the dims of `k`").optional(),
                OperandSpec::written("dv", "the dims of `v`").optional(),
                OperandSpec::written("dbias", "with `bias`; its dims").optional(),
                OperandSpec::written("dsinks", "with `sinks`; their dims").optional(),
                OperandSpec::written("d_score_operands", "by number of the `score_operands`, each null or with the dims of its operand").several().optional(),
            ],
            attributes: ATTRIBUTES,
            shape: "those of what each is the gradient of",
            gradient: "refused",
            methods: &[Method::new(
                "attention_backward",
                "q: Uid, k: Uid, v: Uid, o: Uid, log_sum_exp: Uid, d_o: Uid, *, scale: float | Uid | None = None, \
                 causal: Literal[\"none\", \"top_left\", \"bottom_right\"] = \"none\", left: int | None = None, right: int | None = None, \
                 soft_cap: float | None = None, bias: Uid | None = None, mask: Uid | None = None, slopes: Uid | None = None, \
                 sinks: Uid | None = None, q_lengths: Uid | None = None, kv_lengths: Uid | None = None, \
                 q_offsets: Uid | None = None, kv_offsets: Uid | None = None, longest_q: int | None = None, \
                 longest_kv: int | None = None, dropout: float | None = None, \
                 dropout_state: Uid | None = None, dropout_offset: Uid | None = None, block_map: Uid | None = None, \
                 mask_blocks: Uid | None = None, score: Sequence[tuple[Any, ...]] | None = None, score_operands: Sequence[Uid] | None = None, \
                 score_gradients: bool = False, name: str = \"attention_backward\"",
            )
            .giving("tuple[Uid, Uid, Uid, Uid | None, Uid | None, *tuple[Uid, ...]]")],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        for input in [&mut self.q, &mut self.k, &mut self.v] {
            visit(Role::Input, input);
        }
        let options = [
            &mut self.bias,
            &mut self.mask,
            &mut self.slopes,
            &mut self.sinks,
            &mut self.q_lengths,
            &mut self.kv_lengths,
            &mut self.q_offsets,
            &mut self.kv_offsets,
            &mut self.dropout_state,
            &mut self.dropout_offset,
            &mut self.block_map,
            &mut self.mask_blocks,
        ];
        for input in options.into_iter().flatten() {
            visit(Role::Input, input);
        }
        for input in &mut self.score_operands {
            visit(Role::Input, input);
        }
        if let HostScalar::Bound(uid) = &mut self.spec.scale {
            visit(Role::Input, uid);
        }
        for input in [&mut self.o, &mut self.log_sum_exp, &mut self.d_o] {
            visit(Role::Input, input);
        }
        let of_op = [&mut self.dq, &mut self.dk, &mut self.dv, &mut self.dbias, &mut self.dsinks];
        for output in of_op.into_iter().chain(&mut self.d_score_operands).flatten() {
            visit(Role::Output, output);
        }
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        for uid in [self.q, self.k] {
            of_type(op, data(graph, op, uid)?, is_taken, NO_GRADIENT)?;
        }
        let dims = self.read().check(op, graph)?;
        if let Some(score) = &self.score {
            score.slope(op)?;
        }
        check_result(op, graph, dims, self.o, &[Some((self.log_sum_exp, LOG_SUM_EXP))])?;
        same_dims(op, &float(op, graph, self.d_o)?, &dims, "the gradient of the result has its dims, `[b, h, s_q, d_v]`")?;
        for (number, _) in (0..).zip(&self.d_score_operands).filter(|(_, gradient)| gradient.is_some()) {
            self.score.as_ref().map(|score| score.operand_slope(op, number)).transpose()?;
        }
        let variables = self.variables();
        for (place, gradient) in self.gradients().enumerate() {
            let (Some(gradient), of) = (gradient, variables.get(place).copied().flatten()) else { continue };
            let gradient = float(op, graph, gradient)?;
            let Some(of) = of else {
                let rule = "there is a gradient of what is read";
                return Err(Error::Structure { op: op.to_owned(), tensor: gradient.name, rule });
            };
            let of = data(graph, op, of)?;
            of_type(op, of, is_taken, "there are gradients of reals")?;
            let dims = of.layout.dims().to_vec();
            same_dims(op, &gradient, &dims, "a gradient has the dims of what it is the gradient of")?;
        }
        if self.gradients().all(|gradient| gradient.is_none()) {
            let tensor = data(graph, op, self.q)?.name.clone();
            return Err(Error::Structure { op: op.to_owned(), tensor, rule: "at least one gradient is written" });
        }
        Ok(())
    }

    /// Refused: no op expresses it.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        match self.floats().find(|&uid| at.wants(uid)) {
            Some(uid) => at.refuse(uid, "the gradient of attention has no gradient as an op; compose it from products and softmax"),
            None => Ok(()),
        }
    }
}
