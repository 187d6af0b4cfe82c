//! The GPU that a command runs on, or why there is none.

use anyhow::Result;
use verdigris::{Config, Error, Handle};

/// Opens the configured device. Where the machine has none, says so in one line (as a JSON object if asked) and gives `None`: a machine
/// without a GPU is no failure.
///
/// # Errors
/// Anything else that keeps the device from being used.
pub fn open(command: &str, config: &Config, json: bool) -> Result<Option<Handle>> {
    match Handle::open(config) {
        Ok(handle) => {
            if let Some(trouble) = handle.cache_trouble() {
                eprintln!("{trouble}");
            }
            if let Some(Err(trouble)) = handle.pack() {
                eprintln!("{trouble}");
            }
            Ok(Some(handle))
        }
        Err(Error::Device(error @ (verdigris_cuda::Error::NoDriver { .. } | verdigris_cuda::Error::NoDevice))) => {
            if json {
                say!("{}", serde_json::json!({ "command": command, "skipped": error.to_string() }));
            } else {
                say!("{command}: skipped: {error}");
            }
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}
