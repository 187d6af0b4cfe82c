//! Candidates by the clock: each is run on the device, in turns, and timed by events.

use std::time::{Duration, Instant};

use serde::Serialize;
use verdigris_cuda::{DeviceBuffer, Event};
use verdigris_graph::{Access, Problem};
use verdigris_tensor::{DType, num};

use crate::error::Error;
use crate::handle::Handle;
use crate::plan::{Binding, Plan};

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

/// A sample spans about this long, so that the events' own resolution does not count.
const SAMPLE_US: f64 = 60.0;
/// Most samples of one candidate.
const MOST_SAMPLES: usize = 15;
/// After so many samples, a candidate that takes this much longer than the best is out.
const OUT: (usize, f64) = (3, 1.3);

/// Times the plans, which are all of this problem, within about `budget`. Entries without a plan are passed over. Buffers hold random
/// numbers near 1; what the plans write is lost.
///
/// # Errors
/// [`Error::Device`]: no memory for the operands, or a fault of a kernel.
pub fn measure(
    handle: &Handle,
    problem: &Problem,
    plans: &[Option<Plan>],
    budget: Duration,
    watch: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Option<Measured>>, Error> {
    let stream = handle.stream();
    let operands = Operands::new(handle, problem)?;
    let bindings = operands.bindings();
    let workspace_bytes = plans.iter().flatten().map(Plan::workspace_bytes).max().unwrap_or(0);
    let workspace = handle.pool().alloc(stream, workspace_bytes)?;
    let (start, end) = (Event::timing(handle.context())?, Event::timing(handle.context())?);
    let sample = |plan: &Plan, times: u32| -> Result<f64, Error> {
        start.record(stream)?;
        for _ in 0..times {
            plan.execute(stream, &bindings, workspace.slice())?;
        }
        end.record(stream)?;
        end.synchronize()?;
        Ok(end.elapsed_us_since(&start)? / f64::from(times))
    };

    let begun = Instant::now();
    let count = plans.iter().flatten().count();
    let total = count * MOST_SAMPLES;
    let mut done = 0;
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); plans.len()];
    let mut times: Vec<u32> = vec![0; plans.len()];
    for (i, plan) in plans.iter().enumerate() {
        if let Some(plan) = plan {
            // The first run meets cold caches and idle clocks.
            sample(plan, 1)?;
            let once_us = sample(plan, 1)?.max(0.1);
            times[i] = ((SAMPLE_US / once_us).ceil() as u32).clamp(1, 64);
        }
    }
    for round in 0..MOST_SAMPLES {
        let best = samples.iter().filter_map(|list| Measured::of(list)).map(|m| m.us).fold(f64::INFINITY, f64::min);
        for (i, plan) in plans.iter().enumerate() {
            let Some(plan) = plan else { continue };
            let is_out = round >= OUT.0 && Measured::of(&samples[i]).is_some_and(|own| own.us > best * OUT.1);
            if !is_out {
                samples[i].push(sample(plan, times[i])?);
            }
            done += 1;
            watch(done, total);
        }
        // Each has at least one sample.
        if begun.elapsed() > budget {
            break;
        }
    }
    watch(total, total);
    Ok(samples.iter().map(|list| Measured::of(list)).collect())
}

/// Memory for every slot of a problem.
struct Operands {
    slots: Vec<Option<DeviceBuffer>>,
}

impl Operands {
    fn new(handle: &Handle, problem: &Problem) -> Result<Operands, Error> {
        let count = problem.slots().iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0);
        let mut needs: Vec<Option<(DType, u64, bool)>> = vec![None; count];
        for operand in problem.buffers()? {
            let bytes = u64::try_from(operand.layout.span_bytes(operand.dtype)).unwrap_or(u64::MAX);
            let need = needs[operand.slot.0 as usize].get_or_insert((operand.dtype, 0, false));
            need.1 = need.1.max(bytes);
            need.2 |= operand.access != Access::Written;
        }
        let stream = handle.stream();
        let mut slots = Vec::new();
        for need in needs {
            slots.push(match need {
                None => None,
                Some((dtype, bytes, is_read)) => {
                    let mut buffer = handle.pool().alloc(stream, bytes)?;
                    if is_read {
                        fill(handle, &mut buffer, dtype)?;
                    }
                    Some(buffer)
                }
            });
        }
        Ok(Operands { slots })
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        self.slots.iter().map(|slot| slot.as_ref().map_or(Binding::Scalar(1.0), |buffer| Binding::Buffer(buffer.slice()))).collect()
    }
}

/// Bytes that are made on the host and repeated on the device.
const BLOCK_BYTES: u64 = 1 << 18;

/// Fills a buffer with random numbers: all bits of a mantissa move, as those of real data do, since a chip's clock depends on them.
fn fill(handle: &Handle, buffer: &mut DeviceBuffer, dtype: DType) -> Result<(), Error> {
    let (stream, bytes) = (handle.stream(), buffer.len_bytes());
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
