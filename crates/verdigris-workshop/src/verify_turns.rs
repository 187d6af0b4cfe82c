//! How often the CTAs of a launch go round: what a run must ask of a kernel that keeps its CTAs and hands them one tile after the other.
//!
//! Mistakes in the handing on (whose turn it is, which stage is free, what the last group of tiles is) show where there is something to hand on.
//! So a kernel with turns runs at least once with four tiles for every CTA and a ring that wraps twice, on a device that is small enough for
//! it. Two consumers that alternate in whole tiles also need as many steps in a tile as the ring has stages: one that goes ahead of its turn
//! takes an older phase for its own only then, and surely. And one kernel of each class runs with a last group of tiles that is ragged.
//!
//! Most kernels with turns are handed their tiles by `tile::schedule`; others say in their parameters how much there is and among how many it is
//! shared ([`Way`]). With these, ragged is what gives some CTAs one piece more, or what ends within a piece. A kernel each of whose CTAs has one
//! tile on any device, and brings that through a ring, goes round by the pieces of the tile: blocks of keys, of queries, K-tiles.
//!
//! Where many kernels go round by the same text, and differ in types and extents alone, one of them is asked to ([`asked_together`]). What is not
//! counted has its reason (`ALONE`): a test holds every kernel of the catalogs that has a ring, or a loop in which threads meet, to one or the other.

use verdigris_kir::ir::KernelBody;
use verdigris_kir::program::{Arg, Launch, Program};

use crate::classes::class;

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

/// Who hands out what, told by the names of a kernel's parameters and, where several kernels have the same, by its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// `tile::schedule`: tiles with their steps of depth, to workers.
    Schedule,
    /// conv.small_channels: boxes to CTAs; a box has one patch for each K-tile of its taps.
    Boxes,
    /// conv.halo, pixels: boxes to workers, a block of channels at a time.
    HaloBoxes,
    /// conv.halo, filter: each part has its boxes in a row.
    BoxesOfParts,
    /// conv.grouped by TMA: whole channel tiles and the last are shared out among CTAs of their own.
    ChannelTiles,
    /// conv.grouped by copies of threads.
    Lanes,
    /// conv.depthwise.
    Items,
    /// conv.patch_gradient: tiles to parts, each as many on as there are parts.
    TilesOfParts,
    /// conv.direct, filter: a part of the depth in K-tiles.
    PartOfDepth,
    /// gemm.mma and gemm.simt: K-tiles of one tile.
    KTiles,
    /// attention.forward: tiles of queries to CTAs that stay, each with its blocks of keys.
    QueryTiles,
    /// attention.decode: blocks of keys of one part.
    KeyBlocks,
    /// attention.mma: blocks of keys of one tile of queries.
    CopiedKeys,
    /// Its gradient: blocks of queries, of all heads that share a tile's keys, or of keys.
    Partners,
    /// attention.backward: blocks of queries, of all heads that share the CTA's keys.
    QueryBlocks,
    /// The gradient of attention's bias: what the bias was repeated over.
    Repeated,
    /// norm.rows: rows to teams that stay, the next one loaded while one is computed.
    Rows,
    /// scan.rows: a part of a row turn by turn, what each comes to carried into the next.
    Carried,
    /// norm.groups and batch_norm.channels: the points of a part, some of each thread fetched together.
    Points,
    /// reduce.simt: the elements of a part of a result, likewise.
    Elements,
    /// softmax.rows, of columns: the elements of a column, likewise.
    Column,
}

