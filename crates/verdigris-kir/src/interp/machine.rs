//! A run: steps of the program, CTAs coming and going, whose turn it is, and what it means when nobody can go on.

use super::agent::Groups;
use super::alu::Noise;
use super::clock::Clock;
use super::decode::Flat;
use super::finding::{Finding, FindingKind, Findings};
use super::memory::{Memory, PARAM_BASE};
use super::report::{Counters, Report};
use super::shadow::Readers;
use super::state::{Actors, Cta, CtaBarrier, Culprit, Fault, Grid, Machine, Rng, Spare, Wait, Warp};
use super::wgmma::{Flights, WarpgroupState};
use super::{AsyncPolicy, Kernels, Options};
use crate::execution::{GridFunction, Known};
use crate::program::{Address, Arg, Base, Divisor, Launch, Program, Residency, Step};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

/// The 8 bytes that open a tensor map in simulated memory; a number of [`Machine::maps`] follows.
pub(crate) const MAP_MAGIC: u64 = 0x7065_6d72_6f73_6e74;
/// Instructions that a warp runs before it is another's turn, at most.
const TURN: usize = 48;
/// Number of hardware barriers of a CTA.
const CTA_BARRIERS: usize = 16;

fn launch_finding(kernel: &str, message: String) -> Fault {
    Box::new(Finding {
        kind: FindingKind::Launch,
        kernel: kernel.to_string(),
        at: Vec::new(),
        cta: [0; 3],
        warp: None,
        lane: None,
        second: Vec::new(),
        message,
    })
}

/// Where the pieces of a program stand in memory.
struct Bindings {
    scratch: Vec<usize>,
    constants: Vec<usize>,
    buffers: usize,
}

impl Bindings {
    fn slot(&self, base: Base) -> Result<usize, String> {
        let (slot, what) = match base {
            Base::Buffer(slot) => ((slot < self.buffers).then_some(slot), format!("buffer {slot} of {}", self.buffers)),
            Base::Scratch(index) => (self.scratch.get(index).copied(), format!("scratch {index} of {}", self.scratch.len())),
            Base::Constant(index) => (self.constants.get(index).copied(), format!("constant {index} of {}", self.constants.len())),
        };
        slot.ok_or_else(|| format!("the program names {what}, which does not exist"))
    }

    fn address(&self, address: Address) -> Result<u64, String> {
        Ok(Memory::base(self.slot(address.base)?) + address.offset_bytes)
    }
}

pub(crate) fn run(program: &Program, kernels: &Kernels, memory: &mut Memory, options: &Options) -> Result<Report, Findings> {
    let buffers = memory.buffers.len();
    let bindings = Bindings {
        scratch: program.scratch.iter().map(|piece| memory.add_scratch(piece.name, piece.bytes)).collect(),
        constants: program.constants.iter().map(|bytes| memory.add_constant(bytes)).collect(),
        buffers,
    };
    memory.forget_history();
    let mut machine = Machine {
        memory,
        rng: Rng(options.seed),
        noise: options.float_noise.map(Noise::new),
        options: options.clone(),
        readers: Readers::default(),
        results: Box::new([[0; 32]; 8]),
        spare: Spare::default(),
        grids: Vec::new(),
        ctas: Vec::new(),
        cluster_barriers: HashMap::new(),
        agents: Vec::new(),
        next_agent: 0,
        sync: HashMap::new(),
        maps: Vec::new(),
        map_releases: HashMap::new(),
        ready: VecDeque::new(),
        blocked: Vec::new(),
        polling: Vec::new(),
        next_actor: 0,
        ticks: 0,
        issued: false,
        stops: HashMap::new(),
    };
    let result = machine.program(program, kernels, &bindings);
    machine.memory.buffers.truncate(buffers);
    result.map_err(|fault| Findings { findings: vec![*fault], seed: options.seed })
}

