//! Problems drawn at random: what `bench choice` measures the choice at once on.
//!
//! Problem `i` of a kind depends on the seed, the kind and `i` alone, and on no platform's arithmetic: a larger run has the smaller one's problems.
//! None is read from a list. "Log-uniform" means an octave with equal chances, and any whole number of it with equal chances.
//!
//! Both kinds:
//!
//! | what | how |
//! |---|---|
//! | type | bf16 6/16, f16 2/16, tf32, f32, fp8 (e4m3, result bf16) and int8 (result i32) 2/16 each |
//! | size | work at most 2·10¹² operations, operands and result together at most 2 GiB; what is larger is drawn again |
//! | epilogue | none 7/10, bias 1/10, bias and ReLU 1/10, residual 1/10; none for int8, whose sums stay exact, nor for dgrad and wgrad |
//!
//! Products:
//!
//! | what | how |
//! |---|---|
//! | m, n, k | each log-uniform below 2¹⁴ |
//! | alignment | n and k, and m in half of these, rounded up to multiples of 64 in one third and of 8 in one third; one of n and k odd in the last third |
//! | batch | 1 in three quarters, else log-uniform from 2 to 127 |
//! | order | A and B each row-major or column-major, evenly |
//!
//! Convolutions:
//!
//! | what | how |
//! |---|---|
//! | direction | fprop, dgrad, wgrad evenly |
//! | rank | 2-D 15/20, 3-D 3/20, 1-D 2/20 |
//! | images | log-uniform below 2⁸ |
//! | extents | log-uniform: 2-D from 4 to 255 (square in three quarters), 3-D from 4 to 63, 1-D from 16 to 16,383 |
//! | filter | 1 6/20, 3 8/20, 5 2/20, 7 2/20, in 2/20 one of these for each dim on its own |
//! | stride | 2 in a quarter, else 1 |
//! | dilation | 2 in a tenth of the filters that are larger than 1 |
//! | padding | that which keeps the extents in three quarters, else none |
//! | groups | dense 12/16, 2 to 32 groups 2/16, depthwise 2/16 (of these, two filters a channel in a quarter) |
//! | channels | log-uniform below 2¹¹ (in all groups' sum; of a group below 2⁷ where there are several), rounded up to multiples of 64 in one third and of 8 in one third; c or k odd in the last third |
//! | layout | channels last 17/20, else channels first |

use anyhow::Result;
use serde_json::{Value, json};
use verdigris_graph::{
    BinaryOp, ConvExtents, ConvProblem, Direction, EpilogueStep, GemmProblem, Matrix, Order, Problem, Slot, Tensor, UnaryOp,
};
use verdigris_reference::bench_list::DTypeClass;
use verdigris_reference::data::Random;
use verdigris_tensor::DType;

use verdigris_cli::selection::as_planned;

/// Most operations of a problem.
pub(super) const MOST_FLOPS: f64 = 2e12;
/// Most bytes of its operands and its result.
pub(super) const MOST_BYTES: u64 = 2 << 30;

/// What is drawn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Kind {
    Product,
    Convolution,
}

impl Kind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Kind::Product => "product",
            Kind::Convolution => "convolution",
        }
    }
}

/// A problem of a seed.
#[derive(Clone, Debug)]
pub(super) struct Drawn {
    pub(super) kind: Kind,
    pub(super) number: u64,
    pub(super) dtype: DTypeClass,
    /// In words, for tables.
    pub(super) words: String,
    /// In numbers, for records.
    pub(super) shape: Value,
    /// As a graph of it alone is planned: a pointwise convolution is a product.
    pub(super) problem: Problem,
    pub(super) flops: f64,
    pub(super) bytes: u64,
}

/// The stream that a problem, or what is done with it, is drawn from.
pub(super) fn stream(seed: u64, kind: Kind, number: u64, what: &str) -> Random {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("choice {seed} {} {number} {what}", kind.name()).as_bytes());
    let mut bits = [0; 8];
    bits.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    Random::new(u64::from_le_bytes(bits))
}

