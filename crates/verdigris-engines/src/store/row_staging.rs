//! From registers to rows that begin anywhere: a warpgroup's stage in shared memory, stored line by line.
//!
//! TMA stores rows that begin at multiples of 16 bytes. Where they do not, the lanes of a warp walk a line of the stage together, a
//! word each, on the words of global memory: each 32-byte sector is written by one request, and only a line's first and last word may be
//! half of D's.

use std::panic::Location;

use verdigris_kir::face::{Kernel, SharedPiece, Val};

/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;

/// What shapes the stages of warpgroups that store lines of 2-byte or 4-byte elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RowStage {
    /// Lines of a stage.
    pub(crate) lines: u32,
    /// Bytes of a line.
    pub(crate) line_bytes: u32,
    /// Bytes of an element: 2 or 4.
    pub(crate) element_bytes: u32,
    /// The accumulator's columns are the stage's lines.
    pub(crate) transposed: bool,
}

impl RowStage {
    /// Distance of lines: such that neither the matrices of `stmatrix` nor the pairs and words of an accumulator meet in a bank.
    fn pitch_bytes(&self) -> u32 {
        self.line_bytes + if self.element_bytes == 4 && !self.transposed { 32 } else { 16 }
    }

    /// Shared memory of one warpgroup.
    pub(crate) fn bytes(&self) -> u32 {
        self.lines * self.pitch_bytes()
    }
}

/// The stages of the warpgroups that store, one each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowStaging<'k> {
    kernel: Kernel<'k>,
    piece: SharedPiece<'k>,
    stage: RowStage,
    barrier: u32,
}

impl<'k> RowStaging<'k> {
    /// Room for `warpgroups` stages; warpgroup `w` uses named barrier `barrier + w`.
    pub(crate) fn new(k: Kernel<'k>, stage: RowStage, warpgroups: u32, barrier: u32) -> Self {
        RowStaging { kernel: k, piece: k.shared("staged rows", warpgroups * stage.bytes(), 16), stage, barrier }
    }

    /// What shapes it.
    pub(crate) fn shape(&self) -> RowStage {
        self.stage
    }

    /// The address of a warpgroup's stage.
    pub(crate) fn address(&self, warpgroup: Val<'k, u32>) -> Val<'k, u32> {
        self.piece.address() + warpgroup * self.stage.bytes()
    }

    /// Waits until the warpgroup may write its stage again. All its threads call it.
    #[track_caller]
    pub(crate) fn acquire(&self, warpgroup: Val<'k, u32>) {
        let k = self.kernel;
        k.scope(Location::caller(), || k.barrier_sync(warpgroup + self.barrier, WARPGROUP));
    }

    /// Writes 16 columns of 2-byte elements, as [`Fragment::pack_a`](verdigris_kir::tile::fragment::Fragment::pack_a) orders them: to the
    /// stage's columns (where it is transposed, lines) `16·pair ..`.
    #[track_caller]
    pub(crate) fn write_halves(&self, stage: Val<'k, u32>, thread: Val<'k, u32>, pair: u32, values: &[Val<'k, u32>; 4]) {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            // Lane 8i + r names row r of matrix i; the matrices are (block, row half) in the order of the registers.
            let (lane, warp) = (thread & 31, thread >> 5);
            let (line, bytes) = if self.stage.transposed {
                (((lane >> 4) << 3) + (lane & 7) + 16 * pair, (warp << 5) + (((lane >> 3) & 1) << 4))
            } else {
                ((warp << 4) + (lane & 15), ((lane >> 4) << 4) + 32 * pair)
            };
            k.stmatrix(self.stage.transposed, stage + line * self.stage.pitch_bytes() + bytes, 0, values);
        });
    }

