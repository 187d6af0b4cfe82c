//! `norm.groups`: group and instance norm of images, channels first and last, and their gradients ([`verdigris_graph::NormProblem`] has the formulas).
//!
//! It takes normalization by mean and variance over the points of an image and neighbouring channels: channels are neighbours in memory (*lines*: any
//! number of them, in groups of any size) or points are (*planes*, and rows of any length without a scale along them). Scale and bias are one a channel,
//! or one a channel of each image, or absent; statistics may be given and written. There is no residual, and no gradient of the bias alone.
//!
//! **Method.** Groups of planes that fit are read once: a warp, a CTA or a cluster of CTAs holds one in shared memory ([`resident`]), and a launch behind it adds up what are the
//! gradients of scale and bias. Others go in parts: a first launch reads `x` (a gradient `dy` too) and leaves sums of the channels of parts, a second one joins the parts of each group (a
//! warp or a CTA a group), a third goes through the elements once more, from the parts that were read last, which may still lie in L2. An image is cut into
//! as many parts as fill the chip. The sums of a gradient are of each channel, so that those of scale and bias come of the same read: the third launch
//! adds them up. Statistics that are not given come of that read too. Threads take up to 16 bytes at a time.
//!
//! **When it wins.** Gradients of channels-first images; channels-last images, whose groups `norm.strided` reads element by element; rows that are too few, or too long to be held in
//! registers, for `norm.rows`.
//!
//! **Numbers.** In f32. Squares are of differences from the mean so far, and parts are joined by the formula of parallel variances
//! ([`crate::sums::moments`]); a mean far from 0 costs nothing. Results repeat bit for bit on a device, and depend on its count of SMs.
//!
//! **Source.** Channel sums of parts that two launches read are those of apex's group norm for channels-last images (github.com/NVIDIA/apex).

mod geometry;
mod kernel;
mod resident;

use verdigris_graph::{NormKind, NormPass, NormProblem, Problem, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::walk::LIMIT;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::fuse::operand::OperandArgs;
use crate::fuse::strided;
use crate::sums::moments::require_eps;
use geometry::{Form, Geometry};
use kernel::{KernelArgs, Role, Spec, Stage, THREADS, UNROLL, WARPS};
use resident::{ResidentArgs, ResidentSpec, Shares, Team};

/// Threads along channels that are neighbours, at the most: lines of 128 bytes, or of 512.
const ACROSS: [u32; 2] = [8, 32];
/// Entries of a group that a warp joins by itself.
const WARP_ENTRIES: u64 = 128;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    problem: NormProblem,
    geometry: Geometry,
    sm_count: u32,
    l2_bytes: f64,
    shared_bytes_per_cta: u32,
    overlaps: bool,
}

/// One way to do it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Config {
    form: Form,
    /// Neighbours that one access takes.
    vector: u32,
    /// Who has a group and holds it; none where launches go through it in parts. Knobs `resident`, the CTAs, `team`, the threads of each, and `room`, the KiB that each holds.
    team: Option<Team>,
}

/// How a problem is laid over the grid.
#[derive(Clone, Copy, Debug)]
struct Grid {
    blocks: u32,
    images: u32,
    points: u32,
    points_of_part: u32,
    parts: u32,
    elements_of_point: u32,
}

impl Grid {
    fn ctas(self) -> u64 {
        u64::from(self.blocks) * u64::from(self.images) * u64::from(self.parts)
    }
}

