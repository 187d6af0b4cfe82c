//! Operands by name, and those that have an element for each of `x`.

use serde::{Deserialize, Serialize};
use verdigris_graph::{BatchNormProblem, View};
use verdigris_kir::face::Val;
use verdigris_kir::inst::Cache;
use verdigris_tensor::DType;

use crate::fuse::value::{AnyVal, elements_of, load_raw, load_words, store_values_with};
use crate::layout::space::{Access, Memory, element};

macro_rules! names {
    ($($name:ident $text:literal,)*) => {
        /// What an operand is to the problem.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub(super) enum Name {
            $($name,)*
        }

        impl Name {
            /// The name that the problem gives it.
            pub(super) fn word(self) -> &'static str {
                match self {
                    $(Name::$name => $text,)*
                }
            }

            /// That of the problem's operand.
            pub(super) fn of(word: &str) -> Option<Name> {
                match word {
                    $($text => Some(Name::$name),)*
                    _ => None,
                }
            }
        }
    };
}

names! {
    X "x",
    Add "add",
    Y "y",
    Dy "dy",
    Dx "dx",
    Dadd "dadd",
    Scale "scale",
    Bias "bias",
    RunningMean "running_mean",
    RunningVar "running_var",
    Mean "mean",
    Inv "inv",
    M2 "m2",
    NextMean "next_mean",
    NextVar "next_var",
    Dscale "dscale",
    Dbias "dbias",
}

impl Name {
    /// Whether it has an element for each of `x`.
    pub(super) fn is_whole(self) -> bool {
        BatchNormProblem::is_whole(self.word())
    }
}

/// What the parameters of an operand of elements are made from.
#[derive(Clone, Copy, Debug)]
pub(super) struct WholeDecl {
    pub dtype: DType,
    /// Neighbours that one access takes.
    pub vector: u32,
    /// Dims of the rows.
    pub rank: usize,
    pub written: bool,
}

verdigris_kir::parameters! {
    /// Parameters of an operand of elements; strides in bytes. What is read may lie where something is written, so loads never take the read-only path.
    #[derive(Clone, Debug)]
    pub(super) struct WholeValues / #[derive(Clone, Debug)] WholeArgs of WholeDecl as decl {
        first: Memory = Access { written: decl.written, bytes: (decl.vector * decl.dtype.bytes() as u32).min(16) },
        row_strides: Vec<u64> = vec![(); decl.rank],
        channel_stride: u64,
    }
}

impl WholeArgs {
    /// Of a view over `[rows…, channels]`.
    pub(super) fn of(view: &View) -> WholeArgs {
        let bytes = view.dtype.bytes() as u64;
        let mut strides: Vec<u64> = view.strides.iter().map(|stride| stride * bytes).collect();
        let channel_stride = strides.pop().unwrap_or(0);
        WholeArgs { first: element(view, []), row_strides: strides, channel_stride }
    }
}

/// An operand of elements in a kernel.
#[derive(Clone, Debug)]
pub(super) struct Whole<'k> {
    dtype: DType,
    vector: u32,
    address: Val<'k, u64>,
    row_strides: Vec<Val<'k, u64>>,
    channel_stride: Val<'k, u64>,
}

impl<'k> Whole<'k> {
    pub(super) fn new(dtype: DType, vector: u32, values: WholeValues<'k>) -> Self {
        let WholeValues { first, row_strides, channel_stride } = values;
        Whole { dtype, vector, address: first.address(), row_strides, channel_stride }
    }

    /// From a channel on.
    pub(super) fn at_channel(&self, channel: Val<'k, u32>) -> Self {
        Whole { address: self.address + channel.widen() * self.channel_stride, ..self.clone() }
    }

    pub(super) fn address(&self, index: &[Val<'k, u32>]) -> Val<'k, u64> {
        index.iter().zip(&self.row_strides).fold(self.address, |address, (&i, &stride)| address + i.widen() * stride)
    }

    /// The neighbours from a row on.
    pub(super) fn load(&self, index: &[Val<'k, u32>]) -> Vec<AnyVal<'k>> {
        self.load_many(index, self.vector)
    }

    /// So many neighbours from a row on.
    pub(super) fn load_many(&self, index: &[Val<'k, u32>], many: u32) -> Vec<AnyVal<'k>> {
        let raws = load_raw(self.address.kernel(), self.dtype, self.address(index), many);
        raws.into_iter().map(|raw| AnyVal::Stored(self.dtype, raw)).collect()
    }

    /// The words of the neighbours from a row on.
    pub(super) fn words(&self, index: &[Val<'k, u32>], cache: Cache) -> Vec<Val<'k, u32>> {
        load_words(self.address.kernel(), self.address(index), self.bytes(), cache)
    }

    /// The neighbours that stand in words.
    pub(super) fn elements(&self, words: &[Val<'k, u32>]) -> Vec<AnyVal<'k>> {
        let raws = elements_of(self.address.kernel(), self.dtype, words, self.vector);
        raws.into_iter().map(|raw| AnyVal::Stored(self.dtype, raw)).collect()
    }

    /// Bytes of neighbours.
    pub(super) fn bytes(&self) -> u32 {
        self.vector * self.dtype.bytes() as u32
    }

    /// Rounds and stores the neighbours from a row on.
    pub(super) fn store(&self, index: &[Val<'k, u32>], values: &[AnyVal<'k>], cache: Cache) {
        store_values_with(self.address.kernel(), self.dtype, self.address(index), values, cache);
    }
}
