//! One statement of PTX as an instruction of the table: the grammar of the manual, opcode by opcode.
//!
//! Written from the section "Syntax" of each instruction and from the table's words on operands, never from the table's templates: what one
//! of the two has wrong, the other does not repeat. Modifiers are read in the manual's order, and nothing may be left over.
//!
//! Source: PTX ISA 9.0, section 9.7.

mod arithmetic;
mod copies;
mod lanes;
mod matrix;
mod memory;
mod sync;

use super::statement::{Literal, Operand, literal};
use crate::inst::{Op, Scope};
use crate::ir::Ty;
use std::collections::HashMap;

/// Why a statement is no instruction of the table.
pub(super) type Unknown = String;

/// What a statement does.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Reading<'t> {
    pub(super) meaning: Meaning,
    /// Registers written, in the order of the table.
    pub(super) outs: Vec<&'t str>,
    /// Operands read, in the order of the table.
    pub(super) ins: Vec<Value<'t>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Meaning {
    /// An instruction; types as far as the text tells them.
    Op(Op),
    /// The address of the byte of shared memory with this offset.
    SharedAddress(i64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'t> {
    /// A register or a number.
    Word(&'t str),
    /// The constant part of an address.
    Offset(i64),
}

/// The names of a module that instructions speak of.
#[derive(Default)]
pub(super) struct Names<'t> {
    /// Parameters, with their numbers.
    pub(super) params: HashMap<&'t str, u32>,
    /// The array of shared memory.
    pub(super) shared: Option<&'t str>,
}

/// Reads one instruction.
pub(super) fn read<'t>(opcode: &'t str, operands: &[Operand<'t>], names: &Names<'t>) -> Result<Reading<'t>, Unknown> {
    let mut words = Words { opcode, rest: opcode };
    let mut form = Form { names, operands, at: 0, outs: Vec::new(), ins: Vec::new() };
    let first = words.next();
    let meaning = match first {
        "mov" => memory::mov(&mut words, &mut form)?,
        _ => Meaning::Op(op(first, &mut words, &mut form)?),
    };
    words.end()?;
    form.end()?;
    Ok(Reading { meaning, outs: form.outs, ins: form.ins })
}

fn op<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    match first {
        "add" | "sub" | "mul" | "mad" | "min" | "max" | "neg" | "abs" | "fma" | "div" | "copysign" => {
            arithmetic::arithmetic(first, words, form)
        }
        "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => arithmetic::special(first, words, form),
        "and" | "or" | "xor" | "not" | "shl" | "shr" | "popc" | "clz" | "brev" | "bfind" | "bfe" | "bfi" | "prmt" | "shf" | "lop3"
        | "dp4a" | "dp2a" => arithmetic::bits(first, words, form),
        "setp" | "selp" => arithmetic::compare(first, words, form),
        "cvt" => arithmetic::convert(words, form),
        "ld" => memory::load(words, form),
        "st" => memory::store(words, form),
        "atom" | "red" => memory::atomic(first, words, form),
        "prefetch" | "discard" | "createpolicy" | "mapa" => memory::cache_control(first, words, form),
        "cp" => copies::copy(words, form),
        "tensormap" => copies::tensormap(words, form),
        "ldmatrix" | "stmatrix" | "movmatrix" => matrix::fragment(first, words, form),
        "mma" => matrix::mma(words, form),
        "wgmma" => matrix::wgmma(words, form),
        "barrier" | "bar" => sync::barrier(first, words, form),
        "mbarrier" => sync::mbarrier(words, form),
        "fence" => sync::fence(words, form),
        "shfl" | "vote" | "match" | "redux" | "elect" | "activemask" => lanes::exchange(first, words, form),
        "setmaxnreg" | "griddepcontrol" | "nanosleep" | "trap" => lanes::control(first, words, form),
        _ => Err(format!("`{first}` is no opcode of the table")),
    }
}

/// The modifiers of an opcode, one after the other.
struct Words<'t> {
    opcode: &'t str,
    rest: &'t str,
}

