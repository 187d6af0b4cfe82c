//! Matrix multiplication with an epilogue.
//!
//! A [`GemmProblem`] computes, for every batch index and every `(m, n)`:
//!
//! ```text
//! v = alpha · Σₖ (sA·A[m, k]) · (sB·B[k, n]) + beta · C[m, n]      sums as `precision` says, the rest in precision.epilogue()
//! for step in epilogue: v = step(v)
//! D[m, n] = v rounded to D's type (to nearest even; saturating in fp8 and integers)
//! ```
//!
//! `beta` equal to 0, fixed or at run time, means that C is not read. With [`Precision::I32`], no epilogue step, `alpha` fixed to 1 and
//! no C, an i32 D is the exact sum, wrapped to 32 bits; otherwise the sum is converted to f32 first.
//! Slots are numbered in the order A, B, C, scale of A, scale of B, alpha, beta, epilogue, D.

use serde::{Deserialize, Serialize};
use verdigris_tensor::{DType, Layout};

use super::{Access, Determinism, EpilogueStep, Matrix, Operand, Order, Slot, check_step, finite, simplify};
use crate::error::Error;
use crate::op::HostScalar;
use crate::ops::matmul::Precision;

/// The dequantization factor of an fp8 operand.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// One f32 in device memory for the whole operand.
    Tensor {
        /// Its buffer.
        slot: Slot,
    },
    /// One f32 for each block of the operand.
    Block {
        /// Rows of A or columns of B that share a factor.
        outer: u64,
        /// Elements along k that share a factor.
        k: u64,
        /// The factors: rows are outer blocks, columns are k blocks.
        factors: Matrix,
    },
}

/// Matrix multiplication with an epilogue; the module's head has the formula.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmProblem {
    /// Extents of the batch dims, outermost first; empty for a single product. Canonical: no 1, and dims merged where all strides allow.
    pub batch: Vec<u64>,
    /// Rows of A, C and D.
    pub m: u64,
    /// Columns of B, C and D.
    pub n: u64,
    /// Columns of A and rows of B.
    pub k: u64,
    /// How products are formed and summed.
    pub precision: Precision,
    /// Whether two executions must agree bit for bit.
    pub determinism: Determinism,
    /// `m × k`.
    pub a: Matrix,
    /// `k × n`.
    pub b: Matrix,
    /// `m × n`.
    pub c: Option<Matrix>,
    /// Factor of A.
    pub scale_a: Option<Scale>,
    /// Factor of B; the rows of its block factors are blocks of n.
    pub scale_b: Option<Scale>,
    /// Factor of the product.
    pub alpha: HostScalar<Slot>,
    /// Factor of C; fixed to 0 without C.
    pub beta: HostScalar<Slot>,
    /// Steps between the sum and D, in order.
    pub epilogue: Vec<EpilogueStep>,
    /// `m × n`, written.
    pub d: Matrix,
}

impl GemmProblem {
    /// `D = A · B` for packed row-major matrices: A in slot 0, B in slot 1, D in slot 2. A start for the variations.
    ///
    /// # Errors
    /// Types that no precision policy takes.
    pub fn packed(m: u64, n: u64, k: u64, operands: DType, d: DType) -> Result<GemmProblem, Error> {
        let precision = Precision::usual(operands, operands).ok_or_else(|| Error::DType {
            op: "gemm".to_owned(),
            tensor: "a".to_owned(),
            got: operands,
            rule: "a GEMM multiplies f64, f32, f16, bf16, e4m3, e5m2, i8 or u8",
        })?;
        GemmProblem {
            batch: Vec::new(),
            m,
            n,
            k,
            precision,
            determinism: Determinism::Any,
            a: Matrix::row_major(Slot(0), operands, k),
            b: Matrix::row_major(Slot(1), operands, n),
            c: None,
            scale_a: None,
            scale_b: None,
            alpha: HostScalar::ONE,
            beta: HostScalar::ZERO,
            epilogue: Vec::new(),
            d: Matrix::row_major(Slot(2), d, n),
        }
        .canonical()
    }

    /// Number of products: the product of the batch dims.
    pub fn batch_count(&self) -> u64 {
        self.batch.iter().product()
    }

