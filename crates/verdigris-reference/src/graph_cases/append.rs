//! `append.toml`.

use serde::Deserialize;
use verdigris_graph::{Graph, Uid};
use verdigris_tensor::{DType, Layout};

use super::{Cases, Common, Draft, Step, fault, field, joined, normal, row};
use crate::cases::CaseError;
use crate::data::Distribution;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    id: String,
    types: Vec<DType>,
    /// Of what rows are appended to.
    dims: Vec<Vec<u64>>,
    axis: Vec<u32>,
    rows: Vec<u64>,
    /// The dims of which each index has its own length, for each case.
    #[serde(default = "of_batch")]
    of: Vec<Vec<u32>>,
    #[serde(default = "row")]
    layouts: Vec<String>,
    /// The layout of the rows.
    from: Option<String>,
    /// How many tensors take rows by one length, in one launch.
    #[serde(default = "one")]
    count: u64,
    /// What rows are made of.
    #[serde(default)]
    before: Vec<Step>,
    /// What reads the tensor with its rows.
    #[serde(default)]
    after: Vec<Step>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    device_only: bool,
}

fn of_batch() -> Vec<Vec<u32>> {
    vec![vec![0]]
}

fn one() -> u64 {
    1
}

/// Tensors that one case appends to.
const MOST_TENSORS: u64 = 16;

/// One of the product.
struct Which<'g> {
    dtype: DType,
    dims: &'g [u64],
    axis: u32,
    rows: u64,
    of: &'g [u32],
    word: &'g str,
}

impl Group {
    fn graph(&self, &Which { dtype, dims, axis, rows, of, word }: &Which<'_>) -> Result<Graph, CaseError> {
        if dims.get(axis as usize).is_none() {
            return field(&self.id, "axis", axis, "an axis is below the number of dims");
        }
        if !(1..=MOST_TENSORS).contains(&self.count) {
            return field(&self.id, "count", self.count, "1 to 16 tensors take rows");
        }
        let mut draft = Draft::new(&self.id);
        let mut own = dims.to_vec();
        own[axis as usize] = rows;
        let lengths: Vec<u64> = (0..).zip(dims).map(|(dim, &extent)| if of.contains(&dim) && dim != axis { extent } else { 1 }).collect();
        let lengths = Layout::row_major(&lengths).map_err(|source| {
            let source = verdigris_graph::Error::Layout { tensor: "lengths".to_owned(), source };
            fault(&self.id, source)
        })?;
        let lengths = draft.builder.tensor("lengths", DType::I32, lengths);
        for _ in 0..self.count {
            let from = self.from.as_deref().unwrap_or("row");
            let x = draft.tensor("x", dtype, word, dims)?;
            let given = draft.tensor("rows", dtype, from, &own)?;
            let made = draft.chain(given, &own, from, &self.before)?;
            if !self.before.is_empty() {
                let rounded = draft.builder.round_to(made, dtype);
                draft.ok(rounded)?;
            }
            let name = draft.name("append");
            let appended = draft.builder.append(&name, x, made, lengths, axis);
            let y: Uid = draft.ok(appended)?;
            if !self.after.is_empty() {
                let read = draft.chain(y, dims, word, &self.after)?;
                draft.store(read, "read", dtype, word, dims)?;
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
        for &dtype in &self.types {
            for word in &self.layouts {
                for dims in &self.dims {
                    for &axis in &self.axis {
                        for &rows in &self.rows {
                            for of in &self.of {
                                let own: String = of.iter().map(u32::to_string).collect();
                                let own = if own.is_empty() { "all".to_owned() } else { own };
                                let name = format!("{dtype}/{word}/{}-axis{axis}-rows{rows}-of{own}", joined(dims));
                                graphs.push((name, self.graph(&Which { dtype, dims, axis, rows, of, word })?));
                            }
                        }
                    }
                }
            }
        }
        Ok(graphs)
    }
}
