//! Graphs with more operands around one op than a kernel takes: whoever cuts graphs into kernels has to spread them over several.

use verdigris_graph::{BinaryOp, Conv, ConvDirection, Error, Graph, GraphBuilder, HostScalar, Precision, ReductionOp, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

use crate::data::Distribution;
use crate::graph_cases::GraphCase;

/// Operands, factors or stored results of each: more than the parameters of a launch hold.
const COUNT: usize = 40;
const IMAGE: [u64; 4] = [1, 8, 4, 4];

fn rows(dims: &[u64]) -> Result<Layout, Error> {
    Layout::row_major(dims).map_err(|source| Error::Layout { tensor: "crowded".to_owned(), source })
}

fn input(g: &mut GraphBuilder, name: &str, dims: &[u64]) -> Result<Uid, Error> {
    Ok(g.tensor(name, DType::F32, rows(dims)?))
}

/// As many other tensors are added.
fn added(g: &mut GraphBuilder, mut value: Uid, dims: &[u64]) -> Result<Uid, Error> {
    for i in 0..COUNT {
        let other = input(g, &format!("r{i}"), dims)?;
        value = g.binary(&format!("add{i}"), BinaryOp::Add, value, other)?;
    }
    Ok(value)
}

/// As many factors come from the host.
fn scaled(g: &mut GraphBuilder, mut value: Uid) -> Result<Uid, Error> {
    for i in 0..COUNT {
        let factor = g.host_scalar(&format!("f{i}"), DType::F32);
        value = g.scale(&format!("scale{i}"), value, HostScalar::Bound(factor))?;
    }
    Ok(value)
}

/// As many results on the way are stored.
fn stored(g: &mut GraphBuilder, mut value: Uid) -> Result<Uid, Error> {
    for i in 0..COUNT {
        value = g.unary(&format!("neg{i}"), UnaryOp::Neg, value)?;
        g.store(value, &format!("s{i}"), DType::F32)?;
    }
    g.unary("last", UnaryOp::Abs, value)
}

fn product(g: &mut GraphBuilder) -> Result<Uid, Error> {
    let (a, b) = (input(g, "a", &[8, 16])?, input(g, "b", &[16, 8])?);
    g.matmul("product", a, b, Precision::Ieee)
}

fn convolution(g: &mut GraphBuilder, x: Uid) -> Result<Uid, Error> {
    let w = input(g, "w", &[8, 8, 3, 3])?;
    let conv = Conv::new(ConvDirection::Fprop, x, w, Uid(0), 2, Precision::Ieee);
    g.conv_fprop("convolution", Conv { pads_before: vec![1, 1], pads_after: vec![1, 1], ..conv })
}

type Build = fn(&mut GraphBuilder) -> Result<Uid, Error>;

const ALL: [(&str, Build); 8] = [
    ("product-and-sums", |g| product(g).and_then(|value| added(g, value, &[8, 8]))),
    ("product-and-factors", |g| product(g).and_then(|value| scaled(g, value))),
    ("product-and-stored-results", |g| product(g).and_then(|value| stored(g, value))),
    ("convolution-and-sums", |g| {
        let x = input(g, "x", &IMAGE)?;
        convolution(g, x).and_then(|value| added(g, value, &IMAGE))
    }),
    ("factors-and-convolution", |g| {
        let x = input(g, "x", &IMAGE)?;
        scaled(g, x).and_then(|value| convolution(g, value))
    }),
    ("sums-and-reduction-and-factors", |g| {
        let x = input(g, "x", &IMAGE)?;
        let value = added(g, x, &IMAGE)?;
        let value = g.reduction("sum", ReductionOp::Add, value, &[2, 3])?;
        scaled(g, value)
    }),
    ("sums-and-factors", |g| {
        let x = input(g, "x", &IMAGE)?;
        added(g, x, &IMAGE).and_then(|value| scaled(g, value))
    }),
    ("concatenation", |g| {
        let xs = (0..COUNT).map(|i| input(g, &format!("x{i}"), &IMAGE)).collect::<Result<Vec<Uid>, Error>>()?;
        g.concat("concatenation", &xs, 1)
    }),
];

/// The cases, each with its inputs.
///
/// # Errors
/// None but a mistake in this list.
pub fn cases() -> Result<Vec<GraphCase>, Error> {
    let case = |(number, (name, build)): (usize, (&str, Build))| -> Result<GraphCase, Error> {
        let mut g = GraphBuilder::new(name);
        let last = build(&mut g)?;
        g.store(last, "y", DType::F32)?;
        let graph: Graph = g.finish()?;
        let id = format!("crowded/{name}");
        Ok(GraphCase { id, graph, distribution: Distribution::Normal, seed: 0xc0 + number as u64, device_only: false })
    };
    ALL.into_iter().enumerate().map(case).collect()
}
