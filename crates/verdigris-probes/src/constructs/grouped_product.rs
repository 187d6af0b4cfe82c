//! Many products of different sizes in one launch: `D_i = A_i·B_iᵀ`, from tables of addresses, extents and tensor maps.
//!
//! Three ways to name memory that only the device knows: A through a tensor map that the CTA makes itself, from a template, when it goes on
//! to the next product, and hands to TMA; B through a table of maps among the parameters, picked at run time; D by an address from a
//! table, which launches in front write ([`verdigris_kir::tile::table`]).
//!
//! Source: PTX ISA 9.0, "tensormap.replace", "tensormap.cp_fenceproxy", "membar / fence.proxy.tensormap".

use super::product::{Piece, Product, ProductTile, WARPGROUP, store_rows};
use super::{Allowances, Probe};
use verdigris_kir::face::{Header, Kernel, Pointer, Role, TensorMap, Val, Var, build as build_kernel};
use verdigris_kir::inst::{Cache, MapField, Scope, Special};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::ring::publish_barriers;
use verdigris_kir::tile::table::AddressTable;

/// Bytes of a tensor map.
pub const MAP_BYTES: u32 = 128;

/// What shapes the kernel.
///
/// Parameters: map `a`, a template `{depth, rows, 1}`; maps `b` `{depth, columns, 1}`, one for each product; `addresses`, a table of A then
/// D of each product ([`verdigris_kir::tile::table::add_addresses`]); `extents`, `u32` `[products][4]`: rows, columns (even), depth (a multiple of
/// 8), and the number of tiles of all products up to and with this one; `maps`, 128 bytes for each CTA, at 128; `tiles`, of all products.
/// The grid is any number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The tile of one CTA.
    pub tile: ProductTile,
    /// Products that the tables hold.
    pub products: u32,
}

impl Spec {
    /// 128 × 128, four stages, up to 8 products.
    pub const FULL: Spec = Spec { tile: ProductTile { rows: 128, columns: 128, stages: 4 }, products: 8 };

    fn name(&self, what: &str) -> String {
        let ProductTile { rows, columns, stages } = self.tile;
        format!("probe_grouped_{what}_{rows}x{columns}_s{stages}_p{}", self.products)
    }

    /// Builds the kernel.
    pub fn build(&self) -> KernelBody {
        let header = Header { name: self.name("product"), target: Target::Sm90a, threads: self.tile.threads(), min_ctas: 1, cluster: 1 };
        build_kernel(header, |k| kernel(k, self))
    }
}

pub(super) fn probe() -> Probe {
    Probe {
        name: "grouped_product",
        build: || Spec::FULL.build(),
        allowances: Allowances { wgmma_stages: 1 },
        what_it_shows: "a tensor map changed in shared memory, published to global memory and taken over by TMA; a table of maps \
                        among the parameters; addresses and extents from tables; a ring that settles before its map changes",
    }
}

/// Where a worker is in the list of products: it only goes forward.
struct Place<'k> {
    extents: Pointer<'k>,
    product: Var<'k, u32>,
    /// Tiles of the products in front.
    before: Var<'k, u32>,
    /// Tiles up to and with this product.
    through: Var<'k, u32>,
    rows: Var<'k, u32>,
    columns: Var<'k, u32>,
    depth: Var<'k, u32>,
}

impl<'k> Place<'k> {
    fn new(k: Kernel<'k>, extents: Pointer<'k>) -> Self {
        let place = Place {
            extents,
            product: k.var_named("product", 0u32),
            before: k.var_named("tiles before", 0u32),
            through: k.var_unset(Some("tiles through")),
            rows: k.var_unset(Some("rows")),
            columns: k.var_unset(Some("columns")),
            depth: k.var_unset(Some("depth")),
        };
        place.read(k);
        place
    }

    fn read(&self, k: Kernel<'k>) {
        let numbers = k.ld_global_vector::<u32>(self.extents.at(self.product, 16), 0, 4, Cache::NonCoherent);
        for (register, number) in [self.rows, self.columns, self.depth, self.through].into_iter().zip(numbers) {
            register.set(k.uniform(number));
        }
    }

