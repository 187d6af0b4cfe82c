//! Devices, what they are, and the context that work runs in.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys;
use sys::CUdevice_attribute as Attribute;
use verdigris_kir::ptx::Isa;

use crate::driver::Driver;
use crate::error::{Doing, Error};

/// The highest clocks of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Clocks {
    /// Of the multiprocessors.
    pub sm_khz: u32,
    /// Of the memory; 0 where the driver no longer tells.
    pub memory_khz: u32,
}

/// What a device is, as data: everything that a decision about kernels may depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProperties {
    /// The marketing name, such as `NVIDIA H200`.
    pub name: String,
    /// The chip's identity, as `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`; `nvidia-smi -L` prints the same.
    pub uuid: String,
    /// Compute capability, (9, 0) for Hopper.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Most shared memory a CTA may ask for, after opting in.
    pub shared_memory_per_cta_bytes: u32,
    /// Shared memory of a multiprocessor.
    pub shared_memory_per_sm_bytes: u32,
    /// Shared memory that the system keeps of each CTA's.
    pub reserved_shared_memory_per_cta_bytes: u32,
    /// 32-bit registers of a multiprocessor.
    pub registers_per_sm: u32,
    /// Most threads resident on a multiprocessor.
    pub threads_per_sm: u32,
    /// L2 cache.
    pub l2_bytes: u64,
    /// Device memory in all.
    pub memory_bytes: u64,
    /// Width of the memory bus.
    pub memory_bus_bits: u32,
    /// Most CTAs along x, y and z of a grid.
    pub max_grid: [u32; 3],
    /// Whether a grid may be launched that synchronizes as a whole.
    pub cooperative_launch: bool,
    /// Whether stream-ordered memory pools are there.
    pub memory_pools: bool,
    /// What the driver supports, as 1000 × major + 10 × minor.
    pub driver_version: u32,
    /// The newest PTX version that the driver reads and that we print.
    pub ptx_isa: Isa,
}

impl DeviceProperties {
    /// All that a kernel's code may depend on, as text: the device's part of a [`crate::CacheKey`].
    pub fn arch_key(&self) -> String {
        let (major, minor) = self.compute_capability;
        format!(
            "cc {major}.{minor}, {} SMs, {} bytes of shared memory, {} bytes of L2",
            self.sm_count, self.shared_memory_per_cta_bytes, self.l2_bytes
        )
    }

    /// Fails unless the chip is at least of this compute capability.
    ///
    /// # Errors
    /// [`Error::UnsupportedChip`], naming `needed_for`.
    pub fn require_capability(&self, required: (u32, u32), needed_for: &str) -> Result<(), Error> {
        if self.compute_capability >= required {
            return Ok(());
        }
        Err(Error::UnsupportedChip {
            device: self.name.clone(),
            found: self.compute_capability,
            required,
            needed_for: needed_for.to_owned(),
        })
    }
}

/// One GPU. Cheap to clone; holding it keeps nothing on the GPU alive.
#[derive(Debug, Clone)]
pub struct Device {
    driver: Driver,
    raw: sys::CUdevice,
    ordinal: u32,
    properties: Arc<DeviceProperties>,
}

