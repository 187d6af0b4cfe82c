//! The kernels: planes in shared memory, windows of a column, blocks of elements.

use verdigris_kir::face::{Bf16x2, F16x2, FloatScalar, Kernel, Pointer, Val};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::params::Divide;
use verdigris_tensor::DType;

use crate::fuse::compute::{self, Compute};
use crate::fuse::value::{AnyVal, Raw, store_values};
use crate::layout::space::{Access, Memory};
use crate::store::span::{Span, VECTOR_BYTES};

use super::super::axis::{elements_along, share_of};
use super::{Kind, Spec, THREADS};

/// Windows below each other that a thread takes.
pub(super) const STRIP: u32 = 4;
/// Blocks of elements below each other that a thread takes.
pub(super) const BLOCKS: u32 = 2;

verdigris_kir::parameters! {
    /// Of every kernel here.
    pub(super) struct Planes / PlanesArgs of Spec as spec {
        /// In all, and of a CTA.
        pub(super) planes: u32,
        pub(super) planes_of_cta: u32,
        /// Of a plane.
        pub(super) bands: Divide,
        pub(super) channels: Divide,
        /// Rows of a band: of windows, backward of blocks.
        pub(super) rows: u32,
        /// Of `x`: rows and columns.
        pub(super) extents: [u32; 2],
        pub(super) pads: [u32; 2],
        /// Windows below and beside each other.
        pub(super) out_height: u32,
        pub(super) out_width: u32,
        /// Where windows are gone through.
        pub(super) strips: Option<StripsArgs> = (!spec.reads_places()).then_some(()),
        pub(super) backward: Option<BackwardArgs> = spec.kind.is_backward().then_some(()),
        pub(super) operands: Vec<TensorArgs> = spec.operands(),
    }
}

verdigris_kir::parameters! {
    /// A tensor: its first plane, and how far images and channels are from each other.
    #[derive(Clone, Copy)]
    pub(super) struct Tensor / TensorArgs of Access as access {
        pub(super) memory: Memory = *access,
        pub(super) strides_bytes: [u64; 2],
    }
}

verdigris_kir::parameters! {
    /// Windows below and beside each other that a thread takes.
    #[derive(Clone, Copy)]
    pub(super) struct Strips / StripsArgs of () as _spec {
        /// Of a plane that a CTA takes, below and beside each other.
        pub(super) below: Divide,
        pub(super) beside: Divide,
    }
}

verdigris_kir::parameters! {
    /// Of the kernels of gradients.
    #[derive(Clone, Copy)]
    pub(super) struct Backward / BackwardArgs of () as _spec {
        /// Strips of blocks below each other, and blocks beside each other.
        pub(super) block_strips: Divide,
        pub(super) blocks_wide: Divide,
        /// Where `dy` and what windows hand on lie in shared memory.
        pub(super) narrow_at: u32,
        pub(super) windows_at: u32,
    }
}

impl Spec {
    /// Whether the places of maxima come from memory.
    pub(super) fn reads_places(&self) -> bool {
        matches!(self.kind, Kind::MaxBackward { index: Some(_) })
    }

    fn operands(&self) -> Vec<Access> {
        let outputs = if matches!(self.kind, Kind::Max { index: Some(_) }) { 2 } else { 1 };
        let types = self.types();
        let access = |(i, dtype): (usize, &DType)| {
            let written = i + outputs >= types.len();
            // Neighbouring results are one access.
            let together = if written && !self.kind.is_backward() { self.beside } else { 1 };
            Access { written, bytes: together * dtype.bytes() as u32 }
        };
        types.iter().enumerate().map(access).collect()
    }

    /// How many windows in front of a block's own hold elements of it, along rows and columns.
    fn back(&self) -> [u32; 2] {
        [0, 1].map(|i| (self.taps[i] - 1) / self.stride[i])
    }
}

