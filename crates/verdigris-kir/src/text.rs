//! The text form of a kernel: what snapshots, `inspect` and faults show.
//!
//! One line a statement, blocks indented, the author's names for registers, shared pieces, barriers and roles; behind each line its
//! source position where it changes. Equal kernels give equal text.
//!
//! An instruction reads `results = Entry(attributes) operands`. Entry and attributes are those of the table
//! ([`inst::Op`](crate::inst::Op)); attributes that are off or at their default are left out. Addresses are written `[base+offset]`.
//! A register is `r12`, or `r12.name`; its type stands where it is a result.

use crate::inst::Op;
use crate::ir::{Block, Inst, KernelBody, Loc, MapDecl, Operand, ParamKind, Reg, Stmt, Ty};
use crate::verify::Fault;
use std::fmt::Write as _;

/// The text form.
pub fn print(kernel: &KernelBody) -> String {
    Text::new(kernel, &[]).print()
}

/// The text form with each fault under the line that it is about. A fault whose position no statement has stands at the end.
pub fn print_with_faults(kernel: &KernelBody, faults: &[Fault]) -> String {
    Text::new(kernel, faults).print()
}

/// The text form of one instruction: `r7:f32 = Fma(F32, rounding=Nearest) r4, r5, r6`.
pub fn instruction(kernel: &KernelBody, inst: &Inst) -> String {
    let mut line = String::new();
    if let Some(guard) = inst.guard {
        let _ = write!(line, "@{}{} ", if guard.negate { "!" } else { "" }, register(kernel, guard.pred));
    }
    if !inst.outs.is_empty() {
        line += &results(kernel, &inst.outs);
        line += " = ";
    }
    line += &operation(kernel, &inst.op);
    let operands = operands(kernel, inst);
    if !operands.is_empty() {
        line.push(' ');
        line += &operands.join(", ");
    }
    line
}

struct Text<'a> {
    kernel: &'a KernelBody,
    faults: Vec<Option<&'a Fault>>,
    out: String,
    depth: usize,
    loc: Option<Loc>,
}

impl<'a> Text<'a> {
    fn new(kernel: &'a KernelBody, faults: &'a [Fault]) -> Self {
        Text { kernel, faults: faults.iter().map(Some).collect(), out: String::new(), depth: 0, loc: None }
    }

    fn print(mut self) -> String {
        let kernel = self.kernel;
        let cluster = if kernel.cluster > 1 { format!(", clusters of {}", kernel.cluster) } else { String::new() };
        let head = format!(
            "kernel {} for {}: {} threads, {} CTAs an SM{cluster}",
            kernel.name,
            kernel.target.ptx(),
            kernel.threads,
            kernel.min_ctas
        );
        self.line(&head, Some(Loc(0)));
        self.depth = 1;
        for param in &kernel.params {
            self.line(&format!("param {}: {}", param.name, parameter(&param.kind)), Some(param.loc));
        }
        for piece in &kernel.shared {
            let text =
                format!("shared {}: {} bytes at {}, aligned to {}", piece.name, piece.bytes, piece.offset_bytes, piece.alignment_bytes);
            self.line(&text, Some(piece.loc));
        }
        for barrier in &kernel.barriers {
            let arrivals = kernel.late.get(barrier.arrivals as usize).map_or("?".to_string(), u64::to_string);
            let piece = kernel.shared.get(barrier.shared as usize).map_or("?", |piece| piece.name);
            self.line(&format!("barrier {}[{}] in {piece}: {arrivals} arrivals", barrier.name, barrier.count), Some(barrier.loc));
        }
        self.block(&kernel.body);
        self.depth = 0;
        let left: Vec<&Fault> = self.faults.iter_mut().filter_map(Option::take).collect();
        for fault in left {
            self.fault(fault);
        }
        self.out
    }

    fn line(&mut self, text: &str, loc: Option<Loc>) {
        let start = self.out.len();
        for _ in 0..self.depth {
            self.out.push_str("  ");
        }
        self.out.push_str(text);
        let Some(loc) = loc else {
            self.out.push('\n');
            return;
        };
        if self.loc != Some(loc) {
            self.loc = Some(loc);
            let width = self.out[start..].chars().count();
            for _ in width..72 {
                self.out.push(' ');
            }
            let chain: Vec<String> = positions(self.kernel, loc);
            let _ = write!(self.out, "  ; {}", chain.join(" < "));
        }
        self.out.push('\n');
        // Each fault is told once: under the first statement at its position.
        for index in 0..self.faults.len() {
            if let Some(fault) = self.faults[index].filter(|fault| fault.loc == loc) {
                self.faults[index] = None;
                self.fault(fault);
            }
        }
    }

