//! Accesses: races, bounds, alignment, unwritten memory and registers, non-coherent loads, wrapped addresses.

use crate::{Planted, caught, caught_sometimes, cta};
use verdigris_kir::face::Val;
use verdigris_kir::inst::{Atomic, Cache, Order, Scope};
use verdigris_kir::interp::FindingKind;

const GPU: Scope = Scope::Gpu;

// ---- race ----------------------------------------------------------------------------------------------------------

#[test]
fn ctas_write_the_same_words() {
    caught(FindingKind::Race, &["nothing orders the two", "either value may stay"], cta(32).ctas(3), |p, lines| {
        let k = p.k;
        let place = k.select(p.fault.ne(0u32), 0u32, k.cta() * 32u32);
        lines.here(line!() + 2);
        lines.also(line!() + 1);
        k.st_global(p.y.at(place + k.thread(), 4), 0, k.cta());
    });
}

#[test]
fn a_barrier_between_writer_and_reader_is_skipped() {
    caught(FindingKind::Race, &["byte", "of shared tile"], cta(128), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 512, 16);
        let i = p.index();
        k.st_shared(tile.address() + i * 4u32, 0, k.constant(0u32));
        k.bar_sync();
        lines.also(line!() + 1);
        k.st_shared(tile.address() + i * 4u32, 0, i);
        p.unless(|| k.bar_sync());
        lines.here(line!() + 1);
        let value = k.ld_shared::<u32>(tile.address() + ((i + 33u32) & 127u32) * 4u32, 0);
        k.st_global(p.y.at(i, 4), 0, value);
    });
}

/// Stores a word on behalf of its caller, through another function that does.
#[track_caller]
fn store_through_two<'k>(p: Planted<'k>, at: Val<'k, u32>) {
    #[track_caller]
    fn store<'k>(p: Planted<'k>, at: Val<'k, u32>) {
        p.k.scope(std::panic::Location::caller(), || p.k.st_shared(at, 0, p.k.thread()));
    }
    p.k.scope(std::panic::Location::caller(), || store(p, at));
}

#[test]
fn both_parties_of_a_race_are_named_with_the_functions_they_went_through() {
    let finding = caught(FindingKind::Race, &["(in ", "either value may stay"], cta(64), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 16, 16);
        let far = (k.constant(1u32) - p.fault) * 4u32;
        lines.here(line!() + 1);
        k.when(p.index().eq(0u32), || store_through_two(p, tile.address()));
        lines.also(line!() + 1);
        k.when(p.index().eq(32u32), || store_through_two(p, tile.address() + far));
    });
    assert_eq!((finding.at.len(), finding.second.len()), (3, 3), "{finding}");
    let (text, ways) = (finding.to_string(), [&finding.at, &finding.second]);
    assert!(ways.iter().all(|way| way[1..].iter().all(|line| text.contains(&format!("in {line}")))), "{finding}");
    assert!(finding.message.contains(&format!("at {} (in {})", finding.second[0], finding.second[2])), "{finding}");
}

#[test]
fn what_others_still_read_is_overwritten() {
    caught(FindingKind::Race, &["of shared tile"], cta(64), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 256, 16);
        let i = p.index();
        k.st_shared(tile.address() + i * 4u32, 0, i);
        k.bar_sync();
        lines.also(line!() + 1);
        let value = k.ld_shared::<u32>(tile.address() + (i ^ 32u32) * 4u32, 0);
        p.unless(|| k.bar_sync());
        lines.here(line!() + 1);
        k.st_shared(tile.address() + i * 4u32, 0, value + 1u32);
    });
}

#[test]
fn lanes_exchange_without_a_warp_barrier() {
    let finding = caught(FindingKind::Race, &["lane"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 16);
        let i = p.index();
        lines.also(line!() + 1);
        k.st_shared(tile.address() + i * 4u32, 0, i);
        p.unless(|| k.warp_sync());
        lines.here(line!() + 1);
        let value = k.ld_shared::<u32>(tile.address() + (i ^ 1u32) * 4u32, 0);
        k.st_global(p.y.at(i, 4), 0, value);
    });
    assert_eq!((finding.warp, finding.lane), (Some(0), Some(0)));
}

