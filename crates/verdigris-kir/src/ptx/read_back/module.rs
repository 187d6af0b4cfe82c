//! The frame of a module: version, chip, shared memory, entry with its parameters, declarations of registers, statements.

use super::op::Names;
use super::statement::{Literal, Malformed, Operand, Reader, Statement, What, literal, tokens};
use std::collections::{HashMap, HashSet};

/// A module with one entry, as the text has it.
pub(super) struct Module<'t> {
    pub(super) version: (u32, &'t str),
    pub(super) target: (u32, &'t str),
    /// The array of shared memory: line, name, alignment.
    pub(super) shared: Option<(u32, &'t str, u32)>,
    pub(super) entry: (u32, &'t str),
    pub(super) params: Vec<ParamText<'t>>,
    /// Threads of a CTA.
    pub(super) threads: (u32, u32),
    pub(super) min_ctas: (u32, u32),
    /// CTAs of a cluster.
    pub(super) cluster: Option<(u32, u32)>,
    pub(super) registers: HashMap<&'t str, Declared<'t>>,
    pub(super) body: Vec<Statement<'t>>,
    pub(super) names: Names<'t>,
}

/// A parameter as declared.
pub(super) struct ParamText<'t> {
    pub(super) line: u32,
    pub(super) name: &'t str,
    pub(super) bytes: u32,
    pub(super) alignment_bytes: u32,
    /// The alignment of what it points to.
    pub(super) points_to: Option<u32>,
}

/// What a register is declared for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Use {
    /// The register of the kernel with this number.
    Kernel(u32),
    /// A constant, set at the entry in this line.
    Constant { bits: u64, line: u32 },
    /// A stem: whether a warp belongs to a role, for so many comparisons.
    Roles(u32),
    /// A stem: results that nobody wants, for so many of one instruction.
    Sinks(u32),
}

pub(super) struct Declared<'t> {
    pub(super) class: &'t str,
    pub(super) line: u32,
    pub(super) what: Use,
}

/// Bits of a class of registers.
pub(super) fn class_bits(class: &str) -> Option<u32> {
    match class {
        ".pred" => Some(1),
        ".b16" => Some(16),
        ".b32" => Some(32),
        ".b64" => Some(64),
        _ => None,
    }
}

pub(super) fn read(text: &str) -> Result<Module<'_>, Malformed> {
    let mut r = Reader::new(tokens(text)?);
    r.need(".version")?;
    let version = (r.line(), r.word("a version")?);
    r.need(".target")?;
    let target = (r.line(), r.word("a chip")?);
    r.need(".address_size")?;
    r.need("64")?;
    let mut files = 0;
    while r.eat(".file") {
        files += 1;
        r.need(&files.to_string())?;
        if !r.peek().starts_with('"') {
            return Err(r.malformed("the name of a file"));
        }
        r.take();
    }
    let mut names = Names::default();
    let mut shared = None;
    if r.eat(".extern") {
        r.need(".shared")?;
        r.need(".align")?;
        let line = r.line();
        let alignment = r.count("an alignment")?;
        r.need(".b8")?;
        let name = r.word("a name")?;
        for mark in ["[", "]", ";"] {
            r.need(mark)?;
        }
        names.shared = Some(name);
        shared = Some((line, name, alignment));
    }
    r.need(".visible")?;
    r.need(".entry")?;
    let entry = (r.line(), r.word("a name")?);
    let params = parameters(&mut r, &mut names)?;
    let (mut threads, mut min_ctas, mut cluster) = (None, None, None);
    r.need(".reqntid")?;
    threads.replace((r.line(), extents(&mut r)?));
    r.need(".minnctapersm")?;
    min_ctas.replace((r.line(), r.count("CTAs")?));
    if r.eat(".explicitcluster") {
        r.need(".reqnctapercluster")?;
        cluster = Some((r.line(), extents(&mut r)?));
    }
    r.need("{")?;
    let registers = declarations(&mut r)?;
    let body = body(&mut r)?;
    if r.eat(".section") {
        names_of_files(&mut r)?;
    }
    if !r.peek().is_empty() {
        return Err(r.malformed("the end of the module"));
    }
    let (Some(threads), Some(min_ctas)) = (threads, min_ctas) else { return Err(r.malformed("the entry's sizes")) };
    Ok(Module { version, target, shared, entry, params, threads, min_ctas, cluster, registers, body, names })
}

/// `x, 1, 1`
fn extents(r: &mut Reader<'_>) -> Result<u32, Malformed> {
    let x = r.count("an extent")?;
    for mark in [",", "1", ",", "1"] {
        r.need(mark)?;
    }
    Ok(x)
}

