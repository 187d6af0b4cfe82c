//! The driver library: found, loaded, and its functions as one table.
//!
//! The types and constants are those of the `cudarc` bindings, and every signature below is checked against them by the
//! compiler. The functions are resolved here, not there, for two reasons: `cudarc` panics at a missing function where we owe
//! an error value, and it returns the status as a Rust `enum`, in which a code newer than the bindings would be undefined
//! behaviour. A function that the library lacks is an error of the call that needs it, so that an older or wrapped driver
//! still serves everything else.
#![allow(non_snake_case, reason = "the table speaks the driver's own names")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use cudarc::driver::sys;
use libloading::Library;
use verdigris_kir::ptx::Isa;

use crate::error::{Doing, Error, Failure, MINIMUM_DRIVER_VERSION};
use crate::release::release;

/// Names under which the driver library is looked for, in order. The versioned name comes first: the bare one is what a
/// toolkit's link stub is called.
pub const DRIVER_LIBRARIES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// The loaded and initialized driver; cheap to clone. Nothing else in this crate can be made without it.
#[derive(Clone)]
pub struct Driver {
    api: Arc<Api>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("version", &self.api.version).finish()
    }
}

impl Driver {
    /// Loads and initializes the driver of this machine. The first call of a process takes some 100 ms on a machine with
    /// GPUs (the driver starts), later ones microseconds.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::DriverTooOld`], [`Error::MissingSymbol`]; [`Error::NoDevice`] where the driver itself says
    /// so while starting.
    pub fn load() -> Result<Self, Error> {
        Self::load_from(DRIVER_LIBRARIES)
    }

    /// As [`Driver::load`], looking for the library under other names or paths.
    ///
    /// # Errors
    /// As [`Driver::load`].
    pub fn load_from(candidates: &[&str]) -> Result<Self, Error> {
        let mut detail = "no name was given".to_owned();
        for name in candidates {
            // SAFETY: loading runs the library's initializers; these names are the NVIDIA driver's, whose initializers have no
            // precondition.
            match unsafe { Library::new(*name) } {
                Ok(library) => return Self::start(library),
                Err(error) => detail = why_not_loaded(&error),
            }
        }
        Err(Error::NoDriver { tried: candidates.iter().map(|&name| name.to_owned()).collect(), detail })
    }

    fn start(library: Library) -> Result<Self, Error> {
        let mut api = Api::resolve(&library);
        // The driver registers handlers that run at exit; unloading it before would leave them pointing nowhere.
        std::mem::forget(library);
        let mut version: c_int = 0;
        // SAFETY: `version` outlives the call, which may be made before `cuInit`.
        unsafe { api.cuDriverGetVersion(&mut version) }.doing(|| "asking for the driver's version")?;
        api.version = u32::try_from(version).unwrap_or(0);
        if api.version < MINIMUM_DRIVER_VERSION {
            return Err(Error::DriverTooOld { found: api.version, required: MINIMUM_DRIVER_VERSION });
        }
        // SAFETY: flags must be 0.
        unsafe { api.cuInit(0) }.doing(|| "starting the driver")?;
        api.release = release().unwrap_or_default();
        Ok(Self { api: Arc::new(api) })
    }

    /// The CUDA version that the driver supports, as 1000 × major + 10 × minor (13000 for 13.0).
    pub fn version(&self) -> u32 {
        self.api.version
    }

    /// The driver's release, as `580.159.04`: CUDA's version is the same for many of them, their compilers are not. Empty where nothing tells it.
    pub fn release(&self) -> &str {
        &self.api.release
    }

    /// The newest PTX version that the driver's compiler reads and that we print.
    pub fn ptx_isa(&self) -> Isa {
        // No driver without one gets past `start`.
        Isa::for_driver(self.api.version).unwrap_or(Isa::MINIMUM)
    }