impl<'t> Words<'t> {
    fn peek(&self) -> &'t str {
        self.rest.split('.').next().unwrap_or("")
    }

    fn next(&mut self) -> &'t str {
        let word = self.peek();
        self.rest = self.rest.get(word.len() + 1..).unwrap_or("");
        word
    }

    /// Takes the word if it comes next.
    fn flag(&mut self, word: &str) -> bool {
        let found = self.peek() == word;
        if found {
            self.next();
        }
        found
    }

    fn unknown(&self, wanted: &str) -> Unknown {
        match self.peek() {
            "" => format!("`{}` ends where {wanted} must stand", self.opcode),
            word => format!("`.{word}` of `{}` stands where {wanted} must stand", self.opcode),
        }
    }

    /// Takes these words, separated by dots.
    fn need(&mut self, words: &str) -> Result<(), Unknown> {
        for word in words.split('.') {
            if !self.flag(word) {
                return Err(self.unknown(&format!("`.{word}`")));
            }
        }
        Ok(())
    }

    /// What the next word stands for, if it is in the list.
    fn option<T: Copy>(&mut self, list: &[(&str, T)]) -> Option<T> {
        let found = list.iter().find(|(word, _)| *word == self.peek()).map(|(_, meaning)| *meaning);
        if found.is_some() {
            self.next();
        }
        found
    }

    /// What the next word stands for; it must be in the list.
    fn choice<T: Copy>(&mut self, list: &[(&str, T)]) -> Result<T, Unknown> {
        self.option(list).ok_or_else(|| {
            let words: Vec<String> = list.iter().map(|(word, _)| format!("`.{word}`")).collect();
            self.unknown(&words.join(" or "))
        })
    }

    fn ty(&mut self) -> Result<Ty, Unknown> {
        self.option(TYPES).ok_or_else(|| self.unknown("a type"))
    }

    fn bits(&mut self) -> Result<Ty, Unknown> {
        self.choice(BITS)
    }

    fn scope(&mut self) -> Result<Scope, Unknown> {
        self.choice(SCOPES)
    }

    /// `.v2`, `.v4`, `.v8`, or one.
    fn vector(&mut self) -> u8 {
        self.option(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1)
    }

    fn end(&self) -> Result<(), Unknown> {
        if self.rest.is_empty() && !self.opcode.ends_with('.') { Ok(()) } else { Err(self.unknown("nothing more")) }
    }
}

/// A decimal number without sign or leading zero.
fn plain_number(digits: &str) -> Option<u32> {
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    plain.then(|| digits.parse().ok()).flatten()
}

const TYPES: &[(&str, Ty)] = &[
    ("pred", Ty::Pred),
    ("b16", Ty::B16),
    ("b32", Ty::B32),
    ("b64", Ty::B64),
    ("u16", Ty::U16),
    ("s16", Ty::S16),
    ("u32", Ty::U32),
    ("s32", Ty::S32),
    ("u64", Ty::U64),
    ("s64", Ty::S64),
    ("f16", Ty::F16),
    ("bf16", Ty::Bf16),
    ("f16x2", Ty::F16x2),
    ("bf16x2", Ty::Bf16x2),
    ("f32", Ty::F32),
    ("f64", Ty::F64),
];

const BITS: &[(&str, Ty)] = &[("b16", Ty::B16), ("b32", Ty::B32), ("b64", Ty::B64)];

const SCOPES: &[(&str, Scope)] = &[("cta", Scope::Cta), ("cluster", Scope::Cluster), ("gpu", Scope::Gpu), ("sys", Scope::Sys)];

/// Operands, taken one after the other in the order of the text and put where the table has them.
struct Form<'a, 't> {
    names: &'a Names<'t>,
    operands: &'a [Operand<'t>],
    at: usize,
    outs: Vec<&'t str>,
    ins: Vec<Value<'t>>,
}

impl<'a, 't> Form<'a, 't> {
    fn peek(&self) -> Option<&'a Operand<'t>> {
        self.operands.get(self.at)
    }

    fn take(&mut self) -> Option<&'a Operand<'t>> {
        let operand = self.peek();
        self.at += 1;
        operand
    }

