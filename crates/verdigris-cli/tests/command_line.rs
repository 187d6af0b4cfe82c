//! The program as its users meet it: what it prints, and the code that it ends with.

mod program;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use program::{Program, stdout};

const VERDIGRIS: Program = Program(env!("CARGO_BIN_EXE_verdigris"));

fn run(words: &[&str]) -> Output {
    VERDIGRIS.run(words)
}

fn refused(words: &[&str]) -> String {
    VERDIGRIS.refused(words)
}

#[test]
fn mistakes_in_arguments_name_the_argument_and_the_choices() {
    assert!(refused(&["tune", "gemm", "-m", "5"]).contains("all of --m, --n and --k"));
    assert!(refused(&["tune", "gemm", "--class", "cubes"]).contains("--class cubes: the list has square, deepbench"));
    assert!(refused(&["tune", "gemm", "--dtype", "f12"]).contains("--dtype f12"));
    assert!(refused(&["tune", "gemm", "--filter", "9x9x9x9"]).contains("no problem of the list is left"));
    assert!(refused(&["tune", "gemm", "-m", "4", "-n", "4", "-k", "4", "--layout", "xy"]).contains("--layout `xy`: two letters"));
    assert!(refused(&["tune", "gemm", "-m", "4", "-n", "4", "-k", "4", "--lda", "3"]).contains("--lda 3 is less than the 4 elements"));
    for seconds in ["0", "nan", "1e300", "inf"] {
        assert!(refused(&["tune", "conv", "--seconds", seconds]).contains("--seconds "), "{seconds}");
        assert!(refused(&["tune", "conv", "--budget", seconds]).contains("--budget "), "{seconds}");
    }
    assert!(refused(&["tune", "conv", "--class", "cubes"]).contains("--class cubes: the list has resnet"));
    assert!(refused(&["tune", "gemm", "--candidates", "0"]).contains("--candidates 0"));
    assert!(refused(&["tune", "graph", "absent.json"]).contains("absent.json"));
    let conv = |filter: &[&str]| refused(&[&["tune", "conv", "-n", "1", "-c", "8", "-k", "8", "--input", "9x9"], filter].concat());
    assert!(conv(&[]).contains("a problem needs all of -n, -c, -k, --input and --filter-size"));
    assert!(conv(&["--filter-size", "3y3"]).contains("--filter-size 3y3"));
    assert!(conv(&["--filter-size", "3x3x3"]).contains("filter = [3, 3, 3] over [9, 9]"));
    assert!(conv(&["--filter-size", "3x3", "--groups", "3"]).contains("groups = 3"));
    assert!(conv(&["--filter-size", "11x11"]).contains("the dilated filter is no larger than the padded input"));
    assert!(refused(&["tune", "conv", "--direction", "up"]).contains("--direction up"));
    assert!(refused(&["demo", "net", "--only", "layer 99"]).contains("no layer of the list has `layer 99`"));
    assert!(refused(&["demo", "digits", "--device", "tpu"]).contains("there is no device `tpu`"));
    // Before the training, and so at once.
    assert!(
        refused(&["demo", "digits", "--epochs", "10000", "--report", "/no/such/folder/page.html"]).contains("/no/such/folder/page.html")
    );
    assert!(refused(&["inspect"]).contains("which problem?"));
    let product = ["inspect", "-m", "1", "-n", "1", "-k", "1"];
    let inspect = |words: &[&str]| refused(&[&product[..], words].concat());
    assert!(inspect(&["--dtype", "q7"]).contains("`q7` is no element type"));
    assert!(inspect(&["--precision", "exact"]).contains("`exact` is no precision policy"));
    assert!(inspect(&["--arch", "z80"]).contains("--arch z80"));
    assert!(inspect(&["--file", "problem.json"]).contains("give one of them"));
    assert!(inspect(&["--knobs", "tile"]).contains("`tile` is not of the form name=value"));
    assert!(inspect(&["--engine", "conv.magic"]).contains("no engine `conv.magic`; the engines are gemm."));
    assert!(refused(&["tune"]).contains("Usage"));
}

