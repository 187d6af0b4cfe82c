//! The kernel pack of one chip: its whole catalog, assembled offline, in one file that [`verdigris_cuda::Pack`] reads.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use object::{Object, ObjectSection};
use verdigris_cuda::{Code, CompileOptions, Entry, KernelFacts, Pack, PackHead};
use verdigris_kir::ir::Target;
use verdigris_kir::program::KernelRef;
use verdigris_kir::verify::verify;

use crate::catalog::{self, PTX_ISA};
use crate::ptxas::{self, Memory, Outcome, Toolchain};

/// The oldest driver that loads the pinned assembler's cubins: that of its own release, 13.0.
const LEAST_DRIVER_VERSION: u32 = 13_000;

/// Most bytes of a pack; it is handed out with every build.
const MOST_BYTES: usize = 17_000_000;

/// Zstandard's level for packs: they are written once and handed out often.
const LEVEL: i32 = 19;

/// A level that takes seconds for a catalog, and how much of what it makes [`LEVEL`] makes, in percent: as measured on every eighth block of a catalog.
const QUICK_LEVEL: i32 = 3;
const QUICK_PERCENT: usize = 76;

/// What was written.
pub(crate) struct Written {
    /// Kernels in the pack.
    pub(crate) kernels: usize,
    /// Bytes of their code and facts before packing.
    pub(crate) unpacked_bytes: usize,
    /// Size of the file.
    pub(crate) bytes: usize,
}

/// Where a pack will be: a file beside it, which takes its place once it is written.
pub(crate) struct Place {
    out: PathBuf,
    file: tempfile::NamedTempFile,
}

impl Place {
    /// Makes the folder that the path names, and a file in it: assembling takes minutes, and whoever asked should not learn after them that
    /// nothing can be written.
    pub(crate) fn prepare(out: &Path) -> Result<Place> {
        if out.is_dir() {
            bail!("{} is a folder; --out names the file that the pack becomes", out.display());
        }
        let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).with_context(|| format!("making the folder {}", folder.display()))?;
        let file = tempfile::NamedTempFile::new_in(folder).with_context(|| format!("making a file in {}", folder.display()))?;
        Ok(Place { out: out.to_path_buf(), file })
    }

    /// Writes the file and puts it in place.
    fn fill(mut self, bytes: &[u8]) -> Result<()> {
        (self.file.write_all(bytes).and_then(|()| self.file.as_file().sync_all()))
            .with_context(|| format!("writing {}", self.file.path().display()))?;
        self.file.persist(&self.out).with_context(|| format!("putting {} in place", self.out.display()))?;
        Ok(())
    }
}

/// Assembles the chip's catalog and writes it to its place; what was there is replaced whole or not at all.
pub(crate) fn write(toolchain: &Toolchain, memory: &Memory, chip: Target, jobs: usize, out: Place) -> Result<Written> {
    if !toolchain.is_pinned() {
        bail!("packs are made with the pinned assembler alone, for that is the one whose oldest driver is known");
    }
    let kernels = entries(toolchain, memory, chip, &verdigris_engines::catalog(chip), jobs)?;
    let source_hash = blake3::Hash::from_hex(verdigris_engines::SOURCE_HASH).context("the hash of the sources")?.into();
    // The assembler optimizes as the driver does by default, and keeps the lines that the text names.
    let bytes = Pack::to_bytes(&head(chip, source_hash), CompileOptions::default(), &kernels, compress)?;
    if let Some(why) = too_large(bytes.len()) {
        bail!(why);
    }
    out.fill(&bytes)?;
    let unpacked_bytes = kernels.iter().map(|(_, entry)| entry.to_bytes().len()).sum();
    Ok(Written { kernels: kernels.len(), unpacked_bytes, bytes: bytes.len() })
}

fn head(chip: Target, source_hash: [u8; 32]) -> PackHead {
    PackHead { source_hash, arch: chip.ptx().to_string(), ptx_isa: PTX_ISA, least_driver_version: LEAST_DRIVER_VERSION }
}

fn compress(block: &[u8]) -> std::io::Result<Vec<u8>> {
    zstd::bulk::compress(block, LEVEL)
}

/// About how many bytes the chip's pack will have, by its assembled kernels. It takes seconds where making the pack takes minutes, so
/// the check that assembles the whole catalog notices when that outgrows its pack. (Probes count as well, which no pack has: they are few.)
pub(crate) fn estimate(chip: Target, outcomes: &[Outcome]) -> Result<usize> {
    let facts = KernelFacts { threads: 0, cluster: 1, shared_bytes: 0, parameters: Vec::new(), parameter_bytes: 0 };
    let mut kernels = Vec::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.target == chip.ptx()) {
        if let Some(cubin) = &outcome.cubin {
            let code = Code::Cubin(without_ptx(cubin.clone())?);
            kernels.push((outcome.name.clone(), Entry { facts: facts.clone(), findings: Some(Vec::new()), code }));
        }
    }
    let quick = |block: &[u8]| zstd::bulk::compress(block, QUICK_LEVEL);
    let bytes = Pack::to_bytes(&head(chip, [0; 32]), CompileOptions::default(), &kernels, quick)?;
    Ok(bytes.len() * QUICK_PERCENT / 100)
}

/// Whether so many bytes are too many; what is told then.
pub(crate) fn too_large(bytes: usize) -> Option<String> {
    (bytes > MOST_BYTES)
        .then(|| format!("the pack has {bytes} bytes, the most are {MOST_BYTES}: the catalog has grown beyond what is handed out"))
}

