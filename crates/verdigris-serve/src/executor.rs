//! Who computes batches: a device with plans, or, in tests, whatever behaves like one.

use std::collections::BTreeMap;

use verdigris::plan::PartEngine;
use verdigris::{DType, Device, HostValue, Layout, Plan, Tensor, Uid};

use crate::weights::placed;

/// A batch that could not be computed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ExecuteError {
    /// What is wrong.
    pub message: String,
    /// Whether memory was lacking, so that the same batch may work later.
    pub is_lack_of_memory: bool,
}

impl From<verdigris::Error> for ExecuteError {
    fn from(error: verdigris::Error) -> ExecuteError {
        ExecuteError { is_lack_of_memory: error.is_lack_of_memory(), message: error.to_string() }
    }
}

/// Computes batches of one model. Called from one thread, one batch after the other; a panic costs the batch and nothing else.
pub trait Executor: Send {
    /// Computes a batch of `planned_rows` rows, which is one of the model's batch sizes. Inputs and results are packed row-major with the
    /// rows outermost, in the order of the signature; rows that nobody asked for are zeros.
    ///
    /// # Errors
    /// Any; every request of the batch gets it as its answer.
    fn execute(&mut self, planned_rows: u64, inputs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, ExecuteError>;
}

/// One tensor that a client sends or gets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Port {
    /// Its name in the graph, and in requests.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// The extents of one row: those of the tensor without the batch, which is the first.
    pub row_dims: Vec<u64>,
}

impl Port {
    /// The bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.row_dims.iter().product::<u64>() as usize * self.dtype.bytes()
    }
}

/// A tensor of a plan, with its place in a request.
pub(crate) struct Place {
    pub(crate) uid: Uid,
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
}

impl Place {
    /// The elements packed row-major, from the bytes of the tensor.
    fn packed(&self, bytes: &[u8]) -> Vec<u8> {
        let size = self.dtype.bytes();
        let mut packed = Vec::with_capacity(self.layout.elements() as usize * size);
        for position in 0..self.layout.elements() {
            if let Some(offset) = self.layout.offset_of_position(position) {
                packed.extend_from_slice(&bytes[offset as usize * size..][..size]);
            }
        }
        packed
    }
}

/// The plan of one batch size.
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    /// In the order of the signature.
    pub(crate) inputs: Vec<Place>,
    /// In the order of the signature, each with its place among the plan's outputs.
    pub(crate) outputs: Vec<(usize, Place)>,
    /// On the device, shared by all batch sizes.
    pub(crate) weights: Vec<(Uid, Tensor)>,
    pub(crate) scalars: Vec<(Uid, HostValue)>,
}

/// A device with a plan for each batch size.
pub(crate) struct DeviceExecutor {
    pub(crate) device: Device,
    pub(crate) planned: BTreeMap<u64, Planned>,
}

impl DeviceExecutor {
    pub(crate) fn engines(&self) -> BTreeMap<u64, Vec<PartEngine>> {
        self.planned.iter().map(|(&rows, planned)| (rows, planned.plan.engines())).collect()
    }
}

impl Executor for DeviceExecutor {
    fn execute(&mut self, planned_rows: u64, inputs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, ExecuteError> {
        let Some(planned) = self.planned.get(&planned_rows) else {
            let known: Vec<&u64> = self.planned.keys().collect();
            let message = format!("no plan for a batch of {planned_rows} rows; there are plans for {known:?}");
            return Err(ExecuteError { message, is_lack_of_memory: false });
        };
        let mut tensors = Vec::with_capacity(inputs.len());
        for (place, packed) in planned.inputs.iter().zip(inputs) {
            let tensor = if place.layout.is_row_major() {
                Tensor::from_bytes(&self.device, place.dtype, place.layout, packed)?
            } else {
                Tensor::from_bytes(&self.device, place.dtype, place.layout, &placed(&place.layout, place.dtype, packed))?
            };
            tensors.push((place.uid, tensor));
        }
        let bound: Vec<(Uid, &Tensor)> = tensors.iter().chain(&planned.weights).map(|(uid, tensor)| (*uid, tensor)).collect();
        let results = self.device.run(&planned.plan, &bound, &planned.scalars)?;
        let mut packed = Vec::with_capacity(planned.outputs.len());
        for (index, place) in &planned.outputs {
            let bytes = results[*index].to_bytes()?;
            packed.push(if place.layout.is_row_major() { bytes } else { place.packed(&bytes) });
        }
        Ok(packed)
    }
}
