//! PTX text as statements: labels, declarations, instructions with their operands.
//!
//! Source: PTX ISA 9.0, chapter 4 "Syntax" and section 9.1 "Format and Semantics of Instruction Descriptions". Comments and `.loc` are
//! passed over.

/// A statement and the line that it begins on, from 1.
pub(super) struct Statement<'t> {
    pub(super) line: u32,
    pub(super) what: What<'t>,
}

pub(super) enum What<'t> {
    /// `name:`
    Label(&'t str),
    /// `{`
    Open,
    /// `}`
    Close,
    /// `.reg .class names;`
    Registers(Registers<'t>),
    /// `@guard opcode operands;`
    Instruction(Instruction<'t>),
}

/// A declaration of registers: each a name, or a stem with the number of registers (`%role_<5>`).
pub(super) struct Registers<'t> {
    pub(super) class: &'t str,
    pub(super) names: Vec<(&'t str, Option<u32>)>,
}

pub(super) struct Instruction<'t> {
    /// The predicate in front, and whether it is negated.
    pub(super) guard: Option<(&'t str, bool)>,
    /// The opcode with its modifiers.
    pub(super) opcode: &'t str,
    pub(super) operands: Vec<Operand<'t>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Operand<'t> {
    /// A register, a number, the name of a variable or a label.
    Word(&'t str),
    /// `name+bytes`: a variable and an offset.
    Sum(&'t str, i64),
    /// `[base+bytes]`, or with the coordinates of a tensor, `[base, {…}]`.
    Address { base: &'t str, offset: i64, coordinates: Option<Vec<&'t str>> },
    /// `{…}`
    Group(Vec<&'t str>),
    /// `first|second`: two results.
    Pair(&'t str, &'t str),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Token<'t> {
    pub(super) text: &'t str,
    pub(super) line: u32,
}

/// What is wrong with a text, and the line.
pub(super) type Malformed = (u32, String);

/// Cuts a text into words, numbers, strings and marks.
pub(super) fn tokens(text: &str) -> Result<Vec<Token<'_>>, Malformed> {
    let bytes = text.as_bytes();
    let mut found = Vec::with_capacity(text.len() / 6);
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
                continue;
            }
            byte if byte.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                at = end_of_line(bytes, at);
                continue;
            }
            b'"' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' && bytes[at] != b'\n' {
                    at += 1;
                }
                at += 1;
            }
            b'-' if bytes.get(at + 1).is_some_and(u8::is_ascii_digit) => at = end_of_word(bytes, at + 1),
            byte if is_word(byte) => at = end_of_word(bytes, at),
            b'{' | b'}' | b'[' | b']' | b'(' | b')' | b',' | b';' | b':' | b'+' | b'@' | b'!' | b'|' | b'<' | b'>' => at += 1,
            other => return Err((line, format!("`{}` has no place in PTX", char::from(other)))),
        }
        let Some(word) = text.get(start..at) else { return Err((line, "a string does not end".into())) };
        if word == ".loc" {
            at = end_of_line(bytes, at);
            continue;
        }
        found.push(Token { text: word, line });
    }
    Ok(found)
}

const fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

fn end_of_line(bytes: &[u8], from: usize) -> usize {
    bytes[from..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |length| from + length)
}

/// Two colons belong to a word (`shared::cta`), one ends a label.
fn end_of_word(bytes: &[u8], from: usize) -> usize {
    let mut at = from;
    loop {
        if at < bytes.len() && is_word(bytes[at]) {
            at += 1;
        } else if bytes.get(at..at + 2) == Some(b"::") {
            at += 2;
        } else {
            return at;
        }
    }
}

/// Reads tokens one after the other.
pub(super) struct Reader<'t> {
    tokens: Vec<Token<'t>>,
    at: usize,
}

impl<'t> Reader<'t> {
    pub(super) fn new(tokens: Vec<Token<'t>>) -> Self {
        Reader { tokens, at: 0 }
    }

