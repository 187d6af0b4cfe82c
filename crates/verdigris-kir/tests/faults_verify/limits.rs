use crate::{Lines, caught, caught_in, clean, header};
use verdigris_kir::face::{Header, Role, build};
use verdigris_kir::inst::{MatrixType, Op, WgmmaShape};
use verdigris_kir::ir::{Access, MapDecl, MapType, Swizzle, Target};

#[test]
fn more_shared_memory_than_there_is() {
    for (target, bytes) in [(Target::Sm80, 163 * 1024 + 16), (Target::Sm89, 99 * 1024 + 16), (Target::Sm90a, 227 * 1024 + 16)] {
        caught("shared", &["bytes of shared memory"], header(target, 32), |k, lines| {
            lines.here(line!() + 1);
            let _ = k.shared("big", bytes, 16);
        });
        clean(header(target, 32), |k| {
            let _ = k.shared("big", bytes - 16, 16);
        });
    }
    caught("shared", &["alignment of 48"], header(Target::Sm80, 32), |k, lines| {
        lines.here(line!() + 1);
        let _ = k.shared("odd", 64, 48);
    });
}

#[test]
fn pieces_that_stand_wrong() {
    let lines = Lines::default();
    let mut body = build(header(Target::Sm80, 32), |k| {
        let _ = k.shared("a", 64, 128);
    });
    body.shared[0].offset_bytes = 64;
    body.shared_bytes = 256;
    caught_in("shared", &["not a multiple of its alignment, 128"], body.clone(), &lines);
    body.shared[0].offset_bytes = 256;
    caught_in("shared", &["ends at byte 320"], body, &lines);
}

#[test]
fn ctas_that_no_chip_takes() {
    for threads in [0, 33, 1056] {
        caught("threads", &["32 to 1024"], header(Target::Sm80, threads), |_, _| {});
    }
    caught("threads", &["at most 2048"], Header { min_ctas: 3, ..header(Target::Sm80, 1024) }, |_, _| {});
    caught("threads", &["at most 1536"], Header { min_ctas: 2, ..header(Target::Sm89, 1024) }, |_, _| {});
}

#[test]
fn clusters_that_no_chip_takes() {
    for (cluster, target) in [(0, Target::Sm90), (17, Target::Sm90), (2, Target::Sm80)] {
        caught("cluster", &["clusters have 1 to 16"], Header { cluster, ..header(target, 128) }, |_, _| {});
    }
    clean(Header { cluster: 16, ..header(Target::Sm90, 128) }, |_| {});
}

fn budgets(producer: u32, consumer: u32, consumers: u32) -> impl for<'k> Fn(verdigris_kir::face::Kernel<'k>) {
    move |k| {
        k.warp_roles(&[
            Role { name: "producer", warps: 4, registers: Some(producer), body: &|| {} },
            Role { name: "consumer", warps: 4 * consumers, registers: Some(consumer), body: &|| {} },
        ]);
    }
}

#[test]
fn register_budgets_that_cannot_be_had() {
    let planted = |target, threads, producer, consumer, word: &str| {
        caught("registers", &[word], header(target, threads), |k, lines| {
            lines.here(0);
            budgets(producer, consumer, threads / 128 - 1)(k);
        });
    };
    planted(Target::Sm90a, 384, 48, 240, "setmaxnreg would wait for ever");
    planted(Target::Sm90a, 512, 40, 160, "setmaxnreg would wait for ever");
    // The instruction that would set it is illegal too.
    let faults = crate::faults_of(build(header(Target::Sm90a, 384), |k| budgets(20, 232, 2)(k)));
    assert!(faults.iter().any(|fault| fault.rule == "registers" && fault.message.contains("multiple of 8 from 24 to 256")), "{faults:#?}");
    assert!(faults.iter().all(|fault| fault.rule == "registers" || fault.rule == "illegal"), "{faults:#?}");
    // The instruction that would set it is illegal too.
    let faults = crate::faults_of(build(header(Target::Sm90a, 384), |k| budgets(42, 232, 2)(k)));
    assert!(faults.iter().any(|fault| fault.rule == "registers" && fault.message.contains("multiple of 8 from 24 to 256")), "{faults:#?}");
    assert!(faults.iter().all(|fault| fault.rule == "registers" || fault.rule == "illegal"), "{faults:#?}");
    for (producer, consumer, consumers) in [(24, 240, 2), (40, 232, 2), (56, 256, 1), (32, 160, 3)] {
        clean(header(Target::Sm90a, 128 * (consumers + 1)), budgets(producer, consumer, consumers));
    }
    caught("registers", &["only whole warpgroups"], header(Target::Sm90a, 256), |k, lines| {
        lines.here(line!() + 1);
        k.warp_roles(&[
            Role { name: "producer", warps: 2, registers: Some(40), body: &|| {} },
            Role { name: "consumer", warps: 4, registers: None, body: &|| {} },
        ]);
    });
}

