//! `reduction.toml`.

use serde::Deserialize;
use verdigris_graph::{Graph, ReductionOp};
use verdigris_tensor::DType;

use super::{Cases, Common, Draft, Step, joined, normal, row};
use crate::cases::CaseError;
use crate::data::Distribution;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    id: String,
    types: Vec<DType>,
    out: Option<DType>,
    f: Vec<ReductionOp>,
    axes: Vec<Vec<u32>>,
    dims: Vec<Vec<u64>>,
    #[serde(default)]
    before: Vec<Step>,
    #[serde(default)]
    after: Vec<Step>,
    #[serde(default = "row")]
    layouts: Vec<String>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    device_only: bool,
}

impl Group {
    fn graph(&self, f: ReductionOp, axes: &[u32], dtype: DType, word: &str, dims: &[u64]) -> Result<Graph, CaseError> {
        let mut draft = Draft::new(&self.id);
        let x = draft.tensor("x", dtype, word, dims)?;
        let x = draft.chain(x, dims, word, &self.before)?;
        let y = draft.builder.reduction("f", f, x, axes);
        let y = draft.ok(y)?;
        let out: Vec<u64> = (0..dims.len()).map(|dim| if axes.contains(&(dim as u32)) { 1 } else { dims[dim] }).collect();
        let y = draft.chain(y, &out, word, &self.after)?;
        draft.store(y, "y", self.out.unwrap_or(dtype), word, &out)?;
        draft.finish()
    }
}

impl Cases for Group {
    fn common(&self) -> Common<'_> {
        Common { id: &self.id, data: self.data, deterministic: self.deterministic, device_only: self.device_only }
    }

    fn graphs(&self) -> Result<Vec<(String, Graph)>, CaseError> {
        let mut graphs = Vec::new();
        for &f in &self.f {
            for axes in &self.axes {
                for &dtype in &self.types {
                    for word in &self.layouts {
                        for dims in &self.dims {
                            let along: Vec<String> = axes.iter().map(u32::to_string).collect();
                            let name = format!("{}{}/{dtype}/{word}/{}", f.name(), along.join("+"), joined(dims));
                            graphs.push((name, self.graph(f, axes, dtype, word, dims)?));
                        }
                    }
                }
            }
        }
        Ok(graphs)
    }
}
