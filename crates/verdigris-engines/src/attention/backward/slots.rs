//! Shared memory that loads go to, and the warp that loads.

use verdigris_kir::face::{Kernel, LoadOptions, SharedPiece, Val};
use verdigris_kir::tile::ring::{Cursor, Ring, RingScope};

use super::kernel::{CONSUMER_THREADS, Params, Tile, meet};
use super::spec::{CONSUMERS, NUMBERS_BYTES, QUERIES, Spec};
use crate::hopper::roles;

/// Where the loads go.
pub(super) struct Slots<'k> {
    pub(super) keys: SharedPiece<'k>,
    pub(super) values: SharedPiece<'k>,
    pub(super) queries: SharedPiece<'k>,
    pub(super) d_o: SharedPiece<'k>,
    pub(super) lse: SharedPiece<'k>,
    pub(super) delta: SharedPiece<'k>,
    pub(super) tile: SharedPiece<'k>,
    pub(super) q_ring: Ring<'k>,
    pub(super) d_o_ring: Ring<'k>,
}

impl<'k> Slots<'k> {
    pub(super) fn new(k: Kernel<'k>, spec: &Spec) -> Self {
        Slots {
            keys: k.shared("keys", spec.key_tile().bytes(), 1024),
            values: k.shared("values", spec.value_tile().bytes(), 1024),
            queries: k.shared("queries", spec.stages * spec.query_tile().bytes(), 1024),
            d_o: k.shared("gradients of results", spec.stages * spec.result_tile().bytes(), 1024),
            lse: k.shared("log-sum-exp", spec.stages * NUMBERS_BYTES, 128),
            delta: k.shared("delta", spec.stages * NUMBERS_BYTES, 128),
            tile: k.shared("tile", 4, 4),
            q_ring: Ring::new(k, spec.stages, CONSUMERS, RingScope::Cta),
            d_o_ring: Ring::new(k, spec.stages, CONSUMERS, RingScope::Cta),
        }
    }

    /// The start of all threads.
    pub(super) fn start(&self, k: Kernel<'k>, params: &Params<'k>) {
        let init = || {
            [self.q_ring, self.d_o_ring].iter().for_each(|ring| ring.init());
            [&params.q, &params.k, &params.v, &params.d_o].into_iter().for_each(|map| k.prefetch_tensormap(map));
        };
        roles::start(k, init, || {});
    }

    /// The warp that loads: queries, gradients of results and their numbers, a block of a head after the other. Keys land with the first queries, values with
    /// the first gradients.
    pub(super) fn load(&self, k: Kernel<'k>, spec: &Spec, params: &Params<'k>, tile: &Tile<'k>) {
        let (key_tile, value_tile, query_tile, result_tile) = (spec.key_tile(), spec.value_tile(), spec.query_tile(), spec.result_tile());
        let (q_cursor, d_o_cursor) = (self.q_ring.cursor(), self.d_o_ring.cursor());
        let options = LoadOptions::default();
        k.when(k.elect(), || {
            let at_keys = [tile.key_row(tile.first_key), tile.place.head, tile.map_batch()];
            // Keys and values come once.
            let has_keys = k.var_named("has_keys", 0u32);
            k.range(params.group, |member| {
                let head = tile.first_head + member;
                tile.each_block(k, params, head, |block, _| {
                    let numbers = tile.block_number(params, head, block);
                    let at = [tile.query_row(block * QUERIES), head, tile.map_batch()];
                    let full = q_cursor.acquire(k.select(has_keys.eq(0), key_tile.bytes(), 0u32) + (query_tile.bytes() + NUMBERS_BYTES));
                    k.when(has_keys.eq(0), || key_tile.load(self.keys.address(), &params.k, at_keys, full, options));
                    let stage = q_cursor.stage();
                    query_tile.load(self.queries.address() + stage * query_tile.bytes(), &params.q, at, full, options);
                    let to = self.lse.address() + stage * NUMBERS_BYTES;
                    k.bulk_load(to, params.lse_log2.at(numbers, NUMBERS_BYTES), NUMBERS_BYTES, full);
                    q_cursor.advance();
                    let full =
                        d_o_cursor.acquire(k.select(has_keys.eq(0), value_tile.bytes(), 0u32) + (result_tile.bytes() + NUMBERS_BYTES));
                    k.when(has_keys.eq(0), || value_tile.load(self.values.address(), &params.v, at_keys, full, options));
                    has_keys.set(1u32);
                    let stage = d_o_cursor.stage();
                    result_tile.load(self.d_o.address() + stage * result_tile.bytes(), &params.d_o, at, full, options);
                    let to = self.delta.address() + stage * NUMBERS_BYTES;
                    k.bulk_load(to, params.delta.at(numbers, NUMBERS_BYTES), NUMBERS_BYTES, full);
                    d_o_cursor.advance();
                });
            });
        });
    }

    /// Keys behind the last one of a sequence become 0: what is there is the next one's, and no factor of 0 hides what is not finite. All consumers call it, when
    /// keys have arrived; values there reach no key that counts.
    pub(super) fn clear_keys(&self, k: Kernel<'k>, spec: &Spec, tile: &Tile<'k>) {
        let Some(own) = &tile.own else { return };
        k.when(own.keys.count.lt(tile.first_key + spec.keys()), || {
            spec.key_tile().clear(self.keys.address(), own.keys.count - tile.first_key, CONSUMER_THREADS);
            meet(k);
        });
    }

    /// The same of queries and gradients of results in a stage each, where a block has the last query. Waits for the latter, where it has.
    pub(super) fn clear_queries(&self, k: Kernel<'k>, spec: &Spec, tile: &Tile<'k>, block: Val<'k, u32>, [q, d_o]: [&Cursor<'k>; 2]) {
        let Some(own) = &tile.own else { return };
        let first_query = block * QUERIES;
        k.when(own.queries.count.lt(first_query + QUERIES), || {
            d_o.wait();
            for (of, slots, cursor) in [(spec.query_tile(), &self.queries, q), (spec.result_tile(), &self.d_o, d_o)] {
                of.clear(slots.address() + cursor.stage() * of.bytes(), own.queries.count - first_query, CONSUMER_THREADS);
            }
            meet(k);
        });
    }
}
