//! The case files: test problems that every engine that accepts them is run on.
//!
//! A file is TOML, a list of `[[group]]`s. A group is the product of its sizes and its operand layouts:
//!
//! ```toml
//! [[group]]
//! id = "bf16-edges"            # unique in the file; part of each case's id
//! a = "bf16"                   # type of A; `b` and `d` are the same unless given
//! d = "f32"
//! precision = "fp32"           # default: the usual policy of the operands' types
//! layouts = ["nn", "nt"]       # orders of A and B: n row-major, t column-major, s strided both ways; default ["nn"]
//! d_layout = "n"               # the same for D, and for C, residuals and auxiliary outputs; default "n"
//! sizes = [[64, 16, 16]]       # m, n, k; and/or the product of:
//! m = [1, { around = 64 }]     # around = 63, 64, 65
//! n = [16]
//! k = [16]
//! batch = [2, 3]               # batch dims, default none
//! broadcast = ["b"]            # operands (a, b, c) that all batches share
//! pad = { a = 1, b = 0, c = 0, d = 8 } # added to the packed leading dimension
//! batch_gap = 5                # elements between the matrices of a batch
//! run_gap = 4                  # elements behind each run of a batch dim, before the next one of the dim outside: such dims are not one
//! alpha = 0.5                  # or "bound": passed at execution; default 1
//! beta = 1.0                   # default 0
//! c = "bf16"                   # type of C, default none
//! in_place = false             # C in D's buffer
//! scale_a = "tensor"           # or [outer, k]: one factor a block; also scale_b
//! epilogue = [                 # in order
//!     { binary = { f = "add", dtype = "f32", per = "n" } },   # per: n, m, element, tensor; v_is_right = false
//!     { unary = "relu" }, { unary = { leaky_relu = { slope = 0.1 } } },
//!     { scale = 0.5 }, { round = "bf16" }, { store = "bf16" },
//!     { random = { f = "mul", through = [{ affine = { scale = -1.0, shift = 0.5 } }, "relu", "not"] } }, # also per, distribution, v_is_right, by_value
//! ]
//! data = "normal"              # a `Distribution`
//! deterministic = true         # default false
//! bounds = [                   # on what the interpreter counts, default none: see `Bounds`
//!     { engine = "gemm.mma", knobs = { tile = 128 }, global_bytes_ratio = 1.9, sectors_per_request = 16.1, instructions = { integer = 40 } },
//! ]
//! ```

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde::Deserialize;
use verdigris_graph::{
    BinaryOp, Determinism, Drawn, EpilogueStep, Error, GemmProblem, HostScalar, Matrix, Precision, Problem, Real, Scale, Slot, UnaryOp,
};
use verdigris_tensor::DType;

use crate::data::Distribution;

/// One test problem.
#[derive(Clone, PartialEq, Debug)]
pub struct Case {
    /// `gemm/GROUP/LAYOUTS/MxNxK`, unique in its file.
    pub id: String,
    /// What is asked.
    pub problem: Problem,
    /// What the operands look like.
    pub distribution: Distribution,
    /// Seed of the inputs, made from the id.
    pub seed: u64,
    /// What it may cost engines.
    pub bounds: Vec<Bounds>,
}

/// What a case may cost an engine at most, in counts of the interpreter: a slower kernel shows on a machine without a GPU. A bound is a few per
/// cent above what the kernel needs; whoever makes it need more says why where he raises it.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// The engine.
    pub engine: String,
    /// The part of its setting that is meant; runs by other settings are not held to it.
    #[serde(default)]
    pub knobs: BTreeMap<String, u32>,
    /// Bytes that were asked for in global memory, over the different ones of them; loads and stores together.
    pub global_bytes_ratio: Option<f64>,
    /// Sectors of 32 bytes that a warp's load or store of global memory touches in the mean.
    pub sectors_per_request: Option<f64>,
    /// Turns that a warp's access to shared memory takes in the mean.
    pub wavefronts_per_access: Option<f64>,
    /// Multiply-adds of the tensor cores, over those of the problem.
    pub mac_ratio: Option<f64>,
    /// Instructions that warps issue for 1,000 multiply-adds of the problem, by class (`move`, `integer`, `float`, `memory`, …).
    #[serde(default)]
    pub instructions: BTreeMap<String, f64>,
}

/// Cases that one group may stand for.
pub(crate) const MOST_CASES: usize = 100_000;
pub(crate) const MOST_CASES_RULE: &str = "a group is of at most 100000 cases";

