//! Which release of NVIDIA's driver this machine runs: CUDA's version is the same for many of them.

use std::ffi::{CStr, c_char, c_uint};
use std::path::Path;

use libloading::Library;

/// Where the kernel's module says so, in containers too.
const VERSION_FILE: &str = "/proc/driver/nvidia/version";

/// Where NVML is, which knows it where that file is not: on Windows, and on Linux within it.
const NVML_LIBRARIES: &[&str] = if cfg!(windows) { &["nvml.dll"] } else { &["libnvidia-ml.so.1"] };

/// The release, as `580.159.04`; `None` where no driver is loaded, or where neither its module nor NVML says.
///
/// ```
/// // A machine without a driver has none, and one with a driver has numbers with points between.
/// let release = verdigris_cuda::release();
/// assert!(release.is_none_or(|release| release.split('.').all(|part| part.parse::<u32>().is_ok())));
/// ```
pub fn release() -> Option<String> {
    release_in(Path::new(VERSION_FILE)).or_else(|| NVML_LIBRARIES.iter().find_map(|name| named(&by_nvml(name)?)))
}

/// What the library of that name says.
fn by_nvml(library: &str) -> Option<String> {
    // SAFETY: loading runs the library's initializers; those of NVML have no precondition.
    let library = unsafe { Library::new(library) }.ok()?;
    // SAFETY: the functions have these types in every NVML 2 and later (`nvml.h`); the library is held until the last call.
    let (init, ask, end) = unsafe {
        (
            library.get::<unsafe extern "C" fn() -> c_uint>(b"nvmlInit_v2\0").ok()?,
            library.get::<unsafe extern "C" fn(*mut c_char, c_uint) -> c_uint>(b"nvmlSystemGetDriverVersion\0").ok()?,
            library.get::<unsafe extern "C" fn() -> c_uint>(b"nvmlShutdown\0").ok()?,
        )
    };
    let mut text = [0_u8; 96];
    // SAFETY: inits are counted by the library, and each is ended; the text has room for as many bytes as it is told.
    let is_told = unsafe {
        init() == 0 && {
            let told = ask(text.as_mut_ptr().cast(), text.len() as c_uint - 1) == 0;
            end();
            told
        }
    };
    if !is_told {
        return None;
    }
    CStr::from_bytes_until_nul(&text).ok()?.to_str().ok().map(str::to_owned)
}

fn release_in(file: &Path) -> Option<String> {
    named(&std::fs::read_to_string(file).ok()?)
}

/// The first word of its first line that is numbers with points between.
fn named(text: &str) -> Option<String> {
    let is_release =
        |word: &&str| word.contains('.') && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
    text.lines().next()?.split_whitespace().find(is_release).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_found_in_what_the_module_says() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep  2 02:26:37 UTC 2026\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)\n";
        assert_eq!((named(closed).as_deref(), named(open).as_deref()), (Some("580.159.04"), Some("570.86.15")));
        assert_eq!((named(""), named("NVRM version: unknown\nGCC version 12.2.0")), (None, None));
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(release_in(&folder.path().join("version")), None);
        assert_eq!((named("580.159.04").as_deref(), by_nvml("no library of this name")), (Some("580.159.04"), None));
    }
}
