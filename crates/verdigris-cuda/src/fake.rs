//! A driver for tests, which has no device: its memory is the host's, its compiler returns an empty image, and its launches are
//! written down. It checks what a real driver would suffer in silence: contexts pushed and not popped, memory freed twice,
//! functions called without a context. Its clock moves by what is launched: a microsecond a launch, and a hundredth for each CTA.
//!
//! Under the feature `fake` it serves the tests of other crates: [`context`] is all that they need to work as on a GPU, but for results.
#![cfg_attr(not(test), allow(dead_code, reason = "parts of it serve this crate's own tests"))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;

use crate::device::Context;
use crate::driver::{Api, Driver};
use crate::memory::{DeviceSlice, Pool, PoolOptions};
use crate::stream::Stream;

/// A launch as the driver saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Recorded {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) smem_bytes: u32,
    /// Attributes by number, in order.
    pub(crate) attributes: Vec<u32>,
    /// The bytes of each parameter, as long as [`PARAMETER_BYTES`] says.
    pub(crate) parameters: Vec<Vec<u8>>,
}

thread_local! {
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static LAUNCHES: RefCell<Vec<Recorded>> = const { RefCell::new(Vec::new()) };
    /// Sizes of the parameters of the next launches on this thread.
    pub(crate) static PARAMETER_BYTES: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// Texts that were loaded in one step on this thread.
    pub(crate) static WHOLE_TEXTS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// Whether the stream counts as capturing on this thread.
    pub(crate) static CAPTURING: Cell<bool> = const { Cell::new(false) };
    /// How many of the events that this thread records are still reached; `None` reaches all.
    static REACHED: Cell<Option<u32>> = const { Cell::new(None) };
    /// Requests of this thread for device memory that are still served, and how many behind them are refused; `None` serves all.
    static REFUSED: Cell<Option<(u32, u32)>> = const { Cell::new(None) };
    /// How many times longer than the fake's own time each launch of this thread takes.
    static SLOWNESS: Cell<u64> = const { Cell::new(1) };
    /// Whether the device is lost to this thread.
    static LOST: Cell<bool> = const { Cell::new(false) };
    /// What this thread did about the order of streams.
    static ORDER: RefCell<Vec<Ordered>> = const { RefCell::new(Vec::new()) };
    /// What this thread asked of [`CountingAllocator`] and of the fake's memory.
    static ALLOCATIONS: Cell<Allocations> = const { Cell::new(Allocations { host: 0, device: 0 }) };
}

/// What orders work of several streams, by the names of streams and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ordered {
    Recorded { event: usize, stream: usize },
    Waited { stream: usize, event: usize },
    Freed { stream: usize },
}

/// How often a thread asked for memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Allocations {
    /// Of the host; counted where a test program's allocator is [`CountingAllocator`].
    pub host: u64,
    /// Of the device.
    pub device: u64,
}

/// How often this thread asked for memory since the last call. What the fake itself asks for while it takes calls down is not counted.
pub fn allocations() -> Allocations {
    ALLOCATIONS.take()
}

/// The system's allocator, counting. A test program that wants to know makes it its own by `#[global_allocator]`.
#[derive(Debug, Clone, Copy)]
pub struct CountingAllocator;

fn count_host() {
    // A thread that is ending counts no more.
    let _ = ALLOCATIONS.try_with(|count| count.set(Allocations { host: count.get().host + 1, ..count.get() }));
}

// SAFETY: all is the system's.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_host();
        // SAFETY: the caller's word.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_host();
        // SAFETY: the caller's word.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count_host();
        // SAFETY: the caller's word.
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's word.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Leaves out of the count what the fake's own notes take.
fn uncounted<R>(note: impl FnOnce() -> R) -> R {
    let before = ALLOCATIONS.get();
    let result = note();
    ALLOCATIONS.set(before);
    result
}

/// A null pointer in the place of so many bytes, as a caller of another language may hand over. To be refused: there is no memory behind it.
pub fn null(bytes: u64) -> DeviceSlice<'static> {
    // SAFETY: none, and that is what it is for: tests see that it is refused before anybody uses it.
    unsafe { DeviceSlice::from_raw(0, bytes) }
}