/// What can be wrong with a case file.
#[derive(Debug, thiserror::Error)]
pub enum CaseError {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// Why not.
        source: std::io::Error,
    },
    /// The text is not of the format.
    #[error("{0}")]
    Syntax(Box<toml::de::Error>),
    /// A group that has no size or no layout, or a word with no meaning.
    #[error("group `{group}`: {field} = {value}; {rule}")]
    Field {
        /// The group.
        group: String,
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        rule: &'static str,
    },
    /// A problem that breaks a rule of its own.
    #[error("case `{id}`: {source}")]
    Problem {
        /// The case.
        id: String,
        /// The rule.
        source: Box<Error>,
    },
    /// Two cases of one id.
    #[error("case `{id}` is there twice; ids are unique")]
    DuplicateId {
        /// The id.
        id: String,
    },
}

/// Reads a case file. Its stem (`gemm`) begins every id.
///
/// # Errors
/// All of [`CaseError`].
pub fn load_file(path: &Path) -> Result<Vec<Case>, CaseError> {
    let text = std::fs::read_to_string(path).map_err(|source| CaseError::Io { path: path.display().to_string(), source })?;
    load(&path.file_stem().unwrap_or_default().to_string_lossy(), &text)
}

/// Reads the text of a case file; `family` begins every id.
///
/// # Errors
/// All of [`CaseError`] but `Io`.
pub fn load(family: &str, text: &str) -> Result<Vec<Case>, CaseError> {
    let file: File = toml::from_str(text).map_err(|error| CaseError::Syntax(Box::new(error)))?;
    let mut cases = Vec::new();
    let mut ids = HashSet::new();
    for group in &file.group {
        for case in group.cases(family)? {
            if !ids.insert(case.id.clone()) {
                return Err(CaseError::DuplicateId { id: case.id });
            }
            cases.push(case);
        }
    }
    Ok(cases)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    group: Vec<Group>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    id: String,
    a: DType,
    b: Option<DType>,
    d: Option<DType>,
    precision: Option<Precision>,
    #[serde(default = "row_major_operands")]
    layouts: Vec<String>,
    #[serde(default = "row_major")]
    d_layout: char,
    #[serde(default)]
    sizes: Vec<[u64; 3]>,
    #[serde(default)]
    m: Vec<Extent>,
    #[serde(default)]
    n: Vec<Extent>,
    #[serde(default)]
    k: Vec<Extent>,
    #[serde(default)]
    batch: Vec<u64>,
    #[serde(default)]
    broadcast: Vec<String>,
    #[serde(default)]
    pad: Pad,
    #[serde(default)]
    batch_gap: u64,
    #[serde(default)]
    run_gap: u64,
    alpha: Option<ScalarText>,
    beta: Option<ScalarText>,
    c: Option<DType>,
    #[serde(default)]
    in_place: bool,
    scale_a: Option<ScaleText>,
    scale_b: Option<ScaleText>,
    #[serde(default)]
    epilogue: Vec<StepText>,
    #[serde(default = "normal")]
    data: Distribution,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    bounds: Vec<Bounds>,
}

fn row_major_operands() -> Vec<String> {
    vec!["nn".to_owned()]
}

fn row_major() -> char {
    'n'
}

fn normal() -> Distribution {
    Distribution::Normal
}

