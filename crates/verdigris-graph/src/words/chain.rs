//! Maps and reductions in words, and the steps of their chains.

use serde::Serialize;
use serde::de::DeserializeOwned;
use verdigris_tensor::DType;

use super::codec::{Layouts, Named, Text, Word, call, error, list, list_of};
use crate::error::Error;
use crate::op::{HostScalar, Real};
use crate::ops::pointwise::Drawn;
use crate::ops::reduction::ReductionOp;
use crate::problem::{Chain, ChainStep, MapProblem, ReduceProblem, RowPlace, View, Window};

/// What reading fills in.
pub(super) fn blank_map() -> MapProblem {
    MapProblem { dims: Vec::new(), chain: Chain::default() }
}

/// What reading fills in.
pub(super) fn blank_reduce() -> ReduceProblem {
    ReduceProblem {
        f: ReductionOp::Add,
        accumulator: DType::F32,
        kept: Vec::new(),
        reduced: Vec::new(),
        before: Chain::default(),
        value: 0,
        after: Chain::default(),
    }
}

pub(super) fn describe_map(text: &mut Text<'_>, problem: &mut MapProblem) -> Result<(), Error> {
    text.usual_type(|| first_type(&problem.chain))?;
    text.field("dims", &mut problem.dims, None)?;
    steps_over(text, &mut problem.chain, &problem.dims)
}

pub(super) fn describe_reduce(text: &mut Text<'_>, problem: &mut ReduceProblem) -> Result<(), Error> {
    text.named("a reduction, such as `add`", &mut problem.f)?;
    text.usual_type(|| first_type(&problem.before))?;
    text.choice("accumulator", &mut problem.accumulator, Some(DType::F32))?;
    text.field("kept", &mut problem.kept, None)?;
    text.field("reduced", &mut problem.reduced, None)?;
    let space: Vec<u64> = problem.kept.iter().chain(&problem.reduced).copied().collect();
    steps_over(text, &mut problem.before, &space)?;
    let mut value = u64::from(problem.value);
    text.field("value", &mut value, None)?;
    problem.value = u32::try_from(value).map_err(|_| error("`value=` is a position", &value.to_string()))?;
    steps_over(text, &mut problem.after, &problem.kept)
}

fn first_type(chain: &Chain) -> DType {
    chain.steps.iter().find_map(ChainStep::view).map_or(DType::F32, |view| view.dtype)
}

/// Elements one after the other; an index that takes one value has a stride of 0.
pub(super) fn packed(dims: &[u64]) -> Vec<u64> {
    let mut strides = vec![0; dims.len()];
    let mut stride = 1_u64;
    for (place, &extent) in strides.iter_mut().zip(dims).rev() {
        *place = if extent <= 1 { 0 } else { stride };
        stride = stride.saturating_mul(extent.max(1));
    }
    strides
}

fn steps_over(text: &mut Text<'_>, chain: &mut Chain, dims: &[u64]) -> Result<(), Error> {
    steps(text, chain, &vec![("packed", packed(dims)), ("one", vec![0; dims.len()])])
}

/// Steps whose operands lie as these names say.
pub(super) fn steps(text: &mut Text<'_>, chain: &mut Chain, layouts: &Layouts) -> Result<(), Error> {
    text.steps("+", &mut chain.steps, |text, step| print(text, step, layouts), |text, word| parse(text, word, layouts))
}

fn print(text: &mut Text<'_>, step: &ChainStep, layouts: &Layouts) -> String {
    match step {
        ChainStep::Load { from, window } => {
            let mut words = format!("load({}", text.print_told(from, layouts));
            if let Some(Window { first, end, fill, over }) = window {
                words += &format!(",first={},end={},fill={}", first.print(), end.print(), fill.print());
                if let Some(over) = over {
                    words += &format!(",over={over}");
                }
            }
            words + ")"
        }
        ChainStep::Gather { from, extent, x } => format!("gather({x},{extent},{})", text.print_told(from, layouts)),
        ChainStep::Given => "given".to_owned(),
        ChainStep::Scalar(factor) => format!("scalar({})", text.print_factor(*factor)),
        ChainStep::Index { strides } => format!("index({})", list(strides)),
        ChainStep::Half { slot, upper } => {
            format!("half({},{})", text.print_factor(HostScalar::Bound(*slot)), if *upper { UPPER } else { LOWER })
        }
        ChainStep::Random { distribution, state: [a, b, c, d], strides } => {
            let word = if *distribution == Drawn::Normal { NORMAL } else { UNIFORM };
            format!("{word}({a},{b},{c},{d},{})", list(strides))
        }
        ChainStep::Unary { f, x } => format!("{}({x})", Named(*f).print()),
        ChainStep::Binary { f, x, z } => format!("{}({x},{z})", Named(*f).print()),
        ChainStep::Ternary { f, x, z, t } => format!("{}({x},{z},{t})", Named(*f).print()),
        ChainStep::Round { dtype, x } => format!("cast({x},{dtype})"),
        ChainStep::Store { x, to, at } => {
            let mut words = format!("store({x},{}", text.print_told(to, layouts));
            if let Some(RowPlace { length, rows, extent, stride, coordinate }) = at {
                words += &format!(",length={length},rows={rows},extent={extent},stride={stride},coordinate={}", list(coordinate));
            }
            words + ")"
        }
    }
}

