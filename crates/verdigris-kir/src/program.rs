//! What a chosen engine hands on: launches and a scratch ledger, pure data.
//!
//! A [`Program`] names its kernels by spec and holds the function that builds each, which is called only where no compiled copy is found.
//! It knows nothing of a device: the same program runs on the interpreter and on a GPU.

use crate::execution::{GridFunction, HostValue, TensorList};
use crate::ir::{KernelBody, MapDecl, ParamKind, Ty};
use crate::params::Arguments;
use std::fmt;
use std::sync::Arc;

/// A kernel by name, with the function that builds it. Two references with the same name mean the same kernel.
#[derive(Clone)]
pub struct KernelRef {
    name: String,
    build: Arc<dyn Fn() -> KernelBody + Send + Sync>,
}

impl KernelRef {
    /// A reference to the kernel that `build` makes. The name is the spec's: everything that shapes the code is in it.
    pub fn new(name: impl Into<String>, build: impl Fn() -> KernelBody + Send + Sync + 'static) -> Self {
        KernelRef { name: name.into(), build: Arc::new(build) }
    }

    /// The spec's name: cache key, entry name, and what a profiler shows.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Builds the kernel.
    pub fn build(&self) -> KernelBody {
        (self.build)()
    }
}

impl fmt::Debug for KernelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelRef({})", self.name)
    }
}

/// A piece of workspace that lives for one execution. Its contents are undefined at entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// What it holds.
    pub name: &'static str,
    /// Size.
    pub bytes: u64,
}

/// Where an address points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Base {
    /// A buffer that the caller binds, by slot number.
    Buffer(usize),
    /// A piece of the workspace, by index into [`Program::scratch`].
    Scratch(usize),
    /// A constant, by index into [`Program::constants`].
    Constant(usize),
}

/// An address: a base and a distance from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// What it is relative to.
    pub base: Base,
    /// Distance in bytes.
    pub offset_bytes: u64,
}

impl Address {
    /// The start of a caller's buffer.
    pub fn buffer(slot: usize) -> Self {
        Address { base: Base::Buffer(slot), offset_bytes: 0 }
    }

    /// The start of a piece of workspace.
    pub fn scratch(index: usize) -> Self {
        Address { base: Base::Scratch(index), offset_bytes: 0 }
    }
}

/// What TMA puts where a box reaches past the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Fill {
    /// Zero.
    #[default]
    Zero,
    /// A NaN that multiplies like zero is not offered by every type; this is the map's NaN fill for float types.
    Nan,
}

/// How much of L2 a tensor load brings in at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum L2Promotion {
    /// Nothing beyond what is asked.
    None,
    /// 128 bytes.
    #[default]
    B128,
    /// 256 bytes.
    B256,
}

/// What L2 hands out at once. Loads of lines that begin within a sector take about twice the time of others: on an H100, a product of 704×3552×13104
/// in fp8 took 109.5 µs, with 13120 elements of depth 60.4.
pub const SECTOR_BYTES: u64 = 32;

impl L2Promotion {
    /// What loads of a tensor with such strides between its lines want: 256 bytes, and 128 where lines begin within a sector, whose loads that speeds
    /// up by a seventh (94.2 µs for the 109.5 of [`SECTOR_BYTES`]; others lose up to 2 %).
    pub fn of_lines(strides_bytes: &[u64]) -> L2Promotion {
        if strides_bytes.iter().all(|stride| stride.is_multiple_of(SECTOR_BYTES)) { L2Promotion::B256 } else { L2Promotion::B128 }
    }
}

/// The launch-time part of a tensor map: extents and strides. Together with an address and the kernel's [`MapDecl`] it is a tensor map.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MapSpec {
    /// What the kernel was built for.
    pub decl: MapDecl,
    /// Extents in elements, innermost first (`decl.rank` numbers).
    pub dims: Vec<u64>,
    /// Byte strides of dimensions 1 and up (`decl.rank − 1` numbers); multiples of 16.
    pub strides_bytes: Vec<u64>,
    /// Traversal strides, innermost first (`decl.rank` numbers, 1 unless a convolution is strided).
    pub element_strides: Vec<u32>,
    /// Im2col: signed offset of the first pixel visited, for each spatial dimension, innermost (W) first.
    pub lower_corner: Vec<i32>,
    /// Im2col: signed offset of the last pixel visited from the last pixel of the tensor, likewise.
    pub upper_corner: Vec<i32>,
    /// What stands outside.
    pub fill: Fill,
    /// L2 promotion.
    pub l2: L2Promotion,
}

