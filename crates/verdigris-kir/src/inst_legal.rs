//! Which combinations of attributes exist: the table can express more than PTX has.
//!
//! [`Op::legal`] says so with the rule that is broken; the verifier calls it for every instruction. Checked against `ptxas` over all
//! combinations of the samples.
//!
//! Source: PTX ISA 9.0, the section of each instruction, "Syntax" and "Target ISA notes".

use crate::inst::{
    Atomic, BulkReduce, Cache, Cmp, CvtRound, Division, Fence, MapField, MatrixType, MmaShape, Op, Order, Packed, Redux, Round, Scope,
    Space, WgmmaShape,
};
use crate::ir::Ty;

/// What an illegal combination breaks.
pub(crate) type Illegal = &'static str;

fn require(holds: bool, rule: Illegal) -> Result<(), Illegal> {
    if holds { Ok(()) } else { Err(rule) }
}

const fn is_number(ty: Ty) -> bool {
    matches!(ty, Ty::U16 | Ty::S16 | Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64)
}

const fn is_f16(ty: Ty) -> bool {
    matches!(ty, Ty::F16 | Ty::F16x2)
}

const fn is_bf16(ty: Ty) -> bool {
    matches!(ty, Ty::Bf16 | Ty::Bf16x2)
}

const fn is_packed(ty: Ty) -> bool {
    matches!(ty, Ty::F16x2 | Ty::Bf16x2)
}

const NUMBER: Illegal = "the type must be a signed or unsigned integer of 16, 32 or 64 bits";
const FLOAT: Illegal = "the type must be a float";
const FTZ: Illegal = "only f32 and f16 flush subnormals (`ftz`)";
const NO_PREDICATE: Illegal = "a predicate has no place in memory or in a data register";

