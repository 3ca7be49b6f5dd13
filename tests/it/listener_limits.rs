//! Limits of the listener (sizes, numbers and times), and responses sent before the request is read: faults 8, 28 and
//! 29 in docs/testing.md.

#![allow(clippy::disallowed_methods)] // the tests measure times

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::client::Client;
use crate::support::frames::{
    DATA, END_HEADERS, HEADERS, Http2, INITIAL_WINDOW_SIZE, RST_STREAM, WINDOW_UPDATE, block, frame,
};
use crate::support::gateway::Gateway;
use crate::support::upstream::{Upstream, read_head, read_request, serve};
use crate::support::{MAX_WAIT, eventually};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream as AsyncStream;

const UPLOAD: usize = 10 << 20;

/// Maximum additional delay of a timeout that the tests accept, because the machine may be busy.
const LATE: Duration = Duration::from_secs(4);

/// Return one route to an upstream, and several routes that never read the request body.
fn routes(upstream: SocketAddr, all: &str) -> String {
    format!(
        "[limit.once]\nby = \"global\"\nalgorithm = \"fixed-window\"\nquota = \"1/year\"\n\
         [limit.key]\nby = \"api-key\"\nquota = \"1/s\"\n[auth.keys]\nkind = \"api-key\"\non_unknown = \"accept\"\n\
         [[route]]\nname = \"limited\"\npath = \"/limited\"\nrespond = {{ status = 200, body = \"ok\" }}\nlimits = [\"once\"]\n\
         [[route]]\nname = \"key\"\npath = \"/key\"\nrespond = {{ status = 200 }}\nidentify = [\"keys\"]\nlimits = [\"key\"]\n\
         [[route]]\nname = \"respond\"\npath = \"/respond\"\nrespond = {{ status = 200, body = \"ok\" }}\n\
         [[route]]\nname = \"small\"\npath = \"/small\"\nupstream = \"api\"\nmax_body = \"32KiB\"\n\
         [[route]]\nname = \"all\"\npath = \"/up/{{*rest}}\"\nupstream = \"api\"\n{all}\n\
         [upstream.api]\nservers = [\"http://{upstream}\"]\n"
    )
}

fn over_tls() -> String {
    let folder = format!("{}/tests/certs", env!("CARGO_MANIFEST_DIR"));
    let pair = format!("{{ cert = \"{folder}/one.pem\", key = \"{folder}/one.key\" }}");
    format!("[[listener]]\naddress = \"127.0.0.1:0\"\ntls.certificates = [{pair}]\n")
}

fn tls_client(protocols: &[&[u8]]) -> Arc<rustls::ClientConfig> {
    let certificate = format!("{}/tests/certs/one.pem", env!("CARGO_MANIFEST_DIR"));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(certificate).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    Arc::new(config)
}

fn tls(address: SocketAddr) -> rustls::StreamOwned<rustls::ClientConnection, TcpStream> {
    let name = ServerName::try_from("one.test").unwrap();
    let connection = rustls::ClientConnection::new(tls_client(&[b"http/1.1"]), name).unwrap();
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    rustls::StreamOwned::new(connection, stream)
}

