//! The first batches of a model: every planned size is run, and rows are shown to be apart.
//!
//! Rows of a batch belong to different requests, and the rows that fill a batch up to a planned size to nobody. A graph that normalizes or
//! sums over the batch would let them change each other's results. That cannot be seen from shapes, so it is tried: one row of a batch is
//! replaced, and the bits of all others have to stay.

use crate::error::LoadError;
use crate::executor::{Executor, Port};
use crate::model::Signature;

/// Numbers for the warm-up: the same at each start (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Rows of a port: floats from −1 to 1, integers and truth values 0 or 1, which are indices that every table has.
    fn rows(&mut self, port: &Port, rows: u64) -> Vec<u8> {
        let size = port.dtype.bytes();
        let mut bytes = vec![0; port.row_bytes() * rows as usize];
        for element in bytes.chunks_exact_mut(size) {
            let bits = self.next();
            if port.dtype.is_float() {
                let value = (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
                // A chunk is as long as an element.
                let _ = verdigris::tensor::num::write_element(port.dtype, value, element);
            } else {
                element[0] = (bits & 1) as u8;
            }
        }
        bytes
    }
}

/// Runs every batch size, and tries whether a row changes with another. `false` where two runs of one batch differ, so that nothing can be
/// told.
///
/// # Errors
/// [`LoadError::Warm`], [`LoadError::CoupledRows`], [`LoadError::Ended`] once `goes_on` said no.
pub(crate) fn prove_rows_apart(
    signature: &Signature,
    executor: &mut dyn Executor,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<bool, LoadError> {
    let mut numbers = Numbers(7);
    let mut is_proved = true;
    for &batch in &signature.batch_sizes {
        if !goes_on() {
            return Err(LoadError::Ended { model: signature.name.clone() });
        }
        let mut run = |inputs: &[Vec<u8>]| -> Result<Vec<Vec<u8>>, LoadError> {
            let failed = |message| LoadError::Warm { model: signature.name.clone(), batch, message };
            let results = executor.execute(batch, inputs).map_err(|error| failed(error.message))?;
            let lengths: Vec<usize> = results.iter().map(Vec::len).collect();
            let wanted: Vec<usize> = signature.outputs.iter().map(|port| port.row_bytes() * batch as usize).collect();
            if lengths != wanted {
                return Err(failed(format!("results are {lengths:?} bytes long, wanted are {wanted:?}")));
            }
            Ok(results)
        };
        let inputs: Vec<Vec<u8>> = signature.inputs.iter().map(|port| numbers.rows(port, batch)).collect();
        let before = run(&inputs)?;
        if batch == 1 {
            continue;
        }
        if run(&inputs)? != before {
            is_proved = false;
            continue;
        }
        for (other, zeros) in [(batch - 1, true), (batch - 1, false), (0, false)] {
            let mut changed = inputs.clone();
            for (bytes, port) in changed.iter_mut().zip(&signature.inputs) {
                let row = if zeros { vec![0; port.row_bytes()] } else { numbers.rows(port, 1) };
                bytes[other as usize * port.row_bytes()..][..port.row_bytes()].copy_from_slice(&row);
            }
            let after = run(&changed)?;
            for ((port, before), after) in signature.outputs.iter().zip(&before).zip(&after) {
                let rows = before.chunks_exact(port.row_bytes()).zip(after.chunks_exact(port.row_bytes()));
                if let Some((row, _)) = rows.enumerate().find(|(row, (a, b))| *row as u64 != other && a != b) {
                    let (model, output) = (signature.name.clone(), port.name.clone());
                    return Err(LoadError::CoupledRows { model, batch, output, row: row as u64, other });
                }
            }
        }
    }
    Ok(is_proved)
}
