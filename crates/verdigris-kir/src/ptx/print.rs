//! The printer: blocks to labels and branches, templates of the table to text.

use super::Isa;
use crate::inst::{Class, Op};
use crate::ir::{Block, Inst, KernelBody, Loc, Operand, Param, ParamKind, Reg, Role, Stmt, Ty};
use crate::verify::Verified;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Registers declared on one line.
const DECLARED_PER_LINE: usize = 12;

/// The kernel as PTX text for a driver that reads `isa`. Deterministic: equal kernels give equal text.
///
/// The kernel's entry is called [`entry_name`]`(kernel.name)`; its parameters stand in the order and at the offsets of
/// [`KernelBody::param_offsets`].
pub fn print(kernel: &Verified<KernelBody>, isa: Isa) -> String {
    print_body(kernel, isa)
}

/// The same without the gate, for tests that print what no kernel would contain.
pub(super) fn print_body(kernel: &KernelBody, isa: Isa) -> String {
    Printer::new(kernel).print(isa)
}

/// The name of the entry point of a kernel of this name: what the driver looks up. Characters that PTX does not allow become `_`.
pub fn entry_name(kernel_name: &str) -> String {
    let name = identifier(kernel_name);
    if name.starts_with(|c: char| c.is_ascii_alphabetic()) { name } else { format!("_{name}") }
}

fn identifier(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' }).collect()
}

/// A constant that stands in a register of its own: width in bits (1 for a predicate), value.
type PooledConstant = (u32, u64);

struct Printer<'a> {
    kernel: &'a KernelBody,
    params: Vec<String>,
    text: String,
    depth: usize,
    unique: u32,
    loc: Option<Loc>,
    located: BTreeSet<Loc>,
    files: Vec<&'static str>,
    inlined_files: BTreeSet<usize>,
    constants: BTreeSet<PooledConstant>,
    // Throw-away results, by width: how many are needed at once.
    sinks: BTreeMap<u32, usize>,
    role_predicates: u32,
    /// Warps that can be here, as far as enclosing roles tell.
    warps: (u32, u32),
}

impl<'a> Printer<'a> {
    fn new(kernel: &'a KernelBody) -> Self {
        let mut params: Vec<String> = Vec::new();
        for param in &kernel.params {
            let base = format!("arg_{}", identifier(param.name));
            let mut name = base.clone();
            while params.contains(&name) {
                name = format!("{base}_{}", params.len());
            }
            params.push(name);
        }
        Printer {
            kernel,
            params,
            text: String::new(),
            depth: 1,
            unique: 0,
            loc: None,
            located: BTreeSet::new(),
            files: Vec::new(),
            inlined_files: BTreeSet::new(),
            constants: BTreeSet::new(),
            sinks: BTreeMap::new(),
            role_predicates: 0,
            warps: (0, kernel.threads.div_ceil(32)),
        }
    }

    fn print(mut self, isa: Isa) -> String {
        // The body first: it finds out which files, constants and throw-away registers the head has to declare.
        self.block(&self.kernel.body);
        self.line("ret;");
        let body = std::mem::take(&mut self.text);

        let mut out = String::new();
        let kernel = self.kernel;
        let _ = writeln!(out, "// {}", one_line(&kernel.name));
        let _ = writeln!(out, ".version {isa}\n.target {}\n.address_size 64\n", kernel.target.ptx());
        for (index, file) in self.files.iter().enumerate() {
            let _ = writeln!(out, ".file {} \"{}\"", index + 1, file.replace('\\', "/").replace('"', "_"));
        }
        if kernel.shared_bytes > 0 {
            let _ = writeln!(out, "\n// {} bytes:", kernel.shared_bytes);
            for piece in &kernel.shared {
                let _ = writeln!(out, "//   {:>6} {} ({} bytes)", piece.offset_bytes, one_line(piece.name), piece.bytes);
            }
            out.push_str(".extern .shared .align 1024 .b8 dynamic_shared[];\n");
        }
        let _ = writeln!(out, "\n.visible .entry {}(", entry_name(&kernel.name));
        for (index, (param, name)) in kernel.params.iter().zip(&self.params).enumerate() {
            let comma = if index + 1 < kernel.params.len() { "," } else { "" };
            let _ = writeln!(out, "    {}{comma}", declare_param(param, name));
        }
        let _ = writeln!(out, ")\n.reqntid {}, 1, 1\n.minnctapersm {}", kernel.threads, kernel.min_ctas.max(1));
        if kernel.cluster > 1 {
            let _ = writeln!(out, ".explicitcluster\n.reqnctapercluster {}, 1, 1", kernel.cluster);
        }
        out.push_str("{\n");
        self.declare_registers(&mut out);
        out.push_str(&body);
        out.push_str("}\n");
        if !self.inlined_files.is_empty() {
            out.push_str("\n.section .debug_str\n{\n");
            for &file in &self.inlined_files {
                let bytes: Vec<String> = stem(self.files[file]).bytes().chain([0]).map(|b| b.to_string()).collect();
                let _ = writeln!(out, "$$name_{}:\n.b8 {}", file + 1, bytes.join(", "));
            }
            out.push_str("}\n");
        }
        out
    }

