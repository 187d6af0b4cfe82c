//! The interpreter's tensor core against the ISA's fragment tables spelled out shape by shape, tiles written element by element, and
//! products in 64-bit arithmetic.

use verdigris_kir::inst::{MatrixType, MmaShape, WgmmaShape};
use verdigris_kir::interp::alu::Lanes;
use verdigris_kir::interp::matrix::{
    Accumulation, Accumulator, Descriptor, Major, MatrixError, accumulator_element, ldmatrix, mma, movmatrix, multiply, operand_chunks,
    place_sparse, read_a, read_a_registers, read_b, stmatrix,
};
use verdigris_kir::ir::Swizzle;
use verdigris_tensor::num::{f32_to_bf16, f32_to_e4m3, f32_to_e5m2, f32_to_f16};

use MatrixType::{B1, Bf16, E4m3, E5m2, F16, F32, F64, S4, S8, S32, Tf32, U4, U8};

/// Seeded random bits.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

/// A small integer that the type holds exactly, so that every product and sum is exact whatever the order.
fn small(ty: MatrixType, random: &mut Random) -> i64 {
    match ty {
        U8 => random.below(256) as i64,
        S8 => random.below(256) as i64 - 128,
        U4 => random.below(16) as i64,
        S4 => random.below(16) as i64 - 8,
        B1 => random.below(2) as i64,
        E5m2 | E4m3 => random.below(17) as i64 / 2 * 2 - 8,
        _ => random.below(15) as i64 - 7,
    }
}

fn encode(ty: MatrixType, value: i64) -> u64 {
    let x = value as f32;
    match ty {
        F16 => f32_to_f16(x).into(),
        Bf16 => f32_to_bf16(x).into(),
        E4m3 => f32_to_e4m3(x).into(),
        E5m2 => f32_to_e5m2(x).into(),
        // Bits below tf32 must not matter.
        Tf32 => u64::from(x.to_bits() | 0x1234 & if value == 0 { 0 } else { 0x1fff }),
        F32 => x.to_bits().into(),
        F64 => f64::from(x).to_bits(),
        S32 => value as u32 as u64,
        S8 | U8 => value as u8 as u64,
        S4 | U4 => value as u64 & 15,
        B1 => value as u64 & 1,
    }
}

// ---- fragments of mma, as the ISA's tables have them -------------------------------------------------------------------

/// Row and column of element `i` of the A fragment, by the formulas printed for each shape.
fn isa_a(ty: MatrixType, m: u32, k: u32, lane: u32, i: u32) -> (u32, u32) {
    let (g, t) = (lane >> 2, lane % 4);
    match (ty, m, k) {
        (F64, 8, 4) => (g, t),
        (F64, 16, 4) => (if i == 0 { g } else { g + 8 }, t),
        (F64, 16, 8) => (if i.is_multiple_of(2) { g } else { g + 8 }, if i < 2 { t } else { t + 4 }),
        (F64, 16, 16) => (if i.is_multiple_of(2) { g } else { g + 8 }, if i.is_multiple_of(2) { i * 2 + t } else { i * 2 - 2 + t }),
        (F16 | Bf16, 16, 8) => (if i < 2 { g } else { g + 8 }, t * 2 + (i & 1)),
        (F16 | Bf16, 16, 16) => (if i < 2 || (4..6).contains(&i) { g } else { g + 8 }, t * 2 + (i & 1) + if i >= 4 { 8 } else { 0 }),
        (Tf32, 16, 4) => (if i == 0 { g } else { g + 8 }, t),
        (Tf32, 16, 8) => (if i == 0 || i == 2 { g } else { g + 8 }, if i < 2 { t } else { t + 4 }),
        (S8 | U8, 8, 16) => (g, t * 4 + i),
        (S8 | U8 | E4m3 | E5m2, 16, 16) => (if i < 4 { g } else { g + 8 }, t * 4 + (i & 3)),
        (S8 | U8 | E4m3 | E5m2, 16, 32) => {
            (if i < 4 || (8..12).contains(&i) { g } else { g + 8 }, t * 4 + (i & 3) + if i >= 8 { 16 } else { 0 })
        }
        (S4 | U4, 8, 32) => (g, t * 8 + i),
        (S4 | U4, 16, 32) => (if i < 8 { g } else { g + 8 }, t * 8 + (i & 7)),
        (S4 | U4, 16, 64) => (if i < 8 || (16..24).contains(&i) { g } else { g + 8 }, t * 8 + (i & 7) + if i >= 16 { 32 } else { 0 }),
        (B1, 8, 128) => (g, t * 32 + i),
        (B1, 16, 128) => (if i < 32 { g } else { g + 8 }, t * 32 + (i & 31)),
        (B1, 16, 256) => (if i < 32 || (64..96).contains(&i) { g } else { g + 8 }, t * 32 + (i & 31) + if i >= 64 { 128 } else { 0 }),
        other => panic!("no table for {other:?}"),
    }
}