impl Algorithm for Groups {
    const ID: EngineId = EngineId { name: "norm.groups", number: 702 };
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Norm(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is norm", problem.kind())));
        };
        let is_layer = problem.kind == NormKind::Layer;
        Self::ID.require(is_layer, Reason::Problem, format_args!("root-mean-square norm, taken is by mean and variance"))?;
        Self::ID.require(problem.compute == DType::F32, Reason::DType, format_args!("computed in {}, taken is f32", problem.compute))?;
        let (rows, extent) = (problem.row_count(), problem.row_elements());
        Self::ID.require(extent > 0 && rows > 0, Reason::Extent, format_args!("{rows} rows of {extent} elements, taken are some"))?;
        Self::ID.require(extent < LIMIT, Reason::Extent, format_args!("rows of {extent} elements, taken below 2^31"))?;
        for (name, ..) in problem.operands() {
            Self::ID.require(Role::of(name).is_some(), Reason::Epilogue, format_args!("{name}, taken is normalization by itself"))?;
        }
        if let NormPass::Backward { dx, dscale, .. } = &problem.pass {
            let has_products = dx.is_some() || dscale.is_some();
            Self::ID.require(
                has_products,
                Reason::Problem,
                format_args!("the gradient of the bias alone, taken is one of x or of the scale"),
            )?;
        }
        let Some(geometry) = Geometry::of(problem) else {
            let told =
                format_args!("rows {:?} of {:?}, taken are images of neighbouring channels or points", problem.rows, problem.elements);
            return Err(Self::ID.refusal(Reason::Layout, told));
        };
        let channels = geometry.images * geometry.channels;
        Self::ID.require(channels < 1 << 24, Reason::Extent, format_args!("{channels} channels of images, taken below 2^24"))?;
        require_eps(Self::ID, problem.eps.0, problem.compute)?;
        let target = compute::target_of_all(problem.operands().iter().map(|(_, view, _)| view.dtype));
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        let (sm_count, l2_bytes, overlaps) = (arch.sm_count, arch.l2_bytes as f64, arch.runs(Target::Sm90));
        Ok(Groups { problem: problem.clone(), geometry, sm_count, l2_bytes, shared_bytes_per_cta: arch.shared_bytes_per_cta, overlaps })
    }

    fn configs(&self) -> Vec<Config> {
        let wholes = self.operands().into_iter().filter(|(role, _)| role.is_whole()).map(|(_, view)| view);
        let vector = self.geometry.neighbours(wholes);
        if !self.geometry.channels_last {
            let parts = Config { form: Form::Planes, vector, team: None };
            return self.resident().into_iter().chain([parts]).collect();
        }
        let vectors = self.geometry.channels / u64::from(vector);
        let mut forms = Vec::new();
        for most in ACROSS {
            // Half of the threads at least have channels.
            let across = vectors.next_power_of_two().min(u64::from(most)) as u32;
            if !forms.contains(&across) && (most == ACROSS[0] || vectors > u64::from(most / 2)) {
                forms.push(across);
            }
        }
        forms.into_iter().map(|across| Config { form: Form::Lines { across }, vector, team: None }).collect()
    }

    fn knobs(&Config { form, vector, team }: &Config) -> Knobs {
        let across = match form {
            Form::Lines { across } => across,
            Form::Planes => 0,
        };
        let team =
            team.into_iter().flat_map(|Team { ctas, threads, room_kib }| [("resident", ctas), ("team", threads), ("room", room_kib)]);
        Knobs::new([("across", across), ("vector", vector)].into_iter().chain(team))
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, config: &Config) -> Work {
        if let Some(team) = config.team {
            return self.work_of_resident(team, config.vector);
        }
        let elements = self.geometry.images as f64 * self.geometry.channels as f64 * self.geometry.points as f64;
        let bytes_of = |stage: Stage| -> f64 {
            let spec = self.spec(stage, *config);
            spec.operands.iter().filter(|(role, _)| role.is_whole()).map(|(_, dtype)| elements * dtype.bytes() as f64).sum()
        };
        let (first, again) = (bytes_of(Stage::Sums), bytes_of(Stage::Apply));
        // What the third launch reads first was read last, and may lie in L2; and it is read beside what is written.
        let kept = (0.5 * self.l2_bytes).min(0.5 * again).min(first);
        let ctas = self.grid(*config).ctas() as f64;
        // Of a CTA that joins its threads' sums and reads what is kept, each time; and of an element.
        let issued = ctas * f64::from(WARPS) * 250.0 + elements / 32.0 * (12.0 + 20.0 / f64::from(config.vector));
        // Parts of a plane are short: on an H200 these took 1.2 to 1.8 times as long as their bytes.
        let slow = if config.form == Form::Planes { 1.3 } else { 1.0 };
        let stream = Stream::new(Traffic::Lines, (first + again - kept) * slow).of_ctas(ctas).issuing(issued);
        // Launches that begin while the one in front ends hide a part of what each costs.
        Work::default().beside([stream.in_launches(if self.overlaps { 2.0 } else { 3.0 })])
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        if let Some(team) = config.team {
            return Ok(self.lower_resident(team, config.vector));
        }
        let (p, geometry) = (&self.problem, &self.geometry);
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        let grid = self.grid(*config);
        let bytes = p.compute.bytes() as u64;
        let stages = [Stage::Sums, Stage::Join, Stage::Apply].map(|stage| self.spec(stage, *config));
        let sums_bytes = geometry.images * geometry.channels * u64::from(grid.parts) * bytes;
        let sums = SUMS[..stages[0].sums()].iter().map(|name| program.add_scratch(name, sums_bytes)).collect::<Vec<_>>();
        let kept_bytes = geometry.images * geometry.groups * bytes;
        let kept = KEPT[..stages[1].kept()].iter().map(|name| program.add_scratch(name, kept_bytes)).collect::<Vec<_>>();
        for spec in stages {
            let rows = (geometry.images * geometry.groups) as u32;
            let ctas = match spec.stage {
                Stage::Join => rows.div_ceil(THREADS / spec.team),
                // The gradients of scale and bias alone.
                Stage::Apply if spec.backward && !spec.dx => (geometry.channels as u32).div_ceil(WARPS),
                Stage::Sums | Stage::Apply => grid.ctas() as u32,
            };
            let args = self.arguments(&spec, grid, &sums, &kept).bound(&spec);
            let overlaps = spec.overlaps;
            let launch = Launch::new(spec.kernel(), [ctas, 1, 1], args);
            program.launch(if overlaps { launch.overlapping() } else { launch });
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        // Chips that launch kernels one after the other have them without the overlap, compiled when they are first asked for.
        if target < Target::Sm90 {
            return Vec::new();
        }
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let vector = 16 / dtype.bytes() as u32;
            let lines = ACROSS.map(|across| (Form::Lines { across }, vector));
            for (form, vector) in lines.into_iter().chain([(Form::Planes, vector)]) {
                for (names, team) in CATALOG.iter().flat_map(|names| [(names, 32), (names, THREADS)]) {
                    for stage in [Stage::Sums, Stage::Join, Stage::Apply] {
                        let operands = names.iter().filter_map(|name| Role::of(name)).map(|role| (role, dtype)).collect();
                        let backward = names.contains(&"dy");
                        let (given, dx, zero_centred, overlaps) = (false, false, false, true);
                        specs.push(
                            Spec { stage, backward, given, dx, zero_centred, form, vector, team, overlaps, operands }.reduced_to_stage(),
                        );
                    }
                }
            }
        }
        // What adds up the sums that resident groups leave.
        for dtype in [DType::F16, DType::Bf16] {
            let operands = [Role::Dscale, Role::Dbias].map(|role| (role, dtype)).to_vec();
            specs.push(Spec {
                stage: Stage::Apply,
                backward: true,
                given: true,
                dx: false,
                zero_centred: false,
                form: Form::Planes,
                vector: 1,
                team: 0,
                overlaps: true,
                operands,
            });
        }
        let mut seen = std::collections::HashSet::new();
        specs.retain(|spec| spec.target() <= target && seen.insert(spec.clone()));
        let resident = resident::catalog().into_iter().filter(|spec| spec.target() <= target).map(ResidentSpec::kernel);
        specs.into_iter().map(Spec::kernel).chain(resident).collect()
    }
}

