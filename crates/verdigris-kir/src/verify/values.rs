//! What is known of a register's value without running the kernel: constants, values for every thread that follow from thread and lane
//! index alone, and the piece of shared memory that an address or descriptor is made from.

use super::sites::{Kind, Sites};
use crate::inst::{Cmp, Op, Shuffle, Space, Special};
use crate::ir::{Guard, Inst, KernelBody, Operand, Reg, RegKind, Ty};
use std::rc::Rc;

/// Vectors are kept for this many registers at most, to bound the work on huge kernels; values beyond are unknown.
const MOST_VECTORS: usize = 8192;

/// A value known for every thread of the CTA.
#[derive(Clone, Debug)]
pub(super) enum Known {
    /// The same for all.
    All(u64),
    /// One for each thread.
    Each(Rc<[u64]>),
}

impl Known {
    pub(super) fn of(&self, thread: usize) -> u64 {
        match self {
            Known::All(bits) => *bits,
            Known::Each(values) => values[thread],
        }
    }
}

/// The piece of shared memory behind an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Root {
    /// No write of the register has been seen.
    Nothing,
    /// A number that is no address.
    Number,
    /// Made from the address of one piece of this CTA's shared memory.
    Piece(u32),
    /// The same piece in another CTA of the cluster.
    Peer(u32),
    /// Anything.
    Unknown,
}

impl Root {
    /// The root of a value computed from two.
    fn with(self, other: Root) -> Root {
        match (self, other) {
            (Root::Nothing, one) | (one, Root::Nothing) | (Root::Number, one) | (one, Root::Number) => one,
            (one, other) if one == other => one,
            _ => Root::Unknown,
        }
    }

    /// The root of a register that holds one value or the other.
    fn or(self, other: Root) -> Root {
        match (self, other) {
            (Root::Nothing, one) | (one, Root::Nothing) => one,
            (one, other) if one == other => one,
            _ => Root::Unknown,
        }
    }
}

pub(super) struct Values<'a> {
    body: &'a KernelBody,
    known: Vec<Option<Known>>,
    roots: Vec<Root>,
    /// The only writer of each register that is written once.
    definition: Vec<Option<&'a Inst>>,
}

impl<'a> Values<'a> {
    pub(super) fn new(body: &'a KernelBody, sites: &Sites<'a>) -> Self {
        let count = body.registers.len();
        let mut values = Values { body, known: vec![None; count], roots: vec![Root::Nothing; count], definition: vec![None; count] };
        let mut vectors = 0;
        for site in &sites.sites {
            if let [Some(out)] = site.inst.outs[..]
                && body.registers[out.0 as usize].kind == RegKind::Once
                && site.inst.guard.is_none()
            {
                let value = values.evaluate(site.inst);
                vectors += usize::from(matches!(value, Some(Known::Each(_))));
                values.known[out.0 as usize] = value.filter(|value| matches!(value, Known::All(_)) || vectors <= MOST_VECTORS);
            }
            for out in site.inst.outs.iter().flatten() {
                if body.registers[out.0 as usize].kind == RegKind::Once {
                    values.definition[out.0 as usize] = Some(site.inst);
                }
            }
        }
        // Mutable registers feed each other through loops, so their roots are a fixed point; each can change at most three times.
        loop {
            let mut changed = false;
            for site in &sites.sites {
                let root = values.root_of(site.inst);
                for out in site.inst.outs.iter().flatten() {
                    let slot = &mut values.roots[out.0 as usize];
                    let next = slot.or(root);
                    changed |= next != *slot;
                    *slot = next;
                }
            }
            if !changed {
                return values;
            }
        }
    }

