//! A compiled kernel as it is kept, on disk or in a pack: its code, what a launch has to know of it, and what its compiler found.

use crate::facts::KernelFacts;
use crate::jit::JitFinding;

/// The code of a kept kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Code {
    /// Machine code, an ELF image.
    Cubin(Vec<u8>),
    /// PTX text that only the driver may turn into machine code, which it keeps in its own cache: the text of kernels
    /// with register budgets (see [`crate::has_register_budgets`]).
    Ptx(String),
}

/// A kept kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Threads, cluster, shared memory and parameters.
    pub facts: KernelFacts,
    /// What the compiler found that the kernel's author did not accept; `None` where it was silent.
    pub findings: Option<Vec<JitFinding>>,
    /// The code.
    pub code: Code,
}

/// First word of an entry: what its code is, in which layout. A changed layout gets new numbers, so that older readers refuse it.
const CUBIN: u32 = 0x3142_5543;
const PTX: u32 = 0x3158_5450;
/// In place of the number of findings: nobody knows.
const UNKNOWN: u32 = u32::MAX;

impl Entry {
    /// The entry as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let word = |bytes: &mut Vec<u8>, value: u32| bytes.extend_from_slice(&value.to_le_bytes());
        let (kind, code) = match &self.code {
            Code::Cubin(cubin) => (CUBIN, &cubin[..]),
            Code::Ptx(text) => (PTX, text.as_bytes()),
        };
        word(&mut bytes, kind);
        word(&mut bytes, self.findings.as_ref().map_or(UNKNOWN, |findings| findings.len() as u32));
        for finding in self.findings.iter().flatten() {
            let (kind, first, second, texts) = match finding {
                JitFinding::Message { code, line } => (0, code.len() as u64, line.len() as u64, [code.as_str(), line]),
                JitFinding::Spill { store_bytes, load_bytes } => (1, *store_bytes, *load_bytes, [""; 2]),
                JitFinding::StackFrame { bytes } => (2, *bytes, 0, [""; 2]),
            };
            word(&mut bytes, kind);
            bytes.extend_from_slice(&first.to_le_bytes());
            bytes.extend_from_slice(&second.to_le_bytes());
            texts.iter().for_each(|text| bytes.extend_from_slice(text.as_bytes()));
        }
        bytes.extend(self.facts.to_bytes());
        bytes.extend_from_slice(code);
        bytes
    }

    /// The entry in the bytes.
    ///
    /// # Errors
    /// What is wrong, as the rest of a sentence about it.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let mut rest = bytes;
        let cut = || "its head is cut off".to_owned();
        let kind = word(&mut rest).ok_or_else(cut)?;
        if kind != CUBIN && kind != PTX {
            return Err(format!("its kind {kind:#x} is unknown here"));
        }
        let findings = match word(&mut rest).ok_or_else(cut)? {
            UNKNOWN => None,
            count => Some((0..count).map(|_| finding(&mut rest)).collect::<Option<Vec<_>>>().ok_or("its findings are unreadable")?),
        };
        let (facts, code) = KernelFacts::from_bytes(rest).ok_or("it holds no kernel facts")?;
        let code = match kind {
            CUBIN => Code::Cubin(code.to_vec()),
            _ => Code::Ptx(String::from_utf8(code.to_vec()).map_err(|_| "its PTX is no text")?),
        };
        Ok(Self { facts, findings, code })
    }
}

fn word(rest: &mut &[u8]) -> Option<u32> {
    let (word, tail) = rest.split_first_chunk::<4>()?;
    *rest = tail;
    Some(u32::from_le_bytes(*word))
}

fn finding(rest: &mut &[u8]) -> Option<JitFinding> {
    let kind = word(rest)?;
    let mut number = || -> Option<u64> {
        let (number, tail) = rest.split_first_chunk::<8>()?;
        *rest = tail;
        Some(u64::from_le_bytes(*number))
    };
    let (first, second) = (number()?, number()?);
    let mut text = |length: u64| -> Option<String> {
        let (text, tail) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        *rest = tail;
        String::from_utf8(text.to_vec()).ok()
    };
    match kind {
        0 => Some(JitFinding::Message { code: text(first)?, line: text(second)? }),
        1 => Some(JitFinding::Spill { store_bytes: first, load_bytes: second }),
        2 => Some(JitFinding::StackFrame { bytes: first }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Parameter, ParameterFact};

    fn entry(findings: Option<Vec<JitFinding>>, code: Code) -> Entry {
        let parameters = vec![Parameter { offset_bytes: 0, fact: ParameterFact::Pointer { alignment_bytes: 16 } }];
        Entry { facts: KernelFacts { threads: 128, cluster: 2, shared_bytes: 9, parameters, parameter_bytes: 8 }, findings, code }
    }

    fn every_finding() -> Vec<JitFinding> {
        let message = JitFinding::Message { code: "C7508".to_owned(), line: "C7508: ignored".to_owned() };
        vec![message, JitFinding::Spill { store_bytes: 8, load_bytes: 1 << 40 }, JitFinding::StackFrame { bytes: 16 }]
    }

    #[test]
    fn entries_survive() {
        for findings in [None, Some(vec![]), Some(every_finding())] {
            for code in [Code::Cubin(vec![]), Code::Cubin(vec![0xff; 33]), Code::Ptx(".version 9.0\n".to_owned())] {
                let entry = entry(findings.clone(), code);
                assert_eq!(Entry::from_bytes(&entry.to_bytes()), Ok(entry));
            }
        }
    }

    #[test]
    fn whatever_is_cut_off_or_unknown_is_refused() {
        let whole = entry(Some(every_finding()), Code::Cubin(vec![])).to_bytes();
        for length in 0..whole.len() {
            Entry::from_bytes(&whole[..length]).expect_err(&format!("cut at {length}"));
        }
        let mut other = whole.clone();
        other[0] ^= 1;
        assert!(Entry::from_bytes(&other).expect_err("another layout").contains("unknown"));
        let mut many = whole.clone();
        many[4..8].copy_from_slice(&(UNKNOWN - 1).to_le_bytes());
        assert!(Entry::from_bytes(&many).is_err(), "more findings than there are bytes");
        let mut no_text = entry(None, Code::Ptx("x".to_owned())).to_bytes();
        *no_text.last_mut().expect("not empty") = 0xff;
        assert!(Entry::from_bytes(&no_text).expect_err("no UTF-8").contains("no text"));
    }
}
