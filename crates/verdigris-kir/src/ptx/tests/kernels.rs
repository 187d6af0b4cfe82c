//! Small kernels written as data.

use crate::inst::{BulkReduce, Cache, Cmp, Fence, MatrixType, Op, Order, Round, Scope, Space, Special, WgmmaShape};
use crate::ir::{
    Access, BarrierDecl, Block, Guard, Inst, KernelBody, Loc, LocInfo, MapDecl, MapType, Operand, Param, ParamKind, Reg, RegInfo, RegKind,
    Role, SharedDecl, Stmt, Swizzle, Target, Ty,
};

/// Writes a kernel down piece by piece.
pub(crate) struct Draft {
    pub(crate) body: KernelBody,
    pub(crate) loc: Loc,
}

impl Draft {
    pub(crate) fn new(name: &str, target: Target, threads: u32) -> Draft {
        let own = LocInfo { file: "crates/example/src/kernel.rs", line: 10, column: 1, inlined_at: None };
        Draft {
            body: KernelBody {
                name: name.into(),
                target,
                threads,
                min_ctas: 1,
                cluster: 1,
                params: vec![],
                registers: vec![],
                shared: vec![],
                shared_bytes: 0,
                barriers: vec![],
                late: vec![],
                locations: vec![own],
                body: Block::default(),
                allowed_spill_bytes: 0,
            },
            loc: Loc(0),
        }
    }

    pub(crate) fn at(&mut self, line: u32) {
        self.loc = self.position("crates/example/src/kernel.rs", line, None);
    }

    pub(crate) fn position(&mut self, file: &'static str, line: u32, inlined_at: Option<Loc>) -> Loc {
        self.body.locations.push(LocInfo { file, line, column: 5, inlined_at });
        Loc(self.body.locations.len() as u32 - 1)
    }

    pub(crate) fn param(&mut self, name: &'static str, kind: ParamKind) -> u32 {
        self.body.params.push(Param { name, kind, loc: self.loc });
        self.body.params.len() as u32 - 1
    }

    pub(crate) fn shared(&mut self, name: &'static str, bytes: u32, alignment_bytes: u32) -> u32 {
        let offset_bytes = self.body.shared_bytes.next_multiple_of(alignment_bytes);
        self.body.shared.push(SharedDecl { name, bytes, alignment_bytes, offset_bytes, loc: self.loc });
        self.body.shared_bytes = offset_bytes + bytes;
        self.body.shared.len() as u32 - 1
    }

    pub(crate) fn reg(&mut self, ty: Ty) -> Reg {
        self.named(ty, None)
    }

    pub(crate) fn named(&mut self, ty: Ty, name: Option<&'static str>) -> Reg {
        self.body.registers.push(RegInfo { ty, kind: RegKind::Mutable, name, loc: self.loc });
        Reg(self.body.registers.len() as u32 - 1)
    }

    pub(crate) fn inst(&self, op: Op, outs: &[Reg], ins: &[Operand]) -> Stmt {
        Stmt::Inst(Inst { op, outs: outs.iter().map(|reg| Some(*reg)).collect(), ins: ins.to_vec(), guard: None, loc: self.loc })
    }

    /// One instruction with a fresh register for its only result.
    pub(crate) fn value(&mut self, block: &mut Block, op: Op, ins: &[Operand]) -> Reg {
        let out = self.reg(op.signature().outs[0]);
        block.stmts.push(self.inst(op, &[out], ins));
        out
    }

    pub(crate) fn finish(mut self, block: Block) -> KernelBody {
        self.body.body = block;
        self.body
    }
}

pub(crate) fn imm(value: u64) -> Operand {
    Operand::Imm(value)
}

