use crate::{Lines, caught, caught_in, clean, faults_of, header};
use std::cell::Cell;
use verdigris_kir::face::{Val, build};
use verdigris_kir::inst::Op;
use verdigris_kir::ir::{Loc, Operand, Reg, Stmt, Target, Ty};
use verdigris_kir::verify::notes;

#[test]
fn a_value_smuggled_out_of_an_if() {
    caught("scope", &["outside the block that defines it"], header(Target::Sm80, 32), |k, lines| {
        let out = k.output("out", 4);
        let smuggled: Cell<Option<Val<'_, u32>>> = Cell::new(None);
        k.when(k.lane().lt(7u32), || {
            lines.also(line!() + 1);
            smuggled.set(Some(k.lane() + 1u32));
        });
        lines.here(line!() + 1);
        k.st_global(out.at(0u32, 4), 0, smuggled.get().expect("it ran") + 1u32);
    });
}

#[test]
fn a_value_smuggled_out_of_a_loop_body() {
    caught("scope", &["outside the block that defines it"], header(Target::Sm80, 32), |k, lines| {
        let out = k.output("out", 4);
        let smuggled: Cell<Option<Val<'_, u32>>> = Cell::new(None);
        k.range(4u32, |i| smuggled.set(Some(i + 1u32)));
        lines.here(line!() + 1);
        k.st_global(out.at(0u32, 4), 0, smuggled.get().expect("it ran") + 1u32);
    });
}

#[test]
fn a_value_of_the_then_side_on_the_other_side() {
    caught("scope", &["outside the block that defines it"], header(Target::Sm80, 32), |k, lines| {
        let out = k.output("out", 4);
        let smuggled: Cell<Option<Val<'_, u32>>> = Cell::new(None);
        let at = out.at(k.lane(), 4);
        k.when_else(
            k.lane().lt(7u32),
            || smuggled.set(Some(k.lane() + 1u32)),
            || {
                lines.here(line!() + 1);
                k.st_global(at, 0, smuggled.get().expect("it ran") + 1u32);
            },
        );
    });
}

#[test]
fn a_value_of_one_role_in_another() {
    use verdigris_kir::face::Role;
    caught("scope", &["outside the block that defines it"], header(Target::Sm80, 64), |k, lines| {
        let out = k.output("out", 4);
        let smuggled: Cell<Option<Val<'_, u32>>> = Cell::new(None);
        k.warp_roles(&[
            Role { name: "first", warps: 1, registers: None, body: &|| smuggled.set(Some(k.lane() * 3u32)) },
            Role {
                name: "second",
                warps: 1,
                registers: None,
                body: &|| {
                    lines.here(line!() + 1);
                    k.st_global(out.at(k.lane(), 4), 0, smuggled.get().expect("it ran") + 1u32);
                },
            },
        ]);
    });
}

#[test]
fn a_variable_that_nothing_sets() {
    caught("unwritten", &["total", "nothing writes it"], header(Target::Sm80, 32), |k, lines| {
        let out = k.output("out", 4);
        lines.also(line!() + 1);
        let total = k.var_unset::<u32>(Some("total"));
        lines.here(line!() + 1);
        k.st_global(out.address(), 0, total.get());
    });
}

#[test]
fn a_variable_read_before_it_is_set() {
    caught("unwritten", &["before anything has written it"], header(Target::Sm80, 32), |k, lines| {
        let out = k.output("out", 4);
        let total = k.var_unset::<u32>(Some("total"));
        lines.here(line!() + 1);
        k.st_global(out.address(), 0, total.get());
        lines.also(line!() + 1);
        total.set(1u32);
    });
}

#[test]
fn a_variable_that_only_another_role_sets() {
    use verdigris_kir::face::Role;
    caught("unwritten", &["before anything has written it"], header(Target::Sm80, 64), |k, lines| {
        let out = k.output("out", 4);
        let total = k.var_unset::<u32>(None);
        k.warp_roles(&[
            Role { name: "first", warps: 1, registers: None, body: &|| total.set(1u32) },
            Role {
                name: "second",
                warps: 1,
                registers: None,
                body: &|| {
                    lines.here(line!() + 1);
                    k.st_global(out.address(), 0, total.get());
                },
            },
        ]);
    });
}

