//! TLS towards upstreams: trust roots, client certificates, error reports and forwarding.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::support::certificates::{Authority, FUTURE, NOW, PAST, Pair};
use crate::support::gateway::{Gateway, binary};
use crate::support::reload::{reloads, with_admin};
use crate::support::tls_upstream::{Handshake, Stream, TlsUpstream, server, shake};
use crate::support::upstream::{Seen, read_head, read_request, serve};
use crate::support::{MAX_WAIT, eventually};
use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use h2::server::SendResponse;
use http::{HeaderMap, Request, Response};
use rcgen::{DnType, ExtendedKeyUsagePurpose};
use rustls::ServerConfig;
use rustls::SupportedProtocolVersion;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use tokio_rustls::TlsAcceptor;
use tungstenite::Message;

const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const BOTH: &[&SupportedProtocolVersion] = &[&TLS13, &TLS12];

/// A configuration with one worker, so that all requests share its upstream connections.
fn config(url: &str, rest: &str) -> String {
    format!(
        "[server]\nworkers = 1\n[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nwebsocket = {}\n\
         [upstream.u]\nservers = [\"{url}\"]\n{rest}",
        !rest.contains("http2")
    )
}

fn gateway(url: &str, rest: &str, ca: &Authority) -> Gateway {
    Gateway::start_with(&config(url, rest), &[("ca.pem", &ca.pem())])
}

/// Start a gateway that has a client certificate for the upstream.
fn gateway_with_certificate(url: &str, rest: &str, ca: &Authority, own: &Pair) -> Gateway {
    let rest = format!("tls = {{ ca = \"ca.pem\", cert = \"own.pem\", key = \"own.key\" }}\n{rest}");
    let files = [("ca.pem", &*ca.pem()), ("own.pem", &own.cert), ("own.key", &own.key)];
    Gateway::start_with(&config(url, &rest), &files)
}

/// Requests over HTTP/2, each with the TLS handshake of its connection.
type Requests = Arc<Mutex<Vec<(Handshake, http::request::Parts)>>>;

const CA: &str = "tls = { ca = \"ca.pem\" }\n";

/// An upstream that responds to each request with `answer` and keeps its connections open.
fn answering(config: Arc<ServerConfig>, answer: impl Fn(&Seen) -> Vec<u8> + Send + Sync + 'static) -> TlsUpstream {
    TlsUpstream::serve(config, move |mut stream| {
        while let Some(seen) = read_request(&mut stream) {
            if stream.write_all(&answer(&seen)).is_err() {
                return;
            }
        }
    })
}

fn ok(config: Arc<ServerConfig>) -> TlsUpstream {
    answering(config, |_| OK.to_vec())
}

/// An HTTP/2 server with TLS that records requests and echoes them with trailers.
fn http2(config: Arc<ServerConfig>) -> (SocketAddr, Requests) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let seen = Arc::<Mutex<Vec<_>>>::default();
    let record = seen.clone();
    let serve = async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (config, record) = (config.clone(), record.clone());
            tokio::spawn(async move {
                let Ok(stream) = TlsAcceptor::from(config).accept(stream).await else { return };
                let shake = shake(stream.get_ref().1);
                let mut requests = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((request, respond))) = requests.accept().await {
                    let (parts, body) = request.into_parts();
                    record.lock().unwrap().push((shake.clone(), parts));
                    tokio::spawn(echo(body, respond));
                }
            });
        }
    };
    std::thread::spawn(|| {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(serve);
    });
    (address, seen)
}

