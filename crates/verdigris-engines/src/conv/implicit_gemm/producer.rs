//! The producer of a convolution: what it loads, and where a tile's results belong.
//!
//! The taps of the filter stand in a table in memory, four words each: the offsets that a tap moves the walk by (the two innermost
//! dimensions in the halves of one word, the third in the next), its position in the filter, and what it adds to an image (where pixels are
//! rows) or to a channel (in a filter's gradient). One entry beyond the last lets the producer read ahead; in a filter's gradient it adds
//! so much that there is no such channel, and what is loaded is zero. Where operands are sums of terms, each product of terms has its own
//! taps, which name the terms as further images and positions. Phases of rows stand in a second table, eight words each: first tap, taps,
//! first position in the target by dimension, three words of nothing. Those without taps stand last.

use verdigris_kir::face::{Kernel, LoadOptions, SharedPiece, TensorMap, Val};
use verdigris_kir::inst::Cache;
use verdigris_kir::params::{Arguments, Divide, Map, Parameter, Read};
use verdigris_kir::tile::clip::{Clip, ClipArgs};
use verdigris_kir::tile::operand::ROW_BYTES;
use verdigris_kir::tile::ring::Cursor;
use verdigris_kir::tile::schedule::{Schedule, Work};

use super::spec::{Kind, Spec};
use crate::conv::geometry::gather::{Gather, Phase, Tap};
use crate::hopper::share::Share;
use crate::hopper::spec::Operand;
use crate::hopper::stages::Stages;
use crate::store::CLEARED_ROWS;

const TAP_BYTES: u32 = 16;
const PHASE_BYTES: u32 = 32;
/// Channel and offsets of a channel block of columns, in shared memory.
const PLACE_BYTES: u32 = 16;
/// What the entry beyond the taps adds to a channel.
const BEYOND: u32 = 1 << 30;

/// The bytes of the table of taps: those of a phase once for each product of terms in `passes` (see [`super::view`]). The terms of what is
/// gathered lie `images` apart, those of the filter `taps`, of which each is `tap_positions` from the next.
pub(super) fn tap_table(gather: &Gather, passes: &[[u32; 2]], [images, taps, tap_positions]: [u32; 3]) -> Vec<u8> {
    let of_pass = |phase: &Phase, [gathered, filter]: [u32; 2]| -> Vec<[u32; 4]> {
        let place = |tap: &Tap| tap.offsets.map(|offset| offset as u32);
        let word = |tap: &Tap| {
            let position = (tap.position as u32 + filter * taps) * tap_positions;
            [place(tap)[0] | place(tap)[1] << 16, place(tap)[2], position, gathered * images]
        };
        phase.taps.iter().map(word).collect()
    };
    let all = gather.phases.iter().flat_map(|phase| passes.iter().flat_map(move |&pass| of_pass(phase, pass)));
    all.chain([[0, 0, 0, BEYOND]]).flatten().flat_map(u32::to_le_bytes).collect()
}

