//! The one table of instructions: for each its meaning, attributes, chip, PTX text, operand types and effects.
//!
//! An entry is declared once, in [`Op`]'s table below. From it come the enum, the printer's text ([`Op::ptx`]), the operand types
//! that the verifier checks ([`Op::signature`]), the chip it needs ([`Op::target`]), the lanes that must arrive together
//! ([`Op::convergence`]) and the class under which the interpreter counts it ([`Op::class`]). A new entry makes the interpreter's
//! exhaustive match fail to compile until it says what the instruction does.
//!
//! **Text templates.** `%o0` is the first result, `%i0` the first operand; `%O` all results in braces; `%I1..4` operands 1, 2, 3 in
//! braces; `%p3` kernel parameter 3; `%s2` the address of shared piece 2; `%u` a number unique to the instruction; `%%` a percent sign.
//!
//! **Addresses** are two operands: a base register (`u64` global or generic, `u32` shared) and a constant byte offset.
//!
//! Source: PTX ISA 9.0, the section of the same name for each entry.

use crate::ir::{Target, Ty};

/// Operand types of one instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Types of the results.
    pub outs: Vec<Ty>,
    /// Types of the operands.
    pub ins: Vec<Ty>,
}

fn sig(outs: &[Ty], ins: &[Ty]) -> Signature {
    Signature { outs: outs.to_vec(), ins: ins.to_vec() }
}

/// Which threads must reach an instruction together, with the same operands where PTX asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Convergence {
    /// Each thread for itself.
    Thread,
    /// The lanes of the instruction's member mask, or the whole warp.
    Warp,
    /// All four warps of a warpgroup.
    Warpgroup,
    /// Every thread of the CTA (unless a thread count says otherwise).
    Cta,
    /// Every thread of the cluster.
    Cluster,
}

/// What an instruction is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Moves, special registers, packing.
    Move,
    /// Integer and bit arithmetic.
    Integer,
    /// Floating-point arithmetic.
    Float,
    /// The special function unit: exp2, log2, rcp, rsqrt, sin, cos, tanh.
    Special,
    /// Conversions.
    Convert,
    /// Comparisons and selections.
    Compare,
    /// Loads, stores and atomics by threads.
    Memory,
    /// Copies and reductions by an asynchronous unit.
    Async,
    /// Tensor cores and their fragment moves.
    Matrix,
    /// Barriers and fences.
    Barrier,
    /// Exchange between lanes.
    Shuffle,
    /// Everything that steers the chip.
    Control,
}

/// Memory that an instruction touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Space {
    /// Device memory, by a 64-bit address.
    Global,
    /// The CTA's own shared memory, by a 32-bit address.
    Shared,
    /// Shared memory of any CTA in the cluster, by a 32-bit address that `mapa` made.
    Cluster,
}

impl Space {
    const fn ptx(self) -> &'static str {
        match self {
            Space::Global => "global",
            Space::Shared => "shared",
            Space::Cluster => "shared::cluster",
        }
    }

    /// Type of an address in this space.
    pub const fn address(self) -> Ty {
        match self {
            Space::Global => Ty::U64,
            Space::Shared | Space::Cluster => Ty::U32,
        }
    }
}

/// The threads among which an ordered access or a fence orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// The CTA.
    Cta,
    /// The cluster.
    Cluster,
    /// The device.
    Gpu,
    /// Host and peer devices too.
    Sys,
}

impl Scope {
    const fn ptx(self) -> &'static str {
        match self {
            Scope::Cta => "cta",
            Scope::Cluster => "cluster",
            Scope::Gpu => "gpu",
            Scope::Sys => "sys",
        }
    }
}

/// Memory ordering of a load, a store or an atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// No ordering: a data access.
    Weak,
    /// A weak access that is neither cached nor merged.
    Volatile,
    /// Atomic, without ordering other accesses.
    Relaxed(Scope),
    /// Later accesses stay behind it.
    Acquire(Scope),
    /// Earlier accesses stay before it.
    Release(Scope),
    /// Both (atomics only).
    AcqRel(Scope),
}

impl Order {
    fn ptx(self) -> String {
        match self {
            Order::Weak => String::new(),
            Order::Volatile => ".volatile".into(),
            Order::Relaxed(s) => format!(".relaxed.{}", s.ptx()),
            Order::Acquire(s) => format!(".acquire.{}", s.ptx()),
            Order::Release(s) => format!(".release.{}", s.ptx()),
            Order::AcqRel(s) => format!(".acq_rel.{}", s.ptx()),
        }
    }
}

/// Where a load or a store is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Cache {
    /// The chip's default.
    #[default]
    Default,
    /// `.ca`: all levels.
    All,
    /// `.cg`: L2 only.
    Global,
    /// `.cs`: used once.
    Streaming,
    /// `.nc`: the read-only path; faulty if the launch writes the bytes.
    NonCoherent,
    /// `.nc.L1::no_allocate`: read-only and not kept in L1.
    NonCoherentNoAllocate,
    /// `.L1::evict_first`.
    EvictFirst,
    /// `.L1::evict_last`.
    EvictLast,
    /// `.L1::no_allocate`.
    NoAllocate,
}

impl Cache {
    const fn ptx(self) -> &'static str {
        match self {
            Cache::Default => "",
            Cache::All => ".ca",
            Cache::Global => ".cg",
            Cache::Streaming => ".cs",
            Cache::NonCoherent => ".nc",
            Cache::NonCoherentNoAllocate => ".nc.L1::no_allocate",
            Cache::EvictFirst => ".L1::evict_first",
            Cache::EvictLast => ".L1::evict_last",
            Cache::NoAllocate => ".L1::no_allocate",
        }
    }
}

/// Rounding of a floating-point operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Round {
    /// To nearest, ties to even.
    #[default]
    Nearest,
    /// Toward zero.
    Zero,
    /// Toward minus infinity.
    Down,
    /// Toward plus infinity.
    Up,
}

impl Round {
    const fn ptx(self) -> &'static str {
        match self {
            Round::Nearest => "rn",
            Round::Zero => "rz",
            Round::Down => "rm",
            Round::Up => "rp",
        }
    }
}

/// Rounding of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CvtRound {
    /// Exact: PTX allows no rounding word.
    None,
    /// To a float, to nearest even.
    Nearest,
    /// To a float, toward zero.
    Zero,
    /// To a float, toward minus infinity.
    Down,
    /// To a float, toward plus infinity.
    Up,
    /// To an integer value, to nearest even.
    IntNearest,
    /// To an integer value, toward zero.
    IntZero,
    /// To an integer value, toward minus infinity.
    IntDown,
    /// To an integer value, toward plus infinity.
    IntUp,
    /// To nearest, ties away from zero (tf32).
    NearestAway,
}

impl CvtRound {
    const fn ptx(self) -> &'static str {
        match self {
            CvtRound::None => "",
            CvtRound::Nearest => ".rn",
            CvtRound::Zero => ".rz",
            CvtRound::Down => ".rm",
            CvtRound::Up => ".rp",
            CvtRound::IntNearest => ".rni",
            CvtRound::IntZero => ".rzi",
            CvtRound::IntDown => ".rmi",
            CvtRound::IntUp => ".rpi",
            CvtRound::NearestAway => ".rna",
        }
    }
}

/// A comparison. The `…OrNan` forms also hold when an operand is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cmp {
    /// Equal.
    Eq,
    /// Not equal; false for NaN.
    Ne,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
    /// Equal, or an operand is NaN.
    EqOrNan,
    /// Not equal, or an operand is NaN: the complement of `Eq`.
    NeOrNan,
    /// Less, or an operand is NaN.
    LtOrNan,
    /// Less or equal, or an operand is NaN.
    LeOrNan,
    /// Greater, or an operand is NaN.
    GtOrNan,
    /// Greater or equal, or an operand is NaN.
    GeOrNan,
    /// Neither operand is NaN.
    Number,
    /// An operand is NaN.
    Nan,
}

impl Cmp {
    const fn ptx(self) -> &'static str {
        match self {
            Cmp::Eq => "eq",
            Cmp::Ne => "ne",
            Cmp::Lt => "lt",
            Cmp::Le => "le",
            Cmp::Gt => "gt",
            Cmp::Ge => "ge",
            Cmp::EqOrNan => "equ",
            Cmp::NeOrNan => "neu",
            Cmp::LtOrNan => "ltu",
            Cmp::LeOrNan => "leu",
            Cmp::GtOrNan => "gtu",
            Cmp::GeOrNan => "geu",
            Cmp::Number => "num",
            Cmp::Nan => "nan",
        }
    }
}

/// A special register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Special {
    /// Thread index in the CTA (x).
    Tid,
    /// Threads of the CTA (x).
    Ntid,
    /// CTA index in the grid, x.
    CtaX,
    /// CTA index in the grid, y.
    CtaY,
    /// CTA index in the grid, z.
    CtaZ,
    /// CTAs of the grid, x.
    GridX,
    /// CTAs of the grid, y.
    GridY,
    /// CTAs of the grid, z.
    GridZ,
    /// Lane index in the warp.
    Lane,
    /// Cluster index in the grid, x.
    ClusterX,
    /// Clusters of the grid, x.
    ClustersX,
    /// CTA's rank in its cluster.
    ClusterCtaRank,
    /// CTAs of the cluster.
    ClusterCtas,
    /// Lanes below this one.
    LaneMaskLt,
    /// Lanes up to and with this one.
    LaneMaskLe,
    /// This lane.
    LaneMaskEq,
    /// Lanes above this one.
    LaneMaskGt,
    /// Lanes from this one on.
    LaneMaskGe,
    /// The multiprocessor: may change, for profiling only.
    Sm,
    /// Multiprocessors of the chip.
    Sms,
    /// Cycle counter, 32 bits.
    Clock,
    /// Cycle counter, 64 bits.
    Clock64,
    /// Nanoseconds, coarse.
    GlobalTimer,
    /// Bytes of dynamic shared memory of this launch.
    DynamicSharedBytes,
}

