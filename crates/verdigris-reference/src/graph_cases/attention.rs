//! `attention.toml`.

use serde::Deserialize;
use serde::de::IntoDeserializer;
use verdigris_graph::{Attention, AttentionBackward, AttentionSpec, Causal, Graph, HostScalar, Real, ScoreFunction, ScoreStep, Uid};
use verdigris_tensor::{DType, Layout};

use super::{Cases, Common, Draft, Shape, fault, field, normal};
use crate::cases::{CaseError, ScalarText};
use crate::data::Distribution;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    id: String,
    types: Vec<DType>,
    out: Option<DType>,
    /// Of the log-sum-exp, and of bias and sinks where `of_options` is not said, with their gradients.
    #[serde(default = "f32")]
    of_rows: DType,
    of_options: Option<DType>,
    ops: Vec<Kind>,
    shapes: Vec<String>,
    #[serde(default = "plain")]
    options: Vec<String>,
    #[serde(default = "usual_layout")]
    layouts: Vec<String>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    device_only: bool,
}

fn f32() -> DType {
    DType::F32
}

fn plain() -> Vec<String> {
    vec![String::new()]
}

fn usual_layout() -> Vec<String> {
    vec!["bhsd".to_owned()]
}

/// What is asked.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// The result.
    Forward,
    /// The result and the log-sum-exp.
    ForwardRows,
    /// The result and the greatest scores.
    ForwardMax,
    /// The gradients of everything, of a result and a log-sum-exp that belong to no forward op.
    Backward,
    /// The gradients of queries and of keys, each alone.
    BackwardQueries,
    BackwardKeys,
    /// Those of what the score function reads, as far as it is of reals, alone; and with those of everything else.
    BackwardOperands,
    BackwardAll,
    /// Both ops.
    Both,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Kind::Forward => "forward",
            Kind::ForwardRows => "forward_rows",
            Kind::ForwardMax => "forward_max",
            Kind::Backward => "backward",
            Kind::BackwardQueries => "backward_queries",
            Kind::BackwardKeys => "backward_keys",
            Kind::BackwardOperands => "backward_operands",
            Kind::BackwardAll => "backward_all",
            Kind::Both => "both",
        }
    }
}

/// Dims of queries, keys and values.
#[derive(Clone, Copy)]
struct Extents {
    b: u64,
    h: u64,
    h_kv: u64,
    s_q: u64,
    s_kv: u64,
    d: u64,
    d_v: u64,
    /// Batch, rows of queries and rows of keys of the tensors.
    rows: [u64; 3],
    /// Where keys are paged: pages, and the keys of one.
    pages: Option<[u64; 2]>,
}

impl Extents {
    fn of(shape: &Shape) -> Extents {
        let (h, s_q, d) = (shape.one('h', 1), shape.one('q', 1), shape.one('d', 64));
        let h_kv = h / shape.one('g', 1).max(1);
        let (b, s_kv) = (shape.one('b', 1), shape.one('k', s_q));
        Extents { b, h, h_kv, s_q, s_kv, d, d_v: shape.one('v', d), rows: [b, s_q, s_kv], pages: None }
    }

    /// As options ask: where they say `ragged`, `b` sequences in so many percent of the rows that they could have; where they say `page`, keys in pages of so
    /// many, which the last key fills, of ragged queries too.
    fn under(self, options: &str) -> Extents {
        let page = options.split_whitespace().find_map(|option| option.strip_prefix("page=")?.parse::<u64>().ok().filter(|&size| size > 0));
        let of = page.map_or(self, |page_size| {
            let entries = self.s_kv.div_ceil(page_size);
            // As many as there are entries: some are shared, and some of no sequence.
            let pages = self.b.saturating_mul(entries).max(1);
            Extents { s_kv: entries.saturating_mul(page_size), pages: Some([pages, page_size]), ..self }
        });
        let percent = options.split_whitespace().find_map(|option| match option.split_once('=').unwrap_or((option, "")) {
            ("ragged", "") => Some(60),
            ("ragged", percent) => percent.parse().ok(),
            _ => None,
        });
        let rows = |longest: u64, percent: u64| (of.b * longest * percent).div_ceil(100);
        percent.map_or(of, |percent| Extents { rows: [1, rows(of.s_q, percent), rows(of.s_kv, percent)], ..of })
    }

