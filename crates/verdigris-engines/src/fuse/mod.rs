//! Fusion: one pointwise language, in which everything is said that stands in front of, behind or between the large operations.
//!
//! **Steps.** A list of `steps::Step`s is straight-line code at one element. Each step gives a value that later ones name by its position:
//!
//! ```text
//! load      an element of an operand                  unary, binary, ternary   a function of earlier values
//! given     a sum, an activation, a reduced value     round                    as if stored and read again
//! scalar    a factor from the host                    store                    rounded, to an operand
//! index     a coordinate
//! ```
//!
//! A step as part of a spec says what shapes code, so that a kernel is the same for all strides and factors; strides, factors of the host
//! and attributes of functions are arguments. Steps come from a problem's chain or from its epilogue's list (`steps::Steps`), in which each
//! step changes one value.
//!
//! **Functions** stand once, in `functions`, and all places take the same; `math` and `angle` have what needs a series. Which of them a
//! product's epilogue is asked for is said by the graph (`in_epilogue`): those that take hundreds of instructions are a map's.
//!
//! **Types.** Functions compute in f32 or f64 ([`compute::Compute`]): steps of a chain in f64 where an operand is f64, else in f32; those of an
//! epilogue in its one type. A loaded element is converted where it is used and stays as its bits till then (`value::AnyVal`), and what is
//! only moved keeps them all. Rounding points are steps of their own.
//!
//! **Operands** are reached by whoever runs the steps: `steps::Code` is the one evaluator, and asks its place for loads and stores.
//!
//! | place | operands | handled at once |
//! |---|---|---|
//! | `chain`: a point of a space (maps, and what surrounds reductions) | views with windows, by the point's index | a vector of neighbours, loaded beforehand |
//! | `epilogue`: an element of a result, and those to the right of it | matrices by row and column, tensors by pixel and channel | one or two columns |
//! | `prologue`: an activation | vectors over channels | one |
//!
//! How an operand runs along the innermost index (columns, channels, the last dim) is its `operand::Walk`: neighbouring elements, one for all, or
//! a stride. Whoever brings another place (a row of a softmax, a fragment) implements `steps::Operands` for it.
//!
//! Beside the language stand `strided` (operands that kernels read element by element), `element` (what is multiplied and summed without
//! tensor cores), `lanes` (values combined over lanes), `peers` (what the CTAs of a cluster tell each other) and `formats` (what tensor cores and tensor maps call element types).

mod angle;
pub(crate) mod chain;
pub mod compute;
pub(crate) mod element;
pub mod epilogue;
pub(crate) mod formats;
pub(crate) mod functions;
pub(crate) mod lanes;
pub(crate) mod math;
pub(crate) mod operand;
pub(crate) mod peers;
pub(crate) mod philox;
pub(crate) mod prologue;
pub(crate) mod steps;
pub(crate) mod strided;
pub(crate) mod value;
