//! Every sample of the table with the text that it is printed as, kept beside the test and ordered by the manual's sections.
//!
//! The file says how it was reviewed and how it is written anew. A mistake cannot be taken over by rewriting it: the second reader, which
//! knows the manual's grammar and not the table's templates, reads each of these texts back as its instruction (`read_back`).

use super::snapshots::check_snapshot;
use super::table::{Form, batch};
use crate::inst::Op;
use crate::inst_samples::samples;
use crate::ir::{Operand, Reg, Target, Ty};
use crate::ptx::{Isa, print::print_body};
use std::collections::{BTreeMap, BTreeSet};

const HEAD: &str = "\
# What each sample of the table of instructions is printed as.
#
# Ordered by the sections of PTX ISA 9.0, with the rule that decides the spelling. A line has the operation with its attributes (of flags
# those that are set), its text, the types that T stands for, and the scopes that S stands for. A type whose word is another has it behind
# an equals sign. d are results, a operands, in the order of the table.
#
# Read against the manual on 2026-11-23, when all of it was first written: each section against its grammar there, the atomics by their pattern and
# the lines of wgmma by samples of them; no text was wrong. Lines of later days are read when they are written, as below. A
# reader of our own that knows the manual's grammar and not the table's templates reads each text back as its instruction.
#
# A test compares it with the table; VERDIGRIS_BLESS=1 cargo test -p verdigris-kir golden writes it anew. Whoever does so reads each changed
# line against the section above it: what is wrong here is wrong on every device.
";