#[test]
fn the_last_cta_counts_with_a_relaxed_counter() {
    caught(FindingKind::Race, &["of buffer 1"], cta(32).ctas(3), |p, lines| {
        let k = p.k;
        let (lane, cta) = (k.lane(), k.cta());
        let mine = k.var(0u32);
        lines.also(line!() + 1);
        k.st_global(p.y.at(cta * 32u32 + lane, 4), 4096, lane);
        k.warp_sync();
        k.when(lane.eq(0u32), || {
            // Word 0 of the input holds zero and nobody else reads it.
            let counter = p.x.address();
            k.when_else(
                p.fault.ne(0u32),
                || mine.set(k.atom_global::<u32>(Atomic::Add, counter, 0, 1u32, Order::Relaxed(GPU))),
                || mine.set(k.atom_global::<u32>(Atomic::Add, counter, 0, 1u32, Order::AcqRel(GPU))),
            );
        });
        k.warp_sync();
        let came = k.shfl_idx(mine.get(), 0u32);
        k.when(came.eq(2u32), || {
            k.range(3u32, |part| {
                lines.here(line!() + 1);
                let value = k.ld_global::<u32>(p.y.at(part * 32u32 + lane, 4), 4096);
                k.st_global(p.y.at(part * 32u32 + lane, 4), 8192, value);
            });
        });
    });
}

// ---- bounds --------------------------------------------------------------------------------------------------------

#[test]
fn a_load_past_the_end() {
    let finding = caught(FindingKind::OutOfBounds, &["buffer 0", "16384 bytes"], cta(64), |p, lines| {
        let k = p.k;
        let i = k.thread() + p.fault * (crate::INPUT_WORDS - 40);
        lines.here(line!() + 1);
        let value = k.ld_global::<u32>(p.x.at(i, 4), 0);
        k.st_global(p.y.at(k.thread(), 4), 0, value);
    });
    assert_eq!((finding.warp, finding.lane), (Some(1), Some(8)));
}

#[test]
fn a_store_in_front_of_the_start() {
    caught(FindingKind::OutOfBounds, &["before the start of buffer 1"], cta(32), |p, lines| {
        let k = p.k;
        let back = p.fault.widen() * 16u64;
        let at = p.y.at(k.thread(), 4) - back;
        lines.here(line!() + 1);
        k.st_global(at, 0, k.thread());
    });
}

#[test]
fn shared_memory_past_its_end() {
    caught(FindingKind::OutOfBounds, &["of the CTA's shared memory"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 16);
        let at = tile.address() + (k.thread() + p.fault) * 4u32;
        lines.here(line!() + 1);
        k.st_shared(at, 0, k.thread());
    });
}

#[test]
fn a_vector_that_straddles_the_end() {
    caught(FindingKind::OutOfBounds, &["16 bytes are loaded"], cta(32), |p, lines| {
        let k = p.k;
        let at = p.x.at((k.thread() + p.fault * (crate::INPUT_WORDS / 4 - 31)) * 4u32, 4);
        lines.here(line!() + 1);
        let values = k.ld_global_vector::<u32>(at, 0, 4, Cache::Default);
        k.st_global(p.y.at(k.thread(), 4), 0, values[3]);
    });
}

// ---- alignment -----------------------------------------------------------------------------------------------------

#[test]
fn words_at_odd_halves() {
    caught(FindingKind::Misaligned, &["4 bytes are loaded", "not a multiple of 4"], cta(32), |p, lines| {
        let k = p.k;
        let at = p.x.at(k.thread(), 4) + (p.fault << 1).widen();
        lines.here(line!() + 1);
        let value = k.ld_global::<u32>(at, 0);
        k.st_global(p.y.at(k.thread(), 4), 0, value);
    });
}

