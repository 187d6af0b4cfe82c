//! Packs: the kernels of an engine catalog, assembled beforehand for one architecture, in one file.
//!
//! - Kernels of one family are alike, so neighbours by spec are compressed together: half the size of each by itself. Opening reads head,
//!   index and table alone; a block is read, checked and unpacked when a kernel of it is asked for, and the last one stays unpacked, for
//!   a network asks for neighbours. Of a whole catalog (4,300 cubins without zeros, 136 blocks of 0.9 MB on average) unpacking a block
//!   took 3.5 ms of one core of a Xeon. An open pack holds at most [`BLOCK_BYTES`] of kernels, or one larger kernel.
//! - A pack serves exactly one revision of the sources, one architecture and one PTX version: all of them are in its head and in each
//!   kernel's key, so that a stale kernel cannot be served. A pack of other sources is refused as a whole.
//! - Head, index, table and every block carry a hash. A pack that is damaged is an error value, never a wrong kernel; whoever asked goes on to
//!   the next source.
//!
//! Layout, all numbers little-endian: the head ([`HEAD_BYTES`]: magic, layout, PTX version, least driver version, source hash,
//! architecture as text, numbers of kernels and of blocks, hash of head, index and table), the index ([`ROW_BYTES`] a kernel: key, block,
//! place in the unpacked block, bytes there; in order of key), the table of blocks ([`BLOCK_ROW_BYTES`] each: place in the file, packed and
//! unpacked size, hash of the packed bytes), and the blocks: each one Zstandard frame of up to [`BLOCK_KERNELS`] kernels, which are
//! [`Entry`]s in order of spec without their long runs of zeros, which are most of a cubin whose texts were blanked: unpacking costs by
//! the byte. In place of a run stand its length and that of what follows it, four bytes each.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ruzstd::decoding::FrameDecoder;
use ruzstd::encoding::CompressionLevel;
use verdigris_kir::ptx::Isa;

use crate::cache::CacheKey;
use crate::device::DeviceProperties;
use crate::entry::Entry;
use crate::jit::CompileOptions;
use crate::trust::{self, Distrust};

const MAGIC: &[u8; 8] = b"VDGRPACK";
/// Changes with the layout.
const LAYOUT: u32 = 2;
const ARCH_BYTES: usize = 16;
/// The head up to its hash.
const HASHED_HEAD_BYTES: usize = 8 + 4 * 4 + 32 + ARCH_BYTES + 4 + 4;
const HEAD_BYTES: usize = HASHED_HEAD_BYTES + 32;
const ROW_BYTES: usize = 32 + 4 + 4 + 4;
const BLOCK_ROW_BYTES: usize = 8 + 4 + 4 + 32;
/// More than any catalog has; keeps a damaged count from asking for memory.
const MOST_KERNELS: u32 = 1 << 16;
/// More than any kernel has.
const MOST_ENTRY_BYTES: u32 = 64 << 20;
/// More than any block has: one kernel, and the length before it.
const MOST_BLOCK_BYTES: u32 = MOST_ENTRY_BYTES + 8;
/// The shortest run of zeros that blocks leave out.
const RUN_BYTES: usize = 64;
/// Most kernels of a block: more pack denser and take longer to unpack.
const BLOCK_KERNELS: usize = 32;
/// A window that any frame may ask for; else no more than its block has.
const LEAST_WINDOW_BYTES: u32 = 1 << 20;
/// Most unpacked bytes of a block of several kernels.
const BLOCK_BYTES: usize = 4 << 20;

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
    block: u32,
    offset: u32,
    bytes: u32,
}

/// A block's place in the file.
#[derive(Debug)]
struct Block {
    offset: u64,
    packed_bytes: u32,
    bytes: u32,
    hash: [u8; 32],
}

/// The file, and the block that was unpacked last, by its number.
#[derive(Debug)]
struct Reader {
    file: File,
    kept: Option<(u32, Arc<[u8]>)>,
}

/// An open pack. Any number of threads may ask it.
#[derive(Debug)]
pub struct Pack {
    path: PathBuf,
    head: PackHead,
    rows: Index,
    blocks: Vec<Block>,
    reader: Mutex<Reader>,
}