async fn echo(mut body: h2::RecvStream, mut respond: SendResponse<Bytes>) {
    let mut read = Vec::new();
    while let Some(Ok(data)) = body.data().await {
        body.flow_control().release_capacity(data.len()).unwrap();
        read.extend_from_slice(&data);
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    trailers.extend(body.trailers().await.ok().flatten().unwrap_or_default());
    let mut stream = respond.send_response(Response::new(()), false).unwrap();
    stream.send_data(read.into(), false).unwrap();
    stream.send_trailers(trailers).unwrap();
}

fn url(host: &str, address: SocketAddr) -> String {
    format!("https://{host}:{}", address.port())
}

/// Assert that the response to the client does not contain the reason of an error, and that the log says what to do.
fn assert_refused(gateway: &Gateway, said: &str, what: &str) {
    let reply = gateway.get("/");
    reply.assert_problem(502, what);
    for secret in ["certificate", "TLS", "127.0.0.1", "localhost", "http://"] {
        assert!(!reply.text().contains(secret), "{what}: the response discloses {secret}: {}", reply.text());
    }
    eventually(what, || gateway.log().contains(said));
}

// ---- trust roots ---------------------------------------------------------------------------------

#[test]
fn upstream_tls_verifies_the_host_and_reuses_connections() {
    let ca = Authority::new("ca");
    for version in [&TLS12, &TLS13] {
        let upstream =
            answering(server(&ca.server(&["localhost"], NOW), None, &["h2", "http/1.1"], &[version]), |seen| {
                assert_eq!(seen.headers("host"), ["gateway.test"], "the client's host is forwarded");
                assert_eq!(seen.headers("x-forwarded-proto"), ["http"], "the scheme of the client");
                OK.to_vec()
            });
        let gateway = gateway(&url("localhost", upstream.address), CA, &ca);
        for _ in 0..20 {
            let reply = gateway.get("/");
            assert_eq!((reply.status, reply.text()), (200, "ok"));
        }
        let (name, protocol) = (Some("localhost".to_owned()), Some("http/1.1".to_owned()));
        assert_eq!(upstream.handshakes(), [Handshake { name, protocol, resumed: false, client: None }]);
    }
}

#[test]
fn server_name_replaces_the_host() {
    let ca = Authority::new("ca");
    let upstream = ok(server(&ca.server(&["api.internal"], NOW), None, &[], BOTH));
    let rest = "tls = { ca = \"ca.pem\", server_name = \"api.internal\" }\n";
    let gateway = gateway(&url("127.0.0.1", upstream.address), rest, &ca);
    assert_eq!(gateway.get("/").status, 200);
    let [shake] = &upstream.handshakes()[..] else { panic!("{:?}", upstream.handshakes()) };
    assert_eq!(shake.name.as_deref(), Some("api.internal"));
    assert_eq!(shake.protocol, None, "HTTP/1.1 needs no ALPN");
}

#[test]
fn certificate_must_have_the_ip_address() {
    let ca = Authority::new("ca");
    let upstream = ok(server(&ca.server(&["other.test", "127.0.0.1"], NOW), None, &[], BOTH));
    assert_eq!(gateway(&url("127.0.0.1", upstream.address), CA, &ca).get("/").status, 200);
    assert_eq!(upstream.handshakes()[0].name, None, "an IP address is not sent as server name");
    let upstream = ok(server(&ca.server(&["localhost", "127.0.0.2"], NOW), None, &[], BOTH));
    let gateway = gateway(&url("127.0.0.1", upstream.address), CA, &ca);
    assert_refused(&gateway, "is valid for localhost, 127.0.0.2, not for `127.0.0.1`;", "another address");
}

#[test]
fn without_ca_the_trust_roots_of_the_system_apply() {
    let (ca, folder) = (Authority::new("ca"), tempfile::tempdir().unwrap());
    let upstream = ok(server(&ca.server(&["localhost"], NOW), None, &[], BOTH));
    let config = config(&url("localhost", upstream.address), "");
    let system = folder.path().join("system.pem");
    let start = |config: &str| {
        let system = system.clone();
        Gateway::start_by(config, move |path| {
            let mut command = binary();
            command.arg("--config").arg(path).env("SSL_CERT_FILE", &system).env_remove("SSL_CERT_DIR");
            command
        })
    };
    std::fs::write(&system, ca.pem()).unwrap();
    assert_eq!(start(&config).get("/").status, 200);
    std::fs::write(&system, Authority::new("other").pem()).unwrap();
    let gateway = start(&config);
    assert_refused(&gateway, "not signed by a trusted CA", "another system");

    std::fs::write(&system, "").unwrap();
    let path = gateway.directory().join("gateway.toml");
    let check = binary()
        .arg("check")
        .arg("--config")
        .arg(path)
        .env("SSL_CERT_FILE", &system)
        .env_remove("SSL_CERT_DIR")
        .output()
        .unwrap();
    let report = String::from_utf8(check.stderr).unwrap();
    assert_eq!(check.status.code(), Some(2), "{report}");
    assert!(report.contains("the system has no CA certificates"), "{report}");
}

#[test]
fn invalid_upstream_certificate_is_502_with_its_reason_in_the_log() {
    let (ca, other) = (Authority::new("ca"), Authority::new("other"));
    let itself = ca.certificate();
    let client = ca.sign_for(&[], &["localhost"], NOW, ExtendedKeyUsagePurpose::ClientAuth);
    for (what, shown, said) in [
        ("name", ca.server(&["other.test"], NOW), "is valid for other.test, not for `localhost`; set tls.server_name"),
        ("no name", ca.server(&[], NOW), "is valid for no name (common names are ignored), not for `localhost`"),
        ("an authority's", itself, "presents a CA certificate (CA:TRUE"),
        ("authority", other.server(&["localhost"], NOW), "not signed by a trusted CA; set tls.ca"),
        ("its own", Pair::server("localhost", NOW), "not signed by a trusted CA"),
        ("expired", ca.server(&["localhost"], PAST), "has expired on Jan  1 00:00:00 2001"),
        ("early", ca.server(&["localhost"], FUTURE), "is not valid before Jan  1 00:00:00 3999"),
        ("purpose", client, "is not valid for servers"),
    ] {
        for protocol in ["http1", "http2"] {
            let upstream = ok(server(&shown, None, &["h2", "http/1.1"], BOTH));
            let rest = format!("{CA}protocol = \"{protocol}\"\n");
            let gateway = gateway(&url("localhost", upstream.address), &rest, &ca);
            assert_refused(&gateway, said, &format!("{what}, {protocol}"));
            assert_eq!(upstream.handshakes(), [], "{what}: no TLS handshake succeeds");
        }
    }
}

// ---- client certificates -------------------------------------------------------------------------

#[test]
fn client_certificate_is_sent_to_upstreams_that_request_it() {
    let (ca, clients) = (Authority::new("ca"), Authority::new("clients"));
    let own = clients.client(&[(DnType::CommonName, "gate")], NOW);
    for version in [&TLS12, &TLS13] {
        let config = server(&ca.server(&["localhost"], NOW), Some(&clients), &["h2", "http/1.1"], &[version]);
        let upstream = ok(config.clone());
        assert_eq!(gateway_with_certificate(&url("localhost", upstream.address), "", &ca, &own).get("/").status, 200);
        assert_eq!(upstream.handshakes()[0].client.as_ref(), Some(&own.der));
        let (address, seen) = http2(config);
        let gateway = gateway_with_certificate(&url("localhost", address), "protocol = \"http2\"\n", &ca, &own);
        assert_eq!(gateway.get("/").status, 200);
        assert_eq!(seen.lock().unwrap()[0].0.client.as_ref(), Some(&own.der));
    }
}

#[test]
fn upstream_that_rejects_the_handshake_is_named_in_the_log() {
    let (ca, clients) = (Authority::new("ca"), Authority::new("clients"));
    let other_client = ca.client(&[(DnType::CommonName, "gate")], NOW);
    for protocol in ["http1", "http2"] {
        for version in [&TLS12, &TLS13] {
            let upstream = ok(server(
                &ca.server(&["localhost"], NOW),
                Some(&clients),
                &[protocol.replace("http2", "h2").as_str(), "http/1.1"],
                &[version],
            ));
            let rest = format!("protocol = \"{protocol}\"\n");
            let url = url("localhost", upstream.address);
            let none = gateway(&url, &format!("{CA}{rest}"), &ca);
            assert_refused(&none, "requires a client certificate", &format!("no certificate, {protocol}, {version:?}"));
            let wrong = gateway_with_certificate(&url, &rest, &ca, &other_client);
            assert_refused(
                &wrong,
                "the server rejected the client certificate (",
                &format!("a wrong one, {protocol}, {version:?}"),
            );
            assert_eq!(upstream.handshakes(), []);
        }
    }
}

#[test]
fn expired_client_certificate_is_a_warning() {
    let ca = Authority::new("ca");
    let gateway = gateway_with_certificate("https://localhost:1", "", &ca, &ca.client(&[], PAST));
    let said = "own.pem: the certificate has expired on Jan  1 00:00:00 2001 +00:00; servers of `u` will reject the certificate";
    assert!(gateway.log().contains(said), "{}", gateway.log());
}

// ---- protocols -----------------------------------------------------------------------------------

#[test]
fn upstream_http2_by_alpn_forwards_grpc_trailers() {
    let ca = Authority::new("ca");
    let (address, seen) = http2(server(&ca.server(&["localhost"], NOW), None, &["http/1.1", "h2"], BOTH));
    let gateway = gateway(&url("localhost", address), &format!("{CA}protocol = \"http2\"\n"), &ca);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let call = async {
        let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let mut client = client.ready().await.unwrap();
        let call = Request::post("http://grpc.test/pkg.Service/Echo").header("content-type", "application/grpc");
        let (response, mut body) = client.send_request(call.header("te", "trailers").body(()).unwrap(), false).unwrap();
        body.send_data(Bytes::from_static(b"\0\0\0\0\x02hi"), false).unwrap();
        body.send_trailers(HeaderMap::from_iter([("x-sum".parse().unwrap(), "5".parse().unwrap())])).unwrap();
        let mut body = response.await.unwrap().into_body();
        assert_eq!(body.data().await.unwrap().unwrap(), "\0\0\0\0\x02hi");
        body.trailers().await.unwrap().unwrap()
    };
    let trailers = runtime.block_on(async { tokio::time::timeout(MAX_WAIT, call).await.expect("a response") });
    assert_eq!((&trailers["grpc-status"], &trailers["x-sum"]), (&"0".parse().unwrap(), &"5".parse().unwrap()));
    assert_eq!(gateway.get("/x?y").status, 200);
    let seen = seen.lock().unwrap();
    assert_eq!(seen[0].1.uri, "https://grpc.test/pkg.Service/Echo", "the scheme is that of the connection");
    assert_eq!(seen[1].1.uri, "https://gateway.test/x?y");
    assert_eq!(seen[0].0.protocol.as_deref(), Some("h2"));
}

#[test]
fn upstream_without_http2_in_alpn_is_502() {
    let ca = Authority::new("ca");
    for (alpn, said) in [(&[][..], "did not select HTTP/2 by ALPN"), (&["http/1.1"], "does not support the `protocol`")]
    {
        let upstream = ok(server(&ca.server(&["localhost"], NOW), None, alpn, BOTH));
        let rest = format!("{CA}protocol = \"http2\"\n");
        assert_refused(&gateway(&url("localhost", upstream.address), &rest, &ca), said, said);
    }
    let upstream = ok(server(&ca.server(&["localhost"], NOW), None, &["h2"], BOTH));
    let gateway = gateway(&url("localhost", upstream.address), CA, &ca);
    assert_refused(&gateway, "does not support the `protocol`", "HTTP/2 only");
}

#[test]
fn websockets_pass_over_upstream_tls() {
    let ca = Authority::new("ca");
    let upstream = TlsUpstream::serve(server(&ca.server(&["localhost"], NOW), None, &["http/1.1"], BOTH), |stream| {
        let mut socket = tungstenite::accept(stream).unwrap();
        while let Ok(message) = socket.read() {
            match message {
                Message::Text(text) if text.as_str() == "bye" => socket.close(None).unwrap(),
                Message::Binary(_) | Message::Text(_) => socket.send(message).unwrap(),
                _ => {}
            }
        }
    });
    let gateway = gateway(&url("localhost", upstream.address), CA, &ca);
    let stream = TcpStream::connect(gateway.address).unwrap();
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    let (mut socket, _) = tungstenite::client("ws://gateway.test/", stream).unwrap();
    let large = Bytes::from(noise(1 << 20));
    for message in [Message::text("hello"), Message::binary(large), Message::text("again")] {
        socket.send(message.clone()).unwrap();
        assert!(socket.read().unwrap() == message);
    }
    socket.send(Message::text("bye")).unwrap();
    assert!(matches!(socket.read(), Ok(Message::Close(_))));
}

#[test]
fn bodies_are_unchanged_over_upstream_tls() {
    let ca = Authority::new("ca");
    let config = server(&ca.server(&["localhost"], NOW), None, &["h2", "http/1.1"], BOTH);
    let upstream = answering(config.clone(), |seen| {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", seen.body.len());
        [head.as_bytes(), &seen.body].concat()
    });
    let (second, _) = http2(config);
    let body = noise(16 << 20);
    for (address, protocol) in [(upstream.address, "http1"), (second, "http2")] {
        let gateway = gateway(&url("localhost", address), &format!("{CA}protocol = \"{protocol}\"\n"), &ca);
        let reply = gateway.client().request("POST", "/", &[], &body);
        assert_eq!(reply.status, 200, "{protocol}");
        assert_eq!(checksum(&reply.body), checksum(&body), "{protocol}");
    }
}

/// Return bytes that never repeat, so that lost or repeated pieces are detected.
fn noise(length: usize) -> Vec<u8> {
    let blocks = (0..length.div_ceil(32)).map(|index| digest(&SHA256, &index.to_le_bytes()));
    let mut noise: Vec<u8> = blocks.flat_map(|block| block.as_ref().to_vec()).collect();
    noise.truncate(length);
    noise
}

fn checksum(bytes: &[u8]) -> Vec<u8> {
    digest(&SHA256, bytes).as_ref().to_vec()
}

#[test]
fn response_without_close_notify_never_looks_complete() {
    let ca = Authority::new("ca");
    let config = server(&ca.server(&["localhost"], NOW), None, &[], BOTH);
    let upstream = TlsUpstream::serve(config, |mut stream| {
        let head = read_head(&mut stream).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nhalf of it").unwrap();
        if head.starts_with("GET /whole") {
            // Only the holder of the TLS keys can send close_notify (RFC 8446 §6.1), which marks the end of the body.
            stream.conn.send_close_notify();
            stream.flush().unwrap();
        }
        stream.sock.shutdown(Shutdown::Write).unwrap();
        let _ = stream.sock.read(&mut [0]);
    });
    let gateway = gateway(&url("localhost", upstream.address), CA, &ca);
    let ask = |path: &str| {
        let mut client = gateway.client();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: gateway.test\r\n\r\n").as_bytes());
        let head = client.head().unwrap();
        assert_eq!((head.status, head.header("transfer-encoding")), (200, Some("chunked")));
        let mut rest = String::new();
        client.stream.get_mut().shutdown(Shutdown::Write).unwrap();
        let _ = client.stream.read_to_string(&mut rest);
        rest
    };
    assert_eq!(ask("/whole"), "A\r\nhalf of it\r\n0\r\n\r\n");
    let cut = ask("/cut");
    assert!(!cut.contains("0\r\n\r\n"), "{cut:?}");
}

// ---- sessions ------------------------------------------------------------------------------------

#[test]
fn upstream_tls_sessions_are_resumed() {
    let ca = Authority::new("ca");
    for version in [&TLS12, &TLS13] {
        let config = server(&ca.server(&["localhost"], NOW), None, &[], &[version]);
        let upstream = TlsUpstream::serve(config, |mut stream: Stream| {
            read_head(&mut stream).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
            stream.conn.send_close_notify();
            stream.flush().unwrap();
        });
        let gateway = gateway(&url("localhost", upstream.address), CA, &ca);
        for _ in 0..5 {
            assert_eq!(gateway.get("/").status, 200);
        }
        let resumed: Vec<_> = upstream.handshakes().iter().map(|shake| shake.resumed).collect();
        assert_eq!(resumed, [false, true, true, true, true], "{version:?}");
    }
}

// ---- peers without TLS ---------------------------------------------------------------------------

#[test]
fn clear_text_upstream_at_https_is_named_in_the_log() {
    let ca = Authority::new("ca");
    // One server responds with an HTTP error, the other one closes the connection.
    let answers = serve(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        let _ = stream.read(&mut [0; 4096]);
    });
    let hangs_up = serve(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
    });
    for (address, said) in [
        (answers, "the server does not speak TLS; use http://"),
        (hangs_up, "the server closed the connection in the TLS handshake; if it does not speak TLS, use http://"),
    ] {
        assert_refused(&gateway(&url("localhost", address), CA, &ca), said, said);
    }
}