#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
enum Extent {
    One(u64),
    Around { around: u64 },
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Pad {
    a: u64,
    b: u64,
    c: u64,
    d: u64,
}

/// A factor: a number, or `"bound"`.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum ScalarText {
    Fixed(f64),
    Word(String),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ScaleText {
    Block([u64; 2]),
    Word(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum StepText {
    Unary(UnaryOp),
    Binary {
        f: BinaryOp,
        dtype: DType,
        per: Per,
        #[serde(default)]
        v_is_right: bool,
    },
    Random {
        f: BinaryOp,
        #[serde(default)]
        through: Vec<UnaryOp>,
        #[serde(default = "per_element")]
        per: Per,
        #[serde(default)]
        distribution: Drawn,
        #[serde(default)]
        v_is_right: bool,
        /// Seed and offset are integers of the host.
        #[serde(default)]
        by_value: bool,
    },
    Scale(ScalarText),
    Round(DType),
    Store(DType),
}

fn per_element() -> Per {
    Per::Element
}

/// How an epilogue operand is broadcast.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Per {
    N,
    M,
    Element,
    Tensor,
}

impl Per {
    /// One element for each of these.
    fn of(self, full: Matrix) -> Matrix {
        let (row_stride, column_stride) = match self {
            Per::Element => return full,
            Per::N => (0, 1),
            Per::M => (1, 0),
            Per::Tensor => (0, 0),
        };
        Matrix { row_stride, column_stride, batch_strides: vec![0; full.batch_strides.len()], ..full }
    }
}

/// Places matrices in buffers: packed, or with padding, batch after batch.
pub(crate) struct Placement<'a> {
    pub(crate) batch: &'a [u64],
    pub(crate) batch_gap: u64,
    /// Elements behind each run of a batch dim.
    pub(crate) run_gap: u64,
    next_slot: u32,
}

impl<'a> Placement<'a> {
    pub(crate) fn new(batch: &'a [u64], batch_gap: u64) -> Placement<'a> {
        Placement { batch, batch_gap, run_gap: 0, next_slot: 0 }
    }

    pub(crate) fn slot(&mut self) -> Slot {
        self.next_slot += 1;
        Slot(self.next_slot - 1)
    }

    /// A matrix in a buffer of its own.
    ///
    /// # Errors
    /// `letter` is no layout, or the places of the elements are beyond 64 bits.
    pub(crate) fn matrix(
        &mut self,
        dtype: DType,
        letter: char,
        rows: u64,
        columns: u64,
        pad: u64,
        is_shared: bool,
    ) -> Result<Matrix, NoMatrix> {
        if !['n', 't', 's'].contains(&letter) {
            return Err(NoMatrix::Letter(letter));
        }
        let too_large = || NoMatrix::TooLarge { rows, columns };
        let (row_stride, column_stride, span) = strides(letter, rows, columns, pad).ok_or_else(too_large)?;
        let mut batch_strides = vec![0; self.batch.len()];
        if !is_shared {
            let mut stride = span.checked_add(self.batch_gap).ok_or_else(too_large)?;
            for (entry, extent) in batch_strides.iter_mut().zip(self.batch).rev() {
                *entry = stride;
                stride = stride.checked_mul(*extent).and_then(|run| run.checked_add(self.run_gap)).ok_or_else(too_large)?;
            }
        }
        Ok(Matrix { slot: self.slot(), dtype, row_stride, column_stride, batch_strides })
    }
}

/// Why a matrix has no place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NoMatrix {
    /// No layout is called that.
    Letter(char),
    /// Strides, or the elements of all batches with their gaps, are more than 64 bits count.
    TooLarge { rows: u64, columns: u64 },
}

/// Of rows, of columns, and the elements from the first to behind the last; `None` where 64 bits do not hold them.
fn strides(letter: char, rows: u64, columns: u64, pad: u64) -> Option<(u64, u64, u64)> {
    let (line, lines, step) = match letter {
        'n' => (columns.checked_add(pad)?, rows, 1),
        't' => (rows.checked_add(pad)?, columns, 1),
        _ => (columns.checked_mul(2)?.checked_add(1)?.checked_add(pad)?, rows, 2),
    };
    let span = lines.checked_mul(line)?;
    Some(if letter == 't' { (1, line, span) } else { (line, step, span) })
}

impl Group {
    fn field<T>(&self, field: &'static str, value: &str, rule: &'static str) -> Result<T, CaseError> {
        Err(CaseError::Field { group: self.id.clone(), field, value: value.to_owned(), rule })
    }

    fn no_matrix(&self, why: NoMatrix) -> CaseError {
        let (field, value, rule) = match why {
            NoMatrix::Letter(letter) => ("layouts", letter.to_string(), "n is row-major, t column-major, s strided both ways"),
            NoMatrix::TooLarge { rows, columns } => (
                "sizes",
                format!("{rows}x{columns} in batches of {:?}", self.batch),
                "all elements, with pads and gaps, are counted by 64 bits",
            ),
        };
        CaseError::Field { group: self.id.clone(), field, value, rule }
    }

    fn cases(&self, family: &str) -> Result<Vec<Case>, CaseError> {
        // Before they are made: three short lists can ask for more cases than memory holds.
        let counts = [&self.m, &self.n, &self.k].map(|list| spread(list).len());
        let count = counts.iter().try_fold(self.layouts.len(), |all, count| all.checked_mul(*count));
        if count.is_none_or(|count| count > MOST_CASES) {
            let [m, n, k] = counts;
            return self.field("m, n, k", &format!("{m} x {n} x {k} extents in {} layouts", self.layouts.len()), MOST_CASES_RULE);
        }
        let mut sizes = self.sizes.clone();
        for m in spread(&self.m) {
            for n in spread(&self.n) {
                sizes.extend(spread(&self.k).into_iter().map(|k| [m, n, k]));
            }
        }
        if sizes.is_empty() || self.layouts.is_empty() {
            return self.field("sizes", "[]", "a group has sizes (or m, n and k) and layouts");
        }
        for name in &self.broadcast {
            if !["a", "b", "c"].contains(&name.as_str()) {
                return self.field("broadcast", name, "a, b and c can be shared by all batches");
            }
        }
        let mut cases = Vec::new();
        for &[m, n, k] in &sizes {
            for letters in &self.layouts {
                let id = format!("{family}/{}/{letters}/{m}x{n}x{k}", self.id);
                let gemm = self.problem(letters, m, n, k)?;
                let mut gemm = gemm.canonical().map_err(|error| CaseError::Problem { id: id.clone(), source: Box::new(error) })?;
                gemm.number_slots();
                let seed = seed_of(&id);
                cases.push(Case { id, problem: Problem::Gemm(gemm), distribution: self.data, seed, bounds: self.bounds.clone() });
            }
        }
        Ok(cases)
    }

