//! PTX text to a cubin through the driver's compiler, with its log kept and read.
//!
//! There are two ways, and neither has everything. [`compile`] goes through the driver's linker, the only function of the driver's
//! interface that hands out the cubin; but what is linked is compiled as relocatable code, in which the register budgets of
//! `setmaxnreg` are ignored (C7504). [`Module::load_ptx`] compiles the text as a whole and keeps the machine code to itself, in the
//! driver's own cache. Hence [`has_register_budgets`].
//!
//! The driver speaks of what costs performance (a spill, a serialized wgmma pipeline, an ignored `setmaxnreg`) only in its
//! information log, and succeeds all the same. So every compilation keeps both logs, and [`JitReport::findings`] holds
//! what in them a performance kernel must not have.

use std::ffi::{CString, c_void};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use sys::CUjit_option as Jit;

use crate::device::Context;
use crate::error::{Doing, Error, Failure};
use crate::module::Module;

/// Bytes for each of the two logs; the verbose log has a few lines a kernel.
const LOG_BYTES: usize = 64 << 10;

/// Whether the text asks for register budgets, which only [`Module::load_ptx`] honours.
pub fn has_register_budgets(ptx: &str) -> bool {
    ptx.contains("setmaxnreg")
}

/// How a kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CompileOptions {
    /// 0 to 4; wgmma needs 4, the default, since lower levels serialize it.
    pub optimization_level: u32,
    /// Keeps the PTX's `.loc` lines in the cubin, for profilers and sanitizers; costs size, not speed.
    pub line_info: bool,
}

impl Default for CompileOptions {
    fn default() -> Self {
        Self { optimization_level: 4, line_info: true }
    }
}

/// Something in the compiler's log that costs performance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JitFinding {
    /// A numbered message, `C7510` for one: wgmma serialization (C7510–C7520), an ignored directive (C7504–C7508), a form
    /// that does not fit (C76xx).
    Message {
        /// The number, with its letter.
        code: String,
        /// The whole line.
        line: String,
    },
    /// Registers spilled to local memory.
    Spill {
        /// Bytes stored.
        store_bytes: u64,
        /// Bytes loaded.
        load_bytes: u64,
    },
    /// A stack frame in local memory.
    StackFrame {
        /// Its size.
        bytes: u64,
    },
}

/// What the driver's compiler said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JitReport {
    /// The information log, as it came.
    pub info_log: String,
    /// The error log; on success, warnings.
    pub error_log: String,
    /// What in the logs costs performance.
    pub findings: Vec<JitFinding>,
    /// How long the compilation took.
    pub duration: Duration,
}

impl JitFinding {
    /// Whether it goes beyond the spills that the kernel's author accepts. Messages always do.
    pub fn exceeds(&self, allowed_spill_bytes: u32) -> bool {
        match self {
            Self::Message { .. } => true,
            Self::Spill { store_bytes, load_bytes } => *store_bytes.max(load_bytes) > u64::from(allowed_spill_bytes),
            // Spills stand on the stack frame, which is then rounded up.
            Self::StackFrame { bytes } => *bytes > u64::from(allowed_spill_bytes).next_multiple_of(16),
        }
    }
}

impl JitReport {
    /// Whether the compiler said nothing at all, which means that the driver had the code in a cache of its own: what it would have
    /// found is unknown.
    pub fn is_silent(&self) -> bool {
        self.info_log.is_empty() && self.error_log.is_empty()
    }

    /// The findings that the author did not accept; `None` where the compiler was silent.
    pub(crate) fn unaccepted(&self, allowed_spill_bytes: u32) -> Option<Vec<JitFinding>> {
        let findings = || self.findings.iter().filter(|finding| finding.exceeds(allowed_spill_bytes)).cloned().collect();
        (!self.is_silent()).then(findings)
    }

    fn new(info_log: String, error_log: String, duration: Duration) -> Self {
        let findings = info_log.lines().chain(error_log.lines()).flat_map(findings_in).collect();
        Self { info_log, error_log, findings, duration }
    }
}

/// A compiled kernel and what was said of it.
#[derive(Debug, Clone)]
pub struct Cubin {
    /// The ELF image.
    pub bytes: Vec<u8>,
    /// The compiler's report.
    pub report: JitReport,
}

