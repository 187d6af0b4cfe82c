//! The kernel language of Verdigris: build a kernel in Rust, verify it, print it as PTX, interpret it on the CPU.
//!
//! A kernel is a pure function of its spec. Building it ([`face::build`]) records a tree of structured blocks ([`ir::KernelBody`]);
//! [`verify()`](verify::verify) turns that into a [`Verified`](verify::Verified) body, the only thing that can be
//! printed ([`ptx::print`]) or interpreted ([`interp`]).
//!
//! The rule of the language on one line: **an operator is pure, a verb has an effect, a Rust keyword happens while building.**
#![forbid(unsafe_code)]

pub mod execution;
pub mod face;
pub mod inst;
mod inst_legal;
#[doc(hidden)]
pub mod inst_samples;
pub mod interp;
pub mod ir;
pub mod params;
pub mod program;
pub mod ptx;
pub mod text;
pub mod tile;
pub mod verify;
