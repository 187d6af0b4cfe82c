//! The toy: `y = x³`, element by element, of floating-point data, in f32 (f64 where `x` is f64), rounded once. The least that an op is.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::{Graph, GraphBuilder};
use crate::op::{Op, Operation, Role};
use crate::spec::{Form, Method, OpSpec, OperandSpec};
use crate::tensor::Uid;
use crate::validate::{data, of_type, same_dims};

/// The cube of each element.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Toy {
    /// Read.
    pub x: Uid,
    /// Written; the dims of `x`.
    pub y: Uid,
}

impl Operation for Toy {
    const SPEC: OpSpec = OpSpec {
        name: "toy",
        summary: "The cube of each element.",
        forms: &[Form {
            name: "",
            formula: "y = x³",
            operands: &[OperandSpec::read("x", "floating-point"), OperandSpec::written("y", "floating-point")],
            attributes: &[],
            shape: "those of `x`",
            gradient: "`3 · x² · dy`",
            methods: &[Method::new("toy", r#"x: Uid, *, name: str = "toy""#)],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        visit(Role::Output, &mut self.y);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let (x, y) = (data(graph, op, self.x)?, data(graph, op, self.y)?);
        [x, y].into_iter().try_for_each(|tensor| of_type(op, tensor, DType::is_float, "a cube is of floating-point data"))?;
        same_dims(op, y, x.layout.dims(), "y has the dims of x")
    }

    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(dy) = at.of(self.y).filter(|_| at.wants(self.x)) else { return Ok(()) };
        let square = at.mul(self.x, self.x)?;
        let slope = at.scale(square, 3.0)?;
        let dx = at.mul(slope, dy)?;
        at.give(self.x, dx)
    }
}

impl GraphBuilder {
    /// `x³`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn toy(&mut self, name: &str, x: Uid) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, &[x])?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Toy(Toy { x, y }));
        Ok(y)
    }
}
