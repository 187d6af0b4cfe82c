//! A graph on the interpreter: cut into problems, each computed by engines' programs, with the temporaries passed on.
//!
//! This is how the cases and random graphs of the corpus reach the engines without a device. [`Parts`] knows all the configs that were
//! asked for of each part; a [`Variant`] is one config for each of them, and can be run.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use verdigris_graph::pattern::{self, Partition};
use verdigris_graph::problem::{Access, Operand};
use verdigris_graph::{Determinism, Error, Graph, Problem, Uid};
use verdigris_kir::execution::HostValue;
use verdigris_kir::interp::{self, Counters, Kernels, Memory, Options};
use verdigris_kir::program::Program;

use crate::arch::Arch;
use crate::engine::{Engine, EngineId, Knobs, Refusal};

/// Of so many seeds one repeats what it runs.
const REPEATED: u64 = 8;

/// One engine's config for a part.
#[derive(Clone, Debug)]
pub struct PartConfig {
    /// Who.
    pub engine: EngineId,
    /// Which config.
    pub knobs: Knobs,
    /// Whether results have the same bits each time.
    pub deterministic: bool,
    /// What is launched.
    pub program: Program,
}

impl PartConfig {
    /// The names of the kernels that it launches.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.program.launches().map(|launch| launch.kernel.name())
    }
}

/// A graph's problems with the configs for each.
#[derive(Debug)]
pub struct Parts {
    /// The problems.
    pub partition: Partition,
    /// The configs of each part, in the order of the parts; each engine's default comes before its other configs.
    pub configs: Vec<Vec<PartConfig>>,
    /// Who refused which part.
    pub refusals: Vec<(usize, Refusal)>,
}

impl Parts {
    /// Cuts a graph and asks every engine for all its configs.
    ///
    /// # Errors
    /// A graph that cannot be cut.
    pub fn all(graph: &Graph, arch: &Arch, engines: &[&'static dyn Engine]) -> Result<Parts, Error> {
        Parts::with(graph, arch, engines, |configs| configs)
    }

    /// Cuts a graph and asks every engine for its default config and one more: of the others the one that `rotation` counts to.
    ///
    /// # Errors
    /// A graph that cannot be cut.
    pub fn new(graph: &Graph, arch: &Arch, engines: &[&'static dyn Engine], rotation: usize) -> Result<Parts, Error> {
        Parts::with(graph, arch, engines, |mut configs| {
            if let Some(others) = configs.len().checked_sub(1).filter(|&others| others > 0) {
                configs.swap(1, 1 + rotation % others);
            }
            configs.truncate(2);
            configs
        })
    }

    fn with(
        graph: &Graph,
        arch: &Arch,
        engines: &[&'static dyn Engine],
        choose: impl Fn(Vec<Knobs>) -> Vec<Knobs>,
    ) -> Result<Parts, Error> {
        let partition = pattern::partition(graph)?;
        let mut refusals = Vec::new();
        let mut configs = Vec::new();
        for (number, part) in partition.parts.iter().enumerate() {
            let mut list = Vec::new();
            for engine in engines {
                match configs_of(*engine, &part.problem, arch, &choose) {
                    Ok(configs) => list.extend(configs),
                    Err(refusal) => refusals.push((number, refusal)),
                }
            }
            configs.push(list);
        }
        Ok(Parts { partition, configs, refusals })
    }

    /// The variants in which every config of every part has its turn; 0 if a part has none.
    pub fn variants(&self) -> usize {
        if self.configs.iter().any(Vec::is_empty) { 0 } else { self.configs.iter().map(Vec::len).max().unwrap_or(1) }
    }

    /// The configs of a variant, one for each part.
    pub fn chosen(&self, number: usize) -> impl Iterator<Item = &PartConfig> {
        self.configs.iter().filter_map(move |configs| configs.get(number % configs.len().max(1)))
    }

    /// The variant of a number below [`Parts::variants`].
    pub fn variant(&self, number: usize) -> Variant {
        Variant { partition: self.partition.clone(), configs: self.chosen(number).cloned().collect() }
    }

    /// The variant in which each part has its first config, but for one that has its config of that number.
    pub fn variant_with(&self, part: usize, config: usize) -> Variant {
        let chosen = |(number, configs): (usize, &Vec<PartConfig>)| configs.get(if number == part { config } else { 0 }).cloned();
        Variant { partition: self.partition.clone(), configs: self.configs.iter().enumerate().filter_map(chosen).collect() }
    }

    /// Runs the variant of a number: [`Variant::interpret`].
    ///
    /// # Errors
    /// What the interpreter finds, with the engine and its config.
    pub fn interpret(
        &self,
        number: usize,
        buffers: &mut BTreeMap<Uid, Vec<u8>>,
        scalars: &BTreeMap<Uid, f64>,
        kernels: &Kernels,
        options: &Options,
    ) -> Result<Counters, String> {
        self.variant(number).interpret(buffers, scalars, kernels, options)
    }
}

/// A graph's problems with one config for each.
#[derive(Clone, Debug)]
pub struct Variant {
    /// The problems.
    pub partition: Partition,
    /// The config of each.
    pub configs: Vec<PartConfig>,
}

/// Engines with their configs, in the order of the parts.
impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, config) in self.configs.iter().enumerate() {
            write!(f, "{}{} {}", if number == 0 { "" } else { " then " }, config.engine, config.knobs)?;
        }
        Ok(())
    }
}

