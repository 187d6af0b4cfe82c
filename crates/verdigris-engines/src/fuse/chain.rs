//! A chain ([`verdigris_graph::Chain`]) compiled into a kernel.
//!
//! A [`ChainSpec`] is what shapes code: steps, which views run alike, how they run along the innermost dim, and the size class of offsets.
//! Extents, strides, windows and the numbers of steps are arguments: [`ChainArgs`], which a kernel declares among its parameters as a
//! [`ChainCode`]. At each point it fetches what the chain loads and runs it:
//!
//! ```text
//! let fetched = chain.fetch(&index);                    // loads alone, so that those of several points overlap
//! let values = chain.run(&index, &fetched, &[]);       // functions and stores
//! ```
//!
//! With `vector` above 1 a point stands for so many neighbours along the innermost dim, of which the index names the first.

use serde::{Deserialize, Serialize};
use verdigris_graph::{Chain, ChainStep, RowPlace, Window};
use verdigris_kir::face::{Kernel, Pointer, Val};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Arguments, Parameter};
use verdigris_tensor::{DType, num};

use super::operand::Walk;
use super::steps::{self, Code, InChain, Numbers, OperandWord, Operands, Step, Steps};
use super::value::{AnyVal, HostVal, Raw, load_raw, store_values};
use crate::layout::space::{Access, Memory, Region, element};

/// What a load gives outside of its window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outside {
    /// A fill, which is an argument.
    Fill,
    /// What an earlier load gave.
    Load(u32),
}

/// A view, as far as it shapes code: its element type, which of the chain's paths it runs along, for a load with a window what stands
/// outside, and for a store to a row that a number in memory tells the load of that number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(crate) struct ViewSpec {
    pub dtype: DType,
    pub path: u32,
    pub outside: Option<Outside>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row: Option<u32>,
}

impl ViewSpec {
    /// On the only path, everywhere.
    pub(crate) fn plain(dtype: DType) -> ViewSpec {
        ViewSpec { dtype, path: 0, outside: None, row: None }
    }
}

impl OperandWord for ViewSpec {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn word(&self, written: bool) -> String {
        let ViewSpec { dtype, path, outside, row } = self;
        match (outside, row) {
            (None, Some(length)) => format!("{dtype}s{path}at{length}"),
            (None, None) => format!("{dtype}{}{path}", if written { 's' } else { 'l' }),
            (Some(Outside::Fill), _) => format!("{dtype}w{path}"),
            (Some(Outside::Load(x)), _) => format!("{dtype}w{path}on{x}"),
        }
    }
}

/// The part of a chain that shapes code.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(crate) struct ChainSpec {
    /// Dims of the space.
    pub rank: usize,
    /// Neighbours along the innermost dim that are handled at once: 1, 2, 4 or 8.
    pub vector: u32,
    /// Offsets of elements fit 32 bits.
    pub narrow: bool,
    /// The ways in which views run, each once: how along the innermost dim.
    pub paths: Vec<Walk>,
    /// The numbers of neighbours, by which random ones are drawn, follow each other from a multiple of as many as there are on, four at most.
    #[serde(default)]
    pub in_blocks: bool,
    /// The steps.
    pub steps: Vec<Step<ViewSpec>>,
}

/// The ways in which a chain's views run, each once: strides, and the window of those that have one.
fn paths<'p>(steps: &Steps<InChain<'p>>) -> Vec<(&'p [u64], Option<&'p Window>)> {
    let mut paths = Vec::new();
    for &(view, window, _) in steps.operands() {
        if !paths.contains(&(&view.strides[..], window)) {
            paths.push((&view.strides[..], window));
        }
    }
    paths
}

