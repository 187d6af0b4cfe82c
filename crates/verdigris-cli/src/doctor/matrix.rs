//! Which engine serves each op in each element type: a row for each op and engine, a column for each type.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use verdigris::graph::pattern;
use verdigris::{
    Arch, BinaryOp, Conv, ConvDirection, CrossEntropySpec, DType, GraphBuilder, GraphError, Layout, Limits, LossReduction, PoolMode,
    PoolWindows, Precision, Reason, ReductionOp, Uid, UnaryOp, survey,
};
use verdigris_cli::say;
use verdigris_cli::table::{self, Align};

/// One column: what operands and results are, and how products are formed.
struct Type {
    name: &'static str,
    operands: DType,
    result: DType,
    precision: Precision,
}

const TYPES: [Type; 7] = [
    Type { name: "f64", operands: DType::F64, result: DType::F64, precision: Precision::F64 },
    Type { name: "f32", operands: DType::F32, result: DType::F32, precision: Precision::Fp32 },
    Type { name: "tf32", operands: DType::F32, result: DType::F32, precision: Precision::Tf32 },
    Type { name: "bf16", operands: DType::Bf16, result: DType::Bf16, precision: Precision::Fp32 },
    Type { name: "f16", operands: DType::F16, result: DType::F16, precision: Precision::Fp32 },
    Type { name: "fp8", operands: DType::E4m3, result: DType::Bf16, precision: Precision::Fp8Fast },
    Type { name: "int8", operands: DType::I8, result: DType::I32, precision: Precision::I32 },
];

/// One op at sizes of a usual network.
struct Asked {
    name: &'static str,
    /// Whether it forms products, so that tf32 is a type of its own.
    multiplies: bool,
    draw: fn(&mut GraphBuilder, &Type) -> Result<Uid, GraphError>,
}

const OPS: [Asked; 14] = [
    Asked { name: "product", multiplies: true, draw: product },
    Asked { name: "convolution", multiplies: true, draw: |g, ty| conv(g, ty, ConvDirection::Fprop, 1) },
    Asked { name: "its input gradient", multiplies: true, draw: |g, ty| conv(g, ty, ConvDirection::Dgrad, 1) },
    Asked { name: "its filter gradient", multiplies: true, draw: |g, ty| conv(g, ty, ConvDirection::Wgrad, 1) },
    Asked { name: "depthwise", multiplies: true, draw: |g, ty| conv(g, ty, ConvDirection::Fprop, CHANNELS) },
    Asked { name: "pointwise", multiplies: false, draw: pointwise },
    Asked { name: "transpose", multiplies: false, draw: transpose },
    Asked {
        name: "reduction",
        multiplies: false,
        draw: |g, ty| rows_of(g, ty).and_then(|x| g.reduction("sum", ReductionOp::Add, x, &[1])),
    },
    Asked { name: "softmax", multiplies: false, draw: |g, ty| rows_of(g, ty).and_then(|x| g.softmax("softmax", x, 1, false)) },
    Asked {
        name: "layer norm",
        multiplies: false,
        draw: |g, ty| rows_of(g, ty).and_then(|x| g.layer_norm("layer norm", x, &[1], 1e-5, None, None)),
    },
    Asked {
        name: "group norm",
        multiplies: false,
        draw: |g, ty| images(g, "x", ty.operands).and_then(|x| g.group_norm("group norm", x, 32, 1e-5, None, None)),
    },
    Asked { name: "cross-entropy", multiplies: false, draw: cross_entropy },
    Asked { name: "max pooling", multiplies: false, draw: |g, ty| pool(g, ty, PoolMode::Max) },
    Asked { name: "average pooling", multiplies: false, draw: |g, ty| pool(g, ty, PoolMode::Average { count_include_pad: true }) },
];

const CHANNELS: u64 = 64;

/// A tensor of the type, its dims stored in that order.
fn tensor(g: &mut GraphBuilder, name: &str, dtype: DType, dims: &[u64], order: &[usize]) -> Result<Uid, GraphError> {
    let layout = Layout::with_order(dims, order).map_err(|source| GraphError::Layout { tensor: name.to_owned(), source })?;
    Ok(g.tensor(name, dtype, layout))
}

fn rows_of(g: &mut GraphBuilder, ty: &Type) -> Result<Uid, GraphError> {
    tensor(g, "x", ty.operands, &[1024, 1024], &[0, 1])
}

fn images(g: &mut GraphBuilder, name: &str, dtype: DType) -> Result<Uid, GraphError> {
    tensor(g, name, dtype, &[32, CHANNELS, 28, 28], &[0, 2, 3, 1])
}