#[test]
fn flags_that_would_mean_nothing_are_refused() {
    let told = |words: &[&str], parts: &[&str]| {
        let text = refused(words);
        parts.iter().for_each(|part| assert!(text.contains(part), "{words:?}: {text}"));
    };
    let shown = run(&["inspect", "--arch", "h200", "-m", "64", "-n", "64", "-k", "64", "--json"]);
    let problem = serde_json::from_slice::<serde_json::Value>(&shown.stdout).expect("JSON")["problem"].to_string();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("problem.json");
    std::fs::write(&file, problem).expect("writes");
    let file = file.to_str().expect("UTF-8");
    assert!(run(&["inspect", "--arch", "h200", "--file", file]).status.success());
    told(
        &["inspect", "--arch", "h200", "--file", file, "--deterministic", "--batch", "7", "--dtype", "f32"],
        &["--batch", "--deterministic", "--dtype", "--file"],
    );
    told(&["tune", "gemm", "--lda", "77", "--precision", "nonsense"], &["--lda", "--precision", "--m"]);
    told(&["tune", "gemm", "-m", "4", "-n", "4", "-k", "4", "--class", "square"], &["--class"]);
    told(&["tune", "conv", "--stride", "2", "--groups", "4"], &["--stride", "--groups", "--input"]);
    told(&["tune", "conv", "-n", "1", "-c", "4", "-k", "4", "--input", "8x8", "--filter-size", "3x3", "--list", "a.toml"], &["--list"]);
    for sms in ["0", "65537", "4294967295", "4294967296"] {
        told(&["inspect", "--arch", &format!("virtual:{sms}"), "-m", "4", "-n", "4", "-k", "4"], &["from 1 to 65536"]);
    }
    assert!(run(&["inspect", "--arch", "virtual:65536", "-m", "4096", "-n", "4096", "-k", "4096", "--all-knobs"]).status.success());
}

#[test]
fn help_shows_what_users_need() {
    let help = stdout(&run(&["--help"]));
    let named: Vec<&str> = (help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty()))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    let serve = if cfg!(feature = "serve") { &["serve"][..] } else { &[] };
    let all = [&["doctor", "demo", "inspect", "tune", "run", "canary", "matrix", "gate", "serve-metrics"][..], serve, &["help"]].concat();
    assert_eq!(named, all, "{help}");
}

#[test]
fn files_that_are_absent_or_damaged_are_named() {
    let said = refused(&["tune", "gemm", "--list", "absent.toml"]);
    assert!(said.contains("absent.toml") && said.matches("No such file").count() == 1, "{said}");
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("writes");
        path.to_string_lossy().into_owned()
    };
    let broken = file("broken.toml", "[[group]\nclass = 1");
    assert!(refused(&["tune", "gemm", "--list", &broken]).contains("broken.toml"));
    let letters =
        file("letters.toml", "[[group]]\nclass = \"c\"\nlayouts = [\"nq\"]\ndtypes = [\"bf16\"]\nproblems = [{ m = 1, n = 1, k = 1 }]\n");
    let said = refused(&["tune", "gemm", "--list", &letters]);
    assert!(said.contains("layouts = nq"), "{said}");
    let problem = file("problem.json", "{\"gemm\": {");
    assert!(refused(&["inspect", "--file", &problem]).contains("problem.json"));
}

/// `y = relu(x + z)`, of three elements; `change` alters its JSON.
fn sum(change: impl Fn(&mut serde_json::Value)) -> String {
    let tensor =
        |uid: i64, name: &str| serde_json::json!({ "uid": uid, "name": name, "dtype": "f32", "layout": { "dims": [3], "strides": [1] } });
    let mut hidden = tensor(4, "hidden");
    hidden["virtual"] = true.into();
    let mut graph = serde_json::json!({
        "name": "sum",
        "tensors": [tensor(1, "x"), tensor(2, "z"), tensor(3, "y"), hidden],
        "nodes": [
            { "name": "add", "op": { "pointwise": { "binary": { "f": "add", "x": 1, "z": 2, "y": 4 } } } },
            { "name": "relu", "op": { "pointwise": { "unary": { "f": "relu", "x": 4, "y": 3 } } } },
        ],
    });
    change(&mut graph);
    graph.to_string()
}

/// Three numbers as NumPy saves them.
fn npy(numbers: [f32; 3]) -> Vec<u8> {
    let mut file = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }".to_vec();
    file.resize(127, b' ');
    file.push(b'\n');
    file.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    file
}