impl Special {
    const fn ptx(self) -> &'static str {
        match self {
            Special::Tid => "tid.x",
            Special::Ntid => "ntid.x",
            Special::CtaX => "ctaid.x",
            Special::CtaY => "ctaid.y",
            Special::CtaZ => "ctaid.z",
            Special::GridX => "nctaid.x",
            Special::GridY => "nctaid.y",
            Special::GridZ => "nctaid.z",
            Special::Lane => "laneid",
            Special::ClusterX => "clusterid.x",
            Special::ClustersX => "nclusterid.x",
            Special::ClusterCtaRank => "cluster_ctarank",
            Special::ClusterCtas => "cluster_nctarank",
            Special::LaneMaskLt => "lanemask_lt",
            Special::LaneMaskLe => "lanemask_le",
            Special::LaneMaskEq => "lanemask_eq",
            Special::LaneMaskGt => "lanemask_gt",
            Special::LaneMaskGe => "lanemask_ge",
            Special::Sm => "smid",
            Special::Sms => "nsmid",
            Special::Clock => "clock",
            Special::Clock64 => "clock64",
            Special::GlobalTimer => "globaltimer",
            Special::DynamicSharedBytes => "dynamic_smem_size",
        }
    }

    /// Type of its value.
    pub const fn ty(self) -> Ty {
        match self {
            Special::Clock64 | Special::GlobalTimer => Ty::U64,
            _ => Ty::U32,
        }
    }
}

/// What an atomic does to the word in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Atomic {
    /// Add.
    Add,
    /// Minimum.
    Min,
    /// Maximum.
    Max,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// Exchange.
    Exch,
    /// Compare and swap: two operands, compared value then new value.
    Cas,
    /// `old >= operand ? 0 : old + 1`.
    Inc,
    /// `old == 0 || old > operand ? operand : old - 1`.
    Dec,
}

impl Atomic {
    const fn ptx(self) -> &'static str {
        match self {
            Atomic::Add => "add",
            Atomic::Min => "min",
            Atomic::Max => "max",
            Atomic::And => "and",
            Atomic::Or => "or",
            Atomic::Xor => "xor",
            Atomic::Exch => "exch",
            Atomic::Cas => "cas",
            Atomic::Inc => "inc",
            Atomic::Dec => "dec",
        }
    }

    /// Number of value operands.
    pub const fn operands(self) -> usize {
        match self {
            Atomic::Cas => 2,
            _ => 1,
        }
    }
}

/// What a bulk or tensor reduction does to each element in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BulkReduce {
    /// Add.
    Add,
    /// Minimum.
    Min,
    /// Maximum.
    Max,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// Increment with wrap.
    Inc,
    /// Decrement with wrap.
    Dec,
}

impl BulkReduce {
    const fn ptx(self) -> &'static str {
        match self {
            BulkReduce::Add => "add",
            BulkReduce::Min => "min",
            BulkReduce::Max => "max",
            BulkReduce::And => "and",
            BulkReduce::Or => "or",
            BulkReduce::Xor => "xor",
            BulkReduce::Inc => "inc",
            BulkReduce::Dec => "dec",
        }
    }
}

/// Which lane a shuffle reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shuffle {
    /// A lane of lower index.
    Up,
    /// A lane of higher index.
    Down,
    /// The lane whose index differs by an exclusive or.
    Butterfly,
    /// The lane named.
    Index,
    /// The lane named, of a value that all lanes hold alike: made known to the chip as such. The interpreter checks that they do.
    Uniform,
}

impl Shuffle {
    const fn ptx(self) -> &'static str {
        match self {
            Shuffle::Up => "up",
            Shuffle::Down => "down",
            Shuffle::Butterfly => "bfly",
            Shuffle::Index | Shuffle::Uniform => "idx",
        }
    }
}

/// What a vote asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vote {
    /// All lanes hold.
    All,
    /// Some lane holds.
    Any,
    /// All lanes agree.
    Uniform,
}

impl Vote {
    const fn ptx(self) -> &'static str {
        match self {
            Vote::All => "all",
            Vote::Any => "any",
            Vote::Uniform => "uni",
        }
    }
}

/// What a warp reduction computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Redux {
    /// Sum.
    Add,
    /// Minimum.
    Min,
    /// Maximum.
    Max,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
}

impl Redux {
    const fn ptx(self) -> &'static str {
        match self {
            Redux::Add => "add",
            Redux::Min => "min",
            Redux::Max => "max",
            Redux::And => "and",
            Redux::Or => "or",
            Redux::Xor => "xor",
        }
    }
}

/// Element type of a matrix operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MatrixType {
    /// binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// tf32 in 32 bits; the low 13 bits are ignored.
    Tf32,
    /// binary64.
    F64,
    /// binary32 (accumulators).
    F32,
    /// 8-bit float, 4 exponent bits.
    E4m3,
    /// 8-bit float, 5 exponent bits.
    E5m2,
    /// Signed 8-bit integer.
    S8,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 4-bit integer.
    S4,
    /// Unsigned 4-bit integer.
    U4,
    /// One bit.
    B1,
    /// Signed 32-bit integer (accumulators).
    S32,
}

impl MatrixType {
    /// The word PTX writes.
    pub const fn ptx(self) -> &'static str {
        match self {
            MatrixType::F16 => "f16",
            MatrixType::Bf16 => "bf16",
            MatrixType::Tf32 => "tf32",
            MatrixType::F64 => "f64",
            MatrixType::F32 => "f32",
            MatrixType::E4m3 => "e4m3",
            MatrixType::E5m2 => "e5m2",
            MatrixType::S8 => "s8",
            MatrixType::U8 => "u8",
            MatrixType::S4 => "s4",
            MatrixType::U4 => "u4",
            MatrixType::B1 => "b1",
            MatrixType::S32 => "s32",
        }
    }

    /// Bits of one element.
    pub const fn bits(self) -> u32 {
        match self {
            MatrixType::B1 => 1,
            MatrixType::S4 | MatrixType::U4 => 4,
            MatrixType::E4m3 | MatrixType::E5m2 | MatrixType::S8 | MatrixType::U8 => 8,
            MatrixType::F16 | MatrixType::Bf16 => 16,
            MatrixType::Tf32 | MatrixType::F32 | MatrixType::S32 => 32,
            MatrixType::F64 => 64,
        }
    }

    /// The register type that holds accumulator elements of this type.
    pub const fn accumulator_ty(self) -> Ty {
        match self {
            MatrixType::F16 => Ty::F16x2,
            MatrixType::F64 => Ty::F64,
            MatrixType::S32 => Ty::S32,
            _ => Ty::F32,
        }
    }
}

/// Shape and types of a warp-wide matrix product `d = a·b + c` (`mma.sync`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaShape {
    /// Rows of A and D.
    pub m: u32,
    /// Columns of B and D.
    pub n: u32,
    /// Columns of A, rows of B. Twice the stored columns of A when sparse.
    pub k: u32,
    /// Element type of A.
    pub a: MatrixType,
    /// Element type of B.
    pub b: MatrixType,
    /// Element type of C and D.
    pub d: MatrixType,
    /// Clamp an integer result.
    pub saturate: bool,
    /// A holds two of each four elements, with metadata telling which.
    pub sparse: bool,
}

impl MmaShape {
    fn registers(rows: u32, columns: u32, ty: MatrixType) -> usize {
        let bits = rows * columns * ty.bits();
        let per = if ty.bits() == 64 { 64 } else { 32 };
        (bits / (32 * per)).max(1) as usize
    }

    /// Registers of A per lane.
    pub fn a_registers(&self) -> usize {
        Self::registers(self.m, if self.sparse { self.k / 2 } else { self.k }, self.a)
    }

    /// Registers of B per lane.
    pub fn b_registers(&self) -> usize {
        Self::registers(self.n, self.k, self.b)
    }

    /// Registers of C and of D per lane.
    pub fn d_registers(&self) -> usize {
        Self::registers(self.m, self.n, self.d)
    }

    fn operand_ty(ty: MatrixType) -> Ty {
        if ty == MatrixType::F64 { Ty::F64 } else { Ty::B32 }
    }

    fn signature(&self) -> Signature {
        let d = if self.d == MatrixType::F16 { Ty::B32 } else { self.d.accumulator_ty() };
        let mut ins = vec![Self::operand_ty(self.a); self.a_registers()];
        ins.extend(vec![Self::operand_ty(self.b); self.b_registers()]);
        ins.extend(vec![d; self.d_registers()]);
        if self.sparse {
            ins.extend([Ty::B32, Ty::U32]);
        }
        Signature { outs: vec![d; self.d_registers()], ins }
    }

    fn ptx(&self) -> String {
        let (a, b) = (self.a_registers(), self.b_registers());
        let c = a + b + self.d_registers();
        let sparse = if self.sparse { ".sp" } else { "" };
        let bit = if self.a == MatrixType::B1 { ".xor.popc" } else { "" };
        format!(
            "mma{sparse}.sync.aligned.m{}n{}k{}.row.col{}.{}.{}.{}.{}{bit} %O, %I0..{a}, %I{a}..{}, %I{}..{c}{}",
            self.m,
            self.n,
            self.k,
            if self.saturate { ".satfinite" } else { "" },
            self.d.ptx(),
            self.a.ptx(),
            self.b.ptx(),
            self.d.ptx(),
            a + b,
            a + b,
            if self.sparse { format!(", %i{c}, %i{}", c + 1) } else { String::new() }
        )
    }
}

/// Shape, types and operand forms of a warpgroup-wide matrix product (`wgmma.mma_async`): `d = a·b (+ d)`, 64 rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WgmmaShape {
    /// Columns of B and D: 8, 16, … 256.
    pub n: u32,
    /// Element type of A.
    pub a: MatrixType,
    /// Element type of B.
    pub b: MatrixType,
    /// Element type of D: f32, f16 or s32.
    pub d: MatrixType,
    /// A is in registers (RS form) rather than shared memory (SS form).
    pub a_in_registers: bool,
    /// A is M-major in shared memory (16-bit types only).
    pub transpose_a: bool,
    /// B is N-major in shared memory (16-bit types only).
    pub transpose_b: bool,
    /// Use −A (float types).
    pub negate_a: bool,
    /// Use −B (float types).
    pub negate_b: bool,
    /// Clamp an integer result.
    pub saturate: bool,
    /// A holds two of each four elements, with metadata telling which.
    pub sparse: bool,
}

