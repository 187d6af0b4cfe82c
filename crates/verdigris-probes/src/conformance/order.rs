//! Barriers, mbarriers, fences, special registers, parameters, and what steers the chip.

use super::bulk::barriers;
use super::kit::{SLOT, check, column, emit, imm, operand, own, probe, probe_with, results, slots, store, thread_of_grid};
use super::values::Random;
use super::{Contents, Probe, Rule};
use verdigris_kir::face::{Bf16, Bf16x2, F16, F16x2, Header, Kernel, Role, Scalar, Val};
use verdigris_kir::inst::{Cache, Cmp, Fence, Op, Order, Scope, Space, Special, TestWait};
use verdigris_kir::ir::{Operand, Reg, Target, Ty};
use verdigris_kir::program::{Address, Arg, KernelRef, Launch, Program, Residency, Step};

pub(super) fn probes() -> Vec<Probe> {
    vec![
        special_registers(),
        parameters(),
        cta_barriers(),
        cluster_barriers(),
        mbarriers(),
        remote_mbarriers(),
        fences(Scope::Cta),
        fences(Scope::Cluster),
        fences(Scope::Gpu),
        fences(Scope::Sys),
        tensormap_fences(),
        register_budgets(),
        dependent_launches(),
        sleep(),
    ]
}

/// Registers whose values follow from the launch are compared; of the others, what must hold between them.
fn special_registers() -> Probe {
    const THREADS: u32 = 96;
    const CTAS: usize = 4 * 3 * 2;
    let lanes = CTAS * THREADS as usize;
    let exact = [
        Special::Tid,
        Special::Ntid,
        Special::CtaX,
        Special::CtaY,
        Special::CtaZ,
        Special::GridX,
        Special::GridY,
        Special::GridZ,
        Special::Lane,
        Special::ClusterX,
        Special::ClustersX,
        Special::ClusterCtaRank,
        Special::ClusterCtas,
        Special::LaneMaskLt,
        Special::LaneMaskLe,
        Special::LaneMaskEq,
        Special::LaneMaskGt,
        Special::LaneMaskGe,
        Special::DynamicSharedBytes,
        Special::Sms,
    ];
    let relations = ["the multiprocessor is one of the chip's", "clock64 does not go back", "globaltimer does not go back", "clock moves"];
    let region = lanes * SLOT;
    let what = exact.iter().map(|register| format!("{register:?}")).chain(relations.map(String::from));
    let checks = what
        .enumerate()
        .map(|(place, what)| check(what, &["SpecialRegister"], column(0, place * region, SLOT, 4, lanes), Rule::Bits))
        .collect();
    let header = Header { name: "order/special-registers".into(), target: Target::Sm90, threads: THREADS, cluster: 2, ..Header::default() };
    let mut probe = probe(header, 4, vec![results((exact.len() + relations.len()) * region)], checks, move |k| {
        let output = k.output("results", 256);
        // Dynamic shared memory of a size of its own.
        let piece = k.shared("unused", 272, 16);
        k.when(k.thread().eq(0u32), || k.st_shared(piece.address(), 0, k.constant(1u32)));
        let cta = (k.special(Special::CtaZ) * 3 + k.special(Special::CtaY)) * 4 + k.cta();
        let to = operand(output.at(cta * THREADS + k.thread(), SLOT as u32));
        let read = |register: Special| emit(k, &Op::SpecialRegister { register }, &[])[0];
        let (cycles, cycles64, time) = (read(Special::Clock), read(Special::Clock64), read(Special::GlobalTimer));
        for (place, register) in exact.into_iter().enumerate() {
            store(k, Ty::U32, to, place * region, read(register));
        }
        let compare = |cmp: Cmp, ty: Ty, a: Reg, b: Reg| emit(k, &Op::Setp { cmp, ty, ftz: false }, &[a.into(), b.into()])[0];
        k.nanosleep(2000u32);
        let holds = [
            compare(Cmp::Lt, Ty::U32, read(Special::Sm), read(Special::Sms)),
            compare(Cmp::Le, Ty::U64, cycles64, read(Special::Clock64)),
            compare(Cmp::Le, Ty::U64, time, read(Special::GlobalTimer)),
            compare(Cmp::Ne, Ty::U32, cycles, read(Special::Clock)),
        ];
        for (place, held) in holds.into_iter().enumerate() {
            store(k, Ty::Pred, to, (exact.len() + place) * region, held);
        }
    });
    if let Some(Step::Launch(launch)) = probe.program.steps.first_mut() {
        launch.grid = [4, 3, 2];
    }
    probe
}

