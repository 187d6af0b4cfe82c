//! Resampling and borders, in words.

use verdigris_tensor::DType;

use super::codec::{Text, Word, error};
use super::rows::{BACKWARD, FORWARD, layouts, nowhere};
use crate::error::Error;
use crate::op::Real;
use crate::ops::resample::{Border, Filter, Taps};
use crate::problem::ResampleProblem;

/// What reading fills in.
pub(super) fn blank() -> ResampleProblem {
    ResampleProblem {
        backward: false,
        n: 0,
        c: 0,
        extents: [1; 3],
        out: [1; 3],
        taps: [Taps::Same; 3],
        compute: DType::F32,
        from: nowhere(),
        to: nowhere(),
    }
}

const FILTERS: [(&str, Filter); 6] = [
    ("nearest", Filter::Nearest),
    ("nearest_exact", Filter::NearestExact),
    ("linear", Filter::Linear { align_corners: false }),
    ("linear_corners", Filter::Linear { align_corners: true }),
    ("cubic", Filter::Cubic { align_corners: false }),
    ("cubic_corners", Filter::Cubic { align_corners: true }),
];
const BORDERS: [(&str, Border); 3] = [("reflect", Border::Reflect), ("replicate", Border::Replicate), ("circular", Border::Circular)];

/// `same`, a filter with the scale, `linear/0.5`, or a border with the elements before the first, `reflect/2`.
impl Word for Taps {
    const WHAT: &'static str = "`same`, filter/scale or border/before";
    fn print(&self) -> String {
        match *self {
            Taps::Same => "same".to_owned(),
            Taps::Filter { filter, scale } => {
                let name = FILTERS.iter().find(|(_, other)| *other == filter).map_or("", |(name, _)| name);
                format!("{name}/{}", scale.print())
            }
            Taps::Border { border, before } => {
                let name = BORDERS.iter().find(|(_, other)| *other == border).map_or("", |(name, _)| name);
                format!("{name}/{before}")
            }
        }
    }
    fn parse(text: &str) -> Option<Taps> {
        if text == "same" {
            return Some(Taps::Same);
        }
        let (name, number) = text.split_once('/')?;
        if let Some(&(_, filter)) = FILTERS.iter().find(|(other, _)| *other == name) {
            return Some(Taps::Filter { filter, scale: Real::parse(number)? });
        }
        let &(_, border) = BORDERS.iter().find(|(other, _)| *other == name)?;
        Some(Taps::Border { border, before: number.parse().ok()? })
    }
}

pub(super) fn describe(text: &mut Text<'_>, problem: &mut ResampleProblem) -> Result<(), Error> {
    let word = text.word("`forward` or `backward`", || (if problem.backward { BACKWARD } else { FORWARD }).to_owned())?;
    if text.is_reading() {
        problem.backward = match word.as_str() {
            FORWARD => false,
            BACKWARD => true,
            _ => return Err(error("`forward` or `backward`", &word)),
        };
    }
    text.usual_type(|| problem.from.dtype)?;
    text.field("n", &mut problem.n, None)?;
    text.field("c", &mut problem.c, None)?;
    text.field("extents", &mut problem.extents, None)?;
    text.field("out", &mut problem.out, None)?;
    for (name, taps) in ["depth", "height", "width"].iter().zip(&mut problem.taps) {
        text.field(name, taps, Some(Taps::Same))?;
    }
    text.choice("compute", &mut problem.compute, Some(DType::F32))?;
    let (from, to) = (layouts(problem.from_dims()), layouts(problem.to_dims()));
    let [read, written] = if problem.backward { ["dy", "dx"] } else { ["x", "y"] };
    text.operand(read, &mut problem.from, &from)?;
    text.operand(written, &mut problem.to, &to)
}

#[cfg(test)]
mod tests {
    use crate::problem::Problem;

    #[test]
    fn words_come_back() {
        for words in [
            "resample forward bf16 n=2 c=8 extents=1x6x7 out=1x12x14 height=linear/0.5 width=linear/0.5",
            "resample backward f32 n=1 c=3 extents=2x6x7 out=5x4x7 depth=cubic_corners/0.25 height=nearest_exact/1.5",
            "resample forward f32 n=1 c=3 extents=1x6x7 out=1x6x9 width=reflect/3",
            "resample forward f32 n=1 c=3 extents=1x6x7 out=1x6x6 width=replicate/-1 y=f16",
        ] {
            let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
            assert_eq!(problem.to_string().parse::<Problem>().unwrap(), problem, "{words}");
        }
        for (words, wrong) in [
            ("resample forward f32 n=1 c=3 extents=1x1x7 out=1x1x15 width=reflect/7", "a reflected border is smaller"),
            ("resample forward f32 n=1 c=3 extents=1x1x7 out=1x1x7 width=circular/-1", "a circular one at most as large"),
            ("resample forward f32 n=1 c=3 extents=1x1x7 out=1x1x9 width=linear/-0.5", "a scale is finite"),
            ("resample forward f32 n=1 c=3 extents=1x1x7 out=1x1x9", "the same elements are as many"),
            ("resample forward f32 n=1 c=3 extents=1x1x0 out=1x1x9 width=linear/0.5", "at least one element"),
            ("resample forward f32 n=1 c=3 extents=1x1x7 out=1x1x9 width=quadratic/0.5", "filter/scale"),
        ] {
            let error = words.parse::<Problem>().unwrap_err().to_string();
            assert!(error.contains(wrong), "{words}: {error}");
        }
    }
}
