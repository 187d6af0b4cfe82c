//! From problems to programs: every algorithm and its kernels.
//!
//! An [`engine::Engine`] takes a problem or says why not; what it takes becomes a program of verified kernels with extents as arguments.
//! Engines know no device: [`arch::Arch`] is data.
#![forbid(unsafe_code)]

pub mod algorithm;
pub mod arch;
pub mod attention;
pub mod batch_norm;
pub mod conv;
pub mod cost;
pub mod engine;
pub mod fuse;
pub mod gemm;
mod hopper;
pub mod interpret;
pub mod layout;
pub mod map;
pub mod norm;
pub mod pool;
pub mod reduce;
pub mod resample;
pub mod rewrite;
pub mod scan;
pub mod softmax;
mod split_k;
mod store;
mod sums;
mod terms;

use std::collections::HashSet;

use verdigris_kir::ir::Target;
use verdigris_kir::program::KernelRef;

use engine::{Engine, EngineId};

/// A hash, as 64 hexadecimal digits, of what shapes a kernel's text in the sources of this crate and of the kernel language: part of the key of every
/// compiled kernel. Comments, tests, the interpreter and the verifier do not count.
pub const SOURCE_HASH: &str = env!("VERDIGRIS_SOURCE_HASH");

/// Every engine of every family.
pub fn engines() -> impl Iterator<Item = &'static dyn Engine> {
    [
        gemm::ENGINES,
        map::ENGINES,
        reduce::ENGINES,
        scan::ENGINES,
        softmax::ENGINES,
        pool::ENGINES,
        norm::ENGINES,
        batch_norm::ENGINES,
        attention::ENGINES,
        resample::ENGINES,
        rewrite::ENGINES,
        conv::ENGINES,
    ]
    .into_iter()
    .flatten()
    .copied()
}

/// Names of earlier versions' engines, which plan caches, records and pins speak for ever; each stands for what it was within an engine of
/// today, and gives configs under today's names.
pub fn aliases() -> impl Iterator<Item = (EngineId, &'static dyn Engine)> {
    conv::ALIASES.iter().copied()
}

/// The engine of that name, or what had the name in an earlier version.
pub fn engine(name: &str) -> Option<&'static dyn Engine> {
    let named = engines().map(|engine| (engine.id(), engine)).chain(aliases()).find(|(id, _)| id.name == name);
    named.map(|(_, engine)| engine)
}

