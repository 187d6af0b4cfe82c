//! Which problems a command is about: those of a list that stands in git, narrowed, or one from the command line.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use verdigris_graph::{ConvProblem, Direction, Problem};
use verdigris_reference::bench_list::{self, DTypeClass};
use verdigris_reference::conv_list::{self, ConvBenchProblem, ConvShape};

use crate::problem::{Named, ProblemArguments};

/// The lists that stand in the repository, for a program that was copied without them.
const GEMM_LIST: &str = include_str!("../../../bench/lists/gemm.toml");
const CONV_LIST: &str = include_str!("../../../bench/lists/conv.toml");

const TYPES: [DTypeClass; 6] = [DTypeClass::Bf16, DTypeClass::F16, DTypeClass::Tf32, DTypeClass::F32, DTypeClass::Fp8, DTypeClass::Int8];

/// Matrix products.
#[derive(clap::Args)]
pub struct GemmSelection {
    #[command(flatten)]
    problem: ProblemArguments,
    /// The problem list; default bench/lists/gemm.toml in the current folder, else the copy inside this program.
    #[arg(long)]
    list: Option<PathBuf>,
    /// Only these classes of the list (square, deepbench, …).
    #[arg(long, value_delimiter = ',')]
    class: Vec<String>,
    /// Only these types (bf16, f16, tf32, fp8, int8; with --m --n --k any element type, default bf16).
    #[arg(long, value_delimiter = ',')]
    dtype: Vec<String>,
    /// Only problems whose name contains this.
    #[arg(long)]
    filter: Option<String>,
}

impl GemmSelection {
    /// The problems, at least one.
    ///
    /// # Errors
    /// A choice that leaves none, or that the list does not have; a list that cannot be read.
    pub fn problems(&self) -> Result<Vec<Named>> {
        let beside = self.problem.beside_the_size();
        if !self.problem.is_given() && !beside.is_empty() {
            bail!("{} without --m, --n and --k: problems of a list say that themselves", beside.join(", "));
        }
        let of_list = [("--list", self.list.is_some()), ("--class", !self.class.is_empty()), ("--filter", self.filter.is_some())];
        if self.problem.is_given() {
            refuse_of_list(&of_list)?;
            let dtypes = if self.dtype.is_empty() { vec!["bf16".to_owned()] } else { self.dtype.clone() };
            return dtypes.iter().map(|dtype| self.problem.problem(dtype)).collect();
        }
        let beside = PathBuf::from("bench/lists/gemm.toml");
        let list = match &self.list {
            Some(path) => bench_list::load_file(path).with_context(|| format!("the problem list {}", path.display()))?,
            None if beside.is_file() => bench_list::load_file(&beside).with_context(|| format!("the problem list {}", beside.display()))?,
            None => bench_list::load(GEMM_LIST)?,
        };
        for class in &self.class {
            if !list.iter().any(|row| row.class == *class) {
                let mut known: Vec<&str> = list.iter().map(|row| row.class.as_str()).collect();
                known.dedup();
                bail!("--class {class}: the list has {}", known.join(", "));
            }
        }
        for dtype in &self.dtype {
            if !list.iter().any(|row| row.dtype.name() == dtype) {
                bail!("--dtype {dtype}: the list has bf16, f16, tf32, fp8 and int8; other types need --m, --n and --k");
            }
        }
        let problems: Vec<Named> = list
            .into_iter()
            .filter(|row| self.class.is_empty() || self.class.contains(&row.class))
            .filter(|row| self.dtype.is_empty() || self.dtype.iter().any(|dtype| dtype == row.dtype.name()))
            .filter(|row| self.filter.as_ref().is_none_or(|text| row.name.contains(text.as_str())))
            .map(|row| Named { class: row.class, dtype: row.dtype.name().to_owned(), name: row.name, problem: row.problem })
            .collect();
        if problems.is_empty() {
            bail!("no problem of the list is left by --class, --dtype and --filter");
        }
        Ok(problems)
    }
}

