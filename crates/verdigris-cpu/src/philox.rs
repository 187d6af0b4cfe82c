//! Philox4x32: random numbers that depend on a state and a number alone. The counter schemes are those of [`verdigris_graph::Pointwise::Random`], with ten
//! rounds, and of [`DropoutMask`], with its own.

use verdigris_graph::{Drawn, DropoutMask, Uid};

use crate::graph_plan::Context;

/// Rounds of [`Stream::numbers`].
const ROUNDS: u32 = 10;

/// Seed and offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    key: [u32; 2],
    offset: u64,
}

impl Stream {
    /// The state that an op reads: four words in memory or, with an offset, two numbers of the host.
    pub(crate) fn of(context: &Context<'_>, state: Uid, offset: Option<Uid>) -> Stream {
        let Some(offset) = offset else {
            let view = context.view(state);
            return Stream::new([0, 1, 2, 3].map(|i| view.integer(i * view.layout.strides()[0] as usize) as u32));
        };
        let [seed, offset] = [state, offset].map(|uid| context.integer(uid) as u64);
        Stream { key: [seed as u32, (seed >> 32) as u32], offset }
    }

    /// The words of attention's dropout for query `i` of the head of this number in all batches: that of each key, as [`DropoutMask`] says. Keys of one block cost
    /// one evaluation of the generator together.
    pub(crate) fn pairs(self, head: u64, i: u64) -> impl FnMut(u64) -> u32 {
        let counter = self.offset.wrapping_add(head);
        let mut block = [[0; 4]; 8];
        let mut held = [None; 8];
        move |j| {
            let (place, folded) = ((j % 8) as usize, DropoutMask::fold(j));
            if held[place] != Some(folded) {
                let counter = [counter as u32, (counter >> 32) as u32, 1 + DropoutMask::fold(i) as u32, folded as u32];
                (held[place], block[place]) = (Some(folded), philox(counter, self.key, DropoutMask::ROUNDS));
            }
            block[place][DropoutMask::word(i, j)]
        }
    }

    /// From the words of a state: seed, then offset, low halves first.
    pub(crate) fn new([seed_low, seed_high, low, high]: [u32; 4]) -> Stream {
        Stream { key: [seed_low, seed_high], offset: u64::from(high) << 32 | u64::from(low) }
    }

    /// The number of each element; neighbours of one block cost one evaluation of the generator together.
    pub(crate) fn numbers(self, distribution: Drawn) -> impl FnMut(u64) -> f32 {
        let mut last = None;
        move |number| {
            let block = number / 4;
            let words = match last {
                Some((held, words)) if held == block => words,
                _ => {
                    let counter = self.offset.wrapping_add(block);
                    philox([counter as u32, (counter >> 32) as u32, 0, 0], self.key, ROUNDS)
                }
            };
            last = Some((block, words));
            let place = (number % 4) as usize;
            match distribution {
                Drawn::Uniform => unit(words[place]),
                Drawn::Normal => normal([words[place & !1], words[place | 1]])[place & 1],
            }
        }
    }
}

/// A number in [0, 1); 24 bits fit the significand.
fn unit(word: u32) -> f32 {
    (word >> 8) as f32 / 16_777_216.0
}

/// Two normal numbers of two words, by Box and Muller, in f64 but for the rounding that the definition has.
fn normal([a, b]: [u32; 2]) -> [f32; 2] {
    let u = a as f32 / 4_294_967_296.0 + 1.0 / 8_589_934_592.0;
    let radius = (-2.0 * f64::from(u).ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * f64::from(unit(b))).sin_cos();
    [(radius * cos) as f32, (radius * sin) as f32]
}