#[test]
fn a_graph_is_run_by_the_program_and_mistakes_in_it_are_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let file = |name: &str, bytes: &[u8]| {
        std::fs::write(at(name), bytes).expect("writes");
        at(name)
    };
    let (x, z) = (file("x.npy", &npy([1.0, -2.0, 3.0])), file("z.npy", &npy([0.5, 0.5, -4.0])));
    let (x, z, y) = (format!("x={x}"), format!("z={z}"), format!("y={}", at("y.npy")));
    let graph = file("sum.json", sum(|_| {}).as_bytes());
    let words = ["run", &graph, "--in", &x, "--in", &z, "--out", &y];
    let output = run(&[&words[..], &["--explain"]].concat());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = stdout(&output);
    assert!(text.contains("cpu.pointwise") && text.contains("the CPU has one way for each op"), "{text}");
    let written = std::fs::read(at("y.npy")).expect("written");
    assert_eq!(written[written.len() - 12..], [1.5f32, 0.0, 0.0].map(f32::to_le_bytes).concat());
    let json: serde_json::Value = serde_json::from_str(&stdout(&run(&[&words[..], &["--json"]].concat()))).expect("one JSON object");
    assert_eq!(json["run"]["parts"][0]["engine"], "cpu.pointwise");
    assert!(stdout(&run(&words)).is_empty(), "nothing was asked to be shown");

    // What is wrong with the request, by each kind; nothing panics, nothing is written.
    std::fs::remove_file(at("y.npy")).expect("there");
    let told = |change: &dyn Fn(&mut serde_json::Value)| {
        let graph = file("bad.json", sum(change).as_bytes());
        let said = refused(&["run", &graph, "--in", &x, "--in", &z, "--out", &y]);
        assert!(said.lines().count() == 1 && said.contains("bad.json"), "{said}");
        said
    };
    assert!(told(&|graph| graph["tensors"][1]["layout"]["dims"][0] = 4.into()).contains("op `add`, tensor `z`"));
    assert!(told(&|graph| graph["tensors"][2]["layout"]["dims"][0] = 2.into()).contains("dim 0 is 2, expected 3"));
    assert!(told(&|graph| graph["tensors"][0]["dtype"] = "f12".into()).contains("unknown variant `f12`"));
    assert!(told(&|graph| graph["tensors"][0]["dtype"] = "tf32".into()).contains("element type tf32"));
    assert!(told(&|graph| graph["nodes"][0]["op"] = serde_json::json!({ "recurrence": {} })).contains("unknown variant `recurrence`"));
    assert!(told(&|graph| graph["nodes"][1]["op"]["pointwise"]["unary"]["x"] = 9.into()).contains("names tensor #9"));
    assert!(told(&|graph| graph["tensors"][0]["layout"]["dims"][0] = (-1).into()).contains("`-1`"));
    let whole = sum(|_| {});
    for cut in [0, 1, whole.len() / 2, whole.len() - 1] {
        let graph = file("cut.json", &whole.as_bytes()[..cut]);
        assert!(refused(&["run", &graph]).contains("cut.json: line 1"));
    }
    assert!(refused(&["run", &at("absent.json")]).contains("absent.json"));
    assert!(refused(&["run", &graph, "--in", &x]).contains("`z` is bound to"));
    assert!(refused(&["run", &graph, "--device", "cpu:0"]).contains("there is no device `cpu:0`"));
    let short = format!("z={}", file("short.npy", &npy([0.0; 3])[..130]));
    assert!(refused(&["run", &graph, "--in", &x, "--in", &short]).contains("short.npy: dims [3] of f32 are 12 bytes, but there are 2"));
    // A result that no machine has the memory for.
    let large = serde_json::json!({
        "name": "large",
        "tensors": [
            { "uid": 1, "name": "x", "dtype": "f32", "layout": { "dims": [3, 1], "strides": [1, 1] } },
            { "uid": 2, "name": "y", "dtype": "f32", "layout": { "dims": [3, 1_u64 << 46], "strides": [1_u64 << 46, 1] } },
        ],
        "nodes": [{ "name": "repeat", "op": { "movement": { "broadcast": { "x": 1, "y": 2 } } } }],
    });
    let graph = file("large.json", large.to_string().as_bytes());
    let column = String::from_utf8_lossy(&npy([0.0; 3])[10..80]).replace("(3,), }", "(3, 1), }");
    let mut bytes = npy([1.0, 2.0, 3.0]);
    bytes[10..10 + column.trim_end().len()].copy_from_slice(column.trim_end().as_bytes());
    let column = format!("x={}", file("column.npy", &bytes));
    let said = refused(&["run", &graph, "--in", &column, "--out", &y]);
    assert!(said.contains("out of memory: 844424930131968 bytes cannot be had"), "{said}");
    assert!(!Path::new(&at("y.npy")).exists());
}

