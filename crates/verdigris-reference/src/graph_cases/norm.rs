//! `norm.toml`.

use serde::Deserialize;
use verdigris_graph::{Graph, NormGradients, NormKind, NormSpec, Normalize, NormalizeBackward};
use verdigris_tensor::DType;

use super::{Cases, Common, Draft, field, joined, normal, row};
use crate::cases::CaseError;
use crate::data::Distribution;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    id: String,
    types: Vec<DType>,
    out: Option<DType>,
    /// The type of scale and bias.
    vector: Option<DType>,
    passes: Vec<Pass>,
    #[serde(default = "both")]
    kinds: Vec<NormKind>,
    dims: Vec<Vec<u64>>,
    axes: Vec<Vec<u32>>,
    #[serde(default = "one")]
    groups: u64,
    #[serde(default = "along")]
    vectors: Vec<Vectors>,
    #[serde(default = "eps")]
    eps: f64,
    #[serde(default)]
    zero_centred: bool,
    #[serde(default)]
    residual: bool,
    #[serde(default)]
    statistics: bool,
    #[serde(default = "row")]
    layouts: Vec<String>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    device_only: bool,
}

fn both() -> Vec<NormKind> {
    vec![NormKind::Layer, NormKind::Rms]
}

fn one() -> u64 {
    1
}

fn along() -> Vec<Vectors> {
    vec![Vectors::Axes]
}

fn eps() -> f64 {
    1e-5
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Pass {
    Forward,
    Backward,
    /// The gradients of scale and bias alone.
    BackwardVectors,
    /// The gradient of the bias alone.
    BackwardBias,
}

impl Pass {
    const fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::BackwardVectors => "vectors",
            Pass::BackwardBias => "bias",
        }
    }
}

/// The dims that scale and bias have: those of the tensor at some axes, 1 at the others.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Vectors {
    None,
    /// At the axes of a row.
    Axes,
    /// At dim 1.
    Channel,
    /// At dim 0 and the last.
    Adaptive,
    /// At the first dim of a row's axes and at the last that is none of them.
    Mixed,
    /// At all.
    Whole,
    /// At none.
    One,
}

impl Vectors {
    const fn name(self) -> &'static str {
        match self {
            Vectors::None => "none",
            Vectors::Axes => "axes",
            Vectors::Channel => "channel",
            Vectors::Adaptive => "adaptive",
            Vectors::Mixed => "mixed",
            Vectors::Whole => "whole",
            Vectors::One => "one",
        }
    }

    fn dims(self, dims: &[u64], axes: &[u32]) -> Option<Vec<u64>> {
        let is_axis = |dim: usize| axes.contains(&(dim as u32));
        let last_row = (0..dims.len()).rev().find(|&dim| !is_axis(dim));
        let has = |dim: usize| match self {
            Vectors::Whole => true,
            Vectors::Axes => is_axis(dim),
            Vectors::Channel => dim == 1,
            Vectors::Adaptive => dim == 0 || dim + 1 == dims.len(),
            Vectors::Mixed => Some(&(dim as u32)) == axes.first() || Some(dim) == last_row,
            Vectors::None | Vectors::One => false,
        };
        (self != Vectors::None).then(|| dims.iter().enumerate().map(|(dim, &extent)| if has(dim) { extent } else { 1 }).collect())
    }
}

/// What one case is made of.
struct One<'c> {
    pass: Pass,
    kind: NormKind,
    axes: &'c [u32],
    dtype: DType,
    vectors: Vectors,
    word: &'c str,
    dims: &'c [u64],
}

