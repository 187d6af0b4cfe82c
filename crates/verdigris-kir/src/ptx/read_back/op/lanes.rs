//! Exchange between lanes (9.7.9 and 9.7.13), and what steers the chip (9.7.13 and 9.7.19).

use super::{Form, Operand, Unknown, Words};
use crate::inst::{Op, Redux, Shuffle, Vote};
use crate::ir::Ty;

pub(super) fn exchange<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    match first {
        "shfl" => {
            words.need("sync")?;
            let mode =
                words.choice(&[("up", Shuffle::Up), ("down", Shuffle::Down), ("bfly", Shuffle::Butterfly), ("idx", Shuffle::Index)])?;
            words.need("b32")?;
            form.result_of(4)?;
            Ok(Op::Shfl { mode })
        }
        "vote" => {
            words.need("sync")?;
            form.result_of(2)?;
            if words.flag("ballot") {
                words.need("b32")?;
                return Ok(Op::Ballot {});
            }
            let mode = words.choice(&[("all", Vote::All), ("any", Vote::Any), ("uni", Vote::Uniform)])?;
            words.need("pred")?;
            Ok(Op::VoteAcross { mode })
        }
        "match" => {
            let all = words.choice(&[("any", false), ("all", true)])?;
            words.need("sync")?;
            form.result_of(2)?;
            let ty = words.choice(&[("b32", Ty::B32), ("b64", Ty::B64)])?;
            Ok(if all { Op::MatchAll { ty } } else { Op::MatchAny { ty } })
        }
        "redux" => {
            words.need("sync")?;
            let op = words.choice(&[
                ("add", Redux::Add),
                ("min", Redux::Min),
                ("max", Redux::Max),
                ("and", Redux::And),
                ("or", Redux::Or),
                ("xor", Redux::Xor),
            ])?;
            form.result_of(2)?;
            let ty = match op {
                Redux::And | Redux::Or | Redux::Xor => words.choice(&[("b32", Ty::B32)])?,
                _ => words.choice(&[("u32", Ty::U32), ("s32", Ty::S32)])?,
            };
            Ok(Op::ReduxAcross { op, ty })
        }
        "elect" => {
            words.need("sync")?;
            match form.take() {
                Some(Operand::Pair("_", elected)) => form.outs.push(elected),
                other => return Err(format!("{other:?} where `_` and a predicate must stand")),
            }
            form.input()?;
            Ok(Op::Elect {})
        }
        _ => {
            words.need("b32")?;
            form.out()?;
            Ok(Op::ActiveMask {})
        }
    }
}

pub(super) fn control<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    match first {
        "setmaxnreg" => {
            let increase = words.choice(&[("inc", true), ("dec", false)])?;
            words.need("sync.aligned.u32")?;
            Ok(Op::Setmaxnreg { increase, registers: form.small_number()? })
        }
        "griddepcontrol" => {
            let wait = words.choice(&[("wait", true), ("launch_dependents", false)])?;
            Ok(if wait { Op::GridDependencyWait {} } else { Op::GridDependencyLaunch {} })
        }
        "nanosleep" => {
            words.need("u32")?;
            form.input()?;
            Ok(Op::Nanosleep {})
        }
        _ => Ok(Op::Trap {}),
    }
}
