//! Where the instructions of shipped kernels come from: the line that a finding names first is the kernel's own, and not one of a verb that many
//! kernels share.

use std::collections::{BTreeMap, HashSet};

use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::inst::Op;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::tile::schedule::Schedule;

/// Where the loop of a test stands in this file.
const LINE: u32 = 79;

/// Where verbs stand that kernels share: what these emit names the kernel's line that called them.
const VERBS: [&str; 9] = [
    "verdigris-kir/src/face/",
    "verdigris-kir/src/tile/",
    "verdigris-kir/src/params.rs",
    "verdigris-engines/src/hopper/",
    "verdigris-engines/src/store/",
    "verdigris-engines/src/split_k/fixup.rs",
    "verdigris-engines/src/split_k/cluster.rs",
    "verdigris-engines/src/layout/batch.rs",
    // A verb that is called as a function pointer, whose caller is the standard library.
    "/library/",
];

/// The kernel's own lines that stand in verbs, with how many instructions each has.
fn lines_of_verbs(body: &KernelBody, found: &mut BTreeMap<String, usize>) {
    body.body.for_each_inst(&mut |inst| {
        let line = body.kernel_line(inst.loc);
        if VERBS.iter().any(|verbs| line.file.contains(verbs)) {
            *found.entry(format!("{}: {line}", body.name)).or_default() += 1;
        }
    });
}

#[test]
fn the_first_line_of_every_instruction_is_one_of_its_kernel() {
    let (mut seen, mut found) = (HashSet::new(), BTreeMap::new());
    for kernel in
        verdigris_engines::engines().flat_map(|engine| [Target::Sm80, Target::Sm90a].map(|target| engine.catalog(target))).flatten()
    {
        // Of kernels that differ in numbers alone, every third is enough: they are built by the same lines.
        if seen.insert(kernel.name().to_owned()) && seen.len() % 3 == 0 {
            lines_of_verbs(&kernel.build(), &mut found);
        }
    }
    assert!(seen.len() > 1000, "{} kernels", seen.len());
    assert!(found.is_empty(), "{} lines of verbs stand for kernels' own: {:#?}", found.len(), found.iter().take(20).collect::<Vec<_>>());
}

/// What a loop of the kernel's own runs, under a verb that covers it, or that hands it back.
#[test]
fn a_verb_that_covers_what_it_is_handed_is_found() {
    let schedule = |covers: bool| {
        build(Header { name: "covered".into(), threads: 32, ..Header::default() }, |k| {
            let y = k.output("y", 4);
            let schedule = Schedule::declare(k, false);
            // A function pointer carries no line of the kernel, as if a verb had called it.
            schedule.for_each(|work| {
                let thread = if covers { [k].map(Kernel::thread)[0] } else { k.thread() };
                k.st_global(y.at(work.tile * 32u32 + thread, 4), 0, thread);
            });
        })
    };
    for covers in [false, true] {
        let mut found = BTreeMap::new();
        lines_of_verbs(&schedule(covers), &mut found);
        assert_eq!(!found.is_empty(), covers, "{found:?}");
    }
}

#[test]
fn the_body_of_a_loop_has_its_own_lines_and_the_loop_has_its_line() {
    let body = build(Header { name: "lines".into(), threads: 32, ..Header::default() }, |k| {
        let y = k.output("y", 4);
        let schedule = Schedule::declare(k, false);
        schedule.for_each(|work| k.st_global(y.at(work.tile, 4), 0, k.constant(LINE)));
    });
    let mut stores = Vec::new();
    let mut of_schedule = 0;
    body.body.for_each_inst(&mut |inst| {
        let chain = body.location_chain(inst.loc);
        if matches!(inst.op, Op::St { .. }) {
            stores.push((chain.len(), chain[0].line));
        }
        of_schedule += usize::from(chain[0].file.contains("tile/schedule.rs") && chain.last().is_some_and(|own| own.line == LINE));
    });
    assert_eq!(stores, [(1, LINE)]);
    assert!(of_schedule > 5, "{of_schedule} instructions of the loop itself");
}
