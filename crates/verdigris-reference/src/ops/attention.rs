//! Attention and its gradient: a query at a time, with its scores kept.
//!
//! **What results may be off by.** Let `ε` be the roundoff of the type computed in, `δ` what a score may be off by (its product of `d` terms as any
//! engine may form it, the cap, bias and slope one rounding each) and `n` the number of keys. An exponential has, beside its score's error, that of its
//! argument's rounding and of the function, and what a maximum that rises `n` times costs:
//!
//! ```text
//! η = δ + 8 ε · (|s| + |M| + 1) + 2⁻²⁰ + n · ε          M = the greatest score, of the backward op L
//! p   off by p · (e^η − 1), and by 2⁻¹²⁶
//! o   Σ p · (e^η − 1) · (|v| + |o|) + roundings of p to the type of v, of n products and of the sum
//! L   Σ p · (e^η − 1) + n · ε + 4 ε · (|M| + |L|) + 2⁻²⁰
//! ```
//!
//! What a score function adds is what its steps do in any pointwise chain, from the product's own error on: where a jump lies within that, either side is right. So are the steps of its slope, which is
//! 0 where the score is −∞.
//!
//! Of 8-bit floats `p` is rounded to e4m3 as 2⁸ times its size, and products are summed as `fp8_fast` sums them.
//!
//! What is rounded to the type of `q` before a product: `p` and `dt`, half a unit in the last place; of a `dt` beyond that type's range nothing is said. A key that is not attended counts as multiplied by 0
//! or not at all: where what it would multiply is not finite, nothing is said.
//!
//! With dropout, products are of `p` alone for the pairs that are kept and the factor follows: `m` is exact but for its rounding. A pair that is dropped counts as one
//! that is not attended where it multiplies.
//!
//! Paged keys are read one by one from the pages that the table names.
//!
//! Ragged tensors are read as if each sequence stood by itself: a row has a place in one sequence at most, and of one that has none nothing is said. Where
//! their keys are paged, each sequence has all of its line of the table.

mod draw;
mod function;
mod gradient;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use verdigris_graph::{Attention, AttentionBackward, AttentionSpec, Causal, Error, Graph, HostScalar, Pointwise, Precision, Real, Uid};
use verdigris_tensor::DType;
use verdigris_tensor::num::power_of_two;

use crate::fuzz::Draft;
use crate::operation::{Data, Evaluation, GraphError, Operation};
use crate::ops::matmul::SumOfBounded;
use crate::philox::State;
use crate::source::{Formula, Source};
use crate::tolerance::{Bounded, Range, half_ulp, roundoff};
use function::Function;
use gradient::{Backed, Gradients, Part};

/// Something of which nothing is said.
const UNKNOWN: Bounded = Bounded { value: 0.0, error: f64::INFINITY };

/// The score of a key that is attended.
#[derive(Clone, Copy, Debug)]
struct Score {
    key: u64,
    /// The scaled product.
    t: Bounded,
    /// With bias and slope.
    s: Bounded,
    /// The hyperbolic tangent under the cap; 0 without one.
    tanh: Bounded,
    /// The slope of the function; 1 without one.
    slope: Bounded,
}

/// The keys that a query attends.
struct Row {
    scores: Vec<Score>,
    /// The greatest score, or the sink.
    greatest: f64,
    /// `Σ e^(s − M)`, the sink's part included.
    sum: f64,
    /// `e^(s − M)` of each score over the sum, and what it may be off by, relative to it: every element of the result reads them.
    parts: Vec<f64>,
    relatives: Vec<f64>,
}

/// Rows of one sequence, from `begin` on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sequence {
    begin: u64,
    count: u64,
}

/// The sequences that these offsets tell of `rows` rows, of which none has more than `longest`.
fn sequences(offsets: &Source<'_>, rows: u64, longest: u64) -> Option<Vec<Sequence>> {
    let known = |n: u64| {
        let offset = offsets.at(&[n, 0, 0, 0]);
        (offset.error == 0.0).then(|| offset.value.clamp(0.0, rows as f64) as u64)
    };
    let of = |n: u64| {
        let (begin, end) = (known(n)?, known(n + 1)?);
        Some(Sequence { begin, count: end.saturating_sub(begin).min(longest) })
    };
    (0..offsets.dims()[0].saturating_sub(1)).map(of).collect()
}

