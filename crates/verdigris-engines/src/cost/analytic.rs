//! The analytic part of an estimate: from counts and the chip's constants.

use super::Bound;
use super::work::{Join, Loop, Stream, Traffic, Work};
use crate::arch::Arch;

/// What Hopper does in a nanosecond, beyond what [`Arch`] says. One set for all kernels; measured on H200s.
struct Chip {
    /// Cycles of an SM under load.
    cycles_per_ns: f64,
    /// Bytes that one SM draws from L2, and that all draw.
    sm_l2_bytes_per_ns: f64,
    l2_bytes_per_ns: f64,
    /// Bytes of shared memory in a cycle of an SM.
    shared_bytes_per_cycle: f64,
    /// Warp instructions that an SM issues in a cycle, of the four it could: loads and addresses wait for each other.
    issued_per_cycle: f64,
    /// A step beside its pipes; of rings that copies fill ahead.
    step_ns: f64,
    /// A trip to memory.
    trip_ns: f64,
    /// From the launch to the first step.
    start_ns: f64,
    /// The epilogue of a tile, and for each of its elements.
    tile_ns: f64,
    tile_ns_per_element: f64,
    /// The share of time that goes with whole waves rather than with work: what is left of a last wave runs faster.
    whole_waves: f64,
    /// CTAs that it takes to draw all that device memory gives.
    memory_ctas: f64,
    /// The share of that which a main loop gets.
    memory_share: f64,
    /// A fixup, for each element of a part, and within a cluster.
    fixup_ns: f64,
    fixup_ns_per_element: f64,
    cluster_ns: f64,
    cluster_ns_per_element: f64,
    /// A launch, and one more behind it.
    launch_us: f64,
    further_launch_us: f64,
    /// A turn of a thread of a stream, the shortest that were seen: sums of columns, whose loads four turns overlap.
    turn_ns: f64,
    /// The share of device memory that a stream gets, by how it goes.
    lines_share: f64,
    transposed_share: f64,
    tiles_share: f64,
    reduced_share: f64,
}

const HOPPER: Chip = Chip {
    cycles_per_ns: 1.5,
    sm_l2_bytes_per_ns: 110.0,
    l2_bytes_per_ns: 8000.0,
    shared_bytes_per_cycle: 128.0,
    issued_per_cycle: 2.5,
    step_ns: 5.0,
    trip_ns: 700.0,
    start_ns: 900.0,
    tile_ns: 320.0,
    tile_ns_per_element: 0.0048,
    whole_waves: 0.5,
    memory_ctas: 22.0,
    memory_share: 0.82,
    fixup_ns: 3900.0,
    fixup_ns_per_element: 0.11,
    cluster_ns: 800.0,
    cluster_ns_per_element: 0.05,
    launch_us: 1.4,
    further_launch_us: 2.5,
    turn_ns: 110.0,
    lines_share: 0.8,
    transposed_share: 0.65,
    tiles_share: 0.75,
    reduced_share: 0.65,
};

/// An estimate, part by part: nanoseconds on the busiest CTA's way but where another unit is named.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Parts {
    pub(crate) tensor_ns: f64,
    pub(crate) fma_ns: f64,
    pub(crate) shared_ns: f64,
    pub(crate) issue_ns: f64,
    pub(crate) l2_ns: f64,
    /// Steps that wait for each other.
    pub(crate) chain_ns: f64,
    /// Around tiles.
    pub(crate) tile_ns: f64,
    pub(crate) join_ns: f64,
    pub(crate) memory_ns: f64,
    pub(crate) beside_ns: f64,
    /// The main loop with all that is around it.
    pub(crate) main_ns: f64,
    pub(crate) launch_ns: f64,
    /// CTAs that run at once, and how many of them share an SM.
    pub(crate) active: f64,
    pub(crate) sharing: f64,
}

impl Parts {
    pub(crate) fn of(work: &Work, arch: &Arch) -> Parts {
        let mut parts = work.main.as_ref().map_or_else(Parts::default, |main| Parts::of_loop(main, arch));
        parts.beside_ns = work.beside.iter().map(|stream| stream_us(stream, arch) * 1e3).sum();
        let launches: f64 = work.beside.iter().map(|stream| stream.launches).sum::<f64>() + f64::from(u8::from(work.main.is_some()));
        parts.launch_ns = (HOPPER.launch_us + HOPPER.further_launch_us * (launches - 1.0).max(0.0)) * 1e3;
        parts
    }

