//! Attention and its gradient.
//!
//! The formulas are those of [`crate::ops::attention`]. Every operand lies over four dims: batch, head, position of the query (of queries, scores and results)
//! or of the key (of keys and values), and element (of scores: position of the key). A dim that an operand does not have, or in which it is repeated, has
//! stride 0. A map of blocks lies over batch, head, block of queries and block of keys, and masks of blocks over mask, 1, query and byte of keys. With a table of pages, keys and values lie over page, head, position in the page and element. With offsets queries, keys, values and what lies as they do are ragged: of batch 1 and as many positions as they have rows; with those of queries
//! and a table of pages, queries and what lies as they do alone. Slots are numbered in the order of the fields.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::chain::{Chain, ChainStep, View};
use super::{Determinism, Operand, Slot, views};
use crate::error::Error;
use crate::op::{HostScalar, Real};
use crate::ops::attention::{self, KEPT, MULTIPLIED, ScoreFunction, is_kept, is_multiplied, is_taken};

/// The names of what a score function reads.
const SCORE_OPERANDS: [&str; ScoreFunction::MOST_OPERANDS] = ["score_0", "score_1", "score_2", "score_3"];

/// The names of their gradients.
pub(crate) const D_SCORE: [&str; ScoreFunction::MOST_OPERANDS] = ["d_score_0", "d_score_1", "d_score_2", "d_score_3"];

/// Leaves out what is behind the last one that is there.
pub(crate) fn trim<T>(list: &mut Vec<Option<T>>) {
    list.truncate(list.iter().rposition(Option::is_some).map_or(0, |last| last + 1));
}

/// Where the diagonal lies that windows are counted from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Corner {
    /// It begins at the first query and the first key.
    TopLeft,
    /// It ends at the last query and the last key of each batch.
    BottomRight,
}

/// What is computed.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[expect(clippy::large_enum_variant, reason = "a problem has one; it is looked at far more often than moved")]
pub enum AttentionPass {
    /// The result.
    Forward {
        /// Written; `[b, h, s_q, d_v]`.
        o: View,
        /// Written; one a query.
        log_sum_exp: Option<View>,
        /// Written; the greatest score of each query.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_scores: Option<View>,
    },
    /// Gradients, at least one.
    Backward {
        /// Read; `[b, h, s_q, d_v]`.
        o: View,
        /// Read; one a query.
        log_sum_exp: View,
        /// Read; `[b, h, s_q, d_v]`.
        d_o: View,
        /// Written; `[b, h, s_q, d]`.
        dq: Option<View>,
        /// Written; `[b, h_kv, s_kv, d]`.
        dk: Option<View>,
        /// Written; `[b, h_kv, s_kv, d_v]`.
        dv: Option<View>,
        /// Written; `[b, h, s_q, s_kv]`, or 1 in a dim of stride 0, over which it is summed. Canonical: stride 1 in an empty dim that is its own.
        dbias: Option<View>,
        /// Written; one a head.
        dsinks: Option<View>,
        /// Written, by number of what the score function reads; lies as `dbias` does, of a table over its entries in place of keys. Canonical: the last one is there.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        d_score: Vec<Option<View>>,
    },
}

/// Whether the operand of this name is summed over the dims in which it has stride 0.
fn is_summed(name: &str) -> bool {
    name == "dbias" || D_SCORE.contains(&name)
}

