//! The formats that users and clients bring, with inputs to begin with and what reading one means.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use verdigris::plan_cache::PlanCache;
use verdigris_cli::rows::{canary_rows, timed_rows};
use verdigris_cuda::{
    CacheKey, Code, CompileOptions, DiskCache, Entry, JitFinding, KernelFacts, Lookup, Pack, PackHead, Parameter, ParameterFact,
};
use verdigris_graph::{Graph, GraphBuilder, Precision, Problem, json, pattern};
use verdigris_kir::ptx::Isa;
use verdigris_reference::{bench_list, cases, conv_list, fuzz, graph_cases};
use verdigris_serve::{Model, Port, Signature, Spec, Weight, protocol, weights};
use verdigris_tensor::{DType, Layout};

/// A format.
pub(super) struct Format {
    pub(super) name: &'static str,
    /// Who brings such bytes.
    pub(super) what: &'static str,
    /// Files in git: inputs to begin with, and those that once found something and are read since.
    pub(super) corpus: &'static [&'static [u8]],
    /// Files in git that once found something and are refused since, by an error.
    pub(super) refused: &'static [&'static [u8]],
    /// Further inputs to begin with, made by the program's own writers.
    pub(super) more: fn() -> Vec<Vec<u8>>,
    /// Puts hashes right, so that what lies behind them is read.
    pub(super) mend: fn(&mut Vec<u8>),
    /// Reads the bytes; a file may be made in the folder. Whether they were taken.
    pub(super) read: fn(&Path, &[u8]) -> bool,
}

fn none() -> Vec<Vec<u8>> {
    Vec::new()
}

fn as_it_is(_: &mut Vec<u8>) {}

macro_rules! corpus {
    ($($file:literal),* $(,)?) => {
        &[$(include_bytes!(concat!("../../corpora/", $file))),*]
    };
}

