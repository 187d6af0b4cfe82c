//! Attention and its gradient, a query at a time: its scores, then what they weigh. Products are summed in the type computed in, exponentials and what is
//! one a query in f64. Gradients of keys and values are summed by one thread for each batch and head of keys, those of the bias and the sinks by one for each
//! of their elements, so that no result depends on the number of threads. Of ragged tensors a thread has a head of keys of all sequences. Paged keys are looked up one by one.

use std::ops::Range;

use num_traits::Float;
use rayon::prelude::*;
use verdigris_graph::{
    Attention, AttentionBackward, AttentionSpec, Causal, DropoutMask, Node, ScoreFunction, ScorePlace, ScoreStep, TensorDesc, Uid,
};
use verdigris_tensor::num::round_to;
use verdigris_tensor::{DType, Layout};

use crate::elements::{Loaded, ViewMut, row_major};
use crate::engine::Engine;
use crate::functions;
use crate::graph_plan::Context;
use crate::operation::Operation;
use crate::philox::Stream;
use crate::real::Real;
use crate::scratch::{Scratch, made};

/// What is read, packed row-major, and how it is read.
struct Scores<'a, 's, T: Real + Float> {
    spec: AttentionSpec,
    scale: f64,
    q: Loaded<'a, 's, T>,
    k: Loaded<'a, 's, T>,
    v: Loaded<'a, 's, T>,
    bias: Option<Spread<'a, 's, T>>,
    mask: Option<Spread<'a, 's, T>>,
    blocks: Option<Blocks>,
    slopes: Option<Spread<'a, 's, T>>,
    sinks: Option<Vec<f64>>,
    /// Queries and keys of each batch that count.
    lengths: Vec<[usize; 2]>,
    /// Where sequences lie, if queries are ragged.
    ragged: Option<Ragged>,
    /// Where keys are paged, the page of each entry, by batch, and the keys of a page.
    pages: Option<(Vec<usize>, usize)>,
    /// Which pairs are dropped, and what is drawn for them.
    dropout: Option<(DropoutMask, Stream)>,
    /// The factors of queries, keys and values of 8 bits.
    descales: [Option<Spread<'a, 's, T>>; 3],
    /// The function of scores, and what it reads.
    score: Option<Function<'a, 's, T>>,
    h: usize,
    h_kv: usize,
    /// Queries and keys of the scores, which `bias` and `mask` are of.
    s_q: usize,
    s_kv: usize,
    /// Batch, rows of queries and rows of keys of the tensors.
    rows: [usize; 3],
    d: usize,
    d_v: usize,
}

/// Where sequences lie in ragged tensors.
struct Ragged {
    /// Rows of queries and of keys, by sequence.
    sequences: Vec<[Range<usize>; 2]>,
    /// The sequence of each row of queries, if it is in one, and its place there.
    of_query: Vec<Option<[usize; 2]>>,
}

impl Ragged {
    /// Sequences as these offsets have them; `longest` and `rows` of queries and of keys. Without offsets of keys, which are paged then, each has all of them.
    fn new(context: &Context<'_>, of_q: Uid, of_kv: Option<Uid>, longest: [usize; 2], rows: [usize; 2]) -> Ragged {
        let ranges = |offsets: Uid, which: usize| -> Vec<Range<usize>> {
            let view = context.view(offsets);
            let at = |n: u64| view.integer(view.layout.offset_of_position(n).unwrap_or(0) as usize);
            let offsets: Vec<usize> = (0..view.layout.elements()).map(|n| at(n).clamp(0, rows[which] as i64) as usize).collect();
            offsets.windows(2).map(|ends| ends[0]..ends[0] + ends[1].saturating_sub(ends[0]).min(longest[which])).collect()
        };
        let queries = ranges(of_q, 0);
        let keys = of_kv.map_or_else(|| vec![0..longest[1]; queries.len()], |of_kv| ranges(of_kv, 1));
        let sequences: Vec<[Range<usize>; 2]> = queries.into_iter().zip(keys).map(|(queries, keys)| [queries, keys]).collect();
        let mut of_query = vec![None; rows[0]];
        for (b, [queries, _]) in sequences.iter().enumerate() {
            of_query[queries.clone()].iter_mut().enumerate().for_each(|(i, place)| *place = Some([b, i]));
        }
        Ragged { sequences, of_query }
    }
}

/// A tensor repeated over the dims of the scores.
struct Spread<'a, 's, T: Real + Float> {
    loaded: Loaded<'a, 's, T>,
    strides: [usize; 4],
    /// Elements along the last dim.
    last_extent: usize,
}

