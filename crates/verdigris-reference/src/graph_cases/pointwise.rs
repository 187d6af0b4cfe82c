//! `pointwise.toml`.

use serde::Deserialize;
use verdigris_graph::{BinaryOp, Graph, TernaryOp, Uid, UnaryOp};
use verdigris_tensor::DType;

use super::{Cases, Common, Draft, Per, Step, joined, normal, row};
use crate::cases::{CaseError, ScalarText};
use crate::data::Distribution;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    id: String,
    types: Vec<DType>,
    z: Option<DType>,
    out: Option<DType>,
    #[serde(default)]
    unary: Vec<UnaryOp>,
    #[serde(default)]
    backward: Vec<UnaryOp>,
    #[serde(default)]
    binary: Vec<BinaryOp>,
    #[serde(default)]
    ternary: Vec<TernaryOp>,
    #[serde(default)]
    gen_index: Vec<u32>,
    #[serde(default)]
    scale: Vec<ScalarText>,
    #[serde(default)]
    chain: Vec<Step>,
    #[serde(default)]
    per: Per,
    dims: Vec<Vec<u64>>,
    #[serde(default = "row")]
    layouts: Vec<String>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    device_only: bool,
}

/// One function, or the chain.
enum Function<'a> {
    Unary(UnaryOp),
    Binary(BinaryOp),
    Ternary(TernaryOp),
    Index(u32),
    Scale(&'a ScalarText),
    Chain,
}

impl Group {
    fn functions(&self) -> Vec<(String, Function<'_>)> {
        let mut list = Vec::new();
        list.extend(self.unary.iter().map(|&f| (f.name().to_owned(), Function::Unary(f))));
        list.extend(self.backward.iter().map(|&f| (format!("{}_backward", f.name()), Function::Binary(BinaryOp::Backward(f)))));
        list.extend(self.binary.iter().map(|&f| (f.name().to_owned(), Function::Binary(f))));
        list.extend(self.ternary.iter().map(|&f| (f.name().to_owned(), Function::Ternary(f))));
        list.extend(self.gen_index.iter().map(|&axis| (format!("gen_index{axis}"), Function::Index(axis))));
        list.extend(self.scale.iter().map(|factor| {
            let name = match factor {
                ScalarText::Fixed(value) => format!("scale{value}"),
                ScalarText::Word(word) => format!("scale_{word}"),
            };
            (name, Function::Scale(factor))
        }));
        if !self.chain.is_empty() {
            list.push(("chain".to_owned(), Function::Chain));
        }
        list
    }

    fn graph(&self, function: &Function<'_>, dtype: DType, word: &str, dims: &[u64]) -> Result<Graph, CaseError> {
        let mut draft = Draft::new(&self.id);
        let z_type = self.z.unwrap_or(dtype);
        let z_word = if self.per == Per::Element { word } else { "row" };
        let second = |draft: &mut Draft<'_>| -> Result<Uid, CaseError> { draft.tensor("z", z_type, z_word, &self.per.dims(dims)) };
        let result = match *function {
            Function::Index(axis) => draft.builder.gen_index("index", dims, axis),
            ref other => {
                let x = draft.tensor("x", dtype, word, dims)?;
                match *other {
                    Function::Unary(f) => draft.builder.unary("f", f, x),
                    Function::Binary(f) => {
                        let z = second(&mut draft)?;
                        draft.builder.binary("f", f, x, z)
                    }
                    Function::Ternary(f) => {
                        let z = second(&mut draft)?;
                        let t = second(&mut draft)?;
                        draft.builder.ternary("f", f, x, z, t)
                    }
                    Function::Scale(factor) => {
                        let factor = draft.scalar(factor, x)?;
                        draft.builder.scale("f", x, factor)
                    }
                    Function::Chain | Function::Index(_) => Ok(draft.chain(x, dims, word, &self.chain)?),
                }
            }
        };
        let result = draft.ok(result)?;
        draft.store(result, "y", self.out.unwrap_or(dtype), word, dims)?;
        draft.finish()
    }
}

impl Cases for Group {
    fn common(&self) -> Common<'_> {
        Common { id: &self.id, data: self.data, deterministic: self.deterministic, device_only: self.device_only }
    }

    fn graphs(&self) -> Result<Vec<(String, Graph)>, CaseError> {
        let mut graphs = Vec::new();
        for (name, function) in self.functions() {
            for &dtype in &self.types {
                for word in &self.layouts {
                    for dims in &self.dims {
                        let per = if self.per == Per::Element { String::new() } else { format!("-{}", self.per.name()) };
                        let name = format!("{name}/{dtype}/{word}{per}/{}", joined(dims));
                        graphs.push((name, self.graph(&function, dtype, word, dims)?));
                    }
                }
            }
        }
        Ok(graphs)
    }
}
