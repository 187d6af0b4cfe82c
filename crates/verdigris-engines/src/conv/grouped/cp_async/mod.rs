//! Groups of up to 64 channels on either side, which need not agree, on every chip from sm_80 on: pixels come by `cp.async`.
//!
//! **What.** One to three spatial dims; any strides, dilations, paddings; every epilogue. A single group of that size is one, too.
//!
//! **Method.** A CTA takes a channel tile ([`channel_tile`]) and a box of pixels ([`tiling`]): it copies what the box reads, its *halo*,
//! once by `cp.async`, with zeros for padding, and reads it from shared memory at each tap's distance by `ldmatrix`. Only blocks on the
//! diagonal are multiplied. Of a dgrad with a stride, the phases of pixels are convolutions of stride 1, each with its own taps; all phases
//! stand in one grid. A wgrad multiplies the halo, read transposed, by the pixels of y ([`filter`]); CTAs have parts of its sums, which a
//! second launch adds up.
//!
//! **When it wins.** Where groups are smaller than what the tensor cores of a warpgroup multiply at once: below 64 channels.
//!
//! **Numbers.** Products are exact, sums are kept in f32 by the tensor core in an order that the spec and the tiles fix, so repeats agree
//! bit for bit. Groups of a multiple of 8 channels are summed by themselves; of others, those that share 8 channels are multiplied by each
//! other's zeros, so that an infinity in one makes NaN of the others.
//! In a wgrad, an infinity of x that a tile holds but no pixel of y meets may make NaN.
//!
//! **Source:** PTX ISA 9.0, `mma.m16n8k16`, `mma.m16n8k8`, `ldmatrix`; phases as in `conv.direct`.

mod channel_tile;
mod filter;
mod gradient;
mod pixels;
mod tiling;
mod walk;

use channel_tile::{ChannelTile, Channels};
use gradient::Gradient;
use pixels::{BlocksArguments, PixelsArguments, Spec, Tile};
use tiling::Tiling;
use verdigris_graph::{ConvProblem, Direction, Problem, Tensor};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;
use walk::WalkArguments;

use super::{CHUNK, ID, TYPES, are_chunks, plain, require, require_chunks};
use crate::algorithm::{Algorithm, Joined};
use crate::arch::Arch;
use crate::conv::geometry::phases::PixelGeometry;
use crate::cost::{Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec};
use crate::layout::space::divisor;
use crate::sums::statistics;

/// Both directions of results.
pub(super) type CpAsync = Joined<Correlation, Gradient>;

/// Threads of a CTA.
const THREADS: u32 = 256;
/// Extents and CTAs of a launch stay below this.
const COUNT_LIMIT: u64 = 1 << 31;

impl Spec {
    /// Whether it is one of the catalog's, if its epilogue is: the rarer kernels serve fewer classes of channels, and are short of some
    /// tiles.
    fn is_listed(&self) -> bool {
        let rare = !self.staged || self.tile == Tile::Deep;
        (!rare || self.channel_tile.chunks.is_power_of_two() && self.channel_tile.chunks > 1) && (self.staged || self.tile == Tile::Small)
    }
}

/// What both directions ask besides.
fn require_channels(problem: &ConvProblem, arch: &Arch) -> Result<Channels, Refusal> {
    ID.require(arch.runs(Target::Sm80), Reason::Target, format_args!("compute capability {:?}, taken from 8.0 on", arch.capability))?;
    let (c, k) = (problem.c / problem.groups, problem.k / problem.groups);
    ID.require(problem.groups == 1 || c > 1 || k > 1, Reason::Extent, format_args!("groups of one channel, which `conv.depthwise` takes"))?;
    let channels = Channels::of(problem).filter(|channels| channels.channel_tile().is_some());
    channels.ok_or_else(|| {
        ID.refusal(Reason::Extent, format_args!("{c} and {k} channels a group, taken up to 64 where groups make whole chunks of 8"))
    })
}

/// A config, with the tiles that it makes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::conv) struct PixelsConfig {
    tile: Tile,
    /// Tiles that a CTA takes one after the other.
    turns: u64,
    tiling: Tiling,
}

impl PixelsConfig {
    /// CTAs of one channel tile and phase.
    fn lanes(&self) -> u64 {
        self.tiling.count().div_ceil(self.turns)
    }
}

