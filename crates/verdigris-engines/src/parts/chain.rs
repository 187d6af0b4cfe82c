//! A chain ([`verdigris_graph::Chain`]) compiled into a kernel.
//!
//! A [`ChainSpec`] is what shapes code: steps, element types, which views run alike, how they run along the innermost dim, and the size class of
//! offsets. Extents, strides, windows, factors and attributes are arguments, in the order of [`ChainSpec::args`]. A kernel declares the chain
//! once, then at each point fetches what it loads and runs it:
//!
//! ```text
//! let chain = spec.declare(k);
//! let fetched = chain.fetch(&index);                    // loads alone, so that those of several points overlap
//! let values = chain.run(&index, &fetched, None);       // functions and stores
//! ```
//!
//! With `vector` above 1 a point stands for so many neighbours along the innermost dim, of which the index names the first.

use serde::{Deserialize, Serialize};
use verdigris_graph::{BinaryOp, Chain, ChainStep, HostScalar, TernaryOp, UnaryOp, View, Window};
use verdigris_kir::face::{Kernel, Pointer, Val};
use verdigris_kir::inst::Cache;
use verdigris_kir::ir::{Target, Ty};
use verdigris_kir::program::{Address, Arg, Base};
use verdigris_tensor::{DType, num};

use super::compute;
use super::steps::{self, AnyVal, Raw};

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

/// A part of a space that one launch covers: its first point and its extents.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Region {
    /// The first index of each dim.
    pub first: Vec<u64>,
    /// Extents.
    pub extents: Vec<u32>,
}

impl Region {
    /// Cuts a space into parts of at most 2^30 points, if a vector of neighbours along the innermost dim counts as one.
    pub(crate) fn all(dims: &[u64], vector: u32) -> Vec<Region> {
        const POINTS: u64 = 1 << 30;
        if dims.contains(&0) {
            return Vec::new();
        }
        let mut sizes = vec![1; dims.len()];
        let mut room = POINTS;
        for (i, (size, &extent)) in sizes.iter_mut().zip(dims).enumerate().rev() {
            let unit = if i + 1 == dims.len() { u64::from(vector) } else { 1 };
            *size = extent.min((room * unit).min(1 << 31)).max(1);
            room = (room / size.div_ceil(unit)).max(1);
        }
        let mut regions = vec![Region { first: Vec::new(), extents: Vec::new() }];
        for (&extent, &size) in dims.iter().zip(&sizes) {
            regions = regions
                .into_iter()
                .flat_map(|region| {
                    (0..extent.div_ceil(size)).map(move |i| {
                        let mut next = region.clone();
                        next.first.push(i * size);
                        next.extents.push(size.min(extent - i * size) as u32);
                        next
                    })
                })
                .collect();
        }
        regions
    }

    /// Points, a vector of neighbours counting as one.
    pub(crate) fn points(&self, vector: u32) -> u32 {
        let inner = self.extents.last().map_or(1, |extent| extent.div_ceil(vector));
        self.extents.iter().rev().skip(1).product::<u32>() * inner
    }
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

    /// Bytes that one access of a view takes, which its buffer must be aligned to.
    fn access_bytes(&self, dtype: DType, path: u32) -> u32 {
        let many = if self.paths[path as usize] == Walk::Unit { self.vector } else { 1 };
        (many * dtype.bytes() as u32).min(16)
    }

    /// The alignment in bytes that the chain relies on, by slot.
    pub(crate) fn alignments<'a>(&'a self, chain: &'a Chain) -> impl Iterator<Item = (u32, u64)> + 'a {
        self.steps.iter().zip(&chain.steps).filter_map(|(spec, step)| match (spec, step.view()) {
            (StepSpec::Load { dtype, path, .. } | StepSpec::Store { dtype, path, .. }, Some(view)) => {
                Some((view.slot.0, u64::from(self.access_bytes(*dtype, *path))))
            }
            _ => None,
        })
    }

