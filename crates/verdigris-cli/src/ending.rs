//! Whoever ends a program that stays: SIGTERM and SIGINT, or ctrl-c.

use std::pin::Pin;
#[cfg(feature = "serve")]
use std::time::Duration;

use anyhow::{Context, Result};

/// Signals that are taken, and waited for later: whoever is told that a program is there may end it from then on.
pub(crate) struct Ending {
    runtime: tokio::runtime::Runtime,
    signal: Pin<Box<dyn Future<Output = &'static str>>>,
    /// The one that has come.
    come: Option<&'static str>,
}

impl Ending {
    /// Takes the signals.
    ///
    /// # Errors
    /// Where the system gives no thread or no signals.
    pub(crate) fn watch() -> Result<Ending> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().context("no thread to wait for signals")?;
        let signal = {
            let _inside = runtime.enter();
            Box::pin(signal()?)
        };
        Ok(Ending { runtime, signal, come: None })
    }

    /// Waits for one of them: its name.
    pub(crate) fn wait(mut self) -> &'static str {
        match self.come {
            Some(name) => name,
            None => self.runtime.block_on(&mut self.signal),
        }
    }

    /// Waits for one of them as long as that: its name, or nothing once the time is over.
    #[cfg(feature = "serve")]
    pub(crate) fn wait_at_most(&mut self, time: Duration) -> Option<&'static str> {
        if self.come.is_none() {
            self.come = self.runtime.block_on(async { tokio::time::timeout(time, &mut self.signal).await.ok() });
        }
        self.come
    }

    /// Whether one of them has come: its name.
    #[cfg(feature = "serve")]
    pub(crate) fn has_come(&mut self) -> Option<&'static str> {
        // Signals are handed on while somebody waits; a time of nothing would be over before.
        self.wait_at_most(Duration::from_millis(2))
    }
}

/// Waits for whoever ends this process in good order.
#[cfg(unix)]
fn signal() -> Result<impl Future<Output = &'static str>> {
    use tokio::signal::unix::{SignalKind, signal};

    let take = |kind| signal(kind).context("signals cannot be taken");
    let (mut terminate, mut interrupt) = (take(SignalKind::terminate())?, take(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    })
}

/// Waits for whoever ends this process in good order.
#[cfg(not(unix))]
fn signal() -> Result<impl Future<Output = &'static str>> {
    Ok(async {
        // Where ctrl-c cannot be waited for, the process ends by it all the same.
        let _ = tokio::signal::ctrl_c().await;
        "ctrl-c"
    })
}
