//! The main loop that several probes share: tiles of A and B through a ring, a warpgroup for every 64 rows of the result.

use verdigris_kir::face::{Kernel, LoadOptions, Pointer, SharedPiece, TensorMap, Val, WgmmaA};
use verdigris_kir::inst::{Cache, MatrixType};
use verdigris_kir::ir::MapType;
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::operand::{Major, OperandTile};
use verdigris_kir::tile::ring::{Cursor, Ring, RingScope};

/// Threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;

/// A CTA's tile of `A·Bᵀ` in bf16: what shapes the kernels around this loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductTile {
    /// Rows of A and of the result: 64 for each warpgroup that multiplies.
    pub rows: u32,
    /// Rows of B, columns of the result: a multiple of 8.
    pub columns: u32,
    /// Stages of the ring.
    pub stages: u32,
}

impl ProductTile {
    /// Elements of depth in one stage.
    pub const DEPTH: u32 = 64;

    /// The tile of A: depth contiguous.
    pub fn a(&self) -> OperandTile {
        OperandTile { rows: self.rows, ty: MapType::Bf16, major: Major::Depth }
    }

    /// The tile of B: depth contiguous.
    pub fn b(&self) -> OperandTile {
        OperandTile { rows: self.columns, ty: MapType::Bf16, major: Major::Depth }
    }

    /// Warpgroups that multiply.
    pub fn consumers(&self) -> u32 {
        self.rows / 64
    }

    /// Threads of a CTA: the consumers and a warpgroup of helpers in front.
    pub fn threads(&self) -> u32 {
        WARPGROUP * (1 + self.consumers())
    }
}

/// The shared memory of the loop.
#[derive(Clone, Copy)]
pub(super) struct Product<'k> {
    kernel: Kernel<'k>,
    tile: ProductTile,
    a_slots: SharedPiece<'k>,
    b_slots: SharedPiece<'k>,
    pub(super) ring: Ring<'k>,
}

/// Which piece of a product: first row and column in elements, first step of depth and how many.
#[derive(Clone, Copy)]
pub(super) struct Piece<'k> {
    pub(super) row: Val<'k, u32>,
    pub(super) column: Val<'k, u32>,
    pub(super) batch: Val<'k, u32>,
    pub(super) first_step: Val<'k, u32>,
    pub(super) steps: Val<'k, u32>,
}

impl<'k> Product<'k> {
    pub(super) fn new(k: Kernel<'k>, tile: ProductTile) -> Self {
        Product {
            kernel: k,
            tile,
            a_slots: k.shared("a tiles", tile.stages * tile.a().bytes(), 1024),
            b_slots: k.shared("b tiles", tile.stages * tile.b().bytes(), 1024),
            ring: Ring::new(k, tile.stages, tile.consumers(), RingScope::Cta),
        }
    }

    /// By one thread.
    pub(super) fn load(&self, cursor: &Cursor<'k>, a: &TensorMap<'k>, b: &TensorMap<'k>, piece: Piece<'k>) {
        let (k, a_tile, b_tile) = (self.kernel, self.tile.a(), self.tile.b());
        let options = LoadOptions::default();
        k.range(piece.steps, |step| {
            let depth = (piece.first_step + step) * ProductTile::DEPTH;
            let full = cursor.acquire(a_tile.bytes() + b_tile.bytes());
            let stage = cursor.stage();
            let (a_slot, b_slot) = (self.a_slots.address() + stage * a_tile.bytes(), self.b_slots.address() + stage * b_tile.bytes());
            let all = k.constant(0);
            a_tile.load(a_slot, all, a_tile.rows, a, piece.row, depth, piece.batch, full, options);
            b_tile.load(b_slot, all, b_tile.rows, b, piece.column, depth, piece.batch, full, options);
            cursor.advance();
        });
    }

    /// By warpgroup `warpgroup` of those that multiply.
    pub(super) fn multiply(
        &self,
        cursor: &Cursor<'k>,
        sums: &Fragment<'k, f32>,
        steps: Val<'k, u32>,
        warpgroup: Val<'k, u32>,
        thread: Val<'k, u32>,
    ) {
        let (k, a_tile, b_tile) = (self.kernel, self.tile.a(), self.tile.b());
        let shape = wgmma_shape(self.tile.columns, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32);
        let a_low = a_tile.descriptor_base(self.a_slots.address(), warpgroup * 64);
        let b_low = b_tile.descriptor_base(self.b_slots.address(), 0u32);
        k.range(steps, |step| {
            cursor.wait();
            let stage = cursor.stage();
            let (a_stage, b_stage) = (a_low + stage * (a_tile.bytes() >> 4), b_low + stage * (b_tile.bytes() >> 4));
            k.wgmma_fence();
            for part in 0..4 {
                let a = a_tile.descriptor_from(a_stage + a_tile.advance(0, part));
                let b = b_tile.descriptor_from(b_stage + b_tile.advance(0, part));
                let adds = if part == 0 { step.gt(0) } else { k.constant(true) };
                k.wgmma(shape, sums.registers(), WgmmaA::Shared(a), b, adds);
            }
            k.wgmma_commit();
            k.wgmma_wait(0);
            cursor.release(stage, thread);
            cursor.advance();
        });
    }
}

/// Writes a fragment to row-major f32 memory, two neighbouring columns at a time: rows below `rows`, columns below `columns`, which is even.
pub(super) fn store_rows<'k>(
    sums: &Fragment<'k, f32>,
    d: Pointer<'k>,
    first: (Val<'k, u32>, Val<'k, u32>),
    extent: (Val<'k, u32>, Val<'k, u32>),
    thread: Val<'k, u32>,
) {
    let k = thread.kernel();
    let column = first.1 + Fragment::<f32>::column(thread);
    for half in 0..2 {
        let row = first.0 + Fragment::<f32>::row(thread) + 8 * half;
        let start = d.moved(row.mul_wide(extent.1) * 4u64);
        for block in 0..sums.columns() / 8 {
            let column = column + 8 * block;
            k.when(row.lt(extent.0) & column.lt(extent.1), || {
                let pair = [0, 1].map(|odd| sums.element(block, half, odd).get());
                k.st_global_vector(start.at(column, 4), 0, &pair, Cache::Default);
            });
        }
    }
}
