//! Loads and stores of every width, order and cache word, in every space; prefetches; discards.

use super::kit::{SLOT, check, column, emit, imm, load, operand, own, probe, results, slots, store};
use super::values::{Domain, Random, value};
use super::{Contents, Probe, Rule};
use std::collections::BTreeMap;
use std::sync::Arc;
use verdigris_kir::face::{Header, Kernel, Pointer, Val};
use verdigris_kir::inst::{Cache, Op, Order, Space};
use verdigris_kir::inst_samples::samples;
use verdigris_kir::ir::{Operand, Reg, Target, Ty};
use verdigris_kir::program::{Arg, Step};

const THREADS: u32 = 64;
const CTAS: u32 = 2;
const LANES: usize = (THREADS * CTAS) as usize;
const CHUNK: usize = 48;
/// Bytes of each lane that an instruction may touch.
const REACH: usize = 16;

fn space_of(op: &Op) -> Option<Space> {
    match op {
        Op::Ld { space, .. } | Op::LdByte { space, .. } | Op::St { space, .. } | Op::StByte { space, .. } => Some(*space),
        _ => None,
    }
}

pub(super) const fn space_word(space: Space) -> &'static str {
    match space {
        Space::Global => "global",
        Space::Shared => "shared",
        Space::Cluster => "cluster",
    }
}

pub(super) fn probes() -> Vec<Probe> {
    let mut groups: BTreeMap<(Target, Space, bool), Vec<Op>> = BTreeMap::new();
    for sample in samples() {
        if let Some(space) = space_of(&sample.op) {
            let loads = matches!(sample.op, Op::Ld { .. } | Op::LdByte { .. });
            groups.entry((sample.op.target(), space, loads)).or_default().push(sample.op);
        }
    }
    let mut probes = vec![touches()];
    for ((target, space, loads), ops) in groups {
        for (part, ops) in ops.chunks(CHUNK).enumerate() {
            let verb = if loads { "load" } else { "store" };
            let name = format!("memory/{verb}-{}/{}-{part}", space_word(space), target.ptx());
            let cluster = if space == Space::Cluster { CTAS } else { 1 };
            let header = Header { name, target, threads: THREADS, cluster, ..Header::default() };
            probes.push(if loads { loads_of(header, space, ops) } else { stores_of(header, space, ops) });
        }
    }
    probes
}

/// The address of the thread's own [`REACH`] bytes of a shared piece, and the same place in the other CTA of the cluster.
#[derive(Clone, Copy)]
pub(super) struct Places<'k> {
    /// In this CTA.
    pub(super) own: Val<'k, u32>,
    /// Where the instructions go: this CTA, or the other.
    pub(super) there: Val<'k, u32>,
}

/// A piece of shared memory with `slots` pieces of `reach` bytes for each thread.
#[track_caller]
pub(super) fn places<'k>(k: Kernel<'k>, space: Space, slots: usize, reach: usize) -> Places<'k> {
    let piece = k.shared("data", k.threads() * (slots * reach) as u32, 128);
    let own = piece.address() + k.thread() * reach as u32;
    let there = if space == Space::Cluster { k.mapa(own, k.cluster_rank() ^ 1) } else { own };
    Places { own, there }
}

/// All threads that share the memory meet.
#[track_caller]
pub(super) fn meet(k: Kernel<'_>, space: Space) {
    if space == Space::Cluster {
        k.cluster_sync();
    } else {
        k.bar_sync();
    }
}

fn loads_of(header: Header, space: Space, ops: &[Op]) -> Probe {
    let mut random = Random::new(&header.name);
    let input = random.bytes(2 * LANES * REACH);
    let region = LANES * SLOT;
    let mut checks = Vec::new();
    let mut place = 0;
    for op in ops {
        for (index, ty) in op.signature().outs.into_iter().enumerate() {
            let what = if index == 0 { format!("{op:?}") } else { format!("{op:?} result {index}") };
            let names = [op.name(), if space == Space::Global { "ParamLoad" } else { "SharedAddress" }];
            checks.push(check(what, &names, column(1, place * region, SLOT, ty.bytes() as usize, LANES), Rule::Bits));
            place += 1;
        }
    }
    let buffers = vec![Contents::Bytes(input), results(place * region)];
    let ops: Arc<[Op]> = ops.into();
    probe(header, CTAS, buffers, checks, move |k| {
        let (input, output) = (k.input("data", 256), k.output("results", 256));
        let (from, to) = (own(k, input, REACH as u32), own(k, output, SLOT as u32));
        let base = if space == Space::Global {
            from
        } else {
            let places = places(k, space, 1, REACH);
            let words: Vec<Val<'_, u32>> = k.ld_global_vector(input.at(super::kit::thread_of_grid(k), REACH as u32), 0, 4, Cache::Default);
            k.st_shared_vector(places.own, 0, &words);
            meet(k, space);
            operand(places.there)
        };
        let mut place = 0;
        for (index, op) in ops.iter().enumerate() {
            // The second half of the buffer is reached by the constant offset alone.
            let offset = if space == Space::Global && index % 2 == 1 { LANES * REACH } else { 0 };
            for (reg, ty) in emit(k, op, &[base, imm(offset as u64)]).into_iter().zip(op.signature().outs) {
                store(k, ty, to, place * region, reg);
                place += 1;
            }
        }
        if space == Space::Cluster {
            k.cluster_sync();
        }
    })
}