impl Machine<'_> {
    fn program(&mut self, program: &Program, kernels: &Kernels, bindings: &Bindings) -> Result<Report, Fault> {
        let mut report = Report::default();
        let mut at = 0;
        // As on a device, where whoever executes binds each of them.
        let (given, needed) = (bindings.buffers, program.buffer_alignment_bytes.len());
        if given < needed {
            return Err(launch_finding("", format!("buffer {given} is bound to nothing: the program has {needed} buffers")));
        }
        self.check_lists(program, bindings.buffers)?;
        let element_bytes: Vec<u32> = program.lists.iter().map(|list| list.element_bytes).collect();
        while at < program.steps.len() {
            match &program.steps[at] {
                Step::Fill { at: address, bytes, value } => {
                    let (slot, offset) = self.host_range(bindings, *address, *bytes)?;
                    let mut left = *bytes;
                    let mut to = offset;
                    let chunk = [*value; 4096];
                    while left > 0 {
                        let count = left.min(4096);
                        self.memory.write(slot, to, &chunk[..count as usize]);
                        to += count;
                        left -= count;
                    }
                    at += 1;
                }
                Step::Copy { to, from, bytes } => {
                    let (to, to_offset) = self.host_range(bindings, *to, *bytes)?;
                    let (from, from_offset) = self.host_range(bindings, *from, *bytes)?;
                    self.memory.copy(from, from_offset, to, to_offset, *bytes);
                    at += 1;
                }
                Step::Launch(_) | Step::SizedLaunch(..) => {
                    let first = at;
                    at += 1;
                    let overlaps = |step: &Step| step.as_launch().is_some_and(|(launch, _)| launch.overlap);
                    while program.steps.get(at).is_some_and(overlaps) {
                        at += 1;
                    }
                    let mut group: Vec<(&Launch, [u32; 3])> = Vec::new();
                    for (launch, function) in program.steps[first..at].iter().filter_map(Step::as_launch) {
                        match function {
                            None => group.push((launch, launch.grid)),
                            Some(function) => group.extend(self.sized(launch, function, kernels)?.map(|grid| (launch, grid))),
                        }
                    }
                    self.launches(&group, report.launches.len() as u32, &element_bytes, kernels, bindings)?;
                    for grid in self.grids.drain(..) {
                        report.total.add(&grid.counters);
                        report.launches.push((grid.decoded.body.name.clone(), grid.counters));
                    }
                    self.ctas.clear();
                    self.cluster_barriers.clear();
                    self.sync.clear();
                    self.stops.clear();
                    self.ready.clear();
                    self.blocked.clear();
                    self.polling.clear();
                }
            }
        }
        Ok(report)
    }

    /// The grid of the day; `None` where nothing is launched.
    fn sized(&self, launch: &Launch, function: &GridFunction, kernels: &Kernels) -> Result<Option<[u32; 3]>, Fault> {
        let name = launch.kernel.name();
        let decoded = kernels.decoded(&launch.kernel).map_err(|faults| launch_finding(name, format!("does not verify: {faults}")))?;
        let lengths = |list: usize| self.options.lists.get(list).map(|tensors| tensors.len() as u64);
        let known = Known { scalars: &self.options.host_scalars, list_lengths: &lengths };
        function.grid(&known, launch.grid, decoded.body.cluster).map_err(|fault| launch_finding(name, fault.to_string()))
    }

    /// Checks the lists that are bound against those that the program declares.
    fn check_lists(&self, program: &Program, buffers: usize) -> Result<(), Fault> {
        for (number, declared) in program.lists.iter().enumerate() {
            let fail = |what: String| launch_finding("", format!("list `{}`: {what}", declared.name));
            let tensors = self.options.lists.get(number).ok_or_else(|| fail("not given".to_owned()))?;
            if let Some(slot) = tensors.iter().find(|&&slot| slot >= buffers) {
                return Err(fail(format!("buffer {slot} does not exist")));
            }
            let given = |entry: usize| (Memory::base(tensors[entry]), self.memory.bytes(tensors[entry]));
            declared.check(tensors.len() as u64, given).map_err(|fault| fail(fault.to_string()))?;
        }
        Ok(())
    }

    /// The buffer of a list's entry; `None` where the list is shorter.
    fn entry(&self, list: usize, entry: u32) -> Result<Option<usize>, String> {
        let tensors = self.options.lists.get(list).ok_or_else(|| format!("list {list} is not given"))?;
        Ok(tensors.get(entry as usize).copied())
    }

    fn host_range(&self, bindings: &Bindings, address: Address, bytes: u64) -> Result<(usize, u64), Fault> {
        let slot = bindings.slot(address.base).map_err(|message| launch_finding("", message))?;
        let size = self.memory.bytes(slot);
        if address.offset_bytes.checked_add(bytes).is_none_or(|end| end > size) {
            let message = format!("a fill or copy of {bytes} bytes at byte {} of a buffer of {size} bytes", address.offset_bytes);
            return Err(launch_finding("", message));
        }
        Ok((slot, address.offset_bytes))
    }

    fn grid(
        &mut self,
        (launch, dims): (&Launch, [u32; 3]),
        number: u32,
        element_bytes: &[u32],
        kernels: &Kernels,
        bindings: &Bindings,
    ) -> Result<Grid, Fault> {
        let name = launch.kernel.name();
        let decoded = kernels.decoded(&launch.kernel).map_err(|faults| launch_finding(name, format!("does not verify: {faults}")))?;
        let body = &decoded.body;
        let held_clusters = self.options.sms / body.cluster.max(1);
        (launch.check(body).and_then(|()| launch.check_residency(body, self.options.sms, held_clusters)))
            .map_err(|mismatch| launch_finding(name, mismatch.what))?;
        let (offsets, size) = body.param_offsets();
        let mut params = vec![0u8; size as usize];
        for ((arg, param), &offset) in launch.args.iter().zip(&body.params).zip(&offsets) {
            let offset = offset as usize;
            let fail = |message: String| launch_finding(name, format!("parameter {}: {message}", param.name));
            match arg {
                Arg::Scalar(ty, bits) => {
                    let bytes = ty.bytes().max(4) as usize;
                    params[offset..offset + bytes].copy_from_slice(&bits.to_le_bytes()[..bytes]);
                }
                Arg::Divisor(divisor) => {
                    let words = Divisor::new(*divisor).ok_or_else(|| fail("a division by zero".into()))?.words();
                    for (index, word) in words.iter().enumerate() {
                        params[offset + 4 * index..offset + 4 * index + 4].copy_from_slice(&word.to_le_bytes());
                    }
                }
                Arg::Pointer(address) => {
                    let at = bindings.address(*address).map_err(fail)?;
                    params[offset..offset + 8].copy_from_slice(&at.to_le_bytes());
                }
                Arg::HostScalar(ty, index) => {
                    let value = self.options.host_scalars.get(*index).copied();
                    let value = value.ok_or_else(|| fail(format!("host scalar {index} is not given")))?;
                    let bits = value.bits(*ty).map_err(|mismatch| fail(format!("host scalar {index}: {mismatch}")))?;
                    let bytes = ty.bytes() as usize;
                    params[offset..offset + bytes].copy_from_slice(&bits.to_le_bytes()[..bytes]);
                }
                Arg::ListAddress { list, entry } => {
                    let at = self.entry(*list, *entry).map_err(fail)?.map_or(0, Memory::base);
                    params[offset..offset + 8].copy_from_slice(&at.to_le_bytes());
                }
                Arg::ListExtent { list, entry } => {
                    let bytes = self.entry(*list, *entry).map_err(fail)?.map_or(0, |slot| self.memory.bytes(slot));
                    let element_bytes = element_bytes.get(*list).copied().unwrap_or(1);
                    params[offset..offset + 8].copy_from_slice(&(bytes / u64::from(element_bytes)).to_le_bytes());
                }
                Arg::ListCount { list, first, most } => {
                    let length = self.options.lists.get(*list).map(Vec::len).ok_or_else(|| fail(format!("list {list} is not given")))?;
                    let count = (length as u64).saturating_sub(u64::from(*first)).min(u64::from(*most)) as u32;
                    params[offset..offset + 4].copy_from_slice(&count.to_le_bytes());
                }
                Arg::TensorMap(address, spec) => {
                    let at = bindings.address(*address).map_err(fail)?;
                    super::tensor::check(spec).and_then(|()| super::tensor::check_address(at)).map_err(|error| fail(error.to_string()))?;
                    params[offset..offset + 8].copy_from_slice(&MAP_MAGIC.to_le_bytes());
                    params[offset + 8..offset + 16].copy_from_slice(&(self.maps.len() as u64).to_le_bytes());
                    self.maps.push((at, spec.clone()));
                }
            }
        }
        let ctas = dims.into_iter().map(u64::from).product::<u64>();
        let stride = u64::from(Actors::new(&decoded).count());
        if ctas * stride + u64::from(self.next_actor) >= u64::from(u32::MAX) {
            return Err(launch_finding(name, format!("{ctas} CTAs are more than one run can tell apart")));
        }
        let ctas = ctas as u32;
        let clusters = ctas / body.cluster;
        let mut order: Vec<u32> = (0..clusters).collect();
        for at in (1..order.len()).rev() {
            let other = self.rng.below(at + 1);
            order.swap(at, other);
        }
        let limit = match launch.residency {
            Residency::All => clusters as usize,
            Residency::Any => (self.options.resident_ctas / body.cluster).max(1) as usize,
        };
        let first_actor = self.next_actor;
        self.next_actor += ctas * stride as u32;
        Ok(Grid {
            launch: number,
            dims,
            params,
            offsets,
            order,
            next: 0,
            limit,
            resident: 0,
            finished: 0,
            triggered: 0,
            known_at_trigger: u32::MAX,
            ctas,
            first_actor,
            horizon: 0,
            counters: Counters::default(),
            decoded,
        })
    }

    /// Runs launches that may overlap, to the end.
    fn launches(
        &mut self,
        group: &[(&Launch, [u32; 3])],
        number: u32,
        element_bytes: &[u32],
        kernels: &Kernels,
        bindings: &Bindings,
    ) -> Result<(), Fault> {
        let horizon = self.next_actor;
        if number == 0 && group.first().is_some_and(|(launch, _)| launch.overlap) {
            // What ran before the program may not be over: no clock knows of it before its owner has waited.
            self.memory.predecessor = Some(horizon);
            self.next_actor += 1;
        }
        for (index, &launch) in group.iter().enumerate() {
            let mut grid = self.grid(launch, number + index as u32, element_bytes, kernels, bindings)?;
            grid.horizon = horizon;
            self.grids.push(grid);
        }
        loop {
            self.start_ctas();
            if let Some((cta, warp)) = self.pick() {
                self.turn(cta, warp)?;
                while self.options.async_policy == AsyncPolicy::Earliest && !self.agents.is_empty() && self.step_agent()? {}
                if self.options.async_policy == AsyncPolicy::Random && !self.agents.is_empty() && self.rng.below(3) == 0 {
                    self.step_agent()?;
                }
            } else if !self.agents.is_empty() && self.step_agent()? {
            } else if !self.polling.is_empty() {
                self.ready.extend(self.polling.drain(..));
            } else if self.grids.iter().all(|grid| grid.finished == grid.ctas as usize) {
                return Ok(());
            } else if !self.can_start() {
                return Err(self.deadlock());
            }
        }
    }

    fn may_start(&self, index: usize) -> bool {
        let grid = &self.grids[index];
        let earlier_let_it = index == 0 || self.grids[index - 1].triggered == self.grids[index - 1].ctas;
        grid.next < grid.order.len() && grid.resident < grid.limit && earlier_let_it
    }

    fn can_start(&self) -> bool {
        (0..self.grids.len()).any(|index| self.may_start(index))
    }

    fn start_ctas(&mut self) {
        for index in 0..self.grids.len() {
            while self.may_start(index) {
                let grid = &mut self.grids[index];
                let cluster = grid.order[grid.next];
                grid.next += 1;
                grid.resident += 1;
                self.start_cluster(index, cluster);
            }
        }
    }

    fn start_cluster(&mut self, index: usize, cluster: u32) {
        let grid = &self.grids[index];
        let decoded = Arc::clone(&grid.decoded);
        let body = &decoded.body;
        let size = body.cluster;
        let actors = Actors::new(&decoded);
        let stride = actors.count();
        let first = self.ctas.len();
        let peers: Vec<usize> = (first..first + size as usize).collect();
        let sm = self.rng.below(self.options.sms.max(1) as usize) as u32;
        let base = grid.first_actor + cluster * size * stride;
        // Of what is in front of both, a launch knows what the one that let it start knew.
        let let_in = index.checked_sub(1).map_or(0, |earlier| self.grids[earlier].known_at_trigger);
        let (dims, horizon) = (grid.dims, grid.horizon.max(let_in));
        let warps = body.threads.div_ceil(32);
        let entry = body.entry_registers();
        for rank in 0..size {
            let linear = cluster * size + rank;
            let position = [linear % dims[0], linear / dims[0] % dims[1], linear / dims[0] / dims[1]];
            let cta = self.ctas.len();
            let actor = base + rank * stride;
            let clock = || Clock::new(horizon, base, (stride * size) as usize);
            let mut all = Vec::new();
            for warp in 0..warps {
                let lanes = (body.threads - warp * 32).min(32);
                let full = if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 };
                let count = body.registers.len();
                all.push(Some(Box::new(Warp {
                    decoded: Arc::clone(&decoded),
                    index: warp,
                    cta,
                    actor: actor + warp,
                    pc: 0,
                    active: full,
                    full,
                    frames: Vec::new(),
                    registers: self.spare.registers(count),
                    poison: vec![u32::MAX; count],
                    origin: vec![0; count],
                    wrapped: vec![0; count],
                    touched: vec![0; count],
                    flight: vec![(0, 0); count],
                    flights: 0,
                    wgmma_fences: 0,
                    clock: clock(),
                    extra: Vec::new(),
                    epoch: 1,
                    fence_release: Vec::new(),
                    fence_acquire: Vec::new(),
                    wait: Wait::Nothing,
                    exited: false,
                    polling: false,
                    steps: 0,
                    cp: Groups::default(),
                    cp_waited: 0,
                    bulk: Groups::default(),
                    cluster_arrived: None,
                    cluster_turns: 0,
                    register_count: entry,
                    last_poll: None,
                    wgmma: Flights::default(),
                })));
                self.ready.push_back((cta, warp));
            }
            self.ctas.push(Cta {
                grid: index,
                index: position,
                rank,
                peers: peers.clone(),
                sm,
                actors,
                actor,
                shared: self.spare.shared(body.shared_bytes),
                warps: all,
                running: warps,
                barriers: (0..CTA_BARRIERS).map(|_| CtaBarrier { clock: clock(), done: clock(), ..CtaBarrier::default() }).collect(),
                mbarriers: BTreeMap::new(),
                barrier_actors: HashMap::new(),
                warpgroups: (0..warps.div_ceil(4)).map(|_| WarpgroupState::default()).collect(),
                // What the launch's even share leaves over goes to nobody.
                register_pool: 0,
                triggered: false,
                exited: false,
                exit_clock: clock(),
                maps_acquired: HashMap::new(),
                visitors: HashMap::new(),
            });
        }
    }

    fn pick(&mut self) -> Option<(usize, u32)> {
        if self.ready.is_empty() {
            return None;
        }
        let count = self.ready.len();
        let mut at = self.rng.below(count);
        if let Some(starved) = self.options.starved {
            let others = (at..count).chain(0..at).find(|&at| !self.is_starved(starved, self.ready[at]));
            at = others.unwrap_or(at);
        }
        self.ready.swap_remove_back(at)
    }

    /// Whether a warp is of the role that is kept from running.
    fn is_starved(&self, starved: u32, (cta, warp): (usize, u32)) -> bool {
        let warps = self.ctas[cta].warps.len() as u32;
        let size = if warps > 4 { 4 } else { 1 };
        let roles = warps.div_ceil(size);
        roles > 1 && warp / size == starved % roles
    }

    /// Puts the blocked warps of a cluster back into the line, since something happened that they may wait for.
    pub(crate) fn wake(&mut self, cta: usize) {
        let peers = &self.ctas[cta].peers;
        let (low, high) = (peers[0], peers[peers.len() - 1]);
        let ready = &mut self.ready;
        self.blocked.retain(|&(cta, warp)| {
            let stays = cta < low || cta > high;
            if !stays {
                ready.push_back((cta, warp));
            }
            stays
        });
    }

    /// Wakes everyone.
    pub(crate) fn wake_all(&mut self) {
        self.ready.extend(self.blocked.drain(..));
    }

    /// Lets one warp run for a while.
    fn turn(&mut self, cta: usize, index: u32) -> Result<(), Fault> {
        let Some(mut warp) = self.ctas[cta].warps[index as usize].take() else {
            return Ok(());
        };
        let decoded = Arc::clone(self.decoded(cta));
        let length = 1 + self.rng.below(TURN);
        let mut outcome = Ok(super::warp::Flow::Next);
        warp.polling = false;
        for _ in 0..length {
            outcome = self.step(&mut warp, &decoded);
            self.ticks += 1;
            if !matches!(outcome, Ok(super::warp::Flow::Next)) || warp.polling || std::mem::take(&mut self.issued) {
                break;
            }
        }
        let polling = warp.polling;
        self.ctas[cta].warps[index as usize] = Some(warp);
        match outcome? {
            super::warp::Flow::Next if polling => self.polling.push((cta, index)),
            super::warp::Flow::Next => self.ready.push_back((cta, index)),
            super::warp::Flow::Block => self.blocked.push((cta, index)),
            super::warp::Flow::Exit => self.warp_exit(cta, index)?,
        }
        Ok(())
    }

    fn warp_exit(&mut self, cta: usize, index: u32) -> Result<(), Fault> {
        let clock = {
            let cp = self.ctas[cta].actor + self.ctas[cta].actors.unit(super::state::Unit::CpAsync, index);
            let warp = self.ctas[cta].warps[index as usize].as_mut().expect("a warp that just ran");
            warp.exited = true;
            warp.synchronize(cp);
            warp.clock.clone()
        };
        let owner = &mut self.ctas[cta];
        owner.exit_clock.join(&clock);
        owner.running -= 1;
        if owner.running == 0 {
            self.cta_exit(cta)?;
        }
        self.wake(cta);
        Ok(())
    }

    fn cta_exit(&mut self, cta: usize) -> Result<(), Fault> {
        self.check_copies_at_exit(cta)?;
        self.check_agents_at_exit(cta)?;
        let owner = &self.ctas[cta];
        for (&actor, &(epoch, loc, lane)) in &owner.visitors {
            if !owner.exit_clock.knows(actor, epoch, lane) {
                let (other, who) = self.describe(actor);
                let at = other.unwrap_or(cta);
                let second = self.line(at, loc);
                let culprit = Culprit { cta: at, warp: None, lane: None, loc };
                let [x, y, z] = owner.index;
                let message = format!(
                    "{who} accesses shared memory of CTA {x},{y},{z} here, and nothing orders that before CTA {x},{y},{z} exits: its shared memory may be gone; let the cluster synchronize before any CTA leaves"
                );
                return Err(self.finding(FindingKind::RemoteAfterExit, culprit, Some(second), message));
            }
        }
        let owner = &mut self.ctas[cta];
        owner.exited = true;
        let grid = owner.grid;
        let peers = owner.peers.clone();
        let triggered = std::mem::replace(&mut owner.triggered, true);
        let known = owner.exit_clock.horizon;
        self.spare.shared.push(std::mem::take(&mut owner.shared));
        for warp in owner.warps.iter_mut().flatten() {
            self.spare.registers.push(std::mem::take(&mut warp.registers));
        }
        let grid_state = &mut self.grids[grid];
        if !triggered {
            grid_state.trigger(known);
        }
        grid_state.finished += 1;
        let grid_over = grid_state.finished == grid_state.ctas as usize;
        if peers.iter().all(|&peer| self.ctas[peer].exited) {
            self.grids[grid].resident -= 1;
            for &peer in &peers {
                self.ctas[peer].warps = Vec::new();
                self.ctas[peer].barriers = Vec::new();
            }
        }
        if grid_over {
            self.wake_all();
        }
        Ok(())
    }

    /// Nothing can go on: who waits for what.
    fn deadlock(&self) -> Fault {
        let mut lines = Vec::new();
        let mut first = None;
        for &(cta, index) in &self.blocked {
            let Some(warp) = self.ctas[cta].warps.get(index as usize).and_then(Option::as_ref) else { continue };
            let loc = self.current_loc(cta, warp.pc);
            first.get_or_insert((cta, index, loc));
            if lines.len() < 12 {
                let [x, y, z] = self.ctas[cta].index;
                lines.push(format!("CTA {x},{y},{z} warp {index} at {} waits for {}", self.line(cta, loc), self.waits_for(cta, warp)));
            }
        }
        let more = self.blocked.len().saturating_sub(12);
        let mut message = format!("nothing can go on: {}", lines.join("; "));
        if more > 0 {
            message.push_str(&format!("; and {more} more warps"));
        }
        match first {
            Some((cta, warp, loc)) => {
                self.finding(FindingKind::Deadlock, Culprit { cta, warp: Some(warp), lane: None, loc }, None, message)
            }
            None => launch_finding(
                &self.grids[0].decoded.body.name,
                "nothing can go on, and nothing waits: a launch never lets the next one start".into(),
            ),
        }
    }

    pub(crate) fn current_loc(&self, cta: usize, pc: u32) -> u32 {
        match &self.decoded(cta).steps[pc as usize] {
            Flat::Inst(inst) => inst.loc,
            Flat::If { loc, .. } | Flat::LoopTest { loc, .. } | Flat::Roles { loc, .. } | Flat::StopWhen { loc, .. } => *loc,
            // These have no line of their own: the loop's, or that of what ran last.
            Flat::LoopBack { head } => self.current_loc(cta, *head),
            Flat::Loop { .. } => self.current_loc(cta, pc + 1),
            Flat::Join => {
                let before = &self.decoded(cta).steps[..pc as usize];
                before.iter().rev().find_map(|step| if let Flat::Inst(inst) = step { Some(inst.loc) } else { None }).unwrap_or(0)
            }
            Flat::Exit => 0,
        }
    }

    fn waits_for(&self, cta: usize, warp: &Warp) -> String {
        match &warp.wait {
            Wait::Barrier { id, .. } => {
                let barrier = &self.ctas[cta].barriers[*id as usize];
                let came: Vec<String> = barrier.warps.iter().map(|(warp, _)| warp.to_string()).collect();
                format!("barrier {id}, where {} of {} threads arrived (warps {})", barrier.arrived, barrier.expected, came.join(", "))
            }
            Wait::Mbarrier { cta: owner, address, parity, .. } => match self.ctas[*owner].mbarriers.get(address) {
                Some(barrier) => format!(
                    "{} to end the phase of parity {parity}: {} of {} arrivals and {} bytes are missing in phase {}",
                    self.barrier_name(*owner, *address),
                    barrier.pending,
                    barrier.count,
                    barrier.bytes,
                    barrier.phase
                ),
                None => format!("an mbarrier at {address:#x} that is gone"),
            },
            Wait::Cluster { .. } => "the cluster's barrier".into(),
            Wait::CpAsync => "its cp.async groups".into(),
            Wait::Bulk => "its bulk groups".into(),
            Wait::Wgmma => "its wgmma groups".into(),
            Wait::Warpgroup { .. } => "the other warps of its warpgroup".into(),
            Wait::Registers { wanted } => format!("{wanted} registers a thread, which no other warpgroup gives back"),
            Wait::Grid => "the launches before this one".into(),
            Wait::Nothing => "its turn".into(),
        }
    }

    /// An mbarrier's name and index as the kernel declared it.
    pub(crate) fn barrier_name(&self, cta: usize, address: u32) -> String {
        let body = &self.decoded(cta).body;
        for decl in &body.barriers {
            let Some(piece) = body.shared.get(decl.shared as usize) else { continue };
            let start = super::memory::SHARED_BASE + piece.offset_bytes;
            if address >= start && address < start + 8 * decl.count {
                return format!("mbarrier {}[{}]", decl.name, (address - start) / 8);
            }
        }
        format!("the mbarrier at shared address {address:#x}")
    }

    /// The generic address of parameter memory of a launch.
    pub(crate) fn param_address(&self, cta: usize, index: u32) -> u64 {
        let grid = self.ctas[cta].grid;
        PARAM_BASE + ((grid as u64) << 32) + u64::from(self.grids[grid].offsets[index as usize])
    }
}