/// What a network's layers ask for.
const CATALOG: &[&[&str]] = &[
    &["x", "scale", "bias", "y"],
    &["x", "y"],
    &["x", "dy", "scale", "dx", "dscale", "dbias"],
    &["x", "dy", "dx"],
    &["x", "dy", "scale", "dscale", "dbias"],
];

/// The numbers of a channel of a part, and of a group, in the order of the kernels; some have fewer.
const SUMS: [&str; 4] = ["first sums", "second sums", "third sums", "fourth sums"];
const KEPT: [&str; 5] = ["mean", "inv", "shifted mean", "slope", "offset"];

impl Groups {
    fn operands(&self) -> Vec<(Role, &View)> {
        self.problem.operands().into_iter().filter_map(|(name, view, _)| Some((Role::of(name)?, view))).collect()
    }

    fn spec(&self, stage: Stage, config: Config) -> Spec {
        let backward = matches!(self.problem.pass, NormPass::Backward { .. });
        let operands = self.operands().into_iter().map(|(role, view)| (role, view.dtype)).collect();
        let Config { form, vector, .. } = config;
        let (zero_centred, overlaps) = (self.problem.zero_centred, self.overlaps);
        let spec = Spec { stage, backward, given: false, dx: false, zero_centred, form, vector, team: 32, overlaps, operands };
        let mut spec = spec.reduced_to_stage();
        if stage == Stage::Join && self.entries(config) > WARP_ENTRIES {
            spec.team = THREADS;
        }
        spec
    }

