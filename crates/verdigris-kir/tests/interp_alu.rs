//! The interpreter's arithmetic against exact arithmetic of its own: wide fixed point for rounding, 128-bit integers, bit loops.

mod interp_alu {
    mod approximate;
}

use verdigris_kir::inst::{Cmp, CvtRound, Op, Packed, Round};
use verdigris_kir::interp::alu::{EvalError, Lanes, eval};
use verdigris_kir::ir::Ty;

/// Seeded random bits.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

const SENTINEL: u64 = 0xdead_beef_0bad_cafe;

/// One lane's results of an operation; all 32 lanes compute, and a second run with half of them checks that the others stay untouched.
fn run(op: &Op, operands: &[Lanes]) -> Lanes {
    let ins: Vec<&Lanes> = operands.iter().collect();
    let mut outs = [[SENTINEL; 32]];
    eval(op, &ins, u32::MAX, &mut outs, None).unwrap();
    let mut half = [[SENTINEL; 32]];
    eval(op, &ins, 0x5555_5555, &mut half, None).unwrap();
    for lane in 0..32 {
        let expected = if lane % 2 == 0 { outs[0][lane] } else { SENTINEL };
        assert_eq!(half[0][lane], expected, "{op:?} lane {lane}");
    }
    outs[0]
}

fn one(op: &Op, operands: &[u64]) -> u64 {
    let lanes: Vec<Lanes> = operands.iter().map(|&x| [x; 32]).collect();
    run(op, &lanes)[0]
}

// ---- exact values ------------------------------------------------------------------------------------------------------

const WORDS: usize = 72;
/// The weight of bit 0 is 2^-ORIGIN: below the square of the smallest f64.
const ORIGIN: i32 = 2176;

/// A number in two's complement fixed point, wide enough for any f64 product.
#[derive(Clone, PartialEq)]
struct Fixed([u64; WORDS]);

impl Fixed {
    fn zero() -> Self {
        Fixed([0; WORDS])
    }

    fn add(&mut self, negative: bool, magnitude: u128, exponent: i32) {
        let position = (exponent + ORIGIN) as usize;
        let mut term = [0u64; WORDS];
        for bit in 0..128 {
            if magnitude >> bit & 1 == 1 {
                term[(position + bit) / 64] |= 1 << ((position + bit) % 64);
            }
        }
        if negative {
            let mut carry = true;
            for word in &mut term {
                let (value, overflow) = (!*word).overflowing_add(u64::from(carry));
                *word = value;
                carry = overflow;
            }
        }
        let mut carry = false;
        for (word, add) in self.0.iter_mut().zip(term) {
            let (value, first) = word.overflowing_add(add);
            let (value, second) = value.overflowing_add(u64::from(carry));
            *word = value;
            carry = first || second;
        }
    }

    fn sign(&self) -> i32 {
        if self.0[WORDS - 1] >> 63 == 1 { -1 } else { i32::from(self.0.iter().any(|&word| word != 0)) }
    }
}

#[derive(Clone, Copy, Debug)]
struct Float {
    ty: Ty,
    exponent_bits: u32,
    mantissa_bits: u32,
}

const F16: Float = Float { ty: Ty::F16, exponent_bits: 5, mantissa_bits: 10 };
const BF16: Float = Float { ty: Ty::Bf16, exponent_bits: 8, mantissa_bits: 7 };
const F32: Float = Float { ty: Ty::F32, exponent_bits: 8, mantissa_bits: 23 };
const F64: Float = Float { ty: Ty::F64, exponent_bits: 11, mantissa_bits: 52 };
const FLOATS: [Float; 4] = [F16, BF16, F32, F64];

impl Float {
    fn bits(self) -> u32 {
        1 + self.exponent_bits + self.mantissa_bits
    }

    fn infinity(self) -> u64 {
        ((1 << self.exponent_bits) - 1) << self.mantissa_bits
    }

    fn sign(self, code: u64) -> bool {
        code >> (self.bits() - 1) & 1 == 1
    }

    fn magnitude(self, code: u64) -> u64 {
        code & ((1 << (self.bits() - 1)) - 1)
    }

    fn is_nan(self, code: u64) -> bool {
        self.magnitude(code) > self.infinity()
    }

    /// Codes in order of value: the code with sign and magnitude as a number.
    fn ordinal(self, code: u64) -> i64 {
        let magnitude = self.magnitude(code) as i64;
        if self.sign(code) { -magnitude } else { magnitude }
    }

    /// Significand and exponent of a magnitude; infinity counts as the power of two behind the largest number.
    fn parts(self, magnitude: u64) -> (u128, i32) {
        let bias = (1 << (self.exponent_bits - 1)) - 1;
        let field = (magnitude >> self.mantissa_bits) as i32;
        let fraction = u128::from(magnitude & ((1 << self.mantissa_bits) - 1));
        let lowest = 1 - bias - self.mantissa_bits as i32;
        if field == 0 { (fraction, lowest) } else { (fraction | 1 << self.mantissa_bits, lowest + field - 1) }
    }

    fn add_value(self, to: &mut Fixed, negate: bool, ordinal: i64) {
        let (significand, exponent) = self.parts(ordinal.unsigned_abs());
        to.add((ordinal < 0) != negate, significand, exponent);
    }

