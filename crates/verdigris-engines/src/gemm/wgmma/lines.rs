//! The configs that take operands as they are given, their lines wherever these begin: by [`crate::hopper::aligning`].

use verdigris_tensor::DType;

use super::block_factors::Scaled;
use super::spec::Spec;
use super::{Config, ConfigKnobs, EITHER, Given, LINES, SHAPES, Shape, View, Wgmma};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::hopper::epilogue::epilogue_of;
use crate::hopper::spec::Split;
use crate::hopper::sums::Keep;
use crate::store::Out;

/// The least parts of a tile that are added up later. By count a step takes about twice as long as by whole tiles, so that fewer parts pay for a launch.
pub(super) const LEAST_PARTS_OF_LINES: u32 = 3;

/// A tile by its number, and which kernels there are of it: whose depth is whole (or joined by a fixup), and whose parts are added up later.
struct Offer {
    number: u32,
    whole: bool,
    later: bool,
}

/// What a step costs is mostly shared memory, of which large tiles take less an element; but windows and tiles have to fit beside each other, and of 192
/// columns beside no staged results. Clusters that split the depth save the second launch of few tiles. Each but 64×64
/// whole was the fastest of some problem of `bench/record/h200/2026-11-29-lines-configs.jsonl`; that was of rows of seed 3101.
const OFFERS: [Offer; 6] = [
    Offer { number: 7, whole: false, later: true },
    Offer { number: 9, whole: true, later: true },
    Offer { number: 10, whole: true, later: false },
    Offer { number: 13, whole: true, later: false },
    Offer { number: 27, whole: true, later: false },
    Offer { number: 28, whole: true, later: false },
];

impl Offer {
    fn shape(&self) -> Shape {
        Shape { along_rows: if self.whole { LINES } else { 0 }, along_columns: 0, adds_later: self.later, ..SHAPES[self.number as usize] }
    }
}

/// The kernels. Results of the operands' width are stored line by line, also those that a map would take.
pub(super) fn catalog() -> Vec<Spec> {
    let mut specs = Vec::new();
    for operands in [DType::Bf16, DType::F16, DType::F32] {
        // The tensor cores take f32 along the depth alone.
        let majors = if operands == DType::F32 { &EITHER[..1] } else { &EITHER[..] };
        let epilogue = EpilogueSpec { stores_d: false, ..EpilogueSpec::plain(OperandSpec { dtype: operands, walk: Walk::Row }) };
        for (offer, majors) in OFFERS.iter().flat_map(|offer| majors.iter().map(move |&majors| (offer, majors))) {
            let (a, b, out) = (operands, operands, Out::Rows);
            let given = Given { a, b, majors, terms: 1, keep: Keep::InPlace, scaled: [Scaled::No; 2], out, swap_ab: false, aligns: true };
            specs.extend(given.spec(&offer.shape(), epilogue.clone()));
            specs.extend(given.in_parts(&offer.shape()));
        }
    }
    specs
}

/// The configs of a view, where tiles whose depth is split over the grid are at most `few`. Where kernels write D themselves, its lines run along the
/// view's columns: of either order, one of the two views has it so.
pub(super) fn configs(wgmma: &Wgmma, swap_ab: bool, few: u32) -> Vec<Config> {
    let Some(view) = wgmma.as_given.as_ref().map(|views| &views[usize::from(swap_ab)]) else { return Vec::new() };
    let (out, transposed) = view.out();
    let majors = view.operands().each_ref().map(View::major);
    let mut configs = Vec::new();
    for offer in &OFFERS {
        let shape = offer.shape();
        let plain = |given: &Given| given.scaled == [Scaled::No; 2] && given.keep == Keep::InPlace;
        let Some(given) = wgmma.given(&shape, swap_ab).filter(plain) else { continue };
        let given = Given { aligns: true, majors, out: Out::Rows, ..given };
        configs.extend(given.in_parts(&shape).iter().flat_map(|spec| wgmma.of_parts(offer.number, swap_ab, spec)));
        if transposed || out == Out::Direct || view.problem.d.dtype.bytes() != view.problem.a.dtype.bytes() {
            continue;
        }
        let Some(spec) = given.spec(&shape, epilogue_of(&view.problem, false)) else { continue };
        // No CTA is without a step of its own.
        if view.k.div_ceil(spec.main.depth()) < spec.main.tile.cluster_split {
            continue;
        }
        for split in [0, 1, 2, 3, 4, 5, 7].into_iter().filter(|&split| split == 0 || spec.split == Split::Fixup) {
            let knobs = ConfigKnobs { shape: offer.number, swap_ab, split, parts: 0, group: 8, along_columns: false, aligns: true };
            let along = [false, true].map(|along_columns| ConfigKnobs { along_columns, ..knobs });
            let of_split = along.into_iter().filter_map(|chosen| wgmma.config(chosen, spec.clone()));
            configs.extend(of_split.filter(|Config { layout, .. }| split == 0 || layout.schedule.tiles <= few));
        }
    }
    configs
}
