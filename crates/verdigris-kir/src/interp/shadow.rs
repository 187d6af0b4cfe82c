//! Shadow cells: who last wrote and who read each four bytes, with the lane of every byte, so that two accesses that nothing orders are seen
//! whatever the schedule was.
//!
//! Nearly every check ends in the same few comparisons: the cell's last write is known to all lanes, and its last read is by the same warp or
//! is known too. These come first and are made inline; what they leave open goes the long way.

use super::clock::{Clock, Of};
use std::cell;

/// No access.
pub(crate) const NO_ACTOR: u32 = u32::MAX;
const NO_LANE: u8 = 0xFF;
/// Several lanes read the byte.
pub(crate) const MANY_LANES: u8 = 33;
/// An async unit, which has no lanes.
pub(crate) const UNIT: u8 = 32;

/// Attributes of an access.
pub(crate) mod flag {
    /// Atomic among the CTA, the cluster, the device.
    pub(crate) const ATOMIC_CTA: u8 = 1;
    pub(crate) const ATOMIC_CLUSTER: u8 = 2;
    pub(crate) const ATOMIC_GPU: u8 = 3;
    pub(crate) const ATOMIC: u8 = 3;
    /// Made by an async unit through the async proxy.
    pub(crate) const ASYNC: u8 = 4;
    /// A non-coherent load.
    pub(crate) const NON_COHERENT: u8 = 8;
    /// A float is added to what is there, and the same bits are asked for each time: sums have an order.
    pub(crate) const ORDERED_SUM: u8 = 16;
    /// Such a sum is no result by itself: it matters where it is read.
    pub(crate) const SUM_OF_SCRATCH: u8 = 32;
    /// What is there was added up in no order. Of stamps alone.
    pub(crate) const UNORDERED: u8 = 64;
}

/// One access as the shadow remembers it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    pub(crate) actor: u32,
    pub(crate) epoch: u32,
    /// The line above, the attributes in the lowest [`FLAG_BITS`]: sixteen bytes in all, of which a machine moves many.
    what: u32,
    /// The lane that touched each byte.
    pub(crate) lanes: [u8; 4],
}

const FLAG_BITS: u32 = 7;

const EMPTY: Stamp = Stamp { actor: NO_ACTOR, epoch: 0, what: 0, lanes: [NO_LANE; 4] };

impl Stamp {
    pub(crate) fn loc(&self) -> u32 {
        self.what >> FLAG_BITS
    }

    fn flags(&self) -> u8 {
        self.what as u8 & ((1 << FLAG_BITS) - 1)
    }

    /// The bytes that it touched, as a mask.
    fn bytes(&self) -> u8 {
        (0..4).fold(0, |mask, byte| mask | u8::from(self.lanes[byte] != NO_LANE) << byte)
    }

    /// Whether it touched no other byte than those of `mask`.
    #[inline]
    fn is_within(&self, mask: u8) -> bool {
        mask == 0xF || self.bytes() & !mask == 0
    }
}

/// The history of four bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    pub(crate) write: Stamp,
    read: Stamp,
    /// Further readers: an index into the pool, from 1.
    more: u32,
    /// Writers of bytes that the last one left alone, likewise.
    more_writes: u32,
}

impl Default for Cell {
    fn default() -> Self {
        Cell { write: EMPTY, read: EMPTY, more: 0, more_writes: 0 }
    }
}

impl Cell {
    /// What is there is written by the host.
    pub(crate) fn forget_sums(&mut self) {
        self.write.what &= !u32::from(flag::UNORDERED | flag::ORDERED_SUM);
    }

    /// Bytes that an actor of which nothing else is known may still write and read.
    pub(crate) fn of_predecessor(actor: u32) -> Cell {
        let stamp = Stamp { actor, epoch: 1, what: 0, lanes: [UNIT; 4] };
        Cell { write: stamp, read: stamp, more: 0, more_writes: 0 }
    }
}

/// Lists of readers, and of writers of single bytes, that do not fit into their cell.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    lists: Vec<Vec<Stamp>>,
    free: Vec<u32>,
}

