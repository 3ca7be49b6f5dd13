//! Clients that reset their requests, disconnect or half-close their connection before the response: how long such a
//! request counts, and when the gateway closes the connection. Upstreams that respond before the end of the request.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::admin_listener::{metric, with_admin};
use crate::support::certificates::{NOW, Pair, TlsClient, tls};
use crate::support::client::Client;
use crate::support::frames::{DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, Http2, RST_STREAM, block, frame};
use crate::support::gateway::Gateway;
use crate::support::reload;
use crate::support::server::{Behaviour, Server};
use crate::support::upstream::{Upstream, read_head, serve};
use crate::support::{MAX_WAIT, eventually};
use rustls::version::TLS13;
use sluicegate::clock::monotonic;
use socket2::SockRef;

const REFUSED_STREAM: u32 = 7;
const CANCEL: u32 = 8;
const ENHANCE_YOUR_CALM: u32 = 11;

/// Time for which an upstream works on a request.
const WORK: Duration = Duration::from_millis(100);

/// Time from a request to its reset.
const DELAY: Duration = Duration::from_millis(2);

fn request(stream: u32, path: &str) -> Vec<u8> {
    frame(HEADERS, END_STREAM | END_HEADERS, stream, &block("GET", path, &[]))
}

/// Start a POST request whose body does not end.
fn unfinished(stream: u32, path: &str) -> Vec<u8> {
    [frame(HEADERS, END_HEADERS, stream, &block("POST", path, &[])), frame(0, 0, stream, b"part")].concat()
}

fn reset(stream: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes())
}

fn number(payload: &[u8]) -> u32 {
    u32::from_be_bytes(payload[..4].try_into().unwrap())
}

/// An upstream that works on each request for `WORK` as soon as its headers have arrived, and does not notice that its
/// connection is closed. Also return the number of requests in flight, and the maximum of that number.
fn working() -> (SocketAddr, Arc<[AtomicUsize; 2]>) {
    let counts = Arc::<[AtomicUsize; 2]>::default();
    let each = counts.clone();
    let address = serve(move |mut stream| {
        let [running, most] = &*each;
        while let Some(head) = read_head(&mut stream) {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(WORK);
            running.fetch_sub(1, Ordering::SeqCst);
            let is_sent = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").is_ok();
            if !is_sent || head.starts_with("POST") {
                return;
            }
        }
    });
    (address, counts)
}

/// Start requests on new HTTP/2 connections in groups of 20, and reset each group after `DELAY`, for `time`. Return the
/// number of requests.
fn reset_for(address: SocketAddr, time: Duration, start: impl Fn(u32) -> Vec<u8>) -> usize {
    let begun = monotonic();
    let mut requests = 0;
    while begun.elapsed() < time {
        let mut client = Http2::connect(address, &[]);
        for group in (0..).map(|group| group * 20..group * 20 + 20) {
            let is_sent = client.send(&group.clone().flat_map(|n| start(2 * n + 1)).collect::<Vec<_>>());
            std::thread::sleep(DELAY);
            let is_reset = client.send(&group.flat_map(|n| reset(2 * n + 1)).collect::<Vec<_>>());
            if is_sent.and(is_reset).is_err() || begun.elapsed() >= time {
                break;
            }
            requests += 20;
        }
    }
    requests
}

