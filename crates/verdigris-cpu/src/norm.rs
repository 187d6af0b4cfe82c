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
use crate::scratch::{Lent, Scratch};

/// Where the rows of a packed row-major tensor lie.
struct Rows<'s> {
    /// Of each row, the place of its first element.
    first: Lent<'s, usize>,
    /// Of each element of a row, how far it is from the first.
    within: Lent<'s, usize>,
}

impl<'s> Rows<'s> {
    /// The rows in the order of their statistics, row-major.
    fn new(spec: &NormSpec, layout: &Layout, scratch: &'s Scratch) -> Rows<'s> {
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
        Rows { first: places(&rows, scratch), within: places(&elements, scratch) }
    }
}

/// The places of all indices of dims with these extents and strides, row-major.
fn places<'s>(dims: &[(u64, usize)], scratch: &'s Scratch) -> Lent<'s, usize> {
    let (extents, strides): (Vec<usize>, Vec<usize>) = dims.iter().map(|&(extent, stride)| (extent as usize, stride)).unzip();
    let count = extents.iter().product();
    scratch.places.collected(count, (0..count).map(|number| offset(number, &extents, &strides)))
}

/// A vector that is broadcast: of each place of the whole tensor, the element.
struct Broadcast<'a, 's, T: Real> {
    dims: Vec<usize>,
    strides: Vec<usize>,
    vector: Loaded<'a, 's, T>,
}

impl<'a, 's, T: Real> Broadcast<'a, 's, T> {
    /// `vector` is packed row-major.
    fn new(vector: Loaded<'a, 's, T>, whole: &Layout) -> Self {
        Broadcast { dims: extents(whole), strides: repeated(&vector.layout, whole), vector }
    }