/// Attention; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionProblem {
    /// Batch.
    pub b: u64,
    /// Heads of queries.
    pub h: u64,
    /// Heads of keys and values; divides `h`.
    pub h_kv: u64,
    /// Queries; of the longest sequence at most, where tensors are ragged.
    pub s_q: u64,
    /// Keys; of the longest sequence at most, where they are ragged.
    pub s_kv: u64,
    /// Rows of queries of ragged tensors. Canonical: `s_q` where they are not.
    pub q_rows: u64,
    /// Rows of ragged keys. Canonical: `s_kv` where they are not.
    pub kv_rows: u64,
    /// Pages of keys and values. Canonical: 0 where there is no table of pages.
    pub pages: u64,
    /// Keys of a page, of which `s_kv` is a multiple. Canonical: 0 where there is no table of pages.
    pub page_size: u64,
    /// Masks of blocks. Canonical: 0 where there is no map of blocks.
    pub blocks: u64,
    /// Queries of a block. Canonical: 0 where there is no map of blocks.
    pub block_q: u64,
    /// Keys of a block, a multiple of 8. Canonical: 0 where there is no map of blocks.
    pub block_kv: u64,
    /// Elements of a query and of a key.
    pub d: u64,
    /// Elements of a value.
    pub d_v: u64,
    /// The type that is computed in: f64 if an operand that is read is f64, else f32.
    pub compute: DType,
    /// Whether two executions must agree bit for bit.
    pub determinism: Determinism,
    /// Where windows are counted from. Canonical: `top_left` where both corners are one, and where there is no window.
    pub corner: Corner,
    /// Keys attended before the diagonal. Canonical: `None` where it leaves nothing out.
    pub left: Option<u32>,
    /// Keys attended behind the diagonal; 0 for causal. Canonical: `None` where it leaves nothing out.
    pub right: Option<u32>,
    /// What scores are kept below.
    pub soft_cap: Option<Real>,
    /// Read; `[b, h, s_q, d]`.
    pub q: View,
    /// Read; `[b, h_kv, s_kv, d]`.
    pub k: View,
    /// Read; `[b, h_kv, s_kv, d_v]`.
    pub v: View,
    /// Read; over `[b, h, s_q, s_kv]`.
    pub bias: Option<View>,
    /// Read; u8, over `[b, h, s_q, s_kv]`.
    pub mask: Option<View>,
    /// Read; f32, one a batch and head.
    pub slopes: Option<View>,
    /// Read; one a head.
    pub sinks: Option<View>,
    /// Read; i32, one a batch.
    pub q_lengths: Option<View>,
    /// Read; i32, one a batch.
    pub kv_lengths: Option<View>,
    /// Read; i32, one more than batches. With it queries are ragged; keys are with `kv_offsets`, or they are paged.
    pub q_offsets: Option<View>,
    /// Read; i32, one more than batches.
    pub kv_offsets: Option<View>,
    /// Read; i32, one for each batch and page of its keys. With it keys and values are paged.
    pub page_table: Option<View>,
    /// The probability that a pair is dropped ([`crate::DropoutMask`]). Canonical: `None` where it is 0.
    pub dropout: Option<Real>,
    /// Read; i32, the four words of a random state. Canonical: `None` without dropout.
    pub dropout_state: Option<View>,
    /// Host scalars of i64, where the state is given by value: seed and offset. Canonical: `None` without dropout.
    pub dropout_seed: Option<[Slot; 2]>,
    /// Read; f32, one a batch and head of keys: the factor of queries of 8 bits.
    pub q_descale: Option<View>,
    /// Read; f32, one a batch and head of keys: the factor of keys of 8 bits.
    pub k_descale: Option<View>,
    /// Read; f32, one a batch and head of keys: the factor of values of 8 bits.
    pub v_descale: Option<View>,
    /// Read; i32, over `[b, h, ⌈s_q / block_q⌉, ⌈s_kv / block_kv⌉]`: which blocks of pairs are attended to.
    pub block_map: Option<View>,
    /// Read; u8, `[blocks, 1, block_q, block_kv / 8]`: of blocks that are attended to in part, a bit for each pair.
    pub mask_blocks: Option<View>,
    /// What makes a score of a scaled product, in place of a soft cap: the value of its last step. It loads views over `[b, h, s_q, s_kv]`, each once, and its indices are
    /// coordinates of these dims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<Chain>,
    /// Factor of the products.
    pub scale: HostScalar<Slot>,
    /// What is computed.
    pub pass: AttentionPass,
}

impl AttentionProblem {
    /// Heads of queries that read one head of keys.
    pub fn group(&self) -> u64 {
        self.h / self.h_kv
    }

    /// Whether the queries of sequences lie behind each other, told by offsets; their keys do too ([`AttentionProblem::has_ragged_keys`]), or are paged.
    pub fn is_ragged(&self) -> bool {
        self.q_offsets.is_some()
    }

    /// Whether the keys of sequences lie behind each other, told by offsets.
    pub fn has_ragged_keys(&self) -> bool {
        self.kv_offsets.is_some()
    }

    /// Whether keys and values lie in pages, told by a table.
    pub fn is_paged(&self) -> bool {
        self.page_table.is_some()
    }

    /// Whether each value is the first elements of its key, in the same memory, as of latent attention.
    pub fn has_values_in_keys(&self) -> bool {
        let (k, v) = (&self.k, &self.v);
        self.d_v <= self.d && k.slot == v.slot && k.offset == v.offset && k.strides == v.strides
    }

