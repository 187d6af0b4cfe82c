//! Device memory in the order of a stream, from a pool that keeps what was freed; pinned host memory; copies and fills.
//!
//! A pool's memory goes back to the system only by [`Pool::trim`] (or the pool's end): the driver's own default would return
//! it at each synchronization, which makes the next allocation some thousand times dearer.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;
use sys::CUmemPool_attribute as PoolAttribute;

use crate::device::Context;
use crate::error::{Doing, Error, Failure, status};
use crate::stream::{CaptureStatus, Stream};

/// How a [`Pool`] behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOptions {
    /// Most bytes that may be in use at once; `None` leaves it to the device.
    pub limit_bytes: Option<u64>,
    /// Free memory beyond this goes back to the system at the next synchronization.
    pub release_threshold_bytes: u64,
}

impl Default for PoolOptions {
    /// No limit, and nothing goes back by itself.
    fn default() -> Self {
        Self { limit_bytes: None, release_threshold_bytes: u64::MAX }
    }
}

/// What a pool holds and held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolStatistics {
    /// Held from the system now.
    pub reserved_bytes: u64,
    /// Most ever held from the system.
    pub reserved_high_bytes: u64,
    /// In use by buffers now, as the driver counts (rounded up to its grain).
    pub used_bytes: u64,
    /// Most ever in use.
    pub used_high_bytes: u64,
}

/// A source of device memory; cheap to clone. Buffers keep their pool alive.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<PoolInner>,
}

struct PoolInner {
    context: Context,
    raw: sys::CUmemoryPool,
    limit_bytes: u64,
    /// Bytes asked for and not yet freed: what the limit is held against.
    used_bytes: AtomicU64,
}

// SAFETY: the driver's pool functions may be called from any thread.
unsafe impl Send for PoolInner {}
// SAFETY: as above; the driver locks internally.
unsafe impl Sync for PoolInner {}

impl Drop for PoolInner {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: all buffers are freed, since each keeps the pool alive; the driver ends the pool once pending frees are
            // done.
            let _ = unsafe { self.context.driver().api().cuMemPoolDestroy(self.raw) };
        }
    }
}

/// `CUmemPoolProps`, whose declaration changes between the bindings' versions while its layout does not.
#[repr(C)]
struct PoolProperties {
    allocation_type: u32,
    handle_types: u32,
    location_type: u32,
    location_id: i32,
    security: *mut c_void,
    max_bytes: usize,
    reserved: [u8; 56],
}

const _: () = assert!(size_of::<PoolProperties>() == size_of::<sys::CUmemPoolProps>());
const _: () = assert!(align_of::<PoolProperties>() == align_of::<sys::CUmemPoolProps>());

impl Pool {
    /// A new pool on the context's device.
    ///
    /// # Errors
    /// [`Error::Driver`], with `CUDA_ERROR_NOT_SUPPORTED` on a device without stream-ordered memory.
    pub fn new(context: &Context, options: PoolOptions) -> Result<Self, Error> {
        let api = context.driver().api();
        let properties = PoolProperties {
            allocation_type: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32,
            handle_types: 0,
            location_type: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32,
            location_id: context.raw_device(),
            security: std::ptr::null_mut(),
            max_bytes: 0,
            reserved: [0; 56],
        };
        let mut raw: sys::CUmemoryPool = std::ptr::null_mut();
        let _current = context.enter()?;
        // SAFETY: the properties have the header's layout and, with `raw`, outlive the call.
        unsafe { api.cuMemPoolCreate(&mut raw, (&raw const properties).cast()) }.doing(|| "making a memory pool")?;
        let pool = Self {
            inner: Arc::new(PoolInner {
                context: context.clone(),
                raw,
                limit_bytes: options.limit_bytes.unwrap_or(u64::MAX),
                used_bytes: AtomicU64::new(0),
            }),
        };
        let mut threshold = options.release_threshold_bytes;
        let attribute = PoolAttribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: this attribute is a 64-bit number.
        unsafe { api.cuMemPoolSetAttribute(raw, attribute, (&raw mut threshold).cast()) }
            .doing(|| "setting the pool's release threshold")?;
        Ok(pool)
    }

