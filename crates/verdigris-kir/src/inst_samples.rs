//! Every instruction of the table with every combination of attributes: what the assembler and the device are asked about.
//!
//! [`candidates`] spans each attribute over its values, sensible or not; [`samples`] are those that [`Op::legal`] accepts.

use crate::inst::{
    Atomic, BulkReduce, Cache, Cmp, CvtRound, Division, Fence, MapField, MatrixType, MmaShape, Op, Order, Packed, Redux, Round, Scope,
    Shuffle, Space, Special, TestWait, Vote, WgmmaShape,
};
use crate::ir::Ty;

/// One instruction of the table with its attributes.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The operation.
    pub op: Op,
}

/// Every legal combination of attributes of every instruction, in the order of the table. Matrix products in `wgmma` stand with a
/// selection of widths.
pub fn samples() -> Vec<Sample> {
    candidates().into_iter().filter(|op| op.legal().is_ok()).map(|op| Sample { op }).collect()
}

const TYPES: [Ty; 16] = [
    Ty::Pred,
    Ty::B16,
    Ty::B32,
    Ty::B64,
    Ty::U16,
    Ty::S16,
    Ty::U32,
    Ty::S32,
    Ty::U64,
    Ty::S64,
    Ty::F16,
    Ty::Bf16,
    Ty::F16x2,
    Ty::Bf16x2,
    Ty::F32,
    Ty::F64,
];
const SPACES: [Space; 3] = [Space::Global, Space::Shared, Space::Cluster];
const SCOPES: [Scope; 4] = [Scope::Cta, Scope::Cluster, Scope::Gpu, Scope::Sys];
const BOTH: [bool; 2] = [false, true];
const ROUNDS: [Round; 4] = [Round::Nearest, Round::Zero, Round::Down, Round::Up];
const CACHES: [Cache; 9] = [
    Cache::Default,
    Cache::All,
    Cache::Global,
    Cache::Streaming,
    Cache::NonCoherent,
    Cache::NonCoherentNoAllocate,
    Cache::EvictFirst,
    Cache::EvictLast,
    Cache::NoAllocate,
];
const COMPARISONS: [Cmp; 14] = [
    Cmp::Eq,
    Cmp::Ne,
    Cmp::Lt,
    Cmp::Le,
    Cmp::Gt,
    Cmp::Ge,
    Cmp::EqOrNan,
    Cmp::NeOrNan,
    Cmp::LtOrNan,
    Cmp::LeOrNan,
    Cmp::GtOrNan,
    Cmp::GeOrNan,
    Cmp::Number,
    Cmp::Nan,
];
const CVT_ROUNDS: [CvtRound; 10] = [
    CvtRound::None,
    CvtRound::Nearest,
    CvtRound::Zero,
    CvtRound::Down,
    CvtRound::Up,
    CvtRound::IntNearest,
    CvtRound::IntZero,
    CvtRound::IntDown,
    CvtRound::IntUp,
    CvtRound::NearestAway,
];
const ATOMICS: [Atomic; 10] =
    [Atomic::Add, Atomic::Min, Atomic::Max, Atomic::And, Atomic::Or, Atomic::Xor, Atomic::Exch, Atomic::Cas, Atomic::Inc, Atomic::Dec];
const BULK_REDUCTIONS: [BulkReduce; 8] =
    [BulkReduce::Add, BulkReduce::Min, BulkReduce::Max, BulkReduce::And, BulkReduce::Or, BulkReduce::Xor, BulkReduce::Inc, BulkReduce::Dec];
const PACKED: [Packed; 4] = [Packed::F16x2, Packed::Bf16x2, Packed::E4m3x2, Packed::E5m2x2];
const MATRIX_TYPES: [MatrixType; 12] = [
    MatrixType::F16,
    MatrixType::Bf16,
    MatrixType::Tf32,
    MatrixType::F64,
    MatrixType::F32,
    MatrixType::E4m3,
    MatrixType::E5m2,
    MatrixType::S8,
    MatrixType::U8,
    MatrixType::S4,
    MatrixType::U4,
    MatrixType::B1,
];
const ACCUMULATORS: [MatrixType; 4] = [MatrixType::F16, MatrixType::F32, MatrixType::F64, MatrixType::S32];
const SPECIALS: [Special; 24] = [
    Special::Tid,
    Special::Ntid,
    Special::CtaX,
    Special::CtaY,
    Special::CtaZ,
    Special::GridX,
    Special::GridY,
    Special::GridZ,
    Special::Lane,
    Special::ClusterX,
    Special::ClustersX,
    Special::ClusterCtaRank,
    Special::ClusterCtas,
    Special::LaneMaskLt,
    Special::LaneMaskLe,
    Special::LaneMaskEq,
    Special::LaneMaskGt,
    Special::LaneMaskGe,
    Special::Sm,
    Special::Sms,
    Special::Clock,
    Special::Clock64,
    Special::GlobalTimer,
    Special::DynamicSharedBytes,
];

