//! Tensor copies: tiled loads, stores and reductions of every rank, type, swizzle and fill, over the edges of tensors small and large;
//! im2col loads with padding that differs by side and dimension, strides and filter offsets, so that a wrong order of dimensions shows.

use super::bulk::{barriers, copy_in, copy_out};
use super::kit::{check, column, imm, operand, probe_with, results, rule_of};
use super::values::{Domain, Random, value};
use super::{Check, Contents, Probe, Rule};
use verdigris_kir::face::{Header, Kernel, Mbarrier, TensorMap, Val};
use verdigris_kir::inst::{BulkReduce, Fence, MapField, Op, Scope, Space, TestWait};
use verdigris_kir::inst_samples::samples;
use verdigris_kir::interp::tensor;
use verdigris_kir::ir::{Access, MapDecl, MapType, Operand, Swizzle, Target, Ty};
use verdigris_kir::program::{Address, Arg, Fill, L2Promotion, MapSpec, Residency, Step};

const THREADS: u32 = 128;

/// A tensor with places from which boxes are copied.
#[derive(Clone, Debug)]
struct Case {
    name: String,
    spec: MapSpec,
    /// Coordinates, innermost first, and filter offsets of an im2col load.
    places: Vec<(Vec<i32>, Vec<u16>)>,
}

impl Case {
    fn tensor_bytes(&self) -> usize {
        let spec = &self.spec;
        let width = u64::from(spec.decl.ty.bytes());
        let last: u64 = spec.dims[1..].iter().zip(&spec.strides_bytes).map(|(extent, stride)| (extent - 1) * stride).sum();
        ((last + spec.dims[0] * width) as usize).next_multiple_of(16)
    }

    fn box_bytes(&self) -> u32 {
        tensor::copy_bytes(&self.spec)
    }

    /// The case with each innermost coordinate moved down to the multiple of 16 bytes that TMA asks for.
    fn aligned(mut self) -> Case {
        let elements = 16 / self.spec.decl.ty.bytes() as i32;
        for (place, _) in &mut self.places {
            place[0] -= place[0].rem_euclid(elements);
        }
        self
    }

    /// Boxes in shared memory start at multiples of this.
    fn slot_bytes(&self) -> u32 {
        self.box_bytes().next_multiple_of(1024)
    }
}

/// A map of a tensor whose rows are padded to a multiple of 16 bytes.
fn map(decl: MapDecl, dims: &[u64]) -> MapSpec {
    let rank = dims.len();
    let mut strides_bytes = Vec::new();
    let mut stride = (dims[0] * u64::from(decl.ty.bytes())).next_multiple_of(16);
    for &extent in &dims[1..] {
        strides_bytes.push(stride);
        stride *= extent;
    }
    let spatial = if decl.im2col { rank - 2 } else { 0 };
    MapSpec {
        decl,
        dims: dims.to_vec(),
        strides_bytes,
        element_strides: vec![1; rank],
        lower_corner: vec![0; spatial],
        upper_corner: vec![0; spatial],
        fill: Fill::Zero,
        l2: L2Promotion::B128,
    }
}

fn tiled(ty: MapType, box_dims: &[u32], swizzle: Swizzle, access: Access) -> MapDecl {
    MapDecl { ty, rank: box_dims.len() as u32, box_dims: box_dims.to_vec(), im2col: false, swizzle, access }
}

const TYPES: [MapType; 10] = [
    MapType::U8,
    MapType::U16,
    MapType::U32,
    MapType::S32,
    MapType::U64,
    MapType::F16,
    MapType::Bf16,
    MapType::F32,
    MapType::Tf32,
    MapType::F64,
];

/// Tiled shapes by rank: extents, box, places over every edge.
fn tiled_shape(rank: usize) -> (Vec<u64>, Vec<u32>, Vec<Vec<i32>>) {
    let dims = [20u64, 11, 6, 5, 4][..rank].to_vec();
    let box_dims = [16u32, 8, 3, 2, 2][..rank].to_vec();
    let places: [[i32; 5]; 6] = [[0; 5], [3, 2, 1, 1, 1], [-5, -3, -2, -1, -1], [12, 7, 4, 4, 3], [17, -1, 5, 0, 2], [40, 0, 0, 0, 0]];
    (dims, box_dims, places.iter().map(|place| place[..rank].to_vec()).collect())
}

