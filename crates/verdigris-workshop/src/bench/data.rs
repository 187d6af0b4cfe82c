//! Operands on the device: random, and more of them than the L2 holds.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use anyhow::Result;
use rayon::prelude::*;
use verdigris::Handle;
use verdigris_cuda::{DeviceBuffer, DeviceSlice, HostBuffer};
use verdigris_graph::{GemmProblem, Matrix};
use verdigris_reference::data::{self, Distribution, GUARD_BYTES, Random};
use verdigris_tensor::{DType, num};

/// Elements of the block that operands are cut from; made once for each type.
const BLOCK_ELEMENTS: u64 = 1 << 22;

/// A block is made in so many pieces, each from a seed of its own.
const PIECES: u64 = 64;

/// Parts of a block begin at multiples of this: 16 bytes at least.
const GRAIN_ELEMENTS: u64 = 16;

/// Most sets of operands: what is left in the L2 of so many small problems is little.
const MOST_COPIES: u64 = 1024;

/// Elements of one part of an operand; a power of two, so that a place is found by shifts.
const PART_ELEMENTS: u64 = BLOCK_ELEMENTS / 2;

/// Bytes of D that are on the host at a time.
const STAGE_BYTES: usize = 32 << 20;

/// Random numbers of one type.
struct Block {
    device: DeviceBuffer,
    /// The same numbers on the host.
    values: Arc<Vec<f64>>,
}

/// Random numbers on the device, a block for each type, from which operands are filled by copies of random parts.
pub(super) struct Source<'h> {
    handle: &'h Handle,
    random: Random,
    blocks: HashMap<DType, Block>,
    sentinels: HashMap<DType, DeviceBuffer>,
    stage: Option<HostBuffer>,
}

/// What an operand holds: parts of one block. Known on the host without being there.
pub(super) struct Contents {
    block: Arc<Vec<f64>>,
    /// For each part, where in the block it begins.
    begins: Vec<u32>,
}

impl Contents {
    /// The element so many elements behind the first.
    #[inline]
    pub(super) fn at(&self, offset: u64) -> f64 {
        let begin = self.begins.get((offset / PART_ELEMENTS) as usize).copied().unwrap_or(0);
        self.block[(u64::from(begin) + offset % PART_ELEMENTS) as usize]
    }
}

impl<'h> Source<'h> {
    pub(super) fn new(handle: &'h Handle, seed: u64) -> Self {
        Source { handle, random: Random::new(seed), blocks: HashMap::new(), sentinels: HashMap::new(), stage: None }
    }

    /// Fills a buffer with normal values (integers: all values alike).
    fn fill(&mut self, dtype: DType, buffer: &mut DeviceBuffer) -> Result<Contents> {
        let handle = self.handle;
        let block = match self.blocks.entry(dtype) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let seed = self.random.bits();
                let bytes: Vec<u8> = (0..PIECES)
                    .into_par_iter()
                    .flat_map_iter(|piece| data::fill(dtype, Distribution::Normal, true, seed ^ piece, BLOCK_ELEMENTS / PIECES))
                    .collect();
                let elements = bytes.par_chunks_exact(dtype.bytes());
                let values = elements.map(|element| num::read_element(dtype, element).unwrap_or(f64::NAN)).collect();
                place.insert(Block { device: handle.pool().alloc_from(handle.stream(), &bytes)?, values: Arc::new(values) })
            }
        };
        let size = dtype.bytes() as u64;
        let mut begins = Vec::new();
        let mut at = 0;
        while at < buffer.len_bytes() {
            // Parts begin anywhere, so that rows and copies differ, but where a copy is quick.
            let begin = self.random.below(PART_ELEMENTS / GRAIN_ELEMENTS) * GRAIN_ELEMENTS;
            let bytes = (buffer.len_bytes() - at).min(PART_ELEMENTS * size);
            buffer.copy_from(handle.stream(), at, block.device.slice().part(begin * size, bytes)?)?;
            begins.push(begin as u32);
            at += bytes;
        }
        Ok(Contents { block: Arc::clone(&block.values), begins })
    }

    /// Fills a part of a buffer with the type's sentinel.
    fn fill_sentinel(&mut self, dtype: DType, buffer: &mut DeviceBuffer, length_bytes: u64) -> Result<()> {
        let handle = self.handle;
        let block = match self.sentinels.entry(dtype) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let bytes: Vec<u8> = data::sentinel(dtype).into_iter().cycle().take(1 << 22).collect();
                place.insert(handle.pool().alloc_from(handle.stream(), &bytes)?)
            }
        };
        let mut at = 0;
        while at < length_bytes {
            let bytes = (length_bytes - at).min(block.len_bytes());
            buffer.copy_from(handle.stream(), at, block.slice().part(0, bytes)?)?;
            at += bytes;
        }
        Ok(())
    }
}