/// Every type of parameter.
fn parameters() -> Probe {
    let mut random = Random::new("order/parameters");
    let types = [Ty::U16, Ty::S16, Ty::U32, Ty::S32, Ty::U64, Ty::S64, Ty::F16, Ty::Bf16, Ty::F16x2, Ty::Bf16x2, Ty::F32, Ty::F64];
    let mut args: Vec<Arg> = types.iter().map(|ty| Arg::Scalar(*ty, random.next() & (u64::MAX >> (64 - ty.bits())))).collect();
    args.push(Arg::Divisor(7));
    args.push(Arg::Divisor(0xfff1));
    const LANES: usize = 32;
    let region = LANES * SLOT;
    let mut checks: Vec<_> = types
        .iter()
        .enumerate()
        .map(|(place, ty)| {
            let result = column(0, place * region, SLOT, ty.bytes() as usize, LANES);
            check(format!("a parameter of type {ty}"), &["ParamLoad"], result, Rule::Bits)
        })
        .collect();
    for (index, divisor) in [7, 0xfff1].into_iter().enumerate() {
        for (part, word) in ["quotient", "remainder"].into_iter().enumerate() {
            let result = column(0, (types.len() + 2 * index + part) * region, SLOT, 4, LANES);
            checks.push(check(format!("{word} by {divisor}"), &["ParamLoad"], result, Rule::Bits));
        }
    }
    let header = Header { name: "order/parameters".into(), threads: LANES as u32, ..Header::default() };
    probe_with(header, 1, vec![results((types.len() + 4) * region)], args, checks, Residency::Any, move |k| {
        let output = k.output("results", 256);
        let to = own(k, output, SLOT as u32);
        fn one<'k, T: Scalar>(k: Kernel<'k>, to: Operand, place: &mut usize) {
            let value: Val<'k, T> = k.scalar("value");
            if let Operand::Reg(reg) = operand(value) {
                store(k, T::TY, to, *place * LANES * SLOT, reg);
            }
            *place += 1;
        }
        let place = &mut 0;
        one::<u16>(k, to, place);
        one::<i16>(k, to, place);
        one::<u32>(k, to, place);
        one::<i32>(k, to, place);
        one::<u64>(k, to, place);
        one::<i64>(k, to, place);
        one::<F16>(k, to, place);
        one::<Bf16>(k, to, place);
        one::<F16x2>(k, to, place);
        one::<Bf16x2>(k, to, place);
        one::<f32>(k, to, place);
        one::<f64>(k, to, place);
        for _ in 0..2 {
            let divisor = k.divisor("divisor");
            let (quotient, remainder) = divisor.split(k.thread() * 0x0765_4321);
            for value in [quotient, remainder] {
                keep(k, to, *place * region, value);
                *place += 1;
            }
        }
    })
}

/// Stores a value of 32 bits.
#[track_caller]
fn keep<'k>(k: Kernel<'k>, to: Operand, offset_bytes: usize, value: Val<'k, u32>) {
    let op = Op::St { space: Space::Global, ty: Ty::U32, count: 1, order: Order::Weak, cache: Cache::Default };
    k.instruction(op, &[], &[to, imm(offset_bytes as u64), operand(value)]);
}

