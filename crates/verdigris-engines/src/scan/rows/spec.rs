//! What shapes the kernels of scans: function, types, how threads stand; their names, parameters, and the function of two values.

use serde::{Deserialize, Serialize};
use verdigris_graph::{ScanOp, View};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Read, Write};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use crate::fuse::compute::{self, Compute};
use crate::fuse::math;
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::strided;
use crate::layout::space::Extents;

use super::{columns, teams};

/// Threads of a CTA, unless one row takes more.
pub(super) const THREADS: u32 = 128;
/// Warps of a CTA that share out the elements of rows that lie side by side.
pub(super) const SHARERS: u32 = 8;

/// How threads stand.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    /// `team` threads along a row, each of which has `held` vectors of `vector` elements in a turn; of vectors of 1, elements may lie apart.
    Rows { vector: u32, team: u32, held: u32 },
    /// A thread takes `vector` neighbouring rows; `team` warps (1 or [`SHARERS`]) of a CTA share their elements out.
    Columns { vector: u32, team: u32 },
}

/// What a launch does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Pass {
    /// Scans each part of each row; `carried`: what stands in front of a part is read.
    Scan { exclusive: bool, reverse: bool, carried: bool },
    /// Combines the elements of each part of each row.
    Totals { reverse: bool },
}

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) f: ScanOp,
    pub(super) double: bool,
    /// Element types of what is read and of what is written.
    pub(super) types: [DType; 2],
    pub(super) form: Form,
    pub(super) pass: Pass,
    /// Dims of the rows.
    pub(super) rank: usize,
}

impl Spec {
    fn name(&self) -> String {
        let flag = |set: bool, word: &str| if set { format!("_{word}") } else { String::new() };
        let form = match self.form {
            Form::Rows { vector, team, held } => format!("rows{team}x{held}v{vector}"),
            Form::Columns { vector, team } => format!("columns{team}v{vector}"),
        };
        let [from, to] = self.types;
        let pass = match self.pass {
            Pass::Scan { exclusive, reverse, carried } => {
                format!("{to}{}{}{}", flag(exclusive, "exclusive"), flag(reverse, "reverse"), flag(carried, "carried"))
            }
            Pass::Totals { reverse } => format!("totals{}", flag(reverse, "reverse")),
        };
        format!("scan_{}{}_{form}_d{}_{from}_{pass}", self.f.name(), flag(self.double, "f64"), self.rank)
    }

    pub(super) fn target(&self) -> Target {
        compute::target_of_all(self.types)
    }

    /// Threads of a CTA.
    pub(super) fn threads(&self) -> u32 {
        match self.form {
            Form::Rows { team, .. } => team.max(THREADS),
            Form::Columns { team, .. } => (32 * team).max(THREADS),
        }
    }

    /// Rows that a CTA takes, a vector of them counting as one.
    pub(super) fn rows_of_cta(&self) -> u32 {
        match self.form {
            Form::Rows { team, .. } | Form::Columns { team, .. } => self.threads() / team,
        }
    }

    /// Rows that lie side by side and are taken together.
    pub(super) fn rows_together(&self) -> u32 {
        if let Form::Columns { vector, .. } = self.form { vector } else { 1 }
    }

    /// Elements of a row that are taken together.
    pub(super) fn elements_together(&self) -> u32 {
        if let Form::Rows { vector, .. } = self.form { vector } else { 1 }
    }

    /// How much of a row a CTA takes in a turn, in elements that are taken together.
    pub(super) fn turn(&self) -> u32 {
        match self.form {
            Form::Rows { team, held, .. } => team * held,
            Form::Columns { vector, team } => team * columns::held(vector),
        }
    }

    pub(super) fn is_reversed(&self) -> bool {
        match self.pass {
            Pass::Scan { reverse, .. } | Pass::Totals { reverse } => reverse,
        }
    }

    /// Bytes of what is computed in.
    pub(super) fn bytes(&self) -> u32 {
        if self.double { 8 } else { 4 }
    }

