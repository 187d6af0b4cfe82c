//! Launches that overlap, grids that meet, and launches that do not fit their kernel.

use crate::{OUTPUT_BYTES, SCHEDULES, memory, words};
use std::cell::Cell;
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::inst::Special;
use verdigris_kir::interp::{FindingKind, Findings, Kernels, Memory, Options, run};
use verdigris_kir::ir::{Access, KernelBody, MapDecl, MapType, Swizzle, Target, Ty};
use verdigris_kir::program::{Address, Arg, Fill, KernelRef, L2Promotion, Launch, MapSpec, Program, Residency, Step};
use verdigris_kir::tile::grid_barrier::GridBarrier;

pub(super) fn kernel(name: &str, threads: u32, cluster: u32, describe: impl for<'k> FnOnce(Kernel<'k>)) -> KernelBody {
    build(Header { name: name.into(), target: Target::Sm90a, threads, min_ctas: 1, cluster }, describe)
}

pub(super) fn launch(body: &KernelBody, ctas: u32, overlap: bool, residency: Residency, args: &[Arg]) -> Step {
    let made = body.clone();
    let kernel = KernelRef::new(body.name.clone(), move || made.clone());
    Step::Launch(Launch { kernel, grid: [ctas, 1, 1], residency, overlap, args: args.to_vec().into() })
}

pub(super) fn pointer(slot: usize) -> Arg {
    Arg::Pointer(Address::buffer(slot))
}

fn scalar(value: u64) -> Arg {
    Arg::Scalar(Ty::U32, value)
}

/// Writes 32 words; the next launch may start at its beginning.
fn writer(lines: &Cell<u32>) -> KernelBody {
    kernel("writer", 32, 1, |k| {
        let y = k.output("y", 4);
        k.griddep_launch();
        lines.set(line!() + 1);
        k.st_global(y.at(k.thread(), 4), 0, k.thread() + 7u32);
    })
}

/// A program under every schedule: what it finds, of these kinds, on these lines; or nothing.
#[track_caller]
fn every_schedule(program: &Program, step_budget: u64, expected: Option<(&[FindingKind], u32)>, check: impl Fn(&mut Memory)) {
    for seed in 0..SCHEDULES {
        let mut memory = memory();
        let options = Options { step_budget, ..Options::schedule(seed) };
        match (run(program, &Kernels::new(), &mut memory, &options), expected) {
            (Ok(_), None) => check(&mut memory),
            (Err(findings), Some((kinds, line))) => {
                let first = findings.first();
                assert!(kinds.contains(&first.kind), "{findings}");
                let lines: Vec<u32> = first.at.iter().take(1).chain(first.second.first()).map(|at| at.line).collect();
                assert!(lines.contains(&line), "planted on {line}: {findings}");
            }
            (Ok(_), Some(_)) => panic!("schedule {seed} found nothing"),
            (Err(findings), None) => panic!("false finding: {findings}"),
        }
    }
}

fn steps(steps: Vec<Step>) -> Program {
    Program { steps, ..Program::default() }
}

#[test]
fn a_launch_that_reads_what_the_one_before_writes() {
    let (written, read) = (Cell::new(0), Cell::new(0));
    let writer = writer(&written);
    let reader = kernel("reader", 32, 1, |k| {
        let (x, y, fault) = (k.input("x", 4), k.output("y", 4), k.scalar::<u32>("fault"));
        k.when(fault.eq(0u32), || k.griddep_wait());
        read.set(line!() + 1);
        let value = k.ld_global::<u32>(x.at(k.thread(), 4), 0);
        k.st_global(y.at(k.thread(), 4), 0, value);
    });
    for fault in [0, 1] {
        // The input holds numbers before, so that reading too early is a race and nothing else.
        let program = steps(vec![
            launch(&writer, 1, false, Residency::Any, &[pointer(0)]),
            launch(&reader, 1, true, Residency::Any, &[pointer(0), pointer(1), scalar(fault)]),
        ]);
        let kinds = [FindingKind::Race];
        let expected = (fault == 1).then_some((&kinds[..], read.get()));
        every_schedule(&program, 10_000, expected, |memory| assert_eq!(words(memory, 1, 32), (7..39).collect::<Vec<u32>>()));
    }
}

