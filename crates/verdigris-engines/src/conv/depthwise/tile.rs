//! Tiles of activations on their way to shared memory, and a thread's words of them.
//!
//! A tile is rows of pixels of one or more images: 64 or 128 bytes a pixel (the channels of a CTA), rows a pitch apart. What lies outside of the tensor
//! is zero in the tile, so that no product asks.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::params::{Divide, Read};
use verdigris_tensor::DType;

use super::spec::{Copying, Spec};
use crate::fuse::compute;

verdigris_kir::parameters! {
    /// A tensor of activations.
    #[derive(Clone, Copy)]
    pub(super) struct Activations / ActivationsArguments of Spec as spec {
        pub(super) pointer: Read = spec.copied_bytes(),
        pub(super) images: u32,
        /// Rows and columns.
        pub(super) extents: [u32; 2],
        /// Over images, depth, height and width, in bytes.
        pub(super) strides: [u64; 4],
        /// Of [`Copying::Vectors`]: a CTA copies 2 to this many rows at a time.
        pub(super) copied_rows_log2: Option<u32> = matches!(spec.copying, Copying::Vectors(_)).then_some(()),
        pub(super) channels: Option<ChannelsArguments> = (spec.copying == Copying::Elements).then_some(()),
    }
}

verdigris_kir::parameters! {
    /// Of [`Copying::Elements`]: a channel of the result reads channel `quotient(channel) · factor` and an addend, `stride` bytes apart.
    #[derive(Clone, Copy)]
    pub(super) struct ChannelWalk / ChannelsArguments of () as _spec {
        pub(super) quotient: Divide,
        pub(super) factor: u32,
        pub(super) stride: u64,
        /// Lanes stand along so many columns, or channels.
        pub(super) along: Divide,
        pub(super) channels_first: u32,
    }
}

/// Where a tile lies.
#[derive(Clone, Copy)]
pub(super) struct Origin<'k> {
    /// The first image.
    pub(super) image: Val<'k, u32>,
    /// The plane along the depth.
    pub(super) plane: Val<'k, u32>,
    /// Whether there is such a plane.
    pub(super) has_plane: Val<'k, bool>,
    /// Row and column of the first pixel; outside at times.
    pub(super) first: [Val<'k, i32>; 2],
    /// Rows and columns from pixel to pixel.
    pub(super) steps: [Val<'k, u32>; 2],
}

/// A CTA's channels, and what maps them to the tensor's.
#[derive(Clone, Copy)]
pub(super) struct Channels<'k> {
    /// The first one, of the result.
    pub(super) first: Val<'k, u32>,
    /// All channels of the result.
    pub(super) all: Val<'k, u32>,
    /// Added to the tensor's channel.
    pub(super) addend: Val<'k, u32>,
}

verdigris_kir::parameters! {
    /// The extents of a tile.
    #[derive(Clone, Copy)]
    pub(super) struct TileExtents / TileExtentsArguments of () as _spec {
        /// Rows of an image.
        pub(super) rows: Divide,
        /// Rows of all images.
        pub(super) all_rows: u32,
        pub(super) columns: u32,
        pub(super) pitch_bytes: u32,
    }
}

