//! Activations as bf16, for the filter's gradient of types that the tensor cores do not read across their depth.
//!
//! **What.** An f32 value becomes a sum of two: `high = bf16(v)`, `low = bf16(v − high)`, the products of which are formed one after the other in
//! the depth: `high·high + high·low + low·high`, short of the exact product by 2⁻¹⁶ of it. tf32 would be short by 2⁻¹¹. 8-bit floats are bf16
//! values as they are.
//! **Cost.** The activations are read once and written once: 8 bytes an element of f32, 3 of fp8.
//! **Numbers.** Infinities and NaN stay what they are in `high`; their `low` is 0.

use verdigris_graph::{Matrix, Slot};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::ir::{KernelBody, Target, Ty};
use verdigris_kir::program::{Address, Arg, KernelRef, Launch, Residency};
use verdigris_tensor::DType;

use crate::arch::Arch;
use crate::parts::compute;

const THREADS: u32 = 256;

/// A copy to be made of activations: pixels by channels.
#[derive(Clone, Debug)]
pub(super) struct Halves {
    source: Matrix,
    pixels: u64,
    channels: u64,
}

/// How many terms each value has.
pub(super) fn terms(dtype: DType) -> u64 {
    if dtype == DType::F32 { 2 } else { 1 }
}

impl Halves {
    pub(super) fn new(source: Matrix, pixels: u64, channels: u64) -> Halves {
        Halves { source, pixels, channels }
    }

    /// The buffer that is read.
    pub(super) fn slot(&self) -> Slot {
        self.source.slot
    }

    /// Elements from one pixel of the copy to the next: whole 16 bytes.
    pub(super) fn pitch(&self) -> u64 {
        self.channels.next_multiple_of(8)
    }

    /// Elements from the first term to the second.
    pub(super) fn term_stride(&self) -> u64 {
        self.pixels * self.pitch()
    }

    pub(super) fn scratch_bytes(&self) -> u64 {
        terms(self.source.dtype) * self.term_stride() * 2
    }

    /// Pairs of channels: one for each thread.
    pub(super) fn threads(&self) -> u64 {
        self.pixels.saturating_mul(self.pitch() / 2)
    }

    pub(super) fn estimate_us(&self, arch: &Arch) -> f64 {
        let bytes = self.source.dtype.bytes() as f64 + 2.0 * terms(self.source.dtype) as f64;
        self.pixels as f64 * self.channels as f64 * bytes / (arch.memory_gb_per_s * 1e3 * 0.8) + 2.0
    }

    /// The launch that makes the copy at `scratch`.
    pub(super) fn launch(&self, source: Address, scratch: Address) -> Launch {
        let bytes = self.source.dtype.bytes() as u64;
        let long = |n: u64| Arg::Scalar(Ty::U64, n);
        let number = |n: u64| Arg::Scalar(Ty::U32, n);
        let args = vec![
            Arg::Pointer(source),
            Arg::Pointer(scratch),
            long(self.source.row_stride * bytes),
            long(self.term_stride() * 2),
            number(self.threads()),
            number(self.channels),
            Arg::Divisor((self.pitch() / 2) as u32),
        ];
        Launch {
            grid: [self.threads().div_ceil(u64::from(THREADS)) as u32, 1, 1],
            residency: Residency::Any,
            overlap: false,
            args,
            kernel: kernel(self.source.dtype),
        }
    }
}

/// The kernel for a type.
pub(super) fn kernel(dtype: DType) -> KernelRef {
    KernelRef::new(name(dtype), move || body(dtype))
}

fn name(dtype: DType) -> String {
    format!("conv_halves_of_{dtype}")
}

fn body(dtype: DType) -> KernelBody {
    let header = Header { name: name(dtype), target: Target::Sm90, threads: THREADS, ..Header::default() };
    build(header, |k| copy(k, dtype))
}

fn copy<'k>(k: Kernel<'k>, dtype: DType) {
    let (source, target) = (k.input("source", 16), k.output("halves", 16));
    let (stride, term_bytes) = (k.scalar::<u64>("pixel_bytes"), k.scalar::<u64>("term_bytes"));
    let (threads, channels) = (k.scalar::<u32>("threads"), k.scalar::<u32>("channels"));
    let pairs = k.divisor("pairs");
    let index = k.cta() * THREADS + k.thread();
    k.when(index.lt(threads), || {
        let (pixel, pair) = pairs.split(index);
        let channel = pair * 2;
        let from = source.address() + pixel.widen() * stride + channel.mul_wide(dtype.bytes() as u32);
        // What lies beyond the channels is zero.
        let values = [k.var(0.0f32), k.var(0.0f32)];
        k.when((channel + 1).lt(channels), || {
            let loaded: [Val<'k, f32>; 2] = compute::load_pair(k, dtype, from, 0);
            values.iter().zip(loaded).for_each(|(value, loaded)| value.set(loaded));
        });
        k.when((channel + 1).eq(channels), || values[0].set(compute::load::<f32>(k, dtype, from, 0)));
        let to = target.at(index, 4);
        let high = k.pack_bf16x2(values[0].get(), values[1].get());
        k.st_global(to, 0, high);
        if terms(dtype) == 2 {
            let low = |half: usize| {
                let bits = if half == 0 { high << 16 } else { high & 0xffff_0000u32 };
                let finite = (bits & 0x7f80_0000u32).ne(0x7f80_0000u32);
                k.select(finite, values[half].get() - bits.bitcast::<f32>(), 0.0f32)
            };
            k.st_global(to + term_bytes, 0, k.pack_bf16x2(low(0), low(1)));
        }
    });
}
