//! The configs that store whole sectors of L2 where every other row of D begins within one.
//!
//! Rows of an odd multiple of 16 bytes (584 or 40 halves) begin by turns at a sector's begin and in its middle, and the 128 bytes of a row that TMA stores
//! at a time then begin and end with half a sector. What L2 does with halves was not profiled; by the clock a product that is
//! bound by its result takes 1.5 to 2 times as long (926,718x584x32 in bf16 540 to 800 us, with 592 columns 390; an H200,
//! `bench/record/h200/2026-11-29-sectors-first-configs.jsonl`). Here even and odd rows are two matrices of a batch, of twice the distance of rows, and tiles of the
//! second begin 16 bytes earlier: so each of both stores whole sectors, but at the ends of rows. Threads store them, 16 bytes each: TMA stores no box that
//! begins in front of a tensor. A result that begins within a sector itself is stored right all the same, and gains nothing.

use verdigris_graph::{EpilogueStep, GemmProblem, Matrix, Order};
use verdigris_kir::tile::operand::Major;
use verdigris_tensor::DType;

use super::block_factors::Scaled;
use super::spec::Spec;
use super::{Config, ConfigKnobs, ELEMENTS, Given, SHAPES, Shape, View, Wgmma};
use crate::cost::Loop;
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::hopper::epilogue::epilogue_of;
use crate::hopper::sums::Keep;
use crate::store::Out;

/// What L2 keeps apart, and half of it, by which odd rows begin earlier.
const SECTOR_BYTES: u64 = 32;
const LEAD_BYTES: u64 = SECTOR_BYTES / 2;

/// The depth up to which the result may be what a product is bound by, and of how many bytes, which no L2 holds.
const MOST_DEPTH: u32 = 128;
const LEAST_RESULT_BYTES: f64 = 120e6;
/// What storing halves of sectors counts for beside storing whole ones, where that is what a product is bound by: `2026-11-29-sectors-configs.jsonl`
/// has 1.5 to 2 of whole ones, of which the fit knows a part by the alignment of columns.
const HALVES_BESIDE_WHOLE: f64 = 0.5;

/// Tiles by their numbers: wide ones, for narrow results (40 to 200 columns) were slower so than as they lie.
const NUMBERS: [u32; 2] = [2, 9];

fn shape(number: u32) -> Shape {
    Shape { along_rows: ELEMENTS, along_columns: 0, splits: false, adds_later: false, ..SHAPES[number as usize] }
}

/// A problem whose D has an even number of rows, of 2-byte elements, that begin by turns within sectors: as two matrices.
pub(super) fn view(whole: &View) -> Option<View> {
    let problem = &whole.problem;
    let d = &problem.d;
    let bytes = d.dtype.bytes() as u64;
    let halves = |matrix: &Matrix| matrix.order() == Order::RowMajor && matrix.dtype.bytes() == 2;
    let by_turns = halves(d) && d.row_stride.saturating_mul(bytes) % SECTOR_BYTES == LEAD_BYTES;
    let plain = problem.scale_a.is_none() && problem.scale_b.is_none() && whole.terms == 1;
    let takes = by_turns && plain && halves(&problem.a) && problem.batch.is_empty() && problem.m.is_multiple_of(2);
    if !takes || whole.out() != (Out::Tma, false) {
        return None;
    }
    let view = View::new(of_two(problem)?, 1, false)?;
    Some(View { lead: (LEAD_BYTES / bytes) as u32, ..view })
}

