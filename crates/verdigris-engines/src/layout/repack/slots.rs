//! The tiles of kernels that transpose: pieces of lines, of so many elements each.

use verdigris_kir::face::{Divisor, Val};

/// The pieces of a CTA's tile: those of neighbouring lines, and behind the last line the next pieces of the first ones, so that few lines fill a tile as many do.
#[derive(Clone, Copy)]
pub(crate) struct Slots<'k> {
    pub(crate) lines: Divisor<'k>,
    /// Of a line.
    pub(crate) pieces: Val<'k, u32>,
    /// The first of the tile.
    pub(crate) first: Val<'k, u32>,
    /// Elements of a piece.
    pub(crate) length: u32,
}

/// One of them.
#[derive(Clone, Copy)]
pub(crate) struct Slot<'k> {
    pub(crate) line: Val<'k, u32>,
    /// Its first element along the line.
    pub(crate) along: Val<'k, u32>,
    pub(crate) exists: Val<'k, bool>,
}

impl<'k> Slots<'k> {
    /// The one at a place of the tile.
    pub(crate) fn at(&self, place: Val<'k, u32>) -> Slot<'k> {
        let (piece, line) = self.lines.split(self.first + place);
        Slot { line, along: piece * self.length, exists: piece.lt(self.pieces) }
    }
}
