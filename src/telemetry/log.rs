//! The process log on standard error, log files that can be rotated, and log sockets.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Debug;
use std::fs::{File, Metadata, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{ErrorKind, IoSlice, IsTerminal, Write, stderr};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, process, thread};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber, info, warn};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use crate::clock::{LogThrottle, monotonic};
use crate::http::text::{Escape, escape_deceptive};

/// Maximum number of log lines queued for standard error. Further lines are dropped and counted.
const QUEUE_CAPACITY: usize = 1024;

/// Maximum time that a thread waits for its line to be written. After a timeout, threads queue their lines without
/// waiting, until the writer has written a line again.
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
/// # Errors
/// The writer thread cannot be started.
pub fn init(format: LogFormat, level: tracing::Level) -> io::Result<()> {
    let escape = if format == LogFormat::Json { Escape::Json } else { Escape::Braces };
    let writer = LogWriter::start(stderr(), escape)?;
    let filter = EnvFilter::new(format!("sluicegate={level},warn"));
    let layer = fmt::layer().with_target(false).with_writer(move || writer.clone());
    let lines = match format {
        LogFormat::Text => layer.with_ansi(stderr().is_terminal()).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    // Ignore the error, which means that a subscriber is already installed, as in tests.
    let _ = tracing_subscriber::registry().with(filter).with(lines).with(LineThrottle::default()).try_init();
    Ok(())
}

/// A writer that queues log lines for a separate thread, which writes them to standard error. A stopped terminal or an
/// unread pipe therefore blocks only the separate thread. Clones share the queue.
#[derive(Debug, Clone)]
struct LogWriter {
    sender: SyncSender<QueuedLine>,
    state: Arc<WriterState>,
    /// How to write characters that change how a line is shown.
    escape: Escape,
}

#[derive(Debug, Default)]
struct WriterState {
    /// Set when a line is not written within [`WRITE_TIMEOUT`], and cleared when the next line is written.
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
    fn start(mut out: impl Write + Send + 'static, escape: Escape) -> io::Result<Self> {
        let (layer, receiver) = sync_channel::<QueuedLine>(QUEUE_CAPACITY);
        let state = Arc::<WriterState>::default();
        let writer = LogWriter { sender: layer, state: state.clone(), escape };
        thread::Builder::new().name("log".to_owned()).spawn(move || {
            while let Some(QueuedLine { bytes, written_sender }) = next_line(&receiver, &state) {
                // Ignore errors of writing to standard error, because there is no other place to report them.
                let _ = out.write_all(&bytes).and_then(|()| out.flush());
                state.is_stalled.store(false, Ordering::Relaxed);
                // Ignore the error of `send`, which means that the waiting thread has timed out. That thread has set
                // `is_stalled`, and the next written line clears this flag.
                let _ = written_sender.send(());
            }
        })?;
        Ok(writer)
    }
}

/// Return the next line. When the queue has become empty, first log how many lines were dropped while the queue was
/// full.
fn next_line(receiver: &Receiver<QueuedLine>, state: &WriterState) -> Option<QueuedLine> {
    match receiver.try_recv() {
        Ok(line) => return Some(line),
        Err(TryRecvError::Disconnected) => return None,
        Err(TryRecvError::Empty) => {}
    }
    let lost = state.dropped.swap(0, Ordering::Relaxed);
    if lost > 0 {
        // Set `is_stalled`, because `warn!` queues a line for this thread, and this thread must not wait for itself.
        state.is_stalled.store(true, Ordering::Relaxed);
        warn!(dropped = lost, "standard error is not read in time: log lines are lost");
    }
    receiver.recv().ok()
}

/// Each call of `write` gets one formatted event. `write` never returns an error, because the tracing subscriber would
/// print the error with `eprintln!`, which panics if standard error is closed.
impl Write for LogWriter {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let (written_sender, written) = sync_channel(1);
        let should_wait = !self.state.is_stalled.load(Ordering::Relaxed);
        let mut bytes = text.to_vec();
        escape_deceptive(&mut bytes, 0, self.escape);
        if self.sender.try_send(QueuedLine { bytes, written_sender }).is_err() {
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

// === Log files that may be renamed or removed at any time, for example by logrotate ===

/// Minimum interval between two warnings that a file cannot be reopened.
const REOPEN_WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// A log file. After log rotation, the gateway opens a new file at the same path.
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
    /// # Errors
    /// The file cannot be opened or created.
    pub fn open(path: PathBuf) -> io::Result<Self> {
        let file = open_for_append(&path)?;
        let file_id = file_id(&file.metadata()?);
        Ok(LogFile { path, file, file_id, throttle: LogThrottle::new() })
    }

    /// Open a new file at the path if the file was moved, removed or replaced. If the new file cannot be opened, keep
    /// writing to the open file.
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

    /// Write complete lines. All lines of a call are written to the same file, even if log rotation replaces the file
    /// during the call.
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

// === Rate limit for the lines of libraries and for equal warnings of the gateway, which could otherwise fill the log ===

/// Maximum number of lines of each library, and of equal warnings of the gateway, within [`PERIOD`].
const MAX_LINES_PER_PERIOD: u64 = 10;

/// Period for [`MAX_LINES_PER_PERIOD`].
const PERIOD: Duration = Duration::from_secs(60);

/// Maximum number of sources in memory. If there are more, all are forgotten, and may log again.
const MAX_SOURCES: usize = 1024;

/// A filter that admits at most [`MAX_LINES_PER_PERIOD`] lines of each source per [`PERIOD`].
#[derive(Debug, Default)]
struct LineThrottle(Mutex<HashMap<LineSource, Period>>);

/// What the lines that are counted together have in common.
#[derive(Debug, PartialEq, Eq, Hash)]
enum LineSource {
    /// The library that logs the line.
    Library(&'static str),
    /// Hash of a line of the gateway: of its place in the code, its message and its fields.
    Line(u64),
}

#[derive(Debug, Clone, Copy)]
struct Period {
    started_at: Instant,
    line_count: u64,
}

impl LineThrottle {
    /// Return whether a line is admitted. If this line starts a new period, also return the number of lines that were
    /// suppressed in the previous period, otherwise 0.
    fn admit(&self, source: LineSource) -> (bool, u64) {
        let mut periods = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = monotonic();
        if periods.len() >= MAX_SOURCES && !periods.contains_key(&source) {
            periods.clear();
        }
        let period = periods.entry(source).or_insert(Period { started_at: now, line_count: 0 });
        let mut suppressed = 0;
        if now - period.started_at >= PERIOD {
            suppressed = period.line_count.saturating_sub(MAX_LINES_PER_PERIOD);
            *period = Period { started_at: now, line_count: 0 };
        }
        period.line_count += 1;
        (period.line_count <= MAX_LINES_PER_PERIOD, suppressed)
    }
}

impl<S: Subscriber> Layer<S> for LineThrottle {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        let library = metadata.target().split("::").next().unwrap_or_default();
        if library != "sluicegate" {
            let (admitted, suppressed) = self.admit(LineSource::Library(library));
            if suppressed > 0 {
                warn!(
                    library,
                    suppressed, "a library logged more than 10 lines within a minute: the rest was suppressed"
                );
            }
            return admitted;
        }
        // Operators want to see each reload and each recovery. Lines of these levels do not flood the log.
        if *metadata.level() > Level::WARN {
            return true;
        }
        let mut line = LineContent::default();
        metadata.callsite().hash(&mut line.hasher);
        event.record(&mut line);
        let (admitted, suppressed) = self.admit(LineSource::Line(line.hasher.finish()));
        if suppressed > 0 {
            let line = line.message;
            warn!(
                line,
                suppressed, "equal lines were logged more than 10 times within a minute: the rest was suppressed"
            );
        }
        admitted
    }
}

/// The content of a line.
#[derive(Default)]
struct LineContent {
    /// Hash of the message and of all fields.
    hasher: DefaultHasher,
    message: String,
}

impl Visit for LineContent {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        (field.name(), &text).hash(&mut self.hasher);
        if field.name() == "message" {
            self.message = text;
        }
    }
}

// === Log sockets: each record is a datagram to a syslog daemon (RFC 5424 or RFC 3164) or to journald in its native
// protocol (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>) ===

/// Syslog facilities (RFC 5424 §6.2.1) with their names in syslog(3). `kern` is not included, because only the kernel
/// may use it.
pub const FACILITIES: [(&str, u8); 19] = [
    ("user", 1),
    ("mail", 2),
    ("daemon", 3),
    ("auth", 4),
    ("syslog", 5),
    ("lpr", 6),
    ("news", 7),
    ("uucp", 8),
    ("cron", 9),
    ("authpriv", 10),
    ("ftp", 11),
    ("local0", 16),
    ("local1", 17),
    ("local2", 18),
    ("local3", 19),
    ("local4", 20),
    ("local5", 21),
    ("local6", 22),
    ("local7", 23),
];

/// Syslog severities (RFC 5424 §6.2.1), which journald calls priorities.
const WARNING: u8 = 4;
const INFORMATIONAL: u8 = 6;

/// The field MSGID in the syslog header of all records (RFC 5424 §6.2.7).
const MESSAGE_ID: &str = "access";

/// Minimum interval between two warnings that records cannot be sent to a log socket.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Number of bytes of the length field before each record of a batch.
const LENGTH_BYTES: usize = size_of::<u32>();

/// The socket of a syslog daemon, and the settings of the message header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Syslog {
    /// Path of the socket of the daemon.
    pub socket: PathBuf,
    /// Format of the message header.
    pub protocol: SyslogProtocol,
    /// Number of the syslog facility.
    pub facility: u8,
    /// The field APP-NAME of RFC 5424, or TAG of RFC 3164.
    pub tag: Box<str>,
}

/// Format of the header of a syslog message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyslogProtocol {
    /// The header has the format of RFC 5424.
    Rfc5424,
    /// The header has the format of RFC 3164 without the host name, as syslog(3) writes it.
    Rfc3164,
}

