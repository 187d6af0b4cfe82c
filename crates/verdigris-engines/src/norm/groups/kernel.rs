//! The kernels: sums over the channels of a part, the parts of each group joined, the result.
//!
//! **Thread coordinates.** A *point* is an element of a channel or, along planes, a vector of neighbouring ones. Along lines the threads of a CTA stand
//! `across` along channels, a vector of neighbours each, and the others along points; along planes a CTA has one channel. A CTA goes through a *part* of
//! the points of one image, and the grid through channel blocks, parts and images.
//!
//! **Sums** are of channels, never of groups, so that groups need not begin with a block or a vector. They lie `[images, channels, parts]`: those of a
//! group are neighbours. Of a part, with `m` its mean:
//!
//! ```text
//! m     M2 = Σ (x − m)²     of a gradient also     A = Σ dy     B = Σ dy · (x − m)
//! ```
//!
//! Means are less the group's first element, its *shift*, until the join: else those of channels would be rounded each by itself, by what a mean far from
//! 0 rounds away. (Where statistics are given, there are no moments and `B = Σ dy · (x − μ) · r`.) A group of `K` elements with the mean `μ` is the sum
//! of its parts:
//!
//! ```text
//! v = Σ (M2 + n · (m − μ)²) / K         r = 1 / √(v + eps)         Σ dy · (x − μ) = Σ (B + (m − μ) · A)
//! ```

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::inst::Special;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::geometry::Form;
use crate::fuse::compute;
use crate::fuse::lanes;
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::strided::{self, Packed, Strided};
use crate::fuse::value::AnyVal;
use crate::sums::moments::{Moments, pairwise};

/// Threads of a CTA.
pub(super) const THREADS: u32 = 256;
/// Its warps.
pub(super) const WARPS: u32 = THREADS / 32;
/// Points whose loads come before the first of them is used.
pub(super) const UNROLL: u32 = 4;
/// What is computed in.
type F<'k> = Val<'k, f32>;
const BYTES: u32 = 4;

/// Which part of the computation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stage {
    /// Sums of parts go to scratch.
    Sums,
    /// The parts of each group are joined; statistics are written, and kept for what follows.
    Join,
    /// What has an element for each of `x` is written, and the gradients of scale and bias.
    Apply,
}

/// What an operand is to the problem.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    X,
    Dy,
    Scale,
    Bias,
    Mean,
    Inv,
    Y,
    Dx,
    Dscale,
    Dbias,
}

impl Role {
    /// That of the problem's operand; those that it lacks are refused.
    pub(super) fn of(name: &str) -> Option<Role> {
        let roles = [Role::X, Role::Dy, Role::Scale, Role::Bias, Role::Mean, Role::Inv, Role::Y, Role::Dx, Role::Dscale, Role::Dbias];
        roles.into_iter().find(|role| role.name() == name)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Role::X => "x",
            Role::Dy => "dy",
            Role::Scale => "scale",
            Role::Bias => "bias",
            Role::Mean => "mean",
            Role::Inv => "inv",
            Role::Y => "y",
            Role::Dx => "dx",
            Role::Dscale => "dscale",
            Role::Dbias => "dbias",
        }
    }

    /// Whether it has an element for each of `x`.
    pub(super) fn is_whole(self) -> bool {
        matches!(self, Role::X | Role::Dy | Role::Y | Role::Dx)
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    pub stage: Stage,
    pub backward: bool,
    /// Whether the statistics of a gradient are given.
    pub given: bool,
    /// Whether the gradient of `x` is wanted.
    pub dx: bool,
    pub zero_centred: bool,
    pub form: Form,
    /// Neighbours that one access takes.
    pub vector: u32,
    /// Threads that join the parts of a group, a warp or all.
    pub team: u32,
    /// Whether the launch begins before the one in front of it ends, and waits in the kernel, as Hopper can.
    pub overlaps: bool,
    /// What the stage reads and writes, in the order of the problem's operands.
    pub operands: Vec<(Role, DType)>,
}

