//! The language: typed values with operators, verbs for effects, Rust for what happens while building.
//!
//! > An operator is pure. A verb has an effect. A Rust keyword happens while building.
//!
//! So `for step in 0..4 { … }` unrolls, [`Kernel::range`] loops on the GPU, and `if spec.bias { … }` decides what is built at all.
//! Verbs carry the names that PTX gives them.
//!
//! A [`Val`] is written once and never changes. A [`Var`] is a register that may be set again; standing in an expression it is read
//! there and then. Values belong to one kernel (the brand `'k`): mixing kernels, or adding an `f32` to a `u32`, does not compile.
//! Bodies of device control flow are `Fn` closures, so assigning to a host variable from inside a loop does not compile either.
//!
//! ```
//! use verdigris_kir::face::{build, Header};
//! use verdigris_kir::ir::Target;
//!
//! // y[i] = max(x[i], 0) for i < elements
//! let kernel = build(Header { name: "relu".into(), target: Target::Sm80, threads: 128, ..Header::default() }, |k| {
//!     let x = k.input("x", 4);
//!     let y = k.output("y", 4);
//!     let elements = k.scalar::<u32>("elements");
//!     let i = k.cta() * 128 + k.thread();
//!     k.when(i.lt(elements), || {
//!         let value = k.ld_global::<f32>(x.at(i, 4), 0);
//!         k.st_global(y.at(i, 4), 0, value.max(0.0));
//!     });
//! });
//! assert_eq!(kernel.params.len(), 3);
//! ```

mod control;
mod copy;
mod flow;
mod matrix;
mod memory;
mod sync;
mod value;
mod warp;

pub use copy::LoadOptions;
pub use flow::Role;
pub use matrix::WgmmaA;
pub use memory::{Pointer, SharedPiece};
pub use sync::{Late, Mbarrier, MbarrierArray, RemoteMbarrier};
pub use value::{AsVal, Bf16, Bf16x2, BitScalar, Comparable, F16, F16x2, FloatScalar, IntScalar, Number, Scalar, Val, Var};

use crate::inst::{Op, Special};
use crate::ir::{
    Access, BarrierDecl, Block, Inst, KernelBody, Loc, LocInfo, MapDecl, Operand, Param, ParamKind, Reg, RegInfo, RegKind, SharedDecl,
    Stmt, Target, Ty,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::panic::Location;

/// What is fixed of a kernel before its first line.
#[derive(Clone, Debug)]
pub struct Header {
    /// Entry name: the spec's.
    pub name: String,
    /// The chip it is for.
    pub target: Target,
    /// Threads of a CTA: a multiple of 32, at most 1024.
    pub threads: u32,
    /// CTAs that should fit on one SM together.
    pub min_ctas: u32,
    /// CTAs of a cluster along x.
    pub cluster: u32,
}

impl Default for Header {
    fn default() -> Self {
        Header { name: String::new(), target: Target::Sm80, threads: 128, min_ctas: 1, cluster: 1 }
    }
}

struct State {
    body: KernelBody,
    /// The innermost open block is last.
    blocks: Vec<Block>,
    /// The kernel's line at which a tile function was entered.
    scope: Option<Loc>,
    locations: HashMap<LocInfo, Loc>,
    /// First warp and warp count of the role that is being built.
    role: (u32, u32),
}

struct Recorder {
    state: RefCell<State>,
}

/// A kernel that is being built: a handle that is copied freely.
#[derive(Clone, Copy)]
pub struct Kernel<'k> {
    recorder: &'k Recorder,
    /// Makes `'k` invariant, so that a value of one kernel is no value of another.
    brand: PhantomData<fn(&'k ()) -> &'k ()>,
}

impl std::fmt::Debug for Kernel<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernel({})", self.recorder.state.borrow().body.name)
    }
}

/// Builds a kernel: runs `describe` once and returns what it recorded.
#[track_caller]
pub fn build(header: Header, describe: impl for<'k> FnOnce(Kernel<'k>)) -> KernelBody {
    let mut describe = Some(describe);
    record(header, Location::caller(), &mut |k| {
        if let Some(describe) = describe.take() {
            describe(k);
        }
    })
}

