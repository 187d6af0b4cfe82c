//! Errors as Python exceptions, with the same words. The classes are Python's own, in `verdigris/_errors.py`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The exception classes, each named as in Python.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A graph that breaks a rule.
    Graph,
    /// No engine takes a problem under the limits.
    NoEngine,
    /// A name of no engine, or a pin that nothing takes.
    Engine,
    /// What is bound to a plan does not suit it.
    Binding,
    /// The driver, the device, a failed call.
    Device,
    /// Lack of memory.
    OutOfMemory,
    /// A setting without a meaning.
    Config,
    /// What is documented elsewhere and not built here.
    Unsupported,
    /// A gradient that is 0 wherever it exists.
    Constant,
    /// A dim or class that there is none of.
    OutOfRange,
}

impl Kind {
    const fn class(self) -> &'static str {
        match self {
            Kind::Graph => "GraphError",
            Kind::NoEngine => "NoEngineError",
            Kind::Engine => "EngineError",
            Kind::Binding => "BindingError",
            Kind::Device => "DeviceError",
            Kind::OutOfMemory => "OutOfMemoryError",
            Kind::Config => "ConfigError",
            Kind::Unsupported => "UnsupportedError",
            Kind::Constant => "ConstantError",
            Kind::OutOfRange => "OutOfRangeError",
        }
    }
}

/// The exception of that class with these words.
pub(crate) fn raise(kind: Kind, text: impl Into<String>) -> PyErr {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let text = text.into();
    Python::attach(|py| {
        let class = MODULE
            .get_or_try_init(py, || PyModule::import(py, "verdigris._errors").map(Bound::unbind))
            .and_then(|module| module.bind(py).getattr(kind.class()))
            .and_then(|class| Ok(class.cast_into::<PyType>()?));
        match class {
            Ok(class) => PyErr::from_type(class, text),
            Err(error) => error,
        }
    })
}

/// Whose fault it is decides the class.
pub(crate) fn library(error: verdigris::Error) -> PyErr {
    use verdigris::Error as E;
    let kind = match &error {
        error if error.is_lack_of_memory() => Kind::OutOfMemory,
        E::Graph(error) => kind_of(error),
        E::NoEngine(_) => Kind::NoEngine,
        E::UnknownEngine { .. } | E::Pin { .. } => Kind::Engine,
        E::Binding(_) | E::Operand { .. } | E::Cpu(_) | E::TensorBytes { .. } => Kind::Binding,
        E::Config { .. } | E::DeviceName { .. } => Kind::Config,
        _ => Kind::Device,
    };
    raise(kind, error.to_string())
}

/// Of a function's graph, which the library draws: what it lacks is no fault of the caller's.
fn kind_of(error: &verdigris_graph::Error) -> Kind {
    match error {
        verdigris_graph::Error::Gradient { .. } => Kind::Unsupported,
        verdigris_graph::Error::Constant { .. } => Kind::Constant,
        _ => Kind::Graph,
    }
}

pub(crate) fn graph(error: verdigris_graph::Error) -> PyErr {
    raise(Kind::Graph, error.to_string())
}

pub(crate) fn cuda(error: verdigris_cuda::Error) -> PyErr {
    library(error.into())
}
