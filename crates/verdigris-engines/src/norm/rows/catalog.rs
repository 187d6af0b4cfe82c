//! The catalog of the kernel of rows.

use verdigris_graph::NormKind;
use verdigris_kir::ir::Target;
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::{Along, FEW, Holds, NARROW_CTA, Once, OperandSpec, Role, Spec, WIDEST, ahead, bulk, class, ctas_of_few, streams_of};

/// The kernels of the usual operands: one element type throughout, or vectors in f32; a vector of one element for all rows' columns, layer and
/// root-mean-square norm, alone or behind a sum.
pub(super) fn kernels(target: Target) -> Vec<KernelRef> {
    let mut specs: Vec<Spec> = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let vector = 16 / dtype.bytes() as u32;
        for kind in [NormKind::Layer, NormKind::Rms] {
            for backward in [false, true] {
                let holds = if backward { Holds::Sums } else { Holds::Values };
                let accesses = 1..=WIDEST * 64 / u64::from(vector);
                let mut classes: Vec<(u32, u32)> = accesses.filter_map(|accesses| class(accesses, vector, false, holds)).collect();
                classes.dedup();
                for (team, held) in classes.into_iter().chain((!backward).then_some((256, 0))) {
                    let spec = plain(kind, backward, dtype, [team, held, vector]);
                    // Longer rows whose CTAs stay are compiled when they are first asked for.
                    let is_wide = kind == NormKind::Layer && vector == 8 && team == 256 && (3..=6).contains(&held);
                    let ends = !backward && team >= 32 && held > 0 && !is_wide;
                    let once = ends.then(|| Once { threads: team.max(NARROW_CTA) });
                    let rows = if ends || held == 0 { 0 } else { ahead::rows_of(spec.streamed_bytes(), u32::MAX) };
                    let streams = if ends && vector == 8 { streams_of(u64::from(team * held)) } else { [false; 2] };
                    specs.push(Spec { once, ahead: rows, streams, ..spec });
                }
                // What rows of 16-bit elements take first, where that is not their class's.
                let of_rows = |team: u32, held: u32| plain(kind, backward, dtype, [team, held, vector]);
                let stays = |spec: Spec| Spec { ahead: ahead::rows_of(spec.streamed_bytes(), u32::MAX), ..spec };
                if vector == 8 && backward {
                    specs.push(stays(of_rows(8, 2)));
                } else if vector == 8 {
                    let long: &[(u32, u32)] = if kind == NormKind::Layer { &[] } else { &[(512, 2), (512, 3), (512, 4)] };
                    let teams = [(8, 2), (64, 2), (128, 2), (256, 2), (128, 5)].iter().chain(long);
                    specs.extend(teams.map(|&(team, held)| Spec {
                        once: Some(Once { threads: team.max(NARROW_CTA) }),
                        streams: streams_of(u64::from(team * held)),
                        ..of_rows(team, held)
                    }));
                    let held_ahead: &[(u32, u32)] = if kind == NormKind::Layer { &[(128, 5), (512, 3)] } else { &[] };
                    specs.extend(held_ahead.iter().map(|&(team, held)| stays(of_rows(team, held))));
                }
                if backward && dtype != DType::F32 {
                    let long = [3, 4].map(|held| plain(kind, true, dtype, [WIDEST as u32, held, vector]));
                    specs.extend(long.map(|spec| Spec { sums_in_shared: true, ..spec }));
                }
                if backward {
                    // Chips that launch kernels one after the other have them without the overlap, compiled when they are first asked for.
                    // So are those that hold more, and more threads than rows of their length prefer.
                    let all = FEW.iter().flat_map(|&(team, helds)| helds.iter().map(move |&held| (team, held)));
                    let ways = all.filter(|&(team, held)| held <= 2 && (team, held) != (128, 1));
                    specs.extend(ways.flat_map(|(team, held)| {
                        let spec = plain(kind, true, dtype, [team, held, vector]);
                        ctas_of_few(team).map(move |threads| Spec { once: Some(Once { threads }), overlaps: true, ..spec.clone() })
                    }));
                }
            }
        }
    }
    // Rows by bulk copies that a CTA takes whole; those of other teams, and those that stay, are compiled when they are first asked for.
    for dtype in [DType::F16, DType::Bf16] {
        let whole = |kind: NormKind, team: u32| Spec {
            once: Some(Once { threads: bulk::threads_of(team) }),
            bulk: 1,
            ..plain(kind, false, dtype, [team, bulk::USUAL_HELD, 8])
        };
        specs.extend([64, 128, 256].map(|team| whole(NormKind::Layer, team)).into_iter().chain([whole(NormKind::Rms, 64)]));
    }
    // A launch of sums follows those that stay as well. Chips that launch kernels one after the other have them without the overlap, compiled when they are first asked for.
    let stays = specs.iter_mut().filter(|spec| spec.backward && spec.once.is_none());
    stays.for_each(|spec| spec.overlaps = true);
    specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
}

/// A norm with a scale, and a bias where the mean is taken off, or its gradient.
fn plain(kind: NormKind, backward: bool, dtype: DType, [team, held, vector]: [u32; 3]) -> Spec {
    let line = |role| OperandSpec { role, dtype, along: Along::Line };
    let shared = |role| OperandSpec { role, dtype, along: Along::Shared };
    let has_bias = kind == NormKind::Layer;
    let operands = if backward {
        vec![line(Role::X), line(Role::Dy), shared(Role::Scale), line(Role::Dx)]
    } else {
        let bias = has_bias.then(|| shared(Role::Bias));
        [Some(line(Role::X)), Some(shared(Role::Scale)), bias, Some(line(Role::Y))].into_iter().flatten().collect()
    };
    Spec {
        kind,
        backward,
        zero_centred: false,
        double: false,
        team,
        held,
        vector,
        ranks: [1, 0],
        operands,
        sums: [backward, backward && has_bias],
        sums_in_shared: false,
        once: None,
        overlaps: false,
        ahead: 0,
        bulk: 0,
        streams: [false; 2],
    }
}
