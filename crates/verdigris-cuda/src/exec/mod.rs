//! Programs loaded on a device, and run.
//!
//! [`Loader::load`] turns a [`Program`] into a [`LoadedProgram`]: kernels loaded, constants on the device, every launch a block of
//! parameter bytes with a list of patches. [`LoadedProgram::execute`] copies each block to its stack, patches in the addresses of the
//! day, encodes the tensor maps over them and launches. A loaded program never changes, so any number of threads may execute it
//! at once, and a stream that captures records it like any other work.
//!
//! Every allocation, compilation and query happens while loading; executing does none.

mod marks;
mod run;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use verdigris_kir::execution::{GridFunction, HostValue};
use verdigris_kir::ir::Ty;
use verdigris_kir::program::{
    Address, Arg, Base, Divisor, KernelRef, Launch, MapSpec, Mismatch, Program, Residency, SCRATCH_ALIGNMENT_BYTES, Step,
};
use verdigris_kir::ptx::{self, Isa};
use verdigris_kir::verify::verify;

use crate::cache::CacheKey;
use crate::error::Error;
use crate::facts::{KernelFacts, ParameterFact, hash_of};
use crate::jit::CompileOptions;
use crate::kernels::{KernelSource, LoadReport, LoadedKernel, ModuleCache};
use crate::launch::{LaunchConfig, LaunchError, MAX_PARAMETERS};
use crate::memory::Pool;
use crate::stream::Stream;
use crate::tensor_map::{self, MapError};

use marks::Constants;
pub use run::{Bindings, LoadedProgram};

/// Most bytes of parameters: what every driver that we run on takes.
const MAX_PARAMETER_BYTES: usize = 4096;

/// What is needed to load programs: kernels' cache, memory for constants, and what the cache key holds beside the spec.
#[derive(Clone)]
pub struct Loader {
    /// The kernels of the context.
    pub cache: Arc<ModuleCache>,
    /// Where constants live.
    pub pool: Pool,
    /// Hash of the sources that build and print kernels; see [`CacheKey::source_hash`].
    pub source_hash: [u8; 32],
    /// How kernels are compiled.
    pub options: CompileOptions,
}

impl Loader {
    /// The key under which a kernel of that spec is kept.
    pub fn key(&self, spec: &str) -> CacheKey {
        let properties = self.cache.context().properties();
        CacheKey {
            source_hash: self.source_hash,
            spec: spec.to_owned(),
            arch: properties.arch_key(),
            driver_version: properties.driver_version,
            driver_release: self.cache.context().driver().release().to_owned(),
            ptx_isa: properties.ptx_isa,
            options: self.options,
        }
    }

    /// Whether the kernel can be had without a compilation.
    pub fn is_ready(&self, kernel: &KernelRef) -> bool {
        self.cache.is_ready(&self.key(kernel.name()))
    }

    /// The kernel, loaded; built, verified, printed and compiled only where no compiled copy is found. Several threads may ask at
    /// once, so that a program's kernels can be compiled side by side before it is loaded.
    ///
    /// # Errors
    /// [`Error::Unverified`], [`Error::PtxVersion`], [`Error::Compile`], [`Error::Launch`], [`Error::Driver`].
    pub fn kernel(&self, kernel: &KernelRef) -> Result<(Arc<LoadedKernel>, LoadReport), Error> {
        let properties = self.cache.context().properties();
        let isa = properties.ptx_isa;
        self.cache.kernel(&self.key(kernel.name()), &ptx::entry_name(kernel.name()), || {
            let body = verify(kernel.build())?;
            let needed = Isa::needed_by(&body);
            if needed > isa {
                let (kernel, driver_version) = (kernel.name().to_owned(), properties.driver_version);
                return Err(Error::PtxVersion { kernel, needed, found: isa, driver_version });
            }
            let allowed_spill_bytes = body.allowed_spill_bytes;
            Ok(KernelSource { ptx: ptx::print(&body, isa), facts: KernelFacts::of(&body), allowed_spill_bytes })
        })
    }

