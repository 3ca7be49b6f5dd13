//! TLS towards clients: certificates by server name, ALPN, TLS versions, handshake errors.

use std::sync::Arc;

use crate::support::admin_listener::{ask, metric};
use crate::support::certificates::{Authority, NOW, Pair, TlsClient, tls};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::DnType;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const ROUTE: &str = "[limit.l]\nby = \"ip\"\nquota = \"100/24h\"\n\
                     [[route]]\nname = \"hello\"\npath = \"/hello\"\nlimits = [\"l\"]\nrespond = { status = 200, body = \"hello\" }\n";

fn certificate(name: &str) -> String {
    format!("{}/tests/certs/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn gateway(server: &str) -> Gateway {
    let pair = |name: &str| format!("{{ cert = \"{0}.pem\", key = \"{0}.key\" }}", certificate(name));
    let listener =
        format!("[[listener]]\naddress = \"127.0.0.1:0\"\ntls.certificates = [{}, {}]\n", pair("one"), pair("two"));
    Gateway::start(&format!("{server}{ROUTE}{listener}"))
}

/// Return a TLS connector that trusts only one certificate.
fn connector(trusted: &str, protocols: &[&[u8]]) -> TlsConnector {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(certificate(trusted)).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    TlsConnector::from(Arc::new(config))
}

async fn connect(
    gateway: &Gateway,
    connector: &TlsConnector,
    name: &'static str,
) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(gateway.address).await.unwrap();
    connector.connect(ServerName::try_from(name).unwrap(), stream).await
}

#[tokio::test]
async fn certificate_is_chosen_by_server_name() {
    let gateway = gateway("");
    for (name, trusted, expected) in [
        ("one.test", "one.pem", true),
        ("two.test", "two.pem", true),
        ("deep.two.test", "two.pem", true),
        ("two.test", "one.pem", false),
        // For an unknown server name, the gateway sends the first certificate. It does not match the name, so the
        // client rejects it.
        ("other.test", "one.pem", false),
        ("other.test", "two.pem", false),
    ] {
        let connected = connect(&gateway, &connector(trusted, &[]), name).await;
        assert_eq!(connected.is_ok(), expected, "{name}, trusting {trusted}: {connected:?}");
    }
}

#[tokio::test]
async fn alpn_agrees_on_http1_or_http2() {
    let gateway = gateway("");
    let request =
        |uri: &str| http::Request::builder().uri(uri).header("host", "one.test").body(Empty::<&[u8]>::new()).unwrap();
    let stream = connect(&gateway, &connector("one.pem", &[b"http/1.1"]), "one.test").await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let response = sender.send_request(request("/hello")).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");

    let stream = connect(&gateway, &connector("one.pem", &[b"h2", b"http/1.1"]), "one.test").await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let response = sender.send_request(request("https://one.test/hello")).await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.headers()["ratelimit"].to_str().unwrap().contains("r=98"), "{response:?}");
}

#[test]
fn http2_over_tls_without_alpn_is_rejected() {
    let gateway = gateway("");
    let der = CertificateDer::from_pem_file(certificate("one.pem")).unwrap();
    // Over TLS, a client must select HTTP/2 by ALPN (RFC 9113 §3.2).
    let mut client =
        TlsClient::handshake(&tls(&[&der], None, &[&rustls::version::TLS13]), gateway.address, "one.test").unwrap();
    client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    let mut answer = Vec::new();
    // The gateway closes or resets the connection without sending an HTTP/2 frame.
    let _ = std::io::Read::read_to_end(&mut client.stream, &mut answer);
    assert_eq!(answer, b"", "an HTTP/2 response");
}

/// Return a ClientHello for version 3.`minor`. TLS 1.0 is version 3.1, and TLS 1.1 is version 3.2 (RFC 5246 §7.4.1.2).
fn hello(minor: u8) -> Vec<u8> {
    // The ClientHello offers the cipher suites ECDHE-ECDSA-AES128-SHA and ECDHE-ECDSA-AES128-GCM-SHA256, and no
    // compression. Its extensions are groups, point formats and signature algorithms.
    let body = [&[3, minor][..], &[7; 32], &[0], &[0, 4, 0xc0, 0x09, 0xc0, 0x2b], &[1, 0]].concat();
    let groups = [0, 10, 0, 4, 0, 2, 0, 23, 0, 11, 0, 2, 1, 0, 0, 13, 0, 4, 0, 2, 4, 3];
    let body = [&body[..], &[0, groups.len() as u8], &groups].concat();
    let message = [&[1, 0, 0, body.len() as u8][..], &body].concat();
    [&[22, 3, 1, 0, message.len() as u8][..], &message].concat()
}