/// Whether a chain draws random numbers, each for neighbours along the innermost dim whose numbers are neighbours too, from multiples of `block` on.
fn draws_in_blocks(chain: &Chain, dims: &[u64], block: u64) -> bool {
    let mut drawn =
        chain.steps.iter().filter_map(|step| if let ChainStep::Random { strides, .. } = step { Some(strides) } else { None }).peekable();
    let is_in_blocks = |strides: &Vec<u64>| {
        let outer = strides.iter().zip(dims).rev().skip(1).filter(|(_, dim)| **dim > 1);
        strides.last() == Some(&1) && outer.fold(0, |all, (stride, _)| all | stride).is_multiple_of(block)
    };
    drawn.peek().is_some() && drawn.all(is_in_blocks)
}

impl ChainSpec {
    /// Steps of which all that load and store run alike, along neighbouring elements.
    pub(crate) fn plain(rank: usize, vector: u32, steps: Vec<Step<ViewSpec>>) -> ChainSpec {
        ChainSpec { rank, vector, narrow: true, paths: vec![Walk::Row], in_blocks: false, steps }
    }

    /// The spec of a chain over `dims` with vectors of `vector` neighbours, which the strides must allow ([`vectors_fit`]).
    pub(crate) fn of(chain: &Chain, dims: &[u64], vector: u32) -> ChainSpec {
        let steps = Steps::of_chain(chain);
        let paths = paths(&steps);
        let span = |strides: &[u64]| {
            dims.iter().zip(strides).fold(0u64, |span, (dim, &stride)| span.saturating_add(dim.saturating_sub(1).saturating_mul(stride)))
        };
        ChainSpec {
            rank: dims.len(),
            vector,
            narrow: paths.iter().all(|(strides, _)| span(strides) < 1 << 31),
            paths: paths.iter().map(|(strides, _)| Walk::of(strides.last().copied().unwrap_or(0))).collect(),
            in_blocks: vector > 1 && draws_in_blocks(chain, dims, u64::from(vector.min(4))),
            steps: steps.spec(|&(view, window, at)| ViewSpec {
                dtype: view.dtype,
                path: paths.iter().position(|path| *path == (&view.strides[..], window)).map_or(0, |path| path as u32),
                outside: window.map(|window| window.over.map_or(Outside::Fill, Outside::Load)),
                row: at.map(|at| at.length),
            }),
        }
    }

    /// The least chip that has the conversions.
    pub(crate) fn target(&self) -> Target {
        steps::target(&self.steps)
    }

    /// Whether it touches f64.
    pub(crate) fn is_double(&self) -> bool {
        let rounds = |step: &Step<ViewSpec>| matches!(step, Step::Round(DType::F64, _));
        self.steps.iter().any(|step| rounds(step) || step.operand().is_some_and(|(view, _)| view.dtype == DType::F64))
    }

    /// Steps that compute.
    pub(crate) fn functions(&self) -> usize {
        self.steps.iter().filter(|step| step.is_function()).count()
    }

    /// The part of a kernel's name that says all of this.
    pub(crate) fn name(&self) -> String {
        let paths: String = (self.paths.iter())
            .map(|walk| match walk {
                Walk::Row => 'u',
                Walk::PerRow => 'z',
                Walk::Strided => 's',
            })
            .collect();
        let size = if self.narrow { "" } else { "w" };
        let drawn = if self.in_blocks { "b" } else { "" };
        let own = format!("d{}{size}v{}{drawn}{paths}", self.rank, self.vector);
        [own].into_iter().chain(steps::names(&self.steps)).collect::<Vec<_>>().join("_")
    }

    /// The strides of each path that are parameters: whether they are narrow.
    fn strides(&self) -> Vec<Vec<bool>> {
        let count = |walk: Walk| self.rank - usize::from(walk != Walk::Strided && self.rank > 0);
        self.paths.iter().map(|&walk| vec![self.narrow; count(walk)]).collect()
    }

    /// Of the steps that load and store.
    fn views(&self) -> Vec<Option<ViewDecl>> {
        let decl = |(view, written): (&ViewSpec, bool)| {
            let many = if self.paths[view.path as usize] == Walk::Row { self.vector } else { 1 };
            let access = Access { written, bytes: (many * view.dtype.bytes() as u32).min(16) };
            let row = view.row.map(|_| self.rank);
            ViewDecl { access, window: view.outside.map_or(0, |_| self.rank), fill: view.outside == Some(Outside::Fill), row }
        };
        self.steps.iter().map(|step| step.operand().map(decl)).collect()
    }

