//! Tables of addresses and of tensor maps: written by launches in front, read by index, under many schedules.

use std::sync::Arc;

use verdigris_kir::face::{Header, LoadOptions, build};
use verdigris_kir::interp::{self, FindingKind, Kernels, Memory, Options};
use verdigris_kir::ir::{Access, KernelBody, MapDecl, MapType, Swizzle, Target};
use verdigris_kir::program::{Address, Arg, Base, Fill, KernelRef, L2Promotion, Launch, MapSpec, Program, Residency, Step};
use verdigris_kir::tile::ring::publish_barriers;
use verdigris_kir::tile::table::{self, ADDRESSES_OF_A_LAUNCH, AddressTable, MAPS_OF_A_LAUNCH, MapTable};

fn launch(body: KernelBody, ctas: u32, args: Vec<Arg>) -> Step {
    let (name, body) = (body.name.clone(), Arc::new(body));
    let kernel = KernelRef::new(name, move || KernelBody::clone(&body));
    Step::Launch(Launch { kernel, grid: [ctas, 1, 1], residency: Residency::Any, overlap: false, args: args.into() })
}

/// The number that stands in element `element` of tensor `tensor`.
fn number(tensor: u32, element: u32) -> u32 {
    1000 * tensor + element
}

fn words(memory: &mut Memory, slot: usize) -> Vec<u32> {
    memory.to_vec(slot).chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}

/// Four elements behind each address of the table.
fn reader() -> KernelBody {
    let header = Header { name: "test_read_by_address".into(), target: Target::Sm80, threads: 32, ..Header::default() };
    build(header, |k| {
        let table = AddressTable::declare(k, "table");
        let out = k.output("out", 4);
        let tensor = table.at(k.cta());
        k.when(k.lane().lt(4u32), || {
            let value = k.ld_global::<u32>(tensor.at(k.lane(), 4), 0);
            k.st_global(out.at(k.cta() * 4u32 + k.lane(), 4), 0, value);
        });
    })
}

#[test]
fn addresses_are_read_by_index() {
    // One launch that is full, and another for two.
    for tensors in [1, ADDRESSES_OF_A_LAUNCH, ADDRESSES_OF_A_LAUNCH + 2] {
        let kernels = Kernels::new();
        for seed in 0..6 {
            let mut memory = Memory::new();
            // Every other tensor stands in the second half of a buffer.
            let entries: Vec<Address> = (0..tensors)
                .map(|tensor| {
                    let offset_bytes = if tensor % 2 == 1 { 16 } else { 0 };
                    let pad = vec![0xff; offset_bytes];
                    let elements = (0..4).flat_map(|element| number(tensor, element).to_le_bytes());
                    let slot = memory.add(&pad.into_iter().chain(elements).collect::<Vec<u8>>());
                    Address { base: Base::Buffer(slot), offset_bytes: offset_bytes as u64 }
                })
                .collect();
            let out = memory.add_filled(u64::from(16 * tensors), 0xff);
            let mut program = Program::default();
            let table = table::add_addresses(&mut program, "tensors", &entries);
            assert_eq!(program.launches().count(), tensors.div_ceil(ADDRESSES_OF_A_LAUNCH) as usize);
            program.steps.push(launch(reader(), tensors, vec![Arg::Pointer(table), Arg::Pointer(Address::buffer(out))]));
            interp::run(&program, &kernels, &mut memory, &Options::schedule(seed)).unwrap_or_else(|findings| panic!("{findings}"));
            let wanted: Vec<u32> = (0..tensors).flat_map(|tensor| (0..4).map(move |element| number(tensor, element))).collect();
            assert_eq!(words(&mut memory, out), wanted, "{tensors} tensors, seed {seed}");
        }
    }
}

