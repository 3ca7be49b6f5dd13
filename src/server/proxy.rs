//! The header by which a proxy of TCP connections says whose a connection is: the PROXY protocol, versions 1 and 2
//! (<https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt>).

use std::io;
use std::net::IpAddr;

use ppp::{v1, v2};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

/// Bytes of a version 2 header before its addresses (§2.2).
const FIXED_V2: usize = 16;

/// Bytes of a version 1 header at most (§2.1).
const MOST_V1: usize = 107;

/// Bytes of a version 2 header at most. Addresses take 216, and what proxies add (names, TLS details) some hundred more.
const MOST_V2: usize = 4096;

/// Whom a proxy speaks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Sender {
    /// A client at this address.
    Client(IpAddr),
    /// Itself: it looks whether we are alive.
    Proxy,
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
pub(super) async fn sender(stream: &mut TcpStream) -> Result<Sender, ProxyError> {
    // Headers of both versions are longer than this.
    let mut header = vec![0; v2::PROTOCOL_PREFIX.len()];
    stream.read_exact(&mut header).await?;
    if header == v2::PROTOCOL_PREFIX {
        take_version_2(stream, &mut header).await?;
    } else {
        take_version_1(stream, &mut header).await?;
    }
    parse(&header)
}

/// Reads up to the end of the line.
async fn take_version_1(stream: &mut TcpStream, header: &mut Vec<u8>) -> Result<(), ProxyError> {
    if !header.starts_with(b"PROXY ") {
        return Err(ProxyError::NoHeader);
    }
    let mut ahead = [0; MOST_V1];
    while header.last() != Some(&b'\n') {
        let room = MOST_V1 - header.len();
        if room == 0 {
            return Err(ProxyError::TooLong);
        }
        // Without a line's end in it all of what is there belongs to the line.
        let seen = stream.peek(&mut ahead[..room]).await?;
        if seen == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let end = ahead[..seen].iter().position(|byte| *byte == b'\n').map_or(seen, |at| at + 1);
        let start = header.len();
        header.resize(start + end, 0);
        stream.read_exact(&mut header[start..]).await?;
    }
    Ok(())
}

/// Reads as much as the header says that it has.
async fn take_version_2(stream: &mut TcpStream, header: &mut Vec<u8>) -> Result<(), ProxyError> {
    let start = header.len();
    header.resize(FIXED_V2, 0);
    stream.read_exact(&mut header[start..]).await?;
    let rest = usize::from(u16::from_be_bytes([header[FIXED_V2 - 2], header[FIXED_V2 - 1]]));
    if FIXED_V2 + rest > MOST_V2 {
        return Err(ProxyError::TooLong);
    }
    header.resize(FIXED_V2 + rest, 0);
    stream.read_exact(&mut header[FIXED_V2..]).await?;
    Ok(())
}

/// What a whole header says.
///
/// # Errors
/// It is malformed.
pub fn parse(header: &[u8]) -> Result<Sender, ProxyError> {
    if !header.starts_with(v2::PROTOCOL_PREFIX) {
        let header = v1::Header::try_from(header)?;
        // To `ppp` a lone LF among words that say nothing is an end, too; §2.1 wants CRLF.
        let line =
            header.header.strip_suffix("\r\n").filter(|line| !line.contains('\n')).ok_or(ProxyError::Malformed)?;
        let client = match header.addresses {
            v1::Addresses::Tcp4(of) => of.source_address.into(),
            v1::Addresses::Tcp6(of) => of.source_address.into(),
            v1::Addresses::Unknown => return Ok(Sender::Unknown),
        };
        // `+1` is a number to it as well. §2.1 wants digits, and nothing else has room for a sign.
        return if line.contains('+') { Err(ProxyError::Malformed) } else { Ok(Sender::Client(client)) };
    }
    let header = v2::Header::try_from(header)?;
    Ok(match (header.command, header.protocol, header.addresses) {
        (v2::Command::Local, _, _) => Sender::Proxy,
        (v2::Command::Proxy, v2::Protocol::Stream, v2::Addresses::IPv4(of)) => Sender::Client(of.source_address.into()),
        (v2::Command::Proxy, v2::Protocol::Stream, v2::Addresses::IPv6(of)) => Sender::Client(of.source_address.into()),
        // No TCP connection has such an address; the protocol says to pass over it (§2.2).
        (v2::Command::Proxy, _, _) => Sender::Unknown,
    })
}
