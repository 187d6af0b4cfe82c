//! A convolution in the form that the kernel takes, and the copies that bring it there and back.
//!
//! TMA reads pixels whose channels lie side by side at multiples of 16 bytes, and writes such rows. Activations and filters that lie
//! otherwise (channels first, an odd number of channels, any strides), that pass through a prologue, or whose type the tensor cores do not
//! take as it is, are copied into scratch ahead; results that lie otherwise leave through scratch. What is a copy has a slot of its own in
//! the prepared problem, behind the caller's; [`Prepared::bind`] puts scratch in its place.

use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::problem::Order;
use verdigris_graph::{ConvProblem, Direction, EpilogueStep, Matrix, Slot, Tensor};
use verdigris_kir::program::{Address, Program};
use verdigris_tensor::DType;

use super::ID;
use crate::conv::geometry::lines::{filter_matrix, lies_in_lines, tap_stride};
use crate::cost::Stream;
use crate::engine::{Reason, Refusal, slot_count};
use crate::layout::repack::{Repack, packed_tensor};
use crate::terms::Terms;

/// The order of activations, and of a filter's gradient: images (or filters), then pixels (or taps), of which each is a line of channels.
const PIXELS: [usize; 4] = [0, 2, 3, 4];
/// The order of a gradient whose taps are matrices of their own, each of which has the filters of all groups.
const TAPS: [usize; 4] = [2, 3, 4, 0];

/// How a copy is made.
#[derive(Clone, Debug)]
enum Copy {
    Moved(Repack),
    Terms(Terms),
}

/// The problem and its copies.
#[derive(Clone, Debug)]
pub(super) struct Prepared {
    /// The problem without a prologue, its tensors as the kernel meets them.
    pub(super) conv: ConvProblem,
    /// Terms of each operand: they stand one behind the other, as further images (or taps).
    pub(super) terms: u32,
    /// Whether both operands are of another type than the caller's.
    pub(super) converted: bool,
    /// The caller's slots.
    pub(super) slots: Vec<Slot>,
    /// From a slot of the caller to one behind them.
    copies: Vec<(Slot, Slot, Copy)>,
    /// From a slot behind the caller's to one of these.
    backs: Vec<(Slot, Slot, Repack)>,
}

impl Prepared {
    /// `rows`: results whose rows begin anywhere may leave line by line. `phases`: rows of the product fall into phases.
    pub(super) fn new(conv: &ConvProblem, rows: bool, phases: bool) -> Result<Prepared, Refusal> {
        let inner = ConvProblem { prologue: Vec::new(), ..conv.clone() };
        let mut prepared = Prepared { conv: inner, terms: 1, converted: false, slots: conv.slots(), copies: Vec::new(), backs: Vec::new() };
        for (name, tensor, extents) in conv.tensors() {
            let size = extents.iter().fold(1u128, |all, &extent| all.saturating_mul(u128::from(extent).next_multiple_of(32)));
            ID.require(
                size < 1 << 56,
                Reason::Extent,
                format_args!("{name} of {extents:?} elements of {}; takes below 2^56", tensor.dtype),
            )?;
        }
        prepared.operands(conv, phases)?;
        prepared.results(conv, rows)?;
        Ok(prepared)
    }

    /// A slot behind those in use.
    fn next_slot(&self) -> Slot {
        Slot((slot_count(&self.slots) + self.copies.len() + self.backs.len()) as u32)
    }

