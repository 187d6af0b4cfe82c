//! What a kernel is once it is built: a tree of blocks over typed, mutable registers.
//!
//! There is no control-flow graph, no phi and no optimizer: PTX registers are mutable, `ptxas` allocates and optimizes, and
//! our own pass is the verifier. A [`KernelBody`] is plain data; the verifier, the printer and the interpreter read it and
//! nothing else.

use crate::inst::Op;
use std::fmt;

/// The type of a register or an immediate: what PTX calls its fundamental and packed types.
///
/// `B16`, `B32` and `B64` are bits of that width without a meaning; an instruction that wants a typed operand takes bits
/// of the same width too, as PTX does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ty {
    /// One bit: a condition.
    Pred,
    /// 16 bits without a meaning.
    B16,
    /// 32 bits without a meaning: packed bytes, packed halves.
    B32,
    /// 64 bits without a meaning.
    B64,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    S16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    S32,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    S64,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// Two binary16 in 32 bits, the first in the low half.
    F16x2,
    /// Two bfloat16 in 32 bits, the first in the low half.
    Bf16x2,
    /// IEEE binary32.
    F32,
    /// IEEE binary64.
    F64,
}

impl Ty {
    /// Width in bits; a predicate counts as one.
    pub const fn bits(self) -> u32 {
        match self {
            Ty::Pred => 1,
            Ty::B16 | Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => 16,
            Ty::B32 | Ty::U32 | Ty::S32 | Ty::F32 | Ty::F16x2 | Ty::Bf16x2 => 32,
            Ty::B64 | Ty::U64 | Ty::S64 | Ty::F64 => 64,
        }
    }

    /// Width in bytes as stored in memory.
    pub const fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    /// The suffix PTX writes: `u32`, `f16x2`, `pred`.
    pub const fn ptx(self) -> &'static str {
        match self {
            Ty::Pred => "pred",
            Ty::B16 => "b16",
            Ty::B32 => "b32",
            Ty::B64 => "b64",
            Ty::U16 => "u16",
            Ty::S16 => "s16",
            Ty::U32 => "u32",
            Ty::S32 => "s32",
            Ty::U64 => "u64",
            Ty::S64 => "s64",
            Ty::F16 => "f16",
            Ty::Bf16 => "bf16",
            Ty::F16x2 => "f16x2",
            Ty::Bf16x2 => "bf16x2",
            Ty::F32 => "f32",
            Ty::F64 => "f64",
        }
    }

    /// The untyped bits of the same width (`Pred` stays `Pred`).
    pub const fn as_bits(self) -> Ty {
        match self.bits() {
            1 => Ty::Pred,
            16 => Ty::B16,
            32 => Ty::B32,
            _ => Ty::B64,
        }
    }

    /// True for floating-point types, packed ones included.
    pub const fn is_float(self) -> bool {
        matches!(self, Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 | Ty::F32 | Ty::F64)
    }

    /// True for signed integers.
    pub const fn is_signed(self) -> bool {
        matches!(self, Ty::S16 | Ty::S32 | Ty::S64)
    }

    /// True for integers and untyped bits.
    pub const fn is_integer(self) -> bool {
        !self.is_float() && !matches!(self, Ty::Pred)
    }
}

impl fmt::Display for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.ptx())
    }
}

/// A register: an index into [`KernelBody::registers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg(pub u32);

impl fmt::Display for Reg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}", self.0)
    }
}

/// How often a register may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegKind {
    /// Written by exactly one instruction: the register behind a `Val`.
    Once,
    /// Written any number of times: the register behind a `Var`, a fragment element, an accumulator.
    Mutable,
}

/// What is known of a register.
#[derive(Clone, Debug)]
pub struct RegInfo {
    /// Its type.
    pub ty: Ty,
    /// Whether it is written once or many times.
    pub kind: RegKind,
    /// The kernel author's name for it, if there is one.
    pub name: Option<&'static str>,
    /// Where it was declared.
    pub loc: Loc,
}

/// An operand of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// The value of a register.
    Reg(Reg),
    /// A constant: the bits of the value, in the low bits; the slot of the instruction gives the type.
    Imm(u64),
    /// A constant that is known only when the kernel is complete: an index into [`KernelBody::late`].
    Late(u32),
}