/// `y[i] = x[i] · 2 + 1` for i < n, in a grid-stride loop.
pub(crate) fn scale() -> KernelBody {
    let mut d = Draft::new("pointwise.scale/f32", Target::Sm80, 256);
    let pointer = |access| ParamKind::Pointer { access, alignment_bytes: 4 };
    let x = d.param("x", pointer(Access::Read));
    let y = d.param("y", pointer(Access::Write));
    let n = d.param("n", ParamKind::Scalar(Ty::U32));
    let mut b = Block::default();
    d.at(12);
    let x = d.value(&mut b, Op::ParamLoad { index: x, offset_bytes: 0, ty: Ty::U64 }, &[]);
    let y = d.value(&mut b, Op::ParamLoad { index: y, offset_bytes: 0, ty: Ty::U64 }, &[]);
    let n = d.value(&mut b, Op::ParamLoad { index: n, offset_bytes: 0, ty: Ty::U32 }, &[]);
    let tid = d.value(&mut b, Op::SpecialRegister { register: Special::Tid }, &[]);
    let cta = d.value(&mut b, Op::SpecialRegister { register: Special::CtaX }, &[]);
    d.at(13);
    let first = d.value(&mut b, Op::IMadLo { ty: Ty::U32 }, &[cta.into(), imm(256), tid.into()]);
    let i = d.named(Ty::U32, Some("i"));
    b.stmts.push(d.inst(Op::Mov { ty: Ty::U32 }, &[i], &[first.into()]));
    d.at(14);
    let mut head = Block::default();
    let go = d.value(&mut head, Op::Setp { cmp: Cmp::Lt, ty: Ty::U32, ftz: false }, &[i.into(), n.into()]);
    let mut body = Block::default();
    d.at(15);
    let kernel_line = d.loc;
    d.loc = d.position("crates/example/src/tile/view.rs", 40, Some(kernel_line));
    let from = d.value(&mut body, Op::IMadWide { ty: Ty::U32 }, &[i.into(), imm(4), x.into()]);
    let ld = Op::Ld { space: Space::Global, ty: Ty::F32, count: 1, order: Order::Weak, cache: Cache::NonCoherent };
    let value = d.value(&mut body, ld, &[from.into(), imm(0)]);
    d.loc = kernel_line;
    let fma = Op::Fma { ty: Ty::F32, rounding: Round::Nearest, ftz: false, saturate: false, relu: false };
    let float = |value: f32| imm(u64::from(value.to_bits()));
    let result = d.value(&mut body, fma, &[value.into(), float(2.0), float(1.0)]);
    d.loc = d.position("crates/example/src/tile/view.rs", 60, Some(kernel_line));
    let to = d.value(&mut body, Op::IMadWide { ty: Ty::U32 }, &[i.into(), imm(4), y.into()]);
    let st = Op::St { space: Space::Global, ty: Ty::F32, count: 1, order: Order::Weak, cache: Cache::Default };
    body.stmts.push(d.inst(st, &[], &[to.into(), imm(0), result.into()]));
    d.at(16);
    let grid = d.value(&mut body, Op::SpecialRegister { register: Special::GridX }, &[]);
    body.stmts.push(d.inst(Op::IMadLo { ty: Ty::U32 }, &[i], &[grid.into(), imm(256), i.into()]));
    b.stmts.push(Stmt::Comment("all elements of this thread".into()));
    b.stmts.push(Stmt::Loop { head, cond: go, body, name: "elements", loc: kernel_line });
    d.finish(b)
}