impl Way {
    /// Of a kernel by its name and the names of its parameters; `None` of one that goes round in none of these ways.
    fn of(kernel: &str, params: &[&str]) -> Option<Way> {
        let has = |names: &[&str]| names.iter().all(|name| params.contains(name));
        let ways: [(Way, bool); 21] = [
            (Way::Boxes, has(&["boxes", "ctas"])),
            (Way::HaloBoxes, has(&["boxes", "workers"])),
            (Way::BoxesOfParts, has(&["least_boxes", "parts_of_one_more"])),
            (Way::ChannelTiles, has(&["count", "whole_parts", "last_parts"])),
            (Way::Lanes, has(&["tile_count", "lanes"])),
            (Way::Items, has(&["items", "parts", "all_tap_blocks"])),
            (Way::TilesOfParts, kernel.starts_with("conv_wgrad_patch") && has(&["count", "parts"])),
            (Way::PartOfDepth, has(&["depth", "part_depth", "column_tiles"])),
            (Way::KTiles, has(&["k_tiles", "last_depth"])),
            (Way::Repeated, has(&["turns", "turns_of_part"])),
            (Way::QueryBlocks, has(&["query_blocks", "group", "tiles"])),
            (Way::QueryTiles, has(&["key_blocks", "group", "tiles"])),
            (Way::KeyBlocks, has(&["row_tiles", "heads_of_keys", "parts"])),
            (Way::CopiedKeys, has(&["copy_bytes", "o_elements", "group"])),
            (Way::Partners, has(&["copy_bytes", "lse_log2", "group"])),
            (Way::Rows, kernel.starts_with("norm_rows_") && !kernel.contains("_once") && has(&["rows", "step"])),
            (Way::Carried, kernel.starts_with("scan_") && has(&["extent", "part", "parts"])),
            (Way::Points, has(&["channels", "points", "points_of_part"]) && !kernel.contains("_join")),
            (Way::Elements, kernel.starts_with("reduce_") && has(&["depth", "part_depth"])),
            (Way::Column, kernel.starts_with("softmax_") && kernel.contains("_columns")),
            (Way::Schedule, has(&["tiles", "steps", "group_rows"])),
        ];
        ways.into_iter().find(|(_, is)| *is).map(|(way, _)| way)
    }
}

/// A launch, and the numbers among its arguments by name.
struct Numbers<'l> {
    launch: &'l Launch,
    body: KernelBody,
    names: Vec<&'l str>,
}

impl Numbers<'_> {
    /// The first of that name; what is not known when a program is made, such as a number of the host, is none.
    fn get(&self, wanted: &str) -> Option<u32> {
        let (_, arg) = self.names.iter().zip(self.launch.args.iter()).find(|(name, _)| **name == wanted)?;
        match arg {
            Arg::Scalar(_, bits) => u32::try_from(*bits).ok(),
            Arg::Divisor(divisor) => Some(*divisor),
            _ => None,
        }
    }

    /// One that may be negative.
    fn signed(&self, wanted: &str) -> Option<i64> {
        let (_, arg) = self.names.iter().zip(self.launch.args.iter()).find(|(name, _)| **name == wanted)?;
        let Arg::Scalar(_, bits) = arg else { return None };
        // The bits of an i32, widened in whichever way.
        Some(i64::from(*bits as u32 as i32))
    }

    /// What stands behind `word` in the kernel's name, to the next `_` or letter.
    fn named(&self, word: &str) -> Option<u32> {
        number_behind(self.launch.kernel.name(), word)
    }

    /// Stages of the ring that has the most; `None` of a kernel without one.
    fn stages(&self) -> Option<u32> {
        self.body.barriers.iter().filter(|barrier| barrier.name.contains("full")).map(|barrier| barrier.count.max(1)).max()
    }

    /// Keys that the query with the most attends to; if `turned`, queries that attend to the key with the most.
    fn attended(&self, queries: u32, keys: u32, turned: bool) -> u32 {
        let (queries, keys) = (i64::from(queries), i64::from(keys));
        let corner = if self.get("bottom_right") == Some(1) { keys - queries } else { 0 };
        // Without a band all are attended to.
        let behind = self.signed("behind").map_or(keys, |behind| corner + behind);
        let before = self.signed("before").map_or(-queries, |before| corner + before);
        let most = match turned {
            false => (0..queries).map(|query| keys.min(query + behind) - (query + before).max(0)).max(),
            true => (0..keys).map(|key| queries.min(key - before + 1) - (key - behind + 1).max(0)).max(),
        };
        u32::try_from(most.unwrap_or(0)).unwrap_or(0)
    }
}

/// The number that begins behind `word`, which is followed by a digit there and nowhere before.
fn number_behind(name: &str, word: &str) -> Option<u32> {
    name.match_indices(word).find_map(|(at, _)| {
        let rest = &name[at + word.len()..];
        rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())].parse().ok()
    })
}

