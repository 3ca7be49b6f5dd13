//! Sets up the log of the process itself, on standard error.

use std::io::{self, IsTerminal, Write, stderr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::Duration;

use tracing::warn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use super::throttle::Throttle;

/// Lines that may wait for standard error; more are lost.
const QUEUE: usize = 1024;

/// Maximum time that a thread waits until its line is written. None waits while standard error is stalled.
const WAIT: Duration = Duration::from_millis(100);

/// How lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// Starts logging; a second call changes nothing.
///
/// # Errors
/// The writing thread cannot be started.
pub fn start(format: Format, level: tracing::Level) -> io::Result<()> {
    let log = Log::start(stderr())?;
    let filter = EnvFilter::new(format!("sluicegate={level},warn"));
    let lines = fmt::layer().with_target(false).with_writer(move || log.clone());
    let lines = match format {
        Format::Text => lines.with_ansi(stderr().is_terminal()).boxed(),
        Format::Json => lines.json().flatten_event(true).boxed(),
    };
    // An earlier subscriber, as in a test, stays.
    let _ = tracing_subscriber::registry().with(filter).with(lines).with(Throttle::default()).try_init();
    Ok(())
}

/// Writes lines by a thread of its own: a terminal that is stopped and a pipe that is not read block this thread only.
/// Clones share it.
#[derive(Debug, Clone)]
struct Log {
    lines: SyncSender<Line>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// A line was not written within [`WAIT`], and none has been since.
    stalled: AtomicBool,
    /// Lines that found the queue full.
    lost: AtomicU64,
}

#[derive(Debug)]
struct Line {
    text: Vec<u8>,
    written: SyncSender<()>,
}

impl Log {
    fn start(mut out: impl Write + Send + 'static) -> io::Result<Self> {
        let (lines, waiting) = sync_channel::<Line>(QUEUE);
        let state = Arc::<State>::default();
        let log = Log { lines, state: state.clone() };
        thread::Builder::new().name("log".to_owned()).spawn(move || {
            while let Some(Line { text, written }) = next(&waiting, &state) {
                // A terminal that is closed does not come back.
                let _ = out.write_all(&text).and_then(|()| out.flush());
                state.stalled.store(false, Ordering::Relaxed);
                // A thread that waits no more has set `stalled`, and the next line clears it.
                let _ = written.send(());
            }
        })?;
        Ok(log)
    }
}

/// The next line. Log how many were lost once the queue is empty again.
fn next(waiting: &Receiver<Line>, state: &State) -> Option<Line> {
    match waiting.try_recv() {
        Ok(line) => return Some(line),
        Err(TryRecvError::Disconnected) => return None,
        Err(TryRecvError::Empty) => {}
    }
    let lost = state.lost.swap(0, Ordering::Relaxed);
    if lost > 0 {
        // This thread must not wait for itself.
        state.stalled.store(true, Ordering::Relaxed);
        warn!(dropped = lost, "standard error was not read in time: lines of the log are lost");
    }
    waiting.recv().ok()
}

/// A formatted event is one call. It does not fail: the subscriber would report the failure on standard error with
/// `eprintln!`, which panics where that is closed.
impl Write for Log {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let (written, done) = sync_channel(1);
        let waits = !self.state.stalled.load(Ordering::Relaxed);
        if self.lines.try_send(Line { text: text.to_vec(), written }).is_err() {
            self.state.lost.fetch_add(1, Ordering::Relaxed);
        } else if waits && done.recv_timeout(WAIT).is_err() {
            self.state.stalled.store(true, Ordering::Relaxed);
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// Each write waits for a permit.
    struct Slow(Receiver<()>, Sender<Vec<u8>>);

    impl Write for Slow {
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
    fn lines_beyond_the_queue_are_lost_and_counted() {
        let (permit, permits) = channel();
        let (sink, written) = channel();
        let log = Log::start(Slow(permits, sink)).unwrap();
        // One is being written, the rest waits or is lost; only the first of them waits for its turn.
        for number in 0..QUEUE + 10 {
            log.clone().write_all(format!("{number}").as_bytes()).unwrap();
        }
        let lost = log.state.lost.load(Ordering::Relaxed);
        assert!((9..=10).contains(&lost), "{lost}");
        let taken = QUEUE as u64 + 10 - lost;
        (0..taken).for_each(|_| permit.send(()).unwrap());
        let lines: Vec<_> = (0..taken).map(|_| String::from_utf8(written.recv().unwrap()).unwrap()).collect();
        assert!(lines.iter().enumerate().all(|(place, line)| *line == place.to_string()), "{lines:?}");
    }
}
