//! What the library itself costs: compiling a kernel, loading it, choosing a plan, submitting it; and whether new sizes load anything.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use serde::Serialize;
use std::sync::Arc;
use verdigris::{Binding, Config, Handle, Limits};
use verdigris_cuda::{DiskCache, Loader, ModuleCache};
use verdigris_graph::{GemmProblem, Matrix, Order, Problem, Slot};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::KernelRef;
use verdigris_reference::data::Random;
use verdigris_telemetry::Telemetry;
use verdigris_tensor::DType;

use super::measure::quantile;
use verdigris_cli::record::{Record, now};
use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, device, say};

/// Options of `bench overhead`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Random sizes that are planned once the whole catalog is loaded, which takes minutes where no pack has it; 0 leaves both out.
    #[arg(long, default_value_t = 1000)]
    sizes: usize,
    /// Executions of the one-launch plan whose host time is taken.
    #[arg(long, default_value_t = 10_000)]
    executions: usize,
    /// Seed of the sizes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the record goes; default bench/record/DEVICE/DATE-overhead.jsonl. `none` keeps no record.
    #[arg(long)]
    record: Option<std::path::PathBuf>,
    /// Print rows as JSON.
    #[arg(long)]
    json: bool,
}

/// One figure.
#[derive(Serialize)]
struct Row {
    suite: &'static str,
    /// What was measured.
    problem: String,
    /// The median, in `unit`.
    value: f64,
    unit: &'static str,
    /// The bar, in `unit`.
    bar: Option<f64>,
    /// The tenth and the ninetieth of a hundred.
    low: f64,
    high: f64,
    count: usize,
    machine: String,
    driver: String,
    versions: String,
    date: String,
}

/// Launches that are submitted before the stream is waited for, far fewer than the driver queues.
const BATCH: usize = 200;

/// Carries out `bench overhead`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let config = Config::from_environment()?;
    let Some(handle) = device::open("bench overhead", &config, arguments.json)? else {
        return Ok(Verdict::Good);
    };
    let mut rows = Rows::new(&handle, arguments.json);
    let problem = problem(1024, 1024, 1024, DType::Bf16, Order::RowMajor, Order::ColumnMajor)?;
    let way = handle.survey(&problem, &Limits::default())?;
    let way = way.ranked.first().context("no engine takes a bf16 product here")?;
    let kernels: Vec<KernelRef> = way.program.launches().map(|launch| launch.kernel.clone()).collect();
    let kernel = kernels.first().context("the program launches nothing")?;

    // Compiling and loading, each time into a cache that knows nothing. The driver keeps compiled PTX of its own, so only the first of
    // these is cold unless CUDA_CACHE_DISABLE=1 is set.
    let folder = std::env::temp_dir().join(format!("verdigris-overhead-{}", std::process::id()));
    let fresh = |disk: Option<DiskCache>| Loader { cache: Arc::new(ModuleCache::new(handle.context(), disk)), ..handle.loader().clone() };
    let timed = |loader: &Loader| -> Result<f64> {
        let begun = Instant::now();
        loader.kernel(kernel)?;
        Ok(ms(begun.elapsed()))
    };
    let compiled: Vec<f64> = (0..5).map(|_| timed(&fresh(None))).collect::<Result<_>>()?;
    rows.add("first compilation of a kernel", &compiled[..1], "ms", Some(400.0));
    rows.add("compilation of a kernel", &compiled, "ms", Some(400.0));
    timed(&fresh(Some(DiskCache::open(&folder)?)))?;
    let loaded = (0..20).map(|_| timed(&fresh(Some(DiskCache::open(&folder)?)))).collect::<Result<Vec<f64>>>();
    // Left behind, the folder would be no harm: it is in the system's folder for such.
    let _ = std::fs::remove_dir_all(&folder);
    rows.add("a kernel from the disk cache", &loaded?, "ms", Some(5.0));
    if let Some(Ok(pack)) = handle.pack() {
        let of_pack =
            || Loader { cache: Arc::new(ModuleCache::new(handle.context(), None).with_pack(pack.path())), ..handle.loader().clone() };
        let loaded = (0..20).map(|_| timed(&of_pack())).collect::<Result<Vec<f64>>>()?;
        rows.add("a kernel from the pack, which is opened anew", &loaded, "ms", Some(2.0));
    }

    execute(&handle, &problem, arguments.executions, &mut rows)?;
    let new_modules = if arguments.sizes == 0 { 0 } else { sizes(&handle, arguments, &mut rows)? };

    if !arguments.json {
        rows.print();
    }
    if arguments.record.as_ref().is_none_or(|path| path.as_os_str() != "none") {
        let mut record = Record::open(arguments.record.as_deref(), &handle.arch().name, &rows.date, "overhead")?;
        for row in &rows.list {
            record.write(&serde_json::to_string(row)?)?;
        }
        eprintln!("record: {}", record.path.display());
    }
    Ok(if new_modules == 0 { Verdict::Good } else { Verdict::Bad })
}

