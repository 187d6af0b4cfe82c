//! `batch_norm.channels`: batch normalization in training, its gradient, and the statistics of channels ([`verdigris_graph::BatchNormProblem`] has the
//! formulas).
//!
//! It takes all of them: any element types, any strides, channels of fewer than 2^31 elements.
//!
//! **Method.** A first launch goes through the elements and leaves sums of parts, a second one joins the parts of each channel and writes what belongs
//! to channels (one warp a channel), a third goes through the elements once more, from the parts that were read last, which may still lie in L2. Small
//! tensors do all three in one launch, with barriers of the grid between them. Where what CTAs read first lies in L2 when they read it again, each CTA may
//! do all three for channels of its own. Large tensors are taken by *teams*: the CTAs of the chip in groups, each of which sums, joins and writes one block
//! of channels after the other, so that what is read twice is read again at once, out of shared memory as far as that reaches and out of L2 beyond it.
//! Threads stand along channels where these are neighbours in memory (*lines*), along the elements of one channel
//! where those are (*planes*), and take up to 16 bytes at a time; tensors that allow neither are read element by element. Planes whose extent no vector
//! divides are taken together with those of the other channels, which lie behind them (*images*, of a gradient alone). Where the chip can, each of three
//! launches starts while the one in front of it ends, and waits for what that writes.
//!
//! Any activation may stand behind the normalization. SiLU, the hard swish and clamps (ReLU6) have kernels in common, in which an argument picks a branch once for each vector, the same
//! for all threads; others have kernels of their own. Their gradient takes the slope where the activation was, worked out again in both launches that read `x` and `dy`: no result is
//! read, and nothing kept but `x` and what belongs to channels.
//!
//! The gradient behind ReLU sees what passed by the sign of `(x − mean) · inv · scale + bias`, worked out again by the forward kernel's instructions,
//! so that the result need not be read; where something was added, it reads the result, and stores the gradient of what was added on the way.
//! Where that has the type of `dy`, the third launch reads it in place of `dy` and the result.
//!
//! Teams read and write 128 images of 56 by 56 points and 256 channels of bf16, 205 MB, once each, 410 MB, where three launches move 616 MB less what
//! L2 has kept; of a gradient 616 MB where these move 1,027 MB. On an H200 channels-first they take 150 us where three launches take 164, of a gradient 215 and 245; channels-last
//! one is up to 8 % faster than the other, either way.
//!
//! **When it wins.** There is no other engine for these.
//!
//! **Numbers.** In f32 (f64 where an operand is f64). Sums of statistics are of differences from the mean so far, a few elements at a time, and are
//! joined by the formula of parallel variances; a mean far from 0 costs nothing. Results repeat bit for bit on a device. Of a gradient the sum `Σ dy · (x − mean)` meets `inv` when
//! it is whole, as PyTorch's does, and is infinite where these products leave the range: dy about 10^20 with deviations about 10^19. Beside it each element's `(x − mean) · inv`
//! comes first, so that dx is as good as its parts.
//!
//! Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.

mod kept;
mod kernel;
mod operands;
mod spec;

use verdigris_graph::{BatchNormProblem, ChannelFunction, Problem, UnaryOp, View};
use verdigris_kir::ir::Target;
use verdigris_kir::params::HostNumber;
use verdigris_kir::program::{Address, KernelRef, Launch, Program, Step};
use verdigris_kir::tile::grid_barrier::TEAM_BYTES;
use verdigris_tensor::DType;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::{functions, strided};
use crate::sums::moments::require_eps;
use kernel::KernelArgs;
use operands::{Name, WholeArgs};
use spec::{COMMON, Form, Pass, Spec, Stage, THREADS, WARPS};

/// Threads along channels, where these are neighbours: a line of 128 bytes, or of 512.
const ACROSS: [u32; 2] = [8, 32];

/// How much longer teams take than their bytes would: sums, barriers and results of a block follow each other. Measured over estimated, of the bench's own rows on an H200, it was 0.93 to 1.5, mostly 1.1 to 1.35, where three
/// launches are at 0.84 to 1.1 (1.6 where launches are most of the time).
const TEAMS_OVERHEAD: f64 = 1.25;
/// The same of accesses of a single 16-bit element: too few bytes are in flight.
const NARROW_ACCESS: f64 = 1.7;

/// Instructions of an activation other than ReLU for each element, and of its slope: those of SiLU, of which two go to the unit of special functions.
const ACTIVATION_INSTRUCTIONS: f64 = 7.0;
const SLOPE_INSTRUCTIONS: f64 = 12.0;

/// Shared memory that the chip takes of an SM for each CTA.
const RESERVED_BYTES: u32 = 1024;

/// The share of L2 that CTAs of whole channels may fill with what they read twice.
const ALONE_SHARE: f64 = 0.6;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Channels {
    problem: BatchNormProblem,
    pass: Pass,
    relu: bool,
    /// Another activation than ReLU.
    activation: Option<UnaryOp>,
    sm_count: u32,
    shared_bytes_per_sm: u32,
    l2_bytes: f64,
    overlaps: bool,
}

