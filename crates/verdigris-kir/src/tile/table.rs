//! Tables in global memory of what only a launch knows: addresses, and tensor maps.
//!
//! A kernel that works on many tensors at once (grouped products, an optimizer's step over all of a model's parameters) names them by index.
//! A few tensor maps fit among the parameters ([`Kernel::tensor_map_table`]). Of more entries, and of addresses, which parameters cannot be
//! picked from at run time, a table stands in scratch. Small launches in front write it, and carry the entries as parameters: so each
//! execution patches addresses and encodes maps as it does for every launch, and nothing is copied from the host.

use crate::face::{AsVal, Header, Kernel, Pointer, TensorMap, build};
use crate::inst::Scope;
use crate::ir::{MapDecl, Target, Ty};
use crate::program::{Address, Arg, KernelRef, Launch, MapSpec, Program, Residency, Step};
use std::panic::Location;

/// Addresses that one launch writes: 1 KiB of parameters.
pub const ADDRESSES_OF_A_LAUNCH: u32 = 128;
/// Tensor maps that one launch writes: 2 KiB of parameters.
pub const MAPS_OF_A_LAUNCH: u32 = 16;
/// Bytes of an address in a table.
const ADDRESS_BYTES: u32 = 8;
/// Bytes of a tensor map, and what its address is a multiple of.
const MAP_BYTES: u32 = 128;

/// Adds a piece of scratch with these addresses, in order, for [`AddressTable`], and the launches that write it. What the reading kernel
/// relies on of the addresses' alignment, the program declares itself ([`Program::buffer_alignment_bytes`]).
pub fn add_addresses(program: &mut Program, name: &'static str, entries: &[Address]) -> Address {
    let table = program.add_scratch(name, u64::from(ADDRESS_BYTES) * entries.len() as u64);
    let arg = |&entry: &Address| Arg::Pointer(entry);
    write(
        program,
        table,
        entries,
        [ADDRESSES_OF_A_LAUNCH, ADDRESS_BYTES],
        &KernelRef::new(ADDRESSES, || build(addresses_header(), addresses)),
        arg,
    );
    table
}

/// Adds a piece of scratch with these tensor maps, in order, for [`MapTable`], and the launches that write it. All are of the declaration
/// `decl`; [`Launch::check`] refuses another.
pub fn add_tensor_maps(program: &mut Program, name: &'static str, decl: &MapDecl, entries: &[(Address, MapSpec)]) -> Address {
    let table = program.add_scratch(name, u64::from(MAP_BYTES) * entries.len() as u64);
    let kernel = KernelRef::new(maps_name(decl), {
        let decl = decl.clone();
        move || build(maps_header(&decl), |k| tensor_maps(k, &decl))
    });
    let arg = |(at, spec): &(Address, MapSpec)| Arg::TensorMap(*at, spec.clone());
    write(program, table, entries, [MAPS_OF_A_LAUNCH, MAP_BYTES], &kernel, arg);
    table
}

/// The launches that write a table; what the last has no entry for is filled up with its last one and not written.
fn write<E>(
    program: &mut Program,
    table: Address,
    entries: &[E],
    [of_a_launch, bytes]: [u32; 2],
    kernel: &KernelRef,
    arg: impl Fn(&E) -> Arg,
) {
    for (number, part) in entries.chunks(of_a_launch as usize).enumerate() {
        let offset_bytes = table.offset_bytes + number as u64 * u64::from(of_a_launch * bytes);
        let mut args = vec![Arg::Pointer(Address { offset_bytes, ..table }), Arg::Scalar(Ty::U32, part.len() as u64)];
        args.extend((0..of_a_launch as usize).map(|entry| arg(&part[entry.min(part.len() - 1)])));
        let kernel = kernel.clone();
        program.steps.push(Step::Launch(Launch { kernel, grid: [1; 3], residency: Residency::Any, overlap: false, args }));
    }
}

const ADDRESSES: &str = "table_addresses";

