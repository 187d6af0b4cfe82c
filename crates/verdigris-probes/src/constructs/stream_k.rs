//! Stream-K: the depth of the last tiles is cut among all CTAs, and the parts of a tile are joined in a fixed order.
//!
//! Every worker takes the same share of the split depth, wherever it begins and ends; then come whole tiles. Who brings a tile's last part
//! adds all of its parts, first to last, so the result depends on the cut and not on who comes when. No CTA waits for another.
//!
//! Source: Osama et al., "Stream-K: Work-centric parallel decomposition for dense matrix-matrix multiplication", PPoPP 2023.

use super::product::{Piece, Product, ProductTile, WARPGROUP, store_rows};
use super::{Allowances, Probe};
use verdigris_kir::face::{Header, Kernel, Pointer, Role, SharedPiece, Val, build as build_kernel};
use verdigris_kir::inst::{Atomic, Cache, Order, Scope};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::ring::publish_barriers;
use verdigris_kir::tile::schedule::{Schedule, Work};

/// What shapes the kernel.
///
/// Parameters: maps `a` `{depth, rows, batch}` and `b` `{depth, columns, batch}` of bf16; the schedule's
/// ([`ScheduleArgs::bound`](verdigris_kir::tile::schedule::ScheduleArgs::bound), split); `d` f32, `[rows][columns]`, with `rows` and `columns` (even);
/// `parts`, f32, `tiles · most_parts · tile` words; `counters`, zeroed, a `u32` for each tile and warpgroup; `most_parts`. The grid is any
/// number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The tile of one CTA.
    pub tile: ProductTile,
}

impl Spec {
    /// 128 × 128, four stages.
    pub const FULL: Spec = Spec { tile: ProductTile { rows: 128, columns: 128, stages: 4 } };

    /// Builds the kernel.
    pub fn build(&self) -> KernelBody {
        let ProductTile { rows, columns, stages } = self.tile;
        let name = format!("probe_stream_k_{rows}x{columns}_s{stages}");
        build_kernel(Header { name, target: Target::Sm90a, threads: self.tile.threads(), min_ctas: 1, cluster: 1 }, |k| kernel(k, self))
    }
}

pub(super) fn probe() -> Probe {
    Probe {
        name: "stream_k",
        build: || Spec::FULL.build(),
        allowances: Allowances { wgmma_stages: 1 },
        what_it_shows: "one schedule walked by all roles, its depth split evenly; parts joined by the last to arrive, in a fixed order; \
                        release and acquire at the scope of the device",
    }
}

fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let tile = spec.tile;
    let a = k.tensor_map("a", tile.a().map(tile.rows));
    let b = k.tensor_map("b", tile.b().map(tile.columns));
    let schedule = Schedule::declare(k, true);
    let d = k.output("d", 8);
    let extent = (k.scalar::<u32>("rows"), k.scalar::<u32>("columns"));
    let join = Join {
        parts: k.in_out("parts", 16),
        counters: k.in_out("counters", 4),
        most_parts: k.scalar("most_parts"),
        told: k.shared("arrivals seen", 4 * tile.consumers(), 4),
    };
    let product = Product::new(k, tile);
    k.when(k.thread().eq(0), || product.ring.init());
    publish_barriers(k);

    let first = |work: &Work<'k>| (work.row * tile.rows, work.column * tile.columns);
    let load = || {
        let cursor = product.ring.cursor();
        k.when(k.elect(), || {
            schedule.for_each(|work| {
                let (row, column) = first(&work);
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
            let complete = join.complete(k, spec, &sums, &work, warpgroup, thread);
            let (row, column) = first(&work);
            k.when(complete, || store_rows(&sums, d, (row + warpgroup * 64, column), extent, thread));
        });
    };

    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(40), body: &load_warp },
        Role { name: "consumer", warps: 4 * tile.consumers(), registers: Some(232), body: &multiply },
    ]);
}

/// Where the parts of a tile meet.
struct Join<'k> {
    parts: Pointer<'k>,
    counters: Pointer<'k>,
    most_parts: Val<'k, u32>,
    told: SharedPiece<'k>,
}

impl<'k> Join<'k> {
    /// Whether this warpgroup's registers hold the whole sum of its rows: at once where the tile is not split, else where it came last.
    fn complete(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        sums: &Fragment<'k, f32>,
        work: &Work<'k>,
        warpgroup: Val<'k, u32>,
        thread: Val<'k, u32>,
    ) -> Val<'k, bool> {
        let complete = k.var_named("complete", work.parts.eq(1));
        k.when(work.parts.gt(1), || {
            let owner = work.tile * spec.tile.consumers() + warpgroup;
            // Four registers of all threads side by side, then the next four.
            let vectors = || (0i64..).map(|i| i * 16 * i64::from(WARPGROUP)).zip(sums.registers().chunks(4));
            let place =
                |part: Val<'k, u32>| self.parts.moved((owner * self.most_parts + part).mul_wide(64 * spec.tile.columns * 4)).at(thread, 16);
            let own = place(work.part);
            for (offset, registers) in vectors() {
                let values: Vec<Val<'k, f32>> = registers.iter().map(|register| register.get()).collect();
                k.st_global_vector(own, offset, &values, Cache::Default);
            }
            let barrier = warpgroup + 1;
            k.barrier_sync(barrier, WARPGROUP);
            let told = self.told.address() + (warpgroup << 2);
            // One thread speaks for the warpgroup: the barriers in front and behind make its release and acquire everyone's.
            k.when(thread.eq(0), || {
                let arrived = k.atom_global(Atomic::Add, self.counters.at(owner, 4), 0, 1u32, Order::AcqRel(Scope::Gpu));
                k.st_shared(told, 0, arrived);
            });
            k.barrier_sync(barrier, WARPGROUP);
            complete.set((k.ld_shared::<u32>(told, 0) + 1).eq(work.parts));
            k.when(complete, || {
                sums.map_in_place(|_, _, _| k.constant(0.0));
                k.range(work.parts, |part| {
                    let from = place(part);
                    for (offset, registers) in vectors() {
                        let values = k.ld_global_vector::<f32>(from, offset, 4, Cache::Default);
                        for (register, value) in registers.iter().zip(values) {
                            register.set(*register + value);
                        }
                    }
                });
            });
            // The next split tile uses the word again.
            k.barrier_sync(barrier, WARPGROUP);
        });
        complete.get()
    }
}
