//! Memory of the host that others own, as the CPU device takes it: what [`DeviceSlice`](crate::DeviceSlice) is to memory of a GPU.
//!
//! An address becomes a slice of Rust only where nobody can write what another reads. Who makes a [`HostSlice`] from an address vouches
//! for the memory; that the memories of one run lie apart where they must is seen by [`borrow`], which alone makes slices of them.

use std::marker::PhantomData;

/// Host memory that someone else owns, to be read or to be written.
///
/// ```
/// use verdigris_cuda::host::{HostBytes, HostSlice, borrow};
///
/// let (x, mut y) = ([1, 2], [0; 2]);
/// let mut slices = [HostSlice::read(&x), HostSlice::write(&mut y)];
/// let mut bytes = borrow(["x", "y"].into_iter().zip(&mut slices)).expect("they lie apart");
/// if let [("x", HostBytes::Read(from)), ("y", HostBytes::Write(to))] = &mut bytes[..] {
///     to.copy_from_slice(from);
/// }
/// assert_eq!(y, x);
/// ```
#[derive(Debug)]
pub struct HostSlice<'a> {
    start: *mut u8,
    len_bytes: u64,
    is_written: bool,
    lives: PhantomData<&'a mut [u8]>,
}

// SAFETY: it stands for `&[u8]` or `&mut [u8]`, both of which may go to other threads.
unsafe impl Send for HostSlice<'_> {}
// SAFETY: as above; a shared reference reaches address and length alone.
unsafe impl Sync for HostSlice<'_> {}

/// The bytes behind a [`HostSlice`].
#[derive(Debug)]
pub enum HostBytes<'a> {
    /// To be read.
    Read(&'a [u8]),
    /// To be written.
    Write(&'a mut [u8]),
}

/// Why memories cannot be borrowed together, with the caller's names for them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostConflict<T> {
    /// One of some bytes at null.
    Null {
        /// Which.
        slice: T,
    },
    /// One that is longer than a slice can be.
    Length {
        /// Which.
        slice: T,
    },
    /// One that is written and another share bytes.
    Shared {
        /// The one that is written.
        written: T,
        /// The other one.
        other: T,
    },
}

