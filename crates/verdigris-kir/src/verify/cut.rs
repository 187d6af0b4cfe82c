//! Numbers on their way into addresses: `[cut]`.
//!
//! A number among the parameters that has 64 bits (a stride, a distance) is one that 32 bits may not hold, or it would have been declared with
//! 32. Where its low half alone is taken, and what is computed of that in 32 bits is widened again into the address of an access to global
//! memory, tensors beyond 4 GiB are accessed at the wrong place.
//!
//! The walk follows such numbers through moves, conversions, sums, products, shifts to the left and shuffles. The rule abstains where the
//! low half may be meant:
//!
//! - under a condition that the whole grid decides alike (the launch may say that the number fits), or that comes from the number;
//! - where halves or shifts to the right show that a parameter's bits are several numbers, and where a mask, a minimum or a difference of two
//!   such numbers bounds what is left;
//! - where only one way to the access goes through the cut: one side of a select, of an `if`, or of roles. A loop may take its second turn.

use super::Findings;
use super::sites::{Kind, Sites};
use super::uniform::{self, Uniformity};
use super::values::Values;
use crate::inst::{MapField, Op, Space};
use crate::ir::{Block, Inst, Loc, Operand, ParamKind, Reg, RegKind, Stmt, Ty};
use std::collections::{BTreeMap, BTreeSet};

/// Turns after which a loop's state is taken as it is; each only adds numbers that are followed.
const MOST_TURNS: usize = 16;

/// A number that comes from a parameter of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Number {
    param: u32,
    /// Where its high half was dropped, if it was.
    cut: Option<Loc>,
    /// The first product in 32 bits behind that.
    product: Option<Loc>,
}

impl Number {
    /// What comes of two: that which was cut.
    fn and(self, other: Number) -> Number {
        if self.cut.is_some() || other.cut.is_none() { self } else { other }
    }

    /// What a register surely holds that may hold one or the other.
    fn surely(self, other: Number) -> Number {
        if self.cut.is_some() { other } else { self }
    }
}

/// Mutable registers that hold such numbers.
type State = BTreeMap<Reg, Number>;

/// What is so on both of two ways.
fn both(one: &State, other: &State) -> State {
    one.iter().filter_map(|(reg, number)| other.get(reg).map(|other| (*reg, number.surely(*other)))).collect()
}

pub(super) fn check<'a>(found: &mut Findings<'a>, sites: &Sites<'a>, values: &Values<'a>) {
    if !sites.sites.iter().any(|site| cuts(&site.inst.op)) {
        return;
    }
    let count = found.body.registers.len();
    let mut writers = vec![Vec::new(); count];
    for (at, site) in sites.sites.iter().enumerate() {
        site.inst.outs.iter().flatten().for_each(|out| writers[out.0 as usize].push(at));
    }
    let levels = uniform::levels(found.body, sites, values);
    let parts = in_parts(sites, &writers);
    let body = &found.body.body;
    let mut walk =
        Walk { found, sites, levels, writers, parts, once: vec![None; count], conditions: Vec::new(), quiet: 0, reported: BTreeSet::new() };
    walk.block(body, &mut State::new());
}

/// Whether an operation drops the high half of a 64-bit integer.
fn cuts(op: &Op) -> bool {
    matches!(op, Op::Cvt { to, from, saturate: false, .. } if from.bits() == 64 && from.is_integer() && to.bits() == 32 && to.is_integer())
}

/// The operand that is a global address.
fn address(inst: &Inst) -> Option<Operand> {
    let at = match &inst.op {
        Op::Ld { space: Space::Global, .. }
        | Op::LdByte { space: Space::Global, .. }
        | Op::St { space: Space::Global, .. }
        | Op::StByte { space: Space::Global, .. }
        | Op::Atom { space: Space::Global, .. }
        | Op::Red { space: Space::Global, .. }
        | Op::DiscardL2 {}
        | Op::BulkStore { .. }
        | Op::BulkReduceStore { .. } => 0,
        Op::BulkLoad { .. } | Op::TensormapReplace { field: MapField::GlobalAddress, .. } => 1,
        Op::CpAsync { .. } => 2,
        _ => return None,
    };
    inst.ins.get(at).copied()
}

