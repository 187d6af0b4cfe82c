//! `map.simt`: load, compute, store at each point of a space ([`verdigris_graph::MapProblem`] has the formula).
//!
//! It takes every valid map: all element types, any strides, windows and extents.
//!
//! **Method.** The innermost dim is the one along which the last output's neighbours are neighbours in memory; threads stand along it and
//! take up to 16 bytes at a time, several points each, whose loads all come before the first computation. An input that runs along another
//! dim goes through a tile of 32×32 in shared memory, so that it is read along its own neighbours and used along the output's.
//!
//! **When it wins.** There is no other engine for maps. Copies that interleave a few runs of elements, or deal them out, are an algorithm of their own (`map::interleave`),
//! and so are those that transpose and do nothing else (`map::transpose`).
//!
//! **Numbers.** Functions are good to a few units in the last place, without the fast forms of the special function unit where those lose
//! more. Each point is computed by itself, so results repeat bit for bit.

mod interleave;
mod transpose;

use serde::{Deserialize, Serialize};
use verdigris_graph::{BinaryOp, ChainStep, MapProblem, Problem, UnaryOp};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::Divide;
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use crate::algorithm::{Algorithm, Joined, Listed};
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{Engine, EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::chain::{ChainArgs, ChainSpec, ViewSpec, vectors_fit};
use crate::fuse::operand::Walk;
use crate::fuse::steps::Step;
use crate::fuse::value::{AnyVal, Raw, load_raw};
use crate::layout::space::{Extents, Region, is_apart, traffic_bytes};

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Listed::<Joined<interleave::Interleave, Joined<transpose::Transpose, MapSimt>>>::new()];

const ID: EngineId = EngineId { name: "map.simt", number: 300 };

/// The version of the engine, which is also that of what is rewritten as maps.
pub(crate) const VERSION: u32 = 3;

const THREADS: u32 = 256;
/// Side of a tile.
const SIDE: u32 = 32;
/// Shared memory that tiles of one CTA may take.
const TILE_BYTES: usize = 40 << 10;

/// An accepted problem.
#[derive(Clone, Debug)]
struct MapSimt {
    problem: MapProblem,
    /// The loads that run along another dim than the outputs do, and that dim.
    transposed: Option<(Vec<usize>, usize)>,
    /// CTAs that it takes to have work for nearly all of the chip.
    enough_ctas: u64,
    /// CTAs below which a thread takes one point.
    ctas_for_points: u64,
}

/// One way to do it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Config {
    /// Neighbours that one access takes; 0 goes through tiles.
    vector: u32,
    /// Points of a thread, whose loads all come before the first computation.
    points: u32,
}

