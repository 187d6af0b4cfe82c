//! One kernel onto a stream.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::driver::sys;
use sys::{CUlaunchAttributeID as AttributeId, CUlaunchAttributeValue_union as AttributeValue};

use verdigris_kir::execution::GridFault;

use crate::error::{Doing, Error};
use crate::module::Function;
use crate::stream::Stream;

/// Most parameters of a launch; few enough for the stack, and beyond any kernel of ours: an operand of an epilogue takes up to ten.
pub const MAX_PARAMETERS: usize = 256;
/// CTAs of a cluster that every chip with clusters takes.
const PORTABLE_CLUSTER: u32 = 8;

/// How a kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    /// CTAs along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a CTA along x, y, z.
    pub block: [u32; 3],
    /// CTAs of a cluster along x, y, z; all 1 without clusters.
    pub cluster: [u32; 3],
    /// Dynamic shared memory of a CTA; it must have been allowed by [`crate::FunctionOptions`].
    pub dynamic_smem_bytes: u32,
    /// May start before the work in front of it ends (programmatic dependent launch): the kernel itself waits.
    pub overlap: bool,
    /// All CTAs must be resident together, or the launch fails.
    pub cooperative: bool,
}

impl LaunchConfig {
    /// CTAs and threads along x alone, nothing else.
    pub fn linear(ctas: u32, threads: u32) -> Self {
        Self { grid: [ctas, 1, 1], block: [threads, 1, 1], cluster: [1; 3], dynamic_smem_bytes: 0, overlap: false, cooperative: false }
    }
}

/// A launch that the kernel or the chip does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A grid extent is 0 or too large.
    #[error("launch of `{kernel}`: grid extent {axis} is {extent}, must be 1 to {most}")]
    Grid {
        /// The kernel.
        kernel: String,
        /// `x`, `y` or `z`.
        axis: char,
        /// The extent.
        extent: u32,
        /// The greatest.
        most: u32,
    },
    /// The grid that follows from what is bound is beyond the declared one.
    #[error("launch of `{kernel}`: {fault}")]
    GridFunction {
        /// The kernel.
        kernel: String,
        /// What is wrong with its grid.
        fault: GridFault,
    },
    /// The CTA has no threads, or more than the compiled kernel takes.
    #[error("launch of `{kernel}`: {threads} threads in a CTA, must be 1 to {most}, as compiled")]
    Threads {
        /// The kernel.
        kernel: String,
        /// The threads.
        threads: u64,
        /// The most that the compiled kernel takes.
        most: u32,
    },
    /// A grid extent is no multiple of the cluster's.
    #[error("launch of `{kernel}`: grid extent {axis} is {extent}, not a multiple of the cluster's {cluster}")]
    Cluster {
        /// The kernel.
        kernel: String,
        /// `x`, `y` or `z`.
        axis: char,
        /// The grid's extent.
        extent: u32,
        /// The cluster's.
        cluster: u32,
    },
    /// The cluster has more CTAs than was allowed.
    #[error("launch of `{kernel}`: {ctas} CTAs in a cluster, at most {most}; beyond 8, allow large clusters on the function first")]
    ClusterSize {
        /// The kernel.
        kernel: String,
        /// CTAs of the cluster.
        ctas: u64,
        /// The most.
        most: u32,
    },
    /// More dynamic shared memory than was allowed for the function.
    #[error("launch of `{kernel}`: {bytes} bytes of dynamic shared memory, {allowed} were allowed at load")]
    SharedMemory {
        /// The kernel.
        kernel: String,
        /// The bytes asked for.
        bytes: u32,
        /// The bytes allowed.
        allowed: u32,
    },
    /// The chip cannot give a CTA so much shared memory.
    #[error(
        "`{kernel}` wants {bytes} bytes of shared memory a CTA ({static_bytes} of them static), the chip has {most}; choose a smaller tile"
    )]
    SharedMemoryOfChip {
        /// The kernel.
        kernel: String,
        /// Static and dynamic together.
        bytes: u64,
        /// Static alone.
        static_bytes: u32,
        /// What the chip gives a CTA.
        most: u32,
    },
    /// A grid whose CTAs wait for each other, and which the device cannot hold at once.
    #[error("launch of `{kernel}`: {ctas} CTAs must be resident together, the device holds {resident}; use fewer CTAs")]
    Residency {
        /// The kernel.
        kernel: String,
        /// CTAs of the grid.
        ctas: u64,
        /// CTAs that fit.
        resident: u64,
    },
    /// The parameter block is larger than the driver takes.
    #[error("launch of `{kernel}`: {bytes} bytes of parameters, at most {most}; pass a table in memory")]
    ParameterBytes {
        /// The kernel.
        kernel: String,
        /// The block's size.
        bytes: u32,
        /// The most.
        most: u32,
    },
    /// The compiled kernel has other parameters than its facts say.
    #[error("`{kernel}` as compiled has {found} as parameter {index}, its declaration {declared}")]
    Signature {
        /// The kernel.
        kernel: String,
        /// Which parameter.
        index: usize,
        /// What the compiled kernel has: offset and size in bytes, or none.
        found: String,
        /// What was declared.
        declared: String,
    },
    /// A bare launch of a kernel that wants arguments.
    #[error("bare launch of `{kernel}`: it has {parameters} parameters, must have none")]
    Bare {
        /// The kernel.
        kernel: String,
        /// Its parameters.
        parameters: usize,
    },
    /// Parameters that do not fit their block, or are too many.
    #[error(
        "launch of `{kernel}`: parameter {index} at byte {offset} of a block of {block_bytes} bytes; at most {MAX_PARAMETERS} parameters"
    )]
    Parameter {
        /// The kernel.
        kernel: String,
        /// Which.
        index: usize,
        /// Where it begins.
        offset: u32,
        /// The block's size.
        block_bytes: usize,
    },
}