#[test]
fn only_tls_1_2_and_1_3_are_accepted() {
    let gateway = gateway("");
    let der = CertificateDer::from_pem_file(certificate("one.pem")).unwrap();
    for (version, expected) in [
        (&rustls::version::TLS12, rustls::ProtocolVersion::TLSv1_2),
        (&rustls::version::TLS13, rustls::ProtocolVersion::TLSv1_3),
    ] {
        let mut client = TlsClient::handshake(&tls(&[&der], None, &[version]), gateway.address, "one.test").unwrap();
        assert_eq!(client.stream.get_ref().conn.protocol_version(), Some(expected));
        assert_eq!(client.get("/hello").status, 200);
    }
    // Version 3.0 is SSL 3.0. Version 3.3 is TLS 1.2, so the response is a ServerHello.
    for (minor, answer) in [(0, Err(70)), (1, Err(70)), (2, Err(70)), (3, Ok(()))] {
        let mut client = gateway.client();
        client.send(&hello(minor));
        let mut record = [0; 7];
        std::io::Read::read_exact(&mut client.stream, &mut record).unwrap();
        // An alert is a record of type 21, and fatal is level 2. A handshake is type 22.
        let found = match record {
            [21, _, _, 0, 2, 2, alert] => Err(alert),
            [22, ..] => Ok(()),
            _ => panic!("3.{minor}: {record:?}"),
        };
        assert_eq!(found, answer, "3.{minor}: 70 is protocol_version");
    }
}

#[test]
fn connection_without_a_handshake_is_closed() {
    let gateway = gateway("[server]\nheader_timeout = \"300ms\"\n");
    for start in [&b""[..], b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"] {
        let mut client = gateway.client();
        client.send(start);
        let mut rest = Vec::new();
        // If the connection stayed open, the read would time out. A reset also counts as closed.
        let read = std::io::Read::read_to_end(&mut client.stream, &mut rest);
        let closed = read.as_ref().map_or_else(|error| error.kind() == std::io::ErrorKind::ConnectionReset, |_| true);
        assert!(closed, "{start:?} is kept open: {read:?}");
    }
}

/// Return a ClientHello with an invalid server name. TLS libraries do not send invalid names. So create a ClientHello
/// with a valid name, and replace this name by an invalid one of the same length.
fn hello_for(name: &str) -> Vec<u8> {
    let valid = "x".repeat(name.len() - 5) + ".test";
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = builder.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth();
    let server_name = ServerName::try_from(valid.clone()).unwrap();
    let mut bytes = Vec::new();
    rustls::ClientConnection::new(Arc::new(config), server_name).unwrap().write_tls(&mut bytes).unwrap();
    let at = bytes.windows(valid.len()).position(|part| part == valid.as_bytes()).unwrap();
    bytes[at..at + name.len()].copy_from_slice(name.as_bytes());
    bytes
}

#[test]
fn invalid_server_name_is_rejected_and_logged() {
    for (name, what) in [
        ("localhost:8443", "with a port, as `hey` sends it"),
        ("one.test:443", "with a port"),
        ("under score!.test", "with a space"),
        ("line\nbreak.test", "with a line end"),
    ] {
        let gateway = gateway("");
        for attempt in 0..20 {
            let mut client = gateway.client();
            // Every other attempt sends the ClientHello in two pieces.
            let hello = hello_for(name);
            let (first, rest) = hello.split_at(if attempt % 2 == 0 { hello.len() } else { 50 });
            client.send(first);
            client.send(rest);
            let mut answer = Vec::new();
            let _ = std::io::Read::read_to_end(&mut client.stream, &mut answer);
            assert!(matches!(answer[..], [21, _, _, 0, 2, 2, 47, ..]), "illegal_parameter, {what}: {answer:?}");
        }
        let log = gateway.log();
        let lines: Vec<_> = log.lines().filter(|line| line.contains("SNI")).collect();
        assert_eq!(lines.len(), 1, "{what}: {log}");
        let line: serde_json::Value = serde_json::from_str(lines[0]).unwrap();
        assert_eq!((&line["server_name"], &line["network"]), (&name.into(), &"127.0.0.1".into()), "{what}: {log}");
        assert!(line["message"].as_str().unwrap().contains("without a port"), "{what}: {log}");
    }
}