    /// Loads a program. `stream` carries the constants over; it is waited for.
    ///
    /// # Errors
    /// As [`Loader::kernel`]; [`Error::Mismatch`] where arguments do not fit a kernel, [`Error::Map`], [`Error::Launch`],
    /// [`Error::OwnMemory`], [`Error::OutOfMemory`].
    pub fn load(&self, program: &Program, stream: &Stream) -> Result<LoadedProgram, Error> {
        if self.pool.context() != self.cache.context() {
            return Err(Error::ContextMismatch { what: "loading a program", left: "pool", right: "module cache" });
        }
        let (scratch_offsets, workspace_bytes) = program.workspace();
        let mut packed = Vec::new();
        let mut constant_offsets = Vec::new();
        for constant in &program.constants {
            packed.resize(packed.len().next_multiple_of(SCRATCH_ALIGNMENT_BYTES as usize), 0);
            constant_offsets.push(packed.len() as u64);
            packed.extend_from_slice(constant);
        }
        let mut needs = Needs::new(program);
        let (mut steps, mut reports) = (Vec::new(), Vec::new());
        for step in &program.steps {
            steps.push(match step {
                Step::Launch(launch) | Step::SizedLaunch(launch, _) => {
                    let (kernel, report) = self.kernel(&launch.kernel)?;
                    reports.push((launch.kernel.name().to_owned(), report));
                    let loaded = load_launch(launch, kernel, &mut needs)?;
                    match step {
                        Step::SizedLaunch(_, grid) => LoadedStep::Sized(Box::new((loaded, grid.clone()))),
                        _ => LoadedStep::Launch(loaded),
                    }
                }
                Step::Fill { at, bytes, value } => {
                    needs.see(at, *bytes, 1)?;
                    LoadedStep::Fill { at: *at, bytes: *bytes, value: *value }
                }
                Step::Copy { to, from, bytes } => {
                    needs.see(to, *bytes, 1)?;
                    needs.see(from, *bytes, 1)?;
                    LoadedStep::Copy { to: *to, from: *from, bytes: *bytes }
                }
            });
        }
        Ok(LoadedProgram {
            steps,
            reports,
            slots: needs.slots,
            numbers: needs.numbers,
            lists: program.lists.clone(),
            has_sized: program.steps.iter().any(|step| matches!(step, Step::SizedLaunch(..))),
            scratch_offsets,
            workspace_bytes,
            constant_offsets,
            constants: Constants::new(self.pool.alloc_from(stream, &packed)?),
        })
    }
}

/// What a program asks of its caller, found while loading, so that all of it can be checked before the first step.
struct Needs<'p> {
    program: &'p Program,
    slots: Vec<SlotNeed>,
    numbers: Vec<NumberNeed>,
}

/// What a program asks of one host scalar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumberNeed {
    /// Which one.
    pub index: usize,
    /// The type of a parameter that takes it.
    pub ty: Ty,
    /// The parameter's name; empty where arguments are given by position.
    pub parameter: &'static str,
    /// Its kernel.
    pub kernel: String,
}

/// What a program asks of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotNeed {
    /// One past the last byte that tensor maps, fills, copies and offsets reach.
    pub bytes: u64,
    /// The alignment that the program relies on, tensor maps included.
    pub alignment_bytes: u64,
}

impl<'p> Needs<'p> {
    fn new(program: &'p Program) -> Self {
        let slot = |&alignment_bytes: &u64| SlotNeed { bytes: 0, alignment_bytes: alignment_bytes.max(1) };
        Self { program, slots: program.buffer_alignment_bytes.iter().map(slot).collect(), numbers: Vec::new() }
    }

    /// Notes that a parameter takes a host scalar.
    fn number(&mut self, index: usize, ty: Ty, parameter: &'static str, kernel: &str) {
        // One parameter of each type is enough to say what is wrong.
        if !self.numbers.iter().any(|known| (known.index, known.ty) == (index, ty)) {
            self.numbers.push(NumberNeed { index, ty, parameter, kernel: kernel.to_owned() });
        }
    }

    /// Notes that the program uses `bytes` bytes from the address on, and relies on its alignment.
    fn see(&mut self, address: &Address, bytes: u64, alignment_bytes: u64) -> Result<(), Error> {
        let end_bytes = address.offset_bytes.saturating_add(bytes);
        let own = match address.base {
            Base::Buffer(slot) => {
                if self.slots.len() <= slot {
                    self.slots.resize(slot + 1, SlotNeed { bytes: 0, alignment_bytes: 1 });
                }
                let need = &mut self.slots[slot];
                need.bytes = need.bytes.max(end_bytes);
                // Alignments are powers of two, so that the greatest serves all.
                need.alignment_bytes = need.alignment_bytes.max(alignment_bytes);
                return Ok(());
            }
            Base::Scratch(index) => self.program.scratch.get(index).map(|piece| piece.bytes),
            Base::Constant(index) => self.program.constants.get(index).map(|constant| constant.len() as u64),
        };
        if own.is_some_and(|own| end_bytes <= own) {
            return Ok(());
        }
        Err(Error::OwnMemory { base: address.base, end_bytes, bytes: own })
    }
}

