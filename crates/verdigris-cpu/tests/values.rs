//! Graphs whose results are known beforehand, or that have to agree among each other.

use verdigris_cpu::{Bindings, GraphPlan, RunReport};
use verdigris_graph::{
    BinaryOp, CrossEntropyBackward, CrossEntropySpec, Filter, Graph, GraphBuilder, LossReduction, Matmul, NormKind, NormSpec, Normalize,
    OperandScale, PoolMode, PoolWindows, Precision, Real, ReductionOp, Sampling, Uid, UnaryOp,
};
use verdigris_reference::masked::{MaskedGradient, masked_gradients};
use verdigris_tensor::{DType, Layout, num};

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("small")
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Runs a graph of one output, which is filled with a sentinel first.
fn run(graph: &Graph, inputs: &[(Uid, Vec<u8>)]) -> (Vec<u8>, RunReport) {
    let plan = GraphPlan::new(graph).expect("planned");
    let output = plan.tensors().iter().find(|tensor| tensor.is_written).expect("one output");
    let mut bytes = vec![0xa5; output.bytes as usize];
    let mut bindings = Bindings::new();
    inputs.iter().for_each(|(uid, bytes)| {
        bindings.input(*uid, bytes);
    });
    bindings.output(output.uid, &mut bytes);
    let report = plan.run(&mut bindings).expect("runs");
    (bytes, report)
}

fn stored(g: GraphBuilder, y: Uid, dtype: DType) -> Graph {
    let mut g = g;
    g.store(y, "y", dtype).expect("stored");
    g.finish().expect("valid")
}

/// What a function did not take, or holds constant, gets 0 and no product with 0, whatever comes in: `relu(x).sqrt()` has the gradient 0 at 0.
#[test]
fn what_plays_no_part_masks_infinities() {
    for case in [DType::F32, DType::F64].into_iter().flat_map(|dtype| masked_gradients(dtype).expect("valid")) {
        let plan = GraphPlan::new(&case.graph).expect("planned");
        let mut results: Vec<(Uid, Vec<u8>)> = plan
            .tensors()
            .iter()
            .filter(|tensor| tensor.is_written)
            .map(|tensor| (tensor.uid, vec![0xa5; tensor.bytes as usize]))
            .collect();
        let mut bindings = Bindings::new();
        for (uid, bytes) in &case.inputs.buffers {
            bindings.input(*uid, bytes);
        }
        for (uid, bytes) in &mut results {
            bindings.output(*uid, bytes);
        }
        plan.run(&mut bindings).expect("runs");
        for (uid, want) in &case.want {
            let dtype = case.graph.tensor(*uid).expect("there").dtype;
            let bytes = results.iter().find(|(result, _)| result == uid).map(|(_, bytes)| bytes).expect("a result");
            let got: Vec<f64> = bytes.chunks_exact(dtype.bytes()).map(|bytes| num::read_element(dtype, bytes).expect("whole")).collect();
            let is_right = got.iter().zip(want).all(|(got, want)| MaskedGradient::is_right(*got, *want));
            assert!(is_right && got.len() == want.len(), "{}: {got:?}, not {want:?}", case.name);
        }
    }
}

/// Arithmetic is in f64 whatever the elements are: an eps below the least number of f32 is there.
#[test]
fn an_eps_below_f32_is_not_lost() {
    for kind in [NormKind::Layer, NormKind::Rms] {
        let mut g = GraphBuilder::new("zeros");
        let x = g.tensor("x", DType::F32, rows(&[2, 64]));
        let made = g.normalize("norm", Normalize::new(NormSpec::new(kind, &[1], 1e-50), x)).expect("fits");
        let plan = stored(g, made.y, DType::F32);
        assert_eq!(run(&plan, &[(x, f32s(&[0.0; 128]))]).0, f32s(&[0.0; 128]), "{kind:?}");
    }
}

#[test]
fn block_factors_tell_matrices_apart_that_their_operand_does_not() {
    // E4M3: 1.0 is 0x38.
    let (one, zero) = (0x38, 0);
    for is_left in [true, false] {
        let mut g = GraphBuilder::new("scaled");
        let shared = g.tensor("shared", DType::E4m3, rows(&[2, 2]));
        let own = g.tensor("own", DType::E4m3, rows(&[2, 2, 2]));
        let factors = g.tensor("factors", DType::F32, rows(&[2, 1, 1]));
        let (a, b) = if is_left { (shared, own) } else { (own, shared) };
        let mut matmul = Matmul::new(a, b, Uid(0), Precision::Fp8Promoted);
        let scale = Some(OperandScale { tensor: factors, block: Some([2, 2]) });
        (matmul.scale_a, matmul.scale_b) = if is_left { (scale, None) } else { (None, scale) };
        let y = g.matmul_with("product", matmul).expect("fits");
        let graph = stored(g, y, DType::F32);
        let inputs = [(shared, vec![one, zero, zero, one]), (own, vec![one; 8]), (factors, f32s(&[1.0, 16.0]))];
        assert_eq!(run(&graph, &inputs).0, f32s(&[1.0, 1.0, 1.0, 1.0, 16.0, 16.0, 16.0, 16.0]), "factors of A: {is_left}");
    }
}