/// All of them.
pub(super) const FORMATS: &[Format] = &[
    Format {
        name: "graph",
        what: "graphs as JSON",
        corpus: corpus![
            "graph/conv_bias_relu.json",
            "graph/attention.json",
            "graph/attention_backward.json",
            "graph/batch_norm.json",
            "graph/batch_norm_backward.json",
            "graph/batch_norm_statistics.json",
            "graph/conv_dgrad.json",
            "graph/conv_fprop.json",
            "graph/conv_wgrad.json",
            "graph/cross_entropy.json",
            "graph/cross_entropy_backward.json",
            "graph/normalize.json",
            "graph/normalize_backward.json",
            "graph/pool.json",
            "graph/pool_backward.json",
            "graph/random.json",
            "graph/resample.json",
            "graph/resample_backward.json",
        ],
        refused: corpus!["graph/refused-empty.json"],
        more: || graphs().iter().map(|graph| json::graph_to_json(graph).into_bytes()).collect(),
        mend: as_it_is,
        read: read_graph,
    },
    Format {
        name: "problem",
        what: "problems in words, and as JSON",
        corpus: corpus!["problem/0.txt", "problem/1.txt", "problem/2.txt", "problem/3.txt"],
        refused: &[],
        more: || {
            let both = |problem: Problem| [problem.to_string(), json::problem_to_json(&problem)].map(String::into_bytes);
            problems().into_iter().flat_map(both).collect()
        },
        mend: as_it_is,
        read: read_problem,
    },
    Format {
        name: "plans",
        what: "plan caches and tuned sets",
        corpus: corpus!["plans/choices.txt"],
        refused: &[],
        more: none,
        mend: mend_plans,
        read: read_plans,
    },
    Format {
        name: "pack",
        what: "packs of kernels",
        corpus: corpus!["pack/two-kernels.pack"],
        refused: corpus![
            "pack/refused-cut.pack",
            "pack/refused-index.pack",
            "pack/refused-layout.pack",
            "pack/refused-block-beyond.pack",
            "pack/refused-unpacked-size.pack",
        ],
        more: packs,
        mend: mend_pack,
        read: read_pack,
    },
    Format {
        name: "cache",
        what: "compiled kernels on disk",
        corpus: corpus!["cache/cubin.cubin", "cache/ptx.cubin"],
        refused: corpus!["cache/refused-cut.cubin", "cache/refused-findings.cubin"],
        more: cached,
        mend: mend_cached,
        read: read_cached,
    },
    Format {
        name: "record",
        what: "records of canaries and of what `gate` compares",
        corpus: corpus!["record/canary.jsonl", "record/tune.jsonl"],
        refused: corpus!["record/refused-no-rows.jsonl", "record/refused-line.jsonl"],
        more: none,
        mend: as_it_is,
        read: |_, bytes| {
            with_text(bytes, |text| canary_rows("record", text).is_ok_and(|rows| !rows.is_empty()) | timed_rows("record", text).is_ok())
        },
    },
    Format {
        name: "workload",
        what: "recorded workloads",
        corpus: corpus!["workload/counts.txt"],
        refused: &[],
        more: none,
        mend: as_it_is,
        read: |folder, bytes| verdigris::observe::read_workload(&file(folder, "workload.txt", bytes)).is_ok(),
    },
    Format {
        name: "npy",
        what: "NumPy's files",
        corpus: corpus!["npy/rows.npy", "npy/columns.npy", "npy/scalar.npy"],
        refused: &[],
        more: none,
        mend: as_it_is,
        read: |folder, bytes| verdigris_cli::tensor_files::read(&file(folder, "x.npy", bytes).display().to_string()).is_ok(),
    },
    Format {
        name: "safetensors",
        what: "tensors of the command line and weights of models",
        corpus: corpus!["safetensors/two.safetensors", "safetensors/empty.safetensors"],
        refused: &[],
        more: none,
        mend: as_it_is,
        read: |folder, bytes| {
            let path = file(folder, "w.safetensors", bytes);
            let place = format!("{}#w", path.display());
            verdigris_cli::tensor_files::read(&place).is_ok() | weights::read(&path).is_ok()
        },
    },
    Format {
        name: "model",
        what: "manifests of served models",
        corpus: corpus!["model/layer.toml"],
        refused: &[],
        more: none,
        mend: as_it_is,
        read: read_model,
    },
    Format {
        name: "request",
        what: "requests of the inference protocol",
        corpus: corpus!["request/data.json", "request/binary.json"],
        refused: &[],
        more: none,
        mend: as_it_is,
        read: read_request,
    },
    Format {
        name: "cases",
        what: "files of test cases, of all families",
        corpus: corpus![
            "cases/gemm.toml",
            "cases/conv.toml",
            "cases/pool.toml",
            "cases/movement.toml",
            "cases/softmax.toml",
            "cases/norm.toml",
            "cases/attention.toml",
        ],
        refused: corpus![
            "cases/refused-matrix.toml",
            "cases/refused-gap.toml",
            "cases/refused-concat.toml",
            "cases/refused-axis.toml",
            "cases/refused-attention.toml",
            "cases/refused-stride.toml",
        ],
        more: none,
        mend: as_it_is,
        read: |_, bytes| with_text(bytes, read_cases),
    },
    Format {
        name: "lists",
        what: "lists of bench problems",
        corpus: corpus!["lists/gemm.toml", "lists/conv.toml"],
        refused: corpus!["lists/refused-extents.toml", "lists/refused-leading.toml"],
        more: none,
        mend: as_it_is,
        read: |_, bytes| with_text(bytes, |text| bench_list::load(text).is_ok() | conv_list::load(text).is_ok()),
    },
];

fn file(folder: &Path, name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let path = folder.join(name);
    if let Err(error) = std::fs::write(&path, bytes) {
        eprintln!("{}: {error}", path.display());
    }
    path
}

/// What no text is, is read as one with replacements, as a file would be that somebody pasted.
fn with_text(bytes: &[u8], read: impl Fn(&str) -> bool) -> bool {
    read(&String::from_utf8_lossy(bytes))
}

