//! A chain ([`verdigris_graph::Chain`]) compiled into a kernel.
//!
//! A [`ChainSpec`] is what shapes code: steps, element types, which views run alike, how they run along the innermost dim, and the size
//! class of offsets. Extents, strides, windows, factors and attributes are arguments: [`ChainArgs`], which a kernel declares among its
//! parameters as a [`ChainCode`]. At each point it fetches what the chain loads and runs it:
//!
//! ```text
//! let fetched = chain.fetch(&index);                    // loads alone, so that those of several points overlap
//! let values = chain.run(&index, &fetched, None);       // functions and stores
//! ```
//!
//! With `vector` above 1 a point stands for so many neighbours along the innermost dim, of which the index names the first.

use serde::{Deserialize, Serialize};
use verdigris_graph::{BinaryOp, Chain, ChainStep, HostScalar, TernaryOp, UnaryOp, Window};
use verdigris_kir::face::{Kernel, Pointer, Val};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Arguments, AtExecution, HostNumber, Parameter};
use verdigris_tensor::{DType, num};

use super::compute;
use super::steps::{self, AnyVal, Raw, load_raw, store_raw};
use crate::layout::space::{Access, Memory, Region, element};

/// How a view runs along the innermost dim.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Walk {
    /// Neighbours are neighbouring elements.
    Unit,
    /// One element serves all.
    Zero,
    /// By a stride.
    Strided,
}

/// What a load gives outside of its window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outside {
    /// A fill, which is an argument.
    Fill,
    /// What an earlier load gave.
    Load(u32),
}

/// One step, as far as it shapes code. `path` numbers the ways in which views run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StepSpec {
    /// A load; one with a window has something else to give outside.
    Load { dtype: DType, path: u32, outside: Option<Outside> },
    /// What is handed to the chain.
    Given,
    /// A factor, fixed or given at execution; it takes the type of what it meets.
    Scalar,
    /// A coordinate.
    Index,
    /// Attributes are arguments, so they are 0 here.
    Unary(UnaryOp, u32),
    /// Likewise.
    Binary(BinaryOp, u32, u32),
    /// A function of three.
    Ternary(TernaryOp, u32, u32, u32),
    /// Rounding.
    Round(DType, u32),
    /// A store.
    Store { dtype: DType, path: u32, x: u32 },
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
    /// How each way runs along the innermost dim.
    pub paths: Vec<Walk>,
    /// The steps.
    pub steps: Vec<StepSpec>,
}

/// The ways in which a chain's views run, each once: strides, and the window of those that have one.
fn paths(chain: &Chain) -> Vec<(&[u64], Option<&Window>)> {
    let mut paths: Vec<(&[u64], Option<&Window>)> = Vec::new();
    for step in &chain.steps {
        if let Some(path) = path_of(step)
            && !paths.contains(&path)
        {
            paths.push(path);
        }
    }
    paths
}

fn path_of(step: &ChainStep) -> Option<(&[u64], Option<&Window>)> {
    match step {
        ChainStep::Load { from, window } => Some((&from.strides, window.as_ref())),
        ChainStep::Store { to, .. } => Some((&to.strides, None)),
        _ => None,
    }
}

impl ChainSpec {
    /// The spec of a chain over `dims` with vectors of `vector` neighbours, which the strides must allow ([`vectors_fit`]).
    pub(crate) fn of(chain: &Chain, dims: &[u64], vector: u32) -> ChainSpec {
        let ways = paths(chain);
        let place =
            |step: &ChainStep| path_of(step).and_then(|path| ways.iter().position(|way| *way == path)).map_or(0, |place| place as u32);
        let steps = chain.steps.iter().map(|step| match *step {
            ChainStep::Load { ref from, ref window } => {
                let outside = window.as_ref().map(|window| window.over.map_or(Outside::Fill, Outside::Load));
                StepSpec::Load { dtype: from.dtype, path: place(step), outside }
            }
            ChainStep::Given => StepSpec::Given,
            ChainStep::Scalar(_) => StepSpec::Scalar,
            ChainStep::Index { .. } => StepSpec::Index,
            ChainStep::Unary { f, x } => StepSpec::Unary(steps::without_attributes(f), x),
            ChainStep::Binary { f, x, z } => {
                let f = if let BinaryOp::Backward(f) = f { BinaryOp::Backward(steps::without_attributes(f)) } else { f };
                StepSpec::Binary(f, x, z)
            }
            ChainStep::Ternary { f, x, z, t } => StepSpec::Ternary(f, x, z, t),
            ChainStep::Round { dtype, x } => StepSpec::Round(dtype, x),
            ChainStep::Store { x, ref to } => StepSpec::Store { dtype: to.dtype, path: place(step), x },
        });
        let walk = |strides: &[u64]| match strides.last() {
            Some(1) => Walk::Unit,
            Some(0) | None => Walk::Zero,
            Some(_) => Walk::Strided,
        };
        let span = |strides: &[u64]| {
            dims.iter().zip(strides).fold(0u64, |span, (dim, &stride)| span.saturating_add(dim.saturating_sub(1).saturating_mul(stride)))
        };
        ChainSpec {
            rank: dims.len(),
            vector,
            narrow: ways.iter().all(|(strides, _)| span(strides) < 1 << 31),
            paths: ways.iter().map(|(strides, _)| walk(strides)).collect(),
            steps: steps.collect(),
        }
    }

