//! The factors of queries, keys and values of 8 bits.

use verdigris_graph::AttentionProblem;
use verdigris_kir::face::{Kernel, Pointer, Val};
use verdigris_kir::params::Read;

use crate::layout::space::element;

verdigris_kir::parameters! {
    /// f32, one of each batch and head of keys, with the bytes from one to the next; and whether they are there.
    pub(super) struct Descales / #[derive(Clone, Copy, Debug)] DescaleArgs of () as _spec {
        q: Read = 4,
        q_strides: [u64; 2],
        k: Read = 4,
        k_strides: [u64; 2],
        v: Read = 4,
        v_strides: [u64; 2],
        given: [u32; 3],
    }
}

/// The factors of a head.
#[derive(Clone, Copy)]
pub(super) struct HeadDescales<'k> {
    /// Of queries times that of keys.
    of_products: Val<'k, f32>,
    pub(super) v: Val<'k, f32>,
}

impl DescaleArgs {
    pub(super) fn of(p: &AttentionProblem) -> DescaleArgs {
        let all = [&p.q_descale, &p.k_descale, &p.v_descale];
        let [q, k, v] = all.map(|view| element(view.as_ref().unwrap_or(&p.q), []));
        let [q_strides, k_strides, v_strides] = all.map(|view| view.as_ref().map_or([0; 2], |view| [0, 1].map(|i| view.strides[i] * 4)));
        DescaleArgs { q, q_strides, k, k_strides, v, v_strides, given: all.map(|view| u32::from(view.is_some())) }
    }
}

impl<'k> Descales<'k> {
    pub(super) fn of_head(&self, k: Kernel<'k>, batch: Val<'k, u32>, kv_head: Val<'k, u32>) -> HeadDescales<'k> {
        let factor = |at: Pointer<'k>, [of_batch, of_head]: [Val<'k, u64>; 2], given: Val<'k, u32>| {
            let factor = k.var_named("descale", 1.0f32);
            let at = at.moved(batch.widen() * of_batch + kv_head.widen() * of_head);
            k.when(given.ne(0), || factor.set(k.ld_global::<f32>(at.address(), 0)));
            factor.get()
        };
        let of_q = factor(self.q, self.q_strides, self.given[0]);
        let of_k = factor(self.k, self.k_strides, self.given[1]);
        HeadDescales { of_products: of_q * of_k, v: factor(self.v, self.v_strides, self.given[2]) }
    }
}

impl<'k> HeadDescales<'k> {
    /// The scale of the products of a head; above 0, for the scores that are masked are −∞ times it.
    pub(super) fn of_score(&self, scale: Val<'k, f32>) -> Val<'k, f32> {
        (self.of_products * scale).max(f32::MIN_POSITIVE)
    }
}
