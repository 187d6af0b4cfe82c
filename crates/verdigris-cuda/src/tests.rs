//! The whole layer over the fake driver: what it submits, what it keeps, what it gives back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use verdigris_kir::execution::HostValue;
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{Access, MapDecl, MapType, Swizzle, Target, Ty};
use verdigris_kir::program::{Address, Arg, Base, Divisor, Fill, KernelRef, L2Promotion, Launch, MapSpec, Program, Residency, Step};
use verdigris_kir::tile::table::{self, ADDRESSES_OF_A_LAUNCH};
use verdigris_tensor::{BindingError, BindingRule};

use crate::fake::{self, CAPTURING, PARAMETER_BYTES, Recorded};
use crate::*;

const OVERLAP: u32 = 6;
const COOPERATIVE: u32 = 2;

fn key(spec: &str) -> CacheKey {
    let properties = fake::gpu().0.properties().clone();
    CacheKey {
        source_hash: [0; 32],
        spec: spec.to_owned(),
        arch: properties.arch_key(),
        driver_version: properties.driver_version,
        driver_release: "1.2.3".to_owned(),
        ptx_isa: properties.ptx_isa,
        options: CompileOptions::default(),
    }
}

fn source() -> KernelSource {
    let facts = KernelFacts { threads: 128, cluster: 1, shared_bytes: 4096, parameters: vec![], parameter_bytes: 0 };
    KernelSource { ptx: ".version 9.0".to_owned(), facts, allowed_spill_bytes: 0 }
}

fn built() -> Result<KernelSource, Error> {
    Ok(source())
}

fn not_built() -> Result<KernelSource, Error> {
    panic!("a compiled copy is there")
}

#[test]
fn every_call_leaves_the_threads_context_as_it_was() {
    let (context, stream, pool) = fake::gpu();
    assert_eq!(fake::context_depth(), 0);
    let buffer = pool.alloc_zeroed(&stream, 100).expect("allocates");
    assert_eq!(buffer.download_all(&stream).expect("copies"), [0; 100]);
    assert_eq!(fake::context_depth(), 0);
    let guard = context.enter().expect("enters");
    assert_eq!(fake::context_depth(), 1);
    let inner = context.enter().expect("enters again");
    assert_eq!(fake::context_depth(), 1, "a context that is current is not pushed again");
    drop(inner);
    stream.synchronize().expect("waits");
    assert_eq!(fake::context_depth(), 1);
    drop(guard);
    drop(buffer);
    assert_eq!(fake::context_depth(), 0);
}

#[test]
fn the_limit_holds_and_is_given_back() {
    let (context, stream, _) = fake::gpu();
    let pool = Pool::new(&context, PoolOptions { limit_bytes: Some(1000), ..PoolOptions::default() }).expect("makes");
    let first = pool.alloc(&stream, 600).expect("fits");
    let error = pool.alloc(&stream, 401).expect_err("does not fit");
    assert!(matches!(error, Error::PoolLimit { requested_bytes: 401, used_bytes: 600, limit_bytes: 1000 }), "{error:?}");
    let second = pool.alloc(&stream, 400).expect("fits exactly");
    drop(first);
    pool.alloc(&stream, 600).expect("fits again");
    drop(second);
    assert!(pool.alloc(&stream, u64::MAX).is_err(), "no wrapping");
    pool.alloc(&stream, 1000).expect("a refusal claims nothing");
}

#[test]
fn out_of_memory_is_typed_also_while_capturing() {
    let (_, stream, pool) = fake::gpu();
    let error = pool.alloc(&stream, 1 << 41).expect_err("too much");
    assert!(matches!(error, Error::OutOfMemory { free_bytes: Some(1000), .. }), "{error:?}");
    assert!(error.to_string().contains("1000 of 1099511627776 bytes free"), "{error}");
    CAPTURING.set(true);
    let error = pool.alloc(&stream, 1 << 41).expect_err("too much");
    CAPTURING.set(false);
    assert!(matches!(error, Error::OutOfMemory { free_bytes: None, .. }), "nothing may be waited for: {error:?}");
    assert!(pool.alloc(&stream, 1 << 41).is_err());
    pool.alloc(&stream, 1).expect("a failure claims nothing");
}

