//! PTX out: readable text with the kernel's own names, and line information that leads back to its Rust source.
//!
//! [`print`](print()) is a pure function of a verified kernel and a version of the language ([`Isa`]); the same kernel gives the same text.
//!
//! What the text looks like:
//! - Every register is declared as bits of its width, since an instruction of any type takes bits of its width; its name tells its type
//!   (`%r` integer, `%f` f32, `%h` 16 bits, `%rd` and `%fd` 64 bits, `%p` predicate) and its number is the one of the text form.
//! - Constants stand in the instruction where PTX takes them there, and else in registers `%k…` that are set at the entry.
//! - Shared memory is one dynamic array, `dynamic_shared`; pieces are offsets into it.
//! - A position inside a tile function is a `.loc … inlined_at …` chain that ends at the kernel's own line.

mod arch;
mod print;
mod read_back;
#[cfg(test)]
mod tests;

pub use arch::Isa;
pub use print::{entry_name, print};
pub use read_back::{Compared, Difference, read_back};
