//! What some kinds of data have at some places alone: rows of −∞, NaN at edges, NaN in gaps.

use verdigris_tensor::num;
use verdigris_tensor::{DType, Layout};

use crate::data::{Distribution, Random};
use crate::source::advance;

/// Indices beside which tiles end, for a dim that is longer.
const TILE_EDGES: [u64; 5] = [16, 32, 64, 128, 256];
/// Of the places at edges one in so many holds something special: in matrices, and in tensors of more dims, which have more corners.
const ONE_OF_MATRIX: u64 = 2;
const ONE_OF_TENSOR: u64 = 8;

/// Puts in what `distribution` has at places of its own.
pub(crate) fn put(bytes: &mut [u8], dtype: DType, distribution: Distribution, seed: u64, layout: &Layout) {
    let mut random = Random::new(seed ^ 0x0091_ace5);
    match distribution {
        Distribution::Masked => mask(bytes, dtype, &mut random, layout),
        Distribution::Edges => {
            fill_gaps(bytes, dtype, layout);
            mark_edges(bytes, dtype, &mut random, layout);
        }
        Distribution::Gaps => fill_gaps(bytes, dtype, layout),
        _ => {}
    }
}

/// The least value: −∞ where there is one.
fn least(dtype: DType) -> f64 {
    match (dtype.integer_range(), dtype.format()) {
        (Some((low, _)), _) => low as f64,
        (None, Some(format)) if !format.has_infinity => -format.max_value(),
        (None, None) if dtype == DType::Bool => 0.0,
        (None, _) => f64::NEG_INFINITY,
    }
}

fn write(bytes: &mut [u8], dtype: DType, layout: &Layout, index: &[u64], value: f64) {
    let place = layout.offset(index).map(|offset| offset as usize * dtype.bytes());
    if let Some(element) = place.and_then(|start| bytes.get_mut(start..start + dtype.bytes())) {
        let _ = num::write_element(dtype, value, element);
    }
}

/// Every index of a layout.
fn each(layout: &Layout, mut visit: impl FnMut(&[u64])) {
    let mut index = vec![0; layout.rank()];
    for _ in 0..layout.elements() {
        visit(&index);
        advance(&mut index, layout.dims());
    }
}

/// A quarter of each dim's indices, one at least and never all, with the least value in all their elements.
fn mask(bytes: &mut [u8], dtype: DType, random: &mut Random, layout: &Layout) {
    let firsts: Vec<u64> = layout.dims().iter().map(|&extent| random.below(extent.max(1))).collect();
    let is_masked = |(dim, &i): (usize, &u64)| {
        let extent = layout.dims()[dim];
        extent > 1 && (i + extent - firsts[dim]) % extent < (extent / 4).max(1)
    };
    each(layout, |index| {
        if index.iter().enumerate().any(is_masked) {
            write(bytes, dtype, layout, index, least(dtype));
        }
    });
}

/// NaN and infinities (in integers the ends of the range) at places of which every index is at an edge.
fn mark_edges(bytes: &mut [u8], dtype: DType, random: &mut Random, layout: &Layout) {
    let edges: Vec<Vec<u64>> = (layout.dims().iter())
        .map(|&extent| {
            let inner: Vec<u64> = TILE_EDGES.into_iter().filter(|&edge| edge < extent).collect();
            let chosen = (!inner.is_empty()).then(|| inner[random.below(inner.len() as u64) as usize] - random.below(2));
            [Some(0), extent.checked_sub(1), chosen].into_iter().flatten().collect()
        })
        .collect();
    let one_of = if layout.rank() > 2 { ONE_OF_TENSOR } else { ONE_OF_MATRIX };
    let has_infinity = dtype.format().is_none_or(|format| format.has_infinity);
    each(layout, |index| {
        if index.iter().zip(&edges).all(|(i, edges)| edges.contains(i)) && random.below(one_of) == 0 {
            let value = match (dtype.integer_range(), random.below(3)) {
                (Some((low, high)), turn) => {
                    if turn == 0 {
                        low as f64
                    } else {
                        high as f64
                    }
                }
                (None, 1) if has_infinity => f64::INFINITY,
                (None, 2) if has_infinity => f64::NEG_INFINITY,
                (None, _) => f64::NAN,
            };
            write(bytes, dtype, layout, index, value);
        }
    });
}

/// NaN wherever no element lies. Integers have none, and stay as they are.
fn fill_gaps(bytes: &mut [u8], dtype: DType, layout: &Layout) {
    if !dtype.is_float() || layout.span_elements() == layout.elements() {
        return;
    }
    let mut is_element = vec![false; layout.span_elements() as usize];
    each(layout, |index| {
        if let Some(offset) = layout.offset(index) {
            is_element[offset as usize] = true;
        }
    });
    for (element, _) in bytes.chunks_exact_mut(dtype.bytes()).zip(is_element).filter(|(_, is_element)| !is_element) {
        let _ = num::write_element(dtype, f64::NAN, element);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fill_layout;

    fn elements(bytes: &[u8], layout: &Layout) -> Vec<f64> {
        let mut list = Vec::new();
        each(layout, |index| {
            let offset = layout.offset(index).expect("inside") as usize * 4;
            list.push(num::read_element(DType::F32, &bytes[offset..]).expect("an element"));
        });
        list
    }

    #[test]
    fn rows_are_masked_whole_and_in_part_and_never_all() {
        for seed in 0..40 {
            let layout = Layout::row_major(&[5, 12]).expect("a layout");
            let all = elements(&fill_layout(DType::F32, Distribution::Masked, true, seed, &layout), &layout);
            let masked: Vec<usize> = all.chunks(12).map(|row| row.iter().filter(|x| **x == f64::NEG_INFINITY).count()).collect();
            assert_eq!(masked.iter().filter(|&&count| count == 12).count(), 1, "{masked:?}");
            assert!(masked.iter().filter(|&&count| count == 3).count() == 4, "a quarter of each other row: {masked:?}");
        }
        let one = Layout::row_major(&[1, 1]).expect("a layout");
        assert!(elements(&fill_layout(DType::F32, Distribution::Masked, true, 1, &one), &one)[0].is_finite());
    }

    #[test]
    fn gaps_hold_nan_and_elements_do_not() {
        let layout = Layout::new(&[3, 4], &[9, 2]).expect("a layout");
        let bytes = fill_layout(DType::F32, Distribution::Gaps, true, 3, &layout);
        assert!(elements(&bytes, &layout).iter().all(|x| x.is_finite()));
        let nans = bytes.chunks_exact(4).filter(|x| num::read_element(DType::F32, x).is_some_and(f64::is_nan)).count();
        assert_eq!(nans as u64, layout.span_elements() - 12);
    }

    #[test]
    fn edges_and_nothing_else_are_special() {
        let layout = Layout::row_major(&[40, 7]).expect("a layout");
        let mut found = 0;
        for seed in 0..20 {
            let all = elements(&fill_layout(DType::F32, Distribution::Edges, true, seed, &layout), &layout);
            for (place, _) in all.iter().enumerate().filter(|(_, x)| !x.is_finite()) {
                let (row, column) = (place / 7, place % 7);
                assert!([0, 15, 16, 31, 32, 39].contains(&row) && [0, 6].contains(&column), "{row}, {column}");
                found += 1;
            }
        }
        assert!((40..80).contains(&found), "{found} of 120 places at edges");
    }
}