    fn declare_registers(&self, out: &mut String) {
        // Only what is used is declared, one group for each width and name, so that the author's names stand beside their registers.
        let mut used = BTreeSet::new();
        self.kernel.for_each_inst(&mut |inst| {
            used.extend(inst.outs.iter().flatten());
            used.extend(inst.ins.iter().filter_map(|operand| operand.reg()));
            used.extend(inst.guard.map(|guard| guard.pred));
        });
        control_registers(&self.kernel.body, &mut used);
        let mut groups: BTreeMap<(u32, Option<&str>), Vec<String>> = BTreeMap::new();
        for reg in used {
            let info = &self.kernel.registers[reg.0 as usize];
            groups.entry((info.ty.bits(), info.name)).or_default().push(self.reg(reg));
        }
        for ((bits, name), registers) in &groups {
            let class = class_of_width(*bits);
            for line in registers.chunks(DECLARED_PER_LINE) {
                let note = name.map(|name| format!(" // {}", one_line(name))).unwrap_or_default();
                let _ = writeln!(out, "    .reg .{class} {};{note}", line.join(", "));
            }
        }
        for (bits, count) in &self.sinks {
            let _ = writeln!(out, "    .reg .{} %sink_{bits}_<{count}>;", class_of_width(*bits));
        }
        if self.role_predicates > 0 {
            let _ = writeln!(out, "    .reg .pred %role_<{}>;", self.role_predicates);
        }
        for &(bits, value) in &self.constants {
            let class = class_of_width(bits);
            let name = constant_name(bits, value);
            let value = if bits == 1 { value.to_string() } else { format!("0x{value:X}") };
            let _ = writeln!(out, "    .reg .{class} {name};\n    mov.{class} {name}, {value};");
        }
    }

    fn line(&mut self, text: &str) {
        for _ in 0..self.depth {
            self.text.push_str("    ");
        }
        self.text.push_str(text);
        self.text.push('\n');
    }

    fn label(&mut self, label: &str) {
        let _ = writeln!(self.text, "{label}:");
    }

    fn remark(&mut self, text: &str) {
        for line in text.lines() {
            self.line(&format!("// {line}"));
        }
    }

    fn next_unique(&mut self) -> u32 {
        self.unique += 1;
        self.unique
    }

    fn reg(&self, reg: Reg) -> String {
        let prefix = match self.kernel.registers[reg.0 as usize].ty {
            Ty::Pred => "p",
            Ty::B16 | Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => "h",
            Ty::F32 => "f",
            Ty::B32 | Ty::U32 | Ty::S32 | Ty::F16x2 | Ty::Bf16x2 => "r",
            Ty::B64 | Ty::U64 | Ty::S64 => "rd",
            Ty::F64 => "fd",
        };
        format!("%{prefix}{}", reg.0)
    }

    fn pooled(&mut self, ty: Ty, bits: u64) -> String {
        let width = ty.bits();
        let value = if width == 64 { bits } else { bits & ((1 << width) - 1) };
        self.constants.insert((width, value));
        constant_name(width, value)
    }

    fn file(&mut self, name: &'static str) -> usize {
        self.files.iter().position(|known| *known == name).unwrap_or_else(|| {
            self.files.push(name);
            self.files.len() - 1
        })
    }

    /// Says where the following instructions come from. An inlined position names the one around it, which PTX wants to have seen before.
    fn locate(&mut self, loc: Loc) {
        if self.loc == Some(loc) {
            return;
        }
        self.loc = Some(loc);
        let mut chain = Vec::new();
        let mut next = Some(loc);
        while let Some(current) = next {
            chain.push(current);
            next = self.kernel.locations[current.0 as usize].inlined_at;
        }
        for (depth, &current) in chain.iter().enumerate().rev() {
            if depth > 0 && self.located.contains(&current) {
                continue;
            }
            self.located.insert(current);
            let info = self.kernel.locations[current.0 as usize].clone();
            let file = self.file(info.file);
            let mut text = format!(".loc {} {} {}", file + 1, info.line, info.column);
            if let Some(outer) = info.inlined_at {
                let outer = self.kernel.locations[outer.0 as usize].clone();
                let outer_file = self.file(outer.file) + 1;
                self.inlined_files.insert(file);
                let _ = write!(text, ", function_name $$name_{}, inlined_at {outer_file} {} {}", file + 1, outer.line, outer.column);
            }
            self.line(&text);
        }
    }

