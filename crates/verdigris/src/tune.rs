//! Candidates by the clock: each is run on the device, in turns, and timed by events.

use std::time::Instant;

use serde::Serialize;
use verdigris_cuda::{DeviceBuffer, Event, GraphExecutable, Stream};
use verdigris_graph::{Access, Problem};
use verdigris_tensor::{DType, num};

use crate::binding::Binding;
use crate::error::Error;
use crate::handle::Handle;
use crate::problem_plan::ProblemPlan;

/// A measured time.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Measured {
    /// The median of the samples, in microseconds on the device, one execution behind the other.
    pub us: f64,
    /// The least of the samples.
    pub least_us: f64,
    /// How many samples there are.
    pub samples: usize,
}

impl Measured {
    fn of(samples: &[f64]) -> Option<Measured> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let least_us = *sorted.first()?;
        Some(Measured { us: sorted[sorted.len() / 2], least_us, samples: sorted.len() })
    }
}

/// A sample spans at least about this long, so that the events' own resolution does not count.
const SAMPLE_US: f64 = 60.0;
/// Most samples of one candidate.
const MOST_SAMPLES: usize = 15;
/// After so many samples, a candidate that takes this much longer than the best is out.
const OUT: (usize, f64) = (3, 1.3);
/// A candidate whose first run takes this much longer than the best's usual one, and so many microseconds, is out at once, though it met
/// cold caches.
const OUT_AT_ONCE: (f64, f64) = (4.0, 20_000.0);
/// A candidate whose estimate is this many times the best time, and the estimate of the best, is not run.
const HOPELESS: f64 = 10.0;
/// Below this, launches are replayed as a graph: the host submits no faster than a few microseconds each.
const REPLAYED_US: f64 = 20.0;
/// Most sets of operands, of which each execution takes the next: what lies in the L2 of one execution is not the next one's.
const MOST_COPIES: u64 = 64;

/// What came of one plan.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Outcome {
    /// Its time.
    pub measured: Option<Measured>,
    /// Why there is none.
    pub left_out: Option<&'static str>,
}

