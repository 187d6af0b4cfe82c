//! The kernels: rows that gather their partners' elements by weights, sums of rows, and the gradients of bias, sinks and what a function of scores reads.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::super::dropout::DropoutArgs;
use super::super::function::{self, Source};
use super::name::Name;
use super::pass::Pass;
use super::shares::SharesArgs;
use crate::fuse::compute::{self, Compute};
use crate::fuse::lanes;
use crate::fuse::math;
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::steps::{self, Code, Number, Numbers, Operands, Step};
use crate::fuse::strided::{self, Strided};
use crate::fuse::value::AnyVal;
use crate::layout::space::Extents;

/// Warps of a CTA.
pub(super) const WARPS: u32 = 4;
const THREADS: u32 = 32 * WARPS;

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    pub pass: Pass,
    pub double: bool,
    /// Whether the window has a bound before the diagonal, and behind it.
    pub left: bool,
    pub right: bool,
    pub bottom_right: bool,
    pub soft_cap: bool,
    /// Some pairs are dropped.
    pub dropout: bool,
    /// Elements of a row that a lane has, 32 apart.
    pub columns: u32,
    /// Lanes that share an element of the gradient of the bias, or of what the function reads: 1 or a warp.
    pub team: u32,
    /// What is read and written, in the order of the problem's operands.
    pub operands: Vec<(Name, DType)>,
    /// The steps of the function of scores, where there is one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub function: Vec<Step<Source>>,
    /// Of the function and its slope, whose steps are then behind it, the step whose value is the score; the slope is that of the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<u32>,
}

impl Spec {
    /// Without options and operands.
    pub(super) fn plain(pass: Pass) -> Spec {
        Spec {
            pass,
            double: false,
            left: false,
            right: false,
            bottom_right: false,
            soft_cap: false,
            dropout: false,
            columns: 1,
            team: 1,
            operands: Vec::new(),
            function: Vec::new(),
            score: None,
        }
    }

    /// Rows of a warp.
    pub(super) fn rows(&self) -> u32 {
        match self.pass {
            pass if !pass.has_columns() => 1,
            _ if self.double => 2,
            _ => 4,
        }
    }

    /// Whether sequences lie behind each other.
    pub(super) fn is_ragged(&self) -> bool {
        self.operands.iter().any(|(name, _)| *name == Name::QOffsets)
    }

    /// Whether keys and values lie in pages.
    pub(super) fn is_paged(&self) -> bool {
        self.operands.iter().any(|(name, _)| *name == Name::PageTable)
    }

    /// Whether pairs are attended to by blocks.
    pub(super) fn has_blocks(&self) -> bool {
        self.operands.iter().any(|(name, _)| *name == Name::BlockMap)
    }

    /// Of the pass that gives shares of a table's gradient, its number and the step that says a place in it.
    fn entry_step(&self) -> Option<(u32, u32)> {
        let Pass::Shares(own) = self.pass else { return None };
        function::place_of_table(&self.function, own).map(|x| (own, x))
    }

    fn name(&self) -> String {
        let flag = |set: bool, word: &str| if set { format!("_{word}") } else { String::new() };
        let flags = [
            flag(self.double, "f64"),
            flag(self.left, "left"),
            flag(self.right, "right"),
            flag(self.bottom_right, "bottomright"),
            flag(self.soft_cap, "cap"),
            flag(self.dropout, "dropout"),
            flag(self.team > 1, "warps"),
        ];
        let operands: String = self.operands.iter().map(|(name, dtype)| format!("_{}{dtype}", name.word())).collect();
        let mut name = format!("attention_simt_{}{}_x{}{operands}", self.pass.word(), flags.concat(), self.columns);
        // Text that is held in memory takes whatever is written.
        let _ = function::write_name(&mut name, &self.function);
        if let Some(score) = self.score {
            let _ = write!(name, "_score{score}");
        }
        name
    }

    pub(super) fn target(&self) -> Target {
        compute::target_of_all(self.operands.iter().map(|(_, dtype)| *dtype)).max(steps::target(&self.function))
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 2, cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        let run = Run::<T>::new(k, self);
        match self.pass {
            Pass::Forward | Pass::Queries | Pass::Keys | Pass::Values => run.gather(),
            Pass::RowSums => run.row_sums(),
            Pass::Bias | Pass::Operand(_) => run.bias(),
            Pass::Sinks => run.sinks(),
            Pass::Shares(_) => super::shares::shares(&run),
            Pass::SumOfShares(number) => super::shares::sum(&run, number),
        }
    }

    fn declarations(&self) -> Vec<OperandDecl> {
        self.operands.iter().map(|&(name, dtype)| strided::declaration(dtype, 4, self.pass.writes(name))).collect()
    }

    pub(super) fn bytes(&self) -> u32 {
        if self.double { 8 } else { 4 }
    }
}

verdigris_kir::parameters! {
    /// Rows of ragged tensors.
    pub(super) struct Ragged / #[derive(Clone, Copy, Debug)] RaggedArgs of () as _spec {
        pub q_rows: u32,
        pub kv_rows: u32,
    }
}

