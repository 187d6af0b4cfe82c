//! Matrix products in flight: `[flight]`, `[fence]`, `[commit]`, and the part of `[accumulators]` that needs them.
//!
//! The walk keeps, for each register that some `wgmma` uses, the youngest product that may still use it and how many groups were closed
//! since. A loop is walked until its entry state no longer changes, entered from above or from its own end; at the end of an `if` only
//! what holds on both sides is kept, since the condition may go with one that guards the wait.

use super::Findings;
use crate::inst::{MatrixType, Op, WgmmaShape};
use crate::ir::{Block, Inst, Loc, Reg, Stmt};
use std::collections::{BTreeMap, BTreeSet};

/// Ages beyond this are one: no wait leaves as many groups in flight.
const OLDEST: u32 = 64;
/// Turns after which a loop's state is taken as it is; each turn only adds flights or makes them younger, so few are needed.
const MOST_TURNS: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// Accumulator of a product of this many columns, depth and type.
    Accumulator(u32, u32, MatrixType),
    /// A fragment register.
    Fragment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flight {
    what: Use,
    /// Groups closed since the product's own group was closed; none where it is not closed yet.
    age: Option<u32>,
    /// A wait that did not cover it, since its group was open.
    missed: Option<Loc>,
    loc: Loc,
}

impl Flight {
    /// Order of youth: open, then by age.
    fn youth(&self) -> u32 {
        self.age.map_or(0, |age| age + 1)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    flights: BTreeMap<Reg, Flight>,
    /// Matrix registers written by other instructions since the last fence.
    written: BTreeMap<Reg, Loc>,
    fenced: bool,
    /// The first product of the open group.
    open: Option<Loc>,
}

impl State {
    /// What holds on both ways.
    fn both(&self, other: &State) -> State {
        let flights = self
            .flights
            .iter()
            .filter_map(|(reg, one)| other.flights.get(reg).map(|two| (*reg, if one.youth() >= two.youth() { *one } else { *two })))
            .collect();
        let written = self.written.iter().filter(|(reg, _)| other.written.contains_key(reg)).map(|(reg, loc)| (*reg, *loc)).collect();
        State { flights, written, fenced: self.fenced || other.fenced, open: self.open.and(other.open) }
    }

    /// What may hold on one of two ways that are both taken: into a loop and around it.
    fn either(&self, around: &State) -> State {
        let mut state = self.clone();
        for (reg, two) in &around.flights {
            state
                .flights
                .entry(*reg)
                .and_modify(|one| {
                    if two.youth() < one.youth() {
                        *one = *two
                    }
                })
                .or_insert(*two);
        }
        for (reg, loc) in &around.written {
            state.written.entry(*reg).or_insert(*loc);
        }
        state.open = state.open.or(around.open);
        state
    }
}

pub(super) fn check(found: &mut Findings<'_>) {
    let mut matrix = vec![false; found.body.registers.len()];
    let mut any = false;
    found.body.for_each_inst(&mut |inst| {
        if let Op::Wgmma { shape } = &inst.op {
            any = true;
            for reg in inst.outs.iter().flatten().copied().chain(fragments(inst, shape)) {
                matrix[reg.0 as usize] = true;
            }
        }
    });
    if any {
        let body = &found.body.body;
        let mut walk = Walk { found, matrix, quiet: 0, budget: None, together: BTreeSet::new() };
        let mut state = State::default();
        walk.block(body, &mut state);
        walk.end(&state);
    }
}

fn fragments(inst: &Inst, shape: &WgmmaShape) -> impl Iterator<Item = Reg> {
    let count = if shape.a_in_registers { WgmmaShape::A_REGISTERS } else { 0 };
    inst.ins[..count].iter().filter_map(|operand| operand.reg()).collect::<Vec<_>>().into_iter()
}

struct Walk<'f, 'a> {
    found: &'f mut Findings<'a>,
    /// The registers that some `wgmma` uses.
    matrix: Vec<bool>,
    /// Above 0 while a loop's state is still being found: nothing is reported.
    quiet: u32,
    /// Registers a thread of the role that is walked.
    budget: Option<u32>,
    /// Accumulators of the products issued in this block since its last wait.
    together: BTreeSet<Reg>,
}

impl Walk<'_, '_> {
    fn fault(&mut self, rule: &'static str, loc: Loc, second: Option<Loc>, what: String) {
        if self.quiet == 0 {
            self.found.fault(rule, loc, second, what);
        }
    }

    fn end(&mut self, state: &State) {
        if let Some(loc) = state.open {
            self.fault(
                "commit",
                loc,
                None,
                "no wgmma.commit_group closes the group of this wgmma before its warps end: no wait covers it, and its result may never arrive".into(),
            );
        }
    }

    fn block(&mut self, block: &Block, state: &mut State) {
        self.together.clear();
        for stmt in &block.stmts {
            match stmt {
                Stmt::Inst(inst) => self.inst(inst, state),
                Stmt::If { then, otherwise, .. } => {
                    let mut other = state.clone();
                    self.block(then, state);
                    self.block(otherwise, &mut other);
                    *state = state.both(&other);
                    self.together.clear();
                }
                Stmt::Loop { head, body, .. } => {
                    let before = state.clone();
                    self.quiet += 1;
                    for _ in 0..MOST_TURNS {
                        let mut turn = state.clone();
                        self.block(head, &mut turn);
                        self.block(body, &mut turn);
                        let next = before.either(&turn);
                        if next == *state {
                            break;
                        }
                        *state = next;
                    }
                    self.quiet -= 1;
                    self.block(head, state);
                    let mut turn = state.clone();
                    self.block(body, &mut turn);
                    self.together.clear();
                }
                Stmt::Roles { roles, .. } => {
                    let before = state.clone();
                    let budget = self.budget;
                    for role in roles {
                        let mut inside = before.clone();
                        self.budget = role.registers.or(budget);
                        self.block(&role.body, &mut inside);
                        self.end(&inside);
                        inside.open = before.open;
                        *state = state.both(&inside);
                    }
                    self.budget = budget;
                    self.together.clear();
                }
                Stmt::StopWhen { .. } | Stmt::Comment(_) => {}
            }
        }
    }