/// The bytes of the table of phases.
pub(super) fn phase_table(phases: &[Phase], passes: u32) -> Vec<u8> {
    let mut first_tap = 0;
    let mut words: Vec<u32> = Vec::new();
    for phase in phases {
        let taps = phase.taps.len() as u32 * passes;
        words.extend([first_tap, taps]);
        words.extend(phase.first.map(|n| n as u32));
        words.extend([0; 3]);
        first_tap += taps;
    }
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// The producer's side of the ring: where tiles go, and how. Of A and B, in this order.
pub(super) struct Slots<'k> {
    pub(super) ring: Cursor<'k>,
    share: Share<'k>,
    addresses: [Val<'k, u32>; 2],
    /// The first row of A, and column of B, of a tile that this CTA loads.
    begins: [Val<'k, u32>; 2],
    options: [LoadOptions<'k>; 2],
}

impl<'k> Slots<'k> {
    pub(super) fn new(k: Kernel<'k>, spec: &Spec, producer: &Producer<'k>, stages: &Stages<'k>, share: Share<'k>) -> Self {
        let rows = || k.constant(spec.main.tile.loaded(Operand::A));
        Slots {
            ring: stages.ring.cursor(),
            share,
            addresses: stages.slots.map(|slots| slots.address()),
            begins: [share.loads_from(Operand::A, rows), share.loads_from(Operand::B, || producer.columns_of_share(k, spec))],
            options: [Operand::A, Operand::B].map(|operand| share.options(operand)),
        }
    }
}

verdigris_kir::parameters! {
    /// A walk over pixels: from a row of the product to the place where TMA begins. One of each for a spatial dimension.
    pub(super) struct Walk / WalkArgs of u32 as spatial {
        counts: Vec<Divide> = vec![(); *spatial as usize],
        lower: Vec<i32> = vec![(); *spatial as usize],
        step: Vec<i32> = vec![(); *spatial as usize],
    }
}

impl WalkArgs {
    pub(super) fn of(gather: &Gather) -> Self {
        WalkArgs {
            counts: gather.walks.iter().map(|walk| walk.count as u32).collect(),
            lower: gather.walks.iter().map(|walk| walk.lower as i32).collect(),
            step: gather.walks.iter().map(|walk| walk.step as i32).collect(),
        }
    }
}

impl<'k> Walk<'k> {
    /// Position in the walk, innermost dimension first, and image.
    fn indices(&self, row: Val<'k, u32>) -> (Vec<Val<'k, u32>>, Val<'k, u32>) {
        let mut rest = row;
        let mut indices = Vec::new();
        for count in &self.counts {
            let (outer, inner) = count.split(rest);
            indices.push(inner);
            rest = outer;
        }
        (indices, rest)
    }

    /// Coordinates of a row's pixel under a tap that moves by nothing, and image.
    fn base(&self, row: Val<'k, u32>) -> (Vec<Val<'k, i32>>, Val<'k, u32>) {
        let (indices, image) = self.indices(row);
        let steps = self.lower.iter().zip(&self.step);
        (indices.into_iter().zip(steps).map(|(index, (&lower, &step))| lower + index.signed() * step).collect(), image)
    }
}

/// Where the rows of a phase belong: row `i` along a dimension at `first + scatter·i`, if that is inside.
pub(super) struct RowMap<'f, 'k> {
    producer: &'f GatherProducer<'k>,
    scatter: &'f Scatter<'k>,
    first: Vec<Val<'k, u32>>,
}

impl<'k> RowMap<'_, 'k> {
    /// The row of the result at which row `row` of the product belongs, and whether it does.
    pub(super) fn place(&self, k: Kernel<'k>, row: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, bool>) {
        let (indices, image) = self.producer.walk.indices(row);
        let mut inside = image.lt(self.scatter.images);
        let mut place = image;
        for (axis, index) in indices.into_iter().enumerate().rev() {
            let at = self.first[axis] + index * self.scatter.strides[axis];
            inside = inside & at.lt(self.scatter.extents[axis]);
            place = place * self.scatter.extents[axis] + at;
        }
        (k.select(inside, place, 0u32), inside)
    }
}

verdigris_kir::parameters! {
    /// Phases of rows.
    pub(super) struct Scatter / ScatterArgs of Spec as spec {
        pub(super) table: Read = PHASE_BYTES,
        /// Tiles of one phase, and the last phase that has tiles.
        pub(super) phase_tiles: Divide,
        pub(super) last_phase: u32,
        /// Where phases without taps have no tiles: how many there are of all.
        pub(super) all_phases: Option<u32> = spec.clears().then_some(()),
        pub(super) groups: Divide,
        pub(super) images: u32,
        /// Of the result, and from one row of a phase to the next in it.
        pub(super) extents: Vec<u32> = vec![(); spec.spatial as usize],
        pub(super) strides: Vec<u32> = vec![(); spec.spatial as usize],
    }
}

/// The offsets of a tap, as the table packs them.
struct Offsets<'k> {
    plane: Val<'k, u32>,
    depth: Val<'k, u32>,
}

impl<'k> Offsets<'k> {
    /// One a dimension, innermost first; TMA takes the low half of each.
    fn list(&self, spatial: u32) -> Vec<Val<'k, u32>> {
        let mut list = vec![self.plane];
        if spatial > 1 {
            list.push(self.plane >> 16);
        }
        if spatial > 2 {
            list.push(self.depth);
        }
        list
    }
}

