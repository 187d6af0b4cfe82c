//! Packs: the kernels of an engine catalog, assembled beforehand for one architecture, in one file.
//!
//! - Opening reads the head and the index alone; a kernel is read, checked and unpacked when it is asked for, in well under a
//!   millisecond for a cubin of common size.
//! - A pack serves exactly one revision of the sources, one architecture and one PTX version: all of them are in its head and in each
//!   kernel's key, so that a stale kernel cannot be served. A pack of other sources is refused as a whole.
//! - Head, index and every kernel carry a hash. A pack that is damaged is an error value, never a wrong kernel; whoever asked goes on to
//!   the next source.
//!
//! Layout, all numbers little-endian: the head ([`HEAD_BYTES`]: magic, layout, PTX version, least driver version, source hash,
//! architecture as text, number of kernels, hash of head and index), the index ([`ROW_BYTES`] a kernel: key, place, packed and
//! unpacked size, hash of the packed bytes; in order of key), and the kernels, each an [`Entry`] packed with DEFLATE.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use verdigris_kir::ptx::Isa;

use crate::cache::CacheKey;
use crate::device::DeviceProperties;
use crate::entry::Entry;
use crate::jit::CompileOptions;
use crate::trust::{self, Distrust};

const MAGIC: &[u8; 8] = b"VDGRPACK";
/// Changes with the layout.
const LAYOUT: u32 = 1;
const ARCH_BYTES: usize = 16;
/// The head up to its hash.
const HASHED_HEAD_BYTES: usize = 8 + 4 + 4 + 4 + 4 + 32 + ARCH_BYTES + 4;
const HEAD_BYTES: usize = HASHED_HEAD_BYTES + 32;
const ROW_BYTES: usize = 32 + 8 + 4 + 4 + 32;
/// More than any catalog has; keeps a damaged count from asking for memory.
const MOST_KERNELS: u32 = 1 << 16;
/// More than any kernel has, unpacked.
const MOST_ENTRY_BYTES: u32 = 64 << 20;
/// Level of DEFLATE: packs are written once and read often.
const LEVEL: u8 = 9;

/// What a pack is made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackHead {
    /// Hash of the sources that build and print kernels; see [`CacheKey::source_hash`].
    pub source_hash: [u8; 32],
    /// The architecture, as the assembler names it: `sm_90a` for one.
    pub arch: String,
    /// The PTX version that the kernels were printed in.
    pub ptx_isa: Isa,
    /// The oldest driver that loads what the assembler made (1000 × major + 10 × minor): that of its own release, for a driver need
    /// not read a newer one's cubins.
    pub least_driver_version: u32,
}

/// Why a pack, or a kernel in it, cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The file cannot be read.
    #[error("the kernel pack {} cannot be read: {source}; name another, or go without one", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others can write the file, and with it what runs on the GPU.
    #[error("the kernel pack {0}")]
    Distrusted(Distrust),
    /// The file is no pack, or not as it was written.
    #[error("the kernel pack {} is damaged: {why}; make it anew with `cargo xtask pack`", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The pack is for another architecture than the device's.
    #[error("the kernel pack {} is for {found}, the device ({device}) runs {}; name the device's pack", path.display(), runs.join(" or "))]
    Arch {
        /// The file.
        path: PathBuf,
        /// The pack's architecture.
        found: String,
        /// The device.
        device: String,
        /// Architectures that the device runs.
        runs: Vec<String>,
    },
    /// The driver is older than the assembler that made the pack.
    #[error(
        "the kernel pack {} needs a driver of CUDA {}.{}, this one is of {}.{}; update the display driver, or go without a pack",
        path.display(), required / 1000, required % 1000 / 10, found / 1000, found % 1000 / 10
    )]
    Driver {
        /// The file.
        path: PathBuf,
        /// The driver's version.
        found: u32,
        /// The version needed.
        required: u32,
    },
    /// The pack was made from other sources than this program.
    #[error(
        "the kernel pack {} was made from other sources ({}… where this program has {}…); make it anew with `cargo xtask pack`",
        path.display(), hex(found), hex(expected)
    )]
    Sources {
        /// The file.
        path: PathBuf,
        /// The pack's source hash.
        found: [u8; 32],
        /// The program's.
        expected: [u8; 32],
    },
    /// The driver could not load a kernel of the pack.
    #[error("a kernel of the pack {} cannot be loaded: {why}", path.display())]
    Unloadable {
        /// The file.
        path: PathBuf,
        /// What the driver said.
        why: String,
    },
    /// A pack that cannot be written.
    #[error("no pack can be made: {why}")]
    Unwritable {
        /// What is in the way.
        why: String,
    },
}

