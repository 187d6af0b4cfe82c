//! im2col: activations as a matrix, a row for each pixel that meets them and a column for each tap and channel.
//!
//! A thread keeps to a chunk of 16 bytes of a row, so that what its columns read is found in a table once, and goes from row to row. A
//! chunk is made of as few loads as the activations' alignment allows: one where a tap's columns and channels run on for 16 bytes.
//!
//! Of f32 whose product is one of terms ([`crate::terms`]), what is written are the terms: an im2col matrix of numbers, read again to be cut, would
//! cross the memory bus twice more. A chunk of each term is then made of 32 bytes.
//!
//! **Numbers.** Bytes are moved, or numbers cut into terms; what lies outside of the activations is zero.

use verdigris_graph::{ConvProblem, Tensor};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::{Cache, Special};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{Address, Base, KernelRef, Launch, Program};

use super::columns::{Columns, Side};
use crate::arch::Arch;
use crate::conv::geometry::filter_tap;
use crate::cost::{Stream, Traffic};
use crate::gemm;
use crate::terms;
use verdigris_tensor::DType;

/// Threads of a CTA.
const THREADS: u32 = 256;
/// What a thread stores at once.
const CHUNK_BYTES: u32 = 16;
/// Of these a sector of L2 has so many.
const CHUNKS_OF_SECTOR: u32 = 2;
/// The most rows of a thread, and the CTAs of an SM that there are before a thread has a second one.
const MOST_TURNS: u64 = 16;
const CTAS: u64 = 16;
/// Words of an entry of the table: bytes from a pixel's own place, and places along depth, height and width.
const ENTRY_WORDS: u32 = 4;
/// Along the depth, what lies outside of any tensor.
const NOWHERE: i32 = i32::MIN / 2;

/// Bytes of a load, the widest first.
const UNITS: [u32; 4] = [16, 8, 4, 2];

/// Everything that shapes the kernel: bytes of a load, and the terms of f32 that it writes; 1 for the bytes as they are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Spec {
    unit_bytes: u32,
    terms: u32,
}

impl Spec {
    fn name(self) -> String {
        let terms = if self.terms > 1 { format!("_{}x{}", gemm::TERM_TYPE, self.terms) } else { String::new() };
        format!("conv_unfold_b{}{terms}", 8 * self.unit_bytes)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(self) -> KernelBody {
        let header = Header { name: self.name(), target: Target::Sm90, threads: THREADS, ..Header::default() };
        build(header, |k| im2col(k, self))
    }

    /// Bytes that a chunk is made of.
    fn chunk_source_bytes(self) -> u32 {
        if self.terms > 1 { CHUNK_BYTES * DType::F32.bytes() as u32 / gemm::TERM_TYPE.bytes() as u32 } else { CHUNK_BYTES }
    }

    /// Loads of a chunk.
    fn units(self) -> u32 {
        self.chunk_source_bytes() / self.unit_bytes
    }
}

/// Every im2col kernel.
pub(super) fn catalog() -> impl Iterator<Item = KernelRef> {
    let terms = UNITS.into_iter().filter(|&unit_bytes| unit_bytes >= 4).map(|unit_bytes| Spec { unit_bytes, terms: gemm::F32_TERMS });
    UNITS.into_iter().map(|unit_bytes| Spec { unit_bytes, terms: 1 }).chain(terms).map(Spec::kernel)
}

/// Where a column reads: channel, and distance from the row's own pixel along each dim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Column {
    places: [i64; 3],
    channel: u64,
}

/// Activations for im2col.
#[derive(Clone, Debug)]
pub(super) struct Im2col {
    source: Tensor,
    images: u64,
    /// Extents of the activations, and of the pixels that meet them.
    extents: [u64; 3],
    pixels: [u64; 3],
    /// Pixels of the activations from one row to the next.
    steps: [u64; 3],
    columns: Vec<Column>,
    spec: Spec,
}

impl Im2col {
    /// x as y's pixels meet it, or y as x's do, as so many terms. `None` where a stride leaves out pixels of x.
    pub(super) fn new(p: &ConvProblem, columns: &Columns, side: Side, terms: u32) -> Option<Im2col> {
        let signed = |values: [u64; 3]| values.map(|value| value as i64);
        let (pads, dilations) = (signed(p.pads_before), signed(p.dilations));
        let (source, extents, pixels, steps, sign) = match side {
            Side::X => (&p.x, p.input, p.output, p.strides, 1),
            Side::Y => (&p.y, p.output, p.input, [1; 3], -1),
        };
        if side == Side::Y && p.strides != [1; 3] {
            return None;
        }
        let mut list = vec![Column { places: [0; 3], channel: 0 }; columns.count as usize];
        for d in 0..p.filter[0] {
            for h in 0..p.filter[1] {
                for w in 0..p.filter[2] {
                    let tap = [d, h, w];
                    let over = filter_tap(p, tap);
                    let places = [0, 1, 2].map(|dim| sign * (over[dim] as i64 * dilations[dim] - pads[dim]));
                    let first: u64 = tap.iter().zip(columns.taps).map(|(tap, stride)| tap * stride).sum();
                    for channel in 0..side.channels(p) {
                        list[(first + channel * columns.channel) as usize] = Column { places, channel };
                    }
                }
            }
        }
        let spec = Spec { unit_bytes: 2, terms };
        let mut im2col = Im2col { source: source.clone(), images: p.n, extents, pixels, steps, columns: list, spec };
        im2col.spec.unit_bytes = UNITS.into_iter().find(|&unit_bytes| im2col.allows(unit_bytes))?;
        Some(im2col)
    }

