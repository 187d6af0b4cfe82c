//! Barriers and shared memory between threads: `[race]`, `[init]`, `[arrivals]`, `[bytes]`, `[named]`.

use super::Findings;
use super::limits::map_of;
use super::sites::{Kind, Site, Sites};
use super::uniform::{Uniformity, levels};
use super::values::{Access, Root, Values, shared_access};
use crate::inst::{Op, Order};
use crate::ir::{Block, Guard, Inst, Loc, Operand, Stmt};
use std::collections::BTreeMap;

pub(super) fn check<'a>(found: &mut Findings<'a>, sites: &Sites<'a>, values: &Values<'a>) {
    mbarriers(found, sites, values);
    bytes(found, sites, values);
    named(found, sites, values);
    let body = found.body;
    let mut race = Race { found, values, pending: Vec::new() };
    let active = vec![true; body.threads as usize];
    race.block(&body.body, Some(active));
}

// ---- mbarriers -----------------------------------------------------------------------------------------------------

/// The operand that is the mbarrier's address, for instructions that name one.
pub(super) fn mbarrier_operand(inst: &Inst) -> Option<Operand> {
    let slot = match &inst.op {
        Op::MbarrierInit {}
        | Op::MbarrierInvalidate {}
        | Op::MbarrierArriveToken {}
        | Op::MbarrierArrive { .. }
        | Op::MbarrierArriveExpect { .. }
        | Op::MbarrierArriveDrop {}
        | Op::MbarrierExpect { .. }
        | Op::MbarrierComplete { .. }
        | Op::MbarrierWait { .. }
        | Op::MbarrierTest { .. }
        | Op::MbarrierTestToken { .. }
        | Op::CpAsyncArrive { .. } => 0,
        Op::BulkLoad { .. } | Op::BulkCopyToPeer {} => 3,
        Op::TmaLoad { rank, im2col, .. } => 2 + *rank as usize + if *im2col { *rank as usize - 2 } else { 0 },
        Op::StAsync { .. } | Op::RedAsync { .. } => 1,
        _ => return None,
    };
    inst.ins.get(slot).copied()
}

/// Arrivals that one thread brings, if the instruction is an arrival: none where the number is not constant.
fn arrivals_of_thread(values: &Values<'_>, inst: &Inst) -> Option<Option<u64>> {
    match &inst.op {
        Op::MbarrierArriveToken {} | Op::MbarrierArrive { .. } | Op::MbarrierArriveDrop {} => Some(values.constant(inst.ins[2])),
        Op::MbarrierArriveExpect { .. } => Some(Some(1)),
        // Without `noinc` the pending count is raised first, so that the phase needs one more.
        Op::CpAsyncArrive { no_increment } => Some(no_increment.then_some(1)),
        _ => None,
    }
}

