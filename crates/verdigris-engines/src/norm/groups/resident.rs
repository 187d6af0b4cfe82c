//! The kernel that reads groups once, along planes: shared memory holds what is normalized, and `dy` of a gradient.
//!
//! **Thread coordinates.** A *team* has a group: a warp, or the CTAs of a cluster, which have the same share of the points of each channel. What a CTA holds of a channel is cut
//! into *pieces*, and the warps of the team take pieces of all channels by turns, a vector a lane. A thread copies to shared memory what it reads there itself, so that nobody
//! waits for another's copies.
//!
//! **Sums.** The mean `m` of some of what the CTA holds is near that of all: differences from it are summed in one pass, and what CTAs have is joined once, with `μ` the group's:
//!
//! ```text
//! D = Σ (x − m)     m' = m + D / n     M2 = Σ (x − m)² − D² / n     A = Σ γ · dy     B = Σ γ · dy · (x − m) − (m' − m) · A
//! v = Σ (M2 + n · (m' − μ)²) / K       Σ γ · dy · (x − μ) = Σ (B + (m' − μ) · A)
//! ```
//!
//! The same of each channel without `γ` are the sums from which the gradients of scale and bias come, as many parts a channel as the cluster has CTAs.

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Write};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::kernel::Role;
use crate::fuse::compute;
use crate::fuse::lanes;
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::peers::Peers;
use crate::fuse::strided::{self, Packed, Strided};
use crate::fuse::value::AnyVal;
use crate::sums::moments::pairwise;

/// What is computed in.
type F<'k> = Val<'k, f32>;
const BYTES: u32 = 4;
/// Vectors of a piece that a thread goes through together.
const UNROLL: u32 = 2;
/// Channels, and pieces of channels, that the teams of a CTA have numbers of.
const ENTRIES: u32 = 512;
/// KiB of what a CTA holds, with the threads that it may have: four, two and one of them fit on an SM. Few threads do less beside what each element asks for, many are quicker where
/// an SM has no other CTA.
const ROOMS: [(u32, [u32; 2]); 3] = [(48, [128, 256]), (104, [256, 512]), (216, [512, 1024])];
/// The most bytes of shared memory beside what is held: numbers of channels and of pieces, and what warps and CTAs tell each other.
const BESIDE_BYTES: u32 = 10 << 10;
/// Sums of the elements from which differences are taken are of these times the elements, so that none overflows: threads by elements of a vector are fewer than the reciprocal.
const SHRINK: f32 = 1.0 / 16384.0;
/// Threads of the CTAs of teams that are a warp.
const WARPS_CTA: u32 = 128;

/// Who has a group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Team {
    /// CTAs of the cluster.
    pub ctas: u32,
    /// Threads of each, or of a warp.
    pub threads: u32,
    /// What a CTA holds.
    pub room_kib: u32,
}

impl Team {
    /// All that there are.
    pub(super) fn all() -> impl Iterator<Item = Team> {
        let of_ctas = |(room_kib, threads): (u32, [u32; 2])| {
            threads.into_iter().flat_map(move |threads| [1, 2, 4, 8].map(|ctas| Team { ctas, threads, room_kib }))
        };
        [Team { ctas: 1, threads: 32, room_kib: ROOMS[0].0 }].into_iter().chain(ROOMS.into_iter().flat_map(of_ctas))
    }

    /// Threads of a CTA.
    fn cta_threads(self) -> u32 {
        self.threads.max(WARPS_CTA)
    }

    /// Teams of a CTA.
    pub(super) fn of_cta(self) -> u32 {
        self.cta_threads() / self.threads
    }

    /// Warps that share a group.
    pub(super) fn warps(self) -> u32 {
        self.threads / 32
    }

    /// The most shared memory that a CTA takes.
    pub(super) fn shared_bytes(self) -> u32 {
        (self.room_kib << 10) + BESIDE_BYTES
    }

    /// Warps of a CTA.
    pub(super) fn cta_warps(self) -> u32 {
        self.cta_threads() / 32
    }

    /// CTAs that an SM holds at once.
    pub(super) fn ctas_per_sm(self) -> u32 {
        ROOMS.iter().rev().zip([1, 2, 4]).find(|((room_kib, _), _)| *room_kib == self.room_kib).map_or(1, |(_, ctas)| ctas)
    }

