//! A graph on the interpreter: cut into problems, each computed by engines' programs, with the temporaries passed on.
//!
//! This is how the cases and random graphs of the corpus reach the engines without a device. [`Parts`] knows all the ways that were chosen
//! for each part; a *variant* is one way for each of them.

use std::collections::BTreeMap;

use verdigris_graph::pattern::{self, Partition};
use verdigris_graph::problem::Access;
use verdigris_graph::{Determinism, Error, Graph, Problem, Uid};
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_kir::program::Program;

use crate::arch::Arch;
use crate::engine::{Engine, EngineId, Knobs, Refusal};

/// One engine's way to compute a part.
#[derive(Debug)]
pub struct Way {
    /// Who.
    pub engine: EngineId,
    /// Under which setting.
    pub knobs: Knobs,
    /// What is launched.
    pub program: Program,
}

/// A graph's problems with the ways to compute each.
#[derive(Debug)]
pub struct Parts {
    /// The problems.
    pub partition: Partition,
    /// The ways of each part, in the order of the parts.
    pub ways: Vec<Vec<Way>>,
    /// Who refused which part.
    pub refusals: Vec<(usize, Refusal)>,
}

impl Parts {
    /// Cuts a graph and asks every engine for its default way and one more: of the other settings the one that `rotation` counts to.
    ///
    /// # Errors
    /// A graph that cannot be cut.
    pub fn new(graph: &Graph, arch: &Arch, engines: &[&'static dyn Engine], rotation: usize) -> Result<Parts, Error> {
        let partition = pattern::partition(graph)?;
        let mut refusals = Vec::new();
        let mut ways = Vec::new();
        for (number, part) in partition.parts.iter().enumerate() {
            let mut list = Vec::new();
            for engine in engines {
                match ways_of(*engine, &part.problem, arch, rotation) {
                    Ok(ways) => list.extend(ways),
                    Err(refusal) => refusals.push((number, refusal)),
                }
            }
            ways.push(list);
        }
        Ok(Parts { partition, ways, refusals })
    }

    /// The variants in which every way of every part has its turn; 0 if a part has none.
    pub fn variants(&self) -> usize {
        if self.ways.iter().any(Vec::is_empty) { 0 } else { self.ways.iter().map(Vec::len).max().unwrap_or(1) }
    }

    /// The ways of a variant, one for each part.
    pub fn chosen(&self, variant: usize) -> impl Iterator<Item = &Way> {
        self.ways.iter().filter_map(move |ways| ways.get(variant % ways.len().max(1)))
    }

    /// Runs a variant. `buffers` holds the tensors that the caller binds, inputs and outputs; outputs are left there. Host scalars are
    /// passed as f32.
    ///
    /// # Errors
    /// What the interpreter finds, with the engine and its setting.
    pub fn interpret(
        &self,
        variant: usize,
        buffers: &mut BTreeMap<Uid, Vec<u8>>,
        scalars: &BTreeMap<Uid, f64>,
        kernels: &Kernels,
        options: &Options,
    ) -> Result<(), String> {
        let temporaries: Vec<Uid> = self.partition.temporaries.iter().map(|tensor| tensor.uid).collect();
        for tensor in &self.partition.temporaries {
            // NaN in every floating-point type: what is read before it is written does not pass for a result.
            let bytes = tensor.layout.span_elements() as usize * tensor.dtype.bytes();
            buffers.insert(tensor.uid, vec![0xff; bytes]);
        }
        let result = self.partition.parts.iter().zip(self.chosen(variant)).try_for_each(|(part, way)| {
            let fail = |what: String| format!("{} {}: {what}", way.engine, way.knobs);
            let mut memory = Memory::new();
            for uid in &part.bindings {
                memory.add(buffers.get(uid).map_or(&[][..], Vec::as_slice));
            }
            let scalar = |uid: &Uid| scalars.get(uid).map_or(0, |&value| (value as f32).to_bits());
            let options = Options { host_scalars: part.bindings.iter().map(scalar).collect(), ..options.clone() };
            interp::run(&way.program, kernels, &mut memory, &options).map_err(|findings| fail(findings.to_string()))?;
            let operands = part.problem.buffers().map_err(|error| fail(error.to_string()))?;
            for operand in operands.iter().filter(|operand| operand.access == Access::Written) {
                let slot = operand.slot.0 as usize;
                if let Some(&uid) = part.bindings.get(slot) {
                    buffers.insert(uid, memory.to_vec(slot));
                }
            }
            Ok(())
        });
        buffers.retain(|uid, _| !temporaries.contains(uid));
        result
    }
}

fn ways_of(engine: &'static dyn Engine, problem: &Problem, arch: &Arch, rotation: usize) -> Result<Vec<Way>, Refusal> {
    let candidate = engine.accept(problem, arch)?;
    let space = candidate.knobs();
    let repeats = |knobs: &&Knobs| problem.determinism() == Determinism::Any || candidate.notes(knobs).deterministic;
    let settings: Vec<&Knobs> = space.settings().iter().filter(repeats).collect();
    let Some((&first, others)) = settings.split_first() else {
        return Err(engine.id().refusal(crate::engine::Reason::Determinism, "no setting repeats bit for bit"));
    };
    let other = others.get(rotation % others.len().max(1)).copied();
    let way = |knobs: &Knobs| Ok(Way { engine: engine.id(), knobs: knobs.clone(), program: candidate.program(knobs)? });
    std::iter::once(first).chain(other).map(way).collect()
}
