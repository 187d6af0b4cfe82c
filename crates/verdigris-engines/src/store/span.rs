//! Elements that lie one behind the other and begin anywhere, 16 bytes at a time: by all threads of a CTA, from or to shared memory, where they lie as far behind a multiple
//! of 16 bytes as in global memory.

use std::panic::Location;

use verdigris_kir::face::Val;
use verdigris_kir::inst::Cache;

/// Bytes of an access.
pub(crate) const VECTOR_BYTES: u32 = 16;

/// Elements of 2 or 4 bytes in global memory, and who goes over them.
#[derive(Clone, Copy)]
pub(crate) struct Span<'k> {
    pub(crate) first: Val<'k, u64>,
    pub(crate) elements: Val<'k, u32>,
    pub(crate) element_bytes: u32,
    /// Of the CTA.
    pub(crate) threads: u32,
}

impl<'k> Span<'k> {
    /// How far the first element is behind a multiple of 16 bytes.
    #[track_caller]
    pub(crate) fn behind(first: Val<'k, u64>) -> Val<'k, u32> {
        first.low32() & (VECTOR_BYTES - 1)
    }

    /// Runs `vector` for the whole vectors, with the distance in bytes, and `element` for those in front and behind.
    #[track_caller]
    pub(crate) fn each_access(&self, vector: impl Fn(Val<'k, u32>), element: impl Fn(Val<'k, u32>)) {
        let Span { first, elements, element_bytes: bytes, threads } = *self;
        let k = elements.kernel();
        k.scope_around(Location::caller(), |caller| {
            let of_vector = VECTOR_BYTES / bytes;
            let front = ((k.constant(0u32) - first.low32()) & (VECTOR_BYTES - 1)) >> bytes.ilog2();
            let front = front.min(elements);
            let vectors = (elements - front) >> of_vector.ilog2();
            k.range_step(k.thread(), vectors, threads, |i| {
                let at = front * bytes + i * VECTOR_BYTES;
                caller.run(|| vector(at));
            });
            // At most one short of a vector on either side: fewer than threads.
            let whole = vectors << of_vector.ilog2();
            let edge = k.thread();
            k.when(edge.lt(elements - whole), || {
                let at = (edge + k.select(edge.lt(front), 0u32, whole)) * bytes;
                caller.run(|| element(at));
            });
        });
    }

    /// Copies the elements out of shared memory, where the first one lies at `from`.
    #[track_caller]
    pub(crate) fn copy_out(&self, from: Val<'k, u32>) {
        let (k, to) = (from.kernel(), self.first);
        k.scope(Location::caller(), || {
            self.each_access(
                |at| k.st_global_vector(to + at.widen(), 0, &k.ld_shared_vector::<u32>(from + at, 0, 4), Cache::Default),
                |at| match self.element_bytes {
                    2 => k.st_global(to + at.widen(), 0, k.ld_shared::<u16>(from + at, 0)),
                    _ => k.st_global(to + at.widen(), 0, k.ld_shared::<u32>(from + at, 0)),
                },
            );
        });
    }
}
