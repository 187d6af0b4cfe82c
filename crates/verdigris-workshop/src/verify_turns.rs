//! How often the CTAs of a launch go round: what a run must ask of a kernel that keeps its CTAs and hands them one tile after the other.
//!
//! Mistakes in the handing on (whose turn it is, which stage is free, what the last group of tiles is) show where there is something to hand on.
//! So a kernel with turns runs at least once with four tiles for every CTA and a ring that wraps twice, on a device that is small enough for
//! it. Two consumers that alternate in whole tiles also need as many steps in a tile as the ring has stages: one that goes ahead of its turn
//! takes an older phase for its own only then, and surely. And one kernel of each class runs with a last group of tiles that is ragged.
//!
//! Most kernels with turns are handed their tiles by `tile::schedule`; those of convolutions that go round in their own way say in their
//! parameters how much there is and among how many it is shared ([`Shared`]). With these, ragged is what gives some CTAs one piece more.
//! Of a class whose tiles hold too much for four to each CTA of each kernel, one kernel goes round ([`is_asked_by_class`]).

use verdigris_kir::ir::KernelBody;
use verdigris_kir::program::{Arg, Launch, Program};

/// Tiles that each CTA (or cluster) gets, at least.
const LEAST_TILES: u32 = 4;
/// How often the stages of a ring are all used, at least.
const LEAST_WRAPS: u32 = 2;

/// What the launch of a kernel with turns asks of each CTA, or cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Turns {
    /// Tiles, or parts of tiles, that the one with the fewest gets.
    pub(crate) tiles: u32,
    /// Steps of depth over the stages of the ring that has the most.
    pub(crate) wraps: u32,
    /// Whether consumers alternate, and a tile has fewer steps than a ring has stages.
    is_shallow: bool,
    /// Whether the last group of tiles has fewer rows than the others.
    pub(crate) is_ragged: bool,
    /// Whether work is shared out so that nobody gets a second piece, whatever the device: more CTAs than it holds at once, or a part of a tile each.
    pub(crate) is_shared_out: bool,
}

impl Turns {
    /// The turns of a launch on a device of so many SMs; `None` of one that has no tiles to hand out.
    fn of(launch: &Launch, sms: u32) -> Option<Turns> {
        // Arguments that are given by position have their names in the kernel alone.
        let is_named = launch.args.names().all(|name| !name.is_empty());
        let body = (!is_named).then(|| launch.kernel.build());
        let names: Vec<&str> = match &body {
            Some(body) => body.params.iter().map(|param| param.name).collect(),
            None => launch.args.names().collect(),
        };
        let number = |wanted: &str| {
            let (_, arg) = names.iter().zip(launch.args.iter()).find(|(name, _)| **name == wanted)?;
            match arg {
                Arg::Scalar(_, bits) => u32::try_from(*bits).ok(),
                Arg::Divisor(divisor) => Some(*divisor),
                _ => None,
            }
        };
        let built = || body.clone().unwrap_or_else(|| launch.kernel.build());
        match Shared::of(&number) {
            Some(shared) => {
                let workers: u32 = launch.grid.iter().product();
                Some(Turns {
                    tiles: shared.least,
                    wraps: shared.least * shared.steps / stages(&built()).unwrap_or(COPIED_AHEAD),
                    is_shallow: false,
                    is_ragged: shared.is_ragged,
                    is_shared_out: shared.least <= 1 && !shared.is_ragged && workers > sms,
                })
            }
            None => Turns::of_schedule(launch, sms, &number, built),
        }
    }

    /// Of a launch whose tiles `tile::schedule` hands out.
    fn of_schedule(launch: &Launch, sms: u32, number: &dyn Fn(&str) -> Option<u32>, built: impl Fn() -> KernelBody) -> Option<Turns> {
        let (tiles, steps, group_rows) = (number("tiles")?, number("steps")?, number("group_rows")?);
        let body = built();
        let workers = (launch.grid[0] / body.cluster.max(1)).max(1);
        let split = number("split_tiles").unwrap_or(0);
        let share = number("share").unwrap_or(0);
        let pieces_of_split = if split > 0 { 1 } else { 0 };
        let whole = (tiles - split) / workers;
        let stages = stages(&body).unwrap_or(1);
        Some(Turns {
            tiles: whole + pieces_of_split,
            wraps: (whole * steps + pieces_of_split * share) / stages,
            is_shallow: launch.kernel.name().contains("_pingpong") && steps < stages,
            is_ragged: number("last_group")? > 0 && number("last_group_rows")? != group_rows,
            is_shared_out: split == tiles || (workers >= tiles && workers > (sms / body.cluster.max(1)).max(1)),
        })
    }

    fn is_enough(self) -> bool {
        self.tiles >= LEAST_TILES && self.wraps >= LEAST_WRAPS && !self.is_shallow
    }
}

