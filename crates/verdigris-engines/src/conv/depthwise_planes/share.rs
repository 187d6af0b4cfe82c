//! How the outputs of all planes are cut into CTAs.

use verdigris_graph::{ConvProblem, Direction, Tensor};

use super::stage::CutArgs;
use super::{Kind, Spec, THREADS};
use crate::arch::Arch;
use crate::layout::space::divisor;
use crate::store::span::VECTOR_BYTES;

/// CTAs for each SM below which planes are not taken together.
const CTAS_OF_SM: u64 = 2;
/// The most planes of a CTA.
const MOST_PLANES: u64 = 128;

/// What CTAs take: whole planes, several of them, or bands and tiles of one.
#[derive(Clone, Debug)]
pub(super) struct Shares {
    /// In all: of a wgrad, the images of a channel. And of a CTA.
    planes: u64,
    planes_of_cta: u64,
    /// CTAs of a plane, below and beside each other.
    bands: u64,
    pub(super) tiles: u64,
    /// Blocks of a CTA, below and beside each other.
    strips: u64,
    groups: u64,
    /// Rows and columns of outputs, and of blocks before the first one.
    extents: [u64; 2],
    before: [u64; 2],
    /// Lines of a plane in shared memory, and quads of a line.
    pub(super) lines: u64,
    pub(super) quads_of_line: u64,
}

impl Shares {
    /// The fewest words to stage, with room for them and threads for all blocks; as many planes as leave CTAs for the chip.
    pub(super) fn of(p: &ConvProblem, spec: &Spec, arch: &Arch) -> Option<Shares> {
        let is_dgrad = p.direction == Direction::Dgrad;
        let outputs = if is_dgrad { p.input } else { p.output };
        let extents = [outputs[1], outputs[2]];
        let before = [1, 2].map(|dim| spec.stride.before(p, dim));
        let blocks: [u64; 2] = std::array::from_fn(|i| (extents[i] + before[i]).div_ceil(u64::from(spec.outputs()[i])));
        let planes = match spec.kind {
            Kind::Pixels => p.n.saturating_mul(if is_dgrad { p.c } else { p.k }),
            Kind::Filter => p.n,
        };
        let threads = u64::from(THREADS);
        let plain =
            Shares { planes, planes_of_cta: 1, bands: 1, tiles: 1, strips: 1, groups: 1, extents, before, lines: 0, quads_of_line: 0 };
        // Rows are cut where that leaves less to stage, bands being higher then: few tiles are enough to see it.
        let fewest = blocks[1].div_ceil(threads);
        let cuts = (fewest..=(fewest + 8).min(blocks[1])).filter_map(|tiles| {
            let groups = blocks[1].div_ceil(tiles);
            let cut = |strips: u64| {
                let cut = Shares { bands: blocks[0].div_ceil(strips), tiles: blocks[1].div_ceil(groups), strips, groups, ..plain.clone() };
                Some(cut.staged(p, spec)).filter(|cut| cut.has_room(p, spec))
            };
            let most = (1..=(threads / groups).min(blocks[0])).rev().find_map(cut)?;
            // Bands of about equal height.
            cut(blocks[0].div_ceil(most.bands))
        });
        let whole = cuts.min_by_key(|cut| cut.quads() * if cut.tiles > 1 { 5 } else { 4 })?;
        if whole.bands * whole.tiles > 1 || !lie_together(p) {
            return Some(whole);
        }
        // A wgrad's CTA goes through all its images anyway.
        let wanted = if spec.kind == Kind::Filter { 1 } else { CTAS_OF_SM * u64::from(arch.sm_count) };
        let most = (planes / wanted).min(threads / (whole.strips * whole.groups)).clamp(1, MOST_PLANES);
        let several = (1..=most).rev().map(|planes_of_cta| Shares { planes_of_cta, ..whole.clone() });
        several.into_iter().find(|shares| shares.has_room(p, spec))
    }

