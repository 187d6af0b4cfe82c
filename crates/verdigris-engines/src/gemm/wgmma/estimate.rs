//! What a config costs by estimate: tensor cores, shared memory, L2 and device memory, in the waves that its tiles make.

use super::spec::{Shared, Spec, Split};
use super::{Config, Wgmma};
use crate::arch::Arch;

/// What the estimate was fitted to: some 12,000 configs of 89 bf16 problems, timed on H200s
/// (`bench/record/h200/2026-11-21-gemm-sweep.jsonl`). On 95 later ones, with the configs of today (`2026-11-21-gemm-sweep-clusters.jsonl`),
/// choosing by it cost 0.8 % in the geometric mean, 9 % at worst, before the tail of device memory, what is read again and further parts
/// were told apart.
struct Coefficients {
    /// Tensor core cycles in a nanosecond, under load.
    cycles_per_ns: f64,
    /// What one CTA draws from L2.
    cta_bytes_per_ns: f64,
    /// What all draw from L2.
    l2_bytes_per_ns: f64,
    /// And where most of that comes from device memory, as where depth is great and tiles are few. Not fitted: below the other, so that of
    /// two tiles the one that reads its operands less often is taken.
    l2_stream_bytes_per_ns: f64,
    /// Beside each step of depth.
    step_ns: f64,
    /// Before the first step.
    start_ns: f64,
    /// Beside each tile: the epilogue, and the first loads of the next.
    tile_ns: f64,
    /// And for each of its elements.
    tile_ns_per_element: f64,
    /// The share of time that goes with whole waves rather than with work.
    whole_waves: f64,
    /// To join the parts of a split tile.
    join_ns: f64,
    /// And for each element of the first three parts.
    join_ns_per_element: f64,
    /// And for each part behind them, and its elements: 132 parts of 128×128 took 118 µs, by what they left of the time of
    /// `res2a_2a-wgrad`, and 33 of 128×32 14 µs more in 8×512×500000 than adding them up later.
    join_ns_per_further_part: f64,
    join_ns_per_further_element: f64,
    /// Device memory.
    memory_bytes_per_ns: f64,
    /// CTAs that it takes to draw all of that.
    memory_ctas: f64,
    /// What it costs, as a share of its bytes, that more than one cluster reads an operand of great depth: 256×1024×50176 took 56 µs where
    /// two read the wider operand, and 45 where one did.
    read_again: f64,
    /// A launch.
    launch_us: f64,
}

const COEFFICIENTS: Coefficients = Coefficients {
    cycles_per_ns: 1.471,
    cta_bytes_per_ns: 158.9,
    l2_bytes_per_ns: 12_090.0,
    l2_stream_bytes_per_ns: 9_000.0,
    step_ns: 3.683,
    start_ns: 842.7,
    tile_ns: 293.5,
    tile_ns_per_element: 0.004_746,
    whole_waves: 0.4535,
    join_ns: 3930.0,
    join_ns_per_element: 0.1085,
    join_ns_per_further_part: 233.0,
    join_ns_per_further_element: 0.041,
    memory_bytes_per_ns: 3501.0,
    memory_ctas: 21.81,
    read_again: 0.35,
    launch_us: 1.327,
};

