//! What a binary says of its entry, for the driver: where parameters are read, and the launch that it was made for.
//!
//! The assembler's words leave out the size of the parameters on newer chips, and say nothing of each of them. The section
//! `.nv.info.ENTRY` has both: records of a format, an attribute and a value, whose size the format gives. Formats and attributes are
//! those that `cuobjdump -elf` names.

use anyhow::{Context, Result, bail};
use object::{Object, ObjectSection};
use serde::{Deserialize, Serialize};

/// A parameter in the block of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Slot {
    /// Where it begins.
    pub(crate) offset_bytes: u32,
    /// Its size.
    pub(crate) bytes: u32,
}

/// What a binary says of one entry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BinaryReport {
    /// Its parameters, in order.
    pub(crate) params: Vec<Slot>,
    /// Bytes of all parameters together, with the gaps between them.
    pub(crate) param_bytes: u32,
    /// Where the block of parameters begins in the chip's constant bank.
    pub(crate) base_bytes: u32,
    /// Threads of a CTA along x, y, z.
    pub(crate) threads: Option<[u32; 3]>,
}

/// The sizes of values: none, one byte, two bytes, or as many as two bytes say.
const FORMAT_NONE: u8 = 1;
const FORMAT_BYTE: u8 = 2;
const FORMAT_HALF: u8 = 3;
const FORMAT_SIZED: u8 = 4;

/// Where parameters stand (`EIATTR_PARAM_CBANK`): a symbol, then offset and size of two bytes each.
const BLOCK: u8 = 0x0A;
/// Threads of a CTA (`EIATTR_REQNTID`).
const REQUIRED_THREADS: u8 = 0x10;
/// One parameter (`EIATTR_KPARAM_INFO`).
const PARAMETER: u8 = 0x17;
/// Bytes of all parameters (`EIATTR_CBANK_PARAM_SIZE`).
const PARAMETER_BYTES: u8 = 0x19;

/// Reads the section of an entry.
pub(super) fn of_entry(cubin: &[u8], entry: &str) -> Result<BinaryReport> {
    let file = object::read::elf::ElfFile64::<object::Endianness>::parse(cubin).context("reading a cubin")?;
    let name = format!(".nv.info.{entry}");
    let section = file.section_by_name(&name).with_context(|| format!("the cubin has no section {name}"))?;
    records(section.data().context("reading a section")?).with_context(|| format!("reading {name}"))
}

fn records(mut rest: &[u8]) -> Result<BinaryReport> {
    let mut report = BinaryReport::default();
    let mut params: Vec<(u16, Slot)> = Vec::new();
    while let [format, attribute, low, high, behind @ ..] = rest {
        let half = u16::from_le_bytes([*low, *high]);
        let size = match *format {
            FORMAT_NONE | FORMAT_BYTE | FORMAT_HALF => 0,
            FORMAT_SIZED => usize::from(half),
            other => bail!("a record of the unknown format {other}"),
        };
        let (value, next) = behind.split_at_checked(size).context("a record beyond the end")?;
        let word = |index: usize| -> Result<u32> {
            let bytes = value.get(4 * index..4 * index + 4).context("a value that is too short")?;
            Ok(u32::from_le_bytes(bytes.try_into()?))
        };
        match *attribute {
            BLOCK => report.base_bytes = word(1)? & 0xFFFF,
            REQUIRED_THREADS => report.threads = Some([word(0)?, word(1)?, word(2)?]),
            // An index, then ordinal and offset, then the size above 18 bits of other things.
            PARAMETER => {
                let place = word(1)?;
                params.push(((place & 0xFFFF) as u16, Slot { offset_bytes: place >> 16, bytes: word(2)? >> 18 }));
            }
            PARAMETER_BYTES => report.param_bytes = u32::from(half),
            _ => {}
        }
        rest = next;
    }
    params.sort_by_key(|(ordinal, _)| *ordinal);
    report.params = params.into_iter().map(|(_, slot)| slot).collect();
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sized(attribute: u8, words: &[u32]) -> Vec<u8> {
        let mut bytes = vec![FORMAT_SIZED, attribute, 4 * words.len() as u8, 0];
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes
    }

    #[test]
    fn records_are_read_in_any_order_and_by_their_size() {
        let mut bytes = sized(PARAMETER, &[0, 8 << 16 | 1, 4 << 18 | 0x1F000]);
        bytes.extend([FORMAT_BYTE, 0x4C, 1, 0]);
        bytes.extend(sized(PARAMETER, &[0, 0, 8 << 18]));
        bytes.extend([FORMAT_HALF, PARAMETER_BYTES, 12, 0]);
        bytes.extend(sized(REQUIRED_THREADS, &[384, 1, 1]));
        bytes.extend(sized(BLOCK, &[5, 12 << 16 | 0x210]));
        let report = records(&bytes).expect("readable");
        assert_eq!(report.params, [Slot { offset_bytes: 0, bytes: 8 }, Slot { offset_bytes: 8, bytes: 4 }]);
        assert_eq!((report.param_bytes, report.threads), (12, Some([384, 1, 1])));
        assert_eq!(report.base_bytes, 0x210);
        assert!(records(&bytes[..bytes.len() - 1]).is_err(), "cut off");
        assert!(records(&[9, 0, 0, 0]).is_err(), "an unknown format");
    }
}
