//! Pointwise functions over the whole range of their arguments, by the interpreter, against the host's f64: closer than the tolerances of
//! the corpus ask for. And gradients where numbers that come in are infinite, or far from 1.

use std::collections::BTreeMap;

use verdigris_engines::arch::Arch;
use verdigris_engines::engines;
use verdigris_engines::interpret::Parts;
use verdigris_graph::pattern::partition;
use verdigris_graph::{BatchNormBackward, BinaryOp, GraphBuilder, Uid, UnaryOp};
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_reference::data::Random;
use verdigris_reference::masked::{MaskedGradient, masked_gradients};
use verdigris_tensor::{DType, Layout, num};

/// Runs `f` on columns of operands, in one type.
fn run(dtype: DType, columns: &[Vec<f64>], build: impl Fn(&mut GraphBuilder, &[verdigris_graph::Uid]) -> verdigris_graph::Uid) -> Vec<f64> {
    let count = columns[0].len();
    let layout = || Layout::row_major(&[count as u64]).expect("a small layout");
    let mut g = GraphBuilder::new("function");
    let inputs: Vec<_> = columns.iter().map(|_| g.tensor("x", dtype, layout())).collect();
    let y = build(&mut g, &inputs);
    g.store(y, "y", dtype).expect("a known tensor");
    let parts = partition(&g.finish().expect("a valid graph")).expect("a partition").parts;
    let [part] = &parts[..] else { panic!("one map") };
    let arch = Arch::virtual_device(2);
    let candidate = verdigris_engines::engine("map.simt").expect("registered").accept(&part.problem, &arch).expect("it takes every map");
    let space = candidate.knobs();
    let program = candidate.program(space.default_config()).expect("the default config");
    let mut memory = Memory::new();
    for uid in &part.bindings {
        let bytes = match inputs.iter().position(|input| input == uid) {
            Some(column) if dtype == DType::F64 => columns[column].iter().flat_map(|value| value.to_le_bytes()).collect(),
            Some(column) => columns[column].iter().flat_map(|&value| (value as f32).to_le_bytes()).collect::<Vec<u8>>(),
            None => vec![0xa5; count * dtype.bytes()],
        };
        memory.add(&bytes);
    }
    let output = part.bindings.iter().position(|uid| *uid == y).expect("the output is bound");
    let options = Options { float_noise: Some(1), ..Options::schedule(1) };
    interp::run(&program, &Kernels::new(), &mut memory, &options).unwrap_or_else(|findings| panic!("{findings}"));
    let bytes = memory.to_vec(output);
    if dtype == DType::F64 {
        bytes.chunks_exact(8).map(|chunk| f64::from_le_bytes(chunk.try_into().expect("eight bytes"))).collect()
    } else {
        bytes.chunks_exact(4).map(|chunk| f64::from(f32::from_le_bytes(chunk.try_into().expect("four bytes")))).collect()
    }
}

/// What a function did not take, or holds constant, gets 0 and no product with 0, whatever comes in, in every config of every engine.
#[test]
fn what_plays_no_part_masks_infinities() {
    let engines: Vec<_> = engines().collect();
    for case in [DType::F32, DType::F64].into_iter().flat_map(|dtype| masked_gradients(dtype).expect("valid graphs")) {
        let parts = Parts::all(&case.graph, &Arch::virtual_device(2), &engines).expect("a partition");
        assert!(parts.variants() > 0, "{}: {:?}", case.name, parts.refusals);
        for variant in 0..parts.variants() {
            let mut buffers = case.inputs.buffers.clone();
            buffers.extend(case.want.iter().map(|(uid, want)| (*uid, vec![0xa5; want.len() * dtype_of(&case, *uid).bytes()])));
            let options = Options { float_noise: Some(1), ..Options::schedule(1) };
            parts
                .interpret(variant, &mut buffers, &case.inputs.scalars, &Kernels::new(), &options)
                .unwrap_or_else(|finding| panic!("{}: {finding}", case.name));
            for (uid, want) in &case.want {
                let dtype = dtype_of(&case, *uid);
                let elements = buffers[uid].chunks_exact(dtype.bytes());
                let got: Vec<f64> = elements.map(|bytes| num::read_element(dtype, bytes).expect("whole")).collect();
                let is_right = got.iter().zip(want).all(|(got, want)| MaskedGradient::is_right(*got, *want));
                assert!(is_right && got.len() == want.len(), "{}, variant {variant}: {got:?}, not {want:?}", case.name);
            }
        }
    }
}

