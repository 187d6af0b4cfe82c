//! Compiled kernels on disk, shared by processes.
//!
//! - One file an entry, named by the hash of its [`CacheKey`]. Everything that may change the bytes is in the key, so an entry
//!   is never stale and never overwritten by different content.
//! - An entry is written whole to a file of its own under `pending/` and renamed into place, so that a reader sees all of it or
//!   none, whoever else writes and whenever a writer is killed. What a killed writer left is swept after an hour.
//! - A reader checks the entry's magic, key and hash. A damaged entry is told to the caller, who rebuilds it: it is not an
//!   error, and never a wrong kernel.
//! - A cubin is code that will run with the user's data: folders that are made here are the user's own (mode 0700, files 0600), and one that is there is
//!   taken as it is, if nobody but this user and root can write it ([`crate::trust`]), sticky or not: others could put their entries beside ours. Its
//!   mode is never changed. An entry that others could have written counts as damaged.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use verdigris_kir::ptx::Isa;

use crate::jit::CompileOptions;
use crate::trust;

/// First bytes of an entry; the number changes with the layout.
const MAGIC: &[u8; 8] = b"VDGRIS02";
/// Magic, key hash, payload length, payload hash.
const HEADER_BYTES: usize = 8 + 32 + 8 + 32;
/// The folder under the root where entries are written before they are renamed.
const PENDING: &str = "pending";
/// Age from which a pending file counts as left behind.
const LEFT_BEHIND: Duration = Duration::from_secs(60 * 60);

/// Why the disk cache cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the kernel cache at {}: cannot {doing}: {source}; choose another folder or go without one", path.display())]
pub struct CacheError {
    /// The file or folder.
    pub path: PathBuf,
    /// What was being done.
    pub doing: &'static str,
    /// Why it failed.
    pub source: io::Error,
}

/// Everything that decides what a compiled kernel's bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CacheKey {
    /// Hash of the sources that build and print kernels: another revision may print another kernel under the same spec.
    pub source_hash: [u8; 32],
    /// The kernel's spec, by its full name.
    pub spec: String,
    /// The architecture it is compiled for, `sm_90a` for one, with all of the device's data that the builder may look at.
    pub arch: String,
    /// The driver whose compiler makes it (1000 × major + 10 × minor).
    pub driver_version: u32,
    /// The driver's release, of which one CUDA version has many: a mend of the compiler changes this alone. Empty where nothing tells it.
    pub driver_release: String,
    /// The PTX version it is printed in.
    pub ptx_isa: Isa,
    /// How it is compiled.
    pub options: CompileOptions,
}

impl CacheKey {
    /// The key's hash: the entry's name.
    pub fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("verdigris-cuda kernel cache key 2");
        hasher.update(&self.source_hash);
        // Lengths first, so that no two keys run together into the same bytes.
        for text in [&self.spec, &self.arch] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        let CompileOptions { optimization_level, line_info } = self.options;
        for number in [self.driver_version, self.ptx_isa.major, self.ptx_isa.minor, optimization_level, line_info.into()] {
            hasher.update(&number.to_le_bytes());
        }
        // Last, so that none is a value of its own.
        hasher.update(self.driver_release.as_bytes());
        *hasher.finalize().as_bytes()
    }
}

/// What a look into the cache gives.
#[derive(Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The entry, whole and unchanged.
    Hit(Vec<u8>),
    /// There is none.
    Missing,
    /// There is one that cannot be used, and will be replaced by the next [`DiskCache::store`].
    Damaged(DamagedEntry),
}

/// An entry that was found damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedEntry {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
}

/// A folder of compiled kernels; any number of threads and processes may use the same one.
#[derive(Debug, Clone)]
pub struct DiskCache {
    root: PathBuf,
}