/// One way to do it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Config {
    form: Form,
    /// Neighbours that one access takes.
    vector: u32,
    launches: Launches,
}

/// The launches of a config.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Launches {
    /// One for each stage.
    Each,
    /// One for all stages, with barriers of the grid.
    Fused,
    /// One for all stages, whose CTAs have whole channels.
    Alone,
    /// One for all stages, by so many teams of CTAs that keep what they read.
    Kept { teams: u32 },
}

/// How a problem is laid over the grid.
#[derive(Clone, Copy, Debug)]
struct Grid {
    blocks: u32,
    /// Blocks that CTAs are at work on at once; those of a launch that has a CTA for each part of each are all.
    teams: u32,
    points: u32,
    points_of_part: u32,
    parts: u32,
    elements_of_point: u32,
}

impl Grid {
    fn ctas(self) -> u32 {
        self.teams * self.parts
    }

    /// Blocks that a team has one after the other.
    fn rounds(self) -> u32 {
        self.blocks.div_ceil(self.teams)
    }
}

impl Algorithm for Channels {
    const ID: EngineId = EngineId { name: "batch_norm.channels", number: 800 };
    const VERSION: u32 = 2;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::BatchNorm(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is batch_norm", problem.kind())));
        };
        let (count, channels) = (problem.count(), problem.channels);
        Self::ID.require(count < 1 << 31, Reason::Extent, format_args!("channels of {count} elements, taken below 2^31"))?;
        Self::ID.require(channels < 1 << 22, Reason::Extent, format_args!("{channels} channels, taken below 2^22"))?;
        let rank = problem.rows.len();
        Self::ID.require(rank < verdigris_tensor::MAX_RANK, Reason::Extent, format_args!("{rank} dims of rows, taken are 7"))?;
        let pass = match &problem.function {
            ChannelFunction::Forward { eps, .. } => {
                require_eps(Self::ID, eps.0, problem.compute)?;
                Pass::Forward
            }
            ChannelFunction::Backward { .. } => Pass::Backward,
            ChannelFunction::Statistics { .. } => Pass::Statistics,
        };
        let activation = problem.activation().filter(|&f| f != UnaryOp::Relu);
        let relu = problem.activation() == Some(UnaryOp::Relu);
        let (sm_count, shared_bytes_per_sm) = (arch.sm_count, arch.shared_bytes_per_sm);
        let (l2_bytes, overlaps) = (arch.l2_bytes as f64, arch.runs(Target::Sm90));
        let accepted = Channels { problem: problem.clone(), pass, relu, activation, sm_count, shared_bytes_per_sm, l2_bytes, overlaps };
        let any = Config { form: Form::Lines { across: 32 }, vector: 1, launches: Launches::Each };
        let target = accepted.stages(any).into_iter().map(|stage| accepted.spec(stage, any).target()).max().unwrap_or(Target::Sm80);
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<Config> {
        let mut forms = Vec::new();
        let along_channels = self.neighbours(true);
        for across in ACROSS {
            // Half of the threads at least have channels.
            let room = u64::from(across * along_channels);
            if along_channels > 1 && (across == ACROSS[0] || 2 * self.problem.channels > room) {
                forms.push((Form::Lines { across }, along_channels));
            }
        }
        let along_rows = self.neighbours(false);
        forms.push((Form::Planes, along_rows));
        if along_channels == 1 {
            forms.push((Form::Lines { across: 32 }, 1));
        }
        let along_images = self.image_neighbours();
        if along_images > along_rows {
            forms.extend(ACROSS.map(|across| (Form::Images { across }, along_images)));
        }
        let mut configs = Vec::new();
        for (form, vector) in forms.iter().copied() {
            configs.extend(self.kept(form, vector));
        }
        for (form, vector) in forms {
            let config = Config { form, vector, launches: Launches::Each };
            configs.push(config);
            if matches!(form, Form::Images { .. }) {
                continue;
            }
            let spec = self.spec(Stage::Fused, config);
            if self.grid(config).ctas() <= self.sm_count * spec.ctas_per_sm() {
                configs.push(Config { launches: Launches::Fused, ..config });
            }
            let alone = Config { launches: Launches::Alone, ..config };
            if self.fits_alone(alone) {
                configs.push(alone);
            }
        }
        configs
    }