verdigris_kir::parameters! {
    /// Pages of keys and values.
    pub(super) struct Paged / #[derive(Clone, Copy, Debug)] PagedArgs of () as _spec {
        pub last: u32,
        pub page_size: Divide,
    }
}

verdigris_kir::parameters! {
    /// Blocks of pairs.
    pub(super) struct Blocks / #[derive(Clone, Copy, Debug)] BlocksArgs of () as _spec {
        /// The number of the last mask.
        pub last: u32,
        pub block_q: Divide,
        pub block_kv: Divide,
    }
}

verdigris_kir::parameters! {
    /// Of every pass.
    pub(super) struct Values / KernelArgs of Spec as spec {
        /// Tiles of the rows of a head; of the gradient of the bias or of what the function reads, of its columns.
        pub row_tiles: Divide,
        pub column_blocks: Divide,
        /// Heads that have rows.
        pub heads: Divide,
        /// Heads of queries for one of keys.
        pub group: Divide,
        pub b: u32,
        pub h: u32,
        /// Of the sums of rows, whose tensors may be ragged, rows of queries.
        pub s_q: u32,
        pub s_kv: u32,
        pub ragged: Option<RaggedArgs> = spec.is_ragged().then_some(()),
        pub paged: Option<PagedArgs> = spec.is_paged().then_some(()),
        pub blocks: Option<BlocksArgs> = spec.has_blocks().then_some(()),
        pub d: u32,
        pub d_v: u32,
        pub left: i32,
        pub right: i32,
        pub soft_cap: f64,
        pub dropout: Option<DropoutArgs> = spec.dropout.then_some(()),
        pub scale: Option<Number> = spec.pass.has_scores().then_some(spec.double),
        /// Batch, head and query of the gradient of the bias, or of what the function reads, its columns, and how often it was repeated along each dim and in all.
        pub own: Extents = 3,
        pub columns_of_bias: u32,
        pub repeats: Extents = 4,
        pub repeated: u32,
        pub operands: Vec<OperandArgs> = spec.declarations(),
        /// Of the function of scores.
        pub numbers: Numbers = steps::numbers(&spec.function, spec.double),
        /// Of its tables, the last entries.
        pub last_entries: Vec<u32> = vec![(); function::tables(&spec.function).count()],
        /// `Σ d_o · o` of each query.
        pub sums: Option<Read> = spec.pass.reads_sums().then_some(spec.bytes()),
        pub sums_to: Option<Write> = (spec.pass == Pass::RowSums).then_some(spec.bytes()),
        pub shares: Option<SharesArgs> = matches!(spec.pass, Pass::Shares(_) | Pass::SumOfShares(_)).then(|| spec.bytes()),
    }
}

/// A query or a key by its place.
#[derive(Clone, Copy)]
pub(super) struct Place<'k> {
    pub(super) b: Val<'k, u32>,
    /// The head of queries, of a query; of keys, of a key.
    pub(super) head: Val<'k, u32>,
    /// The row of the tensor.
    pub(super) s: Val<'k, u32>,
}

/// What a batch has of queries and keys, and the diagonal.
#[derive(Clone, Copy)]
pub(super) struct Lengths<'k> {
    pub(super) q: Val<'k, i32>,
    pub(super) kv: Val<'k, i32>,
    /// Where the diagonal is for query 0.
    corner: Val<'k, i32>,
    /// Of ragged tensors, the rows of the batch.
    of_q: Option<Sequence<'k>>,
    of_kv: Option<Sequence<'k>>,
}

/// Rows of one batch of ragged tensors, in front of `rows` whatever the offsets.
#[derive(Clone, Copy)]
pub(super) struct Sequence<'k> {
    begin: Val<'k, u32>,
    count: Val<'k, u32>,
    rows: Val<'k, u32>,
}

impl<'k> Lengths<'k> {
    /// The row of the tensor that has a query.
    pub(super) fn query(&self, i: Val<'k, u32>) -> Val<'k, u32> {
        self.of_q.map_or(i, |own| own.begin + i)
    }

    /// The row of the tensor that has a key.
    fn key(&self, j: Val<'k, u32>) -> Val<'k, u32> {
        self.of_kv.map_or(j, |own| own.begin + j)
    }
}

/// A score, and what gradients need of it.
pub(super) struct Score<'k, T> {
    is_attended: Val<'k, bool>,
    s: Val<'k, T>,
    /// The entry of the table whose gradient the pass gives shares of.
    pub(super) entry: Option<Val<'k, u32>>,
    /// Under the cap.
    tanh: Option<Val<'k, T>>,
    /// Of the function.
    slope: Option<Val<'k, T>>,
}

/// Whether a pair counts, and its `p`.
type Probability<'k, T> = (Val<'k, bool>, Val<'k, T>);

/// What a row knows of its scores so far.
struct Online<'k, T> {
    greatest: Var<'k, T>,
    /// The lane's part of the sum.
    sum: Var<'k, T>,
}