impl<'a, 's, T: Real + Float> Spread<'a, 's, T> {
    fn load(context: &Context<'a>, scratch: &'s Scratch, uid: Uid) -> Spread<'a, 's, T> {
        let loaded = context.view(uid).load_row_major::<T>(scratch);
        let last_extent = loaded.layout.dims().last().map_or(1, |&extent| extent as usize);
        Spread { strides: spread(&loaded.layout), last_extent, loaded }
    }

    fn at(&self, [b, h, i]: [usize; 3], j: usize) -> f64 {
        let [of_b, of_h, of_i, of_j] = self.strides;
        self.loaded.data()[b * of_b + h * of_h + i * of_i + j * of_j].to_f64()
    }
}

/// Strides of a packed tensor broadcast from the right to four dims.
fn spread(layout: &Layout) -> [usize; 4] {
    let dims = layout.dims();
    let lead = 4 - dims.len();
    let mut strides = [0; 4];
    let mut stride = 1;
    for (i, &dim) in dims.iter().enumerate().rev() {
        strides[lead + i] = if dim == 1 { 0 } else { stride };
        stride *= dim as usize;
    }
    strides
}

/// Which blocks of pairs are attended to, and the bits of those that are in part.
struct Blocks {
    map: Vec<i64>,
    /// Of the map, broadcast to batch, head, block of queries and block of keys.
    strides: [usize; 4],
    masks: Vec<u8>,
    /// Masks, and queries and bytes of keys of each.
    extents: [usize; 3],
}

impl Blocks {
    fn load(context: &Context<'_>, map: Uid, masks: Uid) -> Blocks {
        let integers = |uid: Uid| {
            let view = context.view(uid);
            let integer = |n: u64| view.integer(view.layout.offset_of_position(n).unwrap_or(0) as usize);
            (0..view.layout.elements()).map(integer).collect::<Vec<_>>()
        };
        let dims = context.tensor(masks).layout.dims();
        let extents = [0, 2, 3].map(|dim| dims[dim] as usize);
        let strides = spread(&context.tensor(map).layout);
        Blocks { map: integers(map), strides, masks: integers(masks).into_iter().map(|byte| byte as u8).collect(), extents }
    }

    /// Whether key `j` is attended from a query.
    fn holds(&self, [b, h, i]: [usize; 3], j: usize) -> bool {
        let ([of_b, of_h, of_row, of_column], [count, block_q, bytes]) = (self.strides, self.extents);
        let entry = self.map[b * of_b + h * of_h + i / block_q * of_row + j / (8 * bytes) * of_column];
        if entry <= 0 {
            return entry < 0;
        }
        let mask = (entry as usize).min(count) - 1;
        self.masks[(mask * block_q + i % block_q) * bytes + j / 8 % bytes] >> (j % 8) & 1 == 1
    }
}

