//! An algorithm that reads lines of channels, and the problems that copies bring into such lines.
//!
//! **What.** A problem that the algorithm takes as it lies stays as it is. Of others, of 16-bit operands, each tensor that does not lie in lines
//! (channels first, a number of channels that is no multiple of 8, any strides) is copied into scratch ahead ([`Repack`]): pixels in lines of
//! channels at multiples of 16 bytes.
//!
//! **Method.** There are several such forms. In one, only the activations are copied, and the algorithm writes the result wherever it lies,
//! where it can. In another, the result leaves through scratch too; and the filter is copied as well where the algorithm takes neither. Each
//! form has the algorithm's configs; the cost model ranks them all.
//!
//! **When it wins.** Where the copies, each of which reads and writes a tensor once, cost less than what an engine without tensor cores
//! takes. Groups of few channels and large halos are bound by memory, so that the copies are a good part of the time, and little beside a
//! gather of single elements.
//!
//! **Numbers.** Copies change none: what is said of the algorithm holds.

use std::rc::Rc;

use verdigris_graph::{ConvProblem, Direction, Problem, Slot, Tensor};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Program};

use super::geometry::lines::lies_in_lines;
use super::geometry::read_pixels::over_read_pixels;
use super::geometry::require_elements;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::Work;
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, slot_count};
use crate::layout::repack::{self, Repack, packed_tensor};

/// The knob that tells which tensors are copied, of problems that the algorithm does not take as they lie.
const COPIES: &str = "copies";
/// Lines of activations, or of a filter's taps, outermost first.
const PIXELS: [usize; 4] = [0, 2, 3, 4];
/// Filters of a tap lie one below the other.
const TAPS: [usize; 4] = [2, 3, 4, 0];
/// The filter among x, w and y.
const FILTER: usize = 1;
/// Elements of a copy stay below this.
const ELEMENT_LIMIT: u128 = 1 << 40;

/// What of a problem is copied; the value of the knob.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Copies {
    /// The algorithm takes the problem as it lies.
    Nothing = 0,
    /// The activations, where they do not lie in lines.
    Activations = 1,
    /// The result as well.
    Result = 2,
    /// And the filter.
    All = 3,
}

/// The copies that bring a problem into lines, and what the algorithm made of it.
struct Form<A> {
    copies: Copies,
    /// From a slot of the caller's to one behind them.
    ahead: Vec<(Slot, Slot, Repack)>,
    /// From a slot behind the caller's to one of these.
    back: Option<(Slot, Slot, Repack)>,
    /// The caller's slots.
    slots: usize,
    inner: A,
}

/// An accepted problem.
pub(super) struct InLines<A> {
    forms: Vec<Rc<Form<A>>>,
}

/// A config of the algorithm, in a form.
pub(super) struct Config<A: Algorithm> {
    form: Rc<Form<A>>,
    inner: A::Config,
}

impl<A: Algorithm> Clone for Config<A> {
    fn clone(&self) -> Self {
        Config { form: self.form.clone(), inner: self.inner.clone() }
    }
}

impl<A: Algorithm> Form<A> {
    /// Nothing where there is nothing to copy.
    fn copied(original: &ConvProblem, copies: Copies, arch: &Arch) -> Option<Result<Form<A>, Refusal>> {
        // A copy brings no more pixels than are read.
        let mut conv = if lies_in_lines(&original.x) { original.clone() } else { over_read_pixels(original) };
        let (mut ahead, mut back) = (Vec::new(), None);
        let first_slot = slot_count(&original.slots());
        let result = original.result().slot;
        let extents = [conv.x_extents(), conv.w_extents(), conv.y_extents()];
        for (number, (tensor, extents)) in [&mut conv.x, &mut conv.w, &mut conv.y].into_iter().zip(extents).enumerate() {
            let (is_filter, is_result) = (number == FILTER, tensor.slot == result);
            let least = if is_result {
                Copies::Result
            } else if is_filter {
                Copies::All
            } else {
                Copies::Activations
            };
            if lies_in_lines(tensor) || copies < least {
                continue;
            }
            let order = if is_filter && !is_result { TAPS } else { PIXELS };
            let (from, to) = (tensor.slot, Slot((first_slot + number) as u32));
            let copy = Repack::of_tensor(tensor, extents, 1, order);
            *tensor = packed_tensor(&Tensor { slot: to, ..tensor.clone() }, extents, 1, order);
            match is_result {
                true => back = Some((to, from, copy.back())),
                false => ahead.push((from, to, copy)),
            }
        }
        if ahead.is_empty() && back.is_none() {
            return None;
        }
        Some(A::accept(&Problem::Conv(conv), arch).map(|inner| Form { copies, ahead, back, slots: first_slot, inner }))
    }