    /// Asserts that `code` is `exact` rounded in the direction of `round`.
    fn assert_rounded(self, exact: &Fixed, code: u64, round: Round, what: &dyn Fn() -> String) {
        assert!(!self.is_nan(code), "{} gives NaN", what());
        let ordinal = self.ordinal(code);
        let limit = self.infinity() as i64;
        // Twice the exact value less a sum of two neighbours tells the side of their middle; less twice one value, the side of it.
        let against = |first: i64, second: i64| {
            let mut rest = exact.clone();
            let copy = exact.clone();
            let mut carry = false;
            for (word, add) in rest.0.iter_mut().zip(copy.0) {
                let (value, a) = word.overflowing_add(add);
                let (value, b) = value.overflowing_add(u64::from(carry));
                *word = value;
                carry = a || b;
            }
            self.add_value(&mut rest, true, first);
            self.add_value(&mut rest, true, second);
            rest.sign()
        };
        let at = against(ordinal, ordinal);
        let ok = match round {
            Round::Nearest => {
                let even = ordinal & 1 == 0;
                let above = ordinal == limit || {
                    let side = against(ordinal, ordinal + 1);
                    side < 0 || (side == 0 && even)
                };
                let below = ordinal == -limit || {
                    let side = against(ordinal, ordinal - 1);
                    side > 0 || (side == 0 && even)
                };
                above && below
            }
            Round::Down => {
                at >= 0 && (ordinal + 1 >= limit || against(ordinal + 1, ordinal + 1) < 0)
                    || ordinal == -limit && against(-limit + 1, -limit + 1) < 0
            }
            Round::Up => {
                at <= 0 && (ordinal - 1 <= -limit || against(ordinal - 1, ordinal - 1) > 0)
                    || ordinal == limit && against(limit - 1, limit - 1) > 0
            }
            Round::Zero => {
                let sign = exact.sign();
                if sign >= 0 {
                    ordinal >= 0 && ordinal < limit && at >= 0 && (ordinal + 1 == limit || against(ordinal + 1, ordinal + 1) < 0)
                } else {
                    ordinal <= 0 && ordinal > -limit && at <= 0 && (ordinal - 1 == -limit || against(ordinal - 1, ordinal - 1) > 0)
                }
            }
        };
        assert!(ok, "{} rounded {round:?} gives {code:#x}", what());
        if exact.sign() != 0 {
            assert_eq!(self.sign(code), exact.sign() < 0, "{}: sign of {code:#x}", what());
        }
    }

    /// A finite number: any exponent, exponents near another number's, few significant bits, subnormals and the largest.
    fn random(self, random: &mut Random, near: u64) -> u64 {
        let sign = random.below(2) << (self.bits() - 1);
        let fraction_mask = (1u64 << self.mantissa_bits) - 1;
        let fields = (1u64 << self.exponent_bits) - 1;
        let fraction = match random.below(4) {
            0 => 0,
            1 => fraction_mask & !((1 << random.below(u64::from(self.mantissa_bits))) - 1),
            _ => random.next() & fraction_mask,
        };
        let field = match random.below(6) {
            0 => random.below(3),
            1 => fields - 1 - random.below(2),
            2 | 3 => (self.magnitude(near) >> self.mantissa_bits).saturating_add(random.below(7)).saturating_sub(3).min(fields - 1),
            4 => (fields / 2 + random.below(9)).saturating_sub(4),
            _ => random.below(fields),
        };
        sign | field << self.mantissa_bits | fraction
    }
}

const ROUNDS: [Round; 4] = [Round::Nearest, Round::Zero, Round::Down, Round::Up];

#[test]
fn sums_products_and_fused_sums_round_once_in_every_direction() {
    let mut random = Random(0x5eed_0001);
    for format in FLOATS {
        let ty = format.ty;
        let rounds: &[Round] = if format.bits() >= 32 { &ROUNDS } else { &ROUNDS[..1] };
        for &rounding in rounds {
            for _ in 0..60 {
                let a: Lanes = std::array::from_fn(|_| format.random(&mut random, 0));
                let b: Lanes = std::array::from_fn(|i| format.random(&mut random, a[i]));
                // The addend near the product, where it cancels.
                let c: Lanes = std::array::from_fn(|i| {
                    let (ma, mb) = (i128::from(format.magnitude(a[i])), i128::from(format.magnitude(b[i])));
                    let bias = ((1i128 << (format.exponent_bits - 1)) - 1) << format.mantissa_bits;
                    format.random(&mut random, (ma + mb - bias).clamp(0, i128::from(format.infinity()) - 1) as u64)
                });
                let value = |to: &mut Fixed, code: u64, negate: bool| {
                    let (significand, exponent) = format.parts(format.magnitude(code));
                    to.add(format.sign(code) != negate, significand, exponent);
                };
                let product = |to: &mut Fixed, a: u64, b: u64| {
                    let ((ma, ea), (mb, eb)) = (format.parts(format.magnitude(a)), format.parts(format.magnitude(b)));
                    to.add(format.sign(a) != format.sign(b), ma * mb, ea + eb);
                };
                let (ftz, saturate) = (false, false);
                let sum = run(&Op::FAdd { ty, rounding, ftz, saturate }, &[a, b]);
                let difference = run(&Op::FSub { ty, rounding, ftz, saturate }, &[a, b]);
                let times = run(&Op::FMul { ty, rounding, ftz, saturate }, &[a, b]);
                let fused = run(&Op::Fma { ty, rounding, ftz, saturate, relu: false }, &[a, b, c]);
                for i in 0..32 {
                    let mut exact = Fixed::zero();
                    value(&mut exact, a[i], false);
                    value(&mut exact, b[i], false);
                    format.assert_rounded(&exact, sum[i], rounding, &|| format!("{ty} {:#x} + {:#x}", a[i], b[i]));
                    let mut exact = Fixed::zero();
                    value(&mut exact, a[i], false);
                    value(&mut exact, b[i], true);
                    format.assert_rounded(&exact, difference[i], rounding, &|| format!("{ty} {:#x} - {:#x}", a[i], b[i]));
                    let mut exact = Fixed::zero();
                    product(&mut exact, a[i], b[i]);
                    format.assert_rounded(&exact, times[i], rounding, &|| format!("{ty} {:#x} * {:#x}", a[i], b[i]));
                    value(&mut exact, c[i], false);
                    format.assert_rounded(&exact, fused[i], rounding, &|| format!("{ty} {:#x} * {:#x} + {:#x}", a[i], b[i], c[i]));
                }
            }
        }
    }
}