impl Op {
    /// Whether PTX has the instruction with these attributes, and hardware carries it out; the rule that it breaks if not.
    pub fn legal(&self) -> Result<(), Illegal> {
        match self {
            Op::Mov { .. }
            | Op::SpecialRegister { .. }
            | Op::ParamAddress { .. }
            | Op::SharedAddress { .. }
            | Op::Prmt {}
            | Op::Funnel { .. }
            | Op::Lop3 { .. }
            | Op::Dp4a { .. }
            | Op::Dp2a { .. }
            | Op::Lg2 { .. }
            | Op::Sin { .. }
            | Op::Cos { .. }
            | Op::Prefetch { .. }
            | Op::DiscardL2 {}
            | Op::CreatePolicy { .. }
            | Op::CpAsyncCommit {}
            | Op::CpAsyncWait { .. }
            | Op::CpAsyncArrive { .. }
            | Op::BulkLoad { .. }
            | Op::BulkStore { .. }
            | Op::BulkCopyToPeer {}
            | Op::BulkPrefetch {}
            | Op::BulkCommit {}
            | Op::BulkWait { .. }
            | Op::TensormapPrefetch {}
            | Op::TensormapPublish { .. }
            | Op::MapShared {}
            | Op::Movmatrix {}
            | Op::WgmmaFence {}
            | Op::WgmmaCommit {}
            | Op::BarSync {}
            | Op::BarArrive {}
            | Op::CtaSync {}
            | Op::CtaCount {}
            | Op::CtaVote { .. }
            | Op::WarpSync {}
            | Op::ClusterArrive { .. }
            | Op::ClusterWait {}
            | Op::MbarrierInit {}
            | Op::MbarrierInvalidate {}
            | Op::MbarrierArriveToken {}
            | Op::MbarrierArriveDrop {}
            | Op::MbarrierTestToken { .. }
            | Op::MbarrierPending {}
            | Op::Shfl { .. }
            | Op::VoteAcross { .. }
            | Op::Ballot {}
            | Op::Elect {}
            | Op::ActiveMask {}
            | Op::GridDependencyWait {}
            | Op::GridDependencyLaunch {}
            | Op::Nanosleep {}
            | Op::Trap {} => Ok(()),

            Op::ParamLoad { offset_bytes, ty, .. } => {
                require(*ty != Ty::Pred, NO_PREDICATE)?;
                require(offset_bytes.is_multiple_of(ty.bytes()), "a parameter is read at a multiple of the type's size")
            }
            Op::Pack { half, whole } | Op::Unpack { half, whole } => require(
                matches!(half.bits(), 16 | 32) && whole.bits() == 2 * half.bits(),
                "the whole must have twice the 16 or 32 bits of the half",
            ),

            Op::IAdd { ty }
            | Op::ISub { ty }
            | Op::IMulLo { ty }
            | Op::IMulHi { ty }
            | Op::IMadLo { ty }
            | Op::IMin { ty }
            | Op::IMax { ty } => require(is_number(*ty), NUMBER),
            Op::IMulWide { ty } | Op::IMadWide { ty } => {
                require(is_number(*ty) && ty.bits() < 64, "a wide product has operands of 16 or 32 bits")
            }
            Op::INeg { ty } | Op::IAbs { ty } => require(ty.is_signed(), "the type must be a signed integer"),
            Op::And { .. } | Op::Or { .. } | Op::Xor { .. } | Op::Not { .. } => Ok(()),
            Op::Shl { ty } | Op::Selp { ty } => require(*ty != Ty::Pred, NO_PREDICATE),
            Op::Shr { ty } => require(ty.is_integer(), "a right shift must know whether its operand has a sign: an integer or bits"),
            Op::Popc { ty } | Op::Clz { ty } | Op::Brev { ty } | Op::Bfi { ty } | Op::MatchAny { ty } | Op::MatchAll { ty } => {
                require(ty.bits() >= 32, "the operand must have 32 or 64 bits")
            }
            Op::Bfind { ty } | Op::Bfe { ty } => require(is_number(*ty) && ty.bits() >= 32, "the type must be an integer of 32 or 64 bits"),

            Op::FAdd { ty, rounding, ftz, saturate }
            | Op::FSub { ty, rounding, ftz, saturate }
            | Op::FMul { ty, rounding, ftz, saturate } => arithmetic(*ty, *rounding, *ftz, *saturate),
            Op::Fma { ty, rounding, ftz, saturate, relu } => {
                arithmetic(*ty, *rounding, *ftz, *saturate)?;
                require(!relu || is_f16(*ty) || is_bf16(*ty), "`relu` exists for halves only")?;
                require(!(*relu && *saturate), "`relu` and `saturate` exclude each other")
            }
            Op::FMin { ty, ftz, nan } | Op::FMax { ty, ftz, nan } => {
                require(ty.is_float(), FLOAT)?;
                require(!ftz || *ty == Ty::F32 || is_f16(*ty), FTZ)?;
                require(!nan || *ty != Ty::F64, "f64 minimum and maximum return the number, never NaN for one NaN operand")
            }
            Op::FNeg { ty, ftz } | Op::FAbs { ty, ftz } => {
                require(ty.is_float(), FLOAT)?;
                require(!ftz || *ty == Ty::F32 || is_f16(*ty), FTZ)
            }
            Op::Copysign { ty } => require(matches!(ty, Ty::F32 | Ty::F64), "the type must be f32 or f64"),
            Op::FDiv { ty, kind, ftz } => match ty {
                Ty::F32 => Ok(()),
                Ty::F64 => require(*kind == Division::Ieee && !ftz, "f64 division is correctly rounded and keeps subnormals"),
                _ => Err("the type must be f32 or f64"),
            },
            Op::Rcp { ty, approx, ftz } | Op::Sqrt { ty, approx, ftz } => match ty {
                Ty::F32 => Ok(()),
                Ty::F64 => require(!approx && !ftz, "in f64 only the correctly rounded form is offered"),
                _ => Err("the type must be f32 or f64"),
            },
            Op::Rsqrt { ty, ftz } => match ty {
                Ty::F32 => Ok(()),
                Ty::F64 => require(!ftz, FTZ),
                _ => Err("the type must be f32 or f64"),
            },
            Op::Ex2 { ty, ftz } => match ty {
                Ty::F32 => Ok(()),
                Ty::F16 | Ty::F16x2 => require(!ftz, "f16 exponentials keep subnormals"),
                Ty::Bf16 | Ty::Bf16x2 => require(*ftz, "bf16 exponentials flush subnormals: `ftz` must be set"),
                _ => Err("the type must be f32 or a half"),
            },
            Op::Tanh { ty } => require(ty.is_float() && *ty != Ty::F64, "the type must be f32 or a half"),
            Op::Setp { cmp, ty, ftz } => {
                require(*ty != Ty::Pred && !is_packed(*ty), "a comparison gives one predicate: the type must be a scalar")?;
                require(!ftz || matches!(ty, Ty::F32 | Ty::F16), FTZ)?;
                if ty.is_float() {
                    return Ok(());
                }
                let equality = matches!(cmp, Cmp::Eq | Cmp::Ne);
                require(equality || matches!(cmp, Cmp::Lt | Cmp::Le | Cmp::Gt | Cmp::Ge), "integers are never NaN")?;
                require(equality || is_number(*ty), "bits have no order: only equality")
            }

            Op::Cvt { to, from, rounding, ftz, saturate } => convert(*to, *from, *rounding, *ftz, *saturate),
            Op::CvtByte { to, .. } => {
                require(is_number(*to) || matches!(to, Ty::F16 | Ty::F32 | Ty::F64), "the type must be an integer, f16, f32 or f64")
            }
            Op::CvtToByte { from, .. } => {
                require(is_number(*from) || matches!(from, Ty::F16 | Ty::F32 | Ty::F64), "the type must be an integer, f16, f32 or f64")
            }
            Op::CvtPack { .. } => Ok(()),
            Op::CvtHalfToFp8 { to: packed, .. } | Op::CvtFp8ToHalf { from: packed, .. } => {
                require(matches!(packed, Packed::E4m3x2 | Packed::E5m2x2), "one side must be a pair of fp8")
            }
            Op::CvtTf32 { rounding } => require(
                matches!(rounding, CvtRound::Nearest | CvtRound::Zero | CvtRound::NearestAway),
                "tf32 is rounded to nearest, toward zero, or to nearest away",
            ),

            Op::Ld { space, ty, count, order, cache } => {
                vector(*ty, *count)?;
                access(*space, *order, *cache)?;
                require(!matches!(order, Order::Release(_) | Order::AcqRel(_)), "a load releases nothing")
            }
            Op::LdByte { space, cache, .. } => access(*space, Order::Weak, *cache),
            Op::St { space, ty, count, order, cache } => {
                vector(*ty, *count)?;
                access(*space, *order, *cache)?;
                store_cache(*cache)?;
                require(!matches!(order, Order::Acquire(_) | Order::AcqRel(_)), "a store acquires nothing")
            }
            Op::StByte { space, cache } => {
                access(*space, Order::Weak, *cache)?;
                store_cache(*cache)
            }
            Op::Atom { space, op, ty, order } => {
                require(!matches!(order, Order::Weak | Order::Volatile), "an atomic has an order: relaxed, acquire, release or both")?;
                atomic(*space, *op, *ty)
            }
            Op::Red { space, op, ty, count, order } => {
                require(matches!(order, Order::Relaxed(_) | Order::Release(_)), "a reduction is relaxed or releases")?;
                require(!matches!(op, Atomic::Exch | Atomic::Cas), "an exchange without a result is a store")?;
                if *count == 1 {
                    return atomic(*space, *op, *ty);
                }
                require(*space == Space::Global, "vectors are reduced in global memory only")?;
                let fits = match ty {
                    Ty::F32 => matches!(count, 2 | 4) && *op == Atomic::Add,
                    Ty::F16 | Ty::Bf16 => matches!(count, 2 | 4 | 8) && matches!(op, Atomic::Add | Atomic::Min | Atomic::Max),
                    Ty::F16x2 | Ty::Bf16x2 => matches!(count, 2 | 4) && matches!(op, Atomic::Add | Atomic::Min | Atomic::Max),
                    _ => false,
                };
                require(fits, "a vector reduction adds 2 or 4 f32, or adds or bounds 2, 4 or 8 halves (2 or 4 pairs)")
            }

            Op::CpAsync { bytes, bypass_l1 } => {
                require(matches!(bytes, 4 | 8 | 16), "an asynchronous copy has 4, 8 or 16 bytes")?;
                require(!bypass_l1 || *bytes == 16, "only copies of 16 bytes pass L1 by")
            }
            Op::BulkReduceStore { op, ty } => {
                let fits = match op {
                    BulkReduce::Add => matches!(ty, Ty::U32 | Ty::S32 | Ty::U64 | Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64),
                    BulkReduce::Min | BulkReduce::Max => matches!(ty, Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64 | Ty::F16 | Ty::Bf16),
                    BulkReduce::And | BulkReduce::Or | BulkReduce::Xor => matches!(ty, Ty::B32 | Ty::B64),
                    BulkReduce::Inc | BulkReduce::Dec => matches!(ty, Ty::U32),
                };
                require(fits, "TMA does not have this reduction in this type")
            }
            Op::TmaLoad { rank, im2col, .. } | Op::TmaStore { rank, im2col, .. } | Op::TmaReduce { rank, im2col, .. } => {
                require((1..=5).contains(rank), "a tensor map has rank 1 to 5")?;
                require(!im2col || *rank >= 3, "an im2col map has rank 3 to 5")
            }
            Op::TmaPrefetch { rank } => require((1..=5).contains(rank), "a tensor map has rank 1 to 5"),
            Op::TensormapReplace { field, space } => {
                require(*space != Space::Cluster, "a tensor map is changed in global memory or in the CTA's own shared memory")?;
                let fits = match field {
                    MapField::GlobalAddress | MapField::Rank => true,
                    MapField::BoxDim(d) | MapField::GlobalDim(d) | MapField::ElementStride(d) => *d < 5,
                    MapField::GlobalStride(d) => *d < 4,
                };
                require(fits, "a tensor map has five dimensions and four strides")
            }
            Op::StAsync { ty, count } => {
                require(ty.bits() >= 32, "an asynchronous store has elements of 32 or 64 bits")?;
                vector(*ty, *count)
            }
            Op::RedAsync { op, ty } => {
                let fits = match op {
                    Atomic::Add => matches!(ty, Ty::U32 | Ty::S32 | Ty::U64),
                    Atomic::Min | Atomic::Max => matches!(ty, Ty::U32 | Ty::S32),
                    Atomic::And | Atomic::Or | Atomic::Xor => ty.is_integer() && ty.bits() == 32,
                    Atomic::Inc | Atomic::Dec => *ty == Ty::U32,
                    Atomic::Exch | Atomic::Cas => false,
                };
                require(fits, "an asynchronous reduction is an integer operation on 32 bits, or an unsigned 64-bit add")
            }

            Op::Ldmatrix { count, .. } | Op::Stmatrix { count, .. } => {
                require(matches!(count, 1 | 2 | 4), "1, 2 or 4 matrices move at a time")
            }
            Op::Mma { shape } => mma(shape),
            Op::Wgmma { shape } => wgmma(shape),
            Op::WgmmaWait { pending } => require(*pending < 8, "at most 7 groups can be left in flight"),

            Op::MbarrierArrive { space, scope } => {
                require(*space != Space::Global, "an mbarrier lies in shared memory")?;
                require(matches!(scope, Scope::Cta | Scope::Cluster), "an mbarrier synchronizes a CTA or a cluster")
            }
            Op::MbarrierArriveExpect { space } | Op::MbarrierExpect { space } | Op::MbarrierComplete { space } => {
                require(*space != Space::Global, "an mbarrier lies in shared memory")
            }
            Op::MbarrierWait { scope } | Op::MbarrierTest { scope, .. } => {
                require(matches!(scope, Scope::Cta | Scope::Cluster), "an mbarrier synchronizes a CTA or a cluster")
            }
            Op::MemoryFence { fence } => match fence {
                Fence::AcqRel(_) | Fence::Sc(_) | Fence::TensormapRelease(_) | Fence::TensormapAcquire(_) => Ok(()),
                Fence::MbarrierInit | Fence::ProxyAsyncShared | Fence::ProxyAsyncGlobal | Fence::ProxyAsync => Ok(()),
            },
            Op::ReduxAcross { op, ty } => match op {
                Redux::Add | Redux::Min | Redux::Max => require(matches!(ty, Ty::U32 | Ty::S32), "the type must be u32 or s32"),
                Redux::And | Redux::Or | Redux::Xor => {
                    require(ty.is_integer() && ty.bits() == 32, "the type must be 32 bits of an integer")
                }
            },
            Op::Setmaxnreg { registers, .. } => require(
                (24..=256).contains(registers) && registers.is_multiple_of(8),
                "a register budget is a multiple of 8 from 24 to 256",
            ),
        }
    }
}

