//! Vector clocks: what each warp and each async unit knows of the others.
//!
//! An *actor* is a warp, or one kind of async work that completes in order: a warp's `cp.async` groups, a warp's bulk groups (their
//! reads and their writes apart), a warpgroup's wgmma groups, or the phases of one mbarrier for the copies that complete on it. Its
//! *epochs* count upward; an access carries the actor and epoch that made it, and is ordered before an actor that knows that epoch.
//! A warp's lanes are told apart by a mask, because a lane that arrives somewhere speaks only for itself until its warp synchronizes.

/// Up to which epoch the work of an actor is known: `all` lanes up to one epoch, the lanes of `mask` up to a later one. Where lanes stand at
/// several later epochs, `mask` and `lanes` bound them from above, and the clock keeps each lane's own ([`Clock::apart`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) all: u32,
    mask: u32,
    lanes: u32,
}

/// The epoch up to which each lane is known.
type Lanes = [u32; 32];

impl Span {
    fn may_cover(&self, epoch: u32, lane: u8) -> bool {
        epoch <= self.all || (epoch <= self.lanes && (lane >= 32 || self.mask >> lane & 1 == 1))
    }

    fn expand(&self) -> Lanes {
        std::array::from_fn(|lane| if self.mask >> lane & 1 == 1 { self.all.max(self.lanes) } else { self.all })
    }

    /// The span of these lanes, and whether it says all about them.
    fn of(lanes: &Lanes) -> (Span, bool) {
        let mut span = Span { all: lanes.iter().copied().min().unwrap_or(0), mask: 0, lanes: 0 };
        let mut is_exact = true;
        for (lane, &epoch) in lanes.iter().enumerate() {
            if epoch > span.all {
                is_exact &= span.mask == 0 || epoch == span.lanes;
                span.mask |= 1 << lane;
                span.lanes = span.lanes.max(epoch);
            }
        }
        (span, is_exact)
    }

    fn is_whole(&self) -> bool {
        self.lanes <= self.all
    }

    /// Takes over that the lanes of `mask` are known up to `epoch`, if two epochs are enough to say what is known then.
    fn extends(&mut self, mask: u32, epoch: u32) -> bool {
        if epoch <= self.all || (epoch <= self.lanes && mask & !self.mask == 0) {
            return true;
        }
        if self.is_whole() || (epoch >= self.lanes && self.mask & !mask == 0) {
            (self.mask, self.lanes) = (mask, epoch);
            return true;
        }
        let is_level = epoch == self.lanes;
        if is_level {
            self.mask |= mask;
        }
        is_level
    }

    /// Takes over what another span knows, if two epochs are enough for both.
    fn joins(&mut self, other: &Span) -> bool {
        self.all = self.all.max(other.all);
        other.lanes <= self.all || self.extends(other.mask, other.lanes)
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

/// One of the spans of [`Known`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Of {
    Seen,
    FencedShared,
    FencedGlobal,
}

impl Of {
    const ALL: [Of; 3] = [Of::Seen, Of::FencedShared, Of::FencedGlobal];
}

impl Known {
    fn span(&self, of: Of) -> &Span {
        match of {
            Of::Seen => &self.seen,
            Of::FencedShared => &self.fenced_shared,
            Of::FencedGlobal => &self.fenced_global,
        }
    }

    fn span_mut(&mut self, of: Of) -> &mut Span {
        match of {
            Of::Seen => &mut self.seen,
            Of::FencedShared => &mut self.fenced_shared,
            Of::FencedGlobal => &mut self.fenced_global,
        }
    }
}

/// A vector clock. The actors of the own cluster stand in a dense row from `base`; others, reached through global memory, in a map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// Everything by actors below this number is ordered before: they belong to launches that are over.
    pub(crate) horizon: u32,
    base: u32,
    local: Vec<Known>,
    foreign: Vec<(u32, Known)>,
    /// Spans whose lanes stand at more than two epochs, which is rare.
    apart: Vec<(u32, Of, Box<Lanes>)>,
}

const EMPTY: Span = Span { all: 0, mask: 0, lanes: 0 };
const NOTHING: Known = Known { seen: EMPTY, fenced_shared: EMPTY, fenced_global: EMPTY };

