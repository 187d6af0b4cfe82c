//! A device with the kernels loaded on it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use verdigris_cuda::{
    Clocks, CompileOptions, Context, DeviceBuffer, DeviceProperties, DiskCache, Driver, LoadReport, Loader, ModuleCache, Origin, Pack,
    PackError, Pool, PoolOptions, Stream,
};
use verdigris_engines::arch::Arch;
use verdigris_graph::{Determinism, Graph, Problem};

use crate::choose::Chooser;
use crate::config::Config;
use crate::error::Error;
use crate::explain::PartExplanation;
use crate::graph_plan::GraphPlan;
use crate::observe::{MemoryAccount, Watch, Workload};
use crate::plan_cache::{Answer, PlanCache, PlanCacheError, Question};
use crate::planning::{self, Progress, Stage};
use crate::policy::{Policy, Tuning};
use crate::problem_plan::ProblemPlan;
use crate::select::{Limits, Ranked, Settings, Survey, survey};

/// A device, its kernels, and memory on it. Plans hold what they need of it, so they may outlive it. `Send` and `Sync`.
pub struct Handle {
    arch: Arch,
    stream: Stream,
    loader: Loader,
    /// Stands for slots that are no memory.
    nothing: Arc<DeviceBuffer>,
    /// Why there is no folder of compiled kernels although one was asked for.
    cache_trouble: Option<verdigris_cuda::CacheError>,
    /// Set where the pack fits the device but not this program.
    stale_pack: Option<PackError>,
    pub(crate) plans: PlanCache,
    /// What last went wrong with the file of measured choices.
    plans_trouble: Mutex<Option<PlanCacheError>>,
    kernels: Mutex<KernelCounts>,
    watch: Arc<Watch>,
    /// Threads that compile what nobody waits for.
    behind: Mutex<Vec<JoinHandle<()>>>,
    /// Their stacks; `None` leaves it to the standard library.
    pub(crate) stack_bytes: Option<usize>,
}

/// Kernels are loaded though another library captures; a driver that cannot be told so says it of the kernel.
fn relaxed(context: &Context, work: impl FnOnce()) {
    let _relaxed = context.relax_capture();
    work();
}

impl Drop for Handle {
    /// Waits for what is being compiled: a process that ends in the middle of the driver's compiler may not end well.
    fn drop(&mut self) {
        for thread in std::mem::take(self.behind.get_mut().unwrap_or_else(PoisonError::into_inner)) {
            // What a panic there would have made is made anew by whoever asks for it.
            let _ = thread.join();
        }
    }
}

/// Where the kernels of a handle's plans of graphs came from, each counted once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelCounts {
    /// The driver compiled them.
    pub compiled: u64,
    /// From the pack.
    pub from_pack: u64,
    /// From the folder of compiled kernels.
    pub from_disk: u64,
}

impl fmt::Display for KernelCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} compiled, {} from the pack, {} from disk", self.compiled, self.from_pack, self.from_disk)
    }
}

/// A way that was chosen for one problem, and why.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// What [`Handle::load`] loads.
    pub way: Ranked,
    /// All ways that were looked at, with what was measured.
    pub explanation: PartExplanation,
}

impl Handle {
    /// Takes hold of the configured device through its primary context, the one that frameworks share.
    ///
    /// # Errors
    /// [`Error::Device`]: no driver, no device, a driver or chip too old.
    pub fn open(config: &Config) -> Result<Handle, Error> {
        let context = Driver::load()?.device(config.device)?.primary_context()?;
        Handle::on(&context, config)
    }

