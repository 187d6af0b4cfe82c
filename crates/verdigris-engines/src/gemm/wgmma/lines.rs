//! The configs that take operands as they are given, their lines wherever and along whatever these begin: by [`crate::hopper::aligning`].

use verdigris_kir::tile::operand::Major;
use verdigris_tensor::DType;

use super::block_factors::Scaled;
use super::spec::Spec;
use super::{Config, ConfigKnobs, EITHER, Given, LINES, SHAPES, Shape, View, Wgmma};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::hopper::aligning::Way;
use crate::hopper::epilogue::epilogue_of;
use crate::hopper::sums::Keep;
use crate::store::Out;

/// The least parts of a tile that are added up later. By count a step takes about twice as long as by whole tiles, so that fewer parts pay for a launch.
pub(super) const LEAST_PARTS_OF_LINES: u32 = 3;

/// A tile by its number, and which kernels there are of it besides those that write the results: those whose parts are added up later, and those of
/// operands of 16 bits of which one goes straight.
struct Offer {
    number: u32,
    later: bool,
    straight: bool,
}

/// What a step costs is mostly shared memory, of which large tiles take less an element; but windows and tiles have to fit beside each other.
/// Clusters that split the depth save the second launch of few tiles. Of the fastest of
/// `bench/record/h200/2026-11-29-lines-configs.jsonl` those that are not here (64×64 whole and split over four, 128×192 in parts, fixups) were faster than
/// the next by a few per cent, of two problems by 17: they made room for operands that go straight, which by count save a quarter of a step, and that are transposed.
const OFFERS: [Offer; 3] = [
    Offer { number: 9, later: true, straight: false },
    Offer { number: 10, later: false, straight: true },
    Offer { number: 27, later: false, straight: false },
];

impl Offer {
    fn shape(&self) -> Shape {
        Shape { along_rows: LINES, along_columns: 0, splits: false, adds_later: self.later, ..SHAPES[self.number as usize] }
    }

    /// The ways that its kernels have of operands of a type whose lines run along `majors`.
    fn ways(&self, dtype: DType, majors: [Major; 2]) -> Vec<[Way; 2]> {
        // The tensor cores take f32 along the depth alone.
        let is_transposed = majors.map(|major| dtype == DType::F32 && major == Major::Rows);
        let [a, b] = is_transposed.map(|is_transposed| if is_transposed { Way::Transposed } else { Way::Moved });
        let mut ways = vec![[a, b]];
        // Whose depth is contiguous in both, begin anywhere both or neither, but for lines that are longer than they have to be.
        if (self.straight || dtype == DType::F32) && majors != [Major::Depth; 2] {
            ways.extend((!is_transposed[0]).then_some([Way::Straight, b]));
            ways.extend((!is_transposed[1]).then_some([a, Way::Straight]));
        }
        ways
    }

    /// How the operands of a view come, if they can: straight where a map takes them, and else aligned.
    fn ways_of(&self, wgmma: &Wgmma, view: &View) -> Option<[Way; 2]> {
        let [a, b] = wgmma.copies.each_ref().map(Option::is_none);
        let is_mapped = if view.swap_ab { [b, a] } else { [a, b] };
        let (operands, rows) = (view.operands(), [view.m, view.n]);
        let way = |i: usize, is_mapped: bool| Way::of(&operands[i], [rows[i], view.k], is_mapped);
        let offered = self.ways(operands[0].dtype, operands.each_ref().map(View::major));
        // What could go straight may have to be moved beside the other.
        let choices = [is_mapped, [false, false]].map(|mapped| Some([way(0, mapped[0])?, way(1, mapped[1])?]));
        choices.into_iter().flatten().find(|ways| offered.contains(ways))
    }
}

/// The kernels. Results of the operands' width are stored line by line, also those that a map would take.
pub(super) fn catalog() -> Vec<Spec> {
    let mut specs = Vec::new();
    for operands in [DType::Bf16, DType::F16, DType::F32] {
        let epilogue = EpilogueSpec { stores_d: false, ..EpilogueSpec::plain(OperandSpec { dtype: operands, walk: Walk::Row }) };
        for (offer, majors) in OFFERS.iter().flat_map(|offer| EITHER.iter().map(move |&majors| (offer, majors))) {
            for ways in offer.ways(operands, majors).into_iter().map(Some) {
                let (a, b, out) = (operands, operands, Out::Rows);
                let given = Given {
                    a,
                    b,
                    majors,
                    terms: 1,
                    keep: Keep::InPlace,
                    scaled: [Scaled::No; 2],
                    out,
                    swap_ab: false,
                    interleaved: false,
                    planes: false,
                    ways,
                };
                specs.extend(given.spec(&offer.shape(), epilogue.clone()));
                specs.extend(given.in_parts(&offer.shape()));
            }
        }
    }
    specs
}

/// The configs of a view. Where kernels write D themselves, its lines run along the view's columns: of either order, one of the two views has it so.
pub(super) fn configs(wgmma: &Wgmma, swap_ab: bool) -> Vec<Config> {
    let Some(view) = wgmma.as_given.as_ref().map(|views| &views[usize::from(swap_ab)]) else { return Vec::new() };
    let (out, transposed) = view.out();
    let majors = view.operands().each_ref().map(View::major);
    let mut configs = Vec::new();
    for offer in &OFFERS {
        let (shape, ways) = (offer.shape(), offer.ways_of(wgmma, view));
        let plain = |given: &Given| given.scaled == [Scaled::No; 2] && given.keep == Keep::InPlace;
        let Some(given) = wgmma.given(&shape, wgmma.view(swap_ab)).filter(|given| plain(given) && ways.is_some()) else { continue };
        let given = Given { ways, majors, out: Out::Rows, ..given };
        configs.extend(given.in_parts(&shape).iter().flat_map(|spec| wgmma.of_parts(offer.number, swap_ab, spec)));
        if transposed || out == Out::Direct || view.problem.d.dtype.bytes() != view.problem.a.dtype.bytes() {
            continue;
        }
        let Some(spec) = given.spec(&shape, epilogue_of(&view.problem, false)) else { continue };
        // No CTA is without a step of its own.
        if view.k.div_ceil(spec.main.depth()) < spec.main.tile.cluster_split {
            continue;
        }
        let knobs = ConfigKnobs {
            shape: offer.number,
            swap_ab,
            split: 0,
            parts: 0,
            group: 8,
            along_columns: false,
            aligns: true,
            interleaved: false,
        };
        let along = [false, true].map(|along_columns| ConfigKnobs { along_columns, ..knobs });
        configs.extend(along.into_iter().filter_map(|chosen| wgmma.config(chosen, spec.clone())));
    }
    configs
}
