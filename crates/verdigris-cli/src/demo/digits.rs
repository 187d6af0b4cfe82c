//! `verdigris demo digits`: trains the network of [`super::model`] on the digits of [`super::data`] and reports.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use verdigris::loss_scale::LossScale;
use verdigris::whole_files::{can_write, write_whole};
use verdigris_reference::data::Random;
use verdigris_tensor::{DType, num};

use super::data::{CLASSES, Digit, moved, shuffle, split};
use super::model::{Model, Numbers, Trained, write_numbers};
use super::report;
use super::runner::Runner;
use verdigris::KernelCounts;
use verdigris::plan::PartReport;
use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, say};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Where to run: cpu or cuda:N.
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,
    /// What to compute in.
    #[arg(long, value_enum, default_value = "fp32")]
    pub(crate) precision: Numbers,
    /// Decides the first weights, the order of the images and their shifts. The split is always the same.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Ask that two runs give the same bits. The CPU always does.
    #[arg(long)]
    pub(crate) deterministic: bool,
    /// How often every image is seen.
    #[arg(long, default_value_t = EPOCHS, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) epochs: u32,
    /// Write a page with the loss curve, the misread digits and the engines chosen.
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
}

const BATCH: usize = 64;
const EPOCHS: u32 = 20;
/// What every training of [`EPOCHS`] reads at least, whatever its seed, precision and device.
const LEAST_ACCURACY: f64 = 0.97;
const RATE: f64 = 3.0e-3;

/// What a training run came to.
pub(super) struct Outcome {
    pub(super) device: String,
    /// The loss of each step.
    pub(super) losses: Vec<f32>,
    /// `[true digit][read as]`, on held-out images.
    pub(super) confusion: [[u32; CLASSES]; CLASSES],
    /// Misread images with what they were read as.
    pub(super) misread: Vec<(Digit, usize)>,
    pub(super) training_time: Duration,
    pub(super) images_seen: u64,
    pub(super) skipped_steps: u32,
    /// For each graph, its engine calls summed over all runs.
    pub(super) tallies: BTreeMap<String, Tally>,
    /// Until all graphs were ready.
    pub(super) setup_time: Duration,
    /// On a GPU: where their kernels came from.
    pub(super) kernels: Option<KernelCounts>,
    /// What was learned, for `serve`.
    #[cfg_attr(not(feature = "serve"), allow(dead_code, reason = "the service alone reads it"))]
    pub(super) weights: Vec<Trained>,
}

/// The engine calls of one graph, summed over the runs that were timed.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) runs: u64,
    pub(super) steps: Vec<PartReport>,
}

impl Tally {
    fn add(&mut self, steps: Vec<PartReport>) {
        if steps.is_empty() {
            return;
        }
        self.runs += 1;
        if self.steps.len() != steps.len() {
            self.steps = steps;
            return;
        }
        for (sum, step) in self.steps.iter_mut().zip(steps) {
            sum.us += step.us;
            sum.workspace_bytes = sum.workspace_bytes.max(step.workspace_bytes);
        }
    }
}

impl Outcome {
    pub(super) fn held_out(&self) -> u32 {
        self.confusion.iter().flatten().sum()
    }

    pub(super) fn accuracy(&self) -> f64 {
        let right: u32 = (0..CLASSES).map(|digit| self.confusion[digit][digit]).sum();
        f64::from(right) / f64::from(self.held_out())
    }

    /// What making ready took, and of what.
    pub(super) fn setup(&self) -> String {
        let kernels = self.kernels.map(|counts| format!("; kernels: {counts}")).unwrap_or_default();
        format!("{:.2} s{kernels}", self.setup_time.as_secs_f64())
    }

