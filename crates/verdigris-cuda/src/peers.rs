//! The vendor's matrix library, loaded at run time, to compare with. Nothing of ours computes through it.
//!
//! cuBLASLt speaks of column-major matrices. A row-major matrix is the column-major one of its transpose, so
//! `D = A·B` in rows is asked for as `Dᵀ = Bᵀ·Aᵀ` in columns: the operands change places, and nothing is moved. All of
//! [`MatmulProblem`] is in our terms: row-major, leading dimensions from row to row.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;

use crate::device::Context;
use crate::driver::why_not_loaded;
use crate::error::Error;
use crate::memory::DeviceSlice;
use crate::stream::Stream;

/// Names under which the library is looked for after the caller's own candidates.
pub const CUBLAS_LT_LIBRARIES: &[&str] =
    if cfg!(windows) { &["cublasLt64_13.dll", "cublasLt64_12.dll"] } else { &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"] };

/// How many algorithms the heuristic is asked for in comparisons: its first is not always its best.
pub const HEURISTIC_ANSWERS: usize = 8;

/// Why the peer could not compute.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The library is not there.
    #[error("cuBLASLt could not be loaded: tried {tried:?} ({detail}); name the path of libcublasLt.so, or compare without it")]
    NotFound {
        /// The names and paths tried, in order.
        tried: Vec<PathBuf>,
        /// What the system's loader said about the last.
        detail: String,
    },
    /// A path that names something else.
    #[error("{} does not bear cuBLASLt's name; give the path of libcublasLt.so", path.display())]
    OtherLibrary {
        /// The path.
        path: PathBuf,
    },
    /// The library lacks a function.
    #[error("this cuBLASLt has no `{symbol}`; use version 12 or newer")]
    MissingSymbol {
        /// The function.
        symbol: &'static str,
    },
    /// A call failed.
    #[error("{call} failed with status {code} ({text}) for {problem}")]
    Status {
        /// The function.
        call: &'static str,
        /// cuBLAS's status.
        code: u32,
        /// Its name.
        text: String,
        /// What was being computed.
        problem: String,
    },
    /// The heuristic has no algorithm.
    #[error("cuBLASLt has no algorithm for {problem}")]
    NoAlgorithm {
        /// The problem.
        problem: String,
    },
    /// The library's documented rules exclude the problem.
    #[error("cuBLASLt does not take {problem}: {rule}")]
    Excluded {
        /// The problem.
        problem: String,
        /// The rule.
        rule: &'static str,
    },
    /// There is no algorithm of that number.
    #[error("there is no algorithm {index}: the heuristic gave {count}")]
    NoSuchAlgorithm {
        /// The number asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// An operand is shorter or less aligned than the problem says.
    #[error("operand {operand} has {given} {what}, the problem needs {needed}")]
    Operand {
        /// Which.
        operand: &'static str,
        /// What is too little: bytes, or bytes of alignment.
        what: &'static str,
        /// What it has.
        given: u64,
        /// What is needed.
        needed: u64,
    },
    /// The driver layer failed.
    #[error(transparent)]
    Cuda(#[from] Error),
}

/// An element type of the peer's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerType {
    /// binary64.
    F64,
    /// binary32.
    F32,
    /// binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// fp8, 4 exponent bits.
    E4m3,
    /// fp8, 5 exponent bits.
    E5m2,
    /// 8-bit signed integer.
    I8,
    /// 32-bit signed integer.
    I32,
}

impl PeerType {
    /// Size of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 | Self::I8 => 1,
        }
    }

    /// The library's number for it (`cudaDataType_t`).
    fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F64 => 1,
            Self::F16 => 2,
            Self::I8 => 3,
            Self::I32 => 10,
            Self::Bf16 => 14,
            Self::E4m3 => 28,
            Self::E5m2 => 29,
        }
    }

    fn is_fp8(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2)
    }
}

/// What products are summed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ComputeType {
    /// binary32 sums; f32 operands are multiplied as they are.
    F32,
    /// binary32 sums; f32 operands are rounded to tf32 first.
    Tf32,
    /// binary64.
    F64,
    /// 32-bit integers.
    I32,
}

