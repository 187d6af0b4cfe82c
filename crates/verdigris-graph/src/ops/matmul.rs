//! Matrix multiplication.
//!
//! `D[b…, m, n] = alpha · Σₖ (sA·A[b…, m, k]) · (sB·B[b…, k, n]) + beta · C[b…, m, n]`
//!
//! The last two dims are the matrices; the dims before them are batch dims, broadcast from the right as in NumPy. Any strides are
//! taken for the inputs; a transposed operand is one whose strides say so. `K = 0` gives `beta · C`. With `beta` equal to 0, fixed or
//! at run time, `C` is never read, so that a NaN in it does not reach `D`. `sA` and `sB` are 1 unless [`OperandScale`]s are given.
//!
//! Batch dims of `C` follow the same broadcasting; `C` may also have 1 in place of `m` or `n`.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::Graph;
use crate::op::{HostScalar, Operation, Role};
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{broadcasts_to, data, factor, same_dims};

/// How products are formed and summed. It bounds the error; how the bound is met is the engine's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// f64 operands, f64 products and sums.
    F64,
    /// Operands exact as stored, every product and sum an f32 fused multiply-add. No tensor core, no splitting.
    Ieee,
    /// Operands exact as stored, error within four times the f32 multiply-add model. Tensor cores with f32 accumulators serve 16-bit
    /// and 8-bit operands; f32 operands may be split into narrower parts, and lose up to 2⁻¹³⁴ each then, which counts below 2⁻¹⁰⁹. Engines
    /// note it when they do.
    Fp32,
    /// f32 operands, of which the upper 19 bits are used (tf32, rounded or truncated); f32 sums.
    Tf32,
    /// f16 operands, sums rounded to f16.
    F16,
    /// fp8 operands, summed in the tensor core's own accumulator all along K: about 14 bits of each partial sum are kept.
    Fp8Fast,
    /// fp8 operands, with partial sums over at most 128 of K added in f32.
    Fp8Promoted,
    /// 8-bit integer operands; exact 32-bit sums, wrapping.
    I32,
}

impl Precision {
    /// Every policy.
    pub const ALL: [Precision; 8] = [
        Precision::F64,
        Precision::Ieee,
        Precision::Fp32,
        Precision::Tf32,
        Precision::F16,
        Precision::Fp8Fast,
        Precision::Fp8Promoted,
        Precision::I32,
    ];

    /// The type of a finished sum.
    pub const fn accumulator(self) -> DType {
        match self {
            Precision::F64 => DType::F64,
            Precision::Ieee | Precision::Fp32 | Precision::Tf32 | Precision::Fp8Fast | Precision::Fp8Promoted => DType::F32,
            Precision::F16 => DType::F16,
            Precision::I32 => DType::I32,
        }
    }

    /// The type in which alpha, beta and the epilogue compute: f64 for f64 operands, else f32.
    pub const fn epilogue(self) -> DType {
        match self {
            Precision::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// The usual policy for operands of these types: the most exact that the tensor core has. `None` if no policy takes the pair.
    pub fn usual(a: DType, b: DType) -> Option<Precision> {
        let choice = match a {
            DType::F64 => Precision::F64,
            DType::F32 | DType::F16 | DType::Bf16 => Precision::Fp32,
            DType::E4m3 | DType::E5m2 => Precision::Fp8Promoted,
            DType::I8 | DType::U8 => Precision::I32,
            DType::Tf32 | DType::I32 | DType::I64 | DType::Bool => return None,
        };
        choice.rule_broken_by(a, b).is_none().then_some(choice)
    }

    /// The rule that operands of these types break, or `None` if this policy takes them.
    pub fn rule_broken_by(self, a: DType, b: DType) -> Option<&'static str> {
        let both = |test: fn(DType) -> bool| test(a) && test(b);
        match self {
            Precision::F64 => (!both(|d| d == DType::F64)).then_some("f64 takes f64 operands"),
            Precision::Ieee | Precision::Fp32 => {
                if !both(|d| matches!(d, DType::F32 | DType::F16 | DType::Bf16 | DType::E4m3 | DType::E5m2)) {
                    Some("ieee and fp32 take f32, f16, bf16, e4m3 and e5m2 operands")
                } else if a != b && !both(DType::is_fp8) {
                    Some("A and B share one type; only e4m3 and e5m2 may be mixed")
                } else {
                    None
                }
            }
            Precision::Tf32 => (!both(|d| d == DType::F32)).then_some("tf32 takes f32 operands"),
            Precision::F16 => (!both(|d| d == DType::F16)).then_some("f16 sums take f16 operands"),
            Precision::Fp8Fast | Precision::Fp8Promoted => {
                (!both(DType::is_fp8)).then_some("fp8_fast and fp8_promoted take e4m3 and e5m2 operands")
            }
            Precision::I32 => (!both(|d| matches!(d, DType::I8 | DType::U8))).then_some("i32 sums take i8 and u8 operands"),
        }
    }

    /// Whether an fp8 operand may have a factor for each block.
    pub(crate) fn check_block_scales(self, op: &str) -> Result<(), Error> {
        if self != Precision::Fp8Fast {
            return Ok(());
        }
        Err(Error::Attribute {
            op: op.to_owned(),
            attribute: "precision",
            value: "fp8_fast".to_owned(),
            rule: "block scales are applied where partial sums are promoted: fp8_promoted, fp32 or ieee",
        })
    }
}

/// The dequantization factor of an fp8 operand: an f32 tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperandScale {
    /// The factors. One element for the whole operand, or, with `block`, dims `[b…, outer blocks, k blocks]`, where *outer* is `m` for
    /// A and `n` for B.
    pub tensor: Uid,
    /// Extents `[outer, k]` of the block that one factor covers; the last block of a dim may be cut short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<[u64; 2]>,
}

