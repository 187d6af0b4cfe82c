//! fprop and dgrad: a CTA stages the lines that its outputs meet, each thread sums a block of outputs, and what comes of them goes out of shared memory 16 bytes at a time.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::params::{Divide, Read, Write};

use super::stage::{Cut, CutArgs, Held, Place, Share, SourceArgs, words};
use super::{SPAN_BYTES, Spec, THREADS};
use crate::fuse::epilogue::{Epilogue, EpilogueArgs, EpilogueSpec};
use crate::fuse::value::{AnyVal, Raw};
use crate::store::span::Span;

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    pub(super) struct Pixels / PixelsArgs of Spec as spec {
        pub(super) cut: CutArgs = (),
        pub(super) source: SourceArgs = spec.dtype,
        pub(super) planes: PlanesArgs = (),
        pub(super) filter: FilterArgs = spec.dtype.bytes() as u32,
        pub(super) result: ResultArgs = spec.result_bytes(),
        pub(super) epilogue: Option<EpilogueArgs> = spec.epilogue.as_ref().map(EpilogueSpec::over_tensors),
    }
}

verdigris_kir::parameters! {
    /// Which plane is read. Planes are numbered channel by channel: in round `r`, plane `q` of the result reads plane `q / quotient · factor + r`.
    #[derive(Clone, Copy)]
    pub(super) struct Planes / PlanesArgs of () as _spec {
        pub(super) quotient: Divide,
        pub(super) factor: u32,
        pub(super) rounds: u32,
        /// Of what is read.
        pub(super) channels: Divide,
        /// From image to image and from channel to channel, and from plane to plane where a CTA takes several.
        pub(super) strides: [u64; 2],
        pub(super) plane_bytes: u32,
    }
}

verdigris_kir::parameters! {
    /// The filters, channel `c` of the result having filter `c · factor + round`. Addresses count modulo 2⁶⁴, so that taps may be met from the last one on.
    #[derive(Clone, Copy)]
    pub(super) struct Filter / FilterArgs of u32 as bytes {
        pub(super) pointer: Read = *bytes,
        pub(super) origin: u64,
        /// Over filters, rows and columns.
        pub(super) strides: [u64; 3],
        pub(super) factor: u32,
        pub(super) rows: Divide,
        pub(super) columns: u32,
        /// Words of a row in shared memory: whole quads.
        pub(super) pitch: Divide,
    }
}

verdigris_kir::parameters! {
    /// The result, whose rows lie one behind the other. In shared memory the rows of whole planes do so too, and rows of which a CTA has a part are `pitch_bytes` apart,
    /// each as far behind a multiple of 16 bytes as in global memory.
    #[derive(Clone, Copy)]
    pub(super) struct Output / ResultArgs of u32 as bytes {
        pub(super) pointer: Write = *bytes,
        pub(super) channels: Divide,
        /// From image to image and from channel to channel.
        pub(super) strides: [u64; 2],
        pub(super) row_bytes: u32,
        pub(super) pitch_bytes: u32,
        /// What a row is behind the one before it in global memory, where it is stored on its own; else 0.
        pub(super) apart_bytes: u32,
    }
}

/// A thread's sums: rows and columns of outputs.
type Sums<'k> = Vec<Vec<Var<'k, f32>>>;

/// Builds the kernel.
pub(super) fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let Pixels { cut, source, planes, filter, result, epilogue } = Pixels::declare(k, spec);
    let epilogue: Epilogue<'k> = epilogue.expect("pixels have an epilogue").of();
    let staged = k.shared("lines", spec.staged_bytes(), 16).address();
    let table = k.shared("taps", spec.table_bytes(), 16).address();
    let kept = k.shared("results", spec.kept_bytes(), 16).address();

    let share = cut.share(k.cta());
    let place = cut.place(k.thread(), &share);
    let own = source.own(spec, &place, staged);
    let taps = table + place.plane * (filter.rows.value() * filter.pitch.value() * 4);
    let [rows, columns] = spec.outputs();
    let sums: Sums<'k> = (0..rows).map(|_| (0..columns).map(|_| k.var(0.0f32)).collect()).collect();
    let none = [k.constant(0u32); 2];
    let first_read = planes.quotient.quotient(share.first_plane);
    k.range(planes.rounds, |round| {
        let (image, channel) = planes.channels.split(first_read * planes.factor + round);
        let base = source.pointer.address() + image.widen() * planes.strides[0] + channel.widen() * planes.strides[1];
        // All are done with the lines and taps of the round before.
        k.when(round.gt(0), || k.bar_sync());
        let plane = |number: Val<'k, u32>| {
            let further = planes.quotient.quotient(share.first_plane + number) - first_read;
            base + (further * planes.factor).mul_wide(planes.plane_bytes)
        };
        filter.stage(k, spec, &share, &result, round, table, || source.stage(k, spec, &share, none, plane, staged));
        // Lines and taps are there.
        k.bar_sync();
        k.when(place.is_used, || match spec.taps {
            Some(extents) => add_whole(k, spec, extents, own, source.pitch_bytes(spec), taps, &sums),
            None => add_any(k, spec, own, source.pitch_bytes(spec), taps, &filter, &sums),
        });
    });
    result.store(k, spec, &cut, &share, &place, &epilogue, kept, &sums);
}

