use crate::{caught, clean, header};
use verdigris_kir::face::{AsVal, Kernel, Val};
use verdigris_kir::inst::{Cache, Cmp, MatrixType, Op, Order, Space, WgmmaShape};
use verdigris_kir::ir::{Operand, Reg, Target, Ty};

fn reg_of<T: verdigris_kir::face::Scalar>(value: Val<'_, T>) -> Reg {
    value.operand().reg().expect("a register")
}

fn store(k: Kernel<'_>, value: Operand) {
    let out = k.output("out", 4);
    let op = Op::St { space: Space::Global, ty: Ty::F32, count: 1, order: Order::Weak, cache: Cache::Default };
    k.instruction(op, &[], &[out.address().operand(), Operand::Imm(0), value]);
}

#[test]
fn operands_of_another_type() {
    caught("type", &["operand 2 of St", "u32", "f32"], header(Target::Sm80, 32), |k, lines| {
        let lane = k.lane();
        let op = Op::St { space: Space::Global, ty: Ty::F32, count: 1, order: Order::Weak, cache: Cache::Default };
        let out = k.output("out", 4);
        lines.here(line!() + 1);
        k.instruction(op, &[], &[out.address().operand(), Operand::Imm(0), lane.operand()]);
    });
    caught("type", &["operand 0 of IAdd", "u64"], header(Target::Sm80, 32), |k, lines| {
        let (out, wide) = (k.lane(), k.lane().widen());
        let _ = out;
        let result = k.var_unset::<u32>(None);
        lines.here(line!() + 1);
        k.instruction(Op::IAdd { ty: Ty::U32 }, &[Some(result.reg())], &[wide.operand(), Operand::Imm(1)]);
    });
    caught("type", &["constant", "does not fit"], header(Target::Sm80, 32), |k, lines| {
        let result = k.var_unset::<u32>(None);
        lines.here(line!() + 1);
        k.instruction(Op::Mov { ty: Ty::U32 }, &[Some(result.reg())], &[Operand::Imm(1 << 40)]);
    });
}

#[test]
fn results_of_another_type() {
    caught("type", &["result 0 of Setp is pred"], header(Target::Sm80, 32), |k, lines| {
        let result = k.var_unset::<u32>(None);
        lines.here(line!() + 1);
        k.instruction(Op::Setp { cmp: Cmp::Lt, ty: Ty::U32, ftz: false }, &[Some(result.reg())], &[Operand::Imm(1), Operand::Imm(2)]);
    });
}

#[test]
fn a_number_as_a_condition() {
    use verdigris_kir::ir::{Block, Guard, Stmt};
    let mut body = verdigris_kir::face::build(header(Target::Sm80, 32), |k| {
        let lane = k.lane();
        store(k, lane.to_f32().operand());
    });
    let number = body.registers.iter().position(|register| register.ty == Ty::U32).map(|index| Reg(index as u32)).expect("the lane");
    let loc = match body.body.stmts.last_mut() {
        Some(Stmt::Inst(inst)) => {
            inst.guard = Some(Guard { pred: number, negate: false });
            inst.loc
        }
        _ => panic!("a store is last"),
    };
    body.body.stmts.push(Stmt::If { cond: number, then: Block::default(), otherwise: Block::default(), loc });
    let faults = crate::faults_of(body);
    assert_eq!(faults.iter().map(|fault| fault.rule).collect::<Vec<_>>(), ["type", "type"], "{faults:#?}");
    assert!(faults.iter().any(|fault| fault.message.contains("the guard of St")));
    assert!(faults.iter().any(|fault| fault.message.contains("the condition of an if")));
}

#[test]
fn too_few_or_too_many() {
    for (outs, ins) in [(1, 1), (1, 3), (0, 2), (2, 2)] {
        caught("count", &["IAdd"], header(Target::Sm80, 32), |k, lines| {
            let result = k.var_unset::<u32>(None);
            lines.here(line!() + 1);
            k.instruction(Op::IAdd { ty: Ty::U32 }, &vec![Some(result.reg()); outs], &vec![Operand::Imm(1); ins]);
        });
    }
}

#[test]
fn an_offset_that_is_no_constant() {
    let load = |k: Kernel<'_>, lines: &crate::Lines, offset: Operand| {
        let input = k.input("x", 4);
        let result = k.var_unset::<f32>(None);
        let op = Op::Ld { space: Space::Global, ty: Ty::F32, count: 1, order: Order::Weak, cache: Cache::Default };
        lines.here(line!() + 1);
        k.instruction(op, &[Some(result.reg())], &[input.address().operand(), offset]);
    };
    caught("constant", &["address offset"], header(Target::Sm80, 32), |k, lines| {
        let offset = k.lane().widen();
        load(k, lines, Operand::Reg(reg_of(offset)));
    });
    caught("constant", &["32 signed bits"], header(Target::Sm80, 32), |k, lines| load(k, lines, Operand::Imm(1 << 31)));
    caught("constant", &["32 signed bits"], header(Target::Sm80, 32), |k, lines| load(k, lines, Operand::Imm((-(1i64 << 40)) as u64)));
}

