//! Hopper's main loop and what it stands on: TMA brings tiles of both operands into the stages of a ring, warpgroups multiply out of them by
//! `wgmma`, and sums stay in registers until a tile's depth is done.
//!
//! A kernel declares its [`stages::Stages`], runs [`roles::start`] and the roles of [`roles::run`]: a warp that loads, through a source of
//! its own or through [`tiled`] or [`aligning`], and consumers, each with a [`main_loop::MainLoop`]. What becomes of the sums is the kernel's.
//!
//! | module | holds |
//! |---|---|
//! | `spec` | what shapes a main loop: the tile and who shares it, operands, stages, registers |
//! | `grid` | the tiles of a problem laid over the chip, as schedules and as counts for the cost model |
//! | `stages` | the shared memory of both operands, and the descriptors by which it is read |
//! | `main_loop` | the steps of a tile: wait, multiply, release |
//! | `sums`, `in_flight`, `ping_pong` | accumulators and promotion; wgmma groups in flight; two consumers that alternate |
//! | `share` | which part of the work a CTA of a cluster takes |
//! | `roles` | the start of a kernel and its warps' roles |
//! | `tiled` | a source: matrices by tiled TMA |
//! | `aligning` | a source: matrices whose lines begin anywhere, moved into place on their way |
//! | `epilogue` | what specs say of the epilogue |
//!
//! Source: the shape of the main loop is that of CUTLASS's warp-specialized cooperative kernels and of fast.cu.

pub(crate) mod aligning;
pub(crate) mod epilogue;
pub(crate) mod grid;
pub(crate) mod in_flight;
pub(crate) mod main_loop;
pub(crate) mod ping_pong;
pub(crate) mod roles;
pub(crate) mod share;
pub(crate) mod spec;
pub(crate) mod stages;
pub(crate) mod sums;
pub(crate) mod tiled;

/// Threads of a warpgroup.
pub(crate) const WARPGROUP: u32 = 128;
/// The named barrier of the first consumer; the others' follow.
pub(crate) const FIRST_BARRIER: u32 = 1;
/// Dynamic shared memory of a CTA on compute capability 9.0.
pub(crate) const SHARED_BYTES: u32 = 232_448;
