//! Resampling by any filter, borders, and their gradients ([`verdigris_graph::ResampleProblem`] has the formulas).
//!
//! It takes all of them: one to three spatial dims, up and down by any factors, both corner rules, any element types and strides, up to 2²³ positions
//! along a dim.
//!
//! **Method.** Taps are a product of one list for each spatial dim, and so are those of the gradient, turned round: which outputs read an element. Where
//! each list begins, its elements and weights are tables of the host's, constants of the program, so that coordinates are rounded as the op says, and
//! one kernel serves all filters in both directions; nothing is added atomically. Channels-last, a thread has one output and 16 bytes of channels, and
//! goes through its lists, up to two rows by four columns at a time, all on their way before the first is used; the lanes of a warp read the same entries of
//! the tables. Channels-first, a thread has neighbouring outputs of a row, up to 16 bytes of them, keeps where they read in registers, and goes through
//! several channels with them; that takes lists of at most four elements. What reads one element of the weight 1, nearest and borders, moves bits.
//!
//! **When it wins.** Wherever [`super::upsample`] does not take the problem.
//!
//! **Numbers.** Sums in f32 (f64), in the order of the lists, by multiply-adds; results repeat bit for bit.

mod kernel;
mod tables;

use serde::{Deserialize, Serialize};
use verdigris_graph::{Problem, ResampleProblem, Taps, View};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::fuse::strided;
use crate::layout::space::Region;

use super::{CHANNELS_FIRST, CHANNELS_LAST, channels_last, is_last};
use kernel::ResampleArgs;
use tables::{Along, TableArgs};

const THREADS: u32 = 256;
/// Positions along a dim that a table may have: its constants take up to 200 MB.
const POSITIONS: u64 = 1 << 23;
/// Elements that a thread of [`Walk::Outputs`] keeps places and weights of.
const KEPT: u64 = 16;
/// Threads beyond which one takes several channels: about two waves of an H200.
const ENOUGH_THREADS: u64 = 1 << 19;

/// What a thread has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Walk {
    /// One output, neighbouring channels.
    Channels,
    /// Neighbouring outputs of a row, several channels.
    Outputs,
    /// Neighbouring outputs of a plane, whose rows are no whole vectors, several channels. Each reads one element.
    Plane,
}

/// One way to share a problem out among threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Way {
    walk: Walk,
    /// Neighbouring channels, or outputs, that a thread has.
    vector: u32,
    /// Channels that a thread of [`Walk::Outputs`] or [`Walk::Plane`] goes through.
    group: u32,
}

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Gather {
    problem: ResampleProblem,
    /// The configs.
    ways: Vec<Way>,
    /// How a thread of one output goes through each dim, and one of several.
    along: [[Along; 3]; 2],
    /// The most elements that an output reads.
    most: u64,
}

impl Algorithm for Gather {
    const ID: EngineId = super::ID;
    const VERSION: u32 = 2;

