//! Graphs of any length, as networks have them: what cutting and planning cost is measured and held on these, and what they cut is compared.
//!
//! [`graph`] makes one of a [`Shape`] with at least as many ops as are asked for and few more. [`tangle`] makes random ones, in which values
//! are read again much later, so that many ops that could stand together may not.

use std::collections::BTreeSet;

use verdigris_graph::{
    BinaryOp, Conv, ConvDirection, Error, Graph, GraphBuilder, HostScalar, Precision, Real, ReductionOp, TernaryOp, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

use crate::data::Random;

/// What a graph is like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// Linear layers one behind the other: product, bias, activation.
    Linear,
    /// Residual blocks of two convolutions, with scales and shifts over channels, in lines of channels.
    Residual,
    /// Attention blocks: root-mean-square norms, rotations with tables that all layers share, products, softmax, residuals.
    Attention,
    /// Training of linear layers with a norm by hand: forward, backward, which reads what forward stored, and a step of each parameter.
    Training,
    /// Training of convolutions with batch norm: sums over channels, normalization, backward.
    Convolutional,
    /// Optimizers of many parameters side by side.
    Updates,
    /// Towers side by side that read one tensor, added in the end.
    Towers,
    /// Pointwise functions of one tensor, layer by layer across all of them.
    Fan,
}

impl Shape {
    /// All of them.
    pub const ALL: [Shape; 8] = [
        Shape::Linear,
        Shape::Residual,
        Shape::Attention,
        Shape::Training,
        Shape::Convolutional,
        Shape::Updates,
        Shape::Towers,
        Shape::Fan,
    ];
}

/// A graph of at least `ops` ops.
///
/// # Errors
/// None but a mistake in this file.
pub fn graph(shape: Shape, ops: usize) -> Result<Graph, Error> {
    let mut net = Net { g: GraphBuilder::new(&format!("{shape:?} {ops}")), ops: 0 };
    match shape {
        Shape::Linear => net.linear(ops)?,
        Shape::Residual => net.residual(ops)?,
        Shape::Attention => net.attention(ops)?,
        Shape::Training => net.training(ops)?,
        Shape::Convolutional => net.convolutional(ops)?,
        Shape::Updates => net.updates(ops)?,
        Shape::Towers => net.towers(ops)?,
        Shape::Fan => net.fan(ops)?,
    }
    net.g.finish()
}

fn laid_out(layout: Result<Layout, verdigris_tensor::LayoutError>) -> Result<Layout, Error> {
    layout.map_err(|source| Error::Layout { tensor: "networks".to_owned(), source })
}

fn rows(dims: &[u64]) -> Result<Layout, Error> {
    laid_out(Layout::row_major(dims))
}

fn lines(dims: &[u64]) -> Result<Layout, Error> {
    laid_out(Layout::with_order(dims, &[0, 2, 3, 1]))
}

/// Rows and columns of the activations of products.
const SIDE: [u64; 2] = [64, 128];
/// Dims of the activations of convolutions.
const IMAGE: [u64; 4] = [4, 64, 14, 14];

/// A graph that counts its ops.
struct Net {
    g: GraphBuilder,
    ops: usize,
}

impl Net {
    fn input(&mut self, name: &str, dims: &[u64]) -> Result<Uid, Error> {
        Ok(self.g.tensor(name, DType::Bf16, rows(dims)?))
    }

    fn wide_input(&mut self, name: &str, dims: &[u64]) -> Result<Uid, Error> {
        Ok(self.g.tensor(name, DType::F32, rows(dims)?))
    }

    fn image(&mut self, name: &str) -> Result<Uid, Error> {
        Ok(self.g.tensor(name, DType::Bf16, lines(&IMAGE)?))
    }

    fn unary(&mut self, f: UnaryOp, x: Uid) -> Result<Uid, Error> {
        self.ops += 1;
        self.g.unary("f", f, x)
    }

    fn binary(&mut self, f: BinaryOp, x: Uid, z: Uid) -> Result<Uid, Error> {
        self.ops += 1;
        self.g.binary("f", f, x, z)
    }

    fn scale(&mut self, x: Uid, factor: f64) -> Result<Uid, Error> {
        self.ops += 1;
        self.g.scale("scale", x, HostScalar::Fixed(Real(factor)))
    }

    fn sum(&mut self, f: ReductionOp, x: Uid, axes: &[u32]) -> Result<Uid, Error> {
        self.ops += 1;
        self.g.reduction("reduce", f, x, axes)
    }

    fn product(&mut self, a: Uid, b: Uid) -> Result<Uid, Error> {
        self.ops += 1;
        self.g.matmul("product", a, b, Precision::Fp32)
    }