impl Driver {
    /// The number of devices that this process sees.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where there is none, [`Error::Driver`] otherwise.
    pub fn device_count(&self) -> Result<u32, Error> {
        let mut count: c_int = 0;
        // SAFETY: `count` outlives the call.
        unsafe { self.api().cuDeviceGetCount(&mut count) }.doing(|| "counting the devices")?;
        match u32::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(Error::NoDevice),
        }
    }

    /// All devices, in the driver's order.
    ///
    /// # Errors
    /// As [`Driver::device_count`] and [`Driver::device`].
    pub fn devices(&self) -> Result<Vec<Device>, Error> {
        (0..self.device_count()?).map(|ordinal| self.device(ordinal)).collect()
    }

    /// The device of this number, counted from 0 in the driver's order.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`], [`Error::NoDevice`], [`Error::Driver`].
    pub fn device(&self, ordinal: u32) -> Result<Device, Error> {
        let count = self.device_count()?;
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or(Error::NoSuchDevice { ordinal, count })?;
        let mut raw: sys::CUdevice = 0;
        // SAFETY: `raw` outlives the call.
        unsafe { self.api().cuDeviceGet(&mut raw, number) }.doing(|| format!("opening device {ordinal}"))?;
        self.describe(raw, ordinal)
    }

    fn attribute(&self, raw: sys::CUdevice, attribute: Attribute, ordinal: u32) -> Result<u32, Error> {
        let mut value: c_int = 0;
        // SAFETY: `value` outlives the call; `raw` is a device of this driver.
        unsafe { self.api().cuDeviceGetAttribute(&mut value, attribute, raw) }
            .doing(|| format!("asking for the properties of device {ordinal}"))?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    fn describe(&self, raw: sys::CUdevice, ordinal: u32) -> Result<Device, Error> {
        let api = self.api();
        let doing = || format!("asking for the properties of device {ordinal}");
        let attribute = |attribute: Attribute| self.attribute(raw, attribute, ordinal);
        let mut name = [0_u8; 256];
        // SAFETY: the buffer holds as many bytes as the call is told.
        unsafe { api.cuDeviceGetName(name.as_mut_ptr().cast(), 256, raw) }.doing(doing)?;
        let length = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: `uuid` outlives the call.
        unsafe { api.cuDeviceGetUuid_v2(&mut uuid, raw) }.doing(doing)?;
        let mut memory_bytes = 0_usize;
        // SAFETY: `memory_bytes` outlives the call.
        unsafe { api.cuDeviceTotalMem_v2(&mut memory_bytes, raw) }.doing(doing)?;
        use Attribute as A;
        let properties = DeviceProperties {
            name: String::from_utf8_lossy(&name[..length]).into_owned(),
            uuid: format_uuid(uuid.bytes.map(|byte| byte.to_ne_bytes()[0])),
            compute_capability: (
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            sm_count: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory_per_cta_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_memory_per_sm_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
            reserved_shared_memory_per_cta_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)?,
            registers_per_sm: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
            threads_per_sm: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
            l2_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
            memory_bytes: memory_bytes as u64,
            memory_bus_bits: attribute(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
            max_grid: [
                attribute(A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
            ],
            cooperative_launch: attribute(A::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)? != 0,
            memory_pools: attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0,
            driver_version: self.version(),
            ptx_isa: self.ptx_isa(),
        };
        Ok(Device { driver: self.clone(), raw, ordinal, properties: Arc::new(properties) })
    }
}

/// The form in which `nvidia-smi` prints a chip's identity.
fn format_uuid(bytes: [u8; 16]) -> String {
    let mut text = "GPU".to_owned();
    for (i, byte) in bytes.iter().enumerate() {
        if matches!(i, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

impl Device {
    /// What the device is.
    pub fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    /// Its highest clocks. Asked for apart from the other properties, since drivers take half a millisecond for each.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn clocks(&self) -> Result<Clocks, Error> {
        let attribute = |attribute: Attribute| self.driver.attribute(self.raw, attribute, self.ordinal);
        Ok(Clocks {
            sm_khz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
            memory_khz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?,
        })
    }

    /// Its number, counted from 0 in the driver's order.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The driver it was opened through.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// The device's primary context, the one that the CUDA runtime and every framework built on it share. The first holder
    /// in a process waits for its creation (200–350 ms).
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::OutOfMemory`].
    pub fn primary_context(&self) -> Result<Context, Error> {
        let mut raw: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: `raw` outlives the call; the retain is given back when the last clone of the context is dropped.
        unsafe { self.driver.api().cuDevicePrimaryCtxRetain(&mut raw, self.raw) }
            .doing(|| format!("taking hold of the primary context of device {}", self.ordinal))?;
        Ok(Context { inner: Arc::new(ContextInner { device: self.clone(), raw, primary: true }) })
    }
}

/// The place that modules, streams and memory belong to. Cheap to clone; everything made in a context keeps it alive.
///
/// Calls make the context current for their own duration only and leave the thread's current context as they found it. A
/// thread that makes many calls saves a push and a pop on each by [`Context::make_current`].
#[derive(Clone)]
pub struct Context {
    inner: Arc<ContextInner>,
}

struct ContextInner {
    device: Device,
    raw: sys::CUcontext,
    /// Whether a retain of the primary context has to be given back.
    primary: bool,
}

// SAFETY: a context handle may be used from any thread; which thread it is current on is handled per call.
unsafe impl Send for ContextInner {}
// SAFETY: as above; the driver locks internally.
unsafe impl Sync for ContextInner {}

impl Drop for ContextInner {
    fn drop(&mut self) {
        if self.primary {
            // SAFETY: gives back the one retain that `primary_context` took. A failure can only mean that the driver is already
            // shutting down.
            let _ = unsafe { self.device.driver.api().cuDevicePrimaryCtxRelease_v2(self.device.raw) };
        }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("device", &self.inner.device.ordinal).field("raw", &self.inner.raw).finish()
    }
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.inner.raw == other.inner.raw
    }
}

impl Eq for Context {}

impl Context {
    /// Adopts a context that the caller owns (a `CUcontext`).
    ///
    /// # Safety
    /// `raw` must be a live context of this process, and outlive everything made from the result.
    ///
    /// # Errors
    /// [`Error::Driver`] where the context cannot be made current or its device cannot be asked for.
    pub unsafe fn adopt(driver: &Driver, raw: *mut c_void) -> Result<Self, Error> {
        let api = driver.api();
        let raw: sys::CUcontext = raw.cast();
        // SAFETY: the caller vouches for the context; it is popped below, whatever happens between.
        unsafe { api.cuCtxPushCurrent_v2(raw) }.doing(|| "adopting the caller's context")?;
        let mut device: sys::CUdevice = 0;
        // SAFETY: `device` outlives the call.
        let asked = unsafe { api.cuCtxGetDevice(&mut device) };
        let mut popped: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: pops what was pushed above.
        unsafe { api.cuCtxPopCurrent_v2(&mut popped) }.doing(|| "adopting the caller's context")?;
        asked.doing(|| "asking for the adopted context's device")?;
        // In the driver interface a device handle is its number.
        let device = driver.describe(device, u32::try_from(device).unwrap_or(0))?;
        Ok(Self { inner: Arc::new(ContextInner { device, raw, primary: false }) })
    }

    /// Adopts the context that is current on this thread; `None` where none is.
    ///
    /// # Safety
    /// The context must outlive everything made from the result.
    ///
    /// # Errors
    /// As [`Context::adopt`].
    pub unsafe fn adopt_current(driver: &Driver) -> Result<Option<Self>, Error> {
        let mut raw: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: `raw` outlives the call.
        unsafe { driver.api().cuCtxGetCurrent(&mut raw) }.doing(|| "asking for the current context")?;
        if raw.is_null() {
            return Ok(None);
        }
        // SAFETY: a current context is live; the caller vouches for the rest.
        unsafe { Self::adopt(driver, raw.cast()) }.map(Some)
    }

    /// The device that the context is on.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// What that device is.
    pub fn properties(&self) -> &DeviceProperties {
        &self.inner.device.properties
    }

    /// The driver it was made through.
    pub fn driver(&self) -> &Driver {
        &self.inner.device.driver
    }

    /// The raw `CUcontext`, for other libraries; owned by this object.
    pub fn raw(&self) -> *mut c_void {
        self.inner.raw.cast()
    }

    /// Makes the context current on the calling thread, and leaves it so.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is alive.
        unsafe { self.driver().api().cuCtxSetCurrent(self.inner.raw) }.doing(|| "making the context current")
    }

    /// Makes the context current until the guard is dropped, which brings back the one before.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn enter(&self) -> Result<ContextGuard<'_>, Error> {
        let api = self.driver().api();
        let mut current: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: `current` outlives the call.
        unsafe { api.cuCtxGetCurrent(&mut current) }.doing(|| "asking for the current context")?;
        let pushed = current != self.inner.raw;
        if pushed {
            // SAFETY: the context is alive; the guard pops it.
            unsafe { api.cuCtxPushCurrent_v2(self.inner.raw) }.doing(|| "entering the context")?;
        }
        Ok(ContextGuard { context: self, pushed, not_send: std::marker::PhantomData })
    }

    /// Waits until everything that was submitted to the context is done.
    ///
    /// # Errors
    /// [`Error::Driver`], also for the fault of any earlier kernel.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _current = self.enter()?;
        // SAFETY: the context is current.
        unsafe { self.driver().api().cuCtxSynchronize() }.doing(|| "waiting for the context")
    }

    /// Free and total device memory, in bytes, of all processes together.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn memory_info(&self) -> Result<(u64, u64), Error> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: both outlive the call; the context is current.
        unsafe { self.driver().api().cuMemGetInfo_v2(&mut free, &mut total) }.doing(|| "asking for free memory")?;
        Ok((free as u64, total as u64))
    }

    /// The number of the device that an address belongs to; `None` for what is no memory of any device.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn device_of(&self, address: u64) -> Result<Option<u32>, Error> {
        let _current = self.enter()?;
        let mut ordinal: i32 = -1;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: this attribute is a 32-bit number, and `ordinal` outlives the call.
        match unsafe { self.driver().api().cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, address) } {
            Ok(()) => Ok(u32::try_from(ordinal).ok()),
            Err(failure) if failure.code() == Some(crate::error::status::INVALID_VALUE) => Ok(None),
            Err(failure) => Err(failure.into_error("asking whose memory an address is".to_owned())),
        }
    }

    pub(crate) fn raw_device(&self) -> sys::CUdevice {
        self.inner.device.raw
    }
}

/// Brings back the thread's earlier context when dropped; made by [`Context::enter`].
#[must_use = "the context is left as soon as the guard is dropped"]
pub struct ContextGuard<'a> {
    context: &'a Context,
    pushed: bool,
    /// The stack of contexts is the thread's own.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: sys::CUcontext = std::ptr::null_mut();
            // SAFETY: pops what `enter` pushed on this thread; guards cannot leave it.
            let _ = unsafe { self.context.driver().api().cuCtxPopCurrent_v2(&mut popped) };
        }
        let _ = self.not_send;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_printed_as_nvidia_smi_prints_them() {
        let bytes: [u8; 16] = std::array::from_fn(|i| 0x10 + i as u8);
        assert_eq!(format_uuid(bytes), "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f");
    }
}
