//! What must be handed from some threads to others before it is used: `[init]` of mbarriers before their first use, `[unwaited]` loads,
//! and the phases of the cluster's barrier, `[cluster-phase]`.

use super::Findings;
use super::sites::Sites;
use super::sync::mbarrier_operand;
use super::values::{Root, Values};
use crate::inst::Op;
use crate::ir::{Block, Guard, Inst, Loc, Stmt};

pub(super) fn check<'a>(found: &mut Findings<'a>, sites: &Sites<'a>, values: &Values<'a>) {
    let threads = vec![true; found.body.threads as usize];
    let body = found.body;
    let mut walk = Walk { found, values, pending: Vec::new() };
    walk.block(&body.body, &Running { may: threads, exact: true });
    unwaited(walk.found, sites, values);
    cluster_phases(walk.found);
}

/// The threads that run a block.
#[derive(Clone)]
struct Running {
    /// All of them are among these.
    may: Vec<bool>,
    /// These are all that run it.
    exact: bool,
}

struct Walk<'f, 'v, 'a> {
    found: &'f mut Findings<'a>,
    values: &'v Values<'a>,
    /// Inits since the last barrier: piece, threads that made them, line.
    pending: Vec<(u32, Vec<bool>, Loc)>,
}

impl Walk<'_, '_, '_> {
    fn under(&self, running: &Running, guard: Guard) -> Running {
        let mut running = running.clone();
        // One elected lane, or lanes by a condition that only the launch knows, are some of those that were there.
        running.exact &= self.values.narrow(&mut running.may, guard).is_some();
        running
    }

    fn block(&mut self, block: &Block, running: &Running) {
        for stmt in &block.stmts {
            match stmt {
                Stmt::Inst(inst) => self.inst(inst, running),
                Stmt::If { cond, then, otherwise, .. } => {
                    self.block(then, &self.under(running, Guard { pred: *cond, negate: false }));
                    self.block(otherwise, &self.under(running, Guard { pred: *cond, negate: true }));
                }
                Stmt::Loop { head, body, .. } => {
                    // Later turns come behind all barriers of the first, so the first decides.
                    self.block(head, running);
                    self.block(body, &Running { exact: false, ..running.clone() });
                }
                Stmt::Roles { roles, .. } => {
                    let before = self.pending.clone();
                    for role in roles {
                        self.pending.clone_from(&before);
                        let mut inside = running.clone();
                        for (thread, may) in inside.may.iter_mut().enumerate() {
                            let warp = thread as u32 / 32;
                            *may &= warp >= role.first_warp && warp < role.first_warp + role.warps;
                        }
                        self.block(&role.body, &inside);
                    }
                    self.pending.clear();
                }
                Stmt::StopWhen { .. } | Stmt::Comment(_) => {}
            }
        }
    }

    fn inst(&mut self, inst: &Inst, running: &Running) {
        match &inst.op {
            // Any of them may hand the barriers on; by which path, the interpreter decides.
            Op::CtaSync {} | Op::CtaCount {} | Op::CtaVote { .. } | Op::BarSync {} | Op::ClusterWait {} => self.pending.clear(),
            // Lanes of one warp meet; to others nothing is handed, but a flag in memory may be.
            Op::WarpSync {} | Op::Atom { .. } => self.pending.clear(),
            _ => {}
        }
        let Some(operand) = mbarrier_operand(inst) else { return };
        let Root::Piece(index) = self.values.root(operand) else { return };
        let guarded = inst.guard.map(|guard| self.under(running, guard));
        let running = guarded.as_ref().unwrap_or(running);
        if matches!(inst.op, Op::MbarrierInit {}) {
            self.pending.push((index, running.may.clone(), inst.loc));
            return;
        }
        // One use in a phase of its own, by a thread that did not make the barrier.
        let stranger = |made: &[bool]| {
            let mut users = running.may.iter().zip(made).enumerate().filter(|(_, (may, _))| **may);
            let first = users.clone().find(|(_, (_, made))| !**made).map(|(thread, _)| thread);
            // Where not all of those that may come surely do, none of them may be the maker.
            if running.exact || users.all(|(_, (_, made))| !*made) { first } else { None }
        };
        let fault = self.pending.iter().find(|(piece, made, _)| *piece == index && stranger(made).is_some());
        if let Some((_, made, init)) = fault {
            let thread = stranger(made).unwrap_or(0);
            let (name, at, init) = (self.barrier_name(index), self.found.at(*init), *init);
            let what = format!(
                "barrier {name} is used here by thread {thread}, initialised at {at} by another, and no barrier of the CTA or cluster stands between: it may not be a barrier yet"
            );
            self.found.fault("init", inst.loc, Some(init), what);
            self.pending.clear();
        }
    }

    fn barrier_name(&self, index: u32) -> &'static str {
        let body = self.found.body;
        body.barriers.iter().find(|barrier| barrier.shared == index).map_or(body.shared[index as usize].name, |barrier| barrier.name)
    }
}

