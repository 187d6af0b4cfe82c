//! wgrad of f32 operands under the policy `tf32`: the terms of an operand stand beside each other as further channels.
//!
//! **Method.** Of `x = x₀ + x₁` and `dy = dy₀ + dy₁` in bf16 ([`crate::terms`]), a gradient of twice the filters and twice the channels has the products of all terms
//! by each other. [`Filter`] forms it, out of boxes that are loaded once for all of them and for all taps; its rows are 64 filters, which a few leave idle anyway. A
//! third launch adds three of the four up ([`crate::split_k::filter::terms`]).
//!
//! **When it wins.** From few filters on, where `conv.implicit_gemm` loads x for each tap and each product of terms again.
//!
//! **Numbers.** Those of [`Filter`]. Two terms are short of f32 by 2⁻¹⁶, where tf32 is by 2⁻¹¹.

use verdigris_graph::{ConvProblem, Direction, Precision, Problem, Slot, Tensor};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Program};
use verdigris_tensor::DType;

use super::ID;
use super::filter::{Config, Filter};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::conv::geometry::require_elements;
use crate::cost::Work;
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, slot_count};
use crate::split_k::filter::terms::{self as term_sum, TermSum};
use crate::split_k::reduction;
use crate::terms::{self, Terms};

/// Terms of an operand.
const TERMS: u32 = 2;
/// The order of a copy: images, then pixels, of which each is a line of channels.
const PIXELS: [usize; 4] = [0, 2, 3, 4];
/// Elements of a copy, and of the products, stay below these.
const COPY_LIMIT: u128 = 1 << 40;
const PRODUCTS_LIMIT: u64 = 1 << 30;

/// An accepted problem.
pub(in crate::conv) struct FilterOfTerms {
    /// Of the terms.
    inner: Filter,
    /// From a slot of the caller's to one behind them: of x, and of dy.
    copies: [(Slot, Slot, Terms); 2],
    /// The products.
    products: Tensor,
    /// From a term's products to another's: of dy, and of x.
    apart: [u64; 2],
    sum: TermSum,
    /// The caller's slots.
    slots: usize,
}

impl Algorithm for FilterOfTerms {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Conv(p) = problem else {
            return Err(ID.refusal(Reason::Problem, "takes convolutions"));
        };
        ID.require(p.direction == Direction::Wgrad, Reason::Direction, format_args!("{:?}; takes wgrad", p.direction))?;
        let types = p.operands().map(|(_, operand, _)| operand.dtype);
        // Of any other the other algorithms say why not.
        ID.require(
            types == [DType::F32; 2] && p.precision == Precision::Tf32,
            Reason::Problem,
            format_args!("{:?} of {} and {}; takes tf32 of f32", p.precision, types[0], types[1]),
        )?;
        ID.require(
            p.prologue.is_empty(),
            Reason::Epilogue,
            format_args!("{} steps on the activations; takes them as they are stored", p.prologue.len()),
        )?;
        ID.require(p.groups == 1, Reason::Extent, format_args!("{} groups of f32; takes one", p.groups))?;
        require_elements(ID, p)?;
        ID.require(
            p.c.is_multiple_of(8) && p.k.is_multiple_of(8),
            Reason::Alignment,
            format_args!("{} and {} channels; takes multiples of 8", p.c, p.k),
        )?;
        let elements = |extents: [u64; 5]| extents.iter().fold(u128::from(TERMS), |all, &extent| all.saturating_mul(u128::from(extent)));
        let (of_x, of_w, of_y) = (elements(p.x_extents()), elements(p.w_extents()) * u128::from(TERMS), elements(p.y_extents()));
        ID.require(
            of_x.max(of_y) < COPY_LIMIT && of_w < u128::from(PRODUCTS_LIMIT),
            Reason::Extent,
            format_args!("{of_x} and {of_y} elements of terms, {of_w} of their products; takes below 2^40 and 2^30"),
        )?;

        let slots = slot_count(&p.slots());
        let [x, y, w] = [0, 1, 2].map(|number| Slot((slots + number) as u32));
        let wide = |extents: [u64; 5], dims: &[usize]| {
            let mut extents = extents;
            dims.iter().for_each(|&dim| extents[dim] *= u64::from(TERMS));
            extents
        };
        let copy = |tensor: &Tensor, extents| Terms::side_by_side(tensor, DType::Bf16, TERMS, extents, PIXELS);
        let [(x_copy, x_terms), (y_copy, y_terms)] = [copy(&p.x, p.x_extents()), copy(&p.y, p.y_extents())];
        let products = Tensor::channels_last(w, DType::F32, wide(p.w_extents(), &[0, 1]));
        let of_terms = ConvProblem {
            c: u64::from(TERMS) * p.c,
            k: u64::from(TERMS) * p.k,
            precision: Precision::Fp32,
            x: Tensor { slot: x, ..x_terms },
            y: Tensor { slot: y, ..y_terms },
            w: products.clone(),
            epilogue: Vec::new(),
            ..p.clone()
        };
        let inner = Filter::accept(&Problem::Conv(of_terms), arch)?;
        let accepted = FilterOfTerms {
            inner,
            copies: [(p.x.slot, x, x_copy), (p.y.slot, y, y_copy)],
            apart: [p.k * products.strides[0], p.c],
            products,
            sum: TermSum::new(p),
            slots,
        };
        ID.require(!accepted.configs().is_empty(), Reason::SharedMemory, "no tile whose parts a launch adds up suits the terms")?;
        Ok(accepted)
    }

    /// Those whose parts a launch adds up: there are no kernels that store results of f32 themselves.
    fn configs(&self) -> Vec<Config> {
        self.inner.configs().into_iter().filter(Config::adds_later).collect()
    }

    fn knobs(config: &Config) -> Knobs {
        Knobs::new(Filter::knobs(config).iter().chain([("terms", TERMS)]))
    }

    fn notes(&self, config: &Config) -> Notes {
        Notes { split_operands: true, ..self.inner.notes(config) }
    }

    fn work(&self, config: &Config) -> Work {
        self.inner.work(config).beside(self.copies.iter().map(|(_, _, copy)| copy.work())).beside([self.sum.work()])
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let mut program = self.inner.lower(config)?;
        let steps = program.steps.len();
        for (from, to, copy) in &self.copies {
            let scratch = program.add_scratch("terms of an operand", copy.scratch_bytes());
            program.place_buffer(to.0 as usize, scratch);
            copy.launches(Address::buffer(from.0 as usize), scratch).into_iter().for_each(|launch| program.launch(launch));
        }
        program.steps.rotate_left(steps);
        let Tensor { slot, strides, .. } = self.products;
        let bytes = 4 * u64::from(TERMS) * self.apart[0];
        let scratch = program.add_scratch("products of terms", bytes);
        program.place_buffer(slot.0 as usize, scratch);
        // The larger term lies behind the smaller one.
        debug_assert_eq!([terms::place(0, TERMS), terms::place(1, TERMS)], [1, 0]);
        program.launch(self.sum.launch(scratch, strides, self.apart));
        // What lies behind the caller's slots is scratch now, and nobody binds it.
        program.buffer_alignment_bytes.truncate(self.slots);
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        if target != Target::Sm90a {
            return Vec::new();
        }
        let copies = terms::catalog().filter(|kernel| kernel.name().contains("f32_bf16x2"));
        let adds = reduction::catalog(DType::F32, false).filter(|kernel| kernel.name().ends_with("_f32_x2"));
        Filter::catalog(target).into_iter().chain(adds).chain(copies).chain(term_sum::catalog()).collect()
    }
}
