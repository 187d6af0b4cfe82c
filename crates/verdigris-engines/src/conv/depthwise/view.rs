//! A problem as the kernels see it: which of its dims are height and width, what lies where, and how it is cut into tiles.

use verdigris_graph::{ConvProblem, Direction, EpilogueStep, Tensor};
use verdigris_kir::program::Address;

use super::ID;
use super::coordinates::{AxisArguments, DepthArguments, TilesArguments};
use super::pixels::FilterArguments;
use super::spec::{Copying, Kind, Spec};
use super::tile::{ActivationsArguments, ChannelsArguments, TileExtentsArguments};
use crate::conv::geometry::spacing::Stride;
use crate::engine::{Reason, Refusal};
use crate::layout::space::divisor;
use crate::split_k::filter::depthwise::TapBlocksArguments;

/// A problem with its dims in the order of the kernels.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// Two dims of the filter's largest extents are height and width. Where rows are all alike and there is one, images are rows.
    pub(super) problem: ConvProblem,
    pub(super) stride: Stride,
    /// Filters of a channel of x.
    pub(super) multiplier: u64,
}

impl View {
    pub(super) fn new(problem: &ConvProblem) -> Result<View, Refusal> {
        let p = in_order(problem);
        let multiplier = p.k / p.c.max(1);
        let Some(stride) = Stride::of(&p) else {
            return Err(
                ID.refusal(Reason::Extent, format_args!("strides {:?}, takes 1 and 2, along height and width equal ones", problem.strides))
            );
        };
        ID.require(
            stride != Stride::Half || p.dilations[1..] == [1; 2],
            Reason::Extent,
            format_args!("dilations {:?} in a dgrad of stride 2, takes 1", p.dilations),
        )?;
        Ok(View { problem: p, stride, multiplier })
    }

    /// Channels of the result: of a filter's gradient, its filters.
    pub(super) fn channels(&self) -> u64 {
        if self.problem.direction == Direction::Dgrad { self.problem.c } else { self.problem.k }
    }

    /// The tensor that tiles of activations come from, and its spatial extents.
    fn activations(&self) -> (&Tensor, [u64; 3]) {
        let p = &self.problem;
        if p.direction == Direction::Dgrad { (&p.y, p.output) } else { (&p.x, p.input) }
    }

    /// Spatial extents of the tensor that is cut into tiles of outputs.
    fn outputs(&self) -> [u64; 3] {
        if self.problem.direction == Direction::Dgrad { self.problem.input } else { self.problem.output }
    }

    /// How many bytes of neighbouring channels may be copied at a time, provided that buffers are aligned to that.
    pub(super) fn vector_bytes(&self) -> Option<u32> {
        let p = &self.problem;
        let copied: &[&Tensor] = if p.direction == Direction::Wgrad { &[&p.x, &p.y] } else { &[self.activations().0] };
        let fits = |tensor: &Tensor, bytes: u32| {
            let elements = u64::from(bytes) / tensor.dtype.bytes() as u64;
            tensor.strides[1] == 1
                && p.c.is_multiple_of(elements)
                && [0, 2, 3, 4].iter().all(|&dim| tensor.strides[dim].is_multiple_of(elements))
        };
        [16, 8, 4].into_iter().find(|&bytes| self.multiplier == 1 && copied.iter().all(|tensor| fits(tensor, bytes)))
    }

    /// Blocks of taps along height and width.
    pub(super) fn blocks(&self, block: [u32; 2]) -> [u64; 2] {
        std::array::from_fn(|dim| self.problem.filter[dim + 1].div_ceil(u64::from(block[dim])))
    }

    /// Blocks of taps, planes of them, and filters that one output is summed over.
    pub(super) fn tap_blocks(&self, block: [u32; 2]) -> u64 {
        let filters = if self.problem.direction == Direction::Dgrad { self.multiplier } else { 1 };
        self.blocks(block).iter().product::<u64>() * self.problem.filter[0] * filters
    }

