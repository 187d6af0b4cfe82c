//! Simulated memory: the caller's buffers in a sparse 64-bit address space, and one CTA's shared memory.
//!
//! Buffers stand 2⁴⁰ bytes apart, so that an index that runs out of one never lands in another; pages come into being when they are
//! touched, so that addresses past 2³¹ cost nothing. Each byte knows whether it was ever written.

use super::shadow::{Access, Cell, Conflict, Readers};
use super::warp::each;

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;
const BUFFER_SHIFT: u32 = 40;
/// Address of the first byte of a CTA's shared memory: the chip keeps the first kilobyte for itself.
pub(crate) const SHARED_BASE: u32 = 1024;
/// Where kernel parameters stand in the generic address space.
pub(crate) const PARAM_BASE: u64 = 0x7F00_0000_0000_0000;

#[derive(Debug)]
pub(crate) struct Page {
    data: Box<[u8; PAGE]>,
    /// One bit a byte, four bits an entry.
    valid: Box<[u8; PAGE / 4]>,
    cells: Option<Box<[Cell]>>,
    /// Bytes that the launch has loaded (low nibble) and stored (high nibble), for the counts of unique bytes.
    touched: Option<Box<[u8; PAGE / 4]>>,
    touched_launch: u32,
}

/// What a page holds before anyone writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Background {
    Unwritten,
    Value(u8),
}

/// One buffer.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    background: Background,
    /// Nothing on the device writes it.
    is_constant: bool,
    /// Nobody looks at it behind the run.
    pub(crate) is_scratch: bool,
    /// In groups of [`GROUP`], so that hundreds of gigabytes of which a few pages are touched cost little.
    groups: Vec<Option<Box<Group>>>,
}

/// Pages of a group.
const GROUP: usize = 512;
type Group = [Option<Box<Page>>; GROUP];

impl Buffer {
    fn new(name: String, bytes: u64, background: Background) -> Self {
        let mut groups = Vec::new();
        groups.resize_with(bytes.div_ceil((PAGE * GROUP) as u64) as usize, || None);
        Buffer { name, bytes, background, is_constant: false, is_scratch: false, groups }
    }

    fn page(&mut self, index: usize) -> &mut Page {
        let background = self.background;
        let group = self.groups[index / GROUP].get_or_insert_with(|| Box::new([const { None }; GROUP]));
        group[index % GROUP].get_or_insert_with(|| {
            let (value, valid) = match background {
                Background::Unwritten => (0xA5, 0),
                Background::Value(value) => (value, 0xF),
            };
            Box::new(Page {
                data: Box::new([value; PAGE]),
                valid: Box::new([valid; PAGE / 4]),
                cells: None,
                touched: None,
                touched_launch: u32::MAX,
            })
        })
    }

    fn put(&mut self, mut offset: u64, mut bytes: &[u8], written: bool) {
        while !bytes.is_empty() {
            let at = (offset % PAGE as u64) as usize;
            let count = bytes.len().min(PAGE - at);
            let page = self.page((offset / PAGE as u64) as usize);
            page.data[at..at + count].copy_from_slice(&bytes[..count]);
            for byte in at..at + count {
                set_valid(&mut page.valid[byte / 4], byte % 4, written);
            }
            let cells = page.cells.iter_mut().flat_map(|cells| &mut cells[at / 4..(at + count).div_ceil(4)]);
            cells.for_each(Cell::forget_sums);
            bytes = &bytes[count..];
            offset += count as u64;
        }
    }
}

fn set_valid(mask: &mut u8, bit: usize, on: bool) {
    if on {
        *mask |= 1 << bit;
    } else {
        *mask &= !(1 << bit);
    }
}

/// The buffers of a run: what slots of a [`Program`](crate::program::Program) mean.
#[derive(Debug, Default)]
pub struct Memory {
    pub(crate) buffers: Vec<Buffer>,
    /// What stands in front of the run and may still touch every byte that is not constant, where there is such a thing.
    pub(crate) predecessor: Option<u32>,
}

impl Memory {
    /// No buffers.
    pub fn new() -> Self {
        Memory::default()
    }

    /// Adds a buffer with these contents and returns its slot.
    pub fn add(&mut self, bytes: &[u8]) -> usize {
        let slot = self.add_filled(bytes.len() as u64, 0);
        self.buffers[slot].put(0, bytes, true);
        slot
    }