    fn indices(&self) -> Vec<Option<usize>> {
        self.steps.iter().map(|step| matches!(step, Step::Index | Step::Random(..)).then_some(self.rank)).collect()
    }

    /// What a launch gives for the chain over a part of the space.
    pub(crate) fn args(&self, chain: &Chain, region: &Region) -> ChainArgs {
        let steps = Steps::of_chain(chain);
        let strides = paths(&steps).into_iter().zip(self.strides()).map(|((strides, _), given)| strides[..given.len()].to_vec()).collect();
        let index = |step: &ChainStep| {
            let (ChainStep::Index { strides } | ChainStep::Random { strides, .. }) = step else { return None };
            let first = strides.iter().zip(&region.first).map(|(stride, first)| stride * first).sum();
            Some(IndexArgs { first, strides: strides.clone() })
        };
        ChainArgs {
            strides,
            views: steps.steps.iter().map(|step| step.operand().map(|(operand, _)| view_args(operand, region))).collect(),
            indices: chain.steps.iter().map(index).collect(),
            numbers: steps.numbers,
        }
    }
}

/// A view in a region, and what of its window lies there.
fn view_args(&(view, window, at): &InChain<'_>, region: &Region) -> ViewArgs {
    let row = at.map(|at| row_args(at, region));
    let Some(window) = window else {
        return ViewArgs { memory: element(view, region.first.iter().copied()), window: Vec::new(), fill: None, row };
    };
    let inside: Vec<(u64, u64)> = (0..region.first.len())
        .map(|d| {
            let end = region.first[d] + u64::from(region.extents[d]);
            let low = window.first[d].clamp(region.first[d], end);
            (low, window.end[d].clamp(low, end))
        })
        .collect();
    let empty = inside.iter().any(|(low, high)| low == high);
    let at = inside.iter().zip(&window.first).map(|((low, _), first)| if empty { 0 } else { low - first });
    let bounds = inside.iter().zip(&region.first).map(|((low, high), first)| [low - first, if empty { 0 } else { high - low }]);
    ViewArgs {
        memory: element(view, at),
        window: bounds.map(|bounds| bounds.map(|bound| bound as u32)).collect(),
        fill: window.over.is_none().then(|| bits(view.dtype, window.fill.0)),
        row,
    }
}

/// What tells the row of a store in a region.
fn row_args(at: &RowPlace, region: &Region) -> RowArgs {
    let first: u64 = at.coordinate.iter().zip(&region.first).map(|(stride, first)| stride * first).sum();
    RowArgs { first: first.wrapping_sub(at.rows), strides: at.coordinate.clone(), extent: at.extent, stride: at.stride }
}

/// The bits of a number as an element.
fn bits(dtype: DType, value: f64) -> u64 {
    let mut bytes = [0; 8];
    // Eight bytes hold every element.
    let _ = num::write_element(dtype, value, &mut bytes);
    u64::from_le_bytes(bytes)
}

/// How many neighbours along the innermost dim an access may take: the largest of 8, 4, 2 and 1 that all strides, offsets and windows
/// allow, at most 16 bytes of the narrowest element that is accessed so.
pub(crate) fn vectors_fit(chain: &Chain, dims: &[u64]) -> u32 {
    let Some(&inner) = dims.last() else { return 1 };
    let mut bits = inner | 8;
    let mut narrowest = 8;
    for step in &chain.steps {
        let Some(view) = step.view() else { continue };
        if let Some(at) = step.row_place() {
            // Neighbours of one access are in one row.
            let is_told_alike = chain.steps[at.length as usize].view().is_some_and(|length| length.strides.last() == Some(&0));
            bits |= at.stride | u64::from(at.coordinate.last() != Some(&0) || !is_told_alike);
        }
        if let ChainStep::Load { window: Some(window), .. } = step {
            bits |= window.first.last().copied().unwrap_or(0) | window.end.last().copied().unwrap_or(0);
        }
        if view.strides.last() == Some(&1) {
            narrowest = narrowest.min(view.dtype.bytes());
            bits |= view.offset;
            let outer = view.strides[..dims.len() - 1].iter().zip(dims).filter(|(_, dim)| **dim > 1);
            bits |= outer.fold(0, |bits, (stride, _)| bits | stride);
        }
    }
    (1 << bits.trailing_zeros()).min(16 / narrowest as u32)
}

