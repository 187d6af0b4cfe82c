//! What a tensor is: element formats, exact conversions, layouts.
//!
//! - [`DType`]: the element types, by their short names.
//! - [`num`]: conversions between the small floating-point formats and the host's, exact to the bit.
//! - [`Layout`]: dims and strides, in elements.
//! - [`BindingError`]: why what is bound to a tensor does not suit it.
#![forbid(unsafe_code)]

mod binding;
mod dtype;
pub mod layout;
pub mod num;

pub use binding::{BindingError, BindingRule};
pub use dtype::{DType, UnknownDType};
pub use layout::{Layout, LayoutError, MAX_RANK};
