//! Resampling and padding.

use verdigris_graph::Sampling;

use super::view::is_channels_last;
use super::{Drawing, unfit};
use crate::error::Error;

impl Drawing {
    pub(super) fn resample(&mut self, sampling: &Sampling) -> Result<(), Error> {
        let given = self.given(0)?;
        let x = self.input(0, "x")?;
        let y = self.g.resample("resample", sampling.clone(), x)?;
        self.store_in(y, "y", given.dtype, is_channels_last(&given.layout))
    }

    /// What is below 0 is left out, then what is above 0 is put around.
    pub(super) fn pad(&mut self, before: &[i64], after: &[i64], value: f64) -> Result<(), Error> {
        let given = self.given(0)?;
        let dims = given.layout.dims();
        if [before, after].iter().any(|list| list.len() != dims.len()) {
            let what = format!("padding {before:?} and {after:?} of {} dims", dims.len());
            return Err(unfit(what, "there is one number before and one after for each dim"));
        }
        let x = self.input(0, "x")?;
        let out = |pad: i64| pad.min(0).unsigned_abs();
        let starts: Vec<u64> = before.iter().zip(dims).map(|(&pad, &dim)| out(pad).min(dim)).collect();
        let stops: Vec<u64> = after.iter().zip(dims).map(|(&pad, &dim)| dim.saturating_sub(out(pad))).collect();
        if starts.iter().zip(&stops).any(|(start, stop)| start > stop) || [before, after].iter().any(|list| list.contains(&i64::MIN)) {
            let what = format!("padding {before:?} and {after:?} of {dims:?}");
            return Err(unfit(what, "padding below 0 leaves out at most all elements of a dim"));
        }
        let is_cut = starts.iter().any(|&start| start > 0) || stops.iter().zip(dims).any(|(stop, dim)| stop < dim);
        let kept = if is_cut { self.g.slice("cut", x, &starts, &stops, &vec![1; dims.len()])? } else { x };
        let [before, after] = [before, after].map(|list| list.iter().map(|&pad| pad.max(0) as u64).collect::<Vec<u64>>());
        let y = self.g.pad("pad", kept, &before, &after, value)?;
        self.store_in(y, "y", given.dtype, is_channels_last(&given.layout))
    }
}

#[cfg(test)]
mod tests {
    use verdigris_graph::{Border, Filter, Sampling};
    use verdigris_tensor::{DType, Layout};

    use crate::recipe::{Function, Gradient, Input, draw};

    fn input(dims: &[u64]) -> Option<Input> {
        Some(Input { dtype: DType::Bf16, layout: Layout::row_major(dims).expect("small dims"), alignment_bytes: None })
    }

    #[test]
    fn results_have_the_dims_that_follow_and_gradients_those_of_the_tensor() {
        let interpolate = Sampling::Interpolate { filter: Filter::Linear { align_corners: false }, out: vec![8, 3], factors: vec![] };
        let pad = Sampling::Pad { border: Border::Reflect, before: vec![1, 0], after: vec![2, 3] };
        let constant = Function::Pad { before: vec![0, 0, -1, 2], after: vec![0, 0, 2, -3], value: verdigris_graph::Real(0.5) };
        for (function, want) in
            [(Function::Resample(interpolate), [2, 3, 8, 3]), (Function::Resample(pad), [2, 3, 7, 9]), (constant, [2, 3, 5, 5])]
        {
            let recipe = draw(&function, &[input(&[2, 3, 4, 6])]).expect("is drawn");
            assert_eq!(recipe.results[0].layout.dims(), want);
            let of = Gradient { of: function, with_respect_to: 0, saved: vec![], dims: Some(vec![2, 3, 4, 6]), dtype: None };
            let recipe = draw(&Function::Gradient(Box::new(of)), &[input(&want)]).expect("is drawn");
            assert_eq!(recipe.results[0].layout.dims(), [2, 3, 4, 6]);
        }
    }

    #[test]
    fn padding_that_does_not_fit_is_refused() {
        let of = |before: &[i64], after: &[i64]| {
            let function = Function::Pad { before: before.to_vec(), after: after.to_vec(), value: verdigris_graph::Real(0.0) };
            draw(&function, &[input(&[2, 3])]).map(drop)
        };
        assert!(of(&[0], &[0]).is_err());
        assert!(of(&[0, -2], &[0, -2]).is_err());
        assert!(of(&[0, i64::MIN], &[0, 0]).is_err());
        of(&[0, -2], &[0, -1]).expect("nothing is left, which is no error");
    }
}