/// Compiles PTX for the context's device. `kernel` names it in errors.
///
/// The whole compilation is the driver's, on the calling thread; several threads may compile at once. The driver keeps no copy of
/// its own, so that the log is there every time. The code is compiled as relocatable: see [`has_register_budgets`].
///
/// # Errors
/// [`Error::Compile`] with the log, [`Error::Driver`].
pub fn compile(context: &Context, kernel: &str, ptx: &str, options: CompileOptions) -> Result<Cubin, Error> {
    let api = context.driver().api();
    let (text, name) = (terminated(kernel, ptx)?, terminated(kernel, kernel)?);
    let _current = context.enter()?;
    let started = Instant::now();
    let mut logs = Logs::new();
    let (mut names, mut values) = logs.options(options);
    let mut state: sys::CUlinkState = std::ptr::null_mut();
    // SAFETY: the options are of the kinds that the header gives them, as many as announced; they and the logs outlive the link
    // state, which is destroyed below on every path.
    unsafe { api.cuLinkCreate_v2(OPTION_COUNT as u32, names.as_mut_ptr(), values.as_mut_ptr(), &mut state) }
        .doing(|| format!("starting to compile `{kernel}`"))?;
    let kind = sys::CUjitInputType::CU_JIT_INPUT_PTX;
    let data = text.as_bytes_with_nul();
    let (none, nothing) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: `data` and `name` are NUL-terminated and outlive the call; the driver does not write to `data`.
    let added = unsafe { api.cuLinkAddData_v2(state, kind, data.as_ptr().cast_mut().cast(), data.len(), name.as_ptr(), 0, none, nothing) };
    let mut image: *mut c_void = std::ptr::null_mut();
    let mut image_bytes = 0_usize;
    let linked = added.and_then(|()| {
        // SAFETY: both results outlive the call.
        unsafe { api.cuLinkComplete(state, &mut image, &mut image_bytes) }
    });
    let bytes = match linked {
        // SAFETY: on success the driver hands out that many bytes, which it keeps until the state is destroyed.
        Ok(()) => Ok(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), image_bytes) }.to_vec()),
        Err(failure) => Err(failure),
    };
    // SAFETY: the state is ours; the image was copied.
    let destroyed = unsafe { api.cuLinkDestroy(state) };
    match bytes {
        Err(failure) => Err(logs.refusal(kernel, failure)),
        Ok(bytes) => {
            destroyed.doing(|| format!("finishing the compilation of `{kernel}`"))?;
            Ok(Cubin { bytes, report: logs.report(started.elapsed()) })
        }
    }
}

impl Module {
    /// Compiles and loads PTX in one step. The driver may take a copy from a cache of its own, and then has nothing to say:
    /// then [`JitReport::is_silent`].
    ///
    /// # Errors
    /// As [`compile`].
    pub fn load_ptx(context: &Context, kernel: &str, ptx: &str, options: CompileOptions) -> Result<(Self, JitReport), Error> {
        let text = terminated(kernel, ptx)?;
        let _current = context.enter()?;
        let started = Instant::now();
        let mut logs = Logs::new();
        let (mut names, mut values) = logs.options(options);
        let mut raw: sys::CUmodule = std::ptr::null_mut();
        // SAFETY: the text is NUL-terminated; the options are of the kinds that the header gives them, as many as announced; all of
        // it outlives the call.
        let loaded = unsafe {
            let (count, names, values) = (OPTION_COUNT as u32, names.as_mut_ptr(), values.as_mut_ptr());
            context.driver().api().cuModuleLoadDataEx(&mut raw, text.as_ptr().cast(), count, names, values)
        };
        match loaded {
            Ok(()) => Ok((Self::of(context, raw), logs.report(started.elapsed()))),
            Err(failure) => Err(logs.refusal(kernel, failure)),
        }
    }
}

/// The text as the driver wants it.
fn terminated(kernel: &str, text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::Compile {
        kernel: kernel.to_owned(),
        name: "invalid text".to_owned(),
        log: "the PTX text or the kernel's name holds a NUL byte".to_owned(),
    })
}

/// How many options a compilation is given.
const OPTION_COUNT: usize = 7;

/// The two logs that the driver writes while it compiles.
struct Logs {
    info: Vec<u8>,
    error: Vec<u8>,
}

impl Logs {
    fn new() -> Self {
        Self { info: vec![0; LOG_BYTES], error: vec![0; LOG_BYTES] }
    }

    /// The driver's options, which point into the logs.
    fn options(&mut self, options: CompileOptions) -> ([Jit; OPTION_COUNT], [*mut c_void; OPTION_COUNT]) {
        let number = |value: usize| std::ptr::without_provenance_mut::<c_void>(value);
        let (info, error) = (self.info.as_mut_ptr().cast::<c_void>(), self.error.as_mut_ptr().cast::<c_void>());
        let names = [
            Jit::CU_JIT_INFO_LOG_BUFFER,
            Jit::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            Jit::CU_JIT_ERROR_LOG_BUFFER,
            Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            Jit::CU_JIT_LOG_VERBOSE,
            Jit::CU_JIT_OPTIMIZATION_LEVEL,
            Jit::CU_JIT_GENERATE_LINE_INFO,
        ];
        let (level, lines) = (number(options.optimization_level as usize), number(usize::from(options.line_info)));
        (names, [info, number(LOG_BYTES), error, number(LOG_BYTES), number(1), level, lines])
    }

