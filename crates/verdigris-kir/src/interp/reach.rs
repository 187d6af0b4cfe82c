//! Accesses of a warp whose lanes all reach the same buffer, or the shared memory of one CTA, within bounds: nearly all. They are placed at
//! once, and carried out without an allocation. What is wrong with an access is found, lane by lane, in [`super::threads`].

use super::decode::{Instruction, Source};
use super::memory::{Memory, PAGE, Piece, SHARED_BASE};
use super::shadow::Conflict;
use super::state::{Cta, Fault, Machine, Warp};
use super::threads::Place;
use super::warp::{Flow, culprit, each};
use crate::inst::Space;

/// The memory that all lanes reach.
#[derive(Clone, Copy, Debug)]
enum Within {
    Buffer(usize),
    Shared(usize),
}

/// Where the lanes of an access reach, checked against bounds and alignment.
#[derive(Debug)]
pub(crate) struct Reach {
    within: Within,
    /// The lanes.
    mask: u32,
    /// Where each begins, in its buffer or in shared memory.
    at: [u64; 32],
    bytes: u32,
}

impl Reach {
    pub(crate) fn place(&self, lane: usize) -> Place {
        match self.within {
            Within::Buffer(slot) => Place::Global { slot, offset: self.at[lane] },
            Within::Shared(cta) => Place::Shared { cta, offset: self.at[lane] as u32 },
        }
    }

    /// Lanes that reach the same bytes: for the lowest of each such set, the set; nothing for the others.
    fn groups(&self) -> [u32; 32] {
        let mut groups = [0; 32];
        let first = self.at[self.mask.trailing_zeros() as usize];
        if each(self.mask).all(|lane| self.at[lane] == first) {
            groups[self.mask.trailing_zeros() as usize] = self.mask;
            return groups;
        }
        // One more than the lane that stands for the bytes, in a table by their place.
        let mut table = [0u8; 64];
        for lane in each(self.mask) {
            let at = self.at[lane];
            let mut place = (at / u64::from(self.bytes) % 64) as usize;
            loop {
                match table[place] {
                    0 => {
                        table[place] = lane as u8 + 1;
                        groups[lane] = 1 << lane;
                        break;
                    }
                    leader if self.at[leader as usize - 1] == at => {
                        groups[leader as usize - 1] |= 1 << lane;
                        break;
                    }
                    _ => place = (place + 1) % 64,
                }
            }
        }
        groups
    }

    fn is_global(&self) -> bool {
        matches!(self.within, Within::Buffer(_))
    }

    /// Visits the lanes of `lanes`, lowest first, with the piece of memory around each and where it begins there.
    #[inline]
    fn visit(
        &self,
        lanes: u32,
        memory: &mut Memory,
        ctas: &mut [Cta],
        mut lane_of: impl FnMut(&mut Piece<'_>, usize, usize) -> Result<(), (usize, Conflict)>,
    ) -> Result<(), (usize, Conflict)> {
        let mut left = lanes;
        while left != 0 {
            let first = self.at[left.trailing_zeros() as usize];
            let (mut piece, base) = match self.within {
                Within::Buffer(slot) => (memory.piece(slot, first).0, first - first % PAGE as u64),
                Within::Shared(cta) => (ctas[cta].shared.piece(), 0),
            };
            while left != 0 {
                let lane = left.trailing_zeros() as usize;
                let start = self.at[lane].wrapping_sub(base) as usize;
                if start >= piece.data.len() {
                    break;
                }
                left &= left - 1;
                lane_of(&mut piece, start, lane)?;
            }
        }
        Ok(())
    }
}

impl Machine<'_> {
    /// Where the lanes of `mask` reach; `None` if anything about it is unusual, or wrong.
    pub(crate) fn reach(&self, warp: &Warp, inst: &Instruction, mask: u32, space: Space, bytes: u32) -> Option<Reach> {
        let (base, offset) = (inst.ins[0], inst.ins[1]);
        let wrapped = match (space, base) {
            (Space::Global, Source::Reg(reg)) => warp.wrapped[reg as usize],
            _ => 0,
        };
        if (warp.poison_of(base) | wrapped) & mask != 0 || mask == 0 || !bytes.is_power_of_two() || bytes > 32 {
            return None;
        }
        let (base, offset) = (warp.lanes(base), warp.lanes(offset));
        let mut at = [0u64; 32];
        if space == Space::Global {
            (0..32).for_each(|lane| at[lane] = base[lane].wrapping_add(offset[lane]));
        } else {
            (0..32).for_each(|lane| at[lane] = u64::from((base[lane] as u32).wrapping_add(offset[lane] as u32)));
        }
        let (mut low, mut high, mut bits) = (u64::MAX, 0, 0);
        for lane in each(mask) {
            (low, high, bits) = (low.min(at[lane]), high.max(at[lane]), bits | at[lane]);
        }
        if bits & u64::from(bytes - 1) != 0 {
            return None;
        }
        let within = if space == Space::Global {
            let (slot, first) = self.memory.slot_of(low, high.checked_add(u64::from(bytes))?)?;
            at.iter_mut().for_each(|at| *at = at.wrapping_sub(low).wrapping_add(first));
            Within::Buffer(slot)
        } else {
            let owner = &self.ctas[warp.cta];
            let (end, size) = (high + u64::from(bytes), owner.shared.len() as u64);
            let inside = low >= u64::from(SHARED_BASE) && end <= size.min(1 << 24);
            if !inside || owner.exited || owner.has_barrier(low as u32, end as u32) {
                return None;
            }
            Within::Shared(warp.cta)
        };
        Some(Reach { within, mask, at, bytes })
    }