/// Row and column of element `i` of the B fragment.
fn isa_b(ty: MatrixType, k: u32, lane: u32, i: u32) -> (u32, u32) {
    let (g, t) = (lane >> 2, lane % 4);
    let row = match (ty, k) {
        (F64, 4) => t,
        (F64, 8) => {
            if i == 0 {
                t
            } else {
                t + 4
            }
        }
        (F64, 16) => t + i * 4,
        (F16 | Bf16, 8) => t * 2 + i,
        (F16 | Bf16, 16) => t * 2 + (i & 1) + if i >= 2 { 8 } else { 0 },
        (Tf32, 4) => t,
        (Tf32, 8) => {
            if i == 0 {
                t
            } else {
                t + 4
            }
        }
        (S8 | U8 | E4m3 | E5m2, 16) => t * 4 + i,
        (S8 | U8 | E4m3 | E5m2, 32) => t * 4 + (i & 3) + if i >= 4 { 16 } else { 0 },
        (S4 | U4, 32) => t * 8 + i,
        (S4 | U4, 64) => t * 8 + (i & 7) + if i >= 8 { 32 } else { 0 },
        (F16 | Bf16, 32) => t * 2 + (i & 1) + 8 * (i / 2),
        (Tf32, 16) => t + 4 * i,
        (E4m3 | E5m2 | S8 | U8, 64) => t * 4 + (i & 3) + 16 * (i / 4),
        (S4 | U4, 128) => t * 8 + (i & 7) + 32 * (i / 8),
        (B1, 128) => t * 32 + i,
        (B1, 256) => t * 32 + (i & 31) + if i >= 32 { 128 } else { 0 },
        other => panic!("no table for {other:?}"),
    };
    (row, g)
}

fn isa_c(lane: u32, i: u32) -> (u32, u32) {
    (if i < 2 { lane >> 2 } else { (lane >> 2) + 8 }, (lane % 4) * 2 + (i & 1))
}

fn shapes() -> Vec<MmaShape> {
    let mut shapes = Vec::new();
    let mut add = |m, k, a, b, d| {
        shapes.push(MmaShape { m, n: 8, k, a, b, d, saturate: false, sparse: false });
    };
    for k in [8, 16] {
        add(16, k, F16, F16, F32);
        add(16, k, F16, F16, F16);
        add(16, k, Bf16, Bf16, F32);
    }
    for k in [4, 8] {
        add(16, k, Tf32, Tf32, F32);
    }
    add(8, 4, F64, F64, F64);
    for k in [4, 8, 16] {
        add(16, k, F64, F64, F64);
    }
    for (a, b) in [(S8, S8), (S8, U8), (U8, S8), (U8, U8)] {
        add(8, 16, a, b, S32);
        add(16, 16, a, b, S32);
        add(16, 32, a, b, S32);
    }
    for (a, b) in [(S4, S4), (S4, U4), (U4, S4), (U4, U4)] {
        add(8, 32, a, b, S32);
        add(16, 32, a, b, S32);
        add(16, 64, a, b, S32);
    }
    add(8, 128, B1, B1, S32);
    add(16, 128, B1, B1, S32);
    add(16, 256, B1, B1, S32);
    for (a, b) in [(E4m3, E4m3), (E4m3, E5m2), (E5m2, E4m3), (E5m2, E5m2)] {
        add(16, 16, a, b, F32);
        add(16, 32, a, b, F32);
        add(16, 32, a, b, F16);
    }
    shapes
}

#[test]
fn warp_products_of_every_shape_follow_the_fragment_tables() {
    let mut random = Random(0x5eed_0010);
    for shape in shapes() {
        let MmaShape { m, n, k, a: at, b: bt, d: dt, .. } = shape;
        let a: Vec<Vec<i64>> = (0..m).map(|_| (0..k).map(|_| small(at, &mut random)).collect()).collect();
        let b: Vec<Vec<i64>> = (0..k).map(|_| (0..n).map(|_| small(bt, &mut random)).collect()).collect();
        let c: Vec<Vec<i64>> = (0..m).map(|_| (0..n).map(|_| random.below(200) as i64 - 100).collect()).collect();
        // Registers filled by the tables: element i of a fragment stands in register i / e at place i % e.
        let fill = |ty: MatrixType, registers: usize, place: &dyn Fn(u32, u32) -> i64| -> Vec<Lanes> {
            let e = if ty.bits() >= 32 { 1 } else { 32 / ty.bits() };
            (0..registers)
                .map(|r| {
                    std::array::from_fn(|lane| {
                        (0..e).fold(0, |word, i| word | encode(ty, place(lane as u32, r as u32 * e + i)) << (i * ty.bits().min(32)))
                    })
                })
                .collect()
        };
        let at_a = |(r, k): (u32, u32)| a[r as usize][k as usize];
        let at_b = |(k, n): (u32, u32)| b[k as usize][n as usize];
        let at_c = |(r, n): (u32, u32)| c[r as usize][n as usize];
        let mut ins = fill(at, shape.a_registers(), &|lane, i| at_a(isa_a(at, m, k, lane, i)));
        ins.extend(fill(bt, shape.b_registers(), &|lane, i| at_b(isa_b(bt, k, lane, i))));
        ins.extend(fill(dt, shape.d_registers(), &|lane, i| at_c(isa_c(lane, i))));
        let ins: Vec<&Lanes> = ins.iter().collect();
        let mut outs = vec![[0xdead_u64; 32]; shape.d_registers()];
        mma(&shape, &ins, &mut outs).unwrap();
        let product = |(r, n): (u32, u32)| -> i64 {
            let sum: i64 = (0..k as usize)
                .map(|k| {
                    let (x, y) = (a[r as usize][k], b[k][n as usize]);
                    if at == B1 { x ^ y } else { x * y }
                })
                .sum();
            sum + c[r as usize][n as usize]
        };
        let expected = fill(dt, shape.d_registers(), &|lane, i| product(isa_c(lane, i)));
        // f16 results may round: compare as the type holds them, which `encode` does with one rounding.
        assert_eq!(outs, expected, "{shape:?}");
    }
}

