//! Copies between elements that lie one behind the other and the same elements in a few runs: pixel shuffles and their gradients, complex numbers and their parts.
//!
//! **What.** One load and one store of one type of two or four bytes: in one of the two tensors, the *dense* one, two or four elements that come from other runs lie side by
//! side, and behind them those of the next place; in the other one the places of a run are neighbours.
//!
//! **Method.** A thread has some neighbouring places: it reads a vector of each run and writes whole vectors of the dense tensor, or the other way round, and changes the order of
//! elements in registers. Where a map takes the elements of the written tensor in order, each of them is a load of its own; here each access takes 4 to 16 bytes.
//!
//! **When it wins.** Wherever it takes the problem: pixel shuffles by two of 16-bit types take 0.75 to 0.87 of the time of a map (one H200; 32-bit types were not timed).
//!
//! **Numbers.** Bits are moved.

use serde::{Deserialize, Serialize};
use verdigris_graph::{ChainStep, MapProblem, Problem, View};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::value::{Raw, load_raw, store_raw};
use crate::layout::space::{Access, Extents, Memory, element, traffic_bytes};

const THREADS: u32 = 256;
/// Groups of places that a thread has, whose loads all come before the first store.
const POINTS: u32 = 2;
/// Dims of the space of places; fewer are extents of 1.
const RANK: usize = 4;
/// Bytes of the dense tensor that a thread reads at a time.
const MOST_READ_BYTES: u64 = 32;
/// And that it writes: one store, so that a warp's are whole sectors of memory. With two, each of half a sector, shuffles took 1.13 to 1.23 times as long as element by element (one H200).
const MOST_WRITTEN_BYTES: u64 = 16;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Interleave {
    problem: MapProblem,
    shape: Shape,
    /// Places that a thread takes together.
    vector: u32,
}

/// What lies dense, and in how many runs the other tensor has it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Shape {
    /// Whether the dense tensor is the written one.
    writes_dense: bool,
    /// Of each run, the distance of its first element from that of the first run.
    runs: Vec<u64>,
    /// The dims of the space of places, the innermost last, and the strides of the dense tensor and of the other one.
    extents: [u64; RANK],
    dense: [u64; RANK],
    apart: [u64; RANK],
}

/// Bytes of the dense tensor that a thread takes at a time.
fn most_bytes(writes_dense: bool) -> u64 {
    if writes_dense { MOST_WRITTEN_BYTES } else { MOST_READ_BYTES }
}

impl Shape {
    /// How `dense` lies to `apart` over these dims, if its elements are those of two or four runs by turns.
    fn of(dims: &[u64], dense: &View, apart: &View, writes_dense: bool) -> Option<Shape> {
        let (mut runs, mut among, mut inner) = (vec![0], Vec::new(), None);
        // Dims in the order in which the dense tensor has them side by side: first those of the runs, then that of the places.
        while let Some(dim) = (0..dims.len()).find(|dim| !among.contains(dim) && dense.strides[*dim] == runs.len() as u64) {
            if apart.strides[dim] == 1 {
                inner = Some(dim);
                break;
            }
            if dims[dim].saturating_mul(runs.len() as u64) > 4 {
                return None;
            }
            runs = (0..dims[dim]).flat_map(|i| runs.iter().map(move |run| run + i * apart.strides[dim])).collect();
            among.push(dim);
        }
        let inner = inner.filter(|_| matches!(runs.len(), 2 | 4))?;
        let outer: Vec<usize> = (0..dims.len()).filter(|dim| !among.contains(dim) && *dim != inner).collect();
        let first = RANK.checked_sub(outer.len() + 1)?;
        let mut shape = Shape { writes_dense, runs, extents: [1; RANK], dense: [0; RANK], apart: [0; RANK] };
        for (at, &dim) in (first..).zip(outer.iter().chain([&inner])) {
            (shape.extents[at], shape.dense[at], shape.apart[at]) = (dims[dim], dense.strides[dim], apart.strides[dim]);
        }
        Some(shape)
    }