verdigris_kir::parameters! {
    /// Pixels as rows, filters as columns.
    pub(super) struct GatherProducer / GatherArgs of Spec as spec {
        pub(super) pixels: Map = spec.gathered_map(),
        pub(super) filter: Map = spec.main.clipped(spec.gathers()[1]).map(),
        pub(super) walk: WalkArgs = spec.spatial,
        pub(super) taps: Read = TAP_BYTES,
        /// Channel blocks of one tap.
        pub(super) channel_blocks: Divide,
        /// How far a group lies from the one before it: in channels of the pixels, and in the filter's columns and positions. Its depth ends
        /// with it, so that whatever pixels are read beyond a group's own meet zeros.
        pub(super) group_channels: u32,
        pub(super) group_columns: u32,
        pub(super) group_positions: u32,
        /// What there is of the filter's columns.
        pub(super) columns: ClipArgs = (),
        /// Where a cluster shares a depth, the pixels of a tile.
        pub(super) pixel_clip: Option<ClipArgs> = spec.shares_depth().then_some(()),
        pub(super) scatter: Option<ScatterArgs> = spec.has_phases().then(|| spec.clone()),
    }
}

verdigris_kir::parameters! {
    /// Channels of dy as rows, taps and channels of x as columns.
    pub(super) struct FilterProducer / FilterArgs of Spec as spec {
        pub(super) dy: Map = spec.dy_map(),
        pub(super) pixels: Map = spec.gathered_map(),
        pub(super) walk: WalkArgs = spec.spatial,
        pub(super) taps: Read = TAP_BYTES,
        /// How many taps there are.
        pub(super) tap_count: u32,
        /// Channel blocks of one tap, as columns count them.
        pub(super) channel_blocks: Divide,
        /// Matrices of the result are those of all groups, once for each tap where taps are no columns.
        pub(super) groups: Divide,
        pub(super) group_rows: u32,
        pub(super) group_channels: u32,
        /// Steps over all pixels; they are made once for each product of terms.
        pub(super) pass_steps: Divide,
        /// Which terms these are, four bits a product: that of x in the lower two, that of dy in the upper.
        pub(super) passes: u32,
        pub(super) images: u32,
        /// What there is of rows and columns, where tiles are not transposed in shared memory.
        pub(super) clips: Option<[ClipArgs; 2]> = (!spec.transposes_tiles()).then_some(()),
    }
}

/// The producer: the loads of a kernel.
pub(super) enum Producer<'k> {
    Gather(GatherProducer<'k>),
    /// With shared memory where channel blocks are too many for registers: channel and offsets of each.
    Filter(FilterProducer<'k>, Option<SharedPiece<'k>>),
}

/// What a launch gives for [`Producer`].
pub(super) enum ProducerArgs {
    Gather(GatherArgs),
    Filter(FilterArgs),
}

impl Parameter for ProducerArgs {
    type Spec = Spec;
    type Value<'k> = Producer<'k>;
    type Argument = ProducerArgs;

    fn declare<'k>(k: Kernel<'k>, _: &'static str, spec: &Spec) -> Producer<'k> {
        match spec.kind {
            Kind::Gather { .. } => Producer::Gather(GatherProducer::declare(k, spec)),
            Kind::Filter => {
                let producer = FilterProducer::declare(k, spec);
                Producer::Filter(
                    producer,
                    spec.transposes_tiles().then(|| k.shared("places of slabs", PLACE_BYTES * spec.main.tile.n / spec.main.depth(), 16)),
                )
            }
        }
    }

    fn bind(argument: ProducerArgs, name: &'static str, spec: &Spec, to: &mut Arguments) {
        match argument {
            ProducerArgs::Gather(gather) => GatherArgs::bind(gather, name, spec, to),
            ProducerArgs::Filter(filter) => FilterArgs::bind(filter, name, spec, to),
        }
    }
}

