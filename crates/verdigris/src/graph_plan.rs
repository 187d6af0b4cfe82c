//! A graph, cut into problems, each with a chosen way: ready to run.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use verdigris_cuda::{CaptureStatus, DeviceBuffer, DeviceSlice, Event, Stream};
use verdigris_graph::pattern::Subgraph;
use verdigris_graph::{Access, Graph, Operand, TensorDesc, Uid};
use verdigris_tensor::layout::ranges_overlap;

use crate::error::{BindingError, Error};
use crate::explain::Explanation;
use crate::plan::{Binding, MAX_SLOTS, Plan};
use crate::workspace::{Piece, WorkspaceSource, place};

/// Most tensors that a graph's caller binds: they are counted in 16 bits.
pub const MAX_BOUND: usize = 1 << 16;
/// So many find their bindings on the stack; an execution of more allocates a list.
const FEW_BOUND: usize = 1024;

/// A graph on a device: several problems one after the other, with the memory between them in one workspace.
///
/// It never changes: any number of threads may execute it at once, on any streams, each execution with a workspace of its own; a stream
/// that captures records it. Executing allocates nothing (but a list where more than 1024 tensors are bound), holds no lock and compiles nothing.
///
/// **The ladder.** Where the chosen ways need scratch, ways with equal notes that need less are loaded beside them, down to the least
/// workspace there is. An execution that is given less takes the first that fits, and counts it ([`GraphPlan::downgrades`]). A pinned plan
/// has no ladder, and no execution that is being captured takes one: they give a typed error instead.
///
/// **Addresses.** Where the graph declares no alignment, ways read several elements at a time and rely on it
/// ([`BoundTensor::alignment_bytes`]). Maps, reductions, softmax and pooling are loaded a second time with settings that take the elements one
/// by one, and run so, counted as above, where an address is a multiple of [`BoundTensor::least_alignment_bytes`] alone.
#[derive(Debug)]
pub struct GraphPlan {
    pub(crate) bound: Bound,
    pub(crate) rungs: Vec<Rung>,
    /// Ways for addresses that are less aligned, in no more workspace than the chosen ones.
    pub(crate) loose: Option<Rung>,
    pub(crate) downgrades: AtomicU64,
    pub(crate) explanation: Explanation,
    pub(crate) nothing: Arc<DeviceBuffer>,
}

/// What [`GraphPlan::execute_timed_from`] did.
#[derive(Debug)]
pub struct Timed<'p> {
    /// In the order of the parts: the way that ran, and the microseconds that it took on the device.
    pub parts: Vec<(&'p Plan, f64)>,
    /// The workspace that these ways need.
    pub workspace_bytes: u64,
    /// Whether others ran than those chosen, for want of memory or of alignment.
    pub is_downgraded: bool,
}

/// The plan with one set of ways.
#[derive(Debug)]
pub(crate) struct Rung {
    pub(crate) parts: Vec<Part>,
    pub(crate) workspace_bytes: u64,
}

/// One problem of a plan.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) plan: Arc<Plan>,
    /// What each slot is bound to.
    pub(crate) slots: Vec<Source>,
    /// Offset and size of its scratch in the workspace.
    pub(crate) scratch: (u64, u64),
}

/// What a slot of a part is bound to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// A tensor of the caller's, by its place in [`Bound::tensors`].
    Bound(usize),
    /// A part of the workspace.
    Workspace { offset_bytes: u64, bytes: u64 },
}

/// A tensor that the caller binds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BoundTensor {
    /// Its uid in the graph.
    pub uid: Uid,
    /// Its name in the graph.
    pub name: String,
    /// A host scalar, bound by value.
    pub is_scalar: bool,
    /// Whether the plan writes it.
    pub is_written: bool,
    /// Bytes from its first element to its last; 0 for a host scalar.
    pub bytes: u64,
    /// A multiple of this is its address, for the chosen ways.
    pub alignment_bytes: u64,
    /// A multiple of this is its address at least: less than `alignment_bytes` where the graph declares nothing and another setting serves.
    pub least_alignment_bytes: u64,
}

