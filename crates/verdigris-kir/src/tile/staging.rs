//! From registers to global memory: a warpgroup's stage of 64 rows by 128 (or 64) bytes under the swizzle of that span, stored by
//! TMA.

use crate::face::{AsVal, Kernel, SharedPiece, TensorMap, Val};
use crate::inst::BulkReduce;
use crate::ir::{Access, MapDecl, MapType, Swizzle};
use std::panic::Location;

/// Rows of one stage.
pub const STAGE_ROWS: u32 = 64;

/// Bytes of one stage with rows of 128 bytes.
pub const STAGE_BYTES: u32 = STAGE_ROWS * 128;

/// The stages of each warpgroup that stores.
#[derive(Clone, Copy, Debug)]
pub struct Staging<'k> {
    kernel: Kernel<'k>,
    piece: SharedPiece<'k>,
    /// Stages that a warpgroup has, used in turn.
    stages: u32,
    /// First named barrier; warpgroup `w` uses `barrier + w`.
    barrier: u32,
    /// Bytes of a stage's row: 128 or 64.
    row_bytes: u32,
}

/// The tensor map through which stages of `rows` rows are stored: rank 3, `{columns, rows, batch}`.
pub fn store_map(ty: MapType, rows: u32) -> MapDecl {
    store_map_with_rows(ty, rows, 128)
}

/// The same for rows of `row_bytes`: 128 or 64.
pub fn store_map_with_rows(ty: MapType, rows: u32, row_bytes: u32) -> MapDecl {
    let swizzle = if row_bytes == 64 { Swizzle::B64 } else { Swizzle::B128 };
    MapDecl { ty, rank: 3, box_dims: vec![row_bytes / ty.bytes(), rows, 1], im2col: false, swizzle, access: Access::Write }
}

impl<'k> Staging<'k> {
    /// Room for `warpgroups` times `stages` stages with rows of 128 bytes.
    #[track_caller]
    pub fn new(k: Kernel<'k>, warpgroups: u32, stages: u32, barrier: u32) -> Self {
        Self::with_rows(k, warpgroups, stages, barrier, 128)
    }

    /// The same with rows of `row_bytes`: 128, or 64 for tiles whose width is an odd number of 64 bytes.
    #[track_caller]
    pub fn with_rows(k: Kernel<'k>, warpgroups: u32, stages: u32, barrier: u32, row_bytes: u32) -> Self {
        let piece = k.shared("staging", warpgroups * stages * STAGE_ROWS * row_bytes, 1024);
        Staging { kernel: k, piece, stages, barrier, row_bytes }
    }

    /// Stages in a piece of shared memory that is there already: `stages` for each warpgroup, with rows of 128 bytes. Whoever shares the piece says when it
    /// may be written.
    pub fn within(k: Kernel<'k>, piece: SharedPiece<'k>, stages: u32, barrier: u32) -> Self {
        Staging { kernel: k, piece, stages, barrier, row_bytes: 128 }
    }

    /// The address of 16-byte chunk `chunk` of row `row`, both as the swizzle has them.
    #[track_caller]
    pub fn place(&self, stage: Val<'k, u32>, row: Val<'k, u32>, chunk: Val<'k, u32>) -> Val<'k, u32> {
        self.kernel.scope(Location::caller(), || {
            let pattern = if self.row_bytes == 64 { (row >> 1) & 3 } else { row & 7 };
            stage + row * self.row_bytes + ((chunk ^ pattern) << 4)
        })
    }

    /// Stages of a warpgroup.
    pub fn stages(&self) -> u32 {
        self.stages
    }

    /// Bytes of a stage's row.
    pub fn row_bytes(&self) -> u32 {
        self.row_bytes
    }

    /// The address of stage `stage` of warpgroup `warpgroup`.
    #[track_caller]
    pub fn stage(&self, warpgroup: Val<'k, u32>, stage: u32) -> Val<'k, u32> {
        let bytes = STAGE_ROWS * self.row_bytes;
        self.piece.address() + warpgroup * (self.stages * bytes) + stage * bytes
    }

    /// Waits until the warpgroup may write a stage again, the last `in_use` of its stores still being on their way. All its threads call
    /// it.
    #[track_caller]
    pub fn acquire(&self, warpgroup: Val<'k, u32>, thread: Val<'k, u32>, in_use: u32) {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            k.when(thread.eq(0), || k.bulk_wait_read(in_use));
            k.barrier_sync(warpgroup + self.barrier, 128);
        });
    }

    /// The same for the stage of turn `turn` of the `turns` that each tile takes: stage `turn mod stages`, where the next tile starts at
    /// stage 0 again. What may still be on its way follows from the count.
    #[track_caller]
    pub fn acquire_turn(&self, warpgroup: Val<'k, u32>, thread: Val<'k, u32>, turn: u32, turns: u32) {
        let in_use = if turn >= self.stages {
            self.stages - 1
        } else {
            let last = (0..turns).rev().find(|&earlier| earlier % self.stages == turn % self.stages).unwrap_or(turn);
            turn + turns - 1 - last
        };
        self.kernel.scope(Location::caller(), || self.acquire(warpgroup, thread, in_use));
    }

