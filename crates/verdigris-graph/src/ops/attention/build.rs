//! Attention in a graph that is being built.

use super::read::four;
use super::{Attention, AttentionBackward, ScoreFunction, is_taken};
use crate::error::Error;
use crate::graph::GraphBuilder;
use crate::op::Op;
use crate::tensor::Uid;

/// What [`GraphBuilder::attention`] gives, as virtual tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attended {
    /// The result.
    pub o: Uid,
    /// The log-sum-exp of each query.
    pub log_sum_exp: Uid,
    /// The greatest score of each query.
    pub max_scores: Uid,
}

/// What [`GraphBuilder::attention_backward`] gives, as virtual tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttentionGradients {
    /// That of the queries.
    pub dq: Uid,
    /// That of the keys.
    pub dk: Uid,
    /// That of the values.
    pub dv: Uid,
    /// That of the bias, if there is one.
    pub dbias: Option<Uid>,
    /// That of the sinks, if there are any.
    pub dsinks: Option<Uid>,
    /// Those of the score operands, of each that is of reals.
    pub d_score_operands: [Option<Uid>; ScoreFunction::MOST_OPERANDS],
}

impl GraphBuilder {
    /// Attention, and the log-sum-exp and the greatest score of each query, as virtual tensors. The results of `attention` are replaced; of the latter two one that is
    /// neither stored nor read is not computed.
    ///
    /// ```
    /// use verdigris_graph::{Attention, AttentionSpec, Causal, GraphBuilder};
    /// use verdigris_tensor::{DType, Layout};
    ///
    /// let mut g = GraphBuilder::new("attention");
    /// let q = g.tensor("q", DType::Bf16, Layout::row_major(&[2, 8, 100, 64])?);
    /// // Two heads of keys and values, each read by four of the queries.
    /// let [k, v] = ["k", "v"].map(|name| Layout::row_major(&[2, 2, 300, 64]).map(|layout| g.tensor(name, DType::Bf16, layout)));
    /// let spec = AttentionSpec { causal: Causal::BottomRight, ..AttentionSpec::new(0.125) };
    /// let made = g.attention("attention", Attention::new(spec, q, k?, v?))?;
    /// g.store(made.o, "o", DType::Bf16)?;
    /// let graph = g.finish()?;
    /// assert_eq!(graph.tensor(made.o).unwrap().layout.dims(), [2, 8, 100, 64]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// An unknown uid, or queries and values that do not have four dims. That the rest fits is checked by [`GraphBuilder::finish`].
    pub fn attention(&mut self, name: &str, attention: Attention) -> Result<Attended, Error> {
        let compute = self.compute_of(name, &attention.read().floats().collect::<Vec<_>>())?;
        let [b, h, s_q, _] = four(name, self.graph.tensor_of(name, attention.q)?)?;
        let [.., d_v] = four(name, self.graph.tensor_of(name, attention.v)?)?;
        let o = self.virtual_tensor(name, compute, &[b, h, s_q, d_v])?;
        let log_sum_exp = self.virtual_tensor(&format!("{name}.log_sum_exp"), compute, &[b, h, s_q, 1])?;
        let max_scores = self.virtual_tensor(&format!("{name}.max_scores"), compute, &[b, h, s_q, 1])?;
        self.push(name, Op::Attention(Attention { o, log_sum_exp: Some(log_sum_exp), max_scores: Some(max_scores), ..attention }));
        Ok(Attended { o, log_sum_exp, max_scores })
    }

    /// The gradients of attention with respect to queries, keys, values, bias, sinks and what the score function reads, as virtual tensors. The results of `back` are replaced; those
    /// that are neither stored nor read are not computed.
    ///
    /// # Errors
    /// An unknown uid. That dims fit is checked by [`GraphBuilder::finish`].
    pub fn attention_backward(&mut self, name: &str, back: AttentionBackward) -> Result<AttentionGradients, Error> {
        let is_real = |uid: &Option<Uid>| uid.and_then(|uid| self.graph.tensor(uid)).is_some_and(|tensor| is_taken(tensor.dtype));
        let all = back.variables();
        let asked: Vec<bool> = all.iter().enumerate().map(|(place, uid)| if place < 5 { uid.is_some() } else { is_real(uid) }).collect();
        let given = self.attention_backward_of(name, back, &asked)?;
        let [Some(dq), Some(dk), Some(dv), dbias, dsinks, ref of_score @ ..] = given[..] else {
            unreachable!("what is asked for is given")
        };
        let d_score_operands = std::array::from_fn(|number| of_score.get(number).copied().flatten());
        Ok(AttentionGradients { dq, dk, dv, dbias, dsinks, d_score_operands })
    }

    /// As [`GraphBuilder::attention_backward`], those asked for alone, in the order of [`AttentionBackward::variables`].
    pub(crate) fn attention_backward_of(&mut self, name: &str, back: AttentionBackward, asked: &[bool]) -> Result<Vec<Option<Uid>>, Error> {
        let compute = self.compute_of(name, &back.floats().collect::<Vec<_>>())?;
        let names = ["dq", "dk", "dv", "dbias", "dsinks"].map(str::to_owned);
        let names = names.into_iter().chain((0..).map(|number| format!("d_score_{number}")));
        let mut given = Vec::new();
        for ((asked, of), what) in asked.iter().zip(back.variables()).zip(names) {
            given.push(match of.filter(|_| *asked) {
                None => None,
                Some(of) => {
                    let dims = self.graph.tensor_of(name, of)?.layout.dims().to_vec();
                    Some(self.virtual_tensor(&format!("{name}.{what}"), compute, &dims)?)
                }
            });
        }
        let [dq, dk, dv, dbias, dsinks, ref of_score @ ..] = given[..] else { unreachable!("five and what the score function reads") };
        let d_score_operands = if of_score.iter().any(Option::is_some) { of_score.to_vec() } else { Vec::new() };
        self.push(name, Op::AttentionBackward(AttentionBackward { dq, dk, dv, dbias, dsinks, d_score_operands, ..back }));
        Ok(given)
    }
}
