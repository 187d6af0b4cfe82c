//! Attributes of ops over spatial dims, from Python's words.

use pyo3::PyResult;
use verdigris_graph::{Border, Filter, PoolMode, PoolWindows, Real, Sampling};

use crate::errors::{Kind, raise};

/// Windows of pooling from Python's words.
pub(crate) fn windows(
    window: Option<Vec<u64>>,
    stride: Option<Vec<u64>>,
    padding: Option<Vec<u64>>,
    padding_after: Option<Vec<u64>>,
    dilation: Option<Vec<u64>>,
    adaptive: Option<Vec<u64>>,
) -> PyResult<PoolWindows> {
    match (window, adaptive) {
        (None, Some(out)) => Ok(PoolWindows::Adaptive { out }),
        (Some(window), None) => {
            let spatial = window.len();
            let pads_before = padding.unwrap_or_else(|| vec![0; spatial]);
            Ok(PoolWindows::Sliding {
                strides: stride.unwrap_or_else(|| window.clone()),
                dilations: dilation.unwrap_or_else(|| vec![1; spatial]),
                pads_after: padding_after.unwrap_or_else(|| pads_before.clone()),
                pads_before,
                window,
            })
        }
        _ => Err(raise(Kind::Graph, "pooling has either a window or an adaptive output size")),
    }
}

/// A filter of resampling by its name.
pub(crate) fn filter(mode: &str, align_corners: bool) -> PyResult<Filter> {
    match mode {
        "nearest" => Ok(Filter::Nearest),
        "nearest-exact" => Ok(Filter::NearestExact),
        "linear" => Ok(Filter::Linear { align_corners }),
        "cubic" => Ok(Filter::Cubic { align_corners }),
        other => Err(raise(Kind::Graph, format!("the filter is `{other}`; it is `nearest`, `nearest-exact`, `linear` or `cubic`"))),
    }
}

/// A border by its name.
pub(crate) fn border(name: &str) -> PyResult<Border> {
    match name {
        "reflect" => Ok(Border::Reflect),
        "replicate" => Ok(Border::Replicate),
        "circular" => Ok(Border::Circular),
        other => Err(raise(Kind::Graph, format!("the border is `{other}`; it is `reflect`, `replicate` or `circular`"))),
    }
}

/// The sampling of an interpolation.
pub(crate) fn interpolation(mode: &str, out: Vec<u64>, align_corners: bool, factors: Option<Vec<f64>>) -> PyResult<Sampling> {
    let factors = factors.unwrap_or_default().into_iter().map(Real).collect();
    Ok(Sampling::Interpolate { filter: filter(mode, align_corners)?, out, factors })
}

/// The mode of pooling by its name.
pub(crate) fn pool_mode(name: &str, count_include_pad: bool) -> PyResult<PoolMode> {
    match name {
        "max" => Ok(PoolMode::Max),
        "average" => Ok(PoolMode::Average { count_include_pad }),
        other => Err(raise(Kind::Graph, format!("the pooling mode is `{other}`; it is `max` or `average`"))),
    }
}