/// Times the plans, which are all of this problem, until about that moment: the one at place `first` for certain, then the others in their
/// order. Entries without a plan are passed over. Every execution takes the next of several sets of operands, so that none finds its own in
/// the L2; short ones are replayed as graphs. Buffers hold random numbers near 1; what the plans write is lost.
///
/// # Errors
/// [`Error::Device`]: no memory for the operands, or a fault of a kernel.
pub fn measure(
    handle: &Handle,
    problem: &Problem,
    plans: &[Option<ProblemPlan>],
    first: usize,
    until: Instant,
    watch: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Outcome>, Error> {
    // A stream of its own: what else is submitted to the handle's would be measured, and a capture is of all that a stream is given.
    let stream = &Stream::new(handle.context())?;
    let operands = Operands::new(handle, stream, problem, plans)?;
    let bindings: Vec<Vec<Binding<'_>>> = (0..operands.copies).map(|copy| operands.bindings(copy)).collect::<Result<_, _>>()?;
    let workspace_bytes = plans.iter().flatten().map(ProblemPlan::workspace_bytes).max().unwrap_or(0);
    let workspace = handle.pool().alloc(stream, workspace_bytes)?;
    let (start, end) = (Event::timing(handle.context())?, Event::timing(handle.context())?);
    let mut turn = 0;
    let mut submit = |plan: &ProblemPlan, times: u64| -> Result<(), Error> {
        for _ in 0..times {
            turn = (turn + 1) % bindings.len();
            plan.execute(stream, &bindings[turn], workspace.slice())?;
        }
        Ok(())
    };
    let timed = |work: &mut dyn FnMut() -> Result<(), Error>| -> Result<f64, Error> {
        start.record(stream)?;
        work()?;
        end.record(stream)?;
        end.synchronize()?;
        Ok(end.elapsed_us_since(&start)?)
    };

    let is_late = || Instant::now() >= until;
    let mut outcomes = vec![Outcome::default(); plans.len()];
    let mut runners: Vec<Option<Runner<'_>>> = plans.iter().map(|_| None).collect();
    // The best usual time so far, and what had been estimated for it.
    let (mut best, mut estimated) = (f64::INFINITY, f64::INFINITY);
    let order = std::iter::once(first).chain((0..plans.len()).filter(|&place| place != first));
    for place in order {
        let Some(Some(plan)) = plans.get(place) else { continue };
        let left_out = &mut outcomes[place].left_out;
        if place != first && is_late() {
            *left_out = Some("no time was left to measure it");
            continue;
        }
        if plan.cost().us > HOPELESS * best.max(estimated) {
            *left_out = Some("its estimate is ten times the best time");
            continue;
        }
        // The first run meets cold caches and idle clocks.
        let cold_us = timed(&mut || submit(plan, 1))?;
        if cold_us > OUT_AT_ONCE.0 * best && cold_us > OUT_AT_ONCE.1 {
            outcomes[place].measured = Measured::of(&[cold_us]);
            continue;
        }
        let once_us = timed(&mut || submit(plan, 1))?.max(0.1);
        if once_us < best {
            (best, estimated) = (once_us, plan.cost().us);
        }
        let mut times = ((SAMPLE_US / once_us).ceil() as u64).clamp(1, MOST_COPIES);
        let mut graph = None;
        if once_us < REPLAYED_US {
            // Every set of operands once, so that the graph's next replay finds none of them.
            times = times.max(operands.copies);
            // A driver that cannot capture lets the host submit each.
            let captured = stream.capture(|| submit(plan, times));
            graph = captured.and_then(|graph| Ok(graph.instantiate()?)).ok();
        }
        runners[place] = Some(Runner { plan, times, graph, samples: Vec::new() });
    }

    let total = runners.iter().flatten().count() * MOST_SAMPLES;
    let mut done = 0;
    for round in 0..MOST_SAMPLES {
        let best = runners.iter().flatten().filter_map(|runner| Measured::of(&runner.samples)).map(|m| m.us).fold(f64::INFINITY, f64::min);
        for runner in runners.iter_mut().flatten() {
            let is_out = round >= OUT.0 && Measured::of(&runner.samples).is_some_and(|own| own.us > best * OUT.1);
            if !is_out {
                let Runner { plan, times, graph, samples } = runner;
                let us = match graph {
                    Some(graph) => timed(&mut || Ok(graph.launch(stream)?))?,
                    None => timed(&mut || submit(plan, *times))?,
                };
                // The first replay brings the graph to the device.
                if round > 0 || graph.is_none() {
                    samples.push(us / *times as f64);
                }
            }
            done += 1;
            watch(done, total);
        }
        if is_late() && runners.iter().flatten().all(|runner| !runner.samples.is_empty()) {
            break;
        }
    }
    watch(total, total);
    stream.synchronize()?;
    for (outcome, runner) in outcomes.iter_mut().zip(&runners) {
        if let Some(runner) = runner {
            outcome.measured = Measured::of(&runner.samples);
        }
    }
    Ok(outcomes)
}

/// A plan in the race.
struct Runner<'p> {
    plan: &'p ProblemPlan,
    /// Executions of a sample.
    times: u64,
    /// All of them, where they are short.
    graph: Option<GraphExecutable>,
    /// Microseconds of an execution.
    samples: Vec<f64>,
}

/// What is bound to every slot of a problem, several times.
struct Operands {
    slots: Vec<Bound>,
    copies: u64,
}

/// What is bound to a slot.
enum Bound {
    Memory(Copies),
    Real,
    Integer,
}

/// Copies of one operand, one behind the other.
struct Copies {
    buffer: DeviceBuffer,
    bytes: u64,
    stride_bytes: u64,
}