impl<'k> TileExtents<'k> {
    /// The offset of a pixel.
    pub(super) fn offset(&self, spec: &Spec, image: Val<'k, u32>, row: Val<'k, u32>, column: Val<'k, u32>) -> Val<'k, u32> {
        (image * self.rows.value() + row) * self.pitch_bytes + self.column_offset(spec, column)
    }

    /// The offset of a column in its line.
    fn column_offset(&self, spec: &Spec, column: Val<'k, u32>) -> Val<'k, u32> {
        let gaps = spec.columns_between_gaps().map(|columns| column >> columns.ilog2());
        gaps.map_or(column, |gaps| column + gaps) * spec.pixel_bytes()
    }
}

impl<'k> Activations<'k> {
    /// Starts bringing a tile to shared memory at `to`; it is there behind the thread's `cp.async` groups and a barrier.
    pub(super) fn fetch(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        tile: &TileExtents<'k>,
        at: &Origin<'k>,
        channels: Channels<'k>,
        to: Val<'k, u32>,
    ) {
        let plane = self.pointer.address() + at.plane.widen() * self.strides[1];
        match (spec.copying, self.copied_rows_log2, self.channels) {
            (Copying::Vectors(bytes), Some(rows_log2), _) => {
                let vectors = spec.pixel_bytes() / bytes;
                // The CTA brings a few rows of pixels at a time; a thread stays in its column, and walks down.
                let pixels = spec.threads() / vectors;
                let columns_log2 = k.constant(pixels.ilog2()) - rows_log2;
                let one = k.constant(1u32);
                let (rows, columns) = (one.shl(rows_log2), one.shl(columns_log2));
                let (vector, pixel) = (k.thread() & (vectors - 1), k.thread() >> vectors.ilog2());
                let (line, first) = (pixel.shr(columns_log2), pixel & (columns - 1));
                let channel = channels.first + vector * (bytes / spec.dtype.bytes() as u32);
                let first_height = at.first[0] + (line * at.steps[0]).signed();
                let from = plane + channel.mul_wide(spec.dtype.bytes() as u32) + first_height.widen().unsigned() * self.strides[2];
                let to = to + line * tile.pitch_bytes + vector * bytes;
                let down = rows * at.steps[0];
                let (down_bytes, down_shared) = (down.widen() * self.strides[2], rows * tile.pitch_bytes);
                let is_channel = channel.lt(channels.all) & at.has_plane;
                let image = k.var(at.image);
                k.range_step(0, tile.all_rows, tile.rows.value(), |first_row| {
                    let has_image = is_channel & image.get().lt(self.images);
                    let from = from + image.get().widen() * self.strides[0];
                    let to = to + first_row * tile.pitch_bytes;
                    k.range_step(first, tile.columns, columns, |column| {
                        let place = self.column(at, column);
                        let extent = k.select(has_image & place.unsigned().lt(self.extents[1]), self.extents[0], 0u32);
                        let height = k.var(first_height);
                        let from = k.var(from + place.widen().unsigned() * self.strides[3]);
                        let to = k.var(to + tile.column_offset(spec, column));
                        k.range_step(line, tile.rows.value(), rows, |_| {
                            // Nothing is read, and zeros are written, where the source has no bytes.
                            k.cp_async(to, 0, from, 0, bytes as u8, k.select(height.unsigned().lt(extent), bytes, 0u32));
                            height.set(height + down.signed());
                            from.set(from + down_bytes);
                            to.set(to + down_shared);
                        });
                    });
                    image.set(image + 1);
                });
            }
            (_, _, Some(ChannelWalk { quotient, factor, stride, along, channels_first })) => {
                let bytes = spec.dtype.bytes() as u32;
                let elements = tile.columns * spec.cta_channels();
                let channels_first = channels_first.ne(0);
                self.rows(k, spec, tile, at, |row| {
                    let width = k.select(row.is_inside, self.extents[1], 0u32);
                    k.range_step(k.lane(), elements, 32, |element| {
                        let (outer, inner) = along.split(element);
                        let (column, own) = (k.select(channels_first, inner, outer), k.select(channels_first, outer, inner));
                        let (place, channel) = (self.column(at, column), channels.first + own);
                        let is_inside = place.unsigned().lt(width) & channel.lt(channels.all);
                        let channel = quotient.quotient(channel) * factor + channels.addend;
                        let from = plane + row.from + place.widen().unsigned() * self.strides[3] + channel.widen() * stride;
                        let to = to + row.to + tile.column_offset(spec, column) + own * bytes;
                        if bytes == 4 {
                            k.cp_async(to, 0, from, 0, 4, k.select(is_inside, 4u32, 0u32));
                        } else {
                            let bits = k.var(0u16);
                            k.when(is_inside, || bits.set(k.ld_global::<u16>(from, 0)));
                            k.st_shared(to, 0, bits.get());
                        }
                    });
                });
            }
            _ => unreachable!("each way of copying has parameters of its own"),
        }
    }

    /// The tensor's column of a column of the tile.
    fn column(&self, at: &Origin<'k>, column: Val<'k, u32>) -> Val<'k, i32> {
        at.first[1] + (column * at.steps[1]).signed()
    }

    /// Runs `body` for the rows of a warp: a warp a row, so that rows are worked out once.
    fn rows(&self, k: Kernel<'k>, spec: &Spec, tile: &TileExtents<'k>, at: &Origin<'k>, body: impl Fn(RowAt<'k>)) {
        k.range_step(k.thread() >> 5, tile.all_rows, spec.threads() / 32, |row| {
            let (image, line) = tile.rows.split(row);
            let (image, height) = (at.image + image, at.first[0] + (line * at.steps[0]).signed());
            body(RowAt {
                from: image.widen() * self.strides[0] + height.widen().unsigned() * self.strides[2],
                is_inside: image.lt(self.images) & height.unsigned().lt(self.extents[0]) & at.has_plane,
                to: row * tile.pitch_bytes,
            });
        });
    }
}

/// A row of a tensor and of a tile.
struct RowAt<'k> {
    /// Offset in the tensor.
    from: Val<'k, u64>,
    /// Whether the tensor has it.
    is_inside: Val<'k, bool>,
    /// Offset in the tile.
    to: Val<'k, u32>,
}

/// The channels of a word in f32.
pub(super) fn widen<'k>(k: Kernel<'k>, dtype: DType, word: Val<'k, u32>) -> Vec<Val<'k, f32>> {
    if dtype == DType::F32 { vec![word.bitcast()] } else { compute::widen_pair(k, dtype, word).to_vec() }
}

/// The magic of a division of a small number (below 2¹⁰) by a constant of at most 31: a multiplication and a shift.
pub(super) fn split_small<'k>(value: Val<'k, u32>, divisor: u32) -> (Val<'k, u32>, Val<'k, u32>) {
    let quotient = (value * (1u32 << 16).div_ceil(divisor)) >> 16;
    (quotient, value - quotient * divisor)
}
