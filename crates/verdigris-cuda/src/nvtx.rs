//! Ranges for NVIDIA's profilers (Nsight Systems and others), by NVTX, which is loaded at run time.
//!
//! A profiler that starts a program names its own library in the variable `NVTX_INJECTION64_PATH`; that library asks for a table of functions and
//! writes its own into it, as NVTX 3 describes. Older toolkits have `libnvToolsExt.so.1` instead, which does the same behind two plain functions.
//! Where there is neither, nobody profiles, and [`Nvtx::load`] says so.
//!
//! The table is the process's, as it is in every program that is compiled with NVTX: a library that was injected cannot be told to go.

use std::ffi::{CString, OsStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use libloading::Library;

use crate::driver::why_not_loaded;

/// Names under which the older library is looked for.
pub const NVTX_LIBRARIES: &[&str] = if cfg!(windows) { &["nvToolsExt64_1.dll"] } else { &["libnvToolsExt.so.1"] };

/// Bytes of a range's name; what is longer is cut.
const MOST_BYTES: usize = 255;

/// Why there are no ranges.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvtxError {
    /// No profiler, and no library.
    #[error("no profiler listens: NVTX_INJECTION64_PATH names no library, and {tried:?} could not be loaded ({detail})")]
    NotFound {
        /// The names tried.
        tried: Vec<PathBuf>,
        /// What the system's loader said about the last.
        detail: String,
    },
    /// The profiler's library cannot be loaded.
    #[error("{} (NVTX_INJECTION64_PATH) could not be loaded: {detail}", path.display())]
    NotLoaded {
        /// The library.
        path: PathBuf,
        /// What the system's loader said.
        detail: String,
    },
    /// A library without the functions of NVTX.
    #[error("{} has no `{symbol}`, so it is no library of NVTX", path.display())]
    MissingSymbol {
        /// The library.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The profiler's library does not want to listen.
    #[error("{} declined to listen to this process", path.display())]
    Declined {
        /// The library.
        path: PathBuf,
    },
    /// Another library was injected into this process before.
    #[error("{} cannot listen: {} was injected into this process already", path.display(), first.display())]
    Taken {
        /// The library.
        path: PathBuf,
        /// The first.
        first: PathBuf,
    },
}

/// `nvtxRangePushA`: the name, to the depth of the range or a negative number.
type Push = unsafe extern "C" fn(*const c_char) -> c_int;
/// `nvtxRangePop`.
type Pop = unsafe extern "C" fn() -> c_int;

/// Where ranges go.
///
/// ```
/// use verdigris_cuda::nvtx::Nvtx;
///
/// match Nvtx::load(None) {
///     Ok(nvtx) => {
///         nvtx.push("step");
///         nvtx.pop();
///     }
///     // Without a profiler the reason is there to be told.
///     Err(reason) => assert!(reason.to_string().contains("no profiler listens")),
/// }
/// ```
pub struct Nvtx {
    push: Push,
    pop: Pop,
    path: PathBuf,
}

impl fmt::Debug for Nvtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvtx").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Nvtx {
    /// Finds who listens: the library that `injection` names (the value of `NVTX_INJECTION64_PATH`), else [`NVTX_LIBRARIES`]. The library stays
    /// loaded until the process ends.
    ///
    /// # Errors
    /// [`NvtxError`], with what was tried.
    pub fn load(injection: Option<&Path>) -> Result<Nvtx, NvtxError> {
        match injection {
            Some(path) => inject(path),
            None => find(NVTX_LIBRARIES.iter().map(OsStr::new)),
        }
    }

    /// Begins a range on this thread. A name is cut at 255 bytes, and at a zero byte.
    pub fn push(&self, name: &str) {
        let mut bytes = name.as_bytes();
        bytes = bytes.split(|byte| *byte == 0).next().unwrap_or(bytes);
        if bytes.len() > MOST_BYTES {
            bytes = &bytes[..name.floor_char_boundary(MOST_BYTES)];
        }
        // No zero byte is left, so it is a text of C.
        let name = CString::new(bytes).unwrap_or_default();
        // SAFETY: `push` is `nvtxRangePushA` of a library that stays loaded; it reads the text before it returns.
        unsafe { (self.push)(name.as_ptr()) };
    }

    /// Ends the range that this thread began last.
    pub fn pop(&self) {
        // SAFETY: `pop` is `nvtxRangePop` of a library that stays loaded; it takes nothing.
        unsafe { (self.pop)() };
    }

    /// The library that listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The older library.
fn find<'a>(names: impl Iterator<Item = &'a OsStr>) -> Result<Nvtx, NvtxError> {
    let (mut tried, mut detail) = (Vec::new(), String::new());
    for name in names {
        let path = PathBuf::from(name);
        // SAFETY: NVIDIA's library of that name does nothing when it is loaded but look for a profiler.
        match unsafe { Library::new(name) } {
            Ok(library) => {
                let missing = |symbol| NvtxError::MissingSymbol { path: path.clone(), symbol };
                // SAFETY: the header of NVTX declares `int nvtxRangePushA(const char*)`.
                let push = unsafe { library.get::<Push>(b"nvtxRangePushA\0") }.map(|symbol| *symbol);
                // SAFETY: the header of NVTX declares `int nvtxRangePop(void)`.
                let pop = unsafe { library.get::<Pop>(b"nvtxRangePop\0") }.map(|symbol| *symbol);
                let push = push.map_err(|_| missing("nvtxRangePushA"))?;
                let pop = pop.map_err(|_| missing("nvtxRangePop"))?;
                // The functions are kept, so the library may not go.
                std::mem::forget(library);
                return Ok(Nvtx { push, pop, path });
            }
            Err(error) => {
                detail = why_not_loaded(&error);
                tried.push(path);
            }
        }
    }
    Err(NvtxError::NotFound { tried, detail })
}

