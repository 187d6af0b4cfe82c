//! Which engines take problems at the ends of what can be counted, and those with nothing to read.

mod conv_check;

use conv_check::{bf16, plane};
use verdigris_engines::arch::Arch;
use verdigris_engines::engines;
use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::pattern::partition;
use verdigris_graph::{
    Channels, ConvExtents, ConvProblem, Direction, GemmProblem, GraphBuilder, Matrix, PoolMode, PoolWindows, Problem, Scale, Slot,
    Statistics, Uid,
};
use verdigris_tensor::{DType, Layout};

/// The engines that take it on an H200, and the reasons of the others that take problems of its kind.
fn who_takes(problem: &Problem) -> (Vec<&'static str>, String) {
    let (mut taken, mut refused) = (Vec::new(), String::new());
    for engine in engines() {
        match engine.accept(problem, &Arch::h200()) {
            Ok(_) => taken.push(engine.id().name),
            Err(refusal) => refused += &format!("{refusal}\n"),
        }
    }
    (taken, refused)
}

#[test]
fn what_has_nothing_to_read_goes_where_nothing_is_read() {
    // Padding alone covers the filter: y is 0, and so is the filter's gradient.
    for direction in [Direction::Fprop, Direction::Wgrad] {
        let channels_last = plane(direction, [1, 64, 64], [0, 8], [3, 3], [2, 1]);
        let (taken, refused) = who_takes(&Problem::Conv(bf16(channels_last)));
        assert_eq!(taken, ["conv.direct"], "{refused}");
        assert_eq!(refused.matches("none may be empty").count(), 5, "{refused}");
        let grouped = ConvExtents { groups: 8, ..channels_last };
        assert_eq!(who_takes(&Problem::Conv(bf16(grouped))).0, ["conv.direct"]);
        let few_channels = ConvExtents { c: 3, ..channels_last };
        assert!(!who_takes(&Problem::Conv(bf16(few_channels))).0.contains(&"conv.small_channels"));
    }
    // With pixels they take them.
    let (taken, refused) = who_takes(&Problem::Conv(bf16(plane(Direction::Fprop, [1, 64, 64], [1, 8], [3, 3], [1, 1]))));
    assert!(taken.contains(&"conv.implicit_gemm") && taken.contains(&"conv.halo"), "{refused}");
}

#[test]
fn sums_over_more_pixels_than_are_counted_are_refused() {
    let sums = |slot| Channels { slot: Slot(slot), dtype: DType::F32, stride: 1 };
    let with_sums = |extents: ConvExtents| {
        let statistics = Some(Statistics { sum: sums(3), sum_of_squares: sums(4) });
        Problem::Conv(ConvProblem { statistics, ..bf16(extents) }.canonical().expect("a valid problem"))
    };
    for (groups, filter, pads) in [(1, [1, 1], [0, 0]), (4, [3, 3], [1, 1])] {
        let of = |images: u64| ConvExtents { groups, ..plane(Direction::Fprop, [images, 4, 4], [16384, 16400], filter, pads) };
        // 2^32 pixels and some, and 2^30.
        let (taken, refused) = who_takes(&with_sums(of(16)));
        assert!(taken.is_empty() && refused.contains("4299161600 pixels, taken below 2^31"), "{taken:?}\n{refused}");
        assert!(!who_takes(&with_sums(of(4))).0.is_empty());
        assert!(!who_takes(&Problem::Conv(bf16(of(16)))).0.is_empty());
    }
}

/// An eps that f32 has as 0 gives 0 · ∞ where all elements of a row or channel are equal.
#[test]
fn an_eps_that_f32_does_not_hold_is_refused_by_name() {
    let least = 2f64.powi(-149);
    // A half of the least is a tie, and goes to 0.
    for (eps, is_held) in [(0.0, true), (1e-50, false), (least / 2.0, false), (least, true), (1e-40, true), (1e-5, true), (1e39, true)] {
        let of = |words: &str| {
            who_takes(&words.replace("EPS", &format!("eps={eps:e}")).parse().unwrap_or_else(|error| panic!("{words}: {error}")))
        };
        for (words, takers) in [
            ("norm forward bf16 rows=4 elements=64 EPS x=packed y=packed", ["norm.rows", "norm.groups", "norm.strided"].as_slice()),
            ("norm forward f32 kind=rms rows=4 elements=64 EPS x=packed y=packed", &["norm.rows", "norm.strided"]),
            ("norm backward f32 rows=4 elements=64 EPS x=packed dy=packed dx=packed", &["norm.rows", "norm.groups", "norm.strided"]),
            ("batch_norm forward f32 rows=64 channels=8 EPS", &["batch_norm.channels"]),
        ] {
            let (taken, refused) = of(words);
            assert_eq!(taken, if is_held { takers } else { &[] }, "{words}, {eps:e}\n{refused}");
            let told = format!("an eps of {eps:e}, which is 0 in f32");
            assert_eq!(refused.matches(&told).count(), if is_held { 0 } else { takers.len() }, "{refused}");
        }
        // Computed in f64, which holds it.
        assert_eq!(of("norm forward f64 rows=4 elements=64 EPS compute=f64 x=packed y=packed").0, ["norm.rows", "norm.strided"]);
        assert_eq!(of("batch_norm forward f64 rows=64 channels=8 compute=f64 EPS").0, ["batch_norm.channels"]);
    }
}