impl Group {
    fn graph(&self, one: &One<'_>) -> Result<Graph, CaseError> {
        let &One { pass, kind, axes, dtype, vectors, word, dims } = one;
        let mut draft = Draft::new(&self.id);
        let (out, of_vector) = (self.out.unwrap_or(dtype), self.vector.unwrap_or(dtype));
        let spec = NormSpec { groups: self.groups, zero_centred: self.zero_centred, ..NormSpec::new(kind, axes, self.eps) };
        if let Some(axis) = axes.iter().find(|&&axis| axis as usize >= dims.len()) {
            return field(&self.id, "axes", format!("{axis} of {}", joined(dims)), "an axis is one of the dims, counted from 0");
        }
        let mut narrow = dims.to_vec();
        axes.iter().for_each(|&axis| narrow[axis as usize] = 1);
        if let Some(&first) = axes.first() {
            narrow[first as usize] = self.groups;
        }
        let x = draft.tensor("x", dtype, word, dims)?;
        let of_vectors = vectors.dims(dims, axes);
        let scale = of_vectors.as_ref().map(|dims| draft.tensor("scale", of_vector, "row", dims)).transpose()?;
        let is_layer = kind == NormKind::Layer;
        if pass == Pass::Forward {
            let bias = of_vectors.as_ref().filter(|_| is_layer).map(|dims| draft.tensor("bias", of_vector, "row", dims)).transpose()?;
            let residual = if self.residual { Some(draft.tensor("residual", dtype, word, dims)?) } else { None };
            let made = draft.builder.normalize("norm", Normalize { residual, scale, bias, ..Normalize::new(spec, x) });
            let made = draft.ok(made)?;
            draft.store(made.y, "y", out, word, dims)?;
            if let Some(sum) = made.sum {
                draft.store(sum, "sum", out, word, dims)?;
            }
            for (uid, name) in [(made.mean, "mean"), (Some(made.inv), "inv")] {
                if let Some(uid) = uid.filter(|_| self.statistics) {
                    draft.store(uid, name, DType::F32, "row", &narrow)?;
                }
            }
            return draft.finish();
        }
        let dy = draft.tensor("dy", dtype, word, dims)?;
        let has_dx = pass == Pass::Backward;
        let dsum = if self.residual && has_dx { Some(draft.tensor("dsum", dtype, word, dims)?) } else { None };
        let mut back = NormalizeBackward { scale, dsum, ..NormalizeBackward::new(spec, x, dy) };
        if self.statistics {
            back.inv = Some(draft.tensor("inv", DType::F32, "row", &narrow)?);
            back.mean = if is_layer { Some(draft.tensor("mean", DType::F32, "row", &narrow)?) } else { None };
        }
        let of_bias = of_vectors.as_deref().filter(|_| is_layer);
        let wanted = NormGradients { dx: has_dx, dscale: scale.is_some() && pass != Pass::BackwardBias, dbias: of_bias };
        let made = draft.builder.normalize_backward("norm", back, wanted);
        let made = draft.ok(made)?;
        if let Some(dx) = made.dx {
            draft.store(dx, "dx", out, word, dims)?;
        }
        for (uid, name) in [(made.dscale, "dscale"), (made.dbias, "dbias")] {
            if let (Some(uid), Some(dims)) = (uid, &of_vectors) {
                draft.store(uid, name, of_vector, "row", dims)?;
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
        for &pass in &self.passes {
            for &kind in &self.kinds {
                for axes in &self.axes {
                    for &dtype in &self.types {
                        for &vectors in &self.vectors {
                            for word in &self.layouts {
                                for dims in &self.dims {
                                    let how = if kind == NormKind::Layer { "layer" } else { "rms" };
                                    let along: Vec<String> = axes.iter().map(u32::to_string).collect();
                                    let name = format!(
                                        "{}_{how}/{dtype}/{}/{word}/{}-axes{}",
                                        pass.name(),
                                        vectors.name(),
                                        joined(dims),
                                        along.join("_")
                                    );
                                    graphs.push((name, self.graph(&One { pass, kind, axes, dtype, vectors, word, dims })?));
                                }
                            }
                        }
                    }
                }
            }
        }
        Ok(graphs)
    }
}
