//! From problems to programs: every algorithm and its kernels.
//!
//! An [`engine::Engine`] takes a problem or says why not; what it takes becomes a program of verified kernels with extents as arguments.
//! Engines know no device: [`arch::Arch`] is data.
#![forbid(unsafe_code)]

pub mod algorithm;
pub mod arch;
pub mod conv;
pub mod cost;
pub mod engine;
pub mod fuse;
pub mod gemm;
mod hopper;
pub mod interpret;
pub mod layout;
pub mod map;
pub mod pool;
pub mod reduce;
pub mod rewrite;
pub mod softmax;
mod split_k;
mod store;
mod sums;

use std::collections::HashSet;

use verdigris_kir::ir::Target;
use verdigris_kir::program::KernelRef;

use engine::Engine;

/// A hash, as 64 hexadecimal digits, of what shapes a kernel's text in the sources of this crate and of the kernel language: part of the key of every
/// compiled kernel. Comments, tests, the interpreter and the verifier do not count.
pub const SOURCE_HASH: &str = env!("VERDIGRIS_SOURCE_HASH");

/// Every engine of every family.
pub fn engines() -> impl Iterator<Item = &'static dyn Engine> {
    [gemm::ENGINES, map::ENGINES, reduce::ENGINES, softmax::ENGINES, pool::ENGINES, rewrite::ENGINES, conv::ENGINES]
        .into_iter()
        .flatten()
        .copied()
}

/// The engine of that name.
pub fn engine(name: &str) -> Option<&'static dyn Engine> {
    engines().find(|engine| engine.id().name == name)
}

/// Every kernel that chips of `target` may be asked to run, once each; fused chains, which only a user's graph makes, apart.
pub fn catalog(target: Target) -> Vec<KernelRef> {
    // Families share kernels, such as those that repack operands.
    let mut seen = HashSet::new();
    engines().flat_map(|engine| engine.catalog(target)).filter(|kernel| seen.insert(kernel.name().to_owned())).collect()
}

#[cfg(test)]
#[path = "../build/essence.rs"]
mod essence;

#[cfg(test)]
mod tests {
    use super::*;
    use engine::EngineId;

    #[test]
    fn names_and_numbers_are_given_once() {
        let ids: Vec<EngineId> = engines().map(Engine::id).collect();
        assert_eq!(ids.iter().map(|id| id.name).collect::<HashSet<_>>().len(), ids.len());
        assert_eq!(ids.iter().map(|id| id.number).collect::<HashSet<_>>().len(), ids.len());
    }

    #[test]
    fn the_catalog_of_each_engine_is_short_and_names_each_kernel_once() {
        // An engine is a family of kernels: one algorithm, whatever it shares with others of its kind.
        for target in [Target::Sm80, Target::Sm89, Target::Sm90, Target::Sm90a] {
            for engine in engines() {
                let name = engine.id().name;
                let names: Vec<String> = engine.catalog(target).into_iter().map(|kernel| kernel.name().to_owned()).collect();
                assert!(names.len() <= 300, "{name} has {} specs on {target:?}", names.len());
                assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{name}");
            }
        }
    }
}
