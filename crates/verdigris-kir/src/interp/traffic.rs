//! What one access of a warp costs: sectors of global memory, turns of the banks of shared memory.

use super::warp::each;

/// Distinct 32-byte sectors of accesses of `bytes` bytes by the lanes of `mask`.
pub(crate) fn sectors(addresses: &[u64; 32], mask: u32, bytes: u64) -> u64 {
    let mut distinct = [0u64; 64];
    let mut count = 0;
    for lane in each(mask) {
        let (first, last) = (addresses[lane] / 32, (addresses[lane] + bytes - 1) / 32);
        for sector in first..=last {
            // Neighbours come one after the other: the one before is asked first.
            if !distinct[..count].iter().rev().any(|&known| known == sector) {
                distinct[count] = sector;
                count += 1;
            }
        }
    }
    count as u64
}

/// Turns that the banks need, and the least possible: lanes go 32, 16 or 8 at a time by width; equal words are served together.
pub(crate) fn wavefronts(addresses: &[u32; 32], mask: u32, bytes: u32) -> (u64, u64) {
    let group_lanes = match bytes {
        0..=4 => 32,
        5..=8 => 16,
        _ => 8,
    };
    let group_mask = u32::MAX >> (32 - group_lanes);
    let (mut turns, mut least) = (0, 0);
    for group in 0..32 / group_lanes {
        let lanes = mask & group_mask << (group * group_lanes);
        if lanes == 0 {
            continue;
        }
        let mut banks = Banks::default();
        for lane in each(lanes) {
            for word in addresses[lane] / 4..(addresses[lane] + bytes).div_ceil(4) {
                banks.ask(word);
            }
        }
        turns += u64::from(banks.turns);
        least += 1;
    }
    (turns, least)
}

/// Words that one turn of lanes asks of the 32 banks: at most 64, as 8 lanes ask for up to 32 bytes each.
struct Banks {
    words: [u32; 64],
    /// For each word, one more than the place of the one before it in the same bank.
    before: [u8; 64],
    /// For each bank, one more than the place of its last word.
    last: [u8; 32],
    depth: [u8; 32],
    count: u8,
    turns: u8,
}

impl Default for Banks {
    fn default() -> Self {
        Banks { words: [0; 64], before: [0; 64], last: [0; 32], depth: [0; 32], count: 0, turns: 0 }
    }
}

impl Banks {
    fn ask(&mut self, word: u32) {
        let bank = word as usize % 32;
        let mut at = self.last[bank];
        while at != 0 {
            if self.words[at as usize - 1] == word {
                return;
            }
            at = self.before[at as usize - 1];
        }
        self.words[self.count as usize] = word;
        self.before[self.count as usize] = self.last[bank];
        self.count += 1;
        self.last[bank] = self.count;
        self.depth[bank] += 1;
        self.turns = self.turns.max(self.depth[bank]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_words_share_a_turn_and_others_of_a_bank_wait() {
        let by = |step: u32| std::array::from_fn(|lane| 1024 + lane as u32 * step);
        assert_eq!(wavefronts(&by(4), u32::MAX, 4), (1, 1));
        assert_eq!(wavefronts(&by(0), u32::MAX, 4), (1, 1));
        assert_eq!(wavefronts(&by(128), u32::MAX, 4), (32, 1));
        assert_eq!(wavefronts(&by(8), u32::MAX, 4), (2, 1));
        assert_eq!(wavefronts(&by(8), u32::MAX, 8), (2, 2));
        assert_eq!(wavefronts(&by(16), u32::MAX, 16), (4, 4));
        assert_eq!(wavefronts(&by(128), 0xFFFF, 16), (16, 2));
        assert_eq!(wavefronts(&by(2), 0xFF00, 2), (1, 1));
    }

    #[test]
    fn sectors_are_counted_once() {
        let by = |step: u64| std::array::from_fn(|lane| (1 << 40) + lane as u64 * step);
        assert_eq!(sectors(&by(4), u32::MAX, 4), 4);
        assert_eq!(sectors(&by(16), u32::MAX, 16), 16);
        assert_eq!(sectors(&by(32), u32::MAX, 32), 32);
        assert_eq!(sectors(&by(0), u32::MAX, 4), 1);
        let turned: [u64; 32] = std::array::from_fn(|lane| (1 << 40) + (lane as u64 * 7 % 32) * 4);
        assert_eq!(sectors(&turned, 0xF000_000F, 4), sectors(&turned, u32::MAX, 4).min(4));
    }
}