#[test]
fn a_launch_that_overwrites_what_the_one_before_reads() {
    let (read, written) = (Cell::new(0), Cell::new(0));
    let reader = kernel("reader", 32, 1, |k| {
        let (x, y) = (k.input("x", 4), k.output("y", 4));
        k.griddep_launch();
        read.set(line!() + 1);
        let value = k.ld_global::<u32>(x.at(k.thread(), 4), 0);
        k.st_global(y.at(k.thread(), 4), 0, value);
    });
    let writer = kernel("writer", 32, 1, |k| {
        let (x, fault) = (k.output("x", 4), k.scalar::<u32>("fault"));
        k.when(fault.eq(0u32), || k.griddep_wait());
        written.set(line!() + 1);
        k.st_global(x.at(k.thread(), 4), 0, k.constant(5u32));
    });
    for fault in [0, 1] {
        let program = steps(vec![
            launch(&reader, 1, false, Residency::Any, &[pointer(0), pointer(1)]),
            launch(&writer, 1, true, Residency::Any, &[pointer(0), scalar(fault)]),
        ]);
        let kinds = [FindingKind::Race];
        let expected = (fault == 1).then_some((&kinds[..], written.get()));
        every_schedule(&program, 10_000, expected, |memory| assert_eq!(words(memory, 1, 32), (0..32).collect::<Vec<u32>>()));
    }
}

#[test]
fn some_warps_wait_for_the_launch_before_and_others_do_not() {
    let (written, read) = (Cell::new(0), Cell::new(0));
    let writer = writer(&written);
    let reader = kernel("reader", 64, 1, |k| {
        let (x, y, fault) = (k.input("x", 4), k.output("y", 4), k.scalar::<u32>("fault"));
        k.when(k.warp().ge(fault), || k.griddep_wait());
        read.set(line!() + 1);
        let value = k.ld_global::<u32>(x.at(k.lane(), 4), 0);
        k.st_global(y.at(k.thread(), 4), 0, value);
    });
    for fault in [0, 1] {
        let program = steps(vec![
            launch(&writer, 1, false, Residency::Any, &[pointer(0)]),
            launch(&reader, 1, true, Residency::Any, &[pointer(0), pointer(1), scalar(fault)]),
        ]);
        let kinds = [FindingKind::Race];
        let expected = (fault == 1).then_some((&kinds[..], read.get()));
        every_schedule(&program, 10_000, expected, |_| {});
    }
}

/// Two programs, one behind the other on the same buffers: the second one's first launch starts under the first one's last.
#[test]
fn a_program_that_does_not_wait_for_the_one_in_front() {
    let (written, read) = (Cell::new(0), Cell::new(0));
    let front = steps(vec![launch(&writer(&written), 1, false, Residency::Any, &[pointer(0)])]);
    let reader = kernel("reader", 32, 1, |k| {
        let (x, y, fault) = (k.input("x", 4), k.output("y", 4), k.scalar::<u32>("fault"));
        k.when(fault.eq(0u32), || k.griddep_wait());
        read.set(line!() + 1);
        let value = k.ld_global::<u32>(x.at(k.thread(), 4), 0);
        k.st_global(y.at(k.thread(), 4), 0, value);
    });
    for fault in [0, 1] {
        // Its own slots are the other way round.
        let args = [pointer(1), pointer(0), scalar(fault)];
        let behind = Program { buffer_alignment_bytes: vec![4, 8], ..steps(vec![launch(&reader, 1, true, Residency::Any, &args)]) };
        let mut both = front.clone();
        both.append(&behind, &[1, 0]).expect("both slots are named");
        assert_eq!(both.buffer_alignment_bytes, [8, 4]);
        let kinds = [FindingKind::Race];
        every_schedule(&both, 10_000, (fault == 1).then_some((&kinds[..], read.get())), |memory| {
            assert_eq!(words(memory, 1, 3), [7, 8, 9]);
        });
        assert!(front.clone().append(&behind, &[1]).is_err(), "a slot without a place");
    }
}