/// A kernel argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg {
    /// A number, as bits.
    Scalar(Ty, u64),
    /// The constants of a division by this number (1 ≤ d < 2³²).
    Divisor(u32),
    /// A device address.
    Pointer(Address),
    /// A number that the caller gives at execution, in the type of the parameter: an index into its host scalars.
    HostScalar(Ty, usize),
    /// The address of an entry of a list of tensors that the caller gives at execution; 0 where the list is shorter.
    ListAddress {
        /// An index into [`Program::lists`].
        list: usize,
        /// Which of its tensors.
        entry: u32,
    },
    /// The extent of such an entry, in elements (u64); 0 where the list is shorter.
    ListExtent {
        /// An index into [`Program::lists`].
        list: usize,
        /// Which of its tensors.
        entry: u32,
    },
    /// How many entries a list has from `first` on, at most `most` (u32).
    ListCount {
        /// An index into [`Program::lists`].
        list: usize,
        /// The first that counts.
        first: u32,
        /// The most that count.
        most: u32,
    },
    /// A tensor map over memory at an address.
    TensorMap(Address, MapSpec),
}

/// How many of a launch's CTAs are on the chip at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Residency {
    /// Any number, in any order: CTAs do not wait for each other (clusters aside).
    #[default]
    Any,
    /// All of them: CTAs may wait for each other. The launch is cooperative, and refused where they do not fit ([`Launch::check_residency`]).
    All,
}

/// One kernel launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The kernel.
    pub kernel: KernelRef,
    /// CTAs along x, y, z.
    pub grid: [u32; 3],
    /// Whether CTAs wait for each other.
    pub residency: Residency,
    /// May start before the launch in front of it ends, which may be the last of another program; the kernel waits by `griddepcontrol.wait` ahead of
    /// its first access to global memory (programmatic dependent launch).
    pub overlap: bool,
    /// Arguments in the order of the kernel's parameters.
    pub args: Arguments,
}

impl Launch {
    /// CTAs that do not wait for each other, and for the launch in front.
    pub fn new(kernel: KernelRef, grid: [u32; 3], args: Arguments) -> Launch {
        Launch { kernel, grid, residency: Residency::Any, overlap: false, args }
    }

    /// The same, and it may start before the launch in front of it ends ([`Launch::overlap`]).
    #[must_use]
    pub fn overlapping(self) -> Launch {
        Launch { overlap: true, ..self }
    }

    /// The same, with all CTAs on the chip at once ([`Residency::All`]).
    #[must_use]
    pub fn resident(self) -> Launch {
        Launch { residency: Residency::All, ..self }
    }
}

/// One thing to do on the stream.
#[derive(Clone, Debug)]
pub enum Step {
    /// Run a kernel.
    Launch(Launch),
    /// Run a kernel on a grid that is known at execution; the launch has the greatest.
    SizedLaunch(Launch, GridFunction),
    /// Set `bytes` bytes to `value`.
    Fill {
        /// Where.
        at: Address,
        /// How many bytes.
        bytes: u64,
        /// What.
        value: u8,
    },
    /// Copy `bytes` bytes within the device.
    Copy {
        /// Destination.
        to: Address,
        /// Source.
        from: Address,
        /// How many bytes.
        bytes: u64,
    },
}

impl Step {
    /// The launch, if it is one, with the function that gives its grid, if there is one.
    pub fn as_launch(&self) -> Option<(&Launch, Option<&GridFunction>)> {
        match self {
            Step::Launch(launch) => Some((launch, None)),
            Step::SizedLaunch(launch, grid) => Some((launch, Some(grid))),
            Step::Fill { .. } | Step::Copy { .. } => None,
        }
    }
}

