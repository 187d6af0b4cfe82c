//! DLPack's structures (versions 0 and 1), as its header declares them, and the table of functions by which PyTorch hands tensors over.

use std::ffi::{c_int, c_void};

use verdigris_tensor::DType;

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DLDevice {
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
}

/// `DLDeviceType` of memory that the host reads.
pub(crate) const CPU: i32 = 1;
/// `DLDeviceType` of a CUDA device.
pub(crate) const CUDA: i32 = 2;
/// Pinned host memory, which the host reads too.
pub(crate) const CUDA_HOST: i32 = 3;

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DLDataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

impl DLDataType {
    /// The element type; `None` for one that no tensor here has.
    #[inline]
    pub(crate) fn dtype(self) -> Option<DType> {
        Some(match (self.code, self.bits, self.lanes) {
            (2, 32, 1) => DType::F32,
            (4, 16, 1) => DType::Bf16,
            (2, 16, 1) => DType::F16,
            (2, 64, 1) => DType::F64,
            (0, 8, 1) => DType::I8,
            (0, 32, 1) => DType::I32,
            (0, 64, 1) => DType::I64,
            (1, 8, 1) => DType::U8,
            (6, 8, 1) => DType::Bool,
            (10, 8, 1) => DType::E4m3,
            (12, 8, 1) => DType::E5m2,
            _ => return None,
        })
    }
}

/// `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DLTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DLDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DLDataType,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

impl DLTensor {
    pub(crate) const NONE: DLTensor = DLTensor {
        data: std::ptr::null_mut(),
        device: DLDevice { device_type: 0, device_id: 0 },
        ndim: 0,
        dtype: DLDataType { code: 0, bits: 0, lanes: 0 },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };

    #[inline]
    pub(crate) fn address(&self) -> u64 {
        self.data as u64 + self.byte_offset
    }

    /// The extents.
    ///
    /// # Safety
    /// What `shape` points to lives as long as the result is used.
    #[inline]
    pub(crate) unsafe fn dims(&self) -> &[i64] {
        if self.ndim <= 0 {
            return &[];
        }
        // SAFETY: the producer gives `ndim` extents, which the caller keeps alive.
        unsafe { std::slice::from_raw_parts(self.shape, self.ndim as usize) }
    }

    /// The strides in elements; `None` where the tensor is packed row-major.
    ///
    /// # Safety
    /// As [`DLTensor::dims`].
    #[inline]
    pub(crate) unsafe fn strides(&self) -> Option<&[i64]> {
        if self.ndim <= 0 || self.strides.is_null() {
            return None;
        }
        // SAFETY: as in `dims`.
        Some(unsafe { std::slice::from_raw_parts(self.strides, self.ndim as usize) })
    }
}

/// `DLManagedTensor`, in a capsule named `dltensor`.
#[repr(C)]
pub(crate) struct DLManagedTensor {
    pub(crate) dl_tensor: DLTensor,
    pub(crate) manager_ctx: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DLPackVersion {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// `DLManagedTensorVersioned`, in a capsule named `dltensor_versioned`.
#[repr(C)]
pub(crate) struct DLManagedTensorVersioned {
    pub(crate) version: DLPackVersion,
    pub(crate) manager_ctx: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    pub(crate) flags: u64,
    pub(crate) dl_tensor: DLTensor,
}

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
pub(crate) const READ_ONLY: u64 = 1;

/// `DLPackExchangeAPI`: what a type's `__dlpack_c_exchange_api__` points to. Only what is called here has its signature.
#[repr(C)]
pub(crate) struct ExchangeApi {
    pub(crate) version: DLPackVersion,
    pub(crate) previous: *mut c_void,
    pub(crate) allocate: *mut c_void,
    pub(crate) managed_tensor_from: *mut c_void,
    pub(crate) managed_tensor_to: *mut c_void,
    /// Fills in a view of the object, which the object owns.
    pub(crate) tensor_from: Option<unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> c_int>,
    /// The stream on which the framework's work of this thread goes.
    pub(crate) current_work_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

// SAFETY: the table is constant data of the framework's library; its functions may be called from any thread that holds the interpreter's lock.
unsafe impl Sync for ExchangeApi {}
