//! Problems in words: one line of text for each, which a person reads and from which the problem is made again.
//!
//! ```text
//! conv fprop bf16 nhwc n=32 c=64 h=56 w=56 k=64 r=3 s=3 stride=2 pad=1 + add(channel) + relu
//! gemm bf16 m=4096 n=4096 k=1024 b=t + add(row) + gelu_tanh d=f32
//! map f32 dims=1048576 + load(packed) + exp(0) + store(1,packed)
//! ```
//!
//! First stands the kind, then the type of every operand of which no other is told, then the attributes in a fixed order, `name=value`. What is not
//! told has its usual value: no padding, a stride of 1, packed operands, the precision that the operands' types usually have. Equal problems have
//! equal text, so the text itself serves as a key.
//!
//! **Operands** are parts with colons between, each left out where it is usual: the element type; the layout, which is a word (`nhwc`, `n` for row-major,
//! `t` for column-major, `channel`, `row`, `column`, `one`, `packed`) or the strides in elements, `(64,1)`; `+16`, elements before the first one; `@3`, the
//! slot, where it is not the next that nobody has used.
//!
//! **Steps** of an epilogue or a chain stand behind a `+` each, those of a prologue behind a `<`. Steps of a chain name values by their position in
//! it. Factors are numbers, or `bound` to a host scalar.

mod attention;
mod batch_norm;
mod chain;
mod codec;
mod conv;
mod gemm;
mod norm;
mod resample;
mod rows;

use std::fmt;
use std::str::FromStr;

use codec::Text;

use crate::error::Error;
use crate::problem::Problem;

/// The problem in words, which read as that problem.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Text::writer(self.kind());
        let mut copy = self.clone();
        // Only reading refuses.
        describe(&mut text, &mut copy).map_err(|_| fmt::Error)?;
        f.write_str(text.written())
    }
}

/// A problem from words, as they say it: what was printed comes back. Who writes words by hand brings it into form ([`Problem::canonical`]).
///
/// # Errors
/// [`Error::Words`]; whatever rule of problems it breaks.
///
/// ```
/// use verdigris_graph::{Key, Problem};
///
/// let problem: Problem = "gemm bf16 m=256 n=128 k=64 b=t + add(row) + relu d=f32".parse()?;
/// assert_eq!(problem.to_string().parse(), Ok(problem.clone()));
/// let Problem::Gemm(gemm) = &problem else { panic!("a product") };
/// assert_eq!((gemm.layout_letters(), gemm.epilogue.len()), ("nt".to_owned(), 2));
/// // The key follows from the words.
/// assert_eq!(Key::of(&problem).to_string().len(), 32);
/// let wrong = "gemm bf16 m=256 n=128".parse::<Problem>().unwrap_err();
/// assert_eq!(wrong.to_string(), "a problem in words: `k=` is missing; the words end there");
/// # Ok::<(), verdigris_graph::Error>(())
/// ```
impl FromStr for Problem {
    type Err = Error;

    fn from_str(text: &str) -> Result<Problem, Error> {
        let (kind, mut text) = Text::reader(text);
        let mut problem = match kind {
            "gemm" => Problem::Gemm(gemm::blank()),
            "conv" => Problem::Conv(conv::blank()),
            "map" => Problem::Map(chain::blank_map()),
            "reduce" => Problem::Reduce(chain::blank_reduce()),
            "scan" => Problem::Scan(rows::blank_scan()),
            "softmax" => Problem::Softmax(rows::blank_softmax()),
            "pool" => Problem::Pool(rows::blank_pool()),
            "norm" => Problem::Norm(norm::blank()),
            "batch_norm" => Problem::BatchNorm(batch_norm::blank()),
            "attention" => Problem::Attention(attention::blank()),
            "resample" => Problem::Resample(resample::blank()),
            _ => {
                return Err(codec::error(
                    "`gemm`, `conv`, `map`, `reduce`, `scan`, `softmax`, `pool`, `norm`, `batch_norm`, `attention` or `resample` stands first",
                    kind,
                ));
            }
        };
        describe(&mut text, &mut problem)?;
        text.end()?;
        // Only what is legal is given; its form stays, so that what was printed comes back whatever form it had.
        problem.clone().canonical()?;
        Ok(problem)
    }
}