impl Operands {
    fn new(handle: &Handle, stream: &Stream, problem: &Problem, plans: &[Option<ProblemPlan>]) -> Result<Operands, Error> {
        let count = problem.slots().iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0);
        let mut needs: Vec<Option<(DType, u64, bool)>> = vec![None; count];
        for operand in problem.buffers()? {
            let bytes = u64::try_from(operand.span_bytes()).unwrap_or(u64::MAX);
            let need = needs[operand.slot.0 as usize].get_or_insert((operand.dtype, 0, false));
            need.1 = need.1.max(bytes);
            need.2 |= operand.access != Access::Written;
        }
        let set_bytes = needs.iter().flatten().map(|need| need.1).fold(1, u64::saturating_add);
        // Together larger than twice the L2, unless there would be very many; of one far larger, little of itself is left there.
        let l2_bytes = handle.arch().l2_bytes;
        let copies = if set_bytes > 8 * l2_bytes { 1 } else { (2 * l2_bytes / set_bytes + 1).clamp(1, MOST_COPIES) };
        // A number is what kernels take it as, all ways alike: a factor, or the half of a random state.
        let is_integer = |slot: usize| plans.iter().flatten().any(|plan| plan.tensors()[slot].dtype.is_integer());
        let mut slots = Vec::new();
        for (slot, need) in needs.into_iter().enumerate() {
            slots.push(match need {
                None if is_integer(slot) => Bound::Integer,
                None => Bound::Real,
                Some((dtype, bytes, is_read)) => {
                    let stride_bytes = bytes.checked_next_multiple_of(256).unwrap_or(bytes);
                    let mut buffer = handle.pool().alloc(stream, stride_bytes.saturating_mul(copies))?;
                    if is_read {
                        fill(handle, stream, &mut buffer, dtype)?;
                    }
                    Bound::Memory(Copies { buffer, bytes, stride_bytes })
                }
            });
        }
        Ok(Operands { slots, copies })
    }

    fn bindings(&self, copy: u64) -> Result<Vec<Binding<'_>>, Error> {
        let mut bindings = Vec::new();
        for slot in &self.slots {
            bindings.push(match slot {
                Bound::Real => Binding::Scalar(1.0),
                Bound::Integer => Binding::Integer(1),
                Bound::Memory(Copies { buffer, bytes, stride_bytes }) => Binding::Buffer(buffer.slice().part(copy * stride_bytes, *bytes)?),
            });
        }
        Ok(bindings)
    }
}

/// Bytes that are made on the host and repeated on the device.
const BLOCK_BYTES: u64 = 1 << 18;

/// Fills a buffer with random numbers: all bits of a mantissa move, as those of real data do, since a chip's clock depends on them.
fn fill(handle: &Handle, stream: &Stream, buffer: &mut DeviceBuffer, dtype: DType) -> Result<(), Error> {
    let bytes = buffer.len_bytes();
    let block = block_of(dtype, bytes.min(BLOCK_BYTES) as usize);
    let source = handle.pool().alloc_from(stream, &block)?;
    let mut offset = 0;
    while offset < bytes {
        let length = (bytes - offset).min(block.len() as u64);
        buffer.copy_from(stream, offset, source.slice().part(0, length)?)?;
        offset += length;
    }
    Ok(())
}

/// Floating-point numbers from −1 to 1; integers 0 and 1, which are labels and indices that every tensor has.
fn block_of(dtype: DType, bytes: usize) -> Vec<u8> {
    let mut block = vec![0; bytes.next_multiple_of(dtype.bytes())];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for element in block.chunks_exact_mut(dtype.bytes()) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let unit = (state >> 11) as f64 / (1_u64 << 53) as f64;
        let value = if dtype.is_float() { 2.0 * unit - 1.0 } else { f64::from(u8::from(unit > 0.5)) };
        // An element's own bytes are always enough.
        let _ = num::write_element(dtype, value, element);
    }
    block.truncate(bytes);
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_not_moved_by_one_slow_sample() {
        let measured = Measured::of(&[3.0, 2.0, 900.0]).expect("three samples");
        assert_eq!((measured.us, measured.least_us, measured.samples), (3.0, 2.0, 3));
        assert_eq!(Measured::of(&[]), None);
    }

    #[test]
    fn blocks_hold_numbers_of_their_type() {
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_storage()) {
            let block = block_of(dtype, 4096);
            let values: Vec<f64> = block.chunks_exact(dtype.bytes()).map(|bytes| num::read_element(dtype, bytes).expect("whole")).collect();
            assert!(values.iter().all(|value| value.abs() <= 1.0), "{dtype}");
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            assert!((mean - if dtype.is_float() { 0.0 } else { 0.5 }).abs() < 0.1, "{dtype}: {mean}");
        }
    }
}
