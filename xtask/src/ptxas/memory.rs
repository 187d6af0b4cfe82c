//! What was assembled before and passed, so that a second run costs the changed kernels alone.
//!
//! One file an assembly, named by a hash of everything that decides the outcome: the text, the target, what it is allowed, the
//! assembler's version and flags. Failures are not remembered, for somebody will want to read them again. A file that is not as it was
//! written counts as absent, and so does one that cannot be.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{Assembly, EntryReport, FLAGS, Outcome, Toolchain};

/// Files that no run has looked at for so long are taken away.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(14 * 24 * 60 * 60);
const HASH_BYTES: usize = 32;

/// A folder of assemblies that passed. Runs at the same time may share it.
#[derive(Debug)]
pub(crate) struct Memory {
    folder: PathBuf,
}

/// Of everything that decides the outcome of an assembly.
pub(super) fn hash(toolchain: &Toolchain, assembly: &Assembly) -> blake3::Hash {
    // A pattern without `..`: a new field has to be thought of here. The name only labels the outcome.
    let Assembly { name: _, target, ptx, allow_spill_bytes, max_registers, demands } = assembly;
    let allowed = format!("{allow_spill_bytes} {max_registers:?} {demands:?}");
    let mut hasher = blake3::Hasher::new_derive_key("verdigris xtask assembly 2");
    for text in [toolchain.version(), &FLAGS.join(" "), target, &allowed, ptx] {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    hasher.finalize()
}

#[derive(Serialize, Deserialize)]
struct Remembered {
    assemble_ms: u64,
    entries: Vec<EntryReport>,
    cubin_bytes: usize,
}

impl Memory {
    /// The memory under Cargo's target folder.
    pub(crate) fn of_workspace(root: &Path) -> Result<Self> {
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |folder| root.join(folder));
        Self::open(&target.join("ptxas"))
    }

    /// The memory in that folder, made if it is absent, without what nobody looked at for two weeks.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        for file in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?.flatten() {
            let modified = file.metadata().and_then(|metadata| metadata.modified());
            let age = modified.ok().and_then(|time| SystemTime::now().duration_since(time).ok());
            if age.is_some_and(|age| age > FORGOTTEN_AFTER) {
                // Another run may have been faster.
                let _ = fs::remove_file(file.path());
            }
        }
        Ok(Self { folder: folder.to_path_buf() })
    }

    fn path(&self, toolchain: &Toolchain, assembly: &Assembly) -> PathBuf {
        self.folder.join(hash(toolchain, assembly).to_hex().as_str())
    }

    /// The outcome of an assembly that passed before.
    pub(crate) fn recall(&self, toolchain: &Toolchain, assembly: &Assembly) -> Option<Outcome> {
        let path = self.path(toolchain, assembly);
        let file = fs::read(&path).ok()?;
        let (hash, content) = file.split_at_checked(HASH_BYTES)?;
        if blake3::hash(content).as_bytes() != hash {
            return None;
        }
        let end = content.iter().position(|byte| *byte == b'\n')?;
        let Remembered { assemble_ms, entries, cubin_bytes } = serde_json::from_slice(&content[..end]).ok()?;
        let cubin = content.get(end + 1..).filter(|cubin| cubin.len() == cubin_bytes)?.to_vec();
        // It was looked at; where that cannot be noted, it is only forgotten sooner.
        let _ = fs::File::options().write(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        let (name, target) = (assembly.name.clone(), assembly.target.clone());
        Some(Outcome { name, target, assemble_ms, entries, remembered: true, failures: Vec::new(), cubin: Some(cubin) })
    }

    /// Remembers an outcome if it passed and is new. That it cannot be written costs time in the next run and nothing else.
    pub(crate) fn keep(&self, toolchain: &Toolchain, assembly: &Assembly, outcome: &Outcome) {
        let Some(cubin) = outcome.cubin.as_ref().filter(|_| outcome.passed() && !outcome.remembered) else { return };
        let head = Remembered { assemble_ms: outcome.assemble_ms, entries: outcome.entries.clone(), cubin_bytes: cubin.len() };
        let Ok(mut content) = serde_json::to_vec(&head) else { return };
        content.push(b'\n');
        content.extend_from_slice(cubin);
        let write = || -> std::io::Result<()> {
            let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
            file.write_all(blake3::hash(&content).as_bytes())?;
            file.write_all(&content)?;
            file.persist(self.path(toolchain, assembly))?;
            Ok(())
        };
        let _ = write();
    }
}
