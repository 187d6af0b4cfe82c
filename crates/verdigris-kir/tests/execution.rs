//! What is known only at execution, on the interpreter: integers from the host, values in device memory, lists of tensors, and grids that follow
//! from them; and what is wrong with each, by name.

use verdigris_kir::execution::{GridFunction, HostValue, Known, TensorList};
use verdigris_kir::face::{Header, build};
use verdigris_kir::interp::{self, FindingKind, Kernels, Memory, Options};
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Arguments, AtExecution, HostNumber, Source, Value, ValueOf, Write};
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_kir::tile::list::{ENTRIES_OF_A_LAUNCH, List, add_list};

fn header(name: &str) -> Header {
    Header { name: name.into(), target: Target::Sm80, threads: 32, ..Header::default() }
}

fn bytes(memory: &mut Memory, slot: usize, width: usize) -> Vec<u64> {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
    memory.to_vec(slot).chunks_exact(width).map(number).collect()
}

/// The message of the one finding.
fn refused(program: &Program, memory: &mut Memory, options: &Options) -> String {
    let findings = interp::run(program, &Kernels::new(), memory, options).expect_err("it does not fit");
    assert_eq!(findings.first().kind, FindingKind::Launch, "{findings}");
    findings.first().message.clone()
}

verdigris_kir::parameters! {
    /// One number of each type.
    struct Numbers / NumbersArguments of () as _spec {
        wide: AtExecution<u64>,
        signed_wide: AtExecution<i64>,
        narrow: AtExecution<u32>,
        signed_narrow: AtExecution<i32>,
        real: AtExecution<f64>,
        short: AtExecution<f32>,
        y: Write = 8,
    }
}

fn numbers(wide: HostNumber<u64>) -> Program {
    let kernel = KernelRef::new("numbers", || {
        build(header("numbers"), |k| {
            let Numbers { wide, signed_wide, narrow, signed_narrow, real, short, y } = Numbers::declare(k, &());
            k.when(k.thread().eq(0), || {
                k.st_global(y.address(), 0, wide);
                k.st_global(y.address(), 8, signed_wide);
                k.st_global(y.address(), 16, narrow);
                k.st_global(y.address(), 20, signed_narrow);
                k.st_global(y.address(), 24, real);
                k.st_global(y.address(), 32, short);
            });
        })
    });
    let args = NumbersArguments {
        wide,
        signed_wide: HostNumber::Bound(1),
        narrow: HostNumber::Bound(2),
        signed_narrow: HostNumber::Bound(3),
        real: HostNumber::Bound(4),
        short: HostNumber::Bound(4),
        y: Address::buffer(0),
    };
    let mut program = Program::default();
    program.launch(Launch::new(kernel, [1; 3], args.bound(&())));
    program
}

/// A seed that no f64 holds.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

fn host_scalars() -> Vec<HostValue> {
    vec![SEED.into(), (-3i64).into(), 7u64.into(), (-5i64).into(), 0.1.into()]
}

#[test]
fn integers_keep_their_bits_and_reals_are_rounded() {
    for (wide, wanted) in [(HostNumber::Bound(0), SEED), (HostNumber::Fixed(SEED - 1), SEED - 1)] {
        let mut memory = Memory::new();
        memory.add_filled(40, 0xff);
        let options = Options { host_scalars: host_scalars(), ..Options::default() };
        interp::run(&numbers(wide), &Kernels::new(), &mut memory, &options).expect("runs");
        let halves = bytes(&mut memory, 0, 4);
        let words = bytes(&mut memory, 0, 8);
        assert_eq!((words[0], words[1] as i64, words[3]), (wanted, -3, 0.1f64.to_bits()));
        assert_eq!((halves[4], halves[5] as u32 as i32, halves[8]), (7, -5, u64::from(0.1f32.to_bits())));
    }
}

#[test]
fn a_number_that_its_parameter_does_not_hold_is_named() {
    let with = |index: usize, value: HostValue| {
        let mut host_scalars = host_scalars();
        host_scalars[index] = value;
        let mut memory = Memory::new();
        memory.add_filled(40, 0xff);
        refused(&numbers(HostNumber::Bound(0)), &mut memory, &Options { host_scalars, ..Options::default() })
    };
    assert_eq!(with(0, 1.0.into()), "parameter wide: host scalar 0: 1.0 is given, a u64 is wanted");
    assert_eq!(with(0, (-1i64).into()), "parameter wide: host scalar 0: -1 is given, a u64 is wanted");
    assert_eq!(with(2, (1u64 << 32).into()), "parameter narrow: host scalar 2: 4294967296 is given, a u32 is wanted");
    let mut memory = Memory::new();
    memory.add_filled(40, 0xff);
    let few = Options { host_scalars: host_scalars()[..4].to_vec(), ..Options::default() };
    assert_eq!(refused(&numbers(HostNumber::Bound(0)), &mut memory, &few), "parameter real: host scalar 4 is not given");
}