    /// The most places that accesses may take together, at least two, or one whose elements are a whole store: all of them are whole and begin at whole ones.
    fn vector(&self, dense: &View, apart: &View) -> Option<u32> {
        let (bytes, runs) = (dense.dtype.bytes() as u64, self.runs.len() as u64);
        let fits = |&vector: &u64| {
            let outer = |strides: &[u64; RANK]| (0..RANK - 1).filter(|&dim| self.extents[dim] > 1).fold(0, |bits, dim| bits | strides[dim]);
            let apart_bits = self.runs.iter().fold(apart.offset | outer(&self.apart) | self.extents[RANK - 1], |bits, run| bits | run);
            let dense_bits = dense.offset | outer(&self.dense);
            let whole = (16 / bytes).min(runs * vector);
            (vector > 1 || (self.writes_dense && runs * bytes == 16))
                && vector * bytes <= 16
                && runs * vector * bytes <= most_bytes(self.writes_dense)
                && apart_bits.is_multiple_of(vector)
                && dense_bits.is_multiple_of(whole)
        };
        [8, 4, 2, 1].into_iter().find(fits).map(|vector| vector as u32)
    }
}

impl Algorithm for Interleave {
    const ID: EngineId = super::ID;
    const VERSION: u32 = 1;
    type Config = u32;

    fn accept(problem: &Problem, _: &Arch) -> Result<Self, Refusal> {
        let Problem::Map(map) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is map", problem.kind())));
        };
        let [ChainStep::Load { from, window: None }, ChainStep::Store { to, x: 0, at: None }] = map.chain.steps.as_slice() else {
            return Err(Self::ID.refusal(Reason::Epilogue, format_args!("{} steps, taken are a load and a store", map.chain.steps.len())));
        };
        let is_taken = from.dtype == to.dtype && matches!(from.dtype.bytes(), 2 | 4);
        Self::ID.require(is_taken, Reason::DType, format_args!("{} to {}, taken is one type of 2 or 4 bytes", from.dtype, to.dtype))?;
        let shapes = [(to, from, true), (from, to, false)];
        let found = shapes.into_iter().find_map(|(dense, apart, writes_dense)| {
            let shape = Shape::of(&map.dims, dense, apart, writes_dense)?;
            Some((shape.vector(dense, apart)?, shape))
        });
        let Some((vector, shape)) = found else {
            return Err(Self::ID.refusal(Reason::Layout, "taken are whole vectors of two or four runs that lie by turns"));
        };
        let points = map.points() / shape.runs.len() as u64;
        Self::ID.require(points < 1 << 31, Reason::Extent, format_args!("{points} places, taken below 2^31"))?;
        Ok(Interleave { problem: map.clone(), shape, vector })
    }

    fn configs(&self) -> Vec<u32> {
        vec![self.vector]
    }

    fn knobs(vector: &u32) -> Knobs {
        Knobs::new([("places", *vector)])
    }

    fn notes(&self, _: &u32) -> Notes {
        Notes::of(DType::F32)
    }

    fn work(&self, &vector: &u32) -> Work {
        let views = self.problem.chain.steps.iter().filter_map(ChainStep::view);
        let bytes: f64 = views.map(|view| traffic_bytes(view, &self.problem.dims, false)).sum();
        let issued = self.problem.points() as f64 / 32.0 * (1.0 + 2.0 / f64::from(vector));
        Work::default().beside([Stream::new(Traffic::Lines, bytes).issuing(issued)])
    }

    fn lower(&self, &vector: &u32) -> Result<Program, Refusal> {
        let mut program = Program { buffer_alignment_bytes: vec![1; self.problem.slots().len()], ..Program::default() };
        if self.problem.is_empty() {
            return Ok(program);
        }
        let shape = &self.shape;
        let views: Vec<&View> = self.problem.chain.steps.iter().filter_map(ChainStep::view).collect();
        let [from, to] = views[..] else { unreachable!("a load and a store") };
        let (dense, apart) = if shape.writes_dense { (to, from) } else { (from, to) };
        let spec = Spec { bytes: from.dtype.bytes() as u32, runs: shape.runs.len() as u32, writes_dense: shape.writes_dense, vector };
        let in_bytes = |elements: &u64| elements * u64::from(spec.bytes);
        let mut extents = shape.extents.map(|extent| extent as u32);
        extents[RANK - 1] /= vector;
        let points = extents.iter().product::<u32>();
        let args = InterleavedArgs {
            points,
            extents: extents.to_vec(),
            dense: element(dense, []),
            dense_strides: shape.dense.each_ref().map(in_bytes),
            apart: element(apart, []),
            apart_strides: shape.apart.each_ref().map(in_bytes),
            runs: shape.runs.iter().map(in_bytes).collect(),
        };
        program.launch(Launch::new(spec.clone().kernel(), [points.div_ceil(THREADS * POINTS), 1, 1], args.bound(&spec)));
        Ok(program)
    }

    fn catalog(_: Target) -> Vec<KernelRef> {
        let mut specs = Vec::new();
        for bytes in [2, 4] {
            for runs in [2, 4] {
                let vector = |writes_dense| (16 / bytes).min(most_bytes(writes_dense) as u32 / (runs * bytes));
                specs.extend([false, true].map(|writes_dense| Spec { bytes, runs, writes_dense, vector: vector(writes_dense) }));
            }
        }
        specs.into_iter().map(Spec::kernel).collect()
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    /// Of an element.
    bytes: u32,
    runs: u32,
    writes_dense: bool,
    /// Places that a thread takes together.
    vector: u32,
}