/// The four words of a counter under a key.
fn philox(counter: [u32; 4], key: [u32; 2], rounds: u32) -> [u32; 4] {
    let wide = |a: u32, b: u32| u64::from(a) * u64::from(b);
    let (mut c, mut key) = (counter, key);
    for _ in 0..rounds {
        let (first, second) = (wide(c[0], 0xd251_1f53), wide(c[2], 0xcd9e_8d57));
        c = [(second >> 32) as u32 ^ c[1] ^ key[0], second as u32, (first >> 32) as u32 ^ c[3] ^ key[1], first as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors that Random123 publishes.
    #[test]
    fn known_answers() {
        let ones = u32::MAX;
        assert_eq!(philox([0; 4], [0; 2], 10), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([ones; 4], [ones; 2], 10), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0], 10), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
        assert_eq!(philox([0; 4], [0; 2], 7), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        assert_eq!(philox([ones; 4], [ones; 2], 7), [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]);
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0], 7), [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a]);
    }

    #[test]
    fn offsets_wrap_and_neighbours_share_blocks() {
        let key = [7, 9];
        let mut last = Stream::new([7, 9, u32::MAX, u32::MAX]).numbers(Drawn::Uniform);
        let as_number = |word: u32| (word >> 8) as f32 / 16_777_216.0;
        assert_eq!(last(3), as_number(philox([u32::MAX, u32::MAX, 0, 0], key, ROUNDS)[3]));
        assert_eq!(last(4), as_number(philox([0; 4], key, ROUNDS)[0]));
        // Element 2³⁴ + 1 is in block 2³².
        assert_eq!(Stream::new([7, 9, 0, 0]).numbers(Drawn::Uniform)((1 << 34) + 1), as_number(philox([0, 1, 0, 0], key, ROUNDS)[1]));
    }

    /// No word gives more than the least `u` does, and none ∞ or NaN.
    #[test]
    fn the_ends_of_the_normal_distribution_are_finite() {
        let words = [0, 1, 255, 256, 1 << 31, u32::MAX - 1, u32::MAX];
        for a in words {
            for b in words {
                assert!(normal([a, b]).iter().all(|z| z.abs() <= 6.77), "{a} {b}: {:?}", normal([a, b]));
            }
        }
        assert_eq!(normal([u32::MAX, 0]), [0.0, 0.0]);
        assert!((f64::from(normal([0, 0])[0]) - (66.0 * std::f64::consts::LN_2).sqrt()).abs() < 1e-6);
    }

    /// A million numbers: moments, neighbours that do not depend on each other, and the counts of 64 bins of equal probability beside what chance allows.
    #[test]
    fn normal_numbers_are_normal() {
        const COUNT: u64 = 1 << 20;
        for seed in [[1, 2, 3, 4], [0xffff_ffff, 0, 9, 0], [7, 0x8000_0000, 0, 1]] {
            let mut next = Stream::new(seed).numbers(Drawn::Normal);
            let drawn: Vec<f64> = (0..COUNT).map(|number| next(number).into()).collect();
            let mean_of = |f: &dyn Fn(f64) -> f64| drawn.iter().map(|&z| f(z)).sum::<f64>() / COUNT as f64;
            // Each within five deviations of a mean of so many.
            let deviation = (COUNT as f64).sqrt().recip();
            for (power, wanted, spread) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
                let found = mean_of(&|z| z.powi(power));
                assert!((found - wanted).abs() < 5.0 * f64::sqrt(spread) * deviation, "{seed:?}: moment {power} is {found}");
            }
            for distance in [1, 2, 3, 4, 8] {
                let together = drawn.windows(distance + 1).map(|pair| pair[0] * pair[distance]).sum::<f64>() / COUNT as f64;
                assert!(together.abs() < 5.0 * deviation, "{seed:?}: neighbours at {distance} go together by {together}");
            }
            let mut bins = [0u64; 64];
            for &z in &drawn {
                let below = 0.5 * libm::erfc(-z * std::f64::consts::FRAC_1_SQRT_2);
                bins[((below * 64.0) as usize).min(63)] += 1;
            }
            let expected = COUNT as f64 / 64.0;
            let chi_square: f64 = bins.iter().map(|&count| (count as f64 - expected).powi(2) / expected).sum();
            // Of 63 degrees: 1 in 10⁴ on either side.
            assert!((26.0..112.0).contains(&chi_square), "{seed:?}: χ² is {chi_square}");
            // Beyond 4.5 there are 7 of a million.
            let far = drawn.iter().filter(|z| z.abs() > 4.5).count();
            assert!((1..25).contains(&far), "{seed:?}: {far} beyond 4.5");
        }
    }

    /// All 64 bits of seed and offset from the host count.
    #[test]
    fn a_state_by_value_is_exact() {
        use verdigris_graph::{GraphBuilder, RandomState};
        use verdigris_tensor::DType;

        let (seed, offset) = (i64::MIN + 1, i64::MAX);
        let mut g = GraphBuilder::new("by value");
        let [by_seed, by_offset] = ["seed", "offset"].map(|name| g.host_scalar(name, DType::I64));
        let y = g.random_uniform("random", &[16], RandomState::by_value(by_seed, by_offset)).expect("small");
        g.store(y, "y", DType::F32).expect("stores");
        let plan = crate::GraphPlan::new(&g.finish().expect("valid")).expect("plans");
        let mut bytes = [0xff; 64];
        plan.run(crate::Bindings::new().integer(by_seed, seed).integer(by_offset, offset).output(y, &mut bytes)).expect("runs");
        let mut wanted = Stream::new([1, 1 << 31, u32::MAX, u32::MAX >> 1]).numbers(Drawn::Uniform);
        let wanted: Vec<u8> = (0..16).flat_map(|number| wanted(number).to_le_bytes()).collect();
        assert_eq!(bytes[..], wanted[..]);
    }

    /// Results in other orders and types have the numbers of the reference, bit for bit, in pieces of more than one register.
    #[test]
    fn numbers_are_those_of_the_reference() {
        use verdigris_graph::GraphBuilder;
        use verdigris_reference::graph::{Selection, evaluate};
        use verdigris_reference::run::Inputs;
        use verdigris_tensor::{DType, Layout};

        for (order, distribution) in
            [&[0, 1, 2][..], &[2, 0, 1], &[1, 2, 0]].into_iter().flat_map(|order| [(order, Drawn::Uniform), (order, Drawn::Normal)])
        {
            let dims = [7, 30, 131];
            let mut g = GraphBuilder::new("random");
            let state = g.tensor("state", DType::I32, Layout::row_major(&[4]).expect("small"));
            let y = match distribution {
                Drawn::Uniform => g.random_uniform("random", &dims, state),
                Drawn::Normal => g.random_normal("random", &dims, state),
            };
            let y = y.expect("small");
            g.store_as(y, "y", DType::F32, Layout::with_order(&dims, order).expect("small")).expect("stores");
            let graph = g.finish().expect("valid");
            let words: Vec<u8> = [0x8765_4321u32, 17, u32::MAX - 1, u32::MAX].iter().flat_map(|word| word.to_le_bytes()).collect();
            let mut inputs = Inputs::default();
            inputs.buffers.insert(state, words.clone());
            let wanted = evaluate(&graph, &inputs, Selection::All).expect("evaluates");
            let sentinel = vec![0xff; 4 * 7 * 30 * 131];
            let mut bytes = sentinel.clone();
            let plan = crate::GraphPlan::new(&graph).expect("plans");
            plan.run(crate::Bindings::new().input(state, &words).output(y, &mut bytes)).expect("runs");
            let report = verdigris_reference::compare::compare(&wanted[0], &sentinel, &bytes);
            assert!(report.passes(), "{order:?}: {report:?}");
        }
    }
}
