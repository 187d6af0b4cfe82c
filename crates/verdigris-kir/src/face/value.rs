//! Values, variables, and the pure operators on them.

use super::Kernel;
use crate::inst::{Cmp, CvtRound, Division, Op, Packed, Round};
use crate::ir::{Operand, Reg, RegKind, Ty};
use std::marker::PhantomData;
use std::ops::{Add, BitAnd, BitOr, BitXor, Mul, Neg, Not, Shl, Shr, Sub};

/// A host type that names a register type. Constants of it may stand in expressions.
pub trait Scalar: Copy + 'static {
    /// The register type.
    const TY: Ty;
    /// The bits of a constant.
    fn bits(self) -> u64;
}

/// One binary16, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct F16(pub u16);
/// One bfloat16, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bf16(pub u16);
/// Two binary16, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct F16x2(pub u32);
/// Two bfloat16, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bf16x2(pub u32);

macro_rules! scalars {
    ($($host:ty => $ty:ident, $bits:expr;)*) => { $(
        impl Scalar for $host {
            const TY: Ty = Ty::$ty;
            fn bits(self) -> u64 {
                let convert: fn($host) -> u64 = $bits;
                convert(self)
            }
        }
        impl<'k> AsVal<'k, $host> for $host {
            fn operand(&self) -> Operand {
                Operand::Imm(self.bits())
            }
        }
    )* };
}

scalars! {
    bool => Pred, |v| u64::from(v);
    u16 => U16, |v| u64::from(v);
    i16 => S16, |v| u64::from(v as u16);
    u32 => U32, |v| u64::from(v);
    i32 => S32, |v| u64::from(v as u32);
    u64 => U64, |v| v;
    i64 => S64, |v| v as u64;
    f32 => F32, |v| u64::from(v.to_bits());
    f64 => F64, |v| v.to_bits();
    F16 => F16, |v| u64::from(v.0);
    Bf16 => Bf16, |v| u64::from(v.0);
    F16x2 => F16x2, |v| u64::from(v.0);
    Bf16x2 => Bf16x2, |v| u64::from(v.0);
}

/// Types with `+`, `−`, `·`.
pub trait Number: Scalar {
    /// The instruction of `+`.
    fn add() -> Op;
    /// The instruction of `−`.
    fn sub() -> Op;
    /// The instruction of `·`.
    fn mul() -> Op;
    /// The instruction of a multiplication with an addition behind it.
    fn fma() -> Op;
    /// The smaller.
    fn min() -> Op;
    /// The larger.
    fn max() -> Op;
}

/// Integers of 16, 32 and 64 bits.
pub trait IntScalar: Number {}
/// Floats and packed halves.
pub trait FloatScalar: Number {}
/// Types with bitwise operators: integers and predicates.
pub trait BitScalar: Scalar {}
/// Types that compare.
pub trait Comparable: Scalar {}

macro_rules! integers {
    ($($host:ty),*) => { $(
        impl Number for $host {
            fn add() -> Op { Op::IAdd { ty: Self::TY } }
            fn sub() -> Op { Op::ISub { ty: Self::TY } }
            fn mul() -> Op { Op::IMulLo { ty: Self::TY } }
            fn fma() -> Op { Op::IMadLo { ty: Self::TY } }
            fn min() -> Op { Op::IMin { ty: Self::TY } }
            fn max() -> Op { Op::IMax { ty: Self::TY } }
        }
        impl IntScalar for $host {}
        impl BitScalar for $host {}
        impl Comparable for $host {}
    )* };
}
integers!(u16, i16, u32, i32, u64, i64);
impl BitScalar for bool {}