    fn knobs(&Config { form, vector, launches }: &Config) -> Knobs {
        let across = match form {
            Form::Lines { across } | Form::Images { across } => across,
            Form::Planes => 0,
        };
        let all = [("across", across), ("vector", vector), ("launches", if launches == Launches::Each { 3 } else { 1 })];
        let alone = (launches == Launches::Alone).then_some(("alone", 1));
        let teams = if let Launches::Kept { teams } = launches { Some(("teams", teams)) } else { None };
        let images = matches!(form, Form::Images { .. }).then_some(("images", 1));
        Knobs::new(all.into_iter().chain(alone).chain(teams).chain(images))
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, config: &Config) -> Work {
        let elements = self.problem.count() as f64 * self.problem.channels as f64;
        let mut first = 0.0;
        let mut again = 0.0;
        for &stage in &self.stages(Config { launches: Launches::Each, ..*config }) {
            let spec = self.spec(stage, *config);
            let wholes = spec.operands.iter().filter(|(name, _)| name.is_whole());
            let bytes: f64 = wholes.map(|&(name, dtype)| elements * self.bytes_of_element(name, dtype, config)).sum();
            *(if stage == Stage::Sums { &mut first } else { &mut again }) += bytes;
        }
        let grid = self.grid(*config);
        // What the third launch reads first was read last, and may lie in L2; and it is read beside what is written.
        let kept = match config.launches {
            // All of it, where a CTA reads its own again at once.
            Launches::Alone => first.min(again),
            // What teams are at work on lies in shared memory and in L2, as far as it fits.
            Launches::Kept { .. } => {
                let spec = self.spec(Stage::Kept, *config);
                let at_work = elements * f64::from(grid.teams) / f64::from(grid.blocks) * self.bytes_read_first(&spec);
                let room = f64::from(grid.ctas() * spec.room_rows() * THREADS * spec.kept_bytes().iter().sum::<u32>());
                self.bytes_read_first(&spec) * elements * ((room + 0.4 * self.l2_bytes) / at_work).min(1.0)
            }
            _ => (0.5 * self.l2_bytes).min(0.5 * again).min(first),
        };
        let ctas = grid.ctas();
        // Barriers of the grid, and the arrivals that are set to 0 in front of it, cost more than launches that overlap.
        let launches = match (config.launches, self.overlaps) {
            (Launches::Alone, _) => 1.0,
            (Launches::Fused, _) => 4.0,
            // Beside other teams' barriers memory is at work; a team that is alone waits for its own.
            (Launches::Kept { teams: 1 }, _) => 0.5 + 2.0 * f64::from(grid.rounds()),
            (Launches::Kept { .. }, _) => 2.5 + 0.25 * f64::from(grid.rounds() - 1),
            (Launches::Each, true) => 2.0,
            (Launches::Each, false) => 3.0,
        };
        // Some eight instructions an element, of which a few serve a vector; and those of the activation, which a gradient evaluates for its sums and for its result.
        let of_activation = match (self.activation, self.pass) {
            (Some(_), Pass::Forward) => ACTIVATION_INSTRUCTIONS,
            (Some(_), Pass::Backward) => 2.0 * SLOPE_INSTRUCTIONS,
            _ => 0.0,
        };
        let issued = elements / 32.0 * (of_activation + if config.vector == 1 { 24.0 } else { 10.0 });
        // A last wave of few CTAs of whole channels leaves the others idle.
        let waves = f64::from(ctas) / f64::from(self.sm_count * self.spec(Stage::Fused, *config).ctas_per_sm());
        let idle = if config.launches == Launches::Alone { (waves.ceil() / waves).min(2.0) } else { 1.0 };
        let turns = if matches!(config.launches, Launches::Kept { .. }) { TEAMS_OVERHEAD } else { 1.0 };
        let is_narrow = config.vector == 1 && self.problem.operand("x").is_some_and(|x| x.dtype.bytes() <= 2);
        let bytes = (first + again - kept) * idle * turns * if is_narrow { NARROW_ACCESS } else { 1.0 };
        let stream = Stream::new(Traffic::Lines, bytes).of_ctas(f64::from(ctas)).issuing(issued);
        Work::default().beside([stream.in_launches(launches)])
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let stages = self.stages(*config);
        let specs: Vec<Spec> = stages.iter().map(|&stage| self.spec(stage, *config)).collect();
        let grid = self.grid(*config);
        let bytes = p.compute.bytes() as u64;
        let leaves_parts = config.launches != Launches::Alone;
        let parts_bytes = if leaves_parts { p.channels * self.plane(*config) * u64::from(grid.parts) * bytes } else { bytes };
        let parts = ["sums", "weighted sums"].map(|name| program.add_scratch(name, parts_bytes));
        let joined = ["mean", "deviation"].map(|name| program.add_scratch(name, p.channels * bytes));
        let arrivals_bytes = match config.launches {
            Launches::Each | Launches::Alone => None,
            Launches::Fused => Some(4),
            Launches::Kept { .. } => Some(u64::from(grid.teams * TEAM_BYTES)),
        };
        let arrivals = arrivals_bytes.map(|bytes| {
            let at = program.add_scratch("arrivals", bytes);
            program.steps.push(Step::Fill { at, bytes, value: 0 });
            at
        });
        for spec in specs {
            let args = self.arguments(&spec, grid, self.plane(*config), parts, joined, arrivals).bound(&spec);
            let ctas = if spec.stage == Stage::Join { (p.channels as u32).div_ceil(WARPS) } else { grid.ctas() };
            let overlaps = spec.overlaps;
            let launch = Launch::new(spec.kernel(), [ctas, 1, 1], args);
            program.launch(match (config.launches, overlaps) {
                (Launches::Fused | Launches::Kept { .. }, _) => launch.resident(),
                (_, true) => launch.overlapping(),
                (_, false) => launch,
            });
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        // Chips that launch kernels one after the other have them without the overlap, compiled when they are first asked for.
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let vector = 16 / dtype.bytes() as u32;
            let forms = [(Form::Lines { across: ACROSS[0] }, vector), (Form::Planes, vector), (Form::Planes, 1)];
            let wide = [(Form::Lines { across: ACROSS[1] }, vector)];
            let images = ACROSS.map(|across| (Form::Images { across }, vector));
            for (form, vector) in forms.into_iter().chain(wide).chain(images) {
                let is_image = matches!(form, Form::Images { .. });
                let has = |stage: Stage| match (stage, form) {
                    (Stage::Kept, _) => !is_image && vector > 1,
                    (Stage::Fused | Stage::Alone, _) => !is_image,
                    _ => true,
                };
                for (pass, behind, names) in CATALOG.iter().filter(|(pass, ..)| !is_image || *pass == Pass::Backward) {
                    let all = [Stage::Sums, Stage::Join, Stage::Apply, Stage::Fused, Stage::Alone, Stage::Kept];
                    let stages = all.into_iter().filter(|&stage| has(stage) && behind.has(form, vector, stage));
                    let writes = |stage: Stage| !matches!(stage, Stage::Apply | Stage::Kept) || *pass != Pass::Statistics;
                    for stage in stages.filter(|&stage| writes(stage)) {
                        let all: Vec<(Name, DType)> = (names.iter().filter_map(|name| Name::of(name)))
                            .map(|name| (name, if name.is_whole() { dtype } else { DType::F32 }))
                            .collect();
                        let operands = of_stage(stage, *pass, *behind != Behind::Nothing, &all);
                        let rank = if form == Form::Planes { 2 } else { 1 };
                        let overlaps = !matches!(stage, Stage::Fused | Stage::Kept);
                        let relu = *behind == Behind::Relu;
                        let activations = if *behind == Behind::Common { COMMON.to_vec() } else { Vec::new() };
                        specs.push(Spec { stage, pass: *pass, relu, activations, form, vector, rank, double: false, overlaps, operands });
                    }
                }
            }
        }
        let mut names = std::collections::HashSet::new();
        let kernels = specs.into_iter().filter(|spec| spec.target() <= target).map(|spec| spec.reduced_to_stage().kernel());
        kernels.filter(|kernel| names.insert(kernel.name().to_owned())).collect()
    }
}