impl Pack {
    /// Opens a pack and checks its head, index and table of blocks.
    ///
    /// # Errors
    /// [`PackError::Io`], [`PackError::Distrusted`], [`PackError::Damaged`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, PackError> {
        let path = path.into();
        let Opened { head, rows, blocks, file } = match read_index(&path) {
            Ok(read) => read,
            Err(Trouble::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(PackError::Damaged { path, why: "it ends within its index or its table of blocks".to_owned() });
            }
            Err(Trouble::Io(source)) => {
                return Err(match Distrust::of(&source) {
                    Some(distrust) => PackError::Distrusted(distrust.clone()),
                    None => PackError::Io { path, source },
                });
            }
            Err(Trouble::Damage(why)) => return Err(PackError::Damaged { path, why }),
        };
        Ok(Self { path, head, rows, blocks, reader: Mutex::new(Reader { file, kept: None }) })
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
        let block = self.block(row.block).map_err(|trouble| match trouble {
            Trouble::Io(source) => PackError::Io { path: path(), source },
            Trouble::Damage(why) => PackError::Damaged { path: path(), why: format!("the block of `{}`: {why}", key.spec) },
        })?;
        let damaged = |why: String| PackError::Damaged { path: path(), why: format!("`{}`: {why}", key.spec) };
        let place = row.offset as usize..row.offset as usize + row.bytes as usize;
        let entry = block.get(place).ok_or_else(|| damaged("it is not within its block".to_owned()))?;
        let entry = with_zeros(entry).map_err(damaged)?;
        Entry::from_bytes(&entry).map(Some).map_err(damaged)
    }

    /// An unpacked block. Who asks meanwhile waits: threads of one program want neighbours, which are then unpacked once.
    fn block(&self, number: u32) -> Result<Arc<[u8]>, Trouble> {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((kept, bytes)) = &reader.kept
            && *kept == number
        {
            return Ok(bytes.clone());
        }
        let block = self.blocks.get(number as usize).ok_or_else(|| Trouble::Damage("it is not there".to_owned()))?;
        let mut packed = vec![0; block.packed_bytes as usize];
        reader.file.seek(SeekFrom::Start(block.offset))?;
        reader.file.read_exact(&mut packed)?;
        if blake3::hash(&packed).as_bytes() != &block.hash {
            return Err(Trouble::Damage("its content does not match its hash".to_owned()));
        }
        // The place of the last one is free for this one.
        reader.kept = None;
        let bytes: Arc<[u8]> = unpack(&packed, block.bytes).map_err(Trouble::Damage)?.into();
        reader.kept = Some((number, bytes.clone()));
        Ok(bytes)
    }

    /// A whole pack of these kernels, by spec, as the bytes of a file. `compress` makes one Zstandard frame of a block:
    /// [`Pack::compress_quickly`], or a library that takes its time.
    ///
    /// # Errors
    /// [`PackError::Unwritable`] where two kernels have one spec, something exceeds what the layout holds, or a block is not compressed.
    pub fn to_bytes(
        head: &PackHead,
        options: CompileOptions,
        kernels: &[(String, Entry)],
        compress: impl Fn(&[u8]) -> io::Result<Vec<u8>>,
    ) -> Result<Vec<u8>, PackError> {
        let unwritable = |why: String| PackError::Unwritable { why };
        if head.arch.len() > ARCH_BYTES || head.arch.contains('\0') {
            return Err(unwritable(format!("the architecture's name `{}` has more than {ARCH_BYTES} bytes or a NUL", head.arch)));
        }
        let count = u32::try_from(kernels.len()).ok().filter(|count| *count <= MOST_KERNELS);
        let count = count.ok_or_else(|| unwritable(format!("{} kernels, the most are {MOST_KERNELS}", kernels.len())))?;
        let mut by_spec: Vec<&(String, Entry)> = kernels.iter().collect();
        by_spec.sort_by_key(|(spec, _)| spec);
        let mut index = Index::new();
        let mut blocks: Vec<(usize, Vec<u8>)> = Vec::new();
        for (spec, entry) in by_spec {
            let entry = entry.to_bytes();
            if entry.len() > MOST_ENTRY_BYTES as usize {
                return Err(unwritable(format!("`{spec}` has {} bytes, the most are {MOST_ENTRY_BYTES}", entry.len())));
            }
            let entry = without_zeros(&entry);
            let fits = |(kernels, block): &(usize, Vec<u8>)| *kernels < BLOCK_KERNELS && block.len() + entry.len() <= BLOCK_BYTES;
            if !blocks.last().is_some_and(fits) {
                blocks.push((0, Vec::new()));
            }
            // Numbers of 32 bits hold all of it: there are no more blocks than kernels, and no block is larger than the largest kernel.
            let number = blocks.len() as u32 - 1;
            if let Some((kernels, block)) = blocks.last_mut() {
                let row = Row { block: number, offset: block.len() as u32, bytes: entry.len() as u32 };
                if index.insert(kernel_key(head, spec, options), row).is_some() {
                    return Err(unwritable(format!("two kernels are called `{spec}`")));
                }
                *kernels += 1;
                block.extend(entry);
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
        for number in [count, blocks.len() as u32] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        let mut tables = Vec::new();
        for (key, row) in &index {
            tables.extend_from_slice(key);
            for number in [row.block, row.offset, row.bytes] {
                tables.extend_from_slice(&number.to_le_bytes());
            }
        }
        let mut offset = (HEAD_BYTES + ROW_BYTES * index.len() + BLOCK_ROW_BYTES * blocks.len()) as u64;
        let mut frames = Vec::new();
        for (_, block) in &blocks {
            let frame = compress(block).map_err(|error| unwritable(format!("a block cannot be compressed: {error}")))?;
            let packed_bytes = u32::try_from(frame.len()).ok().filter(|bytes| *bytes <= most_packed(block.len() as u32));
            let packed_bytes =
                packed_bytes.ok_or_else(|| unwritable(format!("a block of {} bytes grew to {}", block.len(), frame.len())))?;
            tables.extend_from_slice(&offset.to_le_bytes());
            tables.extend_from_slice(&packed_bytes.to_le_bytes());
            tables.extend_from_slice(&(block.len() as u32).to_le_bytes());
            tables.extend_from_slice(blake3::hash(&frame).as_bytes());
            offset += u64::from(packed_bytes);
            frames.extend(frame);
        }
        let hash = tables_hash(&bytes, &tables);
        bytes.extend_from_slice(&hash);
        bytes.extend(tables);
        bytes.extend(frames);
        Ok(bytes)
    }

    /// A Zstandard frame as the reader's own library makes it: quickly, and less dense than packs that are handed out should be.
    ///
    /// # Errors
    /// None; the type is that of [`Pack::to_bytes`].
    pub fn compress_quickly(block: &[u8]) -> io::Result<Vec<u8>> {
        Ok(ruzstd::encoding::compress_to_vec(block, CompressionLevel::Fastest))
    }
}

/// Bytes without long runs of zeros: again and again the number of zeros, that of the bytes up to the next long run, and these.
fn without_zeros(bytes: &[u8]) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let zeros = rest.iter().take_while(|byte| **byte == 0).count();
        let (mut run, mut end) = (0, rest.len());
        for (at, byte) in rest.iter().enumerate().skip(zeros) {
            run = if *byte == 0 { run + 1 } else { 0 };
            if run == RUN_BYTES {
                end = at + 1 - run;
                break;
            }
        }
        // Nothing here is longer than a kernel.
        out.extend_from_slice(&(zeros as u32).to_le_bytes());
        out.extend_from_slice(&((end - zeros) as u32).to_le_bytes());
        out.extend_from_slice(&rest[zeros..end]);
        rest = &rest[end..];
    }
    out
}

