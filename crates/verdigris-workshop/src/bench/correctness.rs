//! A sample of a large result against the exact sums, and every element for having been written.

use anyhow::Result;
use rayon::prelude::*;
use verdigris_graph::{GemmProblem, Problem};
use verdigris_reference::compare::compare;
use verdigris_reference::data::{sample_positions, sentinel};
use verdigris_reference::run::{Expected, Inputs, Positions, run};
use verdigris_tensor::{DType, Layout};

/// Elements that are computed on the host.
const SAMPLES: u64 = 512;

/// Where the elements of a result lie: rows of columns one behind the other, in matrices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    dtype: DType,
    matrices: u64,
    matrix_stride: u64,
    rows: u64,
    row_stride: u64,
    columns: u64,
}

impl Shape {
    fn of(gemm: &GemmProblem) -> Shape {
        Shape {
            dtype: gemm.d.dtype,
            matrices: gemm.batch_count(),
            matrix_stride: gemm.d.batch_strides.first().copied().unwrap_or(0),
            rows: gemm.m,
            row_stride: gemm.d.row_stride,
            columns: gemm.n,
        }
    }

    /// A packed result.
    pub(super) fn packed(dtype: DType, elements: u64) -> Shape {
        Shape { dtype, matrices: 1, matrix_stride: 0, rows: 1, row_stride: elements, columns: elements }
    }
}

/// What must be in D at the sampled positions.
pub(super) struct Sample {
    shape: Shape,
    expected: Expected,
    /// Byte offset of each sampled element in D.
    offsets: Vec<usize>,
    /// Row-major position of each.
    positions: Vec<u64>,
}

/// How far a result is from right.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Judgement {
    /// What is wrong, if anything is.
    pub(super) fault: Option<String>,
    /// `‖got − want‖ / ‖want‖` over the sample.
    pub(super) relative_error: f64,
    /// The greatest distance in tolerances; at most 1 is right.
    pub(super) worst_in_tolerances: f64,
}

impl Sample {
    /// Computes the sample from the operands that the device holds.
    pub(super) fn new(gemm: &GemmProblem, a: Vec<u8>, b: Vec<u8>, seed: u64) -> Result<Sample> {
        let problem = Problem::Gemm(gemm.clone());
        let mut inputs = Inputs::default();
        inputs.buffers.insert(gemm.a.slot, a);
        inputs.buffers.insert(gemm.b.slot, b);
        let positions = sample_positions(gemm, SAMPLES, seed);
        let parts: Vec<Expected> = positions
            .par_chunks(16)
            .map(|chunk| run(&problem, &inputs, Positions::Some(chunk)).map(|mut outputs| outputs.remove(outputs.len() - 1)))
            .collect::<Result<_, _>>()?;
        let layout = gemm.d.layout(&gemm.batch, gemm.m, gemm.n)?;
        let size = gemm.d.dtype.bytes();
        let offsets = positions.iter().filter_map(|&position| layout.offset_of_position(position)).map(|offset| offset as usize * size);
        let expected = Expected {
            id: gemm.d.slot,
            dtype: gemm.d.dtype,
            // The sample itself, packed.
            layout: Layout::row_major(&[positions.len() as u64])?,
            positions: (0..positions.len() as u64).collect(),
            values: parts.iter().flat_map(|part| part.values.iter().copied()).collect(),
            magnitudes: parts.iter().flat_map(|part| part.magnitudes.iter().copied()).collect(),
        };
        Ok(Sample { shape: Shape::of(gemm), expected, offsets: offsets.collect(), positions })
    }

    /// A sample of a result that lies as `shape` says, from its expected elements.
    pub(super) fn of<Id>(shape: Shape, slot: verdigris_graph::Slot, expected: Expected<Id>) -> Result<Sample> {
        let size = expected.dtype.bytes();
        let place = |&position: &u64| expected.layout.offset_of_position(position).map(|offset| offset as usize * size);
        let offsets: Vec<usize> = expected.positions.iter().filter_map(place).collect();
        let count = offsets.len() as u64;
        let packed = Expected {
            id: slot,
            dtype: expected.dtype,
            layout: Layout::row_major(&[count])?,
            positions: (0..count).collect(),
            values: expected.values,
            magnitudes: expected.magnitudes,
        };
        Ok(Sample { shape, expected: packed, offsets, positions: expected.positions })
    }

