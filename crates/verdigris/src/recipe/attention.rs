//! Attention and its gradient.

use verdigris_graph::{Attention, AttentionBackward, AttentionSpec, Uid};
use verdigris_tensor::DType;

use super::{Drawing, Function, unfit};
use crate::error::Error;

/// Which gradients of attention are wanted, and of what.
///
/// ```
/// use verdigris::recipe::{AttentionGradient, Function, Input, draw};
/// use verdigris::{AttentionSpec, DType, Layout};
///
/// let tensor = |dtype, dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype, layout, alignment_bytes: None }));
/// let (q, k) = (tensor(DType::Bf16, &[2, 8, 100, 64])?, tensor(DType::Bf16, &[2, 2, 300, 64])?);
/// let spec = AttentionSpec::new(0.125);
/// let recipe = draw(&Function::Attention(spec), &[q, k, k])?;
/// // o, and the log-sum-exp of each query.
/// let dims: Vec<_> = recipe.results.iter().map(|result| result.layout.dims().to_vec()).collect();
/// assert_eq!(dims, [vec![2, 8, 100, 64], vec![2, 8, 100, 1]]);
///
/// // d_o, q, k, v, o, log-sum-exp: the gradients of q and v.
/// let total = tensor(DType::F32, &[2, 8, 100, 1])?;
/// let gradient = AttentionGradient { spec, wanted: [true, false, true, false, false] };
/// let recipe = draw(&Function::AttentionBackward(gradient), &[q, q, k, k, q, total])?;
/// assert_eq!((recipe.results.len(), recipe.graph.nodes.len()), (2, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionGradient {
    /// That of the forward call.
    pub spec: AttentionSpec,
    /// Of queries, keys, values, the bias, and the sinks.
    pub wanted: [bool; 5],
}

impl Drawing {
    pub(super) fn attentions(&mut self, function: &Function) -> Result<(), Error> {
        match *function {
            Function::Attention(spec) => self.attention(spec, None),
            Function::LatentAttention(spec, values) => self.attention(spec, Some(values)),
            Function::AttentionBackward(gradient) => self.attention_backward(gradient),
            _ => Ok(()),
        }
    }

    /// What is beside the scores: truth values of u8 are a mask, numbers a bias.
    pub(super) fn beside_scores(&mut self, place: usize) -> Result<[Option<Uid>; 2], Error> {
        let Some(given) = self.given[place] else { return Ok([None; 2]) };
        let uid = self.input(place, "attn_mask")?;
        Ok(if given.dtype == DType::U8 { [None, Some(uid)] } else { [Some(uid), None] })
    }

    fn slopes(&mut self, place: usize) -> Result<Option<Uid>, Error> {
        if self.given[place].is_some() { self.input(place, "slopes").map(Some) } else { Ok(None) }
    }

    /// Where sequences of ragged tensors begin: those of queries at `place`, those of keys behind it.
    fn offsets(&mut self, place: usize) -> Result<[Option<Uid>; 2], Error> {
        Ok([self.told(place, "q_offsets")?, self.told(place + 1, "kv_offsets")?])
    }

    /// A tensor that is given or not.
    pub(super) fn told(&mut self, place: usize, name: &str) -> Result<Option<Uid>, Error> {
        if self.given[place].is_some() { self.input(place, name).map(Some) } else { Ok(None) }
    }

    /// `latent`: elements of a value, where values are the first elements of the keys.
    fn attention(&mut self, spec: AttentionSpec, latent: Option<u64>) -> Result<(), Error> {
        let given = self.given(0)?;
        let (q, k) = (self.input(0, "q")?, self.input(1, "k")?);
        let v = match latent {
            None => self.input(2, "v")?,
            Some(_) if self.given[2].is_some() => {
                return Err(unfit("values beside keys that hold them", "values of latent attention are the first elements of the keys"));
            }
            Some(elements) => {
                let mut dims = self.given(1)?.layout.dims().to_vec();
                let steps = vec![1; dims.len()];
                if let Some(last) = dims.last_mut() {
                    *last = elements;
                }
                self.g.slice("v", k, &vec![0; dims.len()], &dims, &steps)?
            }
        };
        let [bias, mask] = self.beside_scores(3)?;
        let slopes = self.slopes(4)?;
        let [q_offsets, kv_offsets] = self.offsets(5)?;
        let (kv_lengths, page_table) = (self.told(7, "kv_lengths")?, self.told(8, "page_table")?);
        let plain = Attention { dropout_state: self.told(9, "dropout_state")?, ..Attention::new(spec, q, k, v) };
        let [q_descale, k_descale, v_descale] = [self.told(10, "q_descale")?, self.told(11, "k_descale")?, self.told(12, "v_descale")?];
        let (block_map, mask_blocks) = (self.told(13, "block_map")?, self.told(14, "mask_blocks")?);
        let sinks = self.told(15, "sinks")?;
        let plain = Attention { q_descale, k_descale, v_descale, block_map, mask_blocks, sinks, ..plain };
        let attention = Attention { bias, mask, slopes, q_offsets, kv_offsets, kv_lengths, page_table, ..plain };
        let made = self.g.attention("attention", attention)?;
        let wide = self.g.described(made.log_sum_exp).map_or(DType::F32, |tensor| tensor.dtype);
        let dtype = if given.dtype.is_fp8() { DType::Bf16 } else { given.dtype };
        self.store_like(made.o, "o", dtype, &given.layout)?;
        self.store_in(made.log_sum_exp, "log_sum_exp", wide, false)
    }

