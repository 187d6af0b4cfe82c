//! Classes of kernels, each with the smallest case that leads to one of them; and `check classes`, which runs those on the device.
//!
//! A class is what kernels have in common but for types and sizes: `conv_gather_split`, for one. Where running every kernel would take too long
//! (twenty schedules on the interpreter, the sanitizers), one of each class runs.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use verdigris::{Mode, Pin};
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Engine;
use verdigris_engines::interpret::Parts;
use verdigris_graph::Problem;
use verdigris_kir::inst::{Class, Op};
use verdigris_kir::program::KernelRef;
use verdigris_reference::cases::Case;
use verdigris_reference::data::Distribution;
use verdigris_reference::kinds;

use crate::cases::{self, Prepared};
use crate::check;
use crate::check_graphs::{self, Executor};
use crate::verify_catalog::{self, Product};
use crate::verify_graphs::Job;
use verdigris_cli::table::{self, Align, alarm};
use verdigris_cli::{Verdict, say};

/// Options of `check classes`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only these classes; all, if none is named.
    classes: Vec<String>,
    /// Print the classes with their cases, and run none.
    #[arg(long)]
    list: bool,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// The smallest case that leads to kernels of some classes, on the way that does.
pub(crate) struct Representative {
    /// The classes, none of which an earlier case has.
    pub(crate) classes: Vec<String>,
    /// What is launched.
    pub(crate) kernels: Vec<KernelRef>,
    /// What runs.
    pub(crate) run: Run,
}

/// A product or a graph on engines.
pub(crate) enum Run {
    Product(Box<Product>),
    /// The job has one variant. On a device its part of that number is pinned.
    Graph(Job<'static>, usize),
}

impl Representative {
    /// Whether units beside the threads copy or multiply in any of the kernels.
    pub(crate) fn is_asynchronous(&self) -> bool {
        let mut found = false;
        for kernel in &self.kernels {
            kernel.build().for_each_inst(&mut |inst| found |= inst.op.class() == Class::Async || matches!(inst.op, Op::Wgmma { .. }));
        }
        found
    }

    /// The kinds of data that matter to what runs.
    pub(crate) fn kinds_that_matter(&self) -> BTreeSet<Distribution> {
        match &self.run {
            Run::Product(product) => kinds::that_matter_to_products(&product.case.problem),
            Run::Graph(job, _) => kinds::that_matter(&job.case.graph),
        }
    }

