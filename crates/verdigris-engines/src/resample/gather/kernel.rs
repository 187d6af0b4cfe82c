//! The kernels: a thread for a vector of neighbouring channels of an output, or for neighbouring outputs of a row in several channels.

use verdigris_kir::face::{Kernel, Val, Var};

use crate::fuse::compute::Compute;
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::strided::{self, Packed, Strided};
use crate::fuse::value::AnyVal;
use crate::layout::space::{Extents, Space};

use super::tables::{Along, Axis, TableArgs, Tap};
use super::{Spec, Walk};

verdigris_kir::parameters! {
    /// Of every kernel here.
    pub(super) struct Resample / ResampleArgs of Spec as spec {
        pub(super) points: u32,
        /// In the order that threads run through; the innermost counts in vectors, channels in groups of a thread.
        pub(super) extents: Extents = 5,
        /// The first position along each spatial dim of what is written; the last in vectors where these are of outputs.
        pub(super) first: [u32; 3],
        /// Channels that a thread takes one behind the other, and all that there are.
        pub(super) group: Option<u32> = (spec.walk != Walk::Channels).then_some(()),
        pub(super) channels: Option<u32> = (spec.walk != Walk::Channels).then_some(()),
        /// The spatial dims of what is written, where threads run through planes.
        pub(super) plane: Option<Extents> = (spec.walk == Walk::Plane).then_some(3),
        pub(super) tables: Vec<TableArgs> = spec.along.to_vec(),
        pub(super) operands: Vec<OperandArgs> = spec.operands(),
    }
}

/// The kernel that a spec says.
pub(super) fn build<'k, T: Compute>(spec: &Spec, k: Kernel<'k>) {
    let Resample { points, extents, first, group, channels, plane, tables, operands } = Resample::declare(k, spec);
    let operands = Strided::all(&spec.types, operands);
    let point = k.cta() * spec.threads() + k.thread();
    let mut index = [k.constant(0u32); 5];
    for (&dim, at) in spec.order().iter().zip(extents.index(point)) {
        index[dim] = at;
    }
    let place = [index[2] + first[0], index[3] + first[1], index[4] + first[2]];
    let axis = |i: usize| Axis { k, along: spec.along[i], table: tables[i] };
    let axes = [axis(0), axis(1), axis(2)];
    let Ok([from, to]) = <[Strided<'k>; 2]>::try_from(operands) else { unreachable!("what is read and what is written") };
    k.when(point.lt(points), || match (spec.walk, group, channels) {
        (Walk::Outputs | Walk::Plane, Some(group), Some(channels)) => {
            let taken = [index[0], index[1] * group, (channels - index[1] * group).min(group)];
            if spec.is_single() {
                single_outputs::<T>(spec, k, &axes, taken, place, plane.as_ref(), [&from, &to]);
            } else {
                outputs::<T>(spec, k, &axes, taken, place, &from, &to);
            }
        }
        _ => channels_of::<T>(spec, k, &axes, [index[0], index[1]], place, &from, &to),
    });
}

/// The product of weights, of which those that are 1 are left out.
fn product<'k, T: Compute>(weights: [Option<Val<'k, T>>; 2]) -> Option<Val<'k, T>> {
    match weights {
        [Some(one), Some(other)] => Some(one * other),
        [one, other] => one.or(other),
    }
}

fn both<'k>(conditions: [Option<Val<'k, bool>>; 2]) -> Option<Val<'k, bool>> {
    match conditions {
        [Some(one), Some(other)] => Some(one & other),
        [one, other] => one.or(other),
    }
}

/// `sum + weight · value`.
fn added<'k, T: Compute>(k: Kernel<'k>, sum: Option<Val<'k, T>>, weight: Option<Val<'k, T>>, value: Val<'k, T>) -> Val<'k, T> {
    match (sum, weight) {
        (Some(sum), Some(weight)) => k.fma(weight, value, sum),
        (Some(sum), None) => sum + value,
        (None, Some(weight)) => weight * value,
        (None, None) => value,
    }
}

/// The only element that an output reads: its bits, or what they stand for in the type that is computed in.
fn single<'k, T: Compute>(spec: &Spec, k: Kernel<'k>, value: AnyVal<'k>) -> AnyVal<'k> {
    if spec.moved { value } else { AnyVal::of(value.get::<T>(k)) }
}

