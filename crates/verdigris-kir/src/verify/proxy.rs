//! Generic and asynchronous accesses to shared memory: `[proxy]` and `[reuse]`.
//!
//! Only what surely overlaps counts: the asynchronous access takes the whole piece, or both places are known, or nobody but ordinary
//! stores ever writes the piece and the kernel has no fence at all. cp.async is left alone: its writes belong to the generic proxy, and whether
//! a fence is due depends on the wait.

use super::Findings;
use super::limits::map_of;
use super::sites::Sites;
use super::values::{Root, Values, shared_access};
use crate::inst::{Fence, Op, Space};
use crate::ir::{Block, Guard, Inst, Loc, Operand, Stmt};
use std::collections::BTreeMap;

pub(super) fn check<'a>(found: &mut Findings<'a>, sites: &Sites<'a>, values: &Values<'a>) {
    let body = found.body;
    without_any_fence(found, sites, values);
    let mut walk = Walk { found, values };
    walk.block(&body.body, &mut State::default());
}

/// Bytes of one piece of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bytes {
    /// From the piece's first byte; none where the place is not known.
    start: Option<i64>,
    /// How many from there on; for a set of threads, all of their bytes lie inside.
    count: i64,
}

/// What an asynchronous instruction reads from shared memory.
struct AsyncRead {
    operand: Operand,
    /// None for `wgmma`, whose extent is in the descriptor.
    bytes: Option<u64>,
    what: &'static str,
    /// It belongs to a bulk group, and its source may be reused only behind a wait.
    bulk_group: bool,
}

fn async_reads<'a>(found: &Findings<'a>, values: &Values<'a>, inst: &Inst) -> Vec<AsyncRead> {
    let tile = |slot: usize, what| {
        let bytes =
            map_of(found, values, inst.ins[0]).filter(|(_, decl)| !decl.has_open_box()).map(|(_, decl)| u64::from(decl.box_bytes()));
        vec![AsyncRead { operand: inst.ins[slot], bytes, what, bulk_group: true }]
    };
    let bulk = |what, bulk_group| vec![AsyncRead { operand: inst.ins[1], bytes: values.constant(inst.ins[2]), what, bulk_group }];
    match &inst.op {
        Op::TmaStore { rank, .. } => tile(1 + usize::from(*rank), "tensor store"),
        Op::TmaReduce { rank, .. } => tile(1 + usize::from(*rank), "tensor reduction"),
        Op::BulkStore { .. } => bulk("bulk store", true),
        Op::BulkReduceStore { .. } => bulk("bulk reduction", true),
        Op::BulkCopyToPeer {} => bulk("bulk copy", false),
        Op::Wgmma { shape } => {
            let mut slots = vec![shape.b_operand()];
            if !shape.a_in_registers {
                slots.push(0);
            }
            slots.into_iter().map(|slot| AsyncRead { operand: inst.ins[slot], bytes: None, what: "wgmma", bulk_group: false }).collect()
        }
        _ => Vec::new(),
    }
}

fn is_proxy_fence(op: &Op) -> bool {
    matches!(op, Op::MemoryFence { fence: Fence::ProxyAsync | Fence::ProxyAsyncShared })
}

/// A piece that ordinary stores alone write, read by the async proxy in a kernel without a fence: what is read was written by those
/// stores, or by nobody.
fn without_any_fence<'a>(found: &mut Findings<'a>, sites: &Sites<'a>, values: &Values<'a>) {
    if sites.sites.iter().any(|site| is_proxy_fence(&site.inst.op)) {
        return;
    }
    // The first ordinary store to each piece; none where something else may write it too.
    let mut written: BTreeMap<u32, Option<Loc>> = BTreeMap::new();
    for site in &sites.sites {
        let inst = site.inst;
        let (operand, ordinary) = match &inst.op {
            _ if shared_access(inst).is_some_and(|access| access.writes) => (inst.ins[0], true),
            Op::TmaLoad { .. }
            | Op::BulkLoad { .. }
            | Op::BulkCopyToPeer {}
            | Op::CpAsync { .. }
            | Op::StAsync { .. }
            | Op::RedAsync { .. }
            | Op::St { space: Space::Cluster, .. }
            | Op::Red { space: Space::Cluster, .. }
            | Op::Atom { space: Space::Cluster, .. } => (inst.ins[0], false),
            _ => continue,
        };
        match values.root(operand) {
            Root::Piece(index) | Root::Peer(index) => {
                let first = written.entry(index).or_insert(Some(inst.loc));
                if !ordinary {
                    *first = None;
                }
            }
            // Something is written, and nobody knows where.
            _ => return,
        }
    }
    for site in &sites.sites {
        for read in async_reads(found, values, site.inst) {
            let Root::Piece(index) = values.root(read.operand) else { continue };
            if let Some(Some(first)) = written.get(&index) {
                let what = unfenced(found, index, read.what, *first);
                found.fault("proxy", site.inst.loc, Some(*first), what);
            }
        }
    }
}