    /// The dims of what a word spreads over the scores.
    fn spread(&self, word: &str) -> Option<[u64; 4]> {
        let &Extents { b, h, s_q, s_kv, .. } = self;
        Some(match word {
            "" | "scores" | "turned" => [b, h, s_q, s_kv],
            "head" => [1, h, s_q, s_kv],
            "batch" => [b, 1, s_q, s_kv],
            "pair" => [1, 1, s_q, s_kv],
            "key" => [b, 1, 1, s_kv],
            "query" => [1, h, s_q, 1],
            "one" => [1; 4],
            _ => return None,
        })
    }

    /// The layout of a score operand: of `turned` ones queries lie side by side.
    fn of_operands(&self, word: &str) -> &'static str {
        if word == "turned" { "reversed" } else { "bhsd" }
    }

    fn queries(&self) -> [u64; 4] {
        [self.rows[0], self.h, self.rows[1], self.d]
    }

    fn keys(&self) -> [u64; 4] {
        let [b, s] = self.pages.unwrap_or([self.rows[0], self.rows[2]]);
        [b, self.h_kv, s, self.d]
    }

    fn values(&self) -> [u64; 4] {
        let [b, _, s, _] = self.keys();
        [b, self.h_kv, s, self.d_v]
    }

    fn results(&self) -> [u64; 4] {
        [self.rows[0], self.h, self.rows[1], self.d_v]
    }

    /// One a query.
    fn totals(&self) -> [u64; 4] {
        [self.rows[0], self.h, self.rows[1], 1]
    }
}

/// The layout that a word names for `[b, h, s, d]`; `packed` is a part of a buffer that holds three such tensors, positions outside of heads.
fn layout(group: &str, word: &str, dims: &[u64]) -> Result<Layout, CaseError> {
    let [b, h, s, d] = [dims[0], dims[1], dims[2], dims[3]].map(|dim| dim.max(1));
    // What 64 bits do not hold stays so large that `Layout::new` refuses it.
    let times = |factors: &[u64]| factors.iter().fold(1u64, |all, &factor| all.saturating_mul(factor));
    let element_and_gap = times(&[2, d]).saturating_add(2);
    let position_and_gap = times(&[h, element_and_gap]).saturating_add(4);
    let strides = match word {
        "bhsd" => [times(&[h, s, d]), times(&[s, d]), d, 1],
        "bshd" => [times(&[s, h, d]), d, times(&[h, d]), 1],
        "packed" => [times(&[3, s, h, d]), d, times(&[3, h, d]), 1],
        "strided" => [times(&[s, position_and_gap]).saturating_add(6), element_and_gap, position_and_gap, 2],
        "reversed" => [1, b, times(&[b, h]), times(&[b, h, s])],
        _ => return field(group, "layouts", word, "a layout of attention is bhsd, bshd, packed, strided or reversed"),
    };
    Layout::new(dims, &strides).map_err(|source| fault(group, verdigris_graph::Error::Layout { tensor: word.to_owned(), source }))
}

/// A coordinate by its name, or a function by its name with the positions that it is of: `sub(1,2)`, `cast(0,bf16)`.
fn function(word: &str) -> Option<ScoreStep> {
    fn named<T: serde::de::DeserializeOwned>(name: &str) -> Option<T> {
        T::deserialize(IntoDeserializer::<serde::de::value::Error>::into_deserializer(name)).ok()
    }
    let Some((name, of)) = word.strip_suffix(')').and_then(|word| word.split_once('(')) else { return named(word).map(ScoreStep::Place) };
    let parts: Vec<&str> = of.split(',').collect();
    if let ("cast", [x, dtype]) = (name, &parts[..]) {
        return Some(ScoreStep::Round { dtype: dtype.parse().ok()?, x: x.parse().ok()? });
    }
    let positions = parts.iter().map(|part| part.parse().ok()).collect::<Option<Vec<u32>>>()?;
    Some(match positions[..] {
        [x] => ScoreStep::Unary { f: named(name)?, x },
        [x, z] => ScoreStep::Binary { f: named(name)?, x, z },
        [x, z, t] => ScoreStep::Ternary { f: named(name)?, x, z, t },
        _ => return None,
    })
}

impl Group {
    fn tensor(&self, draft: &mut Draft<'_>, what: &str, dtype: DType, word: &str, dims: [u64; 4]) -> Result<Uid, CaseError> {
        let (layout, name) = (layout(&self.id, word, &dims)?, draft.name(what));
        Ok(draft.builder.tensor(&name, dtype, layout))
    }

