//! What the probes are built with.

use super::{Check, Column, Contents, Probe, Rule};
use verdigris_kir::face::{Bf16, Bf16x2, F16, F16x2, Header, Kernel, Pointer, Val, build};
use verdigris_kir::inst::{Cache, Cmp, Op, Order, Space};
use verdigris_kir::ir::{Operand, Reg, Ty};
use verdigris_kir::program::{Address, Arg, KernelRef, Launch, Program, Residency, Step};

/// Bytes between two results of a lane.
pub(super) const SLOT: usize = 8;

pub(super) fn imm(value: u64) -> Operand {
    Operand::Imm(value)
}

/// A fresh register.
#[track_caller]
pub(super) fn register(k: Kernel<'_>, ty: Ty) -> Reg {
    match ty {
        Ty::Pred => k.var_unset::<bool>(None).reg(),
        Ty::B16 | Ty::U16 => k.var_unset::<u16>(None).reg(),
        Ty::S16 => k.var_unset::<i16>(None).reg(),
        Ty::B32 | Ty::U32 => k.var_unset::<u32>(None).reg(),
        Ty::S32 => k.var_unset::<i32>(None).reg(),
        Ty::B64 | Ty::U64 => k.var_unset::<u64>(None).reg(),
        Ty::S64 => k.var_unset::<i64>(None).reg(),
        Ty::F16 => k.var_unset::<F16>(None).reg(),
        Ty::Bf16 => k.var_unset::<Bf16>(None).reg(),
        Ty::F16x2 => k.var_unset::<F16x2>(None).reg(),
        Ty::Bf16x2 => k.var_unset::<Bf16x2>(None).reg(),
        Ty::F32 => k.var_unset::<f32>(None).reg(),
        Ty::F64 => k.var_unset::<f64>(None).reg(),
    }
}

/// An instruction with fresh registers for its results.
#[track_caller]
pub(super) fn emit(k: Kernel<'_>, op: &Op, ins: &[Operand]) -> Vec<Reg> {
    let outs: Vec<Reg> = op.signature().outs.iter().map(|ty| register(k, *ty)).collect();
    let list: Vec<Option<Reg>> = outs.iter().map(|reg| Some(*reg)).collect();
    k.instruction(op.clone(), &list, ins);
    outs
}

const fn load_op(space: Space, ty: Ty) -> Op {
    Op::Ld { space, ty, count: 1, order: Order::Weak, cache: Cache::Default }
}

/// The type under which a value stands in memory: predicates as 0 or 1 in 32 bits.
pub(super) const fn stored(ty: Ty) -> Ty {
    match ty {
        Ty::Pred => Ty::U32,
        other => other,
    }
}

/// Loads a value of any type from global memory.
#[track_caller]
pub(super) fn load(k: Kernel<'_>, ty: Ty, address: Operand, offset_bytes: usize) -> Reg {
    let word = emit(k, &load_op(Space::Global, stored(ty)), &[address, imm(offset_bytes as u64)])[0];
    if ty == Ty::Pred { emit(k, &Op::Setp { cmp: Cmp::Ne, ty: Ty::U32, ftz: false }, &[word.into(), imm(0)])[0] } else { word }
}

/// Stores a value of any type to global memory.
#[track_caller]
pub(super) fn store(k: Kernel<'_>, ty: Ty, address: Operand, offset_bytes: usize, value: Reg) {
    let value = if ty == Ty::Pred { emit(k, &Op::Selp { ty: Ty::U32 }, &[imm(1), imm(0), value.into()])[0] } else { value };
    let op = Op::St { space: Space::Global, ty: stored(ty), count: 1, order: Order::Weak, cache: Cache::Default };
    k.instruction(op, &[], &[address, imm(offset_bytes as u64), value.into()]);
}

/// Index of the thread in the grid.
#[track_caller]
pub(super) fn thread_of_grid(k: Kernel<'_>) -> Val<'_, u32> {
    k.cta() * k.threads() + k.thread()
}

/// The operand behind a value.
pub(super) fn operand<T: verdigris_kir::face::Scalar>(value: Val<'_, T>) -> Operand {
    verdigris_kir::face::AsVal::operand(&value)
}

/// The address of the thread's element in a buffer.
#[track_caller]
pub(super) fn own<'k>(k: Kernel<'k>, pointer: Pointer<'k>, bytes: u32) -> Operand {
    operand(pointer.at(thread_of_grid(k), bytes))
}

/// A column of results, one for each thread of the grid.
pub(super) fn column(buffer: usize, offset_bytes: usize, stride_bytes: usize, width_bytes: usize, count: usize) -> Column {
    Column { buffer, offset_bytes, stride_bytes, width_bytes, count }
}

pub(super) fn check(what: impl Into<String>, names: &[&'static str], result: Column, rule: Rule) -> Check {
    Check { what: what.into(), names: names.to_vec(), result, rule, operands: Vec::new() }
}

/// A probe of one launch whose arguments are its buffers in order, and then the maps.
pub(super) fn probe(
    header: Header,
    grid: u32,
    buffers: Vec<Contents>,
    checks: Vec<Check>,
    describe: impl for<'k> Fn(Kernel<'k>) + Send + Sync + 'static,
) -> Probe {
    probe_with(header, grid, buffers, Vec::new(), checks, Residency::Any, describe)
}

/// The same with further arguments behind the buffers.
pub(super) fn probe_with(
    header: Header,
    grid: u32,
    buffers: Vec<Contents>,
    more: Vec<Arg>,
    checks: Vec<Check>,
    residency: Residency,
    describe: impl for<'k> Fn(Kernel<'k>) + Send + Sync + 'static,
) -> Probe {
    let name = header.name.clone();
    let kernel = KernelRef::new(name.clone(), move || build(header.clone(), &describe));
    let mut args: Vec<Arg> = (0..buffers.len()).map(|slot| Arg::Pointer(Address::buffer(slot))).collect();
    args.extend(more);
    let launch = Launch { kernel, grid: [grid, 1, 1], residency, overlap: false, args: args.into() };
    let program = Program { steps: vec![Step::Launch(launch)], buffer_alignment_bytes: vec![256; buffers.len()], ..Program::default() };
    Probe { name, program, buffers, checks, magnitudes: None }
}

/// A buffer for results, full of a value that no result is likely to have.
pub(super) fn results(bytes: usize) -> Contents {
    Contents::Filled { bytes, value: 0xA5 }
}

/// Words of registers, one for each lane of the grid, [`SLOT`] bytes apart.
pub(super) fn slots(values: impl IntoIterator<Item = u64>) -> Vec<u8> {
    values.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// A value that agrees by bits or, for floats, as a number.
pub(super) fn rule_of(ty: Ty) -> Rule {
    if ty.is_float() { Rule::Number(ty) } else { Rule::Bits }
}