/// What stands behind a normalization of the catalog.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Behind {
    Nothing,
    Relu,
    Common,
}

impl Behind {
    /// Whether the catalog has such a kernel: of other activations than ReLU, those that the estimate chooses for most layers of a network with them. The others are compiled when they
    /// are first asked for.
    fn has(self, form: Form, vector: u32, stage: Stage) -> bool {
        let of_common = match (form, stage) {
            (Form::Lines { across }, Stage::Sums | Stage::Apply) => across == ACROSS[0],
            (Form::Planes, Stage::Sums | Stage::Apply) => vector > 1,
            // Of 16-bit types: they are the largest kernels.
            (Form::Planes, Stage::Kept) => vector == 8,
            _ => false,
        };
        self != Behind::Common || of_common
    }
}

/// What a network's layers ask for.
const CATALOG: &[(Pass, Behind, &[&str])] = &[
    (Pass::Statistics, Behind::Nothing, &["x", "mean", "m2"]),
    (Pass::Forward, Behind::Nothing, &["x", "scale", "bias", "running_mean", "running_var", "y", "mean", "inv", "next_mean", "next_var"]),
    (Pass::Forward, Behind::Relu, &["x", "scale", "bias", "running_mean", "running_var", "y", "mean", "inv", "next_mean", "next_var"]),
    (Pass::Forward, Behind::Common, &["x", "scale", "bias", "running_mean", "running_var", "y", "mean", "inv", "next_mean", "next_var"]),
    (
        Pass::Forward,
        Behind::Relu,
        &["x", "scale", "bias", "add", "running_mean", "running_var", "y", "mean", "inv", "next_mean", "next_var"],
    ),
    (Pass::Backward, Behind::Nothing, &["dy", "x", "scale", "mean", "inv", "dx", "dscale", "dbias"]),
    (Pass::Backward, Behind::Relu, &["dy", "x", "scale", "bias", "mean", "inv", "dx", "dscale", "dbias"]),
    (Pass::Backward, Behind::Common, &["dy", "x", "scale", "bias", "mean", "inv", "dx", "dscale", "dbias"]),
    (Pass::Backward, Behind::Relu, &["dy", "x", "y", "scale", "mean", "inv", "dx", "dscale", "dbias", "dadd"]),
];

