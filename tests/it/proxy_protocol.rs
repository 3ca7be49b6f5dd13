//! The PROXY protocol: the gateway takes client addresses only from trusted proxies, and sends them to upstreams.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use crate::support::MAX_WAIT;
use crate::support::certificates::{NOW, Pair, TlsClient, tls};
use crate::support::client::Client;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::redis::free_port;
use crate::support::reload::{reloads, with_admin};
use crate::support::upstream::{Upstream, read_request, serve};
use rustls::version::TLS13;

/// The address of the trusted proxy.
const PROXY: [u8; 4] = [127, 0, 0, 9];
const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n";

fn gateway(upstream: &Upstream, more: &str) -> Gateway {
    Gateway::start(&format!(
        "{more}\n[client_ip]\ntrusted_proxies = [\"127.0.0.9/32\"]\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\nproxy_protocol = true\n[upstream.u]\nservers = [\"{}\"]\n\
         [limit.ip]\nby = \"ip\"\nquota = \"100/24h\"\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nupstream = \"u\"\nlimits = [\"ip\"]\n",
        upstream.url()
    ))
}

fn from_proxy(address: SocketAddr) -> Client {
    Client::connect_from(PROXY.into(), address)
}

/// Return a PROXY header of version 2. `command` is the byte with version and command, `family` the byte with address
/// family and protocol. `rest` contains the addresses and TLVs.
fn v2(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let length = u16::try_from(rest.len()).unwrap().to_be_bytes();
    [SIGNATURE, &[command, family], &length, rest].concat()
}

fn ipv4(source: [u8; 4]) -> Vec<u8> {
    [&source[..], &[192, 0, 2, 1], &[0x30, 0x39], &[0x01, 0xbb]].concat()
}

fn ipv6(source: &str) -> Vec<u8> {
    let [source, destination] = [source, "2001:db8::ffff"].map(|text| text.parse::<std::net::Ipv6Addr>().unwrap());
    [&source.octets()[..], &destination.octets(), &[0x30, 0x39], &[0x01, 0xbb]].concat()
}

#[test]
fn client_address_is_read_from_the_proxy_header() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream, "");
    // A TLV of type 2 (authority) and one of type 4 (padding).
    let tlvs = [&b"\x02\x00\x04gate"[..], b"\x04\x01\x00", &[0; 256]].concat();
    for (header, client) in [
        (b"PROXY TCP4 198.51.100.1 192.0.2.1 12345 443\r\n".to_vec(), "198.51.100.1"),
        (b"PROXY TCP6 2001:db8::1 2001:db8::ffff 0 65535\r\n".to_vec(), "2001:db8::1"),
        (
            b"PROXY TCP6 ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff1 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 65535 65535\r\n"
                .to_vec(),
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff1",
        ),
        (b"PROXY TCP6 ::ffff:198.51.100.2 ::ffff:192.0.2.1 1 2\r\n".to_vec(), "198.51.100.2"),
        (v2(0x21, 0x11, &ipv4([198, 51, 100, 3])), "198.51.100.3"),
        (v2(0x21, 0x11, &[ipv4([198, 51, 100, 4]), tlvs.clone()].concat()), "198.51.100.4"),
        (v2(0x21, 0x21, &ipv6("2001:db8:0:1::1")), "2001:db8:0:1::1"),
        (v2(0x21, 0x21, &[ipv6("2001:db8:0:2::1"), tlvs].concat()), "2001:db8:0:2::1"),
    ] {
        let what = String::from_utf8_lossy(&header).into_owned();
        // The gateway ignores client addresses in headers of the request on this connection.
        let claims = "GET / HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: 203.0.113.7\r\nX-Real-IP: 203.0.113.7\r\n\r\n";
        let mut together = from_proxy(gateway.address);
        together.send(&[&header, claims.as_bytes()].concat());
        assert_eq!(together.reply().unwrap_or_else(|| panic!("{what}")).remaining("ip"), 99, "{what}");
        let seen = upstream.last();
        assert_eq!(seen.headers("x-forwarded-for"), [client], "{what}");
        assert!(seen.headers("x-real-ip").is_empty(), "{what}");
        assert_eq!(together.get("/").remaining("ip"), 98, "{what}: the next request of the connection");
        // Send the PROXY header and the request byte by byte.
        let mut pieces = from_proxy(gateway.address);
        header.iter().chain(GET).for_each(|byte| pieces.send(&[*byte]));
        assert_eq!(pieces.reply().unwrap_or_else(|| panic!("{what}")).remaining("ip"), 97, "{what}");
    }
}

