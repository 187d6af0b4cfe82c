//! Moves, arithmetic, comparisons and conversions: everything that computes its results from its operands alone.

use super::kit::{SLOT, check, column, emit, load, own, probe, results, rule_of, slots, store, stored};
use super::values::{Domain, Random, tuple};
use super::{Contents, Probe, Rule};
use std::collections::BTreeMap;
use std::sync::Arc;
use verdigris_kir::face::Header;
use verdigris_kir::inst::{Class, Op};
use verdigris_kir::inst_samples::samples;
use verdigris_kir::interp::alu;
use verdigris_kir::ir::{Operand, Target, Ty};

const THREADS: u32 = 128;
const CTAS: u32 = 8;
/// Tuples of operands that each instruction sees.
pub(super) const LANES: usize = (THREADS * CTAS) as usize;
/// Instructions to a kernel.
const CHUNK: usize = 48;

/// Whether the instruction can be asked about by its operands alone.
pub(super) fn is_pure(op: &Op) -> bool {
    op.is_pure()
        && !matches!(
            op,
            Op::SpecialRegister { .. } | Op::ParamLoad { .. } | Op::ParamAddress { .. } | Op::SharedAddress { .. } | Op::MapShared {}
        )
}

/// By what rule a result agrees. Instructions that only move bits keep NaN as it is.
fn rule(op: &Op, ty: Ty) -> Rule {
    if alu::bound(op, 1.0).is_some() {
        return Rule::Approximate(op.clone(), ty);
    }
    match op {
        Op::Selp { .. } => Rule::Bits,
        _ if matches!(op.class(), Class::Move) => Rule::Bits,
        _ => rule_of(ty),
    }
}

pub(super) fn probes() -> Vec<Probe> {
    type Key = (Target, Vec<Ty>, Vec<Domain>);
    let mut groups: BTreeMap<Key, Vec<Op>> = BTreeMap::new();
    for sample in samples() {
        if is_pure(&sample.op) {
            let ins = sample.op.signature().ins;
            let domains = (0..ins.len()).map(|operand| Domain::of(&sample.op, operand)).collect();
            groups.entry((sample.op.target(), ins, domains)).or_default().push(sample.op);
        }
    }
    let mut probes = Vec::new();
    for ((target, types, domains), ops) in groups {
        let words: Vec<&str> = types.iter().map(|ty| ty.ptx()).collect();
        let domain = domains.iter().find(|domain| **domain != Domain::Any).map(|domain| format!("-{domain:?}").to_lowercase());
        for (part, ops) in ops.chunks(CHUNK).enumerate() {
            let name = format!("pure/{}/{}{}-{part}", target.ptx(), words.join("-"), domain.as_deref().unwrap_or_default());
            probes.push(group(name, target, &types, &domains, ops));
        }
    }
    probes
}

fn group(name: String, target: Target, types: &[Ty], domains: &[Domain], ops: &[Op]) -> Probe {
    let mut random = Random::new(&name);
    let tuples: Vec<Vec<u64>> = (0..LANES).map(|_| tuple(types, domains, &mut random)).collect();
    let region = LANES * SLOT;
    let input = slots((0..types.len()).flat_map(|operand| tuples.iter().map(move |tuple| tuple[operand])));
    let operands: Vec<_> =
        types.iter().enumerate().map(|(at, ty)| column(0, at * region, SLOT, stored(*ty).bytes() as usize, LANES)).collect();
    let mut checks = Vec::new();
    let mut place = 0;
    for op in ops {
        for (index, ty) in op.signature().outs.into_iter().enumerate() {
            let what = if index == 0 { format!("{op:?}") } else { format!("{op:?} result {index}") };
            let result = column(1, place * region, SLOT, stored(ty).bytes() as usize, LANES);
            let mut check = check(what, &[op.name()], result, rule(op, ty));
            check.operands = operands.clone();
            checks.push(check);
            place += 1;
        }
    }
    let input = if input.is_empty() { vec![0; 16] } else { input };
    let buffers = vec![Contents::Bytes(input), results(place * region)];
    let (types, ops): (Arc<[Ty]>, Arc<[Op]>) = (types.into(), ops.into());
    let header = Header { name, target, threads: THREADS, ..Header::default() };
    probe(header, CTAS, buffers, checks, move |k| {
        let (input, output) = (k.input("operands", 16), k.output("results", 16));
        let (from, to) = (own(k, input, SLOT as u32), own(k, output, SLOT as u32));
        let ins: Vec<Operand> = types.iter().enumerate().map(|(at, ty)| load(k, *ty, from, at * region).into()).collect();
        let mut place = 0;
        for op in ops.iter() {
            let outs = emit(k, op, &ins);
            for (reg, ty) in outs.into_iter().zip(op.signature().outs) {
                store(k, ty, to, place * region, reg);
                place += 1;
            }
        }
    })
}
