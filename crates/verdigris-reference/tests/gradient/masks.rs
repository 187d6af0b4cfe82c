//! Gradients that are infinite or NaN, and what masks them.

use verdigris_reference::masked::{MaskedGradient, masked_gradients};
use verdigris_tensor::DType;

use super::outputs;

/// What a function did not take, or holds constant, gets 0 and no product with 0, whatever comes in.
#[test]
fn what_plays_no_part_masks_infinities() {
    for case in [DType::F32, DType::F64].into_iter().flat_map(|dtype| masked_gradients(dtype).unwrap()) {
        let got = outputs(&case.graph, &case.inputs);
        for (uid, want) in &case.want {
            let is_right = got[uid].iter().zip(want).all(|(got, want)| MaskedGradient::is_right(*got, *want));
            assert!(is_right && got[uid].len() == want.len(), "{}: {:?}, not {want:?}", case.name, got[uid]);
        }
    }
}
