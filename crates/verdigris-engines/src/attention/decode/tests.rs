//! What is taken, how keys are cut into parts, and the kernels on the interpreter where lengths, windows and parts meet.

use verdigris_graph::{AttentionPass, AttentionProblem, Corner, Determinism, HostScalar, Problem, Real, Slot, View};
use verdigris_kir::interp::{self, Kernels, Memory};
use verdigris_tensor::DType;

use super::super::ENGINES;
use super::super::half::Half;
use super::super::testing::{Numbers, from_half, halves, schedules};
use super::widen::Byte;
use super::{Config, Decode};
use crate::algorithm::{Algorithm, Listed};
use crate::arch::Arch;
use crate::engine::{Engine, Reason};

/// A small problem of two batches; tensors lie as `[b, s, h, d]`. Products have one element, so that scores are known without a sum.
#[derive(Clone, Copy)]
struct Case {
    ty: Half,
    group: usize,
    queries: usize,
    keys: usize,
    head: usize,
    value: usize,
    left: Option<u32>,
    right: Option<u32>,
    q_lengths: Option<[i32; 2]>,
    kv_lengths: Option<[i32; 2]>,
    sink: Option<f32>,
    /// Values are the first elements of the keys.
    latent: bool,
    /// The type of keys and values, where it is of 8 bits.
    cache: Option<Byte>,
}

const BATCH: usize = 2;
const KV_HEADS: usize = 2;
const SCALE: f64 = 0.5;

fn case(group: usize, queries: usize, keys: usize, head: usize) -> Case {
    let (left, right, q_lengths, kv_lengths, sink) = (None, None, None, None, None);
    Case { ty: Half::Bf16, group, queries, keys, head, value: head, left, right, q_lengths, kv_lengths, sink, latent: false, cache: None }
}

fn view(slot: usize, dtype: DType, strides: [usize; 4]) -> View {
    View { slot: Slot(slot as u32), dtype, offset: 0, strides: strides.map(|stride| stride as u64).to_vec() }
}

/// Numbers as they stand in memory, whole eighths of up to three bits.
fn bytes(byte: Byte, values: &[f32]) -> Vec<u8> {
    let (bias, fraction_bits) = match byte {
        Byte::E4m3 => (7, 3),
        Byte::E5m2 => (15, 2),
    };
    let one = |x: &f32| {
        let (bits, sign) = (x.to_bits(), if x.is_sign_negative() { 0x80 } else { 0 });
        match x {
            // Of either type.
            x if x.is_nan() => 0x7f,
            0.0 => sign,
            _ => {
                assert_eq!(bits << (9 + fraction_bits), 0, "{x} has more bits than {byte:?}");
                let exponent = ((bits >> 23) & 0xff) as i32 - 127 + bias;
                sign | (exponent as u8) << fraction_bits | ((bits & 0x7f_ffff) >> (23 - fraction_bits)) as u8
            }
        }
    };
    values.iter().map(one).collect()
}