    /// The step from output to output, so that taps meet neighbouring lines.
    fn step(&self, dim: usize) -> u64 {
        self.problem.dilations[dim]
    }

    /// Outputs of the tile along an axis before the first: of a strided dgrad, tiles begin where taps and outputs are even together.
    fn before(&self, dim: usize) -> u64 {
        self.stride.before(&self.problem, dim)
    }

    /// Phases, and tiles of each, along an axis on which a tile has `outputs` outputs.
    fn tiles(&self, dim: usize, outputs: u64) -> [u64; 2] {
        let extent = self.outputs()[dim] + self.before(dim);
        let phases = self.step(dim).min(extent);
        [phases, extent.div_ceil(phases.max(1)).div_ceil(outputs)]
    }
}

/// How the places of a CTA are shared out: images, rows and columns of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Places(pub(super) [u64; 3]);

impl Places {
    /// Outputs of a tile along height and width.
    fn outputs(self, spec: &Spec) -> [u64; 2] {
        let outputs = spec.outputs();
        std::array::from_fn(|dim| self.0[dim + 1] * u64::from(outputs[dim]))
    }

    /// Lines of a tile along height and width.
    fn lines(self, spec: &Spec) -> [u64; 2] {
        let (lines, outputs) = (spec.thread_lines(), spec.outputs());
        std::array::from_fn(|dim| u64::from(spec.stride.apart(outputs[dim])) * (self.0[dim + 1] - 1) + u64::from(lines[dim]))
    }

    /// Pixels of a tile of activations.
    pub(super) fn pixels(self, spec: &Spec) -> u64 {
        self.0[0] * self.lines(spec).iter().product::<u64>()
    }

    /// Bytes of a tile of activations in shared memory.
    fn bytes(self, spec: &Spec) -> u64 {
        let [rows, columns] = self.lines(spec);
        self.0[0] * rows * u64::from(spec.pitch_bytes(columns as u32))
    }

    /// All tiles of a problem.
    pub(super) fn items(self, view: &View, spec: &Spec) -> u64 {
        let outputs = self.outputs(spec);
        let tiles = (0..2).flat_map(|dim| view.tiles(dim + 1, outputs[dim])).product::<u64>();
        tiles * view.outputs()[0] * view.problem.n.div_ceil(self.0[0])
    }

    /// The arrangement with the fewest tiles, and of these with the fewest pixels to bring.
    pub(super) fn best(view: &View, spec: &Spec) -> Places {
        let most = spec.places();
        // Where the outputs of a thread are few, so are those of an image in them: any number of places may be the one that divides them.
        let is_any = spec.kind == Kind::Filter && spec.stride == Stride::Two;
        let parts = |most: u32| (1..=u64::from(most)).filter(move |part| is_any || part.is_power_of_two());
        let all = parts(most).flat_map(|images| parts(most).flat_map(move |rows| parts(most).map(move |columns| [images, rows, columns])));
        let fits = all.filter(|places| places.iter().product::<u64>() <= u64::from(most)).map(Places);
        let fits = fits.filter(|places| places.bytes(spec) <= u64::from(spec.tile_bytes()));
        fits.min_by_key(|places| (places.items(view, spec), places.pixels(spec))).unwrap_or(Places([1; 3]))
    }
}

impl View {
    pub(super) fn tap_block_arguments(&self, block: [u32; 2]) -> TapBlocksArguments {
        let [rows, columns] = self.blocks(block);
        TapBlocksArguments { columns: divisor(columns), rows: divisor(rows), depths: divisor(self.problem.filter[0]) }
    }

