//! Labels of cross-entropy on the CPU, looked at before anything is computed: PyTorch refuses one that is no class.

use pyo3::PyResult;
use verdigris::recipe::{Function, Input, Targets};
use verdigris_tensor::{DType, Layout};

use crate::dlpack::DLTensor;
use crate::errors::{Kind, raise};

/// The place of the labels among a call's tensors.
const PLACE: usize = 1;

/// What labels may be.
pub(super) struct Labels {
    layout: Layout,
    dtype: DType,
    classes: u64,
    ignored: Option<i64>,
}

impl Labels {
    /// What the labels of a function may be, if it reads labels.
    pub(super) fn of(function: &Function, given: &[Option<Input>]) -> Option<Labels> {
        let (Function::CrossEntropy(spec, _) | Function::ClassLoss(spec, Targets::Labels | Targets::LabelsOfLogarithms)) = function else {
            return None;
        };
        let (logits, labels) = (given.first().copied().flatten()?, given.get(PLACE).copied().flatten()?);
        let classes = *logits.layout.dims().get(spec.axis as usize)?;
        Some(Labels { layout: labels.layout, dtype: labels.dtype, classes, ignored: spec.ignore_index })
    }

    /// Looks at each.
    ///
    /// # Safety
    /// The tensors are those of a call that the labels were made for: in memory of the CPU, alive, of the same type and dims.
    pub(super) unsafe fn check(&self, tensors: &[DLTensor]) -> PyResult<()> {
        let Some(tensor) = tensors.get(PLACE) else { return Ok(()) };
        let address = tensor.address();
        for row in 0..self.layout.elements() {
            let offset = self.layout.offset_of_position(row).unwrap_or(0);
            let at = (address + offset * self.dtype.bytes() as u64) as *const u8;
            // SAFETY: the element lies within the tensor, by the caller's word; its address need not be a multiple of its size.
            let label = unsafe {
                match self.dtype {
                    DType::I64 => at.cast::<i64>().read_unaligned(),
                    DType::I32 => i64::from(at.cast::<i32>().read_unaligned()),
                    DType::I8 => i64::from(at.cast::<i8>().read()),
                    DType::U8 => i64::from(at.read()),
                    // The op refuses labels of other types.
                    _ => return Ok(()),
                }
            };
            let is_class = u64::try_from(label).is_ok_and(|label| label < self.classes);
            if !is_class && self.ignored != Some(label) {
                let text =
                    format!("label {label} of row {row} for {} classes; a label is a class, or the index that is ignored", self.classes);
                return Err(raise(Kind::OutOfRange, text));
            }
        }
        Ok(())
    }
}