#[test]
fn the_sign_of_an_exact_zero_follows_the_direction() {
    for format in FLOATS {
        let ty = format.ty;
        let minus = 1u64 << (format.bits() - 1);
        let unit = ((1u64 << (format.exponent_bits - 1)) - 1) << format.mantissa_bits;
        let rounds: &[Round] = if format.bits() >= 32 { &ROUNDS } else { &ROUNDS[..1] };
        for &rounding in rounds {
            let add = Op::FAdd { ty, rounding, ftz: false, saturate: false };
            let fma = Op::Fma { ty, rounding, ftz: false, saturate: false, relu: false };
            let cancelled = if rounding == Round::Down { minus } else { 0 };
            assert_eq!(one(&add, &[unit, unit | minus]), cancelled);
            assert_eq!(one(&add, &[0, minus]), cancelled);
            assert_eq!(one(&add, &[0, 0]), 0);
            assert_eq!(one(&add, &[minus, minus]), minus);
            assert_eq!(one(&fma, &[unit, unit, unit | minus]), cancelled);
            assert_eq!(one(&fma, &[unit, minus, minus]), minus);
            assert_eq!(one(&fma, &[unit, 0, 0]), 0);
        }
    }
}

#[test]
fn invalid_operations_give_the_canonical_nan() {
    let rounding = Round::Nearest;
    let add = |ty| Op::FAdd { ty, rounding, ftz: false, saturate: false };
    let mul = |ty| Op::FMul { ty, rounding, ftz: false, saturate: false };
    assert_eq!(one(&add(Ty::F32), &[0x7f80_0000, 0xff80_0000]), 0x7fff_ffff);
    assert_eq!(one(&add(Ty::F32), &[0xffc0_1234, 0]), 0x7fff_ffff);
    assert_eq!(one(&mul(Ty::F32), &[0x7f80_0000, 0]), 0x7fff_ffff);
    assert_eq!(one(&add(Ty::F16), &[0x7c00, 0xfc00]), 0x7fff);
    assert_eq!(one(&mul(Ty::Bf16), &[0x7f80, 0x8000]), 0x7fff);
    assert_eq!(one(&add(Ty::F64), &[0x7ff0_0000_0000_0000, 0xfff0_0000_0000_0000]), 0xfff8_0000_0000_0000);
    // f64 carries payloads: the first NaN, made quiet.
    assert_eq!(one(&mul(Ty::F64), &[0x7ff0_0000_0000_0042, 0xfff8_0000_0000_0001]), 0x7ff8_0000_0000_0042);
    assert_eq!(one(&add(Ty::F16x2), &[0x7c00_3c00, 0xfc00_3c00]), 0x7fff_4000);
}

#[test]
fn flushing_and_clamping() {
    let rounding = Round::Nearest;
    let add = |ty, ftz, saturate| Op::FAdd { ty, rounding, ftz, saturate };
    // Subnormal operands and results become zeros of the same sign.
    assert_eq!(one(&add(Ty::F32, true, false), &[0x8000_0001, 0x8000_0001]), 0x8000_0000);
    assert_eq!(one(&add(Ty::F32, false, false), &[0x8000_0001, 0x8000_0001]), 0x8000_0002);
    assert_eq!(one(&add(Ty::F32, true, false), &[0x0080_0001, 0x8080_0000]), 0);
    assert_eq!(one(&add(Ty::F16, true, false), &[0x0401, 0x8400]), 0);
    assert_eq!(one(&add(Ty::F16, false, false), &[0x0401, 0x8400]), 1);
    let clamp = |x: f32| f32::from_bits(one(&add(Ty::F32, false, true), &[u64::from(x.to_bits()), 0]) as u32);
    assert_eq!(clamp(-0.0).to_bits(), 0);
    assert_eq!((clamp(-3.0), clamp(0.25), clamp(7.0), clamp(f32::NAN), clamp(f32::INFINITY)), (0.0, 0.25, 1.0, 0.0, 1.0));
    assert_eq!(one(&add(Ty::F16, false, true), &[0x4000, 0]), 0x3c00);
    assert_eq!(one(&add(Ty::F16, false, true), &[0x7e00, 0]), 0);
    let relu = Op::Fma { ty: Ty::F16x2, rounding, ftz: false, saturate: false, relu: true };
    assert_eq!(one(&relu, &[0x3c00_3c00, 0xbc00_7e00, 0]), 0x0000_7fff);
    assert_eq!(one(&relu, &[0x3c00_3c00, 0x3c00_bc00, 0x3c00_bc00]), 0x4000_0000);
}

