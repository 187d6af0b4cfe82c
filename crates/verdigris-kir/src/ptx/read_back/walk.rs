//! A module held against a kernel: its frame, then statement by statement.

use super::module::{Module, Use, class_bits};
use super::op::{Meaning, Value, read};
use super::statement::{Instruction, Literal, Operand as Text, Statement, What, literal};
use super::untold::told;
use super::{Compared, Isa};
use crate::inst::Op;
use crate::ir::{Block, Inst, KernelBody, Loc, Operand, ParamKind, Reg, Role, Stmt, Ty};
use crate::ptx::entry_name;
use std::collections::{HashMap, HashSet};
use std::fmt::{self, Display};

/// Line, what the kernel has, what does not agree.
pub(super) type Differs = (u32, String, String);

/// Swizzled tiles are counted from a base that is aligned so ([`crate::ir::Swizzle::apply`]).
const SHARED_ALIGNMENT_BYTES: u32 = 1024;

/// Warps of a CTA, one bit each: at most 32 of them.
type Warps = u32;

pub(super) fn compare(kernel: &KernelBody, module: &Module<'_>, isa: Isa) -> Result<Compared, Differs> {
    frame(kernel, module, isa)?;
    let count = kernel.threads.div_ceil(32);
    let warps = bits(0..count);
    let targets = module.body.iter().filter_map(|statement| match &statement.what {
        What::Instruction(Instruction { opcode: "bra", operands, .. }) => match operands.as_slice() {
            [Text::Word(target)] => Some(*target),
            _ => None,
        },
        _ => None,
    });
    let mut walk = Walk {
        kernel,
        module,
        at: 0,
        warps,
        used: HashSet::new(),
        targets: targets.collect(),
        stems: HashMap::new(),
        compared: Compared::default(),
    };
    walk.block(&kernel.body)?;
    let (line, last) = walk.instruction(&"ends")?;
    if last.guard.is_some() || last.opcode != "ret" || !last.operands.is_empty() {
        return Err((line, "ends".into(), "the last statement returns".into()));
    }
    if let Some(statement) = module.body.get(walk.at) {
        return Err((statement.line, "ends before".into(), "nothing stands behind the return".into()));
    }
    walk.all_used()?;
    Ok(walk.compared)
}

fn same<T: PartialEq + std::fmt::Display>(line: u32, text: T, kernel: T, what: &str) -> Result<(), Differs> {
    if text == kernel { Ok(()) } else { Err((line, format!("has {kernel}"), format!("{what} is {text} in the text"))) }
}

fn frame(kernel: &KernelBody, module: &Module<'_>, isa: Isa) -> Result<(), Differs> {
    let (line, version) = module.version;
    same(line, version, &format!("{}.{}", isa.major, isa.minor), "the version")?;
    let (line, target) = module.target;
    same(line, target, kernel.target.ptx(), "the chip")?;
    let (line, entry) = module.entry;
    same(line, entry, &entry_name(&kernel.name), "the entry's name, by which the driver finds it,")?;
    match module.shared {
        Some((line, _, alignment)) if kernel.shared_bytes > 0 => {
            same(line, alignment, SHARED_ALIGNMENT_BYTES, "the alignment of shared memory")?;
        }
        None if kernel.shared_bytes == 0 => {}
        declared => {
            let line = declared.map_or(entry_line(module), |(line, ..)| line);
            return Err((
                line,
                format!("has {} bytes of shared memory", kernel.shared_bytes),
                "shared memory is declared where there is some".into(),
            ));
        }
    }
    let (line, threads) = module.threads;
    same(line, threads, kernel.threads, "the number of threads")?;
    let (line, min_ctas) = module.min_ctas;
    same(line, min_ctas, kernel.min_ctas.max(1), "the number of CTAs an SM")?;
    let (line, cluster) = module.cluster.unwrap_or((entry_line(module), 1));
    same(line, cluster, kernel.cluster.max(1), "the number of CTAs of a cluster")?;
    if module.cluster.is_some() && kernel.cluster <= 1 {
        return Err((line, "has no cluster".into(), "a cluster is declared where there is one".into()));
    }
    parameters(kernel, module)?;
    for (name, declared) in &module.registers {
        let Use::Kernel(number) = declared.what else { continue };
        let Some(info) = kernel.registers.get(number as usize) else {
            return Err((declared.line, format!("has {} registers", kernel.registers.len()), format!("`{name}` is declared")));
        };
        let bits = class_bits(declared.class).unwrap_or_default();
        same(declared.line, bits, info.ty.bits(), &format!("the width of `{name}`"))?;
    }
    Ok(())
}

