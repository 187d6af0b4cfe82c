//! Groups of one to eight channels on Hopper: pixels come by TMA.
//!
//! **What.** Two spatial dims: groups of 1, 2, 4 or 8 channels on either side, filters of 3×3, 5×5 and 7×7, strides 1 and 2, any padding;
//! every epilogue whose result has the operands' type. What is refused is dilation, a filter of other extents, three dims, and of stride 2
//! the 7×7 but in dgrad, and there a padding that is odd where half of the filter is even, or the other way round.
//!
//! **Method.** At one tap, what a chunk of the result has from the same chunk of the pixels is a product with an 8×8 matrix: of a depthwise
//! filter, its diagonal. Of such a product, one part in eight to sixteen is of use, and still it costs fewer instructions than
//! multiplications one by one: neither are elements widened, nor does an instruction stand for 32 of them, but for 256.
//!
//! A CTA keeps a channel tile, 64 channels ([`spec`]), whose filters stay in its registers, and takes one tile of pixels after the other:
//! TMA brings what a tile reads, its neighbours and zeros for the padding included, into a ring of stages, and takes the result away
//! ([`tile`]). A warp walks down a strip of eight columns. Rows of pixels come by `ldmatrix` from wherever a tap meets them, once for each
//! column of taps ([`pixels`]). A wgrad multiplies the same matrices, read transposed, by the gradients ([`filter`]); warps have parts of
//! its sums, which a second launch adds up in their order. Of a dgrad of stride 2, the four pixels of a block meet different taps of the
//! same pixels of y.
//!
//! **When it wins.** Where images fill the chip: what remains is bound by memory.
//!
//! **Numbers.** Products are exact, sums are kept in f32 by the tensor core in an order that the spec and the tiles fix, so repeats agree
//! bit for bit. Groups of fewer than 8 channels are multiplied by each other's zeros, so that an infinity in one makes NaN of those that
//! share its chunk. In a wgrad, an infinity of x that a tile holds but no pixel of y meets may make NaN.
//!
//! **Source:** PTX ISA 9.0, `mma.m16n8k16`, `mma.m16n8k8`, `ldmatrix`, `stmatrix`, tensor copies; the walk is our own.

mod filter;
mod pixels;
mod spec;
mod tile;

use spec::{Kind, Spec, Stride};
use tile::TilesArguments;
use verdigris_graph::{ConvProblem, Direction, Problem, Tensor};
use verdigris_kir::ir::{MapDecl, Target};
use verdigris_kir::program::{Address, KernelRef, L2Promotion, Launch, MapSpec, Program, Step};
use verdigris_tensor::DType;

use super::{CHUNK, ID, TYPES, part_bytes, parts_work, plain, reduction_of, reductions, require, require_chunks};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::epilogue::EpilogueSpec;
use crate::layout::space::divisor;
use crate::split_k::MOST_PARTS_BYTES;
use crate::split_k::filter::grouped as reduction;
use crate::sums::statistics;

/// Extents and tiles of a launch stay below this.
const COUNT_LIMIT: u64 = 1 << 30;
/// CTAs of a last channel tile of few channels, as a share of those of a whole one: its tiles take no less time than this.
const LEAST_SHARE: f64 = 0.9;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(in crate::conv) struct BlockDiagonal {
    problem: ConvProblem,
    epilogue: EpilogueSpec,
    arch: Arch,
    configs: Vec<Config>,
}

impl Algorithm for BlockDiagonal {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let problem = require(problem, &Direction::ALL)?;
        require_layout(problem)?;
        require_extents(problem)?;
        let accepted = BlockDiagonal::new(problem, arch)?;
        let Some(first) = accepted.configs.first() else {
            let (filter, strides) = (problem.filter, problem.strides);
            return Err(
                ID.refusal(Reason::Extent, format_args!("a filter of {filter:?} under strides {strides:?} in {:?}", problem.direction))
            );
        };
        let target = first.spec.target().max(accepted.epilogue.target());
        ID.require(arch.runs(target), Reason::Target, format_args!("needs {}", target.ptx()))?;
        let most = accepted.configs.iter().map(|config| config.spec.shared_bytes()).max().unwrap_or(0);
        ID.require(
            most <= arch.shared_bytes_per_cta,
            Reason::SharedMemory,
            format_args!("{} bytes of shared memory, needed are {most}", arch.shared_bytes_per_cta),
        )?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<Config> {
        self.configs.clone()
    }

