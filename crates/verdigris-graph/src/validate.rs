//! What every graph must keep, checked once for all:
//!
//! 1. Uids are unique; every uid that an op names exists.
//! 2. Each tensor is written at most once, and before it is read. A virtual tensor is written and read.
//! 3. Stored tensors have a storage type (not tf32). What is written does not overlap itself.
//! 4. Host scalars have one element, are read only as factors and as random states, and are f32, f64 or integers.
//! 5. Each op's own rules: dims as inferred, attributes in range, types that its precision takes.

use std::collections::{HashMap, HashSet};

use verdigris_tensor::DType;

use crate::error::Error;
use crate::graph::Graph;
use crate::op::HostScalar;
use crate::ops::matmul::broadcast_dims;
use crate::tensor::{TensorDesc, Uid};

/// Strides, dilations, padding and windows are below this: the product of two of them is a position that 64 bits hold.
pub(crate) const STEP_LIMIT: u64 = 1 << 31;

/// Checks a graph against the rules at this module's head.
///
/// # Errors
/// The first rule broken, with the op and the tensor that break it.
pub fn validate(graph: &Graph) -> Result<(), Error> {
    let structure = |op: &str, tensor: &TensorDesc, rule| Err(Error::Structure { op: op.to_owned(), tensor: tensor.name.clone(), rule });
    let mut tensors: HashMap<Uid, &TensorDesc> = HashMap::new();
    for tensor in &graph.tensors {
        if tensors.insert(tensor.uid, tensor).is_some() {
            return structure(&graph.name, tensor, "a uid names one tensor");
        }
        if !tensor.dtype.is_storage() || tensor.dtype == DType::Bool {
            return Err(Error::DType {
                op: graph.name.clone(),
                tensor: tensor.name.clone(),
                got: tensor.dtype,
                rule: "a tensor holds numbers of a storage type; tf32 is a precision, and truth values are stored as 0 and 1 in u8",
            });
        }
        if let Some(alignment_bytes) = tensor.alignment_bytes
            && !(alignment_bytes.is_power_of_two() && alignment_bytes >= tensor.dtype.bytes() as u64)
        {
            return structure(&graph.name, tensor, "an alignment is a power of two and not below the size of an element");
        }
        if tensor.by_value {
            if tensor.layout.elements() != 1 || tensor.is_virtual {
                return structure(&graph.name, tensor, "a host scalar has one element and is not virtual");
            }
            if !(tensor.dtype.is_integer() || matches!(tensor.dtype, DType::F32 | DType::F64)) {
                return Err(Error::DType {
                    op: graph.name.clone(),
                    tensor: tensor.name.clone(),
                    got: tensor.dtype,
                    rule: "a host scalar is f32, f64 or an integer",
                });
            }
        }
    }

    // Every op looks its tensors up.
    let in_order = &*graph.with_tensors_in_order();
    let outputs: HashSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
    let mut written = HashSet::new();
    let mut read = HashSet::new();
    for node in &graph.nodes {
        let op = node.name.as_str();
        for uid in node.op.inputs() {
            let tensor = in_order.tensor_of(op, uid)?;
            if !written.contains(&uid) {
                if outputs.contains(&uid) {
                    return structure(op, tensor, "a tensor is written before it is read, by an op earlier in the list");
                }
                if tensor.is_virtual {
                    return structure(op, tensor, "a virtual tensor is written by an op before it is read");
                }
            }
            read.insert(uid);
        }
        for uid in node.op.outputs() {
            let output = in_order.tensor_of(op, uid)?;
            if output.by_value {
                return structure(op, output, "a host scalar is not written");
            }
            if output.layout.may_overlap() {
                return structure(op, output, "what is written has one place for each element");
            }
            if !written.insert(output.uid) {
                return structure(op, output, "a tensor is written once");
            }
        }
        node.op.check(op, in_order)?;
    }
    for tensor in &graph.tensors {
        if tensor.is_virtual && !(written.contains(&tensor.uid) && read.contains(&tensor.uid)) {
            return structure(&graph.name, tensor, "a virtual tensor is written by one op and read by another");
        }
    }
    Ok(())
}