fn arithmetic(ty: Ty, rounding: Round, ftz: bool, saturate: bool) -> Result<(), Illegal> {
    require(ty.is_float(), FLOAT)?;
    require(matches!(ty, Ty::F32 | Ty::F64) || rounding == Round::Nearest, "halves round to nearest only")?;
    require(!ftz || ty == Ty::F32 || is_f16(ty), FTZ)?;
    require(!saturate || ty == Ty::F32 || is_f16(ty), "only f32 and f16 saturate to [0, 1]")
}

/// Whether an integer type holds every value of another.
fn holds(to: Ty, from: Ty) -> bool {
    if from.is_signed() {
        to.is_signed() && to.bits() >= from.bits()
    } else {
        to.bits() > from.bits() || (to.bits() == from.bits() && !to.is_signed())
    }
}

fn convert(to: Ty, from: Ty, rounding: CvtRound, ftz: bool, saturate: bool) -> Result<(), Illegal> {
    let float = |ty: Ty| matches!(ty, Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64);
    require((is_number(to) || float(to)) && (is_number(from) || float(from)), "a conversion is between integers and scalar floats")?;
    require(!ftz || to == Ty::F32 || from == Ty::F32, "only f32 flushes subnormals in a conversion")?;
    let to_float = matches!(rounding, CvtRound::Nearest | CvtRound::Zero | CvtRound::Down | CvtRound::Up);
    let to_integer = matches!(rounding, CvtRound::IntNearest | CvtRound::IntZero | CvtRound::IntDown | CvtRound::IntUp);
    let none = rounding == CvtRound::None;
    match (is_number(to), is_number(from)) {
        (true, true) => {
            require(none, "between integers nothing is rounded")?;
            require(!(saturate && holds(to, from)), "saturation where every value fits has no place")
        }
        (true, false) => require(to_integer, "a float becomes an integer by an integer rounding"),
        (false, true) => require(to_float, "an integer becomes a float by a float rounding"),
        (false, false) if to.bits() < from.bits() => require(to_float, "a narrower float wants a float rounding"),
        (false, false) if to.bits() > from.bits() => require(none, "a wider float holds every value: no rounding"),
        (false, false) => require(to == from && to_integer, "a float stays in its type only to become a whole number"),
    }?;
    require(!saturate || (to != Ty::Bf16 && from != Ty::Bf16), "conversions to and from bf16 do not saturate")
}

