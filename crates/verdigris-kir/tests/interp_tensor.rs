//! Tensor copies against element-by-element definitions: the box of a tiled map, the pixels of a convolution for im2col.

use std::collections::BTreeMap;
use verdigris_kir::interp::tensor::{
    MapError, Segment, check, check_address, copy_bytes, fill_element, load_segments, reduction_type, store_segments, tf32_in_flight,
};
use verdigris_kir::ir::{Access, MapDecl, MapType, Swizzle, Ty};
use verdigris_kir::program::{Fill, L2Promotion, MapSpec};

/// Seeded random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

fn tiled(ty: MapType, swizzle: Swizzle, dims: &[u64], strides: &[u64], box_dims: &[u32]) -> MapSpec {
    MapSpec {
        decl: MapDecl { ty, rank: dims.len() as u32, box_dims: box_dims.to_vec(), im2col: false, swizzle, access: Access::ReadWrite },
        dims: dims.to_vec(),
        strides_bytes: strides.to_vec(),
        element_strides: vec![1; dims.len()],
        lower_corner: vec![],
        upper_corner: vec![],
        fill: Fill::Zero,
        l2: L2Promotion::None,
    }
}

/// Shared byte → tensor byte, or `None` where filled; every byte of a segment on its own, none twice.
fn bytes_of(visit: impl FnOnce(&mut dyn FnMut(Segment))) -> BTreeMap<u32, Option<u64>> {
    let mut bytes = BTreeMap::new();
    visit(&mut |segment| {
        assert!(segment.bytes > 0);
        for i in 0..segment.bytes {
            let previous = bytes.insert(segment.shared_address + i, segment.global_offset.map(|offset| offset + u64::from(i)));
            assert_eq!(previous, None, "byte {:#x} twice", segment.shared_address + i);
        }
    });
    bytes
}

/// The XOR pattern as its definition has it: chunk `c` of row `r` of one span stands at `c ^ f(r)`.
fn swizzled(swizzle: Swizzle, linear: u32) -> u32 {
    let span = swizzle.span_bytes();
    let (row, chunk, byte) = (linear / span, linear % span / 16, linear % 16);
    let phase = match swizzle {
        Swizzle::None => 0,
        Swizzle::B32 => row / 4 % 2,
        Swizzle::B64 => row / 2 % 4,
        Swizzle::B128 => row % 8,
    };
    row * span + (chunk ^ phase) * 16 + byte
}

const TYPES: [MapType; 5] = [MapType::U8, MapType::Bf16, MapType::F32, MapType::Tf32, MapType::F64];
const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

