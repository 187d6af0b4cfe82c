//! Convolution in its three directions, with a prologue and an epilogue.
//!
//! With `j[i] = p[i] · stride[i] + t'[i] · dilation[i] − pad_before[i]` in each of three spatial dims, and `t' = t` (cross-correlation), or
//! `t' = filter − 1 − t` where `flip` is set (convolution), `x`, `w` and `y` are tied by products `(p, t)` for which `j` lies inside of `x`.
//! With `g` the group, `c` and `k` counted inside of it:
//!
//! ```text
//! fprop:  v[n, g·K/G + k, p] = Σ over c, t     of x[n, g·C/G + c, j] · w[g·K/G + k, c, t]
//! dgrad:  v[n, g·C/G + c, j] = Σ over k, (p,t) of y[n, g·K/G + k, p] · w[g·K/G + k, c, t]
//! wgrad:  v[g·K/G + k, c, t] = Σ over n, p     of y[n, g·K/G + k, p] · x[n, g·C/G + c, j]
//!
//! for step in epilogue: v = step(v)
//! result = v rounded to the result's type (to nearest even; saturating in fp8 and integers)
//! ```
//!
//! What is summed over may be empty, which gives 0. Sums are formed as `precision` says, the rest in `precision.epilogue()`. With
//! [`Precision::I32`] and no epilogue step, an i32 result is the exact sum, wrapped to 32 bits; otherwise the sum is converted to f32 first.
//!
//! **Prologue.** The activations that are read (x in fprop and wgrad, y in dgrad) pass through the steps of the prologue first, in
//! `precision.epilogue()`, and are then rounded to their stored type. Padding is zero *behind* the prologue: it does not pass through it.
//!
//! **Statistics.** Sum and sum of squares of the result over all but its channels, of the values as they are stored.
//!
//! **Spatial dims** are always three. A convolution of fewer has leading ones of extent 1. The rank that a graph spoke of is not kept: dims
//! in which input, filter and output all have extent 1 and nothing is padded are moved to the front, so that equal work has one form.
//!
//! Slots are numbered in the order: x, w or y as the direction reads them (x w, y w, y x), prologue, epilogue, result, sum, sum of squares.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::{Access, Channels, Determinism, EpilogueStep, GemmProblem, Matrix, Operand, Slot, Tensor, check_step};
use crate::error::Error;
use crate::op::HostScalar;
use crate::ops::conv::ConvDirection as Direction;
use crate::ops::matmul::Precision;

/// Sums over all elements of a channel of the result, as it is stored: what a batch norm needs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// `Σ v`, written; of the type of the epilogue.
    pub sum: Channels,
    /// `Σ v²`, written; of the type of the epilogue.
    pub sum_of_squares: Channels,
}

/// A convolution; the module's head has the formula.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvProblem {
    /// Which of `x`, `w` and `y` is computed from the other two.
    pub direction: Direction,
    /// Images.
    pub n: u64,
    /// Channels of x, over all groups.
    pub c: u64,
    /// Channels of y, over all groups.
    pub k: u64,
    /// Groups; they divide `c` and `k`.
    pub groups: u64,
    /// Depth, height and width of x.
    pub input: [u64; 3],
    /// Those of the filter.
    pub filter: [u64; 3],
    /// Those of y.
    pub output: [u64; 3],
    /// Zeros before the first element of x.
    pub pads_before: [u64; 3],
    /// Zeros behind its last one. Canonical: no more than the output reads.
    pub pads_after: [u64; 3],
    /// Steps of the filter over x.
    pub strides: [u64; 3],
    /// Steps between the filter's elements.
    pub dilations: [u64; 3],
    /// Whether the filter is applied from its last element to its first (convolution) rather than cross-correlated.
    pub flip: bool,
    /// How products are formed and summed.
    pub precision: Precision,
    /// Whether two executions must agree bit for bit.
    pub determinism: Determinism,
    /// `[n, c, input]`, or its gradient.
    pub x: Tensor,
    /// `[k, c / groups, filter]`, or its gradient.
    pub w: Tensor,
    /// `[n, k, output]`, or its gradient.
    pub y: Tensor,
    /// Steps on the activations that are read, in order; none of them stores.
    pub prologue: Vec<EpilogueStep<Channels>>,
    /// Steps between the sum and the result, in order; their operands have the result's dims.
    pub epilogue: Vec<EpilogueStep<Tensor>>,
    /// Sums over the result's channels.
    pub statistics: Option<Statistics>,
}

