//! The second launch of a wgrad whose sum was cut into parts: adds them up in their order, and applies the epilogue.

use serde::{Deserialize, Serialize};
use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, Arg, KernelRef, Launch, Program, Residency, Step};

use super::kernel::{FilterColumns, finish};
use super::{Order, THREADS, divisor, double_word, geometry, word};
use crate::parts::batch::{BatchIndex, Chunk};
use crate::parts::element::{Arithmetic, Element};
use crate::parts::epilogue::EpilogueSpec;

/// Everything that shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) arithmetic: Arithmetic,
    pub(super) order: Order,
    pub(super) epilogue: EpilogueSpec,
}

impl Spec {
    pub(super) fn name(&self) -> String {
        format!("conv_direct_join_{}_{}_{}", self.arithmetic.name(), self.order.name(), self.epilogue.name())
    }

    pub(super) fn target(&self) -> Target {
        self.epilogue.target()
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || {
            let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
            build(header, |k| match self.arithmetic {
                Arithmetic::F32 | Arithmetic::Tf32 | Arithmetic::F16 => join::<f32>(k, &self),
                Arithmetic::F64 => join::<f64>(k, &self),
                Arithmetic::I32 => join::<i32>(k, &self),
            })
        })
    }
}

/// Adds the launches for `count` parts, each of which holds all groups.
pub(super) fn steps(p: &ConvProblem, spec: &Spec, parts: Address, [part_bytes, group_bytes]: [u64; 2], count: u64, program: &mut Program) {
    let extents = p.gemm_extents();
    let elements = extents.m * extents.n;
    let kernel = spec.clone().kernel();
    for chunk in Chunk::all(&[p.groups]) {
        let mut args = vec![word(elements), word(extents.m), divisor(extents.n), word(count)];
        args.extend([Arg::Pointer(parts), double_word(part_bytes), double_word(group_bytes)]);
        args.extend(chunk.args());
        args.push(word(chunk.first[0]));
        args.extend(geometry::column_args(p));
        args.extend(spec.epilogue.conv_args(p));
        let [y, z] = chunk.grid();
        program.steps.push(Step::Launch(Launch {
            kernel: kernel.clone(),
            grid: [elements.div_ceil(u64::from(THREADS)) as u32, y, z],
            residency: Residency::Any,
            overlap: false,
            args: args.into(),
        }));
    }
}

fn join<'k, S: Element>(k: Kernel<'k>, spec: &Spec) {
    let elements = k.scalar::<u32>("elements");
    let rows = k.scalar::<u32>("rows");
    let columns = k.divisor("columns");
    let count = k.scalar::<u32>("parts_count");
    let parts = k.input("parts", S::TY.bytes());
    let [part_bytes, group_bytes] = ["part_bytes", "group_bytes"].map(|name| k.scalar::<u64>(name));
    let batch = BatchIndex::declare(k, &());
    let first_group = k.scalar::<u32>("first_group");
    let columns_of = FilterColumns::declare(k, spec.order);
    let epilogue = spec.epilogue.declare_conv::<S::Computed>(k);

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
        let ([d, h, w], channel) = columns_of.split(column);
        let place = epilogue.at_pixel([group * rows + row, d, h, w], channel);
        if spec.epilogue.exact {
            place.store_exact(S::to_i32(sum.get()), 0);
        } else {
            place.store(place.apply(finish(k, spec.arithmetic, sum.get()), 0), 0);
        }
    });
}
