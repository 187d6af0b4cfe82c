//! Random numbers in kernels: the bits of the reference, whatever the vectors, tiles and strides.

use std::collections::BTreeMap;

use verdigris_engines::arch::Arch;
use verdigris_engines::engines;
use verdigris_engines::interpret::Parts;
use verdigris_graph::{Graph, GraphBuilder, HostScalar, Precision, RandomState, ReductionOp, Uid};
use verdigris_kir::interp::{Kernels, Options};
use verdigris_tensor::{DType, Layout};

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("a small layout")
}

/// One block by the definition of Salmon and others, written once more: word by word, with the key raised in the round.
fn block(counter: u64, seed: u64) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = [counter as u32, (counter >> 32) as u32, 0, 0];
    let (mut low, mut high) = (seed as u32, (seed >> 32) as u32);
    for _ in 0..10 {
        let left = u128::from(a) * 0xd251_1f53;
        let right = u128::from(c) * 0xcd9e_8d57;
        (a, b, c, d) = ((right >> 32) as u32 ^ b ^ low, right as u32, (left >> 32) as u32 ^ d ^ high, left as u32);
        low = low.wrapping_add(0x9e37_79b9);
        high = high.wrapping_add(0xbb67_ae85);
    }
    [a, b, c, d]
}

fn uniform(seed: u64, offset: u64, number: u64) -> f32 {
    (block(offset.wrapping_add(number / 4), seed)[(number % 4) as usize] >> 8) as f32 / 16_777_216.0
}

fn state(seed: u64, offset: u64) -> Vec<u8> {
    [seed.to_le_bytes(), offset.to_le_bytes()].concat()
}

/// What each way of each part of a graph leaves in `y`.
fn results(graph: &Graph, inputs: &[(Uid, Vec<u8>)], y: Uid) -> Vec<Vec<u8>> {
    results_with(graph, inputs, &BTreeMap::new(), y)
}

/// The same with numbers from the host.
fn results_with(graph: &Graph, inputs: &[(Uid, Vec<u8>)], scalars: &BTreeMap<Uid, f64>, y: Uid) -> Vec<Vec<u8>> {
    let arch = Arch::virtual_device(3);
    let engines: Vec<_> = engines().collect();
    let parts = Parts::all(graph, &arch, &engines).expect("is cut");
    assert!(parts.variants() > 0, "somebody takes it");
    let size = graph.tensor(y).map_or(0, |tensor| tensor.layout.span_elements() as usize * tensor.dtype.bytes());
    (0..parts.variants())
        .map(|variant| {
            let mut buffers: BTreeMap<Uid, Vec<u8>> = inputs.iter().cloned().collect();
            buffers.insert(y, vec![0xa5; size]);
            let options = Options { sms: arch.sm_count, ..Options::schedule(variant as u64) };
            parts.interpret(variant, &mut buffers, scalars, &Kernels::new(), &options).expect("runs");
            buffers.remove(&y).expect("bound")
        })
        .collect()
}