#[test]
fn what_is_beyond_the_entries_is_not_there() {
    let mut memory = Memory::new();
    let tensor = memory.add(&[7; 16]);
    let out = memory.add_filled(32, 0xff);
    let mut program = Program::default();
    let table = table::add_addresses(&mut program, "tensors", &[Address::buffer(tensor)]);
    program.steps.push(launch(reader(), 2, vec![Arg::Pointer(table), Arg::Pointer(Address::buffer(out))]));
    let findings = interp::run(&program, &Kernels::new(), &mut memory, &Options::default()).expect_err("the second entry was not written");
    assert_eq!(findings.first().kind, FindingKind::OutOfBounds, "{findings}");
}

fn decl() -> MapDecl {
    MapDecl { ty: MapType::U32, rank: 2, box_dims: vec![4, 4], im2col: false, swizzle: Swizzle::None, access: Access::Read }
}

/// The first four rows and columns of each tensor, zeros beyond its rows.
fn loader() -> KernelBody {
    let header = Header { name: "test_load_by_map".into(), target: Target::Sm90a, threads: 32, ..Header::default() };
    build(header, |k| {
        let maps = MapTable::declare(k, "maps", decl());
        let out = k.output("out", 4);
        let tile = k.shared("tile", 64, 128);
        let full = k.mbarrier_array("full", 1);
        full.arrivals().set(1);
        k.when(k.thread().eq(0), || full.init());
        publish_barriers(k);
        k.when(k.thread().eq(0), || {
            let map = maps.acquire(k.cta());
            full.at(0u32).arrive_expect_tx(64u32);
            let origin = [k.constant(0i32), k.constant(0i32)];
            k.tma_load(tile.address(), &map, &origin, full.at(0u32), LoadOptions::default());
        });
        full.at(0u32).wait(0u32);
        k.when(k.thread().lt(16u32), || {
            let value = k.ld_shared::<u32>(tile.address() + k.thread() * 4u32, 0);
            k.st_global(out.at(k.cta() * 16u32 + k.thread(), 4), 0, value);
        });
    })
}

#[test]
fn tensor_maps_are_read_by_index() {
    for tensors in [3, MAPS_OF_A_LAUNCH + 2] {
        let kernels = Kernels::new();
        for seed in 0..6 {
            let mut memory = Memory::new();
            // Tensors of one to four rows of eight elements.
            let rows = |tensor: u32| 1 + tensor % 4;
            let entries: Vec<(Address, MapSpec)> = (0..tensors)
                .map(|tensor| {
                    let elements = (0..8 * rows(tensor)).flat_map(|element| number(tensor, element).to_le_bytes());
                    let slot = memory.add(&elements.collect::<Vec<u8>>());
                    let spec = MapSpec {
                        decl: decl(),
                        dims: vec![8, rows(tensor).into()],
                        strides_bytes: vec![32],
                        element_strides: vec![1, 1],
                        lower_corner: vec![],
                        upper_corner: vec![],
                        fill: Fill::Zero,
                        l2: L2Promotion::B128,
                    };
                    (Address::buffer(slot), spec)
                })
                .collect();
            let out = memory.add_filled(u64::from(64 * tensors), 0xff);
            let mut program = Program::default();
            let maps = table::add_tensor_maps(&mut program, "maps", &decl(), &entries);
            assert_eq!(program.launches().count(), tensors.div_ceil(MAPS_OF_A_LAUNCH) as usize);
            program.steps.push(launch(loader(), tensors, vec![Arg::Pointer(maps), Arg::Pointer(Address::buffer(out))]));
            interp::run(&program, &kernels, &mut memory, &Options::schedule(seed)).unwrap_or_else(|findings| panic!("{findings}"));
            let element = |tensor: u32, at: u32| if at / 4 < rows(tensor) { number(tensor, at / 4 * 8 + at % 4) } else { 0 };
            let wanted: Vec<u32> = (0..tensors).flat_map(|tensor| (0..16).map(move |at| element(tensor, at))).collect();
            assert_eq!(words(&mut memory, out), wanted, "{tensors} tensors, seed {seed}");
        }
    }
}
