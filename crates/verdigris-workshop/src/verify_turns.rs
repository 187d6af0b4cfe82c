//! How often the CTAs of a launch go round: what a run must ask of a kernel that keeps its CTAs and hands them one tile after the other.
//!
//! Mistakes in the handing on (whose turn it is, which stage is free, what the last group of tiles is) show where there is something to hand on.
//! So a kernel with turns runs at least once with four tiles for every CTA and a ring that wraps twice, on a device that is small enough for
//! it. Two consumers that alternate in whole tiles also need as many steps in a tile as the ring has stages: one that goes ahead of its turn
//! takes an older phase for its own only then, and surely. And one kernel of each class runs with a last group of tiles that is ragged.

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
        let number = |wanted: &str| {
            let (_, arg) = launch.args.names().zip(launch.args.iter()).find(|(name, _)| *name == wanted)?;
            match arg {
                Arg::Scalar(_, bits) => u32::try_from(*bits).ok(),
                Arg::Divisor(divisor) => Some(*divisor),
                _ => None,
            }
        };
        let (tiles, steps, group_rows) = (number("tiles")?, number("steps")?, number("group_rows")?);
        let body = launch.kernel.build();
        let workers = (launch.grid[0] / body.cluster.max(1)).max(1);
        let split = number("split_tiles").unwrap_or(0);
        let share = number("share").unwrap_or(0);
        let pieces_of_split = if split > 0 { 1 } else { 0 };
        let whole = (tiles - split) / workers;
        let stages = body.barriers.iter().filter(|barrier| barrier.name.contains("full")).map(|barrier| barrier.count).max().unwrap_or(1);
        Some(Turns {
            tiles: whole + pieces_of_split,
            wraps: (whole * steps + pieces_of_split * share) / stages.max(1),
            is_shallow: launch.kernel.name().contains("_pingpong") && steps < stages,
            is_ragged: number("last_group")? > 0 && number("last_group_rows")? != group_rows,
            is_shared_out: split == tiles || (workers >= tiles && workers > (sms / body.cluster.max(1)).max(1)),
        })
    }

    fn is_enough(self) -> bool {
        self.tiles >= LEAST_TILES && self.wraps >= LEAST_WRAPS && !self.is_shallow
    }
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