/// What both ops read.
struct Scores<'a> {
    spec: AttentionSpec,
    scale: f64,
    q: Source<'a>,
    k: Source<'a>,
    v: Source<'a>,
    bias: Option<Source<'a>>,
    mask: Option<Source<'a>>,
    slopes: Option<Source<'a>>,
    sinks: Option<Source<'a>>,
    q_lengths: Option<Source<'a>>,
    kv_lengths: Option<Source<'a>>,
    /// Where queries are ragged, the rows of queries and of keys of each sequence; `None` if they are not known.
    ragged: Option<Option<Vec<[Sequence; 2]>>>,
    /// Where keys are paged, the numbers of their pages.
    page_table: Option<Source<'a>>,
    /// Which blocks of pairs are attended to, and the bits of those that are in part.
    blocks: Option<[Source<'a>; 2]>,
    /// The probability that a pair is dropped, and what it is drawn from.
    dropout: Option<(f64, State)>,
    /// The factors of queries, keys and values of 8 bits.
    descales: [Option<Source<'a>>; 3],
    /// The function of scores, and what it reads.
    score: Option<Function<'a>>,
    /// Batch, queries and keys of scores.
    extents: [u64; 3],
    compute: DType,
    known: RefCell<HashMap<[u64; 3], Rc<Row>>>,
}

impl<'a> Scores<'a> {
    fn new(op: &Attention, compute: DType, at: &mut Evaluation<'a>) -> Result<Scores<'a>, GraphError> {
        let scale = match op.spec.scale {
            HostScalar::Fixed(real) => real.0,
            HostScalar::Bound(uid) => at.scalar(uid)?,
        };
        let (q, k, v) = (at.source(op.q)?, at.source(op.k)?, at.source(op.v)?);
        let (queries, keys) = (q.dims().to_vec(), k.dims().to_vec());
        let four = |dims: &[u64]| -> [u64; 4] { std::array::from_fn(|i| dims[i]) };
        let of_q = op.q_offsets.map(|uid| at.source(uid)).transpose()?;
        let of_kv = op.kv_offsets.map(|uid| at.source(uid)).transpose()?;
        let page_table = op.page_table.map(|uid| at.source(uid)).transpose()?;
        let (offsets, entries) = (of_q.as_ref().map(|offsets| offsets.dims()[0]), page_table.as_ref().map(|table| table.dims()[1]));
        let extents = op.spec.extents(&four(&queries), &four(&keys), offsets, entries);
        let ragged = of_q.map(|of_q| {
            let of_q = sequences(&of_q, queries[2], extents[1])?;
            let of_kv = match of_kv {
                Some(of_kv) => sequences(&of_kv, keys[2], extents[2])?,
                None => vec![Sequence { begin: 0, count: extents[2] }; of_q.len()],
            };
            Some(of_q.into_iter().zip(of_kv).map(|(q, kv)| [q, kv]).collect())
        });
        let scores = [extents[0], queries[1], extents[1], extents[2]];
        let state = match (op.dropout_state, op.dropout_offset) {
            (Some(seed), Some(offset)) => Some(State::by_value([at.scalar(seed)?, at.scalar(offset)?])),
            (Some(state), None) => Some(State::in_memory(&at.source(state)?)),
            _ => None,
        };
        let masks = op.mask_blocks.map(|uid| at.source(uid)).transpose()?;
        let score = op.score.clone().map(|score| Function::new(score, &op.score_operands, scores, at)).transpose()?;
        let mut over = |uid: Option<Uid>, dims: [u64; 4]| uid.map(|uid| Ok::<_, GraphError>(at.source(uid)?.broadcast(&dims))).transpose();
        let ([b, h, ..], h_kv) = (scores, keys[1]);
        let blocks = masks.map(|masks| {
            let (block_q, block_kv) = (masks.dims()[2], 8 * masks.dims()[3]);
            let grid = [b, h, scores[2].div_ceil(block_q), scores[3].div_ceil(block_kv)];
            Ok::<_, GraphError>(over(op.block_map, grid)?.map(|map| [map, masks]))
        });
        let of_heads = [b, h_kv, 1, 1];
        let descales = [over(op.q_descale, of_heads)?, over(op.k_descale, of_heads)?, over(op.v_descale, of_heads)?];
        Ok(Scores {
            spec: op.spec,
            scale,
            bias: over(op.bias, scores)?,
            mask: over(op.mask, scores)?,
            slopes: over(op.slopes, [b, h, 1, 1])?,
            sinks: over(op.sinks, [1, h, 1, 1])?,
            q_lengths: over(op.q_lengths, [b, 1, 1, 1])?,
            kv_lengths: over(op.kv_lengths, [b, 1, 1, 1])?,
            ragged,
            page_table,
            blocks: blocks.transpose()?.flatten(),
            dropout: op.spec.dropout.map(|p| p.0).zip(state),
            descales,
            score,
            extents,
            q,
            k,
            v,
            compute,
            known: RefCell::default(),
        })
    }

    /// The head of keys that a head of queries reads.
    fn kv_head(&self, head: u64) -> u64 {
        head / (self.q.dims()[1] / self.k.dims()[1]).max(1)
    }

    fn precision(&self) -> Precision {
        match self.compute {
            DType::F64 => Precision::F64,
            _ if self.q.dtype().is_fp8() => Precision::Fp8Fast,
            _ => Precision::Fp32,
        }
    }

    /// A sum times the factor of queries, keys or values (`which` from 0 to 2).
    fn descaled(&self, which: usize, [b, h]: [u64; 2], sum: Bounded) -> Bounded {
        let Some(descales) = &self.descales[which] else { return sum };
        let factor = descales.at(&[b, self.kv_head(h), 0, 0]);
        if which < 2 && factor.value.is_nan() || factor.value <= 0.0 {
            return UNKNOWN;
        }
        let product = sum.scaled(factor.value, self.compute);
        Bounded::new(product.value, product.error + factor.error * (sum.value.abs() + sum.error), self.compute)
    }

    /// Lengths of a batch; `None` if one is not known.
    fn lengths(&self, b: u64) -> Option<[u64; 2]> {
        let length = |lengths: &Option<Source<'_>>, extent: u64| match lengths {
            None => Some(extent),
            Some(lengths) => {
                let length = lengths.at(&[b, 0, 0, 0]);
                (length.error == 0.0).then(|| length.value.clamp(0.0, extent as f64) as u64)
            }
        };
        let [of_q, of_kv] = self.own(b)?;
        Some([length(&self.q_lengths, of_q.count)?, length(&self.kv_lengths, of_kv.count)?])
    }

    /// The queries and the keys of a batch; `None` if they are not known.
    fn own(&self, b: u64) -> Option<[Sequence; 2]> {
        match &self.ragged {
            None => Some([self.extents[1], self.extents[2]].map(|count| Sequence { begin: 0, count })),
            Some(sequences) => sequences.as_ref()?.get(b as usize).copied(),
        }
    }

    /// Where query or key (`which` 0 or 1) `i` of a batch stands: batch and row of the tensors.
    fn place(&self, which: usize, b: u64, i: u64) -> [u64; 2] {
        if let Some(table) = self.page_table.as_ref().filter(|_| which == 1) {
            let [pages, page_size] = [0, 2].map(|dim| self.k.dims()[dim]);
            let page = table.at(&[b, i / page_size, 0, 0]).value.clamp(0.0, (pages - 1) as f64) as u64;
            return [page, i % page_size];
        }
        match &self.ragged {
            None => [b, i],
            // Of sequences that are not known nothing is read.
            Some(_) => [0, self.own(b).map_or(0, |own| own[which].begin) + i],
        }
    }

    /// The sequence and the place in it of row `row` of a tensor's batch `b`; `None` where it lies in none, in several, or where nobody knows.
    fn within(&self, which: usize, b: u64, row: u64) -> Option<[u64; 2]> {
        let Some(sequences) = &self.ragged else { return Some([b, row]) };
        let holds = |own: &[Sequence; 2]| (own[which].begin..own[which].begin + own[which].count).contains(&row);
        let sequences = sequences.as_ref()?;
        let found = sequences.iter().position(holds)?;
        let is_alone = !sequences[found + 1..].iter().any(holds);
        is_alone.then(|| [found as u64, row - sequences[found][which].begin])
    }

    /// An element of a query.
    fn query(&self, [b, h, i]: [u64; 3], e: u64) -> Bounded {
        let [b, row] = self.place(0, b, i);
        self.q.at(&[b, h, row, e])
    }

    /// An element of a key.
    fn key(&self, [b, kv_head, j]: [u64; 3], e: u64) -> Bounded {
        let [b, row] = self.place(1, b, j);
        self.k.at(&[b, kv_head, row, e])
    }

    /// An element of a value.
    fn value(&self, [b, kv_head, j]: [u64; 3], e: u64) -> Bounded {
        let [b, row] = self.place(1, b, j);
        self.v.at(&[b, kv_head, row, e])
    }

    /// Queries and keys of a batch, those beyond a length included.
    fn counts(&self, b: u64) -> [u64; 2] {
        self.own(b).map_or([0; 2], |own| own.map(|sequence| sequence.count))
    }

    /// What a pair's probability is multiplied by: 0 if it is dropped. `None` if nobody knows.
    fn kept(&self, [b, h, i]: [u64; 3], j: u64) -> Option<f64> {
        let Some((p, state)) = self.dropout else { return Some(1.0) };
        let is_dropped = state.is_dropped(b * self.q.dims()[1] + h, i, j, p)?;
        Some(if is_dropped || p == 1.0 { 0.0 } else { 1.0 / (1.0 - p) })
    }

    /// Whether the window around the diagonal has key `j` for query `i`.
    fn in_window(&self, i: u64, j: u64, [s_q, s_kv]: [u64; 2]) -> bool {
        let shift = s_kv as i64 - s_q as i64;
        let corner = if self.spec.causal == Causal::TopLeft { 0 } else { shift };
        let right = if self.spec.causal == Causal::None { self.spec.right } else { Some(0) };
        let (diagonal, j) = (i as i64 + corner, j as i64);
        self.spec.left.is_none_or(|left| j >= diagonal - i64::from(left)) && right.is_none_or(|right| j <= diagonal + i64::from(right))
    }

    /// The score of a pair that is attended.
    fn score(&self, [b, h, i]: [u64; 3], j: u64, [s_q, s_kv]: [u64; 2]) -> Score {
        let compute = self.compute;
        let unit = roundoff(compute);
        let mut product = SumOfBounded::default();
        let ([q_b, q_row], [k_b, k_row]) = (self.place(0, b, i), self.place(1, b, j));
        let (q, k) = (self.q.offset(&[q_b, h, q_row, 0]), self.k.offset(&[k_b, self.kv_head(h), k_row, 0]));
        let (q_step, k_step) = (self.q.strides()[3], self.k.strides()[3]);
        let elements = self.q.dims()[3];
        for e in 0..elements {
            product.add(self.q.get(q + e * q_step), self.k.get(k + e * k_step));
        }
        let t = product.finish(self.precision(), self.q.dtype(), elements, false).scaled(self.scale, compute);
        let t = self.descaled(1, [b, h], self.descaled(0, [b, h], t));
        let (mut s, mut tanh, mut slope) = (t, Bounded::exact(0.0), Bounded::exact(1.0));
        if let Some(Real(cap)) = self.spec.soft_cap {
            let value = (t.value / cap).tanh();
            // A tangent keeps its digits, but that of tensor cores, which take caps of up to 4,096: it loses what lies below the roundoff of 1, by a few
            // approximate instructions. Below the normal numbers only places are left.
            let (relative, absolute) = match compute {
                DType::F64 => (power_of_two(-46), f64::MIN_POSITIVE),
                _ => (power_of_two(-20), if cap <= 4096.0 { power_of_two(-21) } else { power_of_two(-147) }),
            };
            let own = relative * value.abs() + absolute;
            // A product whose partial sums leave the range may be no number.
            let is_known = !t.value.is_nan() && t.error.is_finite();
            tanh = if !is_known { t } else { Bounded { value, error: (t.error / cap).min(2.0) + own } };
            s = if !is_known { t } else { Bounded::new(cap * value, t.error.min(2.0 * cap) + cap * own, compute) };
        }
        if let Some(score) = &self.score {
            [s, slope] = function::made(score, t, [b, h, i, j], compute);
        }
        let mut add = |part: Bounded| {
            let value = s.value + part.value;
            s = Bounded::new(value, s.error + part.error + 2.0 * unit * (s.value.abs() + part.value.abs()), compute);
        };
        if let Some(bias) = &self.bias {
            add(bias.at(&[b, h, i, j]));
        }
        if let Some(slopes) = &self.slopes {
            let distance = (i as i64 + s_kv as i64 - s_q as i64 - j as i64).abs();
            add(slopes.at(&[b, h, 0, 0]).scaled(-(distance as f64), compute));
        }
        if s.value == f64::NEG_INFINITY {
            slope = Bounded::exact(0.0);
        }
        Score { key: j, t, s, tanh, slope }
    }

    /// The keys of a query; `None` if it is not known which.
    fn row(&self, at: [u64; 3]) -> Option<Rc<Row>> {
        if let Some(row) = self.known.borrow().get(&at) {
            return Some(Rc::clone(row));
        }
        let [b, h, i] = at;
        let lengths = self.lengths(b)?;
        let mut scores = Vec::new();
        if i < lengths[0] {
            for j in (0..lengths[1]).filter(|&j| self.in_window(i, j, lengths)) {
                if !self.is_in_blocks([b, h, i, j])? {
                    continue;
                }
                let mask = self.mask.as_ref().map_or(Bounded::exact(1.0), |mask| mask.at(&[b, h, i, j]));
                if mask.error > 0.0 {
                    return None;
                }
                if mask.value != 0.0 {
                    scores.push(self.score(at, j, lengths));
                }
            }
        }
        let sink = self.sink(h).filter(|_| i < lengths[0]).map(|sink| sink.value);
        let values = || scores.iter().map(|score| score.s.value).chain(sink);
        let greatest = values().fold(f64::NEG_INFINITY, |a, b| if b > a || b.is_nan() { b } else { a });
        let sum = values().map(|s| if greatest == f64::NEG_INFINITY { 0.0 } else { (s - greatest).exp() }).sum();
        let parts = scores.iter().map(|score| (score.s.value - greatest).exp() / sum).collect();
        let relatives = scores.iter().map(|score| self.relative_of(score.s, greatest)).collect();
        let row = Rc::new(Row { scores, greatest, sum, parts, relatives });
        self.known.borrow_mut().insert(at, Rc::clone(&row));
        Some(row)
    }

    /// Whether the map of blocks lets a pair through; `None` if that is not known.
    fn is_in_blocks(&self, [b, h, i, j]: [u64; 4]) -> Option<bool> {
        let Some([map, masks]) = &self.blocks else { return Some(true) };
        let [count, _, block_q, bytes] = std::array::from_fn(|dim| masks.dims()[dim]);
        let entry = map.at(&[b, h, i / block_q, j / (8 * bytes)]);
        if entry.error > 0.0 {
            return None;
        }
        if entry.value <= 0.0 {
            return Some(entry.value < 0.0);
        }
        let byte = masks.at(&[(entry.value as u64).min(count) - 1, 0, i % block_q, j / 8 % bytes]);
        (byte.error == 0.0).then(|| byte.value as u64 >> (j % 8) & 1 == 1)
    }

    fn sink(&self, h: u64) -> Option<Bounded> {
        self.sinks.as_ref().map(|sinks| sinks.at(&[0, h, 0, 0]))
    }

    /// What an exponential may be off by, relative to it, where its argument is `s` less something of size `from`.
    fn relative(&self, s: Bounded, from: f64) -> f64 {
        let unit = roundoff(self.compute);
        let of_function = if self.compute == DType::F64 { power_of_two(-46) } else { power_of_two(-20) };
        let keys = self.extents[2] as f64;
        (s.error + 8.0 * unit * (s.value.abs() + from.abs() + 1.0) + of_function + keys * unit).exp_m1()
    }

    /// What the part of a score `s` in its row may be off by, relative to it.
    fn relative_of(&self, s: Bounded, greatest: f64) -> f64 {
        if s.value == f64::NEG_INFINITY { 0.0 } else { self.relative(s, greatest) }
    }

    /// What is lost of an exponential that is too small.
    fn vanishing(&self) -> f64 {
        if self.compute == DType::F64 { power_of_two(-1022) } else { power_of_two(-126) }
    }

    /// What a factor of a product may lose by being rounded to the type of `q`; anything where that type does not reach so far.
    fn as_operand(&self, value: f64) -> f64 {
        match self.q.dtype() {
            DType::F32 | DType::F64 => 0.0,
            // As a number of e4m3 of 2⁸ times the size: four bits, and no more than the least of its numbers tells apart.
            dtype if dtype.is_fp8() => (value * power_of_two(-4)).max(power_of_two(-18)),
            dtype if value > Range::of(dtype).largest => f64::INFINITY,
            dtype => half_ulp(dtype, value),
        }
    }

    /// A sum of products of which the first factors may be rounded to the type of `q`; `met` are those that what is not attended would multiply.
    fn products(&self, terms: impl Iterator<Item = (Bounded, Bounded)>, met: impl Iterator<Item = Bounded>) -> Bounded {
        let mut sum = SumOfBounded::default();
        let mut count = 0;
        for (a, b) in terms {
            sum.add(Bounded { value: a.value, error: a.error + self.as_operand(a.value.abs() + a.error) }, b);
            count += 1;
        }
        met.for_each(|b| sum.meet_padding(b));
        sum.finish(self.precision(), self.q.dtype(), count, false)
    }
}

/// Whether nothing can be said where one of these went in.
fn is_unknown(values: impl IntoIterator<Item = Bounded>) -> bool {
    values.into_iter().any(|value| value.error == f64::INFINITY || value.error.is_nan())
}

/// What is asked of attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    Result,
    LogSumExp,
    MaxScores,
}

