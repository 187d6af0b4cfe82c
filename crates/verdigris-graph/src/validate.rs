//! What every graph must keep, checked once for all:
//!
//! 1. Uids are unique; every uid that an op names exists.
//! 2. Each tensor is written at most once, and before it is read. A virtual tensor is written and read.
//! 3. Stored tensors have a storage type (not tf32). What is written does not overlap itself.
//! 4. Host scalars have one element, are read only as factors, and are f32 or f64.
//! 5. Each op's own rules: dims as inferred, attributes in range, types that its precision takes.

use std::collections::{HashMap, HashSet};

use verdigris_tensor::DType;

use crate::error::Error;
use crate::graph::Graph;
use crate::op::{HostScalar, Op};
use crate::ops::matmul::{Matmul, OperandScale, broadcast_dims};
use crate::ops::pointwise::Pointwise;
use crate::tensor::{TensorDesc, Uid};

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
                rule: "a tensor holds numbers of a storage type; tf32 is a precision and bool has no operation here",
            });
        }
        if tensor.by_value {
            if tensor.layout.elements() != 1 || tensor.is_virtual {
                return structure(&graph.name, tensor, "a host scalar has one element and is not virtual");
            }
            if !matches!(tensor.dtype, DType::F32 | DType::F64) {
                return Err(Error::DType {
                    op: graph.name.clone(),
                    tensor: tensor.name.clone(),
                    got: tensor.dtype,
                    rule: "a host scalar is f32 or f64",
                });
            }
        }
    }

    let outputs: HashSet<Uid> = graph.nodes.iter().map(|node| node.op.output()).collect();
    let mut written = HashSet::new();
    let mut read = HashSet::new();
    for node in &graph.nodes {
        let op = node.name.as_str();
        for uid in node.op.inputs() {
            let tensor = graph.tensor_of(op, uid)?;
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
        let output = graph.tensor_of(op, node.op.output())?;
        if output.by_value {
            return structure(op, output, "a host scalar is not written");
        }
        if output.layout.may_overlap() {
            return structure(op, output, "what is written has one place for each element");
        }
        if !written.insert(output.uid) {
            return structure(op, output, "a tensor is written once");
        }
        match &node.op {
            Op::Matmul(matmul) => check_matmul(graph, op, matmul)?,
            Op::Pointwise(pointwise) => check_pointwise(graph, op, pointwise)?,
        }
    }
    for tensor in &graph.tensors {
        if tensor.is_virtual && !(written.contains(&tensor.uid) && read.contains(&tensor.uid)) {
            return structure(&graph.name, tensor, "a virtual tensor is written by one op and read by another");
        }
    }
    Ok(())
}

fn check_matmul(graph: &Graph, op: &str, matmul: &Matmul) -> Result<(), Error> {
    let a = data(graph, op, matmul.a)?;
    let b = data(graph, op, matmul.b)?;
    let d = data(graph, op, matmul.d)?;
    let dims = Matmul::infer(op, a, b)?;
    same_dims(op, d, &dims, "D has the dims [b…, m, n]")?;
    if let Some(rule) = matmul.precision.rule_broken_by(a.dtype, b.dtype) {
        return Err(Error::DType { op: op.to_owned(), tensor: a.name.clone(), got: a.dtype, rule });
    }
    if let Some(c) = matmul.c {
        broadcasts_to(op, data(graph, op, c)?, &dims, "C has the dims of D or broadcasts to them")?;
    }
    factor(graph, op, "alpha", matmul.alpha)?;
    factor(graph, op, "beta", matmul.beta)?;
    let (a_outer, b_outer, k) = (dims[dims.len() - 2], dims[dims.len() - 1], a.layout.dims()[a.layout.rank() - 1]);
    let batch = &dims[..dims.len() - 2];
    for (scale, outer, operand) in [(matmul.scale_a, a_outer, a), (matmul.scale_b, b_outer, b)] {
        if let Some(scale) = scale {
            check_scale(graph, op, scale, operand, outer, k, batch)?;
        }
    }
    Ok(())
}

fn check_scale(graph: &Graph, op: &str, scale: OperandScale, operand: &TensorDesc, outer: u64, k: u64, batch: &[u64]) -> Result<(), Error> {
    let tensor = data(graph, op, scale.tensor)?;
    let dtype_error =
        |tensor: &TensorDesc, rule| Err(Error::DType { op: op.to_owned(), tensor: tensor.name.clone(), got: tensor.dtype, rule });
    if !operand.dtype.is_fp8() {
        return dtype_error(operand, "operand scales belong to fp8 operands");
    }
    if tensor.dtype != DType::F32 {
        return dtype_error(tensor, "operand scales are f32");
    }
    match scale.block {
        None if tensor.layout.elements() != 1 => Err(Error::Mismatch {
            op: op.to_owned(),
            tensor: tensor.name.clone(),
            quantity: "the number of elements".to_owned(),
            got: tensor.layout.elements(),
            want: 1,
            rule: "a scale without blocks is one factor for the whole operand",
        }),
        None => Ok(()),
        Some(block) => {
            if block.contains(&0) {
                return Err(Error::Attribute {
                    op: op.to_owned(),
                    attribute: "block",
                    value: format!("{block:?}"),
                    rule: "a block is at least 1 by 1",
                });
            }
            let mut dims = batch.to_vec();
            dims.extend([outer.div_ceil(block[0]), k.div_ceil(block[1])]);
            broadcasts_to(op, tensor, &dims, "block scales have the dims [b…, outer blocks, k blocks]")
        }
    }
}

fn check_pointwise(graph: &Graph, op: &str, pointwise: &Pointwise) -> Result<(), Error> {
    let (x, z) = match *pointwise {
        Pointwise::Unary { f, x, .. } => {
            f.check(op)?;
            (x, None)
        }
        Pointwise::Binary { x, z, .. } => (x, Some(z)),
        Pointwise::Scale { x, factor: value, .. } => {
            factor(graph, op, "factor", value)?;
            (x, None)
        }
    };
    let x = data(graph, op, x)?;
    let z = z.map(|z| data(graph, op, z)).transpose()?;
    let dims = Pointwise::infer(op, x, z)?;
    same_dims(op, data(graph, op, pointwise.output())?, &dims, "a pointwise result has the common dims of its inputs")
}

/// A tensor that is read or written by pointer.
fn data<'g>(graph: &'g Graph, op: &str, uid: Uid) -> Result<&'g TensorDesc, Error> {
    let tensor = graph.tensor_of(op, uid)?;
    if tensor.by_value {
        return Err(Error::Structure {
            op: op.to_owned(),
            tensor: tensor.name.clone(),
            rule: "a host scalar is a factor (alpha, beta, the factor of scale), not an operand",
        });
    }
    Ok(tensor)
}

fn factor(graph: &Graph, op: &str, attribute: &'static str, value: HostScalar<Uid>) -> Result<(), Error> {
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

fn same_dims(op: &str, tensor: &TensorDesc, dims: &[u64], rule: &'static str) -> Result<(), Error> {
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

fn broadcasts_to(op: &str, tensor: &TensorDesc, dims: &[u64], rule: &'static str) -> Result<(), Error> {
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
