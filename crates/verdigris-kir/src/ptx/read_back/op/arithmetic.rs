//! Numbers and bits: sections 9.7.1, 9.7.3 to 9.7.8, and `cvt` of 9.7.9.

use super::{Form, Unknown, Words};
use crate::inst::{Cmp, CvtRound, Division, Op, Packed, Round};
use crate::ir::Ty;

const ROUNDINGS: &[(&str, Round)] = &[("rn", Round::Nearest), ("rz", Round::Zero), ("rm", Round::Down), ("rp", Round::Up)];

fn integer(ty: Ty, words: &Words<'_>) -> Result<Ty, Unknown> {
    match ty {
        Ty::U16 | Ty::S16 | Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64 => Ok(ty),
        _ => Err(format!("`{}` has no meaning for this type without a rounding", words.opcode)),
    }
}

/// `add`, `sub`, `mul`, `mad`, `fma`, `min`, `max`, `neg`, `abs`, `div`, `copysign`: of integers, or of floats where a rounding or the type
/// says so.
pub(super) fn arithmetic<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    match first {
        "add" | "sub" => {
            form.result_of(2)?;
            let Some(rounding) = words.option(ROUNDINGS) else {
                let ty = words.ty()?;
                let ty = integer(ty, words)?;
                return Ok(if first == "add" { Op::IAdd { ty } } else { Op::ISub { ty } });
            };
            let (ftz, saturate, ty) = (words.flag("ftz"), words.flag("sat"), float(words)?);
            Ok(if first == "add" { Op::FAdd { ty, rounding, ftz, saturate } } else { Op::FSub { ty, rounding, ftz, saturate } })
        }
        "mul" => {
            form.result_of(2)?;
            if let Some(rounding) = words.option(ROUNDINGS) {
                let (ftz, saturate, ty) = (words.flag("ftz"), words.flag("sat"), float(words)?);
                return Ok(Op::FMul { ty, rounding, ftz, saturate });
            }
            let half = words.choice(&[("lo", 0), ("hi", 1), ("wide", 2)])?;
            let ty = words.ty()?;
            let ty = integer(ty, words)?;
            Ok(match half {
                0 => Op::IMulLo { ty },
                1 => Op::IMulHi { ty },
                _ => Op::IMulWide { ty },
            })
        }
        "mad" => {
            form.result_of(3)?;
            let wide = words.choice(&[("lo", false), ("wide", true)])?;
            let ty = words.ty()?;
            let ty = integer(ty, words)?;
            Ok(if wide { Op::IMadWide { ty } } else { Op::IMadLo { ty } })
        }
        "fma" => {
            form.result_of(3)?;
            let rounding = words.choice(ROUNDINGS)?;
            let (ftz, saturate, relu) = (words.flag("ftz"), words.flag("sat"), words.flag("relu"));
            Ok(Op::Fma { ty: float(words)?, rounding, ftz, saturate, relu })
        }
        "min" | "max" => {
            form.result_of(2)?;
            let (ftz, nan, ty) = (words.flag("ftz"), words.flag("NaN"), words.ty()?);
            if ty.is_float() {
                return Ok(if first == "min" { Op::FMin { ty, ftz, nan } } else { Op::FMax { ty, ftz, nan } });
            }
            plain(ftz || nan, words)?;
            let ty = integer(ty, words)?;
            Ok(if first == "min" { Op::IMin { ty } } else { Op::IMax { ty } })
        }
        "neg" | "abs" => {
            form.result_of(1)?;
            let (ftz, ty) = (words.flag("ftz"), words.ty()?);
            if ty.is_float() {
                return Ok(if first == "neg" { Op::FNeg { ty, ftz } } else { Op::FAbs { ty, ftz } });
            }
            plain(ftz, words)?;
            let ty = integer(ty, words)?;
            Ok(if first == "neg" { Op::INeg { ty } } else { Op::IAbs { ty } })
        }
        "div" => {
            form.result_of(2)?;
            let kind = words.choice(&[("rn", Division::Ieee), ("full", Division::Full), ("approx", Division::Approx)])?;
            let ftz = words.flag("ftz");
            Ok(Op::FDiv { ty: float(words)?, kind, ftz })
        }
        _ => {
            form.result_of(2)?;
            Ok(Op::Copysign { ty: float(words)? })
        }
    }
}

fn float(words: &mut Words<'_>) -> Result<Ty, Unknown> {
    let unknown = words.unknown("a type of floats");
    let ty = words.ty()?;
    if ty.is_float() { Ok(ty) } else { Err(unknown) }
}

