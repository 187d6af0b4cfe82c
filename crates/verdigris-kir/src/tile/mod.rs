//! Tiles, rings, accumulators, schedules: the vocabulary of fast kernels, built from the [`face`](crate::face) alone.
//!
//! | module | gives |
//! |---|---|
//! | [`operand`] | swizzled shared tiles that TMA fills and `wgmma` reads: bytes, map declaration, loads, descriptors |
//! | [`clip`] | what is loaded of such a tile where the operand ends within |
//! | [`deep`] | several of them behind each other: operands deeper than 128 bytes |
//! | [`im2col`] | the tile of a convolution's matrix that TMA gathers |
//! | [`halo`] | a box of pixels with its halo, of which every tap of a filter reads a part |
//! | [`ring`] | a producer/consumer ring of such tiles with full and empty mbarriers |
//! | [`fragment`] | register tiles with their layout: accumulators, row reductions, packing for a following product |
//! | [`staging`] | the way of a register tile to global memory through swizzled shared memory and TMA |
//! | [`schedule`] | which tile and which part of its depth a CTA works on next |
//! | [`cluster`] | small messages among the CTAs of a cluster |
//! | [`dynamic`] | a schedule that hands out tiles on demand |
//! | [`grid_barrier`] | a barrier of all CTAs of a launch |
//! | [`reduce`] | sums and maxima over lanes, warps and the CTA |
//! | [`table`] | addresses and tensor maps by index, more than parameters hold |

pub mod clip;
pub mod cluster;
pub mod deep;
pub mod dynamic;
pub mod fragment;
pub mod grid_barrier;
pub mod halo;
pub mod im2col;
pub mod list;
pub mod operand;
pub mod reduce;
pub mod ring;
pub mod schedule;
pub mod staging;
pub mod table;
