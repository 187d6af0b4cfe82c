//! What a config costs: an algorithm says its [`Work`] in counts, and the model of the chip, and only that, makes microseconds of it.
//!
//! The estimate is analytic first (`analytic`): cycles of the pipes that a step of the main loop asks for, the steps of the busiest CTA, bytes
//! of device memory, launches. What that leaves out is learned (`residual`): the logarithm of measured over analytic time, as small networks
//! read it off the config's [`features`], in the mean. They were fitted to problems drawn at random, never to a list; `bench/model` has the tool, and
//! `bench/record/h200/README.md` says how far off the estimates are, by engine and by class. A kernel that the fit never saw has the analytic estimate and
//! what all kernels have in common, by the fit that its counts were set against (`h200_unseen.fit`).

pub(crate) mod analytic;
pub mod features;
mod residual;
mod work;

pub use work::{Join, Loop, Shape, Stream, Traffic, Work};

use serde::Serialize;

use crate::arch::Arch;

/// An estimate of time.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Cost {
    /// Microseconds on the device, launches included.
    pub us: f64,
    /// What most of the time is spent on, by the analytic part.
    pub bound: Bound,
}

/// What limits a config.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Tensor cores.
    Tensor,
    /// Fused multiply-adds of the ordinary cores.
    Fma,
    /// Instructions beside products: copies by threads, addresses.
    Issue,
    /// Shared memory.
    Shared,
    /// L2, of one SM or of all.
    L2,
    /// Device memory.
    Memory,
    /// Launches, the way to the first step, and steps that wait for each other.
    Latency,
    /// Launches beside the main one: copies, sums, reductions.
    Beside,
}

impl Bound {
    /// In words, for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Tensor => "tensor cores",
            Bound::Fma => "multiply-adds",
            Bound::Issue => "instructions",
            Bound::Shared => "shared memory",
            Bound::L2 => "L2",
            Bound::Memory => "device memory",
            Bound::Latency => "latency",
            Bound::Beside => "other launches",
        }
    }
}

/// Estimates the time of each of several works for one problem, in their order. The networks are asked about those alone that the analytic estimate
/// puts among the first `MOST` and within `NEAR` times the least; the others keep the analytic one, scaled so that they stay behind.
pub fn estimate(works: &[Work], arch: &Arch) -> Vec<Cost> {
    let parts: Vec<analytic::Parts> = works.iter().map(|work| analytic::Parts::of(work, arch)).collect();
    let mut order: Vec<f64> = parts.iter().map(analytic::Parts::us).collect();
    order.sort_by(f64::total_cmp);
    let least = order.first().copied().unwrap_or(0.0);
    let limit = order.get(MOST).map_or(f64::INFINITY, |us| *us).min(NEAR * least);
    let cost = |(work, parts): (&Work, &analytic::Parts)| {
        let us = parts.us();
        let factor = if us <= limit { residual::factor(work, parts, arch) } else { FAR };
        Cost { us: us * factor, bound: parts.bound() }
    };
    works.iter().zip(&parts).map(cost).collect()
}

/// So many configs of a problem are looked at closely.
const MOST: usize = 40;
/// Analytic estimates beyond this many times the least are not.
const NEAR: f64 = 4.0;
/// What the others are multiplied by.
const FAR: f64 = 2.0;

/// Estimates one work.
pub fn estimate_one(work: &Work, arch: &Arch) -> Cost {
    let parts = analytic::Parts::of(work, arch);
    Cost { us: parts.us() * residual::factor(work, &parts, arch), bound: parts.bound() }
}

/// What the fit reads of a config: its kernel, the analytic estimate in microseconds, and the features; nothing where there is no main loop.
pub fn sample(work: &Work, arch: &Arch) -> Option<(&'static str, f64, Vec<f32>)> {
    let parts = analytic::Parts::of(work, arch);
    Some((work.main.as_ref()?.kernel, parts.us(), features::of(work, &parts, arch)?.to_vec()))
}

/// The order of main loops by the analytic part alone, in picoseconds: for algorithms that list the best few of very many boxes.
pub(crate) fn order(main: &Loop, arch: &Arch) -> u64 {
    (analytic::Parts::of(&Work::of(*main), arch).us() * 1e6) as u64
}

/// Cycles of an SM's tensor cores for a step of `wgmma`: 128 bytes of depth of a tile, whatever the type; or those of the shared memory that feeds
/// them.
pub(crate) fn wgmma_cycles(tile_m: f64, tile_n: f64) -> f64 {
    4.0 * (tile_m / 64.0) * (tile_n / 2.0).max(16.0 + tile_n / 4.0)
}
