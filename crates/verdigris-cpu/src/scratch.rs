//! Memory that ops use between their first and their last instruction, kept from run to run.

use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::Error;

/// Where buffers start: a vector of 512 bits then lies in one line of the cache.
const LINE_BYTES: usize = 64;

/// Has a buffer hold `len` elements, those beyond its own being the type's default.
pub(crate) fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> Result<(), Error> {
    let more = len.saturating_sub(buffer.len());
    let need_bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    buffer.try_reserve_exact(more).map_err(|_| Error::OutOfMemory { need_bytes })?;
    buffer.resize(len, T::default());
    Ok(())
}

/// A buffer of `len` elements, within [`caught`].
pub(crate) fn made<T: Clone + Default>(len: usize) -> Vec<T> {
    // Asked for twice, for zeros that the system gives need no writing.
    if Vec::<T>::new().try_reserve_exact(len).is_err() {
        out_of_memory((len as u64).saturating_mul(size_of::<T>() as u64));
    }
    vec![T::default(); len]
}

/// Ends what [`caught`] computes: so many bytes cannot be had.
pub(crate) fn out_of_memory(need_bytes: u64) -> ! {
    unwind(Error::OutOfMemory { need_bytes })
}

/// Ops fail, for want of memory above all, deep within parallel loops, where there is no way back but to unwind, as far as [`caught`]. No panic:
/// nothing is printed.
pub(crate) fn unwind(error: Error) -> ! {
    resume_unwind(Box::new(error))
}

/// What `compute` gives, or the error that ended it.
pub(crate) fn caught<R>(compute: impl FnOnce() -> R) -> Result<R, Error> {
    // What `compute` leaves half done is thrown away or overwritten: its outputs, and buffers whose contents are undefined.
    catch_unwind(AssertUnwindSafe(compute)).map_err(|payload| match payload.downcast::<Error>() {
        Ok(error) => *error,
        Err(panic) => resume_unwind(panic),
    })
}

/// Buffers of one type that are lent and come back.
#[derive(Debug, Default)]
pub(crate) struct Pool<T> {
    free: Mutex<Vec<Vec<T>>>,
    lent_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
}

/// Scratch of every kind, one pool a type.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) f32: Pool<f32>,
    pub(crate) f64: Pool<f64>,
    /// Where elements lie.
    pub(crate) places: Pool<usize>,
    /// Elements of integer tensors.
    pub(crate) integers: Pool<i64>,
    /// Taps of filters.
    pub(crate) taps: Pool<crate::conv::Tap>,
    /// Windows of pooling.
    pub(crate) runs: Pool<crate::pool::Run>,
}

impl Scratch {
    /// The most bytes that were lent at once since the last call.
    pub(crate) fn take_peak_bytes(&self) -> u64 {
        let of_numbers = self.f32.take_peak() + self.f64.take_peak() + self.integers.take_peak();
        (of_numbers + self.places.take_peak() + self.taps.take_peak() + self.runs.take_peak()) as u64
    }
}

impl<T: Copy + Default> Pool<T> {
    /// A buffer of `len` elements, at the start of a line of the cache, whose values are left over from earlier uses.
    pub(crate) fn lend(&self, len: usize) -> Lent<'_, T> {
        // The free buffer that fits best, else the largest, so that few grow.
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let best = (free.iter().enumerate()).min_by_key(|(_, buffer)| {
            let capacity = buffer.capacity();
            if capacity >= len { (0, capacity) } else { (1, usize::MAX - capacity) }
        });
        let mut buffer = best.map(|(i, _)| i).map(|i| free.swap_remove(i)).unwrap_or_default();
        drop(free);
        let slack = (LINE_BYTES / size_of::<T>()).saturating_sub(1);
        if buffer.len() < len + slack {
            grow(&mut buffer, len.saturating_add(slack)).unwrap_or_else(|error| unwind(error));
        }
        let start = match buffer.as_ptr().align_offset(LINE_BYTES) {
            offset if offset <= slack => offset,
            _ => 0,
        };
        let bytes = len * size_of::<T>();
        let lent = self.lent_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_bytes.fetch_max(lent, Ordering::Relaxed);
        Lent { pool: self, buffer, start, len }
    }

    /// A buffer of the first `len` of these values, of which there are no fewer.
    pub(crate) fn collected(&self, len: usize, values: impl Iterator<Item = T>) -> Lent<'_, T> {
        let mut lent = self.lend(len);
        lent.iter_mut().zip(values).for_each(|(place, value)| *place = value);
        lent
    }
}

impl<T> Pool<T> {
    fn take_peak(&self) -> usize {
        self.peak_bytes.swap(self.lent_bytes.load(Ordering::Relaxed), Ordering::Relaxed)
    }
}

/// A lent buffer; it goes back when it is dropped.
#[derive(Debug)]
pub(crate) struct Lent<'p, T> {
    pool: &'p Pool<T>,
    buffer: Vec<T>,
    start: usize,
    len: usize,
}

impl<T> Deref for Lent<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.buffer[self.start..self.start + self.len]
    }
}

impl<T> DerefMut for Lent<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.buffer[self.start..self.start + self.len]
    }
}

impl<T> Drop for Lent<'_, T> {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        self.pool.lent_bytes.fetch_sub(self.len * size_of::<T>(), Ordering::Relaxed);
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}