/// The kernels by spec, each verified and assembled without a complaint; otherwise all the complaints.
fn entries(toolchain: &Toolchain, memory: &Memory, chip: Target, kernels: &[KernelRef], jobs: usize) -> Result<Vec<(String, Entry)>> {
    let (mut assemblies, mut facts, mut complaints) = (Vec::new(), Vec::new(), Vec::new());
    for kernel in kernels {
        match verify(kernel.build()) {
            Ok(verified) => match catalog::assembly(kernel.name(), &verified) {
                Ok(assembly) => {
                    facts.push(KernelFacts::of(&verified));
                    assemblies.push(ptxas::Assembly { target: chip.ptx().to_string(), ..assembly });
                }
                Err(differs) => complaints.push(format!("{differs:#}")),
            },
            Err(faults) => complaints.push(faults.to_string()),
        }
    }
    let mut entries = Vec::new();
    for (outcome, facts) in ptxas::assemble_all(toolchain, Some(memory), &assemblies, jobs)?.into_iter().zip(facts) {
        match outcome.cubin {
            Some(cubin) if outcome.failures.is_empty() => {
                entries.push((outcome.name, Entry { facts, findings: Some(Vec::new()), code: Code::Cubin(without_ptx(cubin)?) }));
            }
            _ => complaints.push(format!("{} ({}): {}", outcome.name, outcome.target, outcome.failures.join("; "))),
        }
    }
    if !complaints.is_empty() {
        bail!("{} kernels cannot be packed\n{}", complaints.len(), complaints.join("\n"));
    }
    Ok(entries)
}

/// The cubin with zeros in place of the PTX text that the assembler puts beside the lines of source, and of the map from instructions to
/// lines of that text: two thirds of a cubin, which only a profiler's view of PTX reads. Sections stay where they are, and zeros pack to nothing.
fn without_ptx(mut cubin: Vec<u8>) -> Result<Vec<u8>> {
    let file = object::read::elf::ElfFile64::<object::Endianness>::parse(&*cubin).context("reading a cubin")?;
    let texts = [".nv_debug_ptx_txt", ".nv_debug_line_sass"].into_iter().filter_map(|name| file.section_by_name(name)?.file_range());
    for (start, bytes) in texts.collect::<Vec<_>>() {
        let section = usize::try_from(start)?..usize::try_from(start + bytes)?;
        cubin.get_mut(section).context("a section beyond the end of a cubin")?.fill(0);
    }
    Ok(cubin)
}

#[cfg(test)]
mod tests {
    use verdigris_cuda::CacheKey;
    use verdigris_kir::face::{Header, build};

    use super::*;

    #[test]
    fn the_folder_is_made_first_and_nothing_is_left_of_a_pack_that_was_not_written() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let out = folder.path().join("a/b/chip.pack");
        let place = Place::prepare(&out).expect("makes the folders");
        assert!(out.parent().is_some_and(Path::is_dir) && !out.exists());
        drop(place);
        assert_eq!(std::fs::read_dir(folder.path().join("a/b")).expect("readable").count(), 0);
        Place::prepare(&out).and_then(|place| place.fill(b"kernels")).expect("writes");
        assert_eq!(std::fs::read(&out).expect("there"), b"kernels");
        let told = |path: &Path| Place::prepare(path).map(|_| ()).expect_err("must refuse").to_string();
        assert!(told(folder.path()).contains("is a folder"));
        // A file stands where a folder would have to be.
        let blocked = told(&out.join("below/chip.pack"));
        assert!(blocked.contains("making the folder") && blocked.contains("chip.pack/below"), "{blocked}");
    }

    #[test]
    fn what_is_packed_can_be_read() {
        let root = crate::tree::workspace_root().expect("tests run inside the workspace");
        let Some(toolchain) = Toolchain::installed(&root) else {
            eprintln!("skipped: no assembler here; `cargo xtask ptxas --install` fetches it");
            return;
        };
        let folder = tempfile::tempdir().expect("a temporary folder");
        let memory = Memory::open(&folder.path().join("memory")).expect("opens");
        let kernel = KernelRef::new("numbers", || {
            let header = Header { name: "numbers".into(), target: Target::Sm80, threads: 64, ..Header::default() };
            build(header, |k| {
                let y = k.output("y", 4);
                k.st_global(y.at(k.thread(), 4), 0, k.thread());
            })
        });
        let entries = entries(&toolchain, &memory, Target::Sm90a, &[kernel], 1).expect("assembles");
        let bytes = Pack::to_bytes(&head(Target::Sm90a, [3; 32]), CompileOptions::default(), &entries, compress).expect("packs");
        let path = folder.path().join("a.pack");
        std::fs::write(&path, bytes).expect("writes");
        let key = CacheKey {
            source_hash: [3; 32],
            spec: "numbers".to_string(),
            arch: "any device".to_string(),
            driver_version: 13_010,
            driver_release: String::new(),
            ptx_isa: PTX_ISA,
            options: CompileOptions::default(),
        };
        let entry = Pack::open(&path).and_then(|pack| pack.load(&key)).expect("reads").expect("is there");
        assert_eq!((entry.facts.threads, entry.facts.parameters.len()), (64, 1));
        let Code::Cubin(cubin) = entry.code else { panic!("{:?}", entry.code) };
        assert!(cubin.starts_with(b"\x7fELF"));
        let names = |text: &str| cubin.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(!names("st.global"), "the PTX is still there");
        assert!(names("pack.rs"), "the lines of source are lost");
    }
}