impl<'k> Filter<'k> {
    /// Brings the filters of a share to the table: rows of taps in f32, what is behind a row zero. Taps that threads have one of are on their way while `meanwhile` runs.
    #[allow(clippy::too_many_arguments, reason = "each says one thing about which taps go where")]
    fn stage(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        share: &Share<'k>,
        result: &Output<'k>,
        round: Val<'k, u32>,
        table: Val<'k, u32>,
        meanwhile: impl Fn(),
    ) {
        let words = share.planes * self.rows.value() * self.pitch.value();
        let load = |i: Val<'k, u32>| {
            let (rest, column) = self.pitch.split(i);
            let (plane, row) = self.rows.split(rest);
            let (_, channel) = result.channels.split(share.first_plane + plane);
            let tap = Held::new(k, spec.dtype);
            k.when(i.lt(words) & column.lt(self.columns), || {
                let filter = (channel * self.factor + round).widen() * self.strides[0];
                let address = self.pointer.address() + self.origin + filter;
                tap.load(k, address + row.widen() * self.strides[1] + column.widen() * self.strides[2], 0);
            });
            tap
        };
        let keep = |i: Val<'k, u32>, tap: Held<'k>| k.when(i.lt(words), || k.st_shared(table + i * 4, 0, tap.value(spec.dtype)));
        let first = load(k.thread());
        meanwhile();
        keep(k.thread(), first);
        k.range_step(k.thread() + THREADS, words, THREADS, |i| keep(i, load(i)));
    }
}

/// Adds the products of a filter that is unrolled: each line is read once for all outputs that meet it, each row of taps when the first line needs it.
fn add_whole<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    [tap_rows, tap_columns]: [u32; 2],
    own: Val<'k, u32>,
    pitch_bytes: Val<'k, u32>,
    taps: Val<'k, u32>,
    sums: &Sums<'k>,
) {
    let [rows, columns] = spec.outputs();
    let tap_pitch = i64::from(tap_columns.next_multiple_of(4) * 4);
    let mut filter: Vec<Option<Vec<Val<'k, f32>>>> = vec![None; tap_rows as usize];
    let mut address = own;
    for line in 0..spec.stride.lines(rows, tap_rows) {
        if line > 0 {
            address = address + pitch_bytes;
        }
        let values = words(k, address, 0, spec.stride.lines(columns, tap_columns));
        for (row, tap_row) in spec.stride.pairs(rows, tap_rows, line) {
            let factors: &[_] = filter[tap_row].get_or_insert_with(|| words(k, taps, tap_row as i64 * tap_pitch, tap_columns));
            for (tap, &factor) in (0u32..).zip(factors) {
                for (column, sum) in (0u32..).zip(&sums[row]) {
                    if let Some(at) = spec.stride.line(column, tap, tap_columns) {
                        sum.set(k.fma(values[at as usize], factor, *sum));
                    }
                }
            }
        }
    }
}

/// Adds the products of any filter, four taps of a row at a time. What a row does not have is stepped over, for zero times infinity would be NaN.
fn add_any<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    own: Val<'k, u32>,
    pitch_bytes: Val<'k, u32>,
    taps: Val<'k, u32>,
    filter: &Filter<'k>,
    sums: &Sums<'k>,
) {
    let [rows, columns] = spec.outputs();
    // From output to output; a dgrad of stride 2 is unrolled.
    let apart = spec.stride.apart(1);
    let add = |at: Val<'k, u32>, factor: Val<'k, u32>, has: &dyn Fn(u32, &dyn Fn())| {
        let factors = words(k, factor, 0, 4);
        for (row, sums) in (0u32..).zip(sums) {
            let values = words(k, at + pitch_bytes * (row * apart), 0, spec.stride.lines(columns, 4));
            for (tap, &factor) in (0u32..).zip(&factors) {
                has(tap, &|| {
                    for (column, sum) in (0u32..).zip(sums) {
                        sum.set(k.fma(values[(column * apart + tap) as usize], factor, *sum));
                    }
                });
            }
        }
    };
    let (whole, rest) = (filter.columns >> 2, filter.columns & 3);
    debug_assert_eq!(sums.len() as u32, rows);
    k.range(filter.rows.value(), |row| {
        let (line, factors) = (own + row * pitch_bytes, taps + row * (filter.pitch.value() * 4));
        k.range(whole, |block| add(line + block * 16, factors + block * 16, &|_, body| body()));
        k.when(rest.gt(0), || {
            let last = whole * 16;
            add(line + last, factors + last, &|tap, body| k.when(rest.gt(tap), body));
        });
    });
}

