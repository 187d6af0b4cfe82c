//! The kernels of a context: loaded ones, and where the others are looked for.
//!
//! [`ModuleCache`] looks in the cheapest place first: kernels already loaded into the context, a [`Pack`] made beforehand, the folder
//! of compiled ones ([`DiskCache`]), and the driver's compiler. A kernel's source is asked for only before the last. Nothing here
//! decides to go on in silence: where a kernel came from, what its compiler found, a pack or an entry that could not be used and one that
//! could not be stored stand in the [`LoadReport`].

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::cache::{CacheError, CacheKey, DamagedEntry, DiskCache, Lookup};
use crate::device::Context;
use crate::entry::{Code, Entry};
use crate::error::Error;
use crate::facts::KernelFacts;
use crate::jit::{CompileOptions, JitFinding, JitReport, compile, has_register_budgets};
use crate::launch::{LaunchConfig, LaunchError, Parameters};
use crate::module::{Function, FunctionOptions, Module};
use crate::pack::{Pack, PackError};
use crate::stream::Stream;

/// A kernel's source: what [`ModuleCache::kernel`] asks for when no compiled copy is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSource {
    /// The PTX text, whose entry has the kernel's name.
    pub ptx: String,
    /// What a launch has to know of it.
    pub facts: KernelFacts,
    /// Bytes that its author lets it spill; the compiler's findings beyond that are told in [`LoadReport::findings`].
    pub allowed_spill_bytes: u32,
}

/// A loaded kernel with what a launch has to know of it.
#[derive(Debug)]
pub struct LoadedKernel {
    /// The function, its dynamic shared memory allowed.
    pub function: Function,
    /// Threads, cluster, shared memory and parameters.
    pub facts: KernelFacts,
    /// As [`LoadReport::findings`].
    pub findings: Option<Vec<JitFinding>>,
}

impl LoadedKernel {
    /// Submits one CTA of a kernel without parameters: what the driver alone costs, to compare an execution with.
    ///
    /// # Errors
    /// [`LaunchError::Bare`] for a kernel with parameters; [`Error::Launch`], [`Error::ContextMismatch`], [`Error::Driver`].
    pub fn launch_bare(&self, stream: &Stream) -> Result<(), Error> {
        if !self.facts.parameters.is_empty() {
            let (kernel, parameters) = (self.function.name().to_owned(), self.facts.parameters.len());
            return Err(LaunchError::Bare { kernel, parameters }.into());
        }
        let config = LaunchConfig { dynamic_smem_bytes: self.facts.shared_bytes, ..LaunchConfig::linear(1, self.facts.threads) };
        // SAFETY: the kernel has no parameters, as its facts say, with which the compiled code was compared; without an address it reaches no
        // memory but its own.
        unsafe { self.function.launch(stream, &config, Parameters { bytes: &[], offsets_bytes: &[] }) }
    }
}

/// Where a kernel came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// It was loaded already.
    Memory,
    /// From the pack.
    Pack,
    /// From the folder of compiled kernels.
    Disk,
    /// The driver compiled it now.
    Compiled,
}

/// How a kernel was come by.
#[derive(Debug)]
pub struct LoadReport {
    /// Where it came from.
    pub origin: Origin,
    /// The compiler's report, where the driver was handed PTX now: to be compiled, or, from [`Origin::Disk`], for the machine
    /// code in its own cache.
    pub jit: Option<JitReport>,
    /// What the compiler found in this kernel that costs performance and that its author did not accept, now or when it
    /// was compiled; `None` where the compiler was silent, since the driver took the code from a cache of its own.
    pub findings: Option<Vec<JitFinding>>,
    /// Why the pack did not serve, although one is configured and would have been asked.
    pub pack_trouble: Option<Arc<PackError>>,
    /// A damaged entry that was found and, unless `not_stored` says otherwise, replaced.
    pub damaged: Option<DamagedEntry>,
    /// Why the compiled kernel could not be put on disk; it works all the same.
    pub not_stored: Option<CacheError>,
}

impl LoadReport {
    fn of(origin: Origin, kernel: &LoadedKernel, jit: Option<JitReport>) -> Self {
        Self { origin, jit, findings: kernel.findings.clone(), pack_trouble: None, damaged: None, not_stored: None }
    }
}