    fn knobs(config: &Config) -> Knobs {
        Knobs::new([("box", config.number)])
    }

    fn renamed(old: &Knobs) -> Option<Knobs> {
        // As `conv.diagonal` called them; the other algorithms' have more knobs.
        let tile = old.value("tile")?;
        (*old == Knobs::new([("tile", tile)])).then(|| Knobs::new([("box", tile)]))
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes { tensor_core: true, ..Notes::of(DType::F32) }
    }

    fn work(&self, config: &Config) -> Work {
        let (spec, p) = (&config.spec, &self.problem);
        let taps = f64::from(spec.taps * spec.taps);
        let chunks = f64::from(spec.chunks());
        let pairs_of_rows = f64::from(spec.shape.units() / spec.sharing() * spec.shape.rows / 2);
        let reach = f64::from(spec.reach());
        let spread = f64::from(spec.stride.spread());
        // A step is a tile. Matrices are read for each reach of the taps.
        let reads = 32.0 * (chunks / 2.0) * (reach * f64::from(spec.stride.step()) + 1.0);
        let [rows, columns] = spec.read();
        let [height, width] = spec.written();
        let channel_bytes = f64::from(spec.channels) * p.x.dtype.bytes() as f64;
        let pixels = f64::from((rows * columns + height * width) * spec.shape.images);
        let most_tiles = config.tile_count().div_ceil(config.whole_parts).max(match config.last_parts {
            0 => 0,
            parts => config.tile_count().div_ceil(parts),
        }) as f64;
        let sms = f64::from(self.arch.sm_count);
        let rounds = (config.ctas() as f64 / sms).ceil().max(1.0);
        let is_filter = spec.kind == Kind::Filter;
        let main = Loop {
            tile: [f64::from(height * width * spec.shape.images), f64::from(spec.channels)],
            tiles: config.tile_count() as f64 * p.c.div_ceil(u64::from(spec.channels)) as f64,
            grid: config.ctas() as f64,
            resident: sms,
            steps: 1.0,
            longest_steps: rounds * most_tiles,
            longest_tiles: rounds * most_tiles,
            tensor_cycles: pairs_of_rows * 16.0 * chunks * (taps / 2.0).ceil(),
            shared_bytes: pairs_of_rows * reads * 128.0 + pixels * channel_bytes,
            loaded_bytes: pixels * channel_bytes,
            issued: pairs_of_rows * 20.0 * spread * spread * 4.0,
            // Filters become matrices, once a CTA.
            tile_issued: 60.0 * taps / most_tiles,
            threads: f64::from(32 * (spec.shape.units() + spec.loading_warps())),
            stages: f64::from(spec.stages()),
            ..Loop::of_conv(if is_filter { "conv.diagonal wgrad" } else { "conv.diagonal" }, p)
        };
        Work::of(main).beside(is_filter.then(|| parts_work(p, config.parts()))).beside(statistics::work(p))
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = empty_program(&p.slots());
        match config.spec.kind {
            Kind::Pixels => self.pixel_steps(config, &mut program),
            Kind::Filter => self.filter_steps(config, &mut program),
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut kernels = Vec::new();
        for dtype in TYPES {
            for kind in [Kind::Pixels, Kind::Filter] {
                for stride in [Stride::One, Stride::Two, Stride::Half] {
                    for taps in [3, 5, 7] {
                        for (channels, shape) in Spec::shapes(kind, stride, taps) {
                            let epilogue = (kind == Kind::Pixels).then(|| plain(dtype));
                            let spec = Spec { kind, stride, taps, channels, shape, dtype, epilogue };
                            kernels.extend((spec.target() <= target).then(|| spec.kernel()));
                        }
                    }
                }
            }
        }
        if Target::Sm90 <= target { kernels.into_iter().chain(reductions()).collect() } else { Vec::new() }
    }
}

/// What is asked of the result's type, and of how tensors lie.
fn require_layout(p: &ConvProblem) -> Result<(), Refusal> {
    let [(_, operand, _), _] = p.operands();
    let dtype = operand.dtype;
    let is_wgrad = p.direction == Direction::Wgrad;
    ID.require(
        is_wgrad || p.result().dtype == dtype,
        Reason::DType,
        format_args!("a result of {}, taken is that of the operands, {dtype}", p.result().dtype),
    )?;
    for (name, tensor, extents) in [("x", &p.x, p.x_extents()), ("y", &p.y, p.y_extents())] {
        require_chunks(name, tensor, extents)?;
        let fits = |dim: usize| extents[dim] <= 1 || (1..1 << 38).contains(&tensor.strides[dim]);
        ID.require(
            [0, 2, 3, 4].into_iter().all(fits),
            Reason::Alignment,
            format_args!("{name} with strides {:?}; takes 1 to 2^38", tensor.strides),
        )?;
    }
    Ok(())
}

/// What is asked of extents.
fn require_extents(p: &ConvProblem) -> Result<(), Refusal> {
    ID.require(
        p.c == p.k && p.c.is_multiple_of(u64::from(CHUNK)) && matches!(p.c / p.groups, 1 | 2 | 4 | 8),
        Reason::Extent,
        format_args!("{} and {} channels in {} groups, taken are as many of x as of y, in groups of 1, 2, 4 or 8", p.c, p.k, p.groups),
    )?;
    let is_flat = [p.input[0], p.filter[0], p.output[0]] == [1; 3] && p.pads_before[0] == 0;
    ID.require(is_flat, Reason::Extent, format_args!("a depth of {}, taken are two dims", p.input[0]))?;
    let taps = p.filter[1];
    ID.require(
        taps == p.filter[2] && matches!(taps, 3 | 5 | 7),
        Reason::Extent,
        format_args!("a filter of {:?}, taken are 3×3, 5×5 and 7×7", p.filter),
    )?;
    ID.require(p.dilations[1..] == [1; 2], Reason::Extent, format_args!("dilations {:?}, taken is 1", p.dilations))?;
    ID.require(
        p.strides[1] == p.strides[2] && matches!(p.strides[1], 1 | 2),
        Reason::Extent,
        format_args!("strides {:?}, taken are 1 and 2, alike", p.strides),
    )?;
    // The tile of a result's pixels begins where TMA can store it: not before the tensor.
    let halves_wholly = p.strides[1] == 1 || p.direction != Direction::Dgrad || (1..3).all(|dim| p.pads_before[dim] % 2 == taps / 2 % 2);
    ID.require(
        halves_wholly,
        Reason::Extent,
        format_args!("padding {:?} in a dgrad of stride 2, taken are even and odd ones as {} is", p.pads_before, taps / 2),
    )?;
    let extents = [p.n, p.c, p.input[1], p.input[2], p.output[1], p.output[2], p.pads_before[1], p.pads_before[2]];
    let pixels = [p.n, p.output[1].max(p.input[1]), p.output[2].max(p.input[2])].into_iter().fold(1u64, u64::saturating_mul);
    ID.require(
        pixels < COUNT_LIMIT && extents.into_iter().all(|extent| extent < COUNT_LIMIT),
        Reason::Extent,
        format_args!("{pixels} pixels of {} channels, taken below 2^30", p.c),
    )?;
    let elements = p.c.saturating_mul(taps * taps * p.c / p.groups);
    ID.require(elements < COUNT_LIMIT, Reason::Extent, format_args!("{elements} elements of the filter, taken below 2^30"))
}

/// A kernel, and how its launch is cut.
#[derive(Clone, Debug)]
pub(in crate::conv) struct Config {
    spec: Spec,
    number: u32,
    /// Tiles of images, down and across.
    tiles: [u64; 3],
    /// Channel tiles whose channels are all there, CTAs of each; and those of the channel tile that is left.
    whole_channel_tiles: u64,
    whole_parts: u64,
    last_parts: u64,
}

impl Config {
    fn tile_count(&self) -> u64 {
        self.tiles.iter().product()
    }

