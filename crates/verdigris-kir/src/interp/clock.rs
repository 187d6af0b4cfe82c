//! Vector clocks: what each warp and each async unit knows of the others.
//!
//! An *actor* is a warp, or one kind of async work that completes in order: a warp's `cp.async` groups, a warp's bulk groups (their
//! reads and their writes apart), a warpgroup's wgmma groups, or the phases of one mbarrier for the copies that complete on it. Its
//! *epochs* count upward; an access carries the actor and epoch that made it, and is ordered before an actor that knows that epoch.
//! A warp's lanes are told apart by a mask, because a lane that arrives somewhere speaks only for itself until its warp synchronizes.

/// Up to which epoch the work of an actor is known: `all` lanes up to one epoch, some lanes up to a later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) all: u32,
    pub(crate) mask: u32,
    pub(crate) lanes: u32,
}

impl Span {
    pub(crate) fn covers(&self, epoch: u32, lane: u8) -> bool {
        epoch <= self.all || (epoch <= self.lanes && (lane >= 32 || self.mask >> lane & 1 == 1))
    }

    pub(crate) fn extend(&mut self, mask: u32, full: u32, epoch: u32) {
        if mask & full == full {
            self.all = self.all.max(epoch);
        } else {
            // Two different sets of lanes at different epochs are joined on the generous side: never a false report.
            self.mask |= mask;
            self.lanes = self.lanes.max(epoch);
        }
    }

    fn join(&mut self, other: &Span) {
        self.all = self.all.max(other.all);
        if other.lanes > self.all {
            if self.lanes <= self.all {
                self.mask = other.mask;
                self.lanes = other.lanes;
            } else {
                self.mask |= other.mask;
                self.lanes = self.lanes.max(other.lanes);
            }
        }
    }

    fn meet(&mut self, other: &Span) {
        // Two sets of lanes become one on the generous side, as in `extend`.
        self.lanes = self.lanes.max(self.all).min(other.lanes.max(other.all));
        self.mask |= other.mask;
        self.all = self.all.min(other.all);
    }
}

/// What is known of one actor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// Its accesses.
    pub(crate) seen: Span,
    /// Its writes to shared memory that a proxy fence made ready for async units.
    pub(crate) fenced_shared: Span,
    /// Its writes to global memory, likewise.
    pub(crate) fenced_global: Span,
}

impl Known {
    fn join(&mut self, other: &Known) {
        self.seen.join(&other.seen);
        self.fenced_shared.join(&other.fenced_shared);
        self.fenced_global.join(&other.fenced_global);
    }
}

/// A vector clock. The actors of the own cluster stand in a dense row from `base`; others, reached through global memory, in a map.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    /// Everything by actors below this number is ordered before: they belong to launches that are over.
    pub(crate) horizon: u32,
    base: u32,
    local: Vec<Known>,
    foreign: Vec<(u32, Known)>,
}

const NOTHING: Known = Known {
    seen: Span { all: 0, mask: 0, lanes: 0 },
    fenced_shared: Span { all: 0, mask: 0, lanes: 0 },
    fenced_global: Span { all: 0, mask: 0, lanes: 0 },
};

impl Clock {
    pub(crate) fn new(horizon: u32, base: u32, actors: usize) -> Self {
        Clock { horizon, base, local: vec![NOTHING; actors], foreign: Vec::new() }
    }

    /// A clock of the same shape that knows nothing but what is over.
    pub(crate) fn fresh(&self) -> Self {
        Clock::new(self.horizon, self.base, self.local.len())
    }

    pub(crate) fn get(&self, actor: u32) -> &Known {
        let index = actor.wrapping_sub(self.base) as usize;
        if let Some(known) = self.local.get(index) {
            return known;
        }
        match self.foreign.binary_search_by_key(&actor, |entry| entry.0) {
            Ok(at) => &self.foreign[at].1,
            Err(_) => &NOTHING,
        }
    }

    pub(crate) fn get_mut(&mut self, actor: u32) -> &mut Known {
        let index = actor.wrapping_sub(self.base) as usize;
        if index < self.local.len() {
            return &mut self.local[index];
        }
        let at = match self.foreign.binary_search_by_key(&actor, |entry| entry.0) {
            Ok(at) => at,
            Err(at) => {
                self.foreign.insert(at, (actor, NOTHING));
                at
            }
        };
        &mut self.foreign[at].1
    }

    pub(crate) fn join(&mut self, other: &Clock) {
        self.horizon = self.horizon.max(other.horizon);
        if other.base == self.base && other.local.len() == self.local.len() {
            for (mine, theirs) in self.local.iter_mut().zip(&other.local) {
                if theirs != &NOTHING {
                    mine.join(theirs);
                }
            }
        } else {
            for (index, theirs) in other.local.iter().enumerate() {
                if theirs != &NOTHING {
                    self.get_mut(other.base + index as u32).join(theirs);
                }
            }
        }
        for (actor, theirs) in &other.foreign {
            if *actor >= self.horizon {
                self.get_mut(*actor).join(theirs);
            }
        }
    }

    /// What both know: for work that several warps do together.
    pub(crate) fn meet(&mut self, other: &Clock) {
        self.horizon = self.horizon.min(other.horizon);
        for index in 0..self.local.len() {
            let theirs = *other.get(self.base + index as u32);
            let mine = &mut self.local[index];
            mine.seen.meet(&theirs.seen);
            mine.fenced_shared.meet(&theirs.fenced_shared);
            mine.fenced_global.meet(&theirs.fenced_global);
        }
        for (actor, mine) in &mut self.foreign {
            let theirs = *other.get(*actor);
            mine.seen.meet(&theirs.seen);
            mine.fenced_shared.meet(&theirs.fenced_shared);
            mine.fenced_global.meet(&theirs.fenced_global);
        }
    }

    /// Whether an access is ordered before this clock's owner.
    pub(crate) fn knows(&self, actor: u32, epoch: u32, lane: u8) -> bool {
        actor < self.horizon || self.get(actor).seen.covers(epoch, lane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_speak_for_themselves() {
        let mut span = Span::default();
        span.extend(1, u32::MAX, 5);
        assert!(span.covers(5, 0) && !span.covers(5, 1) && !span.covers(6, 0));
        span.extend(u32::MAX, u32::MAX, 5);
        assert!(span.covers(5, 1));
    }

    #[test]
    fn a_meet_keeps_the_lane_that_one_knows_and_the_warp_that_the_other_knows() {
        let mut one_lane = Span { all: 5, mask: 1, lanes: 7 };
        one_lane.meet(&Span { all: 9, mask: 0, lanes: 0 });
        assert!(one_lane.covers(7, 0) && !one_lane.covers(6, 1) && !one_lane.covers(8, 0));
        let mut whole = Span { all: 9, mask: 0, lanes: 0 };
        whole.meet(&Span { all: 4, mask: 0, lanes: 0 });
        assert!(whole.covers(4, 3) && !whole.covers(5, 3));
    }

    #[test]
    fn a_join_reaches_foreign_actors_and_a_meet_keeps_what_both_know() {
        let mut a = Clock::new(0, 10, 4);
        let mut b = Clock::new(0, 20, 4);
        b.get_mut(21).seen.all = 7;
        a.get_mut(11).seen.all = 3;
        a.join(&b);
        assert!(a.knows(21, 7, 0) && a.knows(11, 3, 0) && !a.knows(21, 8, 0));
        let empty = Clock::new(0, 10, 4);
        a.meet(&empty);
        assert!(!a.knows(21, 7, 0) && !a.knows(11, 3, 0));
    }
}