/// The arguments of a launch: a block of bytes and where each argument begins in it, in the order of the kernel's parameters.
/// How long each is, the compiled kernel knows.
#[derive(Debug, Clone, Copy)]
pub struct Parameters<'a> {
    /// The block.
    pub bytes: &'a [u8],
    /// Where each argument begins.
    pub offsets_bytes: &'a [u32],
}

impl Function {
    /// Submits the kernel to the stream.
    ///
    /// # Safety
    /// The arguments must be those of the kernel, in number, order and type, each whole within the block; every address among
    /// them must be valid for what the kernel does with it, until it is done.
    ///
    /// # Errors
    /// [`Error::Launch`], [`Error::ContextMismatch`], [`Error::Driver`].
    pub unsafe fn launch(&self, stream: &Stream, config: &LaunchConfig, arguments: Parameters<'_>) -> Result<(), Error> {
        self.check(config)?;
        if self.module().context() != stream.context() {
            return Err(Error::ContextMismatch { what: "launching a kernel", left: "kernel", right: "stream" });
        }
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { self.launch_checked(stream, config, arguments) }
    }

    /// As [`Function::launch`], for a configuration that [`Function::check`] has passed before and a stream of the same context.
    ///
    /// # Safety
    /// As [`Function::launch`].
    pub(crate) unsafe fn launch_checked(&self, stream: &Stream, config: &LaunchConfig, arguments: Parameters<'_>) -> Result<(), Error> {
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_PARAMETERS];
        for (index, &offset) in arguments.offsets_bytes.iter().enumerate() {
            let at = arguments.bytes.get(offset as usize..).filter(|rest| !rest.is_empty());
            let (Some(at), Some(slot)) = (at, pointers.get_mut(index)) else {
                let block_bytes = arguments.bytes.len();
                return Err(LaunchError::Parameter { kernel: self.name().to_owned(), index, offset, block_bytes }.into());
            };
            *slot = at.as_ptr().cast_mut().cast();
        }
        let mut attributes = Attributes::new();
        let raw = attributes.config(config, stream.handle());
        let (api, _current) = stream.enter()?;
        // SAFETY: the attributes are initialized as many as announced and, like the pointers, outlive the call, which copies all
        // arguments before it returns; the rest is the caller's contract.
        unsafe { api.cuLaunchKernelEx(&raw, self.handle(), pointers.as_mut_ptr(), std::ptr::null_mut()) }
            .doing(|| format!("launching `{}` with {config:?}", self.name()))
    }

    /// Checks a configuration against the compiled kernel and the chip.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub fn check(&self, config: &LaunchConfig) -> Result<(), LaunchError> {
        let limits = Limits {
            kernel: self.name(),
            grid: self.module().context().properties().max_grid,
            threads: self.attributes().max_threads_per_cta,
            cluster_ctas: if self.options().large_clusters { 16 } else { PORTABLE_CLUSTER },
            dynamic_smem_bytes: self.options().dynamic_smem_bytes,
        };
        limits.check(config)
    }

    /// How many clusters of this configuration (CTAs, without clusters) the whole device holds at once. The numbers of CTAs in
    /// the grid play no part in it.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::MissingSymbol`].
    pub fn resident_clusters(&self, config: &LaunchConfig) -> Result<u32, Error> {
        let context = self.module().context();
        let api = context.driver().api();
        let _current = context.enter()?;
        let doing = || format!("asking how many clusters of `{}` fit the device", self.name());
        let mut count = 0_i32;
        if config.cluster == [1; 3] {
            let threads = i32::try_from(config.block.iter().product::<u32>()).unwrap_or(i32::MAX);
            let smem = config.dynamic_smem_bytes as usize;
            // SAFETY: the function is alive and `count` outlives the call.
            unsafe { api.cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut count, self.handle(), threads, smem) }.doing(doing)?;
            return Ok(u32::try_from(count).unwrap_or(0) * context.properties().sm_count);
        }
        let mut attributes = Attributes::new();
        let config = LaunchConfig { overlap: false, cooperative: false, ..*config };
        let raw = attributes.config(&config, std::ptr::null_mut());
        // SAFETY: as above; the attributes outlive the call.
        unsafe { api.cuOccupancyMaxActiveClusters(&mut count, self.handle(), &raw) }.doing(doing)?;
        Ok(u32::try_from(count).unwrap_or(0))
    }
}

