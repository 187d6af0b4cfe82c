//! Programs whose numbers, lists and grids are known at execution, on the fake driver: what is submitted, and what is refused before anything is.

use std::sync::Arc;

use verdigris_kir::execution::{GridFunction, HostValue, Known, TensorList};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::Target;
use verdigris_kir::params::{AtExecution, HostNumber, Source, Value, ValueOf, Write};
use verdigris_kir::program::{Address, Base, KernelRef, Launch, Program, Step};
use verdigris_kir::tile::list::{ENTRIES_OF_A_LAUNCH, List, add_list};
use verdigris_tensor::{BindingError, BindingRule};

use crate::fake::{self, PARAMETER_BYTES, Recorded};
use crate::*;

verdigris_kir::parameters! {
    /// A seed, an offset and a factor.
    struct Random / RandomArguments of Source as source {
        seed: Value<u64> = *source,
        offset: AtExecution<u32>,
        factor: AtExecution<f32>,
        y: Write = 8,
    }
}

/// As many CTAs as host scalar 1 says, at most eight.
fn random(source: Source, seed: ValueOf<u64>) -> Program {
    let kernel = KernelRef::new(format!("test_random_{source:?}"), move || {
        let header = Header { name: format!("test_random_{source:?}"), target: Target::Sm80, threads: 32, ..Header::default() };
        build(header, |k| {
            let Random { seed, y, .. } = Random::declare(k, &source);
            k.st_global(y.at(k.thread(), 8), 0, seed);
        })
    });
    let args = RandomArguments { seed, offset: HostNumber::Bound(1), factor: HostNumber::Bound(2), y: Address::buffer(0) };
    let mut program = Program { buffer_alignment_bytes: vec![1, 1], ..Program::default() };
    let grid = GridFunction::new("as told", |known: &Known<'_>| [known.unsigned(1).unwrap_or(0) as u32, 1, 1]);
    program.launch_sized(Launch::new(kernel, [8, 1, 1], args.bound(&source)), grid);
    program
}

fn load(program: &Program) -> (LoadedProgram, Context, Stream, Pool) {
    let (context, stream, pool) = fake::gpu();
    let cache = Arc::new(ModuleCache::new(&context, None));
    let loader = Loader { cache, pool: pool.clone(), source_hash: [0; 32], options: CompileOptions::default() };
    let loaded = loader.load(program, &stream).expect("loads");
    (loaded, context, stream, pool)
}

fn word(launch: &Recorded, parameter: usize) -> u64 {
    launch.parameters[parameter].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

/// A seed that no f64 holds.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

#[test]
fn integers_reach_the_kernel_whole_and_the_grid_follows() {
    let (loaded, _context, stream, pool) = load(&random(Source::Argument, ValueOf::Bound(0)));
    let y = pool.alloc(&stream, 256).expect("allocates");
    let buffers = [y.slice(), y.slice()];
    let run = |scalars: [HostValue; 3]| {
        PARAMETER_BYTES.set(vec![8, 4, 4, 8]);
        fake::launches();
        let bindings =
            Bindings { buffers: &buffers, workspace: y.slice().part(0, 0).expect("nothing"), host_scalars: &scalars, lists: &[] };
        loaded.execute(&stream, &bindings).map(|()| fake::launches())
    };
    let launches = run([SEED.into(), 5u64.into(), 0.1.into()]).expect("executes");
    let [launch] = &launches[..] else { panic!("{launches:?}") };
    assert_eq!((launch.grid, word(launch, 0), word(launch, 1)), ([5, 1, 1], SEED, 5));
    assert_eq!(word(launch, 2), u64::from(0.1f32.to_bits()));
    assert!(run([SEED.into(), 0u64.into(), 0.1.into()]).expect("executes").is_empty(), "a grid of no CTAs is no launch");

    let beyond = run([SEED.into(), 9u64.into(), 0.1.into()]).expect_err("beyond the declared grid");
    let said = "launch of `test_random_Argument`: grid function `as told` gives 9 CTAs along x, at most 8 are declared";
    assert!(matches!(beyond, Error::Launch(LaunchError::GridFunction { .. })) && beyond.to_string() == said, "{beyond}");
    let refused = |scalars| {
        let Error::Binding(error) = run(scalars).expect_err("does not suit") else { panic!("a binding does not suit") };
        error
    };
    let unfit = refused([1.5.into(), 1u64.into(), 0.1.into()]);
    let name = "host scalar 0, parameter seed of test_random_Argument";
    assert_eq!(unfit, BindingError::new(name, "a u64", "1.5", BindingRule::Number));
    let unfit = refused([SEED.into(), (1u64 << 32).into(), 0.1.into()]);
    assert_eq!((unfit.wanted.as_str(), unfit.given.as_str(), unfit.rule), ("a u32", "4294967296", BindingRule::Number));
    let launches = run([SEED.into(), 1u64.into(), 3u64.into()]).expect("an integer is a real number");
    assert_eq!(word(&launches[0], 2), u64::from(3.0f32.to_bits()));
    assert_eq!(fake::launches(), [], "nothing is submitted where anything is refused");
}

#[test]
fn a_value_in_device_memory_is_a_pointer_that_a_captured_graph_keeps() {
    let at = Address { offset_bytes: 16, ..Address::buffer(1) };
    let (loaded, _context, stream, pool) = load(&random(Source::Memory, ValueOf::Memory(at)));
    let (y, seeds) = (pool.alloc(&stream, 256).expect("allocates"), pool.alloc(&stream, 24).expect("allocates"));
    assert_eq!(loaded.slots()[1].alignment_bytes, 8);
    let scalars = [0.0.into(), 1u64.into(), 0.1.into()];
    let run = |seeds: DeviceSlice<'_>| {
        let buffers = [y.slice(), seeds];
        let bindings =
            Bindings { buffers: &buffers, workspace: y.slice().part(0, 0).expect("nothing"), host_scalars: &scalars, lists: &[] };
        PARAMETER_BYTES.set(vec![8, 4, 4, 8]);
        fake::launches();
        loaded.execute(&stream, &bindings).map(|()| fake::launches())
    };
    let launches = run(seeds.slice()).expect("executes, though host scalar 0 is no seed");
    assert_eq!(word(&launches[0], 0), seeds.address() + 16);
    let odd = run(seeds.slice().part(4, 20).expect("within")).expect_err("a u64 is not at 4 bytes");
    assert!(matches!(&odd, Error::Binding(error) if error.rule == BindingRule::Alignment), "{odd}");
}

verdigris_kir::parameters! {
    /// A list.
    struct Listed / ListedArguments of () as _spec { tensors: List, }
}

fn listed(most: u32) -> Program {
    let kernel = KernelRef::new("test_listed", || {
        let header = Header { name: "test_listed".into(), target: Target::Sm80, threads: 32, ..Header::default() };
        build(header, |k| {
            let Listed { tensors } = Listed::declare(k, &());
            let tensor = tensors.at(k.cta());
            k.when(k.thread().widen().lt(tensor.extent), || k.st_global(tensor.start.at(k.thread(), 4), 0, k.constant(0u32)));
        })
    });
    let mut program = Program::default();
    let tensors = add_list(&mut program, TensorList { name: "parameters", most, element_bytes: 4, alignment_bytes: 16 });
    let grid = GridFunction::new("by length", move |known: &Known<'_>| [known.list_length(tensors.list).unwrap_or(0) as u32, 1, 1]);
    program.launch_sized(Launch::new(kernel, [most, 1, 1], ListedArguments { tensors }.bound(&())), grid);
    program
}

#[test]
fn the_table_of_a_list_is_carried_by_launches() {
    let most = ENTRIES_OF_A_LAUNCH + 2;
    let (loaded, _context, stream, pool) = load(&listed(most));
    assert_eq!((loaded.launch_count(), loaded.lists()[0].name), (3, "parameters"));
    let memory = pool.alloc(&stream, 1024).expect("allocates");
    let workspace = pool.alloc(&stream, loaded.workspace_bytes()).expect("allocates");
    let tensor = |number: u32| memory.slice().part(u64::from(number % 4) * 16, 4 * u64::from(number % 5)).expect("within");
    let run = |lists: &[&[DeviceSlice<'_>]], sizes: Vec<usize>| {
        PARAMETER_BYTES.set(sizes);
        fake::launches();
        let bindings = Bindings { buffers: &[], workspace: workspace.slice(), host_scalars: &[], lists };
        loaded.execute(&stream, &bindings).map(|()| fake::launches())
    };
    // The fake reads each launch's parameters by these sizes; the last launch has but a count and a table.
    let entries = ENTRIES_OF_A_LAUNCH as usize;
    let sizes = || [8, 4].into_iter().chain([8; 2 * ENTRIES_OF_A_LAUNCH as usize]).collect::<Vec<usize>>();
    let tensors: Vec<DeviceSlice<'_>> = (0..most - 1).map(tensor).collect();
    let launches = run(&[&tensors], vec![8, 4]).expect("executes");
    assert_eq!(launches.iter().map(|launch| launch.grid[0]).collect::<Vec<_>>(), [1, 1, most - 1]);
    assert_eq!((word(&launches[0], 1), word(&launches[1], 1)), (u64::from(ENTRIES_OF_A_LAUNCH), 1));
    assert_eq!(word(&launches[1], 0), word(&launches[0], 0) + 16 * u64::from(ENTRIES_OF_A_LAUNCH));

    // A list of three: no launch reads beyond, and the rest of the entries is 0.
    let mut short = listed(3);
    short.steps.pop();
    let (loaded, _context, stream, _pool) = load(&short);
    PARAMETER_BYTES.set(sizes());
    fake::launches();
    let bindings = Bindings { buffers: &[], workspace: workspace.slice(), host_scalars: &[], lists: &[&tensors[1..3]] };
    loaded.execute(&stream, &bindings).expect("executes");
    let launches = fake::launches();
    let [launch] = &launches[..] else { panic!("{launches:?}") };
    assert_eq!((word(launch, 1), word(launch, 2), word(launch, 3)), (2, tensors[1].address(), tensors[2].address()));
    assert_eq!((word(launch, 2 + entries), word(launch, 3 + entries)), (1, 2), "extents in elements");
    assert_eq!((word(launch, 4), word(launch, 4 + entries)), (0, 0));

    // What a list must keep, by its name.
    let refused = |lists: &[&[DeviceSlice<'_>]]| {
        let Error::Binding(error) = run(lists, vec![8, 4]).expect_err("does not suit") else { panic!("a binding does not suit") };
        assert_eq!(error.name, "list `parameters`");
        (error.rule, error.given)
    };
    assert_eq!(refused(&[]), (BindingRule::Missing, "nothing".to_owned()));
    let many: Vec<DeviceSlice<'_>> = (0..=most).map(tensor).collect();
    assert_eq!(refused(&[&many]), (BindingRule::Length, format!("{} tensors are given, at most {most} are declared", most + 1)));
    let ragged = [memory.slice().part(0, 6).expect("within")];
    assert_eq!(refused(&[&ragged]).0, BindingRule::Length);
    let odd = [tensor(1), memory.slice().part(4, 4).expect("within")];
    assert_eq!(refused(&[&odd]).0, BindingRule::Alignment);
    assert_eq!(fake::launches(), []);
}

/// Carries a constant into a buffer.
fn constant() -> Program {
    let mut program = Program { buffer_alignment_bytes: vec![1], constants: vec![vec![7; 64]], ..Program::default() };
    let from = Address { base: Base::Constant(0), offset_bytes: 0 };
    program.steps.push(Step::Copy { to: Address::buffer(0), from, bytes: 64 });
    program
}

#[test]
fn constants_are_freed_behind_every_stream_that_reads_them() {
    use fake::Ordered::{Freed, Recorded, Waited};
    let name = |stream: &Stream| stream.raw().addr();
    let run = |loaded: &LoadedProgram, stream: &Stream, y: &DeviceBuffer| {
        let bindings = Bindings { buffers: &[y.slice()], workspace: y.slice().part(0, 0).expect("nothing"), host_scalars: &[], lists: &[] };
        loaded.execute(stream, &bindings).expect("executes");
    };
    let (loaded, context, home, pool) = load(&constant());
    let y = pool.alloc(&home, 64).expect("allocates");
    fake::ordered();
    // On the stream that frees, its order is enough.
    run(&loaded, &home, &y);
    assert_eq!(fake::ordered(), []);
    let others = [Stream::new(&context).expect("a stream"), Stream::new(&context).expect("a stream")];
    run(&loaded, &others[0], &y);
    run(&loaded, &others[1], &y);
    run(&loaded, &others[0], &y);
    let order = fake::ordered();
    let [Recorded { event: first, stream: a }, Recorded { event: second, stream: b }, again] = order[..] else { panic!("{order:?}") };
    assert_eq!((a, b), (name(&others[0]), name(&others[1])));
    assert_eq!(again, Recorded { event: first, stream: a }, "one event a stream, recorded anew");
    // What a graph records is no mark.
    fake::set_capturing(true);
    run(&loaded, &others[1], &y);
    fake::set_capturing(false);
    assert_eq!(fake::ordered(), []);
    drop(loaded);
    let stream = name(&home);
    assert_eq!(fake::ordered(), [Waited { stream, event: first }, Waited { stream, event: second }, Freed { stream }]);

    // Of many streams few marks are kept: the stream that frees waits for the others at once.
    let (loaded, context, home, _pool) = load(&constant());
    let stream = name(&home);
    let many: Vec<Stream> = (0..40).map(|_| Stream::new(&context).expect("a stream")).collect();
    many.iter().for_each(|stream| run(&loaded, stream, &y));
    drop(loaded);
    let order = fake::ordered();
    let waited = |event: usize| order.iter().position(|done| *done == Waited { stream, event });
    for (place, recorded) in order.iter().enumerate() {
        if let Recorded { event, .. } = recorded {
            // An event's place may be another one's later.
            assert!(waited(*event).is_some_and(|waited| waited > place || order[place..].contains(&Waited { stream, event: *event })));
        }
    }
    let freed = order.iter().position(|done| *done == Freed { stream }).expect("freed");
    assert_eq!((order.len(), freed), (81, 80));

    // A stream that captures can neither wait nor free: what is there stays.
    let (loaded, _context, home, _pool) = load(&constant());
    run(&loaded, &many[0], &y);
    fake::ordered();
    fake::set_capturing(true);
    drop(loaded);
    fake::set_capturing(false);
    assert_eq!(fake::ordered(), []);
    drop((home, y));
}