/// A step as it is executed.
#[derive(Debug)]
enum LoadedStep {
    Launch(LoadedLaunch),
    /// With the function that gives its grid; that of the launch is the greatest.
    Sized(Box<(LoadedLaunch, GridFunction)>),
    Fill {
        at: Address,
        bytes: u64,
        value: u8,
    },
    Copy {
        to: Address,
        from: Address,
        bytes: u64,
    },
}

/// A launch whose parameters are known but for what the patches write.
#[derive(Debug)]
struct LoadedLaunch {
    kernel: Arc<LoadedKernel>,
    config: LaunchConfig,
    offsets_bytes: Box<[u32]>,
    template: Box<[u8]>,
    patches: Box<[Patch]>,
}

/// What is written into a parameter block at execution, and where.
#[derive(Debug)]
enum Patch {
    Pointer { at: usize, to: Address },
    HostScalar { at: usize, index: usize, ty: Ty },
    ListAddress { at: usize, list: usize, entry: u32 },
    ListExtent { at: usize, list: usize, entry: u32, element_bytes: u32 },
    ListCount { at: usize, list: usize, first: u32, most: u32 },
    TensorMap { at: usize, to: Address, spec: Box<MapSpec> },
}

fn load_launch(launch: &Launch, kernel: Arc<LoadedKernel>, needs: &mut Needs<'_>) -> Result<LoadedLaunch, Error> {
    let (template, patches) = parameters(launch, &kernel.facts, needs)?;
    let facts = &kernel.facts;
    let config = LaunchConfig {
        grid: launch.grid,
        block: [facts.threads, 1, 1],
        cluster: [facts.cluster, 1, 1],
        dynamic_smem_bytes: facts.shared_bytes,
        overlap: launch.overlap,
        cooperative: launch.residency == Residency::All,
    };
    kernel.function.check(&config)?;
    if config.cooperative {
        let ctas = config.grid.iter().fold(1_u64, |ctas, &extent| ctas.saturating_mul(extent.into()));
        let resident = u64::from(kernel.function.resident_clusters(&config)?) * u64::from(facts.cluster);
        if ctas > resident {
            return Err(LaunchError::Residency { kernel: launch.kernel.name().to_owned(), ctas, resident }.into());
        }
    }
    let offsets_bytes = facts.parameters.iter().map(|parameter| parameter.offset_bytes).collect();
    Ok(LoadedLaunch { offsets_bytes, template: template.into(), patches: patches.into(), config, kernel })
}