/// Values of each type that stores take, loaded once.
struct Sources<'k> {
    k: Kernel<'k>,
    from: Operand,
    loaded: BTreeMap<(Ty, usize), Reg>,
}

impl<'k> Sources<'k> {
    fn new(k: Kernel<'k>, input: Pointer<'k>) -> Self {
        Sources { k, from: own(k, input, SLOT as u32), loaded: BTreeMap::new() }
    }

    #[track_caller]
    fn value(&mut self, ty: Ty, index: usize) -> Operand {
        let (k, from) = (self.k, self.from);
        (*self.loaded.entry((ty, index)).or_insert_with(|| load(k, ty, from, index * LANES * SLOT))).into()
    }
}

fn stores_of(header: Header, space: Space, ops: &[Op]) -> Probe {
    let mut random = Random::new(&header.name);
    let input = slots((0..4 * LANES).map(|_| random.next()));
    let region = LANES * REACH;
    let mut checks = Vec::new();
    for (place, op) in ops.iter().enumerate() {
        let values = &op.signature().ins[2..];
        // What stands beside the stored bytes must stay as it is.
        let width = if matches!(op, Op::StByte { .. }) { 1 } else { values.iter().map(|ty| ty.bytes() as usize).sum() };
        let width = if space == Space::Global { width } else { REACH };
        let mut check = check(format!("{op:?}"), &[op.name()], column(1, place * region, REACH, width, LANES), Rule::Bits);
        if space != Space::Global {
            check.names.push("SharedAddress");
        }
        checks.push(check);
    }
    let buffers = vec![Contents::Bytes(input), results(ops.len() * region)];
    let ops: Arc<[Op]> = ops.into();
    probe(header, CTAS, buffers, checks, move |k| {
        let (input, output) = (k.input("data", 256), k.output("results", 256));
        let to = output.at(super::kit::thread_of_grid(k), REACH as u32);
        let mut sources = Sources::new(k, input);
        let places = (space != Space::Global).then(|| places(k, space, ops.len(), REACH));
        let step = THREADS as usize * REACH;
        if let Some(places) = places {
            let fill = k.constant(0x5a5a_5a5au32);
            for place in 0..ops.len() {
                k.st_shared_vector(places.own, (place * step) as i64, &[fill; 4]);
            }
            meet(k, space);
        }
        for (place, op) in ops.iter().enumerate() {
            let (base, offset) = match places {
                Some(places) => (operand(places.there), place * step),
                None => (operand(to), place * region),
            };
            let mut ins = vec![base, imm(offset as u64)];
            let types = op.signature().ins;
            ins.extend(types[2..].iter().enumerate().map(|(index, ty)| sources.value(*ty, index)));
            k.instruction(op.clone(), &[], &ins);
        }
        if let Some(places) = places {
            meet(k, space);
            for place in 0..ops.len() {
                let words: Vec<Val<'_, u32>> = k.ld_shared_vector(places.own, (place * step) as i64, 4);
                k.st_global_vector(to, (place * region) as i64, &words, Cache::Default);
            }
        }
    })
}

/// Prefetches change nothing; what was discarded can be written again.
fn touches() -> Probe {
    let mut random = Random::new("memory/touch");
    let input = random.bytes(LANES * 128);
    let fresh = slots((0..LANES).map(|_| value(Ty::U64, Domain::Any, &mut random)));
    let header = Header { name: "memory/touch".into(), threads: THREADS, ..Header::default() };
    let checks = vec![
        check("a load behind prefetches into L1 and L2", &["Prefetch"], column(2, 0, SLOT, SLOT, LANES), Rule::Bits),
        check("a store and a load behind a discard", &["DiscardL2"], column(2, LANES * SLOT, SLOT, SLOT, LANES), Rule::Bits),
    ];
    let buffers = vec![Contents::Bytes(input), Contents::Bytes(fresh), results(2 * LANES * SLOT)];
    let mut probe = probe(header, CTAS, buffers, checks, |k| {
        let (input, fresh) = (k.input("data", 128), k.input("fresh", 256));
        let output = k.output("results", 256);
        // The rest of a discarded line is undefined, so the lines are no buffer that is compared.
        let lines = k.in_out("lines", 128);
        let to = own(k, output, SLOT as u32);
        let from = own(k, input, 128);
        for l1 in [false, true] {
            k.instruction(Op::Prefetch { l1 }, &[], &[from, imm(0)]);
        }
        let word = load(k, Ty::U64, from, 16);
        store(k, Ty::U64, to, 0, word);
        let line = own(k, lines, 128);
        k.instruction(Op::DiscardL2 {}, &[], &[line, imm(0)]);
        let value = load(k, Ty::U64, own(k, fresh, SLOT as u32), 0);
        k.instruction(
            Op::St { space: Space::Global, ty: Ty::U64, count: 1, order: Order::Weak, cache: Cache::Default },
            &[],
            &[line, imm(8), value.into()],
        );
        let back = load(k, Ty::U64, line, 8);
        store(k, Ty::U64, to, LANES * SLOT, back);
    });
    let lines = probe.program.add_scratch("lines", LANES as u64 * 128);
    if let Some(Step::Launch(launch)) = probe.program.steps.first_mut() {
        launch.args.append(vec![Arg::Pointer(lines)].into());
    }
    probe
}
