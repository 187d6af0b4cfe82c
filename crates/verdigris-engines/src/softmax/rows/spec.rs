//! What shapes the kernels of rows: function, types, how threads stand; their names and parameters.

use serde::{Deserialize, Serialize};
use verdigris_graph::{LossReduction, RowFunction, SoftmaxProblem, View};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Read, ReadWrite, Write};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use crate::fuse::compute::{self, Compute};
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::strided;
use crate::layout::space::Extents;

use super::{columns, elements, lines, losses};

/// Threads of a CTA that goes through rows element by element.
pub(super) const THREADS: u32 = 256;
/// Threads of a CTA that goes through lines, unless one row takes more.
const LINE_THREADS: u32 = 128;
/// Threads of a CTA that goes through what rows left behind: losses and labels.
pub(super) const LOSS_THREADS: u32 = 1024;

/// What is computed, as far as it shapes code.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    Softmax,
    LogSoftmax,
    SoftmaxBackward,
    LogSoftmaxBackward,
    /// Row losses; `lse`: the log-sum-exp is stored too; `kept`: losses and weights go to scratch to be added up.
    CrossEntropy {
        smooth: bool,
        ignore: bool,
        lse: bool,
        kept: bool,
    },
    /// `lse`: the log-sum-exp is read.
    CrossEntropyBackward {
        ignore: bool,
        lse: bool,
        number: Number,
    },
    /// The number of rows that are not ignored.
    Count,
    /// Losses and weights added up in parts.
    Part {
        mean: bool,
    },
    /// Losses added up, and divided by the weights' sum for a mean.
    Join {
        mean: bool,
    },
}

/// Where the gradient of a loss has the number of rows from that the loss was divided by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Number {
    /// It is an argument: of all rows, or 1.
    Given,
    /// A launch in front has counted the rows that are not ignored.
    Read,
    /// Every CTA counts them by itself.
    Counted,
}

/// How threads stand.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::softmax) enum Form {
    /// Element by element, of any strides: `team` threads (1, 32 or 256) to a row, each of which holds `held` of its elements; 0 reads them again at each
    /// step.
    Elements { team: u32, held: u32 },
    /// Elements of a row lie side by side: `team` threads to a row, each of which holds `held` vectors of `vector` elements; 0 reads them again. `edges`:
    /// rows begin and end anywhere, and elements in front of and behind whole vectors are taken one by one.
    Rows { vector: u32, team: u32, held: u32, edges: bool },
    /// The same of a cluster of `ctas` CTAs, each of `team` threads, that takes one row and holds it.
    Cluster { vector: u32, team: u32, held: u32, ctas: u32 },
    /// Rows lie side by side: a thread takes `vector` neighbouring rows, and `team` warps (1 or 8) of a CTA share their elements out.
    Columns { vector: u32, team: u32 },
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) kind: Kind,
    pub(super) double: bool,
    /// Element types of the operands, in the order of slots.
    pub(super) types: Vec<DType>,
    pub(super) form: Form,
    /// Dims of the rows.
    pub(super) rank: usize,
}

impl Spec {
    /// Of the way in which a launch in front counts rows, where they have to be counted.
    pub(super) fn of(p: &SoftmaxProblem, form: Form) -> Spec {
        let kind = match &p.function {
            RowFunction::Softmax { log: false, .. } => Kind::Softmax,
            RowFunction::Softmax { log: true, .. } => Kind::LogSoftmax,
            RowFunction::SoftmaxBackward { log: false, .. } => Kind::SoftmaxBackward,
            RowFunction::SoftmaxBackward { log: true, .. } => Kind::LogSoftmaxBackward,
            RowFunction::CrossEntropy { loss_spec, lse, .. } => Kind::CrossEntropy {
                smooth: loss_spec.smoothing.0 > 0.0,
                ignore: loss_spec.ignore_index.is_some(),
                lse: lse.is_some(),
                kept: loss_spec.reduction != LossReduction::None,
            },
            RowFunction::CrossEntropyBackward { loss_spec, lse, .. } => {
                let ignore = loss_spec.ignore_index.is_some();
                let is_counted = ignore && loss_spec.reduction == LossReduction::Mean;
                let number = if is_counted { Number::Read } else { Number::Given };
                Kind::CrossEntropyBackward { ignore, lse: lse.is_some(), number }
            }
        };
        let mut spec = Spec { kind, double: p.compute == DType::F64, types: Vec::new(), form, rank: p.rows.len() };
        spec.types = spec.operands_of(p).map(|(_, view)| view.dtype).collect();
        spec
    }

