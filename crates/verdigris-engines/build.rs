//! Hashes the sources that build and print kernels, for the key under which compiled kernels are kept: a cubin of another revision is
//! then not found, instead of being served for code that has changed since.
//!
//! What cannot shape a kernel's text does not count: comments, white space, unit tests, and of the kernel language the interpreter, the
//! verifier and the reader of its text; nor does the cost model. The line numbers that a profiler reads from a kept cubin may therefore be those of an earlier revision.

#[path = "build/essence.rs"]
mod essence;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Beside the kernels' own sources, the language that prints them. A package from a registry has no such folder beside it; there the
/// version numbers, which the key's spec names do not change without, are all there is.
const FOLDERS: [&str; 2] = ["src", "../verdigris-kir/src"];

/// What runs, judges or tries kernels, and does not make them: folders and files of these names, and all files of unit tests.
const APART: [&str; 9] = ["cost", "interp", "interpret.rs", "inst_samples.rs", "program.rs", "read_back", "tests", "text.rs", "verify"];

fn main() -> io::Result<()> {
    let mut hash = Hash::new();
    hash.write(env!("CARGO_PKG_VERSION").as_bytes());
    for folder in FOLDERS {
        println!("cargo::rerun-if-changed={folder}");
        let mut files = Vec::new();
        if Path::new(folder).is_dir() {
            list(Path::new(folder), &mut files)?;
        }
        files.sort();
        for file in files {
            hash.write(file.to_string_lossy().as_bytes());
            hash.write(essence::essence(&fs::read_to_string(&file)?).as_bytes());
        }
    }
    println!("cargo::rustc-env=VERDIGRIS_SOURCE_HASH={}", hash.hex());
    Ok(())
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        if APART.iter().any(|apart| name == *apart) || name == "tests.rs" {
            continue;
        }
        if path.is_dir() {
            list(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

/// Four FNV-1a hashes that start apart. Nobody attacks this one; it only has to tell revisions apart.
struct Hash([u64; 4]);

impl Hash {
    fn new() -> Hash {
        Hash([0xcbf2_9ce4_8422_2325, 0x9ae1_6a3b_2f90_404f, 0x6c62_272e_07bb_0142, 0x2545_f491_4f6c_dd1d])
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            for (lane, state) in self.0.iter_mut().enumerate() {
                *state = (*state ^ (u64::from(*byte) << (8 * lane))).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
    }

    fn hex(&self) -> String {
        self.0.iter().map(|state| format!("{state:016x}")).collect()
    }
}