/// Send a large body and ignore write errors, then read the response.
fn upload(stream: &mut (impl Read + Write), path: &str, chunked: bool) -> String {
    let framing = match chunked {
        true => "Transfer-Encoding: chunked".to_owned(),
        false => format!("Content-Length: {UPLOAD}"),
    };
    stream.write_all(format!("POST {path} HTTP/1.1\r\nHost: a.test\r\n{framing}\r\n\r\n").as_bytes()).unwrap();
    let piece = vec![b'x'; 64 << 10];
    for _ in 0..UPLOAD / piece.len() {
        let head = if chunked { format!("{:x}\r\n", piece.len()) } else { String::new() };
        let tail = if chunked { &b"\r\n"[..] } else { b"" };
        if [head.as_bytes(), &piece, tail].iter().any(|part| stream.write_all(part).is_err()) {
            break;
        }
    }
    let mut answer = Vec::new();
    // Ignore read errors: the gateway may reset the connection after it has sent the response.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// Return whether `answer` is a complete response with this status.
fn is_read(answer: &str, status: u16) -> bool {
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().parse::<usize>().unwrap();
    head.starts_with(&format!("HTTP/1.1 {status} ")) && head.contains("connection: close") && body.len() == length
}

/// Call `job` for 100 clients, ten of them at a time. Return how many calls returned true.
fn successes_of_100(job: impl Fn(usize) -> bool + Sync) -> usize {
    std::thread::scope(|scope| {
        let job = &job;
        let threads: Vec<_> =
            (0..10).map(|tens| scope.spawn(move || (0..10).filter(|ones| job(tens * 10 + ones)).count())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    })
}

#[test]
fn uploading_client_reads_the_429() {
    let upstream = Upstream::start();
    let config = format!("[server]\nheader_timeout = \"60s\"\n{}", routes(upstream.address, ""));
    let (clear, secure) = (Gateway::start(&config), Gateway::start(&(config + &over_tls())));
    assert_eq!(clear.get("/limited").status, 200);
    assert_eq!(clear.get("/limited").status, 429);
    let mut first = tls(secure.address);
    first.write_all(b"GET /limited HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n").unwrap();
    let _ = first.read_to_end(&mut Vec::new());
    let read = successes_of_100(|index| {
        let mut stream = TcpStream::connect(clear.address).unwrap();
        stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
        is_read(&upload(&mut stream, "/limited", index % 2 == 0), 429)
    });
    println!("fault 8: HTTP/1.1: {read} of 100");
    assert_eq!(read, 100);
    let read = successes_of_100(|index| is_read(&upload(&mut tls(secure.address), "/limited", index % 2 == 0), 429));
    println!("fault 8: TLS: {read} of 100");
    assert_eq!(read, 100);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let body = Bytes::from(vec![b'x'; UPLOAD]);
    for (what, gateway) in [("clear", &clear), ("TLS", &secure)] {
        let read = runtime.block_on(async {
            let mut clients = tokio::task::JoinSet::new();
            for _ in 0..100 {
                clients.spawn(upload_by_http_2(gateway.address, what == "TLS", body.clone()));
            }
            clients.join_all().await.into_iter().filter(|status| *status == Some(429)).count()
        });
        println!("fault 8: HTTP/2, {what}: {read} of 100");
        assert_eq!(read, 100);
    }
    assert_eq!(upstream.count(), 0);
}

async fn upload_by_http_2(address: SocketAddr, secure: bool, body: Bytes) -> Option<u16> {
    let stream = AsyncStream::connect(address).await.unwrap();
    let request = http::Request::post("https://one.test/limited").body(Full::new(body)).unwrap();
    let mut sender = if secure {
        let connector = tokio_rustls::TlsConnector::from(tls_client(&[b"h2"]));
        let stream = connector.connect(ServerName::try_from("one.test").unwrap(), stream).await.unwrap();
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender
    } else {
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender
    };
    let response = sender.send_request(request).await.ok()?;
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.ok()?.to_bytes();
    (body.ends_with(b"}\n")).then_some(status)
}

#[test]
fn uploading_client_reads_every_early_response() {
    let upstream = Upstream::responding(|_| b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_vec());
    let early = serve(|mut stream| {
        // Respond without reading the body, then close the sending direction of the connection.
        read_head(&mut stream).unwrap();
        stream.write_all(b"HTTP/1.1 507 Full\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfull").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let gateway = Gateway::start(&routes(upstream.address, ""));
    let store = "[store]\nurl = \"redis://127.0.0.1:1\"\n[limit.l]\nby = \"global\"\nquota = \"1/s\"\non_store_error = \"deny\"\n\
                 [[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\nlimits = [\"l\"]\n";
    let down = Gateway::start(store);
    let full = Gateway::start(&routes(early, ""));
    let unreachable = Gateway::start(&routes("127.0.0.1:1".parse().unwrap(), ""));
    for (gateway, path, status) in [
        (&gateway, "/key", 401),
        (&gateway, "/none", 404),
        (&gateway, "/a%2Fb", 400),
        (&gateway, "/small", 413),
        (&gateway, "/respond", 200),
        (&down, "/", 503),
        (&unreachable, "/up/", 502),
    ] {
        for chunked in [false, true] {
            let answer = upload(&mut TcpStream::connect(gateway.address).unwrap(), path, chunked);
            assert!(is_read(&answer, status), "{path}, chunked {chunked}: {status} expected: {answer}");
        }
    }
    let answer = upload(&mut TcpStream::connect(full.address).unwrap(), "/up/", false);
    assert!(
        answer.starts_with("HTTP/1.1 507 ") && answer.ends_with("full"),
        "the client gets the response of the upstream: {answer}"
    );
    // If a header section is too long, the gateway rejects it without reading the rest.
    let mut stream = TcpStream::connect(gateway.address).unwrap();
    let _ = stream.write_all(format!("GET / HTTP/1.1\r\nx-long: {}", "x".repeat(1 << 20)).as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.starts_with(b"HTTP/1.1 431 "), "{}", String::from_utf8_lossy(&answer));
}

#[test]
fn denied_request_with_a_small_body_keeps_the_connection() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&routes(upstream.address, ""));
    let mut client = gateway.client();
    assert_eq!(client.get("/limited").status, 200);
    for size in [1, 1000, 9_000, 60_000] {
        for _ in 0..10 {
            let head = format!("POST /limited HTTP/1.1\r\nHost: a.test\r\nContent-Length: {size}\r\n\r\n");
            client.send(head.as_bytes());
            let reply = client.reply().expect("the connection continues");
            assert_eq!(
                (reply.status, reply.header("connection")),
                (429, None),
                "the {size} bytes of the body follow the response"
            );
            client.send(&vec![b'x'; size]);
        }
    }
    assert_eq!(client.get("/respond").text(), "ok");
}

#[test]
fn complete_request_keeps_the_connection() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&routes(upstream.address, ""));
    let mut client = gateway.client();
    for _ in 0..3 {
        client.send(b"POST /up/ HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n");
        let reply = client.reply().expect("the connection continues");
        assert_eq!((reply.status, reply.header("connection")), (200, None), "a chunked body keeps the connection");
        let reply = client.request("POST", "/up/", &[], b"hi");
        assert_eq!(
            (reply.status, reply.header("connection")),
            (200, None),
            "a body with Content-Length keeps the connection"
        );
    }
}

