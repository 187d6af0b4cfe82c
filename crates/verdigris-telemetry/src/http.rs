//! The endpoint that Prometheus scrapes: `/metrics` and `/healthz`, by one thread of its own.
//!
//! Nothing that a client does reaches the application: at most [`MOST_CONNECTIONS`] are served, each has [`HEADER_TIME`] for a request and
//! [`CONNECTION_TIME`] in all, and all scrapes of a moment share one text.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener as Listener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::error::Error;
use crate::exposition::Format;
use crate::observe;
use crate::registry::Registry;

/// The port on which an exporter is looked for unless another is named.
pub const PORT: u16 = 9464;

/// Connections that are served at a time; further ones are told 503 and closed.
pub const MOST_CONNECTIONS: usize = 128;

/// What a client has for sending a request, and for staying without one.
pub const HEADER_TIME: Duration = Duration::from_secs(5);

/// After that, a connection gets no further request; one that is stuck in an answer is cut off after as much again.
pub const CONNECTION_TIME: Duration = Duration::from_secs(30);

/// Bytes of a request's head; a longer one is answered with 431.
const HEAD_BYTES: usize = 16 * 1024;

/// Scrapes share a text that is not older than this.
const TEXT_AGE: Duration = Duration::from_millis(100);

/// Texts that slow clients may hold; beyond, all get the newest of these.
const MOST_TEXTS: usize = 4;

/// How long answers on their way are waited for at the end.
const GRACE: Duration = Duration::from_millis(500);

/// Where to listen. Without a host it is the loopback: nothing outside this machine can connect unless an address is written out.
///
/// ```
/// use verdigris_telemetry::ListenAddress;
///
/// let address = |text: &str| text.parse::<ListenAddress>().map(|address| address.to_string());
/// assert_eq!(address("9464")?, "127.0.0.1:9464");
/// assert_eq!(address(":9464")?, "127.0.0.1:9464");
/// assert_eq!(address("0.0.0.0:80")?, "0.0.0.0:80"); // asked for
/// assert!(address("example.org:80").is_err()); // names are not looked up
/// assert!(ListenAddress::default().is_loopback());
/// # Ok::<(), verdigris_telemetry::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ListenAddress(SocketAddr);

impl ListenAddress {
    /// Whether only this machine can connect.
    pub fn is_loopback(self) -> bool {
        self.0.ip().to_canonical().is_loopback()
    }

    /// As the system has it.
    pub fn socket_address(self) -> SocketAddr {
        self.0
    }
}

impl Default for ListenAddress {
    /// `127.0.0.1:9464`.
    fn default() -> ListenAddress {
        ListenAddress((Ipv4Addr::LOCALHOST, PORT).into())
    }
}

impl FromStr for ListenAddress {
    type Err = Error;