/// Sixteen rows of a sparse A: values by dense column, the stored ones, and the metadata bits of each row.
struct SparseRows {
    dense: Vec<Vec<i64>>,
    stored: Vec<Vec<i64>>,
    bits: Vec<u64>,
}

fn sparse_rows(ty: MatrixType, rows: usize, k: usize, random: &mut Random) -> SparseRows {
    let mut made = SparseRows { dense: vec![vec![0; k]; rows], stored: vec![vec![]; rows], bits: vec![0; rows] };
    for row in 0..rows {
        let mut at = 0;
        // Units of a group that are kept, elements of a unit, units of a group.
        let (kept, unit, group) = match ty {
            Tf32 => (1, 1, 2),
            S4 | U4 => (2, 2, 4),
            _ => (2, 1, 4),
        };
        for first in (0..k).step_by(unit * group) {
            let one = random.below(group as u64) as usize;
            let other = (one + 1 + random.below(group as u64 - 1) as usize) % group;
            let mut places = if kept == 1 { vec![one] } else { vec![one.min(other), one.max(other)] };
            for place in places.drain(..) {
                for element in 0..unit {
                    let value = small(ty, random);
                    made.dense[row][first + place * unit + element] = value;
                    made.stored[row].push(value);
                }
                if ty == Tf32 {
                    made.bits[row] |= if place == 0 { 0b0100 } else { 0b1110 } << at;
                    at += 4;
                } else {
                    made.bits[row] |= (place as u64) << at;
                    at += 2;
                }
            }
        }
    }
    made
}

/// The metadata register of a warp, lanes of other selectors filled with rubbish.
fn metadata_register(bits: &[u64], width: u32, selector: usize) -> Lanes {
    let mut lanes = [0xffff_ffff_u64; 32];
    for g in 0..8 {
        let half = |row: usize, part: u32| (bits[row] >> (16 * part)) & 0xffff;
        match width {
            16 => lanes[4 * g + selector] = half(g, 0) | half(g + 8, 0) << 16,
            32 => {
                for part in 0..2 {
                    lanes[4 * g + 2 * selector + part as usize] = half(g, part) | half(g + 8, part) << 16;
                }
            }
            _ => {
                for place in 0..4 {
                    lanes[4 * g + place] = (bits[g + 8 * (place % 2)] >> (32 * (place / 2))) & 0xffff_ffff;
                }
            }
        }
    }
    lanes
}

#[test]
fn sparse_warp_products() {
    let mut random = Random(0x5eed_0014);
    for (ty, d, k, width, selectors) in [
        (F16, F32, 16, 16, 4),
        (Bf16, F32, 16, 16, 4),
        (F16, F32, 32, 32, 2),
        (Bf16, F32, 32, 32, 2),
        (Tf32, F32, 8, 16, 4),
        (Tf32, F32, 16, 32, 2),
        (S8, S32, 64, 64, 1),
        (U8, S32, 64, 64, 1),
        (E4m3, F32, 64, 64, 1),
        (S4, S32, 128, 64, 1),
    ] {
        let shape = MmaShape { m: 16, n: 8, k, a: ty, b: ty, d, saturate: false, sparse: true };
        for selector in 0..selectors {
            let a = sparse_rows(ty, 16, k as usize, &mut random);
            let b: Vec<Vec<i64>> = (0..k).map(|_| (0..8).map(|_| small(ty, &mut random)).collect()).collect();
            let e = if ty.bits() >= 32 { 1 } else { 32 / ty.bits() };
            let fill = |registers: usize, place: &dyn Fn(u32, u32) -> i64| -> Vec<Lanes> {
                let word = |lane: usize, r: usize| {
                    (0..e).fold(0, |w, i| w | encode(ty, place(lane as u32, r as u32 * e + i)) << (i * ty.bits() % 32))
                };
                (0..registers).map(|r| std::array::from_fn(|lane| word(lane, r))).collect()
            };
            let mut ins = fill(shape.a_registers(), &|lane, i| {
                let (row, column) = isa_a(ty, 16, k / 2, lane, i);
                a.stored[row as usize][column as usize]
            });
            ins.extend(fill(shape.b_registers(), &|lane, i| {
                let (row, column) = isa_b(ty, k, lane, i);
                b[row as usize][column as usize]
            }));
            ins.extend(vec![[0; 32]; 4]);
            ins.push(metadata_register(&a.bits, width, selector));
            ins.push([selector as u64; 32]);
            let refs: Vec<&Lanes> = ins.iter().collect();
            let mut outs = [[0xdead; 32]; 4];
            mma(&shape, &refs, &mut outs).unwrap();
            for (register, out) in outs.iter().enumerate() {
                for lane in 0..32 {
                    let (row, column) = isa_c(lane, register as u32);
                    let sum: i64 = (0..k as usize).map(|k| a.dense[row as usize][k] * b[k][column as usize]).sum();
                    assert_eq!(out[lane as usize], encode(d, sum), "{shape:?} selector {selector} row {row} column {column}");
                }
            }
            // A selector that the shape lacks, and metadata whose places do not ascend.
            *ins.last_mut().unwrap() = [selectors as u64; 32];
            let refs: Vec<&Lanes> = ins.iter().collect();
            assert!(matches!(mma(&shape, &refs, &mut outs), Err(MatrixError::Selector { .. })));
            let at = ins.len() - 2;
            (ins[at], ins[at + 1]) = ([0; 32], [0; 32]);
            let refs: Vec<&Lanes> = ins.iter().collect();
            assert!(matches!(mma(&shape, &refs, &mut outs), Err(MatrixError::Metadata { row: 0, .. })));
        }
    }
}

