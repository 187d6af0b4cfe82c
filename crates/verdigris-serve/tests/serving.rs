//! Models from folders, served on the CPU: right results whatever the batch, and errors that say what is wrong.

mod kit;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kit::{Random, affine_signature, connect, json, json_request, kind, numbers, observed, served, until};
use verdigris::{BinaryOp, DType, Device, Graph, GraphBuilder, Layout, Precision, ReductionOp, Tensor, UnaryOp};
use verdigris_serve::{Limits, LoadError, Model, Served, Service, Settings, Spec, StartError, Weight};

const SIZES: [u64; 4] = [1, 2, 4, 8];

/// relu(x · w + b), with x of 12 numbers as 3 × 4 whose strides are not row-major, and a table of weights.
fn graph(batch: u64) -> Graph {
    let mut g = GraphBuilder::new("linear");
    let x = g.tensor("x", DType::F32, Layout::with_order(&[batch, 3, 4], &[0, 2, 1]).unwrap());
    let w = g.tensor("w", DType::F32, Layout::with_order(&[12, 5], &[1, 0]).unwrap());
    let b = g.tensor("b", DType::F32, Layout::row_major(&[1, 5]).unwrap());
    let flat = g.reshape("flat", x, &[batch, 12]).unwrap();
    let product = g.matmul("product", flat, w, Precision::Fp32).unwrap();
    let sum = g.binary("bias", BinaryOp::Add, product, b).unwrap();
    let y = g.unary("relu", UnaryOp::Relu, sum).unwrap();
    g.store(y, "y", DType::F32).unwrap();
    g.finish().unwrap()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn weight_value(i: usize) -> f32 {
    ((i * 7) % 11) as f32 / 8.0 - 0.5
}

fn weights() -> BTreeMap<String, Weight> {
    let w = Weight { dtype: DType::F32, dims: vec![12, 5], bytes: floats(&(0..60).map(weight_value).collect::<Vec<_>>()) };
    let b = Weight { dtype: DType::F32, dims: vec![1, 5], bytes: floats(&[0.5, -0.25, 0.0, 1.0, 2.0]) };
    [("w".to_owned(), w), ("b".to_owned(), b)].into()
}

/// The formula, in f64.
fn truth(row: &[f32]) -> Vec<f64> {
    let b = [0.5, -0.25, 0.0, 1.0, 2.0];
    let sum = |n: usize| (0..12).map(|k| f64::from(row[k]) * f64::from(weight_value(5 * k + n))).sum::<f64>() + b[n];
    (0..5).map(|n| sum(n).max(0.0)).collect()
}

fn model() -> Model {
    let graphs = SIZES.iter().map(|&batch| (batch, graph(batch))).collect();
    let spec = Spec { max_wait_us: 3_000, ..Spec::new("linear", &["x"], &["y"], &SIZES) };
    Model::new(spec, graphs, weights()).unwrap()
}

fn start(models: Vec<Served>) -> Service {
    kit::start(Limits { header_timeout: Duration::from_secs(30), ..Limits::default() }, models)
}

fn request(rows: &[Vec<f32>]) -> String {
    let data: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
    serde_json::json!({ "inputs": [{ "name": "x", "shape": [rows.len(), 3, 4], "datatype": "FP32", "data": data.concat() }] }).to_string()
}

#[test]
fn a_folder_whose_writing_was_cut_off_has_no_manifest() {
    let folder = tempfile::tempdir().unwrap();
    model().save(folder.path()).unwrap();
    // A folder in the place of the weights: they cannot be written.
    std::fs::remove_file(folder.path().join("weights.safetensors")).unwrap();
    std::fs::create_dir(folder.path().join("weights.safetensors")).unwrap();
    let told = model().save(folder.path()).unwrap_err();
    assert!(matches!(told, LoadError::Io { .. }) && told.to_string().contains("weights.safetensors"), "{told}");
    assert!(!folder.path().join("model.toml").exists(), "the manifest of the earlier model is beside files of this one");
    std::fs::remove_dir(folder.path().join("weights.safetensors")).unwrap();
    model().save(folder.path()).unwrap();
    Model::load(folder.path()).unwrap();
}

#[test]
fn a_warm_up_is_ended_between_two_batch_sizes() {
    let mut asked = 0;
    let mut goes_on = || {
        asked += 1;
        asked <= 5
    };
    let told = model().warm_while(&Device::cpu(), &mut goes_on).err().unwrap();
    assert!(matches!(&told, LoadError::Ended { model } if model == "linear"), "{told}");
    assert_eq!(asked, 6, "four sizes are planned, one is run");
}

#[test]
fn batches_of_mixed_sizes_give_each_client_its_own_rows() {
    let observed = observed();
    let service = start(vec![model().warm(&Device::cpu()).unwrap()]);
    let address = service.address();
    let threads: Vec<_> = (0..12u64)
        .map(|thread| {
            std::thread::spawn(move || {
                let mut random = Random(thread);
                let mut client = connect(address);
                let mut batches = Vec::new();
                for _ in 0..15 {
                    let count = 1 + random.below(8) as usize;
                    let rows: Vec<Vec<f32>> =
                        (0..count).map(|_| (0..12).map(|_| random.below(1000) as f32 / 256.0 - 2.0).collect()).collect();
                    let reply = client.post("/v2/models/linear/infer", &[], request(&rows).as_bytes()).unwrap();
                    let found = numbers(&reply);
                    let wanted: Vec<f64> = rows.iter().flat_map(|row| truth(row)).collect();
                    assert_eq!(found.len(), wanted.len());
                    for (found, wanted) in found.iter().zip(&wanted) {
                        assert!((found - wanted).abs() <= 1e-5 * (1.0 + wanted.abs()), "{found} is not {wanted}");
                    }
                    let told = json(&reply);
                    assert_eq!(told["outputs"][0]["shape"], serde_json::json!([count, 5]));
                    let parameters = &told["parameters"];
                    let (rows, planned) = (parameters["batch_rows"].as_u64().unwrap(), parameters["planned_rows"].as_u64().unwrap());
                    assert!(count as u64 <= rows && rows <= planned && SIZES.contains(&planned), "{parameters}");
                    batches.push((rows, count as u64));
                }
                batches
            })
        })
        .collect();
    let batches: Vec<(u64, u64)> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    assert!(batches.iter().any(|(rows, own)| rows > own), "no two requests ever shared a batch");
    let rows: u64 = batches.iter().map(|(_, own)| own).sum();
    // A batch is counted once its rows are answered.
    until("the rows are counted", || observed.count("rows_total{model=linear}") == rows);
    assert_eq!(observed.outcomes("linear"), [("ok".to_owned(), 12 * 15)].into());
    assert_eq!(observed.count("queue_seconds{model=linear}"), 12 * 15);
    assert!(observed.count("batch_rows{model=linear}") < 12 * 15);
    assert!(service.shutdown().is_clean());
}

#[test]
fn rows_do_not_change_with_what_fills_the_batch() {
    let Served { signature, mut executor } = model().warm(&Device::cpu()).unwrap();
    assert!(signature.rows_proved_apart);
    let mut random = Random(3);
    let row_bytes = signature.inputs[0].row_bytes();
    for planned in [2, 4, 8] {
        let mine: Vec<f32> = (0..12 * (planned - 1)).map(|_| random.below(1000) as f32 / 300.0 - 1.5).collect();
        let own = floats(&mine);
        let mut run = |filling: Vec<u8>| {
            let input = [own.clone(), filling].concat();
            let output = executor.execute(planned, &[input]).unwrap().remove(0);
            output[..signature.outputs[0].row_bytes() * (planned as usize - 1)].to_vec()
        };
        let zeros = run(vec![0; row_bytes]);
        assert!(zeros.iter().any(|&byte| byte != 0));
        assert_eq!(run(floats(&[f32::NAN; 12])), zeros);
        assert_eq!(run(floats(&[f32::INFINITY; 12])), zeros);
        assert_eq!(run(floats(&[1e30; 12])), zeros);
    }
    // And the whole as the plan computes it by itself.
    let device = Device::cpu();
    let graph = graph(4);
    let plan = device.plan(&graph).unwrap();
    let rows: Vec<f64> = (0..48).map(|i| f64::from(i) / 16.0 - 1.0).collect();
    let x = plan.inputs().find(|tensor| tensor.name == "x").unwrap().clone();
    let packed: Vec<u8> = floats(&rows.iter().map(|&value| value as f32).collect::<Vec<_>>());
    let mut bytes = vec![0; packed.len()];
    for (position, element) in packed.chunks_exact(4).enumerate() {
        bytes[x.layout.offset_of_position(position as u64).unwrap() as usize * 4..][..4].copy_from_slice(element);
    }
    let mut bound = vec![(x.uid, Tensor::from_bytes(&device, DType::F32, x.layout, &bytes).unwrap())];
    for tensor in plan.inputs().filter(|tensor| tensor.name != "x") {
        let weight = &weights()[&tensor.name];
        let mut bytes = vec![0; weight.bytes.len()];
        for (position, element) in weight.bytes.chunks_exact(4).enumerate() {
            bytes[tensor.layout.offset_of_position(position as u64).unwrap() as usize * 4..][..4].copy_from_slice(element);
        }
        bound.push((tensor.uid, Tensor::from_bytes(&device, DType::F32, tensor.layout, &bytes).unwrap()));
    }
    let bound: Vec<_> = bound.iter().map(|(uid, tensor)| (*uid, tensor)).collect();
    let direct = device.run(&plan, &bound, &[]).unwrap()[0].to_bytes().unwrap();
    assert_eq!(executor.execute(4, &[packed]).unwrap(), [direct]);
}

#[test]
fn a_graph_whose_rows_see_each_other_is_not_served() {
    let draw = |batch: u64| {
        let mut g = GraphBuilder::new("centred");
        let x = g.tensor("x", DType::F32, Layout::row_major(&[batch, 3]).unwrap());
        let mean = g.reduction("mean", ReductionOp::Avg, x, &[0]).unwrap();
        let y = g.binary("minus", BinaryOp::Sub, x, mean).unwrap();
        g.store(y, "y", DType::F32).unwrap();
        (batch, g.finish().unwrap())
    };
    let model = |sizes: &[u64]| {
        Model::new(Spec::new("centred", &["x"], &["y"], sizes), sizes.iter().map(|&size| draw(size)).collect(), BTreeMap::new()).unwrap()
    };
    let told = model(&[1, 4]).warm(&Device::cpu()).err().unwrap();
    assert!(matches!(&told, LoadError::CoupledRows { batch: 4, other: 3, .. }), "{told}");
    assert!(model(&[1]).warm(&Device::cpu()).is_ok(), "a row of its own is nobody else's");
}

#[test]
fn a_model_goes_to_a_folder_and_back_and_faults_of_it_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    model().save(path).unwrap();
    let loaded = Model::load(path).unwrap();
    assert_eq!(loaded.spec().batch_sizes, SIZES);
    let mut executor = loaded.warm(&Device::cpu()).unwrap().executor;
    let rows: Vec<f32> = (0..24).map(|i| i as f32 / 8.0).collect();
    let own = model().warm(&Device::cpu()).unwrap().executor.execute(2, &[floats(&rows)]).unwrap();
    assert_eq!(executor.execute(2, &[floats(&rows)]).unwrap(), own);

    // The manifest may be named itself.
    assert!(Model::load(&path.join("model.toml")).is_ok());
    let manifest = std::fs::read_to_string(path.join("model.toml")).unwrap();
    let told_of = |manifest: &str| {
        std::fs::write(path.join("model.toml"), manifest).unwrap();
        match Model::load(path) {
            Ok(model) => model.warm(&Device::cpu()).err().map_or_else(|| "served".to_owned(), |error| error.to_string()),
            Err(error) => error.to_string(),
        }
    };
    let changed = |from: &str, to: &str| {
        assert!(manifest.contains(from), "{from} is not in {manifest}");
        told_of(&manifest.replace(from, to))
    };
    let cases = [
        ("inputs = [\"x\"]", "inputs = [\"z\"]", "input `z`: there is no such tensor; the graph for a batch of 1 has `x`, `w`, `b`"),
        ("outputs = [\"y\"]", "outputs = [\"x\"]", "output `x`: there is no such tensor"),
        ("outputs = [\"y\"]", "outputs = []", "outputs is []; it names one tensor at least"),
        ("inputs = [\"x\"]", "inputs = [\"x\", \"w\"]", "tensor `w` is [12, 5], wanted is [1, …]; the first dim"),
        ("name = \"linear\"", "name = \"a/b\"", "name is `a/b`; it is 1 to 64 letters"),
        ("name = \"linear\"", "name = \"linear\"\ncolour = 1", "unknown field `colour`"),
        ("weights = \"weights.safetensors\"", "weights = \"../weights.safetensors\"", "it names a file in the model's folder"),
        ("weights = \"weights.safetensors\"", "weights = \"absent.safetensors\"", "absent.safetensors"),
        ("deadline_ms = 1000", "deadline_ms = 0", "deadline_ms is 0; it is from 1"),
        ("queue_rows = 1024", "queue_rows = 7", "queue_rows is 7; it is no less than the greatest"),
        ("deterministic = false", "deterministic = true", "served"),
        ("deterministic = false", "[weight_names]\nw = \"b\"", "weight `w` is f32 [12, 5] in the graph and f32 [1, 5] in"),
        ("deterministic = false", "[weight_names]\nw = \"q\"", "has no tensor `q`; it has `b`, `w`"),
        (
            "deterministic = false",
            "[weight_names]\nv = \"b\"",
            "weight `v`: there is no such tensor; the graph for a batch of 1 has `x`, `w`, `b`",
        ),
        (
            "deterministic = false",
            "[scalars]\nfactor = 1.0",
            "scalar `factor`: there is no such tensor; the graph for a batch of 1 has none",
        ),
        ("graph = \"graph-{batch}.json\"", "graph = \"graph-2.json\"", "input"),
    ];
    for (from, to, wanted) in cases {
        let told = changed(from, to);
        // A file for one size only: the batch of 1 has a tensor of two rows.
        let wanted = if to.contains("graph-2") { "tensor `x` is [2, 3, 4], wanted is [1, …]" } else { wanted };
        assert!(told.contains(wanted), "{to}: {told}");
    }
    for sizes in ["[]", "[0, 1]", "[2, 1]", "[1, 1]", "[1, 100000]"] {
        let start = manifest.find("batch_sizes").unwrap();
        let end = start + manifest[start..].find(']').unwrap() + 1;
        let told = told_of(&format!("{}batch_sizes = {sizes}{}", &manifest[..start], &manifest[end..]));
        assert!(told.contains("it lists sizes from 1 to 65536"), "{sizes}: {told}");
    }
    std::fs::write(path.join("model.toml"), &manifest).unwrap();

    // Weights of another type, and files that were cut or changed.
    let mut halves = weights();
    halves.insert("b".to_owned(), Weight { dtype: DType::F16, dims: vec![1, 5], bytes: vec![0; 10] });
    let graphs = || SIZES.iter().map(|&batch| (batch, graph(batch))).collect::<BTreeMap<_, _>>();
    let told = Model::new(model().spec().clone(), graphs(), halves).unwrap().warm(&Device::cpu()).err().unwrap();
    assert!(matches!(told, LoadError::Weight { wanted_dtype: DType::F32, .. }), "{told}");
    let whole = std::fs::read(path.join("weights.safetensors")).unwrap();
    for cut in 0..whole.len() {
        std::fs::write(path.join("weights.safetensors"), &whole[..cut]).unwrap();
        assert!(matches!(Model::load(path), Err(LoadError::Weights { .. })), "{cut}");
    }
    let mut random = Random(1);
    for _ in 0..300 {
        let mut damaged = whole.clone();
        let place = random.below(whole.len() as u64 - 260) as usize;
        damaged[place] = random.below(256) as u8;
        std::fs::write(path.join("weights.safetensors"), &damaged).unwrap();
        // Never a panic; and whatever still is a file of these weights is served.
        if let Ok(model) = Model::load(path) {
            let _ = model.warm(&Device::cpu());
        }
    }
    std::fs::write(path.join("weights.safetensors"), &whole).unwrap();
    std::fs::write(path.join("graph-4.json"), "{").unwrap();
    assert!(matches!(Model::load(path), Err(LoadError::Template { .. })));
    std::fs::remove_file(path.join("graph-4.json")).unwrap();
    assert!(Model::load(path).err().unwrap().to_string().contains("graph-4.json"));
    assert!(Model::load(Path::new("/no/such/model")).err().unwrap().to_string().contains("/no/such/model"));
}