/// What [`without_zeros`] was given.
fn with_zeros(mut bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    while let Some((numbers, rest)) = bytes.split_at_checked(8) {
        let mut fields = Fields(numbers);
        let (zeros, others) = (fields.number() as usize, fields.number() as usize);
        let (others, rest) = rest.split_at_checked(others).ok_or("it ends within itself")?;
        let length = out.len() + zeros;
        if length + others.len() > MOST_ENTRY_BYTES as usize {
            return Err("it has more zeros than any kernel".to_owned());
        }
        out.resize(length, 0);
        out.extend_from_slice(others);
        bytes = rest;
    }
    if bytes.is_empty() { Ok(out) } else { Err("it ends within a number".to_owned()) }
}

/// Most bytes of a frame of so many: what does not compress is stored, in pieces with a head each.
fn most_packed(bytes: u32) -> u32 {
    bytes + bytes / 64 + 1024
}

/// The content of a Zstandard frame, which must have just so many bytes.
fn unpack(frame: &[u8], bytes: u32) -> Result<Vec<u8>, String> {
    let mut content = vec![0; bytes as usize];
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(bytes.max(LEAST_WINDOW_BYTES).into());
    match decoder.decode_all(frame, &mut content) {
        Ok(unpacked) if unpacked == content.len() => Ok(content),
        Ok(unpacked) => Err(format!("it has {unpacked} bytes, not {bytes}")),
        Err(error) => Err(format!("it cannot be unpacked ({error})")),
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
        driver_release: String::new(),
        ptx_isa: head.ptx_isa,
        options,
    }
    .digest()
}

