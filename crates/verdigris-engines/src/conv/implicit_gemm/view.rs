//! A convolution as the kernel sees it: a walk, two operands, and a product whose rows and columns carry the epilogue.

use verdigris_graph::problem::Order;
use verdigris_graph::{ConvProblem, Direction, GemmProblem, Matrix, Slot, Tensor};
use verdigris_kir::ir::MapDecl;
use verdigris_kir::program::{Address, Base, L2Promotion, MapSpec, Program};
use verdigris_kir::tile::operand::Major;
use verdigris_tensor::DType;

use super::ID;
use super::prepare::Prepared;
use super::producer::{FilterArgs, GatherArgs, ProducerArgs, ScatterArgs, WalkArgs, phase_table, tap_table};
use super::spec::{Kind, Spec};
use crate::conv::geometry::axis::AxisShape;
use crate::conv::geometry::gather::Gather;
use crate::conv::geometry::lines::{filter_matrix, lies_in_lines, tap_stride};
use crate::conv::geometry::matrices::product;
use crate::conv::geometry::read_pixels::over_read_pixels;
use crate::conv::geometry::tap_count;
use crate::engine::{Reason, Refusal};
use crate::hopper::spec::Operand;
use crate::hopper::tiled;
use crate::layout::batch::Chunk;
use crate::layout::transposed::transposed;
use crate::store::{Out, PlaceArgs, is_mappable};
use crate::terms;

/// The problem in the kernel's terms.
pub(super) struct View {
    pub(super) kind: Kind,
    pub(super) spatial: u32,
    pub(super) a: DType,
    pub(super) b: DType,
    pub(super) out: Out,
    pub(super) rows: u32,
    /// Columns of one matrix.
    pub(super) columns: u32,
    /// The epilogue and D, as those of a product: rows, columns, and a batch of groups (or taps).
    pub(super) product: GemmProblem,
    /// The same read the other way round: channels by pixels.
    pub(super) transposed: GemmProblem,
    /// The problem behind its copies.
    pub(super) prepared: Prepared,
    /// Bytes that must cross the memory bus beside the copies.
    pub(super) traffic_bytes: f64,
    gather: Gather,
    /// The operand that is not gathered: the filter (columns by depth, a batch of taps), or dy (pixels by channels).
    other: Matrix,
    /// Channels of a group: of the pixels gathered, and of y.
    group_depth: u32,
    group_k: u32,
    /// Taps of the filter, and where they lie among its positions.
    taps: u32,
    positions: Positions,
    /// Taps are matrices of their own; else they are columns, or depth.
    tap_matrices: bool,
}

/// The filter's positions, as the third dim of its map counts them: how far the next tap is, and of a dgrad the same tap of the next group,
/// whose depth is the filter's rows, and their distance in elements.
#[derive(Clone, Copy, Default, Debug)]
struct Positions {
    tap: u64,
    group: u64,
    stride: u64,
}

impl Positions {
    fn of(conv: &ConvProblem, tap_stride: u64) -> Positions {
        let by_group = conv.direction == Direction::Dgrad && conv.groups > 1;
        let group_stride = if by_group { conv.k / conv.groups * conv.w.strides[0] } else { 0 };
        let mut stride = [tap_stride, group_stride];
        while stride[1] != 0 {
            stride = [stride[1], stride[0] % stride[1]];
        }
        let stride = stride[0];
        let positions = |elements: u64| elements.checked_div(stride).unwrap_or(0);
        Positions { tap: positions(tap_stride).max(1), group: positions(group_stride), stride }
    }

    /// Positions of so many groups and taps.
    fn count(&self, groups: u64, taps: u64) -> u64 {
        ((taps - 1).saturating_mul(self.tap)).saturating_add((groups - 1).saturating_mul(self.group)).saturating_add(1)
    }
}

fn narrow(what: &str, extent: u64) -> Result<u32, Refusal> {
    u32::try_from(extent)
        .ok()
        .filter(|&extent| extent < 1 << 31)
        .ok_or_else(|| ID.refusal(Reason::Extent, format_args!("{what} is {extent}, must be below 2^31")))
}

