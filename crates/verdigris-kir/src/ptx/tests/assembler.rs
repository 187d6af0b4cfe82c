//! Finds and runs `ptxas`, for the tests of this crate and of `verdigris-probes`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The assembler, or why there is none.
pub(crate) fn find() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("VERDIGRIS_PTXAS") {
        let path = PathBuf::from(path);
        return if path.is_file() { Ok(path) } else { Err(format!("VERDIGRIS_PTXAS names {}, which is not a file", path.display())) };
    }
    let libraries = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv-ptx/lib");
    let pythons = std::fs::read_dir(&libraries).map_err(|_| "VERDIGRIS_PTXAS is not set and .venv-ptx does not exist".to_string())?;
    pythons
        .flatten()
        .map(|python| python.path().join("site-packages/nvidia/cu13/bin/ptxas"))
        .find(|path| path.is_file())
        .ok_or_else(|| format!("no ptxas under {}", libraries.display()))
}

/// Assembles a text for an architecture; gives what the assembler printed, as an error if it failed.
pub(crate) fn assemble(ptxas: &Path, arch: &str, text: &str) -> Result<String, String> {
    assemble_with(ptxas, arch, text, |_| ()).map(|(said, ())| said)
}

/// The same, with what `look` makes of the file of machine code, which is gone afterwards.
pub(crate) fn assemble_with<R>(ptxas: &Path, arch: &str, text: &str, look: impl FnOnce(&Path) -> R) -> Result<(String, R), String> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let stem = std::env::temp_dir().join(format!("verdigris-ptx-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)));
    let (source, cubin) = (stem.with_extension("ptx"), stem.with_extension("cubin"));
    std::fs::write(&source, text).map_err(|error| error.to_string())?;
    let output = Command::new(ptxas).arg("-v").arg(format!("-arch={arch}")).arg("-o").arg(&cubin).arg(&source).output();
    let looked = output.as_ref().is_ok_and(|output| output.status.success()).then(|| look(&cubin));
    let _ = std::fs::remove_file(&source);
    let _ = std::fs::remove_file(&cubin);
    let output = output.map_err(|error| format!("{}: {error}", ptxas.display()))?;
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    match looked {
        Some(looked) => Ok((said, looked)),
        None => Err(said),
    }
}
