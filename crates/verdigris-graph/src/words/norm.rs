//! Normalization and its gradient, in words.

use verdigris_tensor::DType;

use super::chain::packed;
use super::codec::{Layouts, Text, error};
use super::rows::{BACKWARD, FORWARD, nowhere};
use crate::error::Error;
use crate::op::Real;
use crate::ops::norm::NormKind;
use crate::problem::{NormPass, NormProblem};

/// What reading fills in.
pub(super) fn blank() -> NormProblem {
    NormProblem {
        kind: NormKind::Layer,
        eps: Real(0.0),
        zero_centred: false,
        rows: Vec::new(),
        elements: Vec::new(),
        compute: DType::F32,
        pass: blank_forward(),
    }
}

fn blank_forward() -> NormPass {
    NormPass::Forward { x: nowhere(), residual: None, scale: None, bias: None, y: nowhere(), sum: None, mean: None, inv: None }
}

fn blank_backward() -> NormPass {
    NormPass::Backward { x: nowhere(), dy: nowhere(), scale: None, mean: None, inv: None, dsum: None, dx: None, dscale: None, dbias: None }
}

pub(super) fn describe(text: &mut Text<'_>, problem: &mut NormProblem) -> Result<(), Error> {
    let word = text.word("`forward` or `backward`", || {
        (if matches!(problem.pass, NormPass::Backward { .. }) { BACKWARD } else { FORWARD }).to_owned()
    })?;
    if text.is_reading() {
        problem.pass = match word.as_str() {
            FORWARD => blank_forward(),
            BACKWARD => blank_backward(),
            _ => return Err(error("`forward` or `backward`", &word)),
        };
    }
    text.usual_type(|| problem.operands()[0].1.dtype)?;
    text.choice("kind", &mut problem.kind, Some(NormKind::Layer))?;
    text.field("rows", &mut problem.rows, None)?;
    text.field("elements", &mut problem.elements, None)?;
    text.field("eps", &mut problem.eps, Some(Real(1e-5)))?;
    text.flag("zero_centred", &mut problem.zero_centred);
    text.choice("compute", &mut problem.compute, Some(DType::F32))?;
    let (rows, elements) = (&problem.rows, &problem.elements);
    let beside = |mut own: Vec<u64>, count: usize| {
        own.resize(own.len() + count, 0);
        own
    };
    let along: Vec<u64> = rows.iter().map(|_| 0).chain(packed(elements)).collect();
    let full = ("packed", packed(&problem.space()));
    let by_row = ("rows", beside(packed(rows), elements.len()));
    let column = ("elements", along);
    let one = ("one", vec![0; rows.len() + elements.len()]);
    let whole: Layouts = vec![full.clone(), by_row.clone(), column.clone(), one.clone()];
    let vectors: Layouts = vec![column, by_row.clone(), full, one.clone()];
    let statistics: Layouts = vec![by_row, one];
    match &mut problem.pass {
        NormPass::Forward { x, residual, scale, bias, y, sum, mean, inv } => {
            text.operand("x", x, &whole)?;
            text.optional("residual", residual, &whole)?;
            text.optional("scale", scale, &vectors)?;
            text.optional("bias", bias, &vectors)?;
            text.operand("y", y, &whole)?;
            text.optional("sum", sum, &whole)?;
            text.optional("mean", mean, &statistics)?;
            text.optional("inv", inv, &statistics)
        }
        NormPass::Backward { x, dy, scale, mean, inv, dsum, dx, dscale, dbias } => {
            text.operand("x", x, &whole)?;
            text.operand("dy", dy, &whole)?;
            text.optional("scale", scale, &vectors)?;
            text.optional("mean", mean, &statistics)?;
            text.optional("inv", inv, &statistics)?;
            text.optional("dsum", dsum, &whole)?;
            text.optional("dx", dx, &whole)?;
            text.optional("dscale", dscale, &vectors)?;
            text.optional("dbias", dbias, &vectors)
        }
    }
}