/// Every CTA writes a part, all meet, and every CTA reads its neighbour's part. Faults: 1 waits for nobody, 2 arrives before its other
/// warps have written.
fn meeting(read: &Cell<u32>) -> KernelBody {
    kernel("meeting", 64, 1, |k| {
        let (y, fault) = (k.in_out("y", 4), k.scalar::<u32>("fault"));
        let barrier = GridBarrier::declare(k, "counter");
        let part = |cta| cta * 64u32 + (k.thread() ^ 32u32);
        k.st_global(y.at(k.cta() * 64u32 + k.thread(), 4), 0, k.cta());
        k.when(fault.ne(2u32), || k.bar_sync());
        k.when(k.thread().eq(0u32), || {
            barrier.arrive();
            barrier.wait(k.select(fault.eq(1u32), 0u32, 1u32));
        });
        k.bar_sync();
        let next = k.cta() + 1u32;
        let neighbour = k.select(next.eq(k.special(Special::GridX)), 0u32, next);
        read.set(line!() + 1);
        let value = k.ld_global::<u32>(y.at(part(neighbour), 4), 0);
        k.st_global(y.at(k.cta() * 64u32 + k.thread(), 4), 8192, value);
    })
}

#[test]
fn a_grid_that_meets() {
    // As many as the device of the schedules has SMs: a launch with more would be refused.
    const CTAS: u32 = 4;
    let read = Cell::new(0);
    let body = meeting(&read);
    for fault in [0, 1, 2] {
        let counter = Address::scratch(0);
        let args = [pointer(1), scalar(fault), Arg::Pointer(counter)];
        let mut program = Program::default();
        program.add_scratch("counter", 4);
        // Old numbers in the output, so that reading too early is a race and nothing else.
        program.steps = vec![
            Step::Fill { at: counter, bytes: 4, value: 0 },
            Step::Fill { at: Address::buffer(1), bytes: OUTPUT_BYTES, value: 0xEE },
            launch(&body, CTAS, false, Residency::All, &args),
        ];
        let kinds = [FindingKind::Race];
        let expected = (fault > 0).then_some((&kinds[..], read.get()));
        every_schedule(&program, 100_000, expected, |memory| {
            let all = words(memory, 1, OUTPUT_BYTES as usize / 4);
            for cta in 0..CTAS as usize {
                assert_eq!(all[2048 + 64 * cta..2048 + 64 * cta + 64], [(cta as u32 + 1) % CTAS; 64]);
            }
        });
    }
}

#[test]
fn a_grid_that_meets_without_being_resident() {
    let read = Cell::new(0);
    let body = meeting(&read);
    let counter = Address::scratch(0);
    let mut program = Program::default();
    program.add_scratch("counter", 4);
    program.steps = vec![
        Step::Fill { at: counter, bytes: 4, value: 0 },
        launch(&body, 12, false, Residency::Any, &[pointer(1), scalar(0), Arg::Pointer(counter)]),
    ];
    for seed in 0..SCHEDULES {
        let options = Options { step_budget: 5_000, ..Options::schedule(seed) };
        let findings = run(&program, &Kernels::new(), &mut memory(), &options).expect_err("the others never come");
        assert_eq!(findings.first().kind, FindingKind::Timeout, "{findings}");
    }
}

// ---- launches that do not fit --------------------------------------------------------------------------------------

