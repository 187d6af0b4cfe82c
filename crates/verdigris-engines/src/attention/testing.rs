//! What the tests of this family share: data that is exact in both halves, and schedules.

use verdigris_kir::interp::{AsyncPolicy, Options};

use super::half::Half;

/// Numbers `i/64` with |i| ≤ 64, exact in both halves.
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) fn new(seed: u64) -> Self {
        Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(super) fn take(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            ((self.0 >> 33) % 129) as f32 / 64.0 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }
}

/// The bits of a number, cut off behind what the type holds; below the normal numbers of f16, 0.
fn to_half(ty: Half, x: f32) -> u16 {
    let bits = x.to_bits();
    match ty {
        Half::Bf16 => (bits >> 16) as u16,
        Half::F16 => match ((bits >> 23) & 0xff).checked_sub(112).filter(|exponent| *exponent > 0) {
            Some(exponent) => ((bits >> 16) & 0x8000) as u16 | (exponent << 10) as u16 | ((bits >> 13) & 0x3ff) as u16,
            None => 0,
        },
    }
}

/// A number as the type holds it.
pub(super) fn cut_off(ty: Half, x: f64) -> f32 {
    from_half(ty, to_half(ty, x as f32)) as f32
}

/// The number of these bits.
pub(super) fn from_half(ty: Half, x: u16) -> f64 {
    let x = u32::from(x);
    match ty {
        Half::Bf16 => f64::from(f32::from_bits(x << 16)),
        Half::F16 => {
            let (sign, exponent, fraction) = (if x & 0x8000 > 0 { -1.0 } else { 1.0 }, (x >> 10) & 31, f64::from(x & 0x3ff) / 1024.0);
            match exponent {
                0 => sign * fraction * f64::from(2.0f32.powi(-14)),
                31 => f64::NAN,
                _ => sign * (1.0 + fraction) * f64::from(2.0f32.powi(exponent as i32 - 15)),
            }
        }
    }
}

/// Numbers as they stand in memory.
pub(super) fn halves(ty: Half, values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| to_half(ty, *x).to_le_bytes()).collect()
}

/// The schedules under which each problem runs: the earliest moments, the latest, and two of random ones.
pub(super) fn schedules() -> Vec<Options> {
    let policies = [AsyncPolicy::Earliest, AsyncPolicy::Latest, AsyncPolicy::Random, AsyncPolicy::Random];
    let residents = [1, 2, 4, 1];
    (0..4u64)
        .map(|seed| Options {
            seed,
            async_policy: policies[seed as usize],
            resident_ctas: residents[seed as usize],
            step_budget: 20_000_000,
            ..Options::default()
        })
        .collect()
}