/// A kernel being built.
pub(super) struct Run<'s, 'k, T> {
    pub(super) k: Kernel<'k>,
    pub(super) spec: &'s Spec,
    pub(super) values: Values<'k>,
    operands: Vec<(Name, Strided<'k>)>,
    scale: Option<Val<'k, T>>,
}

/// What the function of scores reads at a pair.
struct AtScore<'r, 's, 'k, T> {
    run: &'r Run<'s, 'k, T>,
    at: [Val<'k, u32>; 4],
}

impl<'k, T: Compute> Operands<'k, Source> for AtScore<'_, '_, 'k, T> {
    fn load(&self, _: usize, from: &Source) -> Vec<AnyVal<'k>> {
        vec![match *from {
            Source::Place(axis) => AnyVal::of(T::from_i32(self.at[axis as usize].signed())),
            Source::Tensor { number, .. } => self.run.must(Name::SCORE_OPERANDS[number as usize]).at(&self.at).first(),
            Source::Table { .. } => unreachable!("tables are read at places"),
        }]
    }

    fn gather(&self, _: usize, from: &Source, place: AnyVal<'k>) -> AnyVal<'k> {
        let Source::Table { number, .. } = *from else { unreachable!("a table is one") };
        let [b, head, i, _] = self.at;
        let at = [b, head, i, self.run.entry(number, place)];
        self.run.must(Name::SCORE_OPERANDS[number as usize]).at(&at).first()
    }
}

/// The value of lane `lane`.
pub(super) fn of_lane<'k, T: Compute>(k: Kernel<'k>, value: Val<'k, T>, lane: Val<'k, u32>) -> Val<'k, T> {
    if T::TY.bits() == 32 {
        return k.shfl_idx::<u32>(value.bitcast::<u32>(), lane).bitcast();
    }
    let (low, high) = k.split32(value.bitcast::<u64>());
    k.join32(k.shfl_idx::<u32>(low, lane), k.shfl_idx::<u32>(high, lane)).bitcast()
}

impl<'s, 'k, T: Compute> Run<'s, 'k, T> {
    fn new(k: Kernel<'k>, spec: &'s Spec) -> Self {
        let mut values = Values::declare(k, spec);
        let declared = std::mem::take(&mut values.operands);
        let operands = spec.operands.iter().zip(declared).map(|(&(name, dtype), value)| (name, Strided::new(dtype, value))).collect();
        let scale = values.scale.map(|scale| AnyVal::Number(scale).get(k));
        Run { k, spec, values, operands, scale }
    }

