//! Values whose type only the spec knows: what steps hand on.
//!
//! A loaded element stays as the bits that it was stored as until a function wants its value, so that what is only moved keeps all of them.

use verdigris_kir::face::{Bf16, F16, Kernel, Val};
use verdigris_kir::inst::{Cache, CvtRound, Order};
use verdigris_tensor::DType;

use super::compute::{self, Compute};

/// The value of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AnyVal<'k> {
    /// As stored.
    Stored(DType, Raw<'k>),
    /// Computed.
    F32(Val<'k, f32>),
    /// Computed.
    F64(Val<'k, f64>),
    /// A coordinate.
    I64(Val<'k, i64>),
    /// A factor from the host, which takes the type of what it meets.
    Number(HostVal<'k>),
}

/// An element's bits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Raw<'k> {
    /// In the low byte, the others 0.
    B8(Val<'k, u32>),
    /// Two bytes.
    B16(Val<'k, u16>),
    /// Four bytes.
    B32(Val<'k, u32>),
    /// Eight bytes.
    B64(Val<'k, u64>),
}

/// A number from the host, in the type that a kernel takes it in.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostVal<'k> {
    Single(Val<'k, f32>),
    Double(Val<'k, f64>),
    Integer(Val<'k, i64>),
}

impl<'k> HostVal<'k> {
    /// Half of an integer; of a real number, which has none, 0.
    #[track_caller]
    pub(super) fn half(self, upper: bool) -> Val<'k, u32> {
        match self {
            HostVal::Integer(value) if upper => (value.unsigned() >> 32).low32(),
            HostVal::Integer(value) => value.unsigned().low32(),
            HostVal::Single(value) => value.kernel().constant(0),
            HostVal::Double(value) => value.kernel().constant(0),
        }
    }

    #[track_caller]
    pub(super) fn get<T: Compute>(self) -> Val<'k, T> {
        match self {
            HostVal::Single(value) => T::from_f32(value),
            HostVal::Double(value) => T::from_f64(value),
            HostVal::Integer(value) => T::from_f64(value.convert(CvtRound::Nearest)),
        }
    }
}

impl<'k> AnyVal<'k> {
    /// A computed value.
    #[track_caller]
    pub(crate) fn of<T: Compute>(value: Val<'k, T>) -> Self {
        if T::DTYPE == DType::F64 { AnyVal::F64(T::to_f64(value)) } else { AnyVal::F32(T::to_f32(value)) }
    }

    /// Whether functions of it compute in f64.
    pub(super) fn is_double(self) -> bool {
        matches!(self, AnyVal::F64(_) | AnyVal::Stored(DType::F64, _))
    }

    /// The value in the type computed in.
    #[track_caller]
    pub(crate) fn get<T: Compute>(self, k: Kernel<'k>) -> Val<'k, T> {
        match self {
            AnyVal::F32(value) => T::from_f32(value),
            AnyVal::F64(value) => T::from_f64(value),
            AnyVal::I64(value) => value.convert(CvtRound::Nearest),
            AnyVal::Number(value) => value.get(),
            AnyVal::Stored(dtype, raw) => decode(k, dtype, raw),
        }
    }

    /// The bits that it is stored as, rounded once.
    #[track_caller]
    pub(crate) fn encoded(self, k: Kernel<'k>, dtype: DType) -> Raw<'k> {
        match self {
            AnyVal::Stored(own, raw) if own == dtype => raw,
            AnyVal::I64(value) if dtype == DType::I64 => Raw::B64(value.unsigned()),
            AnyVal::I64(value) if dtype == DType::I32 => Raw::B32(value.convert_saturating::<i32>(CvtRound::None).unsigned()),
            AnyVal::Stored(DType::I32, Raw::B32(bits)) if dtype == DType::I64 => Raw::B64(bits.signed().widen().unsigned()),
            value if value.is_double() || matches!(value, AnyVal::I64(_)) => encode(k, dtype, value.get::<f64>(k)),
            value => encode(k, dtype, value.get::<f32>(k)),
        }
    }

    /// The value, as if it had been stored and read again.
    #[track_caller]
    pub(crate) fn rounded(self, k: Kernel<'k>, dtype: DType) -> AnyVal<'k> {
        match dtype {
            DType::F32 => AnyVal::F32(self.get(k)),
            DType::F64 => AnyVal::F64(self.get(k)),
            _ => AnyVal::Stored(dtype, self.encoded(k, dtype)),
        }
    }
}

/// Loads `many` neighbouring elements: 16 bytes at a time, or all at once if they are fewer.
#[track_caller]
pub(crate) fn load_raw<'k>(k: Kernel<'k>, dtype: DType, address: Val<'k, u64>, many: u32) -> Vec<Raw<'k>> {
    let bytes = dtype.bytes() as u32;
    if many == 1 {
        return vec![match bytes {
            1 => Raw::B8(k.ld_global_byte(address, 0, false)),
            2 => Raw::B16(k.ld_global::<u16>(address, 0)),
            4 => Raw::B32(k.ld_global::<u32>(address, 0)),
            _ => Raw::B64(k.ld_global::<u64>(address, 0)),
        }];
    }
    elements_of(k, dtype, &load_words(k, address, many * bytes, Cache::Default), many)
}

/// Loads neighbouring bytes, a power of two of them: 16 at a time, or all at once if they are fewer. Fewer than four stand in one word, low.
#[track_caller]
pub(crate) fn load_words<'k>(k: Kernel<'k>, address: Val<'k, u64>, bytes: u32, cache: Cache) -> Vec<Val<'k, u32>> {
    let mut words = Vec::new();
    for at in (0..bytes).step_by(16) {
        let offset = i64::from(at);
        match (bytes - at).min(16) {
            1 => words.push(k.ld_global_byte(address, offset, false)),
            2 => words.push(k.ld_global_with::<u16>(address, offset, Order::Weak, cache).convert(CvtRound::None)),
            4 => words.push(k.ld_global_with::<u32>(address, offset, Order::Weak, cache)),
            size => words.extend(k.ld_global_vector::<u32>(address, offset, (size / 4) as u8, cache)),
        }
    }
    words
}

/// The elements that stand in words, the first in the low bits of the first.
#[track_caller]
pub(crate) fn elements_of<'k>(k: Kernel<'k>, dtype: DType, words: &[Val<'k, u32>], many: u32) -> Vec<Raw<'k>> {
    let bytes = dtype.bytes() as u32;
    if bytes == 2 && many > 1 {
        let halves = words.iter().map(|&word| k.split16(word));
        return halves.flat_map(|(low, high)| [Raw::B16(low), Raw::B16(high)]).collect();
    }
    let mut raws = Vec::new();
    for begin in (0..many * bytes).step_by(bytes as usize) {
        let word = words[(begin / 4) as usize];
        raws.push(match bytes {
            1 => Raw::B8((word >> (8 * (begin % 4))) & 0xffu32),
            2 => Raw::B16(word.low16()),
            4 => Raw::B32(word),
            _ => Raw::B64(k.join32(word, words[(begin / 4) as usize + 1])),
        });
    }
    raws
}

/// Rounds and stores neighbouring elements: 16 bytes at a time, or all at once if they are fewer. Pairs of computed 16-bit floats are rounded by one
/// instruction.
#[track_caller]
pub(crate) fn store_values<'k>(k: Kernel<'k>, dtype: DType, address: Val<'k, u64>, values: &[AnyVal<'k>]) {
    store_values_with(k, dtype, address, values, Cache::Default);
}

/// The same, with a cache hint where they are whole words.
#[track_caller]
pub(crate) fn store_values_with<'k>(k: Kernel<'k>, dtype: DType, address: Val<'k, u64>, values: &[AnyVal<'k>], cache: Cache) {
    let computed: Vec<Val<'k, f32>> =
        values.iter().filter_map(|value| if let AnyVal::F32(value) = *value { Some(value) } else { None }).collect();
    if matches!(dtype, DType::F16 | DType::Bf16) && computed.len() == values.len() && values.len().is_multiple_of(2) {
        let words: Vec<Val<'k, u32>> = computed.chunks(2).map(|pair| compute::pack_16(k, dtype, [pair[0], pair[1]])).collect();
        return store_words(k, address, &words, cache);
    }
    let raws: Vec<Raw<'k>> = values.iter().map(|value| value.encoded(k, dtype)).collect();
    store_raw_with(k, address, &raws, cache);
}

/// Stores neighbouring elements: 16 bytes at a time, or all at once if they are fewer.
#[track_caller]
pub(crate) fn store_raw<'k>(k: Kernel<'k>, address: Val<'k, u64>, raws: &[Raw<'k>]) {
    store_raw_with(k, address, raws, Cache::Default);
}

/// The same, with a cache hint where they are whole words.
#[track_caller]
fn store_raw_with<'k>(k: Kernel<'k>, address: Val<'k, u64>, raws: &[Raw<'k>], cache: Cache) {
    if let [raw] = raws {
        match *raw {
            Raw::B8(bits) => k.st_global_byte(address, 0, bits),
            Raw::B16(bits) => k.st_global_with(address, 0, bits, Order::Weak, cache),
            Raw::B32(bits) => k.st_global_with(address, 0, bits, Order::Weak, cache),
            Raw::B64(bits) => k.st_global_with(address, 0, bits, Order::Weak, cache),
        }
        return;
    }
    let words: Vec<Val<'k, u32>> = match raws[0] {
        Raw::B8(_) => {
            let byte = |raw: &Raw<'k>| if let Raw::B8(bits) = *raw { bits } else { k.constant(0) };
            let quad = |four: &[Raw<'k>]| four.iter().enumerate().map(|(i, raw)| byte(raw) << (8 * i as u32)).reduce(|all, one| all | one);
            raws.chunks(4).filter_map(quad).collect()
        }
        Raw::B16(_) => {
            let half = |raw: &Raw<'k>| if let Raw::B16(bits) = *raw { bits } else { k.constant(0) };
            raws.chunks(2).map(|pair| k.join16(half(&pair[0]), half(&pair[1]))).collect()
        }
        Raw::B32(_) | Raw::B64(_) => raws
            .iter()
            .flat_map(|raw| match *raw {
                Raw::B64(bits) => {
                    let (low, high) = k.split32(bits);
                    vec![low, high]
                }
                Raw::B32(bits) => vec![bits],
                _ => Vec::new(),
            })
            .collect(),
    };
    if let (Raw::B8(_), 2, [word]) = (raws[0], raws.len(), words.as_slice()) {
        k.st_global(address, 0, word.low16());
        return;
    }
    store_words(k, address, &words, cache);
}

/// Stores neighbouring words, 16 bytes at a time.
#[track_caller]
pub(super) fn store_words<'k>(k: Kernel<'k>, address: Val<'k, u64>, words: &[Val<'k, u32>], cache: Cache) {
    for (i, group) in words.chunks(4).enumerate() {
        match group {
            [word] => k.st_global_with(address, 16 * i as i64, *word, Order::Weak, cache),
            _ => k.st_global_vector(address, 16 * i as i64, group, cache),
        }
    }
}

/// The value of stored bits.
#[track_caller]
fn decode<'k, T: Compute>(k: Kernel<'k>, dtype: DType, raw: Raw<'k>) -> Val<'k, T> {
    match (dtype, raw) {
        (DType::F16 | DType::Bf16, Raw::B16(bits)) => T::from_f32(compute::decode_half(dtype, bits)),
        (DType::F32 | DType::Tf32, Raw::B32(bits)) => T::from_f32(bits.bitcast()),
        (DType::I32, Raw::B32(bits)) => T::from_i32(bits.signed()),
        (DType::F64, Raw::B64(bits)) => T::from_f64(bits.bitcast()),
        (DType::I64, Raw::B64(bits)) => bits.bitcast::<i64>().convert(CvtRound::Nearest),
        (DType::I8, Raw::B8(bits)) => T::from_i32((bits << 24).signed() >> 24),
        (_, Raw::B8(bits)) if dtype.is_fp8() => T::from_f32(compute::decode_byte(k, dtype, bits)),
        (_, Raw::B8(bits)) => T::from_i32(bits.signed()),
        // Loads give each type the width that it has.
        (dtype, raw) => unreachable!("{dtype} in {raw:?}"),
    }
}

/// The bits of a value, rounded to nearest even, saturating in fp8 and integers.
#[track_caller]
fn encode<'k, T: Compute>(k: Kernel<'k>, dtype: DType, value: Val<'k, T>) -> Raw<'k> {
    match dtype {
        DType::F64 => Raw::B64(T::to_f64(value).bitcast()),
        DType::F32 | DType::Tf32 => Raw::B32(T::to_f32(value).bitcast()),
        DType::F16 => Raw::B16(value.convert::<F16>(CvtRound::Nearest).bitcast()),
        DType::Bf16 => Raw::B16(T::to_f32(value).convert::<Bf16>(CvtRound::Nearest).bitcast()),
        DType::E4m3 | DType::E5m2 => {
            let value = T::to_f32(value);
            let pair: Val<'k, u16> = k.pack(compute::fp8(dtype), value, value);
            Raw::B8(pair.convert::<u32>(CvtRound::None) & 0xffu32)
        }
        DType::I8 | DType::U8 | DType::Bool => {
            Raw::B8(k.round_to_byte::<T>(compute::without_nan(k, dtype, value), dtype == DType::I8) & 0xffu32)
        }
        DType::I32 => Raw::B32(compute::without_nan(k, dtype, value).convert::<i32>(CvtRound::IntNearest).unsigned()),
        DType::I64 => Raw::B64(compute::without_nan(k, dtype, value).convert::<i64>(CvtRound::IntNearest).unsigned()),
    }
}