impl Clock {
    pub(crate) fn new(horizon: u32, base: u32, actors: usize) -> Self {
        Clock { horizon, base, local: vec![NOTHING; actors], foreign: Vec::new(), apart: Vec::new() }
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

    fn get_mut(&mut self, actor: u32) -> &mut Known {
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

    fn apart_of(&self, actor: u32, of: Of) -> Option<&Lanes> {
        self.apart.iter().find(|entry| (entry.0, entry.1) == (actor, of)).map(|entry| &*entry.2)
    }

    /// The epoch up to which each lane of an actor is known.
    fn lanes(&self, actor: u32, of: Of) -> Lanes {
        let span = self.get(actor).span(of);
        match self.apart_of(actor, of) {
            Some(lanes) => lanes.map(|epoch| epoch.max(span.all)),
            None => span.expand(),
        }
    }

    fn set_lanes(&mut self, actor: u32, of: Of, lanes: &Lanes) {
        let (span, is_exact) = Span::of(lanes);
        *self.get_mut(actor).span_mut(of) = span;
        self.apart.retain(|entry| (entry.0, entry.1) != (actor, of));
        if !is_exact {
            self.apart.push((actor, of, Box::new(*lanes)));
        }
    }

    /// All of an actor is known up to an epoch.
    pub(crate) fn raise(&mut self, actor: u32, of: Of, epoch: u32) {
        let span = self.get_mut(actor).span_mut(of);
        span.all = span.all.max(epoch);
    }

    /// The lanes of `mask`, of an actor that has those of `full`, are known up to an epoch.
    pub(crate) fn extend(&mut self, actor: u32, of: Of, mask: u32, full: u32, epoch: u32) {
        if mask & full == full {
            return self.raise(actor, of, epoch);
        }
        let has_levels = !self.apart.is_empty() && self.apart_of(actor, of).is_some();
        if !has_levels && self.get_mut(actor).span_mut(of).extends(mask, epoch) {
            return;
        }
        let mut lanes = self.lanes(actor, of);
        (0..32).filter(|lane| mask >> lane & 1 == 1).for_each(|lane| lanes[lane] = lanes[lane].max(epoch));
        self.set_lanes(actor, of, &lanes);
    }

    /// What is known of an actor's work is ready for async units: its writes to shared memory, and besides what it did up to `epoch` by the
    /// lanes of `mask`.
    pub(crate) fn fence_shared(&mut self, actor: u32, mask: u32, full: u32, epoch: u32) {
        if self.apart.is_empty() {
            let known = self.get_mut(actor);
            known.fenced_shared = known.seen;
        } else {
            let lanes = self.lanes(actor, Of::Seen);
            self.set_lanes(actor, Of::FencedShared, &lanes);
        }
        if epoch > 0 {
            self.extend(actor, Of::FencedShared, mask, full, epoch);
        }
    }

    fn join_actor(&mut self, actor: u32, other: &Clock, theirs: &Known) {
        if self.apart.is_empty() && other.apart.is_empty() {
            let mine = self.get_mut(actor);
            let mut joined = *mine;
            if Of::ALL.iter().all(|&of| joined.span_mut(of).joins(theirs.span(of))) {
                *mine = joined;
                return;
            }
        }
        for of in Of::ALL {
            let (mut lanes, more) = (self.lanes(actor, of), other.lanes(actor, of));
            lanes.iter_mut().zip(more).for_each(|(lane, more)| *lane = (*lane).max(more));
            self.set_lanes(actor, of, &lanes);
        }
    }

    pub(crate) fn join(&mut self, other: &Clock) {
        self.horizon = self.horizon.max(other.horizon);
        for (index, theirs) in other.local.iter().enumerate() {
            if theirs != &NOTHING {
                self.join_actor(other.base + index as u32, other, theirs);
            }
        }
        for (actor, theirs) in &other.foreign {
            if *actor >= self.horizon {
                self.join_actor(*actor, other, theirs);
            }
        }
    }

    /// What both know: for work that several warps do together.
    pub(crate) fn meet(&mut self, other: &Clock) {
        self.horizon = self.horizon.min(other.horizon);
        let own = (0..self.local.len()).map(|index| self.base + index as u32);
        let actors: Vec<u32> = own.chain(self.foreign.iter().map(|entry| entry.0)).collect();
        for actor in actors {
            for of in Of::ALL {
                let (mine, theirs) = (*self.get(actor).span(of), *other.get(actor).span(of));
                let are_levels = self.apart_of(actor, of).is_none() && other.apart_of(actor, of).is_none();
                if are_levels && mine == theirs {
                    continue;
                }
                if mine.is_whole() && theirs.is_whole() {
                    *self.get_mut(actor).span_mut(of) = Span { all: mine.all.min(theirs.all), ..EMPTY };
                    continue;
                }
                let (mut lanes, less) = (self.lanes(actor, of), other.lanes(actor, of));
                lanes.iter_mut().zip(less).for_each(|(lane, less)| *lane = (*lane).min(less));
                self.set_lanes(actor, of, &lanes);
            }
        }
    }

    /// Whether what a lane of an actor did at an epoch is known. Lanes from 32 on stand for several, or for a unit that has none: one of them at
    /// least is known then.
    pub(crate) fn covers(&self, actor: u32, of: Of, epoch: u32, lane: u8) -> bool {
        let span = self.get(actor).span(of);
        if !span.may_cover(epoch, lane) {
            return false;
        }
        epoch <= span.all
            || self.apart.is_empty()
            || lane >= 32
            || self.apart_of(actor, of).is_none_or(|lanes| epoch <= lanes[lane as usize])
    }

    /// Whether an access is ordered before this clock's owner.
    pub(crate) fn knows(&self, actor: u32, epoch: u32, lane: u8) -> bool {
        actor < self.horizon || self.covers(actor, Of::Seen, epoch, lane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that has heard of actor 3 only what these sets of lanes did up to these epochs.
    fn heard(of: &[(u32, u32)]) -> Clock {
        let mut clock = Clock::new(0, 0, 4);
        of.iter().for_each(|&(mask, epoch)| clock.extend(3, Of::Seen, mask, u32::MAX, epoch));
        clock
    }

    #[test]
    fn lanes_speak_for_themselves() {
        let mut clock = heard(&[(1, 5)]);
        assert!(clock.knows(3, 5, 0) && !clock.knows(3, 5, 1) && !clock.knows(3, 6, 0));
        clock.extend(3, Of::Seen, u32::MAX, u32::MAX, 5);
        assert!(clock.knows(3, 5, 1));
    }

    /// Every way of telling of up to four overlapping sets of lanes, against the epochs written down lane by lane.
    #[test]
    fn overlapping_sets_of_lanes_are_told_apart() {
        let sets = [0b0011u32, 0b0110, 0b1100, 0b0001, 0b1111, u32::MAX];
        let mut random = 7u64;
        let mut below = |bound: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % bound
        };
        for _ in 0..3000 {
            let (mut clocks, mut right) = ([Clock::new(0, 0, 4), Clock::new(0, 0, 4)], [[0u32; 32]; 2]);
            for _ in 0..1 + below(6) {
                let (at, mask, epoch) = (below(2) as usize, sets[below(6) as usize], 1 + below(9) as u32);
                clocks[at].extend(3, Of::Seen, mask, u32::MAX, epoch);
                (0..32).filter(|lane| mask >> lane & 1 == 1).for_each(|lane| right[at][lane] = right[at][lane].max(epoch));
            }
            let [mut mine, theirs] = clocks;
            let joined = below(2) == 0;
            if joined {
                mine.join(&theirs)
            } else {
                mine.meet(&theirs)
            }
            for lane in 0..32 {
                let (a, b) = (right[0][lane], right[1][lane]);
                let known = if joined { a.max(b) } else { a.min(b) };
                for epoch in 1..12 {
                    assert_eq!(mine.knows(3, epoch, lane as u8), epoch <= known, "lane {lane}, epoch {epoch}: {right:?}, joined {joined}");
                }
            }
        }
    }

    #[test]
    fn a_fence_hands_on_the_lanes_that_are_known() {
        let mut clock = heard(&[(0b0011, 4), (0b0110, 7)]);
        clock.fence_shared(3, 0b1000, u32::MAX, 9);
        let covers = |epoch, lane| clock.covers(3, Of::FencedShared, epoch, lane);
        assert!(covers(4, 0) && !covers(5, 0) && covers(7, 1) && covers(7, 2) && covers(9, 3) && !covers(1, 4));
    }

    #[test]
    fn a_join_reaches_foreign_actors_and_a_meet_keeps_what_both_know() {
        let mut a = Clock::new(0, 10, 4);
        let mut b = Clock::new(0, 20, 4);
        b.raise(21, Of::Seen, 7);
        a.raise(11, Of::Seen, 3);
        a.join(&b);
        assert!(a.knows(21, 7, 0) && a.knows(11, 3, 0) && !a.knows(21, 8, 0));
        let empty = Clock::new(0, 10, 4);
        // What one has heard of others goes on to a third.
        let mut c = Clock::new(0, 30, 4);
        c.join(&a);
        assert!(c.knows(21, 7, 0) && c.knows(11, 3, 0));
        a.meet(&empty);
        assert!(!a.knows(21, 7, 0) && !a.knows(11, 3, 0));
    }

    #[test]
    fn a_join_keeps_the_later_horizon_and_a_meet_the_earlier() {
        let of = |horizon: u32| Clock::new(horizon, 10, 4);
        let (mut joined, mut met) = (of(2), of(6));
        joined.join(&of(6));
        met.meet(&of(2));
        assert!(joined.knows(5, 1, 0) && !joined.knows(6, 1, 0));
        assert!(met.knows(1, 1, 0) && !met.knows(2, 1, 0));
    }
}