impl ComputeType {
    /// The library's number for it (`cublasComputeType_t`).
    fn code(self) -> u32 {
        match self {
            Self::F32 => 68,
            Self::F64 => 70,
            Self::I32 => 72,
            Self::Tf32 => 77,
        }
    }
}

/// `D = alpha · op(A)·op(B) + beta · C`, all matrices row-major, for each of `batch` sets of them.
///
/// op(A) is m × k and op(B) is k × n. With `transpose_a`, A is stored as k × m; with `transpose_b`, B is stored as n × k.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatmulProblem {
    /// Rows of D.
    pub m: u64,
    /// Columns of D.
    pub n: u64,
    /// Length of the sums.
    pub k: u64,
    /// Whether A is stored as k × m.
    pub transpose_a: bool,
    /// Whether B is stored as n × k.
    pub transpose_b: bool,
    /// Elements from a row of A, as stored, to the next; likewise for B, C, D.
    pub leading_elements: [u64; 4],
    /// How many problems.
    pub batch: u32,
    /// Elements from one A to the next (0: the same for all); likewise for B, C, D.
    pub batch_stride_elements: [u64; 4],
    /// Element types of A, B, C, D.
    pub types: [PeerType; 4],
    /// What is summed in. The scalars are of the same type, but binary32 for integer sums that are stored in 8 bits.
    pub compute: ComputeType,
    /// Factor of the product.
    pub alpha: f64,
    /// Factor of C; with 0, C is not read.
    pub beta: f64,
    /// fp8: sums kept in the tensor core's own precision.
    pub fast_accumulation: bool,
    /// The alignment that all operands have at least.
    pub alignment_bytes: u32,
}

impl MatmulProblem {
    /// One problem with dense rows, `alpha` 1, `beta` 0, C like D, operands at multiples of 256 bytes.
    pub fn dense(m: u64, n: u64, k: u64, (transpose_a, transpose_b): (bool, bool), inputs: PeerType, output: PeerType) -> Self {
        Self {
            m,
            n,
            k,
            transpose_a,
            transpose_b,
            leading_elements: [if transpose_a { m } else { k }, if transpose_b { k } else { n }, n, n],
            batch: 1,
            batch_stride_elements: [0; 4],
            types: [inputs, inputs, if output.is_fp8() { PeerType::Bf16 } else { output }, output],
            compute: match inputs {
                PeerType::F64 => ComputeType::F64,
                PeerType::I8 | PeerType::I32 => ComputeType::I32,
                _ => ComputeType::F32,
            },
            alpha: 1.0,
            beta: 0.0,
            fast_accumulation: false,
            alignment_bytes: 256,
        }
    }

    /// Rows and columns of A, B, C and D, as stored.
    fn extents(&self) -> [(u64, u64); 4] {
        let swap = |transpose: bool, (rows, columns): (u64, u64)| if transpose { (columns, rows) } else { (rows, columns) };
        let (m, n, k) = (self.m, self.n, self.k);
        [swap(self.transpose_a, (m, k)), swap(self.transpose_b, (k, n)), (m, n), (m, n)]
    }

    /// Bytes from the first element of operand `i` (A, B, C, D) of the first problem to the end of the last one's last.
    pub fn operand_bytes(&self, i: usize) -> u64 {
        let (rows, columns) = self.extents()[i];
        if rows == 0 || columns == 0 || self.batch == 0 {
            return 0;
        }
        let batches = u64::from(self.batch - 1).saturating_mul(self.batch_stride_elements[i]);
        let elements = (rows - 1).saturating_mul(self.leading_elements[i]).saturating_add(columns).saturating_add(batches);
        elements.saturating_mul(self.types[i].bytes())
    }

