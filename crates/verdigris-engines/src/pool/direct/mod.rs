//! `pool.direct`: max and average pooling and their gradients ([`verdigris_graph::PoolProblem`] has the formulas).
//!
//! It takes all of them: one to three spatial dims, sliding, adaptive and fractional windows, dilation, padding, indices, any element types and strides.
//!
//! **Method.** A thread for each element of what is written, threads along its innermost dim: channels of a channels-last tensor, of which a thread takes
//! 16 bytes, pixels of a channels-first one. It goes through its window (forward), or through the windows that hold its element (backward), so that nothing
//! is added atomically. Rows and columns are visited in blocks of up to 3×3 (backward 2×2), all of which are on their way before the first is used; places
//! of a block that its window does not have are others of the window again. Overlapping windows meet in L1; those that begin one element after the other also in
//! a thread, which takes two of them row by row and what they share once. Maxima of 16-bit floats are found two at a time and never widened, where nobody asks
//! for their places. A thread of fractional windows reads the samples of its plane and works out where its own window begins; gradients, which have no samples, look through the
//! windows that may hold their element by any, for those whose index names it. Averages go row by row too: sums are wide, and a whole window on its way beside them leaves registers for a third of the warps.
//!
//! **When it wins.** Everywhere but where windows are as large as the image: those are reductions, which `pool.reduction` takes, and their averages' gradients are maps (`pool.map`).
//!
//! **Numbers.** Means and gradients are summed in f32 (f64), row by row; results repeat bit for bit.

mod kernel;
mod windows;

use serde::{Deserialize, Serialize};
use verdigris_graph::{PoolMode, PoolPass, PoolProblem, Problem, View, Windows};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::fuse::strided::{self, Packed};
use crate::layout::space::Region;

use kernel::PoolArgs;
use windows::{Axis, Form};

const THREADS: u32 = 256;
/// Beyond it, positions within windows would not count in 31 bits.
const LIMIT: u64 = 1 << 30;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Direct {
    problem: PoolProblem,
    /// The most neighbouring channels that a thread may take.
    vector: u32,
}

