//! `scan.toml`.

use serde::Deserialize;
use verdigris_graph::{Graph, ScanOp};
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
    f: Vec<ScanOp>,
    #[serde(default = "all")]
    ways: Vec<Way>,
    axis: Vec<u32>,
    dims: Vec<Vec<u64>>,
    #[serde(default = "row")]
    layouts: Vec<String>,
    /// The layout of the result, where it is another one.
    to: Option<String>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    device_only: bool,
}

/// Which elements a result is of.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    Inclusive,
    Exclusive,
    Reversed,
    ExclusiveReversed,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Way::Inclusive => "",
            Way::Exclusive => "_exclusive",
            Way::Reversed => "_reversed",
            Way::ExclusiveReversed => "_exclusive_reversed",
        }
    }
}

fn all() -> Vec<Way> {
    vec![Way::Inclusive, Way::Exclusive, Way::Reversed, Way::ExclusiveReversed]
}

impl Group {
    fn graph(&self, f: ScanOp, way: Way, axis: u32, dtype: DType, word: &str, dims: &[u64]) -> Result<Graph, CaseError> {
        let mut draft = Draft::new(&self.id);
        let x = draft.tensor("x", dtype, word, dims)?;
        let exclusive = matches!(way, Way::Exclusive | Way::ExclusiveReversed);
        let reverse = matches!(way, Way::Reversed | Way::ExclusiveReversed);
        let y = draft.builder.scan("scan", f, x, axis, exclusive, reverse);
        let y = draft.ok(y)?;
        draft.store(y, "y", self.out.unwrap_or(dtype), self.to.as_deref().unwrap_or(word), dims)?;
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
            for &way in &self.ways {
                for &axis in &self.axis {
                    for &dtype in &self.types {
                        for word in &self.layouts {
                            for dims in &self.dims {
                                let name = format!("{}{}/{dtype}/{word}/{}-axis{axis}", f.name(), way.name(), joined(dims));
                                graphs.push((name, self.graph(f, way, axis, dtype, word, dims)?));
                            }
                        }
                    }
                }
            }
        }
        Ok(graphs)
    }
}