    /// Floating-point (or integer) operations: a multiplication and an addition each.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64 * f64::from(self.batch)
    }

    /// Held against the library's documented rules, which it answers with a bare "not supported" itself.
    fn check(&self) -> Result<(), PeerError> {
        let refuse = |rule| Err(PeerError::Excluded { problem: self.to_string(), rule });
        let [a, b, _, d] = self.types;
        let transposed = !self.transpose_a && self.transpose_b;
        if self.m == 0 || self.n == 0 || self.k == 0 || self.batch == 0 {
            return refuse("every extent must be at least 1");
        }
        if (a.is_fp8() || b.is_fp8()) && !transposed {
            return refuse("fp8 operands need both rows along k: A as m × k, B as n × k");
        }
        if a == PeerType::I8 && !transposed {
            return refuse("8-bit integer operands need both rows along k: A as m × k, B as n × k");
        }
        if (a == PeerType::I8 || b == PeerType::I8) && self.compute != ComputeType::I32 {
            return refuse("8-bit integer products are summed in 32-bit integers");
        }
        if self.compute == ComputeType::I32 && !matches!(d, PeerType::I8 | PeerType::I32) {
            return refuse("integer sums are stored as 8-bit or 32-bit integers");
        }
        Ok(())
    }

    /// The library's number for the type of alpha and beta, and their bytes in memory order.
    fn scalars(&self) -> (PeerType, [u64; 2]) {
        let kind = match (self.compute, self.types[3]) {
            (ComputeType::F64, _) => PeerType::F64,
            (ComputeType::I32, PeerType::I32) => PeerType::I32,
            (ComputeType::I32 | ComputeType::F32 | ComputeType::Tf32, _) => PeerType::F32,
        };
        let bytes = [self.alpha, self.beta].map(|value| {
            let mut bytes = [0; 8];
            match kind {
                PeerType::F64 => bytes.copy_from_slice(&value.to_ne_bytes()),
                PeerType::I32 => bytes[..4].copy_from_slice(&(value as i32).to_ne_bytes()),
                _ => bytes[..4].copy_from_slice(&(value as f32).to_ne_bytes()),
            }
            u64::from_ne_bytes(bytes)
        });
        (kind, bytes)
    }
}

impl std::fmt::Display for MatmulProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let letter = |transpose: bool| if transpose { 't' } else { 'n' };
        let [a, b, c, d] = self.types;
        write!(f, "matmul {}x{}x{}", self.m, self.n, self.k)?;
        if self.batch != 1 {
            write!(f, " x{}", self.batch)?;
        }
        write!(f, " {}{} {a:?}·{b:?}+{c:?}→{d:?} in {:?}", letter(self.transpose_a), letter(self.transpose_b), self.compute)?;
        write!(f, ", rows {:?}, alpha {}, beta {}", self.leading_elements, self.alpha, self.beta)
    }
}

/// Device memory of one execution.
#[derive(Debug, Clone, Copy)]
pub struct MatmulOperands<'a> {
    /// A.
    pub a: DeviceSlice<'a>,
    /// B.
    pub b: DeviceSlice<'a>,
    /// C; may be left out where beta is 0.
    pub c: Option<DeviceSlice<'a>>,
    /// D.
    pub d: DeviceSlice<'a>,
}

/// fp8: factors on the device, one f32 each, by which A, B and D are multiplied; 1 where left out.
#[derive(Debug, Clone, Copy, Default)]
pub struct MatmulScales<'a> {
    /// Of A.
    pub a: Option<DeviceSlice<'a>>,
    /// Of B.
    pub b: Option<DeviceSlice<'a>>,
    /// Of an fp8 D.
    pub d: Option<DeviceSlice<'a>>,
}

/// The library's `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Answer {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: u32,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! functions {
    ($($field:ident = $name:ident: fn($($type:ty),*) -> $result:ty;)*) => {
        /// The library's functions.
        struct Functions {
            $($field: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        impl Functions {
            /// # Safety
            /// The library must be cuBLASLt.
            unsafe fn resolve(library: &Library) -> Result<Self, PeerError> {
                Ok(Self {
                    $(
                        $field: {
                            // SAFETY: the type is that of the library's header.
                            let found = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> $result>(stringify!($name).as_bytes()) };
                            *found.map_err(|_| PeerError::MissingSymbol { symbol: stringify!($name) })?
                        },
                    )*
                })
            }
        }
    };
}