/// Attention with what it reads: one of its results.
struct Attended<'a> {
    of: Rc<Scores<'a>>,
    asked: Asked,
}

impl Attended<'_> {
    /// The log-sum-exp of a row; `weight` is `Σ p · (e^η − 1)`.
    fn log_sum_exp(&self, row: &Row, weight: f64) -> Bounded {
        let unit = roundoff(self.of.compute);
        let value = row.greatest + row.sum.ln();
        let own = if self.of.compute == DType::F64 { power_of_two(-46) } else { power_of_two(-20) };
        let sum = weight / (1.0 - weight) + (row.scores.len() as f64 + 2.0) * unit + own;
        Bounded::new(value, sum + 4.0 * unit * (row.greatest.abs() + value.abs()), self.of.compute)
    }

    /// The greatest score of a row: which one it is found to be depends on what each may be off by.
    fn max_score(&self, row: &Row) -> Bounded {
        let most = |of: &dyn Fn(&Bounded) -> f64| row.scores.iter().map(|score| of(&score.s)).fold(f64::NEG_INFINITY, f64::max);
        let value = most(&|s| s.value);
        if value == f64::NEG_INFINITY {
            return Bounded::exact(value);
        }
        let (above, below) = (most(&|s| s.value + s.error) - value, value - most(&|s| s.value - s.error));
        // Engines may take the scale behind the maximum.
        Bounded::new(value, above.max(below) + 2.0 * roundoff(self.of.compute) * value.abs(), self.of.compute)
    }
}