#[test]
fn a_reduction_keeps_one_number_for_each_piece_and_counts_it() {
    let (outer, inner) = (1 << 10, 4);
    let mut g = GraphBuilder::new("sums");
    let x = g.tensor("x", DType::F32, rows(&[outer, inner]));
    let y = g.reduction("sum", ReductionOp::Add, x, &[1]).expect("fits");
    let graph = stored(g, y, DType::F32);
    let values: Vec<f32> = (0..outer * inner).map(|i| i as f32).collect();
    let (bytes, report) = run(&graph, &[(x, f32s(&values))]);
    assert_eq!(bytes, f32s(&values.chunks(4).map(|row| row.iter().sum()).collect::<Vec<_>>()));
    assert_eq!(report.workspace_bytes(), outer * 8);
}

#[test]
fn tables_and_rows_are_counted_and_no_value_is_kept_twice() -> Result<(), verdigris_graph::Error> {
    let (outer, inner) = (1 << 10, 96);
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    let workspace = |graph: Graph| {
        let plan = GraphPlan::new(&graph).expect("planned");
        let inputs: Vec<(Uid, Vec<u8>)> =
            plan.tensors().iter().filter(|tensor| !tensor.is_written).map(|tensor| (tensor.uid, vec![0; tensor.bytes as usize])).collect();
        one_thread.install(|| run(&graph, &inputs)).1.workspace_bytes()
    };
    let mut g = GraphBuilder::new("norm");
    let (x, scale) = (g.tensor("x", DType::F32, rows(&[outer, inner])), g.tensor("scale", DType::F32, rows(&[inner])));
    let spec = NormSpec { kind: NormKind::Layer, axes: vec![1], groups: 1, eps: Real(1e-5), zero_centred: false };
    let y = g.normalize("norm", Normalize { scale: Some(scale), ..Normalize::new(spec, x) })?.y;
    // Where rows begin, where their elements lie, and two numbers of each row.
    assert_eq!(workspace(stored(g, y, DType::F32)), outer * 8 + inner * 8 + outer * 16);

    let mut g = GraphBuilder::new("softmax");
    let x = g.tensor("x", DType::F32, rows(&[outer, inner]));
    let y = g.softmax("softmax", x, 1, false)?;
    assert_eq!(workspace(stored(g, y, DType::F32)), inner * 8, "a row of a thread");

    let mut g = GraphBuilder::new("loss");
    let (x, labels) = (g.tensor("x", DType::F32, rows(&[outer, inner])), g.tensor("labels", DType::I32, rows(&[outer, 1])));
    let y = g.cross_entropy("loss", CrossEntropySpec::new(1, LossReduction::Mean), x, labels)?;
    assert_eq!(workspace(stored(g, y, DType::F32)), outer * 8 + outer * 16 + inner * 8, "labels, two numbers of a row, and a row");

    let mut g = GraphBuilder::new("nearest");
    let x = g.tensor("x", DType::F32, rows(&[1, 1, 64]));
    let sampling = Sampling::Interpolate { filter: Filter::Linear { align_corners: true }, out: vec![1000], factors: vec![] };
    let y = g.resample("linear", sampling, x)?;
    let bytes = workspace(stored(g, y, DType::F32));
    assert!((1000 * 8..1000 * 8 + 2000 * 16 + 1000).contains(&bytes), "{bytes}: places, and two taps at most with their weights");
    Ok(())
}

#[test]
fn averages_count_more_taps_in_padding_than_an_integer_holds() {
    let mut g = GraphBuilder::new("wide windows");
    let x = g.tensor("x", DType::F32, rows(&[1; 5]));
    let windows = PoolWindows::Sliding {
        window: vec![(1 << 31) - 1; 3],
        strides: vec![4; 3],
        dilations: vec![1; 3],
        pads_before: vec![1 << 30; 3],
        pads_after: vec![1 << 30; 3],
    };
    let y = g.pool("mean", PoolMode::Average { count_include_pad: true }, windows, x).expect("fits");
    let graph = stored(g, y, DType::F32);
    let value = 2f64.powi(93);
    let mean = value / ((1u64 << 31) as f64 - 1.0).powi(3);
    assert_eq!(run(&graph, &[(x, f32s(&[value as f32]))]).0, f32s(&[mean as f32]));
}