fn orders() -> Vec<Order> {
    let mut orders = vec![Order::Weak, Order::Volatile];
    for scope in SCOPES {
        orders.extend([Order::Relaxed(scope), Order::Acquire(scope), Order::Release(scope), Order::AcqRel(scope)]);
    }
    orders
}

/// Every combination of attributes within reason, legal or not, in the order of the table.
pub fn candidates() -> Vec<Op> {
    let mut out = Vec::new();
    moves(&mut out);
    integers(&mut out);
    floats(&mut out);
    conversions(&mut out);
    memory(&mut out);
    copies(&mut out);
    tensors(&mut out);
    matrices(&mut out);
    barriers(&mut out);
    lanes_and_control(&mut out);
    out
}

fn moves(out: &mut Vec<Op>) {
    out.extend(TYPES.map(|ty| Op::Mov { ty }));
    out.extend(SPECIALS.map(|register| Op::SpecialRegister { register }));
    for ty in TYPES {
        out.extend([0, 1, 2, 4, 8].map(|offset_bytes| Op::ParamLoad { index: 0, offset_bytes, ty }));
    }
    out.extend([Op::ParamAddress { index: 0 }, Op::SharedAddress { index: 0 }]);
    for whole in TYPES {
        out.extend(TYPES.map(|half| Op::Pack { half, whole }));
    }
    for whole in TYPES {
        out.extend(TYPES.map(|half| Op::Unpack { half, whole }));
    }
}

fn integers(out: &mut Vec<Op>) {
    for ty in TYPES {
        out.extend([
            Op::IAdd { ty },
            Op::ISub { ty },
            Op::IMulLo { ty },
            Op::IMulHi { ty },
            Op::IMulWide { ty },
            Op::IMadLo { ty },
            Op::IMadWide { ty },
            Op::IMin { ty },
            Op::IMax { ty },
            Op::INeg { ty },
            Op::IAbs { ty },
            Op::And { ty },
            Op::Or { ty },
            Op::Xor { ty },
            Op::Not { ty },
            Op::Shl { ty },
            Op::Shr { ty },
            Op::Popc { ty },
            Op::Clz { ty },
            Op::Brev { ty },
            Op::Bfind { ty },
            Op::Bfe { ty },
            Op::Bfi { ty },
        ]);
    }
    out.push(Op::Prmt {});
    for left in BOTH {
        out.extend(BOTH.map(|wrap| Op::Funnel { left, wrap }));
    }
    out.extend([0x00, 0x96, 0xCA, 0xE8, 0xFF].map(|table| Op::Lop3 { table }));
    for a_signed in BOTH {
        for b_signed in BOTH {
            out.push(Op::Dp4a { a_signed, b_signed });
            out.extend(BOTH.map(|high| Op::Dp2a { a_signed, b_signed, high }));
        }
    }
}

fn floats(out: &mut Vec<Op>) {
    for ty in TYPES {
        for ftz in BOTH {
            for rounding in ROUNDS {
                for saturate in BOTH {
                    out.extend([
                        Op::FAdd { ty, rounding, ftz, saturate },
                        Op::FSub { ty, rounding, ftz, saturate },
                        Op::FMul { ty, rounding, ftz, saturate },
                        Op::Fma { ty, rounding, ftz, saturate, relu: false },
                        Op::Fma { ty, rounding, ftz, saturate, relu: true },
                    ]);
                }
            }
            for nan in BOTH {
                out.extend([Op::FMin { ty, ftz, nan }, Op::FMax { ty, ftz, nan }]);
            }
            out.extend([Op::FNeg { ty, ftz }, Op::FAbs { ty, ftz }]);
            out.extend([Division::Ieee, Division::Full, Division::Approx].map(|kind| Op::FDiv { ty, kind, ftz }));
            for approx in BOTH {
                out.extend([Op::Rcp { ty, approx, ftz }, Op::Sqrt { ty, approx, ftz }]);
            }
            out.extend([Op::Rsqrt { ty, ftz }, Op::Ex2 { ty, ftz }]);
            out.extend(COMPARISONS.map(|cmp| Op::Setp { cmp, ty, ftz }));
        }
        out.extend([Op::Copysign { ty }, Op::Tanh { ty }, Op::Selp { ty }]);
    }
    for ftz in BOTH {
        out.extend([Op::Lg2 { ftz }, Op::Sin { ftz }, Op::Cos { ftz }]);
    }
}