/// `Σ a · b`, in several sums at a time.
fn dot<T: Real + Float>(a: &[T], b: &[T]) -> f64 {
    const LANES: usize = 16;
    let mut sums = [T::default(); LANES];
    let (wide_a, wide_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f64 = wide_a.remainder().iter().zip(wide_b.remainder()).map(|(a, b)| Real::to_f64(*a) * Real::to_f64(*b)).sum();
    for (a, b) in wide_a.zip(wide_b) {
        for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    rest + sums.iter().map(|sum| Real::to_f64(*sum)).sum::<f64>()
}

/// `to += factor · x`.
fn add_scaled<T: Real + Float>(to: &mut [T], factor: f64, x: &[T]) {
    let factor = T::from_f64(factor);
    for (to, &x) in to.iter_mut().zip(x) {
        *to += factor * x;
    }
}

impl<'a, 's, T: Real + Float> Scores<'a, 's, T> {
    fn new(op: &Attention, context: &Context<'a>, scratch: &'s Scratch) -> Scores<'a, 's, T> {
        let load = |uid: Uid| context.view(uid).load_row_major::<T>(scratch);
        let (q, k, v) = (load(op.q), load(op.k), load(op.v));
        let extents = |layout: &Layout| -> [usize; 4] { std::array::from_fn(|i| layout.dims()[i] as usize) };
        let ([own_b, h, q_rows, d], [_, h_kv, kv_rows, _], [.., d_v]) = (extents(&q.layout), extents(&k.layout), extents(&v.layout));
        let four = |layout: &Layout| -> [u64; 4] { std::array::from_fn(|i| layout.dims()[i]) };
        let count = op.q_offsets.map(|of_q| context.tensor(of_q).layout.dims()[0]);
        let entries = op.page_table.map(|table| context.tensor(table).layout.dims()[1]);
        let [b, s_q, s_kv] = op.spec.extents(&four(&q.layout), &four(&k.layout), count, entries).map(|extent| extent as usize);
        let pages = op.page_table.map(|table| {
            let view = context.view(table);
            let last = k.layout.dims()[0] as i64 - 1;
            let page = |n: u64| view.integer(view.layout.offset_of_position(n).unwrap_or(0) as usize).clamp(0, last) as usize;
            ((0..view.layout.elements()).map(page).collect(), kv_rows)
        });
        let ragged = op.q_offsets.map(|of_q| Ragged::new(context, of_q, op.kv_offsets, [s_q, s_kv], [q_rows, kv_rows]));
        let of = |uid: Option<Uid>, which: usize| -> Vec<usize> {
            let extent = |b: usize| ragged.as_ref().map_or([s_q, s_kv][which], |ragged| ragged.sequences[b][which].len());
            let length = |uid: Uid, b: usize| {
                let view = context.view(uid);
                view.integer(view.layout.offset_of_position(b as u64).unwrap_or(0) as usize).clamp(0, extent(b) as i64) as usize
            };
            (0..b).map(|b| uid.map_or(extent(b), |uid| length(uid, b))).collect()
        };
        let spread = |uid: Option<Uid>| uid.map(|uid| Spread::<T>::load(context, scratch, uid));
        let lengths = of(op.q_lengths, 0).into_iter().zip(of(op.kv_lengths, 1)).map(|(q, kv)| [q, kv]).collect();
        Scores {
            spec: op.spec,
            scale: context.scalar(op.spec.scale),
            bias: spread(op.bias),
            mask: spread(op.mask),
            blocks: op.block_map.zip(op.mask_blocks).map(|(map, masks)| Blocks::load(context, map, masks)),
            slopes: spread(op.slopes),
            sinks: op.sinks.map(|uid| load(uid).data().iter().map(|sink| Real::to_f64(*sink)).collect()),
            lengths,
            ragged,
            pages,
            dropout: op
                .spec
                .dropout
                .zip(op.dropout_state)
                .filter(|(p, _)| p.0 > 0.0)
                .map(|(p, state)| (DropoutMask::of(p.0), Stream::of(context, state, op.dropout_offset))),
            descales: [op.q_descale, op.k_descale, op.v_descale].map(&spread),
            score: op.score.clone().map(|score| Function {
                score: score.steps.len().saturating_sub(1),
                steps: score,
                operands: op.score_operands.iter().filter_map(|&uid| spread(Some(uid))).collect(),
            }),
            h,
            h_kv,
            s_q,
            s_kv,
            rows: [own_b, q_rows, kv_rows],
            d,
            d_v,
            q,
            k,
            v,
        }
    }

    /// Batch, head and query of a row of the queries; `None` of one that is in no sequence.
    fn place(&self, row: usize) -> Option<[usize; 3]> {
        let [_, q_rows, _] = self.rows;
        let (b, h, i) = (row / (self.h * q_rows), row / q_rows % self.h, row % q_rows);
        match &self.ragged {
            None => Some([b, h, i]),
            Some(ragged) => ragged.of_query[i].map(|[b, i]| [b, h, i]),
        }
    }

    /// The row of a query.
    fn row(&self, [b, h, i]: [usize; 3]) -> usize {
        let [_, q_rows, _] = self.rows;
        match &self.ragged {
            None => (b * self.h + h) * q_rows + i,
            Some(ragged) => h * q_rows + ragged.sequences[b][0].start + i,
        }
    }

    /// Of the keys of one head of the tensors, the first of a batch.
    fn key_begin(&self, b: usize) -> usize {
        self.ragged.as_ref().map_or(0, |ragged| ragged.sequences[b][1].start)
    }

    /// The row of key `j` that a head of queries reads.
    fn key(&self, at: [usize; 3], j: usize) -> usize {
        match &self.pages {
            None => self.first_key(at) + j,
            Some((pages, page_size)) => {
                let [b, h, _] = at;
                let page = pages[b * (self.s_kv / page_size) + j / page_size];
                (page * self.h_kv + h * self.h_kv / self.h) * page_size + j % page_size
            }
        }
    }

    /// The row of the first key that a head of queries reads, where keys are not paged.
    fn first_key(&self, [b, h, _]: [usize; 3]) -> usize {
        let own_b = if self.ragged.is_some() { 0 } else { b };
        (own_b * self.h_kv + h * self.h_kv / self.h) * self.rows[2] + self.key_begin(b)
    }

    fn query<'x>(&self, of: &'x [T], at: [usize; 3], width: usize) -> &'x [T] {
        let row = self.row(at);
        &of[row * width..(row + 1) * width]
    }

    /// The keys that may be attended from a query by lengths and window.
    fn range(&self, [b, _, i]: [usize; 3]) -> Range<usize> {
        let [s_q, s_kv] = self.lengths[b];
        if i >= s_q {
            return 0..0;
        }
        let diagonal = i as i64 + if self.spec.causal == Causal::TopLeft { 0 } else { s_kv as i64 - s_q as i64 };
        let right = if self.spec.causal == Causal::None { self.spec.right } else { Some(0) };
        let clamp = |at: i64| at.clamp(0, s_kv as i64) as usize;
        let first = self.spec.left.map_or(0, |left| clamp(diagonal - i64::from(left)));
        first..right.map_or(s_kv, |right| clamp(diagonal + i64::from(right) + 1)).max(first)
    }

    /// The scaled product of a query and a key.
    fn product(&self, at: [usize; 3], j: usize) -> f64 {
        let row = self.key(at, j);
        let product = dot(self.query(self.q.data(), at, self.d), &self.k.data()[row * self.d..(row + 1) * self.d]);
        self.scale * self.descale(0, at) * self.descale(1, at) * product
    }

    /// The scores of a query and, where there is a cap or a function, its slope at each; −∞ for keys in the range that are masked.
    fn scores(&self, at: [usize; 3], scores: &mut Vec<f64>, slopes: &mut Vec<f64>) -> Range<usize> {
        let range = self.range(at);
        scores.clear();
        slopes.clear();
        let [s_q, s_kv] = self.lengths[at[0]];
        let is_hidden = |j: usize| {
            let is_masked = self.mask.as_ref().is_some_and(|mask| mask.at(at, j) == 0.0);
            is_masked || self.blocks.as_ref().is_some_and(|blocks| !blocks.holds(at, j))
        };
        let product = |j: usize| self.product(at, j);
        let has_slopes = self.spec.soft_cap.is_some() || self.score.is_some();
        // Of all keys of the range at once, those that are hidden too: so that each function is called once.
        let made = self.score.as_ref().map(|score| of_function(score, at, range.clone(), &product));
        for j in range.clone() {
            if is_hidden(j) {
                scores.push(f64::NEG_INFINITY);
                if has_slopes {
                    slopes.push(0.0);
                }
                continue;
            }
            let mut s = match &made {
                None => product(j),
                Some([made, slope]) => {
                    slopes.push(slope[j - range.start].to_f64());
                    made[j - range.start].to_f64()
                }
            };
            if let Some(cap) = self.spec.soft_cap {
                let tangent = (s / cap.0).tanh();
                slopes.push(1.0 - tangent * tangent);
                s = cap.0 * tangent;
            }
            s += self.bias.as_ref().map_or(0.0, |bias| bias.at(at, j));
            if let Some(slopes) = &self.slopes {
                s -= slopes.at(at, 0) * (at[2] as i64 + s_kv as i64 - s_q as i64 - j as i64).abs() as f64;
            }
            scores.push(s);
        }
        range
    }

    /// The factor of queries, keys or values (`which` from 0 to 2) that a head of queries reads.
    fn descale(&self, which: usize, [b, h, _]: [usize; 3]) -> f64 {
        self.descales[which].as_ref().map_or(1.0, |factors| factors.at([b, h * self.h_kv / self.h, 0], 0))
    }

    /// What the probability of a query and each key is multiplied by.
    fn kept(&self, [b, h, i]: [usize; 3]) -> impl FnMut(usize) -> f64 {
        let mut dropout = self.dropout.map(|(mask, stream)| (mask, stream.pairs((b * self.h + h) as u64, i as u64)));
        move |j| {
            let Some((mask, words)) = &mut dropout else { return 1.0 };
            if words(j as u64) > mask.last_dropped { mask.factor } else { 0.0 }
        }
    }

    /// The sink of a query that counts.
    fn sink(&self, [b, h, i]: [usize; 3]) -> Option<f64> {
        self.sinks.as_ref().filter(|_| i < self.lengths[b][0]).map(|sinks| sinks[h])
    }
}