    fn store(&self, draft: &mut Draft<'_>, uid: Uid, what: &str, dtype: DType, word: &str, dims: [u64; 4]) -> Result<(), CaseError> {
        let (layout, name) = (layout(&self.id, word, &dims)?, draft.name(what));
        draft.builder.store_as(uid, &name, dtype, layout).map_err(|source| fault(&self.id, source))
    }

    /// The op that options ask for, with its inputs.
    fn attention(&self, draft: &mut Draft<'_>, dtype: DType, word: &str, of: Extents, options: &str) -> Result<Attention, CaseError> {
        let Extents { b, h, s_q, s_kv, d, .. } = of;
        let q = self.tensor(draft, "q", dtype, word, of.queries())?;
        // Keys and values may be of 8 bits beside queries that are not.
        let cache = options.split_whitespace().find_map(|option| option.strip_prefix("cache="));
        let kept = match cache {
            None => dtype,
            Some("e4m3") => DType::E4m3,
            Some("e5m2") => DType::E5m2,
            Some(other) => return field(&self.id, "options", other, "a cache is of e4m3 or e5m2"),
        };
        let k = self.tensor(draft, "k", kept, word, of.keys())?;
        let v = match options.split_whitespace().any(|option| option == "latent") {
            false => self.tensor(draft, "v", kept, word, of.values())?,
            true => {
                let name = draft.name("v");
                let made = draft.builder.slice(&name, k, &[0; 4], &of.values(), &[1; 4]);
                draft.ok(made)?
            }
        };
        let mut op = Attention::new(AttentionSpec::new(1.0 / (d as f64).sqrt()), q, k, v);
        let of_options = self.of_options.unwrap_or(self.of_rows);
        for option in options.split_whitespace() {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let wrong = || field(&self.id, "options", option, "see `attention.toml` in graph_cases/mod.rs");
            let spread = of.spread(value).unwrap_or([0; 4]);
            match (name, value.parse::<f64>()) {
                ("latent" | "cache", _) => {}
                ("top_left", _) => op.spec.causal = Causal::TopLeft,
                ("bottom_right", _) => op.spec.causal = Causal::BottomRight,
                ("left", Ok(bound)) => op.spec.left = Some(bound as u32),
                ("right", Ok(bound)) => op.spec.right = Some(bound as u32),
                ("cap", Ok(cap)) => op.spec.soft_cap = Some(Real(cap)),
                ("scale", Ok(scale)) => op.spec.scale = HostScalar::Fixed(Real(scale)),
                ("scale", Err(_)) => op.spec.scale = draft.scalar(&ScalarText::Word(value.to_owned()), q)?,
                ("bias", _) if spread != [0; 4] || value.is_empty() => {
                    op.bias = Some(self.tensor(draft, "bias", of_options, "bhsd", spread)?)
                }
                ("mask", _) if spread != [0; 4] || value.is_empty() => {
                    op.mask = Some(self.tensor(draft, "mask", DType::U8, "bhsd", spread)?)
                }
                ("slopes", _) => {
                    let dims = if value == "batch" { [b, h, 1, 1] } else { [1, h, 1, 1] };
                    op.slopes = Some(self.tensor(draft, "slopes", DType::F32, "bhsd", dims)?);
                }
                // Of squares of so many pairs a side, in as many maps as scores, one for each head or batch, or one.
                ("blocks", _) => {
                    let (spread, size) = value.split_once('/').unwrap_or((value, ""));
                    let (Ok(size), maps) = (size.parse::<u64>(), [b, h]) else { return wrong() };
                    let [of_b, of_h] = match spread {
                        "scores" => maps,
                        "head" => [1, h],
                        "batch" => [b, 1],
                        "one" => [1, 1],
                        _ => return wrong(),
                    };
                    if size == 0 || !size.is_multiple_of(8) {
                        return wrong();
                    }
                    let grid = [of_b, of_h, s_q.div_ceil(size), s_kv.div_ceil(size)];
                    op.block_map = Some(self.tensor(draft, "block map", DType::I32, "bhsd", grid)?);
                    op.mask_blocks = Some(self.tensor(draft, "mask blocks", DType::U8, "bhsd", [3, 1, size, size / 8])?);
                }
                // Of a batch and head of keys, or one for all.
                ("descales", _) if value.is_empty() || value == "one" => {
                    let dims = if value == "one" { [1; 4] } else { [b, of.h_kv, 1, 1] };
                    if dtype.is_fp8() {
                        op.q_descale = Some(self.tensor(draft, "q descale", DType::F32, "bhsd", dims)?);
                    }
                    op.k_descale = Some(self.tensor(draft, "k descale", DType::F32, "bhsd", dims)?);
                    op.v_descale = Some(self.tensor(draft, "v descale", DType::F32, "bhsd", dims)?);
                }
                ("score", _) => self.score(draft, &mut op, value, of)?,
                ("sinks", _) => op.sinks = Some(self.tensor(draft, "sinks", of_options, "bhsd", [1, h, 1, 1])?),
                ("q_lengths", _) => op.q_lengths = Some(self.tensor(draft, "q lengths", DType::I32, "bhsd", [b, 1, 1, 1])?),
                ("kv_lengths", _) => op.kv_lengths = Some(self.tensor(draft, "kv lengths", DType::I32, "bhsd", [b, 1, 1, 1])?),
                ("ragged", percent) if value.is_empty() || percent.is_ok() => {
                    let mut offsets = |name: &str| self.tensor(draft, name, DType::I32, "bhsd", [b + 1, 1, 1, 1]);
                    (op.q_offsets, op.spec.longest_q) = (Some(offsets("q offsets")?), Some(s_q as u32));
                    if of.pages.is_none() {
                        (op.kv_offsets, op.spec.longest_kv) = (Some(offsets("kv offsets")?), Some(s_kv as u32));
                    }
                }
                ("dropout", Ok(p)) => {
                    op.spec.dropout = Some(Real(p));
                    let (layout, name) = (Layout::row_major(&[4]), draft.name("dropout state"));
                    let layout =
                        layout.map_err(|source| fault(&self.id, verdigris_graph::Error::Layout { tensor: name.clone(), source }))?;
                    op.dropout_state = Some(draft.builder.tensor(&name, DType::I32, layout));
                }
                ("page", Ok(_)) if of.pages.is_some() => {
                    let entries = s_kv / of.pages.map_or(1, |[_, page_size]| page_size);
                    op.page_table = Some(self.tensor(draft, "page table", DType::I32, "bhsd", [b, entries, 1, 1])?);
                }
                _ => return wrong(),
            }
        }
        Ok(op)
    }