    /// Arithmetic work, 2·m·n·k for each product of the batch. As `f64`, since 64 bits can overflow.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64 * self.batch_count() as f64
    }

    /// Whether nothing is written: a batch dim, m or n is 0.
    pub fn is_empty(&self) -> bool {
        self.m == 0 || self.n == 0 || self.batch.contains(&0)
    }

    /// Whether D is the exact integer sum (the module's head says when).
    pub fn is_exact_integer(&self) -> bool {
        self.precision == Precision::I32
            && self.epilogue.is_empty()
            && self.alpha.is_fixed(1.0)
            && self.c.is_none()
            && self.d.dtype == DType::I32
    }

    /// Two letters for the orders of A and B, as BLAS has them for row-major matrices: `n` if row-major, `t` if column-major, `s` if
    /// neither. `nt` means that both run along k.
    pub fn layout_letters(&self) -> String {
        let letter = |matrix: &Matrix| match matrix.order() {
            Order::RowMajor => 'n',
            Order::ColumnMajor => 't',
            Order::Strided => 's',
        };
        [letter(&self.a), letter(&self.b)].into_iter().collect()
    }

    /// Every matrix that is read or written, with its name, its rows and its columns, in the order of slots.
    pub fn matrices(&self) -> Vec<(&'static str, &Matrix, u64, u64)> {
        let (m, n, k) = (self.m, self.n, self.k);
        let mut list = vec![("a", &self.a, m, k), ("b", &self.b, k, n)];
        list.extend(self.c.iter().map(|c| ("c", c, m, n)));
        for (name, scale, extent) in [("scale_a", &self.scale_a, m), ("scale_b", &self.scale_b, n)] {
            if let Some(Scale::Block { outer, k: along_k, factors }) = scale {
                list.push((name, factors, blocks(extent, *outer), blocks(k, *along_k)));
            }
        }
        for step in &self.epilogue {
            match step {
                EpilogueStep::Binary { operand, .. } => list.push(("epilogue operand", operand, m, n)),
                EpilogueStep::Store { target } => list.push(("auxiliary output", target, m, n)),
                EpilogueStep::Unary(_) | EpilogueStep::Random { .. } | EpilogueStep::Scale { .. } | EpilogueStep::Round { .. } => {}
            }
        }
        list.push(("d", &self.d, m, n));
        list
    }

    /// Which random number each element has, of the steps that draw one.
    fn numbers(&self) -> impl Iterator<Item = &Matrix> {
        self.epilogue.iter().filter_map(|step| if let EpilogueStep::Random { number, .. } = step { Some(number) } else { None })
    }

    /// The matrices written: the auxiliary outputs, then D.
    pub fn outputs(&self) -> Vec<&Matrix> {
        let mut outputs: Vec<&Matrix> =
            (self.epilogue.iter()).filter_map(|step| if let EpilogueStep::Store { target } = step { Some(target) } else { None }).collect();
        outputs.push(&self.d);
        outputs
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

    /// What [`super::Problem::buffers`] says.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        let outputs = self.outputs();
        let mut is_stored = false;
        let operand = |(name, matrix, rows, columns): (&'static str, &Matrix, u64, u64)| {
            let layout = matrix.layout(&self.batch, rows, columns).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
            let access = match name {
                _ if outputs.iter().any(|output| std::ptr::eq(*output, matrix)) => {
                    is_stored = true;
                    Access::Written
                }
                // Operands of the sum are read by tiles that other tiles' results do not wait for.
                "a" | "b" | "scale_a" | "scale_b" => Access::Read,
                // Steps run in their order: what stands behind a store is read when that has been written.
                _ if is_stored => Access::ReadBefore(self.d.slot),
                _ => Access::ReadInPlace,
            };
            super::views::within_addresses(Operand { name, slot: matrix.slot, dtype: matrix.dtype, offset: 0, layout, access })
        };
        let mut list = self.matrices().into_iter().map(operand).collect::<Result<Vec<_>, Error>>()?;
        for (name, scale) in [("scale_a", &self.scale_a), ("scale_b", &self.scale_b)] {
            if let Some(Scale::Tensor { slot }) = scale {
                list.push(Operand { name, slot: *slot, dtype: DType::F32, offset: 0, layout: Layout::scalar(), access: Access::Read });
            }
        }
        for step in &self.epilogue {
            if let EpilogueStep::Random { number, offset: None, .. } = step {
                let name = "random state";
                let layout = Layout::row_major(&[4]).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
                list.push(Operand { name, slot: number.slot, dtype: DType::I32, offset: 0, layout, access: Access::Read });
            }
        }
        Ok(list)
    }

    /// What [`super::Problem::scalars`] says.
    pub(super) fn scalars(&self) -> Vec<Slot> {
        let factors = self.epilogue.iter().filter_map(EpilogueStep::factor);
        let bound = |scalar| if let HostScalar::Bound(slot) = scalar { Some(slot) } else { None };
        let factors = [self.alpha, self.beta].into_iter().chain(factors).filter_map(bound);
        let states = self.epilogue.iter().filter_map(|step| match step {
            EpilogueStep::Random { number, offset: Some(offset), .. } => Some([number.slot, *offset]),
            _ => None,
        });
        factors.chain(states.flatten()).collect()
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// Canonical form: batch dims of 1 dropped and mergeable ones merged; strides of extents of 1 fixed; C dropped if `beta` is fixed to
    /// 0; steps that do nothing dropped. Slots keep their numbers; [`GemmProblem::number_slots`] closes gaps.
    ///
    /// # Errors
    /// Types that the precision does not take, strides that are not one a batch dim, a written matrix that overlaps itself or shares its
    /// slot with an operand of another shape, attributes out of range.
    pub fn canonical(mut self) -> Result<GemmProblem, Error> {
        self.check()?;
        if self.beta.is_fixed(0.0) {
            self.c = None;
        }
        if self.c.is_none() {
            self.beta = HostScalar::ZERO;
        }
        simplify(&mut self.epilogue, self.precision.epilogue(), self.d.dtype);
        self.normalize_batch();
        let (m, n, k) = (self.m, self.n, self.k);
        self.for_each_matrix(&mut |matrix, rows, columns| matrix.normalize_strides(rows, columns), m, n, k);
        // Each lies within what addresses count.
        self.buffers()?;
        Ok(self)
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
        visit(&mut self.a.slot);
        visit(&mut self.b.slot);
        if let Some(c) = &mut self.c {
            visit(&mut c.slot);
        }
        for scale in [&mut self.scale_a, &mut self.scale_b].into_iter().flatten() {
            match scale {
                Scale::Tensor { slot } => visit(slot),
                Scale::Block { factors, .. } => visit(&mut factors.slot),
            }
        }
        for scalar in [&mut self.alpha, &mut self.beta] {
            if let HostScalar::Bound(slot) = scalar {
                visit(slot);
            }
        }
        for step in &mut self.epilogue {
            match step {
                EpilogueStep::Binary { operand, .. } => visit(&mut operand.slot),
                EpilogueStep::Store { target } => visit(&mut target.slot),
                EpilogueStep::Random { number, offset, .. } => {
                    visit(&mut number.slot);
                    offset.iter_mut().for_each(&mut *visit);
                }
                EpilogueStep::Scale { factor: HostScalar::Bound(slot) } => visit(slot),
                EpilogueStep::Unary(_) | EpilogueStep::Scale { factor: HostScalar::Fixed(_) } | EpilogueStep::Round { .. } => {}
            }
        }
        visit(&mut self.d.slot);
    }

    fn for_each_matrix(&mut self, visit: &mut dyn FnMut(&mut Matrix, u64, u64), m: u64, n: u64, k: u64) {
        visit(&mut self.a, m, k);
        visit(&mut self.b, k, n);
        if let Some(c) = &mut self.c {
            visit(c, m, n);
        }
        for (scale, extent) in [(&mut self.scale_a, m), (&mut self.scale_b, n)] {
            if let Some(Scale::Block { outer, k: along_k, factors }) = scale {
                visit(factors, blocks(extent, *outer), blocks(k, *along_k));
            }
        }
        for step in &mut self.epilogue {
            match step {
                EpilogueStep::Binary { operand, .. } => visit(operand, m, n),
                EpilogueStep::Store { target } => visit(target, m, n),
                EpilogueStep::Random { number, .. } => visit(number, m, n),
                EpilogueStep::Unary(_) | EpilogueStep::Scale { .. } | EpilogueStep::Round { .. } => {}
            }
        }
        visit(&mut self.d, m, n);
    }

    fn normalize_batch(&mut self) {
        let (m, n, k) = (self.m, self.n, self.k);
        let mut i = 0;
        while i < self.batch.len() {
            let extent = self.batch[i];
            let next = self.batch.get(i + 1).copied();
            let drop_it = extent == 1;
            let merge = !drop_it
                && next.is_some_and(|next| {
                    let matrices = self.matrices().into_iter().map(|(_, matrix, ..)| matrix);
                    matrices
                        .chain(self.numbers())
                        .all(|matrix| matrix.batch_strides[i + 1].checked_mul(next) == Some(matrix.batch_strides[i]))
                });
            if drop_it || merge {
                // Merged, the pair keeps the inner stride; dropped, the dim takes its own away. Both remove entry `i`.
                self.batch.remove(i);
                if merge {
                    self.batch[i] *= extent;
                }
                self.for_each_matrix(
                    &mut |matrix, _, _| {
                        matrix.batch_strides.remove(i);
                    },
                    m,
                    n,
                    k,
                );
                i = 0;
            } else {
                i += 1;
            }
        }
    }

    fn check(&self) -> Result<(), Error> {
        let op = || "gemm".to_owned();
        if let Some(rule) = self.precision.rule_broken_by(self.a.dtype, self.b.dtype) {
            return Err(Error::DType { op: op(), tensor: "a".to_owned(), got: self.a.dtype, rule });
        }
        let batch_elements = self.batch.iter().try_fold(1u64, |all, &dim| all.checked_mul(dim));
        if batch_elements.is_none_or(|count| count > 1 << 63) {
            return Err(Error::Attribute {
                op: op(),
                attribute: "batch",
                value: format!("{:?}", self.batch),
                rule: "a batch has at most 2^63 products",
            });
        }
        for (name, scale, operand) in [("scale_a", &self.scale_a, &self.a), ("scale_b", &self.scale_b, &self.b)] {
            let Some(scale) = scale else { continue };
            if !operand.dtype.is_fp8() {
                let rule = "operand scales belong to fp8 operands";
                return Err(Error::DType { op: op(), tensor: name.to_owned(), got: operand.dtype, rule });
            }
            if let Scale::Block { outer, k, factors } = scale {
                if *outer == 0 || *k == 0 {
                    return Err(Error::Attribute {
                        op: op(),
                        attribute: "block",
                        value: format!("{outer}×{k}"),
                        rule: "a block is at least 1 by 1",
                    });
                }
                if factors.dtype != DType::F32 {
                    let rule = "operand scales are f32";
                    return Err(Error::DType { op: op(), tensor: name.to_owned(), got: factors.dtype, rule });
                }
                self.precision.check_block_scales("gemm")?;
            }
        }
        let (m, n) = (self.m, self.n);
        let numbers = self.numbers().map(|number| ("random number", number, m, n));
        for (name, matrix, rows, columns) in self.matrices().into_iter().chain(numbers) {
            if matrix.batch_strides.len() != self.batch.len() {
                return Err(Error::Mismatch {
                    op: op(),
                    tensor: name.to_owned(),
                    quantity: "the number of batch strides".to_owned(),
                    got: matrix.batch_strides.len() as u64,
                    want: self.batch.len() as u64,
                    rule: "a matrix has one batch stride for each batch dim",
                });
            }
            if !matrix.dtype.is_storage() || matrix.dtype == DType::Bool {
                let rule = "a matrix holds numbers of a storage type";
                return Err(Error::DType { op: op(), tensor: name.to_owned(), got: matrix.dtype, rule });
            }
            matrix.layout(&self.batch, rows, columns).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
        }
        self.check_outputs()?;
        self.check_numbers()?;
        for step in &self.epilogue {
            check_step("gemm", step)?;
        }
        finite("gemm", "alpha", &self.alpha)?;
        finite("gemm", "beta", &self.beta)
    }

    /// Random numbers are drawn in f32, and counted in no memory; nothing that is written is their state.
    fn check_numbers(&self) -> Result<(), Error> {
        let structure = |rule| Err(Error::Structure { op: "gemm".to_owned(), tensor: "random number".to_owned(), rule });
        for number in self.numbers() {
            if self.precision.epilogue() != DType::F32 {
                return structure("an epilogue draws random numbers where it computes in f32");
            }
            if number.dtype != DType::U8 {
                return structure("numbers of elements are in no memory, and of u8");
            }
            if self.outputs().iter().any(|output| output.slot == number.slot) {
                return structure("a random state is not written");
            }
        }
        Ok(())
    }

    fn check_outputs(&self) -> Result<(), Error> {
        let structure = |tensor: &'static str, rule| Err(Error::Structure { op: "gemm".to_owned(), tensor: tensor.to_owned(), rule });
        let matrices = self.matrices();
        let is_output = |matrix: &Matrix| self.outputs().iter().any(|output| std::ptr::eq(*output, matrix));
        for (i, &(name, output, rows, columns)) in matrices.iter().enumerate() {
            if !is_output(output) {
                continue;
            }
            let layout = output.layout(&self.batch, rows, columns).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
            if layout.may_overlap() {
                return structure(name, "what is written has one place for each element");
            }
            for (j, &(_, other, ..)) in matrices.iter().enumerate() {
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
                        "an output may share its buffer only with C or an epilogue operand of the same type and strides, read before it is written",
                    );
                }
            }
        }
        Ok(())
    }
}

pub(crate) fn blocks(extent: u64, block: u64) -> u64 {
    if block == 0 { 0 } else { extent.div_ceil(block) }
}
