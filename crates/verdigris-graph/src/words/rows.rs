//! Scans, softmax, cross-entropy, their gradients, and pooling, in words.

use verdigris_tensor::DType;

use super::chain::packed;
use super::codec::{Layouts, Text, Word, error};
use crate::error::Error;
use crate::op::Real;
use crate::ops::pool::PoolMode;
use crate::ops::scan::ScanOp;
use crate::ops::softmax::LossReduction;
use crate::problem::{Loss, PoolPass, PoolProblem, RowFunction, ScanProblem, Slot, SoftmaxProblem, View, Windows};

/// A view that reading fills in.
pub(super) fn nowhere() -> View {
    View { slot: Slot(0), dtype: DType::F32, offset: 0, strides: Vec::new() }
}

/// What reading fills in.
pub(super) fn blank_scan() -> ScanProblem {
    let (x, y) = (nowhere(), nowhere());
    ScanProblem { f: ScanOp::Add, exclusive: false, reverse: false, rows: Vec::new(), extent: 0, compute: DType::F32, x, y }
}

pub(super) fn describe_scan(text: &mut Text<'_>, problem: &mut ScanProblem) -> Result<(), Error> {
    text.named("`add`, `mul`, `min`, `max` or `log_sum_exp`", &mut problem.f)?;
    text.usual_type(|| problem.x.dtype)?;
    text.field("rows", &mut problem.rows, None)?;
    text.field("extent", &mut problem.extent, None)?;
    text.choice("compute", &mut problem.compute, Some(DType::F32))?;
    text.flag("exclusive", &mut problem.exclusive);
    text.flag("reverse", &mut problem.reverse);
    let whole: Vec<u64> = problem.rows.iter().copied().chain([problem.extent]).collect();
    let elements: Layouts = vec![("packed", packed(&whole))];
    text.operand("x", &mut problem.x, &elements)?;
    text.operand("y", &mut problem.y, &elements)
}

/// What reading fills in.
pub(super) fn blank_softmax() -> SoftmaxProblem {
    SoftmaxProblem {
        rows: Vec::new(),
        extent: 0,
        compute: DType::F32,
        function: RowFunction::Softmax { log: false, x: nowhere(), y: nowhere() },
    }
}

/// What reading fills in.
pub(super) fn blank_pool() -> PoolProblem {
    PoolProblem {
        mode: PoolMode::Max,
        n: 0,
        c: 0,
        extents: [1; 3],
        out: [1; 3],
        windows: [Windows::NONE; 3],
        compute: DType::F32,
        pass: PoolPass::Forward { x: nowhere(), samples: None, y: nowhere(), index: None },
    }
}

pub(super) const FORWARD: &str = "forward";
pub(super) const BACKWARD: &str = "backward";
const LOSS: &str = "cross_entropy";
const LOSS_BACKWARD: &str = "cross_entropy_backward";

pub(super) fn describe_softmax(text: &mut Text<'_>, problem: &mut SoftmaxProblem) -> Result<(), Error> {
    let word = text.word("`forward`, `backward`, `cross_entropy` or `cross_entropy_backward`", || {
        match problem.function {
            RowFunction::Softmax { .. } => FORWARD,
            RowFunction::SoftmaxBackward { .. } => BACKWARD,
            RowFunction::CrossEntropy { .. } => LOSS,
            RowFunction::CrossEntropyBackward { .. } => LOSS_BACKWARD,
        }
        .to_owned()
    })?;
    if text.is_reading() {
        problem.function = blank_function(&word)?;
    }
    text.usual_type(|| problem.operands()[0].1.dtype)?;
    text.field("rows", &mut problem.rows, None)?;
    text.field("extent", &mut problem.extent, None)?;
    text.choice("compute", &mut problem.compute, Some(DType::F32))?;
    let whole: Vec<u64> = problem.rows.iter().copied().chain([problem.extent]).collect();
    let mut by_row = packed(&problem.rows);
    by_row.push(0);
    let (one, full) = (vec![0; whole.len()], packed(&whole));
    let elements: Layouts = vec![("packed", full), ("rows", by_row.clone()), ("one", one.clone())];
    let rows: Layouts = vec![("rows", by_row), ("one", one)];
    match &mut problem.function {
        RowFunction::Softmax { log, x, y } => {
            text.flag("log", log);
            text.operand("x", x, &elements)?;
            text.operand("y", y, &elements)
        }
        RowFunction::SoftmaxBackward { log, y, dy, dx } => {
            text.flag("log", log);
            text.operand("y", y, &elements)?;
            text.operand("dy", dy, &elements)?;
            text.operand("dx", dx, &elements)
        }
        RowFunction::CrossEntropy { loss_spec, logits, labels, loss, lse } => {
            describe_loss(text, loss_spec)?;
            text.operand("logits", logits, &elements)?;
            text.operand("labels", labels, &rows)?;
            text.operand("loss", loss, &rows)?;
            text.optional("lse", lse, &rows)
        }
        RowFunction::CrossEntropyBackward { loss_spec, logits, labels, dloss, lse, dlogits } => {
            describe_loss(text, loss_spec)?;
            text.operand("logits", logits, &elements)?;
            text.operand("labels", labels, &rows)?;
            text.operand("dloss", dloss, &rows)?;
            text.optional("lse", lse, &rows)?;
            text.operand("dlogits", dlogits, &elements)
        }
    }
}