#[test]
fn shared_vectors_at_odd_words() {
    caught(FindingKind::Misaligned, &["16 bytes are stored"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 1024, 16);
        let at = tile.address() + k.thread() * 16u32 + p.fault * 4u32;
        let i = k.thread() + 0u32;
        lines.here(line!() + 1);
        k.st_shared_vector(at, 0, &[i, i, i, i]);
    });
}

#[test]
fn cp_async_from_an_odd_place() {
    caught(FindingKind::Misaligned, &["cp.async of 16 bytes"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 1024, 16);
        let from = p.x.at(k.thread() * 4u32 + p.fault, 4);
        lines.here(line!() + 1);
        k.cp_async(tile.address() + k.thread() * 16u32, 0, from, 0, 16, 16u32);
        k.cp_async_commit();
        k.cp_async_wait(0);
    });
}

#[test]
fn a_matrix_row_at_an_odd_place() {
    caught(FindingKind::Misaligned, &["not a multiple of 16"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 1024, 16);
        let i = p.index();
        k.st_shared_vector(tile.address() + i * 16u32, 0, &[i, i, i, i]);
        k.warp_sync();
        let row = tile.address() + (i & 7u32) * 16u32 + p.fault * 8u32;
        lines.here(line!() + 1);
        let values = k.ldmatrix(1, false, row, 0);
        k.st_global(p.y.at(k.thread(), 4), 0, values[0]);
    });
}

// ---- unwritten memory ----------------------------------------------------------------------------------------------

/// The input, or the output that nothing has written.
fn source<'k>(p: Planted<'k>) -> verdigris_kir::face::Val<'k, u64> {
    let unwritten = p.fault.ne(0u32);
    let k = p.k;
    let from = k.var(p.x.at(k.thread(), 4));
    k.when(unwritten, || from.set(p.y.at(k.thread(), 4)));
    from.get()
}

#[test]
fn unwritten_memory_is_stored() {
    caught(FindingKind::UnwrittenMemory, &["memory that nothing wrote", "is stored"], cta(32), |p, lines| {
        let k = p.k;
        lines.also(line!() + 1);
        let value = k.ld_global::<u32>(source(p), 0);
        lines.here(line!() + 1);
        k.st_global(p.y.at(k.thread(), 4), 4096, value + 1u32);
    });
}

#[test]
fn unwritten_memory_decides_a_branch() {
    caught(FindingKind::UnwrittenMemory, &["decides where lanes go"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 16);
        p.unless(|| k.st_shared(tile.address() + k.thread() * 4u32, 0, k.thread()));
        let flag = k.ld_shared::<u32>(tile.address() + k.thread() * 4u32, 0);
        lines.here(line!() + 1);
        k.when(flag.gt(7u32), || k.st_global(p.y.at(k.thread(), 4), 0, k.thread()));
    });
}

#[test]
fn unwritten_memory_is_an_address() {
    caught(FindingKind::UnwrittenMemory, &["is an address"], cta(32), |p, lines| {
        let k = p.k;
        let place = k.ld_global::<u32>(source(p), 0);
        lines.here(line!() + 1);
        k.st_global(p.y.at(place, 4), 8192, k.thread());
    });
}

#[test]
fn unwritten_memory_is_added_to() {
    caught(FindingKind::UnwrittenMemory, &[], cta(32), |p, lines| {
        let k = p.k;
        p.unless(|| k.when(k.thread().eq(0u32), || k.st_global(p.y.address(), 0, k.constant(0u32))));
        k.warp_sync();
        lines.here(line!() + 1);
        let _ = k.atom_global::<u32>(Atomic::Add, p.y.address(), 0, 1u32, Order::Relaxed(GPU));
    });
}