/// Writes or reads the problem, whichever the text does.
fn describe(text: &mut Text<'_>, problem: &mut Problem) -> Result<(), Error> {
    match problem {
        Problem::Gemm(problem) => gemm::describe(text, problem),
        Problem::Conv(problem) => conv::describe(text, problem),
        Problem::Map(problem) => chain::describe_map(text, problem),
        Problem::Reduce(problem) => chain::describe_reduce(text, problem),
        Problem::Scan(problem) => rows::describe_scan(text, problem),
        Problem::Softmax(problem) => rows::describe_softmax(text, problem),
        Problem::Pool(problem) => rows::describe_pool(text, problem),
        Problem::Norm(problem) => norm::describe(text, problem),
        Problem::BatchNorm(problem) => batch_norm::describe(text, problem),
        Problem::Attention(problem) => attention::describe(text, problem),
        Problem::Resample(problem) => resample::describe(text, problem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::conv::ConvDirection;
    use crate::problem::{ConvExtents, ConvProblem, GemmProblem, Slot};
    use verdigris_tensor::DType;

    fn returns(problem: Problem) -> String {
        let text = problem.to_string();
        assert_eq!(text.parse::<Problem>().unwrap_or_else(|error| panic!("{text}: {error}")), problem, "{text}");
        text
    }

    #[test]
    fn plain_problems_are_short() {
        let gemm = GemmProblem::packed(96, 64, 32, DType::Bf16, DType::F32).expect("a plain product");
        assert_eq!(returns(Problem::Gemm(gemm)), "gemm bf16 m=96 n=64 k=32 d=f32");
        let conv = |direction, input, filter, pads, strides| {
            let extents = ConvExtents { direction, n: 32, c: 64, k: 128, groups: 2, input, filter, pads, strides, dilations: [1; 3] };
            Problem::Conv(ConvProblem::packed(extents, DType::F16, DType::F16).expect("a plain convolution"))
        };
        let fprop = conv(ConvDirection::Fprop, [1, 56, 56], [1, 3, 3], [0, 1, 1], [1, 2, 2]);
        assert_eq!(returns(fprop), "conv fprop f16 nhwc n=32 c=64 h=56 w=56 k=128 r=3 s=3 groups=2 stride=2 pad=1");
        let uneven = conv(ConvDirection::Wgrad, [1, 56, 28], [1, 1, 7], [0, 0, 3], [1, 1, 2]);
        assert_eq!(returns(uneven), "conv wgrad f16 nhwc n=32 c=64 h=56 w=28 k=128 r=1 s=7 groups=2 stride=1x2 pad=0x3");
        let solid = conv(ConvDirection::Dgrad, [8, 28, 28], [3, 3, 3], [1; 3], [1; 3]);
        assert_eq!(returns(solid), "conv dgrad f16 nhwc 3d n=32 c=64 d=8 h=28 w=28 k=128 t=3 r=3 s=3 groups=2 pad=1");
    }

    #[test]
    fn activations_of_a_normalization_are_told() {
        for words in [
            "batch_norm forward bf16 rows=8 channels=4 eps=1e-5 activation=silu scale=f32 bias=f32",
            "batch_norm forward f32 rows=2x4 channels=4 eps=1e-5 activation=clamp[lower=0.0,upper=6.0] x=nchw y=nchw",
            "batch_norm backward f32 rows=8 channels=4 activation=hard_swish bias=channel dx=nhwc",
            "batch_norm backward f32 rows=8 channels=4 relu bias=channel dx=nhwc",
        ] {
            let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
            assert_eq!(returns(problem), words);
        }
    }

    #[test]
    fn slots_out_of_order_and_strides_without_a_name_are_told() {
        let mut gemm = GemmProblem::packed(96, 64, 32, DType::Bf16, DType::Bf16).expect("a plain product");
        (gemm.b.slot, gemm.d.slot) = (gemm.a.slot, Slot(7));
        gemm.a.row_stride = 40;
        let problem = Problem::Gemm(gemm.canonical().expect("legal"));
        assert_eq!(returns(problem), "gemm bf16 m=96 n=64 k=32 a=(40,1) b=@0 d=@7");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |text: &str| text.parse::<Problem>().expect_err(text).to_string();
        for (text, told) in [
            (
                "",
                "`gemm`, `conv`, `map`, `reduce`, `scan`, `softmax`, `pool`, `norm`, `batch_norm`, `attention` or `resample` stands first; found ``",
            ),
            ("gemv bf16 m=1", "found `gemv`"),
            ("gemm bf17 m=1 n=1 k=1", "an element type; found `bf17`"),
            ("gemm bf16 m=1 n=x k=1", "`n=` is a number; found `x`"),
            ("gemm bf16 m=1 k=1", "`n=` is missing; found `k=1`"),
            ("gemm bf16 m=1 n=1 k=1 colour=red", "these words say no more; found `colour=red`"),
            ("gemm bf16 m=4 n=4 k=4 a=(4,1,1)", "2 strides; found `(4,1,1)`"),
            ("gemm bf16 m=4 n=4 k=4 a=diagonal", "found `diagonal`"),
            ("gemm bf16 m=4 n=4 k=4 + bend", "found `bend`"),
            ("gemm bf16 m=4 n=4 k=4 + add(row", "found `add(row`"),
            ("gemm bf16 m=4 n=4 k=4 + clamp[lower=2.0,upper=1.0]", "the upper clamp bound is not below the lower one"),
            ("conv sideways bf16 nhwc n=1", "found `sideways`"),
            ("map f32 dims=4 + load(packed) + store(7,packed)", "a step names values of earlier steps"),
            ("batch_norm forward f32 rows=8 channels=4 eps=1e-5 relu activation=silu", "not both"),
            ("batch_norm forward f32 rows=8 channels=4 eps=1e-5 activation=exp", "a function that has a gradient"),
            ("batch_norm forward f32 rows=8 channels=4 eps=1e-5 activation=silu add=nhwc", "behind a sum"),
            ("batch_norm forward f32 rows=8 channels=4 eps=1e-5 activation=clamp[lower=2.0,upper=1.0]", "the upper clamp bound"),
            ("batch_norm backward f32 rows=8 channels=4 activation=silu y=nhwc dx=nhwc", "behind a sum"),
        ] {
            assert!(wrong(text).contains(told), "{text}: {}", wrong(text));
        }
    }
}
