//! The printed text: snapshots of small kernels, and what `ptxas` says to them and to every instruction of the table.
//!
//! `ptxas` is taken from `VERDIGRIS_PTXAS` or from `.venv-ptx` in the workspace root; where there is none, a test says so and passes.
//! `VERDIGRIS_BLESS=1` rewrites the snapshots.

mod assembler;
mod golden;
mod kernels;
mod launches;
mod read_back;
mod snapshots;
mod table;
