//! The operands, by name.

use serde::{Deserialize, Serialize};

/// An operand of the problem.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Name {
    Q,
    K,
    V,
    Bias,
    Mask,
    Slopes,
    Sinks,
    QLengths,
    KvLengths,
    QOffsets,
    KvOffsets,
    PageTable,
    QDescale,
    KDescale,
    VDescale,
    BlockMap,
    MaskBlocks,
    Score0,
    Score1,
    Score2,
    Score3,
    O,
    LogSumExp,
    MaxScores,
    Do,
    Dq,
    Dk,
    Dv,
    Dbias,
    Dsinks,
    DScore0,
    DScore1,
    DScore2,
    DScore3,
}

impl Name {
    /// What a function of scores reads.
    pub(super) const SCORE_OPERANDS: [Name; 4] = [Name::Score0, Name::Score1, Name::Score2, Name::Score3];

    /// Their gradients.
    pub(super) const D_SCORE: [Name; 4] = [Name::DScore0, Name::DScore1, Name::DScore2, Name::DScore3];

    const ALL: [Name; 34] = [
        Name::Q,
        Name::K,
        Name::V,
        Name::Bias,
        Name::Mask,
        Name::Slopes,
        Name::Sinks,
        Name::QLengths,
        Name::KvLengths,
        Name::QOffsets,
        Name::KvOffsets,
        Name::PageTable,
        Name::QDescale,
        Name::KDescale,
        Name::VDescale,
        Name::BlockMap,
        Name::MaskBlocks,
        Name::Score0,
        Name::Score1,
        Name::Score2,
        Name::Score3,
        Name::O,
        Name::LogSumExp,
        Name::MaxScores,
        Name::Do,
        Name::Dq,
        Name::Dk,
        Name::Dv,
        Name::Dbias,
        Name::Dsinks,
        Name::DScore0,
        Name::DScore1,
        Name::DScore2,
        Name::DScore3,
    ];

    /// As the problem has it.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Name::Q => "q",
            Name::K => "k",
            Name::V => "v",
            Name::Bias => "bias",
            Name::Mask => "mask",
            Name::Slopes => "slopes",
            Name::Sinks => "sinks",
            Name::QLengths => "q_lengths",
            Name::KvLengths => "kv_lengths",
            Name::QOffsets => "q_offsets",
            Name::KvOffsets => "kv_offsets",
            Name::PageTable => "page_table",
            Name::QDescale => "q_descale",
            Name::KDescale => "k_descale",
            Name::VDescale => "v_descale",
            Name::BlockMap => "block_map",
            Name::MaskBlocks => "mask_blocks",
            Name::Score0 => "score_0",
            Name::Score1 => "score_1",
            Name::Score2 => "score_2",
            Name::Score3 => "score_3",
            Name::O => "o",
            Name::LogSumExp => "log_sum_exp",
            Name::MaxScores => "max_scores",
            Name::Do => "d_o",
            Name::Dq => "dq",
            Name::Dk => "dk",
            Name::Dv => "dv",
            Name::Dbias => "dbias",
            Name::Dsinks => "dsinks",
            Name::DScore0 => "d_score_0",
            Name::DScore1 => "d_score_1",
            Name::DScore2 => "d_score_2",
            Name::DScore3 => "d_score_3",
        }
    }

    pub(super) fn of(word: &str) -> Option<Name> {
        Name::ALL.into_iter().find(|name| name.word() == word)
    }
}
