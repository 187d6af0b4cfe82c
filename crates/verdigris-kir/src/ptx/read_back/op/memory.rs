//! Moves, loads, stores and atomics by threads: section 9.7.9, and `atom` and `red` of 9.7.13.

use super::{Form, Meaning, Unknown, Value, Words};
use crate::inst::{Atomic, Cache, Op, Order, Space, Special};
use crate::ir::Ty;
use crate::ptx::read_back::statement::Operand;

/// Special registers, with the width of their value in bits. Section 10.
const SPECIALS: &[(&str, Special, u32)] = &[
    ("%tid.x", Special::Tid, 32),
    ("%ntid.x", Special::Ntid, 32),
    ("%ctaid.x", Special::CtaX, 32),
    ("%ctaid.y", Special::CtaY, 32),
    ("%ctaid.z", Special::CtaZ, 32),
    ("%nctaid.x", Special::GridX, 32),
    ("%nctaid.y", Special::GridY, 32),
    ("%nctaid.z", Special::GridZ, 32),
    ("%laneid", Special::Lane, 32),
    ("%clusterid.x", Special::ClusterX, 32),
    ("%nclusterid.x", Special::ClustersX, 32),
    ("%cluster_ctarank", Special::ClusterCtaRank, 32),
    ("%cluster_nctarank", Special::ClusterCtas, 32),
    ("%lanemask_lt", Special::LaneMaskLt, 32),
    ("%lanemask_le", Special::LaneMaskLe, 32),
    ("%lanemask_eq", Special::LaneMaskEq, 32),
    ("%lanemask_gt", Special::LaneMaskGt, 32),
    ("%lanemask_ge", Special::LaneMaskGe, 32),
    ("%smid", Special::Sm, 32),
    ("%nsmid", Special::Sms, 32),
    ("%clock", Special::Clock, 32),
    ("%clock64", Special::Clock64, 64),
    ("%globaltimer", Special::GlobalTimer, 64),
    ("%dynamic_smem_size", Special::DynamicSharedBytes, 32),
];

/// `mov` in its five forms: a value, a special register, an address, two halves put together, a whole taken apart.
pub(super) fn mov<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Meaning, Unknown> {
    let ty = words.ty()?;
    if matches!(ty, Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2) {
        return Err("`mov` moves halves as bits".into());
    }
    let half = match ty {
        Ty::B32 => Some(Ty::B16),
        Ty::B64 => Some(Ty::B32),
        _ => None,
    };
    let no_halves = || Err(format!("`mov.{ty}` neither joins nor divides: only b32 and b64 do"));
    if let Some(Operand::Group(_)) = form.peek() {
        form.group_out(2)?;
        form.input()?;
        let Some(half) = half else { return no_halves() };
        return Ok(Meaning::Op(Op::Unpack { half, whole: ty }));
    }
    form.out()?;
    match form.peek() {
        Some(Operand::Group(_)) => {
            form.group_in(2)?;
            let Some(half) = half else { return no_halves() };
            Ok(Meaning::Op(Op::Pack { half, whole: ty }))
        }
        Some(Operand::Sum(name, offset)) if form.names.shared == Some(*name) => {
            form.take();
            shared_address(ty, *offset)
        }
        Some(Operand::Word(name)) if form.names.shared == Some(*name) => {
            form.take();
            shared_address(ty, 0)
        }
        Some(Operand::Word(name)) => {
            let Some((_, register, width)) = SPECIALS.iter().find(|(special, ..)| special == name) else {
                form.input()?;
                return Ok(Meaning::Op(Op::Mov { ty }));
            };
            form.take();
            let fits = matches!((ty, width), (Ty::U32, 32) | (Ty::U64, 64));
            if fits {
                Ok(Meaning::Op(Op::SpecialRegister { register: *register }))
            } else {
                Err(format!("`{name}` has {width} unsigned bits"))
            }
        }
        other => Err(format!("`mov` of {other:?}")),
    }
}

fn shared_address(ty: Ty, offset: i64) -> Result<Meaning, Unknown> {
    if ty == Ty::U32 { Ok(Meaning::SharedAddress(offset)) } else { Err("an address of shared memory has 32 bits".into()) }
}

/// `.relaxed.gpu` and the like; nothing for a weak access.
fn order(words: &mut Words<'_>) -> Result<Order, Unknown> {
    if words.flag("volatile") {
        return Ok(Order::Volatile);
    }
    // The other four name a scope behind them.
    let order = words.peek();
    if !matches!(order, "relaxed" | "acquire" | "release" | "acq_rel") {
        return Ok(Order::Weak);
    }
    words.next();
    let scope = words.scope()?;
    Ok(match order {
        "relaxed" => Order::Relaxed(scope),
        "acquire" => Order::Acquire(scope),
        "release" => Order::Release(scope),
        _ => Order::AcqRel(scope),
    })
}

/// `.shared` alone is the CTA's own.
fn space(words: &mut Words<'_>) -> Result<Space, Unknown> {
    words.choice(&[("global", Space::Global), ("shared", Space::Shared), ("shared::cluster", Space::Cluster)])
}

fn cache(words: &mut Words<'_>) -> Cache {
    if words.flag("nc") {
        return if words.flag("L1::no_allocate") { Cache::NonCoherentNoAllocate } else { Cache::NonCoherent };
    }
    words
        .option(&[
            ("ca", Cache::All),
            ("cg", Cache::Global),
            ("cs", Cache::Streaming),
            ("L1::evict_first", Cache::EvictFirst),
            ("L1::evict_last", Cache::EvictLast),
            ("L1::no_allocate", Cache::NoAllocate),
        ])
        .unwrap_or(Cache::Default)
}