#[test]
fn one_template_serves_all_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("model.toml", "name = \"triple\"\ninputs = [\"x\"]\noutputs = [\"y\"]\nbatch_sizes = [1, 3]\n[scalars]\nfactor = 3.0\n");
    let tensor = r#""dtype": "i32", "layout": { "dims": ["batch", 2], "strides": [2, 1] }"#;
    write(
        "graph.json",
        &format!(
            r#"{{ "name": "triple", "tensors": [ {{ "uid": 1, "name": "x", {tensor} }}, {{ "uid": 2, "name": "y", {tensor} }},
              {{ "uid": 3, "name": "factor", "dtype": "f32", "layout": {{ "dims": [], "strides": [] }}, "by_value": true }} ],
            "nodes": [ {{ "name": "scale", "op": {{ "pointwise": {{ "scale": {{ "x": 1, "factor": {{ "bound": 3 }}, "y": 2 }} }} }} }} ] }}"#
        ),
    );
    // A file without tensors: a head of two bytes.
    std::fs::write(folder.path().join("weights.safetensors"), [&2u64.to_le_bytes()[..], b"{}"].concat()).unwrap();
    let service = start(vec![Model::load(folder.path()).unwrap().warm(&Device::cpu()).unwrap()]);
    let mut client = connect(service.address());
    let mut ask = |text: &str| client.post("/v2/models/triple/infer", &[], text.as_bytes()).unwrap();
    let request = |rows: u64, data: &str| {
        format!(r#"{{ "inputs": [{{ "name": "x", "shape": [{rows}, 2], "datatype": "INT32", "data": {data} }}] }}"#)
    };
    assert_eq!(numbers(&ask(&request(2, "[1, -2, 3, 4]"))), [3.0, -6.0, 9.0, 12.0]);
    assert_eq!(numbers(&ask(&request(2, "[[1, -2], [3, 4]]"))), [3.0, -6.0, 9.0, 12.0]);
    let told = |reply: &verdigris_serve::Reply| format!("{} {}", reply.status, reply.text());
    for (data, wanted) in [
        ("[1, 2, 3]", "3 numbers, and shape [2, 2] has 4"),
        ("[1, 2, 3, 4, 5]", "more numbers than shape [2, 2] has"),
        ("[[1, 2, 3], [4]]", "an array of 3 where shape [2, 2] has 2"),
        ("[[1, 2], 3, 4]", "data is one array of numbers"),
        ("[[[1]], [[2]], [[3]], [[4]]]", "data is one array of numbers"),
        ("[1, 2, 3, 2147483648]", "2147483648 is no INT32"),
        ("[1, 2, 3, 1.5]", "1.5 is no INT32"),
        ("[1, 2, 3, true]", "true is no INT32"),
        ("[1, 2, 3, \\\"4\\\"]", "expected a number"),
        ("7", "data is one array"),
        ("{}", "a number or an array of numbers"),
    ] {
        let reply = ask(&request(2, &data.replace("\\\"", "\"")));
        let wanted = wanted.replace("expected a number", "a number or an array of numbers");
        assert!(reply.status == 400 && reply.text().contains(&wanted), "{data}: {}", told(&reply));
    }
}