/// Graphs of all ops.
fn graphs() -> Vec<Graph> {
    (1..40).map(|seed| fuzz::graph(seed).graph).filter(|graph| graph.nodes.len() <= 6).collect()
}

fn problems() -> Vec<Problem> {
    graphs()
        .iter()
        .filter_map(|graph| pattern::partition(graph).ok())
        .flat_map(|parts| parts.parts)
        .map(|part| part.problem)
        .take(60)
        .collect()
}

fn read_graph(_: &Path, bytes: &[u8]) -> bool {
    with_text(bytes, |text| {
        let Ok(graph) = json::graph_from_json(text) else { return false };
        let again = json::graph_from_json(&json::graph_to_json(&graph));
        assert!(again.as_ref() == Ok(&graph), "a graph comes back changed: {again:?}");
        // What is read is planned next.
        let _ = pattern::partition(&graph);
        let _ = verdigris_cpu::GraphPlan::new(&graph);
        true
    })
}

fn read_problem(_: &Path, bytes: &[u8]) -> bool {
    with_text(bytes, |text| {
        let of_json = json::problem_from_json(text);
        let Ok(problem) = text.trim().parse::<Problem>() else { return of_json.is_ok() };
        let again = problem.to_string().parse::<Problem>();
        assert!(again.as_ref() == Ok(&problem), "`{problem}` comes back changed: {again:?}");
        true
    })
}

fn read_plans(folder: &Path, bytes: &[u8]) -> bool {
    let path = file(folder, "plans.txt", bytes);
    match PlanCache::open(Some(path)) {
        Ok(plans) => plans.damaged().is_empty(),
        Err(error) => panic!("a file that is there is read, whatever it holds: {error}"),
    }
}

/// The hash of each line, which stands behind its last tab.
fn mend_plans(bytes: &mut Vec<u8>) {
    let text = String::from_utf8_lossy(bytes);
    let mended = |line: &str| match line.rsplit_once('\t') {
        Some((line, _)) if line.starts_with("plan") => format!("{line}\t{}", &blake3::hash(line.as_bytes()).to_hex()[..8]),
        _ => line.to_owned(),
    };
    let lines: Vec<String> = text.lines().map(mended).collect();
    *bytes = (lines.join("\n") + "\n").into_bytes();
}

const PACK_HEAD_BYTES: usize = 112;
const PACK_HASHED_BYTES: usize = 80;
const PACK_ROW_BYTES: usize = 44;
const PACK_BLOCK_ROW_BYTES: usize = 48;

fn key(spec: &str) -> CacheKey {
    let options = CompileOptions::default();
    CacheKey {
        source_hash: [7; 32],
        spec: spec.to_owned(),
        arch: "cc 9.0".to_owned(),
        driver_version: 13_020,
        driver_release: String::new(),
        ptx_isa: Isa::V9_0,
        options,
    }
}

fn packs() -> Vec<Vec<u8>> {
    let head = PackHead { source_hash: [7; 32], arch: "sm_90a".to_owned(), ptx_isa: Isa::V9_0, least_driver_version: 13_000 };
    let facts = |parameters| KernelFacts { threads: 128, cluster: 1, shared_bytes: 64, parameters, parameter_bytes: 0 };
    let entry = |code| Entry { facts: facts(vec![]), findings: Some(vec![]), code };
    let kernels = [("k1", entry(Code::Cubin(vec![0x7f; 40]))), ("k2", entry(Code::Ptx(".version 9.0".to_owned())))];
    let pack = |count: usize| {
        let kernels: Vec<(String, Entry)> = kernels[..count].iter().map(|(spec, entry)| ((*spec).to_owned(), entry.clone())).collect();
        Pack::to_bytes(&head, CompileOptions::default(), &kernels, Pack::compress_quickly).unwrap_or_default()
    };
    vec![pack(0), pack(1), pack(2)]
}