fn mbarriers<'a>(found: &mut Findings<'a>, sites: &Sites<'a>, values: &Values<'a>) {
    let body = found.body;
    if body.barriers.is_empty() {
        return;
    }
    let levels = levels(body, sites, values);
    let mut of_piece: BTreeMap<u32, Vec<Site<'_>>> = BTreeMap::new();
    for site in &sites.sites {
        let Some(operand) = mbarrier_operand(site.inst) else { continue };
        match values.root(operand) {
            Root::Piece(index) | Root::Peer(index) => of_piece.entry(index).or_default().push(*site),
            // Some barrier, and nobody knows which: any could be the one.
            _ => return,
        }
    }
    for (number, barrier) in body.barriers.iter().enumerate() {
        // Two arrays in one piece cannot be told apart.
        if body.barriers.iter().enumerate().any(|(other, decl)| other != number && decl.shared == barrier.shared) {
            continue;
        }
        let Some(users) = of_piece.get(&barrier.shared) else { continue };
        let wanted = body.late[barrier.arrivals as usize];
        let inits = users.iter().filter(|site| matches!(site.inst.op, Op::MbarrierInit {})).count();
        if inits == 0 {
            let first = users[0].inst.loc;
            let what = format!("barrier {} is used here, but no mbarrier.init makes it one: its first phase may never end", barrier.name);
            found.fault("init", first, Some(barrier.loc), what);
            continue;
        }
        for init in users.iter().filter(|site| matches!(site.inst.op, Op::MbarrierInit {})) {
            if let Some(count) = values.constant(init.inst.ins[2])
                && count != wanted
            {
                let what = format!("barrier {} is initialised for {count} arrivals, but declared for {wanted}", barrier.name);
                found.fault("init", init.inst.loc, Some(barrier.loc), what);
            }
        }
        let at: Option<Vec<u64>> = users
            .iter()
            .filter(|site| matches!(site.inst.op, Op::MbarrierInit {}))
            .map(|site| Some(values.constant(site.inst.ins[0])?.wrapping_add(values.constant(site.inst.ins[1])?)))
            .collect();
        if let Some(at) = at {
            let start = u64::from(body.shared[barrier.shared as usize].offset_bytes);
            if let Some(member) = (0..barrier.count).find(|member| !at.contains(&(start + 8 * u64::from(*member)))) {
                let what = format!(
                    "member {member} of barrier {} is never initialised, though {} of {} are: whoever comes to it waits on what memory holds",
                    barrier.name, inits, barrier.count
                );
                found.fault("init", barrier.loc, None, what);
            }
        }
        arrivals(found, sites, values, &levels, (barrier.name, wanted), users);
    }
}

fn arrivals(found: &mut Findings<'_>, sites: &Sites<'_>, values: &Values<'_>, levels: &[Uniformity], of: (&str, u64), users: &[Site<'_>]) {
    let (name, wanted) = of;
    let waits = |site: &&Site<'_>| match &site.inst.op {
        // The phase before the first counts as complete, so a wait for the odd parity may be meant to fall through.
        Op::MbarrierWait { .. } => values.constant(site.inst.ins[2]).is_none_or(|parity| parity & 1 == 0),
        _ => false,
    };
    let Some(wait) = users.iter().find(waits) else { return };
    let arriving: Vec<&Site<'_>> = users.iter().filter(|site| arrivals_of_thread(values, site.inst).is_some()).collect();
    if arriving.is_empty() {
        let what = format!("barrier {name} waits for {wanted} arrivals a phase, but 0 reach it: the waiter hangs");
        found.fault("arrivals", wait.inst.loc, None, what);
        return;
    }
    let mut most = Some(0);
    for site in &arriving {
        let threads = threads_at(found, sites, values, levels, site);
        let each = arrivals_of_thread(values, site.inst).flatten();
        let brought = threads.zip(each).map(|(threads, each)| {
            let one_warp = threads.iter().max().copied().unwrap_or(0) * each;
            // Several warps come at once unless something puts them in a row.
            let at_once = if in_a_row(sites, levels, site) { one_warp } else { threads.iter().sum::<u64>() * each };
            (at_once, threads.iter().sum::<u64>() * each)
        });
        // Threads with addresses of their own may mean a barrier each.
        let one_address = site.inst.ins[0].reg().is_none_or(|reg| levels[reg.0 as usize] >= Uniformity::Cta);
        if let Some((at_once, _)) = brought
            && at_once > wanted
            && one_address
        {
            let at = found.at(wait.inst.loc);
            let what = format!(
                "{at_once} arrivals reach barrier {name} here at once, but it waits for {wanted} a phase: the phase ends before all have arrived, and the waiter at {at} runs ahead"
            );
            found.fault("arrivals", site.inst.loc, Some(wait.inst.loc), what);
            return;
        }
        // What an array spreads over its members only makes the sum too large; loops and peers could bring any number.
        let countable = !sites.in_loop(site.block) && matches!(values.root(site.inst.ins[0]), Root::Piece(_));
        most = most.zip(brought).filter(|_| countable).map(|(most, (_, all))| most + all);
    }
    if let Some(most) = most
        && most < wanted
    {
        let what = format!("barrier {name} waits for {wanted} arrivals a phase, but {most} reach it: the waiter hangs");
        found.fault("arrivals", wait.inst.loc, Some(arriving[0].inst.loc), what);
    }
}