/// Handles of the library: context, descriptors, layouts, preferences, streams.
type Handle = *mut c_void;

functions! {
    version = cublasLtGetVersion: fn() -> usize;
    status_name = cublasLtGetStatusName: fn(u32) -> *const c_char;
    create = cublasLtCreate: fn(*mut Handle) -> u32;
    destroy = cublasLtDestroy: fn(Handle) -> u32;
    operation_create = cublasLtMatmulDescCreate: fn(*mut Handle, u32, u32) -> u32;
    operation_set = cublasLtMatmulDescSetAttribute: fn(Handle, u32, *const c_void, usize) -> u32;
    operation_destroy = cublasLtMatmulDescDestroy: fn(Handle) -> u32;
    layout_create = cublasLtMatrixLayoutCreate: fn(*mut Handle, u32, u64, u64, i64) -> u32;
    layout_set = cublasLtMatrixLayoutSetAttribute: fn(Handle, u32, *const c_void, usize) -> u32;
    layout_destroy = cublasLtMatrixLayoutDestroy: fn(Handle) -> u32;
    preference_create = cublasLtMatmulPreferenceCreate: fn(*mut Handle) -> u32;
    preference_set = cublasLtMatmulPreferenceSetAttribute: fn(Handle, u32, *const c_void, usize) -> u32;
    preference_destroy = cublasLtMatmulPreferenceDestroy: fn(Handle) -> u32;
    heuristic = cublasLtMatmulAlgoGetHeuristic:
        fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Answer, *mut c_int) -> u32;
    matmul = cublasLtMatmul:
        fn(
            Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void, Handle,
            *mut c_void, Handle, *const [u64; 8], *mut c_void, usize, Handle
        ) -> u32;
}

/// `CUBLASLT_MATMUL_DESC_…`, `CUBLASLT_MATRIX_LAYOUT_…` and `CUBLASLT_MATMUL_PREF_…`.
mod attribute {
    pub(super) const TRANSPOSE_A: u32 = 3;
    pub(super) const TRANSPOSE_B: u32 = 4;
    pub(super) const A_SCALE_POINTER: u32 = 17;
    pub(super) const B_SCALE_POINTER: u32 = 18;
    pub(super) const D_SCALE_POINTER: u32 = 20;
    pub(super) const FAST_ACCUMULATION: u32 = 25;
    pub(super) const BATCH_COUNT: u32 = 5;
    pub(super) const BATCH_STRIDE: u32 = 6;
    pub(super) const WORKSPACE_BYTES: u32 = 1;
    pub(super) const MIN_ALIGNMENT: [u32; 4] = [5, 6, 7, 8];
}

/// The library, ready in a context.
pub struct CublasLt {
    inner: Arc<Inner>,
}

struct Inner {
    functions: Functions,
    handle: Handle,
    context: Context,
    path: PathBuf,
}

// SAFETY: the library documents its handle as usable from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above, also by several threads at once.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: the handle is ours and unused.
            let _ = unsafe { (self.functions.destroy)(self.handle) };
        }
    }
}