impl Wgmma {
    /// Microseconds that a config takes.
    pub(super) fn estimate(&self, config: &Config) -> f64 {
        let Config { chosen, spec, schedule, grid, parts } = config;
        let grid = *grid;
        let c = &COEFFICIENTS;
        let (tile_m, tile_n) = (f64::from(spec.tile_m), f64::from(spec.tile_n));
        // A step of depth: the tensor cores (or the shared memory that feeds them), what the CTA and what all CTAs draw from L2.
        let promoted = if spec.promote { 0.7 * tile_m * tile_n / 128.0 } else { 0.0 };
        let math_cycles = 4.0 * (tile_m / 64.0) * (tile_n / 2.0).max(16.0 + tile_n / 4.0) + promoted;
        let loaded_bytes = f64::from(spec.loaded(Shared::A) + spec.loaded(Shared::B)) * 128.0;
        let workers = self.arch.resident_clusters_of(spec.ctas()).max(1);
        let ctas = f64::from(grid.min(workers) * spec.ctas());
        let l2_bytes_per_ns = if spec.split == Split::Reduced { c.l2_stream_bytes_per_ns } else { c.l2_bytes_per_ns };
        let step_ns =
            (math_cycles / c.cycles_per_ns).max(loaded_bytes / c.cta_bytes_per_ns).max(loaded_bytes * ctas / l2_bytes_per_ns) + c.step_ns;
        // Waves that are not full cost less than whole ones: the chip clocks higher.
        let turns = f64::from(schedule.tiles - schedule.split_tiles) / f64::from(grid.max(1));
        let waves = turns.ceil() * c.whole_waves + turns * (1.0 - c.whole_waves);
        let tile_ns = c.tile_ns + c.tile_ns_per_element * tile_m * tile_n;
        let mut busy_ns = c.start_ns + waves * (f64::from(schedule.steps.div_ceil(spec.cluster_split)) * step_ns + tile_ns);
        // What begins when the last operand is there, and so is hidden behind nothing.
        let mut behind_us = c.launch_us;
        if let Some(parts) = parts {
            let turns = f64::from(grid) / f64::from(workers);
            let turns = turns.ceil() * c.whole_waves + turns * (1.0 - c.whole_waves);
            busy_ns += turns * (f64::from(schedule.share) * step_ns + tile_ns);
            behind_us += parts.estimate_us(&self.arch);
        } else if schedule.split_tiles > 0 {
            let parts = f64::from(schedule.most_parts());
            let further = (parts - 3.0).max(0.0);
            let element_ns = c.join_ns_per_element * parts.min(3.0) + c.join_ns_per_further_element * further;
            let join_ns = c.join_ns + c.join_ns_per_further_part * further + element_ns * tile_m * tile_n;
            busy_ns += f64::from(schedule.share) * step_ns + tile_ns;
            behind_us += 1.0 + join_ns * 1e-3;
        }
        // What a kernel that could split costs a whole product, and the exchange within a cluster.
        if spec.cluster_split > 1 {
            busy_ns *= 1.04;
        } else if spec.split == Split::Fixup && schedule.split_tiles == 0 {
            busy_ns *= 1.02;
        }
        let traffic_bytes = super::super::traffic_bytes(&self.view(chosen.swap_ab).problem);
        let share_of_memory = self.arch.memory_gb_per_s / Arch::h200().memory_gb_per_s * (ctas / c.memory_ctas).min(1.0);
        let again_bytes = if spec.split == Split::Reduced { c.read_again * self.read_again_bytes(chosen.swap_ab, spec) } else { 0.0 };
        // Fewer CTAs than there are load the last wave.
        let tail = if turns > 1.0 { waves / turns } else { 1.0 };
        let memory_ns = (traffic_bytes + again_bytes) * tail / (c.memory_bytes_per_ns * share_of_memory);
        // The shorter of the two is not wholly hidden behind the longer.
        let both_ns = (busy_ns.powi(3) + memory_ns.powi(3)).cbrt();
        let repack_us: f64 = self.repacks.iter().flatten().map(|repack| repack.estimate_us(&self.arch)).sum();
        both_ns * 1e-3 + behind_us + repack_us
    }

    /// Bytes of the operands that more than one cluster reads.
    fn read_again_bytes(&self, swap_ab: bool, spec: &Spec) -> f64 {
        let view = self.view(swap_ab);
        let [rows, columns] = self.tiles(swap_ab, spec);
        let depth_bytes = f64::from(view.k) * f64::from(view.batch) * spec.a.bytes() as f64;
        [(view.m, columns), (view.n, rows)]
            .iter()
            .filter(|(_, readers)| *readers > 1)
            .map(|(extent, _)| f64::from(*extent) * depth_bytes)
            .sum()
    }
}
