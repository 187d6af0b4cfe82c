//! Adding up: a filter's gradient of operands in two terms each, formed as one of twice the filters and twice the channels.
//!
//! **What.** `dw[k, t, c] = (a₁ · b₀ + a₀ · b₁) + a₀ · b₀` of the terms of dy and of x, and what follows. The product of the smaller ones is left out: it is below
//! the rounding, and an infinity, which is a smaller term, would meet another there.
//! **Cost.** Three quarters of the products are read, and the result is written.

use std::fmt;

use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::{Address, KernelRef, Launch};
use verdigris_tensor::DType;

use crate::cost::{Stream, Traffic};
use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec, OperandSpec};

/// Threads of a CTA, each with an element.
const THREADS: u32 = 256;

/// The kernels of plain problems.
pub(crate) fn catalog() -> impl Iterator<Item = KernelRef> {
    [Spec { epilogue: EpilogueSpec::plain(OperandSpec::strided(DType::F32)) }.kernel()].into_iter()
}

/// Everything that shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Spec {
    epilogue: EpilogueSpec,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "conv_terms_sum_{}", self.epilogue.name())
    }
}

impl Spec {
    fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header =
            Header { name: self.to_string(), target: self.epilogue.target().max(Target::Sm90), threads: THREADS, ..Header::default() };
        build(header, |k| sum(k, self))
    }
}

/// The products of terms of a problem.
#[derive(Clone, Debug)]
pub(crate) struct TermSum {
    problem: ConvProblem,
    spec: Spec,
}

impl TermSum {
    /// For the result and the epilogue of `p`.
    pub(crate) fn new(p: &ConvProblem) -> TermSum {
        // The plain ones make a catalog, which one class of strides keeps short; a user's chain is compiled for its own.
        let epilogue = EpilogueSpec { pairs: false, ..EpilogueSpec::of_conv(p) };
        let epilogue = if epilogue.is_plain() { epilogue.strided() } else { epilogue };
        TermSum { problem: p.clone(), spec: Spec { epilogue } }
    }

    fn elements(&self) -> u64 {
        self.problem.w_extents().iter().fold(1, |all: u64, &extent| all.saturating_mul(extent))
    }

    /// What it asks.
    pub(crate) fn work(&self) -> Stream {
        Stream::new(Traffic::Reduced, 16.0 * self.elements() as f64)
    }

    /// The launch that adds up products with these strides, over k, c and taps, of which those of larger terms lie so many elements behind those of
    /// smaller ones: of dy, and of x.
    pub(crate) fn launch(&self, products: Address, strides: [u64; 5], apart: [u64; 2]) -> Launch {
        let [_, c, d, h, w] = self.problem.w_extents();
        let [of_k, of_c, of_d, of_h, of_w] = strides;
        let args = ValuesArgs {
            products,
            elements: self.elements() as u32,
            extents: [c, w, h, d].map(|extent| extent as u32),
            strides: [of_k, of_d, of_h, of_w, of_c].map(|stride| stride as u32),
            apart: apart.map(|apart| apart as u32),
            epilogue: self.spec.epilogue.conv_arguments(&self.problem),
        };
        let grid = [self.elements().div_ceil(u64::from(THREADS)) as u32, 1, 1];
        Launch::new(self.spec.clone().kernel(), grid, args.bound(&self.spec)).overlapping()
    }
}

verdigris_kir::parameters! {
    /// What the kernel reads, and its epilogue.
    struct Values / ValuesArgs of Spec as spec {
        products: Read = 4,
        elements: u32,
        /// Of c, width, height and depth.
        extents: [Divide; 4],
        /// Elements of the products from one k, tap along depth, height and width, and c to the next.
        strides: [u32; 5],
        /// From a smaller term's to a larger one's.
        apart: [u32; 2],
        epilogue: EpilogueArgs = spec.epilogue.over_tensors(),
    }
}

fn sum(k: Kernel<'_>, spec: &Spec) {
    let Values { products, elements, extents, strides, apart, epilogue } = Values::declare(k, spec);
    let [channels, widths, heights, depths] = extents;
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();
    let element = k.cta() * THREADS + k.thread();
    k.when(element.lt(elements), || {
        let (rest, c) = channels.split(element);
        let (rest, w) = widths.split(rest);
        let (rest, h) = heights.split(rest);
        let (first, d) = depths.split(rest);
        let offset = [first, d, h, w, c].into_iter().zip(strides).fold(k.constant(0u32), |offset, (index, stride)| offset + index * stride);
        let [of_y, of_x] = apart;
        let [smaller_y, smaller_x, larger] =
            [of_x, of_y, of_x + of_y].map(|further| k.ld_global::<f32>(products.at(offset + further, 4), 0));
        let place = epilogue.at_pixel([first, d, h, w], c);
        place.store(place.apply(smaller_y + smaller_x + larger, 0), 0);
    });
}
