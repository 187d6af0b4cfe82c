//! Warpgroup matrix products in flight.
//!
//! Each of the four warps brings its registers; the last to come starts the product. From there on until a wait covers its group, the
//! accumulators may be neither read nor written and registers of A and of its metadata not written; operands in shared memory are read at some moment between.

use super::alu::Lanes;
use super::clock::{Clock, Of};
use super::decode::{Instruction, Source};
use super::finding::FindingKind;
use super::matrix;
use super::shadow::{Access, ConflictKind, Memo, UNIT, flag};
use super::state::{Culprit, Fault, Machine, Unit, Wait, Warp};
use super::threads::Place;
use super::warp::{Flow, culprit};
use crate::inst::WgmmaShape;
use std::collections::VecDeque;

/// A product of a warpgroup.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    serial: u32,
    shape: WgmmaShape,
    a: Source3,
    b: u64,
    /// Of a sparse A: the register that says where its elements stand, and which part of it does.
    metadata: Option<(Source, u32)>,
    scale_d: bool,
    accumulators: Vec<u32>,
    loc: u32,
    clock: Clock,
}

/// Where A comes from.
#[derive(Clone, Debug)]
enum Source3 {
    Descriptor(u64),
    Registers([Source; 4]),
}

/// What a warpgroup has gathered and not done yet.
#[derive(Debug, Default)]
pub(crate) struct WarpgroupState {
    /// Products begun.
    serial: u32,
    /// Products done.
    done: u32,
    arrived: u32,
    joined: Option<(u32, u64, u64, bool, Clock)>,
    queue: VecDeque<Product>,
}

/// One warp's view of its products in flight.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    /// Groups closed.
    groups: u32,
    open: VecDeque<Flight>,
}

#[derive(Debug)]
struct Flight {
    serial: u32,
    group: Option<u32>,
    accumulators: Vec<u32>,
    a: Vec<u32>,
    loc: u32,
}

fn mark(warp: &mut Warp) {
    for flight in warp.flight.iter_mut() {
        flight.0 = 0;
    }
    for open in &warp.wgmma.open {
        for &reg in &open.accumulators {
            let entry = &mut warp.flight[reg as usize];
            *entry = (entry.0 | 1, open.loc);
        }
        for &reg in &open.a {
            let entry = &mut warp.flight[reg as usize];
            *entry = (entry.0 | 2, open.loc);
        }
    }
    warp.flights = warp.wgmma.open.len() as u32;
}