fn pool(side: [u64; 2], dtype: DType, build: impl FnOnce(&mut GraphBuilder, Uid) -> Vec<(Uid, DType)>) -> Problem {
    let mut g = GraphBuilder::new("pool");
    let x = g.tensor("x", dtype, Layout::row_major(&[1, 1, side[0], side[1]]).expect("a layout"));
    for (number, (uid, dtype)) in build(&mut g, x).into_iter().enumerate() {
        g.store(uid, &format!("y{number}"), dtype).expect("a result");
    }
    let graph = g.finish().expect("a valid graph");
    partition(&graph).expect("parts").parts.into_iter().next().expect("a part").problem
}

fn windows(taps: u64, stride: u64) -> PoolWindows {
    let of = |value: u64| vec![value; 2];
    PoolWindows::Sliding { window: of(taps), strides: of(stride), dilations: of(1), pads_before: of(0), pads_after: of(0) }
}

#[test]
fn places_of_maxima_and_elements_of_means_are_counted_in_32_bits() {
    let with_index = |rows: u64| {
        pool([rows, 65536], DType::U8, |g, x| {
            let (y, index) = g.max_pool_with_index("pool", windows(2, 2), x, DType::I64).expect("windows");
            vec![(y, DType::U8), (index, DType::I64)]
        })
    };
    let (taken, refused) = who_takes(&with_index(65536));
    assert!(taken.is_empty() && refused.contains("planes of 4294967296 elements, taken below 2^31"), "{taken:?}\n{refused}");
    assert!(who_takes(&with_index(32766)).0.contains(&"pool.direct"));
    let mean = |taps: u64| {
        pool([65536, 65537], DType::Bf16, |g, x| {
            vec![(g.pool("pool", PoolMode::Average { count_include_pad: true }, windows(taps, 1), x).expect("windows"), DType::Bf16)]
        })
    };
    for (taps, is_taken) in [(65536, false), (46341, false), (46340, true)] {
        let (taken, refused) = who_takes(&mean(taps));
        assert_eq!(taken.contains(&"pool.direct"), is_taken, "{taps}: {refused}");
        assert_eq!(refused.contains("means of windows of"), !is_taken, "{refused}");
    }
}

#[test]
fn factors_of_blocks_belong_to_rows_of_one_launch() {
    let product = |m: u64| {
        let mut gemm = GemmProblem::packed(m, 32, 16, DType::E4m3, DType::Bf16).expect("a valid product");
        gemm.precision = Precision::Ieee;
        let factors = Matrix { slot: Slot(5), dtype: DType::F32, row_stride: 1, column_stride: 1, ..gemm.a.clone() };
        gemm.scale_a = Some(Scale::Block { outer: 128, k: 16, factors });
        Problem::Gemm(gemm.canonical().expect("a valid product"))
    };
    let (taken, refused) = who_takes(&product(1 << 31));
    assert!(!taken.contains(&"gemm.simt"), "{refused}");
    let accepted = |m: u64| {
        let candidate = verdigris_engines::engine("gemm.simt").expect("registered").accept(&product(m), &Arch::h200()).expect("taken");
        let launches = |knobs| candidate.program(knobs).expect("a program").launches().count();
        candidate.knobs().configs().iter().map(launches).collect::<Vec<_>>()
    };
    // Every tile, and only those whose rows one launch has.
    let (all, large) = (accepted(600), accepted(600_000_000));
    assert!(all.iter().chain(&large).all(|&launches| launches == 1), "{all:?} {large:?}");
    assert!(large.len() < all.len(), "{all:?} {large:?}");
}
