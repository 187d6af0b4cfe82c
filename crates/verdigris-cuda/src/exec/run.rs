//! Execution: what a caller lends, the guard over it, and the submission of every step.

use std::mem::MaybeUninit;

use verdigris_kir::execution::{GridFunction, HostValue, Known, ListFault, TensorList, wanted};
use verdigris_kir::ir::Ty;
use verdigris_kir::program::{Address, Base, SCRATCH_ALIGNMENT_BYTES};
use verdigris_tensor::{BindingError, BindingRule};

use super::marks::Constants;
use super::{LoadedLaunch, LoadedStep, MAX_PARAMETER_BYTES, NumberNeed, Patch, SlotNeed};
use crate::error::Error;
use crate::kernels::{LoadReport, LoadedKernel};
use crate::launch::{LaunchConfig, LaunchError, Parameters};
use crate::memory::{self, DeviceSlice};
use crate::stream::Stream;
use crate::tensor_map;

/// What a caller lends to one execution.
#[derive(Debug, Clone, Copy)]
pub struct Bindings<'a> {
    /// The buffers, by slot number. Each must reach as far as the program's problem says.
    pub buffers: &'a [DeviceSlice<'a>],
    /// At least [`LoadedProgram::workspace_bytes`], at a multiple of 256; its contents are lost.
    pub workspace: DeviceSlice<'a>,
    /// The numbers that the program reads from the host, by index, each in the type in which kernels take it.
    pub host_scalars: &'a [HostValue],
    /// The program's lists of tensors ([`LoadedProgram::lists`]), by index.
    pub lists: &'a [&'a [DeviceSlice<'a>]],
}

/// A program on a device: kernels and constants are there. Immutable: it can be executed from several threads and streams at once, each
/// with a workspace of its own. Its constants are freed behind what was submitted before it is dropped, on whichever streams; a graph that was captured
/// of it may be launched as long as it lives.
#[derive(Debug)]
pub struct LoadedProgram {
    pub(super) steps: Vec<LoadedStep>,
    pub(super) reports: Vec<(String, LoadReport)>,
    pub(super) slots: Vec<SlotNeed>,
    pub(super) numbers: Vec<NumberNeed>,
    pub(super) lists: Vec<TensorList>,
    pub(super) has_sized: bool,
    pub(super) scratch_offsets: Vec<u64>,
    pub(super) workspace_bytes: u64,
    pub(super) constant_offsets: Vec<u64>,
    /// All constants, one after the other.
    pub(super) constants: Constants,
}

/// Room for the parameters of one launch, aligned as the strictest of them.
#[repr(align(128))]
struct Block(MaybeUninit<[u8; MAX_PARAMETER_BYTES]>);

impl LoadedProgram {
    /// The workspace that each execution needs.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Bytes of constants that the program keeps on the device. Kernels read them there, those of a captured graph too, for as long as it is replayed.
    pub fn constant_bytes(&self) -> u64 {
        self.constants.buffer().len_bytes()
    }

    /// The number of kernel launches.
    pub fn launch_count(&self) -> usize {
        self.kernels().count()
    }

    /// For each launch in order: the kernel's name and where it came from.
    pub fn reports(&self) -> &[(String, LoadReport)] {
        &self.reports
    }

    /// What the program asks of each buffer slot.
    pub fn slots(&self) -> &[SlotNeed] {
        &self.slots
    }

    /// What the program asks of the host scalars.
    pub fn numbers(&self) -> &[NumberNeed] {
        &self.numbers
    }

    /// The lists of tensors that are bound at execution, in the order of their indices.
    pub fn lists(&self) -> &[TensorList] {
        &self.lists
    }

    /// The kernels, in the order of the launches.
    pub fn kernels(&self) -> impl Iterator<Item = &LoadedKernel> {
        self.steps.iter().filter_map(|step| match step {
            LoadedStep::Launch(launch) => Some(&*launch.kernel),
            LoadedStep::Sized(sized) => Some(&*sized.0.kernel),
            LoadedStep::Fill { .. } | LoadedStep::Copy { .. } => None,
        })
    }

    /// Submits the whole program to the stream and returns without waiting.
    ///
    /// What is lent is held against what the program asks ([`LoadedProgram::slots`], [`LoadedProgram::workspace_bytes`]) before the first
    /// step: the driver's own guard, since addresses are worked out here. Who binds tensors checks them by name before and for all
    /// programs of a plan, and is never told of it. How far kernels reach through plain pointers is the program's word.
    ///
    /// After an error of the driver, steps before the failed one are already on the stream.
    ///
    /// # Errors
    /// [`Error::Binding`], [`Error::ContextMismatch`], [`Error::Driver`].
    pub fn execute(&self, stream: &Stream, bindings: &Bindings<'_>) -> Result<(), Error> {
        let context = stream.context();
        if self.constants.buffer().context() != context {
            return Err(Error::ContextMismatch { what: "executing a program", left: "program", right: "stream" });
        }
        self.guard(bindings)?;
        for (launch, function) in self.sized() {
            self.grid(launch, function, bindings)?;
        }
        // One entry for all steps: each then finds the context current.
        let _current = context.enter()?;
        self.constants.read_by(stream, || self.submit_all(stream, bindings))
    }