/// One 64×64×64 bf16 tile: a producer warp loads by TMA, a warpgroup multiplies, and the result is added to the output by TMA.
pub(crate) fn tile() -> KernelBody {
    let mut d = Draft::new("example.tile", Target::Sm90a, 256);
    d.body.cluster = 2;
    let map = |ty, access| {
        let (box_dims, swizzle) = if ty == MapType::Bf16 { (vec![64, 64], Swizzle::B128) } else { (vec![64, 64], Swizzle::None) };
        ParamKind::TensorMap(MapDecl { ty, rank: 2, box_dims, im2col: false, swizzle, access })
    };
    let a = d.param("a", map(MapType::Bf16, Access::Read));
    let c = d.param("c", map(MapType::F32, Access::ReadWrite));
    let a_tile = d.shared("a_tile", 8192, 1024);
    let c_tile = d.shared("c_tile", 16384, 1024);
    let full = d.shared("full", 8, 8);
    d.body.late.push(1);
    d.body.barriers.push(BarrierDecl { name: "full", shared: full, count: 1, arrivals: 0, loc: d.loc });

    let mut b = Block::default();
    d.at(20);
    let tid = d.value(&mut b, Op::SpecialRegister { register: Special::Tid }, &[]);
    let warp = d.value(&mut b, Op::Shr { ty: Ty::U32 }, &[tid.into(), imm(5)]);
    let a_map = d.value(&mut b, Op::ParamAddress { index: a }, &[]);
    let c_map = d.value(&mut b, Op::ParamAddress { index: c }, &[]);
    let a_at = d.value(&mut b, Op::SharedAddress { index: a_tile }, &[]);
    let c_at = d.value(&mut b, Op::SharedAddress { index: c_tile }, &[]);
    let barrier = d.value(&mut b, Op::SharedAddress { index: full }, &[]);
    d.at(21);
    let first = d.value(&mut b, Op::Setp { cmp: Cmp::Eq, ty: Ty::U32, ftz: false }, &[tid.into(), imm(0)]);
    let mut then = Block::default();
    then.stmts.push(d.inst(Op::MbarrierInit {}, &[], &[barrier.into(), imm(0), Operand::Late(0)]));
    then.stmts.push(d.inst(Op::MemoryFence { fence: Fence::MbarrierInit }, &[], &[]));
    b.stmts.push(Stmt::If { cond: first, then, otherwise: Block::default(), loc: d.loc });
    b.stmts.push(d.inst(Op::ClusterArrive { relaxed: false }, &[], &[]));
    b.stmts.push(d.inst(Op::ClusterWait {}, &[], &[]));

    d.at(25);
    let mut producer = Block::default();
    producer.stmts.push(d.inst(Op::Setmaxnreg { increase: false, registers: 40 }, &[], &[]));
    let elected = d.value(&mut producer, Op::Elect {}, &[imm(0xFFFF_FFFF)]);
    let guard = Some(Guard { pred: elected, negate: false });
    let mut issue = vec![
        d.inst(Op::MbarrierArriveExpect { space: Space::Shared }, &[], &[barrier.into(), imm(0), imm(8192)]),
        d.inst(
            Op::TmaLoad { rank: 2, im2col: false, multicast: true, hint: false },
            &[],
            &[a_at.into(), a_map.into(), imm(0), imm(64), barrier.into(), imm(1)],
        ),
        d.inst(Op::MbarrierWait { scope: Scope::Cta }, &[], &[barrier.into(), imm(0), imm(0)]),
    ];
    for stmt in &mut issue {
        if let Stmt::Inst(inst) = stmt {
            inst.guard = guard;
        }
    }
    producer.stmts.extend(issue);

    d.at(30);
    let mut consumer = Block::default();
    consumer.stmts.push(d.inst(Op::Setmaxnreg { increase: true, registers: 232 }, &[], &[]));
    consumer.stmts.push(d.inst(Op::MbarrierWait { scope: Scope::Cta }, &[], &[barrier.into(), imm(0), imm(0)]));
    let chunk = d.value(&mut consumer, Op::Shr { ty: Ty::U32 }, &[a_at.into(), imm(4)]);
    let wide = d.value(
        &mut consumer,
        Op::Cvt { to: Ty::U64, from: Ty::U32, rounding: crate::inst::CvtRound::None, ftz: false, saturate: false },
        &[chunk.into()],
    );
    let descriptor = d.value(&mut consumer, Op::Or { ty: Ty::B64 }, &[wide.into(), imm(0x4000_0040_0001_0000)]);
    let accumulators: Vec<Reg> = (0..32).map(|_| d.named(Ty::F32, Some("acc"))).collect();
    consumer.stmts.push(d.inst(Op::WgmmaFence {}, &[], &[]));
    for step in 0..4u64 {
        let at = d.value(&mut consumer, Op::IAdd { ty: Ty::U64 }, &[descriptor.into(), imm(2 * step)]);
        let shape = WgmmaShape {
            n: 64,
            a: MatrixType::Bf16,
            b: MatrixType::Bf16,
            d: MatrixType::F32,
            a_in_registers: false,
            transpose_a: false,
            transpose_b: false,
            negate_a: false,
            negate_b: false,
            saturate: false,
            sparse: false,
        };
        consumer.stmts.push(d.inst(Op::Wgmma { shape }, &accumulators, &[at.into(), at.into(), imm(u64::from(step > 0))]));
    }
    consumer.stmts.push(d.inst(Op::WgmmaCommit {}, &[], &[]));
    consumer.stmts.push(d.inst(Op::WgmmaWait { pending: 0 }, &[], &[]));
    d.at(36);
    let to = d.value(&mut consumer, Op::IMadLo { ty: Ty::U32 }, &[tid.into(), imm(128), c_at.into()]);
    for (index, four) in accumulators.chunks(4).enumerate() {
        let st = Op::St { space: Space::Shared, ty: Ty::F32, count: 4, order: Order::Weak, cache: Cache::Default };
        let mut ins = vec![to.into(), imm((16 * index as u64).wrapping_sub(4 * 128 * 32))];
        ins.extend(four.iter().map(|reg| Operand::from(*reg)));
        consumer.stmts.push(d.inst(st, &[], &ins));
    }
    consumer.stmts.push(d.inst(Op::MemoryFence { fence: Fence::ProxyAsyncShared }, &[], &[]));
    consumer.stmts.push(d.inst(Op::BarSync {}, &[], &[imm(1), imm(128)]));
    let elected = d.value(&mut consumer, Op::Elect {}, &[imm(0xFFFF_FFFF)]);
    let mut store = Block::default();
    let reduce = Op::TmaReduce { rank: 2, op: BulkReduce::Add, im2col: false };
    store.stmts.push(d.inst(reduce, &[], &[c_map.into(), imm(0), imm(0), c_at.into()]));
    store.stmts.push(d.inst(Op::BulkCommit {}, &[], &[]));
    store.stmts.push(d.inst(Op::BulkWait { pending: 0, read: true }, &[], &[]));
    consumer.stmts.push(Stmt::If { cond: elected, then: store, otherwise: Block::default(), loc: d.loc });

    let role = |name, first_warp, body, registers, loc| Role { name, first_warp, warps: 4, registers: Some(registers), body, loc };
    let loc = d.loc;
    b.stmts.push(Stmt::Roles {
        warp: warp.into(),
        roles: vec![role("producer", 0, producer, 40, loc), role("consumer", 4, consumer, 232, loc)],
        loc,
    });
    d.finish(b)
}