#[test]
fn a_missing_function_is_an_error_of_its_call_alone() {
    let (context, stream, _) = fake::gpu();
    let error = stream.is_idle().expect_err("the fake cannot be asked");
    assert!(matches!(error, Error::MissingSymbol { symbol: "cuStreamQuery", driver_version: 13_000 }), "{error:?}");
    context.memory_info().expect("everything else works");
    let missing = context.driver().missing_functions();
    assert!(missing.contains(&"cuStreamQuery") && !missing.contains(&"cuMemGetInfo_v2"), "{missing:?}");
}

#[test]
fn kernels_come_from_memory_then_disk_then_the_compiler() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (context, ..) = fake::gpu();
    let disk = || Some(DiskCache::open(folder.path()).expect("opens"));
    let (key, cache) = (key("k"), ModuleCache::new(&context, disk()));
    let (_, report) = cache.kernel(&key, "k", built).expect("loads");
    assert_eq!(report.origin, Origin::Compiled);
    assert!(report.damaged.is_none() && report.not_stored.is_none());
    let jit = report.jit.expect("was compiled");
    assert_eq!(jit.findings, [JitFinding::Spill { store_bytes: 4, load_bytes: 8 }]);
    assert_eq!(cache.kernel(&key, "k", not_built).expect("loads").1.origin, Origin::Memory);
    assert_eq!(cache.loaded_count(), 1);
    let (kernel, report) = ModuleCache::new(&context, disk()).kernel(&key, "k", not_built).expect("loads");
    assert_eq!((report.origin, &kernel.facts), (Origin::Disk, &source().facts));
    assert_eq!(kernel.function.options().dynamic_smem_bytes, 4096);
}

const SPILL: JitFinding = JitFinding::Spill { store_bytes: 4, load_bytes: 8 };

#[test]
fn register_budgets_are_compiled_in_one_step_and_kept_as_text() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (context, ..) = fake::gpu();
    let disk = DiskCache::open(folder.path()).expect("opens");
    let texts = [".version 9.0\nsetmaxnreg.dec.sync.aligned.u32 40;", &format!(".version 9.0\n{}", fake::COMPLAINS_LINKED)];
    for (number, text) in texts.into_iter().enumerate() {
        let key = key(&format!("k{number}"));
        let ask = |source: &dyn Fn() -> Result<KernelSource, Error>| {
            ModuleCache::new(&context, Some(disk.clone())).kernel(&key, "k", source).expect("loads")
        };
        let (_, report) = ask(&|| Ok(KernelSource { ptx: text.to_owned(), ..source() }));
        assert_eq!((report.origin, fake::WHOLE_TEXTS.take()), (Origin::Compiled, vec![text.to_owned()]));
        assert_eq!(report.findings, Some(vec![SPILL]), "what was said of relocatable code is not told of this one");
        let Lookup::Hit(bytes) = disk.load(&key) else { panic!("was stored") };
        let entry = Entry::from_bytes(&bytes).expect("is an entry");
        assert_eq!((entry.code, entry.facts), (Code::Ptx(text.to_owned()), source().facts));
        let (_, report) = ask(&not_built);
        assert_eq!((report.origin, fake::WHOLE_TEXTS.take()), (Origin::Disk, vec![text.to_owned()]));
        assert!(report.jit.is_some(), "the driver was handed text");
        assert_eq!(report.findings, Some(vec![SPILL]));
    }
}

