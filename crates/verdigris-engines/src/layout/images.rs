//! Tensors of images as kernels read them element by element: the address and five strides.

use verdigris_graph::Tensor;
use verdigris_kir::face::Val;
use verdigris_kir::params::Read;
use verdigris_kir::program::Address;

verdigris_kir::parameters! {
    /// A tensor's address, which is a multiple of so many bytes, and its strides in bytes.
    #[derive(Clone, Copy)]
    pub(crate) struct Strided / StridedArguments of u32 as alignment_bytes {
        pub(crate) pointer: Read = *alignment_bytes,
        /// Over images.
        pub(crate) first: u64,
        pub(crate) channel: u64,
        /// Over depth, height and width.
        pub(crate) spatial: [u64; 3],
    }
}

impl StridedArguments {
    pub(crate) fn of(tensor: &Tensor) -> StridedArguments {
        let [first, channel, spatial @ ..] = tensor.strides.map(|stride| stride * tensor.dtype.bytes() as u64);
        StridedArguments { pointer: Address::buffer(tensor.slot.0 as usize), first, channel, spatial }
    }
}

impl<'k> Strided<'k> {
    /// The distance of coordinates, which may lie outside, from the first pixel.
    #[track_caller]
    pub(crate) fn offset(&self, [d, h, w]: [Val<'k, i32>; 3]) -> Val<'k, u64> {
        let [depth, height, width] = self.spatial;
        d.widen().unsigned() * depth + h.widen().unsigned() * height + w.widen().unsigned() * width
    }
}
