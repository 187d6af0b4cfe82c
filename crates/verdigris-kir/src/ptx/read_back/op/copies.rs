//! Copies by asynchronous units, and tensor maps: sections 9.7.9.25 to 9.7.9.28.

use super::{Form, Unknown, Words, plain_number};
use crate::inst::{BulkReduce, MapField, Op, Scope, Space};
use crate::ir::Ty;

const REDUCTIONS: &[(&str, BulkReduce)] = &[
    ("add", BulkReduce::Add),
    ("min", BulkReduce::Min),
    ("max", BulkReduce::Max),
    ("and", BulkReduce::And),
    ("or", BulkReduce::Or),
    ("xor", BulkReduce::Xor),
    ("inc", BulkReduce::Inc),
    ("dec", BulkReduce::Dec),
];

const ON_MBARRIER: &str = "mbarrier::complete_tx::bytes";

/// `cp.async…` and `cp.reduce.async.bulk…`.
pub(super) fn copy<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    if words.flag("reduce") {
        words.need("async.bulk")?;
        return reduce(words, form);
    }
    words.need("async")?;
    if words.flag("bulk") {
        return if words.flag("tensor") { tensor(words, form) } else { bulk(words, form) };
    }
    match words.next() {
        "commit_group" => Ok(Op::CpAsyncCommit {}),
        "wait_group" => Ok(Op::CpAsyncWait { pending: form.small_number()? }),
        "mbarrier" => {
            words.need("arrive")?;
            let no_increment = words.flag("noinc");
            words.need("shared.b64")?;
            form.address()?;
            Ok(Op::CpAsyncArrive { no_increment })
        }
        kept @ ("ca" | "cg") => {
            words.need("shared.global")?;
            form.address()?;
            form.address()?;
            let bytes = form.number()?;
            form.input()?;
            let bytes = u8::try_from(bytes).map_err(|_| format!("a copy of {bytes} bytes"))?;
            Ok(Op::CpAsync { bytes, bypass_l1: kept == "cg" })
        }
        other => Err(format!("`cp.async.{other}` does not exist")),
    }
}

fn bulk<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    match words.next() {
        "commit_group" => Ok(Op::BulkCommit {}),
        "wait_group" => {
            let read = words.flag("read");
            Ok(Op::BulkWait { pending: form.small_number()?, read })
        }
        "prefetch" if words.flag("tensor") => {
            let rank = rank(words)?;
            words.need("L2.global.tile")?;
            form.tensor(u32::from(rank))?;
            Ok(Op::TmaPrefetch { rank })
        }
        "prefetch" => {
            words.need("L2.global")?;
            form.at_address()?;
            form.input()?;
            Ok(Op::BulkPrefetch {})
        }
        // Into shared memory: destination, source, size, mbarrier.
        "shared::cluster" => {
            let from_peer = words.choice(&[("shared::cta", true), ("global", false)])?;
            words.need(ON_MBARRIER)?;
            let multicast = words.flag("multicast::cluster");
            let hint = words.flag("L2::cache_hint");
            form.at_address()?;
            form.at_address()?;
            form.input()?;
            form.at_address()?;
            form.inputs(usize::from(multicast) + usize::from(hint))?;
            match (from_peer, multicast || hint) {
                (true, false) => Ok(Op::BulkCopyToPeer {}),
                (true, true) => Err("a copy between CTAs has no multicast and no policy".into()),
                (false, _) => Ok(Op::BulkLoad { multicast, hint }),
            }
        }
        "global" => {
            words.need("shared::cta.bulk_group")?;
            let hint = words.flag("L2::cache_hint");
            form.at_address()?;
            form.at_address()?;
            form.inputs(1 + usize::from(hint))?;
            Ok(Op::BulkStore { hint })
        }
        other => Err(format!("`cp.async.bulk.{other}` does not exist")),
    }
}

/// `.2d`
fn rank(words: &mut Words<'_>) -> Result<u8, Unknown> {
    let unknown = words.unknown("a rank");
    let rank = words.next().strip_suffix('d').and_then(plain_number).and_then(|rank| u8::try_from(rank).ok());
    rank.ok_or(unknown)
}