#[test]
fn findings_reach_the_caller_wherever_the_kernel_comes_from() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (context, ..) = fake::gpu();
    let disk = DiskCache::open(folder.path()).expect("opens");
    let findings = |spec: &str, source: &KernelSource| {
        let origins = [Origin::Compiled, Origin::Memory, Origin::Disk];
        let (first, second) = (ModuleCache::new(&context, Some(disk.clone())), ModuleCache::new(&context, Some(disk.clone())));
        let [one, two, three] = [&first, &first, &second].map(|cache| {
            let (_, report) = cache.kernel::<Error>(&key(spec), "k", || Ok(source.clone())).expect("loads");
            (report.origin, report.findings)
        });
        assert_eq!([one.0, two.0, three.0], origins);
        assert_eq!((&one.1, &one.1), (&two.1, &three.1));
        one.1
    };
    assert_eq!(findings("spills", &source()), Some(vec![SPILL]));
    assert_eq!(findings("accepted", &KernelSource { allowed_spill_bytes: 8, ..source() }), Some(vec![]));
    assert_eq!(findings("not accepted", &KernelSource { allowed_spill_bytes: 7, ..source() }), Some(vec![SPILL]));
    let kept = KernelSource { ptx: format!(".version 9.0 setmaxnreg {}", fake::KEPT), ..source() };
    assert_eq!(findings("kept by the driver", &kept), None, "nobody knows what a silent compiler would have found");
}

#[test]
fn the_pack_comes_before_the_disk_and_gives_way_to_it() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (context, ..) = fake::gpu();
    let path = folder.path().join("kernels.pack");
    let disk = DiskCache::open(folder.path().join("cache")).expect("opens");
    let head =
        PackHead { source_hash: [0; 32], arch: "sm_90a".to_owned(), ptx_isa: context.properties().ptx_isa, least_driver_version: 13_000 };
    let entry = |code: &[u8]| Entry { facts: source().facts, findings: Some(vec![]), code: Code::Cubin(code.to_vec()) };
    let kernels = [("k".to_owned(), entry(&fake::IMAGE)), ("no image".to_owned(), entry(b"no image"))];
    let write = |head: &PackHead| {
        std::fs::write(&path, Pack::to_bytes(head, CompileOptions::default(), &kernels, Pack::compress_quickly).expect("can be made"))
            .expect("writes");
    };
    let ask_for = |spec: &str, source: fn() -> Result<KernelSource, Error>| {
        let cache = ModuleCache::new(&context, Some(disk.clone())).with_pack(&path);
        cache.kernel(&key(spec), "k", source).expect("loads").1
    };
    write(&head);
    let report = ask_for("k", not_built);
    assert_eq!((report.origin, report.findings), (Origin::Pack, Some(vec![])));
    assert!(report.pack_trouble.is_none());
    let report = ask_for("not in the pack", built);
    assert!(report.origin == Origin::Compiled && report.pack_trouble.is_none(), "{report:?}");
    let report = ask_for("no image", built);
    assert!(matches!(report.pack_trouble.as_deref(), Some(PackError::Unloadable { .. })), "{report:?}");

    // Whatever is wrong with a pack is told, and the next source serves.
    write(&PackHead { source_hash: [1; 32], ..head.clone() });
    let report = ask_for("k", built);
    assert_eq!(report.origin, Origin::Compiled, "a stale kernel is never served");
    assert!(matches!(report.pack_trouble.as_deref(), Some(PackError::Sources { .. })), "{report:?}");
    let told = |expected: fn(&PackError) -> bool| {
        let report = ask_for("k", not_built);
        assert_eq!(report.origin, Origin::Disk);
        assert!(report.pack_trouble.as_deref().is_some_and(expected), "{report:?}");
    };
    told(|trouble| matches!(trouble, PackError::Sources { .. }));
    write(&PackHead { arch: "sm_80".to_owned(), ..head.clone() });
    told(|trouble| matches!(trouble, PackError::Arch { .. }));
    write(&PackHead { least_driver_version: 13_010, ..head });
    told(|trouble| matches!(trouble, PackError::Driver { required: 13_010, .. }));
    std::fs::write(&path, b"rubbish").expect("writes");
    told(|trouble| matches!(trouble, PackError::Damaged { .. }));
    std::fs::remove_file(&path).expect("removes");
    told(|trouble| matches!(trouble, PackError::Io { .. }));
    let cache = ModuleCache::new(&context, None).with_pack(&path);
    assert!(matches!(cache.pack(), Some(Err(PackError::Io { .. }))));
}