#[test]
fn a_value_written_twice() {
    for twice in 0..3 {
        caught("once", &["written a second time"], header(Target::Sm80, 32), |k, lines| {
            let out = k.output("out", 4);
            lines.also(line!() + 1);
            let value = k.lane() + 1u32;
            let reg = reg_of(value);
            let again = || k.instruction(Op::Mov { ty: Ty::U32 }, &[Some(reg)], &[Operand::Imm(3)]);
            let plant = || {
                lines.here(line!() + 1);
                k.instruction(Op::Mov { ty: Ty::U32 }, &[Some(reg)], &[Operand::Imm(3)]);
            };
            match twice {
                0 => plant(),
                1 => k.when(k.lane().lt(3u32), plant),
                _ => k.range(3u32, |_| plant()),
            }
            let _ = again;
            k.st_global(out.address(), 0, value);
        });
    }
}

fn reg_of(value: Val<'_, u32>) -> Reg {
    use verdigris_kir::face::AsVal;
    value.operand().reg().expect("a register")
}

#[test]
fn stop_when_inside_a_block() {
    for place in 0..3 {
        caught("stop", &["top level"], header(Target::Sm80, 32), |k, lines| {
            let done = k.scalar::<u32>("done").eq(1u32);
            let plant = || {
                lines.here(line!() + 1);
                k.stop_when(done);
            };
            match place {
                0 => k.when(k.scalar::<u32>("n").lt(7u32), plant),
                1 => k.range(3u32, |_| plant()),
                _ => k.warp_roles(&[verdigris_kir::face::Role { name: "all", warps: 1, registers: None, body: &plant }]),
            }
        });
    }
}

#[test]
fn indices_that_lead_nowhere() {
    let sound = || {
        build(header(Target::Sm80, 32), |k| {
            let out = k.output("out", 4);
            k.st_global(out.address(), 0, k.lane());
        })
    };
    assert!(faults_of(sound()).is_empty());
    let last = |body: &mut verdigris_kir::ir::KernelBody, plant: &dyn Fn(&mut verdigris_kir::ir::Inst)| {
        if let Some(Stmt::Inst(inst)) = body.body.stmts.last_mut() {
            plant(inst);
        }
    };
    let mut planted = vec![sound(), sound(), sound(), sound(), sound()];
    last(&mut planted[0], &|inst| inst.ins[2] = Operand::Reg(Reg(1000)));
    last(&mut planted[1], &|inst| inst.ins[1] = Operand::Late(9));
    last(&mut planted[2], &|inst| inst.loc = Loc(77));
    planted[3].locations[1].inlined_at = Some(Loc(1));
    planted[4].locations.clear();
    for body in planted {
        caught_in("form", &[], body, &Lines::default());
    }
}

#[test]
fn values_and_variables_where_they_belong() {
    clean(header(Target::Sm80, 64), |k| {
        let out = k.output("out", 4);
        let n = k.scalar::<u32>("n");
        let total = k.var(0u32);
        let late = k.var_unset::<u32>(None);
        k.stop_when(n.eq(0u32));
        k.range(n, |i| {
            let doubled = i * 2u32;
            k.when_else(doubled.lt(7u32), || total.set(total.get() + doubled), || late.set(doubled));
            // Set by an earlier turn or not at all: the interpreter decides.
            k.when(i.gt(n), || total.set(late.get()));
        });
        k.repeat_until(|| {
            total.set(total.get() + 1u32);
            total.get().gt(9u32)
        });
        k.st_global(out.at(k.thread(), 4), 0, total.get());
    });
}

#[test]
fn what_nothing_uses_is_a_note_and_no_fault() {
    let body = build(header(Target::Sm80, 32), |k| {
        let out = k.output("out", 4);
        let _ = k.scalar::<u32>("forgotten");
        let _ = k.shared("spare", 64, 16);
        k.st_global(out.address(), 0, k.lane());
    });
    let notes = notes(&body);
    assert!(notes.iter().all(|note| note.rule == "unused"));
    assert!(notes.iter().any(|note| note.message.contains("spare")), "{notes:#?}");
    assert!(notes.iter().any(|note| note.message.contains("ParamLoad")), "{notes:#?}");
    assert!(faults_of(body).is_empty());
}