/// Launches and a scratch ledger, run in order.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// What to do.
    pub steps: Vec<Step>,
    /// The workspace, piece by piece; each starts at a multiple of 256 bytes.
    pub scratch: Vec<Scratch>,
    /// Bytes that are the same for every execution, put on the device when the plan is made.
    pub constants: Vec<Vec<u8>>,
    /// Alignment in bytes that each buffer slot must have; checked at execution.
    pub buffer_alignment_bytes: Vec<u64>,
    /// Lists of tensors that the caller gives at execution.
    pub lists: Vec<TensorList>,
}

/// The alignment of each scratch piece.
pub const SCRATCH_ALIGNMENT_BYTES: u64 = 256;

impl Program {
    /// Offsets of the scratch pieces in one workspace, and its size: what the caller must lend.
    pub fn workspace(&self) -> (Vec<u64>, u64) {
        let mut at = 0u64;
        let offsets = self
            .scratch
            .iter()
            .map(|piece| {
                let here = at;
                at += piece.bytes.next_multiple_of(SCRATCH_ALIGNMENT_BYTES);
                here
            })
            .collect();
        (offsets, at)
    }

    /// Adds a piece of scratch and returns its address.
    pub fn add_scratch(&mut self, name: &'static str, bytes: u64) -> Address {
        self.scratch.push(Scratch { name, bytes });
        Address::scratch(self.scratch.len() - 1)
    }

    /// Adds a launch. What its kernel relies on of the addresses of buffers becomes what the program asks of their slots.
    pub fn launch(&mut self, launch: Launch) {
        self.relies_on(&launch);
        self.steps.push(Step::Launch(launch));
    }

    /// Adds a launch on a grid that `grid` gives at execution. That of `launch` is the greatest: the program is verified for it, and scratch is as
    /// large as it needs.
    pub fn launch_sized(&mut self, launch: Launch, grid: GridFunction) {
        self.relies_on(&launch);
        self.steps.push(Step::SizedLaunch(launch, grid));
    }

    fn relies_on(&mut self, launch: &Launch) {
        for (slot, offset_bytes, alignment_bytes) in launch.args.buffers() {
            // An address inside of a buffer is as aligned as its start only where the distance is; `Launch::check` refuses others.
            if let Some(asked) = self.buffer_alignment_bytes.get_mut(slot)
                && offset_bytes.is_multiple_of(u64::from(alignment_bytes))
            {
                *asked = (*asked).max(u64::from(alignment_bytes));
            }
        }
    }

    /// Puts another place where the steps name a buffer: what one program leaves in a buffer of the caller's, a larger one keeps in scratch.
    pub fn place_buffer(&mut self, slot: usize, at: Address) {
        self.settle(|address| {
            if address.base == Base::Buffer(slot) {
                *address = Address { offset_bytes: at.offset_bytes + address.offset_bytes, ..at };
            }
        });
    }

    /// Changes each address that the steps name.
    fn settle(&mut self, settle: impl Fn(&mut Address)) {
        for step in &mut self.steps {
            match step {
                Step::Launch(launch) | Step::SizedLaunch(launch, _) => launch.args.addresses_mut().for_each(&settle),
                Step::Fill { at, .. } => settle(at),
                Step::Copy { to, from, .. } => [to, from].into_iter().for_each(&settle),
            }
        }
    }

    /// Makes the pieces of scratch one, as they lie in a workspace that is lent ([`Program::workspace`]).
    fn gather_scratch(&mut self) {
        let (offsets, bytes) = self.workspace();
        if self.scratch.is_empty() {
            return;
        }
        self.settle(|address| {
            if let Base::Scratch(piece) = address.base {
                *address = Address { base: Base::Scratch(0), offset_bytes: offsets[piece] + address.offset_bytes };
            }
        });
        self.scratch = vec![Scratch { name: "workspace", bytes }];
    }

    /// Puts the steps once more behind themselves: an execution that follows another one of the same plan at once, in the same workspace and with the
    /// same constants, which hold what the first one left.
    pub fn repeat(&mut self) {
        self.steps.extend(self.steps.clone());
    }