/// The operands that a stage reads and writes, of those of the problem.
fn of_stage(stage: Stage, pass: Pass, activated: bool, all: &[(Name, DType)]) -> Vec<(Name, DType)> {
    let dtype_of = |name: Name| all.iter().find(|(known, _)| *known == name).map(|(_, dtype)| *dtype);
    let works_result_out = activated && dtype_of(Name::Y).is_none();
    // The third launch reads what the first stored of dy in place of it.
    let is_left = dtype_of(Name::Dadd).is_some() && dtype_of(Name::Dadd) == dtype_of(Name::Dy);
    let (sums, join, apply) = (stage == Stage::Sums, stage == Stage::Join, stage == Stage::Apply);
    let has = |name: Name| match (pass, name) {
        _ if matches!(stage, Stage::Fused | Stage::Alone | Stage::Kept) => true,
        (Pass::Statistics, Name::X) => sums,
        (Pass::Statistics, _) => join,
        (Pass::Forward, Name::X) => sums || apply,
        (Pass::Forward, Name::Add | Name::Y | Name::Scale | Name::Bias) => apply,
        (Pass::Forward, _) => join,
        (Pass::Backward, Name::X | Name::Mean) => sums || apply,
        (Pass::Backward, Name::Dy | Name::Y) => sums || (apply && !is_left),
        (Pass::Backward, Name::Dadd) => sums || (apply && is_left),
        (Pass::Backward, Name::Inv) => join || apply || works_result_out,
        (Pass::Backward, Name::Scale) => apply || (sums && works_result_out),
        (Pass::Backward, Name::Bias) => sums || (apply && !is_left),
        (Pass::Backward, Name::Dx) => apply,
        (Pass::Backward, _) => join,
    };
    all.iter().copied().filter(|(name, _)| has(*name)).collect()
}

impl Channels {
    fn operands(&self) -> Vec<(Name, View)> {
        self.problem.operands().into_iter().filter_map(|(name, view, _)| Some((Name::of(name)?, view.clone()))).collect()
    }

    fn spec(&self, stage: Stage, config: Config) -> Spec {
        let all: Vec<(Name, DType)> = self.operands().into_iter().map(|(name, view)| (name, view.dtype)).collect();
        let double = self.problem.compute == DType::F64;
        let Channels { pass, relu, activation, .. } = *self;
        let activations = activation.map_or_else(Vec::new, |f| spec::kernel_of(f).0);
        let rank = self.problem.rows.len() - usize::from(matches!(config.form, Form::Images { .. }));
        let operands = of_stage(stage, pass, relu || activation.is_some(), &all);
        // A launch whose CTAs wait for each other begins when the chip is free.
        let overlaps = self.overlaps && !matches!(stage, Stage::Fused | Stage::Kept);
        let Config { form, vector, .. } = config;
        Spec { stage, pass, relu, activations, form, vector, rank, double, overlaps, operands }.reduced_to_stage()
    }

    /// The launches.
    fn stages(&self, config: Config) -> Vec<Stage> {
        match config.launches {
            Launches::Fused => return vec![Stage::Fused],
            Launches::Alone => return vec![Stage::Alone],
            Launches::Kept { .. } => return vec![Stage::Kept],
            Launches::Each => {}
        }
        let writes_elements = match self.pass {
            Pass::Statistics => false,
            Pass::Forward => true,
            Pass::Backward => self.problem.operand("dx").is_some(),
        };
        [Stage::Sums, Stage::Join].into_iter().chain(writes_elements.then_some(Stage::Apply)).collect()
    }

    /// How many neighbours along channels, or along the innermost dim of the rows, one access may take: the largest of 8, 4, 2 and 1 that all strides
    /// and offsets allow, at most 16 bytes of the narrowest element.
    fn neighbours(&self, along_channels: bool) -> u32 {
        let (rows, channels) = (&self.problem.rows, self.problem.channels);
        let rank = rows.len();
        let (along, extent) = if along_channels { (rank, channels) } else { (rank.saturating_sub(1), rows.last().copied().unwrap_or(1)) };
        let mut bits = extent | 8;
        let mut narrowest = 8;
        for (_, view) in self.operands().into_iter().filter(|(name, _)| name.is_whole()) {
            if extent < 2 || view.strides[along] != 1 {
                return 1;
            }
            narrowest = narrowest.min(view.dtype.bytes());
            bits |= view.offset;
            let dims = rows.iter().chain([&channels]).zip(&view.strides).enumerate();
            bits |= dims.filter(|&(dim, (&extent, _))| dim != along && extent > 1).fold(0, |bits, (_, (_, stride))| bits | stride);
        }
        (1 << bits.trailing_zeros()).min(16 / narrowest as u32)
    }