/// Two bound tensors, of which at least the first is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pair {
    output: usize,
    other: usize,
    /// They may be one and the same memory.
    may_share: bool,
}

/// A tensor bound to an address that is not aligned for the chosen ways.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Loose {
    place: usize,
    address: u64,
}

/// All that the caller binds, and the rules for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Bound {
    tensors: Vec<BoundTensor>,
    pairs: Vec<Pair>,
}

/// Submits one set of ways, with the places of the tensors and a workspace.
type Submit<'s> = dyn FnMut(&Rung, &[u16], DeviceSlice<'_>) -> Result<(), Error> + 's;

/// For each bound tensor, its place among the bindings that an execution is given.
struct Places {
    few: [u16; FEW_BOUND],
    many: Vec<u16>,
    count: usize,
}

impl Places {
    fn for_all(&mut self) -> &mut [u16] {
        if self.many.is_empty() { &mut self.few[..self.count] } else { &mut self.many }
    }
}

impl Bound {
    /// Room for the place of each tensor.
    fn places(&self) -> Places {
        let count = self.tensors.len();
        Places { few: [0; FEW_BOUND], many: if count > FEW_BOUND { vec![0; count] } else { Vec::new() }, count }
    }

    /// From the parts in order: every tensor that is no temporary, in the order of first use.
    pub(crate) fn new(graph: &Graph, parts: &[Subgraph], temporaries: &[TensorDesc]) -> Result<Bound, Error> {
        let mut tensors: Vec<BoundTensor> = Vec::new();
        let mut place_of: HashMap<Uid, usize> = HashMap::new();
        // Of each bound tensor: every use, as (part, operand).
        let mut uses: Vec<Vec<(usize, Operand)>> = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let scalars = part.problem.scalars();
            let operands = part.problem.buffers()?;
            for (slot, &uid) in part.bindings.iter().enumerate() {
                if temporaries.iter().any(|tensor| tensor.uid == uid) {
                    continue;
                }
                let place = *place_of.entry(uid).or_insert_with(|| {
                    let name = graph.tensor(uid).map_or_else(|| uid.to_string(), |tensor| tensor.name.clone());
                    let is_scalar = scalars.iter().any(|scalar| scalar.0 as usize == slot);
                    tensors.push(BoundTensor {
                        uid,
                        name,
                        is_scalar,
                        is_written: false,
                        bytes: 0,
                        alignment_bytes: 1,
                        least_alignment_bytes: 1,
                    });
                    uses.push(Vec::new());
                    tensors.len() - 1
                });
                for operand in operands.iter().filter(|operand| operand.slot.0 as usize == slot) {
                    let tensor = &mut tensors[place];
                    // A part may touch but some elements, as each part of a long concatenation does; the caller binds the whole.
                    let whole = graph.tensor(uid).map_or(0, |whole| whole.layout.span_bytes(whole.dtype));
                    tensor.bytes = u64::try_from(whole.max(operand.span_bytes())).unwrap_or(u64::MAX).max(tensor.bytes);
                    tensor.alignment_bytes = tensor.alignment_bytes.max(operand.dtype.bytes() as u64);
                    tensor.least_alignment_bytes = tensor.alignment_bytes;
                    tensor.is_written |= operand.access == Access::Written;
                    uses[place].push((number, operand.clone()));
                }
            }
        }
        if tensors.len() > MAX_BOUND {
            return Err(verdigris_graph::Error::Attribute {
                op: graph.name.clone(),
                attribute: "stored tensors",
                value: tensors.len().to_string(),
                rule: "a plan has at most 65536 tensors to bind; cut the graph",
            }
            .into());
        }
        let pairs = pairs(graph, &tensors, &uses);
        Ok(Bound { tensors, pairs })
    }

    /// The place of a tensor.
    fn place_of(&self, uid: Uid) -> Option<usize> {
        self.tensors.iter().position(|tensor| tensor.uid == uid)
    }

    /// Where a tensor comes from that the caller binds.
    pub(crate) fn source_of(&self, uid: Uid) -> Option<Source> {
        self.place_of(uid).map(Source::Bound)
    }

    /// Raises the alignment that a tensor must have.
    pub(crate) fn align(&mut self, place: usize, alignment_bytes: u64) {
        let tensor = &mut self.tensors[place];
        // Alignments are powers of two, so that the greatest serves all.
        tensor.alignment_bytes = tensor.alignment_bytes.max(alignment_bytes);
    }

    /// Raises the alignment that a tensor must have at least.
    pub(crate) fn align_least(&mut self, place: usize, alignment_bytes: u64) {
        let tensor = &mut self.tensors[place];
        tensor.least_alignment_bytes = tensor.least_alignment_bytes.max(alignment_bytes);
    }

    /// There are no other ways for less aligned addresses of these tensors.
    pub(crate) fn align_strictly(&mut self, which: impl Fn(Uid) -> bool) {
        for tensor in self.tensors.iter_mut().filter(|tensor| which(tensor.uid)) {
            tensor.least_alignment_bytes = tensor.alignment_bytes;
        }
    }

    /// Finds each tensor's binding and checks all of them. Gives the first tensor that is aligned for the loose ways alone.
    fn check(&self, given: &[(Uid, Binding<'_>)], places: &mut [u16]) -> Result<Option<Loose>, BindingError> {
        let mut loose = None;
        for (i, tensor) in self.tensors.iter().enumerate() {
            // Callers that bind in the plan's own order are served at once.
            let found = match given.get(i) {
                Some((uid, _)) if *uid == tensor.uid => Some(i),
                _ => given.iter().position(|(uid, _)| *uid == tensor.uid),
            };
            let Some(found) = found else {
                return Err(BindingError::Missing { tensor: tensor.name.clone(), uid: tensor.uid });
            };
            places[i] = found as u16;
            let name = || tensor.name.clone();
            match given[found].1 {
                Binding::Scalar(_) if tensor.is_scalar => {}
                Binding::Scalar(_) => {
                    return Err(BindingError::TensorKind { tensor: name(), needed: "a buffer", given: "a host scalar" });
                }
                Binding::Buffer(_) if tensor.is_scalar => {
                    return Err(BindingError::TensorKind { tensor: name(), needed: "a host scalar", given: "a buffer" });
                }
                Binding::Buffer(slice) => {
                    let (address, given_bytes) = (slice.address(), slice.len_bytes());
                    if given_bytes < tensor.bytes {
                        return Err(BindingError::TensorLength { tensor: name(), given_bytes, needed_bytes: tensor.bytes });
                    }
                    if address == 0 && tensor.bytes > 0 {
                        return Err(BindingError::Null { tensor: name() });
                    }
                    if !address.is_multiple_of(tensor.alignment_bytes) {
                        if !address.is_multiple_of(tensor.least_alignment_bytes) {
                            let alignment_bytes = tensor.least_alignment_bytes;
                            return Err(BindingError::TensorAlignment { tensor: name(), address, alignment_bytes });
                        }
                        loose.get_or_insert(Loose { place: i, address });
                    }
                }
            }
        }
        if given.len() != self.tensors.len() {
            return Err(self.superfluous(given));
        }
        let range = |place: usize| match given[usize::from(places[place])].1 {
            Binding::Buffer(slice) => (slice.address(), u128::from(self.tensors[place].bytes)),
            Binding::Scalar(_) => (0, 0),
        };
        // Pairs are as many as outputs times tensors: of very many tensors that all lie apart none is looked at.
        if self.tensors.len() > FEW_BOUND && lie_apart((0..self.tensors.len()).map(range).collect()) {
            return Ok(loose);
        }
        for &Pair { output, other, may_share } in &self.pairs {
            let (a, b) = (range(output), range(other));
            if ranges_overlap(a, b) && !(may_share && a.0 == b.0) {
                let name = |place: usize| self.tensors[place].name.clone();
                return Err(BindingError::TensorOverlap { output: name(output), other: name(other) });
            }
        }
        Ok(loose)
    }

    fn superfluous(&self, given: &[(Uid, Binding<'_>)]) -> BindingError {
        match given.iter().find(|(uid, _)| self.place_of(*uid).is_none()) {
            Some(&(uid, _)) => BindingError::Unknown { uid },
            // All are known, and each known one was found: one is there twice.
            None => {
                let is_twice = |uid: &Uid| given.iter().filter(|(other, _)| other == uid).count() > 1;
                let uid = given.iter().map(|&(uid, _)| uid).find(is_twice).unwrap_or(Uid(0));
                BindingError::Twice { uid }
            }
        }
    }
}

/// Every tensor that is written beside every other one.
fn pairs(graph: &Graph, tensors: &[BoundTensor], uses: &[Vec<(usize, Operand)>]) -> Vec<Pair> {
    let described = |place: usize| graph.tensor(tensors[place].uid).map(|tensor| (tensor.dtype, tensor.layout));
    let mut pairs = Vec::new();
    for output in (0..tensors.len()).filter(|&i| tensors[i].is_written) {
        let writes: Vec<&(usize, Operand)> = uses[output].iter().filter(|(_, operand)| operand.access == Access::Written).collect();
        for other in (0..tensors.len()).filter(|&i| i != output && !tensors[i].is_scalar) {
            if tensors[other].is_written && other < output {
                continue;
            }
            // The output may take the other's place if it is the same elements, and all that is read there is read before: by an earlier
            // part, or by the part that writes it, each element before its own is written.
            let may_share = !tensors[other].is_written
                && described(output) == described(other)
                && writes.iter().all(|(writer, written)| {
                    uses[other].iter().all(|(reader, read)| {
                        let same = read.is_same_elements(written);
                        reader < writer || (reader == writer && same && read.access == Access::ReadInPlace)
                    })
                });
            pairs.push(Pair { output, other, may_share });
        }
    }
    pairs
}

/// The pieces of a plan's workspace: temporaries and the scratch of each part. Temporaries are placed first, so that what a part's scratch
/// adds is never more than itself.
pub(crate) struct Memory {
    /// For each temporary: its uid, its offset, its size.
    temporaries: Vec<(Uid, Piece, u64)>,
    bytes: u64,
}

impl Memory {
    /// Places the temporaries.
    pub(crate) fn of_temporaries(parts: &[Subgraph], temporaries: &[TensorDesc]) -> Result<Memory, Error> {
        let mut pieces = Vec::new();
        for tensor in temporaries {
            let users = || (0..parts.len()).filter(|&part| parts[part].bindings.contains(&tensor.uid));
            let (Some(first), Some(last)) = (users().next(), users().next_back()) else { continue };
            let bytes = u64::try_from(tensor.layout.span_bytes(tensor.dtype)).unwrap_or(u64::MAX);
            pieces.push((tensor.uid, Piece { bytes, first, last }));
        }
        let list: Vec<Piece> = pieces.iter().map(|&(_, piece)| piece).collect();
        let (offsets, bytes) = place(&list).ok_or(Error::NoWorkspace { needed_bytes: u64::MAX, lent_bytes: 0 })?;
        let temporaries = pieces.into_iter().zip(offsets).map(|((uid, piece), offset)| (uid, piece, offset)).collect();
        Ok(Memory { temporaries, bytes })
    }

    /// What the temporaries alone take.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where a temporary lies.
    pub(crate) fn of(&self, uid: Uid) -> Option<Source> {
        let (_, piece, offset_bytes) = self.temporaries.iter().find(|(known, ..)| *known == uid)?;
        Some(Source::Workspace { offset_bytes: *offset_bytes, bytes: piece.bytes })
    }

    /// The offset of each part's scratch, and the whole.
    pub(crate) fn with_scratch(&self, scratch_bytes: &[u64]) -> Result<(Vec<u64>, u64), Error> {
        let mut total = self.bytes;
        let mut offsets = Vec::with_capacity(scratch_bytes.len());
        for (part, &bytes) in scratch_bytes.iter().enumerate() {
            let mut taken: Vec<(u64, u64)> = (self.temporaries.iter())
                .filter(|(_, piece, _)| piece.first <= part && part <= piece.last)
                .map(|(_, piece, offset)| (*offset, piece.bytes))
                .collect();
            let no_room = Error::NoWorkspace { needed_bytes: u64::MAX, lent_bytes: 0 };
            let offset = crate::workspace::lowest_gap(&mut taken, bytes).ok_or(no_room)?;
            total = total.max(offset + bytes);
            offsets.push(if bytes == 0 { 0 } else { offset });
        }
        Ok((offsets, total))
    }
}

impl GraphPlan {
    /// What the caller binds, in the order in which executing finds it fastest.
    pub fn tensors(&self) -> &[BoundTensor] {
        &self.bound.tensors
    }

    /// The workspace of the chosen ways, at a multiple of 256 bytes.
    pub fn workspace_bytes(&self) -> u64 {
        self.rungs[0].workspace_bytes
    }

    /// The least workspace that an execution can do with.
    pub fn least_workspace_bytes(&self) -> u64 {
        self.rungs.last().map_or(0, |rung| rung.workspace_bytes)
    }

    /// The problems' own plans, as they run with the whole workspace.
    pub fn parts(&self) -> impl Iterator<Item = &Plan> {
        self.rungs[0].parts.iter().map(|part| &*part.plan)
    }

    /// How the choice was made: ranked candidates with estimates and measurements, every refusal.
    pub fn explain(&self) -> &Explanation {
        &self.explanation
    }

    /// How often an execution was given less than [`GraphPlan::workspace_bytes`], or addresses that are less aligned, and took other ways.
    pub fn downgrades(&self) -> u64 {
        self.downgrades.load(Ordering::Relaxed)
    }

    /// Asks the driver whose memory each bound buffer is. Executing does not: it takes some time for each, and a slice's maker vouches
    /// for it. For doors through which addresses come that nobody vouches for.
    ///
    /// # Errors
    /// [`BindingError::Foreign`], and as the checks of [`GraphPlan::execute`].
    pub fn check_memory(&self, stream: &Stream, bindings: &[(Uid, Binding<'_>)]) -> Result<(), Error> {
        let mut places = self.bound.places();
        let places = places.for_all();
        self.bound.check(bindings, places)?;
        let context = stream.context();
        let needed = context.device().ordinal();
        for (tensor, place) in self.bound.tensors.iter().zip(&*places) {
            let Binding::Buffer(slice) = bindings[usize::from(*place)].1 else { continue };
            if tensor.bytes == 0 {
                continue;
            }
            let found = context.device_of(slice.address())?;
            if found != Some(needed) {
                let (tensor, address) = (tensor.name.clone(), slice.address());
                return Err(BindingError::Foreign { tensor, address, found, needed }.into());
            }
        }
        Ok(())
    }

    /// Submits the computation to the stream and returns without waiting. `bindings` has one entry for each of [`GraphPlan::tensors`], in
    /// any order.
    ///
    /// Checked before anything is submitted: that each tensor is bound once, kinds, lengths, alignments, null pointers, the workspace, and
    /// that no output shares bytes with another tensor, but for an input of the same elements in the same place that is not read later.
    ///
    /// # Errors
    /// [`Error::Binding`], [`Error::Device`]; after an error of the driver, earlier launches are already on the stream.
    pub fn execute(&self, stream: &Stream, bindings: &[(Uid, Binding<'_>)], workspace: DeviceSlice<'_>) -> Result<(), Error> {
        let mut places = self.bound.places();
        let places = places.for_all();
        let rung = match self.bound.check(bindings, places)? {
            None => self.rung_for(stream, workspace)?,
            Some(loose) => {
                let rung = self.loose_for(stream, loose)?;
                check_workspace(rung, workspace)?;
                self.downgrades.fetch_add(1, Ordering::Relaxed);
                rung
            }
        };
        self.submit(rung, stream, bindings, places, workspace)
    }

    /// As [`GraphPlan::execute`], with a workspace from `source`: the best that can be had, down the ladder.
    ///
    /// # Errors
    /// As [`GraphPlan::execute`], and the source's last one.
    pub fn execute_from(&self, stream: &Stream, bindings: &[(Uid, Binding<'_>)], source: &dyn WorkspaceSource) -> Result<(), Error> {
        self.lent(stream, bindings, source, &mut |rung, places, workspace| self.submit(rung, stream, bindings, places, workspace)).map(drop)
    }

    /// As [`GraphPlan::execute_from`], and waits; tells what each part took, and by which way it ran.
    ///
    /// # Errors
    /// As [`GraphPlan::execute_from`].
    pub fn execute_timed_from(
        &self,
        stream: &Stream,
        bindings: &[(Uid, Binding<'_>)],
        source: &dyn WorkspaceSource,
    ) -> Result<Timed<'_>, Error> {
        let mut events = Vec::new();
        let rung = self.lent(stream, bindings, source, &mut |rung, places, workspace| {
            events = self.submit_timed(rung, stream, bindings, places, workspace)?;
            Ok(())
        })?;
        stream.synchronize()?;
        let parts = rung.parts.iter().zip(times(&events)?).map(|(part, us)| (&*part.plan, us)).collect();
        Ok(Timed { parts, workspace_bytes: rung.workspace_bytes, is_downgraded: !std::ptr::eq(rung, &self.rungs[0]) })
    }

    /// Has `work` submit the best ways that `source` has the workspace for, and the addresses the alignment: these ways. Others than the chosen
    /// ones are counted.
    fn lent<'p>(
        &'p self,
        stream: &Stream,
        bindings: &[(Uid, Binding<'_>)],
        source: &dyn WorkspaceSource,
        work: &mut Submit<'_>,
    ) -> Result<&'p Rung, Error> {
        let mut places = self.bound.places();
        let places = places.for_all();
        let loose = self.bound.check(bindings, places)?;
        let rungs = match loose {
            None => &self.rungs[..],
            Some(loose) => std::slice::from_ref(self.loose_for(stream, loose)?),
        };
        for (number, rung) in rungs.iter().enumerate() {
            let mut is_lent = false;
            let lent = source.lend(stream, rung.workspace_bytes, &mut |workspace| {
                is_lent = true;
                check_workspace(rung, workspace)?;
                work(rung, places, workspace)
            });
            let is_last = number + 1 == rungs.len();
            match lent {
                Err(error) if !is_lent && !is_last && error.is_lack_of_memory() && stream.capture_status()? == CaptureStatus::None => {}
                Err(error) => return Err(error),
                Ok(()) => {
                    if number > 0 || loose.is_some() {
                        self.downgrades.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(rung);
                }
            }
        }
        // A plan has a way for each part: the first rung.
        Ok(&self.rungs[0])
    }

    /// As [`GraphPlan::execute`] with the chosen ways (or those for less aligned addresses), and waits: the microseconds that each part took on the device.
    ///
    /// # Errors
    /// As [`GraphPlan::execute`].
    pub fn execute_timed(&self, stream: &Stream, bindings: &[(Uid, Binding<'_>)], workspace: DeviceSlice<'_>) -> Result<Vec<f64>, Error> {
        let mut places = self.bound.places();
        let places = places.for_all();
        let rung = match self.bound.check(bindings, places)? {
            None => &self.rungs[0],
            Some(loose) => self.loose_for(stream, loose)?,
        };
        check_workspace(rung, workspace)?;
        let events = self.submit_timed(rung, stream, bindings, places, workspace)?;
        stream.synchronize()?;
        times(&events)
    }

    /// The ways for addresses that are less aligned; not while the stream captures, where other ways would stay unnoticed.
    fn loose_for(&self, stream: &Stream, Loose { place, address }: Loose) -> Result<&Rung, Error> {
        match &self.loose {
            Some(rung) if stream.capture_status()? == CaptureStatus::None => Ok(rung),
            _ => {
                let BoundTensor { name, alignment_bytes, .. } = &self.bound.tensors[place];
                Err(BindingError::TensorAlignment { tensor: name.clone(), address, alignment_bytes: *alignment_bytes }.into())
            }
        }
    }

    /// The first set of ways that the workspace is enough for.
    fn rung_for(&self, stream: &Stream, workspace: DeviceSlice<'_>) -> Result<&Rung, Error> {
        let best = &self.rungs[0];
        let given_bytes = workspace.len_bytes();
        let fits = self.rungs.iter().position(|rung| rung.workspace_bytes <= given_bytes);
        let (number, rung) = match fits {
            Some(0) => (0, best),
            Some(number) if stream.capture_status()? == CaptureStatus::None => (number, &self.rungs[number]),
            _ => {
                let least_bytes = if fits.is_some() { best.workspace_bytes } else { self.least_workspace_bytes() };
                return Err(BindingError::Workspace { given_bytes, needed_bytes: best.workspace_bytes, least_bytes }.into());
            }
        };
        check_workspace(rung, workspace)?;
        if number > 0 {
            self.downgrades.fetch_add(1, Ordering::Relaxed);
        }
        Ok(rung)
    }

    fn submit(
        &self,
        rung: &Rung,
        stream: &Stream,
        bindings: &[(Uid, Binding<'_>)],
        places: &[u16],
        workspace: DeviceSlice<'_>,
    ) -> Result<(), Error> {
        rung.parts.iter().try_for_each(|part| self.submit_part(part, stream, bindings, places, workspace))
    }

    /// As [`GraphPlan::submit`], with an event before the first part and one behind each.
    fn submit_timed(
        &self,
        rung: &Rung,
        stream: &Stream,
        bindings: &[(Uid, Binding<'_>)],
        places: &[u16],
        workspace: DeviceSlice<'_>,
    ) -> Result<Vec<Event>, Error> {
        let mut events = vec![Event::timing(stream.context())?];
        events[0].record(stream)?;
        for part in &rung.parts {
            self.submit_part(part, stream, bindings, places, workspace)?;
            let event = Event::timing(stream.context())?;
            event.record(stream)?;
            events.push(event);
        }
        Ok(events)
    }

    fn submit_part(
        &self,
        part: &Part,
        stream: &Stream,
        bindings: &[(Uid, Binding<'_>)],
        places: &[u16],
        workspace: DeviceSlice<'_>,
    ) -> Result<(), Error> {
        let mut buffers = [self.nothing.slice(); MAX_SLOTS];
        let mut scalars = [0.0_f64; MAX_SLOTS];
        for (slot, source) in part.slots.iter().enumerate() {
            match *source {
                Source::Bound(place) => match bindings[usize::from(places[place])].1 {
                    Binding::Buffer(slice) => buffers[slot] = slice,
                    Binding::Scalar(value) => scalars[slot] = value,
                },
                Source::Workspace { offset_bytes, bytes } => buffers[slot] = workspace.part(offset_bytes, bytes)?,
            }
        }
        let slots = part.slots.len();
        let (offset_bytes, bytes) = part.scratch;
        part.plan.submit(stream, &buffers[..slots], &scalars[..slots], workspace.part(offset_bytes, bytes)?)
    }
}

/// Whether no two (address, bytes) share a byte.
fn lie_apart(mut ranges: Vec<(u64, u128)>) -> bool {
    ranges.retain(|&(_, bytes)| bytes > 0);
    ranges.sort_unstable();
    ranges.windows(2).all(|pair| u128::from(pair[0].0) + pair[0].1 <= u128::from(pair[1].0))
}

/// Microseconds from each event to the next; all are over.
fn times(events: &[Event]) -> Result<Vec<f64>, Error> {
    let times = events.windows(2).map(|pair| pair[1].elapsed_us_since(&pair[0]));
    Ok(times.collect::<Result<Vec<f64>, _>>()?)
}

/// Whether a workspace is where it must be.
fn check_workspace(rung: &Rung, workspace: DeviceSlice<'_>) -> Result<(), BindingError> {
    let (address, given_bytes) = (workspace.address(), workspace.len_bytes());
    if given_bytes < rung.workspace_bytes {
        return Err(BindingError::Workspace { given_bytes, needed_bytes: rung.workspace_bytes, least_bytes: rung.workspace_bytes });
    }
    if rung.workspace_bytes > 0 && (address == 0 || !address.is_multiple_of(256)) {
        return Err(BindingError::TensorAlignment { tensor: "workspace".to_owned(), address, alignment_bytes: 256 });
    }
    Ok(())
}