    fn inst(&mut self, inst: &Inst, state: &mut State) {
        match &inst.op {
            Op::WgmmaFence {} => {
                state.fenced = true;
                state.written.clear();
            }
            Op::WgmmaCommit {} => {
                state.open = None;
                for flight in state.flights.values_mut() {
                    flight.age = Some(flight.age.map_or(0, |age| (age + 1).min(OLDEST)));
                }
            }
            Op::WgmmaWait { pending } => {
                self.together.clear();
                state.flights.retain(|_, flight| flight.age.is_none_or(|age| age < *pending));
                for flight in state.flights.values_mut().filter(|flight| flight.age.is_none()) {
                    flight.missed.get_or_insert(inst.loc);
                }
            }
            Op::Wgmma { shape } => self.product(inst, shape, state),
            _ => {
                for reg in inst.ins.iter().filter_map(|operand| operand.reg()) {
                    self.touch(reg, inst.loc, state, false);
                }
                for reg in inst.outs.iter().flatten() {
                    self.touch(*reg, inst.loc, state, true);
                    if self.matrix[reg.0 as usize] && inst.guard.is_none() {
                        state.written.insert(*reg, inst.loc);
                    }
                }
            }
        }
    }

    /// An instruction that is no `wgmma` reads or writes a register.
    fn touch(&mut self, reg: Reg, loc: Loc, state: &State, write: bool) {
        let Some(flight) = state.flights.get(&reg) else { return };
        let (kind, consequence) = match (flight.what, write) {
            (Use::Fragment, false) => return,
            (Use::Fragment, true) => ("A register", "the product may take the new value"),
            (Use::Accumulator(..), false) => ("accumulator", "the value is not there yet"),
            (Use::Accumulator(..), true) => ("accumulator", "the product may overwrite it, or add to it"),
        };
        let (name, issued) = (self.found.register(reg), self.found.at(flight.loc));
        let verb = if write { "written" } else { "read" };
        match flight.missed {
            Some(wait) => {
                let wait = self.found.at(wait);
                self.fault(
                    "commit",
                    loc,
                    Some(flight.loc),
                    format!("{kind} {name} is {verb} here, but no wgmma.commit_group stands between the wgmma issued at {issued} and the wait at {wait}, which does not cover it: {consequence}"),
                );
            }
            None => self.fault(
                "flight",
                loc,
                Some(flight.loc),
                format!("{kind} {name} is {verb} here while the wgmma issued at {issued} is still in flight: {consequence}"),
            ),
        }
    }

    fn product(&mut self, inst: &Inst, shape: &WgmmaShape, state: &mut State) {
        let what = Use::Accumulator(shape.n, shape.k(), shape.d);
        let fragment: Vec<Reg> = fragments(inst, shape).collect();
        if state.fenced {
            let dirty = inst.outs.iter().flatten().chain(&fragment).find_map(|reg| state.written.get(reg).map(|loc| (*reg, *loc)));
            if let Some((reg, written)) = dirty {
                let (name, at) = (self.found.register(reg), self.found.at(written));
                self.fault(
                    "fence",
                    inst.loc,
                    Some(written),
                    format!("{name} is used by this wgmma and was written at {at}, with no wgmma.fence between: the product may use the old value"),
                );
            }
        } else {
            self.fault(
                "fence",
                inst.loc,
                None,
                "no wgmma.fence stands before this wgmma, the first: it may use registers and tiles as they were before".into(),
            );
        }
        for reg in &fragment {
            self.touch(*reg, inst.loc, state, false);
        }
        for reg in inst.outs.iter().flatten() {
            match state.flights.get(reg) {
                Some(flight) if flight.what == Use::Fragment => self.touch(*reg, inst.loc, state, true),
                Some(flight) if flight.what != what => {
                    let (name, at, loc) = (self.found.register(*reg), self.found.at(flight.loc), flight.loc);
                    self.fault(
                        "flight",
                        inst.loc,
                        Some(loc),
                        format!("accumulator {name} is used here while a wgmma of another shape, issued at {at}, is still in flight: only products of one shape are ordered among themselves"),
                    );
                    // The other accumulators of the pair would say the same.
                    break;
                }
                _ => {}
            }
        }
        for reg in fragment {
            state.flights.entry(reg).or_insert(Flight { what: Use::Fragment, age: None, missed: None, loc: inst.loc });
            if let Some(flight) = state.flights.get_mut(&reg)
                && flight.what == Use::Fragment
            {
                *flight = Flight { what: Use::Fragment, age: None, missed: None, loc: inst.loc };
            }
        }
        for reg in inst.outs.iter().flatten() {
            state.flights.insert(*reg, Flight { what, age: None, missed: None, loc: inst.loc });
            self.together.insert(*reg);
        }
        state.open.get_or_insert(inst.loc);
        // Measured at 240 registers a thread: 208 accumulators compile cleanly, 216 spill.
        let most = if self.budget.is_some_and(|budget| budget > 240) { 240 } else { 208 };
        if self.together.len() > most {
            let count = self.together.len();
            self.fault(
                "accumulators",
                inst.loc,
                None,
                format!("{count} accumulators a thread are in flight here, but {most} fit beside the rest: ptxas would spill or serialize them (C7512)"),
            );
            self.together.clear();
        }
    }
}