    fn block(&mut self, block: &Block) {
        for stmt in &block.stmts {
            self.stmt(stmt);
        }
    }

    fn indented(&mut self, block: &Block) {
        self.depth += 1;
        self.block(block);
        self.depth -= 1;
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match stmt {
            Stmt::Inst(inst) => self.inst(inst),
            Stmt::Comment(text) => self.remark(text),
            Stmt::StopWhen { cond, loc } => {
                self.locate(*loc);
                let cond = self.reg(*cond);
                self.line(&format!("@{cond} ret;"));
            }
            Stmt::If { cond, then, otherwise, loc } => {
                self.locate(*loc);
                let n = self.next_unique();
                let cond = self.reg(*cond);
                let end = format!("$endif_{n}");
                if otherwise.stmts.is_empty() {
                    self.line(&format!("@!{cond} bra {end};"));
                    self.indented(then);
                } else if then.stmts.is_empty() {
                    self.line(&format!("@{cond} bra {end};"));
                    self.indented(otherwise);
                } else {
                    let side = format!("$else_{n}");
                    self.line(&format!("@!{cond} bra {side};"));
                    self.indented(then);
                    self.line(&format!("bra {end};"));
                    self.label(&side);
                    self.indented(otherwise);
                }
                self.label(&end);
            }
            Stmt::Loop { head, cond, body, name, loc } => {
                self.locate(*loc);
                let n = self.next_unique();
                let name = identifier(name);
                let (start, end) = (format!("${name}_{n}"), format!("$end_{name}_{n}"));
                let cond = self.reg(*cond);
                self.label(&start);
                self.indented(head);
                if body.stmts.is_empty() {
                    self.line(&format!("@{cond} bra {start};"));
                } else {
                    self.line(&format!("@!{cond} bra {end};"));
                    self.indented(body);
                    self.line(&format!("bra {start};"));
                    self.label(&end);
                }
            }
            Stmt::Roles { warp, roles, loc } => self.roles(*warp, roles, *loc),
        }
    }

    /// A chain of comparisons on the warp index, shortened by what is known of it: enclosing roles, and the roles in front.
    fn roles(&mut self, warp: Operand, roles: &[Role], loc: Loc) {
        self.locate(loc);
        let n = self.next_unique();
        let end = format!("$end_roles_{n}");
        let warp = self.operand(warp, Ty::U32);
        let around = self.warps;
        let mut first_left = around.0;
        for (index, role) in roles.iter().enumerate() {
            let name = identifier(role.name);
            let last = index + 1 == roles.len();
            let behind = role.first_warp + role.warps;
            let budget = role.registers.map(|count| format!(", {count} registers")).unwrap_or_default();
            self.remark(&format!("role {}: warps {} to {}{budget}", one_line(role.name), role.first_warp, behind.saturating_sub(1)));
            self.locate(role.loc);
            if role.first_warp > first_left {
                self.warp_branch("lt", &warp, role.first_warp, &end);
            }
            let next = if last { end.clone() } else { format!("$after_{name}_{n}_{index}") };
            if behind < around.1 {
                self.warp_branch("ge", &warp, behind, &next);
            }
            self.warps = (role.first_warp.max(around.0), behind.min(around.1));
            self.indented(&role.body);
            if !last {
                self.line(&format!("bra {end};"));
                self.label(&next);
            }
            first_left = behind;
        }
        self.warps = around;
        self.label(&end);
    }

    fn warp_branch(&mut self, cmp: &str, warp: &str, bound: u32, target: &str) {
        let predicate = format!("%role_{}", self.role_predicates);
        self.role_predicates += 1;
        self.line(&format!("setp.{cmp}.u32 {predicate}, {warp}, {bound};"));
        self.line(&format!("@{predicate} bra {target};"));
    }

    fn operand(&mut self, operand: Operand, ty: Ty) -> String {
        match self.kernel.constant(operand) {
            Some(bits) => self.pooled(ty, bits),
            None => operand.reg().map(|reg| self.reg(reg)).unwrap_or_default(),
        }
    }

