//! Spaces of points: the parts of one that launches cover, the index of a point from its number, memory that lies over it, and the kernel
//! parameters for all of these.

use verdigris_graph::View;
use verdigris_kir::face::{Divisor, Kernel, Pointer, Val};
use verdigris_kir::params::{Arguments, Divide, Parameter, Read, Write};
use verdigris_kir::program::{Address, Base};

/// A part of a space that one launch covers: its first point and its extents.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Region {
    /// The first index of each dim.
    pub first: Vec<u64>,
    /// Extents.
    pub extents: Vec<u32>,
}

impl Region {
    /// Cuts a space into parts of at most 2^30 points, if a vector of neighbours along the innermost dim counts as one.
    pub(crate) fn all(dims: &[u64], vector: u32) -> Vec<Region> {
        const POINTS: u64 = 1 << 30;
        if dims.contains(&0) {
            return Vec::new();
        }
        let mut sizes = vec![1; dims.len()];
        let mut room = POINTS;
        for (i, (size, &extent)) in sizes.iter_mut().zip(dims).enumerate().rev() {
            let unit = if i + 1 == dims.len() { u64::from(vector) } else { 1 };
            *size = extent.min((room * unit).min(1 << 31)).max(1);
            room = (room / size.div_ceil(unit)).max(1);
        }
        let mut regions = vec![Region { first: Vec::new(), extents: Vec::new() }];
        for (&extent, &size) in dims.iter().zip(&sizes) {
            regions = regions
                .into_iter()
                .flat_map(|region| {
                    (0..extent.div_ceil(size)).map(move |i| {
                        let mut next = region.clone();
                        next.first.push(i * size);
                        next.extents.push(size.min(extent - i * size) as u32);
                        next
                    })
                })
                .collect();
        }
        regions
    }

    /// Points, a vector of neighbours counting as one.
    pub(crate) fn points(&self, vector: u32) -> u32 {
        let inner = self.extents.last().map_or(1, |extent| extent.div_ceil(vector));
        self.extents.iter().rev().skip(1).product::<u32>() * inner
    }
}

/// A divisor, 1 in place of 0.
pub(crate) fn divisor(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX).max(1)
}

/// The address of a view's element at an index.
pub(crate) fn element(view: &View, index: impl IntoIterator<Item = u64>) -> Address {
    let elements = view.offset + view.strides.iter().zip(index).map(|(stride, i)| stride * i).sum::<u64>();
    Address { base: Base::Buffer(view.slot.0 as usize), offset_bytes: elements * view.dtype.bytes() as u64 }
}

/// Bytes that cross the memory bus for a view over a space, whose neighbours along the last dim an access takes together; where `apart`, each
/// costs a sector of 32 bytes.
pub(crate) fn traffic_bytes(view: &View, dims: &[u64], apart: bool) -> f64 {
    let elements: f64 = dims.iter().zip(&view.strides).filter(|(_, stride)| **stride > 0).map(|(&dim, _)| dim as f64).product();
    elements * if apart { 32.0 } else { view.dtype.bytes() as f64 }
}

/// Whether neighbours along the last dim do not touch.
pub(crate) fn is_apart(view: &View) -> bool {
    view.strides.last().is_some_and(|&stride| stride > 1)
}

/// Whether elements lie one behind the other without gaps. A dim of one element may have any stride.
pub(crate) fn is_packed(strides: &[u64], dims: &[u64]) -> bool {
    let mut size = 1u64;
    strides.iter().zip(dims).rev().all(|(&stride, &dim)| {
        let lies = dim <= 1 || stride == size;
        size = size.saturating_mul(dim);
        lies
    })
}

// ---- parameters --------------------------------------------------------------------------------------------------------

/// The extents of a space, by which the number of a point becomes its index. The spec is the number of dims; all extents are given.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Extents {}

/// A space in a kernel.
#[derive(Clone, Debug)]
pub(crate) struct Space<'k> {
    rank: usize,
    /// All but the first, which nothing is divided by.
    inner: Vec<Divisor<'k>>,
}

impl Parameter for Extents {
    type Spec = usize;
    type Value<'k> = Space<'k>;
    type Argument = Vec<u32>;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, &rank: &usize) -> Space<'k> {
        Space { rank, inner: Vec::<Divide>::declare(k, name, &vec![(); rank.saturating_sub(1)]) }
    }

    fn bind(extents: Vec<u32>, name: &'static str, rank: &usize, to: &mut Arguments) {
        // A space without points has none to divide.
        let inner = extents.into_iter().skip(1).map(|extent| extent.max(1)).collect();
        Vec::<Divide>::bind(inner, name, &vec![(); rank.saturating_sub(1)], to);
    }
}

impl<'k> Space<'k> {
    /// The index of a point; the last dim runs fastest.
    #[track_caller]
    pub(crate) fn index(&self, point: Val<'k, u32>) -> Vec<Val<'k, u32>> {
        let mut index = Vec::with_capacity(self.rank);
        let mut rest = point;
        for extent in self.inner.iter().rev() {
            let (outer, inner) = extent.split(rest);
            index.push(inner);
            rest = outer;
        }
        index.extend((self.rank > 0).then_some(rest));
        index.reverse();
        index
    }
}

/// Global memory that the kernel reads, or writes, as the spec says.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {}

/// What a kernel does with memory, and the alignment in bytes that it relies on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub written: bool,
    pub bytes: u32,
}

impl Parameter for Memory {
    type Spec = Access;
    type Value<'k> = Pointer<'k>;
    type Argument = Address;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, access: &Access) -> Pointer<'k> {
        if access.written { Write::declare(k, name, &access.bytes) } else { Read::declare(k, name, &access.bytes) }
    }

    fn bind(address: Address, name: &'static str, access: &Access, to: &mut Arguments) {
        if access.written { Write::bind(address, name, &access.bytes, to) } else { Read::bind(address, name, &access.bytes, to) }
    }
}