impl Spec {
    /// Of the operands of a problem those of its stage, and without what does not shape it.
    pub(super) fn reduced_to_stage(mut self) -> Spec {
        let has = |role: Role| self.operands.iter().any(|&(known, _)| known == role);
        self.given = self.backward && has(Role::Inv);
        self.dx = has(Role::Dx);
        self.zero_centred = self.zero_centred && has(Role::Scale);
        let (given, dx, backward) = (self.given, self.dx, self.backward);
        let sums_vectors = has(Role::Dscale) || has(Role::Dbias);
        match self.stage {
            Stage::Sums => {
                self.operands.retain(|&(role, _)| matches!(role, Role::X | Role::Dy) || (given && matches!(role, Role::Mean | Role::Inv)));
                (self.dx, self.zero_centred, self.team) = (false, false, 0);
            }
            Stage::Join => {
                self.operands.retain(|&(role, _)| match role {
                    Role::X => !given,
                    Role::Mean | Role::Inv => true,
                    Role::Scale => dx,
                    _ => false,
                });
                (self.form, self.vector) = (Form::Planes, 1);
                self.zero_centred = self.zero_centred && dx;
            }
            Stage::Apply => {
                self.operands.retain(|&(role, _)| match role {
                    Role::X | Role::Dy | Role::Scale => dx || !backward,
                    Role::Mean | Role::Inv => false,
                    _ => true,
                });
                self.team = 0;
                self.given = given && sums_vectors;
                self.zero_centred = self.zero_centred && (dx || !backward);
                if backward && !dx {
                    (self.form, self.vector) = (Form::Planes, 1);
                }
            }
        }
        self
    }

    fn has(&self, role: Role) -> bool {
        self.operands.iter().any(|&(known, _)| known == role)
    }

    fn name(&self) -> String {
        let pass = if self.backward { "backward" } else { "forward" };
        let stage = match self.stage {
            Stage::Sums => "sums",
            Stage::Join => "join",
            Stage::Apply => "apply",
        };
        let flag = |set: bool, word: &str| if set { format!("_{word}") } else { String::new() };
        let flags =
            [flag(self.given, "given"), flag(self.dx && self.stage == Stage::Join, "dx"), flag(self.zero_centred, "centred")].concat();
        let shape = match (self.stage, self.form) {
            (Stage::Join, _) => format!("team{}", self.team),
            (_, Form::Lines { across }) => format!("lines{across}x{}", self.vector),
            (_, Form::Planes) => format!("planesx{}", self.vector),
        };
        let operands: String = self.operands.iter().map(|(role, dtype)| format!("_{}{dtype}", role.name())).collect();
        let overlapped = flag(self.overlaps, "overlapped");
        format!("norm_groups_{pass}_{stage}{flags}_{shape}{operands}{overlapped}")
    }

    pub(super) fn target(&self) -> Target {
        let own = if self.overlaps { Target::Sm90 } else { Target::Sm80 };
        compute::target_of_all(self.operands.iter().map(|(_, dtype)| *dtype)).max(own)
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: self.ctas_per_sm(), cluster: 1 };
        build(header, |k| self.body(k))
    }

    /// CTAs that an SM holds at once, by which registers are cut: a gradient holds more values of each channel.
    pub(super) fn ctas_per_sm(&self) -> u32 {
        if self.backward { 2 } else { 3 }
    }

    /// Threads along channels.
    fn across(&self) -> u32 {
        match self.form {
            Form::Lines { across } => across,
            Form::Planes => 1,
        }
    }

    /// Points that a CTA has at a time.
    pub(super) fn lines(&self) -> u32 {
        THREADS / self.across()
    }

    /// Channels of a thread.
    fn channels_of_thread(&self) -> u32 {
        if self.form == Form::Planes { 1 } else { self.vector }
    }

    /// Channels of a CTA.
    pub(super) fn width(&self) -> u32 {
        self.across() * self.channels_of_thread()
    }

    /// Elements of a channel that a point has.
    pub(super) fn elements_of_point(&self) -> u32 {
        if self.form == Form::Planes { self.vector } else { 1 }
    }

    /// Whether a part has sums of its own from which statistics come.
    fn has_moments(&self) -> bool {
        !(self.backward && self.given)
    }

    /// Numbers that a channel of a part has: its moments, and the two sums of a gradient.
    pub(super) fn sums(&self) -> usize {
        2 * (usize::from(self.has_moments()) + usize::from(self.backward))
    }

    /// Numbers that are kept of a group: mean and root, and of a gradient the mean less the shift and the line that is added. Where statistics are given, the gradients of scale and
    /// bias alone need none.
    pub(super) fn kept(&self) -> usize {
        match (self.backward, self.stage) {
            (true, Stage::Apply) if self.given && !self.dx => 0,
            (true, _) => 5,
            (false, _) => 2,
        }
    }

    /// Whether the gradients of scale or bias are added up here.
    fn sums_vectors(&self) -> bool {
        self.stage == Stage::Apply && (self.has(Role::Dscale) || self.has(Role::Dbias))
    }

    /// Whether the sums of parts are read.
    pub(super) fn reads_sums(&self) -> bool {
        self.stage == Stage::Join || self.sums_vectors()
    }

    fn is_written(&self, role: Role) -> bool {
        match role {
            Role::Y | Role::Dx | Role::Dscale | Role::Dbias => true,
            Role::Mean | Role::Inv => !self.backward,
            Role::X | Role::Dy | Role::Scale | Role::Bias => false,
        }
    }

    fn declarations(&self) -> Vec<OperandDecl> {
        let of = |&(role, dtype): &(Role, DType)| match role {
            // A join reads the first element of a group.
            Role::X if self.stage == Stage::Join => strided::declaration(dtype, 2, false),
            _ if role.is_whole() => strided::lines_declaration(dtype, 2, self.vector, self.is_written(role)),
            Role::Dscale | Role::Dbias => strided::declaration(dtype, 1, true),
            _ => strided::declaration(dtype, 2, self.is_written(role)),
        };
        self.operands.iter().map(of).collect()
    }

    fn arrays(&self, are_there: bool, many: usize) -> Vec<u32> {
        if are_there { vec![BYTES; many] } else { Vec::new() }
    }

    fn body<'k>(&self, k: Kernel<'k>) {
        let values = Values::declare(k, self);
        if self.overlaps {
            k.griddep_wait();
            k.griddep_launch();
        }
        let run = Run::new(k, self, values);
        match self.stage {
            Stage::Sums => run.sums(&run.tile(k.cta())),
            Stage::Join => run.join(),
            Stage::Apply => {
                if self.sums_vectors() {
                    run.vectors();
                }
                // The parts that were read last may still lie in L2: they come first.
                let tile = || run.tile(k.special(Special::GridX) - 1 - k.cta());
                match (self.backward, self.dx) {
                    (false, _) => run.normalize(&tile()),
                    (true, true) => run.input_gradient(&tile()),
                    (true, false) => {}
                }
            }
        }
    }
}

