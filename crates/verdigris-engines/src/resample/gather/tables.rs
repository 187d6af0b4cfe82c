//! What each position of a result reads, along one spatial dim at a time, as constants of the program.

use serde::{Deserialize, Serialize};
use verdigris_graph::{ResampleProblem, Taps};
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::inst::Cache;
use verdigris_kir::params::Read;
use verdigris_kir::program::{Address, Base, Program};
use verdigris_tensor::DType;

use crate::fuse::compute::Compute;

/// How a position along a dim finds what it reads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Along {
    /// It reads the element of its own number.
    Same,
    /// One element with the weight 1: a table of their numbers.
    One,
    /// Lists of one length, with weights: a table of the lists alone.
    Even {
        /// Elements of each list.
        length: u32,
        /// Elements of a list that are taken together.
        together: u32,
    },
    /// Any number of elements with weights: a table of where each list begins and how long it is, and the lists.
    Few {
        /// Elements of a list that are taken together.
        together: u32,
        /// Every list has whole so many of them, and one at least.
        full: bool,
    },
}

/// The longest lists that are made even.
const MOST_EVEN: u64 = 4;

/// A list of at least one element as one of `length`: the last element stands for several, which share its weight by halves, so that their sum is the same to rounding, and no
/// element is multiplied by a 0 that was not there.
fn filled_up(mut row: Vec<(u64, f64)>, length: usize) -> Vec<(u64, f64)> {
    while let Some(&(element, weight)) = row.last()
        && row.len() < length
    {
        row.pop();
        row.extend([(element, weight / 2.0); 2]);
    }
    row
}

impl Along {
    /// That of a dim of a problem, of which at most `most` are taken together; the longest list beside it.
    pub(super) fn of(problem: &ResampleProblem, axis: usize, most: u32) -> (Along, u64) {
        if problem.taps[axis] == Taps::Same {
            return (Along::Same, 1);
        }
        let rows = problem.rows(axis);
        if rows.iter().all(|row| matches!(row[..], [(_, weight)] if weight == 1.0)) {
            return (Along::One, 1);
        }
        let longest = rows.iter().map(Vec::len).max().unwrap_or(1).max(1) as u64;
        let together = longest.min(u64::from(most)) as u32;
        // What fills a list up costs a rounding of a sum, which results of 16 bits do not show.
        let is_even = rows.iter().all(|row| row.len() as u64 == longest) && longest.is_multiple_of(u64::from(together));
        let may_fill = problem.compute == DType::F32 && problem.to.dtype.bytes() < 4 && rows.iter().all(|row| !row.is_empty());
        if longest <= MOST_EVEN && (is_even || may_fill) {
            // Whole so many as are taken together.
            return (Along::Even { length: longest.next_multiple_of(u64::from(together)) as u32, together }, longest);
        }
        let full = rows.iter().all(|row| !row.is_empty() && row.len().is_multiple_of(together as usize));
        (Along::Few { together, full }, longest)
    }

    /// Whether one element alone is read, with the weight 1.
    pub(super) fn is_single(self) -> bool {
        !matches!(self, Along::Few { .. } | Along::Even { .. })
    }

    /// The word in kernel names.
    pub(super) fn word(self) -> String {
        match self {
            Along::Same => "s".to_owned(),
            Along::One => "o".to_owned(),
            Along::Even { length, together } if length == together => format!("{length}e"),
            Along::Even { length, together } => format!("{length}e{together}"),
            Along::Few { together, full } => format!("{together}{}", if full { "f" } else { "p" }),
        }
    }
}

verdigris_kir::parameters! {
    /// The table of one dim.
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Table / #[derive(Clone, Debug)] TableArgs of Along as along {
        /// The number of the only element of each position, a u32.
        elements: Option<Read> = (*along == Along::One).then_some(4),
        /// Where the list of each position begins, and its length: two u32.
        lists: Option<Read> = matches!(along, Along::Few { .. }).then_some(8),
        /// The lists: a u32, then the weight, as f32 or at the next multiple of 8 bytes as f64.
        taps: Option<Read> = (!along.is_single()).then_some(if matches!(along, Along::Even { .. }) { 16 } else { 8 }),
    }
}

impl TableArgs {
    /// Puts the table of a dim among the constants of a program.
    pub(super) fn new(problem: &ResampleProblem, axis: usize, along: Along, double: bool, program: &mut Program) -> TableArgs {
        let mut constant = |bytes: Vec<u8>| {
            program.constants.push(bytes);
            Address { base: Base::Constant(program.constants.len() - 1), offset_bytes: 0 }
        };
        match along {
            Along::Same => TableArgs { elements: None, lists: None, taps: None },
            Along::One => {
                let only = |row: Vec<(u64, f64)>| (row.first().map_or(0, |(i, _)| *i) as u32).to_le_bytes();
                TableArgs { elements: Some(constant(problem.rows(axis).into_iter().flat_map(only).collect())), lists: None, taps: None }
            }
            Along::Few { .. } | Along::Even { .. } => {
                let (mut lists, mut taps, mut count) = (Vec::new(), Vec::new(), 0u32);
                let put = |taps: &mut Vec<u8>, i: u64, weight: f64| {
                    taps.extend((i as u32).to_le_bytes());
                    if double {
                        taps.extend([0; 4]);
                        taps.extend(weight.to_le_bytes());
                    } else {
                        taps.extend((weight as f32).to_le_bytes());
                    }
                };
                if let Along::Even { length, .. } = along {
                    for row in problem.rows(axis) {
                        filled_up(row, length as usize).into_iter().for_each(|(i, weight)| put(&mut taps, i, weight));
                    }
                    return TableArgs { elements: None, lists: None, taps: Some(constant(taps)) };
                }
                for row in problem.rows(axis) {
                    lists.extend(count.to_le_bytes());
                    lists.extend((row.len() as u32).to_le_bytes());
                    count += row.len() as u32;
                    row.iter().for_each(|&(i, weight)| put(&mut taps, i, weight));
                }
                // What is read in place of the first of an empty list.
                put(&mut taps, 0, 0.0);
                TableArgs { elements: None, lists: Some(constant(lists)), taps: Some(constant(taps)) }
            }
        }
    }
}

