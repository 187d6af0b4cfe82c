//! Attention and its gradient, in words.

use verdigris_tensor::DType;

use super::chain::{packed, steps as score_steps};
use super::codec::{Layouts, Text, error};
use super::gemm::determinism;
use super::rows::{BACKWARD, FORWARD, nowhere};
use crate::error::Error;
use crate::op::{HostScalar, Real};
use crate::problem::{AttentionPass, AttentionProblem, Corner, D_SCORE, Determinism, Slot, trim};

/// What reading fills in.
pub(super) fn blank() -> AttentionProblem {
    AttentionProblem {
        b: 0,
        h: 0,
        h_kv: 0,
        s_q: 0,
        s_kv: 0,
        q_rows: 0,
        kv_rows: 0,
        pages: 0,
        page_size: 0,
        blocks: 0,
        block_q: 0,
        block_kv: 0,
        d: 0,
        d_v: 0,
        compute: DType::F32,
        determinism: Determinism::Any,
        corner: Corner::TopLeft,
        left: None,
        right: None,
        soft_cap: None,
        q: nowhere(),
        k: nowhere(),
        v: nowhere(),
        bias: None,
        mask: None,
        slopes: None,
        sinks: None,
        q_lengths: None,
        kv_lengths: None,
        q_offsets: None,
        kv_offsets: None,
        page_table: None,
        dropout: None,
        dropout_state: None,
        dropout_seed: None,
        q_descale: None,
        k_descale: None,
        v_descale: None,
        block_map: None,
        mask_blocks: None,
        score: None,
        scale: HostScalar::ONE,
        pass: blank_forward(),
    }
}

fn blank_forward() -> AttentionPass {
    AttentionPass::Forward { o: nowhere(), log_sum_exp: None, max_scores: None }
}

fn blank_backward() -> AttentionPass {
    AttentionPass::Backward {
        o: nowhere(),
        log_sum_exp: nowhere(),
        d_o: nowhere(),
        dq: None,
        dk: None,
        dv: None,
        dbias: None,
        dsinks: None,
        d_score: Vec::new(),
    }
}

/// Packed over the dims in their order, as `name`; a dim of 1 has no stride.
fn of(name: &'static str, dims: [u64; 4]) -> (&'static str, Vec<u64>) {
    let strides = packed(&dims).into_iter().zip(dims).map(|(stride, extent)| if extent > 1 { stride } else { 0 });
    (name, strides.collect())
}

/// Heads outside of positions, the usual order, and inside of them.
fn elements([b, h, s, d]: [u64; 4]) -> Layouts {
    let (name, mut inside) = of("bshd", [b, s, h, d]);
    inside.swap(1, 2);
    vec![of("bhsd", [b, h, s, d]), (name, inside)]
}

