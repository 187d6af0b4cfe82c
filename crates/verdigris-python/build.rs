//! Hashes all sources that the native module is made of, so that a record of the bench says what was measured.
//!
//! `verdigris_engines::SOURCE_HASH` is the key of kernels and leaves out what cannot shape their text. A measured time depends on more: the cost
//! model, the choice, the host's work of a call. Here every byte counts, comments too, so that equal hashes mean equal sources.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The crates that are linked into the module, as folders beside this one.
const CRATES: [&str; 9] = [
    "verdigris",
    "verdigris-cpu",
    "verdigris-cuda",
    "verdigris-engines",
    "verdigris-graph",
    "verdigris-kir",
    "verdigris-python",
    "verdigris-telemetry",
    "verdigris-tensor",
];

/// What of a crate counts: sources, build scripts, and the choices that ship.
const PARTS: [&str; 5] = ["Cargo.toml", "build", "build.rs", "src", "tuned"];

fn main() -> io::Result<()> {
    let mut files = vec![PathBuf::from("../../Cargo.lock"), PathBuf::from("../../Cargo.toml")];
    for path in CRATES.iter().flat_map(|name| PARTS.map(|part| Path::new("..").join(name).join(part))) {
        list(&path, &mut files)?;
    }
    files.sort();
    let mut hash = blake3::Hasher::new();
    for file in files.iter().filter(|file| file.is_file()) {
        println!("cargo::rerun-if-changed={}", file.display());
        let (name, bytes) = (file.to_string_lossy().replace('\\', "/"), fs::read(file)?);
        // Lengths in front, so that no byte of one file can be taken for one of the next.
        for part in [name.as_bytes(), &bytes] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    println!("cargo::rustc-env=VERDIGRIS_BUILD_HASH={}", hash.finalize().to_hex());
    Ok(())
}

/// Adds the file, or all files of the folder. A folder is watched itself as well, for files that come and go.
fn list(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if path.is_file() {
        files.push(path.to_owned());
    } else if path.is_dir() {
        println!("cargo::rerun-if-changed={}", path.display());
        for entry in fs::read_dir(path)? {
            list(&entry?.path(), files)?;
        }
    }
    Ok(())
}