pub(super) fn load<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    if words.flag("param") {
        let ty = words.bits()?;
        form.out()?;
        let Some(Operand::Address { base, offset, coordinates: None }) = form.take() else {
            return Err("`ld.param` without an address".into());
        };
        let index = *form.names.params.get(base).ok_or_else(|| format!("`{base}` is no parameter"))?;
        let offset_bytes = u32::try_from(*offset).map_err(|_| format!("{offset} lies in front of the parameter"))?;
        return Ok(Op::ParamLoad { index, offset_bytes, ty });
    }
    let (order, space, cache) = (order(words)?, space(words)?, cache(words));
    if let Some(signed) = words.option(&[("u8", false), ("s8", true)]) {
        form.out()?;
        form.address()?;
        return if order == Order::Weak {
            Ok(Op::LdByte { space, signed, cache })
        } else {
            Err("a byte is loaded without an order".into())
        };
    }
    let count = words.vector();
    form.vector_out(count)?;
    form.address()?;
    Ok(Op::Ld { space, ty: words.bits()?, count, order, cache })
}

pub(super) fn store<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    if words.flag("async") {
        words.need("weak.shared::cluster.mbarrier::complete_tx::bytes")?;
        let count = words.vector();
        let ty = words.choice(&[("b32", Ty::B32), ("b64", Ty::B64)])?;
        asynchronous(form, count)?;
        return Ok(Op::StAsync { ty, count });
    }
    let (order, space, cache) = (order(words)?, space(words)?, cache(words));
    form.address()?;
    if words.flag("u8") {
        form.input()?;
        return if order == Order::Weak { Ok(Op::StByte { space, cache }) } else { Err("a byte is stored without an order".into()) };
    }
    let count = words.vector();
    form.vector_in(count)?;
    Ok(Op::St { space, ty: words.bits()?, count, order, cache })
}

/// `[address], values, [mbarrier]`; the table has the mbarrier in front of the values.
fn asynchronous<'t>(form: &mut Form<'_, 't>, count: u8) -> Result<(), Unknown> {
    form.at_address()?;
    form.vector_in(count)?;
    let barrier: Value<'t> = form.plain_address()?;
    form.ins.insert(1, barrier);
    Ok(())
}

const ATOMICS: &[(&str, Atomic)] = &[
    ("add", Atomic::Add),
    ("min", Atomic::Min),
    ("max", Atomic::Max),
    ("and", Atomic::And),
    ("or", Atomic::Or),
    ("xor", Atomic::Xor),
    ("exch", Atomic::Exch),
    ("cas", Atomic::Cas),
    ("inc", Atomic::Inc),
    ("dec", Atomic::Dec),
];

/// The type behind an operation: bits for those that do not calculate.
fn atomic_type(op: Atomic, words: &mut Words<'_>) -> Result<Ty, Unknown> {
    match op {
        Atomic::And | Atomic::Or | Atomic::Xor | Atomic::Exch | Atomic::Cas => words.bits(),
        _ => words.ty(),
    }
}

/// `atom{.order.scope}.space.op{.noftz}.type`, and `red` with a vector in front of the type.
pub(super) fn atomic<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    if first == "red" && words.flag("async") {
        words.need("relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes")?;
        let op = words.choice(ATOMICS)?;
        let ty = atomic_type(op, words)?;
        asynchronous(form, 1)?;
        return Ok(Op::RedAsync { op, ty });
    }
    let (order, space, op) = (order(words)?, space(words)?, words.choice(ATOMICS)?);
    let keeps_subnormals = words.flag("noftz");
    let count = if first == "red" { words.vector() } else { 1 };
    let ty = atomic_type(op, words)?;
    // Halves have no other form; nothing else has this one.
    if keeps_subnormals != matches!(ty, Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2) {
        return Err(format!("`{}`: `.noftz` belongs to halves and to nothing else", words.opcode));
    }
    if first == "red" {
        form.address()?;
        form.vector_in(count)?;
        return Ok(Op::Red { space, op, ty, count, order });
    }
    form.out()?;
    form.address()?;
    form.inputs(if op == Atomic::Cas { 2 } else { 1 })?;
    Ok(Op::Atom { space, op, ty, order })
}

/// What steers caches, and `mapa`.
pub(super) fn cache_control<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    match first {
        "prefetch" if words.flag("tensormap") => {
            form.at_address()?;
            Ok(Op::TensormapPrefetch {})
        }
        "prefetch" => {
            words.need("global")?;
            form.address()?;
            Ok(Op::Prefetch { l1: words.choice(&[("L1", true), ("L2", false)])? })
        }
        "discard" => {
            words.need("global.L2")?;
            form.address()?;
            form.fixed(128)?;
            Ok(Op::DiscardL2 {})
        }
        "createpolicy" => {
            words.need("fractional")?;
            let evict_first = words.choice(&[("L2::evict_first", true), ("L2::evict_last", false)])?;
            words.need("b64")?;
            form.out()?;
            match form.word()? {
                "1.0" => Ok(Op::CreatePolicy { evict_first }),
                other => Err(format!("`{other}` of the accesses where all must have the policy: 1.0")),
            }
        }
        _ => {
            words.need("shared::cluster.u32")?;
            form.result_of(2)?;
            Ok(Op::MapShared {})
        }
    }
}
