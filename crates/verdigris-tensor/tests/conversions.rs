//! The conversions against two independent implementations (`half`, `float8`) and against a definition by search: the value nearest
//! in a sorted list of all codes' values, which knows no bit tricks. Exhaustive over codes, over halfway points and their neighbours.
#![forbid(unsafe_code)]

use verdigris_tensor::DType;
use verdigris_tensor::num::{self, Format, Overflow, Rounding};

const SMALL: [(&str, Format); 4] = [("f16", Format::F16), ("bf16", Format::BF16), ("e4m3", Format::E4M3), ("e5m2", Format::E5M2)];
const ROUNDINGS: [Rounding; 5] = [Rounding::NearestEven, Rounding::NearestAway, Rounding::TowardZero, Rounding::Down, Rounding::Up];

/// A code's value from the definition of the format, by powers of two.
fn defined_value(format: Format, code: u32) -> f64 {
    let mantissa = f64::from(code & ((1 << format.mantissa_bits) - 1));
    let field = (code & format.magnitude_mask()) >> format.mantissa_bits;
    let sign = if code & format.sign_bit() != 0 { -1.0 } else { 1.0 };
    let top = (1 << format.exponent_bits) - 1;
    if format.has_infinity && field == top {
        return if mantissa == 0.0 { sign * f64::INFINITY } else { f64::NAN };
    }
    if !format.has_infinity && code & format.magnitude_mask() == format.magnitude_mask() {
        return f64::NAN;
    }
    let steps = 2f64.powi(format.mantissa_bits as i32);
    let bias = 2i32.pow(format.exponent_bits - 1) - 1;
    if field == 0 {
        sign * (mantissa / steps) * 2f64.powi(1 - bias)
    } else {
        sign * (1.0 + mantissa / steps) * 2f64.powi(field as i32 - bias)
    }
}

/// The finite magnitudes in ascending order of code, which is ascending order of value.
fn magnitudes(format: Format) -> Vec<f64> {
    (0..=format.max_finite()).map(|code| defined_value(format, code)).collect()
}

/// Rounding by its definition, on the sorted magnitudes; `step` is the distance to the first value beyond the last.
fn defined_code(format: Format, values: &[f64], value: f64, rounding: Rounding, overflow: Overflow) -> u32 {
    if value.is_nan() {
        return format.canonical_nan();
    }
    let sign = if value.is_sign_negative() { format.sign_bit() } else { 0 };
    let size = value.abs();
    let last = values.len() - 1;
    let beyond = values[last] + (values[last] - values[last - 1]);
    let above = values.partition_point(|&v| v < size);
    let magnitude = if size.is_infinite() || (above <= last && values[above] == size) {
        above
    } else {
        let low = above - 1;
        let (low_value, high_value) = (values[low], if above <= last { values[above] } else { beyond });
        let up = match rounding {
            Rounding::TowardZero => false,
            Rounding::Up => sign == 0,
            Rounding::Down => sign != 0,
            Rounding::NearestEven | Rounding::NearestAway => {
                // Both differences are exact: the values have few bits and `size` lies between them or far beyond.
                let (below, over) = (size - low_value, high_value - size);
                below > over || (below == over && (rounding == Rounding::NearestAway || low % 2 == 1))
            }
        };
        if up { above } else { low }
    };
    if magnitude <= last {
        return sign | magnitude as u32;
    }
    sign | if overflow == Overflow::Saturate { format.max_finite() } else { format.infinity() }
}