    /// The functions that we call and this driver lacks; each is an [`Error::MissingSymbol`] of the calls that need it.
    pub fn missing_functions(&self) -> Vec<&'static str> {
        self.api.missing()
    }

    /// Fails where the driver lacks a function that something cannot do without.
    ///
    /// # Errors
    /// [`Error::MissingSymbol`].
    pub(crate) fn require(&self, symbol: &'static str) -> Result<(), Error> {
        if self.api.missing().contains(&symbol) {
            return Err(Error::MissingSymbol { symbol, driver_version: self.api.version });
        }
        Ok(())
    }

    /// A driver that is not the machine's.
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn of(api: Api) -> Self {
        Self { api: Arc::new(api) }
    }

    pub(crate) fn api(&self) -> &Api {
        &self.api
    }
}

/// What the system's loader said, which the error itself keeps to its source.
pub(crate) fn why_not_loaded(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), |source| source.to_string())
}

macro_rules! driver_table {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        /// Every driver function that we call; `None` where the library lacks it.
        #[cfg_attr(any(test, feature = "fake"), derive(Default))]
        pub(crate) struct Api {
            pub(crate) version: u32,
            /// The release, as far as it is known.
            pub(crate) release: String,
            pub(crate) get_error_name: Option<TextOf>,
            pub(crate) get_error_string: Option<TextOf>,
            $(pub(crate) $name: Option<unsafe extern "C" fn($($type),*) -> u32>,)*
        }

        impl Api {
            fn resolve(library: &Library) -> Self {
                /// The function of that name, if there is one.
                ///
                /// # Safety
                /// `F` must be the function's type.
                unsafe fn find<F: Copy>(library: &Library, name: &str) -> Option<F> {
                    // SAFETY: the caller names the right type.
                    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|symbol| *symbol)
                }
                Self {
                    version: 0,
                    release: String::new(),
                    // SAFETY: the type is that of the header's declaration.
                    get_error_name: unsafe { find(library, "cuGetErrorName") },
                    // SAFETY: as above.
                    get_error_string: unsafe { find(library, "cuGetErrorString") },
                    $(
                        // SAFETY: the compiler compares this signature with the generated bindings' below, but for the
                        // status, an `enum` of 32 bits there.
                        $name: unsafe { find(library, stringify!($name)) },
                    )*
                }
            }

            /// The functions that the library lacks.
            fn missing(&self) -> Vec<&'static str> {
                let all = [$((stringify!($name), self.$name.is_none())),*];
                all.into_iter().filter_map(|(name, missing)| missing.then_some(name)).collect()
            }

            $(
                /// The driver function of that name.
                ///
                /// # Safety
                /// As the driver's manual says of it.
                #[allow(clippy::too_many_arguments, reason = "the driver's signature")]
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> Result<(), Failure> {
                    let Some(function) = self.$name else {
                        return Err(Failure::Missing { call: stringify!($name), driver_version: self.version });
                    };
                    // SAFETY: the caller keeps the function's contract.
                    match unsafe { function($($arg),*) } {
                        0 => Ok(()),
                        code => Err(self.failure(stringify!($name), code)),
                    }
                }
            )*
        }

    };
}

/// Compares the signatures of the table with the generated bindings' at compile time.
macro_rules! check_against_bindings {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        $(const _: unsafe fn($($type),*) -> sys::CUresult = sys::$name;)*
    };
}

/// The table: functions that the bindings declare, then those that they declare in other versions only.
macro_rules! functions {
    (declared { $($declared:tt)* } undeclared { $($undeclared:tt)* }) => {
        driver_table! { $($declared)* $($undeclared)* }
        check_against_bindings! { $($declared)* }
    };
}

/// `cuGetErrorName` and `cuGetErrorString`, with the code as the number that it is.
pub(crate) type TextOf = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

impl Api {
    #[cold]
    fn failure(&self, call: &'static str, code: u32) -> Failure {
        let text = |function: Option<TextOf>| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: `text` outlives the call; any code may be asked about.
            let known = function.is_some_and(|function| unsafe { function(code, &mut text) } == 0);
            if known && !text.is_null() {
                // SAFETY: on success the driver hands out a static NUL-terminated string.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            } else {
                "unknown status".to_owned()
            }
        };
        Failure::Status { call, code, name: text(self.get_error_name), text: text(self.get_error_string) }
    }
}