verdigris_kir::parameters! {
    /// A seed, from where the spec says.
    struct Seeded / SeededArguments of Source as source {
        seed: Value<u64> = *source,
        y: Write = 8,
    }
}

fn seeded(source: Source, seed: ValueOf<u64>) -> Program {
    let kernel = KernelRef::new(format!("seeded_{source:?}"), move || {
        build(header(&format!("seeded_{source:?}")), |k| {
            let Seeded { seed, y } = Seeded::declare(k, &source);
            k.st_global(y.at(k.thread(), 8), 0, seed + k.thread().widen());
        })
    });
    let mut program = Program { buffer_alignment_bytes: vec![1, 1], ..Program::default() };
    program.launch(Launch::new(kernel, [1; 3], SeededArguments { seed, y: Address::buffer(0) }.bound(&source)));
    program
}

#[test]
fn a_value_is_given_or_read_from_device_memory() {
    let memory_at = ValueOf::Memory(Address { offset_bytes: 8, ..Address::buffer(1) });
    for (source, seed) in [(Source::Argument, ValueOf::Bound(0)), (Source::Argument, ValueOf::Fixed(SEED)), (Source::Memory, memory_at)] {
        let mut memory = Memory::new();
        memory.add_filled(256, 0xff);
        memory.add(&[0u64, SEED].map(u64::to_le_bytes).concat());
        let program = seeded(source, seed);
        let options = Options { host_scalars: vec![SEED.into()], ..Options::default() };
        interp::run(&program, &Kernels::new(), &mut memory, &options).expect("runs");
        let wanted: Vec<u64> = (0..32).map(|thread| SEED.wrapping_add(thread)).collect();
        assert_eq!(bytes(&mut memory, 0, 8), wanted, "{source:?} {seed:?}");
        // What is read from memory must lie well there.
        assert_eq!(program.buffer_alignment_bytes[1], if source == Source::Memory { 8 } else { 1 });
    }
    // A kernel that was built for the one is not launched with the other.
    let mut memory = Memory::new();
    memory.add_filled(256, 0xff);
    memory.add_filled(16, 0);
    let said = refused(&seeded(Source::Memory, ValueOf::Fixed(1)), &mut memory, &Options::default());
    assert_eq!(said, "parameter seed is given by value, and this spec reads it from device memory");
    let said = refused(&seeded(Source::Argument, memory_at), &mut memory, &Options::default());
    assert_eq!(said, "parameter seed is given in device memory, and this spec takes it by value");
    let odd = ValueOf::Memory(Address { offset_bytes: 4, ..Address::buffer(1) });
    assert!(refused(&seeded(Source::Memory, odd), &mut memory, &Options::default()).contains("parameter seed"));
}

verdigris_kir::parameters! {
    /// A list whose tensors are numbered.
    struct Numbered / NumberedArguments of () as _spec { tensors: List, }
}

