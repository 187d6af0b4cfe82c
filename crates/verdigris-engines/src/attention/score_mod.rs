//! What stands between the product of queries and keys and the softmax: a soft cap, an added bias, slopes, a mask, a factor that is known at execution.

use std::f32::consts::LOG2_E;
use std::panic::Location;

use verdigris_graph::{AttentionProblem, HostScalar, View};
use verdigris_kir::face::{Kernel, Pointer, Val, Var};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::params::{AtExecution, Read};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_tensor::DType;

use super::half::Half;
use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::steps::host_number;
use crate::layout::space::element;

verdigris_kir::parameters! {
    /// `s = cap · tanh(factor · q·k / cap) + bias − slope · |i + shift − j|`, and −∞ where the mask is 0. What a problem does not have is left out by a branch
    /// that all threads take alike.
    pub(super) struct ScoreMod / #[derive(Clone, Copy, Debug)] ScoreModArgs of () as _spec {
        pub(super) factor: AtExecution<f32> = (),
        /// What scores are kept below, and `2 · log₂ e` over it; 0 where nothing keeps them.
        pub(super) cap: f32,
        pub(super) bend: f32,
        pub(super) bias: Read = 4,
        /// Bytes from one batch, head and query to the next; keys are side by side.
        pub(super) bias_strides: [u64; 3],
        /// Bytes of an element: 4 for f32, 2 for the type of the queries, 0 where there is no bias.
        pub(super) bias_bytes: u32,
        pub(super) mask: Read = 1,
        pub(super) mask_strides: [u64; 3],
        pub(super) has_mask: u32,
        pub(super) slopes: Read = 4,
        /// Bytes from one batch and head to the next.
        pub(super) slope_strides: [u64; 2],
        pub(super) has_slopes: u32,
    }
}

/// The greatest soft cap: scores are formed as the cap less something ([`SoftCap`]), and off by the cap's roundoff, 2⁻²⁴ of it, however small they are. By
/// this one it is 2⁻¹², as much as of a score of that size.
const MOST_CAP: f32 = 4096.0;

/// Whether a problem has anything of it.
pub(super) fn is_needed(p: &AttentionProblem) -> bool {
    let is_plain = matches!(p.scale, HostScalar::Fixed(scale) if (scale.0 as f32).is_normal() && scale.0 > 0.0);
    !is_plain || p.soft_cap.is_some() || p.score.is_some() || p.bias.is_some() || p.mask.is_some() || p.slopes.is_some()
}

/// Instructions that make a score of a product.
pub(super) fn instructions(p: &AttentionProblem) -> f64 {
    let parts = [(p.soft_cap.is_some(), 4.0), (p.bias.is_some(), 3.0), (p.slopes.is_some(), 4.0), (p.mask.is_some(), 3.0)];
    1.0 + parts.iter().map(|&(has, cost)| if has { cost } else { 0.0 }).sum::<f64>()
}

/// The factor of a problem whose products are its scores, for engines that put nothing between them.
///
/// # Errors
/// A refusal that names what stands between.
pub(super) fn plain_scale(id: EngineId, p: &AttentionProblem) -> Result<f32, Refusal> {
    for (name, given) in [("bias", p.bias.is_some()), ("mask", p.mask.is_some()), ("slopes", p.slopes.is_some())] {
        id.require(!given, Reason::Epilogue, format_args!("{name} between the products, taken without"))?;
    }
    id.require(p.soft_cap.is_none(), Reason::Epilogue, "a soft cap between the products, taken without")?;
    id.require(p.score.is_none(), Reason::Epilogue, "a score function between the products, taken without")?;
    let HostScalar::Fixed(scale) = p.scale else {
        return Err(id.refusal(Reason::Scale, "a scale that is given at execution, taken if it is known before"));
    };
    let scale = scale.0 as f32;
    // The greatest product is the greatest score.
    id.require(scale.is_normal() && scale > 0.0, Reason::Scale, format_args!("scale {scale}, taken above 0"))?;
    Ok(scale)
}

