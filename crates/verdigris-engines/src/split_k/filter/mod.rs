//! The second launch of a filter's gradient whose pixels were cut into parts: adds the parts of each element in an order that their number
//! fixes, and applies the epilogue.
//!
//! There are five of them, because a part lies as the engine that made it left it, and how many elements there are decides who shares out
//! the parts:
//!
//! | kernel | sums | a part | the parts of an element are added by |
//! |---|---|---|---|
//! | `direct` | f32, f64, i32 | `[group][filter of the group][tap and channel, in either order]` | one thread |
//! | `depthwise` | f32 | `[block of taps, row and column in it][channel]` | eight warps, then the first |
//! | `grouped` | f32 | `[filter][tap][channel]` | as many warps, up to eight, as fill the chip |
//! | `small_channels` | f32 | tiles of 64 filters by the columns of a K-tile | eight warps, then the first |
//! | `im2col` | f32 | a matrix of any five strides, in rows of whole 16 bytes | one thread, or eight |
//!
//! Beside them, [`terms`] adds up products of terms.

pub(crate) mod depthwise;
pub(crate) mod direct;
pub(crate) mod grouped;
pub(crate) mod im2col;
pub(crate) mod small_channels;
pub(crate) mod terms;