#[test]
fn requests_that_break_a_rule_are_told_which() {
    let service = start(vec![model().warm(&Device::cpu()).unwrap()]);
    let mut client = connect(service.address());
    let good = request(&[vec![1.0; 12]]);
    let path = "/v2/models/linear/infer";
    let mut ask = |headers: &[(&str, &str)], body: &str| {
        let reply = client.post(path, headers, body.as_bytes()).unwrap();
        (reply.status, if reply.status == 200 { "ok".to_owned() } else { kind(&reply) }, reply.text())
    };
    let bodies: Vec<(String, u16, &str)> = vec![
        (good.clone(), 200, "datatype"),
        (String::new(), 400, "the request's JSON: EOF"),
        ("[]".to_owned(), 400, "the request's JSON"),
        ("{\"inputs\": []}".to_owned(), 400, "no inputs; the model's are `x`"),
        (good.replace("\"x\"", "\"q\""), 400, "the model has no input `q`; it has `x`"),
        (good.replace("\"x\"", &format!("\"{}\"", "q".repeat(1000))), 400, "qqq…`"),
        (good.replace("FP32", "FP64"), 400, "has datatype `FP64`, the model's is FP32"),
        (good.replace("[1,3,4]", "[1,4,3]"), 400, "has shape [1, 4, 3], the model's is [rows, 3, 4]"),
        (good.replace("[1,3,4]", "[]"), 400, "has shape []"),
        (good.replace("[1,3,4]", "[0,3,4]"), 400, "has no rows"),
        (good.replace("[1,3,4]", "[9,3,4]"), 413, "a request of 9 rows; the greatest batch of model `linear` is 8"),
        (good.replace("[1,3,4]", "[18446744073709551615,3,4]"), 413, "a request of 18446744073709551615 rows"),
        (good.replace("[1,3,4]", "[-1,3,4]"), 400, "the request's JSON"),
        (good.replace("1.0]", "1e39]"), 400, "is beyond FP32"),
        (good.replace("1.0]", "NaN]"), 400, "the request's JSON"),
        (good.replace("}]}", "}], \"outputs\": [{ \"name\": \"z\" }]}"), 400, "the model has no output `z`; it has `y`"),
        (good.replace("}]}", "}], \"priority\": 3}"), 400, "unknown field `priority`"),
        (good.replace("\"data\"", "\"dato\""), 400, "unknown field `dato`"),
    ];
    for (body, status, wanted) in bodies {
        let (found, kind, text) = ask(&[], &body);
        assert!(found == status && text.contains(wanted), "{body}: {found} {kind} {text}");
    }
    let deep = format!("{{\"inputs\":[{{\"name\":\"x\",\"shape\":[1,3,4],\"datatype\":\"FP32\",\"data\":{}}}]}}", "[".repeat(100_000));
    assert_eq!(ask(&[], &deep).0, 400);
    assert_eq!(ask(&[("x-deadline-ms", "soon")], &good).0, 400);
    assert_eq!(ask(&[("x-deadline-ms", "99999999999")], &good).0, 400);
    assert_eq!(ask(&[("x-deadline-ms", "5000")], &good).0, 200);
    let (status, _, text) = ask(&[("inference-header-content-length", "100000")], &good);
    assert!(status == 400 && text.contains("the JSON is a part of the body"), "{text}");
    assert_eq!(ask(&[("inference-header-content-length", "x")], &good).0, 400);
    assert_eq!(ask(&[("inference-header-content-length", &(good.len() - 1).to_string())], &good).0, 400);
    // Head too long, and no HTTP at all: told by the code alone.
    let mut other = connect(service.address());
    other.send(format!("GET / HTTP/1.1\r\nlong: {}\r\n\r\n", "x".repeat(40_000)).as_bytes()).unwrap();
    assert_eq!(other.reply().unwrap().status, 431);
    let mut other = connect(service.address());
    other.send(b"\x16\x03\x01 hello\r\n\r\n").unwrap();
    assert_eq!(other.reply().unwrap().status, 400);
}

