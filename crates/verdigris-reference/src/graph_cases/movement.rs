//! `movement.toml`.

use serde::Deserialize;
use verdigris_graph::Graph;
use verdigris_tensor::DType;

use super::{Cases, Common, Draft, field, joined, normal, row};
use crate::cases::CaseError;
use crate::data::Distribution;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    id: String,
    types: Vec<DType>,
    moves: Vec<Move>,
    dims: Vec<Vec<u64>>,
    #[serde(default = "row")]
    layouts: Vec<String>,
    /// Of what is written; default that of what is read.
    out_layout: Option<String>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    device_only: bool,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Move {
    Reshape(Vec<u64>),
    Broadcast(Vec<u64>),
    Transpose(Vec<u32>),
    Slice { starts: Vec<u64>, stops: Vec<u64>, steps: Vec<u64> },
    Pad { before: Vec<u64>, after: Vec<u64>, value: f64 },
    Concat { axis: u32, count: u64 },
}

impl Move {
    fn name(&self) -> String {
        match self {
            Move::Reshape(dims) => format!("reshape{}", joined(dims)),
            Move::Broadcast(dims) => format!("broadcast{}", joined(dims)),
            Move::Transpose(permutation) => format!("transpose{}", permutation.iter().map(u32::to_string).collect::<String>()),
            Move::Slice { starts, stops, steps } => format!("slice{}-{}-{}", joined(starts), joined(stops), joined(steps)),
            Move::Pad { before, after, .. } => format!("pad{}-{}", joined(before), joined(after)),
            Move::Concat { axis, count } => format!("concat{axis}-{count}"),
        }
    }
}

/// Tensors that one case joins.
const MOST_PARTS: u64 = 1024;

impl Group {
    fn graph(&self, what: &Move, dtype: DType, word: &str, dims: &[u64]) -> Result<Graph, CaseError> {
        let mut draft = Draft::new(&self.id);
        let x = draft.tensor("x", dtype, word, dims)?;
        let made = match what {
            Move::Reshape(out) => draft.builder.reshape("move", x, out),
            Move::Broadcast(out) => draft.builder.broadcast("move", x, out),
            Move::Transpose(permutation) => draft.builder.transpose("move", x, permutation),
            Move::Slice { starts, stops, steps } => draft.builder.slice("move", x, starts, stops, steps),
            Move::Pad { before, after, value } => draft.builder.pad("move", x, before, after, *value),
            Move::Concat { axis, count } => {
                if *count > MOST_PARTS {
                    return field(&self.id, "moves", what.name(), "at most 1024 tensors are joined");
                }
                let mut parts = vec![x];
                for extra in 1..*count {
                    // Each part is of its own size.
                    let mut dims = dims.to_vec();
                    if let Some(extent) = dims.get_mut(*axis as usize) {
                        *extent = extent.saturating_add(extra);
                    }
                    parts.push(draft.tensor("x", dtype, word, &dims)?);
                }
                draft.builder.concat("move", &parts, *axis)
            }
        };
        let y = draft.ok(made)?;
        let out: Vec<u64> = match what {
            Move::Reshape(out) | Move::Broadcast(out) => out.clone(),
            Move::Transpose(permutation) => permutation.iter().map(|&dim| dims[dim as usize]).collect(),
            Move::Slice { starts, stops, steps } => (0..dims.len()).map(|i| (stops[i] - starts[i]).div_ceil(steps[i])).collect(),
            Move::Pad { before, after, .. } => (0..dims.len()).map(|i| before[i] + dims[i] + after[i]).collect(),
            Move::Concat { axis, count } => {
                let mut out = dims.to_vec();
                out[*axis as usize] = (0..*count).map(|extra| dims[*axis as usize] + extra).sum();
                out
            }
        };
        draft.store(y, "y", dtype, self.out_layout.as_deref().unwrap_or(word), &out)?;
        draft.finish()
    }
}

impl Cases for Group {
    fn common(&self) -> Common<'_> {
        Common { id: &self.id, data: self.data, deterministic: self.deterministic, device_only: self.device_only }
    }

    fn graphs(&self) -> Result<Vec<(String, Graph)>, CaseError> {
        let mut graphs = Vec::new();
        for what in &self.moves {
            for &dtype in &self.types {
                for word in &self.layouts {
                    for dims in &self.dims {
                        let name = format!("{}/{dtype}/{word}/{}", what.name(), joined(dims));
                        graphs.push((name, self.graph(what, dtype, word, dims)?));
                    }
                }
            }
        }
        Ok(graphs)
    }
}