impl Algorithm for Direct {
    const ID: EngineId = EngineId { name: "pool.direct", number: 600 };
    const VERSION: u32 = 4;

    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Pool(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is pool", problem.kind())));
        };
        for i in 0..3 {
            let (extent, out) = (problem.extents[i], problem.out[i]);
            let reach = match problem.windows[i] {
                Windows::Sliding { taps, stride, dilation, pad_before } => {
                    (taps.saturating_mul(dilation)).saturating_add(out.saturating_mul(stride)).saturating_add(pad_before)
                }
                Windows::Adaptive => extent.saturating_mul(out),
                // A gradient multiplies the element behind its own but one.
                Windows::Fractional { .. } => extent.saturating_add(2).saturating_mul(out),
            };
            let largest = extent.max(out).max(reach);
            Self::ID.require(
                largest < LIMIT,
                Reason::Extent,
                format_args!("windows that reach {largest} elements far, taken below 2^30"),
            )?;
        }
        let spec = Spec::of(problem, Config::ONE);
        // Positions of a plane, and elements of a window, are numbers of 32 bits.
        let numbered = matches!(spec.kind, Kind::Max { index: true } | Kind::MaxBackward { .. });
        let positions = problem.extents.iter().fold(1u64, |all, &extent| all.saturating_mul(extent));
        Self::ID.require(
            !numbered || positions < 1 << 31,
            Reason::Extent,
            format_args!("places of maxima in planes of {positions} elements, taken below 2^31"),
        )?;
        let most = |axis: usize| match problem.windows[axis] {
            Windows::Sliding { taps, .. } | Windows::Fractional { taps } => taps,
            Windows::Adaptive => (problem.extents[axis].div_ceil(problem.out[axis].max(1)) + 1).min(problem.extents[axis]),
        };
        let elements = (0..3).fold(1u64, |all, axis| all.saturating_mul(most(axis)));
        Self::ID.require(
            !spec.kind.is_mean() || elements < 1 << 31,
            Reason::Extent,
            format_args!("means of windows of {elements} elements, taken below 2^31"),
        )?;
        let target = spec.target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(Direct { problem: problem.clone(), vector: vector_of(problem) })
    }

    fn configs(&self) -> Vec<Config> {
        let alone = Config { vector: self.vector, windows: 1 };
        let pair = Some(Config { windows: PAIR, ..alone }).filter(|&config| Pair::of(&self.problem, config).is_some());
        let mut configs: Vec<Config> = pair.into_iter().chain([alone]).collect();
        if self.vector > 1 {
            configs.push(Config::ONE);
        }
        configs
    }

    fn knobs(config: &Config) -> Knobs {
        // Configs of one window are called what they were before there were pairs.
        let windows = (config.windows > 1).then_some(("windows", config.windows));
        Knobs::new([("vector", config.vector)].into_iter().chain(windows))
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, config: &Config) -> Work {
        let (p, spec) = (&self.problem, Spec::of(&self.problem, *config));
        let vector = f64::from(config.vector);
        let bytes: f64 = (p.operands().into_iter())
            .map(|(_, view, dims, _)| dims.iter().map(|&dim| dim as f64).product::<f64>() * view.dtype.bytes() as f64)
            .sum();
        // Of each tap some instructions for the element, and some for its address, which a vector has once; some more for each thread. Two windows have what they
        // share once.
        let results: f64 = written(p).1.iter().map(|&dim| dim as f64).product();
        let of_element = if spec.kind == (Kind::Max { index: false }) && spec.is_packed() { 0.5 } else { 4.0 };
        let addresses = 10.0 / vector;
        let windows = f64::from(config.windows);
        let shared = spec.pair.map_or(1.0, |pair| f64::from(pair.columns()) / (windows * f64::from(pair.taps)));
        let issued = (p.flops() * shared * (of_element + addresses) + results / windows * 10.0 * addresses) / 32.0;
        let ctas = (results / (vector * windows * f64::from(THREADS))).ceil();
        Work::default().beside([Stream::new(Traffic::Lines, bytes).issuing(issued).of_ctas(ctas)])
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, Spec::of(&self.problem, *config));
        let Config { vector, windows } = *config;
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let (_, mut dims) = written(p);
        dims[4] = dims[4].div_ceil(u64::from(windows));
        let kernel = spec.clone().kernel();
        for region in Region::all(&spec.order.map(|dim| dims[dim]), vector) {
            let mut first = [0; 5];
            spec.order.iter().zip(&region.first).for_each(|(&dim, &at)| first[dim] = at);
            first[4] *= u64::from(windows);
            let points = region.points(vector);
            let mut extents = region.extents;
            if let Some(inner) = extents.last_mut() {
                *inner /= vector;
            }
            let argument = |view: &View| match vector {
                1 => strided::argument(view, &first[..2]),
                _ => strided::lines_argument(&channels_last(view), &[first[0], 0, 0, 0, first[1]]),
            };
            let args = PoolArgs {
                points,
                extents,
                first: [first[2], first[3], first[4]].map(|first| first as u32),
                axes: (0..3).map(|i| Axis::args(p.extents[i] as u32, p.out[i] as u32, &p.windows[i])).collect(),
                operands: p.operands().into_iter().map(|(_, view, ..)| argument(view)).collect(),
            };
            program.launch(Launch::new(kernel.clone(), [points.div_ceil(THREADS), 1, 1], args.bound(&spec)));
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let last = (CHANNELS_LAST, 16 / dtype.bytes() as u32);
            for (order, vector) in [last, (CHANNELS_FIRST, 1)] {
                let kinds = [
                    (Kind::Max { index: false }, vec![dtype; 2]),
                    (Kind::Max { index: true }, vec![dtype, dtype, DType::I32]),
                    (Kind::Average { padded: false }, vec![dtype; 2]),
                    (Kind::Average { padded: true }, vec![dtype; 2]),
                    (Kind::MaxBackward { index: false }, vec![dtype; 3]),
                    (Kind::MaxBackward { index: true }, vec![dtype, DType::I32, dtype]),
                    (Kind::AverageBackward { padded: false }, vec![dtype; 2]),
                    (Kind::AverageBackward { padded: true }, vec![dtype; 2]),
                ];
                for (kind, types) in kinds {
                    // The usual windows: three taps and two steps, two taps and two steps, and as many as divide the image.
                    let found_again = kind == (Kind::MaxBackward { index: false });
                    let blocks = match kind.is_backward() {
                        true if found_again => [[1, 2], [1, 1]],
                        true => [[2, 2], [1, 1]],
                        false if matches!(kind, Kind::Average { .. }) => [[1, 3], [2, 2]],
                        false => [[3, 3], [2, 2]],
                    };
                    let vector = if found_again { 1 } else { vector };
                    let spec = |forms, block| Spec { kind, double: false, types: types.clone(), forms, order, vector, block, pair: None };
                    specs.extend(blocks.map(|block| spec([Form::Sliding; 3], block)));
                    let [high, wide] = blocks[0];
                    let high = if kind.is_ordered() { 1 } else { high };
                    specs.push(spec([Form::Sliding, Form::Adaptive, Form::Adaptive], [high, wide]));
                    if vector > 1 && kind.is_in_pairs() {
                        specs.push(Spec { pair: Some(Pair { taps: 3 }), ..spec([Form::Sliding; 3], [high, wide]) });
                    }
                }
            }
        }
        // Fractional windows of two and of three elements a dim, which read samples of the type of x; a plane has its own, and so has a channel.
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for (order, vector) in [(CHANNELS_LAST, 16 / dtype.bytes() as u32), (CHANNELS_FIRST, 1)] {
                let forms = [Form::Sliding, Form::Fractional, Form::Fractional];
                let alone = Spec {
                    kind: Kind::Max { index: true },
                    double: false,
                    types: vec![dtype; 3],
                    forms,
                    order,
                    vector: 1,
                    block: [2, 2],
                    pair: None,
                };
                for (index, block) in [(DType::I32, [2, 2]), (DType::I32, [3, 3]), (DType::I64, [2, 2])] {
                    specs.push(Spec { types: vec![dtype, dtype, dtype, index], block, ..alone.clone() });
                }
                let types = vec![dtype, DType::I32, dtype];
                specs.push(Spec { kind: Kind::MaxBackward { index: true }, types, vector, ..alone });
            }
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

