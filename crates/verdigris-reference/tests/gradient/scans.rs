//! Gradients of scans.

use super::*;
use verdigris_graph::ScanOp;

#[test]
fn by_differences() {
    for f in [ScanOp::Add, ScanOp::Mul, ScanOp::LogSumExp] {
        for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)] {
            for axis in 0..3 {
                hold(&format!("scan {} {exclusive} {reverse} {axis}", f.name()), |g| {
                    let x = input(g, "x", &[2, 5, 3]);
                    let y = g.scan("scan", f, x, axis, exclusive, reverse)?;
                    // Of nothing, a log-sum-exp is −∞, which no difference moves from.
                    let y = if f == ScanOp::LogSumExp { g.unary("exp", UnaryOp::Exp, y)? } else { y };
                    Ok((vec![y], vec![x]))
                });
            }
        }
    }
}

/// The gradient of running products where factors are 0, against each product by itself; extrema have none.
#[test]
fn at_zeros() {
    let gradient = |x: [f64; 5], dy: [f64; 5], exclusive, reverse| {
        let mut g = GraphBuilder::new("scan");
        let x_uid = input(&mut g, "x", &[5]);
        let y = g.scan("scan", ScanOp::Mul, x_uid, 0, exclusive, reverse).unwrap();
        let built = with_gradients(g, &[y], &[x_uid]).unwrap();
        let mut inputs = built.inputs(1);
        inputs.buffers.insert(x_uid, write(F64, &x));
        inputs.buffers.insert(built.dys[0], write(F64, &dy));
        outputs(&built.with_gradient, &inputs)[&built.gradients[0]].clone()
    };
    let dy = [1.0, 10.0, 100.0, 1000.0, 10000.0];
    for x in [[2.0, 0.0, 3.0, 5.0, 7.0], [2.0, 3.0, 0.0, 5.0, 0.0], [0.0, 2.0, 3.0, 5.0, 7.0], [0.0; 5], [2.0, 3.0, 5.0, 7.0, 0.0]] {
        for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)] {
            let members = |j: usize| -> Vec<usize> {
                let is_in = |k: &usize| if reverse { *k > j || (*k == j && !exclusive) } else { *k < j || (*k == j && !exclusive) };
                (0..5).filter(is_in).collect()
            };
            let of_others = |i: usize, j: usize| -> f64 {
                if members(j).contains(&i) { members(j).into_iter().filter(|&k| k != i).map(|k| x[k]).product() } else { 0.0 }
            };
            let wanted: Vec<f64> = (0..5).map(|i| (0..5).map(|j| dy[j] * of_others(i, j)).sum()).collect();
            let near = |(got, want): (&f64, &f64)| (got - want).abs() <= 1e-12 * want.abs();
            let got = gradient(x, dy, exclusive, reverse);
            assert!(got.iter().zip(&wanted).all(near), "{x:?} {exclusive} {reverse}: {got:?}, wanted {wanted:?}");
        }
    }
    for f in [ScanOp::Min, ScanOp::Max] {
        let mut g = GraphBuilder::new("scan");
        let x = input(&mut g, "x", &[5]);
        let y = g.scan("running", f, x, 0, false, false).unwrap();
        let refused = with_gradients(g, &[y], &[x]).map(|_| ()).unwrap_err();
        assert!(matches!(&refused, Error::Gradient { op, tensor, .. } if op == "running" && tensor == "x"), "{refused}");
    }
}
