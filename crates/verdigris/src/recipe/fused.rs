//! A function with a chain of steps behind its first result, as one graph: what a compiler of programs finds behind a product and hands over, so that the chain
//! is the product's epilogue.

use verdigris_graph::{BinaryOp, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

use super::view::{View, in_order_of};
use super::{Drawing, Function, Input, Stored, unfit};
use crate::error::Error;

/// A function with steps behind its first result: [`Function::Fused`].
///
/// The tensors of the function come first, those that are missing included; behind them one for each step that reads one, in order. Such an operand has the dims of
/// the result, or broadcasts to them: as one element, as a vector over one dim, or with dims of 1 where the function's op has the dims of the result (a
/// linear layer's has not: its leading dims are one there). Steps compute in f32 (f64 where an operand is f64) without rounding between them, and the result is
/// rounded once. It lies as the function's result does.
///
/// ```
/// use verdigris::recipe::{Function, Fused, Input, Step, draw};
/// use verdigris::{BinaryOp, DType, Layout, Precision, UnaryOp};
///
/// let tensor = |dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype: DType::Bf16, layout, alignment_bytes: None }));
/// let (x, w, bias, residual) = (tensor(&[6, 64])?, tensor(&[32, 64])?, tensor(&[32])?, tensor(&[6, 32])?);
/// let steps = vec![Step::Unary(UnaryOp::GeluErf), Step::Binary { f: BinaryOp::Add, is_right: false }];
/// let of = Function::Linear(Precision::Fp32, UnaryOp::Identity);
/// let fused = Fused { of, tensors: 3, steps, keeps: false, dtype: DType::Bf16 };
/// let recipe = draw(&Function::Fused(Box::new(fused)), &[x, w, bias, residual])?;
/// assert_eq!((recipe.graph.nodes.len(), recipe.results[0].layout.dims()), (4, &[6, 32][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct Fused {
    /// The function. It writes one result, or several of which the first goes on and the others may be left out: a place beside a maximum, statistics.
    pub of: Function,
    /// How many tensors are the function's.
    pub tensors: usize,
    /// What follows, in order.
    pub steps: Vec<Step>,
    /// Whether the function's own result is a result too, behind the other. It is then rounded before the steps read it.
    pub keeps: bool,
    /// The element type of the result.
    pub dtype: DType,
}

/// What becomes of a value.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Step {
    /// `f(value)`.
    Unary(UnaryOp),
    /// `f(value, operand)`, or `f(operand, value)`.
    Binary {
        /// The function of two.
        f: BinaryOp,
        /// Whether the value is the right operand.
        is_right: bool,
    },
}

impl Fused {
    /// The number of tensors that steps read.
    fn operands(&self) -> usize {
        self.steps.iter().filter(|step| matches!(step, Step::Binary { .. })).count()
    }
}

/// The function with its steps.
pub(super) fn draw(fused: &Fused, given: &[Option<Input>]) -> Result<Drawing, Error> {
    let Fused { of, tensors, steps, keeps, dtype } = fused;
    let wanted = tensors.saturating_add(fused.operands());
    if given.len() < wanted {
        let what = format!("{} tensors for `{}` and its steps", given.len(), of.name());
        return Err(unfit(what, "each step of two operands has a tensor, behind those of the function"));
    }
    let whole = given;
    let (given, _) = given.split_at(*tensors);
    if matches!(of, Function::Fused(_)) {
        return Err(unfit("steps behind a function that has steps", "they are one list"));
    }
    let mut d = Drawing::of(of, given, None)?;
    if d.results.is_empty() {
        return Err(Error::NoResult);
    }
    let Stored { outcome, view } = d.results.swap_remove(0);
    // What else it writes is nobody's, and left out where it need not be written.
    for other in std::mem::take(&mut d.results) {
        let wide = if other.outcome.dtype.is_float() && other.outcome.dtype != DType::F64 { DType::F32 } else { other.outcome.dtype };
        d.g.make_virtual(other.outcome.uid, wide)?;
    }
    d.given[..whole.len()].copy_from_slice(whole);
    if !keeps {
        let wide = if outcome.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        d.g.make_virtual(outcome.uid, wide)?;
    }
    let mut value = outcome.uid;
    let mut place = *tensors;
    for step in steps {
        value = match *step {
            Step::Unary(f) => d.g.unary("step", f, value)?,
            Step::Binary { f, is_right } => {
                let operand = d.operand(place, value, (&outcome.layout, view))?;
                place += 1;
                let (x, z) = if is_right { (operand, value) } else { (value, operand) };
                d.g.binary("step", f, x, z)?
            }
        };
    }
    if value == outcome.uid {
        return Err(unfit(format_args!("no step behind `{}`", of.name()), "there is at least one"));
    }
    let layout = in_order_of(&outcome.layout, outcome.layout.dims())?;
    d.store_as(value, "result", *dtype, layout, view)?;
    if *keeps {
        d.results.push(Stored { outcome, view });
    }
    Ok(d)
}