impl Formula for Attended<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let of = &self.of;
        let &[b, h, i, e] = index else { return UNKNOWN };
        let Some([b, i]) = of.within(0, b, i) else { return UNKNOWN };
        let Some(row) = of.row([b, h, i]) else { return UNKNOWN };
        let sink = of.sink(h).filter(|_| of.lengths(b).is_some_and(|[s_q, _]| i < s_q));
        if is_unknown(row.scores.iter().map(|score| score.s).chain(sink)) {
            return UNKNOWN;
        }
        if self.asked == Asked::MaxScores {
            let is_number = row.scores.iter().all(|score| score.s.value < f64::INFINITY);
            return if is_number { self.max_score(&row) } else { UNKNOWN };
        }
        if row.greatest == f64::NEG_INFINITY {
            // No key counts: of those that are attended, each has a score of −∞.
            return Bounded::exact(if self.asked == Asked::LogSumExp { f64::NEG_INFINITY } else { 0.0 });
        }
        if row.greatest.is_nan() || row.greatest == f64::INFINITY {
            return if self.asked == Asked::LogSumExp || of.dropout.is_some() { UNKNOWN } else { Bounded::exact(f64::NAN) };
        }
        let of_sink = sink.map_or(0.0, |sink| (sink.value - row.greatest).exp() / row.sum * of.relative_of(sink, row.greatest));
        let weight = of_sink + row.parts.iter().zip(&row.relatives).map(|(part, relative)| part * relative).sum::<f64>();
        if weight > 0.25 {
            return UNKNOWN;
        }
        if self.asked == Asked::LogSumExp {
            return self.log_sum_exp(&row, weight);
        }
        let values = |j: u64| of.value([b, of.kv_head(h), j], e);
        let Some(kept) = row.scores.iter().map(|score| of.kept([b, h, i], score.key)).collect::<Option<Vec<f64>>>() else { return UNKNOWN };
        let mut counting = row.scores.iter().zip(&row.parts).zip(&kept).filter(|((_, part), m)| **m > 0.0 && **part > power_of_two(-60));
        let is_nan = counting.any(|((score, _), _)| values(score.key).value.is_nan());
        let all = || (0..of.counts(b)[1]).map(values);
        if all().any(|v| !v.value.is_finite()) {
            // NaN in a key that counts is the result; ∞ and what counts for nothing may make it one.
            return if is_nan { Bounded::exact(f64::NAN) } else { UNKNOWN };
        }
        if row.scores.is_empty() {
            return Bounded::exact(0.0);
        }
        let (mut value, mut error, mut size) = (0.0, of_sink, 0.0);
        let vanishing = of.vanishing() / row.sum;
        let mut terms = Vec::with_capacity(row.scores.len());
        for ((score, (&p, &relative)), &m) in row.scores.iter().zip(row.parts.iter().zip(&row.relatives)).zip(&kept) {
            let v = values(score.key);
            value += p * m * v.value;
            size += p * m * (v.value.abs() + v.error);
            terms.push((p, relative, v, m));
        }
        error *= value.abs();
        for (p, relative, v, m) in terms {
            error += (p * relative + vanishing) * (m * (v.value.abs() + v.error) + value.abs()) / (1.0 - weight);
            // Rounded beside the greatest of its row, or of the keys up to it.
            error += m * (of.as_operand(p * row.sum) / row.sum * (v.value.abs() + v.error) + p * v.error);
        }
        let unit = roundoff(of.compute);
        error += (2.0 * row.scores.len() as f64 + 8.0) * 2.0 * unit * size;
        if of.q.dtype().is_fp8() {
            // As `fp8_fast` has it, of one more step for each block of keys that shrinks what is there.
            error += 4.0 * (row.scores.len().div_ceil(32) as f64 + 2.0) * power_of_two(-13) * size;
        }
        let tiny = if of.compute == DType::F64 { power_of_two(-1074) } else { power_of_two(-149) };
        of.descaled(2, [b, h], Bounded::new(value, error + (row.scores.len() as f64 + 2.0) * tiny, of.compute))
    }

    fn compute(&self) -> DType {
        self.of.compute
    }
}