/// The pieces of the barriers that some thread looks at; none where one cannot be told.
fn waited(sites: &Sites<'_>, values: &Values<'_>) -> Option<Vec<u32>> {
    let looks = |op: &Op| matches!(op, Op::MbarrierWait { .. } | Op::MbarrierTest { .. } | Op::MbarrierTestToken { .. });
    sites
        .sites
        .iter()
        .filter(|site| looks(&site.inst.op))
        .map(|site| match mbarrier_operand(site.inst).map(|operand| values.root(operand)) {
            Some(Root::Piece(index)) => Some(index),
            _ => None,
        })
        .collect()
}

/// A note for barriers at which threads arrive, and nobody waits.
pub(super) fn unheard(found: &mut Findings<'_>, sites: &Sites<'_>, values: &Values<'_>) {
    let Some(mut heard) = waited(sites, values) else { return };
    for site in &sites.sites {
        if !matches!(site.inst.op, Op::MbarrierArrive { .. } | Op::MbarrierArriveExpect { .. } | Op::CpAsyncArrive { .. }) {
            continue;
        }
        let (Root::Piece(index) | Root::Peer(index)) = values.root(site.inst.ins[0]) else { continue };
        if !heard.contains(&index) {
            let name = found.body.barriers.iter().find(|barrier| barrier.shared == index).map_or("", |barrier| barrier.name);
            found.fault("unused", site.inst.loc, None, format!("nobody waits on barrier {name}, at which threads arrive here"));
            heard.push(index);
        }
    }
}

/// Bytes that arrive on a barrier that no thread ever looks at.
fn unwaited<'a>(found: &mut Findings<'a>, sites: &Sites<'a>, values: &Values<'a>) {
    let Some(mut waited) = waited(sites, values) else { return };
    for site in &sites.sites {
        if !matches!(site.inst.op, Op::TmaLoad { .. } | Op::BulkLoad { .. }) {
            continue;
        }
        let Some(Root::Piece(index)) = mbarrier_operand(site.inst).map(|operand| values.root(operand)) else { continue };
        if !waited.contains(&index) {
            let name = found.body.barriers.iter().find(|barrier| barrier.shared == index).map_or("", |barrier| barrier.name);
            let what =
                format!("bytes are loaded onto barrier {name} here, but nobody waits on it: whoever reads them may come before they do");
            found.fault("unwaited", site.inst.loc, None, what);
            waited.push(index);
        }
    }
}

/// Arrivals and waits of the cluster's barrier take turns. Followed where all of them stand at the kernel's top level.
fn cluster_phases(found: &mut Findings<'_>) {
    let mut all = 0;
    found.body.for_each_inst(&mut |inst| all += usize::from(matches!(inst.op, Op::ClusterArrive { .. } | Op::ClusterWait {})));
    let at_top: Vec<&Inst> = found
        .body
        .body
        .stmts
        .iter()
        .filter_map(|stmt| match stmt {
            Stmt::Inst(inst) if matches!(inst.op, Op::ClusterArrive { .. } | Op::ClusterWait {}) => Some(inst),
            _ => None,
        })
        .collect();
    if at_top.len() != all {
        return;
    }
    let mut arrived: Option<Loc> = None;
    for inst in at_top {
        match (&inst.op, arrived) {
            (Op::ClusterWait {}, None) => {
                let what = "the cluster's barrier is waited for here, but this phase has no barrier.cluster.arrive: the waiter hangs";
                found.fault("cluster-phase", inst.loc, None, what);
                return;
            }
            (Op::ClusterWait {}, Some(_)) => arrived = None,
            (_, Some(first)) => {
                let at = found.at(first);
                let what = format!(
                    "the cluster's barrier is arrived at a second time, first at {at}, with no wait between: the behaviour is undefined"
                );
                found.fault("cluster-phase", inst.loc, Some(first), what);
                return;
            }
            (_, None) => arrived = Some(inst.loc),
        }
    }
}