/// The settings for systemd-journald.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Journald {
    /// Path of the socket of journald.
    pub socket: PathBuf,
    /// `SYSLOG_IDENTIFIER` of the entries.
    pub tag: Box<str>,
}

fn severity(status: u64) -> u8 {
    if status >= 500 { WARNING } else { INFORMATIONAL }
}

// === Syslog ===

/// Writes the headers of syslog messages.
#[derive(Debug)]
pub(super) struct SyslogHeader {
    protocol: SyslogProtocol,
    facility: u8,
    /// The part of the header after the timestamp.
    suffix: String,
    /// The local time zone, for timestamps of RFC 3164.
    time_zone: TimeZone,
}

impl SyslogHeader {
    pub(super) fn new(Syslog { protocol, facility, tag, .. }: &Syslog) -> Self {
        let pid = process::id();
        let suffix = match protocol {
            // The STRUCTURED-DATA of the header is `-` (none), because the message itself contains the fields of the
            // record.
            SyslogProtocol::Rfc5424 => format!(" {} {tag} {pid} {MESSAGE_ID} - ", host_name()),
            SyslogProtocol::Rfc3164 => format!(" {tag}[{pid}]: "),
        };
        SyslogHeader { protocol: *protocol, facility: *facility, suffix, time_zone: TimeZone::system() }
    }