#[test]
fn what_is_not_stored_takes_no_part() {
    // Elements 0 and 1 of each four are stored; B is infinite where nothing is.
    let shape = MmaShape { m: 16, n: 8, k: 16, a: F16, b: F16, d: F32, saturate: false, sparse: true };
    let one = [0x3c00_3c00; 32];
    let b: [Lanes; 2] = [std::array::from_fn(|lane| if lane % 2 == 0 { 0x3c00_3c00 } else { 0x7c00_7c00 }); 2];
    let (zero, metadata) = ([0; 32], [0x4444_4444; 32]);
    let ins = [&one, &one, &b[0], &b[1], &zero, &zero, &zero, &zero, &metadata, &zero];
    let mut outs = [[0; 32]; 4];
    mma(&shape, &ins, &mut outs).unwrap();
    assert_eq!(outs, [[u64::from(8f32.to_bits()); 32]; 4]);
}

#[test]
fn sparse_warpgroup_products() {
    let mut random = Random(0x5eed_0015);
    for (ty, d, width) in [(F16, F32, 32), (Bf16, F32, 32), (Tf32, F32, 32), (S8, S32, 64), (E5m2, F32, 64)] {
        for swizzle in [Swizzle::None, Swizzle::B64, Swizzle::B128] {
            let shape = WgmmaShape { sparse: true, ..wgmma_shape(40, ty, d) };
            let shape = if ty == S8 { WgmmaShape { n: 32, ..shape } } else { shape };
            let k = shape.k() as usize;
            let a = sparse_rows(ty, 64, k, &mut random);
            let b: Vec<Vec<i64>> = (0..shape.n).map(|_| (0..k).map(|_| small(ty, &mut random)).collect()).collect();
            let mut shared = vec![0; 65536];
            let ta = write_k_major(&mut shared, 0, Swizzle::B32, ty, &a.stored);
            let tb = write_k_major(&mut shared, 32768, swizzle, ty, &b);
            let mut a_operand = read_a(&shape, descriptor(&ta, 0, Swizzle::B32), &shared).unwrap();
            let b_operand = read_b(&shape, descriptor(&tb, 0, swizzle), &shared).unwrap();
            let mut sums = Accumulator::new(&shape);
            assert!(multiply(&shape, &a_operand, &b_operand, true, &mut sums, Accumulation::Full).is_err(), "no metadata yet");
            let selector = if width == 64 { 0 } else { 1 };
            let registers: Vec<Lanes> = (0..4).map(|w| metadata_register(&a.bits[16 * w..], width, selector)).collect();
            place_sparse(&shape, &mut a_operand, &std::array::from_fn(|w| &registers[w]), selector as u32).unwrap();
            multiply(&shape, &a_operand, &b_operand, true, &mut sums, Accumulation::Full).unwrap();
            for warp in 0..4 {
                for register in 0..shape.d_registers() {
                    for (lane, &got) in sums.store(warp, register).iter().enumerate() {
                        let (row, column) =
                            (16 * warp + lane / 4 + 8 * ((register / 2) % 2), 8 * (register / 4) + 2 * (lane % 4) + register % 2);
                        let sum: i64 = (0..k).map(|k| a.dense[row][k] * b[column][k]).sum();
                        assert_eq!(got, encode(d, sum), "{ty:?} {swizzle:?} row {row} column {column}");
                    }
                }
            }
        }
    }
}

#[test]
fn integer_products_saturate_or_wrap() {
    let mut shape = MmaShape { m: 16, n: 8, k: 16, a: S8, b: S8, d: S32, saturate: true, sparse: false };
    let (one, c): (Lanes, Lanes) = ([0x0101_0101; 32], [0x7fff_ffff; 32]);
    let ins = [&one, &one, &one, &c, &c, &c, &c];
    let mut outs = [[0; 32]; 4];
    mma(&shape, &ins, &mut outs).unwrap();
    assert_eq!(outs, [[0x7fff_ffff; 32]; 4]);
    shape.saturate = false;
    mma(&shape, &ins, &mut outs).unwrap();
    assert_eq!(outs, [[0x8000_000f; 32]; 4]);
}

