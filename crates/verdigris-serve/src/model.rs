//! A model: its graphs, its weights and what `model.toml` says; read from a folder, checked, planned and warmed.
//!
//! ```
//! use verdigris_serve::{Model, Spec, Weight};
//! use verdigris::{DType, Device, GraphBuilder, Layout, Precision};
//!
//! let draw = |batch: u64| -> Result<_, Box<dyn std::error::Error>> {
//!     let mut g = GraphBuilder::new("linear");
//!     let x = g.tensor("x", DType::F32, Layout::row_major(&[batch, 2])?);
//!     let w = g.tensor("w", DType::F32, Layout::row_major(&[2, 3])?);
//!     let product = g.matmul("product", x, w, Precision::Fp32)?;
//!     g.store(product, "y", DType::F32)?;
//!     Ok((batch, g.finish()?))
//! };
//! let spec = Spec::new("linear", &["x"], &["y"], &[1, 4]);
//! let weight = Weight { dtype: DType::F32, dims: vec![2, 3], bytes: vec![0; 24] };
//! let model = Model::new(spec, [draw(1)?, draw(4)?].into(), [("w".to_owned(), weight)].into())?;
//!
//! let folder = tempfile::tempdir()?;
//! model.save(folder.path())?;
//! let again = Model::load(folder.path())?;
//! let served = again.warm(&Device::cpu())?;
//! assert_eq!(served.signature.inputs[0].row_dims, [2]);
//! assert_eq!(served.signature.outputs[0].row_bytes(), 12);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use verdigris::plan::PartEngine;
use verdigris::whole_files::write_whole;
use verdigris::{DType, Device, Graph, HostValue, Layout, Plan, Policy, Tensor, TensorDesc};

use crate::error::LoadError;
use crate::executor::{DeviceExecutor, Executor, Place, Planned, Port};
use crate::template::{self, IN_FILE_NAME};
use crate::warm::prove_rows_apart;
use crate::weights::{self, Weight};

/// The file of a model folder that names all others.
pub const MANIFEST: &str = "model.toml";
/// The greatest batch, far above what a device gains from.
const MOST_ROWS: u64 = 65_536;
/// An hour: whoever waits longer has gone away.
pub(crate) const LONGEST_DEADLINE_MS: u64 = 3_600_000;
const LONGEST_WAIT_US: u64 = 10_000_000;

/// What `model.toml` says.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// The model's address: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// The graph file: a template, or with `{batch}` in its name, a file for each batch size.
    #[serde(default = "default_graph")]
    pub graph: String,
    /// The weights, as safetensors.
    #[serde(default = "default_weights")]
    pub weights: String,
    /// The tensors that a request brings; their first dim is the batch.
    pub inputs: Vec<String>,
    /// The tensors that an answer holds; their first dim is the batch.
    pub outputs: Vec<String>,
    /// The batch sizes that are planned.
    #[serde(default = "default_batch_sizes")]
    pub batch_sizes: Vec<u64>,
    /// How long a batch may wait for more rows, in microseconds.
    #[serde(default = "default_max_wait_us")]
    pub max_wait_us: u64,
    /// The deadline of a request that states none, in milliseconds.
    #[serde(default = "default_deadline_ms")]
    pub deadline_ms: u64,
    /// Rows that may wait; more are refused.
    #[serde(default = "default_queue_rows")]
    pub queue_rows: u64,
    /// Whether the plans must give the same bits at every run. The CPU's always do.
    #[serde(default)]
    pub deterministic: bool,
    /// Names in the weights file of tensors that have other ones in the graph.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub weight_names: BTreeMap<String, String>,
    /// Host scalars of the graph.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scalars: BTreeMap<String, f64>,
}

fn default_graph() -> String {
    "graph.json".to_owned()
}

fn default_weights() -> String {
    "weights.safetensors".to_owned()
}

fn default_batch_sizes() -> Vec<u64> {
    vec![1, 2, 4, 8, 16, 32, 64]
}