/// What [`build`] does, once for all closures: like every verb that runs one, it is compiled here and not again for each kernel.
fn record(header: Header, here: &'static Location<'static>, describe: &mut dyn for<'k> FnMut(Kernel<'k>)) -> KernelBody {
    let first = LocInfo { file: here.file(), line: here.line(), column: here.column(), inlined_at: None };
    let body = KernelBody {
        name: header.name,
        target: header.target,
        threads: header.threads,
        min_ctas: header.min_ctas,
        cluster: header.cluster,
        params: Vec::new(),
        registers: Vec::new(),
        shared: Vec::new(),
        shared_bytes: 0,
        barriers: Vec::new(),
        late: Vec::new(),
        locations: vec![first.clone()],
        body: Block::default(),
        allowed_spill_bytes: 0,
    };
    let warps = header.threads.div_ceil(32);
    let recorder = Recorder {
        state: RefCell::new(State {
            body,
            blocks: vec![Block::default()],
            scope: None,
            locations: HashMap::from([(first, Loc(0))]),
            role: (0, warps),
        }),
    };
    describe(Kernel { recorder: &recorder, brand: PhantomData });
    let mut state = recorder.state.into_inner();
    let mut body = state.body;
    body.body = state.blocks.pop().unwrap_or_default();
    assign_shared_offsets(&mut body);
    body
}

/// Largest alignment first, so that no padding arises between swizzled tiles.
fn assign_shared_offsets(body: &mut KernelBody) {
    let mut order: Vec<usize> = (0..body.shared.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(body.shared[i].alignment_bytes));
    let mut at = 0u32;
    for i in order {
        let piece = &mut body.shared[i];
        at = at.next_multiple_of(piece.alignment_bytes.max(1));
        piece.offset_bytes = at;
        at += piece.bytes;
    }
    body.shared_bytes = at;
}

/// The scope around a [`Kernel::scope_around`]: where what the caller handed in belongs.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'k> {
    kernel: Kernel<'k>,
    scope: Option<Loc>,
}

impl Caller<'_> {
    /// Runs a closure of the caller's: what it emits is no piece of the function that runs it.
    pub fn run<R>(self, body: impl FnOnce() -> R) -> R {
        self.kernel.in_scope(self.scope, body)
    }
}