/// Runs the case in each of `parts` parts under all schedules, and compares with the sums of its definition.
fn run(case: Case, parts: &[u32]) {
    let Case { ty, group, queries, keys, head, value, .. } = case;
    let heads = KV_HEADS * group;
    let mut numbers = Numbers::new((queries * 1000 + keys) as u64);
    let (q_first, mut k_first, mut v) =
        (numbers.take(BATCH * queries * heads), numbers.take(BATCH * keys * KV_HEADS), numbers.take(BATCH * keys * KV_HEADS * value));
    if case.cache.is_some() {
        k_first.iter_mut().chain(&mut v).for_each(|x| *x = (8.0 * *x).round() / 8.0);
    }
    let length = |of: Option<[i32; 2]>, b: usize, extent: usize| of.map_or(extent, |of| (of[b].max(0) as usize).min(extent));
    if case.latent {
        // As far as a key is a value, its elements are any; the first one is that which is multiplied.
        k_first.iter_mut().zip(v.chunks(value)).for_each(|(first, of_value)| *first = of_value[0] / 4.0);
    }
    // What is beyond a length is no number.
    for b in 0..BATCH {
        for key in length(case.kv_lengths, b, keys)..keys {
            for n in 0..KV_HEADS {
                let at = (b * keys + key) * KV_HEADS + n;
                k_first[at] = f32::NAN;
                v[at * value..][..value].fill(f32::NAN);
            }
        }
    }
    let first_of_rows = |first: &[f32]| -> Vec<f32> {
        first
            .iter()
            .flat_map(|x| std::iter::once(4.0 * x).chain(std::iter::repeat_n(if x.is_nan() { *x } else { 0.0 }, head - 1)))
            .collect()
    };
    let mut k_values = first_of_rows(&k_first);
    if case.latent {
        k_values.chunks_mut(head).zip(v.chunks(value)).for_each(|(of_key, of_value)| of_key[..value].copy_from_slice(of_value));
    }

    let (mut o_wanted, mut lse_wanted) = (Vec::new(), vec![0.0; BATCH * heads * queries]);
    for b in 0..BATCH {
        let (q_length, kv_length) = (length(case.q_lengths, b, queries), length(case.kv_lengths, b, keys));
        for query in 0..queries {
            let diagonal = query as i64 + kv_length as i64 - q_length as i64;
            let attended: Vec<usize> = (0..kv_length)
                .filter(|&key| query < q_length && case.left.is_none_or(|left| key as i64 >= diagonal - i64::from(left)))
                .filter(|&key| case.right.is_none_or(|right| key as i64 <= diagonal + i64::from(right)))
                .collect();
            for n in 0..heads {
                let own = |key: usize| (b * keys + key) * KV_HEADS + n / group;
                let x = f64::from(q_first[(b * queries + query) * heads + n]);
                let scores: Vec<f64> = attended.iter().map(|&key| SCALE * 16.0 * x * f64::from(k_first[own(key)])).collect();
                let sink = case.sink.filter(|_| query < q_length).map(f64::from);
                let lse = scores.iter().copied().chain(sink).map(f64::exp).sum::<f64>().ln();
                lse_wanted[(b * heads + n) * queries + query] = lse;
                for column in 0..value {
                    let terms = attended.iter().zip(&scores).map(|(&key, s)| (s - lse).exp() * f64::from(v[own(key) * value + column]));
                    let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()));
                    let unit = if ty == Half::Bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
                    o_wanted.push((sum, magnitude * (2.0 * unit + 1e-4) + 1e-6));
                }
            }
        }
    }

    let runs = parts.iter().flat_map(|&parts| schedules().into_iter().map(move |options| (parts, options)));
    for (parts, options) in runs {
        let mut memory = Memory::new();
        let kept = |values: &[f32]| case.cache.map_or_else(|| halves(ty, values), |byte| bytes(byte, values));
        let [q, k] = [halves(ty, &first_of_rows(&q_first)), kept(&k_values)].map(|values| memory.add(&values));
        let v = if case.latent { k } else { memory.add(&kept(&v)) };
        let (o, lse) = (memory.add_filled((o_wanted.len() * 2) as u64, 0xff), memory.add_filled((lse_wanted.len() * 4) as u64, 0xff));
        let [q_lengths, kv_lengths] = [case.q_lengths, case.kv_lengths]
            .map(|of| of.map(|of| memory.add(&of.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())));
        let sinks = case.sink.map(|sink| memory.add(&sink.to_le_bytes().repeat(heads)));
        let of_type = |dtype, slot, rows: usize, heads: usize, elements: usize| {
            view(slot, dtype, [rows * heads * elements, elements, heads * elements, 1])
        };
        let tensor = |slot, rows, heads, elements| of_type(ty.dtype(), slot, rows, heads, elements);
        let kept_type = case.cache.map_or(ty.dtype(), Byte::dtype);
        let problem = AttentionProblem {
            b: BATCH as u64,
            h: heads as u64,
            h_kv: KV_HEADS as u64,
            s_q: queries as u64,
            s_kv: keys as u64,
            q_rows: queries as u64,
            pages: 0,
            page_size: 0,
            blocks: 0,
            block_q: 0,
            block_kv: 0,
            kv_rows: keys as u64,
            d: head as u64,
            d_v: value as u64,
            compute: DType::F32,
            determinism: Determinism::Any,
            corner: Corner::BottomRight,
            left: case.left,
            right: case.right,
            soft_cap: None,
            q: tensor(q, queries, heads, head),
            k: of_type(kept_type, k, keys, KV_HEADS, head),
            v: of_type(kept_type, v, keys, KV_HEADS, if case.latent { head } else { value }),
            bias: None,
            mask: None,
            slopes: None,
            sinks: sinks.map(|slot| view(slot, DType::F32, [0, 1, 0, 0])),
            q_lengths: q_lengths.map(|slot| view(slot, DType::I32, [1, 0, 0, 0])),
            kv_lengths: kv_lengths.map(|slot| view(slot, DType::I32, [1, 0, 0, 0])),
            q_offsets: None,
            kv_offsets: None,
            page_table: None,
            block_map: None,
            mask_blocks: None,
            score: None,
            dropout: None,
            dropout_state: None,
            dropout_seed: None,
            q_descale: None,
            k_descale: None,
            v_descale: None,
            scale: HostScalar::Fixed(Real(SCALE)),
            pass: AttentionPass::Forward {
                o: tensor(o, queries, heads, value),
                log_sum_exp: Some(view(lse, DType::F32, [heads * queries, queries, 1, 0])),
                max_scores: None,
            },
        };
        let decode = Decode::accept(&Problem::Attention(problem), &Arch::virtual_device(2)).expect("accepted");
        let program = decode.lower(&Config { parts }).expect("lowered");
        let what = format!("{} in {parts} parts, seed {}", decode.spec, options.seed);
        if let Err(findings) = interp::run(&program, &Kernels::new(), &mut memory, &options) {
            panic!("{what}: {findings}");
        }
        for (i, (bytes, &(wanted, bound))) in memory.to_vec(o).chunks_exact(2).zip(&o_wanted).enumerate() {
            let got = from_half(ty, u16::from_le_bytes([bytes[0], bytes[1]]));
            assert!((got - wanted).abs() <= bound, "{what}: o[{i}] is {got}, wanted {wanted} ± {bound}");
        }
        for (i, (bytes, &wanted)) in memory.to_vec(lse).chunks_exact(4).zip(&lse_wanted).enumerate() {
            let got = f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
            let near = got == wanted || (got - wanted).abs() <= 2e-4 * (1.0 + wanted.abs());
            assert!(near, "{what}: log_sum_exp[{i}] is {got}, wanted {wanted}");
        }
    }
}

