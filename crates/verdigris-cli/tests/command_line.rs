//! The program as its users meet it: what it prints, and the code that it ends with.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs the program in the repository's root, where its lists are.
fn run(words: &[&str]) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let root = if root.is_dir() { root } else { ".".into() };
    let mut command = Command::new(env!("CARGO_BIN_EXE_verdigris"));
    command.args(words).current_dir(root).env("VERDIGRIS_CACHE", "off").env_remove("VERDIGRIS_PTXAS");
    command.output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The one line of an error that ends the program with code 2.
fn refused(words: &[&str]) -> String {
    let output = run(words);
    assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
    assert!(output.stdout.is_empty(), "{words:?}: {output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn mistakes_in_arguments_name_the_argument_and_the_choices() {
    assert!(refused(&["bench", "gemm", "-m", "5"]).contains("all of --m, --n and --k"));
    assert!(refused(&["bench", "gemm", "--class", "cubes"]).contains("--class cubes: the list has square, deepbench"));
    assert!(refused(&["bench", "gemm", "--dtype", "f12"]).contains("--dtype f12"));
    assert!(refused(&["bench", "gemm", "--filter", "9x9x9x9"]).contains("no problem of the list is left"));
    assert!(refused(&["bench", "gemm", "--seconds", "0"]).contains("--seconds 0"));
    assert!(refused(&["bench", "gemm", "--knobs", "tile"]).contains("`tile` is not of the form name=value"));
    assert!(refused(&["bench", "gemm", "-m", "4", "-n", "4", "-k", "4", "--layout", "xy"]).contains("--layout `xy`: two letters"));
    assert!(refused(&["bench", "gemm", "-m", "4", "-n", "4", "-k", "4", "--lda", "3"]).contains("--lda 3 is less than the 4 elements"));
    assert!(refused(&["tune", "conv", "--seconds", "0"]).contains("--seconds 0"));
    assert!(refused(&["tune", "conv", "--class", "cubes"]).contains("--class cubes: the list has resnet"));
    assert!(refused(&["tune", "gemm", "--candidates", "0"]).contains("--candidates 0"));
    assert!(refused(&["tune", "graph", "absent.json"]).contains("absent.json"));
    assert!(refused(&["bench", "conv", "--instant", "--all-knobs"]).contains("cannot be used with"));
    assert!(refused(&["verify", "no such case"]).contains("no case has `no such case` in its id"));
    assert!(refused(&["verify", "--engine", "gemm.magic"]).contains("no engine `gemm.magic`; the engines are gemm."));
    assert!(refused(&["inspect"]).contains("which problem?"));
    assert!(refused(&["inspect", "-m", "1", "-n", "1", "-k", "1", "--dtype", "q7"]).contains("`q7` is no element type"));
    assert!(refused(&["inspect", "-m", "1", "-n", "1", "-k", "1", "--precision", "exact"]).contains("`exact` is no precision policy"));
    assert!(refused(&["inspect", "-m", "1", "-n", "1", "-k", "1", "--arch", "z80"]).contains("--arch z80"));
    assert!(refused(&["inspect", "-m", "1", "-n", "1", "-k", "1", "--case", "gemm/f16-odd"]).contains("give one of them"));
    assert!(refused(&["bench"]).contains("Usage"));
}

#[test]
fn files_that_are_absent_or_damaged_are_named() {
    let said = refused(&["bench", "gemm", "--list", "absent.toml"]);
    assert!(said.contains("absent.toml") && said.matches("No such file").count() == 1, "{said}");
    let folder = std::env::temp_dir().join(format!("verdigris-command-line-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("makes a folder");
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).expect("writes");
        path.to_string_lossy().into_owned()
    };
    let broken = file("broken.toml", "[[group]\nclass = 1");
    assert!(refused(&["bench", "gemm", "--list", &broken]).contains("broken.toml"));
    let letters =
        file("letters.toml", "[[group]]\nclass = \"c\"\nlayouts = [\"nq\"]\ndtypes = [\"bf16\"]\nproblems = [{ m = 1, n = 1, k = 1 }]\n");
    let said = refused(&["bench", "gemm", "--list", &letters]);
    assert!(said.contains("layouts = nq"), "{said}");
    let cases = file("cases.toml", "[[group]]\nid = \"x\"\na = \"bf16\"\nsizes = [[1, 1]]\n");
    assert!(refused(&["verify", "--cases", &cases]).contains("cases.toml"));
    let problem = file("problem.json", "{\"gemm\": {");
    assert!(refused(&["inspect", "--file", &problem]).contains("problem.json"));
    std::fs::remove_dir_all(&folder).expect("removes its own folder");
}

#[test]
fn a_small_verify_ends_with_the_line_that_others_read() {
    let output = run(&["verify", "bf16-edge-k", "--engine", "gemm.simt", "--seed", "5"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let last = text.lines().last().expect("a last line");
    let words: Vec<&str> = last.split(' ').collect();
    assert!(matches!(words[..], [_, "kernels,", _, "cases,", "0", "faults"]), "{last}");
    assert!(words[0].parse::<u32>().is_ok_and(|kernels| kernels > 0) && words[2].parse::<u32>().is_ok_and(|cases| cases > 0), "{last}");

    let json = stdout(&run(&["verify", "bf16-edge-k", "--engine", "gemm.simt", "--seed", "5", "--json"]));
    let value: serde_json::Value = serde_json::from_str(&json).expect("one JSON object");
    assert_eq!(value["faults"].as_array().map(Vec::len), Some(0));
}

#[test]
fn a_run_that_was_cut_off_goes_on() {
    let journal = std::env::temp_dir().join(format!("verdigris-journal-{}.jsonl", std::process::id()));
    let name = journal.to_string_lossy().into_owned();
    let words = ["verify", "bf16-edge-k", "--engine", "gemm.simt", "--seed", "5", "--json", "--resume", &name];
    let value = || serde_json::from_str::<serde_json::Value>(&stdout(&run(&words))).expect("one JSON object");
    let first = value();
    assert_eq!(first["remembered"], 0);
    // Cut off in the middle of the last line; products and graphs have one each.
    let text = std::fs::read_to_string(&journal).expect("a journal");
    assert!(text.lines().count() as u64 > first["cases"].as_u64().expect("a count"));
    std::fs::write(&journal, &text[..text.len() - 10]).expect("writes");
    let second = value();
    assert_eq!(second["remembered"], text.lines().count() - 1);
    std::fs::remove_file(&journal).expect("removes its own file");
}

#[test]
fn inspect_shows_who_takes_a_problem_and_what_runs() {
    let words = ["inspect", "-m", "64", "-n", "64", "-k", "64", "--arch", "h200", "--ir", "--ptx"];
    let text = stdout(&run(&words));
    assert!(text.contains("1. gemm.") && text.contains("  launch ") && text.contains(".version 9.0"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&stdout(&run(&[&words[..], &["--json"]].concat()))).expect("one JSON object");
    assert!(json["ranked"].as_array().is_some_and(|ranked| !ranked.is_empty()));
    assert!(json["kernels"][0]["ptx"].as_str().is_some_and(|ptx| ptx.contains(".entry")));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_verdigris"));
    command.args(["inspect", "-m", "64", "-n", "64", "-k", "64", "--arch", "h200", "--ptx", "--ir"]);
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
    assert!(stdout(&run(&["doctor"])).contains("VERDIGRIS_CUBLASLT"));
}

#[test]
fn without_a_gpu_its_commands_are_skipped_aloud() {
    let doctor: serde_json::Value = serde_json::from_str(&stdout(&run(&["doctor", "--json"]))).expect("one JSON object");
    if doctor["driver"]["error"].is_null() {
        eprintln!("skipped: this machine has a driver");
        return;
    }
    for words in [&["bench", "gemm"][..], &["bench", "overhead"], &["check", "gemm"]] {
        let output = run(words);
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        assert!(stdout(&output).contains("skipped: no NVIDIA driver"), "{words:?}");
    }
    // Tuning is nothing without one.
    let said = refused(&["tune", "gemm", "-m", "8", "-n", "8", "-k", "8"]);
    assert!(said.contains("tuning needs a GPU") && said.contains("no NVIDIA driver"), "{said}");
}
