//! Writes `docs/metrics.md` from the table of metrics.

fn main() -> std::io::Result<()> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    std::fs::write(path, verdigris::observe::table::page())
}