/// A function of scores, and what it reads.
struct Function<'a, 's, T: Real + Float> {
    /// Of a gradient, the steps of its slope behind its own.
    steps: ScoreFunction,
    /// The step whose value is the score.
    score: usize,
    operands: Vec<Spread<'a, 's, T>>,
}

/// What a function makes of the products of a query and a range of keys, and of a gradient its slope there.
fn of_function<T: Real + Float>(
    Function { steps: function, score, operands }: &Function<'_, '_, T>,
    at: [usize; 3],
    range: Range<usize>,
    product: &dyn Fn(usize) -> f64,
) -> [Vec<T>; 2] {
    let mut values = values_of(function, operands, at, range, product);
    let slopes = values.pop().unwrap_or_default();
    // Without a slope the score is the last one.
    let scores = if *score < values.len() { values.swap_remove(*score) } else { slopes.clone() };
    [scores, slopes]
}

/// The entry of a table that a place says.
fn entry<T: Real + Float>(place: &T, last_extent: usize) -> usize {
    Real::to_f64(*place).round_ties_even().clamp(0.0, (last_extent - 1) as f64) as usize
}

/// The values of steps that read these operands, at a query and a range of keys.
fn values_of<T: Real + Float>(
    function: &ScoreFunction,
    operands: &[Spread<'_, '_, T>],
    at: [usize; 3],
    range: Range<usize>,
    product: &dyn Fn(usize) -> f64,
) -> Vec<Vec<T>> {
    let mut values: Vec<Vec<T>> = Vec::with_capacity(function.steps.len());
    for step in &function.steps {
        let of = |x: u32| &values[x as usize][..];
        let each = |of: &dyn Fn(usize) -> f64| range.clone().map(|j| T::from_f64(of(j))).collect::<Vec<_>>();
        let filled = |fill: &dyn Fn(&mut [T])| {
            let mut made = vec![T::default(); range.len()];
            fill(&mut made);
            made
        };
        let next = match *step {
            ScoreStep::Given => each(&|j| product(j)),
            ScoreStep::Number(number) => each(&|_| number.0),
            ScoreStep::Operand(number) => each(&|j| operands[number as usize].at(at, j)),
            ScoreStep::Gather { operand, x } => {
                let (table, places) = (&operands[operand as usize], of(x));
                places.iter().map(|x| T::from_f64(table.at(at, entry(x, table.last_extent)))).collect()
            }
            ScoreStep::Place(ScorePlace::Key) => each(&|j| j as f64),
            ScoreStep::Place(place) => each(&|_| at[place as usize] as f64),
            ScoreStep::Unary { f, x } => filled(&|y| functions::unary(f, of(x), y)),
            ScoreStep::Binary { f, x, z } => filled(&|y| functions::binary(f, of(x), of(z), y)),
            ScoreStep::Ternary { f, x, z, t } => filled(&|y| functions::ternary(f, of(x), of(z), of(t), y)),
            ScoreStep::Round { dtype, x } => of(x).iter().map(|x| T::from_f64(round_to(dtype, Real::to_f64(*x)))).collect(),
        };
        values.push(next);
    }
    values
}

