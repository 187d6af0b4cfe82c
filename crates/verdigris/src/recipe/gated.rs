//! The feed-forward half of a decoder's block: two linear layers of the same values, one through an activation times the other, and a linear layer of that;
//! and the gradients of all, each one graph, so that it is one call and one node of automatic differentiation.

use verdigris_graph::{BinaryOp, Matmul, Precision, Uid, UnaryOp};
use verdigris_tensor::DType;

use super::view::{View, in_format};
use super::{Drawing, unfit};
use crate::error::Error;

/// Which gradients of [`Function::GatedMlp`](super::Function::GatedMlp) are wanted, and what they are computed from.
///
/// ```
/// use verdigris::recipe::{Function, GatedMlpGradient, Input, draw};
/// use verdigris::{DType, Layout, Precision, UnaryOp};
///
/// let tensor = |dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype: DType::Bf16, layout, alignment_bytes: None }));
/// let (x, inside, outside, hidden) = (tensor(&[6, 8])?, tensor(&[32, 8])?, tensor(&[8, 32])?, tensor(&[6, 32])?);
/// let (precision, activation) = (Precision::Fp32, UnaryOp::Silu);
///
/// // x and the weights of gate, values and result: y, and with `keeps` what the first two made and their product behind f.
/// let forward = Function::GatedMlp { precision, activation, keeps: true };
/// let recipe = draw(&forward, &[x, inside, inside, outside])?;
/// let dims: Vec<_> = recipe.results.iter().map(|result| result.layout.dims().to_vec()).collect();
/// assert_eq!(dims, [[6, 8], [6, 32], [6, 32], [6, 32]]);
///
/// // dy, x, the weights and what was kept: here the gradients of x and of the gate's weight.
/// let spec = GatedMlpGradient { precision, activation, wanted: [true, true, false, false], dtypes: [None; 4] };
/// let recipe = draw(&Function::GatedMlpBackward(spec), &[x, x, inside, inside, outside, hidden, hidden, hidden])?;
/// assert_eq!(recipe.results.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct GatedMlpGradient {
    /// How products are formed and summed.
    pub precision: Precision,
    /// The activation of the gate.
    pub activation: UnaryOp,
    /// Of `x` and of the weights of gate, values and result.
    pub wanted: [bool; 4],
    /// The element type of each gradient where it is not that of `x`: the type that a tensor had before it was rounded for the call, so that its gradient is
    /// rounded once.
    pub dtypes: [Option<DType>; 4],
}

const ROWS: View = View::Matrix { is_turned: false };
const TURNED: View = View::Matrix { is_turned: true };

/// The places of the weights behind `x`.
const GATE: usize = 1;
const UP: usize = 2;
const DOWN: usize = 3;
const ADDEND: usize = 4;

impl Drawing {
    pub(super) fn gated_mlp(&mut self, precision: Precision, activation: UnaryOp, keeps: bool) -> Result<(), Error> {
        let given = self.given(0)?;
        let Some((&inputs, leading)) = given.layout.dims().split_last() else {
            return Err(unfit("a tensor without dims", "an operand of a product has at least one dim"));
        };
        let inside = self.outputs(GATE, inputs)?;
        if self.outputs(UP, inputs)? != inside {
            let what = format!("weights of {inside} and {} outputs", self.outputs(UP, inputs)?);
            return Err(unfit(what, "a gate has as many outputs as what it is multiplied by"));
        }
        let outputs = self.outputs(DOWN, inside)?;
        let x = self.input_as(0, "x", ROWS)?;
        // First, so that the activation and the product with the other values are its epilogue, and no value between them lies in memory.
        let gate = self.input_as(GATE, "gate", TURNED)?;
        let pre = self.g.matmul_with("pre", Matmul::new(x, gate, Uid(0), precision))?;
        let up = self.input_as(UP, "up", TURNED)?;
        let values = self.g.matmul_with("values", Matmul::new(x, up, Uid(0), precision))?;
        self.g.set_dtype(values, given.dtype)?;
        if keeps {
            // The activation reads what is stored, so that its gradient, which reads it again, belongs to the same numbers.
            self.g.set_dtype(pre, given.dtype)?;
        }
        let opened = self.activated(activation, pre)?;
        let hidden = self.g.binary("hidden", BinaryOp::Mul, opened, values)?;
        self.g.set_dtype(hidden, given.dtype)?;
        let down = self.input_as(DOWN, "down", TURNED)?;
        let mut y = self.g.matmul_with("down", Matmul::new(hidden, down, Uid(0), precision))?;
        if let Some(addend) = self.given[ADDEND] {
            if addend.layout.dims().split_last() != Some((&outputs, leading)) {
                let what = format!("an addend of dims {:?} beside a result of {leading:?} and {outputs}", addend.layout.dims());
                return Err(unfit(what, "it has the dims of the result"));
            }
            let addend = self.input_as(ADDEND, "addend", ROWS)?;
            y = self.g.binary("add", BinaryOp::Add, y, addend)?;
        }
        let of = |last: u64| in_format(&leading.iter().copied().chain([last]).collect::<Vec<u64>>(), false);
        self.store_as(y, "y", given.dtype, of(outputs)?, ROWS)?;
        if keeps {
            for (kept, name) in [(pre, "pre"), (values, "values"), (hidden, "hidden")] {
                self.store_as(kept, name, given.dtype, of(inside)?, ROWS)?;
            }
        }
        Ok(())
    }

