//! `verdigris run`: any graph on real tensors, from files to files.

use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use verdigris::{Config, Device, HostValue, Policy, Tensor};
use verdigris_graph::{TensorDesc, json};
use verdigris_tensor::{DType, Layout, num};

use verdigris_cli::table::{self, Align};
use verdigris_cli::tensor_files::{self, Stored};
use verdigris_cli::{Verdict, say};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// The graph, as JSON.
    graph: PathBuf,
    /// A tensor that is read: NAME=FILE.npy or NAME=FILE.safetensors#TENSOR. NAME is the tensor's name or #uid in the graph.
    #[arg(long = "in", value_name = "NAME=FILE")]
    inputs: Vec<String>,
    /// A tensor that is written: NAME=FILE.npy, or NAME=FILE.safetensors, which holds all that are written into it.
    #[arg(long = "out", value_name = "NAME=FILE")]
    outputs: Vec<String>,
    /// A host scalar: NAME=NUMBER.
    #[arg(long = "scalar", value_name = "NAME=NUMBER")]
    scalars: Vec<String>,
    /// Where to run: cpu or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Ask for the same bits each time, whatever the graph says. The CPU always gives them.
    #[arg(long)]
    deterministic: bool,
    /// Show which engines were chosen and why, and what each part took.
    #[arg(long)]
    explain: bool,
    /// Print what --explain shows as JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<Verdict> {
    // Before anything takes time.
    for (_, file) in arguments.outputs.iter().filter_map(|text| text.split_once('=')) {
        tensor_files::check_target(file)?;
    }
    let path = arguments.graph.display();
    let text = std::fs::read_to_string(&arguments.graph).with_context(|| format!("reading {path}"))?;
    let graph = json::graph_from_json(&text).with_context(|| path.to_string())?;
    let policy = Policy { deterministic: arguments.deterministic, ..Policy::default() };
    let device = Device::open(&arguments.device, &Config::from_environment()?, policy)?;
    let plan = device.plan(&graph)?;
    let inputs = assigned(&arguments.inputs, &plan.inputs().collect::<Vec<_>>(), "--in")?;
    let outputs = assigned(&arguments.outputs, &plan.outputs().collect::<Vec<_>>(), "--out")?;
    let mut scalars = Vec::new();
    for (wanted, value) in assigned(&arguments.scalars, &plan.scalars().collect::<Vec<_>>(), "--scalar")? {
        let told = || format!("--scalar {}={value}", wanted.name);
        let number: HostValue = if wanted.dtype.is_integer() {
            value.parse::<i64>().with_context(told)?.into()
        } else {
            value.parse::<f64>().with_context(told)?.into()
        };
        scalars.push((wanted.uid, number));
    }
    let mut tensors = Vec::new();
    for (wanted, file) in &inputs {
        let stored = tensor_files::read(file)?;
        let bytes = fitted(wanted, &stored).with_context(|| file.to_string())?;
        tensors.push((wanted.uid, Tensor::from_bytes(&device, wanted.dtype, wanted.layout, &bytes)?));
    }
    let bound: Vec<_> = tensors.iter().map(|(uid, tensor)| (*uid, tensor)).collect();
    let (results, report) = device.run_timed(&plan, &bound, &scalars)?;
    let mut written = Vec::with_capacity(outputs.len());
    for (wanted, file) in &outputs {
        let result = plan.outputs().position(|output| output.uid == wanted.uid).and_then(|i| results.get(i));
        let Some(result) = result else { continue };
        written.push((*file, wanted.name.as_str(), packed(wanted, &result.to_bytes()?)?));
    }
    tensor_files::write(&written)?;
    if report.is_downgraded {
        eprintln!("verdigris: memory, or the alignment of an address, did not do for the ways chosen; others ran, as told by --explain");
    }
    if arguments.json {
        let line = serde_json::json!({ "device": device.name(), "run": report, "explanation": plan.explain() });
        say!("{line}");
    } else if arguments.explain {
        say!("device     {}", device.name());
        say!("workspace  {} bytes\n", report.workspace_bytes);
        let head = [("part", Align::Left), ("engine", Align::Left), ("setting", Align::Left), ("µs", Align::Right)];
        let rows =
            report.parts.iter().map(|part| vec![part.name.clone(), part.engine.to_owned(), part.knobs.clone(), format!("{:.1}", part.us)]);
        table::print(&head, &rows.collect::<Vec<_>>());
        match plan.explain() {
            Some(explanation) => say!("\n{}", explanation.to_string().trim_end()),
            None => say!("\nnothing was chosen: the CPU has one way for each op, and takes every graph"),
        }
    }
    Ok(Verdict::Good)
}