    /// Writes 16 columns of 16-bit elements: four registers as [`Fragment::pack_a`](super::fragment::Fragment::pack_a) gives them, to
    /// 16-byte chunks `2·pair` and `2·pair + 1` of each row.
    #[track_caller]
    pub fn write_halves(&self, stage: Val<'k, u32>, thread: Val<'k, u32>, pair: u32, values: &[Val<'k, u32>; 4]) {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            let lane = thread & 31;
            // Lane 8i + r names row r of matrix i: rows 0–7 and 8–15 of the first chunk, then of the second.
            let row = ((thread >> 5) << 4) + (lane & 15);
            let chunk = (lane >> 4) + 2 * pair;
            let address = self.place(stage, row, chunk);
            // `pack_a` orders by column block, then row half: just the order of the matrices.
            k.stmatrix(false, address, 0, values);
        });
    }

    /// Writes 16 columns of 16-bit elements of the transposed tile: the fragment's rows are the stage's columns. The stage's rows are the
    /// fragment's columns `16·pair ..`; its 64 columns are the fragment's 64 rows.
    #[track_caller]
    pub fn write_halves_transposed(&self, stage: Val<'k, u32>, thread: Val<'k, u32>, pair: u32, values: &[Val<'k, u32>; 4]) {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            let lane = thread & 31;
            // Matrices: (block 0, half 0), (block 0, half 1), (block 1, half 0), (block 1, half 1), each transposed on the way: matrix i
            // lands in stage rows 8·(i/2) .. and in the chunk of fragment rows 16·warp + 8·(i mod 2).
            let matrix = lane >> 3;
            let row = ((matrix >> 1) << 3) + (lane & 7) + 16 * pair;
            let chunk = ((thread >> 5) << 1) + (matrix & 1);
            let address = self.place(stage, row, chunk);
            k.stmatrix(true, address, 0, values);
        });
    }

    /// Writes two neighbouring 32-bit elements of row `row`, at column `column` of the stage's 32.
    #[track_caller]
    pub fn write_pair(&self, stage: Val<'k, u32>, row: Val<'k, u32>, column: Val<'k, u32>, values: &[Val<'k, u32>; 2]) {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            let chunk = column >> 2;
            let address = self.place(stage, row, chunk) + ((column & 3) << 2);
            k.st_shared_vector(address, 0, values);
        });
    }

    /// Reads 16-byte chunk `chunk` of row `row`: four words.
    #[track_caller]
    pub fn read_chunk(&self, stage: Val<'k, u32>, row: Val<'k, u32>, chunk: Val<'k, u32>) -> Vec<Val<'k, u32>> {
        let k = self.kernel;
        k.scope(Location::caller(), || k.ld_shared_vector(self.place(stage, row, chunk), 0, 4))
    }

    /// Hands a written stage to TMA: it lands at `column`, `row` of the tensor. All threads of the warpgroup call it.
    #[allow(clippy::too_many_arguments, reason = "a store names both ends of the copy")]
    #[track_caller]
    pub fn store(
        &self,
        stage: Val<'k, u32>,
        warpgroup: Val<'k, u32>,
        thread: Val<'k, u32>,
        map: &TensorMap<'k>,
        column: Val<'k, u32>,
        row: Val<'k, u32>,
        batch: impl AsVal<'k, u32>,
    ) {
        let k = self.kernel;
        let batch = batch.operand_val(k);
        k.scope(Location::caller(), || {
            self.hand_over(warpgroup, thread, || k.tma_store(map, &[column.signed(), row.signed(), batch.signed()], stage));
        });
    }

    /// The same, but that the stage is added to the tensor where `adds` holds, which is alike for all threads: of numbers of f32.
    #[allow(clippy::too_many_arguments, reason = "a store names both ends of the copy")]
    #[track_caller]
    pub fn store_or_add(
        &self,
        adds: Val<'k, bool>,
        stage: Val<'k, u32>,
        warpgroup: Val<'k, u32>,
        thread: Val<'k, u32>,
        map: &TensorMap<'k>,
        column: Val<'k, u32>,
        row: Val<'k, u32>,
        batch: impl AsVal<'k, u32>,
    ) {
        let k = self.kernel;
        let at = [column.signed(), row.signed(), batch.operand_val(k).signed()];
        k.scope(Location::caller(), || {
            self.hand_over(warpgroup, thread, || {
                k.when_else(adds, || k.tma_reduce(BulkReduce::Add, map, &at, stage), || k.tma_store(map, &at, stage));
            });
        });
    }

    /// Makes what the warpgroup has written visible to TMA, and has one thread give the order.
    #[track_caller]
    fn hand_over(&self, warpgroup: Val<'k, u32>, thread: Val<'k, u32>, order: impl Fn()) {
        let k = self.kernel;
        k.scope_around(Location::caller(), |caller| {
            k.fence_proxy_async();
            k.barrier_sync(warpgroup + self.barrier, 128);
            k.when(thread.eq(0), || {
                caller.run(&order);
                k.bulk_commit();
            });
        });
    }

    /// Waits until everything stored by the warpgroup is in global memory; before the kernel ends.
    #[track_caller]
    pub fn finish(&self, thread: Val<'k, u32>) {
        let k = self.kernel;
        k.scope(Location::caller(), || k.when(thread.eq(0), || k.bulk_wait(0)));
    }
}
