//! The Hopper convolution kernel: TMA gathers pixels in im2col order, warpgroups multiply out of the ring, results leave as those
//! of a product do.
//!
//! The main loop of tiles that are transposed in shared memory is in [`super::transposed_tiles`]. One page, top to bottom: the spec,
//! parameters and shared memory, the producer, the consumers' main loop, the roles. What the producer loads is in [`super::producer`], the
//! rest of the way in [`crate::store`].
//!
//! Source: PTX ISA 9.0, "im2col mode"; the main loop is that of CUTLASS's warp-specialized cooperative kernels.

use std::fmt;

use verdigris_kir::face::{AsVal, Header, Kernel, LoadOptions, Role, Val, WgmmaA, build};
use verdigris_kir::inst::{MatrixType, Special, WgmmaShape};
use verdigris_kir::ir::{KernelBody, MapDecl, Target};
use verdigris_kir::tile::clip::ClippedTile;
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::im2col::Im2colTile;
use verdigris_kir::tile::operand::{Major, OperandTile, ROW_BYTES};
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_kir::tile::schedule::{ScheduleArgs, Work};
use verdigris_tensor::DType;

use super::producer::{ProducerArgs, Slots};
use super::swap_ab::{self, SwapAbArgs, SwapAbStore};
use super::transposed_tiles;
use crate::fuse::epilogue::EpilogueSpec;
use crate::fuse::formats::{map_type, matrix_type};
use crate::layout::batch::BatchIndexArgs;
use crate::split_k::cluster::ClusterSplitKSpec;
use crate::split_k::fixup::{Fixup, FixupArgs, Part};
use crate::split_k::reduction::{PartTile, Parts, PartsArgs};
use crate::store::{Out, Store, StoreArgs, StoreSpec, Sum, Tile};

/// Instruction steps of 32 bytes in one 128-byte row of depth.
const STEPS: u32 = ROW_BYTES / 32;
/// Threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;
/// The named barrier of the first consumer; the others' follow.
pub(super) const FIRST_BARRIER: u32 = 1;
/// The named barrier at which the first consumer waits for its main loop under ping-pong; the second's follows.
const PING_PONG_BARRIER: u32 = 8;
/// Warps of a CTA that clear rows for which nothing is multiplied: those beside the one that loads.
const CLEARING: u32 = 3;
/// Tiles by which they may be behind.
const PACES: u32 = 2;
/// Dynamic shared memory of a CTA on compute capability 9.0.
const SHARED_BYTES: u32 = 232_448;

/// What the rows, columns and depth of the product are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// Rows are pixels that are gathered, columns are channels of the filter; depth runs over taps and channels.
    Gather {
        /// Rows fall into phases with taps of their own, and are scattered over the result.
        phases: bool,
        /// What is contiguous in the filter: the depth, or the columns.
        filter: Major,
    },
    /// The filter's gradient: rows are channels of dy, columns are taps and channels of x, which are gathered; depth runs over pixels.
    Filter,
}

/// Which operand the CTAs of a cluster share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Shared {
    /// Tiles side by side: they share A.
    A,
    /// Tiles one below the other: they share B.
    B,
}

/// What becomes of tiles whose depth is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Split {
    /// There are none.
    No,
    /// Fixup: whoever finishes last adds the parts up and stores.
    Fixup,
    /// Every part of every tile goes to scratch; the launch of [`crate::split_k::reduction`] that follows adds them up.
    Reduced,
    /// So many CTAs of a cluster, a power of two, take one tile: each a part of its depth, and then a slice of its results. Such tiles are
    /// swap-AB, and the launch says how many pixels one has.
    Clustered(u32),
}