/// Copies of one operand, one after the other.
pub(super) struct Operand {
    pub(super) dtype: DType,
    /// What the first copy held at first.
    pub(super) contents: Contents,
    buffer: DeviceBuffer,
    /// From the first element to the last.
    pub(super) span_bytes: u64,
    stride_bytes: u64,
}

impl Operand {
    /// The memory of a copy, from the operand's first element to its last.
    pub(super) fn slice(&self, copy: u64) -> Result<DeviceSlice<'_>> {
        Ok(self.buffer.slice().part(copy * self.stride_bytes, self.span_bytes)?)
    }
}

/// Sets of operands of one problem, together larger than twice the L2.
pub(super) struct Operands {
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) d: Operand,
    /// How many sets.
    pub(super) copies: u64,
}

/// Bytes that one execution must read and write at least.
pub(super) fn unique_bytes(gemm: &GemmProblem) -> f64 {
    let (m, n, k) = (gemm.m as f64, gemm.n as f64, gemm.k as f64);
    let bytes = |matrix: &Matrix, elements: f64| {
        let repeats = matrix.batch_strides.iter().zip(&gemm.batch).filter(|&(&stride, _)| stride != 0).map(|(_, &extent)| extent as f64);
        elements * matrix.dtype.bytes() as f64 * repeats.product::<f64>()
    };
    bytes(&gemm.a, m * k) + bytes(&gemm.b, k * n) + bytes(&gemm.d, m * n)
}

impl Operands {
    pub(super) fn new(source: &mut Source<'_>, gemm: &GemmProblem) -> Result<Operands> {
        let span = |matrix: &Matrix, rows, columns| -> Result<u64> {
            Ok(u64::try_from(matrix.layout(&gemm.batch, rows, columns)?.span_bytes(matrix.dtype))?)
        };
        let spans = [span(&gemm.a, gemm.m, gemm.k)?, span(&gemm.b, gemm.k, gemm.n)?, span(&gemm.d, gemm.m, gemm.n)?];
        let types = [gemm.a.dtype, gemm.b.dtype, gemm.d.dtype];
        Operands::of(source, std::array::from_fn(|i| (types[i], spans[i])))
    }

    /// Sets of operands of these types and bytes from the first element to the last: two that are read, and one that is written.
    pub(super) fn of(source: &mut Source<'_>, parts: [(DType, u64); 3]) -> Result<Operands> {
        let handle = source.handle;
        let set_bytes: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
        let l2_bytes = handle.arch().l2_bytes;
        // Of a set far larger than the L2, next to nothing is left there when its turn comes again.
        let copies = if set_bytes > 16 * l2_bytes { 1 } else { (2 * l2_bytes / set_bytes.max(1) + 2).min(MOST_COPIES) };
        let mut operand = |(dtype, span_bytes): (DType, u64)| -> Result<Operand> {
            let stride_bytes = (span_bytes + GUARD_BYTES as u64).next_multiple_of(256);
            let mut buffer = handle.pool().alloc(handle.stream(), stride_bytes * copies)?;
            let contents = source.fill(dtype, &mut buffer)?;
            Ok(Operand { dtype, contents, buffer, span_bytes, stride_bytes })
        };
        let [a, b, d] = parts;
        Ok(Operands { a: operand(a)?, b: operand(b)?, d: operand(d)?, copies })
    }

    /// Fills D of the first set, and the guard behind it, with the sentinel.
    pub(super) fn spoil_d(&mut self, source: &mut Source<'_>) -> Result<()> {
        let length = self.d.span_bytes + GUARD_BYTES as u64;
        source.fill_sentinel(self.d.dtype, &mut self.d.buffer, length)
    }

    /// An operand of the first set, on the host.
    pub(super) fn download(handle: &Handle, operand: &Operand) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(operand.span_bytes)?];
        operand.buffer.download(handle.stream(), 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Gives D of the first set and the guard behind it to `take`, part by part, each with its offset.
    pub(super) fn read_d(&self, source: &mut Source<'_>, take: &mut dyn FnMut(u64, &[u8])) -> Result<()> {
        let handle = source.handle;
        let stage = match &mut source.stage {
            Some(stage) => stage,
            none => none.insert(HostBuffer::new(handle.context(), STAGE_BYTES)?),
        };
        let all = self.d.span_bytes + GUARD_BYTES as u64;
        let mut begin = 0;
        while begin < all {
            let bytes = (all - begin).min(STAGE_BYTES as u64);
            let part = &mut stage[..bytes as usize];
            self.d.buffer.download(handle.stream(), begin, part)?;
            take(begin, part);
            begin += bytes;
        }
        Ok(())
    }
}
