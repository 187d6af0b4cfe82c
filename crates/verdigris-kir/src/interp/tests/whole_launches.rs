//! Several launches of one program, scratch, cooperative grids.

use super::*;
use crate::inst::{Atomic, Cache, Order, Scope};
use crate::interp::{Kernels, run};
use crate::program::{KernelRef, Launch, Program, Residency, Step};

/// Writes `value` into 32 words; lets the next launch start at its beginning.
fn writer() -> KernelBody {
    let mut body = kernel(32, 1, |k| {
        let y = k.output("y", 4);
        k.griddep_launch();
        k.st_global(y.at(k.thread(), 4), 0, k.thread() + 7u32);
    });
    body.name = "writer".into();
    body
}

fn reader(waits: bool, plant: &Plant) -> KernelBody {
    let mut body = kernel(32, 1, |k| {
        let x = k.input("x", 4);
        let y = k.output("y", 4);
        // A wait that no thread comes by is one that the verifier cannot tell from one that some do.
        k.when(k.thread().lt(if waits { 32 } else { 0 }), || k.griddep_wait());
        plant!(plant);
        let value = k.ld_global::<u32>(x.at(k.thread(), 4), 0);
        k.st_global(y.at(k.thread(), 4), 0, value);
    });
    body.name = "reader".into();
    body
}

fn launch(body: KernelBody, ctas: u32, overlap: bool, residency: Residency, args: Vec<Arg>) -> Step {
    let kernel = KernelRef::new(body.name.clone(), move || body.clone());
    Step::Launch(Launch { kernel, grid: [ctas, 1, 1], residency, overlap, args: args.into() })
}

fn pair(overlap: bool, waits: bool, plant: &Plant) -> Program {
    let mut program = Program::default();
    let between = program.add_scratch("between", 128);
    program.steps = vec![
        launch(writer(), 1, false, Residency::Any, vec![Arg::Pointer(between)]),
        launch(reader(waits, plant), 1, overlap, Residency::Any, vec![Arg::Pointer(between), pointer(0)]),
    ];
    program
}

fn run_pair(program: &Program, seed: u64) -> Result<Vec<u32>, Findings> {
    let mut memory = Memory::new();
    memory.add_unwritten(128);
    run(program, &Kernels::new(), &mut memory, &Options::schedule(seed))?;
    Ok(read_words(&mut memory, 0))
}

#[test]
fn launches_that_overlap_wait_for_each_other() {
    let want: Vec<u32> = (7..39).collect();
    for (overlap, waits) in [(false, false), (true, true)] {
        let program = pair(overlap, waits, &Plant::default());
        for seed in 0..SEEDS {
            assert_eq!(run_pair(&program, seed).unwrap_or_else(|findings| panic!("{findings}")), want);
        }
    }
    let plant = Plant::default();
    let program = pair(true, false, &plant);
    for seed in 0..SEEDS {
        let findings = run_pair(&program, seed).expect_err("the reader does not wait");
        assert!(matches!(findings.first().kind, FindingKind::Race | FindingKind::UnwrittenMemory), "{findings}");
    }
}

#[test]
fn a_launch_that_overlaps_and_never_waits_is_refused() {
    let mut body = kernel(32, 1, |k| k.st_global(k.output("y", 4).at(k.thread(), 4), 0, k.thread()));
    body.name = "never".into();
    let program = Program { steps: vec![launch(body, 1, true, Residency::Any, vec![pointer(0)])], ..Program::default() };
    let findings = run_pair(&program, 1).expect_err("it does not wait");
    assert_eq!(findings.first().kind, FindingKind::Launch);
    assert!(findings.first().message.contains("ahead of every griddepcontrol.wait"), "{findings}");
}

#[test]
fn scratch_starts_unwritten() {
    let plant = Plant::default();
    let mut program = Program::default();
    let between = program.add_scratch("between", 128);
    program.steps = vec![launch(reader(false, &plant), 1, false, Residency::Any, vec![Arg::Pointer(between), pointer(0)])];
    let findings = run_pair(&program, 1).expect_err("nothing wrote it");
    assert_eq!(findings.first().kind, FindingKind::UnwrittenMemory);
    program.steps.insert(0, Step::Fill { at: between, bytes: 128, value: 3 });
    assert_eq!(run_pair(&program, 1).unwrap_or_else(|findings| panic!("{findings}")), [0x0303_0303; 32]);
}

