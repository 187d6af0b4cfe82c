//! Fusion: one pointwise language, in which the steps of maps, prologues and epilogues are said.
//!
//! Arithmetic: `compute` and `math` (functions in f32 and f64), `element` (what is multiplied and summed without tensor cores), `lanes`
//! (values combined over lanes), `formats` (the names of element types). Steps: `steps` and `chain` (of a map), `strided` (operands over any
//! space), `epilogue` and `conv_epilogue` (behind a product, placed by row and column or by pixel), `prologue` (in front of one), `operand`
//! (what both read).

pub(crate) mod chain;
pub mod compute;
pub(crate) mod conv_epilogue;
pub(crate) mod element;
pub mod epilogue;
pub(crate) mod formats;
pub(crate) mod lanes;
pub mod math;
pub(crate) mod operand;
pub(crate) mod prologue;
pub(crate) mod steps;
pub(crate) mod strided;
