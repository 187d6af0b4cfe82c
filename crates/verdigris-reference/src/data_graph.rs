//! Inputs for graphs: what each tensor holds follows from who reads it.

use std::collections::BTreeSet;

use verdigris_graph::{Graph, TensorDesc, Uid};
use verdigris_tensor::{DType, num};

use crate::data::{Distribution, Random, factors, fill, fill_layout, host_scalar};
use crate::operation;
use crate::ops::pool::Windows;
use crate::run::Inputs;

/// What a reader needs of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Data<'g> {
    /// Nothing in particular; the flag tells the left operand of a product, and what is no operand of a product.
    Any(bool),
    /// Numbers well above 0.
    Positive,
    /// Factors of dequantization.
    Factors,
    /// Truth values.
    Truth,
    /// Probabilities, or their logarithms.
    Probabilities(bool),
    /// Class labels below the number, one in five the other number.
    Labels(u64, Option<i64>),
    /// How many of so many rows count, with so many new ones: every other one an edge, some of them out of range.
    Counts(u64, u64),
    /// Where sequences begin that have so many rows together and at most so many each, and the last one ends.
    Offsets(u64, u64),
    /// Numbers of so many pages, one in three no page's.
    Pages(u64),
    /// Samples of fractional windows: from 0 to 1, both ends and what is none among them.
    Samples,
    /// Positions that windows hold.
    Positions(&'g verdigris_graph::PoolBackward),
}

/// Inputs for every tensor that a graph reads and does not write. Operands follow `distribution`, but for those with a meaning: divisors
/// and arguments of logarithms and roots are positive, labels are classes, indices of maxima lie in their windows, conditions are 0 and
/// 1. Host scalars are whole and half numbers in ±2 and never 0; integers are twice as much, and not negative where their type has no sign.
pub fn graph_inputs(graph: &Graph, distribution: Distribution, seed: u64) -> Inputs<Uid> {
    let mut inputs = Inputs::default();
    let mut stream = Random::new(seed);
    let written: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
    let read: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.inputs()).collect();
    for tensor in graph.tensors.iter().filter(|tensor| read.contains(&tensor.uid) && !written.contains(&tensor.uid)) {
        let seed = stream.bits();
        if tensor.by_value {
            let real = host_scalar(&mut stream, tensor.dtype == DType::F64);
            let scalar = match tensor.dtype.integer_range() {
                None => real,
                Some((0, _)) => 2.0 * real.abs(),
                Some(_) => 2.0 * real,
            };
            inputs.scalars.insert(tensor.uid, scalar);
            continue;
        }
        // What the first op that reads it needs.
        let reader = graph.nodes.iter().find(|node| node.op.inputs().contains(&tensor.uid));
        let data = reader.map_or(Data::Any(true), |node| operation::data_of(&node.op, graph, tensor.uid));
        inputs.buffers.insert(tensor.uid, bytes(graph, tensor, data, distribution, seed));
    }
    inputs
}

/// Numbers above 0: near 1, but for the distributions of large ones.
fn positive(dtype: DType, distribution: Distribution, seed: u64, elements: u64) -> Vec<u8> {
    if !matches!(distribution, Distribution::Hundreds | Distribution::Limits) {
        return fill(dtype, Distribution::SameSign, false, seed, elements);
    }
    let mut bytes = fill(dtype, distribution, true, seed, elements);
    for element in bytes.chunks_exact_mut(dtype.bytes()) {
        let size = num::read_element(dtype, element).map_or(1.0, f64::abs);
        // The chunk has the size of one element, so the write cannot be refused.
        let _ = num::write_element(dtype, if size == 0.0 { 1.0 } else { size }, element);
    }
    bytes
}