/// All CTAs meet at a counter.
fn meeting(plant: &Plant) -> KernelBody {
    kernel(32, 1, |k| {
        let count = k.in_out("count", 4);
        let ctas = k.scalar::<u32>("ctas");
        k.when(k.thread().eq(0u32), || {
            let _ = k.atom_global::<u32>(Atomic::Add, count.address(), 0, 1u32, Order::AcqRel(Scope::Gpu));
            plant!(plant);
            k.while_(|| k.ld_global_with::<u32>(count.address(), 0, Order::Acquire(Scope::Gpu), Cache::Default).lt(ctas), || {});
        });
    })
}

#[test]
fn ctas_wait_for_each_other_only_in_a_cooperative_launch() {
    let plant = Plant::default();
    for (residency, ok) in [(Residency::All, true), (Residency::Any, false)] {
        let args = vec![pointer(0), Arg::Scalar(crate::ir::Ty::U32, 12)];
        let program = Program { steps: vec![launch(meeting(&plant), 12, false, residency, args)], ..Program::default() };
        for seed in 0..SEEDS {
            let mut memory = Memory::new();
            memory.add(&[0; 4]);
            let options = Options { step_budget: 5_000, sms: 12, ..Options::schedule(seed) };
            match run(&program, &Kernels::new(), &mut memory, &options) {
                Ok(_) => assert!(ok),
                Err(findings) => {
                    assert!(!ok, "{findings}");
                    assert_eq!(findings.first().kind, FindingKind::Timeout);
                }
            }
        }
    }
}

#[test]
fn a_cooperative_launch_has_room_for_all_of_its_ctas_or_is_refused_with_the_numbers() {
    // One CTA an SM by its registers; two of them by shared memory, were it not for that.
    let body = meeting(&Plant::default());
    assert_eq!((body.min_ctas, body.ctas_per_sm()), (1, 1));
    let large = kernel(64, 2, |k| {
        let _ = k.shared("much", 200 << 10, 16);
    });
    assert_eq!(KernelBody { min_ctas: 4, ..large }.ctas_per_sm(), 1);
    let args = vec![pointer(0), Arg::Scalar(crate::ir::Ty::U32, 13)];
    let program = Program { steps: vec![launch(body, 13, false, Residency::All, args)], ..Program::default() };
    let mut memory = Memory::new();
    memory.add(&[0; 4]);
    let findings = run(&program, &Kernels::new(), &mut memory, &Options { sms: 12, ..Options::default() }).expect_err("one too many");
    assert_eq!(findings.first().kind, FindingKind::Launch);
    let body = meeting(&Plant::default());
    let said = format!(
        "13 CTAs wait for each other, and the chip surely holds 12 at once: 12 SMs (12 clusters of 1) with 1 CTAs each, of {} threads whose \
         registers are cut for 1 CTAs an SM, and of {} bytes of shared memory",
        body.threads, body.shared_bytes
    );
    assert!(findings.first().message.contains(&said), "{findings}");
}

#[test]
fn a_launch_that_does_not_fit_is_refused() {
    let body = meeting(&Plant::default());
    let program = Program { steps: vec![launch(body, 1, false, Residency::Any, vec![pointer(0)])], ..Program::default() };
    let mut memory = Memory::new();
    memory.add(&[0; 4]);
    let findings = run(&program, &Kernels::new(), &mut memory, &Options::default()).expect_err("one argument is missing");
    assert_eq!(findings.first().kind, FindingKind::Launch);
    assert!(findings.first().message.contains("1 arguments given, 2"), "{findings}");
}

#[test]
fn the_same_seed_repeats() {
    let program = pair(true, false, &Plant::default());
    for seed in 0..6 {
        assert_eq!(run_pair(&program, seed), run_pair(&program, seed));
    }
}

