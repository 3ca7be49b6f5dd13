//! Sets up the log of the process itself, on standard error.

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

/// Lines that may wait for standard error; more are lost.
const QUEUE_CAPACITY: usize = 1024;

/// Maximum time that a thread waits until its line is written. None waits while standard error is stalled.
const WRITE_TIMEOUT: Duration = Duration::from_millis(100);

/// How lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// Starts logging; a second call changes nothing.
///
/// # Errors
/// The writing thread cannot be started.
pub fn init(format: LogFormat, level: tracing::Level) -> io::Result<()> {
    let writer = LogWriter::start(stderr())?;
    let filter = EnvFilter::new(format!("sluicegate={level},warn"));
    let layer = fmt::layer().with_target(false).with_writer(move || writer.clone());
    let lines = match format {
        LogFormat::Text => layer.with_ansi(stderr().is_terminal()).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    // An earlier subscriber, as in a test, stays.
    let _ = tracing_subscriber::registry().with(filter).with(lines).with(DependencyLogThrottle::default()).try_init();
    Ok(())
}

/// Writes lines by a thread of its own: a terminal that is stopped and a pipe that is not read block this thread only.
/// Clones share it.
#[derive(Debug, Clone)]
struct LogWriter {
    sender: SyncSender<QueuedLine>,
    state: Arc<WriterState>,
}

#[derive(Debug, Default)]
struct WriterState {
    /// A line was not written within [`WAIT`], and none has been since.
    is_stalled: AtomicBool,
    /// Lines that found the queue full.
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
                // A terminal that is closed does not come back.
                let _ = out.write_all(&bytes).and_then(|()| out.flush());
                state.is_stalled.store(false, Ordering::Relaxed);
                // A thread that waits no more has set `stalled`, and the next line clears it.
                let _ = written_sender.send(());
            }
        })?;
        Ok(writer)
    }
}

/// The next line. Log how many were lost once the queue is empty again.
fn next_line(receiver: &Receiver<QueuedLine>, state: &WriterState) -> Option<QueuedLine> {
    match receiver.try_recv() {
        Ok(line) => return Some(line),
        Err(TryRecvError::Disconnected) => return None,
        Err(TryRecvError::Empty) => {}
    }
    let lost = state.dropped.swap(0, Ordering::Relaxed);
    if lost > 0 {
        // This thread must not wait for itself.
        state.is_stalled.store(true, Ordering::Relaxed);
        warn!(dropped = lost, "standard error was not read in time: lines of the log are lost");
    }
    receiver.recv().ok()
}

/// A formatted event is one call. It does not fail: the subscriber would report the failure on standard error with
/// `eprintln!`, which panics where that is closed.
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

// A file that lines are appended to, and that may be renamed or removed at any time, as by logrotate: the next batch goes to a new one.

/// A file that cannot be opened again is mentioned this often.
const REOPEN_WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// An open file, and where it was found.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: File,
    /// Device and inode of the open file.
    file_id: (u64, u64),
    throttle: LogThrottle,
}

impl LogFile {
    /// Opens it, or makes it.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn open(path: PathBuf) -> io::Result<Self> {
        let file = open_for_append(&path)?;
        let file_id = file_id(&file.metadata()?);
        Ok(LogFile { path, file, file_id, throttle: LogThrottle::new() })
    }

    /// Opens what is at its path now, if that is another file or none. As long as there can be none the old one goes on.
    fn reopen_if_rotated(&mut self) {
        if self.path.metadata().is_ok_and(|metadata| file_id(&metadata) == self.file_id) {
            return;
        }
        let reopened = open_for_append(&self.path).and_then(|file| Ok((file_id(&file.metadata()?), file)));
        match reopened {
            Ok((file_id, file)) => {
                (self.file_id, self.file) = (file_id, file);
                info!("{} is another file now: it is written from here on", self.path.display());
            }
            Err(error) if self.throttle.should_log(REOPEN_WARNING_INTERVAL) => {
                warn!(%error, "{} is gone and cannot be made again: the file before goes on", self.path.display());
            }
            Err(_) => {}
        }
    }
}

impl Write for LogFile {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        self.file.write(lines)
    }

    /// Whole lines only, so that none is torn between two files.
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

// Bounds what libraries log: one that warns of each thing a client does would fill the log.

/// Lines of a library in each period.
const MAX_LINES_PER_PERIOD: u64 = 10;

/// How long a period is.
const PERIOD: Duration = Duration::from_secs(60);

/// Lets a few lines of each library through, and all of the gateway's own.
#[derive(Debug, Default)]
pub(super) struct DependencyLogThrottle(Mutex<HashMap<&'static str, Period>>);

#[derive(Debug, Clone, Copy)]
struct Period {
    started_at: Instant,
    line_count: u64,
}

impl DependencyLogThrottle {
    /// Whether a line may be written, and how many were not in the period before.
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
            warn!(library, suppressed, "a library logged more than 10 lines a minute");
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// Each write waits for a permit.
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
        let (permit, permits) = channel();
        let (sink, written) = channel();
        let log = LogWriter::start(BlockedWriter(permits, sink)).unwrap();
        // One is being written, the rest waits or is lost; only the first of them waits for its turn.
        for number in 0..QUEUE_CAPACITY + 10 {
            log.clone().write_all(format!("{number}").as_bytes()).unwrap();
        }
        let lost = log.state.dropped.load(Ordering::Relaxed);
        assert!((9..=10).contains(&lost), "{lost}");
        let taken = QUEUE_CAPACITY as u64 + 10 - lost;
        (0..taken).for_each(|_| permit.send(()).unwrap());
        let lines: Vec<_> = (0..taken).map(|_| String::from_utf8(written.recv().unwrap()).unwrap()).collect();
        assert!(lines.iter().enumerate().all(|(place, line)| *line == place.to_string()), "{lines:?}");
    }
}