fn tensor<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    let rank = rank(words)?;
    if words.flag("global") {
        words.need("shared::cta")?;
        let im2col = words.choice(&[("tile", false), ("im2col_no_offs", true)])?;
        words.need("bulk_group")?;
        let hint = words.flag("L2::cache_hint");
        form.tensor(u32::from(rank))?;
        form.at_address()?;
        form.inputs(usize::from(hint))?;
        return Ok(Op::TmaStore { rank, im2col, hint });
    }
    words.need("shared::cluster.global")?;
    let im2col = words.choice(&[("tile", false), ("im2col", true)])?;
    words.need(ON_MBARRIER)?;
    let multicast = words.flag("multicast::cluster");
    let hint = words.flag("L2::cache_hint");
    form.at_address()?;
    form.tensor(u32::from(rank))?;
    let barrier = form.plain_address()?;
    if im2col {
        // Offsets along the spatial dimensions: two fewer than there are dimensions. The table has them in front of the mbarrier.
        form.group_in(usize::from(rank).saturating_sub(2))?;
    }
    form.ins.push(barrier);
    form.inputs(usize::from(multicast) + usize::from(hint))?;
    Ok(Op::TmaLoad { rank, im2col, multicast, hint })
}

fn reduce<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    if words.flag("tensor") {
        let rank = rank(words)?;
        words.need("global.shared::cta")?;
        let op = words.choice(REDUCTIONS)?;
        let im2col = words.choice(&[("tile", false), ("im2col_no_offs", true)])?;
        words.need("bulk_group")?;
        form.tensor(u32::from(rank))?;
        form.at_address()?;
        return Ok(Op::TmaReduce { rank, op, im2col });
    }
    words.need("global.shared::cta.bulk_group")?;
    let op = words.choice(REDUCTIONS)?;
    let keeps_subnormals = words.flag("noftz");
    let ty = words.ty()?;
    if keeps_subnormals != (op == BulkReduce::Add && matches!(ty, Ty::F16 | Ty::Bf16)) {
        return Err(format!("`{}`: `.noftz` belongs to sums of halves and to nothing else", words.opcode));
    }
    form.at_address()?;
    form.at_address()?;
    form.input()?;
    Ok(Op::BulkReduceStore { op, ty })
}

#[derive(Clone, Copy)]
enum Field {
    Address,
    Rank,
    Box,
    Extent,
    Stride,
    Step,
}

/// `tensormap.replace` and `tensormap.cp_fenceproxy`.
pub(super) fn tensormap<'t>(words: &mut Words<'t>, form: &mut Form<'_, 't>) -> Result<Op, Unknown> {
    if words.flag("cp_fenceproxy") {
        words.need("global.shared::cta.tensormap::generic.release")?;
        let scope: Scope = words.scope()?;
        words.need("sync.aligned")?;
        form.at_address()?;
        form.at_address()?;
        form.fixed(128)?;
        return Ok(Op::TensormapPublish { scope });
    }
    words.need("replace.tile")?;
    let field = words.choice(&[
        ("global_address", Field::Address),
        ("rank", Field::Rank),
        ("box_dim", Field::Box),
        ("global_dim", Field::Extent),
        ("global_stride", Field::Stride),
        ("element_stride", Field::Step),
    ])?;
    let space = words.choice(&[("global", Space::Global), ("shared::cta", Space::Shared)])?;
    words.need("b1024")?;
    words.need(if matches!(field, Field::Address | Field::Stride) { "b64" } else { "b32" })?;
    form.at_address()?;
    let field = match field {
        Field::Address => MapField::GlobalAddress,
        Field::Rank => MapField::Rank,
        Field::Box => MapField::BoxDim(form.small_number()?),
        Field::Extent => MapField::GlobalDim(form.small_number()?),
        Field::Stride => MapField::GlobalStride(form.small_number()?),
        Field::Step => MapField::ElementStride(form.small_number()?),
    };
    form.input()?;
    Ok(Op::TensormapReplace { field, space })
}
