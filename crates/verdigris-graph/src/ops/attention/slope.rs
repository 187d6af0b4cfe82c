//! The slope of a function of scores: steps that make its derivative with respect to the scaled product, or to what it reads.
//!
//! There is one set of rules of differentiation, that of the pointwise ops. The function's steps become a graph of single numbers, whose gradient
//! ([`GraphBuilder::gradient_from`]) is read back as steps: numbers are folded, and of equal steps one is kept. What a step rounds, it passes on as if it did not.

use std::collections::HashMap;

use verdigris_tensor::{DType, Layout};

use super::score::{ScoreFunction, ScoreStep};
use crate::error::Error;
use crate::graph::GraphBuilder;
use crate::op::{HostScalar, Op, Real};
use crate::ops::pointwise::{BinaryOp, Pointwise, TernaryOp, UnaryOp};
use crate::tensor::Uid;

impl ScoreFunction {
    /// The most steps of a function and its slope together.
    pub const MOST_SLOPE_STEPS: usize = 4 * ScoreFunction::MOST_STEPS;

    /// The steps of this function, and behind them those that make its slope, `∂f / ∂t`: of the last step, while the score stays the value of the step
    /// that was the last one. Where the function does not depend on `t`, the slope is 0. Kinks are those of [`Pointwise`]; of a score of −∞ nothing is asked
    /// of the slope, which may be infinite or NaN there.
    ///
    /// ```
    /// use verdigris_graph::{BinaryOp, Real, ScoreFunction, ScoreStep};
    ///
    /// // 3 · t²
    /// let mut score = ScoreFunction::default();
    /// let t = score.push(ScoreStep::Given);
    /// let square = score.push(ScoreStep::Binary { f: BinaryOp::Mul, x: t, z: t });
    /// let three = score.push(ScoreStep::Number(Real(3.0)));
    /// score.push(ScoreStep::Binary { f: BinaryOp::Mul, x: square, z: three });
    /// // 3 · t + 3 · t
    /// let sloped = score.slope("attention")?;
    /// assert_eq!(sloped.steps[..4], score.steps);
    /// assert_eq!(sloped.steps[4..], [
    ///     ScoreStep::Binary { f: BinaryOp::Mul, x: 2, z: 0 },
    ///     ScoreStep::Binary { f: BinaryOp::Add, x: 4, z: 4 },
    /// ]);
    /// # Ok::<(), verdigris_graph::Error>(())
    /// ```
    ///
    /// # Errors
    /// A step that has no derivative as an op: [`BinaryOp::Backward`] of a curved activation, whose second derivative it would be. More than
    /// [`ScoreFunction::MOST_SLOPE_STEPS`] steps.
    pub fn slope(&self, op: &str) -> Result<ScoreFunction, Error> {
        self.slope_by(op, |drawn, _| Some(drawn.given))
    }

    /// As [`ScoreFunction::slope`], with respect to what the step reads that reads the score operand of this number: its element at a pair, of a table the one at the
    /// pair's place. Where the function does not depend on it, as on what only says a place, the slope is 0.
    ///
    /// ```
    /// use verdigris_graph::{BinaryOp, ScoreFunction, ScoreStep};
    ///
    /// // gate · t
    /// let mut score = ScoreFunction::default();
    /// let t = score.push(ScoreStep::Given);
    /// let gate = score.push(ScoreStep::Operand(0));
    /// score.push(ScoreStep::Binary { f: BinaryOp::Mul, x: gate, z: t });
    /// // t, by a step of its own.
    /// let sloped = score.operand_slope("attention", 0)?;
    /// assert_eq!((&sloped.steps[..3], sloped.steps[3].operands()), (&score.steps[..], vec![0]));
    /// # Ok::<(), verdigris_graph::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`ScoreFunction::slope`].
    pub fn operand_slope(&self, op: &str, number: u32) -> Result<ScoreFunction, Error> {
        self.slope_by(op, |drawn, steps| {
            let place = steps.iter().position(|step| step.operand() == Some(number))?;
            Some(drawn.values[place])
        })
    }

