//! What kernels with a main loop agree on about their epilogue: its part of a spec, and when its stores suit a tile.

use verdigris_graph::GemmProblem;
use verdigris_tensor::DType;

use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::store::{Out, StoreSpec};

/// The operand and result types that catalogs hold, and whether sums are promoted. Other results and fused chains are made when asked for.
pub(crate) const TYPES: &[(DType, DType, bool)] = &[
    (DType::Bf16, DType::Bf16, false),
    (DType::F16, DType::F16, false),
    (DType::F32, DType::F32, false),
    (DType::E4m3, DType::Bf16, false),
    (DType::E4m3, DType::Bf16, true),
    (DType::I8, DType::I32, false),
];

/// What stands between the sums of a product and D, where the epilogue stores D element by element, or others store it.
pub(crate) fn epilogue_of(product: &GemmProblem, stores_d: bool) -> EpilogueSpec {
    let whole = EpilogueSpec::of(product);
    // Pairs of columns are guarded by their second one. Without operands and random numbers there is nothing for a pair to save, and one kernel serves both.
    let pairs = whole.pairs && product.n.is_multiple_of(2) && (whole.reads_memory() || whole.draws() || stores_d);
    // Nor does it matter how D lies where others store it.
    let d = if stores_d { whole.d } else { OperandSpec { walk: Walk::Row, ..whole.d } };
    EpilogueSpec { stores_d, pairs, d, ..whole }
}

/// Whether TMA writes whole panels of D, where it leaves through such.
pub(crate) fn stores_whole_panels(store: &StoreSpec) -> bool {
    let d_bytes = store.epilogue.d.dtype.bytes() as u32;
    let panel_bytes = if d_bytes == 2 { 64 } else { 128 };
    store.transposed || !matches!(store.out, Out::Tma | Out::Scattered) || (store.tile_columns * d_bytes).is_multiple_of(panel_bytes)
}

/// Bytes of a result that one store takes; `element_bytes` where results leave element by element.
pub(crate) fn store_bytes(out: Out, element_bytes: usize) -> f64 {
    match out {
        Out::Tma => 16.0,
        Out::Rows => 8.0,
        Out::Scattered | Out::Direct => element_bytes as f64,
    }
}