#[test]
fn a_kernel_of_a_newer_language_than_the_drivers_is_refused() {
    use verdigris_kir::ptx::Isa;
    let (context, _, pool) = fake::gpu_of(12_000);
    assert_eq!(context.properties().ptx_isa, Isa::MINIMUM);
    let newer = || {
        KernelRef::new("newer", || {
            let header = Header { name: "newer".into(), target: Target::Sm90a, threads: 32, ..Header::default() };
            build(header, |k| {
                let y = k.output("y", 16);
                let bits = k.pack::<u16>(verdigris_kir::inst::Packed::E4m3x2, 1.0_f32, 2.0_f32);
                k.st_global(y.at(k.thread(), 2), 0, bits);
            })
        })
    };
    let error = loader(&context, &pool).kernel(&newer()).expect_err("the driver reads 8.0");
    let Error::PtxVersion { kernel, needed, found, driver_version: 12_000 } = &error else { panic!("{error:?}") };
    assert_eq!((kernel.as_str(), *needed, *found), ("newer", Isa::new(8, 1), Isa::MINIMUM));
    let (context, _, pool) = fake::gpu();
    loader(&context, &pool).kernel(&newer()).expect("13.0 reads all of it");
}

#[test]
fn a_damaged_entry_is_rebuilt_and_told() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (context, ..) = fake::gpu();
    let disk = DiskCache::open(folder.path()).expect("opens");
    let key = key("k");
    let ask = |build: fn() -> Result<KernelSource, Error>| {
        ModuleCache::new(&context, Some(disk.clone())).kernel(&key, "k", build).expect("loads").1
    };
    ask(built);
    std::fs::write(disk.path(&key), b"rubbish").expect("writes");
    let report = ask(built);
    assert_eq!(report.origin, Origin::Compiled);
    assert_eq!(report.damaged.expect("is told").path, disk.path(&key));
    assert_eq!(ask(not_built).origin, Origin::Disk);
    // An entry that is whole, but holds no kernel.
    disk.store(&key, b"no kernel").expect("stores");
    assert!(ask(built).damaged.expect("is told").why.contains("unknown"));
    let no_image = Entry { facts: source().facts, findings: None, code: Code::Cubin(b"no image".to_vec()) };
    disk.store(&key, &no_image.to_bytes()).expect("stores");
    assert!(ask(built).damaged.expect("is told").why.contains("no ELF file"));
    assert_eq!(ask(not_built).origin, Origin::Disk);
}

#[test]
fn a_kernel_that_cannot_be_stored_works_all_the_same() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (context, ..) = fake::gpu();
    let disk = DiskCache::open(folder.path().join("cache")).expect("opens");
    std::fs::remove_dir_all(disk.root()).expect("removes");
    std::fs::write(disk.root(), b"in its place").expect("writes");
    let (_, report) = ModuleCache::new(&context, Some(disk)).kernel(&key("k"), "k", built).expect("loads");
    assert_eq!(report.origin, Origin::Compiled);
    assert!(report.not_stored.is_some());
}

#[test]
fn many_threads_compile_a_kernel_once_and_others_beside_it() {
    let (context, ..) = fake::gpu();
    let cache = ModuleCache::new(&context, None);
    let sources = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (cache, sources) = (&cache, &sources);
            scope.spawn(move || {
                for round in 0..20 {
                    let key = key(&format!("k{}", (thread + round) % 4));
                    let build = || {
                        sources.fetch_add(1, Ordering::Relaxed);
                        built()
                    };
                    cache.kernel(&key, "k", build).expect("loads");
                }
            });
        }
    });
    assert_eq!((sources.into_inner(), cache.loaded_count()), (4, 4));
}

