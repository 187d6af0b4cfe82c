//! The problem lists of the benches (`bench/lists/*.toml`): fixed in git, so that a ratio is always over the same problems.
//!
//! A file is a list of `[[group]]`s; a group is the product of `problems`, `layouts` and `dtypes`. The list's own head says what the
//! fields mean.

use std::path::Path;

use serde::Deserialize;
use verdigris_graph::{Determinism, GemmProblem, HostScalar, Precision};
use verdigris_tensor::DType;

use crate::cases::{CaseError, NoMatrix, Placement};

/// The types of a list's problem.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DTypeClass {
    /// bf16 operands and result.
    Bf16,
    /// f16 operands and result.
    F16,
    /// f32 operands and result, multiplied as tf32.
    Tf32,
    /// f32 operands and result, multiplied as exactly.
    F32,
    /// e4m3 operands, bf16 result, the tensor core's own accumulation.
    Fp8,
    /// i8 operands, i32 result.
    Int8,
}

impl DTypeClass {
    /// The name used in lists and records.
    pub const fn name(self) -> &'static str {
        match self {
            DTypeClass::Bf16 => "bf16",
            DTypeClass::F16 => "f16",
            DTypeClass::Tf32 => "tf32",
            DTypeClass::F32 => "f32",
            DTypeClass::Fp8 => "fp8",
            DTypeClass::Int8 => "int8",
        }
    }

    /// Type of A and B, type of D, and the precision.
    pub const fn types(self) -> (DType, DType, Precision) {
        match self {
            DTypeClass::Bf16 => (DType::Bf16, DType::Bf16, Precision::Fp32),
            DTypeClass::F16 => (DType::F16, DType::F16, Precision::Fp32),
            DTypeClass::Tf32 => (DType::F32, DType::F32, Precision::Tf32),
            DTypeClass::F32 => (DType::F32, DType::F32, Precision::Fp32),
            DTypeClass::Fp8 => (DType::E4m3, DType::Bf16, Precision::Fp8Fast),
            DTypeClass::Int8 => (DType::I8, DType::I32, Precision::I32),
        }
    }
}

/// One problem of a list.
#[derive(Clone, PartialEq, Debug)]
pub struct BenchProblem {
    /// The class it counts in (`square`, `deepbench`, `unaligned`, …).
    pub class: String,
    /// Its types.
    pub dtype: DTypeClass,
    /// `MxNxK-LAYOUTS`, with batch and leading dimensions where they are not the plain ones.
    pub name: String,
    /// What is asked.
    pub problem: GemmProblem,
}

/// Reads a list.
///
/// # Errors
/// All of [`CaseError`].
pub fn load_file(path: &Path) -> Result<Vec<BenchProblem>, CaseError> {
    let text = std::fs::read_to_string(path).map_err(|source| CaseError::Io { path: path.display().to_string(), source })?;
    load(&text)
}

/// Reads the text of a list, in the order in which it stands there.
///
/// # Errors
/// All of [`CaseError`] but `Io`.
pub fn load(text: &str) -> Result<Vec<BenchProblem>, CaseError> {
    let file: File = toml::from_str(text).map_err(|error| CaseError::Syntax(Box::new(error)))?;
    let mut list: Vec<BenchProblem> = Vec::new();
    for group in &file.group {
        for size in &group.problems {
            for letters in &group.layouts {
                for &dtype in &group.dtypes {
                    let row = size.problem(&group.class, letters, dtype)?;
                    let same = |known: &BenchProblem| (&known.class, known.dtype, &known.name) == (&row.class, row.dtype, &row.name);
                    if list.iter().any(same) {
                        return Err(CaseError::DuplicateId { id: format!("{}/{}/{}", row.class, row.dtype.name(), row.name) });
                    }
                    list.push(row);
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
    layouts: Vec<String>,
    dtypes: Vec<DTypeClass>,
    problems: Vec<Size>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Size {
    #[serde(default = "one")]
    batch: u64,
    m: u64,
    n: u64,
    k: u64,
    lda: Option<u64>,
    ldb: Option<u64>,
    ldd: Option<u64>,
}

fn one() -> u64 {
    1
}

impl Size {
    fn problem(&self, class: &str, letters: &str, dtype: DTypeClass) -> Result<BenchProblem, CaseError> {
        let Size { batch, m, n, k, .. } = *self;
        let mut name = format!("{m}x{n}x{k}-{letters}");
        if batch != 1 {
            name.insert_str(0, &format!("{batch}x"));
        }
        for (letter, leading) in [("a", self.lda), ("b", self.ldb), ("d", self.ldd)] {
            if let Some(leading) = leading {
                name.push_str(&format!("-ld{letter}{leading}"));
            }
        }
        let field = |field, value: String, rule| CaseError::Field { group: class.to_owned(), field, value, rule };
        let [a_letter @ ('n' | 't'), b_letter @ ('n' | 't')] = letters.chars().collect::<Vec<_>>()[..] else {
            return Err(field("layouts", letters.to_owned(), "two letters, each n or t"));
        };
        let (operands, result, precision) = dtype.types();
        let batch_dims = [batch];
        let mut place = Placement::new(&batch_dims, 0);
        let mut matrix = |dtype, letter, rows, columns, name, leading: Option<u64>| {
            let packed = if letter == 'n' { columns } else { rows };
            let pad = leading.unwrap_or(packed).checked_sub(packed);
            let pad = pad.ok_or_else(|| field(name, format!("{leading:?}"), "a leading dimension is at least the packed one"))?;
            place.matrix(dtype, letter, rows, columns, pad, false).map_err(|why| match why {
                NoMatrix::Letter(letter) => field("layouts", letter.to_string(), "two letters, each n or t"),
                NoMatrix::TooLarge { rows, columns } => field(
                    "problems",
                    format!("{batch} of {rows}x{columns}"),
                    "all elements, with their leading dimensions, are counted by 64 bits",
                ),
            })
        };
        let problem = GemmProblem {
            batch: vec![batch],
            m,
            n,
            k,
            precision,
            determinism: Determinism::Any,
            a: matrix(operands, a_letter, m, k, "lda", self.lda)?,
            b: matrix(operands, b_letter, k, n, "ldb", self.ldb)?,
            c: None,
            scale_a: None,
            scale_b: None,
            alpha: HostScalar::ONE,
            beta: HostScalar::ZERO,
            epilogue: Vec::new(),
            d: matrix(result, 'n', m, n, "ldd", self.ldd)?,
        };
        let problem = problem.canonical().map_err(|error| CaseError::Problem { id: name.clone(), source: Box::new(error) })?;
        Ok(BenchProblem { class: class.to_owned(), dtype, name, problem })
    }
}