/// Host time of an execution with nobody listening and with metrics on, and in turns with these that of the driver alone: an empty kernel without parameters, launched
/// without a plan.
fn execute(handle: &Handle, problem: &Problem, executions: usize, rows: &mut Rows) -> Result<()> {
    // Before the plan is made, which keeps the handles of its metrics.
    let mut telemetry = Telemetry::builder().install()?;
    let plan = handle.plan(problem, &Limits::default())?;
    let (pool, stream) = (handle.pool(), handle.stream());
    let buffers = [pool.alloc_zeroed(stream, 2 << 20)?, pool.alloc_zeroed(stream, 2 << 20)?, pool.alloc_zeroed(stream, 2 << 20)?];
    let workspace = pool.alloc(stream, plan.workspace_bytes())?;
    let bindings = [0, 1, 2].map(|slot: usize| Binding::Buffer(buffers[slot].slice()));
    let (empty, _) = handle.loader().kernel(&KernelRef::new("bench_empty", empty_kernel))?;
    // A caller that executes often has its context current, as frameworks do.
    handle.context().make_current()?;
    let host_us = |submit: &dyn Fn() -> Result<()>| -> Result<f64> {
        stream.synchronize()?;
        let begun = Instant::now();
        for _ in 0..BATCH {
            submit()?;
        }
        Ok(begun.elapsed().as_secs_f64() * 1e6 / BATCH as f64)
    };
    let (mut unheard, mut heard, mut bare) = (Vec::new(), Vec::new(), Vec::new());
    for batch in 0..executions.div_ceil(BATCH) + 1 {
        telemetry.pause();
        let without = host_us(&|| Ok(plan.execute(stream, &bindings, workspace.slice())?))?;
        telemetry.resume();
        let with = host_us(&|| Ok(plan.execute(stream, &bindings, workspace.slice())?))?;
        telemetry.pause();
        let launch = host_us(&|| Ok(empty.launch_bare(stream)?))?;
        if batch > 0 {
            unheard.push(without);
            heard.push(with);
            bare.push(launch);
        }
    }
    stream.synchronize()?;
    rows.add(&format!("host time of an execution, {} launch(es)", plan.program().launch_count()), &unheard, "µs", Some(3.2));
    rows.add("the same with metrics on", &heard, "µs", None);
    let more: Vec<f64> = heard.iter().zip(&unheard).map(|(with, without)| with - without).collect();
    rows.add("what metrics add to it, batch by batch", &more, "µs", None);
    rows.add("host time of a bare launch: an empty kernel, the driver alone", &bare, "µs", None);
    Ok(())
}

/// A kernel that does nothing.
fn empty_kernel() -> KernelBody {
    build(Header { name: "bench_empty".to_owned(), target: Target::Sm80, threads: 32, ..Header::default() }, |_| {})
}

