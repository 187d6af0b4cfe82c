//! The table of instructions against the assembler: what [`Op::legal`] allows assembles, in registers and with constants.

use super::assembler;
use super::kernels::Draft;
use crate::inst::{Op, TABLE};
use crate::inst_samples::{candidates, samples};
use crate::ir::{Access, Block, Guard, KernelBody, MapDecl, MapType, Operand, ParamKind, Stmt, Swizzle, Target, Ty};
use crate::ptx::{Isa, print::print_body};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// How many instructions are put into one kernel.
pub(super) const BATCH: usize = 400;

/// What the instructions of a batch are written with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Form {
    /// Registers in all places that take them.
    Registers,
    /// Constants in all places.
    Constants,
    /// A guard in front, and no use for the results.
    Guarded,
}

/// Operands that PTX wants as constants, as the text of the template tells: the offsets of addresses, and the selectors of sparse products.
fn constant_operands(op: &Op) -> Vec<usize> {
    let template = op.ptx();
    let number = |digits: &str| digits.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse::<usize>().ok());
    let mut constants: Vec<usize> = template.match_indices("+%i").filter_map(|(at, found)| number(&template[at + found.len()..])).collect();
    match op {
        Op::Mma { shape } if shape.sparse => constants.push(op.signature().ins.len() - 1),
        Op::Wgmma { shape } if shape.sparse => constants.push(shape.scale_d_operand() - 1),
        _ => {}
    }
    constants
}

/// A kernel that runs instructions one after the other, each on registers of its own (or on constants), each behind a remark with its number.
pub(super) fn batch(ops: &[(usize, &Op)], target: Target, form: Form) -> KernelBody {
    let mut d = Draft::new("batch", target, 128);
    if target >= Target::Sm90 {
        let map = MapDecl { ty: MapType::F32, rank: 1, box_dims: vec![32], im2col: false, swizzle: Swizzle::None, access: Access::Read };
        d.param("map", ParamKind::TensorMap(map));
    } else {
        d.param("divisor", ParamKind::Divisor);
    }
    d.shared("piece", 1024, 128);
    let mut block = Block::default();
    let guard = d.reg(Ty::Pred);
    for &(number, op) in ops {
        let signature = op.signature();
        let must = constant_operands(op);
        let outs: Vec<_> = signature.outs.iter().map(|ty| d.reg(*ty)).collect();
        let ins: Vec<Operand> = signature
            .ins
            .iter()
            .enumerate()
            .map(|(index, ty)| {
                if must.contains(&index) {
                    Operand::Imm(if *ty == Ty::S64 { (-16i64) as u64 } else { 0 })
                } else if form == Form::Constants {
                    // A thread count is a whole number of warps, a bulk size a multiple of 16; a one does for everything else.
                    let bulk = op.name().starts_with("Bulk");
                    Operand::Imm(match op {
                        Op::BarSync {} | Op::BarArrive {} if index == 1 => 64,
                        _ if bulk => 16,
                        _ => 1,
                    })
                } else {
                    d.reg(*ty).into()
                }
            })
            .collect();
        block.stmts.push(Stmt::Comment(format!("sample {number}")));
        let mut stmt = d.inst(op.clone(), &outs, &ins);
        if let (Form::Guarded, Stmt::Inst(inst)) = (form, &mut stmt) {
            inst.guard = Some(Guard { pred: guard, negate: number % 2 == 1 });
            if !op.reads_results() {
                inst.outs.fill(None);
            }
        }
        block.stmts.push(stmt);
    }
    d.finish(block)
}

/// The numbers of the instructions that the assembler refuses, with its words.
fn refused(ptxas: &Path, ops: &[(usize, &Op)], arch: Target, isa: Isa, form: Form) -> BTreeMap<usize, String> {
    let mut refused = BTreeMap::new();
    for chunk in ops.chunks(BATCH) {
        let mut left: Vec<(usize, &Op)> = chunk.to_vec();
        loop {
            let body = batch(&left, arch, form);
            let text = print_body(&body, isa);
            let Err(said) = assembler::assemble(ptxas, arch.ptx(), &text) else { break };
            let mut bad = BTreeSet::new();
            for line in said.lines().filter(|line| line.contains("error") || line.contains("fatal")) {
                let Some(at) = line.split("line ").nth(1).and_then(|rest| rest.split(';').next()).and_then(|n| n.parse::<usize>().ok())
                else {
                    continue;
                };
                let before: Vec<&str> = text.lines().take(at).collect();
                let number = before.iter().rev().find_map(|line| line.trim().strip_prefix("// sample ")?.parse::<usize>().ok());
                if let Some(number) = number {
                    bad.insert(number);
                    refused.entry(number).or_insert_with(|| line.split("; ").nth(1).unwrap_or(line).to_string());
                }
            }
            assert!(!bad.is_empty(), "no instruction is blamed: {said}");
            left.retain(|(number, _)| !bad.contains(number));
        }
    }
    refused
}

