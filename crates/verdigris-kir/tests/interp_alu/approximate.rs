//! Approximate instructions: special values, distance from the exact result with and without noise, and what is rounded correctly.

use crate::{F32, Random, one, run};
use verdigris_kir::inst::{Division, Op};
use verdigris_kir::interp::alu::{Lanes, Noise, eval};
use verdigris_kir::ir::Ty;

#[test]
fn approximate_instructions_at_special_values() {
    let f = |x: f32| u64::from(x.to_bits());
    let at = |op: &Op, x: f32| f32::from_bits(one(op, &[f(x)]) as u32);
    let (inf, tiny) = (f32::INFINITY, 1e-40f32);
    let rcp = |ftz| Op::Rcp { ty: Ty::F32, approx: true, ftz };
    assert_eq!((at(&rcp(false), -0.0), at(&rcp(false), 0.0), at(&rcp(true), tiny), at(&rcp(true), -tiny)), (-inf, inf, inf, -inf));
    assert_eq!(at(&rcp(false), -inf).to_bits(), 0x8000_0000);
    assert_eq!(at(&rcp(true), 2f32.powi(127)), 0.0);
    let ex2 = Op::Ex2 { ty: Ty::F32, ftz: true };
    assert_eq!(
        (at(&ex2, -inf), at(&ex2, inf), at(&ex2, 0.0), at(&ex2, -tiny), at(&ex2, -130.0), at(&ex2, 3.0)),
        (0.0, inf, 1.0, 1.0, 0.0, 8.0)
    );
    let lg2 = Op::Lg2 { ftz: true };
    assert_eq!(
        (at(&lg2, 0.0), at(&lg2, -0.0), at(&lg2, tiny), at(&lg2, inf), at(&lg2, 1.0), at(&lg2, 8.0)),
        (-inf, -inf, -inf, inf, 0.0, 3.0)
    );
    assert_eq!(one(&lg2, &[f(-1.0)]), 0x7fff_ffff);
    let rsqrt = Op::Rsqrt { ty: Ty::F32, ftz: false };
    assert_eq!((at(&rsqrt, -0.0), at(&rsqrt, 0.0), at(&rsqrt, inf), at(&rsqrt, 0.25)), (-inf, inf, 0.0, 2.0));
    assert_eq!(one(&rsqrt, &[f(-1.0)]), 0x7fff_ffff);
    let sqrt = Op::Sqrt { ty: Ty::F32, approx: true, ftz: false };
    assert_eq!(at(&sqrt, -0.0).to_bits(), 0x8000_0000);
    assert_eq!(one(&Op::Sin { ftz: false }, &[f(inf)]), 0x7fff_ffff);
    assert_eq!((at(&Op::Sin { ftz: false }, -0.0).to_bits(), at(&Op::Cos { ftz: false }, -0.0)), (0x8000_0000, 1.0));
    let tanh = Op::Tanh { ty: Ty::F32 };
    assert_eq!((at(&tanh, inf), at(&tanh, -inf), at(&tanh, -0.0).to_bits()), (1.0, -1.0, 0x8000_0000));
    let approx = |a: f32, b: f32| one(&Op::FDiv { ty: Ty::F32, kind: Division::Approx, ftz: false }, &[f(a), f(b)]);
    assert_eq!((approx(3.0, 2f32.powi(127)), approx(inf, 2f32.powi(127))), (0, 0x7fff_ffff));
    let full = Op::FDiv { ty: Ty::F32, kind: Division::Full, ftz: false };
    assert_eq!(one(&full, &[f(2f32.powi(127)), f(2f32.powi(127))]), f(1.0));
    assert_eq!(one(&Op::Rcp { ty: Ty::F64, approx: true, ftz: true }, &[3f64.to_bits()]), (1.0f64 / 3.0).to_bits() >> 32 << 32);
}

#[test]
fn noise_stays_inside_the_bound_and_depends_on_the_seed() {
    let mut random = Random(0x5eed_0006);
    let value = |bits: u64| f64::from(f32::from_bits(bits as u32));
    let ulp = |x: f64| verdigris_tensor::num::Format::F32.ulp(x);
    type Case = (Op, fn(f64) -> f64, fn(f64, f64) -> f64, f32, f32);
    let cases: [Case; 8] = [
        (Op::Rcp { ty: Ty::F32, approx: true, ftz: true }, |x| 1.0 / x, |_, u| u, 1e-30, 1e30),
        (Op::Sqrt { ty: Ty::F32, approx: true, ftz: true }, f64::sqrt, |e, u| (e * 2f64.powi(-23)).max(0.51 * u), 1e-30, 1e30),
        (Op::Rsqrt { ty: Ty::F32, ftz: true }, |x| 1.0 / x.sqrt(), |e, _| e * 2f64.powf(-22.9), 1e-30, 1e30),
        (Op::Ex2 { ty: Ty::F32, ftz: true }, f64::exp2, |_, u| 2.0 * u, 0.001, 100.0),
        (Op::Lg2 { ftz: true }, f64::log2, |e, u| (e.abs() * 2f64.powi(-22)).max(2f64.powi(-22)).max(0.5 * u), 1e-30, 1e30),
        (Op::Sin { ftz: true }, f64::sin, |_, _| 2f64.powf(-20.5), 0.001, 3.1),
        (Op::Cos { ftz: true }, f64::cos, |_, _| 2f64.powf(-20.5), 0.001, 3.1),
        (Op::Tanh { ty: Ty::F32 }, f64::tanh, |e, _| e * 2f64.powi(-11), 0.001, 5.0),
    ];
    for (op, exact, bound, low, high) in cases {
        let a: Lanes = std::array::from_fn(|_| {
            let t = random.below(1 << 20) as f64 / f64::from(1 << 20);
            let (low, high) = (f64::from(low), f64::from(high));
            u64::from(((low * (high / low).powf(t)) as f32).to_bits())
        });
        let with = |seed: u64| {
            let mut outs = [[0; 32]];
            eval(&op, &[&a], u32::MAX, &mut outs, Some(Noise::new(seed))).unwrap();
            outs[0]
        };
        let (clean, noisy, again, other) = (run(&op, &[a]), with(1), with(1), with(2));
        assert_eq!(noisy, again);
        assert_ne!(noisy, other, "{op:?}");
        assert_ne!(noisy, clean, "{op:?}");
        for i in 0..32 {
            let e = exact(value(a[i]));
            for got in [clean[i], noisy[i], other[i]] {
                assert!((value(got) - e).abs() <= bound(e, ulp(e)) * 1.0000001, "{op:?} of {} gives {} not {e}", value(a[i]), value(got));
            }
        }
    }
}

