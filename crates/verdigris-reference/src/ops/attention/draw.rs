//! Attention of random graphs.

use verdigris_graph::{
    Attention, AttentionBackward, AttentionSpec, BinaryOp, Causal, Error, Pointwise, Real, ScoreFunction, ScorePlace, ScoreStep, TernaryOp,
    Uid, UnaryOp,
};
use verdigris_tensor::DType;

use crate::fuzz::{Draft, TYPES, Value};

/// Types of operands in rows: those of tensor cores the more often.
const ROW_TYPES: [DType; 7] = [DType::Bf16, DType::Bf16, DType::Bf16, DType::F16, DType::F16, DType::F16, DType::F32];

/// Types of what a function of scores reads.
const TYPES_OF_ROWS: [DType; 5] = [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::U8];
const TYPES_OF_FEW: [DType; 6] = [DType::F32, DType::Bf16, DType::F16, DType::F64, DType::I32, DType::U8];

/// Positions and elements around the edges of tiles.
const EDGES: [u64; 22] = [1, 2, 3, 7, 8, 16, 17, 48, 63, 64, 65, 100, 127, 128, 129, 176, 177, 192, 193, 255, 257, 320];
const HEADS: [u64; 13] = [8, 16, 32, 64, 64, 64, 72, 80, 96, 128, 128, 192, 256];

/// The extents of one attention.
struct Extents {
    b: u64,
    h_kv: u64,
    group: u64,
    s_q: u64,
    s_kv: u64,
    d: u64,
    d_v: u64,
    ragged: bool,
    page_size: Option<u64>,
    pages: u64,
    entries: u64,
}

impl Extents {
    /// Of a few elements; pages of a key and of more, and entries that may be too few to fill a warp or none.
    fn small(draft: &mut Draft, with_backward: bool) -> Extents {
        let (b, h_kv, group) = (1 + draft.below(2), 1 + draft.below(2), 1 + draft.below(3));
        let (s_q, s_kv, d) = (draft.below(14), draft.below(18), 1 + draft.below(9));
        let d_v = if draft.one_in(2) { d } else { 1 + draft.below(9) };
        let ragged = draft.one_in(4);
        let page_size = (!with_backward && draft.one_in(3)).then(|| 1 + draft.below(5));
        let (pages, entries) = (1 + draft.below(6), draft.below(5));
        Extents { b, h_kv, group, s_q, s_kv, d, d_v, ragged, page_size, pages, entries }
    }

    /// Around the edges of tiles, with so many products at most, for plain loops are slow.
    fn of_rows(draft: &mut Draft, with_backward: bool, most_products: u64) -> Extents {
        loop {
            let (b, h_kv, group) = (1 + draft.below(3), 1 + draft.below(3), draft.pick(&[1, 1, 2, 4]));
            let (s_q, s_kv, d) = (draft.pick(&EDGES), draft.pick(&EDGES), draft.pick(&HEADS));
            let d_v = if draft.one_in(4) { draft.pick(&HEADS) } else { d };
            let ragged = draft.one_in(4);
            let page_size = (!with_backward && draft.one_in(4)).then(|| draft.pick(&[1, 5, 16, 32, 64, 128]));
            let entries = page_size.map_or(0, |page_size| s_kv.div_ceil(page_size).min(12));
            let pages = entries * b + draft.below(3);
            let products = b * h_kv * group * s_q * s_kv * (d + d_v) * if with_backward { 3 } else { 1 };
            if products <= most_products {
                return Extents { b, h_kv, group, s_q, s_kv, d, d_v, ragged, page_size, pages: pages.max(1), entries };
            }
        }
    }
}