#[test]
fn parts_of_all_numbers() {
    // Three blocks with a ragged one: also more parts than blocks.
    run(case(2, 2, 300, 64), &[1, 2, 3, 5]);
    run(Case { ty: Half::F16, value: 40, ..case(1, 1, 150, 128) }, &[1, 2]);
}

#[test]
fn rows_of_two_tiles() {
    run(Case { right: Some(0), ..case(5, 15, 70, 16) }, &[1, 2]);
}

#[test]
fn values_longer_than_a_warp_has_columns() {
    run(Case { value: 200, ..case(2, 1, 100, 256) }, &[2]);
}

#[test]
fn lengths_before_which_anything_stands() {
    let short = Case { kv_lengths: Some([0, 1]), ..case(2, 2, 300, 64) };
    run(short, &[1, 3]);
    run(Case { sink: Some(0.5), ..short }, &[1, 3]);
    run(Case { kv_lengths: Some([127, 129]), q_lengths: Some([1, 0]), right: Some(0), ..short }, &[1, 2]);
}

#[test]
fn lengths_of_a_cache_of_8_bits_before_which_anything_stands() {
    for cache in Byte::ALL {
        let short = Case { cache: Some(cache), kv_lengths: Some([0, 1]), ..case(2, 2, 300, 64) };
        run(short, &[1, 3]);
        run(Case { kv_lengths: Some([127, 129]), q_lengths: Some([1, 0]), right: Some(0), sink: Some(0.5), ..short }, &[1, 2]);
        run(Case { ty: Half::F16, kv_lengths: Some([63, 65]), cache: Some(cache), ..case(1, 1, 150, 128) }, &[1, 2]);
    }
}

