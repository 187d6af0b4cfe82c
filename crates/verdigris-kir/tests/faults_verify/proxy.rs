use crate::{Lines, caught, clean, header, product, tile_map};
use verdigris_kir::face::{Kernel, SharedPiece, TensorMap, WgmmaA};
use verdigris_kir::ir::Target;

fn one_thread<'k>(k: Kernel<'k>, body: impl Fn()) {
    k.when(k.thread().eq(0u32), body);
}

fn write<'k>(k: Kernel<'k>, tile: SharedPiece<'k>) {
    let at = tile.address() + k.thread() * 4u32;
    k.st_shared(at, 0, k.thread());
}

fn store<'k>(k: Kernel<'k>, map: &TensorMap<'k>, tile: SharedPiece<'k>, lines: &Lines) {
    let zero = k.constant(0i32);
    one_thread(k, || {
        lines.here(line!() + 1);
        k.tma_store(map, &[zero, zero], tile.address());
        k.bulk_commit();
        k.bulk_wait_read(0);
    });
}

#[test]
fn stored_by_tma_without_a_fence() {
    caught("proxy", &["shared buffer out", "tensor store", "fence.proxy.async"], header(Target::Sm90, 128), |k, lines| {
        let map = k.tensor_map("d", tile_map(64));
        let tile = k.shared("out", 8192, 1024);
        let at = tile.address() + k.thread() * 4u32;
        lines.also(line!() + 1);
        k.st_shared(at, 0, k.thread());
        k.bar_sync();
        store(k, &map, tile, lines);
    });
}

#[test]
fn a_fence_for_the_first_tile_alone() {
    caught("proxy", &["shared buffer second"], header(Target::Sm90, 128), |k, lines| {
        let map = k.tensor_map("d", tile_map(64));
        let (first, second) = (k.shared("first", 8192, 1024), k.shared("second", 8192, 1024));
        write(k, first);
        k.fence_proxy_async();
        k.bar_sync();
        store(k, &map, first, &Lines::default());
        write(k, second);
        k.bar_sync();
        store(k, &map, second, lines);
    });
}

#[test]
fn multiplied_without_a_fence() {
    caught("proxy", &["shared buffer a", "wgmma"], header(Target::Sm90a, 128), |k, lines| {
        let tile = k.shared("a", 8192, 1024);
        let acc: Vec<_> = (0..8).map(|_| k.var_unset::<f32>(None)).collect();
        let at = tile.address() + k.thread() * 4u32;
        lines.also(line!() + 1);
        k.st_shared(at, 0, k.thread());
        k.bar_sync();
        let descriptor = ((tile.address() & 0x3_FFFFu32) >> 4).widen() | k.constant(0x4000_0040_0001_0000u64);
        let b = k.constant(0x4000_0040_0001_0000u64);
        k.wgmma_fence();
        lines.here(line!() + 1);
        k.wgmma(product(16), &acc, WgmmaA::Shared(descriptor), b, false);
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
}

#[test]
fn a_bulk_store_without_a_fence() {
    caught("proxy", &["bulk store"], header(Target::Sm90, 128), |k, lines| {
        let out = k.output("out", 16);
        let tile = k.shared("row", 512, 16);
        write(k, tile);
        k.bar_sync();
        one_thread(k, || {
            lines.here(line!() + 1);
            k.bulk_store(out.address(), tile.address(), 512u32);
            k.bulk_commit();
            k.bulk_wait(0);
        });
    });
}

fn reuse(commit: bool, pending: Option<u32>, words: &[&str]) {
    caught("reuse", words, header(Target::Sm90, 128), |k, lines| {
        let map = k.tensor_map("d", tile_map(64));
        let tile = k.shared("out", 8192, 1024);
        let zero = k.constant(0i32);
        let at = tile.address() + k.thread() * 4u32;
        write(k, tile);
        k.fence_proxy_async();
        k.bar_sync();
        one_thread(k, || {
            lines.also(line!() + 1);
            k.tma_store(&map, &[zero, zero], tile.address());
            if commit {
                k.bulk_commit();
            }
            if let Some(pending) = pending {
                k.bulk_wait_read(pending);
            }
        });
        k.bar_sync();
        lines.here(line!() + 1);
        k.st_shared(at, 0, k.thread());
    });
}

#[test]
fn reused_before_the_store_has_read() {
    reuse(true, None, &["no bulk wait that covers its group"]);
    reuse(false, Some(0), &["neither a bulk commit nor a wait"]);
    reuse(true, Some(1), &["shared buffer out is overwritten here"]);
}

#[test]
fn fenced_and_waited_for() {
    clean(header(Target::Sm90, 128), |k| {
        let map = k.tensor_map("d", tile_map(64));
        let tile = k.shared("out", 2 * 8192, 1024);
        let zero = k.constant(0i32);
        let at = |stage: u32| tile.address() + k.thread() * 4u32 + 8192u32 * stage;
        for turn in 0..4u32 {
            // Two stages: a stage is written again once its store of two turns ago has read it.
            one_thread(k, || k.bulk_wait_read(1));
            k.bar_sync();
            k.st_shared(at(turn & 1), 0, k.thread());
            k.fence_proxy_async();
            k.bar_sync();
            one_thread(k, || {
                k.tma_store(&map, &[zero, zero], tile.address() + 8192u32 * (turn & 1));
                k.bulk_commit();
            });
        }
    });
}
