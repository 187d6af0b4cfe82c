//! Which boxes of pixels are worth a try.

use verdigris_graph::ConvProblem;

use super::geometry::{KTile, Lines, Patch, Reads};

/// K-tiles, the deepest first.
fn k_tiles(p: &ConvProblem) -> Vec<[u64; 2]> {
    let mut k_tiles = Vec::new();
    for depth in if p.filter[0] > 1 { vec![p.filter[0], 1] } else { vec![1] } {
        // Evenly cut, so that the last K-tile is not short.
        for parts in 1..=p.filter[1].min(64) {
            let taps = [depth, p.filter[1].div_ceil(parts)];
            if !k_tiles.contains(&taps) {
                k_tiles.push(taps);
            }
        }
    }
    k_tiles
}

/// Boxes of at most `pixels` pixels, a power of two, each with the deepest K-tile whose patch `fits`.
pub(super) fn boxes(p: &ConvProblem, lines: Lines, reads: Reads, pixels: u64, fits: &dyn Fn(&Patch) -> bool) -> Vec<Patch> {
    let k_tiles = k_tiles(p);
    let mut widths: Vec<u64> = (3..=pixels.ilog2()).map(|power| 1 << power).collect();
    widths.push(p.output[2].min(pixels));
    widths.sort_unstable();
    widths.dedup();
    let mut list: Vec<Patch> = Vec::new();
    for columns in widths {
        let mut rows = pixels / columns;
        while rows > 0 {
            let fitting = k_tiles.iter().find_map(|&taps| {
                // Lines of their own for the rows of a box, where these are fewer.
                let patch = |gathered| Patch::new(p, lines, reads, KTile { taps, gathered }, [rows, columns]);
                let (dense, gathered) = (patch(false), patch(true));
                let patch = if gathered.line_count() <= dense.line_count() { gathered } else { dense };
                fits(&patch).then_some(patch)
            });
            list.extend(fitting);
            rows /= 2;
        }
    }
    list
}