#[test]
fn what_fails_to_build_is_tried_again() {
    let (context, ..) = fake::gpu();
    let cache = ModuleCache::new(&context, None);
    let broken = || Ok(KernelSource { ptx: "nonsense".to_owned(), ..source() });
    let error = cache.kernel::<Error>(&key("k"), "k", broken).expect_err("is no PTX");
    let Error::Compile { kernel, log, .. } = &error else { panic!("{error:?}") };
    assert_eq!((kernel.as_str(), log.as_str()), ("k", "syntax error"));
    let error = cache.kernel(&key("k"), "missing", built).expect_err("has no such kernel");
    assert!(matches!(error, Error::NoSuchKernel { .. }), "{error:?}");
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = cache.kernel(&key("k"), "k", not_built);
    }));
    assert!(panicked.is_err());
    assert_eq!(cache.kernel(&key("k"), "k", built).expect("loads").1.origin, Origin::Compiled);
    let large = || Ok(KernelSource { facts: KernelFacts { shared_bytes: 232_448, ..source().facts }, ..source() });
    let error = cache.kernel::<Error>(&key("large"), "k", large).expect_err("16 bytes are static");
    assert!(matches!(error, Error::Launch(LaunchError::SharedMemoryOfChip { bytes: 232_464, .. })), "{error:?}");
}

fn map() -> MapSpec {
    let decl = MapDecl { ty: MapType::F32, rank: 2, box_dims: vec![4, 4], im2col: false, swizzle: Swizzle::None, access: Access::Read };
    MapSpec {
        decl,
        dims: vec![10, 3],
        strides_bytes: vec![48],
        element_strides: vec![1, 1],
        lower_corner: vec![],
        upper_corner: vec![],
        fill: Fill::Zero,
        l2: L2Promotion::B128,
    }
}

/// A kernel with a parameter of every kind. Its body does nothing: it is never run.
fn kernel(builds: &Arc<AtomicU32>) -> KernelRef {
    let builds = Arc::clone(builds);
    KernelRef::new("test.every.kind", move || {
        builds.fetch_add(1, Ordering::Relaxed);
        let header = Header { name: "test.every.kind".into(), target: Target::Sm90a, threads: 128, ..Header::default() };
        let mut body = build(header, |k| {
            let x = k.input("x", 16);
            let n = k.scalar::<u32>("n");
            let _ = (x, n);
        });
        let place = |name, kind| verdigris_kir::ir::Param { name, kind, ..body.params[0].clone() };
        let more = [
            place("divisor", verdigris_kir::ir::ParamKind::Divisor),
            place("factor", verdigris_kir::ir::ParamKind::Scalar(Ty::F32)),
            place("map", verdigris_kir::ir::ParamKind::TensorMap(map().decl)),
        ];
        body.params.extend(more);
        body
    })
}

fn program(builds: &Arc<AtomicU32>) -> Program {
    let mut program = Program { buffer_alignment_bytes: vec![16, 1], constants: vec![vec![7; 3], vec![9; 2]], ..Program::default() };
    program.add_scratch("first", 300);
    let middle = program.add_scratch("middle", 1000);
    let launch = Launch {
        kernel: kernel(builds),
        grid: [6, 1, 1],
        residency: Residency::All,
        overlap: true,
        args: vec![
            Arg::Pointer(Address { base: Base::Buffer(0), offset_bytes: 32 }),
            Arg::Scalar(Ty::U32, 77),
            Arg::Divisor(5),
            Arg::HostScalar(Ty::F32, 1),
            Arg::TensorMap(Address { offset_bytes: 16, ..middle }, map()),
        ]
        .into(),
    };
    program.steps = vec![
        Step::Fill { at: Address { offset_bytes: 990, ..middle }, bytes: 10, value: 3 },
        Step::Launch(launch),
        Step::Copy { to: Address { base: Base::Buffer(1), offset_bytes: 1 }, from: Address { offset_bytes: 998, ..middle }, bytes: 2 },
        Step::Copy {
            to: Address { base: Base::Buffer(1), offset_bytes: 3 },
            from: Address { base: Base::Constant(1), offset_bytes: 1 },
            bytes: 1,
        },
    ];
    program
}

