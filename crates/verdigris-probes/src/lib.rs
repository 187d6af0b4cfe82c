//! Probes: small kernels that each show one thing of the kernel language, for those who work on it.
//!
//! [`constructs`] shows that the language can say what later families need; [`conformance`] shows what every instruction does, on the
//! interpreter and on a device alike.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod constructs;