#[test]
fn rejected_request_with_expect_gets_no_100_continue() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&routes(upstream.address, ""));
    assert_eq!(gateway.get("/limited").status, 200);
    for (path, length, status) in [
        ("/limited", 100, 429),
        ("/limited", UPLOAD, 429),
        ("/key", 100, 401),
        ("/none", 100, 404),
        ("/small", UPLOAD, 413),
        ("/respond", 100, 200),
    ] {
        let mut client = gateway.client();
        let head =
            format!("POST {path} HTTP/1.1\r\nHost: a.test\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n");
        client.send(head.as_bytes());
        let reply = client.reply().unwrap();
        // The gateway cannot tell whether the next bytes are the body or a new request. It must close the connection.
        assert_eq!((reply.status, reply.header("connection")), (status, Some("close")), "{path}");
        client.assert_closed(path);
    }
}

#[test]
fn body_larger_than_max_body_is_413() {
    let (tell, events) = channel();
    let upstream = serve(move |mut stream| {
        while let Some(seen) = read_request(&mut stream) {
            tell.send(Some(seen.body.len())).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
        }
        tell.send(None).unwrap();
    });
    let gateway = Gateway::start(&format!("[server]\nworkers = 1\n{}", routes(upstream, "")));
    let exact = 32 << 10;
    let mut client = gateway.client();
    assert_eq!(client.request("POST", "/small", &[], &vec![b'x'; exact]).status, 200, "the largest allowed body");
    assert_eq!(events.recv_timeout(MAX_WAIT).unwrap(), Some(exact));
    client.send(format!("POST /small HTTP/1.1\r\nHost: a.test\r\nContent-Length: {}\r\n\r\n", exact + 1).as_bytes());
    client.reply().unwrap().assert_problem(413, "by Content-Length, before the body");
    for pieces in [exact + 1, 1000, 10] {
        // A chunked body has no length in advance: the gateway counts bytes as they arrive.
        let mut client = gateway.client();
        client.send(b"POST /small HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n");
        let body = [format!("{pieces:x}\r\n").as_bytes(), &vec![b'x'; pieces], b"\r\n"].concat();
        for _ in 0..exact.div_ceil(pieces) + 1 {
            if client.stream.get_mut().write_all(&body).is_err() {
                break;
            }
        }
        let reply = client.reply().expect("a response");
        reply.assert_problem(413, &format!("chunks of {pieces}"));
        assert_eq!(reply.header("connection"), Some("close"));
        assert_eq!(events.recv_timeout(MAX_WAIT).unwrap(), None, "the upstream sees an aborted request");
    }
    // Send an HTTP/2 body without Content-Length.
    let mut client = Http2::connect(gateway.address, &[]);
    client.send(&frame(HEADERS, END_HEADERS, 1, &block("POST", "/small", &[]))).unwrap();
    for _ in 0..3 {
        client.send(&frame(DATA, 0, 1, &vec![b'x'; 16 << 10])).unwrap();
    }
    let head = client.until(HEADERS, 1).expect("a response");
    // The first header of the response is encoded as a literal with an indexed name (RFC 7541 §6.2.2). Index 8 of the
    // static table is `:status` (Appendix A).
    assert_eq!(head.payload[0] & 0x0f, 8, "{head:?}");
    assert_eq!(
        client.until(RST_STREAM, 1).expect("the stream ends").payload,
        [0, 0, 0, 0],
        "NO_ERROR: the client keeps the response"
    );
    assert_eq!(events.recv_timeout(MAX_WAIT).unwrap(), None);
}

// ---- numbers -------------------------------------------------------------------------------------

const HELLO: &str = "[[route]]\nname = \"hello\"\npath = \"/\"\nrespond = { status = 200, body = \"hello\" }\n";