/// The product that a convolution is: `m × k` times `k × n` for each group. Of a strided dgrad it is the product without the taps that
/// meet no output counted out, so [`ConvProblem::flops`] may be less than `2·m·n·k·groups`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GemmExtents {
    /// Pixels of the result; of wgrad, output channels of a group.
    pub m: u64,
    /// Channels of a group of the result; of wgrad, filter elements and input channels of a group.
    pub n: u64,
    /// What is summed over.
    pub k: u64,
    /// One product for each.
    pub groups: u64,
}

/// What a convolution is short of its operands: the plain numbers of one over packed tensors with channels last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConvExtents {
    /// Which tensor is computed.
    pub direction: Direction,
    /// Images.
    pub n: u64,
    /// Input channels.
    pub c: u64,
    /// Output channels.
    pub k: u64,
    /// Groups.
    pub groups: u64,
    /// Depth, height and width of x.
    pub input: [u64; 3],
    /// Of the filter.
    pub filter: [u64; 3],
    /// Zeros on both sides.
    pub pads: [u64; 3],
    /// Steps over x.
    pub strides: [u64; 3],
    /// Steps between filter elements.
    pub dilations: [u64; 3],
}

/// Images, channels and groups are below this.
const EXTENT_LIMIT: u64 = 1 << 31;
/// Padded inputs, dilated filters, strides and dilations are below this, so that kernels have signed 32-bit coordinates with room to spare.
const SPATIAL_LIMIT: u64 = 1 << 29;

/// Elements of images are numbered channel by channel, rows of a product are pixels: kernels reach no number by one stride for each.
const NO_RANDOM: &str = "the steps around a convolution draw no random numbers";

/// Filters of a channel up to which a depthwise convolution of one element is no product.
const MOST_FILTERS_OF_CHANNEL: u64 = 8;

impl ConvProblem {
    /// A convolution of packed tensors with channels last, without prologue and epilogue: the operands in slots 0 and 1, the result in
    /// slot 2. A start for the variations.
    ///
    /// # Errors
    /// Types that no precision policy takes, extents that do not fit each other.
    pub fn packed(extents: ConvExtents, operands: DType, result: DType) -> Result<ConvProblem, Error> {
        let precision = Precision::usual(operands, operands).ok_or_else(|| Error::DType {
            op: "conv".to_owned(),
            tensor: "x".to_owned(),
            got: operands,
            rule: "a convolution multiplies f64, f32, f16, bf16, e4m3, e5m2, i8 or u8",
        })?;
        let ConvExtents { direction, n, c, k, groups, input, filter, pads, strides, dilations } = extents;
        let mut output = [0; 3];
        for dim in 0..3 {
            output[dim] = output_extent(input[dim], filter[dim], pads[dim], pads[dim], strides[dim], dilations[dim]).unwrap_or(0);
        }
        let slots = match direction {
            Direction::Fprop => [0, 1, 2],
            Direction::Dgrad => [2, 1, 0],
            Direction::Wgrad => [1, 2, 0],
        };
        let place = |role: usize, written: bool, [a, b]: [u64; 2], [d, h, w]: [u64; 3]| {
            Tensor::channels_last(Slot(slots[role]), if written { result } else { operands }, [a, b, d, h, w])
        };
        ConvProblem {
            direction,
            n,
            c,
            k,
            groups,
            input,
            filter,
            output,
            pads_before: pads,
            pads_after: pads,
            strides,
            dilations,
            flip: false,
            precision,
            determinism: Determinism::Any,
            x: place(0, direction == Direction::Dgrad, [n, c], input),
            w: place(1, direction == Direction::Wgrad, [k, c / groups.max(1)], filter),
            y: place(2, direction == Direction::Fprop, [n, k], output),
            prologue: Vec::new(),
            epilogue: Vec::new(),
            statistics: None,
        }
        .canonical()
    }

