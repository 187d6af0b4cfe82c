//! `verdigris serve`: models over HTTP, and what they bear.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde::Serialize;
use verdigris::{Config, Device, Policy, observe};
use verdigris_serve::load::{Load, Measured, offer};
use verdigris_serve::{Limits, LoadError, MetricsPage, Model, Service, Settings, Spec};

use verdigris_telemetry::Severity;

use crate::demo;
use crate::ending::Ending;
use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, mention, say, telemetry};

/// The batch sizes of the demo, and the greatest limits of the bench.
const SIZES: [u64; 7] = [1, 2, 4, 8, 16, 32, 64];

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Folders with model.toml, or such files.
    models: Vec<PathBuf>,
    /// Serve the network of `demo digits`, trained at the start for a few seconds.
    #[arg(long)]
    demo: bool,
    /// Write the demo's model into a folder, to see what one is made of, and end.
    #[arg(long, value_name = "FOLDER", requires = "demo")]
    save: Option<PathBuf>,
    /// Where to run: cpu or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Where to listen. There is no encryption and no password: an address that others reach belongs behind a proxy.
    #[arg(long, default_value = "127.0.0.1:8000", value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// The greatest batch, for all models; theirs otherwise.
    #[arg(long, value_name = "ROWS")]
    max_batch: Option<u64>,
    /// How long a batch may wait for more rows, for all models; theirs otherwise.
    #[arg(long, value_name = "MICROSECONDS")]
    max_wait_us: Option<u64>,
    /// Rows that may wait, for all models; theirs otherwise.
    #[arg(long, value_name = "ROWS")]
    queue_rows: Option<u64>,
    /// The most connections.
    #[arg(long, default_value_t = Limits::default().connections)]
    connections: usize,
    /// The longest body.
    #[arg(long, default_value_t = Limits::default().body_bytes, value_name = "BYTES")]
    body_bytes: usize,
    /// What all bodies that are held at once may take.
    #[arg(long, default_value_t = Limits::default().held_body_bytes, value_name = "BYTES")]
    held_body_bytes: usize,
    /// How long accepted requests may still be computed after SIGTERM.
    #[arg(long, default_value_t = Limits::default().grace.as_secs(), value_name = "SECONDS")]
    grace_seconds: u64,
    /// What is written to standard error as lines of JSON: off, error, warning (and errors) or information (and both).
    #[arg(long, default_value_t, value_name = "SEVERITY")]
    log: Severity,
    /// How long the page of metrics stays, never ready, where the device cannot be had: so that a scraper sees the error that was counted.
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    linger_seconds: u64,
    /// Measure instead: latency and rows a second at batch limits from 1 on, by clients on this machine.
    #[arg(long)]
    bench: bool,
    /// How long each batch limit is measured.
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS", requires = "bench")]
    seconds: f64,
    /// Clients that ask at once, each waiting for its answer; twice the batch limit without a number.
    #[arg(long, requires = "bench")]
    clients: Option<usize>,
    /// Print what --bench measures as one JSON object.
    #[arg(long, requires = "bench")]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<Verdict> {
    ensure!(arguments.demo || !arguments.models.is_empty(), "which model? give a folder with model.toml, or --demo");
    ensure!((0.05..=3600.0).contains(&arguments.seconds), "--seconds {}: from 0.05 to 3600", arguments.seconds);
    ensure!(arguments.clients.is_none_or(|clients| (1..=4096).contains(&clients)), "--clients: from 1 to 4096");
    ensure!(arguments.grace_seconds <= 3600, "--grace-seconds {}: at most 3600", arguments.grace_seconds);
    ensure!(arguments.linger_seconds <= 3600, "--linger-seconds {}: at most 3600", arguments.linger_seconds);
    let config = Config::from_environment()?;
    let mut models = Vec::new();
    for path in &arguments.models {
        models.push(Model::load(path)?);
    }
    // Listening comes before what takes long, so that a port that is taken is told at once, and probes see a process that is alive; and telemetry before the
    // device, so that a driver that is missing is counted and told.
    limits(arguments).check()?;
    let telemetry =
        if arguments.bench || arguments.save.is_some() { None } else { Some(telemetry::install_for_service(&config, arguments.log)?) };
    let page = telemetry.as_ref().map(|telemetry| -> MetricsPage {
        let registry = Arc::clone(telemetry.registry());
        Arc::new(move || {
            observe::collect_metrics();
            registry.text()
        })
    });
    // Signals are taken before anybody is told that we are here: what is accepted from then on is answered before the end. The first process of a container would
    // not even get a signal that nobody has taken.
    let begin = |page| -> anyhow::Result<(Ending, Service)> { Ok((Ending::watch()?, start(arguments, arguments.listen, Some(page))?)) };
    let mut service = page.map(begin).transpose()?;
    if let Some((_, service)) = &service {
        mention!("listening on http://{}; not ready yet", service.address());
    }
    let device = match Device::open(&arguments.device, &config, Policy::default()) {
        Ok(device) => device,
        Err(error) => {
            if let Some((ending, _)) = &mut service {
                linger(ending, Duration::from_secs(arguments.linger_seconds), &error);
            }
            return Err(error.into());
        }
    };
    let mut example = None;
    if arguments.demo {
        let began = Instant::now();
        let digits = demo::digits_model(&arguments.device, &SIZES)?;
        if !arguments.json {
            let (accuracy, seconds) = (100.0 * digits.accuracy, began.elapsed().as_secs_f64());
            mention!("digits: trained for {seconds:.1} s; reads {accuracy:.1} % of the images that it never saw");
        }
        example = Some((digits.image, digits.label));
        models.push(digits.model);
    }
    if let Some(folder) = &arguments.save {
        for model in models.iter().filter(|model| model.spec().name == "digits") {
            model.save(folder)?;
        }
        say!("written: {}", folder.display());
        return Ok(Verdict::Good);
    }
    let mut changed_models = Vec::with_capacity(models.len());
    for model in &models {
        changed_models.push(model.with_spec(changed(arguments, model.spec()))?);
    }
    let models = changed_models;
    match service {
        None => bench(arguments, &device, &models),
        Some((ending, service)) => serve(service, ending, &device, &models, example),
    }
}