/// The hash of head, index and table, and those of the blocks.
#[expect(clippy::ptr_arg, reason = "formats share one type, and others change their length")]
fn mend_pack(bytes: &mut Vec<u8>) {
    if bytes.len() < PACK_HEAD_BYTES {
        return;
    }
    let number =
        |at: usize, bytes: &[u8]| bytes.get(at..at + 4).map_or(0, |four| u32::from_le_bytes([four[0], four[1], four[2], four[3]]) as usize);
    let kernels = number(PACK_HASHED_BYTES - 8, bytes).min((bytes.len() - PACK_HEAD_BYTES) / PACK_ROW_BYTES);
    let table = PACK_HEAD_BYTES + kernels * PACK_ROW_BYTES;
    let blocks = number(PACK_HASHED_BYTES - 4, bytes).min((bytes.len() - table) / PACK_BLOCK_ROW_BYTES);
    for row in (0..blocks).map(|row| table + row * PACK_BLOCK_ROW_BYTES) {
        let (offset, packed_bytes) = (number(row, bytes), number(row + 8, bytes));
        let hash = bytes.get(offset..offset.saturating_add(packed_bytes)).map(|packed| *blake3::hash(packed).as_bytes());
        if let Some(hash) = hash {
            bytes[row + 16..row + 48].copy_from_slice(&hash);
        }
    }
    let tables = PACK_HEAD_BYTES..table + blocks * PACK_BLOCK_ROW_BYTES;
    let mut hasher = blake3::Hasher::new_derive_key("verdigris-cuda pack index 2");
    hasher.update(&bytes[..PACK_HASHED_BYTES]).update(&bytes[tables]);
    let hash = *hasher.finalize().as_bytes();
    bytes[PACK_HASHED_BYTES..PACK_HEAD_BYTES].copy_from_slice(&hash);
}

fn read_pack(folder: &Path, bytes: &[u8]) -> bool {
    let Ok(pack) = Pack::open(file(folder, "sm_90a.pack", bytes)) else { return false };
    ["k1", "k2"].iter().filter(|spec| matches!(pack.load(&key(spec)), Ok(Some(_)))).count() > 0
}

/// Magic, hash of the key, length and hash of what follows.
const CACHED_HEAD_BYTES: usize = 80;

/// Kernels of all kinds of findings and parameters.
fn entries() -> Vec<Entry> {
    let kinds = [
        ParameterFact::Pointer { alignment_bytes: 16 },
        ParameterFact::Scalar { bytes: 4 },
        ParameterFact::Divisor,
        ParameterFact::TensorMap { decl_hash: 7 },
    ];
    let places = kinds.iter().zip([0, 8, 16, 64]);
    let parameters = places.map(|(&fact, offset_bytes)| Parameter { offset_bytes, fact }).collect();
    let facts = KernelFacts { threads: 128, cluster: 2, shared_bytes: 64, parameters, parameter_bytes: 192 };
    let findings = vec![
        JitFinding::Message { code: "C7504".to_owned(), line: "ptxas info : (C7504) a remark".to_owned() },
        JitFinding::Spill { store_bytes: 4, load_bytes: 8 },
        JitFinding::StackFrame { bytes: 16 },
    ];
    let entry = |findings, code| Entry { facts: facts.clone(), findings, code };
    vec![entry(Some(findings), Code::Cubin(vec![0x7f; 40])), entry(None, Code::Ptx(".version 9.0".to_owned()))]
}

/// Files as the cache writes them.
fn cached() -> Vec<Vec<u8>> {
    let Ok(folder) = tempfile::tempdir() else { return Vec::new() };
    let Ok(cache) = DiskCache::open(folder.path().join("kernels")) else { return Vec::new() };
    let stored = |entry: Entry| {
        cache.store(&key("k1"), &entry.to_bytes()).ok()?;
        std::fs::read(cache.path(&key("k1"))).ok()
    };
    entries().into_iter().filter_map(stored).collect()
}

