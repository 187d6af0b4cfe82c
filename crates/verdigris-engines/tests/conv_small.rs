//! `conv.small_channels` and `conv.unfolded` on the cases that are made for few channels, interpreted and held against the reference.

mod conv_corpus;

use conv_corpus::cases_of;
use verdigris_engines::arch::Arch;
use verdigris_graph::{ConvExtents, ConvProblem, Direction, Problem};
use verdigris_tensor::DType;

#[test]
fn small_channels_under_its_configs() {
    cases_of("conv.small_channels", &["conv/small-channels"]);
}

#[test]
fn im2col_under_its_configs() {
    cases_of("conv.unfolded", &["conv/small-channels", "conv/few-outputs", "conv/patches"]);
}

/// What is copied beside a product begins while the launch in front of it ends where no element is read twice, as those of patches, and
/// waits elsewhere, where beginning early was measured to take longer.
#[test]
fn copies_begin_early_where_nothing_is_read_twice() {
    let engine = verdigris_engines::engine("conv.unfolded").expect("the engine is registered");
    let begins = |direction, filter: u64, stride: u64, beside: &str| {
        let extents = ConvExtents {
            direction,
            n: 8,
            c: 3,
            k: 64,
            groups: 1,
            input: [1, 32, 32],
            filter: [1, filter, filter],
            pads: [0; 3],
            strides: [1, stride, stride],
            dilations: [1; 3],
        };
        let problem = ConvProblem::packed(extents, DType::Bf16, DType::Bf16).expect("a valid problem");
        let candidate = engine.accept(&Problem::Conv(problem), &Arch::h200()).unwrap_or_else(|refusal| panic!("{refusal}"));
        let mut found = Vec::new();
        for knobs in candidate.knobs().configs() {
            let program = candidate.program(knobs).expect("a listed config has a program");
            found.extend(program.launches().filter(|launch| launch.kernel.name().contains(beside)).map(|launch| launch.overlap));
        }
        found.dedup();
        assert_eq!(found.len(), 1, "{direction:?} of {filter} by {stride}: launches of {beside} that do and do not");
        found[0]
    };
    for (direction, beside) in [(Direction::Fprop, "conv_unfold_b"), (Direction::Wgrad, "conv_unfold_b"), (Direction::Dgrad, "conv_fold_")]
    {
        assert!(begins(direction, 4, 4, beside), "{direction:?} of patches");
        assert!(!begins(direction, 5, 1, beside), "{direction:?} of taps that overlap");
        assert!(!begins(direction, 3, 2, beside), "{direction:?} of taps that overlap");
    }
}
