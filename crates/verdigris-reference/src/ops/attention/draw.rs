//! Attention of random graphs.

use verdigris_graph::{Attention, AttentionBackward, AttentionSpec, Causal, Error, Pointwise, Real, Uid};
use verdigris_tensor::DType;

use crate::fuzz::{Draft, TYPES, Value};

impl Draft {
    pub(super) fn attention(&mut self, with_backward: bool) -> Result<(), Error> {
        let is_fp8 = !with_backward && self.one_in(8);
        let dtype = if is_fp8 { self.pick(&[DType::E4m3, DType::E5m2]) } else { self.pick(&TYPES[..8]) };
        let (b, h_kv, group) = (1 + self.below(2), 1 + self.below(2), 1 + self.below(3));
        let (s_q, s_kv, d) = (self.below(14), self.below(18), 1 + self.below(9));
        let d_v = if self.one_in(2) { d } else { 1 + self.below(9) };
        let h = h_kv * group;
        let fits = |dims: [u64; 4]| move |value: &Value| value.dims == dims && value.dtype == dtype;
        let ragged = self.one_in(4);
        // Pages of a key and of more, and entries that may be too few to fill a warp or none; of queries in sequences too.
        let page_size = (!with_backward && self.one_in(3)).then(|| 1 + self.below(5));
        let (pages, entries) = (1 + self.below(6), self.below(5));
        let s_kv = page_size.map_or(s_kv, |page_size| entries * page_size);
        let rows = |draft: &mut Draft, longest: u64| if ragged { draft.below(b * longest + 1) } else { longest };
        let (own_b, q_rows, kv_rows) = (if ragged { 1 } else { b }, rows(self, s_q), rows(self, s_kv));
        let s_q = s_q.min(q_rows);
        let s_kv = if page_size.is_some() { s_kv } else { s_kv.min(kv_rows) };
        let [kv_b, kv_rows] = page_size.map_or([own_b, kv_rows], |page_size| [pages, page_size]);
        let (queries, keys, values) = ([own_b, h, q_rows, d], [kv_b, h_kv, kv_rows, d], [kv_b, h_kv, kv_rows, d_v]);
        let results = [own_b, h, q_rows, d_v];
        let (q, k, v) =
            (self.value(fits(queries), dtype, &queries)?, self.value(fits(keys), dtype, &keys)?, self.value(fits(values), dtype, &values)?);
        let mut read = vec![q.clone(), k.clone(), v.clone()];
        let bound = |draft: &mut Draft| draft.one_in(3).then(|| draft.below(6) as u32);
        let spec = AttentionSpec {
            causal: self.pick(&[Causal::None, Causal::TopLeft, Causal::BottomRight]),
            left: bound(self),
            right: bound(self),
            soft_cap: self.one_in(4).then_some(Real(2.0)),
            longest_q: ragged.then_some(s_q as u32),
            longest_kv: (ragged && page_size.is_none()).then_some(s_kv as u32),
            dropout: self.one_in(4).then(|| Real(self.pick(&[0.0, 0.125, 0.3, 0.75, 1.0]))),
            ..AttentionSpec::new([0.5, 0.25, 1.0][self.below(3) as usize])
        };
        let scores = self.narrower(&[b, h, s_q, s_kv]);
        let mask_dims = self.narrower(&[b, h, s_q, s_kv]);
        let bias_dtype = self.pick(&TYPES[..8]);
        let mut option = |draft: &mut Draft, dtype: DType, dims: &[u64]| -> Result<Option<Uid>, Error> {
            if !draft.one_in(4) {
                return Ok(None);
            }
            let value = draft.input(dtype, dims)?;
            read.push(value.clone());
            Ok(Some(value.uid))
        };
        let bias = option(self, bias_dtype, &scores)?;
        let slopes = option(self, DType::F32, &[b, h, 1, 1])?;
        let sinks = option(self, bias_dtype, &[1, h, 1, 1])?;
        let mut descale = |draft: &mut Draft| -> Result<Option<Uid>, Error> {
            if !is_fp8 || draft.one_in(3) {
                return Ok(None);
            }
            let dims = draft.pick(&[[b, h_kv, 1, 1], [1, h_kv, 1, 1], [1; 4]]);
            let value = draft.input(DType::F32, &dims)?;
            read.push(value.clone());
            Ok(Some(value.uid))
        };
        let (q_descale, k_descale, v_descale) = (descale(self)?, descale(self)?, descale(self)?);
        let compute = Pointwise::compute_dtype(read.iter().map(|value| value.dtype));
        let whole = |draft: &mut Draft, dtype: DType, dims: &[u64]| -> Result<Option<Uid>, Error> {
            Ok(if draft.one_in(4) { Some(draft.input(dtype, dims)?.uid) } else { None })
        };
        let mask = whole(self, DType::U8, &mask_dims)?;
        let (q_lengths, kv_lengths) = (whole(self, DType::I32, &[b, 1, 1, 1])?, whole(self, DType::I32, &[b, 1, 1, 1])?);
        // Each offset has a place of its own, so that the sequences have all rows between them.
        let mut offsets = |is_there: bool| -> Result<Option<Uid>, Error> {
            if !is_there {
                return Ok(None);
            }
            let (layout, name) = (self.layout(&[b + 1, 1, 1, 1], false)?, self.name("in"));
            Ok(Some(self.builder.tensor(&name, DType::I32, layout)))
        };
        let (q_offsets, kv_offsets) = (offsets(ragged)?, offsets(ragged && page_size.is_none())?);
        let page_table = match page_size {
            Some(_) => Some(self.input(DType::I32, &[b, entries, 1, 1])?.uid),
            None => None,
        };
        let dropout_state = spec.dropout.map(|_| self.state()).transpose()?;
        let name = self.name("attention");
        let plain = Attention { dropout_state, q_descale, k_descale, v_descale, ..Attention::new(spec, q.uid, k.uid, v.uid) };
        let attention = Attention { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, page_table, ..plain };
        let made = self.builder.attention(&name, attention)?;
        let uids: Vec<Uid> = read.iter().map(|value| value.uid).collect();
        self.note_read(&uids);
        let o = self.result(made.o, &results, compute, &TYPES[..8])?;
        let total = self.result(made.log_sum_exp, &[own_b, h, q_rows, 1], compute, &[DType::F32, DType::F64])?;
        if !with_backward {
            return Ok(());
        }
        let d_o = self.value(fits(results), dtype, &results)?;
        let plain = AttentionBackward { dropout_state, ..AttentionBackward::new(spec, [q.uid, k.uid, v.uid], o.uid, total.uid, d_o.uid) };
        let back = AttentionBackward { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, ..plain };
        let name = self.name("attention_backward");
        let made = self.builder.attention_backward(&name, back)?;
        self.note_read(&[o.uid, total.uid, d_o.uid]);
        let read = [compute, o.dtype, total.dtype, d_o.dtype];
        let compute = Pointwise::compute_dtype(read);
        let results = [
            (Some(made.dq), queries.to_vec()),
            (Some(made.dk), keys.to_vec()),
            (Some(made.dv), values.to_vec()),
            (made.dbias, scores),
            (made.dsinks, vec![1, h, 1, 1]),
        ];
        for (uid, dims) in results {
            if let Some(uid) = uid {
                self.result(uid, &dims, compute, &TYPES[..8])?;
            }
        }
        Ok(())
    }
}
