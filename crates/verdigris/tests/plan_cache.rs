//! One file of measured choices under several processes: nothing that was kept is lost, whoever is killed, whatever lies in the file.
#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use verdigris::PlanCache;
use verdigris::plan_cache::{Answer, Found, Question};
use verdigris_engines::engine::Knobs;
use verdigris_graph::{GemmProblem, Problem};
use verdigris_tensor::DType;

/// The file that processes share, and the one that tells a process of this program what to do, in its current folder.
const PLANS: &str = "plans.txt";
const JOB: &str = "job.txt";

fn question(writer: u64, number: u64) -> Question {
    let gemm = GemmProblem::packed(1 + writer, 1 + number, 5, DType::F32, DType::F32).expect("a plain product");
    Question {
        problem: Problem::Gemm(gemm).to_string(),
        device: "Fake/sm_90a/4".to_owned(),
        driver: "13000".to_owned(),
        policy: "workspace=any".to_owned(),
    }
}

fn answer(number: u64) -> Answer {
    Answer { engine: "gemm.simt".to_owned(), version: 1, knobs: Knobs::new([("tile", number as u32)]), us: number as f64 }
}

/// What a process of its own does: keeps one choice after the other, and says the number of each once it is on disk. It finds its orders in the
/// current folder; where there are none, there is nothing to do.
#[test]
#[ignore = "the other tests start it"]
fn a_writer() {
    let Ok(job) = std::fs::read_to_string(JOB) else { return };
    let [writer, count, same] = job.split_whitespace().map(|word| word.parse().expect("a number")).collect::<Vec<u64>>()[..] else {
        panic!("{job}");
    };
    let cache = PlanCache::open(Some(Path::new("..").join(PLANS))).expect("opens");
    for number in 0..count {
        // With `same` questions over and over most lines are old soon, and the file is written anew.
        cache.keep(&question(writer, number % same), &answer(number)).expect("writes");
        writeln!(std::io::stdout(), "kept {number}").expect("is heard");
    }
}

/// Starts a process of this program that writes.
fn start(folder: &Path, writer: u64, count: u64, same: u64) -> Child {
    let own = folder.join(writer.to_string());
    std::fs::create_dir_all(&own).expect("a folder");
    std::fs::write(own.join(JOB), format!("{writer} {count} {same}")).expect("writes");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--ignored", "--exact", "a_writer", "--nocapture"]).current_dir(own);
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("starts")
}

fn found(cache: &PlanCache, writer: u64, number: u64) -> Option<u32> {
    let found = cache.find(&question(writer, number)).expect("reads")?;
    assert_eq!(found.1, Found::User);
    found.0.knobs.value("tile")
}

#[test]
fn several_processes_lose_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    // Two that add, and two under whose lines the file is written anew several times.
    let writers = [(0, 60, 60), (1, 60, 60), (2, 300, 3), (3, 300, 3)];
    let children = writers.map(|(writer, count, same)| start(folder.path(), writer, count, same));
    let reader = PlanCache::open(Some(folder.path().join(PLANS))).expect("opens");
    for child in children {
        let output = child.wait_with_output().expect("ends");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    let fresh = PlanCache::open(Some(folder.path().join(PLANS))).expect("opens");
    for cache in [&reader, &fresh] {
        for (writer, count, same) in writers {
            for number in 0..same {
                let last = (0..count).rfind(|other| other % same == number).expect("one of them");
                assert_eq!(found(cache, writer, number), Some(last as u32), "writer {writer}, question {number}");
            }
        }
    }
    assert_eq!(fresh.damaged(), []);
    let lines = std::fs::read_to_string(folder.path().join(PLANS)).expect("reads").lines().count();
    assert!(lines < 600, "{lines} lines: it was written anew");
}

