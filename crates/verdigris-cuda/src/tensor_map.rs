//! Tensor maps: what TMA is told about a tensor, checked here and encoded by the driver.
//!
//! The driver answers an illegal map with `CUDA_ERROR_INVALID_VALUE` and no word on which of a dozen limits was broken, so
//! all of them are checked first ([`check`]); the rules are those of `cuTensorMapEncodeTiled` and `cuTensorMapEncodeIm2col` in
//! the driver's manual. Rules that the manual states and the driver does not enforce (that each stride be a multiple of the one
//! before it) are left out: the usual panel layout `{64, rows, cols / 64}` breaks them.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys;
use verdigris_kir::ir::{MapType, Swizzle};
use verdigris_kir::program::{Fill, L2Promotion, MapSpec};

use crate::device::Context;
use crate::driver::Driver;
use crate::error::{Doing, Error};

/// An encoded tensor map: 128 opaque bytes, as a kernel parameter holds them.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    words: [u64; 16],
}

impl TensorMap {
    /// The bytes of the parameter.
    pub fn bytes(&self) -> [u8; 128] {
        let mut bytes = [0; 128];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.words) {
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// A tensor that TMA cannot address so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The rank is out of range.
    #[error("tensor map: rank {rank}, must be {least} to 5 ({mode})")]
    Rank {
        /// The rank.
        rank: u32,
        /// The least that the mode takes.
        least: u32,
        /// `tiled` or `im2col`.
        mode: &'static str,
    },
    /// A list has the wrong length for the rank.
    #[error("tensor map: {given} {what} for rank {rank}, must be {expected}")]
    Length {
        /// Which list.
        what: &'static str,
        /// Its length.
        given: usize,
        /// The rank.
        rank: u32,
        /// The length that the rank asks for.
        expected: usize,
    },
    /// The tensor's address is not aligned.
    #[error("tensor map: address {address:#x} is not a multiple of 16 bytes; copy the operand or use direct loads")]
    Address {
        /// The address.
        address: u64,
    },
    /// A number is outside its range.
    #[error("tensor map: {what} of dimension {dimension} is {value}, must be {least} to {most}")]
    Range {
        /// Which number.
        what: &'static str,
        /// The dimension, 0 innermost.
        dimension: usize,
        /// The value.
        value: i128,
        /// Least legal value.
        least: i128,
        /// Greatest legal value.
        most: i128,
    },
    /// A stride is not aligned.
    #[error(
        "tensor map: the stride of dimension {dimension} is {stride_bytes} bytes, not a multiple of 16; pad the rows or use direct loads"
    )]
    Stride {
        /// The dimension, 1 and up.
        dimension: usize,
        /// The stride.
        stride_bytes: u64,
    },
    /// The innermost extent of the box does not suit shared memory.
    #[error("tensor map: the box is {inner_bytes} bytes wide, must be a multiple of 16")]
    InnerBytes {
        /// Innermost extent times element size.
        inner_bytes: u64,
    },
    /// The box is wider than the swizzle's row.
    #[error("tensor map: the box is {inner_bytes} bytes wide, the swizzle's rows {span_bytes}; split the box or widen the swizzle")]
    SwizzleSpan {
        /// Innermost extent times element size.
        inner_bytes: u64,
        /// The swizzle's row.
        span_bytes: u32,
    },
    /// NaN fill for a type without NaN.
    #[error("tensor map: {ty:?} elements have no NaN to fill with; fill with zero")]
    Fill {
        /// The element type.
        ty: MapType,
    },
    /// No pixel lies between the corners.
    #[error("tensor map: the im2col corners of dimension {dimension} leave no pixel: extent {extent} from {lower} to {upper} past the end")]
    Corners {
        /// The dimension, 1 and up.
        dimension: usize,
        /// Its extent.
        extent: u64,
        /// The lower corner.
        lower: i32,
        /// The upper corner.
        upper: i32,
    },
}

/// What the address of a tensor is a multiple of.
pub const ALIGNMENT_BYTES: u64 = 16;
/// Most elements of a box along one dimension.
const MAX_BOX: u32 = 256;
/// Most pixels of an im2col column.
const MAX_COLUMN: u32 = 1024;