/// Everything that shapes the kernel; extents, taps, strides, dilations and paddings are arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spec {
    pub(super) kind: Kind,
    /// Spatial dimensions of the gathered tensor: 1, 2, 3.
    pub(super) spatial: u32,
    pub(super) a: DType,
    pub(super) b: DType,
    /// Rows and columns of a CTA's tile.
    pub(super) tile_m: u32,
    pub(super) tile_n: u32,
    pub(super) stages: u32,
    /// Warpgroups that multiply; each takes an equal share of the tile's rows.
    pub(super) consumers: u32,
    /// Ping-pong: the consumers alternate in whole tiles.
    pub(super) ping_pong: bool,
    /// Tiles of a cluster, and what they share.
    pub(super) cluster: u32,
    pub(super) shared: Shared,
    /// A and B are swapped (swap-AB): rows are channels of the filter, columns are pixels.
    pub(super) swap_ab: bool,
    /// The depth of tiles may be split among CTAs.
    pub(super) split: Split,
    /// fp8 sums are moved into f32 registers every 128 of depth.
    pub(super) promote: bool,
    pub(super) out: Out,
    /// What stands between sums and the result.
    pub(super) epilogue: EpilogueSpec,
    /// Sums over the channels of what is stored are formed in the epilogue.
    pub(super) has_sums: bool,
}

impl fmt::Display for Spec {
    /// `conv_gather2_bf16_bf16_k_128x256_s4_c2_x2b_split_bf16_map` and so on: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |major| if major == Major::Depth { 'k' } else { 'r' };
        match self.kind {
            Kind::Gather { phases, filter } => {
                let word = if phases { "classes" } else { "gather" };
                write!(f, "conv_{word}{}_{}_{}_{}", self.spatial, self.a, self.b, letter(filter))?;
            }
            Kind::Filter => write!(f, "conv_filter{}_{}_{}", self.spatial, self.a, self.b)?,
        }
        write!(f, "_{}x{}_s{}_c{}", self.tile_m, self.tile_n, self.stages, self.consumers)?;
        if self.cluster > 1 {
            write!(f, "_x{}{}", self.cluster, if self.shared == Shared::B { 'b' } else { 'a' })?;
        }
        let rows = self.out == Out::Rows && self.split != Split::Reduced;
        for (on, word) in [
            (self.writes_transposed(), "_across"),
            (self.ping_pong, "_pingpong"),
            (self.promote, "_promote"),
            (rows, "_rows"),
            (self.has_sums, "_sums"),
        ] {
            if on {
                f.write_str(word)?;
            }
        }
        match self.split {
            Split::No => write!(f, "_{}", self.epilogue.name()),
            Split::Fixup => write!(f, "_split_{}", self.epilogue.name()),
            Split::Reduced => write!(f, "_parts"),
            Split::Clustered(ctas) => write!(f, "_across{ctas}_{}", self.epilogue.name()),
        }
    }
}

impl Spec {
    /// Whether tiles are transposed in shared memory: those of a filter's gradient, of a type that the tensor cores read along the depth
    /// alone.
    pub(super) fn transposes_tiles(&self) -> bool {
        self.kind == Kind::Filter && self.a == DType::F32
    }

    /// CTAs that take a part of a tile's depth each; 1 where a cluster does not.
    pub(super) fn cluster_split(&self) -> u32 {
        if let Split::Clustered(ctas) = self.split { ctas } else { 1 }
    }

    /// Whether results leave through the tile's transpose: rows of D are columns of the tile.
    pub(super) fn writes_transposed(&self) -> bool {
        self.swap_ab && !self.shares_depth()
    }

    /// Whether a cluster's CTAs split a tile's depth (cluster split-K).
    pub(super) fn shares_depth(&self) -> bool {
        matches!(self.split, Split::Clustered(_))
    }

    /// Whether rows of phases without taps are no tiles: warps beside the one that loads store their zeros while others multiply.
    pub(super) fn clears(&self) -> bool {
        let stores_zeros = self.out == Out::Scattered && self.epilogue.keeps_zero() && self.tile_n.is_power_of_two();
        self.has_phases() && stores_zeros
    }

    /// Whether rows fall into phases with taps of their own.
    pub(super) fn has_phases(&self) -> bool {
        matches!(self.kind, Kind::Gather { phases: true, .. })
    }

    /// CTAs of a cluster.
    pub(super) fn ctas(&self) -> u32 {
        self.cluster * self.cluster_split()
    }

    /// Whether parts of a tile's depth are work of their own.
    pub(super) fn splits_over_grid(&self) -> bool {
        matches!(self.split, Split::Fixup | Split::Reduced)
    }

    /// Where the gathered pixels and the filter stand, where these are what is multiplied.
    pub(super) fn gathers(&self) -> [Shared; 2] {
        if self.swap_ab { [Shared::B, Shared::A] } else { [Shared::A, Shared::B] }
    }

