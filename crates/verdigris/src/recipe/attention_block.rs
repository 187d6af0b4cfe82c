//! Attention with the products around it as one graph: queries, keys and values by one product of the input, their rotary positions, new keys and values into a
//! cache, attention, and the product behind it with what is added to that.
//!
//! The first product's result is one temporary, of which queries, keys and values are views; attention writes its result in the order in which the last product
//! reads it. So nothing is copied: the parts are the two products and attention, with rotary positions a pass over queries and keys between them, and with a cache
//! a pass that turns keys and stores them and the values where they belong.

use verdigris_graph::{Attention, AttentionSpec, BinaryOp, Matmul, Precision, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

use super::view::{View, in_format, layout_error};
use super::{Drawing, Outcome, Stored, unfit};
use crate::error::Error;

/// Attention with the products around it.
///
/// ```
/// use verdigris::recipe::{AttentionBlock, Function, Input, draw};
/// use verdigris::{AttentionSpec, Causal, DType, Layout, Precision};
///
/// let tensor = |dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype: DType::Bf16, layout, alignment_bytes: None }));
/// let spec = AttentionSpec { causal: Causal::BottomRight, ..AttentionSpec::new(0.125) };
/// let block = AttentionBlock { precision: Precision::Fp32, spec, heads: 8, kv_heads: 2, is_interleaved: false, has_positions_first: false };
/// // x, the weight of queries, keys and values, its bias, and the last weight.
/// let given = [tensor(&[2, 100, 256])?, tensor(&[12 * 64, 256])?, tensor(&[12 * 64])?, tensor(&[256, 8 * 64])?];
/// let recipe = draw(&Function::AttentionBlock(block), &given)?;
/// assert_eq!(recipe.results[0].layout.dims(), [2, 100, 256]);
/// let kinds: Vec<_> = verdigris_graph::pattern::partition(&recipe.graph)?.parts.iter().map(|part| part.problem.kind()).collect();
/// assert_eq!(kinds, ["gemm", "attention", "gemm"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionBlock {
    /// How products are formed and summed.
    pub precision: Precision,
    /// Scale, window and cap of attention.
    pub spec: AttentionSpec,
    /// Heads of queries.
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    /// Whether rotary positions turn elements `2i` and `2i + 1` of a head together; else `i` and `i + d / 2`.
    pub is_interleaved: bool,
    /// Whether positions stand before the batch: `[s, b, …]`.
    pub has_positions_first: bool,
}

const ROWS: View = View::Matrix { is_turned: false };
const TURNED: View = View::Matrix { is_turned: true };

// The places of the tensors.
const WEIGHT: usize = 1;
const BIAS: usize = 2;
const LAST_WEIGHT: usize = 3;
const LAST_BIAS: usize = 4;
const RESIDUAL: usize = 5;
const ANGLES: [usize; 2] = [6, 7];
const CACHES: [usize; 2] = [8, 9];
const LENGTHS: usize = 10;
const BESIDE_SCORES: usize = 11;
const SLOPES: usize = 12;

/// Extents of a block.
#[derive(Clone, Copy)]
struct Extents {
    /// The two first dims of x, and which of them is that of positions.
    lead: [u64; 2],
    positions: usize,
    heads: u64,
    kv_heads: u64,
    /// Elements of a head.
    elements: u64,
    /// What elements are where pairs of them are turned together: the dims that they are split into, and which of these is that of the two.
    pairs: Option<([u64; 2], usize)>,
}

impl Extents {
    /// The dims of so many heads, elements of a head in pairs where they are turned.
    fn of(&self, heads: u64) -> Vec<u64> {
        let elements = self.pairs.map_or(vec![self.elements], |(pairs, _)| pairs.to_vec());
        self.lead.into_iter().chain([heads]).chain(elements).collect()
    }

    /// The order in which `[lead, lead, heads, elements]` are `[batch, heads, positions, elements]`, or the other way round.
    fn order(&self) -> [u32; 4] {
        if self.positions == 1 { [0, 2, 1, 3] } else { [1, 2, 0, 3] }
    }