verdigris_kir::parameters! {
    /// Of every stage.
    pub(super) struct Values / KernelArgs of Spec as spec {
        pub images: u32,
        pub channels: u32,
        /// Channel blocks and parts, by which the number of a CTA becomes block, part and image.
        pub blocks: Divide,
        pub parts: Divide,
        /// All of a channel; of a join, whose points have one element each, the elements.
        pub points: u32,
        /// Of all parts but the last.
        pub points_of_part: u32,
        pub groups: Divide,
        pub channels_of_group: Divide,
        /// Elements of a group.
        pub count: f64,
        pub eps: f64,
        pub operands: Vec<OperandArgs> = spec.declarations(),
        /// Arrays `[images, channels, parts]`.
        pub sums_to: Vec<Write> = spec.arrays(spec.stage == Stage::Sums, spec.sums()),
        pub sums_from: Vec<Read> = spec.arrays(spec.reads_sums(), spec.sums()),
        /// Arrays `[images, groups]`.
        pub kept_to: Vec<Write> = spec.arrays(spec.stage == Stage::Join, spec.kept()),
        pub kept_from: Vec<Read> = spec.arrays(spec.stage == Stage::Apply, spec.kept()),
    }
}

/// The tile of a CTA, and the thread's place in it.
struct Tile<'k> {
    image: Val<'k, u32>,
    part: Val<'k, u32>,
    /// The first channel of the CTA.
    block: Val<'k, u32>,
    /// The thread's first channel, and whether there is one; else the last ones that there are.
    channel: Val<'k, u32>,
    inside: Val<'k, bool>,
    /// The thread along channels, and along points.
    column: Val<'k, u32>,
    line: Val<'k, u32>,
    /// The points of the part.
    begin: Val<'k, u32>,
    end: Val<'k, u32>,
}

/// An operand with an element for each of `x`, at the tile's image, and at its channel along planes.
struct Whole<'k> {
    operand: Strided<'k>,
    form: Form,
    vector: u32,
    /// The vector of the thread's channels; along planes the channel, which the operand is at.
    number: Val<'k, u32>,
}

impl<'k> Whole<'k> {
    fn load(&self, point: Val<'k, u32>) -> Packed<'k> {
        match self.form {
            Form::Lines { .. } => self.operand.line(&[point], self.vector).load_once(self.number, false),
            Form::Planes => self.operand.line(&[], self.vector).load_once(point, false),
        }
    }

    fn store(&self, point: Val<'k, u32>, values: &[F<'k>]) {
        match self.form {
            Form::Lines { .. } => self.operand.line(&[point], self.vector).store(self.number, values),
            Form::Planes => self.operand.line(&[], self.vector).store(point, values),
        }
    }
}