fn product(g: &mut GraphBuilder, ty: &Type) -> Result<Uid, GraphError> {
    let a = tensor(g, "a", ty.operands, &[1024, 1024], &[0, 1])?;
    let b = tensor(g, "b", ty.operands, &[1024, 1024], &[1, 0])?;
    g.matmul("product", a, b, ty.precision)
}

fn conv(g: &mut GraphBuilder, ty: &Type, direction: ConvDirection, groups: u64) -> Result<Uid, GraphError> {
    let x = images(g, "x", ty.operands)?;
    let w_dims = [CHANNELS, CHANNELS / groups, 3, 3];
    let w = tensor(g, "w", ty.operands, &w_dims, &[0, 2, 3, 1])?;
    let mut conv = Conv { groups, ..Conv::new(direction, x, w, Uid(0), 2, ty.precision) };
    conv.pads_before = vec![1, 1];
    conv.pads_after = vec![1, 1];
    match direction {
        ConvDirection::Fprop => g.conv_fprop("convolution", conv),
        ConvDirection::Dgrad => {
            conv.y = images(g, "dy", ty.operands)?;
            g.conv_dgrad("input gradient", conv, &[32, CHANNELS, 28, 28])
        }
        ConvDirection::Wgrad => {
            conv.y = images(g, "dy", ty.operands)?;
            g.conv_wgrad("filter gradient", conv, &w_dims)
        }
    }
}

fn pointwise(g: &mut GraphBuilder, ty: &Type) -> Result<Uid, GraphError> {
    let x = rows_of(g, ty)?;
    let z = tensor(g, "z", ty.operands, &[1, 1024], &[0, 1])?;
    let sum = g.binary("add", BinaryOp::Add, x, z)?;
    g.unary("relu", UnaryOp::Relu, sum)
}

fn transpose(g: &mut GraphBuilder, ty: &Type) -> Result<Uid, GraphError> {
    let x = rows_of(g, ty)?;
    g.transpose("transpose", x, &[1, 0])
}

fn cross_entropy(g: &mut GraphBuilder, ty: &Type) -> Result<Uid, GraphError> {
    let logits = rows_of(g, ty)?;
    let labels = tensor(g, "labels", DType::I32, &[1024, 1], &[0, 1])?;
    g.cross_entropy("loss", CrossEntropySpec::new(1, LossReduction::Mean), logits, labels)
}

fn pool(g: &mut GraphBuilder, ty: &Type, mode: PoolMode) -> Result<Uid, GraphError> {
    let x = images(g, "x", ty.operands)?;
    g.pool("pool", mode, PoolWindows::tiles(&[2, 2]), x)
}

/// Every op in every type, with the engine that a plan at once gives it by estimate on that chip, or the reason why there is none.
pub(super) fn rows(arch: &Arch) -> Value {
    OPS.iter().flat_map(|op| TYPES.iter().filter(|ty| op.multiplies || ty.name != "tf32").map(|ty| row(op, ty, arch))).collect()
}

fn row(op: &Asked, ty: &Type, arch: &Arch) -> Value {
    let mut g = GraphBuilder::new(op.name);
    let result = if op.multiplies { ty.result } else { ty.operands };
    let parts = (op.draw)(&mut g, ty).and_then(|y| {
        // What is stored has a type of its own; where the op gives no other, its own.
        g.store(y, "y", result)?;
        pattern::partition(&g.finish()?)
    });
    let parts = match parts {
        Ok(partition) => partition.parts,
        Err(error) => {
            return json!({ "op": op.name, "dtype": ty.name, "engine": null, "reason": "element type", "error": error.to_string() });
        }
    };
    let (mut engines, mut others, mut refusals, mut reason) = (Vec::new(), Vec::new(), Vec::new(), None);
    for part in &parts {
        let survey = survey(&part.problem, arch, &Limits::default());
        for refusal in &survey.refusals {
            refusals.push(json!({
                "engine": refusal.engine.name, "reason": refusal.reason.name(), "seen": refusal.seen, "file": refusal.file, "line": refusal.line,
            }));
        }
        let mut names = survey.ranked.iter().map(|way| way.engine.name);
        match names.next() {
            Some(first) => engines.push(first),
            // The last engine of a family is the one that takes most: what it lacks, all lack.
            None => reason = Some(survey.refusals.last().map_or(Reason::Problem.name(), |refusal| refusal.reason.name())),
        }
        others.extend(names);
    }
    let engine = if reason.is_none() && !engines.is_empty() { json!(engines.join(" + ")) } else { Value::Null };
    json!({ "op": op.name, "dtype": ty.name, "engine": engine, "others": others, "reason": reason, "refusals": refusals })
}