/// The stages that a name ends with, `_64x64x64_s4_nt`: in front of them stand types, of which some are spelled alike (`_s8`).
fn stages_named(name: &str) -> Option<u32> {
    name.split('_').rev().find_map(|word| word.strip_prefix('s')?.parse().ok())
}

/// The elements of a K-tile along the depth: the third extent of a tile's name, `_128x128x32`.
fn depth_of_tile(name: &str) -> Option<u32> {
    name.split('_').find_map(|word| {
        let extents: Vec<u32> = word.split('x').map(str::parse).collect::<Result<_, _>>().ok()?;
        if let [_, _, depth] = extents[..] { Some(depth) } else { None }
    })
}

/// Elements of a thread that are on their way together, where it goes on alone: `UNROLL` of norm.groups, batch_norm.channels, reduce.simt and softmax.rows.
const FETCHED_TOGETHER: u32 = 4;
/// Stages of a kernel that copies by threads: one is worked on, one is on its way.
const COPIED_AHEAD: u32 = 2;

/// Pieces of the CTA with the fewest, what each brings through the kernel's stages, and whether some CTA has one more or a piece is ragged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shared {
    least: u32,
    steps: u32,
    is_ragged: bool,
}

impl Shared {
    fn among(pieces: u32, workers: u32, steps: u32) -> Shared {
        let workers = workers.max(1);
        Shared { least: pieces / workers, steps, is_ragged: !pieces.is_multiple_of(workers) }
    }

    /// Whole pieces of a length, and whether there is a rest, which goes its own way.
    fn of_whole(length: u32, piece: u32) -> Shared {
        Shared::among(length, piece, 1)
    }

    /// Pieces of a length, the last of which may be shorter.
    fn of_length(length: u32, piece: u32) -> Shared {
        let piece = piece.max(1);
        Shared { least: length.div_ceil(piece), steps: 1, is_ragged: !length.is_multiple_of(piece) }
    }
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
        let way = Way::of(launch.kernel.name(), &names)?;
        let body = body.unwrap_or_else(|| launch.kernel.build());
        let numbers = Numbers { launch, body, names };
        match way {
            Way::Schedule => Turns::of_schedule(&numbers, sms),
            Way::QueryTiles => Turns::of_query_tiles(&numbers),
            _ => {
                let shared = numbers.shared(way)?;
                let workers: u32 = launch.grid.iter().product();
                let stages = match way {
                    Way::KTiles => stages_named(launch.kernel.name()).unwrap_or(COPIED_AHEAD),
                    Way::Points | Way::Elements | Way::Column | Way::Carried => 1,
                    _ => numbers.stages().unwrap_or(COPIED_AHEAD),
                };
                let is_handed_out = matches!(way, Way::Boxes | Way::HaloBoxes | Way::ChannelTiles | Way::Lanes | Way::Items);
                Some(Turns {
                    tiles: shared.least,
                    wraps: shared.least * shared.steps / stages.max(1),
                    is_shallow: false,
                    is_ragged: shared.is_ragged,
                    is_shared_out: is_handed_out && shared.least <= 1 && !shared.is_ragged && workers > sms,
                })
            }
        }
    }

    /// Of a launch whose tiles `tile::schedule` hands out.
    fn of_schedule(numbers: &Numbers<'_>, sms: u32) -> Option<Turns> {
        let Numbers { launch, body, .. } = numbers;
        let (tiles, steps, group_rows) = (numbers.get("tiles")?, numbers.get("steps")?, numbers.get("group_rows")?);
        let workers = (launch.grid[0] / body.cluster.max(1)).max(1);
        let split = numbers.get("split_tiles").unwrap_or(0);
        let share = numbers.get("share").unwrap_or(0);
        let pieces_of_split = if split > 0 { 1 } else { 0 };
        let whole = (tiles - split) / workers;
        let stages = numbers.stages().unwrap_or(1);
        Some(Turns {
            tiles: whole + pieces_of_split,
            wraps: (whole * steps + pieces_of_split * share) / stages,
            is_shallow: launch.kernel.name().contains("_pingpong") && steps < stages,
            is_ragged: numbers.get("last_group")? > 0 && numbers.get("last_group_rows")? != group_rows,
            is_shared_out: split == tiles || (workers >= tiles && workers > (sms / body.cluster.max(1)).max(1)),
        })
    }

    /// Of attention.forward. Under a mask, tiles have different numbers of blocks: the CTA with the longest tile has that many, and the one with the fewest tiles at
    /// least one block for each.
    fn of_query_tiles(numbers: &Numbers<'_>) -> Option<Turns> {
        let (tiles, workers) = (numbers.get("tiles")?, numbers.launch.grid[0].max(1));
        let (queries, keys, key_blocks) = (numbers.get("queries")?, numbers.get("keys")?, numbers.get("key_blocks")?);
        let (least, stages) = (tiles / workers, numbers.stages().unwrap_or(1));
        let most = numbers.attended(queries, keys, false);
        let steps = if most == keys && numbers.signed("behind").is_none() {
            least * key_blocks
        } else {
            least.max(most / (keys.div_ceil(key_blocks)).max(1))
        };
        Some(Turns {
            tiles: least,
            wraps: steps / stages,
            is_shallow: false,
            is_ragged: !tiles.is_multiple_of(workers) || !keys.is_multiple_of(numbers.named("_n").unwrap_or(1).max(1)),
            // A CTA for each tile is one order of them; the kernel is the one whose CTAs stay.
            is_shared_out: false,
        })
    }

    fn is_enough(self) -> bool {
        self.tiles >= LEAST_TILES && self.wraps >= LEAST_WRAPS && !self.is_shallow
    }

    /// Whether every CTA goes round often enough, or not at all on any device.
    pub(crate) fn goes_round(self) -> bool {
        self.is_enough() || self.is_shared_out
    }
}