    fn ctas(&self) -> u64 {
        self.whole_channel_tiles * self.whole_parts + self.last_parts
    }

    /// Parts of a filter's gradient: each warp that shares its channels with others has one.
    fn parts(&self) -> u64 {
        self.whole_parts.max(self.last_parts) * u64::from(self.spec.sharing())
    }
}

impl BlockDiagonal {
    fn new(p: &ConvProblem, arch: &Arch) -> Result<BlockDiagonal, Refusal> {
        let (kind, epilogue) = if p.direction == Direction::Wgrad {
            (Kind::Filter, reduction_of(p).epilogue)
        } else {
            let whole = EpilogueSpec::of_conv(p);
            ID.require(whole.pairs, Reason::Alignment, "operands of the epilogue whose channels do not lie in pairs")?;
            (Kind::Pixels, EpilogueSpec { stores_d: false, ..whole })
        };
        let stride = match (p.strides[1], p.direction) {
            (1, _) => Stride::One,
            (_, Direction::Dgrad) => Stride::Half,
            _ => Stride::Two,
        };
        let mut accepted = BlockDiagonal { problem: p.clone(), epilogue, arch: arch.clone(), configs: Vec::new() };
        let taps = p.filter[1] as u32;
        for (number, (channels, shape)) in (0..).zip(Spec::shapes(kind, stride, taps)) {
            let epilogue = (kind == Kind::Pixels).then(|| accepted.epilogue.clone());
            let spec = Spec { kind, stride, taps, channels, shape, dtype: p.x.dtype, epilogue };
            accepted.configs.extend(accepted.config(spec, number));
        }
        Ok(accepted)
    }

