//! A graph planned on a GPU: cut into problems, each with the program of its chosen way, loaded.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use verdigris_cuda::{CaptureStatus, DeviceBuffer, DeviceSlice, Event, Stream};
use verdigris_graph::binding::{BoundTensor, alignment_error, bound_tensors};
use verdigris_graph::pattern::Subgraph;
use verdigris_graph::{Access, Graph, Operand, TensorDesc, Uid};
use verdigris_kir::execution::HostValue;
use verdigris_tensor::{BindingError, BindingRule};

use crate::binding::{Binding, Bound, Loose, Pair};
use crate::error::Error;
use crate::explain::Explanation;
use crate::observe::{Wants, Watch, Writer};
use crate::problem_plan::{MAX_SLOTS, ProblemPlan};
use crate::workspace::{self, Piece, WorkspaceSource, place};

/// Most tensors that a graph's caller binds: they are counted in 16 bits.
pub const MAX_BOUND: usize = 1 << 16;

/// A graph on a device: several problems one after the other, with the memory between them in one workspace.
///
/// It never changes: any number of threads may execute it at once, on any streams, each execution with a workspace of its own; a stream
/// that captures records it. Executing allocates nothing (but a list where more than 1024 tensors are bound), holds no lock and compiles nothing. On
/// a stream that is not the handle's, each program whose kernels read tables leaves an event behind, made at the first execution there, so that the plan may
/// be dropped at any time.
///
/// **The ladder.** Where the chosen ways need scratch, ways with equal notes that need less are loaded beside them, down to the least
/// workspace there is. An execution that is given less takes the first that fits, and counts it ([`GraphPlan::downgrades`]). A pinned plan
/// has no ladder, nor has one of a repeatable graph, whose bits it would change, and no execution that is being captured takes one: they give a typed
/// error instead.
///
/// **Addresses.** Where the graph declares no alignment, ways read several elements at a time and rely on it
/// ([`BoundTensor::alignment_bytes`]). Maps, reductions, scans, softmax, pooling and resampling are loaded a second time with settings that take the elements one
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
    pub(crate) watch: Arc<Watch>,
    /// Executions while somebody listened.
    pub(crate) turns: AtomicU64,
    /// Who writes each stored tensor.
    pub(crate) writers: HashMap<Uid, Writer>,
    /// Arithmetic work of one execution.
    pub(crate) flops: f64,
}

/// What [`GraphPlan::execute_timed_from`] did.
#[derive(Debug)]
pub struct Timed<'p> {
    /// In the order of the parts: the way that ran, and the microseconds that it took on the device.
    pub parts: Vec<(&'p ProblemPlan, f64)>,
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
    pub(crate) plan: Arc<ProblemPlan>,
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

/// Submits one set of ways, with the places of the tensors and a workspace.
type Submit<'s> = dyn FnMut(&Rung, &[u16], DeviceSlice<'_>) -> Result<(), Error> + 's;

