//! WebSocket and other protocol upgrades: on which routes they are allowed, and how long tunnels last.

#![allow(clippy::result_large_err)] // the callback of tungstenite

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::hot_restart::Successor;
use crate::support::admin_listener::{metric, with_admin};
use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::reload;
use crate::support::upstream::{Upstream, read_head, serve};
use crate::support::{MAX_WAIT, assert_silent, eventually, signal};
use bytes::Bytes;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use sluicegate::clock::monotonic;
use tungstenite::client::IntoClientRequest;
use tungstenite::handshake::client::Response;
use tungstenite::handshake::server;
use tungstenite::{Message, WebSocket};

const SWITCH: [(&str, &str); 2] = [("Connection", "keep-alive, Upgrade"), ("Upgrade", "chat/2")];
const SWITCHED: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: chat/2\r\n\r\n";

/// `/ws` allows upgrades, `/plain` does not. `/quick` has the same limit as `/ws`.
fn config(upstream: SocketAddr, rest: &str) -> String {
    let limits = if rest.contains("[limit.l]") { "limits = [\"l\"]\n" } else { "" };
    // The permit TTL is `response_timeout` plus 5 s.
    let response_timeout = if rest.contains("concurrency") { "2s" } else { "30s" };
    format!(
        "{rest}[upstream.u]\nservers = [\"http://{upstream}\"]\nresponse_timeout = \"{response_timeout}\"\n\
         [[route]]\nname = \"ws\"\npath = \"/ws\"\nupstream = \"u\"\nwebsocket = true\n{limits}\
         [[route]]\nname = \"plain\"\npath = \"/plain\"\nupstream = \"u\"\n\
         [[route]]\nname = \"quick\"\npath = \"/quick\"\nrespond = {{ status = 200 }}\n{limits}"
    )
}

const PLACES: &str = "[limit.l]\nby = \"global\"\nalgorithm = \"concurrency\"\nquota = \"2\"\n";

fn assert_permits_free(gateway: &Gateway) {
    eventually("both permits are free", || {
        let quick = gateway.get("/quick");
        quick.status == 200 && quick.remaining("l") == 1
    });
}

/// A WebSocket server that echoes messages, closes the connection on `bye` and records request headers.
fn echo() -> (SocketAddr, Arc<Mutex<Vec<http::HeaderMap>>>) {
    let heads = Arc::<Mutex<Vec<http::HeaderMap>>>::default();
    let seen = heads.clone();
    let address = serve(move |stream| {
        let note = |request: &server::Request, response| {
            seen.lock().unwrap().push(request.headers().clone());
            Ok(response)
        };
        let Ok(mut socket) = tungstenite::accept_hdr(stream, note) else { return };
        // tungstenite also replies to a close frame while it reads.
        while let Ok(message) = socket.read() {
            match message {
                Message::Text(text) if text.as_str() == "bye" => socket.close(None).unwrap(),
                Message::Text(_) | Message::Binary(_) => socket.send(message).unwrap(),
                _ => {}
            }
        }
    });
    (address, heads)
}

fn connect_websocket<S: Read + Write>(stream: S, uri: &str) -> (WebSocket<S>, Response) {
    let mut request = uri.into_client_request().unwrap();
    request.headers_mut().insert("x-forwarded-for", "203.0.113.7".parse().unwrap());
    tungstenite::client(request, stream).unwrap_or_else(|error| panic!("the handshake failed: {error}"))
}

fn connect(gateway: &Gateway) -> WebSocket<TcpStream> {
    let stream = TcpStream::connect(gateway.address).unwrap();
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    connect_websocket(stream, "ws://chat.test/ws").0
}

fn send_text<S: Read + Write>(socket: &mut WebSocket<S>, text: &str) {
    socket.send(Message::text(text)).unwrap();
    assert_eq!(socket.read().unwrap(), Message::text(text));
}