impl WgmmaShape {
    /// Dense depth of one instruction in elements: 32 bytes, twice that when sparse.
    pub fn k(&self) -> u32 {
        let dense = 256 / self.a.bits();
        if self.sparse { 2 * dense } else { dense }
    }

    /// Accumulator registers per thread.
    pub fn d_registers(&self) -> usize {
        (if self.d == MatrixType::F16 { self.n / 4 } else { self.n / 2 }) as usize
    }

    fn is_16_bit(&self) -> bool {
        matches!(self.a, MatrixType::F16 | MatrixType::Bf16)
    }

    fn is_integer(&self) -> bool {
        matches!(self.a, MatrixType::S8 | MatrixType::U8)
    }

    /// Registers of A per thread in the RS form.
    pub const A_REGISTERS: usize = 4;

    // Operands: A (descriptor or four registers), B descriptor, [sparse metadata, selector], scale-d predicate, then the
    // accumulators once more, since the instruction reads them where scale-d holds.
    fn signature(&self) -> Signature {
        let d = if self.d == MatrixType::F16 { Ty::F16x2 } else { self.d.accumulator_ty() };
        let mut ins = if self.a_in_registers { vec![Ty::B32; Self::A_REGISTERS] } else { vec![Ty::B64] };
        ins.push(Ty::B64);
        if self.sparse {
            ins.extend([Ty::B32, Ty::U32]);
        }
        ins.push(Ty::Pred);
        Signature { outs: vec![d; self.d_registers()], ins }
    }

    /// Index of the B descriptor among the operands.
    pub fn b_operand(&self) -> usize {
        if self.a_in_registers { Self::A_REGISTERS } else { 1 }
    }

    /// Index of the scale-d predicate among the operands.
    pub fn scale_d_operand(&self) -> usize {
        self.b_operand() + if self.sparse { 3 } else { 1 }
    }

    fn ptx(&self) -> String {
        let a = if self.a_in_registers { "%I0..4".to_string() } else { "%i0".to_string() };
        let b = self.b_operand();
        let sparse = if self.sparse { format!(", %i{}, %i{}", b + 1, b + 2) } else { String::new() };
        let scale_d = self.scale_d_operand();
        let sign = |negate: bool| if negate { -1 } else { 1 };
        let mut tail = String::new();
        if !self.is_integer() {
            tail += &format!(", {}, {}", sign(self.negate_a), sign(self.negate_b));
        }
        if self.is_16_bit() {
            if !self.a_in_registers {
                tail += &format!(", {}", u32::from(self.transpose_a));
            }
            tail += &format!(", {}", u32::from(self.transpose_b));
        }
        format!(
            "wgmma.mma_async{}.sync.aligned.m64n{}k{}{}.{}.{}.{} %O, {a}, %i{b}{sparse}, %i{scale_d}{tail}",
            if self.sparse { ".sp" } else { "" },
            self.n,
            self.k(),
            if self.saturate { ".satfinite" } else { "" },
            self.d.ptx(),
            self.a.ptx(),
            self.b.ptx(),
        )
    }
}

/// A memory fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fence {
    /// `fence.acq_rel`: orders this thread's accesses for the scope.
    AcqRel(Scope),
    /// `fence.sc`: the same, and sequentially consistent.
    Sc(Scope),
    /// `fence.acquire.sync_restrict::shared::cluster.cluster` is not offered; this is `fence.mbarrier_init.release.cluster`: makes
    /// mbarrier inits visible to the cluster.
    MbarrierInit,
    /// `fence.proxy.async.shared::cta`: generic accesses to shared memory before it are seen by the async proxy behind it.
    ProxyAsyncShared,
    /// `fence.proxy.async.global`.
    ProxyAsyncGlobal,
    /// `fence.proxy.async`: both.
    ProxyAsync,
    /// `fence.proxy.tensormap::generic.release`: a tensor map changed in memory is handed on.
    TensormapRelease(Scope),
    /// `fence.proxy.tensormap::generic.acquire [map], 128`: a tensor map changed elsewhere is taken over; one address operand.
    TensormapAcquire(Scope),
}

/// What a bounded wait looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TestWait {
    /// `test_wait`: look once.
    Test,
    /// `try_wait`: may sleep for a time that the chip chooses.
    Try,
}

/// A field of a tensor map in memory that `tensormap.replace` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MapField {
    /// The base address (b64).
    GlobalAddress,
    /// Rank minus one (b32).
    Rank,
    /// Box extent of one dimension (b32).
    BoxDim(u32),
    /// Extent of one dimension (b32).
    GlobalDim(u32),
    /// Byte stride of one dimension (b64).
    GlobalStride(u32),
    /// Traversal stride of one dimension (b32).
    ElementStride(u32),
}

impl MapField {
    const fn ty(self) -> Ty {
        match self {
            MapField::GlobalAddress | MapField::GlobalStride(_) => Ty::B64,
            _ => Ty::B32,
        }
    }

    fn ptx(self) -> (&'static str, String) {
        match self {
            MapField::GlobalAddress => ("global_address", String::new()),
            MapField::Rank => ("rank", String::new()),
            MapField::BoxDim(d) => ("box_dim", format!("{d}, ")),
            MapField::GlobalDim(d) => ("global_dim", format!("{d}, ")),
            MapField::GlobalStride(d) => ("global_stride", format!("{d}, ")),
            MapField::ElementStride(d) => ("element_stride", format!("{d}, ")),
        }
    }
}

/// What a division is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Division {
    /// Correctly rounded.
    Ieee,
    /// `div.full.f32`: within 2 ulp over the full range.
    Full,
    /// `div.approx.f32`: within 2 ulp for |b| in [2⁻¹²⁶, 2¹²⁶].
    Approx,
}

/// The word class of `CvtPack` and friends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packed {
    /// Two binary16.
    F16x2,
    /// Two bfloat16.
    Bf16x2,
    /// Two e4m3.
    E4m3x2,
    /// Two e5m2.
    E5m2x2,
}

impl Packed {
    const fn ptx(self) -> &'static str {
        match self {
            Packed::F16x2 => "f16x2",
            Packed::Bf16x2 => "bf16x2",
            Packed::E4m3x2 => "e4m3x2",
            Packed::E5m2x2 => "e5m2x2",
        }
    }

    /// The register that holds the pair.
    pub const fn ty(self) -> Ty {
        match self {
            Packed::F16x2 => Ty::F16x2,
            Packed::Bf16x2 => Ty::Bf16x2,
            Packed::E4m3x2 | Packed::E5m2x2 => Ty::B16,
        }
    }

    pub(crate) const fn is_fp8(self) -> bool {
        matches!(self, Packed::E4m3x2 | Packed::E5m2x2)
    }
}

fn flag(on: bool, word: &'static str) -> &'static str {
    if on { word } else { "" }
}

fn vector(count: u8) -> String {
    if count == 1 { String::new() } else { format!(".v{count}") }
}

fn group(letter: char, count: u8) -> String {
    match (letter, count) {
        ('o', 1) => "%o0".into(),
        ('o', _) => "%O".into(),
        (_, 1) => "%i2".into(),
        (_, n) => format!("%I2..{}", 2 + u32::from(n)),
    }
}

fn hint_word(hint: bool) -> &'static str {
    flag(hint, ".L2::cache_hint")
}

/// `{%i2, %i3}` for tensor coordinates from operand `from`.
fn coords(from: usize, count: u8) -> String {
    format!("%I{from}..{}", from + count as usize)
}

