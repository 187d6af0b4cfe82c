//! Kinds of data: which of them tell something of a problem, and which one a run takes.
//!
//! A case that says nothing of its data is right for all kinds, so each run draws one: from the seed, and so that two runs of a case differ. A
//! case that names its kind was made for it, and keeps it. Beside what is drawn there are kinds that *matter* to a family, because
//! mistakes are known that only they show; they are run once at least for every class of kernels.
//!
//! Some kinds hide some mistakes: where all elements are alike or nearly so, none is told from its neighbour; where what is not finite makes up most of
//! a sum, an element more or less is not seen. The two kinds that the runs of a case take are never such that both hide the same, which is what
//! the order of the lists below is for.

use std::collections::BTreeSet;

use verdigris_graph::{Graph, Op, Precision, Problem};

use crate::data::Distribution;
use crate::ops::conv::spreads;

/// Sums of products. What is infinite or not a number stands at edges alone, or the whole result would be.
const OF_PRODUCTS: [Distribution; 9] = [
    Distribution::Normal,
    Distribution::Hundreds,
    Distribution::Denormals,
    Distribution::LargeMean,
    Distribution::Constant,
    Distribution::Limits,
    Distribution::SmallIntegers,
    Distribution::Edges,
    Distribution::Gaps,
];
/// Attention. Behind large means, and where what is not finite stands at edges, little of a result is judged, and of one with dropout nothing: these two are never taken
/// together.
const OF_ATTENTION: [Distribution; 9] = [
    Distribution::Normal,
    Distribution::Denormals,
    Distribution::Constant,
    Distribution::Edges,
    Distribution::LargeMean,
    Distribution::Limits,
    Distribution::Hundreds,
    Distribution::SmallIntegers,
    Distribution::Gaps,
];
/// Sums in f16 overflow with large terms, and convolutions may spread what is not finite: either way nothing would be judged.
const OF_NARROW_SUMS: [Distribution; 4] = [Distribution::Normal, Distribution::Gaps, Distribution::SmallIntegers, Distribution::Denormals];
const OF_SPREADING: [Distribution; 8] = [
    Distribution::Normal,
    Distribution::Hundreds,
    Distribution::Gaps,
    Distribution::LargeMean,
    Distribution::Limits,
    Distribution::Constant,
    Distribution::Denormals,
    Distribution::SmallIntegers,
];
/// Elements one by one, along rows or in windows.
const OF_ELEMENTS: [Distribution; 10] = [
    Distribution::Normal,
    Distribution::Hundreds,
    Distribution::SmallIntegers,
    Distribution::Denormals,
    Distribution::LargeMean,
    Distribution::Masked,
    Distribution::Edges,
    Distribution::Limits,
    Distribution::Constant,
    Distribution::Special,
];

/// Sums over channels: one element that is not finite would be their only result.
const OF_CHANNELS: [Distribution; 7] = [
    Distribution::Normal,
    Distribution::LargeMean,
    Distribution::Hundreds,
    Distribution::Gaps,
    Distribution::SmallIntegers,
    Distribution::Denormals,
    Distribution::Constant,
];

/// The kinds that tell something of a problem.
pub fn of_problem(problem: &Problem) -> &'static [Distribution] {
    match problem {
        Problem::Gemm(gemm) if gemm.precision == Precision::F16 => &OF_NARROW_SUMS,
        Problem::Gemm(_) | Problem::Conv(_) => &OF_PRODUCTS,
        Problem::Attention(_) => &OF_ATTENTION,
        Problem::BatchNorm(_) => &OF_CHANNELS,
        _ => &OF_ELEMENTS,
    }
}