#[test]
fn tls_upstream_at_http_is_named_in_the_log() {
    let ca = Authority::new("ca");
    let upstream = ok(server(&ca.server(&["localhost"], NOW), None, &[], BOTH));
    let gateway = Gateway::start(&config(&format!("http://{}", upstream.address), ""));
    assert_refused(&gateway, "if the server speaks TLS, use https://", "TLS behind http://");
}

#[test]
fn connect_timeout_covers_the_handshake() {
    let ca = Authority::new("ca");
    let silent = serve(|mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    for protocol in ["http1", "http2"] {
        let rest = format!("{CA}protocol = \"{protocol}\"\nconnect_timeout = \"300ms\"\n");
        let gateway = gateway(&url("localhost", silent), &rest, &ca);
        assert_refused(&gateway, "timed out", protocol);
    }
}

// ---- reload --------------------------------------------------------------------------------------

#[test]
fn reload_of_ca_and_client_certificate_applies_to_new_connections() {
    let (old, new, clients) = (Authority::new("old"), Authority::new("new"), Authority::new("clients"));
    let closing = |mut stream: Stream| {
        read_head(&mut stream).unwrap();
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    };
    let upstream = TlsUpstream::serve(server(&new.server(&["localhost"], NOW), Some(&clients), &[], BOTH), closing);
    let (first, second) = (clients.client(&[], NOW), clients.client(&[(DnType::CommonName, "second")], NOW));
    let gateway = gateway_with_certificate(&url("localhost", upstream.address), "", &old, &first);
    assert_refused(&gateway, "not signed by a trusted CA", "before");
    let put = |name: &str, content: &str| put(gateway.directory(), name, content);
    let reloads = || gateway.log().matches("reloaded").count();

    put("ca.pem", &new.pem());
    eventually("the new CA is trusted", || gateway.get("/").status == 200);
    assert_eq!(upstream.handshakes().last().unwrap().client.as_ref(), Some(&first.der));
    assert!(gateway.log().contains("reloaded") && gateway.log().contains("ca.pem"), "{}", gateway.log());

    put("own.pem", &second.cert);
    eventually("a mismatched pair is rejected", || gateway.log().contains("certificate and key do not match"));
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(upstream.handshakes().last().unwrap().client.as_ref(), Some(&first.der));
    let before = reloads();
    put("own.key", &second.key);
    eventually("the new pair is used", || reloads() > before);
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(upstream.handshakes().last().unwrap().client.as_ref(), Some(&second.der));

    let refusals = || gateway.log().matches("stays in force").count();
    for (what, name, content) in [("nothing", "ca.pem", ""), ("a key", "ca.pem", &*first.key)] {
        let before = refusals();
        put(name, content);
        eventually(what, || refusals() > before);
        assert_eq!(gateway.get("/").status, 200, "{what}: the previous configuration stays active");
    }
    let expired = clients.client(&[], PAST);
    put("ca.pem", &new.pem());
    put("own.pem", &expired.cert);
    put("own.key", &expired.key);
    let parts = ["cannot reload the file", "own.pem", "the certificate has expired"];
    let is_rejection = |line: &str| parts.iter().all(|part| line.contains(part));
    eventually("the expired one is rejected", || gateway.log().lines().any(is_rejection));
    assert_eq!(gateway.get("/").status, 200, "the client certificate is not sent");

    // After the change of the CA, the gateway must not resume sessions: a resumed session skips the verification.
    put("own.pem", &second.cert);
    put("own.key", &second.key);
    put("ca.pem", &old.pem());
    eventually("the old CA is trusted again", || gateway.get("/").status == 502);
}

/// Replace a file by renaming.
fn put(folder: &Path, name: &str, content: &str) {
    std::fs::write(folder.join("new"), content).unwrap();
    std::fs::rename(folder.join("new"), folder.join(name)).unwrap();
}

#[test]
fn reload_of_server_name_applies_to_the_next_request() {
    let ca = Authority::new("ca");
    let certificate = ca.server(&["one.internal", "other.internal"], NOW);
    let by_http1 = ok(server(&certificate, None, &[], BOTH));
    let (by_http2, seen) = http2(server(&certificate, None, &["h2"], BOTH));
    for (protocol, address) in [("http1", by_http1.address), ("http2", by_http2)] {
        let last = || match protocol {
            "http1" => by_http1.handshakes().pop().unwrap(),
            _ => seen.lock().unwrap().last().unwrap().0.clone(),
        };
        let named = |name: &str| {
            let tls = format!("tls = {{ ca = \"ca.pem\", server_name = \"{name}\" }}\n");
            config(&url("127.0.0.1", address), &format!("protocol = \"{protocol}\"\n{tls}"))
        };
        let gateway = Gateway::start_with(&with_admin(&named("one.internal")), &[("ca.pem", &ca.pem())]);
        for name in ["one.internal", "other.internal"] {
            reloads(&gateway, &named(name));
            for _ in 0..2 {
                assert_eq!(gateway.get("/").status, 200, "{protocol}");
            }
            assert_eq!(last().name.as_deref(), Some(name), "{protocol}");
        }
    }
}

// ---- certificates that no CA verifies ------------------------------------------------------------

fn fingerprint_of(pair: &Pair) -> String {
    digest(&SHA256, &pair.der).as_ref().iter().map(|byte| format!("{byte:02X}")).collect::<Vec<_>>().join(":")
}

#[test]
fn pinned_certificate_needs_no_ca_name_or_date_and_no_other_is_accepted() {
    let ca = Authority::new("ca");
    let (old, other) = (ca.server(&["old.test"], PAST), ca.server(&["localhost"], NOW));
    for version in [&TLS12, &TLS13] {
        let [expired, valid] = [&old, &other].map(|pair| ok(server(pair, None, &["http/1.1"], &[version])));
        let pin = format!("tls = {{ fingerprint = [\"{}\", \"{}\"] }}\n", "0".repeat(64), fingerprint_of(&old));
        let gateway = Gateway::start(&config(&url("localhost", expired.address), &pin));
        assert_eq!(gateway.get("/").status, 200, "{version:?}");
        assert!(gateway.log().contains("accepts only the certificates in `tls.fingerprint`"), "{}", gateway.log());
        let gateway = Gateway::start(&config(&url("localhost", valid.address), &pin));
        assert_refused(&gateway, "has none of the hashes in tls.fingerprint", "another certificate");
    }
}

#[test]
fn server_with_a_pinned_certificate_must_have_its_key() {
    let ca = Authority::new("ca");
    let (real, thief) = (ca.server(&["localhost"], NOW), ca.server(&["localhost"], NOW));
    // This server presents the certificate of `real`, but signs with another key.
    let stolen = Arc::new(AnyCertificate(Arc::new(CertifiedKey::new(
        vec![real.der.clone()],
        any_supported_type(&thief.secret).unwrap(),
    ))));
    for version in [&TLS12, &TLS13] {
        let provider = Arc::new(default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[version]).unwrap();
        let upstream = ok(Arc::new(builder.with_no_client_auth().with_cert_resolver(stolen.clone())));
        let pin = format!("tls = {{ fingerprint = [\"{}\"] }}\n", fingerprint_of(&real));
        let gateway = Gateway::start(&config(&url("localhost", upstream.address), &pin));
        gateway.get("/").assert_problem(502, "a stolen certificate");
    }
}

/// Presents a certificate for every server name.
#[derive(Debug)]
struct AnyCertificate(Arc<CertifiedKey>);

impl ResolvesServerCert for AnyCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

#[test]
fn unverified_server_is_used_with_a_loud_warning_until_a_reload() {
    let ca = Authority::new("ca");
    let upstream = ok(server(&ca.server(&["other.test"], PAST), None, &["http/1.1"], BOTH));
    let config = config(&url("localhost", upstream.address), "tls = { verify = false }\n");
    let gateway = Gateway::start(&with_admin(&config));
    assert_eq!(gateway.get("/").status, 200);
    assert!(gateway.log().contains("accepts every certificate (`tls.verify = false`)"), "{}", gateway.log());
    reloads(&gateway, &config.replace("verify = false", "verify = true"));
    gateway.get("/").assert_problem(502, "connections of the earlier setting are not used");
}

#[test]
fn certificates_of_version_1_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    // `openssl x509 -req` without extensions issues a certificate of version 1.
    let commands = [
        format!("req -newkey rsa:2048 -nodes -keyout {} -out {} -subj /CN=localhost", at("key"), at("csr")),
        format!("x509 -req -in {} -signkey {} -days 30 -out {}", at("csr"), at("key"), at("cert")),
    ];
    for command in commands {
        assert!(std::process::Command::new("openssl").args(command.split(' ')).output().unwrap().status.success());
    }
    let pem = std::fs::read(at("cert")).unwrap();
    let certificate = CertificateDer::from_pem_slice(&pem).unwrap();
    let key = PrivateKeyDer::from_pem_file(at("key")).unwrap();
    let certified = CertifiedKey::new(vec![certificate], any_supported_type(&key).unwrap());
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let upstream = ok(Arc::new(builder.with_cert_resolver(Arc::new(AnyCertificate(Arc::new(certified))))));
    let gateway = gateway(&url("localhost", upstream.address), CA, &Authority::new("ca"));
    assert_refused(&gateway, "X.509 version 1", "a certificate of version 1");
}
