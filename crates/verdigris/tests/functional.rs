//! Functions of tensors on the CPU device: values against plain loops, plans that are kept, and what is refused.
#![forbid(unsafe_code)]

use verdigris::error::{BindingError, BindingRule};
use verdigris::functional::{self as f, Conv2d, Pool2d};
use verdigris::{Config, Device, Error, HostValue, Policy, Tensor};
use verdigris_graph::{BinaryOp, CrossEntropySpec, GraphBuilder, LossReduction, ReductionOp, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

type TestResult = Result<(), Error>;

/// Numbers that look random, multiples of 1/8, so that sums of a few are exact.
fn numbers(count: u64, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 59) as f64 - 16.0) / 8.0
    };
    (0..count).map(|_| next()).collect()
}

fn tensor(device: &Device, dims: &[u64], seed: u64) -> Tensor {
    Tensor::from_values(device, DType::F32, dims, &numbers(dims.iter().product(), seed)).expect("fits")
}

fn near(got: &Tensor, want: &[f64]) {
    let got = got.to_values().expect("reads");
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "element {i}: {got}, want {want}");
    }
}

/// The loss `Σ g · y` has the gradients `backward` with respect to each input: checked by differences.
fn differences(x: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1.0 / 64.0;
    (0..x.len())
        .map(|i| {
            let at = |by: f64| {
                let mut moved = x.to_vec();
                moved[i] += by;
                loss(&moved)
            };
            (at(step) - at(-step)) / (2.0 * step)
        })
        .collect()
}

#[test]
fn convolution_and_its_gradients() -> TestResult {
    let device = Device::cpu();
    let (x_dims, w_dims) = ([2, 4, 5, 6], [6, 2, 3, 2]);
    let conv = Conv2d { stride: [2, 1], padding: [1, 1], dilation: [1, 2], groups: 2, ..Conv2d::default() };
    let (x, w) = (tensor(&device, &x_dims, 1), tensor(&device, &w_dims, 2));
    let y = f::conv2d(&x, &w, conv)?;
    let (out_h, out_w) = (3, 6);
    assert_eq!(y.dims(), [2, 6, out_h, out_w]);
    let plain = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let mut y = Vec::new();
        for n in 0..2 {
            for k in 0..6 {
                for oh in 0..out_h as i64 {
                    for ow in 0..out_w as i64 {
                        let mut sum = 0.0;
                        for c in 0..2 {
                            for fh in 0..3 {
                                for fw in 0..2 {
                                    let (h, v) = (oh * 2 - 1 + fh, ow - 1 + fw * 2);
                                    if (0..5).contains(&h) && (0..6).contains(&v) {
                                        let channel = k / 3 * 2 + c;
                                        sum += x[((n * 4 + channel) * 30 + h * 6 + v) as usize]
                                            * w[(((k * 2 + c) * 3 + fh) * 2 + fw) as usize];
                                    }
                                }
                            }
                        }
                        y.push(sum);
                    }
                }
            }
        }
        y
    };
    let (xs, ws) = (x.to_values()?, w.to_values()?);
    near(&y, &plain(&xs, &ws));

    let g = tensor(&device, y.dims(), 3);
    let gs = g.to_values()?;
    let dot = |y: Vec<f64>| y.iter().zip(&gs).map(|(y, g)| y * g).sum::<f64>();
    near(&f::conv2d_backward_input(&g, &w, x_dims, conv)?, &differences(&xs, |x| dot(plain(x, &ws))));
    near(&f::conv2d_backward_filter(&x, &g, w_dims, conv)?, &differences(&ws, |w| dot(plain(&xs, w))));

    // Bias and activation.
    let bias = tensor(&device, &[6], 4);
    let bs = bias.to_values()?;
    let active = f::conv2d_bias(&x, &w, &bias, Conv2d { activation: UnaryOp::Relu, ..conv })?;
    let want: Vec<f64> = plain(&xs, &ws).iter().enumerate().map(|(i, y)| (y + bs[i / (out_h * out_w) as usize % 6]).max(0.0)).collect();
    near(&active, &want);

    // Channels-last comes out channels-last, with the same values.
    let nhwc = Layout::with_order(&x_dims, &[0, 2, 3, 1]).expect("an order");
    let mut bytes = vec![0; 4 * xs.len()];
    for (position, value) in xs.iter().enumerate() {
        let index = [position / 120, position / 30 % 4, position / 6 % 5, position % 6].map(|i| i as u64);
        let at = 4 * nhwc.offset(&index).expect("inside") as usize;
        bytes[at..at + 4].copy_from_slice(&(*value as f32).to_le_bytes());
    }
    let last = f::conv2d(&Tensor::from_bytes(&device, DType::F32, nhwc, &bytes)?, &w, conv)?;
    assert_eq!(last.layout(), &Layout::with_order(y.dims(), &[0, 2, 3, 1]).expect("an order"));
    near(&last, &y.to_values()?);
    Ok(())
}