    /// The case, engine and setting, in words.
    pub(crate) fn words(&self) -> [String; 3] {
        match &self.run {
            Run::Product(product) => [product.case.id.clone(), product.engine.id().to_string(), product.knobs.to_string()],
            Run::Graph(job, part) => {
                let way = &job.variants[0].configs[*part];
                [job.case.id.clone(), way.engine.to_string(), way.knobs.to_string()]
            }
        }
    }
}

/// The words of a kernel's name in front of types and numbers, and whether sums go on elsewhere.
pub(crate) fn class(kernel: &str) -> String {
    let mut words = Vec::new();
    for word in kernel.split('_') {
        let letters = word.split(|c: char| c.is_ascii_digit()).next().unwrap_or_default();
        // A type or a size has one or two letters before its first digit.
        if letters.len() == word.len() || letters.len() > 2 {
            words.push(letters);
        }
        if letters.len() < word.len() {
            break;
        }
    }
    // Stages that threads write, in place of copies.
    words.extend(kernel.split('_').any(|word| word.starts_with("aligns")).then_some("aligns"));
    // Rows of two matrices by turns, stored by threads.
    words.extend(kernel.split('_').any(|word| word == "interleaved").then_some("interleaved"));
    words.extend(["split", "parts", "part"].into_iter().find(|way| kernel.split('_').any(|word| word == *way)));
    words.join("_")
}

/// For each class of kernels of the catalogs (of `only` these, if there are any) the smallest case that launches such a kernel, and the classes
/// to which no case leads. The corpus is tried on the first device alone, the problems of the catalogs on each.
///
/// # Errors
/// A case file that cannot be read, a graph that cannot be cut, or a name that is no class's.
pub(crate) fn representatives(
    engines: &[&'static dyn Engine],
    devices: &[Arch],
    only: &[String],
) -> Result<(Vec<Representative>, BTreeSet<String>)> {
    let catalogued: BTreeSet<String> = engines.iter().flat_map(|engine| verify_catalog::names(*engine)).collect();
    let mut wanted: BTreeSet<String> = catalogued.iter().map(|kernel| class(kernel)).collect();
    if let Some(name) = only.iter().find(|name| !wanted.contains(*name)) {
        bail!("there is no class `{name}`; `check classes --list` names those that there are");
    }
    wanted.retain(|class| only.is_empty() || only.contains(class));
    let mut search = Search { wanted, catalogued, found: Vec::new() };
    let mut products = cases::load(None, None, "")?;
    products.sort_by_key(|case| if let Problem::Gemm(gemm) = &case.problem { gemm.flops() as u64 } else { 0 });
    let mut graphs = check_graphs::load("")?;
    graphs.retain(|case| !case.device_only);
    graphs.sort_by_key(|case| case.graph.tensors.iter().map(|tensor| tensor.layout.span_elements()).sum::<u64>());
    let Some(first) = devices.first() else { bail!("no device") };
    for case in &products {
        engines.iter().for_each(|&engine| search.product(case, engine, first));
    }
    for case in &graphs {
        search.graph(case, engines, first)?;
    }
    // What needs more depth or another type than the corpus has.
    for arch in devices {
        for &engine in engines {
            for problem in verify_catalog::own_problems(engine.id().name)? {
                match problem {
                    verify_catalog::Problem::Product(case) => search.product(&case, engine, arch),
                    verify_catalog::Problem::Graph(case) => search.graph(&case, &[engine], arch)?,
                }
            }
        }
    }
    Ok((search.found, search.wanted))
}

struct Search {
    catalogued: BTreeSet<String>,
    wanted: BTreeSet<String>,
    found: Vec<Representative>,
}

impl Search {
    /// The classes of these kernels that nothing before led to.
    fn take<'n>(&mut self, kernels: impl Iterator<Item = &'n str>) -> Vec<String> {
        let classes: BTreeSet<String> = kernels.filter(|kernel| self.catalogued.contains(*kernel)).map(class).collect();
        classes.into_iter().filter(|class| self.wanted.remove(class)).collect()
    }

    fn product(&mut self, case: &Case, engine: &'static dyn Engine, arch: &Arch) {
        if self.wanted.is_empty() {
            return;
        }
        let Ok(candidate) = engine.accept(&case.problem, arch) else { return };
        for knobs in candidate.knobs().configs() {
            // A setting that is refused fails the cases; here it leads nowhere.
            let Ok(program) = candidate.program(knobs) else { continue };
            let classes = self.take(program.launches().map(|launch| launch.kernel.name()));
            if !classes.is_empty() {
                let product = Product { case: case.clone(), engine, knobs: knobs.clone(), sms: arch.sm_count };
                let kernels = program.launches().map(|launch| launch.kernel.clone()).collect();
                self.found.push(Representative { classes, kernels, run: Run::Product(Box::new(product)) });
            }
        }
    }

    fn graph(&mut self, case: &verdigris_reference::graph_cases::GraphCase, engines: &[&'static dyn Engine], arch: &Arch) -> Result<()> {
        if self.wanted.is_empty() {
            return Ok(());
        }
        let parts = Parts::all(&case.graph, arch, engines)?;
        if parts.variants() == 0 {
            return Ok(());
        }
        for (part, ways) in parts.configs.iter().enumerate() {
            for (number, way) in ways.iter().enumerate() {
                let classes = self.take(way.kernels());
                if !classes.is_empty() {
                    let variants = vec![parts.variant_with(part, number)];
                    let kernels = way.program.launches().map(|launch| launch.kernel.clone()).collect();
                    let kinds = [case.distribution; 2];
                    let job = Job { case: Cow::Owned(case.clone()), variants, kinds, sms: arch.sm_count, seed: 0 };
                    self.found.push(Representative { classes, kernels, run: Run::Graph(job, part) });
                }
            }
        }
        Ok(())
    }
}

/// Carries out `check classes`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let Some(executor) = Executor::open("check classes", "cuda", arguments.json)? else {
        return Ok(Verdict::Good);
    };
    let Executor::Gpu(handle) = &executor else { bail!("`cuda` is no GPU") };
    let engines: Vec<&'static dyn Engine> = verdigris_engines::engines().collect();
    let (chosen, missing) = representatives(&engines, std::slice::from_ref(handle.arch()), &arguments.classes)?;
    let mut rows = Vec::new();
    let mut faults: BTreeMap<String, String> = BTreeMap::new();
    for one in &chosen {
        let found = if arguments.list { None } else { judge(&executor, one)? };
        let [case, engine, knobs] = one.words();
        let units = if one.is_asynchronous() { "asynchronous" } else { "" };
        rows.push(vec![one.classes.join(", "), case, engine, knobs, units.to_owned()]);
        faults.extend(found.map(|what| (one.classes.join(", "), what)));
    }
    if arguments.json {
        let keys = ["classes", "case", "engine", "knobs", "units"];
        let object = |row: &Vec<String>| keys.iter().zip(row).map(|(key, cell)| ((*key).to_owned(), cell.clone().into())).collect();
        let list: Vec<serde_json::Value> = rows.iter().map(|row| serde_json::Value::Object(object(row))).collect();
        say!("{}", serde_json::json!({ "command": "check classes", "cases": list, "not_led_to": missing, "faults": faults }));
    } else {
        let head = [("class", Align::Left), ("case", Align::Left), ("engine", Align::Left), ("knobs", Align::Left), ("units", Align::Left)];
        table::print(&head, &rows);
        if !missing.is_empty() {
            say!("no case leads here to {}", missing.iter().cloned().collect::<Vec<_>>().join(", "));
        }
        for (class, what) in &faults {
            say!("{}", alarm(&format!("{class}: {what}")));
        }
        let ran = if arguments.list { "listed" } else { "run" };
        let count: usize = chosen.iter().map(|one| one.classes.len()).sum();
        say!("{count} classes, {} cases {ran}, {} faults", chosen.len(), faults.len());
    }
    // A chip need not have all classes; one that was asked for and did not run is no success.
    let is_short = !arguments.classes.is_empty() && !missing.is_empty();
    Ok(if faults.is_empty() && !is_short { Verdict::Good } else { Verdict::Bad })
}