/// The kinds that tell something of a graph: of its op for which there are the fewest.
pub fn of_graph(graph: &Graph) -> &'static [Distribution] {
    let of_op = |op: &Op| -> &'static [Distribution] {
        match op {
            Op::Matmul(matmul) if matmul.precision == Precision::F16 => &OF_NARROW_SUMS,
            Op::Conv(conv) if conv.precision == Precision::F16 => &OF_NARROW_SUMS,
            Op::Conv(conv) if spreads(conv) => &OF_SPREADING,
            Op::Matmul(_) | Op::Conv(_) => &OF_PRODUCTS,
            Op::Attention(_) | Op::AttentionBackward(_) => &OF_ATTENTION,
            Op::BatchNorm(_) | Op::BatchNormBackward(_) | Op::BatchNormStatistics(_) => &OF_CHANNELS,
            _ => &OF_ELEMENTS,
        }
    };
    graph.nodes.iter().map(|node| of_op(&node.op)).min_by_key(|kinds| kinds.len()).unwrap_or(&OF_ELEMENTS)
}

/// The kinds that show mistakes which no other kind does: of each family of ops in the graph.
pub fn that_matter(graph: &Graph) -> BTreeSet<Distribution> {
    let of_op = |op: &Op| -> &'static [Distribution] {
        match op {
            // A row of nothing but −∞ has no greatest element; exponentials of differences that overflow if the wrong one is taken off.
            Op::Softmax(_) | Op::SoftmaxBackward(_) | Op::CrossEntropy(_) | Op::CrossEntropyBackward(_) => {
                &[Distribution::Masked, Distribution::Hundreds]
            }
            // A greatest element that is −∞ or not a number; several that are equal.
            Op::Pool(_) | Op::PoolBackward(_) | Op::Reduction(_) | Op::Scan(_) => {
                &[Distribution::Masked, Distribution::Special, Distribution::SmallIntegers]
            }
            // What a tap of weight 0 would bring.
            Op::Resample(_) | Op::ResampleBackward(_) => &[Distribution::Special, Distribution::SmallIntegers],
            // A variance by the difference of large numbers, rows without a deviation.
            Op::Normalize(_) | Op::NormalizeBackward(_) => &[Distribution::LargeMean, Distribution::Special, Distribution::Constant],
            // What lies beside a tile must not be multiplied, by 0 either.
            Op::Matmul(_) | Op::Conv(_) => &[Distribution::Edges, Distribution::Gaps, Distribution::LargeMean],
            // Exponentials that overflow if no maximum is taken off; what lies beside a tile; rows of equal scores; keys that nobody attends to and that hold what
            // is not finite.
            Op::Attention(_) | Op::AttentionBackward(_) => {
                &[Distribution::Hundreds, Distribution::Gaps, Distribution::Constant, Distribution::Edges]
            }
            // A variance as a difference of sums; channels that are not there.
            Op::BatchNorm(_) | Op::BatchNormBackward(_) | Op::BatchNormStatistics(_) => &[Distribution::LargeMean, Distribution::Gaps],
            _ => &[Distribution::Special, Distribution::Limits],
        }
    };
    let kinds = of_graph(graph);
    graph.nodes.iter().flat_map(|node| of_op(&node.op)).copied().filter(|kind| kinds.contains(kind)).collect()
}

/// The same of a problem that was cut from no graph.
pub fn that_matter_to_products(problem: &Problem) -> BTreeSet<Distribution> {
    let kinds = of_problem(problem);
    [Distribution::Edges, Distribution::Gaps, Distribution::LargeMean].into_iter().filter(|kind| kinds.contains(kind)).collect()
}