/// Nanoseconds.
static CLOCK: AtomicU64 = AtomicU64::new(0);
static MEMORY: Mutex<Option<HashMap<u64, usize>>> = Mutex::new(None);
pub(crate) static COMPILATIONS: AtomicU32 = AtomicU32::new(0);

/// The launches on this thread since the last call.
pub(crate) fn launches() -> Vec<Recorded> {
    LAUNCHES.take()
}

/// What this thread did about the order of streams since the last call.
pub(crate) fn ordered() -> Vec<Ordered> {
    ORDER.take()
}

fn note(ordered: Ordered) {
    uncounted(|| ORDER.with_borrow_mut(|all| all.push(ordered)));
}

/// How many launches there were on this thread since the last call.
pub fn launch_count() -> usize {
    launches().len()
}

/// A kernel that does not end: of the events that this thread records from now on, the first so many are reached, and the others are not until the
/// thread calls this with `None`.
pub fn hang_behind(events: Option<u32>) {
    REACHED.set(events);
}

/// Kernels that are slow: each launch of this thread takes so many times longer from now on, by the fake's clock, which has a microsecond for a launch and ten
/// nanoseconds for each of its CTAs.
pub fn slow_down(factor: u64) {
    SLOWNESS.set(factor);
}

/// A context that is gone, as after a kernel that the hardware stopped: what this thread launches or asks of pools and events from now on fails with the status
/// "launch failed", until it calls this with `false`.
pub fn lose_device(is_lost: bool) {
    LOST.set(is_lost);
}

/// A device that is full: of the requests for device memory that this thread makes from now on, so many are served and so many behind them find
/// none; `None` serves all. A pool asks twice before it gives up.
pub fn refuse_memory(served_then_refused: Option<(u32, u32)>) {
    REFUSED.set(served_then_refused);
}

/// How many pieces of device memory the process holds on all devices of the fake.
pub fn live_allocations() -> usize {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, HashMap::len)
}

/// Whether streams count as capturing on this thread from now on.
pub fn set_capturing(is_capturing: bool) {
    CAPTURING.set(is_capturing);
}

/// A context of the fake.
pub fn context() -> Context {
    gpu().0
}

/// A context of the fake's other device.
pub fn other_context() -> Context {
    driver_of(13_000).device(1).and_then(|device| device.primary_context()).expect("the fake's second device")
}

/// How many contexts are pushed on this thread.
pub fn context_depth() -> usize {
    CONTEXTS.with_borrow(Vec::len)
}

/// What a request for this many bytes or more gets: out of memory.
const TOO_MUCH: usize = 1 << 40;
const INVALID_CONTEXT: u32 = 201;
const LAUNCH_FAILED: u32 = 719;

fn in_context() -> bool {
    context_depth() > 0
}

/// Writes through a result pointer.
fn give<T>(to: *mut T, value: T) -> u32 {
    // SAFETY: the crate hands over pointers to results that outlive the call.
    unsafe { to.write(value) };
    0
}

/// A handle that is not null.
fn handle<T>(number: usize) -> *mut T {
    std::ptr::without_provenance_mut(number)
}

extern "C" fn device_count(count: *mut c_int) -> u32 {
    give(count, 2)
}

extern "C" fn device(device: *mut c_int, ordinal: c_int) -> u32 {
    give(device, ordinal)
}

extern "C" fn device_name(name: *mut c_char, _: c_int, _: c_int) -> u32 {
    // SAFETY: the crate hands over 256 bytes.
    unsafe { std::ptr::copy_nonoverlapping(c"Fake".as_ptr(), name, 5) };
    0
}

extern "C" fn device_uuid(uuid: *mut sys::CUuuid, _: c_int) -> u32 {
    give(uuid, sys::CUuuid { bytes: [1; 16] })
}

extern "C" fn device_memory(bytes: *mut usize, _: c_int) -> u32 {
    give(bytes, TOO_MUCH)
}