    pub(super) fn tile_arguments(&self, spec: &Spec, places: Places) -> TilesArguments {
        let p = &self.problem;
        let (outputs, extents) = (places.outputs(spec), self.outputs());
        let axis = |axis: usize| {
            let dim = axis + 1;
            let [phases, tiles] = self.tiles(dim, outputs[axis]);
            let (step, pad, taps) = (self.step(dim) as i64, p.pads_before[dim] as i64, i64::from(spec.block[axis]));
            let (outputs, before) = (outputs[axis] as i64, self.before(dim) as i64);
            let filter = p.filter[dim] as i64;
            // What a tile, a phase and a block of taps add to the first line, and where it is without.
            let [tile_in, phase_in, block_in, first_in] = match self.stride {
                Stride::One if p.direction == Direction::Dgrad => [step * outputs, 1, step * taps, pad - (filter - 1) * step],
                Stride::One => [step * outputs, 1, step * taps, -pad],
                Stride::Two => [2 * step * outputs, 2, step * taps, -pad],
                Stride::Half => [outputs / 2, 0, -(taps / 2), (pad - before) / 2 - i64::from(Stride::lead(spec.block[axis]))],
            };
            AxisArguments {
                tiles: divisor(tiles),
                phases: divisor(phases),
                tile_in: tile_in as i32,
                phase_in: phase_in as i32,
                block_in: block_in as i32,
                first_in: first_in as i32,
                tile_out: (step * outputs) as i32,
                first_out: -before as i32,
                step: step as u32,
                extent: extents[dim] as u32,
            }
        };
        let (pad, stride, dilation) = (p.pads_before[0] as i32, p.strides[0], p.dilations[0] as i32);
        let is_dgrad = p.direction == Direction::Dgrad;
        let [plane, tap, first] = if is_dgrad { [1, -dilation, pad] } else { [stride as i32, dilation, -pad] };
        TilesArguments {
            rows: axis(0),
            columns: axis(1),
            depth: DepthArguments {
                extent: divisor(extents[0]),
                plane,
                tap,
                first,
                divisor: divisor(if is_dgrad { stride } else { 1 }),
                planes: self.activations().1[0] as u32,
            },
            images_of_tile: places.0[0] as u32,
            images: p.n as u32,
        }
    }

    /// Of the tile that is multiplied by taps.
    pub(super) fn activation_arguments(&self, spec: &Spec, places: Places) -> (TileExtentsArguments, ActivationsArguments) {
        let (tensor, extents) = self.activations();
        // A channel of the result stands for one of x: of fprop and wgrad, the one that its filter reads; of dgrad, the filters of one.
        let channels = if self.problem.direction == Direction::Dgrad { [1, self.multiplier] } else { [self.multiplier, 1] };
        self.copy_arguments(spec, places, places.lines(spec), (tensor, extents), channels)
    }

    /// The same for the gradients of y that a wgrad reads.
    pub(super) fn gradient_arguments(&self, spec: &Spec, places: Places) -> (TileExtentsArguments, ActivationsArguments) {
        self.copy_arguments(spec, places, places.outputs(spec), (&self.problem.y, self.problem.output), [1, 1])
    }

    fn copy_arguments(
        &self,
        spec: &Spec,
        places: Places,
        [rows, columns]: [u64; 2],
        (tensor, extents): (&Tensor, [u64; 3]),
        [quotient, factor]: [u64; 2],
    ) -> (TileExtentsArguments, ActivationsArguments) {
        let bytes = tensor.dtype.bytes() as u64;
        let [image, channel, depth, height, width] = tensor.strides.map(|stride| stride * bytes);
        let tile = TileExtentsArguments {
            rows: divisor(rows),
            all_rows: (rows * places.0[0]) as u32,
            columns: columns as u32,
            pitch_bytes: spec.pitch_bytes(columns as u32),
        };
        let copied_rows_log2 = match spec.copying {
            Copying::Vectors(bytes) => {
                // As many rows as a CTA's vectors are enough for.
                let pixels = u64::from(spec.threads() * bytes / spec.pixel_bytes());
                let side_by_side = (pixels / columns.max(1)).clamp(1, rows.max(1));
                Some(side_by_side.ilog2())
            }
            Copying::Elements => None,
        };
        // Lanes along whatever lies closer.
        let columns_first = tensor.strides[1] > tensor.strides[4];
        let channels = (spec.copying == Copying::Elements).then(|| ChannelsArguments {
            quotient: divisor(quotient),
            factor: factor as u32,
            stride: channel,
            along: divisor(if columns_first { columns } else { u64::from(spec.cta_channels()) }),
            channels_first: u32::from(columns_first),
        });
        let activations = ActivationsArguments {
            pointer: Address::buffer(tensor.slot.0 as usize),
            images: self.problem.n as u32,
            extents: [extents[1] as u32, extents[2] as u32],
            strides: [image, depth, height, width],
            copied_rows_log2,
            channels,
        };
        (tile, activations)
    }

