//! What the learned part of an estimate reads off a config.

use verdigris_graph::Direction;

use super::analytic::Parts;
use super::work::{Join, Loop, Work};
use crate::arch::Arch;

/// The names of the features, in their order.
pub const NAMES: &[&str] = &[
    "log us",
    "tensor share",
    "fma share",
    "shared share",
    "issue share",
    "l2 share",
    "chain share",
    "tile share",
    "join share",
    "memory share",
    "beside share",
    "launch share",
    "log active",
    "log sharing",
    "log waves",
    "log longest over mean",
    "log steps",
    "log longest steps",
    "log tile rows",
    "log tile columns",
    "log parts",
    "fixup",
    "cluster split-K",
    "split-K launch",
    "log cluster",
    "log stages",
    "log threads",
    "log copy bytes",
    "log operand bytes",
    "log result bytes",
    "log rows",
    "log columns",
    "log depth",
    "log matrices",
    "log filled rows",
    "log filled columns",
    "log read again",
    "log footprint",
    "along columns",
    "swap-AB",
    "ping-pong",
    "a across depth",
    "b across depth",
    "promoted",
    "epilogue operands",
    "streams",
    "log store bytes",
    "exposed",
    "log taps",
    "log stride",
    "log width",
    "log loaded at once",
    "log step cycles",
    "log wave shared",
    "log wave panels",
    "log read by waves",
    "wave memory share",
    "epilogue steps",
    "dgrad",
    "wgrad",
    "log channels in",
    "log channels out",
    "log image",
    "image dims",
    "log filter line",
    "dilation",
    "padding",
    "log alignment rows",
    "log alignment columns",
    "log alignment depth",
];

/// The logarithm to base 2 of what is at least a very small number.
fn log(value: f64) -> f64 {
    value.max(1e-6).log2()
}

fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

/// The features of a config, with its analytic estimate. Where it has no main loop, there are none.
pub(crate) fn of(work: &Work, parts: &Parts, arch: &Arch) -> Option<[f32; NAMES.len()]> {
    let main: &Loop = work.main.as_ref()?;
    let whole_ns = parts.us() * 1e3;
    // Shares between nothing and most of the time, as roots: small ones matter too.
    let share = |ns: f64| (ns / whole_ns).max(0.0).sqrt().min(1.5);
    let scale = f64::from(arch.sm_count) / 132.0;
    let [rows, columns, depth] = main.product;
    let mean_steps = main.tiles * main.steps / parts.active;
    let loaded = main.tiles * (main.steps * main.loaded_bytes + main.tile_loaded_bytes);
    let shape = &main.shape;
    let step_cycles = main.tensor_cycles.max(main.fma_cycles);
    let at_once = main.loaded_bytes * parts.active;
    let wave_bytes = if main.wave_bytes > 0.0 { main.wave_bytes } else { at_once };
    let features = [
        log(parts.us()),
        share(parts.tensor_ns),
        share(parts.fma_ns),
        share(parts.shared_ns),
        share(parts.issue_ns),
        share(parts.l2_ns),
        share(parts.chain_ns),
        share(parts.tile_ns),
        share(parts.join_ns),
        share(parts.memory_ns),
        share(parts.beside_ns),
        share(parts.launch_ns),
        log(parts.active / scale),
        log(parts.sharing),
        log(main.tiles * main.parts.max(1.0) / main.resident.max(1.0)),
        log(main.longest_steps / mean_steps.max(1e-3)),
        log(main.steps),
        log(main.longest_steps),
        log(main.tile[0]),
        log(main.tile[1]),
        log(main.parts.max(1.0)),
        flag(main.join == Join::Fixup),
        flag(main.join == Join::Cluster),
        flag(main.join == Join::Launch),
        log(main.cluster.max(1.0)),
        log(main.stages.max(1.0)),
        log(main.threads.max(32.0)),
        log(main.copy_bytes.max(1.0)),
        log(main.operand_bytes),
        log(main.result_bytes),
        log(rows),
        log(columns),
        log(depth),
        log(main.matrices),
        log(rows / (rows / main.tile[0]).ceil().max(1.0) / main.tile[0]),
        log(columns / (columns / main.tile[1]).ceil().max(1.0) / main.tile[1]),
        log(loaded / main.traffic_bytes.max(1.0)),
        log(main.traffic_bytes / arch.l2_bytes as f64),
        flag(main.along_columns),
        flag(main.swap_ab),
        flag(main.ping_pong),
        flag(main.across_depth[0]),
        flag(main.across_depth[1]),
        flag(main.promoted),
        main.epilogue_operands,
        work.beside.len() as f64,
        log(main.store_bytes.max(1.0)),
        main.exposed.sqrt(),
        log(main.window[0]),
        log(main.window[1]),
        log(main.window[2]),
        log(at_once / scale),
        log(step_cycles),
        log(at_once / wave_bytes.max(1.0)),
        log(wave_bytes * main.steps / arch.l2_bytes as f64),
        log(wave_bytes * main.longest_steps / main.traffic_bytes.max(1.0)),
        share(wave_bytes * main.longest_steps / arch.memory_gb_per_s),
        main.epilogue_steps,
        flag(shape.direction == Some(Direction::Dgrad)),
        flag(shape.direction == Some(Direction::Wgrad)),
        log(shape.channels[0].max(1.0)),
        log(shape.channels[1].max(1.0)),
        log(shape.image[0].max(1.0)),
        shape.image[1],
        log(shape.filter[0].max(1.0)),
        shape.filter[1],
        shape.filter[2],
        shape.alignment_log2[0],
        shape.alignment_log2[1],
        shape.alignment_log2[2],
    ];
    Some(features.map(|feature| feature as f32))
}