    /// How a group of so many channels of so many vectors is shared out, `vector_bytes` of all that is held to a vector; none where there is no room.
    pub(super) fn share(self, channels: u64, vectors: u64, vector_bytes: u32) -> Option<Shares> {
        let room = u64::from((self.room_kib << 10) / self.of_cta());
        let of_cta = vectors.div_ceil(u64::from(self.ctas));
        let fits = channels * of_cta * u64::from(vector_bytes) <= room && of_cta * (u64::from(self.ctas) - 1) < vectors;
        let entries = u64::from(ENTRIES / self.of_cta());
        if !fits || channels > entries {
            return None;
        }
        // Each warp goes through as few vectors as there may be, and few pieces, each of which costs as much as one or two vectors.
        let deepest = of_cta.div_ceil(32);
        let pieces = |depth: u64| of_cta.div_ceil(32 * depth);
        let depths = (1..=deepest).rev().filter(|&depth| channels * pieces(depth) <= entries);
        let cost = |depth: u64| (channels * pieces(depth)).div_ceil(u64::from(self.warps())) * (2 * depth + 3);
        let depth = depths.min_by_key(|&depth| cost(depth))?;
        Some(Shares { vectors_of_cta: of_cta as u32, vectors_of_piece: 32 * depth as u32, pieces: pieces(depth) as u32 })
    }
}

/// How the vectors of a channel are shared out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shares {
    pub vectors_of_cta: u32,
    pub vectors_of_piece: u32,
    pub pieces: u32,
}

/// Everything that shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct ResidentSpec {
    pub team: Team,
    pub backward: bool,
    /// Whether the statistics of a gradient are given.
    pub given: bool,
    /// Whether the sums of channels are left, for the gradients of scale and bias.
    pub leaves_sums: bool,
    pub zero_centred: bool,
    /// Neighbours that one access takes.
    pub vector: u32,
    /// Whether launches overlap, as Hopper's can.
    pub overlaps: bool,
    /// In the order of the problem's operands.
    pub operands: Vec<(Role, DType)>,
}

/// Whether an operand of the problem is the kernel's.
pub(super) fn takes(role: Role) -> bool {
    !matches!(role, Role::Dscale | Role::Dbias)
}

/// Whether an access of an operand is held in shared memory.
pub(super) fn is_held(role: Role) -> bool {
    matches!(role, Role::X | Role::Dy)
}

impl ResidentSpec {
    fn name(&self) -> String {
        let pass = if self.backward { "backward" } else { "forward" };
        let flag = |set: bool, word: &str| if set { format!("_{word}") } else { String::new() };
        let flags = [flag(self.given, "given"), flag(self.leaves_sums, "sums"), flag(self.zero_centred, "centred")].concat();
        let operands: String = self.operands.iter().map(|(role, dtype)| format!("_{}{dtype}", role.name())).collect();
        let Team { ctas, threads, room_kib } = self.team;
        let overlapped = flag(self.overlaps, "overlapped");
        format!("norm_groups_{pass}_resident{ctas}x{threads}x{room_kib}{flags}_planesx{}{operands}{overlapped}", self.vector)
    }

    pub(super) fn target(&self) -> Target {
        let own = if self.overlaps || self.team.ctas > 1 { Target::Sm90 } else { Target::Sm80 };
        compute::target_of_all(self.operands.iter().map(|(_, dtype)| *dtype)).max(own)
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let (threads, min_ctas) = (self.team.cta_threads(), self.team.ctas_per_sm());
        let header = Header { name: self.name(), target: self.target(), threads, min_ctas, cluster: self.team.ctas };
        build(header, |k| Run::new(k, self).run())
    }

    fn dtype(&self, role: Role) -> DType {
        self.operands.iter().find(|(known, _)| *known == role).expect("what is held is an operand").1
    }

    fn is_written(&self, role: Role) -> bool {
        match role {
            Role::Y | Role::Dx => true,
            Role::Mean | Role::Inv => !self.backward,
            _ => false,
        }
    }

