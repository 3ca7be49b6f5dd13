//! The PROXY protocol: the parser accepts only headers that follow the specification, and returns the addresses in the
//! header.

use std::net::IpAddr;

use sluicegate::listener::handshake::{ProxySource, parse_proxy_header};
use sluicegate::upstream::connector::ProxiedConnection;

const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

pub(crate) fn run(data: &[u8]) {
    let Ok(sender) = parse_proxy_header(data) else { return };
    let length = match data.strip_prefix(SIGNATURE) {
        Some([command, family, high, low, rest @ ..]) => {
            let length = usize::from(u16::from_be_bytes([*high, *low]));
            let rest = rest.get(..length).expect("the header is not longer than the data");
            version_2(*command, *family, rest, &sender);
            SIGNATURE.len() + 4 + length
        }
        Some(_) => panic!("an incomplete header is accepted: {}", data.escape_ascii()),
        None => {
            let end = data.windows(2).position(|pair| pair == b"\r\n").expect("a version 1 header ends with CR LF") + 2;
            let line = std::str::from_utf8(&data[..end]).expect("version 1 is text");
            version_1(line, &sender);
            end
        }
    };
    // The result does not depend on the bytes after the header, and an incomplete header is an error.
    assert_eq!(parse_proxy_header(&data[..length]).ok().as_ref(), Some(&sender), "{}", data.escape_ascii());
    assert_eq!(
        parse_proxy_header(&[&data[..length], b"PROXY "].concat()).ok().as_ref(),
        Some(&sender),
        "{}",
        data.escape_ascii()
    );
    for cut in 0..length {
        assert!(parse_proxy_header(&data[..cut]).is_err(), "{} of {}", cut, data.escape_ascii());
    }
}

/// Check a version 1 header against §2.1 of the specification: single spaces, two addresses of the family, and two
/// ports in decimal digits.
fn version_1(line: &str, sender: &ProxySource) {
    assert!(line.len() <= 107, "{line:?}");
    let fields: Vec<_> = line.strip_suffix("\r\n").expect("the line ends with CR LF").split(' ').collect();
    match (sender, &fields[..]) {
        (ProxySource::Proxied(connection), ["PROXY", family, source, destination, ports @ ..]) => {
            let [source, destination] = [source, destination].map(|text| text.parse::<IpAddr>().expect("an address"));
            assert_eq!(connection.source.ip(), source.to_canonical(), "{line:?}");
            assert_eq!(connection.destination.ip(), destination.to_canonical(), "{line:?}");
            assert_eq!(source.is_ipv4(), *family == "TCP4", "{line:?}");
            assert!(source.is_ipv4() == destination.is_ipv4() && matches!(*family, "TCP4" | "TCP6"), "{line:?}");
            let [of_source, of_destination] = ports else { panic!("two ports: {line:?}") };
            for port in [of_source, of_destination] {
                let number: u16 = port.parse().expect("a port");
                assert_eq!(number.to_string(), **port, "{line:?}");
            }
            let ports = [connection.source, connection.destination].map(|address| address.port().to_string());
            assert_eq!(ports, [*of_source, *of_destination], "{line:?}");
            let again = format!("PROXY {family} {source} {destination} {of_source} {of_destination}\r\n");
            assert_eq!(parse_proxy_header(again.as_bytes()).ok().as_ref(), Some(sender), "{line:?} is {again:?}");
        }
        (ProxySource::Unknown, ["PROXY", "UNKNOWN", ..]) => {}
        _ => panic!("{sender:?} of {line:?}"),
    }
}

/// Check a version 2 header against §2.2 of the specification. A proxy may add any data after the addresses.
fn version_2(command: u8, family: u8, rest: &[u8], sender: &ProxySource) {
    let header = |rest: &[u8]| {
        let length = u16::try_from(rest.len()).expect("addresses are short").to_be_bytes();
        [SIGNATURE, &[command, family], &length, rest].concat()
    };
    match (sender, command, family) {
        (ProxySource::Local, 0x20, _) => {}
        (ProxySource::Proxied(connection), 0x21, 0x11) => {
            let octets = |bytes: &[u8]| IpAddr::from(<[u8; 4]>::try_from(bytes).expect("four bytes"));
            assert_eq!(connection.source.ip(), octets(&rest[..4]));
            assert_eq!(connection.destination.ip(), octets(&rest[4..8]));
            ports(connection, &rest[8..12]);
            assert_eq!(parse_proxy_header(&header(&rest[..12])).ok().as_ref(), Some(sender));
        }
        (ProxySource::Proxied(connection), 0x21, 0x21) => {
            let octets = |bytes: &[u8]| IpAddr::from(<[u8; 16]>::try_from(bytes).expect("sixteen bytes"));
            assert_eq!(connection.source.ip(), octets(&rest[..16]).to_canonical());
            assert_eq!(connection.destination.ip(), octets(&rest[16..32]).to_canonical());
            ports(connection, &rest[32..36]);
            assert_eq!(parse_proxy_header(&header(&rest[..36])).ok().as_ref(), Some(sender));
        }
        (ProxySource::Unknown, 0x21, family) => assert!(!matches!(family, 0x11 | 0x21)),
        _ => panic!("{sender:?} of {command:#x}, {family:#x}"),
    }
}

fn ports(connection: &ProxiedConnection, bytes: &[u8]) {
    let ports = [connection.source, connection.destination].map(|address| address.port().to_be_bytes());
    assert_eq!(ports.as_flattened(), bytes);
}
