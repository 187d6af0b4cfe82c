//! Sums over the channels of a stored result, in a fixed order: of lines of channels by [`super::column_sums`], else one CTA a channel.

use verdigris_graph::{Channels, ConvProblem, Statistics};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::params::{Divide, Write};
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::column_sums::{self, Targets};
use crate::cost::{Stream, Traffic};
use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::compute::{self, Compute};
use crate::layout::images::{Strided, StridedArguments};
use crate::layout::space::divisor;

/// Threads of a CTA.
const THREADS: u32 = 256;

/// The kernel that sums up elements of a type.
fn kernel(stored: DType, double: bool) -> KernelRef {
    let name = format!("conv_direct_statistics_{stored}{}", if double { "_double" } else { "" });
    KernelRef::new(name.clone(), move || {
        let header = Header { name: name.clone(), target: compute::target_of(stored), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| if double { sums::<f64>(k, stored) } else { sums::<f32>(k, stored) })
    })
}

/// Where the sums go.
pub(crate) fn targets(statistics: &Statistics) -> Targets {
    [statistics.sum, statistics.sum_of_squares].map(|sum| (Address::buffer(sum.slot.0 as usize), sum.stride * sum.dtype.bytes() as u64))
}

/// The distance of the lines of channels that a result is, where it is that; sums in f64 are formed otherwise.
fn line_elements(p: &ConvProblem) -> Option<u64> {
    let result = p.result();
    let lies_in_lines = result.strides[1] == 1 && p.precision.epilogue() != DType::F64;
    lies_in_lines.then(|| result.pixel_stride(p.result_extents())).flatten()
}

/// What the kernels ask, which count pixels in 32 bits; nothing where no sums are asked for.
pub(crate) fn require(id: EngineId, p: &ConvProblem) -> Result<(), Refusal> {
    let [n, _, d, h, w] = p.result_extents();
    let pixels = [n, d, h, w].iter().fold(1u64, |all, &extent| all.saturating_mul(extent));
    let counts = p.statistics.is_none() || pixels < 1 << 31;
    id.require(counts, Reason::Extent, format_args!("sums over {pixels} pixels, taken below 2^31"))
}

/// What the launches ask; nothing where no sums are asked for.
pub(crate) fn work(p: &ConvProblem) -> Option<Stream> {
    p.statistics.as_ref()?;
    let elements: f64 = p.result_extents().iter().map(|&extent| extent as f64).product();
    // Across lines, a sector is read for each element.
    let element_bytes = if line_elements(p).is_some() || p.result().strides[4] == 1 { p.result().dtype.bytes() as f64 } else { 32.0 };
    Some(Stream::new(Traffic::Lines, elements * element_bytes).in_launches(2.0))
}

/// Adds the launches. Of no pixels, the sums are 0.
pub(crate) fn steps(p: &ConvProblem, statistics: &Statistics, program: &mut Program) {
    let [n, channels, d, h, w] = p.result_extents();
    if channels == 0 {
        return;
    }
    let result = p.result();
    if let Some(stride) = line_elements(p) {
        let (lines, bytes) = (Address::buffer(result.slot.0 as usize), stride * result.dtype.bytes() as u64);
        let counts = [n * d * h * w, channels].map(|count| count as u32);
        column_sums::of_lines(lines, result.dtype, counts, bytes, targets(statistics), program);
        return;
    }
    let total = |sum: &Channels| TotalArguments { at: Address::buffer(sum.slot.0 as usize), stride: sum.stride * sum.dtype.bytes() as u64 };
    let double = p.precision.epilogue() == DType::F64;
    let args = SumsArguments {
        pixels: (n * d * h * w) as u32,
        extents: [d, h, w].map(divisor),
        result: StridedArguments::of(result),
        totals: [total(&statistics.sum), total(&statistics.sum_of_squares)],
    };
    let args = args.bound(&(result.dtype, if double { 8 } else { 4 }));
    program.launch(Launch::new(kernel(result.dtype, double), [channels as u32, 1, 1], args));
}

verdigris_kir::parameters! {
    /// Of a result of this type, and sums of so many bytes.
    struct Sums / SumsArguments of (DType, u32) as spec {
        pixels: u32,
        /// Depths, heights and widths.
        extents: [Divide; 3],
        result: StridedArguments = spec.0.bytes() as u32,
        totals: [TotalArguments; 2] = spec.1,
    }
}

verdigris_kir::parameters! {
    /// Where sums of so many bytes go.
    #[derive(Clone, Copy)]
    struct Total / TotalArguments of u32 as bytes {
        at: Write = *bytes,
        /// Bytes from channel to channel.
        stride: u64,
    }
}

fn sums<'k, T: Compute>(k: Kernel<'k>, stored: DType) {
    let Sums { pixels, extents: [depths, heights, widths], result, totals: outputs } = Sums::declare(k, &(stored, T::TY.bytes()));

    let (thread, channel) = (k.thread(), k.cta());
    let Strided { pointer, first, channel: of_channel, spatial: [depth, height, width] } = result;
    let base = pointer.address() + channel.widen() * of_channel;
    let totals = [k.var(T::constant(k, 0.0)), k.var(T::constant(k, 0.0))];
    k.range_step(thread, pixels, THREADS, |pixel| {
        let (rest, w) = widths.split(pixel);
        let (rest, h) = heights.split(rest);
        let (n, d) = depths.split(rest);
        let address = base + n.widen() * first + d.widen() * depth + h.widen() * height + w.widen() * width;
        let value: Val<'k, T> = compute::load(k, stored, address, 0);
        totals[0].set(totals[0].get() + value);
        totals[1].set(k.fma(value, value, totals[1].get()));
    });
    // Half as many threads hold sums after each step.
    let shared = k.shared("sums", 2 * THREADS * T::TY.bytes(), 16).address();
    let place = shared + thread * (2 * T::TY.bytes());
    let write = || k.st_shared_vector(place, 0, &[totals[0].get(), totals[1].get()]);
    write();
    k.bar_sync();
    let mut half = THREADS / 2;
    while half > 0 {
        k.when(thread.lt(half), || {
            let other = k.ld_shared_vector::<T>(place, i64::from(half * 2 * T::TY.bytes()), 2);
            totals[0].set(totals[0].get() + other[0]);
            totals[1].set(totals[1].get() + other[1]);
            write();
        });
        k.bar_sync();
        half /= 2;
    }
    k.when(thread.eq(0), || {
        for (total, Total { at, stride }) in totals.iter().zip(outputs) {
            k.st_global(at.address() + channel.widen() * stride, 0, total.get());
        }
    });
}