    pub(super) fn a_tile(&self) -> OperandTile {
        OperandTile { rows: self.tile_m, ty: map_type(self.a), major: self.major(Shared::A) }
    }

    pub(super) fn b_tile(&self) -> OperandTile {
        OperandTile { rows: self.tile_n, ty: map_type(self.b), major: self.major(Shared::B) }
    }

    fn major(&self, operand: Shared) -> Major {
        match self.kind {
            Kind::Filter => Major::Rows,
            Kind::Gather { filter, .. } => {
                if self.gathers()[1] == operand {
                    filter
                } else {
                    Major::Depth
                }
            }
        }
    }

    pub(super) fn tile(&self, operand: Shared) -> OperandTile {
        if operand == Shared::A { self.a_tile() } else { self.b_tile() }
    }

    /// Tiles of one operand, of which this CTA loads a share.
    pub(super) fn clipped(&self, operand: Shared) -> ClippedTile {
        ClippedTile { tile: self.tile(operand), loaded: self.loaded(operand) }
    }

    /// The operand that is gathered, as one load brings it: all of a CTA's pixels, or as many as a stage is deep.
    pub(super) fn gathered(&self) -> Im2colTile {
        match self.kind {
            Kind::Gather { .. } => Im2colTile { pixels: self.loaded(self.gathers()[0]), ty: map_type(self.a), spatial: self.spatial },
            Kind::Filter => Im2colTile { pixels: self.depth(), ty: map_type(self.b), spatial: self.spatial },
        }
    }

    /// Its map; where a cluster shares a depth, the launch says how many pixels one load brings.
    pub(super) fn gathered_map(&self) -> MapDecl {
        let map = self.gathered().map();
        if self.shares_depth() { map.with_open_box() } else { map }
    }

    /// The map of dy: panels as a third dim where one load brings all of a tile.
    pub(super) fn dy_map(&self) -> MapDecl {
        let tile = self.clipped(Shared::A).map();
        if self.transposes_tiles() {
            MapDecl { box_dims: vec![self.depth(), self.depth(), self.tile_m / self.depth()], ..tile }
        } else {
            tile
        }
    }

    /// Rows of A (columns of B) that one CTA loads of a tile; the rest comes from its peers.
    pub(super) fn loaded(&self, operand: Shared) -> u32 {
        let rows = if operand == Shared::A { self.tile_m } else { self.tile_n };
        if self.cluster > 1 && self.shared == operand { rows / self.cluster } else { rows }
    }

    /// Tiles of a cluster, below and beside each other.
    pub(super) fn tiles_of_cluster(&self) -> [u32; 2] {
        if self.shared == Shared::B { [self.cluster, 1] } else { [1, self.cluster] }
    }

    /// Elements of depth in one stage; also those of a line of 128 bytes.
    pub(super) fn depth(&self) -> u32 {
        self.a_tile().depth()
    }

    pub(super) fn threads(&self) -> u32 {
        WARPGROUP * (1 + self.consumers)
    }

    /// Consumers that share a tile.
    fn sharers(&self) -> u32 {
        if self.ping_pong { 1 } else { self.consumers }
    }

    /// 64-row blocks of one consumer.
    pub(super) fn blocks(&self) -> u32 {
        self.tile_m / (64 * self.sharers())
    }

    pub(super) fn is_integer(&self) -> bool {
        matches!(self.a, DType::I8 | DType::U8)
    }

    pub(super) fn shape(&self) -> WgmmaShape {
        let d = if self.is_integer() { MatrixType::S32 } else { MatrixType::F32 };
        WgmmaShape {
            a_in_registers: self.transposes_tiles(),
            transpose_a: !self.transposes_tiles() && self.a_tile().major == Major::Rows,
            transpose_b: !self.transposes_tiles() && self.b_tile().major == Major::Rows,
            ..wgmma_shape(self.tile_n, matrix_type(self.a), matrix_type(self.b), d)
        }
    }

    /// The epilogue store.
    pub(super) fn store(&self) -> StoreSpec {
        StoreSpec {
            out: self.out,
            transposed: self.writes_transposed(),
            tile_columns: self.tile_n,
            warpgroups: self.consumers,
            barrier: FIRST_BARRIER,
            epilogue: self.epilogue.clone(),
            has_sums: self.has_sums,
        }
    }