impl View {
    pub(super) fn new(conv: &ConvProblem) -> Result<View, Refusal> {
        // A copy brings no more pixels than are read.
        let read = if lies_in_lines(&conv.x) { conv.clone() } else { over_read_pixels(conv) };
        let conv = &read;
        let (spatial, gather) = walk(conv)?;
        let wgrad = conv.direction == Direction::Wgrad;
        // Kernels that write rows of any alignment are made for the usual case; elsewhere such results are stored through scratch.
        let floats = |tensor: &Tensor| matches!(tensor.dtype, DType::Bf16 | DType::F16 | DType::F32);
        let rows = !wgrad && spatial == 2 && gather.is_linear() && floats(conv.result()) && floats(conv.activations());
        let prepared = Prepared::new(conv, rows, !gather.is_linear())?;
        if wgrad { View::filter(prepared, spatial, gather.by_position()) } else { View::pixels(prepared, spatial, gather) }
    }

    /// fprop and dgrad: rows are pixels.
    fn pixels(prepared: Prepared, spatial: u32, gather: Gather) -> Result<View, Refusal> {
        let (conv, terms) = (&prepared.conv, u64::from(prepared.terms));
        let groups = conv.groups;
        let forward = conv.direction == Direction::Fprop;
        let (group_c, group_k) = (conv.c / groups, conv.k / groups);
        let (depth, columns) = if forward { (group_c, group_k) } else { (group_k, group_c) };
        let gathered = conv.activations();
        require_groups(groups, [group_c, group_k], gathered.dtype)?;
        let taps = tap_count(conv);
        let tap = tap_stride(&conv.w, conv.w_extents()).unwrap_or(0);
        let positions = Positions::of(conv, tap);
        narrow("the number of the filter's positions", positions.count(groups, taps * terms))?;
        let filter = Matrix { batch_strides: vec![tap], ..filter_matrix(&conv.w, forward) };
        let major = if filter.order() == Order::RowMajor { Major::Depth } else { Major::Rows };

        let phases = !gather.is_linear();
        let pixels = conv.n.saturating_mul(gather.pixels());
        let rows = narrow("the number of pixels", pixels)?;
        narrow(
            "the number of tiles",
            (pixels / 64 + 1).saturating_mul(columns / 16 + 1).saturating_mul(gather.phases.len() as u64 * groups),
        )?;
        narrow("the number of pixels of the result", conv.gemm_extents().m)?;
        narrow("the depth", conv.gemm_extents().k.saturating_mul(terms * terms))?;
        narrow("the number of images", conv.n * terms)?;
        let matrix = |tensor: &Tensor| {
            tensor
                .as_matrix(conv.result_extents())
                .map(|matrix| Matrix { batch_strides: if groups > 1 { vec![columns * matrix.column_stride] } else { vec![] }, ..matrix })
        };
        let product = product(ID, conv, [u64::from(rows), columns, depth * taps], if groups > 1 { vec![groups] } else { vec![] }, matrix)?;
        Ok(View {
            kind: Kind::Gather { phases, filter: major },
            spatial,
            a: gathered.dtype,
            b: filter.dtype,
            out: store(&product.d, prepared.line_end(&product.d, product.n), phases),
            rows,
            columns: narrow("the number of channels", columns)?,
            transposed: transposed(&product),
            product,
            traffic_bytes: conv.traffic_bytes(),
            gather,
            other: filter,
            group_depth: narrow("the number of channels", depth)?,
            group_k: narrow("the number of channels", group_k)?,
            taps: narrow("the number of taps", taps)?,
            positions,
            tap_matrices: false,
            prepared,
        })
    }