impl<'k> Kernel<'k> {
    fn with<R>(self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.recorder.state.borrow_mut())
    }

    /// The caller's position, inside the open scope.
    #[track_caller]
    fn here(self) -> Loc {
        self.locate(Location::caller())
    }

    fn locate(self, at: &'static Location<'static>) -> Loc {
        self.with(|state| {
            let info = LocInfo { file: at.file(), line: at.line(), column: at.column(), inlined_at: state.scope };
            if let Some(&loc) = state.locations.get(&info) {
                return loc;
            }
            let loc = Loc(state.body.locations.len() as u32);
            state.body.locations.push(info.clone());
            state.locations.insert(info, loc);
            loc
        })
    }

    /// Runs `f` as a piece of the line `at`: faults in what it emits name that line first. For functions that emit on behalf of their
    /// caller; `#[track_caller]` does not reach into closures, so they take `Location::caller()` at their door. Those that also run a closure of
    /// their caller's take [`Kernel::scope_around`].
    pub fn scope<R>(self, at: &'static Location<'static>, f: impl FnOnce() -> R) -> R {
        self.scope_around(at, |_| f())
    }

    /// The same for functions that run a closure of their caller's within: `f` gets the scope that it was called in, and what runs by
    /// [`Caller::run`] keeps its own lines.
    pub fn scope_around<R>(self, at: &'static Location<'static>, f: impl FnOnce(Caller<'k>) -> R) -> R {
        let inner = self.locate(at);
        let caller = Caller { kernel: self, scope: self.scope_now() };
        self.in_scope(Some(inner), || f(caller))
    }

    fn in_scope<R>(self, scope: Option<Loc>, f: impl FnOnce() -> R) -> R {
        let outer = self.enter(scope);
        let result = f();
        self.enter(outer);
        result
    }

    /// Opens a scope; the one that was open.
    fn enter(self, scope: Option<Loc>) -> Option<Loc> {
        self.with(|state| std::mem::replace(&mut state.scope, scope))
    }

    fn scope_now(self) -> Option<Loc> {
        self.with(|state| state.scope)
    }

    fn new_register(self, ty: Ty, kind: RegKind, name: Option<&'static str>, loc: Loc) -> Reg {
        self.with(|state| {
            state.body.registers.push(RegInfo { ty, kind, name, loc });
            Reg(state.body.registers.len() as u32 - 1)
        })
    }

    fn push(self, stmt: Stmt) {
        self.with(|state| {
            if let Some(block) = state.blocks.last_mut() {
                block.stmts.push(stmt);
            }
        });
    }

    /// Records what `f` emits as a block of its own.
    fn block(self, f: &dyn Fn()) -> Block {
        self.with(|state| state.blocks.push(Block::default()));
        f();
        self.with(|state| state.blocks.pop()).unwrap_or_default()
    }

    /// Emits an instruction of the table by hand: results and operands in the order of its signature. The verbs are built from this;
    /// kernels need it for an instruction that has no verb.
    #[track_caller]
    pub fn instruction(self, op: Op, outs: &[Option<Reg>], ins: &[Operand]) {
        let loc = self.here();
        self.push(Stmt::Inst(Inst { op, outs: outs.to_vec(), ins: ins.to_vec(), guard: None, loc }));
    }

    /// Emits an instruction with one new result.
    #[track_caller]
    fn compute<T: Scalar>(self, op: Op, ins: &[Operand]) -> Val<'k, T> {
        let reg = self.new_register(T::TY, RegKind::Once, None, self.here());
        self.instruction(op, &[Some(reg)], ins);
        Val::new(self, reg.into())
    }

    /// Emits an instruction with several new results of one type.
    #[track_caller]
    fn compute_many<T: Scalar>(self, op: Op, count: usize, ins: &[Operand]) -> Vec<Val<'k, T>> {
        let loc = self.here();
        let regs: Vec<Reg> = (0..count).map(|_| self.new_register(T::TY, RegKind::Once, None, loc)).collect();
        let outs: Vec<Option<Reg>> = regs.iter().map(|&reg| Some(reg)).collect();
        self.instruction(op, &outs, ins);
        regs.into_iter().map(|reg| Val::new(self, reg.into())).collect()
    }

    /// A remark that stands in the text form and in the PTX.
    pub fn comment(self, text: impl Into<String>) {
        self.push(Stmt::Comment(text.into()));
    }

    /// Accepts register spills of this kernel up to `bytes`; say why beside the call.
    pub fn allow_spills(self, bytes: u32) {
        self.with(|state| state.body.allowed_spill_bytes = bytes);
    }

    // ---- parameters ------------------------------------------------------------------------------------------------

    fn param(self, name: &'static str, kind: ParamKind, loc: Loc) -> u32 {
        self.with(|state| {
            state.body.params.push(Param { name, kind, loc });
            state.body.params.len() as u32 - 1
        })
    }

    /// A number that the launch gives.
    #[track_caller]
    pub fn scalar<T: Scalar>(self, name: &'static str) -> Val<'k, T> {
        let index = self.param(name, ParamKind::Scalar(T::TY), self.here());
        self.compute(Op::ParamLoad { index, offset_bytes: 0, ty: T::TY }, &[])
    }

    #[track_caller]
    fn pointer(self, name: &'static str, access: Access, alignment_bytes: u32) -> Pointer<'k> {
        let index = self.param(name, ParamKind::Pointer { access, alignment_bytes }, self.here());
        Pointer::new(self.compute(Op::ParamLoad { index, offset_bytes: 0, ty: Ty::U64 }, &[]))
    }

    /// Global memory that the kernel only reads, with the alignment that it relies on.
    #[track_caller]
    pub fn input(self, name: &'static str, alignment_bytes: u32) -> Pointer<'k> {
        self.pointer(name, Access::Read, alignment_bytes)
    }

    /// Global memory that the kernel only writes.
    #[track_caller]
    pub fn output(self, name: &'static str, alignment_bytes: u32) -> Pointer<'k> {
        self.pointer(name, Access::Write, alignment_bytes)
    }

    /// Global memory that the kernel reads and writes.
    #[track_caller]
    pub fn in_out(self, name: &'static str, alignment_bytes: u32) -> Pointer<'k> {
        self.pointer(name, Access::ReadWrite, alignment_bytes)
    }

    /// A number to divide by; the only way to divide integers at run time.
    #[track_caller]
    pub fn divisor(self, name: &'static str) -> Divisor<'k> {
        // The caller's line, which `#[track_caller]` does not carry into the closure.
        let loc = self.here();
        let index = self.param(name, ParamKind::Divisor, loc);
        let word = |i: u32| -> Val<'k, u32> {
            let reg = self.new_register(Ty::U32, RegKind::Once, None, loc);
            let op = Op::ParamLoad { index, offset_bytes: 4 * i, ty: Ty::U32 };
            self.push(Stmt::Inst(Inst { op, outs: vec![Some(reg)], ins: Vec::new(), guard: None, loc }));
            Val::new(self, reg.into())
        };
        Divisor { divisor: word(0), multiplier: word(1), shift1: word(2), shift2: word(3) }
    }

    /// A tensor map; the value is its address for TMA.
    #[track_caller]
    pub fn tensor_map(self, name: &'static str, decl: MapDecl) -> TensorMap<'k> {
        let index = self.param(name, ParamKind::TensorMap(decl.clone()), self.here());
        TensorMap { address: self.compute(Op::ParamAddress { index }, &[]), decl }
    }

    /// A tensor map of which the kernel makes changed copies, for problems whose extents only the device knows.
    #[track_caller]
    pub fn tensor_map_template(self, name: &'static str, decl: MapDecl) -> TensorMapTemplate<'k> {
        let index = self.param(name, ParamKind::TensorMap(decl.clone()), self.here());
        TensorMapTemplate { kernel: self, index, decl }
    }

    /// Tensor maps of one shape among the parameters, side by side: a table from which an index picks at run time. Each takes 128 bytes of
    /// the 32,764 that parameters have.
    #[track_caller]
    pub fn tensor_map_table(self, name: &'static str, decl: MapDecl, count: u32) -> TensorMapTable<'k> {
        let loc = self.here();
        // Parameters follow each other, and a map's size is a multiple of its alignment: so the table has no gaps.
        let indices: Vec<u32> = (0..count.max(1)).map(|_| self.param(name, ParamKind::TensorMap(decl.clone()), loc)).collect();
        TensorMapTable { first: self.compute(Op::ParamAddress { index: indices[0] }, &[]), decl }
    }

    // ---- who am I --------------------------------------------------------------------------------------------------

    /// Reads a special register.
    #[track_caller]
    pub fn special(self, register: Special) -> Val<'k, u32> {
        self.compute(Op::SpecialRegister { register }, &[])
    }

    /// Thread index in the CTA.
    #[track_caller]
    pub fn thread(self) -> Val<'k, u32> {
        self.special(Special::Tid)
    }

    /// CTA index along x.
    #[track_caller]
    pub fn cta(self) -> Val<'k, u32> {
        self.special(Special::CtaX)
    }

    /// Lane index in the warp.
    #[track_caller]
    pub fn lane(self) -> Val<'k, u32> {
        self.special(Special::Lane)
    }

    /// Warp index in the CTA, in a form that the chip knows to be the same in all lanes.
    #[track_caller]
    pub fn warp(self) -> Val<'k, u32> {
        self.uniform(self.thread() >> 5)
    }

    /// CTA's rank in its cluster.
    #[track_caller]
    pub fn cluster_rank(self) -> Val<'k, u32> {
        self.special(Special::ClusterCtaRank)
    }

    /// The first warp and the number of warps of the role that is being built; the whole CTA outside of roles.
    pub fn role_warps(self) -> (u32, u32) {
        self.with(|state| state.role)
    }

    /// Threads of the CTA.
    pub fn threads(self) -> u32 {
        self.with(|state| state.body.threads)
    }

    /// CTAs of a cluster.
    pub fn cluster_ctas(self) -> u32 {
        self.with(|state| state.body.cluster)
    }

    /// A constant.
    pub fn constant<T: Scalar>(self, value: T) -> Val<'k, T> {
        Val::new(self, Operand::Imm(value.bits()))
    }

    /// A register that may be set again, with its first value.
    #[track_caller]
    pub fn var<T: Scalar>(self, first: impl AsVal<'k, T>) -> Var<'k, T> {
        let var = self.var_unset(None);
        var.set(first);
        var
    }

    /// A register that may be set again, under a name that the text form shows.
    #[track_caller]
    pub fn var_named<T: Scalar>(self, name: &'static str, first: impl AsVal<'k, T>) -> Var<'k, T> {
        let var = self.var_unset(Some(name));
        var.set(first);
        var
    }

    /// A register without a first value: reading it before it is set is a fault.
    #[track_caller]
    pub fn var_unset<T: Scalar>(self, name: Option<&'static str>) -> Var<'k, T> {
        Var::new(self, self.new_register(T::TY, RegKind::Mutable, name, self.here()))
    }
}

/// A tensor map: a parameter, or in global memory.
#[derive(Clone, Debug)]
pub struct TensorMap<'k> {
    /// Its generic address.
    pub address: Val<'k, u64>,
    /// What it was declared as.
    pub decl: MapDecl,
}