/// A tensor that is read or written by pointer.
pub(crate) fn data<'g>(graph: &'g Graph, op: &str, uid: Uid) -> Result<&'g TensorDesc, Error> {
    let tensor = graph.tensor_of(op, uid)?;
    if tensor.by_value {
        return Err(Error::Structure {
            op: op.to_owned(),
            tensor: tensor.name.clone(),
            rule: "a host scalar is a factor (alpha, beta, the factor of scale) or a seed with its offset, not an operand",
        });
    }
    Ok(tensor)
}

pub(crate) fn factor(graph: &Graph, op: &str, attribute: &'static str, value: HostScalar<Uid>) -> Result<(), Error> {
    match value {
        HostScalar::Fixed(real) if !real.0.is_finite() => {
            Err(Error::Attribute { op: op.to_owned(), attribute, value: real.to_string(), rule: "a fixed factor is finite" })
        }
        HostScalar::Fixed(_) => Ok(()),
        HostScalar::Bound(uid) => {
            let tensor = graph.tensor_of(op, uid)?;
            if tensor.by_value {
                return Ok(());
            }
            Err(Error::Structure { op: op.to_owned(), tensor: tensor.name.clone(), rule: "a bound factor is a host scalar" })
        }
    }
}

pub(crate) fn same_dims(op: &str, tensor: &TensorDesc, dims: &[u64], rule: &'static str) -> Result<(), Error> {
    let mismatch = |quantity, got, want| Err(Error::Mismatch { op: op.to_owned(), tensor: tensor.name.clone(), quantity, got, want, rule });
    if tensor.layout.rank() != dims.len() {
        return mismatch("the number of dims".to_owned(), tensor.layout.rank() as u64, dims.len() as u64);
    }
    for (i, (&got, &want)) in tensor.layout.dims().iter().zip(dims).enumerate() {
        if got != want {
            return mismatch(format!("dim {i}"), got, want);
        }
    }
    Ok(())
}

pub(crate) fn broadcasts_to(op: &str, tensor: &TensorDesc, dims: &[u64], rule: &'static str) -> Result<(), Error> {
    let common = broadcast_dims(op, tensor, dims, tensor.layout.dims())?;
    for (i, (&got, &want)) in common.iter().zip(dims).enumerate() {
        if got != want {
            return Err(Error::Mismatch {
                op: op.to_owned(),
                tensor: tensor.name.clone(),
                quantity: format!("dim {i}, broadcast,"),
                got,
                want,
                rule,
            });
        }
    }
    if common.len() == dims.len() {
        return Ok(());
    }
    Err(Error::Mismatch {
        op: op.to_owned(),
        tensor: tensor.name.clone(),
        quantity: "the number of dims".to_owned(),
        got: tensor.layout.rank() as u64,
        want: dims.len() as u64,
        rule,
    })
}

/// An axis of a tensor, as an index.
pub(crate) fn axis(op: &str, tensor: &TensorDesc, axis: u32) -> Result<usize, Error> {
    let rank = tensor.layout.rank();
    if (axis as usize) < rank {
        return Ok(axis as usize);
    }
    Err(Error::Mismatch {
        op: op.to_owned(),
        tensor: tensor.name.clone(),
        quantity: "the number of dims".to_owned(),
        got: rank as u64,
        want: u64::from(axis) + 1,
        rule: "an axis is below the number of dims",
    })
}

/// Checks an element type against a rule.
pub(crate) fn of_type(op: &str, tensor: &TensorDesc, is_taken: impl Fn(DType) -> bool, rule: &'static str) -> Result<(), Error> {
    if is_taken(tensor.dtype) {
        return Ok(());
    }
    Err(Error::DType { op: op.to_owned(), tensor: tensor.name.clone(), got: tensor.dtype, rule })
}

/// An attribute that breaks a rule.
pub(crate) fn attribute<T>(op: &str, attribute: &'static str, value: impl std::fmt::Debug, rule: &'static str) -> Result<T, Error> {
    Err(Error::Attribute { op: op.to_owned(), attribute, value: format!("{value:?}"), rule })
}
