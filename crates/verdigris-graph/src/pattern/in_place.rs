//! Temporaries that take the place of others.

use std::collections::{BTreeMap, BTreeSet};

use verdigris_tensor::DType;

use super::Subgraph;
use crate::error::Error;
use crate::problem::{Access, Problem};
use crate::tensor::{TensorDesc, Uid};

/// Which temporaries lie where another one does, by that one's uid: those that a part writes where it reads the other for the last time, each element before
/// its own is written ([`crate::problem::Operand::gives_way_to`]). Of several behind each other the first one is named. `parts` run in their order.
///
/// Maps, softmax and cross-entropy are asked, whose results are as large as what they read.
///
/// # Errors
/// As [`Problem::buffers`].
pub fn in_place(parts: &[Subgraph], temporaries: &[TensorDesc]) -> Result<BTreeMap<Uid, Uid>, Error> {
    let sizes: BTreeMap<Uid, (DType, u128)> =
        temporaries.iter().map(|tensor| (tensor.uid, (tensor.dtype, tensor.layout.span_bytes(tensor.dtype)))).collect();
    let mut lives: BTreeMap<Uid, (usize, usize)> = BTreeMap::new();
    for (number, part) in parts.iter().enumerate() {
        part.bindings.iter().for_each(|&uid| lives.entry(uid).or_insert((number, number)).1 = number);
    }
    let (mut first_of, mut taken) = (BTreeMap::new(), BTreeSet::new());
    for (number, part) in parts.iter().enumerate() {
        if !matches!(part.problem, Problem::Map(_) | Problem::Softmax(_)) {
            continue;
        }
        let operands = part.problem.buffers()?;
        let of = |uid: Uid| operands.iter().filter(move |operand| part.bindings.get(operand.slot.0 as usize) == Some(&uid));
        for &uid in part.bindings.iter().filter(|uid| lives.get(uid).is_some_and(|live| live.0 == number)) {
            let Some(size) = sizes.get(&uid) else { continue };
            let Some(written) = of(uid).next().filter(|written| of(uid).all(|operand| operand == *written)) else { continue };
            if written.access != Access::Written {
                continue;
            }
            let gives_way = |other: &&Uid| {
                let is_last = lives.get(other).is_some_and(|live| live.0 < number && live.1 == number);
                is_last && of(**other).all(|read| read.gives_way_to(written)) && sizes.get(other) == Some(size) && !taken.contains(*other)
            };
            if let Some(&other) = part.bindings.iter().find(gives_way) {
                taken.insert(other);
                let first = first_of.get(&other).copied().unwrap_or(other);
                first_of.insert(uid, first);
            }
        }
    }
    Ok(first_of)
}