#[test]
fn minimum_and_maximum_of_zeros_and_nans() {
    let ops = |ty, nan| (Op::FMin { ty, ftz: false, nan }, Op::FMax { ty, ftz: false, nan });
    let (min, max) = ops(Ty::F32, false);
    for (a, b) in [(0u64, 0x8000_0000u64), (0x8000_0000, 0)] {
        assert_eq!(one(&min, &[a, b]), 0x8000_0000);
        assert_eq!(one(&max, &[a, b]), 0);
    }
    let (one_bits, nan) = (0x3f80_0000, 0xffc0_0001);
    assert_eq!((one(&min, &[one_bits, nan]), one(&max, &[nan, one_bits])), (one_bits, one_bits));
    assert_eq!(one(&min, &[nan, nan]), 0x7fff_ffff);
    let (min, max) = ops(Ty::F32, true);
    assert_eq!((one(&min, &[one_bits, nan]), one(&max, &[nan, one_bits])), (0x7fff_ffff, 0x7fff_ffff));
    let (min, max) = ops(Ty::Bf16x2, false);
    assert_eq!(one(&min, &[0x3f80_7fc0, 0xbf80_3f80]), 0xbf80_3f80);
    assert_eq!(one(&max, &[0x3f80_7fc0, 0xbf80_3f80]), 0x3f80_3f80);
    let (min, max) = ops(Ty::F64, false);
    let bits = f64::to_bits;
    assert_eq!((one(&min, &[bits(2.0), bits(-1.0)]), one(&max, &[bits(2.0), bits(-1.0)])), (bits(-1.0), bits(2.0)));
}

#[test]
fn comparisons_of_numbers_and_nans() {
    let all = [
        (Cmp::Eq, [false, true, false, false]),
        (Cmp::Ne, [true, false, true, false]),
        (Cmp::Lt, [true, false, false, false]),
        (Cmp::Le, [true, true, false, false]),
        (Cmp::Gt, [false, false, true, false]),
        (Cmp::Ge, [false, true, true, false]),
        (Cmp::EqOrNan, [false, true, false, true]),
        (Cmp::NeOrNan, [true, false, true, true]),
        (Cmp::LtOrNan, [true, false, false, true]),
        (Cmp::LeOrNan, [true, true, false, true]),
        (Cmp::GtOrNan, [false, false, true, true]),
        (Cmp::GeOrNan, [false, true, true, true]),
        (Cmp::Number, [true, true, true, false]),
        (Cmp::Nan, [false, false, false, true]),
    ];
    let half = |x: f32| u64::from(verdigris_tensor::num::f32_to_f16(x));
    let brain = |x: f32| u64::from(verdigris_tensor::num::f32_to_bf16(x));
    for (cmp, expected) in all {
        for (index, (a, b)) in [(-1.0f32, 2.0f32), (0.0, -0.0), (3.0, 2.0), (f32::NAN, 1.0)].into_iter().enumerate() {
            let want = u64::from(expected[index]);
            assert_eq!(one(&Op::Setp { cmp, ty: Ty::F32, ftz: false }, &[a.to_bits().into(), b.to_bits().into()]), want, "{cmp:?} {a} {b}");
            assert_eq!(one(&Op::Setp { cmp, ty: Ty::F64, ftz: false }, &[f64::from(a).to_bits(), f64::from(b).to_bits()]), want);
            assert_eq!(one(&Op::Setp { cmp, ty: Ty::F16, ftz: false }, &[half(a), half(b)]), want);
            assert_eq!(one(&Op::Setp { cmp, ty: Ty::Bf16, ftz: false }, &[brain(a), brain(b)]), want);
        }
    }
    let lt = |ty| Op::Setp { cmp: Cmp::Lt, ty, ftz: false };
    assert_eq!((one(&lt(Ty::S32), &[0xffff_ffff, 1]), one(&lt(Ty::U32), &[0xffff_ffff, 1])), (1, 0));
    assert_eq!((one(&lt(Ty::S64), &[u64::MAX, 1]), one(&lt(Ty::U64), &[1, u64::MAX])), (1, 1));
    assert_eq!(one(&Op::Setp { cmp: Cmp::Eq, ty: Ty::F32, ftz: true }, &[1, 0x8000_0002]), 1);
}

// ---- integers ----------------------------------------------------------------------------------------------------------

fn number(ty: Ty, bits: u64) -> i128 {
    let width = ty.bits();
    let value = i128::from(bits) & ((1i128 << width) - 1);
    if ty.is_signed() && value >> (width - 1) == 1 { value - (1i128 << width) } else { value }
}

fn wrap(bits: u32, value: i128) -> u64 {
    (value as u128 & ((1u128 << bits) - 1)) as u64
}