    fn report(&self, duration: Duration) -> JitReport {
        JitReport::new(log_text(&self.info), log_text(&self.error), duration)
    }

    /// The error of a compilation that failed, with the log that says why.
    fn refusal(&self, kernel: &str, failure: Failure) -> Error {
        let (info, error) = (log_text(&self.info), log_text(&self.error));
        match failure {
            Failure::Status { name, .. } => {
                Error::Compile { kernel: kernel.to_owned(), name, log: if error.is_empty() { info } else { error } }
            }
            missing @ Failure::Missing { .. } => missing.into_error(String::new()),
        }
    }
}

/// The text in a log buffer, up to its first NUL.
fn log_text(buffer: &[u8]) -> String {
    let length = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..length]).trim_end().to_owned()
}

/// What one line of the log says that costs performance: a numbered message, and the sizes of spills and stack frames that
/// are not 0.
fn findings_in(line: &str) -> Vec<JitFinding> {
    let mut found = Vec::new();
    let is_code = |word: &&str| {
        word.len() == 5 && (word.starts_with("C75") || word.starts_with("C76")) && word[1..].bytes().all(|b| b.is_ascii_digit())
    };
    let mut words = line.split(|c: char| !c.is_ascii_alphanumeric());
    if let Some(code) = words.find(is_code) {
        found.push(JitFinding::Message { code: code.to_owned(), line: line.trim().to_owned() });
    }
    let bytes_before = |what: &str| -> u64 {
        line.split(',').filter_map(|part| part.trim().strip_suffix(what)?.trim_end().rsplit(' ').next()?.parse().ok()).next().unwrap_or(0)
    };
    match bytes_before("bytes stack frame") {
        0 => {}
        bytes => found.push(JitFinding::StackFrame { bytes }),
    }
    match (bytes_before("bytes spill stores"), bytes_before("bytes spill loads")) {
        (0, 0) => {}
        (store_bytes, load_bytes) => found.push(JitFinding::Spill { store_bytes, load_bytes }),
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines as ptxas 13.0 prints them.
    const CLEAN: &str = "ptxas info    : Compiling entry function 'gemm' for 'sm_90a'
ptxas info    : Function properties for gemm
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 8 barriers";
    const DIRTY: &str =
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions
ptxas info    : Function properties for gemm
    96 bytes stack frame, 92 bytes spill stores, 128 bytes spill loads
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry";

    #[test]
    fn a_clean_log_has_no_findings() {
        let report = JitReport::new(CLEAN.to_owned(), String::new(), Duration::ZERO);
        assert_eq!(report.findings, []);
    }

    #[test]
    fn serialization_spills_and_ignored_directives_are_found() {
        let report = JitReport::new(DIRTY.to_owned(), "C7602 : does not fit".to_owned(), Duration::ZERO);
        let codes: Vec<_> = report
            .findings
            .iter()
            .filter_map(|finding| match finding {
                JitFinding::Message { code, .. } => Some(code.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(codes, ["C7510", "C7508", "C7602"]);
        assert!(report.findings.contains(&JitFinding::Spill { store_bytes: 92, load_bytes: 128 }));
        assert!(report.findings.contains(&JitFinding::StackFrame { bytes: 96 }));
    }

    #[test]
    fn what_the_author_accepts_is_left_out() {
        let report = JitReport::new(DIRTY.to_owned(), String::new(), Duration::ZERO);
        let kinds = |allowed_spill_bytes| {
            let findings = report.unaccepted(allowed_spill_bytes).expect("the compiler spoke");
            let is_message = |finding: &JitFinding| matches!(finding, JitFinding::Message { .. });
            (findings.iter().filter(|&finding| is_message(finding)).count(), findings.len())
        };
        assert_eq!(kinds(0), (2, 4));
        assert_eq!(kinds(127), (2, 3), "128 bytes are loaded; the stack of 96 is within");
        assert_eq!(kinds(128), (2, 2), "messages are never accepted");
        assert_eq!(JitReport::new(String::new(), String::new(), Duration::ZERO).unaccepted(0), None);
    }

    #[test]
    fn names_that_look_like_numbers_are_not_messages() {
        assert_eq!(findings_in("ptxas info : Compiling entry function 'C7510x_kernel' for 'sm_90a'"), []);
        assert_eq!(findings_in("ptxas info : Used 40 registers, 4 bytes cmem[0]"), []);
    }

    #[test]
    fn log_text_ends_at_the_first_nul() {
        assert_eq!(log_text(b"abc\n\0rest"), "abc");
        assert_eq!(log_text(b"\0"), "");
        assert_eq!(log_text(b"full"), "full");
    }
}
