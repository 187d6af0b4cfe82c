//! The disk cache under several processes at once, and under one that is killed.
//!
//! Each test starts this very test binary again as the other process: with [`CHILD_ROOT`] set, [`child`] writes entries into
//! that folder for ever, and without it does nothing.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use verdigris_cuda::{CacheKey, CompileOptions, DiskCache, Lookup};
use verdigris_kir::ptx::Isa;

const CHILD_ROOT: &str = "VERDIGRIS_TEST_CACHE_ROOT";
const ENTRIES: u32 = 7;

fn key(number: u32) -> CacheKey {
    CacheKey {
        source_hash: [1; 32],
        spec: format!("kernel {number}"),
        arch: "sm_90a".to_owned(),
        driver_version: 13_000,
        driver_release: String::new(),
        ptx_isa: Isa::V9_0,
        options: CompileOptions::default(),
    }
}

/// A few hundred kilobytes, so that a write takes long enough to be caught in the middle.
fn cubin(number: u32) -> Vec<u8> {
    (0..100_000 + number).flat_map(|i| i.wrapping_mul(0x9e37_79b9 + number).to_le_bytes()).collect()
}

fn start_child(root: &Path) -> Child {
    Command::new(std::env::current_exe().expect("this test binary"))
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD_ROOT, root)
        .stdout(Stdio::null())
        .spawn()
        .expect("starts")
}

#[test]
fn child() {
    let Some(root) = std::env::var_os(CHILD_ROOT) else { return };
    let cache = DiskCache::open(root).expect("opens");
    for number in (0..ENTRIES).cycle() {
        if cache.store(&key(number), &cubin(number)).is_err() {
            // The parent is done and took the folder away.
            return;
        }
    }
}

/// Reads all entries until the time is up; every one found must be whole. Returns how many were.
fn read_for(cache: &DiskCache, time: Duration) -> u32 {
    let (start, mut hits) = (Instant::now(), 0);
    while start.elapsed() < time {
        for number in 0..ENTRIES {
            match cache.load(&key(number)) {
                Lookup::Hit(bytes) => {
                    assert_eq!(bytes, cubin(number));
                    hits += 1;
                }
                Lookup::Missing => {}
                Lookup::Damaged(entry) => panic!("{entry:?}"),
            }
        }
    }
    hits
}

/// Waits until the other process has written something.
fn wait_for_first(cache: &DiskCache) {
    let start = Instant::now();
    while cache.load(&key(0)) == Lookup::Missing {
        assert!(start.elapsed() < Duration::from_secs(60), "the other process writes nothing");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn two_processes_write_while_a_third_reads() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = folder.path().join("cache");
    let cache = DiskCache::open(&root).expect("opens");
    let mut children = [start_child(&root), start_child(&root)];
    wait_for_first(&cache);
    let hits = read_for(&cache, Duration::from_millis(600));
    for child in &mut children {
        child.kill().expect("stops");
        child.wait().expect("is gone");
    }
    assert!(hits > ENTRIES, "{hits} entries were read");
}

#[test]
fn a_writer_killed_at_any_moment_leaves_no_damaged_entry() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for round in 0..12_u64 {
        let root = folder.path().join(format!("cache{round}"));
        let cache = DiskCache::open(&root).expect("opens");
        let mut child = start_child(&root);
        wait_for_first(&cache);
        std::thread::sleep(Duration::from_micros(round * 317));
        child.kill().expect("stops");
        child.wait().expect("is gone");
        assert!(read_for(&cache, Duration::from_millis(1)) > 0);
        // What the killed process left does not stand in the way of the next one.
        let cache = DiskCache::open(&root).expect("opens again");
        for number in 0..ENTRIES {
            cache.store(&key(number), &cubin(number)).expect("stores");
            assert_eq!(cache.load(&key(number)), Lookup::Hit(cubin(number)));
        }
    }
}
