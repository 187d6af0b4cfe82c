//! A tensor for kernels that walk its planes.

use verdigris_kir::face::Val;

use crate::layout::space::{Access, Memory};

verdigris_kir::parameters! {
    /// A tensor, and how far its images, channels (or vectors of them), rows and columns are from each other.
    #[derive(Clone, Copy)]
    pub(super) struct Tensor / TensorArgs of Access as access {
        pub(super) memory: Memory = *access,
        pub(super) image_bytes: u64,
        pub(super) channel_bytes: u64,
        pub(super) row_bytes: u32,
        pub(super) column_bytes: u32,
    }
}

impl<'k> Tensor<'k> {
    /// A channel's plane, or that of a vector of them.
    pub(super) fn plane(&self, image: Val<'k, u32>, channel: Val<'k, u32>) -> Val<'k, u64> {
        self.memory.moved(image.widen() * self.image_bytes + channel.widen() * self.channel_bytes).address()
    }

    pub(super) fn element(&self, plane: Val<'k, u64>, row: Val<'k, u32>, column: Val<'k, u32>) -> Val<'k, u64> {
        plane + row.mul_wide(self.row_bytes) + column.mul_wide(self.column_bytes)
    }
}
