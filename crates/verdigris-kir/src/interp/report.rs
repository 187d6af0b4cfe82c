//! What a run counts: a slower kernel shows in these numbers on a machine without a GPU.

use crate::inst::Class;
use std::fmt;

/// The classes in the order of [`Counters::instructions`].
pub const CLASSES: [Class; 12] = [
    Class::Move,
    Class::Integer,
    Class::Float,
    Class::Special,
    Class::Convert,
    Class::Compare,
    Class::Memory,
    Class::Async,
    Class::Matrix,
    Class::Barrier,
    Class::Shuffle,
    Class::Control,
];

/// Counts of one launch, or of a whole run. There is no model of the caches: these are requests, not traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes that threads and async units asked for in global loads.
    pub global_load_bytes: u64,
    /// Different bytes of global memory that were loaded.
    pub unique_load_bytes: u64,
    /// Bytes that threads and async units stored (or reduced) to global memory.
    pub global_store_bytes: u64,
    /// Different bytes of global memory that were stored.
    pub unique_store_bytes: u64,
    /// Global loads, one for each warp and instruction.
    pub load_requests: u64,
    /// 32-byte sectors that these loads touched: 4 a request is perfect for 4 bytes a lane.
    pub load_sectors: u64,
    /// Global stores, one for each warp and instruction.
    pub store_requests: u64,
    /// Sectors that these stores touched.
    pub store_sectors: u64,
    /// Shared-memory accesses by threads, one for each warp and instruction.
    pub shared_requests: u64,
    /// Turns that the 32 banks needed for them.
    pub shared_wavefronts: u64,
    /// Turns beyond the least possible for the widths: bank conflicts.
    pub bank_conflicts: u64,
    /// Multiply-adds of the tensor cores.
    pub macs: u64,
    /// Instructions that warps issued, by class in the order of [`CLASSES`].
    pub instructions: [u64; 12],
}

impl Counters {
    /// Instructions of one class.
    pub fn of_class(&self, class: Class) -> u64 {
        self.instructions[class as usize]
    }

    /// Adds the counts of another launch or run. What is unique to each counts as unique in both together.
    pub fn add(&mut self, other: &Counters) {
        self.global_load_bytes += other.global_load_bytes;
        self.unique_load_bytes += other.unique_load_bytes;
        self.global_store_bytes += other.global_store_bytes;
        self.unique_store_bytes += other.unique_store_bytes;
        self.load_requests += other.load_requests;
        self.load_sectors += other.load_sectors;
        self.store_requests += other.store_requests;
        self.store_sectors += other.store_sectors;
        self.shared_requests += other.shared_requests;
        self.shared_wavefronts += other.shared_wavefronts;
        self.bank_conflicts += other.bank_conflicts;
        self.macs += other.macs;
        for (mine, theirs) in self.instructions.iter_mut().zip(&other.instructions) {
            *mine += theirs;
        }
    }
}

/// What a run without findings did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Counts of each launch, in program order, with its kernel.
    pub launches: Vec<(String, Counters)>,
    /// Their sum.
    pub total: Counters,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.total;
        write!(
            f,
            "{} launches; loads {} B ({} unique), stores {} B ({} unique), {} sectors in {} loads, {} wavefronts in {} shared accesses, {} MACs, {} instructions",
            self.launches.len(),
            c.global_load_bytes,
            c.unique_load_bytes,
            c.global_store_bytes,
            c.unique_store_bytes,
            c.load_sectors,
            c.load_requests,
            c.shared_wavefronts,
            c.shared_requests,
            c.macs,
            c.instructions.iter().sum::<u64>()
        )
    }
}