#[test]
fn unwritten_shared_memory_is_copied_out() {
    caught(FindingKind::UnwrittenMemory, &["is stored to global memory by this copy"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 128, 128);
        let last = k.select(p.fault.ne(0u32), 31u32, 32u32);
        k.when(p.index().lt(last), || k.st_shared(tile.address() + p.index() * 4u32, 0, k.thread()));
        k.fence_proxy_async();
        k.warp_sync();
        k.when(k.thread().eq(0u32), || {
            lines.here(line!() + 1);
            k.bulk_store(p.y.address(), tile.address(), 128u32);
            k.bulk_commit();
            k.bulk_wait(0);
        });
    });
}

// ---- unwritten registers -------------------------------------------------------------------------------------------

#[test]
fn an_unwritten_register_is_stored() {
    caught(FindingKind::UnwrittenRegister, &["sum (r", "holds nothing in this lane"], cta(32), |p, lines| {
        let k = p.k;
        lines.also(line!() + 1);
        let sum = k.var_unset::<u32>(Some("sum"));
        p.unless(|| sum.set(3u32));
        lines.here(line!() + 1);
        k.st_global(p.y.at(k.thread(), 4), 0, sum.get());
    });
}

#[test]
fn an_unwritten_register_is_an_address() {
    let finding = caught(FindingKind::UnwrittenRegister, &["place (r", "is an address"], cta(32), |p, lines| {
        let k = p.k;
        let place = k.var_unset::<u32>(Some("place"));
        let lanes = k.select(p.fault.ne(0u32), 5u32, 32u32);
        k.when(p.index().lt(lanes), || place.set(k.thread()));
        let tile = k.shared("tile", 128, 16);
        let at = k.var_named("place", tile.address());
        at.set(tile.address() + place.get() * 4u32);
        lines.here(line!() + 1);
        k.st_shared(at.get(), 0, k.thread());
    });
    assert_eq!(finding.lane, Some(5));
}

#[test]
fn an_unwritten_register_is_combined_over_the_warp() {
    caught(FindingKind::UnwrittenRegister, &["is combined over the warp"], cta(32), |p, lines| {
        let k = p.k;
        let value = k.var_unset::<u32>(Some("value"));
        let lanes = k.select(p.fault.ne(0u32), 31u32, 32u32);
        k.when(p.index().lt(lanes), || value.set(k.thread()));
        lines.here(line!() + 1);
        let all = k.redux::<u32>(verdigris_kir::inst::Redux::Max, value.get());
        k.st_global(p.y.at(k.thread(), 4), 0, all);
    });
}

#[test]
fn an_unwritten_register_ends_a_loop() {
    caught(FindingKind::UnwrittenRegister, &["decides where lanes go"], cta(32), |p, lines| {
        let k = p.k;
        let turns = k.var_unset::<u32>(Some("turns"));
        p.unless(|| turns.set(2u32));
        let turn = k.var(0u32);
        lines.here(line!() + 1);
        k.while_(|| turn.get().lt(turns.get()), || turn.set(turn.get() + 1u32));
    });
}

// ---- non-coherent loads --------------------------------------------------------------------------------------------

#[test]
fn a_non_coherent_load_of_what_the_thread_wrote() {
    caught(FindingKind::NonCoherent, &["non-coherent load", "stale"], cta(32), |p, lines| {
        let k = p.k;
        lines.also(line!() + 1);
        k.st_global(p.y.at(k.thread(), 4), 0, k.thread());
        let from = source(p);
        lines.here(line!() + 1);
        let value = k.ld_global_with::<u32>(from, 0, Order::Weak, Cache::NonCoherent);
        k.st_global(p.y.at(k.thread(), 4), 4096, value);
    });
}

#[test]
fn a_store_over_what_was_loaded_non_coherently() {
    caught(FindingKind::NonCoherent, &["non-coherent load"], cta(64), |p, lines| {
        let k = p.k;
        lines.also(line!() + 1);
        let value = k.ld_global_with::<u32>(p.x.at(k.thread(), 4), 0, Order::Weak, Cache::NonCoherent);
        let to = k.var(p.y.at(k.thread(), 4));
        p.when(|| to.set(p.x.at(k.thread(), 4)));
        lines.here(line!() + 1);
        k.st_global(to.get(), 0, value + 1u32);
    });
}