/// The kernels of one context, each compiled at most once at a time and loaded at most once. Several threads may ask at once:
/// different kernels compile side by side, and the same kernel is waited for.
pub struct ModuleCache {
    context: Context,
    pack: Option<Result<Pack, Arc<PackError>>>,
    disk: Option<DiskCache>,
    slots: RwLock<HashMap<[u8; 32], Arc<Slot>>>,
}

/// A kernel's place; locked while it is being made.
type Slot = Mutex<Option<Arc<LoadedKernel>>>;

impl ModuleCache {
    /// An empty cache, over a folder of compiled kernels if one is given.
    pub fn new(context: &Context, disk: Option<DiskCache>) -> Self {
        Self { context: context.clone(), pack: None, disk, slots: RwLock::default() }
    }

    /// Looks into the pack at `path` before the folder. One that cannot be used for this device stands in every report
    /// ([`LoadReport::pack_trouble`]), and the other sources serve.
    #[must_use]
    pub fn with_pack(self, path: impl Into<PathBuf>) -> Self {
        let open = || {
            let pack = Pack::open(path)?;
            pack.check_device(self.context.properties())?;
            Ok(pack)
        };
        let pack = Some(open().map_err(Arc::new));
        Self { pack, ..self }
    }

    /// The pack, or why it cannot be used; `None` where none was named.
    pub fn pack(&self) -> Option<Result<&Pack, &PackError>> {
        self.pack.as_ref().map(|pack| pack.as_ref().map_err(AsRef::as_ref))
    }

    /// The context that the kernels are loaded into.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The number of kernels loaded through this cache: it stands still once a workload is warm.
    pub fn loaded_count(&self) -> usize {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.values().filter(|slot| slot.try_lock().is_ok_and(|kernel| kernel.is_some())).count()
    }

    /// Whether the kernel of that key can be had without a compilation: it is loaded, or the pack or the folder has it. An entry on disk
    /// may yet prove damaged.
    pub fn is_ready(&self, key: &CacheKey) -> bool {
        let slot = self.slots.read().unwrap_or_else(PoisonError::into_inner).get(&key.digest()).cloned();
        slot.is_some_and(|slot| slot.try_lock().is_ok_and(|kernel| kernel.is_some()))
            || matches!(self.pack(), Some(Ok(pack)) if pack.has(key))
            || self.disk.as_ref().is_some_and(|disk| disk.path(key).exists())
    }

