//! Tensor cores: sections 9.7.14 (by one warp) and 9.7.15 (by a warpgroup).

use super::{Form, Unknown, Words};
use crate::inst::{MatrixType, MmaShape, Op, WgmmaShape};

const TYPES: &[(&str, MatrixType)] = &[
    ("f16", MatrixType::F16),
    ("bf16", MatrixType::Bf16),
    ("tf32", MatrixType::Tf32),
    ("f64", MatrixType::F64),
    ("f32", MatrixType::F32),
    ("e4m3", MatrixType::E4m3),
    ("e5m2", MatrixType::E5m2),
    ("s8", MatrixType::S8),
    ("u8", MatrixType::U8),
    ("s4", MatrixType::S4),
    ("u4", MatrixType::U4),
    ("b1", MatrixType::B1),
    ("s32", MatrixType::S32),
];

/// Bits of an element, for the fragments' sizes.
const fn element_bits(ty: MatrixType) -> u32 {
    match ty {
        MatrixType::B1 => 1,
        MatrixType::S4 | MatrixType::U4 => 4,
        MatrixType::E4m3 | MatrixType::E5m2 | MatrixType::S8 | MatrixType::U8 => 8,
        MatrixType::F16 | MatrixType::Bf16 => 16,
        MatrixType::Tf32 | MatrixType::F32 | MatrixType::S32 => 32,
        MatrixType::F64 => 64,
    }
}

/// Registers that each of 32 lanes has of so many elements: of 32 bits, but of 64 for f64.
fn registers(elements: u32, ty: MatrixType) -> usize {
    (elements * element_bits(ty)).div_ceil(32 * element_bits(ty).max(32)) as usize
}

/// `ldmatrix`, `stmatrix`, `movmatrix`.
pub(super) fn fragment<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    words.need("sync.aligned.m8n8")?;
    if first == "movmatrix" {
        words.need("trans.b16")?;
        form.result_of(1)?;
        return Ok(Op::Movmatrix {});
    }
    let count = words.choice(&[("x1", 1), ("x2", 2), ("x4", 4)])?;
    let transpose = words.flag("trans");
    words.need("shared.b16")?;
    if first == "ldmatrix" {
        form.group_out(usize::from(count))?;
        form.address()?;
        Ok(Op::Ldmatrix { count, transpose })
    } else {
        form.address()?;
        form.group_in(usize::from(count))?;
        Ok(Op::Stmatrix { count, transpose })
    }
}

/// `m16n8k16`
fn shape(words: &mut Words<'_>) -> Result<(u32, u32, u32), Unknown> {
    let unknown = words.unknown("a shape");
    let word = words.next();
    let parts = || {
        let (m, rest) = word.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k')?;
        let number = super::plain_number;
        Some((number(m)?, number(n)?, number(k)?))
    };
    parts().ok_or(unknown)
}

/// `mma{.sp}.sync.aligned.shape.row.col{.satfinite}.d.a.b.c d, a, b, c{, metadata, selector}`.
pub(super) fn mma<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    let sparse = words.flag("sp");
    words.need("sync.aligned")?;
    let (m, n, k) = shape(words)?;
    words.need("row.col")?;
    let saturate = words.flag("satfinite");
    let (d, a, b, c) = (words.choice(TYPES)?, words.choice(TYPES)?, words.choice(TYPES)?, words.choice(TYPES)?);
    if c != d {
        return Err(format!("`{}` adds to another type than it gives", words.opcode));
    }
    if a == MatrixType::B1 {
        words.need("xor.popc")?;
    }
    form.group_out(registers(m * n, d))?;
    // Of a sparse A half of the elements are there.
    form.group_in(registers(if sparse { m * k / 2 } else { m * k }, a))?;
    form.group_in(registers(n * k, b))?;
    form.group_in(registers(m * n, d))?;
    if sparse {
        form.inputs(2)?;
    }
    Ok(Op::Mma { shape: MmaShape { m, n, k, a, b, d, saturate, sparse } })
}

/// `wgmma.mma_async` and what orders it.
pub(super) fn wgmma<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    match words.next() {
        "fence" => {
            words.need("sync.aligned")?;
            Ok(Op::WgmmaFence {})
        }
        "commit_group" => {
            words.need("sync.aligned")?;
            Ok(Op::WgmmaCommit {})
        }
        "wait_group" => {
            words.need("sync.aligned")?;
            Ok(Op::WgmmaWait { pending: form.small_number()? })
        }
        "mma_async" => product(words, form),
        other => Err(format!("`wgmma.{other}` does not exist")),
    }
}

/// `wgmma.mma_async{.sp}.sync.aligned.shape{.satfinite}.d.a.b d, a, b{, metadata, selector}, scale-d{, ±1, ±1}{, trans-a}{, trans-b}`:
/// A is a descriptor or four registers. Signs stand for floats alone, transpositions for 16-bit types alone, of A only in shared memory.
fn product<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    let sparse = words.flag("sp");
    words.need("sync.aligned")?;
    let (m, n, k) = shape(words)?;
    let saturate = words.flag("satfinite");
    let (d, a, b) = (words.choice(TYPES)?, words.choice(TYPES)?, words.choice(TYPES)?);
    // 32 bytes of each row of A, twice as deep where half of the elements are there.
    let depth = 256 / element_bits(a) * if sparse { 2 } else { 1 };
    if (m, k) != (64, depth) {
        return Err(format!("`{}` has 64 rows and a depth of {depth}", words.opcode));
    }
    // A thread of 128 has its share of 64 rows, two halves to a register.
    form.group_out((64 * n * element_bits(d) / (128 * 32)) as usize)?;
    let a_in_registers = matches!(form.peek(), Some(super::Operand::Group(_)));
    if a_in_registers {
        form.group_in(4)?
    } else {
        form.input()?
    }
    form.inputs(if sparse { 4 } else { 2 })?;
    let negated = |sign: i128| match sign {
        1 => Ok(false),
        -1 => Ok(true),
        other => Err(format!("{other} where a factor of 1 or -1 must stand")),
    };
    let (mut negate_a, mut negate_b, mut transpose_a, mut transpose_b) = (false, false, false, false);
    if !matches!(a, MatrixType::S8 | MatrixType::U8) {
        negate_a = negated(form.number()?)?;
        negate_b = negated(form.number()?)?;
    }
    if matches!(a, MatrixType::F16 | MatrixType::Bf16) {
        transpose_a = !a_in_registers && form.bit()?;
        transpose_b = form.bit()?;
    }
    let shape = WgmmaShape { n, a, b, d, a_in_registers, transpose_a, transpose_b, negate_a, negate_b, saturate, sparse };
    Ok(Op::Wgmma { shape })
}