/// The kernel that a spec says.
pub(super) fn build<'k>(spec: &Spec, k: Kernel<'k>) {
    let Planes { planes, planes_of_cta, bands, channels, rows, extents, pads, out_height, out_width, strips, backward, operands } =
        Planes::declare(k, spec);
    let (group, band) = bands.split(k.cta());
    let first_plane = group * planes_of_cta;
    let count = (planes - first_plane).min(planes_of_cta);
    let shared = k.shared("planes", spec.room_bytes(), VECTOR_BYTES).address();
    let [height, width] = extents;
    // Planes behind the first follow it without gaps.
    let (image, channel) = channels.split(first_plane);
    let operands: Vec<Pointer<'k>> = operands
        .iter()
        .map(|tensor| {
            let [of_image, of_channel] = tensor.strides_bytes;
            tensor.memory.moved(image.widen() * of_image + channel.widen() * of_channel)
        })
        .collect();
    let wide = Sheet { height, width };
    let narrow = Sheet { height: out_height, width: out_width };
    let cta = Cta { k, spec, count, pads, wide, narrow };
    let first = band * rows;
    let each_strip = |windows: Rows<'k>, f: &dyn Fn(Window<'k>)| {
        let Strips { below, beside } = strips.expect("windows are gone through");
        k.range_step(k.thread(), count * below.value() * beside.value(), THREADS, |i| {
            let (rest, column) = beside.split(i);
            let (plane, strip) = below.split(rest);
            f(Window { plane, row: windows.first + strip * STRIP, column: column * spec.beside });
        });
    };
    let Some(Backward { block_strips, blocks_wide, narrow_at, windows_at }) = backward else {
        let windows = Rows { first, end: (first + rows).min(out_height) };
        let x = cta.stage(operands[0], cta.wide, cta.read_by(windows), shared);
        cta.arrived();
        each_strip(windows, &|window| cta.forward(&x, window, windows, &operands[1..]));
        return;
    };
    let back = spec.back()[0];
    let end = first + rows;
    // Where no window reaches the band, the last one, of which no block has an element.
    let windows = Rows { first: k.select(first.gt(back), first - back, 0u32).min(out_height - 1), end: end.min(out_height) };
    let dy = cta.stage(operands[0], cta.narrow, windows, shared + narrow_at);
    let handed_on = Piece { at: shared + windows_at, rows: windows, sheet: cta.narrow, bytes: 4 };
    match spec.kind {
        Kind::MaxBackward { index: Some(dtype) } => {
            let places = operands[1];
            let (from, elements) = cta.span(places, cta.narrow, windows, dtype);
            k.range_step(k.thread(), elements, THREADS, |i| {
                let place = match dtype {
                    DType::I64 => k.ld_global::<u64>(from.at(i, 8), 0).low32(),
                    _ => k.ld_global::<u32>(from.at(i, 4), 0),
                };
                k.st_shared(handed_on.at + i * 4, 0, place);
            });
            cta.arrived();
        }
        _ => {
            let x = matches!(spec.kind, Kind::MaxBackward { .. }).then(|| cta.stage(operands[1], cta.wide, cta.read_by(windows), shared));
            cta.arrived();
            each_strip(windows, &|window| match &x {
                Some(x) => cta.hand_on_places(x, window, &handed_on),
                None => cta.hand_on_shares(&dy, window, &handed_on),
            });
            k.bar_sync();
        }
    }
    let written = cta.written_by(Rows { first, end });
    let to = operands[operands.len() - 1];
    let dx = cta.piece(to, cta.wide, written, shared);
    let blocks = count * block_strips.value() * blocks_wide.value();
    k.range_step(k.thread(), blocks, THREADS, |i| {
        let (rest, column) = blocks_wide.split(i);
        let (plane, strip) = block_strips.split(rest);
        cta.backward(&dy, &handed_on, &dx, Window { plane, row: first + strip * BLOCKS, column });
    });
    k.bar_sync();
    cta.copy_out(to, &dx);
}

/// Some rows of a plane.
#[derive(Clone, Copy, Debug)]
struct Rows<'k> {
    first: Val<'k, u32>,
    end: Val<'k, u32>,
}

/// A plane.
#[derive(Clone, Copy, Debug)]
struct Sheet<'k> {
    height: Val<'k, u32>,
    width: Val<'k, u32>,
}

/// Rows of planes in shared memory. Of several planes these are all rows, so that planes are as far from each other as in global memory.
#[derive(Clone, Copy, Debug)]
struct Piece<'k> {
    /// The first element.
    at: Val<'k, u32>,
    rows: Rows<'k>,
    sheet: Sheet<'k>,
    bytes: u32,
}