impl<'a> HostSlice<'a> {
    /// Bytes to be read.
    pub fn read(bytes: &'a [u8]) -> HostSlice<'a> {
        HostSlice { start: bytes.as_ptr().cast_mut(), len_bytes: bytes.len() as u64, is_written: false, lives: PhantomData }
    }

    /// Bytes to be written.
    pub fn write(bytes: &'a mut [u8]) -> HostSlice<'a> {
        HostSlice { start: bytes.as_mut_ptr(), len_bytes: bytes.len() as u64, is_written: true, lives: PhantomData }
    }

    /// So many bytes from an address on. [`borrow`] refuses null and what shares bytes where it may not.
    ///
    /// # Safety
    /// Unless `address` is null, the bytes can be read for as long as `'a`, and written where `is_written`. Meanwhile nobody writes
    /// them, and where `is_written` nobody reads them: except through slices that go to the same call of [`borrow`].
    pub unsafe fn from_raw(address: u64, len_bytes: u64, is_written: bool) -> HostSlice<'a> {
        HostSlice { start: address as *mut u8, len_bytes, is_written, lives: PhantomData }
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.start as u64
    }

    /// How long it is.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Whether it is there to be written.
    pub fn is_written(&self) -> bool {
        self.is_written
    }
}

/// The bytes of all these, which one run reads and writes, each with the caller's name for it.
///
/// # Errors
/// [`HostConflict`]: memory at null, or bytes that would be written beside another's; then nothing is borrowed.
pub fn borrow<'s, 'a: 's, T: Copy>(
    slices: impl Iterator<Item = (T, &'s mut HostSlice<'a>)>,
) -> Result<Vec<(T, HostBytes<'s>)>, HostConflict<T>> {
    let slices: Vec<(T, &'s mut HostSlice<'a>)> = slices.collect();
    // Written ones in the order of their addresses, so that each of the others is compared with its neighbours alone.
    let mut written: Vec<(u64, u64, usize)> = Vec::new();
    for (number, (name, slice)) in slices.iter().enumerate() {
        if slice.len_bytes > 0 && slice.start.is_null() {
            return Err(HostConflict::Null { slice: *name });
        }
        let Some(end) = slice.address().checked_add(slice.len_bytes).filter(|_| slice.len_bytes <= isize::MAX as u64) else {
            return Err(HostConflict::Length { slice: *name });
        };
        if slice.is_written && slice.len_bytes > 0 {
            written.push((slice.address(), end, number));
        }
    }
    written.sort_unstable();
    if let Some(pair) = written.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        return Err(HostConflict::Shared { written: slices[pair[0].2].0, other: slices[pair[1].2].0 });
    }
    for (name, slice) in slices.iter().filter(|(_, slice)| !slice.is_written && slice.len_bytes > 0) {
        // The last written one that begins before this one ends: others that meet it would meet that one too.
        let after = written.partition_point(|&(start, ..)| start < slice.address() + slice.len_bytes);
        if let Some(&(_, end, other)) = after.checked_sub(1).and_then(|last| written.get(last))
            && slice.address() < end
        {
            return Err(HostConflict::Shared { written: slices[other].0, other: *name });
        }
    }
    let bytes = slices.into_iter().map(|(name, slice)| {
        // An empty slice may not be at null.
        let start = if slice.len_bytes == 0 { std::ptr::dangling_mut() } else { slice.start };
        let len = slice.len_bytes as usize;
        let bytes = if slice.is_written {
            // SAFETY: whoever made the slice vouches for the memory, as long as no other slice of this call shares a byte with it, which
            // was seen above; the borrow of the slice keeps it from a second call.
            HostBytes::Write(unsafe { std::slice::from_raw_parts_mut(start, len) })
        } else {
            // SAFETY: as above; what is only read may be shared.
            HostBytes::Read(unsafe { std::slice::from_raw_parts(start, len) })
        };
        (name, bytes)
    });
    Ok(bytes.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slices of one piece of memory, as (from, to, is written).
    fn conflict(parts: &[(usize, usize, bool)]) -> Option<HostConflict<usize>> {
        let mut memory = [0_u8; 64];
        let start = memory.as_mut_ptr() as u64;
        let slice = |&(from, to, is_written): &(usize, usize, bool)| {
            // SAFETY: the part lies in the memory, which is used through these slices alone.
            unsafe { HostSlice::from_raw(start + from as u64, (to - from) as u64, is_written) }
        };
        let mut slices: Vec<HostSlice<'_>> = parts.iter().map(slice).collect();
        borrow(slices.iter_mut().enumerate()).err()
    }

    #[test]
    fn what_is_written_lies_apart() {
        assert_eq!(conflict(&[(0, 8, false), (0, 8, false), (4, 12, false), (12, 20, true), (20, 24, true), (24, 64, false)]), None);
        assert_eq!(conflict(&[(0, 8, false), (7, 9, true)]), Some(HostConflict::Shared { written: 1, other: 0 }));
        assert_eq!(conflict(&[(8, 9, true), (0, 64, false)]), Some(HostConflict::Shared { written: 0, other: 1 }));
        assert_eq!(conflict(&[(0, 8, true), (0, 8, true)]), Some(HostConflict::Shared { written: 0, other: 1 }));
        assert_eq!(conflict(&[(0, 8, true), (4, 4, false), (4, 4, true)]), None, "what is empty shares nothing");
    }

    #[test]
    fn every_pair_is_seen() {
        let mut state = 11_u64;
        let mut next = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 33) % bound) as usize
        };
        let mut met = 0;
        for round in 0..2000 {
            let parts: Vec<(usize, usize, bool)> = (0..4)
                .map(|_| {
                    let from = next(56);
                    (from, from + next(9), next(2) == 1)
                })
                .collect();
            let meets = |a: &(usize, usize, bool), b: &(usize, usize, bool)| (a.2 || b.2) && a.0.max(b.0) < a.1.min(b.1);
            let any = parts.iter().enumerate().any(|(i, a)| parts[i + 1..].iter().any(|b| meets(a, b)));
            assert_eq!(conflict(&parts).is_some(), any, "round {round}: {parts:?}");
            met += usize::from(any);
        }
        assert!((200..1800).contains(&met), "{met}");
    }

    #[test]
    fn null_is_refused_unless_empty() {
        // SAFETY: null is what is to be refused.
        let mut slices = unsafe { [HostSlice::from_raw(0, 0, true), HostSlice::from_raw(0, 1, false)] };
        assert!(borrow(slices[..1].iter_mut().enumerate()).is_ok_and(|bytes| matches!(bytes[..], [(0, HostBytes::Write(&mut []))])));
        assert_eq!(borrow(slices.iter_mut().enumerate()).err(), Some(HostConflict::Null { slice: 1 }));
    }
}
