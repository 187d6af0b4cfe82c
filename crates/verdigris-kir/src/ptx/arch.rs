//! Versions of the PTX language: which one a driver reads, which one a kernel needs.

use crate::inst::{Fence, MatrixType, Op};
use crate::ir::KernelBody;
use std::fmt;

/// A version of the PTX language, as written in `.version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Isa {
    /// The number before the dot.
    pub major: u32,
    /// The number behind it.
    pub minor: u32,
}

/// The newest version each CUDA release reads, by the number `cuDriverGetVersion` gives (1000 · major + 10 · minor), newest first.
///
/// Source: PTX ISA, "Release notes".
const BY_CUDA_VERSION: &[(u32, Isa)] = &[
    (13000, Isa::V9_0),
    (12090, Isa::new(8, 8)),
    (12080, Isa::new(8, 7)),
    (12070, Isa::new(8, 6)),
    (12050, Isa::new(8, 5)),
    (12040, Isa::new(8, 4)),
    (12030, Isa::new(8, 3)),
    (12020, Isa::new(8, 2)),
    (12010, Isa::new(8, 1)),
    (12000, Isa::MINIMUM),
];

impl Isa {
    /// 9.0: CUDA 13.0, driver 580. The newest version that the table of instructions was checked with, and the newest printed.
    pub const V9_0: Isa = Isa::new(9, 0);
    /// 8.0: CUDA 12.0, the first that knows compute capability 9.0 in full.
    pub const MINIMUM: Isa = Isa::new(8, 0);

    /// The version `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Isa {
        Isa { major, minor }
    }

    /// The newest version that a driver reads and that we print, by what `cuDriverGetVersion` says (13000 for CUDA 13.0).
    /// `None` for a driver older than CUDA 12.0.
    pub fn for_driver(cuda_version: u32) -> Option<Isa> {
        BY_CUDA_VERSION.iter().find(|(cuda, _)| *cuda <= cuda_version).map(|(_, isa)| *isa)
    }

    /// The oldest version that has all instructions of a kernel. A driver whose [`Isa::for_driver`] is below it cannot run the kernel.
    pub fn needed_by(body: &KernelBody) -> Isa {
        let mut needed = Isa::MINIMUM;
        body.for_each_inst(&mut |inst| needed = needed.max(Isa::needed_by_op(&inst.op)));
        needed
    }

    /// The oldest version that has an instruction with these attributes (not below [`Isa::MINIMUM`]).
    ///
    /// Source: PTX ISA, "PTX ISA Notes" of each instruction; every row is checked with `ptxas` over the samples of the table.
    pub fn needed_by_op(op: &Op) -> Isa {
        let fp8 = |ty: MatrixType| matches!(ty, MatrixType::E4m3 | MatrixType::E5m2);
        match op {
            Op::Red { count, .. } if *count > 1 => Isa::new(8, 1),
            Op::StAsync { .. } | Op::RedAsync { .. } => Isa::new(8, 1),
            Op::CvtPack { to, .. } if to.is_fp8() => Isa::new(8, 1),
            Op::CvtHalfToFp8 { .. } | Op::CvtFp8ToHalf { .. } => Isa::new(8, 1),
            Op::Wgmma { shape } if shape.a != shape.b && !fp8(shape.a) => Isa::new(8, 4),
            Op::Wgmma { shape } if shape.sparse => Isa::new(8, 2),
            Op::TensormapReplace { .. } | Op::TensormapPublish { .. } => Isa::new(8, 3),
            Op::MemoryFence { fence: Fence::TensormapRelease(_) | Fence::TensormapAcquire(_) } => Isa::new(8, 3),
            Op::Mma { shape } if fp8(shape.a) && (shape.k == 16 || shape.d == MatrixType::F16) => Isa::new(8, 7),
            Op::Mma { shape } if fp8(shape.a) => Isa::new(8, 4),
            _ => Isa::MINIMUM,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_gets_the_newest_version_it_reads() {
        assert_eq!(Isa::for_driver(13000), Some(Isa::V9_0));
        assert_eq!(Isa::for_driver(13020), Some(Isa::V9_0));
        assert_eq!(Isa::for_driver(12060), Some(Isa::new(8, 5)));
        assert_eq!(Isa::for_driver(12000), Some(Isa::new(8, 0)));
        assert_eq!(Isa::for_driver(11080), None);
        assert!(BY_CUDA_VERSION.is_sorted_by(|a, b| a.0 > b.0 && a.1 > b.1));
    }
}