/// Checks a map against every limit of TMA, but for the address.
///
/// # Errors
/// The first broken limit.
pub fn check(spec: &MapSpec) -> Result<(), MapError> {
    let decl = &spec.decl;
    let (least, mode) = if decl.im2col { (3, "im2col") } else { (1, "tiled") };
    if !(least..=5).contains(&decl.rank) {
        return Err(MapError::Rank { rank: decl.rank, least, mode });
    }
    let rank = decl.rank as usize;
    let spatial = if decl.im2col { rank - 2 } else { 0 };
    for (what, given, expected) in [
        ("extents", spec.dims.len(), rank),
        ("strides", spec.strides_bytes.len(), rank - 1),
        ("element strides", spec.element_strides.len(), rank),
        ("box extents", decl.box_dims.len(), if decl.im2col { 2 } else { rank }),
        ("lower corners", spec.lower_corner.len(), spatial),
        ("upper corners", spec.upper_corner.len(), spatial),
    ] {
        if given != expected {
            return Err(MapError::Length { what, given, rank: decl.rank, expected });
        }
    }
    for (dimension, &extent) in spec.dims.iter().enumerate() {
        range("the extent", dimension, extent, 1, 1_u64 << 32)?;
    }
    for (i, &stride_bytes) in spec.strides_bytes.iter().enumerate() {
        let dimension = i + 1;
        if !stride_bytes.is_multiple_of(16) {
            return Err(MapError::Stride { dimension, stride_bytes });
        }
        range("the stride in bytes", dimension, stride_bytes, 0, (1_u64 << 40) - 1)?;
    }
    for (dimension, &stride) in spec.element_strides.iter().enumerate() {
        range("the traversal stride", dimension, stride, 1, 8_u32)?;
    }
    if decl.im2col {
        range("channels per pixel", 0, decl.box_dims[0], 1, MAX_BOX)?;
        range("pixels per column", 1, decl.box_dims[1], 1, MAX_COLUMN)?;
        check_corners(spec)?;
    } else {
        for (dimension, &extent) in decl.box_dims.iter().enumerate() {
            range("the box", dimension, extent, 1, MAX_BOX)?;
        }
    }
    let inner_bytes = u64::from(decl.box_dims[0]) * u64::from(decl.ty.bytes());
    if !inner_bytes.is_multiple_of(16) {
        return Err(MapError::InnerBytes { inner_bytes });
    }
    let span_bytes = decl.swizzle.span_bytes();
    if decl.swizzle != Swizzle::None && inner_bytes > u64::from(span_bytes) {
        return Err(MapError::SwizzleSpan { inner_bytes, span_bytes });
    }
    let has_nan = matches!(decl.ty, MapType::F16 | MapType::Bf16 | MapType::F32 | MapType::Tf32 | MapType::F64);
    if spec.fill == Fill::Nan && !has_nan {
        return Err(MapError::Fill { ty: decl.ty });
    }
    Ok(())
}

fn check_corners(spec: &MapSpec) -> Result<(), MapError> {
    let most: i32 = match spec.decl.rank {
        3 => (1 << 15) - 1,
        4 => (1 << 7) - 1,
        _ => (1 << 4) - 1,
    };
    for (i, (&lower, &upper)) in spec.lower_corner.iter().zip(&spec.upper_corner).enumerate() {
        let dimension = i + 1;
        range("the lower corner", dimension, lower, -most - 1, most)?;
        range("the upper corner", dimension, upper, -most - 1, most)?;
        let extent = spec.dims[dimension];
        if i128::from(extent) + i128::from(upper) - i128::from(lower) <= 0 {
            return Err(MapError::Corners { dimension, extent, lower, upper });
        }
    }
    Ok(())
}

fn range<T: Into<i128> + Copy>(what: &'static str, dimension: usize, value: T, least: T, most: T) -> Result<(), MapError> {
    let (value, least, most) = (value.into(), least.into(), most.into());
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(MapError::Range { what, dimension, value, least, most })
}

/// Encodes the map of a tensor at a device address of the context. Costs tens of nanoseconds beside the checks and the entry into the
/// context: the driver only encodes where one is current.
///
/// # Errors
/// [`Error::Map`] where TMA cannot address the tensor so, [`Error::MissingSymbol`], [`Error::Driver`].
pub fn encode(context: &Context, address: u64, spec: &MapSpec) -> Result<TensorMap, Error> {
    check(spec)?;
    let _current = context.enter()?;
    encode_checked(context.driver(), address, spec)
}