    /// Adds a buffer that nothing has written: reading it is reported where it matters. Returns its slot.
    pub fn add_unwritten(&mut self, bytes: u64) -> usize {
        self.buffers.push(Buffer::new(format!("buffer {}", self.buffers.len()), bytes, Background::Unwritten));
        self.buffers.len() - 1
    }

    /// Adds a buffer with one value in all its bytes and returns its slot. Costs nothing for bytes that no one touches.
    pub fn add_filled(&mut self, bytes: u64, value: u8) -> usize {
        self.buffers.push(Buffer::new(format!("buffer {}", self.buffers.len()), bytes, Background::Value(value)));
        self.buffers.len() - 1
    }

    /// Gives a buffer a name for findings.
    pub fn name(&mut self, slot: usize, name: &str) {
        if let Some(buffer) = self.buffers.get_mut(slot) {
            buffer.name = name.to_string();
        }
    }

    /// Size of a buffer.
    pub fn bytes(&self, slot: usize) -> u64 {
        self.buffers[slot].bytes
    }

    /// Writes into a buffer from the host.
    ///
    /// # Panics
    /// If the range is outside the buffer: the caller's own mistake, not the kernel's.
    pub fn write(&mut self, slot: usize, offset_bytes: u64, bytes: &[u8]) {
        assert!(offset_bytes + bytes.len() as u64 <= self.buffers[slot].bytes, "host write outside buffer {slot}");
        self.buffers[slot].put(offset_bytes, bytes, true);
    }

    /// Reads from a buffer: the bytes, with what unwritten ones happen to hold.
    ///
    /// # Panics
    /// If the range is outside the buffer.
    pub fn read(&mut self, slot: usize, offset_bytes: u64, out: &mut [u8]) {
        self.read_written(slot, offset_bytes, out, None);
    }