fn loader(context: &Context, pool: &Pool) -> Loader {
    let cache = Arc::new(ModuleCache::new(context, None));
    Loader { cache, pool: pool.clone(), source_hash: [0; 32], options: CompileOptions::default() }
}

#[test]
fn a_program_submits_what_it_says() {
    let (context, stream, pool) = fake::gpu();
    let builds = Arc::default();
    let loader = loader(&context, &pool);
    let executable = loader.load(&program(&builds), &stream).expect("loads");
    let again = loader.load(&program(&builds), &stream).expect("loads");
    assert_eq!(again.reports()[0].1.origin, Origin::Memory);
    assert_eq!(builds.load(Ordering::Relaxed), 1, "a loaded kernel is not built again");
    assert_eq!((executable.workspace_bytes(), executable.launch_count()), (512 + 1024, 1));

    let x = pool.alloc(&stream, 64).expect("allocates");
    let mut y = pool.alloc(&stream, 6).expect("allocates");
    y.fill(&stream, 0xa5).expect("fills");
    let workspace = pool.alloc(&stream, 2048).expect("allocates");
    let buffers = [x.slice(), y.slice()];
    let bindings = Bindings { buffers: &buffers, workspace: workspace.slice(), host_scalars: &[0.0.into(), 2.5.into()], lists: &[] };
    PARAMETER_BYTES.set(vec![8, 4, 16, 4, 128]);
    fake::launches();
    executable.execute(&stream, &bindings).expect("executes");
    let launches = fake::launches();
    let [Recorded { grid, block, attributes, parameters, .. }] = &launches[..] else { panic!("{launches:?}") };
    assert_eq!((grid, block), (&[6, 1, 1], &[128, 1, 1]));
    assert_eq!(*attributes, [OVERLAP, COOPERATIVE]);
    assert_eq!(parameters[0], (x.address() + 32).to_ne_bytes());
    assert_eq!(parameters[1], 77_u32.to_ne_bytes());
    let divisor: Vec<u8> = Divisor::new(5).expect("not 0").words().iter().flat_map(|word| word.to_ne_bytes()).collect();
    assert_eq!(parameters[2], divisor);
    assert_eq!(parameters[3], 2.5_f32.to_ne_bytes());
    let words: Vec<u64> = parameters[4].chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("8 bytes"))).collect();
    let middle = workspace.address() + 512;
    assert_eq!(words[..4], [middle + 16, !(1 << 21), 10, 2], "the map of the day, mended since it is small");
    assert_eq!(y.download_all(&stream).expect("copies"), [0xa5, 3, 3, 9, 0xa5, 0xa5]);
    assert_eq!(fake::context_depth(), 0);
}

#[test]
fn a_bare_launch_is_of_a_kernel_without_parameters() {
    let (context, stream, pool) = fake::gpu();
    let loader = loader(&context, &pool);
    let header = || Header { name: "test.empty".into(), target: Target::Sm80, threads: 96, ..Header::default() };
    let (empty, _) = loader.kernel(&KernelRef::new("test.empty", move || build(header(), |_| {}))).expect("loads");
    PARAMETER_BYTES.set(vec![]);
    fake::launches();
    empty.launch_bare(&stream).expect("launches");
    let launches = fake::launches();
    let [Recorded { grid, block, parameters, .. }] = &launches[..] else { panic!("{launches:?}") };
    assert_eq!((grid, block, parameters.len()), (&[1, 1, 1], &[96, 1, 1], 0));

    let (other, _) = loader.kernel(&kernel(&Arc::default())).expect("loads");
    let refused = other.launch_bare(&stream);
    assert!(matches!(refused, Err(Error::Launch(LaunchError::Bare { parameters: 5, .. }))), "{refused:?}");
    assert!(fake::launches().is_empty());
}

