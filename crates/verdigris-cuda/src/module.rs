//! Loaded code: modules and their kernels.

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys;
use sys::CUfunction_attribute as FunctionAttribute;

use crate::device::Context;
use crate::error::{Doing, Error, Failure, status};
use crate::facts::KernelFacts;
use crate::launch::LaunchError;

/// Compiled code, loaded into a context. Cheap to clone; unloaded with its last holder.
#[derive(Clone)]
pub struct Module {
    inner: Arc<ModuleInner>,
}

struct ModuleInner {
    context: Context,
    raw: sys::CUmodule,
}

// SAFETY: a module handle may be used from any thread.
unsafe impl Send for ModuleInner {}
// SAFETY: as above; the driver locks internally.
unsafe impl Sync for ModuleInner {}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: the module is ours, and nobody can launch from it any more; the driver waits for what still runs.
            let _ = unsafe { self.context.driver().api().cuModuleUnload(self.raw) };
        }
    }
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Module").field("raw", &self.inner.raw).finish()
    }
}

impl Module {
    /// Loads a cubin, as [`compile`](crate::compile) or an offline assembler makes it.
    ///
    /// # Errors
    /// [`Error::Driver`], with `CUDA_ERROR_NO_BINARY_FOR_GPU` for another chip's.
    pub fn load_cubin(context: &Context, cubin: &[u8]) -> Result<Self, Error> {
        let _current = context.enter()?;
        let mut raw: sys::CUmodule = std::ptr::null_mut();
        // The loader reads an ELF image by its own headers: the end of the bytes is unknown to it.
        let image = cubin.as_ptr().cast::<c_void>();
        if !is_whole_elf(cubin) {
            return Err(Error::Driver {
                call: "cuModuleLoadDataEx",
                code: 200,
                name: "CUDA_ERROR_INVALID_IMAGE".to_owned(),
                text: "the image is cut off, or no ELF file".to_owned(),
                doing: format!("looking at {} bytes of a cubin", cubin.len()),
            });
        }
        let (none, nothing) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the image is a whole ELF file and outlives the call, which copies what it needs.
        unsafe { context.driver().api().cuModuleLoadDataEx(&mut raw, image, 0, none, nothing) }
            .doing(|| format!("loading a cubin of {} bytes", cubin.len()))?;
        Ok(Self::of(context, raw))
    }

    /// Takes over a module that was just loaded.
    pub(crate) fn of(context: &Context, raw: sys::CUmodule) -> Self {
        Self { inner: Arc::new(ModuleInner { context: context.clone(), raw }) }
    }

    /// The context that the module is loaded into.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The kernel of that entry name, ready to be launched with the given limits.
    ///
    /// # Errors
    /// [`Error::NoSuchKernel`], [`Error::Launch`] where the chip has not so much shared memory, [`Error::Driver`].
    pub fn function(&self, kernel: &str, options: FunctionOptions) -> Result<Function, Error> {
        let context = self.context();
        let api = context.driver().api();
        let missing = || Error::NoSuchKernel { kernel: kernel.to_owned() };
        let name = CString::new(kernel).map_err(|_| missing())?;
        let _current = context.enter()?;
        let mut raw: sys::CUfunction = std::ptr::null_mut();
        // SAFETY: the name is NUL-terminated and, with `raw`, outlives the call.
        match unsafe { api.cuModuleGetFunction(&mut raw, self.inner.raw, name.as_ptr()) } {
            Ok(()) => {}
            Err(failure) if failure.code() == Some(status::NOT_FOUND) => return Err(missing()),
            Err(failure) => return Err(failure.into_error(format!("looking for the kernel `{kernel}`"))),
        }
        let attribute = |attribute| -> Result<u32, Error> {
            let mut value: c_int = 0;
            // SAFETY: `value` outlives the call.
            unsafe { api.cuFuncGetAttribute(&mut value, attribute, raw) }.doing(|| format!("asking for the attributes of `{kernel}`"))?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let set = |attribute, value: u32| {
            // SAFETY: the function is alive.
            unsafe { api.cuFuncSetAttribute(raw, attribute, c_int::try_from(value).unwrap_or(c_int::MAX)) }
                .doing(|| format!("setting the limits of `{kernel}`"))
        };
        let attributes = FunctionAttributes {
            registers: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_smem_bytes: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_threads_per_cta: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        };
        let most = context.properties().shared_memory_per_cta_bytes;
        let smem_bytes = u64::from(options.dynamic_smem_bytes) + u64::from(attributes.static_smem_bytes);
        if smem_bytes > u64::from(most) {
            let static_bytes = attributes.static_smem_bytes;
            return Err(LaunchError::SharedMemoryOfChip { kernel: kernel.to_owned(), bytes: smem_bytes, static_bytes, most }.into());
        }
        set(FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, options.dynamic_smem_bytes)?;
        if options.large_clusters {
            set(FunctionAttribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
        }
        Ok(Function { module: self.clone(), raw, name: kernel.to_owned(), attributes, options })
    }
}

/// Whether the bytes hold a 64-bit little-endian ELF file up to the ends of its tables and sections.
///
/// The driver is handed a pointer without a length, so a file that names more than it has would make it read past the end.
fn is_whole_elf(bytes: &[u8]) -> bool {
    let number = |at: usize, width: usize| -> Option<u64> {
        let field = bytes.get(at..at.checked_add(width)?)?;
        Some(field.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    };
    let ends_within = |offset: u64, length: u64| offset.checked_add(length).is_some_and(|end| end <= bytes.len() as u64);
    let check = || -> Option<bool> {
        if bytes.get(..6)? != b"\x7fELF\x02\x01" {
            return Some(false);
        }
        let (segments, sections) = (number(0x20, 8)?, number(0x28, 8)?);
        let (segment_bytes, segment_count) = (number(0x36, 2)?, number(0x38, 2)?);
        let (section_bytes, section_count) = (number(0x3a, 2)?, number(0x3c, 2)?);
        let tables = ends_within(segments, segment_bytes * segment_count) && ends_within(sections, section_bytes * section_count);
        if !tables || (section_count > 0 && section_bytes < 0x40) {
            return Some(false);
        }
        for section in 0..section_count {
            /// A section without bytes in the file.
            const NO_BITS: u64 = 8;
            let at = usize::try_from(sections + section * section_bytes).ok()?;
            let (kind, offset, length) = (number(at + 4, 4)?, number(at + 0x18, 8)?, number(at + 0x20, 8)?);
            if kind != NO_BITS && !ends_within(offset, length) {
                return Some(false);
            }
        }
        Some(true)
    };
    check().unwrap_or(false)
}

/// What is allowed to a kernel, once for all of its launches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FunctionOptions {
    /// Most dynamic shared memory that a launch may ask for.
    pub dynamic_smem_bytes: u32,
    /// Clusters of up to 16 CTAs, which not every chip with clusters takes.
    pub large_clusters: bool,
}

/// What the compiler made of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionAttributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Local memory of a thread: spills and stack. 0 for every performance kernel.
    pub local_bytes: u32,
    /// Shared memory of a CTA that is fixed in the code.
    pub static_smem_bytes: u32,
    /// Most threads of a CTA.
    pub max_threads_per_cta: u32,
}

/// A kernel that can be launched. Keeps its module loaded.
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    raw: sys::CUfunction,
    name: String,
    attributes: FunctionAttributes,
    options: FunctionOptions,
}

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above; its attributes are set only before anybody else sees it.
unsafe impl Sync for Function {}

