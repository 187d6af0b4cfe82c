//! `canary` and `gate` as a user calls them: on the CPU, on planted mistakes, and on records that cannot be read.

use std::path::Path;
use std::process::{Command, Output};

fn verdigris(arguments: &[&str]) -> Output {
    let empty = tempfile::tempdir().expect("a folder");
    let command =
        Command::new(env!("CARGO_BIN_EXE_verdigris")).args(arguments).env("HOME", empty.path()).env_remove("XDG_CACHE_HOME").output();
    command.expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn write(path: &Path, lines: &[String]) {
    std::fs::write(path, lines.join("\n")).expect("writes");
}

#[test]
fn the_canary_is_well_on_the_cpu_and_its_record_is_its_own_baseline() {
    let done = verdigris(&["canary", "--device", "cpu", "--json"]);
    assert!(done.status.success(), "{}\n{}", text(&done.stdout), text(&done.stderr));
    let lines: Vec<String> = text(&done.stdout).lines().map(str::to_owned).collect();
    let rows: Vec<serde_json::Value> = lines.iter().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect();
    for family in
        ["gemm", "conv", "pointwise", "reduction", "scan", "pool", "softmax", "norm", "batch_norm", "attention", "movement", "resample"]
    {
        assert!(rows.iter().any(|row| row["class"] == family), "no graph of {family}");
    }
    for row in &rows {
        assert_eq!((row["wrong"].as_u64(), row["repeats"].as_bool()), (Some(0), Some(true)), "{row}");
        assert!(row["elements"].as_u64() > Some(0) && row["us"].as_f64() > Some(0.0), "{row}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (old, new) = (folder.path().join("old.jsonl"), folder.path().join("new.jsonl"));
    write(&old, &lines);
    let same = verdigris(&["gate", old.to_str().expect("a path"), old.to_str().expect("a path")]);
    assert!(same.status.success() && text(&same.stdout).contains("gate open: mean 1.0000"), "{}", text(&same.stdout));
    // F6: a build that is slower on one graph.
    let slower = |factor: f64| {
        let with = |mut row: serde_json::Value, factor: f64| {
            row["us"] = (row["us"].as_f64().expect("a time") * factor + 10.0 * (factor - 1.0)).into();
            row.to_string()
        };
        let mut lines: Vec<String> = rows.iter().map(|row| with(row.clone(), 1.0)).collect();
        lines[0] = with(rows[0].clone(), factor);
        lines
    };
    write(&new, &slower(2.0));
    let shut = verdigris(&["gate", old.to_str().expect("a path"), new.to_str().expect("a path"), "--json"]);
    assert_eq!(shut.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&shut.stdout).expect("JSON");
    assert_eq!((report["summary"]["is_open"].as_bool(), report["summary"]["shut_by"].as_u64()), (Some(false), Some(1)), "{report}");
    // A graph that is missing, or that is wrong now, shuts it as well.
    write(&new, &lines[1..]);
    let missing = verdigris(&["gate", old.to_str().expect("a path"), new.to_str().expect("a path")]);
    assert!(missing.status.code() == Some(1) && text(&missing.stdout).contains("it is not in the new record"));
    let mut wrong = rows.clone();
    (wrong[0]["wrong"], wrong[0]["trouble"]) = (3.into(), "3 of 9 elements wrong".into());
    write(&new, &wrong.iter().map(ToString::to_string).collect::<Vec<_>>());
    let wrong = verdigris(&["gate", old.to_str().expect("a path"), new.to_str().expect("a path")]);
    assert!(wrong.status.code() == Some(1) && text(&wrong.stdout).contains("3 of 9 elements wrong"));
    // The canary itself sees a machine that has become slower: the baseline has times that nobody reaches.
    let quick: Vec<String> = rows
        .iter()
        .map(|row| {
            let mut row = row.clone();
            row["us"] = 0.001.into();
            row.to_string()
        })
        .collect();
    write(&old, &quick);
    let slow = verdigris(&["canary", "gemm", "--device", "cpu", "--baseline", old.to_str().expect("a path")]);
    assert_eq!(slow.status.code(), Some(1), "{}", text(&slow.stdout));
    assert!(text(&slow.stdout).contains("0.0 before"), "{}", text(&slow.stdout));
}

/// Faults that are planted under the canary are found by it, and each is called by its name: a wrong result (F5), bits that differ (F5), a slow plan (F3).
#[test]
fn the_canary_finds_what_is_planted_under_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let before = folder.path().join("before.jsonl");
    let run = |words: &[&str]| verdigris(&[&["canary", "gemm/f32", "--device", "cpu", "--json"][..], words].concat());
    let well = run(&["--baseline", "none"]);
    assert!(well.status.success() && text(&well.stderr).is_empty(), "{}", text(&well.stderr));
    // Times of other processes on this machine are not what is asked about: a baseline of 50 ms, where a run takes one or a few and a planted one a second more.
    let mut row = serde_json::from_slice::<serde_json::Value>(&well.stdout).expect("one row");
    row["us"] = 50_000.0.into();
    write(&before, &[row.to_string()]);
    let before = before.to_str().expect("a path");
    let sound = run(&["--baseline", before, "--slower", "8"]);
    assert!(sound.status.success(), "{}", text(&sound.stdout));
    assert!(text(&sound.stderr).contains(&format!("times are held against {before}: cpu, ")), "{}", text(&sound.stderr));
    let found = |fault: &str| {
        let done = run(&["--baseline", before, "--slower", "8", "--plant", fault]);
        assert_eq!(done.status.code(), Some(1), "{fault}: {}", text(&done.stdout));
        serde_json::from_slice::<serde_json::Value>(&done.stdout).expect("one row")
    };
    let wrong = found("wrong");
    assert!(wrong["wrong"].as_u64() > Some(0) && wrong["worst"].as_f64() > Some(1.0), "{wrong}");
    assert!(wrong["trouble"].as_str().is_some_and(|trouble| trouble.contains("elements wrong")), "{wrong}");
    let differs = found("unrepeatable");
    assert_eq!((differs["wrong"].as_u64(), differs["repeats"].as_bool()), (Some(0), Some(false)), "{differs}");
    assert!(differs["trouble"].as_str().is_some_and(|trouble| trouble.contains("bits differ from run to run")), "{differs}");
    let slow = found("slow");
    assert_eq!((slow["wrong"].as_u64(), slow["repeats"].as_bool()), (Some(0), Some(true)), "{slow}");
    assert!(slow["trouble"].as_str().is_some_and(|trouble| trouble.contains("before") && !trouble.contains("wrong")), "{slow}");
}

/// Where no record of a chip ships, that is said, and nothing is refused for it.
#[test]
fn a_chip_without_a_record_is_told_and_not_refused() {
    let done = verdigris(&["canary", "gemm/f32", "--device", "cpu", "--json"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(text(&done.stderr).contains("times are held against nothing"), "{}", text(&done.stderr));
    let row: serde_json::Value = serde_json::from_slice(&done.stdout).expect("one row");
    assert!(row["before_us"].is_null(), "{row}");
}

#[test]
fn what_cannot_be_judged_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let (good, bad) = (folder.path().join("good.jsonl"), folder.path().join("bad.jsonl"));
    write(&good, &[r#"{"suite":"tune","class":"a","problem":"p","dtype":"bf16","us":4.0,"engine":"e","knobs":"k"}"#.to_owned()]);
    for (content, told) in [("", "has no rows"), ("{", "bad.jsonl, line 1"), (r#"{"rows":3}"#, "has no rows")] {
        std::fs::write(&bad, content).expect("writes");
        let done = verdigris(&["gate", good.to_str().expect("a path"), bad.to_str().expect("a path")]);
        assert!(done.status.code() == Some(2) && text(&done.stderr).contains(told), "{content}: {}", text(&done.stderr));
    }
    let none = verdigris(&["gate", good.to_str().expect("a path"), folder.path().join("none").to_str().expect("a path")]);
    assert!(none.status.code() == Some(2) && text(&none.stderr).contains("reading"), "{}", text(&none.stderr));
    for (arguments, told) in [
        (&["canary", "--device", "tpu"][..], "there is no device `tpu`"),
        (&["canary", "--device", "cpu", "nothing-like-it"][..], "no graph of the canary"),
        (&["canary", "--device", "cpu", "--slower", "0.5"][..], "--slower 0.5: at least 1"),
    ] {
        let done = verdigris(arguments);
        assert!(done.status.code() == Some(2) && text(&done.stderr).contains(told), "{arguments:?}: {}", text(&done.stderr));
    }
}

/// A workload weighs problems by the application's own time: the same two records open the gate or shut it by what ran how often.
#[test]
fn a_workload_says_what_is_judged_and_how_much_it_counts() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let text_of = |name: &str| at(name).to_str().expect("a path").to_owned();
    let (mut words, mut names) = (Vec::new(), Vec::new());
    for m in [64, 128] {
        let problem = verdigris_graph::GemmProblem::packed(m, 64, 64, verdigris_tensor::DType::F32, verdigris_tensor::DType::F32);
        let problem = verdigris_graph::Problem::Gemm(problem.expect("a plain product"));
        names.push(problem.to_string());
        words.push(problem.to_string());
    }
    let row = |class: &str, name: &str, us: f64| {
        serde_json::json!({ "suite": "tune", "class": class, "problem": name, "dtype": "f32", "us": us, "engine": "e", "knobs": "k" })
            .to_string()
    };
    // The first became faster, the second slower, and what the application never ran far slower.
    write(&at("old"), &[row("workload", &names[0], 100.0), row("workload", &names[1], 100.0), row("square", "other", 10.0)]);
    write(&at("new"), &[row("workload", &names[0], 50.0), row("workload", &names[1], 108.0), row("square", "other", 90.0)]);
    let gate = |counts: [u64; 2]| {
        let lines: Vec<String> =
            counts.iter().zip(&words).filter(|(count, _)| **count > 0).map(|(count, words)| format!("{count}\t{words}")).collect();
        std::fs::write(at("workload"), lines.join("\n") + "\n").expect("writes");
        let done = verdigris(&["gate", &text_of("old"), &text_of("new"), "--workload", &text_of("workload"), "--json"]);
        let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap_or_else(|_| panic!("{}", text(&done.stderr)));
        (done.status.code(), report["summary"]["rows"].as_u64(), report["summary"]["mean"].as_f64().expect("a mean"))
    };
    let near = |mean: f64, wanted: f64| assert!((mean - wanted).abs() < 1e-9, "{mean} {wanted}");
    let (code, rows, mean) = gate([10, 1]);
    near(mean, 1100.0 / 608.0);
    assert_eq!((code, rows), (Some(0), Some(2)));
    let (code, rows, mean) = gate([1, 100]);
    near(mean, 10_100.0 / 10_850.0);
    assert_eq!((code, rows), (Some(1), Some(2)), "the application is slower as a whole");
    let (code, rows, mean) = gate([5, 0]);
    near(mean, 2.0);
    assert_eq!((code, rows), (Some(0), Some(1)));
    // A problem that was not measured shuts it.
    write(&at("old"), &[row("workload", &names[0], 100.0)]);
    let (code, rows, _) = gate([1, 1]);
    assert_eq!((code, rows), (Some(1), Some(2)));
    std::fs::write(at("workload"), "").expect("writes");
    let none = verdigris(&["gate", &text_of("old"), &text_of("new"), "--workload", &text_of("workload")]);
    assert!(none.status.code() == Some(2) && text(&none.stderr).contains("names no problem"), "{}", text(&none.stderr));
}

/// Problems of one kind, type and shape that differ in what is done are rows of their own.
#[test]
fn problems_of_one_shape_are_told_apart() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let text_of = |name: &str| at(name).to_str().expect("a path").to_owned();
    let plain = verdigris_graph::GemmProblem::packed(64, 64, 64, verdigris_tensor::DType::F32, verdigris_tensor::DType::F32);
    let plain = verdigris_graph::Problem::Gemm(plain.expect("a plain product"));
    let relu: verdigris_graph::Problem = format!("{plain} + relu").parse().expect("a product and a function of it");
    assert_eq!(verdigris::explain::describe(&plain), verdigris::explain::describe(&relu), "one name in short");
    let row = |problem: &verdigris_graph::Problem, us: f64| {
        serde_json::json!({ "suite": "tune", "class": "workload", "problem": problem.to_string(), "dtype": "f32", "us": us, "engine": "e", "knobs": "k" })
            .to_string()
    };
    write(&at("old"), &[row(&plain, 100.0), row(&relu, 100.0)]);
    write(&at("new"), &[row(&plain, 300.0), row(&relu, 100.0)]);
    std::fs::write(at("workload"), format!("1\t{plain}\nfive\t{plain}\n1000\t{relu}\n")).expect("writes");
    let done = verdigris(&["gate", &text_of("old"), &text_of("new"), "--workload", &text_of("workload"), "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap_or_else(|_| panic!("{}", text(&done.stderr)));
    assert_eq!((report["summary"]["rows"].as_u64(), report["summary"]["shut_by"].as_u64()), (Some(2), Some(1)), "{report}");
    assert!(text(&done.stderr).contains("1 lines are passed over") && text(&done.stderr).contains("line 2"), "{}", text(&done.stderr));
}

/// A row that is only in the new record has nothing to be compared with, and may be wrong all the same.
#[test]
fn what_is_added_and_wrong_shuts_the_gate() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let row = |problem: &str, wrong: u64| {
        let trouble = (wrong > 0).then_some("3 elements are wrong");
        serde_json::json!({ "suite": "canary", "class": "gemm", "problem": problem, "us": 10.0, "engines": ["e"], "wrong": wrong, "repeats": true, "trouble": trouble })
            .to_string()
    };
    write(&at("old"), &[row("one", 0)]);
    for (wrong, code) in [(0, 0), (3, 1)] {
        write(&at("new"), &[row("one", 0), row("another", wrong)]);
        let done = verdigris(&["gate", at("old").to_str().expect("a path"), at("new").to_str().expect("a path"), "--json"]);
        let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap_or_else(|_| panic!("{}", text(&done.stderr)));
        assert_eq!((done.status.code(), report["summary"]["added"].as_u64()), (Some(code), Some(1)), "{report}");
        assert_eq!(report["summary"]["shut_by"].as_u64(), Some(u64::from(wrong > 0)), "{report}");
    }
}

/// Two programs measure in turns, and the medians of their turns are compared: a turn that something disturbed shuts nothing. They are scripts here, which
/// write down whose turn it was.
#[cfg(unix)]
#[test]
fn two_programs_are_measured_in_turns_and_compared() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("a path").to_owned();
    // One time a turn, of one graph; the program's name and what it was called with go into `turns`.
    let program = |name: &str, times: [f64; 3], tail: &str| {
        let cases: Vec<String> = times.iter().enumerate().map(|(turn, us)| format!("{turn}) us={us};;")).collect();
        let row = r#"{"suite":"canary","class":"gemm","problem":"one","engines":["e"],"wrong":0,"repeats":true,"us":'$us'}"#;
        let (turns, cases) = (at("turns"), cases.join(" "));
        let text = format!(
            "#!/bin/sh\nn=$(grep -c '^{name} ' {turns})\necho {name} \"$@\" >> {turns}\ncase $n in {cases} esac\necho '{row}'\n{tail}\n"
        );
        // By a process of its own: a file that another thread's child still has open cannot be run.
        let written = Command::new("sh").args(["-c", "printf %s \"$1\" > \"$0\"", &at(name), &text]).status().expect("sh");
        assert!(written.success());
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o755)).expect("ours");
    };
    let gate = |old: &str, new: &str, words: &[&str]| {
        std::fs::write(at("turns"), "").expect("writes");
        let done = verdigris(&[&["gate", &at(old), &at(new), "--json"][..], words].concat());
        (done, std::fs::read_to_string(at("turns")).expect("there"))
    };
    // In its second turn the new one was disturbed; the old one's canary ends with 1, which its rows would explain.
    program("old", [100.0, 102.0, 101.0], "exit 1");
    program("new", [50.0, 400.0, 51.0], "");
    let (open, turns) = gate("old", "new", &["--device", "cpu"]);
    assert_eq!(open.status.code(), Some(0), "{}{}", text(&open.stdout), text(&open.stderr));
    let called = |names: &[&str]| names.iter().map(|name| format!("{name} canary --json --device cpu\n")).collect::<String>();
    assert_eq!(turns, called(&["old", "new", "new", "old", "old", "new"]));
    let report: serde_json::Value = serde_json::from_slice(&open.stdout).expect("JSON");
    assert_eq!((report["rows"][0]["old_us"].as_f64(), report["rows"][0]["new_us"].as_f64()), (Some(101.0), Some(51.0)), "{report}");
    let (shut, turns) = gate("new", "old", &["--rounds", "1"]);
    assert_eq!((shut.status.code(), turns.lines().count()), (Some(1), 2), "{}", text(&shut.stdout));
    // A workload is measured by `tune`.
    let problem = verdigris_graph::GemmProblem::packed(64, 64, 64, verdigris_tensor::DType::F32, verdigris_tensor::DType::F32);
    std::fs::write(at("workload"), format!("3\t{}\n", verdigris_graph::Problem::Gemm(problem.expect("a plain product")))).expect("writes");
    let (_, turns) = gate("old", "new", &["--rounds", "1", "--workload", &at("workload")]);
    assert_eq!(turns.lines().next(), Some(&*format!("old tune workload {} --json --again --record none", at("workload"))));
    // A program that fails, and one beside a record.
    program("broken", [1.0; 3], "echo no device >&2; exit 2");
    let (broken, _) = gate("old", "broken", &[]);
    assert!(broken.status.code() == Some(2) && text(&broken.stderr).contains("no device"), "{}", text(&broken.stderr));
    write(Path::new(&at("record")), &[r#"{"suite":"canary","class":"gemm","problem":"one","us":1.0}"#.to_owned()]);
    let (mixed, turns) = gate("old", "record", &[]);
    assert!(
        mixed.status.code() == Some(2) && text(&mixed.stderr).contains("two records are compared, or two programs"),
        "{}",
        text(&mixed.stderr)
    );
    assert_eq!(turns, "");
}

/// Numbers that cannot be compared open no gate, and what is counted as wrong shuts it without a word.
#[test]
fn what_is_no_number_opens_no_gate() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("a path").to_owned();
    let row = |problem: &str, us: f64| serde_json::json!({ "suite": "tune", "problem": problem, "us": us });
    let gate = |old: &[serde_json::Value], new: &[serde_json::Value], words: &[&str]| {
        write(Path::new(&at("old")), &old.iter().map(ToString::to_string).collect::<Vec<_>>());
        write(Path::new(&at("new")), &new.iter().map(ToString::to_string).collect::<Vec<_>>());
        verdigris(&[&["gate", &at("old"), &at("new")][..], words].concat())
    };
    for noise in ["nan", "inf", "-1"] {
        let done = gate(&[row("p", 10.0)], &[row("p", 100.0)], &[&format!("--noise-us={noise}"), "--mean", "0.01"]);
        assert!(done.status.code() == Some(2) && text(&done.stderr).contains("--noise-us"), "{noise}: {done:?}");
    }
    let done = gate(&[row("p", 10.0), row("q", 1e308)], &[row("p", 10.9), row("q", 1e-300)], &[]);
    assert_eq!(done.status.code(), Some(1), "{}", text(&done.stdout));
    assert!(text(&done.stdout).contains("no number that could be compared"), "{}", text(&done.stdout));
    for (change, told) in [
        (serde_json::json!({ "wrong": 3 }), "3 elements wrong"),
        (serde_json::json!({ "wrong": 0, "repeats": false }), "bits differ"),
        (serde_json::json!({ "repeats": false }), "bits differ"),
    ] {
        let mut wrong = row("p", 10.0);
        change.as_object().expect("an object").iter().for_each(|(name, value)| wrong[name] = value.clone());
        let done = gate(&[row("p", 10.0)], &[wrong], &[]);
        assert!(done.status.code() == Some(1) && text(&done.stdout).contains(told), "{change}: {}", text(&done.stdout));
    }
    let done = gate(&[row("p", 10.0)], &[row("p", 10.0)], &["--noise-us", "0"]);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stdout));
}

/// The verdict is the exit code, whether or not its words have a reader; words that found no room are told.
#[cfg(target_os = "linux")]
#[test]
fn an_exit_code_does_not_depend_on_who_reads() {
    use std::process::Stdio;
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("a path").to_owned();
    for (name, us) in [("old", 10.0), ("new", 100.0)] {
        write(Path::new(&at(name)), &[serde_json::json!({ "suite": "tune", "problem": "p", "us": us }).to_string()]);
    }
    let (old, new) = (at("old"), at("new"));
    let run = |words: &[&str], out: Stdio| {
        let done = Command::new(env!("CARGO_BIN_EXE_verdigris")).args(words).env("VERDIGRIS_CACHE", "off").stdout(out).output();
        done.expect("the program runs")
    };
    let unread = || {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        Stdio::from(writer)
    };
    let full = || Stdio::from(std::fs::OpenOptions::new().write(true).open("/dev/full").expect("there"));
    for (words, code) in [
        (&["gate", &old, &new][..], 1),
        (&["gate", &old, &new, "--json"][..], 1),
        (&["gate", &old, &old][..], 0),
        (&["canary", "--device", "cpu", "gemm/f32", "--baseline", "none", "--plant", "wrong"][..], 1),
        (&["canary", "--device", "cpu", "gemm/f32", "--baseline", "none", "--plant", "wrong", "--json"][..], 1),
        (&["doctor", "--json"][..], 0),
    ] {
        let done = run(words, unread());
        assert_eq!((done.status.code(), text(&done.stderr).as_str()), (Some(code), ""), "{words:?}");
        let done = run(words, full());
        assert_eq!(done.status.code(), Some(2), "{words:?}");
        let said = text(&done.stderr);
        assert!(said.starts_with("verdigris: what was found could not be printed: ") && said.lines().count() == 1, "{words:?}: {said}");
    }
    // Where this machine has no driver.
    let required = run(&["doctor", "--require", "gpu"], Stdio::null()).status.code();
    assert_eq!(run(&["doctor", "--require", "gpu"], unread()).status.code(), required);
}