extern "C" fn device_attribute(value: *mut c_int, attribute: sys::CUdevice_attribute, _: c_int) -> u32 {
    use sys::CUdevice_attribute as A;
    give(
        value,
        match attribute {
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
            A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 4,
            A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => 232_448,
            _ => 65_535,
        },
    )
}

extern "C" fn retain(context: *mut sys::CUcontext, device: c_int) -> u32 {
    give(context, handle(0xc0 + usize::try_from(device).unwrap_or(0)))
}

extern "C" fn release(_: c_int) -> u32 {
    0
}

extern "C" fn current(context: *mut sys::CUcontext) -> u32 {
    give(context, CONTEXTS.with_borrow(|stack| handle(stack.last().copied().unwrap_or(0))))
}

extern "C" fn push(context: sys::CUcontext) -> u32 {
    uncounted(|| CONTEXTS.with_borrow_mut(|stack| stack.push(context.addr())));
    0
}

extern "C" fn pop(context: *mut sys::CUcontext) -> u32 {
    match CONTEXTS.with_borrow_mut(Vec::pop) {
        Some(top) => give(context, handle(top)),
        None => INVALID_CONTEXT,
    }
}

extern "C" fn stream_create(stream: *mut sys::CUstream, _: c_uint, _: c_int) -> u32 {
    /// Names of streams, none of which is used again; behind those of the driver's own.
    static NEXT: AtomicU32 = AtomicU32::new(0x51);
    if in_context() { give(stream, handle(NEXT.fetch_add(1, Ordering::Relaxed) as usize)) } else { INVALID_CONTEXT }
}

extern "C" fn stream_done(_: sys::CUstream) -> u32 {
    if in_context() { 0 } else { INVALID_CONTEXT }
}

extern "C" fn stream_wait(stream: sys::CUstream, event: sys::CUevent, _: c_uint) -> u32 {
    note(Ordered::Waited { stream: stream.addr(), event: event.addr() });
    if in_context() { 0 } else { INVALID_CONTEXT }
}

extern "C" fn stream_capturing(_: sys::CUstream, status: *mut sys::CUstreamCaptureStatus) -> u32 {
    give(status.cast::<u32>(), u32::from(CAPTURING.get()))
}

extern "C" fn exchange_capture_mode(_: *mut sys::CUstreamCaptureMode) -> u32 {
    0
}

extern "C" fn pool_create(pool: *mut sys::CUmemoryPool, _: *const sys::CUmemPoolProps) -> u32 {
    give(pool, handle(0xb0))
}

extern "C" fn pool_destroy(_: sys::CUmemoryPool) -> u32 {
    0
}

extern "C" fn pool_set(_: sys::CUmemoryPool, _: sys::CUmemPool_attribute, _: *mut c_void) -> u32 {
    0
}

/// All memory of the fake, as held and as in use.
extern "C" fn pool_get(_: sys::CUmemoryPool, _: sys::CUmemPool_attribute, value: *mut c_void) -> u32 {
    if LOST.get() {
        return LAUNCH_FAILED;
    }
    let bytes: usize = MEMORY.lock().unwrap_or_else(PoisonError::into_inner).iter().flatten().map(|(_, bytes)| *bytes).sum();
    give(value.cast::<u64>(), bytes as u64)
}

extern "C" fn pool_trim(_: sys::CUmemoryPool, _: usize) -> u32 {
    0
}

extern "C" fn memory_info(free: *mut usize, total: *mut usize) -> u32 {
    give(free, 1000);
    give(total, TOO_MUCH)
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 256).expect("a size that the fake gives out")
}

/// Whether this request is one of those that [`refuse_memory`] named.
fn is_refused() -> bool {
    let (served, refused) = REFUSED.get().unwrap_or((u32::MAX, 0));
    if served > 0 {
        REFUSED.set(REFUSED.get().map(|_| (served - 1, refused)));
        return false;
    }
    REFUSED.set(Some((0, refused.saturating_sub(1))).filter(|_| refused > 0));
    refused > 0
}