#[test]
fn what_has_no_meaning_here_is_refused() {
    let shape = |m, k, a, sparse| MmaShape { m, n: 8, k, a, b: a, d: F32, saturate: false, sparse };
    for bad in [shape(16, 64, F16, true), shape(16, 32, F16, false), shape(8, 16, F16, false)] {
        let zero = [0; 32];
        let ins = vec![&zero; 24];
        assert!(matches!(mma(&bad, &ins, &mut [[0; 32]; 4]), Err(MatrixError::Unsupported { .. })));
    }
    assert_eq!(Descriptor::decode(1 << 49), Err(MatrixError::BaseOffset { base_offset: 1 }));
    assert_eq!(Descriptor::decode(1 << 60), Err(MatrixError::ReservedBits { bits: 1 << 60 }));
    let shape = wgmma_shape(64, Bf16, F32);
    let shared = vec![0; 4096];
    // 64 rows of 128 bytes do not fit 4096 bytes.
    assert!(matches!(read_a(&shape, 0x4000_0040_0001_0000, &shared), Err(MatrixError::OutOfRange { shared_bytes: 4096, .. })));
    // 112 bytes into a row, 32 bytes do not fit.
    let crosses = read_a(&shape, 0x4000_0040_0001_0007, &vec![0; 65536]).unwrap_err();
    assert_eq!(crosses, MatrixError::CrossesSpan { start_bytes: 112, row_bytes: 32, swizzle: Swizzle::B128 });
    let transposed = WgmmaShape { transpose_b: true, ..wgmma_shape(64, Tf32, F32) };
    assert!(matches!(read_b(&transposed, 0, &shared), Err(MatrixError::Unsupported { .. })));
}

// ---- matrices of 8 by 8 ------------------------------------------------------------------------------------------------

#[test]
fn eight_by_eight_matrices_in_registers() {
    // Element (r, c) is 16·r + c.
    let rows: [[u8; 16]; 8] =
        std::array::from_fn(|r| std::array::from_fn(|byte| if byte % 2 == 0 { (16 * r + byte / 2) as u8 } else { 0 }));
    let plain = ldmatrix(&rows, false);
    let transposed = ldmatrix(&rows, true);
    for lane in 0..32u64 {
        let (major, minor) = (lane / 4, 2 * (lane % 4));
        assert_eq!(plain[lane as usize], (16 * major + minor) | (16 * major + minor + 1) << 16);
        assert_eq!(transposed[lane as usize], (16 * minor + major) | (16 * (minor + 1) + major) << 16);
    }
    assert_eq!(stmatrix(&plain, false), rows);
    assert_eq!(stmatrix(&transposed, true), rows);
    assert_eq!(movmatrix(&plain), transposed);
}

// ---- warpgroup products ------------------------------------------------------------------------------------------------

fn wgmma_shape(n: u32, ty: MatrixType, d: MatrixType) -> WgmmaShape {
    WgmmaShape {
        n,
        a: ty,
        b: ty,
        d,
        a_in_registers: false,
        transpose_a: false,
        transpose_b: false,
        negate_a: false,
        negate_b: false,
        saturate: false,
        sparse: false,
    }
}

/// A tile in shared memory written the way a kernel lays it out, and the descriptor fields for it.
struct Tile {
    lbo: u32,
    sbo: u32,
    /// Descriptor start of k-step `s`.
    step_bytes: Vec<u32>,
}

/// Where byte `at` of an unswizzled tile lies: the chunk index within each row of `span` bytes is XORed with the row's phase.
fn swizzled(swizzle: Swizzle, base: usize, at: usize) -> usize {
    let (row128, in_row) = (at / 128, at % 128);
    let chunk = in_row / 16;
    // Phases repeat every 8 lines of 128 bytes; shorter rows share a line.
    let chunk = match swizzle {
        Swizzle::None => chunk,
        Swizzle::B128 => chunk ^ (row128 % 8),
        Swizzle::B64 => chunk ^ (row128 % 4),
        Swizzle::B32 => chunk ^ (row128 % 2),
    };
    base + row128 * 128 + chunk * 16 + at % 16
}

/// Writes `rows × depth` elements, `depth` covering several k-steps, K-major; panels of one span along K follow each other.
fn write_k_major(shared: &mut [u8], base: usize, swizzle: Swizzle, ty: MatrixType, values: &[Vec<i64>]) -> Tile {
    let (rows, depth) = (values.len(), values[0].len());
    let width = (ty.bits() / 8) as usize;
    let span = swizzle.span_bytes() as usize;
    for (r, row) in values.iter().enumerate() {
        for (k, &value) in row.iter().enumerate() {
            let byte = k * width;
            let at = if swizzle == Swizzle::None {
                // Core matrices of 8 rows by 16 bytes; those of one 8-row group stand behind each other along K.
                let cores_along_k = depth * width / 16;
                ((r / 8) * cores_along_k + byte / 16) * 128 + (r % 8) * 16 + byte % 16
            } else {
                (byte / span) * rows * span + r * span + byte % span
            };
            let at = swizzled(swizzle, base, at);
            shared[at..at + width].copy_from_slice(&encode(ty, value).to_le_bytes()[..width]);
        }
    }
    let steps = depth * width / 32;
    let (lbo, sbo) = if swizzle == Swizzle::None { (128, depth * width / 16 * 128) } else { (16, 8 * span) };
    let step_bytes = (0..steps)
        .map(|s| {
            let byte = 32 * s;
            let at = if swizzle == Swizzle::None { byte / 16 * 128 } else { byte / span * rows * span + byte % span };
            (base + at) as u32
        })
        .collect();
    Tile { lbo: lbo as u32, sbo: sbo as u32, step_bytes }
}