    fn element_bytes(&self) -> u64 {
        self.source.dtype.bytes() as u64
    }

    /// Bytes of a column's element from a row's own pixel.
    fn offset_bytes(&self, column: &Column) -> i64 {
        let [_, channel, strides @ ..] = self.source.strides.map(|stride| stride as i64);
        let pixel: i64 = column.places.iter().zip(strides).map(|(place, stride)| place * stride).sum();
        (pixel + column.channel as i64 * channel) * self.element_bytes() as i64
    }

    /// Whether elements that are loaded together lie together, begin at multiples of the load's size, and are inside of the tensor
    /// together.
    fn allows(&self, unit_bytes: u32) -> bool {
        let (bytes, unit_bytes) = (self.element_bytes(), u64::from(unit_bytes));
        if unit_bytes < bytes {
            return false;
        }
        let whole = |n: u64| n.is_multiple_of(unit_bytes);
        let [image, _, strides @ ..] = self.source.strides;
        let steps = [0, 1, 2].map(|dim| (self.pixels[dim], strides[dim] * self.steps[dim]));
        let mut moves = [(self.images, image)].into_iter().chain(steps);
        let elements = (unit_bytes / bytes) as usize;
        moves.all(|(extent, stride)| extent <= 1 || whole(stride * bytes))
            && self.columns.len().is_multiple_of(elements)
            && self.columns.chunks(elements).all(|unit| {
                let first = self.offset_bytes(&unit[0]);
                let together =
                    unit.iter().all(|column| column.places == unit[0].places) || unit.iter().all(|column| self.is_inside(column));
                let run = unit.iter().zip(0i64..).all(|(column, i)| self.offset_bytes(column) == first + i * bytes as i64);
                together && run && first.rem_euclid(unit_bytes as i64) == 0
            })
    }

    /// Whether a column lies inside of the tensor for every row.
    fn is_inside(&self, column: &Column) -> bool {
        (0..3).all(|dim| {
            let last = ((self.pixels[dim] - 1) * self.steps[dim]) as i64 + column.places[dim];
            column.places[dim] >= 0 && last < self.extents[dim] as i64
        })
    }

    /// Rows of the matrix.
    pub(super) fn rows(&self) -> u64 {
        self.pixels.iter().fold(self.images, |all, &extent| all.saturating_mul(extent))
    }

    /// Elements from one row to the next, of the activations' type or of terms: whole chunks.
    pub(super) fn pitch(&self) -> u64 {
        let columns = self.columns.len() as u64;
        if self.spec.terms > 1 {
            terms::pitch(columns, gemm::TERM_TYPE)
        } else {
            columns.next_multiple_of(u64::from(CHUNK_BYTES) / self.element_bytes())
        }
    }

    /// Bytes from one row to the next.
    fn pitch_bytes(&self) -> u64 {
        self.pitch() * if self.spec.terms > 1 { gemm::TERM_TYPE.bytes() as u64 } else { self.element_bytes() }
    }

    /// Chunks of a row, of one term.
    fn chunks(&self) -> u64 {
        (self.columns.len() as u64 * self.element_bytes()).div_ceil(u64::from(self.spec.chunk_source_bytes()))
    }

    /// Whether what rows beside each other read lies side by side, and what columns do does not, as in channels-first tensors: a warp goes over rows then,
    /// and leaves no more of each than a sector.
    fn is_along_rows(&self) -> bool {
        let [_, channel, .., pixel] = self.source.strides;
        // A grid has no more rows of CTAs than this.
        let is_narrow = self.chunks().div_ceil(u64::from(CHUNKS_OF_SECTOR)) < 1 << 16;
        is_narrow && u64::from(self.spec.unit_bytes) == self.element_bytes() && pixel.saturating_mul(self.steps[2]) < channel
    }