/// What a configuration is held against.
struct Limits<'a> {
    kernel: &'a str,
    grid: [u32; 3],
    threads: u32,
    cluster_ctas: u32,
    dynamic_smem_bytes: u32,
}

impl Limits<'_> {
    fn check(&self, config: &LaunchConfig) -> Result<(), LaunchError> {
        let kernel = || self.kernel.to_owned();
        for (i, axis) in ['x', 'y', 'z'].into_iter().enumerate() {
            let (extent, cluster, most) = (config.grid[i], config.cluster[i], self.grid[i]);
            if extent == 0 || extent > most {
                return Err(LaunchError::Grid { kernel: kernel(), axis, extent, most });
            }
            if cluster == 0 || !extent.is_multiple_of(cluster) {
                return Err(LaunchError::Cluster { kernel: kernel(), axis, extent, cluster });
            }
        }
        let product = |extents: [u32; 3]| extents.iter().fold(1_u64, |product, &extent| product.saturating_mul(extent.into()));
        let threads = product(config.block);
        if threads == 0 || threads > self.threads.into() {
            return Err(LaunchError::Threads { kernel: kernel(), threads, most: self.threads });
        }
        let ctas = product(config.cluster);
        if ctas > self.cluster_ctas.into() {
            return Err(LaunchError::ClusterSize { kernel: kernel(), ctas, most: self.cluster_ctas });
        }
        if config.dynamic_smem_bytes > self.dynamic_smem_bytes {
            let (bytes, allowed) = (config.dynamic_smem_bytes, self.dynamic_smem_bytes);
            return Err(LaunchError::SharedMemory { kernel: kernel(), bytes, allowed });
        }
        Ok(())
    }
}

/// Room for the attributes of a launch, on the stack.
struct Attributes {
    list: [MaybeUninit<sys::CUlaunchAttribute>; 3],
    count: u32,
}

