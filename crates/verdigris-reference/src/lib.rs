//! What is right, and how near is near enough.
//!
//! [`graph`] evaluates a graph op by op in plain `f64` loops that share no arithmetic with any engine, together with a bound on the error
//! that the precision of each op allows, carried from op to op ([`tolerance`]). [`run`] does the same for a GEMM problem. [`compare`] holds a
//! result against it. [`cases`] and [`graph_cases`] read the case files, [`fuzz`] makes random graphs, [`crowded`] such as no kernel takes whole, [`judge`] holds an executor against the reference, and [`bench_list`] the problem lists of the benches; [`data`] makes inputs, [`kinds`] says which kinds of them tell something of a problem, and [`masked`] has gradients that are known beforehand.
//!
//! ```
//! use verdigris_graph::{GemmProblem, Problem};
//! use verdigris_reference::{compare, data, run};
//! use verdigris_tensor::DType;
//!
//! let problem = Problem::Gemm(GemmProblem::packed(3, 4, 5, DType::F32, DType::F32)?);
//! let inputs = data::inputs(&problem, data::Distribution::Normal, 1);
//! let expected = run::run(&problem, &inputs, run::Positions::All)?;
//! let before = data::output_buffer(&expected[0], &inputs);
//! let after = expected[0].rounded(&before); // an engine's answer would stand here
//! assert!(compare::compare(&expected[0], &before, &after).passes());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod bench_list;
pub mod cases;
pub mod compare;
pub mod conv_list;
pub mod crowded;
pub mod data;
mod data_graph;
mod data_places;
pub mod far;
pub mod fuzz;
pub mod graph;
pub mod graph_cases;
pub mod judge;
pub mod kinds;
pub mod masked;
pub mod networks;
mod operation;
pub mod ops;
mod philox;
pub mod run;
mod source;
pub mod tolerance;
mod tolerance_pointwise;