fn loads() -> Vec<Case> {
    let mut cases = Vec::new();
    // Every rank.
    for rank in 1..=5 {
        let (dims, box_dims, places) = tiled_shape(rank);
        let spec = map(tiled(MapType::U16, &box_dims, Swizzle::None, Access::Read), &dims);
        let places = places.into_iter().map(|place| (place, Vec::new())).collect();
        cases.push(Case { name: format!("rank{rank}"), spec, places });
    }
    // Every type, filled with zero and with NaN.
    for ty in TYPES {
        for fill in [Fill::Zero, Fill::Nan] {
            let (dims, box_dims, places) = tiled_shape(2);
            let spec = MapSpec { fill, ..map(tiled(ty, &box_dims, Swizzle::None, Access::Read), &dims) };
            if tensor::check(&spec).is_ok() {
                let places = places.into_iter().map(|place| (place, Vec::new())).collect();
                cases.push(Case { name: format!("{ty:?}-{fill:?}").to_lowercase(), spec, places });
            }
        }
    }
    // Every swizzle, in two ranks; a traversal stride; a tensor beyond 128 KB.
    for swizzle in [Swizzle::B32, Swizzle::B64, Swizzle::B128] {
        let row = swizzle.span_bytes() / 2;
        for rank in [2, 3] {
            let box_dims = [row, 11, 3][..rank].to_vec();
            let spec = map(tiled(MapType::Bf16, &box_dims, swizzle, Access::Read), &[u64::from(row) + 40, 30, 7][..rank]);
            let places =
                [[0, 0, 0], [8, 3, 1], [-3, -2, -1], [50, 25, 5]].iter().map(|place| (place[..rank].to_vec(), Vec::new())).collect();
            cases.push(Case { name: format!("{swizzle:?}-rank{rank}").to_lowercase(), spec, places });
        }
    }
    let strided = tiled(MapType::F32, &[8, 7, 5], Swizzle::None, Access::Read);
    let spec = MapSpec { element_strides: vec![1, 2, 3], ..map(strided, &[12, 20, 15]) };
    let places = [[0, 0, 0], [3, 1, 2], [-2, -3, -1], [6, 15, 11]].iter().map(|place| (place.to_vec(), Vec::new())).collect();
    cases.push(Case { name: "strided".into(), spec, places });
    let large = tiled(MapType::F16, &[64, 16], Swizzle::B128, Access::Read);
    let places = [[0, 0], [64, 100], [320, 290], [-8, 295]].iter().map(|place| (place.to_vec(), Vec::new())).collect();
    cases.push(Case { name: "large".into(), spec: map(large, &[360, 300]), places });
    cases.into_iter().map(Case::aligned).collect()
}

/// Im2col maps: extents from W to D, and what is different in each of them.
fn im2col(rank: usize, swizzle: Swizzle, access: Access) -> Case {
    let spatial = rank - 2;
    let channels = if swizzle == Swizzle::None { 16 } else { swizzle.span_bytes() / 2 };
    let decl = MapDecl { ty: MapType::Bf16, rank: rank as u32, box_dims: vec![channels, 40], im2col: true, swizzle, access };
    let mut dims = vec![u64::from(channels) + 8];
    dims.extend(&[9u64, 7, 5][..spatial]);
    dims.push(4);
    let mut spec = map(decl, &dims);
    // Padding before and behind differs, by dimension too.
    spec.lower_corner = [-3, -1, -2][..spatial].to_vec();
    spec.upper_corner = [1, -2, 0][..spatial].to_vec();
    let mut places = Vec::new();
    let corner = |first: &[i32], image: i32, channel: i32| {
        let mut place = vec![channel];
        place.extend(&first[..spatial]);
        place.push(image);
        place
    };
    places.push((corner(&[-3, -1, -2], 0, 0), vec![0; spatial]));
    places.push((corner(&[-3, -1, -2], 0, 0), [2, 3, 1][..spatial].to_vec()));
    places.push((corner(&[1, 2, 1], 1, 8), [4, 1, 2][..spatial].to_vec()));
    places.push((corner(&[5, 3, 2], 3, 0), [1, 5, 3][..spatial].to_vec()));
    Case { name: format!("im2col-rank{rank}-{swizzle:?}").to_lowercase(), spec, places }
}