    fn order_back(&self) -> [u32; 4] {
        if self.positions == 1 { [0, 2, 1, 3] } else { [2, 0, 1, 3] }
    }
}

impl Drawing {
    pub(super) fn attention_block(&mut self, block: &AttentionBlock) -> Result<(), Error> {
        let given = self.given(0)?;
        let [first, second, inputs] = *given.layout.dims() else {
            let what = format!("an input of dims {:?}", given.layout.dims());
            return Err(unfit(what, "it is [batch, positions, elements], or positions before the batch"));
        };
        let extents = self.extents(block, [first, second], inputs)?;
        let Extents { heads, kv_heads, elements, .. } = extents;
        let (rows, all) = (first.saturating_mul(second), heads + 2 * kv_heads);

        let (x, weight) = (self.input_as(0, "x", ROWS)?, self.input_as(WEIGHT, "weight", TURNED)?);
        let made = self.g.matmul_with("projections", Matmul::new(x, weight, Uid(0), block.precision))?;
        let made = self.biased(BIAS, made, 1, UnaryOp::Identity)?;
        self.g.set_dtype(made, given.dtype)?;
        let made = self.g.reshape("in heads", made, &extents.of(all))?;

        let lengths = self.told_lengths(&extents)?;
        let [q, k, v] = self.attended(made, &extents, lengths)?;
        let [bias, mask] = self.beside_scores(BESIDE_SCORES)?;
        let slopes = self.told(SLOPES, "slopes")?;
        let attention = Attention { bias, mask, slopes, kv_lengths: lengths, ..Attention::new(block.spec, q, k, v) };
        let o = self.g.attention("attention", attention)?.o;
        self.g.set_dtype(o, given.dtype)?;
        // As the last product reads it.
        let order: Vec<usize> = extents.order_back().iter().map(|&dim| dim as usize).collect();
        let dims = self.dims_of(o);
        self.g.set_layout(o, Layout::with_order(&dims, &order).map_err(layout_error)?)?;
        let o = self.g.transpose("by positions", o, &extents.order_back())?;
        let o = self.g.reshape("rows", o, &[rows, heads * elements])?;

        let outputs = self.outputs(LAST_WEIGHT, heads * elements)?;
        let weight = self.input_as(LAST_WEIGHT, "last weight", TURNED)?;
        let y = self.g.matmul_with("last", Matmul::new(o, weight, Uid(0), block.precision))?;
        let mut y = self.biased(LAST_BIAS, y, 1, UnaryOp::Identity)?;
        let dims = [first, second, outputs];
        if let Some(residual) = self.given[RESIDUAL] {
            if residual.layout.dims() != dims {
                let what = format!("a residual of dims {:?} for a result of {dims:?}", residual.layout.dims());
                return Err(unfit(what, "it has the dims of the result"));
            }
            let residual = self.input_as(RESIDUAL, "residual", ROWS)?;
            y = self.g.binary("residual", BinaryOp::Add, y, residual)?;
        }
        self.store_as(y, "y", given.dtype, in_format(&dims, false)?, ROWS)?;
        // The result first.
        self.results.rotate_right(1);
        Ok(())
    }

