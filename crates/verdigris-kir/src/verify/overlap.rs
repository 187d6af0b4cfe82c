//! What a launch that overlaps the one in front must keep: `[overlap]`, asked of each such launch with its kernel.
//!
//! Only what is surely ahead of every wait counts. A wait by some threads may stand for others that meet them at a barrier, so an access is a
//! fault where no thread can have waited before it: not earlier in the text, nor in another role.

use super::Findings;
use crate::inst::{Op, Space};
use crate::ir::{Block, Inst, KernelBody, Loc, Stmt};

/// The first access to global memory that no `griddepcontrol.wait` can stand ahead of, as a sentence; loads are passed over where
/// `may_read_constants`, since what nobody writes may be read at any time.
pub(crate) fn unwaited(body: &KernelBody, may_read_constants: bool) -> Option<String> {
    let mut walk = Walk { may_read_constants, found: None };
    walk.block(&body.body, false);
    let (loc, does) = walk.found?;
    let line = Findings::new(body).at(loc);
    Some(format!(
        "{line}: this {does} global memory ahead of every griddepcontrol.wait, and the launch overlaps the one in front of it, which may still \
         write what is read and read what is written [overlap]"
    ))
}

struct Walk {
    may_read_constants: bool,
    found: Option<(Loc, &'static str)>,
}

impl Walk {
    /// Whether a thread may have waited behind the block, where one may have in front of it or not.
    fn block(&mut self, block: &Block, mut waited: bool) -> bool {
        for stmt in &block.stmts {
            waited = match stmt {
                Stmt::Inst(inst) => self.inst(inst, waited),
                Stmt::If { then, otherwise, .. } => {
                    let behind_then = self.block(then, waited);
                    self.block(otherwise, waited) || behind_then
                }
                // The first turn decides: later ones stand behind all of it.
                Stmt::Loop { head, body, .. } => {
                    let behind_head = self.block(head, waited);
                    self.block(body, behind_head)
                }
                Stmt::Roles { roles, .. } => {
                    let waits: Vec<bool> = roles.iter().map(|role| waits(&role.body)).collect();
                    for (own, role) in roles.iter().enumerate() {
                        let others = waits.iter().enumerate().any(|(other, waits)| other != own && *waits);
                        self.block(&role.body, waited || others);
                    }
                    waited || waits.contains(&true)
                }
                Stmt::StopWhen { .. } | Stmt::Comment(_) => waited,
            };
        }
        waited
    }

    fn inst(&mut self, inst: &Inst, waited: bool) -> bool {
        if matches!(inst.op, Op::GridDependencyWait {}) {
            return true;
        }
        if !waited && self.found.is_none() {
            let does = match inst.op {
                Op::St { space: Space::Global, .. }
                | Op::StByte { space: Space::Global, .. }
                | Op::Atom { space: Space::Global, .. }
                | Op::Red { space: Space::Global, .. }
                | Op::BulkStore { .. }
                | Op::BulkReduceStore { .. }
                | Op::TmaStore { .. }
                | Op::TmaReduce { .. } => Some("writes"),
                Op::Ld { space: Space::Global, .. }
                | Op::LdByte { space: Space::Global, .. }
                | Op::CpAsync { .. }
                | Op::BulkLoad { .. }
                | Op::TmaLoad { .. } => (!self.may_read_constants).then_some("reads"),
                _ => None,
            };
            self.found = does.map(|does| (inst.loc, does));
        }
        waited
    }
}

fn waits(block: &Block) -> bool {
    let mut found = false;
    block.for_each_inst(&mut |inst| found |= matches!(inst.op, Op::GridDependencyWait {}));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::face::{Header, Kernel, Role, build};
    use crate::ir::Target;

    fn kernel(describe: impl for<'k> FnOnce(Kernel<'k>)) -> KernelBody {
        build(Header { name: "probe".into(), target: Target::Sm90a, threads: 64, min_ctas: 1, cluster: 1 }, describe)
    }

    #[test]
    fn an_access_ahead_of_every_wait_is_named_by_its_line() {
        let mut line = 0;
        let read_first = kernel(|k| {
            let (x, y) = (k.input("x", 4), k.output("y", 4));
            line = line!() + 1;
            let value = k.ld_global::<u32>(x.at(k.thread(), 4), 0);
            k.griddep_wait();
            k.st_global(y.at(k.thread(), 4), 0, value);
        });
        let fault = unwaited(&read_first, false).expect("it reads too early");
        assert!(fault.contains(&format!("overlap.rs:{line}:")) && fault.contains("reads global memory"), "{fault}");
        assert_eq!(unwaited(&read_first, true), None, "it may read a constant");
        let never = kernel(|k| k.st_global(k.output("y", 4).at(k.thread(), 4), 0, k.thread()));
        assert!(unwaited(&never, true).is_some_and(|fault| fault.contains("writes global memory")));
    }

    #[test]
    fn a_wait_that_may_stand_ahead_of_an_access_passes() {
        let waits_first = kernel(|k| {
            k.griddep_wait();
            k.st_global(k.output("y", 4).at(k.thread(), 4), 0, k.thread());
        });
        let one_side = kernel(|k| {
            let y = k.output("y", 4);
            k.when(k.thread().eq(0u32), || k.griddep_wait());
            k.bar_sync();
            k.st_global(y.at(k.thread(), 4), 0, k.thread());
        });
        let other_role = kernel(|k| {
            let y = k.output("y", 4);
            let wait = || k.griddep_wait();
            let store = || k.st_global(y.at(k.thread(), 4), 0, k.thread());
            k.warp_roles(&[
                Role { name: "wait", warps: 1, registers: None, body: &wait },
                Role { name: "store", warps: 1, registers: None, body: &store },
            ]);
        });
        let shared_alone = kernel(|k| {
            let piece = k.shared("piece", 256, 16);
            k.st_shared(piece.address() + k.thread() * 4, 0, k.thread());
            k.griddep_wait();
        });
        for body in [waits_first, one_side, other_role, shared_alone] {
            assert_eq!(unwaited(&body, false), None, "{}", crate::text::print(&body));
        }
    }

    #[test]
    fn a_loop_is_judged_by_its_first_turn_and_a_role_by_its_own_text() {
        let in_loop = kernel(|k| {
            let y = k.output("y", 4);
            k.range(k.scalar::<u32>("n"), |turn| {
                k.st_global(y.at(turn, 4), 0, turn);
                k.griddep_wait();
            });
        });
        let in_role = kernel(|k| {
            let y = k.output("y", 4);
            let store = || {
                k.st_global(y.at(k.thread(), 4), 0, k.thread());
                k.griddep_wait();
            };
            k.warp_roles(&[Role { name: "store", warps: 2, registers: None, body: &store }]);
        });
        for body in [in_loop, in_role] {
            assert!(unwaited(&body, false).is_some());
        }
    }
}