/// Results that are written into one file lie in it together, and an earlier file is whole until all of the new ones are.
#[test]
fn results_are_written_together_or_not_at_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let stored = sum(|graph| graph["tensors"][3]["virtual"] = false.into());
    std::fs::write(at("sum.json"), stored).expect("writes");
    std::fs::write(at("x.npy"), npy([1.0, -2.0, 3.0])).expect("writes");
    std::fs::write(at("z.npy"), npy([0.5, 0.5, -4.0])).expect("writes");
    let (graph, x, z) = (at("sum.json"), format!("x={}", at("x.npy")), format!("z={}", at("z.npy")));
    let words = |y: &str, hidden: &str| -> Vec<String> {
        let out = |name: &str, file: &str| ["--out".to_owned(), format!("{name}={}", at(file))];
        let first = ["run", &graph, "--in", &x, "--in", &z].map(str::to_owned);
        first.into_iter().chain(out("y", y)).chain(out("hidden", hidden)).collect()
    };
    let go = |words: Vec<String>| run(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let said = |words: Vec<String>| refused(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let output = go(words("both.safetensors", "both.safetensors"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let read = |name: &str| verdigris_cli::tensor_files::read(&format!("{}#{name}", at("both.safetensors"))).expect("a tensor").bytes;
    assert_eq!(
        (read("y"), read("hidden")),
        ([1.5f32, 0.0, 0.0].map(f32::to_le_bytes).concat(), [1.5f32, -1.5, -1.0].map(f32::to_le_bytes).concat())
    );
    assert!(said(words("one.npy", "one.npy")).contains("it is to hold `y` and `hidden`"));
    // An earlier file, beside one that cannot be written: by its folder, its kind, or because a folder is there.
    std::fs::write(at("old.npy"), "old").expect("writes");
    std::fs::create_dir(at("taken.npy")).expect("made");
    for bad in ["absent/z.npy", "z.txt", "taken.npy"] {
        assert!(said(words("old.npy", bad)).contains(bad), "{bad}");
        assert_eq!(std::fs::read(at("old.npy")).expect("there"), b"old", "{bad}");
    }
    // What cannot be written is told before the graph is looked at, which may take long.
    std::fs::write(at("sum.json"), "{").expect("writes");
    assert!(said(words("old.npy", "z.txt")).contains("z.txt"));
    let left = std::fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(left, 6, "files are left beside the results");
}

#[test]
fn the_graph_of_the_guide_runs() {
    let guide = include_str!("../../../docs/run.md");
    let example = guide.split_once("```json\n").and_then(|(_, rest)| rest.split_once("```")).expect("an example").0;
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    std::fs::write(at("graph.json"), example).expect("writes");
    // All ones: a pixel in the middle meets 18 products, one at a corner 8; a bias of -10 leaves 8 and nothing.
    let tensor = |name: &str, shape: &str, count: usize, value: f32| {
        let mut head = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}");
        head += &(" ".repeat(117 - head.len()) + "\n");
        let mut bytes = [b"\x93NUMPY\x01\x00\x76\x00", head.as_bytes()].concat();
        bytes.extend(value.to_le_bytes().repeat(count));
        std::fs::write(at(&format!("{name}.npy")), bytes).expect("writes");
        format!("{name}={}", at(&format!("{name}.npy")))
    };
    let x = tensor("x", "1, 2, 4, 4", 32, 1.0);
    let w = tensor("w", "3, 2, 3, 3", 54, 1.0);
    let bias = tensor("bias", "1, 3, 1, 1", 3, -10.0);
    let y = format!("y={}", at("y.npy"));
    let output = run(&["run", &at("graph.json"), "--in", &x, "--in", &w, "--in", &bias, "--out", &y]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let written = std::fs::read(at("y.npy")).expect("written");
    let line = |edge: f32, middle: f32| [edge, middle, middle, edge];
    let plane = [line(0.0, 2.0), line(2.0, 8.0), line(2.0, 8.0), line(0.0, 2.0)].concat();
    let expected: Vec<u8> = [&plane[..]; 3].concat().iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(written[written.len() - expected.len()..], expected);
}

/// The page of a run that failed is not there, and an earlier one is what it was.
#[test]
fn a_report_is_written_whole_or_not_at_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("a path").to_owned();
    std::fs::write(at("old.html"), "old").expect("written");
    for name in ["old.html", "new.html"] {
        // No machine has so many devices.
        let output = run(&["demo", "digits", "--device", "cuda:4000", "--report", &at(name)]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
    let names: Vec<_> = std::fs::read_dir(folder.path()).expect("a folder").map(|entry| entry.expect("one").file_name()).collect();
    assert_eq!((names, std::fs::read_to_string(at("old.html")).expect("there")), (vec!["old.html".into()], "old".to_owned()));
    let output = run(&["demo", "digits", "--epochs", "1", "--report", &at("old.html")]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(std::fs::read_to_string(at("old.html")).expect("there").ends_with("</html>\n"));
}

#[test]
fn inspect_shows_who_takes_a_problem_and_what_runs() {
    let words = ["inspect", "-m", "64", "-n", "64", "-k", "64", "--arch", "h200"];
    let text = stdout(&run(&words));
    assert!(text.contains("1. gemm.") && text.contains("  launch "), "{text}");
    let json: serde_json::Value = serde_json::from_str(&stdout(&run(&[&words[..], &["--json"]].concat()))).expect("one JSON object");
    assert!(json["ranked"].as_array().is_some_and(|ranked| !ranked.is_empty()));
    // An engine that refuses it, and settings that there are not: as text and as JSON the code says that nobody is left.
    for none in [&["--engine", "conv.direct"][..], &["--engine", "gemm.simt", "--knobs", "tile_m=3"], &["--knobs", "tile_m=3", "--json"]] {
        let output = run(&[&words[..], none].concat());
        assert_eq!((output.status.code(), output.stderr.is_empty()), (Some(1), true), "{none:?}: {output:?}");
    }
}

/// Extents of which a list of all launches would never end are refused, by name and at once.
#[test]
fn inspect_comes_back_whatever_the_extents() {
    let inspected = |[m, n]: [&str; 2]| run(&["inspect", "-m", m, "-n", n, "-k", "1", "--arch", "h200"]);
    let (far, beyond) = ("35184372088832", "9223372036854775807");
    for extents in [[far, "1"], ["1", far]] {
        let output = inspected(extents);
        // Nobody takes it: the code says so.
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = stdout(&output);
        assert!(text.contains("no engine takes the problem") && text.contains("launches, taken are 1024"), "{text}");
    }
    // More bytes than addresses count.
    for extents in [[beyond, "1"], ["1", beyond]] {
        let output = inspected(extents);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("ends less than 2^63 bytes behind"), "{output:?}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_verdigris"));
    command.args(["inspect", "-m", "64", "-n", "64", "-k", "64", "--arch", "h200", "--all-knobs"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut line = String::new();
    let mut reader = BufReader::with_capacity(16, child.stdout.take().expect("a pipe"));
    reader.read_line(&mut line).expect("a first line");
    drop(reader);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

#[test]
fn doctor_always_has_an_answer() {
    let output = run(&["doctor", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let value: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("one JSON object");
    assert!(value["driver"].is_object() && value["cache"].is_object() && value["pack"].is_object());
    let text = stdout(&run(&["doctor"]));
    assert!(text.contains("VERDIGRIS_CUBLASLT") && text.contains("gemm.simt") && !text.contains("precision:"), "{text}");
    let wide: Vec<&str> = text.lines().filter(|line| line.chars().count() > 100 && line.split_whitespace().count() > 1).collect();
    assert!(wide.is_empty(), "{wide:#?}");
    assert!(stdout(&run(&["doctor", "--refusals"])).contains("gemm.wgmma: precision: "));
}

/// What is around the program stands in the report, or why it is not known.
#[cfg(unix)]
#[test]
fn doctor_reads_container_mig_frameworks_and_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a folder");
    let doctor = |path: &str| {
        let mut command = Command::new(VERDIGRIS.0);
        command.args(["doctor", "--json"]).env("VERDIGRIS_CACHE", "off").env("PATH", path);
        command.env("KUBERNETES_SERVICE_HOST", "10.0.0.1").env("NVIDIA_DRIVER_CAPABILITIES", "utility");
        let output = command.output().expect("starts");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("one JSON object")
    };
    let report = doctor(folder.path().to_str().expect("a path"));
    let why = report["frameworks"]["error"].as_str().expect("no python3 there");
    assert!(why.contains("python3 cannot be started"), "{why}");
    assert!(report["mig"]["devices"].is_array() != report["mig"]["error"].is_string(), "{}", report["mig"]);
    assert!(report["permissions"]["files"].is_array() != report["permissions"]["state"].is_string(), "{}", report["permissions"]);
    assert_eq!((&report["container"]["kind"], &report["container"]["driver_capabilities"]), (&"kubernetes".into(), &"utility".into()));
    let findings = report["findings"].as_array().expect("a list");
    let of_container = findings.iter().find(|finding| finding["need"] == "container").expect("found");
    assert!(of_container["mend"].as_str().is_some_and(|mend| mend.contains("kubectl set env")), "{of_container}");

    // A Python of our own, which knows what it is told to know.
    let python = folder.path().join("python3");
    let answer = r#"{"python": "3.12.3", "versions": {"torch": "2.9.0+cu130", "nvidia-cudnn-cu13": "9.13.0.50"}}"#;
    let script = format!("#!/bin/sh\necho '{answer}'\n");
    let written = Command::new("sh").args(["-c", "printf %s \"$1\" > \"$0\""]).arg(&python).arg(script).status().expect("sh");
    assert!(written.success());
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).expect("ours");
    let frameworks = doctor(folder.path().to_str().expect("a path"))["frameworks"].clone();
    assert_eq!(
        (&frameworks["python3"], &frameworks["torch"], &frameworks["cudnn"]),
        (&"3.12.3".into(), &"2.9.0+cu130".into(), &"9.13.0.50".into())
    );
    assert_eq!(frameworks["verdigris"]["error"], "not installed for this python3");
    // The machine's own, where it has one.
    if let Some(path) = std::env::var("PATH").ok().filter(|_| Command::new("python3").arg("--version").output().is_ok()) {
        let frameworks = doctor(&path)["frameworks"].clone();
        assert!(frameworks["python3"].as_str().is_some_and(|version| version.starts_with("3.")), "{frameworks}");
    }
}

/// F2: what is required and missing ends an init container, with the reason and what mends it.
#[test]
fn doctor_ends_with_1_where_what_is_required_is_missing() {
    let report: serde_json::Value = serde_json::from_str(&stdout(&run(&["doctor", "--json"]))).expect("one JSON object");
    let has_driver = report["driver"]["error"].is_null();
    let required = run(&["doctor", "--json", "--require", "gpu"]);
    assert_eq!(required.status.code(), Some(if has_driver { 0 } else { 1 }));
    let findings = report["findings"].as_array().expect("a list");
    let of_gpu: Vec<_> = findings.iter().filter(|finding| finding["need"] == "gpu" && finding["is_missing"] == true).collect();
    assert_eq!(of_gpu.is_empty(), has_driver, "{findings:?}");
    assert!(of_gpu.iter().all(|finding| finding["mend"].as_str().is_some_and(|mend| !mend.is_empty())), "{findings:?}");
    // A cache that cannot be written, for there is a file in its place.
    let file = tempfile::NamedTempFile::new().expect("a file");
    let command = |needs: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_verdigris"));
        command.args(["doctor", "--require", needs]).env("VERDIGRIS_CACHE", file.path()).output().expect("runs")
    };
    let broken = command("cache");
    let (said, told) = (String::from_utf8_lossy(&broken.stdout).into_owned(), String::from_utf8_lossy(&broken.stderr).into_owned());
    assert_eq!(broken.status.code(), Some(1), "{said}");
    assert!(told.contains("required and not as it should be: cache") && said.contains("export VERDIGRIS_CACHE="), "{said}{told}");
    assert_eq!(command("plans").status.code(), Some(0));
    assert_eq!(command("gpu,everything").status.code(), Some(2), "what cannot be required is told");
}

/// A wrong variable ends `serve` at once, so that an init container must not let it pass, whatever it asks for.
#[test]
fn doctor_lets_no_wrong_variable_pass() {
    let command = |variable: (&str, &str), words: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_verdigris"));
        command.arg("doctor").args(words).env("VERDIGRIS_CACHE", "off").envs([variable]).output().expect("runs")
    };
    let headers = ("OTEL_EXPORTER_OTLP_HEADERS", "none");
    for variable in [("VERDIGRIS_DEVICE", "first"), ("VERDIGRIS_SAMPLE", "often"), ("VERDIGRIS_METRICS", "nowhere")] {
        let output = command(variable, &["--json", "--require", "plans"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{variable:?}: {said}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        let findings = report["findings"].as_array().expect("a list");
        let found = findings.iter().find(|finding| finding["need"] == "configuration").expect("found");
        assert_eq!(found["is_missing"], true, "{found}");
        assert!(found["what"].as_str().is_some_and(|what| what.contains(variable.1) || what.contains(variable.0)), "{found}");
        // Without a requirement it is told and no more.
        assert_eq!(command(variable, &[]).status.code(), Some(0));
    }
    assert_eq!(command(headers, &["--require", "plans"]).status.code(), Some(0), "headers without a collector name nothing");
}

#[test]
fn matrix_ends_with_1_where_this_machine_was_not_measured() {
    let report: serde_json::Value = serde_json::from_str(&stdout(&run(&["matrix", "--json"]))).expect("one JSON object");
    let is_tested = report["untested"].is_null();
    assert_eq!(report["here"].as_array().map(Vec::is_empty), Some(!is_tested && report["untested"] == "no device is here"), "{report}");
    for words in [&["matrix", "--require-tested"][..], &["matrix", "--json", "--require-tested"]] {
        let output = run(words);
        assert_eq!(output.status.code(), Some(if is_tested { 0 } else { 1 }), "{output:?}");
        assert!(is_tested || stdout(&output).contains(report["untested"].as_str().expect("words")), "{output:?}");
    }
}

/// Files that others can write are shown with the command that mends them, which it does.
#[cfg(unix)]
#[test]
fn doctor_shows_files_that_others_can_write() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a folder");
    let (plans, pack) = (folder.path().join("plans.txt"), folder.path().join("sm_90a.pack"));
    for path in [&plans, &pack] {
        std::fs::write(path, "").expect("writes");
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).expect("ours");
    }
    let doctor = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_verdigris"));
        command.args(["doctor", "--json", "--require", "plans"]).env("VERDIGRIS_PLANS", &plans).env("VERDIGRIS_PACK", &pack);
        command.env("VERDIGRIS_CACHE", "off").output().expect("runs")
    };
    let output = doctor();
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("one JSON object");
    assert_eq!(output.status.code(), Some(1));
    for (name, path) in [("plans", &plans), ("pack", &pack)] {
        let error = report[name]["error"].as_str().expect("refused");
        assert!(error.contains("mode 0666 and belongs to user") && error.contains(&path.display().to_string()), "{error}");
        let findings = report["findings"].as_array().expect("a list");
        let mend = findings.iter().find(|finding| finding["need"] == name).expect("told")["mend"].as_str().expect("a command");
        assert!(std::process::Command::new("sh").args(["-c", mend]).status().expect("runs").success(), "{mend}");
    }
    assert_eq!(doctor().status.code(), Some(0));
}

#[test]
fn without_a_gpu_nothing_is_tuned() {
    let doctor: serde_json::Value = serde_json::from_str(&stdout(&run(&["doctor", "--json"]))).expect("one JSON object");
    if doctor["driver"]["error"].is_null() {
        eprintln!("skipped: this machine has a driver");
        return;
    }
    // Tuning is nothing without one.
    let said = refused(&["tune", "gemm", "-m", "8", "-n", "8", "-k", "8"]);
    assert!(said.contains("tuning needs a GPU") && said.contains("no NVIDIA driver"), "{said}");
}
