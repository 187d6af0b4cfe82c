//! Normalization and its gradient, a row at a time. Statistics and sums of a row are in f64 throughout: all its results hang on them. The gradients
//! of scale and bias are added up row by row, always in the same order.

use rayon::prelude::*;
use verdigris_graph::{Node, NormKind, NormSpec, Normalize, NormalizeBackward, Uid};
use verdigris_tensor::{DType, Layout};

use crate::elements::{Loaded, ViewMut, row_major};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::operation::Operation;
use crate::real::Real;

/// Where the rows of a packed row-major tensor lie.
struct Rows {
    /// Of each row, the place of its first element.
    first: Vec<usize>,
    /// Of each element of a row, how far it is from the first.
    within: Vec<usize>,
}

impl Rows {
    /// The rows in the order of their statistics, row-major.
    fn new(spec: &NormSpec, layout: &Layout) -> Rows {
        let dims = layout.dims();
        let axes: Vec<usize> = spec.axes.iter().map(|&axis| axis as usize).collect();
        let cut = axes[0];
        let inside = dims[cut] / spec.groups;
        let strides: Vec<usize> = row_major(layout).strides().iter().map(|&stride| stride as usize).collect();
        let rows: Vec<(u64, usize)> = (0..dims.len())
            .filter_map(|axis| match axis {
                _ if axis == cut => Some((spec.groups, strides[axis] * inside as usize)),
                _ if axes.contains(&axis) => None,
                _ => Some((dims[axis], strides[axis])),
            })
            .collect();
        let elements: Vec<(u64, usize)> = axes.iter().map(|&axis| (if axis == cut { inside } else { dims[axis] }, strides[axis])).collect();
        Rows { first: places(&rows), within: places(&elements) }
    }
}

/// The places of all indices of dims with these extents and strides, row-major.
fn places(dims: &[(u64, usize)]) -> Vec<usize> {
    dims.iter().fold(vec![0], |outer, &(extent, stride)| {
        outer.into_iter().flat_map(|place| (0..extent as usize).map(move |i| place + i * stride)).collect()
    })
}

/// A vector that is broadcast: of each place of the whole tensor, the element.
struct Broadcast<T> {
    data: Vec<T>,
    dims: Vec<usize>,
    strides: Vec<usize>,
}

impl<T: Real> Broadcast<T> {
    fn new(vector: &Loaded<'_, '_, T>, whole: &Layout) -> Broadcast<T> {
        Broadcast { data: vector.data().to_vec(), dims: extents(whole), strides: repeated(&vector.layout, whole) }
    }

    fn at(&self, place: usize) -> f64 {
        self.data[offset(place, &self.dims, &self.strides)].to_f64()
    }
}

fn extents(layout: &Layout) -> Vec<usize> {
    layout.dims().iter().map(|&dim| dim as usize).collect()
}

/// The strides of a packed vector over the dims of the tensor to which it is broadcast.
fn repeated(vector: &Layout, whole: &Layout) -> Vec<usize> {
    let lead = whole.rank() - vector.rank();
    let packed = row_major(vector);
    (0..whole.rank())
        .map(|axis| match axis.checked_sub(lead) {
            Some(own) if vector.dims()[own] != 1 => packed.strides()[own] as usize,
            _ => 0,
        })
        .collect()
}

/// Where an element of a packed tensor of `dims` lies under other strides.
fn offset(place: usize, dims: &[usize], strides: &[usize]) -> usize {
    let mut rest = place;
    let mut offset = 0;
    for (&dim, &stride) in dims.iter().zip(strides).rev() {
        offset += rest % dim * stride;
        rest /= dim;
    }
    offset
}

/// What is known of a row: its values, `μ` and `r`.
struct Row {
    values: Vec<f64>,
    mean: f64,
    inv: f64,
}

impl Row {
    fn statistics(spec: &NormSpec, values: Vec<f64>) -> Row {
        let count = values.len() as f64;
        let mean = if spec.kind == NormKind::Layer { values.iter().sum::<f64>() / count } else { 0.0 };
        let variance = values.iter().map(|value| (value - mean) * (value - mean)).sum::<f64>() / count;
        Row { values, mean, inv: 1.0 / (variance + spec.eps.0).sqrt() }
    }

    fn normalized(&self, i: usize) -> f64 {
        (self.values[i] - self.mean) * self.inv
    }
}

fn is_f64(context: &Context<'_>, uids: impl IntoIterator<Item = Uid>) -> bool {
    uids.into_iter().any(|uid| context.tensor(uid).dtype == DType::F64)
}