    /// The least chip that has the conversions.
    pub(crate) fn target(&self) -> Target {
        let types = self.steps.iter().filter_map(|step| match *step {
            StepSpec::Load { dtype, .. } | StepSpec::Round(dtype, _) | StepSpec::Store { dtype, .. } => Some(compute::target_of(dtype)),
            _ => None,
        });
        types.max().unwrap_or(Target::Sm80)
    }

    /// Steps that compute.
    pub(crate) fn functions(&self) -> usize {
        let computes = |step: &&StepSpec| matches!(step, StepSpec::Unary(..) | StepSpec::Binary(..) | StepSpec::Ternary(..));
        self.steps.iter().filter(computes).count()
    }

    /// The part of a kernel's name that says all of this.
    pub(crate) fn name(&self) -> String {
        let paths: String = (self.paths.iter())
            .map(|walk| match walk {
                Walk::Unit => 'u',
                Walk::Zero => 'z',
                Walk::Strided => 's',
            })
            .collect();
        let size = if self.narrow { "" } else { "w" };
        let mut words = vec![format!("d{}{size}v{}{paths}", self.rank, self.vector)];
        words.extend(self.steps.iter().map(|step| match *step {
            StepSpec::Load { dtype, path, outside } => match outside {
                None => format!("{dtype}l{path}"),
                Some(Outside::Fill) => format!("{dtype}w{path}"),
                Some(Outside::Load(x)) => format!("{dtype}w{path}on{x}"),
            },
            StepSpec::Given => "given".to_owned(),
            StepSpec::Scalar => "factor".to_owned(),
            StepSpec::Index => "index".to_owned(),
            StepSpec::Unary(f, x) => format!("{}{x}", f.name()),
            StepSpec::Binary(BinaryOp::Backward(f), x, z) => format!("d{}{x}_{z}", f.name()),
            StepSpec::Binary(f, x, z) => format!("{}{x}_{z}", f.name()),
            StepSpec::Ternary(f, x, z, t) => format!("{}{x}_{z}_{t}", f.name()),
            StepSpec::Round(dtype, x) => format!("to{dtype}{x}"),
            StepSpec::Store { dtype, path, x } => format!("{dtype}s{path}of{x}"),
        }));
        words.join("_")
    }

    /// What a load or a store does with memory, and the bytes of one access.
    fn access(&self, step: &StepSpec) -> Option<Access> {
        let (dtype, path, written) = match *step {
            StepSpec::Load { dtype, path, .. } => (dtype, path, false),
            StepSpec::Store { dtype, path, .. } => (dtype, path, true),
            _ => return None,
        };
        let many = if self.paths[path as usize] == Walk::Unit { self.vector } else { 1 };
        Some(Access { written, bytes: (many * dtype.bytes() as u32).min(16) })
    }

    /// The strides of each path that are parameters: whether they are narrow.
    fn strides(&self) -> Vec<Vec<bool>> {
        let count = |walk: Walk| self.rank - usize::from(walk != Walk::Strided && self.rank > 0);
        self.paths.iter().map(|&walk| vec![self.narrow; count(walk)]).collect()
    }

    fn shapes(&self) -> Vec<StepShape> {
        let shape = |step: &StepSpec| {
            let (window, fill) = match *step {
                StepSpec::Load { outside: Some(outside), .. } => (self.rank, outside == Outside::Fill),
                _ => (0, false),
            };
            let attributes = match *step {
                StepSpec::Unary(f, _) => steps::attributes(f).len(),
                StepSpec::Binary(f, ..) => steps::binary_attributes(f).len(),
                _ => 0,
            };
            let index = (*step == StepSpec::Index).then_some(self.rank);
            StepShape { memory: self.access(step), window, fill, factor: *step == StepSpec::Scalar, index, attributes }
        };
        self.steps.iter().map(shape).collect()
    }