    /// What of the problem the kernel of resident groups is made of; none where it does not take the problem.
    fn resident_spec(&self, team: Team, vector: u32) -> Option<ResidentSpec> {
        let (backward, is_wanted) = match &self.problem.pass {
            NormPass::Forward { .. } => (false, true),
            NormPass::Backward { dx, .. } => (true, dx.is_some()),
        };
        let all = self.operands();
        let has = |role: Role| all.iter().any(|&(known, _)| known == role);
        let operands: Vec<(Role, DType)> =
            all.iter().filter(|(role, _)| resident::takes(*role)).map(|(role, view)| (*role, view.dtype)).collect();
        let spec = ResidentSpec {
            team,
            backward,
            given: backward && has(Role::Inv),
            leaves_sums: has(Role::Dscale) || has(Role::Dbias),
            zero_centred: self.problem.zero_centred && has(Role::Scale),
            vector,
            overlaps: self.overlaps,
            operands,
        };
        (is_wanted && (team.ctas == 1 || self.overlaps)).then_some(spec)
    }

    /// How the channels of a group are shared out; none where shared memory has no room for them.
    fn shares(&self, team: Team, vector: u32) -> Option<Shares> {
        let held: u32 =
            self.operands().iter().filter(|(role, _)| resident::is_held(*role)).map(|(_, view)| vector * view.dtype.bytes() as u32).sum();
        team.share(self.geometry.channels_of_group(), self.geometry.points / u64::from(vector), held)
    }

    /// The ways by which groups are read once, along planes whose accesses are copied: the fewest CTAs of each number of threads, and of small ones twice as many.
    fn resident(&self) -> Vec<Config> {
        let operands = self.operands();
        let wholes = || operands.iter().filter(|(role, _)| role.is_whole()).map(|(_, view)| *view);
        let widest = wholes().map(|view| view.dtype.bytes() as u32).max().unwrap_or(16);
        let vector = self.geometry.neighbours(wholes()).min((16 / widest).max(1));
        let is_copied = wholes().all(|view| matches!(vector as usize * view.dtype.bytes(), 4 | 8 | 16));
        let mut teams: Vec<Team> = Vec::new();
        let fits = |team: &Team| team.shared_bytes() <= self.shared_bytes_per_cta && self.shares(*team, vector).is_some();
        for team in Team::all().filter(|team| is_copied && fits(team)) {
            let alike = teams.iter().filter(|known| (known.threads, known.room_kib) == (team.threads, team.room_kib)).count();
            let is_needed = match team.ctas_per_sm() {
                4 => alike < 2,
                2 => alike < 1,
                // One CTA to an SM, where others do not hold the group.
                _ => alike < 1 && teams.iter().all(|known| known.room_kib == team.room_kib),
            };
            if is_needed && self.resident_spec(team, vector).is_some() {
                teams.push(team);
            }
        }
        teams.into_iter().map(|team| Config { form: Form::Planes, vector, team: Some(team) }).collect()
    }

    fn ctas_of_resident(&self, team: Team) -> u32 {
        let rows = (self.geometry.images * self.geometry.groups) as u32;
        rows.div_ceil(team.of_cta()) * team.ctas
    }

    fn work_of_resident(&self, team: Team, vector: u32) -> Work {
        let elements = self.geometry.images as f64 * self.geometry.channels as f64 * self.geometry.points as f64;
        let operands = self.operands();
        let bytes: f64 = operands.iter().filter(|(role, _)| role.is_whole()).map(|(_, view)| elements * view.dtype.bytes() as f64).sum();
        let ctas = f64::from(self.ctas_of_resident(team));
        let of_chip = f64::from(self.sm_count * team.ctas_per_sm());
        // A CTA loads, then computes, then stores, beside others that do something else: one that is alone on its SM leaves memory idle meanwhile. CTAs of a cluster begin together.
        // The factors here are rounded ones of a fit to 100 configs of 24 problems that were timed on an H200, and were judged by no others.
        let alone = [1.44, 1.15, 1.0][team.ctas_per_sm().ilog2() as usize];
        let together = 1.0 + 0.14 * f64::from(team.ctas.ilog2());
        let last_wave = if ctas > of_chip { 0.8 + 0.2 * (ctas / of_chip).ceil() / (ctas / of_chip) } else { 1.0 };
        let backward = matches!(self.problem.pass, NormPass::Backward { .. });
        // Of an element, a vector and a piece: counted in what the assembler makes of the kernels. Lanes of a piece that have no vector take as long as others.
        let [of_element, of_vector, of_piece] = if backward { [15.0, 32.0, 150.0] } else { [8.5, 26.0, 100.0] };
        let warps = f64::from(team.cta_warps());
        let [pieces, depth] = self.shares(team, vector).map_or([1.0; 2], |shares| {
            let of_warp = (self.geometry.channels_of_group() * u64::from(shares.pieces)).div_ceil(u64::from(team.warps()));
            [of_warp as f64 * ctas * warps, f64::from(shares.vectors_of_piece) / 32.0]
        });
        let issued = pieces * (depth * (f64::from(vector) * of_element + of_vector) + of_piece) + ctas * warps * 200.0;
        // Few warps of an SM wait for their own instructions.
        let warps_of_sm = ctas.min(of_chip) * warps / f64::from(self.sm_count);
        let issued = issued * (27.0 / warps_of_sm).clamp(1.0, 1.5) * last_wave;
        let sums = self.resident_spec(team, vector).is_some_and(|spec| spec.leaves_sums);
        let launches = if sums { 2.0 } else { 1.0 };
        let stream = Stream::new(Traffic::Lines, bytes * alone * together * last_wave).issuing(issued);
        // As many bytes are on their way as the CTAs of an SM hold.
        let busy = (ctas * f64::from(team.ctas_per_sm())).min(2.0 * f64::from(self.sm_count)).max(ctas);
        Work::default().beside([stream.of_ctas(busy).in_launches(launches)])
    }

