//! Loads, stores, shared memory, CTA barriers, atomics.

use super::*;
use crate::inst::{Atomic, Cache, Class, Order, Scope};

fn input(count: u32) -> Vec<u8> {
    words(&(0..count).map(|i| i * 3 + 1).collect::<Vec<_>>())
}

#[test]
fn copies_and_counts() {
    let body = kernel(128, 1, |k| {
        let x = k.input("x", 4);
        let y = k.output("y", 4);
        let count = k.scalar::<u32>("count");
        let i = k.cta() * 128u32 + k.thread();
        k.when(i.lt(count), || {
            let value = k.ld_global::<u32>(x.at(i, 4), 0);
            k.st_global(y.at(i, 4), 0, value + 1u32);
        });
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add(&input(500));
        memory.add_unwritten(2000);
        memory
    };
    let args = [pointer(0), pointer(1), Arg::Scalar(crate::ir::Ty::U32, 500)];
    passes(&body, 4, &args, memory, |memory, report| {
        assert_eq!(read_words(memory, 1), (0..500).map(|i| i * 3 + 2).collect::<Vec<u32>>());
        assert_eq!(report.total.global_load_bytes, 2000);
        assert_eq!(report.total.unique_store_bytes, 2000);
        assert_eq!(report.total.load_requests, 16);
        // 15 whole warps at 4 sectors, and one with 20 lanes at 3.
        assert_eq!(report.total.load_sectors, 63);
        assert_eq!(report.total.of_class(Class::Memory), 32);
    });
}

#[test]
fn reads_past_the_end() {
    let plant = Plant::default();
    let body = kernel(128, 1, |k| {
        let x = k.input("x", 4);
        let y = k.output("y", 4);
        let i = k.cta() * 128u32 + k.thread();
        plant!(plant);
        let value = k.ld_global::<u32>(x.at(i, 4), 0);
        k.st_global(y.at(i, 4), 0, value);
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add(&input(500));
        memory.add_unwritten(2048);
        memory
    };
    let findings = fails(&body, 4, &[pointer(0), pointer(1)], memory, FindingKind::OutOfBounds, &plant);
    let first = findings.first();
    assert_eq!((first.cta, first.warp, first.lane), ([3, 0, 0], Some(3), Some(20)));
}

/// Each thread writes shared memory and reads its neighbour's.
fn neighbours(barrier: bool, plant: &Plant) -> KernelBody {
    kernel(128, 1, |k| {
        let x = k.input("x", 4);
        let y = k.output("y", 4);
        let tile = k.shared("tile", 512, 16);
        let i = k.thread();
        k.st_shared(tile.address() + i * 4u32, 0, k.ld_global::<u32>(x.at(i, 4), 0));
        if barrier {
            k.bar_sync();
        }
        let other = (i + 33u32) & 127u32;
        plant!(plant);
        let value = k.ld_shared::<u32>(tile.address() + other * 4u32, 0);
        k.st_global(y.at(i, 4), 0, value);
    })
}

fn neighbour_memory() -> Memory {
    let mut memory = Memory::new();
    memory.add(&input(128));
    memory.add_unwritten(512);
    memory
}

#[test]
fn a_barrier_orders_shared_memory() {
    let body = neighbours(true, &Plant::default());
    passes(&body, 1, &[pointer(0), pointer(1)], neighbour_memory, |memory, report| {
        assert_eq!(read_words(memory, 1), (0..128).map(|i| (i + 33) % 128 * 3 + 1).collect::<Vec<u32>>());
        assert_eq!((report.total.shared_requests, report.total.shared_wavefronts, report.total.bank_conflicts), (8, 8, 0));
    });
}

#[test]
fn without_the_barrier_it_is_a_race_or_unwritten() {
    let plant = Plant::default();
    let body = neighbours(false, &plant);
    // Whether the neighbour has written yet depends on the schedule; that it is wrong does not.
    let mut kinds = std::collections::BTreeSet::new();
    for seed in 0..SEEDS {
        let mut memory = neighbour_memory();
        let findings = run_unchecked(&body, 1, &[pointer(0), pointer(1)], &mut memory, &Options::schedule(seed)).expect_err("a race");
        kinds.insert(findings.first().kind);
    }
    assert!(kinds.contains(&FindingKind::Race), "{kinds:?}");
    assert!(kinds.iter().all(|kind| matches!(kind, FindingKind::Race | FindingKind::UnwrittenMemory)), "{kinds:?}");
}

#[test]
fn a_barrier_in_one_side_of_a_branch() {
    let plant = Plant::default();
    let body = kernel(64, 1, |k| {
        let y = k.output("y", 4);
        let i = k.thread();
        k.when(i.lt(40u32), || {
            plant!(plant);
            k.bar_sync();
        });
        k.st_global(y.at(i, 4), 0, i);
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add_unwritten(256);
        memory
    };
    let findings = fails(&body, 1, &[pointer(0)], memory, FindingKind::Divergence, &plant);
    assert_eq!(findings.first().lane, Some(8));
}

#[test]
fn a_barrier_that_half_the_warps_reach() {
    let plant = Plant::default();
    let body = kernel(64, 1, |k| {
        let y = k.output("y", 4);
        let i = k.thread();
        k.when(k.warp().eq(0u32), || {
            plant!(plant);
            k.bar_sync();
        });
        k.st_global(y.at(i, 4), 0, i);
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add_unwritten(256);
        memory
    };
    let findings = fails(&body, 1, &[pointer(0)], memory, FindingKind::Deadlock, &plant);
    assert!(findings.first().message.contains("32 of 64 threads"), "{findings}");
}

#[test]
fn unwritten_registers_and_memory_matter_when_they_are_stored() {
    let plant = Plant::default();
    let body = kernel(32, 1, |k| {
        let y = k.output("y", 4);
        let sum = k.var_unset::<u32>(Some("sum"));
        k.when(k.thread().lt(31u32), || sum.set(1u32));
        plant!(plant);
        k.st_global(y.at(k.thread(), 4), 0, sum.get());
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add_unwritten(128);
        memory.add_unwritten(128);
        memory
    };
    let findings = fails(&body, 1, &[pointer(0)], memory, FindingKind::UnwrittenRegister, &plant);
    assert_eq!(findings.first().lane, Some(31));

    let body = kernel(32, 1, |k| {
        let x = k.input("x", 4);
        let y = k.output("y", 4);
        let value = k.ld_global::<u32>(x.at(k.thread(), 4), 0);
        plant!(plant);
        k.st_global(y.at(k.thread(), 4), 0, value + 1u32);
    });
    fails(&body, 1, &[pointer(0), pointer(1)], memory, FindingKind::UnwrittenMemory, &plant);
}

#[test]
fn ctas_that_write_the_same_word() {
    let plant = Plant::default();
    let body = kernel(32, 1, |k| {
        let y = k.output("y", 4);
        plant!(plant);
        k.st_global(y.at(k.thread(), 4), 0, k.cta());
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add_unwritten(128);
        memory
    };
    fails(&body, 2, &[pointer(0)], memory, FindingKind::Race, &plant);
}

#[test]
fn atomics_do_not_race() {
    let body = kernel(64, 1, |k| {
        let y = k.in_out("y", 4);
        let _ = k.atom_global::<u32>(Atomic::Add, y.address(), 0, k.thread(), Order::Relaxed(Scope::Gpu));
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add(&[0; 4]);
        memory
    };
    passes(&body, 5, &[pointer(0)], memory, |memory, _| assert_eq!(read_words(memory, 0), [5 * 63 * 32]));
}

#[test]
fn a_word_of_which_one_byte_was_written_is_stored() {
    // A weak load is carried out for the whole warp at once, one that is ordered lane by lane.
    for order in [Order::Weak, Order::Relaxed(Scope::Gpu)] {
        let plant = Plant::default();
        let body = kernel(32, 1, |k| {
            let y = k.in_out("y", 4);
            k.when(k.thread().eq(0u32), || {
                k.st_global_byte(y.address(), 1, 5u32);
                let word = k.ld_global_with::<u32>(y.address(), 0, order, Cache::Default);
                plant!(plant);
                k.st_global(y.address(), 64, word);
            });
        });
        let memory = || {
            let mut memory = Memory::new();
            memory.add_unwritten(128);
            memory
        };
        fails(&body, 1, &[pointer(0)], memory, FindingKind::UnwrittenMemory, &plant);
    }
}

#[test]
fn each_of_several_readers_is_remembered() {
    // The writer waits for one reader of two.
    let of = |threads: u32, plant: &Plant| {
        kernel(96, 1, |k| {
            let y = k.output("y", 4);
            let word = k.shared("word", 16, 16).address();
            let (warp, is_first) = (k.warp(), k.lane().eq(0u32));
            k.when(warp.eq(2u32) & is_first, || k.st_shared(word, 0, k.constant(5u32)));
            k.bar_sync();
            k.when(warp.lt(2u32) & is_first, || k.st_global(y.at(warp, 4), 0, k.ld_shared::<u32>(word, 0)));
            k.when(warp.eq(2u32) | warp.lt(threads / 32 - 1), || k.barrier_sync(1u32, threads));
            k.when(warp.eq(2u32) & is_first, || {
                plant!(plant);
                k.st_shared(word, 0, k.constant(6u32));
            });
        })
    };
    let memory = || {
        let mut memory = Memory::new();
        memory.add_unwritten(128);
        memory
    };
    passes(&of(96, &Plant::default()), 1, &[pointer(0)], memory, |memory, _| assert_eq!(read_words(memory, 0)[..2], [5, 5]));
    let plant = Plant::default();
    fails(&of(64, &plant), 1, &[pointer(0)], memory, FindingKind::Race, &plant);
}

#[test]
fn atomics_of_the_ctas_scope_race_among_ctas() {
    let plant = Plant::default();
    let body = kernel(64, 1, |k| {
        let y = k.in_out("y", 4);
        plant!(plant);
        let _ = k.atom_global::<u32>(Atomic::Add, y.address(), 0, k.thread(), Order::Relaxed(Scope::Cta));
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add(&[0; 4]);
        memory
    };
    passes(&body, 1, &[pointer(0)], memory, |memory, _| assert_eq!(read_words(memory, 0), [63 * 32]));
    fails(&body, 2, &[pointer(0)], memory, FindingKind::Race, &plant);
}

/// The CTA that comes last sums what all wrote: release, counter, acquire.
fn last_arriver(order: Order, plant: &Plant) -> KernelBody {
    kernel(32, 1, |k| {
        let parts = k.in_out("parts", 4);
        let count = k.in_out("count", 4);
        let y = k.output("y", 4);
        let lane = k.lane();
        k.st_global(parts.at(k.cta() * 32u32 + lane, 4), 0, lane + k.cta());
        k.warp_sync();
        let mine = k.var::<u32>(0u32);
        k.when(lane.eq(0u32), || {
            mine.set(k.atom_global::<u32>(Atomic::Add, count.address(), 0, 1u32, order));
        });
        let came = k.shfl_idx(mine.get(), 0u32);
        k.warp_sync();
        k.when(came.eq(2u32), || {
            let sum = k.var::<u32>(0u32);
            k.range(3u32, |part| {
                plant!(plant);
                sum.set(sum.get() + k.ld_global::<u32>(parts.at(part * 32u32 + lane, 4), 0));
            });
            k.st_global(y.at(lane, 4), 0, sum.get());
        });
    })
}

fn last_arriver_memory() -> Memory {
    let mut memory = Memory::new();
    memory.add_unwritten(384);
    memory.add(&[0; 4]);
    memory.add_unwritten(128);
    memory
}

#[test]
fn release_and_acquire_order_ctas() {
    let body = last_arriver(Order::AcqRel(Scope::Gpu), &Plant::default());
    let args = [pointer(0), pointer(1), pointer(2)];
    passes(&body, 3, &args, last_arriver_memory, |memory, _| {
        assert_eq!(read_words(memory, 2), (0..32).map(|lane| 3 * lane + 3).collect::<Vec<u32>>());
    });
}

#[test]
fn a_relaxed_counter_orders_nothing() {
    let plant = Plant::default();
    let body = last_arriver(Order::Relaxed(Scope::Gpu), &plant);
    fails(&body, 3, &[pointer(0), pointer(1), pointer(2)], last_arriver_memory, FindingKind::Race, &plant);
}

#[test]
fn non_coherent_loads_of_what_the_launch_writes() {
    let plant = Plant::default();
    let body = kernel(32, 1, |k| {
        let y = k.in_out("y", 4);
        let at = y.at(k.thread(), 4);
        k.st_global(at, 0, k.thread());
        plant!(plant);
        let value = k.ld_global_with::<u32>(at, 0, Order::Weak, Cache::NonCoherent);
        k.st_global(at, 128, value);
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add_unwritten(256);
        memory
    };
    fails(&body, 1, &[pointer(0)], memory, FindingKind::NonCoherent, &plant);
}

#[test]
fn bf16_elements_in_place_do_not_race() {
    let body = kernel(64, 1, |k| {
        let y = k.in_out("y", 4);
        let at = y.at(k.thread(), 2);
        let value = k.ld_global::<u16>(at, 0);
        k.st_global(at, 0, value + 1u16);
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add(&[7; 128]);
        memory
    };
    passes(&body, 1, &[pointer(0)], memory, |memory, _| {
        assert!(memory.to_vec(0).chunks(2).all(|pair| pair == [8, 7]));
    });
}

#[test]
fn a_loop_that_never_ends_is_not_a_deadlock() {
    let plant = Plant::default();
    let body = kernel(32, 1, |k| {
        let y = k.in_out("y", 4);
        plant!(plant);
        k.while_(|| k.ld_global_with::<u32>(y.address(), 0, Order::Acquire(Scope::Gpu), Cache::Default).eq(0u32), || {});
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add(&[0; 4]);
        memory
    };
    fails(&body, 1, &[pointer(0)], memory, FindingKind::Timeout, &plant);
}

#[test]
fn misaligned() {
    let plant = Plant::default();
    let body = kernel(32, 1, |k| {
        let y = k.in_out("y", 4);
        plant!(plant);
        let value = k.ld_global::<u32>(y.at(k.thread(), 4), 2);
        k.st_global(y.at(k.thread(), 4), 0, value);
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add(&[0; 256]);
        memory
    };
    fails(&body, 1, &[pointer(0)], memory, FindingKind::Misaligned, &plant);
}

#[test]
fn a_product_beyond_32_bits_feeds_an_address() {
    let plant = Plant::default();
    let body = kernel(32, 1, |k| {
        let y = k.in_out("y", 4);
        let rows = k.scalar::<u32>("rows");
        let index = k.thread() * rows;
        plant!(plant);
        k.st_global(y.at(index, 4), 0, k.thread());
    });
    let memory = || {
        let mut memory = Memory::new();
        memory.add_unwritten(1 << 33);
        memory
    };
    fails(&body, 1, &[pointer(0), Arg::Scalar(crate::ir::Ty::U32, 0x4000_0001)], memory, FindingKind::AddressWrap, &plant);
}

/// One warp with 128 bytes of shared memory and 128 bytes of output.
fn small(describe: impl for<'k> FnOnce(Kernel<'k>, crate::face::SharedPiece<'k>, crate::face::Pointer<'k>)) -> KernelBody {
    kernel(32, 1, |k| {
        let y = k.in_out("y", 4);
        let tile = k.shared("tile", 128, 16);
        describe(k, tile, y);
    })
}

fn unwritten_output() -> Memory {
    let mut memory = Memory::new();
    memory.add_unwritten(128);
    memory
}

#[test]
fn faults_of_one_warp() {
    let plant = Plant::default();
    let at = &plant;
    let bodies = [
        (
            FindingKind::OutOfBounds,
            small(|k, tile, _| {
                plant!(at);
                k.st_shared(tile.address() + k.lane() * 4u32, 4, k.lane());
            }),
        ),
        (
            FindingKind::Race,
            small(|k, tile, _| {
                plant!(at);
                k.st_shared(tile.address(), 0, k.lane());
            }),
        ),
        (
            FindingKind::Trap,
            small(|k, _, _| {
                k.when(k.lane().eq(7u32), || {
                    plant!(at);
                    k.trap();
                });
            }),
        ),
        (
            FindingKind::UnwrittenMemory,
            small(|k, _, y| {
                plant!(at);
                let _ = k.atom_global::<u32>(Atomic::Add, y.address(), 0, 1u32, Order::Relaxed(Scope::Gpu));
            }),
        ),
        (
            FindingKind::Divergence,
            small(|k, _, y| {
                k.when(k.lane().lt(9u32), || {
                    plant!(at);
                    let value = k.uniform(k.lane());
                    k.st_global(y.at(k.lane(), 4), 0, value);
                });
            }),
        ),
        (
            FindingKind::UnwrittenMemory,
            small(|k, tile, _| {
                let value = k.ld_shared::<u32>(tile.address(), 0);
                plant!(at);
                k.when(value.eq(0u32), || k.warp_sync());
            }),
        ),
    ];
    // Each body notes its own line while it is built, so the plant holds the last; lines are told apart by kind alone here.
    for (kind, body) in bodies {
        for seed in 0..SEEDS {
            let findings =
                run_unchecked(&body, 1, &[pointer(0)], &mut unwritten_output(), &Options::schedule(seed)).expect_err("a finding");
            assert_eq!(findings.first().kind, kind, "{findings}");
        }
    }
    assert!(plant.0.get() > 0);
}

#[test]
fn exchange_through_shared_memory_needs_a_warp_barrier() {
    for sync in [true, false] {
        let plant = Plant::default();
        let body = small(|k, tile, y| {
            k.st_shared(tile.address() + k.lane() * 4u32, 0, k.lane());
            if sync {
                k.warp_sync();
            }
            plant!(plant);
            let value = k.ld_shared::<u32>(tile.address() + (k.lane() ^ 1u32) * 4u32, 0);
            k.st_global(y.at(k.lane(), 4), 0, value);
        });
        if sync {
            passes(&body, 1, &[pointer(0)], unwritten_output, |memory, _| {
                assert_eq!(read_words(memory, 0), (0..32).map(|lane| lane ^ 1).collect::<Vec<u32>>());
            });
        } else {
            fails(&body, 1, &[pointer(0)], unwritten_output, FindingKind::Race, &plant);
        }
    }
}

#[test]
fn of_two_warps_that_write_halves_of_a_word_each_is_remembered() {
    // Warps 0 and 1 write a half of each word; warp 2 has met the one of `met` alone, and reads the word or writes it.
    for (met, writes) in [(0u32, false), (1, false), (0, true), (1, true)] {
        let plant = Plant::default();
        let describe = |both: bool| {
            kernel(96, 1, |k| {
                let y = k.output("y", 4);
                let z = k.output("z", 4);
                let address = y.at(k.lane(), 4);
                let warp = k.uniform(k.warp());
                k.when(warp.lt(2), || {
                    let half = (warp + 1).low16();
                    k.st_global(address + (warp * 2).widen(), 0, half);
                });
                if both {
                    k.bar_sync();
                } else {
                    k.when(warp.ne(1 - met), || k.barrier_sync(1u32, 64));
                }
                k.when(warp.eq(2), || {
                    if writes {
                        plant!(plant);
                        k.st_global(address, 0, k.lane());
                    } else {
                        plant!(plant);
                        let word = k.ld_global::<u32>(address, 0);
                        k.st_global(z.at(k.lane(), 4), 0, word);
                    }
                });
            })
        };
        let memory = || {
            let mut memory = Memory::new();
            memory.add(&[0; 128]);
            memory.add_unwritten(128);
            memory
        };
        let args = [pointer(0), pointer(1)];
        passes(&describe(true), 1, &args, memory, |memory, _| {
            let want: Vec<u32> = if writes { (0..32).collect() } else { vec![0x0002_0001; 32] };
            assert_eq!(read_words(memory, usize::from(!writes)), want);
        });
        let findings = fails(&describe(false), 1, &args, memory, FindingKind::Race, &plant);
        assert!(findings.first().message.contains("nothing orders the two"), "{findings}");
    }
}