/// An element that is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tap<'k, T> {
    pub(super) index: Val<'k, u32>,
    /// `None` stands for 1.
    pub(super) weight: Option<Val<'k, T>>,
    /// Otherwise it is one of those that count, again, or any where there are none; `None` of one that counts in any case.
    pub(super) counts: Option<Val<'k, bool>>,
}

impl<'k, T> Tap<'k, T> {
    fn whole(index: Val<'k, u32>) -> Self {
        Tap { index, weight: None, counts: None }
    }
}

/// The taps along one dim in a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis<'k> {
    pub(super) k: Kernel<'k>,
    pub(super) along: Along,
    pub(super) table: Table<'k>,
}

impl<'k> Axis<'k> {
    fn only(&self, position: Val<'k, u32>) -> Val<'k, u32> {
        let elements = self.table.elements.expect("a table of single elements has them");
        self.k.ld_global(elements.at(position, 4), 0)
    }

    /// Where the list of a position begins, and its length.
    fn list(&self, position: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        let lists = self.table.lists.expect("a table of lists has their places");
        let words = self.k.ld_global_vector::<u32>(lists.at(position, 8), 0, 2, Cache::Default);
        [words[0], words[1]]
    }

    /// Entry `at` of all lists.
    fn entry<T: Compute>(&self, at: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, T>) {
        let (k, taps) = (self.k, self.table.taps.expect("a table of lists has them"));
        if T::DTYPE == DType::F64 {
            let place = taps.at(at, 16);
            return (k.ld_global(place, 0), T::from_f64(k.ld_global::<f64>(place, 8)));
        }
        let words = k.ld_global_vector::<u32>(taps.at(at, 8), 0, 2, Cache::Default);
        (words[0], T::from_f32(words[1].bitcast()))
    }

    /// So many entries from `at` on, of which two stand in 16 bytes as f32.
    fn entries<T: Compute>(&self, at: Val<'k, u32>, count: u32) -> Vec<Tap<'k, T>> {
        if T::DTYPE == DType::F64 || !count.is_multiple_of(2) {
            let one = |i| {
                let (index, weight) = self.entry(at + i);
                Tap { index, weight: Some(weight), counts: None }
            };
            return (0..count).map(one).collect();
        }
        let (k, taps) = (self.k, self.table.taps.expect("a table of lists has them"));
        let two = |pair: u32| {
            let words = k.ld_global_vector::<u32>(taps.at(at, 8), i64::from(16 * pair), 4, Cache::Default);
            [(words[0], words[1]), (words[2], words[3])]
        };
        let tap = |(index, weight): (Val<'k, u32>, Val<'k, u32>)| Tap { index, weight: Some(T::from_f32(weight.bitcast())), counts: None };
        (0..count / 2).flat_map(two).map(tap).collect()
    }

    /// Runs `body` for the taps of a position, so many at a time as are taken together.
    pub(super) fn each<T: Compute>(&self, position: Val<'k, u32>, body: &dyn Fn(&[Tap<'k, T>])) {
        match self.along {
            Along::Same => body(&[Tap::whole(position)]),
            Along::One => body(&[Tap::whole(self.only(position))]),
            Along::Even { length, together } => {
                for first in (0..length).step_by(together as usize) {
                    body(&self.entries(position * length + first, together));
                }
            }
            Along::Few { together, full } => {
                let [first, count] = self.list(position);
                self.k.range_step(0, count, together, |at| {
                    let tap = |i: u32| {
                        let number = at + i;
                        let is_sure = full || i == 0;
                        let (index, weight) = self.entry(first + if is_sure { number } else { number.min(count - 1) });
                        Tap { index, weight: Some(weight), counts: (!is_sure).then(|| number.lt(count)) }
                    };
                    body(&(0..together).map(tap).collect::<Vec<_>>());
                });
            }
        }
    }

    /// The taps of a position whose list is no longer than is taken together.
    pub(super) fn all<T: Compute>(&self, position: Val<'k, u32>) -> Vec<Tap<'k, T>> {
        match self.along {
            Along::Same => vec![Tap::whole(position)],
            Along::One => vec![Tap::whole(self.only(position))],
            Along::Even { length, .. } => self.entries(position * length, length),
            Along::Few { together, full } => {
                let [first, count] = self.list(position);
                let last = if full { count } else { count.max(1u32) - 1 };
                let tap = |i: u32| {
                    let (index, weight) = self.entry(first + if full { self.k.constant(i) } else { last.min(i) });
                    Tap { index, weight: Some(weight), counts: (!full).then(|| count.gt(i)) }
                };
                (0..together).map(tap).collect()
            }
        }
    }
}