    /// Whether no element is in more than one row, as those of patches. Elsewhere rows should find in L1 what those before them read, and
    /// do not begin early (see [`super::col2im::Col2im::launch`]).
    fn reads_once(&self) -> bool {
        let channels = self.columns.iter().map(|column| column.channel + 1).max().unwrap_or(0);
        let elements = self.extents.iter().fold(self.images.saturating_mul(channels), |all, &extent| all.saturating_mul(extent));
        self.rows().saturating_mul(self.columns.len() as u64) <= elements
    }

    /// The size of the matrix.
    pub(super) fn scratch_bytes(&self) -> u64 {
        self.rows().saturating_mul(self.pitch_bytes() * u64::from(self.spec.terms))
    }

    /// Whether all that the kernel counts in 32 bits fits.
    pub(super) fn counts(&self) -> bool {
        let small = |n: i64| n.abs() < 1 << 29;
        self.rows() < 1 << 30
            && self.columns.iter().all(|column| small(self.offset_bytes(column)) && column.places.iter().all(|&place| small(place)))
    }

    /// What it asks: bytes, and instructions for each chunk and load.
    pub(super) fn work(&self) -> Stream {
        let chunks = self.rows() as f64 * self.chunks() as f64;
        let [d, h, w] = self.extents.map(|extent| extent as f64);
        let channels = self.columns.iter().map(|column| column.channel + 1).max().unwrap_or(1) as f64;
        let read_bytes = self.images as f64 * channels * d * h * w * self.element_bytes() as f64;
        let written_bytes = chunks * f64::from(CHUNK_BYTES * self.spec.terms);
        // A pair of numbers is cut with some twenty instructions.
        let cuts = if self.spec.terms > 1 { 20.0 * f64::from(self.spec.chunk_source_bytes() / 8) } else { 0.0 };
        let issued = chunks / 32.0 * (40.0 + 11.0 * f64::from(self.spec.units()) + cuts);
        Stream::new(Traffic::Lines, read_bytes + written_bytes).issuing(issued)
    }

    /// The launch that writes the matrix at `to`; adds its table to the program.
    pub(super) fn launch(&self, to: Address, arch: &Arch, program: &mut Program) -> Launch {
        let per_unit = (self.spec.unit_bytes as usize) / self.source.dtype.bytes();
        let chunks = self.chunks() as u32;
        let row_units = (chunks * self.spec.units()) as usize;
        let mut table: Vec<u8> = Vec::new();
        for unit in 0..row_units {
            let entry = self.columns.get(unit * per_unit).map_or([0, NOWHERE, 0, 0], |column| {
                let [d, h, w] = column.places.map(|place| place as i32);
                [self.offset_bytes(column) as i32, d, h, w]
            });
            table.extend(entry.into_iter().flat_map(i32::to_le_bytes));
        }
        program.constants.push(table);
        let table = Address { base: Base::Constant(program.constants.len() - 1), offset_bytes: 0 };
        // Threads of a row, and rows that a CTA has at a time.
        let across = chunks.min(if self.is_along_rows() { CHUNKS_OF_SECTOR } else { THREADS });
        let rows_at_once = THREADS / across;
        let columns_of_ctas = chunks.div_ceil(across);
        let shares = CTAS * u64::from(arch.sm_count) * u64::from(rows_at_once) / u64::from(columns_of_ctas);
        let turns = (self.rows() / shares.max(1)).clamp(1, MOST_TURNS);
        let [image, _, depth, height, width] = self.source.strides.map(|stride| stride * self.element_bytes());
        let [depths, heights, widths] = self.pixels.map(|extent| extent as u32);
        let args = ValuesArgs {
            source: Address::buffer(self.source.slot.0 as usize),
            target: to,
            table,
            rows: self.rows() as u32,
            threads_of_row: across,
            rows_at_once,
            turns: turns as u32,
            chunks,
            pitch_bytes: self.pitch_bytes(),
            term_bytes: (self.spec.terms > 1).then(|| self.rows() * self.pitch_bytes()),
            heights,
            widths,
            depths,
            steps: self.steps.map(|step| step as u32),
            extents: self.extents.map(|extent| extent as u32),
            strides: [image, depth, height, width],
        };
        let grid = [self.rows().div_ceil(u64::from(rows_at_once) * turns) as u32, columns_of_ctas, 1];
        let launch = Launch::new(self.spec.kernel(), grid, args.bound(&self.spec));
        if self.reads_once() { launch.overlapping() } else { launch }
    }
}

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    struct Values / ValuesArgs of Spec as spec {
        source: Read = spec.unit_bytes,
        target: Write = CHUNK_BYTES,
        table: Read = 16,
        rows: u32,
        threads_of_row: Divide,
        rows_at_once: u32,
        /// Rows of a thread.
        turns: u32,
        /// Of a row.
        chunks: u32,
        /// From a row to the next, and from a term.
        pitch_bytes: u64,
        term_bytes: Option<u64> = (spec.terms > 1).then_some(()),
        /// Extents of the pixels that meet activations.
        heights: Divide,
        widths: Divide,
        depths: Divide,
        /// Pixels of the activations from one row to the next, by depth, height and width; and their extents.
        steps: [u32; 3],
        extents: [u32; 3],
        /// Over images, depth, height and width, in bytes.
        strides: [u64; 4],
    }
}