    fn lower(&self, config: &A::Config) -> Result<Program, Refusal> {
        let mut program = self.inner.lower(config)?;
        let steps = program.steps.len();
        for (from, to, copy) in &self.ahead {
            let scratch = program.add_scratch("operand in lines", copy.scratch_bytes());
            program.place_buffer(to.0 as usize, scratch);
            copy.launches(Address::buffer(from.0 as usize), scratch).into_iter().for_each(|launch| program.launch(launch));
        }
        program.steps.rotate_left(steps);
        if let Some((from, to, copy)) = &self.back {
            let scratch = program.add_scratch("result in lines", copy.scratch_bytes());
            program.place_buffer(from.0 as usize, scratch);
            copy.launches(scratch, Address::buffer(to.0 as usize)).into_iter().for_each(|launch| program.launch(launch));
        }
        // What lies behind the caller's slots is scratch now, and nobody binds it.
        program.buffer_alignment_bytes.truncate(self.slots);
        Ok(program)
    }
}

/// What copies ask of a problem.
fn require_copies(id: EngineId, conv: &ConvProblem, arch: &Arch) -> Result<(), Refusal> {
    id.require(arch.runs(Target::Sm90), Reason::Target, format_args!("compute capability {:?}; copies from (9, 0) on", arch.capability))?;
    require_elements(id, conv)?;
    let [(_, a, _), (_, b, _)] = conv.operands();
    id.require(
        [a, b].map(|tensor| tensor.dtype.bytes()) == [2, 2] && matches!(conv.result().dtype.bytes(), 2 | 4),
        Reason::DType,
        format_args!("{} and {} into {}; copies operands of 16 bits and results of 16 and 32", a.dtype, b.dtype, conv.result().dtype),
    )?;
    let size = |extents: [u64; 5]| extents.iter().fold(1u128, |all, &extent| all.saturating_mul(u128::from(extent).next_multiple_of(32)));
    for (name, _, extents) in conv.tensors() {
        id.require(size(extents) < ELEMENT_LIMIT, Reason::Extent, format_args!("{name} of {extents:?}; copies fewer than 2^40 elements"))?;
    }
    Ok(())
}

impl<A: Algorithm> Algorithm for InLines<A> {
    const ID: EngineId = A::ID;
    const VERSION: u32 = A::VERSION;
    type Config = Config<A>;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let refusal = match A::accept(problem, arch) {
            Ok(inner) => {
                let slots = slot_count(&problem.slots());
                let whole = Form { copies: Copies::Nothing, ahead: Vec::new(), back: None, slots, inner };
                return Ok(InLines { forms: vec![Rc::new(whole)] });
            }
            Err(refusal) => refusal,
        };
        let Problem::Conv(conv) = problem else { return Err(refusal) };
        match require_copies(A::ID, conv, arch) {
            Ok(()) => {}
            // The algorithm says itself which types it takes.
            Err(second) if second.reason == refusal.reason => return Err(refusal),
            Err(second) => return Err(refusal.beside(second)),
        }
        let (mut forms, mut refusals): (Vec<Rc<Form<A>>>, _) = (Vec::new(), vec![refusal]);
        for copies in [Copies::Activations, Copies::Result, Copies::All] {
            // Results that lie in lines may leave by wider stores; nothing else is gained where less is copied.
            let is_enough = conv.direction == Direction::Wgrad || copies == Copies::All;
            if is_enough && !forms.is_empty() {
                break;
            }
            match Form::copied(conv, copies, arch) {
                Some(Ok(form)) => forms.push(Rc::new(form)),
                Some(Err(refusal)) => refusals.push(refusal),
                None => {}
            }
        }
        let last = refusals.pop().filter(|_| forms.is_empty());
        // What stands in the way when all is copied is no matter of layout.
        last.map_or(Ok(InLines { forms }), Err)
    }

    fn configs(&self) -> Vec<Config<A>> {
        let of_form = |form: &Rc<Form<A>>| {
            let configs = form.inner.configs().into_iter();
            configs.map(|inner| Config { form: form.clone(), inner }).collect::<Vec<_>>()
        };
        self.forms.iter().flat_map(of_form).collect()
    }

    fn knobs(Config { form, inner }: &Config<A>) -> Knobs {
        let copies = (form.copies != Copies::Nothing).then_some((COPIES, form.copies as u32));
        Knobs::new(A::knobs(inner).iter().chain(copies))
    }

    fn renamed(old: &Knobs) -> Option<Knobs> {
        A::renamed(old)
    }

    fn notes(&self, Config { form, inner }: &Config<A>) -> Notes {
        form.inner.notes(inner)
    }

    fn work(&self, Config { form, inner }: &Config<A>) -> Work {
        let back = form.back.iter().map(|(_, _, copy)| copy.work());
        form.inner.work(inner).beside(form.ahead.iter().map(|(_, _, copy)| copy.work()).chain(back))
    }

    fn lower(&self, Config { form, inner }: &Config<A>) -> Result<Program, Refusal> {
        form.lower(inner)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let copies = repack::catalog_of_images([2], [2, 4]);
        A::catalog(target).into_iter().chain(copies.filter(|_| Target::Sm90 <= target)).collect()
    }
}
