//! The handwritten digits that ship with the program, and how they are split. `data/README.md` says where they come from.

use verdigris_reference::data::Random;

/// 64 pixels from 0 to 16, then the digit.
const RECORD_BYTES: usize = 65;
const DIGITS: &[u8] = include_bytes!("../../data/digits.bin");
/// Of each digit, one image in this many is held out.
const HELD_OUT_ONE_IN: usize = 4;
/// The split is the same for every seed of the training.
const SPLIT_SEED: u64 = 20_260;

pub(super) const SIDE: usize = 8;
pub(super) const CLASSES: usize = 10;

/// One image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Digit {
    /// Row by row, from 0 to 16.
    pub(super) pixels: &'static [u8],
    pub(super) label: usize,
}

/// All images, those for training first.
#[derive(Debug)]
pub(super) struct Split {
    pub(super) training: Vec<Digit>,
    pub(super) held_out: Vec<Digit>,
}

/// The fixed split: a quarter of the images of each digit is held out.
pub(super) fn split() -> Split {
    let all: Vec<Digit> =
        DIGITS.chunks_exact(RECORD_BYTES).map(|record| Digit { pixels: &record[..64], label: usize::from(record[64]) }).collect();
    let mut random = Random::new(SPLIT_SEED);
    let mut split = Split { training: Vec::new(), held_out: Vec::new() };
    for label in 0..CLASSES {
        let mut of_label: Vec<Digit> = all.iter().copied().filter(|digit| digit.label == label).collect();
        shuffle(&mut of_label, &mut random);
        let held_out = of_label.len().div_ceil(HELD_OUT_ONE_IN);
        split.held_out.extend_from_slice(&of_label[..held_out]);
        split.training.extend_from_slice(&of_label[held_out..]);
    }
    split
}

/// Puts the items into a random order.
pub(super) fn shuffle<T>(items: &mut [T], random: &mut Random) {
    for i in (1..items.len()).rev() {
        items.swap(i, random.below(i as u64 + 1) as usize);
    }
}

/// The image as numbers from 0 to 1, moved by whole pixels; what moves in from outside is 0.
pub(super) fn moved(digit: Digit, down: isize, right: isize) -> impl Iterator<Item = f32> {
    (0..SIDE * SIDE).map(move |i| {
        let row = (i / SIDE).checked_add_signed(-down).filter(|&row| row < SIDE);
        let column = (i % SIDE).checked_add_signed(-right).filter(|&column| column < SIDE);
        row.zip(column).map_or(0.0, |(row, column)| f32::from(digit.pixels[row * SIDE + column]) / 16.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_split_is_stratified_and_holds_out_a_fifth_at_least() {
        let split = split();
        assert_eq!(split.training.len() + split.held_out.len(), 1797);
        for label in 0..CLASSES {
            let count = |digits: &[Digit]| digits.iter().filter(|digit| digit.label == label).count();
            let (training, held_out) = (count(&split.training), count(&split.held_out));
            assert!(held_out * 5 >= training + held_out, "{label}: {held_out} of {}", training + held_out);
            assert!(training > 120, "{label}: {training}");
        }
        assert!(split.training.iter().chain(&split.held_out).all(|digit| digit.pixels.iter().all(|&pixel| pixel <= 16)));
    }

    #[test]
    fn images_move_by_whole_pixels() {
        let digit = Digit { pixels: &DIGITS[..64], label: 0 };
        let still: Vec<f32> = moved(digit, 0, 0).collect();
        let down: Vec<f32> = moved(digit, 1, 0).collect();
        assert!(down[..SIDE].iter().all(|&pixel| pixel == 0.0));
        assert_eq!(down[SIDE..], still[..SIDE * (SIDE - 1)]);
    }
}
