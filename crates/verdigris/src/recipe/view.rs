//! How graphs see the tensors of their callers, and how results lie.

use verdigris_tensor::Layout;

use super::unfit;
use crate::error::Error;

/// A tensor's memory under the dims that an op wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum View {
    /// As it is.
    Same,
    /// A matrix of `[all dims but the last, the last]`, or of its transpose.
    Matrix { is_turned: bool },
    /// The one dim that is not 1 at `axis` of `rank` dims.
    Channel { rank: usize, axis: usize },
    /// With a dim of 1 before `axis`.
    Across { axis: usize },
    /// With so many dims of 1 behind the others.
    Behind { ones: usize },
    /// The last dim in pairs: `[2, n / 2]`, or neighbours together, `[n / 2, 2]`.
    Pairs { is_interleaved: bool },
    /// A dim of an even extent as its halves: `[2, n / 2]`.
    Halves { axis: usize },
    /// One element in `rank` dims.
    One { rank: usize },
}

impl View {
    /// The layout under which the memory is seen; `None` where no strides have it, of [`View::Matrix`] alone.
    pub(super) fn of(self, given: &Layout) -> Result<Option<Layout>, Error> {
        let (dims, strides) = (given.dims(), given.strides());
        match self {
            View::Same => Ok(Some(*given)),
            View::Matrix { is_turned } => {
                let (Some((&columns, leading)), Some((&column_stride, leading_strides))) = (dims.split_last(), strides.split_last()) else {
                    return Err(unfit("a tensor without dims", "an operand of a product has at least one dim"));
                };
                let Some(row_stride) = folded(leading, leading_strides) else { return Ok(None) };
                let rows = leading.iter().product();
                let (dims, strides) = ([rows, columns], [row_stride, column_stride]);
                let turned = |[a, b]: [u64; 2]| if is_turned { [b, a] } else { [a, b] };
                layout(&turned(dims), &turned(strides)).map(Some)
            }
            View::Channel { rank, axis } => {
                let mut long = dims.iter().zip(strides).filter(|&(&dim, _)| dim != 1);
                let (Some(_), (&channels, &stride), None) = (dims.first(), long.next().unwrap_or((&1, &1)), long.next()) else {
                    return Err(unfit(format_args!("a bias of dims {dims:?}"), "a bias has one dim"));
                };
                let (mut seen, mut seen_strides) = (vec![1; rank], vec![0; rank]);
                (seen[axis], seen_strides[axis]) = (channels, stride);
                layout(&seen, &seen_strides).map(Some)
            }
            View::Across { axis } => {
                let at = axis.min(dims.len());
                let (mut dims, mut strides) = (dims.to_vec(), strides.to_vec());
                dims.insert(at, 1);
                strides.insert(at, 1);
                layout(&dims, &strides).map(Some)
            }
            View::Behind { ones } => {
                let (mut dims, mut strides) = (dims.to_vec(), strides.to_vec());
                dims.resize(dims.len() + ones, 1);
                strides.resize(dims.len(), 1);
                layout(&dims, &strides).map(Some)
            }
            View::Pairs { is_interleaved } => {
                let (Some((&last, lead)), Some((&stride, lead_strides))) = (dims.split_last(), strides.split_last()) else {
                    return Err(unfit("a tensor without dims", "pairs are of the last dim"));
                };
                let half = last / 2;
                let (of, by) = if is_interleaved { ([half, 2], [2 * stride, stride]) } else { ([2, half], [half * stride, stride]) };
                layout(&[lead, &of].concat(), &[lead_strides, &by].concat()).map(Some)
            }
            View::Halves { axis } => {
                let (mut dims, mut strides) = (dims.to_vec(), strides.to_vec());
                let (Some(dim), Some(&stride)) = (dims.get_mut(axis), strides.get(axis)) else {
                    return Err(unfit(format_args!("halves of dim {axis} of {:?}", given.dims()), "the dim is there"));
                };
                *dim /= 2;
                strides.insert(axis, *dim * stride);
                dims.insert(axis, 2);
                layout(&dims, &strides).map(Some)
            }
            View::One { rank } => {
                if given.elements() != 1 {
                    return Err(unfit(format_args!("the gradient of one number, of dims {dims:?}"), "it has one element"));
                }
                in_format(&vec![1; rank], false).map(Some)
            }
        }
    }
}

pub(crate) fn layout_error(source: verdigris_tensor::LayoutError) -> Error {
    verdigris_graph::Error::Layout { tensor: "result".to_owned(), source }.into()
}

pub(super) fn layout(dims: &[u64], strides: &[u64]) -> Result<Layout, Error> {
    Layout::new(dims, strides).map_err(layout_error)
}

/// The one stride by which the leading dims can be walked as one, if there is such.
pub(super) fn folded(dims: &[u64], strides: &[u64]) -> Option<u64> {
    if dims.contains(&0) {
        // No row is ever walked to.
        return Some(strides.last().copied().unwrap_or(0));
    }
    let mut walked: Option<(u64, u64)> = None;
    for (&dim, &stride) in dims.iter().zip(strides).rev() {
        match walked {
            _ if dim == 1 => {}
            None => walked = Some((stride, stride.checked_mul(dim)?)),
            Some((_, next)) if next != stride => return None,
            Some((first, next)) => walked = Some((first, next.checked_mul(dim)?)),
        }
    }
    // Rows that are one or none have any stride.
    Some(walked.map_or(0, |(first, _)| first))
}

/// Whether PyTorch would call the layout channels-last: its own rule, under which a tensor that is both is not; and the same of three
/// dims, for which PyTorch has no word.
pub(super) fn is_channels_last(layout: &Layout) -> bool {
    let (dims, strides) = (layout.dims(), layout.strides());
    let order: &[usize] = match dims.len() {
        3 => &[1, 2, 0],
        4 => &[1, 3, 2, 0],
        5 => &[1, 4, 3, 2, 0],
        _ => return false,
    };
    if strides[1] == 0 {
        return false;
    }
    let mut least = 0;
    for &dim in order {
        if dims[dim] == 0 || strides[dim] < least || (dim == 0 && least == strides[1]) {
            return false;
        }
        least = strides[dim].saturating_mul(dims[dim].max(1));
    }
    true
}

pub(super) fn in_format(dims: &[u64], channels_last: bool) -> Result<Layout, Error> {
    let order: Vec<usize> = match dims.len() {
        rank @ 3..=5 if channels_last => std::iter::once(0).chain(2..rank).chain([1]).collect(),
        rank => (0..rank).collect(),
    };
    Layout::with_order(dims, &order).map_err(layout_error)
}

/// As a result of a function of elements lies: as the tensor does if that has neither gaps nor overlaps, else in the same order of dims
/// without gaps.
pub(super) fn like(given: &Layout) -> Result<Layout, Error> {
    if given.is_packed() { Ok(*given) } else { in_order_of(given, given.dims()) }
}

/// A packed layout of these dims in the memory order of another one of the same rank; row-major where there is none to follow.
pub(super) fn in_order_of(like: &Layout, dims: &[u64]) -> Result<Layout, Error> {
    if like.rank() != dims.len() || like.is_row_major() {
        return Layout::row_major(dims).map_err(layout_error);
    }
    let mut order: Vec<usize> = (0..dims.len()).collect();
    // Dims of 1 may have any stride, and keep their place.
    order.sort_by_key(|&dim| std::cmp::Reverse(like.strides()[dim]));
    Layout::with_order(dims, &order).map_err(layout_error)
}