/// Whether something may let the warps of an arrival come one after the other: named barriers, or waits at places of their own.
fn in_a_row(sites: &Sites<'_>, levels: &[Uniformity], arrival: &Site<'_>) -> bool {
    let role = sites.role(arrival.block).map(|(at, _)| at);
    sites.sites.iter().filter(|site| sites.role(site.block).map(|(at, _)| at) == role).any(|site| match &site.inst.op {
        Op::BarSync {} | Op::BarArrive {} => true,
        Op::MbarrierWait { .. } | Op::MbarrierTest { .. } | Op::MbarrierTestToken { .. } => {
            site.inst.ins.iter().filter_map(|operand| operand.reg()).any(|reg| levels[reg.0 as usize] < Uniformity::Cta)
        }
        Op::Ld { order: Order::Acquire(_) | Order::Relaxed(_) | Order::Volatile, .. } | Op::Atom { .. } => true,
        _ => false,
    })
}

/// How many threads of each warp run an instruction, each time: exactly, or not at all.
fn threads_at(found: &Findings<'_>, sites: &Sites<'_>, values: &Values<'_>, levels: &[Uniformity], site: &Site<'_>) -> Option<Vec<u64>> {
    let mut active = vec![true; found.body.threads as usize];
    let mut one_lane = false;
    let mut narrow = |active: &mut Vec<bool>, guard: Guard| -> Option<()> {
        if values.definition(guard.pred).is_some_and(|inst| matches!(inst.op, Op::Elect {})) && !guard.negate {
            one_lane = true;
            return Some(());
        }
        values.narrow(active, guard)
    };
    for (_, place) in sites.chain(site.block) {
        match place.kind {
            Kind::Top => {}
            // Each turn brings this many, where the loop is run by all alike.
            Kind::Head(cond) | Kind::Body(cond) if levels[cond.0 as usize] >= Uniformity::Cta => {}
            Kind::Head(_) | Kind::Body(_) => return None,
            Kind::Then(cond) => narrow(&mut active, Guard { pred: cond, negate: false })?,
            Kind::Otherwise(cond) => narrow(&mut active, Guard { pred: cond, negate: true })?,
            Kind::Role(role) => {
                for (thread, active) in active.iter_mut().enumerate() {
                    let warp = thread as u32 / 32;
                    *active &= warp >= role.first_warp && warp < role.first_warp + role.warps;
                }
            }
        }
    }
    if let Some(guard) = site.inst.guard {
        narrow(&mut active, guard)?;
    }
    let of_warp = |warp: &[bool]| {
        let lanes = warp.iter().filter(|active| **active).count() as u64;
        if one_lane { lanes.min(1) } else { lanes }
    };
    Some(active.chunks(32).map(of_warp).collect())
}