/// An accepted fprop or dgrad.
#[derive(Clone, Debug)]
pub(in crate::conv) struct Correlation {
    problem: ConvProblem,
    channels: Channels,
    geometry: PixelGeometry,
    arch: Arch,
    operands: DType,
    staged: bool,
    epilogue: EpilogueSpec,
    /// Distances of the result's neighbours in a tile, in chunks.
    relative: [u64; 4],
    configs: Vec<PixelsConfig>,
}

impl Correlation {
    fn new(problem: &ConvProblem, channels: Channels, arch: &Arch) -> Result<Correlation, Refusal> {
        let activations = problem.activations();
        let (name, extents) = (problem.operands()[0].0, problem.operands()[0].2);
        require_chunks(name, activations, extents)?;
        let geometry = PixelGeometry::of(problem);
        let result = problem.result();
        let extents = problem.result_extents();
        let steps = if problem.direction == Direction::Dgrad { problem.strides } else { [1; 3] };
        let [n, _, d, h, w] = result.strides;
        let relative = [n, d * steps[0], h * steps[1], w * steps[2]].map(|stride| stride / u64::from(CHUNK));
        let reach: u64 =
            [0, 2, 3, 4].iter().map(|&dim| (extents[dim] - 1).saturating_mul(result.strides[dim] / 8)).fold(0, u64::saturating_add);
        let whole = EpilogueSpec::of_conv(problem);
        let staged = result.dtype.bytes() == 2
            && matches!(result.dtype, DType::Bf16 | DType::F16)
            && result.strides[1] == 1
            && are_chunks(result, extents)
            && channels.outputs.is_multiple_of(CHUNK)
            && reach < 1 << 32;
        let epilogue = if staged {
            EpilogueSpec { stores_d: false, ..whole }
        } else if whole.is_plain() {
            // The plain ones make a catalog, which one class of strides keeps short; a user's chain is compiled for its own.
            whole.strided()
        } else {
            EpilogueSpec { pairs: whole.pairs && channels.outputs.is_multiple_of(2), ..whole }
        };
        let target = epilogue.target();
        ID.require(arch.runs(target), Reason::Target, format_args!("the epilogue's types need {}", target.ptx()))?;
        let mut accepted = Correlation {
            problem: problem.clone(),
            channels,
            geometry,
            arch: arch.clone(),
            operands: activations.dtype,
            staged,
            epilogue,
            relative: if staged { relative } else { [0; 4] },
            configs: Vec::new(),
        };
        let pixels = accepted.geometry.pixels(problem.n);
        let ctas = pixels
            .iter()
            .fold(accepted.geometry.phase_count(), |all, &extent| all.saturating_mul(extent))
            .saturating_mul(accepted.channel_tiles());
        ID.require(ctas < COUNT_LIMIT, Reason::Extent, format_args!("{ctas} pixels by channel tiles, taken below 2^31"))?;
        for tile in Tile::ALL {
            accepted.add_configs(tile);
        }
        Ok(accepted)
    }

    /// The spec of a tile: the smallest class of channels that the catalog has it for.
    fn spec(&self, tile: Tile) -> Spec {
        let least = self.channels.channel_tile().unwrap_or(ChannelTile::ALL[5]);
        let with =
            |channel_tile| Spec { operands: self.operands, channel_tile, tile, staged: self.staged, epilogue: self.epilogue.clone() };
        ChannelTile::ALL
            .into_iter()
            .filter(|&channel_tile| channel_tile >= least)
            .map(with)
            .find(Spec::is_listed)
            .unwrap_or_else(|| with(least))
    }

    fn channel_tiles_of(&self, channel_tile: ChannelTile) -> u64 {
        u64::from(self.channels.blocks().div_ceil(channel_tile.blocks()))
    }

    fn channel_tiles(&self) -> u64 {
        self.channels.channel_tile().map_or(0, |channel_tile| self.channel_tiles_of(channel_tile))
    }