/// The rows as a matrix; under it, if asked, every refusal in full.
pub(super) fn print(rows: &Value, with_refusals: bool) {
    let (head, lines) = matrix(rows);
    let head: Vec<(&str, Align)> = head.iter().map(|name| (*name, Align::Left)).collect();
    say!();
    table::print(&head, &lines);
    if !with_refusals {
        say!("\nx: the engine that a plan at once takes, by estimate. `--refusals` tells why the others do not.");
        return;
    }
    say!("\nrefusals");
    for row in rows.as_array().into_iter().flatten() {
        let text = |field: &str, of: &Value| of[field].as_str().unwrap_or("-").to_owned();
        let named = format!("{} {}", text("op", row), text("dtype", row));
        if let Some(error) = row["error"].as_str() {
            say!("  {named}: {error}");
        }
        for refusal in row["refusals"].as_array().into_iter().flatten() {
            let (file, line) = (text("file", refusal), &refusal["line"]);
            say!("  {named}: {}: {}: {} ({file}:{line})", text("engine", refusal), text("reason", refusal), text("seen", refusal));
        }
    }
}

/// The head, and a line for each op and engine with an `x` under the types that it serves; where nobody does, a line with the reason.
fn matrix(rows: &Value) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let mut head = vec!["op", "engine"];
    head.extend(TYPES.iter().map(|ty| ty.name));
    let mut lines: Vec<Vec<String>> = Vec::new();
    for op in &OPS {
        let of_op = |row: &&Value| row["op"] == op.name;
        let mut by_engine: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for row in rows.as_array().into_iter().flatten().filter(of_op) {
            let served = row["engine"].as_str().map(str::to_owned);
            let served = served.unwrap_or_else(|| format!("none: {}", row["reason"].as_str().unwrap_or("kind")));
            by_engine.entry(served).or_default().push(row["dtype"].as_str().unwrap_or_default());
        }
        for (number, (engine, types)) in by_engine.into_iter().enumerate() {
            let mark = |ty: &Type| match (types.contains(&ty.name), engine.starts_with("none")) {
                (false, _) => String::new(),
                (true, true) => "-".to_owned(),
                (true, false) => "x".to_owned(),
            };
            let name = if number == 0 { op.name.to_owned() } else { String::new() };
            lines.push([name, engine.clone()].into_iter().chain(TYPES.iter().map(mark)).collect());
        }
    }
    (head, lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_of_every_type_has_one_answer() {
        let old = Arch { name: "an older chip".to_owned(), capability: (8, 0), ..Arch::h200() };
        for (arch, products) in [(Arch::h200(), "gemm.wgmma"), (old, "gemm.mma")] {
            let rows = rows(&arch);
            let rows_of = |op: &str| rows.as_array().into_iter().flatten().filter(|row| row["op"] == op).count();
            for op in &OPS {
                assert_eq!(rows_of(op.name), if op.multiplies { 7 } else { 6 }, "{}", op.name);
            }
            for row in rows.as_array().into_iter().flatten() {
                assert!(row["engine"].is_string() != row["reason"].is_string(), "{row}");
                let names_family = row["refusals"].as_array().into_iter().flatten().all(|refusal| refusal["reason"] != "problem");
                assert!(names_family, "engines of other families have no say: {row}");
            }
            let engine = |op: &str, dtype: &str| {
                let row = rows.as_array().into_iter().flatten().find(|row| row["op"] == op && row["dtype"] == dtype);
                row.and_then(|row| row["engine"].as_str()).unwrap_or("none").to_owned()
            };
            assert_eq!((engine("product", "f64").as_str(), engine("product", "bf16").as_str()), ("gemm.simt", products), "{}", arch.name);
            assert!(engine("softmax", "bf16").starts_with("softmax."));
            assert!(engine("convolution", "bf16").starts_with("conv."));
        }
    }

    #[test]
    fn each_type_of_an_op_is_marked_once() {
        let rows = rows(&Arch::h200());
        let (head, lines) = matrix(&rows);
        for (column, name) in head.iter().enumerate().skip(2) {
            let marks = lines.iter().filter(|line| !line[column].is_empty()).count();
            let wanted = OPS.iter().filter(|op| op.multiplies || *name != "tf32").count();
            assert_eq!(marks, wanted, "{name}");
        }
    }
}
