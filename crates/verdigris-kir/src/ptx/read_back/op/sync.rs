//! Barriers, mbarriers and fences: section 9.7.13.

use super::{Form, SCOPES, Unknown, Words};
use crate::inst::{Fence, Op, Scope, Space, TestWait};

/// `barrier…`, `barrier.cluster…`, `bar.warp.sync`.
pub(super) fn barrier<'t>(first: &str, words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    if first == "bar" {
        words.need("warp.sync")?;
        form.input()?;
        return Ok(Op::WarpSync {});
    }
    match words.next() {
        "sync" => {
            words.need("aligned")?;
            if form.operands.len() == 1 {
                form.fixed(0)?;
                return Ok(Op::CtaSync {});
            }
            form.inputs(2)?;
            Ok(Op::BarSync {})
        }
        "arrive" => {
            words.need("aligned")?;
            form.inputs(2)?;
            Ok(Op::BarArrive {})
        }
        "red" => {
            let op = match words.next() {
                "popc" => {
                    words.need("aligned.u32")?;
                    Op::CtaCount {}
                }
                both @ ("and" | "or") => {
                    words.need("aligned.pred")?;
                    Op::CtaVote { all: both == "and" }
                }
                other => return Err(format!("`barrier.red.{other}` does not exist")),
            };
            form.out()?;
            form.fixed(0)?;
            form.input()?;
            Ok(op)
        }
        "cluster" => {
            if words.flag("wait") {
                words.need("acquire.aligned")?;
                return Ok(Op::ClusterWait {});
            }
            words.need("arrive")?;
            let relaxed = words.choice(&[("relaxed", true), ("release", false)])?;
            words.need("aligned")?;
            Ok(Op::ClusterArrive { relaxed })
        }
        other => Err(format!("`barrier.{other}` does not exist")),
    }
}

const TWO_SPACES: &[(&str, Space)] = &[("shared::cta", Space::Shared), ("shared::cluster", Space::Cluster)];

/// `mbarrier…`. An arrival without an order releases to the CTA.
pub(super) fn mbarrier<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    match words.next() {
        "init" => {
            words.need("shared.b64")?;
            form.address()?;
            form.input()?;
            Ok(Op::MbarrierInit {})
        }
        "inval" => {
            words.need("shared.b64")?;
            form.address()?;
            Ok(Op::MbarrierInvalidate {})
        }
        "arrive" => arrive(words, form),
        "arrive_drop" => {
            words.need("shared::cta.b64")?;
            form.nothing()?;
            form.address()?;
            form.input()?;
            Ok(Op::MbarrierArriveDrop {})
        }
        counted @ ("expect_tx" | "complete_tx") => {
            words.need("relaxed")?;
            let scope = words.scope()?;
            let space = words.choice(TWO_SPACES)?;
            words.need("b64")?;
            // The CTA's own mbarrier for the CTA, a peer's for the cluster.
            if (scope == Scope::Cluster) != (space == Space::Cluster) || !matches!(scope, Scope::Cta | Scope::Cluster) {
                return Err(format!("`{}`: scope and space differ", words.opcode));
            }
            form.address()?;
            form.input()?;
            Ok(if counted == "expect_tx" { Op::MbarrierExpect { space } } else { Op::MbarrierComplete { space } })
        }
        look @ ("test_wait" | "try_wait") => {
            let kind = if look == "test_wait" { TestWait::Test } else { TestWait::Try };
            let parity = words.flag("parity");
            words.need("acquire")?;
            let scope = words.scope()?;
            words.need("shared::cta.b64")?;
            form.out()?;
            form.address()?;
            form.input()?;
            match (parity, scope) {
                (true, _) => Ok(Op::MbarrierTest { kind, scope }),
                (false, Scope::Cta) => Ok(Op::MbarrierTestToken { kind }),
                (false, _) => Err("a token is waited for in the CTA alone".into()),
            }
        }
        "pending_count" => {
            words.need("b64")?;
            form.result_of(1)?;
            Ok(Op::MbarrierPending {})
        }
        other => Err(format!("`mbarrier.{other}` does not exist")),
    }
}

fn arrive<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    let expects = words.flag("expect_tx");
    let scope = if words.flag("release") { words.choice(SCOPES)? } else { Scope::Cta };
    if !expects && words.flag("shared") {
        words.need("b64")?;
        form.out()?;
        form.address()?;
        form.input()?;
        return if scope == Scope::Cta {
            Ok(Op::MbarrierArriveToken {})
        } else {
            Err("an arrival with a token releases to the CTA".into())
        };
    }
    let space = words.choice(TWO_SPACES)?;
    words.need("b64")?;
    form.nothing()?;
    form.address()?;
    form.input()?;
    if !expects {
        return Ok(Op::MbarrierArrive { space, scope });
    }
    let wanted = if space == Space::Cluster { Scope::Cluster } else { Scope::Cta };
    if scope == wanted { Ok(Op::MbarrierArriveExpect { space }) } else { Err(format!("`{}`: scope and space differ", words.opcode)) }
}

pub(super) fn fence<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    let fence = match words.next() {
        "acq_rel" => Fence::AcqRel(words.scope()?),
        "sc" => Fence::Sc(words.scope()?),
        "mbarrier_init" => {
            words.need("release.cluster")?;
            Fence::MbarrierInit
        }
        "proxy" if words.flag("async") => {
            words.option(&[("shared::cta", Fence::ProxyAsyncShared), ("global", Fence::ProxyAsyncGlobal)]).unwrap_or(Fence::ProxyAsync)
        }
        "proxy" => {
            words.need("tensormap::generic")?;
            if words.flag("release") {
                Fence::TensormapRelease(words.scope()?)
            } else {
                words.need("acquire")?;
                let scope = words.scope()?;
                form.at_address()?;
                form.fixed(128)?;
                Fence::TensormapAcquire(scope)
            }
        }
        other => return Err(format!("`fence.{other}` is no fence of the table")),
    };
    Ok(Op::MemoryFence { fence })
}