/// Return whether the peer closes the connection within this time. Panic if it sends bytes.
fn is_closed(stream: &mut TcpStream, within: Duration) -> bool {
    stream.set_read_timeout(Some(within)).unwrap();
    match stream.read(&mut [0; 1024]) {
        Ok(0) => true,
        Ok(_) => panic!("unexpected bytes"),
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

#[test]
fn connections_beyond_max_connections_wait() {
    for layout in ["per-core", "work-stealing"] {
        let gateway =
            Gateway::start(&format!("[server]\nmax_connections = 3\nworkers = 2\nthreading = \"{layout}\"\n{HELLO}"));
        let mut open: Vec<_> = (0..3).map(|_| gateway.client()).collect();
        for client in &mut open {
            assert_eq!(client.get("/").status, 200);
        }
        let mut waiting: Vec<_> = (0..8).map(|_| gateway.client()).collect();
        for client in &mut waiting {
            client.send(b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n");
        }
        eventually("the event is logged", || gateway.log().contains("max_connections"));
        let stream = waiting[0].stream.get_mut();
        assert!(!is_closed(stream, Duration::from_millis(300)), "{layout}: the connection waits, it is not closed");
        stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
        // When one connection is closed, the waiting connections are served one after the other.
        open.pop();
        for client in &mut waiting {
            assert_eq!(client.reply().expect("a response").status, 200, "{layout}");
        }
        assert_eq!(open[0].get("/").status, 200);
        gateway.terminate();
    }
}

#[test]
fn connections_beyond_max_connections_per_ip_are_closed() {
    let config =
        "[server]\nmax_connections_per_ip = 2\n[client_ip]\ntrusted_proxies = [\"127.0.0.9\"]\nipv4_prefix = 31\n";
    let gateway = Gateway::start(&format!("{config}{HELLO}"));
    let from = |address: &str| Client::connect_from(address.parse::<IpAddr>().unwrap(), gateway.address);
    // With `ipv4_prefix = 31`, 127.0.0.2 and 127.0.0.3 are one client network.
    let mut open = vec![from("127.0.0.2"), from("127.0.0.3")];
    for client in &mut open {
        assert_eq!(client.get("/").status, 200);
    }
    from("127.0.0.2").assert_closed("a third connection of the network");
    assert_eq!(from("127.0.0.4").get("/").status, 200, "another network has its own connections");
    let mut proxied: Vec<_> = (0..5).map(|_| from("127.0.0.9")).collect();
    for client in &mut proxied {
        assert_eq!(client.get("/").status, 200, "connections of a trusted proxy are not limited");
    }
    open.pop();
    eventually("a connection slot is free", || {
        let mut client = from("127.0.0.2");
        let sent = client.stream.get_mut().write_all(b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n");
        sent.is_ok() && client.reply().is_some_and(|reply| reply.status == 200)
    });
}

/// Open 400 connections to a process with at most 256 file descriptors. Assert that it uses little CPU and recovers.
fn assert_calm_without_descriptors(what: &str, server: &str) {
    let gateway = Gateway::start_by(&format!("{server}{HELLO}"), |path: &Path| {
        let mut command = Command::new("sh");
        let script = format!("ulimit -n 256; exec {} --config {}", env!("CARGO_BIN_EXE_sluicegate"), path.display());
        command.args(["-c", &script]);
        command
    });
    let mut early = gateway.client();
    assert_eq!(early.get("/").status, 200);
    assert_eq!(gateway.log().contains("raise `ulimit -Hn`"), server.contains("1000"), "{what}: {}", gateway.log());
    let crowd: Vec<_> = (0..400).map(|_| TcpStream::connect(gateway.address).unwrap()).collect();
    let (started, before) = (Instant::now(), gateway.cpu_ms());
    while started.elapsed() < Duration::from_secs(2) {
        // Meanwhile, the gateway serves connections that it has accepted.
        assert_eq!(early.get("/").status, 200, "{what}");
        std::thread::park_timeout(Duration::from_millis(100));
    }
    let share = (gateway.cpu_ms() - before) as f64 / started.elapsed().as_millis() as f64;
    drop(crowd);
    let left = Instant::now();
    assert_eq!(gateway.get("/").status, 200, "{what}: a new client");
    let recovered = left.elapsed();
    println!("fault 28: {what}: {:.1} % of a core, recovered in {recovered:?}", share * 100.0);
    assert!(share <= 0.2, "{what}: {share} of a core");
    assert!(recovered < Duration::from_secs(2) + LATE, "{what}: {recovered:?}");
}

#[test]
fn gateway_out_of_descriptors_uses_little_cpu_and_recovers() {
    assert_calm_without_descriptors("the default of max_connections", "");
    assert_calm_without_descriptors("more connections than files", "[server]\nmax_connections = 1000\n");
}

// ---- time ----------------------------------------------------------------------------------------

/// Send `start` at once, then `rest` byte by byte. Return the time until the connection is closed.
fn lifetime(address: SocketAddr, start: &[u8], rest: &[u8]) -> Duration {
    let begun = Instant::now();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(start).unwrap();
    let mut rest = rest.iter();
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    while begun.elapsed() < MAX_WAIT {
        match stream.read(&mut [0; 1024]) {
            Ok(0) => return begun.elapsed(),
            // The gateway has sent a SETTINGS frame of HTTP/2 or a TLS handshake message: keep waiting.
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return begun.elapsed(),
        }
        if let Some(byte) = rest.next() {
            let _ = stream.write_all(&[*byte]);
        }
    }
    panic!("the connection is kept open");
}

#[test]
fn incomplete_head_closes_the_connection_at_header_timeout() {
    let deadline = Duration::from_secs(1);
    let server = "[server]\nheader_timeout = \"1s\"\nidle_timeout = \"1h\"\n";
    let clear = Gateway::start(&format!("{server}{HELLO}"));
    let secure = Gateway::start(&format!("{server}{HELLO}{}", over_tls()));
    let slow = [b"GET / HTTP/1.1\r\nHost: a.test\r\nx: ".to_vec(), vec![b'x'; 1000]].concat();
    let settings = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, &[])].concat();
    let half = [settings.clone(), frame(HEADERS, 0, 1, &block("GET", "/", &[]))].concat();
    let hello = [22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];
    let cases: [(&str, &Gateway, &[u8], &[u8]); 9] = [
        ("nothing", &clear, b"", b""),
        ("nothing, TLS", &secure, b"", b""),
        ("part of a TLS hello", &secure, &hello, b""),
        ("a TLS hello by the byte", &secure, &hello, &[0; 500]),
        ("part of a preface", &clear, b"PRI * HT", b""),
        ("a preface by the byte", &clear, b"", &settings),
        ("HTTP/2 without a request", &clear, &settings, b""),
        ("half a head of HTTP/2", &clear, &half, b""),
        ("a head by the byte", &clear, b"", &slow),
    ];
    let times: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = cases
            .iter()
            .map(|(what, gateway, start, rest)| scope.spawn(|| (*what, lifetime(gateway.address, start, rest))))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (what, time) in times {
        println!("fault 29: {what}: closed after {time:?}");
        assert!(time >= deadline.mul_f64(0.9), "{what}: closed after {time:?}, too early");
        assert!(time <= deadline.mul_f64(1.1) + LATE, "{what}: closed after {time:?}, too late");
    }
}

const IDLE: Duration = Duration::from_millis(500);
const IDLE_SERVER: &str = "[server]\nbody_idle_timeout = \"500ms\"\nworkers = 1\n";

/// Start an upstream that sends the headers and a first piece of the body, then each piece that the test sends to the
/// channel.
fn streaming(head: &'static str, pieces: std::sync::mpsc::Receiver<Vec<u8>>) -> SocketAddr {
    let pieces = Mutex::new(pieces);
    serve(move |mut stream| {
        if read_request(&mut stream).is_none() {
            return;
        }
        stream.write_all(head.as_bytes()).unwrap();
        while let Ok(piece) = pieces.lock().unwrap().recv() {
            stream.write_all(&piece).unwrap();
        }
    })
}

#[test]
fn idle_event_stream_stays_open_and_unfinished_body_times_out() {
    let (send, pieces) = channel();
    let upstream = streaming("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n", pieces);
    let gateway = Gateway::start(&format!("{IDLE_SERVER}{}", routes(upstream, "")));
    let mut client = gateway.client();
    client.send(b"GET /up/events HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 200);
    let mut first = [0; 10];
    client.stream.read_exact(&mut first).unwrap();
    assert!(!is_closed(client.stream.get_mut(), 4 * IDLE), "a stream of events may pause longer than the timeout");
    client.stream.get_mut().set_read_timeout(Some(MAX_WAIT)).unwrap();
    send.send(b"6\r\nsecond\r\n0\r\n\r\n".to_vec()).unwrap();
    let mut second = [0; 16];
    client.stream.read_exact(&mut second).unwrap();
    assert_eq!(&second, b"6\r\nsecond\r\n0\r\n\r\n");

    let (_send, pieces) = channel();
    let upstream = streaming("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nfirst", pieces);
    let gateway = Gateway::start(&format!("{IDLE_SERVER}{}", routes(upstream, "")));
    let mut client = gateway.client();
    let begun = Instant::now();
    client.send(b"GET /up/part HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 200);
    let mut rest = Vec::new();
    let _ = client.stream.read_to_end(&mut rest);
    let time = begun.elapsed();
    assert_eq!(rest, b"first", "the body ends before Content-Length");
    assert!(time >= IDLE.mul_f64(0.9) && time < IDLE + LATE, "{time:?}");
}

#[test]
fn stalled_request_body_is_408_at_body_idle_timeout() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!("{IDLE_SERVER}{}", routes(upstream.address, "")));
    for (what, start) in [
        ("by length", &b"POST /up/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000\r\n\r\nhi"[..]),
        ("chunked", b"POST /up/ HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"),
    ] {
        let mut client = gateway.client();
        client.send(start);
        // Pause twice for half of the timeout. Each piece restarts the timeout.
        for piece in [&b"a"[..], b"b"].iter().filter(|_| what == "by length") {
            std::thread::park_timeout(IDLE / 2);
            client.send(piece);
        }
        let begun = Instant::now();
        client.reply().expect("a response").assert_problem(408, what);
        let time = begun.elapsed();
        assert!(time >= IDLE.mul_f64(0.9) && time < IDLE + LATE, "{what}: {time:?}");
        client.assert_closed(what);
    }
    assert_eq!(upstream.count(), 0);
}

/// Start an upstream that sends an endless body. The returned receiver gets a message when a connection to the upstream
/// ends.
fn flood() -> (SocketAddr, std::sync::mpsc::Receiver<()>) {
    let (tell, ended) = channel();
    let address = serve(move |mut stream| {
        if read_request(&mut stream).is_none() {
            return;
        }
        let piece = vec![b'x'; 64 << 10];
        stream.write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 1u64 << 40).as_bytes()).unwrap();
        while stream.write_all(&piece).is_ok() {}
        let _ = tell.send(());
    });
    (address, ended)
}