/// The parameter block of a launch and what is left to write into it.
fn parameters(launch: &Launch, facts: &KernelFacts, needs: &mut Needs<'_>) -> Result<(Vec<u8>, Vec<Patch>), Error> {
    let name = launch.kernel.name();
    let mismatch = |what: String| Error::Mismatch(Mismatch { kernel: name.to_owned(), what });
    let (given, declared) = (launch.args.len(), facts.parameters.len());
    if given != declared {
        return Err(mismatch(format!("{given} arguments given, {declared} parameters compiled")));
    }
    let (bytes, most) = (facts.parameter_bytes, MAX_PARAMETER_BYTES as u32);
    if bytes > most || declared > MAX_PARAMETERS {
        return Err(LaunchError::ParameterBytes { kernel: name.to_owned(), bytes, most }.into());
    }
    let mut template = vec![0_u8; bytes as usize];
    let mut patches = Vec::new();
    let list_of = |list: usize| {
        let declared = needs.program.lists.get(list);
        declared.ok_or_else(|| mismatch(format!("it reads list {list} of {} that the program declares", needs.program.lists.len())))
    };
    for list in launch.args.iter().filter_map(list_named) {
        list_of(list)?;
    }
    let names: Vec<&'static str> = launch.args.names().collect();
    for (index, (arg, parameter)) in launch.args.iter().zip(&facts.parameters).enumerate() {
        let at = parameter.offset_bytes as usize;
        let unfit = || mismatch(format!("parameter {index} is compiled as {:?}, argument is {arg:?}", parameter.fact));
        let room = template.get_mut(at..at + parameter.fact.bytes() as usize).ok_or_else(unfit)?;
        match (arg, parameter.fact) {
            (Arg::Scalar(ty, bits), ParameterFact::Scalar { bytes }) if ty.bytes().max(4) == bytes => {
                room.copy_from_slice(&bits.to_le_bytes()[..bytes as usize]);
            }
            (Arg::HostScalar(ty, number), ParameterFact::Scalar { bytes }) if HostValue::is_taken_by(*ty) && ty.bytes() == bytes => {
                needs.number(*number, *ty, names.get(index).copied().unwrap_or(""), name);
                patches.push(Patch::HostScalar { at, index: *number, ty: *ty });
            }
            (&Arg::ListAddress { list, entry }, ParameterFact::Pointer { .. }) => patches.push(Patch::ListAddress { at, list, entry }),
            (&Arg::ListExtent { list, entry }, ParameterFact::Scalar { bytes: 8 }) => {
                let element_bytes = needs.program.lists.get(list).map_or(1, |list| list.element_bytes.max(1));
                patches.push(Patch::ListExtent { at, list, entry, element_bytes });
            }
            (&Arg::ListCount { list, first, most }, ParameterFact::Scalar { bytes: 4 }) => {
                patches.push(Patch::ListCount { at, list, first, most });
            }
            (Arg::Divisor(divisor), ParameterFact::Divisor) => {
                let divisor = Divisor::new(*divisor).ok_or_else(unfit)?;
                for (place, word) in room.chunks_exact_mut(4).zip(divisor.words()) {
                    place.copy_from_slice(&word.to_le_bytes());
                }
            }
            (Arg::Pointer(to), ParameterFact::Pointer { alignment_bytes }) => {
                let alignment_bytes = u64::from(alignment_bytes.max(1));
                if !to.offset_bytes.is_multiple_of(alignment_bytes) {
                    return Err(unfit());
                }
                needs.see(to, 0, alignment_bytes)?;
                patches.push(Patch::Pointer { at, to: *to });
            }
            (Arg::TensorMap(to, spec), ParameterFact::TensorMap { decl_hash }) => {
                // The kernel may leave the box to the launch.
                if ![&spec.decl, &spec.decl.with_open_box()].into_iter().any(|decl| hash_of(decl) == decl_hash) {
                    return Err(unfit());
                }
                tensor_map::check(spec)?;
                if !to.offset_bytes.is_multiple_of(tensor_map::ALIGNMENT_BYTES) {
                    return Err(MapError::Address { address: to.offset_bytes }.into());
                }
                needs.see(to, tensor_map::span_bytes(spec), tensor_map::ALIGNMENT_BYTES)?;
                patches.push(Patch::TensorMap { at, to: *to, spec: Box::new(spec.clone()) });
            }
            _ => return Err(unfit()),
        }
    }
    Ok((template, patches))
}

/// The list that an argument is of.
fn list_named(arg: &Arg) -> Option<usize> {
    match arg {
        Arg::ListAddress { list, .. } | Arg::ListExtent { list, .. } | Arg::ListCount { list, .. } => Some(*list),
        _ => None,
    }
}

#[cfg(test)]
mod unit {
    use super::*;
    use crate::facts::Parameter;
    use verdigris_kir::ir::{Access, MapDecl, MapType, Swizzle};
    use verdigris_kir::program::{Fill, L2Promotion, Scratch};

    fn launch(args: Vec<Arg>) -> Launch {
        let kernel = KernelRef::new("k", || panic!("a cached kernel is not built"));
        Launch { kernel, grid: [1; 3], residency: Residency::Any, overlap: false, args: args.into() }
    }

    fn map() -> MapSpec {
        MapSpec {
            decl: MapDecl { ty: MapType::F32, rank: 2, box_dims: vec![4, 4], im2col: false, swizzle: Swizzle::None, access: Access::Read },
            dims: vec![10, 3],
            strides_bytes: vec![48],
            element_strides: vec![1, 1],
            lower_corner: vec![],
            upper_corner: vec![],
            fill: Fill::Zero,
            l2: L2Promotion::B128,
        }
    }

    fn facts() -> KernelFacts {
        let at = |offset_bytes, fact| Parameter { offset_bytes, fact };
        KernelFacts {
            threads: 128,
            cluster: 1,
            shared_bytes: 0,
            parameters: vec![
                at(0, ParameterFact::Scalar { bytes: 4 }),
                at(8, ParameterFact::Pointer { alignment_bytes: 16 }),
                at(16, ParameterFact::Divisor),
                at(32, ParameterFact::Scalar { bytes: 4 }),
                at(64, ParameterFact::TensorMap { decl_hash: hash_of(&map().decl) }),
            ],
            parameter_bytes: 192,
        }
    }

    fn args() -> Vec<Arg> {
        let pointer = Address { base: Base::Buffer(3), offset_bytes: 32 };
        let scalar = Arg::Scalar(Ty::U32, 0x0102_0304);
        vec![scalar, Arg::Pointer(pointer), Arg::Divisor(7), Arg::HostScalar(Ty::F32, 1), Arg::TensorMap(Address::scratch(0), map())]
    }