impl Drawing {
    /// An operand of a step, as the graph sees the value that it meets.
    fn operand(&mut self, place: usize, value: Uid, (result, view): (&Layout, View)) -> Result<Uid, Error> {
        let given = self.given(place)?;
        let (dims, rank) = (given.layout.dims(), self.dims_of(value).len());
        let behind = result.rank().checked_sub(dims.len());
        let whole = |behind: usize| dims.iter().zip(&result.dims()[behind..]).all(|(&own, &dim)| own == 1 || own == dim);
        let broadcasts = behind.is_some_and(whole);
        let mut long = dims.iter().enumerate().filter(|&(_, &dim)| dim != 1).map(|(axis, _)| axis + behind.unwrap_or_default());
        let seen = match (dims == result.dims(), view, long.next(), long.next()) {
            _ if !broadcasts => None,
            (true, ..) => Some(view),
            (_, View::Same, ..) if dims.len() == rank => Some(View::Same),
            (_, _, None, _) => Some(View::One { rank }),
            (_, View::Same, Some(axis), None) => Some(View::Channel { rank, axis }),
            (_, View::Matrix { is_turned }, Some(axis), None) if axis + 1 == result.rank() => {
                Some(View::Channel { rank, axis: usize::from(!is_turned) })
            }
            _ => None,
        };
        let seen = seen.ok_or_else(|| {
            let what = format!("a step's operand of dims {dims:?} beside a result of {:?}", result.dims());
            unfit(what, "it has the dims of the result, or is one element or a vector over one dim; a linear layer's is over the last")
        })?;
        self.input_as(place, "operand", seen)
    }
}

#[cfg(test)]
mod tests {
    use verdigris_engines::arch::Arch;
    use verdigris_graph::Precision;
    use verdigris_graph::pattern::partition;

    use super::super::view::in_format;
    use super::super::{Convolution, Gradient, Recipe, Saved, draw};
    use super::*;

    fn tensor(dtype: DType, dims: &[u64]) -> Option<Input> {
        Some(Input { dtype, layout: in_format(dims, dims.len() == 4).expect("a packed layout"), alignment_bytes: None })
    }

    fn half(dims: &[u64]) -> Option<Input> {
        tensor(DType::Bf16, dims)
    }

    fn linear() -> Function {
        Function::Linear(Precision::Fp32, UnaryOp::Identity)
    }

    fn conv() -> Function {
        let conv = Convolution {
            strides: vec![],
            pads_before: vec![1, 1],
            pads_after: vec![1, 1],
            dilations: vec![],
            groups: 1,
            precision: Precision::Fp32,
        };
        Function::ConvFprop(conv, UnaryOp::Identity)
    }

    fn add() -> Step {
        Step::Binary { f: BinaryOp::Add, is_right: false }
    }

    fn fused(of: Function, tensors: usize, steps: &[Step], keeps: bool) -> Function {
        Function::Fused(Box::new(Fused { of, tensors, steps: steps.to_vec(), keeps, dtype: DType::Bf16 }))
    }