#[test]
fn integer_arithmetic_against_128_bits() {
    let mut random = Random(0x5eed_0002);
    for ty in [Ty::U16, Ty::S16, Ty::U32, Ty::S32, Ty::U64, Ty::S64] {
        let bits = ty.bits();
        for _ in 0..40 {
            let mut operand = || -> Lanes {
                std::array::from_fn(|_| {
                    let edge = [0, 1, wrap(bits, -1), 1 << (bits - 1), (1 << (bits - 1)) - 1];
                    let x = random.next();
                    if x.is_multiple_of(4) { edge[(x >> 8) as usize % 5] } else { wrap(bits, i128::from(random.next() >> (x >> 8 & 31))) }
                })
            };
            let (a, b, c) = (operand(), operand(), operand());
            let check = |op: Op, operands: &[Lanes], expected: &dyn Fn(usize) -> u64| {
                let got = run(&op, operands);
                for i in 0..32 {
                    assert_eq!(got[i], expected(i), "{op:?} {:#x} {:#x} {:#x}", a[i], b[i], c[i]);
                }
            };
            let n = |x: u64| number(ty, x);
            check(Op::IAdd { ty }, &[a, b], &|i| wrap(bits, n(a[i]) + n(b[i])));
            check(Op::ISub { ty }, &[a, b], &|i| wrap(bits, n(a[i]) - n(b[i])));
            check(Op::IMin { ty }, &[a, b], &|i| wrap(bits, n(a[i]).min(n(b[i]))));
            check(Op::IMax { ty }, &[a, b], &|i| wrap(bits, n(a[i]).max(n(b[i]))));
            check(Op::INeg { ty }, &[a], &|i| wrap(bits, -n(a[i])));
            check(
                Op::IAbs {
                    ty: if bits == 16 {
                        Ty::S16
                    } else if bits == 32 {
                        Ty::S32
                    } else {
                        Ty::S64
                    },
                },
                &[a],
                &|i| {
                    wrap(
                        bits,
                        number(
                            if bits == 16 {
                                Ty::S16
                            } else if bits == 32 {
                                Ty::S32
                            } else {
                                Ty::S64
                            },
                            a[i],
                        )
                        .abs(),
                    )
                },
            );
            // 64-bit unsigned products do not fit i128 as a sum with c: reduce first.
            let product = |i: usize| n(a[i]).wrapping_mul(n(b[i]));
            check(Op::IMulLo { ty }, &[a, b], &|i| wrap(bits, product(i)));
            check(Op::IMulHi { ty }, &[a, b], &|i| ((product(i) as u128 >> bits) & ((1u128 << bits) - 1)) as u64);
            check(Op::IMadLo { ty }, &[a, b, c], &|i| wrap(bits, i128::from(wrap(bits, product(i))) + n(c[i])));
            if bits < 64 {
                check(Op::IMulWide { ty }, &[a, b], &|i| wrap(2 * bits, product(i)));
                let wide: Lanes = std::array::from_fn(|i| wrap(2 * bits, i128::from(c[i]) * 0x1_0001_0001));
                check(Op::IMadWide { ty }, &[a, b, wide], &|i| wrap(2 * bits, product(i) + i128::from(wide[i])));
            }
            let amount: Lanes = std::array::from_fn(|i| if i % 8 == 7 { 0xffff_ffff } else { c[i] % 70 });
            check(Op::Shl { ty }, &[a, amount], &|i| {
                if amount[i] >= u64::from(bits) { 0 } else { wrap(bits, i128::from(a[i]) << amount[i]) }
            });
            check(Op::Shr { ty }, &[a, amount], &|i| wrap(bits, n(a[i]) >> amount[i].min(64)));
            check(Op::Bfind { ty }, &[a], &|i| {
                let sign = u64::from(n(a[i]) < 0);
                (0..bits).rev().find(|&bit| a[i] >> bit & 1 != sign).map_or(0xffff_ffff, u64::from)
            });
            check(Op::Brev { ty }, &[a], &|i| (0..bits).fold(0, |r, bit| r | (a[i] >> bit & 1) << (bits - 1 - bit)));
            check(Op::Popc { ty }, &[a], &|i| (0..bits).map(|bit| a[i] >> bit & 1).sum());
            check(Op::Clz { ty }, &[a], &|i| u64::from((0..bits).rev().take_while(|&bit| a[i] >> bit & 1 == 0).count() as u32));
            let (position, length): (Lanes, Lanes) = (std::array::from_fn(|i| b[i] % 300), std::array::from_fn(|i| c[i] % 300));
            if bits >= 32 {
                // The loops of the ISA's own definition.
                check(Op::Bfe { ty }, &[a, position, length], &|i| {
                    let (p, l) = ((position[i] & 255) as u32, (length[i] & 255) as u32);
                    let bit = |k: u32| if k < bits { a[i] >> k & 1 } else { 0 };
                    let sign = if l == 0 || !ty.is_signed() { 0 } else { bit((p + l - 1).min(bits - 1)) };
                    (0..bits).fold(0, |d, k| d | (if k < l && p + k < bits { bit(p + k) } else { sign }) << k)
                });
                check(Op::Bfi { ty }, &[a, b, position, length], &|i| {
                    let (p, l) = ((position[i] & 255) as u32, (length[i] & 255) as u32);
                    (0..l).take_while(|k| p + k < bits).fold(b[i], |f, k| (f & !(1 << (p + k))) | (a[i] >> k.min(63) & 1) << (p + k))
                });
            }
        }
    }
}

#[test]
fn bytes_and_bits_of_words() {
    let mut random = Random(0x5eed_0003);
    for _ in 0..300 {
        let [a, b, c] = std::array::from_fn(|_| random.next() & 0xffff_ffff);
        let bytes: Vec<u8> = [a as u32, b as u32].iter().flat_map(|w| w.to_le_bytes()).collect();
        let permuted = (0..4).map(|i| {
            let nibble = (c >> (4 * i) & 15) as usize;
            let byte = bytes[nibble & 7];
            let byte = if nibble & 8 != 0 { if byte & 0x80 != 0 { 255 } else { 0 } } else { byte };
            u64::from(byte) << (8 * i)
        });
        assert_eq!(one(&Op::Prmt {}, &[a, b, c]), permuted.sum::<u64>());
        for (left, wrapping) in [(false, false), (false, true), (true, false), (true, true)] {
            let amount = c % 40;
            let n = if wrapping { amount % 32 } else { amount.min(32) };
            let both = u128::from(b << 32 | a);
            let expected = if left { (both << n) >> 32 } else { both >> n } as u64 & 0xffff_ffff;
            assert_eq!(one(&Op::Funnel { left, wrap: wrapping }, &[a, b, amount]), expected);
        }
        let table = random.next() as u8;
        let expected = (0..32).fold(0, |d, k| {
            let row = (a >> k & 1) << 2 | (b >> k & 1) << 1 | (c >> k & 1);
            d | u64::from(table >> row & 1) << k
        });
        assert_eq!(one(&Op::Lop3 { table }, &[a, b, c]), expected);
        for (a_signed, b_signed) in [(false, false), (false, true), (true, false), (true, true)] {
            let byte = |w: u64, i: usize, signed: bool| {
                let x = (w >> (8 * i)) as u8;
                if signed { i128::from(x as i8) } else { i128::from(x) }
            };
            let half = |w: u64, i: usize, signed: bool| {
                let x = (w >> (16 * i)) as u16;
                if signed { i128::from(x as i16) } else { i128::from(x) }
            };
            let dot: i128 = (0..4).map(|i| byte(a, i, a_signed) * byte(b, i, b_signed)).sum();
            assert_eq!(one(&Op::Dp4a { a_signed, b_signed }, &[a, b, c]), wrap(32, dot + i128::from(c)));
            for high in [false, true] {
                let dot: i128 = (0..2).map(|i| half(a, i, a_signed) * byte(b, i + if high { 2 } else { 0 }, b_signed)).sum();
                assert_eq!(one(&Op::Dp2a { a_signed, b_signed, high }, &[a, b, c]), wrap(32, dot + i128::from(c)));
            }
        }
    }
    // The table of a three-way and, and of a ^ b ^ c.
    assert_eq!(one(&Op::Lop3 { table: 0xf0 & 0xcc & 0xaa }, &[0b1100, 0b1010, 0b1001]), 0b1000);
    assert_eq!(one(&Op::Lop3 { table: 0xf0 ^ 0xcc ^ 0xaa }, &[0b1100, 0b1010, 0b1001]), 0b1100 ^ 0b1010 ^ 0b1001);
}

