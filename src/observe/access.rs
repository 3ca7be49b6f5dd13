//! The access log: a line for each request, written in batches by a thread of its own.

use std::io::{self, Write};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{mem, thread};

use serde::Serialize;
use tracing::warn;

use super::log::Format;

/// Lines wait this long for company: waking the writer for each costs more than the line.
const BATCH: Duration = Duration::from_millis(5);

/// Bytes that may wait; beyond that the disk is too slow and lines are dropped and counted.
const BACKLOG: usize = 8 << 20;

/// One request. Never holds a key, a token or a query.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Line<'a> {
    /// Seconds since the Unix epoch, to the ms.
    pub time: f64,
    pub client: std::net::IpAddr,
    pub method: &'a str,
    pub path: &'a str,
    pub status: u16,
    /// Bytes of the response body.
    pub bytes: u64,
    /// Whether the whole body went out.
    pub complete: bool,
    pub duration_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<&'a str>,
    /// How it ended: `ok`, `denied`, …
    pub outcome: &'a str,
    /// Who decided its limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decided_by: Option<&'a str>,
    /// When they were asked, by the clock of whoever decided: seconds since the Unix epoch, to the µs. `replay` decides at
    /// the same instants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decided_at: Option<f64>,
    /// Limits on trial that would have denied it.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub shadow_denied: &'a [Box<str>],
    pub request_id: &'a str,
}

/// Where lines go. Clones share it.
#[derive(Debug, Clone)]
pub struct AccessLog {
    shared: Arc<Shared>,
    wake: Sender<Wake>,
    format: Format,
}

#[derive(Debug, Default)]
struct Shared {
    pending: Mutex<Pending>,
}

#[derive(Debug, Default)]
struct Pending {
    lines: Vec<u8>,
    dropped: u64,
}

enum Wake {
    Lines,
    Flush(Sender<()>),
}

impl AccessLog {
    /// Starts the writing thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(format: Format, mut out: Box<dyn Write + Send>) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let (wake, woken) = channel();
        let pending = shared.clone();
        thread::Builder::new().name("access-log".to_owned()).spawn(move || {
            for cause in woken {
                if let Wake::Lines = cause {
                    thread::sleep(BATCH);
                }
                let Pending { lines, dropped } = mem::take(&mut *lock(&pending));
                if dropped > 0 {
                    warn!(dropped, "the access log is too slow: lines were dropped");
                }
                if let Err(error) = out.write_all(&lines).and_then(|()| out.flush()) {
                    warn!(%error, "the access log cannot be written");
                }
                if let Wake::Flush(done) = cause {
                    // Nobody waiting any more is no loss.
                    let _ = done.send(());
                }
            }
        })?;
        Ok(AccessLog { shared, wake, format })
    }

    /// Adds a line.
    pub fn write(&self, line: &Line<'_>) {
        let mut pending = lock(&self.shared);
        if pending.lines.len() > BACKLOG {
            pending.dropped += 1;
            return;
        }
        let first = pending.lines.is_empty();
        // Writing to memory does not fail.
        let _ = match self.format {
            Format::Json => serde_json::to_writer(&mut pending.lines, line).map_err(io::Error::from),
            Format::Text => line.write_text(&mut pending.lines),
        };
        pending.lines.push(b'\n');
        drop(pending);
        if first {
            // The writer lives as long as a sender does.
            let _ = self.wake.send(Wake::Lines);
        }
    }

    /// Waits until all lines so far are written.
    pub fn flush(&self) {
        let (done, written) = channel();
        if self.wake.send(Wake::Flush(done)).is_ok() {
            let _ = written.recv_timeout(Duration::from_secs(1));
        }
    }
}

fn lock(shared: &Shared) -> std::sync::MutexGuard<'_, Pending> {
    shared.pending.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Line<'_> {
    fn write_text(&self, out: &mut Vec<u8>) -> io::Result<()> {
        let Line { time, client, method, path, status, bytes, duration_ms, outcome, request_id, .. } = self;
        let route = self.route.unwrap_or("-");
        write!(
            out,
            "{time:.3} {client} {method} {path} {status} {bytes} {duration_ms:.3}ms route={route} {outcome} id={request_id}"
        )?;
        if let Some(source) = self.decided_by {
            write!(out, " by={source}")?;
        }
        if !self.shadow_denied.is_empty() {
            write!(out, " shadow_denied={}", self.shadow_denied.join(","))?;
        }
        if !self.complete {
            write!(out, " incomplete")?;
        }
        Ok(())
    }
}