/// Read until both sides have sent a close frame.
fn assert_closed_well<S: Read + Write>(socket: &mut WebSocket<S>) {
    loop {
        match socket.read() {
            Ok(Message::Close(_)) => {}
            Err(tungstenite::Error::ConnectionClosed) => return,
            other => panic!("not a close: {other:?}"),
        }
    }
}

/// Assert that the peer has closed the connection: reading yields neither bytes nor a timeout.
fn assert_gone(stream: &mut impl Read) {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => panic!("still open"),
        _ => assert_eq!(rest, b"", "{}", String::from_utf8_lossy(&rest)),
    }
}

/// Send an upgrade request.
fn request_upgrade(client: &mut Client, path: &str) {
    let lines = SWITCH.map(|(name, value)| format!("{name}: {value}\r\n")).concat();
    client.send(format!("GET {path} HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n").as_bytes());
}

/// An upstream that upgrades to `chat/2` and passes its end of the tunnel to the test.
struct Switching {
    address: SocketAddr,
    streams: Receiver<TcpStream>,
}

impl Switching {
    fn start() -> Switching {
        let (sender, streams): (Sender<TcpStream>, _) = channel();
        let sender = Mutex::new(sender);
        let address = serve(move |mut stream| {
            let Some(_) = read_head(&mut stream) else { return };
            stream.write_all(SWITCHED.as_bytes()).unwrap();
            stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
            sender.lock().unwrap().send(stream).unwrap();
        });
        Switching { address, streams }
    }

    /// Open a tunnel. Return the client's end and the upstream's end.
    fn tunnel(&self, gateway: &Gateway) -> (TcpStream, TcpStream) {
        let mut client = gateway.client();
        request_upgrade(&mut client, "/ws");
        let head = client.head().unwrap();
        assert_eq!(head.status, 101, "{head:?}");
        assert_eq!((head.header("connection"), head.header("upgrade")), (Some("upgrade"), Some("chat/2")));
        assert_eq!((head.header("content-length"), head.header("transfer-encoding")), (None, None));
        (client.stream.into_inner(), self.streams.recv_timeout(MAX_WAIT).unwrap())
    }
}

fn pass(from: &mut TcpStream, to: &mut TcpStream, bytes: &[u8]) {
    from.write_all(bytes).unwrap();
    let mut read = vec![0; bytes.len()];
    to.read_exact(&mut read).unwrap();
    assert_eq!(read, bytes);
}

// ---- allowed upgrades ----------------------------------------------------------------------------

#[test]
fn websocket_messages_pass_both_ways_until_the_client_closes() {
    let (upstream, heads) = echo();
    let log = "[log]\naccess = \"access.log\"\nformat = \"json\"\n[limit.l]\nby = \"ip\"\nquota = \"10/24h\"\n";
    let gateway = Gateway::start(&config(upstream, log));
    let stream = TcpStream::connect(gateway.address).unwrap();
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    let (mut socket, response) = connect_websocket(stream, "ws://chat.test/ws");
    assert_eq!(response.headers()["ratelimit"].to_str().unwrap().split(";t=").next(), Some("\"l\";r=9"));
    let head = heads.lock().unwrap()[0].clone();
    for (name, value) in
        [("host", "chat.test"), ("connection", "upgrade"), ("upgrade", "websocket"), ("x-forwarded-for", "127.0.0.1")]
    {
        assert_eq!(head[name], value, "{name}");
    }
    let large = Message::binary((0..1 << 22).map(|byte: u32| byte as u8).collect::<Vec<_>>());
    for message in [Message::text("hello"), large, Message::text("x".repeat(70_000)), Message::text("")] {
        socket.send(message.clone()).unwrap();
        assert_eq!(socket.read().unwrap(), message);
    }
    let written = || std::fs::read_to_string(gateway.directory().join("access.log")).unwrap();
    assert_eq!(written(), "", "the log record is written at the end of the tunnel");
    socket.close(None).unwrap();
    assert_closed_well(&mut socket);
    drop(socket);
    eventually("the log record is written", || written().ends_with('\n'));
    let line: serde_json::Value = serde_json::from_str(&written()).unwrap();
    assert_eq!(
        (&line["status"], &line["route"], &line["complete"]),
        (&101.into(), &"ws".into(), &true.into()),
        "{line}"
    );
    // Subtract the payloads. Frame headers of 2, 10, 10 and 2 bytes and the close frame remain.
    let bytes = line["bytes"].as_u64().unwrap() - ((1 << 22) + 70_000 + 5);
    assert!((20..64).contains(&bytes), "{line}");
}

