//! The verifier: what makes a kernel fit to be printed or interpreted.
//!
//! Each rule below is **exact or abstains**: where a fault cannot be shown for every launch that the kernel was written for, the
//! rule stays silent and the interpreter decides. The word in brackets is stable: it stands in [`Fault::rule`] and in the message.
//! Findings are collected, sorted by the kernel's own lines, and returned together.
//!
//! # `scope`: where registers live
//! - `[form]` Every index (register, position, late constant, parameter, shared piece, barrier) exists, and position chains end.
//!   Nothing else is checked on a body that breaks this.
//! - `[scope]` A register that is written once is read only where that write has surely run: later in its block or in a block
//!   inside. A loop's head counts for its body and for what follows the loop; its body, the sides of an `if` and roles count for themselves alone.
//! - `[unwritten]` A mutable register is not read where no path from the entry has written it; nor any register that nothing writes.
//! - `[once]` A register that is written once has one writing instruction.
//! - `[stop]` `stop_when` stands at the kernel's top level.
//!
//! # `types`: instructions against the table
//! - `[count]` An instruction has as many results and operands as its signature.
//! - `[type]` A register fits its slot: the same type, or the same width where one side is bits or both are integers. Conditions and
//!   guards are predicates. A constant fits the width of its slot.
//! - `[constant]` An address offset, and the selector of sparse metadata, is a constant; an offset fits 32 signed bits.
//! - `[register]` Accumulators and A fragments of `wgmma` are registers, each accumulator a different one.
//! - `[target]` No instruction needs a later chip than the kernel's.
//! - `[illegal]` PTX knows the operation with these attributes ([`crate::inst::Op::legal`]).
//!
//! # `limits`: what the chip holds
//! - `[shared]` Shared memory fits the target (227 KiB, 163 KiB for sm_80, 99 KiB for sm_89); each piece lies inside it at its alignment;
//!   barriers fit the piece that holds them.
//! - `[threads]` 32 to 1024 threads in whole warps, and at least one CTA an SM, without more threads than an SM holds.
//! - `[registers]` Register budgets are multiples of 8 from 24 to 256, for roles of whole warpgroups on sm_90a, and together take no
//!   more than the CTA has at entry: ⌊65536 / (threads · CTAs)⌋ rounded down to 8, for each thread. `setmaxnreg` at the head of a role
//!   sets the role's budget, upwards or downwards as it is from there.
//! - `[roles]` Roles have warps, ascend, do not overlap, and stay inside the CTA and inside the role around them.
//! - `[cluster]` A cluster has 1 to 16 CTAs and needs sm_90.
//! - `[barrier-id]` A named barrier is one of 0–15 and counts whole warps of this CTA. An mbarrier counts 1 to 2²⁰ − 1 arrivals.
//! - `[params]` Parameters take at most 32764 bytes, and a parameter is read inside its bytes and as what it is.
//! - `[map]` A tensor map has rank 1–5 (im2col 3–5), boxes of 1–256 (im2col: 256 channels, 1024 pixels), an inner extent that is a
//!   multiple of 16 bytes and no wider than the swizzle, and a box that fits shared memory (the outer extents of a box may be left to the
//!   launch); a copy uses it at its rank and mode.
//! - `[alignment]` A shared-memory access at an address known for every thread is aligned to its size and inside its piece; tiles of
//!   swizzled maps stand in pieces aligned to the pattern (1024 bytes for 128-byte rows, 512 for 64, 256 for 32).
//! - `[accumulators]` At an entry budget of 128 registers a `wgmma` has fewer than 104 accumulators a thread; no more than 208 are in flight.
//!
//! # `sync`: barriers and shared memory between threads
//! - `[race]` Bytes of shared memory written by one thread are not read, and bytes read are not overwritten, by another without a barrier
//!   between, where both addresses are known for every thread from thread and lane index alone.
//! - `[init]` An mbarrier that is used is initialised somewhere, with the count that its declaration says, and so is every member of its array;
//!   a thread that did not initialise it uses it only behind a barrier of the CTA or the cluster (`publish`).
//! - `[unwaited]` Someone waits on an mbarrier that bulk or tensor loads complete on (`publish`).
//! - `[cluster-phase]` Arrivals and waits of the cluster's barrier take turns, where all stand at the kernel's top level (`publish`).
//! - `[arrivals]` Someone arrives on an mbarrier that someone waits on; where all arrivals are outside loops and countable, they are at least
//!   the count of a phase; and no single instruction brings more arrivals than a phase counts.
//! - `[bytes]` Where a block announces bytes on an mbarrier and loads onto it, and nobody else loads onto it, the numbers agree; a load that
//!   every CTA of the cluster sends to all counts once for each.
//! - `[named]` A named barrier with a constant number and count is reached by enough threads, and by no more than it counts where all of them
//!   surely reach it. The CTA's barrier is not left to some of the warps.
//!
//! # `proxy`: generic and asynchronous accesses
//! - `[proxy]` Shared memory written by stores is not read by a bulk or tensor copy or by `wgmma` unless a `fence.proxy.async` stands between.
//! - `[reuse]` Shared memory that a bulk or tensor store reads is not overwritten by the same role before a wait that covers its group.
//!
//! # `mma`: matrix products in flight
//! - `[flight]` An accumulator in flight is touched by nothing but `wgmma` of the same shape; an A register in flight is not written. Followed
//!   through loops to a fixed point; at the end of an `if` a product is in flight if it is so on both sides.
//! - `[fence]` A `wgmma.fence` stands before the first `wgmma` and between a write to its registers and the `wgmma`.
//! - `[commit]` A `wgmma` belongs to a group that is closed before it is waited for.
//!
//! # `uniform`: what all threads of a group do alike
//! - `[divergent]` An instruction that a whole warp, warpgroup or CTA must reach together does not stand under a condition or guard that
//!   differs between its lanes (or between its warps, where known for every thread), nor in a role that splits its warpgroup.
//! - `[uniform]` Matrix descriptors, barrier numbers, role selectors and the condition of `stop_when` do not differ between the lanes of a warp.
//!
//! # `cut`: numbers on their way into addresses
//! - `[cut]` The low half alone of a number among the parameters that has 64 bits does not reach the address of an access to global memory,
//!   multiplied in 32 bits or as it is, where no condition that the whole grid decides alike can say that the number fits.
//!
//! # `overlap`: launches that overlap the one in front of them
//! - `[overlap]` No access to global memory stands ahead of every `griddepcontrol.wait`. Asked of each launch that overlaps, with its kernel
//!   ([`Launch::check`](crate::program::Launch::check)); loads of a launch that is given constants are left to the interpreter.
//!
//! # Notes
//! [`notes`] tells what is allowed and yet looks forgotten: `[unused]` results of pure instructions, parameters, shared pieces, barriers,
//! and arrivals on a barrier that nobody waits on.

