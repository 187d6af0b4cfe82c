//! The part of `verify` that leads to every kernel of the catalogs.
//!
//! Cases are made for problems' edges; most kernels of a catalog differ in tiles and types, which small cases do not ask for. So each engine has
//! a file of plain problems under `cases/catalog/`, in the format of the cases of its family, sized to whole tiles with a ragged one beside
//! them and two or three stages of depth; a family may have one for all of its engines. Of their settings, those are run that launch a kernel
//! which none before it launched. A kernel that no problem leads to has no reason to be in the catalog, and is named.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use rayon::prelude::*;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Engine, Knobs};
use verdigris_engines::interpret::{Parts, Variant};
use verdigris_kir::ir::Target;
use verdigris_kir::program::Program;
use verdigris_reference::cases::{self, Case};
use verdigris_reference::graph_cases::{self, GraphCase};

use crate::check_graphs;
use crate::classes::class;
use crate::verify_graphs::{self, Job};
use crate::verify_turns::{self, Turns};

/// The problems of each engine, or of every engine of a family, with the family in whose format they are written.
const PROBLEMS: &[(&str, &str, &str)] = &[
    ("gemm.mma", "gemm", include_str!("../../../cases/catalog/gemm.mma.toml")),
    ("gemm.wgmma", "gemm", include_str!("../../../cases/catalog/gemm.wgmma.toml")),
    ("gemm", "gemm", include_str!("../../../cases/catalog/gemm.toml")),
    ("conv.direct", "conv", include_str!("../../../cases/catalog/conv.direct.toml")),
    ("conv.patch", "conv", include_str!("../../../cases/catalog/conv.patch.toml")),
    ("conv.patch_gradient", "conv", include_str!("../../../cases/catalog/conv.patch_gradient.toml")),
    ("conv.implicit_gemm", "conv", include_str!("../../../cases/catalog/conv.implicit_gemm.toml")),
    ("conv.pointwise", "conv", include_str!("../../../cases/catalog/conv.pointwise.toml")),
    ("conv.unfolded", "conv", include_str!("../../../cases/catalog/conv.unfolded.toml")),
    ("conv.halo", "conv", include_str!("../../../cases/catalog/conv.halo.toml")),
    ("conv.halo", "conv", include_str!("../../../cases/catalog/conv.halo.filter.toml")),
    ("conv", "conv", include_str!("../../../cases/catalog/conv.toml")),
    ("map.simt", "pointwise", include_str!("../../../cases/catalog/map.simt.pointwise.toml")),
    ("map.simt", "movement", include_str!("../../../cases/catalog/map.simt.movement.toml")),
    ("map.simt", "append", include_str!("../../../cases/catalog/map.simt.append.toml")),
    ("reduce.rows", "reduction", include_str!("../../../cases/catalog/reduce.rows.toml")),
    ("reduce.short_rows", "reduction", include_str!("../../../cases/catalog/reduce.short_rows.toml")),
    ("reduce.simt", "reduction", include_str!("../../../cases/catalog/reduce.simt.toml")),
    ("scan.rows", "scan", include_str!("../../../cases/catalog/scan.rows.toml")),
    ("softmax.rows", "softmax", include_str!("../../../cases/catalog/softmax.rows.toml")),
    ("pool.blocks", "pool", include_str!("../../../cases/catalog/pool.blocks.toml")),
    ("pool.direct", "pool", include_str!("../../../cases/catalog/pool.direct.toml")),
    ("pool.flat", "pool", include_str!("../../../cases/catalog/pool.flat.toml")),
    ("pool.planes", "pool", include_str!("../../../cases/catalog/pool.planes.toml")),
    ("pool.windows", "pool", include_str!("../../../cases/catalog/pool.windows.toml")),
    ("resample.gather", "resample", include_str!("../../../cases/catalog/resample.gather.toml")),
    ("norm.rows", "norm", include_str!("../../../cases/catalog/norm.rows.toml")),
    ("norm.groups", "norm", include_str!("../../../cases/catalog/norm.groups.toml")),
    ("norm.strided", "norm", include_str!("../../../cases/catalog/norm.strided.toml")),
    ("batch_norm.channels", "batch_norm", include_str!("../../../cases/catalog/batch_norm.channels.toml")),
    ("attention.forward", "attention", include_str!("../../../cases/catalog/attention.forward.toml")),
    ("attention.decode", "attention", include_str!("../../../cases/catalog/attention.decode.toml")),
    ("attention.mma", "attention", include_str!("../../../cases/catalog/attention.mma.toml")),
    ("attention.backward", "attention", include_str!("../../../cases/catalog/attention.backward.toml")),
    ("attention.simt", "attention", include_str!("../../../cases/catalog/attention.simt.toml")),
];

