//! Constructs: what later families will need, said in the language today.
//!
//! Each probe is a small kernel that could not be written if a construct were missing: it is no engine and promises no speed, but it
//! must verify, assemble without spills or serialized `wgmma`, and compute the right thing on the interpreter. Sizes are fields of
//! each probe's spec, so that tests run small ones and the assembler judges full ones.

use verdigris_kir::ir::KernelBody;
use verdigris_kir::program::KernelRef;

pub mod attention_backward;
pub mod attention_forward;
pub mod cluster_norm;
pub mod dynamic_schedule;
pub mod grouped_product;
pub mod im2col_tile;
mod product;
pub mod recurrent_step;
pub mod stream_k;

pub use product::ProductTile;

/// What the assembler may do to a probe without failing it. Spills are allowed by the kernel itself, and none here does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowances {
    /// `wgmma` stages in the program text: pairs of `WARPGROUP.ARRIVE` and a wait. One stage holds many instructions; where the
    /// assembler serializes, each instruction becomes a stage of its own, and this number is exceeded.
    pub wgmma_stages: u32,
}

/// A kernel that shows that the language can say something.
#[derive(Clone, Debug)]
pub struct Probe {
    /// What it is a probe of; the kernel's own name says its size too.
    pub name: &'static str,
    /// Builds it at its full size.
    pub build: fn() -> KernelBody,
    /// What the assembler may do to it.
    pub allowances: Allowances,
    /// The constructs that it exercises.
    pub what_it_shows: &'static str,
}

impl Probe {
    /// The probe as a kernel of the catalog: under the name of its spec.
    pub fn kernel(&self) -> KernelRef {
        KernelRef::new((self.build)().name, self.build)
    }
}

/// All probes, at full size.
pub fn all() -> Vec<Probe> {
    vec![
        attention_forward::probe(),
        attention_backward::probe(),
        recurrent_step::probe(),
        im2col_tile::probe(),
        stream_k::probe(),
        dynamic_schedule::probe(),
        cluster_norm::probe(),
        grouped_product::probe(),
    ]
}