/// What the kernels ask of the tensors between the products.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require(id: EngineId, p: &AttentionProblem) -> Result<(), Refusal> {
    if let Some(cap) = p.soft_cap {
        let cap = cap.0 as f32;
        let is_taken = cap.is_normal() && cap > 0.0 && (2.0 * LOG2_E / cap).is_normal();
        id.require(is_taken, Reason::Scale, format_args!("a soft cap of {cap}, taken is a normal number above 0"))?;
        let rule = format_args!("a soft cap of {cap}, taken up to {MOST_CAP}: each score is off by its roundoff, of 2^-24 times as much");
        id.require(cap <= MOST_CAP, Reason::Scale, rule)?;
    }
    for (name, view, types) in [("bias", &p.bias, &[p.q.dtype, DType::F32][..]), ("mask", &p.mask, &[DType::U8])] {
        let Some(view) = view else { continue };
        id.require(types.contains(&view.dtype), Reason::DType, format_args!("{name} of {}, taken is {types:?}", view.dtype))?;
        let is_in_a_row = view.strides[3] == 1 || p.s_kv == 1;
        id.require(is_in_a_row, Reason::Layout, format_args!("keys of {name} are {} elements apart, taken side by side", view.strides[3]))?;
    }
    if let Some(bias) = &p.bias {
        let bytes = bias.offset * bias.dtype.bytes() as u64;
        id.require(bytes.is_multiple_of(4), Reason::Alignment, format_args!("bias begins {bytes} bytes into its buffer"))?;
    }
    Ok(())
}

impl ScoreModArgs {
    pub(super) fn of(p: &AttentionProblem) -> ScoreModArgs {
        let strides_bytes = |view: &View| [0, 1, 2].map(|i| view.strides[i] * view.dtype.bytes() as u64);
        let at = |view: &Option<View>| element(view.as_ref().unwrap_or(&p.q), []);
        let strides = |view: &Option<View>| view.as_ref().map_or([0; 3], strides_bytes);
        let cap = p.soft_cap.map(|cap| cap.0 as f32);
        let [of_batch, of_head, _] = strides(&p.slopes);
        ScoreModArgs {
            factor: host_number(p.scale),
            cap: cap.unwrap_or(0.0),
            bend: cap.map_or(0.0, |cap| 2.0 * LOG2_E / cap),
            bias: at(&p.bias),
            bias_strides: strides(&p.bias),
            bias_bytes: p.bias.as_ref().map_or(0, |bias| bias.dtype.bytes() as u32),
            mask: at(&p.mask),
            mask_strides: strides(&p.mask),
            has_mask: u32::from(p.mask.is_some()),
            slopes: at(&p.slopes),
            slope_strides: [of_batch, of_head],
            has_slopes: u32::from(p.slopes.is_some()),
        }
    }
}

/// Of a head, the matrices from which a thread reads beside its scores, and its slope.
pub(super) struct HeadMods<'k> {
    bias: Pointer<'k>,
    mask: Pointer<'k>,
    slope: Val<'k, f32>,
}

/// Gives the address, as a base and an offset, of what a matrix has for the score of a half, so many columns behind the thread's first one.
pub(super) type Addresses<'k> = Box<dyn Fn(u32, u32) -> (Val<'k, u64>, i64) + 'k>;

/// Where a thread's scores stand, whichever way they lie.
pub(super) trait Places<'k> {
    /// Of a matrix whose queries are `of_query` bytes apart, and whose elements have `bytes`.
    fn addresses(&self, of: Pointer<'k>, of_query: Val<'k, u64>, bytes: u32) -> Addresses<'k>;

    /// How far the keys of the halves are from the diagonal in the first column, and by how much that changes from one column to the next.
    fn distances(&self) -> ([Val<'k, i32>; 2], i32);
}

/// A score that is still a product, its half, and its column behind the thread's first one.
pub(super) type Element<'k> = (Var<'k, f32>, u32, u32);

impl<'k> ScoreMod<'k> {
    /// Of a head of queries.
    #[track_caller]
    pub(super) fn of_head(&self, k: Kernel<'k>, batch: Val<'k, u32>, head: Val<'k, u32>) -> HeadMods<'k> {
        k.scope(Location::caller(), || {
            let moved =
                |of: Pointer<'k>, [of_batch, of_head]: [Val<'k, u64>; 2]| of.moved(batch.widen() * of_batch + head.widen() * of_head);
            let slope = k.var_named("slope", 0.0f32);
            k.when(self.has_slopes.ne(0), || slope.set(k.ld_global::<f32>(moved(self.slopes, self.slope_strides).address(), 0)));
            let [bias, mask] = [(self.bias, self.bias_strides), (self.mask, self.mask_strides)]
                .map(|(of, [of_batch, of_head, _])| moved(of, [of_batch, of_head]));
            HeadMods { bias, mask, slope: slope.get() }
        })
    }