/// Plans random sizes once the catalog is loaded. Gives the number of modules that were loaded in spite of that.
fn sizes(handle: &Handle, arguments: &Arguments, rows: &mut Rows) -> Result<usize> {
    let targets = [Target::Sm80, Target::Sm89, Target::Sm90, Target::Sm90a].into_iter().filter(|target| handle.arch().runs(*target));
    let mut catalog: Vec<KernelRef> = targets.flat_map(verdigris_engines::catalog).collect();
    catalog.sort_by(|a, b| a.name().cmp(b.name()));
    catalog.dedup_by(|a, b| a.name() == b.name());
    let progress = ProgressBar::new(catalog.len() as u64);
    progress.set_style(
        ProgressStyle::with_template("{bar:30} {pos}/{len} kernels of the catalog {elapsed}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let begun = Instant::now();
    catalog.par_iter().try_for_each(|kernel| {
        let loaded = handle.loader().kernel(kernel);
        progress.inc(1);
        loaded.map(|_| ())
    })?;
    progress.finish_and_clear();
    rows.add(&format!("loading the catalog of {} kernels", catalog.len()), &[begun.elapsed().as_secs_f64()], "s", None);

    let before = handle.loader().cache.loaded_count();
    let mut random = Random::new(arguments.seed);
    let mut samples = Vec::new();
    let mut untaken = 0;
    for _ in 0..arguments.sizes {
        // Sizes of all magnitudes; one in four a multiple of 64, as most of those in use are.
        let extent = |random: &mut Random| {
            let magnitude = 3 + random.below(11);
            let size = 1 + random.below(1 << magnitude);
            if random.below(4) == 0 { size.next_multiple_of(64) } else { size }
        };
        let (m, n, k) = (extent(&mut random), extent(&mut random), extent(&mut random));
        let dtypes = [DType::Bf16, DType::F16, DType::F32, DType::E4m3, DType::I8, DType::F64];
        let dtype = dtypes[random.below(dtypes.len() as u64) as usize];
        let order = |random: &mut Random| if random.below(2) == 0 { Order::RowMajor } else { Order::ColumnMajor };
        let (a, b) = (order(&mut random), order(&mut random));
        let problem = problem(m, n, k, dtype, a, b)?;
        let begun = Instant::now();
        match handle.plan(&problem, &Limits::default()) {
            Ok(_) => samples.push(begun.elapsed().as_secs_f64() * 1e6),
            Err(verdigris::Error::NoEngine(_)) => untaken += 1,
            Err(error) => return Err(error.into()),
        }
    }
    let after = handle.loader().cache.loaded_count();
    rows.add("a plan for a new size, its kernels loaded", &samples, "µs", None);
    rows.add(
        &format!("modules loaded over {} random sizes ({untaken} taken by no engine)", arguments.sizes),
        &[(after - before) as f64],
        "",
        Some(0.0),
    );
    Ok(after - before)
}

/// A plain product of operands in these orders.
fn problem(m: u64, n: u64, k: u64, dtype: DType, a: Order, b: Order) -> Result<Problem> {
    let result = match dtype {
        DType::E4m3 => DType::Bf16,
        DType::I8 => DType::I32,
        other => other,
    };
    let leading = |order: Order, rows: u64, columns: u64| if order == Order::RowMajor { columns } else { rows };
    let gemm = GemmProblem {
        a: Matrix::with_leading_dimension(Slot(0), dtype, a, leading(a, m, k)),
        b: Matrix::with_leading_dimension(Slot(1), dtype, b, leading(b, k, n)),
        ..GemmProblem::packed(m, n, k, dtype, result)?
    };
    Ok(Problem::Gemm(gemm.canonical()?))
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// The figures so far, and the machine.
struct Rows {
    list: Vec<Row>,
    /// Each is printed as it is found.
    json: bool,
    machine: String,
    driver: String,
    versions: String,
    date: String,
}

impl Rows {
    fn new(handle: &Handle, json: bool) -> Rows {
        let properties = handle.context().properties();
        Rows {
            list: Vec::new(),
            json,
            machine: format!("{} {}", properties.name, properties.uuid),
            driver: format!("{}.{}", properties.driver_version / 1000, properties.driver_version % 1000 / 10),
            versions: format!("verdigris {} ({})", env!("CARGO_PKG_VERSION"), &verdigris_engines::SOURCE_HASH[..12]),
            date: now(),
        }
    }

    fn add(&mut self, what: &str, samples: &[f64], unit: &'static str, bar: Option<f64>) {
        let row = Row {
            suite: "overhead",
            problem: what.to_owned(),
            value: quantile(samples, 0.5),
            unit,
            bar,
            low: quantile(samples, 0.1),
            high: quantile(samples, 0.9),
            count: samples.len(),
            machine: self.machine.clone(),
            driver: self.driver.clone(),
            versions: self.versions.clone(),
            date: self.date.clone(),
        };
        if let (true, Ok(text)) = (self.json, serde_json::to_string(&row)) {
            say!("{text}");
        }
        self.list.push(row);
    }

    fn print(&self) {
        say!("{}; CUDA {}; {}\n", self.machine, self.driver, self.versions);
        use Align::{Left, Right};
        let head = [("what", Left), ("median", Right), ("10%", Right), ("90%", Right), ("unit", Left), ("bar", Right), ("of", Right)];
        let cells = |row: &Row| {
            let number = |value: f64| format!("{value:.2}");
            let bar = row.bar.map_or("-".to_owned(), |bar| format!("≤ {bar}"));
            vec![row.problem.clone(), number(row.value), number(row.low), number(row.high), row.unit.to_owned(), bar, row.count.to_string()]
        };
        table::print(&head, &self.list.iter().map(cells).collect::<Vec<_>>());
    }
}
