//! The second launch of a wgrad: adds up the parts of its sums in their order, and applies the epilogue.
//!
//! A CTA takes 32 neighbouring elements. Its warps take parts in turn, lanes are elements; what the warps have is added up in shared memory.

use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::ir::KernelBody;
use verdigris_kir::program::{Address, Arg, KernelRef, Launch, Residency};

use super::THREADS;
use crate::conv::direct::{divisor, double_word, word};
use crate::parts::epilogue::EpilogueSpec;

const WARPS: u32 = THREADS / 32;
/// Parts that are on their way to a warp at a time.
const UNROLL: u32 = 4;

/// What shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(in crate::conv) struct Spec {
    pub(in crate::conv) epilogue: EpilogueSpec,
}

impl Spec {
    pub(super) fn name(&self) -> String {
        format!("conv_grouped_sum_{}", self.epilogue.name())
    }

    pub(in crate::conv) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.epilogue.target(), threads: THREADS, ..Header::default() };
        build(header, |k| sum(k, self))
    }

    /// The launch for `count` parts of `part_bytes` bytes each.
    pub(in crate::conv) fn launch(&self, p: &ConvProblem, parts: Address, count: u64, part_bytes: u64) -> Launch {
        let extents = p.gemm_extents();
        let elements = p.k * extents.n;
        let mut args = vec![word(elements), word(count), Arg::Pointer(parts), double_word(part_bytes)];
        args.push(divisor(p.c / p.groups));
        args.extend(p.filter.map(divisor));
        args.extend(self.epilogue.conv_args(p));
        let grid = [elements.div_ceil(32) as u32, 1, 1];
        Launch { kernel: self.clone().kernel(), grid, residency: Residency::Any, overlap: false, args }
    }
}

fn sum(k: Kernel<'_>, spec: &Spec) {
    let [elements, count] = ["elements", "parts_count"].map(|name| k.scalar::<u32>(name));
    let parts = k.input("parts", 4);
    let part_bytes = k.scalar::<u64>("part_bytes");
    let channels = k.divisor("channels");
    let taps = ["depth_taps", "height_taps", "width_taps"].map(|name| k.divisor(name));
    let epilogue = spec.epilogue.declare_conv::<f32>(k);

    let (warp, lane) = (k.warp(), k.lane());
    let element = k.cta() * 32 + lane;
    let is_inside = element.lt(elements);
    let total = k.var(0.0f32);
    k.when(is_inside, || {
        let address = parts.at(element, 4);
        let turns = (count + (WARPS - 1) - warp) >> WARPS.ilog2();
        k.range_unrolled(turns, UNROLL, |turn| {
            let part = warp + turn * WARPS;
            total.set(total + k.ld_global::<f32>(address + part.widen() * part_bytes, 0));
        });
    });
    let shared = k.shared("sums", THREADS * 4, 16).address();
    k.st_shared(shared + k.thread() * 4, 0, total.get());
    k.bar_sync();
    k.when(warp.eq(0) & is_inside, || {
        let first = k.ld_shared::<f32>(shared + lane * 4, 0);
        let whole = (1..WARPS).fold(first, |whole, warp| whole + k.ld_shared::<f32>(shared + lane * 4, i64::from(warp * 128)));
        let (rest, channel) = channels.split(element);
        let (rest, w) = taps[2].split(rest);
        let (rest, h) = taps[1].split(rest);
        let (output, d) = taps[0].split(rest);
        let place = epilogue.at_pixel([output, d, h, w], channel);
        place.store(place.apply(whole, 0), 0);
    });
}
