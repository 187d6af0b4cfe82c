//! A problem from the command line.

use anyhow::{Context, Result, bail};
use verdigris_engines::engine::Knobs;
use verdigris_graph::{Determinism, GemmProblem, HostScalar, Matrix, Precision, Slot};
use verdigris_tensor::DType;

/// One matrix product: `D[b, m, n] = A[b, m, k] · B[b, k, n]`, D row-major.
#[derive(clap::Args, Clone, Debug)]
pub struct ProblemArguments {
    /// Rows of A and D.
    #[arg(short, long)]
    pub m: Option<u64>,
    /// Columns of B and D.
    #[arg(short, long)]
    pub n: Option<u64>,
    /// Columns of A, rows of B.
    #[arg(short, long)]
    pub k: Option<u64>,
    /// Number of products.
    #[arg(long, default_value_t = 1)]
    pub batch: u64,
    /// Orders of A and B: n row-major, t column-major (`nt`: both run along k).
    #[arg(long, default_value = "nt")]
    pub layout: String,
    /// Leading dimension of A, in elements; default packed.
    #[arg(long)]
    pub lda: Option<u64>,
    /// Leading dimension of B.
    #[arg(long)]
    pub ldb: Option<u64>,
    /// Leading dimension of D.
    #[arg(long)]
    pub ldd: Option<u64>,
    /// Precision policy (f64, ieee, fp32, tf32, f16, fp8_fast, fp8_promoted, i32); default that of the type.
    #[arg(long)]
    pub precision: Option<String>,
    /// Type of D; default that of the type of A and B.
    #[arg(long)]
    pub out: Option<DType>,
    /// Ask for results that are the same bits at every run.
    #[arg(long)]
    pub deterministic: bool,
}

/// Checks the name given by `--engine`, if one is given.
///
/// # Errors
/// There is no engine of that name; these there are.
pub fn check_engine(name: Option<&str>) -> Result<()> {
    if let Some(name) = name
        && verdigris_engines::engine(name).is_none()
    {
        let known: Vec<&str> = verdigris_engines::engines().map(|engine| engine.id().name).collect();
        bail!("there is no engine `{name}`; the engines are {}", known.join(", "));
    }
    Ok(())
}

/// A problem, and what it is called in tables and records.
#[derive(Clone, Debug)]
pub struct Named {
    /// The group of the list that it is of.
    pub class: String,
    /// The type of its operands, as lists name types.
    pub dtype: String,
    /// Its extents and orders.
    pub name: String,
    /// The problem.
    pub problem: GemmProblem,
}

impl ProblemArguments {
    /// Whether a size was given at all.
    pub fn is_given(&self) -> bool {
        self.m.is_some() || self.n.is_some() || self.k.is_some()
    }

    /// What says more about a problem than its size, of that which was given another value than it has by itself.
    pub fn beside_the_size(&self) -> Vec<&'static str> {
        let given = [
            ("--batch", self.batch != 1),
            ("--layout", self.layout != "nt"),
            ("--lda", self.lda.is_some()),
            ("--ldb", self.ldb.is_some()),
            ("--ldd", self.ldd.is_some()),
            ("--precision", self.precision.is_some()),
            ("--out", self.out.is_some()),
            ("--deterministic", self.deterministic),
        ];
        given.into_iter().filter_map(|(name, is_given)| is_given.then_some(name)).collect()
    }

    /// The problem for operands of a type: an element type, or one of the classes of the bench lists (tf32, fp8, int8).
    ///
    /// # Errors
    /// An argument without a meaning, by its name; extents that no product has.
    pub fn problem(&self, dtype: &str) -> Result<Named> {
        let (Some(m), Some(n), Some(k)) = (self.m, self.n, self.k) else {
            bail!("a problem needs all of --m, --n and --k");
        };
        let (operands, mut result, mut precision) = types(dtype)?;
        if let Some(text) = &self.precision {
            precision = serde_json::from_value(serde_json::Value::String(text.clone())).ok().with_context(|| {
                format!("`{text}` is no precision policy; they are f64, ieee, fp32, tf32, f16, fp8_fast, fp8_promoted, i32")
            })?;
        }
        result = self.out.unwrap_or(result);
        let [a_letter, b_letter] = letters(&self.layout)?;
        let matrix = |name: &str, slot, dtype, letter, rows: u64, columns: u64, leading: Option<u64>| -> Result<Matrix> {
            let (packed, count) = if letter == 'n' { (columns, rows) } else { (rows, columns) };
            let leading = leading.unwrap_or(packed);
            if leading < packed {
                bail!("--{name} {leading} is less than the {packed} elements of a row as stored");
            }
            let (row_stride, column_stride) = if letter == 'n' { (leading, 1) } else { (1, leading) };
            let span = leading.checked_mul(count).with_context(|| format!("--{name} {leading}: more elements than 64 bits count"))?;
            Ok(Matrix { slot: Slot(slot), dtype, row_stride, column_stride, batch_strides: vec![span] })
        };
        let mut name = format!("{m}x{n}x{k}-{}", self.layout);
        if self.batch != 1 {
            name.insert_str(0, &format!("{}x", self.batch));
        }
        for (letter, leading) in [("a", self.lda), ("b", self.ldb), ("d", self.ldd)] {
            if let Some(leading) = leading {
                name += &format!("-ld{letter}{leading}");
            }
        }
        let problem = GemmProblem {
            batch: vec![self.batch],
            m,
            n,
            k,
            precision,
            determinism: if self.deterministic { Determinism::Repeatable } else { Determinism::Any },
            a: matrix("lda", 0, operands, a_letter, m, k, self.lda)?,
            b: matrix("ldb", 1, operands, b_letter, k, n, self.ldb)?,
            c: None,
            scale_a: None,
            scale_b: None,
            alpha: HostScalar::ONE,
            beta: HostScalar::ZERO,
            epilogue: Vec::new(),
            d: matrix("ldd", 2, result, 'n', m, n, self.ldd)?,
        };
        Ok(Named { class: "command-line".to_owned(), dtype: dtype.to_owned(), name, problem: problem.canonical()? })
    }
}

fn letters(text: &str) -> Result<[char; 2]> {
    match text.chars().collect::<Vec<_>>()[..] {
        [a @ ('n' | 't'), b @ ('n' | 't')] => Ok([a, b]),
        _ => bail!("--layout `{text}`: two letters, each n or t"),
    }
}

/// Type of A and B, type of D, and the precision.
fn types(dtype: &str) -> Result<(DType, DType, Precision)> {
    Ok(match dtype {
        "tf32" => (DType::F32, DType::F32, Precision::Tf32),
        "fp8" => (DType::E4m3, DType::Bf16, Precision::Fp8Fast),
        "int8" => (DType::I8, DType::I32, Precision::I32),
        _ => {
            let operands: DType = dtype.parse()?;
            let precision = Precision::usual(operands, operands).with_context(|| format!("matrices of {operands} are not multiplied"))?;
            let result = match operands {
                DType::E4m3 | DType::E5m2 => DType::Bf16,
                DType::I8 | DType::U8 => DType::I32,
                other => other,
            };
            (operands, result, precision)
        }
    })
}

/// Knobs as they are printed: `name=value,name=value`.
///
/// # Errors
/// The part that is not of that form.
pub fn knobs(text: &str) -> Result<Knobs, String> {
    let mut values = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (name, value) = part.split_once('=').ok_or_else(|| format!("`{part}` is not of the form name=value"))?;
        let value = value.trim().parse::<u32>().map_err(|_| format!("`{value}` is no whole number"))?;
        values.push((name.trim(), value));
    }
    Ok(Knobs::new(values))
}
