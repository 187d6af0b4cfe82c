//! Pixels by axes, cut into boxes that TMA brings.
//!
//! Pixel `p` reads pixels `p + origin + tap · dilation` along each axis. fprop and wgrad: pixels are those of y and read x,
//! `y[p] = Σ_t x[p − pad + t·d] · w[t]`. dgrad: pixels are those of x and read y, `dx[p] = Σ_r dy[p + pad − r·d] · w[r]`, which with
//! `t = taps − 1 − r` reads upwards too, and meets the filter from its last element on.

use verdigris_graph::{ConvProblem, Direction};
use verdigris_kir::ir::MapDecl;
use verdigris_kir::program::{L2Promotion, MapSpec};

/// Axes of pixels.
pub(super) const AXES: usize = 4;
/// Those over which a filter and its halo extend.
pub(super) const BOX_AXES: usize = 3;
/// Pixels that follow each other along the first axis wherever they are read.
pub(super) const RUN: u32 = 8;
/// The most pixels of a box along an axis, as TMA counts them.
pub(super) const MOST_EXTENT: u64 = 256;

/// One axis of the pixels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Axis {
    /// Pixels, and those of the tensor that is read with its halo.
    pub(super) pixels: u64,
    pub(super) source: u64,
    pub(super) filter: u64,
    pub(super) dilation: u64,
    /// What the first tap reads for the first pixel.
    pub(super) origin: i64,
    /// Elements from one pixel to the next.
    pub(super) pixel_stride: u64,
    pub(super) source_stride: u64,
}

/// All axes, innermost first.
pub(super) type Axes = [Axis; AXES];

/// Width, height, depth and images of a problem whose strides are 1.
pub(super) fn axes(conv: &ConvProblem) -> Axes {
    let backward = conv.direction == Direction::Dgrad;
    let (x, y) = ((&conv.x, conv.x_extents()), (&conv.y, conv.y_extents()));
    let ((tensor, extents), (source, source_extents)) = if backward { (x, y) } else { (y, x) };
    [4, 3, 2, 0].map(|dim: usize| {
        let of_filter = |list: [u64; 3], image: u64| dim.checked_sub(2).map_or(image, |dim| list[dim]);
        let (filter, dilation) = (of_filter(conv.filter, 1), of_filter(conv.dilations, 1));
        let pad = of_filter(conv.pads_before, 0) as i64;
        Axis {
            pixels: extents[dim],
            source: source_extents[dim],
            filter,
            dilation,
            origin: if backward { pad - ((filter - 1) * dilation) as i64 } else { -pad },
            pixel_stride: tensor.strides[dim],
            source_stride: source.strides[dim],
        }
    })
}

/// Pixels that a filter reaches beyond the first, by axis.
pub(super) fn halo(axes: &Axes) -> [u64; BOX_AXES] {
    std::array::from_fn(|i| (axes[i].filter - 1) * axes[i].dilation)
}

/// Boxes of such extents along each axis.
pub(super) fn counts(axes: &Axes, extents: [u64; AXES]) -> [u64; AXES] {
    std::array::from_fn(|i| axes[i].pixels.div_ceil(extents[i]))
}

/// The map of a tensor that is read in boxes; strides are elements, from the second dim on.
pub(super) fn map(decl: MapDecl, dims: Vec<u64>, strides: impl IntoIterator<Item = u64>) -> MapSpec {
    let bytes = u64::from(decl.ty.bytes());
    let strides_bytes: Vec<u64> = strides.into_iter().map(|stride| stride * bytes).collect();
    MapSpec {
        l2: L2Promotion::of_lines(&strides_bytes),
        strides_bytes,
        element_strides: vec![1; dims.len()],
        dims,
        decl,
        lower_corner: vec![],
        upper_corner: vec![],
        fill: Default::default(),
    }
}

/// The map of the tensor that is read with its halo.
pub(super) fn source_map(decl: MapDecl, channels: u64, axes: &Axes) -> MapSpec {
    map(decl, [channels].into_iter().chain(axes.map(|axis| axis.source)).collect(), axes.map(|axis| axis.source_stride))
}

/// The map of the pixels.
pub(super) fn pixel_map(decl: MapDecl, channels: u64, axes: &Axes) -> MapSpec {
    map(decl, [channels].into_iter().chain(axes.map(|axis| axis.pixels)).collect(), axes.map(|axis| axis.pixel_stride))
}
