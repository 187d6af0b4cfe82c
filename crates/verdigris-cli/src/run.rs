//! `verdigris run`: any graph on real tensors, from files to files.

use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use verdigris::{Config, Device, Policy, Tensor};
use verdigris_graph::{TensorDesc, json};
use verdigris_tensor::{Layout, num};

use crate::Verdict;
use crate::table::{self, Align};
use crate::tensor_files::{self, Stored};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// The graph, as JSON.
    graph: PathBuf,
    /// A tensor that is read: NAME=FILE.npy or NAME=FILE.safetensors#TENSOR. NAME is the tensor's name or #uid in the graph.
    #[arg(long = "in", value_name = "NAME=FILE")]
    inputs: Vec<String>,
    /// A tensor that is written: NAME=FILE.npy or NAME=FILE.safetensors.
    #[arg(long = "out", value_name = "NAME=FILE")]
    outputs: Vec<String>,
    /// A host scalar: NAME=NUMBER.
    #[arg(long = "scalar", value_name = "NAME=NUMBER")]
    scalars: Vec<String>,
    /// Where to run: cpu or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Show which engines were chosen and why, and what each part took.
    #[arg(long)]
    explain: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<Verdict> {
    let path = arguments.graph.display();
    let text = std::fs::read_to_string(&arguments.graph).with_context(|| format!("reading {path}"))?;
    let graph = json::graph_from_json(&text).with_context(|| path.to_string())?;
    let device = Device::open(&arguments.device, &Config::from_environment()?, Policy::default())?;
    let ready = device.prepare(&graph)?;
    let inputs = assigned(&arguments.inputs, ready.inputs(), "--in")?;
    let outputs = assigned(&arguments.outputs, ready.outputs(), "--out")?;
    let mut scalars = Vec::new();
    for (wanted, value) in assigned(&arguments.scalars, ready.scalars(), "--scalar")? {
        scalars.push((wanted.uid, value.parse::<f64>().with_context(|| format!("--scalar {}={value}", wanted.name))?));
    }
    let mut tensors = Vec::new();
    for (wanted, file) in &inputs {
        let stored = tensor_files::read(file)?;
        let bytes = fitted(wanted, &stored).with_context(|| file.to_string())?;
        tensors.push((wanted.uid, Tensor::from_bytes(&device, wanted.dtype, wanted.layout, &bytes)?));
    }
    let bound: Vec<_> = tensors.iter().map(|(uid, tensor)| (*uid, tensor)).collect();
    let (results, report) = ready.run_reported(&bound, &scalars)?;
    for (wanted, file) in &outputs {
        let result = ready.outputs().iter().position(|output| output.uid == wanted.uid).and_then(|i| results.get(i));
        let Some(result) = result else { continue };
        tensor_files::write(file, &wanted.name, &packed(wanted, &result.to_bytes()?)?)?;
    }
    if arguments.explain {
        say!("device     {}", device.name());
        say!("workspace  {} bytes\n", report.workspace_bytes);
        let head = [("part", Align::Left), ("engine", Align::Left), ("setting", Align::Left), ("µs", Align::Right)];
        let rows =
            report.parts.iter().map(|part| vec![part.name.clone(), part.engine.to_owned(), part.knobs.clone(), format!("{:.1}", part.us)]);
        table::print(&head, &rows.collect::<Vec<_>>());
        if let Some(explanation) = ready.explain() {
            say!("\n{}", serde_json::to_string_pretty(explanation)?);
        }
    }
    Ok(Verdict::Good)
}

/// The `NAME=VALUE`s of one kind, each with the tensor it names.
fn assigned<'a>(given: &'a [String], known: &'a [TensorDesc], option: &str) -> anyhow::Result<Vec<(&'a TensorDesc, &'a str)>> {
    let mut all: Vec<(&TensorDesc, &str)> = Vec::new();
    for text in given {
        let Some((name, value)) = text.split_once('=') else { bail!("{option} {text}: written NAME=…") };
        let named: Vec<&TensorDesc> = known.iter().filter(|tensor| tensor.name == name || tensor.uid.to_string() == name).collect();
        let [tensor] = named[..] else {
            let names = known.iter().map(|tensor| format!("`{}`", tensor.name)).collect::<Vec<_>>().join(", ");
            let known = if names.is_empty() { "it has none".to_owned() } else { format!("there are {names}") };
            let fault = if named.is_empty() { "the graph has no such tensor" } else { "several tensors have this name; give the #uid" };
            bail!("{option} {name}: {fault}; {known}");
        };
        ensure!(all.iter().all(|(other, _)| other.uid != tensor.uid), "{option} {name}: given twice");
        all.push((tensor, value));
    }
    Ok(all)
}