#[test]
fn upstream_may_close_a_websocket() {
    let (upstream, _) = echo();
    let gateway = Gateway::start(&config(upstream, ""));
    let mut socket = connect(&gateway);
    send_text(&mut socket, "hello");
    socket.send(Message::text("bye")).unwrap();
    assert_closed_well(&mut socket);
}

#[test]
fn websocket_messages_pass_over_tls() {
    let (upstream, heads) = echo();
    let certificate = |name: &str| format!("{}/tests/certs/{name}", env!("CARGO_MANIFEST_DIR"));
    let listener = format!(
        "[[listener]]\naddress = \"127.0.0.1:0\"\ntls.certificates = [{{ cert = \"{}\", key = \"{}\" }}]\n",
        certificate("one.pem"),
        certificate("one.key")
    );
    let gateway = Gateway::start(&config(upstream, &listener));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(certificate("one.pem")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(builder.with_root_certificates(roots).with_no_client_auth());
    let session = rustls::ClientConnection::new(config, ServerName::try_from("one.test").unwrap()).unwrap();
    let stream = TcpStream::connect(gateway.address).unwrap();
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    let (mut socket, _) = connect_websocket(rustls::StreamOwned::new(session, stream), "wss://one.test/ws");
    send_text(&mut socket, "hello");
    let large = Message::binary(vec![7; 1 << 21]);
    socket.send(large.clone()).unwrap();
    assert_eq!(socket.read().unwrap(), large);
    assert_eq!(heads.lock().unwrap()[0]["x-forwarded-proto"], "https");
    socket.close(None).unwrap();
    assert_closed_well(&mut socket);
}

#[test]
fn bytes_sent_with_the_upgrade_heads_are_not_lost() {
    let upstream = serve(|mut stream| {
        read_head(&mut stream).unwrap();
        stream.write_all(format!("{SWITCHED}early answer").as_bytes()).unwrap();
        let mut read = [0; 14];
        stream.read_exact(&mut read).unwrap();
        stream.write_all(&read).unwrap();
    });
    let gateway = Gateway::start(&config(upstream, ""));
    let mut client = gateway.client();
    let lines = SWITCH.map(|(name, value)| format!("{name}: {value}\r\n")).concat();
    client.send(format!("GET /ws HTTP/1.1\r\nHost: a.test\r\n{lines}\r\nearly question").as_bytes());
    assert_eq!(client.head().unwrap().status, 101);
    let mut read = [0; 12 + 14];
    client.stream.read_exact(&mut read).unwrap();
    assert_eq!(read[..], *b"early answerearly question");
}

#[test]
fn half_closed_tunnel_keeps_the_other_direction_open() {
    let upstream = Switching::start();
    let gateway = Gateway::start(&config(upstream.address, ""));
    let (mut client, mut server) = upstream.tunnel(&gateway);
    pass(&mut client, &mut server, b"all that I have");
    client.shutdown(Shutdown::Write).unwrap();
    assert_gone(&mut server);
    pass(&mut server, &mut client, b"then listen");
    drop(server);
    assert_gone(&mut client);
}

// ---- rejected upgrades ---------------------------------------------------------------------------

#[test]
fn upgrade_without_websocket_on_the_route_is_an_ordinary_request() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&config(upstream.address, ""));
    let websocket = "Connection: Upgrade\r\nUpgrade: websocket\r\n";
    for (what, request, body) in [
        ("a closed route", format!("GET /plain HTTP/1.1\r\n{websocket}"), ""),
        ("a closed route, with a body", format!("POST /plain HTTP/1.1\r\n{websocket}Content-Length: 4\r\n"), "body"),
        ("a body", format!("POST /ws HTTP/1.1\r\n{websocket}Content-Length: 4\r\n"), "body"),
        ("HTTP/1.0", format!("GET /ws HTTP/1.0\r\n{websocket}Connection: keep-alive\r\n"), ""),
        ("not for this connection", "GET /ws HTTP/1.1\r\nUpgrade: websocket\r\n".to_owned(), ""),
        (
            "HTTP/2",
            "GET /ws HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: \r\n"
                .to_owned(),
            "",
        ),
        ("HTTP/2 in upper case", "GET /ws HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: H2C\r\n".to_owned(), ""),
        ("TLS", "OPTIONS /ws HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: TLS/1.3, HTTP/1.1\r\n".to_owned(), ""),
    ] {
        let mut client = gateway.client();
        client.send(format!("{request}Host: a.test\r\n\r\n{body}").as_bytes());
        let reply = client.reply().unwrap_or_else(|| panic!("{what}: no response"));
        assert_eq!((reply.status, reply.text()), (200, "ok"), "{what}");
        let seen = upstream.last();
        for name in ["upgrade", "connection", "http2-settings"] {
            assert_eq!(seen.headers(name), [""; 0], "{what}: {}", seen.head);
        }
        assert_eq!(seen.body, body.as_bytes(), "{what}");
        // The bytes that follow are a request, not bytes of a tunnel.
        client.send(b"GET /nowhere HTTP/1.1\r\nHost: a.test\r\n\r\n");
        assert_eq!(client.reply().map(|reply| reply.status), Some(404), "{what}: the request is routed");
    }
    assert!(upstream.seen.lock().unwrap().iter().all(|seen| seen.target() != "/nowhere"), "nothing was tunnelled");
}

