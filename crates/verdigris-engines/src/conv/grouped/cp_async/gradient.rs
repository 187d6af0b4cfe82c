//! wgrad on the host's side: which CTA sums what, and what becomes of the parts.

use verdigris_graph::{ConvProblem, Direction, Problem};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::super::{CHUNK, ID, TYPES, part_bytes, parts_work, reduction_of, reductions, require, require_chunks};
use super::channel_tile::{ChannelTile, Channels};
use super::tiling::Tiling;
use super::walk::WalkArguments;
use super::{COUNT_LIMIT, filter, pixel_arguments, require_channels};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::conv::geometry::phases::PixelGeometry;
use crate::conv::geometry::tap_count;
use crate::cost::{Join, Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::layout::space::divisor;
use crate::split_k::MOST_PARTS_BYTES;
use crate::split_k::filter::grouped as reduction;

/// An accepted wgrad.
#[derive(Clone, Debug)]
pub(in crate::conv) struct Gradient {
    problem: ConvProblem,
    channels: Channels,
    geometry: PixelGeometry,
    arch: Arch,
    /// With the taps of the filter, or the most that a kernel has.
    spec: filter::Spec,
    sum: reduction::Spec,
    tiling: Tiling,
}

/// A config of a filter's gradient.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::conv) struct GradientConfig {
    /// Parts of each sum.
    parts: u64,
    /// Taps of a CTA, where they are fewer than the kernel of the problem's taps has.
    fewer_taps: Option<u32>,
}

impl Gradient {
    fn new(problem: &ConvProblem, channels: Channels, arch: &Arch) -> Result<Gradient, Refusal> {
        require_chunks("x", &problem.x, problem.x_extents())?;
        require_chunks("y", &problem.y, problem.y_extents())?;
        let sum = reduction_of(problem);
        let target = sum.epilogue.target();
        ID.require(arch.runs(target), Reason::Target, format_args!("the epilogue's types need {}", target.ptx()))?;
        let least = channels.channel_tile().unwrap_or(ChannelTile::ALL[5]);
        let taps = tap_count(problem);
        let spec = filter::Spec {
            operands: problem.x.dtype,
            channel_tile: filter::Spec::channel_tiles().find(|&channel_tile| channel_tile >= least).unwrap_or(ChannelTile::ALL[5]),
            taps: filter::Spec::TAPS.into_iter().find(|&most| taps <= u64::from(most)).unwrap_or(filter::Spec::TAPS[1]),
        };
        let elements = problem.k.saturating_mul(problem.gemm_extents().n);
        ID.require(elements < 1 << 30, Reason::Extent, format_args!("{elements} elements of the filter, taken below 2^30"))?;
        let y = problem.y_extents();
        let reach =
            [0, 2, 3, 4].iter().fold(0u64, |reach, &dim| reach.saturating_add((y[dim] - 1).saturating_mul(problem.y.strides[dim] / 8)));
        ID.require(reach < 1 << 32, Reason::Extent, format_args!("y reaches over {reach} chunks of 8 elements, taken below 2^32"))?;
        let pixels = problem.n.saturating_mul(problem.output.iter().product());
        ID.require(pixels < COUNT_LIMIT, Reason::Extent, format_args!("{pixels} pixels, taken below 2^31"))?;
        let geometry = PixelGeometry::of(problem);
        let limit = arch.shared_bytes_per_cta;
        let fitting = Tiling::of(problem, &geometry, filter::Spec::room()).filter(|_| filter::Spec::shared_bytes() <= limit);
        let tiling = fitting.ok_or_else(|| {
            ID.refusal(Reason::SharedMemory, format_args!("a filter of {:?} taps in {limit} bytes of shared memory", problem.filter))
        })?;
        Ok(Gradient { problem: problem.clone(), channels, geometry, arch: arch.clone(), spec, sum, tiling })
    }

    fn spec(&self, config: &GradientConfig) -> filter::Spec {
        filter::Spec { taps: config.fewer_taps.unwrap_or(self.spec.taps), ..self.spec }
    }

    fn channel_tiles(&self) -> u64 {
        u64::from(self.channels.blocks().div_ceil(self.spec.channel_tile.blocks()))
    }

    fn tap_groups(&self, spec: &filter::Spec) -> u64 {
        tap_count(&self.problem).div_ceil(u64::from(spec.taps))
    }

    /// CTAs that share a part of the pixels.
    fn columns(&self, spec: &filter::Spec) -> u64 {
        self.channel_tiles() * u64::from(spec.column_parts()) * self.tap_groups(spec)
    }