    fn turned(&mut self, x: Uid) -> Result<Uid, Error> {
        self.ops += 1;
        self.g.transpose("turned", x, &[1, 0])
    }

    /// As the operand of a product.
    fn narrow(&mut self, x: Uid) -> Result<Uid, Error> {
        let y = self.unary(UnaryOp::Identity, x)?;
        self.g.set_dtype(y, DType::Bf16)?;
        Ok(y)
    }

    fn store(&mut self, x: Uid) -> Result<(), Error> {
        self.g.store(x, "stored", DType::Bf16)
    }

    fn linear(&mut self, ops: usize) -> Result<(), Error> {
        let mut x = self.input("x", &SIDE)?;
        while self.ops < ops {
            let (w, bias) = (self.input("w", &[SIDE[1], SIDE[1]])?, self.wide_input("bias", &[1, SIDE[1]])?);
            let y = self.product(x, w)?;
            let y = self.binary(BinaryOp::Add, y, bias)?;
            x = self.unary(UnaryOp::Relu, y)?;
            self.g.set_dtype(x, DType::Bf16)?;
        }
        self.store(x)
    }

    fn conv(&mut self, x: Uid) -> Result<Uid, Error> {
        let w = self.g.tensor("w", DType::Bf16, lines(&[IMAGE[1], IMAGE[1], 3, 3])?);
        self.ops += 1;
        self.g.conv_fprop("conv", same(x, w, Uid(0)))
    }

    fn residual(&mut self, ops: usize) -> Result<(), Error> {
        let mut x = self.image("x")?;
        while self.ops < ops {
            let mut y = x;
            for layer in 0..2 {
                y = self.conv(y)?;
                let factor = self.wide_input("scale", &[1, IMAGE[1], 1, 1])?;
                let shift = self.wide_input("shift", &[1, IMAGE[1], 1, 1])?;
                y = self.binary(BinaryOp::Mul, y, factor)?;
                y = self.binary(BinaryOp::Add, y, shift)?;
                if layer == 1 {
                    y = self.binary(BinaryOp::Add, y, x)?;
                }
                y = self.unary(UnaryOp::Relu, y)?;
                self.g.store_as(y, "y", DType::Bf16, lines(&IMAGE)?)?;
            }
            x = y;
        }
        Ok(())
    }

    /// `x / rms(x) · weight`, narrow.
    fn norm(&mut self, x: Uid) -> Result<Uid, Error> {
        let weight = self.wide_input("weight", &[1, SIDE[1]])?;
        let squares = self.binary(BinaryOp::Mul, x, x)?;
        let mean = self.sum(ReductionOp::Avg, squares, &[1])?;
        let root = self.unary(UnaryOp::Rsqrt, mean)?;
        let y = self.binary(BinaryOp::Mul, x, root)?;
        let y = self.binary(BinaryOp::Mul, y, weight)?;
        self.narrow(y)
    }

    /// A rotation of the halves of rows by shared tables.
    fn rotated(&mut self, x: Uid, [cosines, sines]: [Uid; 2]) -> Result<Uid, Error> {
        let half = SIDE[1] / 2;
        let left = self.g.slice("left", x, &[0, 0], &[SIDE[0], half], &[1, 1])?;
        let right = self.g.slice("right", x, &[0, half], &SIDE, &[1, 1])?;
        let right = self.unary(UnaryOp::Neg, right)?;
        let other = self.g.concat("other", &[right, left], 1)?;
        self.ops += 3;
        let straight = self.binary(BinaryOp::Mul, x, cosines)?;
        let across = self.binary(BinaryOp::Mul, other, sines)?;
        let y = self.binary(BinaryOp::Add, straight, across)?;
        self.narrow(y)
    }