    /// `eˣ` as it is stored. A result of fewer bits than f32 has is rounded by far more than the quick form loses, which is half a unit in the last place of
    /// the argument.
    #[track_caller]
    pub(super) fn exponential<'k, T: Compute>(&self, x: Val<'k, T>) -> Val<'k, T> {
        if self.types.last() == Some(&DType::F32) { T::exp(x) } else { T::fast_exp(x) }
    }

    /// The same, whose CTAs count rows by themselves.
    pub(super) fn counting(self) -> Spec {
        let kind = match self.kind {
            Kind::CrossEntropyBackward { ignore, lse, number: Number::Read } => {
                Kind::CrossEntropyBackward { ignore, lse, number: Number::Counted }
            }
            kind => kind,
        };
        Spec { kind, ..self }
    }

    /// Of one dim of rows.
    pub(super) fn plain(kind: Kind, form: Form) -> Spec {
        Spec { kind, double: false, types: Vec::new(), form, rank: 1 }
    }

    /// Of a launch that goes through what rows left behind.
    pub(super) fn behind(&self, kind: Kind, types: Vec<DType>) -> Spec {
        Spec {
            kind,
            double: self.double,
            types,
            form: Form::Elements { team: LOSS_THREADS, held: 0 },
            rank: if kind == Kind::Count { self.rank } else { 0 },
        }
    }

    /// The operands that the kernel of rows touches, with their names: a loss that is added up goes to scratch.
    pub(super) fn operands_of<'p>(&self, p: &'p SoftmaxProblem) -> impl Iterator<Item = (&'static str, &'p View)> + use<'p> {
        let kept = matches!(self.kind, Kind::CrossEntropy { kept: true, .. });
        p.operands().into_iter().filter(move |(name, ..)| !(kept && *name == "loss")).map(|(name, view, _)| (name, view))
    }

    fn name(&self) -> String {
        let flag = |set: bool, word: &str| if set { format!("_{word}") } else { String::new() };
        let kind = match self.kind {
            Kind::Softmax => "forward".to_owned(),
            Kind::LogSoftmax => "log_forward".to_owned(),
            Kind::SoftmaxBackward => "backward".to_owned(),
            Kind::LogSoftmaxBackward => "log_backward".to_owned(),
            Kind::CrossEntropy { smooth, ignore, lse, kept } => {
                format!("loss{}{}{}{}", flag(smooth, "smooth"), flag(ignore, "ignore"), flag(lse, "lse"), flag(kept, "kept"))
            }
            Kind::CrossEntropyBackward { ignore, lse, number } => {
                let number = flag(number == Number::Read, "counted") + &flag(number == Number::Counted, "counting");
                format!("loss_backward{}{}{number}", flag(ignore, "ignore"), flag(lse, "lse"))
            }
            Kind::Count => "count".to_owned(),
            Kind::Part { mean } => format!("part{}", flag(mean, "mean")),
            Kind::Join { mean } => format!("join{}", flag(mean, "mean")),
        };
        let types: Vec<&str> = self.types.iter().map(|dtype| dtype.name()).collect();
        let double = flag(self.double, "f64");
        let form = match self.form {
            Form::Elements { team, held } => format!("team{team}x{held}"),
            Form::Rows { vector, team, held, edges } => format!("rows{team}x{held}v{vector}{}", flag(edges, "edges")),
            Form::Cluster { vector, team, held, ctas } => format!("cluster{ctas}x{team}x{held}v{vector}"),
            Form::Columns { vector, team } => format!("columns{team}v{vector}"),
        };
        format!("softmax_{kind}{double}_{form}_d{}_{}", self.rank, types.join("_"))
    }

    pub(super) fn target(&self) -> Target {
        let own = if self.ctas_of_row() > 1 { Target::Sm90 } else { Target::Sm80 };
        compute::target_of_all(self.types.iter().copied()).max(own)
    }

    /// Threads of a CTA.
    pub(super) fn threads(&self) -> u32 {
        match self.form {
            Form::Elements { team, .. } => team.max(THREADS),
            Form::Rows { team, .. } | Form::Cluster { team, .. } => team.max(LINE_THREADS),
            Form::Columns { team, .. } => (32 * team).max(LINE_THREADS),
        }
    }

    /// CTAs that take so many rows, a vector of them counting as one.
    pub(super) fn ctas(&self, rows: u32) -> u32 {
        let (Form::Elements { team, .. } | Form::Rows { team, .. } | Form::Cluster { team, .. } | Form::Columns { team, .. }) = self.form;
        rows.div_ceil(self.threads() / team) * self.ctas_of_row()
    }

    /// CTAs of a cluster, which share one row; 1 where there are no clusters.
    pub(super) fn ctas_of_row(&self) -> u32 {
        if let Form::Cluster { ctas, .. } = self.form { ctas } else { 1 }
    }

    /// Rows that lie side by side and are taken together.
    pub(super) fn rows_together(&self) -> u32 {
        if let Form::Columns { vector, .. } = self.form { vector } else { 1 }
    }

    /// Bytes of what is computed in.
    pub(super) fn bytes(&self) -> u32 {
        if self.double { 8 } else { 4 }
    }

    /// Whether operand `i` has an element for each of a row, not one for all of them.
    pub(super) fn is_whole(&self, i: usize) -> bool {
        match self.kind {
            Kind::CrossEntropy { .. } => i == 0,
            Kind::CrossEntropyBackward { .. } => i == 0 || i + 1 == self.types.len(),
            _ => true,
        }
    }

    fn operands(&self) -> Vec<OperandDecl> {
        let outputs = match self.kind {
            Kind::CrossEntropy { lse, kept, .. } => usize::from(lse) + usize::from(!kept),
            _ => 1,
        };
        let declare = |(i, &dtype): (usize, &DType)| {
            let written = i + outputs >= self.types.len();
            match self.form {
                Form::Rows { edges: true, .. } if self.is_whole(i) => strided::lines_declaration(dtype, self.rank, 1, written),
                Form::Rows { vector, .. } | Form::Cluster { vector, .. } | Form::Columns { vector, .. } if self.is_whole(i) => {
                    strided::lines_declaration(dtype, self.rank, vector, written)
                }
                _ => strided::declaration(dtype, self.rank + 1, written),
            }
        };
        self.types.iter().enumerate().map(declare).collect()
    }

    fn has_loss(&self) -> bool {
        matches!(self.kind, Kind::CrossEntropy { .. } | Kind::CrossEntropyBackward { .. })
    }

    /// Where the number of rows comes from that the loss of a gradient was divided by.
    pub(super) fn number(&self) -> Option<Number> {
        if let Kind::CrossEntropyBackward { number, .. } = self.kind { Some(number) } else { None }
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        // Threads that hold 64 bytes of each row have enough of 64 registers, so that an SM has room for twice the CTAs that it would have.
        let threads = match self.form {
            Form::Rows { .. } | Form::Cluster { .. } if !self.double => 1024,
            _ => self.threads(),
        };
        let min_ctas = threads / self.threads();
        let header = Header { name: self.name(), target: self.target(), threads: self.threads(), min_ctas, cluster: self.ctas_of_row() };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        match (self.kind, self.form) {
            (Kind::Count, _) => losses::count(self, k),
            (Kind::Part { .. } | Kind::Join { .. }, _) => losses::join::<T>(self, k),
            (_, Form::Elements { team, held }) => elements::rows::<T>(self, k, team, held),
            (_, Form::Rows { vector, team, held, edges }) => lines::rows::<T>(self, k, lines::Stand { vector, team, held, edges, ctas: 1 }),
            (_, Form::Cluster { vector, team, held, ctas }) => {
                lines::rows::<T>(self, k, lines::Stand { vector, team, held, edges: false, ctas })
            }
            (_, Form::Columns { vector, team }) => columns::rows::<T>(self, k, vector, team),
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
    /// Of the kernel that counts rows.
    pub(super) struct Count / CountArgs of Spec as spec {
        pub(super) rows: u32,
        /// One CTA goes through all rows: it stores the number, else CTAs add to it.
        pub(super) is_alone: u32,
        pub(super) ignore_index: i64,
        pub(super) extents: Extents = spec.rank,
        pub(super) labels: OperandArgs = strided::declaration(spec.types[0], spec.rank + 1, false),
        /// CTAs and launches add to what stands there, an integer of 64 bits.
        pub(super) count: ReadWrite = 8,
    }
}

verdigris_kir::parameters! {
    /// Of the kernels that add up losses.
    pub(super) struct Join / JoinArgs of Spec as spec {
        /// Losses in all, and of a CTA.
        pub(super) rows: u64,
        pub(super) part_rows: u64,
        pub(super) losses: Read = spec.bytes(),
        pub(super) weights: Option<Read> = matches!(spec.kind, Kind::Join { mean: true } | Kind::Part { mean: true }).then(|| spec.bytes()),
        /// The loss; of parts, one sum for each CTA.
        pub(super) loss: Write = if matches!(spec.kind, Kind::Part { .. }) { spec.bytes() } else { spec.types[0].bytes() as u32 },
        pub(super) weight: Option<Write> = (spec.kind == Kind::Part { mean: true }).then(|| spec.bytes()),
    }
}

verdigris_kir::parameters! {
    /// Of the kernels that go through rows.
    pub(super) struct OfRows / OfRowsArgs of Spec as spec {
        /// Vectors of them where they are taken together.
        pub(super) rows: u32,
        pub(super) extent: u32,
        /// The innermost counts in such vectors.
        pub(super) extents: Extents = spec.rank,
        pub(super) operands: Vec<OperandArgs> = spec.operands(),
        pub(super) loss: Option<LossArgs> = spec.has_loss().then(|| spec.clone()),
    }
}

verdigris_kir::parameters! {
    /// Of a loss and its gradient.
    #[derive(Clone, Copy)]
    pub(super) struct LossValues / LossArgs of Spec as spec {
        pub(super) smoothing: f64,
        pub(super) classes: f64,
        pub(super) ignore_index: i64,
        /// Where losses and weights of the rows go to be added up.
        pub(super) sums: Option<[Write; 2]> = matches!(spec.kind, Kind::CrossEntropy { kept: true, .. }).then(|| spec.bytes()),
        /// The number of rows that are not ignored, or of all.
        pub(super) counted: Option<Read> = (spec.number() == Some(Number::Read)).then_some(8),
        pub(super) count: Option<f64> = (spec.number() == Some(Number::Given)).then_some(()),
    }
}