    /// The extents, with what of the tensors does not fit them.
    fn extents(&self, block: &AttentionBlock, lead: [u64; 2], inputs: u64) -> Result<Extents, Error> {
        let &AttentionBlock { heads, kv_heads, is_interleaved, has_positions_first, .. } = block;
        let outputs = self.outputs(WEIGHT, inputs)?;
        let all = kv_heads.checked_mul(2).and_then(|both| both.checked_add(heads)).unwrap_or(0);
        if heads == 0 || kv_heads == 0 || outputs == 0 || !outputs.is_multiple_of(all) {
            let what = format!("{outputs} outputs for {heads} heads of queries and {kv_heads} of keys and values each");
            return Err(unfit(what, "the first weight has as many outputs for each head"));
        }
        let elements = outputs / all;
        let has_angles = ANGLES.iter().any(|&place| self.given[place].is_some());
        if has_angles && elements % 2 != 0 {
            return Err(unfit(format_args!("rotary positions for heads of {elements} elements"), "they turn pairs of elements"));
        }
        let half = elements / 2;
        let pairs = has_angles.then_some(if is_interleaved { ([half, 2], 4) } else { ([2, half], 3) });
        let extents = Extents { lead, positions: usize::from(!has_positions_first), heads, kv_heads, elements, pairs };
        let (batch, positions) = (lead[1 - extents.positions], lead[extents.positions]);
        if CACHES.iter().any(|&place| self.given[place].is_some()) {
            if has_positions_first {
                return Err(unfit("a cache beside positions in front of the batch", "with a cache the batch is the first dim"));
            }
            let [k, v] = [self.given(CACHES[0])?, self.given(CACHES[1])?];
            let dims = k.layout.dims();
            let room = dims.get(1).copied().unwrap_or(0);
            let x = self.given(0)?;
            if dims != [batch, room, kv_heads, elements] || v.layout.dims() != dims || [k.dtype, v.dtype] != [x.dtype; 2] {
                let what = format!("caches of {} {dims:?} and {} {:?}", k.dtype, v.dtype, v.layout.dims());
                return Err(unfit(what, "both are [batch, room, heads of keys, elements], of the type of the input"));
            }
            if positions > room {
                return Err(unfit(
                    format_args!("{positions} new positions for a cache of {room}"),
                    "a cache has room for the new positions",
                ));
            }
        }
        Ok(extents)
    }

    /// How many keys count, `[b, 1, 1, 1]`: with a cache, those that are there once the new ones are.
    fn told_lengths(&mut self, extents: &Extents) -> Result<Option<Uid>, Error> {
        let has_cache = self.given[CACHES[0]].is_some();
        match self.given[LENGTHS] {
            None if has_cache => return Err(unfit("a cache without lengths", "lengths say how many keys there are with the new ones")),
            None => return Ok(None),
            Some(lengths) => {
                let batch = extents.lead[1 - extents.positions];
                if lengths.layout.dims() != [batch] || lengths.dtype != DType::I32 {
                    let what = format!("lengths of {} {:?}", lengths.dtype, lengths.layout.dims());
                    return Err(unfit(what, "they are i32, one for each batch"));
                }
            }
        }
        self.input_as(LENGTHS, "kv_lengths", View::Behind { ones: 3 }).map(Some)
    }

    /// Queries, keys and values as attention reads them, `[b, h, s, d]`, from all heads of the product.
    fn attended(&mut self, made: Uid, extents: &Extents, lengths: Option<Uid>) -> Result<[Uid; 3], Error> {
        let &Extents { heads, kv_heads, .. } = extents;
        let of = |d: &mut Drawing, x: Uid, from: u64, count: u64| {
            let mut stops = d.dims_of(x);
            let (mut starts, steps) = (vec![0; stops.len()], vec![1; stops.len()]);
            (starts[2], stops[2]) = (from, from + count);
            Ok::<_, Error>(d.g.slice("heads", x, &starts, &stops, &steps)?)
        };
        let has_cache = self.given[CACHES[0]].is_some();
        let (mut q, mut k, v);
        match extents.pairs {
            Some(_) if has_cache => {
                // Keys are turned where they are stored.
                (q, k) = (of(self, made, 0, heads)?, of(self, made, heads, kv_heads)?);
                let angles = self.angles(extents)?;
                q = self.turned_heads(q, angles, extents)?;
                k = self.turned_heads(k, angles, extents)?;
            }
            Some(_) => {
                // Queries and keys stand beside each other: one pass turns both.
                let (both, angles) = (of(self, made, 0, heads + kv_heads)?, self.angles(extents)?);
                let both = self.turned_heads(both, angles, extents)?;
                (q, k) = (of(self, both, 0, heads)?, of(self, both, heads, kv_heads)?);
            }
            None => (q, k) = (of(self, made, 0, heads)?, of(self, made, heads, kv_heads)?),
        }
        v = of(self, made, heads + kv_heads, kv_heads)?;
        let [mut k, mut v] = [k, v];
        if let Some(lengths) = lengths.filter(|_| has_cache) {
            [k, v] = self.appended([k, v], lengths, extents)?;
        }
        let mut read = [q, k, v];
        for x in &mut read {
            let dims = self.dims_of(*x);
            let whole = self.g.reshape("elements", *x, &[dims[0], dims[1], dims[2], extents.elements])?;
            *x = self.g.transpose("by heads", whole, &extents.order())?;
        }
        Ok(read)
    }