// ---- the kernel's side -------------------------------------------------------------------------------------------------

/// A stride: 32 bits wide where the spec says narrow.
#[derive(Clone, Copy, Debug)]
enum Stride<'k> {
    Narrow(Val<'k, u32>),
    Wide(Val<'k, u64>),
}

impl Parameter for Stride<'_> {
    type Spec = bool;
    type Value<'k> = Stride<'k>;
    type Argument = u64;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, narrow: &bool) -> Stride<'k> {
        if *narrow { Stride::Narrow(u32::declare(k, name, &())) } else { Stride::Wide(u64::declare(k, name, &())) }
    }

    fn bind(stride: u64, name: &'static str, narrow: &bool, to: &mut Arguments) {
        // A dim of one point may have any stride, which then multiplies 0.
        if *narrow { u32::bind(stride as u32, name, &(), to) } else { u64::bind(stride, name, &(), to) }
    }
}

/// What the parameters of a view are made from.
#[derive(Clone, Copy, Debug)]
struct ViewDecl {
    access: Access,
    /// Dims of its window.
    window: usize,
    fill: bool,
    /// Dims of the space, where a number in memory tells its row.
    row: Option<usize>,
}

verdigris_kir::parameters! {
    /// The parameters of a view.
    #[derive(Clone, Debug)]
    struct ViewValues / #[derive(Debug)] ViewArgs of ViewDecl as decl {
        memory: Memory = decl.access,
        /// First index and extent of each dim.
        window: Vec<[u32; 2]> = vec![(); decl.window],
        /// The bits that stand outside of the window.
        fill: Option<u64> = decl.fill.then_some(()),
        row: Option<RowArgs> = decl.row,
    }
}

verdigris_kir::parameters! {
    /// The row of a store: what is added to the length that tells it, rows that there is room for, and elements from one to the next.
    #[derive(Clone, Debug)]
    struct Row / #[derive(Debug)] RowArgs of usize as rank {
        /// The coordinate at the first point, less the rows that are stored: below 0 wraps.
        first: u64,
        strides: Vec<u64> = vec![(); *rank],
        extent: u64,
        stride: u64,
    }
}

verdigris_kir::parameters! {
    /// A coordinate: its value at the first point, and what each dim adds.
    #[derive(Clone, Debug)]
    struct Index / #[derive(Debug)] IndexArgs of usize as rank {
        first: u64,
        strides: Vec<u64> = vec![(); *rank],
    }
}

/// What a launch gives for a chain ([`ChainSpec::args`]): the kernel declares it as a [`ChainCode`].
#[derive(Debug)]
pub(crate) struct ChainArgs {
    strides: Vec<Vec<u64>>,
    views: Vec<Option<ViewArgs>>,
    indices: Vec<Option<IndexArgs>>,
    numbers: <Numbers as Parameter>::Argument,
}

impl Parameter for ChainArgs {
    type Spec = ChainSpec;
    type Value<'k> = ChainCode<'k>;
    type Argument = ChainArgs;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, _: &'static str, spec: &ChainSpec) -> ChainCode<'k> {
        ChainCode {
            k,
            spec: spec.clone(),
            strides: Vec::<Vec<Stride<'_>>>::declare(k, "stride", &spec.strides()),
            views: Vec::<Option<ViewArgs>>::declare(k, "view", &spec.views()),
            indices: Vec::<Option<IndexArgs>>::declare(k, "index", &spec.indices()),
            numbers: Numbers::declare(k, "number", &steps::numbers(&spec.steps, true)),
        }
    }

