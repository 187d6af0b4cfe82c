//! `resample.toml`.

use serde::Deserialize;
use verdigris_graph::{Border, Filter, Graph, Real, Sampling, TensorDesc, Uid};
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
    modes: Vec<Mode>,
    /// `forward`, `backward`.
    #[serde(default = "both")]
    passes: Vec<Pass>,
    /// One for each spatial dim.
    #[serde(default)]
    factors: Vec<f64>,
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

fn both() -> Vec<Pass> {
    vec![Pass::Forward, Pass::Backward]
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Pass {
    Forward,
    Backward,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    Nearest,
    NearestExact,
    Linear,
    LinearCorners,
    Cubic,
    CubicCorners,
    Reflect,
    Replicate,
    Circular,
}

impl Mode {
    const fn name(self) -> &'static str {
        match self {
            Mode::Nearest => "nearest",
            Mode::NearestExact => "nearest_exact",
            Mode::Linear => "linear",
            Mode::LinearCorners => "linear_corners",
            Mode::Cubic => "cubic",
            Mode::CubicCorners => "cubic_corners",
            Mode::Reflect => "reflect",
            Mode::Replicate => "replicate",
            Mode::Circular => "circular",
        }
    }

    fn sampling(self, out: Vec<u64>, factors: Vec<Real>, pads: &[(u64, u64)]) -> Sampling {
        let interpolate = |filter| Sampling::Interpolate { filter, out: out.clone(), factors: factors.clone() };
        let pad = |border| {
            let side = |of: fn(&(u64, u64)) -> u64| pads.iter().map(|pad| of(pad) as i64).collect();
            Sampling::Pad { border, before: side(|pad| pad.0), after: side(|pad| pad.1) }
        };
        match self {
            Mode::Nearest => interpolate(Filter::Nearest),
            Mode::NearestExact => interpolate(Filter::NearestExact),
            Mode::Linear => interpolate(Filter::Linear { align_corners: false }),
            Mode::LinearCorners => interpolate(Filter::Linear { align_corners: true }),
            Mode::Cubic => interpolate(Filter::Cubic { align_corners: false }),
            Mode::CubicCorners => interpolate(Filter::Cubic { align_corners: true }),
            Mode::Reflect => pad(Border::Reflect),
            Mode::Replicate => pad(Border::Replicate),
            Mode::Circular => pad(Border::Circular),
        }
    }
}

impl Group {
    fn graph(&self, shape: &Shape, mode: Mode, pass: Pass, dtype: DType, word: &str) -> Result<Graph, CaseError> {
        let rule = "n2 c3 i9x9 and o4x12, or p2:1x0 of a border; one number or one for each dim of i";
        let Some(spatial) = shape.pairs('i').map(<[_]>::len) else {
            return field(&self.id, "shapes", &shape.text, rule);
        };
        let extents = shape.numbers('i', spatial, 1);
        let factors = self.factors.iter().map(|factor| Real(*factor)).collect();
        let sampling = mode.sampling(shape.numbers('o', spatial, 1), factors, &shape.each('p', spatial, 0));
        let mut draft = Draft::new(&self.id);
        let x_dims = [&[shape.one('n', 1), shape.one('c', 1)], extents.as_slice()].concat();
        let described = TensorDesc::new(Uid(0), "x", dtype, super::layout(&self.id, word, &x_dims)?);
        let y_dims = draft.ok(sampling.infer("resample", &described))?;
        let out = self.out.unwrap_or(dtype);
        match pass {
            Pass::Forward => {
                let x = draft.tensor("x", dtype, word, &x_dims)?;
                let y = draft.builder.resample("resample", sampling, x);
                let y = draft.ok(y)?;
                draft.store(y, "y", out, word, &y_dims)?;
            }
            Pass::Backward => {
                let dy = draft.tensor("dy", dtype, word, &y_dims)?;
                let dx = draft.builder.resample_backward("resample", sampling, dy, &x_dims);
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
                    for &pass in &self.passes {
                        for &dtype in &self.types {
                            for word in &self.layouts {
                                let back = if pass == Pass::Backward { "_backward" } else { "" };
                                let name = format!("{}{back}/{dtype}/{word}/{}", mode.name(), shape.text);
                                graphs.push((name, self.graph(&shape, mode, pass, dtype, word)?));
                            }
                        }
                    }
                }
            }
        }
        Ok(graphs)
    }
}
