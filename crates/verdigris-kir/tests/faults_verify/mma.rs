use crate::{Lines, caught, clean, header, product};
use verdigris_kir::face::{Kernel, Role, Val, Var, WgmmaA};
use verdigris_kir::inst::WgmmaShape;
use verdigris_kir::ir::Target;

fn accumulators<'k>(k: Kernel<'k>, n: u32) -> Vec<Var<'k, f32>> {
    (0..n / 2).map(|_| k.var_unset(Some("acc"))).collect()
}

fn descriptor<'k>(k: Kernel<'k>) -> Val<'k, u64> {
    k.constant(0x4000_0040_0001_0000u64)
}

fn store<'k>(k: Kernel<'k>, lines: &Lines, value: Var<'k, f32>) {
    let out = k.output("out", 4);
    let at = out.at(k.thread(), 4);
    lines.here(line!() + 1);
    k.st_global(at, 0, value.get());
}

const WG: (Target, u32) = (Target::Sm90a, 128);

#[test]
fn an_accumulator_read_in_flight() {
    caught("flight", &["read here", "still in flight"], header(WG.0, WG.1), |k, lines| {
        let acc = accumulators(k, 16);
        k.wgmma_fence();
        lines.also(line!() + 1);
        k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        k.wgmma_commit();
        store(k, lines, acc[3]);
        k.wgmma_wait(0);
    });
}

#[test]
fn a_wait_that_leaves_the_group_in_flight() {
    caught("flight", &["read here"], header(WG.0, WG.1), |k, lines| {
        let (first, second) = (accumulators(k, 16), accumulators(k, 16));
        k.wgmma_fence();
        k.wgmma(product(16), &first, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        k.wgmma_commit();
        lines.also(line!() + 1);
        k.wgmma(product(16), &second, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        k.wgmma_commit();
        k.wgmma_wait(1);
        store(k, lines, second[0]);
        k.wgmma_wait(0);
    });
}

#[test]
fn an_accumulator_in_flight_across_the_back_edge() {
    caught("flight", &["read here"], header(WG.0, WG.1), |k, lines| {
        let acc = accumulators(k, 16);
        let out = k.output("out", 4);
        acc.iter().for_each(|acc| acc.set(0f32));
        k.range(k.scalar::<u32>("steps"), |_| {
            // The product of the turn before is still in flight here.
            lines.here(line!() + 1);
            k.st_global(out.address(), 0, acc[0].get());
            k.wgmma_fence();
            lines.also(line!() + 1);
            k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), true);
            k.wgmma_commit();
        });
        k.wgmma_wait(0);
    });
}

#[test]
fn an_accumulator_zeroed_in_flight() {
    caught("flight", &["written here"], header(WG.0, WG.1), |k, lines| {
        let acc = accumulators(k, 16);
        k.wgmma_fence();
        lines.also(line!() + 1);
        k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        k.wgmma_commit();
        lines.here(line!() + 1);
        acc[7].set(0f32);
        k.wgmma_wait(0);
    });
}

#[test]
fn a_fragment_overwritten_in_flight() {
    caught("flight", &["A register", "written here"], header(WG.0, WG.1), |k, lines| {
        let acc = accumulators(k, 16);
        let a: Vec<Var<'_, u32>> = (0..4).map(|i| k.var(i as u32)).collect();
        let shape = WgmmaShape { a_in_registers: true, ..product(16) };
        k.range(4u32, |i| {
            lines.here(line!() + 1);
            a[1].set(i);
            k.wgmma_fence();
            lines.also(line!() + 1);
            k.wgmma(shape, &acc, WgmmaA::Fragment(&a), descriptor(k), false);
            k.wgmma_commit();
        });
        k.wgmma_wait(0);
    });
}