/// The kind of data that a run takes: `own`, if the case was made for one, else of those that tell something the one that `turn` counts to. Runs of
/// neighbouring numbers `nth` differ.
pub fn draw(own: Distribution, kinds: &[Distribution], turn: u64, nth: u64) -> Distribution {
    let count = kinds.len().max(1) as u64;
    if own != Distribution::Normal {
        return own;
    }
    let place = (turn % count + nth % 2 * (count / 2)) % count;
    kinds.get(place as usize).copied().unwrap_or(own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph_cases;

    /// Elements are alike, or as near to each other as what the result may be off by: which of them was taken is not seen.
    fn hides_order(kind: Distribution) -> bool {
        matches!(kind, Distribution::Constant | Distribution::LargeMean)
    }

    /// Sums are of what is not finite, or of a few large terms: an element more or less is not seen.
    fn hides_count(kind: Distribution) -> bool {
        matches!(kind, Distribution::Masked | Distribution::Special | Distribution::Edges | Distribution::Limits)
    }

    /// Of attention, next to nothing is judged.
    fn hides_all(kind: Distribution) -> bool {
        matches!(kind, Distribution::LargeMean | Distribution::Edges)
    }

    #[test]
    fn two_runs_of_a_case_differ_and_seeds_take_all_kinds() {
        for kinds in [&OF_PRODUCTS[..], &OF_ATTENTION, &OF_NARROW_SUMS, &OF_SPREADING, &OF_ELEMENTS, &OF_CHANNELS] {
            let drawn = |turn, nth| draw(Distribution::Normal, kinds, turn, nth);
            assert!((0..20).all(|turn| drawn(turn, 0) != drawn(turn, 1) && drawn(turn, 0) == drawn(turn, 2)));
            let all: BTreeSet<Distribution> = (0..kinds.len() as u64).map(|turn| drawn(turn, 0)).collect();
            assert_eq!(all.len(), kinds.len(), "each kind is listed once, and drawn");
        }
        for kinds in [&OF_PRODUCTS[..], &OF_ATTENTION, &OF_NARROW_SUMS, &OF_SPREADING, &OF_ELEMENTS, &OF_CHANNELS] {
            for turn in 0..kinds.len() as u64 {
                let both = [0, 1].map(|nth| draw(Distribution::Normal, kinds, turn, nth));
                assert!(!both.into_iter().all(hides_order) && !both.into_iter().all(hides_count), "{both:?} hide the same mistakes");
            }
        }
        for turn in 0..OF_ATTENTION.len() as u64 {
            let both = [0, 1].map(|nth| draw(Distribution::Normal, &OF_ATTENTION, turn, nth));
            assert!(!both.into_iter().all(hides_all), "nothing is judged of {both:?}");
        }
        assert_eq!(draw(Distribution::Zeros, &OF_ELEMENTS, 3, 1), Distribution::Zeros, "a case that was made for a kind keeps it");
    }

    #[test]
    fn something_matters_to_every_family() {
        for (family, text) in [
            ("softmax", "[[group]]\nid = \"x\"\ntypes = [\"f32\"]\nops = [\"softmax\"]\naxis = [1]\ndims = [[2, 3]]"),
            ("norm", "[[group]]\nid = \"x\"\ntypes = [\"f32\"]\npasses = [\"forward\"]\naxes = [[1]]\ndims = [[2, 3]]"),
            ("pool", "[[group]]\nid = \"x\"\ntypes = [\"f32\"]\nmodes = [\"max\"]\nshapes = [\"n1 c1 i4 w2\"]"),
            ("reduction", "[[group]]\nid = \"x\"\ntypes = [\"f32\"]\nf = [\"max\"]\naxes = [[1]]\ndims = [[2, 3]]"),
            ("scan", "[[group]]\nid = \"x\"\ntypes = [\"f32\"]\nf = [\"max\"]\naxis = [1]\ndims = [[2, 3]]"),
            ("conv", "[[group]]\nid = \"x\"\ntypes = [\"bf16\"]\nshapes = [\"n1 c4 i4x4 k4 f2x2\"]"),
            ("batch_norm", "[[group]]\nid = \"x\"\ntypes = [\"f32\"]\nops = [\"forward\"]\ndims = [[2, 3]]"),
            ("attention", "[[group]]\nid = \"x\"\ntypes = [\"f32\"]\nops = [\"forward\"]\nshapes = [\"q2 k3 d4\"]"),
            ("pointwise", "[[group]]\nid = \"x\"\ntypes = [\"f32\"]\nunary = [\"relu\"]\ndims = [[2, 3]]"),
        ] {
            for case in graph_cases::load(family, text).expect("a case") {
                let (all, matter) = (of_graph(&case.graph), that_matter(&case.graph));
                assert!(matter.len() >= 2 && matter.iter().all(|kind| all.contains(kind)), "{}: {matter:?}", case.id);
            }
        }
    }
}
