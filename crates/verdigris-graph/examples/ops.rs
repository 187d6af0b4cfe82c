//! Writes what follows from the table of ops: `docs/ops.md` and the builder methods in the Python package's stubs.
#![forbid(unsafe_code)]

use std::path::Path;

use verdigris_graph::spec::{page, stubs};

fn main() -> std::io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::write(root.join("docs/ops.md"), page())?;
    let path = root.join("crates/verdigris-python/python/verdigris/_native.pyi");
    let text = std::fs::read_to_string(&path)?;
    let (Some(begin), Some(end)) = (text.find(BEGIN).map(|at| at + BEGIN.len()), text.find(END)) else {
        return Err(std::io::Error::other(format!("{} has no lines `{}` and `{}`", path.display(), BEGIN.trim(), END.trim())));
    };
    std::fs::write(&path, format!("{}{}{}", &text[..begin], stubs(), &text[end..]))
}

/// The line before the builder methods.
const BEGIN: &str = "    # Ops, from the table in crates/verdigris-graph: `cargo run -p verdigris-graph --example ops`.\n";
/// The line behind them.
const END: &str = "    # What is no op.\n";