fn entry_line(module: &Module<'_>) -> u32 {
    module.entry.0
}

/// What the host writes at the offsets of [`KernelBody::param_offsets`] is read where the text's own sizes and alignments put it.
fn parameters(kernel: &KernelBody, module: &Module<'_>) -> Result<(), Differs> {
    same(entry_line(module), module.params.len(), kernel.params.len(), "the number of parameters")?;
    let (offsets, _) = kernel.param_offsets();
    let mut at = 0u32;
    for ((text, param), offset) in module.params.iter().zip(&kernel.params).zip(offsets) {
        let of = |what: &str| format!("{what} of parameter `{}`", text.name);
        at = at.next_multiple_of(text.alignment_bytes.max(1));
        same(text.line, at, offset, &of("the offset"))?;
        same(text.line, text.bytes, param.kind.bytes(), &of("the size"))?;
        same(text.line, text.alignment_bytes, param.kind.alignment_bytes(), &of("the alignment"))?;
        let points_to = match param.kind {
            ParamKind::Pointer { alignment_bytes, .. } => alignment_bytes,
            _ => 0,
        };
        same(text.line, text.points_to.unwrap_or_default(), points_to, &of("the alignment behind the address"))?;
        at += text.bytes;
    }
    Ok(())
}

struct Walk<'a, 't> {
    kernel: &'a KernelBody,
    module: &'a Module<'t>,
    /// The next statement.
    at: usize,
    /// Warps that can be here, as far as roles tell.
    warps: Warps,
    used: HashSet<&'t str>,
    /// Labels that jumps lead to.
    targets: HashSet<&'t str>,
    /// Of each stem, how many are used.
    stems: HashMap<&'t str, u32>,
    compared: Compared,
}

impl<'a, 't> Walk<'a, 't> {
    fn next(&self) -> Option<&'a Statement<'t>> {
        self.module.body.get(self.at)
    }

    fn line(&self) -> u32 {
        self.next().or(self.module.body.last()).map_or(entry_line(self.module), |statement| statement.line)
    }

    fn differs<T>(&self, loc: Option<Loc>, kernel: &dyn Display, rule: impl Into<String>) -> Result<T, Differs> {
        Err((self.line(), self.spelled(loc, kernel), rule.into()))
    }

    fn spelled(&self, loc: Option<Loc>, kernel: &dyn Display) -> String {
        match loc.and_then(|loc| self.kernel.locations.get(loc.0 as usize)) {
            Some(info) => format!("{kernel} ({info})"),
            None => kernel.to_string(),
        }
    }

    /// The next statement, an instruction.
    fn instruction(&mut self, kernel: &dyn Display) -> Result<(u32, &'a Instruction<'t>), Differs> {
        let Some(Statement { line, what: What::Instruction(inst) }) = self.next() else {
            return self.differs(None, kernel, "an instruction must stand here");
        };
        self.at += 1;
        Ok((*line, inst))
    }