macro_rules! floats {
    ($($host:ty),*) => { $(
        impl Number for $host {
            fn add() -> Op { Op::FAdd { ty: Self::TY, rounding: Round::Nearest, ftz: false, saturate: false } }
            fn sub() -> Op { Op::FSub { ty: Self::TY, rounding: Round::Nearest, ftz: false, saturate: false } }
            fn mul() -> Op { Op::FMul { ty: Self::TY, rounding: Round::Nearest, ftz: false, saturate: false } }
            fn fma() -> Op { Op::Fma { ty: Self::TY, rounding: Round::Nearest, ftz: false, saturate: false, relu: false } }
            fn min() -> Op { Op::FMin { ty: Self::TY, ftz: false, nan: false } }
            fn max() -> Op { Op::FMax { ty: Self::TY, ftz: false, nan: false } }
        }
        impl FloatScalar for $host {}
    )* };
}
floats!(f32, f64, F16, Bf16, F16x2, Bf16x2);
impl Comparable for f32 {}
impl Comparable for f64 {}
impl Comparable for F16 {}
impl Comparable for Bf16 {}

/// A value: written once, of a known type, in one kernel.
pub struct Val<'k, T> {
    kernel: Kernel<'k>,
    operand: Operand,
    ty: PhantomData<T>,
}

/// A register that may be set again. Standing in an expression, it is read there and then.
pub struct Var<'k, T> {
    kernel: Kernel<'k>,
    reg: Reg,
    ty: PhantomData<T>,
}

impl<T> Clone for Val<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Val<'_, T> {}
impl<T> Clone for Var<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Var<'_, T> {}

impl<T> std::fmt::Debug for Val<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.operand)
    }
}
impl<T> std::fmt::Debug for Var<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.reg)
    }
}

/// What may stand where a value of type `T` is wanted: a value, a variable, a constant.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no `{T}` of this kernel",
    label = "a `{T}` value, variable or constant is wanted here"
)]
pub trait AsVal<'k, T: Scalar>: Copy {
    /// The operand, to be read by the instruction that is emitted next.
    fn operand(&self) -> Operand;

    /// A value that keeps what this one is now.
    #[track_caller]
    fn operand_val(&self, kernel: Kernel<'k>) -> Val<'k, T> {
        Val::new(kernel, self.operand())
    }
}

impl<'k, T: Scalar> AsVal<'k, T> for Val<'k, T> {
    fn operand(&self) -> Operand {
        self.operand
    }
}

impl<'k, T: Scalar> AsVal<'k, T> for Var<'k, T> {
    fn operand(&self) -> Operand {
        self.reg.into()
    }

    #[track_caller]
    fn operand_val(&self, _: Kernel<'k>) -> Val<'k, T> {
        self.get()
    }
}

impl<'k, T: Scalar> Val<'k, T> {
    pub(super) fn new(kernel: Kernel<'k>, operand: Operand) -> Self {
        Val { kernel, operand, ty: PhantomData }
    }

    /// The kernel that it belongs to.
    pub fn kernel(self) -> Kernel<'k> {
        self.kernel
    }

    /// The constant behind it, if it is one.
    pub fn as_constant(self) -> Option<u64> {
        match self.operand {
            Operand::Imm(bits) => Some(bits),
            _ => None,
        }
    }

    /// The same bits as another type of the same width.
    #[track_caller]
    pub fn bitcast<U: Scalar>(self) -> Val<'k, U> {
        assert_eq!(T::TY.bits(), U::TY.bits(), "a bitcast keeps the width");
        match self.operand {
            Operand::Imm(_) | Operand::Late(_) => Val::new(self.kernel, self.operand),
            Operand::Reg(_) => self.kernel.compute(Op::Mov { ty: T::TY.as_bits() }, &[self.operand]),
        }
    }
}

impl<'k, T: Scalar> Var<'k, T> {
    pub(super) fn new(kernel: Kernel<'k>, reg: Reg) -> Self {
        Var { kernel, reg, ty: PhantomData }
    }

    /// The register.
    pub fn reg(self) -> Reg {
        self.reg
    }

