//! The interpreter's exchange between lanes and its atomics, against the ISA's definitions.

use verdigris_kir::inst::{Atomic, BulkReduce, Redux, Shuffle, Space, Vote};
use verdigris_kir::interp::alu::{EvalError, Lanes, atomic, warp};
use verdigris_kir::ir::Ty;

#[test]
fn shuffles_read_the_lanes_that_the_isa_names() {
    for segment in [2u32, 4, 8, 16, 32] {
        let mask = (32 - segment) << 8;
        for lane in 0..32u32 {
            let first = lane / segment * segment;
            for n in 0..32 {
                let inside = |target: i64| target >= i64::from(first) && target < i64::from(first + segment);
                let expect = |target: i64| if inside(target) { (target as u32, true) } else { (lane, false) };
                let (l, d) = (i64::from(lane), i64::from(n));
                assert_eq!(warp::shuffle_source(Shuffle::Up, lane, n, mask), expect(l - d));
                assert_eq!(warp::shuffle_source(Shuffle::Down, lane, n, mask | 31), expect(l + d));
                if n < segment {
                    assert_eq!(warp::shuffle_source(Shuffle::Butterfly, lane, n, mask | 31), (lane ^ n, true));
                }
                assert_eq!(warp::shuffle_source(Shuffle::Index, lane, n, mask | 31), (first + n % segment, true));
            }
        }
    }
}

#[test]
fn votes_matches_and_reductions() {
    let predicate: Lanes = std::array::from_fn(|i| u64::from(i % 3 == 0));
    assert_eq!(warp::ballot(&predicate, 0xffff), 0x9249);
    assert!(
        warp::vote(Vote::Any, &predicate, 0x3) && !warp::vote(Vote::All, &predicate, 0x3) && !warp::vote(Vote::Uniform, &predicate, 0x3)
    );
    assert!(
        warp::vote(Vote::All, &predicate, 0x9) && warp::vote(Vote::Uniform, &predicate, 0x6) && !warp::vote(Vote::Any, &predicate, 0x6)
    );
    let value: Lanes = std::array::from_fn(|i| (i as u64 % 4) | 0xffff_0000_0000_0000);
    let matched = warp::match_any(&value, Ty::B32, 0xff);
    assert_eq!((matched[1], matched[7], matched[8]), (0x22, 0x88, 0));
    assert_eq!((warp::match_all(&value, Ty::B32, 0x1111), warp::match_all(&value, Ty::B32, 0x3)), (0x1111, 0));
    let value: Lanes = std::array::from_fn(|i| (i as u64).wrapping_sub(3) & 0xffff_ffff);
    assert_eq!(warp::redux(Redux::Add, Ty::S32, &value, 0xff), Some(4));
    assert_eq!(warp::redux(Redux::Min, Ty::S32, &value, 0xff), Some(-3i32 as u32));
    assert_eq!(warp::redux(Redux::Min, Ty::U32, &value, 0xff), Some(0));
    assert_eq!(warp::redux(Redux::Max, Ty::S32, &value, 0xff), Some(4));
    assert_eq!(warp::redux(Redux::Max, Ty::U32, &value, 0xff), Some(0xffff_ffff));
    assert_eq!(warp::redux(Redux::Xor, Ty::B32, &value, 0x18), Some(1));
    assert_eq!(warp::redux(Redux::Add, Ty::S32, &value, 0), None);
    assert_eq!((warp::elect(0xf0), warp::elect(0)), (Some(4), None));
}

#[test]
fn atomics_on_a_word() {
    let apply = |op, ty, old, operand| atomic::apply(op, ty, Space::Shared, old, operand, 0).unwrap();
    assert_eq!(apply(Atomic::Add, Ty::U32, 0xffff_ffff, 2), 1);
    assert_eq!(apply(Atomic::Min, Ty::S32, 0xffff_ffff, 2), 0xffff_ffff);
    assert_eq!(apply(Atomic::Min, Ty::U32, 0xffff_ffff, 2), 2);
    assert_eq!(apply(Atomic::Max, Ty::S64, u64::MAX, 2), 2);
    assert_eq!((apply(Atomic::Inc, Ty::U32, 5, 5), apply(Atomic::Inc, Ty::U32, 4, 5)), (0, 5));
    assert_eq!((apply(Atomic::Dec, Ty::U32, 0, 5), apply(Atomic::Dec, Ty::U32, 6, 5), apply(Atomic::Dec, Ty::U32, 3, 5)), (5, 5, 2));
    assert_eq!(apply(Atomic::Exch, Ty::B64, 1, u64::MAX), u64::MAX);
    assert_eq!(atomic::apply(Atomic::Cas, Ty::B32, Space::Global, 7, 7, 9), Ok(9));
    assert_eq!(atomic::apply(Atomic::Cas, Ty::B32, Space::Global, 8, 7, 9), Ok(8));
    let f = |x: f32| u64::from(x.to_bits());
    assert_eq!(apply(Atomic::Add, Ty::F32, f(1.5), f(2.0)), f(3.5));
    // Global additions flush subnormals, shared ones do not.
    assert_eq!(atomic::apply(Atomic::Add, Ty::F32, Space::Global, 1, 1, 0), Ok(0));
    assert_eq!(apply(Atomic::Add, Ty::F32, 1, 1), 2);
    assert_eq!(apply(Atomic::Add, Ty::F64, 1.5f64.to_bits(), 2f64.to_bits()), 3.5f64.to_bits());
    assert_eq!(apply(Atomic::Add, Ty::F16x2, 0x3c00_4000, 0x3c00_4000), 0x4000_4400);
    assert_eq!(apply(Atomic::Max, Ty::Bf16x2, 0x3f80_8000, 0xbf80_0000), 0x3f80_0000);
    // TMA keeps them in global memory too; these three are from an H200.
    assert_eq!(atomic::apply_bulk(BulkReduce::Add, Ty::F32, 0x8000_0002, 0x8000_0000), Ok(0x8000_0002));
    assert_eq!(atomic::apply_bulk(BulkReduce::Add, Ty::F32, 0x8062_cb77, 0), Ok(0x8062_cb77));
    assert_eq!(atomic::apply_bulk(BulkReduce::Add, Ty::F32, 0x8000_0000, 0x005e_c5b5), Ok(0x005e_c5b5));
    assert_eq!(atomic::apply_bulk(BulkReduce::Max, Ty::S32, 0xffff_ffff, 3), Ok(3));
    assert_eq!(atomic::apply_bulk(BulkReduce::Add, Ty::Bf16, 0x3f80, 0x3f80), Ok(0x4000));
    assert_eq!(atomic::apply(Atomic::Xor, Ty::F32, Space::Shared, 0, 0, 0), Err(EvalError::NoSuchForm { op: "Atom", ty: Ty::F32 }));
}
