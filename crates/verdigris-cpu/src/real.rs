//! The two types that arithmetic is done in, with their vectors.

use num_traits::AsPrimitive;
use pulp::Simd;

use crate::scratch::{Pool, Scratch};

/// f32 or f64: what a kernel computes in. All other element types are widened to one of them and rounded back.
pub(crate) trait Real:
    bytemuck::Pod
    + Default
    + PartialOrd
    + Send
    + Sync
    + std::fmt::Debug
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::AddAssign
{
    /// A vector register of this processor.
    type Vector<S: Simd>: Copy + bytemuck::Pod;
    /// Columns of a register tile: two vectors of 256 bits.
    const TILE_COLUMNS: usize;

    fn from_f64(value: f64) -> Self;
    fn from_f32(value: f32) -> Self;
    fn from_i64(value: i64) -> Self;
    fn to_f64(self) -> f64;
    fn to_f32(self) -> f32;
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;
    /// `a · b + c`, fused where the processor can.
    fn multiply_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>, c: Self::Vector<S>) -> Self::Vector<S>;
    fn add_vectors<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn vectors<S: Simd>(values: &[Self]) -> &[Self::Vector<S>];
    fn vectors_mut<S: Simd>(values: &mut [Self]) -> &mut [Self::Vector<S>];
    /// Where scratch of this type is kept.
    fn pool(scratch: &Scratch) -> &Pool<Self>;
}

macro_rules! real {
    ($real:ident, $vector:ident, $columns:literal, $splat:ident, $fma:ident, $add:ident, $slice:ident, $slice_mut:ident) => {
        impl Real for $real {
            type Vector<S: Simd> = S::$vector;
            const TILE_COLUMNS: usize = $columns;

            #[inline(always)]
            fn from_f64(value: f64) -> $real {
                value.as_()
            }
            #[inline(always)]
            fn from_f32(value: f32) -> $real {
                value.into()
            }
            #[inline(always)]
            fn from_i64(value: i64) -> $real {
                value as $real
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self.into()
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                self.as_()
            }
            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: $real) -> S::$vector {
                simd.$splat(value)
            }
            #[inline(always)]
            fn multiply_add<S: Simd>(simd: S, a: S::$vector, b: S::$vector, c: S::$vector) -> S::$vector {
                simd.$fma(a, b, c)
            }
            #[inline(always)]
            fn add_vectors<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$add(a, b)
            }
            #[inline(always)]
            fn vectors<S: Simd>(values: &[$real]) -> &[S::$vector] {
                S::$slice(values).0
            }
            #[inline(always)]
            fn vectors_mut<S: Simd>(values: &mut [$real]) -> &mut [S::$vector] {
                S::$slice_mut(values).0
            }
            fn pool(scratch: &Scratch) -> &Pool<$real> {
                &scratch.$real
            }
        }
    };
}

real!(f32, f32s, 16, splat_f32s, mul_add_e_f32s, add_f32s, as_simd_f32s, as_mut_simd_f32s);
real!(f64, f64s, 8, splat_f64s, mul_add_e_f64s, add_f64s, as_simd_f64s, as_mut_simd_f64s);
