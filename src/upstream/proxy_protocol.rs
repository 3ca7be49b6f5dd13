//! PROXY protocol, version 2, for connections to upstreams: the address of the client at the start of each connection
//! (<https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt>).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ppp::v2::PROTOCOL_PREFIX;

/// Version 2, for a connection that the gateway makes for itself, such as a health check (`LOCAL`, §2.2).
const LOCAL: u8 = 0x20;
/// Version 2, for a connection on behalf of a client (`PROXY`).
const PROXY: u8 = 0x21;
/// Code of a header without addresses.
const UNSPECIFIED: u8 = 0x00;
/// Code of a header with the addresses of TCP over IPv4.
const TCP4: u8 = 0x11;
/// Code of a header with the addresses of TCP over IPv6.
const TCP6: u8 = 0x21;

/// The connection of a client in the form in which it is sent to the upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxiedConnection {
    /// Address and port of the client. The port is 0 if it is unknown.
    pub source: SocketAddr,
    /// Address and port that the client connected to.
    pub destination: SocketAddr,
}

impl ProxiedConnection {
    /// Create the connection of a client. An unknown destination becomes the unspecified address of the same family,
    /// with port 0.
    pub fn new(source: SocketAddr, destination: Option<SocketAddr>) -> Self {
        let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
        let source = canonical(source);
        let unknown = match source {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let destination = destination.map_or(SocketAddr::new(unknown, 0), canonical);
        ProxiedConnection { source, destination }
    }
}

/// Return the PROXY header of a connection on behalf of a client, or of a connection of the gateway itself.
pub(super) fn header(client: Option<&ProxiedConnection>) -> Vec<u8> {
    let mut addresses = Vec::new();
    let (command, family) = match client {
        None => (LOCAL, UNSPECIFIED),
        Some(ProxiedConnection { source, destination }) => {
            let family = match (source.ip(), destination.ip()) {
                (IpAddr::V4(source), IpAddr::V4(destination)) => {
                    addresses.extend_from_slice(&source.octets());
                    addresses.extend_from_slice(&destination.octets());
                    TCP4
                }
                // Map an IPv4 address to IPv6 if the other address is IPv6, as HAProxy does, because both must have the
                // same family.
                (source, destination) => {
                    addresses.extend_from_slice(&mapped(source).octets());
                    addresses.extend_from_slice(&mapped(destination).octets());
                    TCP6
                }
            };
            addresses.extend_from_slice(&source.port().to_be_bytes());
            addresses.extend_from_slice(&destination.port().to_be_bytes());
            (PROXY, family)
        }
    };
    let mut header = PROTOCOL_PREFIX.to_vec();
    header.extend_from_slice(&[command, family]);
    // The length is known: the header has at most 36 bytes.
    header.extend_from_slice(&(addresses.len() as u16).to_be_bytes());
    header.extend_from_slice(&addresses);
    header
}

fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header_of(source: &str, destination: Option<&str>) -> Vec<u8> {
        let parse = |text: &str| text.parse().unwrap();
        header(Some(&ProxiedConnection::new(parse(source), destination.map(parse))))
    }

    #[test]
    fn header_has_both_addresses_in_one_family() {
        let prefix = b"\r\n\r\n\0\r\nQUIT\n";
        let v4 = b"\x21\x11\x00\x0c\xc0\x00\x02\x01\x0a\x00\x00\x01\x30\x39\x01\xbb";
        assert_eq!(header_of("192.0.2.1:12345", Some("10.0.0.1:443")), [&prefix[..], v4].concat());
        let mixed = "2001:db8::1";
        let mixed = header_of(&format!("[{mixed}]:1"), Some("10.0.0.1:443"));
        assert_eq!(mixed[12..16], [0x21, 0x21, 0, 36]);
        assert_eq!(mixed[32..48], "::ffff:10.0.0.1".parse::<Ipv6Addr>().unwrap().octets());
        let dual_stack = header_of("[::ffff:192.0.2.1]:12345", Some("[::ffff:10.0.0.1]:443"));
        assert_eq!(dual_stack, [&prefix[..], v4].concat());
        assert_eq!(header_of("192.0.2.1:0", None)[16..], [192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(header(None), [&prefix[..], b"\x20\x00\x00\x00"].concat());
    }
}