#[test]
fn a_killed_process_loses_nothing_that_it_had_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    for round in 0..4 {
        let mut child = start(folder.path(), round, 1_000_000, if round % 2 == 0 { 1_000_000 } else { 5 });
        let mut kept = 0;
        let said = BufReader::new(child.stdout.take().expect("piped"));
        for line in said.lines().map_while(Result::ok) {
            if let Some(number) = line.strip_prefix("kept ") {
                kept = number.parse().expect("a number");
                if kept >= 40 * (round + 1) {
                    break;
                }
            }
        }
        // Somewhere in the middle of the next ones.
        child.kill().expect("is killed");
        child.wait().expect("ends");
        let cache = PlanCache::open(Some(folder.path().join(PLANS))).expect("opens");
        let same = if round % 2 == 0 { 1_000_000 } else { 5 };
        for number in 0..kept.min(same) {
            let tile = found(&cache, round, number).expect("it said that it was kept");
            assert!(u64::from(tile) % same == number, "{tile}");
        }
        assert!(cache.damaged().len() <= 1, "a line may be cut short: {:?}", cache.damaged());
        // Whoever comes next is not held up, and what he adds does not hang on to a cut line.
        cache.keep(&question(100, round), &answer(round)).expect("writes");
        let next = PlanCache::open(Some(folder.path().join(PLANS))).expect("opens");
        assert_eq!(found(&next, 100, round), Some(round as u32));
    }
    // The remains of a rewriting that was broken off are no hindrance.
    let remains: Vec<_> = (0..100).map(|number| folder.path().join(format!(".verdigris-{}-{number}", std::process::id()))).collect();
    remains.iter().for_each(|path| std::fs::write(path, "half a li").expect("writes"));
    let cache = PlanCache::open(Some(folder.path().join(PLANS))).expect("opens");
    let done = cache.compact().expect("writes").expect("there is a file");
    assert!(done.kept > 0);
    // They may be another's of the same number, in another container.
    assert!(remains.iter().all(|path| std::fs::read_to_string(path).is_ok_and(|text| text == "half a li")));
    assert_eq!(PlanCache::open(Some(folder.path().join(PLANS))).expect("opens").damaged(), []);
}

/// Whoever can write the file of choices decides what runs, so that one which others can write is refused, by name, mode, owner and cure; and the handle goes on
/// without it. The same for a pack.
#[cfg(unix)]
#[test]
fn files_that_others_can_write_are_refused_and_the_handle_goes_on() {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use verdigris::{Config, Handle, Limits};
    use verdigris_cuda::{PackError, fake};

    let folder = tempfile::tempdir().expect("a folder");
    let home = fs::canonicalize(folder.path()).expect("is there").join("verdigris");
    let (plans, pack) = (home.join(PLANS), home.join("sm_90a.pack"));
    let mode = |path: &Path| fs::metadata(path).expect("is there").permissions().mode() & 0o777;
    let set = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).expect("ours");
    // What is made here is ours alone.
    PlanCache::open(Some(plans.clone())).expect("nothing is there").keep(&question(0, 0), &answer(0)).expect("writes");
    assert_eq!((mode(&home), mode(&plans)), (0o700, 0o600));
    assert_eq!(found(&PlanCache::open(Some(plans.clone())).expect("private"), 0, 0), Some(0));

    fs::write(&pack, "no pack").expect("writes");
    let config = Config { plans: Some(plans.clone()), pack: Some(pack.clone()), ..Config::default() };
    for (place, wrong, right) in [(&plans, 0o666, 0o600), (&plans, 0o602, 0o600), (&home, 0o777, 0o700), (&home, 0o707, 0o700)] {
        set(place, wrong);
        set(&pack, 0o646);
        let error = PlanCache::open(Some(plans.clone())).expect_err("others can write it");
        let distrust = error.distrust().expect("that is why");
        assert_eq!((&distrust.path, &distrust.place, distrust.mode), (&plans, place, wrong));
        let cure = format!("chmod go-w '{}'", place.display());
        assert!(error.to_string().ends_with(&cure), "{error}");
        let handle = Handle::on(&fake::context(), &config).expect("goes on without them");
        assert!(handle.plan_cache_trouble().is_some_and(|trouble| trouble.ends_with(&cure)), "{:?}", handle.plan_cache_trouble());
        assert!(matches!(handle.pack(), Some(Err(PackError::Distrusted(distrust))) if distrust.path == pack), "{:?}", handle.pack());
        let problem = Problem::Gemm(GemmProblem::packed(64, 64, 64, DType::F32, DType::F32).expect("a plain product"));
        handle.choose(&problem, &Limits::default()).expect("by estimate");
        // What is distrusted is not written either.
        assert_eq!(fs::read_to_string(&plans).expect("reads").lines().count(), 1);
        set(place, right);
        set(&pack, 0o644);
    }
    let handle = Handle::on(&fake::context(), &config).expect("opens");
    assert_eq!(handle.plan_cache_trouble(), None);
    assert!(matches!(handle.pack(), Some(Err(PackError::Damaged { .. }))), "it is read now: {:?}", handle.pack());
    // A file that is opened to others while it is in use is refused when it is next written.
    let cache = PlanCache::open(Some(plans.clone())).expect("private");
    set(&plans, 0o666);
    let error = cache.keep(&question(0, 1), &answer(1)).expect_err("others can write it");
    assert_eq!(error.distrust().map(|distrust| distrust.mode), Some(0o666));
}