/// The words of random numbers by their distribution.
const UNIFORM: &str = "random";
const NORMAL: &str = "normal";
/// The halves of an integer.
const UPPER: &str = "upper";
const LOWER: &str = "lower";

fn parse(text: &mut Text<'_>, word: &str, layouts: &Layouts) -> Result<ChainStep, Error> {
    let wrong = || {
        error(
            "a step of a chain: `load`, `gather`, `given`, `scalar`, `index`, `half`, `random`, `normal`, `cast`, `store` or a function of earlier steps",
            word,
        )
    };
    let position = |text: &str| text.parse::<u32>().map_err(|_| wrong());
    Ok(match call(word)? {
        ("given", None) => ChainStep::Given,
        (name, Some(parts)) => match (name, &parts[..]) {
            ("load", [place, window @ ..]) => {
                let from = text.parse_place::<View>(place, layouts)?;
                ChainStep::Load { from, window: if window.is_empty() { None } else { Some(parse_window(window).ok_or_else(wrong)?) } }
            }
            ("gather", [x, extent, place]) => {
                ChainStep::Gather { from: text.parse_place(place, layouts)?, extent: extent.parse().map_err(|_| wrong())?, x: position(x)? }
            }
            ("scalar", [factor]) => ChainStep::Scalar(text.parse_factor(factor)?),
            ("index", [strides]) => ChainStep::Index { strides: list_of(strides).ok_or_else(wrong)? },
            ("half", [factor, half @ (UPPER | LOWER)]) => match text.parse_factor(factor)? {
                HostScalar::Bound(slot) => ChainStep::Half { slot, upper: *half == UPPER },
                HostScalar::Fixed(_) => return Err(wrong()),
            },
            (word @ (UNIFORM | NORMAL), [a, b, c, d, strides]) => ChainStep::Random {
                distribution: if word == NORMAL { Drawn::Normal } else { Drawn::Uniform },
                state: [position(a)?, position(b)?, position(c)?, position(d)?],
                strides: list_of(strides).ok_or_else(wrong)?,
            },
            ("cast", [x, dtype]) => ChainStep::Round { x: position(x)?, dtype: dtype.parse().map_err(|_| wrong())? },
            ("store", [x, place, at @ ..]) => {
                let at = if at.is_empty() { None } else { Some(parse_row_place(at).ok_or_else(wrong)?) };
                ChainStep::Store { x: position(x)?, to: text.parse_place(place, layouts)?, at }
            }
            (name, [x]) => ChainStep::Unary { f: function(name).ok_or_else(wrong)?, x: position(x)? },
            (name, [x, z]) => ChainStep::Binary { f: function(name).ok_or_else(wrong)?, x: position(x)?, z: position(z)? },
            (name, [x, z, t]) => {
                ChainStep::Ternary { f: function(name).ok_or_else(wrong)?, x: position(x)?, z: position(z)?, t: position(t)? }
            }
            _ => return Err(wrong()),
        },
        _ => return Err(wrong()),
    })
}

fn function<F: Serialize + DeserializeOwned>(name: &str) -> Option<F> {
    Named::parse(name).map(|named| named.0)
}

fn parse_row_place(words: &[&str]) -> Option<RowPlace> {
    let [length, rows, extent, stride, coordinate] = words else { return None };
    Some(RowPlace {
        length: length.strip_prefix("length=")?.parse().ok()?,
        rows: rows.strip_prefix("rows=")?.parse().ok()?,
        extent: extent.strip_prefix("extent=")?.parse().ok()?,
        stride: stride.strip_prefix("stride=")?.parse().ok()?,
        coordinate: list_of(coordinate.strip_prefix("coordinate=")?)?,
    })
}

fn parse_window(words: &[&str]) -> Option<Window> {
    let (words, over) = match words {
        [words @ .., over] if words.len() == 3 => (words, Some(over.strip_prefix("over=")?.parse().ok()?)),
        _ => (words, None),
    };
    let [first, end, fill] = words else { return None };
    Some(Window {
        first: Word::parse(first.strip_prefix("first=")?)?,
        end: Word::parse(end.strip_prefix("end=")?)?,
        fill: Real::parse(fill.strip_prefix("fill=")?)?,
        over,
    })
}
