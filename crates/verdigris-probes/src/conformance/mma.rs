//! `mma.sync`: every shape and type, dense and sparse, with ordinary numbers and with infinities, NaN and zeros among them.

use super::kit::{SLOT, check, column, emit, imm, load, own, probe, results, slots, store};
use super::values::{Random, elements, magnitudes, metadata};
use super::{Contents, Probe, Rule};
use std::collections::BTreeMap;
use std::sync::Arc;
use verdigris_kir::face::Header;
use verdigris_kir::inst::{MatrixType, MmaShape, Op};
use verdigris_kir::inst_samples::samples;
use verdigris_kir::ir::{Operand, Target, Ty};

const THREADS: u32 = 64;
const CTAS: u32 = 4;
const LANES: usize = (THREADS * CTAS) as usize;
const CHUNK: usize = 6;

/// Whether the interpreter has the layout of the shape's metadata.
fn is_modelled(shape: &MmaShape) -> bool {
    !shape.sparse || shape.a.bits() >= 16 || !matches!((shape.a.bits(), shape.k), (8, 32) | (4, 64))
}

/// How far two sums of `k` products and an accumulator may be apart, as a part of the sum of their magnitudes: both lie within
/// `(k + 1) · 2⁻²³` of the exact value (f64: `2⁻⁵²`); for products of 8-bit floats the chip keeps fewer bits, 13 below the largest term.
pub(super) fn product_bound(a: MatrixType, k: u32) -> f64 {
    let terms = f64::from(k + 1);
    match a {
        MatrixType::F64 => 2.0 * terms * 2f64.powi(-52),
        MatrixType::E4m3 | MatrixType::E5m2 => terms * 2f64.powi(-13),
        _ => 2.0 * terms * 2f64.powi(-23),
    }
}

/// By what rule accumulators agree.
pub(super) fn product_rule(a: MatrixType, d: MatrixType, k: u32) -> Rule {
    match d {
        MatrixType::S32 => Rule::Bits,
        MatrixType::F16 => Rule::Product { ty: Ty::F16x2, relative: product_bound(a, k) },
        MatrixType::F64 => Rule::Product { ty: Ty::F64, relative: product_bound(a, k) },
        _ => Rule::Product { ty: Ty::F32, relative: product_bound(a, k) },
    }
}

pub(super) fn probes() -> Vec<Probe> {
    let mut groups: BTreeMap<(Target, MatrixType, bool), Vec<MmaShape>> = BTreeMap::new();
    for sample in samples() {
        if let Op::Mma { shape } = sample.op
            && is_modelled(&shape)
        {
            groups.entry((sample.op.target(), shape.a, shape.sparse)).or_default().push(shape);
        }
    }
    let mut probes = Vec::new();
    for ((target, a, sparse), shapes) in groups {
        for (part, shapes) in shapes.chunks(CHUNK).enumerate() {
            for special in [false, true] {
                let integer = !matches!(a, MatrixType::F64) && element_is_integer(a);
                if special && integer {
                    continue;
                }
                let words = format!("{}{}{}", a.ptx(), if sparse { "-sparse" } else { "" }, if special { "-special" } else { "" });
                probes.push(products(format!("mma/{words}/{}-{part}", target.ptx()), target, shapes, special));
            }
        }
    }
    probes
}

pub(super) fn element_is_integer(ty: MatrixType) -> bool {
    matches!(ty, MatrixType::S8 | MatrixType::U8 | MatrixType::S4 | MatrixType::U4 | MatrixType::B1)
}

/// Operand registers of a shape, with what they hold: `None` for metadata.
fn operand_types(shape: &MmaShape) -> Vec<Option<MatrixType>> {
    let mut types = vec![Some(shape.a); shape.a_registers()];
    types.extend(vec![Some(shape.b); shape.b_registers()]);
    types.extend(vec![Some(shape.d); shape.d_registers()]);
    if shape.sparse {
        types.push(None);
    }
    types
}

fn products(name: String, target: Target, shapes: &[MmaShape], special: bool) -> Probe {
    let mut random = Random::new(&name);
    let region = LANES * SLOT;
    let (mut input, mut positive, mut checks) = (Vec::new(), Vec::new(), Vec::new());
    let mut place = 0;
    for shape in shapes {
        for ty in operand_types(shape) {
            let words = match ty {
                // s32 accumulators near the ends, where sums clamp or wrap.
                Some(MatrixType::S32) => slots((0..LANES).map(|_| match random.below(3) {
                    0 => 0x7fff_ffff - random.below(5000),
                    1 => 0x8000_0000 + random.below(5000),
                    _ => random.next() & 0xffff_ffff,
                })),
                Some(ty) => (0..LANES).flat_map(|_| elements(ty, SLOT, special, &mut random)).collect(),
                None => slots((0..LANES).map(|_| u64::from(metadata(shape.a, &mut random)))),
            };
            positive.extend(ty.map_or_else(|| words.clone(), |ty| magnitudes(ty, &words)));
            input.extend(words);
        }
        let op = Op::Mma { shape: *shape };
        for (index, ty) in op.signature().outs.iter().enumerate() {
            let result = column(1, place * region, SLOT, ty.bytes() as usize, LANES);
            checks.push(check(format!("{op:?} register {index}"), &["Mma"], result, product_rule(shape.a, shape.d, shape.k)));
            place += 1;
        }
    }
    let output = results(place * region);
    let build = |name: &str, bytes: Vec<u8>| {
        let header = Header { name: name.to_string(), target, threads: THREADS, ..Header::default() };
        let shapes: Arc<[MmaShape]> = shapes.into();
        probe(header, CTAS, vec![Contents::Bytes(bytes), output.clone()], checks.clone(), move |k| {
            let (input, output) = (k.input("operands", 256), k.output("results", 256));
            let (from, to) = (own(k, input, SLOT as u32), own(k, output, SLOT as u32));
            let (mut at, mut place) = (0, 0);
            for (number, shape) in shapes.iter().enumerate() {
                let op = Op::Mma { shape: *shape };
                let types = op.signature().ins;
                let mut ins: Vec<Operand> = Vec::new();
                for ty in &types[..operand_types(shape).len()] {
                    ins.push(load(k, *ty, from, at * region).into());
                    at += 1;
                }
                if shape.sparse {
                    ins.push(imm((number % selectors(shape)) as u64));
                }
                for (reg, ty) in emit(k, &op, &ins).into_iter().zip(op.signature().outs) {
                    store(k, ty, to, place * region, reg);
                    place += 1;
                }
            }
        })
    };
    let mut probe = build(&name, input);
    if checks.iter().any(|check| matches!(check.rule, Rule::Product { .. })) {
        probe.magnitudes = Some(Box::new(build(&name, positive)));
    }
    probe
}

/// How many places the metadata of a sparse shape can take in its registers.
fn selectors(shape: &MmaShape) -> usize {
    let row_bits = match shape.a.bits() {
        4 => shape.k / 2,
        32 => 2 * shape.k,
        _ => shape.k,
    };
    match row_bits {
        16 => 4,
        32 => 2,
        _ => 1,
    }
}