impl CublasLt {
    /// Loads the library from the first of `paths`, then of [`CUBLAS_LT_LIBRARIES`], that can be loaded. `paths` are for places that
    /// the system's loader does not search, a Python package's folder for one; each must name a file of cuBLASLt, whose code is then
    /// run. The context must be the device's primary one, which is what the library computes in.
    ///
    /// # Errors
    /// [`PeerError::NotFound`], [`PeerError::OtherLibrary`], [`PeerError::MissingSymbol`], [`PeerError::Status`].
    pub fn open(context: &Context, paths: &[&Path]) -> Result<Self, PeerError> {
        for path in paths {
            if !path.file_name().is_some_and(|name| name.to_string_lossy().contains("cublasLt")) {
                return Err(PeerError::OtherLibrary { path: path.to_path_buf() });
            }
        }
        let own = CUBLAS_LT_LIBRARIES.iter().map(PathBuf::from);
        let tried: Vec<PathBuf> = paths.iter().map(|path| path.to_path_buf()).chain(own).collect();
        let mut detail = String::new();
        for path in &tried {
            // SAFETY: loading runs the library's initializers; those of cuBLASLt, which the file bears the name of, have no
            // precondition.
            match unsafe { Library::new(path) } {
                Ok(library) => {
                    // SAFETY: as above.
                    let functions = unsafe { Functions::resolve(&library) }?;
                    // It registers handlers that run at exit.
                    std::mem::forget(library);
                    return Self::start(context, functions, path.clone());
                }
                Err(error) => detail = why_not_loaded(&error),
            }
        }
        Err(PeerError::NotFound { tried, detail })
    }

