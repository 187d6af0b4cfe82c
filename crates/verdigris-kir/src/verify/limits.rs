//! What the chip holds: `[shared]`, `[threads]`, `[registers]`, `[roles]`, `[cluster]`, `[barrier-id]`, `[params]`, `[map]`, `[alignment]`,
//! `[accumulators]`.

use super::Findings;
use super::sites::Sites;
use super::values::{Root, Values, shared_access};
use crate::inst::Op;
use crate::ir::{Block, Inst, Loc, MapDecl, Operand, ParamKind, Role, Stmt, Swizzle, Target, Ty};

/// Threads that one SM of the target holds.
fn threads_of_sm(target: Target) -> u32 {
    match target {
        Target::Sm89 => 1536,
        _ => 2048,
    }
}

/// Bytes that kernel parameters may take since sm_70.
const PARAMS_LIMIT_BYTES: u32 = 32764;
/// The most arrivals that an mbarrier counts.
const MOST_ARRIVALS: u64 = (1 << 20) - 1;
/// Accumulators of one `wgmma` that no longer fit where a thread has 128 registers at entry (measured: ptxas C7602).
const ACCUMULATORS_AT_128: usize = 104;

pub(super) fn check(found: &mut Findings<'_>) {
    let body = found.body;
    let kernel = Loc(0);
    let threads_legal = (32..=1024).contains(&body.threads) && body.threads.is_multiple_of(32);
    if !threads_legal {
        found.fault(
            "threads",
            kernel,
            None,
            format!("a CTA of {} threads, but a chip takes 32 to 1024 in whole warps: the launch would be refused", body.threads),
        );
    }
    if body.min_ctas == 0 || body.threads.saturating_mul(body.min_ctas) > threads_of_sm(body.target) {
        let (ctas, threads, most) = (body.min_ctas, body.threads, threads_of_sm(body.target));
        found.fault(
            "threads",
            kernel,
            None,
            format!("{ctas} CTAs of {threads} threads on one SM, which holds 1 CTA or more and at most {most} threads"),
        );
    }
    if !(1..=16).contains(&body.cluster) || (body.cluster > 1 && body.target < Target::Sm90) {
        let (cluster, target) = (body.cluster, body.target.ptx());
        found.fault(
            "cluster",
            kernel,
            None,
            format!("a cluster of {cluster} CTAs on {target}: clusters have 1 to 16 (more than 8 is not portable) and need sm_90"),
        );
    }
    shared(found);
    params(found);
    if threads_legal && body.min_ctas > 0 {
        roles(found, &body.body, None);
    }
    body.for_each_inst(&mut |inst| instruction(found, inst));
}

fn shared(found: &mut Findings<'_>) {
    let body = found.body;
    let limit = body.target.shared_limit_bytes();
    if body.shared_bytes > limit {
        // The piece that goes past the limit is the line to look at.
        let past = body.shared.iter().find(|piece| u64::from(piece.offset_bytes) + u64::from(piece.bytes) > u64::from(limit));
        let loc = past.map_or(Loc(0), |piece| piece.loc);
        let target = body.target.ptx();
        found.fault(
            "shared",
            loc,
            None,
            format!("{} bytes of shared memory, but a CTA on {target} has at most {limit}: the launch would be refused", body.shared_bytes),
        );
    }
    for piece in &body.shared {
        let end = u64::from(piece.offset_bytes) + u64::from(piece.bytes);
        if end > u64::from(body.shared_bytes) {
            found.fault(
                "shared",
                piece.loc,
                None,
                format!("piece {} ends at byte {end}, but the kernel asks for {} bytes of shared memory", piece.name, body.shared_bytes),
            );
        }
        if !piece.alignment_bytes.is_power_of_two() || piece.alignment_bytes > 1024 {
            found.fault(
                "shared",
                piece.loc,
                None,
                format!(
                    "piece {} asks for an alignment of {} bytes: a power of two up to 1024 can be had",
                    piece.name, piece.alignment_bytes
                ),
            );
        } else if !piece.offset_bytes.is_multiple_of(piece.alignment_bytes) {
            found.fault(
                "shared",
                piece.loc,
                None,
                format!(
                    "piece {} stands at byte {}, which is not a multiple of its alignment, {}",
                    piece.name, piece.offset_bytes, piece.alignment_bytes
                ),
            );
        }
    }
    for barrier in &body.barriers {
        let piece = &body.shared[barrier.shared as usize];
        if u64::from(barrier.count) * 8 > u64::from(piece.bytes) || piece.alignment_bytes < 8 {
            found.fault(
                "shared",
                barrier.loc,
                Some(piece.loc),
                format!(
                    "barrier {} is {} mbarriers of 8 bytes, but piece {} has {} bytes at alignment {}",
                    barrier.name, barrier.count, piece.name, piece.bytes, piece.alignment_bytes
                ),
            );
        }
        let arrivals = body.late[barrier.arrivals as usize];
        if !(1..=MOST_ARRIVALS).contains(&arrivals) {
            found.fault(
                "barrier-id",
                barrier.loc,
                None,
                format!("barrier {} counts {arrivals} arrivals a phase, but an mbarrier counts 1 to {MOST_ARRIVALS}", barrier.name),
            );
        }
    }
}