    /// What a launch gives for the chain over a part of the space.
    pub(crate) fn args(&self, chain: &Chain, region: &Region) -> ChainArgs {
        let strides = paths(chain).into_iter().zip(self.strides()).map(|((strides, _), given)| strides[..given.len()].to_vec()).collect();
        let steps = chain.steps.iter().map(|step| match step {
            ChainStep::Load { from, window: Some(window) } => {
                let inside: Vec<(u64, u64)> = (0..self.rank)
                    .map(|d| {
                        let end = region.first[d] + u64::from(region.extents[d]);
                        let low = window.first[d].clamp(region.first[d], end);
                        (low, window.end[d].clamp(low, end))
                    })
                    .collect();
                let empty = inside.iter().any(|(low, high)| low == high);
                let at = inside.iter().zip(&window.first).map(|((low, _), first)| if empty { 0 } else { low - first });
                let bounds = inside.iter().zip(&region.first).map(|((low, high), first)| [low - first, if empty { 0 } else { high - low }]);
                StepArgs {
                    memory: Some(element(from, at)),
                    window: bounds.map(|bounds| bounds.map(|bound| bound as u32)).collect(),
                    fill: window.over.is_none().then(|| bits(from.dtype, window.fill.0)),
                    ..StepArgs::default()
                }
            }
            ChainStep::Load { from: view, window: None } | ChainStep::Store { to: view, .. } => {
                StepArgs { memory: Some(element(view, region.first.iter().copied())), ..StepArgs::default() }
            }
            ChainStep::Scalar(factor) => {
                let factor = match *factor {
                    HostScalar::Bound(slot) => HostNumber::Bound(slot.0 as usize),
                    HostScalar::Fixed(value) => HostNumber::Fixed(value.0),
                };
                StepArgs { factor: Some(factor), ..StepArgs::default() }
            }
            ChainStep::Index { strides } => {
                let first = strides.iter().zip(&region.first).map(|(stride, first)| stride * first).sum();
                StepArgs { index: Some(IndexArgs { first, strides: strides.clone() }), ..StepArgs::default() }
            }
            ChainStep::Unary { f, .. } => StepArgs { attributes: steps::attributes(*f), ..StepArgs::default() },
            ChainStep::Binary { f, .. } => StepArgs { attributes: steps::binary_attributes(*f), ..StepArgs::default() },
            ChainStep::Given | ChainStep::Ternary { .. } | ChainStep::Round { .. } => StepArgs::default(),
        });
        ChainArgs { strides, steps: steps.collect() }
    }
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

/// Which parameters a step has.
#[derive(Clone, Copy, Debug)]
struct StepShape {
    memory: Option<Access>,
    /// Dims of its window.
    window: usize,
    fill: bool,
    factor: bool,
    /// Dims of a coordinate.
    index: Option<usize>,
    attributes: usize,
}

verdigris_kir::parameters! {
    /// A coordinate: its value at the first point, and what each dim adds.
    #[derive(Clone, Debug)]
    struct Index / #[derive(Debug)] IndexArgs of usize as rank {
        first: u64,
        strides: Vec<u64> = vec![(); *rank],
    }
}

verdigris_kir::parameters! {
    /// The parameters of a step.
    #[derive(Clone, Debug)]
    struct Step / #[derive(Debug, Default)] StepArgs of StepShape as shape {
        memory: Option<Memory> = shape.memory,
        /// First index and extent of each dim.
        window: Vec<[u32; 2]> = vec![(); shape.window],
        /// The bits that stand outside of the window.
        fill: Option<u64> = shape.fill.then_some(()),
        factor: Option<AtExecution<f64>> = shape.factor.then_some(()),
        index: Option<IndexArgs> = shape.index,
        attributes: Vec<f64> = vec![(); shape.attributes],
    }
}

/// What a launch gives for a chain ([`ChainSpec::args`]): the kernel declares it as a [`ChainCode`].
#[derive(Debug)]
pub(crate) struct ChainArgs {
    strides: Vec<Vec<u64>>,
    steps: Vec<StepArgs>,
}