/// Matrix multiplication; the module's head has the formula.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matmul {
    /// `[b…, m, k]`.
    pub a: Uid,
    /// `[b…, k, n]`.
    pub b: Uid,
    /// `[b…, m, n]`, or absent: then `beta` plays no part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c: Option<Uid>,
    /// `[b…, m, n]`, written.
    pub d: Uid,
    /// Factor of the product.
    pub alpha: HostScalar<Uid>,
    /// Factor of `C`.
    pub beta: HostScalar<Uid>,
    /// How products are formed and summed.
    pub precision: Precision,
    /// Factor of A; fp8 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_a: Option<OperandScale>,
    /// Factor of B; fp8 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_b: Option<OperandScale>,
}

impl Matmul {
    /// `D = A · B`.
    pub fn new(a: Uid, b: Uid, d: Uid, precision: Precision) -> Matmul {
        Matmul { a, b, c: None, d, alpha: HostScalar::ONE, beta: HostScalar::ZERO, precision, scale_a: None, scale_b: None }
    }

    /// The dims of `D`.
    ///
    /// # Errors
    /// Fewer than two dims, a `k` that differs, or batch dims that do not broadcast.
    pub fn infer(op: &str, a: &TensorDesc, b: &TensorDesc) -> Result<Vec<u64>, Error> {
        for tensor in [a, b] {
            if tensor.layout.rank() < 2 {
                return Err(Error::Mismatch {
                    op: op.to_owned(),
                    tensor: tensor.name.clone(),
                    quantity: "the number of dims".to_owned(),
                    got: tensor.layout.rank() as u64,
                    want: 2,
                    rule: "a matrix has at least two dims",
                });
            }
        }
        let (a_batch, a_matrix) = a.layout.dims().split_at(a.layout.rank() - 2);
        let (b_batch, b_matrix) = b.layout.dims().split_at(b.layout.rank() - 2);
        if a_matrix[1] != b_matrix[0] {
            return Err(Error::Mismatch {
                op: op.to_owned(),
                tensor: b.name.clone(),
                quantity: "k (its last dim but one)".to_owned(),
                got: b_matrix[0],
                want: a_matrix[1],
                rule: "the last dim of A and the last but one of B are the same k",
            });
        }
        let mut dims = broadcast_dims(op, b, a_batch, b_batch)?;
        dims.extend([a_matrix[0], b_matrix[1]]);
        Ok(dims)
    }
}

