//! `mma.sync`: the product of one warp.

use super::super::alu::{Lanes, exact};
use super::{
    MatrixError, a_element, accumulate, accumulate_sparse, accumulator_element, add_integer, b_element, element, is_integer, sparse,
    with_element,
};
use crate::inst::{MatrixType, MmaShape, Round};
use verdigris_tensor::num::{Format, f32_to_f16};

fn check(shape: &MmaShape) -> Result<(), MatrixError> {
    use MatrixType::{B1, Bf16, E4m3, E5m2, F16, F32, F64, S4, S8, S32, Tf32, U4, U8};
    // A sparse shape has the stored A of the dense shape of half its depth.
    let size = (shape.m, shape.n, if shape.sparse { shape.k / 2 } else { shape.k });
    if shape.sparse && (shape.m != 16 || matches!(shape.a, F64 | B1)) {
        return Err(MatrixError::Unsupported { what: "mma.sp: no such combination of shape and types" });
    }
    let ok = match (shape.a, shape.b, shape.d) {
        (F16, F16, F16 | F32) | (Bf16, Bf16, F32) => matches!(size, (16, 8, 8 | 16)),
        (Tf32, Tf32, F32) => matches!(size, (16, 8, 4 | 8)),
        (F64, F64, F64) => matches!(size, (8, 8, 4) | (16, 8, 4 | 8 | 16)),
        (E4m3 | E5m2, E4m3 | E5m2, F16 | F32) => matches!(size, (16, 8, 16 | 32)),
        (S8 | U8, S8 | U8, S32) => matches!(size, (8, 8, 16) | (16, 8, 16 | 32)),
        (S4 | U4, S4 | U4, S32) => matches!(size, (8, 8, 32) | (16, 8, 32 | 64)),
        (B1, B1, S32) => matches!(size, (8, 8, 128) | (16, 8, 128 | 256)),
        _ => false,
    };
    if ok { Ok(()) } else { Err(MatrixError::Unsupported { what: "mma: no such combination of shape and types" }) }
}