impl DiskCache {
    /// Opens the cache in `root`, making the folder where it is not there, and sweeps what killed writers left.
    ///
    /// # Errors
    /// [`CacheError`] where the folder cannot be made or written, or others can write it.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, CacheError> {
        let cache = Self { root: root.into() };
        let pending = cache.pending();
        // Judged before anything is written into it.
        if cache.root.exists() {
            trust::judge_folder(&cache.root).map_err(error(&cache.root, "trust the folder"))?;
        }
        create_private_folder(&pending).map_err(error(&pending, "make the folder"))?;
        for folder in [&cache.root, &pending] {
            trust::judge_folder(folder).map_err(error(folder, "trust the folder"))?;
        }
        tempfile::Builder::new().prefix("probe-").tempfile_in(&pending).map_err(error(&pending, "write to the folder"))?;
        cache.sweep(SystemTime::now());
        Ok(cache)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The file that the key's entry is or will be in.
    pub fn path(&self, key: &CacheKey) -> PathBuf {
        let hex = blake3::Hash::from(key.digest()).to_hex();
        self.root.join(&hex[..2]).join(format!("{hex}.cubin"))
    }

    /// Looks for the key's entry. A file that cannot be read, or that others could have written, counts as damaged.
    pub fn load(&self, key: &CacheKey) -> Lookup {
        let path = self.path(key);
        let mut bytes = Vec::new();
        match trust::open(&path).and_then(|mut file| file.read_to_end(&mut bytes)) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Lookup::Missing,
            Err(error) => return Lookup::Damaged(DamagedEntry { path, why: error.to_string() }),
        }
        match payload(&bytes, &key.digest()) {
            Ok(()) => {
                bytes.drain(..HEADER_BYTES);
                Lookup::Hit(bytes)
            }
            Err(why) => Lookup::Damaged(DamagedEntry { path, why }),
        }
    }

    /// Writes the key's entry in place of whatever stands there.
    ///
    /// # Errors
    /// [`CacheError`], a full disk for one; the cache is as it was.
    pub fn store(&self, key: &CacheKey, cubin: &[u8]) -> Result<(), CacheError> {
        let path = self.path(key);
        let (folder, pending) = (path.parent().unwrap_or(&self.root), self.pending());
        create_private_folder(folder).map_err(error(folder, "make the folder"))?;
        let mut file = tempfile::Builder::new().prefix("entry-").tempfile_in(&pending).map_err(error(&pending, "make a file"))?;
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&key.digest());
        header.extend_from_slice(&(cubin.len() as u64).to_le_bytes());
        header.extend_from_slice(blake3::hash(cubin).as_bytes());
        file.write_all(&header)
            .and_then(|()| file.write_all(cubin))
            // Not flushed to the disk: what a crash of the machine cuts off is found by its hash and rebuilt.
            .map_err(error(file.path(), "write an entry"))?;
        file.persist(&path).map_err(|failed| error(&path, "put an entry in place")(failed.error))?;
        Ok(())
    }

    fn pending(&self) -> PathBuf {
        self.root.join(PENDING)
    }

    /// Removes pending files that nobody can still be writing. Failure is no matter: they are swept the next time.
    fn sweep(&self, now: SystemTime) {
        let Ok(files) = fs::read_dir(self.pending()) else { return };
        for file in files.flatten() {
            let age = file.metadata().and_then(|data| data.modified()).ok().and_then(|time| now.duration_since(time).ok());
            if age.is_some_and(|age| age > LEFT_BEHIND) {
                let _ = fs::remove_file(file.path());
            }
        }
    }
}

/// Checks an entry's header against the key and the payload that follows it.
fn payload(bytes: &[u8], key: &[u8; 32]) -> Result<(), String> {
    if bytes.len() < HEADER_BYTES {
        return Err(format!("it has {} bytes, its header alone {HEADER_BYTES}", bytes.len()));
    }
    let (header, payload) = bytes.split_at(HEADER_BYTES);
    if &header[..8] != MAGIC {
        return Err("it does not begin as an entry of this layout".to_owned());
    }
    if &header[8..40] != key {
        return Err("it was written for another key".to_owned());
    }
    let mut length = [0; 8];
    length.copy_from_slice(&header[40..48]);
    let length = u64::from_le_bytes(length);
    if length != payload.len() as u64 {
        return Err(format!("it holds {} bytes of the {length} that its header names", payload.len()));
    }
    if blake3::hash(payload).as_bytes() != &header[48..] {
        return Err("its content does not match its hash".to_owned());
    }
    Ok(())
}

