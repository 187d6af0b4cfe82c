//! A result against the reference.
//!
//! An element passes if it lies within its error bound plus half an ULP of the output type ([`crate::tolerance`]); a NaN passes for a NaN, an
//! infinity for the same infinity. An element whose bits did not change and that is wrong, or ought to be NaN, counts as unwritten.
//! Bytes that belong to no element (gaps between rows, the guard behind the last) must not change.

use std::fmt;

use verdigris_tensor::num;

use crate::run::Expected;
use crate::tolerance::{Range, half_ulp};

/// An element of the output beside what the reference says of it.
#[derive(Clone, PartialEq, Debug)]
pub struct Compared {
    /// `[batch…, row, column]`.
    pub index: Vec<u64>,
    /// What was found.
    pub got: f64,
    /// The reference, not rounded to the output type.
    pub want: f64,
    /// How far `got` may lie from `want`.
    pub tolerance: f64,
}

/// What a comparison found.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Report {
    /// Elements looked at.
    pub elements: u64,
    /// Elements that do not pass, unwritten ones included.
    pub failures: u64,
    /// The first element that does not pass, in the order of positions.
    pub first_wrong: Option<Compared>,
    /// Elements that were not written.
    pub unwritten: u64,
    /// The first of them.
    pub first_unwritten: Option<Vec<u64>>,
    /// Elements about which the rounding model says nothing (overflow on the way). They pass if they were written.
    pub unjudged: u64,
    /// Bytes changed that belong to no element.
    pub stray_bytes: u64,
    /// Offset of the first of them.
    pub first_stray_byte: Option<u64>,
    /// The greatest distance from the reference, in units in the last place of the output type at the reference.
    pub max_ulp: f64,
    /// `‖got − want‖ / ‖want‖` over the judged finite elements; 0 if both are 0.
    pub relative_frobenius: f64,
    /// The element with the greatest distance in tolerances, whether it passes or not. `None` if no element was judged.
    pub worst: Option<Compared>,
    /// The buffer was shorter than the output; nothing else was looked at.
    pub short_buffer: Option<(u64, u64)>,
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Compared { index, got, want, tolerance } = self;
        write!(f, "{index:?}: got {got:e}, want {want:e} ± {tolerance:.3e}")
    }
}

impl Report {
    /// Whether everything is right.
    pub fn passes(&self) -> bool {
        self.failures == 0 && self.stray_bytes == 0 && self.short_buffer.is_none()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((have, need)) = self.short_buffer {
            return write!(f, "the output spans {need} bytes, but the buffer has {have}");
        }
        write!(f, "{} of {} elements wrong", self.failures, self.elements)?;
        if let Some(index) = &self.first_unwritten {
            write!(f, "; {} not written, first {index:?}", self.unwritten)?;
        }
        if let Some(offset) = self.first_stray_byte {
            write!(f, "; {} bytes written that belong to no element, first at byte {offset}", self.stray_bytes)?;
        }
        if self.unjudged > 0 {
            write!(f, "; {} not judged", self.unjudged)?;
        }
        write!(f, "; max {:.2} ulp, relative Frobenius {:.3e}", self.max_ulp, self.relative_frobenius)?;
        if let Some(first) = &self.first_wrong {
            write!(f, "; first at {first}")?;
        }
        match &self.worst {
            Some(worst) if self.first_wrong.as_ref() == Some(worst) => write!(f, ", which is the worst"),
            Some(worst) => write!(f, "; worst at {worst}"),
            None => Ok(()),
        }
    }
}

/// Compares the buffer `after` a run with what is expected; `before` is what it held. Both start at the output's first element.
pub fn compare<Id>(expected: &Expected<Id>, before: &[u8], after: &[u8]) -> Report {
    let mut report = Report::default();
    let (dtype, size) = (expected.dtype, expected.dtype.bytes());
    let need = expected.layout.span_bytes(dtype);
    let have = before.len().min(after.len());
    if (have as u128) < need {
        report.short_buffer = Some((have as u64, u64::try_from(need).unwrap_or(u64::MAX)));
        return report;
    }

    let mut is_element = vec![false; have];
    let (mut error_square, mut want_square) = (0.0, 0.0);
    let mut worst_ratio = -1.0;
    for (&position, &bounded) in expected.positions.iter().zip(&expected.values) {
        let Some(offset) = expected.layout.offset_of_position(position) else { continue };
        let place = offset as usize * size..(offset as usize + 1) * size;
        is_element[place.clone()].fill(true);
        let Some(got) = num::read_element(dtype, &after[place.clone()]) else { continue };
        report.elements += 1;
        let unchanged = before[place.clone()] == after[place];

        let range = Range::of(dtype);
        let want = if dtype.is_integer() && bounded.value.is_nan() {
            0.0
        } else if range.saturates {
            bounded.value.clamp(-range.below, range.largest)
        } else {
            bounded.value
        };
        let tolerance = bounded.error + half_ulp(dtype, want.abs() + bounded.error);
        let distance = (got - want).abs();
        // Beyond this size a value rounds to infinity.
        let overflow = range.largest + half_ulp(dtype, range.largest);
        let is_right = if bounded.error == f64::INFINITY {
            report.unjudged += 1;
            !(unchanged && got.is_nan())
        } else if want.is_nan() {
            got.is_nan() && !unchanged
        } else if want.is_infinite() {
            got == want
        } else if got.is_infinite() {
            !range.saturates && want.abs() + bounded.error >= overflow && got.is_sign_positive() == (want > 0.0)
        } else {
            distance <= tolerance
        };
        let compared = || Compared { index: index_of(expected, position), got, want, tolerance };
        if !is_right {
            report.failures += 1;
            report.first_wrong.get_or_insert_with(compared);
            if unchanged {
                report.unwritten += 1;
                report.first_unwritten.get_or_insert_with(|| index_of(expected, position));
            }
        }

        if bounded.error == f64::INFINITY {
            continue;
        }
        if distance.is_finite() {
            error_square += distance * distance;
            want_square += want * want;
            report.max_ulp = report.max_ulp.max(distance / (2.0 * half_ulp(dtype, want.abs())));
        }
        let ratio = match (is_right, distance.is_finite()) {
            (true, true) if tolerance > 0.0 => distance / tolerance,
            (true, _) => 0.0,
            (false, true) if tolerance > 0.0 => distance / tolerance,
            (false, _) => f64::INFINITY,
        };
        if ratio > worst_ratio {
            worst_ratio = ratio;
            report.worst = Some(compared());
        }
    }
    if error_square > 0.0 {
        report.relative_frobenius = (error_square / want_square).sqrt();
    }

    // With a selection of positions the other elements' bytes are not known, so only whole comparisons look for strays.
    if expected.positions.iter().copied().eq(0..expected.layout.elements()) {
        for (i, _) in is_element.iter().enumerate().filter(|(_, is_element)| !**is_element) {
            if before[i] != after[i] {
                report.stray_bytes += 1;
                report.first_stray_byte.get_or_insert(i as u64);
            }
        }
    }
    report
}

fn index_of<Id>(expected: &Expected<Id>, position: u64) -> Vec<u64> {
    let mut rest = position;
    let mut index: Vec<u64> = (expected.layout.dims().iter().rev())
        .map(|&extent| {
            let i = rest % extent;
            rest /= extent;
            i
        })
        .collect();
    index.reverse();
    index
}