fn params(found: &mut Findings<'_>) {
    let body = found.body;
    let (_, bytes) = body.param_offsets();
    if bytes > PARAMS_LIMIT_BYTES {
        let loc = body.params.last().map_or(Loc(0), |param| param.loc);
        found.fault(
            "params",
            loc,
            None,
            format!("parameters take {bytes} bytes, but a kernel has {PARAMS_LIMIT_BYTES}: the module would be refused"),
        );
    }
    for param in &body.params {
        match &param.kind {
            ParamKind::TensorMap(decl) => {
                if body.target < Target::Sm90 {
                    found.fault(
                        "map",
                        param.loc,
                        None,
                        format!("map {} needs sm_90, but the kernel is built for {}", param.name, body.target.ptx()),
                    );
                }
                for what in map(decl, body.target.shared_limit_bytes()) {
                    found.fault("map", param.loc, None, format!("map {}: {what}: the driver would refuse it", param.name));
                }
            }
            ParamKind::Pointer { alignment_bytes, .. } if !alignment_bytes.is_power_of_two() => {
                found.fault(
                    "params",
                    param.loc,
                    None,
                    format!("parameter {} relies on an alignment of {alignment_bytes} bytes, which is no power of two", param.name),
                );
            }
            _ => {}
        }
    }
}

/// What the driver would refuse of a tensor map.
fn map(decl: &MapDecl, shared_limit: u32) -> Vec<String> {
    let mut wrong = Vec::new();
    let least = if decl.im2col { 3 } else { 1 };
    if !(least..=5).contains(&decl.rank) {
        wrong.push(format!("rank {}, but it must be {least} to 5", decl.rank));
    }
    let wanted = if decl.im2col { 2 } else { decl.rank as usize };
    if decl.box_dims.len() != wanted {
        wrong.push(format!("a box of {} numbers, but it must have {wanted}", decl.box_dims.len()));
        return wrong;
    }
    for (axis, &extent) in decl.box_dims.iter().enumerate() {
        let most = if decl.im2col && axis == 1 { 1024 } else { 256 };
        // What the launch gives is checked with the launch.
        if axis > 0 && decl.has_open_box() {
            continue;
        }
        if !(1..=most).contains(&extent) {
            wrong.push(format!("box extent {extent} in dimension {axis}, but it must be 1 to {most}"));
        }
    }
    let Some(&first) = decl.box_dims.first() else { return wrong };
    let inner = u64::from(first) * u64::from(decl.ty.bytes());
    if !inner.is_multiple_of(16) {
        wrong.push(format!("an inner box of {inner} bytes, but it must be a multiple of 16"));
    }
    let span = u64::from(decl.swizzle.span_bytes());
    if decl.swizzle != Swizzle::None && inner > span {
        wrong.push(format!("an inner box of {inner} bytes, but rows of the swizzle have {span}"));
    }
    let bytes = decl.box_dims.iter().fold(u64::from(decl.ty.bytes()), |bytes, &extent| bytes.saturating_mul(u64::from(extent)));
    if bytes > u64::from(shared_limit) {
        wrong.push(format!("a box of {bytes} bytes, but a CTA has {shared_limit} of shared memory"));
    }
    wrong
}

