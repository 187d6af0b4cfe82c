//! `softmax.toml`.

use serde::Deserialize;
use verdigris_graph::{CrossEntropyBackward, CrossEntropySpec, Graph, LossReduction, Real, Uid};
use verdigris_tensor::DType;

use super::{Cases, Common, Draft, joined, normal, row};
use crate::cases::CaseError;
use crate::data::Distribution;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    id: String,
    types: Vec<DType>,
    out: Option<DType>,
    ops: Vec<Kind>,
    dims: Vec<Vec<u64>>,
    axis: Vec<u32>,
    #[serde(default = "mean")]
    reductions: Vec<LossReduction>,
    #[serde(default)]
    smoothing: f64,
    ignore_index: Option<i64>,
    #[serde(default)]
    lse: bool,
    #[serde(default = "i64")]
    labels: DType,
    #[serde(default = "row")]
    layouts: Vec<String>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    device_only: bool,
}

fn mean() -> Vec<LossReduction> {
    vec![LossReduction::Mean]
}

fn i64() -> DType {
    DType::I64
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Softmax,
    LogSoftmax,
    SoftmaxBackward,
    LogSoftmaxBackward,
    CrossEntropy,
    CrossEntropyBackward,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Kind::Softmax => "softmax",
            Kind::LogSoftmax => "log_softmax",
            Kind::SoftmaxBackward => "softmax_backward",
            Kind::LogSoftmaxBackward => "log_softmax_backward",
            Kind::CrossEntropy => "cross_entropy",
            Kind::CrossEntropyBackward => "cross_entropy_backward",
        }
    }
}

impl Group {
    fn graph(&self, kind: Kind, reduction: LossReduction, axis: u32, dtype: DType, word: &str, dims: &[u64]) -> Result<Graph, CaseError> {
        let mut draft = Draft::new(&self.id);
        let out = self.out.unwrap_or(dtype);
        let spec = CrossEntropySpec {
            label_smoothing: Real(self.smoothing),
            ignore_index: self.ignore_index,
            ..CrossEntropySpec::new(axis, reduction)
        };
        let rows: Vec<u64> = (0..dims.len()).map(|dim| if dim == axis as usize { 1 } else { dims[dim] }).collect();
        let loss_dims = if reduction == LossReduction::None { rows.clone() } else { vec![1; dims.len()] };
        match kind {
            Kind::Softmax | Kind::LogSoftmax => {
                let x = draft.tensor("x", dtype, word, dims)?;
                let y = draft.builder.softmax("softmax", x, axis, kind == Kind::LogSoftmax);
                let y = draft.ok(y)?;
                draft.store(y, "y", out, word, dims)?;
            }
            Kind::SoftmaxBackward | Kind::LogSoftmaxBackward => {
                let y = draft.tensor("y", dtype, word, dims)?;
                let dy = draft.tensor("dy", dtype, word, dims)?;
                let dx = draft.builder.softmax_backward("softmax", y, dy, axis, kind == Kind::LogSoftmaxBackward);
                let dx = draft.ok(dx)?;
                draft.store(dx, "dx", out, word, dims)?;
            }
            Kind::CrossEntropy => {
                let logits = draft.tensor("logits", dtype, word, dims)?;
                let labels = draft.tensor("labels", self.labels, "row", &rows)?;
                if self.lse {
                    let made = draft.builder.cross_entropy_with_lse("loss", spec, logits, labels);
                    let (loss, lse) = draft.ok(made)?;
                    draft.store(loss, "loss", out, "row", &loss_dims)?;
                    draft.store(lse, "lse", DType::F32, "row", &rows)?;
                } else {
                    let loss = draft.builder.cross_entropy("loss", spec, logits, labels);
                    let loss = draft.ok(loss)?;
                    draft.store(loss, "loss", out, "row", &loss_dims)?;
                }
            }
            Kind::CrossEntropyBackward => {
                let logits = draft.tensor("logits", dtype, word, dims)?;
                let labels = draft.tensor("labels", self.labels, "row", &rows)?;
                let dloss = draft.tensor("dloss", DType::F32, "row", &loss_dims)?;
                let lse = if self.lse { Some(draft.tensor("lse", DType::F32, "row", &rows)?) } else { None };
                let back = CrossEntropyBackward { spec, logits, labels, dloss, lse, dlogits: Uid(0) };
                let dlogits = draft.builder.cross_entropy_backward("loss", back);
                let dlogits = draft.ok(dlogits)?;
                draft.store(dlogits, "dlogits", out, word, dims)?;
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
            let is_loss = matches!(kind, Kind::CrossEntropy | Kind::CrossEntropyBackward);
            for &reduction in if is_loss { self.reductions.as_slice() } else { &[LossReduction::None] } {
                for &axis in &self.axis {
                    for &dtype in &self.types {
                        for word in &self.layouts {
                            for dims in &self.dims {
                                let how = match reduction {
                                    _ if !is_loss => "",
                                    LossReduction::None => "_none",
                                    LossReduction::Sum => "_sum",
                                    LossReduction::Mean => "_mean",
                                };
                                let name = format!("{}{how}/{dtype}/{word}/{}-axis{axis}", kind.name(), joined(dims));
                                graphs.push((name, self.graph(kind, reduction, axis, dtype, word, dims)?));
                            }
                        }
                    }
                }
            }
        }
        Ok(graphs)
    }
}