#[test]
fn client_that_does_not_read_is_reset() {
    let (upstream, ended) = flood();
    let gateway = Gateway::start(&format!("{IDLE_SERVER}{}", routes(upstream, "")));
    let mut client = gateway.client();
    let begun = Instant::now();
    client.send(b"GET /up/ HTTP/1.1\r\nHost: a.test\r\n\r\n");
    ended.recv_timeout(MAX_WAIT).expect("the upstream request is cancelled");
    let time = begun.elapsed();
    assert!(time >= IDLE.mul_f64(0.9) && time < IDLE + LATE, "{time:?}");
    let mut sink = vec![0; 1 << 20];
    let end = loop {
        match client.stream.read(&mut sink) {
            Ok(0) => break None,
            Ok(_) => {}
            Err(error) => break Some(error.kind()),
        }
    };
    assert_eq!(end, Some(ErrorKind::ConnectionReset), "the truncated response must not look complete");
}

#[test]
fn slow_reader_is_served() {
    let (upstream, _ended) = flood();
    let gateway = Gateway::start(&format!("{IDLE_SERVER}{}", routes(upstream, "")));
    let mut client = gateway.client();
    client.send(b"GET /up/ HTTP/1.1\r\nHost: a.test\r\n\r\n");
    let begun = Instant::now();
    let mut piece = vec![0; 4 << 20];
    while begun.elapsed() < 6 * IDLE {
        client.stream.read_exact(&mut piece).expect("the body continues");
        std::thread::park_timeout(IDLE / 4);
    }
}

