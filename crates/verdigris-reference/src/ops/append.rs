//! Rows behind those that a tensor has already: which of the two stands at an index.

use verdigris_graph::{Append, Error, Graph, Uid};
use verdigris_tensor::DType;

use crate::fuzz::Draft;
use crate::operation::{Data, Evaluation, GraphError, Operation};
use crate::source::{Formula, Source};
use crate::tolerance::Bounded;

struct Appended<'a> {
    axis: usize,
    x: Source<'a>,
    rows: Source<'a>,
    /// Over the dims of `x` with 1 in the place of the axis.
    lengths: Source<'a>,
    dtype: DType,
}

impl Formula for Appended<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let mut place = index.to_vec();
        place[self.axis] = 0;
        let begin = self.lengths.at(&place).value as i64 - self.rows.dims()[self.axis] as i64;
        match u64::try_from(index[self.axis] as i64 - begin) {
            Ok(row) if row < self.rows.dims()[self.axis] => {
                place[self.axis] = row;
                self.rows.at(&place)
            }
            _ => self.x.at(index),
        }
    }

    fn compute(&self) -> DType {
        self.dtype
    }
}

impl Operation for Append {
    // One movement in six is one of these.
    const DRAWS: u64 = 0;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let (x, rows, lengths) = (at.source(self.x)?, at.source(self.rows)?, at.source(self.lengths)?);
        let axis = self.axis as usize;
        let mut dims = x.dims().to_vec();
        dims[axis] = 1;
        let (dtype, lengths) = (x.dtype(), lengths.broadcast(&dims));
        at.put(self.y, Appended { axis, x, rows, lengths, dtype })
    }

    fn data_of(&self, graph: &Graph, uid: Uid) -> Data<'_> {
        let extent = |uid| graph.tensor(uid).map_or(0, |tensor| tensor.layout.dims()[self.axis as usize]);
        if uid == self.lengths { Data::Counts(extent(self.x), extent(self.rows)) } else { Data::Any(true) }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.append()
    }
}

impl Draft {
    pub(super) fn append(&mut self) -> Result<(), Error> {
        let rows = self.with_axis(false)?;
        let (mut dims, dtype) = (rows.dims.clone(), rows.dtype);
        let axis = self.below(dims.len() as u64) as usize;
        dims[axis] = self.below(9);
        let layout = self.layout(&dims, false)?;
        let name = self.name("append");
        let cache = self.builder.tensor(&format!("{name}.x"), dtype, layout);
        // One length for all, or one for each index of some dims.
        let of: Vec<u64> = (0..dims.len()).map(|dim| if dim == axis || self.one_in(2) { 1 } else { dims[dim] }).collect();
        let layout = self.layout(&of, true)?;
        let lengths = self.builder.tensor(&format!("{name}.lengths"), DType::I32, layout);
        let y = self.builder.append(&name, cache, rows.uid, lengths, axis as u32)?;
        self.note_read(&[rows.uid]);
        self.note_stored(y, &dims, dtype);
        Ok(())
    }
}
