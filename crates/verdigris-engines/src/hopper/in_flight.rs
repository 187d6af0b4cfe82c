//! The wgmma groups in flight: how many the tensor cores have at a time, and when the stage that they read goes back.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::tile::ring::Cursor;

/// A consumer's wgmma groups in flight.
pub(crate) struct InFlight<'k> {
    kernel: Kernel<'k>,
    cursor: Cursor<'k>,
    thread: Val<'k, u32>,
    /// Sums are promoted after each step, behind which no group may be in flight.
    promotes: bool,
    /// The stage of the step before.
    previous: Var<'k, u32>,
    /// Whether a step's first product is added to the accumulators, or replaces what is in them.
    pub(crate) adds: Var<'k, bool>,
}

impl<'k> InFlight<'k> {
    /// For a consumer's thread `thread`, whose stages `cursor` walks.
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, promotes: bool, cursor: Cursor<'k>, thread: Val<'k, u32>) -> Self {
        let previous = k.var_named("previous", 0u32);
        let adds = k.var_named("add", k.thread().ge(0u32));
        InFlight { kernel: k, cursor, thread, promotes, previous, adds }
    }

    /// Before the products of a step.
    #[track_caller]
    pub(crate) fn begin(&self, step: Val<'k, u32>) {
        self.adds.set(if self.promotes { self.kernel.thread().gt(u32::MAX - 1) } else { step.gt(0) });
    }

    /// Behind the products of a step, which read `stage`: the stage that nothing reads any more goes back, this one if `promote` is to be
    /// done.
    pub(crate) fn end(&self, step: Val<'k, u32>, stage: Val<'k, u32>, promote: impl FnOnce()) {
        let k = self.kernel;
        if self.promotes {
            k.wgmma_wait(0);
            self.cursor.release(stage, self.thread);
            promote();
        } else {
            // One group stays in flight while the stage before it goes back.
            k.wgmma_wait(1);
            k.when(step.gt(0), || self.cursor.release(self.previous, self.thread));
            self.previous.set(stage);
        }
    }

    /// Behind the last step of a tile, with no group in flight: its stage goes back, where that has not been done yet.
    #[track_caller]
    pub(crate) fn release_last(&self) {
        if !self.promotes {
            self.cursor.release(self.previous, self.thread);
        }
    }
}
