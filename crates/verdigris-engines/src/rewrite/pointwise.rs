//! `conv.pointwise`: a convolution with a filter of one element, taken as the product that it is.
//!
//! **What.** Filters of one element, stride 1, no padding, in all three directions; tensors whose pixels have a single stride. The product goes
//! to the first engine for products that takes it: what is said of that engine holds here, and so do its knobs.
//! Of tensors with their channels first the pixels have a single stride within an image alone: their filter's gradient is a product whose depth runs
//! over images as planes ([`gemm::of_planes`]), for which nothing is transposed ahead.
//!
//! | direction | A | B | D |
//! |---|---|---|---|
//! | fprop | x: pixels by channels | w: channels of x by those of y | y |
//! | dgrad | y: pixels by channels | w: channels of y by those of x | x |
//! | wgrad | y: channels by pixels | x: pixels by channels | w |
//!
//! Groups are a batch. Sums over channels are formed of the stored result.

use verdigris_graph::{ConvProblem, Direction, GemmProblem, HostScalar, Matrix, Problem, Tensor};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Program};

use crate::arch::Arch;
use crate::conv::geometry::matrices::{of_images, over_matrices};
use crate::cost::{self, Work};
use crate::engine::{Candidate, Cost, Engine, EngineId, KnobSpace, Knobs, Notes, Reason, Refusal, slot_count};
use crate::gemm::{self, Planes};
use crate::sums::statistics;

/// The engine. It hands on what the products say of their configs, old names and all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pointwise;

const ID: EngineId = EngineId { name: "conv.pointwise", number: 204 };

impl Engine for Pointwise {
    fn id(&self) -> EngineId {
        ID
    }

    fn version(&self) -> u32 {
        // Its configs are those of the products, and as fast as they are.
        gemm::ENGINES.iter().map(|engine| engine.version()).sum()
    }

    fn accept(&self, problem: &Problem, arch: &Arch) -> Result<Box<dyn Candidate>, Refusal> {
        let Problem::Conv(conv) = problem else {
            return Err(ID.refusal(Reason::Problem, format_args!("a {}; takes convolutions", problem.kind())));
        };
        let (product, planes) = product(conv)?;
        statistics::require(ID, conv)?;
        let of = |product| -> Box<dyn Candidate> { Box::new(Product { product, conv: conv.clone(), arch: arch.clone() }) };
        if let Some(planes) = planes {
            return gemm::of_planes(&product, planes, arch).map(of).map_err(|refusal| ID.refusal(refusal.reason, refusal));
        }
        let product = Problem::Gemm(product);
        let mut refusals = Vec::new();
        for engine in gemm::ENGINES {
            match engine.accept(&product, arch) {
                Ok(product) => return Ok(of(product)),
                Err(refusal) => refusals.push(refusal),
            }
        }
        let reason = refusals.last().map_or(Reason::Problem, |refusal| refusal.reason);
        let said: Vec<String> = refusals.iter().map(Refusal::to_string).collect();
        Err(ID.refusal(reason, said.join("; ")))
    }

    fn catalog(&self, target: Target) -> Vec<KernelRef> {
        // Its other kernels are those of the products.
        if target == Target::Sm90a { gemm::over_planes().collect() } else { Vec::new() }
    }
}

/// The candidate for the product, and the convolution, whose sums over channels are formed of what the product stored.
struct Product {
    product: Box<dyn Candidate>,
    conv: ConvProblem,
    arch: Arch,
}

impl Candidate for Product {
    fn knobs(&self) -> &KnobSpace {
        self.product.knobs()
    }

    fn best(&self) -> Knobs {
        self.product.best()
    }

    fn today(&self, knobs: &Knobs) -> Option<Knobs> {
        self.product.today(knobs)
    }

    fn notes(&self, knobs: &Knobs) -> Result<Notes, Refusal> {
        self.product.notes(knobs)
    }

    fn work(&self, knobs: &Knobs) -> Result<Work, Refusal> {
        Ok(self.product.work(knobs)?.beside(statistics::work(&self.conv)))
    }