#[test]
fn unread_http2_stream_is_reset_alone() {
    let (upstream, ended) = flood();
    let gateway = Gateway::start(&format!("{IDLE_SERVER}{}", routes(upstream, "")));
    for window in [0, 1000] {
        let mut client = Http2::connect(gateway.address, &[(INITIAL_WINDOW_SIZE, window)]);
        let begun = Instant::now();
        client.get(1, "/up/");
        client.get(3, "/respond");
        ended.recv_timeout(MAX_WAIT).expect("the upstream request is cancelled");
        // With a flow-control window of 0, even the response of two bytes is blocked.
        let mut stuck = if window == 0 { vec![1, 3] } else { vec![1] };
        while !stuck.is_empty() {
            let frame = client.next().expect("the streams are reset");
            stuck.retain(|stream| frame.kind != RST_STREAM || frame.stream != *stream);
        }
        let time = begun.elapsed();
        assert!(time >= IDLE.mul_f64(0.9) && time < IDLE + LATE, "{time:?}");
        // The connection still serves other streams.
        client.get(5, "/none");
        assert!(client.until(HEADERS, 5).is_some());
    }
}

/// The gateway reads small bodies with Content-Length before the request takes a request permit of its upstream.
#[test]
fn slow_uploads_hold_no_request_permit_of_an_upstream() {
    const PERMITS: usize = 3;
    let post = |length: usize| format!("POST /up/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: {length}\r\n\r\nx");
    for (what, length, settings, is_free) in [
        ("within request_buffer", 1000, "", true),
        ("as long as request_buffer", 65_536, "", true),
        ("longer than request_buffer", 65_537, "", false),
        ("within a smaller request_buffer", 100, "request_buffer = \"100B\"", true),
        ("longer than a smaller request_buffer", 101, "request_buffer = \"100B\"", false),
        ("without request_buffer", 1000, "request_buffer = \"0B\"", false),
    ] {
        let upstream = Upstream::start();
        let bound = format!("max_requests = {PERMITS}\nmax_queue = 0\n");
        let config = format!("[server]\n{settings}\n{}{bound}", routes(upstream.address, ""));
        let gateway = Gateway::start(&config);
        let mut slow: Vec<_> = (0..PERMITS).map(|_| gateway.client()).collect();
        slow.iter_mut().for_each(|client| client.send(post(length).as_bytes()));
        if is_free {
            // The upstream has received none of the slow requests: its permits are free, and other requests succeed.
            for _ in 0..20 {
                assert_eq!(gateway.get("/up/").status, 200, "{what}");
            }
            assert_eq!(upstream.heads.lock().unwrap().len(), 20, "{what}");
        } else {
            eventually(what, || upstream.heads.lock().unwrap().len() == PERMITS);
            assert_eq!(gateway.get("/up/").status, 503, "{what}");
        }
        let rest = vec![b'x'; length - 1];
        for mut client in slow {
            client.send(&rest);
            assert_eq!(client.reply().unwrap().status, 200, "{what}");
            assert_eq!(upstream.last().body.len(), length, "{what}");
            assert_eq!(client.get("/up/").status, 200, "{what}: the connection continues");
        }
    }
}