const fn default_max_wait_us() -> u64 {
    1_000
}

const fn default_deadline_ms() -> u64 {
    1_000
}

const fn default_queue_rows() -> u64 {
    1_024
}

impl Spec {
    /// A model of this name, with the defaults for all else.
    pub fn new(name: &str, inputs: &[&str], outputs: &[&str], batch_sizes: &[u64]) -> Spec {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Spec {
            name: name.to_owned(),
            graph: default_graph(),
            weights: default_weights(),
            inputs: owned(inputs),
            outputs: owned(outputs),
            batch_sizes: batch_sizes.to_vec(),
            max_wait_us: default_max_wait_us(),
            deadline_ms: default_deadline_ms(),
            queue_rows: default_queue_rows(),
            deterministic: false,
            weight_names: BTreeMap::new(),
            scalars: BTreeMap::new(),
        }
    }

    fn check(&self) -> Result<(), LoadError> {
        let wrong = |field, value: String, rule| Err(LoadError::Field { model: self.name.clone(), field, value, rule });
        let is_plain = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
        if self.name.is_empty() || self.name.len() > 64 || !is_plain(&self.name) || self.name.starts_with('.') {
            return wrong("name", format!("`{}`", self.name), "it is 1 to 64 letters, digits, `-`, `_` and `.`, and begins with no dot");
        }
        for (field, file) in [("graph", &self.graph), ("weights", &self.weights)] {
            let stays = Path::new(file).components().all(|part| matches!(part, std::path::Component::Normal(_)));
            if file.is_empty() || !stays {
                return wrong(field, format!("`{file}`"), "it names a file in the model's folder");
            }
        }
        for (field, names) in [("inputs", &self.inputs), ("outputs", &self.outputs)] {
            if names.is_empty() || (1..names.len()).any(|i| names[..i].contains(&names[i])) {
                return wrong(field, format!("{names:?}"), "it names one tensor at least, and none twice");
            }
        }
        let sizes = &self.batch_sizes;
        if sizes.is_empty() || sizes[0] == 0 || !sizes.is_sorted_by(|a, b| a < b) || sizes.last() > Some(&MOST_ROWS) {
            return wrong("batch_sizes", format!("{sizes:?}"), "it lists sizes from 1 to 65536, each greater than the one before");
        }
        if self.max_wait_us > LONGEST_WAIT_US {
            return wrong("max_wait_us", self.max_wait_us.to_string(), "it is at most 10 seconds");
        }
        if self.deadline_ms == 0 || self.deadline_ms > LONGEST_DEADLINE_MS {
            return wrong("deadline_ms", self.deadline_ms.to_string(), "it is from 1 to 3600000, an hour");
        }
        if sizes.last() > Some(&self.queue_rows) {
            return wrong(
                "queue_rows",
                self.queue_rows.to_string(),
                "it is no less than the greatest of batch_sizes, or no such batch could form",
            );
        }
        Ok(())
    }
}

/// What clients have to know of a model, and what the batcher does.
#[derive(Clone, PartialEq, Debug)]
pub struct Signature {
    /// Its address.
    pub name: String,
    /// What a request brings.
    pub inputs: Vec<Port>,
    /// What an answer holds.
    pub outputs: Vec<Port>,
    /// The planned batch sizes, rising.
    pub batch_sizes: Vec<u64>,
    /// How long a batch may wait for more rows.
    pub max_wait: Duration,
    /// The deadline of requests that state none.
    pub deadline: Duration,
    /// Rows that may wait.
    pub queue_rows: u64,
    /// Where it runs.
    pub device: String,
    /// The engine of each part, by batch size.
    pub engines: BTreeMap<u64, Vec<PartEngine>>,
    /// Whether it was shown at the warm-up that rows do not change each other's results. Not, where two runs of one batch differ anyway.
    pub rows_proved_apart: bool,
}

impl Signature {
    /// The greatest batch: more rows in one request are refused.
    pub fn most_rows(&self) -> u64 {
        self.batch_sizes.last().copied().unwrap_or(1)
    }