    pub(super) fn images_per_second(&self) -> f64 {
        self.images_seen as f64 / self.training_time.as_secs_f64()
    }
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<Verdict> {
    if let Some(path) = &arguments.report {
        // A page that cannot be written is told before the training that it is about.
        can_write(path).context("the report")?;
    }
    let bar = ProgressBar::new(u64::from(arguments.epochs));
    bar.set_style(ProgressStyle::with_template("training {bar:32} {pos}/{len} epochs, {msg}, {eta} left")?);
    let setup = ProgressBar::new_spinner();
    setup.set_style(ProgressStyle::with_template("{spinner} making ready: {msg} ({elapsed})")?);
    let outcome = train(arguments, &setup, &mut |epoch, loss| {
        bar.set_message(format!("loss {loss:.4}"));
        bar.set_position(u64::from(epoch));
    });
    bar.finish_and_clear();
    let outcome = outcome?;
    print(arguments, &outcome);
    if let Some(path) = &arguments.report {
        let page = report::page(arguments, &outcome);
        write_whole(&[(path, page.as_bytes())]).context("the report")?;
        say!("\nreport: {}", path.display());
    }
    let verdict = judged(arguments.epochs, outcome.accuracy());
    if verdict == Verdict::Bad {
        say!("\nfewer than {:.1} % were read right after {} epochs: something is wrong", 100.0 * LEAST_ACCURACY, arguments.epochs);
    }
    Ok(verdict)
}

/// Whether a training went as trainings go, in every precision: a short one shows nothing.
fn judged(epochs: u32, accuracy: f64) -> Verdict {
    if epochs >= EPOCHS && accuracy < LEAST_ACCURACY { Verdict::Bad } else { Verdict::Good }
}

/// Trains. `setup` shows what is made ready before, `progress` hears of each epoch and its mean loss.
pub(super) fn train(arguments: &Arguments, setup: &ProgressBar, progress: &mut dyn FnMut(u32, f32)) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let mut runner = Runner::open(&arguments.device)?;
    runner.show(setup.clone());
    let mut random = Random::new(arguments.seed);
    let mut model = Model::new(&mut runner, arguments.precision, BATCH, random.bits(), arguments.deterministic)?;
    let split = split();
    let mut order: Vec<Digit> = split.training.clone();
    // Doubling every 200 steps suits a run of some hundred steps better than the usual 2000.
    let mut scale = match arguments.precision {
        Numbers::Fp16 => Some(LossScale::new(65536.0, 2.0, 0.5, 200)?),
        _ => None,
    };
    let mut outcome = Outcome {
        device: runner.describe(),
        losses: Vec::new(),
        confusion: [[0; CLASSES]; CLASSES],
        misread: Vec::new(),
        training_time: Duration::ZERO,
        images_seen: 0,
        skipped_steps: 0,
        tallies: BTreeMap::new(),
        setup_time: start.elapsed(),
        kernels: runner.kernel_counts(),
        weights: Vec::new(),
    };
    setup.finish_and_clear();

    let batches = order.len() / BATCH;
    let steps = batches * arguments.epochs as usize;
    let start = Instant::now();
    for epoch in 0..arguments.epochs {
        shuffle(&mut order, &mut random);
        for batch in order.chunks_exact(BATCH) {
            let shifts: Vec<(isize, isize)> = batch.iter().map(|_| (shift(&mut random), shift(&mut random))).collect();
            load(&mut runner, &model, batch, &shifts)?;
            let mut tally = |graph: &str, steps: Vec<PartReport>| outcome.tallies.entry(graph.to_owned()).or_default().add(steps);
            if let Some(scale) = &scale {
                model.scale_loss(&mut runner, scale.value())?;
            }
            model.forward(&mut runner, &mut tally)?;
            let done = outcome.losses.len() as f64 / steps as f64;
            // A short rise, then half a cosine down to nothing.
            let rate = RATE * (done * 20.0).min(1.0) * (1.0 + (std::f64::consts::PI * done).cos()) / 2.0;
            let factor = scale.map_or(1.0, |scale| f64::from(scale.value()));
            let learned = model.learn(&mut runner, rate, factor, &mut tally)?;
            if let Some(scale) = &mut scale {
                scale.update(learned);
            }
            outcome.skipped_steps += u32::from(!learned);
            let loss = num::read_element(DType::F32, &runner.read(&model.loss)?).unwrap_or(f64::NAN) as f32;
            outcome.losses.push(loss);
            outcome.images_seen += BATCH as u64;
        }
        let recent = &outcome.losses[outcome.losses.len() - batches..];
        progress(epoch + 1, recent.iter().sum::<f32>() / batches as f32);
    }
    outcome.training_time = start.elapsed();
    outcome.weights = model.trained(&runner)?;

    for batch in split.held_out.chunks(BATCH) {
        load(&mut runner, &model, batch, &vec![(0, 0); batch.len()])?;
        model.forward(&mut runner, &mut |_, _| {})?;
        let logits = runner.read(&model.logits)?;
        for (digit, logits) in batch.iter().zip(logits.chunks_exact(CLASSES * 4)) {
            let read = greatest(logits);
            outcome.confusion[digit.label][read] += 1;
            if read != digit.label {
                outcome.misread.push((*digit, read));
            }
        }
    }
    Ok(outcome)
}

/// −1, 0 or 1 pixels; 0 half of the time.
fn shift(random: &mut Random) -> isize {
    match random.below(4) {
        0 => -1,
        1 => 1,
        _ => 0,
    }
}

/// Brings a batch to the device; what is left of a short one is filled with empty images.
fn load(runner: &mut Runner, model: &Model, batch: &[Digit], shifts: &[(isize, isize)]) -> anyhow::Result<()> {
    let mut pixels: Vec<f64> = Vec::with_capacity(model.x.layout.elements() as usize);
    let mut labels: Vec<f64> = Vec::with_capacity(BATCH);
    for (digit, &(down, right)) in batch.iter().zip(shifts) {
        pixels.extend(moved(*digit, down, right).map(f64::from));
        labels.push(digit.label as f64);
    }
    pixels.resize(model.x.layout.elements() as usize, 0.0);
    labels.resize(BATCH, 0.0);
    write_numbers(runner, &model.x, &pixels)?;
    write_numbers(runner, &model.labels, &labels)
}

