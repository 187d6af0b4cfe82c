//! NVIDIA's assembler, from the Python package index: no CUDA toolkit and no GPU is needed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The folder of the private virtual environment, in the root of the workspace (and in `.gitignore`).
const FOLDER: &str = ".venv-ptx";

/// Pinned, so that a register count means the same everywhere. The assembler is of the 13.0 line, like
/// the oldest driver that we support; the two readers of binaries may be newer.
const PACKAGES: [&str; 3] = ["nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-nvdisasm==13.2.86", "nvidia-cuda-cuobjdump==13.2.86"];

/// What `ptxas --version` says of the pinned package.
const VERSION: &str = "V13.0.88";

/// An installed assembler.
#[derive(Debug)]
pub(crate) struct Toolchain {
    ptxas: PathBuf,
    version: String,
}

impl Toolchain {
    /// An assembler that the caller names. Its version is not judged: the figures are the caller's.
    pub(crate) fn at(ptxas: &Path) -> Result<Self> {
        if !ptxas.is_file() {
            bail!("no assembler at {}", ptxas.display());
        }
        Ok(Self {
            ptxas: ptxas.to_path_buf(),
            version: version(ptxas).with_context(|| format!("asking {} for its version", ptxas.display()))?,
        })
    }

    /// One that is never run.
    #[cfg(test)]
    pub(crate) fn named(version: &str) -> Self {
        Self { ptxas: PathBuf::new(), version: version.to_owned() }
    }

    /// The pinned assembler, if it is installed under `root` and is the pinned version.
    pub(crate) fn installed(root: &Path) -> Option<Self> {
        let ptxas = find(root)?;
        let version = version(&ptxas).ok()?;
        version.contains(VERSION).then_some(Self { ptxas, version })
    }

    /// The pinned assembler, installed first if it is absent (some 45 MB from the package index).
    pub(crate) fn ensure(root: &Path) -> Result<Self> {
        if let Some(toolchain) = Self::installed(root) {
            return Ok(toolchain);
        }
        let folder = root.join(FOLDER);
        eprintln!("installing {} into {FOLDER}", PACKAGES.join(", "));
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
        run(Command::new(folder.join("bin/python")).args(["-m", "pip", "install", "--quiet", "--no-deps"]).args(PACKAGES))?;
        Self::installed(root).with_context(|| format!("the packages are installed, but {FOLDER} holds no ptxas {VERSION}"))
    }

    /// What it says of its version: with the text, all that decides what it makes.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Whether it is of the pinned version.
    pub(crate) fn is_pinned(&self) -> bool {
        self.version.contains(VERSION)
    }

    /// The assembler's path.
    pub(crate) fn ptxas(&self) -> &Path {
        &self.ptxas
    }
}

/// `.venv-ptx/lib/python3.*/site-packages/nvidia/cu13/bin/ptxas`, whatever the Python.
fn find(root: &Path) -> Option<PathBuf> {
    let lib = root.join(FOLDER).join("lib");
    for entry in std::fs::read_dir(lib).ok()?.flatten() {
        let ptxas = entry.path().join("site-packages/nvidia/cu13/bin/ptxas");
        if ptxas.is_file() {
            return Some(ptxas);
        }
    }
    None
}

fn version(ptxas: &Path) -> Result<String> {
    Ok(String::from_utf8_lossy(&Command::new(ptxas).arg("--version").output()?.stdout).into_owned())
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("running {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_assembler_is_said() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        assert!(Toolchain::installed(folder.path()).is_none());
        let error = Toolchain::at(&folder.path().join("ptxas")).expect_err("nothing is there");
        assert!(error.to_string().contains("no assembler at"), "{error}");
    }
}