    // ---- arguments -----------------------------------------------------------------------------------------------------

    /// The arguments of [`ChainSpec::declare`] for a part of the space.
    pub(crate) fn args(&self, chain: &Chain, region: &Region) -> Vec<Arg> {
        let mut args = Vec::new();
        for ((strides, _), walk) in paths(chain).into_iter().zip(&self.paths) {
            let count = self.strides_of(*walk);
            args.extend(
                strides[..count]
                    .iter()
                    .map(|&stride| if self.narrow { Arg::Scalar(Ty::U32, stride & 0xffff_ffff) } else { Arg::Scalar(Ty::U64, stride) }),
            );
        }
        for (spec, step) in self.steps.iter().zip(&chain.steps) {
            match (spec, step) {
                (StepSpec::Load { dtype, .. }, ChainStep::Load { from, window: Some(window) }) => {
                    let inside: Vec<(u64, u64)> = (0..self.rank)
                        .map(|d| {
                            let end = region.first[d] + u64::from(region.extents[d]);
                            let low = window.first[d].clamp(region.first[d], end);
                            (low, window.end[d].clamp(low, end))
                        })
                        .collect();
                    let empty = inside.iter().any(|(low, high)| low == high);
                    let at = inside.iter().zip(&window.first).map(|((low, _), first)| if empty { 0 } else { low - first });
                    args.push(pointer(from, at));
                    for (d, (low, high)) in inside.iter().enumerate() {
                        args.push(Arg::Scalar(Ty::U32, low - region.first[d]));
                        args.push(Arg::Scalar(Ty::U32, if empty { 0 } else { high - low }));
                    }
                    if window.over.is_none() {
                        args.push(Arg::Scalar(Ty::U64, bits(*dtype, window.fill.0)));
                    }
                }
                (StepSpec::Load { .. }, ChainStep::Load { from: view, window: None })
                | (StepSpec::Store { .. }, ChainStep::Store { to: view, .. }) => {
                    args.push(pointer(view, region.first.iter().copied()));
                }
                (StepSpec::Scalar, ChainStep::Scalar(factor)) => args.push(match *factor {
                    HostScalar::Bound(slot) => Arg::HostScalar(slot.0 as usize),
                    HostScalar::Fixed(value) => Arg::Scalar(Ty::F64, value.0.to_bits()),
                }),
                (StepSpec::Index, ChainStep::Index { strides }) => {
                    let first = strides.iter().zip(&region.first).map(|(stride, first)| stride * first).sum();
                    args.push(Arg::Scalar(Ty::U64, first));
                    args.extend(strides.iter().map(|&stride| Arg::Scalar(Ty::U64, stride)));
                }
                (StepSpec::Unary(..), ChainStep::Unary { f, .. }) => args.extend(attribute_args(steps::attributes(*f))),
                (StepSpec::Binary(..), ChainStep::Binary { f, .. }) => args.extend(attribute_args(steps::binary_attributes(*f))),
                _ => {}
            }
        }
        args
    }

    fn strides_of(&self, walk: Walk) -> usize {
        self.rank - usize::from(walk != Walk::Strided && self.rank > 0)
    }

