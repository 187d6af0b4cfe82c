//! Conformance: every instruction of the table on the interpreter and on a device, on the same inputs.
//!
//! [`probes`] gives small programs with their inputs. Each says which bytes of its buffers are results, which entries of the table they
//! come from and by what rule two results agree ([`Rule`]): to the bit where PTX fixes the result, any NaN for NaN, inside the bound that
//! PTX gives for approximate instructions, and inside the bound of [`interp::matrix`](verdigris_kir::interp::matrix) for matrix products.
//! Whoever has a device runs the program there too and asks [`Probe::judge`] about both results.
//!
//! Inputs are seeded: zeros of both signs, subnormals, infinities, NaN, the largest and smallest values, halfway cases, values that
//! cancel, random bits and random numbers of ordinary size. Instructions of a family share a kernel, each with places of its own for its
//! results, so that the whole table is a few hundred launches.
//!
//! What no probe covers stands with its reason in [`EXCEPTIONS`].

mod atomics;
mod bulk;
mod judge;
mod kit;
mod lanes;
mod memory;
mod mma;
mod order;
mod pure;
mod tensor;
mod values;
mod wgmma;

pub use judge::{Mismatch, Outcome};

use verdigris_kir::inst::Op;
use verdigris_kir::interp::{Findings, Kernels, Memory, Options, run};
use verdigris_kir::ir::Ty;
use verdigris_kir::program::Program;

/// Entries of the table that no probe covers, with the reason.
pub const EXCEPTIONS: &[(&str, &str)] =
    &[("Trap", "ends the context with an error, after which nothing can be compared; its effect is the error itself")];

/// What a buffer holds before a probe runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contents {
    /// These bytes.
    Bytes(Vec<u8>),
    /// One value in all bytes.
    Filled {
        /// Size.
        bytes: usize,
        /// The value.
        value: u8,
    },
}

impl Contents {
    /// Size in bytes.
    pub fn len(&self) -> usize {
        match self {
            Contents::Bytes(bytes) => bytes.len(),
            Contents::Filled { bytes, .. } => *bytes,
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        match self {
            Contents::Bytes(bytes) => bytes.clone(),
            Contents::Filled { bytes, value } => vec![*value; *bytes],
        }
    }
}

/// A column of values in a buffer: `count` of them, `stride_bytes` apart, each `width_bytes` wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// The buffer.
    pub buffer: usize,
    /// Where the first value starts.
    pub offset_bytes: usize,
    /// Distance of the values.
    pub stride_bytes: usize,
    /// Bytes of each, at most 16.
    pub width_bytes: usize,
    /// How many.
    pub count: usize,
}

/// When two results agree.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// The same bits.
    Bits,
    /// The same bits, or NaN for NaN, in each number of this type.
    Number(Ty),
    /// As `Number`, or both within the bound that PTX gives for this approximate instruction. The first operand's column says at what.
    Approximate(Op, Ty),
    /// Numbers of this type within `relative · s` of each other and one unit in the last place, where `s` is the sum of the magnitudes of
    /// what was added: the result of [`Probe::magnitudes`] in the same place. Infinities and NaN alike.
    Product {
        /// f32, f64 or a pair of halves.
        ty: Ty,
        /// The bound.
        relative: f64,
    },
}

/// Results of one instruction.
#[derive(Clone, Debug)]
pub struct Check {
    /// The instruction with its attributes, or what is done with the instructions.
    pub what: String,
    /// Entries of the table that the result depends on.
    pub names: Vec<&'static str>,
    /// The results.
    pub result: Column,
    /// By what they agree.
    pub rule: Rule,
    /// The operands of each result, to be shown beside a mismatch.
    pub operands: Vec<Column>,
}

/// A program whose results are compared.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Its name, in which its family comes first: `pure/…`, `memory/…`.
    pub name: String,
    /// What is run.
    pub program: Program,
    /// The buffers of its slots.
    pub buffers: Vec<Contents>,
    /// What is compared. Bytes of the buffers that no check names must stay what they were.
    pub checks: Vec<Check>,
    /// For matrix products: a probe with the same buffers in which every term is positive.
    pub magnitudes: Option<Box<Probe>>,
}

/// All probes, in the order of the table's families. The same for every call.
pub fn probes() -> Vec<Probe> {
    let mut all = Vec::new();
    all.extend(pure::probes());
    all.extend(memory::probes());
    all.extend(atomics::probes());
    all.extend(lanes::probes());
    all.extend(mma::probes());
    all.extend(wgmma::probes());
    all.extend(bulk::probes());
    all.extend(tensor::probes());
    all.extend(order::probes());
    all
}

impl Probe {
    /// Runs it on the interpreter and returns what its buffers hold.
    ///
    /// # Errors
    /// What the verifier or the interpreter finds: a defect of the probe, or of them.
    pub fn interpret(&self, options: &Options) -> Result<Vec<Vec<u8>>, Findings> {
        let mut memory = Memory::new();
        for contents in &self.buffers {
            match contents {
                Contents::Bytes(bytes) => memory.add(bytes),
                Contents::Filled { bytes, value } => memory.add_filled(*bytes as u64, *value),
            };
        }
        run(&self.program, &Kernels::new(), &mut memory, options)?;
        Ok((0..self.buffers.len()).map(|slot| memory.to_vec(slot)).collect())
    }

    /// Compares two runs: the interpreter's and the device's, buffer by buffer. `magnitudes` is the interpreter's run of
    /// [`Probe::magnitudes`].
    pub fn judge(&self, interpreter: &[Vec<u8>], device: &[Vec<u8>], magnitudes: Option<&[Vec<u8>]>) -> Vec<Outcome> {
        self.checks.iter().map(|check| judge::judge(check, &self.buffers, interpreter, device, magnitudes)).collect()
    }

    /// The first byte that no check names and that is not what it was: buffer and offset.
    pub fn stray_byte(&self, after: &[Vec<u8>]) -> Option<(usize, usize)> {
        judge::stray_byte(self, after)
    }
}
