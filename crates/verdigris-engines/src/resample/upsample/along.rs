//! Which elements the outputs of one element read along a spatial dim, and with which weights.

use serde::{Deserialize, Serialize};
use verdigris_graph::{ResampleProblem, Taps};

/// The most outputs of an element along a dim.
const MOST_OUTPUTS: u64 = 4;
/// How far from an element its outputs read, at most.
const FAR: i64 = 2;

/// The outputs of an element along a dim: as many neighbouring taps for each of them, which begin so far from the element. Beside the tensor, its outermost elements count in
/// place of those that are not there.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Along {
    /// How far from the element each output's first tap is.
    pub(super) firsts: Vec<i32>,
    /// Taps of an output: a power of two. One alone has the weight 1.
    pub(super) taps: u32,
}

impl Along {
    /// Along a dim of a problem, if that is what it does: its outputs are a whole multiple of its elements, and each of them reads what its number among the outputs of its
    /// element says.
    pub(super) fn of(problem: &ResampleProblem, axis: usize) -> Option<Along> {
        let (extent, out, taps) = (problem.extents[axis], problem.out[axis], problem.taps[axis]);
        if taps == Taps::Same {
            return Some(Along { firsts: vec![0], taps: 1 });
        }
        let outputs = out / extent;
        if !matches!(taps, Taps::Filter { .. }) || outputs * extent != out || !(2..=MOST_OUTPUTS).contains(&outputs) {
            return None;
        }
        // What the outputs of an element far from both ends read.
        let (inner, many) = (4 * FAR as u64, 8 * FAR as u64);
        let inner_rows: Vec<Vec<i64>> = (0..outputs)
            .map(|i| taps.of(inner * outputs + i, many, false).iter().map(|(tap, _)| *tap as i64 - inner as i64).collect())
            .collect();
        let count = inner_rows[0].len();
        let is_neighbours = |row: &Vec<i64>| row.len() == count && row.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let is_near = |row: &Vec<i64>| row.iter().all(|far| far.abs() <= FAR);
        if !count.is_power_of_two() || !inner_rows.iter().all(|row| is_neighbours(row) && is_near(row)) {
            return None;
        }
        let along = Along { firsts: inner_rows.iter().map(|row| row[0] as i32).collect(), taps: count as u32 };
        let follows = |(position, row): (u64, Vec<(u64, f64)>)| {
            let mut places = along.places(position, extent);
            places.dedup();
            row.iter().map(|(element, _)| *element).eq(places) && (count > 1 || row[0].1 == 1.0)
        };
        (0..).zip(problem.rows(axis)).all(follows).then_some(along)
    }

    /// The elements of the taps of an output, one for each.
    fn places(&self, position: u64, extent: u64) -> Vec<u64> {
        let outputs = self.firsts.len() as u64;
        let first = (position / outputs) as i64 + i64::from(self.firsts[(position % outputs) as usize]);
        (first..first + i64::from(self.taps)).map(|place| place.clamp(0, extent as i64 - 1) as u64).collect()
    }

    /// The weight of each tap of each output times `scale`, as f32. Taps that are one element share its weight equally: a difference of theirs would be
    /// no number where the element is infinite.
    pub(super) fn weights(&self, problem: &ResampleProblem, axis: usize, scale: f64) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (position, row) in (0..).zip(problem.rows(axis)) {
            let places = self.places(position, problem.extents[axis]);
            for place in &places {
                let weight = row.iter().find(|(element, _)| element == place).map_or(0.0, |(_, weight)| *weight);
                let shared_by = places.iter().filter(|other| *other == place).count();
                bytes.extend(((weight * scale / shared_by as f64) as f32).to_le_bytes());
            }
        }
        bytes
    }

    /// Outputs of an element.
    pub(super) fn outputs(&self) -> usize {
        self.firsts.len()
    }

    /// Whether each output is an element.
    pub(super) fn is_single(&self) -> bool {
        self.taps == 1
    }

    /// How many elements in front of an element, and behind it, its outputs read.
    pub(super) fn reach(&self) -> [u32; 2] {
        let first = self.firsts.iter().min().map_or(0, |first| first.min(&0).unsigned_abs());
        let last = self.firsts.iter().map(|first| first + self.taps as i32 - 1).max().map_or(0, |last| last.max(0).unsigned_abs());
        [first, last]
    }

    /// The word in kernel names: how many outputs, the taps of each, and where they begin.
    pub(super) fn word(&self) -> String {
        let firsts: String =
            self.firsts.iter().map(|first| if *first < 0 { format!("m{}", -first) } else { format!("p{first}") }).collect();
        format!("{}x{}{firsts}", self.outputs(), self.taps)
    }
}