    /// Holds D against the sample. D was full of the sentinel before, the guard behind it included. `read` gives its bytes,
    /// guard and all, part by part in order, each part with its offset, a multiple of 8.
    ///
    /// # Errors
    /// Those of `read`.
    pub(super) fn judge(&self, read: impl FnOnce(&mut dyn FnMut(u64, &[u8])) -> Result<()>) -> Result<Judgement> {
        let size = self.shape.dtype.bytes();
        let mut after: Vec<u8> = sentinel(self.shape.dtype).into_iter().cycle().take(self.offsets.len() * size).collect();
        let before = after.clone();
        let mut found = Scan::default();
        read(&mut |begin, part| {
            for (element, &offset) in after.chunks_exact_mut(size).zip(&self.offsets) {
                if let Some(bytes) = (offset as u64).checked_sub(begin).and_then(|place| part.get(place as usize..place as usize + size)) {
                    element.copy_from_slice(bytes);
                }
            }
            found += Scan::of(&self.shape, begin, part);
        })?;
        Ok(self.judgement(&before, &after, found))
    }

    fn judgement(&self, before: &[u8], after: &[u8], found: Scan) -> Judgement {
        let shape = &self.shape;
        let report = compare(&self.expected, before, after);
        let mut faults = Vec::new();
        if !report.passes() {
            let mut text = report.to_string();
            if let Some(worst) = &report.worst {
                let position = self.positions[worst.index[0] as usize];
                text += &match shape.rows {
                    1 => format!(" (sample {}: element {position}, counted row-major)", worst.index[0]),
                    rows => {
                        let (row, column) = (position / shape.columns % rows, position % shape.columns);
                        format!(" (sample {}: row {row}, column {column} of D)", worst.index[0])
                    }
                };
            }
            faults.push(text);
        }
        // 0xa5… may be a right answer of an integer result, but hardly of a large part of them.
        let elements = shape.rows * shape.columns * shape.matrices;
        if found.unwritten > 0 && !(shape.dtype.is_integer() && found.unwritten * 1000 < elements) {
            faults.push(format!("{} elements of D were not written", found.unwritten));
        }
        if found.strays > 0 {
            faults.push(format!("{} bytes were written that belong to no element of D", found.strays));
        }
        let worst = report.worst.as_ref().map_or(0.0, |worst| {
            let distance = (worst.got - worst.want).abs();
            if distance == 0.0 { 0.0 } else { distance / worst.tolerance }
        });
        Judgement {
            fault: (!faults.is_empty()).then(|| faults.join("; ")),
            relative_error: report.relative_frobenius,
            worst_in_tolerances: worst,
        }
    }

    /// As [`Sample::judge`], of bytes at hand; in uneven parts, as they may come from a device.
    #[cfg(test)]
    pub(super) fn judge_bytes(&self, d: &[u8]) -> Judgement {
        let judged = self.judge(|take| {
            let mut begin = 0;
            for (i, part) in d.chunks(8 * 37).enumerate() {
                take(begin, part);
                begin += part.len() as u64;
                assert!(i == 0 || !part.is_empty());
            }
            Ok(())
        });
        judged.expect("reading cannot fail")
    }
}

/// Bytes that one task looks through.
const TASK_BYTES: usize = 1 << 19;

/// What is in D beside right and wrong numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Scan {
    /// Elements that still hold the sentinel.
    unwritten: u64,
    /// Bytes between and behind the rows that no longer do. Between rows they are counted of a single matrix.
    strays: u64,
}

impl std::ops::AddAssign for Scan {
    fn add_assign(&mut self, other: Scan) {
        self.unwritten += other.unwritten;
        self.strays += other.strays;
    }
}

impl Scan {
    /// Looks through a part of D and its guard, which begins at `begin`.
    fn of(shape: &Shape, begin: u64, part: &[u8]) -> Scan {
        let tasks = part.par_chunks(TASK_BYTES).enumerate();
        let scans = tasks.map(|(i, bytes)| Scan::of_task(shape, begin + (i * TASK_BYTES) as u64, bytes));
        scans.reduce(Scan::default, |mut one, other| {
            one += other;
            one
        })
    }