#[test]
fn wrap_is_reported_for_32_bit_types_alone() {
    let wrapped = |op: Op, operands: &[u64]| {
        let lanes: Vec<Lanes> = operands.iter().map(|&x| [x; 32]).collect();
        let ins: Vec<&Lanes> = lanes.iter().collect();
        eval(&op, &ins, 0x0000_00f0, &mut [[0; 32]], None).unwrap()
    };
    assert_eq!(wrapped(Op::IAdd { ty: Ty::U32 }, &[0xffff_ffff, 1]), 0xf0);
    assert_eq!(wrapped(Op::IAdd { ty: Ty::U32 }, &[0xffff_fffe, 1]), 0);
    assert_eq!(wrapped(Op::IAdd { ty: Ty::S32 }, &[0xffff_ffff, 1]), 0);
    assert_eq!(wrapped(Op::IAdd { ty: Ty::S32 }, &[0x7fff_ffff, 1]), 0xf0);
    assert_eq!(wrapped(Op::ISub { ty: Ty::U32 }, &[1, 2]), 0xf0);
    assert_eq!(wrapped(Op::IMulLo { ty: Ty::U32 }, &[0x1_0000, 0x1_0000]), 0xf0);
    assert_eq!(wrapped(Op::IMulLo { ty: Ty::U32 }, &[0xffff, 0x1_0001]), 0);
    assert_eq!(wrapped(Op::IMadLo { ty: Ty::U32 }, &[0xffff, 0x1_0001, 1]), 0xf0);
    assert_eq!(wrapped(Op::IAdd { ty: Ty::U64 }, &[u64::MAX, 1]), 0);
}

// ---- conversions -------------------------------------------------------------------------------------------------------

#[test]
fn integers_become_floats_with_one_rounding() {
    let mut random = Random(0x5eed_0004);
    let words =
        [(CvtRound::Nearest, Round::Nearest), (CvtRound::Zero, Round::Zero), (CvtRound::Down, Round::Down), (CvtRound::Up, Round::Up)];
    for from in [Ty::U16, Ty::S16, Ty::U32, Ty::S32, Ty::U64, Ty::S64] {
        for format in FLOATS {
            for (rounding, round) in words {
                let a: Lanes = std::array::from_fn(|i| wrap(from.bits(), i128::from(random.next() >> (2 * i))));
                let got = run(&Op::Cvt { to: format.ty, from, rounding, ftz: false, saturate: false }, &[a]);
                for i in 0..32 {
                    let value = number(from, a[i]);
                    let mut exact = Fixed::zero();
                    exact.add(value < 0, value.unsigned_abs(), 0);
                    format.assert_rounded(&exact, got[i], round, &|| format!("{} from {from} {:#x}", format.ty, a[i]));
                }
            }
        }
    }
}

#[test]
fn floats_become_narrower_floats_with_one_rounding() {
    let mut random = Random(0x5eed_0005);
    let words =
        [(CvtRound::Nearest, Round::Nearest), (CvtRound::Zero, Round::Zero), (CvtRound::Down, Round::Down), (CvtRound::Up, Round::Up)];
    for from in FLOATS {
        for to in FLOATS {
            for (rounding, round) in words {
                for _ in 0..20 {
                    let a: Lanes = std::array::from_fn(|_| from.random(&mut random, 0));
                    let got = run(&Op::Cvt { to: to.ty, from: from.ty, rounding, ftz: false, saturate: false }, &[a]);
                    for i in 0..32 {
                        let mut exact = Fixed::zero();
                        from.add_value(&mut exact, false, from.ordinal(a[i]));
                        to.assert_rounded(&exact, got[i], round, &|| format!("{} from {} {:#x}", to.ty, from.ty, a[i]));
                    }
                }
            }
        }
    }
}

