//! What methods of a graph are given: tensors by their uids, and numbers and words as the graph's types.

use pyo3::prelude::*;
use verdigris_graph::{
    Conv, ConvDirection, CrossEntropySpec, HostScalar, LossReduction, NormKind, NormSpec, OperandScale, Precision, RandomState, Real,
};
use verdigris_tensor::{DType, Layout};

use crate::errors::{Kind, graph as refuse, raise};
use crate::policy::by_name;

/// A tensor of a graph: what builder methods give and take.
#[pyclass(frozen, eq, hash, from_py_object, module = "verdigris")]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Uid(pub(crate) verdigris_graph::Uid);

#[pymethods]
impl Uid {
    #[new]
    fn new(number: i64) -> Uid {
        Uid(verdigris_graph::Uid(number))
    }

    /// Its number in the graph.
    #[getter]
    fn number(&self) -> i64 {
        self.0.0
    }

    fn __int__(&self) -> i64 {
        self.0.0
    }

    fn __repr__(&self) -> String {
        format!("Uid({})", self.0.0)
    }
}

pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    name.parse().map_err(|_| {
        let known = DType::ALL.iter().filter(|dtype| dtype.is_storage()).map(|dtype| dtype.name()).collect::<Vec<_>>().join(" ");
        raise(Kind::Graph, format!("`{name}` is no element type; they are {known}"))
    })
}

pub(crate) fn layout(tensor: &str, dims: &[u64], strides: Option<&[u64]>) -> PyResult<Layout> {
    let made = match strides {
        None => Layout::row_major(dims),
        Some(strides) => Layout::new(dims, strides),
    };
    made.map_err(|source| refuse(verdigris_graph::Error::Layout { tensor: tensor.to_owned(), source }))
}

/// A factor: a number, or a host scalar's uid.
pub(crate) fn factor(value: &Bound<'_, PyAny>) -> PyResult<HostScalar<verdigris_graph::Uid>> {
    match value.cast::<Uid>() {
        Ok(uid) => Ok(HostScalar::Bound(uid.get().0)),
        Err(_) => Ok(HostScalar::Fixed(Real(value.extract()?))),
    }
}

/// A number for every spatial dim, or one for each.
#[derive(FromPyObject)]
pub(crate) enum Each {
    One(u64),
    List(Vec<u64>),
}

impl Each {
    pub(crate) fn list(self, spatial: usize) -> Vec<u64> {
        match self {
            Each::One(value) => vec![value; spatial],
            Each::List(list) => list,
        }
    }
}

/// The attributes that the three directions share.
#[expect(clippy::too_many_arguments, reason = "keywords of Python methods")]
pub(crate) fn conv(
    x: Uid,
    w: Uid,
    y: Uid,
    spatial: usize,
    stride: Each,
    padding: Each,
    padding_after: Option<Each>,
    dilation: Each,
    groups: u64,
    flip: bool,
    precision: Precision,
) -> Conv {
    let pads_before = padding.list(spatial);
    Conv {
        pads_after: padding_after.map_or_else(|| pads_before.clone(), |pads| pads.list(spatial)),
        pads_before,
        strides: stride.list(spatial),
        dilations: dilation.list(spatial),
        groups,
        mode: if flip { verdigris_graph::ConvMode::Convolution } else { verdigris_graph::ConvMode::CrossCorrelation },
        ..Conv::new(ConvDirection::Fprop, x.0, w.0, y.0, spatial, precision)
    }
}

pub(crate) fn norm_spec(kind: &str, axes: Vec<u32>, eps: f64, groups: u64, zero_centred: bool) -> PyResult<NormSpec> {
    let kind = match kind {
        "layer" => NormKind::Layer,
        "rms" => NormKind::Rms,
        other => return Err(raise(Kind::Graph, format!("the kind of norm is `{other}`; it is `layer` or `rms`"))),
    };
    Ok(NormSpec { kind, axes, groups, eps: Real(eps), zero_centred })
}

pub(crate) fn loss_spec(axis: u32, label_smoothing: f64, ignore_index: Option<i64>, reduction: &str) -> PyResult<CrossEntropySpec> {
    let reduction: LossReduction = by_name("reduction", reduction)?;
    Ok(CrossEntropySpec { axis, label_smoothing: Real(label_smoothing), ignore_index, reduction })
}

/// An operand that may be left out.
pub(crate) fn of(uid: Option<Uid>) -> Option<verdigris_graph::Uid> {
    uid.map(|uid| uid.0)
}

/// In memory, or by value where there is an offset.
pub(crate) fn random_state(state: Uid, offset: Option<Uid>) -> RandomState {
    RandomState { state: state.0, offset: of(offset) }
}

pub(crate) fn scale(tensor: Option<Uid>, block: Option<[u64; 2]>) -> Option<OperandScale> {
    tensor.map(|tensor| OperandScale { tensor: tensor.0, block })
}
