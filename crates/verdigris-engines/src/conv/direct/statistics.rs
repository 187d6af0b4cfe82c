//! Sums over the channels of a stored result: one CTA a channel, in a fixed order.

use verdigris_graph::{ConvProblem, Statistics};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::program::{Address, Arg, KernelRef, Launch, Program, Residency, Step};
use verdigris_tensor::DType;

use super::{THREADS, divisor, double_word, tensor_args, word};
use crate::parts::compute::{self, Compute};

/// The kernel that sums up elements of a type.
fn kernel(stored: DType, double: bool) -> KernelRef {
    let name = format!("conv_direct_statistics_{stored}{}", if double { "_double" } else { "" });
    KernelRef::new(name.clone(), move || {
        let header = Header { name: name.clone(), target: compute::target_of(stored), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| if double { sums::<f64>(k, stored) } else { sums::<f32>(k, stored) })
    })
}

/// Adds the launch. Of no pixels, the sums are 0.
pub(in crate::conv) fn steps(p: &ConvProblem, statistics: &Statistics, program: &mut Program) {
    let [n, channels, d, h, w] = p.result_extents();
    if channels == 0 {
        return;
    }
    let result = p.result();
    let mut args = vec![word(n * d * h * w), divisor(d), divisor(h), divisor(w)];
    args.extend(tensor_args(result));
    for sum in [&statistics.sum, &statistics.sum_of_squares] {
        args.push(Arg::Pointer(Address::buffer(sum.slot.0 as usize)));
        args.push(double_word(sum.stride * sum.dtype.bytes() as u64));
    }
    program.steps.push(Step::Launch(Launch {
        kernel: kernel(result.dtype, p.precision.epilogue() == DType::F64),
        grid: [channels as u32, 1, 1],
        residency: Residency::Any,
        overlap: false,
        args,
    }));
}

fn sums<'k, T: Compute>(k: Kernel<'k>, stored: DType) {
    let pixels = k.scalar::<u32>("pixels");
    let [depths, heights, widths] = ["depths", "heights", "widths"].map(|name| k.divisor(name));
    let result = k.input("result", stored.bytes() as u32);
    let strides = ["n_bytes", "channel_bytes", "depth_bytes", "height_bytes", "width_bytes"].map(|name| k.scalar::<u64>(name));
    let outputs = [["sum", "sum_bytes"], ["sum_of_squares", "sum_of_squares_bytes"]]
        .map(|[name, stride]| (k.output(name, T::TY.bytes()), k.scalar::<u64>(stride)));

    let (thread, channel) = (k.thread(), k.cta());
    let [first, of_channel, depth, height, width] = strides;
    let base = result.address() + channel.widen() * of_channel;
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
        for (total, (output, stride)) in totals.iter().zip(outputs) {
            k.st_global(output.address() + channel.widen() * stride, 0, total.get());
        }
    });
}