    fn word(&mut self) -> Result<&'t str, Unknown> {
        match self.take() {
            Some(Operand::Word(word)) => Ok(word),
            other => Err(format!("{} where a register or a number must stand", shown(other))),
        }
    }

    fn out(&mut self) -> Result<(), Unknown> {
        let word = self.word()?;
        self.outs.push(word);
        Ok(())
    }

    fn input(&mut self) -> Result<(), Unknown> {
        let word = self.word()?;
        self.ins.push(Value::Word(word));
        Ok(())
    }

    fn inputs(&mut self, count: usize) -> Result<(), Unknown> {
        (0..count).try_for_each(|_| self.input())
    }

    /// One result and so many operands: `d, a, b`.
    fn result_of(&mut self, count: usize) -> Result<(), Unknown> {
        self.out()?;
        self.inputs(count)
    }

    /// `[base+offset]`: two operands of the table.
    fn address(&mut self) -> Result<(), Unknown> {
        match self.take() {
            Some(Operand::Address { base, offset, coordinates: None }) => {
                self.ins.extend([Value::Word(base), Value::Offset(*offset)]);
                Ok(())
            }
            other => Err(format!("{} where an address must stand", shown(other))),
        }
    }

    /// `[base]`: one operand of the table.
    fn plain_address(&mut self) -> Result<Value<'t>, Unknown> {
        match self.take() {
            Some(Operand::Address { base, offset: 0, coordinates: None }) => Ok(Value::Word(base)),
            other => Err(format!("{} where an address without an offset must stand", shown(other))),
        }
    }

    fn at_address(&mut self) -> Result<(), Unknown> {
        let address = self.plain_address()?;
        self.ins.push(address);
        Ok(())
    }

    /// `[map, {coordinates}]`.
    fn tensor(&mut self, rank: u32) -> Result<(), Unknown> {
        match self.take() {
            Some(Operand::Address { base, offset: 0, coordinates: Some(list) }) if list.len() == rank as usize => {
                self.ins.push(Value::Word(base));
                self.ins.extend(list.iter().map(|word| Value::Word(word)));
                Ok(())
            }
            other => Err(format!("{} where a tensor map with {rank} coordinates must stand", shown(other))),
        }
    }

    fn group(&mut self, count: usize) -> Result<&'a [&'t str], Unknown> {
        match self.take() {
            Some(Operand::Group(words)) if words.len() == count => Ok(words),
            other => Err(format!("{} where a group of {count} must stand", shown(other))),
        }
    }

    fn group_out(&mut self, count: usize) -> Result<(), Unknown> {
        let words = self.group(count)?;
        self.outs.extend(words);
        Ok(())
    }

    fn group_in(&mut self, count: usize) -> Result<(), Unknown> {
        let words = self.group(count)?;
        self.ins.extend(words.iter().map(|word| Value::Word(word)));
        Ok(())
    }

    /// A value, or a group of several.
    fn vector_in(&mut self, count: u8) -> Result<(), Unknown> {
        if count == 1 { self.input() } else { self.group_in(usize::from(count)) }
    }

    fn vector_out(&mut self, count: u8) -> Result<(), Unknown> {
        if count == 1 { self.out() } else { self.group_out(usize::from(count)) }
    }

    /// A whole number that is part of the instruction.
    fn number(&mut self) -> Result<i128, Unknown> {
        let word = self.word()?;
        match literal(word) {
            Some(Literal::Whole(value)) => Ok(value),
            _ => Err(format!("`{word}` where a whole number must stand")),
        }
    }

    fn small_number(&mut self) -> Result<u32, Unknown> {
        let number = self.number()?;
        u32::try_from(number).map_err(|_| format!("{number} where a number of 32 bits must stand"))
    }

    /// A number that the table does not leave open.
    fn fixed(&mut self, value: i128) -> Result<(), Unknown> {
        let number = self.number()?;
        if number == value { Ok(()) } else { Err(format!("{number} where {value} must stand")) }
    }

    /// 0 or 1.
    fn bit(&mut self) -> Result<bool, Unknown> {
        match self.number()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("{other} where 0 or 1 must stand")),
        }
    }

    /// `_`: no result.
    fn nothing(&mut self) -> Result<(), Unknown> {
        match self.word()? {
            "_" => Ok(()),
            other => Err(format!("`{other}` where `_` must stand")),
        }
    }

    fn end(&self) -> Result<(), Unknown> {
        if self.at == self.operands.len() { Ok(()) } else { Err(format!("{} operands where {} are read", self.operands.len(), self.at)) }
    }
}

fn shown(operand: Option<&Operand<'_>>) -> String {
    operand.map_or("the end".into(), |operand| format!("{operand:?}"))
}
