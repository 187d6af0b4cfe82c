//! The product: a tile of the result from K-tiles of gathered activations and of a plain operand.
//!
//! Where an activation lies follows from two indices: of the tile's side on which it stands, and of the depth. Each contributes an offset
//! and three coordinates, and the element is zero unless the sums of the coordinates lie inside of the tensor. What an index of the depth
//! contributes is worked out once for each K-tile, by 16 threads, and read from a small table in shared memory; what an index of the side
//! contributes stays in registers.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::params::{Divide, Read, Write};

use super::{Kind, Spec, THREADS, Tile};
use crate::conv::geometry::boxes::PixelBoxArguments;
use crate::conv::geometry::phases::{FilterWalkArguments, GradientStepsArguments, Phase, StepsArguments};
use crate::fuse::element::{Arithmetic, Element, RawVar, finish};
use crate::fuse::epilogue::EpilogueArgs;
use crate::fuse::prologue::{Prologue, PrologueArgs};
use crate::layout::batch::BatchIndexArgs;
use crate::layout::images::StridedArguments;
use crate::split_k::filter::direct::{FilterColumnsArguments, Order};

/// Depth of a K-tile.
pub(super) const DEPTH: u32 = 16;
/// Bytes of what the table of the depth holds for one index.
const ENTRY_BYTES: u32 = 32;
/// A coordinate that no sum brings into a tensor: problems keep spatial numbers below 2²⁹.
const OUTSIDE: i32 = 1 << 30;
/// In place of a channel: the depth ends before this index.
const NOTHING: u32 = u32::MAX;
/// What an index of the depth contributes.
struct Entry<'k> {
    gather_offset: Val<'k, u64>,
    plain_offset: Val<'k, u64>,
    coordinates: [Val<'k, i32>; 3],
    /// The gathered tensor's channel inside of the group, 0 where the depth runs over pixels; [`NOTHING`] behind the end.
    channel: Val<'k, u32>,
}

/// The tables of two K-tiles.
#[derive(Clone, Copy)]
struct Table<'k> {
    k: Kernel<'k>,
    address: Val<'k, u32>,
}

impl<'k> Table<'k> {
    fn new(k: Kernel<'k>) -> Self {
        Table { k, address: k.shared("depth_table", 2 * DEPTH * ENTRY_BYTES, 16).address() }
    }

    fn place(&self, turn: Val<'k, u32>, index: Val<'k, u32>) -> Val<'k, u32> {
        self.address + turn * (DEPTH * ENTRY_BYTES) + index * ENTRY_BYTES
    }

    fn write(&self, turn: Val<'k, u32>, index: Val<'k, u32>, entry: &Entry<'k>) {
        let place = self.place(turn, index);
        self.k.st_shared_vector(place, 0, &[entry.gather_offset, entry.plain_offset]);
        let [d, h, w] = entry.coordinates.map(|coordinate| coordinate.unsigned());
        self.k.st_shared_vector(place, 16, &[d, h, w, entry.channel]);
    }

    fn read(&self, turn: Val<'k, u32>, index: Val<'k, u32>) -> Entry<'k> {
        let place = self.place(turn, index);
        let offsets = self.k.ld_shared_vector::<u64>(place, 0, 2);
        let words = self.k.ld_shared_vector::<u32>(place, 16, 4);
        Entry {
            gather_offset: offsets[0],
            plain_offset: offsets[1],
            coordinates: [words[0].signed(), words[1].signed(), words[2].signed()],
            channel: words[3],
        }
    }
}

/// What an index of a side contributes.
#[derive(Clone, Copy)]
struct Outer<'k> {
    address: Val<'k, u64>,
    /// Of gathered activations; [`OUTSIDE`] where the index is.
    coordinates: [Val<'k, i32>; 3],
    /// The channel of gathered activations, counted over all groups, less what the depth contributes.
    channel: Val<'k, u32>,
    /// Of a plain operand: 1 if the index is inside.
    inside: Val<'k, u32>,
}

