//! What attention and its gradient both read, and its checks.

use verdigris_tensor::DType;

use super::{AttentionSpec, KEPT, ScoreFunction, dropout, float, is_kept, multiplied, score};
use crate::error::Error;
use crate::graph::Graph;
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{attribute, broadcasts_to, data, factor, of_type, same_dims};

/// What both ops read.
pub(super) struct Read {
    pub(super) spec: AttentionSpec,
    pub(super) q: Uid,
    pub(super) k: Uid,
    pub(super) v: Uid,
    pub(super) bias: Option<Uid>,
    pub(super) mask: Option<Uid>,
    pub(super) slopes: Option<Uid>,
    pub(super) sinks: Option<Uid>,
    pub(super) q_lengths: Option<Uid>,
    pub(super) kv_lengths: Option<Uid>,
    pub(super) q_offsets: Option<Uid>,
    pub(super) kv_offsets: Option<Uid>,
    pub(super) page_table: Option<Uid>,
    /// State, or seed and offset.
    pub(super) dropout: [Option<Uid>; 2],
    /// Of queries, keys and values.
    pub(super) descales: [Option<Uid>; 3],
    /// The map of blocks, and the masks of those that are attended to in part.
    pub(super) blocks: [Option<Uid>; 2],
    /// The function of scores, and what it reads.
    pub(super) score: Option<ScoreFunction>,
    pub(super) score_operands: Vec<Uid>,
}

impl Read {
    /// What is computed with.
    pub(super) fn floats(&self) -> impl Iterator<Item = Uid> + use<> {
        let options = [Some(self.q), Some(self.k), Some(self.v), self.bias, self.slopes, self.sinks].into_iter().chain(self.descales);
        options.flatten().chain(self.score_operands.clone())
    }