    fn fault(&mut self, fault: &Fault) {
        for (index, line) in fault.message.lines().enumerate() {
            let mark = if index == 0 { format!("^ [{}] ", fault.rule) } else { "  ".into() };
            let _ = writeln!(self.out, "{}{mark}{line}", "  ".repeat(self.depth));
        }
    }

    fn indented(&mut self, block: &Block) {
        self.depth += 1;
        self.block(block);
        self.depth -= 1;
    }

    fn block(&mut self, block: &Block) {
        for stmt in &block.stmts {
            self.stmt(stmt);
        }
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match stmt {
            Stmt::Inst(inst) => self.line(&instruction(self.kernel, inst), Some(inst.loc)),
            Stmt::If { cond, then, otherwise, loc } => {
                self.line(&format!("if {}", register(self.kernel, *cond)), Some(*loc));
                self.indented(then);
                if !otherwise.stmts.is_empty() {
                    self.line("else", None);
                    self.indented(otherwise);
                }
            }
            Stmt::Loop { head, cond, body, name, loc } => {
                self.line(&format!("loop {name}"), Some(*loc));
                self.indented(head);
                self.line(&format!("while {}", register(self.kernel, *cond)), None);
                self.indented(body);
            }
            Stmt::Roles { warp, roles, loc } => {
                self.line(&format!("roles by {}", operand(self.kernel, *warp, Ty::U32)), Some(*loc));
                for role in roles {
                    let registers = role.registers.map_or(String::new(), |count| format!(", {count} registers"));
                    let last = role.first_warp + role.warps.saturating_sub(1);
                    let text = format!("role {}: warps {} to {last}{registers}", role.name, role.first_warp);
                    self.depth += 1;
                    self.line(&text, Some(role.loc));
                    self.indented(&role.body);
                    self.depth -= 1;
                }
            }
            Stmt::StopWhen { cond, loc } => self.line(&format!("stop when {}", register(self.kernel, *cond)), Some(*loc)),
            Stmt::Comment(text) => {
                for line in text.lines() {
                    self.line(&format!("# {line}"), None);
                }
            }
        }
    }
}

/// The chain of positions, innermost first. Bounded, since faulty kernels are shown too.
fn positions(kernel: &KernelBody, loc: Loc) -> Vec<String> {
    let mut chain = Vec::new();
    let mut next = Some(loc);
    while let Some(info) = next.and_then(|at| kernel.locations.get(at.0 as usize)) {
        chain.push(info.to_string());
        next = info.inlined_at;
        if chain.len() > kernel.locations.len() {
            break;
        }
    }
    if chain.is_empty() { vec!["unknown position".into()] } else { chain }
}

fn register(kernel: &KernelBody, reg: Reg) -> String {
    match kernel.registers.get(reg.0 as usize).and_then(|info| info.name) {
        Some(name) => format!("{reg}.{name}"),
        None => reg.to_string(),
    }
}

/// Results with their types; a run of neighbouring registers of one name and type is written as `r10..r13.acc:f32`.
fn results(kernel: &KernelBody, outs: &[Option<Reg>]) -> String {
    let info = |reg: Reg| kernel.registers.get(reg.0 as usize);
    let key = |reg: Reg| info(reg).map(|info| (info.ty, info.name));
    let mut parts = Vec::new();
    let mut at = 0;
    while at < outs.len() {
        let Some(first) = outs[at] else {
            parts.push("_".to_string());
            at += 1;
            continue;
        };
        let mut end = at + 1;
        while end < outs.len() && outs[end] == Some(Reg(first.0 + (end - at) as u32)) && outs[end].and_then(key) == key(first) {
            end += 1;
        }
        let ty = info(first).map_or("?", |info| info.ty.ptx());
        let last = outs[end - 1].unwrap_or(first);
        if end - at > 2 {
            parts.push(format!("{first}..{}:{ty}", register(kernel, last)));
        } else {
            parts.extend(outs[at..end].iter().flatten().map(|reg| format!("{}:{ty}", register(kernel, *reg))));
        }
        at = end;
    }
    parts.join(", ")
}