#[test]
fn every_code_decodes_to_its_definition() {
    for (name, format) in SMALL.into_iter().chain([("tf32", Format::TF32)]) {
        for code in 0..1u32 << format.bits() {
            let (got, want) = (format.decode(code), defined_value(format, code));
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{name} {code:#x}: {got} {want}");
            assert_eq!(format.is_nan(code), want.is_nan());
            assert_eq!(format.is_infinite(code), want.is_infinite());
            if want.is_nan() {
                assert_eq!(format.decode_f32(code).to_bits(), 0x7fff_ffff);
            }
        }
    }
}

#[test]
fn every_code_survives_the_round_trip_in_every_rounding() {
    for (name, format) in SMALL.into_iter().chain([("tf32", Format::TF32)]) {
        for code in 0..1u32 << format.bits() {
            for rounding in ROUNDINGS {
                let back = format.encode(format.decode(code), rounding, Overflow::Ieee);
                let want = if format.is_nan(code) { format.canonical_nan() } else { code };
                assert_eq!(back, want, "{name} {rounding:?}");
            }
        }
    }
}

#[test]
fn rounding_matches_its_definition_at_and_around_every_halfway_point() {
    for (name, format) in SMALL {
        let values = magnitudes(format);
        let last = values.len() - 1;
        let beyond = values[last] + (values[last] - values[last - 1]);
        for i in 0..values.len() {
            let next = if i < last { values[i + 1] } else { beyond };
            let middle = (values[i] + next) / 2.0;
            for value in
                [values[i].next_up(), middle.next_down(), middle, middle.next_up(), next.next_down(), values[i] + (next - values[i]) * 0.3]
            {
                for value in [value, -value] {
                    for rounding in ROUNDINGS {
                        for overflow in [Overflow::Ieee, Overflow::Saturate] {
                            let got = format.encode(value, rounding, overflow);
                            let want = defined_code(format, &values, value, rounding, overflow);
                            assert_eq!(got, want, "{name} {value:e} {rounding:?} {overflow:?}");
                        }
                    }
                }
            }
        }
        let extremes = [0.0, f64::MIN_POSITIVE, f64::from_bits(1), 1e-60, beyond * 1.01, 1e60, f64::MAX, f64::INFINITY, f64::NAN];
        for value in extremes.into_iter().flat_map(|v| [v, -v]) {
            for overflow in [Overflow::Ieee, Overflow::Saturate] {
                let got = format.encode(value, Rounding::NearestEven, overflow);
                assert_eq!(got, defined_code(format, &values, value, Rounding::NearestEven, overflow), "{name} {value}");
            }
        }
        // Directed rounding never leaves the finite range against its direction, but keeps an infinity that is given.
        assert_eq!(format.encode(1e60, Rounding::TowardZero, Overflow::Ieee), format.max_finite());
        assert_eq!(format.encode(-1e60, Rounding::Up, Overflow::Ieee), format.sign_bit() | format.max_finite());
        assert_eq!(format.encode(-1e60, Rounding::Down, Overflow::Ieee), format.sign_bit() | format.infinity());
        assert_eq!(format.encode(f64::INFINITY, Rounding::TowardZero, Overflow::Ieee), format.infinity());
    }
}

/// A deterministic stream of bit patterns (splitmix64).
fn patterns(count: usize) -> impl Iterator<Item = u64> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    (0..count).map(move |_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

#[test]
fn agrees_with_the_crate_half() {
    for code in 0..=u16::MAX {
        let (f, b) = (half::f16::from_bits(code), half::bf16::from_bits(code));
        if f.is_nan() {
            assert!(num::f16_to_f32(code).is_nan());
        } else {
            assert_eq!(num::f16_to_f32(code).to_bits(), f.to_f32().to_bits());
        }
        if b.is_nan() {
            assert!(num::bf16_to_f32(code).is_nan());
        } else {
            assert_eq!(num::bf16_to_f32(code).to_bits(), b.to_f32().to_bits());
        }
    }
    for bits in patterns(400_000) {
        let single = f32::from_bits(bits as u32);
        // Exponents of f16's range come up too rarely in raw bits; fold them in.
        let near = f32::from_bits((bits as u32 & 0x8fff_ffff) | 0x3000_0000);
        for value in [single, near] {
            if value.is_nan() {
                assert_eq!((num::f32_to_f16(value), num::f32_to_bf16(value)), (0x7fff, 0x7fff));
                continue;
            }
            assert_eq!(num::f32_to_f16(value), half::f16::from_f32(value).to_bits(), "{value:e}");
            assert_eq!(num::f32_to_bf16(value), half::bf16::from_f32(value).to_bits(), "{value:e}");
        }
        let double = f64::from_bits((bits & 0x80ff_ffff_ffff_ffff) | 0x3f00_0000_0000_0000);
        assert_eq!(num::f64_to_f32(double, Rounding::NearestEven).to_bits(), (double as f32).to_bits());
        let any = f64::from_bits(bits);
        if !any.is_nan() {
            assert_eq!(num::f64_to_f32(any, Rounding::NearestEven).to_bits(), (any as f32).to_bits());
        }
    }
}

#[test]
fn the_quick_bf16_path_is_the_generic_one() {
    for bits in
        (0..=u32::MAX).step_by(1009).chain((0..=u16::MAX as u32).flat_map(|h| [h << 16 | 0x7fff, h << 16 | 0x8000, h << 16 | 0x8001]))
    {
        let value = f32::from_bits(bits);
        let generic = Format::BF16.encode(f64::from(value), Rounding::NearestEven, Overflow::Ieee);
        assert_eq!(u32::from(num::f32_to_bf16(value)), generic, "{bits:#x}");
    }
}

#[test]
fn agrees_with_the_crate_float8() {
    for code in 0..=u8::MAX {
        let (e4, e5) = (float8::F8E4M3::from_bits(code).to_f32(), float8::F8E5M2::from_bits(code).to_f32());
        let (got4, got5) = (num::e4m3_to_f32(code), num::e5m2_to_f32(code));
        assert!(got4.to_bits() == e4.to_bits() || (got4.is_nan() && e4.is_nan()), "e4m3 {code:#x}: {got4} {e4}");
        assert!(got5.to_bits() == e5.to_bits() || (got5.is_nan() && e5.is_nan()), "e5m2 {code:#x}: {got5} {e5}");
    }
    for bits in patterns(200_000) {
        let value = f32::from_bits((bits as u32 & 0x8fff_ffff) | 0x3800_0000);
        assert_eq!(num::f32_to_e4m3(value), float8::F8E4M3::from_f32(value).to_bits(), "{value:e}");
        assert_eq!(num::f32_to_e5m2(value), float8::F8E5M2::from_f32(value).to_bits(), "{value:e}");
    }
}

#[test]
fn one_rounding_from_f64() {
    // Just above the midpoint of 1 and 1 + 2^-10. Rounded to f32 first it falls on the midpoint, and the tie would go down.
    let value = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
    assert_eq!(num::f64_to_f16(value), 0x3c01);
    assert_eq!(num::f32_to_f16(value as f32), 0x3c00);
    let value = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
    assert_eq!(num::f64_to_bf16(value), 0x3f81);
}

#[test]
fn fp8_landmarks() {
    assert_eq!(num::f32_to_e4m3(448.0), 0x7e);
    assert_eq!(num::f32_to_e4m3(464.0), 0x7e);
    assert_eq!(num::f32_to_e4m3(1e9), 0x7e);
    assert_eq!(num::f32_to_e4m3(f32::NEG_INFINITY), 0xfe);
    assert_eq!(num::f32_to_e4m3(-f32::NAN), 0x7f);
    assert_eq!(Format::E4M3.encode(465.0, Rounding::NearestEven, Overflow::Ieee), 0x7f);
    assert_eq!(Format::E4M3.encode(-464.5, Rounding::NearestEven, Overflow::Ieee), 0xff);
    assert_eq!(num::f32_to_e5m2(57344.0), 0x7b);
    assert_eq!(num::f32_to_e5m2(61440.0), 0x7b);
    assert_eq!(Format::E5M2.encode(61440.0, Rounding::NearestEven, Overflow::Ieee), 0x7c);
    assert_eq!((Format::E4M3.max_value(), Format::E5M2.max_value(), Format::F16.max_value()), (448.0, 57344.0, 65504.0));
}

#[test]
fn tf32_rounds_and_truncates() {
    let value = f32::from_bits(0x3f80_1000); // halfway between two tf32 values, the lower one even
    assert_eq!(num::tf32_round(value, Rounding::NearestEven).to_bits(), 0x3f80_0000);
    assert_eq!(num::tf32_round(value, Rounding::NearestAway).to_bits(), 0x3f80_2000);
    assert_eq!(num::tf32_truncate(f32::from_bits(0x3f80_1fff)).to_bits(), 0x3f80_0000);
    assert_eq!(num::tf32_round(f32::NAN, Rounding::NearestEven).to_bits(), 0x7fff_ffff);
    assert!(num::tf32_truncate(f32::from_bits(0x7f80_0001)).is_nan());
    assert_eq!(num::tf32_round(f32::MAX, Rounding::NearestEven), f32::INFINITY);
    assert_eq!(num::tf32_round(f32::from_bits(0x0000_1fff), Rounding::TowardZero).to_bits(), 0);
}

#[test]
fn integers_saturate_and_round() {
    assert_eq!([num::saturate_i8(-129), num::saturate_i8(-5), num::saturate_i8(128)], [-128, -5, 127]);
    assert_eq!([num::saturate_u8(-1), num::saturate_u8(200), num::saturate_u8(256)], [0, 200, 255]);
    let cases = [
        (2.5, [2, 3, 2, 2, 3]),
        (-2.5, [-2, -3, -2, -3, -2]),
        (3.5, [4, 4, 3, 3, 4]),
        (127.4, [127, 127, 127, 127, 127]),
        (-400.0, [-128, -128, -128, -128, -128]),
        (f64::NAN, [0, 0, 0, 0, 0]),
        (f64::INFINITY, [127, 127, 127, 127, 127]),
    ];
    for (value, want) in cases {
        assert_eq!(ROUNDINGS.map(|r| num::f64_to_i8(value, r)), want, "{value}");
    }
    assert_eq!((num::f64_to_u8(-0.6, Rounding::NearestEven), num::f64_to_u8(254.5, Rounding::NearestEven)), (0, 254));
}

#[test]
fn ulps() {
    for (name, format) in SMALL {
        let values = magnitudes(format);
        for pair in values.windows(2) {
            assert_eq!(format.ulp(pair[0]), pair[1] - pair[0], "{name} {}", pair[0]);
        }
    }
    assert!(Format::F16.ulp(f64::INFINITY).is_nan());
    assert_eq!(num::power_of_two(-1074), f64::from_bits(1));
}

#[test]
fn elements_in_memory() {
    for dtype in DType::ALL {
        let mut bytes = [0xaau8; 9];
        for value in [0.0, 1.0, 3.0, 100.0] {
            if dtype == DType::Bool && value > 1.0 {
                continue;
            }
            num::write_element(dtype, value, &mut bytes).unwrap();
            let stored = num::read_element(dtype, &bytes).unwrap();
            let want = if dtype.is_fp8() && value == 100.0 { 96.0 } else { value };
            assert_eq!(stored, want, "{dtype}");
            assert_eq!(num::round_to(dtype, value), want);
            assert!(bytes[dtype.bytes()..].iter().all(|&b| b == 0xaa), "{dtype} wrote past its size");
        }
        assert_eq!(num::read_element(dtype, &bytes[..dtype.bytes() - 1]), None);
        assert_eq!(num::write_element(dtype, 1.0, &mut bytes[..dtype.bytes() - 1]), None);
    }
    assert_eq!(num::round_to(DType::I32, 3e9), f64::from(i32::MAX));
    assert_eq!(num::round_to(DType::E4m3, 1e9), 448.0);
    assert_eq!(num::round_to(DType::F16, 1e9), f64::INFINITY);
}
