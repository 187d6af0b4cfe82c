//! The second launch of a wgrad whose sum was cut into parts: adds them up in their order, and applies the epilogue.

use serde::{Deserialize, Serialize};
use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::{Address, KernelRef, Launch, Program};

use crate::fuse::element::{Arithmetic, Element, finish};
use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec};
use crate::layout::batch::{BatchIndexArgs, Chunk};
use crate::layout::space::divisor;

/// Threads of a CTA.
const THREADS: u32 = 256;

/// Along what the lanes of a warp stand when they read: the size class of strides.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    /// Along channels.
    ChannelsLast,
    /// Along the width.
    ChannelsFirst,
}

impl Order {
    pub(crate) fn of(problem: &ConvProblem) -> Order {
        let activations = problem.activations();
        let [_, channel, _, _, width] = activations.strides;
        // Lanes along a handful of channels would mostly stand on different pixels anyway, but on neighbouring ones.
        if channel <= width { Order::ChannelsLast } else { Order::ChannelsFirst }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Order::ChannelsLast => "last",
            Order::ChannelsFirst => "first",
        }
    }
}

verdigris_kir::parameters! {
    /// Which tap and which channel a column of a filter gradient is.
    #[derive(Clone, Copy)]
    pub(crate) struct FilterColumns / FilterColumnsArguments of () as _spec {
        pub(crate) channels: Divide,
        pub(crate) taps: [Divide; 3],
    }
}

impl FilterColumnsArguments {
    pub(crate) fn of(p: &ConvProblem) -> FilterColumnsArguments {
        FilterColumnsArguments { channels: divisor(p.c / p.groups), taps: p.filter.map(divisor) }
    }
}

impl<'k> FilterColumns<'k> {
    /// Neighbouring columns are neighbouring channels, or neighbouring taps where the filter has its channels first.
    pub(crate) fn split(&self, order: Order, column: Val<'k, u32>) -> ([Val<'k, u32>; 3], Val<'k, u32>) {
        let [depths, heights, widths] = self.taps;
        match order {
            Order::ChannelsLast => {
                let (rest, channel) = self.channels.split(column);
                let (rest, w) = widths.split(rest);
                let (d, h) = heights.split(rest);
                ([d, h, w], channel)
            }
            Order::ChannelsFirst => {
                let (rest, w) = widths.split(column);
                let (rest, h) = heights.split(rest);
                let (channel, d) = depths.split(rest);
                ([d, h, w], channel)
            }
        }
    }
}

/// Everything that shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) arithmetic: Arithmetic,
    pub(crate) order: Order,
    pub(crate) epilogue: EpilogueSpec,
}

impl Spec {
    pub(crate) fn name(&self) -> String {
        format!("conv_direct_join_{}_{}_{}", self.arithmetic.name(), self.order.name(), self.epilogue.name())
    }

    pub(crate) fn target(&self) -> Target {
        self.epilogue.target()
    }

    pub(crate) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || {
            let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
            build(header, |k| match self.arithmetic {
                Arithmetic::F32 | Arithmetic::Tf32 | Arithmetic::F16 => split_k::<f32>(k, &self),
                Arithmetic::F64 => split_k::<f64>(k, &self),
                Arithmetic::I32 => split_k::<i32>(k, &self),
            })
        })
    }
}

verdigris_kir::parameters! {
    struct SplitKReduction / SplitKReductionArguments of Spec as spec {
        elements: u32,
        rows: u32,
        columns: Divide,
        count: u32,
        parts: Read = if spec.arithmetic == Arithmetic::F64 { 8 } else { 4 },
        part_bytes: u64,
        group_bytes: u64,
        batch: BatchIndexArgs = (),
        first_group: u32,
        columns_of: FilterColumnsArguments = (),
        epilogue: EpilogueArgs = spec.epilogue.over_tensors(),
    }
}

/// Adds the launches for `count` parts, each of which holds all groups.
pub(crate) fn steps(p: &ConvProblem, spec: &Spec, parts: Address, [part_bytes, group_bytes]: [u64; 2], count: u64, program: &mut Program) {
    let extents = p.gemm_extents();
    let elements = extents.m * extents.n;
    let kernel = spec.clone().kernel();
    for chunk in Chunk::all(&[p.groups]) {
        let args = SplitKReductionArguments {
            elements: elements as u32,
            rows: extents.m as u32,
            columns: divisor(extents.n),
            count: count as u32,
            parts,
            part_bytes,
            group_bytes,
            batch: chunk.index(),
            first_group: chunk.first[0] as u32,
            columns_of: FilterColumnsArguments::of(p),
            epilogue: spec.epilogue.conv_arguments(p),
        };
        let [y, z] = chunk.grid();
        let grid = [elements.div_ceil(u64::from(THREADS)) as u32, y, z];
        program.launch(Launch::new(kernel.clone(), grid, args.bound(spec)));
    }
}

fn split_k<'k, S: Element>(k: Kernel<'k>, spec: &Spec) {
    let values = SplitKReduction::declare(k, spec);
    let SplitKReduction { elements, rows, columns, count, parts, part_bytes, group_bytes, batch, first_group, columns_of, epilogue } =
        values;
    let epilogue = epilogue.of::<S::Computed>();

    let [_, _, group] = batch.of_cta();
    let group = group + first_group;
    let element = k.cta() * THREADS + k.thread();
    k.when(element.lt(elements), || {
        let address = k.var(parts.address() + group.widen() * group_bytes + element.mul_wide(S::TY.bytes()));
        let sum = k.var(k.constant(S::ZERO));
        k.range(count, |_| {
            sum.set(sum.get() + k.ld_global::<S>(address, 0));
            address.set(address.get() + part_bytes);
        });
        let (row, column) = columns.split(element);
        let ([d, h, w], channel) = columns_of.split(spec.order, column);
        let place = epilogue.at_pixel([group * rows + row, d, h, w], channel);
        if spec.epilogue.exact {
            place.store_exact(S::to_i32(sum.get()), 0);
        } else {
            place.store(place.apply(finish(k, spec.arithmetic, sum.get()), 0), 0);
        }
    });
}