/// Bits on their way from the activations to a chunk, a load after the other; zeros where there is nothing to be loaded.
fn load<'k>(k: Kernel<'k>, spec: Spec, from: &[(Val<'k, u64>, Val<'k, bool>)]) -> Vec<Val<'k, u32>> {
    if spec.unit_bytes == 2 {
        let halves: Vec<Var<'k, u16>> = from
            .iter()
            .map(|&(address, is_inside)| {
                let half = k.var(0u16);
                k.when(is_inside, || half.set(k.ld_global::<u16>(address, 0)));
                half
            })
            .collect();
        return halves.chunks(2).map(|pair| k.join16(pair[0], pair[1])).collect();
    }
    let words = |&(address, is_inside): &(Val<'k, u64>, Val<'k, bool>)| {
        let words: Vec<Var<'k, u32>> = (0..spec.unit_bytes / 4).map(|_| k.var(0u32)).collect();
        k.when(is_inside, || match words.as_slice() {
            [word] => word.set(k.ld_global::<u32>(address, 0)),
            words => {
                let loaded = k.ld_global_vector::<u32>(address, 0, words.len() as u8, Cache::Default);
                words.iter().zip(loaded).for_each(|(word, value)| word.set(value));
            }
        });
        words
    };
    let words: Vec<Var<'k, u32>> = from.iter().flat_map(words).collect();
    words.into_iter().map(|word| word.get()).collect()
}

fn im2col<'k>(k: Kernel<'k>, spec: Spec) {
    let values = Values::declare(k, &spec);
    let Values { source, target, table, rows, threads_of_row: across, rows_at_once, turns, chunks, .. } = values;
    let Values { pitch_bytes, term_bytes, heights, widths, depths, steps, extents, strides, .. } = values;
    // What is in front of this launch may still run: nothing of it is touched above. What is behind begins when this one ends: a product
    // that came earlier would take the shared memory, and L1 with it.
    k.griddep_wait();

    let (first_row, lane) = across.split(k.thread());
    let chunk = k.special(Special::CtaY) * across.value() + lane;
    k.when(first_row.lt(rows_at_once) & chunk.lt(chunks), || {
        let entries: Vec<[Val<'k, i32>; 4]> = (0..spec.units())
            .map(|unit| {
                let entry = k.ld_global_vector::<i32>(table.at(chunk * spec.units() + unit, 4 * ENTRY_WORDS), 0, 4, Cache::Default);
                [entry[0], entry[1], entry[2], entry[3]]
            })
            .collect();
        let first_row = k.cta() * (rows_at_once * turns) + first_row;
        k.range(turns, |turn| {
            let row = first_row + turn * rows_at_once;
            k.when(row.lt(rows), || {
                let (rest, w) = widths.split(row);
                let (rest, h) = heights.split(rest);
                let (image, d) = depths.split(rest);
                let place = [d * steps[0], h * steps[1], w * steps[2]];
                let own = [image, place[0], place[1], place[2]]
                    .into_iter()
                    .zip(strides)
                    .fold(source.address(), |address, (index, stride)| address + index.widen() * stride);
                let from: Vec<_> = entries
                    .iter()
                    .map(|&[offset, d, h, w]| {
                        let is_inside = (place[0].signed() + d).unsigned().lt(extents[0])
                            & (place[1].signed() + h).unsigned().lt(extents[1])
                            & (place[2].signed() + w).unsigned().lt(extents[2]);
                        (own + offset.widen().unsigned(), is_inside)
                    })
                    .collect();
                let to = target.address() + row.widen() * pitch_bytes + chunk.mul_wide(CHUNK_BYTES);
                let words = load(k, spec, &from);
                let Some(term_bytes) = term_bytes else {
                    k.st_global_vector(to, 0, &words, Cache::Default);
                    return;
                };
                let cut: Vec<Vec<Val<'k, u32>>> = words
                    .chunks(2)
                    .map(|pair| terms::split_pair(k, gemm::TERM_TYPE, spec.terms, [pair[0].bitcast(), pair[1].bitcast()]))
                    .collect();
                let mut to = to;
                for place in 0..spec.terms as usize {
                    let chunk: Vec<Val<'k, u32>> = cut.iter().map(|words| words[place]).collect();
                    k.st_global_vector(to, 0, &chunk, Cache::Default);
                    to = to + term_bytes;
                }
            });
        });
    });
}