impl<'k> TensorMap<'k> {
    /// A map at a 128-byte aligned address in global memory, handed over by [`Kernel::tensormap_publish`].
    pub fn in_global(address: Val<'k, u64>, decl: MapDecl) -> Self {
        TensorMap { address, decl }
    }
}

/// A tensor map parameter of which changed copies are used, and which is not used itself.
#[derive(Clone, Debug)]
pub struct TensorMapTemplate<'k> {
    kernel: Kernel<'k>,
    index: u32,
    decl: MapDecl,
}

impl<'k> TensorMapTemplate<'k> {
    /// What it was declared as, and so what its copies are.
    pub fn decl(&self) -> &MapDecl {
        &self.decl
    }

    /// Eight bytes of it: to be copied, for their meaning is the driver's.
    #[track_caller]
    fn word(&self, offset_bytes: u32) -> Val<'k, u64> {
        self.kernel.compute(Op::ParamLoad { index: self.index, offset_bytes, ty: Ty::B64 }, &[])
    }
}

/// Tensor maps of one shape, side by side among the parameters.
#[derive(Clone, Debug)]
pub struct TensorMapTable<'k> {
    first: Val<'k, u64>,
    decl: MapDecl,
}

impl<'k> TensorMapTable<'k> {
    /// The map at `index`, which is less than the table's count.
    #[track_caller]
    pub fn at(&self, index: impl AsVal<'k, u32>) -> TensorMap<'k> {
        TensorMap { address: Pointer::new(self.first).at(index, 128), decl: self.decl.clone() }
    }
}

/// A divisor fixed at launch; see [`crate::program::Divisor`] for the method.
#[derive(Clone, Copy, Debug)]
pub struct Divisor<'k> {
    divisor: Val<'k, u32>,
    multiplier: Val<'k, u32>,
    shift1: Val<'k, u32>,
    shift2: Val<'k, u32>,
}

