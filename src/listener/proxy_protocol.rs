//! The PROXY protocol, versions 1 and 2, by which TCP proxies send client addresses
//! (<https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt>).

use std::io;
use std::net::{IpAddr, SocketAddr};

use ppp::{v1, v2};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use crate::upstream::proxy_protocol::ProxiedConnection;

/// Length of the fixed part of a version 2 header in bytes (§2.2).
const V2_FIXED_LENGTH: usize = 16;

/// Maximum length of a version 1 header in bytes (§2.1).
const MAX_V1_LENGTH: usize = 107;

/// Maximum length of a version 2 header in bytes. Addresses take up to 216 bytes. Extensions (TLVs such as names and
/// TLS details) take some hundred bytes more.
const MAX_V2_LENGTH: usize = 4096;

/// Source of a proxied connection.
#[derive(Debug, PartialEq, Eq)]
pub enum ProxySource {
    /// A client that has a connection with these addresses to the proxy.
    Proxied(ProxiedConnection),
    /// The proxy itself, for example with a health check (`LOCAL`).
    Local,
    /// A client whose address is not given (`UNKNOWN`) or is not an IP address.
    Unknown,
}

/// The reason why the PROXY header was rejected.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The connection failed or ended within the header.
    #[error("the PROXY header cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The connection does not start with a PROXY header.
    #[error("the connection does not start with a PROXY header")]
    NoHeader,
    /// The header exceeds the maximum length.
    #[error("the PROXY header is too long")]
    TooLong,
    /// The version 1 header is malformed.
    #[error("the PROXY header is malformed: {0}")]
    Version1(#[from] v1::BinaryParseError),
    /// The version 1 header deviates from the specification, but the library `ppp` accepts it.
    #[error("the PROXY header is malformed")]
    Malformed,
    /// The version 2 header is malformed.
    #[error("the PROXY header is malformed: {0}")]
    Version2(#[from] v2::ParseError),
}

/// Read the header, and no byte after the header.
pub(super) async fn read_header(stream: &mut TcpStream) -> Result<ProxySource, ProxyError> {
    // Read as many bytes as the version 2 prefix has, because headers of both versions are longer.
    let mut header = vec![0; v2::PROTOCOL_PREFIX.len()];
    stream.read_exact(&mut header).await?;
    if header == v2::PROTOCOL_PREFIX {
        read_v2(stream, &mut header).await?;
    } else {
        read_v1(stream, &mut header).await?;
    }
    parse(&header)
}

/// Read a version 1 header, which ends with its line.
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
        // If the peeked bytes contain no newline, all of them belong to the header.
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

/// Read the variable part, whose length the fixed part of the header contains.
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

/// Parse a complete header.
///
/// # Errors An error if the header is malformed.
pub fn parse(header: &[u8]) -> Result<ProxySource, ProxyError> {
    if !header.starts_with(v2::PROTOCOL_PREFIX) {
        let header = v1::Header::try_from(header)?;
        // `ppp` also accepts a lone LF within an `UNKNOWN` header. §2.1 allows line ends only as CRLF and only at the
        // end.
        let line =
            header.header.strip_suffix("\r\n").filter(|line| !line.contains('\n')).ok_or(ProxyError::Malformed)?;
        let client = match header.addresses {
            v1::Addresses::Tcp4(tcp) => {
                proxied((tcp.source_address, tcp.source_port), (tcp.destination_address, tcp.destination_port))
            }
            v1::Addresses::Tcp6(tcp) => {
                proxied((tcp.source_address, tcp.source_port), (tcp.destination_address, tcp.destination_port))
            }
            v1::Addresses::Unknown => return Ok(ProxySource::Unknown),
        };
        // `ppp` also accepts ports with a `+`. §2.1 permits digits only, and no other part of the line can contain
        // a sign.
        return if line.contains('+') { Err(ProxyError::Malformed) } else { Ok(ProxySource::Proxied(client)) };
    }
    let header = v2::Header::try_from(header)?;
    Ok(match (header.command, header.protocol, header.addresses) {
        (v2::Command::Local, _, _) => ProxySource::Local,
        (v2::Command::Proxy, v2::Protocol::Stream, v2::Addresses::IPv4(tcp)) => ProxySource::Proxied(proxied(
            (tcp.source_address, tcp.source_port),
            (tcp.destination_address, tcp.destination_port),
        )),
        (v2::Command::Proxy, v2::Protocol::Stream, v2::Addresses::IPv6(tcp)) => ProxySource::Proxied(proxied(
            (tcp.source_address, tcp.source_port),
            (tcp.destination_address, tcp.destination_port),
        )),
        // Ignore the address if the connection is not TCP over IP (§2.2).
        (v2::Command::Proxy, _, _) => ProxySource::Unknown,
    })
}

fn proxied<A: Into<IpAddr>>(source: (A, u16), destination: (A, u16)) -> ProxiedConnection {
    ProxiedConnection::new(SocketAddr::from(source), Some(SocketAddr::from(destination)))
}
