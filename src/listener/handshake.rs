//! Why TLS handshakes fail, for the log: what the client sent, and what to do about it.

use std::io;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustls::PeerMisbehaved;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tracing::{info, warn};

use crate::limiter::clock::monotonic;
use crate::listener::stream::ReclaimableStream;

/// Clients could fill the log: each kind of line is written at most so often.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Bytes of a ClientHello that are looked at. Post-quantum key shares make it larger than a packet; the name comes before or behind.
const MAX_CLIENT_HELLO: usize = 4 << 10;

static NAME_LOGGED_AT: Mutex<Option<Instant>> = Mutex::new(None);
static FAILURE_LOGGED_AT: Mutex<Option<Instant>> = Mutex::new(None);

/// The first bytes of a connection, which stay where they are.
pub(super) async fn peek_client_hello(stream: &TcpStream) -> io::Result<Vec<u8>> {
    // A silent client takes no memory.
    stream.readable().await?;
    let mut bytes = vec![0; MAX_CLIENT_HELLO];
    let count = stream.peek(&mut bytes).await?;
    bytes.truncate(count);
    Ok(bytes)
}

/// Says why a handshake failed, unless it was said just now. Connections that end are no failures.
pub(super) fn log_failure(error: &io::Error, client: IpAddr, client_hello: &[u8]) {
    let Some(reason) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) else { return };
    if !matches!(reason, rustls::Error::PeerMisbehaved(PeerMisbehaved::ServerNameMustContainOneHostName)) {
        if should_log(&FAILURE_LOGGED_AT) {
            info!(%client, error = %reason, "a TLS handshake failed; further ones within a minute are not logged");
        }
        return;
    }
    if should_log(&NAME_LOGGED_AT) {
        let name = server_name(client_hello).map(|name| String::from_utf8_lossy(name).into_owned());
        warn!(
            %client,
            server_name = name,
            "the client sent an invalid server name (SNI), and the TLS handshake was rejected: a server name is a DNS \
             name without a port (RFC 6066); for hey, add `-host NAME`"
        );
    }
}

fn should_log(logged_at: &Mutex<Option<Instant>>) -> bool {
    let mut logged_at = logged_at.lock().unwrap_or_else(PoisonError::into_inner);
    let now = monotonic();
    let is_due = logged_at.is_none_or(|logged_at| now - logged_at >= LOG_INTERVAL);
    if is_due {
        *logged_at = Some(now);
    }
    is_due
}

/// The server name in a ClientHello (RFC 8446 §4.1.2, RFC 6066 §3), if it is in the first record.
fn server_name(record: &[u8]) -> Option<&[u8]> {
    // Record: type, version, length; handshake: type, length; version, random.
    let mut rest = record.get(5 + 4 + 2 + 32..)?;
    // Session, cipher suites, compression methods.
    for prefix in [1, 2, 1] {
        take_vector(&mut rest, prefix)?;
    }
    // Extensions, as far as they are here.
    rest = rest.get(2..)?;
    loop {
        let kind = rest.get(..2)?;
        rest = &rest[2..];
        let mut extension = take_vector(&mut rest, 2)?;
        if kind == [0, 0] {
            let mut names = take_vector(&mut extension, 2)?;
            // The type of a DNS name.
            names = names.strip_prefix(&[0])?;
            return take_vector(&mut names, 2);
        }
    }
}

/// Takes a vector off, whose length stands before it in so many bytes.
fn take_vector<'a>(bytes: &mut &'a [u8], length_bytes: usize) -> Option<&'a [u8]> {
    let (length, rest) = bytes.split_at_checked(length_bytes)?;
    let length = length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
    let (vector, rest) = rest.split_at_checked(length)?;
    *bytes = rest;
    Some(vector)
}

// What a connection speaks: as TLS has agreed on, otherwise as its first bytes say.

/// How every connection of HTTP/2 begins (RFC 9113 §3.4).
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The name of HTTP/2 in ALPN (RFC 9113 §3.1).
const ALPN_H2: &[u8] = b"h2";

/// A version of HTTP, as far as connections differ by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    /// 1.0 and 1.1.
    Http1,
    /// 2.
    Http2,
}

impl Protocol {
    /// What was agreed on by ALPN; whoever does not use it speaks HTTP/1.1 (RFC 9113 §3.2).
    pub(super) fn from_alpn(alpn: Option<&[u8]>) -> Self {
        if alpn == Some(ALPN_H2) { Protocol::Http2 } else { Protocol::Http1 }
    }

    /// What the first bytes say. They stay in the stream.
    pub(super) async fn from_preface(stream: &mut ReclaimableStream) -> io::Result<Self> {
        let mut first = [0; PREFACE.len()];
        let mut count = 0;
        while count < PREFACE.len() && PREFACE.starts_with(&first[..count]) {
            match stream.read(&mut first[count..]).await? {
                0 => break,
                read => count += read,
            }
        }
        stream.rewind(Bytes::copy_from_slice(&first[..count]));
        Ok(if first == *PREFACE { Protocol::Http2 } else { Protocol::Http1 })
    }
}
