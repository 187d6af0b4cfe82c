use crate::{caught, clean, header};
use verdigris_kir::face::{Kernel, Pointer, Val};
use verdigris_kir::inst::{Atomic, Order, Scope};
use verdigris_kir::ir::{Access, MapDecl, MapType, Swizzle, Target};

/// What the planted kernels read: rows of `pitch` elements, `pitch` being a parameter of 64 bits.
fn rows(k: Kernel<'_>) -> (Pointer<'_>, Val<'_, u64>) {
    (k.in_out("x", 16), k.scalar::<u64>("pitch"))
}

#[test]
fn a_row_times_the_low_half_of_a_pitch() {
    caught("cut", &["parameter pitch", "multiply into 64 bits"], header(Target::Sm80, 128), |k, lines| {
        let (x, pitch) = rows(k);
        let low = pitch.low32();
        lines.here(line!() + 1);
        let offset = k.cta() * low;
        let at = x.moved(offset.widen());
        lines.also(line!() + 1);
        k.st_global(at.at(k.thread(), 4), 0, k.thread());
    });
}

#[test]
fn elements_made_bytes_in_32_bits() {
    // A multiplication by a constant, and a shift.
    for shifted in [false, true] {
        caught("cut", &["32-bit product"], header(Target::Sm80, 128), |k, lines| {
            let (x, first) = rows(k);
            let low = first.low32();
            lines.here(line!() + 1);
            let bytes = if shifted { low << 2 } else { low * 4u32 };
            lines.also(line!() + 1);
            k.st_global(x.moved(bytes.widen()).at(k.thread(), 4), 0, k.thread());
        });
    }
}

#[test]
fn the_low_half_alone() {
    caught("cut", &["only the low half of parameter pitch", "keep the 64 bits"], header(Target::Sm80, 128), |k, lines| {
        let (x, pitch) = rows(k);
        lines.here(line!() + 1);
        let low = pitch.low32();
        let at = x.moved(low.mul_wide(k.cta()));
        lines.also(line!() + 1);
        k.st_global(at.at(k.thread(), 4), 0, k.thread());
    });
}

#[test]
fn a_multiply_add_in_a_loop() {
    caught("cut", &["parameter pitch"], header(Target::Sm80, 128), |k, lines| {
        let (x, pitch) = rows(k);
        let index = k.var(k.thread());
        k.range(k.scalar::<u32>("rows"), |row| {
            lines.also(line!() + 1);
            let value = k.ld_global::<u32>(x.at(index.get(), 4), 0);
            k.st_shared(k.shared("kept", 512, 16).address() + k.thread() * 4, 0, value);
            lines.here(line!() + 1);
            index.set(k.fma(row, pitch.low32(), k.thread()));
        });
    });
}

#[test]
fn a_number_of_64_bits_cut_behind_its_product() {
    caught("cut", &["only the low half of parameter pitch"], header(Target::Sm80, 128), |k, lines| {
        let (x, pitch) = rows(k);
        lines.here(line!() + 1);
        let index = (k.cta().widen() * pitch + k.thread().widen()).low32();
        k.when(k.thread().lt(k.scalar::<u32>("columns")), || {
            lines.also(line!() + 1);
            k.red_global(Atomic::Add, x.at(index, 4), 0, &[k.constant(1u32)], Order::Relaxed(Scope::Gpu));
        });
    });
}

#[test]
fn a_cut_behind_a_copy_by_threads() {
    caught("cut", &["parameter pitch"], header(Target::Sm80, 128), |k, lines| {
        let (x, pitch) = rows(k);
        let piece = k.shared("piece", 2048, 16);
        lines.here(line!() + 1);
        let offset = pitch.low32() * k.cta();
        lines.also(line!() + 1);
        k.cp_async(piece.address() + k.thread() * 16, 0, x.moved(offset.widen()).at(k.thread(), 16), 0, 16, 16u32);
        k.cp_async_commit();
        k.cp_async_wait(0);
    });
}

#[test]
fn a_number_that_is_kept_whole_passes() {
    clean(header(Target::Sm80, 128), |k| {
        let (x, pitch) = rows(k);
        let at = x.moved(k.cta().widen() * pitch);
        k.st_global(at.at(k.thread(), 4), 0, k.thread());
    });
}

#[test]
fn a_low_half_that_reaches_no_address_passes() {
    clean(header(Target::Sm80, 128), |k| {
        let (x, first) = rows(k);
        // The number itself, modulo 2^32.
        k.st_global(x.at(k.thread(), 4), 0, first.low32() * 3 + k.thread());
    });
}

#[test]
fn bits_of_a_number_pass() {
    clean(header(Target::Sm80, 128), |k| {
        let (x, first) = rows(k);
        // What lies before the next 16 bytes.
        let gap = (first.low32() * 4) & 15;
        k.st_global(x.at(gap + k.thread(), 4), 0, k.thread());
    });
}

#[test]
fn two_numbers_in_one_parameter_pass() {
    for halves in [false, true] {
        clean(header(Target::Sm80, 128), |k| {
            let (x, both) = rows(k);
            let (rows, columns) = if halves { k.split32(both) } else { (both.low32(), (both >> 32).low32()) };
            k.st_global(x.at(k.cta() * rows + columns, 4), 0, k.thread());
        });
    }
}

#[test]
fn a_number_that_a_condition_may_bound_passes() {
    // By a number of the launch's own, by the number itself, by the end of the kernel, by a guard.
    for by in 0..4 {
        clean(header(Target::Sm80, 128), |k| {
            let (x, pitch) = rows(k);
            let near = k.scalar::<u32>("near").ne(0u32);
            let store = || k.st_global(x.moved((k.cta() * pitch.low32()).widen()).at(k.thread(), 4), 0, k.thread());
            let far = || k.st_global(x.moved(k.cta().widen() * pitch).at(k.thread(), 4), 0, k.thread());
            match by {
                0 => k.when_else(near, store, far),
                1 => k.when_else((pitch * k.cta().widen()).lt(k.constant(1u64 << 32)), store, far),
                2 => {
                    k.stop_when(!near);
                    store();
                }
                _ => {
                    let offset = k.select(near, (k.cta() * pitch.low32()).widen(), k.cta().widen() * pitch);
                    k.st_global(x.moved(offset).at(k.thread(), 4), 0, k.thread());
                }
            }
        });
    }
}

#[test]
fn the_distance_between_two_numbers_passes() {
    clean(header(Target::Sm80, 128), |k| {
        let (x, first) = rows(k);
        let count = (k.scalar::<u64>("end") - first).low32();
        k.st_global(x.at(count * 2 + k.thread(), 4), 0, k.thread());
    });
}

#[test]
fn a_coordinate_passes() {
    let tile = MapDecl { ty: MapType::F32, rank: 2, box_dims: vec![32, 8], im2col: false, swizzle: Swizzle::None, access: Access::Write };
    clean(header(Target::Sm90, 32), |k| {
        let map = k.tensor_map("y", tile.clone());
        let piece = k.shared("tile", 1024, 128);
        let row = k.scalar::<u64>("first").low32() * k.cta();
        k.st_shared(piece.address() + k.thread() * 4, 0, k.thread());
        k.fence_proxy_async();
        k.bar_sync();
        k.when(k.thread().eq(0u32), || {
            k.tma_store(&map, &[k.constant(0i32), row.signed()], piece.address());
            k.bulk_commit();
            k.bulk_wait_read(0);
        });
    });
}