/// `[bytes]`: what a block announces and loads. All instructions of a block run equally often, so the sums over all members of an array
/// of barriers must agree, whichever member each names.
fn bytes<'a>(found: &mut Findings<'a>, sites: &Sites<'a>, values: &Values<'a>) {
    #[derive(Default)]
    struct Tally {
        announced: Option<u64>,
        loaded: Option<u64>,
        announce: Option<Loc>,
        /// The guard that all share; any other in the block makes it uncountable.
        guard: Option<Option<Guard>>,
        uncountable: bool,
    }
    let levels = levels(found.body, sites, values);
    // Every CTA of the cluster comes by a line where nothing around it depends on the CTA.
    let whole_cluster = |site: &Site<'_>| {
        site.inst.guard.is_none()
            && sites.chain(site.block).all(|(_, place)| match place.kind {
                Kind::Then(cond) | Kind::Otherwise(cond) => {
                    levels[cond.0 as usize] >= Uniformity::Cluster
                        || values.known(Operand::Reg(cond)).is_some()
                        || values.definition(cond).is_some_and(|inst| matches!(inst.op, Op::Elect {}))
                }
                _ => true,
            })
    };
    let mut tallies: BTreeMap<(u32, usize), Tally> = BTreeMap::new();
    for site in &sites.sites {
        let Some(operand) = mbarrier_operand(site.inst) else { continue };
        let loaded = loaded_bytes(found, values, site.inst).map(|bytes| bytes.filter(|_| !multicast(&site.inst.op) || whole_cluster(site)));
        let announced = match &site.inst.op {
            Op::MbarrierArriveExpect { .. } | Op::MbarrierExpect { .. } => Some(values.constant(site.inst.ins[2])),
            Op::MbarrierComplete { .. } => None,
            _ if loaded.is_some() => None,
            _ => continue,
        };
        let index = match values.root(operand) {
            Root::Piece(index) => index,
            Root::Peer(index) => {
                // Bytes for a peer's barrier reach ours from the peer: nothing can be counted.
                tallies.entry((index, usize::MAX)).or_default().uncountable = true;
                continue;
            }
            _ => return,
        };
        let tally = tallies.entry((index, site.block)).or_default();
        tally.uncountable |= *tally.guard.get_or_insert(site.inst.guard) != site.inst.guard;
        match (announced, loaded) {
            (Some(Some(bytes)), _) => {
                tally.announce.get_or_insert(site.inst.loc);
                tally.announced = Some(tally.announced.unwrap_or(0) + bytes);
            }
            (None, Some(Some(bytes))) => tally.loaded = Some(tally.loaded.unwrap_or(0) + bytes),
            _ => tally.uncountable = true,
        }
    }
    let indices: Vec<u32> = tallies.keys().map(|(index, _)| *index).collect();
    for index in indices {
        let blocks: Vec<&Tally> = tallies.range((index, 0)..=(index, usize::MAX)).map(|(_, tally)| tally).collect();
        if blocks.iter().any(|tally| tally.uncountable || tally.announced.is_none() || tally.loaded.is_none()) {
            continue;
        }
        // Blocks that are wrong in opposite ways could make up for each other.
        let over = blocks.iter().any(|tally| tally.announced > tally.loaded);
        let under = blocks.iter().any(|tally| tally.announced < tally.loaded);
        if over == under {
            continue;
        }
        let Some(wrong) = blocks.iter().find(|tally| tally.announced != tally.loaded) else { continue };
        let (Some(announced), Some(loaded), Some(loc)) = (wrong.announced, wrong.loaded, wrong.announce) else { continue };
        let name = found.body.barriers.iter().find(|barrier| barrier.shared == index).map_or("", |barrier| barrier.name);
        let consequence = if over { "the phase never ends and the waiter hangs" } else { "the phase ends before all bytes are there" };
        found.fault(
            "bytes",
            loc,
            None,
            format!("barrier {name} expects {announced} bytes here, but {loaded} bytes are loaded onto it: {consequence}"),
        );
    }
}

fn multicast(op: &Op) -> bool {
    matches!(op, Op::TmaLoad { multicast: true, .. })
}