    /// A port, `:port`, `address:port`, or an address alone for [`PORT`]; `localhost` is 127.0.0.1.
    fn from_str(text: &str) -> Result<ListenAddress, Error> {
        let wrong = || Error::Address { text: text.to_owned() };
        let text = text.trim();
        if let Ok(port) = text.strip_prefix(':').unwrap_or(text).parse::<u16>() {
            return Ok(ListenAddress((Ipv4Addr::LOCALHOST, port).into()));
        }
        if let Some(rest) = text.strip_prefix("localhost") {
            let port = if rest.is_empty() { PORT } else { rest.strip_prefix(':').and_then(|port| port.parse().ok()).ok_or_else(wrong)? };
            return Ok(ListenAddress((Ipv4Addr::LOCALHOST, port).into()));
        }
        let bare = || text.trim_matches(['[', ']']).parse::<Ipv6Addr>().map(IpAddr::V6);
        let alone = || text.parse::<IpAddr>().or_else(|_| bare()).map(|host| SocketAddr::from((host, PORT)));
        text.parse().or_else(|_| alone()).map(ListenAddress).map_err(|_| wrong())
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A running endpoint. Dropping it ends its thread: the port is free again, and answers on their way have half a second.
///
/// ```
/// use std::io::{Read, Write};
/// use std::sync::Arc;
/// use verdigris_telemetry::{Bounds, Exporter, Registry};
///
/// let exporter = Exporter::start(Arc::new(Registry::new(Bounds::default())), "127.0.0.1:0".parse()?)?;
/// let mut client = std::net::TcpStream::connect(exporter.address())?;
/// client.write_all(b"GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")?;
/// let mut answer = String::new();
/// client.read_to_string(&mut answer)?;
/// assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("ok\n"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "the endpoint ends when this is dropped"]
pub struct Exporter {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Exporter {
    /// Listens, and answers from a thread of its own.
    ///
    /// # Errors
    /// [`Error::Listen`] where the address is taken or not this machine's, [`Error::Thread`] where there is no thread to be had.
    pub fn start(registry: Arc<Registry>, address: ListenAddress) -> Result<Exporter, Error> {
        let listen = |source| Error::Listen { address: address.0, source };
        let listener = TcpListener::bind(address.0).map_err(listen)?;
        listener.set_nonblocking(true).map_err(listen)?;
        let bound = listener.local_addr().map_err(listen)?;
        let name = "verdigris-metrics";
        let thread = |source| Error::Thread { name, source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().map_err(thread)?;
        let listener = {
            let _inside = runtime.enter();
            Listener::from_std(listener).map_err(listen)?
        };
        let (stop, stopped) = watch::channel(false);
        let texts = Arc::new(Texts { registry, kept: Mutex::default() });
        let body = move || runtime.block_on(serve(listener, texts, stopped));
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(thread)?;
        Ok(Exporter { address: bound, stop, thread: Some(thread) })
    }

    /// Where it listens; the port is a real one even if 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // A panic there was printed there; the end is reached all the same.
            let _ = thread.join();
        }
    }
}

async fn serve(listener: Listener, texts: Arc<Texts>, mut stopped: watch::Receiver<bool>) {
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.wait_for(|stop| *stop) => break,
        };
        let Ok((stream, _)) = accepted else {
            // Out of file handles, most likely: they come back when connections end.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        match Arc::clone(&places).try_acquire_owned() {
            Ok(place) => {
                let (texts, stopped) = (Arc::clone(&texts), stopped.clone());
                tokio::spawn(async move {
                    connection(stream, texts, stopped).await;
                    drop(place);
                });
            }
            Err(_) => refuse(&stream),
        }
    }
    drop(listener);
    // Everybody has ended when every place is free.
    let all = u32::try_from(MOST_CONNECTIONS).unwrap_or(u32::MAX);
    let _ = tokio::time::timeout(GRACE, places.acquire_many(all)).await;
}

/// Says 503 as far as that needs no waiting.
fn refuse(stream: &TcpStream) {
    let _ = stream.try_write(
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: 21\r\nretry-after: 1\r\nconnection: close\r\n\r\ntoo many connections\n",
    );
}

async fn connection(stream: TcpStream, texts: Arc<Texts>, mut stopped: watch::Receiver<bool>) {
    // Answers are written whole, so there is nothing to wait for.
    let _ = stream.set_nodelay(true);
    let service = service_fn(|request| std::future::ready(Ok::<_, Infallible>(answer(&request, &texts))));
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut serving = std::pin::pin!(serving);
    // What a client does wrong ends its connection and is of no interest to anybody else.
    let stop = async {
        tokio::select! {
            _ = stopped.wait_for(|stop| *stop) => GRACE,
            () = tokio::time::sleep(CONNECTION_TIME) => CONNECTION_TIME,
        }
    };
    let mut stop = std::pin::pin!(stop);
    let left = std::future::poll_fn(|context| {
        if serving.as_mut().poll(context).is_ready() {
            return std::task::Poll::Ready(None);
        }
        stop.as_mut().poll(context).map(Some)
    })
    .await;
    if let Some(left) = left {
        serving.as_mut().graceful_shutdown();
        let _ = tokio::time::timeout(left, serving).await;
    }
}

fn answer(request: &Request<Incoming>, texts: &Texts) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    match path {
        "/metrics" | "/healthz" | "/" if !is_read => {
            let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            response
        }
        "/metrics" => {
            let accept = request.headers().get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
            let format = Format::accepted(&accept.collect::<Vec<_>>().join(","));
            let mut response = Response::new(Full::new(texts.get(format)));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
            response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            response
        }
        "/healthz" => plain(StatusCode::OK, "ok\n"),
        "/" => plain(StatusCode::OK, "Verdigris: /metrics, /healthz\n"),
        _ => plain(StatusCode::NOT_FOUND, "there are /metrics and /healthz\n"),
    }
}