    pub(super) fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |token| token.line)
    }

    pub(super) fn peek(&self) -> &'t str {
        self.tokens.get(self.at).map_or("", |token| token.text)
    }

    fn peek_second(&self) -> &'t str {
        self.tokens.get(self.at + 1).map_or("", |token| token.text)
    }

    pub(super) fn take(&mut self) -> &'t str {
        let text = self.peek();
        self.at += 1;
        text
    }

    /// Takes the token if it is this one.
    pub(super) fn eat(&mut self, text: &str) -> bool {
        let found = self.peek() == text;
        self.at += usize::from(found);
        found
    }

    pub(super) fn need(&mut self, text: &str) -> Result<(), Malformed> {
        if self.eat(text) { Ok(()) } else { Err(self.malformed(&format!("`{text}`"))) }
    }

    pub(super) fn malformed(&self, wanted: &str) -> Malformed {
        (self.line(), format!("`{}` stands where {wanted} must stand", self.peek()))
    }

    pub(super) fn word(&mut self, wanted: &str) -> Result<&'t str, Malformed> {
        if self.peek().bytes().next().is_some_and(|byte| is_word(byte) || byte == b'-') {
            Ok(self.take())
        } else {
            Err(self.malformed(wanted))
        }
    }

    /// A decimal number without a sign.
    pub(super) fn count(&mut self, wanted: &str) -> Result<u32, Malformed> {
        let malformed = self.malformed(wanted);
        self.take().parse().map_err(|_| malformed)
    }

    /// One statement of a body.
    pub(super) fn statement(&mut self) -> Result<Statement<'t>, Malformed> {
        let line = self.line();
        let what = if self.eat("{") {
            What::Open
        } else if self.eat("}") {
            What::Close
        } else if self.eat(".reg") {
            What::Registers(self.registers()?)
        } else if self.peek_second() == ":" {
            let name = self.word("a label")?;
            self.need(":")?;
            What::Label(name)
        } else {
            What::Instruction(self.instruction()?)
        };
        Ok(Statement { line, what })
    }

    fn registers(&mut self) -> Result<Registers<'t>, Malformed> {
        let class = self.word("a class of registers")?;
        let mut names = Vec::new();
        loop {
            let name = self.word("the name of a register")?;
            let count = if self.eat("<") {
                let count = self.count("how many registers")?;
                self.need(">")?;
                Some(count)
            } else {
                None
            };
            names.push((name, count));
            if !self.eat(",") {
                break;
            }
        }
        self.need(";")?;
        Ok(Registers { class, names })
    }

    fn instruction(&mut self) -> Result<Instruction<'t>, Malformed> {
        let guard = if self.eat("@") {
            let negated = self.eat("!");
            Some((self.word("a predicate")?, negated))
        } else {
            None
        };
        let opcode = self.word("an opcode")?;
        let mut operands = Vec::new();
        if self.peek() != ";" {
            loop {
                operands.push(self.operand()?);
                if !self.eat(",") {
                    break;
                }
            }
        }
        self.need(";")?;
        Ok(Instruction { guard, opcode, operands })
    }

    fn operand(&mut self) -> Result<Operand<'t>, Malformed> {
        if self.eat("{") {
            return Ok(Operand::Group(self.group()?));
        }
        if self.eat("[") {
            let base = self.word("an address")?;
            let offset = self.offset()?;
            let coordinates = if self.eat(",") {
                self.need("{")?;
                Some(self.group()?)
            } else {
                None
            };
            self.need("]")?;
            return Ok(Operand::Address { base, offset, coordinates });
        }
        let word = self.word("an operand")?;
        if self.eat("|") {
            return Ok(Operand::Pair(word, self.word("a second result")?));
        }
        if self.peek() == "+" {
            return Ok(Operand::Sum(word, self.offset()?));
        }
        Ok(Operand::Word(word))
    }

    /// What stands between braces, up to the closing one.
    fn group(&mut self) -> Result<Vec<&'t str>, Malformed> {
        let mut words = vec![self.word("an operand")?];
        while self.eat(",") {
            words.push(self.word("an operand")?);
        }
        self.need("}")?;
        Ok(words)
    }

    /// `+bytes`, or nothing.
    fn offset(&mut self) -> Result<i64, Malformed> {
        if !self.eat("+") {
            return Ok(0);
        }
        let malformed = self.malformed("a number of bytes");
        self.take().parse().map_err(|_| malformed)
    }
}

/// A number as PTX writes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Literal {
    /// `0f` and eight digits: the bits of an f32.
    F32(u32),
    /// `0d` and sixteen digits: the bits of an f64.
    F64(u64),
    /// A whole number, decimal or hexadecimal.
    Whole(i128),
}

/// A number, or `None` for any other word.
pub(super) fn literal(word: &str) -> Option<Literal> {
    if !word.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
        return None;
    }
    if let Some(digits) = word.strip_prefix("0f") {
        return (digits.len() == 8).then(|| u32::from_str_radix(digits, 16).ok()).flatten().map(Literal::F32);
    }
    if let Some(digits) = word.strip_prefix("0d") {
        return (digits.len() == 16).then(|| u64::from_str_radix(digits, 16).ok()).flatten().map(Literal::F64);
    }
    let digits = word.strip_prefix('-').unwrap_or(word);
    match word.strip_prefix("0x") {
        Some(digits) => i128::from_str_radix(digits, 16).ok(),
        // PTX takes a leading zero for base eight, which nobody here means.
        None if digits.len() > 1 && digits.starts_with('0') => None,
        None => word.parse().ok(),
    }
    .map(Literal::Whole)
}