/// As [`encode`], for a spec that [`check`] has passed before, on a thread where the tensor's context is current. It is done at each
/// execution.
pub(crate) fn encode_checked(driver: &Driver, address: u64, spec: &MapSpec) -> Result<TensorMap, Error> {
    if !address.is_multiple_of(ALIGNMENT_BYTES) {
        return Err(MapError::Address { address }.into());
    }
    let decl = &spec.decl;
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let pointer = std::ptr::without_provenance_mut::<c_void>(usize::try_from(address).unwrap_or(usize::MAX));
    let ty = element(decl.ty);
    let interleave = sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE;
    let (swizzle, promotion, fill) = (swizzle(decl.swizzle), promotion(spec.l2), fill(spec.fill));
    let api = driver.api();
    if decl.im2col {
        let (lower, upper) = (spec.lower_corner.as_ptr().cast::<c_int>(), spec.upper_corner.as_ptr().cast::<c_int>());
        let (channels, pixels) = (decl.box_dims[0], decl.box_dims[1]);
        // SAFETY: the lists have the lengths that the rank asks for, as `check` saw to; the address is only stored.
        unsafe {
            api.cuTensorMapEncodeIm2col(
                &mut map,
                ty,
                decl.rank,
                pointer,
                spec.dims.as_ptr(),
                spec.strides_bytes.as_ptr(),
                lower,
                upper,
                channels,
                pixels,
                spec.element_strides.as_ptr(),
                interleave,
                swizzle,
                promotion,
                fill,
            )
        }
        .doing(|| format!("encoding the im2col tensor map {spec:?}"))?;
    } else {
        // SAFETY: as above.
        unsafe {
            api.cuTensorMapEncodeTiled(
                &mut map,
                ty,
                decl.rank,
                pointer,
                spec.dims.as_ptr(),
                spec.strides_bytes.as_ptr(),
                decl.box_dims.as_ptr(),
                spec.element_strides.as_ptr(),
                interleave,
                swizzle,
                promotion,
                fill,
            )
        }
        .doing(|| format!("encoding the tensor map {spec:?}"))?;
    }
    let mut words = map.opaque;
    mend_small_tensor(&mut words, driver.version(), span_bytes(spec));
    Ok(TensorMap { words })
}

/// Bytes from the tensor's first element to the end of its last.
pub(crate) fn span_bytes(spec: &MapSpec) -> u64 {
    let inner = (spec.dims[0] - 1).saturating_mul(spec.decl.ty.bytes().into());
    let outer = spec.dims[1..].iter().zip(&spec.strides_bytes).map(|(&extent, &stride)| (extent - 1).saturating_mul(stride));
    outer.fold(inner + u64::from(spec.decl.ty.bytes()), u64::saturating_add)
}

/// Drivers up to 13.1 set a bit in the maps of small tensors that must be clear; CUTLASS 4.7 clears it on the same condition.
fn mend_small_tensor(words: &mut [u64; 16], driver_version: u32, span_bytes: u64) {
    const LAST_DRIVER: u32 = 13_010;
    const SMALL_BYTES: u64 = 131_072;
    if driver_version <= LAST_DRIVER && span_bytes < SMALL_BYTES {
        words[1] &= !(1 << 21);
    }
}

fn element(ty: MapType) -> sys::CUtensorMapDataType {
    use sys::CUtensorMapDataType as T;
    match ty {
        MapType::U8 => T::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        MapType::U16 => T::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        MapType::U32 => T::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        MapType::S32 => T::CU_TENSOR_MAP_DATA_TYPE_INT32,
        MapType::U64 => T::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        MapType::F16 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        MapType::Bf16 => T::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        MapType::F32 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        MapType::Tf32 => T::CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
        MapType::F64 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
    }
}

fn swizzle(swizzle: Swizzle) -> sys::CUtensorMapSwizzle {
    use sys::CUtensorMapSwizzle as S;
    match swizzle {
        Swizzle::None => S::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::B32 => S::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::B64 => S::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::B128 => S::CU_TENSOR_MAP_SWIZZLE_128B,
    }
}

fn promotion(l2: L2Promotion) -> sys::CUtensorMapL2promotion {
    use sys::CUtensorMapL2promotion as P;
    match l2 {
        L2Promotion::None => P::CU_TENSOR_MAP_L2_PROMOTION_NONE,
        L2Promotion::B128 => P::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        L2Promotion::B256 => P::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    }
}