#[test]
fn upgrade_rejected_by_the_upstream_opens_no_tunnel() {
    for (answer, status) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno", 200),
        ("HTTP/1.1 426 Upgrade Required\r\nUpgrade: other\r\nConnection: upgrade\r\nContent-Length: 2\r\n\r\nno", 426),
        ("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno", 403),
        ("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: other\r\n\r\n", 502),
        ("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: chat/2, h2c\r\n\r\n", 502),
        ("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\n\r\n", 502),
    ] {
        let (sender, rest) = channel();
        let sender = Mutex::new(sender);
        let upstream = serve(move |mut stream| {
            read_head(&mut stream).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest);
            sender.lock().unwrap().send(rest).unwrap();
        });
        let gateway = Gateway::start(&config(upstream, ""));
        let mut client = gateway.client();
        request_upgrade(&mut client, "/ws");
        let reply = client.reply().unwrap();
        assert_eq!(reply.status, status, "{answer}");
        if status == 502 {
            reply.assert_problem(502, answer);
        } else {
            assert_eq!(reply.text(), "no", "{answer}");
        }
        client.send(b"GET /nowhere HTTP/1.1\r\nHost: a.test\r\n\r\n");
        assert_eq!(client.reply().map(|reply| reply.status), Some(404), "{answer}: the request is routed");
        drop((client, gateway));
        assert_eq!(rest.recv_timeout(MAX_WAIT).unwrap(), b"", "{answer}: bytes were tunnelled");
    }
}

#[test]
fn upgrade_over_the_limit_is_429() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&config(upstream.address, "[limit.l]\nby = \"ip\"\nquota = \"1/24h\"\n"));
    assert_eq!(gateway.get("/quick").status, 200);
    let mut client = gateway.client();
    client.get_with("/ws", &SWITCH).assert_problem(429, "over the limit");
    assert_eq!(client.get("/nowhere").status, 404, "the connection continues");
    assert_eq!(upstream.count(), 0);
}