    fn attention(&mut self, ops: usize) -> Result<(), Error> {
        let mut x = self.input("x", &SIDE)?;
        let tables = [self.wide_input("cosines", &SIDE)?, self.wide_input("sines", &SIDE)?];
        let mask = self.wide_input("mask", &[SIDE[0], SIDE[0]])?;
        while self.ops < ops {
            let normed = self.norm(x)?;
            let mut three = [normed; 3];
            for value in &mut three {
                let w = self.input("w", &[SIDE[1], SIDE[1]])?;
                *value = self.product(normed, w)?;
            }
            let q = self.rotated(three[0], tables)?;
            let k = self.rotated(three[1], tables)?;
            let v = self.narrow(three[2])?;
            let k = self.turned(k)?;
            let scores = self.product(q, k)?;
            let scores = self.scale(scores, 0.125)?;
            let scores = self.binary(BinaryOp::Add, scores, mask)?;
            self.ops += 1;
            let weights = self.g.softmax("softmax", scores, 1, false)?;
            let weights = self.narrow(weights)?;
            let mixed = self.product(weights, v)?;
            let mixed = self.narrow(mixed)?;
            let w = self.input("w", &[SIDE[1], SIDE[1]])?;
            let out = self.product(mixed, w)?;
            let middle = self.binary(BinaryOp::Add, out, x)?;
            let normed = self.norm(middle)?;
            let (gate, up) = (self.input("gate", &[SIDE[1], SIDE[1]])?, self.input("up", &[SIDE[1], SIDE[1]])?);
            let gate = self.product(normed, gate)?;
            let gate = self.unary(UnaryOp::Silu, gate)?;
            let up = self.product(normed, up)?;
            let both = self.binary(BinaryOp::Mul, gate, up)?;
            let both = self.narrow(both)?;
            let down = self.input("down", &[SIDE[1], SIDE[1]])?;
            let out = self.product(both, down)?;
            x = self.binary(BinaryOp::Add, out, middle)?;
        }
        self.store(x)
    }

    fn training(&mut self, ops: usize) -> Result<(), Error> {
        // A layer is 9 ops forward and 17 back, the step included.
        let layers = ops.div_ceil(26);
        let mut x = self.input("x", &SIDE)?;
        let mut kept = Vec::new();
        for _ in 0..layers {
            let (w, bias) = (self.input("w", &[SIDE[1], SIDE[1]])?, self.wide_input("bias", &[1, SIDE[1]])?);
            let y = self.product(x, w)?;
            let pre = self.binary(BinaryOp::Add, y, bias)?;
            let active = self.unary(UnaryOp::GeluTanh, pre)?;
            let mean = self.sum(ReductionOp::Avg, active, &[1])?;
            let centred = self.binary(BinaryOp::Sub, active, mean)?;
            let square = self.binary(BinaryOp::Mul, centred, centred)?;
            let variance = self.sum(ReductionOp::Avg, square, &[1])?;
            let root = self.unary(UnaryOp::Rsqrt, variance)?;
            let normed = self.binary(BinaryOp::Mul, centred, root)?;
            self.g.set_dtype(normed, DType::Bf16)?;
            kept.push((x, w, bias, pre, normed, root));
            x = normed;
        }
        let target = self.input("target", &SIDE)?;
        let mut gradient = self.binary(BinaryOp::Sub, x, target)?;
        for (x, w, bias, pre, normed, root) in kept.into_iter().rev() {
            // Back through the norm.
            let along = self.binary(BinaryOp::Mul, gradient, normed)?;
            let along = self.sum(ReductionOp::Avg, along, &[1])?;
            let mean = self.sum(ReductionOp::Avg, gradient, &[1])?;
            let part = self.binary(BinaryOp::Mul, normed, along)?;
            let centred = self.binary(BinaryOp::Sub, gradient, mean)?;
            let d = self.binary(BinaryOp::Sub, centred, part)?;
            let d = self.binary(BinaryOp::Mul, d, root)?;
            let d = self.binary(BinaryOp::Backward(UnaryOp::GeluTanh), d, pre)?;
            let d_bias = self.sum(ReductionOp::Add, d, &[0])?;
            let d = self.narrow(d)?;
            let x_turned = self.turned(x)?;
            let d_w = self.product(x_turned, d)?;
            for (parameter, gradient) in [(w, d_w), (bias, d_bias)] {
                let down = self.scale(gradient, -0.01)?;
                let next = self.binary(BinaryOp::Add, parameter, down)?;
                self.store(next)?;
            }
            let w_turned = self.turned(w)?;
            gradient = self.product(d, w_turned)?;
        }
        self.store(gradient)
    }

