//! Why a model cannot be served, or a service not be started.

use std::net::SocketAddr;

use verdigris::{DType, GraphError};

/// A model that cannot be loaded or warmed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file that cannot be read or written.
    #[error("{file}: {source}")]
    Io {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// A `model.toml` that is not one.
    #[error("{file}: {message}")]
    Manifest {
        /// The file.
        file: String,
        /// What is wrong, and where.
        message: String,
    },
    /// A value of `model.toml` that breaks a rule.
    #[error("model `{model}`: {field} is {value}; {rule}")]
    Field {
        /// The model.
        model: String,
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        rule: &'static str,
    },
    /// A graph file that is no JSON, or a template whose placeholder cannot be filled in.
    #[error("{file}: {message}")]
    Template {
        /// The file.
        file: String,
        /// What is wrong.
        message: String,
    },
    /// A graph that breaks a rule.
    #[error("{file}, for a batch of {batch}: {source}")]
    Graph {
        /// The file, or the graph's name.
        file: String,
        /// The batch size.
        batch: u64,
        /// The rule.
        source: Box<GraphError>,
    },
    /// A name of `model.toml` that no tensor of the graph has in that part.
    #[error("model `{model}`: {role} `{name}`: {fault}; the graph for a batch of {batch} has {known}")]
    Tensor {
        /// The model.
        model: String,
        /// Input, output, scalar or weight.
        role: &'static str,
        /// The name.
        name: String,
        /// What is wrong with it.
        fault: &'static str,
        /// The batch size.
        batch: u64,
        /// The names that there are.
        known: String,
    },
    /// A tensor of the graph that cannot be an input or an output of a served model, or that differs between batch sizes.
    #[error("model `{model}`, batch of {batch}: tensor `{tensor}` is {found}, wanted is {wanted}; {rule}")]
    Shape {
        /// The model.
        model: String,
        /// The batch size.
        batch: u64,
        /// The tensor.
        tensor: String,
        /// What it is.
        found: String,
        /// What it has to be.
        wanted: String,
        /// Why.
        rule: &'static str,
    },
    /// A weights file that is damaged.
    #[error("{file}: {message}")]
    Weights {
        /// The file.
        file: String,
        /// What is wrong with it.
        message: String,
    },
    /// A weight that the file lacks.
    #[error("model `{model}`: tensor `{tensor}` is no input, so it is a weight, and {file} has no tensor `{key}`; it has {known}")]
    MissingWeight {
        /// The model.
        model: String,
        /// The graph's tensor.
        tensor: String,
        /// The name looked for.
        key: String,
        /// The file.
        file: String,
        /// The names that it has.
        known: String,
    },
    /// A weight of another type or shape than the graph's tensor.
    #[error("model `{model}`: weight `{tensor}` is {wanted_dtype} {wanted_dims:?} in the graph and {dtype} {dims:?} in {file}")]
    Weight {
        /// The model.
        model: String,
        /// The graph's tensor.
        tensor: String,
        /// The graph's element type.
        wanted_dtype: DType,
        /// The graph's extents.
        wanted_dims: Vec<u64>,
        /// The file's element type.
        dtype: String,
        /// The file's extents.
        dims: Vec<u64>,
        /// The file.
        file: String,
    },
    /// The device does not take the graph, or lacks memory for it.
    #[error("model `{model}`, batch of {batch}: {source}")]
    Device {
        /// The model.
        model: String,
        /// The batch size.
        batch: u64,
        /// Why.
        source: verdigris::Error,
    },
    /// Somebody ended the warm-up.
    #[error("model `{model}`: the warm-up was ended")]
    Ended {
        /// The model.
        model: String,
    },
    /// A batch of the warm-up failed.
    #[error("model `{model}`, batch of {batch}: the warm-up failed: {message}")]
    Warm {
        /// The model.
        model: String,
        /// The batch size.
        batch: u64,
        /// Why.
        message: String,
    },
    /// Results of one row depend on other rows, so requests of different clients must not share a batch.
    #[error(
        "model `{model}`, batch of {batch}: output `{output}` of row {row} changes with the contents of row {other}; rows of a batch belong \
         to different requests and must not see each other (plan batches of 1 alone: batch_sizes = [1])"
    )]
    CoupledRows {
        /// The model.
        model: String,
        /// The batch size.
        batch: u64,
        /// The output.
        output: String,
        /// The row that changed.
        row: u64,
        /// The row whose contents changed it.
        other: u64,
    },
}

/// A service that cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The address is taken, or not this machine's.
    #[error("cannot listen on {address}: {source}{}", hint(.source))]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The threads of the service cannot be started.
    #[error("the threads of the service cannot be started: {0}")]
    Threads(std::io::Error),
    /// Two models of one name.
    #[error("two models are named `{name}`; the name is the model's address")]
    TwoOfOneName {
        /// The name.
        name: String,
    },
    /// A limit that cannot work.
    #[error("{field} is {value}; {rule}")]
    Limit {
        /// The limit.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it may be.
        rule: &'static str,
    },
    /// The models were given before.
    #[error("the models of this service were given before; start another service for others")]
    ModelsAreThere,
}

fn hint(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            "; another service, or another program, listens there: choose another port, or 0 for any that is free"
        }
        std::io::ErrorKind::PermissionDenied => "; ports below 1024 are for the system: choose a higher one",
        _ => "",
    }
}
