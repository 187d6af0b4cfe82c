//! The main loop of a consumer: wait for a stage, multiply out of it, give back the one before.

use std::panic::Location;

use verdigris_kir::face::{AsVal, Kernel, Val};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::operand::ROW_BYTES;
use verdigris_kir::tile::ring::Cursor;
use verdigris_kir::tile::schedule::{Schedule, Work};

use super::in_flight::InFlight;
use super::ping_pong::PingPong;
use super::share::Consumer;
use super::spec::MainLoopSpec;
use super::stages::{Descriptors, Stages};
use super::sums::{StepFactors, Sums};
use crate::store::Sum;

/// Instruction steps of 32 bytes in one 128-byte row of depth.
const STEPS: u32 = ROW_BYTES / 32;

/// A consumer's registers, and its place in the ring. `T` is what sums are kept in.
pub(crate) struct MainLoop<'k, T> {
    kernel: Kernel<'k>,
    spec: MainLoopSpec,
    sums: Sums<'k, T>,
    descriptors: Descriptors<'k>,
    cursor: Cursor<'k>,
    in_flight: InFlight<'k>,
    ping_pong: PingPong<'k>,
    /// In the warpgroup.
    thread: Val<'k, u32>,
}

impl<'k, T: Sum + AsVal<'k, T>> MainLoop<'k, T> {
    /// Of the consumer `own`. Under ping-pong, warpgroup `w` waits for its main loop at named barrier `barrier + w`.
    #[track_caller]
    pub(crate) fn new(
        k: Kernel<'k>,
        spec: &MainLoopSpec,
        stages: &Stages<'k>,
        schedule: Schedule<'k>,
        barrier: u32,
        own: Consumer<'k>,
    ) -> Self {
        let sums = Sums::new(k, spec);
        let descriptors = stages.descriptors(own.first_row);
        let cursor = stages.ring.cursor();
        let in_flight = InFlight::new(k, spec.promotes(), cursor, own.thread);
        let ping_pong = PingPong::new(k, spec.tile, barrier, schedule, own.warpgroup);
        MainLoop { kernel: k, spec: *spec, sums, descriptors, cursor, in_flight, ping_pong, thread: own.thread }
    }

    /// Runs `body` for each piece of this warpgroup's work; `steps` as [`PingPong::for_each`] wants it.
    #[track_caller]
    pub(crate) fn for_each(&self, steps: impl Fn(Option<&Work<'k>>) -> Val<'k, u32>, body: impl Fn(Work<'k>)) {
        self.kernel.scope_around(Location::caller(), |caller| {
            self.ping_pong.for_each(&self.cursor, |work| caller.run(|| steps(work)), |work| caller.run(|| body(work)));
        });
    }

    /// Multiplies `steps` steps of a tile. `factors` are those of a step's blocks, where there are any. Behind it the last group is in
    /// flight, unless sums are promoted.
    #[track_caller]
    pub(crate) fn multiply(&self, work: &Work<'k>, steps: Val<'k, u32>, factors: impl Fn(Val<'k, u32>) -> Option<StepFactors<'k>>) {
        self.kernel.scope_around(Location::caller(), |caller| {
            let k = self.kernel;
            self.sums.begin();
            self.ping_pong.wait();
            k.range(steps, |step| {
                let factors = caller.run(|| factors(step));
                if self.spec.terms > 1 {
                    self.in_flight.begin(step);
                    self.multiply_terms();
                    self.sums.promote(factors.as_ref());
                    return;
                }
                self.cursor.wait();
                let stage = self.cursor.stage();
                let tiles = self.descriptors.of(stage);
                self.in_flight.begin(step);
                k.wgmma_fence();
                self.multiply_tiles([&tiles, &tiles], false);
                k.wgmma_commit();
                self.in_flight.end(step, stage, || self.sums.promote(factors.as_ref()));
                self.cursor.advance();
            });
            self.ping_pong.hand_on(work);
        });
    }

    /// The products of a tile of A and one of B; `adds`: of a step that has begun.
    fn multiply_tiles(&self, [a_tiles, b_tiles]: [&Descriptors<'k>; 2], adds: bool) {
        let k = self.kernel;
        for part in 0..STEPS {
            let b = b_tiles.b(part);
            for block in 0..self.spec.tile.blocks() {
                let a = a_tiles.a(64 * block, part);
                let adds = if part == 0 && !adds { self.in_flight.adds.get() } else { k.constant(true) };
                self.sums.multiply(block as usize, a, b, adds);
            }
        }
    }

    /// A step of operands in terms: each product of terms out of the stages that hold them, those of the smallest size first. A stage goes
    /// back behind the last product that reads it, while the tensor cores have those behind. At its end no group is in flight.
    fn multiply_terms(&self) {
        let (k, terms) = (self.kernel, self.spec.terms);
        // In the order in which they are loaded: the last term first.
        let mut stages: Vec<Val<'k, u32>> = (0..terms)
            .map(|_| {
                self.cursor.wait();
                let stage = self.cursor.stage();
                self.cursor.advance();
                stage
            })
            .collect();
        stages.reverse();
        let tiles: Vec<Descriptors<'k>> = stages.iter().map(|&stage| self.descriptors.of(stage)).collect();
        k.wgmma_fence();
        let mut begun = false;
        for last in (0..terms).rev() {
            // Whatever reads the stage of term `last` and none of a later one.
            for [a, b] in self.spec.products().filter(|[a, b]| *a.max(b) == last) {
                self.multiply_tiles([&tiles[a as usize], &tiles[b as usize]], begun);
                begun = true;
            }
            k.wgmma_commit();
            if let Some(&free) = stages.get(last as usize + 1) {
                k.wgmma_wait(1);
                self.cursor.release(free, self.thread);
            }
        }
        k.wgmma_wait(0);
        self.cursor.release(stages[0], self.thread);
    }

    /// Behind [`MainLoop::multiply`], with no group in flight: the last stage goes back.
    #[track_caller]
    pub(crate) fn release_last(&self) {
        self.in_flight.release_last();
    }

    /// The same of a tile that may have no steps, whose sums are zero.
    #[track_caller]
    pub(crate) fn release_last_of(&self, steps: Val<'k, u32>) {
        self.kernel.scope(Location::caller(), || {
            self.kernel.when_else(steps.eq(0), || self.sums.clear(), || self.in_flight.release_last());
        });
    }

    /// The results of a tile.
    #[track_caller]
    pub(crate) fn results(&self) -> &[Fragment<'k, T>] {
        self.sums.finish()
    }
}