    /// Goes on to the product of `tile`; whether that is another one.
    fn seek(&self, k: Kernel<'k>, tile: Val<'k, u32>) -> Val<'k, bool> {
        let before = self.product.get();
        k.while_(
            || tile.ge(self.through),
            || {
                self.before.set(self.through);
                self.product.set(self.product + 1);
                self.read(k);
            },
        );
        self.product.ne(before)
    }
}

fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let tile = spec.tile;
    let a_template = k.tensor_map_template("a", tile.a().map(tile.rows));
    let b_maps = k.tensor_map_table("b", tile.b().map(tile.columns), spec.products);
    let (addresses, extents) = (AddressTable::declare(k, "addresses"), k.input("extents", 16));
    let maps = k.in_out("maps", 128);
    let tiles = k.scalar::<u32>("tiles");
    let a_map_room = k.shared("a map", MAP_BYTES, 128);
    let product = Product::new(k, tile);
    k.when(k.thread().eq(0), || {
        product.ring.init();
        k.tensormap_copy(a_map_room, &a_template);
    });
    publish_barriers(k);

    let (worker, workers) = (k.cta(), k.special(Special::GridX));
    // Columns of a product are few: a loop finds the tile's row and column.
    let split = |place: &Place<'k>, tile_index: Val<'k, u32>| {
        let row = k.var(0u32);
        let column = k.var(tile_index - place.before);
        let across = (place.columns + (tile.columns - 1)) >> tile.columns.ilog2();
        k.while_(
            || column.ge(across),
            || {
                column.set(column - across);
                row.set(row + 1);
            },
        );
        (row * tile.rows, column * tile.columns)
    };
    let table = |place: &Place<'k>, operand: u32| addresses.at(place.product * 2u32 + operand);

    let load = || {
        let lane = k.lane();
        let cursor = product.ring.cursor();
        let place = Place::new(k, extents);
        let a_map = TensorMap::in_global(maps.at(worker, MAP_BYTES), a_template.decl().clone());
        let fresh = k.var_named("fresh", 1u32);
        k.range_step(worker, tiles, workers, |index| {
            let changed = place.seek(k, index) | fresh.eq(1);
            fresh.set(0u32);
            k.when(changed, || {
                k.when(lane.eq(0), || {
                    // The loads under way still use the map.
                    cursor.settle();
                    k.tensormap_replace::<u64>(a_map_room, MapField::GlobalAddress, table(&place, 0).address());
                    k.tensormap_replace::<u32>(a_map_room, MapField::GlobalDim(0), place.depth);
                    k.tensormap_replace::<u32>(a_map_room, MapField::GlobalDim(1), place.rows);
                    k.tensormap_replace::<u64>(a_map_room, MapField::GlobalStride(0), place.depth.mul_wide(2));
                });
                k.warp_sync();
                k.tensormap_publish(a_map.address, a_map_room, Scope::Gpu);
                k.tensormap_acquire(&a_map, Scope::Gpu);
            });
            k.when(lane.eq(0), || {
                let (row, column) = split(&place, index);
                let steps = (place.depth + (ProductTile::DEPTH - 1)) >> ProductTile::DEPTH.ilog2();
                let piece = Piece { row, column, batch: k.constant(0), first_step: k.constant(0), steps };
                product.load(&cursor, &a_map, &b_maps.at(place.product), piece);
            });
        });
    };

    let multiply = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let cursor = product.ring.cursor();
        let place = Place::new(k, extents);
        let sums = Fragment::<f32>::unset(k, tile.columns);
        k.range_step(worker, tiles, workers, |index| {
            place.seek(k, index);
            let steps = (place.depth + (ProductTile::DEPTH - 1)) >> ProductTile::DEPTH.ilog2();
            product.multiply(&cursor, &sums, steps, warpgroup, thread);
            let (row, column) = split(&place, index);
            let d = table(&place, 1);
            store_rows(&sums, d, (row + warpgroup * 64, column), (place.rows.get(), place.columns.get()), thread);
        });
    };

    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(40), body: &load_warp },
        Role { name: "consumer", warps: 4 * tile.consumers(), registers: Some(232), body: &multiply },
    ]);
}