impl Numbers<'_> {
    /// What a CTA goes round by, of all ways but those with a count of their own.
    fn shared(&self, way: Way) -> Option<Shared> {
        let number = |name: &str| self.get(name);
        let name = self.launch.kernel.name();
        Some(match way {
            Way::Boxes => Shared::among(number("boxes")?, number("ctas")?, number("slabs").unwrap_or(1)),
            Way::HaloBoxes => Shared::among(number("boxes")?, number("workers")?, number("channel_blocks").unwrap_or(1)),
            Way::BoxesOfParts => Shared { least: number("least_boxes")?, steps: 1, is_ragged: number("parts_of_one_more")? > 0 },
            Way::ChannelTiles => Shared::among(number("count")?, number("whole_parts")?.max(number("last_parts")?), 1),
            Way::Lanes => Shared::among(number("tile_count")?, number("lanes")?, 1),
            Way::Items => Shared::among(number("items")?, number("parts")?, number("all_tap_blocks")?),
            Way::TilesOfParts => Shared::among(number("count")?, number("parts")?, 1),
            // The last part may be shorter.
            Way::PartOfDepth => Shared::of_length(last_part(number("depth")?, number("part_depth")?), depth_of_tile(name)?),
            Way::KTiles => Shared { least: number("k_tiles")?, steps: 1, is_ragged: number("last_depth")? != depth_of_tile(name)? },
            Way::KeyBlocks | Way::CopiedKeys => {
                let (keys, block) = (self.attended(number("queries")?, number("keys")?, false), number("block")?.max(1));
                let blocks = keys.div_ceil(block);
                Shared { least: blocks / number("parts").unwrap_or(1).max(1), steps: 1, is_ragged: !number("keys")?.is_multiple_of(block) }
            }
            Way::Partners => {
                let (queries, keys, block) = (number("queries")?, number("keys")?, number("block")?.max(1));
                let owns_queries = name.contains("_gradient_queries_");
                let (members, partners) = if owns_queries { (1, keys) } else { (number("group")?, queries) };
                let blocks = self.attended(queries, keys, !owns_queries) / block;
                Shared { least: members * blocks, steps: 1, is_ragged: !partners.is_multiple_of(block) }
            }
            Way::QueryBlocks => {
                let (keys, blocks) = (number("keys")?, number("query_blocks")?);
                // Without a band the kernel is not told how many queries there are, and all of them attend.
                let attending = match self.signed("queries") {
                    Some(queries) if self.signed("behind").is_some() => {
                        let queries = u32::try_from(queries).unwrap_or(0).max(1);
                        u32::try_from(u64::from(self.attended(queries, keys, true)) * u64::from(blocks) / u64::from(queries)).ok()?
                    }
                    _ => blocks,
                };
                Shared { least: number("group")? * attending, steps: 1, is_ragged: !keys.is_multiple_of(self.named("_n")?.max(1)) }
            }
            Way::Repeated => {
                let (all, own) = (number("turns")?, number("turns_of_part")?);
                // Queries with keys, and gradients with values.
                Shared { least: last_part(all, own), steps: 2, is_ragged: !number("keys")?.is_multiple_of(self.named("_n")?.max(1)) }
            }
            Way::Rows => Shared::among(number("rows")?, number("step")?, 1),
            Way::Carried => {
                let part = last_part(number("extent")?, number("part")?);
                Shared::of_length(part, carried_in_a_turn(name)?)
            }
            // A launch that adds up what others have summed goes through no points.
            Way::Points if number("points")? == 0 => return None,
            Way::Points => {
                let part = last_part(number("points")?, number("points_of_part")?);
                let across = ["_lines", "_images"].iter().find_map(|form| number_behind(name, form)).unwrap_or(1);
                Shared::of_whole(part, self.body.threads / across.max(1) * FETCHED_TOGETHER)
            }
            Way::Elements => {
                let part = last_part(number("depth")?, number("part_depth")?);
                let at_once = match number_behind(name, "_columns") {
                    Some(lanes) => self.body.threads / lanes.max(1),
                    // A vector in front of the reduction, of each thread of a team.
                    None => number_behind(name, "_row")? * name.split("_d").find_map(|word| number_behind(word, "v")).unwrap_or(1),
                };
                Shared::of_whole(part, at_once * FETCHED_TOGETHER)
            }
            Way::Column => Shared::of_whole(number("extent")?, number_behind(name, "_columns")? * FETCHED_TOGETHER),
            Way::Schedule | Way::QueryTiles => return None,
        })
    }
}

