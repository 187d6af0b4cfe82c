//! Batch normalization, its gradient and the statistics of channels, a plane (one n, one c) at a time. Sums over channels are in f64, one
//! channel by one thread, deviations in a pass of their own behind the mean.

use num_traits::Float;
use rayon::prelude::*;
use verdigris_graph::{BatchNorm, BatchNormBackward, BatchNormStatistics, BinaryOp, Node, Uid};
use verdigris_tensor::{DType, Layout};

use crate::elements::{Loaded, ViewMut, row_major};
use crate::engine::Engine;
use crate::functions;
use crate::graph_plan::Context;
use crate::operation::Operation;
use crate::real::Real;

/// A row-major tensor `[n, c, plane]`.
#[derive(Clone, Copy)]
struct Planes {
    channels: usize,
    plane: usize,
}

impl Planes {
    fn of(layout: &Layout) -> Planes {
        let dims = layout.dims();
        Planes { channels: dims[1] as usize, plane: dims[2..].iter().product::<u64>() as usize }
    }

    /// The planes of a channel, in order, of a tensor's elements.
    fn of_channel<T>(self, data: &[T], channel: usize) -> impl Iterator<Item = &[T]> {
        data.chunks_exact(self.plane.max(1)).skip(channel).step_by(self.channels.max(1))
    }

    /// What `f` gives for each channel, whichever thread asks.
    fn each<R: Send>(self, f: impl Fn(usize) -> R + Sync + Send) -> Vec<R> {
        (0..self.channels).into_par_iter().map(f).collect()
    }

    /// Writes the planes of a tensor: `f` gets the number of the plane, its channel, and where its elements go.
    fn fill<T: Real>(self, context: &Context<'_>, to: ViewMut<'_>, f: impl Fn(usize, usize, &mut [T]) + Sync + Send) {
        let order = row_major(&to.layout);
        to.fill::<T>(context.scratch, order, |to| {
            to.par_chunks_exact_mut(self.plane.max(1)).enumerate().for_each(|(at, plane)| f(at, at % self.channels, plane));
        });
    }

    /// The elements of plane `at`.
    fn at<T>(self, data: &[T], at: usize) -> &[T] {
        &data[at * self.plane..(at + 1) * self.plane]
    }
}

/// One value for each channel; the usual one where there is no tensor.
fn vector<T: Real>(context: &Context<'_>, uid: Option<Uid>, channels: usize, usual: f64) -> Vec<f64> {
    match uid {
        Some(uid) => context.view(uid).load_row_major::<T>(context.scratch).data().iter().map(|value| value.to_f64()).collect(),
        None => vec![usual; channels],
    }
}

fn store<T: Real>(context: &Context<'_>, to: Option<ViewMut<'_>>, values: impl Fn(usize) -> f64) {
    let Some(to) = to else { return };
    let order = row_major(&to.layout);
    to.fill::<T>(context.scratch, order, |to| to.iter_mut().enumerate().for_each(|(channel, to)| *to = T::from_f64(values(channel))));
}

/// The outputs by uid; those that nobody reads are not there.
struct Results<'v>(Vec<(Uid, ViewMut<'v>)>);

impl<'v> Results<'v> {
    fn take(&mut self, uid: impl Into<Option<Uid>>) -> Option<ViewMut<'v>> {
        let uid = uid.into()?;
        let place = self.0.iter().position(|(known, _)| *known == uid)?;
        Some(self.0.swap_remove(place).1)
    }
}

fn is_f64(context: &Context<'_>, read: impl IntoIterator<Item = Option<Uid>>) -> bool {
    read.into_iter().flatten().any(|uid| context.tensor(uid).dtype == DType::F64)
}

/// Mean and `Σ (x − μ)²` of each channel.
fn statistics<T: Real>(x: &Loaded<'_, '_, T>, planes: Planes) -> Vec<(f64, f64)> {
    planes.each(|channel| {
        let elements = || planes.of_channel(x.data(), channel).flatten().map(|x| x.to_f64());
        let count = elements().count() as f64;
        // The mean of differences from one of them, so that a mean far from 0 is as good.
        let first = elements().next().unwrap_or(0.0);
        let mean = first + elements().map(|x| x - first).sum::<f64>() / count;
        (mean, elements().map(|x| (x - mean) * (x - mean)).sum())
    })
}