/// SMs of the devices on which problems are tried after those of the seed: some settings are offered where many SMs would stand idle.
const LARGER_DEVICES_SMS: [u32; 3] = [8, 12, 16];
/// SMs of the devices on which problems are tried first, with kernels that have turns: as many as a cluster has CTAs, so that one takes all tiles.
const SMALL_DEVICES_SMS: [u32; 3] = [1, 2, 4];
/// The most variants of a graph in one job: few enough that jobs can be shared out, and enough that the reference, which a job evaluates for each of its
/// two kinds of data, is not most of the work.
const VARIANTS_OF_A_JOB: usize = 16;

/// What is said of a kernel that no problem leads to.
pub(crate) const UNREACHED: &str = "no problem leads to it: the catalog can do without it, or cases/catalog lacks a problem";

/// A product on an engine by one setting.
pub(crate) struct Product {
    pub(crate) case: Case,
    pub(crate) engine: &'static dyn Engine,
    pub(crate) knobs: Knobs,
    pub(crate) sms: u32,
}

/// What leads to the kernels of catalogs.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) products: Vec<Product>,
    pub(crate) graphs: Vec<Job<'static>>,
    /// The kernels that are led to.
    pub(crate) kernels: BTreeSet<String>,
    /// Those that nothing leads to, with their engine.
    pub(crate) unreached: BTreeSet<(&'static str, String)>,
    /// Kernels with turns whose CTAs get too few tiles in every run, with the problem that leads to each and what is asked there.
    pub(crate) short: BTreeMap<String, (String, Turns)>,
    /// Classes of kernels with turns, and those of them of which one runs with a ragged last group of tiles.
    pub(crate) with_turns: BTreeSet<String>,
    pub(crate) ragged: BTreeSet<String>,
    /// Of kernels that are [asked together](verify_turns::asked_together), those of which one goes round often enough.
    round: BTreeSet<String>,
}

/// What a program must be like to be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wish {
    /// One of its kernels with turns goes round often enough.
    GoesRound,
    /// Anything.
    Any,
    /// One of its kernels has a ragged last group of tiles, as no other kernel of the class has.
    Ragged,
}

/// The kernels that are wanted still, and how.
type Wanted<'w> = (&'w mut BTreeSet<String>, Wish);

impl Plan {
    /// What is wrong with the problems of whole catalogs, each with the kernel or the class that it is about: kernels that nothing leads to, kernels with turns
    /// whose CTAs get too few in every run, and classes of these without a ragged last group of tiles.
    pub(crate) fn faults(&self) -> Vec<(&'static str, String, String)> {
        let unreached = self.unreached.iter().map(|(engine, kernel)| (*engine, kernel.clone(), UNREACHED.to_owned()));
        let short = self.short.iter().map(|(kernel, (case, turns))| {
            ("", kernel.clone(), format!("its CTAs get too few tiles or steps in every run; of {case}: {turns:?}"))
        });
        let even = self.with_turns.difference(&self.ragged);
        let even = even.map(|class| ("", class.clone(), "no run of the class has a ragged last group of tiles".to_owned()));
        unreached.chain(short).chain(even).collect()
    }

