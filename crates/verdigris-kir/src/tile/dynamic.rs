//! Dynamic persistent schedules: whoever is free takes the next tile.
//!
//! One thread of the CTA fetches: it adds to a counter in global memory and puts the number of the tile into a ring in shared memory, ahead of
//! those who work. Every warp of the other roles reads the ring for itself, so all roles see the same tiles in the same order. The first tile
//! is the CTA's own index, without a trip to memory; a number past the last tile is the sentinel that ends every role.

use super::schedule::{Raster, RasterArgs, Work};
use crate::face::{Kernel, MbarrierArray, Pointer, SharedPiece, Val, Var};
use crate::inst::{Atomic, Order, Scope, Special};
use crate::params::{Arguments, ReadWrite};
use std::panic::Location;

/// The numbers of tiles, handed out on demand: what they stand for is the kernel's affair.
#[derive(Clone, Copy, Debug)]
pub struct Handout<'k> {
    kernel: Kernel<'k>,
    tiles: Val<'k, u32>,
    counter: Pointer<'k>,
    items: SharedPiece<'k>,
    full: MbarrierArray<'k>,
    empty: MbarrierArray<'k>,
    slots: u32,
}

impl<'k> Handout<'k> {
    /// Of the numbers below `tiles`, one after the other. At `counter` stands a `u32`, zero before the launch. A ring of `slots` numbers is read by
    /// `reading_warps` warps: all warps of all roles that call [`Handout::for_each`].
    #[track_caller]
    pub fn new(k: Kernel<'k>, tiles: Val<'k, u32>, counter: Pointer<'k>, slots: u32, reading_warps: u32) -> Self {
        k.scope(Location::caller(), || {
            let full = k.mbarrier_array("tile known", slots);
            let empty = k.mbarrier_array("tile read", slots);
            full.arrivals().set(1);
            empty.arrivals().set(u64::from(reading_warps));
            Handout { kernel: k, tiles, counter, items: k.shared("tiles ahead", 4 * slots, 4), full, empty, slots }
        })
    }

    /// Initializes the barriers: by one thread, before [`publish_barriers`](super::ring::publish_barriers).
    #[track_caller]
    pub fn init(&self) {
        self.kernel.scope(Location::caller(), || {
            self.full.init();
            self.empty.init();
        });
    }

    fn next(&self, slot: Var<'k, u32>, phase: Var<'k, u32>) {
        let k = self.kernel;
        let next = slot + 1;
        let wrap = next.eq(self.slots);
        slot.set(k.select(wrap, 0u32, next));
        phase.set(k.select(wrap, phase ^ 1, phase));
    }

    /// Fetches numbers until there are none, the sentinel last: by one thread. Once a number is in the ring, `body` runs with it, in which a thread that
    /// loads brings the tile.
    #[track_caller]
    pub fn fetch(&self, body: impl Fn(Val<'k, u32>)) {
        let k = self.kernel;
        k.scope_around(Location::caller(), |caller| {
            let (slot, phase) = (k.var_named("slot", 0u32), k.var_named("slot phase", 0u32));
            let tile = k.var_named("tile", k.special(Special::CtaX));
            let workers = k.special(Special::GridX);
            let put = |number: Val<'k, u32>| {
                self.empty.at(slot).wait(phase ^ 1);
                k.st_shared(self.items.address() + (slot << 2), 0, number);
                self.full.at(slot).arrive();
                self.next(slot, phase);
            };
            k.while_(
                || tile.lt(self.tiles),
                || {
                    let now = tile.get();
                    // The next answer is on its way while this slot becomes free and the tile is brought.
                    let taken = k.atom_global(Atomic::Add, self.counter.address(), 0, 1u32, Order::Relaxed(Scope::Gpu));
                    put(now);
                    caller.run(|| body(now));
                    tile.set(taken + workers);
                },
            );
            put(tile.get());
        });
    }

    /// Runs `body` for each number that this CTA gets, in the order in which it gets them: by whole warps.
    #[track_caller]
    pub fn for_each(&self, body: impl Fn(Val<'k, u32>)) {
        let k = self.kernel;
        k.scope_around(Location::caller(), |caller| {
            let (slot, phase) = (k.var_named("slot", 0u32), k.var_named("slot phase", 0u32));
            let tile: Var<'k, u32> = k.var_unset(Some("tile"));
            let read = || {
                self.full.at(slot).wait(phase);
                tile.set(k.uniform(k.ld_shared::<u32>(self.items.address() + (slot << 2), 0)));
                k.warp_sync();
                k.when(k.lane().eq(0), || self.empty.at(slot).arrive());
                self.next(slot, phase);
            };
            read();
            k.while_(
                || tile.lt(self.tiles),
                || {
                    let now = tile.get();
                    caller.run(|| body(now));
                    read();
                },
            );
        });
    }
}

/// A schedule of whole tiles, handed out on demand.
#[derive(Clone, Copy, Debug)]
pub struct Dynamic<'k> {
    kernel: Kernel<'k>,
    raster: Raster<'k>,
    steps: Val<'k, u32>,
    handout: Handout<'k>,
}

/// The numbers behind a [`Dynamic`] schedule. Beside them stands a counter in global memory, zeroed before the launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DynamicArgs {
    /// The walk.
    pub raster: RasterArgs,
    /// All tiles.
    pub tiles: u32,
    /// Steps of depth of one tile.
    pub steps: u32,
}

crate::parameters! {
    /// What a launch gives for a [`Dynamic`] schedule.
    struct Numbers / NumbersArgs of () as _spec {
        raster: RasterArgs = (),
        tiles: u32,
        steps: u32,
        next_tile: ReadWrite = 4,
    }
}

impl DynamicArgs {
    /// The arguments; `counter` is where a zeroed `u32` stands.
    pub fn bound(&self, counter: crate::program::Address) -> Arguments {
        NumbersArgs { raster: self.raster, tiles: self.tiles, steps: self.steps, next_tile: counter }.bound(&())
    }
}

impl<'k> Dynamic<'k> {
    /// Declares the parameters, those of [`DynamicArgs`], and a ring of `slots` tiles that `reading_warps` warps read: all warps
    /// of all roles that call [`Dynamic::for_each`].
    #[track_caller]
    pub fn declare(k: Kernel<'k>, slots: u32, reading_warps: u32) -> Self {
        k.scope(Location::caller(), || {
            let Numbers { raster, tiles, steps, next_tile } = Numbers::declare(k, &());
            Dynamic { kernel: k, raster, steps, handout: Handout::new(k, tiles, next_tile, slots, reading_warps) }
        })
    }

    /// Initializes the barriers: by one thread, before [`publish_barriers`](super::ring::publish_barriers).
    #[track_caller]
    pub fn init(&self) {
        self.kernel.scope(Location::caller(), || self.handout.init());
    }

    /// Fetches tiles until there are none, the sentinel last: by one thread of a warp that does nothing else.
    #[track_caller]
    pub fn fetch(&self) {
        self.kernel.scope(Location::caller(), || self.handout.fetch(|_| {}));
    }

    /// Runs `body` for each tile that this CTA gets, in the order in which it gets them: by whole warps.
    #[track_caller]
    pub fn for_each(&self, body: impl Fn(Work<'k>)) {
        let k = self.kernel;
        k.scope_around(Location::caller(), |caller| {
            self.handout.for_each(|tile| {
                let (row, column, batch) = self.raster.tile(tile);
                let (zero, one) = (k.constant(0), k.constant(1));
                let work = Work { row, column, batch, tile, first_step: zero, steps: self.steps, part: zero, parts: one };
                caller.run(|| body(work));
            });
        });
    }
}
