//! Everything that the environment decides, in one table; no other file of the project reads it.
//!
//! ```
//! use verdigris::Config;
//! use verdigris::config::{VARIABLES, Variable};
//!
//! let names: Vec<&str> = VARIABLES.iter().map(|Variable { name, .. }| *name).collect();
//! assert!(names.contains(&"VERDIGRIS_CACHE"));
//! // A caller may decide in the place of the environment: here, that nothing is kept on disk.
//! let config = Config { cache: None, plans: None, ..Config::from_environment()? };
//! assert!(config.cache.is_none());
//! # Ok::<(), verdigris::Error>(())
//! ```

use std::path::PathBuf;

use crate::error::Error;

/// A variable of the environment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What it decides.
    pub meaning: &'static str,
    /// What holds without it.
    pub default: &'static str,
}

/// Every variable that is read.
pub const VARIABLES: &[Variable] = &[
    Variable { name: "VERDIGRIS_DEVICE", meaning: "number of the device, in the driver's order", default: "0" },
    Variable {
        name: "VERDIGRIS_CACHE",
        meaning: "folder of compiled kernels; `off` keeps none",
        default: "verdigris/kernels in the user's cache folder (XDG_CACHE_HOME, else .cache in HOME; LOCALAPPDATA on Windows)",
    },
    Variable {
        name: "VERDIGRIS_PACK",
        meaning: "file of kernels made beforehand (`cargo xtask pack`); `off` uses none, and one that is not there is passed over",
        default: "verdigris/verdigris-sm_90a.pack in the user's cache folder",
    },
    Variable {
        name: "VERDIGRIS_PLANS",
        meaning: "file of measured choices; `off` remembers them while the process lives",
        default: "verdigris/plans.txt in the user's cache folder",
    },
    Variable {
        name: "VERDIGRIS_SHIPPED",
        meaning: "`off` leaves out the choices that ship with the library: every plan is by estimate or measured here",
        default: "on",
    },
    Variable {
        name: "VERDIGRIS_CUBLASLT",
        meaning: "path of libcublasLt.so, which benches compare with",
        default: "what the system's loader finds",
    },
    Variable { name: "VERDIGRIS_PTXAS", meaning: "path of ptxas, for resource reports without a GPU", default: "what PATH finds" },
];

/// What the environment, or a caller in its place, decides.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Number of the device, in the driver's order.
    pub device: u32,
    /// Folder of compiled kernels; `None` keeps none.
    pub cache: Option<PathBuf>,
    /// File of kernels made beforehand, which need no compiler; passed over while it is not there. `None` uses none.
    pub pack: Option<PathBuf>,
    /// File of measured choices; `None` remembers them while the process lives.
    pub plans: Option<PathBuf>,
    /// Whether the choices that ship with the library are asked where the user's file has none.
    pub shipped: bool,
    /// Path of cuBLASLt, where the system's loader would not find it.
    pub cublas_lt: Option<PathBuf>,
    /// Path of the offline assembler; `None` where there is none.
    pub ptxas: Option<PathBuf>,
}

impl Default for Config {
    /// The first device, no files, and the choices that ship.
    fn default() -> Config {
        Config { device: 0, cache: None, pack: None, plans: None, shipped: true, cublas_lt: None, ptxas: None }
    }
}