/// The length of the last of some parts, each of which but that one has the length `part`.
fn last_part(length: u32, part: u32) -> u32 {
    match length % part.max(1) {
        0 => part.min(length),
        rest => rest,
    }
}

/// What a team of scan.rows takes in a turn, in vectors of a row or elements of columns: `rows32x4v4` has 128, `columns8v4` eight of each of its warps.
fn carried_in_a_turn(name: &str) -> Option<u32> {
    if let Some(team) = number_behind(name, "_rows") {
        return Some(team * number_behind(name, &format!("_rows{team}x"))?);
    }
    let team = number_behind(name, "_columns")?;
    let vector = number_behind(name, &format!("_columns{team}v"))?;
    Some(team * if vector >= 8 { 4 } else { 8 })
}

/// Kernels that are asked together: it is enough if one of them goes round. They do so by one text, and differ in what that text does not depend on.
///
/// A tile of conv.depthwise is up to a thousand outputs of each channel, and its kernels go round by the same text, whatever they copy by and whichever taps they
/// have. Those of attention have the marks behind their stages in common (mask, order, what stands between the products), those of norm.rows whether a team is more
/// than a warp, which then meets at barriers, and those of scan.rows along columns likewise. Of conv.direct all multiply by one loop, and of conv.patch_gradient all walk by one. Threads that go on alone do so in one way for each
/// class.
pub(crate) fn asked_together(kernel: &str) -> String {
    let class = class(kernel);
    let wide = |is_wide: bool| if is_wide { format!("{class}, wide") } else { class.clone() };
    if class.starts_with("conv_depthwise")
        || class.starts_with("attention_backward_bias")
        || class.starts_with("conv_direct")
        || class.starts_with("conv_wgrad_patch")
    {
        class
    } else if class.starts_with("attention_") {
        // Without a ring they have the keys of a block last.
        let behind = |word: &str| Some(format!("{word}{}", number_behind(kernel, word)?));
        let stages = behind("_s").unwrap_or_default();
        let last = if class.starts_with("attention_mma") { behind("_n").unwrap_or_default() } else { stages.clone() };
        let marks = kernel.rsplit_once(&last).map_or("", |(_, marks)| marks);
        // Gradients of long heads have a kernel of their own.
        let is_long = class == "attention_backward" && number_behind(kernel, "_d").is_some_and(|head| head > LONGEST_WHOLE_HEAD);
        format!("{}{stages}{marks}", wide(is_long))
    } else if ["norm_groups_", "batch_norm_", "reduce_", "softmax_"].iter().any(|family| class.starts_with(family)) {
        class
    } else if class.starts_with("norm_rows_") {
        // Those whose rows come by bulk copies have a ring for each team.
        let copied = if kernel.contains("_bulk") { ", copied" } else { "" };
        wide(number_behind(kernel, "_team").is_some_and(|team| team > 32)) + copied
    } else if class.starts_with("scan_") {
        // A row that a team within a warp takes is gone through in one turn.
        wide(number_behind(kernel, "_columns").is_some_and(|warps| warps > 1))
    } else {
        kernel.to_owned()
    }
}