/// How an operand is read.
#[derive(Clone, Copy)]
enum Reading<'r, 'k, S: Element> {
    /// Activations, by coordinates below these extents, through the prologue if there is one.
    Gathered([Val<'k, u32>; 3], Option<&'r Prologue<'k, S::Computed>>),
    /// The other operand, which has nothing around it.
    Plain,
}

/// One operand: a thread's share of a K-tile in global memory, in registers, and in shared memory.
struct Side<'r, 'k, S: Element> {
    k: Kernel<'k>,
    table: Table<'k>,
    reading: Reading<'r, 'k, S>,
    dtype: verdigris_tensor::DType,
    round_tf32: bool,
    along_depth: bool,
    /// Whether this thread has a share at all; of narrow tiles not every one has.
    has_share: Option<Val<'k, bool>>,
    depth: Val<'k, u32>,
    depth_step: u32,
    outers: Vec<Outer<'k>>,
    raw: Vec<RawVar<'k>>,
    /// With a prologue: the channel of each element on its way, [`NOTHING`] for zeros.
    channels: Vec<Var<'k, u32>>,
    shared: Val<'k, u32>,
    bytes: u32,
    pitch_bytes: u32,
    write: Val<'k, u32>,
    write_step: u32,
}

impl<'r, 'k, S: Element> Side<'r, 'k, S> {
    #[allow(clippy::too_many_arguments, reason = "each says one thing about the operand's place in the kernel")]
    fn new(
        k: Kernel<'k>,
        spec: &Spec,
        table: Table<'k>,
        name: &'static str,
        extent: u32,
        along_depth: bool,
        reading: Reading<'r, 'k, S>,
        outer: impl Fn(Val<'k, u32>) -> Outer<'k>,
    ) -> Self {
        let thread = k.thread();
        let elements = extent * DEPTH;
        let count = (elements / THREADS).max(1);
        let (line, depth) =
            if along_depth { (thread >> DEPTH.ilog2(), thread & (DEPTH - 1)) } else { (thread & (extent - 1), thread >> extent.ilog2()) };
        let has_share = (elements < THREADS).then(|| if along_depth { line.lt(extent) } else { depth.lt(DEPTH) });
        let (outer_step, depth_step) = if along_depth { (THREADS / DEPTH, 0) } else { (0, THREADS / extent) };
        let outers = (0..if along_depth { count } else { 1 }).map(|i| outer(line + outer_step * i)).collect();
        let (dtype, has_prologue) = match reading {
            Reading::Gathered(_, prologue) => (spec.gathered, prologue.is_some()),
            Reading::Plain => (spec.plain, false),
        };
        // 16 bytes beyond a line of the K-tile keep the two orders of writing off each other's banks.
        let pitch_bytes = extent * S::TY.bytes() + 16;
        let shared = k.shared(name, 2 * DEPTH * pitch_bytes, 16).address();
        Side {
            k,
            table,
            reading,
            dtype,
            round_tf32: spec.arithmetic == Arithmetic::Tf32,
            along_depth,
            has_share,
            depth,
            depth_step,
            outers,
            raw: (0..count).map(|_| RawVar::new(k, dtype)).collect(),
            channels: (0..if has_prologue { count } else { 0 }).map(|_| k.var(NOTHING)).collect(),
            shared,
            bytes: DEPTH * pitch_bytes,
            pitch_bytes,
            write: shared + depth * pitch_bytes + line * S::TY.bytes(),
            write_step: depth_step * pitch_bytes + outer_step * S::TY.bytes(),
        }
    }

    fn sharing(&self, body: impl Fn()) {
        match self.has_share {
            Some(has_share) => self.k.when(has_share, body),
            None => body(),
        }
    }

    /// Starts loading the thread's elements of a K-tile, whose table is that of `turn`.
    fn fetch(&self, turn: Val<'k, u32>) {
        self.sharing(|| {
            let mut entry = None;
            for (i, &raw) in self.raw.iter().enumerate() {
                if !self.along_depth || i == 0 {
                    entry = Some(self.table.read(turn, self.depth + self.depth_step * i as u32));
                }
                let Some(entry) = &entry else { continue };
                self.fetch_one(i, raw, entry);
            }
        });
    }

    fn fetch_one(&self, i: usize, raw: RawVar<'k>, entry: &Entry<'k>) {
        let k = self.k;
        let outer = &self.outers[if self.along_depth { i } else { 0 }];
        let (is_inside, offset) = match self.reading {
            Reading::Gathered(extents, _) => {
                let inside: [Val<'k, bool>; 3] =
                    std::array::from_fn(|dim| (outer.coordinates[dim] + entry.coordinates[dim]).unsigned().lt(extents[dim]));
                (inside[0] & inside[1] & inside[2], entry.gather_offset)
            }
            Reading::Plain => (outer.inside.ne(0) & entry.channel.ne(NOTHING), entry.plain_offset),
        };
        raw.clear();
        k.when(is_inside, || raw.load(k, self.dtype, outer.address + offset));
        if let Some(channel) = self.channels.get(i) {
            channel.set(k.select(is_inside, outer.channel + entry.channel, NOTHING));
        }
    }

    /// Writes the elements that have arrived to half `turn` of shared memory.
    fn keep(&self, turn: Val<'k, u32>) {
        let k = self.k;
        self.sharing(|| {
            let base = self.write + turn * self.bytes;
            for (i, &raw) in self.raw.iter().enumerate() {
                let mut value = S::decode(k, self.dtype, raw);
                if let (Reading::Gathered(_, Some(prologue)), Some(channel)) = (self.reading, self.channels.get(i)) {
                    // Zeros around a tensor stay zeros. What they would be is computed with some channel, and thrown away.
                    let channel = channel.get();
                    let is_inside = channel.ne(NOTHING);
                    let changed = S::narrow(prologue.apply(S::widen(value), k.select(is_inside, channel, 0)));
                    value = k.select(is_inside, changed, k.constant(S::ZERO));
                }
                if self.round_tf32 {
                    value = S::rounded_to_tf32(value);
                }
                k.st_shared(base, i64::from(self.write_step) * i as i64, value);
            }
        });
    }

    /// A thread's elements of one depth: groups of `width` neighbours.
    fn read(&self, k_tile: Val<'k, u32>, step: u32, share: Share) -> Vec<Val<'k, S>> {
        (0..share.count / share.width)
            .flat_map(|group| {
                let offset = i64::from(step * self.pitch_bytes + group * share.threads * share.width * S::TY.bytes());
                if share.width == 1 {
                    vec![self.k.ld_shared(k_tile, offset)]
                } else {
                    self.k.ld_shared_vector(k_tile, offset, share.width as u8)
                }
            })
            .collect()
    }
}

/// How a side of the tile is shared out: each of `threads` has `count` elements, in groups of `width` neighbours.
#[derive(Clone, Copy)]
struct Share {
    threads: u32,
    count: u32,
    width: u32,
}

impl Share {
    fn new<S: Element>(extent: u32, threads: u32) -> Share {
        let count = extent / threads;
        Share { threads, count, width: S::GROUP.min(count) }
    }

    /// The place in the tile of element `i` of thread 0.
    fn place(self, i: u32) -> u32 {
        i / self.width * (self.threads * self.width) + i % self.width
    }
}

/// A thread's sums and where they stand.
struct Sums<'k, S> {
    values: Vec<Vec<Var<'k, S>>>,
    rows: Vec<Val<'k, u32>>,
    columns: Vec<Val<'k, u32>>,
}

/// Sums up all K-tiles. `fill` writes the table of a K-tile: turn, then K-tile.
fn multiply<'k, S: Element>(
    k: Kernel<'k>,
    tile: Tile,
    k_tiles: Val<'k, u32>,
    fill: impl Fn(Val<'k, u32>, Val<'k, u32>),
    a: &Side<'_, 'k, S>,
    b: &Side<'_, 'k, S>,
) -> Sums<'k, S> {
    let thread = k.thread();
    let across = tile.threads_across();
    let (x, y) = (thread & (across - 1), thread >> across.ilog2());
    let down = Share::new::<S>(tile.rows(), THREADS / across);
    let right = Share::new::<S>(tile.columns(), across);
    let values: Vec<Vec<Var<'k, S>>> = (0..down.count).map(|_| (0..right.count).map(|_| k.var(k.constant(S::ZERO))).collect()).collect();
    let a_reads = a.shared + y * (down.width * S::TY.bytes());
    let b_reads = b.shared + x * (right.width * S::TY.bytes());

    let (zero, one) = (k.constant(0u32), k.constant(1u32));
    fill(zero, zero);
    fill(one, one);
    k.bar_sync();
    k.when(k_tiles.gt(0), || {
        a.fetch(zero);
        b.fetch(zero);
        a.keep(zero);
        b.keep(zero);
    });
    k.bar_sync();
    k.range(k_tiles, |k_tile| {
        let next = k_tile + 1;
        let (turn, other) = (k_tile & 1u32, next & 1u32);
        k.when(next.lt(k_tiles), || {
            a.fetch(other);
            b.fetch(other);
        });
        // The table of this K-tile has been read; the one behind the next takes its place.
        fill(turn, k_tile + 2);
        let a_k_tile = a_reads + turn * a.bytes;
        let b_k_tile = b_reads + turn * b.bytes;
        for step in 0..DEPTH {
            let column = a.read(a_k_tile, step, down);
            let row = b.read(b_k_tile, step, right);
            for (line, &x) in values.iter().zip(&column) {
                for (sum, &y) in line.iter().zip(&row) {
                    sum.set(k.fma(x, y, *sum));
                }
            }
        }
        k.when(next.lt(k_tiles), || {
            a.keep(other);
            b.keep(other);
        });
        k.bar_sync();
    });
    Sums {
        values,
        rows: (0..down.count).map(|i| y * down.width + down.place(i)).collect(),
        columns: (0..right.count).map(|i| x * right.width + right.place(i)).collect(),
    }
}

/// K-tiles of a depth.
fn k_tiles_of(depth: Val<'_, u32>) -> Val<'_, u32> {
    (depth + (DEPTH - 1)) >> DEPTH.ilog2()
}

/// Builds the kernel of a spec.
pub(super) fn product<S: Element>(k: Kernel<'_>, spec: &Spec) {
    match spec.kind {
        Kind::Pixels => pixels::<S>(k, spec),
        Kind::Filter => filter::<S>(k, spec),
    }
}

verdigris_kir::parameters! {
    /// Of fprop and dgrad.
    pub(super) struct Pixels / PixelsArguments of Spec as spec {
        pub(super) rows: u32,
        pub(super) columns: u32,
        pub(super) column_tiles: Divide,
        pub(super) row_tiles: Divide,
        pub(super) height_phases: Divide,
        pub(super) width_phases: Divide,
        /// The tables of phases by depth, height and width, and where they begin.
        pub(super) phases: Read = 16,
        pub(super) table_starts: [u64; 3],
        pub(super) pixel_box: PixelBoxArguments = (),
        pub(super) batch: BatchIndexArgs = (),
        pub(super) first_group: u32,
        pub(super) steps: StepsArguments = (),
        /// Channels of the activations in a group.
        pub(super) channels: Divide,
        pub(super) group_channels: u32,
        pub(super) activations: StridedArguments = spec.gathered.bytes() as u32,
        pub(super) filter: FilterWalkArguments = spec.plain.bytes() as u32,
        pub(super) prologue: PrologueArgs = spec.prologue.over_channels(spec.arithmetic == Arithmetic::F64),
        pub(super) epilogue: EpilogueArgs = spec.epilogue.over_tensors(),
    }
}

verdigris_kir::parameters! {
    /// Of wgrad.
    pub(super) struct Filter / FilterArguments of Spec as spec {
        pub(super) rows: u32,
        pub(super) columns: u32,
        pub(super) column_tiles: Divide,
        pub(super) row_tiles: Divide,
        pub(super) depth: u32,
        pub(super) part_depth: u32,
        pub(super) pixel_box: PixelBoxArguments = (),
        pub(super) batch: BatchIndexArgs = (),
        pub(super) first_group: u32,
        pub(super) steps: GradientStepsArguments = (),
        pub(super) columns_of: FilterColumnsArguments = (),
        pub(super) group_channels: u32,
        pub(super) x: StridedArguments = spec.gathered.bytes() as u32,
        pub(super) y: StridedArguments = spec.plain.bytes() as u32,
        pub(super) prologue: PrologueArgs = spec.prologue.over_channels(spec.arithmetic == Arithmetic::F64),
        pub(super) parts: Option<PartsArguments> = spec.split.then(|| spec.sum_bytes() as u32),
        pub(super) epilogue: Option<EpilogueArgs> = (!spec.split).then(|| spec.epilogue.over_tensors()),
    }
}

verdigris_kir::parameters! {
    /// Where parts of sums of so many bytes go.
    pub(super) struct Parts / PartsArguments of u32 as sum_bytes {
        pub(super) parts: Write = *sum_bytes,
        pub(super) part_bytes: u64,
        pub(super) group_bytes: u64,
        pub(super) first_part: u32,
    }
}

/// fprop and dgrad: rows are pixels of the result, columns its channels, the depth runs over taps and channels of the activations.
fn pixels<'k, S: Element>(k: Kernel<'k>, spec: &Spec) {
    let values = Pixels::declare(k, spec);
    let Pixels { rows, columns, column_tiles, row_tiles, pixel_box, batch, first_group, channels, group_channels, filter, .. } = values;
    let (phases_h, phases_w, gathered, steps) = (values.height_phases, values.width_phases, values.activations, values.steps);
    let [depth_table, height_table, width_table] = values.table_starts;
    let prologue = (!spec.prologue.is_empty()).then(|| values.prologue.of::<S::Computed>());
    let epilogue = values.epilogue.of::<S::Computed>();

    let (rest, column_tile) = column_tiles.split(k.cta());
    let (phase, row_tile) = row_tiles.split(rest);
    let (rest, phase_w) = phases_w.split(phase);
    let (phase_d, phase_h) = phases_h.split(rest);
    let [_, _, group] = batch.of_cta();
    let group = group + first_group;
    let tables = values.phases.address();
    let phases = [(depth_table, phase_d), (height_table, phase_h), (width_table, phase_w)]
        .map(|(table, phase_index)| Phase::read(k, tables + table, phase_index));
    let depth = phases[0].count * phases[1].count * phases[2].count * group_channels;
    let first_row = row_tile * spec.tile.rows();
    let first_column = column_tile * spec.tile.columns();

    let table = Table::new(k);
    let fill = |turn: Val<'k, u32>, k_tile: Val<'k, u32>| {
        k.when(k.thread().lt(DEPTH), || {
            let index = k_tile * DEPTH + k.thread();
            let [taps_d, taps_h, taps_w] = phases.map(|phase| phase.taps);
            let (channel, tap) = match spec.order {
                Order::ChannelsLast => {
                    let (rest, channel) = channels.split(index);
                    let (rest, w) = taps_w.split(rest);
                    let (d, h) = taps_h.split(rest);
                    (channel, [d, h, w])
                }
                Order::ChannelsFirst => {
                    let (rest, w) = taps_w.split(index);
                    let (rest, h) = taps_h.split(rest);
                    let (channel, d) = taps_d.split(rest);
                    (channel, [d, h, w])
                }
            };
            let is_inside = index.lt(depth);
            let coordinates: [Val<'k, i32>; 3] = std::array::from_fn(|dim| tap[dim].signed() * steps.taps[dim]);
            let plain = (0..3).fold(channel.widen() * filter.channel, |sum, dim| sum + tap[dim].widen() * filter.tap_steps[dim]);
            let entry = Entry {
                gather_offset: channel.widen() * gathered.channel + gathered.offset(coordinates),
                plain_offset: plain,
                coordinates: [coordinates[0], coordinates[1], k.select(is_inside, coordinates[2], OUTSIDE)],
                channel: k.select(is_inside, channel, NOTHING),
            };
            table.write(turn, k.thread(), &entry);
        });
    };

    let gather_outer = |line: Val<'k, u32>| {
        let row = first_row + line;
        let [n, d, h, w] = pixel_box.split(row);
        let pixel = [d, h, w];
        let is_inside = row.lt(rows) & d.lt(phases[0].extent) & h.lt(phases[1].extent) & w.lt(phases[2].extent);
        let coordinates: [Val<'k, i32>; 3] = std::array::from_fn(|dim| k.fma(pixel[dim].signed(), steps.pixels[dim], phases[dim].offset));
        let base = gathered.pointer.address() + (group * group_channels).widen() * gathered.channel + n.widen() * gathered.first;
        Outer {
            address: base + gathered.offset(coordinates),
            coordinates: [coordinates[0], coordinates[1], k.select(is_inside, coordinates[2], OUTSIDE)],
            channel: group * group_channels,
            inside: k.constant(1),
        }
    };
    let filter_base = (0..3).fold(filter.pointer.address() + filter.origin + group.widen() * filter.group, |sum, dim| {
        sum + phases[dim].first_tap.widen() * filter.taps[dim]
    });
    let plain_outer = |line: Val<'k, u32>| {
        let column = first_column + line;
        let inside = k.select(column.lt(columns), 1u32, 0u32);
        let nowhere = k.constant(0i32);
        Outer { address: filter_base + column.widen() * filter.outer, coordinates: [nowhere; 3], channel: k.constant(0), inside }
    };
    let along_depth = spec.order == Order::ChannelsLast;
    let reading = Reading::Gathered(steps.extents, prologue.as_ref());
    let a = Side::<S>::new(k, spec, table, "activation_slabs", spec.tile.rows(), along_depth, reading, gather_outer);
    // Taps run through neighbouring elements of a filter with channels first, channels through those of the other.
    let b = Side::<S>::new(k, spec, table, "filter_slabs", spec.tile.columns(), true, Reading::Plain, plain_outer);
    let sums = multiply(k, spec.tile, k_tiles_of(depth), fill, &a, &b);

    for (line, &row) in sums.values.iter().zip(&sums.rows) {
        let row = first_row + row;
        let [n, d, h, w] = pixel_box.split(row);
        let is_inside = row.lt(rows) & d.lt(phases[0].extent) & h.lt(phases[1].extent) & w.lt(phases[2].extent);
        k.when(is_inside, || {
            let [d, h, w]: [Val<'k, u32>; 3] =
                std::array::from_fn(|dim| k.fma([d, h, w][dim], steps.results[dim], phases[dim].phase_index));
            for (sum, &column) in line.iter().zip(&sums.columns) {
                let column = first_column + column;
                k.when(column.lt(columns), || {
                    let place = epilogue.at_pixel([n, d, h, w], group * columns + column);
                    if spec.epilogue.exact {
                        place.store_exact(S::to_i32(sum.get()), 0);
                    } else {
                        place.store(place.apply(finish(k, spec.arithmetic, sum.get()), 0), 0);
                    }
                });
            }
        });
    }
}

/// Stores a sum at a row and a column.
type StoreSum<'k, S> = Box<dyn Fn(Val<'k, u32>, Val<'k, u32>, Val<'k, S>) + 'k>;

/// wgrad: rows are output channels, columns taps and input channels, the depth runs over pixels of the output.
fn filter<'k, S: Element>(k: Kernel<'k>, spec: &Spec) {
    let values = Filter::declare(k, spec);
    let Filter { rows, columns, column_tiles, row_tiles, depth, part_depth, pixel_box, batch, first_group, steps, group_channels, .. } =
        values;
    let (columns_of, gathered, plain, order) = (values.columns_of, values.x, values.y, spec.order);
    let prologue = (!spec.prologue.is_empty()).then(|| values.prologue.of::<S::Computed>());

    let (rest, column_tile) = column_tiles.split(k.cta());
    let (part, row_tile) = row_tiles.split(rest);
    let [_, _, group] = batch.of_cta();
    let group = group + first_group;
    let first_row = row_tile * spec.tile.rows();
    let first_column = column_tile * spec.tile.columns();
    let first_depth = part * part_depth;
    let end = k.select((depth - first_depth).lt(part_depth), depth, first_depth + part_depth);

    let table = Table::new(k);
    let fill = |turn: Val<'k, u32>, k_tile: Val<'k, u32>| {
        k.when(k.thread().lt(DEPTH), || {
            let index = first_depth + k_tile * DEPTH + k.thread();
            let [n, d, h, w] = pixel_box.split(index);
            let is_inside = index.lt(end);
            let pixel = [d, h, w].map(|index| index.signed());
            let coordinates: [Val<'k, i32>; 3] = std::array::from_fn(|dim| pixel[dim] * steps.pixels[dim]);
            let entry = Entry {
                gather_offset: n.widen() * gathered.first + gathered.offset(coordinates),
                plain_offset: n.widen() * plain.first + plain.offset(pixel),
                coordinates: [coordinates[0], coordinates[1], k.select(is_inside, coordinates[2], OUTSIDE)],
                channel: k.select(is_inside, 0u32, NOTHING),
            };
            table.write(turn, k.thread(), &entry);
        });
    };
    let gather_outer = |line: Val<'k, u32>| {
        let column = first_column + line;
        let (tap, channel) = columns_of.split(order, column);
        let channel = group * group_channels + channel;
        let coordinates: [Val<'k, i32>; 3] = std::array::from_fn(|dim| k.fma(tap[dim].signed(), steps.taps[dim], steps.offsets[dim]));
        Outer {
            address: gathered.pointer.address() + channel.widen() * gathered.channel + gathered.offset(coordinates),
            coordinates: [coordinates[0], coordinates[1], k.select(column.lt(columns), coordinates[2], OUTSIDE)],
            channel,
            inside: k.constant(1),
        }
    };
    let plain_outer = |line: Val<'k, u32>| {
        let row = first_row + line;
        let nowhere = k.constant(0i32);
        Outer {
            address: plain.pointer.address() + (group * rows + row).widen() * plain.channel,
            coordinates: [nowhere; 3],
            channel: k.constant(0),
            inside: k.select(row.lt(rows), 1u32, 0u32),
        }
    };
    let along_depth = spec.order == Order::ChannelsFirst;
    let reading = Reading::Gathered(steps.extents, prologue.as_ref());
    let a = Side::<S>::new(k, spec, table, "y_slabs", spec.tile.rows(), along_depth, Reading::Plain, plain_outer);
    let b = Side::<S>::new(k, spec, table, "x_slabs", spec.tile.columns(), along_depth, reading, gather_outer);

    let store: StoreSum<'k, S> = if let Some(Parts { parts, part_bytes, group_bytes, first_part }) = values.parts {
        let base = parts.address() + (first_part + part).widen() * part_bytes + group.widen() * group_bytes;
        Box::new(move |row, column, sum| {
            k.st_global(base + row.widen() * columns.widen() * u64::from(S::TY.bytes()) + column.mul_wide(S::TY.bytes()), 0, sum);
        })
    } else {
        let epilogue = values.epilogue.expect("a kernel without parts has an epilogue").of::<S::Computed>();
        let (exact, arithmetic) = (spec.epilogue.exact, spec.arithmetic);
        Box::new(move |row, column, sum| {
            let ([d, h, w], channel) = columns_of.split(order, column);
            let place = epilogue.at_pixel([group * rows + row, d, h, w], channel);
            if exact {
                place.store_exact(S::to_i32(sum), 0);
            } else {
                place.store(place.apply(finish(k, arithmetic, sum), 0), 0);
            }
        })
    };
    let sums = multiply(k, spec.tile, k_tiles_of(end - first_depth), fill, &a, &b);
    for (line, &row) in sums.values.iter().zip(&sums.rows) {
        let row = first_row + row;
        for (sum, &column) in line.iter().zip(&sums.columns) {
            let column = first_column + column;
            k.when(row.lt(rows) & column.lt(columns), || store(row, column, sum.get()));
        }
    }
}