/// `InitializeInjectionNvtx2`: gets a function that gives tables by number, to 1 where it listens.
type Initialize = unsafe extern "C" fn(unsafe extern "C" fn(u32) -> *const c_void) -> c_int;

/// The library that was injected first, while or after it was.
static INJECTED: Mutex<Option<PathBuf>> = Mutex::new(None);

/// What NVTX 3's own header does in a program that is compiled with it.
fn inject(path: &Path) -> Result<Nvtx, NvtxError> {
    let mut injected = INJECTED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(first) = &*injected {
        return if first == path { slots(path) } else { Err(NvtxError::Taken { path: path.to_owned(), first: first.clone() }) };
    }
    // SAFETY: whoever started the process named this library for this purpose, as for every program with NVTX.
    let library = unsafe { Library::new(path) };
    let library = library.map_err(|error| NvtxError::NotLoaded { path: path.to_owned(), detail: why_not_loaded(&error) })?;
    let symbol = "InitializeInjectionNvtx2";
    // SAFETY: NVTX declares the type of the function of this name.
    let initialize = unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2\0") }.map(|symbol| *symbol);
    let initialize = initialize.map_err(|_| NvtxError::MissingSymbol { path: path.to_owned(), symbol })?;
    // Whatever it says, it may have kept pointers, or started threads.
    std::mem::forget(library);
    // SAFETY: the function is called once, with what NVTX says that it gets.
    if unsafe { initialize(export_table) } == 0 {
        // It may have written some slots before it declined; nobody calls them.
        return Err(NvtxError::Declined { path: path.to_owned() });
    }
    *injected = Some(path.to_owned());
    slots(path)
}

/// The functions that a library put into the table.
fn slots(path: &Path) -> Result<Nvtx, NvtxError> {
    let slot = |number: usize| SLOTS[MODULE_CORE - 1][number].load(Ordering::Acquire);
    let (push, pop) = (slot(RANGE_PUSH), slot(RANGE_POP));
    if push.is_null() || pop.is_null() {
        // One that listens to other things than ranges of threads.
        return Err(NvtxError::Declined { path: path.to_owned() });
    }
    // SAFETY: the slot is that of `nvtxRangePushA`, so what a library wrote there has its type.
    let push = unsafe { std::mem::transmute::<*mut c_void, Push>(push) };
    // SAFETY: the slot is that of `nvtxRangePop`, so what a library wrote there has its type.
    let pop = unsafe { std::mem::transmute::<*mut c_void, Pop>(pop) };
    Ok(Nvtx { push, pop, path: path.to_owned() })
}

/// `NVTX_CB_MODULE_CORE`: functions without a domain.
const MODULE_CORE: usize = 1;
/// `NVTX_CBID_CORE_RangePushA`.
const RANGE_PUSH: usize = 9;
/// `NVTX_CBID_CORE_RangePop`.
const RANGE_POP: usize = 11;

/// `NVTX_CBID_…_SIZE` of the modules core, CUDA driver, OpenCL, CUDA runtime, core with domains, and synchronization. A profiler may insist on
/// modules that are never called from here.
const SIZES: [usize; 6] = [16, 9, 15, 7, 16, 7];

