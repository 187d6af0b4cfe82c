//! Tiles handed out on demand: a product whose CTAs take the next tile when they are free.
//!
//! Three roles in the CTA and one order of tiles: a warp fetches indices, a warp loads, warpgroups multiply. The loader runs ahead of the
//! multiplying warpgroups by whole tiles, since both read the ring of indices at their own pace.

use super::product::{Piece, Product, ProductTile, WARPGROUP, store_rows};
use super::{Allowances, Probe};
use verdigris_kir::face::{Header, Kernel, Role, build as build_kernel};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::tile::dynamic::Dynamic;
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::ring::publish_barriers;

/// What shapes the kernel.
///
/// Parameters: maps `a` `{depth, rows, batch}` and `b` `{depth, columns, batch}` of bf16; the schedule's
/// ([`DynamicArgs::bound`](verdigris_kir::tile::dynamic::DynamicArgs::bound)); `d` f32, `[rows][columns]`, with `rows` and `columns` (even). The grid is any
/// number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The tile of one CTA.
    pub tile: ProductTile,
    /// Indices that are fetched ahead.
    pub slots: u32,
}

impl Spec {
    /// 128 × 128, four stages, two tiles ahead.
    pub const FULL: Spec = Spec { tile: ProductTile { rows: 128, columns: 128, stages: 4 }, slots: 2 };

    /// Builds the kernel.
    pub fn build(&self) -> KernelBody {
        let ProductTile { rows, columns, stages } = self.tile;
        let name = format!("probe_dynamic_schedule_{rows}x{columns}_s{stages}_q{}", self.slots);
        build_kernel(Header { name, target: Target::Sm90a, threads: self.tile.threads(), min_ctas: 1, cluster: 1 }, |k| kernel(k, self))
    }
}

pub(super) fn probe() -> Probe {
    Probe {
        name: "dynamic_schedule",
        build: || Spec::FULL.build(),
        allowances: Allowances { wgmma_stages: 1 },
        what_it_shows: "one fetching warp, a ring of work items that every role reads for itself, a sentinel that ends them; loops whose \
                        length is known to no one before",
    }
}

fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let tile = spec.tile;
    let a = k.tensor_map("a", tile.a().map(tile.rows));
    let b = k.tensor_map("b", tile.b().map(tile.columns));
    let schedule = Dynamic::declare(k, spec.slots, 1 + 4 * tile.consumers());
    let d = k.output("d", 8);
    let extent = (k.scalar::<u32>("rows"), k.scalar::<u32>("columns"));
    let product = Product::new(k, tile);
    k.when(k.thread().eq(0), || {
        product.ring.init();
        schedule.init();
    });
    publish_barriers(k);

    let fetch = || k.when(k.elect(), || schedule.fetch());
    let load = || {
        let cursor = product.ring.cursor();
        schedule.for_each(|work| {
            k.when(k.lane().eq(0), || {
                let (row, column) = (work.row * tile.rows, work.column * tile.columns);
                let piece = Piece { row, column, batch: work.batch, first_step: work.first_step, steps: work.steps };
                product.load(&cursor, &a, &b, piece);
            });
        });
    };
    let multiply = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let cursor = product.ring.cursor();
        let sums = Fragment::<f32>::unset(k, tile.columns);
        schedule.for_each(|work| {
            product.multiply(&cursor, &sums, work.steps, warpgroup, thread);
            let first = (work.row * tile.rows + warpgroup * 64, work.column * tile.columns);
            store_rows(&sums, d, first, extent, thread);
        });
    };

    let serve = || {
        k.warp_roles(&[
            Role { name: "fetch", warps: 1, registers: None, body: &fetch },
            Role { name: "load", warps: 1, registers: None, body: &load },
        ]);
    };
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(40), body: &serve },
        Role { name: "consumer", warps: 4 * tile.consumers(), registers: Some(232), body: &multiply },
    ]);
}
