//! Where temporaries and scratch lie in one workspace, and who lends it.
//!
//! Parts of a plan run one after the other on one stream, so memory whose last use is behind may be used again: a *temporary* lives from
//! the part that writes it to the last that reads it, the *scratch* of a part during that part alone. [`place`] finds offsets for all of
//! them; [`WorkspaceSource`] is the opening through which frameworks lend memory of their own.

use verdigris_cuda::{DeviceBuffer, DeviceSlice, Pool, Stream};
use verdigris_graph::binding::alignment_error;
use verdigris_kir::program::SCRATCH_ALIGNMENT_BYTES;
use verdigris_tensor::{BindingError, BindingRule};

use crate::error::Error;

/// Memory that is needed from one part to another, both included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Its size.
    pub bytes: u64,
    /// The first part that uses it.
    pub first: usize,
    /// The last part that uses it.
    pub last: usize,
}

impl Piece {
    fn meets(&self, other: &Piece) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// An offset for each piece, at multiples of 256, such that no two that live at one time share a byte; and the size of the whole.
///
/// The largest is placed first, each at the lowest place where it meets nobody: never more than the sum of all, and never less than
/// what lives at one time. `None` where the sum leaves 64 bits.
///
/// ```
/// use verdigris::workspace::{Piece, place};
///
/// // The third piece is needed when the first no longer is, and lies where that was.
/// let pieces = [(1000, 0, 1), (256, 1, 2), (900, 2, 3)].map(|(bytes, first, last)| Piece { bytes, first, last });
/// assert_eq!(place(&pieces), Some((vec![0, 1024, 0], 1280)));
/// ```
pub fn place(pieces: &[Piece]) -> Option<(Vec<u64>, u64)> {
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(pieces[i].bytes));
    let mut offsets = vec![0; pieces.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut end = 0;
    for i in order {
        let mut taken: Vec<(u64, u64)> =
            placed.iter().filter(|&&other| pieces[other].meets(&pieces[i])).map(|&other| (offsets[other], pieces[other].bytes)).collect();
        offsets[i] = lowest_gap(&mut taken, pieces[i].bytes)?;
        end = end.max(offsets[i] + round_up(pieces[i].bytes)?);
        placed.push(i);
    }
    Some((offsets, end))
}

/// The lowest multiple of 256 at which `bytes` bytes meet none of the taken (offset, size) ranges.
pub(crate) fn lowest_gap(taken: &mut [(u64, u64)], bytes: u64) -> Option<u64> {
    let bytes = round_up(bytes)?;
    taken.sort_unstable();
    let mut at: u64 = 0;
    for &(offset, size) in taken.iter() {
        if offset >= at.checked_add(bytes)? {
            break;
        }
        at = at.max(offset.checked_add(round_up(size)?)?);
    }
    at.checked_add(bytes).map(|_| at)
}

fn round_up(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(SCRATCH_ALIGNMENT_BYTES)
}

/// Whether a workspace is of so many bytes, and where it must be.
pub(crate) fn check(needed_bytes: u64, workspace: DeviceSlice<'_>) -> Result<(), BindingError> {
    let (address, given_bytes) = (workspace.address(), workspace.len_bytes());
    if given_bytes < needed_bytes {
        return Err(short_error(format!("{needed_bytes} bytes"), given_bytes));
    }
    if needed_bytes > 0 && (address == 0 || !address.is_multiple_of(SCRATCH_ALIGNMENT_BYTES)) {
        return Err(alignment_error("workspace", address, SCRATCH_ALIGNMENT_BYTES));
    }
    Ok(())
}

/// Too little workspace.
pub(crate) fn short_error(wanted: String, given_bytes: u64) -> BindingError {
    BindingError::new("workspace", wanted, format!("{given_bytes} bytes"), BindingRule::Workspace)
}

/// Someone who lends workspace: the library's own [`Pool`], or a framework's allocator.
///
/// Memory is lent in the order of a stream: what is submitted to that stream during `work` may use it, and it may go to other work of the
/// same stream as soon as `work` returns.
pub trait WorkspaceSource {
    /// Calls `work` once with at least `bytes` bytes at a multiple of 256, for work on `stream`. `work` submits and does not wait.
    ///
    /// # Errors
    /// What `work` gives. [`Error::NoWorkspace`], or the device's out-of-memory and limit errors, where so much cannot be lent; `work` is
    /// not called then, and the caller may come again with less.
    fn lend(&self, stream: &Stream, bytes: u64, work: &mut dyn FnMut(DeviceSlice<'_>) -> Result<(), Error>) -> Result<(), Error>;
}

impl WorkspaceSource for Pool {
    fn lend(&self, stream: &Stream, bytes: u64, work: &mut dyn FnMut(DeviceSlice<'_>) -> Result<(), Error>) -> Result<(), Error> {
        let buffer = self.alloc(stream, bytes)?;
        work(buffer.slice())
    }
}

/// One buffer for all, whose work is then on one stream, or ordered by events.
impl WorkspaceSource for DeviceBuffer {
    fn lend(&self, _: &Stream, bytes: u64, work: &mut dyn FnMut(DeviceSlice<'_>) -> Result<(), Error>) -> Result<(), Error> {
        if bytes > self.len_bytes() {
            return Err(Error::NoWorkspace { needed_bytes: bytes, lent_bytes: self.len_bytes(), least_bytes: None, account: None });
        }
        work(self.slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pieces: &[Piece]) -> u64 {
        let (offsets, total) = place(pieces).expect("small");
        for (i, a) in pieces.iter().enumerate() {
            assert!(offsets[i].is_multiple_of(256) && offsets[i] + a.bytes <= total);
            for (j, b) in pieces.iter().enumerate().skip(i + 1) {
                let apart = offsets[i] + a.bytes <= offsets[j] || offsets[j] + b.bytes <= offsets[i];
                assert!(apart || !a.meets(b) || a.bytes == 0 || b.bytes == 0, "{a:?} at {} and {b:?} at {}", offsets[i], offsets[j]);
            }
        }
        total
    }

    #[test]
    fn pieces_that_live_together_lie_apart_and_others_share() {
        let piece = |bytes, first, last| Piece { bytes, first, last };
        assert_eq!(check(&[]), 0);
        assert_eq!(check(&[piece(1, 0, 0)]), 256);
        assert_eq!(check(&[piece(1000, 0, 1), piece(1000, 1, 2), piece(1000, 2, 3)]), 2048, "the third takes the place of the first");
        assert_eq!(check(&[piece(0, 0, 9), piece(256, 3, 3)]), 256);
        // Random lifetimes: never below what lives at one time, never above the sum.
        let mut state = 7_u64;
        let mut next = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        for _ in 0..200 {
            let pieces: Vec<Piece> = (0..12)
                .map(|_| {
                    let first = next(10) as usize;
                    piece(next(5000), first, first + next(4) as usize)
                })
                .collect();
            let total = check(&pieces);
            let at = |part: usize| -> u64 {
                pieces.iter().filter(|p| p.first <= part && part <= p.last).map(|p| p.bytes.next_multiple_of(256)).sum()
            };
            let most = (0..14).map(at).max().unwrap_or(0);
            let sum: u64 = pieces.iter().map(|p| p.bytes.next_multiple_of(256)).sum();
            assert!((most..=sum).contains(&total), "{most} <= {total} <= {sum}");
        }
    }

    #[test]
    fn sizes_that_leave_64_bits_are_told() {
        assert_eq!(place(&[Piece { bytes: u64::MAX, first: 0, last: 0 }]), None);
        let half = Piece { bytes: 1 << 63, first: 0, last: 0 };
        assert_eq!(place(&[half, half]), None);
    }
}