/// Checks a set of roles, and the roles inside them. `outer` is the role around: warps are counted in the CTA in both.
fn roles(found: &mut Findings<'_>, block: &Block, outer: Option<&Role>) {
    for stmt in &block.stmts {
        match stmt {
            Stmt::If { then, otherwise, .. } => {
                roles(found, then, outer);
                roles(found, otherwise, outer);
            }
            Stmt::Loop { head, body, .. } => {
                roles(found, head, outer);
                roles(found, body, outer);
            }
            Stmt::Roles { roles: list, loc, .. } => {
                set_of_roles(found, list);
                budget(found, list, *loc);
                for role in list {
                    if let Some(outer) = outer
                        && (role.first_warp < outer.first_warp || role.first_warp + role.warps > outer.first_warp + outer.warps)
                    {
                        found.fault(
                            "roles",
                            role.loc,
                            Some(outer.loc),
                            format!(
                                "role {} has warps {}, but stands inside role {} with warps {}: the rest never come here",
                                role.name,
                                range(role),
                                outer.name,
                                range(outer)
                            ),
                        );
                    }
                    roles(found, &role.body, Some(role));
                }
            }
            Stmt::Inst(_) | Stmt::StopWhen { .. } | Stmt::Comment(_) => {}
        }
    }
}

fn range(role: &Role) -> String {
    format!("{}..{}", role.first_warp, u64::from(role.first_warp) + u64::from(role.warps))
}

fn set_of_roles(found: &mut Findings<'_>, list: &[Role]) {
    let warps = found.body.threads / 32;
    for role in list {
        if role.warps == 0 || u64::from(role.first_warp) + u64::from(role.warps) > u64::from(warps) {
            found.fault("roles", role.loc, None, format!("role {} has warps {}, but the CTA has 0..{warps}", role.name, range(role)));
        }
    }
    for pair in list.windows(2) {
        if u64::from(pair[1].first_warp) < u64::from(pair[0].first_warp) + u64::from(pair[0].warps) {
            found.fault(
                "roles",
                pair[1].loc,
                Some(pair[0].loc),
                format!(
                    "role {} has warps {}, but role {} before it has warps {}: roles ascend and do not overlap",
                    pair[1].name,
                    range(&pair[1]),
                    pair[0].name,
                    range(&pair[0])
                ),
            );
        }
    }
}

/// Register budgets of one set of roles.
fn budget(found: &mut Findings<'_>, list: &[Role], loc: Loc) {
    let body = found.body;
    if list.iter().all(|role| role.registers.is_none()) {
        return;
    }
    let entry = body.entry_registers();
    let mut legal = true;
    let (mut taken, mut in_roles) = (0u64, 0u64);
    for role in list {
        in_roles += u64::from(role.warps);
        taken += u64::from(role.warps) * u64::from(role.registers.unwrap_or(entry));
        let Some(registers) = role.registers else { continue };
        if body.target != Target::Sm90a {
            found.fault(
                "registers",
                role.loc,
                None,
                format!(
                    "role {} has a budget of {registers} registers, which needs sm_90a, but the kernel is built for {}",
                    role.name,
                    body.target.ptx()
                ),
            );
            legal = false;
        }
        if !(24..=256).contains(&registers) || !registers.is_multiple_of(8) {
            found.fault(
                "registers",
                role.loc,
                None,
                format!("role {} has a budget of {registers} registers, but it must be a multiple of 8 from 24 to 256", role.name),
            );
            legal = false;
        }
        if !role.first_warp.is_multiple_of(4) || !role.warps.is_multiple_of(4) {
            found.fault(
                "registers",
                role.loc,
                None,
                format!(
                    "role {} has a budget of registers and warps {}, but only whole warpgroups can trade registers",
                    role.name,
                    range(role)
                ),
            );
            legal = false;
        }
    }
    let at_entry = entry;
    for role in list {
        let Some(Stmt::Inst(inst)) = role.body.stmts.first() else { continue };
        if let (Op::Setmaxnreg { increase, registers }, Some(budget)) = (&inst.op, role.registers)
            && legal
            && (*registers != budget || (*registers != at_entry && *increase != (*registers > at_entry)))
        {
            let word = if *increase { "raises" } else { "lowers" };
            found.fault(
                "registers",
                inst.loc,
                Some(role.loc),
                format!("setmaxnreg {word} the registers to {registers}, but role {} has a budget of {budget} and enters with {at_entry}: the behaviour is undefined", role.name),
            );
        }
    }
    let warps = u64::from(body.threads / 32);
    taken += warps.saturating_sub(in_roles) * u64::from(entry);
    let has = warps * u64::from(entry);
    if legal && taken > has {
        let (taken, has) = (taken * 32, has * 32);
        found.fault(
            "registers",
            loc,
            None,
            format!("the roles take {taken} registers together, but the CTA has {has} at entry ({entry} for each of {} threads): setmaxnreg would wait for ever", body.threads),
        );
    }
}

