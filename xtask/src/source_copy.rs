//! A copy of the sources with something changed in it, and cargo there.
//!
//! The copy shares the folder in which cargo builds with the sources that it is of, and so what that has of other people's crates. Its own crates are others
//! there for the way in which they are compiled: cargo names what it builds by path below the root and by how it is compiled, and would take the one for
//! the other. Programs go elsewhere, and so does each kind of copy by its number of codegen units.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tree::Tree;

/// How a copy is built.
pub(crate) struct SourceCopy {
    /// Where the sources of the copy stand.
    pub(crate) folder: PathBuf,
    programs: PathBuf,
    shared: PathBuf,
    config: Vec<String>,
}

impl SourceCopy {
    /// A copy below `target/NAME`, with so many codegen units, which no other kind of copy has, and nor do the sources. Crates other than `hot` are compiled without optimization.
    pub(crate) fn new(root: &Path, tree: &Tree, name: &str, units: u32, hot: &[&str]) -> Self {
        let members = tree.files().filter_map(|(path, _)| path.strip_prefix("crates/")?.strip_suffix("/Cargo.toml"));
        let config = members.flat_map(|member| {
            let units = format!("profile.dev.package.{member}.codegen-units={units}");
            let level = (!hot.contains(&member)).then(|| format!("profile.dev.package.{member}.opt-level=0"));
            std::iter::once(units).chain(level)
        });
        let folder = root.join("target").join(name);
        Self {
            config: config.collect(),
            shared: std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |shared| root.join(shared)),
            programs: folder.join("programs"),
            folder: folder.join("tree"),
        }
    }

    /// Cargo with these arguments, in the copy.
    pub(crate) fn cargo<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Command {
        let mut words = arguments.into_iter();
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // Behind the command's name, for what follows may be arguments of a test program.
        command
            .args(words.by_ref().take(1))
            .args(["--quiet", "--locked"])
            .args(self.config.iter().flat_map(|config| ["--config", config]))
            .args(words)
            .env("CARGO_BUILD_BUILD_DIR", &self.shared)
            .env("CARGO_TARGET_DIR", &self.programs)
            .env("CARGO_INCREMENTAL", std::env::var_os("CARGO_INCREMENTAL").unwrap_or_else(|| "1".into()))
            .current_dir(&self.folder);
        command
    }
}