    /// Declares the parameters.
    pub(crate) fn declare<'k>(&self, k: Kernel<'k>) -> ChainCode<'k> {
        let strides = (self.paths.iter())
            .map(|walk| {
                let count = self.strides_of(*walk);
                (0..count)
                    .map(|_| if self.narrow { Stride::Narrow(k.scalar("stride")) } else { Stride::Wide(k.scalar("stride")) })
                    .collect()
            })
            .collect();
        let attributes = |count: usize| (0..count).map(|_| k.scalar::<f64>("attribute")).collect();
        let steps = (self.steps.iter())
            .map(|step| match *step {
                StepSpec::Load { dtype, path, outside: None } => Step::Load(k.input("input", self.access_bytes(dtype, path)), None),
                StepSpec::Load { dtype, path, outside: Some(outside) } => {
                    let pointer = k.input("input", self.access_bytes(dtype, path));
                    let inside = (0..self.rank).map(|_| (k.scalar("window_first"), k.scalar("window_extent"))).collect();
                    let otherwise = match outside {
                        Outside::Fill => Otherwise::Fill(k.scalar("window_fill")),
                        Outside::Load(x) => Otherwise::Load(x as usize),
                    };
                    Step::Load(pointer, Some((inside, otherwise)))
                }
                StepSpec::Store { dtype, path, .. } => Step::Store(k.output("output", self.access_bytes(dtype, path))),
                StepSpec::Scalar => Step::Factor(k.scalar("factor")),
                StepSpec::Index => Step::Index(k.scalar("index_first"), (0..self.rank).map(|_| k.scalar("index_stride")).collect()),
                StepSpec::Unary(f, _) => Step::Attributes(attributes(steps::attributes(f).len())),
                StepSpec::Binary(f, ..) => Step::Attributes(attributes(steps::binary_attributes(f).len())),
                StepSpec::Given | StepSpec::Ternary(..) | StepSpec::Round(..) => Step::Attributes(Vec::new()),
            })
            .collect();
        ChainCode { k, spec: self.clone(), strides, steps }
    }
}

fn pointer(view: &View, first: impl Iterator<Item = u64>) -> Arg {
    let elements = view.offset + view.strides.iter().zip(first).map(|(stride, first)| stride * first).sum::<u64>();
    Arg::Pointer(Address { base: Base::Buffer(view.slot.0 as usize), offset_bytes: elements * view.dtype.bytes() as u64 })
}

