//! Tables in global memory of what only a launch knows: addresses, and tensor maps.
//!
//! A kernel that works on many tensors at once (grouped products, an optimizer's step over all of a model's parameters) names them by index.
//! A few tensor maps fit among the parameters ([`Kernel::tensor_map_table`]). Of more entries, and of addresses, which parameters cannot be
//! picked from at run time, a table stands in scratch. Small launches in front write it, and carry the entries as parameters: so each
//! execution patches addresses and encodes maps as it does for every launch, and nothing is copied from the host.

use crate::face::{AsVal, Header, Kernel, Pointer, TensorMap, build};
use crate::inst::Scope;
use crate::ir::{MapDecl, Target};
use crate::params::{Arguments, MapTemplate, ReadWrite, Write};
use crate::program::{Address, KernelRef, Launch, MapSpec, Program, Residency, Step};
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
    let kernel = KernelRef::new(ADDRESSES, || build(addresses_header(), addresses));
    write(program, entries, &kernel, |number, count, entry| {
        let table = Address { offset_bytes: table.offset_bytes + u64::from(number * ADDRESS_BYTES), ..table };
        AddressesArgs { table, count, entry }.bound(&())
    });
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
    write(program, entries, &kernel, |number, count, entry| {
        let table = Address { offset_bytes: table.offset_bytes + u64::from(number * MAP_BYTES), ..table };
        MapsArgs { table, count, entry }.bound(decl)
    });
    table
}

/// The launches that write a table, from `arguments(first, count, entries)`; what the last has no entry for is filled up with its last one and not
/// written.
fn write<E: Clone, const N: usize>(
    program: &mut Program,
    entries: &[E],
    kernel: &KernelRef,
    arguments: impl Fn(u32, u32, [E; N]) -> Arguments,
) {
    for (number, part) in entries.chunks(N).enumerate() {
        let entries = std::array::from_fn(|entry| part[entry.min(part.len() - 1)].clone());
        let args = arguments((number * N) as u32, part.len() as u32, entries);
        let kernel = kernel.clone();
        program.steps.push(Step::Launch(Launch { kernel, grid: [1; 3], residency: Residency::Any, overlap: false, args }));
    }
}

const ADDRESSES: &str = "table_addresses";

crate::parameters! {
    /// A table of addresses, and its entries.
    struct Addresses / AddressesArgs of () as _spec {
        table: Write = ADDRESS_BYTES,
        count: u32,
        /// What a kernel does with an entry is not known here.
        entry: [ReadWrite; ADDRESSES_OF_A_LAUNCH as usize] = 1,
    }
}

/// One thread an entry.
fn addresses(k: Kernel<'_>) {
    let Addresses { table, count, entry } = Addresses::declare(k, &());
    let thread = k.thread();
    for (number, entry) in (0..ADDRESSES_OF_A_LAUNCH).zip(entry) {
        k.when(thread.eq(number) & count.gt(number), || k.st_global(table.at(number, ADDRESS_BYTES), 0, entry.address()));
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

crate::parameters! {
    /// A table of tensor maps, and its entries.
    struct Maps / MapsArgs of MapDecl as decl {
        table: ReadWrite = MAP_BYTES,
        count: u32,
        entry: [MapTemplate; MAPS_OF_A_LAUNCH as usize] = *decl,
    }
}

/// One warp: each map goes through shared memory, from where it is published for TMA.
fn tensor_maps(k: Kernel<'_>, decl: &MapDecl) {
    let Maps { table, count, entry } = Maps::declare(k, decl);
    let rooms: Vec<_> = entry
        .into_iter()
        .map(|entry| {
            let room = k.shared("map", MAP_BYTES, MAP_BYTES);
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