    /// A jump, if it comes next: predicate with its sense, and target.
    fn peek_branch(&self) -> Option<(Option<(&'t str, bool)>, &'t str)> {
        match &self.next()?.what {
            What::Instruction(Instruction { guard, opcode: "bra", operands }) => match operands.as_slice() {
                [Text::Word(target)] => Some((*guard, target)),
                _ => None,
            },
            _ => None,
        }
    }

    /// A jump on this condition: whether it is taken where the condition does not hold, and its target.
    fn branch_on(&mut self, cond: Reg, loc: Loc, kernel: &dyn Display) -> Result<(bool, (u32, &'t str)), Differs> {
        let line = self.line();
        let Some((Some((predicate, negated)), target)) = self.peek_branch() else {
            return self.differs(Some(loc), kernel, "a jump on the condition must stand here");
        };
        self.register(predicate, cond, loc, kernel, &"the condition")?;
        self.at += 1;
        self.compared.branches += 1;
        Ok((negated, (line, target)))
    }

    fn jump(&mut self, target: &str, loc: Loc, kernel: &dyn Display) -> Result<(), Differs> {
        match self.peek_branch() {
            Some((None, found)) if found == target => {
                self.at += 1;
                self.compared.branches += 1;
                Ok(())
            }
            _ => self.differs(Some(loc), kernel, format!("a jump to `{target}` must stand here")),
        }
    }

    /// The label that the jump in a line leads to.
    fn label(&mut self, (from, name): (u32, &str), loc: Loc, kernel: &dyn Display) -> Result<(), Differs> {
        match self.label_at(self.at) {
            Some(found) if found == name => {
                self.at += 1;
                Ok(())
            }
            _ => self.differs(Some(loc), kernel, format!("`{name}` must stand here, where the jump in line {from} leads")),
        }
    }

    fn label_at(&self, at: usize) -> Option<&'t str> {
        match self.module.body.get(at)?.what {
            What::Label(name) => Some(name),
            _ => None,
        }
    }

    /// The register of the kernel behind a name.
    fn register(&mut self, name: &'t str, reg: Reg, loc: Loc, kernel: &dyn Display, what: &dyn Display) -> Result<(), Differs> {
        match self.module.registers.get(name).map(|declared| declared.what) {
            Some(Use::Kernel(number)) if number == reg.0 => {
                self.used.insert(name);
                Ok(())
            }
            Some(Use::Kernel(_)) => self.differs(Some(loc), kernel, format!("{what} is {reg}, not `{name}`")),
            Some(_) => self.differs(Some(loc), kernel, format!("{what} is {reg}, and `{name}` is none of the kernel's registers")),
            None => self.differs(Some(loc), kernel, format!("{what} is {reg}, and `{name}` is not declared")),
        }
    }

    /// `%role_3`: the number behind a declared stem.
    fn behind_stem(&mut self, name: &'t str) -> Option<(Use, &'t str, u32)> {
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let (what, number) = (self.module.registers.get(stem)?.what, name[stem.len()..].parse::<u32>().ok()?);
        let (Use::Roles(count) | Use::Sinks(count)) = what else { return None };
        // `%role_03` would be another register.
        if number >= count || number.to_string().len() != name.len() - stem.len() {
            return None;
        }
        let used = self.stems.entry(stem).or_default();
        *used = (*used).max(number + 1);
        Some((what, stem, number))
    }

    fn block(&mut self, block: &Block) -> Result<(), Differs> {
        block.stmts.iter().try_for_each(|stmt| self.stmt(stmt))
    }

    fn stmt(&mut self, stmt: &Stmt) -> Result<(), Differs> {
        match stmt {
            Stmt::Comment(_) => Ok(()),
            Stmt::Inst(inst) => self.inst(inst),
            Stmt::StopWhen { cond, loc } => self.stop_when(*cond, *loc),
            Stmt::If { cond, then, otherwise, loc } => self.branches(*cond, then, otherwise, *loc),
            Stmt::Loop { head, cond, body, loc, .. } => self.repeated(head, *cond, body, *loc),
            Stmt::Roles { warp, roles, loc } => self.roles(*warp, roles, *loc),
        }
    }

    fn stop_when(&mut self, cond: Reg, loc: Loc) -> Result<(), Differs> {
        let kernel = format!("stops when {cond}");
        match self.next().map(|statement| &statement.what) {
            Some(What::Instruction(Instruction { guard: Some((predicate, false)), opcode: "ret", operands })) if operands.is_empty() => {
                self.register(predicate, cond, loc, &kernel, &"the condition")?;
                self.at += 1;
                self.compared.branches += 1;
                Ok(())
            }
            _ => self.differs(Some(loc), &kernel, "a return on the condition must stand here"),
        }
    }

    /// `@!c bra L; then; L:`, or with both sides `@!c bra L; then; bra E; L: otherwise; E:`, or the same with sense and sides exchanged.
    fn branches(&mut self, cond: Reg, then: &Block, otherwise: &Block, loc: Loc) -> Result<(), Differs> {
        let kernel = format!("has if {cond}");
        let (negated, around) = self.branch_on(cond, loc, &kernel)?;
        let (first, second) = if negated { (then, otherwise) } else { (otherwise, then) };
        self.block(first)?;
        let past = match self.peek_branch() {
            Some((None, end)) if self.label_at(self.at + 1) == Some(around.1) => (self.line(), end),
            _ => {
                self.label(around, loc, &kernel)?;
                return if is_empty(second) {
                    Ok(())
                } else {
                    self.differs(Some(loc), &kernel, "the other side of the condition is missing")
                };
            }
        };
        self.jump(past.1, loc, &kernel)?;
        self.label(around, loc, &kernel)?;
        self.block(second)?;
        self.label(past, loc, &kernel)
    }

    /// `S: head; @!c bra E; body; bra S; E:`, or without a body `S: head; @c bra S;`.
    fn repeated(&mut self, head: &Block, cond: Reg, body: &Block, loc: Loc) -> Result<(), Differs> {
        let kernel = format!("loops while {cond}");
        let Some(start) = self.label_at(self.at) else {
            return self.differs(Some(loc), &kernel, "the label of a loop must stand here");
        };
        self.at += 1;
        self.block(head)?;
        let (negated, target) = self.branch_on(cond, loc, &kernel)?;
        if !negated {
            self.at -= 1;
            if target.1 != start || !is_empty(body) {
                return self.differs(
                    Some(loc),
                    &kernel,
                    format!("the loop goes on at `{start}` while {cond} holds, and has a body of its own or none"),
                );
            }
            self.at += 1;
            return Ok(());
        }
        self.block(body)?;
        self.jump(start, loc, &kernel)?;
        self.label(target, loc, &kernel)
    }

    /// Comparisons of the warp's index, followed for each warp: it must come to the body of its role and past all others.
    fn roles(&mut self, warp: Operand, roles: &[Role], loc: Loc) -> Result<(), Differs> {
        let around = self.warps;
        let mut here = around;
        let mut on_their_way: HashMap<&'t str, Warps> = HashMap::new();
        for (index, role) in roles.iter().enumerate() {
            let kernel = format!("has role {} of warps {} to {}", role.name, role.first_warp, role.first_warp + role.warps - 1);
            self.arrive(&mut here, &mut on_their_way);
            let members = bits(role.first_warp..role.first_warp + role.warps) & around;
            here = self.divide(here, members, warp, &mut on_their_way, role.loc, &kernel)?;
            if here != members {
                let rule = format!("warps {} come here, but the role has {}", listed(here), listed(members));
                return self.differs(Some(role.loc), &kernel, rule);
            }
            self.warps = members;
            self.block(&role.body)?;
            if let Some((None, target)) = self.peek_branch() {
                *on_their_way.entry(target).or_default() |= here;
                here = 0;
                self.at += 1;
                self.compared.branches += 1;
            } else if index + 1 < roles.len() {
                return self.differs(Some(role.loc), &kernel, "a jump past the other roles must stand here");
            }
        }
        self.arrive(&mut here, &mut on_their_way);
        // Where all warps of the last role come here by themselves, the label of the end may be one that no jump leads to.
        if self.label_at(self.at).is_some_and(|name| !self.targets.contains(name)) {
            self.at += 1;
        }
        self.warps = around;
        if here != around || !on_their_way.is_empty() {
            let rule = format!("warps {} come to the end of the roles, but all of {} must", listed(here), listed(around));
            return self.differs(Some(loc), &"has roles that all end here", rule);
        }
        Ok(())
    }

    /// Labels that warps are on their way to: they are here now.
    fn arrive(&mut self, here: &mut Warps, on_their_way: &mut HashMap<&'t str, Warps>) {
        while let Some(name) = self.label_at(self.at) {
            let Some(warps) = on_their_way.remove(name) else { return };
            *here |= warps;
            self.at += 1;
        }
    }

    /// Comparisons of the warp's index with jumps on them, until the members of a role are left; gives those that are. More comparisons may
    /// follow, of roles within the role.
    #[allow(clippy::too_many_arguments, reason = "whom is compared with what, and what is said of it if it differs")]
    fn divide(
        &mut self,
        mut here: Warps,
        members: Warps,
        warp: Operand,
        on_their_way: &mut HashMap<&'t str, Warps>,
        loc: Loc,
        kernel: &dyn Display,
    ) -> Result<Warps, Differs> {
        while here != members {
            let Some(What::Instruction(comparison)) = self.next().map(|statement| &statement.what) else { return Ok(here) };
            let [Text::Word(predicate), Text::Word(index), Text::Word(bound)] = comparison.operands.as_slice() else { return Ok(here) };
            let Some((Use::Roles(_), ..)) = self.behind_stem(predicate) else { return Ok(here) };
            if comparison.guard.is_some() {
                return self.differs(Some(loc), kernel, "every warp is compared");
            }
            self.input(Value::Word(index), warp, Ty::U32, false, loc, kernel, &"the warp's index")?;
            let Some(Literal::Whole(bound)) = literal(bound) else {
                return self.differs(Some(loc), kernel, "a warp's index is compared with a number");
            };
            let holds: fn(i128, i128) -> bool = match comparison.opcode {
                "setp.lt.u32" => |a, b| a < b,
                "setp.ge.u32" => |a, b| a >= b,
                "setp.eq.u32" => |a, b| a == b,
                "setp.ne.u32" => |a, b| a != b,
                "setp.le.u32" => |a, b| a <= b,
                "setp.gt.u32" => |a, b| a > b,
                other => return self.differs(Some(loc), kernel, format!("`{other}` does not compare unsigned numbers of 32 bits")),
            };
            self.at += 1;
            match self.peek_branch() {
                Some((Some((guard, negated)), target)) if guard == *predicate => {
                    let taken = bits((0..32).filter(|w| holds(i128::from(*w), bound) != negated)) & here;
                    *on_their_way.entry(target).or_default() |= taken;
                    here &= !taken;
                    self.at += 1;
                    self.compared.branches += 1;
                }
                _ => return self.differs(Some(loc), kernel, format!("a jump on `{predicate}` must stand here")),
            }
        }
        Ok(here)
    }

    fn inst(&mut self, inst: &Inst) -> Result<(), Differs> {
        self.compared.instructions += 1;
        match &inst.op {
            Op::MbarrierWait { .. } | Op::ParamAddress { .. } => self.braced(inst),
            _ => {
                let kernel = Has(inst);
                let Some(Statement { what: What::Instruction(text), .. }) = self.next() else {
                    return self.differs(Some(inst.loc), &kernel, "an instruction must stand here");
                };
                self.guard(text.guard, inst, &kernel)?;
                self.plain(text, inst, &kernel)?;
                self.at += 1;
                Ok(())
            }
        }
    }

    fn guard(&mut self, text: Option<(&'t str, bool)>, inst: &Inst, kernel: &dyn Display) -> Result<(), Differs> {
        match (text, inst.guard) {
            (None, None) => Ok(()),
            (Some((name, negated)), Some(guard)) if negated == guard.negate => {
                self.register(name, guard.pred, inst.loc, kernel, &"the guard")
            }
            (Some(_), Some(_)) => self.differs(Some(inst.loc), kernel, "the guard has the other sense"),
            (Some(_), None) => self.differs(Some(inst.loc), kernel, "the instruction has no guard"),
            (None, Some(_)) => self.differs(Some(inst.loc), kernel, "the instruction has a guard"),
        }
    }

    /// One statement for one instruction.
    fn plain(&mut self, text: &Instruction<'t>, inst: &Inst, kernel: &dyn Display) -> Result<(), Differs> {
        let reading = match read(text.opcode, &text.operands, &self.module.names) {
            Ok(reading) => reading,
            Err(unknown) => return self.differs(Some(inst.loc), kernel, unknown),
        };
        match (&reading.meaning, &inst.op) {
            (Meaning::SharedAddress(offset), Op::SharedAddress { index }) => {
                let piece = self.kernel.shared.get(*index as usize);
                let wanted = piece.map_or(-1, |piece| i64::from(piece.offset_bytes));
                if *offset != wanted {
                    return self.differs(Some(inst.loc), kernel, format!("the piece is at byte {wanted}, not {offset}"));
                }
            }
            (Meaning::SharedAddress(_), _) => return self.differs(Some(inst.loc), kernel, "the text takes an address of shared memory"),
            (Meaning::Op(found), op) => {
                let op = told(op);
                if *found != op {
                    return self.differs(Some(inst.loc), kernel, format!("the text is {found:?}, not {op:?}"));
                }
            }
        }
        self.results(&reading.outs, inst, kernel)?;
        self.inputs(&reading.ins, text.opcode, inst, kernel)
    }

    fn results(&mut self, outs: &[&'t str], inst: &Inst, kernel: &dyn Display) -> Result<(), Differs> {
        if outs.len() != inst.outs.len() {
            return self.differs(Some(inst.loc), kernel, format!("{} results, not {}", inst.outs.len(), outs.len()));
        }
        for (index, (name, out)) in outs.iter().zip(&inst.outs).enumerate() {
            match out {
                Some(reg) => self.register(name, *reg, inst.loc, kernel, &format_args!("result {index}"))?,
                None => match self.behind_stem(name) {
                    Some((Use::Sinks(_), _, number)) if number as usize == index => {}
                    _ => {
                        return self.differs(
                            Some(inst.loc),
                            kernel,
                            format!("nobody wants result {index}, so `{name}` must be a register of its own"),
                        );
                    }
                },
            }
        }
        Ok(())
    }

    fn inputs(&mut self, ins: &[Value<'t>], opcode: &str, inst: &Inst, kernel: &dyn Display) -> Result<(), Differs> {
        let types = inst.op.signature().ins;
        if ins.len() != inst.ins.len() || ins.len() != types.len() {
            return self.differs(Some(inst.loc), kernel, format!("{} operands, not {}", inst.ins.len(), ins.len()));
        }
        // A number is a float where the instruction's last word says so, and whole elsewhere.
        let floats = opcode.ends_with(".f32") || opcode.ends_with(".f64");
        for (index, ((value, operand), ty)) in ins.iter().zip(&inst.ins).zip(types).enumerate() {
            let mut operand = *operand;
            if index == 1 && matches!(inst.op, Op::BarSync {} | Op::BarArrive {}) && self.kernel.constant(operand) == Some(0) {
                // No count is the whole CTA, which PTX wants said.
                operand = Operand::Imm(u64::from(self.kernel.threads));
            }
            self.input(*value, operand, ty, floats && ty.is_float(), inst.loc, kernel, &format_args!("operand {index}"))?;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments, reason = "what is compared, and what is said of it if it differs")]
    fn input(
        &mut self,
        value: Value<'t>,
        operand: Operand,
        ty: Ty,
        float: bool,
        loc: Loc,
        kernel: &dyn Display,
        what: &dyn Display,
    ) -> Result<(), Differs> {
        let mask = if ty.bits() == 64 { u64::MAX } else { (1 << ty.bits()) - 1 };
        let constant = self.kernel.constant(operand).map(|bits| bits & mask);
        let name = match (value, operand, constant) {
            (Value::Offset(offset), _, Some(bits)) if offset as u64 == bits => return Ok(()),
            (Value::Offset(offset), _, _) => {
                let rule = format!("{what} is {}, not the offset {offset}", shown(operand, constant));
                return self.differs(Some(loc), kernel, rule);
            }
            (Value::Word(name), Operand::Reg(reg), _) => return self.register(name, reg, loc, kernel, what),
            (Value::Word(name), _, _) => name,
        };
        let found = match self.module.registers.get(name) {
            Some(declared) => match declared.what {
                Use::Constant { bits, line } if class_bits(declared.class) == Some(ty.bits()) => {
                    self.used.insert(name);
                    if Some(bits) == constant {
                        return Ok(());
                    }
                    let rule = format!("{what} is {}, not {bits:#X}, which `{name}` is set to in line {line}", shown(operand, constant));
                    return self.differs(Some(loc), kernel, rule);
                }
                _ => None,
            },
            None => number_bits(name, ty, float),
        };
        if found.is_some() && found == constant {
            return Ok(());
        }
        self.differs(Some(loc), kernel, format!("{what} is {}, not `{name}`", shown(operand, constant)))
    }

    /// The two instructions that take several statements, within braces.
    fn braced(&mut self, inst: &Inst) -> Result<(), Differs> {
        let kernel = Has(inst);
        let mut around = None;
        if let Some(guard) = inst.guard {
            let (negated, target) = self.branch_on(guard.pred, inst.loc, &kernel)?;
            if negated == guard.negate {
                self.at -= 1;
                return self.differs(Some(inst.loc), &kernel, "the jump around it has the other sense");
            }
            around = Some(target);
        }
        let statements: Vec<&What<'t>> = self.module.body[self.at..].iter().take(6).map(|statement| &statement.what).collect();
        match (&inst.op, statements.as_slice()) {
            (
                Op::MbarrierWait { scope },
                [What::Open, What::Registers(local), What::Label(start), What::Instruction(look), What::Instruction(again), What::Close],
            ) => {
                // Looks until the phase is complete: `{ .reg .pred d; W: try_wait d, …; @!d bra W; }`.
                let looks = crate::inst::Op::MbarrierTest { kind: crate::inst::TestWait::Try, scope: *scope };
                let reading = match read(look.opcode, &look.operands, &self.module.names) {
                    Ok(reading) if look.guard.is_none() && reading.meaning == Meaning::Op(looks.clone()) => reading,
                    Ok(reading) => {
                        return self.differs(Some(inst.loc), &kernel, format!("the text looks by {:?}, not {looks:?}", reading.meaning));
                    }
                    Err(unknown) => return self.differs(Some(inst.loc), &kernel, unknown),
                };
                let [done] = reading.outs.as_slice() else { return self.differs(Some(inst.loc), &kernel, "a look has one result") };
                let repeats = again.guard == Some((done, true)) && again.opcode == "bra" && again.operands == [Text::Word(start)];
                if !repeats || !self.is_local(local, ".pred", done) {
                    return self.differs(Some(inst.loc), &kernel, "it looks again until the phase is complete");
                }
                self.inputs(&reading.ins, look.opcode, inst, &kernel)?;
            }
            (
                Op::ParamAddress { index },
                [What::Open, What::Registers(local), What::Instruction(place), What::Instruction(generic), What::Close, ..],
            ) => {
                // `{ .reg .b64 t; mov.b64 t, param; cvta.param.u64 out, t; }`
                let [(temporary, None)] = local.names.as_slice() else {
                    return self.differs(Some(inst.loc), &kernel, "one register holds the parameter's address");
                };
                let placed = match place.operands.as_slice() {
                    [Text::Word(to), Text::Word(param)] => to == temporary && self.module.names.params.get(param) == Some(index),
                    _ => false,
                };
                let [Text::Word(out), Text::Word(from)] = generic.operands.as_slice() else {
                    return self.differs(Some(inst.loc), &kernel, "an address becomes a generic one");
                };
                let is_generic = generic.opcode == "cvta.param.u64" && from == temporary && generic.guard.is_none();
                if !placed || place.opcode != "mov.b64" || place.guard.is_some() || !is_generic || !self.is_local(local, ".b64", temporary)
                {
                    return self.differs(Some(inst.loc), &kernel, format!("the generic address of parameter {index} is taken"));
                }
                self.results(&[out], inst, &kernel)?;
            }
            _ => return self.differs(Some(inst.loc), &kernel, "the statements of this instruction must stand here"),
        }
        self.at += if matches!(inst.op, Op::ParamAddress { .. }) { 5 } else { 6 };
        match around {
            Some(target) => self.label(target, inst.loc, &kernel),
            None => Ok(()),
        }
    }

    /// Whether exactly this register is declared within the braces, and nowhere outside.
    fn is_local(&self, declared: &super::statement::Registers<'t>, class: &str, name: &str) -> bool {
        declared.class == class && declared.names == [(name, None)] && !self.module.registers.contains_key(name)
    }

    /// Nothing is declared that no statement uses.
    fn all_used(&self) -> Result<(), Differs> {
        let mut idle: Vec<(u32, &str)> = Vec::new();
        for (name, declared) in &self.module.registers {
            let used = match declared.what {
                Use::Kernel(_) | Use::Constant { .. } => self.used.contains(name),
                Use::Roles(count) | Use::Sinks(count) => self.stems.get(name) == Some(&count),
            };
            if !used {
                idle.push((declared.line, name));
            }
        }
        match idle.iter().min() {
            None => Ok(()),
            Some((line, name)) => Err((*line, "has no use for it".into(), format!("`{name}` is declared, and not all of it is used"))),
        }
    }
}

fn is_empty(block: &Block) -> bool {
    block.stmts.iter().all(|stmt| matches!(stmt, Stmt::Comment(_)))
}

/// The bits of a number in a slot of this type.
fn number_bits(word: &str, ty: Ty, float: bool) -> Option<u64> {
    match literal(word)? {
        Literal::F32(bits) => (float && ty.bits() == 32).then_some(u64::from(bits)),
        Literal::F64(bits) => (float && ty.bits() == 64).then_some(bits),
        Literal::Whole(value) => {
            let width = ty.bits();
            let fits = (-(1i128 << (width - 1))..1i128 << width).contains(&value);
            (!float && fits).then_some(value as u64 & (u64::MAX >> (64 - width)))
        }
    }
}

/// An instruction of the kernel, in words.
struct Has<'a>(&'a Inst);

impl Display for Has<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("has ")?;
        if let Some(guard) = self.0.guard {
            write!(f, "if {}{} ", if guard.negate { "not " } else { "" }, guard.pred)?;
        }
        write!(f, "{:?}", self.0.op)
    }
}

fn shown(operand: Operand, constant: Option<u64>) -> String {
    match (operand, constant) {
        (_, Some(bits)) => format!("the constant {bits:#X}"),
        (Operand::Reg(reg), _) => reg.to_string(),
        _ => "a constant that nobody knows".into(),
    }
}

fn bits(warps: impl IntoIterator<Item = u32>) -> Warps {
    warps.into_iter().filter(|w| *w < 32).fold(0, |set, w| set | 1 << w)
}

fn listed(warps: Warps) -> String {
    let list: Vec<String> = (0..32).filter(|w| warps >> w & 1 == 1).map(|w| w.to_string()).collect();
    format!("{{{}}}", list.join(", "))
}