    fn convolutional(&mut self, ops: usize) -> Result<(), Error> {
        // A layer is 13 ops forward and 14 back.
        let layers = ops.div_ceil(27);
        let channels = [0, 2, 3];
        let mut x = self.image("x")?;
        let mut kept = Vec::new();
        let count = (IMAGE[0] * IMAGE[2] * IMAGE[3]) as f64;
        for _ in 0..layers {
            let w = self.g.tensor("w", DType::Bf16, lines(&[IMAGE[1], IMAGE[1], 3, 3])?);
            self.ops += 1;
            let y = self.g.conv_fprop("conv", same(x, w, Uid(0)))?;
            self.g.store_as(y, "y", DType::Bf16, lines(&IMAGE)?)?;
            let total = self.sum(ReductionOp::Add, y, &channels)?;
            let square = self.binary(BinaryOp::Mul, y, y)?;
            let squares = self.sum(ReductionOp::Add, square, &channels)?;
            let mean = self.scale(total, 1.0 / count)?;
            let of_squares = self.scale(squares, 1.0 / count)?;
            let square_of_mean = self.binary(BinaryOp::Mul, mean, mean)?;
            let variance = self.binary(BinaryOp::Sub, of_squares, square_of_mean)?;
            let root = self.unary(UnaryOp::Rsqrt, variance)?;
            let centred = self.binary(BinaryOp::Sub, y, mean)?;
            let normed = self.binary(BinaryOp::Mul, centred, root)?;
            let active = self.unary(UnaryOp::Relu, normed)?;
            let out = self.binary(BinaryOp::Add, active, x)?;
            self.g.store_as(out, "out", DType::Bf16, lines(&IMAGE)?)?;
            kept.push((x, w, normed, root));
            x = out;
        }
        let target = self.image("target")?;
        let mut gradient = self.binary(BinaryOp::Sub, x, target)?;
        for (x, w, normed, root) in kept.into_iter().rev() {
            let d_normed = self.binary(BinaryOp::Backward(UnaryOp::Relu), gradient, normed)?;
            let shift = self.sum(ReductionOp::Avg, d_normed, &channels)?;
            let along = self.binary(BinaryOp::Mul, d_normed, normed)?;
            let along = self.sum(ReductionOp::Avg, along, &channels)?;
            let part = self.binary(BinaryOp::Mul, normed, along)?;
            let centred = self.binary(BinaryOp::Sub, d_normed, shift)?;
            let d = self.binary(BinaryOp::Sub, centred, part)?;
            let d_y = self.binary(BinaryOp::Mul, d, root)?;
            self.g.store_as(d_y, "d_y", DType::Bf16, lines(&IMAGE)?)?;
            self.ops += 2;
            let d_w = self.g.conv_wgrad("d_w", same(x, Uid(0), d_y), &[IMAGE[1], IMAGE[1], 3, 3])?;
            let d_x = self.g.conv_dgrad("d_x", same(Uid(0), w, d_y), &IMAGE)?;
            let down = self.scale(d_w, -0.01)?;
            let next = self.binary(BinaryOp::Add, w, down)?;
            self.g.store_as(next, "next", DType::Bf16, lines(&[IMAGE[1], IMAGE[1], 3, 3])?)?;
            let sum = self.binary(BinaryOp::Add, d_x, gradient)?;
            gradient = self.unary(UnaryOp::Identity, sum)?;
        }
        self.g.store_as(gradient, "d_x", DType::Bf16, lines(&IMAGE)?)
    }

    fn updates(&mut self, ops: usize) -> Result<(), Error> {
        let step = self.g.host_scalar("step", DType::F32);
        while self.ops < ops {
            let [w, d, mean, square] = [0; 4].map(|_| self.wide_input("parameter", &SIDE));
            let (w, d) = (w?, d?);
            let (kept, added) = (self.scale(mean?, 0.9)?, self.scale(d, 0.1)?);
            let mean = self.binary(BinaryOp::Add, kept, added)?;
            let (kept, squared) = (self.scale(square?, 0.999)?, self.binary(BinaryOp::Mul, d, d)?);
            let added = self.scale(squared, 0.001)?;
            let square = self.binary(BinaryOp::Add, kept, added)?;
            let root = self.unary(UnaryOp::Sqrt, square)?;
            let divisor = self.unary(UnaryOp::Affine { scale: Real(1.0), shift: Real(1e-8) }, root)?;
            let direction = self.binary(BinaryOp::Div, mean, divisor)?;
            self.ops += 1;
            let change = self.g.scale("change", direction, HostScalar::Bound(step))?;
            let changed = self.binary(BinaryOp::Add, w, change)?;
            for result in [mean, square, changed] {
                self.g.store(result, "next", DType::F32)?;
            }
        }
        Ok(())
    }

    fn towers(&mut self, ops: usize) -> Result<(), Error> {
        let towers = 8;
        let x = self.input("x", &SIDE)?;
        let shared = self.wide_input("shared", &SIDE)?;
        let mut total = None;
        for _ in 0..towers {
            let end = self.ops + ops.div_ceil(towers);
            let mut value = self.unary(UnaryOp::Tanh, x)?;
            while self.ops < end {
                let w = self.input("w", &[SIDE[1], SIDE[1]])?;
                let y = self.narrow(value)?;
                let y = self.product(y, w)?;
                let scaled = self.unary(UnaryOp::Sin, y)?;
                value = self.binary(BinaryOp::Mul, scaled, shared)?;
            }
            total = Some(match total {
                None => value,
                Some(total) => self.binary(BinaryOp::Add, total, value)?,
            });
        }
        self.store(total.unwrap_or(x))
    }