/// Uploads that have not ended use at most half of the request permits of an upstream per client network.
#[test]
fn slow_uploads_of_one_network_leave_request_permits_to_others() {
    const PERMITS: usize = 4;
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\nproxy_protocol = true\n\
         {}max_requests = {PERMITS}\nmax_queue = 2\n",
        routes(upstream.address, "")
    ));
    let post = |from: &str| {
        let mut client = gateway.client();
        client.send(format!("PROXY TCP4 {from} 192.0.2.9 1 80\r\n").as_bytes());
        client.send(b"POST /up/ HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n");
        client
    };
    let uploads = || upstream.heads.lock().unwrap().len();
    let mut slow: Vec<_> = (0..PERMITS / 2).map(|_| post("192.0.2.1")).collect();
    eventually("half of the permits are in use", || uploads() == PERMITS / 2);
    for _ in 0..3 {
        let mut rejected = post("192.0.2.1");
        let reply = rejected.reply().expect("a response");
        reply.assert_problem(503, "the network has half of the permits");
        assert_eq!(reply.header("retry-after"), Some("1"));
    }
    assert_eq!(uploads(), PERMITS / 2, "no further upload reaches the upstream");
    // The same network can send other requests, and other networks can upload.
    let mut other = gateway.client();
    other.send(b"PROXY TCP4 192.0.2.1 192.0.2.9 1 80\r\n");
    assert_eq!(other.get("/up/").status, 200);
    slow.extend((0..PERMITS / 2).map(|_| post("192.0.2.2")));
    eventually("another network has the other half", || uploads() == PERMITS + 1);
    // An upload counts until it ends.
    for client in &mut slow {
        client.send(b"0\r\n\r\n");
        assert_eq!(client.reply().unwrap().status, 200);
    }
    let mut next = post("192.0.2.1");
    next.send(b"0\r\n\r\n");
    assert_eq!(next.reply().unwrap().status, 200);
    // A client that disconnects releases its share.
    let left: Vec<_> = (0..PERMITS / 2).map(|_| post("192.0.2.1")).collect();
    eventually("the uploads have begun", || uploads() == PERMITS + 2 + PERMITS / 2);
    drop(left);
    eventually("the share is free again", || {
        let mut next = post("192.0.2.1");
        next.send(b"0\r\n\r\n");
        next.reply().is_some_and(|reply| reply.status == 200)
    });
}

#[test]
fn body_slower_than_min_body_rate_is_408() {
    let upstream = Upstream::start();
    let standard = Gateway::start(&routes(upstream.address, ""));
    let any = Gateway::start(&format!("[server]\nmin_body_rate = \"0B\"\n{}", routes(upstream.address, "")));
    let short = Gateway::start(&format!("[server]\nbody_timeout = \"2s\"\n{}", routes(upstream.address, "")));
    let streamed = Gateway::start(&format!(
        "[server]\nrequest_buffer = \"0B\"\nbody_timeout = \"1m\"\n{}",
        routes(upstream.address, "")
    ));
    // Each case sends a number of bytes every 100 ms, 80 times.
    for_each(vec![
        ("a byte at a time", &standard, "Content-Length: 80", 1, 408),
        ("a byte at a time of a large body", &standard, "Content-Length: 1000000", 1, 408),
        ("a byte at a time, chunked", &standard, "Transfer-Encoding: chunked", 1, 408),
        ("a byte at a time, streamed", &streamed, "Content-Length: 80", 1, 408),
        ("fast enough", &standard, "Content-Length: 8000", 100, 200),
        ("fast enough, streamed", &streamed, "Content-Length: 8000", 100, 200),
        ("fast enough, chunked", &standard, "Transfer-Encoding: chunked", 100, 200),
        ("at any rate", &any, "Content-Length: 80", 1, 200),
        ("longer than body_timeout", &short, "Content-Length: 8000", 100, 408),
        ("longer than body_timeout, chunked", &short, "Transfer-Encoding: chunked", 100, 408),
    ]);
}

/// Run all uploads concurrently. Each sends its body piece by piece.
fn for_each(cases: Vec<(&str, &Gateway, &str, usize, u16)>) {
    std::thread::scope(|scope| {
        for (what, gateway, framing, size, expected) in cases {
            scope.spawn(move || {
                let mut client = gateway.client();
                client.send(format!("POST /up/ HTTP/1.1\r\nHost: a.test\r\n{framing}\r\n\r\n").as_bytes());
                let piece = match framing.starts_with("Transfer") {
                    true => format!("{size:x}\r\n{}\r\n", "x".repeat(size)),
                    false => "x".repeat(size),
                };
                for _ in 0..80 {
                    std::thread::park_timeout(Duration::from_millis(100));
                    // The gateway may already have closed the connection.
                    if client.stream.get_mut().write_all(piece.as_bytes()).is_err() {
                        break;
                    }
                }
                if framing.starts_with("Transfer") {
                    let _ = client.stream.get_mut().write_all(b"0\r\n\r\n");
                }
                assert_eq!(client.reply().expect("a response").status, expected, "{what}");
            });
        }
    });
}

/// Responses on 100 streams that the client does not read, on each of 12 connections, take at most as much memory as in
/// HAProxy.
#[test]
fn unread_http2_responses_take_little_memory() {
    const CONNECTIONS: usize = 12;
    const STREAMS: usize = 100;
    /// HAProxy 2.6 takes 47 MiB for the same streams.
    const MOST: u64 = 48 << 20;
    // With the largest flow-control window, only the full socket buffer blocks the responses. With a window of 0, only
    // flow control blocks them.
    for window in [(1 << 31) - 1, 0] {
        let growth = memory_of_unread_streams(CONNECTIONS, STREAMS, window);
        println!("{} KiB for {} streams with a window of {window}", growth >> 10, CONNECTIONS * STREAMS);
        assert!(growth <= MOST, "{} KiB with a window of {window}", growth >> 10);
    }
}