/// Writes 16-bit elements MN-major: panels of one span along M or N, each with all of K.
fn write_mn_major(shared: &mut [u8], base: usize, swizzle: Swizzle, ty: MatrixType, values: &[Vec<i64>]) -> Tile {
    let (rows, depth) = (values.len(), values[0].len());
    let span = swizzle.span_bytes() as usize;
    for (r, row) in values.iter().enumerate() {
        for (k, &value) in row.iter().enumerate() {
            let panel = r * 2 / span;
            let at = swizzled(swizzle, base, panel * depth * span + k * span + r * 2 % span);
            shared[at..at + 2].copy_from_slice(&encode(ty, value).to_le_bytes()[..2]);
        }
    }
    let _ = rows;
    let (panel, eight) = ((depth * span) as u32, (8 * span) as u32);
    // Without a swizzle the two distances change places.
    let (lbo, sbo) = if swizzle == Swizzle::None { (eight, panel) } else { (panel, eight) };
    Tile { lbo, sbo, step_bytes: (0..depth / 16).map(|s| (base + s * 16 * span) as u32).collect() }
}

fn descriptor(tile: &Tile, step: usize, swizzle: Swizzle) -> u64 {
    let mode = match swizzle {
        Swizzle::None => 0u64,
        Swizzle::B128 => 1,
        Swizzle::B64 => 2,
        Swizzle::B32 => 3,
    };
    u64::from(tile.step_bytes[step] >> 4) | u64::from(tile.lbo >> 4) << 16 | u64::from(tile.sbo >> 4) << 32 | mode << 62
}

/// Fills accumulators, multiplies all k-steps of two tiles in shared memory, and compares every accumulator register.
fn check_wgmma(shape: WgmmaShape, swizzle_a: Swizzle, swizzle_b: Swizzle, random: &mut Random) {
    let n = shape.n as usize;
    // Two k-steps of 128 bytes: every start inside a row, and more than one panel.
    let depth = 2048 / shape.a.bits() as usize;
    let mut values = |rows: usize, ty| -> Vec<Vec<i64>> { (0..rows).map(|_| (0..depth).map(|_| small(ty, random)).collect()).collect() };
    let (a, b) = (values(64, shape.a), values(n, shape.b));
    let mut shared = vec![0x5a; 160 * 1024];
    let write = |shared: &mut [u8], base, swizzle, transpose: bool, ty, values: &[Vec<i64>]| {
        if transpose { write_mn_major(shared, base, swizzle, ty, values) } else { write_k_major(shared, base, swizzle, ty, values) }
    };
    let tile_a = write(&mut shared, 1024, swizzle_a, shape.transpose_a, shape.a, &a);
    let tile_b = write(&mut shared, 32 * 1024, swizzle_b, shape.transpose_b, shape.b, &b);
    let mut d = Accumulator::new(&shape);
    let start = |row: usize, column: usize| ((row * 7 + column * 3) % 11) as i64 - 5;
    let registers = shape.d_registers();
    let per_register = if shape.d == F16 { 2 } else { 1 };
    let as_registers = |value: &dyn Fn(usize, usize) -> i64, warp: usize, register: usize| -> Lanes {
        std::array::from_fn(|lane| {
            (0..per_register).fold(0, |word, half| {
                // The formula of the accumulator figure: rows 16w + l/4 (+8), columns 8·(i/4) + 2·(l%4) + i%2.
                let i = register * per_register + half;
                let row = 16 * warp + lane / 4 + 8 * ((i / 2) % 2);
                let column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                word | encode(shape.d, value(row, column)) << (16 * half)
            })
        })
    };
    for warp in 0..4 {
        for register in 0..registers {
            d.load(warp, register, &as_registers(&start, warp, register));
        }
    }
    for step in 0..tile_a.step_bytes.len() {
        let a_operand = if shape.a_in_registers {
            let k = shape.k() as usize;
            let e = 32 / shape.a.bits() as usize;
            let fragments: Vec<Lanes> = (0..16)
                .map(|index| {
                    let (warp, register) = (index / 4, index % 4);
                    std::array::from_fn(|lane| {
                        (0..e).fold(0, |word, i| {
                            let row = 16 * warp + lane / 4 + 8 * (register % 2);
                            let column = step * k + (lane % 4) * e + i + (register / 2) * (k / 2);
                            word | encode(shape.a, a[row][column]) << (i as u32 * shape.a.bits()).min(31)
                        })
                    })
                })
                .collect();
            let registers: [[&Lanes; 4]; 4] = std::array::from_fn(|w| std::array::from_fn(|r| &fragments[4 * w + r]));
            read_a_registers(&shape, &registers).unwrap()
        } else {
            let operand = read_a(&shape, descriptor(&tile_a, step, swizzle_a), &shared).unwrap();
            assert_eq!(operand.chunks.len(), 64 * 32 / 16);
            operand
        };
        let b_operand = read_b(&shape, descriptor(&tile_b, step, swizzle_b), &shared).unwrap();
        let mut touched = b_operand.chunks.clone();
        touched.sort_unstable();
        touched.dedup();
        assert_eq!(touched.len(), n * 2, "each chunk of B once");
        multiply(&shape, &a_operand, &b_operand, true, &mut d, Accumulation::Full).unwrap();
    }
    let sign = if shape.negate_a != shape.negate_b { -1 } else { 1 };
    let product = |row: usize, column: usize| start(row, column) + sign * a[row].iter().zip(&b[column]).map(|(x, y)| x * y).sum::<i64>();
    for warp in 0..4 {
        for register in 0..registers {
            assert_eq!(
                d.store(warp, register),
                as_registers(&product, warp, register),
                "{shape:?} {swizzle_a:?} {swizzle_b:?} warp {warp} register {register}"
            );
        }
    }
}