/// The bytes of a file's tensor as the graph's tensor holds them: moved to its strides; rounded if the file has f64 or f32 and the graph a
/// narrower floating-point type.
fn fitted(wanted: &TensorDesc, stored: &Stored) -> anyhow::Result<Vec<u8>> {
    let (have, need) = (stored.layout.dims(), wanted.layout.dims());
    ensure!(have == need, "tensor `{}` has dims {need:?}, the file {have:?}", wanted.name);
    let rounds = stored.dtype.is_float() && wanted.dtype.is_float() && stored.dtype.bytes() >= wanted.dtype.bytes();
    ensure!(
        stored.dtype == wanted.dtype || rounds,
        "tensor `{}` is {}, the file {}; only floating-point types are rounded, to narrower ones",
        wanted.name,
        wanted.dtype,
        stored.dtype
    );
    let mut bytes = vec![0; wanted.layout.span_elements() as usize * wanted.dtype.bytes()];
    moved(stored.dtype, &stored.layout, &stored.bytes, wanted.dtype, &wanted.layout, &mut bytes);
    Ok(bytes)
}

/// A result, packed row-major.
fn packed(wanted: &TensorDesc, bytes: &[u8]) -> anyhow::Result<Stored> {
    let layout = Layout::row_major(wanted.layout.dims())?;
    let mut to = vec![0; layout.span_elements() as usize * wanted.dtype.bytes()];
    moved(wanted.dtype, &wanted.layout, bytes, wanted.dtype, &layout, &mut to);
    Ok(Stored { dtype: wanted.dtype, layout, bytes: to })
}

fn moved(
    from_dtype: verdigris_tensor::DType,
    from: &Layout,
    source: &[u8],
    dtype: verdigris_tensor::DType,
    to: &Layout,
    target: &mut [u8],
) {
    for position in 0..from.elements() {
        let (Some(a), Some(b)) = (from.offset_of_position(position), to.offset_of_position(position)) else { continue };
        let source = &source[a as usize * from_dtype.bytes()..];
        let target = &mut target[b as usize * dtype.bytes()..];
        if from_dtype == dtype {
            target[..dtype.bytes()].copy_from_slice(&source[..dtype.bytes()]);
        } else {
            // Both slices hold a whole element.
            let _ = num::write_element(dtype, num::read_element(from_dtype, source).unwrap_or(f64::NAN), target);
        }
    }
}

#[cfg(test)]
mod tests {
    use verdigris_graph::{GraphBuilder, HostScalar, UnaryOp};
    use verdigris_tensor::DType;

    use super::*;

    #[test]
    fn a_graph_runs_from_files_to_files() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let mut g = GraphBuilder::new("scaled relu");
        let x = g.tensor("x", DType::Bf16, Layout::with_order(&[2, 2], &[1, 0]).unwrap());
        let relu = g.unary("relu", UnaryOp::Relu, x).unwrap();
        let factor = g.host_scalar("factor", DType::F32);
        let y = g.scale("scale", relu, HostScalar::Bound(factor)).unwrap();
        g.store(y, "y", DType::F32).unwrap();
        std::fs::write(at("graph.json"), json::graph_to_json(&g.finish().unwrap())).unwrap();
        let values = |list: [f32; 4]| list.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let stored = |list| Stored { dtype: DType::F32, layout: Layout::row_major(&[2, 2]).unwrap(), bytes: values(list) };
        tensor_files::write(&at("x.npy"), "x", &stored([1.0, -2.0, 3.0, 4.0])).unwrap();
        let mut arguments = Arguments {
            graph: at("graph.json").into(),
            inputs: vec![format!("x={}", at("x.npy"))],
            outputs: vec![format!("y={}", at("y.npy"))],
            scalars: vec!["factor=0.5".to_owned()],
            device: "cpu".to_owned(),
            explain: true,
        };
        assert_eq!(run(&arguments).unwrap(), Verdict::Good);
        assert_eq!(tensor_files::read(&at("y.npy")).unwrap(), stored([0.5, 0.0, 1.5, 2.0]));

        let told = |arguments: &Arguments| crate::chain(&run(arguments).unwrap_err());
        arguments.scalars.clear();
        assert!(told(&arguments).contains("factor"), "{}", told(&arguments));
        arguments.outputs = vec!["z=z.npy".to_owned()];
        assert_eq!(told(&arguments), "--out z: the graph has no such tensor; there are `y`");
        arguments.inputs = vec![format!("x={}", at("missing.npy"))];
        arguments.outputs.clear();
        assert!(told(&arguments).contains("missing.npy"), "{}", told(&arguments));
        std::fs::write(at("graph.json"), "{ \"name\": ").unwrap();
        assert!(told(&arguments).contains("graph.json: line 1"), "{}", told(&arguments));
        arguments.graph = at("nothing.json").into();
        assert!(told(&arguments).contains("nothing.json"));
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let tensor = TensorDesc::new(verdigris_graph::Uid(1), "x", DType::I32, Layout::row_major(&[2]).unwrap());
        let stored = |dtype: DType, dims: &[u64]| {
            let layout = Layout::row_major(dims).unwrap();
            Stored { dtype, layout, bytes: vec![0; layout.span_elements() as usize * dtype.bytes()] }
        };
        let told = |stored: &Stored| fitted(&tensor, stored).unwrap_err().to_string();
        assert_eq!(told(&stored(DType::I32, &[3])), "tensor `x` has dims [2], the file [3]");
        assert!(told(&stored(DType::F32, &[2])).starts_with("tensor `x` is i32, the file f32"));
    }
}