    /// wgrad: rows are channels of y, columns are taps and channels of x.
    fn filter(prepared: Prepared, spatial: u32, gather: Gather) -> Result<View, Refusal> {
        let conv = &prepared.conv;
        let groups = conv.groups;
        let (group_c, group_k) = (conv.c / groups, conv.k / groups);
        // A channel block is 128 bytes, in memory or in the copy.
        let lines = 128 / conv.x.dtype.bytes() as u64;
        require_groups(groups, [group_c, group_k], conv.x.dtype)?;
        let no_matrix = |tensor: &Tensor| {
            ID.refusal(Reason::Layout, format_args!("a tensor with strides {:?}; its pixels must have a single one", tensor.strides))
        };
        let dy = conv.y.as_matrix(conv.y_extents()).ok_or_else(|| no_matrix(&conv.y))?;
        let taps = tap_count(conv);
        // Taps are columns where a tap's channels are whole channel blocks and lie one tap behind the other, in all that the epilogue
        // touches.
        let results = conv.tensors().into_iter().skip(2);
        let mut merged = group_c.is_multiple_of(lines);
        for (_, tensor, extents) in results {
            merged &= tap_stride(tensor, extents) == Some(group_c * tensor.strides[1]);
        }
        let matrix = |tensor: &Tensor| {
            let tap = tap_stride(tensor, conv.w_extents())?;
            let group = group_k * tensor.strides[0];
            let batch_strides = match (merged, groups > 1) {
                (true, true) => vec![group],
                (true, false) => vec![],
                (false, true) => vec![tap, group],
                (false, false) => vec![tap],
            };
            let [row_stride, column_stride, ..] = tensor.strides;
            Some(Matrix { slot: tensor.slot, dtype: tensor.dtype, row_stride, column_stride, batch_strides })
        };
        let batch = match (merged, groups > 1) {
            (true, true) => vec![groups],
            (true, false) => vec![],
            (false, true) => vec![taps, groups],
            (false, false) => vec![taps],
        };
        let columns = if merged { taps * group_c } else { group_c };
        let pixels = conv.n.saturating_mul(gather.pixels());
        narrow("the number of pixels", pixels.saturating_add(4096).saturating_mul(u64::from(prepared.terms).pow(2)))?;
        narrow("the number of images", conv.n * u64::from(prepared.terms))?;
        narrow("the number of columns", taps.saturating_mul(group_c))?;
        let product = product(ID, conv, [group_k, columns, pixels], batch, matrix)?;
        Ok(View {
            kind: Kind::Filter,
            spatial,
            a: conv.y.dtype,
            b: conv.x.dtype,
            out: store(&product.d, prepared.line_end(&product.d, product.n), false),
            rows: narrow("the number of channels", group_k)?,
            columns: narrow("the number of columns", columns)?,
            transposed: transposed(&product),
            product,
            traffic_bytes: conv.traffic_bytes(),
            gather,
            other: dy,
            group_depth: narrow("the number of channels", group_c)?,
            group_k: narrow("the number of channels", group_k)?,
            taps: narrow("the number of taps", taps)?,
            positions: Positions::default(),
            tap_matrices: !merged,
            prepared,
        })
    }

    /// Phases of rows that have tiles, which are the first: at least one.
    fn tiled_phases(&self, spec: &Spec) -> u32 {
        let phases = &self.gather.phases;
        let with_taps = phases.iter().take_while(|phase| !phase.taps.is_empty()).count();
        if spec.clears() { with_taps.max(1) as u32 } else { phases.len() as u32 }
    }

    /// Matrices of tiles: groups, times phases of rows or taps.
    pub(super) fn matrices(&self, spec: &Spec) -> u32 {
        match self.kind {
            Kind::Gather { .. } => self.tiled_phases(spec) * self.prepared.conv.groups as u32,
            Kind::Filter => self.product.batch_count() as u32,
        }
    }

    /// The products of terms that are formed, one after the other: the places of terms of the pixels gathered, and of the other operand.
    /// Smallest first.
    fn passes(&self) -> Vec<[u32; 2]> {
        let terms = self.prepared.terms;
        let pairs = (0..terms).rev().flat_map(|size| (0..=size).rev().map(move |gathered| [gathered, size - gathered]));
        pairs.map(|pair| pair.map(|term| terms::place(term, terms))).collect()
    }

    /// Channel blocks of one tap.
    fn channel_blocks(&self, depth: u32) -> u32 {
        self.group_depth.div_ceil(depth)
    }

    /// Rows and columns of the product as it is multiplied.
    pub(super) fn extents(&self, spec: &Spec) -> [u32; 2] {
        if spec.swap_ab { [self.columns, self.rows] } else { [self.rows, self.columns] }
    }

    /// Pixels of a swap-AB tile: all tiles have the same number, but for the last. Those that CTAs share are shared in whole
    /// swizzle atoms.
    pub(super) fn pixels_of_tile(&self, spec: &Spec) -> u32 {
        let (pixels, cluster) = (self.rows.div_ceil(self.rows.div_ceil(spec.main.tile.n)), spec.main.tile.peers());
        if cluster > 1 { pixels.next_multiple_of(8 * cluster) } else { pixels }
    }