const CHANNELS_LAST: [usize; 5] = [0, 2, 3, 4, 1];
const CHANNELS_FIRST: [usize; 5] = [0, 1, 2, 3, 4];

/// A view with the channels innermost.
fn channels_last(view: &View) -> View {
    View { strides: CHANNELS_LAST.map(|dim| view.strides[dim]).to_vec(), ..view.clone() }
}

/// The most neighbouring channels that a thread may take: 16 bytes of the values, if they lie side by side in all operands.
fn vector_of(p: &PoolProblem) -> u32 {
    let spec = Spec::of(p, Config::ONE);
    // Where a maximum is found again, and where each plane has samples, each channel goes its own way.
    if spec.order != CHANNELS_LAST || spec.kind == (Kind::MaxBackward { index: false }) || spec.reads_samples() {
        return 1;
    }
    let operands = p.operands();
    let widest = operands.iter().filter(|(name, ..)| *name != "index").map(|(_, view, ..)| view.dtype.bytes()).max().unwrap_or(16);
    let fit = |(_, view, dims, _): &(&str, &View, [u64; 5], bool)| {
        strided::neighbours_of(&channels_last(view), &CHANNELS_LAST.map(|dim| dims[dim])).min(16 / widest as u32)
    };
    operands.iter().map(fit).min().unwrap_or(1)
}

/// What is written, and its dims.
fn written(problem: &PoolProblem) -> (&View, [u64; 5]) {
    match &problem.pass {
        PoolPass::Forward { y, .. } => (y, problem.y_dims()),
        PoolPass::Backward { dx, .. } => (dx, problem.x_dims()),
    }
}