fn conversions(out: &mut Vec<Op>) {
    for to in TYPES {
        for from in TYPES {
            for rounding in CVT_ROUNDS {
                for ftz in BOTH {
                    out.extend(BOTH.map(|saturate| Op::Cvt { to, from, rounding, ftz, saturate }));
                }
            }
        }
        for signed in BOTH {
            out.extend([Op::CvtByte { to, signed }, Op::CvtToByte { from: to, signed }]);
        }
    }
    for packed in PACKED {
        for relu in BOTH {
            out.extend([Op::CvtPack { to: packed, relu }, Op::CvtHalfToFp8 { to: packed, relu }, Op::CvtFp8ToHalf { from: packed, relu }]);
        }
    }
    out.extend(CVT_ROUNDS.map(|rounding| Op::CvtTf32 { rounding }));
}

fn memory(out: &mut Vec<Op>) {
    for space in SPACES {
        for cache in CACHES {
            for order in orders() {
                for ty in TYPES {
                    for count in [1, 2, 4] {
                        out.push(Op::Ld { space, ty, count, order, cache });
                        out.push(Op::St { space, ty, count, order, cache });
                    }
                }
            }
            out.extend(BOTH.map(|signed| Op::LdByte { space, signed, cache }));
            out.push(Op::StByte { space, cache });
        }
        for order in orders() {
            for op in ATOMICS {
                for ty in TYPES {
                    out.push(Op::Atom { space, op, ty, order });
                    out.extend([1, 2, 4, 8].map(|count| Op::Red { space, op, ty, count, order }));
                }
            }
        }
    }
    out.extend(BOTH.map(|l1| Op::Prefetch { l1 }));
    out.push(Op::DiscardL2 {});
    out.extend(BOTH.map(|evict_first| Op::CreatePolicy { evict_first }));
}

fn copies(out: &mut Vec<Op>) {
    for bytes in [2, 4, 8, 16] {
        out.extend(BOTH.map(|bypass_l1| Op::CpAsync { bytes, bypass_l1 }));
    }
    out.extend([Op::CpAsyncCommit {}, Op::CpAsyncWait { pending: 0 }, Op::CpAsyncWait { pending: 3 }]);
    out.extend(BOTH.map(|no_increment| Op::CpAsyncArrive { no_increment }));
    for hint in BOTH {
        out.extend(BOTH.map(|multicast| Op::BulkLoad { multicast, hint }));
        out.push(Op::BulkStore { hint });
    }
    for op in BULK_REDUCTIONS {
        out.extend(TYPES.map(|ty| Op::BulkReduceStore { op, ty }));
    }
    out.extend([Op::BulkCopyToPeer {}, Op::BulkPrefetch {}, Op::BulkCommit {}]);
    for pending in [0, 1, 7] {
        out.extend(BOTH.map(|read| Op::BulkWait { pending, read }));
    }
}

fn tensors(out: &mut Vec<Op>) {
    for rank in 1..=6 {
        for im2col in BOTH {
            for hint in BOTH {
                if !im2col || rank >= 2 {
                    out.extend(BOTH.map(|multicast| Op::TmaLoad { rank, im2col, multicast, hint }));
                }
                out.push(Op::TmaStore { rank, im2col, hint });
            }
            out.extend(BULK_REDUCTIONS.map(|op| Op::TmaReduce { rank, op, im2col }));
        }
        out.push(Op::TmaPrefetch { rank });
    }
    out.push(Op::TensormapPrefetch {});
    for space in SPACES {
        let mut fields = vec![MapField::GlobalAddress, MapField::Rank];
        for d in 0..6 {
            fields.extend([MapField::BoxDim(d), MapField::GlobalDim(d), MapField::GlobalStride(d), MapField::ElementStride(d)]);
        }
        out.extend(fields.into_iter().map(|field| Op::TensormapReplace { field, space }));
    }
    out.extend(SCOPES.map(|scope| Op::TensormapPublish { scope }));
    out.push(Op::MapShared {});
    for ty in TYPES {
        out.extend([1, 2, 4].map(|count| Op::StAsync { ty, count }));
        out.extend(ATOMICS.map(|op| Op::RedAsync { op, ty }));
    }
}