#[test]
fn tiled_copies_element_by_element() {
    let mut random = Random(0x5eed_0020);
    let mut stores = 0;
    for case in 0..400 {
        let rank = 1 + random.below(5) as usize;
        let (ty, swizzle) = (TYPES[random.below(5) as usize], SWIZZLES[random.below(4) as usize]);
        let width = ty.bytes();
        let row_bytes = if swizzle == Swizzle::None { 16 * (1 + random.below(8) as u32) } else { swizzle.span_bytes() };
        let mut box_dims = vec![(row_bytes / width).min(256)];
        // Stores want rows of whole 16 bytes.
        let first = 1 + random.below(40);
        let mut dims = vec![if case % 4 == 0 { first } else { first.next_multiple_of(16 / u64::from(width)) }];
        let mut strides = vec![];
        let mut pitch = (dims[0] * u64::from(width)).next_multiple_of(16) + 16 * random.below(3);
        for _ in 1..rank {
            box_dims.push(1 + random.below(5) as u32);
            dims.push(1 + random.below(6));
            strides.push(pitch);
            pitch = pitch * dims[dims.len() - 1] + 16 * random.below(2);
        }
        let mut spec = tiled(ty, swizzle, &dims, &strides, &box_dims);
        if case % 3 == 0 {
            spec.element_strides = (0..rank).map(|_| 1 + random.below(3) as u32).collect();
        }
        check(&spec).unwrap();
        let mut coordinates: Vec<i32> =
            dims.iter().zip(&box_dims).map(|(&d, &b)| random.below(d + u64::from(b) + 4) as i32 - b as i32 - 2).collect();
        coordinates[0] -= coordinates[0].rem_euclid(16 / width as i32);
        let base = 1024 * random.below(8) as u32;
        // Element `linear` of the packed box, its indices by repeated division.
        let counts: Vec<u32> =
            (0..rank).map(|i| if i == 0 { box_dims[0] } else { box_dims[i].div_ceil(spec.element_strides[i]) }).collect();
        let mut expected = BTreeMap::new();
        for linear in 0..counts.iter().product::<u32>() {
            let mut left = linear;
            let (mut inside, mut offset) = (true, 0i64);
            for i in 0..rank {
                let index = left % counts[i];
                left /= counts[i];
                let step = if i == 0 { 1 } else { spec.element_strides[i] };
                let at = i64::from(coordinates[i]) + i64::from(index * step);
                inside &= at >= 0 && at < dims[i] as i64;
                offset += at * if i == 0 { i64::from(width) } else { strides[i - 1] as i64 };
            }
            for byte in 0..width {
                let source = if inside { Some(offset as u64 + u64::from(byte)) } else { None };
                expected.insert(base + swizzled(swizzle, linear * width + byte), source);
            }
        }
        let loaded = bytes_of(|visit| load_segments(&spec, base, &coordinates, &[], visit).unwrap());
        assert_eq!(loaded, expected, "case {case}: {spec:?} at {coordinates:?}");
        assert_eq!(loaded.len() as u32, copy_bytes(&spec));
        if let Some(dimension) = coordinates.iter().position(|&coordinate| coordinate < 0) {
            let refused = store_segments(&spec, base, &coordinates, |_| ());
            assert_eq!(refused, Err(MapError::StoreBefore { dimension, coordinate: coordinates[dimension] }));
            continue;
        }
        let row_bytes = dims[0] * u64::from(width);
        if !row_bytes.is_multiple_of(16) {
            assert_eq!(store_segments(&spec, base, &coordinates, |_| ()), Err(MapError::StoreChunk { row_bytes }));
            continue;
        }
        stores += 1;
        let stored = bytes_of(|visit| store_segments(&spec, base, &coordinates, visit).unwrap());
        expected.retain(|_, source| source.is_some());
        assert_eq!(stored, expected);
    }
    assert!(stores > 40, "{stores} stores were compared");
}

#[test]
fn swizzled_segments_stay_in_their_chunk() {
    let spec = tiled(MapType::Bf16, Swizzle::B128, &[61, 9], &[128], &[64, 8]);
    load_segments(&spec, 2048, &[-8, 2], &[], |segment| {
        assert_eq!(segment.shared_address / 16, (segment.shared_address + segment.bytes - 1) / 16);
    })
    .unwrap();
}