fn bytes(graph: &Graph, tensor: &TensorDesc, data: Data<'_>, distribution: Distribution, seed: u64) -> Vec<u8> {
    let (dtype, elements) = (tensor.dtype, tensor.layout.span_elements());
    let mut random = Random::new(seed);
    let mut drawn = |draw: &mut dyn FnMut(&mut Random) -> f64| {
        let mut bytes = vec![0; elements as usize * dtype.bytes()];
        for element in bytes.chunks_exact_mut(dtype.bytes()) {
            // The chunk has the size of one element, so the write cannot be refused.
            let _ = num::write_element(dtype, draw(&mut random), element);
        }
        bytes
    };
    match data {
        Data::Any(is_left) => fill_layout(dtype, distribution, is_left, seed, &tensor.layout),
        Data::Positive if dtype.is_float() => positive(dtype, distribution, seed, elements),
        Data::Positive => drawn(&mut |random| 1.0 + random.below(100) as f64),
        Data::Factors if dtype == DType::F32 => factors(seed, elements),
        Data::Factors => drawn(&mut |random| 0.5 + random.unit()),
        Data::Truth => drawn(&mut |random| random.below(2) as f64),
        Data::Probabilities(false) => drawn(&mut Random::unit),
        Data::Probabilities(true) => drawn(&mut |random| -4.0 * random.unit()),
        Data::Labels(classes, ignored) => drawn(&mut |random| match ignored {
            Some(ignored) if random.below(5) == 0 => ignored as f64,
            _ => random.below(classes.max(1)) as f64,
        }),
        Data::Counts(extent, rows) => drawn(&mut |random| {
            // Nothing, all places from the first on and up to the last, one beyond either, and what is none.
            let (extent, rows) = (extent as f64, rows as f64);
            let edges = [0.0, rows, extent, rows - 1.0, extent + 1.0, extent + rows, -1.0, f64::from(i32::MIN), f64::from(i32::MAX)];
            match random.below(2) {
                0 => edges[random.below(edges.len() as u64) as usize],
                _ => random.below(extent as u64 + 1) as f64,
            }
        }),
        Data::Samples => drawn(&mut |random| match random.below(8) {
            0 => 0.0,
            1 => 1.0,
            2 => 1.0 - f64::from(f32::EPSILON) / 2.0,
            3 => 3.0 * random.unit() - 1.0,
            _ => random.unit(),
        }),
        Data::Pages(pages) => drawn(&mut |random| match random.below(6) {
            0 => -1.0,
            1 => f64::from(i32::MAX - 5),
            _ => random.below(pages.max(1)) as f64,
        }),
        Data::Offsets(rows, longest) => {
            let mut bytes = vec![0; elements as usize * dtype.bytes()];
            let count = tensor.layout.elements();
            let mut begin = 0;
            for n in 0..count {
                let offset = tensor.layout.offset_of_position(n).unwrap_or(0) as usize;
                let _ = num::write_element(dtype, begin as f64, &mut bytes[offset * dtype.bytes()..]);
                let (left, behind) = (rows - begin, count.saturating_sub(n + 2));
                // One sequence in four is empty, one as long as may be; what those behind it cannot take is its own in any case.
                let least = left.saturating_sub(behind.saturating_mul(longest)).min(longest);
                let drawn = match random.below(4) {
                    0 => 0,
                    1 => longest,
                    _ => random.below(longest + 1),
                };
                begin += if behind == 0 { left.min(longest) } else { drawn.clamp(least, left.min(longest).max(least)) };
            }
            bytes
        }
        Data::Positions(pool) => {
            let Some(dx) = graph.tensor(pool.dx) else { return Vec::new() };
            let extents = &dx.layout.dims()[2..];
            let windows = Windows::new(&pool.windows, extents, &tensor.layout.dims()[2..]);
            let mut bytes = vec![0; elements as usize * dtype.bytes()];
            let mut index = vec![0; tensor.layout.rank()];
            for _ in 0..tensor.layout.elements() {
                let places = windows.elements(&index[2..]);
                let chosen = (!places.is_empty()).then(|| &places[random.below(places.len() as u64) as usize]);
                let value = chosen.map_or(-1.0, |place| crate::ops::pool::position(place, extents) as f64);
                if let Some(offset) = tensor.layout.offset(&index) {
                    let _ = num::write_element(dtype, value, &mut bytes[offset as usize * dtype.bytes()..]);
                }
                crate::source::advance(&mut index, tensor.layout.dims());
            }
            bytes
        }
    }
}
