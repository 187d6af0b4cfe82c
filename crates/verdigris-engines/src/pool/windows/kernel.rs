//! The kernel: a thread for each window.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::params::Divide;

use super::super::axis::{elements_along, share_of};
use super::super::tensor::TensorArgs;
use super::{Kind, Spec, THREADS};
use crate::fuse::compute::{self, Compute};
use crate::fuse::value::{AnyVal, store_values};
use crate::layout::space::Access;

verdigris_kir::parameters! {
    /// Of every kernel here.
    pub(super) struct Windows / WindowsArgs of Spec as spec {
        pub(super) windows: u32,
        pub(super) channels: Divide,
        /// Windows of a column and of a row of a plane.
        pub(super) high: Divide,
        pub(super) wide: Divide,
        /// Rows and columns of `x`.
        pub(super) extents: [u32; 2],
        pub(super) taps: [u32; 2],
        pub(super) strides: [u32; 2],
        pub(super) pads: [u32; 2],
        /// Of windows that have all of their taps: what their sums are multiplied with.
        pub(super) share: Option<f32> = (spec.kind == Kind::Average { padded: true }).then_some(()),
        pub(super) x: TensorArgs = Access { written: false, bytes: spec.dtype.bytes() as u32 },
        pub(super) y: TensorArgs = Access { written: true, bytes: spec.dtype.bytes() as u32 },
    }
}

/// An element of a window along a dim.
struct Tap<'k> {
    /// Where it is; of one that is not there, where another element is.
    at: Val<'k, u32>,
    counts: Val<'k, bool>,
}

/// The kernel that a spec says.
pub(super) fn build<'k>(spec: &Spec, k: Kernel<'k>) {
    let Windows { windows, channels, high, wide, extents, taps, strides, pads, share, x, y } = Windows::declare(k, spec);
    let number = k.cta() * THREADS + k.thread();
    k.when(number.lt(windows), || {
        let (rest, column) = wide.split(number);
        let (plane, row) = high.split(rest);
        let (image, channel) = channels.split(plane);
        let [rows, columns] = [(0, row), (1, column)].map(|(axis, window)| {
            let first = window * strides[axis] - pads[axis];
            let tap = |i: u32| {
                // In front of the first element numbers are as large as they get.
                let at = first + i;
                Tap { at: at.min(extents[axis] - 1), counts: at.lt(extents[axis]) & taps[axis].gt(i) }
            };
            (0..spec.most_taps).map(tap).collect::<Vec<_>>()
        });
        let from = x.plane(image, channel);
        let loaded: Vec<(Val<'k, f32>, Val<'k, bool>)> = rows
            .iter()
            .flat_map(|row| columns.iter().map(move |column| (row, column)))
            .map(|(row, column)| (compute::load::<f32>(k, spec.dtype, x.element(from, row.at, column.at), 0), row.counts & column.counts))
            .collect();
        let value = match spec.kind {
            Kind::Max => {
                let least = k.constant(f32::NEG_INFINITY);
                loaded.into_iter().fold(least, |most, (value, counts)| f32::max_nan(most, k.select(counts, value, least)))
            }
            Kind::Average { .. } => {
                let sum = loaded.into_iter().fold(k.constant(0.0f32), |sum, (value, counts)| sum + k.select(counts, value, 0.0f32));
                sum * share.unwrap_or_else(|| {
                    let along = |axis: usize, window| elements_along(window, [taps[axis], strides[axis]], pads[axis], extents[axis]);
                    share_of(k, along(0, row) * along(1, column))
                })
            }
        };
        store_values(k, spec.dtype, y.element(y.plane(image, channel), row, column), &[AnyVal::of(value)]);
    });
}
