//! Bytes that nobody would write, from those that somebody has.

use verdigris_reference::data::Random;

/// No input grows beyond this.
const MOST_BYTES: usize = 1 << 16;

/// Numbers at which arithmetic turns over, and ones that no size should have.
const NUMBERS: &[&str] = &[
    "0",
    "1",
    "-1",
    "2",
    "3",
    "255",
    "256",
    "65535",
    "65536",
    "2147483647",
    "2147483648",
    "-2147483649",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "340282366920938463463374607431768211456",
    "1e308",
    "1e999",
    "-0.0",
    "1.5",
    "1e-320",
    "NaN",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
];

/// One input made of another: one to four changes, each of a kind drawn at random.
pub(super) fn mutate(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len() as u64) as usize].clone();
    for _ in 0..1 + random.below(4) {
        change(random, seeds, &mut bytes);
    }
    bytes.truncate(MOST_BYTES);
    bytes
}

fn change(random: &mut Random, seeds: &[Vec<u8>], bytes: &mut Vec<u8>) {
    let place = |random: &mut Random, length: usize| random.below(length as u64 + 1) as usize;
    let at = place(random, bytes.len());
    let piece = |random: &mut Random, bytes: &[u8]| {
        let begin = place(random, bytes.len());
        let most = if random.below(4) == 0 { 512 } else { 16 };
        let length = 1 + random.below(most) as usize;
        begin..bytes.len().min(begin + length)
    };
    match random.below(11) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = random.bits() as u8,
        2 if at < bytes.len() => bytes[at] = [0, 0xff, 0x7f, 0x80, b'"', b'\n', b'\t', b'-'][random.below(8) as usize],
        3 => drop(bytes.drain(piece(random, bytes))),
        4 => bytes.truncate(at),
        5 => {
            let copied = bytes[piece(random, bytes)].to_vec();
            let copies = 1 + random.below(8) as usize;
            bytes.splice(at..at, copied.repeat(copies));
        }
        // A piece of another input.
        6 => {
            let other = &seeds[random.below(seeds.len() as u64) as usize];
            let copied = other[piece(random, other)].to_vec();
            bytes.splice(at..at, copied);
        }
        // Another number in the place of one, as text.
        7 | 8 => {
            let starts: Vec<usize> =
                (0..bytes.len()).filter(|&i| bytes[i].is_ascii_digit() && (i == 0 || !bytes[i - 1].is_ascii_digit())).collect();
            if let Some(&start) = starts.get(random.below(starts.len().max(1) as u64) as usize) {
                let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                let number = NUMBERS[random.below(NUMBERS.len() as u64) as usize];
                bytes.splice(start..start + digits, number.bytes());
            }
        }
        // Another number in the place of one, as four or eight bytes.
        9 => {
            let value = [0, 1, u64::MAX, 1 << 31, 1 << 32, u64::from(u32::MAX), i64::MAX as u64, random.bits(), random.below(1 << 16)]
                [random.below(9) as usize];
            let width = if random.below(2) == 0 { 4 } else { 8 };
            for (to, from) in bytes.iter_mut().skip(at).take(width).zip(value.to_le_bytes()) {
                *to = from;
            }
        }
        // Deeper than anybody nests.
        _ => {
            let bracket = [b'[', b'{', b'('][random.below(3) as usize];
            bytes.splice(at..at, std::iter::repeat_n(bracket, 1 << random.below(14)));
        }
    }
}