fn unfenced(found: &Findings<'_>, index: u32, reader: &str, write: Loc) -> String {
    let name = found.body.shared[index as usize].name;
    let at = found.at(write);
    format!(
        "shared buffer {name} is read here by a {reader}, written by ordinary stores at {at}, and no fence.proxy.async stands between: the {reader} may read the old bytes"
    )
}

#[derive(Clone, Debug, Default)]
struct State {
    /// Ordinary writes that surely ran, with no proxy fence since, by piece.
    written: Vec<(u32, Bytes, Loc)>,
    /// Bulk stores that surely were issued, and may not have read their source: piece, bytes, groups closed since its own (none where open).
    stores: Vec<(u32, Bytes, Option<u32>, Loc)>,
}

/// Entries beyond this are forgotten, to bound the work.
const MOST_ENTRIES: usize = 256;

struct Walk<'f, 'v, 'a> {
    found: &'f mut Findings<'a>,
    values: &'v Values<'a>,
}

/// What may happen in a block, however deep.
#[derive(Clone, Copy, Debug, Default)]
struct Effects {
    fence: bool,
    wait: bool,
    commit: bool,
}

fn effects(block: &Block) -> Effects {
    let mut all = Effects::default();
    let mut join = |other: Effects| {
        all.fence |= other.fence;
        all.wait |= other.wait;
        all.commit |= other.commit;
    };
    for stmt in &block.stmts {
        match stmt {
            Stmt::Inst(inst) => join(Effects {
                fence: is_proxy_fence(&inst.op),
                wait: matches!(inst.op, Op::BulkWait { .. }),
                commit: matches!(inst.op, Op::BulkCommit {}),
            }),
            Stmt::If { then, otherwise, .. } => {
                join(effects(then));
                join(effects(otherwise));
            }
            Stmt::Loop { head, body, .. } => {
                join(effects(head));
                join(effects(body));
            }
            Stmt::Roles { roles, .. } => roles.iter().for_each(|role| join(effects(&role.body))),
            Stmt::StopWhen { .. } | Stmt::Comment(_) => {}
        }
    }
    all
}

impl State {
    /// Forgets what a block that may run may have settled.
    fn weaken(&mut self, effects: Effects) {
        if effects.fence {
            self.written.clear();
        }
        // A closed group makes others older, so that a later wait covers them: the ages here would be too young.
        if effects.wait || effects.commit {
            self.stores.clear();
        }
    }
}