/// The type of arithmetic on these tensors.
fn compute_of(at: &Evaluation<'_>, read: impl Iterator<Item = Uid>) -> Result<DType, GraphError> {
    Ok(Pointwise::compute_dtype(read.map(|uid| Ok(at.described(uid)?.dtype)).collect::<Result<Vec<_>, GraphError>>()?))
}

fn floats(op: &Attention) -> impl Iterator<Item = Uid> + use<'_> {
    let descales = [op.q_descale, op.k_descale, op.v_descale];
    let options = [Some(op.q), Some(op.k), Some(op.v), op.bias, op.slopes, op.sinks].into_iter().chain(descales).flatten();
    options.chain(op.score_operands.iter().copied())
}

/// What a tensor of options holds.
fn data_of<'g>(op: &Attention, graph: &Graph, uid: Uid) -> Data<'g> {
    let rows = |uid: Uid| graph.tensor(uid).map_or(0, |tensor| tensor.layout.dims()[2]);
    let longest = |longest: Option<u32>, uid: Uid| longest.map_or(rows(uid), |longest| rows(uid).min(u64::from(longest)));
    let dim = |uid: Option<Uid>, dim: usize| uid.and_then(|uid| graph.tensor(uid)).map(|tensor| tensor.layout.dims()[dim]);
    let extent = |uid: Uid| match dim(op.page_table, 1).filter(|_| uid == op.k) {
        None => longest(if uid == op.q { op.spec.longest_q } else { op.spec.longest_kv }, uid),
        Some(entries) => entries.saturating_mul(rows(uid)),
    };
    // One length in five is none: beyond the extent, or below 0.
    if op.q_lengths == Some(uid) {
        Data::Labels(extent(op.q) + 1, Some(extent(op.q) as i64 + 3))
    } else if op.kv_lengths == Some(uid) {
        Data::Labels(extent(op.k) + 1, Some(-2))
    } else if op.q_offsets == Some(uid) {
        Data::Offsets(rows(op.q), extent(op.q))
    } else if op.kv_offsets == Some(uid) {
        Data::Offsets(rows(op.k), extent(op.k))
    } else if op.page_table == Some(uid) {
        Data::Pages(dim(Some(op.k), 0).unwrap_or(1))
    } else if op.block_map == Some(uid) {
        // Of each kind, and beyond the last mask.
        Data::Labels(dim(op.mask_blocks, 0).unwrap_or(1) + 2, Some(-1))
    } else if op.mask_blocks == Some(uid) {
        Data::Labels(256, None)
    } else if op.mask == Some(uid) {
        Data::Truth
    } else if [op.q_descale, op.k_descale, op.v_descale].contains(&Some(uid)) {
        Data::Factors
    } else {
        Data::Any(op.q == uid)
    }
}