/// Bytes that an instruction brings to its mbarrier, if it is a load: none where the number is not constant.
fn loaded_bytes<'a>(found: &Findings<'a>, values: &Values<'a>, inst: &Inst) -> Option<Option<u64>> {
    match &inst.op {
        Op::TmaLoad { rank, im2col, multicast, .. } => {
            let bytes =
                map_of(found, values, inst.ins[1]).filter(|(_, decl)| !decl.has_open_box()).map(|(_, decl)| u64::from(decl.box_bytes()));
            let mask = 3 + usize::from(*rank) + if *im2col { usize::from(*rank) - 2 } else { 0 };
            // Each CTA of the cluster sends its box to all: as many boxes reach each barrier as there are CTAs.
            let everyone = (1u64 << found.body.cluster) - 1;
            Some(match multicast {
                false => bytes,
                true => {
                    bytes.filter(|_| values.constant(inst.ins[mask]) == Some(everyone)).map(|bytes| bytes * u64::from(found.body.cluster))
                }
            })
        }
        Op::BulkLoad { multicast: false, .. } => Some(values.constant(inst.ins[2])),
        Op::BulkLoad { .. } | Op::BulkCopyToPeer {} | Op::StAsync { .. } | Op::RedAsync { .. } => Some(None),
        _ => None,
    }
}

// ---- named barriers and the CTA's ----------------------------------------------------------------------------------

fn named<'a>(found: &mut Findings<'a>, sites: &Sites<'a>, values: &Values<'a>) {
    cta_barrier(found, sites);
    let mut uses: BTreeMap<u64, Vec<(Site<'_>, u64)>> = BTreeMap::new();
    for site in &sites.sites {
        if !matches!(site.inst.op, Op::BarSync {} | Op::BarArrive {}) {
            continue;
        }
        let (Some(id), Some(threads)) = (values.constant(site.inst.ins[0]), values.constant(site.inst.ins[1])) else {
            // A number known only at run time could be any of them.
            return;
        };
        let threads = if threads == 0 { u64::from(found.body.threads) } else { threads };
        uses.entry(id).or_default().push((*site, threads));
    }
    for (id, uses) in uses {
        // Warps that may reach the barrier at all.
        let mut may = vec![false; found.body.threads as usize / 32];
        for (site, _) in &uses {
            let (first, warps) = sites.warps(site.block);
            may[first as usize..(first + warps) as usize].fill(true);
        }
        let may = 32 * may.iter().filter(|warp| **warp).count() as u64;
        for (site, threads) in &uses {
            if *threads > may {
                let what = format!("named barrier {id} waits for {threads} threads, but only {may} ever reach it: the waiter hangs");
                found.fault("named", site.inst.loc, None, what);
            }
        }
        // Where one instruction alone uses the number, all its warps come at once, if nothing around it can hold one back.
        if let [(site, threads)] = uses[..]
            && matches!(site.inst.op, Op::BarSync {})
            && site.inst.guard.is_none()
            && sites.chain(site.block).all(|(_, place)| matches!(place.kind, Kind::Top | Kind::Role(_)))
        {
            let (_, warps) = sites.warps(site.block);
            let come = 32 * u64::from(warps);
            if come > threads {
                let what = format!(
                    "named barrier {id} is reached by {come} threads here, but waits for {threads}: it opens before all have come, or hangs for the rest"
                );
                found.fault("named", site.inst.loc, None, what);
            }
        }
    }
}

/// The CTA's barrier stands where all warps come by.
fn cta_barrier(found: &mut Findings<'_>, sites: &Sites<'_>) {
    let is_cta = |site: &&Site<'_>| matches!(site.inst.op, Op::CtaSync {} | Op::CtaCount {} | Op::CtaVote { .. });
    let mut reached = vec![false; found.body.threads as usize / 32];
    let mut in_role = None;
    for site in sites.sites.iter().filter(is_cta) {
        let (first, warps) = sites.warps(site.block);
        reached[first as usize..(first + warps) as usize].fill(true);
        if sites.role(site.block).is_some() {
            in_role.get_or_insert(*site);
        } else {
            // All warps come by some barrier of the CTA; which ones meet is for the interpreter.
            return;
        }
    }
    let count = reached.iter().filter(|warp| **warp).count();
    if let Some(site) = in_role
        && count < reached.len()
    {
        let (_, role) = sites.role(site.block).unzip();
        let name = role.map_or("", |role| role.name);
        let what = format!(
            "{} waits for the whole CTA, but stands in role {name}: {count} of its {} warps ever reach it, so they hang; use a named barrier",
            site.inst.op.name(),
            reached.len()
        );
        found.fault("named", site.inst.loc, role.map(|role| role.loc), what);
    }
}

// ---- races ---------------------------------------------------------------------------------------------------------

/// An access whose address is known for every thread that makes it.
struct Known {
    access: Access,
    addresses: Vec<i64>,
    active: Vec<bool>,
    /// The bytes from the lowest to past the highest.
    start: i64,
    end: i64,
    loc: Loc,
    /// A warp barrier stands behind it: lanes of one warp are ordered.
    warp_ordered: bool,
    atomic: bool,
}

struct Race<'f, 'v, 'a> {
    found: &'f mut Findings<'a>,
    values: &'v Values<'a>,
    /// Accesses since the last barrier.
    pending: Vec<Known>,
}