/// Stays for scrapers where nothing can be served, until the time is over or somebody ends the process.
fn linger(ending: &mut Ending, time: Duration, error: &verdigris::Error) {
    if time.is_zero() {
        return;
    }
    remark(&format!("verdigris: {error}; the page of metrics stays for {} s", time.as_secs()));
    if let Some(signal) = ending.wait_at_most(time) {
        remark(&format!("ended by {signal}"));
    }
}

/// A line on standard error, if that is possible: no service ends because its log is not read.
fn remark(words: &str) {
    let _ = writeln!(std::io::stderr(), "{words}");
}

fn limits(arguments: &Arguments) -> Limits {
    Limits {
        body_bytes: arguments.body_bytes,
        held_body_bytes: arguments.held_body_bytes,
        connections: arguments.connections,
        grace: Duration::from_secs(arguments.grace_seconds),
        ..Limits::default()
    }
}

fn start(arguments: &Arguments, listen: SocketAddr, metrics: Option<MetricsPage>) -> anyhow::Result<Service> {
    Ok(Service::start(Settings { listen, limits: limits(arguments), metrics })?)
}

/// A model's spec, with what the command line says for all.
fn changed(arguments: &Arguments, spec: &Spec) -> Spec {
    let mut spec = spec.clone();
    if let Some(most) = arguments.max_batch {
        spec.batch_sizes.retain(|&size| size <= most);
    }
    spec.max_wait_us = arguments.max_wait_us.unwrap_or(spec.max_wait_us);
    spec.queue_rows = arguments.queue_rows.unwrap_or(spec.queue_rows);
    spec
}

