//! Two linear layers with an activation between them, and the gradients of both together: each one graph, so that the feed-forward half of a transformer's
//! block is one call and one node of automatic differentiation, and its activation a step of the products' epilogues.

use verdigris_graph::{BinaryOp, Matmul, Precision, ReductionOp, Uid, UnaryOp};
use verdigris_tensor::DType;

use super::view::{View, in_format};
use super::{Drawing, Function, Input, unfit};
use crate::error::Error;

/// Which gradients of two linear layers with an activation between them are wanted, and what they are computed from.
///
/// ```
/// use verdigris::recipe::{Function, Input, MlpGradient, draw};
/// use verdigris::{DType, Layout, Precision, UnaryOp};
///
/// let tensor = |dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype: DType::Bf16, layout, alignment_bytes: None }));
/// let (x, up, down, hidden, y) = (tensor(&[6, 8])?, tensor(&[32, 8])?, tensor(&[8, 32])?, tensor(&[6, 32])?, tensor(&[6, 8])?);
/// let (precision, activation) = (Precision::Fp32, UnaryOp::GeluErf);
///
/// // x, the first weight and bias, the second weight and bias: y, and with `keeps` the hidden values before and behind the activation.
/// let forward = Function::Mlp { precision, activation, keeps: true };
/// let recipe = draw(&forward, &[x, up, tensor(&[32])?, down, None])?;
/// let dims: Vec<_> = recipe.results.iter().map(|result| result.layout.dims().to_vec()).collect();
/// assert_eq!(dims, [[6, 8], [6, 32], [6, 32]]);
///
/// // dy, x, both weights and both hidden values: here the gradients of x and the first weight.
/// let spec = MlpGradient { precision, activation, wanted: [true, true, false, false, false], dtypes: [None; 5] };
/// let recipe = draw(&Function::MlpBackward(spec), &[y, x, up, down, hidden, hidden])?;
/// assert_eq!(recipe.results.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct MlpGradient {
    /// How products are formed and summed.
    pub precision: Precision,
    /// The activation.
    pub activation: UnaryOp,
    /// Of `x`, the first weight, the first bias, the second weight and the second bias.
    pub wanted: [bool; 5],
    /// The element type of each gradient where it is not that of `x`: a bias's own, or the type that a tensor had before it was rounded for the call, so
    /// that its gradient is rounded once.
    pub dtypes: [Option<DType>; 5],
}

const ROWS: View = View::Matrix { is_turned: false };
const TURNED: View = View::Matrix { is_turned: true };
const OF_COLUMNS: View = View::Channel { rank: 2, axis: 1 };

impl Drawing {
    pub(super) fn mlps(&mut self, function: &Function) -> Result<(), Error> {
        match function {
            Function::Mlp { precision, activation, keeps } => self.mlp(*precision, *activation, *keeps),
            Function::MlpBackward(spec) => self.mlp_backward(spec),
            _ => Ok(()),
        }
    }

    /// A weight `[out, in]` for that many values; its number of outputs.
    pub(super) fn outputs(&self, place: usize, inputs: u64) -> Result<u64, Error> {
        match *self.given(place)?.layout.dims() {
            [outputs, of] if of == inputs => Ok(outputs),
            ref dims => Err(unfit(format_args!("a weight of dims {dims:?} for {inputs} values"), "a weight is [out, in]")),
        }
    }

    fn mlp(&mut self, precision: Precision, activation: UnaryOp, keeps: bool) -> Result<(), Error> {
        let given = self.given(0)?;
        let Some((&inputs, leading)) = given.layout.dims().split_last() else {
            return Err(unfit("a tensor without dims", "an operand of a product has at least one dim"));
        };
        let inside = self.outputs(1, inputs)?;
        let outputs = self.outputs(3, inside)?;
        let x = self.input_as(0, "x", ROWS)?;
        let up = self.input_as(1, "up", TURNED)?;
        let pre = self.g.matmul_with("up", Matmul::new(x, up, Uid(0), precision))?;
        let pre = self.biased(2, pre, 1, UnaryOp::Identity)?;
        if keeps {
            // The activation reads what is stored, so that its gradient, which reads it again, belongs to the same numbers.
            self.g.set_dtype(pre, given.dtype)?;
        }
        let hidden = self.activated(activation, pre)?;
        self.g.set_dtype(hidden, given.dtype)?;
        let down = self.input_as(3, "down", TURNED)?;
        let y = self.g.matmul_with("down", Matmul::new(hidden, down, Uid(0), precision))?;
        let y = self.biased(4, y, 1, UnaryOp::Identity)?;
        let of = |last: u64| in_format(&leading.iter().copied().chain([last]).collect::<Vec<u64>>(), false);
        self.store_as(y, "y", given.dtype, of(outputs)?, ROWS)?;
        if keeps {
            self.store_as(pre, "pre", given.dtype, of(inside)?, ROWS)?;
            self.store_as(hidden, "hidden", given.dtype, of(inside)?, ROWS)?;
        }
        Ok(())
    }