macro_rules! instructions {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident { $($field:ident : $fty:ty),* $(,)? } $class:ident $target:ident $convergence:ident
        $ptx:expr => $sig:expr;
    )*) => {
        /// An operation with its attributes: one variant for each entry of the table.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "the variant's text says what its attributes are")]
        pub enum Op { $( $(#[doc = $doc])+ $name { $($field: $fty),* } ),* }

        /// The table, in order of declaration: name and meaning of each instruction.
        pub static TABLE: &[(&str, &str)] = &[ $( (stringify!($name), concat!($($doc, "\n"),+)) ),* ];

        #[allow(unused_variables, reason = "an entry names all its attributes, and uses those that the question needs")]
        impl Op {
            /// The entry's name in the table.
            pub fn name(&self) -> &'static str {
                match self { $( Op::$name { .. } => stringify!($name) ),* }
            }

            /// The PTX text with placeholders; see the module's head.
            pub fn ptx(&self) -> String {
                match self { $( Op::$name { $($field),* } => { $(let $field = $field.clone();)* String::from($ptx) } ),* }
            }

            /// Types of results and operands.
            pub fn signature(&self) -> Signature {
                match self { $( Op::$name { $($field),* } => { $(let $field = $field.clone();)* $sig } ),* }
            }

            /// The class under which the interpreter counts it.
            pub fn class(&self) -> Class {
                match self { $( Op::$name { .. } => Class::$class ),* }
            }

            fn table_target(&self) -> Target {
                match self { $( Op::$name { .. } => Target::$target ),* }
            }

            /// Which threads must reach it together.
            pub fn convergence(&self) -> Convergence {
                match self { $( Op::$name { .. } => Convergence::$convergence ),* }
            }
        }
    };
}

use Ty::{B16, B32, B64, F32, Pred, S64, U16, U32, U64};

instructions! {
    // ---- moves -----------------------------------------------------------------------------------------------------

    /// Copies a register or a constant.
    Mov { ty: Ty } Move Sm80 Thread
        format!("mov.{} %o0, %i0", move_word(ty)) => sig(&[ty], &[ty]);
    /// Reads a special register.
    SpecialRegister { register: Special } Move Sm80 Thread
        format!("mov.{} %o0, %%{}", register.ty().ptx(), register.ptx()) => sig(&[register.ty()], &[]);
    /// Reads 4 or 8 bytes of a parameter, `offset_bytes` into it.
    ParamLoad { index: u32, offset_bytes: u32, ty: Ty } Move Sm80 Thread
        format!("ld.param.{} %o0, [%p{index}+{offset_bytes}]", ty.as_bits().ptx()) => sig(&[ty], &[]);
    /// The generic address of a tensor map among the parameters.
    ParamAddress { index: u32 } Move Sm90 Thread
        format!("{{ .reg .b64 t%u; mov.b64 t%u, %p{index}; cvta.param.u64 %o0, t%u; }}") => sig(&[U64], &[]);
    /// The address of a piece of shared memory.
    SharedAddress { index: u32 } Move Sm80 Thread
        format!("mov.u32 %o0, %s{index}") => sig(&[U32], &[]);
    /// Puts two halves into a register twice as wide, the first in the low half.
    Pack { half: Ty, whole: Ty } Move Sm80 Thread
        format!("mov.{} %o0, %I0..2", whole.as_bits().ptx()) => sig(&[whole], &[half, half]);
    /// Takes a register apart into two halves, the low half first.
    Unpack { half: Ty, whole: Ty } Move Sm80 Thread
        format!("mov.{} %O, %i0", whole.as_bits().ptx()) => sig(&[half, half], &[whole]);

    // ---- integers --------------------------------------------------------------------------------------------------

    /// `a + b`, wrapping.
    IAdd { ty: Ty } Integer Sm80 Thread
        format!("add.{} %o0, %i0, %i1", ty.ptx()) => sig(&[ty], &[ty, ty]);
    /// `a − b`, wrapping.
    ISub { ty: Ty } Integer Sm80 Thread
        format!("sub.{} %o0, %i0, %i1", ty.ptx()) => sig(&[ty], &[ty, ty]);
    /// Low half of `a · b`.
    IMulLo { ty: Ty } Integer Sm80 Thread
        format!("mul.lo.{} %o0, %i0, %i1", ty.ptx()) => sig(&[ty], &[ty, ty]);
    /// High half of `a · b`.
    IMulHi { ty: Ty } Integer Sm80 Thread
        format!("mul.hi.{} %o0, %i0, %i1", ty.ptx()) => sig(&[ty], &[ty, ty]);
    /// `a · b` at twice the width; `ty` is the operands'.
    IMulWide { ty: Ty } Integer Sm80 Thread
        format!("mul.wide.{} %o0, %i0, %i1", ty.ptx()) => sig(&[wide(ty)], &[ty, ty]);
    /// Low half of `a · b + c`.
    IMadLo { ty: Ty } Integer Sm80 Thread
        format!("mad.lo.{} %o0, %i0, %i1, %i2", ty.ptx()) => sig(&[ty], &[ty, ty, ty]);
    /// `a · b + c` at twice the width of `a` and `b`.
    IMadWide { ty: Ty } Integer Sm80 Thread
        format!("mad.wide.{} %o0, %i0, %i1, %i2", ty.ptx()) => sig(&[wide(ty)], &[ty, ty, wide(ty)]);
    /// The smaller.
    IMin { ty: Ty } Integer Sm80 Thread
        format!("min.{} %o0, %i0, %i1", ty.ptx()) => sig(&[ty], &[ty, ty]);
    /// The larger.
    IMax { ty: Ty } Integer Sm80 Thread
        format!("max.{} %o0, %i0, %i1", ty.ptx()) => sig(&[ty], &[ty, ty]);
    /// `−a` of a signed integer.
    INeg { ty: Ty } Integer Sm80 Thread
        format!("neg.{} %o0, %i0", ty.ptx()) => sig(&[ty], &[ty]);
    /// `|a|` of a signed integer.
    IAbs { ty: Ty } Integer Sm80 Thread
        format!("abs.{} %o0, %i0", ty.ptx()) => sig(&[ty], &[ty]);
    /// Bitwise and; of predicates too.
    And { ty: Ty } Integer Sm80 Thread
        format!("and.{} %o0, %i0, %i1", ty.as_bits().ptx()) => sig(&[ty], &[ty, ty]);
    /// Bitwise or; of predicates too.
    Or { ty: Ty } Integer Sm80 Thread
        format!("or.{} %o0, %i0, %i1", ty.as_bits().ptx()) => sig(&[ty], &[ty, ty]);
    /// Bitwise exclusive or; of predicates too.
    Xor { ty: Ty } Integer Sm80 Thread
        format!("xor.{} %o0, %i0, %i1", ty.as_bits().ptx()) => sig(&[ty], &[ty, ty]);
    /// Bitwise complement; of predicates too.
    Not { ty: Ty } Integer Sm80 Thread
        format!("not.{} %o0, %i0", ty.as_bits().ptx()) => sig(&[ty], &[ty]);
    /// `a << b`; 0 when `b` is at least the width.
    Shl { ty: Ty } Integer Sm80 Thread
        format!("shl.{} %o0, %i0, %i1", ty.as_bits().ptx()) => sig(&[ty], &[ty, U32]);
    /// `a >> b`, arithmetic for signed types; `b` is clamped at the width.
    Shr { ty: Ty } Integer Sm80 Thread
        format!("shr.{} %o0, %i0, %i1", ty.ptx()) => sig(&[ty], &[ty, U32]);
    /// Number of one bits; `ty` is b32 or b64.
    Popc { ty: Ty } Integer Sm80 Thread
        format!("popc.{} %o0, %i0", ty.as_bits().ptx()) => sig(&[U32], &[ty]);
    /// Number of leading zero bits.
    Clz { ty: Ty } Integer Sm80 Thread
        format!("clz.{} %o0, %i0", ty.as_bits().ptx()) => sig(&[U32], &[ty]);
    /// Bits in reverse order.
    Brev { ty: Ty } Integer Sm80 Thread
        format!("brev.{} %o0, %i0", ty.as_bits().ptx()) => sig(&[ty], &[ty]);
    /// Position of the highest bit that is not a sign bit; all ones if there is none.
    Bfind { ty: Ty } Integer Sm80 Thread
        format!("bfind.{} %o0, %i0", ty.ptx()) => sig(&[U32], &[ty]);
    /// `length` bits of `a` from `position` on, sign-extended for signed types.
    Bfe { ty: Ty } Integer Sm80 Thread
        format!("bfe.{} %o0, %i0, %i1, %i2", ty.ptx()) => sig(&[ty], &[ty, U32, U32]);
    /// The low `length` bits of `a` put into `b` at `position`.
    Bfi { ty: Ty } Integer Sm80 Thread
        format!("bfi.{} %o0, %i0, %i1, %i2, %i3", ty.as_bits().ptx()) => sig(&[ty], &[ty, ty, U32, U32]);
    /// Picks four of the eight bytes of `{a, b}` by the nibbles of a selector; bit 3 of a nibble replicates the sign.
    Prmt {} Integer Sm80 Thread
        "prmt.b32 %o0, %i0, %i1, %i2" => sig(&[B32], &[B32, B32, B32]);
    /// Funnel shift of `{b, a}` (a low): the high word after a left, the low word after a right shift; the amount wraps or clamps.
    Funnel { left: bool, wrap: bool } Integer Sm80 Thread
        format!("shf.{}.{}.b32 %o0, %i0, %i1, %i2", if left { "l" } else { "r" }, if wrap { "wrap" } else { "clamp" })
        => sig(&[B32], &[B32, B32, U32]);
    /// Any function of three bits, by its truth table: `table & 0xF0`, `0xCC`, `0xAA` stand for a, b, c.
    Lop3 { table: u8 } Integer Sm80 Thread
        format!("lop3.b32 %o0, %i0, %i1, %i2, 0x{table:02x}") => sig(&[B32], &[B32, B32, B32]);
    /// Dot product of four bytes, added to `c`.
    Dp4a { a_signed: bool, b_signed: bool } Integer Sm80 Thread
        format!("dp4a.{}.{} %o0, %i0, %i1, %i2", sign32(a_signed), sign32(b_signed))
        => { let t = if a_signed || b_signed { Ty::S32 } else { U32 }; sig(&[t], &[B32, B32, t]) };
    /// Dot product of two 16-bit numbers with two bytes (low or high pair) of `b`, added to `c`.
    Dp2a { a_signed: bool, b_signed: bool, high: bool } Integer Sm80 Thread
        format!("dp2a.{}.{}.{} %o0, %i0, %i1, %i2", if high { "hi" } else { "lo" }, sign32(a_signed), sign32(b_signed))
        => { let t = if a_signed || b_signed { Ty::S32 } else { U32 }; sig(&[t], &[B32, B32, t]) };

    // ---- floats ----------------------------------------------------------------------------------------------------

    /// `a + b`: f32, f64, f16, bf16 and packed halves.
    FAdd { ty: Ty, rounding: Round, ftz: bool, saturate: bool } Float Sm80 Thread
        arithmetic("add", ty, rounding, ftz, saturate) => sig(&[ty], &[ty, ty]);
    /// `a − b`.
    FSub { ty: Ty, rounding: Round, ftz: bool, saturate: bool } Float Sm80 Thread
        arithmetic("sub", ty, rounding, ftz, saturate) => sig(&[ty], &[ty, ty]);
    /// `a · b`.
    FMul { ty: Ty, rounding: Round, ftz: bool, saturate: bool } Float Sm80 Thread
        arithmetic("mul", ty, rounding, ftz, saturate) => sig(&[ty], &[ty, ty]);
    /// `a · b + c`, rounded once; `relu` clamps negative results to zero and makes NaN the canonical one (halves only).
    Fma { ty: Ty, rounding: Round, ftz: bool, saturate: bool, relu: bool } Float Sm80 Thread
        format!("fma.{}{}{}{}.{} %o0, %i0, %i1, %i2", rounding.ptx(), flag(ftz, ".ftz"), flag(saturate, ".sat"), flag(relu, ".relu"), ty.ptx())
        => sig(&[ty], &[ty, ty, ty]);
    /// The smaller; with `nan`, NaN if an operand is NaN, else the number.
    FMin { ty: Ty, ftz: bool, nan: bool } Float Sm80 Thread
        format!("min{}{}.{} %o0, %i0, %i1", flag(ftz, ".ftz"), flag(nan, ".NaN"), ty.ptx()) => sig(&[ty], &[ty, ty]);
    /// The larger; with `nan`, NaN if an operand is NaN, else the number.
    FMax { ty: Ty, ftz: bool, nan: bool } Float Sm80 Thread
        format!("max{}{}.{} %o0, %i0, %i1", flag(ftz, ".ftz"), flag(nan, ".NaN"), ty.ptx()) => sig(&[ty], &[ty, ty]);
    /// `−a`.
    FNeg { ty: Ty, ftz: bool } Float Sm80 Thread
        format!("neg{}.{} %o0, %i0", flag(ftz, ".ftz"), ty.ptx()) => sig(&[ty], &[ty]);
    /// `|a|`.
    FAbs { ty: Ty, ftz: bool } Float Sm80 Thread
        format!("abs{}.{} %o0, %i0", flag(ftz, ".ftz"), ty.ptx()) => sig(&[ty], &[ty]);
    /// The magnitude of `b` with the sign of `a`.
    Copysign { ty: Ty } Float Sm80 Thread
        format!("copysign.{} %o0, %i0, %i1", ty.ptx()) => sig(&[ty], &[ty, ty]);
    /// `a / b`.
    FDiv { ty: Ty, kind: Division, ftz: bool } Float Sm80 Thread
        format!("div.{}{}.{} %o0, %i0, %i1", match kind { Division::Ieee => "rn", Division::Full => "full", Division::Approx => "approx" }, flag(ftz, ".ftz"), ty.ptx())
        => sig(&[ty], &[ty, ty]);
    /// `1 / a`; approximate: within 1 ulp.
    Rcp { ty: Ty, approx: bool, ftz: bool } Special Sm80 Thread
        format!("rcp.{}{}.{} %o0, %i0", if approx { "approx" } else { "rn" }, flag(ftz, ".ftz"), ty.ptx()) => sig(&[ty], &[ty]);
    /// `√a`; approximate: relative error at most 2⁻²³.
    Sqrt { ty: Ty, approx: bool, ftz: bool } Special Sm80 Thread
        format!("sqrt.{}{}.{} %o0, %i0", if approx { "approx" } else { "rn" }, flag(ftz, ".ftz"), ty.ptx()) => sig(&[ty], &[ty]);
    /// `1 / √a`: relative error at most 2⁻²²·⁹ (f32).
    Rsqrt { ty: Ty, ftz: bool } Special Sm80 Thread
        format!("rsqrt.approx{}.{} %o0, %i0", flag(ftz, ".ftz"), ty.ptx()) => sig(&[ty], &[ty]);
    /// `2^a`: f32 within 2 ulp, and halves.
    Ex2 { ty: Ty, ftz: bool } Special Sm80 Thread
        format!("ex2.approx{}.{} %o0, %i0", flag(ftz, ".ftz"), ty.ptx()) => sig(&[ty], &[ty]);
    /// `log₂ a`: absolute error at most 2⁻²² near 1, else relative 2⁻²².
    Lg2 { ftz: bool } Special Sm80 Thread
        format!("lg2.approx{}.f32 %o0, %i0", flag(ftz, ".ftz")) => sig(&[F32], &[F32]);
    /// `sin a`: absolute error at most 2⁻²⁰·⁵ in [−π, π].
    Sin { ftz: bool } Special Sm80 Thread
        format!("sin.approx{}.f32 %o0, %i0", flag(ftz, ".ftz")) => sig(&[F32], &[F32]);
    /// `cos a`: absolute error at most 2⁻²⁰·⁵ in [−π, π].
    Cos { ftz: bool } Special Sm80 Thread
        format!("cos.approx{}.f32 %o0, %i0", flag(ftz, ".ftz")) => sig(&[F32], &[F32]);
    /// `tanh a`: relative error at most 2⁻¹¹ (f32), and halves.
    Tanh { ty: Ty } Special Sm80 Thread
        format!("tanh.approx.{} %o0, %i0", ty.ptx()) => sig(&[ty], &[ty]);

    // ---- comparison and selection ----------------------------------------------------------------------------------

    /// Whether the comparison holds.
    Setp { cmp: Cmp, ty: Ty, ftz: bool } Compare Sm80 Thread
        format!("setp.{}{}.{} %o0, %i0, %i1", cmp.ptx(), flag(ftz, ".ftz"), ty.ptx()) => sig(&[Pred], &[ty, ty]);
    /// `p ? a : b`.
    Selp { ty: Ty } Compare Sm80 Thread
        format!("selp.{} %o0, %i0, %i1, %i2", selp_word(ty)) => sig(&[ty], &[ty, ty, Pred]);

    // ---- conversion ------------------------------------------------------------------------------------------------

    /// A value in another scalar type; `rounding` where the conversion can lose, `saturate` clamps to the target's range.
    Cvt { to: Ty, from: Ty, rounding: CvtRound, ftz: bool, saturate: bool } Convert Sm80 Thread
        format!("cvt{}{}{}.{}.{} %o0, %i0", rounding.ptx(), flag(ftz, ".ftz"), flag(saturate, ".sat"), to.ptx(), from.ptx()) => sig(&[to], &[from]);
    /// An integer of 8 bits (signed or not) from the low byte of a register, widened to `to`.
    CvtByte { to: Ty, signed: bool } Convert Sm80 Thread
        format!("cvt{}.{}.{} %o0, %i0", if to.is_float() { ".rn" } else { "" }, to.ptx(), if signed { "s8" } else { "u8" }) => sig(&[to], &[U32]);
    /// Rounds a float or an integer to 8 bits, saturating; the byte in the low bits of a 32-bit register.
    CvtToByte { from: Ty, signed: bool } Convert Sm80 Thread
        format!("cvt{}.sat.{}.{} %o0, %i0", if from.is_float() { ".rni" } else { "" }, if signed { "s8" } else { "u8" }, from.ptx()) => sig(&[U32], &[from]);
    /// Two f32 rounded into one register: operand 0 into the high half, operand 1 into the low half, as PTX orders them.
    CvtPack { to: Packed, relu: bool } Convert Sm80 Thread
        format!("cvt.rn{}{}.{}.f32 %o0, %i0, %i1", flag(to.is_fp8(), ".satfinite"), flag(relu, ".relu"), to.ptx()) => sig(&[to.ty()], &[F32, F32]);
    /// Two halves rounded into two fp8, saturating.
    CvtHalfToFp8 { to: Packed, relu: bool } Convert Sm89 Thread
        format!("cvt.rn.satfinite{}.{}.f16x2 %o0, %i0", flag(relu, ".relu"), to.ptx()) => sig(&[B16], &[Ty::F16x2]);
    /// Two fp8 widened into two halves, exactly.
    CvtFp8ToHalf { from: Packed, relu: bool } Convert Sm89 Thread
        format!("cvt.rn{}.f16x2.{} %o0, %i0", flag(relu, ".relu"), from.ptx()) => sig(&[Ty::F16x2], &[B16]);
    /// f32 rounded to tf32, in 32 bits: to nearest with ties away (`rna`), or to nearest even (sm_90).
    CvtTf32 { rounding: CvtRound } Convert Sm80 Thread
        format!("cvt{}.tf32.f32 %o0, %i0", rounding.ptx()) => sig(&[B32], &[F32]);

    // ---- loads, stores, atomics ------------------------------------------------------------------------------------

    /// Loads `count` values of type `ty` (1, 2, 4; at most 16 bytes). Address: base, offset.
    Ld { space: Space, ty: Ty, count: u8, order: Order, cache: Cache } Memory Sm80 Thread
        format!("ld{}.{}{}{}.{} {}, [%i0+%i1]", order.ptx(), space.ptx(), cache.ptx(), vector(count), ty.as_bits().ptx(), group('o', count))
        => sig(&vec![ty; count as usize], &[space.address(), S64]);
    /// Loads one byte, zero- or sign-extended into 32 bits.
    LdByte { space: Space, signed: bool, cache: Cache } Memory Sm80 Thread
        format!("ld.{}{}.{} %o0, [%i0+%i1]", space.ptx(), cache.ptx(), if signed { "s8" } else { "u8" }) => sig(&[U32], &[space.address(), S64]);
    /// Stores `count` values. Operands: base, offset, values.
    St { space: Space, ty: Ty, count: u8, order: Order, cache: Cache } Memory Sm80 Thread
        format!("st{}.{}{}{}.{} [%i0+%i1], {}", order.ptx(), space.ptx(), cache.ptx(), vector(count), ty.as_bits().ptx(), group('i', count))
        => { let mut ins = vec![space.address(), S64]; ins.extend(vec![ty; count as usize]); Signature { outs: vec![], ins } };
    /// Stores the low byte of a 32-bit register.
    StByte { space: Space, cache: Cache } Memory Sm80 Thread
        format!("st.{}{}.u8 [%i0+%i1], %i2", space.ptx(), cache.ptx()) => sig(&[], &[space.address(), S64, U32]);
    /// Changes a word in memory and returns what it was.
    Atom { space: Space, op: Atomic, ty: Ty, order: Order } Memory Sm80 Thread
        format!("atom{}.{}.{}{}.{} %o0, [%i0+%i1], %i2{}", order.ptx(), space.ptx(), op.ptx(), noftz(ty, op), atom_word(ty, op), if op.operands() == 2 { ", %i3" } else { "" })
        => { let mut ins = vec![space.address(), S64]; ins.extend(vec![ty; op.operands()]); Signature { outs: vec![ty], ins } };
    /// Changes `count` neighbouring words in memory and returns nothing; vectors (global f32, halves) need sm_90.
    Red { space: Space, op: Atomic, ty: Ty, count: u8, order: Order } Memory Sm80 Thread
        format!("red{}.{}{}.{}{}.{} [%i0+%i1], {}", order.ptx(), space.ptx(), vector(count), op.ptx(), noftz(ty, op), atom_word(ty, op), group('i', count)).replace_vector_order()
        => { let mut ins = vec![space.address(), S64]; ins.extend(vec![ty; count as usize]); Signature { outs: vec![], ins } };
    /// Brings the cache line at a global address into L2 (or L1).
    Prefetch { l1: bool } Memory Sm80 Thread
        format!("prefetch.global.{} [%i0+%i1]", if l1 { "L1" } else { "L2" }) => sig(&[], &[U64, S64]);
    /// Drops 128 bytes of L2 without writing them back: their contents become undefined.
    DiscardL2 {} Memory Sm80 Thread
        "discard.global.L2 [%i0+%i1], 128" => sig(&[], &[U64, S64]);
    /// An L2 eviction policy for `.L2::cache_hint` operands: all accesses `evict_first` or `evict_last`.
    CreatePolicy { evict_first: bool } Move Sm80 Thread
        format!("createpolicy.fractional.L2::{}.b64 %o0, 1.0", if evict_first { "evict_first" } else { "evict_last" }) => sig(&[B64], &[]);

    // ---- asynchronous copies by threads ----------------------------------------------------------------------------

    /// Copies 4, 8 or 16 bytes from global to shared without registers; only `source_bytes` (operand 4) are read, the rest is zero.
    /// Operands: shared base, offset, global base, offset, source bytes.
    CpAsync { bytes: u8, bypass_l1: bool } Async Sm80 Thread
        format!("cp.async.{}.shared.global [%i0+%i1], [%i2+%i3], {bytes}, %i4", if bypass_l1 { "cg" } else { "ca" }) => sig(&[], &[U32, S64, U64, S64, U32]);
    /// Closes the group of this thread's `cp.async` issued so far.
    CpAsyncCommit {} Async Sm80 Thread
        "cp.async.commit_group" => sig(&[], &[]);
    /// Waits until at most `pending` of this thread's groups are unfinished.
    CpAsyncWait { pending: u32 } Async Sm80 Thread
        format!("cp.async.wait_group {pending}") => sig(&[], &[]);
    /// Arrives on an mbarrier when this thread's `cp.async` so far are finished; without `no_increment` it first raises the pending count.
    CpAsyncArrive { no_increment: bool } Async Sm80 Thread
        format!("cp.async.mbarrier.arrive{}.shared.b64 [%i0+%i1]", flag(no_increment, ".noinc")) => sig(&[], &[U32, S64]);

    // ---- bulk copies -----------------------------------------------------------------------------------------------

    /// Copies `size` bytes (a multiple of 16) from global to shared; completes on an mbarrier by bytes.
    /// Operands: shared address, global address, size, mbarrier address, `[CTA mask]`, `[policy]`.
    BulkLoad { multicast: bool, hint: bool } Async Sm90 Thread
        format!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{}{} [%i0], [%i1], %i2, [%i3]{}{}", flag(multicast, ".multicast::cluster"), hint_word(hint), flag(multicast, ", %i4"), match (hint, multicast) { (false, _) => "", (true, false) => ", %i4", (true, true) => ", %i5" })
        => { let mut ins = vec![U32, U64, U32, U32];
          if multicast { ins.push(U16) }
          if hint { ins.push(B64) }
          Signature { outs: vec![], ins } };
    /// Copies `size` bytes from shared to global; completes in this thread's bulk group. Operands: global, shared, size, `[policy]`.
    BulkStore { hint: bool } Async Sm90 Thread
        format!("cp.async.bulk.global.shared::cta.bulk_group{} [%i0], [%i1], %i2{}", hint_word(hint), flag(hint, ", %i3"))
        => { let mut ins = vec![U64, U32, U32];
          if hint { ins.push(B64) }
          Signature { outs: vec![], ins } };
    /// Reduces `size` bytes of shared memory into global memory, element by element. Operands: global, shared, size.
    BulkReduceStore { op: BulkReduce, ty: Ty } Async Sm90 Thread
        format!("cp.reduce.async.bulk.global.shared::cta.bulk_group.{}{}.{} [%i0], [%i1], %i2", op.ptx(), flag(matches!(ty, Ty::F16 | Ty::Bf16) && matches!(op, BulkReduce::Add), ".noftz"), ty.ptx()) => sig(&[], &[U64, U32, U32]);
    /// Copies `size` bytes to another CTA of the cluster; completes on its mbarrier. Operands: remote shared, own shared, size, remote mbarrier.
    BulkCopyToPeer {} Async Sm90 Thread
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%i0], [%i1], %i2, [%i3]" => sig(&[], &[U32, U32, U32, U32]);
    /// Brings `size` bytes into L2. Operands: global, size.
    BulkPrefetch {} Async Sm90 Thread
        "cp.async.bulk.prefetch.L2.global [%i0], %i1" => sig(&[], &[U64, U32]);
    /// Closes this thread's bulk group.
    BulkCommit {} Async Sm90 Thread
        "cp.async.bulk.commit_group" => sig(&[], &[]);
    /// Waits until at most `pending` of this thread's bulk groups are unfinished; with `read`, until they have read their source.
    BulkWait { pending: u32, read: bool } Async Sm90 Thread
        format!("cp.async.bulk.wait_group{} {pending}", flag(read, ".read")) => sig(&[], &[]);

    // ---- tensor copies (TMA) ---------------------------------------------------------------------------------------

    /// Loads a box of a tensor into shared memory; completes on an mbarrier by bytes. Operands: shared address, map address, coordinates
    /// (innermost first), `[im2col offsets: rank − 2 of u16]`, mbarrier address, `[CTA mask]`, `[policy]`.
    TmaLoad { rank: u8, im2col: bool, multicast: bool, hint: bool } Async Sm90 Thread
        { let o = if im2col { rank as usize - 2 } else { 0 }; let c = 2 + rank as usize; let bar = c + o; let mut at = bar + 1;
          let mut tail = String::new();
          if im2col { tail += &format!(", %I{c}..{bar}"); }
          if multicast { tail += &format!(", %i{at}"); at += 1; }
          if hint { tail += &format!(", %i{at}"); }
          format!("cp.async.bulk.tensor.{rank}d.shared::cluster.global{}.mbarrier::complete_tx::bytes{}{} [%i0], [%i1, {}], [%i{bar}]{tail}", if im2col { ".im2col" } else { ".tile" }, flag(multicast, ".multicast::cluster"), hint_word(hint), coords(2, rank)) }
        => { let mut ins = vec![U32, U64]; ins.extend(vec![Ty::S32; rank as usize]);
          if im2col { ins.extend(vec![U16; rank as usize - 2]) } ins.push(U32);
          if multicast { ins.push(U16) }
          if hint { ins.push(B64) }
          Signature { outs: vec![], ins } };
    /// Stores a box of shared memory into a tensor, clipped at its edges; completes in this thread's bulk group.
    /// Operands: map address, coordinates, shared address, `[policy]`.
    TmaStore { rank: u8, im2col: bool, hint: bool } Async Sm90 Thread
        format!("cp.async.bulk.tensor.{rank}d.global.shared::cta{}.bulk_group{} [%i0, {}], [%i{}]{}", if im2col { ".im2col_no_offs" } else { ".tile" }, hint_word(hint), coords(1, rank), 1 + rank, if hint { format!(", %i{}", 2 + rank) } else { String::new() })
        => { let mut ins = vec![U64]; ins.extend(vec![Ty::S32; rank as usize]); ins.push(U32);
          if hint { ins.push(B64) }
          Signature { outs: vec![], ins } };
    /// Reduces a box of shared memory into a tensor. Operands: map address, coordinates, shared address.
    TmaReduce { rank: u8, op: BulkReduce, im2col: bool } Async Sm90 Thread
        format!("cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{}{}.bulk_group [%i0, {}], [%i{}]", op.ptx(), if im2col { ".im2col_no_offs" } else { ".tile" }, coords(1, rank), 1 + rank)
        => { let mut ins = vec![U64]; ins.extend(vec![Ty::S32; rank as usize]); ins.push(U32); Signature { outs: vec![], ins } };
    /// Brings a box of a tensor into L2. Operands: map address, coordinates. At rank 1 the coordinate should not be a constant 0: ptxas 13.0
    /// then encodes no register for it, and a kernel with such a prefetch ended with an illegal instruction on an H200.
    TmaPrefetch { rank: u8 } Async Sm90 Thread
        format!("cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [%i0, {}]", coords(1, rank))
        => { let mut ins = vec![U64]; ins.extend(vec![Ty::S32; rank as usize]); Signature { outs: vec![], ins } };
    /// Brings a tensor map itself into the cache of TMA.
    TensormapPrefetch {} Async Sm90 Thread
        "prefetch.tensormap [%i0]" => sig(&[], &[U64]);
    /// Writes one field of a tensor map in global or shared memory. Operands: address, value.
    TensormapReplace { field: MapField, space: Space } Async Sm90a Thread
        { let (word, ord) = field.ptx(); format!("tensormap.replace.tile.{word}.{}.b1024.{} [%i0], {ord}%i1", if matches!(space, Space::Global) { "global" } else { "shared::cta" }, field.ty().ptx()) }
        => sig(&[], &[space.address(), field.ty()]);
    /// Copies a changed tensor map of 128 bytes from shared to global and hands it to TMA, for the scope. Operands: global, shared.
    TensormapPublish { scope: Scope } Async Sm90 Warp
        format!("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.{}.sync.aligned [%i0], [%i1], 128", scope.ptx()) => sig(&[], &[U64, U32]);

    // ---- distributed shared memory ---------------------------------------------------------------------------------

    /// The address that a piece of this CTA's shared memory has in the CTA of the given rank.
    MapShared {} Move Sm90 Thread
        "mapa.shared::cluster.u32 %o0, %i0, %i1" => sig(&[U32], &[U32, U32]);
    /// Stores to another CTA of the cluster and completes on its mbarrier by bytes. Operands: address, mbarrier address, values.
    StAsync { ty: Ty, count: u8 } Async Sm90 Thread
        format!("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{}.{} [%i0], {}, [%i1]", vector(count), ty.as_bits().ptx(), group('i', count))
        => { let mut ins = vec![U32, U32]; ins.extend(vec![ty; count as usize]); Signature { outs: vec![], ins } };
    /// Adds (or another integer operation) to a word of another CTA and completes on its mbarrier. Operands: address, mbarrier, value.
    RedAsync { op: Atomic, ty: Ty } Async Sm90 Thread
        format!("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{}.{} [%i0], %i2, [%i1]", op.ptx(), atom_word(ty, op)) => sig(&[], &[U32, U32, ty]);

    // ---- matrices --------------------------------------------------------------------------------------------------

    /// Loads `count` 8×8 matrices of 16-bit elements; lane `8·i + r` gives the address of row r of matrix i.
    Ldmatrix { count: u8, transpose: bool } Matrix Sm80 Warp
        format!("ldmatrix.sync.aligned.m8n8.x{count}{}.shared.b16 %O, [%i0+%i1]", flag(transpose, ".trans")) => sig(&vec![B32; count as usize], &[U32, S64]);
    /// Stores `count` 8×8 matrices of 16-bit elements.
    Stmatrix { count: u8, transpose: bool } Matrix Sm90 Warp
        format!("stmatrix.sync.aligned.m8n8.x{count}{}.shared.b16 [%i0+%i1], %I2..{}", flag(transpose, ".trans"), 2 + u32::from(count))
        => { let mut ins = vec![U32, S64]; ins.extend(vec![B32; count as usize]); Signature { outs: vec![], ins } };
    /// Transposes an 8×8 matrix of 16-bit elements held by a warp.
    Movmatrix {} Matrix Sm80 Warp
        "movmatrix.sync.aligned.m8n8.trans.b16 %o0, %i0" => sig(&[B32], &[B32]);
    /// A matrix product by one warp. Operands: A, B, C registers, `[metadata, selector]`.
    Mma { shape: MmaShape } Matrix Sm80 Warp
        shape.ptx() => shape.signature();
    /// A matrix product by one warpgroup, asynchronous. Operands: A (descriptor, or four registers), B descriptor, `[metadata, selector]`,
    /// scale-d; results are the accumulators, which are also read where scale-d holds.
    Wgmma { shape: WgmmaShape } Matrix Sm90a Warpgroup
        shape.ptx() => shape.signature();
    /// Orders register and shared-memory accesses before the `wgmma` that follow.
    WgmmaFence {} Matrix Sm90a Warpgroup
        "wgmma.fence.sync.aligned" => sig(&[], &[]);
    /// Closes the group of `wgmma` issued so far.
    WgmmaCommit {} Matrix Sm90a Warpgroup
        "wgmma.commit_group.sync.aligned" => sig(&[], &[]);
    /// Waits until at most `pending` groups are in flight.
    WgmmaWait { pending: u32 } Matrix Sm90a Warpgroup
        format!("wgmma.wait_group.sync.aligned {pending}") => sig(&[], &[]);

    // ---- barriers of the CTA and the cluster -----------------------------------------------------------------------

    /// Waits for the CTA, or for `threads` threads, at barrier `id` (operands; thread count 0 means the CTA). Every warp arrives whole.
    BarSync {} Barrier Sm80 Warp
        "barrier.sync.aligned %i0, %i1" => sig(&[], &[U32, U32]);
    /// Arrives at barrier `id` without waiting. Operands: id, threads.
    BarArrive {} Barrier Sm80 Warp
        "barrier.arrive.aligned %i0, %i1" => sig(&[], &[U32, U32]);
    /// Waits for the whole CTA (`barrier.sync 0`).
    CtaSync {} Barrier Sm80 Cta
        "barrier.sync.aligned 0" => sig(&[], &[]);
    /// Waits for the CTA and counts the threads whose predicate holds.
    CtaCount {} Barrier Sm80 Cta
        "barrier.red.popc.aligned.u32 %o0, 0, %i0" => sig(&[U32], &[Pred]);
    /// Waits for the CTA and tells whether the predicate holds in all (or any) threads.
    CtaVote { all: bool } Barrier Sm80 Cta
        format!("barrier.red.{}.aligned.pred %o0, 0, %i0", if all { "and" } else { "or" }) => sig(&[Pred], &[Pred]);
    /// Orders memory among the lanes of the mask and waits for them.
    WarpSync {} Barrier Sm80 Warp
        "bar.warp.sync %i0" => sig(&[], &[B32]);
    /// Arrives at the cluster's barrier; `relaxed` without releasing memory.
    ClusterArrive { relaxed: bool } Barrier Sm90 Cluster
        format!("barrier.cluster.arrive.{}.aligned", if relaxed { "relaxed" } else { "release" }) => sig(&[], &[]);
    /// Waits for the cluster's barrier and acquires memory.
    ClusterWait {} Barrier Sm90 Cluster
        "barrier.cluster.wait.acquire.aligned" => sig(&[], &[]);

    // ---- mbarriers: addresses are base, offset ---------------------------------------------------------------------

    /// Makes an mbarrier that completes a phase after `count` arrivals. Operands: address, count.
    MbarrierInit {} Barrier Sm80 Thread
        "mbarrier.init.shared.b64 [%i0+%i1], %i2" => sig(&[], &[U32, S64, U32]);
    /// Ends an mbarrier's life: its memory may be used for other things.
    MbarrierInvalidate {} Barrier Sm80 Thread
        "mbarrier.inval.shared.b64 [%i0+%i1]" => sig(&[], &[U32, S64]);
    /// Arrives `count` times (operand 2) and returns the phase token. `release` at CTA scope.
    MbarrierArriveToken {} Barrier Sm90 Thread
        "mbarrier.arrive.shared.b64 %o0, [%i0+%i1], %i2" => sig(&[B64], &[U32, S64, U32]);
    /// Arrives `count` times (operand 2) at an mbarrier of this CTA, or (`Cluster`) of any CTA. Writes before it are released to `scope`; reads
    /// before it are complete for whoever waits, at any distance.
    MbarrierArrive { space: Space, scope: Scope } Barrier Sm90 Thread
        format!("mbarrier.arrive{}.{}.b64 _, [%i0+%i1], %i2", if matches!(scope, Scope::Cta) { "" } else { ".release.cluster" }, if matches!(space, Space::Cluster) { "shared::cluster" } else { "shared::cta" }) => sig(&[], &[U32, S64, U32]);
    /// Arrives once and expects `bytes` (operand 2) more bytes in this phase.
    MbarrierArriveExpect { space: Space } Barrier Sm90 Thread
        if matches!(space, Space::Cluster) { "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%i0+%i1], %i2" } else { "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%i0+%i1], %i2" } => sig(&[], &[U32, S64, U32]);
    /// Arrives once and lowers the count of this and all later phases by one.
    MbarrierArriveDrop {} Barrier Sm90 Thread
        "mbarrier.arrive_drop.shared::cta.b64 _, [%i0+%i1], %i2" => sig(&[], &[U32, S64, U32]);
    /// Expects `bytes` more bytes in this phase without arriving.
    MbarrierExpect { space: Space } Barrier Sm90 Thread
        if matches!(space, Space::Cluster) { "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%i0+%i1], %i2" } else { "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%i0+%i1], %i2" } => sig(&[], &[U32, S64, U32]);
    /// Reports `bytes` as arrived, as an async unit would.
    MbarrierComplete { space: Space } Barrier Sm90 Thread
        if matches!(space, Space::Cluster) { "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%i0+%i1], %i2" } else { "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%i0+%i1], %i2" } => sig(&[], &[U32, S64, U32]);
    /// Waits until the phase of the given parity is complete, for as long as it takes; acquires memory for the scope. Operands: address, parity.
    MbarrierWait { scope: Scope } Barrier Sm90 Thread
        format!("{{ .reg .pred d%u; W%u: mbarrier.try_wait.parity.acquire.{}.shared::cta.b64 d%u, [%i0+%i1], %i2; @!d%u bra W%u; }}", scope.ptx()) => sig(&[], &[U32, S64, U32]);
    /// Whether the phase of the given parity is complete.
    MbarrierTest { kind: TestWait, scope: Scope } Barrier Sm90 Thread
        format!("mbarrier.{}.parity.acquire.{}.shared::cta.b64 %o0, [%i0+%i1], %i2", if matches!(kind, TestWait::Test) { "test_wait" } else { "try_wait" }, scope.ptx()) => sig(&[Pred], &[U32, S64, U32]);
    /// Whether the phase that the token belongs to is complete.
    MbarrierTestToken { kind: TestWait } Barrier Sm90 Thread
        format!("mbarrier.{}.acquire.cta.shared::cta.b64 %o0, [%i0+%i1], %i2", if matches!(kind, TestWait::Test) { "test_wait" } else { "try_wait" }) => sig(&[Pred], &[U32, S64, B64]);
    /// Arrivals that are still missing in the phase of a token.
    MbarrierPending {} Barrier Sm80 Thread
        "mbarrier.pending_count.b64 %o0, %i0" => sig(&[U32], &[B64]);

    // ---- fences ----------------------------------------------------------------------------------------------------

    /// A memory fence; see [`Fence`].
    MemoryFence { fence: Fence } Barrier Sm80 Thread
        match fence {
            Fence::AcqRel(s) => format!("fence.acq_rel.{}", s.ptx()),
            Fence::Sc(s) => format!("fence.sc.{}", s.ptx()),
            Fence::MbarrierInit => "fence.mbarrier_init.release.cluster".into(),
            Fence::ProxyAsyncShared => "fence.proxy.async.shared::cta".into(),
            Fence::ProxyAsyncGlobal => "fence.proxy.async.global".into(),
            Fence::ProxyAsync => "fence.proxy.async".into(),
            Fence::TensormapRelease(s) => format!("fence.proxy.tensormap::generic.release.{}", s.ptx()),
            Fence::TensormapAcquire(s) => format!("fence.proxy.tensormap::generic.acquire.{} [%i0], 128", s.ptx()),
        }
        => if matches!(fence, Fence::TensormapAcquire(_)) { sig(&[], &[U64]) } else { sig(&[], &[]) };

    // ---- exchange between lanes ------------------------------------------------------------------------------------

    /// The value of another lane. Operands: value, lane or distance, clamp word, member mask.
    Shfl { mode: Shuffle } Shuffle Sm80 Warp
        format!("shfl.sync.{}.b32 %o0, %i0, %i1, %i2, %i3", mode.ptx()) => sig(&[B32], &[B32, U32, U32, B32]);
    /// Whether a predicate holds in all lanes, any lane, or is the same in all. Operands: predicate, member mask.
    VoteAcross { mode: Vote } Shuffle Sm80 Warp
        format!("vote.sync.{}.pred %o0, %i0, %i1", mode.ptx()) => sig(&[Pred], &[Pred, B32]);
    /// The lanes in which a predicate holds, as a mask. Operands: predicate, member mask.
    Ballot {} Shuffle Sm80 Warp
        "vote.sync.ballot.b32 %o0, %i0, %i1" => sig(&[B32], &[Pred, B32]);
    /// The lanes that hold the same value. Operands: value, member mask.
    MatchAny { ty: Ty } Shuffle Sm80 Warp
        format!("match.any.sync.{} %o0, %i0, %i1", ty.as_bits().ptx()) => sig(&[B32], &[ty, B32]);
    /// The member mask if all lanes hold the same value, else 0.
    MatchAll { ty: Ty } Shuffle Sm80 Warp
        format!("match.all.sync.{} %o0, %i0, %i1", ty.as_bits().ptx()) => sig(&[B32], &[ty, B32]);
    /// A 32-bit integer reduced over the lanes of the mask. Operands: value, member mask.
    ReduxAcross { op: Redux, ty: Ty } Shuffle Sm80 Warp
        format!("redux.sync.{}.{} %o0, %i0, %i1", op.ptx(), if matches!(op, Redux::And | Redux::Or | Redux::Xor) { "b32" } else { ty.ptx() }) => sig(&[ty], &[ty, B32]);
    /// True in exactly one lane of the mask. Operand: member mask.
    Elect {} Shuffle Sm90 Warp
        "elect.sync _|%o0, %i0" => sig(&[Pred], &[B32]);
    /// The lanes that run this instruction together.
    ActiveMask {} Shuffle Sm80 Thread
        "activemask.b32 %o0" => sig(&[B32], &[]);

    // ---- control ---------------------------------------------------------------------------------------------------

    /// Gives registers of this warpgroup back, or takes more, until each thread has `registers`.
    Setmaxnreg { increase: bool, registers: u32 } Control Sm90a Warpgroup
        format!("setmaxnreg.{}.sync.aligned.u32 {registers}", if increase { "inc" } else { "dec" }) => sig(&[], &[]);
    /// Waits until the launches before this one are complete and their memory is visible (programmatic dependent launch).
    GridDependencyWait {} Control Sm90 Thread
        "griddepcontrol.wait" => sig(&[], &[]);
    /// Lets the next launch start (programmatic dependent launch).
    GridDependencyLaunch {} Control Sm90 Thread
        "griddepcontrol.launch_dependents" => sig(&[], &[]);
    /// Sleeps for about as many nanoseconds.
    Nanosleep {} Control Sm80 Thread
        "nanosleep.u32 %i0" => sig(&[], &[U32]);
    /// Stops the kernel with an error.
    Trap {} Control Sm80 Thread
        "trap" => sig(&[], &[]);
}