impl Operation for Matmul {
    const SPEC: OpSpec = OpSpec {
        name: "matmul",
        summary: "The product of matrices, batched, with what is added to it.",
        forms: &[Form {
            name: "",
            formula: "D[b…, m, n] = alpha · Σₖ (sA · A[b…, m, k]) · (sB · B[b…, k, n]) + beta · C[b…, m, n]",
            operands: &[
                OperandSpec::read("a", "`[b…, m, k]`, of a type that the precision takes"),
                OperandSpec::read("b", "`[b…, k, n]`, of a type that the precision takes"),
                OperandSpec::read("c", "`[b…, m, n]` or what broadcasts to it").optional(),
                OperandSpec::read("scale_a", "`{tensor, block}`: f32 factors of an fp8 A, one or one for each block").optional(),
                OperandSpec::read("scale_b", "the same for B").optional(),
                OperandSpec::written("d", "`[b…, m, n]`"),
            ],
            attributes: &[
                AttributeSpec::new("alpha", "`{fixed: number}` or `{bound: uid}` of a host scalar", "finite", r#"{"bound":0}"#),
                AttributeSpec::new("beta", "as `alpha`", "finite; with 0, `C` is not read", r#"{"bound":0}"#),
                AttributeSpec::new(
                    "precision",
                    "`f64 ieee fp32 tf32 f16 fp8_fast fp8_promoted i32`",
                    "it takes the types of A and B; no `block` with `fp8_fast`",
                    "\"i32\"",
                ),
            ],
            shape: "batch dims broadcast from the right; `m` and `n` are those of A and B, whose `k` agree",
            gradient: "`dA = alpha · dD · Bᵀ`, `dB = alpha · Aᵀ · dD`, `dC = beta · dD`; refused with `scale_a` or `scale_b`",
            methods: &[Method::new(
                "matmul",
                "a: Uid, b: Uid, c: Uid | None = None, *, alpha: float | Uid | None = None, beta: float | Uid | None = None, \
                 precision: str | None = None, scale_a: Uid | None = None, block_a: tuple[int, int] | None = None, \
                 scale_b: Uid | None = None, block_b: tuple[int, int] | None = None, name: str = \"matmul\"",
            )],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.a);
        visit(Role::Input, &mut self.b);
        if let Some(c) = &mut self.c {
            visit(Role::Input, c);
        }
        for scalar in [&mut self.alpha, &mut self.beta] {
            if let HostScalar::Bound(uid) = scalar {
                visit(Role::Input, uid);
            }
        }
        for scale in [&mut self.scale_a, &mut self.scale_b].into_iter().flatten() {
            visit(Role::Input, &mut scale.tensor);
        }
        visit(Role::Output, &mut self.d);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let a = data(graph, op, self.a)?;
        let b = data(graph, op, self.b)?;
        let d = data(graph, op, self.d)?;
        let dims = Matmul::infer(op, a, b)?;
        same_dims(op, d, &dims, "D has the dims [b…, m, n]")?;
        if let Some(rule) = self.precision.rule_broken_by(a.dtype, b.dtype) {
            return Err(Error::DType { op: op.to_owned(), tensor: a.name.clone(), got: a.dtype, rule });
        }
        if let Some(c) = self.c {
            broadcasts_to(op, data(graph, op, c)?, &dims, "C has the dims of D or broadcasts to them")?;
        }
        factor(graph, op, "alpha", self.alpha)?;
        factor(graph, op, "beta", self.beta)?;
        let (a_outer, b_outer, k) = (dims[dims.len() - 2], dims[dims.len() - 1], a.layout.dims()[a.layout.rank() - 1]);
        let batch = &dims[..dims.len() - 2];
        for (scale, outer, operand) in [(self.scale_a, a_outer, a), (self.scale_b, b_outer, b)] {
            if let Some(scale) = scale {
                check_scale(graph, op, scale, operand, outer, k, batch)?;
                if scale.block.is_some() {
                    self.precision.check_block_scales(op)?;
                }
            }
        }
        Ok(())
    }

    /// `dA = alpha · dD · Bᵀ`, `dB = alpha · Aᵀ · dD`, `dC = beta · dD`.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(dd) = at.of(self.d) else { return Ok(()) };
        if let Some(c) = self.c.filter(|&c| at.wants(c)) {
            let dc = if self.beta == HostScalar::ONE { dd } else { at.graph.scale(&at.name, dd, self.beta)? };
            at.give(c, dc)?;
        }
        if let Some(scale) = [self.scale_a, self.scale_b].into_iter().flatten().find(|scale| at.wants(scale.tensor)) {
            return at.refuse(scale.tensor, "a factor of dequantization is no variable of the product");
        }
        if !(at.wants(self.a) || at.wants(self.b)) {
            return Ok(());
        }
        if self.scale_a.is_some() || self.scale_b.is_some() {
            let of = if at.wants(self.a) { self.a } else { self.b };
            return at.refuse(of, "fp8 operands with factors of dequantization have no gradient; multiply what they were made from");
        }
        let is_fp8 = at.tensor(self.a)?.dtype.is_fp8();
        let precision = if is_fp8 && self.precision != Precision::Ieee { Precision::Fp32 } else { self.precision };
        let dtype = Backward::operand_dtype(at.tensor(self.a)?.dtype);
        let dd = at.round(dd, dtype)?;
        if at.wants(self.a) {
            let b = at.round(self.b, dtype)?;
            let turned = turned(at, b, "b")?;
            let product = Matmul { alpha: self.alpha, ..Matmul::new(dd, turned, self.d, precision) };
            let da = at.graph.matmul_with(&at.named("a"), product)?;
            at.give(self.a, da)?;
        }
        if at.wants(self.b) {
            let (a_dims, b_dims, d_dims) = (at.dims(self.a)?, at.dims(self.b)?, at.dims(self.d)?);
            let mut a = at.round(self.a, dtype)?;
            let mut dd = dd;
            // A matrix that all of a batch share: the rows of the batch are rows of one product.
            let batch = d_dims.len() - 2;
            let is_shared = b_dims[..b_dims.len() - 2].iter().all(|&dim| dim == 1);
            if is_shared && batch > 0 && a_dims[..a_dims.len() - 2] == d_dims[..batch] {
                let rows = d_dims[..=batch].iter().product();
                a = at.graph.reshape(&at.named("a_rows"), a, &[rows, a_dims[a_dims.len() - 1]])?;
                dd = at.graph.reshape(&at.named("d_rows"), dd, &[rows, d_dims[batch + 1]])?;
            }
            let turned = turned(at, a, "a")?;
            let product = Matmul { alpha: self.alpha, ..Matmul::new(turned, dd, self.d, precision) };
            let db = at.graph.matmul_with(&at.named("b"), product)?;
            at.give(self.b, db)?;
        }
        Ok(())
    }
}

/// Matrices with rows and columns exchanged.
fn turned(at: &mut Backward<'_>, x: Uid, operand: &str) -> Result<Uid, Error> {
    let rank = at.tensor(x)?.layout.rank() as u32;
    let permutation: Vec<u32> = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
    at.graph.transpose(&at.named(&format!("{operand}_t")), x, &permutation)
}

fn check_scale(graph: &Graph, op: &str, scale: OperandScale, operand: &TensorDesc, outer: u64, k: u64, batch: &[u64]) -> Result<(), Error> {
    let tensor = data(graph, op, scale.tensor)?;
    let dtype_error =
        |tensor: &TensorDesc, rule| Err(Error::DType { op: op.to_owned(), tensor: tensor.name.clone(), got: tensor.dtype, rule });
    if !operand.dtype.is_fp8() {
        return dtype_error(operand, "operand scales belong to fp8 operands");
    }
    if tensor.dtype != DType::F32 {
        return dtype_error(tensor, "operand scales are f32");
    }
    match scale.block {
        None if tensor.layout.elements() != 1 => Err(Error::Mismatch {
            op: op.to_owned(),
            tensor: tensor.name.clone(),
            quantity: "the number of elements".to_owned(),
            got: tensor.layout.elements(),
            want: 1,
            rule: "a scale without blocks is one factor for the whole operand",
        }),
        None => Ok(()),
        Some(block) => {
            if block.contains(&0) {
                return Err(Error::Attribute {
                    op: op.to_owned(),
                    attribute: "block",
                    value: format!("{block:?}"),
                    rule: "a block is at least 1 by 1",
                });
            }
            let mut dims = batch.to_vec();
            dims.extend([outer.div_ceil(block[0]), k.div_ceil(block[1])]);
            broadcasts_to(op, tensor, &dims, "block scales have the dims [b…, outer blocks, k blocks]")
        }
    }
}

/// The common dims of two lists of batch dims, aligned from the right; a dim of 1 gives way. `tensor` is the one that has `theirs`.
pub(crate) fn broadcast_dims(op: &str, tensor: &TensorDesc, ours: &[u64], theirs: &[u64]) -> Result<Vec<u64>, Error> {
    let rank = ours.len().max(theirs.len());
    let at = |dims: &[u64], i: usize| (i + dims.len()).checked_sub(rank).map_or(1, |i| dims[i]);
    (0..rank)
        .map(|i| match (at(ours, i), at(theirs, i)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            (want, got) => Err(Error::Mismatch {
                op: op.to_owned(),
                tensor: tensor.name.clone(),
                quantity: format!("dim {}", (i + theirs.len()).saturating_sub(rank)),
                got,
                want,
                rule: "dims broadcast from the right: each pair is equal or holds a 1",
            }),
        })
        .collect()
}