#[test]
fn setmaxnreg_the_wrong_way() {
    use verdigris_kir::ir::Stmt;
    for (increase, registers) in [(true, 40), (false, 48), (false, 240)] {
        let mut body = build(header(Target::Sm90a, 384), budgets(40, 232, 2));
        for stmt in &mut body.body.stmts {
            if let Stmt::Roles { roles, .. } = stmt
                && let Some(Stmt::Inst(inst)) = roles[0].body.stmts.first_mut()
            {
                inst.op = Op::Setmaxnreg { increase, registers };
            }
        }
        caught_in("registers", &["setmaxnreg", "enters with 168"], body, &Lines::default());
    }
}

#[test]
fn roles_beyond_the_cta() {
    caught("roles", &["role b has warps 2..6", "0..4"], header(Target::Sm80, 128), |k, lines| {
        lines.here(line!() + 1);
        k.warp_roles(&[
            Role { name: "a", warps: 2, registers: None, body: &|| {} },
            Role { name: "b", warps: 4, registers: None, body: &|| {} },
        ]);
    });
    caught("roles", &["role none has warps 0..0"], header(Target::Sm80, 128), |k, lines| {
        lines.here(line!() + 1);
        k.warp_roles(&[Role { name: "none", warps: 0, registers: None, body: &|| {} }]);
    });
    caught("roles", &["role inner has warps 0..3", "inside role outer with warps 0..2"], header(Target::Sm80, 128), |k, lines| {
        let inner = || {
            lines.here(line!() + 1);
            k.warp_roles(&[Role { name: "inner", warps: 3, registers: None, body: &|| {} }]);
        };
        k.warp_roles(&[Role { name: "outer", warps: 2, registers: None, body: &inner }]);
    });
    let mut body = build(header(Target::Sm80, 128), |k| {
        k.warp_roles(&[
            Role { name: "a", warps: 2, registers: None, body: &|| {} },
            Role { name: "b", warps: 2, registers: None, body: &|| {} },
        ]);
    });
    if let Some(verdigris_kir::ir::Stmt::Roles { roles, .. }) = body.body.stmts.last_mut() {
        roles[1].first_warp = 1;
    }
    caught_in("roles", &["do not overlap"], body, &Lines::default());
}

#[test]
fn named_barriers_that_do_not_exist() {
    caught("barrier-id", &["named barrier 16"], header(Target::Sm80, 128), |k, lines| {
        lines.here(line!() + 1);
        k.barrier_sync(16u32, 128);
    });
    caught("barrier-id", &["100 threads"], header(Target::Sm80, 128), |k, lines| {
        lines.here(line!() + 1);
        k.barrier_sync(1u32, 100);
    });
    caught("barrier-id", &["256 threads", "CTA of 128"], header(Target::Sm80, 128), |k, lines| {
        lines.here(line!() + 1);
        k.barrier_arrive(1u32, 256);
    });
    let body = build(header(Target::Sm90, 128), |k| k.mbarrier_array("full", 2).arrivals().set(0));
    caught_in("barrier-id", &["full counts 0 arrivals"], body, &Lines::default());
}

fn map(rank: u32, box_dims: &[u32], im2col: bool, swizzle: Swizzle) -> MapDecl {
    MapDecl { ty: MapType::Bf16, rank, box_dims: box_dims.to_vec(), im2col, swizzle, access: Access::Read }
}

#[test]
fn maps_that_the_driver_refuses() {
    for (decl, word) in [
        (map(6, &[8; 6], false, Swizzle::None), "rank 6"),
        (map(2, &[64, 2, 2], false, Swizzle::None), "a box of 3 numbers"),
        (map(2, &[64, 257], false, Swizzle::None), "box extent 257 in dimension 1"),
        // All of the outer extents may be left to the launch, but not one of them.
        (map(3, &[64, 0, 8], false, Swizzle::None), "box extent 0 in dimension 1"),
        (map(3, &[64, 8, 0], false, Swizzle::None), "box extent 0 in dimension 2"),
        (map(2, &[0, 0], false, Swizzle::None), "box extent 0 in dimension 0"),
        (map(2, &[4, 8], false, Swizzle::None), "inner box of 8 bytes, but it must be a multiple of 16"),
        (map(2, &[128, 8], false, Swizzle::B128), "inner box of 256 bytes, but rows of the swizzle have 128"),
        (map(3, &[64, 256, 256], false, Swizzle::B128), "of shared memory"),
        (map(2, &[64, 128], true, Swizzle::B128), "rank 2, but it must be 3 to 5"),
        (map(4, &[64, 1025], true, Swizzle::B128), "box extent 1025"),
    ] {
        caught("map", &[word], header(Target::Sm90, 128), |k, lines| {
            lines.here(line!() + 1);
            let _ = k.tensor_map("a", decl.clone());
        });
    }
    clean(header(Target::Sm90, 128), |k| {
        let _ = k.tensor_map("a", map(2, &[64, 256], false, Swizzle::B128));
        let _ = k.tensor_map("b", map(4, &[64, 1024], true, Swizzle::B128));
        let _ = k.tensor_map("c", map(3, &[64, 0, 0], false, Swizzle::B128));
    });
}