/// Accesses that are compared with later ones; beyond this the oldest are forgotten, to bound the work.
const MOST_PENDING: usize = 64;

impl Race<'_, '_, '_> {
    /// `active` is the threads that run the block, if they are known.
    fn block(&mut self, block: &Block, active: Option<Vec<bool>>) {
        for stmt in &block.stmts {
            match stmt {
                Stmt::Inst(inst) => self.inst(inst, active.as_deref()),
                Stmt::If { cond, then, otherwise, .. } => {
                    let side = |negate| {
                        let mut side = active.clone()?;
                        self.values.narrow(&mut side, Guard { pred: *cond, negate })?;
                        Some(side)
                    };
                    let (yes, no) = (side(false), side(true));
                    self.block(then, yes);
                    self.block(otherwise, no);
                }
                Stmt::Loop { head, body, .. } => {
                    // What is pending from outside meets the loop's accesses in some turn, which the addresses do not tell.
                    self.pending.clear();
                    self.block(head, active.clone());
                    self.block(body, None);
                    self.pending.clear();
                }
                Stmt::Roles { roles, .. } => {
                    // Roles order each other by barriers that are not followed here.
                    for role in roles {
                        self.pending.clear();
                        let inside = active.clone().map(|mut active| {
                            for (thread, active) in active.iter_mut().enumerate() {
                                let warp = thread as u32 / 32;
                                *active &= warp >= role.first_warp && warp < role.first_warp + role.warps;
                            }
                            active
                        });
                        self.block(&role.body, inside);
                    }
                    self.pending.clear();
                }
                Stmt::StopWhen { .. } | Stmt::Comment(_) => {}
            }
        }
    }

    fn inst(&mut self, inst: &Inst, active: Option<&[bool]>) {
        match &inst.op {
            Op::WarpSync {} => self.pending.iter_mut().for_each(|pending| pending.warp_ordered = true),
            Op::CtaSync {}
            | Op::CtaCount {}
            | Op::CtaVote { .. }
            | Op::BarSync {}
            | Op::BarArrive {}
            | Op::ClusterArrive { .. }
            | Op::ClusterWait {}
            | Op::MbarrierArrive { .. }
            | Op::MbarrierArriveExpect { .. }
            | Op::MbarrierArriveToken {}
            | Op::MbarrierArriveDrop {}
            | Op::MbarrierWait { .. }
            | Op::MbarrierTest { .. }
            | Op::MbarrierTestToken { .. }
            | Op::CpAsyncArrive { .. } => self.pending.clear(),
            Op::Ld { order: Order::Acquire(_) | Order::Relaxed(_) | Order::Volatile, .. }
            | Op::St { order: Order::Release(_) | Order::Relaxed(_) | Order::Volatile, .. } => self.pending.clear(),
            Op::Atom { order, .. } | Op::Red { order, .. } if !matches!(order, Order::Weak) => self.pending.clear(),
            _ => self.access(inst, active),
        }
    }

    fn access(&mut self, inst: &Inst, active: Option<&[bool]>) {
        let (Some(access), Some(active)) = (shared_access(inst), active) else { return };
        let Some(addresses) = self.values.addresses(&access) else { return };
        let mut active = active.to_vec();
        if let Some(guard) = inst.guard
            && self.values.narrow(&mut active, guard).is_none()
        {
            return;
        }
        for (thread, active) in active.iter_mut().enumerate() {
            *active &= (thread as u32 % 32) < access.lanes;
        }
        let touched = || addresses.iter().zip(&active).filter(|(_, active)| **active).map(|(address, _)| *address);
        let (Some(start), Some(last)) = (touched().min(), touched().max()) else { return };
        let end = last + i64::from(access.bytes);
        if end - start > 1 << 18 {
            return;
        }
        let atomic = access.reads && access.writes;
        let this = Known { start, end, access, addresses, active, loc: inst.loc, warp_ordered: false, atomic };
        if let Some((earlier, writer, reader, byte)) =
            self.pending.iter().find_map(|earlier| conflict(earlier, &this).map(|(w, r, b)| (earlier, w, r, b)))
        {
            let name = match self.values.root(access.base) {
                Root::Piece(index) => {
                    let piece = &self.found.body.shared[index as usize];
                    format!("shared buffer {} (byte {})", piece.name, byte - i64::from(piece.offset_bytes))
                }
                _ => format!("shared memory (byte {byte})"),
            };
            let (at, second) = (self.found.at(earlier.loc), earlier.loc);
            let what = if earlier.access.writes {
                format!(
                    "{name} is read here by thread {reader}, written at {at} by thread {writer}, and no barrier stands between: the old value may be read"
                )
            } else {
                format!(
                    "{name} is overwritten here by thread {writer}, read at {at} by thread {reader}, and no barrier stands between: the new value may be read"
                )
            };
            self.found.fault("race", inst.loc, Some(second), what);
            return;
        }
        if self.pending.len() == MOST_PENDING {
            self.pending.remove(0);
        }
        self.pending.push(this);
    }
}