// ---- lifetime ------------------------------------------------------------------------------------

#[test]
fn lost_upstream_closes_the_tunnel() {
    let upstream = Switching::start();
    let gateway = Gateway::start(&config(upstream.address, PLACES));
    for reset in [false, true] {
        let (mut client, mut server) = upstream.tunnel(&gateway);
        pass(&mut server, &mut client, b"hello");
        let server = socket2::Socket::from(server);
        if reset {
            server.set_linger(Some(Duration::ZERO)).unwrap();
        }
        drop(server);
        assert_gone(&mut client);
        drop(client);
        assert_permits_free(&gateway);
    }
}

#[test]
fn lost_client_closes_the_tunnel() {
    let upstream = Switching::start();
    let gateway = Gateway::start(&config(upstream.address, PLACES));
    for reset in [false, true] {
        let (mut client, mut server) = upstream.tunnel(&gateway);
        pass(&mut client, &mut server, b"hello");
        let client = socket2::Socket::from(client);
        if reset {
            client.set_linger(Some(Duration::ZERO)).unwrap();
        }
        drop(client);
        assert_gone(&mut server);
        drop(server);
        assert_permits_free(&gateway);
    }
}

#[test]
fn tunnel_longer_than_the_permit_ttl_keeps_its_permit() {
    let redis = Redis::start();
    std::thread::scope(|scope| {
        for store in [String::new(), redis.store()] {
            scope.spawn(move || {
                let (upstream, _) = echo();
                // The permit TTL is 7 s.
                let gateway = Gateway::start(&config(upstream, &format!("{store}{PLACES}")));
                let (_other, mut socket) = (connect(&gateway), connect(&gateway));
                let started = monotonic();
                while started.elapsed() < Duration::from_secs(15) {
                    assert_eq!(
                        gateway.get("/quick").status,
                        429,
                        "both tunnels hold their permits after {:?}",
                        started.elapsed()
                    );
                    // The loop lasts for two permit TTLs, in which no bytes may arrive.
                    assert_silent(socket.get_mut(), Duration::from_millis(100));
                }
                send_text(&mut socket, "still here");
                socket.close(None).unwrap();
                assert_closed_well(&mut socket);
                drop(socket);
                eventually("one permit is free", || gateway.get("/quick").status == 200);
            });
        }
    });
}

#[test]
fn body_idle_timeout_does_not_apply_to_tunnels() {
    let upstream = Switching::start();
    let times = "[server]\nbody_idle_timeout = \"300ms\"\nidle_timeout = \"60s\"\n";
    let gateway = Gateway::start(&config(upstream.address, times));
    let (mut client, mut server) = upstream.tunnel(&gateway);
    // The tunnel is silent from its start, then again after bytes from each side.
    for _ in 0..2 {
        assert_silent(&mut client, Duration::from_millis(900));
        pass(&mut server, &mut client, b"still here");
        pass(&mut client, &mut server, b"me too");
    }
}

#[test]
fn tunnel_idle_timeout_applies_with_any_body_idle_timeout() {
    let upstream = Switching::start();
    let times = "[server]\nbody_idle_timeout = \"60s\"\nidle_timeout = \"1s\"\n";
    let gateway = Gateway::start(&config(upstream.address, times));
    for speaks in [false, true] {
        let (mut client, mut server) = upstream.tunnel(&gateway);
        if speaks {
            pass(&mut client, &mut server, b"hello");
        }
        let silent = monotonic();
        assert_gone(&mut client);
        assert!(silent.elapsed() > Duration::from_millis(800), "the tunnel ended after {:?}", silent.elapsed());
        assert_gone(&mut server);
    }
}