    /// As [`Program::append`], in one workspace: the scratch of the next program stands where this one's stood and holds what that left, as it is for
    /// two executions that are lent the same memory.
    ///
    /// # Errors
    /// As [`Program::append`].
    pub fn append_in_workspace(&mut self, next: &Program, slots: &[usize]) -> Result<(), String> {
        let mut next = next.clone();
        self.gather_scratch();
        next.gather_scratch();
        self.append(&next, slots)?;
        self.settle(|address| {
            if matches!(address.base, Base::Scratch(_)) {
                address.base = Base::Scratch(0);
            }
        });
        let bytes = self.scratch.iter().map(|piece| piece.bytes).max();
        self.scratch = bytes.map(|bytes| Scratch { name: "workspace", bytes }).into_iter().collect();
        Ok(())
    }

    /// Puts the steps of another program behind these: its buffers and its host scalars of slot `i` are this program's of slot `slots[i]`, its scratch
    /// and its constants stay its own. Where its first launch overlaps, it overlaps the last of this program.
    ///
    /// # Errors
    /// A program whose lists or grids are known at execution: these go by places that are this program's too. A slot that `slots` does not name.
    pub fn append(&mut self, next: &Program, slots: &[usize]) -> Result<(), String> {
        let is_sized = next.steps.iter().any(|step| matches!(step, Step::SizedLaunch(..)));
        if is_sized || !next.lists.is_empty() {
            return Err("a program with lists, or with grids known at execution, goes behind no other".to_owned());
        }
        let slot = |of: usize| slots.get(of).copied().ok_or_else(|| format!("slot {of} of the next program is none of {}", slots.len()));
        let (scratch, constants) = (self.scratch.len(), self.constants.len());
        let settle = |address: &mut Address| {
            address.base = match address.base {
                Base::Buffer(of) => Base::Buffer(slot(of)?),
                Base::Scratch(piece) => Base::Scratch(scratch + piece),
                Base::Constant(constant) => Base::Constant(constants + constant),
            };
            Ok::<(), String>(())
        };
        let mut steps = next.steps.clone();
        for step in &mut steps {
            match step {
                Step::Launch(launch) | Step::SizedLaunch(launch, _) => launch.args.args_mut().try_for_each(|arg| match arg {
                    Arg::Pointer(address) | Arg::TensorMap(address, _) => settle(address),
                    Arg::HostScalar(_, index) => slot(*index).map(|given| *index = given),
                    _ => Ok(()),
                })?,
                Step::Fill { at, .. } => settle(at)?,
                Step::Copy { to, from, .. } => [to, from].into_iter().try_for_each(settle)?,
            }
        }
        for (&asked, &slot) in next.buffer_alignment_bytes.iter().zip(slots) {
            let count = self.buffer_alignment_bytes.len().max(slot + 1);
            self.buffer_alignment_bytes.resize(count, 1);
            self.buffer_alignment_bytes[slot] = self.buffer_alignment_bytes[slot].max(asked);
        }
        self.scratch.extend(next.scratch.iter().cloned());
        self.constants.extend(next.constants.iter().cloned());
        self.steps.extend(steps);
        Ok(())
    }

    /// The host scalars that a kernel takes as integers of 64 bits, each as often as it does.
    pub fn integer_scalars(&self) -> impl Iterator<Item = usize> {
        let args = self.launches().flat_map(|launch| launch.args.iter());
        args.filter_map(|arg| if let Arg::HostScalar(Ty::S64, index) = arg { Some(*index) } else { None })
    }

    /// The launches, in order.
    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        self.steps.iter().filter_map(|step| step.as_launch().map(|(launch, _)| launch))
    }
}

/// A launch whose arguments do not fit its kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The kernel.
    pub kernel: String,
    /// What disagrees.
    pub what: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "launch of {}: {}", self.kernel, self.what)
    }
}

impl std::error::Error for Mismatch {}

