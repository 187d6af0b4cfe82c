//! Batch normalization, its gradient and the statistics of channels, in words.

use verdigris_tensor::DType;

use super::chain::packed;
use super::codec::{Layouts, Text, error};
use crate::error::Error;
use crate::op::Real;
use crate::ops::pointwise::UnaryOp;
use crate::problem::{BatchNormProblem, ChannelFunction, Slot, View};

const FORWARD: &str = "forward";
const BACKWARD: &str = "backward";
const STATISTICS: &str = "statistics";
const FORMS: &str = "`forward`, `backward` or `statistics`";

fn nowhere() -> View {
    View { slot: Slot(0), dtype: DType::F32, offset: 0, strides: Vec::new() }
}

/// What reading fills in.
pub(super) fn blank() -> BatchNormProblem {
    BatchNormProblem {
        rows: Vec::new(),
        channels: 0,
        compute: DType::F32,
        function: ChannelFunction::Statistics { x: nowhere(), mean: nowhere(), m2: None },
    }
}

fn blank_function(word: &str) -> Result<ChannelFunction, Error> {
    Ok(match word {
        FORWARD => ChannelFunction::Forward {
            eps: Real(0.0),
            momentum: Real(0.0),
            relu: false,
            activation: None,
            x: nowhere(),
            scale: None,
            bias: None,
            add: None,
            running_mean: None,
            running_var: None,
            y: nowhere(),
            mean: None,
            inv: None,
            next_mean: None,
            next_var: None,
        },
        BACKWARD => ChannelFunction::Backward {
            relu: false,
            activation: None,
            dy: nowhere(),
            x: nowhere(),
            y: None,
            scale: None,
            bias: None,
            mean: nowhere(),
            inv: nowhere(),
            dx: None,
            dscale: None,
            dbias: None,
            dadd: None,
        },
        STATISTICS => blank().function,
        _ => return Err(error(FORMS, word)),
    })
}

/// Channels last, the usual ones, and first; and one value a channel.
fn layouts(rows: &[u64], channels: u64) -> [Layouts; 2] {
    let last = packed(&rows.iter().copied().chain([channels]).collect::<Vec<_>>());
    // Channels stand behind the first of several dims, in front of a single one.
    let before = rows.len().saturating_sub(1).min(1);
    let mut dims = rows.to_vec();
    dims.insert(before, channels);
    let mut first = packed(&dims);
    let channel = first.remove(before);
    first.push(channel);
    let mut vector = vec![0; rows.len()];
    vector.push(u64::from(channels > 1));
    [vec![("nhwc", last), ("nchw", first)], vec![("channel", vector)]]
}

/// The activation, left out where there is none.
fn behind(text: &mut Text<'_>, activation: &mut Option<UnaryOp>) -> Result<(), Error> {
    let mut f = activation.unwrap_or(UnaryOp::Identity);
    text.choice("activation", &mut f, Some(UnaryOp::Identity))?;
    *activation = Some(f).filter(|&f| f != UnaryOp::Identity);
    Ok(())
}

pub(super) fn describe(text: &mut Text<'_>, problem: &mut BatchNormProblem) -> Result<(), Error> {
    let word = text.word(FORMS, || {
        match problem.function {
            ChannelFunction::Forward { .. } => FORWARD,
            ChannelFunction::Backward { .. } => BACKWARD,
            ChannelFunction::Statistics { .. } => STATISTICS,
        }
        .to_owned()
    })?;
    if text.is_reading() {
        problem.function = blank_function(&word)?;
    }
    text.usual_type(|| problem.operands()[0].1.dtype)?;
    text.field("rows", &mut problem.rows, None)?;
    text.field("channels", &mut problem.channels, None)?;
    text.choice("compute", &mut problem.compute, Some(DType::F32))?;
    let [whole, vector] = layouts(&problem.rows, problem.channels);
    match &mut problem.function {
        ChannelFunction::Forward {
            eps,
            momentum,
            relu,
            activation,
            x,
            scale,
            bias,
            add,
            running_mean,
            running_var,
            y,
            mean,
            inv,
            next_mean,
            next_var,
        } => {
            text.field("eps", eps, None)?;
            text.field("momentum", momentum, Some(Real(0.1)))?;
            text.flag("relu", relu);
            behind(text, activation)?;
            text.operand("x", x, &whole)?;
            text.optional("scale", scale, &vector)?;
            text.optional("bias", bias, &vector)?;
            text.optional("add", add, &whole)?;
            text.optional("running_mean", running_mean, &vector)?;
            text.optional("running_var", running_var, &vector)?;
            text.operand("y", y, &whole)?;
            text.optional("mean", mean, &vector)?;
            text.optional("inv", inv, &vector)?;
            text.optional("next_mean", next_mean, &vector)?;
            text.optional("next_var", next_var, &vector)
        }
        ChannelFunction::Backward { relu, activation, dy, x, y, scale, bias, mean, inv, dx, dscale, dbias, dadd } => {
            text.flag("relu", relu);
            behind(text, activation)?;
            text.operand("dy", dy, &whole)?;
            text.operand("x", x, &whole)?;
            text.optional("y", y, &whole)?;
            text.optional("scale", scale, &vector)?;
            text.optional("bias", bias, &vector)?;
            text.operand("mean", mean, &vector)?;
            text.operand("inv", inv, &vector)?;
            text.optional("dx", dx, &whole)?;
            text.optional("dscale", dscale, &vector)?;
            text.optional("dbias", dbias, &vector)?;
            text.optional("dadd", dadd, &whole)
        }
        ChannelFunction::Statistics { x, mean, m2 } => {
            text.operand("x", x, &whole)?;
            text.operand("mean", mean, &vector)?;
            text.optional("m2", m2, &vector)
        }
    }
}