    fn add_configs(&mut self, tile: Tile) {
        let spec = self.spec(tile);
        // Of plain results that are not staged, only one tile is in the catalog.
        if !spec.is_listed() && self.epilogue.is_plain() || tile.shared_bytes() > self.arch.shared_bytes_per_cta {
            return;
        }
        // One CTA on an SM is for filters that leave the others no room for a fair number of pixels.
        let is_fair = |config: &PixelsConfig| config.tiling.tile.iter().product::<u64>() >= 64 || config.tiling.count() == 1;
        if tile == Tile::Deep && self.configs.iter().any(is_fair) {
            return;
        }
        let Some(tiling) = Tiling::of(&self.problem, &self.geometry, spec.room()) else { return };
        let columns = self.channel_tiles_of(spec.channel_tile) * self.geometry.phase_count();
        let places = u64::from(self.arch.sm_count) * u64::from(spec.ctas());
        // One tile a CTA, or as many as keep each SM's places taken once.
        let most = (tiling.count() * columns).div_ceil(places).clamp(1, tiling.count());
        let mut turns = vec![1, most];
        turns.extend((most > 3).then_some(most.div_ceil(2)));
        turns.sort_unstable();
        turns.dedup();
        self.configs.extend(turns.into_iter().map(|turns| PixelsConfig { tile, turns, tiling }));
    }
}

impl Algorithm for Correlation {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = PixelsConfig;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let problem = require(problem, &[Direction::Fprop, Direction::Dgrad])?;
        let accepted = Correlation::new(problem, require_channels(problem, arch)?, arch)?;
        ID.require(
            !accepted.configs.is_empty(),
            Reason::SharedMemory,
            format_args!("a filter of {:?} taps in {} bytes of shared memory", problem.filter, arch.shared_bytes_per_cta),
        )?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<PixelsConfig> {
        self.configs.clone()
    }

    fn knobs(config: &PixelsConfig) -> Knobs {
        Knobs::new([("tile", config.tile as u32), ("turns", config.turns as u32)])
    }

    fn notes(&self, _: &PixelsConfig) -> Notes {
        Notes { tensor_core: true, ..Notes::of(DType::F32) }
    }

    /// A step is a tile under the whole filter.
    fn work(&self, &PixelsConfig { tile, turns, tiling }: &PixelsConfig) -> Work {
        let spec = self.spec(tile);
        let (channel_tile, pixels) = (spec.channel_tile, f64::from(spec.tile.pixels()));
        let columns = self.channel_tiles_of(channel_tile) as f64 * self.geometry.phase_count() as f64;
        let all_taps: u64 = self.problem.filter.iter().product();
        let taps = all_taps as f64 / self.geometry.phase_count() as f64;
        let row_blocks = pixels / 16.0;
        let (halo, around) = (tiling.halo_pixels() as f64, f64::from(channel_tile.registers() * channel_tile.units()));
        let ctas = tiling.count().div_ceil(turns) as f64 * columns;
        let sms = f64::from(self.arch.sm_count);
        let resident = sms * f64::from(spec.ctas());
        let rounds = (ctas / resident).ceil();
        let main = Loop {
            tile: [pixels, f64::from(channel_tile.units() * channel_tile.columns() * 8)],
            tiles: tiling.count() as f64 * columns,
            grid: ctas,
            resident,
            steps: 1.0,
            longest_steps: rounds * turns as f64,
            longest_tiles: rounds * turns as f64,
            tensor_cycles: taps
                * row_blocks
                * f64::from(channel_tile.units() * channel_tile.columns())
                * (f64::from(channel_tile.chunks) / 2.0).max(0.7),
            shared_bytes: taps * (row_blocks * 16.0 + f64::from(channel_tile.unit_bytes() / 128 * 8)) * 128.0 + halo * 128.0,
            loaded_bytes: (halo + pixels) * 128.0,
            // Copies and stores by chunks of eight channels; filters as fragments, once a CTA.
            issued: (4.0 * halo + 6.0 * pixels) * 2.0,
            tile_issued: around * (30.0 + 12.0 * taps) / turns as f64,
            threads: f64::from(THREADS),
            store_bytes: if self.staged { 16.0 } else { 2.0 },
            exposed: 1.0,
            ..Loop::of_conv("conv.grouped", &self.problem)
        };
        Work::of(main).beside(statistics::work(&self.problem))
    }