fn im2col_loads() -> Vec<Case> {
    let mut cases = Vec::new();
    for rank in 3..=5 {
        for swizzle in [Swizzle::None, Swizzle::B64, Swizzle::B128] {
            cases.push(im2col(rank, swizzle, Access::Read));
        }
        // Strides that differ by dimension; every first pixel is one that the walk visits.
        let mut case = im2col(rank, Swizzle::B32, Access::Read);
        case.name += "-strided";
        for (stride, to) in [2, 3, 2].into_iter().zip(&mut case.spec.element_strides[1..rank - 1]) {
            *to = stride;
        }
        case.places[2].0[1..rank - 1].copy_from_slice(&[1, 2, 0][..rank - 2]);
        case.places[3].0[1..rank - 1].copy_from_slice(&[5, 2, 2][..rank - 2]);
        cases.push(case);
    }
    cases
}

pub(super) fn probes() -> Vec<Probe> {
    let mut probes = Vec::new();
    for case in loads().into_iter().chain(im2col_loads()) {
        probes.push(load(&case, Form::default()));
    }
    // Each form of the instruction, on a case of its rank and mode.
    for sample in samples() {
        match sample.op {
            Op::TmaLoad { rank, im2col: mode, multicast, hint } if multicast || hint => {
                let case = if mode { im2col(rank.into(), Swizzle::B64, Access::Read) } else { rank_case(rank.into(), Access::Read) };
                probes.push(load(&case, Form { multicast, hint, prefetched: false }));
            }
            Op::TmaStore { rank, im2col: mode, hint } => probes.push(store(rank.into(), mode, None, MapType::F32, hint)),
            Op::TmaReduce { rank, op, im2col: mode } => {
                let types = reducible(op);
                probes.push(store(rank.into(), mode, Some(op), types[rank as usize % types.len()], false));
            }
            _ => {}
        }
    }
    // Elements smaller than those of the samples.
    probes.push(store(2, false, None, MapType::U16, false));
    probes.extend([Space::Shared, Space::Global].map(changed_map));
    // Each type of each reduction, in one rank.
    for op in [BulkReduce::Add, BulkReduce::Min, BulkReduce::Max, BulkReduce::And, BulkReduce::Or, BulkReduce::Xor, BulkReduce::Inc] {
        for (index, ty) in reducible(op).into_iter().enumerate() {
            if index != 2 % reducible(op).len() {
                probes.push(store(2, false, Some(op), ty, false));
            }
        }
    }
    for rank in 1..=5 {
        probes.push(load(&rank_case(rank, Access::Read), Form { prefetched: true, ..Form::default() }));
    }
    // A fault ends the run: what is most likely to fault comes last (see `Form::prefetched`), and takes no other result along.
    probes.sort_by_key(|probe| (probe.name.contains("-prefetched"), probe.name.contains("rank1")));
    probes
}

fn reducible(op: BulkReduce) -> Vec<MapType> {
    match op {
        BulkReduce::Add => vec![MapType::F32, MapType::F16, MapType::Bf16, MapType::U32, MapType::S32, MapType::U64],
        BulkReduce::Min | BulkReduce::Max => vec![MapType::S32, MapType::U32, MapType::F16, MapType::Bf16, MapType::U64],
        BulkReduce::And | BulkReduce::Or | BulkReduce::Xor => vec![MapType::U32, MapType::U64],
        BulkReduce::Inc | BulkReduce::Dec => vec![MapType::U32],
    }
}

fn rank_case(rank: usize, access: Access) -> Case {
    let (dims, box_dims, places) = tiled_shape(rank);
    let places = places.into_iter().map(|place| (place, Vec::new())).collect();
    Case { name: format!("rank{rank}"), spec: map(tiled(MapType::U16, &box_dims, Swizzle::None, access), &dims), places }.aligned()
}