fn instruction(found: &mut Findings<'_>, inst: &Inst) {
    let body = found.body;
    match &inst.op {
        Op::BarSync {} | Op::BarArrive {} => {
            let (Some(id), Some(threads)) = (inst.ins.first().copied(), inst.ins.get(1).copied()) else { return };
            if let Some(id) = body.constant(id).filter(|id| *id > 15) {
                found.fault("barrier-id", inst.loc, None, format!("named barrier {id}, but a CTA has 0 to 15"));
            }
            if let Some(threads) = body.constant(threads)
                && (!threads.is_multiple_of(32) || threads > u64::from(body.threads))
            {
                found.fault(
                    "barrier-id",
                    inst.loc,
                    None,
                    format!("a named barrier of {threads} threads, but it counts whole warps of this CTA of {}", body.threads),
                );
            }
        }
        Op::MbarrierInit {} => {
            if let Some(count) = inst.ins.get(2).and_then(|count| body.constant(*count))
                && !(1..=MOST_ARRIVALS).contains(&count)
            {
                found.fault(
                    "barrier-id",
                    inst.loc,
                    None,
                    format!("an mbarrier of {count} arrivals a phase, but it counts 1 to {MOST_ARRIVALS}"),
                );
            }
        }
        Op::ParamLoad { index, offset_bytes, ty } => {
            let param = &body.params[*index as usize];
            let end = u64::from(*offset_bytes) + u64::from(ty.bytes());
            // Untyped words of a map may be moved, to make changed copies of it.
            if matches!(param.kind, ParamKind::TensorMap(_)) && *ty != Ty::B64 {
                found.fault(
                    "params",
                    inst.loc,
                    Some(param.loc),
                    format!("parameter {} is a tensor map, whose bits only TMA reads", param.name),
                );
            } else if end > u64::from(param.kind.bytes()) || !offset_bytes.is_multiple_of(ty.bytes()) {
                found.fault(
                    "params",
                    inst.loc,
                    Some(param.loc),
                    format!(
                        "bytes {offset_bytes}..{end} of parameter {} are read as {ty}, but it has {} bytes",
                        param.name,
                        param.kind.bytes()
                    ),
                );
            }
        }
        Op::ParamAddress { index } => {
            let param = &body.params[*index as usize];
            if !matches!(param.kind, ParamKind::TensorMap(_)) {
                found.fault(
                    "params",
                    inst.loc,
                    Some(param.loc),
                    format!("the address of parameter {} is taken, but it is not a tensor map", param.name),
                );
            }
        }
        Op::Wgmma { shape }
            if body.threads > 0 && body.min_ctas > 0 && body.entry_registers() <= 128 && shape.d_registers() >= ACCUMULATORS_AT_128 =>
        {
            found.fault(
                "accumulators",
                inst.loc,
                None,
                format!(
                    "a wgmma with {} accumulators a thread in a CTA of {} threads, which enters with {} registers: ptxas refuses {ACCUMULATORS_AT_128} and more (C7602); split N",
                    shape.d_registers(),
                    body.threads,
                    body.entry_registers()
                ),
            );
        }
        _ => {}
    }
}