const SHAPE: WgmmaShape = WgmmaShape {
    n: 8,
    a: MatrixType::Bf16,
    b: MatrixType::Bf16,
    d: MatrixType::F32,
    a_in_registers: false,
    transpose_a: false,
    transpose_b: false,
    negate_a: false,
    negate_b: false,
    saturate: false,
    sparse: false,
};

#[test]
fn accumulators_that_are_no_registers_of_their_own() {
    for plant in 0..3 {
        caught("register", &[], header(Target::Sm90a, 128), |k, lines| {
            let regs: Vec<Option<Reg>> = (0..4).map(|_| Some(k.var(0f32).reg())).collect();
            let mut outs = regs.clone();
            let mut shape = SHAPE;
            let mut ins = vec![Operand::Imm(0), Operand::Imm(0), Operand::Reg(k.predicate(false))];
            match plant {
                0 => outs[2] = None,
                1 => outs[3] = regs[0],
                _ => {
                    shape.a_in_registers = true;
                    ins.splice(0..1, [Operand::Imm(0); 4]);
                }
            }
            lines.here(line!() + 1);
            k.instruction(Op::Wgmma { shape }, &outs, &ins);
        });
    }
}

#[test]
fn instructions_of_a_later_chip() {
    caught("target", &["WgmmaFence needs sm_90a", "sm_90"], header(Target::Sm90, 128), |k, lines| {
        lines.here(line!() + 1);
        k.wgmma_fence();
    });
    caught("target", &["Elect needs sm_90", "sm_80"], header(Target::Sm80, 32), |k, lines| {
        lines.here(line!() + 1);
        let _ = k.elect();
    });
    caught("target", &["ClusterWait needs sm_90", "sm_89"], header(Target::Sm89, 32), |k, lines| {
        lines.here(line!() + 1);
        k.cluster_wait();
    });
}

#[test]
fn bits_and_integers_of_one_width_fit() {
    clean(header(Target::Sm80, 32), |k| {
        let out = k.output("out", 4);
        let word = k.shfl_bfly::<f32>(k.lane().to_f32(), 3);
        let signed = k.lane().signed();
        k.st_global(out.at(k.lane(), 4), -4, word);
        k.st_global(out.at(signed.unsigned(), 4), 4, signed);
        let result = k.var_unset::<u32>(None);
        k.instruction(Op::Mov { ty: Ty::S32 }, &[Some(result.reg())], &[Operand::Imm((-3i64) as u64)]);
        k.instruction(Op::Mov { ty: Ty::S32 }, &[Some(result.reg())], &[Operand::Imm(0xFFFF_FFFD)]);
    });
}

#[test]
fn instructions_that_ptx_does_not_have() {
    use verdigris_kir::face::LoadOptions;
    caught("illegal", &["does not exist with these attributes"], header(Target::Sm80, 32), |k, lines| {
        let result = k.var_unset::<f32>(None);
        lines.here(line!() + 1);
        k.instruction(Op::IAdd { ty: Ty::F32 }, &[Some(result.reg())], &[Operand::Imm(0), Operand::Imm(0)]);
    });
    caught("illegal", &["Wgmma"], header(Target::Sm90a, 128), |k, lines| {
        let accumulators: Vec<_> = (0..6).map(|_| k.var_unset::<f32>(None)).collect();
        let descriptor = k.constant(0u64);
        lines.here(line!() + 1);
        k.wgmma(WgmmaShape { n: 12, ..SHAPE }, &accumulators, verdigris_kir::face::WgmmaA::Shared(descriptor), descriptor, false);
    });
    caught("illegal", &["CpAsync"], header(Target::Sm80, 32), |k, lines| {
        let (from, to) = (k.input("x", 16), k.shared("tile", 64, 16));
        lines.here(line!() + 1);
        k.cp_async(to.address(), 0, from.address(), 0, 12, 12u32);
    });
    // A tensor load of rank 1 has no im2col form, and no signature either.
    let map = verdigris_kir::ir::MapDecl { im2col: true, ..crate::tile_map(64) };
    let body = verdigris_kir::face::build(header(Target::Sm90, 32), |k| {
        let (map, tile, barrier) = (k.tensor_map("a", map.clone()), k.shared("tile", 8192, 1024), k.mbarrier_array("full", 1));
        barrier.arrivals().set(1);
        let zero = k.constant(0i32);
        k.tma_load_im2col(tile.address(), &map, &[zero], &[], barrier.at(0u32), LoadOptions::default());
    });
    assert!(crate::faults_of(body).iter().any(|fault| fault.rule == "illegal" && fault.message.contains("TmaLoad")));
}