    /// Entries that a batch has in the table of pages; 0 without one.
    pub fn entries(&self) -> u64 {
        self.s_kv.checked_div(self.page_size).unwrap_or(0)
    }

    /// A problem of about as much work whose tensors are not ragged: each sequence has the mean length, of all rows; paged keys stay as they are. For
    /// estimates: nothing lies where it says.
    pub fn of_mean_length(&self) -> AttentionProblem {
        let mean = |longest: u64, rows: u64| longest.min(rows.div_ceil(self.b.max(1)));
        let s_q = mean(self.s_q, self.q_rows);
        let s_kv = if self.has_ragged_keys() { mean(self.s_kv, self.kv_rows) } else { self.s_kv };
        AttentionProblem { s_q, s_kv, q_rows: s_q, kv_rows: s_kv, q_offsets: None, kv_offsets: None, ..self.clone() }
    }

    /// Whether this is the gradient.
    pub fn is_backward(&self) -> bool {
        matches!(self.pass, AttentionPass::Backward { .. })
    }

    /// The operands in the order of slots, with their names and whether they are written.
    pub fn operands(&self) -> Vec<(&'static str, &View, bool)> {
        let mut list: Vec<_> = self.reads().map(|(name, view)| (name, Some(view), false)).collect();
        match &self.pass {
            AttentionPass::Forward { o, log_sum_exp, max_scores } => {
                list.extend([("o", Some(o), true), ("log_sum_exp", log_sum_exp.as_ref(), true), ("max_scores", max_scores.as_ref(), true)]);
            }
            AttentionPass::Backward { o, log_sum_exp, d_o, dq, dk, dv, dbias, dsinks, d_score } => {
                list.extend([
                    ("o", Some(o), false),
                    ("log_sum_exp", Some(log_sum_exp), false),
                    ("d_o", Some(d_o), false),
                    ("dq", dq.as_ref(), true),
                    ("dk", dk.as_ref(), true),
                    ("dv", dv.as_ref(), true),
                    ("dbias", dbias.as_ref(), true),
                    ("dsinks", dsinks.as_ref(), true),
                ]);
                list.extend(D_SCORE.into_iter().zip(d_score).map(|(name, view)| (name, view.as_ref(), true)));
            }
        }
        list.into_iter().filter_map(|(name, view, written)| Some((name, view?, written))).collect()
    }

    /// The operands that both passes read, with their names.
    fn reads(&self) -> impl Iterator<Item = (&'static str, &View)> {
        let AttentionProblem { q, k, v, .. } = self;
        let options = [
            ("bias", &self.bias),
            ("mask", &self.mask),
            ("slopes", &self.slopes),
            ("sinks", &self.sinks),
            ("q_lengths", &self.q_lengths),
            ("kv_lengths", &self.kv_lengths),
            ("q_offsets", &self.q_offsets),
            ("kv_offsets", &self.kv_offsets),
            ("page_table", &self.page_table),
            ("dropout_state", &self.dropout_state),
            ("q_descale", &self.q_descale),
            ("k_descale", &self.k_descale),
            ("v_descale", &self.v_descale),
            ("block_map", &self.block_map),
            ("mask_blocks", &self.mask_blocks),
        ];
        let options = options.into_iter().filter_map(|(name, view)| Some((name, view.as_ref()?)));
        [("q", q), ("k", k), ("v", v)].into_iter().chain(options).chain(self.score_operands())
    }

    /// What the score function reads, with its names.
    pub fn score_operands(&self) -> impl Iterator<Item = (&'static str, &View)> {
        // Of more than there may be, which are refused, the last name.
        let names = SCORE_OPERANDS.into_iter().chain(std::iter::repeat(SCORE_OPERANDS[SCORE_OPERANDS.len() - 1]));
        let loads = self.score.iter().flat_map(|score| score.loads().map(|(view, _)| view));
        names.zip(loads)
    }

    /// The function's steps and behind them, of the last one, its slope ([`ScoreFunction::slope`]); none without a function, or of one that has no slope. What is
    /// read is read by the function's own steps.
    pub fn sloped_score(&self) -> Option<Chain> {
        self.with_slope(|score| score.slope("attention"))
    }