fn attribute_args(values: Vec<f64>) -> impl Iterator<Item = Arg> {
    values.into_iter().map(|value| Arg::Scalar(Ty::F64, value.to_bits()))
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

#[derive(Clone, Copy, Debug)]
enum Stride<'k> {
    Narrow(Val<'k, u32>),
    Wide(Val<'k, u64>),
}

type Inside<'k> = Vec<(Val<'k, u32>, Val<'k, u32>)>;

#[derive(Clone, Copy, Debug)]
enum Otherwise<'k> {
    Fill(Val<'k, u64>),
    Load(usize),
}

#[derive(Clone, Debug)]
enum Step<'k> {
    Load(Pointer<'k>, Option<(Inside<'k>, Otherwise<'k>)>),
    Store(Pointer<'k>),
    Factor(Val<'k, f64>),
    Index(Val<'k, u64>, Vec<Val<'k, u64>>),
    Attributes(Vec<Val<'k, f64>>),
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
                let next = match (*spec, step) {
                    _ if without.contains(&i) => Vec::new(),
                    (StepSpec::Load { dtype, path, .. }, Step::Load(pointer, None)) => {
                        let places = self.places(*pointer, path as usize, index, dtype.bytes() as u32);
                        self.load(dtype, path as usize, &places)
                    }
                    (StepSpec::Load { dtype, path, .. }, Step::Load(pointer, Some((inside, otherwise)))) => {
                        let inner: Vec<Val<'k, u32>> = index.iter().zip(inside).map(|(&i, (first, _))| i - *first).collect();
                        let holds = inner.iter().zip(inside).map(|(&i, (_, extent))| i.lt(*extent));
                        let holds = holds.reduce(|all, one| all & one).unwrap_or(k.constant(true));
                        let outside = match *otherwise {
                            Otherwise::Fill(fill) => vec![self.raw_of(dtype, fill.low32(), (fill >> 32).low32())],
                            Otherwise::Load(x) => fetched[x].clone(),
                        };
                        self.load_windowed(dtype, path as usize, *pointer, &inner, holds, &outside)
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
            AnyVal::Stored(_, Raw::B16(bits)) => (bits.convert::<u32>(verdigris_kir::inst::CvtRound::None), None),
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
                let operand = |x: u32, lane: usize, all: &[u32]| match (&self.steps[x as usize], of(x, lane)) {
                    (Step::Factor(factor), _) => {
                        let others: Vec<u32> =
                            all.iter().copied().filter(|&other| !matches!(self.steps[other as usize], Step::Factor(_))).collect();
                        if doubled(&others) {
                            AnyVal::F64(*factor)
                        } else {
                            AnyVal::F32(factor.convert(verdigris_kir::inst::CvtRound::Nearest))
                        }
                    }
                    (_, value) => value,
                };
                let each = |f: &dyn Fn(usize) -> AnyVal<'k>| (0..lanes).map(f).collect::<Vec<_>>();
                let next = match (*spec, step) {
                    (StepSpec::Load { .. }, _) => fetched[i].clone(),
                    (StepSpec::Given, _) => given.to_vec(),
                    (StepSpec::Scalar, Step::Factor(factor)) => vec![AnyVal::F64(*factor)],
                    (StepSpec::Index, Step::Index(first, strides)) => {
                        let at = index.iter().zip(strides).fold(*first, |sum, (&i, &stride)| sum + i.widen() * stride);
                        each(&|lane| {
                            let here = match (lane, strides.last()) {
                                (0, _) | (_, None) => at,
                                (lane, Some(&stride)) => at + stride * (lane as u64),
                            };
                            AnyVal::I64(here.bitcast())
                        })
                    }
                    (StepSpec::Unary(f, x), Step::Attributes(a)) => each(&|lane| steps::unary(k, f, operand(x, lane, &[x]), a)),
                    (StepSpec::Binary(f, x, z), Step::Attributes(a)) => {
                        each(&|lane| steps::binary(k, f, operand(x, lane, &[x, z]), operand(z, lane, &[x, z]), a))
                    }
                    (StepSpec::Ternary(f, x, z, t), _) => {
                        let all = [x, z, t];
                        each(&|lane| steps::ternary(k, f, operand(x, lane, &all), operand(z, lane, &all), operand(t, lane, &all)))
                    }
                    (StepSpec::Round(dtype, x), _) => each(&|lane| operand(x, lane, &[x]).rounded(k, dtype)),
                    (StepSpec::Store { dtype, path, x }, Step::Store(pointer)) => {
                        let raws: Vec<Raw<'k>> = (0..lanes).map(|lane| operand(x, lane, &[x]).encoded(k, dtype)).collect();
                        let places = self.places(*pointer, path as usize, index, dtype.bytes() as u32);
                        if self.spec.paths[path as usize] == Walk::Unit {
                            store_raw(k, places[0], &raws);
                        } else {
                            places.iter().zip(&raws).for_each(|(&place, raw)| store_raw(k, place, &[*raw]));
                        }
                        Vec::new()
                    }
                    // `declare` makes each step's kind from its spec.
                    (spec, step) => unreachable!("{spec:?} declared as {step:?}"),
                };
                values.push(next);
            }
            values
        })
    }

    /// The address of an element of a load at a point, for kernels that load by themselves.
    pub(crate) fn load_address(&self, step: usize, index: &[Val<'k, u32>]) -> Option<(DType, Val<'k, u64>)> {
        match (self.spec.steps.get(step), self.steps.get(step)) {
            (Some(&StepSpec::Load { dtype, path, .. }), Some(Step::Load(pointer, None))) => {
                Some((dtype, self.address(*pointer, self.offset(path as usize, index), dtype.bytes() as u32)))
            }
            _ => None,
        }
    }
}

/// Loads `many` neighbouring elements: 16 bytes at a time, or all at once if they are fewer.
pub(crate) fn load_raw<'k>(k: Kernel<'k>, dtype: DType, address: Val<'k, u64>, many: u32) -> Vec<Raw<'k>> {
    let bytes = dtype.bytes() as u32;
    if many == 1 {
        return vec![match bytes {
            1 => Raw::B8(k.ld_global_byte(address, 0, false)),
            2 => Raw::B16(k.ld_global::<u16>(address, 0)),
            4 => Raw::B32(k.ld_global::<u32>(address, 0)),
            _ => Raw::B64(k.ld_global::<u64>(address, 0)),
        }];
    }
    let total = many * bytes;
    let mut raws = Vec::new();
    for at in (0..total).step_by(16) {
        let offset = i64::from(at);
        let words: Vec<Val<'k, u32>> = match (total - at).min(16) {
            2 => vec![k.ld_global::<u16>(address, offset).convert(verdigris_kir::inst::CvtRound::None)],
            4 => vec![k.ld_global::<u32>(address, offset)],
            size => k.ld_global_vector::<u32>(address, offset, (size / 4) as u8, Cache::Default),
        };
        let size = (total - at).min(16);
        for element in 0..size / bytes {
            let begin = element * bytes;
            let word = words[(begin / 4) as usize];
            raws.push(match bytes {
                1 => Raw::B8((word >> (8 * (begin % 4))) & 0xffu32),
                2 => Raw::B16((word >> (8 * (begin % 4))).low16()),
                4 => Raw::B32(word),
                _ => Raw::B64(k.join32(word, words[(begin / 4) as usize + 1])),
            });
        }
    }
    raws
}

/// Stores neighbouring elements: 16 bytes at a time, or all at once if they are fewer.
pub(crate) fn store_raw<'k>(k: Kernel<'k>, address: Val<'k, u64>, raws: &[Raw<'k>]) {
    if let [raw] = raws {
        match *raw {
            Raw::B8(bits) => k.st_global_byte(address, 0, bits),
            Raw::B16(bits) => k.st_global(address, 0, bits),
            Raw::B32(bits) => k.st_global(address, 0, bits),
            Raw::B64(bits) => k.st_global(address, 0, bits),
        }
        return;
    }
    let words: Vec<Val<'k, u32>> = match raws[0] {
        Raw::B8(_) => {
            let byte = |raw: &Raw<'k>| if let Raw::B8(bits) = *raw { bits } else { k.constant(0) };
            let quad = |four: &[Raw<'k>]| four.iter().enumerate().map(|(i, raw)| byte(raw) << (8 * i as u32)).reduce(|all, one| all | one);
            raws.chunks(4).filter_map(quad).collect()
        }
        Raw::B16(_) => {
            let half = |raw: &Raw<'k>| if let Raw::B16(bits) = *raw { bits } else { k.constant(0) };
            raws.chunks(2).map(|pair| k.join16(half(&pair[0]), half(&pair[1]))).collect()
        }
        Raw::B32(_) | Raw::B64(_) => raws
            .iter()
            .flat_map(|raw| match *raw {
                Raw::B64(bits) => {
                    let (low, high) = k.split32(bits);
                    vec![low, high]
                }
                Raw::B32(bits) => vec![bits],
                _ => Vec::new(),
            })
            .collect(),
    };
    if let (Raw::B8(_), 2, [word]) = (raws[0], raws.len(), words.as_slice()) {
        k.st_global(address, 0, word.low16());
        return;
    }
    for (i, group) in words.chunks(4).enumerate() {
        match group {
            [word] => k.st_global(address, 16 * i as i64, *word),
            _ => k.st_global_vector(address, 16 * i as i64, group, Cache::Default),
        }
    }
}

/// The alignment of each slot, from the chains that use it.
pub(crate) fn alignments<'a>(slots: usize, chains: impl IntoIterator<Item = (&'a ChainSpec, &'a Chain)>) -> Vec<u64> {
    let mut alignments = vec![1; slots];
    for (slot, bytes) in chains.into_iter().flat_map(|(spec, chain)| spec.alignments(chain)) {
        if let Some(alignment) = alignments.get_mut(slot as usize) {
            *alignment = bytes.max(*alignment);
        }
    }
    alignments
}