/// Sections of the manual, with the rule that decides the spelling and the entries of the table that stand there.
const SECTIONS: &[(&str, &str, &[&str])] = &[
    (
        "9.7.1 Integer Arithmetic Instructions: add, sub",
        "add.type d, a, b. Wraps; `.sat` exists for s32 and is not offered.",
        &["IAdd", "ISub"],
    ),
    (
        "9.7.1 Integer Arithmetic Instructions: mul, mad",
        "mul.lo|hi|wide.type d, a, b; mad.lo|wide.type d, a, b, c. The type is that of a and b; with wide, d and c have twice its \
         bits.",
        &["IMulLo", "IMulHi", "IMulWide", "IMadLo", "IMadWide"],
    ),
    (
        "9.7.1 Integer Arithmetic Instructions: min, max, abs, neg",
        "The type decides whether numbers have a sign; abs and neg exist for signed ones.",
        &["IMin", "IMax", "INeg", "IAbs"],
    ),
    (
        "9.7.1 Integer Arithmetic Instructions: popc, clz, brev, bfind",
        "popc, clz, brev take bits, bfind a type with or without sign. Counts have 32 bits whatever the type.",
        &["Popc", "Clz", "Brev", "Bfind"],
    ),
    (
        "9.7.1 Integer Arithmetic Instructions: bfe, bfi",
        "bfe.type d, a, position, length: signed types extend the sign. bfi.bits d, a, b, position, length: a goes into b.",
        &["Bfe", "Bfi"],
    ),
    (
        "9.7.1 Integer Arithmetic Instructions: dp4a, dp2a",
        "dp4a.atype.btype d, a, b, c; dp2a.lo|hi.atype.btype: lo and hi are the halves of b.",
        &["Dp4a", "Dp2a"],
    ),
    (
        "9.7.3 Floating Point Instructions, 9.7.4 Half Precision Floating Point Instructions: add, sub, mul",
        "op.rounding{.ftz}{.sat}.type. The rounding is always said: without one, the assembler may fuse a product and a sum.",
        &["FAdd", "FSub", "FMul"],
    ),
    (
        "9.7.3 Floating Point Instructions, 9.7.4 Half Precision Floating Point Instructions: fma",
        "fma.rounding{.ftz}{.sat}.type d, a, b, c; halves: fma.rn{.ftz}.relu.f16, fma.rn{.relu}.bf16. relu and sat exclude each other.",
        &["Fma"],
    ),
    (
        "9.7.3 Floating Point Instructions, 9.7.4 Half Precision Floating Point Instructions: min, max",
        "op{.ftz}{.NaN}.type. Without NaN the number wins over NaN; f64 has neither modifier, bf16 no ftz.",
        &["FMin", "FMax"],
    ),
    (
        "9.7.3 Floating Point Instructions, 9.7.4 Half Precision Floating Point Instructions: neg, abs, copysign",
        "op{.ftz}.type; bf16 and f64 without ftz. copysign d, a, b takes the sign of a and the magnitude of b.",
        &["FNeg", "FAbs", "Copysign"],
    ),
    ("9.7.3 Floating Point Instructions: div", "div.rn{.ftz}.f32, div.full{.ftz}.f32, div.approx{.ftz}.f32, div.rn.f64.", &["FDiv"]),
    (
        "9.7.3 Floating Point Instructions: rcp, sqrt, rsqrt",
        "rcp|sqrt.approx|rn{.ftz}.f32, .rn.f64; rsqrt.approx{.ftz}.f32, rsqrt.approx.f64.",
        &["Rcp", "Sqrt", "Rsqrt"],
    ),
    (
        "9.7.3 Floating Point Instructions, 9.7.4 Half Precision Floating Point Instructions: sin, cos, lg2, ex2, tanh",
        "op.approx{.ftz}.f32; ex2.approx.f16, ex2.approx.ftz.bf16; tanh.approx.type without ftz.",
        &["Ex2", "Lg2", "Sin", "Cos", "Tanh"],
    ),
    (
        "9.7.6 Comparison and Selection Instructions, 9.7.7 Half Precision Comparison Instructions: setp",
        "setp.cmp{.ftz}.type p, a, b. The forms that end in u, and num and nan, are for floats; bits know eq and ne. ftz: f32 and f16.",
        &["Setp"],
    ),
    (
        "9.7.6 Comparison and Selection Instructions: selp",
        "selp.type d, a, b, p: a where p holds. There is no form of halves: they are bits.",
        &["Selp"],
    ),
    ("9.7.8 Logic and Shift Instructions: and, or, xor, not", "op.pred|b16|b32|b64.", &["And", "Or", "Xor", "Not"]),
    (
        "9.7.8 Logic and Shift Instructions: shl, shr, shf, lop3",
        "shl takes bits; shr copies the sign of signed types. shf.l|r.wrap|clamp.b32 d, low, high, amount. lop3.b32 d, a, b, c, table.",
        &["Shl", "Shr", "Funnel", "Lop3"],
    ),
    (
        "9.7.9 Data Movement and Conversion Instructions: mov",
        "mov.type d, a: pred, bits, integers, f32, f64; halves as bits. Of a special register, with the type of section 10.",
        &["Mov", "SpecialRegister"],
    ),
    (
        "9.7.9 Data Movement and Conversion Instructions: mov (packing and unpacking)",
        "mov.b32|b64 d, {low, high} and mov.b32|b64 {low, high}, a.",
        &["Pack", "Unpack"],
    ),
    (
        "9.7.9 Data Movement and Conversion Instructions: mov of an address, cvta",
        "mov.u32 d, variable+bytes gives an address in its own space; cvta.param.u64 d, a the generic one of an address of a \
         parameter.",
        &["SharedAddress", "ParamAddress"],
    ),
    ("9.7.9 Data Movement and Conversion Instructions: prmt", "prmt.b32 d, a, b, selector, in the default mode.", &["Prmt"]),
    (
        "9.7.9 Data Movement and Conversion Instructions: ld, ld.global.nc",
        "ld{.volatile|.relaxed.scope|.acquire.scope}.space{.cache}{.vec}.type d, [a]; ld.global.nc{.L1::…}{.vec}.type. Weak without \
         an order. \
         `.shared` is the CTA's own.",
        &["ParamLoad", "Ld", "LdByte"],
    ),
    (
        "9.7.9 Data Movement and Conversion Instructions: st",
        "st{.volatile|.relaxed.scope|.release.scope}.space{.cache}{.vec}.type [a], b.",
        &["St", "StByte"],
    ),
    (
        "9.7.9 Data Movement and Conversion Instructions: st.async",
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{.vec}.type [a], b, [mbarrier].",
        &["StAsync"],
    ),
    (
        "9.7.9 Data Movement and Conversion Instructions: prefetch, discard, createpolicy",
        "prefetch.global.L1|L2 [a]; prefetch.tensormap [a]; discard.global.L2 [a], 128; createpolicy.fractional.L2::priority.b64 d, \
         1.0.",
        &["Prefetch", "TensormapPrefetch", "DiscardL2", "CreatePolicy"],
    ),
    (
        "9.7.9 Data Movement and Conversion Instructions: cvt",
        "cvt{.rounding}{.ftz}{.sat}.to.from: rni, rzi, rmi, rpi give whole numbers; rn, rz, rm, rp where a float loses; none where \
         nothing is \
         lost. Pairs: d, a, b with a in the high half; fp8 always with satfinite; relu behind it.",
        &["Cvt", "CvtByte", "CvtToByte", "CvtPack", "CvtHalfToFp8", "CvtFp8ToHalf", "CvtTf32"],
    ),
    ("9.7.9 Data Movement and Conversion Instructions: mapa", "mapa.shared::cluster.u32 d, address, rank.", &["MapShared"]),
    (
        "9.7.9 Data Movement and Conversion Instructions: cp.async (non-bulk)",
        "cp.async.ca.shared.global [to], [from], 4|8|16, source bytes; cg with 16 alone. mbarrier.arrive counts one more arrival but \
         with noinc.",
        &["CpAsync", "CpAsyncCommit", "CpAsyncWait", "CpAsyncArrive"],
    ),
    (
        "9.7.9 Data Movement and Conversion Instructions: cp.async.bulk, cp.reduce.async.bulk",
        "cp.async.bulk.to.from.completion{.multicast::cluster}{.L2::cache_hint} [to], [from], bytes{, [mbarrier]}{, mask}{, policy}. \
         Into shared \
         memory on an mbarrier, into global memory in a bulk group. Sums of halves with noftz.",
        &["BulkLoad", "BulkStore", "BulkReduceStore", "BulkCopyToPeer", "BulkPrefetch", "BulkCommit", "BulkWait"],
    ),
    (
        "9.7.9 Data Movement and Conversion Instructions: cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, \
         cp.async.bulk.prefetch.tensor",
        "cp.async.bulk.tensor.dim.to.from.mode.completion…: loads [to], [map, {…}], [mbarrier]{, {offsets}}{, mask}{, policy}; stores \
         [map, {…}], \
         [from]{, policy}; im2col_no_offs where a store or a reduction follows an im2col map; a reduction has its op in front of the mode.",
        &["TmaLoad", "TmaStore", "TmaReduce", "TmaPrefetch"],
    ),
    (
        "9.7.9 Data Movement and Conversion Instructions: tensormap.replace; 9.7.13: tensormap.cp_fenceproxy",
        "tensormap.replace.tile.field.space.b1024.type [map]{, ordinal}, value: b64 for address and strides. cp_fenceproxy copies 128 \
         bytes.",
        &["TensormapReplace", "TensormapPublish"],
    ),
    (
        "9.7.13 Parallel Synchronization and Communication Instructions: bar, barrier, bar.warp.sync, barrier.cluster",
        "barrier.sync.aligned a{, threads}; barrier.red.popc.aligned.u32, barrier.red.and|or.aligned.pred d, a, p; aligned: whole \
         warps. \
         barrier.cluster.arrive.release|relaxed, wait.acquire.",
        &["BarSync", "BarArrive", "CtaSync", "CtaCount", "CtaVote", "WarpSync", "ClusterArrive", "ClusterWait"],
    ),
    (
        "9.7.13 Parallel Synchronization and Communication Instructions: fence",
        "fence.acq_rel|sc.scope; fence.mbarrier_init.release.cluster; fence.proxy.async{.global|.shared::cta}; \
         fence.proxy.tensormap::generic.release.scope, and .acquire.scope [map], 128.",
        &["MemoryFence"],
    ),
    (
        "9.7.13 Parallel Synchronization and Communication Instructions: atom, red, red.async",
        "atom.order.scope.space.op{.noftz}.type d, [a], b{, c}; red likewise without d, with its vector behind noftz. Halves have \
         noftz and \
         nothing else has. Bitwise operations, exch and cas take bits; a sum of s64 is one of u64.",
        &["Atom", "Red", "RedAsync"],
    ),
    (
        "9.7.13 Parallel Synchronization and Communication Instructions: vote.sync, match.sync, activemask, redux.sync, elect.sync; \
         9.7.9: shfl.sync",
        "All with the member mask last. shfl.sync.mode.b32 d, a, lane, clamp, mask. redux.sync on bits for and, or, xor.",
        &["Shfl", "VoteAcross", "Ballot", "MatchAny", "MatchAll", "ReduxAcross", "Elect", "ActiveMask"],
    ),
    (
        "9.7.13 Parallel Synchronization and Communication Instructions: mbarrier",
        "mbarrier.op{.order.scope}.space.b64. An arrival without an order is release.cta; into a peer's memory, and for the cluster, \
         the scope \
         is said. expect_tx and complete_tx are relaxed. Waits acquire.",
        &[
            "MbarrierInit",
            "MbarrierInvalidate",
            "MbarrierArriveToken",
            "MbarrierArrive",
            "MbarrierArriveExpect",
            "MbarrierArriveDrop",
            "MbarrierExpect",
            "MbarrierComplete",
            "MbarrierWait",
            "MbarrierTest",
            "MbarrierTestToken",
            "MbarrierPending",
        ],
    ),
    (
        "9.7.13 Parallel Synchronization and Communication Instructions: griddepcontrol",
        "griddepcontrol.wait and .launch_dependents.",
        &["GridDependencyWait", "GridDependencyLaunch"],
    ),
    (
        "9.7.14 Warp Level Matrix Instructions: ldmatrix, stmatrix, movmatrix",
        "op.sync.aligned.m8n8.count{.trans}.shared.b16.",
        &["Ldmatrix", "Stmatrix", "Movmatrix"],
    ),
    (
        "9.7.14 Warp Level Matrix Instructions: mma, mma.sp",
        "mma{.sp}.sync.aligned.shape.row.col{.satfinite}.d.a.b.c d, a, b, c{, metadata, selector}; single bits end in .xor.popc. A \
         lane has \
         elements / 32 of each matrix, of a sparse A half.",
        &["Mma"],
    ),
    (
        "9.7.15 Asynchronous Warpgroup Level Matrix Instructions: wgmma",
        "wgmma.mma_async{.sp}.sync.aligned.m64nNkK{.satfinite}.d.a.b d, a, b{, metadata, selector}, scale-d{, ±a, ±b}{, trans-a}{, \
         trans-b}: signs \
         for floats, transpositions for 16-bit types, of A only from shared memory. K is 32 bytes deep, twice as many elements if sparse.",
        &["Wgmma", "WgmmaFence", "WgmmaCommit", "WgmmaWait"],
    ),
    (
        "9.7.19 Miscellaneous Instructions: nanosleep, trap, setmaxnreg",
        "setmaxnreg.inc|dec.sync.aligned.u32 count: a multiple of 8 from 24 to 256.",
        &["Setmaxnreg", "Nanosleep", "Trap"],
    ),
];