    /// The context that the pool belongs to.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// A buffer of that many bytes, usable by work submitted to `stream` from now on, and by other streams once they have
    /// waited for it. Its address is a multiple of 256. Contents are undefined. 0 bytes give a buffer without memory.
    ///
    /// Where the device is out of memory, the stream is waited for and the pool trimmed before a second try, but not
    /// while the stream captures.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with what is free, [`Error::PoolLimit`], [`Error::ContextMismatch`], [`Error::Driver`].
    pub fn alloc(&self, stream: &Stream, bytes: u64) -> Result<DeviceBuffer, Error> {
        self.same_context(stream, "allocating device memory")?;
        self.claim(bytes)?;
        match self.alloc_claimed(stream, bytes) {
            Ok(address) => Ok(DeviceBuffer { pool: self.clone(), stream: stream.clone(), address, bytes }),
            Err(error) => {
                self.inner.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
                Err(error)
            }
        }
    }

    /// As [`Pool::alloc`], with all bytes 0.
    ///
    /// # Errors
    /// As [`Pool::alloc`].
    pub fn alloc_zeroed(&self, stream: &Stream, bytes: u64) -> Result<DeviceBuffer, Error> {
        let mut buffer = self.alloc(stream, bytes)?;
        buffer.fill(stream, 0)?;
        Ok(buffer)
    }

    /// As [`Pool::alloc`], holding a copy of `source` once this returns.
    ///
    /// # Errors
    /// As [`Pool::alloc`] and [`DeviceBuffer::upload`].
    pub fn alloc_from(&self, stream: &Stream, source: &[u8]) -> Result<DeviceBuffer, Error> {
        let mut buffer = self.alloc(stream, source.len() as u64)?;
        buffer.upload(stream, 0, source)?;
        Ok(buffer)
    }

    /// What the pool holds.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn statistics(&self) -> Result<PoolStatistics, Error> {
        let ask = |attribute| -> Result<u64, Error> {
            let mut value = 0_u64;
            // SAFETY: these attributes are 64-bit numbers.
            unsafe { self.api().cuMemPoolGetAttribute(self.inner.raw, attribute, (&raw mut value).cast()) }
                .doing(|| "asking for the pool's statistics")?;
            Ok(value)
        };
        Ok(PoolStatistics {
            reserved_bytes: ask(PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            reserved_high_bytes: ask(PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
            used_bytes: ask(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            used_high_bytes: ask(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        })
    }

    /// Gives free memory back to the system until at most `keep_bytes` are held. Only memory whose freeing the device has
    /// reached can go back: synchronize first.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn trim(&self, keep_bytes: u64) -> Result<(), Error> {
        let keep_bytes = usize::try_from(keep_bytes).unwrap_or(usize::MAX);
        let _current = self.inner.context.enter()?;
        // SAFETY: the pool is alive.
        unsafe { self.api().cuMemPoolTrimTo(self.inner.raw, keep_bytes) }.doing(|| "trimming the pool")
    }

    fn claim(&self, bytes: u64) -> Result<(), Error> {
        let limit_bytes = self.inner.limit_bytes;
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= limit_bytes);
        match self.inner.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => Ok(()),
            Err(used_bytes) => Err(Error::PoolLimit { requested_bytes: bytes, used_bytes, limit_bytes }),
        }
    }

    fn alloc_claimed(&self, stream: &Stream, bytes: u64) -> Result<u64, Error> {
        if bytes == 0 {
            return Ok(0);
        }
        let doing = || format!("allocating {bytes} bytes");
        let _current = self.inner.context.enter()?;
        let ask = || -> Result<u64, Failure> {
            let mut address: sys::CUdeviceptr = 0;
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            // SAFETY: `address` outlives the call; pool and stream are alive.
            unsafe { self.api().cuMemAllocFromPoolAsync(&mut address, bytes, self.inner.raw, stream.handle()) }?;
            Ok(address)
        };
        let first = ask();
        let Err(failure) = first else { return first.doing(doing) };
        if failure.code() != Some(status::OUT_OF_MEMORY) || stream.capture_status()? != CaptureStatus::None {
            return Err(failure.into_error(doing()));
        }
        stream.synchronize()?;
        self.trim(0)?;
        match ask() {
            Ok(address) => Ok(address),
            Err(failure) if failure.code() == Some(status::OUT_OF_MEMORY) => {
                let info = self.inner.context.memory_info().ok();
                Err(Error::OutOfMemory {
                    doing: doing(),
                    free_bytes: info.map(|(free, _)| free),
                    total_bytes: info.map(|(_, total)| total),
                })
            }
            Err(failure) => Err(failure.into_error(doing())),
        }
    }

    fn same_context(&self, stream: &Stream, what: &'static str) -> Result<(), Error> {
        if self.inner.context == *stream.context() {
            return Ok(());
        }
        Err(Error::ContextMismatch { what, left: "stream", right: "pool" })
    }

    fn api(&self) -> &crate::driver::Api {
        self.inner.context.driver().api()
    }
}