    fn bind(chain: ChainArgs, _: &'static str, spec: &ChainSpec, to: &mut Arguments) {
        Vec::<Vec<Stride<'_>>>::bind(chain.strides, "stride", &spec.strides(), to);
        Vec::<Option<ViewArgs>>::bind(chain.views, "view", &spec.views(), to);
        Vec::<Option<IndexArgs>>::bind(chain.indices, "index", &spec.indices(), to);
        Numbers::bind(chain.numbers, "number", &steps::numbers(&spec.steps, true), to);
    }
}

/// A chain in a kernel.
#[derive(Clone, Debug)]
pub(crate) struct ChainCode<'k> {
    k: Kernel<'k>,
    spec: ChainSpec,
    strides: Vec<Vec<Stride<'k>>>,
    /// Of the steps that have one.
    views: Vec<Option<ViewValues<'k>>>,
    indices: Vec<Option<Index<'k>>>,
    numbers: Vec<Vec<HostVal<'k>>>,
}

/// What the loads of a point gave: for each step that is a load, one element or one for each neighbour.
pub(crate) type Fetched<'k> = Vec<Vec<AnyVal<'k>>>;

impl<'k> ChainCode<'k> {
    /// The distance of a point from a view's first element, in elements.
    fn offset(&self, path: u32, index: &[Val<'k, u32>]) -> Stride<'k> {
        let k = self.k;
        let walk = self.spec.paths[path as usize];
        let strides = &self.strides[path as usize];
        let unit = (walk == Walk::Row).then(|| index[self.spec.rank - 1]);
        if self.spec.narrow {
            let first = unit.unwrap_or(k.constant(0));
            Stride::Narrow(strides.iter().zip(index).fold(first, |sum, (stride, &i)| match stride {
                Stride::Narrow(stride) => sum + i * *stride,
                Stride::Wide(stride) => sum + i * stride.low32(),
            }))
        } else {
            let first = unit.map_or(k.constant(0), |unit| unit.widen());
            Stride::Wide(strides.iter().zip(index).fold(first, |sum, (stride, &i)| match stride {
                Stride::Narrow(stride) => sum + i.mul_wide(*stride),
                Stride::Wide(stride) => sum + i.widen() * *stride,
            }))
        }
    }

    fn address(&self, pointer: Pointer<'k>, offset: Stride<'k>, bytes: u32) -> Val<'k, u64> {
        match offset {
            Stride::Narrow(offset) => pointer.at(offset, bytes),
            Stride::Wide(offset) => pointer.address() + (offset << bytes.trailing_zeros()),
        }
    }

    /// Where the neighbours of a point lie: their addresses, all of them or the first.
    fn places(&self, pointer: Pointer<'k>, path: u32, index: &[Val<'k, u32>], dtype: DType) -> Vec<Val<'k, u64>> {
        let bytes = dtype.bytes() as u32;
        let mut places = vec![self.address(pointer, self.offset(path, index), bytes)];
        if self.spec.paths[path as usize] == Walk::Strided {
            for lane in 1..self.spec.vector as usize {
                places.push(match self.strides[path as usize].last() {
                    Some(Stride::Narrow(stride)) => places[lane - 1] + stride.mul_wide(bytes),
                    Some(Stride::Wide(stride)) => places[lane - 1] + (*stride << bytes.trailing_zeros()),
                    None => places[0],
                });
            }
        }
        places
    }

    /// Loads what the chain reads at a point.
    #[track_caller]
    pub(crate) fn fetch(&self, index: &[Val<'k, u32>]) -> Fetched<'k> {
        self.fetch_but(index, &[])
    }

    /// The same without some steps, which the caller fills in.
    #[track_caller]
    pub(crate) fn fetch_but(&self, index: &[Val<'k, u32>], without: &[usize]) -> Fetched<'k> {
        let k = self.k;
        let at = std::panic::Location::caller();
        k.scope(at, || {
            let mut fetched: Fetched<'k> = Vec::with_capacity(self.views.len());
            for (i, (step, values)) in self.spec.steps.iter().zip(&self.views).enumerate() {
                let next = match (step, values) {
                    (Step::Load(view), Some(values)) if !without.contains(&i) => match view.outside {
                        None => self.load(view, &self.places(values.memory, view.path, index, view.dtype)),
                        Some(outside) => {
                            let inner: Vec<Val<'k, u32>> = index.iter().zip(&values.window).map(|(&i, [first, _])| i - *first).collect();
                            let holds = inner.iter().zip(&values.window).map(|(&i, [_, extent])| i.lt(*extent));
                            let holds = holds.reduce(|all, one| all & one).unwrap_or(k.constant(true));
                            let outside = match (outside, values.fill) {
                                (Outside::Load(x), _) => fetched[x as usize].clone(),
                                (Outside::Fill, fill) => {
                                    let fill = fill.expect("a window that fills has what it fills with");
                                    vec![self.raw_of(view.dtype, fill.low32(), (fill >> 32).low32())]
                                }
                            };
                            self.load_windowed(view, values.memory, &inner, holds, &outside)
                        }
                    },
                    _ => Vec::new(),
                };
                fetched.push(next);
            }
            fetched
        })
    }

    fn load(&self, view: &ViewSpec, places: &[Val<'k, u64>]) -> Vec<AnyVal<'k>> {
        let many = if self.spec.paths[view.path as usize] == Walk::Row { self.spec.vector } else { 1 };
        let raws = places.iter().flat_map(|&place| load_raw(self.k, view.dtype, place, many));
        raws.map(|raw| AnyVal::Stored(view.dtype, raw)).collect()
    }

    /// Loads inside of a window; `outside`: what stands elsewhere, one for all neighbours or one for each.
    fn load_windowed(
        &self,
        view: &ViewSpec,
        pointer: Pointer<'k>,
        index: &[Val<'k, u32>],
        holds: Val<'k, bool>,
        outside: &[AnyVal<'k>],
    ) -> Vec<AnyVal<'k>> {
        let k = self.k;
        let repeats = self.spec.paths[view.path as usize] == Walk::PerRow && outside.len() == 1;
        let count = if repeats { 1 } else { self.spec.vector as usize };
        let halves = |value: &AnyVal<'k>| match *value {
            AnyVal::Stored(_, Raw::B8(bits) | Raw::B32(bits)) => (bits, None),
            AnyVal::Stored(_, Raw::B16(bits)) => (bits.convert::<u32>(CvtRound::None), None),
            AnyVal::Stored(_, Raw::B64(bits)) => {
                let (low, high) = k.split32(bits);
                (low, Some(high))
            }
            // Loads give what is stored.
            _ => (k.constant(0), None),
        };
        let lane_of = |values: &[AnyVal<'k>], lane: usize| halves(&values[lane.min(values.len() - 1)]);
        let elements: Vec<_> = (0..count)
            .map(|lane| {
                let (low, high) = lane_of(outside, lane);
                (k.var(low), high.map(|high| k.var(high)))
            })
            .collect();
        k.when(holds, || {
            let loaded = self.load(view, &self.places(pointer, view.path, index, view.dtype));
            for (lane, (low, high)) in elements.iter().enumerate() {
                let (below, above) = lane_of(&loaded, lane);
                low.set(below);
                if let (Some(high), Some(above)) = (high, above) {
                    high.set(above);
                }
            }
        });
        elements
            .iter()
            .map(|(low, high)| self.raw_of(view.dtype, low.get(), high.as_ref().map_or(k.constant(0), |high| high.get())))
            .collect()
    }

    /// An element of its low and high 32 bits.
    fn raw_of(&self, dtype: DType, low: Val<'k, u32>, high: Val<'k, u32>) -> AnyVal<'k> {
        let raw = match dtype.bytes() {
            1 => Raw::B8(low),
            2 => Raw::B16(low.low16()),
            4 => Raw::B32(low),
            _ => Raw::B64(self.k.join32(low, high)),
        };
        AnyVal::Stored(dtype, raw)
    }

    /// Runs the chain at a point: functions and stores. Returns the value of each step, for each neighbour.
    #[track_caller]
    pub(crate) fn run(&self, index: &[Val<'k, u32>], fetched: &Fetched<'k>, given: &[AnyVal<'k>]) -> Vec<Vec<AnyVal<'k>>> {
        let code = Code { steps: &self.spec.steps, numbers: &self.numbers, computed: None, lanes: self.spec.vector as usize };
        self.k.scope(std::panic::Location::caller(), || code.run(self.k, given, &AtPoint { chain: self, index, fetched }))
    }

    /// The address of an element of a load at a point, for kernels that load by themselves.
    pub(crate) fn load_address(&self, step: usize, index: &[Val<'k, u32>]) -> Option<(DType, Val<'k, u64>)> {
        match (&self.spec.steps[step], &self.views[step]) {
            (Step::Load(ViewSpec { dtype, path, outside: None, .. }), Some(values)) => {
                Some((*dtype, self.address(values.memory, self.offset(*path, index), dtype.bytes() as u32)))
            }
            _ => None,
        }
    }
}

/// A chain's operands at a point.
struct AtPoint<'p, 'k> {
    chain: &'p ChainCode<'k>,
    index: &'p [Val<'k, u32>],
    fetched: &'p Fetched<'k>,
}

impl<'k> Operands<'k, ViewSpec> for AtPoint<'_, 'k> {
    fn load(&self, step: usize, _: &ViewSpec) -> Vec<AnyVal<'k>> {
        self.fetched[step].clone()
    }

    fn word(&self, step: usize, _: u32) -> AnyVal<'k> {
        unreachable!("step {step}: a chain loads the words of a state as elements")
    }

    fn index(&self, step: usize) -> Vec<AnyVal<'k>> {
        let Index { first, strides } = self.chain.indices[step].as_ref().expect("a coordinate has strides");
        let at = self.index.iter().zip(strides).fold(*first, |sum, (&i, &stride)| sum + i.widen() * stride);
        let lane = |lane: u32| match strides.last() {
            Some(&stride) if lane > 0 => at + stride * u64::from(lane),
            _ => at,
        };
        (0..self.chain.spec.vector).map(|i| AnyVal::I64(lane(i).bitcast())).collect()
    }

    fn in_blocks(&self, _: usize) -> bool {
        self.chain.spec.in_blocks
    }

    fn store(&self, step: usize, to: &ViewSpec, values: &[AnyVal<'k>]) {
        let (k, spec) = (self.chain.k, &self.chain.spec);
        let view = self.chain.views[step].as_ref().expect("a store has memory");
        let store_at = |places: Vec<Val<'k, u64>>| {
            if spec.paths[to.path as usize] == Walk::Row {
                store_values(k, to.dtype, places[0], values);
            } else {
                places.iter().zip(values).for_each(|(&place, value)| store_values(k, to.dtype, place, &[*value]));
            }
        };
        let places = self.chain.places(view.memory, to.path, self.index, to.dtype);
        let (Some(row), Some(length)) = (&view.row, to.row) else { return store_at(places) };
        let length = match self.fetched[length as usize][0] {
            AnyVal::Stored(DType::I32, Raw::B32(bits)) => bits.signed().widen().unsigned(),
            other => unreachable!("a length is loaded as i32, not {other:?}"),
        };
        let place = self.index.iter().zip(&row.strides).fold(length + row.first, |sum, (&i, &stride)| sum + i.widen() * stride);
        // One below 0 has wrapped, and is above every extent.
        k.when(place.lt(row.extent), || {
            let bytes = (place * row.stride) << (to.dtype.bytes() as u32).trailing_zeros();
            store_at(places.iter().map(|&address| address + bytes).collect());
        });
    }
}