/// Refuses what narrows a list beside a problem of its own.
fn refuse_of_list(given: &[(&str, bool)]) -> Result<()> {
    let names: Vec<_> = given.iter().filter_map(|&(name, is_given)| is_given.then_some(name)).collect();
    if names.is_empty() { Ok(()) } else { bail!("{} beside the size of a problem, which is of no list", names.join(", ")) }
}

/// Convolutions.
#[derive(clap::Args)]
pub struct ConvSelection {
    /// Images; with --c, --k, --input and --filter one problem from the command line.
    #[arg(short, long)]
    n: Option<u64>,
    /// Input channels.
    #[arg(short, long)]
    c: Option<u64>,
    /// Output channels.
    #[arg(short, long)]
    k: Option<u64>,
    /// Spatial extents of the input, as `56x56`; one to three.
    #[arg(long)]
    input: Option<String>,
    /// Spatial extents of the filter, as `3x3`.
    #[arg(long)]
    filter_size: Option<String>,
    /// Stride, in each dim.
    #[arg(long, default_value_t = 1)]
    stride: u64,
    /// Padding, on both sides of each dim.
    #[arg(long, default_value_t = 0)]
    pad: u64,
    /// Dilation, in each dim.
    #[arg(long, default_value_t = 1)]
    dilation: u64,
    /// Groups.
    #[arg(long, default_value_t = 1)]
    groups: u64,
    /// Only these directions (fprop, dgrad, wgrad).
    #[arg(long, value_delimiter = ',')]
    direction: Vec<String>,
    /// The problem list; default bench/lists/conv.toml in the current folder, else the copy inside this program.
    #[arg(long)]
    list: Option<PathBuf>,
    /// Only these classes of the list (resnet, vgg, …).
    #[arg(long, value_delimiter = ',')]
    class: Vec<String>,
    /// Only these types (bf16, f16, tf32, f32, fp8, int8); of a problem from the command line, bf16 unless said.
    #[arg(long, value_delimiter = ',')]
    dtype: Vec<String>,
    /// Only problems whose name contains this.
    #[arg(long)]
    filter: Option<String>,
}

impl ConvSelection {
    /// The problems, at least one.
    ///
    /// # Errors
    /// A choice that leaves none, or that the list does not have; a list that cannot be read.
    pub fn problems(&self) -> Result<Vec<ConvBenchProblem>> {
        for direction in &self.direction {
            if !Direction::ALL.iter().any(|known| known.name() == direction) {
                bail!("--direction {direction}: fprop, dgrad or wgrad");
            }
        }
        for dtype in &self.dtype {
            if !TYPES.iter().any(|known| known.name() == dtype) {
                bail!("--dtype {dtype}: bf16, f16, tf32, f32, fp8 or int8");
            }
        }
        let has_size = [self.n, self.c, self.k].iter().any(Option::is_some) || self.input.is_some() || self.filter_size.is_some();
        let beside =
            [("--stride", self.stride != 1), ("--pad", self.pad != 0), ("--dilation", self.dilation != 1), ("--groups", self.groups != 1)];
        let beside: Vec<_> = beside.into_iter().filter_map(|(name, is_given)| is_given.then_some(name)).collect();
        if has_size {
            refuse_of_list(&[("--list", self.list.is_some()), ("--class", !self.class.is_empty())])?;
        } else if !beside.is_empty() {
            bail!("{} without --n, --c, --k, --input and --filter-size: problems of a list say that themselves", beside.join(", "));
        }
        let is_wanted = |name: &str, wanted: &[String]| wanted.is_empty() || wanted.iter().any(|one| one == name);
        let problems: Vec<ConvBenchProblem> = match (self.n, self.c, self.k, &self.input, &self.filter_size) {
            (None, None, None, None, None) => {
                let beside = PathBuf::from("bench/lists/conv.toml");
                let list = match &self.list {
                    Some(path) => conv_list::load_file(path).with_context(|| format!("the problem list {}", path.display()))?,
                    None if beside.is_file() => {
                        conv_list::load_file(&beside).with_context(|| format!("the problem list {}", beside.display()))?
                    }
                    None => conv_list::load(CONV_LIST)?,
                };
                for class in &self.class {
                    if !list.iter().any(|row| row.class == *class) {
                        let mut known: Vec<&str> = list.iter().map(|row| row.class.as_str()).collect();
                        known.dedup();
                        bail!("--class {class}: the list has {}", known.join(", "));
                    }
                }
                (list.into_iter())
                    .filter(|row| is_wanted(&row.class, &self.class) && is_wanted(row.dtype.name(), &self.dtype))
                    .filter(|row| is_wanted(row.problem.direction.name(), &self.direction))
                    .collect()
            }
            (Some(n), Some(c), Some(k), Some(input), Some(filter)) => {
                let &ConvSelection { stride, pad, dilation, groups, .. } = self;
                let name = format!("{n}x{c}@{input}-{k}k{filter}s{stride}p{pad}d{dilation}g{groups}");
                let (input, filter) = (sizes("input", input)?, sizes("filter-size", filter)?);
                let shape = ConvShape { name, n, c, k, input, filter, stride, pad, dilation, groups };
                let dtypes = TYPES
                    .into_iter()
                    .filter(|dtype| if self.dtype.is_empty() { *dtype == DTypeClass::Bf16 } else { is_wanted(dtype.name(), &self.dtype) });
                let directions: Vec<Direction> =
                    Direction::ALL.into_iter().filter(|direction| is_wanted(direction.name(), &self.direction)).collect();
                let mut rows = Vec::new();
                for dtype in dtypes {
                    for &direction in &directions {
                        let class = "command-line".to_owned();
                        let problem = shape.problem(&class, direction, dtype)?;
                        rows.push(ConvBenchProblem { class, dtype, name: format!("{}-{}", shape.name, direction.name()), problem });
                    }
                }
                rows
            }
            _ => bail!("a problem needs all of -n, -c, -k, --input and --filter-size"),
        };
        let text = self.filter.as_deref().unwrap_or_default();
        let problems: Vec<ConvBenchProblem> = problems.into_iter().filter(|row| row.name.contains(text)).collect();
        if problems.is_empty() {
            bail!("no problem is left by --class, --dtype, --direction and --filter");
        }
        Ok(problems)
    }
}