/// Device memory from a [`Pool`]; freed in the order of the stream it was allocated on. Work that other streams do on it must
/// be ordered before the drop by an event.
pub struct DeviceBuffer {
    pool: Pool,
    stream: Stream,
    address: u64,
    bytes: u64,
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.pool.inner.used_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        if self.bytes > 0
            && let Ok((api, _current)) = self.stream.enter()
        {
            // SAFETY: the memory is ours, and nobody can name it any more.
            let _ = unsafe { api.cuMemFreeAsync(self.address, self.stream.handle()) };
        }
    }
}

impl std::fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceBuffer {{ {:#x}, {} bytes }}", self.address, self.bytes)
    }
}

/// A range of device memory: what a kernel's argument points to. Copies are free; it must not outlive the memory's use by
/// the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSlice<'a> {
    address: u64,
    bytes: u64,
    buffer: std::marker::PhantomData<&'a DeviceBuffer>,
}

impl DeviceSlice<'_> {
    /// Device memory that the caller owns.
    ///
    /// # Safety
    /// The `bytes` bytes from `address` on must be memory of the device it is used with, until the device is done with it,
    /// and what the device does there must not disturb the owner.
    pub unsafe fn from_raw(address: u64, bytes: u64) -> Self {
        Self { address, bytes, buffer: std::marker::PhantomData }
    }

    /// The first byte's device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The size.
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// A part of the range.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn part(self, offset_bytes: u64, bytes: u64) -> Result<Self, Error> {
        check_range("taking a part of a slice", offset_bytes, bytes, self.bytes)?;
        Ok(Self { address: self.address + offset_bytes, bytes, buffer: self.buffer })
    }
}

impl DeviceBuffer {
    /// The first byte's device address; 0 for a buffer of 0 bytes.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The context that the buffer belongs to.
    pub fn context(&self) -> &Context {
        self.pool.context()
    }

    /// The size that was asked for.
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// The stream in whose order it is freed.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The whole buffer.
    pub fn slice(&self) -> DeviceSlice<'_> {
        DeviceSlice { address: self.address, bytes: self.bytes, buffer: std::marker::PhantomData }
    }

    /// Copies host bytes in, in the stream's order, and waits for it.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Driver`] (waiting is refused while the stream captures).
    pub fn upload(&mut self, stream: &Stream, offset_bytes: u64, source: &[u8]) -> Result<(), Error> {
        check_range("uploading", offset_bytes, source.len() as u64, self.bytes)?;
        if source.is_empty() {
            return Ok(());
        }
        let (api, _current) = stream.enter()?;
        let target = self.address + offset_bytes;
        // SAFETY: both ranges are whole; the host's outlives the copy, which is waited for below, also where asking failed.
        let copied = unsafe { api.cuMemcpyHtoDAsync_v2(target, source.as_ptr().cast(), source.len(), stream.handle()) };
        stream.synchronize()?;
        copied.doing(|| format!("copying {} bytes to the device", source.len()))
    }

    /// Copies bytes out to the host, in the stream's order, and waits for it.
    ///
    /// # Errors
    /// As [`DeviceBuffer::upload`].
    pub fn download(&self, stream: &Stream, offset_bytes: u64, target: &mut [u8]) -> Result<(), Error> {
        check_range("downloading", offset_bytes, target.len() as u64, self.bytes)?;
        if target.is_empty() {
            return Ok(());
        }
        let (api, _current) = stream.enter()?;
        let source = self.address + offset_bytes;
        // SAFETY: both ranges are whole; the host's outlives the copy, which is waited for below, also where asking failed.
        let copied = unsafe { api.cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), source, target.len(), stream.handle()) };
        stream.synchronize()?;
        copied.doing(|| format!("copying {} bytes from the device", target.len()))
    }

    /// All bytes, copied to the host.
    ///
    /// # Errors
    /// As [`DeviceBuffer::download`].
    pub fn download_all(&self, stream: &Stream) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; usize::try_from(self.bytes).unwrap_or(usize::MAX)];
        self.download(stream, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Sets every byte, in the stream's order, without waiting.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fill(&mut self, stream: &Stream, value: u8) -> Result<(), Error> {
        fill(stream, self.slice(), value)
    }

    /// Copies from another buffer, in the stream's order, without waiting.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where the source is longer than what follows the offset, [`Error::Driver`].
    pub fn copy_from(&mut self, stream: &Stream, offset_bytes: u64, source: DeviceSlice<'_>) -> Result<(), Error> {
        check_range("copying on the device", offset_bytes, source.bytes, self.bytes)?;
        let target = self.slice().part(offset_bytes, source.bytes)?;
        copy(stream, target, source)
    }
}

