//! `pool.toml`.

use serde::Deserialize;
use verdigris_graph::{Graph, PoolBackward, PoolMode, PoolWindows, Uid};
use verdigris_tensor::DType;

use super::{Cases, Common, Draft, Shape, field, normal, row};
use crate::cases::CaseError;
use crate::data::Distribution;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    id: String,
    types: Vec<DType>,
    out: Option<DType>,
    #[serde(default = "i32")]
    index: DType,
    /// Of fractional windows, that of x if it is not given.
    samples: Option<DType>,
    modes: Vec<Mode>,
    shapes: Vec<String>,
    #[serde(default = "row")]
    layouts: Vec<String>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    device_only: bool,
}

fn i32() -> DType {
    DType::I32
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    Max,
    MaxIndex,
    Average,
    AveragePad,
    MaxBackward,
    IndexBackward,
    AverageBackward,
    AveragePadBackward,
}

impl Mode {
    const fn name(self) -> &'static str {
        match self {
            Mode::Max => "max",
            Mode::MaxIndex => "max_index",
            Mode::Average => "average",
            Mode::AveragePad => "average_pad",
            Mode::MaxBackward => "max_backward",
            Mode::IndexBackward => "index_backward",
            Mode::AverageBackward => "average_backward",
            Mode::AveragePadBackward => "average_pad_backward",
        }
    }

    const fn forward(self) -> PoolMode {
        match self {
            Mode::Max | Mode::MaxIndex | Mode::MaxBackward | Mode::IndexBackward => PoolMode::Max,
            Mode::Average | Mode::AverageBackward => PoolMode::Average { count_include_pad: false },
            Mode::AveragePad | Mode::AveragePadBackward => PoolMode::Average { count_include_pad: true },
        }
    }
}

impl Group {
    fn graph(&self, shape: &Shape, mode: Mode, dtype: DType, word: &str) -> Result<Graph, CaseError> {
        let rule = "n2 c3 i9x9 and w3x3 (with s, p, d), o4x4 (adaptive) or both (fractional); one number or one for each dim of i";
        let Some(spatial) = shape.pairs('i').map(<[_]>::len) else {
            return field(&self.id, "shapes", &shape.text, rule);
        };
        let extents = shape.numbers('i', spatial, 1);
        let pads = shape.each('p', spatial, 0);
        let is_fractional = shape.pairs('o').is_some() && shape.pairs('w').is_some();
        let windows = if is_fractional {
            PoolWindows::Fractional { window: shape.numbers('w', spatial, 1), out: shape.numbers('o', spatial, 1) }
        } else if shape.pairs('o').is_some() {
            PoolWindows::Adaptive { out: shape.numbers('o', spatial, 1) }
        } else {
            PoolWindows::Sliding {
                window: shape.numbers('w', spatial, 1),
                strides: shape.numbers('s', spatial, 1),
                dilations: shape.numbers('d', spatial, 1),
                pads_before: pads.iter().map(|pad| pad.0).collect(),
                pads_after: pads.iter().map(|pad| pad.1).collect(),
            }
        };
        let mut draft = Draft::new(&self.id);
        let x_dims = [&[shape.one('n', 1), shape.one('c', 1)], extents.as_slice()].concat();
        let x_layout = super::layout(&self.id, word, &x_dims)?;
        let described = verdigris_graph::TensorDesc::new(Uid(0), "x", dtype, x_layout);
        let y_dims = draft.ok(windows.infer("pool", &described))?;
        let out = self.out.unwrap_or(dtype);
        let forward = mode.forward();
        match mode {
            Mode::Max | Mode::Average | Mode::AveragePad => {
                let x = draft.tensor("x", dtype, word, &x_dims)?;
                let y = draft.builder.pool("pool", forward, windows, x);
                let y = draft.ok(y)?;
                draft.store(y, "y", out, word, &y_dims)?;
            }
            Mode::MaxIndex => {
                let x = draft.tensor("x", dtype, word, &x_dims)?;
                let made = if let PoolWindows::Fractional { window, out } = &windows {
                    let samples = draft.tensor("samples", self.samples.unwrap_or(dtype), "row", &[x_dims[0], x_dims[1], spatial as u64])?;
                    draft.builder.fractional_max_pool("pool", x, samples, (window, out), self.index)
                } else {
                    draft.builder.max_pool_with_index("pool", windows, x, self.index)
                };
                let (y, index) = draft.ok(made)?;
                draft.store(y, "y", out, word, &y_dims)?;
                draft.store(index, "index", self.index, word, &y_dims)?;
            }
            Mode::MaxBackward | Mode::IndexBackward | Mode::AverageBackward | Mode::AveragePadBackward => {
                let dy = draft.tensor("dy", dtype, word, &y_dims)?;
                let mut back = PoolBackward { mode: forward, windows, dy, x: None, index: None, dx: Uid(0) };
                if mode == Mode::MaxBackward {
                    back.x = Some(draft.tensor("x", dtype, word, &x_dims)?);
                } else if mode == Mode::IndexBackward {
                    back.index = Some(draft.tensor("index", self.index, word, &y_dims)?);
                }
                let dx = draft.builder.pool_backward("pool", back, &x_dims);
                let dx = draft.ok(dx)?;
                draft.store(dx, "dx", out, word, &x_dims)?;
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
                for &mode in &self.modes {
                    for &dtype in &self.types {
                        for word in &self.layouts {
                            let name = format!("{}/{dtype}/{word}/{}", mode.name(), shape.text);
                            graphs.push((name, self.graph(&shape, mode, dtype, word)?));
                        }
                    }
                }
            }
        }
        Ok(graphs)
    }
}