#[test]
fn parameters_read_as_what_they_are_not() {
    use verdigris_kir::ir::Ty;
    caught("params", &["bytes 4..8 of parameter n"], header(Target::Sm80, 32), |k, lines| {
        let _ = k.scalar::<u32>("n");
        let result = k.var_unset::<u32>(None);
        lines.here(line!() + 1);
        k.instruction(Op::ParamLoad { index: 0, offset_bytes: 4, ty: Ty::U32 }, &[Some(result.reg())], &[]);
    });
    caught("params", &["is not a tensor map"], header(Target::Sm90, 32), |k, lines| {
        let _ = k.scalar::<u32>("n");
        let result = k.var_unset::<u64>(None);
        lines.here(line!() + 1);
        k.instruction(Op::ParamAddress { index: 0 }, &[Some(result.reg())], &[]);
    });
    caught("params", &["but a kernel has 32764"], header(Target::Sm80, 32), |k, lines| {
        for _ in 0..4096 {
            lines.here(line!() + 1);
            let _ = k.scalar::<u64>("n");
        }
    });
}

#[test]
fn shared_accesses_that_trap() {
    caught("alignment", &["thread 1 accesses 8 bytes at byte 4"], header(Target::Sm80, 32), |k, lines| {
        let tile = k.shared("tile", 512, 16);
        let at = tile.address() + k.thread() * 4u32;
        lines.here(line!() + 1);
        k.st_shared_vector(at, 0, &[k.thread(), k.thread()]);
    });
    caught("alignment", &["thread 32 accesses 4 bytes at byte 128", "which has 128 bytes"], header(Target::Sm80, 64), |k, lines| {
        lines.also(line!() + 1);
        let tile = k.shared("tile", 128, 16);
        let at = tile.address() + k.thread() * 4u32;
        lines.here(line!() + 1);
        k.st_shared(at, 0, k.thread());
    });
    caught("alignment", &["byte 8", "not a multiple of 16"], header(Target::Sm80, 32), |k, lines| {
        let tile = k.shared("tile", 1024, 16);
        let row = tile.address() + k.lane() * 16u32;
        lines.here(line!() + 1);
        let _ = k.ldmatrix(4, false, row, 8);
    });
    clean(header(Target::Sm80, 64), |k| {
        let tile = k.shared("tile", 128, 16);
        let at = tile.address() + k.thread() * 4u32;
        k.when(k.thread().lt(32u32), || k.st_shared(at, 0, k.thread()));
        k.bar_sync();
        // Lanes 8 and up give no address to a single matrix.
        let row = tile.address() + k.lane() * 16u32;
        let _ = k.ldmatrix(1, false, row, 0);
    });
}

#[test]
fn tiles_that_the_swizzle_does_not_fit() {
    for (swizzle, alignment) in [(Swizzle::B128, 512), (Swizzle::B64, 256), (Swizzle::B32, 128)] {
        caught("alignment", &["tiles of map a need"], header(Target::Sm90, 128), |k, lines| {
            let map = k.tensor_map("a", map(2, &[swizzle.span_bytes() / 2, 8], false, swizzle));
            let tile = k.shared("tile", 1024, alignment);
            let zero = k.constant(0i32);
            lines.here(line!() + 1);
            k.when(k.thread().eq(0u32), || k.tma_store(&map, &[zero, zero], tile.address()));
        });
    }
}

#[test]
fn more_accumulators_than_a_large_cta_has() {
    for n in [208, 224, 256] {
        caught("accumulators", &["C7602"], header(Target::Sm90a, 512), |k, lines| {
            let shape = WgmmaShape {
                n,
                a: MatrixType::Bf16,
                b: MatrixType::Bf16,
                d: MatrixType::F32,
                a_in_registers: false,
                transpose_a: false,
                transpose_b: false,
                negate_a: false,
                negate_b: false,
                saturate: false,
                sparse: false,
            };
            let accumulators: Vec<_> = (0..n / 2).map(|_| k.var_unset::<f32>(None)).collect();
            let descriptor = k.constant(0u64);
            k.wgmma_fence();
            lines.here(line!() + 1);
            k.wgmma(shape, &accumulators, verdigris_kir::face::WgmmaA::Shared(descriptor), descriptor, false);
            k.wgmma_commit();
            k.wgmma_wait(0);
        });
    }
}