impl Readers {
    /// `hint` is where in their lists the actor has stood so far.
    fn push(&mut self, cell: &mut Cell, stamp: Stamp, hint: &cell::Cell<usize>) {
        let list = self.list(&mut cell.more);
        if let Some(old) = list.get_mut(hint.get())
            && old.actor == stamp.actor
            && old.is_within(stamp.bytes())
        {
            *old = stamp;
            return;
        }
        let at = list.iter().position(|old| old.actor == stamp.actor && old.is_within(stamp.bytes()));
        hint.set(at.unwrap_or(list.len()));
        match at {
            Some(at) => list[at] = stamp,
            None => list.push(stamp),
        }
    }

    /// The list of that number, made where there is none.
    fn list(&mut self, number: &mut u32) -> &mut Vec<Stamp> {
        if *number == 0 {
            *number = match self.free.pop() {
                Some(at) => at,
                None => {
                    self.lists.push(Vec::new());
                    self.lists.len() as u32
                }
            };
        }
        &mut self.lists[*number as usize - 1]
    }

    fn get(&self, number: u32) -> &[Stamp] {
        if number == 0 { &[] } else { &self.lists[number as usize - 1] }
    }

    fn clear(&mut self, number: &mut u32) {
        if *number != 0 {
            self.lists[*number as usize - 1].clear();
            self.free.push(*number);
            *number = 0;
        }
    }

    /// Keeps what a writer of the bytes of `mask` leaves of the one before it, and forgets what it overwrites of earlier ones.
    fn overwrite(&mut self, cell: &mut Cell, mask: u8) {
        let keep = |stamp: &mut Stamp| {
            (0..4).filter(|byte| mask >> byte & 1 == 1).for_each(|byte| stamp.lanes[byte] = NO_LANE);
            stamp.lanes != [NO_LANE; 4]
        };
        if cell.more_writes != 0 {
            let list = self.list(&mut cell.more_writes);
            list.retain_mut(keep);
            if list.is_empty() {
                self.clear(&mut cell.more_writes);
            }
        }
        let mut before = cell.write;
        if before.actor != NO_ACTOR && keep(&mut before) {
            self.list(&mut cell.more_writes).push(before);
        }
    }
}

/// Who accesses, and what it knows.
pub(crate) struct Access<'a> {
    pub(crate) actor: u32,
    pub(crate) epoch: u32,
    pub(crate) loc: u32,
    pub(crate) flags: u8,
    pub(crate) clock: &'a Clock,
    /// Lanes for which more is known than for the whole warp, since they alone waited for something.
    pub(crate) extra: &'a [(u32, Clock)],
    /// The `cp.async` of the own warp and up to where each lane has waited for its own.
    pub(crate) cp: (u32, u32),
    /// Actors of the own CTA and of the own cluster, for scopes.
    pub(crate) cta: std::ops::Range<u32>,
    pub(crate) cluster: std::ops::Range<u32>,
    /// The first actor of this launch: writes by it and later ones are writes of the launch.
    pub(crate) launch: u32,
    /// The memory is global (else shared): which proxy fence counts.
    pub(crate) global: bool,
    /// The actor does one thing after the other, as a thread does. Copies of one unit run beside each other until they are waited for.
    pub(crate) in_order: bool,
    pub(crate) memo: Memo,
}

/// What an access has looked up in its clock so far: the cells that one access covers were mostly touched by one actor.
#[derive(Default)]
pub(crate) struct Memo {
    /// An actor with the epoch up to which all its lanes are known; epoch 0 knows nothing.
    seen: cell::Cell<(u32, u32)>,
    /// The same for the writes that it fenced for async units.
    fenced: cell::Cell<(u32, u32)>,
    /// Where in the lists of readers the actor stood last.
    place: cell::Cell<usize>,
}

/// Why an access is wrong.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conflict {
    pub(crate) kind: ConflictKind,
    /// The other access.
    pub(crate) other: Stamp,
    /// The byte of the cell.
    pub(crate) byte: usize,
    /// The byte of the access.
    pub(crate) at: usize,
    /// The other access was a write.
    pub(crate) other_writes: bool,
}