    /// The product as the epilogue store of a kernel sees it.
    pub(super) fn product_of(&self, spec: &Spec) -> &GemmProblem {
        if spec.writes_transposed() { &self.transposed } else { &self.product }
    }

    /// Steps of depth of a tile, the most of any phase.
    pub(super) fn steps(&self, depth: u32) -> u32 {
        match self.kind {
            Kind::Gather { .. } => {
                let taps = self.gather.phases.first().map_or(0, |phase| phase.taps.len());
                (taps * self.passes().len()) as u32 * self.channel_blocks(depth)
            }
            Kind::Filter => self.passes().len() as u32 * (self.product.k as u32).div_ceil(depth),
        }
    }

    /// The mean over phases that have tiles.
    pub(super) fn mean_steps(&self, spec: &Spec) -> f64 {
        match self.kind {
            Kind::Gather { .. } => {
                let taps = self.gather.taps().count() * self.passes().len();
                taps as f64 / f64::from(self.tiled_phases(spec)) * f64::from(self.channel_blocks(spec.main.depth()))
            }
            Kind::Filter => f64::from(self.steps(spec.main.depth())),
        }
    }

    /// The arguments of the loads of so many tiles, of rows and columns of tiles; adds tables to the program.
    pub(super) fn producer(&self, spec: &Spec, tiles: u32, [tile_rows, tile_columns]: [u32; 2], program: &mut Program) -> ProducerArgs {
        let mut constant = |bytes: Vec<u8>| {
            program.constants.push(bytes);
            Address { base: Base::Constant(program.constants.len() - 1), offset_bytes: 0 }
        };
        let passes = self.passes();
        let (conv, gather, groups) = (&self.prepared.conv, &self.gather, self.prepared.conv.groups as u32);
        let images = conv.n as u32;
        let in_place = |slot: Slot| Address::buffer(slot.0 as usize);
        let activations = conv.activations();
        let all_images = conv.n * u64::from(self.prepared.terms);
        let [of_pixels, of_filter] = spec.gathers();
        let pixel_clip = spec.shares_depth().then(|| spec.main.clipped(of_pixels).args_of_share(self.pixels_of_tile(spec)));
        let decl = pixel_clip.map_or(spec.gathered_map(), |clip| clip.boxed(spec.gathered_map()));
        let pixels = (in_place(activations.slot), self.gathered_map(decl, activations, all_images));
        let walk = WalkArgs::of(gather);
        match self.kind {
            Kind::Gather { filter: major, .. } => {
                let forward = conv.direction == Direction::Fprop;
                let taps = constant(tap_table(gather, &passes, [images, self.taps, self.positions.tap as u32]));
                let tiled = self.tiled_phases(spec);
                let numbers = |extents: &[u64]| extents.iter().map(|&n| n as u32).collect();
                let scatter = spec.has_phases().then(|| ScatterArgs {
                    table: constant(phase_table(&gather.phases, passes.len() as u32)),
                    phase_tiles: tiles / tiled,
                    last_phase: tiled - 1,
                    all_phases: spec.clears().then_some(gather.phases.len() as u32),
                    groups,
                    images,
                    extents: numbers(&gather.target),
                    strides: numbers(&gather.scatter),
                });
                let (rows, depth) = if forward { (conv.k, conv.c / conv.groups) } else { (conv.c / conv.groups, conv.k / conv.groups) };
                let dims = if major == Major::Depth { [depth, rows] } else { [rows, depth] };
                let positions = self.positions.count(conv.groups, u64::from(self.taps) * u64::from(self.prepared.terms));
                let stack = Matrix { batch_strides: vec![self.positions.stride], ..self.other.clone() };
                let filter_tiles = if of_filter == Operand::A { tile_rows } else { tile_columns };
                let columns = spec.main.clipped(of_filter).args(self.columns, filter_tiles);
                let decl = columns.boxed(spec.main.clipped(of_filter).map());
                let filter = matrix_map(decl, &stack, [dims[0], dims[1], positions]);
                // Measured: where CTAs side by side read the same rows at once, a percent is lost to lines that are brought for later.
                let l2 = if spec.shares_depth() { L2Promotion::B128 } else { filter.l2 };
                ProducerArgs::Gather(GatherArgs {
                    pixels,
                    filter: (in_place(self.other.slot), MapSpec { l2, ..filter }),
                    walk,
                    taps,
                    channel_blocks: self.channel_blocks(spec.main.depth()),
                    group_channels: self.group_depth,
                    group_columns: if forward { self.group_k } else { 0 },
                    group_positions: self.positions.group as u32,
                    columns,
                    pixel_clip,
                    scatter,
                })
            }
            Kind::Filter => {
                let taps = constant(tap_table(gather, &[[0, 0]], [0, 0, 1]));
                let decl = spec.dy_map();
                let dy = Matrix { batch_strides: vec![self.product.k * self.other.row_stride], ..self.other.clone() };
                let map = if spec.transposes_tiles() {
                    // Channel blocks, one behind the other.
                    let channel_block = u64::from(spec.main.depth());
                    let dy = Matrix { batch_strides: vec![channel_block], ..dy };
                    matrix_map(decl, &dy, [channel_block, self.product.k, conv.k / channel_block])
                } else {
                    matrix_map(decl, &dy, [conv.k, self.product.k, u64::from(self.prepared.terms)])
                };
                let clip = |operand, extent, tiles| spec.main.clipped(operand).args(extent, tiles);
                let clips = (!spec.transposes_tiles())
                    .then(|| [clip(Operand::A, self.rows, tile_rows), clip(Operand::B, self.columns, tile_columns)]);
                // Where a tap is a matrix, all channel blocks of a row of tiles belong to it.
                let channel_blocks_of_tiles = self.columns.next_multiple_of(spec.main.tile.n * spec.main.tile.peers()) / spec.main.depth();
                ProducerArgs::Filter(FilterArgs {
                    dy: (in_place(self.other.slot), map),
                    pixels,
                    walk,
                    taps,
                    tap_count: self.taps,
                    channel_blocks: if self.tap_matrices { channel_blocks_of_tiles } else { self.channel_blocks(spec.main.depth()) },
                    groups,
                    group_rows: self.group_k,
                    group_channels: self.group_depth,
                    pass_steps: (self.product.k as u32).div_ceil(spec.main.depth()),
                    passes: passes.iter().rev().fold(0, |all, [x, dy]| all << 4 | dy << 2 | x),
                    images,
                    clips,
                })
            }
        }
    }