#[test]
fn plain_http_on_a_tls_port_gets_a_400_that_says_so() {
    let gateway = gateway("");
    for request in ["GET /hello HTTP/1.1\r\nHost: h\r\n\r\n", "POST / HTTP/1.0\r\nContent-Length: 5\r\n\r\n12345"] {
        let mut client = gateway.client();
        client.send(request.as_bytes());
        let reply = client.reply().unwrap();
        reply.assert_problem(400, request);
        assert!(reply.text().contains("https://"), "{reply:?}");
        assert_eq!(reply.header("connection"), Some("close"));
        client.assert_closed(request);
    }
}

#[test]
fn tls_on_a_plain_port_gets_a_400_and_is_logged_once() {
    let gateway = Gateway::start(&format!("[admin]\naddress = \"127.0.0.1:0\"\n{ROUTE}"));
    for hello in [hello_for("one.test"), hello_for("two.test"), b"\x16".to_vec()] {
        let mut client = gateway.client();
        client.send(&hello);
        let reply = client.reply().unwrap();
        reply.assert_problem(400, "a TLS handshake");
        assert!(reply.text().contains("http://"), "{reply:?}");
        client.assert_closed("a TLS handshake");
    }
    assert_eq!(gateway.get("/hello").status, 200);
    let log = gateway.log();
    let lines: Vec<serde_json::Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let message = "a client started a TLS handshake on a listener without TLS";
    let found: Vec<_> =
        lines.iter().filter(|line| line["message"].as_str().unwrap_or_default().starts_with(message)).collect();
    assert_eq!(found.len(), 1, "{log}");
    let listener = found[0]["listener"].as_str().unwrap();
    assert!(*listener == gateway.address.to_string() && found[0]["network"] == "127.0.0.1", "{log}");
    let labels = "result=\"failed\",reason=\"unexpected_tls\",version=\"none\",alpn=\"none\"";
    assert_eq!(metric(&gateway, &format!("sluicegate_tls_handshakes_total{{{labels}}}")), 3.0, "each is counted");
    let responses = "sluicegate_http_requests_total{route=\"\",status=\"4xx\"}";
    assert_eq!(metric(&gateway, responses), 3.0, "each response is counted");
}