#[test]
fn floats_become_integers_clamped() {
    let cvt = |to, from, rounding| Op::Cvt { to, from, rounding, ftz: false, saturate: false };
    let f = |x: f32| u64::from(x.to_bits());
    for (x, nearest, zero, down, up) in [
        (2.5f32, 2, 2, 2, 3),
        (3.5, 4, 3, 3, 4),
        (-2.5, -2, -2, -3, -2),
        (-0.75, -1, 0, -1, 0),
        (7.0, 7, 7, 7, 7),
        (-1e20, -1 << 31, -1 << 31, -1 << 31, -1 << 31),
    ] {
        let got = |rounding| one(&cvt(Ty::S32, Ty::F32, rounding), &[f(x)]) as u32 as i32;
        assert_eq!(
            (got(CvtRound::IntNearest), got(CvtRound::IntZero), got(CvtRound::IntDown), got(CvtRound::IntUp)),
            (nearest, zero, down, up),
            "{x}"
        );
    }
    let to = |to, x: f32| one(&cvt(to, Ty::F32, CvtRound::IntZero), &[f(x)]);
    assert_eq!((to(Ty::U32, -3.0), to(Ty::U32, 1e20), to(Ty::U16, 70000.0), to(Ty::S16, -70000.0)), (0, 0xffff_ffff, 0xffff, 0x8000));
    assert_eq!((to(Ty::S64, 1e30), to(Ty::U64, f32::INFINITY), to(Ty::S64, f32::NEG_INFINITY)), (i64::MAX as u64, u64::MAX, 1 << 63));
    // NaN: zero, but the top bit where 64 bits are involved.
    assert_eq!((to(Ty::S32, f32::NAN), to(Ty::U16, f32::NAN), to(Ty::S64, f32::NAN), to(Ty::U64, f32::NAN)), (0, 0, 1 << 63, 1 << 63));
    assert_eq!(one(&cvt(Ty::S32, Ty::F64, CvtRound::IntZero), &[f64::NAN.to_bits()]), 0x8000_0000);
    assert_eq!(one(&cvt(Ty::S32, Ty::F64, CvtRound::IntNearest), &[2147483646.5f64.to_bits()]), 2147483646);
    // To an integer value that stays a float.
    assert_eq!(one(&cvt(Ty::F32, Ty::F32, CvtRound::IntDown), &[f(-2.25)]), f(-3.0));
    assert_eq!(one(&cvt(Ty::F16, Ty::F16, CvtRound::IntNearest), &[0x4100]), 0x4000);
    // Between integers: cut, extended or clamped.
    assert_eq!(one(&cvt(Ty::S64, Ty::S32, CvtRound::None), &[0x8000_0000]), 0xffff_ffff_8000_0000);
    assert_eq!(one(&cvt(Ty::U16, Ty::U32, CvtRound::None), &[0x1_2345]), 0x2345);
    assert_eq!(one(&Op::Cvt { to: Ty::U16, from: Ty::S32, rounding: CvtRound::None, ftz: false, saturate: true }, &[0xffff_fff0]), 0);
    assert_eq!(one(&Op::Cvt { to: Ty::F32, from: Ty::F32, rounding: CvtRound::None, ftz: false, saturate: true }, &[f(f32::NAN)]), 0);
    assert_eq!(
        one(&Op::Cvt { to: Ty::F16, from: Ty::F32, rounding: CvtRound::Nearest, ftz: true, saturate: false }, &[f(f32::NAN)]),
        0x7fff
    );
}

#[test]
fn bytes_become_numbers_and_back() {
    let f = |x: f32| u64::from(x.to_bits());
    assert_eq!(one(&Op::CvtByte { to: Ty::F32, signed: true }, &[0xabcd_ef80]), f(-128.0));
    assert_eq!(one(&Op::CvtByte { to: Ty::F16, signed: false }, &[0xff]), 0x5bf8);
    assert_eq!(one(&Op::CvtByte { to: Ty::S32, signed: true }, &[0x1ff]), 0xffff_ffff);
    for (x, signed, expected) in [
        (2.5f32, true, 2u64),
        (-1.5, true, 0xffff_fffe),
        (300.0, true, 127),
        (-300.0, true, 0xffff_ff80),
        (300.0, false, 255),
        (-1.0, false, 0),
        (f32::NAN, false, 0),
    ] {
        assert_eq!(one(&Op::CvtToByte { from: Ty::F32, signed }, &[f(x)]), expected, "{x}");
    }
    assert_eq!(one(&Op::CvtToByte { from: Ty::S32, signed: true }, &[0xffff_0000]), 0xffff_ff80);
    assert_eq!(one(&Op::CvtToByte { from: Ty::S32, signed: false }, &[1000]), 255);
}

/// The fp8 code whose value is nearest, by looking at all; ties to the even code, beyond the largest the largest.
fn nearest_fp8(value: f64, decode: &dyn Fn(u8) -> f64) -> u8 {
    let mut best = 0u8;
    let value = value.clamp(-1e6, 1e6);
    for code in 0..=127u8 {
        let x = decode(code);
        if !x.is_finite() {
            continue;
        }
        let (d, e) = ((x - value.abs()).abs(), (decode(best) - value.abs()).abs());
        if d < e || (d == e && code & 1 == 0) {
            best = code;
        }
    }
    best | if value.is_sign_negative() { 0x80 } else { 0 }
}