#[test]
fn im2col_columns_are_the_pixels_of_a_convolution() {
    let mut random = Random(0x5eed_0021);
    let mut compared = 0;
    for case in 0..600 {
        let spatial = 1 + random.below(3) as usize;
        let rank = spatial + 2;
        let images = 1 + random.below(3);
        let channels = 8 * (1 + random.below(3));
        // W first, as the coordinates have them.
        let extent: Vec<i64> = (0..spatial).map(|_| 1 + random.below(7) as i64).collect();
        let filter: Vec<i64> = (0..spatial).map(|_| 1 + random.below(3) as i64).collect();
        let stride: Vec<i64> = (0..spatial).map(|_| 1 + random.below(3) as i64).collect();
        let dilation: Vec<i64> = (0..spatial).map(|_| 1 + random.below(2) as i64).collect();
        let pad_low: Vec<i64> = (0..spatial).map(|_| random.below(3) as i64).collect();
        let pad_high: Vec<i64> = (0..spatial).map(|_| random.below(3) as i64).collect();
        let reach: Vec<i64> = (0..spatial).map(|i| (filter[i] - 1) * dilation[i]).collect();
        let out: Vec<i64> = (0..spatial).map(|i| (extent[i] + pad_low[i] + pad_high[i] - reach[i] - 1).div_euclid(stride[i]) + 1).collect();
        if out.iter().any(|&n| n <= 0) {
            continue;
        }
        let mut dims = vec![channels];
        dims.extend(extent.iter().map(|&e| e as u64));
        dims.push(images);
        let mut strides = vec![channels * 2];
        for i in 0..spatial {
            strides.push(strides[i] * extent[i] as u64);
        }
        let (box_channels, pixels) = (8 * (1 + random.below(2)) as u32, 1 + random.below(20) as u32);
        let mut element_strides = vec![1];
        element_strides.extend(stride.iter().map(|&s| s as u32));
        element_strides.push(1);
        let spec = MapSpec {
            decl: MapDecl {
                ty: MapType::F16,
                rank: rank as u32,
                box_dims: vec![box_channels, pixels],
                im2col: true,
                swizzle: Swizzle::None,
                access: Access::Read,
            },
            dims,
            strides_bytes: strides.clone(),
            element_strides,
            lower_corner: pad_low.iter().map(|&p| -p as i32).collect(),
            upper_corner: (0..spatial).map(|i| (pad_high[i] - reach[i]) as i32).collect(),
            fill: Fill::Zero,
            l2: L2Promotion::None,
        };
        check(&spec).unwrap();
        let per_image: i64 = out.iter().product();
        // A column may start anywhere in the GEMM's rows, and run past the last image.
        let first = random.below((per_image * images as i64) as u64) as i64;
        let position = |row: i64| -> (Vec<i64>, i64) {
            let mut left = row % per_image;
            let place = out
                .iter()
                .map(|&n| {
                    let at = left % n;
                    left /= n;
                    at
                })
                .collect();
            (place, row / per_image)
        };
        let taps: Vec<i64> = (0..spatial).map(|i| random.below(filter[i] as u64) as i64).collect();
        let from_channel = random.below(3) as i64 * 8;
        let mut coordinates = vec![from_channel as i32];
        let (place, image) = position(first);
        coordinates.extend((0..spatial).map(|i| (place[i] * stride[i] - pad_low[i]) as i32));
        coordinates.push(image as i32);
        let offsets: Vec<u16> = (0..spatial).map(|i| (taps[i] * dilation[i]) as u16).collect();
        let mut expected = BTreeMap::new();
        for pixel in 0..i64::from(pixels) {
            // x[n, p·stride − pad + r·dilation, …, c]: the term that the filter tap multiplies for this output pixel.
            let (place, image) = position(first + pixel);
            for c in 0..i64::from(box_channels) {
                let channel = from_channel + c;
                let mut inside = channel < channels as i64 && image < images as i64;
                let mut offset = channel * 2 + image * strides[spatial] as i64;
                for i in 0..spatial {
                    let at = place[i] * stride[i] - pad_low[i] + taps[i] * dilation[i];
                    inside &= at >= 0 && at < extent[i];
                    offset += at * strides[i] as i64;
                }
                for byte in 0..2 {
                    let shared = 4096 + (pixel as u32 * box_channels + c as u32) * 2 + byte;
                    expected.insert(shared, if inside { Some(offset as u64 + u64::from(byte)) } else { None });
                }
            }
        }
        let loaded = bytes_of(|visit| load_segments(&spec, 4096, &coordinates, &offsets, visit).unwrap());
        assert_eq!(loaded, expected, "case {case}: {spec:?} from row {first}, taps {taps:?}");
        compared += 1;
    }
    assert!(compared > 300, "only {compared} convolutions compared");
}

