//! A second reader: printed text read back into the table's instructions, and compared with the kernel that it was printed from.
//!
//! The printer and the table's templates decide what a device runs; the verifier and the interpreter judge the kernel before. This module
//! closes the gap without a device. It knows PTX by the grammar of the manual, and nothing of how the printer works. It holds each line of
//! a text against its instruction: operation with all attributes, registers and constants in their order, guard and sense. Branches must lead
//! where the blocks of the kernel say, and each warp into its role; parameters, sizes and declarations must be the kernel's.
//!
//! What it takes for granted is what the head of [`super`] says of the text: the number in a register's name is the kernel's. What it does
//! not look at are comments and line information. What PTX itself does not tell apart, such as the type of bits that are stored, stands in
//! one place, `untold`.
//!
//! It does not say that the table means what the interpreter does: for that an instruction runs on both (`workshop check conformance`).

mod module;
mod op;
mod statement;
mod untold;
mod walk;

use super::Isa;
use crate::ir::KernelBody;
use std::fmt;

/// Where a text does not say what its kernel says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The line of the text, from 1.
    pub line: u32,
    /// The line as it stands.
    pub text: String,
    /// What the kernel has there, with its position in the source where it has one.
    pub kernel: String,
    /// What does not agree.
    pub rule: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: the text says `{}`, the kernel {}: {}", self.line, self.text, self.kernel, self.rule)
    }
}

impl std::error::Error for Difference {}

/// How much was compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Instructions of the kernel, each found in the text.
    pub instructions: usize,
    /// Branches, with those into roles.
    pub branches: usize,
}

/// Reads a printed text and compares it with the kernel that it was printed from, for a driver that reads `isa`.
///
/// # Errors
/// The first difference.
pub fn read_back(kernel: &KernelBody, text: &str, isa: Isa) -> Result<Compared, Difference> {
    let found = module::read(text).map_err(|(line, rule)| (line, "is another".to_string(), format!("the text is malformed: {rule}")));
    let found = found.and_then(|module| walk::compare(kernel, &module, isa));
    found.map_err(|(line, kernel, rule)| {
        let text = text.lines().nth(line.saturating_sub(1) as usize).unwrap_or_default().trim().to_string();
        Difference { line, text, kernel, rule }
    })
}