/// Of channels far from 1 each part of dx is within the range of f32, and so is what it is made of.
#[test]
fn gradients_of_batch_normalization_far_from_1() {
    const ROWS: usize = 64;
    const CHANNELS: usize = 8;
    let engines: Vec<_> = engines().collect();
    let mut random = Random::new(5);
    let f32s = |values: &[f64]| values.iter().flat_map(|&value| (value as f32).to_le_bytes()).collect::<Vec<u8>>();
    for (size, dy_size) in [(1.0, 1.0), (1e18, 1e-10), (1e16, 1e-12), (1e-19, 1e10), (1e-25, 1.0)] {
        let mut drawn = |size: f64| -> Vec<f64> { (0..ROWS * CHANNELS).map(|_| f64::from((size * random.normal()) as f32)).collect() };
        let (x, dy) = (drawn(size), drawn(dy_size));
        let of_channel =
            |values: &dyn Fn(usize) -> f64, channel: usize| -> f64 { (0..ROWS).map(|row| values(row * CHANNELS + channel)).sum() };
        let means: Vec<f64> = (0..CHANNELS).map(|channel| f64::from((of_channel(&|i| x[i], channel) / ROWS as f64) as f32)).collect();
        let deviation = |i: usize| x[i] - means[i % CHANNELS];
        let variance = |channel: usize| of_channel(&|i| deviation(i).powi(2), channel) / ROWS as f64;
        let invs: Vec<f64> = (0..CHANNELS).map(|channel| f64::from((1.0 / variance(channel).sqrt()) as f32)).collect();
        // The three parts of dx.
        let parts = |i: usize| {
            let channel = i % CHANNELS;
            let normalized = |i: usize| deviation(i) * invs[i % CHANNELS];
            let (dbias, dscale) = (of_channel(&|i| dy[i], channel), of_channel(&|i| dy[i] * normalized(i), channel));
            [dy[i], -dbias / ROWS as f64, -normalized(i) * dscale / ROWS as f64].map(|part| part * invs[channel])
        };

        let mut g = GraphBuilder::new("far");
        let mut tensor = |name: &str, rows: usize| {
            g.tensor(name, DType::F32, Layout::row_major(&[rows as u64, CHANNELS as u64]).expect("a small layout"))
        };
        let [x_uid, dy_uid] = ["x", "dy"].map(|name| tensor(name, ROWS));
        let [mean_uid, inv_uid] = ["mean", "inv"].map(|name| tensor(name, 1));
        let back = BatchNormBackward::new(dy_uid, x_uid, mean_uid, inv_uid);
        let (dx, dscale, dbias, _) = g.batch_norm_backward("back", back).expect("it fits");
        for (uid, name) in [(dx, "dx"), (dscale, "dscale"), (dbias, "dbias")] {
            g.store(uid, name, DType::F32).expect("a known tensor");
        }
        let parts_of_graph = Parts::all(&g.finish().expect("a valid graph"), &Arch::virtual_device(2), &engines).expect("a partition");
        assert!(parts_of_graph.variants() > 0, "{:?}", parts_of_graph.refusals);
        for variant in 0..parts_of_graph.variants() {
            let mut buffers = BTreeMap::from([(x_uid, f32s(&x)), (dy_uid, f32s(&dy)), (mean_uid, f32s(&means)), (inv_uid, f32s(&invs))]);
            buffers.extend([(dx, ROWS * CHANNELS), (dscale, CHANNELS), (dbias, CHANNELS)].map(|(uid, count)| (uid, vec![0xa5; 4 * count])));
            parts_of_graph
                .interpret(variant, &mut buffers, &BTreeMap::new(), &Kernels::new(), &Options::schedule(1))
                .unwrap_or_else(|finding| panic!("{finding}"));
            for (i, bytes) in buffers[&dx].chunks_exact(4).enumerate() {
                let (got, parts) = (num::read_element(DType::F32, bytes).expect("whole"), parts(i));
                let (want, slack) = (parts.iter().sum::<f64>(), parts.iter().map(|part| part.abs()).sum::<f64>());
                // Sums of 64 terms of either sign, and some roundings more.
                let tolerance = f64::from(f32::EPSILON) * (8.0 * slack + 8.0 * dy_size * invs[i % CHANNELS]);
                assert!(
                    (got - want).abs() <= tolerance,
                    "x {size:e}, dy {dy_size:e}, variant {variant}, dx[{i}]: {got:e}, not {want:e} ± {tolerance:e}"
                );
            }
        }
    }
}

fn dtype_of(case: &MaskedGradient, uid: Uid) -> DType {
    case.graph.tensor(uid).expect("a result").dtype
}