fn blank_function(word: &str) -> Result<RowFunction, Error> {
    let loss_spec = Loss { smoothing: Real(0.0), ignore_index: None, reduction: LossReduction::Mean };
    Ok(match word {
        FORWARD => RowFunction::Softmax { log: false, x: nowhere(), y: nowhere() },
        BACKWARD => RowFunction::SoftmaxBackward { log: false, y: nowhere(), dy: nowhere(), dx: nowhere() },
        LOSS => RowFunction::CrossEntropy { loss_spec, logits: nowhere(), labels: nowhere(), loss: nowhere(), lse: None },
        LOSS_BACKWARD => RowFunction::CrossEntropyBackward {
            loss_spec,
            logits: nowhere(),
            labels: nowhere(),
            dloss: nowhere(),
            lse: None,
            dlogits: nowhere(),
        },
        _ => return Err(error("`forward`, `backward`, `cross_entropy` or `cross_entropy_backward`", word)),
    })
}

fn describe_loss(text: &mut Text<'_>, loss: &mut Loss) -> Result<(), Error> {
    text.field("smoothing", &mut loss.smoothing, Some(Real(0.0)))?;
    let told = text.value("ignore_index", loss.ignore_index.map(|index| index.to_string()));
    if let Some(word) = told {
        loss.ignore_index = Some(word.parse().map_err(|_| error("`ignore_index=` is an integer", &word))?);
    }
    text.choice("reduction", &mut loss.reduction, Some(LossReduction::Mean))
}

/// Three extents: `1x56x56`.
impl Word for [u64; 3] {
    const WHAT: &'static str = "three extents such as 1x56x56";
    fn print(&self) -> String {
        self.to_vec().print()
    }
    fn parse(text: &str) -> Option<[u64; 3]> {
        Vec::<u64>::parse(text)?.try_into().ok()
    }
}

/// `adaptive`, `fractional/` and elements, or taps, stride, dilation and the padding in front: `3/2/1/1`.
impl Word for Windows {
    const WHAT: &'static str = "`adaptive`, fractional/taps or taps/stride/dilation/padding";
    fn print(&self) -> String {
        match self {
            Windows::Adaptive => "adaptive".to_owned(),
            Windows::Fractional { taps } => format!("fractional/{taps}"),
            Windows::Sliding { taps, stride, dilation, pad_before } => format!("{taps}/{stride}/{dilation}/{pad_before}"),
        }
    }
    fn parse(text: &str) -> Option<Windows> {
        if text == "adaptive" {
            return Some(Windows::Adaptive);
        }
        if let Some(taps) = text.strip_prefix("fractional/") {
            return Some(Windows::Fractional { taps: taps.parse().ok()? });
        }
        let numbers: Vec<u64> = text.split('/').map(|number| number.parse().ok()).collect::<Option<_>>()?;
        let [taps, stride, dilation, pad_before] = numbers[..] else { return None };
        Some(Windows::Sliding { taps, stride, dilation, pad_before })
    }
}

pub(super) fn describe_pool(text: &mut Text<'_>, problem: &mut PoolProblem) -> Result<(), Error> {
    let is_backward = |problem: &PoolProblem| matches!(problem.pass, PoolPass::Backward { .. });
    let word = text.word("`forward` or `backward`", || (if is_backward(problem) { BACKWARD } else { FORWARD }).to_owned())?;
    if text.is_reading() {
        problem.pass = match word.as_str() {
            FORWARD => PoolPass::Forward { x: nowhere(), samples: None, y: nowhere(), index: None },
            BACKWARD => PoolPass::Backward { dy: nowhere(), x: None, index: None, dx: nowhere() },
            _ => return Err(error("`forward` or `backward`", &word)),
        };
    }
    text.usual_type(|| problem.operands()[0].1.dtype)?;
    text.choice("mode", &mut problem.mode, Some(PoolMode::Max))?;
    text.field("n", &mut problem.n, None)?;
    text.field("c", &mut problem.c, None)?;
    text.field("extents", &mut problem.extents, None)?;
    text.field("out", &mut problem.out, None)?;
    for (name, windows) in ["depth", "height", "width"].iter().zip(&mut problem.windows) {
        text.field(name, windows, Some(Windows::NONE))?;
    }
    text.choice("compute", &mut problem.compute, Some(DType::F32))?;
    let (wide, narrow) = (layouts(problem.x_dims()), layouts(problem.y_dims()));
    let samples_dims = problem.samples_dims();
    match &mut problem.pass {
        PoolPass::Forward { x, samples, y, index } => {
            text.operand("x", x, &wide)?;
            text.optional("samples", samples, &vec![("nc", packed(&samples_dims))])?;
            text.operand("y", y, &narrow)?;
            text.optional("index", index, &narrow)
        }
        PoolPass::Backward { dy, x, index, dx } => {
            text.operand("dy", dy, &narrow)?;
            text.optional("x", x, &wide)?;
            text.optional("index", index, &narrow)?;
            text.operand("dx", dx, &wide)
        }
    }
}

/// Channels last, the usual ones, and first.
pub(super) fn layouts([n, c, d, h, w]: [u64; 5]) -> Layouts {
    let [n_stride, d_stride, h_stride, w_stride, c_stride] = packed(&[n, d, h, w, c])[..] else { return Vec::new() };
    vec![("nhwc", vec![n_stride, c_stride, d_stride, h_stride, w_stride]), ("nchw", packed(&[n, c, d, h, w]))]
}