    fn start(context: &Context, functions: Functions, path: PathBuf) -> Result<Self, PeerError> {
        let mut handle: Handle = std::ptr::null_mut();
        let current = context.enter()?;
        // SAFETY: `handle` outlives the call; the context is current.
        let code = unsafe { (functions.create)(&mut handle) };
        drop(current);
        let inner = Inner { functions, handle, context: context.clone(), path };
        if code != 0 {
            let error = inner.status("cublasLtCreate", code, "no problem yet");
            // There is no handle to destroy.
            std::mem::forget(inner);
            return Err(error);
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The library's version, as 10000 × major + 100 × minor + patch.
    pub fn version(&self) -> u64 {
        // SAFETY: the function has no precondition.
        unsafe { (self.inner.functions.version)() as u64 }
    }

    /// The name or path that it was loaded by.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Asks the heuristic for up to `answers` algorithms with at most that much workspace, best first by its own estimate.
    ///
    /// # Errors
    /// [`PeerError::Excluded`], [`PeerError::NoAlgorithm`], [`PeerError::Status`].
    pub fn matmul<'a>(
        &self,
        problem: &MatmulProblem,
        scales: MatmulScales<'a>,
        workspace_bytes: u64,
        answers: usize,
    ) -> Result<Matmul<'a>, PeerError> {
        problem.check()?;
        let _current = self.inner.context.enter()?;
        let functions = &self.inner.functions;
        let (scalar, scalars) = problem.scalars();
        let object = |destroy, call, make: &dyn Fn(*mut Handle) -> u32| -> Result<Object, PeerError> {
            let mut handle: Handle = std::ptr::null_mut();
            self.inner.result(call, make(&mut handle), problem)?;
            Ok(Object { handle, destroy, inner: Arc::clone(&self.inner) })
        };
        let operation = object(functions.operation_destroy, "cublasLtMatmulDescCreate", &|out| {
            // SAFETY: the result outlives the call; the types are numbers of the library's header.
            unsafe { (functions.operation_create)(out, problem.compute.code(), scalar.code()) }
        })?;
        // Our B is the library's A, and the other way round.
        let transpose = |transpose: bool| i32::from(transpose).to_ne_bytes().to_vec();
        let mut settings =
            vec![(attribute::TRANSPOSE_A, transpose(problem.transpose_b)), (attribute::TRANSPOSE_B, transpose(problem.transpose_a))];
        if problem.types[0].is_fp8() {
            settings.push((attribute::FAST_ACCUMULATION, vec![u8::from(problem.fast_accumulation)]));
        }
        let pointers =
            [(attribute::A_SCALE_POINTER, scales.b), (attribute::B_SCALE_POINTER, scales.a), (attribute::D_SCALE_POINTER, scales.d)];
        for (name, slice) in pointers {
            if let Some(slice) = slice {
                at_least("scale", "bytes", slice.len_bytes(), 4)?;
                settings.push((name, slice.address().to_ne_bytes().to_vec()));
            }
        }
        for (name, value) in settings {
            // SAFETY: the value has the attribute's size, and outlives the call.
            let code = unsafe { (functions.operation_set)(operation.handle, name, value.as_ptr().cast(), value.len()) };
            self.inner.result("cublasLtMatmulDescSetAttribute", code, problem)?;
        }
        let layout = |i: usize| -> Result<Object, PeerError> {
            let (rows, columns) = problem.extents()[i];
            let leading = i64::try_from(problem.leading_elements[i]).unwrap_or(i64::MAX);
            let layout = object(functions.layout_destroy, "cublasLtMatrixLayoutCreate", &|out| {
                // The library's rows are our columns.
                // SAFETY: the result outlives the call; the type is a number of the library's header.
                unsafe { (functions.layout_create)(out, problem.types[i].code(), columns, rows, leading) }
            })?;
            if problem.batch > 1 {
                let count = i32::try_from(problem.batch).unwrap_or(i32::MAX).to_ne_bytes();
                let stride = problem.batch_stride_elements[i].to_ne_bytes();
                for (name, value) in [(attribute::BATCH_COUNT, &count[..]), (attribute::BATCH_STRIDE, &stride[..])] {
                    // SAFETY: the value has the attribute's size, and outlives the call.
                    let code = unsafe { (functions.layout_set)(layout.handle, name, value.as_ptr().cast(), value.len()) };
                    self.inner.result("cublasLtMatrixLayoutSetAttribute", code, problem)?;
                }
            }
            Ok(layout)
        };
        let layouts = [layout(0)?, layout(1)?, layout(2)?, layout(3)?];
        let preference = object(functions.preference_destroy, "cublasLtMatmulPreferenceCreate", &|out| {
            // SAFETY: the result outlives the call.
            unsafe { (functions.preference_create)(out) }
        })?;
        let mut preferences = vec![(attribute::WORKSPACE_BYTES, workspace_bytes.to_ne_bytes().to_vec())];
        // Unless told otherwise, the library counts on 256 bytes.
        let alignment = problem.alignment_bytes.clamp(1, 256).to_ne_bytes().to_vec();
        preferences.extend(attribute::MIN_ALIGNMENT.map(|name| (name, alignment.clone())));
        for (name, value) in preferences {
            // SAFETY: the value has the attribute's size, and outlives the call.
            let code = unsafe { (functions.preference_set)(preference.handle, name, value.as_ptr().cast(), value.len()) };
            self.inner.result("cublasLtMatmulPreferenceSetAttribute", code, problem)?;
        }
        let empty = Answer { algorithm: [0; 8], workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut list = vec![empty; answers.max(1)];
        let (asked, mut count) = (c_int::try_from(list.len()).unwrap_or(c_int::MAX), 0);
        let [a, b, c, d] = &layouts;
        // SAFETY: all objects are alive, and there is room for as many answers as are asked for.
        let code = unsafe {
            (functions.heuristic)(
                self.inner.handle,
                operation.handle,
                b.handle,
                a.handle,
                c.handle,
                d.handle,
                preference.handle,
                asked,
                list.as_mut_ptr(),
                &mut count,
            )
        };
        const NOT_SUPPORTED: u32 = 15;
        if code != NOT_SUPPORTED {
            self.inner.result("cublasLtMatmulAlgoGetHeuristic", code, problem)?;
        }
        list.truncate(usize::try_from(count).unwrap_or(0));
        list.retain(|answer| answer.state == 0);
        if code == NOT_SUPPORTED || list.is_empty() {
            return Err(PeerError::NoAlgorithm { problem: problem.to_string() });
        }
        Ok(Matmul { problem: *problem, scalars, operation, layouts, answers: list, scales: PhantomData })
    }
}

impl Inner {
    fn result(&self, call: &'static str, code: u32, problem: &MatmulProblem) -> Result<(), PeerError> {
        if code == 0 { Ok(()) } else { Err(self.status(call, code, &problem.to_string())) }
    }