impl Config {
    /// Reads the table of [`VARIABLES`].
    ///
    /// # Errors
    /// [`Error::Config`] for a value without a meaning.
    pub fn from_environment() -> Result<Config, Error> {
        Config::from(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from(read: impl Fn(&str) -> Option<std::ffi::OsString>) -> Result<Config, Error> {
        let device = match read("VERDIGRIS_DEVICE") {
            None => 0,
            Some(text) => text.to_str().and_then(|text| text.trim().parse().ok()).ok_or_else(|| Error::Config {
                variable: "VERDIGRIS_DEVICE",
                value: text.to_string_lossy().into_owned(),
                rule: "a device is named by its number, counted from 0",
            })?,
        };
        let base = if cfg!(windows) {
            read("LOCALAPPDATA").map(PathBuf::from)
        } else {
            let named = read("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
            named.or_else(|| read("HOME").map(|home| PathBuf::from(home).join(".cache")))
        };
        let place = |variable: &str, inside: &str| match read(variable) {
            Some(text) if text == "off" => None,
            Some(text) => Some(PathBuf::from(text)),
            None => base.as_ref().map(|base| base.join("verdigris").join(inside)),
        };
        let cache = place("VERDIGRIS_CACHE", "kernels");
        let pack = place("VERDIGRIS_PACK", "verdigris-sm_90a.pack");
        let plans = place("VERDIGRIS_PLANS", "plans.txt");
        let ptxas = read("VERDIGRIS_PTXAS").map(PathBuf::from).or_else(|| {
            let name = if cfg!(windows) { "ptxas.exe" } else { "ptxas" };
            let path = read("PATH")?;
            std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
        });
        let shipped = match read("VERDIGRIS_SHIPPED") {
            None => true,
            Some(text) if text == "on" => true,
            Some(text) if text == "off" => false,
            Some(text) => {
                return Err(Error::Config {
                    variable: "VERDIGRIS_SHIPPED",
                    value: text.to_string_lossy().into_owned(),
                    rule: "the choices that ship are `on` or `off`",
                });
            }
        };
        Ok(Config { device, cache, pack, plans, shipped, cublas_lt: read("VERDIGRIS_CUBLASLT").map(PathBuf::from), ptxas })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(values: &[(&str, &str)]) -> Result<Config, Error> {
        Config::from(|name| values.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn nothing_set_gives_the_defaults() {
        let config = from(&[]).expect("no value is wrong");
        assert_eq!((config.device, config.cublas_lt, config.ptxas), (0, None, None));
        assert_eq!((config.cache, config.pack, config.plans), (None, None, None), "without a home there is no folder");
    }

    #[test]
    #[cfg(not(windows))]
    fn the_cache_is_where_the_user_wants_it() {
        let cache = |values: &[(&str, &str)]| from(values).expect("reads").cache;
        assert_eq!(cache(&[("HOME", "/h")]), Some(PathBuf::from("/h/.cache/verdigris/kernels")));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]), Some(PathBuf::from("/c/verdigris/kernels")));
        assert_eq!(cache(&[("HOME", "/h"), ("VERDIGRIS_CACHE", "/k")]), Some(PathBuf::from("/k")));
        assert_eq!(cache(&[("HOME", "/h"), ("VERDIGRIS_CACHE", "off")]), None);
    }

    #[test]
    #[cfg(not(windows))]
    fn the_pack_is_beside_the_cache_unless_named() {
        let pack = |values: &[(&str, &str)]| from(values).expect("reads").pack;
        assert_eq!(pack(&[("HOME", "/h")]), Some(PathBuf::from("/h/.cache/verdigris/verdigris-sm_90a.pack")));
        assert_eq!(pack(&[("HOME", "/h"), ("VERDIGRIS_CACHE", "off")]), Some(PathBuf::from("/h/.cache/verdigris/verdigris-sm_90a.pack")));
        assert_eq!(pack(&[("HOME", "/h"), ("VERDIGRIS_PACK", "/p/a.pack")]), Some(PathBuf::from("/p/a.pack")));
        assert_eq!(pack(&[("HOME", "/h"), ("VERDIGRIS_PACK", "off")]), None);
    }

    #[test]
    fn what_ships_is_on_or_off() {
        let shipped = |value| from(&[("VERDIGRIS_SHIPPED", value)]).map(|config| config.shipped);
        assert!(from(&[]).expect("no value is wrong").shipped && Config::default().shipped);
        assert_eq!((shipped("on").ok(), shipped("off").ok()), (Some(true), Some(false)));
        let error = shipped("no").expect_err("neither").to_string();
        assert!(error.contains("VERDIGRIS_SHIPPED is `no`"), "{error}");
    }

    #[test]
    fn a_device_is_a_number() {
        assert_eq!(from(&[("VERDIGRIS_DEVICE", "3")]).expect("a number").device, 3);
        let error = from(&[("VERDIGRIS_DEVICE", "H200")]).expect_err("a name").to_string();
        assert!(error.contains("VERDIGRIS_DEVICE is `H200`"), "{error}");
    }
}