impl Algorithm for MapSimt {
    const ID: EngineId = ID;
    const VERSION: u32 = VERSION;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Map(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is map", problem.kind())));
        };
        let target = ChainSpec::of(&problem.chain, &problem.dims, 1).target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        let rank = problem.dims.len();
        Self::ID.require(rank <= verdigris_tensor::MAX_RANK, Reason::Extent, format_args!("{rank} dims, taken are 8"))?;
        // With a quarter of the SMs idle, what runs is as quick as with more and smaller CTAs.
        Ok(MapSimt {
            problem: problem.clone(),
            transposed: transposed(problem),
            enough_ctas: u64::from(arch.sm_count) * 3 / 4,
            // Of 2^20 elements of bf16 four points of 16 bytes a thread, a CTA an SM, took 3.4 to 4.5 us on an H200, one point, four CTAs an SM, 3.0 to 3.7.
            ctas_for_points: u64::from(arch.sm_count) * 7 / 2,
        })
    }

    fn configs(&self) -> Vec<Config> {
        let most = vectors_fit(&self.problem.chain, &self.problem.dims);
        let flat = [8, 4, 2, 1].into_iter().filter(|&vector| vector <= most).flat_map(|vector| {
            let many = points_of(&ChainSpec::of(&self.problem.chain, &self.problem.dims, vector));
            // Fewer points for each thread are more CTAs, which fill the chip's last wave better.
            let counts = if many > 1 { vec![many, 1] } else { vec![1] };
            counts.into_iter().map(move |points| Config { vector, points })
        });
        let mut flat: Vec<Config> = flat.collect();
        // A small problem is done when its slowest thread is: the widest that leave no part of the chip without work, then those of most CTAs.
        flat.sort_by_key(|config| {
            let ctas = self.ctas(config);
            (config.vector == 1, std::cmp::Reverse(ctas.min(self.enough_ctas)), config.points > 1 && ctas < self.ctas_for_points)
        });
        self.transposed.iter().map(|_| Config { vector: 0, points: 1 }).chain(flat).collect()
    }

    fn knobs(config: &Config) -> Knobs {
        Knobs::new([("vector", config.vector), ("points", config.points)])
    }

    fn notes(&self, _: &Config) -> Notes {
        let double = self.problem.chain.dtypes(DType::F32).contains(&DType::F64);
        Notes::of(if double { DType::F64 } else { DType::F32 })
    }

    fn work(&self, &Config { vector, .. }: &Config) -> Work {
        let traffic = if vector == 0 { Traffic::Transposed } else { Traffic::Lines };
        let tiled = |step: usize| vector == 0 && self.transposed.as_ref().is_some_and(|(transposed, _)| transposed.contains(&step));
        let views = self.problem.chain.steps.iter().enumerate().filter_map(|(i, step)| Some((i, step.view()?)));
        let bytes: f64 = views.map(|(i, view)| traffic_bytes(view, &self.problem.dims, is_apart(view) && !tiled(i))).sum();
        let elements: f64 = self.problem.dims.iter().map(|&dim| dim as f64).product();
        // An instruction for each step, with its addresses where these come one by one.
        let accesses = self.problem.chain.steps.len() as f64;
        let issued = elements / 32.0 * accesses * if vector <= 1 { 4.0 } else { 1.0 };
        Work::default().beside([Stream::new(traffic, bytes).issuing(issued)])
    }

    fn lower(&self, &Config { vector, points }: &Config) -> Result<Program, Refusal> {
        let mut program = Program { buffer_alignment_bytes: vec![1; self.problem.slots().len()], ..Program::default() };
        if self.problem.is_empty() {
            return Ok(program);
        }
        let (dims, chain) = (&self.problem.dims, &self.problem.chain);
        let rank = dims.len();
        let mut spec = Spec { chain: ChainSpec::of(chain, dims, vector.max(1)), transposed: Vec::new(), along: 0, points };
        if let (0, Some((transposed, along))) = (vector, &self.transposed) {
            (spec.transposed, spec.along) = (transposed.clone(), *along);
            let extents: Vec<u32> = dims.iter().map(|&dim| dim as u32).collect();
            let [extent_inner, extent_along] = [extents[rank - 1], extents[*along]];
            let [tiles_inner, tiles_along] = [extent_inner, extent_along].map(|extent| extent.div_ceil(SIDE));
            let outer: Vec<u32> = (0..rank - 1).filter(|d| d != along).map(|d| extents[d]).collect();
            let ctas = tiles_inner * tiles_along * outer.iter().product::<u32>();
            let chain = spec.chain.args(chain, &Region { first: vec![0; rank], extents });
            let args = TiledArgs { extent_along, extent_inner, tiles_inner, tiles_along, outer, chain }.bound(&spec);
            program.launch(Launch::new(spec.kernel(), [ctas, 1, 1], args));
            return Ok(program);
        }
        let kernel = spec.clone().kernel();
        for region in Region::all(dims, vector) {
            let points = region.points(vector);
            let mut extents = region.extents.clone();
            if let Some(inner) = extents.last_mut() {
                *inner /= vector;
            }
            let args = FlatArgs { points, extents, chain: spec.chain.args(chain, &region) }.bound(&spec);
            program.launch(Launch::new(kernel.clone(), [points.div_ceil(THREADS * spec.points), 1, 1], args));
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let floats = [DType::F32, DType::F16, DType::Bf16, DType::F64];
        let mut chains = Vec::new();
        let load = |dtype| Step::Load(ViewSpec::plain(dtype));
        let store = |dtype, x| Step::Store(ViewSpec::plain(dtype), x);
        for from in floats {
            for to in floats {
                chains.push(vec![load(from), store(to, 0)]);
            }
            for f in [UnaryOp::Relu, UnaryOp::GeluErf, UnaryOp::GeluTanh, UnaryOp::Silu, UnaryOp::Sigmoid, UnaryOp::Tanh, UnaryOp::Exp] {
                chains.push(vec![load(from), Step::Unary(f, 0), store(from, 1)]);
            }
            for f in [BinaryOp::Add, BinaryOp::Mul, BinaryOp::Sub] {
                chains.push(vec![load(from), load(from), Step::Binary(f, [0, 1]), store(from, 2)]);
            }
        }
        for dtype in [DType::I8, DType::U8, DType::I32, DType::I64] {
            chains.push(vec![load(dtype), store(dtype, 0)]);
        }
        let plain = chains.into_iter().map(|steps| ChainSpec::plain(1, 1, steps));
        let appended = [DType::F32, DType::F16, DType::Bf16].into_iter().flat_map(appends);
        let specs = plain.chain(appended).flat_map(|chain| {
            let widths = chain.steps.iter().filter_map(Step::operand).filter(|(view, _)| chain.paths[view.path as usize] == Walk::Row);
            let narrowest = widths.map(|(view, _)| view.dtype.bytes() as u32).min();
            let widest = (16 / narrowest.unwrap_or(1)).min(8);
            let chain = move |vector| ChainSpec { vector, ..chain.clone() };
            let many = points_of(&chain(widest));
            // Many points where they are many, and narrower ones where wide ones would leave the chip idle.
            let narrower = [4, 2].into_iter().filter(move |&vector| vector < widest).map(|vector| (vector, 1));
            let ways = [(widest, many), (widest, 1)].into_iter().chain(narrower);
            ways.map(move |(vector, points)| Spec { chain: chain(vector), transposed: Vec::new(), along: 0, points })
        });
        specs.filter(|spec| spec.chain.target() <= target).map(Spec::kernel).collect()
    }
}