#[test]
fn a_non_coherent_vector_of_what_another_warp_wrote() {
    caught(FindingKind::NonCoherent, &["by lane"], cta(64), |p, lines| {
        let k = p.k;
        lines.also(line!() + 1);
        k.st_global(p.y.at(k.thread() ^ 32u32, 4), 0, k.thread());
        k.bar_sync();
        let from = k.var(p.x.at(k.thread() & 62u32, 4));
        p.when(|| from.set(p.y.at(k.thread() & 62u32, 4)));
        lines.here(line!() + 1);
        let value = k.ld_global_vector::<u32>(from.get(), 0, 2, Cache::NonCoherent);
        k.st_global(p.y.at(k.thread(), 4), 4096, value[1]);
    });
}

// ---- wrapped addresses ---------------------------------------------------------------------------------------------

#[test]
fn a_row_times_a_pitch_beyond_32_bits() {
    caught(FindingKind::AddressWrap, &["32-bit product"], cta(32), |p, lines| {
        let k = p.k;
        let pitch = k.select(p.fault.ne(0u32), 0x0FFF_FFFFu32, 3u32);
        let index = (k.thread() + 0u32) * pitch;
        lines.here(line!() + 1);
        k.st_global(p.y.at(index, 4), 0, k.thread());
    });
}

#[test]
fn a_load_behind_a_multiply_add_beyond_32_bits() {
    caught(FindingKind::AddressWrap, &["multiply into 64 bits"], cta(32), |p, lines| {
        let k = p.k;
        let pitch = k.select(p.fault.ne(0u32), 0x2000_0000u32, 8u32);
        let index = k.fma(k.thread(), pitch, 1u32);
        lines.here(line!() + 1);
        let value = k.ld_global::<u32>(p.x.at(index, 4), 0);
        k.st_global(p.y.at(k.thread(), 4), 0, value);
    });
}

#[test]
fn a_wrapped_byte_offset_widened_too_late() {
    caught(FindingKind::AddressWrap, &[], cta(32), |p, lines| {
        let k = p.k;
        let bytes = k.select(p.fault.ne(0u32), 0x1000_0000u32, 16u32);
        let offset = (k.thread() * bytes).widen();
        let at = p.y.moved(offset).address();
        lines.here(line!() + 1);
        k.st_global(at, 0, k.thread());
    });
}

#[test]
fn a_race_that_only_some_schedules_reach() {
    // The reader looks only where it finds the flag up.
    caught_sometimes(&[FindingKind::Race], &["nothing orders the two"], cta(64), |p, lines| {
        let k = p.k;
        let (flag, data) = (p.y.at(0u32, 4), p.y.at(64u32, 4));
        k.when(k.thread().eq(0u32), || k.st_global_with(flag, 0, k.constant(0u32), Order::Relaxed(GPU), Cache::Default));
        k.bar_sync();
        k.when(k.thread().eq(0u32), || {
            lines.also(line!() + 1);
            k.st_global(data, 0, k.constant(7u32));
            k.when_else(
                p.fault.ne(0u32),
                || k.st_global_with(flag, 0, k.constant(1u32), Order::Relaxed(GPU), Cache::Default),
                || k.st_global_with(flag, 0, k.constant(1u32), Order::Release(GPU), Cache::Default),
            );
        });
        k.when(k.thread().eq(32u32), || {
            let up = k.ld_global_with::<u32>(flag, 0, Order::Acquire(GPU), Cache::Default);
            k.when(up.eq(1u32), || {
                lines.here(line!() + 1);
                let value = k.ld_global::<u32>(data, 0);
                k.st_global(p.y.at(128u32, 4), 0, value);
            });
        });
    });
}