fn refused(step: Step) -> Findings {
    let findings = run(&steps(vec![step]), &Kernels::new(), &mut memory(), &Options::default()).expect_err("it does not fit");
    assert_eq!(findings.first().kind, FindingKind::Launch, "{findings}");
    assert!(findings.first().at.is_empty() && findings.to_string().starts_with("launch: [launch]"), "{findings}");
    findings
}

#[track_caller]
fn says(findings: &Findings, said: &str) {
    assert!(findings.first().message.contains(said), "{said:?} is not in {findings}");
}

#[test]
fn arguments_that_do_not_fit() {
    let body = kernel("scale", 32, 1, |k| {
        let (y, factor, parts) = (k.output("y", 4), k.scalar::<f32>("factor"), k.divisor("parts"));
        k.st_global(y.at(parts.quotient(k.thread()), 4), 0, factor);
    });
    let good = [pointer(1), Arg::HostScalar(Ty::F32, 0), Arg::Divisor(3)];
    let any = |args: &[Arg]| launch(&body, 1, false, Residency::Any, args);
    says(&refused(any(&good[..2])), "2 arguments given, 3 parameters declared");
    says(&refused(any(&[good[0].clone(), scalar(1).clone(), Arg::Pointer(Address::buffer(0))])), "parameter parts");
    says(&refused(any(&good)), "parameter factor: host scalar 0 is not given");
    let far = Arg::Pointer(Address::buffer(7));
    says(&refused(any(&[far, scalar(0), Arg::Divisor(3)])), "buffer 7 of 2");
}

#[test]
fn a_grid_that_does_not_fit() {
    let body = kernel("pairs", 32, 2, |k| {
        let y = k.output("y", 4);
        k.st_global(y.at(k.cta() * 32u32 + k.thread(), 4), 0, k.thread());
    });
    says(&refused(launch(&body, 3, false, Residency::Any, &[pointer(1)])), "grid x 3 is not a multiple of the cluster size 2");
    says(&refused(launch(&body, 0, false, Residency::Any, &[pointer(1)])), "grid x is 0");
    says(&refused(Step::Fill { at: Address::buffer(1), bytes: OUTPUT_BYTES + 1, value: 0 }), "a fill or copy of 16385 bytes");
}

#[test]
fn a_tensor_map_that_the_driver_would_refuse() {
    let decl = MapDecl { ty: MapType::U32, rank: 2, box_dims: vec![32, 4], im2col: false, swizzle: Swizzle::None, access: Access::Read };
    let body = kernel("mapped", 32, 1, |k| {
        let map = k.tensor_map("map", decl.clone());
        k.prefetch_tensormap(&map);
    });
    let spec = |dims: [u64; 2], stride: u64| MapSpec {
        decl: decl.clone(),
        dims: dims.to_vec(),
        strides_bytes: vec![stride],
        element_strides: vec![1, 1],
        lower_corner: Vec::new(),
        upper_corner: Vec::new(),
        fill: Fill::Zero,
        l2: L2Promotion::None,
    };
    let with = |address: Address, spec: MapSpec| launch(&body, 1, false, Residency::Any, &[Arg::TensorMap(address, spec)]);
    says(&refused(with(Address::buffer(0), spec([64, 64], 200))), "parameter map");
    says(&refused(with(Address::buffer(0), spec([0, 64], 256))), "parameter map");
    let odd = Address { offset_bytes: 8, ..Address::buffer(0) };
    says(&refused(with(odd, spec([64, 64], 256))), "parameter map");
}

#[test]
fn a_kernel_that_does_not_verify_is_not_launched() {
    let body = kernel("wrong", 32, 1, |k| {
        let y = k.output("y", 4);
        k.st_global(y.at(k.thread(), 4), 0, k.var_unset::<u32>(Some("nothing")).get());
    });
    says(&refused(launch(&body, 1, false, Residency::Any, &[pointer(1)])), "does not verify");
}