/// Barriers of the CTA, whole and named, with counts and votes; barriers of a warp.
fn cta_barriers() -> Probe {
    const LANES: usize = 128;
    let region = LANES * SLOT;
    let mut random = Random::new("order/cta-barriers");
    let mut input = slots((0..LANES).map(|_| random.next()));
    input.extend(slots((0..LANES).map(|_| random.below(2))));
    input.extend(slots((0..LANES).map(|_| 0)));
    input.extend(slots((0..LANES).map(|_| 1)));
    let mut what: Vec<(String, &'static str)> = vec![("a word of another warp behind the barrier".into(), "CtaSync")];
    for predicates in ["mixed", "no", "all"] {
        what.push((format!("the count of {predicates} predicates"), "CtaCount"));
        what.push((format!("any of {predicates} predicates"), "CtaVote"));
        what.push((format!("all of {predicates} predicates"), "CtaVote"));
    }
    what.push(("a word of another lane behind the warp's barrier".into(), "WarpSync"));
    let mut checks: Vec<_> = what
        .into_iter()
        .enumerate()
        .map(|(place, (what, name))| check(what, &[name], column(1, place * region, SLOT, 4, LANES), Rule::Bits))
        .collect();
    let named = checks.len();
    let result = column(1, named * region + 64 * SLOT, SLOT, 4, 64);
    checks.push(check("a word of warps that arrived at a named barrier", &["BarSync", "BarArrive"], result, Rule::Bits));
    let header = Header { name: "order/cta-barriers".into(), threads: LANES as u32, ..Header::default() };
    probe(header, 1, vec![Contents::Bytes(input), results((named + 1) * region)], checks, move |k| {
        let (input, output) = (k.input("operands", 256), k.output("results", 256));
        let to = own(k, output, SLOT as u32);
        let words = k.shared("words", 3 * 4 * LANES as u32, 16);
        let mine = words.address() + k.thread() * 4;
        let value: Val<'_, u32> = k.ld_global(input.at(k.thread(), SLOT as u32), 0);
        k.st_shared(mine, 0, value);
        k.bar_sync();
        keep(k, to, 0, k.ld_shared(words.address() + (k.thread() ^ 0x5d) * 4, 0));
        let mut place = 1;
        for set in 1..4 {
            let word: Val<'_, u32> = k.ld_global(input.at(k.thread(), SLOT as u32), (set * region) as i64);
            let predicate = operand(word.ne(0u32));
            for op in [Op::CtaCount {}, Op::CtaVote { all: false }, Op::CtaVote { all: true }] {
                let out = emit(k, &op, &[predicate])[0];
                store(k, op.signature().outs[0], to, place * region, out);
                place += 1;
            }
        }
        let step = 4 * LANES as i64;
        k.st_shared(mine, step, value + 1);
        k.warp_sync();
        keep(k, to, place * region, k.ld_shared(words.address() + (k.thread() ^ 0x15) * 4, step));
        place += 1;
        k.warp_roles(&[
            Role {
                name: "writers",
                warps: 2,
                registers: None,
                body: &|| {
                    k.st_shared(mine, 2 * step, value + 2);
                    k.barrier_arrive(3u32, LANES as u32);
                },
            },
            Role {
                name: "readers",
                warps: 2,
                registers: None,
                body: &|| {
                    k.barrier_sync(3u32, LANES as u32);
                    keep(k, to, place * region, k.ld_shared(words.address() + (k.thread() - 64) * 4, 2 * step));
                },
            },
        ]);
    })
}

fn cluster_barriers() -> Probe {
    const THREADS: usize = 64;
    const CTAS: usize = 4;
    let lanes = THREADS * CTAS;
    let mut random = Random::new("order/cluster-barriers");
    let names = ["ClusterArrive", "ClusterWait", "MapShared"];
    let checks = vec![check("a word of the next CTA of the cluster", &names, column(1, 0, SLOT, 4, lanes), Rule::Bits)];
    let input = slots((0..lanes).map(|_| random.next()));
    let header = Header {
        name: "order/cluster-barriers".into(),
        target: Target::Sm90,
        threads: THREADS as u32,
        cluster: CTAS as u32,
        ..Header::default()
    };
    probe(header, CTAS as u32, vec![Contents::Bytes(input), results(lanes * SLOT)], checks, |k| {
        let (input, output) = (k.input("operands", 256), k.output("results", 256));
        let words = k.shared("words", 4 * THREADS as u32, 16);
        let mine = words.address() + k.thread() * 4;
        // All CTAs run before one touches another's memory; nothing needs to be ordered.
        k.cluster_arrive_relaxed();
        k.cluster_wait();
        let value: Val<'_, u32> = k.ld_global(input.at(thread_of_grid(k), SLOT as u32), 0);
        k.st_shared(mine, 0, value);
        k.cluster_sync();
        let next = (k.cluster_rank() + 1) & (CTAS as u32 - 1);
        let there = k.ld_cluster_vector::<u32>(k.mapa(mine, next), 0, 1)[0];
        keep(k, own(k, output, SLOT as u32), 0, there);
        k.cluster_sync();
    })
}

/// The life of mbarriers in the hands of one thread, where every answer follows from the protocol.
fn mbarriers() -> Probe {
    let what: [(&str, &[&'static str]); 14] = [
        ("pending arrivals of a new phase", &["MbarrierPending", "MbarrierArriveToken", "MbarrierInit"]),
        ("the phase is open: test by token", &["MbarrierTestToken"]),
        ("the phase is open: test by parity", &["MbarrierTest"]),
        ("pending arrivals before the last ones", &["MbarrierPending", "MbarrierArriveToken"]),
        ("the phase is complete: test by the first token", &["MbarrierTestToken"]),
        ("the phase is complete: try by the first token", &["MbarrierTestToken"]),
        ("the phase is complete: test by parity, CTA", &["MbarrierTest"]),
        ("the phase is complete: test by parity, cluster", &["MbarrierTest"]),
        ("the phase is complete: try by parity, CTA", &["MbarrierTest"]),
        ("the phase is complete: try by parity, cluster", &["MbarrierTest"]),
        ("complete after dropped arrivals", &["MbarrierArriveDrop", "MbarrierArrive"]),
        ("complete with the lower count of the next phase", &["MbarrierArriveDrop", "MbarrierArrive"]),
        ("open while bytes are missing", &["MbarrierExpect", "MbarrierArriveExpect"]),
        ("complete when the bytes are there", &["MbarrierComplete", "MbarrierExpect", "MbarrierArriveExpect"]),
    ];
    let mut checks: Vec<_> = what
        .into_iter()
        .enumerate()
        .map(|(place, (what, names))| check(what, names, column(0, place * SLOT, SLOT, 4, 1), Rule::Bits))
        .collect();
    let last = checks.len();
    let names = ["MbarrierInvalidate", "MbarrierWait"];
    checks.push(check("a word where an mbarrier was", &names, column(0, last * SLOT, SLOT, 4, 1), Rule::Bits));
    let header = Header { name: "order/mbarriers".into(), target: Target::Sm90, threads: 32, ..Header::default() };
    probe(header, 1, vec![results((last + 1) * SLOT)], checks, move |k| {
        let output = k.output("results", 256);
        let bars = barriers(k, 2, 5);
        let to = operand(output.address());
        k.when(k.thread().eq(0u32), || {
            let place = std::cell::Cell::new(0);
            let keep = |ty: Ty, reg: Reg| {
                store(k, ty, to, place.get() * SLOT, reg);
                place.set(place.get() + 1);
            };
            let at = operand(bars.at(0u32).address());
            let token = |count: u64| emit(k, &Op::MbarrierArriveToken {}, &[at, imm(0), imm(count)])[0];
            let by_token = |kind: TestWait, token: Reg| emit(k, &Op::MbarrierTestToken { kind }, &[at, imm(0), token.into()])[0];
            let test = |at: Operand, kind: TestWait, scope: Scope, parity: u64| {
                emit(k, &Op::MbarrierTest { kind, scope }, &[at, imm(0), imm(parity)])[0]
            };
            let arrive = |at: Operand, scope: Scope, count: u64| {
                k.instruction(Op::MbarrierArrive { space: Space::Shared, scope }, &[], &[at, imm(0), imm(count)]);
            };
            let first = token(2);
            keep(Ty::U32, emit(k, &Op::MbarrierPending {}, &[first.into()])[0]);
            keep(Ty::Pred, by_token(TestWait::Test, first));
            keep(Ty::Pred, test(at, TestWait::Test, Scope::Cta, 0));
            let second = token(3);
            keep(Ty::U32, emit(k, &Op::MbarrierPending {}, &[second.into()])[0]);
            keep(Ty::Pred, by_token(TestWait::Test, first));
            keep(Ty::Pred, by_token(TestWait::Try, first));
            for kind in [TestWait::Test, TestWait::Try] {
                for scope in [Scope::Cta, Scope::Cluster] {
                    keep(Ty::Pred, test(at, kind, scope, 0));
                }
            }
            k.instruction(Op::MbarrierArriveDrop {}, &[], &[at, imm(0), imm(2)]);
            arrive(at, Scope::Cta, 3);
            keep(Ty::Pred, test(at, TestWait::Test, Scope::Cta, 1));
            arrive(at, Scope::Cluster, 3);
            keep(Ty::Pred, test(at, TestWait::Test, Scope::Cta, 0));
            let bar = bars.at(1u32);
            let bytes = operand(bar.address());
            bar.expect_tx(64u32);
            bar.arrive_expect_tx(64u32);
            arrive(bytes, Scope::Cta, 4);
            keep(Ty::Pred, test(bytes, TestWait::Test, Scope::Cta, 0));
            k.instruction(Op::MbarrierComplete { space: Space::Shared }, &[], &[bytes, imm(0), imm(128)]);
            keep(Ty::Pred, test(bytes, TestWait::Test, Scope::Cta, 0));
            bar.wait(0u32);
            k.instruction(Op::MbarrierInvalidate {}, &[], &[bytes, imm(0)]);
            k.st_shared(bar.address(), 0, k.constant(0x1357_9bdfu32));
            let word: Val<'_, u32> = k.ld_shared(bar.address(), 0);
            k.st_global(output.address(), (place.get() * SLOT) as i64, word);
        });
    })
}

/// Arrivals, expected bytes and completions at the mbarriers of the other CTA, behind which its stores are seen.
fn remote_mbarriers() -> Probe {
    let mut random = Random::new("order/remote-mbarriers");
    let what: [(&str, &[&'static str]); 3] = [
        ("a word that the other CTA stored before it arrived", &["MbarrierArrive", "MapShared", "MbarrierWait"]),
        ("a word behind remote arrive.expect_tx and complete_tx", &["MbarrierArriveExpect", "MbarrierComplete"]),
        ("a word behind remote expect_tx and complete_tx", &["MbarrierExpect", "MbarrierComplete"]),
    ];
    let checks = what
        .into_iter()
        .enumerate()
        .map(|(place, (what, names))| check(what, names, column(1, place * 2 * SLOT, SLOT, 4, 2), Rule::Bits))
        .collect();
    let header = Header { name: "order/remote-mbarriers".into(), target: Target::Sm90, threads: 32, cluster: 2, ..Header::default() };
    let input = slots((0..2).map(|_| random.next()));
    probe(header, 2, vec![Contents::Bytes(input), results(6 * SLOT)], checks, |k| {
        let (input, output) = (k.input("operands", 256), k.output("results", 256));
        let words = k.shared("words", 64, 16);
        let bars = k.mbarrier_array("bars", 3);
        bars.arrivals().set(2);
        k.when(k.thread().eq(0u32), || bars.init());
        k.fence(Fence::MbarrierInit);
        k.cluster_sync();
        let other = k.cluster_rank() ^ 1;
        k.when(k.thread().eq(0u32), || {
            let value: Val<'_, u32> = k.ld_global(input.at(k.cta(), SLOT as u32), 0);
            let there = k.mapa(words.address(), other);
            let bar = |index: u32| operand(bars.at(index).peer(other).address());
            let act = |op: Op, index: u32, number: u64| k.instruction(op, &[], &[bar(index), imm(0), imm(number)]);
            let arrive = |scope: Scope, index: u32| act(Op::MbarrierArrive { space: Space::Cluster, scope }, index, 1);
            let space = Space::Cluster;
            arrive(Scope::Cta, 0);
            for index in 0..3 {
                k.st_cluster_vector(there, 4 * i64::from(index), &[value + index]);
            }
            arrive(Scope::Cluster, 0);
            act(Op::MbarrierArriveExpect { space }, 1, 32);
            act(Op::MbarrierComplete { space }, 1, 32);
            arrive(Scope::Cluster, 1);
            act(Op::MbarrierExpect { space }, 2, 48);
            act(Op::MbarrierComplete { space }, 2, 48);
            arrive(Scope::Cta, 2);
            arrive(Scope::Cluster, 2);
        });
        for index in 0..3u32 {
            bars.at(index).wait_cluster(0u32);
        }
        k.when(k.thread().eq(0u32), || {
            for index in 0..3usize {
                let word: Val<'_, u32> = k.ld_shared(words.address(), 4 * index as i64);
                k.st_global(output.at(k.cta(), SLOT as u32), (index * 2 * SLOT) as i64, word);
            }
        });
        k.cluster_sync();
    })
}

const fn scope_word(scope: Scope) -> &'static str {
    match scope {
        Scope::Cta => "cta",
        Scope::Cluster => "cluster",
        Scope::Gpu => "gpu",
        Scope::Sys => "sys",
    }
}

/// A message through global memory, behind each kind of fence and behind release and acquire: between warps, CTAs of a cluster, CTAs.
fn fences(scope: Scope) -> Probe {
    const LANES: usize = 32;
    const WAYS: usize = 3;
    let name = format!("order/fence-{}", scope_word(scope));
    let mut random = Random::new(&name);
    let what =
        [format!("behind {:?}", Fence::AcqRel(scope)), format!("behind {:?}", Fence::Sc(scope)), "behind release and acquire".into()];
    let mut checks: Vec<_> = what
        .into_iter()
        .enumerate()
        .map(|(way, what)| check(what, &["MemoryFence"], column(2, way * LANES * SLOT, SLOT, 4, LANES), Rule::Bits))
        .collect();
    checks.push(check("the message itself", &[], column(1, 0, 4, 4, WAYS * LANES), Rule::Bits));
    checks.push(check("the flags", &[], column(3, 0, 4, 4, WAYS), Rule::Bits));
    let threads = if scope == Scope::Cta { 64 } else { 32 };
    let target = if scope == Scope::Cluster { Target::Sm90 } else { Target::Sm80 };
    let (cluster, grid) = match scope {
        Scope::Cta => (1, 1),
        Scope::Cluster => (2, 2),
        _ => (1, 2),
    };
    let buffers = vec![
        Contents::Bytes(slots((0..LANES).map(|_| random.next()))),
        results(WAYS * LANES * 4),
        results(WAYS * LANES * SLOT),
        Contents::Filled { bytes: 4 * WAYS, value: 0 },
    ];
    let residency = if grid == 2 && cluster == 1 { Residency::All } else { Residency::Any };
    let header = Header { name, target, threads, cluster, ..Header::default() };
    probe_with(header, grid, buffers, Vec::new(), checks, residency, move |k| {
        let (input, message) = (k.input("operands", 256), k.in_out("message", 256));
        let (output, flags) = (k.output("results", 256), k.in_out("flags", 256));
        let side = if scope == Scope::Cta { k.warp() } else { k.cta() };
        let first = k.lane().eq(0u32);
        for way in 0..WAYS {
            let fence = || match way {
                0 => k.fence(Fence::AcqRel(scope)),
                1 => k.fence(Fence::Sc(scope)),
                _ => {}
            };
            let (write, read) =
                if way == 2 { (Order::Release(scope), Order::Acquire(scope)) } else { (Order::Relaxed(scope), Order::Relaxed(scope)) };
            let place = message.at(k.lane(), 4);
            let offset = (way * LANES * 4) as i64;
            let flag = flags.address() + 4 * way as u64;
            k.when_else(
                side.eq(0u32),
                || {
                    let value: Val<'_, u32> = k.ld_global(input.at(k.lane(), SLOT as u32), 0);
                    k.st_global(place, offset, value + way as u32);
                    k.warp_sync();
                    k.when(first, || {
                        fence();
                        k.st_global_with(flag, 0, k.constant(1u32), write, Cache::Default);
                    });
                },
                || {
                    k.when(first, || {
                        k.repeat_until(|| k.ld_global_with::<u32>(flag, 0, read, Cache::Default).ne(0u32));
                        fence();
                    });
                    k.warp_sync();
                    let value: Val<'_, u32> = k.ld_global(place, offset);
                    k.st_global(output.at(k.lane(), SLOT as u32), (way * LANES * SLOT) as i64, value);
                },
            );
        }
    })
}

/// Fences of tensor maps change nothing for a map that nobody changed.
fn tensormap_fences() -> Probe {
    const LANES: usize = 32;
    let scopes = [Scope::Cta, Scope::Cluster, Scope::Gpu, Scope::Sys];
    let checks = vec![check("a word stored behind fence.proxy.tensormap", &["MemoryFence"], column(1, 0, SLOT, 4, LANES), Rule::Bits)];
    let buffers = vec![Contents::Filled { bytes: 128, value: 0 }, results(LANES * SLOT)];
    let header = Header { name: "order/tensormap-fences".into(), target: Target::Sm90, threads: LANES as u32, ..Header::default() };
    probe(header, 1, buffers, checks, move |k| {
        let (map, output) = (k.input("map", 256), k.output("results", 256));
        for scope in scopes {
            k.fence(Fence::TensormapRelease(scope));
        }
        for scope in scopes {
            let op = Op::MemoryFence { fence: Fence::TensormapAcquire(scope) };
            k.instruction(op, &[], &[operand(map.address())]);
        }
        keep(k, own(k, output, SLOT as u32), 0, k.thread() * 3);
    })
}

/// Warpgroups that give registers back and take more.
fn register_budgets() -> Probe {
    const LANES: usize = 384;
    let checks = vec![check("a word behind setmaxnreg", &["Setmaxnreg"], column(0, 0, SLOT, 4, LANES), Rule::Bits)];
    let header = Header { name: "order/register-budgets".into(), target: Target::Sm90a, threads: LANES as u32, ..Header::default() };
    probe(header, 1, vec![results(LANES * SLOT)], checks, |k| {
        let output = k.output("results", 256);
        let to = own(k, output, SLOT as u32);
        let part = |add: u32| move || keep(k, to, 0, k.thread() * 5 + add);
        let (few, many) = (part(1), part(2));
        k.warp_roles(&[
            Role { name: "few", warps: 4, registers: Some(40), body: &few },
            Role { name: "many", warps: 8, registers: Some(232), body: &many },
        ]);
    })
}

/// A launch that starts before the one in front of it ends, and waits for what that one wrote.
fn dependent_launches() -> Probe {
    const LANES: usize = 1024;
    let mut random = Random::new("order/dependent-launches");
    let names = ["GridDependencyWait", "GridDependencyLaunch"];
    let checks = vec![
        check("what the first launch wrote", &names, column(1, 0, SLOT, 4, LANES), Rule::Bits),
        check("what the second made of it", &names, column(2, 0, SLOT, 4, LANES), Rule::Bits),
    ];
    let buffers = vec![Contents::Bytes(slots((0..LANES).map(|_| random.next()))), results(LANES * SLOT), results(LANES * SLOT)];
    let launch = |name: &'static str, overlap: bool, from: usize, to: usize, wait: bool| {
        let header = Header { name: name.into(), target: Target::Sm90, threads: 128, ..Header::default() };
        let kernel = KernelRef::new(name, move || {
            verdigris_kir::face::build(header.clone(), |k| {
                let (input, output) = (k.input("from", 256), k.output("to", 256));
                if wait {
                    k.griddep_wait();
                }
                let value: Val<'_, u32> = k.ld_global(input.at(thread_of_grid(k), SLOT as u32), 0);
                k.st_global(output.at(thread_of_grid(k), SLOT as u32), 0, value * 3 + 1);
                if !wait {
                    k.griddep_launch();
                }
            })
        });
        let args = [from, to].map(|slot| Arg::Pointer(Address::buffer(slot))).to_vec();
        Step::Launch(Launch { kernel, grid: [LANES as u32 / 128, 1, 1], residency: Residency::Any, overlap, args: args.into() })
    };
    let steps =
        vec![launch("order/dependent-launches/first", false, 0, 1, false), launch("order/dependent-launches/second", true, 1, 2, true)];
    let program = Program { steps, buffer_alignment_bytes: vec![256; 3], ..Program::default() };
    Probe { name: "order/dependent-launches".into(), program, buffers, checks, magnitudes: None }
}

fn sleep() -> Probe {
    const LANES: usize = 64;
    let checks = vec![check("a word stored behind a sleep", &["Nanosleep"], column(0, 0, SLOT, 4, LANES), Rule::Bits)];
    let header = Header { name: "order/sleep".into(), threads: LANES as u32, ..Header::default() };
    probe(header, 1, vec![results(LANES * SLOT)], checks, |k| {
        let output = k.output("results", 256);
        k.nanosleep(k.thread() * 20);
        keep(k, own(k, output, SLOT as u32), 0, k.thread() * 7);
    })
}