impl Launch {
    /// Checks arguments, grid and tensor maps against the kernel.
    pub fn check(&self, body: &KernelBody) -> Result<(), Mismatch> {
        let fail = |what: String| Err(Mismatch { kernel: body.name.clone(), what });
        if self.kernel.name() != body.name {
            return fail(format!("the program names it {}", self.kernel.name()));
        }
        if let Some(why) = self.args.refusal() {
            return fail(why.to_owned());
        }
        for (index, (given, param)) in self.args.names().zip(&body.params).enumerate() {
            if !given.is_empty() && given != param.name {
                return fail(format!("argument {index} is given for {given}, the kernel's parameter is {}", param.name));
            }
        }
        if self.args.len() != body.params.len() {
            return fail(format!("{} arguments given, {} parameters declared", self.args.len(), body.params.len()));
        }
        for (arg, param) in self.args.iter().zip(&body.params) {
            let fits = match (arg, &param.kind) {
                (Arg::Scalar(given, _), ParamKind::Scalar(wanted)) => given.as_bits() == wanted.as_bits(),
                (Arg::HostScalar(given, _), ParamKind::Scalar(wanted)) => given == wanted && HostValue::is_taken_by(*wanted),
                (Arg::ListAddress { .. }, ParamKind::Pointer { .. }) => true,
                (Arg::ListExtent { .. }, ParamKind::Scalar(wanted)) => *wanted == Ty::U64,
                (Arg::ListCount { .. }, ParamKind::Scalar(wanted)) => *wanted == Ty::U32,
                (Arg::Divisor(d), ParamKind::Divisor) => *d > 0,
                (Arg::Pointer(address), ParamKind::Pointer { alignment_bytes, .. }) => {
                    address.offset_bytes.is_multiple_of(u64::from(*alignment_bytes))
                }
                (Arg::TensorMap(_, spec), ParamKind::TensorMap(decl)) => {
                    if !decl.takes(&spec.decl) {
                        return fail(format!("map {} was built for {decl:?}, given {:?}", param.name, spec.decl));
                    }
                    let rank = decl.rank as usize;
                    spec.dims.len() == rank && spec.strides_bytes.len() + 1 == rank && spec.element_strides.len() == rank
                }
                _ => false,
            };
            if !fits {
                return fail(format!("parameter {} is {:?}, argument is {arg:?}", param.name, param.kind));
            }
        }
        let limits = [(1u64 << 31) - 1, 65535, 65535];
        for (axis, (&extent, &limit)) in ["x", "y", "z"].iter().zip(self.grid.iter().zip(&limits)) {
            if extent == 0 || u64::from(extent) > limit {
                return fail(format!("grid {axis} is {extent}, must be 1 to {limit}"));
            }
        }
        if self.overlap {
            let is_given_constants = self.args.addresses().any(|address| matches!(address.base, Base::Constant(_)));
            if let Some(fault) = crate::verify::unwaited(body, is_given_constants) {
                return fail(fault);
            }
        }
        if !self.grid[0].is_multiple_of(body.cluster) {
            return fail(format!("grid x {} is not a multiple of the cluster size {}", self.grid[0], body.cluster));
        }
        Ok(())
    }
}

impl Launch {
    /// Checks that a launch whose CTAs wait for each other ([`Residency::All`]) has room for all of them on a chip of `sms` SMs, which holds `clusters`
    /// clusters of the kernel's size with one CTA an SM.
    ///
    /// # Errors
    /// The numbers: what is asked for, and what the chip surely holds.
    pub fn check_residency(&self, body: &KernelBody, sms: u32, clusters: u32) -> Result<(), Mismatch> {
        let asked = self.grid.iter().map(|&extent| u64::from(extent)).product::<u64>();
        let per_sm = body.ctas_per_sm();
        let held = u64::from(per_sm) * u64::from(clusters) * u64::from(body.cluster);
        if self.residency == Residency::Any || asked <= held {
            return Ok(());
        }
        let KernelBody { threads, min_ctas, cluster, shared_bytes, .. } = body;
        let what = format!(
            "{asked} CTAs wait for each other, and the chip surely holds {held} at once: {sms} SMs ({clusters} clusters of {cluster}) with {per_sm} CTAs each, of {threads} threads whose registers are cut for {min_ctas} CTAs an SM, and of {shared_bytes} bytes of shared memory"
        );
        Err(Mismatch { kernel: body.name.clone(), what })
    }
}

