//! The interpreter: runs verified kernels on the CPU with the chip's semantics, and says what is wrong with them.
//!
//! A [`Program`] runs against a [`Memory`] under a seeded schedule ([`Options`]). The outcome is a [`Report`] of counts, or [`Findings`]:
//! the kernel's own line, the CTA, warp and lane, the second line involved, and the consequence. A run is one thread and repeats exactly
//! from its seed; different seeds may run in parallel.
//!
//! # The semantics
//!
//! **Values.** A register that nothing wrote, a lane that a shuffle reads from outside its members, and bytes of memory that nothing
//! wrote are poison, lane by lane. Poison may be computed with and selected away. It is a finding when it reaches a store, an address, a
//! branch, a barrier, an instruction of the whole warp, or a matrix product.
//!
//! **Warps.** Lanes that part meet again at the end of the structured block; the sides run one after the other in seeded order, so a
//! lane that waits for progress of another lane of its warp hangs here. The chip may let both progress; a kernel must not need it. Only
//! warp and CTA barriers order the memory of lanes; shuffles and votes do not.
//!
//! **Uniform values.** What [`uniform`](crate::face::Kernel::uniform) makes known as the same in all lanes must be the same; so must barrier
//! numbers, parities, member masks, matrix descriptors and role selectors.
//!
//! **Memory.** Execution is sequentially consistent, and accesses must be ordered by happens-before: vector clocks for warps and async
//! units, with lanes told apart inside a warp (a fence, like a wait, speaks for the lanes that run it); edges come from barriers, mbarriers,
//! release and acquire, fences around relaxed accesses and from waits for async groups. What relaxed atomics may show beyond that (weak outcomes) is **not** explored. Two accesses that
//! nothing orders are a race in every schedule, also in those where they happened to be far apart. A non-coherent load of bytes that the
//! same launch writes is a finding whatever the order. Two atomics are no race; but where results are noted to have the same bits each time
//! ([`Options::ordered_sums`]), two float sums into one place are a finding if nothing orders them, for the order decides the rounding: at once in what the caller bound, and in scratch and shared memory when
//! somebody reads what they left.
//!
//! **Async units.** `cp.async`, bulk and tensor copies, `st.async` and wgmma are agents of their own. They read and write in pieces at any
//! time between issue and completion: at once ([`AsyncPolicy::Earliest`]), only when all warps wait ([`AsyncPolicy::Latest`]), or at random.
//! An mbarrier's count of bytes may be negative; a phase ends when no arrival is pending and no byte is missing. A waiter that two phases
//! went past is a finding. A wait that acquires from its CTA learns what threads of that CTA released and that loads have landed; what other CTAs of the cluster
//! released, and that what they sent is there, only one that acquires from the cluster. Copies of one thread are not ordered with each other until they are waited for. A copy into shared memory must be waited for before its CTA exits, and so must the reading of a copy out of it.
//!
//! **Proxies.** A write by a thread is seen by an async unit after a `fence.proxy.async` by the writer and then synchronization. A write by
//! an async unit is seen by threads after the wait that belongs to it. An async write over bytes that threads have read needs no fence,
//! only order. `cp.async` counts as the thread's own; whoever waited for it may fence what it wrote. A tensor map in global memory that
//! the same launches write is used behind a `fence.proxy.tensormap` release by its writer (publishing a map is one, and lets the lanes that
//! do it know of each other) and an acquire of its address by the user's CTA, ordered before the use. A copy reads its map until it has completed; a
//! store, until it has read its source.
//!
//! **wgmma.** The four warps of a warpgroup bring the same product. Until a wait covers its group its accumulators are neither read nor
//! written, and its A registers not written. Registers that another instruction wrote need a `wgmma.fence` first. Operands are decoded from
//! the descriptor's bits and read at some time between issue and completion.
//!
//! **Clusters.** An access to another CTA's shared memory must be ordered before that CTA's exit. **Grid.** A launch whose CTAs do not wait
//! for each other runs them in seeded order, few at a time ([`Options::resident_ctas`]); a cooperative one has all of them resident.
//! **Launches** that overlap run together from the moment the earlier one lets the later start, until the later one waits for it. In front of a
//! program whose first launch overlaps, something may still run that writes every byte and reads it.
//!
//! **Ends.** When nothing can go on, the finding says who waits for what. A warp that exceeds its step budget is told apart from that.
//!
//! There is no model of time or of the caches.
//!
//! # Limits
//!
//! A run stops at its first finding. Of several lanes of a warp that read a byte and are not synchronized, one stands for all where they wait for one
//! another in parts, so that nothing is reported falsely.
//! Threads that arrived at a named barrier and never see it open are not reported if all of them end.

mod agent;
pub mod alu;
mod clock;
mod copies;
mod decode;
mod finding;
mod machine;
pub mod matrix;
mod mbarrier;
mod memory;
mod reach;
mod report;
mod shadow;
mod state;
mod sync;
pub mod tensor;
mod threads;
mod traffic;
mod warp;
mod wgmma;

#[cfg(test)]
mod tests;

pub use finding::{Finding, FindingKind, Findings, Position};
pub use memory::Memory;
pub use report::{CLASSES, Counters, Report};

