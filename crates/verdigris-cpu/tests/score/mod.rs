//! Functions of scores of random graphs.

use verdigris_graph::{BinaryOp, GraphBuilder, Real, ScoreFunction, ScorePlace, ScoreStep, TernaryOp, Uid, UnaryOp};
use verdigris_tensor::DType;

use super::Draw;

impl Draw {
    /// `t · operand + (query − key) / 8` or the like, and −∞ where a place is before another.
    pub(super) fn score(&mut self, g: &mut GraphBuilder, dims: [u64; 4]) -> (ScoreFunction, Vec<Uid>) {
        let mut score = ScoreFunction::default();
        let t = score.push(ScoreStep::Given);
        let own: Vec<u64> = dims.iter().map(|&dim| if self.chance(2) { 1 } else { dim }).collect();
        let dtype = self.pick(&[DType::U8, DType::F16, DType::Bf16, DType::F32, DType::F64]);
        let operand = self.tensor(g, "score operand", dtype, &own);
        let read = score.push(ScoreStep::Operand(0));
        let product = score.push(ScoreStep::Binary { f: self.pick(&[BinaryOp::Mul, BinaryOp::Add, BinaryOp::Max]), x: t, z: read });
        let [x, z] = [(); 2].map(|()| score.push(ScoreStep::Place(self.pick(&ScorePlace::ALL))));
        let apart = score.push(ScoreStep::Binary { f: BinaryOp::Sub, x, z });
        let small = score.push(ScoreStep::Unary { f: UnaryOp::Affine { scale: Real(0.125), shift: Real(0.5) }, x: apart });
        let sum = score.push(ScoreStep::Binary { f: BinaryOp::Add, x: product, z: small });
        let hidden = score.push(ScoreStep::Number(Real(f64::NEG_INFINITY)));
        let after = score.push(ScoreStep::Binary { f: self.pick(&[BinaryOp::Ge, BinaryOp::Ne]), x: z, z: x });
        let chosen = score.push(ScoreStep::Ternary { f: TernaryOp::Select, x: sum, z: hidden, t: after });
        match self.below(3) {
            0 => score.push(ScoreStep::Unary { f: UnaryOp::Tanh, x: chosen }),
            1 => score.push(ScoreStep::Round { dtype: DType::Bf16, x: chosen }),
            _ => chosen,
        };
        (score, vec![operand])
    }
}