/// Division of any `u32` by a number fixed at launch, without a divide: `t = mulhi(n, multiplier); q = (t + ((n − t) >> shift1)) >> shift2`.
///
/// Source: Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994, figure 4.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divisor {
    /// The divisor.
    pub divisor: u32,
    /// The multiplier.
    pub multiplier: u32,
    /// The first shift: 0 or 1.
    pub shift1: u32,
    /// The second shift.
    pub shift2: u32,
}

impl Divisor {
    /// The constants for a division by `divisor`, which must not be 0.
    pub fn new(divisor: u32) -> Option<Divisor> {
        if divisor == 0 {
            return None;
        }
        let bits = 32 - (divisor - 1).leading_zeros();
        let multiplier = (((1u128 << 32) * ((1u128 << bits) - u128::from(divisor))) / u128::from(divisor) + 1) as u32;
        Some(Divisor { divisor, multiplier, shift1: bits.min(1), shift2: bits.saturating_sub(1) })
    }

    /// The 16 bytes of the parameter: divisor, multiplier, shift 1, shift 2.
    pub fn words(self) -> [u32; 4] {
        [self.divisor, self.multiplier, self.shift1, self.shift2]
    }

    /// The quotient, by the same steps as on the device.
    pub fn quotient(self, n: u32) -> u32 {
        let t = ((u64::from(n) * u64::from(self.multiplier)) >> 32) as u32;
        (t.wrapping_add((n.wrapping_sub(t)) >> self.shift1)) >> self.shift2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_in_one_workspace_have_their_scratch_in_one_place() {
        let filling = |sizes: &[u64]| {
            let mut program = Program::default();
            for &bytes in sizes {
                let at = program.add_scratch("piece", bytes);
                program.steps.push(Step::Fill { at: Address { offset_bytes: 4, ..at }, bytes: bytes - 4, value: 1 });
            }
            program
        };
        let places = |program: &Program| -> Vec<Address> {
            let place = |step: &Step| if let Step::Fill { at, .. } = step { *at } else { unreachable!("it only fills") };
            program.steps.iter().map(place).collect()
        };
        let at = |offset_bytes: u64| Address { base: Base::Scratch(0), offset_bytes };
        let mut program = filling(&[8, 300]);
        program.append_in_workspace(&filling(&[]), &[]).expect("it has no lists");
        program.append_in_workspace(&filling(&[264, 8, 8]), &[]).expect("it has no lists");
        assert_eq!(places(&program), [at(4), at(260), at(4), at(516), at(772)]);
        assert_eq!(program.scratch.iter().map(|piece| piece.bytes).collect::<Vec<_>>(), [1024]);
        program.repeat();
        assert_eq!(places(&program)[5..], [at(4), at(260), at(4), at(516), at(772)]);
        // Beside each other they would have taken the sum.
        let mut beside = filling(&[8, 300]);
        beside.append(&filling(&[264, 8, 8]), &[]).expect("it has no lists");
        assert_eq!(beside.workspace().1, 256 + 512 + 512 + 256 + 256);
    }

    #[test]
    fn divisors_divide_exactly() {
        let interesting = |seed: u32| (0..200u32).map(move |i| seed.wrapping_mul(2654435761).wrapping_add(i.wrapping_mul(0x9E37_79B9)));
        for d in (1..300).chain([1 << 16, (1 << 16) + 1, 0x7FFF_FFFF, 0x8000_0000, u32::MAX - 1, u32::MAX]).chain(interesting(7)) {
            if d == 0 {
                continue;
            }
            let divisor = Divisor::new(d).unwrap();
            for n in [0, 1, d - 1, d, d.wrapping_add(1), u32::MAX, u32::MAX - 1, 0x8000_0000].into_iter().chain(interesting(d)) {
                assert_eq!(divisor.quotient(n), n / d, "{n} / {d}");
            }
        }
        assert_eq!(Divisor::new(0), None);
    }
}