fn vector(ty: Ty, count: u8) -> Result<(), Illegal> {
    require(ty != Ty::Pred, NO_PREDICATE)?;
    require(matches!(count, 1 | 2 | 4) && u32::from(count) * ty.bytes() <= 16, "1, 2 or 4 values of at most 16 bytes together")
}

fn store_cache(cache: Cache) -> Result<(), Illegal> {
    require(!matches!(cache, Cache::NonCoherent | Cache::NonCoherentNoAllocate), "a store does not go by the read-only path")?;
    require(cache != Cache::All, "a store is kept in L2, `.ca` is for loads")
}

fn access(space: Space, order: Order, cache: Cache) -> Result<(), Illegal> {
    require(cache == Cache::Default || space == Space::Global, "only global memory is cached")?;
    require(cache == Cache::Default || order == Order::Weak, "an ordered or volatile access has no cache word")
}

/// Two kinds that PTX has are refused in a cluster's shared memory, for what an H200 (driver 13.0) makes of them there. An addition
/// of packed halves is carried out as one of 32-bit integers. And operations on 64 bits other than additions lose updates when the
/// CTA that owns the word takes part: its threads loop over compare-and-swap, the others send the operation over, and the two do not
/// exclude each other. (`red.async` has no such forms either.)
fn atomic(space: Space, op: Atomic, ty: Ty) -> Result<(), Illegal> {
    if space == Space::Cluster {
        require(!is_packed(ty), "atomics of a cluster's shared memory add packed halves as integers")?;
        let combines = matches!(op, Atomic::Min | Atomic::Max | Atomic::And | Atomic::Or | Atomic::Xor);
        require(!(combines && ty.bits() == 64), "atomics of a cluster's shared memory lose updates of 64 bits, but for additions")?;
    }
    let fits = match op {
        Atomic::Add => {
            matches!(ty, Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64 | Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 | Ty::F32 | Ty::F64)
        }
        Atomic::Min | Atomic::Max => matches!(ty, Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64),
        Atomic::And | Atomic::Or | Atomic::Xor => ty.is_integer() && ty.bits() >= 32,
        Atomic::Exch => ty.bits() >= 32,
        Atomic::Cas => ty.bits() >= 16,
        Atomic::Inc | Atomic::Dec => ty == Ty::U32,
    };
    require(fits, "memory does not have this atomic in this type")
}