    fn declarations(&self) -> Vec<OperandDecl> {
        let of = |&(role, dtype): &(Role, DType)| match role {
            _ if role.is_whole() => strided::lines_declaration(dtype, 2, self.vector, self.is_written(role)),
            _ => strided::declaration(dtype, 2, self.is_written(role)),
        };
        self.operands.iter().map(of).collect()
    }
}

/// The kernels of 16-bit types with scale and bias, of groups that few CTAs hold; the others are compiled when they are first asked for.
pub(super) fn catalog() -> Vec<ResidentSpec> {
    let mut specs = Vec::new();
    for dtype in [DType::F16, DType::Bf16] {
        // Clusters of few small CTAs, and CTAs of 256 threads that hold a group alone.
        let is_usual = |team: &Team| if team.threads <= 128 { team.ctas <= 4 } else { team.threads == 256 && team.ctas == 1 };
        for team in Team::all().filter(is_usual) {
            for (backward, roles) in
                [(false, [Role::X, Role::Scale, Role::Bias, Role::Y]), (true, [Role::X, Role::Dy, Role::Scale, Role::Dx])]
            {
                let operands = roles.map(|role| (role, dtype)).to_vec();
                let (given, zero_centred) = (false, false);
                specs.push(ResidentSpec {
                    team,
                    backward,
                    given,
                    leaves_sums: backward,
                    zero_centred,
                    vector: 8,
                    overlaps: true,
                    operands,
                });
            }
        }
    }
    specs
}

verdigris_kir::parameters! {
    /// Of the kernel.
    pub(super) struct Values / ResidentArgs of ResidentSpec as spec {
        /// Groups of all images.
        pub rows: u32,
        pub groups: Divide,
        pub channels_of_group: u32,
        /// Vectors of a channel, of the share of a CTA and of a piece, and pieces of a share.
        pub vectors: u32,
        pub vectors_of_cta: u32,
        pub vectors_of_piece: u32,
        pub pieces: Divide,
        /// Elements of a group.
        pub count: f64,
        pub eps: f64,
        pub operands: Vec<OperandArgs> = spec.declarations(),
        /// `Σ dy` and `Σ dy · h` of channels: arrays `[images, channels, CTAs]`.
        pub sums_to: Vec<Write> = if spec.leaves_sums { vec![BYTES; 2] } else { Vec::new() },
    }
}

/// A piece of a channel that a warp has at a time.
#[derive(Clone, Copy)]
struct Piece<'k> {
    /// Its number among all of the CTA's.
    number: Val<'k, u32>,
    /// The channel in the group.
    channel: Val<'k, u32>,
    /// The lane's first vector in the share of the CTA, and how many it has.
    first: Val<'k, u32>,
    turns: Val<'k, u32>,
}

/// A kernel being built, at the place of a thread.
struct Run<'s, 'k> {
    k: Kernel<'k>,
    spec: &'s ResidentSpec,
    values: Values<'k>,
    operands: Vec<(Role, Strided<'k>)>,
    /// Whether there is a group; else the last one that there is.
    inside: Val<'k, bool>,
    image: Val<'k, u32>,
    group: Val<'k, u32>,
    /// The thread in its CTA's part of the team.
    member: Val<'k, u32>,
    rank: Val<'k, u32>,
    /// The first vector of the share, and how many there are.
    begin: Val<'k, u32>,
    held: Val<'k, u32>,
    /// What is held of the team's group, and numbers of its channels and pieces.
    room: Val<'k, u32>,
    gammas: Val<'k, u32>,
    sums: Val<'k, u32>,
}

impl<'s, 'k> Run<'s, 'k> {
    fn new(k: Kernel<'k>, spec: &'s ResidentSpec) -> Self {
        let mut values = Values::declare(k, spec);
        if spec.overlaps {
            k.griddep_wait();
            k.griddep_launch();
        }
        let declared = std::mem::take(&mut values.operands);
        let operands = spec.operands.iter().zip(declared).map(|(&(role, dtype), operand)| (role, Strided::new(dtype, operand))).collect();
        let (team, room_bytes) = (spec.team, spec.team.room_kib << 10);
        let (of_cta, number) = (team.of_cta(), k.uniform(k.thread() >> team.threads.ilog2()));
        let (rank, row) =
            if team.ctas > 1 { (k.cluster_rank(), k.cta() >> team.ctas.ilog2()) } else { (k.constant(0), k.cta() * of_cta + number) };
        // All threads stay together; those without a group take the last one and write nothing.
        let inside = row.lt(values.rows);
        let (image, group) = values.groups.split(row.min(values.rows - 1));
        let begin = rank * values.vectors_of_cta;
        let held = (values.vectors - begin).min(values.vectors_of_cta);
        let own = |name: &'static str, bytes: u32| k.shared(name, bytes, 16).address() + number * (bytes / of_cta);
        let room = own("room", room_bytes);
        let gammas = own("gammas", ENTRIES * BYTES);
        let sums = own("sums", ENTRIES * BYTES * if spec.leaves_sums { 2 } else { 1 });
        let member = k.thread() & (team.threads - 1);
        Run { k, spec, values, operands, inside, image, group, member, rank, begin, held, room, gammas, sums }
    }