/// The text of one sample, with operands named by their places.
fn text_of(op: &Op) -> String {
    let body = batch(&[(0, op)], Target::Sm90a, Form::Registers);
    let mut names: BTreeMap<Reg, String> = BTreeMap::new();
    body.for_each_inst(&mut |inst| {
        names.extend(inst.outs.iter().flatten().enumerate().map(|(index, reg)| (*reg, format!("d{index}"))));
        names.extend(inst.ins.iter().enumerate().filter_map(|(index, operand)| match operand {
            Operand::Reg(reg) => Some((*reg, format!("a{index}"))),
            _ => None,
        }));
    });
    let printed = print_body(&body, Isa::V9_0);
    let lines = printed.lines().map(str::trim).skip_while(|line| *line != "// sample 0").skip(1);
    let lines = lines.filter(|line| !line.starts_with(".loc")).map(|line| line.split(" //").next().unwrap_or_default());
    let line = lines.take_while(|line| *line != "ret;").collect::<Vec<_>>().join(" ");
    let mut out = String::new();
    let mut rest = line.trim_end_matches(';');
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let word = &rest[at..];
        let end = word[1..].find(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '_' | '.')).map_or(word.len(), |end| end + 1);
        let digits = word[1..end].trim_start_matches(|c: char| c.is_ascii_lowercase());
        let name = digits.parse().ok().and_then(|number| names.get(&Reg(number)));
        out.push_str(name.map_or(&word[..end], String::as_str));
        rest = &word[end..];
    }
    out.push_str(rest);
    shorten_groups(&out)
}