/// What the consumers must know of a piece of work.
pub(super) struct Target<'f, 'k> {
    /// Steps of depth.
    pub(super) steps: Val<'k, u32>,
    /// Matrix of the result.
    pub(super) batch: Val<'k, u32>,
    /// Where rows belong, if not in order.
    pub(super) rows: Option<RowMap<'f, 'k>>,
}

impl<'k> Producer<'k> {
    /// The tensor maps.
    pub(super) fn maps(&self) -> impl Iterator<Item = &TensorMap<'k>> {
        match self {
            Producer::Gather(producer) => [&producer.pixels, &producer.filter],
            Producer::Filter(producer, _) => [&producer.dy, &producer.pixels],
        }
        .into_iter()
    }

    /// Clears what is never loaded of the places for A and B. By all threads; a barrier is due behind it.
    pub(super) fn clear(&self, k: Kernel<'k>, spec: &Spec, addresses: [Val<'k, u32>; 2]) {
        let clips = match self {
            Producer::Gather(producer) if spec.swap_ab => [Some(producer.column_clip(spec)), producer.pixel_clip(spec)],
            Producer::Gather(producer) => [None, Some(producer.column_clip(spec))],
            Producer::Filter(producer, _) => producer.clips(spec).map_or([None; 2], |clips| clips.map(Some)),
        };
        for (clip, slots) in clips.into_iter().zip(addresses) {
            clip.iter().for_each(|clip| clip.clear(slots, spec.main.stages, k.thread(), spec.main.tile.threads()));
        }
    }

    /// The pixels of a tile, where a cluster shares a depth.
    fn pixel_clip(&self, spec: &Spec) -> Option<Clip<'k>> {
        if let Producer::Gather(producer) = self { producer.pixel_clip(spec) } else { None }
    }

    /// Columns from one tile to the next.
    pub(super) fn tile_columns(&self, k: Kernel<'k>, spec: &Spec) -> Val<'k, u32> {
        match self.pixel_clip(spec) {
            Some(pixels) => pixels.rows(k.constant(0)),
            None => k.constant(spec.main.tile.n),
        }
    }

    /// Columns of a tile that this CTA loads, where its peers load the others.
    pub(super) fn columns_of_share(&self, k: Kernel<'k>, spec: &Spec) -> Val<'k, u32> {
        match self.pixel_clip(spec) {
            Some(pixels) => pixels.box_rows(),
            None => k.constant(spec.main.tile.loaded(Operand::B)),
        }
    }

    /// Whether there may be work without depth.
    pub(super) fn may_be_empty(&self) -> bool {
        matches!(self, Producer::Gather(GatherProducer { scatter: Some(_), .. }))
    }

    /// What the consumers must know of a piece of work.
    pub(super) fn target(&self, k: Kernel<'k>, work: &Work<'k>) -> Target<'_, 'k> {
        let Producer::Gather(producer @ GatherProducer { scatter: Some(scatter), .. }) = self else {
            return Target { steps: work.steps, batch: work.batch, rows: None };
        };
        let (phase, group) = scatter.groups.split(work.batch);
        let (taps, rows) = producer.phase(k, scatter, phase);
        Target { steps: k.uniform(taps) * producer.channel_blocks.value(), batch: group, rows: Some(rows) }
    }

    /// Gives to `clear` the places of rows of phases without taps, where such have no tiles: those that stand in their phases where the
    /// rows of a tile stand in theirs, [`CLEARED_ROWS`] at a time, one a lane. The tiles of each phase that has some share the others
    /// grid-stride; and each of `warps` warps takes some rows.
    pub(super) fn clear_beside(
        &self,
        k: Kernel<'k>,
        batch: Val<'k, u32>,
        first_row: Val<'k, u32>,
        rows_of_tile: u32,
        [warp, warps]: [Val<'k, u32>; 2],
        clear: impl Fn(Val<'k, u32>, (Val<'k, u32>, Val<'k, bool>)),
    ) {
        let Producer::Gather(producer @ GatherProducer { scatter: Some(scatter), .. }) = self else { return };
        let Some(all_phases) = scatter.all_phases else { return };
        let (phase, group) = scatter.groups.split(batch);
        let tiled = scatter.last_phase + 1;
        k.range_step(tiled + phase, all_phases, tiled, |phase| {
            let (_, rows) = producer.phase(k, scatter, phase);
            k.range_step(warp * CLEARED_ROWS, rows_of_tile, warps * CLEARED_ROWS, |row| {
                clear(group, rows.place(k, first_row + row + (k.lane() & (CLEARED_ROWS - 1))));
            });
        });
    }

    /// Steps of depth of the tile at place `tile` of the walk over tiles; some number behind the last one.
    pub(super) fn steps_of_tile(&self, k: Kernel<'k>, schedule: &Schedule<'k>, tile: Val<'k, u32>) -> Val<'k, u32> {
        let Producer::Gather(producer @ GatherProducer { scatter: Some(scatter), .. }) = self else { return schedule.steps() };
        let phase = scatter.phase_tiles.quotient(tile).min(scatter.last_phase);
        let taps = k.ld_global::<u32>(scatter.table.at(phase, PHASE_BYTES), 4);
        k.uniform(taps) * producer.channel_blocks.value()
    }

    /// Loads a piece of work. By one thread.
    pub(super) fn load(&self, k: Kernel<'k>, spec: &Spec, work: &Work<'k>, slots: &Slots<'k>) {
        let row = slots.share.row(work) * spec.main.tile.m + slots.begins[0];
        let column = slots.share.column(work) * self.tile_columns(k, spec) + slots.begins[1];
        match self {
            Producer::Gather(producer) => producer.load(k, spec, work, [row, column], slots),
            Producer::Filter(producer, None) => producer.load(k, spec, work, [row, column], slots),
            Producer::Filter(producer, Some(places)) => producer.load_to_transpose(k, spec, work, [row, column], slots, *places),
        }
    }
}

impl<'k> GatherProducer<'k> {
    fn column_clip(&self, spec: &Spec) -> Clip<'k> {
        Clip::new(spec.main.clipped(spec.gathers()[1]), self.columns)
    }

    fn pixel_clip(&self, spec: &Spec) -> Option<Clip<'k>> {
        self.pixel_clip.map(|clip| Clip::new(spec.main.clipped(spec.gathers()[0]), clip))
    }

    /// How many taps a phase has, and where its rows belong.
    fn phase<'f>(&'f self, k: Kernel<'k>, scatter: &'f Scatter<'k>, phase: Val<'k, u32>) -> (Val<'k, u32>, RowMap<'f, 'k>) {
        let address = scatter.table.at(phase, PHASE_BYTES);
        let words = k.ld_global_vector::<u32>(address, 0, 4, Cache::Default);
        let mut first = vec![words[2], words[3]];
        if self.walk.counts.len() == 3 {
            first.push(k.ld_global::<u32>(address, 16));
        }
        (words[1], RowMap { producer: self, scatter, first })
    }

    fn load(&self, k: Kernel<'k>, spec: &Spec, work: &Work<'k>, first: [Val<'k, u32>; 2], slots: &Slots<'k>) {
        let (pixels, depth) = (spec.gathered(), spec.main.depth());
        // What is loaded of each, from which row on, where it goes, and how.
        let operand = |i: usize, operand| (first[i], slots.addresses[i], slots.begins[i], slots.options[i], spec.main.operand(operand));
        let [of_a, of_b] = [operand(0, Operand::A), operand(1, Operand::B)];
        let [of_pixels, of_filter] = if spec.swap_ab { [of_b, of_a] } else { [of_a, of_b] };
        let (pixel, pixel_slots, pixel_part, pixel_options, pixel_tile) = of_pixels;
        let (column, filter_slots, filter_part, filter_options, filter_tile) = of_filter;
        let (group, first_tap, steps) = match &self.scatter {
            None => (work.batch, k.constant(0), work.steps),
            Some(scatter) => {
                let (phase, group) = scatter.groups.split(work.batch);
                let words = k.ld_global_vector::<u32>(scatter.table.at(phase, PHASE_BYTES), 0, 2, Cache::Default);
                (group, words[0], words[1] * self.channel_blocks.value())
            }
        };
        let (base, image) = self.walk.base(pixel);
        let (taps_before, channel_blocks_before) = self.channel_blocks.split(work.first_step);
        let entry = k.var_named("tap", self.taps.at(first_tap + taps_before, TAP_BYTES));
        // The tap that is next: offsets, position, and how many images further.
        let read = || k.ld_global_vector::<u32>(entry, 0, 4, Cache::Default);
        let next: Vec<_> = read().into_iter().map(|word| k.var(word)).collect();
        let (group_channel, group_position) = (group * self.group_channels, group * self.group_positions);
        let filter_column = column + group * self.group_columns;
        let clip = self.column_clip(spec);
        let columns = clip.rows(column - filter_part);
        let pixel_bytes = self.pixel_clip(spec).map_or(k.constant(pixel_tile.bytes()), |tile| tile.bytes(tile.rows(k.constant(0))));
        let bytes = clip.bytes(columns) + pixel_bytes;
        let steps_left = k.var_named("steps_left", steps);
        let first_channel_block = k.var_named("slab", channel_blocks_before);
        k.while_(
            || steps_left.gt(0),
            || {
                let tap: Vec<Val<'k, u32>> = next.iter().map(|word| word.get()).collect();
                let offsets = Offsets { plane: tap[0], depth: tap[1] }.list(spec.spatial);
                let (position, image) = (tap[2] + group_position, image + tap[3]);
                // What follows is read under this tap's channel blocks: a step of small tiles is shorter than the way to memory. In three
                // dims the loads of a cluster leave no registers for it.
                entry.set(entry + u64::from(TAP_BYTES));
                let behind = (spec.spatial < 3 || spec.main.tile.peers() == 1).then(read);
                let channel_blocks = (self.channel_blocks.value() - first_channel_block).min(steps_left);
                let channel = k.var_named("channel", first_channel_block * depth);
                k.range(channel_blocks, |_| {
                    let full = slots.ring.acquire(bytes);
                    let stage = slots.ring.stage();
                    let pixel_slot = pixel_slots + stage * pixel_tile.bytes() + pixel_part * ROW_BYTES;
                    pixels.load(pixel_slot, &self.pixels, channel + group_channel, &base, image, &offsets, full, pixel_options);
                    clip.load(
                        filter_slots + stage * filter_tile.bytes(),
                        filter_part,
                        columns,
                        &self.filter,
                        filter_column,
                        channel.get(),
                        position,
                        full,
                        filter_options,
                    );
                    slots.ring.advance();
                    channel.set(channel + depth);
                });
                steps_left.set(steps_left - channel_blocks);
                first_channel_block.set(0);
                next.iter().zip(behind.unwrap_or_else(read)).for_each(|(word, read)| word.set(read));
            },
        );
    }
}

impl<'k> FilterProducer<'k> {
    fn clips(&self, spec: &Spec) -> Option<[Clip<'k>; 2]> {
        let [rows, columns] = self.clips?;
        Some([Clip::new(spec.main.clipped(Operand::A), rows), Clip::new(spec.main.clipped(Operand::B), columns)])
    }

    /// What a channel block of a tile's columns reads: its channel, and the offsets of its tap; those beyond the last tap read nothing.
    fn place(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        [group, tap_of_matrix]: [Val<'k, u32>; 2],
        channel_block: Val<'k, u32>,
    ) -> (Val<'k, u32>, Offsets<'k>) {
        let (tap, channel_block) = self.channel_blocks.split(channel_block);
        let tap = (tap + tap_of_matrix).min(self.tap_count);
        let words = k.ld_global_vector::<u32>(self.taps.at(tap, TAP_BYTES), 0, 4, Cache::Default);
        let channel = group * self.group_channels + channel_block * spec.main.depth();
        (channel + words[3], Offsets { plane: words[0], depth: words[1] })
    }

    /// Loads tiles that are transposed in shared memory behind that: all panels of dy at once, and a box of x for each channel block, whose
    /// places stand in shared memory.
    fn load_to_transpose(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        work: &Work<'k>,
        [row, column]: [Val<'k, u32>; 2],
        slots: &Slots<'k>,
        places: SharedPiece<'k>,
    ) {
        let (tiles, pixels, depth) =
            ([Operand::A, Operand::B].map(|operand| spec.main.operand(operand)), spec.gathered(), spec.main.depth());
        let (tap_of_matrix, group) = self.groups.split(work.batch);
        let dy_row = row + group * self.group_rows;
        let first_channel_block = column >> depth.trailing_zeros();
        let channel_blocks = spec.main.tile.loaded(Operand::B) / depth;
        k.range(channel_blocks, |channel_block| {
            let (channel, Offsets { plane, depth }) = self.place(k, spec, [group, tap_of_matrix], first_channel_block + channel_block);
            k.st_shared_vector(places.address() + channel_block * PLACE_BYTES, 0, &[channel, plane, depth, depth]);
        });
        k.range(work.steps, |step| {
            let pixel = (work.first_step + step) * depth;
            let (base, image) = self.walk.base(pixel);
            let full = slots.ring.acquire(tiles[0].bytes() + tiles[1].bytes());
            let stage = slots.ring.stage();
            let dy_channel_block = dy_row >> depth.trailing_zeros();
            let coordinates = [k.constant(0i32), pixel.signed(), dy_channel_block.signed()];
            k.tma_load(slots.addresses[0] + stage * tiles[0].bytes(), &self.dy, &coordinates, full, slots.options[0]);
            let b_slot = slots.addresses[1] + stage * tiles[1].bytes();
            k.range(channel_blocks, |channel_block| {
                let words = k.ld_shared_vector::<u32>(places.address() + channel_block * PLACE_BYTES, 0, 4);
                let offsets = Offsets { plane: words[1], depth: words[2] }.list(spec.spatial);
                let slot = b_slot + channel_block * pixels.operand().bytes();
                pixels.load(slot, &self.pixels, words[0], &base, image, &offsets, full, slots.options[1]);
            });
            slots.ring.advance();
        });
    }

    fn load(&self, k: Kernel<'k>, spec: &Spec, work: &Work<'k>, [row, column]: [Val<'k, u32>; 2], slots: &Slots<'k>) {
        let Some([row_clip, column_clip]) = self.clips(spec) else { return };
        let ([a_tile, b_tile], [a_begins, b_begins]) = ([Operand::A, Operand::B].map(|operand| spec.main.operand(operand)), slots.begins);
        let (pixels, depth) = (spec.gathered(), spec.main.depth());
        let (tap_of_matrix, group) = self.groups.split(work.batch);
        let dy_row = row + group * self.group_rows;
        let first_channel_block = column >> depth.trailing_zeros();
        let (tile_rows, tile_columns) = (row_clip.rows(row - a_begins), column_clip.rows(column - b_begins));
        let bytes = row_clip.bytes(tile_rows) + column_clip.bytes(tile_columns);
        let own_columns = tile_columns - b_begins.min(tile_columns);
        let channel_blocks = 0..spec.main.tile.loaded(Operand::B) / depth;
        let columns: Vec<(Val<'k, u32>, Offsets<'k>)> =
            channel_blocks.map(|block| self.place(k, spec, [group, tap_of_matrix], first_channel_block + block)).collect();
        k.range(work.steps, |step| {
            let (pass, step) = self.pass_steps.split(work.first_step + step);
            let pixel = step * depth;
            let (base, image) = self.walk.base(pixel);
            let terms = self.passes.shr(pass * 4);
            let image = image + (terms & 3u32) * self.images;
            let full = slots.ring.acquire(bytes);
            let stage = slots.ring.stage();
            let a_slot = slots.addresses[0] + stage * a_tile.bytes();
            row_clip.load(a_slot, a_begins, tile_rows, &self.dy, dy_row, pixel, (terms >> 2) & 3u32, full, slots.options[0]);
            let b_slot = slots.addresses[1] + stage * b_tile.bytes() + b_begins * ROW_BYTES;
            for (i, (channel, offsets)) in (0u32..).zip(&columns) {
                let slot = b_slot + i * pixels.operand().bytes();
                k.when(own_columns.gt(i * depth), || {
                    pixels.load(slot, &self.pixels, *channel, &base, image, &offsets.list(spec.spatial), full, slots.options[1]);
                });
            }
            slots.ring.advance();
        });
    }
}
