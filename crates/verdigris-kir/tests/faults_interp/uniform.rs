//! Lanes that part where they should be together, and values that differ where they should be the same.

use crate::{caught, cta};
use verdigris_kir::face::{AsVal, Val};
use verdigris_kir::inst::{Op, Redux, Shuffle};
use verdigris_kir::interp::FindingKind;
use verdigris_kir::ir::{Operand, Ty};
use verdigris_kir::tile::ring::publish_barriers;

// ---- divergence ----------------------------------------------------------------------------------------------------

#[test]
fn a_barrier_that_some_lanes_reach() {
    let finding = caught(FindingKind::Divergence, &["must be reached by the whole warp together"], cta(64), |p, lines| {
        let k = p.k;
        let lanes = k.select(p.fault.ne(0u32), 40u32, 64u32);
        k.when(p.index().lt(lanes), || {
            lines.here(line!() + 1);
            k.bar_sync();
        });
    });
    assert_eq!((finding.warp, finding.lane), (Some(1), Some(8)));
}

#[test]
fn a_shuffle_that_some_lanes_reach() {
    caught(FindingKind::Divergence, &["as members, and they are not here"], cta(32), |p, lines| {
        let k = p.k;
        let lanes = k.select(p.fault.ne(0u32), 31u32, 32u32);
        k.when(p.index().lt(lanes), || {
            lines.here(line!() + 1);
            let value = k.shfl_bfly::<u32>(k.thread(), 1);
            k.st_global(p.y.at(k.thread(), 4), 0, value);
        });
    });
}

#[test]
fn lanes_outside_of_the_member_mask() {
    caught(FindingKind::Divergence, &["which are not in its member mask 0x0000ffff"], cta(32), |p, lines| {
        let k = p.k;
        let mask = k.select(p.fault.ne(0u32), 0xFFFFu32, 0xFFFF_FFFFu32);
        lines.here(line!() + 1);
        k.instruction(Op::WarpSync {}, &[], &[mask.operand()]);
    });
}

/// The lower sixteen lanes bring a mask that overlaps the one of the others, who are elsewhere.
#[test]
fn groups_of_lanes_whose_masks_overlap() {
    for op in [Op::WarpSync {}, Op::Ballot {}, Op::ReduxAcross { op: Redux::Add, ty: Ty::U32 }, Op::Shfl { mode: Shuffle::Butterfly }] {
        caught(FindingKind::Divergence, &["names lanes 0x00010000 as members, and they are not here"], cta(32), |p, lines| {
            let k = p.k;
            let value = k.var(k.thread());
            let is_odd = (k.thread() & 1u32).ne(0u32).operand();
            let across = |mask: Val<'_, u32>| {
                let (own, mask) = (value.get().operand(), mask.operand());
                let ins = match op {
                    Op::WarpSync {} => vec![mask],
                    Op::Ballot {} => vec![is_odd, mask],
                    Op::ReduxAcross { .. } => vec![own, mask],
                    _ => vec![own, Operand::Imm(1), Operand::Imm(31), mask],
                };
                let out = [Some(value.reg())];
                lines.here(line!() + 1);
                k.instruction(op.clone(), if matches!(op, Op::WarpSync {}) { &[] } else { &out }, &ins);
            };
            k.when_else(
                p.index().lt(16u32),
                || {
                    let mask = k.select(p.fault.ne(0u32), 0x1_FFFFu32, 0xFFFFu32);
                    across(mask);
                },
                || across(k.constant(0xFFFF_0000u32)),
            );
            k.st_global(p.y.at(k.thread(), 4), 0, value.get());
        });
    }
}

#[test]
fn lanes_that_disagree_on_stopping() {
    let finding = caught(FindingKind::Divergence, &["some lanes stop here and others do not"], cta(32), |p, lines| {
        let k = p.k;
        let bound = k.select(p.fault.ne(0u32), 12u32, 32u32);
        let late = p.index().ge(bound);
        lines.here(line!() + 1);
        k.stop_when(late);
        k.st_global(p.y.at(k.thread(), 4), 0, k.thread());
    });
    assert_eq!(finding.lane, Some(0));
}

#[test]
fn a_matrix_load_in_a_loop_that_lanes_leave_apart() {
    caught(FindingKind::Divergence, &["must be reached by the whole warp together"], cta(32), |p, lines| {
        let k = p.k;
        let tile = k.shared("tile", 512, 16);
        let i = p.index();
        k.st_shared_vector(tile.address() + i * 16u32, 0, &[i, i, i, i]);
        k.warp_sync();
        let turns = (i & 1u32) * p.fault + 1u32;
        k.range(turns, |_| {
            lines.here(line!() + 1);
            let _ = k.ldmatrix(4, false, tile.address() + k.thread() * 16u32, 0);
        });
    });
}

// ---- uniform -------------------------------------------------------------------------------------------------------

#[test]
fn lanes_disagree_on_what_is_called_uniform() {
    let finding =
        caught(FindingKind::Uniform, &["a value that is called uniform is 0x0 in lane 0 and 0x1 in lane 8"], cta(32), |p, lines| {
            let k = p.k;
            let group = p.index().shr(k.constant(5u32) - p.fault * 2u32);
            lines.here(line!() + 1);
            let group = k.uniform(group);
            k.st_global(p.y.at(k.thread(), 4), 0, group);
        });
    assert_eq!(finding.lane, Some(8));
}

#[test]
fn a_table_entry_that_lanes_read_at_different_places() {
    caught(FindingKind::Uniform, &["in lane 16"], cta(64), |p, lines| {
        let k = p.k;
        let row = (k.thread() >> 4u32) * p.fault;
        let entry = k.ld_global::<u32>(p.x.at(row, 4), 0);
        lines.here(line!() + 1);
        let extent = k.uniform(entry);
        k.range(extent, |_| k.warp_sync());
    });
}

#[test]
fn a_result_that_one_lane_alone_holds() {
    caught(FindingKind::Uniform, &["a value that is called uniform"], cta(32), |p, lines| {
        let k = p.k;
        let place = k.var(9u32);
        k.when(k.lane().eq(0u32), || place.set(p.fault * 5u32 + 9u32));
        lines.here(line!() + 1);
        let place = k.uniform(place.get());
        k.st_global(p.y.at(k.thread() + place, 4), 0, k.thread());
    });
}

#[test]
fn a_barrier_number_that_lanes_disagree_on() {
    caught(FindingKind::Uniform, &["the barrier's number is 0x1 in lane 0 and 0x2 in lane 4"], cta(32), |p, lines| {
        let k = p.k;
        let number = (p.index() >> 2u32) * p.fault + 1u32;
        lines.here(line!() + 1);
        k.barrier_sync(number, 32);
    });
}

#[test]
fn a_parity_that_lanes_disagree_on() {
    caught(FindingKind::Uniform, &["both parities of mbarrier full[0]"], cta(32), |p, lines| {
        let k = p.k;
        let full = p.barriers("full", 1, 32);
        k.when(k.thread().eq(0u32), || full.init());
        publish_barriers(k);
        full.at(0u32).arrive();
        let parity = p.index() & p.fault;
        lines.here(line!() + 1);
        full.at(0u32).wait(parity);
    });
}

#[test]
fn a_member_mask_that_lanes_disagree_on() {
    caught(FindingKind::Uniform, &["the member mask"], cta(32), |p, lines| {
        let k = p.k;
        let mask = !(p.index() & p.fault);
        lines.here(line!() + 1);
        k.instruction(Op::WarpSync {}, &[], &[mask.operand()]);
    });
}