    /// Dims of x.
    pub fn x_extents(&self) -> [u64; 5] {
        let [d, h, w] = self.input;
        [self.n, self.c, d, h, w]
    }

    /// Dims of w.
    pub fn w_extents(&self) -> [u64; 5] {
        let [d, h, w] = self.filter;
        [self.k, self.c / self.groups.max(1), d, h, w]
    }

    /// Dims of y.
    pub fn y_extents(&self) -> [u64; 5] {
        let [d, h, w] = self.output;
        [self.n, self.k, d, h, w]
    }

    /// The activations that are read, through the prologue: x in fprop and wgrad, y in dgrad.
    pub fn activations(&self) -> &Tensor {
        if self.direction == Direction::Dgrad { &self.y } else { &self.x }
    }

    /// Channels of [`ConvProblem::activations`].
    pub fn activation_channels(&self) -> u64 {
        if self.direction == Direction::Dgrad { self.k } else { self.c }
    }

    /// What is computed.
    pub fn result(&self) -> &Tensor {
        match self.direction {
            Direction::Fprop => &self.y,
            Direction::Dgrad => &self.x,
            Direction::Wgrad => &self.w,
        }
    }

    /// Dims of the result, and of the operands of the epilogue.
    pub fn result_extents(&self) -> [u64; 5] {
        match self.direction {
            Direction::Fprop => self.y_extents(),
            Direction::Dgrad => self.x_extents(),
            Direction::Wgrad => self.w_extents(),
        }
    }