impl Operand {
    /// The register, if it is one.
    pub fn reg(self) -> Option<Reg> {
        match self {
            Operand::Reg(reg) => Some(reg),
            _ => None,
        }
    }
}

impl From<Reg> for Operand {
    fn from(reg: Reg) -> Self {
        Operand::Reg(reg)
    }
}

/// A place in the kernel's Rust source: an index into [`KernelBody::locations`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Loc(pub u32);

/// One source position, and the position it was inlined at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LocInfo {
    /// Source file as rustc names it: relative to the workspace for our own code.
    pub file: &'static str,
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub column: u32,
    /// The caller's position, when this one stands inside a tile function: the kernel's own line is at the end of the chain.
    pub inlined_at: Option<Loc>,
}

impl fmt::Display for LocInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// One instruction: an operation of the table, what it writes, what it reads.
#[derive(Clone, Debug)]
pub struct Inst {
    /// The operation with its attributes.
    pub op: Op,
    /// Registers written, in the order of the operation's signature. `None` is a result that nobody wants (PTX `_`).
    pub outs: Vec<Option<Reg>>,
    /// Operands read, in the order of the operation's signature.
    pub ins: Vec<Operand>,
    /// The instruction takes effect only where this predicate holds (`@p`), or does not hold (`@!p`).
    pub guard: Option<Guard>,
    /// The source position.
    pub loc: Loc,
}

/// A predicate in front of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Guard {
    /// The predicate register.
    pub pred: Reg,
    /// Take effect where the predicate is false.
    pub negate: bool,
}

/// A list of statements run one after the other.
#[derive(Clone, Debug, Default)]
pub struct Block {
    /// The statements.
    pub stmts: Vec<Stmt>,
}

/// A statement: an instruction or a structured piece of control flow.
#[derive(Clone, Debug)]
pub enum Stmt {
    /// An instruction.
    Inst(Inst),
    /// `if cond { then } else { otherwise }`; lanes that disagree run the two sides one after the other and meet again behind them.
    If {
        /// The condition: a predicate register.
        cond: Reg,
        /// The side taken where the condition holds.
        then: Block,
        /// The side taken where it does not.
        otherwise: Block,
        /// The source position.
        loc: Loc,
    },
    /// `loop { head; if !cond { break }; body }`. A `while` has its test in `head`; a `repeat_until` has its work there and an empty `body`.
    Loop {
        /// Run at the start of every turn; computes `cond`.
        head: Block,
        /// Go on with `body` and another turn where this holds.
        cond: Reg,
        /// Run after the test.
        body: Block,
        /// A word for the text form and the PTX label.
        name: &'static str,
        /// The source position.
        loc: Loc,
    },
    /// Warps divide by index into roles; each role's warps run its body and no other, and all meet again behind it.
    Roles {
        /// The warp's index in the CTA: a warp-uniform `u32`.
        warp: Operand,
        /// The roles, by ascending `first_warp`. Warps named by no role run nothing.
        roles: Vec<Role>,
        /// The source position.
        loc: Loc,
    },
    /// The whole cluster stops here if the condition holds (it must be uniform over the cluster). Top level only.
    StopWhen {
        /// The condition: a predicate register.
        cond: Reg,
        /// The source position.
        loc: Loc,
    },
    /// A remark for readers of the text form and the PTX.
    Comment(String),
}

/// A set of consecutive warps with one job.
#[derive(Clone, Debug)]
pub struct Role {
    /// Its name: `producer`, `consumer`.
    pub name: &'static str,
    /// The first warp of the CTA that belongs to it.
    pub first_warp: u32,
    /// How many warps belong to it.
    pub warps: u32,
    /// Registers per thread after `setmaxnreg`, for roles of whole warpgroups.
    pub registers: Option<u32>,
    /// What its warps run.
    pub body: Block,
    /// The source position.
    pub loc: Loc,
}