use crate::execution::HostValue;
use crate::ir::KernelBody;
use crate::program::{Arg, KernelRef, Launch, Program, Residency, Step};
use crate::verify::{Faults, Verified, verify};
use decode::Decoded;
use matrix::Accumulation;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// When async units do their work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum AsyncPolicy {
    /// As soon as it is issued.
    Earliest,
    /// As late as the memory model allows: only when every warp waits.
    Latest,
    /// In pieces, at random moments.
    #[default]
    Random,
}

/// How a run goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Everything that is random comes from it: the same seed gives the same run.
    pub seed: u64,
    /// When async units do their work.
    pub async_policy: AsyncPolicy,
    /// Warps of one role of every CTA run only when nobody else can: of warpgroup `starved` where there are several, else of warp `starved`,
    /// counted round. `None` prefers nobody.
    pub starved: Option<u32>,
    /// CTAs on the chip at a time, for launches whose CTAs do not wait for each other; a cluster counts whole, and one is always there.
    pub resident_ctas: u32,
    /// Multiprocessors of the chip, as kernels see it.
    pub sms: u32,
    /// Steps that a warp may take.
    pub step_budget: u64,
    /// Disturb approximate instructions inside the bound that the ISA gives, by this seed; the schedule does not enter, so that results which are noted
    /// as deterministic can be compared bit for bit over schedules. `None` rounds to nearest.
    pub float_noise: Option<u64>,
    /// How the tensor cores of warpgroups add up: in f32, rounded to nearest, or cut off as on the chip, which costs about ten times as much.
    pub accumulation: Accumulation,
    /// What `HostScalar` arguments stand for; each is read in the type of the parameter that takes it.
    pub host_scalars: Vec<HostValue>,
    /// Results are noted to have the same bits each time: two float sums into one place (atomics, or copies that add) have to be ordered, as two writes have.
    pub ordered_sums: bool,
    /// The program's lists of tensors: for each its buffers, which are slots of the memory, each a tensor as a whole.
    pub lists: Vec<Vec<usize>>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            seed: 0,
            async_policy: AsyncPolicy::Random,
            starved: None,
            resident_ctas: 4,
            sms: 4,
            step_budget: 50_000_000,
            float_noise: None,
            accumulation: Accumulation::Full,
            host_scalars: Vec::new(),
            ordered_sums: false,
            lists: Vec::new(),
        }
    }
}

impl Options {
    /// The default with a seed from which the policies follow as well: a schedule for tests that run many.
    pub fn schedule(seed: u64) -> Self {
        let async_policy = match seed % 3 {
            0 => AsyncPolicy::Random,
            1 => AsyncPolicy::Latest,
            _ => AsyncPolicy::Earliest,
        };
        Options { seed, async_policy, resident_ctas: [1, 2, 8][(seed / 3 % 3) as usize], ..Options::default() }
    }

    /// A schedule that looks for trouble: async units are as late as they may be, and one role of every CTA, another for the next seed, is kept
    /// from running while others can.
    pub fn adversarial(seed: u64) -> Self {
        Options { async_policy: AsyncPolicy::Latest, starved: Some(seed as u32), ..Options::schedule(seed) }
    }
}

/// Kernels that were built, verified and decoded, by name: made once, however often they run. May be shared between threads.
#[derive(Default)]
pub struct Kernels {
    decoded: Mutex<HashMap<String, Arc<Decoded>>>,
}

impl Kernels {
    /// Nothing yet.
    pub fn new() -> Self {
        Kernels::default()
    }

    /// Puts in a kernel that was verified elsewhere.
    pub fn insert(&self, body: Arc<Verified<KernelBody>>) {
        let name = body.name.clone();
        let decoded = Arc::new(Decoded::new(body));
        self.decoded.lock().unwrap_or_else(PoisonError::into_inner).insert(name, decoded);
    }

    fn decoded(&self, kernel: &KernelRef) -> Result<Arc<Decoded>, Faults> {
        if let Some(found) = self.decoded.lock().unwrap_or_else(PoisonError::into_inner).get(kernel.name()) {
            return Ok(Arc::clone(found));
        }
        let decoded = Arc::new(Decoded::new(Arc::new(verify(kernel.build())?)));
        self.decoded.lock().unwrap_or_else(PoisonError::into_inner).insert(kernel.name().to_string(), Arc::clone(&decoded));
        Ok(decoded)
    }
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut names: Vec<String> = self.decoded.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect();
        names.sort();
        f.debug_tuple("Kernels").field(&names).finish()
    }
}

/// Runs a program: its kernels are taken from `kernels` or built, verified and put there; buffers are the slots of `memory`; scratch is
/// there for the run and unwritten at its start.
///
/// Errors: what is wrong with the kernels, or with how they are launched, as seen under this schedule.
pub fn run(program: &Program, kernels: &Kernels, memory: &mut Memory, options: &Options) -> Result<Report, Findings> {
    machine::run(program, kernels, memory, options)
}

/// Runs one verified kernel once.
pub fn run_kernel(
    body: Arc<Verified<KernelBody>>,
    grid: [u32; 3],
    args: Vec<Arg>,
    memory: &mut Memory,
    options: &Options,
) -> Result<Report, Findings> {
    let kernels = Kernels::new();
    let name = body.name.clone();
    let built = KernelBody::clone(&body);
    kernels.insert(body);
    let kernel = KernelRef::new(name, move || built.clone());
    let launch = Launch { kernel, grid, residency: Residency::Any, overlap: false, args: args.into() };
    let program = Program { steps: vec![Step::Launch(launch)], ..Program::default() };
    run(&program, &kernels, memory, options)
}