/// Open `streams` streams on each of `connections` connections and do not read them. Return by how many bytes the
/// memory of the gateway grows.
fn memory_of_unread_streams(connections: usize, streams: usize, window: u32) -> u64 {
    let (upstream, _ended) = flood();
    let gateway = Gateway::start(&format!("[server]\nworkers = 1\n{}", routes(upstream, "")));
    assert_eq!(gateway.get("/respond").status, 200);
    let before = gateway.memory();
    let clients: Vec<_> = (0..connections)
        .map(|_| {
            let mut client = Http2::connect(gateway.address, &[(INITIAL_WINDOW_SIZE, window)]);
            client.send(&frame(WINDOW_UPDATE, 0, 0, &(1u32 << 30).to_be_bytes())).unwrap();
            (0..streams as u32).for_each(|index| client.get(2 * index + 1, "/up/"));
            client
        })
        .collect();
    // The measurement ends when memory has not grown for 3 s.
    let (mut most, mut since) = (0, Instant::now());
    while since.elapsed() < Duration::from_secs(3) {
        let memory = gateway.memory().saturating_sub(before);
        if memory > most {
            (most, since) = (memory, Instant::now());
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
    drop(clients);
    most
}

/// Blocked streams that exhaust `max_buffered` do not block a stream that the client reads.
#[test]
fn stream_continues_beside_unread_ones_that_exhaust_max_buffered() {
    for settings in ["", "max_buffered = \"1B\"\n"] {
        let (upstream, _ended) = flood();
        let gateway = Gateway::start(&format!("[server]\nworkers = 1\n{settings}{}", routes(upstream, "")));
        let mut client = Http2::connect(gateway.address, &[(INITIAL_WINDOW_SIZE, 1000)]);
        client.send(&frame(WINDOW_UPDATE, 0, 0, &(1u32 << 30).to_be_bytes())).unwrap();
        (0..99).for_each(|index| client.get(2 * index + 1, "/up/"));
        client.get(199, "/up/");
        client.send(&frame(WINDOW_UPDATE, 0, 199, &(1u32 << 30).to_be_bytes())).unwrap();
        let mut received = 0;
        while received < 8 << 20 {
            received += client.until(DATA, 199).expect("the stream continues").payload.len();
        }
    }
}

/// When `max_buffered` is used up, the gateway streams request bodies instead of buffering them. It releases each
/// buffer at the end of the request.
#[test]
fn request_bodies_beyond_max_buffered_are_streamed() {
    let upstream = Upstream::start();
    let server = "[server]\nworkers = 1\nmax_buffered = \"100KiB\"\n";
    let gateway = Gateway::start(&format!("{server}{}", routes(upstream.address, "")));
    for _ in 0..3 {
        let before = upstream.heads.lock().unwrap().len();
        let mut slow: Vec<_> = (0..3).map(|_| gateway.client()).collect();
        let head = b"POST /up/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 60000\r\n\r\n";
        slow.iter_mut().for_each(|client| client.send(head));
        eventually("two of three bodies are streamed", || upstream.heads.lock().unwrap().len() == before + 2);
        slow.iter_mut().for_each(|client| client.send(&[b'x'; 60_000]));
        for mut client in slow {
            assert_eq!(client.reply().unwrap().status, 200);
        }
        assert_eq!(upstream.heads.lock().unwrap().len(), before + 3);
    }
}

#[test]
fn one_client_network_gets_half_of_the_connections_by_default() {
    let server = "[server]\nmax_connections = 11\n[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n";
    let listeners = "[[listener]]\naddress = \"127.0.0.1:0\"\nproxy_protocol = true\n";
    let gateway = Gateway::start(&format!("{server}{HELLO}{listeners}"));
    let connect = |from: &str| {
        let mut client = gateway.client();
        client.send(format!("PROXY TCP4 {from} 192.0.2.9 1 80\r\nGET / HTTP/1.1\r\nHost: a.test\r\n\r\n").as_bytes());
        let reply = client.reply();
        (client, reply.map(|reply| reply.status))
    };
    let mut held = Vec::new();
    for (from, expected) in [(Some(200), 6), (None, 1)] {
        for _ in 0..expected {
            let (client, status) = connect("192.0.2.1");
            assert_eq!(status, from, "connection {}", held.len());
            held.push(client);
        }
    }
    // Other networks still get connections. Connections from loopback addresses are not counted.
    for from in ["192.0.2.2", "127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1"] {
        let (client, status) = connect(from);
        assert_eq!(status, Some(200), "{from}");
        held.push(client);
    }
    drop(held);
    let listeners = "[[listener]]\naddress = \"127.0.0.1:0\"\n";
    let gateway = Gateway::start(&format!("[server]\nmax_connections = 4\n{HELLO}{listeners}"));
    let held: Vec<_> = (0..4).map(|_| gateway.client()).collect();
    for mut client in held {
        assert_eq!(client.get("/").status, 200);
    }
}