impl Parameter for ChainArgs {
    type Spec = ChainSpec;
    type Value<'k> = ChainCode<'k>;
    type Argument = ChainArgs;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, _: &'static str, spec: &ChainSpec) -> ChainCode<'k> {
        let strides = Vec::<Vec<Stride<'_>>>::declare(k, "stride", &spec.strides());
        ChainCode { k, spec: spec.clone(), strides, steps: Vec::<StepArgs>::declare(k, "step", &spec.shapes()) }
    }

    fn bind(chain: ChainArgs, _: &'static str, spec: &ChainSpec, to: &mut Arguments) {
        Vec::<Vec<Stride<'_>>>::bind(chain.strides, "stride", &spec.strides(), to);
        Vec::<StepArgs>::bind(chain.steps, "step", &spec.shapes(), to);
    }
}

/// A chain in a kernel.
#[derive(Clone, Debug)]
pub(crate) struct ChainCode<'k> {
    k: Kernel<'k>,
    spec: ChainSpec,
    strides: Vec<Vec<Stride<'k>>>,
    steps: Vec<Step<'k>>,
}

/// What the loads of a point gave: for each step that is a load, one element or one for each neighbour.
pub(crate) type Fetched<'k> = Vec<Vec<AnyVal<'k>>>;

impl<'k> ChainCode<'k> {
    /// The distance of a point from a view's first element, in elements.
    fn offset(&self, path: usize, index: &[Val<'k, u32>]) -> Stride<'k> {
        let k = self.k;
        let walk = self.spec.paths[path];
        let strides = &self.strides[path];
        let unit = (walk == Walk::Unit).then(|| index[self.spec.rank - 1]);
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
    fn places(&self, pointer: Pointer<'k>, path: usize, index: &[Val<'k, u32>], bytes: u32) -> Vec<Val<'k, u64>> {
        let first = self.address(pointer, self.offset(path, index), bytes);
        if self.spec.paths[path] != Walk::Strided {
            return vec![first];
        }
        let mut places = vec![first];
        for _ in 1..self.spec.vector {
            let next = match self.strides[path].last() {
                Some(Stride::Narrow(stride)) => places[places.len() - 1] + stride.mul_wide(bytes),
                Some(Stride::Wide(stride)) => places[places.len() - 1] + (*stride << bytes.trailing_zeros()),
                None => first,
            };
            places.push(next);
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
            let mut fetched: Fetched<'k> = Vec::with_capacity(self.steps.len());
            for (i, (spec, step)) in self.spec.steps.iter().zip(&self.steps).enumerate() {
                let next = match (*spec, step.memory) {
                    (StepSpec::Load { dtype, path, outside }, Some(pointer)) if !without.contains(&i) => {
                        let path = path as usize;
                        match outside {
                            None => self.load(dtype, path, &self.places(pointer, path, index, dtype.bytes() as u32)),
                            Some(outside) => {
                                let inner: Vec<Val<'k, u32>> = index.iter().zip(&step.window).map(|(&i, [first, _])| i - *first).collect();
                                let holds = inner.iter().zip(&step.window).map(|(&i, [_, extent])| i.lt(*extent));
                                let holds = holds.reduce(|all, one| all & one).unwrap_or(k.constant(true));
                                let outside = match (outside, step.fill) {
                                    (Outside::Load(x), _) => fetched[x as usize].clone(),
                                    (Outside::Fill, fill) => {
                                        let fill = fill.expect("a window that fills has what it fills with");
                                        vec![self.raw_of(dtype, fill.low32(), (fill >> 32).low32())]
                                    }
                                };
                                self.load_windowed(dtype, path, pointer, &inner, holds, &outside)
                            }
                        }
                    }
                    _ => Vec::new(),
                };
                fetched.push(next);
            }
            fetched
        })
    }