    /// Checks all that is read, and gives the dims of the result.
    pub(super) fn check(&self, op: &str, graph: &Graph) -> Result<[u64; 4], Error> {
        factor(graph, op, "scale", self.spec.scale)?;
        if let Some(cap) = self.spec.soft_cap
            && !(cap.0.is_finite() && cap.0 > 0.0)
        {
            return attribute(op, "soft_cap", cap.0, "a soft cap is finite and above 0");
        }
        let (q, k, v) = (multiplied(op, graph, self.q)?, multiplied(op, graph, self.k)?, multiplied(op, graph, self.v)?);
        let [own_b, h, rows, d] = four(op, &q)?;
        let [pages, h_kv, key_rows, _] = four(op, &k)?;
        let [.., d_v] = four(op, &v)?;
        let offsets = self.offsets(op, graph, &q)?;
        let entries = self.entries(op, graph, offsets.map_or(own_b, |count| count.saturating_sub(1)))?;
        let [b, s_q, s_kv] = self.spec.extents(&[own_b, h, rows, d], &[own_b, h_kv, key_rows, d], offsets, entries);
        let (of_k, of_v) = match entries {
            None => (
                "keys have the batch of the queries and as many elements each: `[b, h_kv, s_kv, d]`",
                "values have the batch, the heads and the positions of the keys: `[b, h_kv, s_kv, d_v]`",
            ),
            Some(_) => (
                "paged keys have as many elements as queries: `[pages, h_kv, page_size, d]`",
                "paged values have the pages, the heads and the page size of the keys: `[pages, h_kv, page_size, d_v]`",
            ),
        };
        let kv_b = if entries.is_some() { pages } else { own_b };
        same_dims(op, &k, &[kv_b, h_kv, key_rows, d], of_k)?;
        same_dims(op, &v, &[kv_b, h_kv, key_rows, d_v], of_v)?;
        for tensor in [&k, &v] {
            of_type(op, tensor, |dtype| dtype == k.dtype && is_kept(q.dtype, dtype), KEPT)?;
        }
        let not_zero = |tensor: &TensorDesc, got: u64, quantity: &str, rule| {
            let (op, tensor, quantity) = (op.to_owned(), tensor.name.clone(), quantity.to_owned());
            if got > 0 { Ok(()) } else { Err(Error::Mismatch { op, tensor, quantity, got, want: 1, rule }) }
        };
        not_zero(&q, d, "dim 3", "a head has at least one element")?;
        not_zero(&v, d_v, "dim 3", "a head has at least one element")?;
        not_zero(&k, h_kv, "dim 1", "there is at least one head of keys")?;
        if entries.is_some() {
            not_zero(&k, pages, "dim 0", "there is at least one page, which entries that name none stand for")?;
            not_zero(&k, key_rows, "dim 2", "a page has at least one key")?;
        }
        if !h.is_multiple_of(h_kv) {
            let (op, tensor, quantity) = (op.to_owned(), q.name.clone(), "the number of heads".to_owned());
            let rule = "heads of queries are a multiple of those of keys";
            return Err(Error::Mismatch { op, tensor, quantity, got: h, want: h.next_multiple_of(h_kv), rule });
        }
        if let Some(bias) = self.bias {
            broadcasts_to(op, &float(op, graph, bias)?, &[b, h, s_q, s_kv], "the bias broadcasts to the scores, `[b, h, s_q, s_kv]`")?;
        }
        if let Some(mask) = self.mask {
            let mask = data(graph, op, mask)?;
            of_type(op, mask, |dtype| dtype == DType::U8, "a mask is of truth values, which are stored in u8")?;
            broadcasts_to(op, mask, &[b, h, s_q, s_kv], "the mask broadcasts to the scores, `[b, h, s_q, s_kv]`")?;
        }
        if let Some(slopes) = self.slopes {
            let slopes = data(graph, op, slopes)?;
            of_type(op, slopes, |dtype| dtype == DType::F32, "slopes are f32")?;
            broadcasts_to(op, slopes, &[b, h, 1, 1], "slopes broadcast to `[b, h, 1, 1]`")?;
        }
        if let Some(sinks) = self.sinks {
            same_dims(op, &float(op, graph, sinks)?, &[1, h, 1, 1], "there is a sink for each head, `[1, h, 1, 1]`")?;
        }
        for lengths in [self.q_lengths, self.kv_lengths].into_iter().flatten() {
            let lengths = data(graph, op, lengths)?;
            of_type(op, lengths, |dtype| dtype == DType::I32, "lengths are i32")?;
            same_dims(op, lengths, &[b, 1, 1, 1], "there is a length for each batch, `[b, 1, 1, 1]`")?;
        }
        for (descale, of) in self.descales.into_iter().zip([&q, &k, &v]) {
            let Some(descale) = descale else { continue };
            let descale = data(graph, op, descale)?;
            if !of.dtype.is_fp8() {
                let rule = "queries, keys and values of 8 bits have factors; of others, they are part of the scale";
                return Err(Error::Structure { op: op.to_owned(), tensor: descale.name.clone(), rule });
            }
            of_type(op, descale, |dtype| dtype == DType::F32, "factors of queries, keys and values are f32")?;
            broadcasts_to(op, descale, &[b, h_kv, 1, 1], "factors of queries, keys and values broadcast to `[b, h_kv, 1, 1]`")?;
        }
        self.check_blocks(op, graph, [b, h, s_q, s_kv])?;
        match &self.score {
            Some(score) => score.check(op, graph, self, [b, h, s_q, s_kv])?,
            None => score::check_none(op, graph, &self.score_operands)?,
        }
        dropout::check(op, graph, self.spec.dropout, self.dropout)?;
        Ok([own_b, h, rows, d_v])
    }

    /// Checks the map of blocks and their masks beside scores of these dims.
    fn check_blocks(&self, op: &str, graph: &Graph, [b, h, s_q, s_kv]: [u64; 4]) -> Result<(), Error> {
        let (map, masks) = match self.blocks {
            [None, None] => return Ok(()),
            [Some(map), Some(masks)] => (data(graph, op, map)?, data(graph, op, masks)?),
            [Some(uid), None] | [None, Some(uid)] => {
                let tensor = data(graph, op, uid)?.name.clone();
                let rule = "a map of blocks and the masks of its blocks come together";
                return Err(Error::Structure { op: op.to_owned(), tensor, rule });
            }
        };
        if self.q_offsets.is_some() || self.page_table.is_some() {
            let rule = "a map of blocks is of queries and keys that are neither ragged nor paged";
            return Err(Error::Structure { op: op.to_owned(), tensor: map.name.clone(), rule });
        }
        of_type(op, map, |dtype| dtype == DType::I32, "a map of blocks is i32")?;
        of_type(op, masks, |dtype| dtype == DType::U8, "masks of blocks are bits, eight in a u8")?;
        let [count, _, block_q, bytes] = four(op, masks)?;
        let least_one = [count.max(1), 1, block_q.max(1), bytes.max(1)];
        same_dims(op, masks, &least_one, "masks of blocks are `[n, 1, block_q, block_kv / 8]`, each at least 1")?;
        let grid = [b, h, s_q.div_ceil(block_q), s_kv.div_ceil(bytes.saturating_mul(8))];
        broadcasts_to(op, map, &grid, "a map of blocks broadcasts to `[b, h, ⌈s_q / block_q⌉, ⌈s_kv / block_kv⌉]`")
    }

