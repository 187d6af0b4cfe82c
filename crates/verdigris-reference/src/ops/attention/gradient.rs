//! The gradients of attention: a query at a time, with its pairs kept.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use verdigris_graph::ScoreFunction;
use verdigris_tensor::DType;
use verdigris_tensor::num::power_of_two;

use super::{Score, Scores, UNKNOWN, function, is_unknown};
use crate::ops::matmul::SumOfBounded;
use crate::ops::reduction::SumInAnyOrder;
use crate::source::{Formula, Source};
use crate::tolerance::{Bounded, roundoff};

/// What a query and a key that it attends give to gradients.
#[derive(Clone, Copy, Debug)]
struct Pair {
    key: u64,
    p: Bounded,
    ds: Bounded,
    dt: Bounded,
    is_kept: bool,
}

/// What the gradients read.
pub(super) struct Gradients<'a> {
    of: Scores<'a>,
    o: Source<'a>,
    log_sum_exp: Source<'a>,
    d_o: Source<'a>,
    known: RefCell<HashMap<[u64; 3], Rc<Vec<Pair>>>>,
    known_of_keys: RefCell<HashMap<[u64; 3], Option<Rc<PairsOfKey>>>>,
    /// The function with its slope with respect to what it reads, by number.
    sloped_by: Vec<ScoreFunction>,
    /// By number, the gradients of what it reads, row by row.
    known_of_operands: RefCell<HashMap<u32, Option<Rc<Vec<Bounded>>>>>,
}

/// `a · b`.
fn times(a: Bounded, b: Bounded, compute: DType) -> Bounded {
    let value = a.value * b.value;
    let error = a.error * (b.value.abs() + b.error) + a.value.abs() * b.error + 2.0 * roundoff(compute) * value.abs() + power_of_two(-126);
    Bounded::new(value, error, compute)
}

/// The queries that may read a key, in their order, each with its pair where it attends it.
type PairsOfKey = Vec<([u64; 3], Option<Pair>)>;

