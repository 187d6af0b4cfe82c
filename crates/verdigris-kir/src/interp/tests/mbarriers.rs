//! Mbarriers whose use other parts of the language leave out: arrivals that drop out, phase tokens, and uses that nothing orders behind the initialization.

use super::*;
use crate::face::{AsVal, Mbarrier, MbarrierArray};
use crate::inst::{Op, Scope, Space, TestWait};
use crate::ir::Operand;

/// Barriers of one member, and the member.
fn barrier<'k>(k: Kernel<'k>, arrivals: u64) -> (MbarrierArray<'k>, Mbarrier<'k>) {
    let barriers = k.mbarrier_array("full", 1);
    barriers.arrivals().set(arrivals);
    (barriers, barriers.at(k.constant(0u32)))
}

fn output() -> Memory {
    let mut memory = Memory::new();
    memory.add_unwritten(256);
    memory
}

/// Every schedule ends without a finding and leaves these words; for kernels of which the verifier knows too little.
fn leaves(body: &KernelBody, ctas: u32, wanted: &[u32]) {
    for seed in 0..SEEDS {
        let mut memory = output();
        let options = Options { step_budget: 20_000, ..Options::schedule(seed) };
        run_unchecked(body, ctas, &[pointer(0)], &mut memory, &options).unwrap_or_else(|findings| panic!("{findings}"));
        assert_eq!(read_words(&mut memory, 0)[..wanted.len()], *wanted, "seed {seed}");
    }
}

#[test]
fn an_arrival_that_drops_out_is_not_waited_for_again() {
    let body = kernel(64, 1, |k| {
        let y = k.output("y", 4);
        let (barriers, full) = barrier(k, 2);
        k.when(k.thread().eq(0u32), || barriers.init());
        k.bar_sync();
        k.when(k.thread().eq(32u32), || {
            let address = full.address().operand();
            k.instruction(Op::MbarrierArriveDrop {}, &[], &[address, Operand::Imm(0), Operand::Imm(1)]);
        });
        k.when(k.thread().eq(0u32), || {
            for phase in 0..3u32 {
                full.arrive();
                full.wait(phase & 1);
            }
            k.st_global(y.address(), 0, k.constant(7u32));
        });
    });
    leaves(&body, 1, &[7]);
}

#[test]
fn a_token_tells_whether_its_own_phase_is_over() {
    let body = kernel(32, 1, |k| {
        let y = k.output("y", 4);
        let (barriers, full) = barrier(k, 2);
        k.when(k.thread().eq(0u32), || {
            barriers.init();
            let (token, over) = (k.var::<u64>(0u64), k.var::<bool>(k.constant(false)));
            let place = [full.address().operand(), Operand::Imm(0)];
            k.instruction(Op::MbarrierArriveToken {}, &[token.operand().reg()], &[place[0], place[1], Operand::Imm(1)]);
            for number in 0..2 {
                let op = Op::MbarrierTestToken { kind: TestWait::Test };
                k.instruction(op, &[over.operand().reg()], &[place[0], place[1], token.operand()]);
                k.st_global(y.address(), 4 * number, k.select(over.get(), k.constant(1u32), k.constant(0u32)));
                full.arrive();
            }
        });
    });
    leaves(&body, 1, &[0, 1]);
}

#[test]
fn a_use_that_nothing_orders_behind_the_initialization() {
    let kernel_of = |orders: bool, plant: &Plant| {
        kernel(64, 1, |k| {
            let y = k.output("y", 4);
            let (barriers, full) = barrier(k, 1);
            k.when(k.thread().eq(0u32), || barriers.init());
            if orders {
                k.bar_sync();
            }
            k.when(k.thread().eq(32u32), || {
                plant!(plant);
                full.arrive();
                k.st_global(y.address(), 0, k.constant(7u32));
            });
        })
    };
    leaves(&kernel_of(true, &Plant::default()), 1, &[7]);
    let plant = Plant::default();
    let body = kernel_of(false, &plant);
    let mut raced = 0;
    for seed in 0..SEEDS {
        let findings = run_unchecked(&body, 1, &[pointer(0)], &mut output(), &Options::schedule(seed)).expect_err("a finding");
        let first = findings.first();
        // Where it comes first, there is no barrier yet.
        assert!(matches!(first.kind, FindingKind::Race | FindingKind::MbarrierMisuse), "{findings}");
        assert_eq!(first.at[0].line, plant.0.get(), "{findings}");
        raced += u32::from(first.kind == FindingKind::Race);
    }
    assert!(raced > 0);
}

#[test]
fn a_peer_uses_an_mbarrier_whose_initialization_was_not_fenced() {
    let kernel_of = |fences: bool, plant: &Plant| {
        kernel(32, 2, |k| {
            let y = k.output("y", 4);
            let (barriers, full) = barrier(k, 1);
            k.when(k.thread().eq(0u32), || barriers.init());
            if fences {
                k.fence(crate::inst::Fence::MbarrierInit);
            }
            k.cluster_sync();
            k.when(k.thread().eq(0u32), || {
                let peer = k.mapa(full.address(), k.cluster_rank() ^ 1u32);
                let op = Op::MbarrierArrive { space: Space::Cluster, scope: Scope::Cluster };
                plant!(plant);
                k.instruction(op, &[], &[peer.operand(), Operand::Imm(0), Operand::Imm(1)]);
                full.wait_cluster(0u32);
                k.st_global(y.at(k.cta(), 4), 0, k.constant(7u32));
            });
            k.cluster_sync();
        })
    };
    leaves(&kernel_of(true, &Plant::default()), 2, &[7, 7]);
    let plant = Plant::default();
    fails(&kernel_of(false, &plant), 2, &[pointer(0)], output, FindingKind::ProxyFence, &plant);
}

/// Two phases end while one waits for the first: what it waits for has come and gone.
#[test]
fn a_waiter_that_two_phases_go_past() {
    let plant = Plant::default();
    let body = kernel(64, 1, |k| {
        let (barriers, full) = barrier(k, 1);
        let _ = k.output("y", 4);
        k.when(k.thread().eq(0u32), || barriers.init());
        k.bar_sync();
        k.when_else(
            k.thread().lt(32u32),
            || {
                for _ in 0..2 {
                    k.when(k.thread().eq(0u32), || full.arrive());
                }
            },
            || {
                plant!(plant);
                full.wait(0u32);
            },
        );
    });
    let mut lapped = 0;
    for seed in 0..60 {
        if let Err(findings) = run_unchecked(&body, 1, &[pointer(0)], &mut output(), &Options::schedule(seed)) {
            let first = findings.first();
            // Where it comes last, both are over, and it waits for what nobody brings.
            assert!(matches!(first.kind, FindingKind::MbarrierLapped | FindingKind::Deadlock), "{findings}");
            assert_eq!(first.at[0].line, plant.0.get(), "{findings}");
            lapped += u32::from(first.kind == FindingKind::MbarrierLapped);
        }
    }
    assert!(lapped > 0);
}