fn forward<T: Real>(op: &Normalize, context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
    let x = context.view(op.x).load_row_major::<T>(context.scratch);
    let load = |uid: Option<Uid>| uid.map(|uid| context.view(uid).load_row_major::<T>(context.scratch));
    let residual = load(op.residual);
    let vector = |uid: Option<Uid>| load(uid).map(|vector| Broadcast::new(&vector, &x.layout));
    let (scale, bias) = (vector(op.scale), vector(op.bias));
    let rows = Rows::new(&op.spec, &x.layout);
    let shift = if op.spec.zero_centred { 1.0 } else { 0.0 };
    let value = |place: usize| {
        let x = x.data()[place].to_f64();
        residual.as_ref().map_or(x, |residual| x + residual.data()[place].to_f64())
    };
    let known: Vec<Row> = (rows.first.par_iter())
        .map(|&first| Row::statistics(&op.spec, rows.within.iter().map(|within| value(first + within)).collect()))
        .collect();
    for (uid, output) in outputs {
        let order = row_major(&output.layout);
        output.fill::<T>(context.scratch, order, |to| {
            if Some(uid) == op.mean || Some(uid) == op.inv {
                let is_mean = Some(uid) == op.mean;
                to.iter_mut().zip(&known).for_each(|(to, row)| *to = T::from_f64(if is_mean { row.mean } else { row.inv }));
                return;
            }
            for (&first, row) in rows.first.iter().zip(&known) {
                for (i, &within) in rows.within.iter().enumerate() {
                    let place = first + within;
                    to[place] = T::from_f64(if uid == op.y {
                        let gamma = scale.as_ref().map_or(1.0, |scale| scale.at(place) + shift);
                        row.normalized(i) * gamma + bias.as_ref().map_or(0.0, |bias| bias.at(place))
                    } else {
                        row.values[i]
                    });
                }
            }
        });
    }
}

fn backward<T: Real>(op: &NormalizeBackward, context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
    let load = |uid: Uid| context.view(uid).load_row_major::<T>(context.scratch);
    let (x, dy) = (load(op.x), load(op.dy));
    let [mean, inv, dsum] = [op.mean, op.inv, op.dsum].map(|uid| uid.map(load));
    let scale = op.scale.map(|scale| Broadcast::new(&load(scale), &x.layout));
    let rows = Rows::new(&op.spec, &x.layout);
    let shift = if op.spec.zero_centred { 1.0 } else { 0.0 };
    let known: Vec<Row> = (rows.first.par_iter().enumerate())
        .map(|(number, &first)| {
            let values = rows.within.iter().map(|within| x.data()[first + within].to_f64()).collect();
            match &inv {
                Some(inv) => {
                    let mean = mean.as_ref().map_or(0.0, |mean| mean.data()[number].to_f64());
                    Row { values, mean, inv: inv.data()[number].to_f64() }
                }
                None => Row::statistics(&op.spec, values),
            }
        })
        .collect();
    let g = |place: usize| dy.data()[place].to_f64() * scale.as_ref().map_or(1.0, |scale| scale.at(place) + shift);
    for (uid, output) in outputs {
        let order = row_major(&output.layout);
        let layout = output.layout;
        output.fill::<T>(context.scratch, order, |to| {
            if Some(uid) != op.dx {
                let is_scale = Some(uid) == op.dscale;
                let (dims, strides) = (extents(&x.layout), repeated(&layout, &x.layout));
                let mut sums = vec![0.0; to.len()];
                for (&first, row) in rows.first.iter().zip(&known) {
                    for (i, &within) in rows.within.iter().enumerate() {
                        let place = first + within;
                        let dy = dy.data()[place].to_f64();
                        sums[offset(place, &dims, &strides)] += if is_scale { dy * row.normalized(i) } else { dy };
                    }
                }
                to.iter_mut().zip(sums).for_each(|(to, sum)| *to = T::from_f64(sum));
                return;
            }
            let count = rows.within.len() as f64;
            for (&first, row) in rows.first.iter().zip(&known) {
                let (mut sum, mut product) = (0.0, 0.0);
                for (i, &within) in rows.within.iter().enumerate() {
                    let g = g(first + within);
                    sum += g;
                    product += g * row.normalized(i);
                }
                let mean = if op.spec.kind == NormKind::Layer { sum / count } else { 0.0 };
                for (i, &within) in rows.within.iter().enumerate() {
                    let place = first + within;
                    let dx = row.inv * (g(place) - mean - row.normalized(i) * (product / count));
                    to[place] = T::from_f64(dx + dsum.as_ref().map_or(0.0, |dsum| dsum.data()[place].to_f64()));
                }
            }
        });
    }
}

impl Operation for Normalize {
    const ENGINE: Engine = Engine::Norm;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if is_f64(context, [Some(self.x), self.residual, self.scale, self.bias].into_iter().flatten()) {
            forward::<f64>(self, context, outputs);
        } else {
            forward::<f32>(self, context, outputs);
        }
    }
}

impl Operation for NormalizeBackward {
    const ENGINE: Engine = Engine::Norm;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        let read = [Some(self.x), Some(self.dy), self.scale, self.mean, self.inv, self.dsum];
        if is_f64(context, read.into_iter().flatten()) {
            backward::<f64>(self, context, outputs);
        } else {
            backward::<f32>(self, context, outputs);
        }
    }
}