    fn at(&self, place: usize) -> f64 {
        self.vector.data()[offset(place, &self.dims, &self.strides)].to_f64()
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

/// What is known of a row: `μ` and `r`.
#[derive(Clone, Copy)]
struct Row {
    mean: f64,
    inv: f64,
}

impl Row {
    /// Of a row of so many values, of which `value` gives each.
    fn statistics(spec: &NormSpec, count: usize, value: impl Fn(usize) -> f64) -> Row {
        let values = || (0..count).map(&value);
        let mean = if spec.kind == NormKind::Layer { values().sum::<f64>() / count as f64 } else { 0.0 };
        let variance = values().map(|value| (value - mean) * (value - mean)).sum::<f64>() / count as f64;
        Row { mean, inv: 1.0 / (variance + spec.eps.0).sqrt() }
    }

    fn normalized(self, value: f64) -> f64 {
        (value - self.mean) * self.inv
    }
}

/// What is known of every row, two numbers each.
struct Known<'s> {
    numbers: Lent<'s, f64>,
}

impl<'s> Known<'s> {
    /// `row` tells of each by its number.
    fn new(rows: usize, scratch: &'s Scratch, row: impl Fn(usize) -> Row + Sync) -> Known<'s> {
        let mut numbers = scratch.f64.lend(2 * rows);
        numbers.par_chunks_exact_mut(2).enumerate().for_each(|(number, to)| {
            let Row { mean, inv } = row(number);
            to.copy_from_slice(&[mean, inv]);
        });
        Known { numbers }
    }

    fn rows(&self) -> impl Iterator<Item = Row> {
        self.numbers.chunks_exact(2).map(|row| Row { mean: row[0], inv: row[1] })
    }
}

fn is_f64(context: &Context<'_>, uids: impl IntoIterator<Item = Uid>) -> bool {
    uids.into_iter().any(|uid| context.tensor(uid).dtype == DType::F64)
}

fn forward<T: Real>(op: &Normalize, context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
    let x = context.view(op.x).load_row_major::<T>(context.scratch);
    let load = |uid: Option<Uid>| uid.map(|uid| context.view(uid).load_row_major::<T>(context.scratch));
    let residual = load(op.residual);
    let vector = |uid: Option<Uid>| load(uid).map(|vector| Broadcast::new(vector, &x.layout));
    let (scale, bias) = (vector(op.scale), vector(op.bias));
    let rows = Rows::new(&op.spec, &x.layout, context.scratch);
    let shift = if op.spec.zero_centred { 1.0 } else { 0.0 };
    let value = |place: usize| {
        let x = x.data()[place].to_f64();
        residual.as_ref().map_or(x, |residual| x + residual.data()[place].to_f64())
    };
    let known = Known::new(rows.first.len(), context.scratch, |number| {
        Row::statistics(&op.spec, rows.within.len(), |i| value(rows.first[number] + rows.within[i]))
    });
    for (uid, output) in outputs {
        let order = row_major(&output.layout);
        output.fill::<T>(context.scratch, order, |to| {
            if Some(uid) == op.mean || Some(uid) == op.inv {
                let is_mean = Some(uid) == op.mean;
                to.iter_mut().zip(known.rows()).for_each(|(to, row)| *to = T::from_f64(if is_mean { row.mean } else { row.inv }));
                return;
            }
            for (&first, row) in rows.first.iter().zip(known.rows()) {
                for &within in rows.within.iter() {
                    let place = first + within;
                    to[place] = T::from_f64(if uid == op.y {
                        let gamma = scale.as_ref().map_or(1.0, |scale| scale.at(place) + shift);
                        row.normalized(value(place)) * gamma + bias.as_ref().map_or(0.0, |bias| bias.at(place))
                    } else {
                        value(place)
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
    let scale = op.scale.map(|scale| Broadcast::new(load(scale), &x.layout));
    let rows = Rows::new(&op.spec, &x.layout, context.scratch);
    let shift = if op.spec.zero_centred { 1.0 } else { 0.0 };
    let value = |place: usize| x.data()[place].to_f64();
    let known = Known::new(rows.first.len(), context.scratch, |number| match &inv {
        Some(inv) => {
            let mean = mean.as_ref().map_or(0.0, |mean| mean.data()[number].to_f64());
            Row { mean, inv: inv.data()[number].to_f64() }
        }
        None => Row::statistics(&op.spec, rows.within.len(), |i| value(rows.first[number] + rows.within[i])),
    });
    let g = |place: usize| dy.data()[place].to_f64() * scale.as_ref().map_or(1.0, |scale| scale.at(place) + shift);
    for (uid, output) in outputs {
        let order = row_major(&output.layout);
        let layout = output.layout;
        output.fill::<T>(context.scratch, order, |to| {
            if Some(uid) != op.dx {
                let is_scale = Some(uid) == op.dscale;
                let (dims, strides) = (extents(&x.layout), repeated(&layout, &x.layout));
                let mut sums = context.scratch.f64.lend(to.len());
                sums.fill(0.0);
                for (&first, row) in rows.first.iter().zip(known.rows()) {
                    for &within in rows.within.iter() {
                        let place = first + within;
                        let dy = dy.data()[place].to_f64();
                        sums[offset(place, &dims, &strides)] += if is_scale { dy * row.normalized(value(place)) } else { dy };
                    }
                }
                to.iter_mut().zip(sums.iter()).for_each(|(to, &sum)| *to = T::from_f64(sum));
                return;
            }
            let count = rows.within.len() as f64;
            for (&first, row) in rows.first.iter().zip(known.rows()) {
                let (mut sum, mut product) = (0.0, 0.0);
                for &within in rows.within.iter() {
                    let g = g(first + within);
                    sum += g;
                    product += g * row.normalized(value(first + within));
                }
                let mean = if op.spec.kind == NormKind::Layer { sum / count } else { 0.0 };
                for &within in rows.within.iter() {
                    let place = first + within;
                    let dx = row.inv * (g(place) - mean - row.normalized(value(place)) * (product / count));
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
