//! Time on the device: launches replayed as graphs, the sides in turns, medians with their spread.
//!
//! Replay takes the host out of the measurement on both sides alike, whatever a launch costs it. A graph holds a whole block of launches,
//! each on the next set of operands, so that none finds its data in the L2. Blocks of the sides follow each other in rotating order
//! without a pause, so that clocks and heat are the same for all.

use anyhow::Result;
use verdigris::Handle;
use verdigris_cuda::{Event, GraphExecutable};

/// Launches of one side as a graph.
pub(super) struct Replay {
    graph: GraphExecutable,
    launches: u64,
}

/// Most launches of one graph.
const MOST_LAUNCHES: u64 = 4096;

/// Blocks of each side that are aimed at.
const BLOCKS: f64 = 24.0;

impl Replay {
    /// Records `launches` launches; `submit` is told the number of each.
    pub(super) fn record(handle: &Handle, launches: u64, submit: &dyn Fn(u64) -> Result<()>) -> Result<Replay> {
        let graph = handle.stream().capture(|| (0..launches).try_for_each(submit))?;
        let mut graph = graph.instantiate()?;
        graph.upload(handle.stream())?;
        Ok(Replay { graph, launches })
    }
}

/// Microseconds of each of the blocks of one side, a launch.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Samples(Vec<f64>);

impl Samples {
    pub(super) fn median(&self) -> f64 {
        quantile(&self.0, 0.5)
    }

    /// The interquartile range as a part of the median.
    pub(super) fn spread(&self) -> f64 {
        (quantile(&self.0, 0.75) - quantile(&self.0, 0.25)) / self.median()
    }

    /// Block by block, this side's time over the other's: drifts of the clock fall out.
    pub(super) fn over(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(ours, theirs)| ours / theirs).collect())
    }
}

/// The value below which that part of the values lies; NaN of none.
pub(super) fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = q * last as f64;
    let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    low + (high - low) * place.fract()
}

/// Microseconds of one launch, roughly: the second of two, not replayed.
pub(super) fn rough_us(handle: &Handle, submit: &dyn Fn(u64) -> Result<()>) -> Result<f64> {
    let (start, end) = (Event::timing(handle.context())?, Event::timing(handle.context())?);
    submit(0)?;
    start.record(handle.stream())?;
    submit(1)?;
    end.record(handle.stream())?;
    end.synchronize()?;
    Ok(end.elapsed_us_since(&start)?.max(1.0))
}

/// Microseconds of one submission, the first of its kind.
pub(super) fn once_us(handle: &Handle, submit: &dyn Fn() -> Result<()>) -> Result<f64> {
    let (start, end) = (Event::timing(handle.context())?, Event::timing(handle.context())?);
    start.record(handle.stream())?;
    submit()?;
    end.record(handle.stream())?;
    end.synchronize()?;
    Ok(end.elapsed_us_since(&start)?)
}

/// Microseconds of one launch from about `target_us` of replay: the better of three.
pub(super) fn brief_us(handle: &Handle, copies: u64, rough_us: f64, target_us: f64, submit: &dyn Fn(u64) -> Result<()>) -> Result<f64> {
    let launches = ((target_us / rough_us) as u64).clamp(1, copies.clamp(16, 512));
    let mut replay = Replay::record(handle, launches, &|i| submit(i % copies))?;
    let events: Vec<Event> = (0..4).map(|_| Event::timing(handle.context())).collect::<Result<_, _>>()?;
    replay.graph.launch(handle.stream())?;
    for event in &events {
        event.record(handle.stream())?;
        replay.graph.launch(handle.stream())?;
    }
    events[3].synchronize()?;
    let mut best = f64::INFINITY;
    for pair in events.windows(2) {
        best = best.min(pair[1].elapsed_us_since(&pair[0])? / launches as f64);
    }
    handle.stream().synchronize()?;
    Ok(best)
}

/// A side's brief time, and how it is launched on the set of operands of a number.
pub(super) struct Side<'a> {
    pub(super) brief_us: f64,
    pub(super) submit: &'a dyn Fn(u64) -> Result<()>,
}

/// Measures the sides in turns for about so many seconds in all.
pub(super) fn interleave(handle: &Handle, copies: u64, seconds: f64, sides: &[Side<'_>]) -> Result<Vec<Samples>> {
    let block_us = seconds * 1e6 / (BLOCKS * sides.len() as f64);
    let mut replays = Vec::new();
    for side in sides {
        // Whole rounds over the sets of operands, so that every launch meets the cache as the last one did.
        let wanted = (block_us / side.brief_us).max(1.0) as u64;
        let launches = if wanted >= copies { (wanted / copies * copies).min((MOST_LAUNCHES / copies).max(1) * copies) } else { wanted };
        replays.push((Replay::record(handle, launches, &|i| (side.submit)(i % copies))?, (wanted / launches).max(1)));
    }
    let round_us: f64 =
        replays.iter().zip(sides).map(|((replay, times), side)| replay.launches as f64 * *times as f64 * side.brief_us).sum();
    // Nine blocks give quartiles; where even those would take many times what was asked for, three give a median.
    let least = if 9.0 * round_us > 3.0 * seconds * 1e6 { 3.0 } else { 9.0 };
    let blocks = (seconds * 1e6 / round_us).clamp(least, 4.0 * BLOCKS) as usize;
    let stream = handle.stream();
    for (replay, _) in &mut replays {
        replay.graph.launch(stream)?;
    }
    let mut marks: Vec<(usize, Event, Event)> = Vec::new();
    for block in 0..blocks {
        for turn in 0..sides.len() {
            let side = (block + turn) % sides.len();
            let (start, end) = (Event::timing(handle.context())?, Event::timing(handle.context())?);
            let (replay, times) = &mut replays[side];
            start.record(stream)?;
            for _ in 0..*times {
                replay.graph.launch(stream)?;
            }
            end.record(stream)?;
            marks.push((side, start, end));
        }
    }
    stream.synchronize()?;
    let mut samples = vec![Samples::default(); sides.len()];
    for (side, start, end) in &marks {
        let launches = replays[*side].0.launches * replays[*side].1;
        samples[*side].0.push(end.elapsed_us_since(start)? / launches as f64);
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        let samples = Samples(vec![4.0, 1.0, 3.0, 2.0, 100.0]);
        assert_eq!(samples.median(), 3.0);
        assert_eq!(samples.spread(), 2.0 / 3.0);
        assert_eq!(samples.over(&Samples(vec![2.0; 5])).median(), 1.5);
        assert_eq!(Samples(vec![1.0, 2.0]).median(), 1.5);
        assert!(Samples::default().median().is_nan());
    }
}