    /// All bytes of a buffer.
    pub fn to_vec(&mut self, slot: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.buffers[slot].bytes as usize];
        self.read(slot, 0, &mut bytes);
        bytes
    }

    /// The pages of a buffer that somebody has touched, device or host: where each begins, and its bytes. All others hold what they held at first.
    pub fn touched_pages(&self, slot: usize) -> impl Iterator<Item = (u64, &[u8])> {
        let buffer = &self.buffers[slot];
        let pages = buffer.groups.iter().enumerate().filter_map(|(number, group)| Some((number, group.as_ref()?)));
        let pages = pages.flat_map(|(number, group)| group.iter().enumerate().map(move |(place, page)| (number * GROUP + place, page)));
        pages.filter_map(|(number, page)| {
            let (begin, data) = ((number * PAGE) as u64, &page.as_ref()?.data);
            Some((begin, &data[..(buffer.bytes - begin).min(PAGE as u64) as usize]))
        })
    }

    /// The first byte of the range that nothing has written, if there is one.
    ///
    /// # Panics
    /// If the range is outside the buffer.
    pub fn first_unwritten(&mut self, slot: usize, offset_bytes: u64, bytes: u64) -> Option<u64> {
        let mut written = vec![true; bytes as usize];
        let mut scratch = vec![0; bytes as usize];
        self.read_written(slot, offset_bytes, &mut scratch, Some(&mut written));
        written.iter().position(|on| !on).map(|at| offset_bytes + at as u64)
    }

    fn read_written(&mut self, slot: usize, offset_bytes: u64, out: &mut [u8], mut written: Option<&mut [bool]>) {
        let buffer = &mut self.buffers[slot];
        assert!(offset_bytes + out.len() as u64 <= buffer.bytes, "host read outside buffer {slot}");
        let mut at = 0;
        while at < out.len() {
            let offset = offset_bytes + at as u64;
            let within = (offset % PAGE as u64) as usize;
            let count = (out.len() - at).min(PAGE - within);
            let page = buffer.page((offset / PAGE as u64) as usize);
            out[at..at + count].copy_from_slice(&page.data[within..within + count]);
            if let Some(written) = written.as_deref_mut() {
                for byte in 0..count {
                    written[at + byte] = page.valid[(within + byte) / 4] >> ((within + byte) % 4) & 1 == 1;
                }
            }
            at += count;
        }
    }

    /// Copies bytes between buffers, with the knowledge of which were written.
    pub(crate) fn copy(&mut self, from: usize, from_offset: u64, to: usize, to_offset: u64, bytes: u64) {
        let mut data = vec![0; bytes as usize];
        let mut written = vec![true; bytes as usize];
        self.read_written(from, from_offset, &mut data, Some(&mut written));
        let mut at = 0;
        while at < data.len() {
            let run = written[at..].iter().position(|&on| on != written[at]).unwrap_or(data.len() - at);
            self.buffers[to].put(to_offset + at as u64, &data[at..at + run], written[at]);
            at += run;
        }
    }

    pub(crate) fn add_scratch(&mut self, name: &str, bytes: u64) -> usize {
        self.buffers.push(Buffer { is_scratch: true, ..Buffer::new(format!("scratch {name}"), bytes, Background::Unwritten) });
        self.buffers.len() - 1
    }

    pub(crate) fn add_constant(&mut self, bytes: &[u8]) -> usize {
        let slot = self.add(bytes);
        self.buffers[slot].is_constant = true;
        slot
    }

    /// The address of the first byte of a buffer.
    pub(crate) fn base(slot: usize) -> u64 {
        (slot as u64 + 1) << BUFFER_SHIFT
    }

    /// Forgets who accessed what: at the start of a run.
    pub(crate) fn forget_history(&mut self) {
        self.predecessor = None;
        for buffer in &mut self.buffers {
            for page in buffer.groups.iter_mut().flatten().flat_map(|group| group.iter_mut()).flatten() {
                page.cells = None;
                page.touched = None;
                page.touched_launch = u32::MAX;
            }
        }
    }

    /// Slot and offset of an address range, or what stands near it.
    pub(crate) fn resolve(&self, address: u64, bytes: u64) -> Result<(usize, u64), String> {
        let slot = ((address >> BUFFER_SHIFT) as usize).wrapping_sub(1);
        let offset = address & ((1 << BUFFER_SHIFT) - 1);
        match self.buffers.get(slot) {
            Some(buffer) if offset.checked_add(bytes).is_some_and(|end| end <= buffer.bytes) => Ok((slot, offset)),
            Some(buffer) => {
                // A negative index lands at the far end of the gap in front of the next buffer.
                let half = 1u64 << (BUFFER_SHIFT - 1);
                if offset >= half
                    && let Some(next) = self.buffers.get(slot + 1)
                {
                    return Err(format!("{} bytes before the start of {}", (1u64 << BUFFER_SHIFT) - offset, next.name));
                }
                Err(format!("at byte {offset} of {}, which has {} bytes", buffer.name, buffer.bytes))
            }
            None => {
                let before = self.buffers.get(slot.wrapping_add(1));
                match before {
                    Some(next) if slot == usize::MAX && offset != 0 => {
                        Err(format!("{} bytes before the start of {}", (1u64 << BUFFER_SHIFT) - offset, next.name))
                    }
                    _ => Err("at an address that belongs to no buffer".into()),
                }
            }
        }
    }

    /// The buffer that holds all of `from..end`, and where in it they begin.
    pub(crate) fn slot_of(&self, from: u64, end: u64) -> Option<(usize, u64)> {
        let slot = ((from >> BUFFER_SHIFT) as usize).wrapping_sub(1);
        let offset = from & ((1 << BUFFER_SHIFT) - 1);
        let buffer = self.buffers.get(slot)?;
        (offset + (end - from) <= buffer.bytes).then_some((slot, offset))
    }

    /// The piece of memory from `offset` to the end of its page.
    pub(crate) fn piece(&mut self, slot: usize, offset: u64) -> (Piece<'_>, usize) {
        let buffer = &mut self.buffers[slot];
        let predecessor = self.predecessor.filter(|_| !buffer.is_constant);
        let page = buffer.page((offset / PAGE as u64) as usize);
        let untouched = || predecessor.map_or_else(Cell::default, Cell::of_predecessor);
        let cells = page.cells.get_or_insert_with(|| vec![untouched(); PAGE / 4].into_boxed_slice());
        (Piece { data: &mut page.data[..], valid: &mut page.valid[..], cells }, (offset % PAGE as u64) as usize)
    }

    /// Marks bytes as loaded or stored by a launch; returns how many were not yet.
    pub(crate) fn touch(&mut self, slot: usize, offset: u64, bytes: usize, store: bool, launch: u32) -> u64 {
        let mut fresh = 0;
        let mut at = 0;
        while at < bytes {
            let position = offset + at as u64;
            let within = (position % PAGE as u64) as usize;
            let count = (bytes - at).min(PAGE - within);
            let page = self.buffers[slot].page((position / PAGE as u64) as usize);
            let touched = page.touched.get_or_insert_with(|| Box::new([0; PAGE / 4]));
            if page.touched_launch != launch {
                page.touched_launch = launch;
                touched.fill(0);
            }
            let shift = if store { 4 } else { 0 };
            let mut byte = within;
            while byte < within + count {
                let first = byte % 4;
                let last = (within + count - byte + first).min(4);
                let mask = (((1u8 << last) - 1) & !((1u8 << first) - 1)) << shift;
                let entry = &mut touched[byte / 4];
                fresh += u64::from((mask & !*entry).count_ones());
                *entry |= mask;
                byte += last - first;
            }
            at += count;
        }
        fresh
    }
}