#[test]
fn windows_within_parts() {
    run(Case { left: Some(60), right: Some(0), kv_lengths: Some([200, 300]), ..case(2, 3, 300, 128) }, &[1, 2, 4]);
    // The first queries attend to no key.
    run(Case { right: Some(0), kv_lengths: Some([2, 3]), sink: Some(-1.0), ..case(1, 4, 70, 64) }, &[1, 2]);
}

#[test]
fn values_in_the_keys() {
    let latent = |group, queries, keys| Case { value: 512, latent: true, ..case(group, queries, keys, 576) };
    run(latent(3, 2, 130), &[1, 2]);
    run(Case { ty: Half::F16, value: 264, ..latent(1, 1, 64) }, &[1]);
}

#[test]
fn values_in_the_keys_before_which_anything_stands() {
    let latent = Case { value: 512, latent: true, ..case(2, 2, 140, 576) };
    run(Case { kv_lengths: Some([0, 1]), sink: Some(0.5), ..latent }, &[2]);
    run(Case { kv_lengths: Some([95, 129]), q_lengths: Some([1, 2]), right: Some(0), ..latent }, &[1, 3]);
}

#[test]
fn long_heads_are_taken_where_values_are_the_first_elements_of_keys() {
    let words = |v: &str| format!("attention forward bf16 b=2 h=16 h_kv=1 s_q=1 s_kv=1000 d=576 d_v=512 v={v} kv_lengths=i32 o=bhsd");
    let taken = |words: &str| Decode::accept(&parsed(words), &Arch::h200()).map(|decode| decode.spec.latent);
    assert!(taken(&words("(576000,0,576,1):@1")).expect("the first elements"));
    // Another tensor, and other elements of the keys.
    for v in ["bhsd", "(576000,0,576,1)", "(576000,0,576,1):+64:@1"] {
        let refusal = taken(&words(v)).expect_err(v);
        assert!(refusal.reason == Reason::Extent && refusal.to_string().contains("first elements of the keys"), "{refusal}");
    }
    // Shorter heads have kernels that read both.
    assert!(!taken("attention forward bf16 b=1 h=4 h_kv=1 s_q=1 s_kv=100 d=128 d_v=64 v=(0,0,128,1):@1 o=bhsd").expect("taken"));
    let long = "attention forward bf16 b=1 h=4 h_kv=1 s_q=1 s_kv=100 d=576 d_v=520 v=(0,0,576,1):@1 o=bhsd";
    assert_eq!(taken(long).expect_err(long).reason, Reason::Extent);
}

#[test]
fn keys_that_are_values_are_read_once() {
    let us = |words: &str| {
        let candidate = Listed::<Decode>::new().accept(&parsed(words), &Arch::h200()).expect("taken");
        candidate.cost(&candidate.best()).expect("listed").us
    };
    let latent = us("attention forward bf16 b=64 h=16 h_kv=1 s_q=1 s_kv=8192 d=576 d_v=512 v=(4718592,0,576,1):@1 o=bhsd");
    // 604 MB at 4.8 TB/s.
    assert!((126.0..260.0).contains(&latent), "{latent} µs");
}

fn parsed(words: &str) -> Problem {
    let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
    problem.canonical().expect("legal")
}

#[test]
fn parts_fill_the_chip_and_many_batches_have_few() {
    let best = |words: &str| {
        let candidate = Listed::<Decode>::new().accept(&parsed(words), &Arch::h200()).expect("taken");
        candidate.best().value("parts").expect("the knob")
    };
    let one = best("attention forward bf16 b=1 h=32 h_kv=8 s_q=1 s_kv=8192 d=128");
    assert!((8..=40).contains(&one), "{one} parts of 8 heads on 132 SMs");
    let long = best("attention forward bf16 b=1 h=8 h_kv=1 s_q=1 s_kv=131072 d=128");
    assert!(long >= 64, "{long} parts of one head on 132 SMs");
    let many = best("attention forward bf16 b=32 h=32 h_kv=8 s_q=1 s_kv=8192 d=128");
    assert!(many <= 4, "{many} parts of 256 heads on 132 SMs");
    assert_eq!(best("attention forward bf16 b=64 h=32 h_kv=8 s_q=1 s_kv=256 d=128"), 1);
}