    fn operand(&self, role: Role) -> Option<&Strided<'k>> {
        self.operands.iter().find(|(known, _)| *known == role).map(|(_, operand)| operand)
    }

    /// A channel of all the image's.
    fn channel(&self, of_group: Val<'k, u32>) -> Val<'k, u32> {
        self.group * self.values.channels_of_group + of_group
    }

    /// A piece by its number, which may be behind the last one, that has no vectors.
    fn piece(&self, number: Val<'k, u32>) -> Piece<'k> {
        let (k, values) = (self.k, &self.values);
        let (channel, piece) = values.pieces.split(number);
        let begin = piece * values.vectors_of_piece;
        let (first, end) = (begin + k.lane(), (begin + values.vectors_of_piece).min(self.held));
        let turns = k.select(channel.lt(values.channels_of_group), (end.max(first) - first + 31) >> 5, 0u32);
        Piece { number, channel, first, turns }
    }

    /// Runs `f` for the pieces of the thread's warp.
    fn pieces(&self, f: impl Fn(Piece<'k>)) {
        let (k, values) = (self.k, &self.values);
        let warp = k.uniform(self.member >> 5);
        let pieces = values.channels_of_group * values.pieces.value();
        k.range_step(warp, pieces, self.spec.team.warps(), |number| f(self.piece(number)));
    }

    /// Runs `f` for the lane's vectors of a piece, with the number of each among those of the channel that are held.
    fn vectors(&self, piece: Piece<'k>, f: impl Fn(Val<'k, u32>)) {
        self.k.range_unrolled(piece.turns, UNROLL, |turn| f(piece.first + turn * 32));
    }

    /// Where a vector of an operand is held: those of a channel lie behind each other, and channels do. Of two operands the wider one is in front.
    fn place(&self, role: Role, piece: Piece<'k>, vector: Val<'k, u32>) -> Val<'k, u32> {
        let bytes = |role: Role| self.spec.vector * self.spec.dtype(role).bytes() as u32;
        let number = piece.channel * self.values.vectors_of_cta + vector;
        let front = match role {
            Role::X => Some(Role::Dy).filter(|_| self.spec.backward && bytes(Role::Dy) > bytes(Role::X)),
            _ => Some(Role::X).filter(|_| bytes(Role::X) >= bytes(Role::Dy)),
        };
        let own = self.room + number * bytes(role);
        front.map_or(own, |front| own + self.values.channels_of_group * self.values.vectors_of_cta * bytes(front))
    }

    /// Starts the copies of the thread's vectors.
    fn fetch(&self) {
        let held: Vec<&(Role, Strided<'k>)> = self.operands.iter().filter(|(role, _)| is_held(*role)).collect();
        self.pieces(|piece| {
            let index = [self.image, self.channel(piece.channel)];
            let lines: Vec<_> = held.iter().map(|(role, operand)| (*role, operand.line(&index, self.spec.vector))).collect();
            self.vectors(piece, |vector| {
                for (role, line) in &lines {
                    line.start_copy(self.begin + vector, self.place(*role, piece, vector), 0);
                }
            });
        });
        self.k.cp_async_commit();
    }

    /// The elements of a vector that is held.
    fn load(&self, role: Role, piece: Piece<'k>, vector: Val<'k, u32>) -> Vec<F<'k>> {
        Packed::load_copied(self.k, self.spec.dtype(role), self.spec.vector, self.place(role, piece, vector), 0).values(self.k)
    }

    /// Leaves scale and bias of the group's channels in shared memory, from which nobody waits for them.
    fn keep_vectors(&self) {
        let k = self.k;
        let kept = [(Role::Scale, self.gammas), (Role::Bias, self.sums)].map(|(role, to)| self.operand(role).map(|from| (role, from, to)));
        k.range_step(self.member, self.values.channels_of_group, self.spec.team.threads, |channel| {
            for (role, from, to) in kept.iter().flatten() {
                let value = from.load::<f32>(&[self.image, self.channel(channel)]);
                let value = if *role == Role::Scale && self.spec.zero_centred { value + 1.0 } else { value };
                k.st_shared(*to + channel * BYTES, 0, value);
            }
        });
    }

    /// A channel's element of what [`Run::keep_vectors`] has left.
    fn kept(&self, role: Role, channel: Val<'k, u32>) -> Option<F<'k>> {
        let from = if role == Role::Scale { self.gammas } else { self.sums };
        self.operand(role).map(|_| self.k.ld_shared(from + channel * BYTES, 0))
    }

    /// The team's threads of the CTA see what each of them has left in shared memory.
    fn meet(&self) {
        if self.spec.team.threads == 32 { self.k.warp_sync() } else { self.k.bar_sync() }
    }

    /// Sums over the team's threads of the CTA; `of_warps` are the same in all lanes already.
    fn over_threads<const N: usize>(&self, of_lanes: usize, own: [F<'k>; N]) -> [F<'k>; N] {
        let (k, team) = (self.k, self.spec.team.threads);
        let add = |x: F<'k>, y: F<'k>| x + y;
        let of_warp = std::array::from_fn(|i| if i < of_lanes { lanes::over_lanes(k, 32, own[i], &add) } else { own[i] });
        lanes::over_warps(k, team, of_warp, &|x, y| std::array::from_fn(|i| x[i] + y[i]))
    }

    /// Elements that a CTA of the cluster holds of the group.
    fn elements(&self, rank: Val<'k, u32>) -> F<'k> {
        let values = &self.values;
        let vectors = (values.vectors - rank * values.vectors_of_cta).min(values.vectors_of_cta);
        (vectors * self.spec.vector * values.channels_of_group).to_f32()
    }

    fn run(&self) {
        let (k, spec, values) = (self.k, self.spec, &self.values);
        self.fetch();
        let peers = (spec.team.ctas > 1).then(|| Peers::new(k, if spec.backward && !spec.given { 16 } else { 8 }));
        peers.iter().for_each(|peers| peers.meet());
        self.keep_vectors();
        k.cp_async_wait(0);
        self.meet();
        let given = |role: Role| self.operand(role).map(|given| given.load::<f32>(&[self.image, self.group]));
        let own = self.elements(self.rank);
        let near = match spec.given.then(|| given(Role::Mean)).flatten() {
            Some(mean) => mean,
            None => self.mean_of_some(),
        };
        // D, squares of differences, and of a gradient A and B, which are sums of warps.
        let [apart, squares, of_g, of_product] = self.sums_of_differences(near);
        let count: F<'k> = compute::Compute::from_f64(values.count);
        let (mean, inv, [of_g, of_product]) = if spec.given {
            let of_all = peers.as_ref().map_or_else(|| vec![[of_g, of_product]], |peers| peers.all([of_g, of_product]));
            let whole = of_all.into_iter().reduce(|x, y| [x[0] + y[0], x[1] + y[1]]).unwrap_or([of_g, of_product]);
            (near, given(Role::Inv).unwrap_or(near), whole)
        } else {
            let step = apart.div(own);
            let of_cta = [near + step, k.fma(-apart, step, squares), of_g, k.fma(-step, of_g, of_product)];
            let of_all: Vec<[F<'k>; 4]> = match &peers {
                None => vec![of_cta],
                Some(peers) if spec.backward => peers.all(of_cta),
                Some(peers) => peers.all([of_cta[0], of_cta[1]]).into_iter().map(|[mean, m2]| [mean, m2, of_g, of_g]).collect(),
            };
            self.joined(&of_all, count)
        };
        k.when(self.inside & self.member.eq(0) & self.rank.eq(0), || {
            for (to, value) in [(Role::Mean, mean), (Role::Inv, inv)].into_iter().filter(|_| !spec.backward) {
                if let Some(to) = self.operand(to) {
                    to.store(&[self.image, self.group], AnyVal::of(value));
                }
            }
        });
        if spec.backward {
            self.input_gradient([mean, inv], [of_g, of_product * inv].map(|sum| -sum.div(count)));
            if spec.leaves_sums {
                self.leave_sums(mean - near, inv);
            }
        } else {
            self.normalize(mean, inv);
        }
    }

    /// The mean of the first vector of each thread that has one. As these are a part `f` of what the CTA holds, it is at most `σ / √f` from the mean of all: near enough for
    /// differences from it to be summed in one pass.
    fn mean_of_some(&self) -> F<'k> {
        let k = self.k;
        let [sum, elements] = std::array::from_fn(|_| k.var(0.0f32));
        let piece = self.piece(k.uniform(self.member >> 5));
        k.when(piece.turns.gt(0), || {
            let values: Vec<F<'k>> = self.load(Role::X, piece, piece.first).into_iter().map(|x| x * SHRINK).collect();
            elements.set(k.constant(values.len() as f32));
            sum.set(pairwise(&values));
        });
        let [sum, elements] = self.over_threads(2, [sum.get(), elements.get()]);
        sum.div(elements) * (1.0 / SHRINK)
    }

    /// `D` and the squares of differences from a number, `A` and `B`, over the CTA; the sums of pieces stay in shared memory.
    fn sums_of_differences(&self, near: F<'k>) -> [F<'k>; 4] {
        let (k, spec) = (self.k, self.spec);
        let [apart, squares, of_g, of_product] = std::array::from_fn(|_| k.var(0.0f32));
        self.pieces(|piece| {
            let [plain, weighted] = std::array::from_fn(|_| k.var(0.0f32));
            self.vectors(piece, |vector| {
                let differences: Vec<F<'k>> = self.load(Role::X, piece, vector).into_iter().map(|x| x - near).collect();
                if !spec.given {
                    apart.set(apart + pairwise(&differences));
                    squares.set(differences.iter().fold(squares.get(), |sum, &difference| k.fma(difference, difference, sum)));
                }
                if spec.backward {
                    let dy = self.load(Role::Dy, piece, vector);
                    plain.set(plain + pairwise(&dy));
                    weighted.set(dy.iter().zip(&differences).fold(weighted.get(), |sum, (&dy, &difference)| k.fma(dy, difference, sum)));
                }
            });
            if spec.backward {
                let [plain, weighted] = [plain, weighted].map(|sum| lanes::over_lanes(k, 32, sum.get(), &|x, y| x + y));
                if spec.leaves_sums {
                    k.when(k.lane().eq(0), || k.st_shared_vector(self.sums + piece.number * (2 * BYTES), 0, &[plain, weighted]));
                }
                for (sum, value) in [(&of_g, plain), (&of_product, weighted)] {
                    let value = self.kept(Role::Scale, piece.channel).map_or(value, |gamma| value * gamma);
                    sum.set(sum.get() + value);
                }
            }
        });
        if spec.leaves_sums && spec.team.warps() == 1 {
            // Where there are more, they meet for the sums that follow.
            self.meet();
        }
        let own = [apart, squares, of_g, of_product].map(|sum| sum.get());
        match (spec.backward, spec.given) {
            (false, _) => {
                let [apart, squares] = self.over_threads(2, [own[0], own[1]]);
                [apart, squares, own[2], own[3]]
            }
            (true, true) => {
                let [of_g, of_product] = self.over_threads(0, [own[2], own[3]]);
                [own[0], own[1], of_g, of_product]
            }
            (true, false) => self.over_threads(2, own),
        }
    }

    /// What the CTAs of the cluster know of the group, joined in the order of their ranks: mean, root and the two sums of a gradient.
    fn joined(&self, of_all: &[[F<'k>; 4]], count: F<'k>) -> (F<'k>, F<'k>, [F<'k>; 2]) {
        let k = self.k;
        let elements: Vec<F<'k>> = (0..of_all.len() as u32).map(|rank| self.elements(k.constant(rank))).collect();
        let zero = k.constant(0.0f32);
        // Means are near each other: what they differ by is not rounded with them.
        let first = of_all[0][0];
        let mean = match of_all {
            [_] => first,
            _ => {
                let apart = of_all.iter().zip(&elements).skip(1).fold(zero, |sum, (of_cta, &n)| k.fma(n, of_cta[0] - first, sum));
                first + apart.div(count)
            }
        };
        let [mut m2, mut of_g, mut of_product] = [zero; 3];
        for (&[own, own_m2, own_of_g, own_of_product], &n) in of_all.iter().zip(&elements) {
            let apart = own - mean;
            m2 = m2 + k.fma(n * apart, apart, own_m2);
            of_g = of_g + own_of_g;
            of_product = of_product + k.fma(apart, own_of_g, own_of_product);
        }
        let eps: F<'k> = compute::Compute::from_f64(self.values.eps);
        (mean, (m2.max_nan(0.0).div(count) + eps).rsqrt(), [of_g, of_product])
    }

    /// Runs `f` for all vectors that are held, with what it stores to an operand.
    fn each_result(&self, to: Role, f: impl Fn(Piece<'k>, Val<'k, u32>, [Option<F<'k>>; 2]) -> Vec<F<'k>>) {
        let to = self.operand(to).expect("the result is an operand");
        self.k.when(self.inside, || {
            self.pieces(|piece| {
                let line = to.line(&[self.image, self.channel(piece.channel)], self.spec.vector);
                let factors = [Role::Scale, Role::Bias].map(|role| self.kept(role, piece.channel));
                self.vectors(piece, |vector| line.store(self.begin + vector, &f(piece, vector, factors)));
            });
        });
    }

    fn normalize(&self, mean: F<'k>, inv: F<'k>) {
        let k = self.k;
        self.each_result(Role::Y, |piece, vector, factors| {
            let of = |x: F<'k>| {
                let h = (x - mean) * inv;
                match factors {
                    [Some(gamma), Some(bias)] => k.fma(h, gamma, bias),
                    [Some(gamma), None] => h * gamma,
                    [None, Some(bias)] => h + bias,
                    [None, None] => h,
                }
            };
            self.load(Role::X, piece, vector).into_iter().map(of).collect()
        });
    }

    /// `dx = r · (γ · dy + of_g + h · of_h)`, with the means of sums less than 0.
    fn input_gradient(&self, [mean, inv]: [F<'k>; 2], [of_g, of_h]: [F<'k>; 2]) {
        let k = self.k;
        self.each_result(Role::Dx, |piece, vector, [gamma, _]| {
            let pairs = self.load(Role::Dy, piece, vector).into_iter().zip(self.load(Role::X, piece, vector));
            let of = |(dy, x): (F<'k>, F<'k>)| {
                let rest = k.fma((x - mean) * inv, of_h, of_g);
                gamma.map_or_else(|| dy + rest, |gamma| k.fma(dy, gamma, rest)) * inv
            };
            pairs.map(of).collect()
        });
    }

    /// Adds the pieces of each channel up, for the launch that goes over images.
    fn leave_sums(&self, apart: F<'k>, inv: F<'k>) {
        let (k, values) = (self.k, &self.values);
        let channels = values.groups.value() * values.channels_of_group;
        k.when(self.inside, || {
            k.range_step(self.member, values.channels_of_group, self.spec.team.threads, |channel| {
                let [plain, weighted] = std::array::from_fn(|_| k.var(0.0f32));
                let first = self.sums + channel * values.pieces.value() * (2 * BYTES);
                k.range_step(0, values.pieces.value(), 1, |piece| {
                    let own = k.ld_shared_vector::<f32>(first + piece * (2 * BYTES), 0, 2);
                    plain.set(plain + own[0]);
                    weighted.set(weighted + own[1]);
                });
                let place = (self.image * channels + self.channel(channel)) * self.spec.team.ctas + self.rank;
                let of_h = k.fma(-apart, plain.get(), weighted.get()) * inv;
                for (to, value) in values.sums_to.iter().zip([plain.get(), of_h]) {
                    k.st_global(to.at(place, BYTES), 0, value);
                }
            });
        });
    }
}
