//! Random numbers by Philox4x32: ten rounds by the counter scheme of [`verdigris_graph::Pointwise::Random`], seven by that of
//! [`verdigris_graph::DropoutMask`].

use verdigris_graph::Drawn;
use verdigris_tensor::DType;
use verdigris_tensor::num::power_of_two;

use crate::source::{Formula, Source};
use crate::tolerance::Bounded;

/// Seed and offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct State {
    /// Beyond 2⁵³ numbers of the host are not known exactly.
    is_known: bool,
    seed: [u64; 2],
    offset: u128,
}

impl State {
    /// Four words in memory.
    pub(crate) fn in_memory(state: &Source<'_>) -> State {
        // An i32 as the unsigned number of the same bits.
        State::of_words(true, |i: u64| (state.at(&[i]).value as i64).rem_euclid(1 << 32) as u64)
    }

    /// Of seed and offset from the host.
    pub(crate) fn by_value(state: [f64; 2]) -> State {
        let is_known = state.iter().all(|number| number.abs() < power_of_two(53));
        let [seed, offset] = state.map(|number| (number as i128).rem_euclid(1 << 64));
        State::of_words(is_known, |i: u64| ((if i < 2 { seed } else { offset } >> (32 * (i % 2))) % (1 << 32)) as u64)
    }

    /// Four words, low ones first.
    pub(crate) fn of_words(is_known: bool, word: impl Fn(u64) -> u64) -> State {
        State { is_known, seed: [word(0), word(1)], offset: u128::from(word(2)) + (u128::from(word(3)) << 32) }
    }

    /// Whether attention drops query `i` and key `j` of the head of this number in all batches, as [`verdigris_graph::DropoutMask`] says; `None` if the state is
    /// not known.
    pub(crate) fn is_dropped(&self, head: u64, i: u64, j: u64, p: f64) -> Option<bool> {
        if !self.is_known {
            return None;
        }
        let counter = (self.offset + u128::from(head)) % (1 << 64);
        let number = |x: u64| (x / 16) * 8 + x % 8;
        let place = (i % 16 / 8) * 2 + j % 16 / 8;
        let words = philox([(counter % (1 << 32)) as u64, (counter >> 32) as u64, number(i) + 1, number(j)], self.seed, 7);
        Some((words[place as usize] / 256) as f64 / f64::from(1 << 24) < f64::from(p as f32))
    }
}

/// Random numbers over dims.
pub(crate) struct Numbers {
    distribution: Drawn,
    state: State,
    dims: Vec<u64>,
}

impl Numbers {
    pub(crate) fn new(distribution: Drawn, state: State, dims: &[u64]) -> Numbers {
        Numbers { distribution, state, dims: dims.to_vec() }
    }
}

impl Formula for Numbers {
    fn at(&self, index: &[u64]) -> Bounded {
        self.of_number(index.iter().zip(&self.dims).fold(0u128, |number, (&i, &dim)| number * u128::from(dim) + u128::from(i)))
    }

    fn compute(&self) -> DType {
        DType::F32
    }
}

impl Numbers {
    /// The random number of an element with this number.
    pub(crate) fn of_number(&self, number: u128) -> Bounded {
        if !self.state.is_known {
            return Bounded { value: 0.0, error: f64::INFINITY };
        }
        let block = (self.state.offset + number / 4) % (1 << 64);
        let words = philox([(block % (1 << 32)) as u64, (block >> 32) as u64, 0, 0], self.state.seed, 10);
        let (place, unit) = ((number % 4) as usize, |word: u64| (word / 256) as f64 / f64::from(1 << 24));
        if self.distribution == Drawn::Uniform {
            return Bounded::exact(unit(words[place]));
        }
        let [even, odd] = [place / 2 * 2, place / 2 * 2 + 1].map(|place| words[place]);
        let u = f64::from((f64::from(even as f32) * power_of_two(-32) + power_of_two(-33)) as f32);
        let (radius, angle) = ((-2.0 * u.ln()).sqrt(), 2.0 * std::f64::consts::PI * unit(odd));
        let value = radius * if place % 2 == 0 { angle.cos() } else { angle.sin() };
        // A few units of f32 each for the logarithm, the root, the angle, and its sine or cosine.
        Bounded { value, error: radius * power_of_two(-20) }
    }
}

/// The rounds, in numbers wider than words, each brought back to 32 bits.
fn philox(mut counter: [u64; 4], seed: [u64; 2], rounds: u64) -> [u64; 4] {
    const WORD: u64 = 1 << 32;
    for round in 0..rounds {
        let key = [(seed[0] + round * 0x9e37_79b9) % WORD, (seed[1] + round * 0xbb67_ae85) % WORD];
        let products = [counter[0] * 0xd251_1f53, counter[2] * 0xcd9e_8d57];
        let [left, right] = products.map(|product| (product / WORD, product % WORD));
        counter = [right.0 ^ counter[1] ^ key[0], right.1, left.0 ^ counter[3] ^ key[1], left.1];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors that Random123 publishes.
    #[test]
    fn known_answers() {
        let ones = u64::from(u32::MAX);
        assert_eq!(philox([0; 4], [0; 2], 10), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([ones; 4], [ones; 2], 10), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0], 10), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
        assert_eq!(philox([0; 4], [0; 2], 7), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        assert_eq!(philox([ones; 4], [ones; 2], 7), [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]);
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0], 7), [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a]);
    }

    /// 2²⁰ numbers in 256 classes: the statistic of 255 degrees of freedom lies within five deviations of its mean.
    #[test]
    fn numbers_are_uniform() {
        let count = 1u64 << 20;
        let all = Numbers::new(Drawn::Uniform, State { is_known: true, seed: [1234, 5678], offset: 42 }, &[count]);
        let mut classes = [0u64; 256];
        (0..count).for_each(|i| classes[(all.at(&[i]).value * 256.0) as usize] += 1);
        let wanted = count as f64 / 256.0;
        let statistic: f64 = classes.iter().map(|&class| (class as f64 - wanted).powi(2) / wanted).sum();
        assert!((statistic - 255.0).abs() < 5.0 * (2.0f64 * 255.0).sqrt(), "{statistic}");
    }
}