    /// Cosines and sines over the dims of heads, `[lead, lead, 1, elements in pairs]`.
    fn angles(&mut self, extents: &Extents) -> Result<[Uid; 2], Error> {
        let Some((pairs, of_two)) = extents.pairs else { return Err(unfit("angles without pairs", "they turn pairs of elements")) };
        let (batch, positions) = (extents.lead[1 - extents.positions], extents.lead[extents.positions]);
        let mut made = [Uid(0); 2];
        for ((place, name), made) in ANGLES.into_iter().zip(["cos", "sin"]).zip(&mut made) {
            let dims = self.given(place)?.layout.dims().to_vec();
            let half = extents.elements / 2;
            let (own, last) = match dims[..] {
                [own, of, last] if of == positions && (own == 1 || own == batch) && (last == half || last == 2 * half) => (own, last),
                _ => {
                    let what = format!("angles of dims {dims:?} for {batch} times {positions} positions of {} elements", extents.elements);
                    return Err(unfit(what, "they are [batch or 1, positions, elements of a head or half of these]"));
                }
            };
            let mut angle = self.input(place, name)?;
            let mut lead = [own, positions];
            if extents.positions == 0 {
                angle = self.g.transpose("by positions", angle, &[1, 0, 2])?;
                lead.reverse();
            }
            let mut elements = pairs;
            if last == half {
                // One for both of a pair.
                elements[of_two - 3] = 1;
            }
            *made = self.g.reshape("of pairs", angle, &[lead[0], lead[1], 1, elements[0], elements[1]])?;
        }
        Ok(made)
    }

    /// Heads turned by their angles, rounded as the product is.
    fn turned_heads(&mut self, x: Uid, [cos, sin]: [Uid; 2], extents: &Extents) -> Result<Uid, Error> {
        let of_two = extents.pairs.map_or(3, |(_, of_two)| of_two);
        let y = self.turned(x, cos, sin, of_two)?;
        let dtype = self.given(0)?.dtype;
        self.g.set_dtype(y, dtype)?;
        Ok(y)
    }

    /// Keys and values behind those in their caches: the caches with them.
    fn appended(&mut self, rows: [Uid; 2], lengths: Uid, extents: &Extents) -> Result<[Uid; 2], Error> {
        let view = extents.pairs.map_or(View::Same, |(_, of_two)| View::Pairs { is_interleaved: of_two == 4 });
        let mut of = vec![1; self.dims_of(rows[0]).len()];
        of[0] = extents.lead[0];
        let lengths = self.g.reshape("of rows", lengths, &of)?;
        let mut made = rows;
        for ((made, place), name) in made.iter_mut().zip(CACHES).zip(["k_cache", "v_cache"]) {
            let given = self.given(place)?;
            let cache = self.input_as(place, name, view)?;
            let uid = self.g.append(&format!("append to {name}"), cache, *made, lengths, 1)?;
            let outcome = Outcome { uid, dtype: given.dtype, layout: given.layout, in_place_of: Some(place) };
            self.results.push(Stored { outcome, view });
            *made = uid;
        }
        Ok(made)
    }
}