const fn wide(ty: Ty) -> Ty {
    match ty {
        Ty::U16 => Ty::U32,
        Ty::S16 => Ty::S32,
        Ty::S32 => Ty::S64,
        _ => Ty::U64,
    }
}

const fn sign32(signed: bool) -> &'static str {
    if signed { "s32" } else { "u32" }
}

fn arithmetic(word: &str, ty: Ty, rounding: Round, ftz: bool, saturate: bool) -> String {
    // Always with its rounding, for halves too: without one, ptxas may fuse a product and a sum into one rounding.
    format!("{word}.{}{}{}.{} %o0, %i0, %i1", rounding.ptx(), flag(ftz, ".ftz"), flag(saturate, ".sat"), ty.ptx())
}

/// Halves move as bits.
fn move_word(ty: Ty) -> &'static str {
    match ty {
        Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => ty.as_bits().ptx(),
        _ => ty.ptx(),
    }
}

fn selp_word(ty: Ty) -> &'static str {
    match ty {
        Ty::F32 => "f32",
        Ty::F64 => "f64",
        other => other.as_bits().ptx(),
    }
}

fn noftz(ty: Ty, op: Atomic) -> &'static str {
    flag(matches!(op, Atomic::Add | Atomic::Min | Atomic::Max) && matches!(ty, Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2), ".noftz")
}