    fn problem(&self, letters: &str, m: u64, n: u64, k: u64) -> Result<GemmProblem, CaseError> {
        let [a_letter, b_letter] = letters.chars().collect::<Vec<_>>()[..] else {
            return self.field("layouts", letters, "a layout is two letters, of A and of B");
        };
        let no = |why| self.no_matrix(why);
        let mut place = Placement { run_gap: self.run_gap, ..Placement::new(&self.batch, self.batch_gap) };
        let shared = |name: &str| self.broadcast.iter().any(|known| known == name);
        let b_dtype = self.b.unwrap_or(self.a);
        let d_dtype = self.d.unwrap_or(self.a);
        let of_d = self.d_layout;

        let a = place.matrix(self.a, a_letter, m, k, self.pad.a, shared("a")).map_err(no)?;
        let b = place.matrix(b_dtype, b_letter, k, n, self.pad.b, shared("b")).map_err(no)?;
        let mut c = match self.c {
            None => None,
            Some(dtype) => Some(place.matrix(dtype, of_d, m, n, self.pad.c, shared("c")).map_err(no)?),
        };
        let scale_a = self.scale(&mut place, "scale_a", self.scale_a.as_ref(), m, k)?;
        let scale_b = self.scale(&mut place, "scale_b", self.scale_b.as_ref(), n, k)?;
        let alpha = self.scalar(&mut place, "alpha", self.alpha.as_ref(), HostScalar::ONE)?;
        let beta = self.scalar(&mut place, "beta", self.beta.as_ref(), HostScalar::ZERO)?;
        let mut epilogue = Vec::new();
        for step in &self.epilogue {
            epilogue.push(match step {
                StepText::Unary(f) => EpilogueStep::Unary(*f),
                StepText::Scale(factor) => {
                    EpilogueStep::Scale { factor: self.scalar(&mut place, "epilogue scale", Some(factor), HostScalar::ONE)? }
                }
                StepText::Round(dtype) => EpilogueStep::Round { dtype: *dtype },
                StepText::Store(dtype) => EpilogueStep::Store { target: place.matrix(*dtype, of_d, m, n, 0, false).map_err(no)? },
                StepText::Binary { f, dtype, per, v_is_right } => {
                    let full = place.matrix(*dtype, of_d, m, n, 0, false).map_err(no)?;
                    EpilogueStep::Binary { f: *f, operand: per.of(full), v_is_right: *v_is_right }
                }
                StepText::Random { f, through, per, distribution, v_is_right, by_value } => {
                    // Numbers count row-major over the batch and D, whatever order and gaps D has in memory.
                    let mut packed = Placement::new(&self.batch, 0);
                    let counts = packed.matrix(DType::U8, 'n', m, n, 0, false).map_err(no)?;
                    let number = Matrix { slot: place.slot(), ..per.of(counts) };
                    let (f, distribution, v_is_right) = (*f, *distribution, *v_is_right);
                    let offset = by_value.then(|| place.slot());
                    EpilogueStep::Random { f, v_is_right, distribution, number, offset, through: through.clone() }
                }
            });
        }
        let d = place.matrix(d_dtype, of_d, m, n, self.pad.d, false).map_err(no)?;
        if self.in_place {
            match &mut c {
                Some(c) => *c = d.clone(),
                None => return self.field("in_place", "true", "C in D's place needs a C"),
            }
        }
        let usual = || {
            Precision::usual(self.a, b_dtype).ok_or_else(|| CaseError::Field {
                group: self.id.clone(),
                field: "a",
                value: format!("{} with b = {b_dtype}", self.a),
                rule: "a GEMM multiplies f64, f32, f16, bf16, fp8 or 8-bit integers",
            })
        };
        Ok(GemmProblem {
            batch: self.batch.clone(),
            m,
            n,
            k,
            precision: self.precision.map_or_else(usual, Ok)?,
            determinism: if self.deterministic { Determinism::Repeatable } else { Determinism::Any },
            a,
            b,
            c,
            scale_a,
            scale_b,
            alpha,
            beta,
            epilogue,
            d,
        })
    }

