//! Pooling and its gradient.
//!
//! The formulas are those of [`crate::ops::pool`], over three spatial dims; fewer are extents of 1 with windows of 1. Slots are numbered in
//! the order of the fields.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::{Operand, Slot, View, views};
use crate::error::Error;
use crate::ops::pool::PoolMode;

/// Windows along one spatial dim.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Windows {
    /// Window `o` has the taps `o · stride − pad_before + t · dilation`, `t` in `0 .. taps`.
    Sliding {
        /// Taps of a window.
        taps: u64,
        /// From one window to the next.
        stride: u64,
        /// From one tap to the next.
        dilation: u64,
        /// Padding before the first element.
        pad_before: u64,
    },
    /// Window `o` has the elements `⌊o · extent / out⌋ .. ⌈(o + 1) · extent / out⌉`.
    Adaptive,
    /// Windows that begin where samples say.
    Fractional {
        /// Elements of a window.
        taps: u64,
    },
}

impl Windows {
    /// The windows of a dim that is not there.
    pub const NONE: Windows = Windows::Sliding { taps: 1, stride: 1, dilation: 1, pad_before: 0 };
}

/// Which way values go.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PoolPass {
    /// From `x` to `y`.
    Forward {
        /// Read; `[n, c, extent…]`.
        x: View,
        /// The sample of each plane along each dim whose windows are fractional, in their order; `[n, c, 1, 1, such dims]`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        samples: Option<View>,
        /// Written; `[n, c, out…]`.
        y: View,
        /// The index of each maximum, written where asked for; like `y`.
        index: Option<View>,
    },
    /// From `dy` to `dx`.
    Backward {
        /// Read; like `y`.
        dy: View,
        /// The forward input, for a maximum without an index.
        x: Option<View>,
        /// The index of each maximum, read; like `y`.
        index: Option<View>,
        /// Written; like `x`.
        dx: View,
    },
}

/// Pooling in one direction; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolProblem {
    /// What is made of a window.
    pub mode: PoolMode,
    /// Batch.
    pub n: u64,
    /// Channels.
    pub c: u64,
    /// Spatial extents of `x`: depth, height, width.
    pub extents: [u64; 3],
    /// Spatial extents of `y`.
    pub out: [u64; 3],
    /// Windows along each spatial dim.
    pub windows: [Windows; 3],
    /// The type that is computed in: f32 or f64.
    pub compute: DType,
    /// Which way, and the operands.
    pub pass: PoolPass,
}

impl PoolProblem {
    /// `[n, c, extents…]`.
    pub fn x_dims(&self) -> [u64; 5] {
        [self.n, self.c, self.extents[0], self.extents[1], self.extents[2]]
    }

    /// `[n, c, out…]`.
    pub fn y_dims(&self) -> [u64; 5] {
        [self.n, self.c, self.out[0], self.out[1], self.out[2]]
    }

    /// `[n, c, 1, 1, dims whose windows are fractional]`.
    pub fn samples_dims(&self) -> [u64; 5] {
        let fractional = self.windows.iter().filter(|windows| matches!(windows, Windows::Fractional { .. })).count();
        [self.n, self.c, 1, 1, fractional as u64]
    }

    /// The operands in the order of slots: name, view, dims, and whether it is written.
    pub fn operands(&self) -> Vec<(&'static str, &View, [u64; 5], bool)> {
        let (wide, narrow) = (self.x_dims(), self.y_dims());
        match &self.pass {
            PoolPass::Forward { x, samples, y, index } => {
                let mut list = vec![("x", x, wide, false)];
                list.extend(samples.iter().map(|samples| ("samples", samples, self.samples_dims(), false)));
                list.push(("y", y, narrow, true));
                list.extend(index.iter().map(|index| ("index", index, narrow, true)));
                list
            }
            PoolPass::Backward { dy, x, index, dx } => {
                let mut list = vec![("dy", dy, narrow, false)];
                list.extend(x.iter().map(|x| ("x", x, wide, false)));
                list.extend(index.iter().map(|index| ("index", index, narrow, false)));
                list.push(("dx", dx, wide, true));
                list
            }
        }
    }

    fn views_mut(&mut self) -> Vec<&mut View> {
        match &mut self.pass {
            PoolPass::Forward { x, samples, y, index } => {
                [x].into_iter().chain(samples.iter_mut()).chain([y]).chain(index.iter_mut()).collect()
            }
            PoolPass::Backward { dy, x, index, dx } => [dy].into_iter().chain(x.iter_mut()).chain(index.iter_mut()).chain([dx]).collect(),
        }
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        self.operands().iter().filter(|(.., written)| *written).all(|(_, _, dims, _)| dims.contains(&0))
    }

    /// Arithmetic work: one operation for each tap of each window.
    pub fn flops(&self) -> f64 {
        let taps = |i: usize| match self.windows[i] {
            Windows::Sliding { taps, .. } | Windows::Fractional { taps } => taps as f64,
            Windows::Adaptive => (self.extents[i] as f64 / self.out[i].max(1) as f64).max(1.0),
        };
        (0..3).map(taps).product::<f64>() * self.y_dims().iter().map(|&dim| dim as f64).product::<f64>()
    }