/// Arguments of every size, both signs, and the edges.
fn arguments(dtype: DType, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    let range = if dtype == DType::F64 { 300 } else { 37 };
    let mut list = vec![0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, -1e-30, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    list.extend([1e22, -6.02e23, 1e35, 16.0 * std::f64::consts::PI, 710.0 / 8.0, -100.0, 88.5, -87.9, 3.0, -3.0, 20.0, -20.0]);
    for i in 0..485 {
        let unit = (random.bits() >> 11) as f64 / (1u64 << 53) as f64;
        let exponent = if i % 3 == 0 { random.below(2 * range) as i32 - range as i32 } else { random.below(5) as i32 - 3 };
        let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
        list.push(sign * (0.1 + 0.9 * unit) * 10f64.powi(exponent));
    }
    if dtype == DType::F64 { list } else { list.into_iter().map(|value| f64::from(value as f32)).collect() }
}

/// How far `got` may be from `want`: so many units in the last place, or an absolute error.
fn check(what: &str, dtype: DType, arguments: &[&[f64]], got: &[f64], want: impl Fn(usize) -> f64, units: f64, absolute: f64) {
    let epsilon = if dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
    for (i, &got) in got.iter().enumerate() {
        let exact = want(i);
        let want = if dtype == DType::F64 { exact } else { f64::from(exact as f32) };
        let smallest = if dtype == DType::F64 { 1e-300 } else { 2f64.powi(-149) };
        let near = (got - exact).abs() <= units * epsilon * exact.abs() + absolute * epsilon + 2.0 * smallest;
        let same = got == want || (got.is_nan() && want.is_nan());
        let at: Vec<f64> = arguments.iter().map(|column| column[i]).collect();
        assert!(near || same, "{what} in {dtype} of {at:?} is {got:e}, not {exact:e}");
    }
}

#[test]
fn functions_of_one_value() {
    type Case = (UnaryOp, fn(f64) -> f64, f64, f64);
    let cases: [Case; 13] = [
        (UnaryOp::Exp, f64::exp, 6.0, 0.0),
        (UnaryOp::Log, f64::ln, 3.0, 0.0),
        (UnaryOp::Sqrt, f64::sqrt, 1.0, 0.0),
        (UnaryOp::Rsqrt, |x| 1.0 / x.sqrt(), 4.0, 0.0),
        (UnaryOp::Reciprocal, |x| 1.0 / x, 1.0, 0.0),
        (UnaryOp::Sin, f64::sin, 4.0, 0.0),
        (UnaryOp::Cos, f64::cos, 4.0, 0.0),
        (UnaryOp::Tan, f64::tan, 8.0, 0.0),
        (UnaryOp::Ceil, f64::ceil, 0.0, 0.0),
        (UnaryOp::Floor, f64::floor, 0.0, 0.0),
        (UnaryOp::Round, f64::round_ties_even, 0.0, 0.0),
        (UnaryOp::Erf, |x| verdigris_reference::ops::pointwise::unary(UnaryOp::Erf, x), 6.0, 4.0),
        (UnaryOp::Mish, |x| x * (x.max(0.0) + (-x.abs()).exp().ln_1p()).tanh(), 12.0, 0.0),
    ];
    for dtype in [DType::F32, DType::F64] {
        for (f, want, units, absolute) in cases {
            // Long exponents lose what the reduced argument cannot hold.
            let units =
                if dtype == DType::F64 && matches!(f, UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Tan | UnaryOp::Exp) { 24.0 } else { units };
            let x = arguments(dtype, f.name().len() as u64);
            let got = run(dtype, std::slice::from_ref(&x), |g, x| g.unary("f", f, x[0]).expect("a known tensor"));
            let skips = |x: f64| f == UnaryOp::Mish && (x.is_infinite() || x < -80.0);
            check(f.name(), dtype, &[&x], &got, |i| if skips(x[i]) { got[i] } else { want(x[i]) }, units, absolute);
        }
    }
}

#[test]
fn functions_of_two_values() {
    type Case = (BinaryOp, fn(f64, f64) -> f64, f64);
    let cases: [Case; 5] = [
        (BinaryOp::Div, |x, z| x / z, 1.0),
        (BinaryOp::Mod, |x, z| x % z, 0.0),
        (BinaryOp::Atan2, f64::atan2, 5.0),
        (BinaryOp::Pow, f64::powf, 1.0),
        (BinaryOp::Pow, |x, z| x.powf(z), 1.0),
    ];
    for dtype in [DType::F32, DType::F64] {
        for (i, (f, want, units)) in cases.into_iter().enumerate() {
            let x = arguments(dtype, 7 + i as u64);
            // Every pair of edges, then random pairs.
            let mut z = arguments(dtype, 70 + i as u64);
            let edges = 11;
            let mut x = x;
            for (a, b) in (0..edges).flat_map(|a| (0..edges).map(move |b| (a, b))) {
                x.push(x[a]);
                z.push(z[b]);
            }
            let whole = i == 4;
            if whole {
                z.iter_mut().for_each(|z| *z = (z.clamp(-30.0, 30.0) * 2.0).round());
            }
            let got = run(dtype, &[x.clone(), z.clone()], |g, t| g.binary("f", f, t[0], t[1]).expect("known tensors"));
            // Of a power in f64 the logarithm's last place is multiplied by the exponent.
            let own = |i: usize| {
                if f == BinaryOp::Pow && dtype == DType::F64 { 8.0 + 4.0 * (z[i] * x[i].abs().ln()).abs().min(800.0) } else { units }
            };
            for j in 0..got.len() {
                check(f.name(), dtype, &[&x[j..=j], &z[j..=j]], &got[j..=j], |_| want(x[j], z[j]), own(j), 0.0);
            }
        }
    }
}