/// The longest of them.
const MOST_SLOTS: usize = 16;

/// Where libraries write their functions.
static SLOTS: [[AtomicPtr<c_void>; MOST_SLOTS]; 6] = [const { [const { AtomicPtr::new(null_mut()) }; MOST_SLOTS] }; 6];

/// `NvtxFunctionTable`: pointers to slots, null for the number 0, which is no function, and behind the last one.
#[repr(transparent)]
struct Tables([[*const AtomicPtr<c_void>; MOST_SLOTS + 1]; 6]);

// SAFETY: the pointers are to a static, and are only handed out.
unsafe impl Sync for Tables {}

static TABLES: Tables = Tables({
    let mut tables = [[std::ptr::null(); MOST_SLOTS + 1]; 6];
    let mut module = 0;
    while module < SIZES.len() {
        let mut number = 1;
        while number < SIZES[module] {
            tables[module][number] = &raw const SLOTS[module][number];
            number += 1;
        }
        module += 1;
    }
    tables
});

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    struct_size: usize,
    module_functions: unsafe extern "C" fn(c_int, *mut *const *const AtomicPtr<c_void>, *mut c_uint) -> c_int,
}

static CALLBACKS: Callbacks = Callbacks { struct_size: size_of::<Callbacks>(), module_functions };

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: extern "C" fn(u32),
}

/// The version of NVTX whose tables these are.
static VERSION: VersionInfo = VersionInfo { struct_size: size_of::<VersionInfo>(), version: 3, reserved: 0, set_injection_version };

/// A library says which version it was made for; all of them have what is used here.
extern "C" fn set_injection_version(_: u32) {}

/// `NvtxGetExportTableFunc_t`: a table by its number (`NVTX_ETID_…`), or null.
unsafe extern "C" fn export_table(number: u32) -> *const c_void {
    match number {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSION).cast(),
        _ => std::ptr::null(),
    }
}

/// `GetModuleFunctionTable`: the table of a module and the number behind its last function, to 1 where there is such a module.
unsafe extern "C" fn module_functions(module: c_int, table: *mut *const *const AtomicPtr<c_void>, size: *mut c_uint) -> c_int {
    let Some(index) = usize::try_from(module).ok().and_then(|module| module.checked_sub(1)).filter(|index| *index < SIZES.len()) else {
        return 0;
    };
    if !table.is_null() {
        // SAFETY: the caller gives a place for a pointer, or null.
        unsafe { table.write(TABLES.0[index].as_ptr()) };
    }
    if !size.is_null() {
        // SAFETY: the caller gives a place for a number, or null. The number is at most 16.
        unsafe { size.write(SIZES[index] as c_uint) };
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_profiler_the_reason_is_told() {
        let error = find(["libverdigris-has-no-such-library.so"].map(OsStr::new).into_iter()).expect_err("nobody has it");
        assert!(error.to_string().contains("no profiler listens") && error.to_string().contains("no-such-library"), "{error}");
        let error = Nvtx::load(Some(Path::new("nowhere/libprofiler.so"))).expect_err("it is not there").to_string();
        assert!(error.contains("nowhere/libprofiler.so"), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_of_something_else_is_refused() {
        let path = Path::new("libc.so.6");
        let error = Nvtx::load(Some(path)).expect_err("no profiler");
        assert!(matches!(&error, NvtxError::MissingSymbol { symbol: "InitializeInjectionNvtx2", .. }), "{error}");
        let error = find(["libc.so.6"].map(OsStr::new).into_iter()).expect_err("no NVTX");
        assert!(matches!(&error, NvtxError::MissingSymbol { symbol: "nvtxRangePushA", .. }), "{error}");
    }

    #[test]
    fn tables_are_as_long_as_they_say() {
        for module in [-1, 0, 7, c_int::MAX] {
            // SAFETY: null is allowed.
            assert_eq!(unsafe { module_functions(module, null_mut(), null_mut()) }, 0);
        }
        for (module, expected) in (1..).zip(SIZES) {
            let (mut table, mut size) = (std::ptr::null(), 0);
            // SAFETY: both are places for what is written.
            assert_eq!(unsafe { module_functions(module, &mut table, &mut size) }, 1);
            assert_eq!(size as usize, expected);
            let slot = |number: usize| {
                // SAFETY: a table has one more entry than the longest module has slots.
                unsafe { *table.add(number) }
            };
            assert!(slot(0).is_null() && slot(expected).is_null());
            assert!((1..expected).all(|number| !slot(number).is_null()));
        }
    }
}