/// The outputs by uid; those that nobody reads are not there.
struct Results<'v>(Vec<(Uid, ViewMut<'v>)>);

impl<'v> Results<'v> {
    fn take(&mut self, uid: impl Into<Option<Uid>>) -> Option<ViewMut<'v>> {
        let uid = uid.into()?;
        let place = self.0.iter().position(|(known, _)| *known == uid)?;
        Some(self.0.swap_remove(place).1)
    }
}

fn store<T: Real + Float>(to: Option<ViewMut<'_>>, numbers: &[T]) {
    if let Some(to) = to {
        let order = row_major(&to.layout);
        to.store::<T>(numbers, order);
    }
}

fn forward<T: Real + Float>(op: &Attention, context: &Context<'_>, mut results: Results<'_>) {
    let of = Scores::<T>::new(op, context, context.scratch);
    let rows = of.rows[0] * of.h * of.rows[1];
    let (mut o, mut totals) = (made::<T>(rows * of.d_v), made::<T>(rows));
    // Before a row says otherwise, nothing counts.
    let mut most = vec![T::from_f64(f64::NEG_INFINITY); rows];
    o.par_chunks_exact_mut(of.d_v).zip(&mut totals).zip(&mut most).enumerate().for_each_init(
        || (Vec::new(), Vec::new()),
        |(scores, slopes), (row, ((o, total), most))| {
            let Some(at) = of.place(row) else {
                *total = T::from_f64(f64::NEG_INFINITY);
                return;
            };
            let range = of.scores(at, scores, slopes);
            let larger = |a: f64, b: f64| if b > a || b.is_nan() { b } else { a };
            let own = scores.iter().copied().fold(f64::NEG_INFINITY, larger);
            *most = T::from_f64(own);
            let greatest = of.sink(at).into_iter().fold(own, larger);
            let all = scores.iter().copied().chain(of.sink(at));
            if greatest == f64::NEG_INFINITY {
                *total = T::from_f64(f64::NEG_INFINITY);
                return;
            }
            let sum: f64 = all.map(|s| (s - greatest).exp()).sum();
            *total = T::from_f64(greatest + sum.ln());
            let (mut kept, factor) = (of.kept(at), of.descale(2, at));
            for (j, &s) in range.zip(scores.iter()).filter(|(_, s)| **s != f64::NEG_INFINITY) {
                let row = of.key(at, j);
                let value = &of.v.data()[row * of.d_v..(row + 1) * of.d_v];
                add_scaled(o, (s - greatest).exp() / sum * kept(j) * factor, value);
            }
        },
    );
    store(results.take(op.o), &o);
    store(results.take(op.log_sum_exp), &totals);
    store(results.take(op.max_scores), &most);
}