    /// A function of scores in words: steps parted by semicolons.
    fn score(&self, draft: &mut Draft<'_>, op: &mut Attention, text: &str, of: Extents) -> Result<(), CaseError> {
        let mut score = ScoreFunction::default();
        for word in text.split(';') {
            let wrong = || field(&self.id, "options", word, "see `score` of `attention.toml` in graph_cases/mod.rs");
            let step = match (word, word.parse::<f64>(), word.strip_prefix("read:").and_then(|operand| operand.split_once(':'))) {
                ("given", ..) => ScoreStep::Given,
                (_, Ok(number), _) => ScoreStep::Number(Real(number)),
                (_, _, Some((dtype, spread))) => {
                    let (Ok(dtype), Some(dims)) = (dtype.parse::<DType>(), of.spread(spread)) else { return wrong() };
                    let number = op.score_operands.len() as u32;
                    op.score_operands.push(self.tensor(draft, &format!("score operand {number}"), dtype, of.of_operands(spread), dims)?);
                    ScoreStep::Operand(number)
                }
                _ if word.starts_with("gather:") => {
                    let [_, dtype, spread, entries, x] = word.split(':').collect::<Vec<_>>()[..] else { return wrong() };
                    // Of a head, a query is no dim of it.
                    let dims = if spread == "head" { Some([1, of.h, 1, 1]) } else { of.spread(spread) };
                    let (Ok(dtype), Some([b, h, s_q, _]), Ok(entries), Ok(x)) = (dtype.parse::<DType>(), dims, entries.parse(), x.parse())
                    else {
                        return wrong();
                    };
                    let operand = op.score_operands.len() as u32;
                    op.score_operands.push(self.tensor(
                        draft,
                        &format!("score table {operand}"),
                        dtype,
                        of.of_operands(spread),
                        [b, h, s_q, entries],
                    )?);
                    ScoreStep::Gather { operand, x }
                }
                _ => match function(word) {
                    Some(step) => step,
                    None => return wrong(),
                },
            };
            score.push(step);
        }
        op.score = Some(score);
        Ok(())
    }

