//! The list of convolutions that `bench conv` measures (`bench/lists/conv.toml`): fixed in git, so that a ratio is always over the same problems.
//!
//! A file is a list of `[[group]]`s; a group is the product of `problems`, `directions` and `dtypes`. The list's own head says what the
//! fields mean.

use std::path::Path;

use serde::Deserialize;
use verdigris_graph::{ConvExtents, ConvProblem, Direction};

use crate::bench_list::DTypeClass;
use crate::cases::CaseError;

/// One convolution of a list.
#[derive(Clone, PartialEq, Debug)]
pub struct ConvBenchProblem {
    /// The class it counts in (`resnet`, `vgg`, …).
    pub class: String,
    /// Its types.
    pub dtype: DTypeClass,
    /// `NAME-DIRECTION`.
    pub name: String,
    /// What is asked.
    pub problem: ConvProblem,
}

/// Reads a list.
///
/// # Errors
/// All of [`CaseError`].
pub fn load_file(path: &Path) -> Result<Vec<ConvBenchProblem>, CaseError> {
    let text = std::fs::read_to_string(path).map_err(|source| CaseError::Io { path: path.display().to_string(), source })?;
    load(&text)
}

/// Reads the text of a list, in the order in which it stands there.
///
/// # Errors
/// All of [`CaseError`] but `Io`.
pub fn load(text: &str) -> Result<Vec<ConvBenchProblem>, CaseError> {
    let file: File = toml::from_str(text).map_err(|error| CaseError::Syntax(Box::new(error)))?;
    let mut list: Vec<ConvBenchProblem> = Vec::new();
    for group in &file.group {
        for shape in &group.problems {
            for &direction in &group.directions {
                for &dtype in &group.dtypes {
                    let name = format!("{}-{}", shape.name, direction.name());
                    let id = format!("{}/{}/{name}", group.class, dtype.name());
                    if list.iter().any(|known| known.class == group.class && known.dtype == dtype && known.name == name) {
                        return Err(CaseError::DuplicateId { id });
                    }
                    let problem = shape.problem(&group.class, direction, dtype)?;
                    list.push(ConvBenchProblem { class: group.class.clone(), dtype, name, problem });
                }
            }
        }
    }
    Ok(list)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    group: Vec<Group>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    class: String,
    directions: Vec<Direction>,
    dtypes: Vec<DTypeClass>,
    problems: Vec<ConvShape>,
}

/// The numbers of a convolution with packed channels-last tensors, as lists and command lines write them.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvShape {
    /// What it is called.
    pub name: String,
    /// Images.
    pub n: u64,
    /// Input channels.
    pub c: u64,
    /// Output channels.
    pub k: u64,
    /// Spatial extents of the input, one to three, outermost first.
    pub input: Vec<u64>,
    /// Of the filter.
    pub filter: Vec<u64>,
    /// In each dim.
    #[serde(default = "one")]
    pub stride: u64,
    /// On both sides of each dim.
    #[serde(default)]
    pub pad: u64,
    /// In each dim.
    #[serde(default = "one")]
    pub dilation: u64,
    /// Groups.
    #[serde(default = "one")]
    pub groups: u64,
}

fn one() -> u64 {
    1
}

impl ConvShape {
    /// The problem in one direction and type. `class` is named in errors.
    ///
    /// # Errors
    /// Not one to three spatial extents, or as many of the filter; extents that do not fit each other.
    pub fn problem(&self, class: &str, direction: Direction, dtype: DTypeClass) -> Result<ConvProblem, CaseError> {
        let rank = self.input.len();
        if !(1..=3).contains(&rank) || self.filter.len() != rank {
            return Err(CaseError::Field {
                group: class.to_owned(),
                field: "filter",
                value: format!("{:?} over {:?}", self.filter, self.input),
                rule: "there are one to three spatial extents, and as many of the filter",
            });
        }
        let three = |list: &[u64], fill: u64| {
            let mut all = [fill; 3];
            all[3 - rank..].copy_from_slice(list);
            all
        };
        let each = |value: u64, fill: u64| three(&vec![value; rank], fill);
        let extents = ConvExtents {
            direction,
            n: self.n,
            c: self.c,
            k: self.k,
            groups: self.groups,
            input: three(&self.input, 1),
            filter: three(&self.filter, 1),
            pads: each(self.pad, 0),
            strides: each(self.stride, 1),
            dilations: each(self.dilation, 1),
        };
        let (operands, result, precision) = dtype.types();
        ConvProblem::packed(extents, operands, result)
            .and_then(|problem| ConvProblem { precision, ..problem }.canonical())
            .map_err(|error| CaseError::Problem { id: format!("{class}/{}", self.name), source: Box::new(error) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_in_git_reads() {
        let list = load(include_str!("../../../bench/lists/conv.toml")).expect("the list reads");
        assert!(list.len() > 150, "{} rows", list.len());
        let strided = list.iter().find(|row| row.name == "resnet_3x3_128_s2-dgrad").expect("the row is there");
        assert_eq!((strided.problem.output, strided.problem.strides), ([1, 28, 28], [1, 2, 2]));
        assert_eq!(strided.problem.flops(), 2.0 * 256.0 * 784.0 * 128.0 * 128.0 * 9.0);
        let volume = list.iter().find(|row| row.name == "unet3d_32_64-fprop").expect("the row is there");
        assert_eq!(volume.problem.output, [128; 3]);
    }

    #[test]
    fn a_row_that_cannot_be_is_told() {
        let group = |problem: &str| {
            load(&format!("[[group]]\nclass = \"x\"\ndirections = [\"fprop\"]\ndtypes = [\"bf16\"]\nproblems = [{{ {problem} }}]"))
                .unwrap_err()
        };
        let rank = group("name = \"a\", n = 1, c = 8, k = 8, input = [4, 4], filter = [3]");
        assert!(rank.to_string().contains("as many of the filter"), "{rank}");
        let fit = group("name = \"a\", n = 1, c = 8, k = 8, input = [4, 4], filter = [5, 3]");
        assert!(fit.to_string().contains("x/a"), "{fit}");
    }
}
