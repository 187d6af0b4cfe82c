//! Lists of tensors whose number is known only at execution: an optimizer's step over all of a model's parameters, a foreach.
//!
//! A program declares a list with its greatest length ([`add_list`]); each execution binds as many tensors as it has. Small launches in front write a
//! table of addresses and extents into scratch and carry the entries as parameters: a captured graph keeps them, and nothing is copied from the
//! host. A kernel reads the table by index through a [`List`] among its parameters, and knows how many entries there are.
//!
//! ```
//! use verdigris_kir::execution::{GridFunction, Known, TensorList};
//! use verdigris_kir::face::{Header, build};
//! use verdigris_kir::interp::{self, Kernels, Memory, Options};
//! use verdigris_kir::ir::Target;
//! use verdigris_kir::program::{KernelRef, Launch, Program};
//! use verdigris_kir::tile::list::{List, add_list};
//!
//! verdigris_kir::parameters! {
//!     /// The list.
//!     struct Zero / ZeroArguments of () as _spec { tensors: List, }
//! }
//!
//! // A CTA for each tensor sets its elements to 0.
//! let kernel = KernelRef::new("zero_all", || {
//!     let header = Header { name: "zero_all".into(), target: Target::Sm80, threads: 32, ..Header::default() };
//!     build(header, |k| {
//!         let Zero { tensors } = Zero::declare(k, &());
//!         let tensor = tensors.at(k.cta());
//!         k.when(k.thread().widen().lt(tensor.extent), || k.st_global(tensor.start.at(k.thread(), 4), 0, k.constant(0u32)));
//!     })
//! });
//! let mut program = Program::default();
//! let tensors = add_list(&mut program, TensorList { name: "tensors", most: 100, element_bytes: 4, alignment_bytes: 4 });
//! let grid = GridFunction::new("a CTA for each tensor", move |known: &Known<'_>| {
//!     [known.list_length(tensors.list).unwrap_or(0) as u32, 1, 1]
//! });
//! program.launch_sized(Launch::new(kernel, [100, 1, 1], ZeroArguments { tensors }.bound(&())), grid);
//!
//! let mut memory = Memory::new();
//! let lists = vec![vec![memory.add(&[7; 8]), memory.add(&[7; 20])]];
//! interp::run(&program, &Kernels::new(), &mut memory, &Options { lists, ..Options::default() }).expect("runs");
//! assert_eq!((memory.to_vec(0), memory.to_vec(1)), (vec![0; 8], vec![0; 20]));
//! ```

use crate::execution::TensorList;
use crate::face::{AsVal, Header, Kernel, Pointer, Val, build};
use crate::ir::Target;
use crate::params::{Arguments, Parameter, Write};
use crate::program::{Address, Arg, KernelRef, Launch, Program};
use std::panic::Location;

/// Entries that one launch writes: 1 KiB of parameters.
pub const ENTRIES_OF_A_LAUNCH: u32 = 64;
/// Bytes of an entry: address and extent.
const ENTRY_BYTES: u32 = 16;

/// A list of a program, as a parameter of a kernel: its number and its table.
#[derive(Clone, Copy, Debug)]
pub enum List {}

/// The argument of [`List`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListArgument {
    /// An index into [`Program::lists`].
    pub list: usize,
    /// Where its table stands.
    pub table: Address,
}

/// A list in the kernel that reads it.
#[derive(Clone, Copy, Debug)]
pub struct TensorTable<'k> {
    /// How many tensors there are.
    pub count: Val<'k, u32>,
    table: Pointer<'k>,
}

/// A tensor of a list.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'k> {
    /// Its first element.
    pub start: Pointer<'k>,
    /// Its elements.
    pub extent: Val<'k, u64>,
}

/// Adds a list, its table in scratch, and the launches that write it.
pub fn add_list(program: &mut Program, list: TensorList) -> ListArgument {
    let (number, most) = (program.lists.len(), list.most);
    let table = program.add_scratch(list.name, u64::from(ENTRY_BYTES) * u64::from(most));
    program.lists.push(list);
    let kernel = KernelRef::new(NAME, || build(header(), write));
    for first in (0..most).step_by(ENTRIES_OF_A_LAUNCH as usize) {
        let table = Address { offset_bytes: table.offset_bytes + u64::from(first) * u64::from(ENTRY_BYTES), ..table };
        let entry = std::array::from_fn(|entry| (number, first + entry as u32));
        let args = EntriesArgs { table, count: (number, first), start: entry, extent: entry }.bound(&());
        program.launch(Launch::new(kernel.clone(), [1; 3], args));
    }
    ListArgument { list: number, table }
}