    /// With respect to what `of` picks; 0 where it picks nothing.
    fn slope_by(&self, op: &str, of: impl Fn(&Drawn, &[ScoreStep]) -> Option<Uid>) -> Result<ScoreFunction, Error> {
        let mut drawn = Drawn::of(self)?;
        let Some(&last) = drawn.values.last() else { return Ok(self.clone()) };
        let one = drawn.one;
        let varied = of(&drawn, &self.steps).filter(|&varied| varied != last);
        let forward = drawn.graph.graph.nodes.len();
        let mut slope = Folded::of(self);
        let Some(varied) = varied else {
            // The score itself, or nothing that there is.
            let steps = slope.finish(Value::Number(f64::from(u8::from(of(&drawn, &self.steps).is_some()))), self.steps.len());
            return Ok(ScoreFunction { steps });
        };
        let made = match drawn.graph.gradient_from(&[(last, one)], &[varied]) {
            Ok(gradients) => {
                let known = drawn.values.iter().enumerate().map(|(place, &uid)| (uid, slope.known(place)));
                let mut known: HashMap<Uid, Value> = known.chain([(one, Value::Number(1.0))]).collect();
                for node in &drawn.graph.graph.nodes[forward..] {
                    let Op::Pointwise(step) = &node.op else { unreachable!("single numbers are neither moved nor summed") };
                    let value = slope.fold(step, &|uid| known[&uid]);
                    known.insert(step.output(), value);
                }
                known[&gradients[0]]
            }
            // Nothing leads from the product to the score.
            Err(Error::Constant { .. }) => Value::Number(0.0),
            Err(Error::Gradient { rule, .. }) => {
                return Err(Error::Gradient { op: op.to_owned(), tensor: "score".to_owned(), rule });
            }
            Err(error) => return Err(error),
        };
        let steps = slope.finish(made, self.steps.len());
        if steps.len() > ScoreFunction::MOST_SLOPE_STEPS {
            return Err(Error::Attribute {
                op: op.to_owned(),
                attribute: "the number of steps of the score and its slope",
                value: steps.len().to_string(),
                rule: "a score function with a gradient has at most 256 steps, with those of its slope",
            });
        }
        Ok(ScoreFunction { steps })
    }
}

/// A function as a graph of single numbers.
struct Drawn {
    graph: GraphBuilder,
    /// What each step is.
    values: Vec<Uid>,
    given: Uid,
    /// The gradient of the score.
    one: Uid,
}

impl Drawn {
    fn of(function: &ScoreFunction) -> Result<Drawn, Error> {
        let mut graph = GraphBuilder::new("score");
        let layout = Layout::row_major(&[1]).map_err(|source| Error::Layout { tensor: "score".to_owned(), source })?;
        let read = |graph: &mut GraphBuilder| graph.tensor("score", DType::F32, layout);
        let (given, one) = (read(&mut graph), read(&mut graph));
        let mut values: Vec<Uid> = Vec::with_capacity(function.steps.len());
        for step in &function.steps {
            let of = |x: u32| values[x as usize];
            let next = match *step {
                // Several of them are one product.
                ScoreStep::Given => graph.unary("given", UnaryOp::Identity, given)?,
                ScoreStep::Number(_) | ScoreStep::Operand(_) | ScoreStep::Gather { .. } | ScoreStep::Place(_) => read(&mut graph),
                ScoreStep::Unary { f, x } => graph.unary(f.name(), f, of(x))?,
                ScoreStep::Binary { f, x, z } => graph.binary(f.name(), f, of(x), of(z))?,
                ScoreStep::Ternary { f, x, z, t } => graph.ternary(f.name(), f, of(x), of(z), of(t))?,
                ScoreStep::Round { x, .. } => graph.unary("round", UnaryOp::Identity, of(x))?,
            };
            values.push(next);
        }
        Ok(Drawn { graph, values, given, one })
    }
}

/// A value of the slope: of a step, or a number that no step has to make.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Value {
    Step(u32),
    Number(f64),
}

/// Steps that grow, of which equal ones are one.
struct Folded {
    steps: Vec<ScoreStep>,
}

impl Folded {
    fn of(function: &ScoreFunction) -> Folded {
        Folded { steps: function.steps.clone() }
    }

    /// The value of a step that there is.
    fn known(&self, place: usize) -> Value {
        match self.steps[place] {
            ScoreStep::Number(number) => Value::Number(number.0),
            _ => Value::Step(place as u32),
        }
    }