    fn operand(&self, name: Name) -> Option<&Strided<'k>> {
        self.operands.iter().find(|(known, _)| *known == name).map(|(_, operand)| operand)
    }

    /// An operand that every such kernel has.
    pub(super) fn must(&self, name: Name) -> &Strided<'k> {
        self.operand(name).expect("an operand that the pass always has")
    }

    pub(super) fn number(&self, value: f64) -> Val<'k, T> {
        T::constant(self.k, value)
    }

    fn least(&self) -> Val<'k, T> {
        self.number(f64::NEG_INFINITY)
    }

    fn zero(&self) -> Val<'k, u32> {
        self.k.constant(0)
    }

    /// `e^(x − from)`, 0 for an `x` of −∞.
    fn weight(&self, x: Val<'k, T>, from: Val<'k, T>) -> Val<'k, T> {
        self.k.select(x.eq(self.least()), self.number(0.0), T::fast_exp(x - from))
    }

    /// The entry of a table, the operand of this number, at a place.
    fn entry(&self, number: u32, place: AnyVal<'k>) -> Val<'k, u32> {
        let table = function::tables(&self.spec.function).position(|known| known == number).expect("a table of the function");
        let place = place.get::<T>(self.k).max(self.number(0.0)).convert::<u32>(CvtRound::IntNearest);
        place.min(self.values.last_entries[table])
    }

    /// The elements of a place, along its last dim.
    pub(super) fn line(&self, name: Name, at: Place<'k>) -> Strided<'k> {
        self.must(name).at(&[at.b, at.head, at.s])
    }

    pub(super) fn key_head(&self, head: Val<'k, u32>) -> Val<'k, u32> {
        self.values.group.quotient(head)
    }

    /// The factor of 8-bit floats that a head of queries reads, if there is one.
    fn descale(&self, name: Name, b: Val<'k, u32>, head: Val<'k, u32>) -> Option<Val<'k, T>> {
        self.operand(name).map(|factors| factors.load::<T>(&[b, self.key_head(head)]))
    }

    /// Where key `j` of a batch is, in front of the batch's end. Whatever the table says, it is in a page that there is.
    pub(super) fn key(&self, b: Val<'k, u32>, head: Val<'k, u32>, lengths: Lengths<'k>, j: Val<'k, u32>) -> Place<'k> {
        let Some(paged) = &self.values.paged else { return Place { b, head, s: lengths.key(j) } };
        let (entry, s) = paged.page_size.split(j);
        let page = self.must(Name::PageTable).load_integer(&[b, entry]).unsigned().low32().signed();
        Place { b: page.max(0).min(paged.last.signed()).unsigned(), head, s }
    }

    pub(super) fn lengths(&self, b: Val<'k, u32>) -> Lengths<'k> {
        let sequence = |name: Name, rows: Val<'k, u32>, longest: Val<'k, u32>| {
            let offsets = self.operand(name)?;
            let at = |n: Val<'k, u32>| offsets.load_integer(&[n]).unsigned().low32().signed().max(0).min(rows.signed());
            let (begin, end) = (at(b), at(b + 1));
            Some(Sequence { begin: begin.unsigned(), count: (end - begin).max(0).min(longest.signed()).unsigned(), rows })
        };
        let ragged = self.values.ragged.as_ref();
        let of_q = ragged.and_then(|ragged| sequence(Name::QOffsets, ragged.q_rows, self.values.s_q));
        let of_kv = ragged.and_then(|ragged| sequence(Name::KvOffsets, ragged.kv_rows, self.values.s_kv));
        let length = |name: Name, extent: Val<'k, u32>| match self.operand(name) {
            None => extent.signed(),
            Some(lengths) => {
                let length = lengths.load_integer(&[b]).unsigned().low32().signed();
                length.max(0).min(extent.signed())
            }
        };
        let q = length(Name::QLengths, of_q.map_or(self.values.s_q, |own| own.count));
        let kv = length(Name::KvLengths, of_kv.map_or(self.values.s_kv, |own| own.count));
        let corner = if self.spec.bottom_right { kv - q } else { self.k.constant(0) };
        Lengths { q, kv, corner, of_q, of_kv }
    }

    /// The score of a pair, from the product of its elements.
    pub(super) fn score(
        &self,
        [b, head, i, j]: [Val<'k, u32>; 4],
        lengths: Lengths<'k>,
        inside: Val<'k, bool>,
        product: Val<'k, T>,
    ) -> Score<'k, T> {
        let (k, spec) = (self.k, self.spec);
        let (query, key) = (i.signed(), j.signed());
        let mut is_attended = inside & query.lt(lengths.q) & key.lt(lengths.kv);
        let diagonal = query + lengths.corner;
        if spec.left {
            is_attended = is_attended & key.ge(diagonal - self.values.left);
        }
        if spec.right {
            is_attended = is_attended & key.le(diagonal + self.values.right);
        }
        if let Some(mask) = self.operand(Name::Mask) {
            is_attended = is_attended & mask.load_integer(&[b, head, i, j]).unsigned().low32().ne(0);
        }
        if let Some(blocks) = &self.values.blocks {
            let ((row, i), (column, j)) = (blocks.block_q.split(i), blocks.block_kv.split(j));
            let entry = self.must(Name::BlockMap).load_integer(&[b, head, row, column]).unsigned().low32().signed();
            let mask = (entry.max(1) - 1).min(blocks.last.signed()).unsigned();
            let byte = self.must(Name::MaskBlocks).load_integer(&[mask, self.zero(), i, j >> 3]).unsigned().low32();
            let is_in_part = entry.gt(0) & (byte.shr(j & 7) & 1).ne(0);
            is_attended = is_attended & (entry.lt(0) | is_in_part);
        }
        let mut s = product * self.scale.expect("scores have a scale");
        for descale in [Name::QDescale, Name::KDescale].into_iter().filter_map(|name| self.descale(name, b, head)) {
            s = s * descale;
        }
        let tanh = spec.soft_cap.then(|| {
            let cap = T::from_f64(self.values.soft_cap);
            let x = T::quotient(s, cap);
            // −n / (n + 2) with n = e^−2|x| − 1, which keeps its digits where x is small: under a large cap all scores are there.
            let n = math::exp_m1(x.abs() * self.number(-2.0));
            let size = -n * T::reciprocal(n + self.number(2.0));
            k.select(x.lt(self.number(0.0)), -size, size)
        });
        if let Some(tanh) = tanh {
            s = tanh * T::from_f64(self.values.soft_cap);
        }
        let (mut slope, mut entry) = (None, None);
        if !spec.function.is_empty() {
            let code = Code { steps: &spec.function, numbers: &self.values.numbers, computed: Some(T::DTYPE), lanes: 1 };
            let values = code.run(k, &[AnyVal::of(s)], &AtScore { run: self, at: [b, head, i, j] });
            let last = values.last().and_then(|value| value.first()).expect("a function has steps").get(k);
            s = spec.score.map_or(last, |score| values[score as usize][0].get(k));
            slope = spec.score.map(|_| last);
            entry = spec.entry_step().map(|(number, x)| self.entry(number, values[x as usize][0]));
        }
        if let Some(bias) = self.operand(Name::Bias) {
            s = s + bias.load::<T>(&[b, head, i, j]);
        }
        if let Some(slopes) = self.operand(Name::Slopes) {
            let distance = query + (lengths.kv - lengths.q) - key;
            let distance = distance.max(k.constant(0) - distance);
            s = k.fma(-slopes.load::<T>(&[b, head]), T::from_i32(distance), s);
        }
        Score { is_attended, s: k.select(is_attended, s, self.least()), entry, tanh, slope }
    }

    /// Sums of products of the elements of each of the lines with those of another one.
    pub(super) fn dots(&self, width: Val<'k, u32>, lines: &[Strided<'k>], other: &Strided<'k>) -> Vec<Val<'k, T>> {
        let k = self.k;
        let sums: Vec<Var<'k, T>> = lines.iter().map(|_| k.var(self.number(0.0))).collect();
        k.range(width, |e| {
            let theirs = other.load::<T>(&[e]);
            for (sum, line) in sums.iter().zip(lines) {
                sum.set(k.fma(line.load::<T>(&[e]), theirs, *sum));
            }
        });
        sums.iter().map(|sum| sum.get()).collect()
    }

    /// `p` of a score.
    pub(super) fn probability(&self, score: &Score<'k, T>, total: Val<'k, T>) -> Probability<'k, T> {
        let counts = score.is_attended & total.ne(self.least());
        (counts, self.k.select(counts, self.weight(score.s, total), self.number(0.0)))
    }

    /// A pair's `p`, or product of values, behind dropout.
    pub(super) fn drop_some(&self, [b, head, i, j]: [Val<'k, u32>; 4], value: Val<'k, T>) -> Val<'k, T> {
        let (k, Some(dropout)) = (self.k, &self.values.dropout) else { return value };
        let is_kept = dropout.of_head(k, b, head).is_kept(k, i, j);
        k.select(is_kept, value * T::from_f64(dropout.factor), self.number(0.0))
    }

    /// `ds` of a pair, from its product of values, behind dropout, and the sum of its row.
    pub(super) fn gradient(&self, (counts, p): Probability<'k, T>, product: Val<'k, T>, rest: Val<'k, T>) -> Val<'k, T> {
        self.k.select(counts, p * (product - rest), self.number(0.0))
    }

    /// `Σ d_o · o` of a query, by its row of the tensor.
    pub(super) fn row_sum(&self, b: Val<'k, u32>, head: Val<'k, u32>, row: Val<'k, u32>) -> Val<'k, T> {
        let sums = self.values.sums.expect("the pass reads sums");
        let place = match &self.values.ragged {
            None => (b * self.values.h + head).mul_wide(self.values.s_q),
            Some(ragged) => head.mul_wide(ragged.q_rows),
        };
        let place = place + row.widen();
        self.k.ld_global::<T>(sums.address() + place * u64::from(self.spec.bytes()), 0)
    }

    // ---- rows that gather --------------------------------------------------------------------------------------------------

    fn gather(&self) {
        let (k, spec) = (self.k, self.spec);
        let (rest, tile) = self.values.row_tiles.split(k.cta());
        let (rest, block) = self.values.column_blocks.split(rest);
        let (b, head) = self.values.heads.split(rest);
        let first = (tile * WARPS + k.warp()) * spec.rows();
        let extent = if spec.pass.has_keys() { self.values.s_kv } else { self.values.s_q };
        k.when(first.lt(extent), || {
            let lengths = self.lengths(b);
            match if spec.pass.has_keys() { lengths.of_kv } else { lengths.of_q } {
                None => self.gather_rows([b, head, block], lengths, first, extent),
                Some(own) => k.when(first.lt(own.count), || self.gather_rows([b, head, block], lengths, first, own.count)),
            }
        });
    }

    /// `extent` is that of the rows of the batch.
    fn gather_rows(&self, [b, head, block]: [Val<'k, u32>; 3], lengths: Lengths<'k>, first: Val<'k, u32>, extent: Val<'k, u32>) {
        let (k, spec) = (self.k, self.spec);
        let rows: Vec<Val<'k, u32>> = (0..spec.rows()).map(|r| (first + r).min(extent - 1)).collect();
        let width = if matches!(spec.pass, Pass::Forward | Pass::Values) { self.values.d_v } else { self.values.d };
        let column = block * (32 * spec.columns) + k.lane();
        let columns: Vec<Val<'k, u32>> = (0..spec.columns).map(|c| (column + 32 * c).min(width - 1)).collect();
        let sums: Vec<Vec<Var<'k, T>>> = rows.iter().map(|_| columns.iter().map(|_| k.var(self.number(0.0))).collect()).collect();
        if spec.pass.has_keys() {
            k.range(self.values.group.value(), |member| {
                let query_head = head * self.values.group.value() + member;
                self.over_queries(b, [query_head, head], lengths, &rows, &columns, &sums);
            });
            let scale = if spec.pass == Pass::Keys { self.scale } else { None };
            let out = if spec.pass == Pass::Keys { Name::Dk } else { Name::Dv };
            self.store(out, [b, head, lengths.key(first)], [first, extent], [column, width], &sums, |_, sum| {
                scale.map_or(sum, |scale| sum * scale)
            });
            return;
        }
        let online: Vec<Online<'k, T>> =
            rows.iter().map(|_| Online { greatest: k.var(self.least()), sum: k.var(self.number(0.0)) }).collect();
        self.over_keys(b, head, lengths, &rows, &columns, &sums, &online);
        if spec.pass == Pass::Queries {
            let scale = self.scale.expect("scores have a scale");
            self.store(Name::Dq, [b, head, lengths.query(first)], [first, extent], [column, width], &sums, |_, sum| sum * scale);
            return;
        }
        let mut finished = Vec::new();
        for (row, online) in rows.iter().zip(&online) {
            let sum = lanes::over_lanes(k, 32, online.sum.get(), &|x, y| x + y);
            let greatest = online.greatest.get();
            let sink = self
                .operand(Name::Sinks)
                .map(|sinks| k.select(row.signed().lt(lengths.q), sinks.load::<T>(&[self.zero(), head]), self.least()));
            let top = sink.map_or(greatest, |sink| T::max_nan(greatest, sink));
            let from = k.select(top.eq(self.least()), self.number(0.0), top);
            let kept = self.weight(greatest, from);
            let all = sink.map_or(sum * kept, |sink| k.fma(sum, kept, self.weight(sink, from)));
            let is_empty = top.eq(self.least());
            let factor = T::divide(kept, all);
            finished.push((is_empty, factor, [k.select(is_empty, self.least(), from + math::log(all)), greatest]));
        }
        let descale = self.descale(Name::VDescale, b, head);
        self.store(Name::O, [b, head, lengths.query(first)], [first, extent], [column, width], &sums, |row, sum| {
            let (is_empty, factor, _) = finished[row];
            let o = sum * factor;
            k.select(is_empty, self.number(0.0), descale.map_or(o, |descale| o * descale))
        });
        for (which, name) in [Name::LogSumExp, Name::MaxScores].into_iter().enumerate() {
            let Some(numbers) = self.operand(name) else { continue };
            for (r, (_, _, of_row)) in (0..).zip(&finished) {
                k.when(block.eq(0) & k.lane().eq(0) & (first + r).lt(extent), || {
                    numbers.store(&[b, head, lengths.query(first + r)], AnyVal::of(of_row[which]));
                });
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the tail of one kernel, for each of its results")]
    fn store(
        &self,
        name: Name,
        [b, head, first_row]: [Val<'k, u32>; 3],
        [first, extent]: [Val<'k, u32>; 2],
        [column, width]: [Val<'k, u32>; 2],
        sums: &[Vec<Var<'k, T>>],
        finish: impl Fn(usize, Val<'k, T>) -> Val<'k, T>,
    ) {
        let (k, spec) = (self.k, self.spec);
        for (row, sums) in sums.iter().enumerate() {
            let s = first + row as u32;
            k.when(s.lt(extent), || {
                let s = if spec.is_ragged() { first_row + row as u32 } else { s };
                let to = self.line(name, Place { b, head, s });
                for (c, sum) in (0..).zip(sums) {
                    let e = column + 32 * c;
                    k.when(e.lt(width), || to.store(&[e], AnyVal::of(finish(row, sum.get()))));
                }
            });
        }
    }

    /// The keys that queries from `first` to `last` of a batch may attend.
    pub(super) fn keys_of(&self, lengths: Lengths<'k>, [first, last]: [Val<'k, u32>; 2]) -> [Val<'k, u32>; 2] {
        let (k, spec) = (self.k, self.spec);
        let (top, bottom) = (first.signed() + lengths.corner, last.signed() + lengths.corner);
        let from = if spec.left { top - self.values.left } else { k.constant(0) };
        let to = if spec.right { bottom + self.values.right + 1 } else { lengths.kv };
        let to = k.select(first.signed().lt(lengths.q), to, k.constant(0));
        self.range(from, to, lengths.kv)
    }

    /// A range of partners within their extent; empty where its end lies before its begin.
    fn range(&self, first: Val<'k, i32>, end: Val<'k, i32>, extent: Val<'k, i32>) -> [Val<'k, u32>; 2] {
        [first.max(0).min(extent).unsigned(), end.max(0).min(extent).unsigned()]
    }

    /// Goes through the keys of rows that are queries.
    #[allow(clippy::too_many_arguments, reason = "what the rows of a warp have in common")]
    fn over_keys(
        &self,
        b: Val<'k, u32>,
        head: Val<'k, u32>,
        lengths: Lengths<'k>,
        rows: &[Val<'k, u32>],
        columns: &[Val<'k, u32>],
        sums: &[Vec<Var<'k, T>>],
        online: &[Online<'k, T>],
    ) {
        let (k, spec) = (self.k, self.spec);
        let key_head = self.key_head(head);
        let lines = |name: Name| rows.iter().map(|&i| self.line(name, Place { b, head, s: lengths.query(i) })).collect::<Vec<_>>();
        let queries = lines(Name::Q);
        let back = (spec.pass == Pass::Queries).then(|| {
            let totals = rows.iter().map(|&i| self.must(Name::LogSumExp).load::<T>(&[b, head, lengths.query(i)])).collect::<Vec<_>>();
            let rests = rows.iter().map(|&i| self.row_sum(b, head, lengths.query(i))).collect::<Vec<_>>();
            (lines(Name::Do), totals, rests)
        });
        let [begin, end] = self.keys_of(lengths, [rows[0], rows[rows.len() - 1]]);
        k.range_step(begin, end, 32, |base| {
            let own = base + k.lane();
            let (inside, j) = (own.lt(end), own.min(end - 1));
            let key = self.key(b, key_head, lengths, j);
            let products = self.dots(self.values.d, &queries, &self.line(Name::K, key));
            let scores: Vec<Score<'k, T>> =
                rows.iter().zip(products).map(|(&i, product)| self.score([b, head, i, j], lengths, inside, product)).collect();
            let mut weights = Vec::new();
            if let Some((d_o, totals, rests)) = &back {
                let products = self.dots(self.values.d_v, d_o, &self.line(Name::V, key));
                for (r, score) in scores.iter().enumerate() {
                    let product = self.drop_some([b, head, rows[r], j], products[r]);
                    let ds = self.gradient(self.probability(score, totals[r]), product, rests[r]);
                    weights.push(self.through(score, ds));
                }
            } else {
                for (((score, online), sums), &i) in scores.iter().zip(online).zip(sums).zip(rows) {
                    let before = online.greatest.get();
                    let own = lanes::over_lanes(k, 32, score.s, &|x, y| T::max_nan(x, y));
                    let greatest = T::max_nan(before, own);
                    let from = k.select(greatest.eq(self.least()), self.number(0.0), greatest);
                    let kept = self.weight(before, from);
                    let p = self.weight(score.s, from);
                    online.greatest.set(greatest);
                    online.sum.set(k.fma(online.sum, kept, p));
                    sums.iter().for_each(|sum| sum.set(sum.get() * kept));
                    weights.push(self.drop_some([b, head, i, j], p));
                }
            }
            let other = if spec.pass == Pass::Queries { Name::K } else { Name::V };
            self.spread(base, end, &weights, columns, sums, |j| self.line(other, self.key(b, key_head, lengths, j)));
        });
    }

    /// Goes through the queries of one head, for rows that are keys.
    fn over_queries(
        &self,
        b: Val<'k, u32>,
        [head, key_head]: [Val<'k, u32>; 2],
        lengths: Lengths<'k>,
        rows: &[Val<'k, u32>],
        columns: &[Val<'k, u32>],
        sums: &[Vec<Var<'k, T>>],
    ) {
        let (k, spec) = (self.k, self.spec);
        let lines = |name: Name| rows.iter().map(|&j| self.line(name, Place { b, head: key_head, s: lengths.key(j) })).collect::<Vec<_>>();
        let keys = lines(Name::K);
        let values = (spec.pass == Pass::Keys).then(|| lines(Name::V));
        let (top, bottom) = (rows[0].signed() - lengths.corner, rows[rows.len() - 1].signed() - lengths.corner);
        let from = if spec.right { top - self.values.right } else { k.constant(0) };
        let to = if spec.left { bottom + self.values.left + 1 } else { lengths.q };
        let to = k.select(rows[0].signed().lt(lengths.kv), to, k.constant(0));
        let [begin, end] = self.range(from, to, lengths.q);
        k.range_step(begin, end, 32, |base| {
            let own = base + k.lane();
            let (inside, i) = (own.lt(end), own.min(end - 1));
            let query = Place { b, head, s: lengths.query(i) };
            let products = self.dots(self.values.d, &keys, &self.line(Name::Q, query));
            let total = self.must(Name::LogSumExp).load::<T>(&[b, head, query.s]);
            let found: Vec<(Score<'k, T>, Probability<'k, T>)> = rows
                .iter()
                .zip(products)
                .map(|(&j, product)| {
                    let score = self.score([b, head, i, j], lengths, inside, product);
                    let p = self.probability(&score, total);
                    (score, p)
                })
                .collect();
            let weights: Vec<Val<'k, T>> = match &values {
                None => found.iter().zip(rows).map(|((_, (_, p)), &j)| self.drop_some([b, head, i, j], *p)).collect(),
                Some(values) => {
                    let products = self.dots(self.values.d_v, values, &self.line(Name::Do, query));
                    let rest = self.row_sum(b, head, query.s);
                    let ds = found.iter().zip(products).zip(rows).map(|(((score, p), product), &j)| {
                        let product = self.drop_some([b, head, i, j], product);
                        self.through(score, self.gradient(*p, product, rest))
                    });
                    ds.collect()
                }
            };
            let other = if spec.pass == Pass::Keys { Name::Q } else { Name::Do };
            self.spread(base, end, &weights, columns, sums, |i| self.line(other, Place { b, head, s: lengths.query(i) }));
        });
    }

    /// `dt` of a pair.
    pub(super) fn through(&self, score: &Score<'k, T>, ds: Val<'k, T>) -> Val<'k, T> {
        match (score.tanh, score.slope) {
            // What is not attended has any tangent, NaN for one.
            (Some(tanh), _) => self.k.select(score.is_attended, ds * self.k.fma(-tanh, tanh, self.number(1.0)), self.number(0.0)),
            // So has a score of −∞ any slope.
            (_, Some(slope)) => self.k.select(score.s.ne(self.least()), ds * slope, self.number(0.0)),
            _ => ds,
        }
    }

    /// Adds up to 32 partners' elements by the weights that the lanes have of them.
    fn spread(
        &self,
        base: Val<'k, u32>,
        end: Val<'k, u32>,
        weights: &[Val<'k, T>],
        columns: &[Val<'k, u32>],
        sums: &[Vec<Var<'k, T>>],
        partner: impl Fn(Val<'k, u32>) -> Strided<'k>,
    ) {
        let k = self.k;
        k.range((end - base).min(32), |lane| {
            let line = partner(base + lane);
            let elements: Vec<Val<'k, T>> = columns.iter().map(|&e| line.load::<T>(&[e])).collect();
            for (weight, sums) in weights.iter().zip(sums) {
                let weight = of_lane(k, *weight, lane);
                for (sum, &element) in sums.iter().zip(&elements) {
                    sum.set(k.fma(weight, element, *sum));
                }
            }
        });
    }

    // ---- one value a query, a head, or an element of the bias ------------------------------------------------------------------

    fn row_sums(&self) {
        let k = self.k;
        let (rest, tile) = self.values.row_tiles.split(k.cta());
        let (b, head) = self.values.heads.split(rest);
        let s = tile * WARPS + k.warp();
        k.when(s.lt(self.values.s_q), || {
            let at = Place { b, head, s };
            let (o, d_o) = (self.line(Name::O, at), self.line(Name::Do, at));
            let sum = k.var(self.number(0.0));
            k.range_step(k.lane(), self.values.d_v, 32, |e| sum.set(k.fma(d_o.load::<T>(&[e]), o.load::<T>(&[e]), sum)));
            let whole = lanes::over_lanes(k, 32, sum.get(), &|x, y| x + y);
            let to = self.values.sums_to.expect("the pass writes sums");
            k.when(k.lane().eq(0), || {
                let place = rest.mul_wide(self.values.s_q) + s.widen();
                k.st_global(to.address() + place * u64::from(self.spec.bytes()), 0, whole);
            });
        });
    }

    fn sinks(&self) {
        let k = self.k;
        let head = k.cta();
        let sink = self.must(Name::Sinks).load::<T>(&[self.zero(), head]);
        let sum = k.var(self.number(0.0));
        k.range(self.values.b, |b| {
            let lengths = self.lengths(b);
            k.range_step(k.thread(), lengths.q.unsigned(), THREADS, |i| {
                let row = lengths.query(i);
                let total = self.must(Name::LogSumExp).load::<T>(&[b, head, row]);
                let part = self.weight(sink, total) * self.row_sum(b, head, row);
                sum.set(sum.get() - k.select(total.eq(self.least()), self.number(0.0), part));
            });
        });
        let whole = lanes::over_team(k, THREADS, sum.get(), &|x, y| x + y);
        k.when(k.thread().eq(0), || self.must(Name::Dsinks).store(&[self.zero(), head], AnyVal::of(whole)));
    }

    fn bias(&self) {
        let (k, spec) = (self.k, self.spec);
        let (row, tile) = self.values.row_tiles.split(k.cta());
        let own = self.values.own.index(row);
        let shift = spec.team.ilog2();
        let column = tile * (THREADS >> shift) + (k.thread() >> shift);
        let last = self.values.columns_of_bias - 1;
        let column_here = column.min(last);
        let sum = k.var(self.number(0.0));
        let first = k.thread() & (spec.team - 1);
        k.range_step(first, self.values.repeated, spec.team, |number| {
            let repeat = self.values.repeats.index(number);
            let [b, head, i] = [0, 1, 2].map(|dim| own[dim] + repeat[dim]);
            let j = column_here + repeat[3];
            let lengths = self.lengths(b);
            // Beyond a sequence, which nothing is added of, rows end with those of the tensor.
            let within = |own: Option<Sequence<'k>>, row: Val<'k, u32>| own.map_or(row, |own| row.min(own.rows - 1));
            let row = within(lengths.of_q, lengths.query(i));
            let (query, key) =
                (Place { b, head, s: row }, Place { b, head: self.key_head(head), s: within(lengths.of_kv, lengths.key(j)) });
            let product = self.dots(self.values.d, &[self.line(Name::Q, query)], &self.line(Name::K, key))[0];
            let score = self.score([b, head, i, j], lengths, k.constant(true), product);
            let total = self.must(Name::LogSumExp).load::<T>(&[b, head, row]);
            let product = self.dots(self.values.d_v, &[self.line(Name::Do, query)], &self.line(Name::V, key))[0];
            let product = self.drop_some([b, head, i, j], product);
            let ds = self.gradient(self.probability(&score, total), product, self.row_sum(b, head, row));
            sum.set(sum.get() + if spec.pass.has_slope() { self.through(&score, ds) } else { ds });
        });
        let whole = lanes::over_lanes(k, spec.team, sum.get(), &|x, y| x + y);
        k.when(column.lt(self.values.columns_of_bias) & first.eq(0), || {
            let gradient = if let Pass::Operand(number) = spec.pass { Name::D_SCORE[number as usize] } else { Name::Dbias };
            self.must(gradient).store(&[own[0], own[1], own[2], column], AnyVal::of(whole));
        });
    }
}
