//! `batch_norm.toml`.

use serde::Deserialize;
use verdigris_graph::{BatchNorm, BatchNormBackward, Graph, Real, UnaryOp};
use verdigris_tensor::DType;

use super::{Cases, Common, Draft, Per, joined, normal, row};
use crate::cases::CaseError;
use crate::data::Distribution;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    id: String,
    types: Vec<DType>,
    out: Option<DType>,
    /// Of what belongs to channels.
    #[serde(default = "f32")]
    of_channels: DType,
    ops: Vec<Kind>,
    dims: Vec<Vec<u64>>,
    #[serde(default = "usual_eps")]
    eps: f64,
    #[serde(default = "row")]
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

fn usual_eps() -> f64 {
    1e-5
}

/// What is asked: the whole op but for what the word leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Statistics,
    /// Without scale, bias, running statistics and stored ones.
    ForwardPlain,
    Forward,
    ForwardRelu,
    ForwardAdd,
    ForwardAddRelu,
    ForwardSilu,
    ForwardHardSwish,
    ForwardRelu6,
    /// An activation that has a kernel of its own.
    ForwardLeakyRelu,
    /// Without scale.
    BackwardPlain,
    Backward,
    /// The result is worked out again.
    BackwardRelu,
    /// The result is read.
    BackwardAddRelu,
    BackwardSilu,
    BackwardHardSwish,
    BackwardRelu6,
    BackwardLeakyRelu,
    /// Of scale and bias alone.
    BackwardSums,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Kind::Statistics => "statistics",
            Kind::ForwardPlain => "forward_plain",
            Kind::Forward => "forward",
            Kind::ForwardRelu => "forward_relu",
            Kind::ForwardAdd => "forward_add",
            Kind::ForwardAddRelu => "forward_add_relu",
            Kind::ForwardSilu => "forward_silu",
            Kind::ForwardHardSwish => "forward_hard_swish",
            Kind::ForwardRelu6 => "forward_relu6",
            Kind::ForwardLeakyRelu => "forward_leaky_relu",
            Kind::BackwardPlain => "backward_plain",
            Kind::Backward => "backward",
            Kind::BackwardRelu => "backward_relu",
            Kind::BackwardAddRelu => "backward_add_relu",
            Kind::BackwardSilu => "backward_silu",
            Kind::BackwardHardSwish => "backward_hard_swish",
            Kind::BackwardRelu6 => "backward_relu6",
            Kind::BackwardLeakyRelu => "backward_leaky_relu",
            Kind::BackwardSums => "backward_sums",
        }
    }

    /// Of the activations other than ReLU.
    const fn activation(self) -> Option<UnaryOp> {
        match self {
            Kind::ForwardSilu | Kind::BackwardSilu => Some(UnaryOp::Silu),
            Kind::ForwardHardSwish | Kind::BackwardHardSwish => Some(UnaryOp::HardSwish),
            Kind::ForwardRelu6 | Kind::BackwardRelu6 => Some(UnaryOp::Clamp { lower: Real(0.0), upper: Real(6.0) }),
            Kind::ForwardLeakyRelu | Kind::BackwardLeakyRelu => Some(UnaryOp::LeakyRelu { slope: Real(0.1) }),
            _ => None,
        }
    }
}