/// Even rows and odd ones.
fn of_two(problem: &GemmProblem) -> Option<GemmProblem> {
    let of_rows = |matrix: &Matrix| {
        let row_stride = matrix.row_stride.checked_mul(2)?;
        Some(Matrix { row_stride, batch_strides: vec![matrix.row_stride], ..matrix.clone() })
    };
    let step = |step: &EpilogueStep| {
        let mut step = step.clone();
        match &mut step {
            EpilogueStep::Binary { operand, .. } => *operand = of_rows(operand)?,
            EpilogueStep::Random { number, .. } => *number = of_rows(number)?,
            EpilogueStep::Store { target, .. } => *target = of_rows(target)?,
            EpilogueStep::Unary(_) | EpilogueStep::Scale { .. } | EpilogueStep::Round { .. } => {}
        }
        Some(step)
    };
    let c = match &problem.c {
        None => None,
        Some(c) => Some(of_rows(c)?),
    };
    Some(GemmProblem {
        batch: vec![2],
        m: problem.m / 2,
        a: of_rows(&problem.a)?,
        b: Matrix { batch_strides: vec![0], ..problem.b.clone() },
        c,
        d: of_rows(&problem.d)?,
        epilogue: problem.epilogue.iter().map(step).collect::<Option<_>>()?,
        ..problem.clone()
    })
}

/// What a config's product says of itself. Two interleaved matrices are what the whole one is, in memory, and as wide as what is counted. Beside them, and
/// there alone, the whole one counts what its halves of sectors cost, where nothing else is slower; where something is, stores by threads are, and count as
/// half as wide: nine of the ten products of `2026-11-29-sectors-second-configs.jsonl` that were timed both ways were slower so, by up to 1.5.
pub(super) fn counted(wgmma: &Wgmma, view: &View, main: Loop) -> Loop {
    let Some(interleaved) = &wgmma.interleaved else { return main };
    let whole = Loop::of_gemm(main.kernel, &wgmma.unswapped.problem);
    let result_bytes = f64::from(wgmma.unswapped.m) * f64::from(wgmma.unswapped.n) * whole.result_bytes;
    let is_bound_by_results = interleaved.k <= MOST_DEPTH && result_bytes >= LEAST_RESULT_BYTES;
    match (view.lead > 0, is_bound_by_results) {
        (false, false) => main,
        (false, true) => Loop { traffic_bytes: main.traffic_bytes + HALVES_BESIDE_WHOLE * result_bytes, ..main },
        (true, is_bound) => {
            let [rows, columns, depth] = main.product;
            let product = [rows, columns + f64::from(view.lead), depth];
            Loop { product, traffic_bytes: whole.traffic_bytes, store_bytes: if is_bound { 16.0 } else { 8.0 }, ..main }
        }
    }
}

/// The kernels.
pub(super) fn catalog() -> Vec<Spec> {
    let mut specs = Vec::new();
    for operands in [DType::Bf16, DType::F16] {
        let epilogue = EpilogueSpec { stores_d: false, ..EpilogueSpec::plain(OperandSpec { dtype: operands, walk: Walk::Row }) };
        for (number, b) in NUMBERS.into_iter().flat_map(|number| [Major::Depth, Major::Rows].map(|b| (number, b))) {
            let given = Given {
                a: operands,
                b: operands,
                majors: [Major::Depth, b],
                terms: 1,
                keep: Keep::InPlace,
                scaled: [Scaled::No; 2],
                out: Out::Scattered,
                swap_ab: false,
                interleaved: true,
                planes: false,
                ways: None,
            };
            specs.extend(given.spec(&shape(number), epilogue.clone()));
        }
    }
    specs
}

/// The configs of a problem.
pub(super) fn configs(wgmma: &Wgmma) -> Vec<Config> {
    let Some(view) = &wgmma.interleaved else { return Vec::new() };
    let mut configs = Vec::new();
    for number in NUMBERS {
        let Some(given) = wgmma.given(&shape(number), view) else { continue };
        let given = Given { out: Out::Scattered, ..given };
        let Some(spec) = given.spec(&shape(number), epilogue_of(&view.problem, false)) else { continue };
        let knobs = ConfigKnobs {
            shape: number,
            swap_ab: false,
            split: 0,
            parts: 0,
            group: 8,
            along_columns: false,
            aligns: false,
            interleaved: true,
        };
        let along = [false, true].map(|along_columns| ConfigKnobs { along_columns, ..knobs });
        configs.extend(along.into_iter().filter_map(|chosen| wgmma.config(chosen, spec.clone())));
    }
    configs
}