/// `{d0, d1, d2, d3}` as `{d0…d3}`.
fn shorten_groups(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once('{') {
        let Some((group, after)) = behind.split_once('}') else { break };
        let names: Vec<&str> = group.split(", ").collect();
        out.push_str(before);
        match names.as_slice() {
            [first, _, _, .., last] if group.starts_with(['d', 'a']) => out.push_str(&format!("{{{first}…{last}}}")),
            _ => out.push_str(&format!("{{{group}}}")),
        }
        rest = after;
    }
    out + rest
}

/// An operation and its text, with T for the type and S for the scope of an order, and what these stand for.
struct Folded {
    op: String,
    text: String,
    ty: Option<String>,
    scope: Option<&'static str>,
}

fn fold(op: &Op, text: &str) -> Folded {
    // What is false goes without saying.
    let mut op = format!("{op:?}").replace(": true", "");
    while let Some(at) = op.find(": false") {
        let name = op[..at].rfind(' ').unwrap_or_default() + 1;
        let end = at + ": false".len();
        if op[..name].ends_with(", ") {
            op.replace_range(name - 2..end, "");
        } else {
            op.replace_range(name..op[end..].strip_prefix(", ").map_or(end + 1, |_| end + 2), "");
        }
    }
    let mut op = op.replace("{ }", "{}");
    let (opcode, operands) = text.split_once(' ').map_or((text, String::new()), |(opcode, operands)| (opcode, format!(" {operands}")));
    let mut opcode = opcode.to_string();
    let mut scope = None;
    for (name, word) in [("Cta", ".cta"), ("Cluster", ".cluster"), ("Gpu", ".gpu"), ("Sys", ".sys")] {
        let said = opcode.match_indices(word).find(|(at, _)| opcode[at + word.len()..].starts_with('.') || at + word.len() == opcode.len());
        let place = ["(", "scope: "].iter().find_map(|lead| Some(op.find(&format!("{lead}{name}"))? + lead.len()));
        if let (Some((at, _)), Some(place)) = (said, place) {
            opcode.replace_range(at..at + word.len(), ".S");
            op.replace_range(place..place + name.len(), "S");
            scope = Some(&word[1..]);
            break;
        }
    }
    // The names of fp8 and of matrix types are attributes like others.
    let field = ["ty: ", "half: ", "from: "].into_iter().find_map(|field| {
        let at = op.find(field)? + field.len();
        type_at(&op[at..]).map(|(name, ty)| (at, name.to_string(), ty))
    });
    let Some((at, name, ty)) = field else { return Folded { op, text: opcode + &operands, ty: None, scope } };
    op.replace_range(at..at + name.len(), "T");
    let last = opcode.rsplit('.').next().unwrap_or_default().to_string();
    let own = name.to_lowercase();
    if last != own && last != ty.as_bits().ptx() && !(ty == Ty::S64 && last == "u64") {
        return Folded { op, text: opcode + &operands, ty: Some(name), scope };
    }
    opcode.truncate(opcode.len() - last.len());
    let listed = if last == own { name } else { format!("{name}={last}") };
    Folded { op, text: format!("{opcode}T{operands}"), ty: Some(listed), scope }
}