    fn of_task(shape: &Shape, begin: u64, bytes: &[u8]) -> Scan {
        let size = shape.dtype.bytes() as u64;
        let pattern = sentinel(shape.dtype);
        let (row_bytes, row_stride_bytes) = (shape.columns * size, shape.row_stride * size);
        let end = begin + bytes.len() as u64;
        // The part of bytes `from..to` of D that is here.
        let here = |from: u64, to: u64| {
            let (from, to) = (from.clamp(begin, end) - begin, to.clamp(begin, end) - begin);
            bytes.get(from as usize..to as usize).unwrap_or_default()
        };
        let is_stray = |from: u64, (i, byte): (usize, &u8)| *byte != pattern[(from as usize + i) % pattern.len()];
        let strays = |from: u64, to: u64| {
            let from = from.clamp(begin, end);
            here(from, to).iter().enumerate().filter(|&item| is_stray(from, item)).count() as u64
        };
        let mut found = Scan::default();
        let matrix_bytes = shape.rows.saturating_sub(1) * row_stride_bytes + row_bytes;
        let mut d_bytes = 0;
        for matrix in 0..shape.matrices {
            let base = matrix * shape.matrix_stride * size;
            d_bytes = d_bytes.max(base + matrix_bytes);
            if base >= end || base + matrix_bytes <= begin {
                continue;
            }
            let row_of = |byte: u64| byte.saturating_sub(base).checked_div(row_stride_bytes).unwrap_or(0).min(shape.rows - 1);
            for row in row_of(begin)..=row_of(end - 1) {
                let start = base + row * row_stride_bytes;
                found.unwritten += equal_elements(here(start, start + row_bytes), &pattern);
                if shape.matrices == 1 && row + 1 < shape.rows {
                    found.strays += strays(start + row_bytes, start + row_stride_bytes);
                }
            }
        }
        found.strays += strays(d_bytes, u64::MAX);
        found
    }
}

/// How many elements have these bytes; `pattern` is one element.
fn equal_elements(bytes: &[u8], pattern: &[u8]) -> u64 {
    fn count<const N: usize>(bytes: &[u8], pattern: [u8; N]) -> u64 {
        let (elements, _) = bytes.as_chunks::<N>();
        elements.iter().map(|element| u64::from(*element == pattern)).sum()
    }
    match *pattern {
        [a] => count(bytes, [a]),
        [a, b] => count(bytes, [a, b]),
        [a, b, c, d] => count(bytes, [a, b, c, d]),
        _ => bytes.chunks_exact(pattern.len()).filter(|element| *element == pattern).count() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_reference::data::{Distribution, GUARD_BYTES, inputs};
    use verdigris_tensor::DType;

    fn setup() -> (Sample, Vec<u8>) {
        let mut gemm = GemmProblem::packed(33, 40, 17, DType::Bf16, DType::Bf16).expect("a plain product");
        gemm.d.row_stride = 48;
        let problem = Problem::Gemm(gemm.clone());
        let given = inputs(&problem, Distribution::Normal, 7);
        let whole = run(&problem, &given, Positions::All).expect("computes").remove(0);
        let span = whole.layout.span_elements() as usize * 2;
        let before: Vec<u8> = sentinel(DType::Bf16).into_iter().cycle().take(span + GUARD_BYTES).collect();
        let right = whole.rounded(&before);
        let (a, b) = (given.buffers[&gemm.a.slot].clone(), given.buffers[&gemm.b.slot].clone());
        let sample = Sample::new(&gemm, a, b, 3).expect("samples");
        (sample, right)
    }

    #[test]
    fn a_right_result_passes_and_each_kind_of_wrong_one_does_not() {
        let (sample, right) = setup();
        let judgement = sample.judge_bytes(&right);
        assert_eq!(judgement.fault, None);
        assert!(judgement.worst_in_tolerances <= 1.0 && judgement.relative_error < 0.01);

        // The last element of the last row is always in the sample.
        let mut wrong = right.clone();
        let last = (32 * 48 + 39) * 2;
        wrong[last + 1] ^= 0x80;
        assert!(sample.judge_bytes(&wrong).fault.is_some_and(|text| text.contains("row 32, column 39")));

        let mut unwritten = right.clone();
        let element = (5 * 48 + 7) * 2;
        unwritten[element..element + 2].copy_from_slice(&sentinel(DType::Bf16));
        assert!(sample.judge_bytes(&unwritten).fault.is_some_and(|text| text.contains("1 elements of D were not written")));

        for stray in [(4 * 48 + 41) * 2, right.len() - 1] {
            let mut strayed = right.clone();
            strayed[stray] ^= 1;
            let fault = sample.judge_bytes(&strayed).fault;
            assert!(fault.as_ref().is_some_and(|text| text.contains("1 bytes were written")), "{fault:?}");
        }
    }
}
