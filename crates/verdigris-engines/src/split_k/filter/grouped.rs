//! The second launch of a wgrad: adds up the parts of its sums in their order, and applies the epilogue.
//!
//! Lanes are neighbouring elements. Where elements are few, warps share out the parts of 32 of them, and what they have is added up in shared
//! memory; where they fill the chip, a warp adds up all parts of its own, so that a launch is not ten thousand CTAs of little work.

use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::ir::KernelBody;
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::{Address, KernelRef, Launch};

use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec};
use crate::layout::space::divisor;

/// Threads of a CTA.
const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
/// Parts that are on their way to a warp at a time.
const UNROLL: u32 = 8;
/// CTAs that fill a chip once over.
const FEW_CTAS: u64 = 256;

/// What shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Spec {
    pub(crate) epilogue: EpilogueSpec,
}

impl Spec {
    pub(crate) fn name(&self) -> String {
        format!("conv_grouped_sum_{}", self.epilogue.name())
    }

    pub(crate) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.epilogue.target(), threads: THREADS, ..Header::default() };
        build(header, |k| sum(k, self))
    }

    /// The launch for `count` parts of `part_bytes` bytes each.
    pub(crate) fn launch(&self, p: &ConvProblem, parts: Address, count: u64, part_bytes: u64) -> Launch {
        let extents = p.gemm_extents();
        let elements = p.k * extents.n;
        let sharing = sharing(elements, count);
        let args = SumArguments {
            elements: elements as u32,
            count: count as u32,
            sharing: sharing.ilog2(),
            parts,
            part_bytes,
            channels: divisor(p.c / p.groups),
            taps: p.filter.map(divisor),
            epilogue: self.epilogue.conv_arguments(p),
        };
        let grid = [elements.div_ceil(u64::from(THREADS / sharing)) as u32, 1, 1];
        Launch::new(self.clone().kernel(), grid, args.bound(self))
    }
}

/// Warps that share out the parts of an element: fewer where that leaves a few hundred CTAs, and no more than there are parts.
fn sharing(elements: u64, count: u64) -> u32 {
    let fitting = (0..=WARPS.ilog2()).map(|power| 1u32 << power);
    let is_enough = |&sharing: &u32| elements * u64::from(sharing) / u64::from(THREADS) >= FEW_CTAS || u64::from(sharing) >= count;
    fitting.into_iter().find(is_enough).unwrap_or(WARPS)
}

verdigris_kir::parameters! {
    struct Sum / SumArguments of Spec as spec {
        elements: u32,
        count: u32,
        /// Two to this are the warps that share out the parts of an element.
        sharing: u32,
        parts: Read = 4,
        part_bytes: u64,
        channels: Divide,
        taps: [Divide; 3],
        epilogue: EpilogueArgs = spec.epilogue.over_tensors(),
    }
}

fn sum(k: Kernel<'_>, spec: &Spec) {
    let Sum { elements, count, sharing, parts, part_bytes, channels, taps, epilogue } = Sum::declare(k, spec);

    let (warp, lane) = (k.warp(), k.lane());
    // Warps of the same elements follow each other; the first part of a warp is its number among them.
    let row = warp.shr(sharing);
    let first = warp - row.shl(sharing);
    let rows = k.constant(WARPS).shr(sharing);
    let element = (k.cta() * rows + row) * 32 + lane;
    let is_inside = element.lt(elements);
    let total = k.var(0.0f32);
    k.when(is_inside, || {
        let address = parts.at(element, 4);
        let step = k.constant(1u32).shl(sharing);
        let turns = (count + (step - 1) - first.min(count)).shr(sharing);
        k.range_unrolled(turns, UNROLL, |turn| {
            let part = first + turn.shl(sharing);
            total.set(total + k.ld_global::<f32>(address + part.widen() * part_bytes, 0));
        });
    });
    let shared = k.shared("sums", THREADS * 4, 16).address();
    k.st_shared(shared + k.thread() * 4, 0, total.get());
    k.bar_sync();
    k.when(first.eq(0) & is_inside, || {
        let own = shared + k.thread() * 4;
        let whole = k.var(total);
        k.range_step(k.constant(1u32), k.constant(1u32).shl(sharing), 1, |other| {
            whole.set(whole + k.ld_shared::<f32>(own + other * 128, 0));
        });
        let (rest, channel) = channels.split(element);
        let (rest, w) = taps[2].split(rest);
        let (rest, h) = taps[1].split(rest);
        let (output, d) = taps[0].split(rest);
        let place = epilogue.at_pixel([output, d, h, w], channel);
        place.store(place.apply(whole.get(), 0), 0);
    });
}