/// A kernel parameter.
#[derive(Clone, Debug)]
pub struct Param {
    /// The author's name.
    pub name: &'static str,
    /// What it is.
    pub kind: ParamKind,
    /// Where it was declared.
    pub loc: Loc,
}

/// What a kernel parameter is.
#[derive(Clone, Debug, PartialEq)]
pub enum ParamKind {
    /// A number passed by value.
    Scalar(Ty),
    /// A device address; `alignment_bytes` is what the kernel relies on and the launch checks.
    Pointer {
        /// How the kernel uses what it points to.
        access: Access,
        /// The alignment that the kernel relies on.
        alignment_bytes: u32,
    },
    /// The constants of a division by a run-time number: 16 bytes, see [`crate::program::Divisor`].
    Divisor,
    /// A tensor map: 128 bytes in parameter space, 64-byte aligned.
    TensorMap(MapDecl),
}

impl ParamKind {
    /// Size in the parameter block.
    pub fn bytes(&self) -> u32 {
        match self {
            ParamKind::Scalar(ty) => ty.bytes().max(4),
            ParamKind::Pointer { .. } => 8,
            ParamKind::Divisor => 16,
            ParamKind::TensorMap(_) => 128,
        }
    }

    /// Alignment in the parameter block.
    pub fn alignment_bytes(&self) -> u32 {
        match self {
            ParamKind::Scalar(ty) => ty.bytes().max(4),
            ParamKind::Pointer { .. } => 8,
            ParamKind::Divisor => 4,
            ParamKind::TensorMap(_) => 64,
        }
    }
}

/// How a kernel uses memory behind a pointer or a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Only read.
    Read,
    /// Only written.
    Write,
    /// Read and written.
    ReadWrite,
}

/// The XOR pattern of 16-byte chunks in a shared tile: chunk `c` of row `r` stands at `c ^ f(r)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Swizzle {
    /// No pattern.
    #[default]
    None,
    /// Rows of 32 bytes: `c ^ (r / 4 % 2)`.
    B32,
    /// Rows of 64 bytes: `c ^ (r / 2 % 4)`.
    B64,
    /// Rows of 128 bytes: `c ^ (r % 8)`.
    B128,
}

impl Swizzle {
    /// The bytes of one row of the pattern; 16 where there is none.
    pub const fn span_bytes(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    /// Applies the pattern to a byte offset from a 1024-byte aligned base, as the hardware does: address bits above the chunk
    /// are XORed into the chunk index.
    pub const fn apply(self, offset_bytes: u32) -> u32 {
        match self {
            Swizzle::None => offset_bytes,
            Swizzle::B32 => offset_bytes ^ ((offset_bytes >> 3) & 0x10),
            Swizzle::B64 => offset_bytes ^ ((offset_bytes >> 3) & 0x30),
            Swizzle::B128 => offset_bytes ^ ((offset_bytes >> 3) & 0x70),
        }
    }
}

/// The element format of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MapType {
    /// 8-bit elements of any kind.
    U8,
    /// 16-bit integers.
    U16,
    /// 32-bit unsigned integers.
    U32,
    /// 32-bit signed integers.
    S32,
    /// 64-bit integers.
    U64,
    /// binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// binary32.
    F32,
    /// binary32, rounded to nearest tf32 on the way into shared memory.
    Tf32,
    /// binary64.
    F64,
}

impl MapType {
    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            MapType::U8 => 1,
            MapType::U16 | MapType::F16 | MapType::Bf16 => 2,
            MapType::U32 | MapType::S32 | MapType::F32 | MapType::Tf32 => 4,
            MapType::U64 | MapType::F64 => 8,
        }
    }
}

/// The part of a tensor map that a kernel is built for: everything but address, extents and strides.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MapDecl {
    /// Element format.
    pub ty: MapType,
    /// Rank of the tensor: 1–5 tiled, 3–5 im2col.
    pub rank: u32,
    /// Tiled: the box, innermost dimension first, `rank` numbers. Im2col: `[channels_per_pixel, pixels_per_column]`.
    ///
    /// A kernel may leave the extents of a box beyond the innermost, or how many pixels there are, to the launch: they stand as 0
    /// ([`MapDecl::with_open_box`]).
    pub box_dims: Vec<u32>,
    /// Im2col mode.
    pub im2col: bool,
    /// Swizzle of the tile in shared memory.
    pub swizzle: Swizzle,
    /// How the kernel uses the tensor.
    pub access: Access,
}

