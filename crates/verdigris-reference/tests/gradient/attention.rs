//! Attention with each of its options.

use super::*;

#[test]
fn attention() {
    let plain = AttentionSpec::new(0.5);
    let causal = AttentionSpec { causal: Causal::BottomRight, left: Some(2), ..plain };
    let capped = AttentionSpec { causal: Causal::TopLeft, soft_cap: Some(Real(1.5)), ..plain };
    // The mask is that of the state, whatever the elements.
    let dropped = AttentionSpec { dropout: Some(Real(0.4)), ..capped };
    let state_of = |g: &mut GraphBuilder, spec: AttentionSpec| spec.dropout.map(|_| g.tensor("state", DType::I32, rows(&[4])));
    let forms = [(plain, [2, 2, 3, 4]), (causal, [4, 2, 3, 5]), (causal, [2, 1, 5, 3]), (capped, [3, 1, 4, 4]), (dropped, [4, 2, 5, 9])];
    for (spec, [h, h_kv, s_q, s_kv]) in forms {
        for has_options in [false, true] {
            hold("attention", |g| {
                let q = input(g, "q", &[2, h, s_q, 3]);
                let (k, v) = (input(g, "k", &[2, h_kv, s_kv, 3]), input(g, "v", &[2, h_kv, s_kv, 2]));
                let mut attention = Attention { dropout_state: state_of(g, spec), ..Attention::new(spec, q, k, v) };
                let mut of = vec![q, k, v];
                if has_options {
                    let (bias, sinks) = (input(g, "bias", &[h, 1, s_kv]), input(g, "sinks", &[1, h, 1, 1]));
                    of.extend([bias, sinks]);
                    attention.bias = Some(bias);
                    attention.sinks = Some(sinks);
                    attention.mask = Some(g.tensor("mask", DType::U8, rows(&[2, 1, s_q, s_kv])));
                    attention.slopes = Some(g.tensor("slopes", DType::F32, rows(&[1, h, 1, 1])));
                    attention.q_lengths = Some(g.tensor("q lengths", DType::I32, rows(&[2, 1, 1, 1])));
                    attention.kv_lengths = Some(g.tensor("kv lengths", DType::I32, rows(&[2, 1, 1, 1])));
                }
                Ok((vec![g.attention("attention", attention)?.o], of))
            });
            // Three sequences behind each other in no more rows than two could have.
            hold("ragged attention", |g| {
                let spec = AttentionSpec { longest_q: Some(s_q as u32), longest_kv: Some(s_kv as u32), ..spec };
                let q = input(g, "q", &[1, h, 2 * s_q, 3]);
                let (k, v) = (input(g, "k", &[1, h_kv, 2 * s_kv, 3]), input(g, "v", &[1, h_kv, 2 * s_kv, 2]));
                let mut attention = Attention { dropout_state: state_of(g, spec), ..Attention::new(spec, q, k, v) };
                let mut of = vec![q, k, v];
                [attention.q_offsets, attention.kv_offsets] =
                    ["q offsets", "kv offsets"].map(|name| Some(g.tensor(name, DType::I32, rows(&[4, 1, 1, 1]))));
                if has_options {
                    let (bias, sinks) = (input(g, "bias", &[h, 1, s_kv]), input(g, "sinks", &[1, h, 1, 1]));
                    of.extend([bias, sinks]);
                    (attention.bias, attention.sinks) = (Some(bias), Some(sinks));
                    attention.kv_lengths = Some(g.tensor("kv lengths", DType::I32, rows(&[3, 1, 1, 1])));
                }
                Ok((vec![g.attention("attention", attention)?.o], of))
            });
        }
    }
    // What a score function reads: by key, by query, for each head, and a table by the distance of both, which some pairs lie beyond.
    hold("attention by a score function", |g| {
        let q = input(g, "q", &[2, 4, 5, 3]);
        let (k, v) = (input(g, "k", &[2, 2, 6, 3]), input(g, "v", &[2, 2, 6, 2]));
        let read = [
            input(g, "by key", &[4, 1, 6]),
            input(g, "by query", &[2, 1, 5, 1]),
            input(g, "by head", &[4, 1, 1]),
            input(g, "table", &[4, 1, 8]),
        ];
        let mut score = ScoreFunction::default();
        let t = score.push(ScoreStep::Given);
        let [by_key, by_query, by_head] = [0, 1, 2].map(|number| score.push(ScoreStep::Operand(number)));
        let [i, j] = [ScorePlace::Query, ScorePlace::Key].map(|place| score.push(ScoreStep::Place(place)));
        let apart = score.push(ScoreStep::Binary { f: BinaryOp::Sub, x: i, z: j });
        let place = score.push(ScoreStep::Unary { f: UnaryOp::Affine { scale: Real(1.0), shift: Real(4.0) }, x: apart });
        let entry = score.push(ScoreStep::Gather { operand: 3, x: place });
        let gated = score.push(ScoreStep::Binary { f: BinaryOp::Mul, x: t, z: by_key });
        let bent = score.push(ScoreStep::Unary { f: UnaryOp::Tanh, x: by_query });
        let sum = score.push(ScoreStep::Binary { f: BinaryOp::Add, x: gated, z: bent });
        let scaled = score.push(ScoreStep::Binary { f: BinaryOp::Mul, x: entry, z: by_head });
        score.push(ScoreStep::Binary { f: BinaryOp::Add, x: sum, z: scaled });
        let plain = Attention::new(causal, q, k, v);
        let attention = Attention { score: Some(score), score_operands: read.to_vec(), ..plain };
        Ok((vec![g.attention("attention", attention)?.o], [q, k, v].into_iter().chain(read).collect()))
    });
    let inputs = |g: &mut GraphBuilder| ["q", "k", "v"].map(|name| input(g, name, &[1, 1, 3, 2]));
    let (op, _) = refusal(|g| {
        let ([q, k, v], d_o) = (inputs(g), input(g, "d_o", &[1, 1, 3, 2]));
        let made = g.attention("attention", Attention::new(plain, q, k, v))?;
        let back = AttentionBackward::new(plain, [q, k, v], made.o, made.log_sum_exp, d_o);
        Ok((g.attention_backward("back", back)?.dq, d_o))
    });
    assert_eq!(op, "back");
    let (op, _) = refusal(|g| {
        let [q, k, v] = inputs(g);
        Ok((g.attention("attention", Attention::new(plain, q, k, v))?.log_sum_exp, q))
    });
    assert_eq!(op, "attention");
    let (op, _) = refusal(|g| {
        let [q, k, v] = inputs(g);
        Ok((g.attention("attention", Attention::new(plain, q, k, v))?.max_scores, q))
    });
    assert_eq!(op, "attention");
}