    fn fan(&mut self, ops: usize) -> Result<(), Error> {
        let x = self.wide_input("x", &SIDE)?;
        let columns = ops.div_ceil(4);
        let mut values = vec![x; columns];
        for f in [UnaryOp::Exp, UnaryOp::Sin, UnaryOp::Cos, UnaryOp::Tanh] {
            for value in &mut values {
                *value = self.unary(f, *value)?;
            }
        }
        values.into_iter().try_for_each(|value| self.store(value))
    }
}

/// A convolution of 3 × 3 whose result is as large as its input.
fn same(x: Uid, w: Uid, y: Uid) -> Conv {
    let mut conv = Conv::new(ConvDirection::Fprop, x, w, y, 2, Precision::Fp32);
    (conv.pads_before, conv.pads_after) = (vec![1, 1], vec![1, 1]);
    conv
}

/// A random graph of about `ops` ops on square matrices and on their rows and columns. Three of four operands are among the last values, the
/// others anywhere before. The same seed gives the same graph.
///
/// # Errors
/// None but a mistake in this file.
pub fn tangle(seed: u64, ops: usize) -> Result<Graph, Error> {
    let mut random = Random::new(seed ^ 0x7a96_1e00);
    let mut net = Net { g: GraphBuilder::new(&format!("tangle {seed}")), ops: 0 };
    // Dims [8, 8]; and [8, 1] or [1, 8], which broadcast to them.
    let mut squares = vec![net.wide_input("x", &[8, 8])?, net.wide_input("z", &[8, 8])?];
    let mut vectors = vec![net.wide_input("v", &[8, 1])?];
    let mut unread = BTreeSet::new();
    for _ in 0..ops {
        let mut pick = |list: &[Uid]| {
            let recent = if random.below(4) == 0 { list.len() } else { list.len().min(4) };
            list[list.len() - 1 - random.below(recent as u64) as usize]
        };
        let (x, z, v) = (pick(&squares), pick(&squares), pick(&vectors));
        let axis = random.below(2) as u32;
        let (value, read) = match random.below(24) {
            0..5 => (net.unary(if axis == 0 { UnaryOp::Sin } else { UnaryOp::Relu }, x)?, vec![x]),
            5..9 => (net.binary(if axis == 0 { BinaryOp::Add } else { BinaryOp::Atan2 }, x, z)?, vec![x, z]),
            9..11 => (net.binary(BinaryOp::Mul, x, v)?, vec![x, v]),
            11 => (net.g.ternary("select", TernaryOp::Select, x, z, v)?, vec![x, z, v]),
            12 => (net.scale(x, 0.5)?, vec![x]),
            13..15 => (net.g.matmul("product", x, z, Precision::Ieee)?, vec![x, z]),
            15..18 => (net.sum(ReductionOp::Add, x, &[axis])?, vec![x]),
            18 => (net.turned(x)?, vec![x]),
            19 => {
                let top = net.g.slice("top", x, &[0, 0], &[4, 8], &[1, 1])?;
                let bottom = net.g.slice("bottom", z, &[4, 0], &[8, 8], &[1, 1])?;
                (net.g.concat("joined", &[top, bottom], 0)?, vec![x, z])
            }
            20 => {
                let flat = net.g.reshape("flat", x, &[64])?;
                (net.g.reshape("square", flat, &[8, 8])?, vec![x])
            }
            21 => (net.g.softmax("softmax", x, axis, false)?, vec![x]),
            22 => (net.unary(UnaryOp::Exp, v)?, vec![v]),
            _ => (net.g.pad("pad", x, &[0, 0], &[0, 0], 0.0)?, vec![x]),
        };
        let is_square = net.g.dims(value).as_deref() == Some(&[8, 8]);
        if is_square {
            squares.push(value)
        } else {
            vectors.push(value)
        }
        unread.insert(value);
        unread.retain(|uid| !read.contains(uid));
        if random.below(6) == 0 {
            let turned = is_square && axis == 1;
            let layout = if turned { laid_out(Layout::new(&[8, 8], &[1, 8]))? } else { rows(&net.g.dims(value).unwrap_or_default())? };
            net.g.store_as(value, "stored", DType::F32, layout)?;
        }
    }
    for value in unread {
        if net.g.described(value).is_some_and(|tensor| tensor.is_virtual) {
            net.g.store(value, "stored", DType::F32)?;
        }
    }
    net.g.finish()
}
