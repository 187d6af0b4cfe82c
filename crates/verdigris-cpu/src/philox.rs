//! Philox4x32-10: random numbers that depend on a state and a number alone. The counter scheme is that of [`verdigris_graph::Pointwise::Random`].

/// Seed and offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    key: [u32; 2],
    offset: u64,
}

impl Stream {
    /// From the words of a state: seed, then offset, low halves first.
    pub(crate) fn new([seed_low, seed_high, low, high]: [u32; 4]) -> Stream {
        Stream { key: [seed_low, seed_high], offset: u64::from(high) << 32 | u64::from(low) }
    }

    /// The number in [0, 1) of each element; neighbours of one block cost one evaluation together.
    pub(crate) fn uniform(self) -> impl FnMut(u64) -> f32 {
        let mut last = None;
        move |number| {
            let block = number / 4;
            let words = match last {
                Some((held, words)) if held == block => words,
                _ => {
                    let counter = self.offset.wrapping_add(block);
                    philox([counter as u32, (counter >> 32) as u32, 0, 0], self.key)
                }
            };
            last = Some((block, words));
            // 24 bits fit the significand.
            (words[(number % 4) as usize] >> 8) as f32 / 16_777_216.0
        }
    }
}

/// The four words of a counter under a key.
fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let wide = |a: u32, b: u32| u64::from(a) * u64::from(b);
    let (mut c, mut key) = (counter, key);
    for _ in 0..10 {
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
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0]), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn offsets_wrap_and_neighbours_share_blocks() {
        let key = [7, 9];
        let mut last = Stream::new([7, 9, u32::MAX, u32::MAX]).uniform();
        let as_number = |word: u32| (word >> 8) as f32 / 16_777_216.0;
        assert_eq!(last(3), as_number(philox([u32::MAX, u32::MAX, 0, 0], key)[3]));
        assert_eq!(last(4), as_number(philox([0; 4], key)[0]));
        // Element 2³⁴ + 1 is in block 2³².
        assert_eq!(Stream::new([7, 9, 0, 0]).uniform()((1 << 34) + 1), as_number(philox([0, 1, 0, 0], key)[1]));
    }

    /// Results in other orders and types have the numbers of the reference, bit for bit, in pieces of more than one register.
    #[test]
    fn numbers_are_those_of_the_reference() {
        use verdigris_graph::GraphBuilder;
        use verdigris_reference::graph::{Selection, evaluate};
        use verdigris_reference::run::Inputs;
        use verdigris_tensor::{DType, Layout};

        for order in [&[0, 1, 2][..], &[2, 0, 1], &[1, 2, 0]] {
            let dims = [7, 30, 131];
            let mut g = GraphBuilder::new("random");
            let state = g.tensor("state", DType::I32, Layout::row_major(&[4]).expect("small"));
            let y = g.random_uniform("random", &dims, state).expect("small");
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