    fn graph(&self, kind: Kind, dtype: DType, word: &str, of: Extents, options: &str) -> Result<Graph, CaseError> {
        let mut draft = Draft::new(&self.id);
        if self.deterministic {
            draft.builder.deterministic();
        }
        let (out, of_rows) = (self.out.unwrap_or(dtype), self.of_rows);
        let of = of.under(options);
        let (h, results) = (of.h, of.results());
        let op = self.attention(&mut draft, dtype, word, of, options)?;
        let (spec, read) = (op.spec, [op.q, op.k, op.v]);
        let with = op.clone();
        let (o, total) = match kind {
            Kind::Forward | Kind::ForwardRows | Kind::ForwardMax | Kind::Both => {
                let made = draft.builder.attention("attention", op);
                let made = draft.ok(made)?;
                self.store(&mut draft, made.o, "o", out, word, results)?;
                if kind == Kind::ForwardMax {
                    self.store(&mut draft, made.max_scores, "max scores", of_rows, "bhsd", of.totals())?;
                }
                if matches!(kind, Kind::ForwardRows | Kind::Both) {
                    self.store(&mut draft, made.log_sum_exp, "log sum exp", of_rows, "bhsd", of.totals())?;
                }
                if kind != Kind::Both {
                    return draft.finish();
                }
                (made.o, made.log_sum_exp)
            }
            Kind::Backward | Kind::BackwardQueries | Kind::BackwardKeys | Kind::BackwardOperands | Kind::BackwardAll => {
                let o = self.tensor(&mut draft, "o", dtype, word, results)?;
                (o, self.tensor(&mut draft, "log sum exp", of_rows, "bhsd", of.totals())?)
            }
        };
        let d_o = self.tensor(&mut draft, "d o", dtype, word, results)?;
        let Attention { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, .. } = with;
        let bias_dims = bias.and_then(|bias| draft.builder.dims(bias));
        let Attention { dropout_state, dropout_offset, block_map, mask_blocks, score, score_operands, .. } = with;
        let with_operands = score_operands.clone();
        let plain = AttentionBackward {
            score,
            score_operands,
            dropout_state,
            dropout_offset,
            block_map,
            mask_blocks,
            ..AttentionBackward::new(spec, read, o, total, d_o)
        };
        let back = AttentionBackward { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, ..plain };
        let made = draft.builder.attention_backward("backward", back);
        let made = draft.ok(made)?;
        if !matches!(kind, Kind::BackwardKeys | Kind::BackwardOperands) {
            self.store(&mut draft, made.dq, "dq", out, word, of.queries())?;
        }
        if !matches!(kind, Kind::BackwardQueries | Kind::BackwardOperands) {
            self.store(&mut draft, made.dk, "dk", out, word, of.keys())?;
            self.store(&mut draft, made.dv, "dv", out, word, of.values())?;
        }
        if matches!(kind, Kind::BackwardOperands | Kind::BackwardAll) {
            for (number, (operand, gradient)) in with_operands.into_iter().zip(made.d_score_operands).enumerate() {
                let (Some(gradient), Some(dims)) = (gradient, draft.builder.dims(operand)) else { continue };
                let dims = [dims[0], dims[1], dims[2], dims[3]];
                self.store(&mut draft, gradient, &format!("d score {number}"), self.of_options.unwrap_or(of_rows), "bhsd", dims)?;
            }
        }
        if matches!(kind, Kind::Backward | Kind::Both) {
            if let (Some(dbias), Some(dims)) = (made.dbias, bias_dims) {
                self.store(&mut draft, dbias, "dbias", self.of_options.unwrap_or(of_rows), "bhsd", [dims[0], dims[1], dims[2], dims[3]])?;
            }
            if let Some(dsinks) = made.dsinks {
                self.store(&mut draft, dsinks, "dsinks", self.of_options.unwrap_or(of_rows), "bhsd", [1, h, 1, 1])?;
            }
        }
        draft.finish()
    }
}

impl Cases for Group {
    fn common(&self) -> Common<'_> {
        Common { id: &self.id, data: self.data, deterministic: self.deterministic, device_only: self.device_only }
    }

    fn graphs(&self) -> Result<Vec<(String, Graph)>, CaseError> {
        let mut graphs = Vec::new();
        for text in &self.shapes {
            for shape in Shape::all(&self.id, text)? {
                for &kind in &self.ops {
                    for &dtype in &self.types {
                        for word in &self.layouts {
                            for options in &self.options {
                                let words: Vec<&str> = options.split_whitespace().collect();
                                let told = if words.is_empty() { "plain".to_owned() } else { words.join("+") };
                                let name = format!("{}/{dtype}/{word}/{}/{told}", kind.name(), shape.text);
                                graphs.push((name, self.graph(kind, dtype, word, Extents::of(&shape), options)?));
                            }
                        }
                    }
                }
            }
        }
        Ok(graphs)
    }
}