/// Whom to ask where a caller may have named one: that engine, or all.
pub fn asked(name: Option<&str>) -> Vec<&'static dyn Engine> {
    name.map_or_else(|| engines().collect(), |name| engine(name).into_iter().collect())
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
    use engine::{Knobs, Reason};

    #[test]
    fn names_and_numbers_are_given_once() {
        let ids: Vec<EngineId> = engines().map(Engine::id).chain(aliases().map(|(id, _)| id)).collect();
        assert_eq!(ids.iter().map(|id| id.name).collect::<HashSet<_>>().len(), ids.len());
        assert_eq!(ids.iter().map(|id| id.number).collect::<HashSet<_>>().len(), ids.len());
    }

    fn asked_of(engine: &str, words: &str) -> Result<Box<dyn engine::Candidate>, engine::Refusal> {
        let problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
        super::engine(engine).unwrap_or_else(|| panic!("no {engine}")).accept(&problem, &arch::Arch::h200())
    }

    #[test]
    fn convolutions_have_nine_engines_and_earlier_names_stand_for_parts_of_them() {
        let names: Vec<&str> = conv::ENGINES.iter().map(|engine| engine.id().name).collect();
        assert_eq!(
            names,
            [
                "conv.implicit_gemm",
                "conv.halo",
                "conv.small_channels",
                "conv.grouped",
                "conv.depthwise",
                "conv.depthwise_planes",
                "conv.patch",
                "conv.patch_gradient",
                "conv.direct"
            ]
        );
        // With the name that a config had, and has.
        let [wgrad, grouped] = [
            "conv wgrad bf16 nhwc n=64 c=512 h=28 w=28 k=512 r=3 s=3 pad=1",
            "conv fprop bf16 nhwc n=64 c=256 h=28 w=28 k=256 r=3 s=3 groups=32 pad=1",
        ];
        let knobs = [("axis", 1), ("deep", 4), ("high", 7), ("order", 1), ("parts", 1), ("shape", 5), ("wide", 8)];
        let known = [
            ("conv.halo_wgrad", 209, "conv.halo", wgrad, Knobs::new(knobs), Knobs::new(knobs)),
            ("conv.diagonal", 211, "conv.grouped", grouped, Knobs::new([("tile", 1)]), Knobs::new([("box", 1)])),
        ];
        assert_eq!(aliases().map(|(id, _)| (id.name, id.number)).collect::<Vec<_>>(), known.each_ref().map(|row| (row.0, row.1)));
        for (alias, _, today, words, then, now) in known {
            let (part, whole) = (super::engine(alias).expect("an alias"), super::engine(today).expect("an engine"));
            assert_eq!((part.id(), asked(Some(alias)).len()), (whole.id(), 1));
            let kernels = |engine: &dyn Engine| -> HashSet<String> {
                engine.catalog(Target::Sm90a).iter().map(|kernel| kernel.name().to_owned()).collect()
            };
            assert!(!kernels(part).is_empty() && kernels(part).is_subset(&kernels(whole)), "{alias}");
            let [part, whole] = [alias, today].map(|name| asked_of(name, words).expect("it takes the problem"));
            for candidate in [&part, &whole] {
                assert_eq!((candidate.today(&then).as_ref(), candidate.today(&now).as_ref()), (Some(&now), Some(&now)), "{alias}");
                assert_eq!(candidate.work(&then), candidate.work(&now));
            }
            assert!(part.knobs().configs().iter().all(|knobs| whole.knobs().configs().contains(knobs)), "{alias}");
        }
    }

    #[test]
    fn an_engine_of_several_algorithms_says_why_each_that_may_refuses() {
        let refused = |engine: &str, words: &str| asked_of(engine, words).map(|_| ()).expect_err(words);
        for direction in ["fprop", "dgrad", "wgrad"] {
            let strided = refused("conv.halo", &format!("conv {direction} bf16 nhwc n=2 c=64 h=28 w=28 k=64 r=3 s=3 stride=2 pad=1"));
            assert_eq!((strided.reason, strided.seen.as_str()), (Reason::Extent, "strides [1, 2, 2]; takes 1"));
            let wide = refused("conv.grouped", &format!("conv {direction} bf16 nhwc n=2 c=144 h=28 w=28 k=144 r=3 s=3 groups=2 pad=1"));
            assert_eq!(wide.reason, Reason::Extent);
            assert!(
                wide.seen.contains("taken up to 64") && wide.seen.contains("; or extent: ") && wide.seen.contains("of 1, 2, 4 or 8"),
                "{wide}"
            );
            let wide = refused("conv.grouped", &format!("conv {direction} f32 nhwc n=2 c=64 h=28 w=28 k=64 r=3 s=3 groups=8 pad=1"));
            assert_eq!((wide.reason, wide.seen.contains("; or ")), (Reason::DType, false), "{wide}");
        }
        let fprop = refused("conv.halo_wgrad", "conv fprop bf16 nhwc n=2 c=64 h=28 w=28 k=64 r=3 s=3 pad=1");
        assert_eq!((fprop.reason, fprop.engine.name), (Reason::Direction, "conv.halo"));
    }

    #[test]
    fn the_catalog_of_each_engine_is_short_and_names_each_kernel_once() {
        // An engine is a family of kernels: one algorithm, whatever it shares with others of its kind.
        for target in [Target::Sm80, Target::Sm89, Target::Sm90, Target::Sm90a] {
            for engine in engines() {
                let name = engine.id().name;
                let names: Vec<String> = engine.catalog(target).into_iter().map(|kernel| kernel.name().to_owned()).collect();
                assert!(names.len() <= 520, "{name} has {} specs on {target:?}", names.len());
                assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{name}");
            }
        }
    }
}
