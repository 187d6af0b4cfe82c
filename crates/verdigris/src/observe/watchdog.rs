//! A thread that collects where no exporter does.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::collect;

/// Calls [`collect`] at an interval, as exporters do, for an application that has none: so that hangs are told of as events, samples become metrics of its own
/// recorder, and guards look. It ends, and is waited for, when this is dropped; on a device that hangs it goes on, for collecting waits for none.
///
/// ```
/// use std::time::Duration;
/// use verdigris::observe::{self, Listen, Watchdog};
///
/// let _listening = observe::listen(Listen::default());
/// let watchdog = Watchdog::start(Duration::from_secs(1))?;
/// // … the application runs …
/// drop(watchdog);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "it ends once this is dropped"]
pub struct Watchdog {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the thread. It costs a reading of all handles each time: some microseconds, and what guards look at.
    ///
    /// # Errors
    /// That of the system, where it has no thread to give.
    pub fn start(interval: Duration) -> std::io::Result<Watchdog> {
        let (end, ended) = channel::<()>();
        let work = move || {
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                collect();
            }
        };
        let thread = std::thread::Builder::new().name("verdigris-watchdog".to_owned()).spawn(work)?;
        Ok(Watchdog { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // What panicked there has told so itself.
            let _ = thread.join();
        }
    }
}
