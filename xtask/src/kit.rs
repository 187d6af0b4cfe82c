//! The kit: optimized, stripped programs and test runners in one folder, for a GPU machine without Rust.
//!
//! ```text
//! kit/
//!   bin/…                 the programs of the workspace (not this one)
//!   tests/CRATE.TARGET    one runner for each test target
//!   cases/, bench/lists/  what they read, where the repository has it
//!   run-tests             runs every runner, ends with `N passed, N failed`
//!   REVISION              the commit, and whether the tree was clean; the compiler
//! ```
//! A runner that opens files by the path of its own source folder finds nothing on another machine:
//! tests that belong into a kit read from the current folder, which `run-tests` sets to the kit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;

/// Folders of the repository that programs and runners read.
const DATA: [&str; 2] = ["cases", "bench/lists"];

const RUN_TESTS: &str = r#"#!/usr/bin/env bash
# Runs every test runner of this kit, then prints how many tests passed and failed.
# Arguments go to each runner: `./run-tests --ignored gemm`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
shopt -s nullglob
passed=0 failed=0 broken=0
for runner in tests/*; do
    echo "== ${runner#tests/}"
    log=$(mktemp)
    "./$runner" "$@" 2>&1 | tee "$log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || broken=$((broken + 1))
    tally=$(sed -n 's/^test result: .* \([0-9]*\) passed; \([0-9]*\) failed;.*/\1 \2/p' "$log" | tail -n 1)
    rm -f "$log"
    # A runner that ends without a result crashed: one failure.
    read -r p f <<<"${tally:-0 1}"
    passed=$((passed + p)) failed=$((failed + f))
done
echo "$passed passed, $failed failed"
[ "$broken" -eq 0 ] && [ "$failed" -eq 0 ]
"#;

/// An executable that cargo built.
#[derive(Debug, PartialEq, Eq)]
struct Built {
    package: String,
    target: String,
    test: bool,
    path: PathBuf,
}

/// Builds everything optimized, or without the test runners, and packs it into `out`, which is replaced.
/// Returns the files' count and bytes.
pub(crate) fn pack(root: &Path, out: &Path, programs_only: bool) -> Result<(usize, u64)> {
    if out.exists() && !out.join("run-tests").is_file() {
        bail!("{} exists and is no kit; name another folder or remove it", out.display());
    }
    let fresh = fresh(out)?;
    let mut built = build(root, &["build", "--bins"])?;
    if !programs_only {
        built.extend(build(root, &["test", "--no-run", "--lib", "--bins", "--tests"])?);
    }
    built.retain(|built| built.package != "xtask");
    for built in &built {
        let place = if built.test {
            fresh.join("tests").join(format!("{}.{}", built.package, built.target))
        } else {
            fresh.join("bin").join(&built.target)
        };
        fs::copy(&built.path, &place).with_context(|| format!("copying {} to {}", built.path.display(), place.display()))?;
    }
    for data in DATA {
        let from = root.join(data);
        if from.is_dir() {
            copy_folder(&from, &fresh.join(data))?;
        }
    }
    fs::write(fresh.join("REVISION"), revision(root)?).context("writing REVISION")?;
    let script = fresh.join("run-tests");
    fs::write(&script, RUN_TESTS).context("writing run-tests")?;
    make_executable(&script)?;

    if out.exists() {
        fs::remove_dir_all(out).with_context(|| format!("removing {}", out.display()))?;
    }
    fs::rename(&fresh, out).with_context(|| format!("naming {}", out.display()))?;
    size(out)
}

/// Makes the folder that is filled and then swapped with `out`, so that a half-made kit never stands under the kit's name. It is made before
/// anything is built: whoever asked should not learn after minutes of building that nothing can be written.
fn fresh(out: &Path) -> Result<PathBuf> {
    let fresh = out.with_extension("tmp");
    if fresh.exists() {
        fs::remove_dir_all(&fresh).with_context(|| format!("removing {}", fresh.display()))?;
    }
    for folder in ["bin", "tests"] {
        let folder = fresh.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    }
    Ok(fresh)
}

/// Runs one cargo command over the workspace and returns the executables that it names.
fn build(root: &Path, command: &[&str]) -> Result<Vec<Built>> {
    let progress = ProgressBar::new_spinner().with_style(
        ProgressStyle::with_template("{spinner} cargo {prefix} [{elapsed}] {wide_msg}").context("the progress line's template")?,
    );
    progress.set_prefix(command[0].to_string());
    progress.enable_steady_tick(std::time::Duration::from_millis(200));
    let mut child = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(command)
        .args(["--workspace", "--release", "--quiet"])
        .args(["--config", "profile.release.strip=\"symbols\""])
        .arg("--message-format=json-render-diagnostics")
        .current_dir(root)
        .stdout(Stdio::piped())
        .spawn()
        .context("running cargo")?;
    let mut built = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        for line in std::io::BufRead::lines(std::io::BufReader::new(stdout)) {
            let line = line.context("reading cargo's messages")?;
            if let Some((name, executable)) = artifact(&line)? {
                progress.set_message(name);
                built.extend(executable);
            }
        }
    }
    let status = child.wait().context("waiting for cargo")?;
    progress.finish_and_clear();
    if !status.success() {
        bail!("cargo {} failed ({status})", command.join(" "));
    }
    Ok(built)
}