/// Stages of the ring that has the most; `None` of a kernel without one.
fn stages(body: &KernelBody) -> Option<u32> {
    body.barriers.iter().filter(|barrier| barrier.name.contains("full")).map(|barrier| barrier.count.max(1)).max()
}

/// Stages of a kernel that copies by threads: one is worked on, one is on its way.
const COPIED_AHEAD: u32 = 2;

/// Work that a kernel shares out among its CTAs in its own way: pieces by turns, or so many in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shared {
    /// Pieces of the CTA with the fewest.
    least: u32,
    /// What a piece brings through the kernel's stages.
    steps: u32,
    /// Some CTAs have one more.
    is_ragged: bool,
}

impl Shared {
    /// From the numbers among a launch's arguments.
    fn of(number: &dyn Fn(&str) -> Option<u32>) -> Option<Shared> {
        let shared = |pieces: u32, workers: u32, steps: u32| {
            let workers = workers.max(1);
            Some(Shared { least: pieces / workers, steps, is_ragged: !pieces.is_multiple_of(workers) })
        };
        if let (Some(boxes), Some(ctas)) = (number("boxes"), number("ctas")) {
            // conv.small_channels: a box has one patch for each K-tile of its taps.
            shared(boxes, ctas, number("slabs").unwrap_or(1))
        } else if let (Some(boxes), Some(workers)) = (number("boxes"), number("workers")) {
            // conv.halo, pixels.
            shared(boxes, workers, number("channel_blocks").unwrap_or(1))
        } else if let (Some(least), Some(one_more)) = (number("least_boxes"), number("parts_of_one_more")) {
            // conv.halo, filter: each part has its boxes in a row.
            Some(Shared { least, steps: 1, is_ragged: one_more > 0 })
        } else if let (Some(tiles), Some(whole), Some(last)) = (number("count"), number("whole_parts"), number("last_parts")) {
            // conv.grouped by TMA: whole channel tiles and the last are shared out among CTAs of their own.
            shared(tiles, whole.max(last), 1)
        } else if let (Some(tiles), Some(lanes)) = (number("tile_count"), number("lanes")) {
            // conv.grouped by copies of threads.
            shared(tiles, lanes, 1)
        } else if let (Some(items), Some(parts), Some(tap_blocks)) = (number("items"), number("parts"), number("all_tap_blocks")) {
            // conv.depthwise.
            shared(items, parts, tap_blocks)
        } else {
            None
        }
    }
}

/// Whether going round is asked of one kernel of a class, and not of each: a tile of conv.depthwise is up to a thousand outputs of each channel, and
/// its kernels go round by the same text, whatever they copy by and whichever taps they have.
pub(crate) fn is_asked_by_class(class: &str) -> bool {
    class.starts_with("conv_depthwise")
}

/// The kernels of a program that have turns, by name.
pub(crate) fn of_program(program: &Program, sms: u32) -> Vec<(&str, Turns)> {
    program.launches().filter_map(|launch| Some((launch.kernel.name(), Turns::of(launch, sms)?))).collect()
}

/// Whether a program has tiles to hand out, and every CTA goes round often enough, or not at all on any device.
pub(crate) fn goes_round(turns: &[(&str, Turns)]) -> bool {
    !turns.is_empty() && turns.iter().all(|(_, turns)| turns.is_enough() || turns.is_shared_out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris::{Limits, Settings, select};
    use verdigris_engines::arch::Arch;
    use verdigris_engines::engine::Knobs;
    use verdigris_graph::{GemmProblem, Problem};
    use verdigris_tensor::DType;

    /// The turns of the first kernel of gemm.wgmma with these tiles, on a device of so many SMs.
    fn turns(m: u64, n: u64, k: u64, sms: u32) -> Turns {
        let problem = Problem::Gemm(GemmProblem::packed(m, n, k, DType::Bf16, DType::Bf16).expect("a problem"));
        let engine = verdigris_engines::engine("gemm.wgmma").expect("an engine");
        let limits = Limits { settings: Settings::Matching(Knobs::new([("split", 0)])), ..Limits::default() };
        let way = select::survey_of([engine], &problem, &Arch::virtual_device(sms), &limits).ranked.swap_remove(0);
        of_program(&way.program, sms)[0].1
    }

    #[test]
    fn tiles_are_counted_for_the_cta_that_has_the_fewest() {
        let few = turns(128, 128, 640, 16);
        assert!(!few.is_enough() && !few.is_ragged, "{few:?}");
        let many = turns(1032, 1032, 640, 1);
        assert!(many.is_enough() && many.tiles > few.tiles, "{many:?}");
        // With one step of depth a ring is not filled once, however many tiles there are.
        assert!(turns(264, 264, 8, 1).wraps < many.wraps);
    }
}