fn plain(modified: bool, words: &Words<'_>) -> Result<(), Unknown> {
    if modified { Err(format!("`{}` gives an integer instruction the modifiers of floats", words.opcode)) } else { Ok(()) }
}

/// Functions of one float.
pub(super) fn special<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    form.result_of(1)?;
    let approx = match first {
        "rcp" | "sqrt" => words.choice(&[("approx", true), ("rn", false)])?,
        _ => {
            words.need("approx")?;
            true
        }
    };
    let ftz = first != "tanh" && words.flag("ftz");
    Ok(match first {
        "rcp" => Op::Rcp { ty: float(words)?, approx, ftz },
        "sqrt" => Op::Sqrt { ty: float(words)?, approx, ftz },
        "rsqrt" => Op::Rsqrt { ty: float(words)?, ftz },
        "ex2" => Op::Ex2 { ty: float(words)?, ftz },
        "tanh" => Op::Tanh { ty: float(words)? },
        // These three exist in f32 alone.
        other => {
            words.need("f32")?;
            match other {
                "lg2" => Op::Lg2 { ftz },
                "sin" => Op::Sin { ftz },
                _ => Op::Cos { ftz },
            }
        }
    })
}

/// Logic, shifts, and instructions on fields of bits.
pub(super) fn bits<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    const LOGIC: &[(&str, Ty)] = &[("pred", Ty::Pred), ("b16", Ty::B16), ("b32", Ty::B32), ("b64", Ty::B64)];
    const SIGNS: &[(&str, bool)] = &[("u32", false), ("s32", true)];
    let operands = match first {
        "not" | "popc" | "clz" | "brev" | "bfind" => 1,
        "and" | "or" | "xor" | "shl" | "shr" => 2,
        "bfi" => 4,
        _ => 3,
    };
    form.result_of(operands)?;
    Ok(match first {
        "and" => Op::And { ty: words.choice(LOGIC)? },
        "or" => Op::Or { ty: words.choice(LOGIC)? },
        "xor" => Op::Xor { ty: words.choice(LOGIC)? },
        "not" => Op::Not { ty: words.choice(LOGIC)? },
        "shl" => Op::Shl { ty: words.bits()? },
        "shr" => {
            let ty = words.ty()?;
            if !ty.is_integer() {
                return Err("`shr` shifts integers and bits".into());
            }
            Op::Shr { ty }
        }
        "popc" => Op::Popc { ty: words.bits()? },
        "clz" => Op::Clz { ty: words.bits()? },
        "brev" => Op::Brev { ty: words.bits()? },
        "bfind" => {
            let ty = words.ty()?;
            Op::Bfind { ty: integer(ty, words)? }
        }
        "bfe" => {
            let ty = words.ty()?;
            Op::Bfe { ty: integer(ty, words)? }
        }
        "bfi" => Op::Bfi { ty: words.bits()? },
        "prmt" => {
            words.need("b32")?;
            Op::Prmt {}
        }
        "shf" => {
            let left = words.choice(&[("l", true), ("r", false)])?;
            let wrap = words.choice(&[("wrap", true), ("clamp", false)])?;
            words.need("b32")?;
            Op::Funnel { left, wrap }
        }
        "lop3" => {
            words.need("b32")?;
            let table = form.number()?;
            Op::Lop3 { table: u8::try_from(table).map_err(|_| format!("{table} is no truth table of eight bits"))? }
        }
        "dp4a" => Op::Dp4a { a_signed: words.choice(SIGNS)?, b_signed: words.choice(SIGNS)? },
        _ => {
            let high = words.choice(&[("lo", false), ("hi", true)])?;
            Op::Dp2a { a_signed: words.choice(SIGNS)?, b_signed: words.choice(SIGNS)?, high }
        }
    })
}

pub(super) fn compare<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    if first == "selp" {
        form.result_of(3)?;
        // Of halves the text says bits; the integers have no forms of their own here.
        return Ok(Op::Selp {
            ty: words.choice(&[("b16", Ty::B16), ("b32", Ty::B32), ("b64", Ty::B64), ("f32", Ty::F32), ("f64", Ty::F64)])?,
        });
    }
    form.result_of(2)?;
    let cmp = words.choice(&[
        ("eq", Cmp::Eq),
        ("ne", Cmp::Ne),
        ("lt", Cmp::Lt),
        ("le", Cmp::Le),
        ("gt", Cmp::Gt),
        ("ge", Cmp::Ge),
        ("equ", Cmp::EqOrNan),
        ("neu", Cmp::NeOrNan),
        ("ltu", Cmp::LtOrNan),
        ("leu", Cmp::LeOrNan),
        ("gtu", Cmp::GtOrNan),
        ("geu", Cmp::GeOrNan),
        ("num", Cmp::Number),
        ("nan", Cmp::Nan),
    ])?;
    let ftz = words.flag("ftz");
    Ok(Op::Setp { cmp, ty: words.ty()?, ftz })
}