    /// How many entries a sequence has in the table of pages, where keys are paged.
    fn entries(&self, op: &str, graph: &Graph, b: u64) -> Result<Option<u64>, Error> {
        let Some(uid) = self.page_table else { return Ok(None) };
        let table = data(graph, op, uid)?;
        if let Some(longest) = self.spec.longest_kv {
            return attribute(op, "longest_kv", longest, "paged keys number as many as a sequence's entries of the table hold");
        }
        of_type(op, table, |dtype| dtype == DType::I32, "numbers of pages are i32")?;
        let [_, entries, ..] = four(op, table)?;
        same_dims(op, table, &[b, entries, 1, 1], "each batch has a line of numbers of pages, `[b, entries, 1, 1]`")?;
        Ok(Some(entries))
    }

    /// The number of offsets, where tensors are ragged.
    fn offsets(&self, op: &str, graph: &Graph, q: &TensorDesc) -> Result<Option<u64>, Error> {
        if let (Some(table), Some(_)) = (self.page_table, self.kv_offsets) {
            let rule = "keys are paged or lie behind each other: a table of pages comes without offsets of keys";
            return Err(Error::Structure { op: op.to_owned(), tensor: data(graph, op, table)?.name.clone(), rule });
        }
        let (of_q, of_kv) = match (self.q_offsets, self.kv_offsets) {
            (Some(of_q), Some(of_kv)) => (of_q, Some(of_kv)),
            (Some(of_q), None) if self.page_table.is_some() => (of_q, None),
            (None, None) => {
                for (name, longest) in [("longest_q", self.spec.longest_q), ("longest_kv", self.spec.longest_kv)] {
                    if let Some(longest) = longest {
                        return attribute(op, name, longest, "the longest sequence is told of ragged tensors, which come with offsets");
                    }
                }
                return Ok(None);
            }
            (Some(uid), None) | (None, Some(uid)) => {
                let tensor = data(graph, op, uid)?.name.clone();
                let rule = "offsets of queries and of keys come together, those of queries alone where keys are paged";
                return Err(Error::Structure { op: op.to_owned(), tensor, rule });
            }
        };
        let of_q = data(graph, op, of_q)?;
        let of_kv = of_kv.map(|uid| data(graph, op, uid)).transpose()?;
        let [count, ..] = four(op, of_q)?;
        for tensor in [Some(of_q), of_kv].into_iter().flatten() {
            of_type(op, tensor, |dtype| dtype == DType::I32, "offsets are i32")?;
            same_dims(
                op,
                tensor,
                &[count.max(1), 1, 1, 1],
                "there is one offset more than sequences, of queries and of keys, `[b + 1, 1, 1, 1]`",
            )?;
        }
        let [_, h, rows, d] = four(op, q)?;
        same_dims(op, q, &[1, h, rows, d], "queries of ragged tensors are `[1, h, rows, d]`")?;
        Ok(Some(count))
    }
}

/// The rules of a number of each query: its type, and its dims.
pub(super) type OfRows = [&'static str; 2];
pub(super) const LOG_SUM_EXP: OfRows = ["a log-sum-exp is f32 or f64", "there is a log-sum-exp for each query, `[b, h, s_q, 1]`"];
pub(super) const MAX_SCORES: OfRows = ["greatest scores are f32 or f64", "there is a greatest score for each query, `[b, h, s_q, 1]`"];

/// Checks what of the result both ops have; `dims` are those of the result, `of_rows` what has a number for each query.
pub(super) fn check_result(op: &str, graph: &Graph, dims: [u64; 4], o: Uid, of_rows: &[Option<(Uid, OfRows)>]) -> Result<(), Error> {
    same_dims(op, &float(op, graph, o)?, &dims, "the result has the dims `[b, h, s_q, d_v]`")?;
    for (uid, [of_types, of_dims]) in of_rows.iter().flatten().copied() {
        let tensor = data(graph, op, uid)?;
        of_type(op, tensor, |dtype| matches!(dtype, DType::F32 | DType::F64), of_types)?;
        let [b, h, s_q, _] = dims;
        same_dims(op, tensor, &[b, h, s_q, 1], of_dims)?;
    }
    Ok(())
}

pub(super) fn four(op: &str, tensor: &TensorDesc) -> Result<[u64; 4], Error> {
    tensor.layout.dims().try_into().map_err(|_| Error::Mismatch {
        op: op.to_owned(),
        tensor: tensor.name.clone(),
        quantity: "the number of dims".to_owned(),
        got: tensor.layout.rank() as u64,
        want: 4,
        rule: "queries, keys and values have the dims batch, head, position and element",
    })
}
