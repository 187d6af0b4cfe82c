//! A list whose members can be compared by place, in which others may be inserted anywhere.

/// Between neighbours at first.
const SPACING: u64 = 1 << 32;
/// The least room between neighbours where they are spread again.
const LEAST_SPACING: u64 = 1 << 16;

/// Numbers 0 to n − 1 in a list. Each has a label, and labels rise along the list.
///
/// Inserting takes a label between two others. Where there is none left, labels around are spread evenly, over as many neighbours as have room:
/// amortized, a few for each insertion (M. Bender et al., *Two simplified algorithms for maintaining order in a list*, 2002).
pub(super) struct Order {
    labels: Vec<u64>,
    next: Vec<Option<usize>>,
    previous: Vec<Option<usize>>,
}

impl Order {
    /// The numbers in order.
    pub(super) fn new(len: usize) -> Order {
        Order {
            labels: (1..=len as u64).map(|i| i * SPACING).collect(),
            next: (0..len).map(|i| (i + 1 < len).then_some(i + 1)).collect(),
            previous: (0..len).map(|i| i.checked_sub(1)).collect(),
        }
    }

    /// Where a member stands: labels rise along the list.
    pub(super) fn label(&self, member: usize) -> u64 {
        self.labels[member]
    }

    /// Takes a member out of the list.
    pub(super) fn remove(&mut self, member: usize) {
        let (previous, next) = (self.previous[member].take(), self.next[member].take());
        if let Some(previous) = previous {
            self.next[previous] = next;
        }
        if let Some(next) = next {
            self.previous[next] = previous;
        }
    }

    /// Gives a member's place to one that is in no list.
    pub(super) fn replace(&mut self, member: usize, by: usize) {
        self.labels[by] = self.labels[member];
        (self.previous[by], self.next[by]) = (self.previous[member].take(), self.next[member].take());
        if let Some(previous) = self.previous[by] {
            self.next[previous] = Some(by);
        }
        if let Some(next) = self.next[by] {
            self.previous[next] = Some(by);
        }
    }

    /// Moves members, in this order, to right behind `at`, which is none of them. Returns how many labels were written.
    pub(super) fn move_behind(&mut self, at: usize, members: &[usize]) -> usize {
        members.iter().for_each(|&member| self.remove(member));
        let mut written = members.len();
        let room = |order: &Order| order.next[at].map_or(u64::MAX / 2, |next| order.labels[next]) - order.labels[at];
        if room(self) <= members.len() as u64 {
            written += self.spread(at, members.len() as u64 + 1);
        }
        let step = (room(self) / (members.len() as u64 + 1)).min(SPACING);
        let mut last = at;
        for &member in members {
            self.labels[member] = self.labels[last] + step;
            let next = self.next[last].replace(member);
            (self.previous[member], self.next[member]) = (Some(last), next);
            if let Some(next) = next {
                self.previous[next] = Some(member);
            }
            last = member;
        }
        written
    }

    /// Moves members, in this order, to right before `at`, which is none of them. Returns how many labels were written.
    pub(super) fn move_before(&mut self, at: usize, members: &[usize]) -> usize {
        // Behind `at`, which then goes behind the last of them.
        let written = self.move_behind(at, members);
        match members.last() {
            None => written,
            Some(&last) => written + self.move_behind(last, &[at]),
        }
    }

    /// Spreads the labels around a member so that at least `room` are free behind each; how many members that were.
    fn spread(&mut self, member: usize, room: u64) -> usize {
        let spacing = LEAST_SPACING.saturating_mul(room);
        let (mut first, mut last, mut count) = (member, member, 1_u64);
        let mut wanted = 8;
        loop {
            while count < wanted {
                match (self.previous[first], self.next[last]) {
                    (None, None) => break,
                    (Some(before), None) => first = before,
                    (None, Some(after)) => last = after,
                    // Both ways in turns.
                    (Some(before), Some(after)) => {
                        if count.is_multiple_of(2) {
                            first = before
                        } else {
                            last = after
                        }
                    }
                }
                count += 1;
            }
            let begin = self.previous[first].map_or(0, |before| self.labels[before]);
            let end = self.next[last].map_or(u64::MAX / 2, |after| self.labels[after]);
            let step = (end - begin) / (count + 1);
            if step >= spacing || (self.previous[first].is_none() && self.next[last].is_none()) {
                let step = step.min(SPACING.max(spacing));
                let (mut label, mut current) = (begin, Some(first));
                for _ in 0..count {
                    let Some(member) = current else { break };
                    label += step;
                    self.labels[member] = label;
                    current = self.next[member];
                }
                return count as usize;
            }
            wanted *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(order: &Order, first: usize) -> Vec<usize> {
        let list: Vec<usize> = std::iter::successors(Some(first), |&member| order.next[member]).collect();
        let back: Vec<usize> = std::iter::successors(list.last().copied(), |&member| order.previous[member]).collect();
        assert!(back.iter().eq(list.iter().rev()), "{list:?} {back:?}");
        assert!(list.windows(2).all(|pair| order.label(pair[0]) < order.label(pair[1])), "{list:?}");
        list
    }

    #[test]
    fn members_stand_where_they_were_put() {
        let mut order = Order::new(6);
        order.move_behind(4, &[1, 2]);
        assert_eq!(listed(&order, 0), [0, 3, 4, 1, 2, 5]);
        order.move_before(0, &[5, 3]);
        assert_eq!(listed(&order, 5), [5, 3, 0, 4, 1, 2]);
        order.remove(5);
        order.replace(4, 5);
        assert_eq!(listed(&order, 3), [3, 0, 5, 1, 2]);
        assert_eq!(order.move_behind(3, &[]), 0);
    }

    #[test]
    fn labels_never_run_out_and_few_are_written() {
        let len = 1000;
        let mut order = Order::new(len);
        let mut expected: Vec<usize> = (0..len).collect();
        let (mut state, mut written, mut moved) = (9_u64, 0, 0);
        for round in 0..2000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Most go to the same place, as they do where a part takes one op after the other.
            let at = if round % 4 == 0 { (state >> 33) as usize % len } else { 500 };
            let count = 1 + round % 3;
            let members: Vec<usize> = (0..count).map(|i| (at + 1 + 7 * round + 331 * i) % len).filter(|&member| member != at).collect();
            written += order.move_behind(at, &members);
            moved += members.len();
            expected.retain(|member| !members.contains(member));
            let place = expected.iter().position(|&member| member == at).expect("there") + 1;
            expected.splice(place..place, members);
        }
        assert_eq!(listed(&order, expected[0]), expected);
        assert!(written <= 8 * moved, "{written} labels for {moved} moves");
    }
}
