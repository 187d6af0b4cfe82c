//! The shapes of convolutions, pooling, slices and pads against counting one by one.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use verdigris_graph::{Conv, ConvDirection, Movement, PoolWindows, Precision, Real, TensorDesc, Uid};
use verdigris_tensor::{DType, Layout};

fn desc(name: &str, dims: &[u64]) -> TensorDesc {
    TensorDesc::new(Uid(0), name, DType::F32, Layout::row_major(dims).unwrap())
}

/// Numbers that look random and are the same every time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn list(&mut self, count: usize, least: u64, bound: u64) -> Vec<u64> {
        (0..count).map(|_| least + self.below(bound - least)).collect()
    }
}

/// Counts outputs by walking: output `o` exists if its last tap lies in the padded input.
fn count_outputs(extent: u64, before: u64, after: u64, window: u64, stride: u64, dilation: u64) -> u64 {
    (0..1000).take_while(|o| o * stride + (window - 1) * dilation < extent + before + after).count() as u64
}

#[test]
fn convolution_sizes_agree_with_counting() {
    let mut numbers = Numbers(1);
    let mut fits = 0;
    for _ in 0..3000 {
        let spatial = 1 + numbers.below(3) as usize;
        let (extent, filter) = (numbers.list(spatial, 0, 12), numbers.list(spatial, 1, 6));
        let groups = 1 + numbers.below(3);
        let mut conv = Conv::new(ConvDirection::Fprop, Uid(1), Uid(2), Uid(3), spatial, Precision::Fp32);
        conv.pads_before = numbers.list(spatial, 0, 8);
        conv.pads_after = numbers.list(spatial, 0, 8);
        conv.strides = numbers.list(spatial, 1, 5);
        conv.dilations = numbers.list(spatial, 1, 4);
        conv.groups = groups;
        let x = desc("x", &[&[3, 2 * groups], &extent[..]].concat());
        let w = desc("w", &[&[5 * groups, 2], &filter[..]].concat());
        let want: Vec<u64> = (0..spatial)
            .map(|i| count_outputs(extent[i], conv.pads_before[i], conv.pads_after[i], filter[i], conv.strides[i], conv.dilations[i]))
            .collect();
        match conv.infer("conv", &x, &w) {
            Ok(dims) => {
                fits += 1;
                assert_eq!(dims, [&[3, 5 * groups], &want[..]].concat(), "{conv:?}");
                for i in 0..spatial {
                    // The least input that gives as many outputs.
                    let size = |extent| conv.out_extent(i, extent, filter[i]);
                    let least = (0..=extent[i]).find(|&e| size(e) == size(extent[i])).unwrap();
                    let told = conv.least_extent(i, want[i], filter[i]);
                    assert!(told == Some(least) || (told.is_none() && least == 0), "{told:?} {least}");
                }
            }
            Err(error) => assert!(want.contains(&0) && error.to_string().contains("fits into"), "{error}"),
        }
    }
    assert!(fits > 500, "{fits}");
}

#[test]
fn pooling_windows_agree_with_counting() {
    let mut numbers = Numbers(2);
    let mut fits = 0;
    for _ in 0..3000 {
        let (extent, window, stride, dilation) = (numbers.below(12), 1 + numbers.below(4), 1 + numbers.below(4), 1 + numbers.below(3));
        let reach = (window - 1) * dilation + 1;
        let (before, after) = (numbers.below(reach), numbers.below(reach));
        let windows = PoolWindows::Sliding {
            window: vec![window],
            strides: vec![stride],
            dilations: vec![dilation],
            pads_before: vec![before],
            pads_after: vec![after],
        };
        let want = count_outputs(extent, before, after, window, stride, dilation);
        match windows.infer("pool", &desc("x", &[2, 3, extent])) {
            Ok(dims) => {
                fits += 1;
                assert_eq!(dims, [2, 3, want]);
                for o in 0..want {
                    let taps = windows.taps(0, o, extent);
                    assert_eq!(taps.len() as u64, window);
                    assert!(taps[0] >= -(before as i64) && taps[taps.len() - 1] < (extent + after) as i64);
                }
            }
            Err(error) => assert!(want == 0 && error.to_string().contains("fits into"), "{error}"),
        }
    }
    assert!(fits > 1000, "{fits}");
    // Adaptive windows cover x, begin and end in order, and are as even as they can be.
    for extent in 1..20u64 {
        for out in 1..25u64 {
            let windows = PoolWindows::Adaptive { out: vec![out] };
            assert_eq!(windows.infer("pool", &desc("x", &[1, 1, extent])).unwrap(), [1, 1, out]);
            let mut covered = BTreeSet::new();
            for o in 0..out {
                let taps = windows.taps(0, o, extent);
                let exact = |o: u64| o as f64 * extent as f64 / out as f64;
                assert_eq!(taps[0], exact(o).floor() as i64);
                assert_eq!(taps[taps.len() - 1] + 1, exact(o + 1).ceil() as i64);
                covered.extend(taps);
            }
            assert_eq!(covered.len() as u64, extent);
        }
    }
}

#[test]
fn slices_and_pads_agree_with_counting() {
    let mut numbers = Numbers(3);
    for _ in 0..2000 {
        let rank = 1 + numbers.below(4) as usize;
        let dims = numbers.list(rank, 0, 9);
        let starts: Vec<u64> = dims.iter().map(|&dim| numbers.below(dim + 1)).collect();
        let stops: Vec<u64> = dims.iter().zip(&starts).map(|(&dim, &start)| start + numbers.below(dim - start + 1)).collect();
        let steps = numbers.list(rank, 1, 5);
        let want: Vec<u64> = (0..rank).map(|i| (starts[i]..stops[i]).step_by(steps[i] as usize).count() as u64).collect();
        let x = desc("x", &dims);
        let slice = Movement::Slice { starts: starts.clone(), stops: stops.clone(), steps, x: Uid(1), y: Uid(2) };
        assert_eq!(slice.infer("slice", &[&x]).unwrap().unwrap(), want);
        let pad = Movement::Pad { before: starts.clone(), after: stops.clone(), value: Real(0.0), x: Uid(1), y: Uid(2) };
        let padded: Vec<u64> = (0..rank).map(|i| starts[i] + dims[i] + stops[i]).collect();
        assert_eq!(pad.infer("pad", &[&x]).unwrap().unwrap(), padded);
    }
}