impl Group {
    fn graph(&self, kind: Kind, dtype: DType, word: &str, dims: &[u64]) -> Result<Graph, CaseError> {
        let mut draft = Draft::new(&self.id);
        let (out, of_channels, vector) = (self.out.unwrap_or(dtype), self.of_channels, Per::Channel.dims(dims));
        let x = draft.tensor("x", dtype, word, dims)?;
        let per_channel = |draft: &mut Draft<'_>, what: &str| draft.tensor(what, of_channels, "row", &vector);
        match kind {
            Kind::Statistics => {
                let made = draft.builder.batch_norm_statistics("statistics", x);
                let (mean, m2) = draft.ok(made)?;
                draft.store(mean, "mean", of_channels, "row", &vector)?;
                draft.store(m2, "m2", of_channels, "row", &vector)?;
            }
            Kind::ForwardPlain => {
                let made = draft.builder.batch_norm("norm", BatchNorm::new(x, self.eps));
                let y = draft.ok(made)?.y;
                draft.store(y, "y", out, word, dims)?;
            }
            Kind::Forward
            | Kind::ForwardRelu
            | Kind::ForwardAdd
            | Kind::ForwardAddRelu
            | Kind::ForwardSilu
            | Kind::ForwardHardSwish
            | Kind::ForwardRelu6
            | Kind::ForwardLeakyRelu => {
                let relu = matches!(kind, Kind::ForwardRelu | Kind::ForwardAddRelu);
                let mut norm = BatchNorm { relu, activation: kind.activation(), ..BatchNorm::new(x, self.eps) };
                norm.scale = Some(per_channel(&mut draft, "scale")?);
                norm.bias = Some(per_channel(&mut draft, "bias")?);
                if matches!(kind, Kind::ForwardAdd | Kind::ForwardAddRelu) {
                    norm.add = Some(draft.tensor("add", dtype, word, dims)?);
                }
                norm.running_mean = Some(per_channel(&mut draft, "running mean")?);
                norm.running_var = Some(per_channel(&mut draft, "running var")?);
                let made = draft.builder.batch_norm("norm", norm);
                let normed = draft.ok(made)?;
                draft.store(normed.y, "y", out, word, dims)?;
                for uid in [Some(normed.mean), Some(normed.inv), normed.next_mean, normed.next_var].into_iter().flatten() {
                    draft.store(uid, "statistic", of_channels, "row", &vector)?;
                }
            }
            Kind::BackwardPlain
            | Kind::Backward
            | Kind::BackwardRelu
            | Kind::BackwardAddRelu
            | Kind::BackwardSilu
            | Kind::BackwardHardSwish
            | Kind::BackwardRelu6
            | Kind::BackwardLeakyRelu
            | Kind::BackwardSums => {
                let dy = draft.tensor("dy", dtype, word, dims)?;
                let (mean, inv) = (per_channel(&mut draft, "mean")?, per_channel(&mut draft, "inv")?);
                let relu = matches!(kind, Kind::BackwardRelu | Kind::BackwardAddRelu);
                let mut back = BatchNormBackward { relu, activation: kind.activation(), ..BatchNormBackward::new(dy, x, mean, inv) };
                if kind != Kind::BackwardPlain {
                    back.scale = Some(per_channel(&mut draft, "scale")?);
                }
                if kind == Kind::BackwardRelu || kind.activation().is_some() {
                    back.bias = Some(per_channel(&mut draft, "bias")?);
                }
                if kind == Kind::BackwardAddRelu {
                    back.y = Some(draft.tensor("y", dtype, word, dims)?);
                }
                let made = draft.builder.batch_norm_backward("norm", back);
                let (dx, dscale, dbias, dadd) = draft.ok(made)?;
                if kind != Kind::BackwardSums {
                    draft.store(dx, "dx", out, word, dims)?;
                }
                draft.store(dscale, "dscale", of_channels, "row", &vector)?;
                draft.store(dbias, "dbias", of_channels, "row", &vector)?;
                if let (Some(dadd), Kind::BackwardAddRelu) = (dadd, kind) {
                    draft.store(dadd, "dadd", out, word, dims)?;
                }
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
        for &kind in &self.ops {
            for &dtype in &self.types {
                for word in &self.layouts {
                    for dims in &self.dims {
                        let name = format!("{}/{dtype}/{word}/{}", kind.name(), joined(dims));
                        graphs.push((name, self.graph(kind, dtype, word, dims)?));
                    }
                }
            }
        }
        Ok(graphs)
    }
}