impl<'k> Piece<'k> {
    /// Of a row that it has: what is the same for all rows of a plane, and the row.
    fn row(&self, plane: Val<'k, u32>, row: Val<'k, u32>) -> Val<'k, u32> {
        let row_bytes = self.sheet.width * self.bytes;
        self.at + (plane * self.sheet.height - self.rows.first) * row_bytes + row * row_bytes
    }

    fn element(&self, plane: Val<'k, u32>, row: Val<'k, u32>, column: Val<'k, u32>) -> Val<'k, u32> {
        self.row(plane, row) + column * self.bytes
    }

    fn has(&self, row: Val<'k, u32>) -> Val<'k, bool> {
        (row - self.rows.first).lt(self.rows.end - self.rows.first)
    }
}

/// A window, or the first of some below and beside each other; of elements, a block.
#[derive(Clone, Copy, Debug)]
struct Window<'k> {
    plane: Val<'k, u32>,
    row: Val<'k, u32>,
    column: Val<'k, u32>,
}

/// A tap of a row or a column: the element that it is, or the nearest one.
#[derive(Clone, Copy, Debug)]
struct Tap<'k> {
    at: Val<'k, u32>,
    inside: Val<'k, bool>,
}

/// The greatest of some elements: the first of equals, the first NaN before all.
#[derive(Clone, Copy, Debug)]
struct Best<'k> {
    value: Val<'k, f32>,
    place: Val<'k, u32>,
}

impl<'k> Best<'k> {
    /// Of those and of others that come later.
    fn then(self, later: Best<'k>) -> Best<'k> {
        let k = self.value.kernel();
        // A greater one or a NaN, unless there is a NaN already.
        let wins = !later.value.le(self.value) & self.value.eq(self.value);
        Best { value: k.select(wins, later.value, self.value), place: k.select(wins, later.place, self.place) }
    }
}

/// What all threads of a CTA know.
#[derive(Clone, Copy)]
struct Cta<'a, 'k> {
    k: Kernel<'k>,
    spec: &'a Spec,
    /// Planes.
    count: Val<'k, u32>,
    pads: [Val<'k, u32>; 2],
    wide: Sheet<'k>,
    narrow: Sheet<'k>,
}

impl<'k> Cta<'_, 'k> {
    fn bytes(&self) -> u32 {
        self.spec.dtype.bytes() as u32
    }

    // ---- between global and shared memory ----

    /// The rows of `x` that windows read.
    fn read_by(&self, windows: Rows<'k>) -> Rows<'k> {
        let (stride, taps, pad) = (self.spec.stride[0], self.spec.taps[0], self.pads[0]);
        let first = windows.first * stride;
        let first = self.k.select(first.gt(pad), first - pad, 0u32);
        Rows { first, end: ((windows.end - 1) * stride + taps - pad).min(self.wide.height) }
    }

    /// The rows of `dx` that blocks are.
    fn written_by(&self, blocks: Rows<'k>) -> Rows<'k> {
        let row = |block: Val<'k, u32>| {
            let row = block * self.spec.stride[0];
            self.k.select(row.gt(self.pads[0]), row - self.pads[0], 0u32).min(self.wide.height)
        };
        Rows { first: row(blocks.first), end: row(blocks.end) }
    }

    /// Where rows begin in global memory, of a tensor of `dtype` from the CTA's first plane on, and how many elements they have in all planes.
    fn span(&self, tensor: Pointer<'k>, sheet: Sheet<'k>, rows: Rows<'k>, dtype: DType) -> (Pointer<'k>, Val<'k, u32>) {
        let plane = sheet.height * sheet.width;
        let elements = (self.count - 1) * plane + (rows.end - rows.first) * sheet.width;
        (Pointer::at_address(tensor.at(rows.first * sheet.width, dtype.bytes() as u32)), elements)
    }

    /// Where rows lie in shared memory: as far behind a multiple of 16 bytes as in global memory.
    fn piece(&self, tensor: Pointer<'k>, sheet: Sheet<'k>, rows: Rows<'k>, shared: Val<'k, u32>) -> Piece<'k> {
        let (from, _) = self.span(tensor, sheet, rows, self.spec.dtype);
        Piece { at: shared + Span::behind(from.address()), rows, sheet, bytes: self.bytes() }
    }

    /// Starts the copy of rows to shared memory.
    fn stage(&self, tensor: Pointer<'k>, sheet: Sheet<'k>, rows: Rows<'k>, shared: Val<'k, u32>) -> Piece<'k> {
        let k = self.k;
        let piece = self.piece(tensor, sheet, rows, shared);
        let (from, elements) = self.span(tensor, sheet, rows, self.spec.dtype);
        let from = from.address();
        self.accesses(from, elements).each_access(
            |at| k.cp_async(piece.at + at, 0, from + at.widen(), 0, VECTOR_BYTES as u8, VECTOR_BYTES),
            |at| match self.bytes() {
                2 => k.st_shared(piece.at + at, 0, k.ld_global::<u16>(from + at.widen(), 0)),
                _ => k.st_shared(piece.at + at, 0, k.ld_global::<u32>(from + at.widen(), 0)),
            },
        );
        piece
    }