impl Bound {
    /// The tensors of the graph with what the parts do with them.
    pub(crate) fn new(graph: &Graph, parts: &[Subgraph], temporaries: &[TensorDesc]) -> Result<Bound, Error> {
        let mut tensors = bound_tensors(graph);
        let place_of: HashMap<Uid, usize> = tensors.iter().enumerate().map(|(place, tensor)| (tensor.uid, place)).collect();
        // Of each bound tensor: every use, as (part, operand).
        let mut uses: Vec<Vec<(usize, Operand)>> = vec![Vec::new(); tensors.len()];
        let is_temporary: HashSet<Uid> = temporaries.iter().map(|tensor| tensor.uid).collect();
        for (number, part) in parts.iter().enumerate() {
            let operands = part.problem.buffers()?;
            for (slot, uid) in part.bindings.iter().enumerate().filter(|(_, uid)| !is_temporary.contains(uid)) {
                let Some(&place) = place_of.get(uid) else {
                    return Err(verdigris_graph::Error::UnknownTensor { op: graph.name.clone(), uid: *uid }.into());
                };
                for operand in operands.iter().filter(|operand| operand.slot.0 as usize == slot) {
                    let tensor = &mut tensors[place];
                    tensor.bytes = u64::try_from(operand.span_bytes()).unwrap_or(u64::MAX).max(tensor.bytes);
                    tensor.alignment_bytes = tensor.alignment_bytes.max(operand.dtype.bytes() as u64);
                    tensor.least_alignment_bytes = tensor.alignment_bytes;
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
        Ok(Bound::of(tensors, pairs))
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

    /// Raises the bytes that a tensor must have.
    pub(crate) fn reach(&mut self, place: usize, bytes: u64) {
        let tensor = &mut self.tensors[place];
        tensor.bytes = tensor.bytes.max(bytes);
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
}

/// Every tensor that is written beside every other one.
fn pairs(graph: &Graph, tensors: &[BoundTensor], uses: &[Vec<(usize, Operand)>]) -> Vec<Pair> {
    let described: Vec<_> = tensors.iter().map(|bound| graph.tensor(bound.uid).map(|tensor| (tensor.dtype, tensor.layout))).collect();
    let in_place = graph.in_place();
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
                && described[output] == described[other]
                && writes.iter().all(|(writer, written)| {
                    uses[other].iter().all(|(reader, read)| reader < writer || (reader == writer && read.gives_way_to(written)))
                });
            let must_share = in_place.contains(&(tensors[output].uid, tensors[other].uid));
            pairs.push(Pair { output, other, may_share, must_share });
        }
    }
    pairs
}

/// The pieces of a plan's workspace: temporaries and the scratch of each part. Temporaries are placed first, so that what a part's scratch
/// adds is never more than itself.
pub(crate) struct Memory {
    /// For each temporary: when it lives, and its offset.
    temporaries: HashMap<Uid, (Piece, u64)>,
    bytes: u64,
}

impl Memory {
    /// Places the temporaries.
    pub(crate) fn of_temporaries(parts: &[Subgraph], temporaries: &[TensorDesc]) -> Result<Memory, Error> {
        // Those that lie in one place are one piece, needed from the first one's first part to the last one's last.
        let first_of = verdigris_graph::pattern::in_place(parts, temporaries)?;
        let place_of = |uid: Uid| first_of.get(&uid).copied().unwrap_or(uid);
        let mut lives: HashMap<Uid, (usize, usize)> = HashMap::new();
        for (number, part) in parts.iter().enumerate() {
            part.bindings.iter().for_each(|&uid| lives.entry(place_of(uid)).or_insert((number, number)).1 = number);
        }
        let mut pieces = Vec::new();
        for tensor in temporaries.iter().filter(|tensor| !first_of.contains_key(&tensor.uid)) {
            let Some(&(first, last)) = lives.get(&tensor.uid) else { continue };
            let bytes = u64::try_from(tensor.layout.span_bytes(tensor.dtype)).unwrap_or(u64::MAX);
            pieces.push((tensor.uid, Piece { bytes, first, last }));
        }
        let list: Vec<Piece> = pieces.iter().map(|&(_, piece)| piece).collect();
        let (offsets, bytes) = place(&list).ok_or_else(beyond_64_bits)?;
        let placed: HashMap<Uid, (Piece, u64)> =
            pieces.into_iter().zip(offsets).map(|((uid, piece), offset)| (uid, (piece, offset))).collect();
        let temporaries = temporaries.iter().filter_map(|tensor| Some((tensor.uid, *placed.get(&place_of(tensor.uid))?))).collect();
        Ok(Memory { temporaries, bytes })
    }

    /// What the temporaries alone take.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where a temporary lies.
    pub(crate) fn of(&self, uid: Uid) -> Option<Source> {
        let (piece, offset_bytes) = self.temporaries.get(&uid)?;
        Some(Source::Workspace { offset_bytes: *offset_bytes, bytes: piece.bytes })
    }

    /// The offset of each part's scratch, and the whole.
    pub(crate) fn with_scratch(&self, scratch_bytes: &[u64]) -> Result<(Vec<u64>, u64), Error> {
        let mut total = self.bytes;
        let mut offsets = Vec::with_capacity(scratch_bytes.len());
        for (part, &bytes) in scratch_bytes.iter().enumerate() {
            if bytes == 0 {
                offsets.push(0);
                continue;
            }
            let mut taken: Vec<(u64, u64)> = (self.temporaries.values())
                .filter(|(piece, _)| piece.first <= part && part <= piece.last)
                .map(|(piece, offset)| (*offset, piece.bytes))
                .collect();
            let offset = crate::workspace::lowest_gap(&mut taken, bytes).ok_or_else(beyond_64_bits)?;
            total = total.max(offset + bytes);
            offsets.push(offset);
        }
        Ok((offsets, total))
    }
}

/// A workspace that no device can have.
fn beyond_64_bits() -> Error {
    Error::NoWorkspace { needed_bytes: u64::MAX, lent_bytes: 0, least_bytes: None, account: None }
}

impl GraphPlan {
    fn check(&self, bindings: &[(Uid, Binding<'_>)], places: &mut [u16]) -> Result<Option<Loose>, BindingError> {
        self.bound.check(
            bindings.len(),
            |number| {
                let (uid, binding) = &bindings[number];
                (*uid, binding)
            },
            places,
        )
    }

    /// What the caller binds: every stored tensor that an op reads or writes, in the order of the graph's list, in which executing finds it
    /// fastest.
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

    /// The plans of the problems, as they run with the whole workspace.
    pub fn parts(&self) -> impl Iterator<Item = &ProblemPlan> {
        self.rungs[0].parts.iter().map(|part| &*part.plan)
    }

    /// Bytes of constants that the plan keeps on the device beside its kernels, of all its ways. Work that was submitted, and graphs that were captured, read them there.
    pub fn constant_bytes(&self) -> u64 {
        let parts = self.rungs.iter().chain(&self.loose).flat_map(|rung| &rung.parts);
        parts.map(|part| part.plan.program().constant_bytes()).sum()
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
    /// [`BindingRule::Device`], and as the checks of [`GraphPlan::execute`].
    pub fn check_memory(&self, stream: &Stream, bindings: &[(Uid, Binding<'_>)]) -> Result<(), Error> {
        let mut places = self.bound.places();
        let places = places.for_all();
        self.check(bindings, places)?;
        let context = stream.context();
        let needed = context.device().ordinal();
        for (tensor, place) in self.bound.tensors.iter().zip(&*places) {
            let Binding::Buffer(slice) = &bindings[usize::from(*place)].1 else { continue };
            if tensor.bytes == 0 {
                continue;
            }
            let found = context.device_of(slice.address())?;
            if found != Some(needed) {
                let whose =
                    |device: Option<u32>| device.map_or("no memory of a device".to_owned(), |device| format!("memory of device {device}"));
                let given = format!("{:#x}, {}", slice.address(), whose(found));
                return Err(BindingError::new(&tensor.name, whose(Some(needed)), given, BindingRule::Device).into());
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
        let rung = match self.check(bindings, places)? {
            None => self.rung_for(stream, workspace)?,
            Some(loose) => {
                let rung = self.loose_for(stream, loose)?;
                workspace::check(rung.workspace_bytes, workspace)?;
                self.downgraded("alignment");
                rung
            }
        };
        let asked_bytes = if self.is_loose(rung) { rung.workspace_bytes } else { self.workspace_bytes() };
        self.watch.asked_workspace(asked_bytes, rung.workspace_bytes.min(workspace.len_bytes()));
        self.submit(rung, stream, bindings, places, workspace)
    }

    /// As [`GraphPlan::execute`], with a workspace from `source`: the best that can be had, down the ladder.
    ///
    /// # Errors
    /// As [`GraphPlan::execute`]; [`Error::OutOfMemory`] and [`Error::NoWorkspace`] where the source has too little, with who holds the memory and the least
    /// that would do; the source's last one.
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
            events = self.timing_events(rung, stream)?;
            self.submit_timed(rung, stream, bindings, places, workspace, &events)
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
        let loose = self.check(bindings, places)?;
        let rungs = match loose {
            None => &self.rungs[..],
            Some(loose) => std::slice::from_ref(self.loose_for(stream, loose)?),
        };
        for (number, rung) in rungs.iter().enumerate() {
            let mut is_lent = false;
            let lent = source.lend(stream, rung.workspace_bytes, &mut |workspace| {
                is_lent = true;
                workspace::check(rung.workspace_bytes, workspace)?;
                self.watch.asked_workspace(rungs[0].workspace_bytes, rung.workspace_bytes);
                work(rung, places, workspace)
            });
            let is_last = number + 1 == rungs.len();
            match lent {
                Err(error) if !is_lent && error.is_lack_of_memory() => {
                    let least_bytes = rungs.last().map_or(0, |rung| rung.workspace_bytes);
                    let account = self.watch.memory();
                    self.watch.lacked_workspace(&self.explanation.graph, rung.workspace_bytes, least_bytes, &account);
                    if is_last || stream.capture_status()? != CaptureStatus::None {
                        self.watch.asked_workspace(rungs[0].workspace_bytes, 0);
                        return Err(error.of_workspace(rung.workspace_bytes, least_bytes, account.ok()));
                    }
                }
                Err(error) => return Err(error),
                Ok(()) => {
                    if loose.is_some() {
                        self.downgraded("alignment");
                    } else if number > 0 {
                        self.downgraded("workspace");
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
        let rung = match self.check(bindings, places)? {
            None => &self.rungs[0],
            Some(loose) => self.loose_for(stream, loose)?,
        };
        workspace::check(rung.workspace_bytes, workspace)?;
        let events = self.timing_events(rung, stream)?;
        self.submit_timed(rung, stream, bindings, places, workspace, &events)?;
        stream.synchronize()?;
        times(&events)
    }

    /// The ways for addresses that are less aligned; not while the stream captures, where other ways would stay unnoticed.
    fn loose_for(&self, stream: &Stream, Loose { place, address }: Loose) -> Result<&Rung, Error> {
        match &self.loose {
            Some(rung) if stream.capture_status()? == CaptureStatus::None => Ok(rung),
            _ => {
                let BoundTensor { name, alignment_bytes, .. } = &self.bound.tensors[place];
                Err(alignment_error(name, address, *alignment_bytes).into())
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
                let wanted = format!("{} bytes, and {least_bytes} at the least as things stand", best.workspace_bytes);
                return Err(workspace::short_error(wanted, given_bytes).into());
            }
        };
        workspace::check(rung.workspace_bytes, workspace)?;
        if number > 0 {
            self.downgraded("workspace");
        }
        Ok(rung)
    }

    fn is_loose(&self, rung: &Rung) -> bool {
        self.loose.as_ref().is_some_and(|loose| std::ptr::eq(loose, rung))
    }

    /// Counts an execution by other ways than the chosen ones.
    fn downgraded(&self, reason: &'static str) {
        self.downgrades.fetch_add(1, Ordering::Relaxed);
        self.watch.fell_back(&self.explanation.graph, reason);
    }

    fn submit(
        &self,
        rung: &Rung,
        stream: &Stream,
        bindings: &[(Uid, Binding<'_>)],
        places: &[u16],
        workspace: DeviceSlice<'_>,
    ) -> Result<(), Error> {
        let samples = self.watch.samples();
        let submit = || rung.parts.iter().try_for_each(|part| self.submit_part(part, stream, bindings, places, workspace));
        match samples.wants(&self.turns, rung.parts.len(), stream) {
            Wants::Nothing => submit()?,
            Wants::Mark => {
                submit()?;
                if let Some(last) = rung.parts.last() {
                    samples.mark(last.plan.meter(), rung.parts.iter().map(|part| part.plan.meter().estimate_us).sum(), stream);
                }
            }
            Wants::Times(sampled) => {
                let _execute = sampled.span(&self.explanation.graph, self.watch.device()).entered();
                self.submit_timed(rung, stream, bindings, places, workspace, sampled.events())?;
                samples.keep(sampled, rung.parts.iter().map(|part| Arc::clone(part.plan.meter())).collect(), stream);
            }
        }
        Ok(())
    }

    /// An event before the first part, and one behind each.
    fn timing_events(&self, rung: &Rung, stream: &Stream) -> Result<Vec<Event>, Error> {
        Ok((0..=rung.parts.len()).map(|_| Event::timing(stream.context())).collect::<Result<_, _>>()?)
    }

    /// As [`GraphPlan::submit`], with the first of the events before the first part, and one behind each.
    fn submit_timed(
        &self,
        rung: &Rung,
        stream: &Stream,
        bindings: &[(Uid, Binding<'_>)],
        places: &[u16],
        workspace: DeviceSlice<'_>,
        events: &[Event],
    ) -> Result<(), Error> {
        events[0].record(stream)?;
        for (part, event) in rung.parts.iter().zip(&events[1..]) {
            self.submit_part(part, stream, bindings, places, workspace)?;
            event.record(stream)?;
        }
        Ok(())
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
        let mut scalars = [HostValue::Real(0.0); MAX_SLOTS];
        for (slot, source) in part.slots.iter().enumerate() {
            match *source {
                Source::Bound(place) => bindings[usize::from(places[place])].1.lend(&mut buffers[slot], &mut scalars[slot]),
                Source::Workspace { offset_bytes, bytes } => buffers[slot] = workspace.part(offset_bytes, bytes)?,
            }
        }
        let slots = part.slots.len();
        let (offset_bytes, bytes) = part.scratch;
        part.plan.submit(stream, &buffers[..slots], &scalars[..slots], workspace.part(offset_bytes, bytes)?)
    }
}

/// Microseconds from each event to the next; all are over.
fn times(events: &[Event]) -> Result<Vec<f64>, Error> {
    let times = events.windows(2).map(|pair| pair[1].elapsed_us_since(&pair[0]));
    Ok(times.collect::<Result<Vec<f64>, _>>()?)
}