    /// Shared memory, with room for barriers.
    fn shared_bytes(&self) -> u32 {
        let store = match self.split {
            Split::Reduced => 0,
            Split::Clustered(_) => self.cluster_split_k().shared_bytes(),
            Split::No | Split::Fixup => self.store().shared_bytes(),
        };
        // Where tiles are transposed in shared memory, a barrier more for each stage, and the places of the panels.
        let transposing = if self.transposes_tiles() { 8 * self.stages + 16 * (self.tile_n / 32) } else { 0 };
        let paces = if self.clears() { 16 * PACES } else { 0 };
        self.stages * (self.tile_m + self.tile_n) * ROW_BYTES + store + transposing + 16 * self.stages + paces + 64
    }

    /// The same spec with as many stages as shared memory holds; nothing where its parts do not suit each other.
    pub(super) fn fitted(mut self) -> Option<Spec> {
        let panel = self.depth();
        let whole_panels = |tile: OperandTile, loaded: u32| tile.major == Major::Depth || loaded.is_multiple_of(panel);
        let panels_fit = whole_panels(self.a_tile(), self.loaded(Shared::A)) && whole_panels(self.b_tile(), self.loaded(Shared::B));
        // Two sets of accumulators.
        let registers_fit = !self.promote || self.tile_m * self.tile_n / self.sharers() <= 64 * 128;
        // Whole panels leave through shared memory.
        let d_bytes = self.epilogue.d.dtype.bytes() as u32;
        let whole_rows = self.writes_transposed()
            || !matches!(self.out, Out::Tma | Out::Scattered)
            || (self.tile_n * d_bytes).is_multiple_of(if d_bytes == 2 { 64 } else { 128 });
        // Each load of a stage is prepared in uniform registers, of which there are 63: with more loads than these the assembler spills
        // some.
        let loads = [Shared::A, Shared::B].map(|operand| self.loaded(operand) / panel);
        let loads_fit = self.kind != Kind::Filter || self.transposes_tiles() || (loads[1] <= 3 && loads[0] + loads[1] <= 5);
        let alone = !self.transposes_tiles() || self.cluster == 1 && !self.ping_pong;
        // Under swap-AB, CTAs may share pixels, in whole swizzle atoms.
        let shares = !self.ping_pong && self.shared == Shared::B && self.loaded(Shared::B).is_multiple_of(8);
        let lies = !self.swap_ab || shares && self.tile_n.is_multiple_of(8 * self.cluster_split());
        if !(alone && lies && panels_fit && registers_fit && whole_rows && loads_fit) {
            return None;
        }
        self.stages = 2;
        while self.stages < 12 && (Spec { stages: self.stages + 1, ..self.clone() }).shared_bytes() <= SHARED_BYTES {
            self.stages += 1;
        }
        (self.shared_bytes() <= SHARED_BYTES).then_some(self)
    }

    /// Cluster split-K of a swap-AB tile.
    pub(super) fn cluster_split_k(&self) -> ClusterSplitKSpec {
        ClusterSplitKSpec {
            ctas: self.cluster_split(),
            apart: self.cluster,
            once: true,
            warpgroups: self.consumers,
            blocks: self.blocks(),
            columns: self.tile_n,
            barrier: FIRST_BARRIER,
        }
    }

    /// Registers of a producer's and of a consumer's thread.
    pub(super) fn registers(&self) -> (u32, u32) {
        match (self.consumers, self.kind) {
            // Warps beside the one that loads transpose tiles.
            (1 | 2, Kind::Filter) if self.transposes_tiles() => (72, 216),
            // The producer knows a tap and a channel for each panel of columns.
            (1 | 2, Kind::Filter) => (56, 224),
            (1 | 2, _) => (40, 232),
            _ => (32, 160),
        }
    }

    /// The tile as parts are kept of it.
    pub(super) fn part_tile(&self) -> PartTile {
        PartTile { rows: self.tile_m, columns: self.tile_n, warpgroups: self.consumers }
    }

    /// f32 (or s32) words that one warpgroup hands on for one part of a split tile.
    pub(super) fn part_words(&self) -> u64 {
        u64::from(self.tile_m) * u64::from(self.tile_n) / u64::from(self.consumers)
    }

