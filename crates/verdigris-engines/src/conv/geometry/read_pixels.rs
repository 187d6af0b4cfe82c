//! Pixels that a strided filter steps over.

use verdigris_graph::{ConvProblem, Direction};

/// The problem over those pixels of x alone that it reads: along a dim in which the filter has one element, and no padding, the stride is one of the tensor.
/// For engines that copy x, or stage it: what lies between is not brought. The gradient of x, which has zeros there, stays as it is.
pub(in crate::conv) fn over_read_pixels(p: &ConvProblem) -> ConvProblem {
    let mut p = p.clone();
    if p.direction == Direction::Dgrad {
        return p;
    }
    for dim in 0..3 {
        let last = p.output[dim].saturating_sub(1).saturating_mul(p.strides[dim]);
        let steps_over = p.filter[dim] == 1 && p.pads_before[dim] == 0 && last < p.input[dim];
        let Some(stride) = p.x.strides[dim + 2].checked_mul(p.strides[dim]) else { continue };
        if steps_over {
            (p.x.strides[dim + 2], p.input[dim]) = (stride, p.output[dim]);
            (p.strides[dim], p.dilations[dim], p.pads_after[dim]) = (1, 1, 0);
        }
    }
    p
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::ConvExtents;
    use verdigris_tensor::DType;

    #[test]
    fn what_lies_between_is_left_out_where_each_output_reads_one_pixel() {
        let of = |direction, filter, pads| {
            let extents = ConvExtents {
                direction,
                n: 2,
                c: 4,
                k: 8,
                groups: 1,
                input: [1, 9, 8],
                filter,
                pads,
                strides: [1, 2, 3],
                dilations: [1; 3],
            };
            ConvProblem::packed(extents, DType::F32, DType::F32).expect("a problem")
        };
        let whole = of(Direction::Fprop, [1; 3], [0; 3]);
        let read = over_read_pixels(&whole);
        assert_eq!((read.input, read.output, read.strides), ([1, 5, 3], whole.output, [1; 3]));
        let [image, channel, depth, height, width] = whole.x.strides;
        assert_eq!(read.x.strides, [image, channel, depth, 2 * height, 3 * width]);
        // Along a line of the filter alone, and not beside padding.
        let read = over_read_pixels(&of(Direction::Wgrad, [1, 3, 1], [0; 3]));
        assert_eq!((read.input, read.strides), ([1, 9, 3], [1, 2, 1]));
        let mut in_front = whole.clone();
        in_front.pads_before = [0, 1, 1];
        assert_eq!(over_read_pixels(&in_front), in_front, "padding in front of as many pixels as before");
        for same in [of(Direction::Fprop, [1; 3], [0, 1, 1]), of(Direction::Dgrad, [1; 3], [0; 3])] {
            assert_eq!(over_read_pixels(&same), same);
        }
    }
}