    /// Write the header of a record with the time `time_us` (µs since the Unix epoch).
    pub(super) fn write(&self, out: &mut Vec<u8>, status: u16, time_us: u64) -> io::Result<()> {
        // Use the epoch if jiff cannot represent the time.
        let time = Timestamp::from_microsecond(time_us as i64).unwrap_or_default();
        let priority = self.facility * 8 + severity(status.into());
        match self.protocol {
            SyslogProtocol::Rfc5424 => write!(out, "<{priority}>1 {time:.6}")?,
            SyslogProtocol::Rfc3164 => {
                let time = time.to_zoned(self.time_zone.clone());
                write!(out, "<{priority}>{}", time.strftime("%b %e %H:%M:%S"))?;
            }
        }
        out.extend_from_slice(self.suffix.as_bytes());
        Ok(())
    }
}

/// Return the HOSTNAME of RFC 5424 §6.2.4: 1 to 255 printable ASCII characters.
fn host_name() -> String {
    let uname = rustix::system::uname();
    let name: String = uname.nodename().to_string_lossy().chars().filter(char::is_ascii_graphic).take(255).collect();
    if name.is_empty() { "-".to_owned() } else { name }
}

// === journald ===

/// Write a journal entry with the fields of `record`, which is a JSON object.
fn write_journal_entry(record: &[u8], tag: &str, out: &mut Vec<u8>) -> serde_json::Result<()> {
    let fields: Map<String, Value> = serde_json::from_slice(record)?;
    let status = fields.get("status").and_then(Value::as_u64).unwrap_or(0);
    let parts = ["client", "method", "path", "status", "outcome"];
    let message = parts.map(|name| fields.get(name).map_or("-".into(), journal_text)).join(" ");
    write_field(out, "MESSAGE", &message);
    write_field(out, "PRIORITY", &severity(status).to_string());
    write_field(out, "SYSLOG_IDENTIFIER", tag);
    for (name, value) in &fields {
        write_field(out, &name.to_ascii_uppercase(), &journal_text(value));
    }
    Ok(())
}