impl Attributes {
    fn new() -> Self {
        Self { list: [const { MaybeUninit::uninit() }; 3], count: 0 }
    }

    /// The driver's form of the configuration, which points into `self`.
    fn config(&mut self, config: &LaunchConfig, stream: sys::CUstream) -> sys::CUlaunchConfig {
        self.count = 0;
        if config.cluster != [1; 3] {
            let [x, y, z] = config.cluster;
            let value = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            self.push(AttributeId::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, AttributeValue { clusterDim: value });
        }
        if config.overlap {
            let value = AttributeValue { programmaticStreamSerializationAllowed: 1 };
            self.push(AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value);
        }
        if config.cooperative {
            self.push(AttributeId::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, AttributeValue { cooperative: 1 });
        }
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (config.grid, config.block);
        sys::CUlaunchConfig {
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: block_x,
            blockDimY: block_y,
            blockDimZ: block_z,
            sharedMemBytes: config.dynamic_smem_bytes,
            hStream: stream,
            attrs: self.list.as_mut_ptr().cast(),
            numAttrs: self.count,
        }
    }

    fn push(&mut self, id: AttributeId, value: AttributeValue) {
        self.list[self.count as usize] = MaybeUninit::new(sys::CUlaunchAttribute { id, pad: [0; 4], value });
        self.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits<'static> =
        Limits { kernel: "k", grid: [i32::MAX as u32, 65_535, 65_535], threads: 384, cluster_ctas: 8, dynamic_smem_bytes: 1000 };

    #[test]
    fn each_limit_is_held() {
        let good = LaunchConfig { cluster: [2, 1, 1], dynamic_smem_bytes: 1000, ..LaunchConfig::linear(132, 384) };
        assert_eq!(LIMITS.check(&good), Ok(()));
        let refused = |config: LaunchConfig| LIMITS.check(&config).expect_err("beyond a limit");
        assert!(matches!(refused(LaunchConfig { grid: [0, 1, 1], ..good }), LaunchError::Grid { axis: 'x', extent: 0, .. }));
        assert!(matches!(refused(LaunchConfig { grid: [2, 65_536, 1], ..good }), LaunchError::Grid { axis: 'y', most: 65_535, .. }));
        assert!(matches!(refused(LaunchConfig { grid: [133, 1, 1], ..good }), LaunchError::Cluster { extent: 133, cluster: 2, .. }));
        assert!(matches!(refused(LaunchConfig { cluster: [0, 1, 1], ..good }), LaunchError::Cluster { cluster: 0, .. }));
        assert!(matches!(refused(LaunchConfig { block: [385, 1, 1], ..good }), LaunchError::Threads { threads: 385, most: 384, .. }));
        assert!(matches!(refused(LaunchConfig { block: [1, 0, 1], ..good }), LaunchError::Threads { threads: 0, .. }));
        let large = LaunchConfig { cluster: [12, 1, 1], ..good };
        assert!(matches!(refused(large), LaunchError::ClusterSize { ctas: 12, most: 8, .. }));
        let smem = LaunchConfig { dynamic_smem_bytes: 1001, ..good };
        assert!(matches!(refused(smem), LaunchError::SharedMemory { bytes: 1001, allowed: 1000, .. }));
    }

    #[test]
    fn attributes_are_those_asked_for() {
        let mut attributes = Attributes::new();
        let plain = attributes.config(&LaunchConfig::linear(1, 32), std::ptr::null_mut());
        assert_eq!(plain.numAttrs, 0);
        let all = LaunchConfig { cluster: [2, 1, 1], overlap: true, cooperative: true, ..LaunchConfig::linear(4, 32) };
        let raw = attributes.config(&all, std::ptr::null_mut());
        assert_eq!(raw.numAttrs, 3);
        // SAFETY: three attributes were initialized, and the first holds a cluster dimension.
        let cluster = unsafe { (*raw.attrs).value.clusterDim };
        assert_eq!([cluster.x, cluster.y, cluster.z], [2, 1, 1]);
    }
}