#[test]
fn few_queries_to_many_keys_are_estimated_faster_than_elsewhere() {
    let us = |engine: &str, words: &str| {
        let engine = ENGINES.iter().find(|known| known.id().name == engine).expect("in the table");
        let candidate = engine.accept(&parsed(words), &Arch::h200()).expect("taken");
        candidate.cost(&candidate.best()).expect("listed").us
    };
    for words in [
        "attention forward bf16 b=1 h=32 h_kv=8 s_q=1 s_kv=8192 d=128",
        "attention forward bf16 b=8 h=32 h_kv=8 s_q=1 s_kv=2048 d=128",
        "attention forward bf16 b=32 h=32 h_kv=8 s_q=4 s_kv=8192 d=128",
        "attention forward f16 b=4 h=16 h_kv=2 s_q=1 s_kv=32768 d=256",
    ] {
        let [decode, forward] = ["attention.decode", "attention.forward"].map(|engine| us(engine, words));
        assert!(decode < forward, "{words}: {decode} µs by attention.decode, {forward} by attention.forward");
    }
}

#[test]
fn a_cache_of_8_bits_beside_queries_that_are_not() {
    let taken = |words: &str| Decode::accept(&parsed(words), &Arch::h200());
    let of = |cache: &str, rest: &str| {
        format!("attention forward bf16 b=2 h=8 h_kv=2 {rest} k=bhsd:{cache} v=bhsd:{cache} k_descale=head:f32 v_descale=one:f32")
    };
    for (cache, byte) in [("e4m3", Byte::E4m3), ("e5m2", Byte::E5m2)] {
        let words = of(cache, "s_q=1 s_kv=1000 d=128");
        assert_eq!(taken(&words).expect(&words).spec.cache, Some(byte), "{words}");
    }
    // There is no other engine of tensor cores for them.
    assert!(taken(&of("e4m3", "s_q=500 s_kv=1000 d=64")).is_ok());
    // Lines of 24 bytes.
    assert_eq!(taken(&of("e4m3", "s_q=1 s_kv=1000 d=24")).expect_err("24").reason, Reason::Alignment);
    // Half of the bytes are estimated as less time. (An H200 takes 0.82 of the time: what widens waits for shared memory, which the estimate does not count.)
    let us = |words: &str| {
        let candidate = Listed::<Decode>::new().accept(&parsed(words), &Arch::h200()).expect("taken");
        candidate.cost(&candidate.best()).expect("listed").us
    };
    let [wide, kept] = ["k=bhsd v=bhsd", "k=bhsd:e4m3 v=bhsd:e4m3"]
        .map(|keys| us(&format!("attention forward bf16 b=32 h=32 h_kv=8 s_q=1 s_kv=8192 d=128 {keys}")));
    assert!((0.4..0.8).contains(&(kept / wide)), "{kept} us, {wide} of 16 bits");
}

#[test]
fn what_others_take_is_refused_by_name() {
    let refused = |words: &str| Decode::accept(&parsed(words), &Arch::h200()).expect_err(words).reason;
    assert_eq!(refused("attention forward bf16 b=1 h=1 s_q=65 s_kv=100 d=64"), Reason::Extent);
    assert_eq!(refused("attention forward bf16 b=1 h=1 s_q=1 s_kv=100 d=264"), Reason::Extent);
    assert_eq!(refused("attention forward f32 b=1 h=1 s_q=1 s_kv=100 d=64"), Reason::DType);
    assert_eq!(refused("attention backward bf16 b=1 h=1 s_q=1 s_kv=100 d=64 log_sum_exp=f32 dq=bhsd"), Reason::Direction);
    assert_eq!(refused("gemm bf16 m=4 n=4 k=4"), Reason::Problem);
}
