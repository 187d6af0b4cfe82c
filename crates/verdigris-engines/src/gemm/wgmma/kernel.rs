//! The Hopper GEMM kernel: TMA fills a ring of swizzled tiles (or of windows that warps align into such tiles), warpgroups multiply out of it,
//! results leave through shared memory, by TMA or by threads.
//!
//! Top to bottom: parameters and shared memory, the producer, the consumers, the roles. The main loop and the loads are those of
//! [`crate::hopper`]; the epilogue is in [`super::epilogue`] and [`crate::fuse::epilogue`].

use verdigris_kir::face::{AsVal, Kernel};
use verdigris_kir::params::Divide;
use verdigris_kir::tile::schedule::ScheduleArgs;

use super::super::factors::FactorsArgs;
use super::block_factors::{BlockFactors, Scaled};
use super::epilogue::{Place, TileEpilogue};
use super::spec::Spec;
use crate::hopper::aligning::{self, Aligning, AligningArgs, PRODUCERS};
use crate::hopper::main_loop::MainLoop;
use crate::hopper::roles;
use crate::hopper::share::{Consumer, Share};
use crate::hopper::spec::{Operand, Split};
use crate::hopper::stages::Stages;
use crate::hopper::tiled::{Tiled, TiledArgs};
use crate::layout::batch::BatchIndexArgs;
use crate::split_k::fixup::FixupArgs;
use crate::split_k::reduction::PartsArgs;
use crate::store::{StoreArgs, Sum};

verdigris_kir::parameters! {
    pub(super) struct Params / ParamsArgs of Spec as spec {
        pub(super) operands: Option<TiledArgs> = (spec.waiting == 0).then_some(spec.main),
        /// Operands whose lines begin anywhere.
        pub(super) lines: Option<AligningArgs> = spec.aligning(),
        pub(super) schedule: ScheduleArgs = spec.split != Split::No,
        pub(super) batch: BatchIndexArgs = (),
        /// Columns by which tiles of the second of two interleaved matrices begin earlier.
        pub(super) lead: Option<u32> = spec.interleaved.then_some(()),
        /// Steps of depth of a plane.
        pub(super) plane_steps: Option<Divide> = spec.planes.then_some(()),
        pub(super) a_factors: Option<FactorsArgs> = (spec.scaled[0] != Scaled::No).then_some(()),
        pub(super) b_factors: Option<FactorsArgs> = (spec.scaled[1] != Scaled::No).then_some(()),
        /// How results leave; they do not where parts are added up by a launch of their own.
        pub(super) store: Option<StoreArgs> = (spec.split != Split::Reduced).then(|| spec.store()),
        pub(super) fixup: Option<FixupArgs> = (spec.split == Split::Fixup).then_some(()),
        pub(super) parts: Option<PartsArgs> = (spec.split == Split::Reduced).then_some(()),
    }
}

/// The kernel's body. `T` is what sums are kept in.
pub(super) fn gemm<'k, T: Sum + AsVal<'k, T>>(k: Kernel<'k>, spec: &Spec) {
    let (main, tile) = (&spec.main, spec.main.tile);
    let Params { operands, lines, schedule, batch, lead, plane_steps, a_factors, b_factors, store, fixup, parts } =
        Params::declare(k, spec);
    let factors = BlockFactors::new(k, [a_factors, b_factors], spec.scaled);
    let epilogue = TileEpilogue::new(k, spec, (batch, lead), store, fixup, parts);
    let operands = operands.map(|operands| Tiled::new(k, main, operands).interleaved(lead).over_planes(plane_steps));
    let lines = spec.aligning().zip(lines).map(|(aligning, lines)| Aligning::new(k, aligning, lines));
    let stages = match spec.aligning() {
        None => Stages::new(k, main),
        Some(aligning) => Stages::filled_by(k, main, aligning.fillers(), tile.sharers()),
    };
    let init = || {
        stages.ring.init();
        epilogue.init();
        operands.iter().for_each(|operands| operands.prefetch_maps());
        lines.iter().for_each(|lines| lines.waiting.init());
    };
    roles::start(k, init, || {
        operands.iter().for_each(|operands| operands.clear(&stages));
        lines.iter().for_each(|lines| lines.begin(&stages));
    });
    let share = Share::new(k, tile);

    let load = || {
        if let Some(operands) = &operands {
            let cursor = stages.ring.cursor();
            let loader = operands.loader(&stages, share);
            roles::load_each(k, tile, schedule, cursor, |work| loader.load(&spec.matrix_of(work), &cursor));
        }
    };

    let load_lines = |operand| {
        if let Some(lines) = &lines {
            let cursor = lines.cursor(operand, &stages);
            roles::load_each(k, tile, schedule, cursor, |work| lines.load(operand, &share.own(work), &cursor, &stages));
        }
    };
    let (load_a, load_b) = (|| load_lines(Operand::A), || load_lines(Operand::B));

    let align = || {
        if let Some(lines) = &lines {
            let (waiting, cursor) = (lines.waiting.cursor(), stages.ring.cursor());
            let aligner = lines.aligner(&stages);
            schedule.for_each(|work| aligner.align(&share.own(work), &waiting, &cursor));
        }
    };

    let multiply = || {
        let own = Consumer::behind(k, tile, if lines.is_some() { PRODUCERS } else { 1 });
        let kept = epilogue.begin::<T>();
        let main_loop = MainLoop::<T>::new(k, main, &stages, schedule, spec.barrier(), own);
        main_loop.for_each(
            |_| schedule.steps(),
            |work| {
                let work = spec.matrix_of(work);
                let (first_step, steps) = share.steps(&work);
                let place = || Place::new(share, tile, &work, own);
                let factors = factors.zip(epilogue.extents()).map(|(factors, extents)| {
                    factors.tile(batch.split(work.batch), place().first, [tile.blocks(), tile.n], extents, own.thread)
                });
                let step_factors = |step| factors.as_ref().map(|factors| factors.load((first_step + step) * main.depth()));
                main_loop.multiply(&work, steps, step_factors);
                if !main.promotes() {
                    k.wgmma_wait(0);
                }
                main_loop.release_last();
                // The place not before the main loop, which has no register to spare for it.
                epilogue.take(&kept, main_loop.results(), &work, place());
            },
        );
        epilogue.finish(&kept, own.thread);
    };

    match spec.aligning() {
        None => roles::run(k, tile, tile.registers(), &[roles::load(&load)], &multiply),
        Some(aligning) => roles::run(k, tile, aligning.registers(), &aligning::roles(&load_a, &load_b, &align), &multiply),
    }
}