pub(super) fn describe(text: &mut Text<'_>, problem: &mut AttentionProblem) -> Result<(), Error> {
    let word = text.word("`forward` or `backward`", || (if problem.is_backward() { BACKWARD } else { FORWARD }).to_owned())?;
    if text.is_reading() {
        problem.pass = match word.as_str() {
            FORWARD => blank_forward(),
            BACKWARD => blank_backward(),
            _ => return Err(error("`forward` or `backward`", &word)),
        };
    }
    text.usual_type(|| problem.q.dtype)?;
    text.field("b", &mut problem.b, None)?;
    text.field("h", &mut problem.h, None)?;
    text.field("h_kv", &mut problem.h_kv, Some(problem.h))?;
    text.field("s_q", &mut problem.s_q, None)?;
    text.field("s_kv", &mut problem.s_kv, Some(problem.s_q))?;
    // Told of ragged tensors alone, whose operands lie over rows and not over a batch.
    text.field("q_rows", &mut problem.q_rows, Some(problem.s_q))?;
    text.field("kv_rows", &mut problem.kv_rows, Some(problem.s_kv))?;
    let mut is_ragged = problem.is_ragged();
    text.flag("ragged", &mut is_ragged);
    // Told of paged keys alone.
    text.field("pages", &mut problem.pages, Some(0))?;
    text.field("page_size", &mut problem.page_size, Some(0))?;
    // Told of a map of blocks alone.
    text.field("blocks", &mut problem.blocks, Some(0))?;
    text.field("block_q", &mut problem.block_q, Some(0))?;
    text.field("block_kv", &mut problem.block_kv, Some(0))?;
    text.field("d", &mut problem.d, None)?;
    text.field("d_v", &mut problem.d_v, Some(problem.d))?;
    text.choice("compute", &mut problem.compute, Some(DType::F32))?;
    determinism(text, &mut problem.determinism);
    text.choice("corner", &mut problem.corner, Some(Corner::TopLeft))?;
    bound(text, "left", &mut problem.left)?;
    bound(text, "right", &mut problem.right)?;
    real(text, "soft_cap", &mut problem.soft_cap)?;
    real(text, "dropout", &mut problem.dropout)?;
    let &mut AttentionProblem { b, h, h_kv, s_q, s_kv, d, d_v, .. } = problem;
    let [own_b, q_rows, kv_rows] = if is_ragged { [1, problem.q_rows, problem.kv_rows] } else { [b, s_q, s_kv] };
    let (queries, results) = (elements([own_b, h, q_rows, d]), elements([own_b, h, q_rows, d_v]));
    let (pages, page_size) = (problem.pages, problem.page_size);
    let [kv_b, kv_rows] = if pages > 0 { [pages, page_size] } else { [own_b, kv_rows] };
    let (keys, values) = (elements([kv_b, h_kv, kv_rows, d]), elements([kv_b, h_kv, kv_rows, d_v]));
    let table: Layouts = vec![of("batch", [b, problem.entries(), 1, 1])];
    let scores: Layouts = vec![
        of("scores", [b, h, s_q, s_kv]),
        of("head", [1, h, s_q, s_kv]),
        of("batch", [b, 1, s_q, s_kv]),
        of("pair", [1, 1, s_q, s_kv]),
        of("key", [b, 1, 1, s_kv]),
    ];
    let heads: Layouts = vec![of("head", [1, h, 1, 1]), of("both", [b, h, 1, 1])];
    let batches: Layouts = vec![of("batch", [b, 1, 1, 1])];
    let offsets: Layouts = vec![of("batch", [b.saturating_add(1), 1, 1, 1])];
    let rows: Layouts = vec![of("bhs", [own_b, h, q_rows, 1])];
    text.operand("q", &mut problem.q, &queries)?;
    text.operand("k", &mut problem.k, &keys)?;
    text.operand("v", &mut problem.v, &values)?;
    text.optional("bias", &mut problem.bias, &scores)?;
    text.optional("mask", &mut problem.mask, &scores)?;
    text.optional("slopes", &mut problem.slopes, &heads)?;
    text.optional("sinks", &mut problem.sinks, &heads)?;
    text.optional("q_lengths", &mut problem.q_lengths, &batches)?;
    text.optional("kv_lengths", &mut problem.kv_lengths, &batches)?;
    text.optional("q_offsets", &mut problem.q_offsets, &offsets)?;
    text.optional("kv_offsets", &mut problem.kv_offsets, &offsets)?;
    text.optional("page_table", &mut problem.page_table, &table)?;
    let words: Layouts = vec![of("words", [4, 1, 1, 1])];
    text.optional("dropout_state", &mut problem.dropout_state, &words)?;
    let descales: Layouts = vec![of("head", [1, h_kv, 1, 1]), of("both", [b, h_kv, 1, 1]), of("one", [1; 4])];
    text.optional("q_descale", &mut problem.q_descale, &descales)?;
    text.optional("k_descale", &mut problem.k_descale, &descales)?;
    text.optional("v_descale", &mut problem.v_descale, &descales)?;
    let [of_b, of_h, rows_of_blocks, blocks_of_row] = problem.dims("block_map", &nowhere());
    let maps: Layouts = vec![
        of("pair", [1, 1, rows_of_blocks, blocks_of_row]),
        of("head", [1, of_h, rows_of_blocks, blocks_of_row]),
        of("batch", [of_b, 1, rows_of_blocks, blocks_of_row]),
        of("scores", [of_b, of_h, rows_of_blocks, blocks_of_row]),
    ];
    text.optional("block_map", &mut problem.block_map, &maps)?;
    let masks: Layouts = vec![of("packed", [problem.blocks, 1, problem.block_q, problem.block_kv / 8])];
    text.optional("mask_blocks", &mut problem.mask_blocks, &masks)?;
    let mut score = problem.score.take().unwrap_or_default();
    let layouts: Layouts =
        scores.iter().cloned().chain([of("query", [1, 1, s_q, 1]), of("one", [1; 4])]).chain(heads.iter().skip(1).cloned()).collect();
    score_steps(text, &mut score, &layouts)?;
    problem.score = (!score.steps.is_empty()).then_some(score);
    text.factor("scale", &mut problem.scale, HostScalar::ONE)?;
    seed(text, &mut problem.dropout_seed)?;
    match &mut problem.pass {
        AttentionPass::Forward { o, log_sum_exp, max_scores } => {
            text.operand("o", o, &results)?;
            text.optional("log_sum_exp", log_sum_exp, &rows)?;
            text.optional("max_scores", max_scores, &rows)
        }
        AttentionPass::Backward { o, log_sum_exp, d_o, dq, dk, dv, dbias, dsinks, d_score } => {
            text.operand("o", o, &results)?;
            text.operand("log_sum_exp", log_sum_exp, &rows)?;
            text.operand("d_o", d_o, &results)?;
            text.optional("dq", dq, &queries)?;
            text.optional("dk", dk, &keys)?;
            text.optional("dv", dv, &values)?;
            text.optional("dbias", dbias, &scores)?;
            text.optional("dsinks", dsinks, &heads)?;
            d_score.resize(D_SCORE.len(), None);
            D_SCORE.iter().zip(&mut *d_score).try_for_each(|(name, view)| text.optional(name, view, &layouts))?;
            trim(d_score);
            Ok(())
        }
    }
}