/// `[alignment]`, and maps at their use: what needs the values of addresses.
pub(super) fn check_addresses(found: &mut Findings<'_>, sites: &Sites<'_>, values: &Values<'_>) {
    for site in &sites.sites {
        let inst = site.inst;
        if let Some(access) = shared_access(inst) {
            // Matrix rows are 16 bytes; so are the widest vectors.
            let Root::Piece(index) = values.root(access.base) else { continue };
            let Some(addresses) = values.addresses(&access) else { continue };
            let Some(mut active) = values.active(sites, site.block) else { continue };
            if let Some(guard) = inst.guard
                && values.narrow(&mut active, guard).is_none()
            {
                continue;
            }
            let piece = &found.body.shared[index as usize];
            let (start, end) = (i64::from(piece.offset_bytes), i64::from(piece.offset_bytes) + i64::from(piece.bytes));
            let threads = active.iter().enumerate().filter(|(thread, active)| **active && (*thread as u32 % 32) < access.lanes);
            for (thread, _) in threads {
                let address = addresses[thread];
                let size = i64::from(access.bytes);
                let within = address - start;
                if address % size != 0 {
                    found.fault(
                        "alignment",
                        inst.loc,
                        Some(piece.loc),
                        format!("thread {thread} accesses {size} bytes at byte {within} of shared piece {}, which is not a multiple of {size}: the access traps", piece.name),
                    );
                    break;
                }
                if address < start || address + size > end {
                    found.fault(
                        "alignment",
                        inst.loc,
                        Some(piece.loc),
                        format!(
                            "thread {thread} accesses {size} bytes at byte {within} of shared piece {}, which has {} bytes",
                            piece.name, piece.bytes
                        ),
                    );
                    break;
                }
            }
        }
        map_use(found, inst, values);
    }
}

/// The map behind an operand that is the address of a parameter.
pub(super) fn map_of<'a>(found: &Findings<'a>, values: &Values<'a>, operand: Operand) -> Option<(u32, &'a MapDecl)> {
    let definition = values.definition(operand.reg()?)?;
    let (Op::ParamAddress { index }, None) = (&definition.op, definition.guard) else { return None };
    match &found.body.params[*index as usize].kind {
        ParamKind::TensorMap(decl) => Some((*index, decl)),
        _ => None,
    }
}

fn map_use(found: &mut Findings<'_>, inst: &Inst, values: &Values<'_>) {
    let (map, tile, rank, im2col) = match &inst.op {
        Op::TmaLoad { rank, im2col, .. } => (inst.ins[1], Some(inst.ins[0]), *rank, *im2col),
        Op::TmaStore { rank, im2col, .. } | Op::TmaReduce { rank, im2col, .. } => {
            (inst.ins[0], Some(inst.ins[1 + *rank as usize]), *rank, *im2col)
        }
        Op::TmaPrefetch { rank } => (inst.ins[0], None, *rank, false),
        _ => return,
    };
    let Some((index, decl)) = map_of(found, values, map) else { return };
    let param = &found.body.params[index as usize];
    if u32::from(rank) != decl.rank || (im2col != decl.im2col && tile.is_some()) {
        let mode = |im2col| if im2col { "im2col" } else { "tiled" };
        found.fault(
            "map",
            inst.loc,
            Some(param.loc),
            format!(
                "{} is {} of rank {rank}, but map {} is {} of rank {}",
                inst.op.name(),
                mode(im2col),
                param.name,
                mode(decl.im2col),
                decl.rank
            ),
        );
    }
    let Some(tile) = tile else { return };
    let (Root::Piece(index) | Root::Peer(index)) = values.root(tile) else { return };
    let piece = &found.body.shared[index as usize];
    // The pattern repeats every eight rows of its span; without one, TMA wants 128 bytes.
    let wanted = if decl.swizzle == Swizzle::None { 128 } else { 8 * decl.swizzle.span_bytes() };
    if piece.alignment_bytes < wanted {
        found.fault(
            "alignment",
            inst.loc,
            Some(piece.loc),
            format!(
                "shared piece {} is aligned to {} bytes, but tiles of map {} need {wanted}: rows of the tile would not be where the swizzle is undone",
                piece.name, piece.alignment_bytes, param.name
            ),
        );
    } else if let Some(address) = values.constant(tile)
        && !address.is_multiple_of(128)
    {
        found.fault(
            "alignment",
            inst.loc,
            Some(piece.loc),
            format!(
                "a tile at byte {} of shared piece {}, but TMA wants multiples of 128",
                address as i64 - i64::from(piece.offset_bytes),
                piece.name
            ),
        );
    }
}