fn plain(status: StatusCode, words: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from_static(words.as_bytes())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

/// The text of all series, made at most once in [`TEXT_AGE`] and shared by everybody who asks in that time: a hundred scrapers cost the memory
/// of one.
struct Texts {
    registry: Arc<Registry>,
    kept: Mutex<Vec<(Format, Text)>>,
}

/// A text with its age. Who sends it has a part of `text`, and with that keeps `holders` above one.
struct Text {
    made: Instant,
    text: Bytes,
    holders: Arc<()>,
}

/// What [`Bytes`] shares.
struct Held {
    text: String,
    _holder: Arc<()>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

impl Texts {
    fn get(&self, format: Format) -> Bytes {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = kept.iter().position(|(of, _)| *of == format) else {
            let holders: Arc<()> = Arc::default();
            let text = self.render(format, 0, Arc::clone(&holders));
            kept.push((format, Text { made: Instant::now(), text: text.clone(), holders }));
            return text;
        };
        let newest = &mut kept[place].1;
        // One is this place, one the newest text; the others are older texts that are still being sent.
        let is_room = Arc::strong_count(&newest.holders) < 1 + MOST_TEXTS;
        if newest.made.elapsed() >= TEXT_AGE && is_room {
            let length = newest.text.len();
            // The old text goes before the new one is made, unless somebody is sending it.
            newest.text = Bytes::new();
            newest.text = self.render(format, length, Arc::clone(&newest.holders));
            newest.made = Instant::now();
        }
        newest.text.clone()
    }

    fn render(&self, format: Format, length_bytes: usize, holder: Arc<()>) -> Bytes {
        observe::collect_metrics();
        let mut text = String::with_capacity(length_bytes + length_bytes / 8);
        self.registry.render(format, &mut text);
        Bytes::from_owner(Held { text, _holder: holder })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Bounds;
    use metrics::{Level, Metadata, Recorder};

    const WHERE: Metadata<'static> = Metadata::new("tests", Level::INFO, None);

    #[test]
    fn addresses_are_loopback_unless_written_out() {
        let address = |text: &str| text.parse::<ListenAddress>();
        for text in ["9464", ":9464", "localhost", "localhost:1", "127.0.0.1", "127.0.0.1:9", "::1", "[::1]", "[::1]:9464"] {
            assert!(address(text).expect(text).is_loopback(), "{text}");
        }
        assert_eq!(address("[::1]").expect("an address").to_string(), "[::1]:9464");
        for text in ["0.0.0.0:9464", "[::]:9464", "10.0.0.1:80", "::ffff:10.0.0.1"] {
            assert!(!address(text).expect(text).is_loopback(), "{text}");
        }
        for text in ["", ":", "here:9464", "localhost:x", "70000", "1.2.3:4", "http://127.0.0.1:9464"] {
            let error = address(text).expect_err(text).to_string();
            assert!(error.contains(&format!("`{text}` names no address")), "{error}");
        }
    }

    #[test]
    fn texts_are_shared_and_slow_clients_do_not_pile_them_up() {
        let texts = Texts { registry: Arc::new(Registry::new(Bounds::default())), kept: Mutex::default() };
        let (first, again) = (texts.get(Format::Text), texts.get(Format::Text));
        assert_eq!(first.as_ptr(), again.as_ptr(), "one text for one moment");
        let mut held = vec![first];
        for _ in 0..3 * MOST_TEXTS {
            texts.kept.lock().expect("not poisoned")[0].1.made -= 2 * TEXT_AGE;
            held.push(texts.get(Format::Text));
        }
        let mut places: Vec<*const u8> = held.iter().map(|text| text.as_ptr()).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), MOST_TEXTS);
        // Once they have gone, there is a fresh one.
        drop(held);
        texts.registry.register_counter(&metrics::Key::from_name("later_total"), &WHERE).increment(1);
        texts.kept.lock().expect("not poisoned")[0].1.made -= 2 * TEXT_AGE;
        let fresh = texts.get(Format::Text);
        assert!(String::from_utf8_lossy(&fresh).contains("later_total 1\n"));
    }
}