    /// Of the filter that is read.
    pub(super) fn filter_arguments(&self) -> FilterArguments {
        let p = &self.problem;
        let bytes = p.w.dtype.bytes() as u64;
        let [filter, _, taps @ ..] = p.w.strides.map(|stride| stride * bytes);
        // Taps of a dgrad of stride 1 are met from the last to the first, and those of a flipped filter the other way round; along the
        // depth, where taps are met one by one, only these.
        let is_reversed = |dim: usize| if dim == 0 { p.flip } else { self.stride.is_reversed(p) };
        let origin = (0..3).filter(|&dim| is_reversed(dim)).fold(0u64, |sum, dim| sum + (p.filter[dim] - 1) * taps[dim]);
        let walk = |dim: usize| if is_reversed(dim) { taps[dim].wrapping_neg() } else { taps[dim] };
        FilterArguments {
            pointer: Address::buffer(p.w.slot.0 as usize),
            strides: [filter, walk(0), walk(1), walk(2)],
            origin,
            extents: [p.filter[1] as u32, p.filter[2] as u32],
            factor: if p.direction == Direction::Dgrad { self.multiplier as u32 } else { 1 },
        }
    }
}

/// The problem with its dims in the order of the kernels.
fn in_order(problem: &ConvProblem) -> ConvProblem {
    let mut p = problem.clone();
    // The largest filters last; of equal ones, the order stays.
    let mut order = [0, 1, 2];
    order.sort_by_key(|&dim| p.filter[dim] > 1);
    if p.filter[order[1]] == 1 {
        // One dim has taps. Rows should be plenty, and step like columns.
        let alike = |dim: usize| p.output[dim] == 1 || p.strides[dim] == p.strides[order[2]];
        let rows = |dim: usize| if alike(dim) { p.output[dim] } else { 0 };
        if rows(order[0]) > rows(order[1]) {
            order.swap(0, 1);
        }
    }
    let reorder = |list: &mut [u64]| {
        let old = [list[0], list[1], list[2]];
        list.iter_mut().zip(order).for_each(|(new, dim)| *new = old[dim]);
    };
    for list in [&mut p.input, &mut p.filter, &mut p.output, &mut p.pads_before, &mut p.pads_after, &mut p.strides, &mut p.dilations] {
        reorder(list);
    }
    let images_are_rows = p.input[1] == 1 && p.output[1] == 1 && p.filter[1] == 1 && p.pads_before[1] == 0 && p.strides[2] == 1;
    let is_wgrad = p.direction == Direction::Wgrad;
    let place = |tensor: &mut Tensor, is_filter: bool| {
        reorder(&mut tensor.strides[2..]);
        if images_are_rows && !is_filter {
            tensor.strides.swap(0, 3);
        }
    };
    place(&mut p.x, false);
    place(&mut p.w, true);
    place(&mut p.y, false);
    for step in &mut p.epilogue {
        if let EpilogueStep::Binary { operand: tensor, .. } | EpilogueStep::Store { target: tensor } = step {
            place(tensor, is_wgrad);
        }
    }
    if images_are_rows {
        (p.input[1], p.output[1], p.n) = (p.n, p.n, 1);
        (p.strides[1], p.dilations[1]) = (1, 1);
    }
    p
}