impl MapDecl {
    /// Bytes that one load of the box brings into shared memory (out-of-bounds parts are filled, so always the whole box); 0 where the launch
    /// gives the box.
    pub fn box_bytes(&self) -> u32 {
        self.box_dims.iter().product::<u32>() * self.ty.bytes()
    }

    /// The same with the extents of the box beyond the innermost left to the launch.
    pub fn with_open_box(&self) -> MapDecl {
        let box_dims = self.box_dims.iter().enumerate().map(|(dim, &extent)| if dim == 0 { extent } else { 0 }).collect();
        MapDecl { box_dims, ..self.clone() }
    }

    /// Whether the launch gives the box.
    pub fn has_open_box(&self) -> bool {
        self.rank > 1 && self.box_dims.len() > 1 && self.box_dims[1..].iter().all(|&extent| extent == 0)
    }

    /// Whether a kernel that is built for this may be given a map of `given`.
    pub fn takes(&self, given: &MapDecl) -> bool {
        *self == if self.has_open_box() { given.with_open_box() } else { given.clone() }
    }
}

/// A named piece of shared memory.
#[derive(Clone, Debug)]
pub struct SharedDecl {
    /// The author's name.
    pub name: &'static str,
    /// Size.
    pub bytes: u32,
    /// Alignment of its first byte.
    pub alignment_bytes: u32,
    /// Offset in the CTA's shared memory; assigned when the kernel is complete.
    pub offset_bytes: u32,
    /// Where it was declared.
    pub loc: Loc,
}

/// An array of mbarriers.
#[derive(Clone, Debug)]
pub struct BarrierDecl {
    /// The author's name.
    pub name: &'static str,
    /// The piece of shared memory that holds it (8 bytes each).
    pub shared: u32,
    /// How many barriers are in the array.
    pub count: u32,
    /// The pending count of a phase, an index into [`KernelBody::late`].
    pub arrivals: u32,
    /// Where it was declared.
    pub loc: Loc,
}

/// A chip that code is printed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// Compute capability 8.0 and everything later.
    Sm80,
    /// Compute capability 8.9 and everything later.
    Sm89,
    /// Compute capability 9.0 and everything later.
    Sm90,
    /// Compute capability 9.0 alone, with its own instructions: `wgmma`, `setmaxnreg`.
    Sm90a,
}

impl Target {
    /// The name in `.target`.
    pub const fn ptx(self) -> &'static str {
        match self {
            Target::Sm80 => "sm_80",
            Target::Sm89 => "sm_89",
            Target::Sm90 => "sm_90",
            Target::Sm90a => "sm_90a",
        }
    }

    /// Shared memory that a CTA can have on the least chip that the target names, in bytes.
    pub const fn shared_limit_bytes(self) -> u32 {
        match self {
            Target::Sm80 => 163 * 1024,
            Target::Sm89 => 99 * 1024,
            Target::Sm90 | Target::Sm90a => 227 * 1024,
        }
    }

    /// This target, or the next whose chips have so much shared memory for a CTA: sm_89 has less than sm_80.
    #[must_use]
    pub fn with_room(self, shared_bytes: u32) -> Target {
        [self, Target::Sm90].into_iter().find(|target| *target >= self && target.shared_limit_bytes() >= shared_bytes).unwrap_or(self)
    }
}