/// A run of bytes with their history: a page of global memory, or a CTA's shared memory.
pub(crate) struct Piece<'a> {
    pub(crate) data: &'a mut [u8],
    pub(crate) valid: &'a mut [u8],
    pub(crate) cells: &'a mut [Cell],
}

/// For each word that `start..start + len` touches: its index and the mask of its bytes.
fn words(start: usize, len: usize) -> impl Iterator<Item = (usize, u8)> {
    let end = start + len;
    (start / 4..end.div_ceil(4)).map(move |word| {
        let low = (word * 4).max(start) - word * 4;
        let high = (word * 4 + 4).min(end) - word * 4;
        (word, (((1u16 << high) - 1) & !((1u16 << low) - 1)) as u8)
    })
}

impl Piece<'_> {
    /// Checks a read against the history; true if all bytes were written.
    pub(crate) fn check_read(
        &mut self,
        readers: &mut Readers,
        start: usize,
        len: usize,
        access: &Access<'_>,
        lane: u8,
    ) -> Result<bool, Conflict> {
        let mut written = true;
        if (start | len).is_multiple_of(4) {
            for word in start / 4..(start + len) / 4 {
                access.read(&mut self.cells[word], readers, 0xF, lane).map_err(|conflict| conflict.in_word(word, start))?;
                written &= self.valid[word] == 0xF;
            }
            return Ok(written);
        }
        for (word, mask) in words(start, len) {
            access.read(&mut self.cells[word], readers, mask, lane).map_err(|conflict| conflict.in_word(word, start))?;
            written &= self.valid[word] & mask == mask;
        }
        Ok(written)
    }

    /// Checks reads of the same whole words by the lanes of `lanes`; true if all bytes were written, and else the lane that is wrong.
    pub(crate) fn check_read_by(
        &mut self,
        readers: &mut Readers,
        start: usize,
        len: usize,
        access: &Access<'_>,
        lanes: u32,
    ) -> Result<bool, (usize, Conflict)> {
        let (first, last) = (lanes.trailing_zeros(), 31 - lanes.leading_zeros());
        let words = start / 4..(start + len) / 4;
        let cells = &mut self.cells[words.clone()];
        if first != last && !cells.iter().all(|cell| access.is_alike_for_lanes(cell)) {
            let mut written = true;
            for lane in each(lanes) {
                written &= self.check_read(readers, start, len, access, lane as u8).map_err(|conflict| (lane, conflict))?;
            }
            return Ok(written);
        }
        for (word, cell) in (start / 4..).zip(cells) {
            let checked = access.read_by_lanes(cell, readers, first as u8, last as u8);
            checked.map_err(|conflict| (first as usize, conflict.in_word(word, start)))?;
        }
        Ok(self.valid[words].iter().all(|&valid| valid == 0xF))
    }

    /// Checks a write against the history.
    pub(crate) fn check_write(
        &mut self,
        readers: &mut Readers,
        start: usize,
        len: usize,
        access: &Access<'_>,
        lane: u8,
    ) -> Result<(), Conflict> {
        if (start | len).is_multiple_of(4) {
            for word in start / 4..(start + len) / 4 {
                access.write(&mut self.cells[word], readers, 0xF, lane).map_err(|conflict| conflict.in_word(word, start))?;
            }
            return Ok(());
        }
        for (word, mask) in words(start, len) {
            access.write(&mut self.cells[word], readers, mask, lane).map_err(|conflict| conflict.in_word(word, start))?;
        }
        Ok(())
    }

    /// Marks bytes as written.
    pub(crate) fn mark(&mut self, start: usize, len: usize) {
        if (start | len).is_multiple_of(4) {
            self.valid[start / 4..(start + len) / 4].fill(0xF);
            return;
        }
        for (word, mask) in words(start, len) {
            self.valid[word] |= mask;
        }
    }

    /// Marks bytes as written or not, one by one.
    pub(crate) fn mark_each(&mut self, start: usize, written: &[bool]) {
        for (at, &on) in written.iter().enumerate() {
            set_valid(&mut self.valid[(start + at) / 4], (start + at) % 4, on);
        }
    }

    /// Whether each byte was written.
    pub(crate) fn written_each(&self, start: usize, out: &mut [bool]) {
        for (at, slot) in out.iter_mut().enumerate() {
            *slot = self.valid[(start + at) / 4] >> ((start + at) % 4) & 1 == 1;
        }
    }
}