impl Draft {
    pub(crate) fn attention(&mut self, with_backward: bool) -> Result<(), Error> {
        let in_rows = self.in_rows.is_some();
        let is_fp8 = !with_backward && self.one_in(if in_rows { 4 } else { 8 });
        let dtype = match (is_fp8, in_rows) {
            (true, true) => DType::E4m3,
            (true, false) => self.pick(&[DType::E4m3, DType::E5m2]),
            (false, true) => self.pick(&ROW_TYPES),
            (false, false) => self.pick(&TYPES[..8]),
        };
        let of = match self.in_rows {
            Some(most_products) => Extents::of_rows(self, with_backward, most_products),
            None => Extents::small(self, with_backward),
        };
        let Extents { b, h_kv, group, s_q, s_kv, d, d_v, ragged, page_size, pages, entries } = of;
        let h = h_kv * group;
        // Keys and values of 8 bits beside queries that are not.
        let is_cache = !with_backward && !is_fp8 && self.one_in(6);
        let kept = if is_cache { self.pick(&[DType::E4m3, DType::E5m2]) } else { dtype };
        let fits = |dims: [u64; 4], dtype: DType| move |value: &Value| value.dims == dims && value.dtype == dtype;
        let s_kv = page_size.map_or(s_kv, |page_size| entries * page_size);
        // Of tensors in rows, ragged ones have half of what their sequences could have at least.
        let rows = |draft: &mut Draft, longest: u64| match (ragged, in_rows) {
            (false, _) => longest,
            (true, false) => draft.below(b * longest + 1),
            (true, true) => b * longest - draft.below(b * longest / 2 + 1),
        };
        let (own_b, q_rows, kv_rows) = (if ragged { 1 } else { b }, rows(self, s_q), rows(self, s_kv));
        let s_q = s_q.min(q_rows);
        let s_kv = if page_size.is_some() { s_kv } else { s_kv.min(kv_rows) };
        let [kv_b, kv_rows] = page_size.map_or([own_b, kv_rows], |page_size| [pages, page_size]);
        let (queries, keys, values) = ([own_b, h, q_rows, d], [kv_b, h_kv, kv_rows, d], [kv_b, h_kv, kv_rows, d_v]);
        let results = [own_b, h, q_rows, d_v];
        let q = self.value(fits(queries, dtype), dtype, &queries)?;
        let (k, v) = (self.value(fits(keys, kept), kept, &keys)?, self.value(fits(values, kept), kept, &values)?);
        let mut read = vec![q.clone(), k.clone(), v.clone()];
        let bound = |draft: &mut Draft| {
            let most = if in_rows { 200 } else { 6 };
            draft.one_in(3).then(|| draft.below(most) as u32)
        };
        let spec = AttentionSpec {
            causal: self.pick(&[Causal::None, Causal::TopLeft, Causal::BottomRight]),
            left: bound(self),
            right: bound(self),
            soft_cap: self.one_in(4).then_some(Real(2.0)),
            longest_q: ragged.then_some(s_q as u32),
            longest_kv: (ragged && page_size.is_none()).then_some(s_kv as u32),
            dropout: self.one_in(4).then(|| Real(self.pick(&[0.0, 0.125, 0.3, 0.75, 1.0]))),
            ..AttentionSpec::new(if in_rows { (d as f64).powf(-0.5) } else { [0.5, 0.25, 1.0][self.below(3) as usize] })
        };
        let scores = self.narrower(&[b, h, s_q, s_kv]);
        let mask_dims = self.narrower(&[b, h, s_q, s_kv]);
        let bias_dtype = if in_rows && !is_fp8 { dtype } else { self.pick(&TYPES[..8]) };
        let rarely = if in_rows { 8 } else { 4 };
        let mut option = |draft: &mut Draft, dtype: DType, dims: &[u64]| -> Result<Option<Uid>, Error> {
            if !draft.one_in(rarely) {
                return Ok(None);
            }
            let value = draft.input(dtype, dims)?;
            read.push(value.clone());
            Ok(Some(value.uid))
        };
        let bias = option(self, bias_dtype, &scores)?;
        let slopes = option(self, DType::F32, &[b, h, 1, 1])?;
        let sinks = option(self, bias_dtype, &[1, h, 1, 1])?;
        let mut descale = |draft: &mut Draft, is_there: bool| -> Result<Option<Uid>, Error> {
            if !is_there || draft.one_in(3) {
                return Ok(None);
            }
            let dims = draft.pick(&[[b, h_kv, 1, 1], [1, h_kv, 1, 1], [1; 4]]);
            let value = draft.input(DType::F32, &dims)?;
            read.push(value.clone());
            Ok(Some(value.uid))
        };
        let (q_descale, k_descale, v_descale) =
            (descale(self, is_fp8)?, descale(self, is_fp8 || is_cache)?, descale(self, is_fp8 || is_cache)?);
        // What is stored in rows is of the type of the operands, as engines ask.
        let of_rows = in_rows.then_some(if is_fp8 { DType::Bf16 } else { dtype });
        let whole = |draft: &mut Draft, dtype: DType, dims: &[u64]| -> Result<Option<Uid>, Error> {
            Ok(if draft.one_in(rarely) { Some(draft.input(dtype, dims)?.uid) } else { None })
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
        let blocks = match ragged || page_size.is_some() || !self.one_in(rarely) {
            true => None,
            false => Some(self.blocks(in_rows, [b, h, s_q, s_kv])?),
        };
        let (block_map, mask_blocks) = blocks.unzip();
        let score = match spec.soft_cap.is_some() || !self.one_in(rarely) {
            true => None,
            false => {
                let (score, operands) = self.score([b, h, s_q, s_kv], if in_rows { &TYPES_OF_ROWS } else { &TYPES_OF_FEW })?;
                Some((score, operands))
            }
        };
        let (score, operands) = score.unzip();
        read.extend(operands.iter().flatten().cloned());
        let score_operands: Vec<Uid> = operands.iter().flatten().map(|value| value.uid).collect();
        let compute = Pointwise::compute_dtype(read.iter().map(|value| value.dtype));
        let dropout_state = spec.dropout.map(|_| self.state()).transpose()?;
        let name = self.name("attention");
        let plain = Attention { dropout_state, q_descale, k_descale, v_descale, ..Attention::new(spec, q.uid, k.uid, v.uid) };
        let of_gradient = (score.clone(), score_operands.clone());
        let plain = Attention { block_map, mask_blocks, score, score_operands, ..plain };
        let attention = Attention { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, page_table, ..plain };
        let made = self.builder.attention(&name, attention)?;
        let uids: Vec<Uid> = read.iter().map(|value| value.uid).collect();
        self.note_read(&uids);
        let o = self.result(made.o, &results, of_rows.unwrap_or(compute), &TYPES[..8])?;
        let total = self.result(made.log_sum_exp, &[own_b, h, q_rows, 1], compute, &[DType::F32, DType::F64])?;
        if self.one_in(3) {
            self.result(made.max_scores, &[own_b, h, q_rows, 1], compute, &[DType::F32, DType::F64])?;
        }
        if !with_backward {
            return Ok(());
        }
        let d_o = self.value(fits(results, dtype), dtype, &results)?;
        let (score, score_operands) = of_gradient;
        let plain = AttentionBackward {
            dropout_state,
            block_map,
            mask_blocks,
            score,
            score_operands,
            ..AttentionBackward::new(spec, [q.uid, k.uid, v.uid], o.uid, total.uid, d_o.uid)
        };
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
        let of_score = made.d_score_operands.into_iter().zip(operands.iter().flatten()).map(|(uid, value)| (uid, value.dims.clone()));
        for (uid, dims) in results.into_iter().chain(of_score) {
            // Of what the function reads, and of bias and sinks, some are not asked for.
            if let Some(uid) = uid {
                self.result(uid, &dims, of_rows.unwrap_or(compute), &TYPES[..8])?;
            }
        }
        Ok(())
    }

    /// A function of scores of these dims, and what it reads, of these types: a few steps one after the other, each of what came out of the one before.
    fn score(&mut self, dims: [u64; 4], types: &[DType]) -> Result<(ScoreFunction, Vec<Value>), Error> {
        let (mut score, mut operands) = (ScoreFunction::default(), Vec::new());
        let mut s = score.push(ScoreStep::Given);
        for _ in 0..1 + self.below(6) {
            s = match self.below(7) {
                0 => {
                    let place = score.push(ScoreStep::Place(self.pick(&ScorePlace::ALL)));
                    let small = UnaryOp::Affine { scale: Real(0.0625), shift: Real(-0.5) };
                    let z = score.push(ScoreStep::Unary { f: small, x: place });
                    score.push(ScoreStep::Binary { f: self.pick(&[BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Max]), x: s, z })
                }
                1 if operands.len() < ScoreFunction::MOST_OPERANDS => {
                    let (dtype, own) = (self.pick(types), self.narrower(&dims));
                    let z = score.push(ScoreStep::Operand(operands.len() as u32));
                    operands.push(self.input(dtype, &own)?);
                    // Of integers what is told is whether they are above 0.
                    let z = match dtype.is_float() {
                        true => z,
                        false => {
                            let zero = score.push(ScoreStep::Number(Real(0.0)));
                            score.push(ScoreStep::Binary { f: BinaryOp::Gt, x: z, z: zero })
                        }
                    };
                    score.push(ScoreStep::Binary { f: self.pick(&[BinaryOp::Add, BinaryOp::Mul, BinaryOp::Min]), x: s, z })
                }
                2 => {
                    let hidden = score.push(ScoreStep::Number(Real(f64::NEG_INFINITY)));
                    let [x, z] = [ScorePlace::Query, ScorePlace::Key].map(|place| score.push(ScoreStep::Place(place)));
                    let t = score.push(ScoreStep::Binary { f: self.pick(&[BinaryOp::Ge, BinaryOp::Ne, BinaryOp::Lt]), x, z });
                    score.push(ScoreStep::Ternary { f: TernaryOp::Select, x: s, z: hidden, t })
                }
                5 if operands.len() < ScoreFunction::MOST_OPERANDS => {
                    let [x, z] = [ScorePlace::Query, ScorePlace::Key].map(|place| score.push(ScoreStep::Place(place)));
                    let apart = score.push(ScoreStep::Binary { f: BinaryOp::Sub, x, z });
                    // Of which some places are beyond the table.
                    let shift = UnaryOp::Affine { scale: Real(1.0), shift: Real(self.below(dims[3] + 2) as f64) };
                    let x = score.push(ScoreStep::Unary { f: shift, x: apart });
                    let mut own = self.narrower(&dims);
                    if let Some(last) = own.last_mut() {
                        *last = 1 + self.below(dims[2] + dims[3] + 1);
                    }
                    let floats: Vec<DType> = types.iter().copied().filter(|dtype| dtype.is_float()).collect();
                    let z = score.push(ScoreStep::Gather { operand: operands.len() as u32, x });
                    let dtype = self.pick(&floats);
                    operands.push(self.input(dtype, &own)?);
                    score.push(ScoreStep::Binary { f: self.pick(&[BinaryOp::Add, BinaryOp::Mul, BinaryOp::Min]), x: s, z })
                }
                3 => {
                    let z = score.push(ScoreStep::Number(Real(self.pick(&[0.5, -1.25, 3.0]))));
                    score.push(ScoreStep::Binary { f: self.pick(&[BinaryOp::Mul, BinaryOp::Sub, BinaryOp::Div]), x: s, z })
                }
                4 => score.push(ScoreStep::Round { dtype: self.pick(&[DType::Bf16, DType::F16, DType::F32]), x: s }),
                _ => {
                    let f = self.pick(&[UnaryOp::Tanh, UnaryOp::Sigmoid, UnaryOp::Abs, UnaryOp::Neg, UnaryOp::Silu, UnaryOp::Relu]);
                    score.push(ScoreStep::Unary { f, x: s })
                }
            };
        }
        Ok((score, operands))
    }

    /// A map of blocks beside scores of these dims, and masks of its blocks.
    fn blocks(&mut self, in_rows: bool, [b, h, s_q, s_kv]: [u64; 4]) -> Result<(Uid, Uid), Error> {
        let (count, block_q) = (1 + self.below(3), if in_rows { self.pick(&[64, 128, 128, 256]) } else { 1 + self.below(5) });
        let block_kv = if in_rows { self.pick(&[64, 128, 128, 256]) } else { 8 * (1 + self.below(2)) };
        let dims = self.narrower(&[b, h, s_q.div_ceil(block_q), s_kv.div_ceil(block_kv)]);
        let map = self.input(DType::I32, &dims)?.uid;
        let masks = self.input(DType::U8, &[count, 1, block_q, block_kv / 8])?.uid;
        Ok((map, masks))
    }
}