functions! {
    declared {
        fn cuInit(flags: c_uint);
        fn cuDriverGetVersion(version: *mut c_int);

        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
        fn cuDeviceGetName(name: *mut c_char, length: c_int, device: sys::CUdevice);
        fn cuDeviceGetUuid_v2(uuid: *mut sys::CUuuid, device: sys::CUdevice);
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);

        fn cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
        fn cuCtxGetCurrent(context: *mut sys::CUcontext);
        fn cuCtxSetCurrent(context: sys::CUcontext);
        fn cuCtxPushCurrent_v2(context: sys::CUcontext);
        fn cuCtxPopCurrent_v2(context: *mut sys::CUcontext);
        fn cuCtxGetDevice(device: *mut sys::CUdevice);
        fn cuCtxSynchronize();

        fn cuStreamCreateWithPriority(stream: *mut sys::CUstream, flags: c_uint, priority: c_int);
        fn cuStreamDestroy_v2(stream: sys::CUstream);
        fn cuStreamSynchronize(stream: sys::CUstream);
        fn cuStreamQuery(stream: sys::CUstream);
        fn cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
        fn cuStreamGetCtx(stream: sys::CUstream, context: *mut sys::CUcontext);
        fn cuStreamIsCapturing(stream: sys::CUstream, status: *mut sys::CUstreamCaptureStatus);
        fn cuStreamBeginCapture_v2(stream: sys::CUstream, mode: sys::CUstreamCaptureMode);
        fn cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph);
        fn cuThreadExchangeStreamCaptureMode(mode: *mut sys::CUstreamCaptureMode);

        fn cuGraphGetNodes(graph: sys::CUgraph, nodes: *mut sys::CUgraphNode, count: *mut usize);
        fn cuGraphInstantiateWithFlags(executable: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: c_ulonglong);
        fn cuGraphUpload(executable: sys::CUgraphExec, stream: sys::CUstream);
        fn cuGraphLaunch(executable: sys::CUgraphExec, stream: sys::CUstream);
        fn cuGraphExecDestroy(executable: sys::CUgraphExec);
        fn cuGraphDestroy(graph: sys::CUgraph);

        fn cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
        fn cuEventDestroy_v2(event: sys::CUevent);
        fn cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
        fn cuEventSynchronize(event: sys::CUevent);
        fn cuEventQuery(event: sys::CUevent);

        fn cuMemPoolCreate(pool: *mut sys::CUmemoryPool, properties: *const sys::CUmemPoolProps);
        fn cuMemPoolDestroy(pool: sys::CUmemoryPool);
        fn cuMemPoolSetAttribute(pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute, value: *mut c_void);
        fn cuMemPoolGetAttribute(pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute, value: *mut c_void);
        fn cuMemPoolTrimTo(pool: sys::CUmemoryPool, keep_bytes: usize);
        fn cuMemAllocFromPoolAsync(address: *mut sys::CUdeviceptr, bytes: usize, pool: sys::CUmemoryPool, stream: sys::CUstream);
        fn cuMemFreeAsync(address: sys::CUdeviceptr, stream: sys::CUstream);
        fn cuPointerGetAttribute(value: *mut c_void, attribute: sys::CUpointer_attribute, address: sys::CUdeviceptr);
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        fn cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize);
        fn cuMemFreeHost(pointer: *mut c_void);
        fn cuMemcpyHtoDAsync_v2(target: sys::CUdeviceptr, source: *const c_void, bytes: usize, stream: sys::CUstream);
        fn cuMemcpyDtoHAsync_v2(target: *mut c_void, source: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
        fn cuMemcpyDtoDAsync_v2(target: sys::CUdeviceptr, source: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
        fn cuMemsetD8Async(target: sys::CUdeviceptr, value: u8, count: usize, stream: sys::CUstream);

        fn cuModuleLoadDataEx(
            module: *mut sys::CUmodule, image: *const c_void, option_count: c_uint, options: *mut sys::CUjit_option,
            values: *mut *mut c_void,
        );
        fn cuModuleUnload(module: sys::CUmodule);
        fn cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
        fn cuLinkCreate_v2(
            option_count: c_uint, options: *mut sys::CUjit_option, values: *mut *mut c_void, state: *mut sys::CUlinkState,
        );
        fn cuLinkAddData_v2(
            state: sys::CUlinkState, kind: sys::CUjitInputType, data: *mut c_void, bytes: usize, name: *const c_char,
            option_count: c_uint, options: *mut sys::CUjit_option, values: *mut *mut c_void,
        );
        fn cuLinkComplete(state: sys::CUlinkState, cubin: *mut *mut c_void, bytes: *mut usize);
        fn cuLinkDestroy(state: sys::CUlinkState);
        fn cuFuncGetAttribute(value: *mut c_int, attribute: sys::CUfunction_attribute, function: sys::CUfunction);
        fn cuFuncSetAttribute(function: sys::CUfunction, attribute: sys::CUfunction_attribute, value: c_int);

        fn cuTensorMapEncodeTiled(
            map: *mut sys::CUtensorMap, element: sys::CUtensorMapDataType, rank: u32, address: *mut c_void, dims: *const u64,
            strides: *const u64, box_dims: *const u32, element_strides: *const u32, interleave: sys::CUtensorMapInterleave,
            swizzle: sys::CUtensorMapSwizzle, promotion: sys::CUtensorMapL2promotion, fill: sys::CUtensorMapFloatOOBfill,
        );
        fn cuTensorMapEncodeIm2col(
            map: *mut sys::CUtensorMap, element: sys::CUtensorMapDataType, rank: u32, address: *mut c_void, dims: *const u64,
            strides: *const u64, lower: *const c_int, upper: *const c_int, channels_per_pixel: u32, pixels_per_column: u32,
            element_strides: *const u32, interleave: sys::CUtensorMapInterleave, swizzle: sys::CUtensorMapSwizzle,
            promotion: sys::CUtensorMapL2promotion, fill: sys::CUtensorMapFloatOOBfill,
        );

        fn cuLaunchKernelEx(
            config: *const sys::CUlaunchConfig, function: sys::CUfunction, parameters: *mut *mut c_void, extra: *mut *mut c_void,
        );
        fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks: *mut c_int, function: sys::CUfunction, threads: c_int, dynamic_smem_bytes: usize,
        );
        fn cuOccupancyMaxActiveClusters(clusters: *mut c_int, function: sys::CUfunction, config: *const sys::CUlaunchConfig);
        fn cuFuncGetParamInfo(function: sys::CUfunction, index: usize, offset_bytes: *mut usize, size_bytes: *mut usize);
    }
    undeclared {
        // From 12.8 on the header maps this name to `cuEventElapsedTime_v2`, which older drivers lack; every driver keeps this one.
        fn cuEventElapsedTime(milliseconds: *mut f32, start: sys::CUevent, end: sys::CUevent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_library_is_a_typed_error() {
        let error = Driver::load_from(&["libverdigris-has-no-such-driver.so.1"]).expect_err("there is no such library");
        let Error::NoDriver { tried, detail } = &error else { panic!("{error:?}") };
        assert_eq!(tried, &["libverdigris-has-no-such-driver.so.1"]);
        assert!(detail.contains("libverdigris-has-no-such-driver.so.1") || cfg!(windows), "{detail}");
        assert!(error.to_string().contains("install the NVIDIA display driver"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_without_the_functions_is_a_typed_error() {
        let error = Driver::load_from(&["libc.so.6"]).expect_err("libc is no driver");
        assert!(matches!(error, Error::MissingSymbol { symbol: "cuDriverGetVersion", driver_version: 0 }), "{error:?}");
    }

    #[test]
    fn every_driver_that_we_run_on_reads_some_ptx() {
        assert!(Isa::for_driver(MINIMUM_DRIVER_VERSION).is_some());
    }
}