verdigris_kir::parameters! {
    struct Interleaved / InterleavedArgs of Spec as spec {
        points: u32,
        /// The innermost counts in vectors.
        extents: Extents = RANK,
        dense: Memory = Access { written: spec.writes_dense, bytes: (spec.runs * spec.vector * spec.bytes).min(16) },
        /// In bytes, and so all that follow.
        dense_strides: [u64; RANK],
        apart: Memory = Access { written: !spec.writes_dense, bytes: spec.vector * spec.bytes },
        apart_strides: [u64; RANK],
        runs: Vec<u64> = vec![(); spec.runs as usize],
    }
}

impl Spec {
    fn name(&self) -> String {
        let what = if self.writes_dense { "interleave" } else { "deal" };
        format!("map_{what}{}_v{}_b{}", self.runs, self.vector, 8 * self.bytes)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: Target::Sm80, threads: THREADS, min_ctas: 4, cluster: 1 };
        build(header, |k| self.body(k))
    }

    fn body<'k>(&self, k: Kernel<'k>) {
        let Interleaved { points, extents, dense, dense_strides, apart, apart_strides, runs } = Interleaved::declare(k, self);
        // Bits alone count.
        let dtype = if self.bytes == 2 { DType::Bf16 } else { DType::F32 };
        let (vector, many) = (self.vector, self.runs * self.vector);
        let first = k.cta() * (THREADS * POINTS) + k.thread();
        let places: Vec<(Val<'k, u64>, Val<'k, u64>)> = (0..POINTS)
            .map(|i| {
                let mut index = extents.index(first + i * THREADS);
                index[RANK - 1] = index[RANK - 1] * vector;
                let at = |start: Val<'k, u64>, strides: &[Val<'k, u64>; RANK]| {
                    index.iter().zip(strides).fold(start, |address, (&i, &stride)| address + i.widen() * stride)
                };
                (at(dense.address(), &dense_strides), at(apart.address(), &apart_strides))
            })
            .collect();
        let load = |&(dense, apart): &(Val<'k, u64>, Val<'k, u64>)| -> Vec<Raw<'k>> {
            if self.writes_dense {
                runs.iter().flat_map(|&run| load_raw(k, dtype, apart + run, vector)).collect()
            } else {
                load_raw(k, dtype, dense, many)
            }
        };
        let store = |&(dense, apart): &(Val<'k, u64>, Val<'k, u64>), loaded: &[Raw<'k>]| {
            let [runs_in_all, vector] = [self.runs, vector].map(|count| count as usize);
            if self.writes_dense {
                let by_turns: Vec<Raw<'k>> = (0..many as usize).map(|i| loaded[i % runs_in_all * vector + i / runs_in_all]).collect();
                store_raw(k, dense, &by_turns);
                return;
            }
            for (run, &far) in runs.iter().enumerate() {
                let own: Vec<Raw<'k>> = (0..vector).map(|i| loaded[i * runs_in_all + run]).collect();
                store_raw(k, apart + far, &own);
            }
        };
        let last = first + (POINTS - 1) * THREADS;
        k.when_else(
            last.lt(points),
            || {
                let loaded: Vec<Vec<Raw<'k>>> = places.iter().map(load).collect();
                places.iter().zip(&loaded).for_each(|(place, loaded)| store(place, loaded));
            },
            || {
                for (i, place) in (0..).zip(&places) {
                    k.when((first + i * THREADS).lt(points), || store(place, &load(place)));
                }
            },
        );
    }
}