    /// Its value at this point, which later `set`s leave alone.
    #[track_caller]
    pub fn get(self) -> Val<'k, T> {
        self.kernel.compute(Op::Mov { ty: T::TY }, &[self.reg.into()])
    }

    /// Gives it a new value.
    #[track_caller]
    pub fn set(self, value: impl AsVal<'k, T>) {
        self.kernel.instruction(Op::Mov { ty: T::TY }, &[Some(self.reg)], &[value.operand()]);
    }
}

fn imm(operand: Operand) -> Option<u64> {
    match operand {
        Operand::Imm(bits) => Some(bits),
        _ => None,
    }
}

/// Folds what needs no instruction: constants of 32-bit integers, and neutral elements of unsigned arithmetic.
fn fold(op: &Op, a: Operand, b: Operand) -> Option<Operand> {
    let known = (imm(a), imm(b));
    match (op, known) {
        (Op::IAdd { ty: Ty::U32 | Ty::S32 }, (Some(a), Some(b))) => Some(Operand::Imm(u64::from((a as u32).wrapping_add(b as u32)))),
        (Op::ISub { ty: Ty::U32 | Ty::S32 }, (Some(a), Some(b))) => Some(Operand::Imm(u64::from((a as u32).wrapping_sub(b as u32)))),
        (Op::IMulLo { ty: Ty::U32 | Ty::S32 }, (Some(a), Some(b))) => Some(Operand::Imm(u64::from((a as u32).wrapping_mul(b as u32)))),
        (Op::IAdd { .. }, (Some(0), _)) => Some(b),
        (Op::IAdd { .. } | Op::ISub { .. }, (_, Some(0))) => Some(a),
        (Op::IMulLo { .. }, (Some(1), _)) => Some(b),
        (Op::IMulLo { .. }, (_, Some(1))) => Some(a),
        (Op::IMulLo { .. }, (Some(0), _) | (_, Some(0))) => Some(Operand::Imm(0)),
        (Op::Shl { ty: Ty::U32 }, (Some(a), Some(b))) => Some(Operand::Imm(u64::from((a as u32).checked_shl(b as u32).unwrap_or(0)))),
        (Op::Shr { ty: Ty::U32 }, (Some(a), Some(b))) => Some(Operand::Imm(u64::from((a as u32).checked_shr(b as u32).unwrap_or(0)))),
        (Op::Shl { .. } | Op::Shr { .. }, (_, Some(0))) => Some(a),
        _ => None,
    }
}

#[track_caller]
fn binary<'k, T: Scalar>(kernel: Kernel<'k>, op: Op, a: Operand, b: Operand) -> Val<'k, T> {
    match fold(&op, a, b) {
        // A folded variable must be read now, not when the result is used.
        Some(Operand::Reg(reg)) => kernel.read_now(reg),
        Some(constant) => Val::new(kernel, constant),
        None => kernel.compute(op, &[a, b]),
    }
}