    /// Parts that take each SM's places a quarter, half, once and twice; no more than there are tiles.
    fn parts(&self, spec: &filter::Spec) -> Vec<u64> {
        let places = u64::from(self.arch.sm_count) * u64::from(spec.ctas());
        let most = self.tiling.count().min(MOST_PARTS_BYTES / part_bytes(&self.problem).max(1)).max(1);
        let ctas = [places / 4, places / 2, places, 2 * places];
        let mut parts: Vec<u64> = ctas.map(|ctas| (ctas / self.columns(spec)).clamp(1, most)).to_vec();
        // Whole turns of tiles.
        parts.iter_mut().for_each(|parts| *parts = self.tiling.count().div_ceil(self.tiling.count().div_ceil(*parts)));
        parts.sort_unstable();
        parts.dedup();
        parts
    }
}

impl Algorithm for Gradient {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = GradientConfig;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let problem = require(problem, &[Direction::Wgrad])?;
        Gradient::new(problem, require_channels(problem, arch)?, arch)
    }

    fn configs(&self) -> Vec<GradientConfig> {
        let taps = filter::Spec::TAPS.into_iter().filter(|&taps| taps <= self.spec.taps);
        let of_taps = |taps| {
            let fewer_taps = (taps < self.spec.taps).then_some(taps);
            self.parts(&filter::Spec { taps, ..self.spec }).into_iter().map(move |parts| GradientConfig { parts, fewer_taps })
        };
        taps.flat_map(of_taps).collect()
    }

    fn knobs(config: &GradientConfig) -> Knobs {
        Knobs::new([("parts", config.parts as u32)].into_iter().chain(config.fewer_taps.map(|taps| ("taps", taps))))
    }

    fn notes(&self, _: &GradientConfig) -> Notes {
        Notes { tensor_core: true, ..Notes::of(DType::F32) }
    }

    /// A step is a tile of pixels.
    fn work(&self, config: &GradientConfig) -> Work {
        let (parts, spec) = (config.parts, &self.spec(config));
        let turns = self.tiling.count().div_ceil(parts) as f64;
        let taps = f64::from(spec.taps);
        let pixels = f64::from(filter::Spec::room().pixels);
        let halo = self.tiling.halo_pixels() as f64;
        let chunks = if spec.channel_tile.chunks <= 2 { 4.0 } else { 8.0 };
        let columns = self.columns(spec) as f64;
        let ctas = parts as f64 * columns;
        let resident = f64::from(self.arch.sm_count) * f64::from(spec.ctas());
        let rounds = (ctas / resident).ceil();
        let main = Loop {
            tile: [f64::from(spec.taps), f64::from(spec.channel_tile.chunks * 8)],
            tiles: columns,
            grid: ctas,
            resident,
            steps: self.tiling.count() as f64,
            longest_steps: rounds * turns,
            longest_tiles: rounds,
            parts: parts as f64,
            join: Join::Launch,
            tensor_cycles: pixels / 16.0 * chunks * taps * 2.0,
            // Eight warps, each of which reads both operands for every 16 pixels.
            shared_bytes: pixels / 16.0 * (32.0 + chunks * taps * 4.0) * 128.0 + (halo + pixels) * 128.0,
            loaded_bytes: (halo + pixels) * 128.0,
            issued: (4.0 * halo + 4.0 * pixels) * 2.0,
            threads: f64::from(super::THREADS),
            exposed: 0.6,
            ..Loop::of_conv("conv.grouped wgrad", &self.problem)
        };
        Work::of(main).beside([parts_work(&self.problem, parts)])
    }

    fn lower(&self, config: &GradientConfig) -> Result<Program, Refusal> {
        let (count, spec) = (config.parts, self.spec(config));
        let p = &self.problem;
        let mut program = empty_program(&p.slots());
        let part_bytes = part_bytes(p);
        let parts = program.add_scratch("parts of sums", part_bytes * count);
        let [n, _, d, h, w] = p.y.strides;
        let relative = [n, d, h, w].map(|stride| stride / u64::from(CHUNK));
        let ((x, x_strides), (y, y_strides)) = (pixel_arguments(&p.x), pixel_arguments(&p.y));
        let args = filter::FilterArguments {
            walk: WalkArguments::new(p, &self.geometry, &self.tiling, relative, &mut program),
            blocks: self.channels.arguments(),
            channel_tiles: divisor(self.channel_tiles()),
            column_parts: spec.column_parts(),
            tap_groups: divisor(self.tap_groups(&spec)),
            lanes: count as u32,
            x,
            x_strides,
            y,
            y_strides,
            flipped: u32::from(p.flip),
            parts,
            part_bytes,
        };
        program.launch(Launch::new(spec.kernel(), [(self.columns(&spec) * count) as u32, 1, 1], args.bound(&())));
        program.launch(self.sum.launch(p, parts, count, part_bytes));
        Ok(program)
    }

    fn catalog(_: Target) -> Vec<KernelRef> {
        let of_type = |operands: DType| {
            let of_tile = move |channel_tile| filter::Spec::TAPS.map(|taps| filter::Spec { operands, channel_tile, taps }.kernel());
            filter::Spec::channel_tiles().flat_map(of_tile)
        };
        TYPES.into_iter().flat_map(of_type).chain(reductions()).collect()
    }
}
