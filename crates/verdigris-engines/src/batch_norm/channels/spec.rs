//! What shapes a kernel: which stage of which computation, how its threads stand, and what it reads and writes.

use serde::{Deserialize, Serialize};
use verdigris_graph::{Real, UnaryOp};
use verdigris_kir::ir::Target;
use verdigris_tensor::DType;

use super::operands::{Name, WholeDecl};
use crate::fuse::operand::OperandDecl;
use crate::fuse::strided;
use crate::fuse::{compute, functions};

/// Threads of a CTA.
pub(super) const THREADS: u32 = 256;
/// Its warps.
pub(super) const WARPS: u32 = THREADS / 32;
/// Points whose loads come before the first of them is used.
pub(super) const UNROLL: u32 = 4;
/// Shared memory of a CTA for what it keeps: of two on an SM, beside what their threads join of lines.
const ROOM_BYTES: u32 = 96 * 1024;

/// Which part of the computation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stage {
    /// Sums of parts go to scratch.
    Sums,
    /// Parts are joined; what belongs to channels is written.
    Join,
    /// What has an element for each of `x` is written.
    Apply,
    /// All three, with barriers of the grid between.
    Fused,
    /// All three, of a CTA's channels by itself: its part is all of them.
    Alone,
    /// All three, by teams of CTAs that take one block of channels after the other, with barriers of the team between, and much of what was read first
    /// kept in shared memory.
    Kept,
}

impl Stage {
    fn word(self) -> &'static str {
        match self {
            Stage::Sums => "sums",
            Stage::Join => "join",
            Stage::Apply => "apply",
            Stage::Fused => "fused",
            Stage::Alone => "alone",
            Stage::Kept => "kept",
        }
    }
}

/// What is computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Pass {
    Statistics,
    Forward,
    Backward,
}

/// How threads stand.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    /// So many threads along channels, each with a vector of them.
    Lines { across: u32 },
    /// All threads along the elements of one channel, each with a vector of them.
    Planes,
    /// So many threads along the planes of neighbouring channels, each with a vector of elements, of one channel or of several.
    Images { across: u32 },
}

/// Activations that networks have behind a normalization, besides ReLU: one kernel has them all, and branches by an argument once for each vector, so that a catalog holds one
/// kernel instead of three.
pub(super) const COMMON: [UnaryOp; 3] = [UnaryOp::Silu, UnaryOp::HardSwish, UnaryOp::Clamp { lower: Real(0.0), upper: Real(0.0) }];

/// The activations of the kernel that computes one of them, and which of them it is.
pub(super) fn kernel_of(activation: UnaryOp) -> (Vec<UnaryOp>, usize) {
    let (f, _) = functions::parted(activation);
    COMMON.iter().position(|&common| common == f).map_or((vec![f], 0), |place| (COMMON.to_vec(), place))
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    pub stage: Stage,
    pub pass: Pass,
    pub relu: bool,
    /// Activations other than ReLU that the kernel has, of which an argument picks one; their attributes, here 0, are arguments too.
    pub activations: Vec<UnaryOp>,
    pub form: Form,
    /// Neighbours that one access takes.
    pub vector: u32,
    /// Dims of the rows.
    pub rank: usize,
    pub double: bool,
    /// Its launch starts while the one in front of it ends.
    pub overlaps: bool,
    /// What the stage reads and writes, in the order of the problem's operands.
    pub operands: Vec<(Name, DType)>,
}

impl Spec {
    pub(super) fn name(&self) -> String {
        let pass = match self.pass {
            Pass::Statistics => "statistics",
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        };
        let form = match self.form {
            Form::Lines { across } => format!("lines{across}"),
            Form::Planes => "planes".to_owned(),
            Form::Images { across } => format!("images{across}"),
        };
        let flag = |set: bool, word: &str| if set { format!("_{word}") } else { String::new() };
        let operands: String = self.operands.iter().map(|(name, dtype)| format!("_{}{dtype}", name.word())).collect();
        let (stage, double, relu) = (self.stage.word(), flag(self.double, "f64"), flag(self.relu, "relu"));
        let activations: String = self.activations.iter().map(|f| format!("_{}", f.name())).collect();
        let overlapped = flag(self.overlaps, "overlapped");
        format!("batch_norm_{pass}_{stage}{relu}{activations}{double}_{form}x{}_d{}{operands}{overlapped}", self.vector, self.rank)
    }

    /// Without what does not shape the stage: a join knows nothing of how elements lie, and the sums of statistics nothing of what follows.
    pub(super) fn reduced_to_stage(mut self) -> Spec {
        match (self.stage, self.pass) {
            (Stage::Join, _) => {
                (self.rank, self.relu, self.form, self.vector) = (0, false, Form::Lines { across: 32 }, 1);
                self.activations = Vec::new();
            }
            (Stage::Sums, Pass::Forward) => (self.relu, self.activations, self.pass) = (false, Vec::new(), Pass::Statistics),
            _ => {}
        }
        self
    }

    pub(super) fn target(&self) -> Target {
        // Chips before have less shared memory than two CTAs keep.
        let own = if self.overlaps || self.stage == Stage::Kept { Target::Sm90 } else { Target::Sm80 };
        compute::target_of_all(self.operands.iter().map(|(_, dtype)| *dtype)).max(own)
    }

    /// CTAs that an SM holds at once, by which registers are cut: a gradient holds more values of each channel, and an addend more elements on their
    /// way. Shared memory holds what is kept of two.
    pub(super) fn ctas_per_sm(&self) -> u32 {
        let is_large = self.stage == Stage::Kept
            || self.double
            || self.pass == Pass::Backward
            || self.operands.iter().any(|(name, _)| *name == Name::Add);
        if is_large { 2 } else { 3 }
    }

