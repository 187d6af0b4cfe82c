//! Adding up: a filter's gradient whose pixels were cut into parts, as a batch of products or by CTAs that walk over them.
//!
//! The parts of an element are added in their order, by one thread or by eight that take every eighth part each, and the sum passes through the
//! epilogue.

use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::ir::KernelBody;
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::{Address, KernelRef, Launch};
use verdigris_tensor::DType;

use crate::cost::{Stream, Traffic};
use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec, OperandSpec};

/// Threads of a CTA.
const THREADS: u32 = 256;
/// Parts that a thread has on their way at a time.
const ON_THEIR_WAY: u32 = 4;
/// With so many elements, a thread has all parts of its own.
const MANY_ELEMENTS: u64 = 1 << 16;

/// Everything that shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Spec {
    epilogue: EpilogueSpec,
}

impl Spec {
    fn name(&self) -> String {
        format!("conv_unfolded_sum_{}", self.epilogue.name())
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.epilogue.target(), threads: THREADS, ..Header::default() };
        build(header, |k| sum(k, self))
    }
}

/// The kernels of plain problems.
pub(crate) fn catalog() -> impl Iterator<Item = KernelRef> {
    let plain = |dtype| Spec { epilogue: EpilogueSpec::plain(OperandSpec::strided(dtype)) };
    [DType::Bf16, DType::F16, DType::F32].into_iter().map(move |dtype| plain(dtype).kernel())
}

/// How a part lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PartLayout {
    /// Rows of a part, and elements from one row to the next: whole 16 bytes.
    pub(crate) rows: u64,
    pub(crate) pitch: u64,
    /// Elements of a part from one k, tap along depth, height and width, and c to the next.
    pub(crate) strides: [u64; 5],
}

/// The parts of a filter's gradient.
#[derive(Clone, Debug)]
pub(crate) struct Sum {
    problem: ConvProblem,
    /// How many, and pixels of each.
    pub(crate) parts: u64,
    pub(crate) pixels: u64,
    pub(crate) layout: PartLayout,
    spec: Spec,
}

impl Sum {
    pub(crate) fn new(p: &ConvProblem, layout: PartLayout, parts: u64, pixels: u64) -> Sum {
        // The plain ones make a catalog, which one class of strides keeps short; a user's chain is compiled for its own.
        let epilogue = EpilogueSpec::of_conv(p);
        let mut epilogue = if epilogue.is_plain() { epilogue.strided() } else { epilogue };
        epilogue.pairs = false;
        Sum { problem: p.clone(), parts, pixels, layout, spec: Spec { epilogue } }
    }

    fn elements(&self) -> u64 {
        self.problem.w_extents().iter().fold(1, |all: u64, &extent| all.saturating_mul(extent))
    }

    /// Elements from one part to the next.
    pub(crate) fn part_elements(&self) -> u64 {
        self.layout.rows * self.layout.pitch
    }

    /// The size of all parts.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.part_elements().saturating_mul(4 * self.parts)
    }

    /// Whether all that the kernel counts in 32 bits fits.
    pub(crate) fn counts(&self) -> bool {
        self.part_elements() < 1 << 30
    }

    /// What it asks.
    pub(crate) fn work(&self) -> Stream {
        Stream::new(Traffic::Reduced, self.scratch_bytes() as f64)
    }

    /// The launch that reads the parts at `from`.
    pub(crate) fn launch(&self, from: Address) -> Launch {
        let [_, c, d, h, w] = self.problem.w_extents();
        let lane_bits: u32 = if self.elements() >= MANY_ELEMENTS { 0 } else { 3 };
        let args = ValuesArgs {
            parts: from,
            count: self.parts as u32,
            part_bytes: 4 * self.part_elements(),
            elements: self.elements() as u32,
            lane_bits,
            extents: [c, w, h, d].map(|extent| extent as u32),
            strides: self.layout.strides.map(|stride| stride as u32),
            epilogue: self.spec.epilogue.conv_arguments(&self.problem),
        };
        let grid = [self.elements().div_ceil(u64::from(THREADS >> lane_bits)) as u32, 1, 1];
        Launch::new(self.spec.clone().kernel(), grid, args.bound(&self.spec))
    }
}

verdigris_kir::parameters! {
    /// What the kernel reads, and its epilogue.
    struct Values / ValuesArgs of Spec as spec {
        parts: Read = 16,
        count: u32,
        part_bytes: u64,
        elements: u32,
        /// Threads of an element are 2 to this.
        lane_bits: u32,
        /// Of c, width, height and depth.
        extents: [Divide; 4],
        /// Elements of a part from one k, tap along depth, height and width, and c to the next.
        strides: [u32; 5],
        epilogue: EpilogueArgs = spec.epilogue.over_tensors(),
    }
}

fn sum(k: Kernel<'_>, spec: &Spec) {
    let Values { parts, count, part_bytes, elements, lane_bits, extents, strides, epilogue } = Values::declare(k, spec);
    let [channels, widths, heights, depths] = extents;
    let meeting = k.shared("sums", THREADS * 4, 16).address();

    // Threads of a CTA with elements of their own, and which of the threads of its element this one is.
    let across = k.constant(THREADS).shr(lane_bits);
    let (within, lanes) = (k.thread() & (across - 1), k.constant(1u32).shl(lane_bits));
    let lane = k.thread().shr(k.constant(THREADS.ilog2()) - lane_bits);
    let element = k.cta() * across + within;
    let (rest, c) = channels.split(element);
    let (rest, w) = widths.split(rest);
    let (rest, h) = heights.split(rest);
    let (first, d) = depths.split(rest);
    let sum = k.var(0.0f32);
    k.when(element.lt(elements) & lane.lt(count), || {
        let offset = [first, d, h, w, c].into_iter().zip(strides).fold(k.constant(0u32), |offset, (index, stride)| offset + index * stride);
        let from = parts.at(offset, 4) + lane.widen() * part_bytes;
        let turns = (count - 1 - lane).shr(lane_bits) + 1;
        k.range_unrolled(turns, ON_THEIR_WAY, |turn| {
            sum.set(sum.get() + k.ld_global::<f32>(from + turn.shl(lane_bits).widen() * part_bytes, 0));
        });
    });
    let place = meeting + k.thread() * 4;
    k.st_shared(place, 0, sum.get());
    k.bar_sync();
    k.when(element.lt(elements) & lane.eq(0), || {
        k.range_step(1u32, lanes, 1u32, |lane| {
            sum.set(sum.get() + k.ld_shared::<f32>(place + lane * (across * 4), 0));
        });
        let place = epilogue.at_pixel([first, d, h, w], c);
        place.store(place.apply(sum.get(), 0), 0);
    });
}