    fn status(&self, call: &'static str, code: u32, problem: &str) -> PeerError {
        // SAFETY: any code may be asked about.
        let name = unsafe { (self.functions.status_name)(code) };
        let text = if name.is_null() {
            "unknown status".to_owned()
        } else {
            // SAFETY: the library hands out static NUL-terminated strings.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        PeerError::Status { call, code, text, problem: problem.to_owned() }
    }
}

/// A descriptor of the library's, destroyed with its owner.
struct Object {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> u32,
    inner: Arc<Inner>,
}

// SAFETY: descriptors are plain memory of the library's, changed only while they are made.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the object is ours, of the kind that the function destroys; the library is alive with `inner`.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

/// A matrix product as the peer computes it, with the algorithms that its heuristic gave.
pub struct Matmul<'a> {
    problem: MatmulProblem,
    scalars: [u64; 2],
    operation: Object,
    layouts: [Object; 4],
    answers: Vec<Answer>,
    scales: PhantomData<MatmulScales<'a>>,
}

impl Matmul<'_> {
    /// The number of algorithms, at least 1.
    pub fn algorithm_count(&self) -> usize {
        self.answers.len()
    }

    /// The workspace that algorithm `index` needs; 0 for a number that does not exist.
    pub fn workspace_bytes(&self, index: usize) -> u64 {
        self.answers.get(index).map_or(0, |answer| answer.workspace_bytes as u64)
    }

    /// How many waves of CTAs the heuristic expects of algorithm `index`; 0 for a number that does not exist.
    pub fn waves(&self, index: usize) -> f32 {
        self.answers.get(index).map_or(0.0, |answer| answer.waves)
    }

    /// Submits the product, by algorithm `index`, to the stream.
    ///
    /// # Errors
    /// [`PeerError::NoSuchAlgorithm`], [`PeerError::Operand`], [`PeerError::Status`].
    pub fn run(&self, index: usize, stream: &Stream, operands: &MatmulOperands<'_>, workspace: DeviceSlice<'_>) -> Result<(), PeerError> {
        let inner = &self.operation.inner;
        let count = self.answers.len();
        let answer = self.answers.get(index).ok_or(PeerError::NoSuchAlgorithm { index, count })?;
        if *stream.context() != inner.context {
            let what = "running cuBLASLt";
            return Err(Error::ContextMismatch { what, left: "library's handle", right: "stream" }.into());
        }
        // With beta 0 the library does not read C. It takes D in its place, but only where both are of one kind.
        let c_needed = if self.problem.beta == 0.0 { 0 } else { self.problem.operand_bytes(2) };
        let [_, _, c_type, d_type] = self.problem.types;
        let stand_in = Some(operands.d).filter(|_| c_type == d_type);
        let c_bytes = operands.c.map_or(0, |c| c.len_bytes());
        let c = operands.c.or(stand_in);
        let alignment = u64::from(self.problem.alignment_bytes.clamp(1, 256));
        for (operand, slice, given, needed) in [
            ("A", Some(operands.a), operands.a.len_bytes(), self.problem.operand_bytes(0)),
            ("B", Some(operands.b), operands.b.len_bytes(), self.problem.operand_bytes(1)),
            ("C", c, c_bytes, c_needed),
            ("D", Some(operands.d), operands.d.len_bytes(), self.problem.operand_bytes(3)),
        ] {
            at_least(operand, "bytes", given, needed)?;
            let address = slice.map_or(0, |slice| slice.address());
            if !address.is_multiple_of(alignment) {
                let given = 1 << address.trailing_zeros();
                return Err(PeerError::Operand { operand, what: "bytes of alignment", given, needed: alignment });
            }
        }
        at_least("workspace", "bytes", workspace.len_bytes(), answer.workspace_bytes as u64)?;
        let pointer =
            |slice: DeviceSlice<'_>| std::ptr::without_provenance_mut::<c_void>(usize::try_from(slice.address()).unwrap_or(usize::MAX));
        let [alpha, beta] = &self.scalars;
        let [layout_a, layout_b, layout_c, layout_d] = &self.layouts;
        let _current = inner.context.enter()?;
        // SAFETY: all objects are alive; the operands are as long and as aligned as the layouts say, and the workspace as long
        // as the algorithm asks, as checked above; alpha and beta have room for the scalar type and are read before the
        // call returns.
        let code = unsafe {
            (inner.functions.matmul)(
                inner.handle,
                self.operation.handle,
                (&raw const *alpha).cast(),
                pointer(operands.b),
                layout_b.handle,
                pointer(operands.a),
                layout_a.handle,
                (&raw const *beta).cast(),
                c.map_or(std::ptr::null_mut(), pointer).cast_const(),
                layout_c.handle,
                pointer(operands.d),
                layout_d.handle,
                &answer.algorithm,
                pointer(workspace),
                answer.workspace_bytes,
                stream.raw(),
            )
        };
        inner.result("cublasLtMatmul", code, &self.problem)
    }
}