/// A byte that one thread writes and another reads, one access before the other: writer, reader, byte.
fn conflict(earlier: &Known, later: &Known) -> Option<(usize, usize, i64)> {
    if earlier.atomic || later.atomic || earlier.end <= later.start || later.end <= earlier.start {
        return None;
    }
    let (write, read) = match (earlier.access.writes, later.access.writes) {
        (true, false) => (earlier, later),
        (false, true) => (later, earlier),
        _ => return None,
    };
    // Two threads that write each byte: where the reader is one of them, the other is not.
    let mut writers = vec![[None::<u16>; 2]; (write.end - write.start) as usize];
    for thread in (0..write.addresses.len()).filter(|&thread| write.active[thread]) {
        for byte in 0..i64::from(write.access.bytes) {
            let list = &mut writers[(write.addresses[thread] + byte - write.start) as usize];
            // The second is of another warp than the first where there is one.
            match list {
                [None, _] => list[0] = Some(thread as u16),
                [Some(_), None] => list[1] = Some(thread as u16),
                [Some(first), Some(second)] if *first / 32 == *second / 32 => list[1] = Some(thread as u16),
                _ => {}
            }
        }
    }
    // Where a warp moves its data together, or a warp barrier stands between, only other warps count.
    let by_warp = earlier.warp_ordered || write.access.whole_warp || read.access.whole_warp;
    for reader in (0..read.addresses.len()).filter(|&thread| read.active[thread]) {
        for byte in 0..i64::from(read.access.bytes) {
            let at = read.addresses[reader] + byte;
            let Some(list) = usize::try_from(at - write.start).ok().and_then(|at| writers.get(at)) else { continue };
            let mut others = list.iter().flatten().map(|&writer| usize::from(writer));
            if let Some(writer) = others.find(|writer| if by_warp { writer / 32 != reader / 32 } else { *writer != reader }) {
                return Some((writer, reader, at));
            }
        }
    }
    None
}