/// The `NAME=VALUE`s of one kind, each with the tensor it names.
fn assigned<'a>(given: &'a [String], known: &[&'a TensorDesc], option: &str) -> anyhow::Result<Vec<(&'a TensorDesc, &'a str)>> {
    let mut all: Vec<(&TensorDesc, &str)> = Vec::new();
    for text in given {
        let Some((name, value)) = text.split_once('=') else { bail!("{option} {text}: written NAME=…") };
        let named: Vec<&TensorDesc> =
            known.iter().copied().filter(|tensor| tensor.name == name || tensor.uid.to_string() == name).collect();
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

/// The bytes of a file's tensor as the graph's tensor holds them: moved to its strides, and converted between floating-point types, where
/// narrower ones round, and between integer types, where every value is there in both.
fn fitted(wanted: &TensorDesc, stored: &Stored) -> anyhow::Result<Vec<u8>> {
    let (have, need) = (stored.layout.dims(), wanted.layout.dims());
    ensure!(have == need, "tensor `{}` has dims {need:?}, the file {have:?}", wanted.name);
    let (from, to) = (stored.dtype, wanted.dtype);
    ensure!(
        from == to || from.is_float() == to.is_float(),
        "tensor `{}` is {to}, the file {from}; numbers are converted between floating-point types, and between integers",
        wanted.name
    );
    let mut bytes = zeros(wanted.layout.span_bytes(to))?;
    moved((from, &stored.layout, &stored.bytes), (to, &wanted.layout, &mut bytes)).with_context(|| format!("tensor `{}`", wanted.name))?;
    Ok(bytes)
}

/// A result, packed row-major.
fn packed(wanted: &TensorDesc, bytes: &[u8]) -> anyhow::Result<Stored> {
    let layout = Layout::row_major(wanted.layout.dims())?;
    let mut to = zeros(layout.span_bytes(wanted.dtype))?;
    moved((wanted.dtype, &wanted.layout, bytes), (wanted.dtype, &layout, &mut to))?;
    Ok(Stored { dtype: wanted.dtype, layout, bytes: to })
}

fn zeros(count: u128) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(count)?).with_context(|| format!("a tensor of {count} bytes"))?;
    bytes.resize(usize::try_from(count)?, 0);
    Ok(bytes)
}

/// Each element from its place in one layout to its place in the other.
fn moved((from, layout, source): (DType, &Layout, &[u8]), (to, place, target): (DType, &Layout, &mut [u8])) -> anyhow::Result<()> {
    for position in 0..layout.elements() {
        let (Some(a), Some(b)) = (layout.offset_of_position(position), place.offset_of_position(position)) else { continue };
        let source = &source[a as usize * from.bytes()..][..from.bytes()];
        let target = &mut target[b as usize * to.bytes()..][..to.bytes()];
        if from == to {
            target.copy_from_slice(source);
        } else if from.is_float() {
            // Both slices hold a whole element.
            let _ = num::write_element(to, num::read_element(from, source).unwrap_or(f64::NAN), target);
        } else {
            let value = integer(from, source);
            ensure!(
                to.integer_range().is_some_and(|(least, greatest)| (least..=greatest).contains(&value)),
                "element {position} is {value}, which {to} does not hold"
            );
            target.copy_from_slice(&value.to_le_bytes()[..to.bytes()]);
        }
    }
    Ok(())
}