mod cut;
mod limits;
mod mma;
mod overlap;
mod proxy;
mod publish;
mod scope;
mod sites;
mod sync;
mod types;
mod uniform;
mod values;

pub(crate) use overlap::unwaited;
pub use uniform::{Uniformity, uniformity};

use crate::ir::{KernelBody, Loc};
use std::fmt;
use std::ops::Deref;

/// A finding in a kernel: where, what, and what would come of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rule that was broken: a stable word.
    pub rule: &'static str,
    /// The line at fault.
    pub loc: Loc,
    /// The other line involved, if there is one.
    pub second: Option<Loc>,
    /// What is wrong and what would come of it; names lines as `file:line:column`.
    pub message: String,
}

/// A value that passed the verifier.
#[derive(Clone, Debug)]
pub struct Verified<T>(T);

impl<T> Deref for Verified<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// All faults of a kernel, with the kernel, so that they can be shown in place.
#[derive(Clone, Debug)]
pub struct Faults {
    /// The kernel's name.
    pub kernel: String,
    /// The findings in order of their lines; each message starts with the kernel's own line.
    pub faults: Vec<Fault>,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.faults.len() == 1 { "fault" } else { "faults" };
        writeln!(f, "kernel {}: {} {plural}", self.kernel, self.faults.len())?;
        for fault in &self.faults {
            writeln!(f, "  [{}] {}", fault.rule, fault.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

/// Checks a kernel against every rule of the module's head.
///
/// # Errors
/// [`Faults`]: all findings, in the order of the kernel's own lines.
pub fn verify(body: KernelBody) -> Result<Verified<KernelBody>, Faults> {
    let faults = findings(&body);
    if faults.is_empty() { Ok(Verified(body)) } else { Err(Faults { kernel: body.name, faults }) }
}

/// A body that passes unseen: for tests of what stands behind the gate, with faults that the verifier would catch first.
#[cfg(test)]
pub(crate) fn unchecked(body: KernelBody) -> Verified<KernelBody> {
    Verified(body)
}

fn findings(body: &KernelBody) -> Vec<Fault> {
    let mut found = Findings::new(body);
    scope::form(&mut found);
    if !found.faults.is_empty() {
        // Positions and registers cannot be trusted, so neither can any other rule nor the order of lines.
        return found.faults;
    }
    scope::check(&mut found);
    types::check(&mut found);
    limits::check(&mut found);
    if found.faults.is_empty() {
        // These rules read operands by their place in the signature, and follow values from their definitions.
        let sites = sites::Sites::new(body);
        let values = values::Values::new(body, &sites);
        limits::check_addresses(&mut found, &sites, &values);
        sync::check(&mut found, &sites, &values);
        publish::check(&mut found, &sites, &values);
        proxy::check(&mut found, &sites, &values);
        mma::check(&mut found);
        uniform::check(&mut found, &sites, &values);
        cut::check(&mut found, &sites, &values);
    }
    found.sorted()
}

/// What is allowed and yet looks forgotten, under the word `unused`: results of pure instructions that nothing reads, parameters, shared
/// pieces and barriers that nothing names, arrivals that nobody waits for (of a kernel without faults). Nothing is said of a body that breaks `[form]`.
pub fn notes(body: &KernelBody) -> Vec<Fault> {
    let mut found = Findings::new(body);
    scope::form(&mut found);
    if !found.faults.is_empty() {
        return Vec::new();
    }
    scope::unused(&mut found);
    if findings(body).is_empty() {
        let sites = sites::Sites::new(body);
        publish::unheard(&mut found, &sites, &values::Values::new(body, &sites));
    }
    found.sorted()
}

/// The findings so far, with the kernel that they are about.
struct Findings<'a> {
    body: &'a KernelBody,
    faults: Vec<Fault>,
}

impl<'a> Findings<'a> {
    fn new(body: &'a KernelBody) -> Self {
        Findings { body, faults: Vec::new() }
    }

    /// A position for a message: the kernel's own line, and the innermost where that is another.
    fn at(&self, loc: Loc) -> String {
        let (own, innermost) = (self.body.kernel_line(loc), &self.body.locations[loc.0 as usize]);
        if own == innermost { own.to_string() } else { format!("{own} (in {innermost})") }
    }

    /// Adds a finding; `what` is a sentence without the place.
    fn fault(&mut self, rule: &'static str, loc: Loc, second: Option<Loc>, what: impl fmt::Display) {
        let outer = self.body.kernel_line(loc);
        let inner = &self.body.locations[loc.0 as usize];
        let message = if outer == inner { format!("{outer}: {what}") } else { format!("{outer}: {what} (in {inner})") };
        let fault = Fault { rule, loc, second, message };
        if !self.faults.contains(&fault) {
            self.faults.push(fault);
        }
    }

    /// The author's name of a register, or its number.
    fn register(&self, reg: crate::ir::Reg) -> String {
        match self.body.registers[reg.0 as usize].name {
            Some(name) => format!("{name} ({reg})"),
            None => reg.to_string(),
        }
    }

    fn sorted(mut self) -> Vec<Fault> {
        let body = self.body;
        self.faults.sort_by_key(|fault| {
            let line = body.kernel_line(fault.loc);
            (line.file, line.line, line.column, fault.rule)
        });
        self.faults
    }
}