    /// Works in a context that the caller has.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn on(context: &Context, config: &Config) -> Result<Handle, Error> {
        let stream = Stream::new(context)?;
        let pool = Pool::new(context, PoolOptions::default())?;
        let (disk, cache_trouble) = match config.cache.as_ref().map(DiskCache::open) {
            None => (None, None),
            Some(Ok(disk)) => (Some(disk), None),
            Some(Err(error)) => (None, Some(error)),
        };
        let nothing = Arc::new(pool.alloc(&stream, 0)?);
        let source_hash = source_hash();
        let mut cache = ModuleCache::new(context, disk);
        if let Some(path) = config.pack.as_ref().filter(|path| path.exists()) {
            cache = cache.with_pack(path);
        }
        let stale_pack = cache.pack().and_then(Result::ok).and_then(|pack| check_sources(pack, source_hash).err());
        let cache = Arc::new(cache);
        let watch = Watch::new(context, &pool, config.record.clone().map(Workload::new));
        let loader = Loader { cache, pool, source_hash, options: CompileOptions::default() };
        let open = if config.shipped { PlanCache::open } else { PlanCache::without_shipped };
        let (plans, plans_trouble) = match open(config.plans.clone()) {
            Ok(plans) => (plans, None),
            Err(error) => (PlanCache::in_memory(), Some(error)),
        };
        let plans_trouble = Mutex::new(plans_trouble);
        let clocks = || context.device().clocks();
        let (mut arch, kernels, behind) = (arch_of(context.properties(), clocks)?, Mutex::default(), Mutex::default());
        match context.resident_clusters() {
            Ok(counted) => arch.resident_clusters = counted,
            // The counts of a whole chip of this kind have to do.
            Err(verdigris_cuda::Error::UnsupportedChip { .. } | verdigris_cuda::Error::MissingSymbol { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Handle {
            arch,
            stream,
            loader,
            nothing,
            cache_trouble,
            stale_pack,
            plans,
            plans_trouble,
            kernels,
            watch,
            behind,
            stack_bytes: None,
        })
    }

    /// The device as engines see it.
    pub fn arch(&self) -> &Arch {
        &self.arch
    }

    /// The device's context.
    pub fn context(&self) -> &Context {
        self.stream.context()
    }

    /// A stream for the handle's own work; callers without one may use it.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Device memory.
    pub fn pool(&self) -> &Pool {
        &self.loader.pool
    }

    /// What loads kernels and programs.
    pub fn loader(&self) -> &Loader {
        &self.loader
    }

    /// Why compiled kernels are not kept on disk although a folder is configured.
    pub fn cache_trouble(&self) -> Option<&verdigris_cuda::CacheError> {
        self.cache_trouble.as_ref()
    }

    /// The pack that kernels are taken from where it has them, or why the configured one serves nothing; `None` where none is configured
    /// or the file is not there.
    pub fn pack(&self) -> Option<Result<&Pack, &PackError>> {
        match (&self.stale_pack, self.loader.cache.pack()?) {
            (Some(stale), Ok(_)) => Some(Err(stale)),
            (_, pack) => Some(pack),
        }
    }

    /// Measured choices, remembered.
    pub fn plan_cache(&self) -> &PlanCache {
        &self.plans
    }

    /// What last went wrong with the file of measured choices, as text; planning goes on without it.
    pub fn plan_cache_trouble(&self) -> Option<String> {
        self.plans_trouble.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(ToString::to_string)
    }

    /// Where the kernels of this handle's plans of graphs, and of its measurements, came from so far.
    pub fn kernel_counts(&self) -> KernelCounts {
        *self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles on a thread that nobody waits for but the handle's end; tells whether there is one. A system that is out of threads has none.
    pub(crate) fn behind(&self, work: impl FnOnce() + Send + 'static) -> bool {
        let mut threads = self.behind.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        let context = self.context().clone();
        let builder = std::thread::Builder::new().name("verdigris-compile".to_owned());
        let builder = if let Some(bytes) = self.stack_bytes { builder.stack_size(bytes) } else { builder };
        match builder.spawn(move || relaxed(&context, work)) {
            Ok(thread) => {
                threads.push(thread);
                true
            }
            Err(_) => false,
        }
    }

    /// Compiles on this thread.
    pub(crate) fn relaxed(&self, work: impl FnOnce()) {
        relaxed(self.context(), work);
    }

    /// Counts a kernel that was made ready.
    pub(crate) fn count(&self, kernel: &str, report: &LoadReport) {
        self.watch.loaded(kernel, report);
        let mut counts = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        match report.origin {
            Origin::Memory => {}
            Origin::Pack => counts.from_pack += 1,
            Origin::Disk => counts.from_disk += 1,
            Origin::Compiled => counts.compiled += 1,
        }
    }

    /// Who holds the device's memory now: for those who ran out of it.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn memory(&self) -> Result<MemoryAccount, Error> {
        self.watch.memory()
    }

    /// Why the workload is not recorded although [`Config::record`] names a file; planning and executing go on without it.
    pub fn record_trouble(&self) -> Option<String> {
        self.watch.workload_trouble()
    }

    pub(crate) fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// What a choice for this problem depends on, here and under these limits.
    pub fn question(&self, problem: &Problem, limits: &Limits) -> Question {
        let properties = self.context().properties();
        let Limits { workspace_bytes, engine: _, settings: _, down_convert, split_operands, reduced_sums, tensor_cores, alignments_bytes } =
            limits;
        let workspace = workspace_bytes.map_or_else(|| "any".to_owned(), |bytes| bytes.to_string());
        let flags: String =
            [down_convert, split_operands, reduced_sums, tensor_cores].map(|flag| if *flag { '1' } else { '0' }).into_iter().collect();
        let mut policy = format!("workspace={workspace},allowed={flags}");
        for (slot, declared) in alignments_bytes.iter().enumerate() {
            if let Some(declared) = declared {
                policy.push_str(&format!(",align{slot}={declared}"));
            }
        }
        Question {
            problem: problem.to_string(),
            device: format!("{}/{}/{}", properties.name, properties.arch_key(), properties.sm_count),
            driver: properties.driver_version.to_string(),
            policy,
        }
    }

    /// Keeps a measured choice; trouble is noted.
    pub(crate) fn keep(&self, question: &Question, answer: &Answer) {
        if let Err(error) = self.plans.keep(question, answer) {
            *self.plans_trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    }

    pub(crate) fn nothing(&self) -> Arc<DeviceBuffer> {
        Arc::clone(&self.nothing)
    }

    /// A graph planned: cut into problems, a way chosen and loaded for each, the memory between them laid out in one workspace.
    ///
    /// # Errors
    /// [`Error::Graph`], [`Error::NoEngine`] with every refusal, [`Error::UnknownEngine`], [`Error::Pin`], [`Error::NoWorkspace`],
    /// [`Error::Device`].
    pub fn plan_graph(&self, graph: &Graph, policy: &Policy) -> Result<GraphPlan, Error> {
        self.plan_graph_watched(graph, policy, &mut |_| {})
    }

    /// As [`Handle::plan_graph`]; `watch` is called as it goes on.
    ///
    /// # Errors
    /// As [`Handle::plan_graph`].
    pub fn plan_graph_watched(&self, graph: &Graph, policy: &Policy, watch: &mut dyn FnMut(Progress)) -> Result<GraphPlan, Error> {
        planning::plan_graph(self, graph, policy, watch)
    }

    /// Every way to compute the problem here, best first, and every refusal. Compiles nothing.
    ///
    /// # Errors
    /// [`Error::UnknownEngine`].
    pub fn survey(&self, problem: &Problem, limits: &Limits) -> Result<Survey, Error> {
        if let Some(name) = &limits.engine
            && verdigris_engines::engine(name).is_none()
        {
            return Err(Error::unknown_engine(name));
        }
        Ok(survey(problem, &self.arch, limits))
    }

    /// The way that [`Handle::choose`] gives, loaded; where `limits` name an engine or settings, the best of those by estimate, and
    /// nothing is remembered. Where its kernels are not loaded yet, that is a load from disk (about a millisecond) or a compilation (a tenth
    /// of a second).
    ///
    /// # Errors
    /// [`Error::NoEngine`] with every refusal, [`Error::UnknownEngine`], [`Error::Device`].
    pub fn plan(&self, problem: &Problem, limits: &Limits) -> Result<ProblemPlan, Error> {
        if limits.engine.is_none() && limits.settings == Settings::First {
            return self.load(problem, &self.choose(problem, limits)?.way);
        }
        let survey = self.survey(problem, limits)?;
        let best = survey.ranked.first().ok_or(Error::NoEngine(survey.refusals))?;
        self.load(problem, best)
    }

    /// The way that a plan at once would take: the remembered one, else that with the least estimate, else, where that one's kernels need a
    /// compiler and another's do not, one with nearly as good an estimate. Of `limits`, `engine` and `settings` are not asked.
    ///
    /// # Errors
    /// [`Error::NoEngine`] with every refusal.
    pub fn choose(&self, problem: &Problem, limits: &Limits) -> Result<Chosen, Error> {
        self.chosen(problem, limits, None, &mut |_, _, _| {})
    }

    /// The fastest way by the clock, kept in the plan cache; a remembered one, unless `tuning` says to measure again. `watch` hears of the
    /// stage, of how much of it is done, and how much there is. Of `limits`, `engine` and `settings` are not asked.
    ///
    /// # Errors
    /// [`Error::NoEngine`] with every refusal, [`Error::Device`].
    pub fn tune(
        &self,
        problem: &Problem,
        limits: &Limits,
        tuning: &Tuning,
        watch: &mut dyn FnMut(Stage, usize, usize),
    ) -> Result<Chosen, Error> {
        self.chosen(problem, limits, Some(*tuning), watch)
    }

    fn chosen(
        &self,
        problem: &Problem,
        limits: &Limits,
        tuning: Option<Tuning>,
        watch: &mut dyn FnMut(Stage, usize, usize),
    ) -> Result<Chosen, Error> {
        // Of problems that cannot ask for it, nobody has asked for the same bits.
        let may_ask = matches!(problem, Problem::Gemm(_) | Problem::Conv(_) | Problem::Attention(_));
        let is_repeatable = may_ask && problem.determinism() == Determinism::Repeatable;
        let choice = Chooser { handle: self, limits: limits.clone(), tuning, remember: true, is_repeatable }.choose(problem, watch)?;
        Ok(Chosen { way: choice.way().clone(), explanation: choice.explain(problem) })
    }

    /// One way of a survey of this problem, its program loaded on the device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn load(&self, problem: &Problem, way: &Ranked) -> Result<ProblemPlan, Error> {
        let program = self.loader.load(&way.program, &self.stream)?;
        for (kernel, report) in program.reports() {
            self.watch.loaded(kernel, report);
        }
        ProblemPlan::new(problem, way, program, Arc::clone(&self.nothing), &self.watch)
    }
}

/// The hash under which this build's kernels are kept.
fn source_hash() -> [u8; 32] {
    let digits = verdigris_engines::SOURCE_HASH.as_bytes();
    std::array::from_fn(|i| {
        let pair = digits.get(2 * i..2 * i + 2).and_then(|pair| std::str::from_utf8(pair).ok());
        pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()).unwrap_or(0)
    })
}