    fn operands(&self) -> Vec<OperandDecl> {
        let (Form::Rows { vector, .. } | Form::Columns { vector, .. }) = self.form;
        let declare = |dtype: DType, written: bool| match vector {
            1 => strided::declaration(dtype, self.rank + 1, written),
            _ => strided::lines_declaration(dtype, self.rank, vector, written),
        };
        let [from, to] = self.types;
        let mut operands = vec![declare(from, false)];
        operands.extend(matches!(self.pass, Pass::Scan { .. }).then(|| declare(to, true)));
        operands
    }

    /// What a launch from row `first` on gives for an operand.
    pub(super) fn argument(&self, view: &View, first: &[u64]) -> OperandArgs {
        let (view, first) = match self.form {
            Form::Rows { .. } => (view.clone(), first.to_vec()),
            Form::Columns { .. } => {
                let mut first = first.to_vec();
                first.insert(first.len() - 1, 0);
                (across(view), first)
            }
        };
        let (Form::Rows { vector, .. } | Form::Columns { vector, .. }) = self.form;
        if vector == 1 { strided::argument(&view, &first) } else { strided::lines_argument(&view, &first) }
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        // Three CTAs of 256 threads for each SM: some 80 registers, which values of four vectors need.
        let min_ctas = if self.double { 1 } else { 768 / self.threads() };
        let header = Header { name: self.name(), target: self.target(), threads: self.threads(), min_ctas, cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        match self.form {
            Form::Rows { vector, team, held } => teams::rows::<T>(self, k, vector, team, held),
            Form::Columns { vector, team } => columns::columns::<T>(self, k, vector, team),
        }
    }

    /// Of no elements.
    #[track_caller]
    pub(super) fn nothing<'k, T: Compute>(&self, k: Kernel<'k>) -> Val<'k, T> {
        T::constant(k, self.f.of_nothing())
    }

    /// Of the elements of both.
    #[track_caller]
    pub(super) fn combine<'k, T: Compute>(&self, x: Val<'k, T>, y: Val<'k, T>) -> Val<'k, T> {
        let k = x.kernel();
        match self.f {
            ScanOp::Add => x + y,
            ScanOp::Mul => x * y,
            ScanOp::Min => T::min_nan(x, y),
            ScanOp::Max => T::max_nan(x, y),
            ScanOp::LogSumExp => {
                let (most, least) = (T::max_nan(x, y), T::min_nan(x, y));
                // What is infinite or NaN has no difference to the rest.
                let number = |value: f64| T::constant(k, value);
                let usable = least.gt(number(f64::NEG_INFINITY)) & most.lt(number(f64::INFINITY));
                let distance = k.select(usable, least - most, number(0.0));
                k.select(usable, most + math::softplus(distance), most)
            }
        }
    }
}

/// A view whose innermost dim is the last one of the rows.
pub(super) fn across(view: &View) -> View {
    let mut strides = view.strides.clone();
    let last = strides.len() - 1;
    strides.swap(last - 1, last);
    View { strides, ..view.clone() }
}

verdigris_kir::parameters! {
    /// Of all kernels. Lengths of rows count what is taken together.
    pub(super) struct OfRows / OfRowsArgs of Spec as spec {
        /// Vectors of them where they are taken together.
        pub(super) rows: u32,
        pub(super) extent: u32,
        /// Length of a part of a row, and how many parts there are.
        pub(super) part: u32,
        pub(super) parts: u32,
        /// Of the rows; the innermost counts in vectors where they are taken together.
        pub(super) extents: Extents = spec.rank,
        pub(super) operands: Vec<OperandArgs> = spec.operands(),
        /// What stands in front of each part of each row.
        pub(super) carries: Option<Read> = matches!(spec.pass, Pass::Scan { carried: true, .. }).then(|| spec.bytes()),
        /// What the elements of each part of each row come to.
        pub(super) totals: Option<Write> = matches!(spec.pass, Pass::Totals { .. }).then(|| spec.bytes()),
    }
}