    /// The two tensors that are multiplied, with name and dims, in the order of slots.
    pub fn operands(&self) -> [(&'static str, &Tensor, [u64; 5]); 2] {
        let (x, w, y) = (("x", &self.x, self.x_extents()), ("w", &self.w, self.w_extents()), ("y", &self.y, self.y_extents()));
        match self.direction {
            Direction::Fprop => [x, w],
            Direction::Dgrad => [y, w],
            Direction::Wgrad => [y, x],
        }
    }

    /// Every five-dimensional tensor that is read or written, with name and dims, in the order of slots: the operands, those of the epilogue,
    /// the result.
    pub fn tensors(&self) -> Vec<(&'static str, &Tensor, [u64; 5])> {
        let mut list = self.operands().to_vec();
        let extents = self.result_extents();
        list.extend(self.epilogue.iter().filter_map(|step| match step {
            EpilogueStep::Binary { operand, .. } => Some(("epilogue operand", operand, extents)),
            EpilogueStep::Store { target } => Some(("auxiliary output", target, extents)),
            _ => None,
        }));
        list.push(("result", self.result(), extents));
        list
    }

    /// The tensors written: the auxiliary outputs, then the result. Statistics stand apart.
    pub fn outputs(&self) -> Vec<&Tensor> {
        let mut outputs: Vec<&Tensor> =
            (self.epilogue.iter()).filter_map(|step| if let EpilogueStep::Store { target } = step { Some(target) } else { None }).collect();
        outputs.push(self.result());
        outputs
    }

    /// Arithmetic work: two for each product of the formula, those that fall on padding included. As `f64`, since 64 bits can overflow.
    pub fn flops(&self) -> f64 {
        let size = |extents: &[u64]| extents.iter().map(|&extent| extent as f64).product::<f64>();
        2.0 * size(&self.y_extents()) * size(&self.filter) * (self.c / self.groups.max(1)) as f64
    }

    /// Bytes that must cross the memory bus if each element does so once.
    pub fn traffic_bytes(&self) -> f64 {
        let tensor = |(_, tensor, extents): &(&str, &Tensor, [u64; 5])| {
            let elements: f64 =
                (extents.iter().zip(&tensor.strides)).map(|(&extent, &stride)| if stride == 0 { 1.0 } else { extent as f64 }).product();
            elements * tensor.dtype.bytes() as f64
        };
        self.tensors().iter().map(tensor).sum()
    }

    /// The product that this is.
    pub fn gemm_extents(&self) -> GemmExtents {
        let size = |extents: [u64; 3]| extents.iter().fold(1u64, |all, &extent| all.saturating_mul(extent));
        let groups = self.groups.max(1);
        let (c, k) = (self.c / groups, self.k / groups);
        let taps = size(self.filter);
        let (m, n, k) = match self.direction {
            Direction::Fprop => (self.n.saturating_mul(size(self.output)), k, taps.saturating_mul(c)),
            Direction::Dgrad => (self.n.saturating_mul(size(self.input)), c, taps.saturating_mul(k)),
            Direction::Wgrad => (k, taps.saturating_mul(c), self.n.saturating_mul(size(self.output))),
        };
        GemmExtents { m, n, k, groups }
    }

    /// Whether nothing is written: a dim of the result is 0.
    pub fn is_empty(&self) -> bool {
        self.result_extents().contains(&0)
    }

    /// Whether x, w and y all have elements. Of an x without pixels that padding covers, y has some that are sums of nothing.
    pub fn has_elements(&self) -> bool {
        [self.x_extents(), self.w_extents(), self.y_extents()].iter().flatten().all(|&extent| extent > 0)
    }

    /// Whether the result is the exact integer sum (the module's head says when).
    pub fn is_exact_integer(&self) -> bool {
        self.precision == Precision::I32 && self.epilogue.is_empty() && self.result().dtype == DType::I32
    }

    /// Whether each pixel of y reads one pixel of x, the one at its own place.
    pub fn is_pointwise(&self) -> bool {
        self.filter == [1; 3] && self.strides == [1; 3] && self.pads_before == [0; 3] && self.input == self.output
    }

    /// The product that a graph of this convolution is cut into; `None` where it stays a convolution.
    ///
    /// A filter's gradient of f32 does: both of its operands are strided along the depth, tensor cores read 32-bit types along it alone, and engines for
    /// convolutions have ways to turn them, or to split them into terms, that those for products have not. So does a depthwise one of few filters a
    /// channel: a batch of as many products as there are channels, each of a few columns and of depth one, or of a few elements. The product is among the ways of either even so.
    pub fn cut_as_gemm(&self) -> Option<GemmProblem> {
        let turns = self.direction == Direction::Wgrad
            && (self.x.dtype, self.y.dtype) == (DType::F32, DType::F32)
            && matches!(self.precision, Precision::Fp32 | Precision::Tf32);
        let is_depthwise = self.groups > 1 && self.groups == self.c && self.k <= MOST_FILTERS_OF_CHANNEL * self.c;
        if turns || is_depthwise { None } else { self.as_gemm() }
    }

    /// The matrix product that a convolution with a filter of one element is, where strides allow; canonical, with the same slots.
    ///
    /// Rows are pixels and columns channels (wgrad: rows are k, columns c), groups are a batch dim, and so is `n` where images do not merge
    /// with their pixels. `None` with a larger filter, with stride, padding, prologue or statistics, and where pixels have no single stride.
    pub fn as_gemm(&self) -> Option<GemmProblem> {
        if !self.is_pointwise() || !self.prologue.is_empty() || self.statistics.is_some() {
            return None;
        }
        let groups = self.groups;
        let is_wgrad = self.direction == Direction::Wgrad;
        let pixels = self.input.iter().product::<u64>();
        let merged = |tensor: &Tensor, extents: [u64; 5]| {
            let [_, _, d, h, w] = tensor.strides;
            (h == w * extents[4] && d == h * extents[3]).then_some(w)
        };
        let mut tensors = vec![(&self.x, self.x_extents()), (&self.y, self.y_extents())];
        if !is_wgrad {
            tensors.extend(self.tensors().into_iter().skip(2).map(|(_, tensor, extents)| (tensor, extents)));
        }
        // Images that do not lie one behind the other, pixel by pixel, become a batch; a sum over them cannot.
        let images_merge = tensors.iter().all(|(tensor, extents)| tensor.pixel_stride(*extents).is_some());
        let per_image = !images_merge && !is_wgrad;
        let activations = |tensor: &Tensor, extents: [u64; 5]| {
            let pixel_stride = if images_merge { tensor.pixel_stride(extents)? } else { merged(tensor, extents)? };
            let mut batch_strides = vec![tensor.strides[1] * (extents[1] / groups)];
            if per_image {
                batch_strides.push(tensor.strides[0]);
            }
            Some(Matrix {
                slot: tensor.slot,
                dtype: tensor.dtype,
                row_stride: pixel_stride,
                column_stride: tensor.strides[1],
                batch_strides,
            })
        };
        let filters = |tensor: &Tensor| {
            let mut batch_strides = vec![tensor.strides[0] * (self.k / groups)];
            if per_image {
                batch_strides.push(0);
            }
            Matrix {
                slot: tensor.slot,
                dtype: tensor.dtype,
                row_stride: tensor.strides[0],
                column_stride: tensor.strides[1],
                batch_strides,
            }
        };
        if is_wgrad && !images_merge {
            return None;
        }
        let rows = if images_merge { self.n * pixels } else { pixels };
        let (x, y, w) = (activations(&self.x, self.x_extents()), activations(&self.y, self.y_extents()), filters(&self.w));
        let (a, b, d, m, n, k) = match self.direction {
            Direction::Fprop => (x?, w.transposed(), y?, rows, self.k / groups, self.c / groups),
            Direction::Dgrad => (y?, w, x?, rows, self.c / groups, self.k / groups),
            Direction::Wgrad => (y?.transposed(), x?, w, self.k / groups, self.c / groups, rows),
        };
        let place = |tensor: &Tensor| if is_wgrad { Some(filters(tensor)) } else { activations(tensor, self.result_extents()) };
        let epilogue = self.epilogue.iter().map(|step| step.try_map(place)).collect::<Option<_>>()?;
        let mut batch = vec![groups];
        if per_image {
            batch.push(self.n);
        }
        GemmProblem {
            batch,
            m,
            n,
            k,
            precision: self.precision,
            determinism: self.determinism,
            a,
            b,
            c: None,
            scale_a: None,
            scale_b: None,
            alpha: HostScalar::ONE,
            beta: HostScalar::ZERO,
            epilogue,
            d,
        }
        .canonical()
        .ok()
    }

    /// Every slot, in order, each once.
    pub fn slots(&self) -> Vec<Slot> {
        let mut slots = Vec::new();
        let mut copy = self.clone();
        copy.visit_slots(&mut |slot| {
            if !slots.contains(slot) {
                slots.push(*slot);
            }
        });
        slots
    }

    /// Numbers the slots from 0 in the order of the module's head and returns the old slot of each new one.
    pub fn number_slots(&mut self) -> Vec<Slot> {
        let old = self.slots();
        self.visit_slots(&mut |slot| {
            if let Some(new) = old.iter().position(|known| known == slot) {
                *slot = Slot(new as u32);
            }
        });
        old
    }

    fn visit_slots(&mut self, visit: &mut dyn FnMut(&mut Slot)) {
        let (operands, result) = match self.direction {
            Direction::Fprop => ([&mut self.x, &mut self.w], &mut self.y),
            Direction::Dgrad => ([&mut self.y, &mut self.w], &mut self.x),
            Direction::Wgrad => ([&mut self.y, &mut self.x], &mut self.w),
        };
        operands.into_iter().for_each(|operand| visit(&mut operand.slot));
        for step in &mut self.prologue {
            match step {
                EpilogueStep::Binary { operand, .. } => visit(&mut operand.slot),
                EpilogueStep::Store { target } => visit(&mut target.slot),
                EpilogueStep::Scale { factor: HostScalar::Bound(slot) } => visit(slot),
                _ => {}
            }
        }
        for step in &mut self.epilogue {
            match step {
                EpilogueStep::Binary { operand, .. } => visit(&mut operand.slot),
                EpilogueStep::Store { target } => visit(&mut target.slot),
                EpilogueStep::Scale { factor: HostScalar::Bound(slot) } => visit(slot),
                _ => {}
            }
        }
        visit(&mut result.slot);
        if let Some(Statistics { sum, sum_of_squares }) = &mut self.statistics {
            visit(&mut sum.slot);
            visit(&mut sum_of_squares.slot);
        }
    }

    /// What [`super::Problem::buffers`] says.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        let outputs = self.outputs();
        let mut list = Vec::new();
        let mut is_stored = false;
        for (i, (name, tensor, extents)) in self.tensors().into_iter().enumerate() {
            let layout = tensor.layout(extents).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
            let access = match i {
                _ if outputs.iter().any(|output| std::ptr::eq(*output, tensor)) => {
                    is_stored = true;
                    Access::Written
                }
                0 | 1 => Access::Read,
                // Steps run in their order: what stands behind a store is read when that has been written.
                _ if is_stored => Access::ReadBefore(self.result().slot),
                _ => Access::ReadInPlace,
            };
            list.push(super::views::within_addresses(Operand { name, slot: tensor.slot, dtype: tensor.dtype, offset: 0, layout, access })?);
        }
        let mut vector = |name: &'static str, vector: &Channels, channels: u64, access| {
            let layout = vector.layout(channels).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
            list.push(super::views::within_addresses(Operand { name, slot: vector.slot, dtype: vector.dtype, offset: 0, layout, access })?);
            Ok(())
        };
        for step in &self.prologue {
            if let EpilogueStep::Binary { operand, .. } = step {
                vector("prologue operand", operand, self.activation_channels(), Access::Read)?;
            }
        }
        if let Some(Statistics { sum, sum_of_squares }) = &self.statistics {
            let channels = self.result_extents()[1];
            vector("sum", sum, channels, Access::Written)?;
            vector("sum of squares", sum_of_squares, channels, Access::Written)?;
        }
        Ok(list)
    }

    /// What [`super::Problem::scalars`] says.
    pub(super) fn scalars(&self) -> Vec<Slot> {
        let before = self.prologue.iter().filter_map(EpilogueStep::factor);
        let behind = self.epilogue.iter().filter_map(EpilogueStep::factor);
        let bound = |scalar| if let HostScalar::Bound(slot) = scalar { Some(slot) } else { None };
        before.chain(behind).filter_map(bound).collect()
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// Canonical form: spatial dims in which nothing happens stand in front; strides of extents of 1 fixed, and the dilation of a filter extent
    /// of 1; no more padding behind than the output reads; `flip` off where the filter has one element; steps that do nothing dropped. Slots
    /// keep their numbers; [`ConvProblem::number_slots`] closes gaps.
    ///
    /// # Errors
    /// Extents that do not fit each other, types that the precision does not take, a written tensor that overlaps itself or shares its slot
    /// with another one that lies otherwise, attributes out of range.
    pub fn canonical(mut self) -> Result<ConvProblem, Error> {
        self.check()?;
        let mut order: Vec<usize> = (0..3).collect();
        let is_trivial = |problem: &ConvProblem, dim: usize| {
            [problem.input[dim], problem.filter[dim], problem.output[dim]] == [1; 3] && problem.pads_before[dim] == 0
        };
        order.sort_by_key(|&dim| !is_trivial(&self, dim));
        let reorder = |list: &mut [u64]| {
            let old = [list[0], list[1], list[2]];
            for (new, &dim) in order.iter().enumerate() {
                list[new] = old[dim];
            }
        };
        for list in [
            &mut self.input,
            &mut self.filter,
            &mut self.output,
            &mut self.pads_before,
            &mut self.pads_after,
            &mut self.strides,
            &mut self.dilations,
        ] {
            reorder(list);
        }
        self.for_each_tensor(&mut |tensor, _| reorder(&mut tensor.strides[2..]));
        for dim in 0..3 {
            if self.filter[dim] == 1 {
                self.dilations[dim] = 1;
            }
            if is_trivial(&self, dim) {
                self.strides[dim] = 1;
            }
            // The last element that an output reads, counted from the first zero in front.
            let reach = (self.output[dim].max(1) - 1) * self.strides[dim] + (self.filter[dim] - 1) * self.dilations[dim] + 1;
            let needed = reach.saturating_sub(self.input[dim] + self.pads_before[dim]);
            self.pads_after[dim] = needed.min(self.pads_after[dim]);
        }
        self.flip &= self.filter != [1; 3];
        let (epilogue, stored, activations) = (self.precision.epilogue(), self.result().dtype, self.activations().dtype);
        super::simplify(&mut self.prologue, epilogue, activations);
        super::simplify(&mut self.epilogue, epilogue, stored);
        self.for_each_tensor(&mut |tensor, extents| tensor.normalize_strides(extents));
        // Each lies within what addresses count.
        self.buffers()?;
        Ok(self)
    }

    fn for_each_tensor(&mut self, visit: &mut dyn FnMut(&mut Tensor, [u64; 5])) {
        let (x, w, y, result) = (self.x_extents(), self.w_extents(), self.y_extents(), self.result_extents());
        visit(&mut self.x, x);
        visit(&mut self.w, w);
        visit(&mut self.y, y);
        for step in &mut self.epilogue {
            if let EpilogueStep::Binary { operand: tensor, .. } | EpilogueStep::Store { target: tensor } = step {
                visit(tensor, result);
            }
        }
    }

    fn check(&self) -> Result<(), Error> {
        self.check_extents()?;
        let [(first, a, _), (_, b, _)] = self.operands();
        if let Some(rule) = self.precision.rule_broken_by(a.dtype, b.dtype) {
            return Err(Error::DType { op: op(), tensor: first.to_owned(), got: a.dtype, rule });
        }
        for (name, tensor, extents) in self.tensors() {
            check_element(name, tensor.dtype)?;
            tensor.layout(extents).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
        }
        for step in &self.prologue {
            check_step("conv", step)?;
            match step {
                EpilogueStep::Store { .. } => {
                    return structure("prologue", "the steps before a convolution store nothing");
                }
                EpilogueStep::Random { .. } => return structure("prologue", NO_RANDOM),
                EpilogueStep::Binary { operand, .. } => check_element("prologue operand", operand.dtype)?,
                _ => {}
            }
        }
        for step in &self.epilogue {
            check_step("conv", step)?;
            if matches!(step, EpilogueStep::Random { .. }) {
                return structure("epilogue", NO_RANDOM);
            }
        }
        for (name, sums) in self.statistics.iter().flat_map(|both| [("sum", &both.sum), ("sum of squares", &both.sum_of_squares)]) {
            if sums.dtype != self.precision.epilogue() {
                let rule = "sums over channels are f32, of f64 operands f64";
                return Err(Error::DType { op: op(), tensor: name.to_owned(), got: sums.dtype, rule });
            }
            if sums.stride == 0 {
                return structure(name, "what is written has one place for each element");
            }
            if self.direction == Direction::Wgrad {
                return structure(name, "sums over channels are of activations: fprop or dgrad");
            }
        }
        self.check_outputs()
    }

    fn check_extents(&self) -> Result<(), Error> {
        let attribute =
            |attribute, value: &dyn std::fmt::Debug, rule| Err(Error::Attribute { op: op(), attribute, value: format!("{value:?}"), rule });
        let all = [self.n, self.c, self.k, self.groups];
        let spatial = [self.input, self.filter, self.output, self.pads_before, self.pads_after, self.strides, self.dilations];
        if let Some(large) = all.iter().find(|&&extent| extent >= EXTENT_LIMIT) {
            return attribute("extent", large, "images, channels and groups are below 2^31");
        }
        if let Some(large) = spatial.as_flattened().iter().find(|&&extent| extent >= SPATIAL_LIMIT) {
            return attribute("extent", large, "spatial extents, paddings, strides and dilations are below 2^29");
        }
        if self.groups == 0 || !self.c.is_multiple_of(self.groups) || !self.k.is_multiple_of(self.groups) {
            return attribute("groups", &self.groups, "groups divide the channels of x and of y, and there is at least one");
        }
        for (name, list) in [("strides", &self.strides), ("dilations", &self.dilations), ("filter", &self.filter)] {
            if list.contains(&0) {
                return attribute(name, list, "strides, dilations and filter extents are at least 1");
            }
        }
        for dim in 0..3 {
            let (before, after) = (self.pads_before[dim], self.pads_after[dim]);
            let want = output_extent(self.input[dim], self.filter[dim], before, after, self.strides[dim], self.dilations[dim]);
            let padded = self.input[dim] + before + after;
            if padded >= SPATIAL_LIMIT || (self.filter[dim] - 1).saturating_mul(self.dilations[dim]) >= SPATIAL_LIMIT {
                return attribute("input", &padded, "a padded input and a dilated filter are below 2^29 in each dim");
            }
            // Taps that reach past the end read zeros, so that an output without them is an output of less padding.
            let Some(want) = want else {
                return attribute("filter", &self.filter, "the dilated filter is no larger than the padded input");
            };
            if self.output[dim] != want {
                return Err(Error::Mismatch {
                    op: op(),
                    tensor: "y".to_owned(),
                    quantity: format!("spatial dim {dim}"),
                    got: self.output[dim],
                    want,
                    rule: "output = (input + pads − (filter − 1) · dilation − 1) / stride + 1, rounded down",
                });
            }
        }
        Ok(())
    }

    fn check_outputs(&self) -> Result<(), Error> {
        let tensors = self.tensors();
        let outputs = self.outputs();
        let is_output = |tensor: &Tensor| outputs.iter().any(|output| std::ptr::eq(*output, tensor));
        let vectors: Vec<(Slot, bool)> = (self.prologue.iter())
            .filter_map(|step| if let EpilogueStep::Binary { operand, .. } = step { Some((operand.slot, false)) } else { None })
            .chain(self.statistics.iter().flat_map(|both| [(both.sum.slot, true), (both.sum_of_squares.slot, true)]))
            .collect();
        for (i, &(name, output, extents)) in tensors.iter().enumerate() {
            if !is_output(output) {
                if vectors.iter().any(|&(slot, written)| written && slot == output.slot) {
                    return structure("sum", "sums over channels have buffers of their own");
                }
                continue;
            }
            let layout = output.layout(extents).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
            if layout.may_overlap() {
                return structure(name, "what is written has one place for each element");
            }
            if vectors.iter().any(|&(slot, _)| slot == output.slot) {
                return structure(name, "an output and a vector over channels have two buffers");
            }
            for (j, &(_, other, _)) in tensors.iter().enumerate() {
                if i == j || other.slot != output.slot {
                    continue;
                }
                if is_output(other) {
                    return structure(name, "two outputs have two buffers");
                }
                // What an auxiliary output has written would be read by a step behind it.
                let is_read_behind = j > i;
                if other != output || j < 2 || is_read_behind {
                    return structure(
                        name,
                        "an output may share its buffer only with an epilogue operand of the same type and strides, read before it is written",
                    );
                }
            }
        }
        let written: Vec<Slot> = vectors.iter().filter(|(_, written)| *written).map(|(slot, _)| *slot).collect();
        if written.len() == 2 && written[0] == written[1] || vectors.iter().any(|(slot, is_sum)| !is_sum && written.contains(slot)) {
            return structure("sum", "sums over channels have buffers of their own");
        }
        Ok(())
    }
}

/// The extent of y in one spatial dim: `(input + before + after − (filter − 1) · dilation − 1) / stride + 1`, rounded down. `None` where the
/// dilated filter is larger than the padded input, or the stride is 0.
pub fn output_extent(input: u64, filter: u64, before: u64, after: u64, stride: u64, dilation: u64) -> Option<u64> {
    let dilated = filter.checked_sub(1)?.checked_mul(dilation)?.checked_add(1)?;
    let room = input.checked_add(before)?.checked_add(after)?.checked_sub(dilated)?;
    Some(room.checked_div(stride)? + 1)
}

fn op() -> String {
    "conv".to_owned()
}

fn structure<T>(tensor: &str, rule: &'static str) -> Result<T, Error> {
    Err(Error::Structure { op: op(), tensor: tensor.to_owned(), rule })
}

fn check_element(name: &str, dtype: DType) -> Result<(), Error> {
    if dtype.is_storage() && dtype != DType::Bool {
        Ok(())
    } else {
        Err(Error::DType { op: op(), tensor: name.to_owned(), got: dtype, rule: "a tensor holds numbers of a storage type" })
    }
}