    /// With what is staged for a CTA.
    fn staged(self, p: &ConvProblem, spec: &Spec) -> Shares {
        let met = |i: usize, blocks: u64| {
            let outputs = spec.outputs()[i];
            let own = match (spec.kind, spec.taps) {
                (_, Some(taps)) => u64::from(spec.stride.lines(outputs, taps[i])),
                (Kind::Filter, None) => u64::from(spec.stride.lines(outputs, Spec::BLOCK[i])),
                (Kind::Pixels, None) => {
                    // Taps of a row are met by whole quads.
                    let taps = if i == 0 { p.filter[1] } else { p.filter[2].next_multiple_of(4) };
                    u64::from(spec.stride.apart(outputs - 1)) + taps
                }
            };
            u64::from(spec.stride.apart(outputs)) * (blocks - 1) + own
        };
        let (lines, words) = (met(0, self.strips), met(1, self.groups));
        // Halves of a line are whole quads.
        let quads_of_line = if spec.is_split() { words.div_ceil(8) * 2 } else { words.div_ceil(4) };
        Shares { lines, quads_of_line, ..self }
    }

    fn has_room(&self, p: &ConvProblem, spec: &Spec) -> bool {
        let staged = self.planes_of_cta * self.lines * self.quads_of_line * 16;
        let taps = self.planes_of_cta * p.filter[1] * p.filter[2].next_multiple_of(4) * 4;
        let bytes = u64::from(spec.result_bytes());
        let vector = u64::from(VECTOR_BYTES);
        let rows = self.strips * u64::from(spec.outputs()[0]);
        let kept = match self.tiles {
            1 => self.planes_of_cta * self.extents[0].min(rows) * self.extents[1] * bytes + vector,
            _ => rows.min(self.extents[0]) * ((self.tile_columns(spec) * bytes).next_multiple_of(vector) + vector),
        };
        staged <= u64::from(spec.staged_bytes())
            && (spec.kind == Kind::Filter || (taps <= u64::from(spec.table_bytes()) && kept <= u64::from(spec.kept_bytes())))
    }

    /// The most columns of a tile.
    pub(super) fn tile_columns(&self, spec: &Spec) -> u64 {
        self.groups * u64::from(spec.outputs()[1])
    }

    /// CTAs of pixels; of a wgrad, shares of a channel.
    pub(super) fn all(&self) -> u64 {
        self.planes.div_ceil(self.planes_of_cta) * self.bands * self.tiles
    }

    /// Quads that are staged, in all.
    pub(super) fn quads(&self) -> u64 {
        self.planes * self.bands * self.tiles * self.lines * self.quads_of_line
    }

    /// Quads that a CTA stages at a time.
    pub(super) fn quads_of_share(&self) -> u64 {
        self.planes_of_cta.min(self.planes) * self.lines * self.quads_of_line
    }

    /// Threads with a block, in all.
    pub(super) fn threads(&self) -> u64 {
        self.planes * self.bands * self.tiles * self.strips * self.groups
    }

    pub(super) fn arguments(&self) -> CutArgs {
        CutArgs {
            planes: self.planes as u32,
            planes_of_cta: self.planes_of_cta as u32,
            bands: divisor(self.bands),
            tiles: divisor(self.tiles),
            strips: divisor(self.strips),
            groups: divisor(self.groups),
            before: self.before.map(|before| before as u32),
            extents: self.extents.map(|extent| extent as u32),
        }
    }
}

/// Bytes between planes that a CTA takes together.
const FAR_BYTES: u64 = 1 << 32;

/// Whether planes that follow each other are equally far apart, where kernels ask for it, and not too far; those of a result without gaps between them.
fn lie_together(p: &ConvProblem) -> bool {
    let (read, read_channels, written, channels, extents) = match p.direction {
        Direction::Fprop => (&p.x, p.c, &p.y, p.k, p.output),
        Direction::Dgrad => (&p.y, p.k, &p.x, p.c, p.input),
        // Images of a channel have a stride of their own.
        Direction::Wgrad => return p.x.strides[0].saturating_mul(p.x.dtype.bytes() as u64) < FAR_BYTES,
    };
    let apart = |tensor: &Tensor, channels: u64| if channels > 1 { tensor.strides[1] } else { tensor.strides[0] };
    let follow =
        |tensor: &Tensor, channels: u64| p.n <= 1 || channels <= 1 || tensor.strides[0] == tensor.strides[1].saturating_mul(channels);
    let is_near = apart(read, read_channels).saturating_mul(read.dtype.bytes() as u64) < FAR_BYTES;
    is_near && follow(read, read_channels) && follow(written, channels) && apart(written, channels) == extents[1] * extents[2]
}