fn operand(kernel: &KernelBody, operand: Operand, ty: Ty) -> String {
    let Some(bits) = kernel.constant(operand) else {
        return operand.reg().map_or("?".to_string(), |reg| register(kernel, reg));
    };
    match ty {
        Ty::F32 => format!("{:?}", f32::from_bits(bits as u32)),
        Ty::F64 => format!("{:?}", f64::from_bits(bits)),
        Ty::S16 => (bits as i16).to_string(),
        Ty::S32 => (bits as i32).to_string(),
        Ty::S64 => (bits as i64).to_string(),
        Ty::U16 | Ty::U32 | Ty::U64 => bits.to_string(),
        Ty::Pred => (bits & 1 == 1).to_string(),
        _ if bits < 10 => bits.to_string(),
        _ => format!("0x{bits:X}"),
    }
}

fn operands(kernel: &KernelBody, inst: &Inst) -> Vec<String> {
    let types = inst.op.signature().ins;
    let template = inst.op.ptx();
    let ty = |index: usize| types.get(index).copied().unwrap_or(Ty::B64);
    let mut parts = Vec::new();
    let mut index = 0;
    while index < inst.ins.len() {
        let base = operand(kernel, inst.ins[index], ty(index));
        let is_address = index + 1 < inst.ins.len() && template.contains(&format!("[%i{index}+%i{}]", index + 1));
        if is_address {
            let offset = operand(kernel, inst.ins[index + 1], ty(index + 1));
            parts.push(match offset.as_str() {
                "0" => format!("[{base}]"),
                negative if negative.starts_with('-') => format!("[{base}{negative}]"),
                offset => format!("[{base}+{offset}]"),
            });
            index += 2;
        } else {
            parts.push(base);
            index += 1;
        }
    }
    parts
}

/// The entry's name with its attributes; indices of parameters and shared pieces as names.
fn operation(kernel: &KernelBody, op: &Op) -> String {
    let named = |name: Option<&'static str>, index: u32| name.map_or(index.to_string(), str::to_string);
    let param = |index: u32| named(kernel.params.get(index as usize).map(|param| param.name), index);
    match op {
        Op::ParamLoad { index, offset_bytes, ty } => {
            let offset = if *offset_bytes > 0 { format!("+{offset_bytes}") } else { String::new() };
            format!("ParamLoad({ty:?}, {}{offset})", param(*index))
        }
        Op::ParamAddress { index } => format!("ParamAddress({})", param(*index)),
        Op::SharedAddress { index } => {
            format!("SharedAddress({})", named(kernel.shared.get(*index as usize).map(|piece| piece.name), *index))
        }
        _ => {
            let mut attributes = Vec::new();
            let debug = format!("{op:?}");
            if let Some((_, fields)) = debug.split_once('{') {
                flatten(fields.trim_end().strip_suffix('}').unwrap_or(fields), &mut attributes);
            }
            if attributes.is_empty() { op.name().to_string() } else { format!("{}({})", op.name(), attributes.join(", ")) }
        }
    }
}

/// Attributes whose value says what they are.
const SELF_EXPLAINING: &[&str] = &["ty", "space", "op", "order", "scope", "kind", "register", "mode", "cmp", "fence", "field"];

/// Fields in the form that `Debug` derives, as `value` or `name=value`; flags that are off and defaults are left out.
fn flatten(fields: &str, out: &mut Vec<String>) {
    for field in split(fields) {
        let Some((name, value)) = field.split_once(": ") else { continue };
        let (name, value) = (name.trim(), value.trim());
        match value {
            "false" => {}
            "true" => out.push(name.to_string()),
            "Default" | "Weak" => {}
            _ => match value.split_once('{') {
                // A shape: its fields are attributes too.
                Some((_, inner)) => flatten(inner.trim_end().strip_suffix('}').unwrap_or(inner), out),
                None if SELF_EXPLAINING.contains(&name) => out.push(value.to_string()),
                None => out.push(format!("{name}={value}")),
            },
        }
    }
}