/// `d = a · b + c` of a whole warp. `ins` and `outs` follow the instruction's signature; every lane takes part.
pub fn mma(shape: &MmaShape, ins: &[&Lanes], outs: &mut [Lanes]) -> Result<(), MatrixError> {
    check(shape)?;
    let (a_count, b_count, d_count) = (shape.a_registers(), shape.b_registers(), shape.d_registers());
    if ins.len() < a_count + b_count + d_count || outs.len() < d_count {
        return Err(MatrixError::Unsupported { what: "mma: operands do not match the shape's signature" });
    }
    let (a_regs, rest) = ins.split_at(a_count);
    let (b_regs, c_regs) = rest.split_at(b_count);
    if shape.a == MatrixType::F64 {
        mma_f64(shape, a_regs, b_regs, c_regs, outs);
        return Ok(());
    }
    let (m, n, k) = (shape.m as usize, shape.n as usize, shape.k as usize);
    let (mut b, mut d) = (vec![0f32; k * n], vec![0f32; m * n]);
    let stored = if shape.sparse { k / 2 } else { k };
    let mut a = vec![0f32; m * stored];
    with_element!(shape.a, bits, convert => for (register, lanes) in a_regs.iter().enumerate() {
        for (lane, &word) in lanes.iter().enumerate() {
            for index in 0..32 / bits {
                let (row, depth) = a_element(bits, shape.m, register as u32, lane as u32, index);
                a[row as usize * stored + depth as usize] = convert((word as u32) >> (index * bits));
            }
        }
    });
    let columns = if shape.sparse {
        let (Some(metadata), Some(selector)) = (ins.get(a_count + b_count + d_count), ins.get(a_count + b_count + d_count + 1)) else {
            return Err(MatrixError::Unsupported { what: "mma.sp: metadata or selector is missing" });
        };
        Some(sparse::columns(shape.a, k, metadata, selector[0] as u32)?)
    } else {
        None
    };
    let add_products = |d: &mut [f32], b: &[f32]| match &columns {
        Some(columns) => accumulate_sparse(d, &a, columns, b, stored, n),
        None => accumulate(d, &a, b, k, n),
    };
    with_element!(shape.b, bits, convert => for (register, lanes) in b_regs.iter().enumerate() {
        for (lane, &word) in lanes.iter().enumerate() {
            for index in 0..32 / bits {
                let (depth, column) = b_element(bits, register as u32, lane as u32, index);
                b[depth as usize * n + column as usize] = convert((word as u32) >> (index * bits));
            }
        }
    });
    let place = |lane: usize, index: usize| {
        let (row, column) = accumulator_element(lane as u32, index as u32);
        row as usize * n + column as usize
    };
    if is_integer(shape.a) {
        // Exact in f32: no sum of products reaches 2²⁴.
        add_products(&mut d, &b);
        for (register, out) in outs.iter_mut().enumerate().take(d_count) {
            for lane in 0..32 {
                let dot = d[place(lane, register)] as i64;
                let sum = if shape.a == MatrixType::B1 { (i64::from(shape.k) - dot) / 2 } else { dot };
                out[lane] = u64::from(add_integer(c_regs[register][lane] as u32 as i32, sum, shape.saturate) as u32);
            }
        }
        return Ok(());
    }
    let half = shape.d == MatrixType::F16;
    for (register, lanes) in c_regs.iter().enumerate().take(d_count) {
        for (lane, &word) in lanes.iter().enumerate() {
            if half {
                d[place(lane, 2 * register)] = Format::F16.decode_f32(word as u32 & 0xffff);
                d[place(lane, 2 * register + 1)] = Format::F16.decode_f32((word >> 16) as u32 & 0xffff);
            } else {
                d[place(lane, register)] = f32::from_bits(word as u32);
            }
        }
    }
    add_products(&mut d, &b);
    for (register, out) in outs.iter_mut().enumerate().take(d_count) {
        for lane in 0..32 {
            out[lane] = if half {
                u64::from(f32_to_f16(d[place(lane, 2 * register)])) | u64::from(f32_to_f16(d[place(lane, 2 * register + 1)])) << 16
            } else {
                canonical(d[place(lane, register)])
            };
        }
    }
    Ok(())
}

/// Register bits of an f32 result, NaN canonical.
pub(super) fn canonical(value: f32) -> u64 {
    u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() })
}

fn mma_f64(shape: &MmaShape, a_regs: &[&Lanes], b_regs: &[&Lanes], c_regs: &[&Lanes], outs: &mut [Lanes]) {
    let (n, k) = (shape.n as usize, shape.k as usize);
    let mut a = vec![0f64; shape.m as usize * k];
    let mut b = vec![0f64; k * n];
    for (register, lanes) in a_regs.iter().enumerate() {
        for (lane, &word) in lanes.iter().enumerate() {
            let (row, depth) = a_element(64, shape.m, register as u32, lane as u32, 0);
            a[row as usize * k + depth as usize] = f64::from_bits(word);
        }
    }
    for (register, lanes) in b_regs.iter().enumerate() {
        for (lane, &word) in lanes.iter().enumerate() {
            let (depth, column) = b_element(64, register as u32, lane as u32, 0);
            b[depth as usize * n + column as usize] = f64::from_bits(word);
        }
    }
    for (register, out) in outs.iter_mut().enumerate().take(shape.d_registers()) {
        for lane in 0..32 {
            let (row, column) = accumulator_element(lane as u32, register as u32);
            let start = f64::from_bits(c_regs[register][lane]);
            let sum = (0..k)
                .fold(start, |sum, depth| exact::fma_f64(a[row as usize * k + depth], b[depth * n + column as usize], sum, Round::Nearest));
            out[lane] = sum.to_bits();
        }
    }
}
