//! Everything that can go wrong between a request and its result, by whose fault it is.

use verdigris_engines::engine::Refusal;

/// Why a request was not served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request breaks a rule of its own: the caller's fault.
    #[error(transparent)]
    Graph(#[from] verdigris_graph::Error),

    /// No engine takes the problem under the given limits: nobody's fault, and each says why.
    #[error("no engine takes the problem:{}", list(.0))]
    NoEngine(Vec<Refusal>),

    /// There is no engine of that name.
    #[error("there is no engine `{name}`; the engines are {}", known.join(", "))]
    UnknownEngine {
        /// The name asked for.
        name: String,
        /// All names.
        known: Vec<&'static str>,
    },

    /// The machine's fault: no driver, no device, no memory, a failed call.
    #[error(transparent)]
    Device(#[from] verdigris_cuda::Error),

    /// What was bound to a plan does not suit its problem.
    #[error(transparent)]
    Binding(#[from] BindingError),

    /// A variable of the environment that has no meaning.
    #[error("{variable} is `{value}`; {rule}")]
    Config {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        rule: &'static str,
    },
}

/// What was bound to a plan does not suit its problem; found before anything is submitted.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindingError {
    /// Not one binding a slot.
    #[error("{given} bindings are given, the problem has {needed} slots; bind each, in the order of the slots")]
    Count {
        /// Bindings given.
        given: usize,
        /// Slots of the problem.
        needed: usize,
    },
    /// A number where memory is needed, or the other way round.
    #[error("slot {slot} is {needed}, but {given} is bound to it")]
    Kind {
        /// The slot.
        slot: usize,
        /// What it is.
        needed: &'static str,
        /// What was bound.
        given: &'static str,
    },
    /// A buffer that ends before its operand does.
    #[error("slot {slot} spans {needed_bytes} bytes, but {given_bytes} are bound to it")]
    Length {
        /// The slot.
        slot: usize,
        /// Bytes bound.
        given_bytes: u64,
        /// Bytes spanned.
        needed_bytes: u64,
    },
    /// An output that shares bytes with another operand. The same matrix in the same place is allowed: read before it is written.
    #[error("the output in slot {output} and slot {other} share bytes; only the same elements in the same place may be shared")]
    Overlap {
        /// The slot written.
        output: usize,
        /// The other one.
        other: usize,
    },
}

fn list(refusals: &[Refusal]) -> String {
    if refusals.is_empty() {
        return " there are none".to_owned();
    }
    refusals.iter().map(|refusal| format!("\n  {refusal}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_engines::engine::{EngineId, Reason};

    #[test]
    fn every_refusal_is_said() {
        let id = EngineId { name: "gemm.none", number: 0 };
        let refusals = vec![id.refusal(Reason::Extent, "k = 0"), id.refusal(Reason::DType, "D of i64")];
        let text = Error::NoEngine(refusals).to_string();
        assert!(text.contains("gemm.none: extent: k = 0") && text.contains("dtype: D of i64"), "{text}");
        assert!(Error::NoEngine(Vec::new()).to_string().ends_with("there are none"));
    }
}
