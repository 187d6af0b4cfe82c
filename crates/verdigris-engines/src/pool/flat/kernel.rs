//! The kernels: a thread for each vector of `dx`.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::params::Divide;

use super::super::axis::share_of;
use super::{Spec, THREADS, VECTOR_BYTES};
use crate::fuse::compute;
use crate::fuse::value::{AnyVal, store_values};
use crate::layout::space::{Access, Memory};

verdigris_kir::parameters! {
    /// Of every kernel here.
    pub(super) struct Flat / FlatArgs of Spec as spec {
        pub(super) vectors: u32,
        pub(super) vectors_of_image: Divide,
        pub(super) channels: u32,
        /// Elements of a plane.
        pub(super) area: Divide,
        pub(super) dy: Memory = Access { written: false, bytes: spec.dtype.bytes() as u32 },
        /// From one image, and one channel, to the next.
        pub(super) dy_strides_bytes: [u64; 2],
        pub(super) dx: Memory = Access { written: true, bytes: VECTOR_BYTES },
        pub(super) dx_image_bytes: u64,
        pub(super) windows: Option<WindowsArgs> = spec.has_windows.then_some(()),
    }
}

verdigris_kir::parameters! {
    /// Windows side by side in both dims of a plane.
    #[derive(Clone, Copy)]
    pub(super) struct Windows / WindowsArgs of () as _spec {
        /// Columns of `dx`.
        pub(super) width: Divide,
        /// From a row of windows, and a column of them, to the next; how many elements of these a window has.
        pub(super) strides: [Divide; 2],
        pub(super) taps: [u32; 2],
        /// Rows and columns of `dy`, and from a row, and a column, to the next.
        pub(super) out: [u32; 2],
        pub(super) steps_bytes: [u32; 2],
    }
}

/// A row of `dx`, and what it gets.
#[derive(Clone, Copy)]
struct Row<'k> {
    /// Of `dy`: the row of windows that it is in, or some other where it is in none.
    from: Val<'k, u64>,
    is_in: Val<'k, bool>,
}

/// The kernel's body.
pub(super) fn spread<'k>(k: Kernel<'k>, spec: Spec) {
    let Flat { vectors, vectors_of_image, channels, area, dy, dy_strides_bytes, dx, dx_image_bytes, windows } = Flat::declare(k, &spec);
    let [dy_image_bytes, dy_channel_bytes] = dy_strides_bytes;
    let number = k.cta() * THREADS + k.thread();
    k.when(number.lt(vectors), || {
        let (image, number) = vectors_of_image.split(number);
        let dy = dy.address() + image.widen() * dy_image_bytes;
        // A plane has as many elements as a vector at least: one ends in it at most.
        let (channel, place) = area.split(number * spec.vector());
        let planes = [channel, (channel + 1).min(channels - 1)].map(|channel| dy + channel.widen() * dy_channel_bytes);
        let load = |address: Val<'k, u64>| compute::load::<f32>(k, spec.dtype, address, 0);
        let values: Vec<Val<'k, f32>> = match windows {
            None => {
                let share = share_of(k, area.value());
                let [own, next] = planes.map(|plane| load(plane) * share);
                (0..spec.vector()).map(|i| k.select((place + i).lt(area.value()), own, next)).collect()
            }
            Some(windows) => {
                let share = share_of(k, windows.taps[0] * windows.taps[1]);
                let (row, column) = windows.width.split(place);
                // A row has as many elements as a vector less one at least: one ends in it at most.
                let is_last = ((row + 1) * windows.width.value()).ge(area.value());
                let own = windows.row(planes[0], row);
                let next = windows.row(k.select(is_last, planes[1], planes[0]), k.select(is_last, 0, row + 1));
                let value = |i: u32| {
                    let beyond = (column + i).ge(windows.width.value());
                    let column = column + i - k.select(beyond, windows.width.value(), 0);
                    let (window, tap) = windows.strides[1].split(column);
                    let is_in = (beyond & next.is_in) | (!beyond & own.is_in);
                    let is_in = is_in & tap.lt(windows.taps[1]) & window.lt(windows.out[1]);
                    let from = k.select(beyond, next.from, own.from) + window.mul_wide(windows.steps_bytes[1]);
                    let value = k.var(k.constant(0.0f32));
                    k.when(is_in, || value.set(load(from) * share));
                    value.get()
                };
                (0..spec.vector()).map(value).collect()
            }
        };
        let values: Vec<AnyVal<'_>> = values.into_iter().map(AnyVal::of).collect();
        store_values(k, spec.dtype, dx.moved(image.widen() * dx_image_bytes).at(number, VECTOR_BYTES), &values);
    });
}

impl<'k> Windows<'k> {
    fn row(&self, plane: Val<'k, u64>, row: Val<'k, u32>) -> Row<'k> {
        let (window, tap) = self.strides[0].split(row);
        Row { from: plane + window.mul_wide(self.steps_bytes[0]), is_in: tap.lt(self.taps[0]) & window.lt(self.out[0]) }
    }
}