    fn load(&self, dtype: DType, path: usize, places: &[Val<'k, u64>]) -> Vec<AnyVal<'k>> {
        let many = if self.spec.paths[path] == Walk::Unit { self.spec.vector } else { 1 };
        let raws = places.iter().flat_map(|&place| load_raw(self.k, dtype, place, many));
        raws.map(|raw| AnyVal::Stored(dtype, raw)).collect()
    }

    /// Loads inside of a window; `outside`: what stands elsewhere, one for all neighbours or one for each.
    fn load_windowed(
        &self,
        dtype: DType,
        path: usize,
        pointer: Pointer<'k>,
        index: &[Val<'k, u32>],
        holds: Val<'k, bool>,
        outside: &[AnyVal<'k>],
    ) -> Vec<AnyVal<'k>> {
        let k = self.k;
        let repeats = self.spec.paths[path] == Walk::Zero && outside.len() == 1;
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
            let places = self.places(pointer, path, index, dtype.bytes() as u32);
            let loaded = self.load(dtype, path, &places);
            for (lane, (low, high)) in elements.iter().enumerate() {
                let (below, above) = lane_of(&loaded, lane);
                low.set(below);
                if let (Some(high), Some(above)) = (high, above) {
                    high.set(above);
                }
            }
        });
        elements.iter().map(|(low, high)| self.raw_of(dtype, low.get(), high.as_ref().map_or(k.constant(0), |high| high.get()))).collect()
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
        let k = self.k;
        let at = std::panic::Location::caller();
        k.scope(at, || {
            let lanes = self.spec.vector as usize;
            let mut values: Vec<Vec<AnyVal<'k>>> = Vec::with_capacity(self.steps.len());
            for (i, (spec, step)) in self.spec.steps.iter().zip(&self.steps).enumerate() {
                let of = |x: u32, lane: usize| -> AnyVal<'k> {
                    let all = &values[x as usize];
                    all[lane.min(all.len() - 1)]
                };
                let doubled =
                    |operands: &[u32]| operands.iter().any(|&x| matches!(of(x, 0), AnyVal::F64(_) | AnyVal::Stored(DType::F64, _)));
                // A factor takes the type of what it meets.
                let operand = |x: u32, lane: usize, all: &[u32]| match self.steps[x as usize].factor {
                    Some(factor) => {
                        let others: Vec<u32> = all.iter().copied().filter(|&other| self.steps[other as usize].factor.is_none()).collect();
                        if doubled(&others) { AnyVal::F64(factor) } else { AnyVal::F32(factor.convert(CvtRound::Nearest)) }
                    }
                    None => of(x, lane),
                };
                let each = |f: &dyn Fn(usize) -> AnyVal<'k>| (0..lanes).map(f).collect::<Vec<_>>();
                let next = match *spec {
                    StepSpec::Load { .. } => fetched[i].clone(),
                    StepSpec::Given => given.to_vec(),
                    StepSpec::Scalar => step.factor.map(AnyVal::F64).into_iter().collect(),
                    StepSpec::Index => {
                        let Index { first, strides } = step.index.as_ref().expect("a coordinate has strides");
                        let at = index.iter().zip(strides).fold(*first, |sum, (&i, &stride)| sum + i.widen() * stride);
                        each(&|lane| {
                            let here = match (lane, strides.last()) {
                                (0, _) | (_, None) => at,
                                (lane, Some(&stride)) => at + stride * (lane as u64),
                            };
                            AnyVal::I64(here.bitcast())
                        })
                    }
                    StepSpec::Unary(f, x) => each(&|lane| steps::unary(k, f, operand(x, lane, &[x]), &step.attributes)),
                    StepSpec::Binary(f, x, z) => {
                        let all = [x, z];
                        each(&|lane| steps::binary(k, f, operand(x, lane, &all), operand(z, lane, &all), &step.attributes))
                    }
                    StepSpec::Ternary(f, x, z, t) => {
                        let all = [x, z, t];
                        each(&|lane| steps::ternary(k, f, operand(x, lane, &all), operand(z, lane, &all), operand(t, lane, &all)))
                    }
                    StepSpec::Round(dtype, x) => each(&|lane| operand(x, lane, &[x]).rounded(k, dtype)),
                    StepSpec::Store { dtype, path, x } => {
                        let pointer = step.memory.expect("a store has memory");
                        let raws: Vec<Raw<'k>> = (0..lanes).map(|lane| operand(x, lane, &[x]).encoded(k, dtype)).collect();
                        let places = self.places(pointer, path as usize, index, dtype.bytes() as u32);
                        if self.spec.paths[path as usize] == Walk::Unit {
                            store_raw(k, places[0], &raws);
                        } else {
                            places.iter().zip(&raws).for_each(|(&place, raw)| store_raw(k, place, &[*raw]));
                        }
                        Vec::new()
                    }
                };
                values.push(next);
            }
            values
        })
    }

    /// The address of an element of a load at a point, for kernels that load by themselves.
    pub(crate) fn load_address(&self, step: usize, index: &[Val<'k, u32>]) -> Option<(DType, Val<'k, u64>)> {
        match (self.spec.steps[step], self.steps[step].memory) {
            (StepSpec::Load { dtype, path, outside: None }, Some(pointer)) => {
                Some((dtype, self.address(pointer, self.offset(path as usize, index), dtype.bytes() as u32)))
            }
            _ => None,
        }
    }
}