    fn inst(&mut self, inst: &Inst) {
        self.locate(inst.loc);
        let text = self.expand(inst);
        let note = self.note(inst);
        let is_block = text.starts_with('{');
        let stop = if is_block { "" } else { ";" };
        match inst.guard {
            None => self.line(&format!("{text}{stop}{note}")),
            Some(guard) => {
                let (here, skip) = if guard.negate { ("!", "") } else { ("", "!") };
                let pred = self.reg(guard.pred);
                if is_block {
                    // A block cannot be predicated; it is jumped over.
                    let label = format!("$skip_{}", self.next_unique());
                    self.line(&format!("@{skip}{pred} bra {label};"));
                    self.line(&format!("{text}{note}"));
                    self.label(&label);
                } else {
                    self.line(&format!("@{here}{pred} {text};{note}"));
                }
            }
        }
    }

    /// The author's names for what the instruction writes or where it points.
    fn note(&self, inst: &Inst) -> String {
        let mut names: Vec<&str> = Vec::new();
        for name in inst.outs.iter().flatten().filter_map(|reg| self.kernel.registers[reg.0 as usize].name) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        if let Op::SharedAddress { index } = &inst.op {
            names.extend(self.kernel.shared.get(*index as usize).map(|piece| piece.name));
            names.dedup();
        }
        if names.is_empty() { String::new() } else { format!(" // {}", one_line(&names.join(", "))) }
    }

    fn expand(&mut self, inst: &Inst) -> String {
        let template = inst.op.ptx();
        let signature = inst.op.signature();
        let unique = if template.contains("%u") { self.next_unique() } else { 0 };
        let mut out = String::with_capacity(template.len() + 8 * inst.ins.len());
        let mut rest = template.as_str();
        while let Some(at) = rest.find('%') {
            out.push_str(&rest[..at]);
            rest = &rest[at + 1..];
            let kind = rest.chars().next().unwrap_or('%');
            rest = &rest[kind.len_utf8()..];
            match kind {
                'u' => {
                    let _ = write!(out, "{unique}");
                }
                'o' => {
                    let index = take_number(&mut rest);
                    let text = self.result(inst, index, signature.outs[index]);
                    out.push_str(&text);
                }
                'O' => {
                    let names: Vec<String> = (0..inst.outs.len()).map(|index| self.result(inst, index, signature.outs[index])).collect();
                    let _ = write!(out, "{{{}}}", names.join(", "));
                }
                'i' => {
                    let index = take_number(&mut rest);
                    let (mut operand, ty) = (inst.ins[index], signature.ins[index]);
                    if matches!(inst.op, Op::BarSync {} | Op::BarArrive {}) && index == 1 && self.kernel.constant(operand) == Some(0) {
                        // No count means the whole CTA.
                        operand = Operand::Imm(u64::from(self.kernel.threads));
                    }
                    let constant = self.kernel.constant(operand);
                    if out.ends_with('[') {
                        let text = self.operand(operand, ty);
                        out.push_str(&text);
                    } else if out.ends_with('+') && constant.is_some() {
                        // The constant part of an address.
                        match constant.unwrap_or_default() as i64 {
                            0 => {
                                out.pop();
                            }
                            offset => {
                                let _ = write!(out, "{offset}");
                            }
                        }
                    } else {
                        let text = self.input(&inst.op, operand, ty);
                        out.push_str(&text);
                    }
                }
                'I' => {
                    let from = take_number(&mut rest);
                    rest = rest.strip_prefix("..").unwrap_or(rest);
                    let to = take_number(&mut rest);
                    let names: Vec<String> = (from..to).map(|index| self.input(&inst.op, inst.ins[index], signature.ins[index])).collect();
                    let _ = write!(out, "{{{}}}", names.join(", "));
                }
                'p' => {
                    let index = take_number(&mut rest);
                    out.push_str(&self.params[index]);
                    if rest.starts_with("+0]") {
                        rest = &rest["+0".len()..];
                    }
                }
                's' => {
                    let index = take_number(&mut rest);
                    out.push_str("dynamic_shared");
                    let offset = self.kernel.shared[index].offset_bytes;
                    if offset > 0 {
                        let _ = write!(out, "+{offset}");
                    }
                }
                _ => out.push('%'),
            }
        }
        out.push_str(rest);
        out
    }

    /// A result: its register, or a throw-away one, since `_` is not allowed everywhere.
    fn result(&mut self, inst: &Inst, index: usize, ty: Ty) -> String {
        match inst.outs[index] {
            Some(reg) => self.reg(reg),
            None => {
                let needed = self.sinks.entry(ty.bits()).or_default();
                *needed = (*needed).max(index + 1);
                format!("%sink_{}_{index}", ty.bits())
            }
        }
    }