    /// The same with its slope with respect to what it reads by this number ([`ScoreFunction::operand_slope`]).
    pub fn operand_sloped_score(&self, number: u32) -> Option<Chain> {
        self.with_slope(|score| score.operand_slope("attention", number))
    }

    fn with_slope(&self, slope: impl Fn(&ScoreFunction) -> Result<ScoreFunction, Error>) -> Option<Chain> {
        let score = self.score.as_ref()?;
        let sloped = slope(&ScoreFunction::under(score)).ok()?;
        let own = score.steps.len();
        // The slope names the function's steps by their positions, which loads have too.
        let made = ScoreFunction { steps: sloped.steps.get(own..)?.to_vec() }.over(|_| (self.q.clone(), 1));
        Some(Chain { steps: score.steps.iter().cloned().chain(made.steps).collect() })
    }

    /// The operand of a name, if it is there.
    pub fn operand(&self, name: &str) -> Option<&View> {
        self.operands().into_iter().find(|(known, ..)| *known == name).map(|(_, view, _)| view)
    }

    fn views_mut(&mut self) -> Vec<&mut View> {
        let AttentionProblem { q, k, v, bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, .. } = self;
        let options = [bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, &mut self.page_table];
        let last = [&mut self.dropout_state, &mut self.q_descale, &mut self.k_descale, &mut self.v_descale];
        let blocks = [&mut self.block_map, &mut self.mask_blocks];
        let of_score = self.score.iter_mut().flat_map(|score| &mut score.steps);
        let of_score = of_score.filter_map(|step| match step {
            ChainStep::Load { from, .. } | ChainStep::Gather { from, .. } => Some(from),
            _ => None,
        });
        let read = [q, k, v].into_iter().chain(options.into_iter().chain(last).chain(blocks).flatten()).chain(of_score);
        match &mut self.pass {
            AttentionPass::Forward { o, log_sum_exp, max_scores } => read.chain([o]).chain(log_sum_exp).chain(max_scores).collect(),
            AttentionPass::Backward { o, log_sum_exp, d_o, dq, dk, dv, dbias, dsinks, d_score } => {
                read.chain([o, log_sum_exp, d_o]).chain([dq, dk, dv, dbias, dsinks].into_iter().chain(d_score).flatten()).collect()
            }
        }
    }

    /// The dims that an operand of this name lies over; those of `dbias` and of the gradients of what the score function reads have 1 where `view` repeats it, even over nothing.
    pub fn dims(&self, name: &str, view: &View) -> [u64; 4] {
        let &AttentionProblem { b, h, h_kv, s_q, s_kv, d, d_v, .. } = self;
        let [own_b, q_rows] = if self.is_ragged() { [1, self.q_rows] } else { [b, s_q] };
        let [kv_b, kv_rows] = match self.is_paged() {
            true => [self.pages, self.page_size],
            false if self.has_ragged_keys() => [1, self.kv_rows],
            false => [b, s_kv],
        };
        match name {
            "q" | "dq" => [own_b, h, q_rows, d],
            "k" | "dk" => [kv_b, h_kv, kv_rows, d],
            "v" | "dv" => [kv_b, h_kv, kv_rows, d_v],
            "o" | "d_o" => [own_b, h, q_rows, d_v],
            "log_sum_exp" | "max_scores" => [own_b, h, q_rows, 1],
            "q_offsets" | "kv_offsets" => [b.saturating_add(1), 1, 1, 1],
            "page_table" => [b, self.entries(), 1, 1],
            "dropout_state" => [4, 1, 1, 1],
            "slopes" => [b, h, 1, 1],
            "q_descale" | "k_descale" | "v_descale" => [b, h_kv, 1, 1],
            "block_map" => [b, h, s_q.div_ceil(self.block_q.max(1)), s_kv.div_ceil(self.block_kv.max(1))],
            "mask_blocks" => [self.blocks, 1, self.block_q, self.block_kv / 8],
            "sinks" | "dsinks" => [1, h, 1, 1],
            "q_lengths" | "kv_lengths" => [b, 1, 1, 1],
            // What is repeated over nothing is there once all the same, and its sum is 0.
            name if is_summed(name) => {
                let whole = [b, h, s_q, self.entries_of(name).unwrap_or(s_kv)];
                std::array::from_fn(|i| if view.strides.get(i) == Some(&0) { 1 } else { whole[i] })
            }
            name => [b, h, s_q, self.entries_of(name).unwrap_or(s_kv)],
        }
    }