/// What a query gives to gradients: of each key in its range, `p` as dropout leaves it, `ds` and `dt`.
#[derive(Default)]
struct Weights {
    scores: Vec<f64>,
    slopes: Vec<f64>,
    p: Vec<f64>,
    ds: Vec<f64>,
    dt: Vec<f64>,
}

/// What the gradients read.
struct Gradients<'a, 's, T: Real + Float> {
    of: Scores<'a, 's, T>,
    d_o: Loaded<'a, 's, T>,
    totals: Vec<f64>,
    /// `Σ d_o · o` of each query.
    sums: Vec<f64>,
}

impl<T: Real + Float> Gradients<'_, '_, T> {
    /// The keys of a query, empty where it gives nothing, with their weights.
    fn weigh(&self, at: [usize; 3], weights: &mut Weights) -> Range<usize> {
        let of = &self.of;
        if at[2] >= of.lengths[at[0]][0] {
            return 0..0;
        }
        let (total, sum) = (self.totals[of.row(at)], self.sums[of.row(at)]);
        if total == f64::NEG_INFINITY {
            return 0..0;
        }
        let Weights { scores, slopes, p, ds, dt } = weights;
        let range = of.scores(at, scores, slopes);
        [&mut *p, &mut *ds, &mut *dt].into_iter().for_each(Vec::clear);
        let (d_o, first) = (of.query(self.d_o.data(), at, of.d_v), of.first_key(at));
        let mut kept = of.kept(at);
        for (j, &s) in range.clone().zip(scores.iter()) {
            if s == f64::NEG_INFINITY {
                [&mut *p, &mut *ds, &mut *dt].into_iter().for_each(|list| list.push(0.0));
                continue;
            }
            let value = &of.v.data()[(first + j) * of.d_v..(first + j + 1) * of.d_v];
            let weight = (s - total).exp();
            let m = kept(j);
            let gradient = weight * (m * dot(d_o, value) - sum);
            p.push(weight * m);
            ds.push(gradient);
            dt.push(slopes.get(j - range.start).map_or(gradient, |slope| gradient * slope));
        }
        range
    }

    /// The gradients of queries, keys and values.
    fn products(&self) -> [Vec<T>; 3] {
        let of = &self.of;
        let [own_b, q_rows, kv_rows] = of.rows;
        let groups = own_b * of.h_kv;
        let rows = of.h / of.h_kv * q_rows;
        let [mut dq, mut dk, mut dv] = [rows * of.d, kv_rows * of.d, kv_rows * of.d_v].map(|elements| made::<T>(groups * elements));
        // Of no queries or no keys nothing is left to cut; zeros are what their partners get.
        let chunks = |elements: usize| elements.max(1);
        let mut parts: Vec<[&mut [T]; 3]> = Vec::with_capacity(groups);
        let (mut of_q, mut of_k, mut of_v) =
            (dq.chunks_mut(chunks(rows * of.d)), dk.chunks_mut(chunks(kv_rows * of.d)), dv.chunks_mut(chunks(kv_rows * of.d_v)));
        for _ in 0..groups {
            parts.push([of_q.next().unwrap_or_default(), of_k.next().unwrap_or_default(), of_v.next().unwrap_or_default()]);
        }
        parts.into_par_iter().enumerate().for_each_init(Weights::default, |weights, (group, [dq, dk, dv])| {
            for row in 0..rows {
                let Some(at) = of.place(group * rows + row) else { continue };
                let range = self.weigh(at, weights);
                let (first, begin) = (of.first_key(at), of.key_begin(at[0]));
                let (q, d_o) = (of.query(of.q.data(), at, of.d), of.query(self.d_o.data(), at, of.d_v));
                let to_query = &mut dq[row * of.d..(row + 1) * of.d];
                for (place, j) in range.enumerate().filter(|&(place, _)| weights.scores[place] != f64::NEG_INFINITY) {
                    let factor = of.scale * weights.dt[place];
                    add_scaled(to_query, factor, &of.k.data()[(first + j) * of.d..(first + j + 1) * of.d]);
                    add_scaled(&mut dk[(begin + j) * of.d..(begin + j + 1) * of.d], factor, q);
                    add_scaled(&mut dv[(begin + j) * of.d_v..(begin + j + 1) * of.d_v], weights.p[place], d_o);
                }
            }
        });
        [dq, dk, dv]
    }