#[test]
fn tables_carry_the_addresses_and_maps_of_the_day() {
    let (context, stream, pool) = fake::gpu();
    let buffers = [pool.alloc(&stream, 512).expect("allocates"), pool.alloc(&stream, 512).expect("allocates")];
    let slices = [buffers[0].slice(), buffers[1].slice()];
    let workspace = pool.alloc(&stream, 2048).expect("allocates");
    let launched = |program: &Program, parameter_bytes: Vec<usize>| {
        let executable = loader(&context, &pool).load(program, &stream).expect("loads");
        PARAMETER_BYTES.set(parameter_bytes);
        fake::launches();
        executable
            .execute(&stream, &Bindings { buffers: &slices, workspace: workspace.slice(), host_scalars: &[], lists: &[] })
            .expect("executes");
        (executable.workspace_bytes(), fake::launches())
    };
    let word = |launch: &Recorded, parameter: usize| u64::from_ne_bytes(launch.parameters[parameter][..8].try_into().expect("8 bytes"));

    let mut program = Program::default();
    let entry = |entry: u32| Address { base: Base::Buffer(entry as usize % 2), offset_bytes: 16 };
    let entries: Vec<Address> = (0..ADDRESSES_OF_A_LAUNCH + 2).map(entry).collect();
    assert_eq!(table::add_addresses(&mut program, "tensors", &entries), Address::scratch(0));
    let sizes = [8, 4].into_iter().chain([8; ADDRESSES_OF_A_LAUNCH as usize]).collect();
    let (workspace_bytes, launches) = launched(&program, sizes);
    assert_eq!((workspace_bytes, launches.len()), (1280, 2), "130 addresses, up to whole 256 bytes");
    assert_eq!([word(&launches[0], 0), word(&launches[1], 0)], [workspace.address(), workspace.address() + 1024]);
    assert_eq!(launches[0].parameters[1], ADDRESSES_OF_A_LAUNCH.to_ne_bytes());
    assert_eq!(launches[1].parameters[1], 2_u32.to_ne_bytes());
    // Past the last entry stands the last one again.
    for (launch, entry) in [(0, 0), (0, 1), (0, 127), (1, 0), (1, 1), (1, 127)] {
        assert_eq!(word(&launches[launch], 2 + entry), buffers[entry % 2].address() + 16, "entry {entry} of launch {launch}");
    }

    let mut program = Program::default();
    table::add_tensor_maps(&mut program, "maps", &map().decl, &[(Address::buffer(1), map())]);
    let (_, launches) = launched(&program, vec![8, 4, 128]);
    // A map of the fake driver begins with its address.
    assert_eq!([word(&launches[0], 0), word(&launches[0], 2)], [workspace.address(), buffers[1].address()]);
}

