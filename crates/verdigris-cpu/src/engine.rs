//! The engines of the CPU device, by id.

use std::fmt;

/// Who does a step. Ids are for ever: records speak of engines by them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Engine {
    /// Matrix products: packed panels, register tiles.
    Gemm,
    /// Convolution as products of gathered pixels and filters.
    ConvGemm,
    /// Chains of pointwise ops, a piece that fits the cache at a time.
    Pointwise,
    /// Reductions.
    Reduction,
    /// Pooling and its gradient.
    Pool,
    /// Softmax, cross-entropy and their gradients.
    Softmax,
    /// Movements.
    Movement,
    /// Normalization and its gradient.
    Norm,
    /// Batch normalization, its gradient, and statistics of channels.
    BatchNorm,
    /// Attention and its gradient.
    Attention,
    /// Resampling, borders and their gradients.
    Resample,
    /// Scans.
    Scan,
}

impl Engine {
    /// Every engine.
    pub const ALL: [Engine; 12] = [
        Engine::Gemm,
        Engine::ConvGemm,
        Engine::Pointwise,
        Engine::Reduction,
        Engine::Pool,
        Engine::Softmax,
        Engine::Movement,
        Engine::Norm,
        Engine::BatchNorm,
        Engine::Attention,
        Engine::Resample,
        Engine::Scan,
    ];

    /// The stable id.
    pub const fn id(self) -> &'static str {
        match self {
            Engine::Gemm => "cpu.gemm",
            Engine::ConvGemm => "cpu.conv.gemm",
            Engine::Pointwise => "cpu.pointwise",
            Engine::Reduction => "cpu.reduction",
            Engine::Pool => "cpu.pool",
            Engine::Softmax => "cpu.softmax",
            Engine::Movement => "cpu.movement",
            Engine::Norm => "cpu.norm",
            Engine::BatchNorm => "cpu.batch_norm",
            Engine::Attention => "cpu.attention",
            Engine::Resample => "cpu.resample",
            Engine::Scan => "cpu.scan",
        }
    }

    /// The stable number beside the id.
    pub const fn number(self) -> u32 {
        match self {
            Engine::Gemm => 1,
            Engine::ConvGemm => 2,
            Engine::Pointwise => 3,
            Engine::Reduction => 4,
            Engine::Pool => 5,
            Engine::Softmax => 6,
            Engine::Movement => 7,
            Engine::Norm => 8,
            Engine::BatchNorm => 9,
            Engine::Attention => 10,
            Engine::Resample => 11,
            Engine::Scan => 12,
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.id())
    }
}