impl<'a> Gradients<'a> {
    /// Of what a query's scores are made from, its results and their gradient. `sloped_by`: the function with its slope with respect to what it reads, by number.
    pub(super) fn new(of: Scores<'a>, [o, log_sum_exp, d_o]: [Source<'a>; 3], sloped_by: Vec<ScoreFunction>) -> Gradients<'a> {
        Gradients {
            of,
            o,
            log_sum_exp,
            d_o,
            known: RefCell::default(),
            known_of_keys: RefCell::default(),
            sloped_by,
            known_of_operands: RefCell::default(),
        }
    }

    /// `Σ d_o · o` of a query.
    fn row_sum(&self, [b, h, i]: [u64; 3]) -> Bounded {
        let mut sum = SumOfBounded::default();
        let elements = self.o.dims()[3];
        let [b, row] = self.of.place(0, b, i);
        (0..elements).for_each(|e| sum.add(self.d_o.at(&[b, h, row, e]), self.o.at(&[b, h, row, e])));
        sum.finish(self.of.precision(), DType::F32, elements, false)
    }

    /// The log-sum-exp of a query.
    fn total(&self, [b, h, i]: [u64; 3]) -> Bounded {
        let [b, row] = self.of.place(0, b, i);
        self.log_sum_exp.at(&[b, h, row, 0])
    }

    /// An element of the gradient of a result.
    fn d_o(&self, [b, h, i]: [u64; 3], e: u64) -> Bounded {
        let [b, row] = self.of.place(0, b, i);
        self.d_o.at(&[b, h, row, e])
    }

    /// The pairs of a query; `None` where nothing is said of them.
    fn pairs(&self, at: [u64; 3]) -> Option<Rc<Vec<Pair>>> {
        if let Some(pairs) = self.known.borrow().get(&at) {
            return Some(Rc::clone(pairs));
        }
        let of = &self.of;
        let row = of.row(at)?;
        let total = self.total(at);
        if is_unknown([total]) {
            return None;
        }
        let mut pairs = Vec::new();
        if !row.scores.is_empty() {
            let rest = self.row_sum(at);
            for score in &row.scores {
                if total.value == f64::NEG_INFINITY {
                    // It gives nothing; but what is said to have no key is multiplied by 0, which is told of numbers alone.
                    self.pair(at, score, Bounded::exact(0.0), rest)?;
                } else {
                    pairs.push(self.pair(at, score, total, rest)?);
                }
            }
        }
        let pairs = Rc::new(pairs);
        self.known.borrow_mut().insert(at, Rc::clone(&pairs));
        Some(pairs)
    }

    fn pair(&self, [b, h, i]: [u64; 3], score: &Score, total: Bounded, rest: Bounded) -> Option<Pair> {
        let of = &self.of;
        let (compute, unit) = (of.compute, roundoff(of.compute));
        let slope = if of.score.is_some() { score.slope } else { Bounded::exact(1.0) };
        if is_unknown([score.s, rest, score.tanh, slope]) {
            return None;
        }
        let relative = of.relative(Bounded { error: score.s.error + total.error, ..score.s }, total.value);
        let value = (score.s.value - total.value).exp();
        let p = Bounded::new(value, if value == 0.0 { of.vanishing() } else { value * relative + of.vanishing() }, compute);
        let mut product = SumOfBounded::default();
        let elements = of.v.dims()[3];
        (0..elements).for_each(|e| product.add(self.d_o([b, h, i], e), of.value([b, of.kv_head(h), score.key], e)));
        let product = product.finish(of.precision(), of.q.dtype(), elements, false);
        let m = of.kept([b, h, i], score.key)?;
        let of_factor = if of.dropout.is_some() { 2.0 * unit * m * product.value.abs() } else { 0.0 };
        let product = Bounded { value: m * product.value, error: m * product.error + of_factor };
        let minus = product.value - rest.value;
        let minus = Bounded::new(minus, product.error + rest.error + 2.0 * unit * (product.value.abs() + rest.value.abs()), compute);
        let ds = times(p, minus, compute);
        let dt = if of.spec.soft_cap.is_some() {
            let slope = 1.0 - score.tanh.value * score.tanh.value;
            times(ds, Bounded { value: slope, error: 2.0 * score.tanh.error + score.tanh.error * score.tanh.error + 2.0 * unit }, compute)
        } else if of.score.is_some() {
            times(ds, slope, compute)
        } else {
            ds
        };
        if is_unknown([p, ds, dt]) || [p, ds, dt].iter().any(|part| !part.value.is_finite()) {
            return None;
        }
        Some(Pair { key: score.key, p, ds, dt, is_kept: m > 0.0 })
    }

    fn dq(&self, [b, h, i, e]: [u64; 4]) -> Option<Bounded> {
        let of = &self.of;
        let [b, i] = of.within(0, b, i)?;
        let pairs = self.pairs([b, h, i])?;
        let key = |j: u64| of.key([b, of.kv_head(h), j], e);
        let [_, keys] = of.counts(b);
        let met = (0..keys).filter(|_| (pairs.len() as u64) < keys).map(key);
        Some(of.products(pairs.iter().map(|pair| (pair.dt, key(pair.key))), met).scaled(of.scale, of.compute))
    }

    /// What the queries of the heads that read a head of keys give to key `j`: `weight` picks of a pair, of one that is dropped nothing; `other` is what it multiplies.
    fn over_queries(
        &self,
        [b, kv_head, j]: [u64; 3],
        weight: impl Fn(&Pair) -> Option<Bounded>,
        other: impl Fn([u64; 3]) -> Bounded,
    ) -> Option<Bounded> {
        let of = &self.of;
        let [b, j] = of.within(1, b, j)?;
        let pairs = self.pairs_of_key([b, kv_head, j])?;
        let (mut terms, mut met) = (Vec::with_capacity(pairs.len()), Vec::new());
        for (at, pair) in pairs.iter() {
            match pair.as_ref().and_then(&weight) {
                Some(weight) => terms.push((weight, other(*at))),
                None => met.push(other(*at)),
            }
        }
        Some(of.products(terms.into_iter(), met.into_iter()))
    }

    /// The pairs of a key, which every element of its gradients reads; `None` where nothing is said of them.
    fn pairs_of_key(&self, at: [u64; 3]) -> Option<Rc<PairsOfKey>> {
        if let Some(known) = self.known_of_keys.borrow().get(&at) {
            return known.clone();
        }
        let [b, kv_head, j] = at;
        let heads = (0..self.of.q.dims()[1]).filter(|&h| self.of.kv_head(h) == kv_head);
        let queries = heads.flat_map(|h| (0..self.of.counts(b)[0]).map(move |i| [b, h, i]));
        let of_query = |query: [u64; 3]| -> Option<([u64; 3], Option<Pair>)> {
            let pairs = self.pairs(query)?;
            // Keys of a query rise.
            Some((query, pairs.binary_search_by_key(&j, |pair| pair.key).ok().map(|place| pairs[place])))
        };
        let pairs = queries.map(of_query).collect::<Option<PairsOfKey>>().map(Rc::new);
        self.known_of_keys.borrow_mut().insert(at, pairs.clone());
        pairs
    }

    /// The sum of `ds` over what the bias was repeated over.
    fn dbias(&self, dims: &[u64], index: &[u64]) -> Option<Bounded> {
        let of = &self.of;
        let [all_b, s_q, s_kv] = of.extents;
        let scores = [all_b, of.q.dims()[1], s_q, s_kv];
        let lead = 4 - dims.len();
        let range = |axis: usize| match axis.checked_sub(lead) {
            Some(own) if dims[own] == scores[axis] => index[own]..index[own] + 1,
            _ => 0..scores[axis],
        };
        let mut sum = SumInAnyOrder::default();
        for b in range(0) {
            for h in range(1) {
                let [count, _] = of.counts(b);
                for i in range(2).filter(|&i| i < count) {
                    for pair in self.pairs([b, h, i])?.iter().filter(|pair| range(3).contains(&pair.key)) {
                        sum.add(pair.ds);
                    }
                }
            }
        }
        Some(sum.finish(of.compute))
    }

    /// An element of the gradient of what the function reads by this number, of these dims.
    fn of_operand(&self, number: u32, dims: &[u64], index: &[u64]) -> Option<Bounded> {
        let own: [u64; 4] = std::array::from_fn(|axis| (axis + dims.len()).checked_sub(4).map_or(1, |axis| dims[axis]));
        let known = self.known_of_operands.borrow().get(&number).cloned();
        let all = known.unwrap_or_else(|| {
            let all = self.all_of_operand(number, own).map(Rc::new);
            self.known_of_operands.borrow_mut().insert(number, all.clone());
            all
        })?;
        let place = index.iter().zip(dims).fold(0, |place, (&at, &extent)| place * extent + at);
        all.get(place as usize).copied()
    }

    fn all_of_operand(&self, number: u32, own: [u64; 4]) -> Option<Vec<Bounded>> {
        let of = &self.of;
        let (function, sloped) = (of.score.as_ref()?, self.sloped_by.get(number as usize)?);
        let mut sums = vec![SumInAnyOrder::default(); own.iter().product::<u64>() as usize];
        for b in 0..of.extents[0] {
            for h in 0..of.q.dims()[1] {
                for i in 0..of.counts(b)[0] {
                    let (row, pairs) = (of.row([b, h, i])?, self.pairs([b, h, i])?);
                    // A query that gives nothing has no pairs; a pair whose score is −∞ gives nothing.
                    for (score, pair) in row.scores.iter().zip(pairs.iter()).filter(|(score, _)| score.s.value != f64::NEG_INFINITY) {
                        let (slope, place) = function::read(function, (number, sloped), score.t, [b, h, i, score.key], of.compute)?;
                        if is_unknown([slope]) || !slope.value.is_finite() {
                            return None;
                        }
                        let at = [b, h, i, place].into_iter().zip(own);
                        let at = at.fold(0, |sum, (at, extent)| sum * extent + if extent == 1 { 0 } else { at });
                        sums[at as usize].add(times(pair.ds, slope, of.compute));
                    }
                }
            }
        }
        Some(sums.into_iter().map(|sum| sum.finish(of.compute)).collect())
    }

    fn dsinks(&self, h: u64) -> Option<Bounded> {
        let of = &self.of;
        let sink = of.sink(h)?;
        let mut sum = SumInAnyOrder::default();
        for b in 0..of.extents[0] {
            let [s_q, _] = of.lengths(b)?;
            for i in 0..s_q {
                let total = self.total([b, h, i]);
                if is_unknown([total, sink]) {
                    return None;
                }
                if total.value == f64::NEG_INFINITY {
                    continue;
                }
                let value = (sink.value - total.value).exp();
                let relative = of.relative(Bounded { error: sink.error + total.error, ..sink }, total.value);
                let rest = self.row_sum([b, h, i]);
                if is_unknown([rest]) || !rest.value.is_finite() || !value.is_finite() {
                    return None;
                }
                let error = value * relative * (rest.value.abs() + rest.error) + value * rest.error;
                let own = (2.0 * roundoff(of.compute) * value + of.vanishing()) * rest.value.abs();
                sum.add(Bounded::new(-value * rest.value, error + own, of.compute));
            }
        }
        Some(sum.finish(of.compute))
    }
}