/// Names the file and the deed in an error.
fn error(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> CacheError + use<> {
    let path = path.to_owned();
    move |source| CacheError { path, doing, source }
}

#[cfg(unix)]
fn create_private_folder(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(not(unix))]
fn create_private_folder(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(spec: &str) -> CacheKey {
        CacheKey {
            source_hash: [7; 32],
            spec: spec.to_owned(),
            arch: "sm_90a".to_owned(),
            driver_version: 13_000,
            driver_release: "580.159.04".to_owned(),
            ptx_isa: Isa::V9_0,
            options: CompileOptions::default(),
        }
    }

    fn cache() -> (tempfile::TempDir, DiskCache) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = DiskCache::open(folder.path().join("cache")).expect("opens");
        (folder, cache)
    }

    fn damage(cache: &DiskCache, key: &CacheKey) -> String {
        match cache.load(key) {
            Lookup::Damaged(entry) => entry.why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_stored_is_loaded() {
        let (_folder, cache) = cache();
        for length in [0, 1, 31, 4096, 100_000] {
            let (key, cubin) = (key(&format!("k{length}")), vec![length as u8; length]);
            assert_eq!(cache.load(&key), Lookup::Missing);
            cache.store(&key, &cubin).expect("stores");
            assert_eq!(cache.load(&key), Lookup::Hit(cubin));
        }
    }

    #[test]
    fn every_field_is_in_the_key() {
        let base = key("k");
        let others = [
            CacheKey { source_hash: [8; 32], ..base.clone() },
            CacheKey { spec: "l".to_owned(), ..base.clone() },
            CacheKey { arch: "sm_80".to_owned(), ..base.clone() },
            CacheKey { driver_version: 12_090, ..base.clone() },
            CacheKey { driver_release: "580.159.05".to_owned(), ..base.clone() },
            CacheKey { driver_release: String::new(), ..base.clone() },
            CacheKey { ptx_isa: Isa::MINIMUM, ..base.clone() },
            CacheKey { ptx_isa: Isa::new(9, 1), ..base.clone() },
            CacheKey { options: CompileOptions { optimization_level: 3, ..base.options }, ..base.clone() },
            CacheKey { options: CompileOptions { line_info: false, ..base.options }, ..base.clone() },
            // The same text, cut elsewhere.
            CacheKey { spec: "ks".to_owned(), arch: "m_90a".to_owned(), ..base.clone() },
        ];
        for other in others {
            assert_ne!(base.digest(), other.digest(), "{other:?}");
        }
    }

    #[test]
    fn any_damaged_byte_is_found_and_rebuilt() {
        let (_folder, cache) = cache();
        let key = key("k");
        cache.store(&key, b"a cubin").expect("stores");
        let whole = fs::read(cache.path(&key)).expect("is there");
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            fs::write(cache.path(&key), &bytes).expect("writes");
            damage(&cache, &key);
        }
        for length in 0..whole.len() {
            fs::write(cache.path(&key), &whole[..length]).expect("writes");
            damage(&cache, &key);
        }
        fs::write(cache.path(&key), [&whole[..], b"x"].concat()).expect("writes");
        assert!(damage(&cache, &key).contains("holds 8 bytes of the 7"));
        cache.store(&key, b"a cubin").expect("stores over it");
        assert_eq!(cache.load(&key), Lookup::Hit(b"a cubin".to_vec()));
    }

    #[test]
    fn an_entry_moved_to_another_key_is_damaged() {
        let (_folder, cache) = cache();
        let (one, other) = (key("one"), key("other"));
        cache.store(&one, b"one").expect("stores");
        cache.store(&other, b"other").expect("stores");
        fs::copy(cache.path(&one), cache.path(&other)).expect("copies");
        assert!(damage(&cache, &other).contains("another key"));
    }

    #[test]
    fn what_a_killed_writer_left_is_swept_and_never_read() {
        let (_folder, cache) = cache();
        let pending = cache.pending();
        let (old, new) = (pending.join("entry-old"), pending.join("entry-new"));
        fs::write(&old, b"half").expect("writes");
        fs::write(&new, b"half").expect("writes");
        let two_hours_ago = SystemTime::now() - Duration::from_secs(2 * 60 * 60);
        fs::File::options().write(true).open(&old).and_then(|file| file.set_modified(two_hours_ago)).expect("ages");
        let cache = DiskCache::open(cache.root()).expect("opens again");
        assert!(!old.exists(), "a file of two hours ago is nobody's");
        assert!(new.exists(), "a fresh one may be somebody's");
        assert_eq!(cache.load(&key("k")), Lookup::Missing);
    }

    #[cfg(unix)]
    #[test]
    fn what_is_made_is_private_and_what_is_there_keeps_its_mode() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = folder.path().join("deep/cache");
        let mode = |path: &Path| fs::metadata(path).expect("is there").permissions().mode() & 0o7777;
        let cache = DiskCache::open(&root).expect("opens");
        let key = key("k");
        cache.store(&key, b"x").expect("stores");
        let path = cache.path(&key);
        let shard = path.parent().expect("has a folder").to_owned();
        for (place, wanted) in [(&root, 0o700), (&shard, 0o700), (&cache.pending(), 0o700), (&path, 0o600)] {
            assert_eq!(mode(place), wanted, "{}", place.display());
        }
        // What others may read is no matter; what they may write is not taken, and stays as it was: the folder of a system above all.
        for (wanted, is_taken) in [(0o755, true), (0o750, true), (0o1777, false), (0o777, false), (0o702, false)] {
            fs::set_permissions(&root, fs::Permissions::from_mode(wanted)).expect("ours");
            let opened = DiskCache::open(&root);
            assert_eq!((opened.is_ok(), mode(&root)), (is_taken, wanted), "{opened:?}");
            if let Err(error) = opened {
                let distrust = trust::Distrust::of(&error.source).expect("that is why");
                assert_eq!(distrust.mode, wanted);
                // A folder for all is not taken away from them.
                assert_eq!(distrust.mend().contains("chmod"), wanted != 0o1777, "{error}");
            }
        }
        fs::set_permissions(&root, fs::Permissions::from_mode(0o700)).expect("ours");
        // Nothing is made in a folder that is not trusted.
        let empty = folder.path().join("empty");
        fs::create_dir(&empty).expect("makes");
        fs::set_permissions(&empty, fs::Permissions::from_mode(0o777)).expect("ours");
        DiskCache::open(&empty).expect_err("anybody can write it");
        assert_eq!(fs::read_dir(&empty).expect("is there").count(), 0);
        // Entries that others could have written.
        assert_eq!(cache.load(&key), Lookup::Hit(b"x".to_vec()));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("ours");
        assert!(damage(&cache, &key).contains("is not trusted"));
        cache.store(&key, b"x").expect("stores in its place");
        assert_eq!(cache.load(&key), Lookup::Hit(b"x".to_vec()));
        // Only root can give files away.
        if chown(&path, Some(65_534), None).is_ok() {
            assert!(damage(&cache, &key).contains("belongs to user 65534"));
            chown(&root, Some(65_534), None).expect("as before");
            DiskCache::open(&root).expect_err("somebody else's");
            assert_eq!(mode(&root), 0o700);
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_a_typed_error() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("file");
        fs::write(&file, b"").expect("writes");
        let error = DiskCache::open(file.join("cache")).expect_err("a file is no folder");
        assert!(error.to_string().contains("choose another folder"), "{error}");
    }

    #[test]
    fn threads_write_and_read_the_same_entries() {
        let (_folder, cache) = cache();
        std::thread::scope(|scope| {
            for thread in 0..8_u32 {
                let cache = &cache;
                scope.spawn(move || {
                    for round in 0..50_u32 {
                        let number = (thread + round) % 5;
                        let (key, cubin) = (key(&format!("k{number}")), vec![number as u8; 3000]);
                        match cache.load(&key) {
                            Lookup::Hit(bytes) => assert_eq!(bytes, cubin),
                            Lookup::Missing => {}
                            Lookup::Damaged(entry) => panic!("{entry:?}"),
                        }
                        cache.store(&key, &cubin).expect("stores");
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(cache.pending()).expect("is there").count(), 0, "nothing is left pending");
    }
}