fn forward<T: Real + Float>(op: &BatchNorm, context: &Context<'_>, mut results: Results<'_>) {
    let x = context.view(op.x).load_row_major::<T>(context.scratch);
    let add = op.add.map(|add| context.view(add).load_row_major::<T>(context.scratch));
    let planes = Planes::of(&x.layout);
    let count = x.layout.elements() as f64 / planes.channels as f64;
    let known = statistics(&x, planes);
    let inv: Vec<f64> = known.iter().map(|(_, m2)| 1.0 / (m2 / count + op.eps.0).sqrt()).collect();
    let scale = vector::<T>(context, op.scale, planes.channels, 1.0);
    let bias = vector::<T>(context, op.bias, planes.channels, 0.0);
    store::<T>(context, results.take(op.mean), |channel| known[channel].0);
    store::<T>(context, results.take(op.inv), |channel| inv[channel]);
    let next = |running: f64, batch: f64| (1.0 - op.momentum.0) * running + op.momentum.0 * batch;
    let running = [op.running_mean, op.running_var].map(|uid| vector::<T>(context, uid, planes.channels, 0.0));
    store::<T>(context, results.take(op.next_mean), |channel| next(running[0][channel], known[channel].0));
    store::<T>(context, results.take(op.next_var), |channel| next(running[1][channel], known[channel].1 / (count - 1.0)));
    let Some(y) = results.take(op.y) else { return };
    planes.fill::<T>(context, y, |at, channel, y| {
        let x = planes.at(x.data(), at);
        let factor = inv[channel] * scale[channel];
        for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
            let mut value = (Real::to_f64(*x) - known[channel].0) * factor + bias[channel];
            if let Some(add) = &add {
                value += Real::to_f64(planes.at(add.data(), at)[i]);
            }
            // NaN stays.
            *y = T::from_f64(if op.relu && value <= 0.0 { 0.0 } else { value });
        }
        if let Some(f) = op.activation {
            let normalized = y.to_vec();
            functions::unary(f, &normalized, y);
        }
    });
}

fn backward<T: Real + Float>(op: &BatchNormBackward, context: &Context<'_>, mut results: Results<'_>) {
    let load = |uid: Uid| context.view(uid).load_row_major::<T>(context.scratch);
    let (dy, x, y) = (load(op.dy), load(op.x), op.y.map(load));
    let planes = Planes::of(&x.layout);
    let count = x.layout.elements() as f64 / planes.channels as f64;
    let of = |uid, usual| vector::<T>(context, uid, planes.channels, usual);
    let (mean, inv, scale, bias) = (of(Some(op.mean), 0.0), of(Some(op.inv), 1.0), of(op.scale, 1.0), of(op.bias, 0.0));
    // x̂ and g of an element of plane `at`.
    let element = |at: usize, channel: usize, i: usize| {
        let normalized = (Real::to_f64(planes.at(x.data(), at)[i]) - mean[channel]) * inv[channel];
        let dy = planes.at(dy.data(), at)[i];
        let result = || normalized * scale[channel] + bias[channel];
        let g = match (&y, op.activation) {
            (_, Some(f)) => {
                let mut g = [T::default()];
                functions::binary(BinaryOp::Backward(f), &[dy], &[T::from_f64(result())], &mut g);
                Real::to_f64(g[0])
            }
            _ if !op.relu || y.as_ref().map_or_else(result, |y| Real::to_f64(planes.at(y.data(), at)[i])) > 0.0 => Real::to_f64(dy),
            _ => 0.0,
        };
        (normalized, g)
    };
    let images = x.layout.dims()[0] as usize;
    let sums = planes.each(|channel| {
        let mut sums = (0.0, 0.0);
        for image in 0..images {
            for i in 0..planes.plane {
                let (normalized, g) = element(image * planes.channels + channel, channel, i);
                sums.0 += g;
                sums.1 += g * normalized;
            }
        }
        sums
    });
    store::<T>(context, results.take(op.dbias), |channel| sums[channel].0);
    store::<T>(context, results.take(op.dscale), |channel| sums[channel].1);
    if let Some(dx) = results.take(op.dx) {
        planes.fill::<T>(context, dx, |at, channel, dx| {
            let factor = scale[channel] * inv[channel];
            let (of_bias, of_scale) = (sums[channel].0 / count, sums[channel].1 / count);
            for (i, dx) in dx.iter_mut().enumerate() {
                let (normalized, g) = element(at, channel, i);
                *dx = T::from_f64(factor * (g - of_bias - normalized * of_scale));
            }
        });
    }
    if let Some(dadd) = results.take(op.dadd) {
        planes.fill::<T>(context, dadd, |at, channel, dadd| {
            dadd.iter_mut().enumerate().for_each(|(i, dadd)| *dadd = T::from_f64(element(at, channel, i).1));
        });
    }
}

fn moments<T: Real>(op: &BatchNormStatistics, context: &Context<'_>, mut results: Results<'_>) {
    let x = context.view(op.x).load_row_major::<T>(context.scratch);
    let known = statistics(&x, Planes::of(&x.layout));
    store::<T>(context, results.take(op.mean), |channel| known[channel].0);
    store::<T>(context, results.take(op.m2), |channel| known[channel].1);
}

impl Operation for BatchNorm {
    const ENGINE: Engine = Engine::BatchNorm;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        let read = [Some(self.x), self.scale, self.bias, self.add, self.running_mean, self.running_var];
        let results = Results(outputs);
        if is_f64(context, read) { forward::<f64>(self, context, results) } else { forward::<f32>(self, context, results) }
    }
}

impl Operation for BatchNormBackward {
    const ENGINE: Engine = Engine::BatchNorm;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        let read = [Some(self.dy), Some(self.x), self.y, self.scale, self.bias, Some(self.mean), Some(self.inv)];
        let results = Results(outputs);
        if is_f64(context, read) { backward::<f64>(self, context, results) } else { backward::<f32>(self, context, results) }
    }
}

impl Operation for BatchNormStatistics {
    const ENGINE: Engine = Engine::BatchNorm;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        let results = Results(outputs);
        if is_f64(context, [Some(self.x)]) { moments::<f64>(self, context, results) } else { moments::<f32>(self, context, results) }
    }
}
