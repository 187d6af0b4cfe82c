//! The case files of graphs: every family but GEMM, which `cases.rs` reads.
//!
//! A file is TOML, a list of `[[group]]`s, each the product of its lists. Fields that all families have:
//!
//! ```toml
//! [[group]]
//! id = "bf16-edges"         # unique in the file; part of each case's id
//! types = ["bf16"]          # element types of what is read
//! out = "f32"               # type of what is written; default as the family says
//! layouts = ["row"]         # see below; default ["row"], for convolution ["nhwc"]
//! data = "normal"           # a `Distribution`
//! deterministic = false
//! device_only = false       # too large for the CPU: run on a device and judged at a sample of positions
//! ```
//!
//! **Layouts** of a tensor `[a, b, c…]`: `row` (or `nchw`): row-major; `nhwc`: dim 1 innermost; `reversed`: dim 0 innermost; `gap`:
//! row-major with three elements between rows of every level; `strided`: that, with a step of 2 in the innermost dim; `pitch`: `nhwc` with
//! eight more channels' room in each pixel, as a part of a larger tensor has it; `padded`: `nhwc` with room in each pixel for the next multiple of eight channels,
//! so that wide accesses are aligned though they do not divide the channels; `uneven`: `nhwc` with one channel's room, so that pixels begin anywhere.
//!
//! **Steps** of a chain work on the value of the step before, as in `gemm.toml`:
//!
//! ```toml
//! { unary = "relu" }, { backward = "gelu_erf" },     # the latter reads a full tensor as the forward input
//! { binary = { f = "add", dtype = "f32", per = "channel" } },   # per: channel, element, tensor, image, position; v_is_right = false
//! { scale = 0.5 }, { scale = "bound" }, { round = "bf16" }, { store = "bf16" },
//! { reduce = "add" },                                # a second output: the value reduced over all dims but 1
//! { reduce_square = "add" },                         # likewise the value's square
//! ```
//!
//! **`conv.toml`**: `shapes = ["n2 c64 i9x9 k64 f3x3 p1 s2 d1 g1"]`: images, channels of x, its spatial extents, channels of y, filter
//! taps, padding, stride, dilation, groups. `c~64` stands for 63, 64 and 65; one number stands for all dims; padding may be `p0:2x1:1`, before
//! and after. `directions` (default all three), `mode = "convolution"`, `precision` (default the usual policy of the type), chains `before`
//! (on the left operand, rounded to its type) and `after`. `out` is by default the operands' type, i32 for integers and bf16 for fp8.
//! `filter` is the type of the right operand, if it is another one.
//!
//! **`pointwise.toml`**: `unary`, `binary`, `backward`, `ternary`, `gen_index` (axes), `scale`: lists of functions, each a case; or one
//! `chain` of steps. `dims`; `per` for the second operand; `z` its type. `out` is by default the type read.
//!
//! **`reduction.toml`**: `f`, `axes`, `dims`. **`scan.toml`**: `f`, `axis`, `dims`, `ways` (`inclusive`, `exclusive`, `reversed`, `exclusive_reversed`; default all).
//! **`pool.toml`**: `modes` (`max`, `max_index`, `average`, `average_pad`, and the gradients
//! `max_backward`, `index_backward`, `average_backward`, `average_pad_backward`), `shapes = ["n2 c3 i9x9 w3x3 s2 p1 d1"]` or, adaptive,
//! `"n2 c3 i9x9 o4x4"`, or, fractional, `"n2 c3 i9x9 w2x2 o4x4"` with `samples` (their type). **`softmax.toml`**: `ops` (`softmax`, `log_softmax`, `softmax_backward`, `log_softmax_backward`,
//! `cross_entropy`, `cross_entropy_backward`), `dims`, `axis`, and for the latter two `reductions`, `smoothing`, `ignore_index`, `lse`,
//! `labels` (their type). **`norm.toml`**: `passes` (`forward`, `backward`, `backward_vectors`: the gradients of scale and bias alone), `kinds` (`layer`,
//! `rms`, default both), `dims`, `axes`, `groups`, `vectors` (the dims that scale and bias have: `axes`, `channel`, `adaptive`, `mixed`, `whole`, `one`, or
//! `none`; a bias with `layer` alone), `vector` (their type), `eps`, `zero_centred`, `residual` (with its sum; of a gradient `dsum`), `statistics`
//! (written; of a gradient given). **`movement.toml`**: `moves`, such as `{ transpose = [1, 0] }`, `{ slice = { starts, stops, steps } }`,
//! `{ pad = { before, after, value } }`, `{ concat = { axis, count } }`, `{ reshape = [6] }`, `{ broadcast = [2, 3] }`, `{ turn = { is_gradient } }` (rotary
//! positions: halves of the last dim, beside zeros, in a chain of steps); and `dims`.
//! **`batch_norm.toml`**: `ops` (`statistics`, `forward`, `backward`, with `_relu`, `_add` and `_add_relu` behind them, `_plain` without what may be left
//! out, `backward_sums` without dx), `dims`, `of_channels` (the type of what belongs to channels, default f32), `eps`.
//! **`attention.toml`**: `ops` (`forward`, `forward_rows` with the log-sum-exp, `forward_max` with the greatest scores, `backward`, `backward_queries`, `backward_keys`, `backward_operands` of what the score function reads, `backward_all` with those, `both`),
//! `shapes = ["b2 h4 g2 q64 k129 d64 v64"]`: batch, heads of queries, how many of them share one of keys, queries, keys, elements, elements of a value;
//! `options`, each a list of words in one string: `top_left`, `bottom_right`, `left=3`, `right=0`, `cap=30`, `scale=0.5` or `bound`, `bias` and `mask` (by
//! themselves or `=head`, `batch`, `pair`, `key`, `query`, `one`), `slopes` (`=batch`), `sinks`, `q_lengths`, `kv_lengths`,
//! `ragged` (`=60`: batches are sequences behind each other, of at most so many queries and keys, in 60 % of the rows that they could have; with `page` queries alone), `page` (`=16`: keys in pages of
//! so many, which the last one fills, as many pages as there are entries), `dropout=0.1` (with a random state in memory), `blocks=head/128` (a map of blocks of so many queries and keys, one for each of `scores`, `head`, `batch` or `one`, with three masks), `descales` (of 8-bit queries, keys and values, one of each batch and head of keys; `=one` for all), `latent` (values are a slice of the
//! keys, their first elements), `score=given;query;key;sub(1,2);0.5;mul(3,4);add(0,5)` (a function of scores, its steps parted by semicolons, with `gather:f32:head:21:5` for the entry of a table `[1, h, 1, 21]` at the place that step 5 says: the scaled product, `batch`, `head`, `query`, `key`, numbers,
//! `read:f32:key` of an operand of that type with the spread of a bias or `turned` with queries side by side, `cast(x,bf16)`, and functions of earlier steps by their positions); `of_rows` (the type of the
//! log-sum-exp), `of_options` (of bias and sinks, and of their gradients; that of `of_rows` where it is not said). Layouts are `bhsd`, `bshd`, `packed`, `strided` and `reversed`.
//! **`resample.toml`**: `modes` (`nearest`, `nearest_exact`, `linear`, `cubic`, the latter two also with `_corners`, and the borders `reflect`, `replicate`,
//! `circular`), `passes` (`forward`, `backward`; default both), `factors` (one for each spatial dim, default none), `shapes = ["n2 c3 i9x9 o4x12"]`, or
//! `"n2 c3 i9x9 p2:1x0"` of a border. **`append.toml`**: `dims` (of what rows are appended to), `axis`, `rows` (how many), `of` (dims of which each index has its
//! own length, default `[[0]]`), `from` (the layout of the rows, default `row`), `count` (tensors that take rows by one length, default 1), chains `before` (what makes the
//! rows) and `after` (what reads the tensor with its rows, and is stored beside it).