/// What is wrong with the results of a case on a device.
fn judge(executor: &Executor, one: &Representative) -> Result<Option<String>> {
    let Executor::Gpu(handle) = executor else { bail!("the CPU device has no classes of kernels") };
    match &one.run {
        Run::Product(product) => {
            let way = match cases::way(product.engine, &product.case.problem, handle.arch(), &product.knobs) {
                Ok(way) => way,
                Err(refusal) => bail!("{}: {}", product.case.id, refusal.map_or_else(String::new, |refusal| refusal.to_string())),
            };
            check::execute(handle, &Prepared::new(product.case.clone())?, &way)
        }
        Run::Graph(job, part) => {
            let way = &job.variants[0].configs[*part];
            let pin = Pin { part: Some(*part), engine: way.engine.name.to_owned(), knobs: way.knobs.clone() };
            Ok(executor.judge(&job.case.graph, &job.case, &Mode::Pinned(vec![pin])).err())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_what_stands_before_types_and_sizes() {
        for (kernel, wanted) in [
            ("gemm_simt_f32_f32_ieee_128x128x16_d", "gemm_simt"),
            ("gemm_repack_copy_b16", "gemm_repack_copy"),
            ("conv_gather2_bf16_bf16_t_128x128_s4_c2_split_d", "conv_gather_split"),
            ("gemm_wgmma_bf16_bf16_kk_128x128_s4_c2_aligns3_parts", "gemm_wgmma_aligns_parts"),
            ("reduce_add_row32_k1r1_part", "reduce_add_row_part"),
            ("pool_max_sss_ndhwc_f32_f32", "pool_max_sss_ndhwc"),
        ] {
            assert_eq!(class(kernel), wanted);
        }
    }

    #[test]
    fn names_that_are_no_class_are_named() {
        let engines: Vec<&'static dyn Engine> = verdigris_engines::engines().collect();
        let error = representatives(&engines, &[Arch::virtual_device(4)], &["gemm_nothing".to_owned()]).err().expect("refuses");
        assert!(error.to_string().contains("`gemm_nothing`"), "{error}");
    }
}