#[test]
fn handshakes_are_counted_by_result_and_reason() {
    let authority = Authority::new("clients");
    let client_pair = authority.client(&[(DnType::CommonName, "c")], NOW);
    let stranger = Authority::new("strangers").client(&[(DnType::CommonName, "s")], NOW);
    let pair = format!("{{ cert = \"{0}.pem\", key = \"{0}.key\" }}", certificate("one"));
    let config = format!(
        "[admin]\naddress = \"127.0.0.1:0\"\n[server]\nheader_timeout = \"2s\"\nworkers = 1\n{ROUTE}[[listener]]\n\
         address = \"127.0.0.1:0\"\ntls.certificates = [{pair}]\ntls.client_ca = \"ca.pem\"\ntls.client_auth = \"required\"\n"
    );
    let gateway = Gateway::start_with(&config, &[("ca.pem", &authority.pem())]);
    let der = CertificateDer::from_pem_file(certificate("one.pem")).unwrap();
    let with_alpn = |shows: Option<&Pair>, version, alpn: &[&[u8]]| {
        let mut config = (*tls(&[&der], shows, &[version])).clone();
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        TlsClient::handshake(&Arc::new(config), gateway.address, "one.test")
    };
    let (v2, v3) = (&rustls::version::TLS12, &rustls::version::TLS13);
    let failed = |reason| format!("result=\"failed\",reason=\"{reason}\",version=\"none\",alpn=\"none\"");
    let ok = |version, alpn| format!("result=\"ok\",reason=\"none\",version=\"{version}\",alpn=\"{alpn}\"");
    let send = |bytes: &[u8]| {
        let mut client = gateway.client();
        client.send(bytes);
        let _ = std::io::Read::read_to_end(&mut client.stream, &mut Vec::new());
    };
    let count = |labels: &str| metric(&gateway, &format!("sluicegate_tls_handshakes_total{{{labels}}}"));
    let cases: Vec<(String, Box<dyn Fn() + '_>)> = vec![
        (ok("1.3", "h2"), Box::new(|| drop(with_alpn(Some(&client_pair), v3, &[b"h2", b"http/1.1"]).unwrap()))),
        (ok("1.3", "none"), Box::new(|| drop(with_alpn(Some(&client_pair), v3, &[]).unwrap()))),
        (ok("1.2", "http/1.1"), Box::new(|| drop(with_alpn(Some(&client_pair), v2, &[b"http/1.1"]).unwrap()))),
        (failed("nothing_in_common"), Box::new(|| assert!(with_alpn(Some(&client_pair), v3, &[b"imap"]).is_err()))),
        (failed("client_certificate_missing"), Box::new(|| assert!(with_alpn(None, v2, &[]).is_err()))),
        (failed("client_certificate_invalid"), Box::new(|| assert!(with_alpn(Some(&stranger), v2, &[]).is_err()))),
        (
            failed("client_alert"),
            Box::new(|| drop(TlsClient::handshake(&tls(&[], Some(&client_pair), &[v3]), gateway.address, "one.test"))),
        ),
        (failed("plain_http"), Box::new(|| send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"))),
        (failed("not_tls"), Box::new(|| send(b"\0\0\0\0\0\0\0\0"))),
        (failed("invalid_server_name"), Box::new(|| send(&hello_for("one.test:443")))),
        (failed("closed"), Box::new(|| gateway.client().send(&hello_for("long.one.test")[..40]))),
        (failed("timeout"), Box::new(|| send(b"\x16\x03\x01"))),
    ];
    let total = || {
        let page = ask(&gateway, "/metrics");
        let samples = page.text().lines().filter(|line| line.starts_with("sluicegate_tls_handshakes_total{"));
        samples.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum::<u64>()
    };
    for (index, (labels, act)) in cases.iter().enumerate() {
        assert_eq!(count(labels), 0.0, "{labels}");
        act();
        eventually(labels, || count(labels) == 1.0);
        assert_eq!(total(), index as u64 + 1, "{labels}");
    }
    // A connection without data, such as a TCP health check, does not count as a handshake.
    drop(gateway.client());
    assert_eq!(total(), cases.len() as u64);
    let log = gateway.log();
    for (labels, _) in cases.iter().filter(|(labels, _)| labels.contains("failed")) {
        let reason = labels.split('"').nth(3).unwrap();
        let is_of_reason = |line: &&serde_json::Value| line["reason"] == reason;
        let lines: Vec<serde_json::Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let found: Vec<_> = lines.iter().filter(is_of_reason).collect();
        assert_eq!(found.len(), 1, "{reason}: {log}");
        assert_eq!(found[0]["network"], "127.0.0.1", "{reason}: {log}");
    }
}

#[test]
fn expiry_of_each_certificate_is_a_metric() {
    let authority = Authority::new("ca");
    let pairs = [
        authority.server(&["a.test", "b.test"], [2000, 2100]),
        authority.server(&["a.test"], [2000, 2099]),
        authority.server(&["192.0.2.7"], [2000, 2098]),
    ];
    let files: Vec<_> = pairs
        .iter()
        .enumerate()
        .flat_map(|(index, pair)| [(format!("{index}.pem"), &*pair.cert), (format!("{index}.key"), &*pair.key)])
        .collect();
    let files: Vec<_> = files.iter().map(|(name, text)| (&**name, *text)).collect();
    let list: Vec<_> = (0..3).map(|index| format!("{{ cert = \"{index}.pem\", key = \"{index}.key\" }}")).collect();
    let config = format!(
        "[admin]\naddress = \"127.0.0.1:0\"\n{ROUTE}[[listener]]\naddress = \"127.0.0.1:0\"\ntls.certificates = [{}]\n",
        list.join(", ")
    );
    let gateway = Gateway::start_with(&config, &files);
    let page = ask(&gateway, "/metrics");
    let name = "sluicegate_tls_certificate_not_after_timestamp_seconds";
    let found: Vec<_> = page.text().lines().filter(|line| line.starts_with(name)).collect();
    // The certificates expire on 1 January 2098 and 2099. The numbers are the output of `date -u -d 2098-01-01 +%s`,
    // and of the same command for 2099.
    let expected = [("192.0.2.7", 4_039_372_800_u64), ("a.test", 4_070_908_800)]
        .map(|(subject, time)| format!("{name}{{name=\"{subject}\",source=\"file\"}} {time}"));
    assert_eq!(found, expected);
}

#[test]
fn failed_handshake_is_logged_once_for_each_reason() {
    let gateway = gateway("");
    for _ in 0..20 {
        for bytes in [&b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"[..], b"\0\0\0\0\0\0"] {
            let mut client = gateway.client();
            client.send(bytes);
            let _ = std::io::Read::read_to_end(&mut client.stream, &mut Vec::new());
        }
    }
    let log = gateway.log();
    assert_eq!(log.lines().filter(|line| line.contains("TLS handshake")).count(), 2, "{log}");
    assert!(log.contains("a TLS handshake failed: the client sent HTTP without TLS"), "{log}");
}