    /// The instruction that defines a register written once.
    pub(super) fn definition(&self, reg: Reg) -> Option<&'a Inst> {
        self.definition[reg.0 as usize]
    }

    /// The value of an operand for every thread, if it is known; shared addresses count from the start of the CTA's shared memory.
    pub(super) fn known(&self, operand: Operand) -> Option<Known> {
        match operand {
            Operand::Reg(reg) => self.known[reg.0 as usize].clone(),
            constant => self.body.constant(constant).map(Known::All),
        }
    }

    /// The value of an operand that is the same for all threads, if it is known.
    pub(super) fn constant(&self, operand: Operand) -> Option<u64> {
        match self.known(operand) {
            Some(Known::All(bits)) => Some(bits),
            _ => None,
        }
    }

    /// The piece of shared memory that an operand is made from.
    pub(super) fn root(&self, operand: Operand) -> Root {
        match operand {
            Operand::Reg(reg) => self.roots[reg.0 as usize],
            _ => Root::Number,
        }
    }

    /// The threads that run a block, if that is known for each; a loop's body is not, its head is (the first turn).
    pub(super) fn active(&self, sites: &Sites<'_>, block: usize) -> Option<Vec<bool>> {
        let mut active = vec![true; self.body.threads as usize];
        for (_, place) in sites.chain(block) {
            match place.kind {
                Kind::Top | Kind::Head(_) => {}
                Kind::Body(_) => return None,
                Kind::Then(cond) => self.narrow(&mut active, Guard { pred: cond, negate: false })?,
                Kind::Otherwise(cond) => self.narrow(&mut active, Guard { pred: cond, negate: true })?,
                Kind::Role(role) => {
                    let threads = (role.first_warp * 32) as usize..((role.first_warp + role.warps) * 32) as usize;
                    active.iter_mut().enumerate().for_each(|(thread, active)| *active &= threads.contains(&thread));
                }
            }
        }
        Some(active)
    }

    /// Narrows a set of threads to those where a guard holds.
    pub(super) fn narrow(&self, active: &mut [bool], guard: Guard) -> Option<()> {
        let known = self.known(Operand::Reg(guard.pred))?;
        for (thread, active) in active.iter_mut().enumerate() {
            *active &= (known.of(thread) != 0) != guard.negate;
        }
        Some(())
    }

    fn root_of(&self, inst: &Inst) -> Root {
        match &inst.op {
            Op::SharedAddress { index } => Root::Piece(*index),
            Op::MapShared {} => match self.root(inst.ins[0]) {
                Root::Piece(index) | Root::Peer(index) => Root::Peer(index),
                Root::Nothing => Root::Nothing,
                _ => Root::Unknown,
            },
            Op::SpecialRegister { .. } | Op::ParamLoad { .. } | Op::Elect {} | Op::Setp { .. } => Root::Number,
            // The selector says nothing of the address; the two sides do.
            Op::Selp { .. } => self.root(inst.ins[0]).or(self.root(inst.ins[1])),
            Op::Shfl { .. } => self.root(inst.ins[0]),
            op if op.is_pure() => inst.ins.iter().fold(Root::Number, |root, operand| {
                match (root, self.root(*operand)) {
                    // An operand that nothing has written yet must not freeze the result at `Number`.
                    (_, Root::Nothing) | (Root::Nothing, _) => Root::Nothing,
                    (root, other) => root.with(other),
                }
            }),
            _ => Root::Unknown,
        }
    }

    fn evaluate(&self, inst: &Inst) -> Option<Known> {
        let threads = self.body.threads as usize;
        let each = |value: &dyn Fn(u64) -> u64| Some(Known::Each((0..threads as u64).map(value).collect()));
        match &inst.op {
            Op::SpecialRegister { register } => match register {
                Special::Tid => return each(&|thread| thread),
                Special::Lane => return each(&|thread| thread % 32),
                Special::Ntid => return Some(Known::All(u64::from(self.body.threads))),
                Special::LaneMaskLt => return each(&|thread| (1 << (thread % 32)) - 1),
                Special::LaneMaskLe => return each(&|thread| (2 << (thread % 32)) - 1),
                Special::LaneMaskEq => return each(&|thread| 1 << (thread % 32)),
                _ => return None,
            },
            Op::SharedAddress { index } => return Some(Known::All(u64::from(self.body.shared[*index as usize].offset_bytes))),
            Op::Shfl { mode: Shuffle::Index | Shuffle::Uniform } => {
                // The broadcast of one lane over a whole warp: `uniform(x)`.
                let (value, lane) = (self.known(inst.ins[0])?, self.constant(inst.ins[1])?);
                if self.constant(inst.ins[2])? & 0x1F1F != 0x1F || self.constant(inst.ins[3])? != 0xFFFF_FFFF {
                    return None;
                }
                return match value {
                    Known::All(bits) => Some(Known::All(bits)),
                    Known::Each(values) => each(&|thread| values[(thread as usize & !31) | (lane as usize & 31)]),
                };
            }
            _ => {}
        }
        let step = pure_step(&inst.op)?;
        let ins: Vec<Known> = inst.ins.iter().map(|operand| self.known(*operand)).collect::<Option<_>>()?;
        let at = |thread: usize| {
            let mut args = [0; 4];
            args.iter_mut().zip(&ins).for_each(|(arg, known)| *arg = known.of(thread));
            step(args)
        };
        if ins.len() > 4 {
            return None;
        }
        if ins.iter().all(|known| matches!(known, Known::All(_))) {
            return Some(Known::All(at(0)));
        }
        let values: Rc<[u64]> = (0..threads).map(at).collect();
        if values.iter().all(|value| *value == values[0]) { Some(Known::All(values[0])) } else { Some(Known::Each(values)) }
    }
}

const fn mask(ty: Ty) -> u64 {
    match ty.bits() {
        1 => 1,
        16 => 0xFFFF,
        32 => 0xFFFF_FFFF,
        _ => u64::MAX,
    }
}

/// The value as a number of its type: sign-extended for signed types.
fn number(bits: u64, ty: Ty) -> i128 {
    let bits = bits & mask(ty);
    if ty.is_signed() {
        let shift = 64 - ty.bits();
        i128::from(((bits << shift) as i64) >> shift)
    } else {
        i128::from(bits)
    }
}

type Step = Box<dyn Fn([u64; 4]) -> u64>;