/// Sets every byte of the range, in the stream's order.
pub(crate) fn fill(stream: &Stream, target: DeviceSlice<'_>, value: u8) -> Result<(), Error> {
    if target.bytes == 0 {
        return Ok(());
    }
    let (api, _current) = stream.enter()?;
    let bytes = usize::try_from(target.bytes).unwrap_or(usize::MAX);
    // SAFETY: a slice is device memory of that length, by its maker's word.
    unsafe { api.cuMemsetD8Async(target.address, value, bytes, stream.handle()) }.doing(|| format!("filling {bytes} bytes"))
}

/// Copies `source` to the range of the same length, in the stream's order.
pub(crate) fn copy(stream: &Stream, target: DeviceSlice<'_>, source: DeviceSlice<'_>) -> Result<(), Error> {
    check_range("copying on the device", 0, source.bytes, target.bytes)?;
    if source.bytes == 0 {
        return Ok(());
    }
    let (api, _current) = stream.enter()?;
    let bytes = usize::try_from(source.bytes).unwrap_or(usize::MAX);
    // SAFETY: slices are device memory of their length, by their makers' word.
    unsafe { api.cuMemcpyDtoDAsync_v2(target.address, source.address, bytes, stream.handle()) }
        .doing(|| format!("copying {bytes} bytes on the device"))
}

fn check_range(what: &'static str, offset_bytes: u64, bytes: u64, buffer_bytes: u64) -> Result<(), Error> {
    let end_bytes = offset_bytes.saturating_add(bytes);
    if end_bytes <= buffer_bytes && offset_bytes.checked_add(bytes).is_some() {
        return Ok(());
    }
    Err(Error::OutOfRange { what, offset_bytes, end_bytes, buffer_bytes })
}

/// Pinned host memory: copies to and from it need no staging, and so run at the bus's full rate.
pub struct HostBuffer {
    context: Context,
    pointer: std::ptr::NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory that this object owns.
unsafe impl Send for HostBuffer {}
// SAFETY: as above; it is shared only for reading.
unsafe impl Sync for HostBuffer {}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.len > 0
            && let Ok(_current) = self.context.enter()
        {
            // SAFETY: the memory is ours; every copy that we start is waited for.
            let _ = unsafe { self.context.driver().api().cuMemFreeHost(self.pointer.as_ptr().cast()) };
        }
    }
}

impl HostBuffer {
    /// A buffer of that many bytes, all 0. Pinning is a system call over every page: reuse the buffer.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] (of the host), [`Error::Driver`].
    pub fn new(context: &Context, len: usize) -> Result<Self, Error> {
        if len == 0 {
            return Ok(Self { context: context.clone(), pointer: std::ptr::NonNull::dangling(), len });
        }
        let _current = context.enter()?;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        let doing = || format!("pinning {len} bytes of host memory");
        // SAFETY: `pointer` outlives the call; the context is current.
        unsafe { context.driver().api().cuMemAllocHost_v2(&mut pointer, len) }.doing(doing)?;
        let Some(pointer) = std::ptr::NonNull::new(pointer.cast::<u8>()) else {
            return Err(Error::OutOfMemory { doing: doing(), free_bytes: None, total_bytes: None });
        };
        // SAFETY: the allocation has `len` bytes; written here so that a reference to them is to initialized memory.
        unsafe { std::ptr::write_bytes(pointer.as_ptr(), 0, len) };
        Ok(Self { context: context.clone(), pointer, len })
    }
}

impl std::ops::Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialized bytes that live as long as `self` (for 0 bytes a dangling pointer will do).
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.len) }
    }
}

impl std::ops::DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked_without_wrapping() {
        assert!(check_range("x", 0, 0, 0).is_ok());
        assert!(check_range("x", 8, 8, 16).is_ok());
        assert!(check_range("x", 8, 9, 16).is_err());
        assert!(check_range("x", u64::MAX, 1, u64::MAX).is_err());
        assert!(check_range("x", u64::MAX, 0, u64::MAX).is_ok());
    }

    #[test]
    fn a_part_of_a_slice_past_2_to_the_31() {
        // SAFETY: the address is never used.
        let slice = unsafe { DeviceSlice::from_raw(1 << 40, 5 << 31) };
        let part = slice.part(3 << 31, 1 << 31).expect("lies within");
        assert_eq!((part.address(), part.len_bytes()), ((1 << 40) + (3 << 31), 1 << 31));
        assert!(slice.part(5 << 31, 1).is_err());
    }
}