    /// The same along the planes of an image's channels, where these lie one behind the other; 1 where they do not, and where no gradient is asked for.
    fn image_neighbours(&self) -> u32 {
        let (rows, channels) = (&self.problem.rows, self.problem.channels);
        let Some((&plane, outer)) = rows.split_last() else { return 1 };
        if self.pass != Pass::Backward || plane < 2 || channels * plane >= 1 << 24 {
            return 1;
        }
        let mut bits = (channels * plane) | 8;
        let mut narrowest = 8;
        for (_, view) in self.operands().into_iter().filter(|(name, _)| name.is_whole()) {
            let (strides, along) = view.strides.split_at(outer.len());
            if along != [1, plane] {
                return 1;
            }
            narrowest = narrowest.min(view.dtype.bytes());
            bits |= view.offset;
            bits |= strides.iter().zip(outer).filter(|(_, extent)| **extent > 1).fold(0, |bits, (stride, _)| bits | stride);
        }
        (1 << bits.trailing_zeros()).min(16 / narrowest as u32)
    }

    /// Elements of a channel that stand beside each other in the place of channels.
    fn plane(&self, config: Config) -> u64 {
        if matches!(config.form, Form::Images { .. }) { self.problem.rows.last().copied().unwrap_or(1) } else { 1 }
    }

    /// Bytes that cross the memory bus for an element; a sector where its neighbours are not a warp's.
    fn bytes_of_element(&self, name: Name, dtype: DType, config: &Config) -> f64 {
        let along = match config.form {
            Form::Planes | Form::Images { .. } => self.problem.rows.len().checked_sub(1),
            Form::Lines { .. } => Some(self.problem.rows.len()),
        };
        let view = self.problem.operand(name.word());
        let is_beside = along.zip(view).is_none_or(|(along, view)| view.strides[along] <= 1);
        if is_beside { dtype.bytes() as f64 } else { 32.0 }
    }

    /// Whether CTAs may have whole channels: what all CTAs at work have read still lies in L2 when they read it again.
    fn fits_alone(&self, config: Config) -> bool {
        let spec = self.spec(Stage::Alone, config);
        let blocks = self.grid(config).blocks;
        let read: usize =
            self.operands().iter().filter(|(name, _)| name.is_whole() && !spec.is_written(*name)).map(|(_, view)| view.dtype.bytes()).sum();
        let of_cta = self.problem.count() as f64 * f64::from(spec.width()) * read as f64;
        let at_work = f64::from(blocks.min(self.sm_count * spec.ctas_per_sm()));
        at_work * of_cta <= ALONE_SHARE * self.l2_bytes
    }

    /// Bytes that the sums read of an element.
    fn bytes_read_first(&self, spec: &Spec) -> f64 {
        f64::from(spec.kept_bytes().iter().sum::<u32>()) / f64::from(spec.vector)
    }

    /// Ways of teams: as many as keep their blocks in shared memory; along channels, whose blocks may be larger than the chip's, also one, and two of which
    /// one works while the other waits.
    fn kept(&self, form: Form, vector: u32) -> Vec<Config> {
        let config = |teams: u32| Config { form, vector, launches: Launches::Kept { teams } };
        let spec = self.spec(Stage::Kept, config(1));
        let writes_elements = self.pass == Pass::Forward || self.problem.operand("dx").is_some();
        let of_sm = spec.ctas_per_sm() * (spec.kept_shared_bytes() + RESERVED_BYTES);
        let is_held = self.overlaps && of_sm <= self.shared_bytes_per_sm;
        if !writes_elements || self.problem.is_empty() || !spec.can_keep() || !is_held {
            return Vec::new();
        }
        let Grid { blocks, points, .. } = self.grid(config(1));
        let resident = self.sm_count * spec.ctas_per_sm();
        let room = spec.room_rows() * spec.lines();
        let fit = (resident / points.div_ceil(room).max(1)).clamp(1, blocks);
        let mut teams = vec![blocks.div_ceil(blocks.div_ceil(fit))];
        if form != Form::Planes {
            teams.extend([1, 2]);
        }
        teams.retain(|&teams| teams <= blocks);
        teams.sort_unstable();
        teams.dedup();
        teams.into_iter().map(config).collect()
    }