/// The key, the length and the hash.
#[expect(clippy::ptr_arg, reason = "formats share one type, and others change their length")]
fn mend_cached(bytes: &mut Vec<u8>) {
    if bytes.len() < CACHED_HEAD_BYTES {
        return;
    }
    let (length, hash) = ((bytes.len() - CACHED_HEAD_BYTES) as u64, *blake3::hash(&bytes[CACHED_HEAD_BYTES..]).as_bytes());
    bytes[8..40].copy_from_slice(&key("k1").digest());
    bytes[40..48].copy_from_slice(&length.to_le_bytes());
    bytes[48..CACHED_HEAD_BYTES].copy_from_slice(&hash);
}

fn read_cached(folder: &Path, bytes: &[u8]) -> bool {
    let Ok(cache) = DiskCache::open(folder.join("kernels")) else { return false };
    let path = cache.path(&key("k1"));
    let Some(parent) = path.parent() else { return false };
    if std::fs::create_dir_all(parent).and_then(|()| std::fs::write(&path, bytes)).is_err() {
        return false;
    }
    match cache.load(&key("k1")) {
        Lookup::Hit(entry) => Entry::from_bytes(&entry).is_ok(),
        Lookup::Missing => panic!("a file that is there is not missing"),
        Lookup::Damaged(_) => false,
    }
}

fn read_model(folder: &Path, bytes: &[u8]) -> bool {
    if !folder.join("graph.json").exists() {
        let weight = Weight { dtype: DType::F32, dims: vec![3, 2], bytes: vec![0; 24] };
        let Some(graph) = linear(1) else { return false };
        let made =
            Model::new(Spec::new("layer", &["x"], &["y"], &[1]), BTreeMap::from([(1, graph)]), BTreeMap::from([("w".to_owned(), weight)]));
        let Ok(model) = made else { return false };
        let Ok(()) = model.save(folder) else { return false };
        if std::fs::copy(folder.join("graph-1.json"), folder.join("graph.json")).is_err() {
            return false;
        }
    }
    Model::load(&file(folder, "model.toml", bytes)).is_ok()
}

fn linear(batch: u64) -> Option<Graph> {
    let mut g = GraphBuilder::new("linear");
    let (x, w) =
        (g.tensor("x", DType::F32, Layout::row_major(&[batch, 3]).ok()?), g.tensor("w", DType::F32, Layout::row_major(&[3, 2]).ok()?));
    let y = g.matmul("product", x, w, Precision::Fp32).ok()?;
    g.store(y, "y", DType::F32).ok()?;
    g.finish().ok()
}

/// As the family that the text is of, which its fields tell; of most texts all families but one say no at the first field.
fn read_cases(text: &str) -> bool {
    let of_graphs = graph_cases::FAMILIES.iter().filter(|family| graph_cases::load(family, text).is_ok()).count();
    cases::load("gemm", text).is_ok() || of_graphs > 0
}

fn read_request(_: &Path, bytes: &[u8]) -> bool {
    let port = |name: &str, dtype, row_dims: &[u64]| Port { name: name.to_owned(), dtype, row_dims: row_dims.to_vec() };
    let signature = Signature {
        name: "layer".to_owned(),
        inputs: vec![port("x", DType::F32, &[3]), port("k", DType::I64, &[1])],
        outputs: vec![port("y", DType::F32, &[2])],
        batch_sizes: vec![1, 4, 16],
        max_wait: Duration::ZERO,
        deadline: Duration::from_secs(1),
        queue_rows: 64,
        device: "cpu".to_owned(),
        engines: BTreeMap::new(),
        rows_proved_apart: true,
    };
    // Where the JSON ends before bytes, its header says so.
    let end = bytes.iter().rposition(|byte| *byte == b'}').map(|end| end + 1);
    protocol::check(&signature, bytes, None).is_ok()
        | protocol::check(&signature, bytes, end).is_ok()
        | protocol::check(&signature, bytes, Some(217)).is_ok()
}