    fn operands(&mut self, conv: &ConvProblem, phases: bool) -> Result<(), Refusal> {
        let wgrad = conv.direction == Direction::Wgrad;
        let prologue = !conv.prologue.is_empty();
        let [(_, a, _), (_, b, _)] = conv.operands();
        let converted = match conv.precision {
            Precision::Fp32 if a.dtype == DType::F32 => Some((DType::Bf16, 3)),
            Precision::Fp32 if a.dtype.is_fp8() => Some((DType::Bf16, 1)),
            // The tensor cores read both operands of a filter's gradient across their depth, which they do for 16-bit types alone. Tiles of
            // f32 are transposed in shared memory where their panels are whole.
            Precision::Tf32 if wgrad && !(conv.k / conv.groups).is_multiple_of(32) => Some((DType::Bf16, 2)),
            Precision::Fp8Fast | Precision::Fp8Promoted if wgrad || prologue => Some((DType::Bf16, 1)),
            _ => None,
        };
        ID.require(
            !prologue || conv.precision != Precision::I32,
            Reason::Epilogue,
            format_args!("{} steps on activations of {} and {}; takes them on floats", conv.prologue.len(), a.dtype, b.dtype),
        )?;
        self.terms = converted.map_or(1, |(_, terms)| terms);
        self.converted = converted.is_some();

        // The pixels that are gathered.
        let (tensor, extents) = if conv.direction == Direction::Dgrad { (&conv.y, conv.y_extents()) } else { (&conv.x, conv.x_extents()) };
        let gathered = if converted.is_some() || prologue {
            let (to, terms) = converted.unwrap_or((tensor.dtype, 1));
            self.converted(tensor, to, terms, extents, PIXELS, prologue.then_some(conv))
        } else if lies_in_lines(tensor) {
            tensor.clone()
        } else {
            self.moved(tensor, extents, 1, PIXELS)
        };
        if conv.direction == Direction::Dgrad {
            self.conv.y = gathered
        } else {
            self.conv.x = gathered
        }

        // The other operand: dy as pixels by channels, or the filter as a stack of matrices, one for each tap.
        if wgrad {
            let (dy, extents) = (&conv.y, conv.y_extents());
            self.conv.y = match converted {
                Some((to, terms)) => self.converted(dy, to, terms, extents, PIXELS, None),
                None if lies_in_lines(dy) && dy.pixel_stride(extents).is_some() => dy.clone(),
                None => self.moved(dy, extents, 1, PIXELS),
            };
            return Ok(());
        }
        let (w, extents) = (&conv.w, conv.w_extents());
        let forward = conv.direction == Direction::Fprop;
        // Which dims are the depth and the columns of the product. Copies have the taps of a line behind each other: where channels come first they lie side by side.
        let (depth, column) = if forward { (1, 0) } else { (0, 1) };
        self.conv.w = match converted {
            Some((to, terms)) => self.converted(w, to, terms, extents, [2, 3, 4, 0], None),
            None => {
                let either = matches!(w.dtype, DType::Bf16 | DType::F16);
                let matrix = filter_matrix(w, forward);
                let fits = tap_stride(w, extents).is_some_and(|tap| {
                    let stack = Matrix { batch_strides: vec![tap], ..matrix.clone() };
                    Repack::needed(&stack, extents[column], extents[depth], &[extents[2] * extents[3] * extents[4]], either).is_none()
                });
                // Kernels for phases are made for filters that lie along the columns, where the type allows it.
                let along_columns = matrix.order() == Order::ColumnMajor;
                match fits && (along_columns || !(either && phases && !forward)) {
                    true => w.clone(),
                    false if either && (along_columns || !forward) => self.moved(w, extents, column, [depth, 2, 3, 4]),
                    false => self.moved(w, extents, depth, [column, 2, 3, 4]),
                }
            }
        };
        Ok(())
    }

    fn results(&mut self, conv: &ConvProblem, rows: bool) -> Result<(), Refusal> {
        let (wgrad, extents) = (conv.direction == Direction::Wgrad, conv.result_extents());
        let described =
            |tensor: &Tensor| if wgrad { tap_stride(tensor, extents).is_some() } else { tensor.pixel_stride(extents).is_some() };
        let movable = |tensor: &Tensor| {
            ID.require(
                matches!(tensor.dtype.bytes(), 1 | 2 | 4),
                Reason::Layout,
                format_args!(
                    "a result or operand of {} with strides {:?}; its pixels must have a single one",
                    tensor.dtype, tensor.strides
                ),
            )
        };
        let mut steps = self.conv.epilogue.clone();
        for step in &mut steps {
            match step {
                EpilogueStep::Binary { operand, .. } if !described(operand) => {
                    movable(operand)?;
                    *operand = self.moved(operand, extents, 1, PIXELS);
                }
                EpilogueStep::Store { target } if !described(target) => {
                    movable(target)?;
                    *target = self.back(target, extents, PIXELS);
                }
                _ => {}
            }
        }
        self.conv.epilogue = steps;

        let result = conv.result();
        let whole = |stride: u64| (stride * result.dtype.bytes() as u64).is_multiple_of(16);
        // Groups of whole channel blocks have taps as columns.
        let tap_matrices = wgrad && conv.groups > 1 && !(extents[1] * self.conv.x.dtype.bytes() as u64).is_multiple_of(128);
        let leaves = match result.dtype.bytes() {
            2 | 4 if wgrad => {
                let tap = tap_stride(result, extents);
                let is_stack = !tap_matrices || tap == Some(conv.k * result.strides[0]);
                result.is_channels_last() && whole(result.strides[0]) && whole(extents[1]) && tap.is_some_and(whole) && is_stack
            }
            2 | 4 => result.is_channels_last() && (rows || whole(extents[1]) && result.pixel_stride(extents).is_some_and(whole)),
            _ => true,
        };
        if !(leaves && described(result)) {
            movable(result)?;
            let packed = self.back(result, extents, if tap_matrices { TAPS } else { PIXELS });
            match conv.direction {
                Direction::Fprop => self.conv.y = packed,
                Direction::Dgrad => self.conv.x = packed,
                Direction::Wgrad => self.conv.w = packed,
            }
        }
        // Groups lie side by side in a row.
        let columns = if wgrad { 0 } else { extents[1] / conv.groups };
        ID.require(
            conv.groups == 1 || rows || !matches!(result.dtype.bytes(), 2 | 4) || whole(columns),
            Reason::Alignment,
            format_args!("{} groups of {columns} channels of {}; each must begin at a multiple of 16 bytes", conv.groups, result.dtype),
        )
    }

