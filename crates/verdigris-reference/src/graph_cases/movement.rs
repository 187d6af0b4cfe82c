//! `movement.toml`.

use serde::Deserialize;
use verdigris_graph::{BinaryOp, Graph, Uid};
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
    Turn { is_gradient: bool },
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
            Move::Turn { is_gradient } => if *is_gradient { "turn-gradient" } else { "turn" }.to_owned(),
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
            Move::Turn { is_gradient } => Ok(self.turned(&mut draft, x, (dtype, word), dims, *is_gradient)?),
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
            Move::Turn { .. } => dims.to_vec(),
        };
        draft.store(y, "y", dtype, self.out_layout.as_deref().unwrap_or(word), &out)?;
        draft.finish()
    }
}

impl Group {
    /// Rotary positions: what is multiplied by cosines, and the other half of the last dim by sines, of all heads (dim 1).
    fn turned(
        &self,
        draft: &mut Draft<'_>,
        x: Uid,
        (dtype, word): (DType, &str),
        dims: &[u64],
        is_gradient: bool,
    ) -> Result<Uid, CaseError> {
        let (Some((&elements, _)), true) = (dims.split_last(), dims.len() > 2) else {
            return field(&self.id, "dims", joined(dims), "heads are dim 1, their elements the last of at least three");
        };
        let mut of_angles = dims.to_vec();
        of_angles[1] = 1;
        let (cos, sin) = (draft.tensor("cos", dtype, word, &of_angles)?, draft.tensor("sin", dtype, word, &of_angles)?);
        let half = elements / 2;
        let other = |draft: &mut Draft<'_>, x: Uid, is_high: bool| {
            let along = |extent: u64| [vec![0; dims.len() - 1], vec![extent]].concat();
            let from = if is_high { half } else { 0 };
            let stops = [&dims[..dims.len() - 1], &[from + half]].concat();
            let part = draft.builder.slice("half", x, &along(from), &stops, &vec![1; dims.len()]);
            let part = draft.ok(part)?;
            let padded = draft.builder.pad("beside zeros", part, &along(half - from), &along(from), 0.0);
            draft.ok(padded)
        };
        let (low, high) = (other(draft, x, false)?, other(draft, x, true)?);
        let binary = |draft: &mut Draft<'_>, f: BinaryOp, a: Uid, b: Uid| {
            let made = draft.builder.binary("turn", f, a, b);
            draft.ok(made)
        };
        let straight = binary(draft, BinaryOp::Mul, x, cos)?;
        let across = if is_gradient {
            let sines = draft.builder.broadcast("sines", sin, dims);
            let sines = draft.ok(sines)?;
            let (of_low, of_high) = (other(draft, sines, false)?, other(draft, sines, true)?);
            let (low, high) = (binary(draft, BinaryOp::Mul, low, of_low)?, binary(draft, BinaryOp::Mul, high, of_high)?);
            binary(draft, BinaryOp::Sub, high, low)?
        } else {
            let other = binary(draft, BinaryOp::Sub, low, high)?;
            binary(draft, BinaryOp::Mul, other, sin)?
        };
        binary(draft, BinaryOp::Add, straight, across)
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