extern "C" fn alloc(address: *mut u64, bytes: usize, _: sys::CUmemoryPool, _: sys::CUstream) -> u32 {
    if bytes == 0 {
        return 1;
    }
    ALLOCATIONS.with(|count| count.set(Allocations { device: count.get().device + 1, ..count.get() }));
    if bytes >= TOO_MUCH || is_refused() {
        return 2;
    }
    // SAFETY: the size is not 0.
    let memory = unsafe { std::alloc::alloc_zeroed(layout(bytes)) }.expose_provenance() as u64;
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(memory, bytes);
    give(address, memory)
}

extern "C" fn free(address: u64, stream: sys::CUstream) -> u32 {
    note(Ordered::Freed { stream: stream.addr() });
    let known = MEMORY.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().remove(&address);
    let Some(bytes) = known else { std::process::abort() };
    // SAFETY: given out by `alloc` with this layout, and taken off its list.
    unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(address as usize), layout(bytes)) };
    0
}

/// Host memory behind a device address.
fn memory<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

extern "C" fn copy_in(to: u64, from: *const c_void, bytes: usize, _: sys::CUstream) -> u32 {
    // SAFETY: the crate checks both ranges.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), memory(to), bytes) };
    0
}

extern "C" fn copy_out(to: *mut c_void, from: u64, bytes: usize, _: sys::CUstream) -> u32 {
    // SAFETY: the crate checks both ranges.
    unsafe { std::ptr::copy_nonoverlapping(memory::<u8>(from), to.cast(), bytes) };
    0
}

extern "C" fn copy_across(to: u64, from: u64, bytes: usize, _: sys::CUstream) -> u32 {
    // SAFETY: the crate checks both ranges.
    unsafe { std::ptr::copy(memory::<u8>(from), memory(to), bytes) };
    0
}

extern "C" fn fill(to: u64, value: u8, bytes: usize, _: sys::CUstream) -> u32 {
    // SAFETY: the crate checks the range.
    unsafe { std::ptr::write_bytes(memory::<u8>(to), value, bytes) };
    0
}

/// What the compiler says of a good text, and of a bad one.
const SPILLS: &CStr = c"    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads";
/// What it says of register budgets in code that is to be linked.
const RELOCATED: &CStr = c"ptxas info : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility";
/// A word in a text that makes the linker's compiler speak of relocation, as if it were true of the text.
pub(crate) const COMPLAINS_LINKED: &str = "// complains when linked";
/// A comment in a text that the driver has compiled before, and keeps.
pub(crate) const KEPT: &str = "// kept";
const SYNTAX: &CStr = c"syntax error";

/// A compilation under way: where its logs go, and what was wrong.
struct Link {
    info: *mut u8,
    error: *mut u8,
}

/// The image that every compilation gives: an ELF header without anything behind it.
pub(crate) static IMAGE: [u8; 64] = {
    let mut image = [0; 64];
    let magic = *b"\x7fELF\x02\x01";
    let mut i = 0;
    while i < magic.len() {
        image[i] = magic[i];
        i += 1;
    }
    image
};

extern "C" fn link_create(_: c_uint, _: *mut sys::CUjit_option, values: *mut *mut c_void, state: *mut sys::CUlinkState) -> u32 {
    // SAFETY: the crate gives the logs as the first and third of its options.
    let (info, error) = unsafe { (*values, *values.add(2)) };
    give(state, Box::into_raw(Box::new(Link { info: info.cast(), error: error.cast() })).cast())
}

#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
extern "C" fn link_add(
    state: sys::CUlinkState,
    _: sys::CUjitInputType,
    data: *mut c_void,
    bytes: usize,
    _: *const c_char,
    _: c_uint,
    _: *mut sys::CUjit_option,
    _: *mut *mut c_void,
) -> u32 {
    COMPILATIONS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the state is that of `link_create`, the text NUL-terminated.
    let (link, text) =
        unsafe { (&*state.cast::<Link>(), CStr::from_bytes_with_nul_unchecked(std::slice::from_raw_parts(data.cast::<u8>(), bytes))) };
    let text = text.to_string_lossy();
    if !text.contains(".version") {
        say(link.error, SYNTAX);
        return 218;
    }
    let relocated = text.contains("setmaxnreg") || text.contains(COMPLAINS_LINKED);
    say(link.info, if relocated { RELOCATED } else { SPILLS });
    0
}