fn parameters<'t>(r: &mut Reader<'t>, names: &mut Names<'t>) -> Result<Vec<ParamText<'t>>, Malformed> {
    let mut params: Vec<ParamText<'t>> = Vec::new();
    r.need("(")?;
    while r.peek() != ")" {
        if !params.is_empty() {
            r.need(",")?;
        }
        r.need(".param")?;
        let line = r.line();
        let given = if r.eat(".align") { Some(r.count("an alignment")?) } else { None };
        let (mut bytes, class) = match r.take() {
            ".b8" => (1, "b8"),
            ".b32" => (4, "b32"),
            ".b64" => (8, "b64"),
            ".u64" => (8, "u64"),
            _ => return Err((line, "a parameter has the type b8, b32, b64 or u64".into())),
        };
        let points_to = if class == "u64" {
            for word in [".ptr", ".global", ".align"] {
                r.need(word)?;
            }
            Some(r.count("an alignment")?)
        } else {
            None
        };
        let name = r.word("a name")?;
        let alignment_bytes = given.unwrap_or(bytes);
        if class == "b8" {
            r.need("[")?;
            bytes = r.count("a size")?;
            r.need("]")?;
        }
        if names.params.insert(name, params.len() as u32).is_some() {
            return Err((line, format!("two parameters are called `{name}`")));
        }
        params.push(ParamText { line, name, bytes, alignment_bytes, points_to });
    }
    r.need(")")?;
    Ok(params)
}

/// The registers at the head of the entry, with the constants that are set there.
fn declarations<'t>(r: &mut Reader<'t>) -> Result<HashMap<&'t str, Declared<'t>>, Malformed> {
    let mut declared = HashMap::new();
    while r.peek() == ".reg" {
        let Statement { line, what: What::Registers(registers) } = r.statement()? else { return Err(r.malformed("a declaration")) };
        let Some(bits) = class_bits(registers.class) else {
            return Err((line, format!("`{}` is no class of registers", registers.class)));
        };
        for &(name, count) in &registers.names {
            let mut add = |name: &'t str, what| match declared.insert(name, Declared { class: registers.class, line, what }) {
                Some(_) => Err((line, format!("`{name}` is declared twice"))),
                None => Ok(()),
            };
            if let Some(count) = count {
                add(name, stem(name, bits, count).ok_or_else(|| (line, format!("`{name}<{count}>` has no meaning here")))?)?;
            } else if let Some(number) = numbered(name) {
                add(name, Use::Kernel(number))?;
            } else if registers.names.len() == 1 {
                let (bits, line) = constant(r, name, registers.class, bits)?;
                add(name, Use::Constant { bits, line })?;
            } else {
                return Err((line, format!("`{name}` is no register of the kernel")));
            }
        }
    }
    Ok(declared)
}

/// What `%role_<n>` and `%sink_32_<n>` are for; of a stem, how many there are.
fn stem(name: &str, bits: u32, count: u32) -> Option<Use> {
    match name {
        "%role_" if bits == 1 => Some(Use::Roles(count)),
        _ if name.strip_prefix("%sink_")?.strip_suffix('_')?.parse() == Ok(bits) => Some(Use::Sinks(count)),
        _ => None,
    }
}

/// `%r12` is register 12 of the kernel: letters, then digits.
fn numbered(name: &str) -> Option<u32> {
    let digits = name.strip_prefix('%')?.trim_start_matches(|c: char| c.is_ascii_lowercase());
    let letters = name.len() - 1 - digits.len();
    let plain = letters > 0 && digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    if plain { digits.parse().ok() } else { None }
}

/// The value of a constant: `mov.class name, value;` right behind its declaration.
fn constant(r: &mut Reader<'_>, name: &str, class: &str, bits: u32) -> Result<(u64, u32), Malformed> {
    let Statement { line, what } = r.statement()?;
    if let What::Instruction(inst) = &what
        && let (None, Some(moved), [Operand::Word(to), Operand::Word(value)]) =
            (inst.guard, inst.opcode.strip_prefix("mov"), inst.operands.as_slice())
        && moved == class
        && *to == name
        && let Some(Literal::Whole(value)) = literal(value)
        && (0..1i128 << bits).contains(&value)
    {
        return Ok((value as u64, line));
    }
    Err((line, format!("`{name}` is no register of the kernel, and no constant of {bits} bits is moved to it here")))
}

/// The statements up to the brace that closes the entry. Labels are unique, but for those inside braces.
fn body<'t>(r: &mut Reader<'t>) -> Result<Vec<Statement<'t>>, Malformed> {
    let mut statements = Vec::new();
    let mut labels = HashSet::new();
    let mut depth = 0;
    loop {
        let statement = r.statement()?;
        match &statement.what {
            What::Open => depth += 1,
            What::Close if depth == 0 => return Ok(statements),
            What::Close => depth -= 1,
            What::Label(name) if depth == 0 && !labels.insert(*name) => {
                return Err((statement.line, format!("two labels are called `{name}`")));
            }
            _ => {}
        }
        statements.push(statement);
    }
}

/// `.section .debug_str`: names that a profiler shows.
fn names_of_files(r: &mut Reader<'_>) -> Result<(), Malformed> {
    r.need(".debug_str")?;
    r.need("{")?;
    while r.peek() != "}" {
        r.word("a label")?;
        r.need(":")?;
        r.need(".b8")?;
        loop {
            r.count("a byte")?;
            if !r.eat(",") {
                break;
            }
        }
    }
    r.need("}")
}