/// What is computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// `index`: the place of the maximum is stored.
    Max {
        index: bool,
    },
    /// `padded`: padding counts.
    Average {
        padded: bool,
    },
    /// `index`: the place of the maximum is read; otherwise it is found again.
    MaxBackward {
        index: bool,
    },
    AverageBackward {
        padded: bool,
    },
}

impl Kind {
    /// Whether the order in which a window's elements are visited tells which of equal ones counts.
    fn is_ordered(self) -> bool {
        matches!(self, Kind::Max { index: true } | Kind::MaxBackward { index: false })
    }

    /// Whether there are kernels of two windows.
    fn is_in_pairs(self) -> bool {
        matches!(self, Kind::Max { index: false } | Kind::Average { .. })
    }

    fn is_mean(self) -> bool {
        matches!(self, Kind::Average { .. } | Kind::AverageBackward { .. })
    }

    fn is_backward(self) -> bool {
        matches!(self, Kind::MaxBackward { .. } | Kind::AverageBackward { .. })
    }
}

/// What a thread takes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Config {
    /// Neighbouring channels.
    vector: u32,
    /// Neighbouring windows along the width.
    windows: u32,
}

impl Config {
    const ONE: Config = Config { vector: 1, windows: 1 };
}

/// Windows of one thread that begin one element after the other along the width. Four take longer, row by row, and two that begin two elements apart
/// save nothing that was seen (`bench/record/h100`).
const PAIR: u32 = 2;

/// Two such windows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Pair {
    /// Columns of each: two or three.
    taps: u32,
}

impl Pair {
    /// That of a config, where there are two windows and none lies beside the image.
    fn of(p: &PoolProblem, config: Config) -> Option<Pair> {
        let spec = Spec::without_pair(p, config.vector);
        let Windows::Sliding { taps: taps @ 2..=3, stride: 1, dilation: 1, pad_before } = p.windows[2] else { return None };
        let meet = pad_before < taps && p.out[2] <= p.extents[2] + pad_before;
        let is_taken = config.windows == PAIR && spec.kind.is_in_pairs() && spec.is_packed();
        (is_taken && meet && p.out[2] >= u64::from(PAIR)).then_some(Pair { taps: taps as u32 })
    }

    /// Columns that both have together.
    fn columns(&self) -> u32 {
        self.taps + PAIR - 1
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    kind: Kind,
    double: bool,
    /// Element types of the operands, in the order of slots.
    types: Vec<DType>,
    /// What windows along each spatial dim are.
    forms: [Form; 3],
    /// The dims `[n, c, depth, height, width]` from the slowest to the fastest that threads run through.
    order: [usize; 5],
    /// Neighbouring channels that a thread takes; they are innermost if these are more than one.
    vector: u32,
    /// Rows and columns of a window, or windows along rows and columns of an element, that are visited together.
    block: [u32; 2],
    /// Two windows of one thread.
    pair: Option<Pair>,
}

impl Spec {
    fn of(p: &PoolProblem, config: Config) -> Spec {
        Spec { pair: Pair::of(p, config), ..Spec::without_pair(p, config.vector) }
    }

    fn without_pair(p: &PoolProblem, vector: u32) -> Spec {
        let kind = match (&p.pass, p.mode) {
            (PoolPass::Forward { index, .. }, PoolMode::Max) => Kind::Max { index: index.is_some() },
            (PoolPass::Forward { .. }, PoolMode::Average { count_include_pad }) => Kind::Average { padded: count_include_pad },
            (PoolPass::Backward { index, .. }, PoolMode::Max) => Kind::MaxBackward { index: index.is_some() },
            (PoolPass::Backward { .. }, PoolMode::Average { count_include_pad }) => Kind::AverageBackward { padded: count_include_pad },
        };
        let (written, dims) = written(p);
        // Channels fastest if they are so in what is written.
        let spatial = (2..5).filter(|&d| dims[d] > 1).map(|d| written.strides[d]).min().unwrap_or(u64::MAX);
        let last = dims[1] > 1 && written.strides[1] < spatial;
        Spec {
            kind,
            double: p.compute == DType::F64,
            types: p.operands().into_iter().map(|(_, view, ..)| view.dtype).collect(),
            forms: p.windows.map(|windows| Form::of(&windows)),
            order: if last { CHANNELS_LAST } else { CHANNELS_FIRST },
            vector,
            block: block_of(p, kind),
            pair: None,
        }
    }