/// A kernel being built.
struct Run<'s, 'k> {
    k: Kernel<'k>,
    spec: &'s Spec,
    values: Values<'k>,
    operands: Vec<(Role, Strided<'k>)>,
}

impl<'s, 'k> Run<'s, 'k> {
    fn new(k: Kernel<'k>, spec: &'s Spec, mut values: Values<'k>) -> Self {
        let declared = std::mem::take(&mut values.operands);
        let operands = spec.operands.iter().zip(declared).map(|(&(role, dtype), operand)| (role, Strided::new(dtype, operand))).collect();
        Run { k, spec, values, operands }
    }

    fn operand(&self, role: Role) -> Option<&Strided<'k>> {
        self.operands.iter().find(|(known, _)| *known == role).map(|(_, operand)| operand)
    }

    /// An operand that the stage always has, from the thread's channels on.
    fn whole(&self, role: Role, tile: &Tile<'k>) -> Whole<'k> {
        let (form, vector) = (self.spec.form, self.spec.vector);
        let operand = self.operand(role).expect("an operand that the stage always has");
        match form {
            Form::Lines { .. } => Whole { operand: operand.at(&[tile.image]), form, vector, number: tile.channel >> vector.ilog2() },
            Form::Planes => Whole { operand: operand.at(&[tile.image, tile.channel]), form, vector, number: tile.channel },
        }
    }

    fn tile(&self, cta: Val<'k, u32>) -> Tile<'k> {
        let (k, spec, values) = (self.k, self.spec, &self.values);
        let (rest, block) = values.blocks.split(cta);
        let (image, part) = values.parts.split(rest);
        let (column, line) = match spec.form {
            Form::Lines { across } => (k.thread() & (across - 1), k.thread() >> across.ilog2()),
            Form::Planes => (k.constant(0), k.thread()),
        };
        let many = spec.channels_of_thread();
        let block = block * spec.width();
        let channel = block + column * many;
        let begin = part * values.points_of_part;
        let end = (begin + values.points_of_part).min(values.points);
        let inside = channel.lt(values.channels);
        Tile { image, part, block, channel: channel.min(values.channels - many), inside, column, line, begin, end }
    }

    /// Runs `f` for the thread's points, several at a time; in reverse, the last turns come first.
    fn turns(&self, tile: &Tile<'k>, reverse: bool, f: impl Fn(&[Val<'k, u32>])) {
        let (k, lines) = (self.k, self.spec.lines());
        let span = lines * UNROLL;
        let whole = (tile.end - tile.begin) & !(span - 1);
        let first = tile.begin + tile.line;
        let turn = |at: Val<'k, u32>| {
            let points: Vec<_> = (0..UNROLL).map(|i| first + at + i * lines).collect();
            f(&points);
        };
        let rest = || k.range_step(first + whole, tile.end, lines, |point| f(&[point]));
        if reverse {
            rest();
            k.range_step(0, whole, span, |at| turn(whole - span - at));
        } else {
            k.range_step(0, whole, span, turn);
            rest();
        }
    }

    /// The values of each of the thread's channels, of several points.
    fn by_channel(&self, points: &[Packed<'k>]) -> Vec<Vec<F<'k>>> {
        let points: Vec<Vec<F<'k>>> = points.iter().map(|point| point.values(self.k)).collect();
        match self.spec.form {
            Form::Planes => vec![points.concat()],
            Form::Lines { .. } => {
                (0..self.spec.vector as usize).map(|channel| points.iter().map(|point| point[channel]).collect()).collect()
            }
        }
    }

    /// The thread's channels.
    fn channels(&self, tile: &Tile<'k>) -> Vec<Val<'k, u32>> {
        (0..self.spec.channels_of_thread()).map(|i| tile.channel + i).collect()
    }

    /// The channel of an element of a point, among the thread's.
    fn channel_of(&self, element: usize) -> usize {
        if self.spec.form == Form::Planes { 0 } else { element }
    }

    fn group_of(&self, channel: Val<'k, u32>) -> Val<'k, u32> {
        self.values.channels_of_group.quotient(channel)
    }

    /// `γ` of a channel, where there is a scale.
    fn gamma(&self, image: Val<'k, u32>, channel: Val<'k, u32>) -> Option<F<'k>> {
        let scale = self.operand(Role::Scale)?.load::<f32>(&[image, channel]);
        Some(if self.spec.zero_centred { scale + 1.0 } else { scale })
    }

    /// What is kept of the group of a channel.
    fn kept<const N: usize>(&self, image: Val<'k, u32>, channel: Val<'k, u32>) -> [F<'k>; N] {
        let row = image * self.values.groups.value() + self.group_of(channel);
        std::array::from_fn(|which| self.k.ld_global(self.values.kept_from[which].at(row, BYTES), 0))
    }

    // ---- sums -----------------------------------------------------------------------------------------------------------

    fn sums(&self, tile: &Tile<'k>) {
        let (k, spec) = (self.k, self.spec);
        let x = self.whole(Role::X, tile);
        let dy = spec.backward.then(|| self.whole(Role::Dy, tile));
        // Differences are from the group's mean where it is given, else from its first element.
        let groups: Vec<_> = self.channels(tile).into_iter().map(|channel| self.group_of(channel)).collect();
        let of_groups = |f: &dyn Fn(Val<'k, u32>) -> F<'k>| groups.iter().map(|&group| f(group)).collect::<Vec<_>>();
        let given = |role: Role| self.operand(role).map(|given| of_groups(&|group| given.load(&[tile.image, group])));
        let inv = given(Role::Inv);
        let shift = given(Role::Mean).unwrap_or_else(|| of_groups(&|group| self.first_element(tile.image, group)));
        let moments = spec.has_moments().then(|| Moments::new(k, shift.clone()));
        let zeros = || (0..shift.len()).map(|_| k.var(0.0f32)).collect::<Vec<_>>();
        let gradient = spec.backward.then(|| [zeros(), zeros()]);
        self.turns(tile, false, |points| {
            let load = |from: &Whole<'k>| points.iter().map(|&point| from.load(point)).collect::<Vec<_>>();
            let (x, dy) = (load(&x), dy.as_ref().map(load));
            let x = self.by_channel(&x);
            if let Some(moments) = &moments {
                moments.take(&x);
            }
            if let (Some([plain, weighted]), Some(dy)) = (&gradient, dy) {
                for (channel, dy) in self.by_channel(&dy).iter().enumerate() {
                    plain[channel].set(plain[channel].get() + pairwise(dy));
                    let deviation = |x: F<'k>| match &inv {
                        Some(inv) => (x - shift[channel]) * inv[channel],
                        None => x - shift[channel],
                    };
                    let products = dy.iter().zip(&x[channel]);
                    weighted[channel].set(products.fold(weighted[channel].get(), |sum, (&dy, &x)| k.fma(dy, deviation(x), sum)));
                }
            }
        });
        let of_moments = moments.iter().flat_map(|moments| [&moments.mean, &moments.m2]);
        let all = of_moments.chain(gradient.iter().flatten());
        let own: Vec<Vec<F<'k>>> = all.map(|vars| vars.iter().map(|var| var.get()).collect()).collect();
        match spec.form {
            Form::Planes => {
                let joined = self.over_threads(tile, &own);
                k.when(k.thread().eq(0), || self.store_part(tile, tile.channel, &joined));
            }
            Form::Lines { .. } => self.over_lines(tile, &own),
        }
    }

    /// Elements of a channel among the points of the part that are `residue` modulo `modulus`.
    fn elements(&self, tile: &Tile<'k>, modulus: u32, residue: Val<'k, u32>) -> F<'k> {
        let points = (tile.end - tile.begin + (modulus - 1) - residue) >> modulus.ilog2();
        (points * self.spec.elements_of_point()).to_f32()
    }

    /// What all threads know of their one channel.
    fn over_threads(&self, tile: &Tile<'k>, own: &[Vec<F<'k>>]) -> Vec<F<'k>> {
        let k = self.k;
        let add = |x: F<'k>, y: F<'k>| x + y;
        let over = |value: F<'k>| lanes::over_team(k, THREADS, value, &add);
        let mut joined = Vec::new();
        let mut rest = own;
        if self.spec.has_moments() {
            let elements = self.elements(tile, THREADS, tile.line);
            let whole = self.elements(tile, 1, k.constant(0));
            let mean = over(elements * own[0][0]).div(whole);
            let apart = own[0][0] - mean;
            joined.extend([mean, over(k.fma(elements * apart, apart, own[1][0]))]);
            rest = &own[2..];
        }
        joined.extend(rest.iter().map(|sum| over(sum[0])));
        joined
    }

    /// Joins what the lines of threads know of each channel of the CTA, in two steps: first all threads take `vector` lines of a channel each, then one
    /// thread a channel what these have left.
    fn over_lines(&self, tile: &Tile<'k>, own: &[Vec<F<'k>>]) {
        let (k, spec) = (self.k, self.spec);
        let (lines, width) = (spec.lines(), spec.width());
        let array = lines * width * BYTES;
        let shared = k.shared("lines", own.len() as u32 * array, 16).address();
        let place = shared + (tile.line * width + tile.column * spec.vector) * BYTES;
        for (number, values) in own.iter().enumerate() {
            for (chunk, values) in values.chunks(4).enumerate() {
                let offset = i64::from(number as u32 * array + chunk as u32 * 4 * BYTES);
                match values {
                    [value] => k.st_shared(place, offset, *value),
                    values => k.st_shared_vector(place, offset, values),
                }
            }
        }
        k.bar_sync();
        let (column, segment, segments) = (k.thread() & (width - 1), k.thread() >> width.ilog2(), THREADS / width);
        let base = shared + column * BYTES;
        if spec.vector > 1 {
            let first = base + segment * (width * BYTES);
            let entries: Vec<(F<'k>, i64)> = (0..spec.vector)
                .map(|i| (self.elements(tile, lines, segment + i * segments), i64::from(i * segments * width * BYTES)))
                .collect();
            let joined = self.joined(&entries, self.elements(tile, segments, segment), |which, offset| {
                k.ld_shared(first, offset + i64::from(which as u32 * array))
            });
            for (number, value) in joined.into_iter().enumerate() {
                k.st_shared(first, i64::from(number as u32 * array), value);
            }
            k.bar_sync();
        }
        let channel = tile.block + column;
        k.when(segment.eq(0) & channel.lt(self.values.channels), || {
            let entries: Vec<(F<'k>, i64)> =
                (0..segments).map(|i| (self.elements(tile, segments, k.constant(i)), i64::from(i * width * BYTES))).collect();
            let joined = self.joined(&entries, self.elements(tile, 1, k.constant(0)), |which, offset| {
                k.ld_shared(base, offset + i64::from(which as u32 * array))
            });
            self.store_part(tile, channel, &joined);
        });
    }

    /// Joins entries, of which each has so many elements and lies somewhere, and `whole` elements in all.
    fn joined(&self, entries: &[(F<'k>, i64)], whole: F<'k>, load: impl Fn(usize, i64) -> F<'k>) -> Vec<F<'k>> {
        let k = self.k;
        let each = |which: usize| entries.iter().map(|&(_, at)| load(which, at)).collect::<Vec<_>>();
        let mut joined = Vec::new();
        if self.spec.has_moments() {
            let (means, m2s) = (each(0), each(1));
            let sum = entries.iter().zip(&means).fold(k.constant(0.0f32), |sum, (&(elements, _), &mean)| k.fma(elements, mean, sum));
            let mean = sum.div(whole.max(1.0));
            let m2 = entries.iter().zip(means.iter().zip(&m2s)).fold(k.constant(0.0f32), |sum, (&(elements, _), (&own, &m2))| {
                let apart = own - mean;
                sum + k.fma(elements * apart, apart, m2)
            });
            joined.extend([mean, m2]);
        }
        let rest = joined.len()..self.spec.sums();
        joined.extend(rest.map(|which| pairwise(&each(which))));
        joined
    }

    /// Stores the sums of a channel of the part; differences in products are from the shift still.
    fn store_part(&self, tile: &Tile<'k>, channel: Val<'k, u32>, joined: &[F<'k>]) {
        let (k, values) = (self.k, &self.values);
        let place = (tile.image * values.channels + channel).mul_wide(values.parts.value()) + tile.part.widen();
        let stored = match *joined {
            [mean, m2, plain, weighted] => vec![mean, m2, plain, k.fma(-mean, plain, weighted)],
            _ => joined.to_vec(),
        };
        for (to, value) in values.sums_to.iter().zip(stored) {
            k.st_global(to.address() + place * u64::from(BYTES), 0, value);
        }
    }

    // ---- the parts joined -------------------------------------------------------------------------------------------------

    /// One of the arrays of sums, at an entry behind the first of a channel or a group.
    fn sum_at(&self, which: usize, first: Val<'k, u64>, entry: Val<'k, u32>) -> F<'k> {
        self.k.ld_global(self.values.sums_from[which].address() + (first + entry.widen()) * u64::from(BYTES), 0)
    }

    /// `A` and `B` of an entry, with differences from the group's mean, which is less the shift.
    fn gradient_at(&self, first: Val<'k, u64>, entry: Val<'k, u32>, mean: F<'k>) -> [F<'k>; 2] {
        let k = self.k;
        if !self.spec.has_moments() {
            return [self.sum_at(0, first, entry), self.sum_at(1, first, entry)];
        }
        let (plain, weighted) = (self.sum_at(2, first, entry), self.sum_at(3, first, entry));
        [plain, k.fma(self.sum_at(0, first, entry) - mean, plain, weighted)]
    }

    /// Sums over entries, a thread of the team each, in the same order always; every thread of the team gets them.
    fn over_entries<const N: usize>(
        &self,
        member: Val<'k, u32>,
        team: u32,
        entries: Val<'k, u32>,
        f: impl Fn(Val<'k, u32>) -> [F<'k>; N],
    ) -> [F<'k>; N] {
        let k = self.k;
        let sums: [_; N] = std::array::from_fn(|_| k.var(0.0f32));
        k.range_unrolled((entries + (team - 1) - member) >> team.ilog2(), UNROLL, |turn| {
            sums.iter().zip(f(member + turn * team)).for_each(|(sum, value)| sum.set(sum.get() + value));
        });
        let of_warp = sums.map(|sum| lanes::over_lanes(k, 32, sum.get(), &|x, y| x + y));
        lanes::over_warps(k, team, of_warp, &|x, y| std::array::from_fn(|i| x[i] + y[i]))
    }

    /// A team a group.
    fn join(&self) {
        let (k, spec, values) = (self.k, self.spec, &self.values);
        let team = spec.team;
        let (member, own) = (k.thread() & (team - 1), k.cta() * (THREADS / team) + (k.thread() >> team.ilog2()));
        let rows = values.images * values.groups.value();
        // All threads stay together; those without a group take the last one and write nothing.
        let (inside, row) = (own.lt(rows) & member.eq(0), own.min(rows - 1));
        let (image, group) = values.groups.split(row);
        let entries = values.channels_of_group.value() * values.parts.value();
        let first = row.mul_wide(entries);
        let count: F<'k> = compute::Compute::from_f64(values.count);
        let [mean, inv, apart] = match (spec.given, self.operand(Role::Mean), self.operand(Role::Inv)) {
            (true, Some(mean), Some(inv)) => [mean.load(&[image, group]), inv.load(&[image, group]), k.constant(0.0)],
            _ => {
                let [apart, inv] = self.statistics(member, entries, first, count);
                [self.first_element(image, group) + apart, inv, apart]
            }
        };
        let mut kept = vec![mean, inv, apart];
        if spec.backward && spec.dx {
            let [of_g, of_product] = self.over_entries(member, team, entries, |entry| {
                let sums = self.gradient_at(first, entry, apart);
                let channel = group * values.channels_of_group.value() + values.parts.quotient(entry);
                match self.gamma(image, channel) {
                    Some(gamma) => sums.map(|sum| sum * gamma),
                    None => sums,
                }
            });
            let of_h = if spec.has_moments() { of_product * inv } else { of_product };
            kept.extend([of_h, of_g].map(|sum| -sum.div(count)));
        }
        k.when(inside, || {
            if !spec.backward {
                for (to, value) in [(Role::Mean, mean), (Role::Inv, inv)] {
                    if let Some(to) = self.operand(to) {
                        to.store(&[image, group], AnyVal::of(value));
                    }
                }
            }
            values.kept_to.iter().zip(&kept).for_each(|(to, value)| k.st_global(to.at(row, BYTES), 0, *value));
        });
    }

    /// The first element of a group.
    fn first_element(&self, image: Val<'k, u32>, group: Val<'k, u32>) -> F<'k> {
        let (k, spec) = (self.k, self.spec);
        let channel = group * self.values.channels_of_group.value();
        let x = self.operand(Role::X).expect("a stage that wants it reads x");
        match (spec.stage, spec.form) {
            (Stage::Sums, Form::Lines { .. }) => x.line(&[image, k.constant(0)], spec.vector).element(channel),
            _ => x.load(&[image, channel]),
        }
    }

    /// The mean less the shift, and the root, of a group.
    fn statistics(&self, member: Val<'k, u32>, entries: Val<'k, u32>, first: Val<'k, u64>, count: F<'k>) -> [F<'k>; 2] {
        let (k, team, values) = (self.k, self.spec.team, &self.values);
        let elements = |entry: Val<'k, u32>| {
            let (_, part) = values.parts.split(entry);
            (values.points - part * values.points_of_part).min(values.points_of_part).to_f32()
        };
        let [sum] = self.over_entries(member, team, entries, |entry| [elements(entry) * self.sum_at(0, first, entry)]);
        let mean = sum.div(count);
        let [m2] = self.over_entries(member, team, entries, |entry| {
            let apart = self.sum_at(0, first, entry) - mean;
            [k.fma(elements(entry) * apart, apart, self.sum_at(1, first, entry))]
        });
        let eps: F<'k> = compute::Compute::from_f64(values.eps);
        [mean, (m2.max_nan(0.0).div(count) + eps).rsqrt()]
    }

    // ---- the result -------------------------------------------------------------------------------------------------------

    /// The gradients of scale and bias: a warp a channel goes through its parts of all images.
    fn vectors(&self) {
        let (k, values) = (self.k, &self.values);
        let parts = values.parts.value();
        let warp = k.uniform(k.thread() >> 5);
        k.range_step(k.cta() * WARPS + warp, values.channels, k.special(Special::GridX) * WARPS, |channel| {
            let [plain, weighted] = self.over_entries(k.lane(), 32, values.images * parts, |entry| {
                let (image, part) = values.parts.split(entry);
                let first = (image * values.channels + channel).mul_wide(parts);
                if !self.spec.has_moments() {
                    return [self.sum_at(0, first, part), self.sum_at(1, first, part)];
                }
                let [_, inv, apart] = self.kept(image, channel);
                let [plain, weighted] = self.gradient_at(first, part, apart);
                [plain, weighted * inv]
            });
            k.when(k.lane().eq(0), || {
                for (to, value) in [(Role::Dscale, weighted), (Role::Dbias, plain)] {
                    if let Some(to) = self.operand(to) {
                        to.store(&[channel], AnyVal::of(value));
                    }
                }
            });
        });
    }

    fn normalize(&self, tile: &Tile<'k>) {
        let k = self.k;
        let (x, y) = (self.whole(Role::X, tile), self.whole(Role::Y, tile));
        let of_channel = |channel: Val<'k, u32>| {
            let [mean, inv] = self.kept(tile.image, channel);
            (mean, inv, self.gamma(tile.image, channel), self.operand(Role::Bias).map(|bias| bias.load::<f32>(&[tile.image, channel])))
        };
        let factors: Vec<_> = self.channels(tile).into_iter().map(of_channel).collect();
        self.turns(tile, true, |points| {
            let loaded: Vec<Packed<'k>> = points.iter().map(|&point| x.load(point)).collect();
            for (&point, loaded) in points.iter().zip(&loaded) {
                let results: Vec<F<'k>> = (loaded.values::<f32>(k).into_iter().enumerate())
                    .map(|(i, x)| {
                        let (mean, inv, gamma, bias) = factors[self.channel_of(i)];
                        let h = (x - mean) * inv;
                        match (gamma, bias) {
                            (Some(gamma), Some(bias)) => k.fma(h, gamma, bias),
                            (Some(gamma), None) => h * gamma,
                            (None, Some(bias)) => h + bias,
                            (None, None) => h,
                        }
                    })
                    .collect();
                k.when(tile.inside, || y.store(point, &results));
            }
        });
    }

    /// `dx = r · (γ · dy + h · slope + offset)`, of which the join has left the last two: means of sums, less than 0. (With `r` in them they would be too small for f32 where `x` is
    /// near its bounds.)
    fn input_gradient(&self, tile: &Tile<'k>) {
        let k = self.k;
        let [x, dy, dx] = [Role::X, Role::Dy, Role::Dx].map(|role| self.whole(role, tile));
        let of_channel = |channel: Val<'k, u32>| {
            let [mean, inv, _, slope, offset] = self.kept(tile.image, channel);
            (mean, inv, self.gamma(tile.image, channel), slope, offset)
        };
        let factors: Vec<_> = self.channels(tile).into_iter().map(of_channel).collect();
        self.turns(tile, true, |points| {
            let load = |from: &Whole<'k>| points.iter().map(|&point| from.load(point)).collect::<Vec<_>>();
            let (loaded_dy, loaded_x) = (load(&dy), load(&x));
            for (place, &point) in points.iter().enumerate() {
                let pairs = loaded_dy[place].values::<f32>(k).into_iter().zip(loaded_x[place].values::<f32>(k));
                let results: Vec<F<'k>> = pairs
                    .enumerate()
                    .map(|(i, (dy, x))| {
                        let (mean, inv, gamma, slope, offset) = factors[self.channel_of(i)];
                        let rest = k.fma((x - mean) * inv, slope, offset);
                        gamma.map_or_else(|| dy + rest, |gamma| k.fma(dy, gamma, rest)) * inv
                    })
                    .collect();
                k.when(tile.inside, || dx.store(point, &results));
            }
        });
    }
}
