//! The header by which a proxy of TCP connections says whose a connection is: the PROXY protocol, versions 1 and 2
//! (<https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt>).

use std::io;
use std::net::IpAddr;

use ppp::{v1, v2};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

/// Bytes of a version 2 header before its addresses (§2.2).
const V2_FIXED_LENGTH: usize = 16;

/// Bytes of a version 1 header at most (§2.1).
const MAX_V1_LENGTH: usize = 107;

/// Bytes of a version 2 header at most. Addresses take 216, and what proxies add (names, TLS details) some hundred more.
const MAX_V2_LENGTH: usize = 4096;

/// Whom a proxy speaks for.
#[derive(Debug, PartialEq, Eq)]
pub enum ProxySource {
    /// A client at this address.
    Proxied(IpAddr),
    /// Itself: it looks whether we are alive.
    Local,
    /// A client whose address it does not tell.
    Unknown,
}

/// Why a connection has no sender.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ProxyError {
    #[error("the PROXY header cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("it does not begin with a PROXY header")]
    NoHeader,
    #[error("the PROXY header is too long")]
    TooLong,
    #[error("the PROXY header is malformed: {0}")]
    Version1(#[from] v1::BinaryParseError),
    #[error("the PROXY header is malformed")]
    Malformed,
    #[error("the PROXY header is malformed: {0}")]
    Version2(#[from] v2::ParseError),
}

/// Takes the header off a connection, and not a byte of what follows.
pub(super) async fn read_header(stream: &mut TcpStream) -> Result<ProxySource, ProxyError> {
    // Headers of both versions are longer than this.
    let mut header = vec![0; v2::PROTOCOL_PREFIX.len()];
    stream.read_exact(&mut header).await?;
    if header == v2::PROTOCOL_PREFIX {
        read_v2(stream, &mut header).await?;
    } else {
        read_v1(stream, &mut header).await?;
    }
    parse(&header)
}

/// Reads up to the end of the line.
async fn read_v1(stream: &mut TcpStream, header: &mut Vec<u8>) -> Result<(), ProxyError> {
    if !header.starts_with(b"PROXY ") {
        return Err(ProxyError::NoHeader);
    }
    let mut peeked = [0; MAX_V1_LENGTH];
    while header.last() != Some(&b'\n') {
        let room = MAX_V1_LENGTH - header.len();
        if room == 0 {
            return Err(ProxyError::TooLong);
        }
        // Without a line's end in it all of what is there belongs to the line.
        let peeked_bytes = stream.peek(&mut peeked[..room]).await?;
        if peeked_bytes == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let end = peeked[..peeked_bytes].iter().position(|byte| *byte == b'\n').map_or(peeked_bytes, |index| index + 1);
        let start = header.len();
        header.resize(start + end, 0);
        stream.read_exact(&mut header[start..]).await?;
    }
    Ok(())
}

/// Reads as much as the header says that it has.
async fn read_v2(stream: &mut TcpStream, header: &mut Vec<u8>) -> Result<(), ProxyError> {
    let start = header.len();
    header.resize(V2_FIXED_LENGTH, 0);
    stream.read_exact(&mut header[start..]).await?;
    let rest = usize::from(u16::from_be_bytes([header[V2_FIXED_LENGTH - 2], header[V2_FIXED_LENGTH - 1]]));
    if V2_FIXED_LENGTH + rest > MAX_V2_LENGTH {
        return Err(ProxyError::TooLong);
    }
    header.resize(V2_FIXED_LENGTH + rest, 0);
    stream.read_exact(&mut header[V2_FIXED_LENGTH..]).await?;
    Ok(())
}

/// What a whole header says.
///
/// # Errors
/// It is malformed.
pub fn parse(header: &[u8]) -> Result<ProxySource, ProxyError> {
    if !header.starts_with(v2::PROTOCOL_PREFIX) {
        let header = v1::Header::try_from(header)?;
        // To `ppp` a lone LF among words that say nothing is an end, too; §2.1 wants CRLF.
        let line =
            header.header.strip_suffix("\r\n").filter(|line| !line.contains('\n')).ok_or(ProxyError::Malformed)?;
        let client = match header.addresses {
            v1::Addresses::Tcp4(addresses) => addresses.source_address.into(),
            v1::Addresses::Tcp6(addresses) => addresses.source_address.into(),
            v1::Addresses::Unknown => return Ok(ProxySource::Unknown),
        };
        // `+1` is a number to it as well. §2.1 wants digits, and nothing else has room for a sign.
        return if line.contains('+') { Err(ProxyError::Malformed) } else { Ok(ProxySource::Proxied(client)) };
    }
    let header = v2::Header::try_from(header)?;
    Ok(match (header.command, header.protocol, header.addresses) {
        (v2::Command::Local, _, _) => ProxySource::Local,
        (v2::Command::Proxy, v2::Protocol::Stream, v2::Addresses::IPv4(addresses)) => {
            ProxySource::Proxied(addresses.source_address.into())
        }
        (v2::Command::Proxy, v2::Protocol::Stream, v2::Addresses::IPv6(addresses)) => {
            ProxySource::Proxied(addresses.source_address.into())
        }
        // No TCP connection has such an address; the protocol says to pass over it (§2.2).
        (v2::Command::Proxy, _, _) => ProxySource::Unknown,
    })
}