/// Elements of a map's type, of all kinds.
fn elements(ty: MapType, bytes: usize, random: &mut Random) -> Vec<u8> {
    let of = match ty {
        MapType::U8 => return random.bytes(bytes),
        MapType::U16 => Ty::U16,
        MapType::U32 => Ty::U32,
        MapType::S32 => Ty::S32,
        MapType::U64 => Ty::U64,
        MapType::F16 => Ty::F16,
        MapType::Bf16 => Ty::Bf16,
        MapType::F32 | MapType::Tf32 => Ty::F32,
        MapType::F64 => Ty::F64,
    };
    let width = of.bytes() as usize;
    let mut out = Vec::with_capacity(bytes);
    while out.len() < bytes {
        out.extend_from_slice(&value(of, Domain::Any, random).to_le_bytes()[..width]);
    }
    out.truncate(bytes);
    out
}

/// Coordinates (or filter offsets) as constants.
fn coordinates<'k>(k: Kernel<'k>, place: &[i32]) -> Vec<Val<'k, i32>> {
    place.iter().map(|&at| k.constant(at)).collect()
}

/// What a load has beside the plain form.
#[derive(Clone, Copy, Debug, Default)]
struct Form {
    multicast: bool,
    hint: bool,
    /// A box is brought into L2 first. Its coordinates are numbers of the launch: of a rank-1 prefetch from a constant 0, ptxas 13.0
    /// makes `UTMAPF.L2.1D [URZ]`, and the kernel that held it ended with an illegal instruction on an H200.
    prefetched: bool,
}

fn load(case: &Case, form: Form) -> Probe {
    let Form { multicast, hint, prefetched } = form;
    let words = [(multicast, "-multicast"), (hint, "-hint"), (prefetched, "-prefetched")];
    let form: String = words.iter().filter(|(given, _)| *given).map(|(_, word)| *word).collect();
    let name = format!("tensor/load-{}{form}", case.name);
    let mut random = Random::new(&name);
    let ctas: u32 = if multicast { 2 } else { 1 };
    let total = case.places.len() as u32 * case.box_bytes();
    let mut names = vec!["TmaLoad", "ParamAddress", "MbarrierArriveExpect", "MbarrierWait"];
    if case.spec.decl.im2col {
        names.push("MbarrierInit");
    } else {
        names.push("TensormapPrefetch");
    }
    if prefetched {
        names.push("TmaPrefetch");
    }
    let width = case.spec.decl.ty.bytes() as usize;
    // A tf32 map rounds: NaN may then have any bits.
    let rule = if case.spec.decl.ty == MapType::Tf32 { Rule::Number(Ty::F32) } else { Rule::Bits };
    let mut checks: Vec<Check> = Vec::new();
    for cta in 0..ctas {
        for (index, (place, offsets)) in case.places.iter().enumerate() {
            let what = format!("load of {:?} from {place:?} offsets {offsets:?}{form}, CTA {cta}", case.spec);
            let from = (cta * total + index as u32 * case.box_bytes()) as usize;
            checks.push(check(what, &names, column(1, from, width, width, case.box_bytes() as usize / width), rule.clone()));
        }
    }
    let tensor = elements(case.spec.decl.ty, case.tensor_bytes(), &mut random);
    let buffers = vec![Contents::Bytes(tensor), results((ctas * total) as usize)];
    // ptxas warns of multicast on the portable target.
    let target = if multicast { Target::Sm90a } else { Target::Sm90 };
    let header = Header { name, target, threads: THREADS, cluster: ctas, ..Header::default() };
    let mut more = vec![Arg::TensorMap(Address::buffer(0), case.spec.clone()), Arg::Scalar(Ty::U32, case.box_bytes().into())];
    if prefetched {
        more.push(Arg::Scalar(Ty::S32, 0));
    }
    let case = case.clone();
    probe_with(header, ctas, buffers, more, checks, Residency::Any, move |k| {
        let (_, output) = (k.input("tensor", 256), k.output("results", 256));
        let map = k.tensor_map("map", case.spec.decl.clone());
        let count = case.places.len() as u32;
        let tile = k.shared("tile", count * case.slot_bytes(), 1024);
        let bars = barriers(k, count, 1);
        let rank = if multicast { k.cluster_rank() } else { k.constant(0u32) };
        // A number of the launch, as the traversal strides are: the box alone does not tell.
        let bytes = k.scalar::<u32>("bytes");
        let zero = prefetched.then(|| k.scalar::<i32>("zero"));
        k.when(k.thread().eq(0u32), || {
            if !case.spec.decl.im2col {
                k.prefetch_tensormap(&map);
            }
            if let Some(zero) = zero {
                prefetch(k, &map, zero, &case.places[0].0);
            }
            for (index, (place, offsets)) in case.places.iter().enumerate() {
                let bar = bars.at(index as u32);
                bar.arrive_expect_tx(bytes);
                let issue = || {
                    let op = Op::TmaLoad { rank: place.len() as u8, im2col: case.spec.decl.im2col, multicast, hint };
                    let mut ins = vec![operand(tile.address() + index as u32 * case.slot_bytes()), operand(map.address)];
                    ins.extend(coordinates(k, place).into_iter().map(operand));
                    ins.extend(offsets.iter().map(|&offset| imm(offset.into())));
                    ins.push(operand(bar.address()));
                    if multicast {
                        ins.push(imm(3));
                    }
                    if hint {
                        ins.push(operand(k.create_policy(index % 2 == 0)));
                    }
                    k.instruction(op, &[], &ins);
                };
                if multicast {
                    k.when(rank.eq(index as u32 % 2), issue);
                } else {
                    issue();
                }
            }
        });
        for index in 0..count {
            wait(k, bars.at(index));
            let to = output.at(rank, total) + u64::from(index * case.box_bytes());
            copy_out(k, tile.address() + index * case.slot_bytes(), to, case.box_bytes());
        }
        if multicast {
            k.cluster_sync();
        }
    })
}