fn matrices(out: &mut Vec<Op>) {
    for count in [1, 2, 3, 4] {
        for transpose in BOTH {
            out.extend([Op::Ldmatrix { count, transpose }, Op::Stmatrix { count, transpose }]);
        }
    }
    out.push(Op::Movmatrix {});
    for a in MATRIX_TYPES {
        for b in MATRIX_TYPES.into_iter().filter(|b| b.bits() == a.bits()) {
            for d in ACCUMULATORS {
                for m in [8, 16] {
                    for k in [4, 8, 16, 32, 64, 128, 256] {
                        for sparse in BOTH {
                            for saturate in BOTH {
                                let shape = MmaShape { m, n: 8, k, a, b, d, saturate, sparse };
                                out.push(Op::Mma { shape });
                            }
                        }
                    }
                }
                for n in [4, 8, 24, 40, 64, 72, 96, 120, 256, 264] {
                    wgmmas(out, n, a, b, d);
                }
            }
        }
    }
    out.extend([Op::WgmmaFence {}, Op::WgmmaCommit {}, Op::WgmmaWait { pending: 0 }, Op::WgmmaWait { pending: 7 }]);
}

fn wgmmas(out: &mut Vec<Op>, n: u32, a: MatrixType, b: MatrixType, d: MatrixType) {
    for flags in 0..128u32 {
        let bit = |index: u32| flags >> index & 1 == 1;
        // The flags are all combined at one width; elsewhere one at a time.
        if n != 64 && flags.count_ones() > 1 {
            continue;
        }
        let shape = WgmmaShape {
            n,
            a,
            b,
            d,
            a_in_registers: bit(0),
            transpose_a: bit(1),
            transpose_b: bit(2),
            negate_a: bit(3),
            negate_b: bit(4),
            saturate: bit(5),
            sparse: bit(6),
        };
        out.push(Op::Wgmma { shape });
    }
}

fn barriers(out: &mut Vec<Op>) {
    out.extend([Op::BarSync {}, Op::BarArrive {}, Op::CtaSync {}, Op::CtaCount {}]);
    out.extend(BOTH.map(|all| Op::CtaVote { all }));
    out.push(Op::WarpSync {});
    out.extend(BOTH.map(|relaxed| Op::ClusterArrive { relaxed }));
    out.extend([Op::ClusterWait {}, Op::MbarrierInit {}, Op::MbarrierInvalidate {}, Op::MbarrierArriveToken {}]);
    for space in SPACES {
        out.extend(SCOPES.map(|scope| Op::MbarrierArrive { space, scope }));
        out.extend([Op::MbarrierArriveExpect { space }, Op::MbarrierExpect { space }, Op::MbarrierComplete { space }]);
    }
    out.push(Op::MbarrierArriveDrop {});
    for scope in SCOPES {
        out.push(Op::MbarrierWait { scope });
        out.extend([TestWait::Test, TestWait::Try].map(|kind| Op::MbarrierTest { kind, scope }));
    }
    out.extend([TestWait::Test, TestWait::Try].map(|kind| Op::MbarrierTestToken { kind }));
    out.push(Op::MbarrierPending {});
    let mut fences = vec![Fence::MbarrierInit, Fence::ProxyAsyncShared, Fence::ProxyAsyncGlobal, Fence::ProxyAsync];
    for scope in SCOPES {
        fences.extend([Fence::AcqRel(scope), Fence::Sc(scope), Fence::TensormapRelease(scope), Fence::TensormapAcquire(scope)]);
    }
    out.extend(fences.into_iter().map(|fence| Op::MemoryFence { fence }));
}

fn lanes_and_control(out: &mut Vec<Op>) {
    out.extend([Shuffle::Up, Shuffle::Down, Shuffle::Butterfly, Shuffle::Index].map(|mode| Op::Shfl { mode }));
    out.extend([Vote::All, Vote::Any, Vote::Uniform].map(|mode| Op::VoteAcross { mode }));
    out.push(Op::Ballot {});
    for ty in TYPES {
        out.extend([Op::MatchAny { ty }, Op::MatchAll { ty }]);
        let all = [Redux::Add, Redux::Min, Redux::Max, Redux::And, Redux::Or, Redux::Xor];
        out.extend(all.map(|op| Op::ReduxAcross { op, ty }));
    }
    out.extend([Op::Elect {}, Op::ActiveMask {}]);
    for registers in [16, 24, 40, 100, 232, 256, 264] {
        out.extend(BOTH.map(|increase| Op::Setmaxnreg { increase, registers }));
    }
    out.extend([Op::GridDependencyWait {}, Op::GridDependencyLaunch {}, Op::Nanosleep {}, Op::Trap {}]);
}