impl Machine<'_> {
    pub(crate) fn wgmma(&mut self, warp: &mut Warp, inst: &Instruction, shape: &WgmmaShape) -> Result<Flow, Fault> {
        let group = (warp.index / 4) as usize;
        if let Wait::Warpgroup { serial } = warp.wait {
            if self.ctas[warp.cta].warpgroups[group].serial == serial {
                return Ok(Flow::Block);
            }
            warp.wait = Wait::Nothing;
            return Ok(Flow::Next);
        }
        let here = culprit(warp, inst.loc, None);
        if warp.index / 4 * 4 + 4 > self.decoded(warp.cta).body.threads.div_ceil(32) {
            let message = "wgmma in a warpgroup that has not four warps";
            return Err(self.finding(FindingKind::Divergence, here, None, message));
        }
        let scale_d = self.uniform(warp, inst.ins[shape.scale_d_operand()], warp.full, inst.loc, "scale-d")? & 1 == 1;
        let b = self.uniform(warp, inst.ins[shape.b_operand()], warp.full, inst.loc, "the descriptor of B")?;
        let a = if shape.a_in_registers { 0 } else { self.uniform(warp, inst.ins[0], warp.full, inst.loc, "the descriptor of A")? };
        let accumulators: Vec<u32> = inst.outs.iter().flatten().copied().collect();
        let a_sources: Vec<Source> = if shape.a_in_registers { inst.ins[..4].to_vec() } else { Vec::new() };
        let metadata = match shape.sparse {
            true => {
                let selector = self.uniform(warp, inst.ins[shape.b_operand() + 2], warp.full, inst.loc, "the sparsity selector")?;
                Some((inst.ins[shape.b_operand() + 1], selector as u32))
            }
            false => None,
        };
        // Metadata is read as late as A is.
        let read_late = a_sources.iter().copied().chain(metadata.map(|(source, _)| source));
        let a_registers: Vec<u32> = read_late.filter_map(|source| if let Source::Reg(reg) = source { Some(reg) } else { None }).collect();
        if accumulators.len() != shape.d_registers() {
            let message = format!("wgmma with {} accumulators, its shape has {}", accumulators.len(), shape.d_registers());
            return Err(self.finding(FindingKind::IllegalOperand, here, None, message));
        }
        for &reg in accumulators.iter().chain(&a_registers) {
            if warp.touched[reg as usize] == warp.wgmma_fences + 1 || warp.wgmma_fences == 0 {
                let message = format!(
                    "r{reg} was written by another instruction since the last wgmma.fence: the product may use its old value; run wgmma.fence between"
                );
                return Err(self.finding(FindingKind::WgmmaFence, here, None, message));
            }
        }
        for &reg in &a_registers {
            let bad = warp.poison[reg as usize] & warp.full;
            if bad != 0 {
                return Err(self.unwritten(warp, Source::Reg(reg), inst.loc, bad, "goes into a matrix product"));
            }
            if warp.flight[reg as usize].0 & 1 != 0 {
                return Err(self.accumulator_as_operand(warp, reg, inst.loc));
            }
        }
        for &reg in &accumulators {
            let bad = warp.poison[reg as usize] & warp.full;
            if scale_d && bad != 0 && warp.flight[reg as usize].0 & 1 == 0 {
                return Err(self.unwritten(warp, Source::Reg(reg), inst.loc, bad, "is added to by a matrix product"));
            }
            if warp.flight[reg as usize].0 & 2 != 0 {
                return Err(self.accumulator_as_operand(warp, reg, inst.loc));
            }
        }
        // A product in flight on other accumulators that overlap only in part is not the same accumulator.
        let range = |list: &[u32]| (list.iter().copied().min(), list.iter().copied().max());
        let (low, high) = range(&accumulators);
        for open in warp.wgmma.open.iter().filter(|open| open.accumulators != accumulators) {
            let (open_low, open_high) = range(&open.accumulators);
            if open_low > high || low > open_high {
                continue;
            }
            if open.accumulators.iter().any(|reg| accumulators.contains(reg)) {
                return Err(self.accumulator_as_operand(warp, accumulators[0], inst.loc));
            }
        }
        let cp = self.ctas[warp.cta].actor + self.ctas[warp.cta].actors.unit(Unit::CpAsync, warp.index);
        let view = warp.release(warp.full, cp);
        let pc = warp.pc;
        let state = &mut self.ctas[warp.cta].warpgroups[group];
        match &mut state.joined {
            None => state.joined = Some((pc, a, b, scale_d, view)),
            Some((other_pc, other_a, other_b, other_scale, clock)) => {
                let same = *other_pc == pc && *other_a == a && *other_b == b && *other_scale == scale_d;
                let other_pc = *other_pc;
                clock.meet(&view);
                if !same {
                    let line = self.line(warp.cta, self.current_loc(warp.cta, other_pc));
                    let message = format!(
                        "the warps of this warpgroup reach different wgmma, or bring different descriptors or scale-d (another warp: {line}): all four must issue the same product"
                    );
                    return Err(self.finding(FindingKind::Divergence, here, Some(line), message));
                }
            }
        }
        let state = &mut self.ctas[warp.cta].warpgroups[group];
        let serial = state.serial;
        state.arrived += 1;
        warp.wgmma.open.push_back(Flight {
            serial: serial + 1,
            group: None,
            accumulators: accumulators.clone(),
            a: a_registers.clone(),
            loc: inst.loc,
        });
        mark(warp);
        for &reg in &accumulators {
            warp.poison[reg as usize] = 0;
        }
        if state.arrived < 4 {
            warp.wait = Wait::Warpgroup { serial };
            return Ok(Flow::Block);
        }
        state.arrived = 0;
        state.serial += 1;
        let Some((_, _, _, _, clock)) = state.joined.take() else { return Ok(Flow::Next) };
        let a = match <[Source; 4]>::try_from(a_sources) {
            Ok(registers) => Source3::Registers(registers),
            Err(_) => Source3::Descriptor(a),
        };
        state.queue.push_back(Product { serial: serial + 1, shape: *shape, a, b, metadata, scale_d, accumulators, loc: inst.loc, clock });
        self.counters(warp.cta).macs += 64 * u64::from(shape.n) * u64::from(shape.k());
        self.wake(warp.cta);
        self.issue_wgmma(warp.cta, group, warp.index, inst.loc);
        Ok(Flow::Next)
    }

    fn accumulator_as_operand(&self, warp: &Warp, reg: u32, loc: u32) -> Fault {
        let line = self.line(warp.cta, warp.flight[reg as usize].1);
        let message = format!(
            "r{reg} belongs to the wgmma issued at {line}, which is still in flight, and this wgmma uses it in another way: wait for its group first"
        );
        self.finding(FindingKind::AccumulatorInFlight, culprit(warp, loc, None), Some(line), message)
    }

    pub(crate) fn wgmma_commit(&mut self, warp: &mut Warp) -> Flow {
        warp.wgmma.groups += 1;
        let group = warp.wgmma.groups;
        for flight in &mut warp.wgmma.open {
            flight.group.get_or_insert(group);
        }
        Flow::Next
    }

    pub(crate) fn wgmma_wait(&mut self, warp: &mut Warp, pending: u32) -> Result<Flow, Fault> {
        let target = warp.wgmma.groups.saturating_sub(pending);
        let group = warp.index / 4;
        let last =
            warp.wgmma.open.iter().filter(|flight| flight.group.is_some_and(|group| group <= target)).map(|flight| flight.serial).max();
        if let Some(last) = last {
            let state = &self.ctas[warp.cta].warpgroups[group as usize];
            if state.done < last {
                warp.wait = Wait::Wgmma;
                return Ok(Flow::Block);
            }
            warp.wgmma.open.retain(|flight| flight.serial > last);
            mark(warp);
            let cta = &self.ctas[warp.cta];
            let actor = cta.actor + cta.actors.wgmma(group);
            warp.clock.raise(actor, Of::Seen, last);
        }
        warp.wait = Wait::Nothing;
        Ok(Flow::Next)
    }

    /// Carries out the oldest product of a warpgroup.
    pub(crate) fn do_wgmma(&mut self, cta: usize, group: usize) -> Result<(), Fault> {
        let Some(product) = self.ctas[cta].warpgroups[group].queue.pop_front() else { return Ok(()) };
        let at = Culprit { cta, warp: Some(group as u32 * 4), lane: None, loc: product.loc };
        let shape = product.shape;
        let illegal = |machine: &Self, error: matrix::MatrixError| {
            let kind = match error {
                matrix::MatrixError::OutOfRange { .. } => FindingKind::OutOfBounds,
                _ => FindingKind::IllegalOperand,
            };
            machine.finding(kind, at, None, error.to_string())
        };
        let mut a = match &product.a {
            Source3::Descriptor(bits) => {
                let a = matrix::read_a(&shape, *bits, self.ctas[cta].shared.data()).map_err(|error| illegal(self, error))?;
                self.check_chunks(&product, at, group, &a.chunks, "A")?;
                a
            }
            Source3::Registers(sources) => {
                let values: [[Lanes; 4]; 4] = std::array::from_fn(|warp| {
                    let warp = self.ctas[cta].warps[group * 4 + warp].as_ref();
                    std::array::from_fn(|index| warp.map_or([0; 32], |warp| *warp.lanes(sources[index])))
                });
                let refs: [[&Lanes; 4]; 4] = std::array::from_fn(|warp| std::array::from_fn(|index| &values[warp][index]));
                matrix::read_a_registers(&shape, &refs).map_err(|error| illegal(self, error))?
            }
        };
        if let Some((source, selector)) = product.metadata {
            let words: [Lanes; 4] =
                std::array::from_fn(|warp| self.ctas[cta].warps[group * 4 + warp].as_ref().map_or([0; 32], |warp| *warp.lanes(source)));
            let words: [&Lanes; 4] = std::array::from_fn(|warp| &words[warp]);
            matrix::place_sparse(&shape, &mut a, &words, selector).map_err(|error| illegal(self, error))?;
        }
        let b = matrix::read_b(&shape, product.b, self.ctas[cta].shared.data()).map_err(|error| illegal(self, error))?;
        self.check_chunks(&product, at, group, &b.chunks, "B")?;
        let mut d = matrix::Accumulator::new(&shape);
        if product.scale_d {
            for index in 0..4 {
                let Some(warp) = self.ctas[cta].warps[group * 4 + index].as_ref() else { continue };
                for (register, &reg) in product.accumulators.iter().enumerate() {
                    d.load(index, register, &warp.registers[reg as usize]);
                }
            }
        }
        matrix::multiply(&shape, &a, &b, product.scale_d, &mut d, self.options.accumulation).map_err(|error| illegal(self, error))?;
        for index in 0..4 {
            let Some(warp) = self.ctas[cta].warps[group * 4 + index].as_mut() else { continue };
            for (register, &reg) in product.accumulators.iter().enumerate() {
                warp.registers[reg as usize] = d.store(index, register);
            }
        }
        self.ctas[cta].warpgroups[group].done = product.serial;
        self.wake(cta);
        Ok(())
    }

    fn check_chunks(&mut self, product: &Product, at: Culprit, group: usize, chunks: &[u32], operand: &str) -> Result<(), Fault> {
        let launch = self.grids[self.ctas[at.cta].grid].first_actor;
        let owner = &mut self.ctas[at.cta];
        let stride = owner.actors.count();
        let first = owner.actor - owner.rank * stride;
        let access = Access {
            actor: owner.actor + owner.actors.wgmma(group as u32),
            epoch: product.serial,
            loc: product.loc,
            flags: flag::ASYNC,
            clock: &product.clock,
            extra: &[],
            cp: (u32::MAX - 1, 0),
            cta: owner.actor..owner.actor + stride,
            cluster: first..first + stride * owner.peers.len() as u32,
            launch,
            global: false,
            in_order: true,
            memo: Memo::default(),
        };
        let mut piece = owner.shared.piece();
        for &chunk in chunks {
            match piece.check_read(&mut self.readers, chunk as usize, 16, &access, UNIT) {
                Ok(true) => {}
                Ok(false) => {
                    let name = self.place_name(Place::Shared { cta: at.cta, offset: chunk }, 0);
                    let message =
                        format!("operand {operand} of this wgmma covers {name}, which nothing wrote: the product is whatever stood there");
                    return Err(self.finding(FindingKind::UnwrittenMemory, at, None, message));
                }
                Err(conflict) => {
                    debug_assert!(conflict.kind != ConflictKind::NonCoherent);
                    let place = Place::Shared { cta: at.cta, offset: chunk };
                    return Err(self.conflict(at, &format!("this wgmma (operand {operand})"), place, conflict, false));
                }
            }
        }
        Ok(())
    }

    /// A warp that ends with products in flight.
    pub(crate) fn check_flights_at_exit(&self, warp: &Warp) -> Result<(), Fault> {
        match warp.wgmma.open.front() {
            None => Ok(()),
            Some(flight) => {
                let message = "this wgmma is still in flight when its warp exits: its result is lost and its operands may be overwritten";
                Err(self.finding(FindingKind::AccumulatorInFlight, culprit(warp, flight.loc, None), None, message))
            }
        }
    }
}