    fn join(mut self, other: Plan) -> Plan {
        self.products.extend(other.products);
        self.graphs.extend(other.graphs);
        self.kernels.extend(other.kernels);
        self.unreached.extend(other.unreached);
        self.short.extend(other.short);
        self.with_turns.extend(other.with_turns);
        self.ragged.extend(other.ragged);
        self.round.extend(other.round);
        // Engines share kernels, such as those that repack operands.
        self.unreached.retain(|(_, kernel)| !self.kernels.contains(kernel));
        self
    }

    /// Whether a program for a device of so many SMs is to run: it leads to a kernel that is wanted as it is wished for, and is the first.
    fn takes(&mut self, (wanted, wish): &mut Wanted<'_>, problem: &str, program: &Program, sms: u32) -> bool {
        let kernels = || program.launches().map(|launch| launch.kernel.name());
        let even = |kernel| self.with_turns.contains(&class(kernel)) && !self.ragged.contains(&class(kernel));
        let is_candidate = if *wish == Wish::Ragged { kernels().any(even) } else { kernels().any(|kernel| wanted.contains(kernel)) };
        if !is_candidate {
            return false;
        }
        let turns = verify_turns::of_program(program, sms);
        let goes_round = |kernel: &str| turns.iter().filter(|(name, _)| *name == kernel).all(|(_, turns)| turns.goes_round());
        let suits = match wish {
            Wish::GoesRound => turns.iter().any(|(kernel, _)| wanted.contains(*kernel) && goes_round(kernel)),
            Wish::Any => true,
            Wish::Ragged => turns.iter().any(|(kernel, turns)| turns.is_ragged && even(kernel)),
        };
        if !suits {
            return false;
        }
        for (kernel, turns) in turns.iter().filter(|(_, turns)| !turns.is_shared_out) {
            self.with_turns.insert(class(kernel));
            if turns.is_ragged {
                self.ragged.insert(class(kernel));
            }
            if goes_round(kernel) {
                self.round.insert(verify_turns::asked_together(kernel));
            } else if *wish == Wish::Any && wanted.contains(*kernel) {
                self.short.insert((*kernel).to_owned(), (problem.to_owned(), *turns));
            }
        }
        // What goes round here too seldom may do so elsewhere.
        for kernel in kernels().filter(|kernel| *wish != Wish::GoesRound || goes_round(kernel)) {
            if wanted.remove(kernel) {
                self.kernels.insert(kernel.to_owned());
            }
        }
        true
    }
}

/// A problem of a catalog.
pub(crate) enum Problem {
    Product(Box<Case>),
    Graph(GraphCase),
}

/// The names of the kernels that an engine may launch on any chip.
pub(crate) fn names(engine: &dyn Engine) -> BTreeSet<String> {
    let targets = [Target::Sm80, Target::Sm89, Target::Sm90, Target::Sm90a];
    targets.into_iter().flat_map(|target| engine.catalog(target)).map(|kernel| kernel.name().to_owned()).collect()
}