/// A complete kernel: one GPU entry point.
#[derive(Clone, Debug)]
pub struct KernelBody {
    /// Entry name: the spec's.
    pub name: String,
    /// The chip it needs.
    pub target: Target,
    /// Threads of a CTA (one-dimensional).
    pub threads: u32,
    /// CTAs that should fit on one SM together (`.minnctapersm`).
    pub min_ctas: u32,
    /// CTAs of a cluster along x; 1 without clusters.
    pub cluster: u32,
    /// Parameters in order.
    pub params: Vec<Param>,
    /// Registers.
    pub registers: Vec<RegInfo>,
    /// Pieces of shared memory.
    pub shared: Vec<SharedDecl>,
    /// All of dynamic shared memory that a launch must give.
    pub shared_bytes: u32,
    /// Mbarriers.
    pub barriers: Vec<BarrierDecl>,
    /// Constants that became known at the end; see [`Operand::Late`].
    pub late: Vec<u64>,
    /// Source positions; number 0 is the kernel itself.
    pub locations: Vec<LocInfo>,
    /// What it does.
    pub body: Block,
    /// Bytes of register spills that the author accepts; 0 but for kernels that say why.
    pub allowed_spill_bytes: u32,
}

impl KernelBody {
    /// Registers that each thread has at entry: what the threads of [`Self::min_ctas`] CTAs leave of an SM's 65,536, in the chip's
    /// steps of 8 and at most 256. Roles with budgets raise or lower it from there (`setmaxnreg`).
    pub fn entry_registers(&self) -> u32 {
        let threads = (u64::from(self.threads) * u64::from(self.min_ctas)).max(1);
        (65_536 / threads / 8 * 8).min(256) as u32
    }

    /// CTAs that an SM surely holds at once, on every chip of the target: those that the registers are cut for ([`Self::min_ctas`]), as far as shared
    /// memory reaches, of which the chip takes a kibibyte for each. More may fit, which nobody promises.
    pub fn ctas_per_sm(&self) -> u32 {
        const OF_THE_CHIP: u32 = 1024;
        self.min_ctas.min((self.target.shared_limit_bytes() + OF_THE_CHIP) / (self.shared_bytes + OF_THE_CHIP))
    }

    /// The chain of positions from the innermost to the kernel's own line.
    pub fn location_chain(&self, loc: Loc) -> Vec<&LocInfo> {
        let mut chain = Vec::new();
        let mut next = Some(loc);
        while let Some(current) = next {
            let info = &self.locations[current.0 as usize];
            chain.push(info);
            next = info.inlined_at;
        }
        chain
    }

    /// The kernel's own line for a position: the end of its chain.
    pub fn kernel_line(&self, loc: Loc) -> &LocInfo {
        let mut info = &self.locations[loc.0 as usize];
        while let Some(outer) = info.inlined_at {
            info = &self.locations[outer.0 as usize];
        }
        info
    }

    /// The constant behind an operand, if it is one.
    pub fn constant(&self, operand: Operand) -> Option<u64> {
        match operand {
            Operand::Imm(bits) => Some(bits),
            Operand::Late(index) => self.late.get(index as usize).copied(),
            Operand::Reg(_) => None,
        }
    }

    /// Byte offset of each parameter in the parameter block, and the block's size.
    pub fn param_offsets(&self) -> (Vec<u32>, u32) {
        let mut at = 0u32;
        let offsets = self
            .params
            .iter()
            .map(|param| {
                at = at.next_multiple_of(param.kind.alignment_bytes());
                let here = at;
                at += param.kind.bytes();
                here
            })
            .collect();
        (offsets, at)
    }

    /// Calls `visit` on every instruction, outer blocks first, in program order.
    pub fn for_each_inst<'a>(&'a self, visit: &mut dyn FnMut(&'a Inst)) {
        self.body.for_each_inst(visit);
    }
}

impl Block {
    /// Calls `visit` on every instruction, those of blocks inside too, in program order.
    pub fn for_each_inst<'a>(&'a self, visit: &mut dyn FnMut(&'a Inst)) {
        for stmt in &self.stmts {
            match stmt {
                Stmt::Inst(inst) => visit(inst),
                Stmt::If { then, otherwise, .. } => {
                    then.for_each_inst(visit);
                    otherwise.for_each_inst(visit);
                }
                Stmt::Loop { head, body, .. } => {
                    head.for_each_inst(visit);
                    body.for_each_inst(visit);
                }
                Stmt::Roles { roles, .. } => roles.iter().for_each(|role| role.body.for_each_inst(visit)),
                Stmt::StopWhen { .. } | Stmt::Comment(_) => {}
            }
        }
    }
}
