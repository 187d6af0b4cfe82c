//! Recipes on the CPU device, beside plain sums over what the function's definition reads.
#![forbid(unsafe_code)]

use std::sync::LazyLock;

use verdigris::recipe::{Convolution, Divisor, Extents, Function, Gradient, Input, Saved, draw};
use verdigris::{Device, Error, Precision, Tensor};
use verdigris_graph::PoolWindows;
use verdigris_tensor::DType;

/// The first result of a function of tensors.
fn run(function: &Function, given: &[&Tensor]) -> Result<Tensor, Error> {
    let inputs: Vec<_> = given.iter().map(|x| Some(Input { dtype: x.dtype(), layout: *x.layout(), alignment_bytes: None })).collect();
    let recipe = draw(function, &inputs)?;
    let device = given[0].device();
    let bound: Vec<_> = recipe.inputs.iter().map(|&(uid, place)| (uid, given[place])).collect();
    device.run(&device.plan(&recipe.graph)?, &bound, &[])?.pop().ok_or(Error::NoResult)
}

/// Its gradient with respect to a tensor, of all that it reads and of dy.
fn run_gradient(of: &Function, with_respect_to: usize, given: &[&Tensor], dy: &Tensor) -> Result<Tensor, Error> {
    let saved = (0..given.len()).map(Saved::Tensor).collect();
    let gradient = Gradient { of: of.clone(), with_respect_to, saved, dims: None, dtype: None };
    run(&Function::Gradient(Box::new(gradient)), &[&[dy], given].concat())
}

/// Tensors are used on the device that made them.
static CPU: LazyLock<Device> = LazyLock::new(Device::cpu);

fn tensor(dtype: DType, dims: &[u64], values: &[f64]) -> Tensor {
    Tensor::from_values(&CPU, dtype, dims, values).expect("fits")
}

/// A mean over a window that reaches beyond the padding is `Σ x / counted`: three roundings of f64 at most, one of the mean, one of the factor and one of the
/// product, each of half a unit in the last place, which is 2^-53 of the number.
#[test]
fn average_pooling_beyond_its_padding_is_as_exact_as_its_type() -> Result<(), Error> {
    for (length, window, stride, pad) in [(7_u64, 5_u64, 3_u64, 1_u64), (10, 7, 4, 2), (23, 11, 10, 5), (8, 3, 2, 1)] {
        // With ceil_mode: the last window begins within the input or the padding before it.
        let mut out = (length + 2 * pad - window).div_ceil(stride) + 1;
        if (out - 1) * stride >= length + pad {
            out -= 1;
        }
        let ceil_pad = ((out - 1) * stride + window).saturating_sub(length + pad);
        let windows = PoolWindows::Sliding {
            window: vec![window],
            strides: vec![stride],
            dilations: vec![1],
            pads_before: vec![pad],
            pads_after: vec![ceil_pad],
        };
        let of = Function::AveragePool(windows, Divisor::Within(vec![pad]));
        let values: Vec<f64> = (1..=length).map(|i| i as f64).collect();
        let dy: Vec<f64> = (1..=out).map(|o| 1.0 / o as f64).collect();
        // Each window from its first element to behind its last one, as they lie in x, and how many elements count.
        let windows = (0..out).map(|o| {
            let (first, end) = (o * stride, (o * stride + window).min(length + 2 * pad));
            let within = first.saturating_sub(pad)..(end - pad).min(length);
            (within.start as usize..within.end as usize, (end - first) as f64)
        });
        let (mut y, mut dx) = (Vec::new(), vec![0.0; length as usize]);
        for ((within, counted), dy) in windows.zip(&dy) {
            y.push(values[within.clone()].iter().sum::<f64>() / counted);
            dx[within].iter_mut().for_each(|dx| *dx += dy / counted);
        }
        for (dtype, unit) in [(DType::F64, 0.5_f64.powi(53)), (DType::F32, 0.5_f64.powi(24))] {
            let x = tensor(dtype, &[1, 1, length], &values);
            let got = [run(&of, &[&x])?, run_gradient(&of, 0, &[&x], &tensor(dtype, &[1, 1, out], &dy))?];
            // dy is rounded as well; sums of a gradient are of two terms or so, all above 0.
            for (name, got, want, roundings) in [("y", &got[0], &y, 4.0), ("dx", &got[1], &dx, 7.0)] {
                for (i, (got, want)) in got.to_values()?.into_iter().zip(want).enumerate() {
                    assert!((got - want).abs() <= roundings * unit * want, "{dtype} {length} {name}[{i}]: {got}, want {want}");
                }
            }
        }
    }
    Ok(())
}