    /// Whether a cap is all that there is.
    pub(super) fn is_cap_alone(&self) -> Val<'k, bool> {
        self.cap.ne(0.0) & (self.bias_bytes | self.has_mask | self.has_slopes).eq(0)
    }

    /// The cap, where there is one.
    #[track_caller]
    pub(super) fn soft_cap(&self) -> SoftCap<'k> {
        SoftCap { bend: self.factor * self.bend, twice: self.cap * -2.0, cap: self.cap }
    }

    /// Makes scores of products, in place. `bends` get the factor of each score's gradient, which is 1 without a cap.
    #[track_caller]
    pub(super) fn apply(
        &self,
        k: Kernel<'k>,
        ty: Half,
        head: &HeadMods<'k>,
        elements: &[Element<'k>],
        places: &dyn Places<'k>,
        bends: &[Var<'k, f32>],
    ) {
        k.scope(Location::caller(), || {
            let bent = || {
                let cap = self.soft_cap();
                for (i, (score, ..)) in elements.iter().enumerate() {
                    let capped = cap.of(k, score.get());
                    score.set(capped.score);
                    if let Some(bend) = bends.get(i) {
                        bend.set(capped.slope(k));
                    }
                }
            };
            let straight = || {
                elements.iter().for_each(|(score, ..)| score.set(*score * self.factor));
                bends.iter().for_each(|bend| bend.set(1.0f32));
            };
            k.when_else(self.cap.ne(0.0), bent, straight);
            let [_, _, bias_of_query] = self.bias_strides;
            k.when(self.bias_bytes.eq(4), || {
                let at = places.addresses(head.bias, bias_of_query, 4);
                for &(score, half, column) in elements {
                    let (base, offset) = at(half, column);
                    score.set(score + k.ld_global::<f32>(base, offset));
                }
            });
            k.when(self.bias_bytes.eq(2), || {
                let at = places.addresses(head.bias, bias_of_query, 2);
                for &(score, half, column) in elements {
                    let (base, offset) = at(half, column);
                    score.set(score + ty.widen(k, k.ld_global::<u16>(base, offset)));
                }
            });
            k.when(self.has_slopes.ne(0), || {
                let (first, step) = places.distances();
                for &(score, half, column) in elements {
                    let distance = (first[half as usize] + step * column as i32).convert::<f32>(CvtRound::Nearest).abs();
                    score.set(k.fma(-head.slope, distance, score));
                }
            });
            let [_, _, mask_of_query] = self.mask_strides;
            k.when(self.has_mask.ne(0), || {
                let at = places.addresses(head.mask, mask_of_query, 1);
                for (i, &(score, half, column)) in elements.iter().enumerate() {
                    let (base, offset) = at(half, column);
                    let hidden = k.ld_global_byte(base, offset, false).eq(0);
                    score.set(k.select(hidden, f32::NEG_INFINITY, score));
                    // Of a score that is no number, neither is the slope, and a probability of 0 would not hide it.
                    if let Some(&bend) = bends.get(i) {
                        bend.set(k.select(hidden, 0.0, bend));
                    }
                }
            });
        });
    }
}

impl<'k> ScoreMod<'k> {
    /// Of a head of queries, the mask alone.
    #[track_caller]
    pub(super) fn mask_of_head(&self, batch: Val<'k, u32>, head: Val<'k, u32>) -> Pointer<'k> {
        let [of_batch, of_head, _] = self.mask_strides;
        self.mask.moved(batch.widen() * of_batch + head.widen() * of_head)
    }

    /// Hides what the mask does, where there is one. What it hides, whatever made it, is −∞.
    #[track_caller]
    pub(super) fn hide(&self, k: Kernel<'k>, mask: Pointer<'k>, elements: &[Element<'k>], places: &dyn Places<'k>) {
        k.scope(Location::caller(), || {
            let [_, _, of_query] = self.mask_strides;
            k.when(self.has_mask.ne(0), || {
                let at = places.addresses(mask, of_query, 1);
                for &(score, half, column) in elements {
                    let (base, offset) = at(half, column);
                    let hidden = k.ld_global_byte(base, offset, false).eq(0);
                    score.set(k.select(hidden, f32::NEG_INFINITY, score));
                }
            });
        });
    }
}

/// `cap · tanh(x) = cap · (1 − 2r)` with `r = 1 / (1 + e^2x)`, right to the rounding of the cap at either end.
pub(super) struct SoftCap<'k> {
    bend: Val<'k, f32>,
    twice: Val<'k, f32>,
    cap: Val<'k, f32>,
}

