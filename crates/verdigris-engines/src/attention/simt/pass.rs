//! The launches of a problem, and which operands each has.

use serde::{Deserialize, Serialize};

use super::name::Name;

/// What a launch computes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Pass {
    Forward,
    RowSums,
    Queries,
    Keys,
    Values,
    Bias,
    Sinks,
    /// The gradient of what the function of scores reads by a number: an element by those who own it.
    Operand(u32),
    /// Of one that is a table, the shares of a few queries each.
    Shares(u32),
    /// And their sums.
    SumOfShares(u32),
}

impl Pass {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::RowSums => "row_sums",
            Pass::Queries => "queries",
            Pass::Keys => "keys",
            Pass::Values => "values",
            Pass::Bias => "bias",
            Pass::Sinks => "sinks",
            Pass::Operand(_) => "operand",
            Pass::Shares(_) => "shares",
            Pass::SumOfShares(_) => "sum_of_shares",
        }
    }

    /// Whether it works out scores.
    pub(super) const fn has_scores(self) -> bool {
        !matches!(self, Pass::RowSums | Pass::Sinks | Pass::SumOfShares(_))
    }

    /// Whether rows gather elements.
    pub(super) const fn has_columns(self) -> bool {
        matches!(self, Pass::Forward | Pass::Queries | Pass::Keys | Pass::Values)
    }

    /// Whether rows are keys.
    pub(super) const fn has_keys(self) -> bool {
        matches!(self, Pass::Keys | Pass::Values)
    }

    /// Whether it needs `ds`.
    pub(super) const fn has_gradient(self) -> bool {
        matches!(self, Pass::Queries | Pass::Keys | Pass::Bias | Pass::Operand(_) | Pass::Shares(_))
    }

    /// Whether the slope of a function of scores is a factor of what it sums: for `dt` that with respect to the product, else to what is read.
    pub(super) const fn has_slope(self) -> bool {
        matches!(self, Pass::Queries | Pass::Keys | Pass::Operand(_) | Pass::Shares(_))
    }

    pub(super) const fn reads_sums(self) -> bool {
        self.has_gradient() || matches!(self, Pass::Sinks)
    }

    /// Whether it reads or writes this operand.
    pub(super) const fn has(self, name: Name) -> bool {
        match name {
            Name::Q | Name::K | Name::Bias | Name::Mask | Name::Slopes | Name::KvLengths | Name::KvOffsets => self.has_scores(),
            Name::BlockMap | Name::MaskBlocks => self.has_scores(),
            Name::Score0 | Name::Score1 | Name::Score2 | Name::Score3 => self.has_scores(),
            Name::V => self.has_gradient() || matches!(self, Pass::Forward),
            Name::QLengths | Name::QOffsets => self.has_scores() || matches!(self, Pass::Sinks),
            Name::Sinks => matches!(self, Pass::Forward | Pass::Sinks),
            Name::PageTable | Name::QDescale | Name::KDescale | Name::VDescale | Name::MaxScores => matches!(self, Pass::Forward),
            Name::O => matches!(self, Pass::Forward | Pass::RowSums),
            Name::LogSumExp => !matches!(self, Pass::RowSums | Pass::SumOfShares(_)),
            Name::Do => self.has_gradient() || matches!(self, Pass::Values | Pass::RowSums),
            Name::Dq => matches!(self, Pass::Queries),
            Name::Dk => matches!(self, Pass::Keys),
            Name::Dv => matches!(self, Pass::Values),
            Name::Dbias => matches!(self, Pass::Bias),
            Name::Dsinks => matches!(self, Pass::Sinks),
            Name::DScore0 => self.gives(0),
            Name::DScore1 => self.gives(1),
            Name::DScore2 => self.gives(2),
            Name::DScore3 => self.gives(3),
        }
    }

    /// Whether it writes the gradient of what the function reads by this number.
    const fn gives(self, number: u32) -> bool {
        match self {
            Pass::Operand(own) | Pass::SumOfShares(own) => own == number,
            _ => false,
        }
    }

    pub(super) const fn writes(self, name: Name) -> bool {
        match name {
            Name::O | Name::LogSumExp | Name::MaxScores => matches!(self, Pass::Forward),
            Name::Dq | Name::Dk | Name::Dv | Name::Dbias | Name::Dsinks => true,
            Name::DScore0 | Name::DScore1 | Name::DScore2 | Name::DScore3 => true,
            _ => false,
        }
    }
}
