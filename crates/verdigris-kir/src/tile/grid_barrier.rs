//! A barrier of all CTAs of a launch, or of a team of them, built from one counter in global memory.
//!
//! Arriving CTAs add to the counter, releasing; waiting ones look at it with relaxed loads, which stay out of L1's way, and acquire once,
//! when they have seen enough. The counter only grows: phase `p` is complete at `p · CTAs`. It starts at zero, set by the program before
//! the launch, and the launch must be resident as a whole ([`Residency::All`](crate::program::Residency)).

use crate::face::{AsVal, Kernel, Pointer, Val};
use crate::inst::{Atomic, Cache, Fence, Order, Scope, Special};
use std::panic::Location;

/// Bytes between the counters of teams: lines of their own.
pub const TEAM_BYTES: u32 = 128;

/// A barrier of all CTAs along x.
#[derive(Clone, Copy, Debug)]
pub struct GridBarrier<'k> {
    kernel: Kernel<'k>,
    counter: Pointer<'k>,
    ctas: Val<'k, u32>,
}

impl<'k> GridBarrier<'k> {
    /// A barrier on the `u32` counter that parameter `name` points to.
    #[track_caller]
    pub fn declare(k: Kernel<'k>, name: &'static str) -> Self {
        k.scope(Location::caller(), || GridBarrier { kernel: k, counter: k.in_out(name, 4), ctas: k.special(Special::GridX) })
    }

    /// The barrier of one of several teams of so many CTAs, each with a counter of its own, [`TEAM_BYTES`] behind the one before. Teams together are all
    /// CTAs of the launch.
    #[track_caller]
    pub fn of_team(self, team: impl AsVal<'k, u32>, ctas: impl AsVal<'k, u32>) -> Self {
        let k = self.kernel;
        let (team, ctas) = (team.operand_val(k), ctas.operand_val(k));
        k.scope(Location::caller(), || GridBarrier { kernel: k, counter: self.counter.moved(team.mul_wide(TEAM_BYTES)), ctas })
    }

    /// Arrives for the CTA: by one thread, behind a CTA barrier that all whose writes are to be seen have passed.
    #[track_caller]
    pub fn arrive(&self) {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            k.red_global(Atomic::Add, self.counter.address(), 0, &[k.constant(1u32)], Order::Release(Scope::Gpu));
        });
    }

    /// Waits until every CTA has arrived `times` times, and takes over what they wrote: by one thread, in front of a CTA barrier. Where the
    /// writes are then read by TMA, a proxy fence follows.
    #[track_caller]
    pub fn wait(&self, times: impl AsVal<'k, u32>) {
        let k = self.kernel;
        let times = times.operand_val(k);
        k.scope(Location::caller(), || {
            let wanted = times * self.ctas;
            k.repeat_until(|| {
                let seen = k.ld_global_with::<u32>(self.counter.address(), 0, Order::Relaxed(Scope::Gpu), Cache::Default);
                seen.ge(wanted)
            });
            k.fence(Fence::AcqRel(Scope::Gpu));
        });
    }
}