impl MapSimt {
    /// CTAs of the flat kernel.
    fn ctas(&self, config: &Config) -> u64 {
        let elements = self.problem.dims.iter().fold(1, |all: u64, &dim| all.saturating_mul(dim));
        elements.div_ceil(u64::from(config.vector * config.points * THREADS))
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    chain: ChainSpec,
    /// Loads that go through a tile, as positions in the chain.
    transposed: Vec<usize>,
    /// The dim along which they run.
    along: usize,
    /// Points that a thread of the flat kernel takes.
    points: u32,
}

fn loads_of(chain: &ChainSpec) -> usize {
    chain.steps.iter().filter(|step| matches!(step, Step::Load(_))).count()
}

/// What appends rows to a cache, and to two by one length, as steps of decoding do: one row of each sequence, or several.
fn appends(dtype: DType) -> Vec<ChainSpec> {
    let of = |rank: usize, count: u32| {
        let view = |dtype, path, row| ViewSpec { dtype, path, outside: None, row };
        let append = |first: u32| {
            let (load, length) = (Step::Load(view(dtype, 0, None)), Step::Load(view(DType::I32, 1, None)));
            [load, length, Step::Store(view(dtype, 2, Some(first + 1)), first)]
        };
        let steps = (0..count).flat_map(|nth| append(3 * nth)).collect();
        ChainSpec { rank, vector: 1, narrow: true, paths: vec![Walk::Row, Walk::PerRow, Walk::Row], in_blocks: false, steps }
    };
    [2, 3].into_iter().flat_map(|rank| [of(rank, 1), of(rank, 2)]).collect()
}

/// Points that a thread takes if there is a choice: more where there is little to do for each.
fn points_of(chain: &ChainSpec) -> u32 {
    match (chain.functions(), loads_of(chain)) {
        (0..=4, 0..=2) => 4,
        (0..=8, 0..=4) => 2,
        _ => 1,
    }
}

impl Spec {
    fn name(&self) -> String {
        let transposed: String = self.transposed.iter().map(|step| format!("t{step}")).collect();
        let tile = if self.transposed.is_empty() { String::new() } else { format!("_along{}{transposed}", self.along) };
        let points = if self.transposed.is_empty() { format!("_p{}", self.points) } else { String::new() };
        format!("map_simt{tile}{points}_{}", self.chain.name())
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        // What computes little has few registers to begin with; so that the assembler does not take more of them to overlap the points of a thread.
        let is_light = loads_of(&self.chain) <= 2 && self.chain.functions() <= 2 && !self.chain.is_double();
        let header =
            Header { name: self.name(), target: self.chain.target(), threads: THREADS, min_ctas: if is_light { 4 } else { 1 }, cluster: 1 };
        build(header, |k| if self.transposed.is_empty() { self.flat(k) } else { self.tiled(k) })
    }