/// One CTA's shared memory, by address: the first [`SHARED_BASE`] bytes are the chip's.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    data: Vec<u8>,
    valid: Vec<u8>,
    cells: Vec<Cell>,
}

impl Shared {
    /// For the next CTA: `bytes` bytes that nothing has touched.
    pub(crate) fn renew(&mut self, bytes: u32) {
        let words = (SHARED_BASE + bytes).div_ceil(4) as usize;
        self.data.clear();
        self.data.resize(words * 4, 0x5A);
        self.valid.clear();
        self.valid.resize(words, 0);
        self.cells.clear();
        self.cells.resize(words, Cell::default());
    }

    pub(crate) fn len(&self) -> usize {
        self.data.len()
    }

    pub(crate) fn piece(&mut self) -> Piece<'_> {
        Piece { data: &mut self.data, valid: &mut self.valid, cells: &mut self.cells }
    }

    pub(crate) fn data(&self) -> &[u8] {
        &self.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_addresses_cost_nothing_and_gaps_are_named() {
        let mut memory = Memory::new();
        let slot = memory.add_filled(5 << 30, 7);
        memory.write(slot, (5 << 30) - 4, &[1, 2, 3, 4]);
        let mut out = [0; 8];
        memory.read(slot, (5 << 30) - 8, &mut out);
        assert_eq!(out, [7, 7, 7, 7, 1, 2, 3, 4]);
        assert_eq!(memory.resolve(Memory::base(slot) + (5 << 30) - 4, 4), Ok((slot, (5 << 30) - 4)));
        assert!(memory.resolve(Memory::base(slot) + (5 << 30) - 3, 4).unwrap_err().contains("buffer 0"));
        // What was touched is known by its page, the last one no longer than the buffer.
        memory.write(slot, 5000, &[9]);
        let touched: Vec<(u64, usize)> = memory.touched_pages(slot).map(|(begin, bytes)| (begin, bytes.len())).collect();
        assert_eq!(touched, [(4096, 4096), ((5 << 30) - 4096, 4096)]);
        assert!(memory.resolve(Memory::base(slot) - 4, 4).unwrap_err().contains("4 bytes before the start of buffer 0"));
    }

    #[test]
    fn unwritten_bytes_are_known_and_unique_bytes_counted_once() {
        let mut memory = Memory::new();
        let slot = memory.add_unwritten(100);
        memory.write(slot, 3, &[9; 10]);
        assert_eq!(memory.first_unwritten(slot, 3, 10), None);
        assert_eq!(memory.first_unwritten(slot, 3, 11), Some(13));
        assert_eq!(memory.touch(slot, 1, 10, false, 0), 10);
        assert_eq!(memory.touch(slot, 5, 10, false, 0), 4);
        assert_eq!(memory.touch(slot, 5, 10, true, 0), 10);
        assert_eq!(memory.touch(slot, 5, 10, false, 1), 10);
    }
}