    fn lower_resident(&self, team: Team, vector: u32) -> Program {
        let (p, geometry) = (&self.problem, &self.geometry);
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        let spec = self.resident_spec(team, vector).expect("a config has a spec");
        let shares = self.shares(team, vector).expect("a config has its shares");
        let sums_bytes = geometry.images * geometry.channels * u64::from(team.ctas) * p.compute.bytes() as u64;
        let sums: Vec<Address> =
            SUMS[..if spec.leaves_sums { 2 } else { 0 }].iter().map(|name| program.add_scratch(name, sums_bytes)).collect();
        let args = ResidentArgs {
            rows: (geometry.images * geometry.groups) as u32,
            groups: geometry.groups as u32,
            channels_of_group: geometry.channels_of_group() as u32,
            vectors: (geometry.points / u64::from(vector)) as u32,
            vectors_of_cta: shares.vectors_of_cta,
            vectors_of_piece: shares.vectors_of_piece,
            pieces: shares.pieces,
            count: p.row_elements() as f64,
            eps: p.eps.0,
            operands: spec.operands.iter().map(|&(role, _)| self.argument(role)).collect(),
            sums_to: sums.clone(),
        };
        let args = args.bound(&spec);
        let mut launch = |kernel: KernelRef, ctas: u32, args| {
            let launch = Launch::new(kernel, [ctas, 1, 1], args);
            program.launch(if self.overlaps { launch.overlapping() } else { launch });
        };
        let leaves_sums = spec.leaves_sums;
        launch(spec.kernel(), self.ctas_of_resident(team), args);
        if leaves_sums {
            // The gradients of scale and bias come of sums as those whose statistics are given leave them.
            let spec = self.spec_of_vectors();
            let grid =
                Grid { blocks: 1, images: geometry.images as u32, points: 0, points_of_part: 0, parts: team.ctas, elements_of_point: 1 };
            let args = self.arguments(&spec, grid, &sums, &[]).bound(&spec);
            launch(spec.kernel(), (geometry.channels as u32).div_ceil(WARPS), args);
        }
        program
    }

    /// Of the launch that adds up the sums of channels alone.
    fn spec_of_vectors(&self) -> Spec {
        let config = Config { form: Form::Planes, vector: 1, team: None };
        let mut spec = self.spec(Stage::Apply, config);
        spec.operands.retain(|(role, _)| matches!(role, Role::Dscale | Role::Dbias));
        Spec { given: true, dx: false, zero_centred: false, form: Form::Planes, vector: 1, ..spec }
    }

    /// Entries of sums that a group has.
    fn entries(&self, config: Config) -> u64 {
        self.geometry.channels_of_group() * u64::from(self.grid(config).parts)
    }

    /// The same for the launches that go through elements, so that the second meets what the first read last.
    fn grid(&self, config: Config) -> Grid {
        let (geometry, spec) = (&self.geometry, self.spec(Stage::Sums, config));
        let points = (geometry.points / u64::from(spec.elements_of_point())) as u32;
        let blocks = (geometry.channels as u32).div_ceil(spec.width());
        let images = geometry.images as u32;
        // Twice as many CTAs as the chip holds, each with whole turns of several points.
        let wanted = (2 * self.sm_count * spec.ctas_per_sm()).div_ceil(blocks.saturating_mul(images)).max(1);
        let points_of_part = points.div_ceil(wanted).next_multiple_of(spec.lines() * UNROLL);
        Grid { blocks, images, points, points_of_part, parts: points.div_ceil(points_of_part), elements_of_point: spec.elements_of_point() }
    }