#[test]
fn eight_bit_floats_by_looking_at_all_of_them() {
    // Decoding by the formats' definitions, spelled out here once more.
    let decode = |code: u8, exponent_bits: u32, mantissa_bits: u32| -> f64 {
        let bias = (1 << (exponent_bits - 1)) - 1;
        let magnitude = code & 0x7f;
        let (field, fraction) = (i32::from(magnitude >> mantissa_bits), f64::from(magnitude & ((1 << mantissa_bits) - 1)));
        let special = if mantissa_bits == 3 { magnitude == 0x7f } else { magnitude > 0x7c };
        let scale = 2f64.powi(-(mantissa_bits as i32));
        let value = if special {
            f64::NAN
        } else if mantissa_bits == 2 && magnitude == 0x7c {
            f64::INFINITY
        } else if field == 0 {
            fraction * scale * 2f64.powi(1 - bias)
        } else {
            (1.0 + fraction * scale) * 2f64.powi(field - bias)
        };
        if code & 0x80 != 0 { -value } else { value }
    };
    for (packed, e, m) in [(Packed::E4m3x2, 4, 3), (Packed::E5m2x2, 5, 2)] {
        let value = |code: u8| decode(code, e, m);
        for half in 0..=0xffffu32 {
            let x = f64::from(verdigris_tensor::num::f16_to_f32(half as u16));
            if half % 7 != 0 && x.abs() > 1.0 {
                continue;
            }
            let got = one_fast(&Op::CvtHalfToFp8 { to: packed, relu: false }, &[u64::from(half) << 16 | 0x3c00]);
            let expected = if x.is_nan() { 0x7f } else { nearest_fp8(x, &value) };
            assert_eq!((got >> 8) as u8, expected, "{packed:?} of {x}");
            assert_eq!(value(got as u8), 1.0);
        }
        for code in 0..=255u8 {
            let got = one_fast(&Op::CvtFp8ToHalf { from: packed, relu: false }, &[u64::from(code) << 8]);
            let x = f64::from(verdigris_tensor::num::f16_to_f32((got >> 16) as u16));
            assert!(x == value(code) || (x.is_nan() && value(code).is_nan()), "{code:#x}");
        }
    }
    let f = |x: f32| u64::from(x.to_bits());
    assert_eq!(one(&Op::CvtPack { to: Packed::E4m3x2, relu: false }, &[f(1e9), f(-1e9)]), 0x7efe);
    assert_eq!(one(&Op::CvtPack { to: Packed::E5m2x2, relu: true }, &[f(-1.0), f(f32::NAN)]), 0x007f);
    assert_eq!(one(&Op::CvtPack { to: Packed::F16x2, relu: false }, &[f(2.0), f(1.0)]), 0x4000_3c00);
    assert_eq!(one(&Op::CvtPack { to: Packed::Bf16x2, relu: true }, &[f(-2.0), f(1.0)]), 0x0000_3f80);
    // tf32: ties away, ties to even, and the NaN.
    let tie = 0x3f80_1000;
    assert_eq!(one(&Op::CvtTf32 { rounding: CvtRound::NearestAway }, &[tie]), 0x3f80_2000);
    assert_eq!(one(&Op::CvtTf32 { rounding: CvtRound::Nearest }, &[tie]), 0x3f80_0000);
    // Results of an H200: NaN is canonical but with `.rna`, and f16 takes f32 subnormals as they are in spite of `.ftz`.
    assert_eq!(one(&Op::CvtTf32 { rounding: CvtRound::NearestAway }, &[0xff80_9411]), 0xff80_8000);
    assert_eq!(one(&Op::CvtTf32 { rounding: CvtRound::NearestAway }, &[0x7fd9_5ed2]), 0x7fd9_4000);
    for rounding in [CvtRound::Nearest, CvtRound::Zero] {
        assert_eq!(one(&Op::CvtTf32 { rounding }, &[0x7f83_41db]), 0x7fff_e000);
    }
    let to_f16 = |rounding, saturate| Op::Cvt { to: Ty::F16, from: Ty::F32, rounding, ftz: true, saturate };
    assert_eq!(one(&to_f16(CvtRound::Down, false), &[0x8000_0002]), 0x8001);
    assert_eq!(one(&to_f16(CvtRound::Up, false), &[0x0001_16c2]), 0x0001);
    assert_eq!(one(&to_f16(CvtRound::Up, true), &[0x007f_fffe]), 0x0001);
}

fn one_fast(op: &Op, operands: &[u64]) -> u64 {
    let lanes: Vec<Lanes> = operands.iter().map(|&x| [x; 32]).collect();
    let ins: Vec<&Lanes> = lanes.iter().collect();
    let mut outs = [[SENTINEL; 32]];
    eval(op, &ins, 1, &mut outs, None).unwrap();
    outs[0][0]
}

// ---- moves and refusals -----------------------------------------------------------------------------------------------

#[test]
fn moves_and_refusals() {
    assert_eq!(one(&Op::Pack { half: Ty::F16, whole: Ty::F16x2 }, &[0x1234, 0xabcd]), 0xabcd_1234);
    let mut outs = [[0; 32]; 2];
    eval(&Op::Unpack { half: Ty::B32, whole: Ty::B64 }, &[&[0x0123_4567_89ab_cdef; 32]], 1, &mut outs, None).unwrap();
    assert_eq!((outs[0][0], outs[1][0], outs[0][1]), (0x89ab_cdef, 0x0123_4567, 0));
    assert_eq!((one(&Op::Selp { ty: Ty::F32 }, &[7, 9, 1]), one(&Op::Selp { ty: Ty::F32 }, &[7, 9, 0])), (7, 9));
    assert_eq!(one(&Op::Not { ty: Ty::Pred }, &[1]), 0);
    assert_eq!(one(&Op::Copysign { ty: Ty::F32 }, &[0x8000_0000, 0x3f80_0000]), 0xbf80_0000);
    let refused = eval(&Op::SharedAddress { index: 0 }, &[], 1, &mut [[0; 32]], None);
    assert_eq!(refused, Err(EvalError::NeedsMachine { op: "SharedAddress" }));
    let refused = eval(
        &Op::FAdd { ty: Ty::U32, rounding: Round::Nearest, ftz: false, saturate: false },
        &[&[0; 32], &[0; 32]],
        1,
        &mut [[0; 32]],
        None,
    );
    assert_eq!(refused, Err(EvalError::NoSuchForm { op: "FAdd", ty: Ty::U32 }));
}