    fn scalar(
        &self,
        place: &mut Placement<'_>,
        field: &'static str,
        text: Option<&ScalarText>,
        default: HostScalar<Slot>,
    ) -> Result<HostScalar<Slot>, CaseError> {
        match text {
            None => Ok(default),
            Some(ScalarText::Fixed(value)) => Ok(HostScalar::Fixed(Real(*value))),
            Some(ScalarText::Word(word)) if word == "bound" => Ok(HostScalar::Bound(place.slot())),
            Some(ScalarText::Word(word)) => self.field(field, word, "a factor is a number or \"bound\""),
        }
    }

    fn scale(
        &self,
        place: &mut Placement<'_>,
        field: &'static str,
        text: Option<&ScaleText>,
        extent: u64,
        k: u64,
    ) -> Result<Option<Scale>, CaseError> {
        match text {
            None => Ok(None),
            Some(ScaleText::Word(word)) if word == "tensor" => Ok(Some(Scale::Tensor { slot: place.slot() })),
            Some(ScaleText::Word(word)) => self.field(field, word, "a scale is \"tensor\" or a block [outer, k]"),
            Some(ScaleText::Block([outer, along_k])) => {
                if *outer == 0 || *along_k == 0 {
                    return self.field(field, "[0, …]", "a block is at least 1 by 1");
                }
                let (rows, columns) = (extent.div_ceil(*outer), k.div_ceil(*along_k));
                let factors = place.matrix(DType::F32, 'n', rows, columns, 0, false).map_err(|why| self.no_matrix(why))?;
                Ok(Some(Scale::Block { outer: *outer, k: *along_k, factors }))
            }
        }
    }
}

fn spread(extents: &[Extent]) -> Vec<u64> {
    (extents.iter())
        .flat_map(|extent| match *extent {
            Extent::One(value) => vec![value],
            Extent::Around { around } => vec![around.saturating_sub(1), around, around.saturating_add(1)],
        })
        .collect()
}

/// FNV-1a: a fixed seed for each id, whatever stands around it in the file.
pub(crate) fn seed_of(id: &str) -> u64 {
    id.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = i64::MAX as u64;

    fn group(fields: &str) -> CaseError {
        load("gemm", &format!("[[group]]\nid = \"x\"\na = \"bf16\"\n{fields}")).expect_err("no such case can be")
    }

    #[test]
    fn extents_beyond_64_bits_are_told() {
        for layouts in ["nn", "tt", "ss"] {
            for sizes in [[MOST, 2, 4], [MOST, MOST, 1], [4, MOST, MOST], [1 << 32, 1 << 32, 1 << 32]] {
                let error = group(&format!("layouts = [\"{layouts}\"]\nsizes = [{sizes:?}]\nbatch = [3]"));
                assert!(matches!(error, CaseError::Field { .. } | CaseError::Problem { .. }), "{layouts} {sizes:?}: {error}");
            }
        }
        let padded = group(&format!("sizes = [[4, 4, 4]]\npad = {{ a = {MOST} }}"));
        assert!(padded.to_string().contains("64 bits"), "{padded}");
        let apart = group(&format!("sizes = [[4, 4, 4]]\nbatch = [{MOST}, {MOST}]\nbatch_gap = {MOST}"));
        assert!(apart.to_string().contains("64 bits"), "{apart}");
    }

    #[test]
    fn runs_that_lie_apart_stay_two_batch_dims() {
        for (gap, batch) in [(0, vec![6]), (16, vec![2, 3])] {
            let text = format!("[[group]]\nid = \"x\"\na = \"f16\"\nsizes = [[4, 4, 4]]\nbatch = [2, 3]\nbatch_gap = 8\nrun_gap = {gap}\n");
            let cases = load("gemm", &text).expect("a case");
            let Problem::Gemm(gemm) = &cases[0].problem else { panic!("a product") };
            assert_eq!(gemm.batch, batch);
        }
    }

    #[test]
    fn more_cases_than_a_group_may_have_are_not_begun() {
        let many: Vec<u64> = (1..100).collect();
        let error = group(&format!("m = {many:?}\nn = {many:?}\nk = {many:?}"));
        assert!(error.to_string().contains("99 x 99 x 99") && error.to_string().contains("100000"), "{error}");
    }
}