#[test]
fn what_is_cut_off_at_a_bound_has_no_slope_there() {
    // In f32 a tenth is a bit more than in f64: cut off there, it is the bound.
    for f in [
        UnaryOp::Clamp { lower: Real(-1.0), upper: Real(0.1) },
        UnaryOp::Clamp { lower: Real(0.1), upper: Real(1.0) },
        UnaryOp::ClippedRelu { lower: Real(-1.0), upper: Real(0.3), slope: Real(0.0) },
        UnaryOp::ClippedRelu { lower: Real(0.1), upper: Real(1.0), slope: Real(0.0) },
    ] {
        let mut g = GraphBuilder::new("slope");
        let (dy, x) = (g.tensor("dy", DType::F32, rows(&[2])), g.tensor("x", DType::F32, rows(&[2])));
        let dx = g.binary("slope", BinaryOp::Backward(f), dy, x).expect("fits");
        let graph = stored(g, dx, DType::F32);
        let (bytes, _) = run(&graph, &[(dy, f32s(&[1.0; 2])), (x, f32s(&[0.1, 0.3]))]);
        let [at_tenth, at_third] = [0, 1].map(|i| f32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]));
        let bound = |bound: f64| [0.1f32, 0.3].iter().position(|&x| x == bound as f32);
        let bounds = match f {
            UnaryOp::Clamp { lower, upper } | UnaryOp::ClippedRelu { lower, upper, .. } => [bound(lower.0), bound(upper.0)],
            _ => [None; 2],
        };
        let at_bound = bounds.into_iter().flatten().next().expect("one of the two is a bound");
        assert_eq!([at_tenth, at_third][at_bound], 0.0, "{f:?}");
    }
}

#[test]
fn a_wide_log_sum_exp_is_read_as_it_is() {
    // Beside a log-sum-exp that f32 rounds, the gradient tells in which type it was read.
    let lse = 20.0 + 2f64.powi(-22);
    let mut g = GraphBuilder::new("gradient");
    let logits = g.tensor("logits", DType::F32, rows(&[1, 2]));
    let labels = g.tensor("labels", DType::I64, rows(&[1, 1]));
    let dloss = g.tensor("dloss", DType::F32, rows(&[1, 1]));
    let lse_uid = g.tensor("lse", DType::F64, rows(&[1, 1]));
    let spec = CrossEntropySpec::new(1, LossReduction::None);
    let backward = CrossEntropyBackward { spec, logits, labels, dloss, lse: Some(lse_uid), dlogits: Uid(0) };
    let dx = g.cross_entropy_backward("gradient", backward).expect("fits");
    let graph = stored(g, dx, DType::F64);
    let inputs =
        [(logits, f32s(&[20.0, 0.0])), (labels, 1i64.to_le_bytes().to_vec()), (dloss, f32s(&[1.0])), (lse_uid, lse.to_le_bytes().to_vec())];
    let (bytes, _) = run(&graph, &inputs);
    let first = f64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    assert_eq!(first, (20.0 - lse).exp());
}

/// Nothing is laid out for the windows and taps of a result that has no elements, however many it would have had.
#[test]
fn results_without_elements_take_nothing() -> Result<(), Box<dyn std::error::Error>> {
    let wide = 1u64 << 40;
    let nothing = |graph: Graph| {
        let x = graph.tensors.iter().find(|tensor| tensor.name == "x").expect("the input").uid;
        let (bytes, report) = run(&graph, &[(x, Vec::new())]);
        assert!(bytes.is_empty() && report.steps.iter().all(|step| step.workspace_bytes < 1 << 16), "{report:?}");
    };
    let padded = PoolWindows::Sliding {
        window: vec![1 << 30],
        strides: vec![1],
        dilations: vec![1],
        pads_before: vec![(1 << 30) - 1],
        pads_after: vec![(1 << 30) - 1],
    };
    for windows in [PoolWindows::Adaptive { out: vec![wide] }, padded] {
        let mut g = GraphBuilder::new("empty");
        let x = g.tensor("x", DType::F32, rows(&[0, 1, 4]));
        let y = g.pool("pool", PoolMode::Max, windows, x)?;
        nothing(stored(g, y, DType::F32));
    }
    for filter in [Filter::Nearest, Filter::Linear { align_corners: false }] {
        let mut g = GraphBuilder::new("empty");
        let x = g.tensor("x", DType::F32, rows(&[0, 1, 4]));
        let y = g.resample("resample", Sampling::Interpolate { filter, out: vec![(1 << 31) - 1], factors: vec![] }, x)?;
        nothing(stored(g, y, DType::F32));
    }
    Ok(())
}