/// The forward op of a backward one.
fn forward_of(op: &AttentionBackward) -> Attention {
    let &AttentionBackward { spec, q, k, v, bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, .. } = op;
    let &AttentionBackward { dropout_state, dropout_offset, block_map, mask_blocks, .. } = op;
    let (score, score_operands) = (op.score.clone(), op.score_operands.clone());
    let plain = Attention { score, score_operands, dropout_state, dropout_offset, block_map, mask_blocks, ..Attention::new(spec, q, k, v) };
    Attention { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, ..plain }
}

impl Operation for Attention {
    const DRAWS: u64 = 2;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let compute = compute_of(at, floats(self))?;
        let of = Rc::new(Scores::new(self, compute, at)?);
        let results = [(Asked::Result, Some(self.o)), (Asked::LogSumExp, self.log_sum_exp), (Asked::MaxScores, self.max_scores)];
        for (asked, uid) in results {
            if let Some(uid) = uid {
                at.put(uid, Attended { of: Rc::clone(&of), asked })?;
            }
        }
        Ok(())
    }

    fn data_of(&self, graph: &Graph, uid: Uid) -> Data<'_> {
        data_of(self, graph, uid)
    }

    fn draw(draft: &mut Draft, nth: u64) -> Result<(), Error> {
        draft.attention(nth == 1)
    }
}