/// Which of the f32 in these bytes is the greatest.
fn greatest(bytes: &[u8]) -> usize {
    let values = bytes.chunks_exact(4).map(|value| num::read_element(DType::F32, value).unwrap_or(f64::NEG_INFINITY));
    values.enumerate().fold((0, f64::NEG_INFINITY), |best, (i, value)| if value > best.1 { (i, value) } else { best }).0
}

fn print(arguments: &Arguments, outcome: &Outcome) {
    say!("device     {}", outcome.device);
    let seen = arguments.epochs;
    say!("set up     {}", outcome.setup());
    say!("accuracy   {:.2} % of {} images never seen ({} misread)", 100.0 * outcome.accuracy(), outcome.held_out(), outcome.misread.len());
    say!("training   {:.1} s, {seen} epochs, {:.0} images/s", outcome.training_time.as_secs_f64(), outcome.images_per_second());
    if outcome.skipped_steps > 0 {
        say!("overflows  {} steps were left out and the loss scale lowered", outcome.skipped_steps);
    }
    say!("\nconfusion: rows are the digits, columns what they were read as");
    let names: Vec<String> = (0..CLASSES).map(|digit| digit.to_string()).collect();
    let head: Vec<(&str, Align)> =
        std::iter::once(("", Align::Right)).chain(names.iter().map(|name| (name.as_str(), Align::Right))).collect();
    let rows: Vec<Vec<String>> = (outcome.confusion.iter().enumerate())
        .map(|(digit, row)| {
            let cells = row.iter().map(|&count| if count == 0 { "·".to_owned() } else { count.to_string() });
            std::iter::once(digit.to_string()).chain(cells).collect()
        })
        .collect();
    table::print(&head, &rows);
    say!("\nengines: times are means of one run of the graph");
    table::print(&ENGINE_HEAD.map(|(name, align)| (name, align)), &engine_rows(outcome));
}

pub(super) const ENGINE_HEAD: [(&str, Align); 5] =
    [("graph", Align::Left), ("ops", Align::Left), ("engine", Align::Left), ("µs", Align::Right), ("workspace KiB", Align::Right)];

/// One row for each engine call of each graph. The updates of all parameters are one graph each and stand together.
pub(super) fn engine_rows(outcome: &Outcome) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for (graph, tally) in &outcome.tallies {
        for step in &tally.steps {
            let mut ops: String = step.name.chars().take(48).collect();
            if ops.len() < step.name.len() {
                ops += "…";
            }
            let workspace = format!("{:.0}", step.workspace_bytes as f64 / 1024.0);
            rows.push(vec![graph.clone(), ops, step.engine.to_owned(), format!("{:.1}", step.us / tally.runs as f64), workspace]);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(precision: Numbers, epochs: u32) -> Arguments {
        Arguments { device: "cpu".to_owned(), precision, seed: 3, deterministic: true, epochs, report: None }
    }

    #[test]
    fn a_few_epochs_read_most_digits_and_two_runs_agree() {
        let outcome = train(&arguments(Numbers::Fp32, 3), &ProgressBar::hidden(), &mut |_, _| {}).unwrap();
        assert!(outcome.setup().ends_with(" s"), "nothing is compiled on the CPU: {}", outcome.setup());
        assert!(outcome.accuracy() > 0.9, "{}", outcome.accuracy());
        assert!(outcome.losses.iter().all(|loss| loss.is_finite()));
        let again = train(&arguments(Numbers::Fp32, 1), &ProgressBar::hidden(), &mut |_, _| {}).unwrap();
        let once_more = train(&arguments(Numbers::Fp32, 1), &ProgressBar::hidden(), &mut |_, _| {}).unwrap();
        assert_eq!(again.losses, once_more.losses);
        let engines: Vec<&str> = outcome.tallies["forward"].steps.iter().map(|step| step.engine).collect();
        assert_eq!(engines.iter().filter(|&&engine| engine == "cpu.conv.gemm").count(), 3);
        assert!(report::page(&arguments(Numbers::Fp32, 3), &outcome).contains("</html>"));
    }

    #[test]
    fn sixteen_bits_learn_too() {
        for numbers in [Numbers::Bf16, Numbers::Fp16] {
            let outcome = train(&arguments(numbers, 2), &ProgressBar::hidden(), &mut |_, _| {}).unwrap();
            assert!(outcome.accuracy() > 0.8, "{numbers:?}: {}", outcome.accuracy());
        }
    }

    #[test]
    fn a_full_training_that_reads_too_few_is_a_fault() {
        assert_eq!(judged(EPOCHS, 0.9911), Verdict::Good);
        assert_eq!(judged(EPOCHS, LEAST_ACCURACY - 0.001), Verdict::Bad);
        assert_eq!(judged(1, 0.5), Verdict::Good);
    }

    #[test]
    fn a_device_that_is_not_there_is_told() {
        let with = |device: &str| Arguments { device: device.to_owned(), ..arguments(Numbers::Fp32, 1) };
        let told = |device: &str| train(&with(device), &ProgressBar::hidden(), &mut |_, _| {}).err().unwrap().to_string();
        assert!(told("gpu").contains("`gpu`"), "{}", told("gpu"));
        // No machine has so many.
        assert!(!told("cuda:4000").is_empty());
    }
}