    fn cost(&self, knobs: &Knobs) -> Result<Cost, Refusal> {
        Ok(cost::estimate_one(&self.work(knobs)?, &self.arch))
    }

    fn program(&self, knobs: &Knobs) -> Result<Program, Refusal> {
        let mut program = self.product.program(knobs)?;
        if let Some(sums) = &self.conv.statistics {
            program.buffer_alignment_bytes.resize(slot_count(&self.conv.slots()), 1);
            statistics::steps(&self.conv, sums, &mut program);
        }
        Ok(program)
    }
}

/// The product, with the slots of the convolution; with planes, that of one of them.
fn product(conv: &ConvProblem) -> Result<(GemmProblem, Option<Planes>), Refusal> {
    ID.require(
        conv.filter == [1; 3] && conv.strides == [1; 3] && conv.input == conv.output && conv.pads_before == [0; 3],
        Reason::Extent,
        format_args!(
            "filter {:?}, strides {:?}, padding {:?}; takes a filter of one element, stride 1 and no padding",
            conv.filter, conv.strides, conv.pads_before
        ),
    )?;
    ID.require(
        conv.prologue.is_empty(),
        Reason::Epilogue,
        format_args!("{} steps on the activations; takes them as they are stored", conv.prologue.len()),
    )?;
    let groups = conv.groups.max(1);
    let batch = if groups > 1 { vec![groups] } else { vec![] };
    let has_planes = conv.direction == Direction::Wgrad
        && [(&conv.x, conv.x_extents()), (&conv.y, conv.y_extents())]
            .iter()
            .any(|(tensor, extents)| tensor.pixel_stride(*extents).is_none());
    // Pixels by the channels of one group, of all images or of one.
    let pixels = |tensor: &Tensor, extents: [u64; 5]| {
        let matrix = if has_planes { of_images(tensor, extents) } else { tensor.as_matrix(extents) };
        let matrix = matrix.ok_or_else(|| {
            ID.refusal(Reason::Layout, format_args!("a tensor with strides {:?}; its pixels must have a single one", tensor.strides))
        })?;
        let batch_strides = if groups > 1 { vec![extents[1] / groups * matrix.column_stride] } else { vec![] };
        Ok(Matrix { batch_strides, ..matrix })
    };
    // Channels of y by those of x.
    let filter = |tensor: &Tensor| {
        let [row_stride, column_stride, ..] = tensor.strides;
        let batch_strides = if groups > 1 { vec![conv.k / groups * row_stride] } else { vec![] };
        Matrix { slot: tensor.slot, dtype: tensor.dtype, row_stride, column_stride, batch_strides }
    };
    let place = |tensor: &Tensor| {
        if conv.direction == Direction::Wgrad { Ok(filter(tensor)) } else { pixels(tensor, conv.result_extents()) }
    };
    let (x, y) = (|| pixels(&conv.x, conv.x_extents()), || pixels(&conv.y, conv.y_extents()));
    let (a, b) = match conv.direction {
        Direction::Fprop => (x()?, filter(&conv.w).transposed()),
        Direction::Dgrad => (y()?, filter(&conv.w)),
        Direction::Wgrad => (y()?.transposed(), x()?),
    };
    let epilogue = over_matrices(&conv.epilogue, place)?;
    let extents = conv.gemm_extents();
    let planes = has_planes.then(|| Planes { count: conv.n, apart: [conv.y.strides[0], conv.x.strides[0]] });
    let product = GemmProblem {
        batch,
        m: extents.m,
        n: extents.n,
        k: if has_planes { extents.k / conv.n.max(1) } else { extents.k },
        precision: conv.precision,
        determinism: conv.determinism,
        a,
        b,
        c: None,
        scale_a: None,
        scale_b: None,
        alpha: HostScalar::ONE,
        beta: HostScalar::ZERO,
        epilogue,
        d: place(conv.result())?,
    }
    .canonical();
    product.map(|product| (product, planes)).map_err(|error| ID.refusal(Reason::Layout, error))
}