/// Waits for a copy, but not for ever: one that brings fewer bytes than the model says shall be a mismatch and not a hung device.
#[track_caller]
fn wait<'k>(k: Kernel<'k>, bar: Mbarrier<'k>) {
    let turns = k.var(0u32);
    k.repeat_until(|| {
        turns.set(turns.get() + 1);
        bar.test(TestWait::Try, 0u32) | turns.get().gt(1u32 << 18)
    });
}

#[track_caller]
fn prefetch<'k>(k: Kernel<'k>, map: &TensorMap<'k>, zero: Val<'k, i32>, place: &[i32]) {
    let mut ins: Vec<Operand> = vec![operand(map.address)];
    ins.extend(place.iter().map(|&at| operand(zero + at)));
    k.instruction(Op::TmaPrefetch { rank: place.len() as u8 }, &[], &ins);
}

/// A map that the kernel changes in shared or in global memory, in every field that can be, and publishes for each scope.
fn changed_map(space: Space) -> Probe {
    const RANK: usize = 5;
    let name = format!("tensor/changed-map-{}", super::memory::space_word(space));
    let mut random = Random::new(&name);
    let case = rank_case(RANK, Access::Read);
    // What the map becomes: other extents, strides, traversal and box over another part of the buffer.
    let mut after = map(tiled(MapType::U16, &[16, 4, 3, 2, 1], Swizzle::None, Access::Read), &[18, 9, 7, 3, 2]);
    after.element_strides = vec![1, 1, 2, 1, 1];
    let changed = Case { name: String::new(), spec: after.clone(), places: case.places.clone() };
    let bytes = changed.box_bytes();
    let offset = 256u64;
    let scopes = [Scope::Cta, Scope::Cluster, Scope::Gpu, Scope::Sys];
    let scopes = if space == Space::Shared { &scopes[..] } else { &scopes[2..3] };
    let place = [8, 1, 1, 0, 0];
    let checks = scopes
        .iter()
        .enumerate()
        .map(|(index, scope)| {
            let what = format!("a load through a map changed in {} memory, for {scope:?}", super::memory::space_word(space));
            let names = if space == Space::Shared {
                vec!["TensormapReplace", "TensormapPublish", "MemoryFence"]
            } else {
                vec!["TensormapReplace", "MemoryFence"]
            };
            check(what, &names, column(1, index * bytes as usize, 2, 2, bytes as usize / 2), Rule::Bits)
        })
        .collect();
    let count = scopes.len() as u32;
    let tensor = random.bytes(case.tensor_bytes().max(changed.tensor_bytes() + offset as usize));
    let buffers = vec![Contents::Bytes(tensor), results((count * bytes) as usize)];
    let header = Header { name, target: Target::Sm90a, threads: THREADS, ..Header::default() };
    let more = vec![Arg::TensorMap(Address::buffer(0), case.spec.clone()), Arg::Scalar(Ty::U32, bytes.into())];
    let scopes = scopes.to_vec();
    let mut probe = probe_with(header, 1, buffers, more, checks, Residency::Any, move |k| {
        let (tensor, output) = (k.input("tensor", 256), k.output("results", 256));
        let template = k.tensor_map_template("map", case.spec.decl.clone());
        let expected = k.scalar::<u32>("bytes");
        let maps = k.in_out("maps", 128);
        let room = k.shared("map", 128, 128);
        let slot = bytes.next_multiple_of(1024);
        let tile = k.shared("tile", count * slot, 1024);
        k.when(k.thread().eq(0u32), || k.tensormap_copy(room, &template));
        let bars = barriers(k, count, 1);
        let lane = k.lane();
        let base = tensor.address() + offset;
        k.when(k.warp().eq(0u32), || {
            k.when(lane.eq(0u32), || {
                let change = |space: Space, address: Operand| {
                    let set =
                        |field: MapField, value: Operand| k.instruction(Op::TensormapReplace { field, space }, &[], &[address, value]);
                    set(MapField::GlobalAddress, operand(base));
                    set(MapField::Rank, imm(RANK as u64 - 1));
                    for d in 0..RANK as u32 {
                        let at = d as usize;
                        set(MapField::BoxDim(d), imm(after.decl.box_dims[at].into()));
                        set(MapField::GlobalDim(d), imm(after.dims[at]));
                        set(MapField::ElementStride(d), imm(after.element_strides[at].into()));
                        if at > 0 {
                            set(MapField::GlobalStride(d - 1), imm(after.strides_bytes[at - 1]));
                        }
                    }
                };
                if space == Space::Shared {
                    change(space, operand(room.address()));
                } else {
                    // The map as it was goes to global memory word by word, and is changed there.
                    for word in 0..16i64 {
                        let bits: Val<'_, u64> = k.ld_shared(room.address(), 8 * word);
                        k.st_global(maps.address(), 8 * word, bits);
                    }
                    change(space, operand(maps.address()));
                    k.fence(Fence::TensormapRelease(Scope::Gpu));
                }
            });
            k.warp_sync();
            for (index, &scope) in scopes.iter().enumerate() {
                let map = TensorMap::in_global(maps.address() + 128 * index as u64, changed.spec.decl.clone());
                if space == Space::Shared {
                    k.tensormap_publish(map.address, room, scope);
                }
                k.tensormap_acquire(&map, scope);
                k.when(lane.eq(0u32), || {
                    let bar = bars.at(index as u32);
                    bar.arrive_expect_tx(expected);
                    let mut ins = vec![operand(tile.address() + index as u32 * slot), operand(map.address)];
                    ins.extend(coordinates(k, &place).into_iter().map(operand));
                    ins.push(operand(bar.address()));
                    k.instruction(Op::TmaLoad { rank: RANK as u8, im2col: false, multicast: false, hint: false }, &[], &ins);
                });
            }
        });
        for index in 0..count {
            wait(k, bars.at(index));
            copy_out(k, tile.address() + index * slot, output.address() + u64::from(index * bytes), bytes);
        }
    });
    let maps = probe.program.add_scratch("maps", 128 * 4);
    if let Some(Step::Launch(launch)) = probe.program.steps.first_mut() {
        launch.args.append(vec![Arg::Pointer(maps)].into());
    }
    probe
}