    /// The position of a step, pushed where there is none that is equal.
    fn position(&mut self, step: ScoreStep) -> u32 {
        let known = self.steps.iter().position(|known| *known == step);
        known.unwrap_or_else(|| {
            self.steps.push(step);
            self.steps.len() - 1
        }) as u32
    }

    fn step(&mut self, value: Value) -> u32 {
        match value {
            Value::Step(place) => place,
            Value::Number(number) => self.position(ScoreStep::Number(Real(number))),
        }
    }

    fn unary(&mut self, f: UnaryOp, x: Value) -> Value {
        match (f, x) {
            (UnaryOp::Identity, x) => x,
            (UnaryOp::Neg, Value::Number(x)) => Value::Number(-x),
            (UnaryOp::Affine { scale, shift }, Value::Number(x)) => Value::Number(scale.0 * x + shift.0),
            _ => {
                let x = self.step(x);
                Value::Step(self.position(ScoreStep::Unary { f, x }))
            }
        }
    }

    fn binary(&mut self, f: BinaryOp, x: Value, z: Value) -> Value {
        match (f, x, z) {
            (BinaryOp::Mul, Value::Number(1.0), other) | (BinaryOp::Mul | BinaryOp::Div | BinaryOp::Pow, other, Value::Number(1.0)) => {
                other
            }
            (BinaryOp::Mul, Value::Number(x), Value::Number(z)) => Value::Number(x * z),
            (BinaryOp::Add, Value::Number(x), Value::Number(z)) => Value::Number(x + z),
            (BinaryOp::Div, Value::Number(x), Value::Number(z)) => Value::Number(x / z),
            _ => {
                let (x, z) = (self.step(x), self.step(z));
                Value::Step(self.position(ScoreStep::Binary { f, x, z }))
            }
        }
    }

    /// An op of the gradient, as a step.
    fn fold(&mut self, step: &Pointwise, of: &dyn Fn(Uid) -> Value) -> Value {
        match *step {
            Pointwise::Unary { f, x, .. } => self.unary(f, of(x)),
            Pointwise::Binary { f, x, z, .. } => self.binary(f, of(x), of(z)),
            Pointwise::Ternary { f, x, z, t, .. } => self.ternary(f, [of(x), of(z), of(t)]),
            Pointwise::Scale { x, factor: HostScalar::Fixed(factor), .. } => self.binary(BinaryOp::Mul, of(x), Value::Number(factor.0)),
            Pointwise::Scale { .. } | Pointwise::GenIndex { .. } | Pointwise::Random { .. } => {
                unreachable!("rules of differentiation of steps bind no scalars, and draw nothing")
            }
        }
    }

    fn ternary(&mut self, f: TernaryOp, of: [Value; 3]) -> Value {
        let [x, z, t] = of.map(|value| self.step(value));
        Value::Step(self.position(ScoreStep::Ternary { f, x, z, t }))
    }

    /// The steps, `value` the last one, without those behind the first `kept` that it is not made of.
    fn finish(mut self, value: Value, kept: usize) -> Vec<ScoreStep> {
        // A step of the function itself, or a number that it has, is named by one more step.
        let last = match value {
            Value::Step(place) if place as usize >= kept => place as usize,
            Value::Step(x) => {
                self.steps.push(ScoreStep::Unary { f: UnaryOp::Identity, x });
                self.steps.len() - 1
            }
            Value::Number(number) => {
                self.steps.push(ScoreStep::Number(Real(number)));
                self.steps.len() - 1
            }
        };
        let mut is_needed: Vec<bool> = (0..self.steps.len()).map(|place| place < kept).collect();
        is_needed[last] = true;
        for place in (kept..=last).rev() {
            if is_needed[place] {
                self.steps[place].operands().into_iter().for_each(|x| is_needed[x as usize] = true);
            }
        }
        let mut moved = vec![0_u32; self.steps.len()];
        let mut steps = Vec::new();
        for (place, mut step) in self.steps.into_iter().enumerate().filter(|&(place, _)| is_needed[place]) {
            step.operands_mut().into_iter().for_each(|x| *x = moved[*x as usize]);
            moved[place] = steps.len() as u32;
            steps.push(step);
        }
        steps
    }
}