/// Atomics spell their type: bits for the bitwise ones, unsigned for a 64-bit add.
fn atom_word(ty: Ty, op: Atomic) -> &'static str {
    match op {
        Atomic::And | Atomic::Or | Atomic::Xor | Atomic::Exch | Atomic::Cas => ty.as_bits().ptx(),
        Atomic::Add if matches!(ty, Ty::S64) => "u64",
        _ => ty.ptx(),
    }
}

trait VectorOrder {
    fn replace_vector_order(self) -> String;
}

impl VectorOrder for String {
    /// PTX writes a vector reduction as `red.global.add.noftz.v4.f32`: the count behind the operation.
    fn replace_vector_order(self) -> String {
        for count in [2, 4, 8] {
            let word = format!(".v{count}");
            if let Some(at) = self.find(&word) {
                let mut text = self.clone();
                text.replace_range(at..at + word.len(), "");
                let end = text.find(' ').unwrap_or(text.len());
                let dot = text[..end].rfind('.').unwrap_or(end);
                text.insert_str(dot, &word);
                return text;
            }
        }
        self
    }
}

impl Op {
    /// The chip that the operation needs with these attributes.
    pub fn target(&self) -> Target {
        let scope = match self {
            Op::Ld { order, .. } | Op::St { order, .. } | Op::Atom { order, .. } | Op::Red { order, .. } => match order {
                Order::Weak | Order::Volatile => None,
                Order::Relaxed(scope) | Order::Acquire(scope) | Order::Release(scope) | Order::AcqRel(scope) => Some(*scope),
            },
            Op::MemoryFence { fence: Fence::AcqRel(scope) | Fence::Sc(scope) } => Some(*scope),
            _ => None,
        };
        if scope == Some(Scope::Cluster) {
            return self.table_target().max(Target::Sm90);
        }
        let by_attribute = match self {
            Op::SpecialRegister { register: Special::ClusterX | Special::ClustersX | Special::ClusterCtaRank | Special::ClusterCtas } => {
                Target::Sm90
            }
            Op::Red { count, .. } if *count > 1 => Target::Sm90,
            Op::Ex2 { ty: Ty::Bf16 | Ty::Bf16x2, .. } | Op::Tanh { ty: Ty::Bf16 | Ty::Bf16x2 } => Target::Sm90,
            Op::FAdd { ty: Ty::Bf16 | Ty::Bf16x2, .. }
            | Op::FSub { ty: Ty::Bf16 | Ty::Bf16x2, .. }
            | Op::FMul { ty: Ty::Bf16 | Ty::Bf16x2, .. } => Target::Sm90,
            Op::Setp { ty: Ty::Bf16, .. } => Target::Sm90,
            // sm_80 rounds f32 to bf16 and widens it again; every other conversion of bf16 came with sm_90.
            Op::Cvt { to: Ty::F32, from: Ty::Bf16, ftz: false, .. } | Op::Cvt { to: Ty::Bf16, from: Ty::F32, ftz: false, .. } => {
                Target::Sm80
            }
            Op::Cvt { to: Ty::Bf16, .. } | Op::Cvt { from: Ty::Bf16, .. } => Target::Sm90,
            Op::Atom { ty: Ty::Bf16 | Ty::Bf16x2, op: Atomic::Add, .. } | Op::Red { ty: Ty::Bf16 | Ty::Bf16x2, .. } => Target::Sm90,
            Op::CvtPack { to, .. } if to.is_fp8() => Target::Sm89,
            Op::CvtTf32 { rounding } if !matches!(rounding, CvtRound::NearestAway) => Target::Sm90,
            Op::Mma { shape } if matches!(shape.a, MatrixType::E4m3 | MatrixType::E5m2) => Target::Sm89,
            Op::Mma { shape } if shape.a == MatrixType::F64 && shape.m == 16 => Target::Sm90,
            Op::Ld { space: Space::Cluster, .. }
            | Op::LdByte { space: Space::Cluster, .. }
            | Op::St { space: Space::Cluster, .. }
            | Op::StByte { space: Space::Cluster, .. }
            | Op::Atom { space: Space::Cluster, .. }
            | Op::Red { space: Space::Cluster, .. } => Target::Sm90,
            Op::MemoryFence { fence } if !matches!(fence, Fence::AcqRel(_) | Fence::Sc(_)) => Target::Sm90,
            _ => Target::Sm80,
        };
        self.table_target().max(by_attribute)
    }