impl Operation for AttentionBackward {
    // The forward op's draws make some of these.
    const DRAWS: u64 = 0;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let forward = forward_of(self);
        let compute = compute_of(at, floats(&forward).chain([self.o, self.log_sum_exp, self.d_o]))?;
        let mut of = Scores::new(&forward, compute, at)?;
        of.score = of.score.map(Function::sloped);
        let (o, log_sum_exp, d_o) = (at.source(self.o)?, at.source(self.log_sum_exp)?, at.source(self.d_o)?);
        let slope_by = |number: u32| self.score.as_ref().and_then(|score| score.operand_slope("attention", number).ok());
        let sloped_by = (0..self.score_operands.len() as u32).map(|number| slope_by(number).unwrap_or_default()).collect();
        let of = Rc::new(Gradients::new(of, [o, log_sum_exp, d_o], sloped_by));
        let bias = self.dbias.map(|uid| at.dims(uid)).transpose()?.unwrap_or_default().to_vec();
        let parts = [
            (Part::Queries, self.dq),
            (Part::Keys, self.dk),
            (Part::Values, self.dv),
            (Part::Bias(bias), self.dbias),
            (Part::Sinks, self.dsinks),
        ];
        for (part, uid) in parts {
            if let Some(uid) = uid {
                at.put(uid, Backed { of: Rc::clone(&of), part })?;
            }
        }
        for (number, uid) in (0..).zip(&self.d_score_operands) {
            if let Some(uid) = *uid {
                let part = Part::Operand(number, at.dims(uid)?.to_vec());
                at.put(uid, Backed { of: Rc::clone(&of), part })?;
            }
        }
        Ok(())
    }

    fn data_of(&self, graph: &Graph, uid: Uid) -> Data<'_> {
        data_of(&forward_of(self), graph, uid)
    }

    fn draw(draft: &mut Draft, nth: u64) -> Result<(), Error> {
        draft.attention(nth == 1)
    }
}
