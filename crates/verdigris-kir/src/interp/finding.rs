//! What the interpreter finds: values with a stable word, the kernel's own line first, and the consequence.

use std::fmt;

/// The rule that a kernel broke. The word of each ([`FindingKind::word`]) never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FindingKind {
    /// Two accesses, at least one a write, that nothing orders.
    Race,
    /// Two float sums into one place that nothing orders, where results are noted to have the same bits each time.
    UnorderedSums,
    /// An access outside every buffer or piece of shared memory.
    OutOfBounds,
    /// An address that is not a multiple of the access size (or of what TMA asks for).
    Misaligned,
    /// Memory that nothing wrote, where its value matters.
    UnwrittenMemory,
    /// A register (or a value made from one) that nothing wrote, where its value matters.
    UnwrittenRegister,
    /// A non-coherent load of bytes that the same launch writes.
    NonCoherent,
    /// A generic write that reaches an async unit without a proxy fence: by the writer, and for tensor maps by the user too.
    ProxyFence,
    /// An mbarrier used against its protocol: not initialized, initialized twice, too many arrivals, its memory overwritten.
    MbarrierMisuse,
    /// A waiter that two phases went past.
    MbarrierLapped,
    /// A CTA, named or cluster barrier used against its protocol.
    BarrierMisuse,
    /// Lanes or warps that should reach an instruction together and do not.
    Divergence,
    /// A value that all lanes of a warp should hold alike, and do not.
    Uniform,
    /// An accumulator, or an A register that is written, while a wgmma is in flight.
    AccumulatorInFlight,
    /// A wgmma whose registers were touched since the last `wgmma.fence`.
    WgmmaFence,
    /// An instruction with operands that the chip does not take.
    IllegalOperand,
    /// Shared memory of another CTA accessed without being ordered before that CTA's exit.
    RemoteAfterExit,
    /// A CTA that exits while an async unit still uses its shared memory.
    AsyncAfterExit,
    /// Registers asked for or given back against the budget.
    RegisterBudget,
    /// Nothing can go on.
    Deadlock,
    /// A warp ran for longer than its step budget.
    Timeout,
    /// The kernel stopped itself.
    Trap,
    /// A 32-bit computation wrapped around on its way into an address.
    AddressWrap,
    /// A launch that does not fit its kernel, the chip or the memory it is given.
    Launch,
}

impl FindingKind {
    /// Every kind.
    pub const ALL: [FindingKind; 24] = [
        FindingKind::Race,
        FindingKind::UnorderedSums,
        FindingKind::OutOfBounds,
        FindingKind::Misaligned,
        FindingKind::UnwrittenMemory,
        FindingKind::UnwrittenRegister,
        FindingKind::NonCoherent,
        FindingKind::ProxyFence,
        FindingKind::MbarrierMisuse,
        FindingKind::MbarrierLapped,
        FindingKind::BarrierMisuse,
        FindingKind::Divergence,
        FindingKind::Uniform,
        FindingKind::AccumulatorInFlight,
        FindingKind::WgmmaFence,
        FindingKind::IllegalOperand,
        FindingKind::RemoteAfterExit,
        FindingKind::AsyncAfterExit,
        FindingKind::RegisterBudget,
        FindingKind::Deadlock,
        FindingKind::Timeout,
        FindingKind::Trap,
        FindingKind::AddressWrap,
        FindingKind::Launch,
    ];

    /// The stable word.
    pub const fn word(self) -> &'static str {
        match self {
            FindingKind::Race => "race",
            FindingKind::UnorderedSums => "unordered-sums",
            FindingKind::OutOfBounds => "out-of-bounds",
            FindingKind::Misaligned => "misaligned",
            FindingKind::UnwrittenMemory => "unwritten-memory",
            FindingKind::UnwrittenRegister => "unwritten-register",
            FindingKind::NonCoherent => "non-coherent",
            FindingKind::ProxyFence => "proxy-fence",
            FindingKind::MbarrierMisuse => "mbarrier-misuse",
            FindingKind::MbarrierLapped => "mbarrier-lapped",
            FindingKind::BarrierMisuse => "barrier-misuse",
            FindingKind::Divergence => "divergence",
            FindingKind::Uniform => "uniform",
            FindingKind::AccumulatorInFlight => "accumulator-in-flight",
            FindingKind::WgmmaFence => "wgmma-fence",
            FindingKind::IllegalOperand => "illegal-operand",
            FindingKind::RemoteAfterExit => "remote-after-exit",
            FindingKind::AsyncAfterExit => "async-after-exit",
            FindingKind::RegisterBudget => "register-budget",
            FindingKind::Deadlock => "deadlock",
            FindingKind::Timeout => "timeout",
            FindingKind::Trap => "trap",
            FindingKind::AddressWrap => "address-wrap",
            FindingKind::Launch => "launch",
        }
    }
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A source position, owned.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    /// Source file.
    pub file: &'static str,
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub column: u32,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// A place in a kernel: its own line, then the lines of the functions it went through. Words name the first and the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chain(pub(crate) Vec<Position>);

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0[..] {
            [] => f.write_str("an unknown line"),
            [own] => own.fmt(f),
            [own, .., last] => write!(f, "{own} (in {last})"),
        }
    }
}

/// One thing that is wrong with a kernel, as seen in one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule.
    pub kind: FindingKind,
    /// The kernel's name.
    pub kernel: String,
    /// Where: the kernel's own line first, then the lines of the tile functions it went through. Empty for a launch.
    pub at: Vec<Position>,
    /// Index of the CTA in the grid (x, y, z).
    pub cta: [u32; 3],
    /// Warp of the CTA; `None` for an async unit or a whole launch.
    pub warp: Option<u32>,
    /// Lane of the warp, the lowest at fault; `None` where all are.
    pub lane: Option<u32>,
    /// The other line involved, as `at`; empty where there is none.
    pub second: Vec<Position>,
    /// What is wrong, the second line, and what would come of it.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at.first() {
            Some(line) => write!(f, "{line}: ")?,
            None => write!(f, "launch: ")?,
        }
        write!(f, "[{}] {}", self.kind, self.message)?;
        write!(f, " (kernel {}, CTA {},{},{}", self.kernel, self.cta[0], self.cta[1], self.cta[2])?;
        if let Some(warp) = self.warp {
            write!(f, ", warp {warp}")?;
        }
        if let Some(lane) = self.lane {
            write!(f, ", lane {lane}")?;
        }
        write!(f, ")")?;
        for inner in self.at.iter().skip(1) {
            write!(f, "\n    in {inner}")?;
        }
        // The message names the first and the last.
        if self.second.len() > 2 {
            for inner in self.second.iter().skip(1) {
                write!(f, "\n    the other in {inner}")?;
            }
        }
        Ok(())
    }
}

/// What a run found: never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Findings {
    /// The findings in the order in which they came up.
    pub findings: Vec<Finding>,
    /// The seed of the schedule: the same seed finds the same again.
    pub seed: u64,
}

impl Findings {
    /// The first one.
    pub fn first(&self) -> &Finding {
        &self.findings[0]
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        write!(f, "schedule seed {}", self.seed)
    }
}

impl std::error::Error for Findings {}