/// Return a JSON value as text. A list of strings becomes a comma-separated text. Objects remain JSON.
fn journal_text(value: &Value) -> Cow<'_, str> {
    match value {
        Value::String(text) => text.into(),
        Value::Array(items) if items.iter().all(Value::is_string) => {
            items.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(",").into()
        }
        value => value.to_string().into(),
    }
}

fn write_field(out: &mut Vec<u8>, name: &str, value: &str) {
    out.extend_from_slice(name.as_bytes());
    if value.contains('\n') {
        out.push(b'\n');
        out.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        out.push(b'=');
    }
    out.extend_from_slice(value.as_bytes());
    out.push(b'\n');
}

/// Send an entry that is too large for a datagram as a sealed in-memory file (memfd).
fn send_as_file(socket: &UnixDatagram, entry: &[u8]) -> io::Result<()> {
    let mut file = File::from(memfd_create("journal-entry", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?);
    file.write_all(entry)?;
    // Seal the file against changes. journald maps the file into memory, and rejects a file that is not sealed.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
    let descriptors = [file.as_fd()];
    retry_on_intr(|| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        // Reserve space for one file descriptor.
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(socket, &[IoSlice::new(&[])], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

// === The socket ===

/// Append a record to a batch: the length of the record, then the bytes that `write` produces.
pub(super) fn push_framed(batch: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = batch.len();
    batch.extend_from_slice(&[0; LENGTH_BYTES]);
    write(batch);
    let length = (batch.len() - start - LENGTH_BYTES) as u32;
    batch[start..start + LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
}

/// A connection to the socket of a log daemon. After a restart of the daemon, the gateway connects again.
#[derive(Debug)]
pub(super) struct LogSocket {
    path: PathBuf,
    socket: Option<UnixDatagram>,
    /// For journald, the value of `SYSLOG_IDENTIFIER`.
    journal_tag: Option<Box<str>>,
    /// Whether the last record was lost, because no daemon listened on the socket.
    is_failing: bool,
    throttle: LogThrottle,
}

impl LogSocket {
    /// Connect to the socket of a syslog daemon. If the daemon does not run, log a warning instead of returning an
    /// error, because the daemon may start later.
    ///
    /// # Errors
    /// The path is not a datagram socket, or the process may not write to it.
    pub(super) fn syslog(syslog: &Syslog) -> io::Result<Self> {
        LogSocket::open(&syslog.socket, None)
    }

    /// Connect to the socket of journald. If journald does not run, log a warning.
    ///
    /// # Errors
    /// The path is not a datagram socket, or the process may not write to it.
    pub(super) fn journald(journald: &Journald) -> io::Result<Self> {
        LogSocket::open(&journald.socket, Some(journald.tag.clone()))
    }

    fn open(path: &Path, journal_tag: Option<Box<str>>) -> io::Result<Self> {
        let socket = match connect(path) {
            Ok(socket) => Some(socket),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                warn!(socket = %path.display(), %error, "no daemon listens on the log socket: access log records are lost");
                None
            }
            Err(error) => return Err(error),
        };
        let is_failing = socket.is_none();
        Ok(LogSocket { path: path.to_owned(), socket, journal_tag, is_failing, throttle: LogThrottle::new() })
    }

    /// Send the records of a batch that [`push_framed`] has built. Return how many records were lost.
    pub(super) fn deliver(&mut self, batch: &[u8]) -> u64 {
        let mut lost = 0;
        let mut entry = Vec::new();
        let mut is_reachable = true;
        for record in framed_records(batch) {
            let datagram = match &self.journal_tag {
                None => record,
                Some(tag) => {
                    entry.clear();
                    // This does not fail, because `record` is JSON that the gateway has serialized.
                    if write_journal_entry(record, tag, &mut entry).is_err() {
                        lost += 1;
                        continue;
                    }
                    &entry
                }
            };
            // If a record cannot be sent, count the remaining records of the batch as lost without sending them. If the
            // record was only too large, continue with the next record.
            let result = if is_reachable { self.send(datagram) } else { Err(ErrorKind::NotConnected.into()) };
            let Err(error) = result else { continue };
            lost += 1;
            is_reachable = is_reachable && is_too_large(&error);
            if self.throttle.should_log(LOG_INTERVAL) {
                warn!(socket = %self.path.display(), %error, "cannot write the access log: records are lost");
            }
        }
        lost
    }

    /// Send a datagram. If sending fails, for example because the daemon has restarted, connect again and retry once.
    fn send(&mut self, datagram: &[u8]) -> io::Result<()> {
        if let Some(socket) = &self.socket {
            match self.send_over(socket, datagram) {
                Err(error) if !is_too_large(&error) => self.socket = None,
                result => return result,
            }
        }
        let sent = connect(&self.path).and_then(|socket| {
            let result = self.send_over(&socket, datagram);
            self.socket = Some(socket);
            result
        });
        let is_failing = sent.as_ref().is_err_and(|error| !is_too_large(error));
        if self.is_failing && !is_failing {
            info!(socket = %self.path.display(), "reconnected to the log socket");
        }
        self.is_failing = is_failing;
        sent
    }

    fn send_over(&self, socket: &UnixDatagram, datagram: &[u8]) -> io::Result<()> {
        match retry_on_intr(|| send(socket, datagram, SendFlags::NOSIGNAL)) {
            Ok(_) => Ok(()),
            Err(Errno::MSGSIZE | Errno::NOBUFS) if self.journal_tag.is_some() => send_as_file(socket, datagram),
            Err(error) => Err(error.into()),
        }
    }
}

fn connect(path: &Path) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.connect(path)?;
    Ok(socket)
}

/// Return whether sending failed because the record was too large. In this case, other records can still be sent.
fn is_too_large(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::MSGSIZE.raw_os_error())
}

fn framed_records(mut batch: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, rest) = batch.split_first_chunk::<LENGTH_BYTES>()?;
        let (record, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        batch = rest;
        Some(record)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// A writer for tests. Each write waits until the test permits it.
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
        let log = LogWriter::start(BlockedWriter(permit_receiver, sink), Escape::Json).unwrap();
        // One line is being written, and the other lines are queued or dropped. Only the first caller of `write_all`
        // waits (until `WRITE_TIMEOUT`) for its line to be written.
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

    /// Counts events.
    struct Counter(Arc<AtomicU64>);

    impl<S: Subscriber> Layer<S> for Counter {
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn only_equal_lines_are_limited() {
        let count = Arc::<AtomicU64>::default();
        let subscriber = tracing_subscriber::registry().with(Counter(count.clone())).with(LineThrottle::default());
        let logged = |log: fn(u64)| {
            count.store(0, Ordering::Relaxed);
            (0..100).for_each(log);
            count.load(Ordering::Relaxed)
        };
        tracing::subscriber::with_default(subscriber, || {
            assert_eq!(logged(|_| warn!("equal")), MAX_LINES_PER_PERIOD);
            assert_eq!(logged(|_| warn!("equal")), MAX_LINES_PER_PERIOD, "another place in the code");
            assert_eq!(logged(|number| warn!(number, "different")), 100);
            assert_eq!(logged(|number| warn!("different {number}")), 100);
            assert_eq!(logged(|_| info!("equal")), 100, "another level");
            assert_eq!(logged(|number| warn!(target: "hyper", number, "of a library")), MAX_LINES_PER_PERIOD);
            // Other lines than those that memory can hold make the gateway forget the counts.
            (0..MAX_SOURCES).for_each(|number| warn!(number));
            assert_eq!(logged(|_| warn!("equal")), MAX_LINES_PER_PERIOD);
        });
    }

    #[test]
    fn journal_values_with_line_breaks_have_a_length() {
        let mut entry = Vec::new();
        let record = br#"{"status":503,"path":"/a\nb","shadow_denied":["a","b"],"limits":[{"limit":"l"}]}"#;
        write_journal_entry(record, "tag", &mut entry).unwrap();
        let expected = [
            &b"MESSAGE\n"[..],
            &14_u64.to_le_bytes(),
            b"- - /a\nb 503 -\nPRIORITY=4\nSYSLOG_IDENTIFIER=tag\nSTATUS=503\nPATH\n",
            &4_u64.to_le_bytes(),
            b"/a\nb\nSHADOW_DENIED=a,b\nLIMITS=[{\"limit\":\"l\"}]\n",
        ];
        assert_eq!(String::from_utf8_lossy(&entry), String::from_utf8_lossy(&expected.concat()));
    }

    #[test]
    fn rfc_3164_header_is_that_of_syslog_3() {
        let syslog = Syslog {
            socket: "/dev/log".into(),
            protocol: SyslogProtocol::Rfc3164,
            facility: 16,
            tag: "gateway".into(),
        };
        let header = SyslogHeader { time_zone: TimeZone::UTC, ..SyslogHeader::new(&syslog) };
        let mut out = Vec::new();
        header.write(&mut out, 200, 1_764_633_600_123_456).unwrap();
        let expected = format!("<134>Dec  2 00:00:00 gateway[{}]: ", process::id());
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