/// Problem `number` of a kind.
pub(super) fn draw(seed: u64, kind: Kind, number: u64) -> Drawn {
    let mut random = stream(seed, kind, number, "problem");
    let dtype = match random.below(16) {
        0..6 => DTypeClass::Bf16,
        6..8 => DTypeClass::F16,
        8..10 => DTypeClass::Tf32,
        10..12 => DTypeClass::F32,
        12..14 => DTypeClass::Fp8,
        _ => DTypeClass::Int8,
    };
    let direction = Direction::ALL[random.below(3) as usize];
    loop {
        let attempt = match kind {
            Kind::Product => product(&mut random, dtype),
            Kind::Convolution => convolution(&mut random, dtype, direction),
        };
        let Ok((words, shape, problem, flops)) = attempt else { continue };
        let Some(bytes) = bytes_of(&problem).filter(|bytes| *bytes <= MOST_BYTES) else { continue };
        if flops > 0.0 && flops <= MOST_FLOPS {
            return Drawn { kind, number, dtype, words, shape, problem, flops, bytes };
        }
    }
}

/// From the first element of each operand to its last, together.
fn bytes_of(problem: &Problem) -> Option<u64> {
    let total: u128 = problem.buffers().ok()?.iter().map(verdigris_graph::Operand::span_bytes).sum();
    u64::try_from(total).ok()
}

/// From 2^`first` to below 2^`last`.
fn octaves(random: &mut Random, first: u64, last: u64) -> u64 {
    let low = 1 << (first + random.below(last - first));
    low + random.below(low)
}

/// Whether an event of `part` in `whole` chances comes about.
fn chance(random: &mut Random, part: u64, whole: u64) -> bool {
    random.below(whole) < part
}

/// How extents are aligned: to multiples of the first, or with one of them odd.
fn alignment(random: &mut Random) -> u64 {
    [64, 8, 1][random.below(3) as usize]
}

/// Which steps stand behind the sum.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Behind {
    Nothing,
    Bias,
    BiasRelu,
    Residual,
}

impl Behind {
    fn draw(random: &mut Random, dtype: DTypeClass) -> Behind {
        let drawn = match random.below(10) {
            0 => Behind::Bias,
            1 => Behind::BiasRelu,
            2 => Behind::Residual,
            _ => Behind::Nothing,
        };
        if dtype == DTypeClass::Int8 { Behind::Nothing } else { drawn }
    }

    const fn words(self) -> &'static str {
        match self {
            Behind::Nothing => "",
            Behind::Bias => " +bias",
            Behind::BiasRelu => " +bias +relu",
            Behind::Residual => " +residual",
        }
    }

    fn steps<P>(self, bias: P, residual: P) -> Vec<EpilogueStep<P>> {
        let add = |operand| EpilogueStep::Binary { f: BinaryOp::Add, operand, v_is_right: false };
        match self {
            Behind::Nothing => Vec::new(),
            Behind::Bias => vec![add(bias)],
            Behind::BiasRelu => vec![add(bias), EpilogueStep::Unary(UnaryOp::Relu)],
            Behind::Residual => vec![add(residual)],
        }
    }
}

type Attempt = Result<(String, Value, Problem, f64)>;

fn product(random: &mut Random, dtype: DTypeClass) -> Attempt {
    let (operands, result, precision) = dtype.types();
    let [mut m, mut n, mut k] = [(); 3].map(|()| octaves(random, 0, 14));
    let aligned = alignment(random);
    let (with_m, odd_n) = (chance(random, 1, 2), chance(random, 1, 2));
    if aligned > 1 {
        (n, k) = (n.next_multiple_of(aligned), k.next_multiple_of(aligned));
        m = if with_m { m.next_multiple_of(aligned) } else { m };
    } else {
        (n, k) = if odd_n { (n | 1, k) } else { (n, k | 1) };
    }
    let batch = if chance(random, 1, 4) { octaves(random, 1, 7) } else { 1 };
    let [a_order, b_order] = [(); 2].map(|()| if chance(random, 1, 2) { Order::RowMajor } else { Order::ColumnMajor });
    let behind = Behind::draw(random, dtype);
    let matrix = |slot: u32, dtype: DType, order: Order, rows: u64, columns: u64| {
        let leading = if order == Order::RowMajor { columns } else { rows };
        Matrix { batch_strides: vec![rows * columns], ..Matrix::with_leading_dimension(Slot(slot), dtype, order, leading) }
    };
    let bias = Matrix { batch_strides: vec![0], row_stride: 0, ..Matrix::row_major(Slot(2), result, n) };
    let mut gemm = GemmProblem {
        batch: vec![batch],
        precision,
        a: matrix(0, operands, a_order, m, k),
        b: matrix(1, operands, b_order, k, n),
        epilogue: behind.steps(bias, matrix(2, result, Order::RowMajor, m, n)),
        d: matrix(3, result, Order::RowMajor, m, n),
        ..GemmProblem::packed(m, n, k, operands, result)?
    }
    .canonical()?;
    gemm.number_slots();
    let letter = |order| if order == Order::RowMajor { 'n' } else { 't' };
    let layout: String = [letter(a_order), letter(b_order)].into_iter().collect();
    let times = if batch > 1 { format!("{batch} of ") } else { String::new() };
    let words = format!("{} {times}{m}x{n}x{k} {layout}{}", dtype.name(), behind.words());
    let shape = json!({ "batch": batch, "m": m, "n": n, "k": k, "layout": layout, "epilogue": behind.words().trim() });
    let flops = gemm.flops();
    Ok((words, shape, Problem::Gemm(gemm), flops))
}

