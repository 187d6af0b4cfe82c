//! What the CPU device has for each op: the engine that does it, its work, and the call.

use verdigris_graph::{Node, Op, TensorDesc, Uid};

use crate::elements::ViewMut;
use crate::engine::Engine;
use crate::prepared::Context;

/// One implementation for each op, in the file of what computes it.
pub(crate) trait Operation {
    /// Who does it.
    const ENGINE: Engine;

    /// Multiplications and additions; 0 for what is no contraction.
    fn flops<'g>(&self, _tensor: &dyn Fn(Uid) -> &'g TensorDesc) -> u64 {
        0
    }

    /// Computes the op, the first of `nodes`, and with it the nodes behind it that were cut into one step: for all but pointwise ops there
    /// are none. `outputs` are the tensors written that somebody reads, the main result first.
    fn run(&self, nodes: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>);
}

/// The main result and the second one, where it is written.
pub(crate) fn results<'v>(outputs: Vec<(Uid, ViewMut<'v>)>) -> Option<(ViewMut<'v>, Option<ViewMut<'v>>)> {
    let mut outputs = outputs.into_iter().map(|(_, view)| view);
    outputs.next().map(|first| (first, outputs.next()))
}

macro_rules! dispatch {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        pub(crate) fn engine(op: &Op) -> Engine {
            match op {
                $(Op::$name(_) => <verdigris_graph::$name as Operation>::ENGINE,)*
            }
        }

        pub(crate) fn flops<'g>(op: &Op, tensor: &dyn Fn(Uid) -> &'g TensorDesc) -> u64 {
            match op {
                $(Op::$name(op) => op.flops(tensor),)*
            }
        }

        /// Runs the nodes of one step.
        pub(crate) fn run(nodes: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
            match nodes.first().map(|node| &node.op) {
                $(Some(Op::$name(op)) => op.run(nodes, context, outputs),)*
                None => {}
            }
        }
    };
}
verdigris_graph::each_op!(dispatch);