/// A bound of the window, if there is one.
fn bound(text: &mut Text<'_>, name: &str, bound: &mut Option<u32>) -> Result<(), Error> {
    let told = text.value(name, bound.map(|bound| bound.to_string()));
    if text.is_reading() {
        *bound = told.map(|word| word.parse().map_err(|_| error(format!("`{name}=` is a number below 2^32"), &word))).transpose()?;
    }
    Ok(())
}

/// A number, if there is one.
fn real(text: &mut Text<'_>, name: &str, real: &mut Option<Real>) -> Result<(), Error> {
    let told = text.value(name, real.map(|real| format!("{:?}", real.0)));
    if text.is_reading() {
        *real = told.map(|word| word.parse().map(Real).map_err(|_| error(format!("`{name}=` is a number"), &word))).transpose()?;
    }
    Ok(())
}

/// Seed and offset from the host, if the random state is given by value.
fn seed(text: &mut Text<'_>, seed: &mut Option<[Slot; 2]>) -> Result<(), Error> {
    let mut read = [None; 2];
    for (place, name) in ["dropout_seed", "dropout_offset"].into_iter().enumerate() {
        let told = seed.map(|seed| text.print_factor(HostScalar::Bound(seed[place])));
        let Some(word) = text.value(name, told).filter(|_| text.is_reading()) else { continue };
        match text.parse_factor(&word)? {
            HostScalar::Bound(slot) => read[place] = Some(slot),
            HostScalar::Fixed(_) => return Err(error(format!("`{name}=` is a host scalar"), &word)),
        }
    }
    if text.is_reading() {
        *seed = match read {
            [Some(seed), Some(offset)] => Some([seed, offset]),
            [None, None] => None,
            _ => return Err(error("`dropout_seed=` and `dropout_offset=` come together", "one of them")),
        };
    }
    Ok(())
}