    fn mlp_backward(&mut self, spec: &MlpGradient) -> Result<(), Error> {
        let MlpGradient { precision, activation, wanted, dtypes } = *spec;
        let [of_x, of_up, of_up_bias, of_down, of_down_bias] = wanted;
        let (x, up, down, pre) = (self.given(1)?, self.given(2)?, self.given(3)?, self.given(4)?);
        let dtype = |place: usize| dtypes[place].unwrap_or(x.dtype);
        let dy = self.input_as(0, "dy", ROWS)?;
        let product = |a, b| Matmul::new(a, b, Uid(0), precision);
        if of_x || of_up || of_up_bias {
            let (w, z) = (self.input_as(3, "down", ROWS)?, self.input_as(4, "pre", ROWS)?);
            let d_hidden = self.g.matmul_with("d_hidden", product(dy, w))?;
            let d_pre = match activation {
                UnaryOp::Identity => d_hidden,
                f => self.g.binary("d_pre", BinaryOp::Backward(f), d_hidden, z)?,
            };
            self.g.set_dtype(d_pre, pre.dtype)?;
            if of_x {
                let w = self.input_as(2, "up", ROWS)?;
                let dx = self.g.matmul_with("dx", product(d_pre, w))?;
                self.store_as(dx, "dx", dtype(0), in_format(x.layout.dims(), false)?, ROWS)?;
            }
            if of_up {
                let values = self.input_as(1, "values", ROWS)?;
                self.weight_gradient("d_up", (d_pre, values), up, dtype(1), precision)?;
            }
            if of_up_bias {
                self.bias_gradient("d_up_bias", d_pre, up, dtype(2))?;
            }
        }
        if of_down {
            let values = self.input_as(5, "values", ROWS)?;
            self.weight_gradient("d_down", (dy, values), down, dtype(3), precision)?;
        }
        if of_down_bias {
            self.bias_gradient("d_down_bias", dy, down, dtype(4))?;
        }
        Ok(())
    }

    /// `dzᵀ · values`, of a layer that was given the values.
    pub(super) fn weight_gradient(
        &mut self,
        name: &str,
        (dz, values): (Uid, Uid),
        weight: Input,
        dtype: DType,
        precision: Precision,
    ) -> Result<(), Error> {
        let turned = self.g.transpose("turned", dz, &[1, 0])?;
        let dw = self.g.matmul_with(name, Matmul::new(turned, values, Uid(0), precision))?;
        self.store(dw, name, dtype, in_format(weight.layout.dims(), false)?)
    }

    /// The sums of `dz` over its rows, of the layer with this weight.
    fn bias_gradient(&mut self, name: &str, dz: Uid, weight: Input, dtype: DType) -> Result<(), Error> {
        let sums = self.g.reduction(name, ReductionOp::Add, dz, &[0])?;
        let outputs = weight.layout.dims().first().copied().unwrap_or_default();
        self.store_as(sums, name, dtype, in_format(&[outputs], false)?, OF_COLUMNS)
    }
}

#[cfg(test)]
mod tests {
    use verdigris_engines::arch::Arch;
    use verdigris_graph::Graph;
    use verdigris_graph::pattern::partition;

    use super::super::draw;
    use super::*;

    fn tensor(dtype: DType, dims: &[u64]) -> Option<Input> {
        Some(Input { dtype, layout: in_format(dims, false).expect("a packed layout"), alignment_bytes: None })
    }

    fn half(dims: &[u64]) -> Option<Input> {
        tensor(DType::Bf16, dims)
    }