    /// The smallest planned batch for so many rows.
    pub(crate) fn planned(&self, rows: u64) -> u64 {
        self.batch_sizes.iter().copied().find(|&size| size >= rows).unwrap_or(rows)
    }
}

/// A model that is warm: it can be served.
pub struct Served {
    /// What clients have to know.
    pub signature: Signature,
    /// Who computes its batches.
    pub executor: Box<dyn Executor>,
}

/// A model whose files have been read and checked.
pub struct Model {
    spec: Spec,
    graphs: BTreeMap<u64, Graph>,
    weights: Arc<BTreeMap<String, Weight>>,
    /// For messages.
    weights_file: String,
}

impl Model {
    /// A model of graphs by batch size and weights by name.
    ///
    /// # Errors
    /// A spec that breaks a rule; a batch size without a graph ([`LoadError::Field`]).
    pub fn new(spec: Spec, graphs: BTreeMap<u64, Graph>, weights: BTreeMap<String, Weight>) -> Result<Model, LoadError> {
        Model::of(spec, graphs, Arc::new(weights), "the weights given".to_owned())
    }

    fn of(
        spec: Spec,
        graphs: BTreeMap<u64, Graph>,
        weights: Arc<BTreeMap<String, Weight>>,
        weights_file: String,
    ) -> Result<Model, LoadError> {
        spec.check()?;
        if let Some(missing) = spec.batch_sizes.iter().find(|size| !graphs.contains_key(size)) {
            let value = missing.to_string();
            return Err(LoadError::Field { model: spec.name, field: "batch_sizes", value, rule: "there is a graph for each size" });
        }
        Ok(Model { spec, graphs, weights, weights_file })
    }

    /// A model from a folder with `model.toml`, or from a file of that form. Nothing is planned yet.
    ///
    /// # Errors
    /// All of [`LoadError`] but those of a device.
    pub fn load(path: &Path) -> Result<Model, LoadError> {
        let manifest = if path.is_dir() { path.join(MANIFEST) } else { path.to_owned() };
        let folder = manifest.parent().unwrap_or(Path::new(""));
        let spec: Spec = toml::from_str(&read_text(&manifest)?)
            .map_err(|error| LoadError::Manifest { file: manifest.display().to_string(), message: error.to_string() })?;
        spec.check()?;
        let mut graphs = BTreeMap::new();
        let one = if spec.graph.contains(IN_FILE_NAME) { None } else { Some(read_text(&folder.join(&spec.graph))?) };
        for &batch in &spec.batch_sizes {
            let file = folder.join(spec.graph.replace(IN_FILE_NAME, &batch.to_string()));
            let own;
            let text = match &one {
                Some(text) => text,
                None => {
                    own = read_text(&file)?;
                    &own
                }
            };
            graphs.insert(batch, template::graph_of_batch(&file.display().to_string(), text, batch)?);
        }
        let weights_path = folder.join(&spec.weights);
        let weights = Arc::new(weights::read(&weights_path)?);
        Ok(Model { spec, graphs, weights, weights_file: weights_path.display().to_string() })
    }