mod append;
mod attention;
mod batch_norm;
mod conv;
mod movement;
mod norm;
mod pointwise;
mod pool;
mod reduction;
mod resample;
mod scan;
mod softmax;

use std::collections::HashSet;
use std::fmt::Display;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use verdigris_graph::{BinaryOp, Determinism, Error, Graph, GraphBuilder, HostScalar, Real, ReductionOp, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

use crate::cases::{CaseError, MOST_CASES, MOST_CASES_RULE, ScalarText, seed_of};
use crate::data::Distribution;

/// One test graph.
#[derive(Clone, PartialEq, Debug)]
pub struct GraphCase {
    /// `conv/GROUP/…`, unique in its file.
    pub id: String,
    /// What is asked.
    pub graph: Graph,
    /// What the operands look like.
    pub distribution: Distribution,
    /// Seed of the inputs, made from the id.
    pub seed: u64,
    /// Too large for the CPU: judged at a sample of positions.
    pub device_only: bool,
}

/// The families, by the stem of their files.
pub const FAMILIES: [&str; 12] =
    ["conv", "pointwise", "reduction", "scan", "pool", "softmax", "norm", "movement", "batch_norm", "attention", "resample", "append"];

/// Reads a case file; its stem is the family.
///
/// # Errors
/// All of [`CaseError`].
pub fn load_file(path: &Path) -> Result<Vec<GraphCase>, CaseError> {
    let text = std::fs::read_to_string(path).map_err(|source| CaseError::Io { path: path.display().to_string(), source })?;
    load(&path.file_stem().unwrap_or_default().to_string_lossy(), &text)
}

/// Reads the text of a case file of a family.
///
/// # Errors
/// All of [`CaseError`] but `Io`.
pub fn load(family: &str, text: &str) -> Result<Vec<GraphCase>, CaseError> {
    match family {
        "conv" => read::<conv::Group>(family, text),
        "pointwise" => read::<pointwise::Group>(family, text),
        "reduction" => read::<reduction::Group>(family, text),
        "scan" => read::<scan::Group>(family, text),
        "pool" => read::<pool::Group>(family, text),
        "softmax" => read::<softmax::Group>(family, text),
        "norm" => read::<norm::Group>(family, text),
        "movement" => read::<movement::Group>(family, text),
        "batch_norm" => read::<batch_norm::Group>(family, text),
        "attention" => read::<attention::Group>(family, text),
        "resample" => read::<resample::Group>(family, text),
        "append" => read::<append::Group>(family, text),
        _ => Err(CaseError::Field {
            group: String::new(),
            field: "family",
            value: family.to_owned(),
            rule: "the stem of the file is conv, pointwise, reduction, scan, pool, softmax, norm, movement, batch_norm, attention, resample or append",
        }),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File<G> {
    group: Vec<G>,
}

/// A group of a family.
trait Cases {
    fn common(&self) -> Common<'_>;

    /// Every graph of the product, with what its id says behind the group.
    fn graphs(&self) -> Result<Vec<(String, Graph)>, CaseError>;
}

/// What the groups of all families say of their cases.
struct Common<'a> {
    id: &'a str,
    data: Distribution,
    deterministic: bool,
    device_only: bool,
}

fn read<G: Cases + DeserializeOwned>(family: &str, text: &str) -> Result<Vec<GraphCase>, CaseError> {
    let file: File<G> = toml::from_str(text).map_err(|error| CaseError::Syntax(Box::new(error)))?;
    let mut cases = Vec::new();
    let mut ids = HashSet::new();
    for group in &file.group {
        let common = group.common();
        let graphs = group.graphs()?;
        if graphs.is_empty() {
            let rule = "a group is the product of its lists, of which none is empty";
            return Err(CaseError::Field { group: common.id.to_owned(), field: "group", value: "no case".to_owned(), rule });
        }
        for (name, mut graph) in graphs {
            let id = format!("{family}/{}/{name}", common.id);
            if common.deterministic {
                graph.determinism = Determinism::Repeatable;
            }
            graph.name.clone_from(&id);
            verdigris_graph::validate::validate(&graph)
                .map_err(|source| CaseError::Problem { id: id.clone(), source: Box::new(source) })?;
            if !ids.insert(id.clone()) {
                return Err(CaseError::DuplicateId { id });
            }
            let seed = seed_of(&id);
            cases.push(GraphCase { id, graph, distribution: common.data, seed, device_only: common.device_only });
        }
    }
    Ok(cases)
}

fn row() -> Vec<String> {
    vec!["row".to_owned()]
}

fn normal() -> Distribution {
    Distribution::Normal
}

/// A number or the word of a field.
fn field<T>(group: &str, field: &'static str, value: impl Display, rule: &'static str) -> Result<T, CaseError> {
    Err(CaseError::Field { group: group.to_owned(), field, value: value.to_string(), rule })
}

/// The layout that a word says.
fn layout(group: &str, word: &str, dims: &[u64]) -> Result<Layout, CaseError> {
    let last: Vec<usize> = std::iter::once(0).chain(2..dims.len()).chain([1]).filter(|&dim| dim < dims.len()).collect();
    let spread = |order: &[usize], inner: u64, gap: u64| {
        let mut strides = vec![0; dims.len()];
        let mut stride = inner;
        for &dim in order.iter().rev() {
            strides[dim] = stride;
            // What 64 bits do not hold stays so large that `Layout::new` refuses it.
            stride = stride.saturating_mul(dims[dim]).saturating_add(gap);
        }
        Layout::new(dims, &strides)
    };
    let rows: Vec<usize> = (0..dims.len()).collect();
    let made = match word {
        "row" | "nchw" => Layout::row_major(dims),
        "nhwc" => Layout::with_order(dims, &last),
        "reversed" => Layout::with_order(dims, &rows.iter().rev().copied().collect::<Vec<_>>()),
        "gap" => spread(&rows, 1, 3),
        "strided" => spread(&rows, 2, 1),
        "pitch" | "padded" | "uneven" => {
            let mut strides = Layout::with_order(dims, &last).map_or_else(|_| Vec::new(), |layout| layout.strides().to_vec());
            let channels = dims.get(1).copied().unwrap_or(1);
            let room = match word {
                "pitch" => channels.saturating_add(8),
                "uneven" => channels.saturating_add(1),
                _ => channels.div_ceil(8).saturating_mul(8),
            };
            for (dim, stride) in strides.iter_mut().enumerate() {
                if dim != 1 && channels > 0 {
                    *stride = (*stride / channels).saturating_mul(room);
                }
            }
            Layout::new(dims, &strides)
        }
        _ => return field(group, "layouts", word, "row, nchw, nhwc, reversed, gap, strided, pitch, padded or uneven"),
    };
    made.map_err(|source| fault(group, Error::Layout { tensor: word.to_owned(), source }))
}

fn fault(group: &str, source: Error) -> CaseError {
    CaseError::Problem { id: group.to_owned(), source: Box::new(source) }
}

/// A step of a chain.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Step {
    Unary(UnaryOp),
    Backward(UnaryOp),
    Binary {
        f: BinaryOp,
        dtype: DType,
        per: Per,
        #[serde(default)]
        v_is_right: bool,
    },
    Scale(ScalarText),
    Round(DType),
    Store(DType),
    Reduce(ReductionOp),
    ReduceSquare(ReductionOp),
}

/// How a second operand is broadcast to a first of dims `[n, c, spatial…]`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Per {
    Channel,
    #[default]
    Element,
    Tensor,
    Image,
    Position,
}