/// Writes a log.
fn say(log: *mut u8, words: &CStr) {
    // SAFETY: the crate's logs are longer than anything that is said here.
    unsafe { std::ptr::copy_nonoverlapping(words.as_ptr().cast(), log, words.count_bytes() + 1) };
}

extern "C" fn link_complete(_: sys::CUlinkState, image: *mut *mut c_void, bytes: *mut usize) -> u32 {
    give(image, IMAGE.as_ptr().cast_mut().cast());
    give(bytes, IMAGE.len())
}

extern "C" fn link_destroy(state: sys::CUlinkState) -> u32 {
    // SAFETY: made by `link_create`, destroyed once.
    drop(unsafe { Box::from_raw(state.cast::<Link>()) });
    0
}

extern "C" fn module_load(
    module: *mut sys::CUmodule,
    image: *const c_void,
    _: c_uint,
    _: *mut sys::CUjit_option,
    values: *mut *mut c_void,
) -> u32 {
    if !in_context() {
        return INVALID_CONTEXT;
    }
    // SAFETY: an image is a whole ELF file or a NUL-terminated text, so it has a first byte.
    if unsafe { *image.cast::<u8>() } != 0x7f {
        // SAFETY: a text is NUL-terminated and comes with the crate's options, of which the first and third are the logs.
        let (text, info, error) = unsafe { (CStr::from_ptr(image.cast()).to_string_lossy(), *values, *values.add(2)) };
        WHOLE_TEXTS.with_borrow_mut(|texts| texts.push(text.clone().into_owned()));
        if !text.contains(".version") {
            say(error.cast(), SYNTAX);
            return 218;
        }
        if !text.contains(KEPT) {
            say(info.cast(), SPILLS);
        }
    }
    give(module, handle(0x30))
}

extern "C" fn module_unload(_: sys::CUmodule) -> u32 {
    0
}

extern "C" fn module_function(function: *mut sys::CUfunction, _: sys::CUmodule, name: *const c_char) -> u32 {
    // SAFETY: the crate hands over a NUL-terminated name.
    if unsafe { CStr::from_ptr(name) } == c"missing" { 500 } else { give(function, handle(0x40)) }
}

extern "C" fn function_attribute(value: *mut c_int, attribute: sys::CUfunction_attribute, _: sys::CUfunction) -> u32 {
    use sys::CUfunction_attribute as A;
    give(
        value,
        match attribute {
            A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
            A::CU_FUNC_ATTRIBUTE_NUM_REGS => 32,
            A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES => 16,
            _ => 0,
        },
    )
}

extern "C" fn function_set(_: sys::CUfunction, _: sys::CUfunction_attribute, _: c_int) -> u32 {
    0
}

extern "C" fn occupancy(blocks: *mut c_int, _: sys::CUfunction, _: c_int, _: usize) -> u32 {
    give(blocks, 3)
}

#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
extern "C" fn encode_tiled(
    map: *mut sys::CUtensorMap,
    _: sys::CUtensorMapDataType,
    rank: u32,
    address: *mut c_void,
    dims: *const u64,
    _: *const u64,
    _: *const u32,
    _: *const u32,
    _: sys::CUtensorMapInterleave,
    _: sys::CUtensorMapSwizzle,
    _: sys::CUtensorMapL2promotion,
    _: sys::CUtensorMapFloatOOBfill,
) -> u32 {
    let mut opaque = [u64::from(rank); 16];
    opaque[0] = address.addr() as u64;
    opaque[1] = u64::MAX;
    // SAFETY: there are as many extents as the rank says.
    opaque[2] = unsafe { *dims };
    give(map, sys::CUtensorMap { opaque })
}