fn mma(shape: &MmaShape) -> Result<(), Illegal> {
    use MatrixType::{B1, Bf16, E4m3, E5m2, F16, F32, F64, S4, S8, S32, Tf32, U4, U8};
    let MmaShape { m, n, k, a, b, d, saturate, sparse } = *shape;
    require(n == 8, "a warp's product has 8 columns")?;
    let integer = matches!(a, S8 | U8 | S4 | U4);
    require(!saturate || integer, "only products of integers of 4 or 8 bits saturate")?;
    let mixed = matches!((a, b), (S8 | U8, S8 | U8) | (S4 | U4, S4 | U4) | (E4m3 | E5m2, E4m3 | E5m2));
    require(a == b || mixed, "A and B must have the same type, or differ in sign or fp8 form only")?;
    let depths: &[u32] = match (a, m, sparse) {
        (F16 | Bf16, 16, false) => &[8, 16],
        (F16 | Bf16, 16, true) => &[16, 32],
        (Tf32, 16, false) => &[4, 8],
        (Tf32, 16, true) => &[8, 16],
        (F64, 8, false) => &[4],
        (F64, 16, false) => &[4, 8, 16],
        (E4m3 | E5m2, 16, false) => &[16, 32],
        (E4m3 | E5m2, 16, true) => &[64],
        (S8 | U8, 8, false) => &[16],
        (S8 | U8, 16, false) => &[16, 32],
        (S8 | U8, 16, true) => &[32, 64],
        (S4 | U4, 8, false) => &[32],
        (S4 | U4, 16, false) => &[32, 64],
        (S4 | U4, 16, true) => &[64, 128],
        (B1, 8, false) => &[128],
        (B1, 16, false) => &[128, 256],
        _ => &[],
    };
    require(depths.contains(&k), "there is no product of this depth and height in this type")?;
    let accumulators: &[MatrixType] = match a {
        E4m3 | E5m2 if sparse => &[F32],
        F16 | E4m3 | E5m2 => &[F16, F32],
        Bf16 | Tf32 => &[F32],
        F64 => &[F64],
        _ => &[S32],
    };
    require(accumulators.contains(&d), "these products are not accumulated in this type")
}

