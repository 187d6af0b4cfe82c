//! How many clusters a chip holds at once.
//!
//! CTAs of a cluster stand in one group of multiprocessors (GPC), and which multiprocessors of a group are switched off differs from chip to chip of
//! one kind: 132 of them hold 32 clusters of four on one and fewer on another. No attribute of a device tells; the driver's occupancy does.

use crate::device::Context;
use crate::error::Error;
use crate::jit::CompileOptions;
use crate::launch::LaunchConfig;
use crate::module::{FunctionOptions, Module};

/// A kernel that does nothing, for something has to be asked about.
const PROBE: &str = ".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry resident_clusters()\n{\n    ret;\n}\n";
/// The sizes of clusters that are asked about.
const SIZES: [u32; 5] = [1, 2, 4, 8, 16];

impl Context {
    /// How many clusters of 1, 2, 4, 8 and 16 CTAs the device holds at once, where a CTA has a multiprocessor to itself. Takes about a millisecond,
    /// for a kernel is loaded to ask about.
    ///
    /// # Errors
    /// [`Error::UnsupportedChip`] below compute capability 9.0, which has no clusters; [`Error::MissingSymbol`] where the driver cannot tell;
    /// [`Error::Driver`].
    pub fn resident_clusters(&self) -> Result<[u32; 5], Error> {
        let properties = self.properties();
        properties.require_capability((9, 0), "clusters")?;
        self.driver().require("cuOccupancyMaxActiveClusters")?;
        let (module, _) = Module::load_ptx(self, "resident_clusters", PROBE, CompileOptions::default())?;
        let dynamic_smem_bytes = properties.shared_memory_per_cta_bytes;
        let mut counts = [properties.sm_count; 5];
        for (count, ctas) in counts.iter_mut().zip(SIZES).skip(1) {
            let function = module.function("resident_clusters", FunctionOptions { dynamic_smem_bytes, large_clusters: ctas > 8 })?;
            let config = LaunchConfig { cluster: [ctas, 1, 1], dynamic_smem_bytes, ..LaunchConfig::linear(ctas, 128) };
            *count = function.resident_clusters(&config)?;
        }
        Ok(counts)
    }
}