impl<'k> Kernel<'k> {
    #[track_caller]
    fn read_now<T: Scalar>(self, reg: Reg) -> Val<'k, T> {
        let mutable = self.with(|state| state.body.registers[reg.0 as usize].kind == crate::ir::RegKind::Mutable);
        if mutable { self.compute(Op::Mov { ty: T::TY }, &[reg.into()]) } else { Val::new(self, reg.into()) }
    }

    /// `condition ? yes : no`.
    #[track_caller]
    pub fn select<T: Scalar>(self, condition: impl AsVal<'k, bool>, yes: impl AsVal<'k, T>, no: impl AsVal<'k, T>) -> Val<'k, T> {
        self.compute(Op::Selp { ty: T::TY }, &[yes.operand(), no.operand(), condition.operand()])
    }

    /// `a · b + c`: rounded once for floats, wrapping for integers.
    #[track_caller]
    pub fn fma<T: Number>(self, a: impl AsVal<'k, T>, b: impl AsVal<'k, T>, c: impl AsVal<'k, T>) -> Val<'k, T> {
        self.compute(T::fma(), &[a.operand(), b.operand(), c.operand()])
    }

    /// Two f32 rounded to nearest even into one register of two halves, `low` in the low one.
    #[track_caller]
    pub fn pack_bf16x2(self, low: impl AsVal<'k, f32>, high: impl AsVal<'k, f32>) -> Val<'k, u32> {
        self.pack(Packed::Bf16x2, low, high)
    }

    /// Two f32 rounded into one register of two numbers of format `to`, `low` in the low one; fp8 formats give 16 bits.
    #[track_caller]
    pub fn pack<T: Scalar>(self, to: Packed, low: impl AsVal<'k, f32>, high: impl AsVal<'k, f32>) -> Val<'k, T> {
        assert_eq!(T::TY.bits(), to.ty().bits(), "a pair of {to:?} has {} bits", to.ty().bits());
        let pair = self.new_register(to.ty(), RegKind::Once, None, self.here());
        self.instruction(Op::CvtPack { to, relu: false }, &[Some(pair)], &[high.operand(), low.operand()]);
        self.compute(Op::Mov { ty: to.ty().as_bits() }, &[pair.into()])
    }

    /// Two fp8 of format `from`, side by side in 16 bits, widened exactly to two binary16 (sm_89).
    #[track_caller]
    pub fn widen_fp8(self, from: Packed, pair: impl AsVal<'k, u16>) -> Val<'k, F16x2> {
        self.compute(Op::CvtFp8ToHalf { from, relu: false }, &[pair.operand()])
    }

    /// A number rounded to the nearest 8-bit integer, to even where two are as near, clamped to its range; NaN gives 0. In the low byte.
    #[track_caller]
    pub fn round_to_byte<T: Number>(self, value: impl AsVal<'k, T>, signed: bool) -> Val<'k, u32> {
        self.compute(Op::CvtToByte { from: T::TY, signed }, &[value.operand()])
    }

    /// Two 16-bit halves side by side, `low` in the low one.
    #[track_caller]
    pub fn join16(self, low: impl AsVal<'k, u16>, high: impl AsVal<'k, u16>) -> Val<'k, u32> {
        self.compute(Op::Pack { half: Ty::B16, whole: Ty::B32 }, &[low.operand(), high.operand()])
    }

    /// Two 32-bit halves side by side, `low` in the low one.
    #[track_caller]
    pub fn join32(self, low: impl AsVal<'k, u32>, high: impl AsVal<'k, u32>) -> Val<'k, u64> {
        self.compute(Op::Pack { half: Ty::B32, whole: Ty::B64 }, &[low.operand(), high.operand()])
    }

    /// The low and the high half of 32 bits.
    #[track_caller]
    pub fn split16(self, whole: impl AsVal<'k, u32>) -> (Val<'k, u16>, Val<'k, u16>) {
        let halves = self.compute_many(Op::Unpack { half: Ty::B16, whole: Ty::B32 }, 2, &[whole.operand()]);
        (halves[0], halves[1])
    }

    /// The low and the high half of 64 bits.
    #[track_caller]
    pub fn split32(self, whole: impl AsVal<'k, u64>) -> (Val<'k, u32>, Val<'k, u32>) {
        let halves = self.compute_many(Op::Unpack { half: Ty::B32, whole: Ty::B64 }, 2, &[whole.operand()]);
        (halves[0], halves[1])
    }
}