    /// True where the accumulators named as results are also read.
    pub fn reads_results(&self) -> bool {
        matches!(self, Op::Wgmma { .. })
    }

    /// True when the instruction does nothing but compute its results from its operands.
    pub fn is_pure(&self) -> bool {
        matches!(self.class(), Class::Move | Class::Integer | Class::Float | Class::Special | Class::Convert | Class::Compare)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_every_entry_once_and_says_what_it_does() {
        let mut names: Vec<_> = TABLE.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TABLE.len());
        assert!(TABLE.iter().all(|(_, doc)| doc.trim().len() > 4));
    }

    #[test]
    fn templates_follow_the_signature() {
        let op = Op::TmaLoad { rank: 4, im2col: true, multicast: true, hint: true };
        assert_eq!(op.signature().ins.len(), 2 + 4 + 2 + 1 + 1 + 1);
        assert_eq!(
            op.ptx(),
            "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint \
             [%i0], [%i1, %I2..6], [%i8], %I6..8, %i9, %i10"
        );
        let red = Op::Red { space: Space::Global, op: Atomic::Add, ty: Ty::F32, count: 4, order: Order::Relaxed(Scope::Gpu) };
        assert_eq!(red.ptx(), "red.relaxed.gpu.global.add.v4.f32 [%i0+%i1], %I2..6");
    }
}