#[test]
fn a_small_network_by_functions() -> TestResult {
    let device = Device::cpu();
    let x = tensor(&device, &[3, 2, 6, 6], 5);
    let (pooled, index) = f::max_pool2d_with_index(&x, Pool2d::tiles([2, 2]))?;
    assert_eq!((index.dtype(), index.dims()), (DType::I32, &[3, 2, 3, 3][..]));
    near(&f::max_pool2d(&x, Pool2d::tiles([2, 2]))?, &pooled.to_values()?);
    let flat = f::reshape(&pooled, &[3, 18])?;
    let (w, bias) = (tensor(&device, &[5, 18], 6), tensor(&device, &[5], 7));
    let logits = f::linear(&flat, &w, &bias, UnaryOp::Identity)?;
    let labels = Tensor::from_values(&device, DType::I64, &[3], &[4.0, 0.0, 2.0])?;
    let spec = CrossEntropySpec::new(1, LossReduction::Mean);
    let loss = f::cross_entropy(&logits, &labels, spec)?;
    assert_eq!(loss.dims(), [1, 1]);
    let plain = |logits: &[f64]| -> f64 {
        let row = |r: usize| &logits[5 * r..5 * r + 5];
        let lse = |r: usize| row(r).iter().map(|x| x.exp()).sum::<f64>().ln();
        [(0, 4), (1, 0), (2, 2)].iter().map(|&(r, t)| lse(r) - row(r)[t]).sum::<f64>() / 3.0
    };
    let values = logits.to_values()?;
    near(&loss, &[plain(&values)]);
    let one = Tensor::from_values(&device, DType::F32, &[1, 1], &[1.0])?;
    let dlogits = f::cross_entropy_backward(&logits, &labels, &one, spec)?;
    let want = differences(&values, plain);
    for (got, want) in dlogits.to_values()?.iter().zip(&want) {
        assert!((got - want).abs() < 1e-4, "{got} {want}");
    }
    // softmax − onehot is the same thing.
    let p = f::softmax(&logits, 1)?.to_values()?;
    let by_hand: Vec<f64> = p.iter().enumerate().map(|(i, p)| (p - f64::from(u8::from([4, 5, 12].contains(&i)))) / 3.0).collect();
    near(&dlogits, &by_hand);
    near(&f::log_softmax(&logits, 1)?, &p.iter().map(|p| p.ln()).collect::<Vec<f64>>());

    // Back through the linear layer and the pool.
    let dflat = f::matmul(&dlogits, &w)?;
    let dpooled = f::reshape(&dflat, &[3, 2, 3, 3])?;
    let dx = f::max_pool2d_backward(&dpooled, &index, [3, 2, 6, 6], Pool2d::tiles([2, 2]))?;
    let sum = |t: &Tensor| -> Result<f64, Error> { Ok(t.to_values()?.iter().sum()) };
    assert!((sum(&dx)? - sum(&dpooled)?).abs() < 1e-5);
    assert_eq!(dx.to_values()?.iter().filter(|v| **v != 0.0).count(), dpooled.to_values()?.iter().filter(|v| **v != 0.0).count());
    near(&f::reduce(ReductionOp::Add, &dpooled, &[3, 0, 1, 2])?, &[sum(&dpooled)?]);

    let mean = f::avg_pool2d(&x, Pool2d::tiles([3, 3]))?;
    near(&f::adaptive_avg_pool2d(&x, [2, 2])?, &mean.to_values()?);
    let spread = f::avg_pool2d_backward(&mean, [3, 2, 6, 6], Pool2d::tiles([3, 3]))?;
    assert!((sum(&spread)? - sum(&mean)?).abs() < 1e-5);
    Ok(())
}