impl<'k> Output<'k> {
    /// What follows the sums.
    #[allow(clippy::too_many_arguments, reason = "each says one thing about where the sums belong")]
    fn store(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        cut: &Cut<'k>,
        share: &Share<'k>,
        place: &Place<'k>,
        epilogue: &Epilogue<'k>,
        kept: Val<'k, u32>,
        sums: &Sums<'k>,
    ) {
        let bytes = spec.result_bytes();
        let [height, width] = cut.extents;
        let [rows, columns] = spec.outputs();
        // The outputs of the CTA: rows and columns.
        let bounds = |i: usize, blocks: Val<'k, u32>, extent: Val<'k, u32>| {
            let edge = |block: Val<'k, u32>| {
                let at = (block * spec.outputs()[i] - cut.before[i]).signed().max(0);
                at.unsigned().min(extent)
            };
            [edge(share.block[i]), edge(share.block[i] + blocks)]
        };
        let [first_row, end_row] = bounds(0, cut.strips.value(), height);
        let [first_column, end_column] = bounds(1, cut.groups.value(), width);
        let (image, channel) = self.channels.split(share.first_plane);
        let to = self.pointer.address()
            + image.widen() * self.strides[0]
            + channel.widen() * self.strides[1]
            + first_row.mul_wide(self.row_bytes)
            + first_column.mul_wide(bytes);
        let row_at = |row: Val<'k, u32>| {
            let behind = (to.low32() + row * self.apart_bytes) & (SPAN_BYTES - 1);
            kept + row * self.pitch_bytes + behind
        };

        let (image, channel) = self.channels.split(share.first_plane + place.plane);
        let [row, column] = cut.first_output(spec, share, place);
        let zero = k.constant(0u32);
        let there = [epilogue.height_step(row), epilogue.width_step(column)];
        let [down, right] = [epilogue.height_step(k.constant(1)), epilogue.width_step(k.constant(1))];
        let mut line = there.iter().fold(epilogue.at_pixel([image, zero, zero, zero], channel), |place, step| place.along(step));
        // Before the first one, an output is not there.
        let inside = |at: Val<'k, i32>, i: u32, extent: Val<'k, u32>| (at.unsigned() + i).lt(extent);
        let is_column: Vec<_> = (0..columns).map(|i| inside(column, i, width)).collect();
        for i in 0..rows {
            if i > 0 {
                line = line.along(&down);
            }
            k.when(place.is_used & inside(row, i, height), || {
                let plane = place.plane * (height * self.row_bytes);
                let at = row_at(row.unsigned() + i - first_row) + plane + (column.unsigned() - first_column) * bytes;
                let mut point = line.clone();
                for j in 0..columns {
                    if j > 0 {
                        point = point.along(&right);
                    }
                    k.when(is_column[j as usize], || {
                        let value = point.apply(sums[i as usize][j as usize].get(), 0);
                        let offset = i64::from(j * bytes);
                        match AnyVal::of(value).encoded(k, spec.result_type()) {
                            Raw::B16(bits) => k.st_shared(at, offset, bits),
                            Raw::B32(bits) => k.st_shared(at, offset, bits),
                            other => unreachable!("{other:?} of a float"),
                        }
                    });
                }
            });
        }
        // All have left their results.
        k.bar_sync();
        let (all_rows, own_columns) = (end_row - first_row, end_column - first_column);
        let is_apart = self.apart_bytes.ne(0);
        let elements = k.select(is_apart, own_columns, ((share.planes - 1) * height + all_rows) * width);
        k.range(k.select(is_apart, all_rows, 1u32), |row| {
            let first = to + row.mul_wide(self.apart_bytes);
            Span { first, elements, element_bytes: bytes, threads: THREADS }.copy_out(row_at(row));
        });
    }
}