    fn lower(&self, config: &PixelsConfig) -> Result<Program, Refusal> {
        let p = &self.problem;
        let spec = self.spec(config.tile);
        let mut program = empty_program(&p.slots());
        let (channel_tiles, phases, lanes) = (self.channel_tiles_of(spec.channel_tile), self.geometry.phase_count(), config.lanes());
        let (activations, activation_strides) = pixel_arguments(p.activations());
        let (result, result_strides) = self.staged.then(|| pixel_arguments(p.result())).unzip();
        let args = PixelsArguments {
            walk: WalkArguments::new(p, &self.geometry, &config.tiling, self.relative, &mut program),
            blocks: self.channels.arguments(),
            channel_tiles: divisor(channel_tiles),
            phases: divisor(phases),
            lanes: lanes as u32,
            activations,
            activation_strides,
            filter: self.geometry.filter(p),
            result,
            result_strides,
            epilogue: self.epilogue.conv_arguments(p),
        };
        let args = args.bound(&spec);
        program.launch(Launch::new(spec.kernel(), [(channel_tiles * phases * lanes) as u32, 1, 1], args));
        if let Some(statistics) = &p.statistics {
            statistics::steps(p, statistics, &mut program);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut specs = Vec::new();
        for operands in TYPES {
            for channel_tile in ChannelTile::ALL {
                for tile in Tile::ALL {
                    for staged in [true, false] {
                        let epilogue = if staged { plain(operands) } else { EpilogueSpec::plain(OperandSpec::strided(operands)) };
                        let spec = Spec { operands, channel_tile, tile, staged, epilogue };
                        specs.extend(spec.is_listed().then_some(spec));
                    }
                }
            }
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

impl Channels {
    fn arguments(&self) -> BlocksArguments {
        BlocksArguments {
            count: self.blocks(),
            groups: self.groups,
            merged: self.merged,
            group_inputs: divisor(self.group_inputs.into()),
            group_outputs: divisor(self.group_outputs.into()),
            inputs_of_block: self.block_inputs(),
            outputs_of_block: self.block_outputs(),
            inputs: self.inputs,
            outputs: self.outputs,
        }
    }
}

/// A tensor's address, and its strides over images, depth, height and width in bytes.
fn pixel_arguments(tensor: &Tensor) -> (Address, [u64; 4]) {
    (Address::buffer(tensor.slot.0 as usize), [0, 2, 3, 4].map(|dim| tensor.strides[dim] * tensor.dtype.bytes() as u64))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::algorithm::Listed;
    use crate::engine::Engine;
    use verdigris_graph::{ConvExtents, Precision};
    use verdigris_kir::interp::{self, Counters, Kernels, Memory, Options};
    use verdigris_kir::ptx::{self, Isa};
    use verdigris_kir::verify;

    const ENGINE: Listed<CpAsync> = Listed::new();

    fn extents(direction: Direction, groups: u64, c: u64, k: u64) -> ConvExtents {
        ConvExtents {
            direction,
            n: 1,
            c: groups * c,
            k: groups * k,
            groups,
            input: [1, 18, 20],
            filter: [1, 3, 3],
            pads: [0, 1, 1],
            strides: [1; 3],
            dilations: [1; 3],
        }
    }

    fn bf16(extents: ConvExtents) -> Problem {
        Problem::Conv(ConvProblem::packed(extents, DType::Bf16, DType::Bf16).expect("valid"))
    }

    fn refused(problem: &Problem) -> Reason {
        ENGINE.accept(problem, &Arch::h200()).err().expect("refused").reason
    }

    #[test]
    fn what_is_not_taken_is_refused_by_name() {
        let base = extents(Direction::Fprop, 4, 8, 8);
        let conv = |change: &dyn Fn(&mut ConvProblem)| {
            let mut problem = ConvProblem::packed(base, DType::Bf16, DType::Bf16).expect("valid");
            change(&mut problem);
            refused(&Problem::Conv(problem.canonical().expect("valid")))
        };
        assert_eq!(refused(&bf16(extents(Direction::Fprop, 2, 72, 8))), Reason::Extent);
        assert_eq!(refused(&bf16(extents(Direction::Wgrad, 8, 9, 9))), Reason::Extent);
        assert_eq!(refused(&bf16(extents(Direction::Dgrad, 5, 4, 4))), Reason::Alignment);
        assert_eq!(refused(&bf16(ConvExtents { n: 0, ..base })), Reason::Extent);
        assert_eq!(refused(&bf16(ConvExtents { filter: [1, 18, 19], ..extents(Direction::Fprop, 2, 64, 64) })), Reason::SharedMemory);
        assert_eq!(conv(&|p| p.precision = Precision::Ieee), Reason::Precision);
        assert_eq!(conv(&|p| p.x = Tensor::channels_first(p.x.slot, p.x.dtype, p.x_extents())), Reason::Layout);
        let wide = ConvProblem::packed(base, DType::F32, DType::F32).expect("valid");
        assert_eq!(refused(&Problem::Conv(wide)), Reason::DType);
    }

    /// With `VERDIGRIS_PTXAS`, the path of an assembler, they are assembled as well.
    #[test]
    fn every_kernel_of_the_catalog_is_verified_and_assembles_without_spills() {
        let ptxas = std::env::var_os("VERDIGRIS_PTXAS");
        let catalog = ENGINE.catalog(Target::Sm80);
        assert!((40..=60).contains(&catalog.len()), "{} kernels", catalog.len());
        let mut faults = Vec::new();
        for kernel in catalog {
            let verified = match verify::verify(kernel.build()) {
                Ok(verified) => verified,
                Err(faults) => panic!("{}: {faults}", kernel.name()),
            };
            let Some(ptxas) = &ptxas else { continue };
            let source = std::env::temp_dir().join(format!("{}-{}.ptx", kernel.name(), std::process::id()));
            std::fs::write(&source, ptx::print(&verified, Isa::V9_0)).expect("a writable temporary folder");
            let output = Command::new(ptxas).args(["-v", "-arch=sm_90a", "-o", "/dev/null"]).arg(&source).output().expect("ptxas runs");
            let words = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            let _ = std::fs::remove_file(source);
            if !output.status.success() || !words.contains(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") {
                faults.push(format!("{}: {words}", kernel.name()));
            }
        }
        assert!(faults.is_empty(), "{} kernels\n{}", faults.len(), faults.join("\n"));
    }

    /// What the first launch of a config counts.
    fn counts(problem: &Problem, pick: impl Fn(&Knobs) -> bool) -> Counters {
        let arch = Arch::virtual_device(4);
        let candidate = ENGINE.accept(problem, &arch).expect("taken");
        let knobs = candidate.knobs().configs().iter().find(|knobs| pick(knobs)).expect("offered").clone();
        let program = candidate.program(&knobs).expect("listed");
        let mut memory = Memory::new();
        for operand in problem.buffers().expect("canonical") {
            memory.add(&vec![0; operand.layout.span_elements() as usize * operand.dtype.bytes()]);
        }
        let report = interp::run(&program, &Kernels::new(), &mut memory, &Options::schedule(1)).expect("no findings");
        report.launches[0].1.clone()
    }

    #[test]
    fn no_two_rows_of_a_matrix_meet_in_a_bank() {
        for direction in Direction::ALL {
            for (stride, width) in [(1, 8), (2, 16), (1, 32)] {
                let problem = bf16(ConvExtents { strides: [1, stride, stride], ..extents(direction, 64 / width, width, width) });
                let counted = counts(&problem, |_| true);
                // What remains are the tables, which are written once.
                let most = counted.shared_wavefronts / 10;
                assert!(
                    counted.bank_conflicts <= most,
                    "{direction:?} by {stride}: {} of {}",
                    counted.bank_conflicts,
                    counted.shared_wavefronts
                );
            }
        }
    }

    #[test]
    fn only_blocks_of_the_diagonal_are_multiplied() {
        for width in [8, 16, 24, 32, 64] {
            let groups = 64 / width;
            let counted = counts(&bf16(extents(Direction::Fprop, groups, width, width)), |_| true);
            // Each channel of a tile of 128 pixels by those of its own block, at 9 taps.
            let tile = 128 * 9 * groups * width * width;
            assert_eq!(counted.macs % tile, 0, "{width}");
            assert!((3..=6).contains(&(counted.macs / tile)), "{width}: {} tiles of 360 pixels", counted.macs / tile);
        }
    }
}