    /// Where the result is.
    pub(super) fn place(&self, spec: &Spec, chunk: &Chunk) -> PlaceArgs {
        let d = &self.product.d;
        let leading_bytes = d.row_stride * d.dtype.bytes() as u64;
        let batch = self.product.batch_count() as u32;
        let [rows, columns] = if spec.writes_transposed() { [self.columns, self.rows] } else { [self.rows, self.columns] };
        let at = Address::buffer(d.slot.0 as usize);
        let mut place = spec.store().place(at, [rows, columns, batch], leading_bytes, chunk.strides_bytes(d));
        // The map ends with the line, which in scratch is longer than its columns.
        if let Some((_, map)) = &mut place.d {
            map.dims[0] = self.prepared.line_end(d, self.product.n);
        }
        place
    }

    fn gathered_map(&self, decl: MapDecl, tensor: &Tensor, images: u64) -> MapSpec {
        let bytes = tensor.dtype.bytes() as u64;
        let walks = &self.gather.walks;
        let spatial = (0..walks.len()).map(|axis| tensor.strides[4 - axis] * bytes);
        let steps = walks.iter().map(|walk| walk.step as u32);
        let strides_bytes: Vec<u64> = spatial.chain([tensor.strides[0] * bytes]).collect();
        MapSpec {
            decl,
            dims: [self.prepared.conv.activation_channels()]
                .into_iter()
                .chain(walks.iter().map(|walk| walk.extent))
                .chain([images])
                .collect(),
            l2: L2Promotion::of_lines(&strides_bytes),
            strides_bytes,
            element_strides: [1].into_iter().chain(steps).chain([1]).collect(),
            lower_corner: walks.iter().map(|walk| walk.lower as i32).collect(),
            upper_corner: walks.iter().map(|walk| walk.upper() as i32).collect(),
            fill: Default::default(),
        }
    }
}