#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
extern "C" fn encode_im2col(
    map: *mut sys::CUtensorMap,
    _: sys::CUtensorMapDataType,
    rank: u32,
    address: *mut c_void,
    dims: *const u64,
    _: *const u64,
    _: *const c_int,
    _: *const c_int,
    _: u32,
    _: u32,
    _: *const u32,
    _: sys::CUtensorMapInterleave,
    _: sys::CUtensorMapSwizzle,
    _: sys::CUtensorMapL2promotion,
    _: sys::CUtensorMapFloatOOBfill,
) -> u32 {
    let mut opaque = [u64::from(rank) | 1 << 32; 16];
    opaque[0] = address.addr() as u64;
    // SAFETY: there are as many extents as the rank says.
    opaque[1] = unsafe { *dims };
    give(map, sys::CUtensorMap { opaque })
}

extern "C" fn launch(config: *const sys::CUlaunchConfig, _: sys::CUfunction, parameters: *mut *mut c_void, _: *mut *mut c_void) -> u32 {
    if !in_context() {
        return INVALID_CONTEXT;
    }
    if LOST.get() {
        return LAUNCH_FAILED;
    }
    uncounted(|| take_down(config, parameters));
    0
}

fn take_down(config: *const sys::CUlaunchConfig, parameters: *mut *mut c_void) {
    // SAFETY: the crate hands over a configuration, and a pointer for each parameter, of the size that the test told.
    let recorded = unsafe {
        let config = &*config;
        Recorded {
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            smem_bytes: config.sharedMemBytes,
            attributes: (0..config.numAttrs as usize).map(|i| (*config.attrs.add(i)).id as u32).collect(),
            parameters: PARAMETER_BYTES.with_borrow(|sizes| {
                let bytes = |(i, &size): (usize, &usize)| std::slice::from_raw_parts((*parameters.add(i)).cast::<u8>(), size).to_vec();
                sizes.iter().enumerate().map(bytes).collect()
            }),
        }
    };
    let ctas: u64 = recorded.grid.iter().map(|&extent| u64::from(extent)).product();
    CLOCK.fetch_add((1000 + 10 * ctas).saturating_mul(SLOWNESS.get()), Ordering::Relaxed);
    LAUNCHES.with_borrow_mut(|launches| launches.push(recorded));
}

/// Memory is its first device's.
extern "C" fn pointer_attribute(value: *mut c_void, _: sys::CUpointer_attribute, address: u64) -> u32 {
    let known = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    let is_inside = |(&start, &bytes): (&u64, &usize)| (start..start + bytes as u64).contains(&address);
    if known.iter().flatten().any(is_inside) { give(value.cast::<c_int>(), 0) } else { 1 }
}

/// An event: the time at which it was recorded.
extern "C" fn event_create(event: *mut sys::CUevent, _: c_uint) -> u32 {
    give(event, Box::into_raw(Box::new(AtomicU64::new(0))).cast())
}

extern "C" fn event_destroy(event: sys::CUevent) -> u32 {
    // SAFETY: made by `event_create`, destroyed once.
    drop(unsafe { Box::from_raw(event.cast::<AtomicU64>()) });
    0
}

/// The time of an event behind a kernel that does not end.
const NEVER: u64 = u64::MAX;

extern "C" fn event_record(event: sys::CUevent, stream: sys::CUstream) -> u32 {
    note(Ordered::Recorded { event: event.addr(), stream: stream.addr() });
    let time = match REACHED.get() {
        Some(0) => NEVER,
        left => {
            REACHED.set(left.map(|left| left - 1));
            CLOCK.load(Ordering::Relaxed)
        }
    };
    // SAFETY: made by `event_create` and alive.
    unsafe { &*event.cast::<AtomicU64>() }.store(time, Ordering::Relaxed);
    0
}

extern "C" fn event_query(event: sys::CUevent) -> u32 {
    const NOT_READY: u32 = 600;
    if !in_context() {
        return INVALID_CONTEXT;
    }
    if LOST.get() {
        return LAUNCH_FAILED;
    }
    // SAFETY: made by `event_create` and alive.
    let time = unsafe { &*event.cast::<AtomicU64>() }.load(Ordering::Relaxed);
    if time == NEVER && REACHED.get().is_some() { NOT_READY } else { 0 }
}

extern "C" fn event_done(_: sys::CUevent) -> u32 {
    if in_context() { 0 } else { INVALID_CONTEXT }
}

