//! Log sockets: each record is a datagram to a syslog daemon (RFC 5424 or RFC 3164) or to journald in its native
//! protocol (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>).

use std::borrow::Cow;
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{io, process};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use serde_json::{Map, Value};
use tracing::{info, warn};

use crate::limiter::clock::LogThrottle;

/// Facilities (RFC 5424 §6.2.1) with the names that syslog(3) uses. `kern` is missing, because only the kernel may use
/// it.
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

/// Severities (RFC 5424 §6.2.1), which journald calls priorities.
const WARNING: u8 = 4;
const INFORMATIONAL: u8 = 6;

/// MSGID of all records (RFC 5424 §6.2.7), a field of the syslog header.
const MESSAGE_ID: &str = "access";

/// Minimum interval between two warnings about a socket that accepts no records.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Number of bytes for the length before each record of a batch.
const LENGTH_BYTES: usize = size_of::<u32>();

/// A syslog daemon, and the header of the messages to it.
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
    /// RFC 3164 without the host name, the form that syslog(3) writes.
    Rfc3164,
}

/// The journal of systemd.
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
            // Write `-` for the structured data, because the message contains the fields.
            SyslogProtocol::Rfc5424 => format!(" {} {tag} {pid} {MESSAGE_ID} - ", host_name()),
            SyslogProtocol::Rfc3164 => format!(" {tag}[{pid}]: "),
        };
        SyslogHeader { protocol: *protocol, facility: *facility, suffix, time_zone: TimeZone::system() }
    }

    /// Write the header of a record that was written at `time_us` (in µs since the Unix epoch).
    pub(super) fn write(&self, out: &mut Vec<u8>, status: u16, time_us: u64) -> io::Result<()> {
        // Use the epoch for a time outside of the range of `i64` in µs, which is about 290,000 years.
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

/// Write a journal entry whose fields are those of a record in JSON.
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

/// Return a value as the text format shows it: the strings of a list are separated by commas. Objects remain JSON.
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

/// Send an entry that is too large for a datagram as a sealed memory file.
fn send_as_file(socket: &UnixDatagram, entry: &[u8]) -> io::Result<()> {
    let mut file = File::from(memfd_create("journal-entry", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?);
    file.write_all(entry)?;
    // Seal the file: journald maps it into memory, and rejects a file that could change.
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

/// Append the record that `write` produces to a batch of datagrams, with the length of the record before it.
pub(super) fn push_framed(batch: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = batch.len();
    batch.extend_from_slice(&[0; LENGTH_BYTES]);
    write(batch);
    let length = (batch.len() - start - LENGTH_BYTES) as u32;
    batch[start..start + LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
}

/// A connection to a log socket. The gateway connects again when the daemon has restarted.
#[derive(Debug)]
pub(super) struct LogSocket {
    path: PathBuf,
    socket: Option<UnixDatagram>,
    /// For journald, the value of `SYSLOG_IDENTIFIER`.
    journal_tag: Option<Box<str>>,
    /// Whether the daemon was absent when the last record was sent, so that the record was lost.
    is_failing: bool,
    throttle: LogThrottle,
}

impl LogSocket {
    /// Connect to the socket of a syslog daemon. If the daemon does not run, this is only a warning, because the daemon
    /// may start later.
    ///
    /// # Errors An error if the path is not a datagram socket, or if the permission is missing.
    pub(super) fn syslog(syslog: &Syslog) -> io::Result<Self> {
        LogSocket::open(&syslog.socket, None)
    }

    /// Connect to the socket of journald, in the same way as [`LogSocket::syslog`].
    ///
    /// # Errors The errors of [`LogSocket::syslog`].
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
                    // Parsing cannot fail, because the gateway has written the record as JSON.
                    if write_journal_entry(record, tag, &mut entry).is_err() {
                        lost += 1;
                        continue;
                    }
                    &entry
                }
            };
            // Count the remaining records of the batch as lost, because the socket does not accept records.
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

    /// Send a datagram. If no daemon listens on the socket any more, connect again once.
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

/// Return whether a single record was too large, which does not affect other records.
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
    use super::*;

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