    /// Elements along the last dim of a score operand that is a table, or of its gradient.
    fn entries_of(&self, name: &str) -> Option<u64> {
        let number = [SCORE_OPERANDS, D_SCORE].iter().find_map(|names| names.iter().position(|known| *known == name))?;
        let mut loads = self.score.iter().flat_map(|score| &score.steps).filter(|step| step.view().is_some());
        loads.nth(number).and_then(|step| if let ChainStep::Gather { extent, .. } = step { Some(*extent) } else { None })
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        self.operands().into_iter().all(|(name, view, written)| !written || self.dims(name, view).contains(&0))
    }

    /// Pairs of a query and a key that the window lets through in one batch and head, lengths and mask aside; of ragged tensors, in a sequence of the mean
    /// length.
    pub fn pairs(&self) -> f64 {
        if self.is_ragged() {
            return self.of_mean_length().pairs();
        }
        let (s_q, s_kv) = (self.s_q as f64, self.s_kv as f64);
        let corner = if self.corner == Corner::BottomRight { s_kv - s_q } else { 0.0 };
        // Σ over the queries i of i + from, kept from 0 to s_kv: a difference of sums over all numbers below.
        let below = |x: f64| {
            let rising = x.clamp(0.0, s_kv + 1.0);
            rising * (rising - 1.0) / 2.0 + (x - s_kv - 1.0).max(0.0) * s_kv
        };
        let sum = |from: f64| below(s_q + from) - below(from);
        let ends = self.right.map_or(s_q * s_kv, |right| sum(corner + f64::from(right) + 1.0));
        ends - self.left.map_or(0.0, |left| sum(corner - f64::from(left)))
    }

    /// Arithmetic work of the products: two forward, five backward, over the pairs of the window.
    pub fn flops(&self) -> f64 {
        let (d, d_v) = (self.d as f64, self.d_v as f64);
        let elements = if self.is_backward() { 3.0 * d + 2.0 * d_v } else { d + d_v };
        2.0 * self.b as f64 * self.h as f64 * self.pairs() * elements
    }

    /// The slots that are bound to host scalars.
    pub(super) fn scalars(&self) -> Vec<Slot> {
        let scale = if let HostScalar::Bound(slot) = self.scale { Some(slot) } else { None };
        scale.into_iter().chain(self.dropout_seed.into_iter().flatten()).collect()
    }

    fn visit_slots(&mut self, visit: &mut dyn FnMut(&mut Slot)) {
        // The scale and a seed stand between what both passes read and the operands of the pass.
        let read = self.reads().count();
        let (mut scale, mut seed) = (self.scale, self.dropout_seed);
        for (place, view) in self.views_mut().into_iter().enumerate() {
            if place == read {
                if let HostScalar::Bound(slot) = &mut scale {
                    visit(slot);
                }
                seed.iter_mut().flatten().for_each(&mut *visit);
            }
            visit(&mut view.slot);
        }
        (self.scale, self.dropout_seed) = (scale, seed);
    }

    /// Every slot, in order, each once.
    pub fn slots(&self) -> Vec<Slot> {
        super::slots_of(|visit| self.clone().visit_slots(visit))
    }

    /// Numbers the slots from 0 in the order of the fields and returns the old slot of each new one.
    pub fn number_slots(&mut self) -> Vec<Slot> {
        let old = self.slots();
        self.visit_slots(&mut |slot| super::renumber(&old, slot));
        old
    }