fn type_at(text: &str) -> Option<(&str, Ty)> {
    const TYPES: [(&str, Ty); 16] = [
        ("Pred", Ty::Pred),
        ("B16", Ty::B16),
        ("B32", Ty::B32),
        ("B64", Ty::B64),
        ("U16", Ty::U16),
        ("S16", Ty::S16),
        ("U32", Ty::U32),
        ("S32", Ty::S32),
        ("U64", Ty::U64),
        ("S64", Ty::S64),
        ("F16", Ty::F16),
        ("Bf16", Ty::Bf16),
        ("F16x2", Ty::F16x2),
        ("Bf16x2", Ty::Bf16x2),
        ("F32", Ty::F32),
        ("F64", Ty::F64),
    ];
    let end = text.find(|c: char| !c.is_ascii_alphanumeric())?;
    TYPES.iter().find(|(name, _)| *name == &text[..end]).map(|(_, ty)| (&text[..end], *ty))
}

/// A line of the file: in the order of the table, with the types and scopes of its samples.
struct Line {
    op: String,
    text: String,
    stands_for: Vec<(Option<String>, Option<&'static str>)>,
}

#[test]
fn golden_text_of_every_sample() {
    let samples = samples();
    let section_of = |op: &Op| {
        let found = SECTIONS.iter().position(|(.., names)| names.contains(&op.name()));
        found.unwrap_or_else(|| panic!("{} stands in no section of the manual", op.name()))
    };
    let mut sections: BTreeMap<usize, Vec<Line>> = BTreeMap::new();
    for sample in &samples {
        let Folded { op, text, ty, scope } = fold(&sample.op, &text_of(&sample.op));
        let lines = sections.entry(section_of(&sample.op)).or_default();
        match lines.iter_mut().rev().find(|line| line.op == op && line.text == text) {
            Some(line) => line.stands_for.push((ty, scope)),
            None => lines.push(Line { op, text, stands_for: vec![(ty, scope)] }),
        }
    }
    let mut file = HEAD.to_string();
    let mut written = 0;
    for (section, lines) in sections {
        let (title, rule, _) = SECTIONS[section];
        file.push_str(&format!("\n== {title}\n# {rule}\n"));
        for Line { op, text, stands_for } in lines {
            let types: BTreeSet<&str> = stands_for.iter().filter_map(|(ty, _)| ty.as_deref()).collect();
            let scopes: BTreeSet<&str> = stands_for.iter().filter_map(|(_, scope)| *scope).collect();
            // Each type with each scope, or a line would say less than it holds.
            assert_eq!(types.len().max(1) * scopes.len().max(1), stands_for.len(), "{op}");
            written += stands_for.len();
            let list = |letter: &str, words: &BTreeSet<&str>| {
                let words: Vec<&str> = words.iter().copied().collect();
                if words.is_empty() { String::new() } else { format!(" | {letter}: {}", words.join(" ")) }
            };
            file.push_str(&format!("{op} | {text}{}{}\n", list("T", &types), list("S", &scopes)));
        }
    }
    assert_eq!(written, samples.len());
    check_snapshot("../golden/instructions.txt", &file);
}
