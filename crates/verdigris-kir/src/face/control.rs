//! Verbs that steer the chip.

use super::{AsVal, Kernel};
use crate::inst::Op;

impl<'k> Kernel<'k> {
    /// Waits until the launches in front of this one are complete and visible (programmatic dependent launch).
    #[track_caller]
    pub fn griddep_wait(self) {
        self.instruction(Op::GridDependencyWait {}, &[], &[]);
    }

    /// Lets the launch behind this one start (programmatic dependent launch).
    #[track_caller]
    pub fn griddep_launch(self) {
        self.instruction(Op::GridDependencyLaunch {}, &[], &[]);
    }

    /// Sleeps for about as many nanoseconds.
    #[track_caller]
    pub fn nanosleep(self, nanoseconds: impl AsVal<'k, u32>) {
        self.instruction(Op::Nanosleep {}, &[], &[nanoseconds.operand()]);
    }

    /// Stops the kernel with an error.
    #[track_caller]
    pub fn trap(self) {
        self.instruction(Op::Trap {}, &[], &[]);
    }
}