impl Parameter for List {
    type Spec = ();
    type Value<'k> = TensorTable<'k>;
    type Argument = ListArgument;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, (): &()) -> TensorTable<'k> {
        TensorTable { count: k.scalar(name), table: k.input(name, ENTRY_BYTES) }
    }

    fn bind(ListArgument { list, table }: ListArgument, name: &'static str, (): &(), to: &mut Arguments) {
        to.push(name, 1, Arg::ListCount { list, first: 0, most: u32::MAX });
        to.push(name, ENTRY_BYTES, Arg::Pointer(table));
    }
}

impl<'k> TensorTable<'k> {
    /// The tensor at a place below [`TensorTable::count`].
    #[track_caller]
    pub fn at(&self, index: impl AsVal<'k, u32>) -> Entry<'k> {
        let entry = self.table.at(index, ENTRY_BYTES);
        let k = entry.kernel();
        k.scope(Location::caller(), || Entry { start: Pointer::at_address(k.ld_global::<u64>(entry, 0)), extent: k.ld_global(entry, 8) })
    }
}

/// How many entries a launch writes.
#[derive(Clone, Copy, Debug)]
enum Count {}
/// Where an entry's tensor is.
#[derive(Clone, Copy, Debug)]
enum Start {}
/// How many elements it has.
#[derive(Clone, Copy, Debug)]
enum Extent {}

impl Parameter for Count {
    type Spec = ();
    type Value<'k> = Val<'k, u32>;
    /// The list, and the launch's first entry.
    type Argument = (usize, u32);

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, (): &()) -> Val<'k, u32> {
        k.scalar(name)
    }

    fn bind((list, first): (usize, u32), name: &'static str, (): &(), to: &mut Arguments) {
        to.push(name, 1, Arg::ListCount { list, first, most: ENTRIES_OF_A_LAUNCH });
    }
}

impl Parameter for Start {
    type Spec = ();
    type Value<'k> = Pointer<'k>;
    type Argument = (usize, u32);

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, (): &()) -> Pointer<'k> {
        // What a kernel does with an entry is not known here.
        k.in_out(name, 1)
    }

    fn bind((list, entry): (usize, u32), name: &'static str, (): &(), to: &mut Arguments) {
        to.push(name, 1, Arg::ListAddress { list, entry });
    }
}

impl Parameter for Extent {
    type Spec = ();
    type Value<'k> = Val<'k, u64>;
    type Argument = (usize, u32);

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, (): &()) -> Val<'k, u64> {
        k.scalar(name)
    }

    fn bind((list, entry): (usize, u32), name: &'static str, (): &(), to: &mut Arguments) {
        to.push(name, 1, Arg::ListExtent { list, entry });
    }
}

const NAME: &str = "table_list";

crate::parameters! {
    /// A part of a table, and its entries.
    struct Entries / EntriesArgs of () as _spec {
        table: Write = ENTRY_BYTES,
        count: Count,
        start: [Start; ENTRIES_OF_A_LAUNCH as usize],
        extent: [Extent; ENTRIES_OF_A_LAUNCH as usize],
    }
}

fn header() -> Header {
    Header { name: NAME.into(), target: Target::Sm80, threads: ENTRIES_OF_A_LAUNCH, ..Header::default() }
}

/// One thread an entry.
fn write(k: Kernel<'_>) {
    let Entries { table, count, start, extent } = Entries::declare(k, &());
    let thread = k.thread();
    for (number, (start, extent)) in (0..ENTRIES_OF_A_LAUNCH).zip(start.into_iter().zip(extent)) {
        k.when(thread.eq(number) & count.gt(number), || {
            let entry = table.at(number, ENTRY_BYTES);
            k.st_global(entry, 0, start.address());
            k.st_global(entry, 8, extent);
        });
    }
}