fn at_least(operand: &'static str, what: &'static str, given: u64, needed: u64) -> Result<(), PeerError> {
    if given >= needed { Ok(()) } else { Err(PeerError::Operand { operand, what, given, needed }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_leading_dimensions_are_the_stored_rows() {
        for (transpose_a, transpose_b) in [(false, false), (false, true), (true, false), (true, true)] {
            let problem = MatmulProblem::dense(3, 5, 7, (transpose_a, transpose_b), PeerType::Bf16, PeerType::F32);
            for i in 0..4 {
                let (rows, columns) = problem.extents()[i];
                assert_eq!(problem.leading_elements[i], columns);
                assert_eq!(problem.operand_bytes(i), rows * columns * problem.types[i].bytes());
            }
            assert_eq!(problem.extents()[0], if transpose_a { (7, 3) } else { (3, 7) });
            assert_eq!(problem.extents()[1], if transpose_b { (5, 7) } else { (7, 5) });
        }
    }

    #[test]
    fn operand_bytes_reach_to_the_last_element() {
        let mut problem = MatmulProblem::dense(4, 8, 16, (false, false), PeerType::F16, PeerType::F16);
        problem.leading_elements[0] = 20;
        problem.batch = 3;
        problem.batch_stride_elements = [100, 0, 32, 32];
        assert_eq!(problem.operand_bytes(0), 2 * (2 * 100 + 3 * 20 + 16));
        assert_eq!(problem.operand_bytes(1), 2 * 8 * 16, "one B for all");
        problem.leading_elements[0] = u64::MAX;
        assert_eq!(problem.operand_bytes(0), u64::MAX, "no wrapping");
    }

    #[test]
    fn scalars_are_of_the_type_that_the_library_wants() {
        let problem =
            |inputs, output| MatmulProblem { alpha: 2.0, beta: -1.0, ..MatmulProblem::dense(1, 1, 1, (false, true), inputs, output) };
        let (kind, [alpha, _]) = problem(PeerType::I8, PeerType::I32).scalars();
        assert_eq!((kind, alpha as u32), (PeerType::I32, 2));
        let (kind, [_, beta]) = problem(PeerType::I8, PeerType::I8).scalars();
        assert_eq!((kind, beta as u32), (PeerType::F32, (-1.0_f32).to_bits()));
        let (kind, [alpha, _]) = problem(PeerType::F64, PeerType::F64).scalars();
        assert_eq!((kind, alpha), (PeerType::F64, 2.0_f64.to_bits()));
    }

    #[test]
    fn problems_outside_the_documented_rules_are_refused_by_name() {
        let dense = |transposes, inputs, output| MatmulProblem::dense(16, 16, 16, transposes, inputs, output);
        assert!(dense((false, true), PeerType::E4m3, PeerType::Bf16).check().is_ok());
        let error = dense((false, false), PeerType::E4m3, PeerType::Bf16).check().expect_err("not along k");
        assert!(error.to_string().contains("fp8 operands need both rows along k"), "{error}");
        assert!(dense((true, true), PeerType::I8, PeerType::I32).check().is_err());
        assert!(dense((false, true), PeerType::I8, PeerType::F32).check().is_err());
        assert!(MatmulProblem { k: 0, ..dense((false, true), PeerType::F32, PeerType::F32) }.check().is_err());
    }
}