#[test]
fn bytes_go_in_and_out() {
    let service = start(vec![model().warm(&Device::cpu()).unwrap()]);
    let mut client = connect(service.address());
    let rows: Vec<f32> = (0..24).map(|i| i as f32 / 4.0 - 2.0).collect();
    let ask = |size: usize, parameters: &str| {
        format!(
            r#"{{"id":"mine","inputs":[{{"name":"x","shape":[2,3,4],"datatype":"FP32","parameters":{{"binary_data_size":{size}}}}}]{parameters}}}"#
        )
    };
    let mut post = |text: &str, data: &[u8]| {
        let length = text.len().to_string();
        let headers = [("inference-header-content-length", length.as_str()), ("x-request-id", "trace-7")];
        client.post("/v2/models/linear/infer", &headers, &[text.as_bytes(), data].concat()).unwrap()
    };
    let reply = post(&ask(96, r#","parameters":{"binary_data_output":true}"#), &floats(&rows));
    assert_eq!((reply.status, reply.header("x-request-id")), (200, Some("trace-7")), "{}", reply.text());
    let json_bytes: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
    let head: serde_json::Value = serde_json::from_slice(&reply.body[..json_bytes]).unwrap();
    assert_eq!((head["id"].as_str(), head["outputs"][0]["parameters"]["binary_data_size"].as_u64()), (Some("mine"), Some(40)));
    let found: Vec<f64> = reply.body[json_bytes..].chunks_exact(4).map(|y| f64::from(f32::from_le_bytes(y.try_into().unwrap()))).collect();
    let wanted: Vec<f64> = rows.chunks(12).flat_map(truth).collect();
    assert!(found.len() == 10 && found.iter().zip(&wanted).all(|(found, wanted)| (found - wanted).abs() < 1e-5), "{found:?} {wanted:?}");
    // Bytes in, numbers out.
    let reply = post(&ask(96, ""), &floats(&rows));
    assert!(numbers(&reply).iter().zip(&found).all(|(a, b)| a == b));
    for (text, data, wanted) in [
        (ask(92, ""), 92, "binary_data_size is 92, and shape [2, 3, 4] of FP32 has 96 bytes"),
        (ask(96, ""), 95, "binary_data_size is 96, and 95 bytes are left of the body"),
        (ask(96, ""), 97, "1 bytes behind the last input"),
        (ask(usize::MAX, ""), 96, "binary_data_size is 18446744073709551615"),
        (ask(96, "").replace("}}]", "},\"data\":[1]}]"), 96, "both data and binary_data_size"),
    ] {
        let reply = post(&text, &vec![0; data]);
        assert!(reply.status == 400 && reply.text().contains(wanted), "{}", reply.text());
    }
    // What JSON does not hold is not given as something else.
    let reply = post(&ask(96, ""), &floats(&[f32::MAX; 24]));
    assert_eq!((reply.status, kind(&reply).as_str()), (500, "not_in_json"));
    assert!(reply.text().contains("ask for binary data"));
}

#[test]
fn pages_say_what_is_there() {
    let page = Arc::new(|| "# TYPE a counter\na 1\n".to_owned());
    let settings = Settings { listen: "127.0.0.1:0".parse().unwrap(), limits: Limits::default(), metrics: Some(page) };
    let mut service = Service::start(settings).unwrap();
    let mut client = connect(service.address());
    // Alive, not ready: the models are being warmed.
    assert_eq!(client.get("/healthz").unwrap().status, 200);
    let reply = client.get("/readyz").unwrap();
    assert_eq!((reply.status, kind(&reply).as_str(), reply.header("retry-after")), (503, "not_ready", Some("1")));
    let reply = client.post("/v2/models/linear/infer", &[], b"{}").unwrap();
    assert_eq!((reply.status, kind(&reply).as_str()), (503, "not_ready"));
    let warm = || model().warm(&Device::cpu()).unwrap();
    let twice = service.serve(vec![warm(), warm()]);
    assert!(matches!(&twice, Err(StartError::TwoOfOneName { name }) if name == "linear"), "{twice:?}");
    service.serve(vec![warm(), served(affine_signature("other", &[1]), |_| Ok(()))]).unwrap();
    assert!(matches!(service.serve(vec![]), Err(StartError::ModelsAreThere)));

    let mut get = |path: &str| client.get(path).unwrap();
    for path in ["/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/linear/ready"] {
        assert_eq!(get(path).status, 200, "{path}");
    }
    assert_eq!(json(&get("/v2"))["extensions"], serde_json::json!(["binary_tensor_data"]));
    assert_eq!(json(&get("/v2/models"))["models"], serde_json::json!(["linear", "other"]));
    let about = json(&get("/v2/models/linear"));
    assert_eq!(about["inputs"], serde_json::json!([{ "name": "x", "datatype": "FP32", "shape": [-1, 3, 4] }]));
    assert_eq!((about["device"].as_str(), about["rows_proved_apart"].as_bool()), (Some("cpu"), Some(true)));
    assert_eq!(about["engines"]["8"].as_array().map(Vec::is_empty), Some(false), "{about}");
    let metrics = get("/metrics");
    assert!(
        metrics.text().starts_with("# TYPE a counter") && metrics.header("content-type").unwrap().starts_with("text/plain; version=0.0.4")
    );
    // What is not there is not there by any method.
    let version = "/v2/models/linear/versions/1";
    for (path, wanted) in
        [("/", "unknown_path"), ("/v2/models/absent", "unknown_model"), ("/v2/models/linear/x", "unknown_path"), (version, "unknown_path")]
    {
        for reply in [client.get(path).unwrap(), client.post(path, &[], b"{}").unwrap()] {
            assert_eq!((reply.status, kind(&reply).as_str()), (404, wanted), "{path}");
        }
    }
    assert!(client.post(&format!("{version}/infer"), &[], b"{}").unwrap().text().contains("models have no versions here"));
    let by_get = client.get("/v2/models/linear/infer").unwrap();
    assert_eq!((by_get.status, by_get.header("allow")), (405, Some("POST")));
    for path in ["/v2/models", "/v2/models/linear", "/healthz"] {
        let by_post = client.post(path, &[], b"").unwrap();
        assert_eq!((by_post.status, by_post.header("allow")), (405, Some("GET, HEAD")), "{path}");
    }
    let reply = client.post("/v2/models/absent/infer", &[], json_request(&[1.0]).as_bytes()).unwrap();
    assert_eq!((reply.status, kind(&reply).as_str()), (404, "unknown_model"));
    assert!(reply.text().contains("there are `linear`, `other`"), "{}", reply.text());
    // What clients write is no label.
    assert!(observed().names().iter().all(|name| !name.contains("absent")));
    // A request without an id gets one; one that is too long is replaced.
    let long = "x".repeat(129);
    let (one, two) = (client.get("/v2").unwrap(), client.post("/v2", &[("x-request-id", &long)], b"").unwrap());
    let (one, two) = (one.header("x-request-id").unwrap(), two.header("x-request-id").unwrap());
    assert!(one != two && two.len() < 40, "{one} {two}");
}