    /// The gradient of the bias, of these dims.
    fn dbias(&self, layout: &Layout) -> Vec<T> {
        self.over_pairs(layout, |_, keys, weights, sums| {
            for (j, &ds) in keys.zip(&weights.ds) {
                sums[if sums.len() == self.of.s_kv { j } else { 0 }] += ds;
            }
        })
    }

    /// The gradient of what the function reads by this number, of these dims; `sloped` has its slope with respect to that.
    fn d_operand(&self, layout: &Layout, number: u32, sloped: &ScoreFunction) -> Vec<T> {
        let of = &self.of;
        let place = sloped.steps.iter().find_map(|step| match *step {
            ScoreStep::Gather { operand, x } if operand == number => Some(x as usize),
            _ => None,
        });
        let operands = of.score.as_ref().map_or(&[][..], |score| &score.operands);
        self.over_pairs(layout, |at, keys, weights, sums| {
            let values = values_of(sloped, operands, at, keys.clone(), &|j| of.product(at, j));
            let slopes = values.last().map_or(&[][..], |slopes| &slopes[..]);
            let extent = sums.len();
            for (n, j) in keys.enumerate().filter(|&(n, _)| weights.scores[n] != f64::NEG_INFINITY) {
                let to = match place {
                    Some(x) => entry(&values[x][n], extent),
                    None if extent == of.s_kv => j,
                    None => 0,
                };
                sums[to] += weights.ds[n] * Real::to_f64(slopes[n]);
            }
        })
    }

    /// What pairs give to a tensor of these dims that is read by them: a row of it by one thread. `add` adds what a query and its keys, with their weights, give to a row.
    fn over_pairs(&self, layout: &Layout, add: impl Fn([usize; 3], Range<usize>, &Weights, &mut [f64]) + Sync) -> Vec<T> {
        let of = &self.of;
        let dims: [usize; 4] = {
            let lead = 4 - layout.rank();
            std::array::from_fn(|i| i.checked_sub(lead).map_or(1, |own| layout.dims()[own] as usize))
        };
        let extents = [of.lengths.len(), of.h, of.s_q];
        let mut made = made::<T>(dims.iter().product());
        made.par_chunks_mut(dims[3].max(1)).enumerate().for_each_init(Weights::default, |weights, (row, to)| {
            let own = [row / (dims[1] * dims[2]), row / dims[2] % dims[1], row % dims[2]];
            // Where the bias was repeated, all; elsewhere its own.
            let range = |axis: usize| if dims[axis] == extents[axis] { own[axis]..own[axis] + 1 } else { 0..extents[axis] };
            let mut sums = vec![0.0; to.len()];
            for b in range(0) {
                for h in range(1) {
                    for i in range(2) {
                        let keys = self.weigh([b, h, i], weights);
                        if !keys.is_empty() {
                            add([b, h, i], keys, weights, &mut sums);
                        }
                    }
                }
            }
            to.iter_mut().zip(sums).for_each(|(to, sum)| *to = T::from_f64(sum));
        });
        made
    }

    fn dsinks(&self) -> Vec<T> {
        let of = &self.of;
        let of_head = |h: usize| -> f64 {
            let queries = of.lengths.iter().enumerate().flat_map(|(b, &[s_q, _])| (0..s_q).map(move |i| [b, h, i]));
            queries
                .filter_map(|at| {
                    let (row, sink) = (of.row(at), of.sink(at)?);
                    (self.totals[row] != f64::NEG_INFINITY).then(|| -(sink - self.totals[row]).exp() * self.sums[row])
                })
                // From +0 on: the sum of no numbers is -0 by `sum`.
                .fold(0.0, |sum, share| sum + share)
        };
        (0..of.h).map(|h| T::from_f64(of_head(h))).collect()
    }
}