impl Function {
    /// The entry name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The module that it is in.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// What the compiler made of it.
    pub fn attributes(&self) -> &FunctionAttributes {
        &self.attributes
    }

    /// Compares the compiled kernel's parameters with the declared ones. Drivers before 12.4 cannot be asked; there it passes.
    ///
    /// # Errors
    /// [`Error::Launch`] with the first parameter that differs, [`Error::Driver`].
    pub fn check_signature(&self, facts: &KernelFacts) -> Result<(), Error> {
        const INVALID_VALUE: u32 = 1;
        let context = self.module.context();
        let api = context.driver().api();
        let _current = context.enter()?;
        // The driver counts offsets from where the chip's parameter area begins, which is not aligned for tensor maps (a first parameter
        // of 64-byte alignment stands at byte 48 on sm_90); launches pass each parameter by its own address, so sizes are what matters.
        let declared = facts.parameters.iter().map(|p| Some(u64::from(p.fact.bytes())));
        for (index, declared) in declared.chain([None]).enumerate() {
            let (mut offset_bytes, mut size_bytes) = (0_usize, 0_usize);
            // SAFETY: both results outlive the call; an index past the last parameter is an error value.
            let found = match unsafe { api.cuFuncGetParamInfo(self.raw, index, &mut offset_bytes, &mut size_bytes) } {
                Ok(()) => Some(size_bytes as u64),
                Err(Failure::Missing { .. }) => return Ok(()),
                Err(failure) if failure.code() == Some(INVALID_VALUE) => None,
                Err(failure) => return Err(failure.into_error(format!("asking for the parameters of `{}`", self.name))),
            };
            if found != declared {
                let text = |size: Option<u64>| match size {
                    Some(size) => format!("{size} bytes"),
                    None => "nothing".to_owned(),
                };
                let (found, declared) = (text(found), text(declared));
                return Err(LaunchError::Signature { kernel: self.name.clone(), index, found, declared }.into());
            }
        }
        Ok(())
    }

    /// What it was allowed when it was looked up.
    pub fn options(&self) -> FunctionOptions {
        self.options
    }

    pub(crate) fn handle(&self) -> sys::CUfunction {
        self.raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF header with one section of 16 bytes behind it.
    fn elf() -> Vec<u8> {
        let mut bytes = vec![0_u8; 0x40 + 0x40 + 16];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[0x28] = 0x40;
        bytes[0x3a] = 0x40;
        bytes[0x3c] = 1;
        bytes[0x40 + 4] = 1;
        bytes[0x40 + 0x18] = 0x80;
        bytes[0x40 + 0x20] = 16;
        bytes
    }

    #[test]
    fn only_whole_images_reach_the_driver() {
        assert!(is_whole_elf(&elf()));
        for length in 0..elf().len() {
            assert!(!is_whole_elf(&elf()[..length]), "cut at {length}");
        }
        let mut beyond = elf();
        beyond[0x40 + 0x1f] = 0xff;
        assert!(!is_whole_elf(&beyond), "an offset that wraps");
        let mut no_bits = elf();
        no_bits[0x40 + 4] = 8;
        no_bits[0x40 + 0x27] = 1;
        assert!(is_whole_elf(&no_bits), "a section without bytes in the file may be of any length");
        assert!(!is_whole_elf(b"\x7fELF"));
        assert!(!is_whole_elf(b".version 9.0"));
    }
}