    /// Every slot, in order, each once.
    pub fn slots(&self) -> Vec<Slot> {
        super::slots_of(|visit| self.clone().views_mut().into_iter().for_each(|view| visit(&mut view.slot)))
    }

    /// Numbers the slots from 0 in the order of the fields and returns the old slot of each new one.
    pub fn number_slots(&mut self) -> Vec<Slot> {
        let old = self.slots();
        self.views_mut().into_iter().for_each(|view| super::renumber(&old, &mut view.slot));
        old
    }

    /// What [`super::Problem::buffers`] says.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        (self.operands().into_iter()).map(|(name, view, dims, written)| views::operand(name, view, &dims, views::access(written))).collect()
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// # Errors
    /// Views that have not five strides, windows of nothing, operands that the mode does not have, an output that overlaps itself or shares
    /// its buffer, types that the op does not take.
    pub fn canonical(mut self) -> Result<PoolProblem, Error> {
        let op = || "pool".to_owned();
        super::check_extents("pool", &self.x_dims())?;
        super::check_extents("pool", &self.y_dims())?;
        let structure = |tensor: &str, rule| Err(Error::Structure { op: op(), tensor: tensor.to_owned(), rule });
        for ((windows, &out), &extent) in self.windows.iter().zip(&self.out).zip(&self.extents) {
            let attribute = |attribute, value: u64, rule| Err(Error::Attribute { op: op(), attribute, value: value.to_string(), rule });
            match *windows {
                Windows::Sliding { taps, stride, dilation, pad_before } => {
                    let reach = taps.saturating_sub(1).checked_mul(dilation).and_then(|reach| reach.checked_add(pad_before));
                    let last = out.checked_mul(stride).zip(reach).and_then(|(first, reach)| first.checked_add(reach));
                    if taps == 0 || stride == 0 || dilation == 0 {
                        return attribute("windows", 0, "windows, strides and dilations are at least 1");
                    }
                    if last.is_none_or(|last| last > 1 << 62) {
                        return attribute("windows", taps, "windows reach at most 2^62 elements far");
                    }
                }
                Windows::Adaptive if out == 0 => return attribute("out", 0, "an adaptive output has at least one element"),
                Windows::Adaptive => {}
                Windows::Fractional { taps } if taps == 0 || out == 0 || out.saturating_add(taps - 1) > extent => {
                    return attribute("windows", taps, "fractional windows have elements and fit, and there is at least one");
                }
                Windows::Fractional { .. } => {}
            }
        }
        let is_fractional = self.samples_dims()[4] > 0;
        match (&self.pass, self.mode) {
            (PoolPass::Forward { samples, .. }, _) if samples.is_some() != is_fractional => {
                return structure("samples", "fractional windows begin where samples say, and no others do");
            }
            (PoolPass::Forward { index, .. }, mode) if is_fractional && (mode != PoolMode::Max || index.is_none()) => {
                return structure("x", "fractional windows are those of max pooling that writes the index");
            }
            (PoolPass::Backward { index: None, .. }, _) if is_fractional => {
                return structure("index", "the gradient of fractional windows reads the index");
            }
            (PoolPass::Forward { index: Some(_), .. }, PoolMode::Average { .. }) => {
                return structure("index", "average pooling has no index");
            }
            (PoolPass::Backward { x, index, .. }, PoolMode::Max) if x.is_some() == index.is_some() => {
                return structure("x", "the gradient of max pooling reads either x or the index");
            }
            (PoolPass::Backward { x, index, .. }, PoolMode::Average { .. }) if x.is_some() || index.is_some() => {
                return structure("x", "the gradient of average pooling reads dy only");
            }
            _ => {}
        }
        for (name, view, dims, _) in self.operands() {
            if view.strides.len() != 5 {
                return structure(name, "a view has five strides");
            }
            if !view.dtype.is_storage()
                || view.dtype == DType::Bool
                || (name == "index" && !matches!(view.dtype, DType::I32 | DType::I64))
                || (name == "samples" && !view.dtype.is_float())
            {
                let rule = "data have a storage type, samples are floating-point, and an index is i32 or i64";
                return Err(Error::DType { op: op(), tensor: name.to_owned(), got: view.dtype, rule });
            }
            debug_assert_eq!(dims.len(), 5);
        }
        let operands = self.buffers()?;
        views::check_outputs("pool", &operands)?;
        let dims: Vec<[u64; 5]> = self.operands().into_iter().map(|(_, _, dims, _)| dims).collect();
        for (view, dims) in self.views_mut().into_iter().zip(dims) {
            view.strides.iter_mut().zip(dims).filter(|(_, dim)| *dim <= 1).for_each(|(stride, _)| *stride = 0);
        }
        Ok(self)
    }
}