    /// Writes two neighbouring 4-byte elements of an accumulator: of its row `row`, at columns `column` and `column + 1` of the stage.
    #[track_caller]
    pub(crate) fn write_pair(&self, stage: Val<'k, u32>, row: Val<'k, u32>, column: Val<'k, u32>, values: &[Val<'k, u32>; 2]) {
        let (k, pitch) = (self.kernel, self.stage.pitch_bytes());
        k.scope(Location::caller(), || {
            if self.stage.transposed {
                let address = stage + column * pitch + row * 4;
                k.st_shared(address, 0, values[0]);
                k.st_shared(address, i64::from(pitch), values[1]);
            } else {
                k.st_shared_vector(stage + row * pitch + column * 4, 0, values);
            }
        });
    }

    /// Stores a written stage: its first `lines` lines, of each the first `bytes` bytes (whole elements), to `to` and on in steps of
    /// `stride_bytes`. All threads of the warpgroup call it.
    #[track_caller]
    #[allow(clippy::too_many_arguments, reason = "a store names both ends of the copy")]
    pub(crate) fn store(
        &self,
        stage: Val<'k, u32>,
        warpgroup: Val<'k, u32>,
        thread: Val<'k, u32>,
        to: Val<'k, u64>,
        stride_bytes: Val<'k, u64>,
        lines: Val<'k, u32>,
        bytes: Val<'k, u32>,
    ) {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            k.barrier_sync(warpgroup + self.barrier, WARPGROUP);
            let (lane, warp) = (thread & 31, thread >> 5);
            let pitch = self.stage.pitch_bytes();
            // Warp w takes lines w, w + 4, …
            k.range_unrolled((lines + 3 - warp) >> 2, 4, |turn| {
                let line = warp + turn * 4;
                let at = to + line.widen() * stride_bytes;
                let from = stage + line * pitch;
                if self.stage.element_bytes == 4 {
                    self.store_words(from, at, lane, bytes)
                } else {
                    self.store_halves(from, at, lane, bytes)
                }
            });
            // A line of 2-byte elements that begins between words has one element more than the words of whole warps.
            if self.stage.element_bytes == 2 && self.stage.line_bytes.is_multiple_of(128) {
                k.when(thread.lt(lines) & bytes.eq(self.stage.line_bytes), || {
                    let at = to + thread.widen() * stride_bytes;
                    k.when((at.low32() & 2).ne(0), || {
                        let last = i64::from(self.stage.line_bytes - 2);
                        k.st_global(at, last, k.ld_shared::<u16>(stage + thread * pitch, last));
                    });
                });
            }
        });
    }

    fn store_words(&self, from: Val<'k, u32>, at: Val<'k, u64>, lane: Val<'k, u32>, bytes: Val<'k, u32>) {
        let k = self.kernel;
        let (from, at) = (from + lane * 4, at + lane.mul_wide(4));
        for first in (0..self.stage.line_bytes).step_by(128) {
            k.when((lane * 4 + first).lt(bytes), || k.st_global(at, i64::from(first), k.ld_shared::<u32>(from, i64::from(first))));
        }
    }

    fn store_halves(&self, from: Val<'k, u32>, at: Val<'k, u64>, lane: Val<'k, u32>, bytes: Val<'k, u32>) {
        let k = self.kernel;
        // The word of global memory in which the line begins, and how far into it.
        let into = at.low32() & 2;
        let at = at - into.widen() + lane.mul_wide(4);
        let whole = bytes.max(3) - 3;
        for first in (0..self.stage.line_bytes).step_by(128) {
            // The place in the line of this lane's word; below 0, wrapping, for the half in front of the line.
            let place = lane * 4 + first - into;
            // Lanes in front of the line and behind it read elsewhere in the stage, what they will not store.
            let partial = first + 128 > self.stage.line_bytes;
            let inside = |place: Val<'k, u32>| from + if partial { place.min(self.stage.line_bytes) } else { place };
            let low_place = if first == 0 { (lane * 4).max(into) - into } else { place };
            let low = k.ld_shared::<u16>(inside(low_place), 0);
            let high = k.ld_shared::<u16>(inside(place + 2), 0);
            k.when_else(
                place.lt(whole),
                || k.st_global(at, i64::from(first), k.join16(low, high)),
                || {
                    k.when(place.lt(bytes), || k.st_global(at, i64::from(first), low));
                    k.when((place + 2).lt(bytes), || k.st_global(at, i64::from(first) + 2, high));
                },
            );
        }
    }
}