struct Walk<'f, 'a> {
    found: &'f mut Findings<'a>,
    sites: &'f Sites<'a>,
    levels: Vec<Uniformity>,
    /// The instructions that write each register, by their number among the sites.
    writers: Vec<Vec<usize>>,
    /// Parameters whose bits are taken apart.
    parts: BTreeSet<u32>,
    /// What registers that are written once hold.
    once: Vec<Option<Number>>,
    /// The conditions around what is walked, and whether each is a loop's.
    conditions: Vec<(Reg, bool)>,
    /// Above 0 while a loop's state is still being found: nothing is reported.
    quiet: u32,
    /// The lines that were reported: one access speaks for all.
    reported: BTreeSet<Loc>,
}

impl<'a> Walk<'_, 'a> {
    fn block(&mut self, block: &'a Block, state: &mut State) {
        let outside = self.conditions.len();
        for stmt in &block.stmts {
            match stmt {
                Stmt::Inst(inst) => self.inst(inst, state),
                Stmt::If { cond, then, otherwise, .. } => {
                    let mut other = state.clone();
                    self.conditions.push((*cond, false));
                    self.block(then, state);
                    self.block(otherwise, &mut other);
                    self.conditions.pop();
                    *state = both(state, &other);
                }
                Stmt::Loop { head, cond, body, .. } => {
                    self.conditions.push((*cond, true));
                    self.quiet += 1;
                    for _ in 0..MOST_TURNS {
                        let mut turn = state.clone();
                        self.block(head, &mut turn);
                        self.block(body, &mut turn);
                        let before = state.clone();
                        for (reg, number) in turn {
                            state.entry(reg).and_modify(|held| *held = held.and(number)).or_insert(number);
                        }
                        if *state == before {
                            break;
                        }
                    }
                    self.quiet -= 1;
                    self.block(head, state);
                    self.block(body, &mut state.clone());
                    self.conditions.pop();
                }
                Stmt::Roles { roles, .. } => {
                    let before = state.clone();
                    for role in roles {
                        let mut inside = before.clone();
                        self.block(&role.body, &mut inside);
                        *state = both(state, &inside);
                    }
                }
                // What follows runs where it does not hold.
                Stmt::StopWhen { cond, .. } => self.conditions.push((*cond, false)),
                Stmt::Comment(_) => {}
            }
        }
        self.conditions.truncate(outside);
    }

    fn inst(&mut self, inst: &'a Inst, state: &mut State) {
        if let Some(guard) = inst.guard {
            self.conditions.push((guard.pred, false));
        }
        if let Some(number) = address(inst).and_then(|operand| self.number(operand, state)) {
            self.access(inst, number);
        }
        let number = self.result(inst, state);
        for out in inst.outs.iter().flatten() {
            if self.found.body.registers[out.0 as usize].kind == RegKind::Once {
                self.once[out.0 as usize] = number;
                continue;
            }
            // Behind a guard the register may hold what it held.
            let held = if inst.guard.is_some() { number.and_then(|number| Some(number.surely(*state.get(out)?))) } else { number };
            match held {
                Some(number) => state.insert(*out, number),
                None => state.remove(out),
            };
        }
        if inst.guard.is_some() {
            self.conditions.pop();
        }
    }

    fn number(&self, operand: Operand, state: &State) -> Option<Number> {
        let reg = operand.reg()?;
        self.once[reg.0 as usize].or_else(|| state.get(&reg).copied())
    }

    /// What the result of an instruction holds.
    fn result(&self, inst: &Inst, state: &State) -> Option<Number> {
        let of = |at: usize| inst.ins.get(at).and_then(|operand| self.number(*operand, state));
        let sum = |one: Option<Number>, other: Option<Number>| match (one, other) {
            (Some(one), Some(other)) => Some(one.and(other)),
            _ => one.or(other),
        };
        let multiplied = |number: Option<Number>, ty: Ty| match number {
            Some(number) if ty.bits() == 32 && number.cut.is_some() && number.product.is_none() => {
                (!self.excused(number.param)).then_some(Number { product: Some(inst.loc), ..number })
            }
            number => number,
        };
        match &inst.op {
            Op::ParamLoad { index, ty, .. } => {
                let wide = matches!(self.found.body.params[*index as usize].kind, ParamKind::Scalar(Ty::U64 | Ty::S64)) && ty.bits() == 64;
                (wide && !self.parts.contains(index)).then_some(Number { param: *index, cut: None, product: None })
            }
            op @ Op::Cvt { .. } if cuts(op) => {
                let number = of(0)?;
                (!self.excused(number.param)).then_some(Number { cut: number.cut.or(Some(inst.loc)), ..number })
            }
            Op::Cvt { to, from, saturate: false, .. } if to.is_integer() && from.is_integer() && to.bits() >= from.bits() => of(0),
            Op::Mov { .. } | Op::Shfl { .. } => of(0),
            Op::IAdd { .. } => sum(of(0), of(1)),
            Op::ISub { .. } => match (of(0), of(1)) {
                (Some(_), Some(_)) => None,
                (one, other) => one.or(other),
            },
            Op::IMulLo { ty } => multiplied(sum(of(0), of(1)), *ty),
            Op::IMadLo { ty } => sum(multiplied(sum(of(0), of(1)), *ty), of(2)),
            Op::Shl { ty } => multiplied(of(0), *ty),
            Op::IMulWide { .. } => sum(of(0), of(1)),
            Op::IMadWide { .. } => sum(sum(of(0), of(1)), of(2)),
            Op::Selp { .. } => Some(of(0)?.surely(of(1)?)),
            _ => None,
        }
    }

    fn access(&mut self, inst: &Inst, number: Number) {
        let Some(cut) = number.cut else { return };
        let line = number.product.unwrap_or(cut);
        if self.quiet > 0 || self.excused(number.param) || !self.reported.insert(line) {
            return;
        }
        let param = self.found.body.params[number.param as usize].name;
        let (cut_at, access) = (self.found.at(cut), self.found.at(inst.loc));
        let what = match number.product {
            Some(_) => format!(
                "this 32-bit product has only the low half of parameter {param}, which has 64 bits (cut at {cut_at}), and the address of the access at \
                 {access} comes from it: a large tensor is accessed at the wrong place; multiply into 64 bits"
            ),
            None => format!(
                "only the low half of parameter {param}, which has 64 bits, is taken here, and the address of the access at {access} comes from it: \
                 a large tensor is accessed at the wrong place; keep the 64 bits"
            ),
        };
        self.found.fault("cut", line, Some(inst.loc), what);
    }

    /// Whether a condition around what is walked may say that the number of a parameter fits.
    fn excused(&self, param: u32) -> bool {
        let decides =
            |&(cond, of_loop): &(Reg, bool)| (!of_loop && self.levels[cond.0 as usize] == Uniformity::Grid) || self.comes_from(cond, param);
        self.conditions.iter().any(decides)
    }

    /// Whether a register's value has to do with a parameter: by what is computed, or by the conditions under which it is written.
    fn comes_from(&self, reg: Reg, param: u32) -> bool {
        let mut seen = BTreeSet::from([reg]);
        let mut open = vec![reg];
        while let Some(reg) = open.pop() {
            for &writer in &self.writers[reg.0 as usize] {
                let site = &self.sites.sites[writer];
                if matches!(site.inst.op, Op::ParamLoad { index, .. } if index == param) {
                    return true;
                }
                let around = self.sites.chain(site.block).filter_map(|(_, place)| match place.kind {
                    Kind::Then(cond) | Kind::Otherwise(cond) | Kind::Head(cond) | Kind::Body(cond) => Some(cond),
                    Kind::Top | Kind::Role(_) => None,
                });
                let read = site.inst.ins.iter().filter_map(|operand| operand.reg());
                open.extend(read.chain(around).chain(site.inst.guard.map(|guard| guard.pred)).filter(|reg| seen.insert(*reg)));
            }
        }
        false
    }
}

/// The parameters whose bits are taken apart, so that they may hold several numbers.
fn in_parts(sites: &Sites<'_>, writers: &[Vec<usize>]) -> BTreeSet<u32> {
    let mut parts = BTreeSet::new();
    for site in &sites.sites {
        match site.inst.op {
            Op::ParamLoad { index, ty, .. } if ty.bits() < 64 => drop(parts.insert(index)),
            Op::Shr { ty } | Op::Bfe { ty } | Op::Unpack { whole: ty, .. } if ty.bits() == 64 => {
                let mut open: Vec<Reg> = site.inst.ins[0].reg().into_iter().collect();
                let mut seen = BTreeSet::from_iter(open.clone());
                while let Some(reg) = open.pop() {
                    for &writer in &writers[reg.0 as usize] {
                        let inst = sites.sites[writer].inst;
                        match inst.op {
                            Op::ParamLoad { index, .. } => drop(parts.insert(index)),
                            Op::Mov { .. } => open.extend(inst.ins[0].reg().filter(|reg| seen.insert(*reg))),
                            _ => {}
                        }
                    }
                }
            }
            _ => {}
        }
    }
    parts
}