#[test]
fn every_entry_of_the_table_has_a_sample() {
    let named: BTreeSet<&str> = samples().iter().map(|sample| sample.op.name()).collect();
    let missing: Vec<&str> = TABLE.iter().map(|(name, _)| *name).filter(|name| !named.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

fn check_samples(form: Form) {
    let ptxas = match assembler::find() {
        Ok(ptxas) => ptxas,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let samples = samples();
    // Each chip and version that is the first for some instruction, so that both columns of the table are put to the test.
    let mut groups: BTreeMap<(Target, Isa), Vec<(usize, &Op)>> = BTreeMap::new();
    for (number, sample) in samples.iter().enumerate() {
        groups.entry((sample.op.target(), Isa::needed_by_op(&sample.op))).or_default().push((number, &sample.op));
    }
    let mut wrong = Vec::new();
    for ((target, isa), ops) in &groups {
        for (number, why) in refused(&ptxas, ops, *target, *isa, form) {
            wrong.push(format!("{:?} ({}, PTX {isa}): {why}\n    {}", samples[number].op, target.ptx(), samples[number].op.ptx()));
        }
    }
    assert!(wrong.is_empty(), "{} of {} refused:\n{}", wrong.len(), samples.len(), wrong.join("\n"));
}

#[test]
fn every_sample_assembles_for_the_first_chip_and_version_that_has_it() {
    check_samples(Form::Registers);
}

#[test]
fn every_sample_takes_constants_where_it_takes_registers() {
    check_samples(Form::Constants);
}

#[test]
fn every_sample_takes_a_guard_and_can_drop_its_results() {
    check_samples(Form::Guarded);
}

/// Minutes long, so run by hand: every combination that [`Op::legal`] refuses although the assembler takes it, to be judged by a reader.
#[test]
#[ignore = "a survey for whoever changes the rules; takes minutes"]
fn survey_of_what_is_refused_though_it_assembles() {
    let ptxas = assembler::find().unwrap();
    let all = candidates();
    let ops: Vec<(usize, &Op)> = all.iter().enumerate().filter(|(_, op)| op.legal().is_err()).collect();
    let refused = refused(&ptxas, &ops, Target::Sm90a, Isa::V9_0, Form::Registers);
    let mut kept: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for (number, op) in &ops {
        if let (false, Err(rule)) = (refused.contains_key(number), op.legal()) {
            kept.entry((op.name(), rule)).or_default().push(format!("{op:?}"));
        }
    }
    for ((name, rule), ops) in kept {
        eprintln!("{name}: {rule}: {} assemble, as {}", ops.len(), ops[0]);
    }
}

/// Run by hand likewise: samples that assemble for an earlier chip or version than the table says.
#[test]
#[ignore = "a survey for whoever changes the rules; takes minutes"]
fn survey_of_what_an_earlier_chip_or_version_has() {
    let ptxas = assembler::find().unwrap();
    let samples = samples();
    let ops: Vec<(usize, &Op)> = samples.iter().map(|sample| &sample.op).enumerate().collect();
    let mut early: BTreeMap<(&str, &str, String), usize> = BTreeMap::new();
    for target in [Target::Sm80, Target::Sm89, Target::Sm90] {
        let later: Vec<_> = ops.iter().copied().filter(|(_, op)| op.target() > target).collect();
        let refused = refused(&ptxas, &later, target, Isa::V9_0, Form::Registers);
        for (_, op) in later.iter().filter(|(number, _)| !refused.contains_key(number)) {
            *early.entry((op.name(), target.ptx(), String::new())).or_default() += 1;
        }
    }
    for isa in [Isa::MINIMUM, Isa::new(8, 1), Isa::new(8, 2), Isa::new(8, 3), Isa::new(8, 4), Isa::new(8, 5), Isa::new(8, 6)] {
        let later: Vec<_> = ops.iter().copied().filter(|(_, op)| Isa::needed_by_op(op) > isa).collect();
        let refused = refused(&ptxas, &later, Target::Sm90a, isa, Form::Registers);
        for (_, op) in later.iter().filter(|(number, _)| !refused.contains_key(number)) {
            *early.entry((op.name(), "PTX", isa.to_string())).or_default() += 1;
        }
    }
    for ((name, target, isa), count) in early {
        eprintln!("{name} has {count} samples for {target} {isa}");
    }
}