    /// Waits for all copies to shared memory.
    fn arrived(&self) {
        self.k.cp_async_commit();
        self.k.cp_async_wait(0);
        self.k.bar_sync();
    }

    /// Copies a piece to global memory.
    fn copy_out(&self, tensor: Pointer<'k>, piece: &Piece<'k>) {
        let (to, elements) = self.span(tensor, piece.sheet, piece.rows, self.spec.dtype);
        self.accesses(to.address(), elements).copy_out(piece.at);
    }

    fn accesses(&self, first: Val<'k, u64>, elements: Val<'k, u32>) -> Span<'k> {
        Span { first, elements, element_bytes: self.bytes(), threads: THREADS }
    }

    fn load(&self, address: Val<'k, u32>) -> Val<'k, f32> {
        match self.spec.dtype {
            DType::F32 => self.k.ld_shared::<f32>(address, 0),
            dtype => compute::decode_half(dtype, self.k.ld_shared::<u16>(address, 0)),
        }
    }

    fn keep(&self, address: Val<'k, u32>, value: Val<'k, f32>) {
        match AnyVal::of(value).encoded(self.k, self.spec.dtype) {
            Raw::B16(bits) => self.k.st_shared(address, 0, bits),
            Raw::B32(bits) => self.k.st_shared(address, 0, bits),
            other => unreachable!("{other:?} of a float"),
        }
    }

    // ---- windows ----

    /// Tap `number` behind the first of window 0, of the windows along a dim that begin at `window`; elements are `first .. end`.
    fn tap(&self, axis: usize, window: Val<'k, u32>, number: u32, [first, end]: [Val<'k, u32>; 2]) -> Tap<'k> {
        let extent = if axis == 0 { self.wide.height } else { self.wide.width };
        let at = window * self.spec.stride[axis] - self.pads[axis] + number;
        let nearest = at.signed().max(first.signed()).min((end - 1).signed());
        Tap { at: nearest.unsigned(), inside: at.lt(extent) }
    }

    /// The taps of windows beside each other.
    fn columns(&self, window: &Window<'k>) -> Vec<Tap<'k>> {
        let bounds = [self.k.constant(0u32), self.wide.width];
        let taps = (self.spec.beside - 1) * self.spec.stride[1] + self.spec.taps[1];
        (0..taps).map(|tap| self.tap(1, window.column, tap, bounds)).collect()
    }

    /// What windows below each other have, of each row those beside each other: what `of_element` makes of an element, put together along rows and then
    /// over them. `of_element` has the element's address, its row and its column.
    fn strip<R: Copy>(
        &self,
        x: &Piece<'k>,
        window: &Window<'k>,
        of_element: impl Fn(Val<'k, u32>, &Tap<'k>, &Tap<'k>) -> R,
        together: impl Fn(R, R) -> R,
    ) -> Vec<Vec<R>> {
        let ([down, right], [high, wide]) = (self.spec.stride, self.spec.taps);
        let columns = self.columns(window);
        let of = |elements: &[R]| elements.iter().copied().reduce(&together).expect("a window has taps");
        let of_row = |number: u32| -> Vec<R> {
            let tap = self.tap(0, window.row, number, [x.rows.first, x.rows.end]);
            let row = x.row(window.plane, tap.at);
            let elements: Vec<R> = columns.iter().map(|column| of_element(row + column.at * x.bytes, &tap, column)).collect();
            (0..self.spec.beside).map(|i| of(&elements[(i * right) as usize..(i * right + wide) as usize])).collect()
        };
        // Rows that no window has are not looked at.
        let is_read = |number: u32| (0..STRIP).any(|i| (i * down..i * down + high).contains(&number));
        let rows: Vec<Vec<R>> =
            (0..(STRIP - 1) * down + high).map(|number| if is_read(number) { of_row(number) } else { Vec::new() }).collect();
        let of_windows = |i: u32| -> Vec<R> {
            let own = &rows[(i * down) as usize..(i * down + high) as usize];
            (0..self.spec.beside as usize).map(|j| of(&own.iter().map(|row| row[j]).collect::<Vec<R>>())).collect()
        };
        (0..STRIP).map(of_windows).collect()
    }

    /// The winners of windows. An element that is seen twice changes nothing: no tap has to be inside.
    fn winners(&self, x: &Piece<'k>, window: &Window<'k>) -> Vec<Vec<Best<'k>>> {
        let best = |at, row: &Tap<'k>, column: &Tap<'k>| Best { value: self.load(at), place: row.at * self.wide.width + column.at };
        self.strip(x, window, best, Best::then)
    }

    /// The greatest elements of windows, as they are stored: of 16 bits in the low half of a word.
    fn greatest(&self, x: &Piece<'k>, window: &Window<'k>) -> Vec<Vec<Val<'k, u32>>> {
        fn of_pairs<'k, P: FloatScalar>(x: Val<'k, u32>, y: Val<'k, u32>) -> Val<'k, u32> {
            x.bitcast::<P>().max_nan(y.bitcast::<P>()).bitcast()
        }
        let k = self.k;
        let load = |at: Val<'k, u32>, _: &Tap<'k>, _: &Tap<'k>| match self.bytes() {
            2 => k.ld_shared::<u16>(at, 0).convert::<u32>(CvtRound::None),
            _ => k.ld_shared::<u32>(at, 0),
        };
        let greater = |x: Val<'k, u32>, y: Val<'k, u32>| match self.spec.dtype {
            DType::Bf16 => of_pairs::<Bf16x2>(x, y),
            DType::F16 => of_pairs::<F16x2>(x, y),
            _ => <f32 as Compute>::max_nan(x.bitcast(), y.bitcast()).bitcast(),
        };
        self.strip(x, window, load, greater)
    }

    fn sums(&self, x: &Piece<'k>, window: &Window<'k>) -> Vec<Vec<Val<'k, f32>>> {
        let k = self.k;
        let load = |at, row: &Tap<'k>, column: &Tap<'k>| k.select(column.inside & row.inside, self.load(at), 0.0f32);
        self.strip(x, window, load, |x, y| x + y)
    }

    /// What a mean multiplies with: the reciprocal of the taps, or of those that are elements.
    fn share(&self, window: &Window<'k>, below: u32, beside: u32) -> Val<'k, f32> {
        let (k, [high, wide]) = (self.k, self.spec.taps);
        let padded = matches!(self.spec.kind, Kind::Average { padded: true } | Kind::AverageBackward { padded: true });
        if padded {
            return k.constant(1.0 / (high * wide) as f32);
        }
        let along = |axis: usize, window: Val<'k, u32>, extent: Val<'k, u32>| {
            elements_along(window, [self.spec.taps[axis], self.spec.stride[axis]], self.pads[axis], extent)
        };
        share_of(k, along(0, window.row + below, self.wide.height) * along(1, window.column + beside, self.wide.width))
    }

    /// Stores what windows give.
    fn forward(&self, x: &Piece<'k>, window: Window<'k>, windows: Rows<'k>, to: &[Pointer<'k>]) {
        let (k, narrow, dtype) = (self.k, self.narrow, self.spec.dtype);
        let number = |below: u32| (window.plane * narrow.height + (window.row + below)) * narrow.width + window.column;
        // Values of a row, and places where they are wanted.
        let rows: Vec<[Vec<AnyVal<'k>>; 2]> = match self.spec.kind {
            Kind::Max { index: Some(_) } => {
                let value = |best: &Best<'k>| AnyVal::of(best.value);
                let place = |best: &Best<'k>| AnyVal::Stored(DType::I32, Raw::B32(best.place));
                let winners = self.winners(x, &window);
                winners.iter().map(|row| [row.iter().map(value).collect(), row.iter().map(place).collect()]).collect()
            }
            Kind::Max { index: None } => {
                let value =
                    |&bits: &Val<'k, u32>| AnyVal::Stored(dtype, if dtype == DType::F32 { Raw::B32(bits) } else { Raw::B16(bits.low16()) });
                self.greatest(x, &window).iter().map(|row| [row.iter().map(value).collect(), Vec::new()]).collect()
            }
            _ => {
                let mean = |below: u32, beside: u32, sum: Val<'k, f32>| AnyVal::of(sum * self.share(&window, below, beside));
                let rows = (0u32..).zip(self.sums(x, &window));
                rows.map(|(i, row)| [(0u32..).zip(row).map(|(j, sum)| mean(i, j, sum)).collect(), Vec::new()]).collect()
            }
        };
        for (below, [values, places]) in (0u32..).zip(&rows) {
            k.when((window.row + below).lt(windows.end), || {
                store_values(k, dtype, to[0].at(number(below), self.bytes()), values);
                if let Kind::Max { index: Some(dtype) } = self.spec.kind {
                    store_values(k, dtype, to[1].at(number(below), dtype.bytes() as u32), places);
                }
            });
        }
    }

    /// Leaves the places of the winners of windows.
    fn hand_on_places(&self, x: &Piece<'k>, window: Window<'k>, to: &Piece<'k>) {
        for (below, row) in (0u32..).zip(self.winners(x, &window)) {
            self.hand_on(&window, below, to, || row.iter().map(|best| best.place).collect());
        }
    }

    /// Leaves the share of each element of windows.
    fn hand_on_shares(&self, dy: &Piece<'k>, window: Window<'k>, to: &Piece<'k>) {
        for below in 0..STRIP {
            let share = |beside: u32| {
                let at = dy.element(window.plane, window.row + below, window.column + beside);
                (self.load(at) * self.share(&window, below, beside)).bitcast()
            };
            self.hand_on(&window, below, to, || (0..self.spec.beside).map(share).collect());
        }
    }

    /// Leaves a word of each window of a row, if the row is there.
    fn hand_on(&self, window: &Window<'k>, below: u32, to: &Piece<'k>, words: impl Fn() -> Vec<Val<'k, u32>>) {
        let row = window.row + below;
        self.k.when(row.lt(to.rows.end), || {
            let at = to.element(window.plane, row, window.column);
            match words().as_slice() {
                [word] => self.k.st_shared(at, 0, *word),
                words => self.k.st_shared_vector(at, 0, words),
            }
        });
    }

    // ---- blocks ----

    /// Leaves what windows give to the elements of blocks below each other.
    fn backward(&self, dy: &Piece<'k>, handed_on: &Piece<'k>, dx: &Piece<'k>, block: Window<'k>) {
        let k = self.k;
        let ([down, right], [high, wide]) = (self.spec.stride, self.spec.taps);
        let [back_rows, back_columns] = self.spec.back();
        let is_average = matches!(self.spec.kind, Kind::AverageBackward { .. });
        // The windows that may hold elements of the blocks: what they give, and to which place if to one alone.
        let given: Vec<Vec<(Val<'k, f32>, Val<'k, u32>)>> = (0..BLOCKS + back_rows)
            .map(|i| {
                let row = block.row + i - back_rows;
                let of = |j: u32| {
                    let column = block.column + j - back_columns;
                    let is_there = handed_on.has(row) & column.lt(self.narrow.width);
                    // Another one in the place of one that is not there.
                    let [row, column] =
                        [(row, handed_on.rows.first), (column, k.constant(0))].map(|(own, first)| k.select(is_there, own, first));
                    let at = handed_on.element(block.plane, row, column);
                    if is_average {
                        return (k.select(is_there, k.ld_shared::<f32>(at, 0), 0.0f32), k.constant(0));
                    }
                    let place = k.select(is_there, k.ld_shared::<u32>(at, 0), u32::MAX);
                    (self.load(dy.element(block.plane, row, column)), place)
                };
                (0..=back_columns).map(of).collect()
            })
            .collect();
        for i in 0..BLOCKS {
            for (y, x) in (0..down).flat_map(|y| (0..right).map(move |x| (y, x))) {
                let row = (block.row + i) * down + y - self.pads[0];
                let column = block.column * right + x - self.pads[1];
                let mine = row * self.wide.width + column;
                // Windows in row-major order: the farthest in front has the last tap here.
                let rows = (0..=back_rows).filter(|j| y + (back_rows - j) * down < high);
                let columns = || (0..=back_columns).filter(|j| x + (back_columns - j) * right < wide);
                let holders = rows.flat_map(|j| columns().map(move |l| (j, l)));
                let terms = holders.map(|(j, l)| {
                    let (value, place) = given[(i + j) as usize][l as usize];
                    if is_average { value } else { k.select(place.eq(mine), value, 0.0f32) }
                });
                let sum = terms.reduce(|x, y| x + y).unwrap_or(k.constant(0.0f32));
                k.when(dx.has(row) & column.lt(self.wide.width), || self.keep(dx.element(block.plane, row, column), sum));
            }
        }
    }
}