#[test]
fn the_driver_refuses_what_it_refuses() {
    let good = tiled(MapType::Bf16, Swizzle::B128, &[100, 50], &[208], &[64, 128]);
    check(&good).unwrap();
    let refused = |change: &dyn Fn(&mut MapSpec)| {
        let mut spec = good.clone();
        change(&mut spec);
        check(&spec).unwrap_err()
    };
    assert_eq!(refused(&|s| s.decl.rank = 6), MapError::Rank { rank: 6, im2col: false });
    assert_eq!(refused(&|s| s.decl.rank = 0), MapError::Rank { rank: 0, im2col: false });
    assert_eq!(refused(&|s| s.decl.im2col = true), MapError::Rank { rank: 2, im2col: true });
    assert!(matches!(refused(&|s| s.dims.push(1)), MapError::Count { list: "extents", given: 3, needed: 2 }));
    assert!(matches!(refused(&|s| s.dims[0] = 0), MapError::Range { dimension: 0, value: 0, .. }));
    assert!(matches!(refused(&|s| s.dims[1] = (1 << 32) + 1), MapError::Range { dimension: 1, high: 0x1_0000_0000, .. }));
    assert!(matches!(refused(&|s| s.strides_bytes[0] = 200), MapError::Multiple { dimension: 1, value: 200, of: 16, .. }));
    assert!(matches!(refused(&|s| s.strides_bytes[0] = 1 << 40), MapError::Range { dimension: 1, .. }));
    assert!(matches!(refused(&|s| s.decl.box_dims[1] = 257), MapError::Range { dimension: 1, value: 257, high: 256, .. }));
    assert!(matches!(refused(&|s| s.decl.box_dims[1] = 0), MapError::Range { dimension: 1, value: 0, .. }));
    assert!(matches!(refused(&|s| s.element_strides[1] = 9), MapError::Range { dimension: 1, value: 9, high: 8, .. }));
    assert!(matches!(refused(&|s| s.element_strides[0] = 0), MapError::Range { dimension: 0, value: 0, low: 1, .. }));
    assert!(matches!(refused(&|s| s.decl.box_dims[0] = 60), MapError::Multiple { value: 120, of: 16, .. }));
    assert_eq!(refused(&|s| s.decl.box_dims[0] = 72), MapError::BeyondSpan { row_bytes: 144, swizzle: Swizzle::B128 });
    let nan_of_integers = |s: &mut MapSpec| {
        s.decl.ty = MapType::U16;
        s.fill = Fill::Nan;
    };
    assert_eq!(refused(&nan_of_integers), MapError::FillType { ty: MapType::U16 });
    let mut edge = good.clone();
    (edge.dims[1], edge.strides_bytes[0], edge.element_strides[1], edge.decl.box_dims[1]) = (1 << 32, (1 << 40) - 16, 8, 256);
    check(&edge).unwrap();
    assert!(check_address(0x1000).is_ok() && check_address(0x1008).is_err());
    // Accepted by the driver, but a copy with it is not described.
    let mut narrow = good.clone();
    narrow.decl.box_dims[0] = 32;
    check(&narrow).unwrap();
    assert_eq!(load_segments(&narrow, 0, &[0, 0], &[], |_| ()).unwrap_err(), MapError::BelowSpan { row_bytes: 64, swizzle: Swizzle::B128 });
    // A box beyond every shared memory, which the driver does not look at.
    let mut vast = tiled(MapType::F64, Swizzle::None, &[256; 5], &[16, 16, 16, 16], &[256; 5]);
    check(&vast).unwrap();
    assert_eq!(copy_bytes(&vast), u32::MAX);
    assert!(matches!(
        load_segments(&vast, 0, &[0; 5], &[], |_| panic!("nothing is copied")),
        Err(MapError::Range { value: 0x800_0000_0000, .. })
    ));
    vast.decl.box_dims = vec![2, 1, 1, 1, 1];
    assert!(matches!(load_segments(&vast, u32::MAX - 127, &[0; 5], &[], |_| ()), Ok(())));
    assert!(matches!(load_segments(&good, 64, &[0, 0], &[], |_| ()), Err(MapError::Multiple { of: 128, .. })));
    assert!(matches!(load_segments(&good, 0, &[0], &[], |_| ()), Err(MapError::Count { given: 1, needed: 2, .. })));
    // Accepted by the driver, and the end of the kernel on an H200.
    let chunk = 16 / good.decl.ty.bytes();
    let mut good = good;
    good.dims[0] = good.dims[0].next_multiple_of(u64::from(chunk));
    for (coordinate, ok) in [(0, true), (chunk as i32, true), (-(chunk as i32), true), (1, false), (chunk as i32 - 1, false), (-1, false)] {
        let loaded = load_segments(&good, 0, &[coordinate, 0], &[], |_| ());
        let stored = store_segments(&good, 0, &[coordinate, 0], |_| ());
        let expected = if ok { Ok(()) } else { Err(MapError::Coordinate { coordinate, elements: chunk }) };
        let before = Err(MapError::StoreBefore { dimension: 0, coordinate });
        assert_eq!((loaded, stored), (expected, if coordinate < 0 { before } else { expected }));
    }
}