    /// Writes the model as a folder that [`Model::load`] reads: a graph file for each batch size.
    ///
    /// # Errors
    /// [`LoadError::Io`], [`LoadError::Weights`].
    pub fn save(&self, folder: &Path) -> Result<(), LoadError> {
        let spec = Spec { graph: format!("graph-{IN_FILE_NAME}.json"), weights: default_weights(), ..self.spec.clone() };
        let manifest = folder.join(MANIFEST);
        let text = toml::to_string(&spec)
            .map_err(|error| LoadError::Manifest { file: manifest.display().to_string(), message: error.to_string() })?;
        let failed = |path: &Path, source| LoadError::Io { file: path.display().to_string(), source };
        std::fs::create_dir_all(folder).map_err(|source| failed(folder, source))?;
        // First, so that no manifest of an earlier model stands beside files of this one.
        match std::fs::remove_file(&manifest) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => return Err(failed(&manifest, source)),
            _ => {}
        }
        for (batch, graph) in &self.graphs {
            let file = folder.join(spec.graph.replace(IN_FILE_NAME, &batch.to_string()));
            write(&file, verdigris::graph::json::graph_to_json(graph).as_bytes())?;
        }
        weights::write(&folder.join(&spec.weights), &self.weights)?;
        // Last, so that a folder with a manifest is whole.
        write(&manifest, text.as_bytes())
    }

    /// What `model.toml` says.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The same model under another spec: other batch sizes out of those that it has, another wait, another bound.
    ///
    /// # Errors
    /// As [`Model::new`].
    pub fn with_spec(&self, spec: Spec) -> Result<Model, LoadError> {
        Model::of(spec, self.graphs.clone(), self.weights.clone(), self.weights_file.clone())
    }

    /// Plans every batch size on the device, brings the weights there, runs each size, and shows that rows do not change each other's
    /// results. On a GPU choices come from the plan cache as for every plan, and kernels are loaded here, not in the first request.
    ///
    /// # Errors
    /// [`LoadError::Tensor`], [`LoadError::Shape`], [`LoadError::MissingWeight`], [`LoadError::Weight`], [`LoadError::Device`],
    /// [`LoadError::Warm`], [`LoadError::CoupledRows`].
    pub fn warm(&self, device: &Device) -> Result<Served, LoadError> {
        self.warm_while(device, &mut || true)
    }

    /// As [`Model::warm`], which may take minutes, for one that may be ended before: `goes_on` is asked before every batch size is planned, and before it is run.
    ///
    /// # Errors
    /// [`LoadError::Ended`] once `goes_on` said no, and those of [`Model::warm`].
    pub fn warm_while(&self, device: &Device, goes_on: &mut dyn FnMut() -> bool) -> Result<Served, LoadError> {
        let spec = &self.spec;
        let mut planned = BTreeMap::new();
        let mut shared: BTreeMap<String, (DType, Layout, Tensor)> = BTreeMap::new();
        let mut ports: Option<(Vec<Port>, Vec<Port>)> = None;
        let policy = Policy { deterministic: spec.deterministic || device.policy().deterministic, ..device.policy().clone() };
        for &batch in &spec.batch_sizes {
            if !goes_on() {
                return Err(LoadError::Ended { model: spec.name.clone() });
            }
            let told = |source| LoadError::Device { model: spec.name.clone(), batch, source };
            let plan = device.plan_under(&self.graphs[&batch], &policy, &mut |_| {}).map_err(told)?;
            let read: Vec<&TensorDesc> = plan.inputs().collect();
            let written: Vec<&TensorDesc> = plan.outputs().collect();
            let inputs = self.places(batch, "input", &spec.inputs, &read)?;
            let outputs = self.places(batch, "output", &spec.outputs, &written)?;
            let port = |(_, tensor): &(usize, &TensorDesc)| Port {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                row_dims: tensor.layout.dims()[1..].to_vec(),
            };
            let now: (Vec<Port>, Vec<Port>) = (inputs.iter().map(port).collect(), outputs.iter().map(port).collect());
            match &ports {
                None => ports = Some(now),
                Some(before) => self.same_ports(batch, before, &now)?,
            }
            let mut weights = Vec::new();
            for tensor in read.iter().filter(|tensor| !spec.inputs.contains(&tensor.name)) {
                weights.push((tensor.uid, self.weight(batch, device, tensor, &mut shared)?));
            }
            let scalars = self.scalars(batch, &plan)?;
            self.knows_all_names(batch, &plan)?;
            let place = |tensor: &TensorDesc| Place { uid: tensor.uid, dtype: tensor.dtype, layout: tensor.layout };
            let inputs = inputs.iter().map(|(_, tensor)| place(tensor)).collect();
            let outputs = outputs.iter().map(|(index, tensor)| (*index, place(tensor))).collect();
            planned.insert(batch, Planned { plan, inputs, outputs, weights, scalars });
        }
        let (inputs, outputs) = ports.unwrap_or_default();
        let mut executor = DeviceExecutor { device: device.clone(), planned };
        let mut signature = Signature {
            name: spec.name.clone(),
            inputs,
            outputs,
            batch_sizes: spec.batch_sizes.clone(),
            max_wait: Duration::from_micros(spec.max_wait_us),
            deadline: Duration::from_millis(spec.deadline_ms),
            queue_rows: spec.queue_rows,
            device: device.name().to_owned(),
            engines: executor.engines(),
            rows_proved_apart: false,
        };
        signature.rows_proved_apart = prove_rows_apart(&signature, &mut executor, goes_on)?;
        Ok(Served { signature, executor: Box::new(executor) })
    }

    /// The tensors of these names, each with its place in the list; each has the batch as its first dim.
    fn places<'t>(
        &self,
        batch: u64,
        role: &'static str,
        names: &[String],
        tensors: &[&'t TensorDesc],
    ) -> Result<Vec<(usize, &'t TensorDesc)>, LoadError> {
        let model = &self.spec.name;
        let mut found = Vec::new();
        for name in names {
            let mut of_name = tensors.iter().enumerate().filter(|(_, tensor)| tensor.name == *name);
            let (first, second) = (of_name.next(), of_name.next());
            let (Some((index, tensor)), None) = (first, second) else {
                let fault = if second.is_some() { "several tensors have this name" } else { "there is no such tensor" };
                let known = listed(tensors.iter().map(|tensor| tensor.name.as_str()));
                return Err(LoadError::Tensor { model: model.clone(), role, name: name.clone(), fault, batch, known });
            };
            let wrong = |found: String, wanted: String, rule| {
                Err(LoadError::Shape { model: model.clone(), batch, tensor: name.clone(), found, wanted, rule })
            };
            if tensor.layout.dims().first() != Some(&batch) {
                let wanted = format!("[{batch}, …]");
                return wrong(format!("{:?}", tensor.layout.dims()), wanted, "the first dim of inputs and outputs is the batch");
            }
            if tensor.dtype.is_fp8() {
                return wrong(
                    tensor.dtype.to_string(),
                    "a type of the protocol".to_owned(),
                    "the protocol has no type of 8-bit floats: convert in the graph",
                );
            }
            if tensor.layout.may_overlap() || tensor.layout.is_empty() {
                return wrong(
                    tensor.layout.to_string(),
                    "elements of their own".to_owned(),
                    "inputs and outputs have elements, each in its own place",
                );
            }
            found.push((index, *tensor));
        }
        Ok(found)
    }

    fn same_ports(&self, batch: u64, before: &(Vec<Port>, Vec<Port>), now: &(Vec<Port>, Vec<Port>)) -> Result<(), LoadError> {
        let pairs = before.0.iter().zip(&now.0).chain(before.1.iter().zip(&now.1));
        for (wanted, found) in pairs {
            if wanted != found {
                let words = |port: &Port| format!("{} [{batch}, {:?}]", port.dtype, port.row_dims);
                return Err(LoadError::Shape {
                    model: self.spec.name.clone(),
                    batch,
                    tensor: found.name.clone(),
                    found: words(found),
                    wanted: words(wanted),
                    rule: "batch sizes differ in the batch alone",
                });
            }
        }
        Ok(())
    }

    /// The weight of a tensor, on the device: one for all batch sizes.
    fn weight(
        &self,
        batch: u64,
        device: &Device,
        tensor: &TensorDesc,
        shared: &mut BTreeMap<String, (DType, Layout, Tensor)>,
    ) -> Result<Tensor, LoadError> {
        let spec = &self.spec;
        let wanted = (tensor.dtype, tensor.layout);
        if let Some((dtype, layout, there)) = shared.get(&tensor.name) {
            if (*dtype, *layout) == wanted {
                return Ok(there.clone());
            }
            return Err(LoadError::Shape {
                model: spec.name.clone(),
                batch,
                tensor: tensor.name.clone(),
                found: format!("{} {}", tensor.dtype, tensor.layout),
                wanted: format!("{dtype} {layout}"),
                rule: "a weight is the same tensor for all batch sizes, and tensors of one graph have names of their own",
            });
        }
        let key = spec.weight_names.get(&tensor.name).unwrap_or(&tensor.name);
        let Some(weight) = self.weights.get(key) else {
            let known = listed(self.weights.keys().map(String::as_str));
            let (model, name) = (spec.name.clone(), tensor.name.clone());
            return Err(LoadError::MissingWeight { model, tensor: name, key: key.clone(), file: self.weights_file.clone(), known });
        };
        if weight.dtype != tensor.dtype || weight.dims != tensor.layout.dims() {
            return Err(LoadError::Weight {
                model: spec.name.clone(),
                tensor: tensor.name.clone(),
                wanted_dtype: tensor.dtype,
                wanted_dims: tensor.layout.dims().to_vec(),
                dtype: weight.dtype.to_string(),
                dims: weight.dims.clone(),
                file: self.weights_file.clone(),
            });
        }
        let bytes = weights::placed(&tensor.layout, tensor.dtype, &weight.bytes);
        let there = Tensor::from_bytes(device, tensor.dtype, tensor.layout, &bytes).map_err(|source| LoadError::Device {
            model: spec.name.clone(),
            batch,
            source,
        })?;
        shared.insert(tensor.name.clone(), (tensor.dtype, tensor.layout, there.clone()));
        Ok(there)
    }

    /// A name under `[scalars]` or `[weight_names]` that the graph does not have is a mistake, not something to pass over.
    fn knows_all_names(&self, batch: u64, plan: &Plan) -> Result<(), LoadError> {
        let scalars: Vec<&str> = plan.scalars().map(|tensor| tensor.name.as_str()).collect();
        let weights: Vec<&str> = plan.inputs().map(|tensor| tensor.name.as_str()).collect();
        let spec = &self.spec;
        let named = spec
            .scalars
            .keys()
            .map(|name| ("scalar", name, &scalars))
            .chain(spec.weight_names.keys().map(|name| ("weight", name, &weights)));
        for (role, name, known) in named {
            if !known.contains(&name.as_str()) {
                let (model, known, fault) = (spec.name.clone(), listed(known.iter().copied()), "there is no such tensor");
                return Err(LoadError::Tensor { model, role, name: name.clone(), fault, batch, known });
            }
        }
        Ok(())
    }

    fn scalars(&self, batch: u64, plan: &Plan) -> Result<Vec<(verdigris::Uid, HostValue)>, LoadError> {
        let spec = &self.spec;
        let mut found = Vec::new();
        for wanted in plan.scalars() {
            let Some(&value) = spec.scalars.get(&wanted.name) else {
                let known = listed(spec.scalars.keys().map(String::as_str));
                let fault = "model.toml gives it no value under [scalars]";
                let (model, name) = (spec.name.clone(), wanted.name.clone());
                return Err(LoadError::Tensor { model, role: "scalar", name, fault, batch, known });
            };
            let is_whole = value.fract() == 0.0 && value.abs() <= 9e15;
            if wanted.dtype.is_integer() && !is_whole {
                let rule = "a scalar of an integer type is a whole number";
                return Err(LoadError::Field { model: spec.name.clone(), field: "scalars", value: value.to_string(), rule });
            }
            let value: HostValue = if wanted.dtype.is_integer() { (value as i64).into() } else { value.into() };
            found.push((wanted.uid, value));
        }
        Ok(found)
    }
}

fn listed<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn read_text(path: &Path) -> Result<String, LoadError> {
    std::fs::read_to_string(path).map_err(|source| LoadError::Io { file: path.display().to_string(), source })
}

/// Writes a file whole or not at all.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), LoadError> {
    write_whole(&[(path, bytes)]).map_err(|failed| LoadError::Io { file: failed.file.display().to_string(), source: failed.source })
}