    /// Builds the kernel.
    pub(super) fn build(&self) -> KernelBody {
        let header = Header { name: self.to_string(), target: Target::Sm90a, threads: self.threads(), min_ctas: 1, cluster: self.ctas() };
        match (self.transposes_tiles(), self.is_integer()) {
            (true, _) => build(header, |k| transposed_tiles::convolve(k, self)),
            (_, true) => build(header, |k| convolve::<i32>(k, self)),
            _ => build(header, |k| convolve::<f32>(k, self)),
        }
    }
}

verdigris_kir::parameters! {
    /// All parameters of the kernels.
    pub(super) struct Conv / ConvArgs of Spec as spec {
        pub(super) producer: ProducerArgs = *spec,
        pub(super) schedule: ScheduleArgs = spec.splits_over_grid(),
        pub(super) parts: Option<PartsArgs> = (spec.split == Split::Reduced).then_some(()),
        pub(super) swap_ab: Option<SwapAbArgs> = spec.shares_depth().then(|| spec.epilogue.clone()),
        pub(super) store: Option<TileStoreArgs> = (spec.split != Split::Reduced && !spec.shares_depth()).then(|| spec.store()),
        pub(super) fixup: Option<FixupArgs> = (spec.split == Split::Fixup).then_some(()),
    }
}

verdigris_kir::parameters! {
    /// The epilogue store of whole tiles.
    pub(super) struct TileStore / TileStoreArgs of StoreSpec as store {
        pub(super) batch: BatchIndexArgs = (),
        pub(super) store: StoreArgs = *store,
    }
}