const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

#[test]
fn warpgroup_products_of_every_type_swizzle_and_majorness() {
    let mut random = Random(0x5eed_0011);
    for swizzle in SWIZZLES {
        for (a, b, d) in [
            (F16, F16, F32),
            (Bf16, Bf16, F32),
            (Tf32, Tf32, F32),
            (E4m3, E4m3, F32),
            (E4m3, E5m2, F32),
            (E5m2, E4m3, F32),
            (S8, S8, S32),
            (U8, S8, S32),
            (S8, U8, S32),
            (U8, U8, S32),
        ] {
            for n in [8, 24, 64, 96] {
                check_wgmma(WgmmaShape { b, ..wgmma_shape(n, a, d) }, swizzle, swizzle, &mut random);
            }
            check_wgmma(WgmmaShape { b, a_in_registers: true, ..wgmma_shape(32, a, d) }, swizzle, swizzle, &mut random);
        }
        for ty in [F16, Bf16] {
            for n in [8, 32, 64, 72, 192, 256] {
                for (transpose_a, transpose_b) in [(false, true), (true, false), (true, true)] {
                    let shape = WgmmaShape { transpose_a, transpose_b, ..wgmma_shape(n, ty, F32) };
                    check_wgmma(shape, SWIZZLES[(n as usize / 8) % 4], swizzle, &mut random);
                    check_wgmma(shape, swizzle, Swizzle::B128, &mut random);
                }
            }
            check_wgmma(WgmmaShape { a_in_registers: true, transpose_b: true, ..wgmma_shape(64, ty, F32) }, swizzle, swizzle, &mut random);
        }
    }
    check_wgmma(WgmmaShape { negate_a: true, ..wgmma_shape(16, Bf16, F32) }, Swizzle::B128, Swizzle::B128, &mut random);
    check_wgmma(WgmmaShape { negate_b: true, ..wgmma_shape(16, F16, F32) }, Swizzle::B128, Swizzle::B128, &mut random);
    check_wgmma(WgmmaShape { negate_a: true, negate_b: true, ..wgmma_shape(16, E5m2, F32) }, Swizzle::B128, Swizzle::B64, &mut random);
}

#[test]
fn half_accumulators_round_once_per_instruction() {
    // Small enough that all sums are exact in f16: |Σ| ≤ 2048.
    let mut random = Random(0x5eed_0012);
    let shape = wgmma_shape(16, F16, F16);
    let mut shared = vec![0u8; 65536];
    let values = |rows: usize, random: &mut Random| -> Vec<Vec<i64>> {
        (0..rows).map(|_| (0..16).map(|_| random.below(7) as i64 - 3).collect()).collect()
    };
    let (a, b) = (values(64, &mut random), values(16, &mut random));
    let ta = write_k_major(&mut shared, 0, Swizzle::B32, F16, &a);
    let tb = write_k_major(&mut shared, 32768, Swizzle::B32, F16, &b);
    let (oa, ob) = (
        read_a(&shape, descriptor(&ta, 0, Swizzle::B32), &shared).unwrap(),
        read_b(&shape, descriptor(&tb, 0, Swizzle::B32), &shared).unwrap(),
    );
    let mut d = Accumulator::new(&shape);
    // 2048 + an odd sum needs a rounding to even, and only one.
    for warp in 0..4 {
        for register in 0..shape.d_registers() {
            d.load(warp, register, &[0x6800_6800; 32]);
        }
    }
    multiply(&shape, &oa, &ob, true, &mut d, Accumulation::Full).unwrap();
    for warp in 0..4 {
        for register in 0..shape.d_registers() {
            let got = d.store(warp, register);
            for lane in 0..32 {
                for half in 0..2 {
                    let (row, column) = accumulator_element(lane, 2 * register as u32 + half);
                    let sum: i64 = (0..16).map(|k| a[16 * warp + row as usize][k] * b[column as usize][k]).sum();
                    let expected = f32_to_f16((2048 + sum) as f32);
                    assert_eq!((got[lane as usize] >> (16 * half)) as u16, expected);
                }
            }
        }
    }
    // Without scale-d the accumulators are not read.
    multiply(&shape, &oa, &ob, false, &mut d, Accumulation::Full).unwrap();
    let sum: i64 = (0..16).map(|k| a[0][k] * b[0][k]).sum();
    assert_eq!(d.store(0, 0)[0] as u16, f32_to_f16(sum as f32));
}

