//! What the products need of each query beside its rows: `Σ d_o · o`, and the logarithm of its sum of exponentials in powers of 2.

use std::f32::consts::LOG2_E;
use std::fmt;

use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::KernelRef;

use super::super::super::half::Half;
use super::super::super::ragged::OffsetsIfAnyArgs;
use super::super::tiles::RowsArgs;

const WARPS: u32 = 8;
/// Queries of a warp, all of whose loads are on their way at a time.
const ROWS: u32 = 4;
/// Queries of a CTA.
pub(super) const QUERIES: u32 = WARPS * ROWS;
/// Words of two elements that a warp takes at a time, and how often at most.
const WORDS: u32 = 32;
const PASSES: u32 = 4;

/// The kernel of a type.
#[derive(Clone, Copy)]
pub(super) struct Numbers(pub(super) Half);

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attention_mma_gradient_rows_{}", self.0.name())
    }
}

verdigris_kir::parameters! {
    pub(super) struct Params / ParamsArgs of () as _spec {
        pub(super) o: RowsArgs = 4,
        pub(super) d_o: RowsArgs = 4,
        pub(super) log_sum_exp: Read = 4,
        pub(super) log_sum_exp_strides: [u64; 3],
        /// f32, `[batch][head][query]`.
        pub(super) lse_log2: Write = 4,
        pub(super) delta: Write = 4,
        pub(super) queries: u32,
        /// Blocks of queries of a head.
        pub(super) blocks: Divide,
        pub(super) heads: Divide,
        pub(super) offsets: OffsetsIfAnyArgs = (),
    }
}

impl Numbers {
    pub(super) fn kernel(self) -> KernelRef {
        let header = Header { name: self.to_string(), target: Target::Sm80, threads: 32 * WARPS, min_ctas: 4, cluster: 1 };
        KernelRef::new(self.to_string(), move || build(header.clone(), |k| numbers(k, self.0)))
    }
}

/// A block of queries a CTA. Those that attend to nothing get `+∞` for their logarithm: then `2^(s − L)` is 0 for each of their scores.
fn numbers<'k>(k: Kernel<'k>, ty: Half) {
    let params = Params::declare(k, &());
    let (outer, block) = params.blocks.split(k.cta());
    let (batch, head) = params.heads.split(outer);
    let [own, _] = params.offsets.of_batch(k, batch, [params.queries, k.constant(0)]);
    let [of_batch, _] = params.offsets.tensor_batches(k, batch);
    let first = block * QUERIES + (k.thread() >> 5) * ROWS;
    k.stop_when((block * QUERIES).ge(own.count));
    let lane = k.lane();
    let queries: Vec<Val<'k, u32>> = (0..ROWS).map(|i| (first + i).min(own.count - 1)).collect();
    let at = |[batch, head_bytes, row_bytes]: [Val<'k, u64>; 3], query: Val<'k, u32>| {
        of_batch.widen() * batch + head.widen() * head_bytes + (own.begin + query).widen() * row_bytes
    };
    let sums: Vec<_> = queries.iter().map(|_| k.var(0.0f32)).collect();
    let words = params.o.bytes >> 2;
    for pass in 0..PASSES {
        k.when(words.gt(pass * WORDS), || {
            let word = lane + pass * WORDS;
            let counts = word.lt(words);
            let word = word.min(words - 1);
            let load = |&query: &Val<'k, u32>| {
                [&params.o, &params.d_o].map(|of| k.ld_global::<u32>(of.at.moved(at(of.strides, query)).at(word, 4), 0))
            };
            let loaded: Vec<_> = queries.iter().map(load).collect();
            for (sum, [o, d_o]) in sums.iter().zip(loaded) {
                let ((o_low, o_high), (d_low, d_high)) = (k.split16(o), k.split16(d_o));
                for (o, d_o) in [(o_low, d_low), (o_high, d_high)] {
                    // What is loaded in place of elements that are not there counts once already.
                    sum.set(k.select(counts, k.fma(ty.widen(k, o), ty.widen(k, d_o), *sum), *sum));
                }
            }
        });
    }
    for distance in [16, 8, 4, 2, 1] {
        sums.iter().for_each(|sum| sum.set(*sum + k.shfl_bfly::<f32>(*sum, distance)));
    }
    for (i, sum) in (0..).zip(&sums) {
        let query = first + i;
        k.when(lane.eq(i) & query.lt(own.count), || {
            let logarithm = k.ld_global::<f32>(params.log_sum_exp.moved(at(params.log_sum_exp_strides, query)).address(), 0) * LOG2_E;
            let number = outer * params.queries + query;
            // Finite logarithms next to −∞ may become it.
            k.st_global(params.lse_log2.at(number, 4), 0, k.select(logarithm.eq(f32::NEG_INFINITY), f32::INFINITY, logarithm));
            k.st_global(params.delta.at(number, 4), 0, sum.get());
        });
    }
}