    /// What [`super::Problem::buffers`] says.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        (self.operands().into_iter())
            .map(|(name, view, written)| views::operand(name, view, &self.dims(name, view), views::access(written)))
            .collect()
    }

    /// Checks extents and attributes.
    fn check(&self) -> Result<(), Error> {
        let op = || "attention".to_owned();
        let structure = |tensor: &str, rule| Err(Error::Structure { op: op(), tensor: tensor.to_owned(), rule });
        let &AttentionProblem { b, h, h_kv, s_q, s_kv, d, d_v, .. } = self;
        super::check_extents("attention", &[b, h, s_q.max(1), s_kv.max(1)])?;
        super::check_extents("attention", &[b, h, s_q.max(s_kv), d.max(d_v)])?;
        super::check_extents("attention", &[h, self.q_rows.max(self.kv_rows), d.max(d_v)])?;
        // Of ragged queries keys are ragged or paged.
        let of_keys = self.has_ragged_keys() || self.is_paged();
        if (self.is_ragged() && !of_keys) || (self.has_ragged_keys() && !self.is_ragged()) {
            return structure("q_offsets", "offsets of queries and of keys come together, those of queries alone where keys are paged");
        }
        let is_within = (!self.is_ragged() || s_q <= self.q_rows) && (!self.has_ragged_keys() || s_kv <= self.kv_rows);
        if !is_within {
            return structure("q_offsets", "a sequence has at most the rows that there are");
        }
        if self.is_paged() {
            if self.has_ragged_keys() || self.is_backward() {
                return structure("page_table", "a table of pages comes without offsets of keys, and with no gradient");
            }
            if self.pages == 0 || self.page_size == 0 || !s_kv.is_multiple_of(self.page_size) {
                return structure("page_table", "there is at least one page and one key in it, and keys fill whole pages");
            }
            super::check_extents("attention", &[self.pages, h, self.page_size, d.max(d_v)])?;
        }
        if self.block_map.is_some() != self.mask_blocks.is_some() {
            return structure("block_map", "a map of blocks and the masks of its blocks come together");
        }
        if self.block_map.is_some() {
            if self.is_ragged() || self.is_paged() {
                return structure("block_map", "a map of blocks is of queries and keys that are neither ragged nor paged");
            }
            if self.blocks == 0 || self.block_q == 0 || self.block_kv == 0 || !self.block_kv.is_multiple_of(8) {
                return structure(
                    "mask_blocks",
                    "there is at least one mask of a block, of at least one query, and its keys fill whole bytes",
                );
            }
            super::check_extents("attention", &[self.blocks, self.block_q, self.block_kv])?;
        }
        if d == 0 || d_v == 0 {
            return structure(if d == 0 { "q" } else { "v" }, "a head has at least one element");
        }
        if h_kv == 0 || !h.is_multiple_of(h_kv) {
            return structure("k", "heads of queries are a multiple of those of keys, of which there is at least one");
        }
        views::check_compute("attention", self.compute, "attention is computed in f32 or f64")?;
        if let Some(cap) = self.soft_cap
            && !(cap.0.is_finite() && cap.0 > 0.0)
        {
            let rule = "a soft cap is finite and above 0";
            return Err(Error::Attribute { op: op(), attribute: "soft_cap", value: cap.to_string(), rule });
        }
        if let Some(score) = &self.score {
            if let Some(cap) = self.soft_cap {
                let rule = "a score function comes in place of a soft cap, which would be one of its steps";
                return Err(Error::Attribute { op: op(), attribute: "soft_cap", value: cap.to_string(), rule });
            }
            if score.loads().count() > ScoreFunction::MOST_OPERANDS {
                return structure("score", "a score function reads at most 4 tensors");
            }
            attention::check_steps("attention", score, self.compute, [b, h, s_q, s_kv])?;
            if self.is_backward() {
                ScoreFunction::under(score).slope("attention")?;
            }
        }
        super::finite("attention", "scale", &self.scale)?;
        let descales =
            [("q_descale", &self.q_descale, &self.q), ("k_descale", &self.k_descale, &self.k), ("v_descale", &self.v_descale, &self.v)];
        for (name, descale, of) in descales {
            if descale.is_some() && (self.is_backward() || !of.dtype.is_fp8()) {
                return structure(name, "queries, keys and values of 8 bits have factors, and no gradient");
            }
        }
        if let Some(Real(p)) = self.dropout {
            if !(0.0..=1.0).contains(&p) {
                let rule = "a probability is from 0 to 1";
                return Err(Error::Attribute { op: op(), attribute: "dropout", value: p.to_string(), rule });
            }
            if self.dropout_state.is_some() == self.dropout_seed.is_some() {
                return structure("dropout_state", "dropout comes with a random state in memory or a seed and an offset by value");
            }
        } else if self.dropout_state.is_some() || self.dropout_seed.is_some() {
            return structure("dropout_state", "a random state of attention comes with a probability of dropout");
        }
        if let AttentionPass::Backward { dq, dk, dv, dbias, dsinks, d_score, .. } = &self.pass {
            if [dq, dk, dv, dbias, dsinks].into_iter().chain(d_score).all(Option::is_none) {
                return structure("dq", "at least one gradient is written");
            }
            let has_more = d_score.iter().rposition(Option::is_some) >= Some(self.score_operands().count());
            if (dbias.is_some() && self.bias.is_none()) || (dsinks.is_some() && self.sinks.is_none()) || has_more {
                return structure("dbias", "there is a gradient of what is read");
            }
            for (number, (_, view)) in (0..).zip(self.score_operands()) {
                if d_score.get(number as usize).is_some_and(Option::is_some) {
                    let rule = "there are gradients of reals";
                    views::check_dtype("attention", SCORE_OPERANDS[number as usize], view.dtype, is_taken(view.dtype), rule)?;
                    self.score.as_ref().map(|score| ScoreFunction::under(score).operand_slope("attention", number)).transpose()?;
                }
            }
        }
        Ok(())
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// # Errors
    /// Views of another rank, extents and attributes that do not fit, an output that overlaps itself or shares its buffer, types that the op does not
    /// take.
    pub fn canonical(mut self) -> Result<AttentionProblem, Error> {
        let op = || "attention".to_owned();
        self.check()?;
        if let AttentionPass::Backward { d_score, .. } = &mut self.pass {
            trim(d_score);
        }
        if self.dropout == Some(Real(0.0)) || self.dropout == Some(Real(-0.0)) {
            (self.dropout, self.dropout_state, self.dropout_seed) = (None, None, None);
        }
        for (name, view, _) in self.operands() {
            if view.strides.len() != 4 {
                return Err(Error::Mismatch {
                    op: op(),
                    tensor: name.to_owned(),
                    quantity: "the number of strides".to_owned(),
                    got: view.strides.len() as u64,
                    want: 4,
                    rule: "a view has one stride for each of batch, head, position and element",
                });
            }
            let (is_right, rule) = match name {
                "q" if self.is_backward() => (is_taken(view.dtype), "attention has a gradient in f16, bf16, f32 and f64"),
                "q" => (is_multiplied(view.dtype), MULTIPLIED),
                "k" | "v" => {
                    let is_kept = is_kept(self.q.dtype, view.dtype) && view.dtype == self.k.dtype;
                    (is_kept && !(self.is_backward() && view.dtype.is_fp8()), KEPT)
                }
                "q_descale" | "k_descale" | "v_descale" => (view.dtype == DType::F32, "factors of queries, keys and values are f32"),
                "mask" => (view.dtype == DType::U8, "a mask is of truth values, which are stored in u8"),
                "block_map" => (view.dtype == DType::I32, "a map of blocks is i32"),
                "mask_blocks" => (view.dtype == DType::U8, "masks of blocks are bits, eight in a u8"),
                "slopes" => (view.dtype == DType::F32, "slopes are f32"),
                name if SCORE_OPERANDS.contains(&name) => (attention::is_operand(view.dtype), attention::OPERANDS),
                "q_lengths" | "kv_lengths" => (view.dtype == DType::I32, "lengths are i32"),
                "q_offsets" | "kv_offsets" => (view.dtype == DType::I32, "offsets are i32"),
                "page_table" => (view.dtype == DType::I32, "numbers of pages are i32"),
                "dropout_state" => (view.dtype == DType::I32, "a random state is of i32"),
                "log_sum_exp" => (matches!(view.dtype, DType::F32 | DType::F64), "a log-sum-exp is f32 or f64"),
                "max_scores" => (matches!(view.dtype, DType::F32 | DType::F64), "greatest scores are f32 or f64"),
                _ => (is_taken(view.dtype), "attention is of f16, bf16, f32 and f64"),
            };
            views::check_dtype("attention", name, view.dtype, is_right, rule)?;
        }
        // Strides of dims without a second element.
        let dims: Vec<_> = self.operands().into_iter().map(|(name, view, _)| (name, self.dims(name, view))).collect();
        for (view, (name, dims)) in self.views_mut().into_iter().zip(dims) {
            for (stride, extent) in view.strides.iter_mut().zip(dims) {
                if extent <= 1 {
                    // A dim of dbias that is empty itself is not one that it is repeated over.
                    *stride = u64::from(is_summed(name) && extent == 0);
                }
            }
        }
        views::check_outputs("attention", &self.buffers()?)?;
        // A bound at least so wide leaves no key out, whichever the corner and the lengths.
        let all = self.s_q.saturating_add(self.s_kv);
        for bound in [&mut self.left, &mut self.right] {
            *bound = bound.filter(|&bound| u64::from(bound) < all);
        }
        let is_one_corner = self.s_q == self.s_kv && self.q_lengths.is_none() && self.kv_lengths.is_none() && !self.is_ragged();
        if !self.is_ragged() {
            self.q_rows = self.s_q;
        }
        if !self.has_ragged_keys() {
            self.kv_rows = self.s_kv;
        }
        if !self.is_paged() {
            (self.pages, self.page_size) = (0, 0);
        }
        if self.block_map.is_none() {
            (self.blocks, self.block_q, self.block_kv) = (0, 0, 0);
        }
        if is_one_corner || (self.left.is_none() && self.right.is_none()) {
            self.corner = Corner::TopLeft;
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use crate::problem::attention::AttentionPass;
    use crate::problem::{Problem, View};

    /// A bias of [2, 3, 1, 5] that is repeated over no queries has a gradient of 0; one of [2, 3, 0, 5] has a gradient without elements.
    #[test]
    fn a_gradient_of_a_bias_that_is_repeated_over_nothing_is_written() {
        let words = "attention backward f32 b=2 h=3 s_q=0 s_kv=5 d=4 bias=f32:key log_sum_exp=f32 dq=bhsd dbias=f32:key";
        let read: Problem = words.parse().unwrap_or_else(|error| panic!("{error}"));
        let mut all = Vec::new();
        for (strides, dims, canonical) in [
            ([15, 5, 0, 1], [2, 3, 1, 5], [15, 5, 0, 1]),
            ([15, 5, 9, 1], [2, 3, 0, 5], [15, 5, 1, 1]),
            ([0, 0, 0, 1], [1, 1, 1, 5], [0, 0, 0, 1]),
            ([0, 0, 1, 0], [1, 1, 0, 1], [0, 0, 1, 0]),
        ] {
            let Problem::Attention(mut problem) = read.clone() else { panic!("{read:?}") };
            let AttentionPass::Backward { dq, dbias: Some(dbias), .. } = &mut problem.pass else { panic!("{problem:?}") };
            dbias.strides = strides.to_vec();
            // Nothing else is written.
            assert!(dq.is_some());
            let problem = Problem::Attention(problem).canonical().expect("legal");
            let Problem::Attention(attention) = &problem else { panic!("{problem:?}") };
            let dbias: &View = attention.operand("dbias").expect("written");
            assert_eq!((attention.dims("dbias", dbias), &dbias.strides[..]), (dims, &canonical[..]));
            assert_eq!(attention.is_empty(), dims.contains(&0));
            assert_eq!(problem.clone().canonical().as_ref(), Ok(&problem));
            assert_eq!(problem.to_string().parse::<Problem>().and_then(Problem::canonical).as_ref(), Ok(&problem), "{problem}");
            let json = serde_json::to_string(&problem).expect("prints");
            assert_eq!(serde_json::from_str::<Problem>(&json).expect("reads").canonical().as_ref(), Ok(&problem), "{json}");
            assert!(!all.contains(&problem), "{problem}");
            all.push(problem);
        }
    }

    #[test]
    fn pairs_are_those_of_the_window() {
        for (s_q, s_kv) in [(1_u64, 1_u64), (5, 9), (9, 5), (7, 7), (3, 0)] {
            for corner in ["top_left", "bottom_right"] {
                for left in [None, Some(0), Some(2), Some(20)] {
                    for right in [None, Some(0), Some(3)] {
                        let bound = |name, bound: Option<u32>| bound.map_or(String::new(), |bound| format!(" {name}={bound}"));
                        let words = format!(
                            "attention forward f32 b=1 h=1 s_q={s_q} s_kv={s_kv} d=4 corner={corner}{}{} scale=1.0",
                            bound("left", left),
                            bound("right", right)
                        );
                        let problem = words.parse::<Problem>().and_then(Problem::canonical);
                        let Ok(Problem::Attention(problem)) = problem else { panic!("{words}: {problem:?}") };
                        let shift = if corner == "bottom_right" { s_kv as i64 - s_q as i64 } else { 0 };
                        let is_attended = |&(i, j): &(i64, i64)| {
                            left.is_none_or(|left| j >= i + shift - i64::from(left))
                                && right.is_none_or(|right| j <= i + shift + i64::from(right))
                        };
                        let pairs = (0..s_q as i64).flat_map(|i| (0..s_kv as i64).map(move |j| (i, j)));
                        assert_eq!(problem.pairs(), pairs.filter(is_attended).count() as f64, "{words}");
                    }
                }
            }
        }
    }
}
