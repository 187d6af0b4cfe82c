//! The cube of each element.

use verdigris_graph::{BinaryOp, Error, Pointwise, Toy};
use verdigris_tensor::DType;

use crate::fuzz::Draft;
use crate::operation::{Evaluation, GraphError, Operation};
use crate::source::{Formula, Source};
use crate::tolerance::Bounded;

struct Cubed<'a> {
    x: Source<'a>,
    significant_bits: u32,
}

impl Formula for Cubed<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let (x, compute) = (self.x.at(index), self.compute());
        let square = x.binary(BinaryOp::Mul, x, true, self.significant_bits, compute);
        square.binary(BinaryOp::Mul, x, true, self.significant_bits, compute)
    }

    fn compute(&self) -> DType {
        Pointwise::compute_dtype([self.x.dtype()])
    }
}

impl Operation for Toy {
    const DRAWS: u64 = 1;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let x = at.source(self.x)?;
        at.put(self.y, Cubed { x, significant_bits: at.bits(self.y) })
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.toy()
    }
}

impl Draft {
    fn toy(&mut self) -> Result<(), Error> {
        let x = self.with_axis(true)?;
        let name = self.name("toy");
        let y = self.builder.toy(&name, x.uid)?;
        self.note_read(&[x.uid]);
        self.pointwise_result(y, &x.dims, &[x.dtype])
    }
}
