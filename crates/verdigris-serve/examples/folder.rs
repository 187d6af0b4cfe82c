//! A model from its drawing to its answers: drawn for three batch sizes, written into a folder, read, warmed, served and asked.
//!
//! `cargo run --release -p verdigris-serve --example folder` writes into a temporary folder and ends; the same folder is what
//! `verdigris serve FOLDER` takes.

use std::error::Error;
use std::time::Duration;

use verdigris::{BinaryOp, DType, Device, Graph, GraphBuilder, Layout, Precision, UnaryOp};
use verdigris_serve::load::{Load, offer};
use verdigris_serve::{Client, Limits, Model, Service, Settings, Spec, Weight};

const SIZES: [u64; 3] = [1, 4, 16];

/// relu(x · w + bias), for a batch of this size.
fn draw(batch: u64) -> Result<Graph, Box<dyn Error>> {
    let mut g = GraphBuilder::new("layer");
    let x = g.tensor("x", DType::F32, Layout::row_major(&[batch, 64])?);
    let w = g.tensor("w", DType::F32, Layout::row_major(&[64, 32])?);
    let bias = g.tensor("bias", DType::F32, Layout::row_major(&[1, 32])?);
    let product = g.matmul("product", x, w, Precision::Fp32)?;
    let sum = g.binary("add bias", BinaryOp::Add, product, bias)?;
    let y = g.unary("relu", UnaryOp::Relu, sum)?;
    g.store(y, "y", DType::F32)?;
    Ok(g.finish()?)
}

fn weight(dims: &[u64], value: f32) -> Weight {
    let count = dims.iter().product::<u64>() as usize;
    Weight { dtype: DType::F32, dims: dims.to_vec(), bytes: value.to_le_bytes().repeat(count) }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut graphs = std::collections::BTreeMap::new();
    for batch in SIZES {
        graphs.insert(batch, draw(batch)?);
    }
    let weights = [("w".to_owned(), weight(&[64, 32], 0.125)), ("bias".to_owned(), weight(&[1, 32], -1.0))];
    let folder = tempfile::tempdir()?;
    Model::new(Spec::new("layer", &["x"], &["y"], &SIZES), graphs, weights.into())?.save(folder.path())?;

    // What `verdigris serve` does. On a GPU: Device::open("cuda:0", &config, policy).
    let mut service = Service::start(Settings { listen: "127.0.0.1:0".parse()?, limits: Limits::default(), metrics: None })?;
    let warm = Model::load(folder.path())?.warm(&Device::cpu())?;
    let signature = warm.signature.clone();
    service.serve(vec![warm])?;

    let mut client = Client::connect(service.address(), Duration::from_secs(5))?;
    let data = vec!["1"; 64].join(",");
    let body = format!(r#"{{ "inputs": [{{ "name": "x", "shape": [1, 64], "datatype": "FP32", "data": [{data}] }}] }}"#);
    let reply = client.post("/v2/models/layer/infer", &[("x-request-id", "first"), ("x-deadline-ms", "2000")], body.as_bytes())?;
    // 64 · 0.125 − 1.
    assert!(reply.status == 200 && reply.text().contains(r#""data":[7.0,7.0"#), "{}", reply.text());

    let load = Load { clients: 8, rows: 1, time: Duration::from_millis(200), warm_up: Duration::from_millis(50) };
    let measured = offer(service.address(), &signature, &load);
    assert!(measured.failures == 0 && measured.answers > 0 && measured.mean_batch_rows >= 1.0, "{measured:?}");
    drop(client);
    assert!(service.shutdown().is_clean());
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_runs() {
        super::main().unwrap();
    }
}