#[test]
fn proxy_header_without_address_means_the_proxy_itself() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream, "");
    let claims = b"GET / HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: 203.0.113.7\r\n\r\n";
    // With LOCAL, the proxy itself is the client. UNKNOWN has no client address.
    for (header, trusted) in [
        (b"PROXY UNKNOWN\r\n".to_vec(), false),
        (b"PROXY UNKNOWN 198.51.100.1 192.0.2.1 1 2\r\n".to_vec(), false),
        (v2(0x20, 0x00, &[]), true),
        (v2(0x20, 0x11, &ipv4([198, 51, 100, 3])), true),
        (v2(0x21, 0x00, &[]), false),
        (v2(0x21, 0x00, &ipv4([198, 51, 100, 3])), false),
        (v2(0x21, 0x31, &[7; 216]), false),
        (v2(0x21, 0x12, &ipv4([198, 51, 100, 3])), false),
    ] {
        let what = String::from_utf8_lossy(&header).into_owned();
        let mut client = from_proxy(gateway.address);
        client.send(&[&header, &claims[..]].concat());
        assert_eq!(client.reply().unwrap_or_else(|| panic!("{what}")).status, 200, "{what}");
        let expected = if trusted { "203.0.113.7, 127.0.0.9" } else { "127.0.0.9" };
        assert_eq!(upstream.last().headers("x-forwarded-for"), [expected], "{what}");
    }
    // Only the six requests without a client address were charged to the proxy's address. This request is the seventh.
    let mut client = from_proxy(gateway.address);
    client.send(&[b"PROXY UNKNOWN\r\n", GET].concat());
    assert_eq!(client.reply().unwrap().remaining("ip"), 93);
}

