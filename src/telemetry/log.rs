//! The process log on standard error, and log files that can be rotated.

use std::collections::HashMap;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{IsTerminal, Write, stderr};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use tracing::{Event, Subscriber, info, warn};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use crate::limiter::clock::{LogThrottle, monotonic};

/// Maximum number of lines queued for standard error. Further lines are dropped and counted.
const QUEUE_CAPACITY: usize = 1024;

/// Maximum time that a thread waits until its line is written. While nothing reads standard error, threads do not wait.
const WRITE_TIMEOUT: Duration = Duration::from_millis(100);

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Plain text.
    Text,
    /// One JSON object per line.
    Json,
}

/// Set up the process log. A second call has no effect.
///
/// # Errors An error if the writer thread cannot be started.
pub fn init(format: LogFormat, level: tracing::Level) -> io::Result<()> {
    let writer = LogWriter::start(stderr())?;
    let filter = EnvFilter::new(format!("sluicegate={level},warn"));
    let layer = fmt::layer().with_target(false).with_writer(move || writer.clone());
    let lines = match format {
        LogFormat::Text => layer.with_ansi(stderr().is_terminal()).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    // Ignore the error: if a subscriber is already installed, as in tests, keep it.
    let _ = tracing_subscriber::registry().with(filter).with(lines).with(DependencyLogThrottle::default()).try_init();
    Ok(())
}

/// A writer that writes log lines on a separate thread. A stopped terminal or an unread pipe blocks only that thread.
/// Clones share the queue.
#[derive(Debug, Clone)]
struct LogWriter {
    sender: SyncSender<QueuedLine>,
    state: Arc<WriterState>,
}

#[derive(Debug, Default)]
struct WriterState {
    /// Whether a line was not written within [`WRITE_TIMEOUT`] and no line has been written since then.
    is_stalled: AtomicBool,
    /// Number of lines dropped because the queue was full.
    dropped: AtomicU64,
}

#[derive(Debug)]
struct QueuedLine {
    bytes: Vec<u8>,
    written_sender: SyncSender<()>,
}

impl LogWriter {
    fn start(mut out: impl Write + Send + 'static) -> io::Result<Self> {
        let (layer, receiver) = sync_channel::<QueuedLine>(QUEUE_CAPACITY);
        let state = Arc::<WriterState>::default();
        let writer = LogWriter { sender: layer, state: state.clone() };
        thread::Builder::new().name("log".to_owned()).spawn(move || {
            while let Some(QueuedLine { bytes, written_sender }) = next_line(&receiver, &state) {
                // Ignore errors of standard error, because there is no other place to report them.
                let _ = out.write_all(&bytes).and_then(|()| out.flush());
                state.is_stalled.store(false, Ordering::Relaxed);
                // The send fails if the waiting thread has timed out. The waiting thread has then set `is_stalled`, and
                // the next written line clears the flag.
                let _ = written_sender.send(());
            }
        })?;
        Ok(writer)
    }
}

/// Return the next line. When the queue is empty again, log how many lines were dropped before the next line.
fn next_line(receiver: &Receiver<QueuedLine>, state: &WriterState) -> Option<QueuedLine> {
    match receiver.try_recv() {
        Ok(line) => return Some(line),
        Err(TryRecvError::Disconnected) => return None,
        Err(TryRecvError::Empty) => {}
    }
    let lost = state.dropped.swap(0, Ordering::Relaxed);
    if lost > 0 {
        // Set `is_stalled`, so that this thread does not wait for its own line of the `warn!` below.
        state.is_stalled.store(true, Ordering::Relaxed);
        warn!(dropped = lost, "standard error is not read in time: log lines are lost");
    }
    receiver.recv().ok()
}

/// One call of `write` is one formatted event. `write` never fails, because the subscriber would report an error with
/// `eprintln!`, which panics if standard error is closed.
impl Write for LogWriter {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let (written_sender, written) = sync_channel(1);
        let should_wait = !self.state.is_stalled.load(Ordering::Relaxed);
        if self.sender.try_send(QueuedLine { bytes: text.to_vec(), written_sender }).is_err() {
            self.state.dropped.fetch_add(1, Ordering::Relaxed);
        } else if should_wait && written.recv_timeout(WRITE_TIMEOUT).is_err() {
            self.state.is_stalled.store(true, Ordering::Relaxed);
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// === Log files that can be renamed or removed at any time, as logrotate does ===

/// Minimum interval between two warnings that a file cannot be reopened.
const REOPEN_WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// A log file that is reopened at its path after rotation.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: File,
    /// Device and inode of the open file.
    file_id: (u64, u64),
    throttle: LogThrottle,
}

impl LogFile {
    /// Open or create the file for appending.
    ///
    /// # Errors An error if the file cannot be opened or created.
    pub fn open(path: PathBuf) -> io::Result<Self> {
        let file = open_for_append(&path)?;
        let file_id = file_id(&file.metadata()?);
        Ok(LogFile { path, file, file_id, throttle: LogThrottle::new() })
    }

    /// Reopen the path if the file was moved or replaced. If the path cannot be reopened, keep writing to the open
    /// file.
    fn reopen_if_rotated(&mut self) {
        if self.path.metadata().is_ok_and(|metadata| file_id(&metadata) == self.file_id) {
            return;
        }
        let reopened = open_for_append(&self.path).and_then(|file| Ok((file_id(&file.metadata()?), file)));
        match reopened {
            Ok((file_id, file)) => {
                (self.file_id, self.file) = (file_id, file);
                info!(file = %self.path.display(), "log file rotated: writing to the new file");
            }
            Err(error) if self.throttle.should_log(REOPEN_WARNING_INTERVAL) => {
                let file = self.path.display();
                warn!(%file, %error, "cannot reopen the log file: writing to the previous one");
            }
            Err(_) => {}
        }
    }
}

impl Write for LogFile {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        self.file.write(lines)
    }

    /// Write complete lines to one file. If log rotation replaces the file, later calls use the new file.
    fn write_all(&mut self, lines: &[u8]) -> io::Result<()> {
        self.reopen_if_rotated();
        self.file.write_all(lines)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn open_for_append(path: &PathBuf) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

fn file_id(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

// === Rate limit for log lines of dependencies: a library that logs each client action would fill the log ===

/// Maximum number of lines of each library within [`PERIOD`].
const MAX_LINES_PER_PERIOD: u64 = 10;

/// Length of the period in which the lines of a library are counted.
const PERIOD: Duration = Duration::from_secs(60);

/// A filter that admits all lines of the gateway, and at most [`MAX_LINES_PER_PERIOD`] of each library.
#[derive(Debug, Default)]
pub(super) struct DependencyLogThrottle(Mutex<HashMap<&'static str, Period>>);

#[derive(Debug, Clone, Copy)]
struct Period {
    started_at: Instant,
    line_count: u64,
}

impl DependencyLogThrottle {
    /// Return whether a line is admitted. At the start of a period, also return how many lines were suppressed in the
    /// previous period.
    fn admit(&self, library: &'static str) -> (bool, u64) {
        let mut periods = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = monotonic();
        let period = periods.entry(library).or_insert(Period { started_at: now, line_count: 0 });
        let mut suppressed = 0;
        if now - period.started_at >= PERIOD {
            suppressed = period.line_count.saturating_sub(MAX_LINES_PER_PERIOD);
            *period = Period { started_at: now, line_count: 0 };
        }
        period.line_count += 1;
        (period.line_count <= MAX_LINES_PER_PERIOD, suppressed)
    }
}

impl<S: Subscriber> Layer<S> for DependencyLogThrottle {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let library = event.metadata().target().split("::").next().unwrap_or_default();
        if library == "sluicegate" {
            return true;
        }
        let (admitted, suppressed) = self.admit(library);
        if suppressed > 0 {
            warn!(library, suppressed, "a library logged more than 10 lines within a minute: the rest was suppressed");
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// A writer for tests, in which each write waits for a permit.
    struct BlockedWriter(Receiver<()>, Sender<Vec<u8>>);

    impl Write for BlockedWriter {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.recv().map_err(io::Error::other)?;
            self.1.send(text.to_vec()).map_err(io::Error::other)?;
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_beyond_queue_capacity_are_dropped_and_counted() {
        let (permits, permit_receiver) = channel();
        let (sink, written) = channel();
        let log = LogWriter::start(BlockedWriter(permit_receiver, sink)).unwrap();
        // One line is being written. The other lines are queued or dropped. Only the first write waits until its line
        // is written.
        for number in 0..QUEUE_CAPACITY + 10 {
            log.clone().write_all(format!("{number}").as_bytes()).unwrap();
        }
        let lost = log.state.dropped.load(Ordering::Relaxed);
        assert!((9..=10).contains(&lost), "{lost}");
        let taken = QUEUE_CAPACITY as u64 + 10 - lost;
        (0..taken).for_each(|_| permits.send(()).unwrap());
        let lines: Vec<_> = (0..taken).map(|_| String::from_utf8(written.recv().unwrap()).unwrap()).collect();
        assert!(lines.iter().enumerate().all(|(index, line)| *line == index.to_string()), "{lines:?}");
    }
}
