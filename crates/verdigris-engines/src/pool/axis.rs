//! Windows of a few neighbouring taps along a spatial dim, each of which meets an element: what the kernels take that are written out for their windows.

use verdigris_graph::{PoolProblem, Windows};
use verdigris_kir::face::{AsVal, Kernel, Val};

use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::compute::Compute;

/// Taps along a dim that a kernel is written out for.
const MOST_TAPS: u64 = 5;
/// Extents, so that products of a few of them count in 31 bits.
const LIMIT: u64 = 1 << 14;

/// Windows along a spatial dim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Axis {
    pub(super) extent: u32,
    pub(super) out: u32,
    pub(super) taps: u32,
    pub(super) stride: u32,
    pub(super) pad: u32,
}

impl Axis {
    /// Those of a problem's rows and columns, where there is no third dim.
    ///
    /// # Errors
    /// A refusal where there is one, or a dim has other windows.
    pub(super) fn require_both(id: EngineId, p: &PoolProblem) -> Result<[Axis; 2], Refusal> {
        let is_flat = p.extents[0] == 1
            && p.out[0] == 1
            && matches!(p.windows[0], Windows::Adaptive | Windows::Sliding { taps: 1, pad_before: 0, .. });
        id.require(is_flat, Reason::Extent, "three spatial dims, taken are two")?;
        let [Some(height), Some(width)] = [1, 2].map(|i| Axis::of(p.extents[i], p.out[i], &p.windows[i])) else {
            let reason =
                format_args!("windows {:?} over {:?}, taken are up to {MOST_TAPS} neighbours that meet the image", p.windows, p.extents);
            return Err(id.refusal(Reason::Extent, reason));
        };
        Ok([height, width])
    }

    /// Of one dim.
    pub(super) fn of(extent: u64, out: u64, windows: &Windows) -> Option<Axis> {
        let (taps, stride, pad) = match *windows {
            Windows::Sliding { taps, stride, dilation, pad_before } if dilation == 1 || taps == 1 => (taps, stride, pad_before),
            Windows::Adaptive if out > 0 && extent.is_multiple_of(out) => (extent / out, extent / out, 0),
            _ => return None,
        };
        let is_small = (1..=MOST_TAPS).contains(&taps) && (1..=MOST_TAPS).contains(&stride) && extent < LIMIT && out < LIMIT;
        if !is_small || extent == 0 || out == 0 || pad >= taps || (out - 1) * stride >= extent + pad {
            return None;
        }
        let [extent, out, taps, stride, pad] = [extent, out, taps, stride, pad].map(|count| count as u32);
        Some(Axis { extent, out, taps, stride, pad })
    }

    /// Whether windows have taps beside the image.
    pub(super) fn is_padded(&self) -> bool {
        self.pad > 0 || (self.out - 1) * self.stride + self.taps > self.extent
    }
}

/// The elements of a window along a dim, of so many taps and steps.
pub(super) fn elements_along<'k>(
    window: Val<'k, u32>,
    [taps, stride]: [impl AsVal<'k, u32>; 2],
    pad: impl AsVal<'k, u32>,
    extent: Val<'k, u32>,
) -> Val<'k, u32> {
    let first = window * stride;
    let [begin, end] = [first, first + taps].map(|at| at.max(pad).min(extent + pad));
    end - begin
}

/// What the sum of a window of so many elements is multiplied with for its mean.
pub(super) fn share_of<'k>(k: Kernel<'k>, count: Val<'k, u32>) -> Val<'k, f32> {
    <f32 as Compute>::quotient(k.constant(1.0), <f32 as Compute>::from_i32(count.signed()))
}