    fn flat<'k>(&self, k: Kernel<'k>) {
        let Flat { points, extents, chain } = Flat::declare(k, self);
        let many = self.points;
        let first = k.cta() * (THREADS * many);
        let thread = k.thread();
        let index = |point: Val<'k, u32>| {
            let mut index = extents.index(point);
            if let Some(inner) = index.last_mut() {
                *inner = *inner * self.chain.vector;
            }
            index
        };
        let at = |points: &[Val<'k, u32>]| {
            let all: Vec<_> = points.iter().map(|&point| index(point)).collect();
            let fetched: Vec<_> = all.iter().map(|index| chain.fetch(index)).collect();
            for (index, fetched) in all.iter().zip(&fetched) {
                chain.run(index, fetched, &[]);
            }
        };
        let mine: Vec<Val<'k, u32>> = (0..many).map(|i| first + thread + i * THREADS).collect();
        k.when_else(
            (first + THREADS * many).le(points),
            || at(&mine),
            || {
                for &point in &mine {
                    k.when(point.lt(points), || at(&[point]));
                }
            },
        );
    }

    fn tiled<'k>(&self, k: Kernel<'k>) {
        let Tiled { extent_along, extent_inner, tiles_inner, tiles_along, outer, chain } = Tiled::declare(k, self);
        let (p, q) = (self.along, self.chain.rank - 1);
        let (rest, tile_q) = tiles_inner.split(k.cta());
        let (rest, tile_p) = tiles_along.split(rest);
        let mut base = outer.index(rest);
        // Places for the two dims of a tile.
        base.insert(p, tile_p);
        base.push(tile_q);
        let lane = k.lane();
        let row = k.thread() >> 5;
        let steps = SIDE * SIDE / THREADS;
        let index = |at_p: Val<'k, u32>, at_q: Val<'k, u32>| {
            let mut index = base.clone();
            index[p] = tile_p * SIDE + at_p;
            index[q] = tile_q * SIDE + at_q;
            index
        };
        let tiles: Vec<(usize, u32, Val<'k, u32>)> = (self.transposed.iter())
            .map(|&step| {
                let bytes = match self.chain.steps[step] {
                    Step::Load(view) => (view.dtype.bytes() as u32).max(4),
                    _ => 4,
                };
                (step, bytes, k.shared("tile", SIDE * (SIDE + 1) * bytes, 16).address())
            })
            .collect();
        for i in 0..steps {
            let at_q = row + i * (THREADS / SIDE);
            let index = index(lane, at_q);
            k.when(index[p].lt(extent_along) & index[q].lt(extent_inner), || {
                for &(step, bytes, tile) in &tiles {
                    let Some((dtype, address)) = chain.load_address(step, &index) else { continue };
                    let place = tile + (at_q * (SIDE + 1) + lane) * bytes;
                    match load_raw(k, dtype, address, 1)[0] {
                        Raw::B8(bits) | Raw::B32(bits) => k.st_shared(place, 0, bits),
                        Raw::B16(bits) => k.st_shared(place, 0, bits.convert::<u32>(CvtRound::None)),
                        Raw::B64(bits) => k.st_shared(place, 0, bits),
                    }
                }
            });
        }
        k.bar_sync();
        for i in 0..steps {
            let at_p = row + i * (THREADS / SIDE);
            let index = index(at_p, lane);
            k.when(index[p].lt(extent_along) & index[q].lt(extent_inner), || {
                let mut fetched = chain.fetch_but(&index, &self.transposed);
                for &(step, bytes, tile) in &tiles {
                    let place = tile + (lane * (SIDE + 1) + at_p) * bytes;
                    let Step::Load(ViewSpec { dtype, .. }) = self.chain.steps[step] else { continue };
                    let raw = match dtype.bytes() {
                        1 => Raw::B8(k.ld_shared::<u32>(place, 0)),
                        2 => Raw::B16(k.ld_shared::<u32>(place, 0).low16()),
                        4 => Raw::B32(k.ld_shared::<u32>(place, 0)),
                        _ => Raw::B64(k.ld_shared::<u64>(place, 0)),
                    };
                    fetched[step] = vec![AnyVal::Stored(dtype, raw)];
                }
                chain.run(&index, &fetched, &[]);
            });
        }
    }
}

verdigris_kir::parameters! {
    /// Of the kernel that goes through points.
    struct Flat / FlatArgs of Spec as spec {
        points: u32,
        /// The innermost counts in vectors.
        extents: Extents = spec.chain.rank,
        chain: ChainArgs = spec.chain,
    }
}

verdigris_kir::parameters! {
    /// Of the kernel that goes through tiles.
    struct Tiled / TiledArgs of Spec as spec {
        extent_along: u32,
        extent_inner: u32,
        tiles_inner: Divide,
        tiles_along: Divide,
        /// Of the dims that a tile does not lie along.
        outer: Extents = spec.chain.rank - 2,
        chain: ChainArgs = spec.chain,
    }
}