/// What leads to every kernel of the engines' catalogs whose name contains `wanted`. The seed chooses the devices, and which of several settings
/// leads to a kernel.
pub(crate) fn plan(engines: &[&'static dyn Engine], wanted: &str, seed: u64) -> Result<Plan> {
    let plans: Vec<Plan> = engines.par_iter().map(|&engine| of_engine(engine, wanted, seed)).collect::<Result<_>>()?;
    Ok(plans.into_iter().fold(Plan::default(), Plan::join))
}

/// The problems that were made for an engine, or for the engines of its family.
pub(crate) fn own_problems(engine: &str) -> Result<Vec<Problem>> {
    Ok(own_problems_and_families(engine)?.0)
}

/// The problems of an engine, and the families of cases that they are like.
fn own_problems_and_families(engine: &str) -> Result<(Vec<Problem>, BTreeSet<&'static str>)> {
    let mut list = Vec::new();
    let family_of_engine = engine.split('.').next().unwrap_or_default();
    // An engine's own come first, for they are sized to its tiles.
    let own = PROBLEMS.iter().filter(|(of, ..)| *of == engine);
    let shared = PROBLEMS.iter().filter(|(of, ..)| *of == family_of_engine);
    let mut families = BTreeSet::new();
    for &(of, family, text) in own.chain(shared) {
        families.insert(family);
        let told = || format!("the problems of {of} under cases/catalog");
        if family == "gemm" {
            list.extend(
                cases::load(&format!("catalog/{of}"), text).with_context(told)?.into_iter().map(|case| Problem::Product(Box::new(case))),
            );
        } else {
            let rename = |case: GraphCase| Problem::Graph(GraphCase { id: format!("catalog/{of}/{}", case.id), ..case });
            list.extend(graph_cases::load(family, text).with_context(told)?.into_iter().map(rename));
        }
    }
    Ok((list, families))
}

fn problems(engine: &str) -> Result<Vec<Problem>> {
    let (mut list, families) = own_problems_and_families(engine)?;
    // What is left may be led to by cases that were made for other reasons.
    let of_family = |case: &GraphCase| !case.device_only && families.iter().any(|family| case.id.starts_with(&format!("{family}/")));
    list.extend(check_graphs::load("")?.into_iter().filter(of_family).map(Problem::Graph));
    Ok(list)
}

fn of_engine(engine: &'static dyn Engine, wanted: &str, seed: u64) -> Result<Plan> {
    let mut wanted: BTreeSet<String> = names(engine).into_iter().filter(|name| name.contains(wanted)).collect();
    let mut plan = Plan::default();
    let problems = problems(engine.id().name)?;
    let small = || SMALL_DEVICES_SMS.into_iter();
    let of_seed = (0..5).map(|turn| verify_graphs::sms(seed.wrapping_add(turn)));
    let any = of_seed.chain(LARGER_DEVICES_SMS).map(|sms| (sms, Wish::Any));
    let all = small().map(|sms| (sms, Wish::GoesRound)).chain(any).chain(small().map(|sms| (sms, Wish::Ragged)));
    for (sms, wish) in all {
        let arch = Arch::virtual_device(sms);
        for (number, problem) in problems.iter().enumerate() {
            let is_done = if wish == Wish::Ragged { plan.ragged == plan.with_turns } else { wanted.is_empty() };
            if is_done {
                break;
            }
            let turn = seed.wrapping_add(number as u64);
            match problem {
                Problem::Product(case) => of_product(&mut plan, (&mut wanted, wish), case, engine, &arch, turn),
                Problem::Graph(case) => of_graph(&mut plan, (&mut wanted, wish), case, engine, &arch, turn)?,
            }
        }
    }
    let Plan { short, round, .. } = &mut plan;
    short.retain(|kernel, _| !round.contains(&verify_turns::asked_together(kernel)));
    plan.unreached = wanted.into_iter().map(|kernel| (engine.id().name, kernel)).collect();
    Ok(plan)
}

/// All of a list, from a place that `turn` counts to.
fn rotated<T>(list: &[T], turn: u64) -> impl Iterator<Item = (usize, &T)> {
    let from = (turn % list.len().max(1) as u64) as usize;
    list.iter().enumerate().cycle().skip(from).take(list.len())
}

fn of_product(plan: &mut Plan, mut wanted: Wanted<'_>, case: &Case, engine: &'static dyn Engine, arch: &Arch, turn: u64) {
    let Ok(candidate) = engine.accept(&case.problem, arch) else { return };
    let space = candidate.knobs();
    for (_, knobs) in rotated(space.configs(), turn) {
        // A setting that is refused fails the cases; here it leads nowhere.
        let Ok(program) = candidate.program(knobs) else { continue };
        if plan.takes(&mut wanted, &case.id, &program, arch.sm_count) {
            plan.products.push(Product { case: case.clone(), engine, knobs: knobs.clone(), sms: arch.sm_count });
        }
    }
}

fn of_graph(plan: &mut Plan, mut wanted: Wanted<'_>, case: &GraphCase, engine: &'static dyn Engine, arch: &Arch, turn: u64) -> Result<()> {
    let parts = Parts::all(&case.graph, arch, &[engine]).with_context(|| case.id.clone())?;
    if parts.variants() == 0 {
        return Ok(());
    }
    let mut variants: Vec<Variant> = Vec::new();
    for (part, ways) in parts.configs.iter().enumerate() {
        for (number, way) in rotated(ways, turn) {
            if plan.takes(&mut wanted, &case.id, &way.program, arch.sm_count) {
                variants.push(parts.variant_with(part, number));
            }
        }
    }
    let kinds = verify_graphs::kinds_of(case, turn);
    let job =
        |variants: &[Variant]| Job { case: Cow::Owned(case.clone()), variants: variants.to_vec(), kinds, sms: arch.sm_count, seed: turn };
    plan.graphs.extend(variants.chunks(VARIANTS_OF_A_JOB).map(job));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::Prepared;
    use crate::classes::{self, Run};
    use crate::verify::{Work, execute};
    use crate::verify_kinds::DEVICES_SMS;
    use verdigris_kir::interp::Kernels;

    #[test]
    #[cfg_attr(
        debug_assertions,
        ignore = "takes minutes without optimization: `verify`, which plans by another seed each day, says which kernels nothing leads to"
    )]
    fn kernels_of_the_catalogs_are_led_to() {
        let engines: Vec<&'static dyn Engine> = verdigris_engines::engines().collect();
        for seed in [0, 3] {
            let plan = plan(&engines, "", seed).expect("the problems are read");
            assert_eq!(plan.faults(), [], "with seed {seed}");
            let all: BTreeSet<String> = engines.iter().flat_map(|engine| names(*engine)).collect();
            assert_eq!(plan.kernels.len(), all.len(), "with seed {seed}");
        }
    }

    #[test]
    fn a_plan_that_leaves_something_out_says_so() {
        assert_eq!(Plan::default().faults(), []);
        let plan = Plan {
            unreached: BTreeSet::from([("gemm.mma", "lost".to_owned())]),
            with_turns: BTreeSet::from(["even".to_owned(), "ragged".to_owned()]),
            ragged: BTreeSet::from(["ragged".to_owned()]),
            ..Plan::default()
        };
        let faults = plan.faults();
        assert_eq!(faults[0], ("gemm.mma", "lost".to_owned(), UNREACHED.to_owned()));
        assert!(faults.len() == 2 && faults[1].1 == "even" && faults[1].2.contains("ragged last group"), "{faults:?}");
    }

    #[test]
    fn one_kernel_of_each_class_is_right_under_twenty_schedules() {
        let engines: Vec<&'static dyn Engine> = verdigris_engines::engines().collect();
        let devices: Vec<Arch> = DEVICES_SMS.map(Arch::virtual_device).into();
        let (chosen, missing) = classes::representatives(&engines, &devices, &[]).expect("the cases are read");
        assert!(missing.is_empty(), "no case launches a kernel of the classes {missing:?}");
        let decoded = Kernels::new();
        let faults: Vec<String> = (chosen.par_iter())
            .flat_map_iter(|one| match &one.run {
                Run::Product(product) => {
                    let prepared = Prepared::new(product.case.clone()).expect("prepares");
                    let (knobs, kind) = (product.knobs.clone(), product.case.distribution);
                    let work = Work { case: 0, engine: product.engine, knobs, seed: 0, sms: product.sms, kind };
                    let fault = execute(&prepared, &work, &decoded, 20).fault;
                    fault
                        .map(|fault| format!("{} {} {}: {fault}", product.case.id, product.engine.id(), product.knobs))
                        .into_iter()
                        .collect()
                }
                Run::Graph(job, _) => {
                    let outcome = verify_graphs::run(std::slice::from_ref(job), 20, &|_| {}, false);
                    outcome.faults.iter().map(|fault| format!("{fault:?}")).collect::<Vec<_>>()
                }
            })
            .collect();
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }
}
