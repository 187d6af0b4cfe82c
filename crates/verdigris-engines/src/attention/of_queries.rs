//! Numbers of each query that attention gives beside its result: the log-sum-exp, and the greatest score.

use verdigris_graph::View;
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::params::Write;

use crate::layout::space::element;

verdigris_kir::parameters! {
    /// Where a number of each query goes, f32. What is not asked for is left out by a branch that all threads take alike.
    pub(super) struct OfQueries / #[derive(Clone, Copy, Debug)] OfQueriesArgs of () as _spec {
        pub(super) to: Write = 4,
        /// Bytes from one batch, head and row to the next.
        pub(super) strides: [u64; 3],
        /// Whether it is written at all.
        pub(super) is_asked: u32,
    }
}

impl OfQueriesArgs {
    /// Beside the result `o`, what `view` tells.
    pub(super) fn new(o: &View, view: &Option<View>) -> OfQueriesArgs {
        let strides_bytes = |view: &View| [0, 1, 2].map(|i| view.strides[i] * view.dtype.bytes() as u64);
        OfQueriesArgs {
            to: element(view.as_ref().unwrap_or(o), []),
            strides: view.as_ref().map_or([0; 3], strides_bytes),
            is_asked: u32::from(view.is_some()),
        }
    }
}

impl<'k> OfQueries<'k> {
    /// Writes the number of a row of the tensors, where it is for this thread to write.
    pub(super) fn store(&self, k: Kernel<'k>, is_own: Val<'k, bool>, [batch, head, row]: [Val<'k, u32>; 3], value: Val<'k, f32>) {
        k.when(is_own & self.is_asked.ne(0), || {
            let [of_batch, of_head, of_row] = self.strides;
            let to = self.to.moved(batch.widen() * of_batch + head.widen() * of_head + row.widen() * of_row);
            k.st_global(to.address(), 0, value);
        });
    }
}