/// Which gradient.
#[derive(Clone, Debug)]
pub(super) enum Part {
    Queries,
    Keys,
    Values,
    /// With the dims of the bias.
    Bias(Vec<u64>),
    Sinks,
    /// What the function reads by a number, with its dims.
    Operand(u32, Vec<u64>),
}

/// One gradient of attention.
pub(super) struct Backed<'a> {
    pub(super) of: Rc<Gradients<'a>>,
    pub(super) part: Part,
}

impl Formula for Backed<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let of = &self.of;
        let found = match (&self.part, index) {
            (Part::Queries, &[b, h, i, e]) => of.dq([b, h, i, e]),
            (Part::Keys, &[b, h, j, e]) => {
                of.over_queries([b, h, j], |pair| Some(pair.dt), |at| of.of.query(at, e)).map(|sum| sum.scaled(of.of.scale, of.of.compute))
            }
            (Part::Values, &[b, h, j, e]) => {
                let factor = of.of.dropout.map_or(1.0, |(p, _)| if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 });
                let sum = of.over_queries([b, h, j], |pair| pair.is_kept.then_some(pair.p), |at| of.d_o(at, e));
                if of.of.dropout.is_some() { sum.map(|sum| sum.scaled(factor, of.of.compute)) } else { sum }
            }
            (Part::Bias(dims), index) => of.dbias(dims, index),
            (Part::Sinks, &[_, h, ..]) => of.dsinks(h),
            (Part::Operand(number, dims), index) => of.of_operand(*number, dims, index),
            _ => None,
        };
        found.unwrap_or(UNKNOWN)
    }

    fn compute(&self) -> DType {
        self.of.of.compute
    }
}