impl<'k> Divisor<'k> {
    /// A divisor that the kernel has read from memory: the words of [`crate::program::Divisor::words`].
    pub fn of_words([divisor, multiplier, shift1, shift2]: [Val<'k, u32>; 4]) -> Self {
        Divisor { divisor, multiplier, shift1, shift2 }
    }

    /// The divisor itself.
    pub fn value(&self) -> Val<'k, u32> {
        self.divisor
    }

    /// `n / divisor`, for every `u32`.
    #[track_caller]
    pub fn quotient(&self, n: impl AsVal<'k, u32>) -> Val<'k, u32> {
        let t = self.multiplier.mul_hi(n.operand_val(self.divisor.kernel()));
        ((n.operand_val(self.divisor.kernel()) - t).shr(self.shift1) + t).shr(self.shift2)
    }

    /// `(n / divisor, n % divisor)`.
    #[track_caller]
    pub fn split(&self, n: impl AsVal<'k, u32>) -> (Val<'k, u32>, Val<'k, u32>) {
        let n = n.operand_val(self.divisor.kernel());
        let quotient = self.quotient(n);
        (quotient, n - quotient * self.divisor)
    }
}

impl<'k> Kernel<'k> {
    fn declare_shared(self, name: &'static str, bytes: u32, alignment_bytes: u32, loc: Loc) -> u32 {
        self.with(|state| {
            state.body.shared.push(SharedDecl { name, bytes, alignment_bytes, offset_bytes: 0, loc });
            state.body.shared.len() as u32 - 1
        })
    }

    fn declare_barriers(self, name: &'static str, count: u32, loc: Loc) -> (u32, Late<'k>) {
        let shared = self.declare_shared(name, 8 * count, 8, loc);
        let arrivals = self.late(0);
        self.with(|state| state.body.barriers.push(BarrierDecl { name, shared, count, arrivals: arrivals.index(), loc }));
        (shared, arrivals)
    }
}