fn convolve<'k, T: Sum + AsVal<'k, T>>(k: Kernel<'k>, spec: &Spec) {
    let (a_tile, b_tile) = (spec.a_tile(), spec.b_tile());
    let Conv { producer, schedule, parts, swap_ab, store, fixup } = Conv::declare(k, spec);
    let parts = parts.map(|parts| Parts::new(k, parts, spec.part_tile()));
    let swap_ab = swap_ab.map(|swap_ab| SwapAbStore::new(k, swap_ab, spec));
    let store = store.map(|TileStore { batch, store }| (batch, Store::new(k, store, spec.store())));
    let fixup = fixup.map(|fixup| Fixup::new(k, fixup, spec.consumers, FIRST_BARRIER));

    let a_slots = k.shared("a tiles", spec.stages * a_tile.bytes(), 1024);
    let b_slots = k.shared("b tiles", spec.stages * b_tile.bytes(), 1024);
    let scope = match (spec.cluster, spec.cluster_split()) {
        (1, _) => RingScope::Cta,
        (_, 1) => RingScope::Cluster,
        (peers, _) => RingScope::Peers(peers),
    };
    let ring = Ring::new(k, spec.stages, spec.sharers(), scope);
    // Nothing is filled here: the ring lets those who clear rows neither fall far behind those who multiply nor run ahead and take their
    // bandwidth.
    let paces = spec.clears().then(|| Ring::new(k, PACES, CLEARING, RingScope::Cta));
    k.when(k.thread().eq(0), || {
        ring.init();
        paces.iter().for_each(Ring::init);
        swap_ab.iter().for_each(SwapAbStore::init);
        producer.maps().for_each(|map| k.prefetch_tensormap(map));
    });
    producer.clear(k, spec, a_slots.address(), b_slots.address());
    publish_barriers(k);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();

    let rank = if spec.ctas() > 1 { k.cluster_rank() } else { k.constant(0) };
    // Which tile of the cluster's, and which part of its depth; neighbours share an operand.
    let (peer, depth_rank) = match (spec.cluster, spec.cluster_split()) {
        (1, _) => (k.constant(0), rank),
        (_, 1) => (rank, k.constant(0)),
        (peers, _) => (rank & (peers - 1), rank >> peers.ilog2()),
    };
    let peers = (1u32 << spec.cluster) - 1;
    let everyone =
        if spec.cluster > 1 && spec.cluster_split() > 1 { k.constant(peers).shl(rank - peer).low16() } else { k.constant(peers as u16) };
    let options = |operand| LoadOptions { multicast: (spec.cluster > 1 && spec.shared == operand).then_some(everyone), policy: None };
    // A cluster takes neighbouring tiles, along the side whose operand they do not share.
    let tile_row = |work: &Work<'k>| if spec.shared == Shared::B { work.row * spec.cluster + peer } else { work.row };
    let tile_column = |work: &Work<'k>| if spec.shared == Shared::A { work.column * spec.cluster + peer } else { work.column };

    // The part of a tile's depth that this CTA takes, in the order of ranks.
    let own_depth = |work: Work<'k>| {
        let cut = |rank: Val<'k, u32>| (work.steps * rank) >> spec.cluster_split().ilog2();
        let first = cut(depth_rank);
        if spec.cluster_split() == 1 { work } else { Work { first_step: first, steps: cut(depth_rank + 1) - first, ..work } }
    };

    let load = || {
        let slots = Slots {
            ring: ring.cursor(),
            a: a_slots.address(),
            b: b_slots.address(),
            a_part: if spec.loaded(Shared::A) < spec.tile_m { peer * spec.loaded(Shared::A) } else { k.constant(0) },
            b_part: if spec.loaded(Shared::B) < spec.tile_n { peer * producer.columns_of_share(k, spec) } else { k.constant(0) },
            a_options: options(Shared::A),
            b_options: options(Shared::B),
        };
        let pace = paces.map(|paces| paces.cursor());
        k.when(k.elect(), || {
            schedule.for_each(|work| {
                if let Some(pace) = &pace {
                    pace.acquire(0);
                    pace.advance();
                }
                let work = own_depth(work);
                let row = tile_row(&work) * spec.tile_m + slots.a_part;
                let column = tile_column(&work) * producer.tile_columns(k, spec) + slots.b_part;
                producer.load(k, spec, &work, row, column, &slots);
            });
            if spec.cluster > 1 {
                // A peer may still arrive on this CTA's barriers.
                slots.ring.drain();
            }
        });
    };

    let multiply = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let first_row = if spec.ping_pong { k.constant(0) } else { warpgroup * (64 * spec.blocks()) };
        let sums: Vec<Fragment<'k, T>> = (0..spec.blocks()).map(|_| Fragment::unset(k, spec.tile_n)).collect();
        let totals: Vec<Fragment<'k, T>> =
            if spec.promote { (0..spec.blocks()).map(|_| Fragment::unset(k, spec.tile_n)).collect() } else { vec![] };
        let results = if spec.promote { &totals } else { &sums };
        let a_low = a_tile.descriptor_base(a_slots.address(), first_row);
        let b_low = b_tile.descriptor_base(b_slots.address(), 0u32);
        let cursor = ring.cursor();
        let previous = k.var_named("previous", 0u32);
        let add = k.var_named("add", k.thread().ge(0u32));

        let one_tile = |work: Work<'k>| {
            let work = own_depth(work);
            let target = producer.target(k, &work);
            let clear = || results.iter().flat_map(|sum| sum.registers()).for_each(|register| register.set(T::ZERO));
            if spec.promote {
                clear();
            }
            if spec.ping_pong {
                k.barrier_sync(warpgroup + PING_PONG_BARRIER, 2 * WARPGROUP);
            }
            k.range(target.steps, |step| {
                cursor.wait();
                let stage = cursor.stage();
                let (a_stage, b_stage) = (a_low + stage * (a_tile.bytes() >> 4), b_low + stage * (b_tile.bytes() >> 4));
                add.set(if spec.promote { k.thread().gt(u32::MAX - 1) } else { step.gt(0) });
                k.wgmma_fence();
                for part in 0..STEPS {
                    let b_descriptor = b_tile.descriptor_from(b_stage + b_tile.advance(0, part));
                    for (block, sum) in sums.iter().enumerate() {
                        let a_descriptor = a_tile.descriptor_from(a_stage + a_tile.advance(64 * block as u32, part));
                        let adds = if part == 0 { add.get() } else { k.constant(true) };
                        k.wgmma(spec.shape(), sum.registers(), WgmmaA::Shared(a_descriptor), b_descriptor, adds);
                    }
                }
                k.wgmma_commit();
                if spec.promote {
                    k.wgmma_wait(0);
                    cursor.release(stage, thread);
                    for (total, sum) in totals.iter().zip(&sums) {
                        for (total, sum) in total.registers().iter().zip(sum.registers()) {
                            total.set(*total + *sum);
                        }
                    }
                } else {
                    // One group stays in flight while the stage before it goes back.
                    k.wgmma_wait(1);
                    k.when(step.gt(0), || cursor.release(previous, thread));
                    previous.set(stage);
                }
                cursor.advance();
            });
            if spec.ping_pong {
                k.when(schedule.goes_on_behind(&work), || k.barrier_arrive((warpgroup ^ 1) + PING_PONG_BARRIER, 2 * WARPGROUP));
            }
            k.wgmma_wait(0);
            // Rows without taps read nothing; their sum is zero.
            if producer.may_be_empty() {
                k.when_else(
                    target.steps.eq(0),
                    || {
                        if !spec.promote {
                            clear()
                        }
                    },
                    || {
                        if !spec.promote {
                            cursor.release(previous, thread)
                        }
                    },
                );
            } else if !spec.promote {
                cursor.release(previous, thread);
            }

            if let Some(parts) = &parts {
                let place = [tile_row(&work), tile_column(&work), target.batch, work.part];
                parts.keep(results.iter().flat_map(|sum| sum.registers()).copied(), place, warpgroup, thread);
            }
            if let Some(swap_ab) = &swap_ab {
                let pixels = producer.tile_columns(k, spec);
                let (channel, pixel) = (tile_row(&work) * spec.tile_m, work.column * pixels);
                let place = swap_ab::Place { channel, pixel, pixels, batch: target.batch };
                swap_ab.write(results, &place, [first_row, k.thread() - WARPGROUP]);
            }
            let Some((batch, store)) = &store else { return };
            let tile = Tile {
                row: tile_row(&work) * spec.tile_m + first_row,
                column: tile_column(&work) * spec.tile_n,
                batch: target.batch,
                indices: batch.split(target.batch),
                warpgroup,
                thread,
            };
            let write = || match &target.rows {
                None => store.write(results, &tile),
                Some(rows) => store.write_placed(results, &tile, &|row| rows.place(k, row)),
            };
            match &fixup {
                None => write(),
                Some(fixup) => {
                    let owner = (work.tile * spec.cluster + peer) * spec.consumers + warpgroup;
                    let last = fixup.is_last(results, Part { owner, part: work.part, parts: work.parts, warpgroup, thread });
                    k.when(last, write);
                }
            }
        };
        if spec.ping_pong {
            // One's epilogue overlaps the other's main loop, which begins when the other has seen all of its stages: a stage's phases are
            // told apart by parity, so no warpgroup may wait for the phase after the next. Stages of the other's tiles are skipped.
            let own = k.special(if spec.cluster > 1 { Special::ClusterX } else { Special::CtaX });
            let workers = k.special(if spec.cluster > 1 { Special::ClustersX } else { Special::GridX });
            k.when(warpgroup.eq(1), || {
                k.barrier_arrive(PING_PONG_BARRIER, 2 * WARPGROUP);
                cursor.skip(producer.steps_of_tile(k, &schedule, own));
            });
            schedule.for_each_ping_pong(warpgroup, spec.consumers, |work| {
                one_tile(work);
                cursor.skip(producer.steps_of_tile(k, &schedule, work.tile + workers));
            });
        } else {
            schedule.for_each(one_tile);
        }
        if let Some((_, store)) = &store {
            store.finish(thread);
        }
    };

    // Rows that nothing is multiplied for, beside each tile.
    let clear = || {
        let Some(((batch, store), paces)) = store.as_ref().zip(paces) else { return };
        let cursor = paces.cursor();
        let warps = [k.warp() - 1, k.constant(CLEARING)];
        schedule.for_each(|work| {
            cursor.wait();
            let column = tile_column(&work) * spec.tile_n;
            producer.clear_beside(k, work.batch, tile_row(&work) * spec.tile_m, spec.tile_m, warps, |group, place| {
                store.clear_rows(column, batch.split(group), place);
            });
            cursor.release(cursor.stage(), k.lane());
            cursor.advance();
        });
    };

    let (few, many) = spec.registers();
    let load_warp = || {
        let load = Role { name: "load", warps: 1, registers: None, body: &load };
        let clear = Role { name: "clear", warps: CLEARING, registers: None, body: &clear };
        if spec.clears() { k.warp_roles(&[load, clear]) } else { k.warp_roles(&[load]) }
    };
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(few), body: &load_warp },
        Role { name: "consumer", warps: 4 * spec.consumers, registers: Some(many), body: &multiply },
    ]);
}
