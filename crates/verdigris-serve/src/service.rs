//! A service from its start to its end: listening, accepting, draining.
//!
//! ```
//! use std::time::Duration;
//! use verdigris_serve::{Client, Limits, Model, Service, Settings, Spec};
//! use verdigris::{DType, Device, GraphBuilder, Layout, UnaryOp};
//!
//! let mut g = GraphBuilder::new("roots");
//! let x = g.tensor("x", DType::F32, Layout::row_major(&[2, 3])?);
//! let root = g.unary("root", UnaryOp::Sqrt, x)?;
//! g.store(root, "y", DType::F32)?;
//! let spec = Spec::new("roots", &["x"], &["y"], &[2]);
//! let model = Model::new(spec, [(2, g.finish()?)].into(), [].into())?;
//!
//! // Port 0 is any that is free. The service listens at once, and is ready when it has models.
//! let mut service = Service::start(Settings { listen: "127.0.0.1:0".parse()?, limits: Limits::default(), metrics: None })?;
//! service.serve(vec![model.warm(&Device::cpu())?])?;
//!
//! let mut client = Client::connect(service.address(), Duration::from_secs(5))?;
//! let body = r#"{ "inputs": [{ "name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 4, 9] }] }"#;
//! let answer = client.post("/v2/models/roots/infer", &[], body.as_bytes())?;
//! assert_eq!(answer.status, 200);
//! assert!(answer.text().contains(r#""data":[1.0,2.0,3.0]"#), "{}", answer.text());
//! let ended = service.shutdown();
//! assert!(ended.is_clean());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};

use crate::batcher::{self, Batcher};
use crate::connection::Connection;
use crate::error::StartError;
use crate::http::{self, MetricsPage, Shared};
use crate::limits::{HELD_UNIT_BYTES, Limits};
use crate::model::Served;
use crate::refusal::{Kind, Refusal};

/// Threads that serve connections. The work is the device's; these copy bytes and read JSON.
const CONNECTION_THREADS: usize = 2;
/// How long refusals at the end may take to reach their clients.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Connections beyond the limit that are told so at once; those beyond these too are closed without a word, for each takes a file handle until its client has read.
const SENT_AWAY: usize = 64;
/// How often it is looked whether the end has come.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// How a service is started.
#[derive(Clone)]
pub struct Settings {
    /// Where it listens; port 0 is any that is free.
    pub listen: SocketAddr,
    /// What one client may take.
    pub limits: Limits,
    /// Renders `/metrics`; without it, the path is refused.
    pub metrics: Option<MetricsPage>,
}

/// A service that listens. Dropping it ends it without grace.
pub struct Service {
    address: SocketAddr,
    shared: Arc<Shared>,
    runtime: Option<Runtime>,
    stop: watch::Sender<bool>,
    connections: Arc<Semaphore>,
    computing: Option<JoinHandle<()>>,
}

/// How a service ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// Connections that were still open when the grace was over, and were cut.
    pub cut_connections: usize,
    /// Whether the thread that computes was still within a batch when all waiting was over.
    pub is_stuck: bool,
}

impl Ended {
    /// Whether every client got its answer and every thread ended.
    pub const fn is_clean(&self) -> bool {
        self.cut_connections == 0 && !self.is_stuck
    }
}

