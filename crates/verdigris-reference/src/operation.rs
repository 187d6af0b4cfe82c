//! What the reference has for each op: the formula in `f64`, what its inputs hold, and how random graphs draw it.

use verdigris_graph::{Error, Graph, Op, Uid};

pub(crate) use crate::data_graph::Data;
use crate::fuzz::Draft;
pub(crate) use crate::graph::{Evaluation, GraphError};

/// One implementation for each op, in the file of its name under `ops`.
pub(crate) trait Operation {
    /// How many of the fuzzer's draws it has; 0 where another op's draws make it.
    const DRAWS: u64;

    /// Puts in what the op writes, from what it reads.
    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError>;

    /// What a tensor must hold that the op reads and nothing writes.
    fn data_of(&self, _graph: &Graph, _uid: Uid) -> Data<'_> {
        Data::Any(true)
    }

    /// Adds the op to a random graph, in the draw of this number below [`Operation::DRAWS`].
    fn draw(draft: &mut Draft, nth: u64) -> Result<(), Error>;
}

macro_rules! dispatch {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        pub(crate) fn evaluate<'a>(op: &'a Op, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
            match op {
                $(Op::$name(op) => op.evaluate(at),)*
            }
        }

        pub(crate) fn data_of<'g>(op: &'g Op, graph: &Graph, uid: Uid) -> Data<'g> {
            match op {
                $(Op::$name(op) => op.data_of(graph, uid),)*
            }
        }
    };
}
verdigris_graph::each_op!(dispatch);