#[test]
fn pointwise_functions_casts_and_views() -> TestResult {
    let device = Device::cpu();
    let x = tensor(&device, &[2, 3], 8);
    let z = tensor(&device, &[3], 9);
    let (xs, zs) = (x.to_values()?, z.to_values()?);
    let pairs = || xs.iter().enumerate().map(|(i, &x)| (x, zs[i % 3]));
    near(&f::binary(BinaryOp::Sub, &x, &z)?, &pairs().map(|(x, z)| x - z).collect::<Vec<_>>());
    near(&f::relu(&x)?, &xs.iter().map(|x| x.max(0.0)).collect::<Vec<_>>());
    let mask = f::binary(BinaryOp::Gt, &x, &z)?;
    near(&f::select(&mask, &x, &z)?, &pairs().map(|(x, z)| x.max(z)).collect::<Vec<_>>());
    near(&f::activation_backward(UnaryOp::Relu, &z, &z)?, &zs.iter().map(|z| z.max(0.0)).collect::<Vec<_>>());
    let half = f::cast(&x, DType::F16)?;
    assert_eq!((half.dtype(), half.to_values()?), (DType::F16, xs.clone()), "eighths are exact");
    // A transposed view is no copy; reshaping it is.
    let turned = x.permuted(&[1, 0])?;
    let want: Vec<f64> = (0..6).map(|i| xs[i % 2 * 3 + i / 2]).collect();
    near(&turned, &want);
    near(&f::reshape(&turned, &[6])?, &want);
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused_by_type() -> TestResult {
    let device = Device::cpu();
    let x = tensor(&device, &[2, 3], 10);
    assert!(matches!(f::matmul(&x, &x), Err(Error::Graph(verdigris_graph::Error::Mismatch { .. }))));
    let labels = Tensor::from_values(&device, DType::I64, &[2, 3], &[0.0; 6])?;
    assert!(matches!(f::matmul(&x, &labels), Err(Error::Graph(verdigris_graph::Error::DType { .. }))));
    assert!(matches!(f::reduce(ReductionOp::Add, &x, &[1, 1]), Err(Error::Graph(_))));
    assert!(matches!(f::reduce(ReductionOp::Add, &x, &[32]), Err(Error::Graph(_))));
    assert!(matches!(Tensor::from_values(&device, DType::F32, &[2, 3], &[0.0; 5]), Err(Error::TensorBytes { .. })));
    assert!(matches!(Tensor::from_bytes(&device, DType::F32, *x.layout(), &[0; 23]), Err(Error::TensorBytes { .. })));
    let other = Device::cpu();
    let error = f::binary(BinaryOp::Add, &x, &tensor(&other, &[2, 3], 11)).expect_err("of another device").to_string();
    assert!(error.contains("is used on the device that made it"), "{error}");
    for name in ["gpu", "cuda:", "cuda:x", "cpu:0", ""] {
        assert!(matches!(Device::open(name, &Config::default(), Policy::default()), Err(Error::DeviceName { .. })), "{name}");
    }
    assert_eq!(Device::open("cpu", &Config::default(), Policy::default())?.name(), "cpu");

    let mut g = GraphBuilder::new("scale");
    let uid = g.tensor("x", DType::F32, *x.layout());
    let factor = g.host_scalar("factor", DType::F32);
    let y = g.scale("scale", uid, verdigris_graph::HostScalar::Bound(factor))?;
    g.store(y, "y", DType::F32)?;
    let plan = device.plan(&g.finish()?)?;
    assert_eq!((plan.inputs().count(), plan.outputs().count(), plan.scalars().count()), (1, 1, 1));
    let run = |inputs: &[(Uid, &Tensor)], scalars: &[(Uid, HostValue)]| device.run(&plan, inputs, scalars);
    let binding = |result: Result<Vec<Tensor>, Error>| match result {
        Err(Error::Binding(error)) => error,
        other => panic!("{other:?}"),
    };
    let says = |error: BindingError, name: &str, rule: BindingRule| assert_eq!((error.name.as_str(), error.rule), (name, rule), "{error}");
    says(binding(run(&[], &[(factor, 2.0.into())])), "x", BindingRule::Missing);
    says(binding(run(&[(uid, &x)], &[])), "factor", BindingRule::Missing);
    says(binding(run(&[(uid, &x), (Uid(9), &x)], &[(factor, 2.0.into())])), "#9", BindingRule::Unknown);
    let turned = x.permuted(&[1, 0])?;
    let unlike = binding(run(&[(uid, &turned)], &[(factor, 2.0.into())]));
    assert_eq!((unlike.given.as_str(), unlike.wanted.as_str()), ("f32 [3, 2]:[1, 3]", "f32 [2, 3]:[3, 1]"));
    says(unlike, "x", BindingRule::Layout);
    let (results, report) = device.run_timed(&plan, &[(uid, &x)], &[(factor, 2.0.into())])?;
    near(&results[0], &x.to_values()?.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
    assert_eq!((report.parts.len(), report.parts[0].engine), (1, "cpu.pointwise"));
    assert!(report.us > 0.0);
    Ok(())
}

#[test]
fn calls_are_found_again_from_any_thread() -> TestResult {
    let device = Device::cpu();
    let x = tensor(&device, &[2, 3], 12);
    let want = f::relu(&x)?.to_values()?;
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (x, want) = (&x, &want);
            scope.spawn(move || {
                for i in 0..400 {
                    assert_eq!(&f::relu(x).expect("computes").to_values().expect("reads"), want);
                    // More shapes than there are places, so that some go elsewhere.
                    let count = 1 + (i * 4 + thread) % 1500;
                    let ones = Tensor::from_values(x.device(), DType::F32, &[count], &vec![-1.0; count as usize]).expect("fits");
                    assert_eq!(f::relu(&ones).expect("computes").to_values().expect("reads"), vec![0.0; count as usize]);
                }
            });
        }
    });
    Ok(())
}

#[test]
fn plans_are_kept_up_to_a_bound_and_given_back() -> TestResult {
    let device = Device::cpu();
    let call = &|elements: u64| f::relu(&tensor(&device, &[elements], elements)).map(drop);
    let most = f::MOST_PLANS as u64;
    for elements in 1..=most + 40 {
        call(elements)?;
        // One that is asked for again and again stays.
        call(1)?;
    }
    assert_eq!(f::plans_kept(&device), f::MOST_PLANS);
    // Made anew: none is there twice.
    (1..=60).try_for_each(call)?;
    assert_eq!(f::plans_kept(&device), f::MOST_PLANS);
    f::clear(&device);
    assert_eq!(f::plans_kept(&device), 0);
    call(3)?;
    call(3)?;
    assert_eq!(f::plans_kept(&device), 1);
    // Threads that make and forget at once.
    std::thread::scope(|scope| {
        (0..4).for_each(|thread| {
            scope.spawn(move || (0..200).for_each(|i| call(1 + thread * 100 + i).expect("computes")));
        });
    });
    assert!(f::plans_kept(&device) <= f::MOST_PLANS);
    f::clear(&device);
    assert_eq!(f::plans_kept(&device), 0);
    Ok(())
}