    /// The same for all stages, each of which the chip holds as a whole.
    fn grid(&self, config: Config) -> Grid {
        let spec = &self.spec(Stage::Sums, config);
        let stages = self.stages(Config { launches: Launches::Each, ..config });
        let ctas_per_sm = stages.into_iter().map(|stage| self.spec(stage, config).ctas_per_sm()).min().unwrap_or(1);
        let plane = self.plane(config);
        let points = (self.problem.count() / plane / u64::from(spec.elements_of_point())) as u32;
        let blocks = ((self.problem.channels * plane) as u32).div_ceil(spec.width()).max(1);
        let elements_of_point = spec.elements_of_point();
        if config.launches == Launches::Alone {
            return Grid { blocks, teams: blocks, points, points_of_part: points, parts: 1, elements_of_point };
        }
        let lines = spec.lines();
        if let Launches::Kept { teams } = config.launches {
            let spec = self.spec(Stage::Kept, config);
            // Whole turns, so that all of a part may be kept.
            let parts = (self.sm_count * spec.ctas_per_sm() / teams).max(1);
            let points_of_part = points.div_ceil(parts).next_multiple_of(lines * spec.rows_of_turn());
            return Grid { blocks, teams, points, points_of_part, parts: points.div_ceil(points_of_part).max(1), elements_of_point };
        }
        // As many CTAs as the chip holds, each with a few turns at least.
        let wanted = (self.sm_count * ctas_per_sm / blocks).max(1);
        let least = lines * 2;
        let points_of_part = points.div_ceil(wanted).next_multiple_of(lines).max(least);
        Grid { blocks, teams: blocks, points, points_of_part, parts: points.div_ceil(points_of_part), elements_of_point }
    }