/// Whether the pack's kernels are those that this program would make.
fn check_sources(pack: &Pack, expected: [u8; 32]) -> Result<(), PackError> {
    let found = pack.head().source_hash;
    if found == expected { Ok(()) } else { Err(PackError::Sources { path: pack.path().to_owned(), found, expected }) }
}

/// What engines may know of a device. Limits are the device's own; rates are those that long runs hold, scaled from chips that were
/// measured by SMs, clock and bus, and serve to rank engines, never to judge them.
///
/// `clocks` is asked only of chips that were not measured.
///
/// # Errors
/// Those of `clocks`.
pub fn arch_of<E>(properties: &DeviceProperties, clocks: impl FnOnce() -> Result<Clocks, E>) -> Result<Arch, E> {
    let known = Arch::h200();
    let sms = f64::from(properties.sm_count);
    let (major, minor) = properties.compute_capability;
    let clusters = if major >= 9 {
        known.resident_clusters.map(|count| (f64::from(count) * sms / f64::from(known.sm_count)) as u32)
    } else {
        [properties.sm_count, 0, 0, 0, 0]
    };
    let described = Arch {
        name: properties.name.clone(),
        capability: properties.compute_capability,
        isa: (properties.ptx_isa.major, properties.ptx_isa.minor),
        sm_count: properties.sm_count,
        shared_bytes_per_cta: properties.shared_memory_per_cta_bytes,
        shared_bytes_per_sm: properties.shared_memory_per_sm_bytes,
        l2_bytes: properties.l2_bytes,
        resident_clusters: clusters,
        ..known
    };
    if properties.name.contains("H200") && properties.sm_count == known.sm_count {
        return Ok(described);
    }
    // Dense bf16 multiply-adds a clock and SM, by NVIDIA's tuning guides; two operations each.
    let tensor_per_clock = match (major, minor) {
        (8, 0) | (8, 7) => 1024.0,
        (8, _) => 512.0,
        (9, _) => 2048.0,
        _ => 2048.0,
    };
    let (fma_per_clock, f64_per_clock) = match (major, minor) {
        (8, 0) => (64.0, 32.0),
        (9, 0) => (128.0, 64.0),
        _ => (128.0, 2.0),
    };
    let Clocks { sm_khz, memory_khz } = clocks()?;
    // Under load a chip runs below its highest clock, most of all on tensor cores.
    let tflops = |per_clock: f64, held: f64| 2.0 * per_clock * sms * f64::from(sm_khz) * 1e-6 * held * 1e-3;
    // Two transfers a clock; of the bus's rate nine tenths reach a kernel. Newer drivers do not tell the clock.
    let bus_gb_per_s = f64::from(memory_khz) * 1e-6 * 2.0 * f64::from(properties.memory_bus_bits) / 8.0 * 0.9;
    Ok(Arch {
        memory_gb_per_s: if memory_khz == 0 { described.memory_gb_per_s } else { bus_gb_per_s },
        tensor_bf16_tflops: tflops(tensor_per_clock, 0.8),
        fma_f32_tflops: tflops(fma_per_clock, 0.9),
        fma_f64_tflops: tflops(f64_per_clock, 0.9),
        ..described
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_kir::ptx::Isa;

    fn h200() -> DeviceProperties {
        DeviceProperties {
            name: "NVIDIA H200".to_owned(),
            uuid: String::new(),
            compute_capability: (9, 0),
            sm_count: 132,
            shared_memory_per_cta_bytes: 232_448,
            shared_memory_per_sm_bytes: 233_472,
            reserved_shared_memory_per_cta_bytes: 1024,
            registers_per_sm: 65_536,
            threads_per_sm: 2048,
            l2_bytes: 60 << 20,
            memory_bytes: 141 << 30,
            memory_bus_bits: 6144,
            max_grid: [i32::MAX as u32, 65_535, 65_535],
            cooperative_launch: true,
            memory_pools: true,
            driver_version: 13_000,
            ptx_isa: Isa::V9_0,
        }
    }

    #[test]
    fn the_measured_chip_is_itself_and_others_are_in_proportion() {
        let arch_of = |properties: &DeviceProperties| {
            arch_of::<()>(properties, || Ok(Clocks { sm_khz: 1_980_000, memory_khz: 3_201_000 })).expect("clocks are told")
        };
        assert_eq!(super::arch_of(&h200(), || Err("asked for what is known")), Ok(Arch::h200()));
        let half = arch_of(&DeviceProperties { name: "NVIDIA H100 PCIe".to_owned(), sm_count: 66, memory_bus_bits: 5120, ..h200() });
        assert_eq!(half.resident_clusters, [66, 33, 16, 8, 3]);
        assert!((350.0..500.0).contains(&half.tensor_bf16_tflops), "{half:?}");
        assert!((3000.0..4000.0).contains(&half.memory_gb_per_s), "{half:?}");
        let ampere = DeviceProperties { name: "NVIDIA A100".to_owned(), compute_capability: (8, 0), sm_count: 108, ..h200() };
        assert_eq!(arch_of(&ampere).resident_clusters, [108, 0, 0, 0, 0]);
    }

    #[test]
    fn the_source_hash_is_read_whole() {
        let hash = source_hash();
        let text: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(text, verdigris_engines::SOURCE_HASH);
    }

    #[test]
    fn a_pack_of_other_sources_is_stale() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kernels.pack");
        let check = |hash: [u8; 32]| {
            let head =
                verdigris_cuda::PackHead { source_hash: hash, arch: "sm_90a".to_owned(), ptx_isa: Isa::V9_0, least_driver_version: 13_000 };
            let bytes = Pack::to_bytes(&head, CompileOptions::default(), &[], Pack::compress_quickly).expect("can be made");
            std::fs::write(&path, bytes).expect("writes");
            check_sources(&Pack::open(&path).expect("opens"), source_hash())
        };
        check(source_hash()).expect("made from these sources");
        let error = check([7; 32]).expect_err("made from others");
        assert!(matches!(error, PackError::Sources { found, .. } if found == [7; 32]), "{error}");
    }

    #[test]
    fn a_handle_may_be_shared() {
        fn shared<T: Send + Sync>() {}
        shared::<Handle>();
        shared::<ProblemPlan>();
    }
}