    /// The kernel of that key, whose entry is named `name`; `source` is called only where it has to be compiled.
    ///
    /// # Errors
    /// What `source` returns; [`Error::Compile`], [`Error::NoSuchKernel`], [`Error::Launch`], [`Error::Driver`].
    pub fn kernel<E: From<Error>>(
        &self,
        key: &CacheKey,
        name: &str,
        source: impl FnOnce() -> Result<KernelSource, E>,
    ) -> Result<(Arc<LoadedKernel>, LoadReport), E> {
        let digest = key.digest();
        let known = self.slots.read().unwrap_or_else(PoisonError::into_inner).get(&digest).cloned();
        let slot = known.unwrap_or_else(|| {
            let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry(digest).or_default())
        });
        // A panic in another thread's `source` leaves the place empty, which is as good as new.
        let mut place = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = &*place {
            return Ok((Arc::clone(kernel), LoadReport::of(Origin::Memory, kernel, None)));
        }
        let (kernel, report) = self.find(key, name, source)?;
        let kernel = Arc::new(kernel);
        *place = Some(Arc::clone(&kernel));
        Ok((kernel, report))
    }

    fn find<E: From<Error>>(
        &self,
        key: &CacheKey,
        name: &str,
        source: impl FnOnce() -> Result<KernelSource, E>,
    ) -> Result<(LoadedKernel, LoadReport), E> {
        let mut pack_trouble = None;
        match self.load_packed(key, name) {
            Ok(Some((kernel, jit))) => {
                let report = LoadReport::of(Origin::Pack, &kernel, jit);
                return Ok((kernel, report));
            }
            Ok(None) => {}
            Err(trouble) => pack_trouble = Some(trouble),
        }
        let mut damaged = None;
        match self.disk.as_ref().map(|disk| (disk, disk.load(key))) {
            Some((disk, Lookup::Hit(bytes))) => match Entry::from_bytes(&bytes).and_then(|entry| self.load_entry(name, entry, key.options))
            {
                Ok((kernel, jit)) => {
                    let report = LoadReport { pack_trouble, ..LoadReport::of(Origin::Disk, &kernel, jit) };
                    return Ok((kernel, report));
                }
                // The bytes are as they were written, and yet no kernel: rebuilt like any other damage.
                Err(why) => damaged = Some(DamagedEntry { path: disk.path(key), why }),
            },
            Some((_, Lookup::Damaged(entry))) => damaged = Some(entry),
            Some((_, Lookup::Missing)) | None => {}
        }
        let (kernel, code, jit) = self.compile(name, source()?, key.options)?;
        let entry = Entry { facts: kernel.facts.clone(), findings: kernel.findings.clone(), code };
        let not_stored = self.disk.as_ref().and_then(|disk| disk.store(key, &entry.to_bytes()).err());
        let report = LoadReport { pack_trouble, damaged, not_stored, ..LoadReport::of(Origin::Compiled, &kernel, Some(jit)) };
        Ok((kernel, report))
    }

    /// Has the driver compile a kernel, for its machine code where that is as good as what the driver would make for itself.
    fn compile(&self, name: &str, source: KernelSource, options: CompileOptions) -> Result<(LoadedKernel, Code, JitReport), Error> {
        let KernelSource { ptx, facts, allowed_spill_bytes } = source;
        if !has_register_budgets(&ptx) {
            let cubin = compile(&self.context, name, &ptx, options)?;
            // What the compiler says of relocatable code may not hold for the same text as a whole.
            if !cubin.report.findings.iter().any(|finding| matches!(finding, JitFinding::Message { .. })) {
                let findings = cubin.report.unaccepted(allowed_spill_bytes);
                let kernel = self.kernel_in(Module::load_cubin(&self.context, &cubin.bytes)?, name, facts, findings)?;
                return Ok((kernel, Code::Cubin(cubin.bytes), cubin.report));
            }
        }
        let (module, report) = Module::load_ptx(&self.context, name, &ptx, options)?;
        let kernel = self.kernel_in(module, name, facts, report.unaccepted(allowed_spill_bytes))?;
        Ok((kernel, Code::Ptx(ptx), report))
    }

    fn load_packed(&self, key: &CacheKey, name: &str) -> Result<Option<(LoadedKernel, Option<JitReport>)>, Arc<PackError>> {
        let Some(pack) = &self.pack else { return Ok(None) };
        let pack = pack.as_ref().map_err(Arc::clone)?;
        let Some(entry) = pack.load(key)? else { return Ok(None) };
        let loaded = self.load_entry(name, entry, key.options);
        loaded.map(Some).map_err(|why| PackError::Unloadable { path: pack.path().to_owned(), why }.into())
    }

    fn load_entry(&self, name: &str, entry: Entry, options: CompileOptions) -> Result<(LoadedKernel, Option<JitReport>), String> {
        let Entry { facts, findings, code } = entry;
        let load = || -> Result<_, Error> {
            let (module, jit) = match code {
                Code::Cubin(cubin) => (Module::load_cubin(&self.context, &cubin)?, None),
                Code::Ptx(ptx) => {
                    let (module, report) = Module::load_ptx(&self.context, name, &ptx, options)?;
                    (module, Some(report))
                }
            };
            Ok((self.kernel_in(module, name, facts, findings)?, jit))
        };
        load().map_err(|error| error.to_string())
    }

    /// The kernel of a loaded module, with its limits set and its signature checked.
    fn kernel_in(&self, module: Module, name: &str, facts: KernelFacts, findings: Option<Vec<JitFinding>>) -> Result<LoadedKernel, Error> {
        let options = FunctionOptions { dynamic_smem_bytes: facts.shared_bytes, large_clusters: facts.cluster > 8 };
        let function = module.function(name, options)?;
        function.check_signature(&facts)?;
        Ok(LoadedKernel { function, facts, findings })
    }
}