/// Send requests on new HTTP/1.1 connections, and close each connection after a delay, for `time`.
fn disconnect_for(gateway: &Gateway, time: Duration) -> usize {
    let begun = monotonic();
    let mut requests = 0;
    while begun.elapsed() < time {
        let clients: Vec<_> = (0..20)
            .map(|_| {
                let mut client = gateway.client();
                client.send(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
                client
            })
            .collect();
        // Wait for longer than `DELAY`, because the gateway does not start a request if the connection is already closed
        // when it reads the request.
        std::thread::sleep(15 * DELAY);
        requests += clients.len();
    }
    requests
}

/// A request whose client has gone away keeps its permits until the upstream responds.
#[test]
fn upstream_never_has_more_requests_than_max_requests_although_clients_reset_them() {
    const PERMITS: usize = 10;
    let time = Duration::from_secs(1);
    type Attack = fn(&Gateway, Duration) -> usize;
    let attacks: [(&str, Attack); 3] = [
        ("resets", |gateway, time| reset_for(gateway.address, time, |stream| request(stream, "/"))),
        ("resets of uploads", |gateway, time| reset_for(gateway.address, time, |stream| unfinished(stream, "/"))),
        ("disconnects", disconnect_for),
    ];
    for (what, attack) in attacks {
        let (upstream, counts) = working();
        let gateway = Gateway::start(&format!(
            "[server]\nworkers = 1\n[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\n\
             [upstream.u]\nservers = [\"http://{upstream}\"]\nmax_requests = {PERMITS}\n"
        ));
        let requests = attack(&gateway, time);
        eventually("the permits are free again", || gateway.get("/").status == 200);
        let most = counts[1].load(Ordering::SeqCst);
        println!("{what}: {requests} requests, {most} at once in the upstream");
        assert!(requests > 10 * PERMITS, "{what}: {requests} requests");
        assert_eq!(most, PERMITS, "{what}: requests at once in the upstream");
    }
}

#[test]
fn calls_of_the_authentication_server_are_bounded_although_clients_reset_requests() {
    let [auth, upstream] = Server::start_many();
    auth.set(Behaviour::RespondAfter(WORK.as_millis() as u64));
    let gateway = Gateway::start(&format!(
        "[server]\nworkers = 1\nhttp2_max_streams = 10\n[auth.sso]\nkind = \"forward\"\nurl = \"{}/verify\"\n\
         [upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nrequire = [\"sso\"]\nupstream = \"u\"\n",
        auth.url(),
        upstream.url()
    ));
    let mut client = Http2::connect(gateway.address, &[]);
    let begun = monotonic();
    let mut requests = 0;
    while begun.elapsed() < Duration::from_secs(1) {
        let streams = || (requests..requests + 5).map(|n| 2 * n + 1);
        let calls = auth.count();
        let is_sent = client.send(&streams().flat_map(|stream| request(stream, "/")).collect::<Vec<_>>());
        // Reset the requests soon after the first call, or if there is none, because the requests are refused.
        let sent = monotonic();
        while auth.count() == calls && sent.elapsed() < 5 * DELAY {
            std::thread::yield_now();
        }
        if is_sent.and(client.send(&streams().flat_map(reset).collect::<Vec<_>>())).is_err() {
            break;
        }
        requests += 5;
    }
    eventually("the authentication server is done", || auth.running() == 0);
    println!("{requests} requests, {} calls, {} at once", auth.count(), auth.max_running());
    assert!(requests > 25, "{requests} requests");
    // At most `http2_max_streams` requests are abandoned, and as many are open.
    assert!(auth.max_running() <= 20, "{} calls at once", auth.max_running());
    assert_eq!(upstream.count(), 0, "a request that was reset is not forwarded");
}

#[test]
fn streams_that_were_reset_count_towards_http2_max_streams_until_the_upstream_is_done() {
    let server = Server::start();
    server.set(Behaviour::Hang);
    let gateway = Gateway::start(&format!(
        "[server]\nworkers = 1\nhttp2_max_streams = 5\n[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\n\
         [[route]]\nname = \"local\"\npath = \"/local\"\nrespond = {{ status = 200 }}\n\
         [upstream.u]\nservers = [\"{}\"]\n",
        server.url()
    ));
    let mut client = Http2::connect(gateway.address, &[]);
    for stream in [1, 3, 5, 7, 9] {
        client.send(&request(stream, "/")).unwrap();
    }
    eventually("the requests have arrived", || server.running() == 5);
    let resets: Vec<_> = [1, 3, 5, 7, 9].into_iter().flat_map(reset).collect();
    client.send(&[resets, request(11, "/local")].concat()).unwrap();
    let refused = client.until(RST_STREAM, 11).expect("the stream is refused");
    assert_eq!(number(&refused.payload), REFUSED_STREAM);
    // The upstream requests are cancelled after a while, and then the connection takes requests again.
    let mut stream = 13;
    eventually("the connection takes requests again", || {
        client.send(&request(stream, "/local")).unwrap();
        let answered = loop {
            let frame = client.next().expect("the connection stays open");
            match (frame.kind, frame.stream == stream) {
                (HEADERS, true) => break true,
                (RST_STREAM, true) => break false,
                _ => {}
            }
        };
        stream += 2;
        answered
    });
    server.set(Behaviour::Respond(200));
}

/// Send a request and reset it after `DELAY`, `resets` times, each time after `completed` requests that are completed.
/// Return whether the gateway closed the connection, and after how many resets.
fn reset_among(gateway: &Gateway, resets: usize, completed: usize) -> Option<usize> {
    let mut client = Http2::connect(gateway.address, &[]);
    let mut streams = (0..).map(|n| 2 * n + 1);
    for count in 0..resets {
        for stream in streams.by_ref().take(completed) {
            client.send(&request(stream, "/local")).ok()?;
            loop {
                let frame = client.next().expect("a response");
                if (frame.kind, frame.stream) == (HEADERS, stream) {
                    break;
                }
                assert_ne!(frame.kind, GOAWAY, "after {count} resets");
            }
        }
        let stream = streams.next().unwrap();
        let sent = client.send(&request(stream, "/up"));
        std::thread::sleep(DELAY);
        if sent.and(client.send(&reset(stream))).is_err() {
            return Some(count);
        }
        if completed == 0 && count >= 240 {
            client.set_read_timeout(Duration::from_millis(20));
            while let Some(frame) = client.next() {
                if frame.kind == GOAWAY {
                    assert_eq!(number(&frame.payload[4..]), ENHANCE_YOUR_CALM);
                    return Some(count);
                }
            }
            client.set_read_timeout(MAX_WAIT);
        }
    }
    None
}

#[test]
fn connection_with_mostly_premature_resets_is_closed() {
    let upstream = Upstream::responding(|_| {
        std::thread::sleep(WORK);
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_vec()
    });
    let gateway = Gateway::start(&with_admin(&format!(
        "[server]\nworkers = 1\n[[route]]\nname = \"up\"\npath = \"/up\"\nupstream = \"u\"\n\
         [[route]]\nname = \"local\"\npath = \"/local\"\nrespond = {{ status = 200 }}\n\
         [upstream.u]\nservers = [\"{}\"]\n",
        upstream.url()
    )));
    let closed = reset_among(&gateway, 300, 0).expect("the connection is closed");
    assert!((250..260).contains(&closed), "closed after {closed} resets");
    eventually("the connection is counted and logged", || {
        metric(&gateway, "sluicegate_connections_closed_for_resets_total") == 1.0
            && gateway.log().contains("a client reset too many requests")
    });
    assert!(gateway.log().contains("\"network\":\"127.0.0.1\""), "{}", gateway.log());
    assert_eq!(reset_among(&gateway, 300, 2), None, "most requests of the connection are completed");
}

// ---- clients that end their side of the connection after a whole request (half-close) -----------

/// A route to this upstream, with settings of `[server]`.
fn half_close_config(upstream: &str, server: &str) -> String {
    format!(
        "[server]\nworkers = 1\nrequest_buffer = \"0B\"\n{server}\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\n[upstream.u]\nservers = [\"{upstream}\"]\n"
    )
}

/// The HTTP/1.x requests of half-closed connections: their bytes, and the response.
const HALF_CLOSED: [(&str, &[u8]); 6] = [
    ("GET", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("HTTP/1.0", b"GET / HTTP/1.0\r\nHost: a\r\n\r\n"),
    ("known length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody"),
    ("chunks", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"),
    ("refused upgrade", b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"),
    ("pipelined", b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"),
];

#[test]
fn half_closed_client_gets_the_response() {
    let slow = Server::start();
    slow.set(Behaviour::RespondAfter(300));
    let pair = Pair::server("gate.test", NOW);
    let folder = tempfile::tempdir().unwrap();
    let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    std::fs::write(&cert, &pair.cert).unwrap();
    std::fs::write(&key, &pair.key).unwrap();
    let listeners = format!(
        "[[listener]]\naddress = \"127.0.0.1:0\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
         tls.certificates = [{{ cert = \"{}\", key = \"{}\" }}]\n",
        cert.display(),
        key.display()
    );
    let gateway = Gateway::start(&(half_close_config(&slow.url(), "") + &listeners));
    let [plain, tls_address] = gateway.addresses()[..] else { panic!("two listeners") };
    for (what, request) in HALF_CLOSED {
        let mut stream = TcpStream::connect(plain).unwrap();
        stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
        stream.write_all(request).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        let expected = if what == "pipelined" { 2 } else { 1 };
        assert_eq!(response.matches(" 200 ").count(), expected, "{what}: {response}");

        let mut client = TlsClient::handshake(&tls(&[&pair.der], None, &[&TLS13]), tls_address, "gate.test").unwrap();
        let stream = client.stream.get_mut();
        stream.write_all(request).unwrap();
        stream.conn.send_close_notify();
        stream.conn.complete_io(&mut stream.sock).unwrap();
        let mut response = String::new();
        let read = client.stream.read_to_string(&mut response);
        // After an upgrade that was refused, hyper drops the stream without `close_notify`.
        assert!(read.is_ok() || what == "refused upgrade", "{what}: {read:?}");
        assert_eq!(response.matches(" 200 ").count(), expected, "close_notify, {what}: {response}");
    }
    let mut client = Http2::connect(plain, &[]);
    client.get(1, "/one");
    client.get(3, "/two");
    client.stream.shutdown(Shutdown::Write).unwrap();
    let mut statuses = Vec::new();
    while let Some(frame) = client.next() {
        // The first byte is the index of `:status: 200` in the static table (RFC 7541, appendix A).
        if frame.kind == HEADERS {
            statuses.push((frame.stream, frame.payload[0]));
        }
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [(1, 0x88), (3, 0x88)], "HTTP/2");
}

/// An upstream that never responds. Also return the number of requests that have arrived, and of connections that were
/// closed.
fn hanging() -> (String, Arc<[AtomicUsize; 2]>) {
    let counts = Arc::<[AtomicUsize; 2]>::default();
    let each = counts.clone();
    let address = serve(move |mut stream| {
        if read_head(&mut stream).is_some() {
            each[0].fetch_add(1, Ordering::SeqCst);
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
            each[1].fetch_add(1, Ordering::SeqCst);
        }
    });
    (format!("http://{address}"), counts)
}

fn read_to_end(stream: &mut TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    let mut response = Vec::new();
    // A reset ends the response as well.
    match stream.read_to_end(&mut response) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("not closed: {error}"),
        _ => response,
    }
}

#[test]
fn half_closed_client_waits_at_most_half_close_timeout() {
    let (upstream, counts) = hanging();
    let arrived = |number: usize| eventually("the request arrives", || counts[0].load(Ordering::SeqCst) == number);
    let cancelled = |number: usize| eventually("the request ends", || counts[1].load(Ordering::SeqCst) == number);
    let timeout = |value: &str| half_close_config(&upstream, &format!("half_close_timeout = \"{value}\""));
    let gateway = Gateway::start(&reload::with_admin(&timeout("1h")));
    let mut requests = 0;
    for value in ["0s", "100ms"] {
        reload::reloads(&gateway, &timeout(value));
        for (_, request) in &HALF_CLOSED[..4] {
            let mut stream = TcpStream::connect(gateway.address).unwrap();
            stream.write_all(request).unwrap();
            requests += 1;
            arrived(requests);
            stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!(read_to_end(&mut stream), b"", "{value}");
            cancelled(requests);
        }
        let mut client = Http2::connect(gateway.address, &[]);
        client.get(1, "/");
        requests += 1;
        arrived(requests);
        client.stream.shutdown(Shutdown::Write).unwrap();
        while let Some(frame) = client.next() {
            assert_ne!(frame.kind, HEADERS, "{value}");
        }
        cancelled(requests);
    }
}

#[test]
fn client_that_resets_its_connection_or_ends_it_within_a_body_cancels_its_request_at_once() {
    let (upstream, counts) = hanging();
    let gateway = Gateway::start(&half_close_config(&upstream, "half_close_timeout = \"1h\""));
    for (number, (_, request)) in HALF_CLOSED[..4].iter().enumerate() {
        let mut stream = TcpStream::connect(gateway.address).unwrap();
        stream.write_all(request).unwrap();
        eventually("the request arrives", || counts[0].load(Ordering::SeqCst) == number + 1);
        SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        drop(stream);
        eventually("the reset cancels the request", || counts[1].load(Ordering::SeqCst) == number + 1);
    }
    let mut stream = TcpStream::connect(gateway.address).unwrap();
    stream.write_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nhalf").unwrap();
    eventually("the request arrives", || counts[0].load(Ordering::SeqCst) == 5);
    stream.shutdown(Shutdown::Write).unwrap();
    read_to_end(&mut stream);
    eventually("the request ends", || counts[1].load(Ordering::SeqCst) == 5);
}

// ---- upstreams that respond before the end of the request body, and close the connection --------

#[test]
fn early_response_of_an_upstream_that_closes_its_connection_reaches_the_client() {
    let responses = [
        "HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlarge",
        "HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nlarge",
        "HTTP/1.1 413 Too Large\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nlarge\r\n0\r\n\r\n",
    ];
    let count = AtomicUsize::new(0);
    let upstream = serve(move |mut stream| {
        read_head(&mut stream).unwrap();
        let number = count.fetch_add(1, Ordering::SeqCst);
        // The kernel sends a reset when the connection is closed, because it has received bytes that were not read.
        let mut body = [0; 1000];
        stream.read_exact(&mut body).unwrap();
        stream.write_all(responses[number % responses.len()].as_bytes()).unwrap();
    });
    let gateway = Gateway::start(&half_close_config(&format!("http://{upstream}"), ""));
    const BODY: usize = 16 << 20;
    for number in 0..60 {
        let framing =
            if number % 2 == 0 { format!("Content-Length: {BODY}") } else { "Transfer-Encoding: chunked".into() };
        let stream = TcpStream::connect(gateway.address).unwrap();
        let mut upload = stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || {
            let head = format!("POST / HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n");
            upload.write_all(head.as_bytes())?;
            let chunk = [b'x'; 4096];
            for _ in 0..BODY / chunk.len() {
                if number % 2 == 1 {
                    upload.write_all(b"1000\r\n")?;
                }
                upload.write_all(&chunk)?;
                if number % 2 == 1 {
                    upload.write_all(b"\r\n")?;
                }
            }
            Ok::<_, std::io::Error>(())
        });
        stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
        let mut client = Client { stream: std::io::BufReader::new(stream) };
        let reply = client.reply().unwrap();
        assert_eq!((reply.status, reply.text()), (413, "large"), "{number}");
        if number % responses.len() == 0 {
            assert_eq!(reply.header("connection"), Some("close"), "{number}");
        }
        drop(client);
        let _ = sender.join().unwrap();
    }
    for number in 0..30 {
        let mut client = Http2::connect(gateway.address, &[]);
        client.send(&frame(HEADERS, END_HEADERS, 1, &block("POST", "/", &[]))).unwrap();
        client.send(&(0..3).flat_map(|_| frame(DATA, 0, 1, &[b'x'; 16384])).collect::<Vec<_>>()).unwrap();
        let headers = client.until(HEADERS, 1).unwrap();
        // 0x88 would be `:status: 200`.
        assert_ne!(headers.payload[0], 0x88, "{number}");
        assert_eq!(client.until(DATA, 1).unwrap().payload, b"large", "{number}");
    }
}
