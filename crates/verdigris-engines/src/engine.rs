//! What an engine is: *can* it take a problem, *ought* it to, and the program if it is chosen.
//!
//! `accept` says can, or says why not; `cost` says ought; `program` lowers one config: the chosen one, and those whose workspace and
//! alignments limits are held against. None of them compiles anything.
//!
//! **Slots.** A program's `Base::Buffer(i)` and `HostNumber::Bound(i)` are slot `i` of the problem it was made for
//! ([`verdigris_graph::Slot`]); `buffer_alignment_bytes` has one entry a slot, 1 for host scalars.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::panic::Location;

use serde::{Deserialize, Serialize};
use verdigris_graph::{Problem, Slot};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Program};
use verdigris_tensor::DType;

use crate::arch::Arch;
pub use crate::cost::Cost;
use crate::cost::Work;

/// An engine's name, as plan caches, records and `explain` speak it, and a number for doors that have no strings. Both are chosen once
/// and never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EngineId {
    /// `family.algorithm`, such as `gemm.simt`.
    pub name: &'static str,
    /// The number; hundreds are families.
    pub number: u32,
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// One algorithm for a kind of problem.
pub trait Engine: Sync {
    /// Stable for ever.
    fn id(&self) -> EngineId;

    /// Part of what a measured choice is kept under: one of another version is passed over.
    fn version(&self) -> u32;

    /// Can this engine take the problem on such a machine? A refusal is an answer, not an error.
    ///
    /// # Errors
    /// A [`Refusal`] that names the first requirement not met.
    fn accept(&self, problem: &Problem, arch: &Arch) -> Result<Box<dyn Candidate>, Refusal>;

    /// Every kernel that this engine may launch on chips of `target`, fused chains apart. Extents are arguments, so this is a finite list,
    /// and no shape leads outside of it.
    fn catalog(&self, target: Target) -> Vec<KernelRef>;
}

/// An engine's acceptance of one problem, with all that `accept` worked out.
pub trait Candidate {
    /// Every legal config, the default first. Never empty.
    fn knobs(&self) -> &KnobSpace;

    /// The default of [`Candidate::knobs`], for those who want no other: names of all configs take longer than the estimates.
    fn best(&self) -> Knobs {
        self.knobs().default_config().clone()
    }

    /// The name in [`Candidate::knobs`] of the config that is called so today, or was in an earlier version.
    fn today(&self, knobs: &Knobs) -> Option<Knobs>;

    /// Numerical and behaviour notes under a config of [`Candidate::knobs`].
    ///
    /// # Errors
    /// [`Reason::Knobs`] for a config that is not listed.
    fn notes(&self, knobs: &Knobs) -> Result<Notes, Refusal>;

    /// What a config of [`Candidate::knobs`] asks of the chip, in counts.
    ///
    /// # Errors
    /// [`Reason::Knobs`] for a config that is not listed.
    fn work(&self, knobs: &Knobs) -> Result<Work, Refusal>;

    /// Estimated time under a config of [`Candidate::knobs`]: what the model of the chip makes of its work.
    ///
    /// # Errors
    /// [`Reason::Knobs`] for a config that is not listed.
    fn cost(&self, knobs: &Knobs) -> Result<Cost, Refusal>;

    /// Launches and scratch; the workspace size falls out of them.
    ///
    /// # Errors
    /// [`Reason::Knobs`] for a config that [`Candidate::knobs`] does not list, as a plan cache of another version may hold.
    fn program(&self, knobs: &Knobs) -> Result<Program, Refusal>;
}

/// One config of an engine: its knobs, a value for each name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Knobs(BTreeMap<String, u32>);

impl Knobs {
    /// A config from names and values.
    pub fn new<'a>(values: impl IntoIterator<Item = (&'a str, u32)>) -> Knobs {
        Knobs(values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// The value under a name.
    pub fn value(&self, name: &str) -> Option<u32> {
        self.0.get(name).copied()
    }

    /// Names and values, in order of names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u32)> {
        self.0.iter().map(|(name, &value)| (name.as_str(), value))
    }
}