#[test]
fn the_block_is_philox() {
    assert_eq!(block(0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
}

/// Sizes at the edges of vectors and CTAs, dims whose rows begin within a block, dims in other orders, offsets that wrap.
#[test]
fn kernels_have_the_numbers_of_the_definition() {
    let seed = 0xfedc_ba98_7654_3210;
    let in_order = |dims: &[u64], order: &[usize]| Layout::with_order(dims, order).expect("small");
    let layouts = [
        rows(&[1]),
        rows(&[5]),
        rows(&[1023]),
        rows(&[1024]),
        rows(&[1025]),
        rows(&[3, 7]),
        in_order(&[12, 40], &[0, 1]),
        in_order(&[2, 8, 3, 5], &[0, 2, 3, 1]),
        Layout::new(&[6, 10], &[16, 1]).expect("rows with gaps"),
        Layout::new(&[6, 8], &[24, 2]).expect("elements with gaps"),
    ];
    for layout in layouts {
        for offset in [0, 77, u64::MAX - 3] {
            let mut g = GraphBuilder::new("random");
            let given = g.tensor("state", DType::I32, rows(&[4]));
            let y = g.random_uniform("random", layout.dims(), given).expect("small");
            g.store_as(y, "y", DType::F32, layout).expect("stores");
            let graph = g.finish().expect("valid");
            let mut wanted = vec![0xa5; layout.span_elements() as usize * 4];
            for number in 0..layout.elements() {
                let mut rest = number;
                let place: u64 = (layout.dims().iter().zip(layout.strides()).rev())
                    .map(|(dim, stride)| {
                        let i = rest % dim;
                        rest /= dim;
                        i * stride
                    })
                    .sum();
                wanted[place as usize * 4..][..4].copy_from_slice(&uniform(seed, offset, number).to_le_bytes());
            }
            for got in results(&graph, &[(given, state(seed, offset))], y) {
                assert!(got == wanted, "{layout:?} at offset {offset}");
            }
        }
    }
}

/// Dropout of ones, in types whose accesses are vectors of 2, 4 and 8: the same mask in each, and in a reduction behind it.
#[test]
fn masks_are_the_same_in_all_types_and_in_reductions() {
    let (seed, offset, dims) = (3, 5, [9u64, 64]);
    let drops = |p: f32| (0..9 * 64).map(move |number| uniform(seed, offset, number) < p).collect::<Vec<bool>>();
    for (p, wanted) in [(0.0, vec![false; 9 * 64]), (0.5, drops(0.5)), (1.0, vec![true; 9 * 64])] {
        for dtype in [DType::F64, DType::F32, DType::Bf16, DType::E5m2] {
            let mut g = GraphBuilder::new("dropout");
            let x = g.tensor("x", dtype, rows(&dims));
            let given = g.tensor("state", DType::I32, rows(&[4]));
            let y = g.dropout("dropout", x, given, p).expect("fits");
            g.store(y, "y", dtype).expect("stores");
            let graph = g.finish().expect("valid");
            let ones = verdigris_reference::data::fill(dtype, verdigris_reference::data::Distribution::SameSign, false, 1, 9 * 64);
            for got in results(&graph, &[(x, ones), (given, state(seed, offset))], y) {
                let dropped: Vec<bool> = got.chunks_exact(dtype.bytes()).map(|element| element.iter().all(|&byte| byte == 0)).collect();
                assert!(dropped == wanted, "{dtype} with p = {p}");
            }
        }
    }
    for axis in [0, 1] {
        let mut g = GraphBuilder::new("kept");
        let given = g.tensor("state", DType::I32, rows(&[4]));
        let drawn = g.bernoulli("drawn", &dims, given, 0.5).expect("fits");
        let count = g.reduction("count", ReductionOp::Add, drawn, &[axis]).expect("fits");
        g.store(count, "count", DType::F32).expect("stores");
        let graph = g.finish().expect("valid");
        let drawn = drops(0.5);
        let (kept, reduced) = if axis == 0 { (64, 9) } else { (9, 64) };
        let at = |i: usize, j: usize| if axis == 0 { drawn[j * 64 + i] } else { drawn[i * 64 + j] };
        let wanted: Vec<u8> = (0..kept).flat_map(|i| ((0..reduced).filter(|&j| at(i, j)).count() as f32).to_le_bytes()).collect();
        for got in results(&graph, &[(given, state(seed, offset))], count) {
            assert!(got == wanted, "axis {axis}");
        }
    }
}

/// Sizes, orders and gaps as above: each number within what logarithm, root, sine and cosine lose, and the ends of its words finite.
#[test]
fn normal_numbers_are_those_of_the_definition() {
    let seed = 0x0123_4567_89ab_cdef;
    let layouts = [rows(&[1]), rows(&[7]), rows(&[1026]), rows(&[2048]), rows(&[3, 7]), Layout::new(&[6, 10], &[16, 1]).expect("gaps")];
    for layout in layouts {
        for offset in [0, u64::MAX - 3] {
            let mut g = GraphBuilder::new("normal");
            let given = g.tensor("state", DType::I32, rows(&[4]));
            let y = g.random_normal("normal", layout.dims(), given).expect("small");
            g.store_as(y, "y", DType::F32, layout).expect("stores");
            let graph = g.finish().expect("valid");
            for got in results(&graph, &[(given, state(seed, offset))], y) {
                for number in 0..layout.elements() {
                    let place = layout.offset_of_position(number).expect("within") as usize;
                    let found = f32::from_le_bytes(got[place * 4..][..4].try_into().expect("four bytes"));
                    let words = block(offset.wrapping_add(number / 4), seed);
                    let pair = (number % 4 / 2 * 2) as usize;
                    let u = words[pair] as f32 * 2f32.powi(-32) + 2f32.powi(-33);
                    let radius = (-2.0 * f64::from(u).ln()).sqrt();
                    let angle = std::f64::consts::TAU * f64::from(words[pair + 1] >> 8) / f64::from(1 << 24);
                    let wanted = radius * if number % 2 == 0 { angle.cos() } else { angle.sin() };
                    let off = (f64::from(found) - wanted).abs();
                    assert!(off <= radius * 2f64.powi(-20), "{layout:?} at {offset}, element {number}: {found}, wanted {wanted}");
                }
            }
        }
    }
}

/// Seed and offset from the host give the numbers that they give from memory, and serve as a factor beside it.
#[test]
fn a_state_by_value_is_a_state_in_memory() {
    for (seed, offset) in [(0i64, 0i64), (1 << 52 | 12345, 77), (-3, 1 << 40 | 5), (-(1 << 52), -1)] {
        let mut g = GraphBuilder::new("random");
        let [by_seed, by_offset] = ["seed", "offset"].map(|name| g.host_scalar(name, DType::I64));
        let given = RandomState::by_value(by_seed, by_offset);
        let y = g.random_uniform("random", &[3, 331], given).expect("small");
        g.store(y, "y", DType::F32).expect("stores");
        let scaled = g.scale("scale", y, HostScalar::Bound(by_offset)).expect("fits");
        g.store(scaled, "scaled", DType::F32).expect("stores");
        let graph = g.finish().expect("valid");
        let wanted: Vec<f32> = (0..993).map(|number| uniform(seed as u64, offset as u64, number)).collect();
        let scalars = BTreeMap::from([(by_seed, seed as f64), (by_offset, offset as f64)]);
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let scaled_size = vec![0; 993 * 4];
        for got in results_with(&graph, &[(scaled, scaled_size.clone())], &scalars, y) {
            assert!(got == bytes(&wanted), "{seed} {offset}");
        }
        let times: Vec<f32> = wanted.iter().map(|value| value * offset as f32).collect();
        for got in results_with(&graph, &[(y, scaled_size.clone())], &scalars, scaled) {
            assert!(got == bytes(&times), "{seed} {offset}");
        }
    }
}

/// Dropout behind a product of ones: every engine and setting drops what the definition says, of a state in memory and by value, in batches, whole or as rows of
/// a mask, and where the result is column-major.
#[test]
fn products_drop_what_the_definition_says() {
    let (seed, offset, k) = (0xfedc_ba98u64, 77u64, 16u64);
    let turned = |dims: &[u64]| Layout::with_order(dims, &[0, 2, 1]).expect("small");
    for (by_value, dtype, layout) in [
        (false, DType::Bf16, rows(&[2, 33, 40])),
        (true, DType::Bf16, rows(&[2, 33, 40])),
        (true, DType::F16, rows(&[1, 65, 63])),
        (false, DType::F32, turned(&[2, 24, 70])),
    ] {
        let dims = layout.dims().to_vec();
        let (batch, m, n) = (dims[0], dims[1], dims[2]);
        let mut g = GraphBuilder::new("product, dropout");
        let (a, b) = (g.tensor("a", dtype, rows(&[batch, m, k])), g.tensor("b", dtype, rows(&[k, n])));
        let mut inputs = vec![];
        let mut scalars = BTreeMap::new();
        let given: RandomState = if by_value {
            let [low, high] = ["seed", "offset"].map(|name| g.host_scalar(name, DType::I64));
            scalars.extend([(low, seed as f64), (high, offset as f64)]);
            RandomState::by_value(low, high)
        } else {
            let given = g.tensor("state", DType::I32, rows(&[4]));
            inputs.push((given, state(seed, offset)));
            given.into()
        };
        let product = g.matmul("product", a, b, Precision::Fp32).expect("fits");
        let dropped = g.dropout("dropout", product, given, 0.5).expect("fits");
        g.store_as(dropped, "y", dtype, layout).expect("stores");
        let graph = g.finish().expect("valid");
        let one = |count: u64| {
            let mut bytes = vec![0; count as usize * dtype.bytes()];
            for element in bytes.chunks_exact_mut(dtype.bytes()) {
                verdigris_tensor::num::write_element(dtype, 1.0, element).expect("fits");
            }
            bytes
        };
        inputs.extend([(a, one(batch * m * k)), (b, one(k * n))]);
        assert_eq!(verdigris_graph::pattern::partition(&graph).expect("is cut").parts.len(), 1, "one launch");
        for got in results_with(&graph, &inputs, &scalars, dropped) {
            for number in 0..layout.elements() {
                let place = layout.offset_of_position(number).expect("within") as usize;
                let element = &got[place * dtype.bytes()..][..dtype.bytes()];
                let is_dropped = uniform(seed, offset, number) < 0.5;
                let value = verdigris_tensor::num::read_element(dtype, element).expect("an element");
                assert_eq!(value, if is_dropped { 0.0 } else { 2.0 * k as f64 }, "element {number} of {layout:?}");
            }
        }
    }
}