/// A transposed convolution whose result is there by its additional rows alone: each element of y adds `y · w` where it lands, and what lands in the padding is
/// dropped.
#[test]
fn transposed_convolutions_that_end_behind_their_outputs() -> Result<(), Error> {
    let mut count = 0;
    for (length, taps) in [(1_i64, 1_i64), (3, 1), (2, 2), (1, 3)] {
        for (stride, dilation) in [(1, 3), (1, 20), (5, 1), (4, 9), (9, 4)] {
            for pad in 0..9 {
                for more in 0..stride.max(dilation) {
                    let extent = (length - 1) * stride - 2 * pad + dilation * (taps - 1) + 1 + more;
                    if extent < 1 {
                        continue;
                    }
                    count += i32::from(extent <= more);
                    let at = |i: i64, tap: i64| usize::try_from(i * stride + tap * dilation - pad).ok().filter(|&at| at < extent as usize);
                    let y: Vec<f64> = (0..2 * length).map(|i| (i + 1) as f64).collect();
                    let w: Vec<f64> = (0..2 * taps).map(|i| (i * i + 2) as f64).collect();
                    let dx: Vec<f64> = (0..extent).map(|i| (i + 3) as f64).collect();
                    let (mut x, mut dy, mut dw) = (vec![0.0; extent as usize], vec![0.0; y.len()], vec![0.0; w.len()]);
                    for channel in 0..2 {
                        for (i, tap) in (0..length).flat_map(|i| (0..taps).map(move |tap| (i, tap))) {
                            let (of_y, of_w) = ((channel * length + i) as usize, (channel * taps + tap) as usize);
                            if let Some(at) = at(i, tap) {
                                x[at] += y[of_y] * w[of_w];
                                dy[of_y] += dx[at] * w[of_w];
                                dw[of_w] += dx[at] * y[of_y];
                            }
                        }
                    }
                    let conv = Convolution {
                        strides: vec![stride as u64],
                        pads_before: vec![pad as u64],
                        pads_after: vec![pad as u64],
                        dilations: vec![dilation as u64],
                        groups: 1,
                        precision: Precision::Fp32,
                    };
                    let of = Function::ConvDgrad(conv, Extents::Spatial(vec![extent as u64]));
                    let what = format!("length {length} taps {taps} stride {stride} dilation {dilation} pad {pad} more {more}");
                    let given = [tensor(DType::F32, &[1, 2, length as u64], &y), tensor(DType::F32, &[2, 1, taps as u64], &w)];
                    let given = [&given[0], &given[1]];
                    let dx = tensor(DType::F32, &[1, 1, extent as u64], &dx);
                    let fails = |error: Error| panic!("{what}: {error}");
                    let got = run(&of, &given).unwrap_or_else(fails).to_values()?;
                    // Integers of a few digits: every sum is exact.
                    assert_eq!(got, x, "{what}");
                    for (place, want) in [dy, dw].iter().enumerate() {
                        let got = run_gradient(&of, place, &given, &dx).unwrap_or_else(fails).to_values()?;
                        assert_eq!(&got, want, "gradient {place} of {what}");
                    }
                }
            }
        }
    }
    assert!(count > 20, "{count} results lie behind all that outputs reach");
    Ok(())
}