#[test]
fn connection_without_valid_proxy_header_is_closed() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream, "");
    let long = format!("PROXY TCP4 198.51.100.1 192.0.2.1 1 2{}\r\n", " ".repeat(70));
    let mut cases: Vec<Vec<u8>> = [
        // PROXY headers of version 1 with errors (§2.1 of the specification).
        "PROXY TCP4 198.51.100.1 192.0.2.1 1\r\n",
        "PROXY TCP4 198.51.100.1 192.0.2.1 1 2 3\r\n",
        "PROXY TCP4 198.51.100.1 192.0.2.1 1 2\n",
        "PROXY TCP4 198.51.100.1 192.0.2.1 1 2\r",
        "PROXY TCP4 198.51.100.1 192.0.2.1 1 65536\r\n",
        "PROXY TCP4 198.51.100.1 192.0.2.1 -1 2\r\n",
        "PROXY TCP4 198.51.100.1 192.0.2.1 01 2\r\n",
        "PROXY TCP4 198.51.100.1 192.0.2.1 +1 2\r\n",
        "PROXY TCP6 2001:db8::1 2001:db8::2 1 +2\r\n",
        "PROXY TCP4 198.51.100.256 192.0.2.1 1 2\r\n",
        "PROXY TCP4 198.51.100.01 192.0.2.1 1 2\r\n",
        "PROXY TCP4 2001:db8::1 2001:db8::2 1 2\r\n",
        "PROXY TCP6 198.51.100.1 192.0.2.1 1 2\r\n",
        "PROXY TCP6 2001:db8:::1 2001:db8::2 1 2\r\n",
        "PROXY TCP6 fe80::1%eth0 2001:db8::2 1 2\r\n",
        "PROXY  TCP4 198.51.100.1 192.0.2.1 1 2\r\n",
        "PROXY TCP4  198.51.100.1 192.0.2.1 1 2\r\n",
        "PROXY TCP4 198.51.100.1 192.0.2.1 1 2 \r\n",
        "PROXY TCP4 localhost 192.0.2.1 1 2\r\n",
        "PROXY TCP5 198.51.100.1 192.0.2.1 1 2\r\n",
        "PROXY UDP4 198.51.100.1 192.0.2.1 1 2\r\n",
        "PROXY tcp4 198.51.100.1 192.0.2.1 1 2\r\n",
        "PROXY \r\nTCP4 198.51.100.1 192.0.2.1 1 2\r\n",
        "PROXY TCP4 198.51.100.1\r\n192.0.2.1 1 2\r\n",
        "PROXY UNKNOWN",
        "PROXY UNKNOWN\n",
        "PROXY UNKNOWN x \n",
        "proxy TCP4 198.51.100.1 192.0.2.1 1 2\r\n",
        " PROXY TCP4 198.51.100.1 192.0.2.1 1 2\r\n",
        "\r\nPROXY TCP4 198.51.100.1 192.0.2.1 1 2\r\n",
        &long,
        &"PROXY ".repeat(100),
        // No PROXY header.
        "",
        "\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\x11\x03\x03\x00\x00",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec();
    cases.extend([
        b"PROXY TCP4 198.51.100.\xff 192.0.2.1 1 2\r\n".to_vec(),
        // PROXY headers of version 2 with errors (§2.2): version, command, family, protocol, lengths, signature.
        v2(0x11, 0x11, &ipv4([198, 51, 100, 1])),
        v2(0x31, 0x11, &ipv4([198, 51, 100, 1])),
        v2(0x22, 0x11, &ipv4([198, 51, 100, 1])),
        v2(0x2f, 0x11, &ipv4([198, 51, 100, 1])),
        v2(0x21, 0x41, &ipv4([198, 51, 100, 1])),
        v2(0x21, 0x13, &ipv4([198, 51, 100, 1])),
        v2(0x21, 0x11, &ipv4([198, 51, 100, 1])[..11]),
        v2(0x21, 0x11, &[]),
        v2(0x21, 0x21, &ipv4([198, 51, 100, 1])),
        v2(0x21, 0x11, &[0; 4081]),
        v2(0x21, 0x11, &[0; 65535]),
        [&SIGNATURE[..11], b"\r", &v2(0x21, 0x11, &ipv4([198, 51, 100, 1]))[12..]].concat(),
    ]);
    for header in cases {
        let what = String::from_utf8_lossy(&header[..header.len().min(80)]).into_owned();
        let mut client = from_proxy(gateway.address);
        // The gateway may close the connection before all bytes are sent.
        let _ = std::io::Write::write_all(client.stream.get_mut(), &[&header, GET].concat());
        client.assert_closed(&what);
    }
    for start in
        [&b""[..], b"PROXY", b"PROXY UNKNOWN", b"PROXY UNKNOWN\r", SIGNATURE, &v2(0x21, 0x11, &ipv4(PROXY))[..27]]
    {
        let mut client = from_proxy(gateway.address);
        client.send(start);
        client.stream.get_mut().shutdown(std::net::Shutdown::Write).unwrap();
        client.assert_closed(&String::from_utf8_lossy(start));
    }
    // The gateway reads one PROXY header per connection. A second one is data of the client, here an invalid request.
    let mut twice = from_proxy(gateway.address);
    twice.send(b"PROXY TCP4 198.51.100.1 192.0.2.1 1 2\r\nPROXY TCP4 198.51.100.2 192.0.2.1 1 2\r\n\r\n");
    assert_eq!(twice.reply().unwrap().status, 400);
    assert_eq!(upstream.count(), 0);
}