fn convolution(random: &mut Random, dtype: DTypeClass, direction: Direction) -> Attempt {
    let (operands, result, precision) = dtype.types();
    let rank = match random.below(20) {
        0..15 => 2,
        15..18 => 3,
        _ => 1,
    };
    let n = octaves(random, 0, 8);
    let (first, last) = [(4, 14), (2, 8), (2, 6)][rank - 1];
    let mut input = [1; 3];
    let square = chance(random, 3, 4);
    for dim in 3 - rank..3 {
        input[dim] = if rank == 2 && square && dim == 2 { input[1] } else { octaves(random, first, last) };
    }
    let any_filter = |random: &mut Random| [1, 3, 5, 7][random.below(4) as usize];
    let one_filter = match random.below(20) {
        0..6 => Some(1),
        6..14 => Some(3),
        14..16 => Some(5),
        16..18 => Some(7),
        _ => None,
    };
    let (stride, wide, same) = (if chance(random, 1, 4) { 2 } else { 1 }, chance(random, 1, 10), chance(random, 3, 4));
    let (mut filter, mut pads, mut strides, mut dilations) = ([1; 3], [0; 3], [1; 3], [1; 3]);
    for dim in 3 - rank..3 {
        filter[dim] = one_filter.unwrap_or_else(|| any_filter(random));
        strides[dim] = stride;
        dilations[dim] = if wide && filter[dim] > 1 { 2 } else { 1 };
        pads[dim] = if same { dilations[dim] * (filter[dim] - 1) / 2 } else { 0 };
    }
    let grouping = random.below(16);
    let aligned = alignment(random);
    let odd_c = chance(random, 1, 2);
    let round = |value: u64, is_odd: bool| if aligned > 1 { value.next_multiple_of(aligned) } else { value | u64::from(is_odd) };
    let (groups, c, k) = match grouping {
        0..12 => (1, round(octaves(random, 0, 11), odd_c), round(octaves(random, 0, 11), !odd_c)),
        12..14 => {
            let groups = 1 << (1 + random.below(5));
            let in_group = |random: &mut Random, is_odd| {
                let channels = octaves(random, 0, 7);
                if aligned > 1 { channels.next_multiple_of(8) } else { channels | u64::from(is_odd) }
            };
            (groups, groups * in_group(random, odd_c), groups * in_group(random, !odd_c))
        }
        _ => {
            let channels = round(octaves(random, 3, 11), true);
            (channels, channels, if chance(random, 1, 4) { 2 * channels } else { channels })
        }
    };
    let channels_last = chance(random, 17, 20);
    let drawn_behind = Behind::draw(random, dtype);
    let behind = if direction == Direction::Fprop { drawn_behind } else { Behind::Nothing };
    let extents = ConvExtents { direction, n, c, k, groups, input, filter, pads, strides, dilations };
    let mut conv = ConvProblem { precision, ..ConvProblem::packed(extents, operands, result)? };
    let place = |tensor: &Tensor, extents| {
        if channels_last {
            Tensor::channels_last(tensor.slot, tensor.dtype, extents)
        } else {
            Tensor::channels_first(tensor.slot, tensor.dtype, extents)
        }
    };
    conv.x = place(&conv.x, conv.x_extents());
    conv.w = place(&conv.w, conv.w_extents());
    conv.y = place(&conv.y, conv.y_extents());
    if behind != Behind::Nothing {
        let bias = Tensor { slot: Slot(2), dtype: result, strides: [0, 1, 0, 0, 0] };
        conv.epilogue = behind.steps(bias, Tensor { slot: Slot(2), ..conv.y.clone() });
        conv.y.slot = Slot(3);
    }
    let conv = conv.canonical()?;
    let flops = conv.flops();
    let of_rank = |list: [u64; 3]| list[3 - rank..].iter().map(u64::to_string).collect::<Vec<_>>().join("x");
    let layout = if channels_last { "channels-last" } else { "channels-first" };
    let words = format!(
        "{} {} {n}x{c}@{} {k}k{} s{stride} p{} d{} g{groups} {layout}{}",
        dtype.name(),
        direction.name(),
        of_rank(input),
        of_rank(filter),
        of_rank(pads),
        of_rank(dilations),
        behind.words()
    );
    let shape = json!({
        "direction": direction.name(), "rank": rank, "n": n, "c": c, "k": k, "groups": groups, "input": input, "filter": filter,
        "output": conv.output, "pads": pads, "strides": strides, "dilations": dilations, "layout": layout, "epilogue": behind.words().trim(),
    });
    Ok((words, shape, as_planned(&conv), flops))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn drawn(kind: Kind, count: u64) -> Vec<Drawn> {
        (0..count).map(|number| draw(7, kind, number)).collect()
    }

    fn part(list: &[Drawn], is_one: impl Fn(&Drawn) -> bool) -> f64 {
        list.iter().filter(|drawn| is_one(drawn)).count() as f64 / list.len() as f64
    }

    #[test]
    fn a_problem_depends_on_seed_kind_and_number_alone() {
        for kind in [Kind::Product, Kind::Convolution] {
            let (one, again) = (draw(3, kind, 11), draw(3, kind, 11));
            assert_eq!((&one.words, &one.problem), (&again.words, &again.problem));
            assert_ne!(one.words, draw(3, kind, 12).words);
            assert_ne!(one.words, draw(4, kind, 11).words);
        }
    }

    #[test]
    fn all_keep_to_the_bounds_and_are_canonical() {
        for drawn in drawn(Kind::Product, 600).into_iter().chain(drawn(Kind::Convolution, 600)) {
            assert!(drawn.flops > 0.0 && drawn.flops <= MOST_FLOPS && drawn.bytes <= MOST_BYTES, "{}", drawn.words);
            assert!(!drawn.problem.is_empty(), "{}", drawn.words);
            assert_eq!(drawn.problem.clone().canonical().as_ref(), Ok(&drawn.problem), "{}", drawn.words);
            let slots: Vec<u32> = drawn.problem.slots().iter().map(|slot| slot.0).collect();
            assert_eq!(slots, (0..slots.len() as u32).collect::<Vec<_>>(), "{}", drawn.words);
        }
    }

    #[test]
    fn shares_are_near_those_that_are_stated() {
        let near = |part: f64, stated: f64| (part - stated).abs() < 0.05;
        let products = drawn(Kind::Product, 2000);
        assert!(near(part(&products, |drawn| drawn.dtype == DTypeClass::Bf16), 6.0 / 16.0));
        assert!(near(part(&products, |drawn| drawn.shape["layout"] == "nt"), 0.25));
        let odd = part(&products, |drawn| ["n", "k"].iter().any(|name| drawn.shape[name].as_u64().is_some_and(|value| value % 2 == 1)));
        // What is too large is drawn again, and the aligned ones are larger.
        assert!((0.33..0.42).contains(&odd), "{odd}");
        assert!((0.15..0.25).contains(&part(&products, |drawn| drawn.shape["batch"] != 1)));
        let convolutions = drawn(Kind::Convolution, 2000);
        let mut directions: HashMap<String, f64> = HashMap::new();
        for drawn in &convolutions {
            *directions.entry(drawn.shape["direction"].to_string()).or_default() += 1.0 / 2000.0;
        }
        assert!(directions.len() == 3 && directions.values().all(|part| near(*part, 1.0 / 3.0)), "{directions:?}");
        let depthwise = part(&convolutions, |drawn| drawn.shape["groups"] != 1 && drawn.shape["groups"] == drawn.shape["c"]);
        assert!((0.1..0.25).contains(&depthwise), "{depthwise}");
        assert!((0.1..0.25).contains(&part(&convolutions, |drawn| drawn.shape["layout"] == "channels-first")));
    }
}