    fn attention_backward(&mut self, AttentionGradient { spec, wanted }: AttentionGradient) -> Result<(), Error> {
        let d_o = self.input(0, "d_o")?;
        let read = [self.input(1, "q")?, self.input(2, "k")?, self.input(3, "v")?];
        let (o, total) = (self.input(4, "o")?, self.input(5, "log_sum_exp")?);
        let [bias, mask] = self.beside_scores(6)?;
        let slopes = self.slopes(7)?;
        if wanted[3] && bias.is_none() {
            return Err(unfit("the gradient of a bias that is not given", "a bias is the seventh tensor"));
        }
        let [q_offsets, kv_offsets] = self.offsets(8)?;
        let (kv_lengths, dropout_state) = (self.told(10, "kv_lengths")?, self.told(11, "dropout_state")?);
        let (block_map, mask_blocks) = (self.told(12, "block_map")?, self.told(13, "mask_blocks")?);
        let sinks = self.told(14, "sinks")?;
        if wanted[4] && sinks.is_none() {
            return Err(unfit("the gradient of sinks that are not given", "sinks are the fifteenth tensor"));
        }
        let plain = AttentionBackward { dropout_state, block_map, mask_blocks, sinks, ..AttentionBackward::new(spec, read, o, total, d_o) };
        let back = AttentionBackward { bias, mask, slopes, q_offsets, kv_offsets, kv_lengths, ..plain };
        let made = self.g.attention_backward("attention_backward", back)?;
        let gradients = [Some(made.dq), Some(made.dk), Some(made.dv), made.dbias, made.dsinks];
        for ((gradient, place), (wanted, name)) in
            gradients.into_iter().zip([1, 2, 3, 6, 14]).zip(wanted.into_iter().zip(["dq", "dk", "dv", "dbias", "dsinks"]))
        {
            if let Some(gradient) = gradient.filter(|_| wanted) {
                let given = self.given(place)?;
                self.store_like(gradient, name, given.dtype, &given.layout)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use verdigris_tensor::Layout;

    use super::super::{Input, draw};
    use super::*;

    fn input(dtype: DType, layout: Layout) -> Option<Input> {
        Some(Input { dtype, layout, alignment_bytes: None })
    }

    #[test]
    fn results_lie_as_queries_do() {
        // Positions outside of heads, as they come of one product for all heads.
        let inside = |s, d| Layout::new(&[2, 4, s, d], &[4 * s * d, d, 4 * d, 1]).unwrap();
        let given = [input(DType::Bf16, inside(5, 8)), input(DType::Bf16, inside(7, 8)), input(DType::Bf16, inside(7, 16))];
        let recipe = draw(&Function::Attention(AttentionSpec::new(0.5)), &given).unwrap();
        assert_eq!(recipe.results[0].layout, inside(5, 16));
        assert_eq!((recipe.results[1].dtype, recipe.results[1].layout.dims()), (DType::F32, &[2, 4, 5, 1][..]));
    }

    #[test]
    fn sequences_behind_each_other_have_offsets_in_the_last_places() {
        // Rows outside of heads, of three sequences.
        let ragged = |rows, h, d| input(DType::Bf16, Layout::new(&[1, h, rows, d], &[rows * h * d, d, h * d, 1]).unwrap());
        let (q, k, v) = (ragged(20, 4, 8), ragged(30, 2, 8), ragged(30, 2, 16));
        let offsets = input(DType::I32, Layout::row_major(&[4, 1, 1, 1]).unwrap());
        let spec = AttentionSpec { longest_q: Some(9), longest_kv: Some(12), ..AttentionSpec::new(0.5) };
        let recipe = draw(&Function::Attention(spec), &[q, k, v, None, None, offsets, offsets]).unwrap();
        assert_eq!(recipe.results[0].layout.dims(), [1, 4, 20, 16]);
        assert_eq!(recipe.results[1].layout.dims(), [1, 4, 20, 1]);
        let total = input(DType::F32, Layout::row_major(&[1, 4, 20, 1]).unwrap());
        let o = ragged(20, 4, 16);
        let gradient = AttentionGradient { spec, wanted: [true, true, true, false, false] };
        let recipe = draw(&Function::AttentionBackward(gradient), &[o, q, k, v, o, total, None, None, offsets, offsets]).unwrap();
        assert_eq!(recipe.results.iter().map(|result| result.layout.dims()[2]).collect::<Vec<_>>(), [20, 30, 30]);
        let lone = draw(&Function::Attention(spec), &[q, k, v, None, None, offsets]).unwrap_err().to_string();
        assert!(lone.contains("offsets of queries and of keys come together"), "{lone}");
    }

    #[test]
    fn the_gradient_reads_lengths_behind_offsets() {
        let rows = |dims: &[u64]| input(DType::Bf16, Layout::row_major(dims).unwrap());
        let (q, k) = (rows(&[2, 4, 5, 8]), rows(&[2, 2, 7, 8]));
        let total = input(DType::F32, Layout::row_major(&[2, 4, 5, 1]).unwrap());
        let lengths = input(DType::I32, Layout::row_major(&[2, 1, 1, 1]).unwrap());
        let gradient = AttentionGradient { spec: AttentionSpec::new(0.5), wanted: [true, true, true, false, false] };
        let given = [q, q, k, k, q, total, None, None, None, None, lengths];
        let recipe = draw(&Function::AttentionBackward(gradient), &given).unwrap();
        let verdigris_graph::Op::AttentionBackward(op) = &recipe.graph.nodes[0].op else { panic!("a gradient of attention") };
        assert!(op.kv_lengths.is_some() && op.q_lengths.is_none() && op.dropout_state.is_none());
        assert_eq!(recipe.results.iter().map(|result| result.layout.dims()[2]).collect::<Vec<_>>(), [5, 7, 7]);
    }

    #[test]
    fn pages_and_lengths_are_in_the_last_places() {
        let (q, k) = (input(DType::Bf16, Layout::row_major(&[2, 4, 1, 8]).unwrap()), Layout::row_major(&[6, 2, 16, 8]).unwrap());
        let k = input(DType::Bf16, k);
        let [lengths, table] = [[2, 1, 1, 1], [2, 3, 1, 1]].map(|dims| input(DType::I32, Layout::row_major(&dims).unwrap()));
        let given = [q, k, k, None, None, None, None, lengths, table];
        let recipe = draw(&Function::Attention(AttentionSpec::new(0.5)), &given).unwrap();
        let verdigris_graph::Op::Attention(op) = &recipe.graph.nodes[0].op else { panic!("an attention") };
        assert!(op.kv_lengths.is_some() && op.page_table.is_some() && op.q_offsets.is_none());
        assert_eq!(recipe.results[0].layout.dims(), [2, 4, 1, 8]);
        // Queries of two sequences behind each other, and no offsets of keys.
        let rows = input(DType::Bf16, Layout::row_major(&[1, 4, 9, 8]).unwrap());
        let offsets = input(DType::I32, Layout::row_major(&[3, 1, 1, 1]).unwrap());
        let spec = AttentionSpec { longest_q: Some(7), ..AttentionSpec::new(0.5) };
        let ragged = draw(&Function::Attention(spec), &[rows, k, k, None, None, offsets, None, lengths, table]).unwrap();
        assert_eq!(ragged.results.iter().map(|result| result.layout.dims()[2]).collect::<Vec<_>>(), [9, 9]);
        let wrong = [q, k, k, None, None, None, None, lengths, lengths.map(|other| Input { dtype: DType::I64, ..other })];
        let error = draw(&Function::Attention(AttentionSpec::new(0.5)), &wrong).unwrap_err().to_string();
        assert!(error.contains("numbers of pages are i32"), "{error}");
    }

    #[test]
    fn values_of_latent_attention_are_in_the_keys() {
        let rows = |dims: &[u64]| input(DType::Bf16, Layout::row_major(dims).unwrap());
        let (q, k) = (rows(&[2, 8, 1, 24]), rows(&[2, 1, 9, 24]));
        let latent = |values| Function::LatentAttention(AttentionSpec::new(0.5), values);
        let recipe = draw(&latent(16), &[q, k]).unwrap();
        assert_eq!((recipe.inputs.len(), recipe.results[0].layout.dims()), (2, &[2, 8, 1, 16][..]));
        assert!(draw(&latent(25), &[q, k]).is_err(), "more than a key has");
        assert!(draw(&latent(16), &[q, k, k]).unwrap_err().to_string().contains("first elements of the keys"));
    }

    #[test]
    fn truth_values_are_a_mask_and_numbers_a_bias() {
        let rows = |dims: &[u64]| Layout::row_major(dims).unwrap();
        let x = input(DType::F32, rows(&[1, 1, 3, 4]));
        for (dtype, is_mask) in [(DType::U8, true), (DType::F32, false)] {
            let recipe = draw(&Function::Attention(AttentionSpec::new(0.5)), &[x, x, x, input(dtype, rows(&[3, 3]))]).unwrap();
            let verdigris_graph::Op::Attention(op) = &recipe.graph.nodes[0].op else { panic!("an attention") };
            assert_eq!((op.mask.is_some(), op.bias.is_some()), (is_mask, !is_mask));
        }
        let gradient = AttentionGradient { spec: AttentionSpec::new(0.5), wanted: [false, false, false, true, false] };
        let total = input(DType::F32, rows(&[1, 1, 3, 1]));
        let given = [x, x, x, x, x, total, input(DType::U8, rows(&[3, 3]))];
        assert!(draw(&Function::AttentionBackward(gradient), &given).unwrap_err().to_string().contains("a bias is the seventh tensor"));
    }
}