/// An integer, little-endian.
fn integer(dtype: DType, element: &[u8]) -> i64 {
    let mut bytes = [0; 8];
    bytes[..element.len()].copy_from_slice(element);
    let unused_bits = 64 - 8 * element.len() as u32;
    let is_signed = dtype.integer_range().is_some_and(|(least, _)| least < 0);
    // Up to the top and back again: the sign fills what is left.
    if is_signed { (i64::from_le_bytes(bytes) << unused_bits) >> unused_bits } else { i64::from_le_bytes(bytes) }
}

#[cfg(test)]
mod tests {
    use verdigris_graph::{GraphBuilder, HostScalar, UnaryOp};

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
        tensor_files::write(&[(&at("x.npy"), "x", stored([1.0, -2.0, 3.0, 4.0]))]).unwrap();
        let mut arguments = Arguments {
            graph: at("graph.json").into(),
            inputs: vec![format!("x={}", at("x.npy"))],
            outputs: vec![format!("y={}", at("y.npy"))],
            scalars: vec!["factor=0.5".to_owned()],
            device: "cpu".to_owned(),
            deterministic: true,
            explain: true,
            json: false,
        };
        assert_eq!(run(&arguments).unwrap(), Verdict::Good);
        assert_eq!(tensor_files::read(&at("y.npy")).unwrap(), stored([0.5, 0.0, 1.5, 2.0]));

        let told = |arguments: &Arguments| verdigris_cli::chain(&run(arguments).unwrap_err());
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
        let tensor = |dtype| TensorDesc::new(verdigris_graph::Uid(1), "x", dtype, Layout::row_major(&[2]).unwrap());
        let stored = |dtype: DType, bytes: Vec<u8>| {
            let dims = [(bytes.len() / dtype.bytes()) as u64];
            Stored { dtype, layout: Layout::row_major(&dims).unwrap(), bytes }
        };
        let told = |dtype, stored: &Stored| format!("{:#}", fitted(&tensor(dtype), stored).unwrap_err());
        assert_eq!(told(DType::I32, &stored(DType::I32, vec![0; 12])), "tensor `x` has dims [2], the file [3]");
        assert!(told(DType::I32, &stored(DType::F32, vec![0; 8])).starts_with("tensor `x` is i32, the file f32"));
        assert!(told(DType::F32, &stored(DType::I64, vec![0; 16])).starts_with("tensor `x` is f32, the file i64"));

        // NumPy's own integers and halves are what labels and weights often come in.
        let longs = |values: [i64; 2]| stored(DType::I64, values.iter().flat_map(|value| value.to_le_bytes()).collect());
        let ints = |values: [i32; 2]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(fitted(&tensor(DType::I32), &longs([-7, 1 << 30])).unwrap(), ints([-7, 1 << 30]));
        assert_eq!(told(DType::I32, &longs([0, 1 << 31])), "tensor `x`: element 1 is 2147483648, which i32 does not hold");
        assert_eq!(told(DType::U8, &longs([-1, 0])), "tensor `x`: element 0 is -1, which u8 does not hold");
        assert_eq!(fitted(&tensor(DType::I32), &stored(DType::I8, vec![0xfe, 0x7f])).unwrap(), ints([-2, 127]));
        assert_eq!(fitted(&tensor(DType::I32), &stored(DType::U8, vec![0xfe, 0x7f])).unwrap(), ints([254, 127]));
        let halves = stored(DType::F16, vec![0x00, 0x3c, 0x00, 0xc0]);
        let floats: Vec<u8> = [1.0f32, -2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(fitted(&tensor(DType::F32), &halves).unwrap(), floats);

        // Two elements, and more between them than there is memory.
        let wide = TensorDesc::new(verdigris_graph::Uid(1), "x", DType::F32, Layout::new(&[2], &[1 << 46]).unwrap());
        let error = fitted(&wide, &stored(DType::F32, floats)).unwrap_err().to_string();
        assert!(error.contains("a tensor of 281474976710660 bytes"), "{error}");
    }
}