#[test]
fn bindings_that_do_not_suit_are_refused_before_anything_is_submitted() {
    let (context, stream, pool) = fake::gpu();
    let executable = loader(&context, &pool).load(&program(&Arc::default()), &stream).expect("loads");
    let (x, y) = (pool.alloc(&stream, 64).expect("allocates"), pool.alloc(&stream, 6).expect("allocates"));
    let workspace = pool.alloc(&stream, 2048).expect("allocates");
    let (good, space, scalars) = ([x.slice(), y.slice()], workspace.slice(), [0.0.into(), 2.5.into()]);
    fake::launches();
    let refused = |buffers: &[DeviceSlice<'_>], workspace, host_scalars: &[HostValue]| {
        let error = executable.execute(&stream, &Bindings { buffers, workspace, host_scalars, lists: &[] }).expect_err("does not suit");
        let Error::Binding(error) = error else { panic!("{error:?}") };
        error
    };
    let says = |error: BindingError, name: &str, rule: BindingRule| assert_eq!((error.name.as_str(), error.rule), (name, rule), "{error}");
    says(refused(&good[..1], space, &scalars), "buffer 1", BindingRule::Missing);
    says(refused(&good, space, &scalars[..1]), "host scalar 1", BindingRule::Missing);
    let small = space.part(0, 1535).expect("within");
    let short = refused(&good, small, &scalars);
    assert_eq!((short.wanted.as_str(), short.given.as_str()), ("memory of 1536 bytes", "1535 bytes"));
    says(short, "workspace", BindingRule::Length);
    let odd = space.part(16, 1536).expect("within");
    says(refused(&good, odd, &scalars), "workspace", BindingRule::Alignment);
    let odd = [x.slice().part(8, 56).expect("within"), y.slice()];
    let odd = refused(&odd, space, &scalars);
    assert_eq!(odd.wanted, "a multiple of 16 bytes");
    says(odd, "buffer 0", BindingRule::Alignment);
    let short = [x.slice().part(0, 31).expect("within"), y.slice()];
    says(refused(&short, space, &scalars), "buffer 0", BindingRule::Length);
    let short = [x.slice(), y.slice().part(0, 3).expect("within")];
    says(refused(&short, space, &scalars), "buffer 1", BindingRule::Length);
    assert_eq!(fake::launches(), []);
    let (_, other_stream, _) = fake::gpu();
    executable
        .execute(&other_stream, &Bindings { buffers: &good, workspace: space, host_scalars: &scalars, lists: &[] })
        .expect("another stream of the same context will do");
}

#[test]
fn programs_that_do_not_hold_together_are_refused_while_loading() {
    let (context, stream, pool) = fake::gpu();
    let loader = loader(&context, &pool);
    let load = |change: &dyn Fn(&mut Program)| {
        let mut program = program(&Arc::default());
        change(&mut program);
        loader.load(&program, &stream).expect_err("does not hold together")
    };
    let no_scratch = load(&|program| program.scratch.truncate(1));
    assert!(matches!(no_scratch, Error::OwnMemory { base: Base::Scratch(1), bytes: None, .. }), "{no_scratch:?}");
    let past_scratch = load(&|program| program.scratch[1].bytes = 151);
    assert!(matches!(past_scratch, Error::OwnMemory { base: Base::Scratch(1), end_bytes: 1000, bytes: Some(151) }), "{past_scratch:?}");
    let past_constant = load(&|program| program.constants[1].truncate(1));
    assert!(matches!(past_constant, Error::OwnMemory { end_bytes: 2, .. }), "{past_constant:?}");
    let launch = |change: &dyn Fn(&mut Launch)| {
        load(&|program| {
            let Step::Launch(launch) = &mut program.steps[1] else { panic!("the second step is the launch") };
            change(launch);
        })
    };
    let fewer = launch(&|launch| launch.args = launch.args[..4].to_vec().into());
    assert!(matches!(fewer, Error::Mismatch(_)), "{fewer:?}");
    let odd_map = launch(&|launch| {
        let map = launch.args.addresses_mut().last().expect("the last address is the map's");
        map.offset_bytes = 8;
    });
    assert!(matches!(odd_map, Error::Map(MapError::Address { address: 8 })), "{odd_map:?}");
    // Four multiprocessors hold three CTAs each.
    let many = launch(&|launch| launch.grid = [13, 1, 1]);
    assert!(matches!(many, Error::Launch(LaunchError::Residency { ctas: 13, resident: 12, .. })), "{many:?}");
    let none = launch(&|launch| launch.grid = [0, 1, 1]);
    assert!(matches!(none, Error::Launch(LaunchError::Grid { extent: 0, .. })), "{none:?}");
}

#[test]
fn a_driver_that_cannot_count_clusters_says_so_before_anything_is_loaded() {
    let (context, _, _) = fake::gpu();
    let error = context.resident_clusters().expect_err("the fake has no such function");
    assert!(matches!(error, Error::MissingSymbol { symbol: "cuOccupancyMaxActiveClusters", .. }), "{error}");
}