/// The integer operations that addresses, indices and conditions are made of.
fn pure_step(op: &Op) -> Option<Step> {
    let step: Step = match *op {
        Op::Mov { ty } => Box::new(move |[a, ..]| a & mask(ty)),
        Op::IAdd { ty } => Box::new(move |[a, b, ..]| a.wrapping_add(b) & mask(ty)),
        Op::ISub { ty } => Box::new(move |[a, b, ..]| a.wrapping_sub(b) & mask(ty)),
        Op::IMulLo { ty } => Box::new(move |[a, b, ..]| a.wrapping_mul(b) & mask(ty)),
        Op::IMadLo { ty } => Box::new(move |[a, b, c, _]| a.wrapping_mul(b).wrapping_add(c) & mask(ty)),
        Op::IMin { ty } => Box::new(move |[a, b, ..]| if number(a, ty) <= number(b, ty) { a & mask(ty) } else { b & mask(ty) }),
        Op::IMax { ty } => Box::new(move |[a, b, ..]| if number(a, ty) >= number(b, ty) { a & mask(ty) } else { b & mask(ty) }),
        Op::And { ty } => Box::new(move |[a, b, ..]| a & b & mask(ty)),
        Op::Or { ty } => Box::new(move |[a, b, ..]| (a | b) & mask(ty)),
        Op::Xor { ty } => Box::new(move |[a, b, ..]| (a ^ b) & mask(ty)),
        Op::Not { ty } => Box::new(move |[a, ..]| !a & mask(ty)),
        Op::Shl { ty } => Box::new(move |[a, b, ..]| {
            let by = b & 0xFFFF_FFFF;
            if by >= u64::from(ty.bits()) { 0 } else { (a << by) & mask(ty) }
        }),
        Op::Shr { ty } => Box::new(move |[a, b, ..]| ((number(a, ty) >> (b & 0xFFFF_FFFF).min(64)) as u64) & mask(ty)),
        Op::Setp { cmp, ty, .. } if ty.is_integer() => {
            let holds: fn(i128, i128) -> bool = match cmp {
                Cmp::Eq => |a, b| a == b,
                Cmp::Ne => |a, b| a != b,
                Cmp::Lt => |a, b| a < b,
                Cmp::Le => |a, b| a <= b,
                Cmp::Gt => |a, b| a > b,
                Cmp::Ge => |a, b| a >= b,
                _ => return None,
            };
            Box::new(move |[a, b, ..]| u64::from(holds(number(a, ty), number(b, ty))))
        }
        Op::Selp { ty } => Box::new(move |[a, b, p, _]| if p & 1 != 0 { a & mask(ty) } else { b & mask(ty) }),
        Op::Cvt { to, from, saturate: false, .. } if to.is_integer() && from.is_integer() => {
            Box::new(move |[a, ..]| (number(a, from) as u64) & mask(to))
        }
        _ => return None,
    };
    Some(step)
}

/// An access to shared memory by the threads themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    /// Base address.
    pub(super) base: Operand,
    /// Constant offset.
    pub(super) offset: Operand,
    /// Bytes a thread touches.
    pub(super) bytes: u32,
    /// Lanes of the warp, from the first, whose address counts.
    pub(super) lanes: u32,
    /// The warp moves the data together, so that a lane's address is not of its own data.
    pub(super) whole_warp: bool,
    pub(super) reads: bool,
    pub(super) writes: bool,
}

/// The access to this CTA's shared memory that an instruction makes as an ordinary load or store.
pub(super) fn shared_access(inst: &Inst) -> Option<Access> {
    let (bytes, reads, writes) = match &inst.op {
        Op::Ld { space: Space::Shared, ty, count, .. } => (ty.bytes() * u32::from(*count), true, false),
        Op::LdByte { space: Space::Shared, .. } => (1, true, false),
        Op::St { space: Space::Shared, ty, count, .. } => (ty.bytes() * u32::from(*count), false, true),
        Op::StByte { space: Space::Shared, .. } => (1, false, true),
        Op::Ldmatrix { .. } => (16, true, false),
        Op::Stmatrix { .. } => (16, false, true),
        Op::Atom { space: Space::Shared, ty, .. } => (ty.bytes(), true, true),
        Op::Red { space: Space::Shared, ty, count, .. } => (ty.bytes() * u32::from(*count), true, true),
        _ => return None,
    };
    let (lanes, whole_warp) = match &inst.op {
        Op::Ldmatrix { count, .. } | Op::Stmatrix { count, .. } => (8 * u32::from(*count), true),
        _ => (32, false),
    };
    Some(Access { base: inst.ins[0], offset: inst.ins[1], bytes, lanes, whole_warp, reads, writes })
}

impl Values<'_> {
    /// The addresses of an access in bytes from the start of the CTA's shared memory, for every thread.
    pub(super) fn addresses(&self, access: &Access) -> Option<Vec<i64>> {
        let (base, offset) = (self.known(access.base)?, self.constant(access.offset)? as i64);
        Some((0..self.body.threads as usize).map(|thread| (base.of(thread) as i64).wrapping_add(offset)).collect())
    }
}