macro_rules! operators {
    ($($handle:ident),*) => { $(
        impl<'k, T: Number, R: AsVal<'k, T>> Add<R> for $handle<'k, T> {
            type Output = Val<'k, T>;
            #[track_caller]
            fn add(self, right: R) -> Val<'k, T> { binary(self.kernel, T::add(), AsVal::operand(&self), right.operand()) }
        }
        impl<'k, T: Number, R: AsVal<'k, T>> Sub<R> for $handle<'k, T> {
            type Output = Val<'k, T>;
            #[track_caller]
            fn sub(self, right: R) -> Val<'k, T> { binary(self.kernel, T::sub(), AsVal::operand(&self), right.operand()) }
        }
        impl<'k, T: Number, R: AsVal<'k, T>> Mul<R> for $handle<'k, T> {
            type Output = Val<'k, T>;
            #[track_caller]
            fn mul(self, right: R) -> Val<'k, T> { binary(self.kernel, T::mul(), AsVal::operand(&self), right.operand()) }
        }
        impl<'k, T: BitScalar, R: AsVal<'k, T>> BitAnd<R> for $handle<'k, T> {
            type Output = Val<'k, T>;
            #[track_caller]
            fn bitand(self, right: R) -> Val<'k, T> { binary(self.kernel, Op::And { ty: T::TY }, AsVal::operand(&self), right.operand()) }
        }
        impl<'k, T: BitScalar, R: AsVal<'k, T>> BitOr<R> for $handle<'k, T> {
            type Output = Val<'k, T>;
            #[track_caller]
            fn bitor(self, right: R) -> Val<'k, T> { binary(self.kernel, Op::Or { ty: T::TY }, AsVal::operand(&self), right.operand()) }
        }
        impl<'k, T: BitScalar, R: AsVal<'k, T>> BitXor<R> for $handle<'k, T> {
            type Output = Val<'k, T>;
            #[track_caller]
            fn bitxor(self, right: R) -> Val<'k, T> { binary(self.kernel, Op::Xor { ty: T::TY }, AsVal::operand(&self), right.operand()) }
        }
        impl<'k, T: IntScalar> Shl<u32> for $handle<'k, T> {
            type Output = Val<'k, T>;
            #[track_caller]
            fn shl(self, bits: u32) -> Val<'k, T> { binary(self.kernel, Op::Shl { ty: T::TY }, AsVal::operand(&self), Operand::Imm(u64::from(bits))) }
        }
        impl<'k, T: IntScalar> Shr<u32> for $handle<'k, T> {
            type Output = Val<'k, T>;
            #[track_caller]
            fn shr(self, bits: u32) -> Val<'k, T> { binary(self.kernel, Op::Shr { ty: T::TY }, AsVal::operand(&self), Operand::Imm(u64::from(bits))) }
        }
        impl<'k, T: BitScalar> Not for $handle<'k, T> {
            type Output = Val<'k, T>;
            #[track_caller]
            fn not(self) -> Val<'k, T> { self.kernel.compute(Op::Not { ty: T::TY }, &[AsVal::operand(&self)]) }
        }
        impl<'k, T: FloatScalar> Neg for $handle<'k, T> {
            type Output = Val<'k, T>;
            #[track_caller]
            fn neg(self) -> Val<'k, T> { self.kernel.compute(Op::FNeg { ty: T::TY, ftz: false }, &[AsVal::operand(&self)]) }
        }

        impl<'k, T: Number> $handle<'k, T> {
            /// The smaller; of floats the number where one is NaN.
            #[track_caller]
            pub fn min(self, other: impl AsVal<'k, T>) -> Val<'k, T> { binary(self.kernel, T::min(), AsVal::operand(&self), other.operand()) }
            /// The larger; of floats the number where one is NaN.
            #[track_caller]
            pub fn max(self, other: impl AsVal<'k, T>) -> Val<'k, T> { binary(self.kernel, T::max(), AsVal::operand(&self), other.operand()) }
        }

        impl<'k, T: Comparable> $handle<'k, T> {
            #[track_caller]
            fn compare(self, cmp: Cmp, other: Operand) -> Val<'k, bool> {
                self.kernel.compute(Op::Setp { cmp, ty: T::TY, ftz: false }, &[AsVal::operand(&self), other])
            }
            /// Equal; false for NaN.
            #[track_caller]
            pub fn eq(self, other: impl AsVal<'k, T>) -> Val<'k, bool> { self.compare(Cmp::Eq, other.operand()) }
            /// Not equal; for floats also true for NaN.
            #[track_caller]
            pub fn ne(self, other: impl AsVal<'k, T>) -> Val<'k, bool> {
                self.compare(if T::TY.is_float() { Cmp::NeOrNan } else { Cmp::Ne }, other.operand())
            }
            /// Less.
            #[track_caller]
            pub fn lt(self, other: impl AsVal<'k, T>) -> Val<'k, bool> { self.compare(Cmp::Lt, other.operand()) }
            /// Less or equal.
            #[track_caller]
            pub fn le(self, other: impl AsVal<'k, T>) -> Val<'k, bool> { self.compare(Cmp::Le, other.operand()) }
            /// Greater.
            #[track_caller]
            pub fn gt(self, other: impl AsVal<'k, T>) -> Val<'k, bool> { self.compare(Cmp::Gt, other.operand()) }
            /// Greater or equal.
            #[track_caller]
            pub fn ge(self, other: impl AsVal<'k, T>) -> Val<'k, bool> { self.compare(Cmp::Ge, other.operand()) }
        }

        impl<'k, T: IntScalar> $handle<'k, T> {
            /// `self << bits` with a run-time amount.
            #[allow(clippy::should_implement_trait, reason = "the operator takes constants alone; the word tells that the amount is not one")]
            #[track_caller]
            pub fn shl(self, bits: impl AsVal<'k, u32>) -> Val<'k, T> { binary(self.kernel, Op::Shl { ty: T::TY }, AsVal::operand(&self), bits.operand()) }
            /// `self >> bits` with a run-time amount.
            #[allow(clippy::should_implement_trait, reason = "the operator takes constants alone; the word tells that the amount is not one")]
            #[track_caller]
            pub fn shr(self, bits: impl AsVal<'k, u32>) -> Val<'k, T> { binary(self.kernel, Op::Shr { ty: T::TY }, AsVal::operand(&self), bits.operand()) }
            /// The high half of the product.
            #[track_caller]
            pub fn mul_hi(self, other: impl AsVal<'k, T>) -> Val<'k, T> { binary(self.kernel, Op::IMulHi { ty: T::TY }, AsVal::operand(&self), other.operand()) }
        }

        impl<'k> $handle<'k, u32> {
            /// The 64-bit product.
            #[track_caller]
            pub fn mul_wide(self, other: impl AsVal<'k, u32>) -> Val<'k, u64> {
                self.kernel.compute(Op::IMulWide { ty: Ty::U32 }, &[AsVal::operand(&self), other.operand()])
            }
            /// Four of the eight bytes of `{self, other}`, by the nibbles of `selector`.
            #[track_caller]
            pub fn prmt(self, other: impl AsVal<'k, u32>, selector: impl AsVal<'k, u32>) -> Val<'k, u32> {
                self.kernel.compute(Op::Prmt {}, &[AsVal::operand(&self), other.operand(), selector.operand()])
            }
            /// `length` bits from `position` on.
            #[track_caller]
            pub fn bits(self, position: u32, length: u32) -> Val<'k, u32> {
                self.kernel.compute(Op::Bfe { ty: Ty::U32 }, &[AsVal::operand(&self), Operand::Imm(position.into()), Operand::Imm(length.into())])
            }
            /// Number of one bits.
            #[track_caller]
            pub fn popc(self) -> Val<'k, u32> { self.kernel.compute(Op::Popc { ty: Ty::B32 }, &[AsVal::operand(&self)]) }
            /// The low 16 bits.
            #[track_caller]
            pub fn low16(self) -> Val<'k, u16> {
                self.kernel.compute(Op::Cvt { to: Ty::U16, from: Ty::U32, rounding: CvtRound::None, ftz: false, saturate: false }, &[AsVal::operand(&self)])
            }
            /// Widened to 64 bits.
            #[track_caller]
            pub fn widen(self) -> Val<'k, u64> { self.convert(CvtRound::None) }
            /// The same number as f32, rounded to nearest.
            #[track_caller]
            pub fn to_f32(self) -> Val<'k, f32> { self.convert(CvtRound::Nearest) }
            /// The same bits as a signed number.
            #[track_caller]
            pub fn signed(self) -> Val<'k, i32> { self.kernel.read_as(AsVal::operand(&self), Ty::B32) }
        }

        impl<'k> $handle<'k, i32> {
            /// The same bits as an unsigned number.
            #[track_caller]
            pub fn unsigned(self) -> Val<'k, u32> { self.kernel.read_as(AsVal::operand(&self), Ty::B32) }
            /// Widened to 64 bits, with its sign.
            #[track_caller]
            pub fn widen(self) -> Val<'k, i64> { self.convert(CvtRound::None) }
            /// The same number as f32, rounded to nearest.
            #[track_caller]
            pub fn to_f32(self) -> Val<'k, f32> { self.convert(CvtRound::Nearest) }
        }

        impl<'k> $handle<'k, u64> {
            /// The low 32 bits.
            #[track_caller]
            pub fn low32(self) -> Val<'k, u32> { self.convert(CvtRound::None) }
        }

        impl<'k> $handle<'k, i64> {
            /// The same bits as an unsigned number.
            #[track_caller]
            pub fn unsigned(self) -> Val<'k, u64> { self.kernel.read_as(AsVal::operand(&self), Ty::B64) }
        }

        impl<'k, T: Scalar> $handle<'k, T> {
            /// The value in another scalar type, rounded as said (`cvt`).
            #[track_caller]
            pub fn convert<U: Scalar>(self, rounding: CvtRound) -> Val<'k, U> {
                self.kernel.compute(Op::Cvt { to: U::TY, from: T::TY, rounding, ftz: false, saturate: false }, &[AsVal::operand(&self)])
            }
            /// The value in another scalar type, clamped to its range (`cvt.sat`).
            #[track_caller]
            pub fn convert_saturating<U: Scalar>(self, rounding: CvtRound) -> Val<'k, U> {
                self.kernel.compute(Op::Cvt { to: U::TY, from: T::TY, rounding, ftz: false, saturate: true }, &[AsVal::operand(&self)])
            }
        }

        impl<'k, T: FloatScalar> $handle<'k, T> {
            /// `|x|`.
            #[track_caller]
            pub fn abs(self) -> Val<'k, T> { self.kernel.compute(Op::FAbs { ty: T::TY, ftz: false }, &[AsVal::operand(&self)]) }
            /// The larger, or NaN where one is NaN.
            #[track_caller]
            pub fn max_nan(self, other: impl AsVal<'k, T>) -> Val<'k, T> {
                self.kernel.compute(Op::FMax { ty: T::TY, ftz: false, nan: true }, &[AsVal::operand(&self), other.operand()])
            }
            /// The smaller, or NaN where one is NaN.
            #[track_caller]
            pub fn min_nan(self, other: impl AsVal<'k, T>) -> Val<'k, T> {
                self.kernel.compute(Op::FMin { ty: T::TY, ftz: false, nan: true }, &[AsVal::operand(&self), other.operand()])
            }
        }

        impl<'k> $handle<'k, f32> {
            /// `2^x` by the special function unit, denormals flushed: within 2 ulp.
            #[track_caller]
            pub fn exp2(self) -> Val<'k, f32> { self.kernel.compute(Op::Ex2 { ty: Ty::F32, ftz: true }, &[AsVal::operand(&self)]) }
            /// `log₂ x` by the special function unit.
            #[track_caller]
            pub fn log2(self) -> Val<'k, f32> { self.kernel.compute(Op::Lg2 { ftz: false }, &[AsVal::operand(&self)]) }
            /// `1 / x` by the special function unit: within 1 ulp.
            #[track_caller]
            pub fn rcp(self) -> Val<'k, f32> { self.kernel.compute(Op::Rcp { ty: Ty::F32, approx: true, ftz: false }, &[AsVal::operand(&self)]) }
            /// `1 / x` by the special function unit, denormals flushed: within 1 ulp.
            #[track_caller]
            pub fn rcp_flushed(self) -> Val<'k, f32> { self.kernel.compute(Op::Rcp { ty: Ty::F32, approx: true, ftz: true }, &[AsVal::operand(&self)]) }
            /// `1 / √x` by the special function unit.
            #[track_caller]
            pub fn rsqrt(self) -> Val<'k, f32> { self.kernel.compute(Op::Rsqrt { ty: Ty::F32, ftz: false }, &[AsVal::operand(&self)]) }
            /// `√x`, correctly rounded.
            #[track_caller]
            pub fn sqrt(self) -> Val<'k, f32> { self.kernel.compute(Op::Sqrt { ty: Ty::F32, approx: false, ftz: false }, &[AsVal::operand(&self)]) }
            /// `sin x` by the special function unit.
            #[track_caller]
            pub fn sin(self) -> Val<'k, f32> { self.kernel.compute(Op::Sin { ftz: false }, &[AsVal::operand(&self)]) }
            /// `cos x` by the special function unit.
            #[track_caller]
            pub fn cos(self) -> Val<'k, f32> { self.kernel.compute(Op::Cos { ftz: false }, &[AsVal::operand(&self)]) }
            /// `tanh x` by the special function unit: relative error at most 2⁻¹¹.
            #[track_caller]
            pub fn tanh(self) -> Val<'k, f32> { self.kernel.compute(Op::Tanh { ty: Ty::F32 }, &[AsVal::operand(&self)]) }
            /// `x / y`, correctly rounded.
            #[allow(clippy::should_implement_trait, reason = "its cost is a routine, not an instruction: it is called by name")]
            #[track_caller]
            pub fn div(self, other: impl AsVal<'k, f32>) -> Val<'k, f32> {
                self.kernel.compute(Op::FDiv { ty: Ty::F32, kind: Division::Ieee, ftz: false }, &[AsVal::operand(&self), other.operand()])
            }
            /// `x / y` within 2 ulp.
            #[track_caller]
            pub fn div_full(self, other: impl AsVal<'k, f32>) -> Val<'k, f32> {
                self.kernel.compute(Op::FDiv { ty: Ty::F32, kind: Division::Full, ftz: false }, &[AsVal::operand(&self), other.operand()])
            }
            /// Rounded to tf32, ties away from zero; the bits of an f32.
            #[track_caller]
            pub fn to_tf32(self) -> Val<'k, u32> { self.kernel.compute(Op::CvtTf32 { rounding: CvtRound::NearestAway }, &[AsVal::operand(&self)]) }
        }

        impl<'k> $handle<'k, f64> {
            /// `x / y`, correctly rounded.
            #[allow(clippy::should_implement_trait, reason = "its cost is a routine, not an instruction: it is called by name")]
            #[track_caller]
            pub fn div(self, other: impl AsVal<'k, f64>) -> Val<'k, f64> {
                self.kernel.compute(Op::FDiv { ty: Ty::F64, kind: Division::Ieee, ftz: false }, &[AsVal::operand(&self), other.operand()])
            }
            /// `√x`, correctly rounded.
            #[track_caller]
            pub fn sqrt(self) -> Val<'k, f64> { self.kernel.compute(Op::Sqrt { ty: Ty::F64, approx: false, ftz: false }, &[AsVal::operand(&self)]) }
        }
    )* };
}
operators!(Val, Var);

impl<'k> Kernel<'k> {
    #[track_caller]
    fn read_as<T: Scalar>(self, operand: Operand, bits: Ty) -> Val<'k, T> {
        match operand {
            Operand::Reg(_) => self.compute(Op::Mov { ty: bits }, &[operand]),
            constant => Val::new(self, constant),
        }
    }
}