#[test]
fn sums_stay_inside_the_bound_of_the_type() {
    let mut random = Random(0x5eed_0013);
    let shape = wgmma_shape(64, Bf16, F32);
    let mut shared = vec![0u8; 65536];
    let float = |bytes: &[u8]| f64::from(verdigris_tensor::num::bf16_to_f32(u16::from_le_bytes([bytes[0], bytes[1]])));
    for at in (0..shared.len()).step_by(2) {
        let x = (random.below(2000) as f32 - 1000.0) * 2f32.powi(random.below(12) as i32 - 6);
        shared[at..at + 2].copy_from_slice(&f32_to_bf16(x).to_le_bytes());
    }
    // No swizzle, core matrices behind each other: row r, depth k at (r/8)·256 + (k/8)·128 + (r%8)·16 + (k%8)·2.
    let at = |base: usize, r: usize, k: usize| base + (r / 8) * 256 + (k / 8) * 128 + (r % 8) * 16 + (k % 8) * 2;
    let field = |base: u64| base >> 4 | 8 << 16 | 16 << 32;
    let (a, b) = (read_a(&shape, field(0), &shared).unwrap(), read_b(&shape, field(16384), &shared).unwrap());
    let mut d = Accumulator::new(&shape);
    multiply(&shape, &a, &b, false, &mut d, Accumulation::Full).unwrap();
    for warp in 0..4 {
        for register in 0..shape.d_registers() {
            let got = d.store(warp, register);
            for lane in 0..32 {
                let (row, column) = accumulator_element(lane, register as u32);
                let terms =
                    (0..16).map(|k| float(&shared[at(0, 16 * warp + row as usize, k)..]) * float(&shared[at(16384, column as usize, k)..]));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()));
                let error = (f64::from(f32::from_bits(got[lane as usize] as u32)) - sum).abs();
                assert!(error <= 17.0 * 2f64.powi(-23) * size, "row {row} column {column}: error {error}");
            }
        }
    }
}

#[test]
fn hopper_accumulation_of_eight_bit_floats_drops_small_terms() {
    let shape = wgmma_shape(8, E4m3, F32);
    let mut shared = vec![0u8; 65536];
    // One product of 256, the others 2⁻⁶: below 2⁸⁻¹³ = 2⁻⁵, so they are cut off; in full accumulation they count.
    let one_row: Vec<Vec<i64>> = vec![vec![0; 32]; 64];
    let ta = write_k_major(&mut shared, 0, Swizzle::B32, E4m3, &one_row);
    let tb = write_k_major(&mut shared, 32768, Swizzle::B32, E4m3, &one_row[..8]);
    let code = |x: f32| f32_to_e4m3(x);
    for k in 0..32 {
        let value = if k == 0 { 16.0 } else { 0.125 };
        shared[swizzled(Swizzle::B32, 0, k)] = code(value);
        shared[swizzled(Swizzle::B32, 32768, k)] = code(value);
    }
    let (a, b) = (
        read_a(&shape, descriptor(&ta, 0, Swizzle::B32), &shared).unwrap(),
        read_b(&shape, descriptor(&tb, 0, Swizzle::B32), &shared).unwrap(),
    );
    let result = |accumulation| {
        let mut d = Accumulator::new(&shape);
        multiply(&shape, &a, &b, false, &mut d, accumulation).unwrap();
        f32::from_bits(d.store(0, 0)[0] as u32)
    };
    assert_eq!(result(Accumulation::Full), 256.0 + 31.0 / 64.0);
    assert_eq!(result(Accumulation::Hopper), 256.0);
}

#[test]
fn hopper_accumulation_of_wider_types_cuts_off_toward_zero_once_an_instruction() {
    let shape = wgmma_shape(8, Bf16, F32);
    let mut shared = vec![0u8; 65536];
    // No swizzle, core matrices behind each other: the elements of row 0 and of column 0 lie 8 in 16 bytes, then 128 bytes on.
    let place = |base: usize, k: usize| base + (k / 8) * 128 + (k % 8) * 2;
    let mut put = |at: usize, value: f32| shared[at..at + 2].copy_from_slice(&f32_to_bf16(value).to_le_bytes());
    for k in 0..16 {
        // A quarter of a unit in the last place of 1, sixteen times: each alone is lost to rounding, together they are four units.
        put(place(0, k), 0.25);
        put(place(16384, k), f32::EPSILON);
    }
    let field = |base: u64| base >> 4 | 8 << 16 | 16 << 32;
    let (a, b) = (read_a(&shape, field(0), &shared).unwrap(), read_b(&shape, field(16384), &shared).unwrap());
    let result = |start: f32, accumulation| {
        let mut d = Accumulator::new(&shape);
        let mut lanes = [0; 32];
        lanes[0] = u64::from(start.to_bits());
        d.load(0, 0, &lanes);
        multiply(&shape, &a, &b, true, &mut d, accumulation).unwrap();
        f32::from_bits(d.store(0, 0)[0] as u32)
    };
    assert_eq!(result(1.0, Accumulation::Full), 1.0);
    assert_eq!(result(1.0, Accumulation::Hopper), 1.0 + 4.0 * f32::EPSILON);
    // 8 + ½ unit in the last place of 8 is cut off; so is −8 + ½ unit, which is the number next to −8 and a half: toward zero.
    assert_eq!(result(8.0, Accumulation::Hopper), 8.0);
    assert_eq!(result(-8.0, Accumulation::Hopper), -8.0 + 4.0 * f32::EPSILON);
}

#[test]
fn chunks_of_the_usual_descriptor() {
    // The constant of a K-major 128-byte tile at 0x2000: rows of 128 bytes, eight rows a group.
    let descriptor = Descriptor::decode(0x4000_0040_0001_0000 | 0x2000 >> 4).unwrap();
    assert_eq!(descriptor, Descriptor { start_bytes: 0x2000, leading_bytes: 16, stride_bytes: 1024, swizzle: Swizzle::B128 });
    let chunks = operand_chunks(&descriptor, Major::K, 64, 32, 1 << 17).unwrap();
    assert_eq!(chunks[..6], [0x2000, 0x2010, 0x2090, 0x2080, 0x2120, 0x2130]);
    assert_eq!(chunks[2 * 63], 0x2000 + 63 * 128 + 7 * 16);
}