    type Config = Way;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Resample(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is resample", problem.kind())));
        };
        for (i, taps) in problem.taps.iter().enumerate() {
            let positions = problem.extents[i].max(problem.out[i]);
            let is_taken = *taps == Taps::Same || positions <= POSITIONS;
            Self::ID.require(is_taken, Reason::Extent, format_args!("{positions} positions along a dim, taken up to 2^23"))?;
        }
        let target = compute::target_of_all([problem.from.dtype, problem.to.dtype]);
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        let all = |most: [u32; 3]| [0, 1, 2].map(|axis| Along::of(problem, axis, most[axis]));
        let (channels, outputs) = (all([1, 2, 4]), all([4; 3]));
        let most = outputs.iter().map(|(_, longest)| longest).product();
        let along = [channels, outputs].map(|along| along.map(|(along, _)| along));
        Ok(Gather { problem: problem.clone(), ways: ways_of(problem, outputs), along, most })
    }

    fn configs(&self) -> Vec<Way> {
        self.ways.clone()
    }

    fn knobs(&Way { walk, vector, group }: &Way) -> Knobs {
        Knobs::new([("group", group), ("outputs", walk as u32), ("vector", vector)])
    }

    fn notes(&self, _: &Way) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, &Way { walk, vector, group }: &Way) -> Work {
        let bytes: f64 = (self.problem.operands().into_iter())
            .map(|(_, view, dims, _)| dims.iter().map(|&dim| dim as f64).product::<f64>() * view.dtype.bytes() as f64)
            .sum();
        let results: f64 = self.problem.to_dims().iter().map(|&dim| dim as f64).product();
        // Of each tap a multiply-add with the conversion, and its address, which a vector of channels has once; some more for each thread, or for its
        // share in one that goes through several channels.
        let threads = results / f64::from(vector) / f64::from(group);
        let addresses = match walk {
            Walk::Channels => 20.0 / f64::from(vector),
            Walk::Outputs | Walk::Plane => 4.0,
        };
        let issued = (results * self.most as f64 * (3.0 + addresses) + threads * 60.0) / 32.0;
        let ctas = (threads / f64::from(THREADS)).ceil();
        Work::default().beside([Stream::new(Traffic::Lines, bytes).issuing(issued).of_ctas(ctas)])
    }

    fn lower(&self, &Way { walk, vector, group }: &Way) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, self.spec(walk, vector));
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let tables: Vec<TableArgs> =
            spec.along.iter().enumerate().map(|(axis, &along)| TableArgs::new(p, axis, along, spec.double, &mut program)).collect();
        let dims = p.to_dims();
        let mut space = spec.order().map(|dim| dims[dim]);
        if walk != Walk::Channels {
            space[1] = dims[1].div_ceil(u64::from(group));
        }
        if walk == Walk::Plane {
            space = [space[0], space[1], 1, 1, dims[2..].iter().product()];
        }
        let kernel = spec.clone().kernel();
        for region in Region::all(&space, vector) {
            let mut first = [0; 5];
            spec.order().iter().zip(&region.first).for_each(|(&dim, &at)| first[dim] = at);
            let points = region.points(vector);
            let mut extents = region.extents;
            if let Some(inner) = extents.last_mut() {
                *inner /= vector;
            }
            let mut spatial = [first[2], first[3], first[4]].map(|first| first as u32);
            let (operands, group, channels) = match walk {
                Walk::Channels if vector > 1 => {
                    let argument = |view: &View| strided::lines_argument(&channels_last(view), &[first[0], 0, 0, 0, first[1]]);
                    ([&p.from, &p.to].map(argument).into(), None, None)
                }
                Walk::Channels => ([&p.from, &p.to].map(|view| strided::argument(view, &first[..2])).into(), None, None),
                Walk::Outputs | Walk::Plane => {
                    spatial[2] /= vector;
                    let lead = [first[0], first[1] * u64::from(group)];
                    let operands = vec![strided::argument(&p.from, &lead), strided::lines_argument(&p.to, &lead)];
                    (operands, Some(group), Some((dims[1] - lead[1]) as u32))
                }
            };
            let plane = (walk == Walk::Plane).then(|| dims[2..].iter().map(|&dim| dim as u32).collect());
            let args = ResampleArgs { points, extents, first: spatial, group, channels, plane, tables: tables.clone(), operands };
            program.launch(Launch::new(kernel.clone(), [points.div_ceil(spec.threads()), 1, 1], args.bound(&spec)));
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let few = |together, full| Along::Few { together, full };
        let even = |length, together| Along::Even { length, together };
        let (same, one) = (Along::Same, Along::One);
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let full = 16 / dtype.bytes() as u32;
            let mut put = |walk, along: [Along; 3], vector| {
                let moved = along.iter().all(|along| along.is_single());
                specs.push(Spec { double: false, types: [dtype; 2], along, moved, last: walk == Walk::Channels, walk, vector });
            };
            // Nearest and borders; linear up and its gradient; cubic up. Images alone: other ranks are made when they are asked for.
            put(Walk::Channels, [same, one, one], full);
            put(Walk::Outputs, [same, one, one], full);
            for vector in [2, 4, 8].into_iter().filter(|vector| *vector <= full) {
                put(Walk::Plane, [same, one, one], vector);
            }
            put(Walk::Channels, [same, even(2, 2), even(2, 2)], full);
            put(Walk::Outputs, [same, even(2, 2), even(2, 2)], 4);
            if dtype == DType::F32 {
                put(Walk::Channels, [same, few(2, false), few(2, false)], full);
                put(Walk::Channels, [same, few(2, false), few(4, false)], full);
                put(Walk::Outputs, [same, few(2, false), few(2, false)], 4);
                put(Walk::Outputs, [same, few(4, false), few(4, false)], 1);
            } else {
                put(Walk::Channels, [same, even(4, 2), even(4, 4)], full);
                put(Walk::Outputs, [same, even(4, 4), even(4, 4)], 1);
            }
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

impl Gather {
    fn spec(&self, walk: Walk, vector: u32) -> Spec {
        let p = &self.problem;
        Spec {
            double: p.compute == DType::F64,
            types: [p.from.dtype, p.to.dtype],
            along: self.along[usize::from(walk != Walk::Channels)],
            moved: p.moves(),
            last: walk == Walk::Channels && is_last(p),
            walk,
            vector,
        }
    }
}

/// Channels of a thread whose elements are on their way together, where each of its `vector` outputs reads one: sixteen elements. A power of two.
fn ahead(vector: u32) -> u32 {
    (16 / vector).clamp(1, 8)
}

/// How many neighbouring outputs of a plane, whatever its rows, an access may take: 1 where rows do not follow each other without gaps.
fn neighbours_of_plane(p: &ResampleProblem) -> u32 {
    let dims = p.to_dims();
    let (strides, mut packed) = (&p.to.strides, 1);
    for dim in (2..5).rev() {
        if dims[dim] > 1 && strides[dim] != packed {
            return 1;
        }
        packed *= dims[dim];
    }
    let plane = View { strides: vec![strides[0], strides[1], 1], ..p.to.clone() };
    if packed < 1 << 31 { strided::neighbours_of(&plane, &[dims[0], dims[1], packed]) } else { 1 }
}

/// What a thread may have; `outputs` are the lists that one of several outputs keeps.
fn ways_of(p: &ResampleProblem, outputs: [(Along, u64); 3]) -> Vec<Way> {
    let widest = p.from.dtype.bytes().max(p.to.dtype.bytes()) as u32;
    let mut ways = Vec::new();
    if is_last(p) {
        let fit = |(_, view, dims, _): (&str, &View, [u64; 5], bool)| {
            strided::neighbours_of(&channels_last(view), &CHANNELS_LAST.map(|dim| dims[dim])).min(16 / widest)
        };
        let vector = p.operands().map(fit).into_iter().min().unwrap_or(1);
        ways.extend((vector > 1).then_some(Way { walk: Walk::Channels, vector, group: 1 }));
    } else if p.to.strides[4] <= 1 && outputs.iter().all(|(_, longest)| *longest <= 4) {
        let taps: u64 = outputs.iter().map(|(_, longest)| longest).product();
        let most = strided::neighbours_of(&p.to, &p.to_dims()).min(16 / p.to.dtype.bytes() as u32);
        // Places and weights of all outputs stay in registers.
        let fits = |vector: &u32| u64::from(*vector) * taps <= KEPT;
        let vectors = |most: u32| [16, 8, 4, 2, 1].into_iter().filter(move |vector| *vector <= most).filter(fits);
        let is_single = outputs.iter().all(|(along, _)| along.is_single());
        let of_planes = if is_single { neighbours_of_plane(p).min(16 / p.to.dtype.bytes() as u32) } else { 1 };
        // Of planes, what rows have none of.
        let planes = vectors(of_planes).filter(|vector| *vector > most).map(|vector| (Walk::Plane, vector));
        for (walk, vector) in planes.chain(vectors(most).map(|vector| (Walk::Outputs, vector))) {
            let threads = p.to_dims().iter().product::<u64>() / u64::from(vector);
            let together = u64::from(ahead(vector));
            // As many as leave the chip enough threads, and some others. Of single elements those that are on their way together, twice if there are threads enough even then.
            let (usual, others) = match threads / ENOUGH_THREADS {
                waves if !is_single => (1 << waves.clamp(1, 16).ilog2(), 4),
                waves if waves >= 2 * together => (2 * together, together),
                waves if 4 * waves >= together => (together, together),
                _ => (1, together),
            };
            let mut groups: Vec<u32> = Vec::new();
            for group in [usual, 1, others] {
                let group = (p.c.clamp(1, group)) as u32;
                if !groups.contains(&group) {
                    groups.push(group);
                }
            }
            ways.extend(groups.into_iter().map(|group| Way { walk, vector, group }));
        }
    }
    ways.push(Way { walk: Walk::Channels, vector: 1, group: 1 });
    ways
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    double: bool,
    /// Element types of what is read and what is written.
    types: [DType; 2],
    along: [Along; 3],
    /// Each output is the bits of an element.
    moved: bool,
    /// Threads run through the channels first.
    last: bool,
    walk: Walk,
    /// Neighbouring channels, or outputs, that a thread has.
    vector: u32,
}

impl Spec {
    /// The dims `[n, c, depth, height, width]` from the slowest to the fastest that threads run through.
    fn order(&self) -> [usize; 5] {
        if self.last { CHANNELS_LAST } else { CHANNELS_FIRST }
    }

    /// Whether each output reads one element, with the weight 1.
    fn is_single(&self) -> bool {
        self.along.iter().all(|along| along.is_single())
    }

    /// Threads of a CTA: few where each keeps what is on its way in many channels, so that registers are used up.
    fn threads(&self) -> u32 {
        if self.is_single() && self.walk != Walk::Channels { THREADS / 2 } else { THREADS }
    }

    fn name(&self) -> String {
        let [from, to] = self.types.map(|dtype| dtype.name());
        let walk = match (self.walk, self.last) {
            (Walk::Outputs, _) => "outputs",
            (Walk::Plane, _) => "plane",
            (Walk::Channels, true) => "channels_last",
            (Walk::Channels, false) => "channels",
        };
        let values = if self.moved {
            "_moved"
        } else if self.double {
            "_f64"
        } else {
            ""
        };
        format!("resample_{walk}{values}_{}_v{}_{from}_{to}", kernel::words(self.along), self.vector)
    }

    fn target(&self) -> Target {
        compute::target_of_all(self.types)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: self.threads(), min_ctas: 1, cluster: 1 };
        build(header, |k| if self.double { kernel::build::<f64>(self, k) } else { kernel::build::<f32>(self, k) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accept(words: &str) -> Result<Gather, Refusal> {
        let problem: Problem = words.parse().expect("a problem in words");
        Gather::accept(&problem, &Arch::virtual_device(4))
    }

    fn ways(words: &str) -> Vec<(Walk, u32, u32)> {
        accept(words).expect("is taken").ways.iter().map(|way| (way.walk, way.vector, way.group)).collect()
    }

    #[test]
    fn vectors_are_of_channels_or_of_outputs_as_what_is_written_lies() {
        use Walk::{Channels, Outputs};
        let twice = "n=2 c=8 extents=1x6x8 out=1x12x16 height=linear/0.5 width=linear/0.5";
        assert_eq!(ways(&format!("resample forward bf16 {twice} x=nhwc y=nhwc")), [(Channels, 8, 1), (Channels, 1, 1)]);
        let four = [(Outputs, 4, 1), (Outputs, 4, 4), (Outputs, 2, 1), (Outputs, 2, 4), (Outputs, 1, 1), (Outputs, 1, 4), (Channels, 1, 1)];
        assert_eq!(ways(&format!("resample forward bf16 {twice} x=nchw y=nchw")), four, "four taps for each of four outputs");
        let nearest = "resample forward bf16 n=1 c=1 extents=1x6x8 out=1x12x16 height=nearest/0.5 width=nearest/0.5 x=nchw y=nchw";
        assert_eq!(ways(nearest)[0], (Outputs, 8, 1), "16 bytes");
        // Lists of the gradient of four outputs an element are longer than a thread keeps.
        let long = "resample backward f32 n=1 c=2 extents=1x1x4 out=1x1x16 width=linear/0.25 dy=nchw dx=nchw";
        assert_eq!(ways(long), [(Channels, 1, 1)]);
        // Many planes leave threads for groups.
        let many = "resample forward bf16 n=64 c=256 extents=1x64x64 out=1x128x128 height=nearest/0.5 width=nearest/0.5 x=nchw y=nchw";
        assert_eq!(ways(many)[0], (Outputs, 8, 4));
    }

    #[test]
    fn planes_are_whole_vectors_where_rows_are_none() {
        let first = |extents: &str, out: &str, layout: &str| {
            let words = format!(
                "resample forward bf16 n=16 c=64 extents=1x{extents} out=1x{out} height=reflect/1 width=reflect/1 x=nchw y={layout}"
            );
            ways(&words)[0]
        };
        assert_eq!(first("128x128", "130x130", "nchw"), (Walk::Plane, 4, 8));
        assert_eq!(first("20x113", "22x115", "nchw"), (Walk::Plane, 2, 8));
        assert_eq!(first("126x126", "128x128", "nchw"), (Walk::Outputs, 8, 4));
        assert_eq!(first("19x113", "21x115", "nchw"), (Walk::Outputs, 1, 8));
    }

    #[test]
    fn tables_beyond_their_size_are_refused() {
        let at =
            |extent: u64| accept(&format!("resample forward f32 n=1 c=1 extents=1x1x1 out=1x1x{extent} width=replicate/0 x=nchw y=nchw"));
        let refusal = at(POSITIONS + 1).expect_err("too many positions");
        assert_eq!((refusal.reason, refusal.seen.as_str()), (Reason::Extent, "8388609 positions along a dim, taken up to 2^23"));
        assert!(at(1 << 12).is_ok());
    }
}