    fn converted(
        &mut self,
        tensor: &Tensor,
        to: DType,
        terms: u32,
        extents: [u64; 5],
        order: [usize; 4],
        through: Option<&ConvProblem>,
    ) -> Tensor {
        let slot = self.next_slot();
        let copy = Terms::of_tensor(tensor, to, terms, extents, order, through);
        self.copies.push((tensor.slot, slot, Copy::Terms(copy)));
        packed_tensor(&Tensor { slot, dtype: to, ..tensor.clone() }, extents, 1, order)
    }

    fn moved(&mut self, tensor: &Tensor, extents: [u64; 5], along: usize, order: [usize; 4]) -> Tensor {
        let slot = self.next_slot();
        self.copies.push((tensor.slot, slot, Copy::Moved(Repack::of_tensor(tensor, extents, along, order))));
        packed_tensor(&Tensor { slot, ..tensor.clone() }, extents, along, order)
    }

    fn back(&mut self, tensor: &Tensor, extents: [u64; 5], order: [usize; 4]) -> Tensor {
        let slot = self.next_slot();
        self.backs.push((slot, tensor.slot, Repack::of_tensor(tensor, extents, 1, order).back()));
        packed_tensor(&Tensor { slot, ..tensor.clone() }, extents, 1, order)
    }

    /// Where lines of `columns` of a result end: in scratch, at a multiple of 16 bytes.
    pub(super) fn line_end(&self, d: &Matrix, columns: u64) -> u64 {
        if d.slot.0 as usize >= slot_count(&self.slots) { columns.next_multiple_of(16 / d.dtype.bytes() as u64) } else { columns }
    }

    /// What the copies ask.
    pub(super) fn work(&self) -> impl Iterator<Item = Stream> + '_ {
        let ahead = self.copies.iter().map(|(_, _, copy)| match copy {
            Copy::Moved(repack) => repack.work(),
            Copy::Terms(terms) => terms.work(),
        });
        ahead.chain(self.backs.iter().map(|(_, _, back)| back.work()))
    }

    /// Adds the copies ahead to a program. Returns where each slot behind the caller's lies.
    pub(super) fn copy_ahead(&self, program: &mut Program) -> Vec<(Slot, Address)> {
        let mut places = Vec::new();
        for (from, to, copy) in &self.copies {
            let from = Address::buffer(from.0 as usize);
            let (bytes, name) = match copy {
                Copy::Moved(repack) => (repack.scratch_bytes(), "repacked operand"),
                Copy::Terms(terms) => (terms.scratch_bytes(), "terms of an operand"),
            };
            let scratch = program.add_scratch(name, bytes);
            let launches = match copy {
                Copy::Moved(repack) => repack.launches(from, scratch),
                Copy::Terms(terms) => terms.launches(from, scratch),
            };
            launches.into_iter().for_each(|launch| program.launch(launch));
            places.push((*to, scratch));
        }
        for (from, _, back) in &self.backs {
            places.push((*from, program.add_scratch("packed result", back.scratch_bytes())));
        }
        places
    }

    /// Adds the copies behind, and puts scratch in the place of the slots behind the caller's.
    pub(super) fn bind(&self, program: &mut Program, places: &[(Slot, Address)]) {
        for (from, to, back) in &self.backs {
            let launches = back.launches(Address::buffer(from.0 as usize), Address::buffer(to.0 as usize));
            launches.into_iter().for_each(|launch| program.launch(launch));
        }
        for (slot, place) in places {
            program.place_buffer(slot.0 as usize, *place);
        }
    }
}
