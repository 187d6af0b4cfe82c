//! A row's normalization by a cluster: `y = (x − mean) / √(variance + ε) · gamma`, each CTA holding its part of the row in registers.
//!
//! The row is read once. Sums meet in distributed shared memory: the mean by stores that complete on the receiver's mbarrier, the variance
//! (of centred values) by bulk copies of every warp's part. The order of addition is that of the ranks, so results repeat.
//!
//! Source: PTX ISA 9.0, "st.async", "cp.async.bulk"; Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983, for two
//! passes.

use super::{Allowances, Probe};
use verdigris_kir::face::{Header, Kernel, Val, Var, build as build_kernel};
use verdigris_kir::inst::{Cache, Special};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::tile::cluster::ClusterExchange;
use verdigris_kir::tile::reduce;
use verdigris_kir::tile::ring::publish_barriers;

/// Warps of a CTA; a sum of each makes one bulk copy.
const WARPS: u32 = 4;
/// Threads of a CTA.
const THREADS: u32 = 32 * WARPS;

/// What shapes the kernel.
///
/// Parameters: `x` f32 `[rows][columns]`, `gamma` f32 `[columns]`, `y` like x; `rows`, `columns` (a multiple of 4), `part`: columns of one CTA, a
/// multiple of 4 with `cluster · part ≥ columns` and `part ≤ 512 · vectors`; `inverse_columns`, `epsilon`. The grid is a number of clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// CTAs of a cluster.
    pub cluster: u32,
    /// Vectors of four elements that a thread holds.
    pub vectors: u32,
}

impl Spec {
    /// Rows of up to 8192 elements.
    pub const FULL: Spec = Spec { cluster: 4, vectors: 4 };

    /// Builds the kernel.
    pub fn build(&self) -> KernelBody {
        let name = format!("probe_cluster_norm_x{}_v{}", self.cluster, self.vectors);
        build_kernel(Header { name, target: Target::Sm90a, threads: THREADS, min_ctas: 1, cluster: self.cluster }, |k| kernel(k, self))
    }
}

pub(super) fn probe() -> Probe {
    Probe {
        name: "cluster_norm",
        build: || Spec::FULL.build(),
        allowances: Allowances { wgmma_stages: 0 },
        what_it_shows: "addresses and mbarriers of other CTAs; st.async and bulk copies that complete on them by bytes; a loop of turns \
                        without a barrier of the cluster; exit held until peers are done",
    }
}

fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let (x, gamma, y) = (k.input("x", 16), k.input("gamma", 16), k.output("y", 16));
    let (rows, columns, part) = (k.scalar::<u32>("rows"), k.scalar::<u32>("columns"), k.scalar::<u32>("part"));
    let (inverse_columns, epsilon) = (k.scalar::<f32>("inverse_columns"), k.scalar::<f32>("epsilon"));
    let scratch = k.shared("warp sums", 4 * WARPS, 16);
    // One for each turn that may be under way.
    let squares = k.shared("warp squares", 2 * 4 * WARPS, 16);
    let sums = ClusterExchange::new(k, "sums of all", 4);
    let parts = ClusterExchange::new(k, "squares of all", 4 * WARPS);
    let (thread, lane, rank) = (k.thread(), k.lane(), k.cluster_rank());
    k.when(thread.eq(0), || {
        sums.init();
        parts.init();
    });
    publish_barriers(k);

    let add = |a: Val<'k, f32>, b: Val<'k, f32>| a + b;
    let add_all = |from: Val<'k, u32>, words: u32| {
        let words: Vec<Val<'k, f32>> = (0..words).map(|word| k.ld_shared::<f32>(from, i64::from(4 * word))).collect();
        words.into_iter().reduce(add).unwrap_or_else(|| k.constant(0.0))
    };
    let first = rank * part;
    let end = (first + part).min(columns);
    let values: Vec<[Var<'k, f32>; 4]> = (0..spec.vectors).map(|_| [0; 4].map(|_| k.var_unset(Some("x")))).collect();
    let column = |vector: u32| first + (thread << 2) + 4 * THREADS * vector;
    let turn = k.var_named("turn", 0u32);

    k.range_step(k.special(Special::ClusterX), rows, k.special(Special::ClustersX), |row| {
        let now = turn.get();
        let from = x.moved(row.mul_wide(columns) * 4u64);
        for (vector, four) in (0..).zip(&values) {
            let column = column(vector);
            four.iter().for_each(|value| value.set(0.0));
            k.when(column.lt(end), || {
                for (value, loaded) in four.iter().zip(k.ld_global_vector::<f32>(from.at(column, 4), 0, 4, Cache::Streaming)) {
                    value.set(loaded);
                }
            });
        }
        sums.acquire(now);
        parts.acquire(now);
        let own = values.iter().flatten().map(|value| value.get()).reduce(add).unwrap_or_else(|| k.constant(0.0));
        let own = reduce::cta(k, scratch, WARPS, own, 0.0, add);
        k.when(thread.eq(0), || {
            k.st_shared(sums.own(now), 0, own);
            sums.expect(now);
        });
        let to_peer = thread.lt(spec.cluster) & thread.ne(rank);
        k.when(to_peer, || sums.send_words(now, thread, &[own]));
        let mean = add_all(sums.receive(now), spec.cluster) * inverse_columns;

        let square = k.var(0.0f32);
        for (vector, four) in (0..).zip(&values) {
            k.when(column(vector).lt(end), || {
                for value in four {
                    value.set(*value - mean);
                    square.set(k.fma(*value, *value, square));
                }
            });
        }
        let own = reduce::warp(k, square, add);
        let message = squares.address() + (now & 1) * (4 * WARPS);
        k.when(lane.eq(0), || {
            let place = (thread >> 5) << 2;
            k.st_shared(message + place, 0, own);
            k.st_shared(parts.own(now) + place, 0, own);
            k.fence_proxy_async();
        });
        k.bar_sync();
        k.when(thread.eq(0), || parts.expect(now));
        k.when(to_peer, || parts.send_bytes(now, thread, message));
        let variance = add_all(parts.receive(now), spec.cluster * WARPS) * inverse_columns;
        let scale = (variance + epsilon).rsqrt();
        k.bar_sync();
        sums.release(now, thread);
        parts.release(now, thread);

        let to = y.moved(row.mul_wide(columns) * 4u64);
        for (vector, four) in (0..).zip(&values) {
            let column = column(vector);
            k.when(column.lt(end), || {
                let gammas = k.ld_global_vector::<f32>(gamma.at(column, 4), 0, 4, Cache::NonCoherent);
                let results: Vec<Val<'k, f32>> = four.iter().zip(gammas).map(|(value, gamma)| *value * scale * gamma).collect();
                k.st_global_vector(to.at(column, 4), 0, &results, Cache::Default);
            });
        }
        turn.set(turn + 1);
    });
    // What this CTA sent is read by its peers, and what they send arrives here.
    k.cluster_sync();
}