impl Variant {
    /// The names of the kernels that it launches.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.configs.iter().flat_map(PartConfig::kernels)
    }

    /// Whether the outputs have the same bits each time: those of every part do.
    pub fn is_deterministic(&self) -> bool {
        self.configs.iter().all(|config| config.deterministic)
    }

    /// Runs it and returns what all parts together counted. `buffers` holds the tensors that the caller binds, inputs and outputs; outputs
    /// are left there.
    ///
    /// The parts are one sequence of launches on one memory, as a device runs them: where the first launch of a part overlaps, the last of the part in
    /// front of it may still run. By one seed of eight the whole sequence runs twice, if that leaves the same results: an execution may follow another
    /// one of the same plan at once. Its parts then use one workspace, and the second run finds there, and in constants, what the first one left.
    ///
    /// # Errors
    /// What the interpreter finds, with the engines and their configs.
    pub fn interpret(
        &self,
        buffers: &mut BTreeMap<Uid, Vec<u8>>,
        scalars: &BTreeMap<Uid, f64>,
        kernels: &Kernels,
        options: &Options,
    ) -> Result<Counters, String> {
        let made = self.repeats().and_then(|repeats| self.sequence(options.seed.is_multiple_of(REPEATED) && repeats));
        let options = Options { ordered_sums: options.ordered_sums || self.is_deterministic(), ..options.clone() };
        self.run(made, buffers, scalars, kernels, &options).map_err(|what| format!("{self}: {what}"))
    }

    /// As [`Variant::interpret`], behind another variant of the same graph, which runs first: on the same tensors, and in one workspace, as two plans
    /// that a stream executes. `None` where a part writes what was read before, so that the second finds other inputs.
    ///
    /// # Errors
    /// As [`Variant::interpret`].
    pub fn interpret_behind(
        &self,
        front: &Variant,
        buffers: &mut BTreeMap<Uid, Vec<u8>>,
        scalars: &BTreeMap<Uid, f64>,
        kernels: &Kernels,
        options: &Options,
    ) -> Result<Option<Counters>, String> {
        if !(front.repeats()? && self.repeats()?) {
            return Ok(None);
        }
        let (mut program, mut slots) = (Program::default(), Vec::new());
        let made = [front, self].into_iter().try_for_each(|variant| variant.append_to(&mut program, &mut slots, true));
        let options =
            Options { ordered_sums: options.ordered_sums || front.is_deterministic() && self.is_deterministic(), ..options.clone() };
        let counted = self.run(made.map(|()| (program, slots)), buffers, scalars, kernels, &options);
        counted.map(Some).map_err(|what| format!("{self}, behind {front}: {what}"))
    }

    /// Runs a sequence of launches with the tensor of each slot.
    fn run(
        &self,
        sequence: Result<(Program, Vec<Uid>), String>,
        buffers: &mut BTreeMap<Uid, Vec<u8>>,
        scalars: &BTreeMap<Uid, f64>,
        kernels: &Kernels,
        options: &Options,
    ) -> Result<Counters, String> {
        let temporaries: Vec<Uid> = self.partition.temporaries.iter().map(|tensor| tensor.uid).collect();
        for tensor in &self.partition.temporaries {
            // NaN in every floating-point type: what is read before it is written does not pass for a result.
            let bytes = tensor.layout.span_elements() as usize * tensor.dtype.bytes();
            buffers.insert(tensor.uid, vec![0xff; bytes]);
        }
        let result = sequence.and_then(|(program, slots)| {
            let mut memory = Memory::new();
            for uid in &slots {
                memory.add(buffers.get(uid).map_or(&[][..], Vec::as_slice));
            }
            // What a kernel takes as an integer is given as one.
            let integers: BTreeSet<usize> = program.integer_scalars().collect();
            let scalar = |(index, uid): (usize, &Uid)| {
                let value = scalars.get(uid).copied().unwrap_or(0.0);
                if integers.contains(&index) { HostValue::Signed(value as i64) } else { HostValue::Real(value) }
            };
            let options = Options { host_scalars: slots.iter().enumerate().map(scalar).collect(), ..options.clone() };
            let report = interp::run(&program, kernels, &mut memory, &options).map_err(|findings| findings.to_string())?;
            for (uid, access) in self.accesses()? {
                if access == Access::Written
                    && let Some(slot) = slots.iter().position(|slot| *slot == uid)
                {
                    buffers.insert(uid, memory.to_vec(slot));
                }
            }
            Ok(report.total)
        });
        buffers.retain(|uid, _| !temporaries.contains(uid));
        result
    }

    /// The parts' programs one behind the other, with the tensor of each slot; twice, where that is asked for.
    fn sequence(&self, repeated: bool) -> Result<(Program, Vec<Uid>), String> {
        let (mut program, mut slots) = (Program::default(), Vec::new());
        self.append_to(&mut program, &mut slots, repeated)?;
        if repeated {
            program.repeat();
        }
        Ok((program, slots))
    }

    /// Puts the parts' programs behind another, each with scratch of its own, or all in one workspace.
    fn append_to(&self, program: &mut Program, slots: &mut Vec<Uid>, in_workspace: bool) -> Result<(), String> {
        // As a plan lays them.
        let Partition { parts, temporaries } = &self.partition;
        let first_of = pattern::in_place(parts, temporaries).map_err(|error| error.to_string())?;
        for (part, config) in parts.iter().zip(&self.configs) {
            let slot_of = |uid: &Uid| {
                let uid = first_of.get(uid).copied().unwrap_or(*uid);
                slots.iter().position(|&slot| slot == uid).unwrap_or_else(|| {
                    slots.push(uid);
                    slots.len() - 1
                })
            };
            let places: Vec<usize> = part.bindings.iter().map(slot_of).collect();
            if in_workspace {
                program.append_in_workspace(&config.program, &places)?;
            } else {
                program.append(&config.program, &places)?;
            }
        }
        Ok(())
    }

    /// What the parts read and write, in their order.
    fn accesses(&self) -> Result<Vec<(Uid, Access)>, String> {
        let mut all = Vec::new();
        for part in &self.partition.parts {
            let operands = part.problem.buffers().map_err(|error| error.to_string())?;
            let bound = |operand: &Operand| Some((*part.bindings.get(operand.slot.0 as usize)?, operand.access));
            // A part reads before it writes.
            let (written, read): (Vec<_>, Vec<_>) = operands.iter().filter_map(bound).partition(|(_, access)| *access == Access::Written);
            all.extend(read.into_iter().chain(written));
        }
        Ok(all)
    }

    /// Whether a second run finds what the first one found: nothing is written that was read before.
    fn repeats(&self) -> Result<bool, String> {
        let accesses = self.accesses()?;
        let is_fresh = |(number, &(uid, access)): (usize, &(Uid, Access))| {
            let first = accesses.iter().position(|&(of, _)| of == uid);
            access != Access::Written || first.is_some_and(|first| first == number || accesses[first].1 == Access::Written)
        };
        Ok(accesses.iter().enumerate().all(is_fresh))
    }
}

fn configs_of(
    engine: &'static dyn Engine,
    problem: &Problem,
    arch: &Arch,
    choose: impl Fn(Vec<Knobs>) -> Vec<Knobs>,
) -> Result<Vec<PartConfig>, Refusal> {
    let candidate = engine.accept(problem, arch)?;
    let space = candidate.knobs();
    let repeats =
        |knobs: &&Knobs| problem.determinism() == Determinism::Any || candidate.notes(knobs).is_ok_and(|notes| notes.deterministic);
    let configs = choose(space.configs().iter().filter(repeats).cloned().collect());
    if configs.is_empty() {
        return Err(engine.id().refusal(crate::engine::Reason::Determinism, "no config repeats bit for bit"));
    }
    let config = |knobs: Knobs| {
        let (deterministic, program) = (candidate.notes(&knobs)?.deterministic, candidate.program(&knobs)?);
        Ok(PartConfig { engine: engine.id(), knobs, deterministic, program })
    };
    configs.into_iter().map(config).collect()
}