/// A score under a cap.
pub(super) struct Capped<'k> {
    pub(super) score: Val<'k, f32>,
    r: Val<'k, f32>,
}

impl<'k> SoftCap<'k> {
    /// Of a product of a query and a key.
    #[track_caller]
    pub(super) fn of(&self, k: Kernel<'k>, product: Val<'k, f32>) -> Capped<'k> {
        // Of no more than 1; where it would be denormal, it adds nothing to the cap.
        let r = ((product * self.bend).exp2() + 1.0).rcp_flushed();
        Capped { score: k.fma(r, self.twice, self.cap), r }
    }
}

impl<'k> Capped<'k> {
    /// The factor of the score's gradient: `4r · (1 − r)`.
    #[track_caller]
    pub(super) fn slope(&self, k: Kernel<'k>) -> Val<'k, f32> {
        let four = self.r * 4.0;
        k.fma(-four, self.r, four)
    }
}

/// Scores whose rows are queries: two of a thread, which exist, and the keys of a block along the columns.
pub(super) struct QueryRows<'k> {
    /// The two rows.
    pub(super) queries: [Val<'k, u32>; 2],
    /// The key of the thread's first column.
    pub(super) first_key: Val<'k, u32>,
    /// Given where columns may reach beyond the last key: what is read there is the last key's.
    pub(super) last_key: Option<Val<'k, u32>>,
    /// From a query to its diagonal's key.
    pub(super) shift: Val<'k, i32>,
}

impl<'k> Places<'k> for QueryRows<'k> {
    fn addresses(&self, of: Pointer<'k>, of_query: Val<'k, u64>, bytes: u32) -> Addresses<'k> {
        let rows = self.queries.map(|query| of.moved(query.widen() * of_query));
        let first_key = self.first_key;
        match self.last_key {
            Some(last) => Box::new(move |half, column| (rows[half as usize].at((first_key + column).min(last), bytes), 0)),
            None => {
                let rows = rows.map(|row| row.at(first_key, bytes));
                Box::new(move |half, column| (rows[half as usize], i64::from(column * bytes)))
            }
        }
    }

    fn distances(&self) -> ([Val<'k, i32>; 2], i32) {
        (self.queries.map(|query| query.signed() + self.shift - self.first_key.signed()), -1)
    }
}

/// Scores whose rows are keys: two of a thread, which exist, and the queries of a block along the columns.
pub(super) struct KeyRows<'k> {
    /// The two rows.
    pub(super) keys: [Val<'k, u32>; 2],
    /// The query of the thread's first column.
    pub(super) first_query: Val<'k, u32>,
    /// What is read beyond the last query is its.
    pub(super) last_query: Val<'k, u32>,
    /// From a query to its diagonal's key.
    pub(super) shift: Val<'k, i32>,
}

impl<'k> Places<'k> for KeyRows<'k> {
    fn addresses(&self, of: Pointer<'k>, of_query: Val<'k, u64>, bytes: u32) -> Addresses<'k> {
        let rows = self.keys.map(|key| of.at(key, bytes));
        let (first, last) = (self.first_query, self.last_query);
        Box::new(move |half, column| (rows[half as usize] + (first + column).min(last).widen() * of_query, 0))
    }

    fn distances(&self) -> ([Val<'k, i32>; 2], i32) {
        (self.keys.map(|key| self.first_query.signed() + self.shift - key.signed()), 1)
    }
}

/// The elements of some blocks of 8 columns of a product's registers.
pub(super) fn elements<'k>(products: &Fragment<'k, f32>, parts: std::ops::Range<u32>) -> Vec<Element<'k>> {
    let of_part = |part: u32| {
        let each = [(0, 0), (0, 1), (1, 0), (1, 1)];
        each.map(|(half, odd)| (products.element(part, half, odd), half, 8 * part + odd))
    };
    parts.flat_map(of_part).collect()
}