#[derive(Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// What one line of cargo's messages says was built: its name, and the executable if it is one.
fn artifact(line: &str) -> Result<Option<(String, Option<Built>)>> {
    let message: Message = serde_json::from_str(line).context("reading one of cargo's messages")?;
    let (Some(target), Some(profile), Some(manifest)) = (message.target, message.profile, message.manifest_path) else {
        return Ok(None);
    };
    if message.reason != "compiler-artifact" {
        return Ok(None);
    }
    let package = manifest.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let kind = target.kind.first().cloned().unwrap_or_default();
    let name = target.name.clone();
    let executable = message.executable.filter(|_| kind != "custom-build");
    let built = executable.map(|path| Built {
        package,
        // The library's own tests and a program of the same name would otherwise collide.
        target: match (profile.test, kind.as_str()) {
            (true, "test") | (false, _) => target.name,
            (true, _) => format!("{}.{kind}", target.name),
        },
        test: profile.test,
        path,
    });
    // A program that `cargo test` builds for integration tests was already built by `cargo build`; it
    // lands on the same name with the same bytes.
    Ok(Some((name, built)))
}

fn revision(root: &Path) -> Result<String> {
    let say = |program: &str, args: &[&str]| -> Result<String> {
        let output = Command::new(program).args(args).current_dir(root).output().with_context(|| format!("running {program}"))?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let commit = say("git", &["rev-parse", "HEAD"])?;
    let state = match say("git", &["status", "--porcelain"])?.is_empty() {
        true => "clean",
        false => "with uncommitted changes",
    };
    let compiler = say("rustc", &["--version"])?;
    Ok(format!("{commit} ({state})\n{compiler}\n"))
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("making {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target).with_context(|| format!("copying {}", entry.path().display()))?;
        }
    }
    Ok(())
}

fn size(folder: &Path) -> Result<(usize, u64)> {
    let mut sum = (0, 0);
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let entry = entry?;
        let (files, bytes) = if entry.file_type()?.is_dir() { size(&entry.path())? } else { (1, entry.metadata()?.len()) };
        sum = (sum.0 + files, sum.1 + bytes);
    }
    Ok(sum)
}

#[cfg(unix)]
fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).with_context(|| format!("making {} executable", path.display()))
}

#[cfg(not(unix))]
fn make_executable(_path: &Path) -> Result<()> {
    Ok(()) // executability is no property of a file there
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(kind: &str, test: bool, executable: &str) -> String {
        format!(
            "{{\"reason\":\"compiler-artifact\",\"manifest_path\":\"crates/verdigris-cli/Cargo.toml\",\
             \"target\":{{\"name\":\"verdigris\",\"kind\":[\"{kind}\"]}},\"profile\":{{\"test\":{test}}},\
             \"executable\":{executable}}}"
        )
    }

    #[test]
    fn executables_are_told_from_libraries() {
        let built = |text: &str| artifact(text).expect("valid").and_then(|(_, built)| built);
        let program = built(&line("bin", false, "\"target/verdigris\"")).expect("a program");
        assert_eq!((program.target.as_str(), program.test), ("verdigris", false));
        let runner = built(&line("bin", true, "\"target/verdigris-1\"")).expect("a runner");
        assert_eq!((runner.target.as_str(), runner.test), ("verdigris.bin", true));
        assert_eq!(runner.package, "verdigris-cli");
        assert_eq!(built(&line("lib", false, "null")), None);
        assert_eq!(built(&line("custom-build", false, "\"x\"")), None);
        assert!(artifact("{\"reason\":\"build-finished\"}").expect("valid").is_none());
    }

    #[test]
    fn a_folder_that_is_no_kit_is_not_replaced() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let error = pack(folder.path(), folder.path(), true).expect_err("must refuse");
        assert!(error.to_string().contains("is no kit"), "{error}");
    }

    #[test]
    fn a_kit_that_cannot_be_written_is_told_before_anything_is_built() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("file");
        fs::write(&file, "").expect("writable");
        // Cargo would find no workspace in that folder: the error is that of the kit's place.
        let error = pack(folder.path(), &file.join("kit"), true).expect_err("must refuse");
        assert!(error.to_string().contains("making"), "{error:#}");
        assert!(fresh(&folder.path().join("a/b/kit")).expect("makes it").join("bin").is_dir());
    }

    #[cfg(unix)]
    #[test]
    fn the_script_sums_its_runners_and_fails_with_them() {
        let kit = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir(kit.path().join("tests")).expect("writable");
        let put = |name: &str, text: &str| {
            let path = kit.path().join(name);
            fs::write(&path, text).expect("writable");
            make_executable(&path).expect("ours");
        };
        let run = || {
            let output = Command::new(kit.path().join("run-tests")).output().expect("bash is there");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let last = text.lines().last().unwrap_or("").to_string();
            (last, output.status.success())
        };
        put("run-tests", RUN_TESTS);
        let ok = "#!/bin/sh\necho 'test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured'\n";
        put("tests/a", ok);
        put("tests/b", &ok.replace("12", "30"));
        assert_eq!(run(), ("42 passed, 0 failed".to_string(), true));
        put("tests/c", "#!/bin/sh\necho 'test result: FAILED. 1 passed; 2 failed; 0 ignored'\nexit 101\n");
        put("tests/d", "#!/bin/sh\nexit 134\n");
        assert_eq!(run(), ("43 passed, 3 failed".to_string(), false));
    }
}