impl Conflict {
    /// The same in a cell of an access that begins at byte `start` of its piece.
    pub(crate) fn in_word(self, word: usize, start: usize) -> Conflict {
        Conflict { at: 4 * word + self.byte - start, ..self }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConflictKind {
    Race,
    ProxyFence,
    NonCoherent,
    /// Two sums, atomic both.
    UnorderedSums,
}

impl Access<'_> {
    fn knows(&self, stamp: &Stamp, other_lane: u8, lane: u8) -> bool {
        self.clock.knows(stamp.actor, stamp.epoch, other_lane)
            || self
                .extra
                .iter()
                .any(|(mask, clock)| (lane >= 32 || mask >> lane & 1 == 1) && clock.knows(stamp.actor, stamp.epoch, other_lane))
    }

    fn both_atomic(&self, stamp: &Stamp) -> bool {
        let mine = self.flags & flag::ATOMIC;
        let theirs = stamp.flags() & flag::ATOMIC;
        match mine.min(theirs) {
            0 => false,
            flag::ATOMIC_CTA => self.cta.contains(&stamp.actor),
            flag::ATOMIC_CLUSTER => self.cluster.contains(&stamp.actor),
            _ => true,
        }
    }

    /// Up to which epoch all lanes of an actor are known.
    #[inline]
    fn seen(&self, actor: u32) -> u32 {
        let (last, epoch) = self.memo.seen.get();
        if last == actor && epoch != 0 {
            return epoch;
        }
        let epoch = self.clock.get(actor).seen.all;
        self.memo.seen.set((actor, epoch));
        epoch
    }

    /// Whether all that `stamp` stands for is ordered before this access, as far as whole warps are concerned.
    #[inline]
    fn ordered(&self, stamp: &Stamp) -> bool {
        stamp.actor == NO_ACTOR || stamp.actor < self.clock.horizon || self.seen(stamp.actor) >= stamp.epoch
    }

    /// The first byte of `mask` at which `stamp` is not ordered before this access.
    #[inline]
    fn unordered(&self, stamp: &Stamp, mask: u8, lane: u8) -> Option<usize> {
        if self.ordered(stamp) { None } else { self.unordered_lanes(stamp, mask, lane) }
    }

    /// Both are float sums of which the order matters.
    fn both_ordered_sums(&self, stamp: &Stamp) -> bool {
        self.flags & stamp.flags() & flag::ORDERED_SUM != 0
    }

    fn unordered_lanes(&self, stamp: &Stamp, mask: u8, lane: u8) -> Option<usize> {
        if self.both_atomic(stamp) && !self.both_ordered_sums(stamp) {
            return None;
        }
        (0..4).find(|&byte| {
            let other = stamp.lanes[byte];
            mask >> byte & 1 == 1
                && other != NO_LANE
                && !(self.in_order && stamp.actor == self.actor && other == lane)
                && !(stamp.actor == self.cp.0 && other == lane && stamp.epoch <= self.cp.1)
                && !self.knows(stamp, other, lane)
        })
    }

    #[inline]
    fn race(&self, stamp: &Stamp, mask: u8, lane: u8, other_writes: bool) -> Result<(), Conflict> {
        match self.unordered(stamp, mask, lane) {
            None => Ok(()),
            Some(byte) => {
                let of_sums = self.both_atomic(stamp) && self.both_ordered_sums(stamp);
                let kind = if of_sums { ConflictKind::UnorderedSums } else { ConflictKind::Race };
                Err(Conflict { kind, other: *stamp, byte, at: byte, other_writes })
            }
        }
    }

    /// Whether what is written is a sum that nothing orders with the one that `stamp` stands for, in memory where only a reader makes that a fault.
    fn loses_order(&self, stamp: &Stamp, mask: u8, lane: u8) -> Result<bool, Conflict> {
        match self.race(stamp, mask, lane, true) {
            Err(conflict) if conflict.kind == ConflictKind::UnorderedSums && self.flags & flag::SUM_OF_SCRATCH != 0 => Ok(true),
            checked => checked.map(|()| self.both_ordered_sums(stamp) && stamp.flags() & flag::UNORDERED != 0),
        }
    }

    /// A read of what was added up in no order.
    #[inline]
    fn sums(&self, stamp: &Stamp, mask: u8) -> Result<(), Conflict> {
        if stamp.flags() & flag::UNORDERED == 0 {
            return Ok(());
        }
        match (0..4).find(|&byte| mask >> byte & 1 == 1 && stamp.lanes[byte] != NO_LANE) {
            None => Ok(()),
            Some(byte) => Err(Conflict { kind: ConflictKind::UnorderedSums, other: *stamp, byte, at: byte, other_writes: true }),
        }
    }

    /// An async read of bytes that a thread wrote needs the writer's proxy fence.
    #[inline]
    fn proxy(&self, stamp: &Stamp, mask: u8) -> Result<(), Conflict> {
        if self.flags & flag::ASYNC == 0 || stamp.flags() & flag::ASYNC != 0 || stamp.actor == NO_ACTOR || stamp.actor < self.clock.horizon
        {
            return Ok(());
        }
        let (last, epoch) = self.memo.fenced.get();
        if last == stamp.actor && epoch >= stamp.epoch {
            return Ok(());
        }
        let known = self.clock.get(stamp.actor);
        let (of, all) = if self.global { (Of::FencedGlobal, known.fenced_global.all) } else { (Of::FencedShared, known.fenced_shared.all) };
        self.memo.fenced.set((stamp.actor, all));
        if all >= stamp.epoch {
            return Ok(());
        }
        for byte in 0..4 {
            let lane = stamp.lanes[byte];
            if mask >> byte & 1 == 1 && lane != NO_LANE && !self.clock.covers(stamp.actor, of, stamp.epoch, lane) {
                return Err(Conflict { kind: ConflictKind::ProxyFence, other: *stamp, byte, at: byte, other_writes: true });
            }
        }
        Ok(())
    }

    /// The line and the attributes, as a stamp holds them.
    #[inline]
    fn what(&self) -> u32 {
        self.loc << FLAG_BITS | u32::from(self.flags)
    }

    #[inline]
    fn stamp(&self, mask: u8, lane: u8) -> Stamp {
        let mut lanes = [lane; 4];
        if mask != 0xF {
            for (byte, slot) in lanes.iter_mut().enumerate() {
                if mask >> byte & 1 == 0 {
                    *slot = NO_LANE;
                }
            }
        }
        Stamp { actor: self.actor, epoch: self.epoch, what: self.what(), lanes }
    }

    /// Checks and remembers a read of the bytes of `mask` by `lane`.
    #[inline]
    pub(crate) fn read(&self, cell: &mut Cell, readers: &mut Readers, mask: u8, lane: u8) -> Result<(), Conflict> {
        if cell.write.actor != NO_ACTOR {
            self.race(&cell.write, mask, lane, true)?;
            self.sums(&cell.write, mask)?;
            self.proxy(&cell.write, mask)?;
            if self.flags & flag::NON_COHERENT != 0 {
                self.non_coherent_write(&cell.write, mask)?;
            }
        }
        for write in readers.get(cell.more_writes) {
            self.race(write, mask, lane, true)?;
            self.sums(write, mask)?;
            self.proxy(write, mask)?;
            self.non_coherent_write(write, mask)?;
        }
        let old = &mut cell.read;
        // What an earlier read has touched beside these bytes is not forgotten.
        let is_within = old.is_within(mask);
        if old.actor == self.actor && old.flags() == self.flags && (is_within || old.epoch == self.epoch) {
            if is_within && self.seen(self.actor) >= old.epoch {
                *old = self.stamp(mask, lane);
            } else {
                for byte in 0..4 {
                    if mask >> byte & 1 == 1 {
                        old.lanes[byte] = match old.lanes[byte] {
                            NO_LANE => lane,
                            same if same == lane => lane,
                            _ => MANY_LANES,
                        };
                    }
                }
                old.epoch = self.epoch;
                old.what = self.what();
            }
        } else if old.actor == NO_ACTOR
            || is_within && self.unordered(old, 0xF, lane).is_none() && self.flags & flag::ATOMIC == old.flags() & flag::ATOMIC
        {
            *old = self.stamp(mask, lane);
        } else {
            let stamp = self.stamp(mask, lane);
            readers.push(cell, stamp, &self.memo.place);
        }
        Ok(())
    }

    /// Whether a read of the cell is right, and leaves the same behind, whichever lane makes it: then several may be done at once.
    #[inline]
    pub(crate) fn is_alike_for_lanes(&self, cell: &Cell) -> bool {
        let (write, read) = (&cell.write, &cell.read);
        let written = write.actor == NO_ACTOR
            || self.ordered(write) && self.flags & flag::ASYNC == 0 && (self.flags & flag::NON_COHERENT == 0 || write.actor < self.launch);
        let own = read.actor == self.actor;
        let alike = if own { read.flags() == self.flags } else { self.extra.is_empty() && read.actor != self.cp.0 };
        written && cell.more_writes == 0 && (alike || self.ordered(read))
    }

    /// Remembers a read of the whole cell by several lanes, where it [is alike](Self::is_alike_for_lanes) for them: what `read` leaves
    /// behind after each of them, `last` at the end.
    #[inline]
    pub(crate) fn read_by_lanes(&self, cell: &mut Cell, readers: &mut Readers, first: u8, last: u8) -> Result<(), Conflict> {
        self.read(cell, readers, 0xF, last)?;
        // In a list of readers the last lane stands for all; in the cell itself they are told from one.
        if last != first && cell.read.actor == self.actor && cell.read.flags() == self.flags {
            cell.read.lanes = [MANY_LANES; 4];
        }
        Ok(())
    }

    /// Checks and remembers a write of the bytes of `mask` by `lane`.
    #[inline]
    pub(crate) fn write(&self, cell: &mut Cell, readers: &mut Readers, mask: u8, lane: u8) -> Result<(), Conflict> {
        let mut loses = self.loses_order(&cell.write, mask, lane)?;
        for write in readers.get(cell.more_writes) {
            loses |= self.loses_order(write, mask, lane)?;
        }
        if cell.read.actor != NO_ACTOR {
            self.race(&cell.read, mask, lane, false)?;
            if cell.read.flags() & flag::NON_COHERENT != 0 {
                self.non_coherent_read(&cell.read, mask)?;
            }
        }
        if cell.more != 0 {
            for stamp in readers.get(cell.more) {
                self.race(stamp, mask, lane, false)?;
                self.non_coherent_read(stamp, mask)?;
            }
        }
        if mask == 0xF {
            readers.clear(&mut cell.more);
            readers.clear(&mut cell.more_writes);
            cell.read = EMPTY;
        } else {
            for byte in 0..4 {
                if mask >> byte & 1 == 1 {
                    cell.read.lanes[byte] = NO_LANE;
                }
            }
        }
        let old = &mut cell.write;
        if mask != 0xF && old.actor == self.actor && old.epoch == self.epoch && old.what == self.what() {
            for byte in 0..4 {
                if mask >> byte & 1 == 1 {
                    old.lanes[byte] = lane;
                }
            }
        } else {
            if mask != 0xF {
                readers.overwrite(cell, mask);
            }
            cell.write = self.stamp(mask, lane);
            cell.write.what |= u32::from(flag::UNORDERED) * u32::from(loses);
        }
        Ok(())
    }

    fn non_coherent_write(&self, stamp: &Stamp, mask: u8) -> Result<(), Conflict> {
        let touched = (0..4).find(|&byte| mask >> byte & 1 == 1 && stamp.lanes[byte] != NO_LANE);
        if let Some(byte) = touched
            && self.flags & flag::NON_COHERENT != 0
            && stamp.actor >= self.launch
        {
            return Err(Conflict { kind: ConflictKind::NonCoherent, other: *stamp, byte, at: byte, other_writes: true });
        }
        Ok(())
    }

    fn non_coherent_read(&self, stamp: &Stamp, mask: u8) -> Result<(), Conflict> {
        let touched = (0..4).find(|&byte| mask >> byte & 1 == 1 && stamp.lanes[byte] != NO_LANE);
        if let Some(byte) = touched
            && stamp.flags() & flag::NON_COHERENT != 0
            && stamp.actor >= self.launch
        {
            return Err(Conflict { kind: ConflictKind::NonCoherent, other: *stamp, byte, at: byte, other_writes: false });
        }
        Ok(())
    }
}