/// Splits at commas outside of brackets.
fn split(fields: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0i32, 0);
    for (at, c) in fields.char_indices() {
        match c {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&fields[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&fields[start..]);
    parts
}

fn parameter(kind: &ParamKind) -> String {
    match kind {
        ParamKind::Scalar(ty) => ty.to_string(),
        ParamKind::Pointer { access, alignment_bytes } => format!("pointer, {access:?}, aligned to {alignment_bytes}"),
        ParamKind::Divisor => "divisor".into(),
        ParamKind::TensorMap(MapDecl { ty, rank, box_dims, im2col, swizzle, access }) => {
            let mode = if *im2col { "im2col, column" } else { "box" };
            let extent = |&extent: &u32| if extent == 0 { "?".into() } else { extent.to_string() };
            let dims: Vec<String> = box_dims.iter().map(extent).collect();
            format!("tensor map, {ty:?}, rank {rank}, {mode} {}, swizzle {swizzle:?}, {access:?}", dims.join("×"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inst::{Cache, MatrixType, Order, Scope, Space, WgmmaShape};
    use crate::inst_samples::samples;

    fn kernel(registers: usize) -> KernelBody {
        let ty = |index: usize| if index < 64 { Ty::F32 } else { Ty::U64 };
        KernelBody {
            name: "k".into(),
            target: crate::ir::Target::Sm90a,
            threads: 128,
            min_ctas: 1,
            cluster: 1,
            params: vec![],
            registers: (0..registers)
                .map(|index| crate::ir::RegInfo {
                    ty: ty(index),
                    kind: crate::ir::RegKind::Mutable,
                    name: (index < 32).then_some("acc"),
                    loc: Loc(0),
                })
                .collect(),
            shared: vec![],
            shared_bytes: 0,
            barriers: vec![],
            late: vec![7],
            locations: vec![crate::ir::LocInfo { file: "k.rs", line: 3, column: 1, inlined_at: None }],
            body: Block::default(),
            allowed_spill_bytes: 0,
        }
    }

    fn show(op: Op, outs: &[u32], ins: &[Operand]) -> String {
        let inst = Inst { op, outs: outs.iter().map(|n| Some(Reg(*n))).collect(), ins: ins.to_vec(), guard: None, loc: Loc(0) };
        instruction(&kernel(70), &inst)
    }

    #[test]
    fn an_instruction_tells_its_attributes_without_defaults() {
        let ld = Op::Ld { space: Space::Global, ty: Ty::F32, count: 2, order: Order::Acquire(Scope::Gpu), cache: Cache::Default };
        let shown = show(ld, &[40, 41], &[Reg(64).into(), Operand::Imm((-8i64) as u64)]);
        assert_eq!(shown, "r40:f32, r41:f32 = Ld(Global, F32, count=2, Acquire(Gpu)) [r64-8]");
        let shape = WgmmaShape {
            n: 64,
            a: MatrixType::Bf16,
            b: MatrixType::Bf16,
            d: MatrixType::F32,
            a_in_registers: false,
            transpose_a: false,
            transpose_b: true,
            negate_a: false,
            negate_b: false,
            saturate: false,
            sparse: false,
        };
        let outs: Vec<u32> = (0..32).collect();
        let shown = show(Op::Wgmma { shape }, &outs, &[Reg(64).into(), Reg(65).into(), Operand::Imm(1)]);
        assert_eq!(shown, "r0..r31.acc:f32 = Wgmma(n=64, a=Bf16, b=Bf16, d=F32, transpose_b) r64, r65, true");
        assert_eq!(
            show(Op::IMadLo { ty: Ty::S32 }, &[40], &[Operand::Late(0), Operand::Imm(u64::MAX), Reg(41).into()]),
            "r40:f32 = IMadLo(S32) 7, -1, r41"
        );
        assert_eq!(show(Op::CtaSync {}, &[], &[]), "CtaSync");
    }

    #[test]
    fn no_two_instructions_of_the_table_read_alike() {
        let body = kernel(300);
        let mut seen = std::collections::BTreeMap::new();
        for sample in samples() {
            let shown = operation(&body, &sample.op);
            assert!(!shown.contains(['{', '}', ':']), "{shown}");
            if let Some(other) = seen.insert(shown.clone(), sample.op.clone()) {
                panic!("{shown} is both {other:?} and {:?}", sample.op);
            }
        }
    }

    #[test]
    fn a_fault_stands_under_its_line() {
        let mut body = kernel(70);
        body.locations.push(crate::ir::LocInfo { file: "k.rs", line: 9, column: 5, inlined_at: Some(Loc(0)) });
        let inst = |loc| Stmt::Inst(Inst { op: Op::CtaSync {}, outs: vec![], ins: vec![], guard: None, loc });
        body.body.stmts = vec![Stmt::Comment("begin".into()), inst(Loc(1)), inst(Loc(1))];
        let fault = |loc, message: &str| Fault { rule: "rule", loc, second: None, message: message.into() };
        let text = print_with_faults(&body, &[fault(Loc(1), "here"), fault(Loc(77), "nowhere")]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "  # begin");
        assert!(lines[2].starts_with("  CtaSync ") && lines[2].ends_with("; k.rs:9:5 < k.rs:3:1"), "{text}");
        assert_eq!(lines[3..], ["  ^ [rule] here", "  CtaSync", "^ [rule] nowhere"]);
    }
}
