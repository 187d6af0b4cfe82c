//! Which element of a matrix stands in which register of which lane.
//!
//! Source: PTX ISA, the fragment figures of `mma` and `wgmma`. All dense shapes follow one pattern. Lanes form 8 groups of 4; a lane has
//! group `g = lane / 4` and place `t = lane % 4`; a 32-bit register holds `e = 32 / bits` elements (one for f64).

use super::super::alu::Lanes;

/// Row (M) and depth (K) of element `index` of A register `register`. Also the A registers of `wgmma`, with rows from the warp's first.
#[inline(always)]
pub const fn a_element(bits: u32, m: u32, register: u32, lane: u32, index: u32) -> (u32, u32) {
    let per_register = if bits >= 32 { 1 } else { 32 / bits };
    let (group, place) = (lane / 4, lane % 4);
    // Two registers cover 16 rows, one covers 8; then the pattern repeats along K.
    let (row, chunk) = if m == 16 { (group + 8 * (register % 2), register / 2) } else { (group, register) };
    (row, place * per_register + index + chunk * 4 * per_register)
}

/// Depth (K) and column (N) of element `index` of B register `register`.
#[inline(always)]
pub const fn b_element(bits: u32, register: u32, lane: u32, index: u32) -> (u32, u32) {
    let per_register = if bits >= 32 { 1 } else { 32 / bits };
    ((lane % 4) * per_register + index + register * 4 * per_register, lane / 4)
}

/// Row and column of accumulator element `index` of a lane, counted over its registers (an f16x2 register holds elements 2r and 2r + 1):
/// `mma` with 16 rows, and each warp of a `wgmma` with its 16 rows. With 8 rows (`m == 8`) only elements 0 and 1 exist.
#[inline(always)]
pub const fn accumulator_element(lane: u32, index: u32) -> (u32, u32) {
    (lane / 4 + 8 * (index / 2 % 2), 8 * (index / 4) + 2 * (lane % 4) + index % 2)
}

/// The register that `ldmatrix` gives each lane for one 8×8 matrix of 16-bit elements whose rows are given.
///
/// Lane `l` holds elements `2·(l % 4)` and the next of row `l / 4`; transposed, of column `l / 4`. Row `r` of matrix `i` comes from the
/// address in lane `8·i + r`.
pub fn ldmatrix(rows: &[[u8; 16]; 8], transpose: bool) -> Lanes {
    let element = |row: usize, column: usize| u64::from(u16::from_le_bytes([rows[row][2 * column], rows[row][2 * column + 1]]));
    std::array::from_fn(|lane| {
        let (major, minor) = (lane / 4, 2 * (lane % 4));
        if transpose {
            element(minor, major) | element(minor + 1, major) << 16
        } else {
            element(major, minor) | element(major, minor + 1) << 16
        }
    })
}

/// The rows that `stmatrix` writes for one 8×8 matrix held in a register: the inverse of [`ldmatrix`].
pub fn stmatrix(register: &Lanes, transpose: bool) -> [[u8; 16]; 8] {
    let mut rows = [[0; 16]; 8];
    for (lane, word) in register.iter().enumerate() {
        for half in 0..2 {
            let (major, minor) = (lane / 4, 2 * (lane % 4) + half);
            let (row, column) = if transpose { (minor, major) } else { (major, minor) };
            let bytes = ((word >> (16 * half)) as u16).to_le_bytes();
            rows[row][2 * column..2 * column + 2].copy_from_slice(&bytes);
        }
    }
    rows
}

/// `movmatrix`: the transposed 8×8 matrix.
pub fn movmatrix(register: &Lanes) -> Lanes {
    ldmatrix(&stmatrix(register, false), true)
}