    /// Rows and columns of the tensor that is cut into tiles.
    fn cut(&self) -> [u64; 2] {
        let p = &self.problem;
        let [_, height, width] = if p.direction == Direction::Dgrad { p.input } else { p.output };
        [height, width]
    }

    fn config(&self, spec: Spec, number: u32) -> Option<Config> {
        let p = &self.problem;
        let [rows, columns] = self.cut();
        let [height, width] = spec.written().map(u64::from);
        let (down, across) = (rows.div_ceil(height), columns.div_ceil(width));
        let tiles = [p.n.div_ceil(u64::from(spec.shape.images)), down, across];
        let count = tiles.iter().product::<u64>();
        let channels = u64::from(spec.channels);
        let (channel_tiles, left) = (p.c.div_ceil(channels), p.c % channels);
        let whole_channel_tiles = if left > 0 && channel_tiles > 1 { channel_tiles - 1 } else { channel_tiles };
        let share = if whole_channel_tiles < channel_tiles { (left as f64 / channels as f64).max(LEAST_SHARE) } else { 0.0 };
        let sms = f64::from(self.arch.sm_count);
        let most = count.min((MOST_PARTS_BYTES / part_bytes(p).max(1)).max(1));
        let whole_parts = ((sms / (whole_channel_tiles as f64 + share)) as u64).clamp(1, most);
        let idle = (self.arch.sm_count as u64).saturating_sub(whole_channel_tiles * whole_parts);
        let last_parts = if whole_channel_tiles < channel_tiles { idle.clamp(1, most.min(whole_parts)) } else { 0 };
        let config = Config { spec, number, tiles, whole_channel_tiles, whole_parts, last_parts };
        (config.tile_count() < COUNT_LIMIT && config.ctas() < COUNT_LIMIT).then_some(config)
    }

    fn tile_arguments(&self, config: &Config) -> TilesArguments {
        let (spec, p) = (&config.spec, &self.problem);
        let [_, down, across] = config.tiles;
        let last = i64::from(spec.taps) - 1;
        let first_read = |dim: usize| {
            let pad = p.pads_before[dim] as i64;
            let first = match (spec.stride, p.direction) {
                (Stride::Half, _) => (pad - i64::from(spec.odd_pad())) / 2 - i64::from(spec.lead()),
                (_, Direction::Dgrad) => pad - last,
                _ => -pad,
            };
            first as i32
        };
        TilesArguments {
            across: divisor(across),
            down: divisor(down),
            count: config.tile_count() as u32,
            whole_channel_tiles: divisor(config.whole_channel_tiles),
            whole_parts: config.whole_parts as u32,
            last_parts: config.last_parts as u32,
            first_read: [first_read(1), first_read(2)],
        }
    }