#[test]
fn division_and_roots_are_correctly_rounded() {
    // f64 has more than twice the bits of f32, so rounding its quotient or root once more is innocuous.
    let mut random = Random(0x5eed_0007);
    let value = |bits: u64| f64::from(f32::from_bits(bits as u32));
    for _ in 0..200 {
        let a: Lanes = std::array::from_fn(|_| F32.random(&mut random, 0));
        let b: Lanes = std::array::from_fn(|i| F32.random(&mut random, a[i]));
        let positive: Lanes = a.map(|a| a & 0x7fff_ffff);
        let quotient = run(&Op::FDiv { ty: Ty::F32, kind: Division::Ieee, ftz: false }, &[a, b]);
        let reciprocal = run(&Op::Rcp { ty: Ty::F32, approx: false, ftz: false }, &[b]);
        let root = run(&Op::Sqrt { ty: Ty::F32, approx: false, ftz: false }, &[positive]);
        for i in 0..32 {
            let same = |got: u64, exact: f64| {
                let expected = exact as f32;
                let equal = if expected.is_nan() { got == 0x7fff_ffff } else { got == u64::from(expected.to_bits()) };
                assert!(equal, "{:#x} {:#x}: {got:#x} not {expected}", a[i], b[i]);
            };
            // Subnormal quotients lose bits twice; the exact check of those is the next test's.
            let exact = value(a[i]) / value(b[i]);
            if exact.is_nan() || exact.abs() >= 2f64.powi(-126) || exact == 0.0 {
                same(quotient[i], exact);
            }
            if (1.0 / value(b[i])).abs() >= 2f64.powi(-126) {
                same(reciprocal[i], 1.0 / value(b[i]));
            }
            same(root[i], value(positive[i]).sqrt());
        }
    }
    let f = |x: f32| u64::from(x.to_bits());
    let div = |ftz| Op::FDiv { ty: Ty::F32, kind: Division::Ieee, ftz };
    // 3·2⁻¹⁴⁹ / 2 is halfway between two subnormals: the even one.
    assert_eq!(one(&div(false), &[3, f(2.0)]), 2);
    assert_eq!(one(&div(true), &[f(f32::MIN_POSITIVE), f(2.0)]), 0);
    assert_eq!(one(&div(false), &[0, 0]), 0x7fff_ffff);
    assert_eq!(
        one(&Op::FDiv { ty: Ty::F64, kind: Division::Ieee, ftz: false }, &[1f64.to_bits(), 3f64.to_bits()]),
        (1.0f64 / 3.0).to_bits()
    );
    assert_eq!(one(&Op::Sqrt { ty: Ty::F64, approx: false, ftz: false }, &[(-1f64).to_bits()]), 0xfff8_0000_0000_0000);
}

#[test]
fn approximate_halves_stay_inside_their_bounds() {
    use verdigris_tensor::num::{bf16_to_f32, f16_to_f32};
    type Case = (Ty, fn(u16) -> f32, fn(f64) -> f64, fn(f64) -> f64);
    let cases: [(bool, Case); 4] = [
        (false, (Ty::F16, f16_to_f32, f64::exp2, |e| (e * 2f64.powf(-9.9)).max(2f64.powi(-24)))),
        (false, (Ty::Bf16, bf16_to_f32, f64::exp2, |e| e * 2f64.powi(-7))),
        (true, (Ty::F16, f16_to_f32, f64::tanh, |_| 2f64.powf(-10.987))),
        (true, (Ty::Bf16, bf16_to_f32, f64::tanh, |_| 2f64.powi(-8))),
    ];
    for (tanh, (ty, decode, exact, bound)) in cases {
        let op = if tanh { Op::Tanh { ty } } else { Op::Ex2 { ty, ftz: ty == Ty::Bf16 } };
        for seed in [None, Some(1), Some(2)] {
            for first in (0..=0xffffu32).step_by(32 * 17) {
                let a: Lanes = std::array::from_fn(|i| u64::from((first + i as u32 * 17) as u16));
                let mut outs = [[0; 32]];
                let noise = seed.map(Noise::new);
                eval(&op, &[&a], u32::MAX, &mut outs, noise).unwrap();
                for i in 0..32 {
                    let x = f64::from(decode(a[i] as u16));
                    let got = f64::from(decode(outs[0][i] as u16));
                    let e = exact(x);
                    let highest = if ty == Ty::F16 { 65504.0 } else { 3.38e38 };
                    if x.is_nan() {
                        assert_eq!(outs[0][i], 0x7fff);
                    } else if e <= highest && e.abs() >= 2f64.powi(-126) {
                        assert!((got - e).abs() <= bound(e) * 1.0000001, "{op:?} of {x} gives {got}, exactly {e}");
                    }
                }
            }
        }
    }
}