#[test]
fn connection_of_an_untrusted_peer_is_closed() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream, "");
    for start in
        [b"PROXY TCP4 198.51.100.1 192.0.2.1 1 2\r\n".to_vec(), v2(0x21, 0x11, &ipv4(PROXY)), v2(0x20, 0, &[]), vec![]]
    {
        let mut untrusted = gateway.client();
        let _ = std::io::Write::write_all(untrusted.stream.get_mut(), &[&start, GET].concat());
        untrusted.assert_closed("an untrusted peer");
    }
    assert_eq!(upstream.count(), 0);
    eventually("the untrusted peer is logged", || {
        gateway.log().contains("the peer is not in client_ip.trusted_proxies")
    });
    let log = gateway.log();
    assert_eq!(log.matches("is not in client_ip.trusted_proxies").count(), 1, "once:\n{log}");
    assert!(log.contains(r#""client":"127.0.0.1""#), "{log}");
}

#[test]
fn trusted_proxy_without_proxy_header_is_logged_once() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream, "");
    for _ in 0..3 {
        let mut proxy = from_proxy(gateway.address);
        proxy.send(GET);
        proxy.assert_closed("a proxy without a PROXY header");
    }
    let message = "the trusted proxy sent no PROXY header, which `proxy_protocol` requires";
    eventually("the missing header is logged", || gateway.log().contains(message));
    let log = gateway.log();
    assert_eq!(log.matches(message).count(), 1, "{log}");
    assert!(log.contains(r#""proxy":"127.0.0.9""#), "{log}");
}

#[test]
fn listener_without_proxy_protocol_rejects_proxy_headers() {
    let upstream = Upstream::start();
    let config = "[client_ip]\ntrusted_proxies = [\"127.0.0.9/32\"]\n[[route]]\nname = \"r\"\npath = \"/{*rest}\"\nrespond = { status = 200 }\n";
    for more in ["", "[[listener]]\naddress = \"127.0.0.1:0\"\nproxy_protocol = false\n"] {
        let gateway = Gateway::start(&format!("{config}{more}"));
        for header in [b"PROXY TCP4 198.51.100.1 192.0.2.1 1 2\r\n".to_vec(), v2(0x21, 0x11, &ipv4([198, 51, 100, 1]))]
        {
            let mut client = from_proxy(gateway.address);
            client.send(&[&header, GET].concat());
            assert_eq!(client.reply().map(|reply| reply.status), Some(400), "{}", String::from_utf8_lossy(&header));
        }
    }
    assert_eq!(upstream.count(), 0);
}

#[test]
fn proxy_header_and_first_head_share_header_timeout() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream, "[server]\nheader_timeout = \"300ms\"\n");
    let v2 = v2(0x21, 0x11, &ipv4([198, 51, 100, 1]));
    for start in [&b""[..], b"P", b"PROXY TCP4 198.51.100.1 ", b"PROXY UNKNOWN\r\n", &v2[..12], &v2[..27], &v2] {
        let mut client = from_proxy(gateway.address);
        client.send(start);
        client.assert_closed(&String::from_utf8_lossy(start));
    }
}

#[test]
fn proxy_header_precedes_tls_and_its_address_is_logged() {
    let upstream = Upstream::start();
    let folder = tempfile::tempdir().unwrap();
    let server = Pair::server("gate.test", NOW);
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("server.pem"), &server.cert).unwrap();
    std::fs::write(path("server.key"), &server.key).unwrap();
    let gateway = Gateway::start(&format!(
        "[client_ip]\ntrusted_proxies = [\"127.0.0.9/32\"]\n[log]\nformat = \"json\"\naccess = \"{}\"\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\nproxy_protocol = true\n\
         tls.certificates = [{{ cert = \"{}\", key = \"{}\" }}]\n[upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nupstream = \"u\"\n",
        path("access.log"),
        path("server.pem"),
        path("server.key"),
        upstream.url()
    ));
    let config = tls(&[&server.der], None, &[&TLS13]);
    for (header, client) in [
        (b"PROXY TCP4 198.51.100.1 192.0.2.1 1 2\r\n".to_vec(), "198.51.100.1"),
        (v2(0x21, 0x21, &ipv6("2001:db8::5")), "2001:db8::5"),
    ] {
        let mut before = from_proxy(gateway.address);
        before.send(&header);
        let mut inside = TlsClient::handshake_over(before.stream.into_inner(), &config, "gate.test").unwrap();
        assert_eq!(inside.get("/").status, 200);
        assert_eq!(upstream.last().headers("x-forwarded-for"), [client]);
        assert_eq!(upstream.last().headers("x-forwarded-proto"), ["https"]);
        let line = format!("\"client\":\"{}\"", client.parse::<IpAddr>().unwrap());
        eventually("the log record is written", || {
            std::fs::read_to_string(path("access.log")).unwrap().contains(&line)
        });
    }
}

