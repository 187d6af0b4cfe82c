//! Philox4x32 in a kernel: random numbers that depend on a state and a number alone. The counter scheme of [`numbers`], and its ten rounds, are those of
//! [`verdigris_graph::Pointwise::Random`].

use verdigris_graph::Drawn;
use verdigris_kir::face::{Kernel, Val};

use super::math;
use super::value::{AnyVal, Raw};

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: u32 = 10;

/// The generator under one key.
pub(crate) struct Generator<'k> {
    k: Kernel<'k>,
    /// The key of each round.
    keys: Vec<[Val<'k, u32>; 2]>,
}

impl<'k> Generator<'k> {
    /// Of the halves of a seed, the lower one first, with so many rounds.
    pub(crate) fn new(k: Kernel<'k>, [low, high]: [Val<'k, u32>; 2], rounds: u32) -> Self {
        let key = |round: u32| [low + WEYL[0].wrapping_mul(round), high + WEYL[1].wrapping_mul(round)];
        Generator { k, keys: (0..rounds).map(key).collect() }
    }

    /// The four words of a counter.
    pub(crate) fn words(&self, counter: [Val<'k, u32>; 4]) -> [Val<'k, u32>; 4] {
        let k = self.k;
        self.keys.iter().fold(counter, |[a, b, c, d], [key, other]| {
            let (low_a, high_a) = k.split32(a.mul_wide(MULTIPLIERS[0]));
            let (low_c, high_c) = k.split32(c.mul_wide(MULTIPLIERS[1]));
            [high_c ^ b ^ *key, low_c, high_a ^ d ^ *other, low_a]
        })
    }
}

/// Seed and offset of a launch.
struct Stream<'k> {
    generator: Generator<'k>,
    offset: Val<'k, u64>,
}

impl<'k> Stream<'k> {
    fn new(k: Kernel<'k>, state: [Val<'k, u32>; 4]) -> Self {
        let [low, high, offset_low, offset_high] = state;
        Stream { generator: Generator::new(k, [low, high], ROUNDS), offset: k.join32(offset_low, offset_high) }
    }

    /// The four words of the block that element `number` stands in.
    fn block(&self, number: Val<'k, u64>) -> [Val<'k, u32>; 4] {
        let k = self.generator.k;
        let (low, high) = k.split32(self.offset + (number >> 2));
        self.generator.words([low, high, k.constant(0), k.constant(0)])
    }

    /// The words of the pair that one element is of, and whether it is the second.
    fn pair(&self, number: Val<'k, u64>) -> ([Val<'k, u32>; 2], Val<'k, bool>) {
        let k = self.generator.k;
        let [a, b, c, d] = self.block(number);
        let place = number.low32() & 3u32;
        let is_upper = place.ge(2u32);
        ([k.select(is_upper, c, a), k.select(is_upper, d, b)], (place & 1u32).eq(1u32))
    }
}

/// A random number in f32 for each element of `numbers`, which lie at equal distances.
///
/// Four neighbours that are one block take one evaluation, and so do two that are a pair of one. With `in_blocks` the caller knows that neighbours' numbers follow each other, from
/// a multiple of two or four on; else that is seen at run time, so that a kernel serves all strides and offsets of tiles alike: by a branch, across which nothing overlaps.
#[track_caller]
pub(super) fn numbers<'k>(
    k: Kernel<'k>,
    distribution: Drawn,
    state: [AnyVal<'k>; 4],
    numbers: &[AnyVal<'k>],
    in_blocks: bool,
) -> Vec<AnyVal<'k>> {
    let stream = Stream::new(k, state.map(|word| bits(word)));
    let numbers: Vec<Val<'k, u64>> = numbers.iter().map(|&number| whole(number)).collect();
    let of_pair = |[a, b]: [Val<'k, u32>; 2]| match distribution {
        Drawn::Uniform => [a, b].map(unit),
        Drawn::Normal => normal(a, b),
    };
    let of_number = |number: Val<'k, u64>| {
        let (pair, is_second) = stream.pair(number);
        let [first, second] = of_pair(pair);
        k.select(is_second, second, first)
    };
    let mut drawn = Vec::with_capacity(numbers.len());
    for group in numbers.chunks(4) {
        match *group {
            [first, _, _, _] if in_blocks => {
                let [a, b, c, d] = stream.block(first);
                drawn.extend([of_pair([a, b]), of_pair([c, d])].into_iter().flatten());
            }
            [first, _] if in_blocks => {
                let (pair, _) = stream.pair(first);
                drawn.extend(of_pair(pair));
            }
            [first, _, _, last] => {
                let places: Vec<_> = group.iter().map(|_| k.var(k.constant::<f32>(0.0))).collect();
                let is_block = (first.low32() & 3u32).eq(0u32) & last.eq(first + 3u64);
                k.when_else(
                    is_block,
                    || {
                        let [a, b, c, d] = stream.block(first);
                        let values = [of_pair([a, b]), of_pair([c, d])].into_iter().flatten();
                        places.iter().zip(values).for_each(|(place, value)| place.set(value));
                    },
                    || places.iter().zip(group).for_each(|(place, &number)| place.set(of_number(number))),
                );
                drawn.extend(places.iter().map(|place| place.get()));
            }
            [first, last] => {
                let (pair, is_second) = stream.pair(first);
                let [low, high] = of_pair(pair);
                let other = k.var(high);
                k.when(is_second | last.ne(first + 1u64), || other.set(of_number(last)));
                drawn.extend([k.select(is_second, high, low), other.get()]);
            }
            _ => drawn.extend(group.iter().map(|&number| of_number(number))),
        }
    }
    drawn.into_iter().map(AnyVal::F32).collect()
}

/// The upper 24 bits of a word, divided by 2²⁴: in [0, 1).
fn unit(word: Val<'_, u32>) -> Val<'_, f32> {
    (word >> 8).to_f32() * (1.0f32 / 16_777_216.0)
}

/// Two normal numbers of two words, by Box and Muller.
fn normal<'k>(a: Val<'k, u32>, b: Val<'k, u32>) -> [Val<'k, f32>; 2] {
    let k = a.kernel();
    let u = k.fma(a.to_f32(), 1.0f32 / 4_294_967_296.0, 1.0f32 / 8_589_934_592.0);
    let radius = (math::log(u) * -2.0f32).sqrt();
    // The angle is b' / 2²⁴ of a turn, in quarters of it the nearest and the rest from −1/2 to 1/2, which the integers tell exactly.
    let quarter = 1u32 << 22;
    let turn = b >> 8;
    let quadrant = (turn + quarter / 2) >> 22;
    let rest = (turn - (quadrant << 22)).signed().to_f32();
    let angle = rest * (std::f32::consts::FRAC_PI_2 / quarter as f32);
    let [sin, cos] = math::sin_cos_of_quadrant(angle, quadrant);
    [radius * cos, radius * sin]
}

fn bits(word: AnyVal<'_>) -> Val<'_, u32> {
    match word {
        AnyVal::Stored(_, Raw::B32(bits)) => bits,
        // A chain takes loads of i32 alone as the words of a state.
        other => unreachable!("{other:?} is no word of a state"),
    }
}

fn whole(number: AnyVal<'_>) -> Val<'_, u64> {
    match number {
        AnyVal::I64(number) => number.unsigned(),
        // Coordinates are i64.
        other => unreachable!("{other:?} is no coordinate"),
    }
}