/// `name=value` with commas between, `default` if there are no knobs.
impl fmt::Display for Knobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("default");
        }
        for (i, (name, value)) in self.iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// All legal configs of one candidate, the default first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KnobSpace(Vec<Knobs>);

impl KnobSpace {
    /// A space of a default and alternatives to it; the default among the alternatives is dropped.
    pub fn new(default: Knobs, alternatives: impl IntoIterator<Item = Knobs>) -> KnobSpace {
        let configs: Vec<Knobs> = [default].into_iter().chain(alternatives).collect();
        // Lists have hundreds.
        let mut seen = HashSet::with_capacity(configs.len());
        let is_first: Vec<bool> = configs.iter().map(|config| seen.insert(config)).collect();
        KnobSpace(configs.into_iter().zip(is_first).filter_map(|(config, is_first)| is_first.then_some(config)).collect())
    }

    /// What the engine would choose.
    pub fn default_config(&self) -> &Knobs {
        &self.0[0]
    }

    /// Every config, the default first.
    pub fn configs(&self) -> &[Knobs] {
        &self.0
    }
}

/// What a result of this candidate is like beyond its values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Notes {
    /// Products are formed by tensor cores.
    pub tensor_core: bool,
    /// The same device and inputs give the same bits.
    pub deterministic: bool,
    /// A type narrower than the operands' own to which they are rounded before they are multiplied.
    pub down_convert: Option<DType>,
    /// What sums are kept in. Tensor cores keep fewer bits of fp8 sums than the name says; see `reduced_sums`.
    pub accumulator: DType,
    /// Sums lose bits against `accumulator` along the way (fp8 summed by the tensor core alone).
    pub reduced_sums: bool,
    /// Operands are split into parts of a narrower type, whose products are added up.
    pub split_operands: bool,
}

impl Notes {
    /// Of exact products without tensor cores, added up in this type, with the same bits each time.
    pub const fn of(accumulator: DType) -> Notes {
        Notes { tensor_core: false, deterministic: true, down_convert: None, accumulator, reduced_sums: false, split_operands: false }
    }
}

/// Why an engine says no. Requirements are asked in about this order, so that of two refusals the one with the later reason got further.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Another kind of problem.
    Problem,
    /// Another direction of a convolution.
    Direction,
    /// An element type.
    DType,
    /// The precision policy.
    Precision,
    /// Strides or orders of an operand.
    Layout,
    /// Alignment of an operand's rows, columns or matrices.
    Alignment,
    /// An extent out of range.
    Extent,
    /// Batch dims.
    Batch,
    /// Operand scale factors.
    Scale,
    /// A step of the epilogue.
    Epilogue,
    /// The chip lacks the instructions.
    Target,
    /// The chip has too little shared memory.
    SharedMemory,
    /// The chip has no room for all CTAs of a launch that wait for each other.
    Residency,
    /// Bitwise repeatability was asked for.
    Determinism,
    /// A config that the candidate does not list.
    Knobs,
    /// More workspace than the caller lends.
    Workspace,
}

impl Reason {
    /// The word in counts and records.
    pub const fn name(self) -> &'static str {
        match self {
            Reason::Problem => "problem",
            Reason::Direction => "direction",
            Reason::DType => "dtype",
            Reason::Precision => "precision",
            Reason::Layout => "layout",
            Reason::Alignment => "alignment",
            Reason::Extent => "extent",
            Reason::Batch => "batch",
            Reason::Scale => "scale",
            Reason::Epilogue => "epilogue",
            Reason::Target => "target",
            Reason::SharedMemory => "shared_memory",
            Reason::Residency => "residency",
            Reason::Determinism => "determinism",
            Reason::Knobs => "knobs",
            Reason::Workspace => "workspace",
        }
    }
}