/// The hash of the head before it, the index and the table of blocks.
fn tables_hash(head: &[u8], tables: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("verdigris-cuda pack index 2");
    hasher.update(head).update(tables);
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

/// What opening reads.
struct Opened {
    head: PackHead,
    rows: Index,
    blocks: Vec<Block>,
    file: File,
}

fn read_index(path: &Path) -> Result<Opened, Trouble> {
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
    let (kernels, blocks) = (fields.number(), fields.number());
    if kernels > MOST_KERNELS || blocks > kernels {
        return Err(damage("it names more kernels or blocks than any pack has"));
    }
    let mut index = vec![0; ROW_BYTES * kernels as usize + BLOCK_ROW_BYTES * blocks as usize];
    file.read_exact(&mut index)?;
    if tables_hash(hashed, &index) != *hash {
        return Err(damage("head, index and table of blocks do not match their hash"));
    }
    let arch = String::from_utf8_lossy(&arch).trim_end_matches('\0').to_owned();
    let (index, table) = index.split_at(ROW_BYTES * kernels as usize);
    let mut blocks = Vec::new();
    for row in table.chunks_exact(BLOCK_ROW_BYTES) {
        let mut fields = Fields(row);
        let offset = u64::from_le_bytes(fields.take());
        let block = Block { offset, packed_bytes: fields.number(), bytes: fields.number(), hash: fields.take() };
        if offset.checked_add(block.packed_bytes.into()).is_none_or(|end| end > file_bytes) {
            return Err(damage("it is cut off"));
        }
        if block.bytes > MOST_BLOCK_BYTES || block.packed_bytes > most_packed(block.bytes) {
            return Err(damage("a block is larger than any pack's"));
        }
        blocks.push(block);
    }
    let mut rows = Index::new();
    for row in index.chunks_exact(ROW_BYTES) {
        let mut fields = Fields(row);
        let key = fields.take();
        let row = Row { block: fields.number(), offset: fields.number(), bytes: fields.number() };
        let within = |block: &Block| row.offset.checked_add(row.bytes).is_some_and(|end| end <= block.bytes);
        if !blocks.get(row.block as usize).is_some_and(within) {
            return Err(damage("a kernel is not within its block"));
        }
        rows.insert(key, row);
    }
    Ok(Opened { head: PackHead { source_hash, arch, ptx_isa, least_driver_version }, rows, blocks, file })
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
            driver_release: "580.159.04".to_owned(),
            ptx_isa: Isa::V9_0,
            options: CompileOptions::default(),
        }
    }

    fn kernels() -> Vec<(String, Entry)> {
        let entry = |number: u32| {
            let facts = KernelFacts { threads: 32 * number, cluster: 1, shared_bytes: number, parameters: vec![], parameter_bytes: 0 };
            let cubin = (0..20 * number).flat_map(|i| (i / 7 * number).to_le_bytes()).collect();
            Entry { facts, findings: Some(vec![]), code: Code::Cubin(cubin) }
        };
        // Neighbours one after another, so that a test that loads all unpacks each block once.
        (10..50).map(|number| (format!("k{number}"), entry(number))).collect()
    }

    fn written() -> (tempfile::TempDir, PathBuf, Vec<u8>) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("sm_90a.pack");
        let bytes = Pack::to_bytes(&head(), CompileOptions::default(), &kernels(), Pack::compress_quickly).expect("can be written");
        std::fs::write(&path, &bytes).expect("writes");
        (folder, path, bytes)
    }

    #[test]
    fn every_kernel_comes_back_for_every_driver() {
        let (_folder, path, bytes) = written();
        let pack = Pack::open(&path).expect("opens");
        assert_eq!(pack.blocks.len(), 2, "kernels are in blocks of {BLOCK_KERNELS}");
        assert_eq!((pack.head(), pack.len()), (&head(), 40));
        for (spec, entry) in kernels() {
            for driver_version in [13_000, 13_020] {
                let key = CacheKey { driver_version, ..key(&spec) };
                assert_eq!(pack.load(&key).expect("reads"), Some(entry.clone()), "{spec}");
            }
        }
        assert_eq!(pack.load(&key("k50")).expect("reads"), None);
        let unpacked: usize = kernels().iter().map(|(_, entry)| entry.to_bytes().len()).sum();
        assert!(bytes.len() < unpacked, "{} of {unpacked} bytes", bytes.len());
    }

    #[test]
    fn another_revision_is_refused_and_other_keys_are_not_served() {
        let (_folder, path, _) = written();
        let pack = Pack::open(&path).expect("opens");
        let error = pack.load(&CacheKey { source_hash: [8; 32], ..key("k10") }).expect_err("stale");
        assert!(matches!(error, PackError::Sources { .. }), "{error}");
        assert!(error.to_string().contains("070707070707… where this program has 080808080808…"), "{error}");
        let others = [
            CacheKey { ptx_isa: Isa::MINIMUM, ..key("k10") },
            CacheKey { options: CompileOptions { optimization_level: 3, ..CompileOptions::default() }, ..key("k10") },
            CacheKey { options: CompileOptions { line_info: false, ..CompileOptions::default() }, ..key("k10") },
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
        // All of the head and of the table of blocks, then a sample of index and kernels.
        let index = ROW_BYTES * kernels().len();
        let (table, blocks) = (HEAD_BYTES + index, HEAD_BYTES + index + 2 * BLOCK_ROW_BYTES);
        let sample = (HEAD_BYTES..table).step_by(13).chain((blocks..whole.len()).step_by(61));
        for at in (0..HEAD_BYTES).chain(table..blocks).chain(sample) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x40;
            let error = loads(&bytes).expect_err(&format!("byte {at}"));
            assert!(matches!(error, PackError::Damaged { .. }), "byte {at}: {error}");
        }
        for length in (0..whole.len()).step_by(197).chain([HEAD_BYTES, table, blocks, whole.len() - 1]) {
            let error = loads(&whole[..length]).expect_err(&format!("cut at {length}"));
            assert!(matches!(error, PackError::Damaged { .. }), "cut at {length}: {error}");
        }
        std::fs::remove_file(&path).expect("removes");
        assert!(matches!(Pack::open(&path), Err(PackError::Io { .. })));
    }

    /// Damage that carries the right hashes, as a writer's mistake would.
    #[test]
    fn places_and_sizes_are_checked_whatever_the_hashes_say() {
        let (_folder, path, whole) = written();
        let tables = HEAD_BYTES..HEAD_BYTES + ROW_BYTES * kernels().len() + 2 * BLOCK_ROW_BYTES;
        let table = tables.end - 2 * BLOCK_ROW_BYTES;
        let told = |at: usize, number: u32| {
            let mut bytes = whole.clone();
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
            let hash = tables_hash(&bytes[..HASHED_HEAD_BYTES], &bytes[tables.clone()]);
            bytes[HASHED_HEAD_BYTES..HEAD_BYTES].copy_from_slice(&hash);
            std::fs::write(&path, &bytes).expect("writes");
            let read = Pack::open(&path).and_then(|pack| kernels().iter().try_for_each(|(spec, _)| pack.load(&key(spec)).map(|_| ())));
            let error = read.expect_err("must refuse");
            assert!(matches!(error, PackError::Damaged { .. }), "{error}");
            error.to_string()
        };
        let first = u32::from_le_bytes([whole[table + 12], whole[table + 13], whole[table + 14], whole[table + 15]]);
        assert!(told(HEAD_BYTES + 32, 2).contains("not within its block"), "a block that is not there");
        assert!(told(HEAD_BYTES + 36, u32::MAX).contains("not within its block"), "a sum that overflows");
        assert!(told(HEAD_BYTES + 40, first + 1).contains("not within its block"), "longer than its block");
        assert!(told(table + 8, u32::MAX).contains("cut off"));
        assert!(told(table + 12, MOST_BLOCK_BYTES + 1).contains("larger than any pack's"));
        assert!(told(table + 12, first + 1).contains(&format!("it has {first} bytes, not {}", first + 1)));
        assert!(told(HASHED_HEAD_BYTES - 4, u32::MAX).contains("more kernels or blocks"));
    }

    #[test]
    fn long_runs_of_zeros_are_left_out_and_come_back() {
        let runs = [0, 1, RUN_BYTES - 1, RUN_BYTES, RUN_BYTES + 1, 1000];
        for case in 0..216 {
            let [before, between, after] = [case % 6, case / 6 % 6, case / 36].map(|at| runs[at]);
            let bytes = [vec![0; before], vec![1], vec![0; between], vec![2, 0, 3], vec![0; after]].concat();
            let without = without_zeros(&bytes);
            assert_eq!(with_zeros(&without).as_ref(), Ok(&bytes), "{before}, {between}, {after}");
            assert!(without.len() <= 24 + 4 + 3 * RUN_BYTES, "{before}, {between}, {after}: {}", without.len());
        }
        assert_eq!((without_zeros(&[]), with_zeros(&[])), (vec![], Ok(vec![])));
        assert_eq!(with_zeros(&without_zeros(&[0; 500])), Ok(vec![0; 500]));
        let told = |zeros: u32, others: u32, bytes: &[u8]| {
            with_zeros(&[&zeros.to_le_bytes()[..], &others.to_le_bytes(), bytes].concat()).expect_err("must refuse")
        };
        assert!(told(u32::MAX, 0, &[]).contains("more zeros") && told(MOST_ENTRY_BYTES, 1, &[1]).contains("more zeros"));
        assert!(told(0, u32::MAX, &[1]).contains("within itself") && told(0, 1, &[1, 2]).contains("within a number"));
    }

    #[test]
    fn a_frame_longer_than_its_block_or_no_frame_is_refused() {
        let frame = Pack::compress_quickly(&[3; 5000]).expect("compresses");
        assert_eq!(unpack(&frame, 5000), Ok(vec![3; 5000]));
        assert!(unpack(&frame, 4999).is_err() && unpack(&frame, 0).is_err() && unpack(&frame, 5001).is_err());
        assert!(unpack(&frame[..frame.len() - 1], 5000).is_err() && unpack(b"no frame", 5000).is_err());
    }

    #[test]
    fn one_block_is_kept_and_a_large_kernel_has_its_own() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("sm_90a.pack");
        let (_, small) = kernels().swap_remove(0);
        let large = Entry { code: Code::Cubin(vec![9; BLOCK_BYTES + 1]), ..small.clone() };
        let listed = [("c", &small), ("b", &large), ("a", &small), ("d", &small)].map(|(spec, entry)| (spec.to_owned(), entry.clone()));
        // Frames that store what they are given.
        let store = |block: &[u8]| Ok(ruzstd::encoding::compress_to_vec(block, CompressionLevel::Uncompressed));
        std::fs::write(&path, Pack::to_bytes(&head(), CompileOptions::default(), &listed, store).expect("fits")).expect("writes");
        let pack = Pack::open(&path).expect("opens");
        let kept = || pack.reader.lock().expect("no thread panics").kept.as_ref().map(|(number, bytes)| (*number, bytes.len()));
        assert_eq!((pack.blocks.len(), kept()), (3, None));
        for (spec, entry, block) in [("a", &small, 0), ("b", &large, 1), ("c", &small, 2), ("d", &small, 2), ("a", &small, 0)] {
            assert_eq!(pack.load(&key(spec)).expect("reads").as_ref(), Some(entry), "{spec}");
            assert_eq!(kept(), Some((block, pack.blocks[block as usize].bytes as usize)));
        }
        let broken = |_: &[u8]| Err(io::Error::other("no memory"));
        let error = Pack::to_bytes(&head(), CompileOptions::default(), &listed, broken).expect_err("not compressed");
        assert!(error.to_string().contains("cannot be compressed: no memory"), "{error}");
    }

    #[test]
    fn what_the_layout_cannot_hold_is_not_written() {
        let write =
            |head: &PackHead, kernels: &[(String, Entry)]| Pack::to_bytes(head, CompileOptions::default(), kernels, Pack::compress_quickly);
        let twice = [kernels()[0].clone(), kernels()[0].clone()];
        assert!(write(&head(), &twice).expect_err("one spec").to_string().contains("two kernels are called `k10`"));
        let long = PackHead { arch: "sm_".repeat(6), ..head() };
        assert!(write(&long, &[]).expect_err("a long name").to_string().contains("16 bytes"));
    }
}
