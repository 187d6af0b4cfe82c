//! Where OpenTelemetry's collector is, and who tells it what. Every build reads it; one without the feature `otlp` refuses to push.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::registry::Registry;

/// How often metrics are pushed unless told otherwise.
pub const OTLP_INTERVAL: Duration = Duration::from_secs(15);

/// A collector of OpenTelemetry, and what it is sent with each push. Its headers may hold a password, so that they are never printed.
///
/// ```
/// use verdigris_telemetry::OtlpCollector;
///
/// let collector = OtlpCollector::new("http://127.0.0.1:4318").headers("authorization=Basic%20c2VjcmV0,tenant=a")?.service("trainer");
/// assert!(!format!("{collector:?}").contains("c2VjcmV0"));
/// # Ok::<(), verdigris_telemetry::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct OtlpCollector {
    pub(crate) endpoint: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) service: Option<String>,
    pub(crate) interval: Duration,
}

impl fmt::Debug for OtlpCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OtlpCollector { endpoint, headers, service, interval } = self;
        let names: Vec<&str> = headers.iter().map(|(name, _)| name.as_str()).collect();
        write!(f, "OtlpCollector({endpoint}, headers {names:?}, service {service:?}, every {interval:?})")
    }
}

impl OtlpCollector {
    /// The one at this address, `http://HOST:PORT`, which is looked at when it is pushed to. Metrics go every [`OTLP_INTERVAL`].
    pub fn new(endpoint: impl Into<String>) -> OtlpCollector {
        OtlpCollector { endpoint: endpoint.into(), headers: Vec::new(), service: None, interval: OTLP_INTERVAL }
    }

    /// Sends these headers, written as `OTEL_EXPORTER_OTLP_HEADERS` has them: `NAME=VALUE,NAME=VALUE`, with `%20` for what a list cannot hold.
    ///
    /// # Errors
    /// [`Error::Headers`], with the number of the entry and nothing of what stands there.
    pub fn headers(mut self, text: &str) -> Result<OtlpCollector, Error> {
        self.headers.clear();
        for (at, entry) in text.split(',').enumerate().filter(|(_, entry)| !entry.trim().is_empty()) {
            let header = entry.split_once('=').and_then(|(name, value)| header(name.trim(), value.trim()));
            self.headers.push(header.ok_or(Error::Headers { entry: at + 1 })?);
        }
        Ok(self)
    }

    /// Who speaks, as collectors show it; without it what OpenTelemetry's variables say, else the name of the program.
    pub fn service(mut self, name: impl Into<String>) -> OtlpCollector {
        self.service = Some(name.into());
        self
    }

    /// How often metrics are pushed.
    pub fn every(mut self, interval: Duration) -> OtlpCollector {
        self.interval = interval;
        self
    }

    /// Pushes the metrics of a registry, and no spans, until what it gives is dropped: for a program that installs no telemetry of its own work.
    ///
    /// # Errors
    /// [`Error::NotBuilt`] without the feature `otlp`, and with it [`Error::Endpoint`], [`Error::Otlp`], [`Error::Thread`].
    pub fn push_metrics(&self, registry: &Arc<Registry>) -> Result<MetricsPush, Error> {
        start(self, registry, &mut Vec::new()).map(|_otlp| MetricsPush { _otlp })
    }
}

/// Metrics on their way to a collector, until this is dropped.
#[derive(Debug)]
#[must_use = "nothing is pushed any more once this is dropped"]
pub struct MetricsPush {
    _otlp: Otlp,
}

/// A name of a header's characters, and a value that a line of HTTP can hold.
fn header(name: &str, value: &str) -> Option<(String, String)> {
    let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$&'*+-.^_`|~".contains(&byte));
    let value = decoded(value)?;
    (is_name && value.bytes().all(|byte| (b' '..=b'~').contains(&byte))).then(|| (name.to_ascii_lowercase(), value))
}

/// Text with `%20` and its like written out.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let hex = |digit: Option<u8>| char::from(digit?).to_digit(16);
        bytes.push(if byte == b'%' { u8::try_from(16 * hex(rest.next())? + hex(rest.next())?).ok()? } else { byte });
    }
    String::from_utf8(bytes).ok()
}

/// A layer of the process's subscriber.
pub(crate) type Layers = Vec<Box<dyn tracing_subscriber::Layer<tracing_subscriber::Registry> + Send + Sync>>;

#[cfg(feature = "otlp")]
pub(crate) use crate::otlp::Otlp;

/// Begins to push to a collector; the layer is put among the others.
#[cfg(feature = "otlp")]
pub(crate) fn start(collector: &OtlpCollector, registry: &Arc<Registry>, layers: &mut Layers) -> Result<Otlp, Error> {
    use tracing_subscriber::Layer as _;
    let (layer, otlp) = Otlp::start(collector, Arc::clone(registry))?;
    layers.push(layer.with_filter(crate::telemetry::interesting()).boxed());
    Ok(otlp)
}

/// Stands for what this build does not have.
#[cfg(not(feature = "otlp"))]
#[derive(Debug)]
pub(crate) enum Otlp {}

#[cfg(not(feature = "otlp"))]
pub(crate) fn start(_: &OtlpCollector, _: &Arc<Registry>, _: &mut Layers) -> Result<Otlp, Error> {
    Err(Error::NotBuilt { exporter: "OTLP", feature: "otlp" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_opentelemetry_writes_them() {
        let read = |text: &str| OtlpCollector::new("http://here:1").headers(text).map(|collector| collector.headers);
        let pairs = [("authorization".to_owned(), "Basic a=b,c".to_owned()), ("x-tenant".to_owned(), String::new())];
        assert_eq!(read(" Authorization = Basic%20a=b%2Cc ,, x-tenant=").expect("headers"), pairs);
        assert!(read("").expect("none").is_empty());
        for (wrong, entry) in
            [("secret", 1), ("a=b,=secret", 2), ("a b=secret", 1), ("a=%2", 1), ("a=%zz", 1), ("a=%ff", 1), ("a=%0d%0a", 1)]
        {
            let error = read(wrong).expect_err(wrong).to_string();
            assert!(error.contains(&format!("entry {entry} of the headers")) && !error.contains("secret"), "{wrong}: {error}");
        }
    }
}