fn fill(fill: Fill) -> sys::CUtensorMapFloatOOBfill {
    use sys::CUtensorMapFloatOOBfill as F;
    match fill {
        Fill::Zero => F::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        Fill::Nan => F::CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_kir::ir::{Access, MapDecl};

    /// A legal map of a bf16 matrix of 1000 rows and 512 columns, in boxes of 128 rows.
    fn matrix() -> MapSpec {
        MapSpec {
            decl: MapDecl {
                ty: MapType::Bf16,
                rank: 2,
                box_dims: vec![64, 128],
                im2col: false,
                swizzle: Swizzle::B128,
                access: Access::Read,
            },
            dims: vec![512, 1000],
            strides_bytes: vec![1024],
            element_strides: vec![1, 1],
            lower_corner: vec![],
            upper_corner: vec![],
            fill: Fill::Zero,
            l2: L2Promotion::B256,
        }
    }

    /// A legal map of a bf16 image batch, 64 channels, 56 × 56, 3 × 3 filter padded by 1.
    fn images() -> MapSpec {
        MapSpec {
            decl: MapDecl { rank: 4, box_dims: vec![64, 128], im2col: true, ..matrix().decl },
            dims: vec![64, 56, 56, 8],
            strides_bytes: vec![128, 128 * 56, 128 * 56 * 56],
            element_strides: vec![1; 4],
            lower_corner: vec![-1, -1],
            upper_corner: vec![-1, -1],
            ..matrix()
        }
    }

    #[test]
    fn legal_maps_pass() {
        assert_eq!(check(&matrix()), Ok(()));
        assert_eq!(check(&images()), Ok(()));
        // The panel layout, whose outermost stride is the smallest.
        let mut panels = matrix();
        panels.decl.rank = 3;
        panels.decl.box_dims = vec![64, 128, 2];
        panels.dims = vec![64, 1000, 8];
        panels.strides_bytes = vec![1024, 128];
        panels.element_strides = vec![1; 3];
        assert_eq!(check(&panels), Ok(()));
        // The greatest of everything.
        let mut greatest = matrix();
        greatest.decl = MapDecl { ty: MapType::U8, swizzle: Swizzle::None, box_dims: vec![256, 256], ..greatest.decl };
        greatest.dims = vec![1 << 32, 1 << 32];
        greatest.strides_bytes = vec![(1 << 40) - 16];
        greatest.element_strides = vec![8, 8];
        assert_eq!(check(&greatest), Ok(()));
    }

    /// Breaks one limit, and recognizes the error that this must give.
    type Case = (fn(&mut MapSpec), fn(&MapError) -> bool);

    #[test]
    fn every_broken_limit_has_its_own_error() {
        let tiled: [Case; 20] = [
            (|m| m.decl.rank = 0, |e| matches!(e, MapError::Rank { rank: 0, least: 1, mode: "tiled" })),
            (|m| m.decl.rank = 6, |e| matches!(e, MapError::Rank { rank: 6, .. })),
            (|m| m.dims.push(1), |e| matches!(e, MapError::Length { what: "extents", given: 3, expected: 2, .. })),
            (|m| m.strides_bytes.push(16), |e| matches!(e, MapError::Length { what: "strides", .. })),
            (|m| m.element_strides.clear(), |e| matches!(e, MapError::Length { what: "element strides", .. })),
            (|m| m.decl.box_dims.push(1), |e| matches!(e, MapError::Length { what: "box extents", .. })),
            (|m| m.lower_corner.push(0), |e| matches!(e, MapError::Length { what: "lower corners", .. })),
            (|m| m.upper_corner.push(0), |e| matches!(e, MapError::Length { what: "upper corners", .. })),
            (|m| m.dims[1] = 0, |e| matches!(e, MapError::Range { what: "the extent", dimension: 1, value: 0, .. })),
            (|m| m.dims[0] = (1 << 32) + 1, |e| matches!(e, MapError::Range { what: "the extent", dimension: 0, .. })),
            (|m| m.strides_bytes[0] = 1032, |e| matches!(e, MapError::Stride { dimension: 1, stride_bytes: 1032 })),
            (|m| m.strides_bytes[0] = 1 << 40, |e| matches!(e, MapError::Range { what: "the stride in bytes", .. })),
            (|m| m.element_strides[1] = 0, |e| matches!(e, MapError::Range { what: "the traversal stride", .. })),
            (|m| m.element_strides[1] = 9, |e| matches!(e, MapError::Range { value: 9, most: 8, .. })),
            (|m| m.decl.box_dims[1] = 0, |e| matches!(e, MapError::Range { what: "the box", dimension: 1, .. })),
            (|m| m.decl.box_dims[1] = 257, |e| matches!(e, MapError::Range { value: 257, most: 256, .. })),
            (|m| m.decl.box_dims[0] = 12, |e| matches!(e, MapError::InnerBytes { inner_bytes: 24 })),
            (|m| m.decl.box_dims[0] = 72, |e| matches!(e, MapError::SwizzleSpan { inner_bytes: 144, span_bytes: 128 })),
            (|m| m.decl.swizzle = Swizzle::B64, |e| matches!(e, MapError::SwizzleSpan { span_bytes: 64, .. })),
            (|m| (m.decl.ty, m.fill) = (MapType::U16, Fill::Nan), |e| matches!(e, MapError::Fill { ty: MapType::U16 })),
        ];
        let im2col: [Case; 8] = [
            (|m| m.decl.rank = 2, |e| matches!(e, MapError::Rank { rank: 2, least: 3, mode: "im2col" })),
            (|m| m.decl.box_dims.push(1), |e| matches!(e, MapError::Length { what: "box extents", expected: 2, .. })),
            (|m| m.lower_corner.push(0), |e| matches!(e, MapError::Length { what: "lower corners", expected: 2, .. })),
            (|m| m.decl.box_dims[1] = 1025, |e| matches!(e, MapError::Range { what: "pixels per column", most: 1024, .. })),
            (|m| m.decl.box_dims[0] = 264, |e| matches!(e, MapError::Range { what: "channels per pixel", .. })),
            (|m| m.lower_corner[1] = -129, |e| matches!(e, MapError::Range { what: "the lower corner", dimension: 2, least: -128, .. })),
            (|m| m.upper_corner[0] = 128, |e| matches!(e, MapError::Range { what: "the upper corner", most: 127, .. })),
            (|m| m.upper_corner[0] = -57, |e| matches!(e, MapError::Corners { dimension: 1, extent: 56, lower: -1, upper: -57 })),
        ];
        for (number, (spec, (break_it, expected))) in
            tiled.iter().map(|case| (matrix(), case)).chain(im2col.iter().map(|case| (images(), case))).enumerate()
        {
            let mut spec = spec;
            break_it(&mut spec);
            let error = check(&spec).expect_err(&format!("case {number} breaks a limit"));
            assert!(expected(&error), "case {number}: {error:?}");
        }
    }

    #[test]
    fn corners_have_the_range_of_their_rank() {
        for (rank, most) in [(3_u32, 32_767), (4, 127), (5, 15)] {
            let mut spec = images();
            spec.decl.rank = rank;
            let rank = rank as usize;
            spec.dims = vec![1 << 20; rank];
            spec.strides_bytes = vec![1 << 20; rank - 1];
            spec.element_strides = vec![1; rank];
            (spec.lower_corner, spec.upper_corner) = (vec![-most - 1; rank - 2], vec![most; rank - 2]);
            assert_eq!(check(&spec), Ok(()));
            spec.upper_corner[0] += 1;
            assert!(check(&spec).is_err());
        }
    }

    #[test]
    fn the_bit_of_small_tensors_is_cleared_where_it_must_be() {
        let mut small = matrix();
        small.dims = vec![64, 1023];
        small.strides_bytes = vec![128];
        assert_eq!(span_bytes(&small), 1023 * 128);
        small.dims[1] = 1024;
        assert_eq!(span_bytes(&small), 131_072);
        for (driver, span, cleared) in [(13_000, 131_071, true), (13_010, 0, true), (13_000, 131_072, false), (13_020, 16, false)] {
            let mut words = [u64::MAX; 16];
            mend_small_tensor(&mut words, driver, span);
            let expected = if cleared { !(1 << 21) } else { u64::MAX };
            assert_eq!(words[1], expected, "driver {driver}, {span} bytes");
            assert!(words[0] == u64::MAX && words[2..].iter().all(|&word| word == u64::MAX));
        }
    }
}