#[test]
fn im2col_ranges_depend_on_the_rank() {
    let spec = |rank: u32| MapSpec {
        decl: MapDecl { ty: MapType::Bf16, rank, box_dims: vec![64, 128], im2col: true, swizzle: Swizzle::B128, access: Access::Read },
        dims: vec![1 << 17; rank as usize],
        strides_bytes: vec![1 << 18; rank as usize - 1],
        element_strides: vec![1; rank as usize],
        lower_corner: vec![0; rank as usize - 2],
        upper_corner: vec![0; rank as usize - 2],
        fill: Fill::Zero,
        l2: L2Promotion::B128,
    };
    for (rank, limit) in [(3u32, 32768), (4, 128), (5, 16)] {
        for (value, ok) in [(-limit, true), (-limit - 1, false), (limit - 1, true), (limit, false)] {
            let mut lower = spec(rank);
            lower.lower_corner[0] = value;
            assert_eq!(check(&lower).is_ok(), ok, "rank {rank} lower {value}");
            let mut upper = spec(rank);
            upper.upper_corner[rank as usize - 3] = value;
            assert_eq!(check(&upper).is_ok(), ok, "rank {rank} upper {value}");
        }
    }
    let mut pixels = spec(4);
    pixels.decl.box_dims[1] = 1024;
    check(&pixels).unwrap();
    pixels.decl.box_dims[1] = 1025;
    assert!(check(&pixels).is_err());
    let mut empty = spec(4);
    (empty.dims[2], empty.upper_corner[1]) = (3, -3);
    assert_eq!(check(&empty), Err(MapError::EmptyBox { dimension: 2, first: 0, last: -1 }));
    // 8 bits of filter offset in two dimensions.
    assert!(load_segments(&spec(4), 0, &[0; 4], &[255, 255], |_| ()).is_ok());
    assert!(load_segments(&spec(4), 0, &[0; 4], &[256, 0], |_| ()).is_err());
    assert!(load_segments(&spec(5), 0, &[0; 5], &[0, 32, 0], |_| ()).is_err());
    let mut strided = spec(4);
    strided.element_strides[1] = 2;
    assert_eq!(store_segments(&strided, 0, &[0; 4], |_| ()), Err(MapError::StridedStore));
    for (lower, upper, refused) in [(0, 0, None), (1, -1, None), (-1, 0, Some(-1)), (0, 2, Some(2))] {
        let mut walk = spec(4);
        (walk.lower_corner[1], walk.upper_corner[1]) = (lower, upper);
        let expected = refused.map_or(Ok(()), |corner| Err(MapError::StoreCorner { dimension: 2, corner }));
        assert_eq!(store_segments(&walk, 0, &[0, 0, 1, 0], |_| ()), expected);
        assert!(load_segments(&walk, 0, &[0, 0, 1, 0], &[0, 0], |_| ()).is_ok());
        if lower > 0 {
            assert_eq!(store_segments(&walk, 0, &[0; 4], |_| ()), Err(MapError::StoreCorner { dimension: 2, corner: lower }));
        }
    }
}

#[test]
fn elements_outside_and_in_flight() {
    assert_eq!((fill_element(MapType::F32, Fill::Zero), fill_element(MapType::Bf16, Fill::Nan)), (0, 0x7ff7));
    assert!(f64::from_bits(fill_element(MapType::F64, Fill::Nan)).is_nan());
    // tf32 keeps 10 bits: halfway goes to the even neighbour.
    assert_eq!(tf32_in_flight(0x3f80_1000), 0x3f80_0000);
    assert_eq!(tf32_in_flight(0x3f80_3000), 0x3f80_4000);
    assert_eq!(tf32_in_flight(0x3f80_1001), 0x3f80_2000);
    assert_eq!((reduction_type(MapType::Bf16), reduction_type(MapType::U8)), (Some(Ty::Bf16), None));
}