impl Walk<'_, '_, '_> {
    fn block(&mut self, block: &Block, state: &mut State) {
        for stmt in &block.stmts {
            match stmt {
                Stmt::Inst(inst) => self.inst(inst, state),
                Stmt::If { cond, then, otherwise, .. } => {
                    let before = state.clone();
                    let mut inside = before.clone();
                    self.block(then, &mut inside);
                    // Some thread surely runs a side that is for one elected lane, or for threads known one by one.
                    let surely = self.some_thread(*cond, false);
                    let mut other = before.clone();
                    self.block(otherwise, &mut other);
                    if surely {
                        *state = inside;
                        state.weaken(effects(otherwise));
                    } else {
                        state.weaken(effects(then));
                        state.weaken(effects(otherwise));
                    }
                }
                Stmt::Loop { head, body, .. } => {
                    let (one, two) = (effects(head), effects(body));
                    // The first turn comes straight from above.
                    let mut turn = state.clone();
                    self.block(head, &mut turn);
                    self.block(body, &mut turn);
                    state.weaken(one);
                    state.weaken(two);
                }
                Stmt::Roles { roles, .. } => {
                    for role in roles {
                        self.block(&role.body, &mut state.clone());
                    }
                    roles.iter().for_each(|role| state.weaken(effects(&role.body)));
                }
                Stmt::StopWhen { .. } | Stmt::Comment(_) => {}
            }
        }
    }

    fn some_thread(&self, cond: crate::ir::Reg, negate: bool) -> bool {
        if self.values.definition(cond).is_some_and(|inst| matches!(inst.op, Op::Elect {})) {
            return !negate;
        }
        let mut threads = vec![true; self.found.body.threads as usize];
        self.values.narrow(&mut threads, Guard { pred: cond, negate }).is_some() && threads.contains(&true)
    }

    fn inst(&mut self, inst: &Inst, state: &mut State) {
        match &inst.op {
            op if is_proxy_fence(op) => state.written.clear(),
            Op::BulkCommit {} => state.stores.iter_mut().for_each(|(_, _, age, _)| *age = Some(age.map_or(0, |age| age + 1))),
            Op::BulkWait { pending, .. } => state.stores.retain(|(_, _, age, _)| age.is_none_or(|age| age < *pending)),
            _ => {}
        }
        for read in async_reads(self.found, self.values, inst) {
            let Root::Piece(index) = self.values.root(read.operand) else { continue };
            let Some(count) = read.bytes else { continue };
            let start =
                self.values.constant(read.operand).map(|at| at as i64 - i64::from(self.found.body.shared[index as usize].offset_bytes));
            let bytes = Bytes { start, count: count as i64 };
            let write = state.written.iter().find(|(piece, written, _)| *piece == index && self.overlap(index, bytes, *written));
            if let Some((_, _, write)) = write {
                let what = unfenced(self.found, index, read.what, *write);
                self.found.fault("proxy", inst.loc, Some(*write), what);
            }
            if read.bulk_group && inst.guard.is_none() && state.stores.len() < MOST_ENTRIES {
                state.stores.push((index, bytes, None, inst.loc));
            }
        }
        let Some(access) = shared_access(inst).filter(|access| access.writes && inst.guard.is_none()) else { return };
        let Root::Piece(index) = self.values.root(access.base) else { return };
        let bytes = self.written(index, inst);
        let store = state.stores.iter().find(|(piece, source, _, _)| *piece == index && self.overlap(index, *source, bytes));
        if let Some((_, _, age, store)) = store {
            let (name, at) = (self.found.body.shared[index as usize].name, self.found.at(*store));
            let missing = if age.is_some() { "no bulk wait that covers its group" } else { "neither a bulk commit nor a wait" };
            let what = format!(
                "shared buffer {name} is overwritten here while the store issued at {at} may still read it: {missing} stands between, so the new bytes may be stored"
            );
            self.found.fault("reuse", inst.loc, Some(*store), what);
        }
        if state.written.len() < MOST_ENTRIES {
            state.written.push((index, bytes, inst.loc));
        }
    }

    /// The byte that one thread surely writes: enough to show an overlap with a known place.
    fn written(&self, index: u32, inst: &Inst) -> Bytes {
        let start = shared_access(inst).and_then(|access| {
            let base = self.values.constant(access.base)?.wrapping_add(self.values.constant(access.offset)?);
            Some(base as i64 - i64::from(self.found.body.shared[index as usize].offset_bytes))
        });
        Bytes { start, count: shared_access(inst).map_or(0, |access| i64::from(access.bytes)) }
    }

    /// Whether an asynchronous read and an ordinary write of one piece surely meet.
    fn overlap(&self, index: u32, read: Bytes, write: Bytes) -> bool {
        let whole = i64::from(self.found.body.shared[index as usize].bytes);
        if read.count >= whole {
            return true;
        }
        match (read.start, write.start) {
            (Some(read_start), Some(write_start)) => read_start < write_start + write.count && write_start < read_start + read.count,
            _ => false,
        }
    }
}