    /// Counts an access of threads.
    pub(crate) fn count_reach(&mut self, warp: &Warp, reach: &Reach, store: bool) {
        let bytes = reach.bytes;
        let Within::Buffer(slot) = reach.within else {
            self.count_shared(warp, &reach.at.map(|at| at as u32), reach.mask, bytes);
            return;
        };
        let launch = self.grids[self.ctas[warp.cta].grid].launch;
        let mut fresh = 0;
        for lane in each(reach.mask) {
            fresh += self.memory.touch(slot, reach.at[lane], bytes as usize, store, launch);
        }
        self.count_global(warp, &reach.at, reach.mask, bytes, fresh, store);
    }

    /// A weak load of `count` elements a lane.
    pub(crate) fn load_reach(
        &mut self,
        warp: &mut Warp,
        inst: &Instruction,
        reach: &Reach,
        element: u32,
        flags: u8,
        byte: Option<bool>,
    ) -> Result<Flow, Fault> {
        self.count_reach(warp, reach, false);
        let launch = self.launch_actor(warp.cta);
        let access = warp.access(&self.ctas[warp.cta], launch, inst.loc, flags, reach.is_global());
        let (outs, readers) = (&mut self.results, &mut self.readers);
        let (element, bytes) = (element as usize, reach.bytes as usize);
        let mut poison = [0u32; 8];
        let groups = if bytes < 4 { std::array::from_fn(|lane| reach.mask & 1 << lane) } else { reach.groups() };
        let leaders = groups.iter().enumerate().fold(0, |lanes, (lane, group)| lanes | u32::from(*group != 0) << lane);
        // The lowest lane that is wrong is at fault, as if one lane came after the other.
        let mut wrong: Option<(usize, Conflict)> = None;
        let done = reach.visit(leaders, self.memory, &mut self.ctas, |piece, start, lane| {
            let checked = if bytes < 4 {
                piece.check_read(readers, start, bytes, &access, lane as u8).map_err(|conflict| (lane, conflict))
            } else {
                piece.check_read_by(readers, start, bytes, &access, groups[lane])
            };
            let written = match checked {
                Ok(written) => written,
                Err(found) => {
                    if wrong.is_none_or(|(earlier, _)| found.0 < earlier) {
                        wrong = Some(found);
                    }
                    return Ok(());
                }
            };
            for (at, data) in piece.data[start..start + bytes].chunks_exact(element).enumerate() {
                outs[at][lane] = match *data {
                    [a] if byte == Some(true) => u64::from(a as i8 as i32 as u32),
                    [a] => u64::from(a),
                    [a, b] => u64::from(u16::from_le_bytes([a, b])),
                    [a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
                    [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
                    _ => 0,
                };
            }
            if !written {
                for (at, poison) in poison.iter_mut().enumerate().take(bytes / element) {
                    let mut each = [false; 8];
                    piece.written_each(start + at * element, &mut each[..element]);
                    *poison |= if each[..element].iter().all(|&on| on) { 0 } else { groups[lane] };
                }
            }
            Ok(())
        });
        if let Some((lane, conflict)) = wrong.or(done.err()) {
            return Err(self.conflict(culprit(warp, inst.loc, Some(lane as u32)), "this thread", reach.place(lane), conflict, false));
        }
        if leaders != reach.mask {
            for lane in each(leaders) {
                for out in &mut self.results[..bytes / element] {
                    each(groups[lane]).for_each(|other| out[other] = out[lane]);
                }
            }
        }
        for ((reg, out), poison) in inst.outs.iter().zip(self.results.iter()).zip(poison) {
            if let Some(reg) = reg {
                warp.set(*reg, reach.mask, out, poison, inst.loc + 1);
            }
        }
        Ok(Flow::Next)
    }

    /// A weak store of elements that are written in every lane.
    pub(crate) fn store_reach(&mut self, warp: &Warp, inst: &Instruction, reach: &Reach, element: u32) -> Result<Flow, Fault> {
        let launch = self.launch_actor(warp.cta);
        let access = warp.access(&self.ctas[warp.cta], launch, inst.loc, 0, reach.is_global());
        let readers = &mut self.readers;
        let (element, bytes) = (element as usize, reach.bytes as usize);
        let done = reach.visit(reach.mask, self.memory, &mut self.ctas, |piece, start, lane| {
            piece.check_write(readers, start, bytes, &access, lane as u8).map_err(|conflict| (lane, conflict))?;
            for (data, source) in piece.data[start..start + bytes].chunks_exact_mut(element).zip(&inst.ins[2..]) {
                data.copy_from_slice(&warp.lanes(*source)[lane].to_le_bytes()[..element]);
            }
            piece.mark(start, bytes);
            Ok(())
        });
        if let Err((lane, conflict)) = done {
            return Err(self.conflict(culprit(warp, inst.loc, Some(lane as u32)), "this thread", reach.place(lane), conflict, true));
        }
        if !self.sync.is_empty() {
            for lane in each(reach.mask) {
                self.sync.remove(&Self::sync_key(reach.place(lane)));
            }
        }
        Ok(Flow::Next)
    }

    /// The rows of 16 bytes that `ldmatrix` reads, by lane; the lanes whose row has a hole.
    pub(crate) fn read_rows(&mut self, warp: &Warp, loc: u32, reach: &Reach, rows: &mut [[u8; 16]; 32]) -> Result<u32, Fault> {
        let launch = self.launch_actor(warp.cta);
        let access = warp.access(&self.ctas[warp.cta], launch, loc, 0, false);
        let readers = &mut self.readers;
        let mut holes = 0;
        let done = reach.visit(reach.mask, self.memory, &mut self.ctas, |piece, start, lane| {
            let written = piece.check_read(readers, start, 16, &access, lane as u8).map_err(|conflict| (lane, conflict))?;
            rows[lane].copy_from_slice(&piece.data[start..start + 16]);
            holes |= u32::from(!written) << lane;
            Ok(())
        });
        match done {
            Ok(()) => Ok(holes),
            Err((lane, conflict)) => {
                Err(self.conflict(culprit(warp, loc, Some(lane as u32)), "this thread", reach.place(lane), conflict, false))
            }
        }
    }

    /// The rows of 16 bytes that `stmatrix` writes, by lane.
    pub(crate) fn write_rows(&mut self, warp: &Warp, loc: u32, reach: &Reach, rows: &[[u8; 16]; 32]) -> Result<(), Fault> {
        let launch = self.launch_actor(warp.cta);
        let access = warp.access(&self.ctas[warp.cta], launch, loc, 0, false);
        let readers = &mut self.readers;
        let done = reach.visit(reach.mask, self.memory, &mut self.ctas, |piece, start, lane| {
            piece.check_write(readers, start, 16, &access, lane as u8).map_err(|conflict| (lane, conflict))?;
            piece.data[start..start + 16].copy_from_slice(&rows[lane]);
            piece.mark(start, 16);
            Ok(())
        });
        done.map_err(|(lane, conflict)| {
            self.conflict(culprit(warp, loc, Some(lane as u32)), "this thread", reach.place(lane), conflict, true)
        })
    }
}