/// Each tensor's elements become `1000 · its number + its extent`.
fn number_all(most: u32, name: &'static str) -> Program {
    let kernel = KernelRef::new("number_all", || {
        build(header("number_all"), |k| {
            let Numbered { tensors } = Numbered::declare(k, &());
            let tensor = tensors.at(k.cta());
            k.when(k.thread().widen().lt(tensor.extent), || {
                let number = k.cta() * 1000u32 + tensor.extent.low32();
                k.st_global(tensor.start.at(k.thread(), 4), 0, number);
            });
        })
    });
    let mut program = Program::default();
    let tensors = add_list(&mut program, TensorList { name, most, element_bytes: 4, alignment_bytes: 4 });
    let grid =
        GridFunction::new("a CTA for each tensor", move |known: &Known<'_>| [known.list_length(tensors.list).unwrap_or(0) as u32, 1, 1]);
    program.launch_sized(Launch::new(kernel, [most, 1, 1], NumberedArguments { tensors }.bound(&())), grid);
    program
}

#[test]
fn a_list_has_as_many_tensors_as_are_bound() {
    let most = 2 * ENTRIES_OF_A_LAUNCH + 2;
    let program = number_all(most, "tensors");
    let kernels = Kernels::new();
    for count in [0, 1, ENTRIES_OF_A_LAUNCH, ENTRIES_OF_A_LAUNCH + 1, most] {
        for seed in 0..3 {
            let mut memory = Memory::new();
            let list: Vec<usize> = (0..count).map(|tensor| memory.add_filled(u64::from(4 * (tensor % 5)), 0xff)).collect();
            let options = Options { lists: vec![list.clone()], ..Options::schedule(seed) };
            let report = interp::run(&program, &kernels, &mut memory, &options).unwrap_or_else(|findings| panic!("{findings}"));
            assert_eq!(report.launches.len(), 3 + usize::from(count > 0), "a grid of no CTAs is no launch");
            for (number, slot) in list.into_iter().enumerate() {
                let extent = number % 5;
                assert_eq!(bytes(&mut memory, slot, 4), vec![(1000 * number + extent) as u64; extent], "tensor {number} of {count}");
            }
        }
    }
}

#[test]
fn a_program_has_no_more_buffers_than_are_bound() {
    let mut program = seeded(Source::Argument, ValueOf::Fixed(1));
    let memory = || {
        let mut memory = Memory::new();
        memory.add_filled(256, 0xff);
        memory.add_filled(16, 0);
        memory
    };
    interp::run(&program, &Kernels::new(), &mut memory(), &Options::default()).expect("runs");
    program.buffer_alignment_bytes.push(1);
    assert_eq!(refused(&program, &mut memory(), &Options::default()), "buffer 2 is bound to nothing: the program has 3 buffers");
}

#[test]
fn a_list_that_does_not_suit_is_named() {
    let program = number_all(2, "moments");
    let with = |sizes: &[u64]| {
        let mut memory = Memory::new();
        let list = sizes.iter().map(|&size| memory.add_filled(size, 0)).collect();
        refused(&program, &mut memory, &Options { lists: vec![list], ..Options::default() })
    };
    assert_eq!(with(&[4, 4, 4]), "list `moments`: 3 tensors are given, at most 2 are declared");
    assert_eq!(with(&[4, 6]), "list `moments`: tensor 1 is of 6 bytes, no multiple of an element's 4");
    assert_eq!(refused(&program, &mut Memory::new(), &Options::default()), "list `moments`: not given");
    let absent = Options { lists: vec![vec![9]], ..Options::default() };
    assert_eq!(refused(&program, &mut Memory::new(), &absent), "list `moments`: buffer 9 does not exist");
}

#[test]
fn an_entry_beyond_the_list_is_not_there() {
    // Two CTAs, and a list of one tensor: what the second reads was never written.
    let mut program = number_all(2, "tensors");
    let launch = program.launches().last().expect("it reads the list").clone();
    program.steps.pop();
    program.launch(launch);
    let mut memory = Memory::new();
    let list = vec![memory.add_filled(4, 0)];
    let options = Options { lists: vec![list], ..Options::default() };
    let findings = interp::run(&program, &Kernels::new(), &mut memory, &options).expect_err("the second entry was not written");
    assert!(matches!(findings.first().kind, FindingKind::OutOfBounds | FindingKind::UnwrittenMemory), "{findings}");
}

fn counted(cluster: u32) -> Program {
    let kernel = KernelRef::new(format!("counted_{cluster}"), move || {
        let target = if cluster > 1 { Target::Sm90 } else { Target::Sm80 };
        let header = Header { target, cluster, ..header(&format!("counted_{cluster}")) };
        build(header, |k| {
            let y = k.output("y", 4);
            k.when(k.thread().eq(0), || k.st_global(y.at(k.cta(), 4), 0, k.cta()));
        })
    });
    let mut program = Program::default();
    let mut args = Arguments::new();
    args.bind::<Write>("y", &4, Address::buffer(0));
    let grid = GridFunction::new("as many as told", |known: &Known<'_>| [known.unsigned(0).unwrap_or(0) as u32, 1, 1]);
    program.launch_sized(Launch::new(kernel, [8, 1, 1], args), grid);
    program
}

#[test]
fn a_grid_follows_from_what_is_bound_and_stays_within_the_declared_one() {
    let told = |ctas: u64| Options { host_scalars: vec![ctas.into()], ..Options::default() };
    for ctas in [0, 1, 7, 8] {
        let mut memory = Memory::new();
        memory.add_filled(32, 0xff);
        interp::run(&counted(1), &Kernels::new(), &mut memory, &told(ctas)).unwrap_or_else(|findings| panic!("{findings}"));
        let wanted: Vec<u64> = (0..8).map(|cta| if cta < ctas { cta } else { 0xffff_ffff }).collect();
        assert_eq!(bytes(&mut memory, 0, 4), wanted, "{ctas} CTAs");
    }
    let mut memory = Memory::new();
    memory.add_filled(32, 0xff);
    let said = refused(&counted(1), &mut memory, &told(9));
    assert_eq!(said, "grid function `as many as told` gives 9 CTAs along x, at most 8 are declared");
    let said = refused(&counted(2), &mut memory, &told(3));
    assert_eq!(said, "grid function `as many as told` gives 3 CTAs along x, no multiple of the cluster's 2");
}