/// One output: a vector of its channels, or one of them.
fn channels_of<'k, T: Compute>(
    spec: &Spec,
    k: Kernel<'k>,
    axes: &[Axis<'k>; 3],
    [image, channel]: [Val<'k, u32>; 2],
    place: [Val<'k, u32>; 3],
    from: &Strided<'k>,
    to: &Strided<'k>,
) {
    let vector = spec.vector;
    // Channels are the innermost dim of what is taken by vectors, and a dim like any other elsewhere.
    let (lead, number) = if vector == 1 { (vec![image, channel], k.constant(0)) } else { (vec![image], channel) };
    let (from, to) = (from.at(&lead), to.at(&lead));
    let sums: Vec<Var<'k, T>> = if spec.is_single() { Vec::new() } else { (0..vector).map(|_| k.var(T::constant(k, 0.0))).collect() };
    axes[0].each::<T>(place[0], &|depths| {
        for depth in depths {
            let plane = from.at(&[depth.index]);
            axes[1].each::<T>(place[1], &|heights| {
                let rows: Vec<Strided<'k>> = heights.iter().map(|height| plane.at(&[height.index])).collect();
                axes[2].each::<T>(place[2], &|widths| {
                    // All of them are on their way before the first is used.
                    let loaded: Vec<Vec<Packed<'k>>> = (rows.iter())
                        .map(|row| widths.iter().map(|width| row.line(&[width.index], vector).load(number)).collect())
                        .collect();
                    if spec.is_single() {
                        let values: Vec<AnyVal<'k>> = loaded[0][0].stored(k).into_iter().map(|value| single::<T>(spec, k, value)).collect();
                        to.line(&place, vector).store_values(number, &values);
                        return;
                    }
                    for (height, loaded) in heights.iter().zip(&loaded) {
                        let row_weight = product([depth.weight, height.weight]);
                        let row_counts = both([depth.counts, height.counts]);
                        for (width, loaded) in widths.iter().zip(loaded) {
                            let counted = match both([row_counts, width.counts]) {
                                Some(counts) => loaded.only_where(k, counts),
                                None => loaded.clone(),
                            };
                            let weight = product([row_weight, width.weight]);
                            for (sum, value) in sums.iter().zip(counted.values::<T>(k)) {
                                sum.set(added(k, Some(sum.get()), weight, value));
                            }
                        }
                    }
                });
            });
        }
    });
    if !spec.is_single() {
        let values: Vec<AnyVal<'k>> = sums.iter().map(|sum| AnyVal::of(sum.get())).collect();
        to.line(&place, vector).store_values(number, &values);
    }
}

/// Neighbouring outputs of a row, in one channel behind the other: where they read, and with which weights, is found out once.
fn outputs<'k, T: Compute>(
    spec: &Spec,
    k: Kernel<'k>,
    axes: &[Axis<'k>; 3],
    [image, channel, channels]: [Val<'k, u32>; 3],
    [depth, height, number]: [Val<'k, u32>; 3],
    from: &Strided<'k>,
    to: &Strided<'k>,
) {
    let vector = spec.vector;
    let (from, to) = (from.at(&[image]), to.at(&[image]));
    // Distances from the first element of a channel, in bytes.
    let far = |dim: usize, tap: &Tap<'k, T>| from.distance(dim + 1, tap.index);
    let (depths, heights) = (axes[0].all::<T>(depth), axes[1].all::<T>(height));
    let rows: Vec<Placed<'k, T>> = (depths.iter())
        .flat_map(|depth| {
            heights.iter().map(|height| Placed {
                distance: far(0, depth) + far(1, height),
                weight: product([depth.weight, height.weight]),
                counts: both([depth.counts, height.counts]),
            })
        })
        .collect();
    let columns: Vec<Vec<Placed<'k, T>>> = (0..vector)
        .map(|lane| {
            let taps = axes[2].all::<T>(number * vector + lane);
            taps.iter().map(|tap| Placed { distance: far(2, tap), weight: tap.weight, counts: tap.counts }).collect()
        })
        .collect();
    let zero = || T::constant(k, 0.0);
    let counted = |counts: Option<Val<'k, bool>>, value: Val<'k, T>| match counts {
        Some(counts) => k.select(counts, value, zero()),
        None => value,
    };
    k.range(channels, |c| {
        let (source, target) = (from.at(&[channel + c]), to.at(&[channel + c]));
        let loaded: Vec<Vec<Vec<AnyVal<'k>>>> = (rows.iter())
            .map(|row| {
                let row_at = source.moved(row.distance);
                columns.iter().map(|lane| lane.iter().map(|column| row_at.moved(column.distance).first()).collect()).collect()
            })
            .collect();
        let values: Vec<AnyVal<'k>> = (0..vector as usize)
            .map(|lane| {
                let mut sum: Option<Val<'k, T>> = None;
                for (row, loaded) in rows.iter().zip(&loaded) {
                    let mut line: Option<Val<'k, T>> = None;
                    for (column, value) in columns[lane].iter().zip(&loaded[lane]) {
                        line = Some(added(k, line, column.weight, counted(column.counts, value.get(k))));
                    }
                    let line = counted(row.counts, line.unwrap_or_else(zero));
                    sum = Some(added(k, sum, row.weight, line));
                }
                AnyVal::of(sum.unwrap_or_else(zero))
            })
            .collect();
        target.line(&[depth, height], vector).store_values(number, &values);
    });
}

/// Neighbouring outputs of a row, or of a plane, each of which reads one element: in several channels, so many of them at a time that enough is on its way.
fn single_outputs<'k, T: Compute>(
    spec: &Spec,
    k: Kernel<'k>,
    axes: &[Axis<'k>; 3],
    [image, channel, channels]: [Val<'k, u32>; 3],
    [depth, height, number]: [Val<'k, u32>; 3],
    plane: Option<&Space<'k>>,
    [from, to]: [&Strided<'k>; 2],
) {
    let (vector, ahead) = (spec.vector, super::ahead(spec.vector));
    let (from, to) = (from.at(&[image]), to.at(&[image]));
    // Distances from the first element of a channel, in bytes.
    let far = |axis: usize, position: Val<'k, u32>| from.distance(axis + 1, axes[axis].all::<T>(position)[0].index);
    let lanes = (0..vector).map(|lane| number * vector + lane);
    let places: Vec<Val<'k, u64>> = match plane {
        Some(plane) => {
            lanes.map(|place| (0..3).zip(plane.index(place)).map(|(axis, at)| far(axis, at)).fold(k.constant(0), |x, y| x + y)).collect()
        }
        None => {
            let row = far(0, depth) + far(1, height);
            lanes.map(|column| row + far(2, column)).collect()
        }
    };
    let some = |first: Val<'k, u32>, many: u32| {
        let of = |i: u32| -> Vec<AnyVal<'k>> {
            let source = from.at(&[channel + first + i]);
            places.iter().map(|&place| source.moved(place).first()).collect()
        };
        let loaded: Vec<Vec<AnyVal<'k>>> = (0..many).map(of).collect();
        for (i, loaded) in (0..).zip(loaded) {
            let values: Vec<AnyVal<'k>> = loaded.into_iter().map(|value| single::<T>(spec, k, value)).collect();
            to.at(&[channel + first + i]).line(&[depth, height], vector).store_values(number, &values);
        }
    };
    let whole = channels & !(ahead - 1);
    k.range_step(0, whole, ahead, |first| some(first, ahead));
    k.range_step(whole, channels, 1, |first| some(first, 1));
}

/// A row or a column that is read.
#[derive(Clone, Copy, Debug)]
struct Placed<'k, T> {
    distance: Val<'k, u64>,
    weight: Option<Val<'k, T>>,
    counts: Option<Val<'k, bool>>,
}

impl Spec {
    fn operands(&self) -> Vec<OperandDecl> {
        let [from, to] = self.types;
        match self.walk {
            Walk::Channels if self.vector > 1 => {
                vec![strided::lines_declaration(from, 4, self.vector, false), strided::lines_declaration(to, 4, self.vector, true)]
            }
            Walk::Channels => strided::declarations(&self.types, 5, 1),
            // What is read by single elements may have any strides.
            Walk::Outputs | Walk::Plane => vec![strided::declaration(from, 5, false), strided::lines_declaration(to, 4, self.vector, true)],
        }
    }
}

/// The parts of a kernel's name.
pub(super) fn words(along: [Along; 3]) -> String {
    along.map(Along::word).concat()
}