#[test]
fn a_first_launch_that_overlaps_waits_for_what_is_in_front_of_the_program() {
    let alone = |waits: bool, plant: &Plant, overlap: bool| Program {
        steps: vec![launch(reader(waits, plant), 1, overlap, Residency::Any, vec![pointer(0), pointer(1)])],
        ..Program::default()
    };
    let run_alone = |program: &Program, seed: u64| {
        let mut memory = Memory::new();
        memory.add(&[5; 128]);
        memory.add_unwritten(128);
        run(program, &Kernels::new(), &mut memory, &Options::schedule(seed)).map(|_| ())
    };
    let plant = Plant::default();
    for seed in 0..SEEDS {
        assert_eq!(run_alone(&alone(false, &Plant::default(), false), seed), Ok(()), "nothing overlaps");
        assert_eq!(run_alone(&alone(true, &Plant::default(), true), seed), Ok(()), "it waits");
        let findings = run_alone(&alone(false, &plant, true), seed).expect_err("it does not wait");
        let finding = findings.first();
        assert_eq!(finding.kind, FindingKind::Race, "{findings}");
        assert!(finding.message.contains("the one in front of the program, which may still write it"), "{findings}");
        assert!(finding.at.first().is_some_and(|line| line.line == plant.0.get()), "{findings}");
    }
}

#[test]
fn a_later_launch_knows_what_let_it_start_knew() {
    // The second launch reads, ahead of its wait, what no launch of the program writes; whether the program in front may still do so
    // depends on whether the first launch had waited before it let the second start.
    let first = |waits: bool| {
        let mut body = kernel(32, 1, |k| {
            let y = k.output("y", 4);
            if waits {
                k.griddep_wait();
                k.griddep_launch();
            } else {
                k.griddep_launch();
                k.griddep_wait();
            }
            k.st_global(y.at(k.thread(), 4), 0, k.thread());
        });
        body.name = "first".into();
        body
    };
    for waits in [true, false] {
        let second = launch(reader(false, &Plant::default()), 1, true, Residency::Any, vec![pointer(1), pointer(2)]);
        let program =
            Program { steps: vec![launch(first(waits), 1, true, Residency::Any, vec![pointer(0)]), second], ..Program::default() };
        for seed in 0..SEEDS {
            let mut memory = Memory::new();
            memory.add_unwritten(128);
            memory.add(&[5; 128]);
            memory.add_unwritten(128);
            match run(&program, &Kernels::new(), &mut memory, &Options::schedule(seed)) {
                Ok(_) => assert!(waits),
                Err(findings) => {
                    assert!(!waits, "{findings}");
                    assert_eq!(findings.first().kind, FindingKind::Race);
                    assert_eq!(findings.first().kernel, "reader");
                }
            }
        }
    }
}

#[test]
fn a_starved_role_runs_when_nobody_else_can() {
    // Thread 0 raises a flag, and the last one writes down what it saw of it: who of the two is starved comes second, whatever the seed.
    for threads in [64, 256] {
        let body = kernel(threads, 1, |k| {
            let (flag, saw) = (k.in_out("flag", 4), k.output("saw", 4));
            k.when(k.thread().eq(0u32), || {
                k.st_global_with(flag.address(), 0, k.constant(1u32), Order::Relaxed(Scope::Gpu), Cache::Default);
            });
            k.when(k.thread().eq(threads - 1), || {
                let up = k.ld_global_with::<u32>(flag.address(), 0, Order::Relaxed(Scope::Gpu), Cache::Default);
                k.st_global(saw.address(), 0, up);
            });
        });
        let program = Program { steps: vec![launch(body, 1, false, Residency::Any, vec![pointer(0), pointer(1)])], ..Program::default() };
        let saw = |options: &Options| {
            let mut memory = Memory::new();
            memory.add(&[0; 4]);
            memory.add_unwritten(4);
            run(&program, &Kernels::new(), &mut memory, options).unwrap_or_else(|findings| panic!("{findings}"));
            read_words(&mut memory, 1)[0]
        };
        let by = |starved: Option<u32>| -> Vec<u32> { (0..24).map(|seed| saw(&Options { starved, ..Options::schedule(seed) })).collect() };
        // Roles are counted round: with two of them, the third is the first.
        for (starved, wanted) in [(0, 0), (1, 1), (2, 0), (3, 1)] {
            assert_eq!(by(Some(starved)), [wanted; 24], "{threads} threads, role {starved} is starved");
        }
        let free = by(None);
        assert!(free.contains(&0) && free.contains(&1), "{threads} threads: {free:?}");
        for seed in 0..4 {
            assert_eq!(saw(&Options::adversarial(seed)), seed as u32 % 2, "{threads} threads, seed {seed}");
        }
    }
}