impl Per {
    fn dims(self, dims: &[u64]) -> Vec<u64> {
        let kept = |dim: usize| match self {
            Per::Channel => dim == 1,
            Per::Element => true,
            Per::Tensor => false,
            Per::Image => dim == 0,
            Per::Position => dim > 1,
        };
        dims.iter().enumerate().map(|(dim, &extent)| if kept(dim) { extent } else { 1 }).collect()
    }

    const fn name(self) -> &'static str {
        match self {
            Per::Channel => "channel",
            Per::Element => "element",
            Per::Tensor => "tensor",
            Per::Image => "image",
            Per::Position => "position",
        }
    }
}

/// A graph under construction.
struct Draft<'a> {
    group: &'a str,
    builder: GraphBuilder,
    next: u32,
}

impl<'a> Draft<'a> {
    fn new(group: &'a str) -> Draft<'a> {
        Draft { group, builder: GraphBuilder::new(group), next: 0 }
    }

    fn name(&mut self, what: &str) -> String {
        self.next += 1;
        format!("{what}{}", self.next)
    }

    /// An input.
    fn tensor(&mut self, what: &str, dtype: DType, word: &str, dims: &[u64]) -> Result<Uid, CaseError> {
        let layout = layout(self.group, word, dims)?;
        let name = self.name(what);
        Ok(self.builder.tensor(&name, dtype, layout))
    }

    /// Makes a result an output.
    fn store(&mut self, uid: Uid, what: &str, dtype: DType, word: &str, dims: &[u64]) -> Result<(), CaseError> {
        let layout = layout(self.group, word, dims)?;
        let name = self.name(what);
        self.builder.store_as(uid, &name, dtype, layout).map_err(|source| fault(self.group, source))
    }

    fn ok<T>(&self, result: Result<T, Error>) -> Result<T, CaseError> {
        result.map_err(|source| fault(self.group, source))
    }

    /// A chain on a value of dims; gives its last value.
    fn chain(&mut self, mut v: Uid, dims: &[u64], word: &str, steps: &[Step]) -> Result<Uid, CaseError> {
        for step in steps {
            let name = self.name("step");
            let made = match step {
                Step::Unary(f) => self.builder.unary(&name, *f, v),
                Step::Backward(f) => {
                    let forward = self.tensor("forward", DType::F32, word, dims)?;
                    self.builder.binary(&name, BinaryOp::Backward(*f), v, forward)
                }
                Step::Binary { f, dtype, per, v_is_right } => {
                    let dims = per.dims(dims);
                    let operand = self.tensor("operand", *dtype, if *per == Per::Element { word } else { "row" }, &dims)?;
                    let (x, z) = if *v_is_right { (operand, v) } else { (v, operand) };
                    self.builder.binary(&name, *f, x, z)
                }
                Step::Scale(factor) => {
                    let factor = self.scalar(factor, v)?;
                    self.builder.scale(&name, v, factor)
                }
                Step::Round(dtype) => {
                    let rounded = self.builder.round_to(v, *dtype);
                    self.ok(rounded)?;
                    continue;
                }
                Step::Store(dtype) => {
                    self.store(v, "stored", *dtype, word, dims)?;
                    continue;
                }
                Step::Reduce(f) | Step::ReduceSquare(f) => {
                    let squares = matches!(step, Step::ReduceSquare(_));
                    let value = if squares {
                        let square = self.builder.binary(&format!("{name} square"), BinaryOp::Mul, v, v);
                        self.ok(square)?
                    } else {
                        v
                    };
                    let axes: Vec<u32> = (0..dims.len() as u32).filter(|&axis| axis != 1).collect();
                    let reduced = self.builder.reduction(&name, *f, value, &axes);
                    let reduced = self.ok(reduced)?;
                    let stored = if squares { "reduced squares" } else { "reduced" };
                    self.store(reduced, stored, DType::F32, "row", &Per::Channel.dims(dims))?;
                    continue;
                }
            };
            v = self.ok(made)?;
        }
        Ok(v)
    }

    /// A factor of the value `x`: one that is bound is f64 where the value is.
    fn scalar(&mut self, text: &ScalarText, x: Uid) -> Result<HostScalar<Uid>, CaseError> {
        match text {
            ScalarText::Fixed(value) => Ok(HostScalar::Fixed(Real(*value))),
            ScalarText::Word(word) if word == "bound" => {
                let name = self.name("factor");
                let is_double = self.builder.described(x).is_some_and(|value| value.dtype == DType::F64);
                Ok(HostScalar::Bound(self.builder.host_scalar(&name, if is_double { DType::F64 } else { DType::F32 })))
            }
            ScalarText::Word(word) => field(self.group, "scale", word, "a factor is a number or \"bound\""),
        }
    }

    fn finish(self) -> Result<Graph, CaseError> {
        self.builder.finish().map_err(|source| fault(self.group, source))
    }
}

/// `2x3`: extents as ids have them.
fn joined(list: &[u64]) -> String {
    list.iter().map(u64::to_string).collect::<Vec<_>>().join("x")
}

/// The tokens of a shape: a letter, and one or more numbers for each spatial dim.
#[derive(Clone, Default)]
struct Shape {
    tokens: Vec<(char, Vec<(u64, u64)>)>,
    text: String,
}

impl Shape {
    /// Every shape that a text stands for: `c~64` is 63, 64 and 65.
    fn all(group: &str, text: &str) -> Result<Vec<Shape>, CaseError> {
        let rule = "a shape is letters and numbers such as n2 c64 i9x9 k~64 f3x3 p1:0x1:2";
        let mut shapes = vec![Shape::default()];
        for word in text.split_whitespace() {
            let mut letters = word.chars();
            let letter = letters.next().unwrap_or(' ');
            let numbers = letters.as_str();
            let choices: Vec<String> = match numbers.strip_prefix('~') {
                Some(middle) => match middle.parse::<u64>() {
                    Ok(middle) if middle > 0 => [middle - 1, middle, middle.saturating_add(1)].map(|number| number.to_string()).to_vec(),
                    _ => return field(group, "shapes", word, rule),
                },
                None => vec![numbers.to_owned()],
            };
            if shapes.len() * choices.len() > MOST_CASES {
                return field(group, "shapes", text, MOST_CASES_RULE);
            }
            let mut next = Vec::new();
            for shape in &shapes {
                for choice in &choices {
                    let parse = |part: &str| -> Option<(u64, u64)> {
                        match part.split_once(':') {
                            Some((before, after)) => Some((before.parse().ok()?, after.parse().ok()?)),
                            None => part.parse().ok().map(|number| (number, number)),
                        }
                    };
                    let Some(list) = choice.split('x').map(parse).collect::<Option<Vec<_>>>() else {
                        return field(group, "shapes", word, rule);
                    };
                    let mut shape = shape.clone();
                    shape.tokens.push((letter, list));
                    shape.text += &format!("{}{letter}{choice}", if shape.text.is_empty() { "" } else { "-" });
                    next.push(shape);
                }
            }
            shapes = next;
        }
        Ok(shapes)
    }

    fn pairs(&self, letter: char) -> Option<&[(u64, u64)]> {
        self.tokens.iter().find(|(known, _)| *known == letter).map(|(_, list)| list.as_slice())
    }

    fn one(&self, letter: char, default: u64) -> u64 {
        self.pairs(letter).and_then(|list| list.first()).map_or(default, |pair| pair.0)
    }

    /// As many pairs as there are spatial dims.
    fn each(&self, letter: char, spatial: usize, default: u64) -> Vec<(u64, u64)> {
        match self.pairs(letter) {
            None => vec![(default, default); spatial],
            Some([pair]) => vec![*pair; spatial],
            Some(list) => list.to_vec(),
        }
    }

    fn numbers(&self, letter: char, spatial: usize, default: u64) -> Vec<u64> {
        self.each(letter, spatial, default).into_iter().map(|pair| pair.0).collect()
    }
}
