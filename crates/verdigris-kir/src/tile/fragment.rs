//! Register tiles with their layout.

use std::panic::Location;

use crate::face::{AsVal, Kernel, Scalar, Val, Var};
use crate::inst::{MatrixType, Packed, WgmmaShape};

/// The accumulator of a `wgmma` of 64 rows and `columns` columns, spread over a warpgroup: one register of a thread for each element it holds.
///
/// Register `i` of lane `l` of warp `w` holds row `16w + l/4 + 8·(i/2 mod 2)`, column `8·(i/4) + 2·(l mod 4) + i mod 2`.
/// Source: PTX ISA, "Register fragments for wgmma.mma_async.m64nNk…".
#[derive(Clone, Debug)]
pub struct Fragment<'k, T> {
    kernel: Kernel<'k>,
    columns: u32,
    registers: Vec<Var<'k, T>>,
}

impl<'k, T: Scalar> Fragment<'k, T> {
    /// A fragment without values: to be written by a `wgmma` that does not add.
    #[track_caller]
    pub fn unset(k: Kernel<'k>, columns: u32) -> Self {
        let registers = (0..columns / 2).map(|_| k.var_unset(None)).collect();
        Fragment { kernel: k, columns, registers }
    }

    /// A fragment with the same value everywhere.
    #[track_caller]
    pub fn filled(k: Kernel<'k>, columns: u32, value: impl AsVal<'k, T>) -> Self {
        let fragment = Self::unset(k, columns);
        for register in &fragment.registers {
            register.set(value);
        }
        fragment
    }

    /// Columns.
    pub fn columns(&self) -> u32 {
        self.columns
    }

    /// All registers, in the order of the instruction.
    pub fn registers(&self) -> &[Var<'k, T>] {
        &self.registers
    }

    /// The register of the element in row `l/4 + 8·half` and column `8·block + 2·(l mod 4) + odd`.
    pub fn element(&self, block: u32, half: u32, odd: u32) -> Var<'k, T> {
        self.registers[(4 * block + 2 * half + odd) as usize]
    }

    /// The row (within the 64) of this thread's elements in half 0; half 1 is 8 below. `thread` is the index in the warpgroup.
    #[track_caller]
    pub fn row(thread: Val<'k, u32>) -> Val<'k, u32> {
        ((thread >> 5) << 4) + ((thread & 31) >> 2)
    }

    /// The column of this thread's first element in block 0.
    #[track_caller]
    pub fn column(thread: Val<'k, u32>) -> Val<'k, u32> {
        (thread & 3) << 1
    }

    /// Replaces every element by a function of it, in place: `f(value, half, block)`.
    #[track_caller]
    pub fn map_in_place(&self, f: impl Fn(Val<'k, T>, u32, u32) -> Val<'k, T>) {
        for (i, register) in self.registers.iter().enumerate() {
            let i = i as u32;
            register.set(f(register.get(), i / 2 % 2, i / 4));
        }
    }
}

impl<'k> Fragment<'k, f32> {
    /// Sum, maximum or another associative function over each of the thread's two rows: first its own elements, then the four lanes that
    /// share the row. `combine` must be commutative.
    #[track_caller]
    pub fn reduce_rows(&self, combine: impl Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>) -> [Val<'k, f32>; 2] {
        self.kernel.scope_around(Location::caller(), |caller| {
            let combine = |a, b| caller.run(|| combine(a, b));
            [0, 1].map(|half| {
                let own = self.reduce_own(half, combine);
                let pair = combine(own, self.kernel.shfl_bfly(own, 1));
                combine(pair, self.kernel.shfl_bfly(pair, 2))
            })
        })
    }

    /// The same over this thread's own elements of a row half, without the exchange.
    #[track_caller]
    pub fn reduce_own(&self, half: u32, combine: impl Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>) -> Val<'k, f32> {
        let mut result: Option<Val<'k, f32>> = None;
        for block in 0..self.columns / 8 {
            for odd in 0..2 {
                let value = self.element(block, half, odd).operand_val(self.kernel);
                result = Some(match result {
                    Some(so_far) => combine(so_far, value),
                    None => value,
                });
            }
        }
        result.unwrap_or_else(|| self.kernel.constant(0.0))
    }

    /// The elements of columns `16·step .. 16·step + 16`, rounded to halves, as the A operand of a following `wgmma` step: the accumulator
    /// layout is the operand layout, so nothing moves between lanes.
    #[track_caller]
    pub fn pack_a(&self, step: u32, to: Packed) -> [Val<'k, u32>; 4] {
        self.kernel.scope(Location::caller(), || {
            [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(block, half)| {
                let low = self.element(2 * step + block, half, 0);
                let high = self.element(2 * step + block, half, 1);
                self.kernel.pack(to, low, high)
            })
        })
    }

    /// The elements of columns `32·step .. 32·step + 32`, rounded to numbers of a byte, as the A operand of a following `wgmma` step whose B has its depth in
    /// another order, so that nothing moves between lanes: position `4t + e` of 16 stands for column `8·(e/2) + 2t + e mod 2`.
    #[track_caller]
    pub fn pack_a_bytes(&self, step: u32, to: Packed) -> [Val<'k, u32>; 4] {
        self.kernel.scope(Location::caller(), || {
            [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(sixteen, half)| {
                let pair = |block: u32| {
                    let block = 2 * (2 * step + sixteen) + block;
                    self.kernel.pack::<u16>(to, self.element(block, half, 0), self.element(block, half, 1))
                };
                self.kernel.join16(pair(0), pair(1))
            })
        })
    }
}

/// A dense product shape with f32 or s32 accumulation and both operands in shared memory.
pub const fn wgmma_shape(columns: u32, a: MatrixType, b: MatrixType, d: MatrixType) -> WgmmaShape {
    WgmmaShape {
        n: columns,
        a,
        b,
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