    pub(super) fn gated_mlp_backward(&mut self, spec: &GatedMlpGradient) -> Result<(), Error> {
        let GatedMlpGradient { precision, activation, wanted: [of_x, of_gate, of_up, of_down], dtypes } = *spec;
        let (x, gate, up, down) = (self.given(1)?, self.given(1 + GATE)?, self.given(1 + UP)?, self.given(1 + DOWN)?);
        let dtype = |place: usize| dtypes[place].unwrap_or(x.dtype);
        let dy = self.input_as(0, "dy", ROWS)?;
        let product = |a, b| Matmul::new(a, b, Uid(0), precision);
        // Both layers were given it.
        let given = if of_gate || of_up { Some(self.input_as(1, "x", ROWS)?) } else { None };
        if of_x || of_gate || of_up {
            let w = self.input_as(1 + DOWN, "down", ROWS)?;
            let d_hidden = self.g.matmul_with("d_hidden", product(dy, w))?;
            // Two read it, so that it lies in memory.
            self.g.set_dtype(d_hidden, x.dtype)?;
            let pre = self.input_as(5, "pre", ROWS)?;
            let mut terms = Vec::new();
            if of_x || of_gate {
                let values = self.input_as(6, "values", ROWS)?;
                let d_opened = self.g.binary("d_opened", BinaryOp::Mul, d_hidden, values)?;
                let d_pre = match activation {
                    UnaryOp::Identity => d_opened,
                    f => self.g.binary("d_pre", BinaryOp::Backward(f), d_opened, pre)?,
                };
                self.g.set_dtype(d_pre, x.dtype)?;
                terms.push((d_pre, 1 + GATE, "gate"));
                if let Some(given) = given.filter(|_| of_gate) {
                    self.weight_gradient("d_gate", (d_pre, given), gate, dtype(GATE), precision)?;
                }
            }
            if of_x || of_up {
                let opened = self.activated(activation, pre)?;
                let d_values = self.g.binary("d_values", BinaryOp::Mul, d_hidden, opened)?;
                self.g.set_dtype(d_values, x.dtype)?;
                terms.push((d_values, 1 + UP, "up"));
                if let Some(given) = given.filter(|_| of_up) {
                    self.weight_gradient("d_up", (d_values, given), up, dtype(UP), precision)?;
                }
            }
            if of_x {
                let mut dx = None;
                for (dz, place, name) in terms {
                    let w = self.input_as(place, name, ROWS)?;
                    let one = self.g.matmul_with("dx", product(dz, w))?;
                    dx = Some(match dx {
                        None => {
                            self.g.set_dtype(one, x.dtype)?;
                            one
                        }
                        Some(other) => self.g.binary("dx", BinaryOp::Add, one, other)?,
                    });
                }
                if let Some(dx) = dx {
                    self.store_as(dx, "dx", dtype(0), in_format(x.layout.dims(), false)?, ROWS)?;
                    // The caller's order is that of the tensors.
                    self.results.rotate_right(1);
                }
            }
        }
        if of_down {
            // The third weight's gradient is of what it multiplied.
            let hidden = self.input_as(7, "hidden", ROWS)?;
            self.weight_gradient("d_down", (dy, hidden), down, dtype(DOWN), precision)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use verdigris_engines::arch::Arch;
    use verdigris_graph::Graph;
    use verdigris_graph::pattern::partition;

    use super::super::{Function, Input, draw};
    use super::*;

    fn half(dims: &[u64]) -> Option<Input> {
        Some(Input { dtype: DType::Bf16, layout: in_format(dims, false).expect("a packed layout"), alignment_bytes: None })
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

    #[test]
    fn the_gate_is_a_step_of_its_product() {
        for rows in [8, 60, 4096] {
            let (x, inside, outside) = (half(&[rows, 64]), half(&[256, 64]), half(&[64, 256]));
            for activation in [UnaryOp::Silu, UnaryOp::GeluTanh] {
                let forward = Function::GatedMlp { precision: Precision::Fp32, activation, keeps: false };
                let recipe = draw(&forward, &[x, inside, inside, outside]).expect("drawn");
                assert_eq!(kinds(&recipe.graph), ["gemm", "gemm", "gemm"], "{rows} {activation:?}");
            }
        }
    }

    #[test]
    fn what_is_added_is_a_step_of_the_last_product() {
        let (x, inside, outside) = (half(&[3, 20, 64]), half(&[256, 64]), half(&[64, 256]));
        for keeps in [false, true] {
            let forward = Function::GatedMlp { precision: Precision::Fp32, activation: UnaryOp::Silu, keeps };
            let recipe = draw(&forward, &[x, inside, inside, outside, x]).expect("drawn");
            assert_eq!(kinds(&recipe.graph), ["gemm", "gemm", "gemm"]);
            let told = draw(&forward, &[x, inside, inside, outside, half(&[20, 64])]).unwrap_err().to_string();
            assert!(told.contains("an addend of dims [20, 64]"), "{told}");
        }
    }

    #[test]
    fn gradients_come_in_the_order_of_the_tensors_and_in_their_types() {
        let (x, inside, outside, hidden, y) =
            (half(&[5, 12, 64]), half(&[256, 64]), half(&[32, 256]), half(&[5, 12, 256]), half(&[5, 12, 32]));
        let given = [y, x, inside, inside, outside, hidden, hidden, hidden];
        let dtypes = [None, Some(DType::F32), None, Some(DType::F32)];
        for chosen in 1..16_u32 {
            let wanted = [0, 1, 2, 3].map(|place| chosen >> place & 1 == 1);
            let spec = GatedMlpGradient { precision: Precision::Fp32, activation: UnaryOp::Silu, wanted, dtypes };
            let recipe = draw(&Function::GatedMlpBackward(spec), &given).expect("drawn");
            let _ = kinds(&recipe.graph);
            let found: Vec<_> = recipe.results.iter().map(|result| (result.dtype, result.layout.dims().to_vec())).collect();
            let all =
                [(DType::Bf16, vec![5, 12, 64]), (DType::F32, vec![256, 64]), (DType::Bf16, vec![256, 64]), (DType::F32, vec![32, 256])];
            let expected: Vec<_> = all.into_iter().zip(wanted).filter(|(_, wanted)| *wanted).map(|(one, _)| one).collect();
            assert_eq!(found, expected, "{wanted:?}");
        }
    }

    #[test]
    fn weights_that_do_not_fit_are_told() {
        let forward = Function::GatedMlp { precision: Precision::Fp32, activation: UnaryOp::Silu, keeps: true };
        let told = |given: &[Option<Input>]| draw(&forward, given).unwrap_err().to_string();
        let (x, inside) = (half(&[3, 8]), half(&[16, 8]));
        assert!(told(&[x, inside, half(&[15, 8]), half(&[8, 16])]).contains("weights of 16 and 15 outputs"));
        assert!(told(&[x, half(&[16, 9]), inside, half(&[8, 16])]).contains("a weight of dims [16, 9] for 8 values"));
        assert!(told(&[x, inside, inside]).contains("tensor 3 of the call is missing"));
    }
}