/// Bias and ReLU over the rows of a matrix, written in the language.
pub(crate) fn bias_relu() -> KernelBody {
    use crate::face::{Header, build};
    let header = Header { name: "pointwise.bias_relu".into(), target: Target::Sm80, threads: 256, ..Header::default() };
    build(header, |k| {
        let x = k.input("x", 16);
        let bias = k.input("bias", 4);
        let y = k.output("y", 16);
        let elements = k.scalar::<u32>("elements");
        let channels = k.divisor("channels");

        let first = (k.cta() * 256 + k.thread()) * 4;
        k.when(first.lt(elements), || {
            let values = k.ld_global_vector::<f32>(x.at(first, 4), 0, 4, Cache::NonCoherent);
            let out: Vec<_> = values
                .iter()
                .zip(0u32..)
                .map(|(value, lane)| {
                    let (_, channel) = channels.split(first + lane);
                    (*value + k.ld_global::<f32>(bias.at(channel, 4), 0)).max(0.0)
                })
                .collect();
            k.st_global_vector(y.at(first, 4), 0, &out, Cache::Default);
        });
    })
}

/// Every kind of control flow, a result that nobody wants, and constants that need a register.
pub(crate) fn control() -> KernelBody {
    let mut d = Draft::new("control", Target::Sm80, 256);
    let y = d.param("y", ParamKind::Pointer { access: Access::ReadWrite, alignment_bytes: 4 });
    let mut b = Block::default();
    d.at(50);
    let y = d.value(&mut b, Op::ParamLoad { index: y, offset_bytes: 0, ty: Ty::U64 }, &[]);
    let tid = d.value(&mut b, Op::SpecialRegister { register: Special::Tid }, &[]);
    let first = d.value(&mut b, Op::Shr { ty: Ty::U32 }, &[tid.into(), imm(5)]);
    let warp = d.value(&mut b, Op::Shfl { mode: crate::inst::Shuffle::Index }, &[first.into(), imm(0), imm(31), imm(0xFFFF_FFFF)]);
    let cta = d.value(&mut b, Op::SpecialRegister { register: Special::CtaX }, &[]);
    let beyond = d.value(&mut b, Op::Setp { cmp: Cmp::Gt, ty: Ty::U32, ftz: false }, &[cta.into(), imm(100)]);
    b.stmts.push(Stmt::StopWhen { cond: beyond, loc: d.loc });

    d.at(60);
    let atom = Op::Atom { space: Space::Global, op: crate::inst::Atomic::Add, ty: Ty::U32, order: Order::Relaxed(Scope::Gpu) };
    let count = |d: &Draft, n: u64| {
        let mut stmt = d.inst(atom.clone(), &[], &[y.into(), imm(4), imm(n)]);
        if let Stmt::Inst(inst) = &mut stmt {
            inst.outs = vec![None];
        }
        Block { stmts: vec![stmt] }
    };
    // Warps 1 to 2 and 5 to 6 have work; 5 divides its own.
    let role = |name, first_warp, warps, body, loc| Role { name, first_warp, warps, registers: None, body, loc };
    let loc = d.loc;
    let inner = vec![role("left", 5, 1, count(&d, 1), loc), role("right", 6, 1, count(&d, 2), loc)];
    let inner = Block { stmts: vec![Stmt::Roles { warp: warp.into(), roles: inner, loc }] };
    let roles = vec![role("early", 1, 2, count(&d, 3), loc), role("late", 5, 2, inner, loc)];
    b.stmts.push(Stmt::Roles { warp: warp.into(), roles, loc });

    d.at(70);
    let half = d.named(Ty::F16, Some("half"));
    b.stmts.push(d.inst(Op::Mov { ty: Ty::F16 }, &[half], &[imm(0x3C00)]));
    let i = d.named(Ty::U32, Some("i"));
    b.stmts.push(d.inst(Op::Mov { ty: Ty::U32 }, &[i], &[imm(0)]));
    let mut head = Block::default();
    let add = Op::FAdd { ty: Ty::F16, rounding: Round::Nearest, ftz: false, saturate: false };
    head.stmts.push(d.inst(add, &[half], &[half.into(), imm(0x4000)]));
    head.stmts.push(d.inst(Op::IAdd { ty: Ty::U32 }, &[i], &[i.into(), imm(1)]));
    let again = d.value(&mut head, Op::Setp { cmp: Cmp::Lt, ty: Ty::U32, ftz: false }, &[i.into(), cta.into()]);
    b.stmts.push(Stmt::Loop { head, cond: again, body: Block::default(), name: "repeat", loc: d.loc });
    let st = Op::St { space: Space::Global, ty: Ty::F16, count: 1, order: Order::Weak, cache: Cache::Default };
    let then = Block { stmts: vec![d.inst(st.clone(), &[], &[y.into(), imm(0), half.into()])] };
    let otherwise = Block { stmts: vec![d.inst(st, &[], &[y.into(), imm(0), imm(0x7C00)])] };
    b.stmts.push(Stmt::If { cond: again, then, otherwise, loc: d.loc });
    b.stmts.push(d.inst(Op::BarSync {}, &[], &[imm(2), imm(0)]));
    d.finish(b)
}