    /// Whether windows begin where samples say, which are the second operand.
    fn reads_samples(&self) -> bool {
        self.forms.contains(&Form::Fractional) && !self.kind.is_backward()
    }

    /// Whether elements are compared as they are stored.
    fn is_packed(&self) -> bool {
        let alike = self.types.iter().all(|&dtype| dtype == self.types[0]);
        !self.double && self.vector > 1 && alike && Packed::is_compared(self.types[0], self.vector)
    }

    fn name(&self) -> String {
        let (kind, flag) = match self.kind {
            Kind::Max { index } | Kind::MaxBackward { index } => ("max", if index { "_index" } else { "" }),
            Kind::Average { padded } | Kind::AverageBackward { padded } => ("average", if padded { "_padded" } else { "" }),
        };
        let backward = if self.kind.is_backward() { "_backward" } else { "" };
        let types: Vec<&str> = self.types.iter().map(|dtype| dtype.name()).collect();
        let form = |form: &Form| match form {
            Form::Sliding => 's',
            Form::Adaptive => 'a',
            Form::Fractional => 'f',
        };
        let forms: String = self.forms.iter().map(form).collect();
        let order: String = self.order.iter().map(|dim| char::from(b"ncdhw"[*dim])).collect();
        let ([high, wide], vector) = (self.block, self.vector);
        let double = if self.double { "_f64" } else { "" };
        let pair = self.pair.map_or(String::new(), |Pair { taps }| format!("_pair{taps}"));
        format!("pool_{kind}{flag}{backward}{double}_{forms}_{order}_v{vector}_b{high}x{wide}{pair}_{}", types.join("_"))
    }

    fn target(&self) -> Target {
        compute::target_of_all(self.types.iter().copied())
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| if self.double { kernel::build::<f64>(self, k) } else { kernel::build::<f32>(self, k) })
    }
}

/// Rows and columns that are visited together.
fn block_of(p: &PoolProblem, kind: Kind) -> [u32; 2] {
    let [high, wide] = [1, 2].map(|axis| block(p, axis, kind.is_backward()));
    // The first of equal maxima wins: of several rows each has to be one block.
    let columns = match p.windows[2] {
        Windows::Sliding { taps, .. } | Windows::Fractional { taps } => taps,
        Windows::Adaptive => p.extents[2].div_ceil(p.out[2].max(1)) + 1,
    };
    let by_row = (kind.is_ordered() && columns > u64::from(wide)) || (matches!(kind, Kind::Average { .. }) && high > 2);
    if by_row { [1, wide] } else { [high, wide] }
}

/// How many places along a spatial dim are visited together: as many as a window has, or as windows have an element, up to three or two.
fn block(p: &PoolProblem, axis: usize, backward: bool) -> u32 {
    let (extent, out) = (p.extents[axis].max(1), p.out[axis].max(1));
    let places = match (p.windows[axis], backward) {
        (Windows::Sliding { taps, .. } | Windows::Fractional { taps }, false) => taps.min(3),
        (Windows::Sliding { taps, stride, dilation, .. }, true) => ((taps - 1) * dilation + 1).div_ceil(stride).min(out).min(2),
        (Windows::Adaptive, false) => (extent.div_ceil(out) + u64::from(!extent.is_multiple_of(out))).min(3),
        (Windows::Adaptive, true) if extent.is_multiple_of(out) => 1,
        (Windows::Adaptive | Windows::Fractional { .. }, true) => 2,
    };
    places.max(1) as u32
}
