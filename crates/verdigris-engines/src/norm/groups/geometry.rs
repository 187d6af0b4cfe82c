//! Problems as images of channels of points: which of the dims is which, and how threads stand along them.

use serde::{Deserialize, Serialize};
use verdigris_graph::{NormProblem, View};

/// How threads stand.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    /// So many threads along channels that are neighbours in memory, a vector of them each; the others along points.
    Lines { across: u32 },
    /// All threads along the points of one channel, which are neighbours in memory, a vector of them each.
    Planes,
}

/// Which dims of the space number what. A group is neighbouring channels: with both dims, the second runs within a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Dims {
    image: Option<usize>,
    group: Option<usize>,
    channel: Option<usize>,
    point: usize,
}

/// A problem as images of channels of points.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Geometry {
    dims: Dims,
    /// Whether channels are neighbours in memory; else points are.
    pub channels_last: bool,
    pub images: u64,
    pub channels: u64,
    pub groups: u64,
    /// Of each channel of an image.
    pub points: u64,
}

impl Geometry {
    /// How the problem is such images, where it is.
    pub(super) fn of(problem: &NormProblem) -> Option<Geometry> {
        let rows: &[[Option<usize>; 2]] = match problem.rows.len() {
            0 => &[[None, None]],
            1 => &[[None, Some(0)], [Some(0), None]],
            2 => &[[Some(0), Some(1)], [Some(1), Some(0)]],
            _ => return None,
        };
        let first = problem.rows.len();
        let elements = match problem.elements.len() {
            1 => vec![(None, first)],
            2 => vec![(Some(first), first + 1), (Some(first + 1), first)],
            _ => return None,
        };
        let each =
            rows.iter().flat_map(|&[image, group]| elements.iter().map(move |&(channel, point)| Dims { image, group, channel, point }));
        let all: Vec<Dims> = each.collect();
        [true, false].into_iter().find_map(|channels_last| all.iter().find_map(|&dims| Geometry::read(problem, dims, channels_last)))
    }

    fn read(problem: &NormProblem, dims: Dims, channels_last: bool) -> Option<Geometry> {
        let space = problem.space();
        let extent = |dim: Option<usize>| dim.map_or(1, |dim| space[dim]);
        let of_group = extent(dims.channel);
        let groups = extent(dims.group);
        let geometry =
            Geometry { dims, channels_last, images: extent(dims.image), channels: groups * of_group, groups, points: space[dims.point] };
        let fits = |(name, view, _): &(&str, &View, bool)| {
            let [image, channel, point] = geometry.strides(view);
            let is_linear = match (dims.group, dims.channel) {
                (Some(group), Some(own)) => view.strides[group] == of_group * view.strides[own],
                _ => true,
            };
            match *name {
                "mean" | "inv" => true,
                "scale" | "bias" => is_linear && point == 0,
                "dscale" | "dbias" => {
                    is_linear && point == 0 && (image == 0 || geometry.images == 1) && (channel > 0 || geometry.channels == 1)
                }
                _ if channels_last => is_linear && channel == 1 && point > 0,
                _ => is_linear && point == 1,
            }
        };
        problem.operands().iter().all(fits).then_some(geometry)
    }

    /// Channels of a group.
    pub(super) fn channels_of_group(&self) -> u64 {
        self.channels / self.groups
    }

    /// The strides of a view along images, channels and points.
    pub(super) fn strides(&self, view: &View) -> [u64; 3] {
        let stride = |dim: Option<usize>| dim.map_or(0, |dim| view.strides[dim]);
        [stride(self.dims.image), stride(self.dims.channel.or(self.dims.group)), view.strides[self.dims.point]]
    }

    /// The strides of a statistic along images and groups.
    pub(super) fn strides_of_rows(&self, view: &View) -> [u64; 2] {
        [self.dims.image, self.dims.group].map(|dim| dim.map_or(0, |dim| view.strides[dim]))
    }

    /// How many neighbours one access may take: the largest of 8, 4, 2 and 1 that all strides and offsets of what has an element for each of `x` allow, at
    /// most 16 bytes of the narrowest.
    pub(super) fn neighbours<'v>(&self, wholes: impl Iterator<Item = &'v View>) -> u32 {
        let mut bits = 8 | if self.channels_last { self.channels } else { self.points };
        let mut narrowest = 8;
        for view in wholes {
            let [image, channel, point] = self.strides(view);
            narrowest = narrowest.min(view.dtype.bytes());
            bits |= view.offset;
            let (beside, beside_extent) = if self.channels_last { (point, self.points) } else { (channel, self.channels) };
            for (stride, extent) in [(image, self.images), (beside, beside_extent)] {
                bits |= if extent > 1 { stride } else { 0 };
            }
        }
        (1 << bits.trailing_zeros()).min(16 / narrowest as u32)
    }
}