    /// Channels of a group are 2 to this.
    fn group_shift(&self) -> u32 {
        (self.problem.c / self.problem.groups).trailing_zeros()
    }

    fn filter_arguments(&self, spec: &Spec) -> pixels::FilterArguments {
        let p = &self.problem;
        let [k, c, _, row, column] = p.w.strides.map(|stride| stride * p.w.dtype.bytes() as u64);
        let is_dgrad = p.direction == Direction::Dgrad;
        // Taps of a dgrad of stride 1 are met from the last to the first, and those of a flipped filter the other way round.
        let is_reversed = p.flip != (is_dgrad && spec.stride == Stride::One);
        let walk = |stride: u64| if is_reversed { stride.wrapping_neg() } else { stride };
        pixels::FilterArguments {
            pointer: Address::buffer(p.w.slot.0 as usize),
            origin: if is_reversed { (u64::from(spec.taps) - 1) * (row + column) } else { 0 },
            input: if is_dgrad { [k, 0] } else { [0, c] },
            output: if is_dgrad { [0, c] } else { [k, 0] },
            taps: [walk(row), walk(column)],
            group: self.group_shift(),
        }
    }

    fn pixel_steps(&self, config: &Config, program: &mut Program) {
        let (spec, p) = (&config.spec, &self.problem);
        let (extents, result) = (p.result_extents(), p.result());
        let (activations, read) = if p.direction == Direction::Dgrad { (&p.y, p.y_extents()) } else { (&p.x, p.x_extents()) };
        let args = pixels::PixelsArguments {
            tiles: self.tile_arguments(config),
            activations: map(spec.read_map(), activations, read),
            result: map(spec.other_map(), result, extents),
            extents: [0, 3, 4, 1].map(|dim| extents[dim] as u32),
            filter: self.filter_arguments(spec),
            epilogue: Some(self.epilogue.conv_arguments(p)),
        };
        program.launch(Launch::new(spec.clone().kernel(), [config.ctas() as u32, 1, 1], args.bound(spec)));
        if let Some(statistics) = &p.statistics {
            statistics::steps(p, statistics, program);
        }
    }

    fn filter_steps(&self, config: &Config, program: &mut Program) {
        let (spec, p) = (&config.spec, &self.problem);
        let (part_bytes, count) = (part_bytes(p), config.parts());
        // Of a last channel tile with fewer CTAs, the missing parts are zero.
        let parts = program.add_scratch("parts of sums", part_bytes * count);
        if config.last_parts > 0 && config.last_parts != config.whole_parts {
            program.steps.push(Step::Fill { at: parts, bytes: part_bytes * count, value: 0 });
        }
        let args = filter::FilterArguments {
            tiles: self.tile_arguments(config),
            activations: map(spec.read_map(), &p.x, p.x_extents()),
            gradients: map(spec.other_map(), &p.y, p.y_extents()),
            channels: p.c as u32,
            group_shift: self.group_shift(),
            flipped: u32::from(p.flip),
            parts,
            part_bytes,
        };
        program.launch(Launch::new(spec.clone().kernel(), [config.ctas() as u32, 1, 1], args.bound(spec)));
        let sum = reduction::Spec { epilogue: self.epilogue.clone() };
        program.launch(sum.launch(p, parts, count, part_bytes));
    }
}

/// A tensor with its channels last, as channels, columns, rows and images.
fn map(decl: MapDecl, tensor: &Tensor, extents: [u64; 5]) -> (Address, MapSpec) {
    let bytes = tensor.dtype.bytes() as u64;
    // Where there is one, its distance to the next one says nothing.
    let stride = |dim: usize| if extents[dim] <= 1 { 16 } else { tensor.strides[dim] * bytes };
    let spec = MapSpec {
        decl,
        dims: [1, 4, 3, 0].map(|dim| extents[dim]).to_vec(),
        strides_bytes: [4, 3, 0].map(stride).to_vec(),
        element_strides: vec![1; 4],
        lower_corner: vec![],
        upper_corner: vec![],
        fill: Default::default(),
        l2: L2Promotion::B128,
    };
    (Address::buffer(tensor.slot.0 as usize), spec)
}