/// The loads that run along another dim than the outputs do, and that dim.
fn transposed(problem: &MapProblem) -> Option<(Vec<usize>, usize)> {
    let dims = &problem.dims;
    let rank = dims.len();
    if rank < 2 || dims[rank - 1] < 8 || dims.iter().any(|&dim| dim > 1 << 30) {
        return None;
    }
    let across = |strides: &[u64]| {
        let inner = strides[rank - 1];
        (inner > 1).then(|| (0..rank - 1).find(|&d| strides[d] == 1 && dims[d] >= 8)).flatten()
    };
    let candidates: Vec<(usize, usize, usize)> = (problem.chain.steps.iter().enumerate())
        .filter_map(|(i, step)| match step {
            ChainStep::Load { from, window: None } => across(&from.strides).map(|d| (i, d, from.dtype.bytes().max(4))),
            _ => None,
        })
        .collect();
    let along = candidates.first()?.1;
    let mut room = TILE_BYTES;
    let mut transposed = Vec::new();
    for (step, dim, bytes) in candidates {
        let size = (SIDE * (SIDE + 1)) as usize * bytes;
        if dim == along && size <= room {
            room -= size;
            transposed.push(step);
        }
    }
    let outer = (0..rank - 1).filter(|&d| d != along).map(|d| dims[d]).product::<u64>();
    let side = u64::from(SIDE);
    let tiles = outer.saturating_mul(dims[along].div_ceil(side)).saturating_mul(dims[rank - 1].div_ceil(side));
    (tiles < 1 << 31).then_some((transposed, along))
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::{Chain, Slot, View};

    /// Pixel shuffles by two, and their gradients: whole vectors of both tensors.
    #[test]
    fn shuffles_go_by_runs() {
        let best = |dims: &[u64], from: &[u64], to: &[u64]| {
            let view = |slot, strides: &[u64]| View { slot: Slot(slot), dtype: DType::Bf16, offset: 0, strides: strides.to_vec() };
            let load = ChainStep::Load { from: view(0, from), window: None };
            let steps = vec![load, ChainStep::Store { to: view(1, to), x: 0, at: None }];
            let problem = Problem::Map(MapProblem { dims: dims.to_vec(), chain: Chain { steps } });
            ENGINES[0].accept(&problem, &Arch::h200()).expect("is taken").best().to_string()
        };
        // Of 256 images and channels, 128×128 pixels.
        let (plane, width) = (128 * 128, 128);
        let first = [[4 * plane, width, 2 * plane, 1, plane], [4 * plane, 4 * width, 2 * width, 2, 1]];
        assert_eq!(best(&[256, 128, 2, 128, 2], &first[0], &first[1]), "places=4");
        assert_eq!(best(&[256, 128, 2, 128, 2], &first[1], &first[0]), "places=8");
        let last = [[width * 64, 2, 64, 4, 1], [4 * width * 16, 2 * width * 16, 32, 1, 16]];
        let dims = [2048, 2, 128, 16, 2];
        assert_eq!(best(&dims, &last[0], &last[1]), "places=4");
        assert_eq!(best(&dims, &last[1], &last[0]), "places=2");
        // Rows of no whole vectors go by points.
        assert!(best(&[256, 2, 7, 2], &[28, 14, 1, 7], &[28, 14, 2, 1]).starts_with("points="));
    }

    /// The widest accesses, of several points where there are CTAs for the chip all the same; of single elements only where nothing else is left.
    #[test]
    fn small_maps_have_work_for_the_chip() {
        let first = |elements: u64| {
            let view = |slot| View { slot: Slot(slot), dtype: DType::Bf16, offset: 0, strides: vec![1] };
            let load = ChainStep::Load { from: view(0), window: None };
            let steps = vec![load, ChainStep::Unary { f: UnaryOp::Relu, x: 0 }, ChainStep::Store { to: view(1), x: 1, at: None }];
            let problem = Problem::Map(MapProblem { dims: vec![elements], chain: Chain { steps } });
            MapSimt::accept(&problem, &Arch::h200()).expect("is taken").configs()[0]
        };
        for (elements, vector, points) in [(1 << 24, 8, 4), (1 << 18, 8, 1), (128_000, 4, 1), (64_000, 2, 1), (800, 2, 1), (63_999, 1, 1)] {
            assert_eq!(first(elements), Config { vector, points }, "{elements}");
        }
    }
}