    fn view(&self, role: Role) -> View {
        let all = self.operands();
        let (_, view) = all.into_iter().find(|(known, _)| *known == role).expect("operands of a stage are the problem's");
        view.clone()
    }

    /// An operand with an element for each channel of an image.
    fn argument_of_channels(&self, role: Role) -> OperandArgs {
        let view = self.view(role);
        let [image, channel, _] = self.geometry.strides(&view);
        strided::argument(&View { strides: vec![image, channel], ..view }, &[])
    }

    fn argument(&self, role: Role) -> OperandArgs {
        let (view, geometry) = (self.view(role), &self.geometry);
        let [image, channel, point] = geometry.strides(&view);
        let strides = match role {
            _ if role.is_whole() => vec![image, if geometry.channels_last { point } else { channel }],
            Role::Mean | Role::Inv => geometry.strides_of_rows(&view).to_vec(),
            Role::Dscale | Role::Dbias => vec![channel],
            _ => return self.argument_of_channels(role),
        };
        strided::argument(&View { strides, ..view }, &[])
    }

    fn arguments(&self, spec: &Spec, grid: Grid, sums: &[Address], kept: &[Address]) -> KernelArgs {
        let (p, geometry) = (&self.problem, &self.geometry);
        let operand = |&(role, _): &(Role, DType)| match role {
            Role::X if spec.stage == Stage::Join => self.argument_of_channels(role),
            _ => self.argument(role),
        };
        // A join counts elements.
        let elements = if spec.stage == Stage::Join { grid.elements_of_point } else { 1 };
        let when = |used: bool, list: &[Address]| if used { list.to_vec() } else { Vec::new() };
        KernelArgs {
            images: grid.images,
            channels: geometry.channels as u32,
            blocks: grid.blocks,
            parts: grid.parts,
            points: grid.points * elements,
            points_of_part: grid.points_of_part * elements,
            groups: geometry.groups as u32,
            channels_of_group: geometry.channels_of_group() as u32,
            count: p.row_elements() as f64,
            eps: p.eps.0,
            operands: spec.operands.iter().map(operand).collect(),
            sums_to: when(spec.stage == Stage::Sums, sums),
            sums_from: when(spec.reads_sums(), sums),
            kept_to: when(spec.stage == Stage::Join, kept),
            kept_from: when(spec.stage == Stage::Apply, &kept[..spec.kept().min(kept.len())]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(words: &str) -> Result<Groups, Refusal> {
        let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
        Groups::accept(&problem, &Arch::h200())
    }

    fn names(words: &str) -> Vec<String> {
        let accepted = accepted(words).unwrap_or_else(|refusal| panic!("{words}: {refusal}"));
        accepted.configs().iter().map(|config| Groups::knobs(config).to_string()).collect()
    }

    /// A normalization of images `[n, c, points]` by groups, channels last or first.
    fn images(pass: &str, [n, c, points, groups]: [u64; 4], channels_last: bool) -> String {
        let own = c / groups;
        let (elements, whole, along) = match (own, channels_last) {
            (1, true) => (format!("{points}"), format!("({},1,{c})", points * c), vec![0, 1, 0]),
            (1, false) => (format!("{points}"), format!("({},{points},1)", points * c), vec![0, 1, 0]),
            (_, true) => (format!("{points}x{own}"), format!("({},{own},{c},1)", points * c), vec![0, own, 0, 1]),
            (_, false) => (format!("{own}x{points}"), format!("({},{},{points},1)", points * c, own * points), vec![0, own, 1, 0]),
        };
        let vector = along.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let operands = match pass {
            "forward" => format!("x={whole} scale=({vector}) bias=({vector}) y={whole}"),
            _ => format!("x={whole} dy={whole} scale=({vector}) dx={whole} dscale=({vector}) dbias=({vector})"),
        };
        format!("norm {pass} bf16 rows={n}x{groups} elements={elements} {operands}")
    }

    #[test]
    fn vectors_run_along_what_is_neighbours_in_memory() {
        for pass in ["forward", "backward"] {
            let of = |dims: [u64; 4], last: bool| names(&images(pass, dims, last));
            assert_eq!(of([2, 320, 64, 32], true), ["across=8,vector=8", "across=32,vector=8"]);
            assert_eq!(of([2, 64, 64, 64], true), ["across=8,vector=8"]);
            assert_eq!(of([2, 24, 64, 8], true), ["across=4,vector=8"]);
            assert_eq!(of([2, 12, 64, 3], true), ["across=4,vector=4"]);
            assert_eq!(of([2, 7, 64, 7], true), ["across=8,vector=1"]);
            assert_eq!(of([2, 320, 64, 32], false).last().map(String::as_str), Some("across=0,vector=8"));
            assert_eq!(of([2, 320, 49, 320], false), ["across=0,vector=1"]);
        }
    }

    #[test]
    fn groups_are_held_by_the_fewest_ctas() {
        let of = |pass: &str, dims: [u64; 4]| names(&images(pass, dims, false));
        let held = |[ctas, threads, room_kib]: [u32; 3]| {
            Groups::knobs(&Config { form: Form::Planes, vector: 8, team: Some(Team { ctas, threads, room_kib }) }).to_string()
        };
        let planes = |all: &[[u32; 3]]| all.iter().map(|team| held(*team)).chain(["across=0,vector=8".to_owned()]).collect::<Vec<_>>();
        let any = [[1, 32, 48], [1, 128, 48], [2, 128, 48], [1, 256, 48], [2, 256, 48], [1, 256, 104], [1, 512, 104]];
        assert_eq!(of("forward", [2, 320, 64, 32]), planes(&any));
        let some = [[4, 128, 48], [8, 128, 48], [4, 256, 48], [8, 256, 48], [2, 256, 104], [2, 512, 104]];
        assert_eq!(of("backward", [8, 320, 4096, 32]), planes(&some));
        assert_eq!(of("backward", [2, 512, 16384, 32]), planes(&[[8, 512, 216], [8, 1024, 216]]));
        assert_eq!(of("backward", [2, 512, 32768, 32]), planes(&[]), "more than eight CTAs hold");
    }

    #[test]
    fn a_share_holds_all_vectors_of_all_channels() {
        let mut shared = 0;
        for (channels, vectors) in [(1, 1), (1, 33), (8, 392), (10, 512), (40, 32), (31, 135), (7, 9), (500, 1), (2, 1000)] {
            for team in Team::all() {
                let Some(shares) = team.share(channels, vectors, 16) else { continue };
                shared += 1;
                let Shares { vectors_of_cta, vectors_of_piece, pieces } = shares;
                assert!(channels * u64::from(pieces * team.of_cta()) <= 512, "{team:?}: {shares:?}, of which there are numbers");
                let held_bytes = channels * u64::from(vectors_of_cta * team.of_cta()) * 16;
                assert!(held_bytes <= u64::from(team.room_kib << 10), "{team:?}: {shares:?}, {held_bytes} bytes");
                assert!(
                    u64::from(vectors_of_cta * team.ctas) >= vectors && u64::from(vectors_of_cta * (team.ctas - 1)) < vectors,
                    "{team:?}: {shares:?}"
                );
                assert!(
                    vectors_of_piece * pieces >= vectors_of_cta && vectors_of_piece * (pieces - 1) < vectors_of_cta,
                    "{team:?}: {shares:?}"
                );
            }
        }
        assert!(shared > 100, "{shared} shares");
    }

    #[test]
    fn no_more_is_held_than_a_chip_has_room_for() {
        let problem: Problem = images("backward", [64, 256, 3136, 32], false).parse().expect("words of a problem");
        let rooms = |shared_bytes_per_cta: u32| -> Vec<u32> {
            let arch = Arch { shared_bytes_per_cta, ..Arch::h200() };
            let accepted = Groups::accept(&problem, &arch).expect("taken");
            accepted.configs().into_iter().filter_map(|config| config.team).map(|team| team.room_kib).collect()
        };
        assert!(rooms(Arch::h200().shared_bytes_per_cta).iter().any(|&room| room > 48));
        let small = rooms(101_376);
        assert!(!small.is_empty() && small.iter().all(|&room| room == 48), "{small:?}");
    }

    #[test]
    fn kernels_take_no_more_shared_memory_than_is_counted() {
        let mut seen = 0;
        for (pass, dims) in [
            ("forward", [64, 256, 3136, 32]),
            ("backward", [64, 256, 3136, 32]),
            ("backward", [2, 512, 16384, 32]),
            ("backward", [32, 128, 784, 128]),
        ] {
            let accepted = accepted(&images(pass, dims, false)).expect("taken");
            for config in accepted.configs().into_iter().filter(|config| config.team.is_some()) {
                let program = accepted.lower(&config).expect("lowers");
                let team = config.team.expect("filtered");
                let body = program.launches().next().expect("a launch").kernel.build();
                let bytes: u32 = body.shared.iter().map(|array| array.bytes).sum();
                assert!(bytes <= team.shared_bytes() && bytes > team.room_kib << 10, "{team:?}: {bytes}");
                seen += 1;
            }
        }
        assert!(seen > 8, "{seen} kernels");
    }

    #[test]
    fn every_config_lays_all_elements_over_the_grid() {
        for dims in [[16, 64, 16384, 64], [2, 512, 16384, 32], [8, 1280, 256, 32], [8, 320, 4096, 32], [3, 7, 1, 7], [1, 40, 129, 4]] {
            for (pass, last) in [("forward", true), ("backward", true), ("forward", false), ("backward", false)] {
                let accepted = accepted(&images(pass, dims, last)).expect("taken");
                for config in accepted.configs().into_iter().filter(|config| config.team.is_none()) {
                    let spec = accepted.spec(Stage::Sums, config);
                    let Grid { blocks, points, points_of_part, parts, elements_of_point, .. } = accepted.grid(config);
                    assert_eq!(u64::from(points * elements_of_point), dims[2], "{dims:?}: {config:?}");
                    assert!(points_of_part * (parts - 1) < points && points <= points_of_part * parts, "{dims:?}: {config:?}");
                    assert!(u64::from(blocks * spec.width()) >= dims[1], "{dims:?}: {config:?}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_taken_is_refused_by_name() {
        let reason = |words: &str| accepted(words).expect_err("refused").reason;
        assert_eq!(reason("gemm bf16 m=4 n=4 k=4"), Reason::Problem);
        assert_eq!(reason("norm forward bf16 kind=rms rows=4 elements=64 x=packed y=packed"), Reason::Problem);
        assert_eq!(reason("norm forward f64 rows=4 elements=64 compute=f64 x=packed y=packed"), Reason::DType);
        assert_eq!(reason("norm forward bf16 rows=4 elements=64 x=packed residual=packed y=packed"), Reason::Epilogue);
        assert_eq!(reason("norm backward bf16 rows=4 elements=64 x=packed dy=packed dbias=rows"), Reason::Problem);
        // A scale along the points, and one of two memory formats.
        assert_eq!(reason("norm forward bf16 rows=4 elements=64 x=packed scale=elements y=packed"), Reason::Layout);
        assert_eq!(reason("norm forward bf16 rows=2x8 elements=64 x=(512,1,8) y=(512,64,1)"), Reason::Layout);
    }

    /// The engine of the family that is estimated to be fastest, and that estimate.
    fn chosen(words: &str) -> (&'static str, f64) {
        let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
        let estimates = super::super::ENGINES.iter().filter_map(|engine| {
            let candidate = engine.accept(&problem, &Arch::h200()).ok()?;
            Some((engine.id().name, candidate.cost(&candidate.best()).ok()?.us))
        });
        estimates.min_by(|a, b| a.1.total_cmp(&b.1)).expect("norm.strided takes all")
    }

    #[test]
    fn images_are_this_engines_and_rows_that_registers_hold_are_not() {
        let sizes =
            [[16, 64, 16384, 64], [4, 256, 4096, 256], [2, 512, 16384, 32], [8, 320, 4096, 32], [64, 256, 3136, 32], [8, 1280, 256, 32]];
        for dims in sizes {
            for pass in ["forward", "backward"] {
                let (engine, us) = chosen(&images(pass, dims, true));
                assert_eq!(engine, "norm.groups", "{pass} {dims:?}: {us}");
            }
        }
        for (pass, dims, engine) in [
            ("forward", [2, 512, 16384, 32], "norm.groups"),
            ("backward", [2, 512, 16384, 32], "norm.groups"),
            ("backward", [16, 64, 16384, 64], "norm.groups"),
            ("forward", [16, 64, 16384, 64], "norm.rows"),
            ("forward", [64, 256, 3136, 32], "norm.rows"),
        ] {
            assert_eq!(chosen(&images(pass, dims, false)).0, engine, "{pass} {dims:?}");
        }
        for rows in ["rows=4096 elements=1024", "rows=64 elements=768", "rows=1 elements=4096"] {
            assert_eq!(chosen(&format!("norm forward bf16 {rows} x=packed y=packed")).0, "norm.rows", "{rows}");
            assert_eq!(chosen(&format!("norm backward bf16 {rows} x=packed dy=packed dx=packed")).0, "norm.rows", "{rows}");
        }
    }
}