extern "C" fn event_elapsed(milliseconds: *mut f32, start: sys::CUevent, end: sys::CUevent) -> u32 {
    // SAFETY: both are made by `event_create` and alive.
    let [start, end] = [start, end].map(|event| unsafe { &*event.cast::<AtomicU64>() }.load(Ordering::Relaxed));
    give(milliseconds, end.saturating_sub(start) as f32 * 1e-6)
}

/// The fake's driver.
fn driver_of(version: u32) -> Driver {
    Driver::of(Api {
        version,
        release: "1.2.3".to_owned(),
        cuDeviceGetCount: Some(device_count),
        cuDeviceGet: Some(device),
        cuDeviceGetName: Some(device_name),
        cuDeviceGetUuid_v2: Some(device_uuid),
        cuDeviceTotalMem_v2: Some(device_memory),
        cuDeviceGetAttribute: Some(device_attribute),
        cuDevicePrimaryCtxRetain: Some(retain),
        cuDevicePrimaryCtxRelease_v2: Some(release),
        cuCtxGetCurrent: Some(current),
        cuCtxPushCurrent_v2: Some(push),
        cuCtxPopCurrent_v2: Some(pop),
        cuStreamCreateWithPriority: Some(stream_create),
        cuStreamDestroy_v2: Some(stream_done),
        cuStreamSynchronize: Some(stream_done),
        cuStreamWaitEvent: Some(stream_wait),
        cuStreamIsCapturing: Some(stream_capturing),
        cuThreadExchangeStreamCaptureMode: Some(exchange_capture_mode),
        cuMemPoolCreate: Some(pool_create),
        cuMemPoolDestroy: Some(pool_destroy),
        cuMemPoolSetAttribute: Some(pool_set),
        cuMemPoolGetAttribute: Some(pool_get),
        cuMemPoolTrimTo: Some(pool_trim),
        cuMemGetInfo_v2: Some(memory_info),
        cuMemAllocFromPoolAsync: Some(alloc),
        cuMemFreeAsync: Some(free),
        cuMemcpyHtoDAsync_v2: Some(copy_in),
        cuMemcpyDtoHAsync_v2: Some(copy_out),
        cuMemcpyDtoDAsync_v2: Some(copy_across),
        cuMemsetD8Async: Some(fill),
        cuLinkCreate_v2: Some(link_create),
        cuLinkAddData_v2: Some(link_add),
        cuLinkComplete: Some(link_complete),
        cuLinkDestroy: Some(link_destroy),
        cuModuleLoadDataEx: Some(module_load),
        cuModuleUnload: Some(module_unload),
        cuModuleGetFunction: Some(module_function),
        cuFuncGetAttribute: Some(function_attribute),
        cuFuncSetAttribute: Some(function_set),
        cuOccupancyMaxActiveBlocksPerMultiprocessor: Some(occupancy),
        cuTensorMapEncodeTiled: Some(encode_tiled),
        cuTensorMapEncodeIm2col: Some(encode_im2col),
        cuLaunchKernelEx: Some(launch),
        cuPointerGetAttribute: Some(pointer_attribute),
        cuEventCreate: Some(event_create),
        cuEventDestroy_v2: Some(event_destroy),
        cuEventRecord: Some(event_record),
        cuEventSynchronize: Some(event_done),
        cuEventQuery: Some(event_query),
        cuEventElapsedTime: Some(event_elapsed),
        ..Api::default()
    })
}

/// A context, a stream and a pool of the fake.
pub(crate) fn gpu() -> (Context, Stream, Pool) {
    gpu_of(13_000)
}

/// As [`gpu`], with a driver of that version.
pub(crate) fn gpu_of(version: u32) -> (Context, Stream, Pool) {
    let context = driver_of(version).device(0).and_then(|device| device.primary_context()).expect("the fake's device");
    let stream = Stream::new(&context).expect("the fake's stream");
    let pool = Pool::new(&context, PoolOptions { limit_bytes: Some(1 << 50), ..PoolOptions::default() }).expect("the fake's pool");
    (context, stream, pool)
}