/// The first bytes of a hash, enough to tell two apart.
fn hex(hash: &[u8; 32]) -> String {
    hash[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where a pack's kernels are, by key.
type Index = BTreeMap<[u8; 32], Row>;

/// A kernel's place in a pack.
#[derive(Debug, Clone)]
struct Row {
    offset: u64,
    packed_bytes: u32,
    entry_bytes: u32,
    hash: [u8; 32],
}

/// An open pack. Any number of threads may ask it.
#[derive(Debug)]
pub struct Pack {
    path: PathBuf,
    head: PackHead,
    rows: Index,
    file: Mutex<File>,
}

impl Pack {
    /// Opens a pack and checks its head and index.
    ///
    /// # Errors
    /// [`PackError::Io`], [`PackError::Distrusted`], [`PackError::Damaged`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, PackError> {
        let path = path.into();
        let (head, rows, file) = match read_index(&path) {
            Ok(read) => read,
            Err(Trouble::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(PackError::Damaged { path, why: "it ends within its index".to_owned() });
            }
            Err(Trouble::Io(source)) => {
                return Err(match Distrust::of(&source) {
                    Some(distrust) => PackError::Distrusted(distrust.clone()),
                    None => PackError::Io { path, source },
                });
            }
            Err(Trouble::Damage(why)) => return Err(PackError::Damaged { path, why }),
        };
        Ok(Self { path, head, rows, file: Mutex::new(file) })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is made for.
    pub fn head(&self) -> &PackHead {
        &self.head
    }

    /// The number of kernels.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether it has no kernel.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Checks that the device and its driver load such kernels.
    ///
    /// # Errors
    /// [`PackError::Arch`], [`PackError::Driver`].
    pub fn check_device(&self, device: &DeviceProperties) -> Result<(), PackError> {
        let runs = architectures(device.compute_capability);
        let path = || self.path.clone();
        if !runs.contains(&self.head.arch) {
            return Err(PackError::Arch { path: path(), found: self.head.arch.clone(), device: device.name.clone(), runs });
        }
        let (found, required) = (device.driver_version, self.head.least_driver_version);
        if found < required {
            return Err(PackError::Driver { path: path(), found, required });
        }
        Ok(())
    }

    /// Whether the pack has the kernel of that key, whatever driver the key names.
    pub fn has(&self, key: &CacheKey) -> bool {
        let fits = self.head.source_hash == key.source_hash && self.head.ptx_isa == key.ptx_isa;
        fits && self.rows.contains_key(&kernel_key(&self.head, &key.spec, key.options))
    }

    /// The kernel of that key, whatever driver the key names; `None` where the pack has none.
    ///
    /// # Errors
    /// [`PackError::Sources`], [`PackError::Io`], [`PackError::Damaged`].
    pub fn load(&self, key: &CacheKey) -> Result<Option<Entry>, PackError> {
        let path = || self.path.clone();
        let (found, expected) = (self.head.source_hash, key.source_hash);
        if found != expected {
            return Err(PackError::Sources { path: path(), found, expected });
        }
        // A kernel printed in another PTX version would be another text.
        if key.ptx_isa != self.head.ptx_isa {
            return Ok(None);
        }
        let Some(row) = self.rows.get(&kernel_key(&self.head, &key.spec, key.options)) else { return Ok(None) };
        let mut packed = vec![0; row.packed_bytes as usize];
        {
            let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
            file.seek(SeekFrom::Start(row.offset))
                .and_then(|_| file.read_exact(&mut packed))
                .map_err(|source| PackError::Io { path: path(), source })?;
        }
        let damaged = |why: String| PackError::Damaged { path: path(), why: format!("`{}`: {why}", key.spec) };
        if blake3::hash(&packed).as_bytes() != &row.hash {
            return Err(damaged("its content does not match its hash".to_owned()));
        }
        let entry = miniz_oxide::inflate::decompress_to_vec_with_limit(&packed, row.entry_bytes as usize)
            .map_err(|error| damaged(format!("it cannot be unpacked ({error})")))?;
        Entry::from_bytes(&entry).map(Some).map_err(damaged)
    }

    /// A whole pack of these kernels, by spec, as the bytes of a file.
    ///
    /// # Errors
    /// [`PackError::Unwritable`] where two kernels have one spec or something exceeds what the layout holds.
    pub fn to_bytes(head: &PackHead, options: CompileOptions, kernels: &[(String, Entry)]) -> Result<Vec<u8>, PackError> {
        let unwritable = |why: String| PackError::Unwritable { why };
        if head.arch.len() > ARCH_BYTES || head.arch.contains('\0') {
            return Err(unwritable(format!("the architecture's name `{}` has more than {ARCH_BYTES} bytes or a NUL", head.arch)));
        }
        let count = u32::try_from(kernels.len()).ok().filter(|count| *count <= MOST_KERNELS);
        let count = count.ok_or_else(|| unwritable(format!("{} kernels, the most are {MOST_KERNELS}", kernels.len())))?;
        let mut packed = BTreeMap::new();
        for (spec, entry) in kernels {
            let bytes = entry.to_bytes();
            let size = u32::try_from(bytes.len()).ok().filter(|size| *size <= MOST_ENTRY_BYTES);
            let size = size.ok_or_else(|| unwritable(format!("`{spec}` has {} bytes, the most are {MOST_ENTRY_BYTES}", bytes.len())))?;
            let content = (size, miniz_oxide::deflate::compress_to_vec(&bytes, LEVEL));
            if packed.insert(kernel_key(head, spec, options), content).is_some() {
                return Err(unwritable(format!("two kernels are called `{spec}`")));
            }
        }
        let mut bytes = Vec::new();
        bytes.extend_from_slice(MAGIC);
        for number in [LAYOUT, head.ptx_isa.major, head.ptx_isa.minor, head.least_driver_version] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&head.source_hash);
        let mut arch = [0; ARCH_BYTES];
        arch[..head.arch.len()].copy_from_slice(head.arch.as_bytes());
        bytes.extend_from_slice(&arch);
        bytes.extend_from_slice(&count.to_le_bytes());
        let mut index = Vec::new();
        let mut offset = (HEAD_BYTES + ROW_BYTES * packed.len()) as u64;
        for (key, (size, content)) in &packed {
            index.extend_from_slice(key);
            index.extend_from_slice(&offset.to_le_bytes());
            // Packed bytes of what has at most `MOST_ENTRY_BYTES` fit.
            index.extend_from_slice(&(content.len() as u32).to_le_bytes());
            index.extend_from_slice(&size.to_le_bytes());
            index.extend_from_slice(blake3::hash(content).as_bytes());
            offset += content.len() as u64;
        }
        let hash = index_hash(&bytes, &index);
        bytes.extend_from_slice(&hash);
        bytes.extend(index);
        for (_, content) in packed.values() {
            bytes.extend_from_slice(content);
        }
        Ok(bytes)
    }
}

/// A kernel's key in a pack: all of [`CacheKey`] but the driver, and the architecture in place of the device, since what a pack holds
/// is a pure function of spec and architecture.
fn kernel_key(head: &PackHead, spec: &str, options: CompileOptions) -> [u8; 32] {
    CacheKey {
        source_hash: head.source_hash,
        spec: spec.to_owned(),
        arch: format!("pack {}", head.arch),
        driver_version: 0,
        ptx_isa: head.ptx_isa,
        options,
    }
    .digest()
}

fn index_hash(head: &[u8], index: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("verdigris-cuda pack index 1");
    hasher.update(head).update(index);
    *hasher.finalize().as_bytes()
}

/// Architectures whose machine code runs on chips of that compute capability: its own, with and without the features that only
/// this chip has, and older ones of its generation.
fn architectures((major, minor): (u32, u32)) -> Vec<String> {
    let own = (major >= 9).then(|| format!("sm_{major}{minor}a"));
    own.into_iter().chain((0..=minor).rev().map(|minor| format!("sm_{major}{minor}"))).collect()
}

enum Trouble {
    Io(io::Error),
    Damage(String),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn read_index(path: &Path) -> Result<(PackHead, Index, File), Trouble> {
    let damage = |why: &str| Trouble::Damage(why.to_owned());
    let mut file = trust::open(path)?;
    let file_bytes = file.metadata()?.len();
    let mut head = [0; HEAD_BYTES];
    file.read_exact(&mut head)?;
    let (hashed, hash) = head.split_at(HASHED_HEAD_BYTES);
    let mut fields = Fields(hashed);
    if &fields.take::<8>() != MAGIC {
        return Err(damage("it does not begin as a pack"));
    }
    let layout = fields.number();
    if layout != LAYOUT {
        return Err(Trouble::Damage(format!("it is of layout {layout}, this program reads {LAYOUT}")));
    }
    let ptx_isa = Isa::new(fields.number(), fields.number());
    let least_driver_version = fields.number();
    let source_hash = fields.take();
    let arch = fields.take::<ARCH_BYTES>();
    let count = fields.number();
    if count > MOST_KERNELS {
        return Err(damage("it names more kernels than any pack has"));
    }
    let mut index = vec![0; ROW_BYTES * count as usize];
    file.read_exact(&mut index)?;
    if index_hash(hashed, &index) != *hash {
        return Err(damage("its head and index do not match their hash"));
    }
    let arch = String::from_utf8_lossy(&arch).trim_end_matches('\0').to_owned();
    let mut rows = Index::new();
    for row in index.chunks_exact(ROW_BYTES) {
        let mut fields = Fields(row);
        let key = fields.take();
        let offset = u64::from_le_bytes(fields.take());
        let row = Row { offset, packed_bytes: fields.number(), entry_bytes: fields.number(), hash: fields.take() };
        if offset.checked_add(row.packed_bytes.into()).is_none_or(|end| end > file_bytes) {
            return Err(damage("it is cut off"));
        }
        rows.insert(key, row);
    }
    Ok((PackHead { source_hash, arch, ptx_isa, least_driver_version }, rows, file))
}

/// Fields one after another, from bytes that are long enough for all of them.
struct Fields<'b>(&'b [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_at(N);
        self.0 = rest;
        let mut bytes = [0; N];
        bytes.copy_from_slice(field);
        bytes
    }

    fn number(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Code;
    use crate::facts::KernelFacts;

    fn head() -> PackHead {
        PackHead { source_hash: [7; 32], arch: "sm_90a".to_owned(), ptx_isa: Isa::V9_0, least_driver_version: 13_000 }
    }

    fn key(spec: &str) -> CacheKey {
        CacheKey {
            source_hash: [7; 32],
            spec: spec.to_owned(),
            arch: "cc 9.0, 132 SMs".to_owned(),
            driver_version: 13_020,
            ptx_isa: Isa::V9_0,
            options: CompileOptions::default(),
        }
    }

    fn kernels() -> Vec<(String, Entry)> {
        let entry = |number: u32| {
            let facts = KernelFacts { threads: 32 * number, cluster: 1, shared_bytes: number, parameters: vec![], parameter_bytes: 0 };
            let cubin = (0..100 * number).flat_map(|i| (i / 7 * number).to_le_bytes()).collect();
            Entry { facts, findings: Some(vec![]), code: Code::Cubin(cubin) }
        };
        (1..20).map(|number| (format!("k{number}"), entry(number))).collect()
    }

    fn written() -> (tempfile::TempDir, PathBuf, Vec<u8>) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("sm_90a.pack");
        let bytes = Pack::to_bytes(&head(), CompileOptions::default(), &kernels()).expect("can be written");
        std::fs::write(&path, &bytes).expect("writes");
        (folder, path, bytes)
    }

    #[test]
    fn every_kernel_comes_back_for_every_driver() {
        let (_folder, path, bytes) = written();
        let pack = Pack::open(&path).expect("opens");
        assert_eq!((pack.head(), pack.len()), (&head(), 19));
        for (spec, entry) in kernels() {
            for driver_version in [13_000, 13_020] {
                let key = CacheKey { driver_version, ..key(&spec) };
                assert_eq!(pack.load(&key).expect("reads"), Some(entry.clone()), "{spec}");
            }
        }
        assert_eq!(pack.load(&key("k20")).expect("reads"), None);
        let unpacked: usize = kernels().iter().map(|(_, entry)| entry.to_bytes().len()).sum();
        assert!(bytes.len() < unpacked, "{} of {unpacked} bytes", bytes.len());
    }

    #[test]
    fn another_revision_is_refused_and_other_keys_are_not_served() {
        let (_folder, path, _) = written();
        let pack = Pack::open(&path).expect("opens");
        let error = pack.load(&CacheKey { source_hash: [8; 32], ..key("k1") }).expect_err("stale");
        assert!(matches!(error, PackError::Sources { .. }), "{error}");
        assert!(error.to_string().contains("070707070707… where this program has 080808080808…"), "{error}");
        let others = [
            CacheKey { ptx_isa: Isa::MINIMUM, ..key("k1") },
            CacheKey { options: CompileOptions { optimization_level: 3, ..CompileOptions::default() }, ..key("k1") },
            CacheKey { options: CompileOptions { line_info: false, ..CompileOptions::default() }, ..key("k1") },
        ];
        for other in others {
            assert_eq!(pack.load(&other).expect("reads"), None, "{other:?}");
        }
    }

    #[test]
    fn packs_of_other_chips_and_newer_assemblers_are_refused() {
        let (_folder, path, _) = written();
        let pack = Pack::open(&path).expect("opens");
        let (context, ..) = crate::fake::gpu();
        let h200 = context.properties();
        pack.check_device(h200).expect("is the fake's architecture");
        let ada = DeviceProperties { compute_capability: (8, 9), ..h200.clone() };
        let error = pack.check_device(&ada).expect_err("another chip");
        let PackError::Arch { found, runs, .. } = &error else { panic!("{error:?}") };
        assert_eq!((found.as_str(), runs.contains(&"sm_80".to_owned()), runs.contains(&"sm_90".to_owned())), ("sm_90a", true, false));
        let error = pack.check_device(&DeviceProperties { driver_version: 12_090, ..h200.clone() }).expect_err("an older driver");
        assert!(matches!(error, PackError::Driver { found: 12_090, required: 13_000, .. }), "{error}");
        assert_eq!(architectures((9, 0)), ["sm_90a", "sm_90"]);
        assert_eq!(architectures((8, 6))[..2], ["sm_86", "sm_85"]);
        assert!(!architectures((10, 0)).contains(&"sm_90".to_owned()), "machine code does not cross generations");
    }

    #[test]
    fn any_damaged_byte_is_found() {
        let (_folder, path, whole) = written();
        let loads = |bytes: &[u8]| -> Result<(), PackError> {
            std::fs::write(&path, bytes).expect("writes");
            let pack = Pack::open(&path)?;
            for (spec, entry) in kernels() {
                assert_eq!(pack.load(&key(&spec))?, Some(entry));
            }
            Ok(())
        };
        loads(&whole).expect("is whole");
        // All of the head, then a sample of index and kernels.
        for at in (0..HEAD_BYTES).chain((HEAD_BYTES..whole.len()).step_by(13)) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x40;
            let error = loads(&bytes).expect_err(&format!("byte {at}"));
            assert!(matches!(error, PackError::Damaged { .. }), "byte {at}: {error}");
        }
        for length in (0..whole.len()).step_by(97).chain([HEAD_BYTES, whole.len() - 1]) {
            let error = loads(&whole[..length]).expect_err(&format!("cut at {length}"));
            assert!(matches!(error, PackError::Damaged { .. }), "cut at {length}: {error}");
        }
        std::fs::remove_file(&path).expect("removes");
        assert!(matches!(Pack::open(&path), Err(PackError::Io { .. })));
    }

    #[test]
    fn what_the_layout_cannot_hold_is_not_written() {
        let write = |head: &PackHead, kernels: &[(String, Entry)]| Pack::to_bytes(head, CompileOptions::default(), kernels);
        let twice = [kernels()[0].clone(), kernels()[0].clone()];
        assert!(write(&head(), &twice).expect_err("one spec").to_string().contains("two kernels are called `k1`"));
        let long = PackHead { arch: "sm_".repeat(6), ..head() };
        assert!(write(&long, &[]).expect_err("a long name").to_string().contains("16 bytes"));
    }
}