    fn arguments(
        &self,
        spec: &Spec,
        grid: Grid,
        plane: u64,
        parts: [Address; 2],
        joined: [Address; 2],
        arrivals: Option<Address>,
    ) -> KernelArgs {
        let p = &self.problem;
        let (eps, momentum) = match &p.function {
            ChannelFunction::Forward { eps, momentum, .. } => (eps.0, momentum.0),
            _ => (0.0, 0.0),
        };
        let all = self.operands();
        let views = |whole: bool| {
            let names = spec.operands.iter().filter(move |(name, _)| name.is_whole() == whole);
            names.filter_map(|(name, _)| all.iter().find(|(known, _)| known == name).map(|(_, view)| view)).collect::<Vec<_>>()
        };
        let is_image = matches!(spec.form, Form::Images { .. });
        let of_channel = |view: &View| {
            let strides = view.strides.last().copied().into_iter().collect();
            strided::argument(&View { strides, ..view.clone() }, &[0])
        };
        let whole = |view: &View| {
            let mut strides = view.strides.clone();
            if is_image {
                // Elements of planes, which lie side by side, in the place of channels.
                strides.pop();
            }
            WholeArgs::of(&View { strides, ..view.clone() })
        };
        let mut extents: Vec<u32> = p.rows.iter().map(|&extent| extent as u32).collect();
        if let (Some(inner), Form::Planes) = (extents.last_mut(), spec.form) {
            *inner /= spec.vector;
        }
        extents.truncate(spec.rank);
        let [parts_to, parts_from, joined_to, joined_from] = spec.scratch();
        let elements = if spec.stage == Stage::Join { grid.elements_of_point } else { 1 };
        // A join adds up the parts of all elements of an image that are the channel's.
        let parts_of_channel = if spec.stage == Stage::Join { grid.parts * plane as u32 } else { grid.parts };
        let chosen = self.activation.map(spec::kernel_of);
        let mut attributes = self.activation.map_or_else(Vec::new, |f| functions::parted(f).1);
        attributes.resize(spec.attributes(), 0.0);
        let attributes = attributes.into_iter().map(HostNumber::Fixed).collect();
        KernelArgs {
            channels: if is_image { (p.channels * plane) as u32 } else { p.channels as u32 },
            plane: is_image.then_some(plane as u32),
            blocks: if spec.stage == Stage::Kept { grid.parts } else { grid.blocks },
            teams: (spec.stage == Stage::Kept).then_some([grid.teams, grid.blocks]),
            points: grid.points * elements,
            points_of_part: grid.points_of_part * elements,
            parts: parts_of_channel,
            count: p.count() as f64,
            eps,
            kept: 1.0 - momentum,
            taken: momentum,
            extents,
            wholes: views(true).into_iter().map(whole).collect(),
            vectors: views(false).into_iter().map(of_channel).collect(),
            parts_to: parts_to.then_some(parts),
            parts_from: parts_from.then_some(parts),
            joined_to: joined_to.then_some(joined),
            joined_from: joined_from.then_some(joined),
            activation: chosen.filter(|_| spec.activations.len() > 1).map(|(_, place)| place as u32),
            attributes,
            arrivals,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(words: &str) -> Result<Channels, Refusal> {
        let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
        Channels::accept(&problem, &Arch::h200())
    }

    fn names(words: &str) -> Vec<String> {
        let accepted = accepted(words).expect("taken");
        accepted.configs().iter().map(|config| Channels::knobs(config).to_string()).collect()
    }

    #[test]
    fn vectors_run_along_what_is_neighbours_in_memory() {
        let last = names("batch_norm statistics bf16 rows=802816 channels=64 mean=f32 m2=f32:channel");
        assert_eq!(last[..2], ["across=8,launches=3,vector=8", "across=8,launches=1,vector=8"]);
        assert!(last.iter().all(|name| !name.contains("across=32")), "{last:?}: half of the threads would have no channel");
        let wide = names("batch_norm statistics bf16 rows=50176 channels=256 mean=f32");
        assert!(wide.iter().any(|name| name == "across=32,launches=3,vector=8"), "{wide:?}");
        let first = names("batch_norm statistics f32 rows=32x3136 channels=64 x=nchw mean=f32");
        assert_eq!(first[0], "across=0,launches=3,vector=4");
        // 49 elements in a plane begin anywhere.
        let odd = names("batch_norm statistics bf16 rows=32x49 channels=64 x=nchw mean=f32");
        assert_eq!(odd[0], "across=0,launches=3,vector=1");
        let ragged = names("batch_norm statistics bf16 rows=3136 channels=63 mean=f32");
        assert!(ragged.iter().all(|name| name.ends_with("vector=1")), "{ragged:?}");
    }

    #[test]
    fn every_config_lays_all_elements_over_the_grid() {
        for words in [
            "batch_norm statistics bf16 rows=802816 channels=64 mean=f32",
            "batch_norm statistics bf16 rows=1 channels=2048 mean=f32",
            "batch_norm statistics f32 rows=32x3136 channels=63 x=nchw mean=f32",
            "batch_norm statistics f32 rows=7 channels=100000 mean=f32",
        ] {
            let accepted = accepted(words).expect("taken");
            for config in accepted.configs() {
                let spec = accepted.spec(Stage::Sums, config);
                let Grid { blocks, teams, points, points_of_part, parts, elements_of_point } = accepted.grid(config);
                assert_eq!(u64::from(points * elements_of_point), accepted.problem.count(), "{words}: {config:?}");
                assert!(points_of_part * (parts - 1) < points && points <= points_of_part * parts, "{words}: {config:?}");
                assert!(u64::from(blocks * spec.width()) >= accepted.problem.channels, "{words}: {config:?}");
                let is_resident = matches!(config.launches, Launches::Fused | Launches::Kept { .. });
                assert!(!is_resident || teams * parts <= 132 * spec.ctas_per_sm(), "{words}: {config:?}");
            }
        }
    }

    #[test]
    fn common_activations_have_one_kernel_and_others_their_own() {
        let kernels = |activation: &str| {
            let words = format!("batch_norm backward bf16 rows=401408 channels=96 {activation} bias=f32:channel dx=nhwc");
            let accepted = accepted(&words).expect("taken");
            let config = accepted.configs().into_iter().find(|config| config.launches == Launches::Each).expect("three launches");
            accepted.stages(config).into_iter().map(|stage| accepted.spec(stage, config).name()).collect::<Vec<_>>()
        };
        let silu = kernels("activation=silu");
        let catalog = Channels::catalog(Target::Sm90a);
        for name in [&silu[0], &silu[2]] {
            assert!(name.contains("silu_hard_swish_clamp"), "{name}");
        }
        assert_eq!(catalog.iter().filter(|kernel| kernel.name().contains("silu_hard_swish_clamp")).count(), 22);
        assert_eq!((kernels("activation=hard_swish"), kernels("activation=clamp[lower=0.0,upper=6.0]")), (silu.clone(), silu.clone()));
        // A join knows no activation.
        let mish = kernels("activation=mish");
        assert!(mish[0].contains("_mish_") && mish[0] != silu[0] && mish[1] == silu[1], "{mish:?}");
    }

    #[test]
    fn what_is_too_large_is_refused_by_name() {
        let refusal = accepted("batch_norm statistics f32 rows=4294967296 channels=1 mean=f32").expect_err("too many elements");
        assert_eq!(refusal.reason, Reason::Extent);
        let other = accepted("gemm bf16 m=4 n=4 k=4").expect_err("a product");
        assert_eq!(other.reason, Reason::Problem);
    }

    #[test]
    fn teams_keep_channels_as_whole_where_they_can() {
        let teams = |words: &str| {
            let accepted = accepted(words).expect("taken");
            let kept: Vec<Config> =
                accepted.configs().into_iter().filter(|config| matches!(config.launches, Launches::Kept { .. })).collect();
            kept.into_iter().map(|config| (Channels::knobs(&config).to_string(), accepted.grid(config))).collect::<Vec<_>>()
        };
        let first = teams("batch_norm forward bf16 rows=128x3136 channels=256 eps=1e-5 x=nchw y=nchw");
        let [(name, grid)] = first.as_slice() else { panic!("{first:?}") };
        assert_eq!(name, "across=0,launches=1,teams=29,vector=8");
        // A channel of 803 KB lies in nine CTAs, six turns of 16 KB in each.
        assert_eq!((grid.parts, grid.points_of_part, grid.rounds()), (9, 6 * 4 * THREADS, 9));
        let last = teams("batch_norm backward bf16 rows=401408 channels=256 dx=nhwc");
        let names: Vec<&str> = last.iter().map(|(name, _)| name.as_str()).collect();
        assert!(names.contains(&"across=8,launches=1,teams=1,vector=8"), "{names:?}");
        assert!(teams("batch_norm statistics bf16 rows=401408 channels=256 mean=f32").is_empty());
    }
}