/// One side of a conversion.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Number(Ty),
    /// Eight bits, signed or not.
    Byte(bool),
    Pair(Packed),
    Tf32,
}

const SIDES: &[(&str, Side)] = &[
    ("u16", Side::Number(Ty::U16)),
    ("s16", Side::Number(Ty::S16)),
    ("u32", Side::Number(Ty::U32)),
    ("s32", Side::Number(Ty::S32)),
    ("u64", Side::Number(Ty::U64)),
    ("s64", Side::Number(Ty::S64)),
    ("f16", Side::Number(Ty::F16)),
    ("bf16", Side::Number(Ty::Bf16)),
    ("f32", Side::Number(Ty::F32)),
    ("f64", Side::Number(Ty::F64)),
    ("u8", Side::Byte(false)),
    ("s8", Side::Byte(true)),
    ("f16x2", Side::Pair(Packed::F16x2)),
    ("bf16x2", Side::Pair(Packed::Bf16x2)),
    ("e4m3x2", Side::Pair(Packed::E4m3x2)),
    ("e5m2x2", Side::Pair(Packed::E5m2x2)),
    ("tf32", Side::Tf32),
];

/// `cvt{.rounding}{.ftz}{.satfinite}{.relu}{.sat}.to.from`.
pub(super) fn convert<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    let rounding = words
        .option(&[
            ("rn", CvtRound::Nearest),
            ("rz", CvtRound::Zero),
            ("rm", CvtRound::Down),
            ("rp", CvtRound::Up),
            ("rni", CvtRound::IntNearest),
            ("rzi", CvtRound::IntZero),
            ("rmi", CvtRound::IntDown),
            ("rpi", CvtRound::IntUp),
            ("rna", CvtRound::NearestAway),
        ])
        .unwrap_or(CvtRound::None);
    let (ftz, finite, relu, saturate) = (words.flag("ftz"), words.flag("satfinite"), words.flag("relu"), words.flag("sat"));
    let (to, from) = (words.choice(SIDES)?, words.choice(SIDES)?);
    let two = matches!((to, from), (Side::Pair(_), Side::Number(_)));
    form.result_of(if two { 2 } else { 1 })?;
    // Which of the words a form has: rounding, `ftz`, `satfinite`, `relu`, `sat`.
    let is_fp8 = |pair: Packed| matches!(pair, Packed::E4m3x2 | Packed::E5m2x2);
    let nearest = rounding == CvtRound::Nearest;
    let none = rounding == CvtRound::None;
    let (op, said) = match (to, from) {
        (Side::Number(to), Side::Number(from)) => (Op::Cvt { to, from, rounding, ftz, saturate }, !finite && !relu),
        (Side::Number(to), Side::Byte(signed)) => {
            let rounded = if to.is_float() { nearest } else { none };
            (Op::CvtByte { to, signed }, rounded && !ftz && !finite && !relu && !saturate)
        }
        (Side::Byte(signed), Side::Number(from)) => {
            let rounded = if from.is_float() { rounding == CvtRound::IntNearest } else { none };
            (Op::CvtToByte { from, signed }, rounded && saturate && !ftz && !finite && !relu)
        }
        (Side::Pair(to), Side::Number(Ty::F32)) => (Op::CvtPack { to, relu }, nearest && finite == is_fp8(to) && !ftz && !saturate),
        (Side::Pair(to), Side::Pair(Packed::F16x2)) if is_fp8(to) => {
            (Op::CvtHalfToFp8 { to, relu }, nearest && finite && !ftz && !saturate)
        }
        (Side::Pair(Packed::F16x2), Side::Pair(from)) if is_fp8(from) => {
            (Op::CvtFp8ToHalf { from, relu }, nearest && !finite && !ftz && !saturate)
        }
        (Side::Tf32, Side::Number(Ty::F32)) => (Op::CvtTf32 { rounding }, !ftz && !finite && !relu && !saturate),
        _ => return Err(format!("`{}` converts between types that have no conversion", words.opcode)),
    };
    if said { Ok(op) } else { Err(format!("`{}` has modifiers that this conversion does not take, or lacks one", words.opcode)) }
}
