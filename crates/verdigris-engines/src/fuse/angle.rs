//! Angles brought near 0, with as many bits of 2/π as the argument's exponent asks for.

use verdigris_kir::face::Val;
use verdigris_kir::inst::CvtRound;

/// π/2 in two parts.
const HALF_PI: [f64; 2] = [std::f64::consts::FRAC_PI_2, 6.123_233_995_736_766e-17];
/// 2/π behind 64 zeros: enough for the largest exponent of f64.
const TWO_OVER_PI: [u64; 20] = [
    0,
    0xA2F9_836E_4E44_1529,
    0xFC27_57D1_F534_DDC0,
    0xDB62_9599_3C43_9041,
    0xFE51_63AB_DEBB_C561,
    0xB724_6E3A_424D_D2E0,
    0x0649_2EEA_09D1_921C,
    0xFE1D_EB1C_B129_A73E,
    0xE882_35F5_2EBB_4484,
    0xE99C_7026_B45F_7E41,
    0x3991_D639_8353_39F4,
    0x9C84_5F8B_BDF9_283B,
    0x1FF8_97FF_DE05_980F,
    0xEF2F_118B_5A0A_6D1F,
    0x6D36_7ECF_27CB_09B7,
    0x4F46_3F66_9E5F_EA2D,
    0x7527_BAC7_EBE5_F17B,
    0x3D07_39F7_8A52_92EA,
    0x6BFB_5FB1_1F8D_5D08,
    0x5603_3046_FC7B_6BAB,
];

/// `x − n · π/2` and `n mod 4`: by two multiplications where |x| is below `simple`, else by all the bits of 2/π that matter, of which
/// up to `words` of 64 bits do not.
pub(super) fn reduce<'k>(x: Val<'k, f64>, simple: f64, words: usize) -> (Val<'k, f64>, Val<'k, u32>) {
    let k = x.kernel();
    let n = (x * std::f64::consts::FRAC_2_PI).convert::<f64>(CvtRound::IntNearest);
    let near = k.fma(n, -HALF_PI[1], k.fma(n, -HALF_PI[0], x));
    let rest = k.var(near);
    let quadrant = k.var(n.convert::<i32>(CvtRound::IntNearest).unsigned());
    k.when(x.abs().ge(simple), || {
        let bits = x.bitcast::<u64>();
        let exponent = (bits >> 52).low32() & 0x7ffu32;
        let mantissa = (bits & 0x000f_ffff_ffff_ffffu64) | 0x0010_0000_0000_0000u64;
        // The bits of 2/π · 2^(exponent − 1075) / 4 from the point on: the table's from position exponent − 1075 + 62 on.
        let position = exponent - (1075 - 62);
        let (word, shift) = (position >> 6, position & 63);
        let table = |i: u32| {
            (0..words as u32).fold(k.constant(TWO_OVER_PI[i as usize]), |value, skipped| {
                k.select(word.gt(skipped), k.constant(TWO_OVER_PI[(skipped + 1 + i) as usize]), value)
            })
        };
        let piece = |i: u32| table(i).shl(shift) | (table(i + 1) >> 1).shr(k.constant(63u32) - shift);
        let (first, second, third) = (piece(0), piece(1), piece(2));
        let middle = mantissa * second;
        let low = middle + mantissa.mul_hi(third);
        let carry = k.select(low.lt(middle), 1u64, 0u64);
        let high = mantissa * first + mantissa.mul_hi(second) + carry;
        // Two bits count quadrants; what is left is a signed fraction of one.
        let fraction = (high << 2) | (low >> 62);
        let signed = fraction.bitcast::<i64>();
        let whole = signed.convert::<f64>(CvtRound::Nearest);
        let lost = (signed - whole.convert::<i64>(CvtRound::IntNearest)).convert::<f64>(CvtRound::Nearest);
        let two_32 = f64::from(1u32 << 16) * f64::from(1u32 << 16);
        let far = (low << 2).convert::<f64>(CvtRound::Nearest) * (1.0 / two_32) * (1.0 / two_32);
        let angle = (whole + (lost + far)) * (1.0 / two_32) * (1.0 / two_32) * HALF_PI[0];
        let turns = ((high >> 62) + (fraction >> 63)).low32();
        let negative = x.lt(0.0);
        rest.set(k.select(negative, -angle, angle));
        quadrant.set(k.select(negative, k.constant(0u32) - turns, turns));
    });
    (rest.get(), quadrant.get() & 3)
}