/// Warms the models, serves them, and ends in good order once somebody says so, before they are warm too.
fn serve(
    mut service: Service,
    mut ending: Ending,
    device: &Device,
    models: &[Model],
    example: Option<(&[u8], usize)>,
) -> anyhow::Result<Verdict> {
    let mut served = Vec::new();
    for model in models {
        let began = Instant::now();
        let warm = match model.warm_while(device, &mut || ending.has_come().is_none()) {
            Err(LoadError::Ended { .. }) => return Ok(ended(service, ending)),
            warm => warm?,
        };
        let spec = model.spec();
        mention!("{}: warm in {:.2} s on {}, batches of {:?}", spec.name, began.elapsed().as_secs_f64(), device.name(), spec.batch_sizes);
        if !warm.signature.rows_proved_apart {
            remark(&format!(
                "verdigris: {}: two runs of one batch differ in their bits here, so that it could not be shown that rows do not change each \
                 other; `deterministic = true` in model.toml makes them repeatable",
                spec.name
            ));
        }
        served.push(warm);
    }
    service.serve(served)?;
    mention!("ready");
    if let Some((image, label)) = example {
        mention!("\na handwritten {label}, to try:");
        let body = serde_json::json!({ "inputs": [{ "name": "x", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": image }] });
        mention!("curl -s http://{}/v2/models/digits/infer -d '{body}'", service.address());
    }
    Ok(ended(service, ending))
}

/// Waits for whoever ends the service, and ends it. Words come last: printing them may take as long as somebody lets it.
fn ended(service: Service, ending: Ending) -> Verdict {
    let signal = ending.wait();
    let ended = service.shutdown();
    mention!("ended by {signal}");
    if !ended.is_clean() {
        mention!("{} connections were cut{}", ended.cut_connections, if ended.is_stuck { ", and the device did not answer" } else { "" });
        return Verdict::Bad;
    }
    Verdict::Good
}

/// What one batch limit bears.
#[derive(Serialize)]
struct Row {
    model: String,
    batch_limit: u64,
    #[serde(flatten)]
    measured: Measured,
    /// Full batches straight through the plan, without queue and HTTP.
    plan_alone_rows_per_second: f64,
}

fn bench(arguments: &Arguments, device: &Device, models: &[Model]) -> anyhow::Result<Verdict> {
    let time = Duration::from_secs_f64(arguments.seconds);
    let mut rows = Vec::new();
    for model in models {
        for &limit in &model.spec().batch_sizes {
            let mut spec = model.spec().clone();
            spec.batch_sizes.retain(|&size| size <= limit);
            let clients = arguments.clients.unwrap_or(2 * limit as usize);
            spec.queue_rows = spec.queue_rows.max(clients as u64);
            let mut warm = model.with_spec(spec)?.warm(device)?;
            let plan_alone_rows_per_second = plan_alone(&mut warm, limit, time.div_f64(4.0))?;
            let signature = warm.signature.clone();
            let wide = Arguments { connections: clients + 16, ..arguments.clone() };
            let mut service = start(&wide, SocketAddr::from(([127, 0, 0, 1], 0)), None)?;
            service.serve(vec![warm])?;
            let load = Load { clients, rows: 1, time, warm_up: time.div_f64(10.0) };
            let measured = offer(service.address(), &signature, &load);
            service.shutdown();
            rows.push(Row { model: signature.name, batch_limit: limit, measured, plan_alone_rows_per_second });
        }
    }
    if arguments.json {
        say!("{}", serde_json::json!({ "command": "serve --bench", "device": device.name(), "seconds": arguments.seconds, "rows": rows }));
    } else {
        say!("device {}; requests of one row, clients on this machine, each waiting for its answer\n", device.name());
        let head = [
            ("model", Align::Left),
            ("batch limit", Align::Right),
            ("clients", Align::Right),
            ("p50 ms", Align::Right),
            ("p99 ms", Align::Right),
            ("rows/s", Align::Right),
            ("mean batch", Align::Right),
            ("failures", Align::Right),
            ("plan alone rows/s", Align::Right),
        ];
        let cells = |row: &Row| {
            let Measured { clients, failures, rows_per_second, p50_ms, p99_ms, mean_batch_rows, .. } = &row.measured;
            vec![
                row.model.clone(),
                row.batch_limit.to_string(),
                clients.to_string(),
                format!("{p50_ms:.2}"),
                format!("{p99_ms:.2}"),
                format!("{rows_per_second:.0}"),
                format!("{mean_batch_rows:.1}"),
                failures.to_string(),
                format!("{:.0}", row.plan_alone_rows_per_second),
            ]
        };
        table::print(&head, &rows.iter().map(cells).collect::<Vec<_>>());
    }
    let is_bad = rows.iter().any(|row| row.measured.failures > 0 || row.measured.answers == 0);
    Ok(if is_bad { Verdict::Bad } else { Verdict::Good })
}

/// Rows a second of full batches through the executor.
fn plan_alone(warm: &mut verdigris_serve::Served, limit: u64, time: Duration) -> anyhow::Result<f64> {
    let inputs: Vec<Vec<u8>> = warm.signature.inputs.iter().map(|port| vec![0; port.row_bytes() * limit as usize]).collect();
    let began = Instant::now();
    let mut batches = 0u64;
    while began.elapsed() < time || batches == 0 {
        warm.executor.execute(limit, &inputs).with_context(|| format!("a batch of {limit}"))?;
        batches += 1;
    }
    Ok((batches * limit) as f64 / began.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn refused(words: &[&str]) -> String {
        let line = Line::try_parse_from([&["serve"][..], words].concat()).map_err(|error| error.to_string());
        match line {
            Err(text) => text,
            Ok(line) => verdigris_cli::chain(&run(&line.arguments).unwrap_err()),
        }
    }

    #[test]
    fn mistakes_are_told() {
        assert!(refused(&[]).contains("which model?"));
        assert!(refused(&["absent"]).contains("absent"));
        assert!(refused(&["--demo", "--device", "tpu", "--bench"]).contains("there is no device `tpu`"));
        assert!(refused(&["--demo", "--bench", "--seconds", "0"]).contains("--seconds 0"));
        assert!(refused(&["--demo", "--bench", "--clients", "0"]).contains("--clients"));
        assert!(refused(&["--demo", "--json"]).contains("--bench"));
        assert!(refused(&["--demo", "--listen", "here"]).contains("here"));
        assert!(refused(&["--demo", "--log", "loud"]).contains("`loud` is none of off, error, warning and information"));
        assert!(refused(&["--demo", "--linger-seconds", "3601"]).contains("--linger-seconds 3601"));
        assert!(refused(&["--demo", "--body-bytes", "1"]).contains("body_bytes is 1; a body may have 1024 bytes at the least"));
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        assert!(refused(&["--demo", "--listen", &address]).contains("choose another port"));
    }

    #[test]
    fn a_saved_model_is_served_and_measured() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().to_str().unwrap();
        let line = |words: &[&str]| Line::try_parse_from([&["serve"][..], words].concat()).unwrap().arguments;
        assert_eq!(run(&line(&["--demo", "--save", at])).unwrap(), Verdict::Good);
        let bench = line(&[at, "--bench", "--seconds", "0.2", "--max-batch", "4", "--json"]);
        assert_eq!(run(&bench).unwrap(), Verdict::Good);
        // A limit below every planned size leaves none.
        let none = run(&line(&[at, "--bench", "--max-batch", "0"])).unwrap_err();
        assert!(none.to_string().contains("batch_sizes is []"), "{none}");
    }
}