    /// Submits every step, of bindings that were checked.
    fn submit_all(&self, stream: &Stream, bindings: &Bindings<'_>) -> Result<(), Error> {
        let mut block = Block(MaybeUninit::uninit());
        for step in &self.steps {
            match step {
                LoadedStep::Fill { at, bytes, value } => memory::fill(stream, self.range(at, *bytes, bindings), *value)?,
                LoadedStep::Copy { to, from, bytes } => {
                    memory::copy(stream, self.range(to, *bytes, bindings), self.range(from, *bytes, bindings))?;
                }
                LoadedStep::Launch(launch) => self.submit(launch, &launch.config, &mut block, stream, bindings)?,
                LoadedStep::Sized(sized) => {
                    let (launch, function) = &**sized;
                    if let Some(grid) = self.grid(launch, function, bindings)? {
                        self.submit(launch, &LaunchConfig { grid, ..launch.config }, &mut block, stream, bindings)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Submits one launch.
    #[inline]
    fn submit(
        &self,
        launch: &LoadedLaunch,
        config: &LaunchConfig,
        block: &mut Block,
        stream: &Stream,
        bindings: &Bindings<'_>,
    ) -> Result<(), Error> {
        let length = launch.template.len();
        let start = block.0.as_mut_ptr().cast::<u8>();
        // SAFETY: a template has at most as many bytes as a block, by `parameters`, and is no part of it.
        unsafe { std::ptr::copy_nonoverlapping(launch.template.as_ptr(), start, length) };
        // SAFETY: these bytes of the block were written above, and are borrowed alone until the launch.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start, length) };
        for patch in &launch.patches {
            self.apply(patch, bytes, stream, bindings)?;
        }
        let arguments = Parameters { bytes, offsets_bytes: &launch.offsets_bytes };
        // SAFETY: number, order and types of the arguments were compared with the compiled kernel's when the program was
        // loaded; addresses lie in slices, whose makers vouch for them. A grid of the day is within the one that was checked then.
        unsafe { launch.kernel.function.launch_checked(stream, config, arguments) }
    }

    /// The launches whose grids are known at execution.
    fn sized(&self) -> impl Iterator<Item = &(LoadedLaunch, GridFunction)> {
        // A program without them has nothing to go through.
        let steps = if self.has_sized { &self.steps[..] } else { &[] };
        steps.iter().filter_map(|step| if let LoadedStep::Sized(sized) = step { Some(&**sized) } else { None })
    }

    /// The grid of the day; `None` where nothing is launched.
    fn grid(&self, launch: &LoadedLaunch, function: &GridFunction, bindings: &Bindings<'_>) -> Result<Option<[u32; 3]>, Error> {
        let lengths = |list: usize| bindings.lists.get(list).map(|tensors| tensors.len() as u64);
        let known = Known { scalars: bindings.host_scalars, list_lengths: &lengths };
        let grid = function.grid(&known, launch.config.grid, launch.config.cluster[0]);
        grid.map_err(|fault| LaunchError::GridFunction { kernel: launch.kernel.function.name().to_owned(), fault }.into())
    }

    /// Writes one patch into a parameter block.
    fn apply(&self, patch: &Patch, block: &mut [u8], stream: &Stream, bindings: &Bindings<'_>) -> Result<(), Error> {
        let mut write = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        match patch {
            Patch::Pointer { at, to } => write(*at, &self.address(to, bindings).to_le_bytes()),
            Patch::HostScalar { at, index, ty } => {
                let bits = bindings.host_scalars[*index].bits(*ty).map_err(|_| self.unfit_number(*index, *ty, bindings))?;
                write(*at, &bits.to_le_bytes()[..ty.bytes() as usize]);
            }
            Patch::ListAddress { at, list, entry } => {
                let tensor = bindings.lists[*list].get(*entry as usize);
                write(*at, &tensor.map_or(0, DeviceSlice::address).to_le_bytes());
            }
            Patch::ListExtent { at, list, entry, element_bytes } => {
                let bytes = bindings.lists[*list].get(*entry as usize).map_or(0, DeviceSlice::len_bytes);
                write(*at, &(bytes / u64::from(*element_bytes)).to_le_bytes());
            }
            Patch::ListCount { at, list, first, most } => {
                let count = (bindings.lists[*list].len() as u64).saturating_sub(u64::from(*first)).min(u64::from(*most));
                write(*at, &(count as u32).to_le_bytes());
            }
            Patch::TensorMap { at, to, spec } => {
                let map = tensor_map::encode_checked(stream.context().driver(), self.address(to, bindings), spec)?;
                write(*at, &map.bytes());
            }
        }
        Ok(())
    }

    fn guard(&self, bindings: &Bindings<'_>) -> Result<(), BindingError> {
        let (given, needed) = (bindings.buffers.len(), self.slots.len());
        if given < needed {
            return Err(BindingError::new(format!("buffer {given}"), "memory", "nothing", BindingRule::Missing));
        }
        for need in &self.numbers {
            let Some(value) = bindings.host_scalars.get(need.index) else {
                return Err(BindingError::new(format!("host scalar {}", need.index), wanted(need.ty), "nothing", BindingRule::Missing));
            };
            if value.bits(need.ty).is_err() {
                return Err(self.unfit_number(need.index, need.ty, bindings));
            }
        }
        for (number, list) in self.lists.iter().enumerate() {
            let name = || format!("list `{}`", list.name);
            let Some(tensors) = bindings.lists.get(number) else {
                return Err(BindingError::new(name(), format!("at most {} tensors", list.most), "nothing", BindingRule::Missing));
            };
            let given = |entry: usize| (tensors[entry].address(), tensors[entry].len_bytes());
            list.check(tensors.len() as u64, given).map_err(|fault| list_error(list, fault))?;
        }
        for (slot, (buffer, need)) in bindings.buffers.iter().zip(&self.slots).enumerate() {
            fits(buffer, need, || format!("buffer {slot}"))?;
        }
        let bytes = self.workspace_bytes;
        fits(&bindings.workspace, &SlotNeed { bytes, alignment_bytes: if bytes > 0 { SCRATCH_ALIGNMENT_BYTES } else { 1 } }, || {
            "workspace".to_owned()
        })
    }

    /// A number that a parameter's type does not hold.
    fn unfit_number(&self, index: usize, ty: Ty, bindings: &Bindings<'_>) -> BindingError {
        let need = self.numbers.iter().find(|need| (need.index, need.ty) == (index, ty));
        let of = need.map_or_else(String::new, |need| format!(", parameter {} of {}", need.parameter, need.kernel));
        let given = bindings.host_scalars.get(index).map_or_else(|| "nothing".to_owned(), HostValue::to_string);
        BindingError::new(format!("host scalar {index}{of}"), wanted(ty), given, BindingRule::Number)
    }

    /// The device address, in bindings that were checked.
    fn address(&self, address: &Address, bindings: &Bindings<'_>) -> u64 {
        let start = match address.base {
            Base::Buffer(slot) => bindings.buffers[slot].address(),
            Base::Scratch(index) => bindings.workspace.address() + self.scratch_offsets[index],
            Base::Constant(index) => self.constants.buffer().address() + self.constant_offsets[index],
        };
        start + address.offset_bytes
    }

    /// The range of that many bytes from the address on, in bindings that were checked.
    fn range<'a>(&self, address: &Address, bytes: u64, bindings: &Bindings<'a>) -> DeviceSlice<'a> {
        // SAFETY: `Needs` saw that the range lies within scratch or constants, and `guard` that it lies within the bound buffers.
        unsafe { DeviceSlice::from_raw(self.address(address, bindings), bytes) }
    }
}

fn list_error(list: &TensorList, fault: ListFault) -> BindingError {
    let TensorList { name, most, element_bytes, alignment_bytes } = list;
    let wanted = format!("at most {most} tensors of elements of {element_bytes} bytes, at multiples of {alignment_bytes} bytes");
    let rule = match fault {
        ListFault::Length { .. } | ListFault::Bytes { .. } => BindingRule::Length,
        ListFault::Alignment { .. } => BindingRule::Alignment,
    };
    BindingError::new(format!("list `{name}`"), wanted, fault.to_string(), rule)
}

fn fits(memory: &DeviceSlice<'_>, need: &SlotNeed, name: impl Fn() -> String) -> Result<(), BindingError> {
    let (address, bytes) = (memory.address(), memory.len_bytes());
    if bytes < need.bytes {
        return Err(BindingError::new(name(), format!("memory of {} bytes", need.bytes), format!("{bytes} bytes"), BindingRule::Length));
    }
    if !address.is_multiple_of(need.alignment_bytes) {
        let wanted = format!("a multiple of {} bytes", need.alignment_bytes);
        return Err(BindingError::new(name(), wanted, format!("{address:#x}"), BindingRule::Alignment));
    }
    Ok(())
}