/// What a graph of this convolution alone is cut into.
pub fn as_planned(conv: &ConvProblem) -> Problem {
    let mut problem = conv.cut_as_gemm().map_or_else(|| Problem::Conv(conv.clone()), Problem::Gemm);
    if let Problem::Gemm(gemm) = &mut problem {
        gemm.number_slots();
    }
    problem
}

/// `56x56` as numbers.
fn sizes(name: &str, text: &str) -> Result<Vec<u64>> {
    text.split('x').map(|part| part.parse().with_context(|| format!("--{name} {text}: numbers with `x` between, as 56x56"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: ConvSelection,
    }

    fn asked(words: &str) -> Result<Vec<ConvBenchProblem>> {
        Line::parse_from(std::iter::once("x").chain(words.split_whitespace())).arguments.problems()
    }

    #[test]
    fn one_problem_from_the_command_line() {
        let rows =
            asked("-n 2 -c 8 -k 16 --input 9x7 --filter-size 3x3 --pad 1 --stride 2 --direction dgrad,fprop --dtype tf32").expect("two");
        assert_eq!(
            rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(),
            ["2x8@9x7-16k3x3s2p1d1g1-fprop", "2x8@9x7-16k3x3s2p1d1g1-dgrad"]
        );
        assert_eq!(rows[0].problem.output, [1, 5, 4]);
        assert!(asked("-n 2 -c 8 -k 16 --input 9x7").is_err_and(|error| error.to_string().contains("--filter-size")));
        assert!(asked("-n 2 -c 8 -k 16 --input 9xa --filter-size 3x3").is_err());
        assert!(asked("--direction sideways").is_err());
    }

    #[test]
    fn the_list_can_be_narrowed() {
        let rows = asked("--class vgg --dtype bf16 --filter 1_2").expect("three");
        assert_eq!(rows.len(), 3);
        assert!(asked("--class nothing").is_err_and(|error| error.to_string().contains("resnet")));
        assert!(asked("--filter nothing").is_err());
    }
}