#[test]
fn unknown_client_stays_untrusted_after_a_reload() {
    let upstream = Upstream::start();
    let config = |trusted: &str| {
        format!(
            "[client_ip]\ntrusted_proxies = [{trusted}]\n\
             [[listener]]\naddress = \"127.0.0.1:0\"\nproxy_protocol = true\n[upstream.u]\nservers = [\"{}\"]\n\
             [[route]]\nname = \"r\"\npath = \"/\"\nupstream = \"u\"\n",
            upstream.url()
        )
    };
    let gateway = Gateway::start(&with_admin(&config("\"127.0.0.9\"")));
    let mut connections: Vec<_> = [(&b"PROXY UNKNOWN\r\n"[..], false), (&v2(0x20, 0x00, &[]), true)]
        .into_iter()
        .map(|(header, trusted)| {
            let mut client = from_proxy(gateway.address);
            client.send(header);
            (client, trusted)
        })
        .collect();
    let mut check = |what: &str| {
        for (client, trusted) in &mut connections {
            assert_eq!(client.get_with("/", &[("x-forwarded-for", "203.0.113.7")]).status, 200, "{what}");
            let expected = if *trusted { "203.0.113.7, 127.0.0.9" } else { "127.0.0.9" };
            assert_eq!(upstream.last().headers("x-forwarded-for"), [expected], "{what}");
        }
    };
    check("before the reload");
    reloads(&gateway, &config("\"127.0.0.9\", \"192.0.2.1\""));
    check("after the reload");
}

// ---- towards upstreams ---------------------------------------------------------------------------

/// A PROXY header as an upstream reads it: the command and, if present, the source and the destination.
type Header = (u8, Option<(SocketAddr, SocketAddr)>);

/// Read exactly one header of version 2. Return `None` at the end of the stream.
fn read_proxy_header(stream: &mut TcpStream) -> Option<Header> {
    let mut fixed = [0; 16];
    stream.read_exact(&mut fixed).ok()?;
    assert_eq!(&fixed[..12], SIGNATURE, "a PROXY header is the first on a connection");
    let mut addresses = vec![0; usize::from(u16::from_be_bytes([fixed[14], fixed[15]]))];
    stream.read_exact(&mut addresses).unwrap();
    let port = |at: usize| u16::from_be_bytes([addresses[at], addresses[at + 1]]);
    let pair = match (fixed[13], addresses.len()) {
        (0x11, 12) => {
            let ip = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&addresses[at..at + 4]).unwrap());
            Some((SocketAddr::new(ip(0), port(8)), SocketAddr::new(ip(4), port(10))))
        }
        (0x21, 36) => {
            let ip = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&addresses[at..at + 16]).unwrap());
            Some((SocketAddr::new(ip(0), port(32)), SocketAddr::new(ip(16), port(34))))
        }
        (0x00, 0) => None,
        other => panic!("family and length {other:?}"),
    };
    Some((fixed[12], pair))
}

/// An upstream that records the PROXY header of each connection and, for each request, the index of its connection.
struct Receiver {
    address: SocketAddr,
    headers: Arc<Mutex<Vec<Header>>>,
    requests: Arc<Mutex<Vec<usize>>>,
}