#[test]
fn accumulators_in_two_shapes_at_once() {
    caught("flight", &["another shape"], header(WG.0, WG.1), |k, lines| {
        let acc = accumulators(k, 32);
        k.wgmma_fence();
        lines.also(line!() + 1);
        k.wgmma(product(32), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        lines.here(line!() + 1);
        k.wgmma(product(16), &acc[..8], WgmmaA::Shared(descriptor(k)), descriptor(k), true);
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
}

#[test]
fn no_fence_before_the_first_product() {
    caught("fence", &["no wgmma.fence stands before"], header(WG.0, WG.1), |k, lines| {
        let acc = accumulators(k, 16);
        lines.here(line!() + 1);
        k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
}

#[test]
fn no_fence_after_the_accumulators_are_scaled() {
    caught("fence", &["acc", "written at"], header(WG.0, WG.1), |k, lines| {
        let acc = accumulators(k, 16);
        k.wgmma_fence();
        k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        k.wgmma_commit();
        k.wgmma_wait(0);
        lines.also(line!() + 1);
        acc[2].set(acc[2] * 0.5);
        lines.here(line!() + 1);
        k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), true);
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
}

#[test]
fn no_fence_after_the_fragment_is_packed() {
    caught("fence", &["written at"], header(WG.0, WG.1), |k, lines| {
        let acc = accumulators(k, 16);
        let shape = WgmmaShape { a_in_registers: true, ..product(16) };
        k.wgmma_fence();
        let word = k.lane();
        lines.also(line!() + 1);
        let a = [word + 1u32, word + 2u32, word + 3u32, word + 4u32];
        lines.here(line!() + 1);
        k.wgmma(shape, &acc, WgmmaA::Registers(&a), descriptor(k), false);
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
}

#[test]
fn a_wait_without_a_commit() {
    caught("commit", &["no wgmma.commit_group stands between"], header(WG.0, WG.1), |k, lines| {
        let acc = accumulators(k, 16);
        k.wgmma_fence();
        lines.also(line!() + 1);
        k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        k.wgmma_wait(0);
        store(k, lines, acc[0]);
        k.wgmma_commit();
    });
}

#[test]
fn a_group_that_is_never_closed() {
    caught("commit", &["closes the group"], header(WG.0, WG.1), |k, lines| {
        let acc = accumulators(k, 16);
        k.wgmma_fence();
        lines.here(line!() + 1);
        k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
    });
}

#[test]
fn a_group_that_a_role_never_closes() {
    caught("commit", &["closes the group"], header(WG.0, 256), |k, lines| {
        let acc = accumulators(k, 16);
        k.warp_roles(&[Role {
            name: "consumer",
            warps: 4,
            registers: None,
            body: &|| {
                k.wgmma_fence();
                k.range(3u32, |_| {
                    lines.here(line!() + 1);
                    k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), true);
                });
                k.wgmma_wait(0);
            },
        }]);
    });
}

#[test]
fn more_accumulators_than_a_thread_holds() {
    caught("accumulators", &["256 accumulators a thread are in flight"], header(WG.0, 384), |k, lines| {
        let (first, second) = (accumulators(k, 256), accumulators(k, 256));
        k.wgmma_fence();
        k.wgmma(product(256), &first, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        lines.here(line!() + 1);
        k.wgmma(product(256), &second, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
}

/// The main loop of a GEMM with one group in flight, an attention-like loop, and a conditional wait.
#[test]
fn products_that_are_waited_for() {
    clean(header(WG.0, WG.1), |k| {
        let acc = accumulators(k, 64);
        let out = k.output("out", 4);
        acc.iter().for_each(|acc| acc.set(0f32));
        k.range(k.scalar::<u32>("steps"), |_| {
            k.wgmma_fence();
            for _ in 0..4 {
                k.wgmma(product(64), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), true);
            }
            k.wgmma_commit();
            k.wgmma_wait(1);
        });
        k.wgmma_wait(0);
        k.st_global(out.address(), 0, acc[5].get());
    });
    clean(header(WG.0, WG.1), |k| {
        let (scores, output) = (accumulators(k, 32), accumulators(k, 64));
        let a: Vec<Var<'_, u32>> = (0..4).map(|_| k.var(0u32)).collect();
        let rs = WgmmaShape { a_in_registers: true, ..product(64) };
        output.iter().for_each(|acc| acc.set(0f32));
        k.wgmma_fence();
        k.wgmma(product(32), &scores, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
        k.wgmma_commit();
        k.wgmma_wait(0);
        k.range(k.scalar::<u32>("blocks"), |_| {
            a.iter().zip(&scores).for_each(|(a, score)| a.set(k.pack_bf16x2(score.get(), score.get()).bitcast::<u32>()));
            k.wgmma_fence();
            k.wgmma(product(32), &scores, WgmmaA::Shared(descriptor(k)), descriptor(k), false);
            k.wgmma_commit();
            k.wgmma(rs, &output, WgmmaA::Fragment(&a), descriptor(k), true);
            k.wgmma_commit();
            k.wgmma_wait(1);
            scores.iter().for_each(|score| score.set(score.get() * 2.0));
            k.wgmma_wait(0);
            output.iter().for_each(|acc| acc.set(acc.get() * 0.5));
        });
    });
    clean(header(WG.0, WG.1), |k| {
        let acc = accumulators(k, 16);
        let out = k.output("out", 4);
        let some = k.scalar::<u32>("k").gt(0u32);
        acc.iter().for_each(|acc| acc.set(0f32));
        k.when(some, || {
            k.wgmma_fence();
            k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor(k)), descriptor(k), true);
            k.wgmma_commit();
        });
        k.when(some, || k.wgmma_wait(0));
        k.st_global(out.address(), 0, acc[0].get());
    });
}