/// A store of boxes that do not overlap, or a reduction.
fn store(rank: usize, mode: bool, reduce: Option<BulkReduce>, ty: MapType, hint: bool) -> Probe {
    let verb = reduce.map_or_else(|| "store".to_owned(), |op| format!("reduce-{op:?}").to_lowercase());
    let form = format!("{}{}", if mode { "-im2col" } else { "" }, if hint { "-hint" } else { "" });
    let name = format!("tensor/{verb}-rank{rank}-{ty:?}{form}").to_lowercase();
    let mut random = Random::new(&name);
    let mut case = if mode {
        let mut case = im2col(rank, Swizzle::None, Access::ReadWrite);
        case.places = vec![case.places[0].clone(), case.places[2].clone()];
        // The walk of a store may not leave the tensor.
        case.spec.lower_corner = [1, 0, 2][..rank - 2].to_vec();
        case.spec.upper_corner = [-1, -2, 0][..rank - 2].to_vec();
        case.places[0].0[1..rank - 1].copy_from_slice(&[1, 0, 2][..rank - 2]);
        case.places[0].0[0] = 0;
        // One walk ends before the other starts, and both within the tensor.
        case.spec.decl.box_dims[1] = 7;
        case.places[1].0[1..].copy_from_slice(&[1, 2, 2, 3][5 - rank..]);
        case.places[1].0[1] = 1;
        case
    } else {
        let mut case = rank_case(rank, Access::ReadWrite);
        // A store may end beyond the tensor, but not begin before it.
        let far = vec![0; rank];
        let near: Vec<i32> = [16, 8, 3, 2, 2][..rank].to_vec();
        case.places = vec![(far, Vec::new()), (near, Vec::new())];
        case
    };
    let mut dims = case.spec.dims.clone();
    // Rows of whole 16 bytes, or what lies behind them is written as well.
    dims[0] = dims[0].next_multiple_of(u64::from(16 / ty.bytes()));
    case.spec = MapSpec {
        strides_bytes: map(MapDecl { ty, ..case.spec.decl.clone() }, &dims).strides_bytes,
        decl: MapDecl { ty, ..case.spec.decl.clone() },
        dims,
        ..case.spec
    };
    let case = case.aligned();
    let slot = case.slot_bytes();
    let total = case.places.len() as u32 * slot;
    let tensor_bytes = case.tensor_bytes();
    let width = ty.bytes() as usize;
    let op = match reduce {
        Some(op) => Op::TmaReduce { rank: rank as u8, op, im2col: mode },
        None => Op::TmaStore { rank: rank as u8, im2col: mode, hint },
    };
    let element = tensor::reduction_type(ty).unwrap_or(Ty::U32);
    let arithmetic = matches!(reduce, Some(BulkReduce::Add | BulkReduce::Min | BulkReduce::Max));
    let rule = if arithmetic { rule_of(element) } else { Rule::Bits };
    let names = [op.name(), "ParamAddress", "BulkCommit", "BulkWait", "MemoryFence"];
    let result = column(1, 0, width, width, tensor_bytes / width);
    let mut check = check(format!("{op:?} of {:?} at {:?}", case.spec, case.places), &names, result, rule);
    check.operands = vec![result];
    let data = elements(ty, total as usize, &mut random);
    let tensor = elements(ty, tensor_bytes, &mut random);
    let buffers = vec![Contents::Bytes(data), Contents::Bytes(tensor)];
    let header = Header { name, target: Target::Sm90, threads: THREADS, ..Header::default() };
    let map = Arg::TensorMap(Address::buffer(1), case.spec.clone());
    probe_with(header, 1, buffers, vec![map], vec![check], Residency::Any, move |k| {
        let (input, _) = (k.input("data", 256), k.in_out("tensor", 256));
        let map = k.tensor_map("map", case.spec.decl.clone());
        let tile = k.shared("tile", total, 1024);
        copy_in(k, input.address(), tile.address(), total);
        k.fence_proxy_async();
        k.bar_sync();
        k.when(k.thread().eq(0u32), || {
            for (index, (place, _)) in case.places.iter().enumerate() {
                let mut ins = vec![operand(map.address)];
                ins.extend(coordinates(k, place).into_iter().map(operand));
                ins.push(operand(tile.address() + index as u32 * slot));
                if hint {
                    ins.push(operand(k.create_policy(true)));
                }
                k.instruction(op.clone(), &[], &ins);
            }
            k.bulk_commit();
            k.bulk_wait(0);
        });
    })
}