/// Why an engine does not take a problem: a normal answer, with its reason in full.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// Who refuses.
    pub engine: EngineId,
    /// Why, from the closed list.
    pub reason: Reason,
    /// What was seen, and what would have been taken.
    pub seen: String,
    /// The source file of the requirement.
    pub file: &'static str,
    /// Its line.
    pub line: u32,
}

impl Refusal {
    /// The refusal of an engine of which one algorithm refuses so and another as `other` says: what both saw, under the reason of the one
    /// that got further. An algorithm for another kind of problem or another direction has no say.
    pub fn beside(self, other: Refusal) -> Refusal {
        let (further, nearer) = if other.reason > self.reason { (other, self) } else { (self, other) };
        if nearer.reason <= Reason::Direction || nearer.seen == further.seen {
            return further;
        }
        Refusal { seen: format!("{}; or {}: {}", further.seen, nearer.reason.name(), nearer.seen), ..further }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {} ({}:{})", self.engine, self.reason.name(), self.seen, self.file, self.line)
    }
}

impl std::error::Error for Refusal {}

/// How many buffers and numbers a program for these slots is given.
pub(crate) fn slot_count(slots: &[Slot]) -> usize {
    slots.iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0)
}

/// A program without steps for these slots; its launches say what their addresses must be multiples of.
pub(crate) fn empty_program(slots: &[Slot]) -> Program {
    Program { buffer_alignment_bytes: vec![1; slot_count(slots)], ..Program::default() }
}

impl EngineId {
    /// A refusal that names the caller's line.
    #[track_caller]
    pub fn refusal(self, reason: Reason, seen: impl fmt::Display) -> Refusal {
        let here = Location::caller();
        Refusal { engine: self, reason, seen: seen.to_string(), file: here.file(), line: here.line() }
    }

    /// Goes on where the condition holds, refuses where it does not. `seen` is said in the refusal, which names the caller's line.
    ///
    /// # Errors
    /// The refusal.
    #[track_caller]
    pub fn require(self, condition: bool, reason: Reason, seen: impl fmt::Display) -> Result<(), Refusal> {
        if condition { Ok(()) } else { Err(self.refusal(reason, seen)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: EngineId = EngineId { name: "test.none", number: 0 };

    #[test]
    fn a_refusal_names_the_line_of_the_requirement() {
        let line = line!() + 1;
        let refusal = ID.require(1 > 2, Reason::Extent, format_args!("k = {}", 3)).unwrap_err();
        assert_eq!((refusal.line, refusal.file), (line, file!()));
        assert_eq!(refusal.to_string(), format!("test.none: extent: k = 3 ({}:{line})", file!()));
        assert_eq!(ID.require(2 > 1, Reason::Extent, ""), Ok(()));
    }

    #[test]
    fn of_two_refusals_both_show_but_those_of_other_directions() {
        let [direction, dtype, extent] = [(Reason::Direction, "wgrad"), (Reason::DType, "f64"), (Reason::Extent, "k = 3")]
            .map(|(reason, seen)| ID.refusal(reason, seen));
        assert_eq!(direction.clone().beside(dtype.clone()), dtype);
        assert_eq!(dtype.clone().beside(direction), dtype);
        assert_eq!(extent.clone().beside(extent.clone()), extent);
        for both in [extent.clone().beside(dtype.clone()), dtype.beside(extent.clone())] {
            assert_eq!((both.reason, both.line, both.seen.as_str()), (Reason::Extent, extent.line, "k = 3; or dtype: f64"));
        }
    }

    #[test]
    fn the_default_config_comes_first_and_once() {
        let tile = |value| Knobs::new([("tile", value)]);
        let space = KnobSpace::new(tile(1), [tile(0), tile(1), tile(2)]);
        assert_eq!(space.configs(), [tile(1), tile(0), tile(2)]);
        assert_eq!(space.default_config().to_string(), "tile=1");
        assert_eq!(Knobs::default().to_string(), "default");
    }
}
