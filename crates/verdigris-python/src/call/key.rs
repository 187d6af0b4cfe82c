//! What a call's plan is found by: a short list of integers, and a hash of it.

use std::hash::{BuildHasher, Hasher};

use crate::dlpack::{self, DLTensor};

/// Room for a dozen tensors of four dims, and attributes of some hundred characters.
const WORDS: usize = 160;

/// From this alignment on, a call's plan takes any address.
const ALIGNED_BYTES: u64 = 256;

/// What an address is a multiple of, where that is little enough to be declared.
pub(crate) fn declared_alignment_bytes(address: u64) -> Option<u64> {
    let alignment = 1_u64 << address.trailing_zeros().min(63);
    (address != 0 && alignment < ALIGNED_BYTES).then_some(alignment)
}

/// The integers of a call.
pub(crate) struct Key {
    words: [u64; WORDS],
    used: usize,
}

impl Key {
    pub(crate) fn new(function: u8, policy: u32, attributes: &str, extra: &[i64]) -> Key {
        let mut key = Key { words: [0; WORDS], used: 0 };
        let text = attributes.as_bytes();
        key.push(u64::from(function) | (extra.len() as u64) << 8 | (text.len() as u64) << 16 | u64::from(policy) << 32);
        let chunks = text.chunks_exact(8);
        let rest = chunks.remainder();
        for chunk in chunks {
            key.push(u64::from_le_bytes(chunk.try_into().unwrap_or_default()));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        key.push(u64::from_le_bytes(last));
        for &value in extra {
            key.push(value as u64);
        }
        key
    }

    /// Adds a tensor, or that there is none.
    ///
    /// # Safety
    /// The tensor's lists of dims and strides are alive.
    #[inline]
    pub(crate) unsafe fn tensor(&mut self, is_there: bool, tensor: &DLTensor) {
        if !is_there {
            return self.push(u64::MAX);
        }
        let device = tensor.device;
        // The CPU takes any address.
        let aligned =
            if device.device_type == dlpack::CUDA { tensor.address().trailing_zeros().min(ALIGNED_BYTES.trailing_zeros()) } else { 0 };
        let dtype = u64::from(tensor.dtype.code) | u64::from(tensor.dtype.bits) << 8;
        self.push(
            dtype
                | u64::from(aligned) << 16
                | (tensor.ndim as u64) << 24
                | (device.device_type as u64 & 0xff) << 32
                | (device.device_id as u64) << 40,
        );
        // SAFETY: the caller's word.
        let (dims, strides) = unsafe { (tensor.dims(), tensor.strides()) };
        for &dim in dims {
            self.push(dim as u64);
        }
        match strides {
            // No stride is so large.
            None => self.push(u64::MAX),
            Some(strides) => strides.iter().for_each(|&stride| self.push(stride as u64)),
        }
    }

    #[inline]
    fn push(&mut self, word: u64) {
        if let Some(place) = self.words.get_mut(self.used) {
            *place = word;
        }
        self.used += 1;
    }

    /// The key, if all of it found room.
    pub(crate) fn finish(self) -> Option<Key> {
        (self.used <= WORDS).then_some(self)
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.words[..self.used]
    }

    /// A hash of the words.
    #[inline]
    pub(crate) fn digest(&self) -> u64 {
        let mut hash = Words(0);
        self.words().iter().for_each(|&word| hash.add(word));
        hash.finish()
    }
}

/// Hashes lists of integers: a multiplication and a rotation each. Keys are compared in full, so that a weak hash costs time alone.
#[derive(Clone, Copy, Default)]
pub(crate) struct WordHasher;

pub(crate) struct Words(u64);

impl BuildHasher for WordHasher {
    type Hasher = Words;

    fn build_hasher(&self) -> Words {
        Words(0)
    }
}

impl Words {
    #[inline]
    fn add(&mut self, word: u64) {
        // The odd number is 2^64 over the golden ratio.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for Words {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        self.add(word);
    }

    #[inline]
    fn write_usize(&mut self, word: usize) {
        self.add(word as u64);
    }

    #[inline]
    fn finish(&self) -> u64 {
        // The map looks at the lowest and the highest bits; the product's lowest know little.
        self.0 ^ (self.0 >> 29)
    }
}