fn backward<T: Real + Float>(op: &AttentionBackward, context: &Context<'_>, mut results: Results<'_>) {
    let &AttentionBackward { spec, q, k, v, bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, .. } = op;
    let &AttentionBackward { dropout_state, dropout_offset, block_map, mask_blocks, .. } = op;
    let (score, score_operands) = (op.score.clone(), op.score_operands.clone());
    let plain = Attention { score, score_operands, dropout_state, dropout_offset, block_map, mask_blocks, ..Attention::new(spec, q, k, v) };
    let forward = Attention { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, ..plain };
    let mut of = Scores::<T>::new(&forward, context, context.scratch);
    if let Some(function) = &mut of.score {
        // A graph is checked before it is run: there is a slope.
        function.steps = function.steps.slope("attention").unwrap_or_else(|_| function.steps.clone());
    }
    let [o, d_o, totals] = [op.o, op.d_o, op.log_sum_exp].map(|uid| context.view(uid).load_row_major::<T>(context.scratch));
    let sums = o.data().chunks(of.d_v).zip(d_o.data().chunks(of.d_v)).map(|(o, d_o)| dot(o, d_o)).collect();
    let gradients = Gradients { of, d_o, totals: totals.data().iter().map(|total| Real::to_f64(*total)).collect(), sums };
    let (dq, dk, dv) = (results.take(op.dq), results.take(op.dk), results.take(op.dv));
    if dq.is_some() || dk.is_some() || dv.is_some() {
        let [of_q, of_k, of_v] = gradients.products();
        store(dq, &of_q);
        store(dk, &of_k);
        store(dv, &of_v);
    }
    if let Some(dbias) = results.take(op.dbias) {
        let numbers = gradients.dbias(&dbias.layout);
        store(Some(dbias), &numbers);
    }
    if let Some(dsinks) = results.take(op.dsinks) {
        store(Some(dsinks), &gradients.dsinks());
    }
    for (number, uid) in (0..).zip(&op.d_score_operands) {
        // A graph is checked before it is run: there is such a slope.
        let sloped = op.score.as_ref().and_then(|score| score.operand_slope("attention", number).ok());
        if let (Some(to), Some(sloped)) = (results.take(*uid), sloped) {
            let numbers = gradients.d_operand(&to.layout, number, &sloped);
            store(Some(to), &numbers);
        }
    }
}

fn is_f64(context: &Context<'_>, read: impl IntoIterator<Item = Option<Uid>>) -> bool {
    read.into_iter().flatten().any(|uid| context.tensor(uid).dtype == DType::F64)
}

/// Multiplications and additions of so many products of the extents of queries and keys; keys of a batch are paged in `entries` pages.
fn flops<'g>(
    tensor: &dyn Fn(Uid) -> &'g TensorDesc,
    spec: &AttentionSpec,
    [q, k, v]: [Uid; 3],
    entries: Option<u64>,
    [of_d, of_d_v]: [u64; 2],
) -> u64 {
    let (queries, keys, values) = (tensor(q).layout.dims(), tensor(k).layout.dims(), tensor(v).layout.dims());
    let rows = keys[2].saturating_mul(entries.unwrap_or(1));
    let longest = spec.longest_kv.map_or(rows, |longest| rows.min(u64::from(longest)));
    let pairs: u64 = queries[..3].iter().chain([&longest]).fold(2, |all, &extent| all.saturating_mul(extent));
    pairs.saturating_mul(of_d * queries[3] + of_d_v * values[3])
}

impl Operation for Attention {
    const ENGINE: Engine = Engine::Attention;

    fn flops<'g>(&self, tensor: &dyn Fn(Uid) -> &'g TensorDesc) -> u64 {
        let entries = self.page_table.map(|table| tensor(table).layout.dims()[1]);
        flops(tensor, &self.spec, [self.q, self.k, self.v], entries, [1, 1])
    }

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        let read = [Some(self.q), Some(self.k), Some(self.v), self.bias, self.slopes, self.sinks];
        if is_f64(context, read.into_iter().chain(self.score_operands.iter().copied().map(Some))) {
            forward::<f64>(self, context, Results(outputs))
        } else {
            forward::<f32>(self, context, Results(outputs))
        }
    }
}

impl Operation for AttentionBackward {
    const ENGINE: Engine = Engine::Attention;

    fn flops<'g>(&self, tensor: &dyn Fn(Uid) -> &'g TensorDesc) -> u64 {
        flops(tensor, &self.spec, [self.q, self.k, self.v], None, [3, 2])
    }

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        let results = [Some(self.o), Some(self.log_sum_exp), Some(self.d_o)];
        let read = [Some(self.q), Some(self.k), Some(self.v), self.bias, self.slopes, self.sinks].into_iter().chain(results);
        let read = read.chain(self.score_operands.iter().copied().map(Some));
        if is_f64(context, read) {
            backward::<f64>(self, context, Results(outputs))
        } else {
            backward::<f32>(self, context, Results(outputs))
        }
    }
}
