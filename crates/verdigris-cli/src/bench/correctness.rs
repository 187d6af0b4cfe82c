//! A sample of a large result against the exact sums, and every element for having been written.

use anyhow::Result;
use rayon::prelude::*;
use verdigris_graph::{GemmProblem, Problem};
use verdigris_reference::compare::compare;
use verdigris_reference::data::{GUARD_BYTES, sample_positions, sentinel};
use verdigris_reference::run::{Expected, Inputs, Positions, run};
use verdigris_tensor::Layout;

/// Elements that are computed on the host.
const SAMPLES: u64 = 512;

/// Where the elements of a result lie: rows of columns one behind the other, in matrices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    dtype: verdigris_tensor::DType,
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
    pub(super) fn packed(dtype: verdigris_tensor::DType, elements: u64) -> Shape {
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

    /// Holds D against the sample. `d` was full of the sentinel before, the guard behind it included.
    pub(super) fn judge(&self, d: &[u8]) -> Judgement {
        let shape = &self.shape;
        let size = shape.dtype.bytes();
        let after: Vec<u8> = self.offsets.iter().flat_map(|&offset| d[offset..offset + size].iter().copied()).collect();
        let before: Vec<u8> = sentinel(shape.dtype).into_iter().cycle().take(after.len()).collect();
        let report = compare(&self.expected, &before, &after);
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
        let (unwritten, strays) = scan(shape, d);
        if unwritten > 0 {
            faults.push(format!("{unwritten} elements of D were not written"));
        }
        if strays > 0 {
            faults.push(format!("{strays} bytes were written that belong to no element of D"));
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
}

/// Elements of a row-major D that still hold the sentinel, and bytes between and behind its rows that no longer do.
fn scan(shape: &Shape, d: &[u8]) -> (u64, u64) {
    let Shape { dtype, matrices, matrix_stride, rows, row_stride, columns } = *shape;
    let size = dtype.bytes();
    let pattern = sentinel(dtype);
    // 0xa5… may be a right answer of an integer result, but hardly of a large part of them.
    let may_be_right = dtype.is_integer();
    let row_bytes = columns as usize * size;
    let is_untouched = |element: &&[u8]| **element == pattern[..];
    let count_row = |start: usize| {
        let row = &d[start..start + row_bytes];
        // A single row may be the whole result.
        row.par_chunks(size << 16).map(|part| part.chunks_exact(size).filter(is_untouched).count() as u64).sum::<u64>()
    };
    let starts = (0..matrices * rows).into_par_iter().map(|row| (row / rows * matrix_stride + row % rows * row_stride) as usize * size);
    let unwritten: u64 = starts.map(count_row).sum();
    let body = d.len() - GUARD_BYTES;
    let is_sentinel = |(i, byte): (usize, &u8)| *byte != pattern[i % size];
    let mut strays = d[body..].iter().enumerate().filter(|&item| is_sentinel(item)).count() as u64;
    if matrices == 1 && row_stride > columns {
        for row in 0..rows - 1 {
            let begin = (row * row_stride + columns) as usize * size;
            let end = ((row + 1) * row_stride) as usize * size;
            strays += d[begin..end].iter().enumerate().filter(|&item| is_sentinel(item)).count() as u64;
        }
    }
    let elements = rows * columns * matrices;
    if may_be_right && unwritten * 1000 < elements { (0, strays) } else { (unwritten, strays) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_reference::data::{Distribution, inputs};
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
        let judgement = sample.judge(&right);
        assert_eq!(judgement.fault, None);
        assert!(judgement.worst_in_tolerances <= 1.0 && judgement.relative_error < 0.01);

        // The last element of the last row is always in the sample.
        let mut wrong = right.clone();
        let last = (32 * 48 + 39) * 2;
        wrong[last + 1] ^= 0x80;
        assert!(sample.judge(&wrong).fault.is_some_and(|text| text.contains("row 32, column 39")));

        let mut unwritten = right.clone();
        let element = (5 * 48 + 7) * 2;
        unwritten[element..element + 2].copy_from_slice(&sentinel(DType::Bf16));
        assert!(sample.judge(&unwritten).fault.is_some_and(|text| text.contains("1 elements of D were not written")));

        for stray in [(4 * 48 + 41) * 2, right.len() - 1] {
            let mut strayed = right.clone();
            strayed[stray] ^= 1;
            let fault = sample.judge(&strayed).fault;
            assert!(fault.as_ref().is_some_and(|text| text.contains("1 bytes were written")), "{fault:?}");
        }
    }
}