/// A matrix, or a stack of them, as a tiled map of rank 3; `dims` are innermost first.
fn matrix_map(decl: MapDecl, matrix: &Matrix, dims: [u64; 3]) -> MapSpec {
    let bytes = matrix.dtype.bytes() as u64;
    let leading = matrix.leading_dimension().unwrap_or(1) * bytes;
    let stack = matrix.batch_strides.first().map_or(leading, |stride| stride * bytes);
    tiled::matrix_map(decl, dims, [leading, stack])
}

/// The walk over the gathered tensor, in as few dimensions as its numbers allow, and how many these are.
fn walk(conv: &ConvProblem) -> Result<(u32, Gather), Refusal> {
    let trivial = |dim: usize| [conv.input[dim], conv.filter[dim], conv.output[dim]] == [1; 3] && conv.pads_before[dim] == 0;
    let spatial: usize = if trivial(0) { 2 } else { 3 };
    let gather = |spatial: usize| {
        let axes: Vec<AxisShape> = (0..spatial).map(|axis| AxisShape::of(conv, 2 - axis)).collect();
        if conv.direction == Direction::Dgrad { Gather::backward_data(&axes, conv.flip) } else { Gather::forward(&axes, conv.flip) }
    };
    let phases = (0..3).map(|dim| conv.strides[dim].min(conv.input[dim])).fold(1u64, u64::saturating_mul);
    let taps = tap_count(conv);
    ID.require(
        taps <= 1 << 16 && (conv.direction != Direction::Dgrad || phases <= 1 << 12),
        Reason::Extent,
        format_args!("filter {:?}, strides {:?}; takes up to 2^16 taps and, in dgrad, 2^12 phases", conv.filter, conv.strides),
    )?;
    let wide = gather(spatial);
    let fits = check_walk(&wide);
    // One dimension alone has a wider range of offsets.
    if fits.is_err() && trivial(0) && trivial(1) {
        let line = gather(1);
        check_walk(&line)?;
        return Ok((1, line));
    }
    fits?;
    Ok((spatial as u32, wide))
}

/// The limits of TMA.
fn check_walk(gather: &Gather) -> Result<(), Refusal> {
    let spatial = gather.walks.len();
    let bits = [16, 8, 5][spatial - 1];
    for (axis, walk) in gather.walks.iter().enumerate() {
        let dim = 2 - axis;
        ID.require(walk.step <= 8, Reason::Extent, format_args!("the stride of spatial dim {dim} is {}; TMA takes up to 8", walk.step))?;
        let corners = -(1i64 << (bits - 1))..1 << (bits - 1);
        for (name, corner) in [("first", walk.lower), ("last", walk.upper())] {
            ID.require(
                corners.contains(&corner),
                Reason::Extent,
                format_args!(
                    "in spatial dim {dim} the {name} pixel lies {corner} beyond the tensor's; TMA takes {} to {}",
                    corners.start,
                    corners.end - 1
                ),
            )?;
        }
        let offset = gather.largest_offset(axis);
        ID.require(
            offset < 1 << bits,
            Reason::Extent,
            format_args!("in spatial dim {dim} a tap lies {offset} pixels away; TMA takes up to {}", (1 << bits) - 1),
        )?;
    }
    Ok(())
}

/// TMA copies from multiples of 16 bytes on, where groups have to begin.
fn require_groups(groups: u64, [c, k]: [u64; 2], dtype: DType) -> Result<(), Refusal> {
    let whole = |channels: u64| (channels * dtype.bytes() as u64).is_multiple_of(16);
    ID.require(
        groups == 1 || whole(c) && whole(k),
        Reason::Extent,
        format_args!("{groups} groups of {c} and {k} channels of {dtype}; each must begin at a multiple of 16 bytes"),
    )
}

/// How D, whose lines end behind `columns`, leaves: as a map where its rows are whole 16 bytes, line by line where they are not.
fn store(d: &Matrix, columns: u64, scattered: bool) -> Out {
    let bytes = d.dtype.bytes();
    let mapped = matches!(bytes, 2 | 4) && d.column_stride == 1 && d.row_stride > 0 && is_mappable(d, columns);
    match (mapped, scattered) {
        (false, false) if matches!(bytes, 2 | 4) && d.column_stride == 1 => Out::Rows,
        (false, _) => Out::Direct,
        (true, false) => Out::Tma,
        (true, true) => Out::Scattered,
    }
}