/// Kernels with a barrier like a ring's, or with loops in which threads meet, that nobody counts: by a part of their names, and why.
#[cfg(test)]
const ALONE: &[(&str, &str)] = &[
    ("_turn_values", "a CTA waits for one tile, once"),
    (
        "conv_direct_pixels",
        "its loop is that of the filter's gradient (conv_direct_wgrad), and how deep it is stands in a table on the device",
    ),
    (
        "conv_depthwise_planes_",
        "the lines of a share are staged between two barriers of the CTA, and no share is on its way while another is worked on",
    ),
    ("conv_patch_", "a chunk is staged between two barriers of the CTA, and none is on its way while another is worked on"),
    ("_bulk1_", "a team takes one row, whose copy it waits for once"),
    ("reduce_short_rows_", "threads start the copies of all rows of the CTA, and wait for them once"),
    ("pool_planes_", "threads start the copies of all planes of the CTA, and wait for them once"),
    ("norm_groups_forward_resident", "threads start the copies of all that a team holds, and wait for them once"),
    ("norm_groups_backward_resident", "as those of results"),
];

/// The most elements of a head whose gradients one kernel has; longer heads have another.
const LONGEST_WHOLE_HEAD: u32 = 128;

/// The kernels of a program that have turns, by name.
pub(crate) fn of_program(program: &Program, sms: u32) -> Vec<(&str, Turns)> {
    program.launches().filter_map(|launch| Some((launch.kernel.name(), Turns::of(launch, sms)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};
    use verdigris::{Limits, Settings, select};
    use verdigris_engines::arch::Arch;
    use verdigris_engines::engine::Knobs;
    use verdigris_graph::{GemmProblem, Problem};
    use verdigris_kir::inst::Class;
    use verdigris_kir::ir::{Block, Stmt, Target};
    use verdigris_kir::program::KernelRef;
    use verdigris_tensor::DType;

    /// The turns of the first kernel of gemm.wgmma with these tiles, on a device of so many SMs.
    fn turns(m: u64, n: u64, k: u64, sms: u32) -> Turns {
        let problem = Problem::Gemm(GemmProblem::packed(m, n, k, DType::Bf16, DType::Bf16).expect("a problem"));
        let engine = verdigris_engines::engine("gemm.wgmma").expect("an engine");
        let limits = Limits { settings: Settings::Matching(Knobs::new([("split", 0)])), ..Limits::default() };
        let way = select::survey_of([engine], &problem, &Arch::virtual_device(sms), &limits).ranked.swap_remove(0);
        of_program(&way.program, sms)[0].1
    }

    /// Whether threads meet, or wait for a unit, in a loop.
    fn hands_on(block: &Block, in_loop: bool) -> bool {
        block.stmts.iter().any(|stmt| match stmt {
            Stmt::Inst(inst) => in_loop && matches!(inst.op.class(), Class::Barrier | Class::Async),
            Stmt::Loop { head, body, .. } => hands_on(head, true) || hands_on(body, true),
            Stmt::If { then, otherwise, .. } => hands_on(then, in_loop) || hands_on(otherwise, in_loop),
            Stmt::Roles { roles, .. } => roles.iter().any(|role| hands_on(&role.body, in_loop)),
            _ => false,
        })
    }

    /// One kernel of each class and of those that are asked together, in all catalogs.
    fn kernels() -> Vec<KernelBody> {
        let mut one_of_each: BTreeMap<(String, String, bool), KernelRef> = BTreeMap::new();
        for engine in verdigris_engines::engines() {
            for kernel in [Target::Sm80, Target::Sm89, Target::Sm90, Target::Sm90a].into_iter().flat_map(|target| engine.catalog(target)) {
                let name = kernel.name();
                let together = Some(asked_together(name)).filter(|together| together != name).unwrap_or_default();
                one_of_each.entry((class(name), together, name.contains("_once"))).or_insert(kernel);
            }
        }
        one_of_each.into_values().map(|kernel| kernel.build()).collect()
    }

    #[test]
    fn every_ring_and_every_loop_in_which_threads_meet_is_counted_or_says_why_not() {
        let (mut used, mut unknown, mut rings) = (BTreeSet::new(), Vec::new(), 0);
        for body in kernels() {
            let params: Vec<&str> = body.params.iter().map(|param| param.name).collect();
            let has_ring = body.barriers.iter().any(|barrier| barrier.name.contains("full"));
            rings += u32::from(has_ring);
            if Way::of(&body.name, &params).is_some() || !(has_ring || hands_on(&body.body, false)) {
                continue;
            }
            match ALONE.iter().find(|(word, _)| body.name.contains(word)) {
                Some((word, _)) => drop(used.insert(*word)),
                None => unknown.push(format!("{} ({})", body.name, params.join(" "))),
            }
        }
        assert!(
            unknown.is_empty(),
            "kernels with a ring, or a loop in which threads meet, that are neither counted nor in the list:\n{}",
            unknown.join("\n")
        );
        assert!(rings > 40, "{rings} kernels with rings");
        let idle: Vec<&str> = ALONE.iter().map(|(word, _)| *word).filter(|word| !used.contains(word)).collect();
        assert!(idle.is_empty(), "no kernel needs {idle:?}");
    }

    #[test]
    fn kernels_are_asked_together_by_what_they_go_round_by() {
        for (kernel, wanted) in [
            ("attention_forward_bf16_d64_v64_m192_n128_s2_end_pingpong", "attention_forward_s2_end_pingpong"),
            ("attention_forward_e4m3_f16_d128_v128_m128_n128_s2_band_dynamic", "attention_forward_s2_band_dynamic"),
            ("attention_backward_bf16_d256_m64_n128_s1_end", "attention_backward, wide_s1_end"),
            ("attention_decode_bf16_d64_v64_n128_s3", "attention_decode_s3"),
            ("attention_mma_bf16_d64_v64_m128_n64_scoremod", "attention_mma_scoremod"),
            ("attention_mma_gradient_keys_f16_d256_v256_m64_n16", "attention_mma_gradient_keys"),
            ("norm_rows_layer_forward_team64x1v4_d1x0_xf32_yf32", "norm_rows_layer_forward_team, wide"),
            ("norm_rows_layer_forward_team8x1v4_d1x0_xf32_yf32", "norm_rows_layer_forward_team"),
            ("scan_add_rows64x1v4_d1_f32_f32", "scan_add_rows"),
            ("scan_add_columns8v4_d1_f32_f32", "scan_add_columns, wide"),
            ("gemm_mma_bf16_bf16_f32_64x64x32_s4_nt_async_f32", "gemm_mma_bf16_bf16_f32_64x64x32_s4_nt_async_f32"),
        ] {
            assert_eq!(asked_together(kernel), wanted, "{kernel}");
        }
        assert_eq!(carried_in_a_turn("scan_add_rows32x4v4_d1_f32_f32"), Some(128));
        assert_eq!(carried_in_a_turn("scan_add_columns8v4_d1_f32_f32"), Some(64));
        assert_eq!(carried_in_a_turn("scan_add_columns8v8_d1_f16_f16"), Some(32));
        assert_eq!(stages_named("gemm_mma_s8_s8_i32_64x64x64_s4_nt_async_i32_exact"), Some(4));
        assert_eq!(stages_named("gemm_simt_i8_i8_i32_32x4x32_i32s_exact"), None);
        assert_eq!(depth_of_tile("gemm_mma_bf16_bf16_f32_128x64x32_s4_nt"), Some(32));
        assert_eq!((last_part(10, 4), last_part(8, 4), last_part(3, 4)), (2, 4, 3));
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