    /// The kinds of the problems that a graph is cut into, each of which an engine takes.
    fn kinds(graph: &Graph) -> Vec<&'static str> {
        let parts = partition(graph).expect("cut").parts;
        for part in &parts {
            let taken = verdigris_engines::engines().any(|engine| engine.accept(&part.problem, &Arch::h200()).is_ok());
            assert!(taken, "{:?}", part.problem);
        }
        parts.iter().map(|part| part.problem.kind()).collect()
    }

    const ACTIVATIONS: [UnaryOp; 4] = [UnaryOp::GeluErf, UnaryOp::GeluTanh, UnaryOp::Relu, UnaryOp::Silu];

    #[test]
    fn the_activation_is_a_step_of_the_first_product_and_its_gradient_one_of_the_second() {
        let (x, up, down) = (half(&[5, 12, 64]), half(&[256, 64]), half(&[64, 256]));
        let (wide, narrow, hidden, y) = (half(&[256]), half(&[64]), half(&[5, 12, 256]), half(&[5, 12, 64]));
        for activation in ACTIVATIONS {
            for (keeps, results) in [(false, 1), (true, 3)] {
                let forward = Function::Mlp { precision: Precision::Fp32, activation, keeps };
                let recipe = draw(&forward, &[x, up, wide, down, narrow]).expect("drawn");
                assert_eq!(recipe.results.len(), results);
                assert_eq!(kinds(&recipe.graph), ["gemm", "gemm"], "{activation:?}");
            }
            let backward = |wanted| {
                let spec = MlpGradient { precision: Precision::Fp32, activation, wanted, dtypes: [None; 5] };
                let recipe = draw(&Function::MlpBackward(spec), &[y, x, up, down, hidden, hidden]).expect("drawn");
                assert_eq!(recipe.results.len(), wanted.iter().filter(|wanted| **wanted).count());
                let mut kinds = kinds(&recipe.graph);
                kinds.sort_unstable();
                kinds
            };
            assert_eq!(backward([true; 5]), ["gemm", "gemm", "gemm", "gemm", "reduce", "reduce"], "{activation:?}");
            assert_eq!(backward([false, false, false, true, false]), ["gemm"]);
            assert_eq!(backward([true, false, false, false, false]), ["gemm", "gemm"]);
        }
    }

    #[test]
    fn many_hidden_values_that_are_kept_are_passed_over_once_more() {
        let (x, up, down) = (half(&[1 << 14, 64]), half(&[512, 64]), half(&[64, 512]));
        let kinds_of = |keeps| {
            let forward = Function::Mlp { precision: Precision::Fp32, activation: UnaryOp::GeluErf, keeps };
            kinds(&draw(&forward, &[x, up, None, down, None]).expect("drawn").graph)
        };
        assert_eq!(kinds_of(true), ["gemm", "map", "gemm"]);
        assert_eq!(kinds_of(false), ["gemm", "gemm"]);
    }

    #[test]
    fn gradients_come_in_the_types_that_the_parameters_had() {
        let (x, up, down, hidden, y) = (half(&[7, 64]), half(&[128, 64]), half(&[32, 128]), half(&[7, 128]), half(&[7, 32]));
        let dtypes = [None, Some(DType::F32), Some(DType::F32), Some(DType::F32), None];
        let spec = MlpGradient { precision: Precision::Fp32, activation: UnaryOp::GeluErf, wanted: [true; 5], dtypes };
        let recipe = draw(&Function::MlpBackward(spec), &[y, x, up, down, hidden, hidden]).expect("drawn");
        let found: Vec<_> = recipe.results.iter().map(|result| (result.dtype, result.layout.dims().to_vec())).collect();
        let (narrow, wide) = (DType::Bf16, DType::F32);
        assert_eq!(found, [(narrow, vec![7, 64]), (wide, vec![128, 64]), (wide, vec![128]), (wide, vec![32, 128]), (narrow, vec![32])]);
    }

    #[test]
    fn weights_that_do_not_fit_are_told() {
        let forward = Function::Mlp { precision: Precision::Fp32, activation: UnaryOp::Relu, keeps: true };
        let told = |given: &[Option<Input>]| draw(&forward, given).unwrap_err().to_string();
        let (x, up) = (half(&[3, 8]), half(&[16, 8]));
        assert!(told(&[x, half(&[16, 9]), None, half(&[8, 16]), None]).contains("a weight of dims [16, 9] for 8 values"));
        assert!(told(&[x, up, None, half(&[8, 15]), None]).contains("a weight of dims [8, 15] for 16 values"));
        assert!(told(&[x, up]).contains("tensor 3 of the call is missing"));
    }
}
