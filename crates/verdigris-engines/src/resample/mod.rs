//! Resampling, borders and their gradients ([`verdigris_graph::ResampleProblem`] has the formulas).
//!
//! One engine of two algorithms: `gather` takes everything, `upsample` what makes several outputs of each element by filters that follow the elements. How tensors of
//! both lie stands here.

mod gather;
mod upsample;

use verdigris_graph::{ResampleProblem, View};

use crate::algorithm::{Joined, Listed};
use crate::engine::{Engine, EngineId};

const ID: EngineId = EngineId { name: "resample.gather", number: 1000 };

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Listed::<Joined<upsample::Upsample, gather::Gather>>::new()];

/// The dims `[n, c, depth, height, width]` with the channels innermost, and as they are.
const CHANNELS_LAST: [usize; 5] = [0, 2, 3, 4, 1];
const CHANNELS_FIRST: [usize; 5] = [0, 1, 2, 3, 4];

/// A view with the channels innermost.
fn channels_last(view: &View) -> View {
    View { strides: CHANNELS_LAST.map(|dim| view.strides[dim]).to_vec(), ..view.clone() }
}

/// Whether channels are innermost in what is written.
fn is_last(p: &ResampleProblem) -> bool {
    let (dims, strides) = (p.to_dims(), &p.to.strides);
    let spatial = (2..5).filter(|&d| dims[d] > 1).map(|d| strides[d]).min().unwrap_or(u64::MAX);
    dims[1] > 1 && strides[1] < spatial
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;
    use verdigris_graph::Problem;

    /// The best config by estimate on an H200.
    fn best(words: &str) -> String {
        let problem: Problem = words.parse().expect("a problem in words");
        ENGINES[0].accept(&problem, &Arch::h200()).expect("is taken").best().to_string()
    }

    #[test]
    fn resampling_up_goes_by_blocks_and_borders_by_planes() {
        let up = |filter: &str, layout: &str| {
            let dims = "n=16 c=64 extents=1x128x128 out=1x256x256";
            best(&format!("resample forward bf16 {dims} height={filter}/0.5 width={filter}/0.5 x={layout} y={layout}"))
        };
        for (filter, layout, want) in [
            ("nearest", "nchw", "rows=4,vector=4"),
            ("nearest", "nhwc", "group=1,outputs=0,vector=8"),
            ("linear", "nchw", "rows=4,vector=4"),
            ("linear", "nhwc", "rows=4,vector=4"),
            ("cubic", "nchw", "rows=4,vector=4"),
            ("cubic", "nhwc", "rows=4,vector=4"),
        ] {
            assert_eq!(up(filter, layout), want, "{filter} {layout}");
        }
        let border = |dims: &str| best(&format!("resample forward bf16 {dims} height=reflect/1 width=reflect/1 x=nchw y=nchw"));
        assert_eq!(border("n=16 c=64 extents=1x128x128 out=1x130x130"), "group=8,outputs=2,vector=4");
        assert_eq!(border("n=36 c=504 extents=1x20x113 out=1x22x115"), "group=16,outputs=2,vector=2");
    }
}