#[test]
fn idle_tunnel_is_closed_and_bytes_of_either_side_keep_it_open() {
    let upstream = Switching::start();
    let gateway = Gateway::start(&config(upstream.address, "[server]\nidle_timeout = \"2s\"\n"));
    let (mut client, mut server) = upstream.tunnel(&gateway);
    let started = monotonic();
    while started.elapsed() < Duration::from_secs(5) {
        // Bytes from one side are sufficient to keep the tunnel open.
        pass(&mut server, &mut client, b"tick");
        assert_silent(&mut client, Duration::from_millis(100));
    }
    let silent = monotonic();
    assert_gone(&mut client);
    assert!(silent.elapsed() > Duration::from_millis(1500), "the tunnel ended after {:?}", silent.elapsed());
    assert_gone(&mut server);
}

#[test]
fn stopping_gateway_waits_for_tunnels() {
    let upstream = Switching::start();
    let mut gateway = Gateway::start(&config(upstream.address, ""));
    let (mut client, mut server) = upstream.tunnel(&gateway);
    gateway.terminate();
    eventually("no further connection is accepted", || TcpStream::connect(gateway.address).is_err());
    pass(&mut client, &mut server, b"goes on");
    pass(&mut server, &mut client, b"both ways");
    drop((client, server));
    assert!(gateway.wait().success());
}

#[test]
fn stopping_gateway_closes_tunnels_at_drain_timeout() {
    let upstream = Switching::start();
    let mut gateway = Gateway::start(&config(upstream.address, "[server]\ndrain_timeout = \"200ms\"\n"));
    let (mut client, mut server) = upstream.tunnel(&gateway);
    gateway.terminate();
    assert!(gateway.wait().success());
    assert_gone(&mut client);
    assert_gone(&mut server);
}

// ---- WebSockets over HTTP/2 (RFC 8441) -----------------------------------------------------------

/// A text frame with the content `hello` (RFC 6455 §5.2): from a client with a mask of zeros, and from a server.
const HELLO: [&[u8]; 2] = [b"\x81\x85\0\0\0\0hello", b"\x81\x05hello"];
/// A close frame of a client, and of a server.
const CLOSE: [&[u8]; 2] = [b"\x88\x80\0\0\0\0", b"\x88\0"];

/// An HTTP/2 client that has received the SETTINGS of the gateway.
async fn http2_client(gateway: &Gateway) -> h2::client::SendRequest<Bytes> {
    let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let request = http::Request::get("http://chat.test/nowhere").body(()).unwrap();
    assert_eq!(client.send_request(request, true).unwrap().0.await.unwrap().status(), 404);
    client
}

/// A WebSocket of an HTTP/2 client.
struct Http2Socket {
    response: http::Response<()>,
    sender: h2::SendStream<Bytes>,
    receiver: h2::RecvStream,
}

impl Http2Socket {
    async fn open(client: &mut h2::client::SendRequest<Bytes>, path: &str) -> Http2Socket {
        let request = http::Request::connect(format!("http://chat.test{path}"))
            .extension(h2::ext::Protocol::from_static("websocket"))
            .header("sec-websocket-version", "13")
            .body(())
            .unwrap();
        let (response, sender) = client.send_request(request, false).unwrap();
        let (parts, receiver) = response.await.unwrap().into_parts();
        Http2Socket { response: http::Response::from_parts(parts, ()), sender, receiver }
    }

    fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    /// Send a frame, and read the frame that the server responds with.
    async fn exchange(&mut self, [frame, expected]: [&'static [u8]; 2]) {
        self.sender.send_data(Bytes::from_static(frame), false).unwrap();
        let mut received = Vec::new();
        while received.len() < expected.len() {
            let data = self.receiver.data().await.unwrap().unwrap();
            self.receiver.flow_control().release_capacity(data.len()).unwrap();
            received.extend_from_slice(&data);
        }
        assert_eq!(received, expected);
    }

    /// Wait until the gateway ends the stream, with END_STREAM or a reset.
    async fn assert_ended(mut self) {
        if let Some(Ok(data)) = self.receiver.data().await {
            assert_eq!(data.escape_ascii().to_string(), "", "bytes follow");
        }
    }
}

fn block_on<T>(talk: impl Future<Output = T>) -> T {
    // A second thread drives the connections while the test waits for the gateway.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(MAX_WAIT, talk).await.expect("the gateway responds in time") })
}

#[test]
fn websocket_over_http2_reaches_an_http1_upstream() {
    let (upstream, heads) = echo();
    let log = "[log]\naccess = \"access.log\"\nformat = \"json\"\n";
    let gateway = Gateway::start(&config(upstream, &format!("{log}{PLACES}")));
    block_on(async {
        let mut client = http2_client(&gateway).await;
        assert!(client.is_extended_connect_protocol_enabled());
        for ends_with_reset in [false, true] {
            let mut sockets =
                [Http2Socket::open(&mut client, "/ws?room=1").await, Http2Socket::open(&mut client, "/ws").await];
            for socket in &mut sockets {
                assert_eq!(socket.status(), 200);
                for name in ["upgrade", "connection", "sec-websocket-accept"] {
                    assert!(!socket.response.headers().contains_key(name), "{name}");
                }
                socket.exchange(HELLO).await;
            }
            // Both permits are held, over HTTP/2 and over HTTP/1.1.
            assert_eq!(Http2Socket::open(&mut client, "/ws").await.status(), 429);
            assert_eq!(gateway.get("/quick").status, 429);
            for mut socket in sockets {
                if ends_with_reset {
                    socket.sender.send_reset(h2::Reason::CANCEL);
                } else {
                    socket.exchange(CLOSE).await;
                    socket.assert_ended().await;
                }
            }
            assert_permits_free(&gateway);
        }
    });
    let heads = heads.lock().unwrap();
    assert_eq!(heads.len(), 4);
    for head in &*heads {
        assert_eq!(
            (&head["host"], &head["sec-websocket-version"]),
            (&"chat.test".parse().unwrap(), &"13".parse().unwrap())
        );
        assert_eq!(head["sec-websocket-key"].len(), 24, "{head:?}");
    }
    assert_ne!(heads[0]["sec-websocket-key"], heads[1]["sec-websocket-key"]);
    let record = |status: u64| {
        let log = std::fs::read_to_string(gateway.directory().join("access.log")).unwrap();
        let records = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        records.filter(|record| record["route"] == "ws" && record["status"] == status).count()
    };
    eventually("each WebSocket has a record", || record(200) == 4 && record(429) == 2);
}

#[test]
fn websocket_over_http2_ends_at_idle_timeout_and_gets_errors_of_the_upstream() {
    let forbidding = serve(|mut stream| {
        read_head(&mut stream).unwrap();
        stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno").unwrap();
    });
    let (echo, _) = echo();
    let gateway = Gateway::start(&config(echo, &format!("[server]\nidle_timeout = \"300ms\"\n{PLACES}")));
    block_on(async {
        let mut client = http2_client(&gateway).await;
        let mut socket = Http2Socket::open(&mut client, "/ws").await;
        socket.exchange(HELLO).await;
        socket.assert_ended().await;
    });
    assert_permits_free(&gateway);
    let gateway = Gateway::start(&config(forbidding, ""));
    block_on(async {
        let mut client = http2_client(&gateway).await;
        let mut socket = Http2Socket::open(&mut client, "/ws").await;
        assert_eq!(socket.status(), 403);
        assert_eq!(socket.receiver.data().await.unwrap().unwrap(), "no");
    });
}

#[test]
fn http2_client_gets_502_if_the_upstream_does_not_accept_the_websocket_correctly() {
    for response in [
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: chat/2\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
    ] {
        let upstream = serve(move |mut stream| {
            read_head(&mut stream).unwrap();
            stream.write_all(response.as_bytes()).unwrap();
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        });
        let gateway = Gateway::start(&config(upstream, ""));
        block_on(async {
            let mut client = http2_client(&gateway).await;
            assert_eq!(Http2Socket::open(&mut client, "/ws").await.status(), 502, "{response}");
        });
    }
}

#[test]
fn websocket_on_a_route_without_websockets_is_logged_and_counted() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&with_admin(&config(upstream.address, "")));
    let ignored = || metric(&gateway, "sluicegate_websockets_ignored_total");
    let websocket = [("Connection", "Upgrade"), ("Upgrade", "websocket")];
    let mut client = gateway.client();
    for count in 1..=3 {
        assert_eq!(client.get_with("/plain", &websocket).status, 200, "an ordinary request");
        assert_eq!(ignored(), f64::from(count));
    }
    // An offer of another protocol is no WebSocket.
    assert_eq!(client.get_with("/plain", &SWITCH).status, 200);
    block_on(async {
        let mut client = http2_client(&gateway).await;
        for path in ["/plain", "/quick"] {
            assert_eq!(Http2Socket::open(&mut client, path).await.status(), 501, "{path}");
        }
        assert_eq!(Http2Socket::open(&mut client, "/nowhere").await.status(), 404);
    });
    assert_eq!(ignored(), 5.0);
    let log = gateway.log();
    let warning = "but the route does not allow it: set `websocket = true` in the route";
    assert_eq!(log.matches(warning).count(), 1, "{log}");
    assert!(log.contains("plain"), "{log}");
    assert_eq!(upstream.count(), 4, "the upstream gets no request of an HTTP/2 WebSocket");
}