    /// The kinds of the problems that a recipe's graph is cut into, each of which an engine takes.
    fn kinds(recipe: &Recipe) -> Vec<&'static str> {
        let parts = partition(&recipe.graph).expect("cut").parts;
        for part in &parts {
            assert!(verdigris_engines::engines().any(|engine| engine.accept(&part.problem, &Arch::h200()).is_ok()), "{:?}", part.problem);
        }
        parts.iter().map(|part| part.problem.kind()).collect()
    }

    #[test]
    fn steps_stand_in_the_epilogues_of_products() {
        let gelu = [Step::Unary(UnaryOp::GeluErf), add(), Step::Binary { f: BinaryOp::Mul, is_right: false }];
        let given = [half(&[5, 12, 64]), half(&[128, 64]), half(&[128]), half(&[5, 12, 128]), tensor(DType::F32, &[128])];
        let recipe = draw(&fused(linear(), 3, &gelu, false), &given).expect("drawn");
        assert_eq!((kinds(&recipe), recipe.results[0].layout.dims()), (vec!["gemm"], &[5, 12, 128][..]));
        assert_eq!(recipe.results[0].dtype, DType::Bf16);

        let steps = [Step::Binary { f: BinaryOp::Sub, is_right: true }, Step::Unary(UnaryOp::Silu)];
        let of_channels = [half(&[2, 32, 8, 8]), half(&[64, 32, 3, 3]), None, tensor(DType::F32, &[64, 1, 1])];
        let recipe = draw(&fused(conv(), 3, &steps, false), &of_channels).expect("drawn");
        assert_eq!(kinds(&recipe), ["conv"]);
        // Channels-last, as the convolution's own result.
        assert_eq!(recipe.results[0].layout.strides(), [4096, 1, 512, 64]);
        let wide = [half(&[2, 32, 8, 8]), half(&[64, 32, 3, 3]), None, half(&[2, 64, 8, 8])];
        assert_eq!(kinds(&draw(&fused(conv(), 3, &[add(), Step::Unary(UnaryOp::Relu)], false), &wide).expect("drawn")), ["conv"]);
    }

    #[test]
    fn what_is_kept_is_rounded_before_the_steps_and_stored_on_the_way() {
        let given = [half(&[12, 64]), half(&[128, 64]), None];
        let recipe = draw(&fused(linear(), 3, &[Step::Unary(UnaryOp::Silu)], true), &given).expect("drawn");
        let results: Vec<_> = recipe.results.iter().map(|result| (result.dtype, result.layout.dims().to_vec())).collect();
        assert_eq!((kinds(&recipe), results), (vec!["gemm"], vec![(DType::Bf16, vec![12, 128]); 2]));
    }

    #[test]
    fn gradients_carry_steps_too() {
        let gradient = |of: Function| {
            let saved = vec![Saved::Tensor(0), Saved::Tensor(1), Saved::Tensor(2)];
            Function::Gradient(Box::new(Gradient { of, with_respect_to: 0, saved, dims: None, dtype: None }))
        };
        let steps = [Step::Binary { f: BinaryOp::Backward(UnaryOp::GeluErf), is_right: false }];
        let given = [half(&[12, 64]), half(&[12, 128]), half(&[64, 128]), None, half(&[12, 128])];
        assert_eq!(kinds(&draw(&fused(gradient(linear()), 4, &steps, false), &given).expect("drawn")), ["gemm"]);
        let (dy, x, w) = (half(&[2, 64, 8, 8]), half(&[2, 32, 8, 8]), half(&[64, 32, 3, 3]));
        let steps = [add(), Step::Binary { f: BinaryOp::Backward(UnaryOp::Relu), is_right: false }];
        let recipe = draw(&fused(gradient(conv()), 4, &steps, false), &[dy, x, w, None, x, x]).expect("drawn");
        assert_eq!((kinds(&recipe), recipe.results[0].layout.dims()), (vec!["conv"], &[2, 32, 8, 8][..]));
    }

    #[test]
    fn what_does_not_suit_is_told() {
        let told = |steps: &[Step], given: &[Option<Input>]| draw(&fused(linear(), 3, steps, false), given).unwrap_err().to_string();
        let (x, w) = (half(&[5, 12, 64]), half(&[128, 64]));
        assert!(told(&[add()], &[x, w, None]).contains("3 tensors for `linear` and its steps"));
        assert!(told(&[], &[x, w, None]).contains("no step behind `linear`"));
        assert!(told(&[add()], &[x, w, None, half(&[12, 1])]).contains("a step's operand of dims [12, 1] beside a result of [5, 12, 128]"));
        assert!(told(&[add()], &[x, w, None, half(&[2, 5, 12, 128])]).contains("a step's operand of dims [2, 5, 12, 128]"));
        let twice = fused(fused(linear(), 3, &[add()], false), 4, &[add()], false);
        assert!(draw(&twice, &[x, w, None, x, x]).unwrap_err().to_string().contains("steps behind a function that has steps"));
    }

    #[test]
    fn of_several_results_the_first_goes_on() {
        let attention = Function::Attention(verdigris_graph::AttentionSpec::new(0.25));
        let operands = [half(&[1, 2, 3, 8]), half(&[1, 2, 3, 8]), half(&[1, 2, 3, 8])];
        let recipe = draw(&fused(attention, 3, &[Step::Unary(UnaryOp::Relu)], false), &operands).expect("drawn");
        // The log-sum-exp is nobody's.
        assert_eq!((recipe.results.len(), recipe.graph.nodes.len()), (1, 2));
        assert!(recipe.graph.tensors.iter().all(|tensor| tensor.name != "log_sum_exp" || tensor.is_virtual));
    }
}
