//! Which release of NVIDIA's driver this machine runs: CUDA's version is the same for many of them.

use std::path::Path;

/// Where the kernel's module says so, in containers too.
const VERSION_FILE: &str = "/proc/driver/nvidia/version";

/// The release, as `580.159.04`; `None` where no driver is loaded, or where it does not say.
///
/// ```
/// // A machine without a driver has none, and one with a driver has numbers with points between.
/// let release = verdigris_cli::driver::release();
/// assert!(release.is_none_or(|release| release.split('.').all(|part| part.parse::<u32>().is_ok())));
/// ```
pub fn release() -> Option<String> {
    release_in(Path::new(VERSION_FILE))
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
    }
}