#[test]
fn extended_connect_is_offered_only_on_listeners_with_a_websocket_route() {
    let (upstream, _) = echo();
    let open = config(upstream, "");
    let closed = open.replace("websocket = true\n", "");
    let gateway = Gateway::start(&reload::with_admin(&closed));
    let is_offered = || block_on(async { http2_client(&gateway).await.is_extended_connect_protocol_enabled() });
    assert!(!is_offered());
    reload::reloads(&gateway, &open);
    assert!(is_offered(), "a reload applies to new connections");
    let other = open.replace("websocket = true\n", "websocket = true\nlisteners = [\"other\"]\n");
    let listeners =
        "[[listener]]\naddress = \"127.0.0.1:0\"\n[[listener]]\nname = \"other\"\naddress = \"127.0.0.1:0\"\n";
    let gateway = Gateway::start(&format!("{other}{listeners}"));
    let is_offered = || block_on(async { http2_client(&gateway).await.is_extended_connect_protocol_enabled() });
    assert!(!is_offered(), "the route belongs to another listener");
}

/// The WebSockets of the old process continue, and the new process accepts others.
#[test]
fn websockets_of_both_protocols_continue_during_a_hot_restart() {
    let (upstream, _) = echo();
    let mut gateway = Gateway::start(&config(upstream, ""));
    let mut of_http1 = connect(&gateway);
    send_text(&mut of_http1, "before");
    block_on(async {
        let mut client = http2_client(&gateway).await;
        let mut of_http2 = Http2Socket::open(&mut client, "/ws").await;
        of_http2.exchange(HELLO).await;
        gateway.put(&config(upstream, "").replace("status = 200", "status = 204"));
        signal(&gateway.child, "USR2");
        let _successor = Successor::of(&gateway);
        eventually("the old process accepts no connections", || (0..20).all(|_| gateway.get("/quick").status == 204));
        send_text(&mut of_http1, "after");
        of_http2.exchange(HELLO).await;
        let mut later = http2_client(&gateway).await;
        let mut socket = Http2Socket::open(&mut later, "/ws").await;
        socket.exchange(HELLO).await;
        send_text(&mut connect(&gateway), "of the new process");
        assert!(gateway.child.try_wait().unwrap().is_none(), "the old process waits for its WebSockets");
        of_http2.exchange(CLOSE).await;
        of_http2.assert_ended().await;
        of_http1.close(None).unwrap();
        assert_closed_well(&mut of_http1);
        drop(of_http1);
        assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
        socket.exchange(HELLO).await;
    });
}
