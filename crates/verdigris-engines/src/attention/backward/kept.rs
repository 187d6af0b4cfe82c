//! Keys and values in registers, where those are left for them.

use verdigris_kir::face::{Kernel, Val};

use super::spec::{OWN_KEYS, Spec};

/// What stands on the left of a product of keys by queries.
#[derive(Clone, Copy)]
pub(super) enum Operand {
    Keys,
    Values,
}

/// Operands in registers, for as long as the CTA runs. Out of shared memory a product of 64 by 64 reads both of its operands as fast as it can be read at all;
/// this leaves one.
pub(super) struct Kept<'k> {
    /// This consumer's keys and values, 16 elements a step.
    keys: Vec<[Val<'k, u32>; 4]>,
    values: Vec<[Val<'k, u32>; 4]>,
    /// The elements of all keys, 16 keys a step.
    pub(super) keys_across: Vec<[Val<'k, u32>; 4]>,
}

impl<'k> Kept<'k> {
    pub(super) fn load(
        k: Kernel<'k>,
        spec: &Spec,
        [keys, values]: [Val<'k, u32>; 2],
        warpgroup: Val<'k, u32>,
        thread: Val<'k, u32>,
    ) -> Self {
        let (tile, lane, warp) = (spec.key_tile(), thread & 31, thread >> 5);
        let load = |transposed: bool, row: Val<'k, u32>| {
            let four = k.ldmatrix(4, transposed, row, 0);
            [0, 1, 2, 3].map(|i: usize| four[i])
        };
        let along = |slot: Val<'k, u32>| -> Vec<[Val<'k, u32>; 4]> {
            let row = warpgroup * OWN_KEYS + (warp << 4) + (lane & 15);
            (0..spec.head / 16).map(|step| load(false, tile.chunk(slot, row, lane >> 4, step))).collect()
        };
        let across = |step: u32| {
            let row = (lane & 7) + ((lane >> 4) << 3) + 16 * step;
            load(true, tile.chunk(keys, row, (warp << 1) + ((lane >> 3) & 1), 0))
        };
        Kept { keys: along(keys), values: along(values), keys_across: (0..spec.keys() / 16).map(across).collect() }
    }

    pub(super) fn of(&self, operand: Operand) -> &[[Val<'k, u32>; 4]] {
        match operand {
            Operand::Keys => &self.keys,
            Operand::Values => &self.values,
        }
    }
}