    fn input(&mut self, op: &Op, operand: Operand, ty: Ty) -> String {
        match self.kernel.constant(operand) {
            None => operand.reg().map(|reg| self.reg(reg)).unwrap_or_default(),
            Some(bits) => literal(op, ty, bits).unwrap_or_else(|| self.pooled(ty, bits)),
        }
    }
}

/// A constant as PTX spells it in this instruction, or `None` where only a register will do.
fn literal(op: &Op, ty: Ty, bits: u64) -> Option<String> {
    let class = op.class();
    if matches!(op, Op::Mov { .. }) {
        return Some(match ty {
            Ty::F32 => float32(bits),
            Ty::F64 => float64(bits),
            Ty::Pred => (bits & 1).to_string(),
            _ => integer(ty, bits),
        });
    }
    if matches!(ty, Ty::Pred | Ty::B16 | Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2) {
        return None;
    }
    match class {
        // Bit operations on a float take its bits.
        Class::Integer => Some(integer(ty, bits)),
        Class::Float | Class::Special | Class::Convert | Class::Compare => Some(match ty {
            Ty::F32 => float32(bits),
            Ty::F64 => float64(bits),
            _ => integer(ty, bits),
        }),
        // The selector of a sparse product.
        Class::Matrix if ty == Ty::U32 => Some(integer(ty, bits)),
        Class::Barrier | Class::Shuffle | Class::Control | Class::Async if !ty.is_float() && ty.bits() >= 32 => Some(integer(ty, bits)),
        Class::Memory if matches!(op, Op::St { .. } | Op::StByte { .. }) => Some(integer(ty.as_bits(), bits)),
        Class::Memory if !ty.is_float() && ty.bits() >= 32 => Some(integer(ty, bits)),
        _ => None,
    }
}

fn integer(ty: Ty, bits: u64) -> String {
    match ty {
        Ty::S16 => (bits as i16).to_string(),
        Ty::S32 => (bits as i32).to_string(),
        Ty::S64 => (bits as i64).to_string(),
        _ => {
            let value = if ty.bits() == 64 { bits } else { bits & ((1 << ty.bits()) - 1) };
            if matches!(ty, Ty::U16 | Ty::U32 | Ty::U64) || value < 10 { value.to_string() } else { format!("0x{value:X}") }
        }
    }
}

fn float32(bits: u64) -> String {
    format!("0f{:08X}", bits as u32)
}

fn float64(bits: u64) -> String {
    format!("0d{bits:016X}")
}

fn take_number(rest: &mut &str) -> usize {
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let number = rest[..end].parse().unwrap_or_default();
    *rest = &rest[end..];
    number
}

fn class_of_width(bits: u32) -> &'static str {
    match bits {
        1 => "pred",
        16 => "b16",
        32 => "b32",
        _ => "b64",
    }
}

fn constant_name(bits: u32, value: u64) -> String {
    match (bits, value) {
        (1, 0) => "%k_false".into(),
        (1, _) => "%k_true".into(),
        _ => format!("%k{bits}_{value:X}"),
    }
}

fn declare_param(param: &Param, name: &str) -> String {
    match &param.kind {
        ParamKind::Scalar(ty) => format!(".param .b{} {name}", 8 * ty.bytes().max(4)),
        ParamKind::Pointer { alignment_bytes, .. } => format!(".param .u64 .ptr .global .align {alignment_bytes} {name}"),
        ParamKind::Divisor | ParamKind::TensorMap(_) => {
            format!(".param .align {} .b8 {name}[{}]", param.kind.alignment_bytes(), param.kind.bytes())
        }
    }
}

fn control_registers(block: &Block, used: &mut BTreeSet<Reg>) {
    for stmt in &block.stmts {
        match stmt {
            Stmt::Inst(_) | Stmt::Comment(_) => {}
            Stmt::StopWhen { cond, .. } => {
                used.insert(*cond);
            }
            Stmt::If { cond, then, otherwise, .. } => {
                used.insert(*cond);
                control_registers(then, used);
                control_registers(otherwise, used);
            }
            Stmt::Loop { head, cond, body, .. } => {
                used.insert(*cond);
                control_registers(head, used);
                control_registers(body, used);
            }
            Stmt::Roles { warp, roles, .. } => {
                used.extend(warp.reg());
                for role in roles {
                    control_registers(&role.body, used);
                }
            }
        }
    }
}

/// What a profiler shows as the function that was inlined: the name of its file.
fn stem(file: &str) -> &str {
    let name = file.rsplit(['/', '\\']).next().unwrap_or(file);
    name.strip_suffix(".rs").unwrap_or(name)
}

/// Text that cannot end a comment early.
fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}
