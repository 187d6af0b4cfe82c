//! The tools as their users meet them: what they print, and the code that they end with.

#[path = "../../verdigris-cli/tests/program/mod.rs"]
mod program;

use std::process::Output;

use program::{Program, stdout};

const WORKSHOP: Program = Program(env!("CARGO_BIN_EXE_workshop"));

fn run(words: &[&str]) -> Output {
    WORKSHOP.run(words)
}

fn refused(words: &[&str]) -> String {
    WORKSHOP.refused(words)
}

#[test]
fn mistakes_in_arguments_name_the_argument_and_the_choices() {
    assert!(refused(&["bench", "gemm", "-m", "5"]).contains("all of --m, --n and --k"));
    assert!(refused(&["bench", "gemm", "--class", "cubes"]).contains("--class cubes: the list has square, deepbench"));
    assert!(refused(&["bench", "gemm", "--seconds", "0"]).contains("--seconds 0"));
    assert!(refused(&["bench", "gemm", "--knobs", "tile"]).contains("`tile` is not of the form name=value"));
    assert!(refused(&["bench", "conv", "--instant", "--all-knobs"]).contains("cannot be used with"));
    assert!(refused(&["bench", "conv", "--direction", "up"]).contains("--direction up"));
    assert!(refused(&["verify", "no such case"]).contains("no case has `no such case` in its id"));
    assert!(
        refused(&["verify", "bf16-edge-k", "--engine", "gemm.simt", "--kernel", "magic", "--json"])
            .contains("a kernel with `magic` in its name")
    );
    assert!(refused(&["verify", "--engine", "gemm.magic"]).contains("no engine `gemm.magic`; the engines are gemm."));
    for words in [&["bench", "gemm"][..], &["bench", "conv"], &["check", "gemm"], &["inspect", "-m", "1", "-n", "1", "-k", "1"]] {
        let said = refused(&[words, &["--engine", "conv.magic"]].concat());
        assert!(said.contains("no engine `conv.magic`; the engines are gemm."), "{words:?}: {said}");
    }
    assert!(refused(&["inspect"]).contains("which problem? --m, --n and --k, or --case, or --file"));
    assert!(refused(&["inspect", "-m", "1", "-n", "1", "-k", "1", "--case", "gemm/f16-odd"]).contains("give one of them"));
    assert!(refused(&["inspect", "--case", "bf16-edge"]).contains("name one"));
    assert!(refused(&["bench"]).contains("Usage"));
    let folder = tempfile::tempdir().expect("a folder");
    let file = |text: &str| {
        let path = folder.path().join("workload.txt");
        std::fs::write(&path, text).expect("writes");
        path.to_string_lossy().into_owned()
    };
    assert!(refused(&["bench", "workload", &file("")]).contains("workload.txt names no problem"));
    assert!(refused(&["bench", "workload", &file("five\tgemm\n")]).contains("workload.txt, line 1"));
    assert!(refused(&["bench", "workload", &file(""), "--candidates", "0"]).contains("--candidates 0: at least 1"));
}

#[test]
fn case_files_that_are_damaged_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cases.toml");
    std::fs::write(&path, "[[group]]\nid = \"x\"\na = \"bf16\"\nsizes = [[1, 1]]\n").expect("writes");
    assert!(refused(&["verify", "--cases", &path.to_string_lossy()]).contains("cases.toml"));
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
fn inspect_shows_what_kernels_are_made_of() {
    let words = ["inspect", "--case", "gemm/f16-odd/nn", "--arch", "h200", "--ir", "--ptx"];
    let output = run(&words);
    let text = stdout(&output);
    assert!(text.contains("1. gemm.") && text.contains("  launch ") && text.contains(".version 9.0"), "{output:?}");
    let json: serde_json::Value = serde_json::from_str(&stdout(&run(&[&words[..], &["--json"]].concat()))).expect("one JSON object");
    assert!(json["ranked"].as_array().is_some_and(|ranked| !ranked.is_empty()));
    assert!(json["kernels"][0]["ptx"].as_str().is_some_and(|ptx| ptx.contains(".entry")));
}

#[test]
fn without_a_gpu_its_commands_are_skipped_aloud() {
    if let Ok(driver) = verdigris_cuda::Driver::load() {
        eprintln!("skipped: this machine has the driver of CUDA {}", driver.version());
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let workload = folder.path().join("workload.txt").to_string_lossy().into_owned();
    std::fs::write(&workload, "7\tgemm f32 m=64 n=64 k=64\n").expect("writes");
    for words in [&["bench", "gemm"][..], &["bench", "overhead"], &["bench", "workload", &workload], &["check", "gemm"]] {
        let output = run(words);
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        assert!(stdout(&output).contains("skipped: no NVIDIA driver"), "{words:?}");
    }
}