    /// Threads along channels.
    pub(super) fn across(&self) -> u32 {
        match self.form {
            Form::Lines { across } | Form::Images { across } => across,
            Form::Planes => 1,
        }
    }

    /// Whether elements of planes stand in the place of channels.
    pub(super) fn is_image(&self) -> bool {
        matches!(self.form, Form::Images { .. })
    }

    /// Points that a CTA has at a time.
    pub(super) fn lines(&self) -> u32 {
        THREADS / self.across()
    }

    /// Channels of a CTA.
    pub(super) fn width(&self) -> u32 {
        self.across() * self.channels_of_thread()
    }

    /// Channels of a thread.
    pub(super) fn channels_of_thread(&self) -> u32 {
        if self.form == Form::Planes { 1 } else { self.vector }
    }

    /// Elements of a channel that a point has.
    pub(super) fn elements_of_point(&self) -> u32 {
        if self.form == Form::Planes { self.vector } else { 1 }
    }

    /// Bytes of what is computed in.
    pub(super) fn bytes(&self) -> u32 {
        if self.double { 8 } else { 4 }
    }

    pub(super) fn is_written(&self, name: Name) -> bool {
        match name {
            Name::Y => self.pass == Pass::Forward,
            Name::Dadd => self.stage != Stage::Apply,
            Name::Mean | Name::Inv => self.pass != Pass::Backward,
            Name::Dx | Name::Dscale | Name::Dbias | Name::M2 | Name::NextMean | Name::NextVar => true,
            Name::X | Name::Dy | Name::Add | Name::Scale | Name::Bias | Name::RunningMean | Name::RunningVar => false,
        }
    }

    pub(super) fn wholes(&self) -> Vec<WholeDecl> {
        let wholes = self.operands.iter().filter(|(name, _)| name.is_whole());
        wholes.map(|&(name, dtype)| WholeDecl { dtype, vector: self.vector, rank: self.rank, written: self.is_written(name) }).collect()
    }

    pub(super) fn vectors(&self) -> Vec<OperandDecl> {
        let vectors = self.operands.iter().filter(|(name, _)| !name.is_whole());
        vectors.map(|&(name, dtype)| strided::declaration(dtype, 1, self.is_written(name))).collect()
    }

    /// Whether the stage leaves sums of parts, reads them, leaves what was joined, and reads that.
    pub(super) fn scratch(&self) -> [bool; 4] {
        match self.stage {
            Stage::Sums => [true, false, false, false],
            Stage::Join => [false, true, self.pass != Pass::Statistics, false],
            Stage::Apply => [false, false, false, true],
            Stage::Fused | Stage::Kept => [true, true, self.pass != Pass::Statistics, self.pass != Pass::Statistics],
            Stage::Alone => [false, false, self.pass != Pass::Statistics, self.pass != Pass::Statistics],
        }
    }

    /// The alignment of two arrays in scratch, where the stage uses them so.
    pub(super) fn array(&self, use_of: usize) -> Option<u32> {
        let vector = if use_of == 3 && !self.is_image() { self.channels_of_thread() } else { 1 };
        self.scratch()[use_of].then(|| (vector * self.bytes()).min(16))
    }

    /// Attributes of the activations: as many arguments as that with the most of them takes.
    pub(super) fn attributes(&self) -> usize {
        self.activations.iter().map(|&f| functions::parted(f).1.len()).max().unwrap_or(0)
    }

    // ---- what is kept -------------------------------------------------------------------------------------------------------

    /// Bytes of a thread's vector of each operand that the sums read, in the order in which they are read.
    pub(super) fn kept_bytes(&self) -> Vec<u32> {
        let is_kept = |name: Name| match self.pass {
            Pass::Backward => name.is_whole() && !self.is_written(name),
            Pass::Forward | Pass::Statistics => name == Name::X,
        };
        let kept = self.operands.iter().filter(|(name, _)| is_kept(*name));
        kept.map(|(_, dtype)| self.vector * dtype.bytes() as u32).collect()
    }

    /// Rows of lines that the room of a CTA holds.
    pub(super) fn room_rows(&self) -> u32 {
        let row_bytes = THREADS * self.kept_bytes().iter().sum::<u32>();
        (ROOM_BYTES / row_bytes) & !(self.rows_of_turn() - 1)
    }

    /// Rows that a thread has on the way at a time while it goes through what is kept and what is not: fewer where each is of several operands.
    pub(super) fn rows_of_turn(&self) -> u32 {
        if self.kept_bytes().len() == 1 { UNROLL } else { UNROLL / 2 }
    }

    /// Shared memory of a CTA: the room, and a pair of arrays for lines or warps.
    pub(super) fn kept_shared_bytes(&self) -> u32 {
        ROOM_BYTES + THREADS * self.channels_of_thread() * 2 * self.bytes() + 1024
    }

    /// Whether threads can keep their vectors: asynchronous copies take 4, 8 and 16 bytes.
    pub(super) fn can_keep(&self) -> bool {
        let fits = |bytes: &u32| matches!(bytes, 4 | 8 | 16);
        let whole_words =
            self.operands.iter().all(|(name, dtype)| *name != Name::Add || (self.vector * dtype.bytes() as u32).is_multiple_of(4));
        self.vector > 1
            && self.pass != Pass::Statistics
            && !self.double
            && !self.is_image()
            && whole_words
            && self.kept_bytes().iter().all(fits)
    }
}