fn wgmma(shape: &WgmmaShape) -> Result<(), Illegal> {
    use MatrixType::{Bf16, E4m3, E5m2, F16, F32, S8, S32, Tf32, U8};
    let s = shape;
    require(s.n.is_multiple_of(8) && (8..=256).contains(&s.n), "a warpgroup's product has 8 to 256 columns, in steps of 8")?;
    let accumulators: &[MatrixType] = match (s.a, s.b) {
        (F16, F16) | (E4m3 | E5m2, E4m3 | E5m2) => &[F16, F32],
        (Bf16, Bf16) | (Tf32, Tf32) => &[F32],
        (S8 | U8, S8 | U8) => &[S32],
        _ => return Err("a warpgroup does not multiply these types"),
    };
    require(accumulators.contains(&s.d), "these products are not accumulated in this type")?;
    let integer = matches!(s.a, S8 | U8);
    require(!integer || s.n <= 32 || s.n.is_multiple_of(16), "integer products have 8, 16, 24, 32, 48, 64, … columns")?;
    let half = matches!(s.a, F16 | Bf16);
    require(half || !(s.transpose_a || s.transpose_b), "only 16-bit operands can be transposed")?;
    require(!(s.a_in_registers && s.transpose_a), "A in registers cannot be transposed")?;
    require(!integer || !(s.negate_a || s.negate_b), "integer operands cannot be negated")?;
    require(!s.saturate || integer, "only integer products saturate")
}
