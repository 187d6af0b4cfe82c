//! The machine a program is made for, as data.
//!
//! Engines read numbers, never a device: the same candidate can be made for a GPU, for one that is described in a file, and for the
//! few SMs that the interpreter plays.

use serde::{Deserialize, Serialize};
use verdigris_kir::ir::Target;

/// What a program may depend on. Part of every cache key: a program made for one `Arch` is not used on another.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arch {
    /// What people call it.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Newest PTX version that the driver takes, major and minor.
    pub isa: (u32, u32),
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Most dynamic shared memory that one CTA may ask for.
    pub shared_bytes_per_cta: u32,
    /// Shared memory of one SM, of which each resident CTA takes 1 KiB beside its own.
    pub shared_bytes_per_sm: u32,
    /// L2 cache.
    pub l2_bytes: u64,
    /// Clusters that can be resident at once with one CTA an SM, for clusters of 1, 2, 4, 8 and 16 CTAs.
    pub resident_clusters: [u32; 5],
    /// Device memory, read or written.
    pub memory_gb_per_s: f64,
    /// What all tensor cores do on dense bf16; the other types are fractions and multiples of it.
    pub tensor_bf16_tflops: f64,
    /// What all cores do on f32 fused multiply-adds, counted as two.
    pub fma_f32_tflops: f64,
    /// The same for f64.
    pub fma_f64_tflops: f64,
}

impl Arch {
    /// One H200 (SXM, 141 GB) with a driver that takes PTX 9.0. Rates are those that a long run holds under its power limit.
    pub fn h200() -> Arch {
        Arch {
            name: "NVIDIA H200".to_owned(),
            capability: (9, 0),
            isa: (9, 0),
            sm_count: 132,
            shared_bytes_per_cta: 232_448,
            shared_bytes_per_sm: 233_472,
            l2_bytes: 60 << 20,
            resident_clusters: [132, 66, 32, 16, 7],
            memory_gb_per_s: 4300.0,
            tensor_bf16_tflops: 790.0,
            fma_f32_tflops: 60.0,
            fma_f64_tflops: 30.0,
        }
    }

    /// A chip of the H200's kind with few SMs (the interpreter plays 2 to 6): the same limits of a CTA, rates and L2 in proportion, so
    /// that schedules meet several waves on small problems.
    pub fn virtual_device(sm_count: u32) -> Arch {
        let whole = Arch::h200();
        let share = f64::from(sm_count) / f64::from(whole.sm_count);
        Arch {
            name: format!("virtual device of {sm_count} SMs"),
            sm_count,
            l2_bytes: (whole.l2_bytes as f64 * share) as u64,
            resident_clusters: [1, 2, 4, 8, 16].map(|ctas| sm_count / ctas),
            memory_gb_per_s: whole.memory_gb_per_s * share,
            tensor_bf16_tflops: whole.tensor_bf16_tflops * share,
            fma_f32_tflops: whole.fma_f32_tflops * share,
            fma_f64_tflops: whole.fma_f64_tflops * share,
            ..whole
        }
    }

    /// Whether kernels for `target` run here. `Sm90a` names one compute capability and no later one.
    pub fn runs(&self, target: Target) -> bool {
        match target {
            Target::Sm80 => self.capability >= (8, 0),
            Target::Sm89 => self.capability >= (8, 9),
            Target::Sm90 => self.capability >= (9, 0),
            Target::Sm90a => self.capability == (9, 0),
        }
    }

    /// How many clusters of `ctas` CTAs (1, 2, 4, 8 or 16) are resident at once; 0 for any other size.
    pub fn resident_clusters_of(&self, ctas: u32) -> u32 {
        if ctas.is_power_of_two() && ctas <= 16 { self.resident_clusters[ctas.trailing_zeros() as usize] } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_chips_run_portable_kernels_and_not_those_of_one_chip() {
        let mut arch = Arch::h200();
        assert!([Target::Sm80, Target::Sm89, Target::Sm90, Target::Sm90a].into_iter().all(|target| arch.runs(target)));
        arch.capability = (10, 0);
        assert!(arch.runs(Target::Sm90) && !arch.runs(Target::Sm90a));
        arch.capability = (8, 6);
        assert!(arch.runs(Target::Sm80) && !arch.runs(Target::Sm89));
    }

    #[test]
    fn a_virtual_device_keeps_the_limits_of_a_cta() {
        let small = Arch::virtual_device(3);
        assert_eq!(small.shared_bytes_per_cta, Arch::h200().shared_bytes_per_cta);
        assert_eq!(small.resident_clusters, [3, 1, 0, 0, 0]);
        assert_eq!(small.resident_clusters_of(2), 1);
        assert_eq!(small.resident_clusters_of(3), 0);
    }
}