    fn of_loop(main: &Loop, arch: &Arch) -> Parts {
        let c = &HOPPER;
        let sms = f64::from(arch.sm_count);
        let resident = main.resident.max(1.0);
        let active = main.grid.min(resident).max(1.0);
        let sharing = (active / sms).max(1.0);
        // Between the busiest CTA's steps and the mean of all.
        let mean_steps = main.tiles * main.steps / active;
        let mean_tiles = main.tiles * main.parts.max(1.0) / active;
        let blend = |longest: f64, mean: f64| c.whole_waves * longest + (1.0 - c.whole_waves) * mean.min(longest);
        let steps = blend(main.longest_steps, mean_steps);
        let tiles = blend(main.longest_tiles, mean_tiles);
        let cycles_ns = |cycles: f64| cycles * sharing / c.cycles_per_ns;
        let scale = sms / 132.0;
        let l2_step_ns = (main.loaded_bytes * sharing / c.sm_l2_bytes_per_ns).max(main.loaded_bytes * active / (c.l2_bytes_per_ns * scale));
        let tensor_ns = steps * cycles_ns(main.tensor_cycles);
        let fma_ns = steps * cycles_ns(main.fma_cycles);
        let shared_ns = steps * cycles_ns(main.shared_bytes / c.shared_bytes_per_cycle);
        let issue_ns = steps * cycles_ns(main.issued / c.issued_per_cycle) + tiles * cycles_ns(main.tile_issued / c.issued_per_cycle);
        let l2_ns = steps * l2_step_ns + tiles * main.tile_loaded_bytes * sharing / c.sm_l2_bytes_per_ns;
        let chain_ns = main.longest_steps * (c.step_ns + main.exposed * c.trip_ns) + c.start_ns;
        let elements = main.tile[0] * main.tile[1];
        let tile_ns = tiles * (c.tile_ns + c.tile_ns_per_element * elements * sharing);
        let join_ns = match main.join {
            Join::None | Join::Launch => 0.0,
            Join::Fixup => c.fixup_ns + c.fixup_ns_per_element * elements * main.parts,
            Join::Cluster => c.cluster_ns + c.cluster_ns_per_element * elements * tiles,
        };
        let memory_ns = main.traffic_bytes / (c.memory_share * arch.memory_gb_per_s * (active / c.memory_ctas / scale).min(1.0));
        let pipes_ns = smooth_max(&[tensor_ns, fma_ns, shared_ns, issue_ns, l2_ns]);
        // One CTA's way alone, and that of all which share an SM: what one waits for, the others use.
        let work_ns = if main.ping_pong { pipes_ns.max((pipes_ns + tile_ns) / 2.0) } else { pipes_ns + tile_ns };
        let busy_ns = work_ns.max(work_ns / sharing + chain_ns).max(work_ns + c.start_ns);
        let main_ns = smooth_max(&[busy_ns, memory_ns]) + join_ns;
        Parts {
            tensor_ns,
            fma_ns,
            shared_ns,
            issue_ns,
            l2_ns,
            chain_ns,
            tile_ns,
            join_ns,
            memory_ns,
            main_ns,
            active,
            sharing,
            ..Parts::default()
        }
    }

    /// Microseconds.
    pub(crate) fn us(&self) -> f64 {
        (self.main_ns + self.launch_ns + self.beside_ns) * 1e-3
    }

    pub(crate) fn bound(&self) -> Bound {
        let latency_ns = self.chain_ns + self.tile_ns + self.join_ns + self.launch_ns;
        let all = [
            (self.tensor_ns, Bound::Tensor),
            (self.fma_ns, Bound::Fma),
            (self.issue_ns, Bound::Issue),
            (self.shared_ns, Bound::Shared),
            (self.l2_ns, Bound::L2),
            (self.memory_ns, Bound::Memory),
            (latency_ns, Bound::Latency),
            (self.beside_ns, Bound::Beside),
        ];
        all.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or(Bound::Latency, |(_, bound)| bound)
    }
}

/// The shorter ones are not wholly hidden behind the longest.
fn smooth_max(ns: &[f64]) -> f64 {
    ns.iter().map(|ns| ns.powi(3)).sum::<f64>().cbrt()
}

/// Microseconds of a stream, launches apart.
fn stream_us(stream: &Stream, arch: &Arch) -> f64 {
    let c = &HOPPER;
    let share = match stream.traffic {
        Traffic::Lines => c.lines_share,
        Traffic::Transposed => c.transposed_share,
        Traffic::Tiles => c.tiles_share,
        Traffic::Reduced => c.reduced_share,
    };
    let sms = f64::from(arch.sm_count);
    // A CTA has only so many loads on their way.
    let busy = (stream.ctas / (2.0 * sms)).min(1.0);
    let memory_us = stream.bytes / (share * arch.memory_gb_per_s * 1e3 * busy.max(1e-3));
    let issue_us = stream.issued / (c.issued_per_cycle * sms * c.cycles_per_ns * 1e3);
    memory_us.max(issue_us).max(stream.turns * c.turn_ns * 1e-3)
}