/// One thread an entry.
fn addresses(k: Kernel<'_>) {
    let (table, count) = (k.output("table", ADDRESS_BYTES), k.scalar::<u32>("count"));
    let thread = k.thread();
    for number in 0..ADDRESSES_OF_A_LAUNCH {
        // What a kernel does with the entry is not known here.
        let entry = k.in_out("entry", 1).address();
        k.when(thread.eq(number) & count.gt(number), || k.st_global(table.at(number, ADDRESS_BYTES), 0, entry));
    }
}

fn addresses_header() -> Header {
    Header { name: ADDRESSES.into(), target: Target::Sm80, threads: ADDRESSES_OF_A_LAUNCH, ..Header::default() }
}

fn maps_name(decl: &MapDecl) -> String {
    let MapDecl { ty, rank, box_dims, im2col, swizzle, access } = decl;
    let dims: Vec<String> = box_dims.iter().map(u32::to_string).collect();
    let kind = if *im2col { "im2col" } else { "tiled" };
    format!("table_maps_{ty:?}_{kind}{rank}_{}_{swizzle:?}_{access:?}", dims.join("x")).to_lowercase()
}

/// One warp: each map goes through shared memory, from where it is published for the copy engine.
fn tensor_maps(k: Kernel<'_>, decl: &MapDecl) {
    let (table, count) = (k.in_out("table", MAP_BYTES), k.scalar::<u32>("count"));
    let rooms: Vec<_> = (0..MAPS_OF_A_LAUNCH)
        .map(|_| {
            let (entry, room) = (k.tensor_map_template("entry", decl.clone()), k.shared("map", MAP_BYTES, MAP_BYTES));
            k.when(k.lane().eq(0), || k.tensormap_copy(room, &entry));
            room
        })
        .collect();
    k.warp_sync();
    for (number, room) in rooms.into_iter().enumerate() {
        let number = number as u32;
        k.when(count.gt(number), || k.tensormap_publish(table.at(number, MAP_BYTES), room, Scope::Gpu));
    }
}

fn maps_header(decl: &MapDecl) -> Header {
    Header { name: maps_name(decl), target: Target::Sm90a, threads: 32, ..Header::default() }
}

/// A table that [`add_addresses`] made, in the kernel that reads it.
#[derive(Clone, Copy, Debug)]
pub struct AddressTable<'k> {
    table: Pointer<'k>,
}

impl<'k> AddressTable<'k> {
    /// The table that parameter `name` points to.
    #[track_caller]
    pub fn declare(k: Kernel<'k>, name: &'static str) -> Self {
        k.scope(Location::caller(), || AddressTable { table: k.input(name, ADDRESS_BYTES) })
    }

    /// The memory that entry `index` names.
    #[track_caller]
    pub fn at(&self, index: impl AsVal<'k, u32>) -> Pointer<'k> {
        let entry = self.table.at(index, ADDRESS_BYTES);
        let k = entry.kernel();
        k.scope(Location::caller(), || Pointer::at_address(k.ld_global::<u64>(entry, 0)))
    }
}

/// A table that [`add_tensor_maps`] made, in the kernel that reads it.
#[derive(Clone, Debug)]
pub struct MapTable<'k> {
    kernel: Kernel<'k>,
    table: Pointer<'k>,
    decl: MapDecl,
}

impl<'k> MapTable<'k> {
    /// The table of maps of one declaration that parameter `name` points to.
    #[track_caller]
    pub fn declare(k: Kernel<'k>, name: &'static str, decl: MapDecl) -> Self {
        k.scope(Location::caller(), || MapTable { kernel: k, table: k.input(name, MAP_BYTES), decl })
    }

    /// Entry `index`, taken over for the copies that this thread issues.
    #[track_caller]
    pub fn acquire(&self, index: impl AsVal<'k, u32>) -> TensorMap<'k> {
        let k = self.kernel;
        let address = self.table.at(index, MAP_BYTES);
        k.scope(Location::caller(), || {
            let map = TensorMap::in_global(address, self.decl.clone());
            k.tensormap_acquire(&map, Scope::Gpu);
            map
        })
    }
}
