//! What a connection speaks: as TLS has agreed on, otherwise as its first bytes say.

use std::io;

use bytes::Bytes;
use tokio::io::AsyncReadExt;

use super::lent::ReclaimableStream;

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