impl Service {
    /// Listens, and answers: alive, and not ready.
    ///
    /// # Errors
    /// [`StartError::Listen`], [`StartError::Limit`], [`StartError::Threads`].
    pub fn start(settings: Settings) -> Result<Service, StartError> {
        let Settings { listen, limits, metrics } = settings;
        limits.check()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(CONNECTION_THREADS)
            .thread_name("verdigris-serve")
            .enable_all()
            .build()
            .map_err(StartError::Threads)?;
        let failed = |source| StartError::Listen { address: listen, source };
        // Not shared with a second service: two on one port would each get some of the requests.
        let listener = runtime.block_on(TcpListener::bind(listen)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let connections = Arc::new(Semaphore::new(limits.connections));
        let shared = Arc::new(Shared {
            held: Arc::new(Semaphore::new(limits.held_body_bytes / HELD_UNIT_BYTES)),
            limits,
            metrics,
            batcher: OnceLock::new(),
            is_draining: AtomicBool::new(false),
            is_over: watch::Sender::new(false),
            id_prefix: RandomState::new().build_hasher().finish(),
            ids: AtomicU64::new(0),
        });
        let (stop, stopped) = watch::channel(false);
        runtime.spawn(accept(listener, shared.clone(), connections.clone(), stopped));
        tracing::info!(%address, "listening");
        Ok(Service { address, shared, runtime: Some(runtime), stop, connections, computing: None })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves these models, all of one device, whose batches are computed on one thread: the service is ready.
    ///
    /// # Errors
    /// [`StartError::TwoOfOneName`], [`StartError::ModelsAreThere`], [`StartError::Threads`].
    pub fn serve(&mut self, models: Vec<Served>) -> Result<(), StartError> {
        for (place, model) in models.iter().enumerate() {
            let name = &model.signature.name;
            if models[..place].iter().any(|other| other.signature.name == *name) {
                return Err(StartError::TwoOfOneName { name: name.clone() });
            }
        }
        if self.computing.is_some() {
            return Err(StartError::ModelsAreThere);
        }
        let (batcher, executors) = batcher::of(models);
        let batcher = Arc::new(batcher);
        let running = batcher.clone();
        let thread = std::thread::Builder::new().name("verdigris-batches".to_owned());
        self.computing = Some(thread.spawn(move || running.run(executors)).map_err(StartError::Threads)?);
        self.shared.batcher.set(batcher).map_err(|_| StartError::ModelsAreThere)
    }

    fn batcher(&self) -> Option<&Arc<Batcher>> {
        self.shared.batcher.get()
    }

    /// Ends the service: no more connections are accepted, new requests are refused, what was accepted is computed within
    /// [`Limits::grace`], and what is left then is refused.
    pub fn shutdown(mut self) -> Ended {
        self.end(self.shared.limits.grace)
    }

    fn end(&mut self, grace: Duration) -> Ended {
        let Some(runtime) = self.runtime.take() else { return Ended { cut_connections: 0, is_stuck: false } };
        tracing::info!(grace_ms = grace.as_millis() as u64, "ending");
        self.shared.is_draining.store(true, Ordering::Relaxed);
        let _ = self.stop.send(true);
        if let Some(batcher) = self.batcher() {
            batcher.drain();
        }
        let most = self.shared.limits.connections;
        let are_closed = || self.connections.available_permits() == most;
        wait_until(grace, are_closed);
        if let Some(batcher) = self.batcher() {
            batcher.end();
        }
        let _ = self.shared.is_over.send_replace(true);
        wait_until(LAST_WORDS.min(grace), are_closed);
        let cut_connections = most - self.connections.available_permits();
        runtime.shutdown_timeout(Duration::from_millis(100));
        let is_stuck = self.computing.take().is_some_and(|thread| {
            wait_until(LAST_WORDS.min(grace), || thread.is_finished());
            // A thread that is stuck within a device's call cannot be ended; it goes with the process.
            !thread.is_finished() || thread.join().is_err()
        });
        tracing::info!(cut_connections, is_stuck, "ended");
        Ended { cut_connections, is_stuck }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

fn wait_until(most: Duration, is_done: impl Fn() -> bool) {
    let end = Instant::now() + most;
    while !is_done() && Instant::now() < end {
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Accepts connections until the end.
async fn accept(listener: TcpListener, shared: Arc<Shared>, connections: Arc<Semaphore>, mut stopped: watch::Receiver<bool>) {
    let away = Arc::new(Semaphore::new(SENT_AWAY));
    loop {
        let accepted = {
            let mut accepting = std::pin::pin!(listener.accept());
            let mut stopping = std::pin::pin!(stopped.changed());
            std::future::poll_fn(|context| match stopping.as_mut().poll(context) {
                std::task::Poll::Ready(_) => std::task::Poll::Ready(None),
                std::task::Poll::Pending => accepting.as_mut().poll(context).map(Some),
            })
            .await
        };
        let stream = match accepted {
            None => return,
            Some(Ok((stream, _))) => stream,
            Some(Err(error)) => {
                // Out of file handles, most likely: others will close theirs.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        // Answers are written whole; waiting for more of them gains nothing.
        let _ = stream.set_nodelay(true);
        match connections.clone().try_acquire_owned() {
            Ok(permit) => {
                let (shared, stopped) = (shared.clone(), stopped.clone());
                tokio::spawn(async move {
                    serve_connection(shared, stream, stopped).await;
                    drop(permit);
                });
            }
            Err(_) => {
                if let Ok(permit) = away.clone().try_acquire_owned() {
                    let most = shared.limits.connections;
                    tokio::spawn(async move {
                        send_away(stream, most).await;
                        drop(permit);
                    });
                }
            }
        }
    }
}

/// Serves one client until it goes, or until the end.
async fn serve_connection(shared: Arc<Shared>, stream: TcpStream, mut stopped: watch::Receiver<bool>) {
    let limits = &shared.limits;
    let io = TokioIo::new(Connection::new(stream, limits.write_timeout));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(limits.header_bytes)
        .max_headers(limits.headers);
    let answering = shared.clone();
    let service = service_fn(move |request| http::answer(answering.clone(), request));
    let mut connection = std::pin::pin!(builder.serve_connection(io, service));
    let mut is_stopping = *stopped.borrow_and_update();
    if is_stopping {
        connection.as_mut().graceful_shutdown();
    }
    let done = loop {
        if is_stopping {
            break connection.as_mut().await;
        }
        let mut stopping = std::pin::pin!(stopped.changed());
        let polled = std::future::poll_fn(|context| match connection.as_mut().poll(context) {
            std::task::Poll::Ready(done) => std::task::Poll::Ready(Some(done)),
            std::task::Poll::Pending => stopping.as_mut().poll(context).map(|_| None),
        })
        .await;
        match polled {
            Some(done) => break done,
            None => {
                is_stopping = true;
                // What is being answered is answered; then the connection closes.
                connection.as_mut().graceful_shutdown();
            }
        }
    };
    if let Err(error) = done {
        // Clients that go away, dawdle or do not speak HTTP.
        tracing::debug!(%error, "a connection broke");
    }
}

/// Tells a client that there are too many.
async fn send_away(mut stream: TcpStream, most: usize) {
    let refusal = Refusal::new(Kind::QueueFull, format!("{most} connections are open, which is the limit; try again later"));
    let body = http::refusal_text(&refusal, "");
    let text = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let _ = tokio::time::timeout(Duration::from_secs(1), async {
        let _ = stream.write_all(text.as_bytes()).await;
        let _ = stream.shutdown().await;
        // Read on until the client closes: a reset would overtake the answer.
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    })
    .await;
}