impl Receiver {
    fn start() -> Receiver {
        let (headers, requests) = (Arc::<Mutex<Vec<Header>>>::default(), Arc::<Mutex<Vec<usize>>>::default());
        let (record, count) = (headers.clone(), requests.clone());
        let address = serve(move |mut stream| {
            let Some(header) = read_proxy_header(&mut stream) else { return };
            let index = {
                let mut headers = record.lock().unwrap();
                headers.push(header);
                headers.len() - 1
            };
            while read_request(&mut stream).is_some() {
                count.lock().unwrap().push(index);
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
            }
        });
        Receiver { address, headers, requests }
    }

    fn headers(&self) -> Vec<Header> {
        self.headers.lock().unwrap().clone()
    }

    fn requests(&self) -> Vec<usize> {
        self.requests.lock().unwrap().clone()
    }
}

fn sending(receiver: SocketAddr, more: &str) -> String {
    format!(
        "[server]\nworkers = 1\n[client_ip]\ntrusted_proxies = [\"127.0.0.9/32\"]\n\
         [upstream.u]\nservers = [\"http://{receiver}\"]\nproxy_protocol = \"v2\"\npool_idle_timeout = \"1h\"\n{more}\
         [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\n"
    )
}

#[test]
fn each_upstream_connection_has_the_addresses_of_one_client() {
    let receiver = Receiver::start();
    let gateway = Gateway::start(&sending(receiver.address, ""));
    let mut clients = [Client::connect(gateway.address), Client::connect_from([127, 0, 0, 5].into(), gateway.address)];
    let own = clients.each_ref().map(|client| client.stream.get_ref().local_addr().unwrap());
    for _ in 0..3 {
        for client in &mut clients {
            assert_eq!(client.request("POST", "/", &[], b"body").status, 200);
        }
    }
    let of = |source| (0x21, Some((source, gateway.address)));
    assert_eq!(receiver.headers(), own.map(of), "each client has its own upstream connection");
    assert_eq!(receiver.requests(), [0, 1, 0, 1, 0, 1], "each connection is reused for its client");

    // For a client behind a trusted proxy, the header has the client's address with port 0, whichever connection of the
    // proxy it uses.
    let mut proxies = [from_proxy(gateway.address), from_proxy(gateway.address)];
    for client in ["192.0.2.1", "2001:db8::1", "192.0.2.1"] {
        for proxy in &mut proxies {
            assert_eq!(proxy.get_with("/", &[("X-Forwarded-For", client)]).status, 200);
        }
    }
    let mapped = SocketAddr::new("::ffff:127.0.0.1".parse().unwrap(), gateway.address.port());
    let expected = [
        (0x21, Some(("192.0.2.1:0".parse().unwrap(), gateway.address))),
        (0x21, Some(("[2001:db8::1]:0".parse().unwrap(), mapped))),
    ];
    assert_eq!(receiver.headers()[2..], expected);
    assert_eq!(receiver.requests()[6..], [2, 2, 3, 3, 2, 2]);
}

#[test]
fn addresses_of_a_received_proxy_header_are_sent_on() {
    let receiver = Receiver::start();
    let listener = "[[listener]]\naddress = \"127.0.0.1:0\"\nproxy_protocol = true\n";
    let gateway = Gateway::start(&(sending(receiver.address, "") + listener));
    for header in [&b"PROXY TCP4 198.51.100.1 192.0.2.1 12345 443\r\n"[..], &v2(0x21, 0x21, &ipv6("2001:db8::5"))] {
        let mut client = from_proxy(gateway.address);
        client.send(header);
        client.send(GET);
        assert_eq!(client.reply().unwrap().status, 200);
    }
    let pair = |source: &str, destination: &str| Some((source.parse().unwrap(), destination.parse().unwrap()));
    assert_eq!(
        receiver.headers(),
        [
            (0x21, pair("198.51.100.1:12345", "192.0.2.1:443")),
            (0x21, pair("[2001:db8::5]:12345", "[2001:db8::ffff]:443")),
        ]
    );
}