    #[test]
    fn the_template_holds_what_is_known_and_patches_the_rest() {
        let program = Program { scratch: vec![Scratch { name: "map", bytes: 136 }], ..Program::default() };
        let mut needs = Needs::new(&program);
        let (template, patches) = parameters(&launch(args()), &facts(), &mut needs).expect("fits");
        let mut expected = vec![0; 192];
        expected[..4].copy_from_slice(&[4, 3, 2, 1]);
        let words = Divisor::new(7).expect("not 0").words();
        for (i, word) in words.iter().enumerate() {
            expected[16 + 4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
        assert_eq!(template, expected);
        assert_eq!(
            (needs.slots.len(), needs.numbers.iter().map(|need| (need.index, need.ty)).collect::<Vec<_>>()),
            (4, vec![(1, Ty::F32)])
        );
        assert_eq!(needs.slots[3], SlotNeed { bytes: 32, alignment_bytes: 16 });
        assert_eq!(needs.slots[2], SlotNeed { bytes: 0, alignment_bytes: 1 });
        assert!(matches!(patches[0], Patch::Pointer { at: 8, .. }));
        assert!(matches!(patches[1], Patch::HostScalar { at: 32, index: 1, ty: Ty::F32 }));
        assert!(matches!(patches[2], Patch::TensorMap { at: 64, .. }));
        assert_eq!(patches.len(), 3);
    }

    #[test]
    fn a_host_scalar_takes_the_width_of_its_parameter() {
        let at = |offset_bytes, bytes| Parameter { offset_bytes, fact: ParameterFact::Scalar { bytes } };
        let facts = KernelFacts { parameters: vec![at(0, 8), at(8, 4)], parameter_bytes: 12, ..facts() };
        let program = Program::default();
        let args = || vec![Arg::HostScalar(Ty::F64, 0), Arg::HostScalar(Ty::U32, 0)];
        let (_, patches) = parameters(&launch(args()), &facts, &mut Needs::new(&program)).expect("fits");
        assert!(matches!(patches[0], Patch::HostScalar { at: 0, index: 0, ty: Ty::F64 }));
        assert!(matches!(patches[1], Patch::HostScalar { at: 8, index: 0, ty: Ty::U32 }));
        let narrow = KernelFacts { parameters: vec![at(0, 8), at(8, 2)], ..facts.clone() };
        let refused =
            |args, facts: &KernelFacts| parameters(&launch(args), facts, &mut Needs::new(&program)).expect_err("unfit").to_string();
        assert!(refused(args(), &narrow).contains("parameter 1"), "two bytes hold no host scalar");
        assert!(refused(vec![Arg::HostScalar(Ty::U32, 0); 2], &facts).contains("parameter 0"), "eight bytes are no u32");
        let list = Arg::ListExtent { list: 0, entry: 0 };
        assert!(refused(vec![list, Arg::HostScalar(Ty::U32, 0)], &facts).contains("it reads list 0 of 0 that the program declares"));
    }

    #[test]
    fn arguments_that_do_not_fit_are_refused() {
        let refused = |args: Vec<Arg>| {
            let program = Program { scratch: vec![Scratch { name: "map", bytes: 136 }], ..Program::default() };
            let mut needs = Needs::new(&program);
            parameters(&launch(args), &facts(), &mut needs).expect_err("does not fit").to_string()
        };
        assert!(refused(args()[..4].to_vec()).contains("4 arguments given, 5 parameters compiled"));
        let with = |index: usize, arg: Arg| {
            let mut args = args();
            args[index] = arg;
            refused(args)
        };
        assert!(with(0, Arg::Scalar(Ty::U64, 0)).contains("parameter 0"));
        assert!(with(1, Arg::Divisor(1)).contains("parameter 1"));
        let odd = Address { base: Base::Buffer(0), offset_bytes: 8 };
        assert!(with(1, Arg::Pointer(odd)).contains("parameter 1"), "8 is no multiple of 16");
        assert!(with(2, Arg::Divisor(0)).contains("parameter 2"));
        let mut other = map();
        other.decl.swizzle = Swizzle::B32;
        assert!(with(4, Arg::TensorMap(Address::scratch(0), other)).contains("parameter 4"), "built for another swizzle");
        let mut illegal = map();
        illegal.strides_bytes = vec![40];
        assert!(with(4, Arg::TensorMap(Address::scratch(0), illegal)).contains("40 bytes, not a multiple of 16"));
    }

    #[test]
    fn what_is_shared_between_threads_may_be() {
        fn shared<T: Send + Sync>() {}
        shared::<LoadedProgram>();
        shared::<Loader>();
        shared::<Stream>();
    }
}