#[test]
fn health_checks_send_local_and_tls_follows_the_header() {
    let receiver = Receiver::start();
    let _gateway = Gateway::start(&sending(receiver.address, "health_check = { path = \"/\", interval = \"1ms\" }\n"));
    eventually("a check", || !receiver.headers().is_empty());
    assert_eq!(receiver.headers()[0], (0x20, None));

    let (first, records) = channel();
    let first = Mutex::new(first);
    let address = serve(move |mut stream| {
        let header = read_proxy_header(&mut stream);
        let mut record = [0; 1];
        stream.read_exact(&mut record).unwrap();
        first.lock().unwrap().send((header, record)).unwrap();
    });
    let text = sending(address, "").replace("http://", "https://");
    let gateway = Gateway::start(&text);
    let mut client = gateway.client();
    let own = client.stream.get_ref().local_addr().unwrap();
    assert_eq!(client.get("/").status, 502);
    let (header, record) = records.recv_timeout(MAX_WAIT).unwrap();
    assert_eq!(header, Some((0x21, Some((own, gateway.address)))));
    assert_eq!(record, [0x16], "a TLS handshake record (RFC 8446 §5.1)");
}

#[test]
fn copies_of_a_mirror_have_the_address_of_their_client() {
    let (receiver, upstream) = (Receiver::start(), Upstream::start());
    let api = format!("[upstream.api]\nservers = [\"{}\"]\n", upstream.url());
    let text = sending(receiver.address, &api)
        .replace("upstream = \"u\"\n", "upstream = \"api\"\nmirror = { upstream = \"u\" }\n");
    let gateway = Gateway::start(&text);
    let mut client = gateway.client();
    let own = client.stream.get_ref().local_addr().unwrap();
    assert_eq!(client.get("/").status, 200);
    eventually("the copy arrives", || receiver.requests().len() == 1);
    assert_eq!(receiver.headers(), [(0x21, Some((own, gateway.address)))]);
}

#[test]
fn idle_connections_of_many_clients_are_bounded() {
    let receiver = Receiver::start();
    let gateway = Gateway::start(&sending(receiver.address, ""));
    let base = descriptors(&gateway);
    for _ in 0..200 {
        assert_eq!(gateway.get("/").status, 200);
    }
    assert_eq!(receiver.headers().len(), 200);
    // The gateway keeps at most 64 idle upstream connections. A few client connections are still closing.
    eventually("the other connections are closed", || descriptors(&gateway) < base + 80);
}

fn descriptors(gateway: &Gateway) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", gateway.child.id())).unwrap().count()
}

/// nginx accepts the PROXY header that the gateway sends.
#[test]
fn nginx_reads_the_header() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let port = free_port();
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {};\n", at(kind)))
        .concat();
    let text = format!(
        "daemon off; master_process off; pid {}; error_log {};\nevents {{}}\nhttp {{ access_log off;\n{paths}\
         server {{ listen 127.0.0.1:{port} proxy_protocol; return 200 \"$proxy_protocol_addr:$proxy_protocol_port \
         $proxy_protocol_server_addr:$proxy_protocol_server_port\"; }} }}\n",
        at("pid"),
        at("log")
    );
    std::fs::write(folder.path().join("nginx.conf"), text).unwrap();
    let mut command = Command::new("nginx");
    command.env("PATH", format!("{}:/usr/sbin", std::env::var("PATH").unwrap())).arg("-c").arg(at("nginx.conf"));
    let mut nginx = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("nginx listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    let gateway = Gateway::start(&sending(([127, 0, 0, 1], port).into(), ""));
    let mut client = gateway.client();
    let own = client.stream.get_ref().local_addr().unwrap();
    let said = (client.get("/").text().to_owned(), client.get("/").text().to_owned());
    nginx.kill().unwrap();
    nginx.wait().unwrap();
    let expected = format!("{own} {}", gateway.address);
    assert_eq!(said, (expected.clone(), expected));
}
