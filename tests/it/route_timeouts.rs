//! The timeout of a route covers the whole request, from its headers to the end of the response, whichever side is
//! slow.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::support::MAX_WAIT;
use crate::support::client::Client;
use crate::support::frames::{HEADERS, Http2, RST_STREAM};
use crate::support::gateway::Gateway;
use crate::support::upstream::{read_head, read_request, serve};
use sluicegate::clock::monotonic;

const TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum additional delay of a timeout that the tests accept, because the machine may be busy.
const LATE: Duration = Duration::from_secs(3);

/// Start a gateway that forwards all requests to one upstream. The route has the timeout `TIMEOUT`. `rest` is appended
/// to the route.
fn gateway(upstream: SocketAddr, rest: &str) -> Gateway {
    Gateway::start(&format!(
        "[server]\nworkers = 1\n[upstream.u]\nservers = [\"http://{upstream}\"]\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\ntimeout = \"{}ms\"\n{rest}\n",
        TIMEOUT.as_millis()
    ))
}

fn assert_in_time(what: &str, begun: Instant) {
    let time = begun.elapsed();
    println!("{what}: over after {time:?}");
    assert!(time >= TIMEOUT.mul_f64(0.9) && time < TIMEOUT + LATE, "{what}: {time:?}");
}

/// Wait until the peer closes the connection, and discard what it sends.
fn wait_for_close(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    let mut rest = [0; 4096];
    while stream.read(&mut rest).expect("the gateway closes the connection") > 0 {}
}

/// An upstream that sends `start`, then one `piece` after each pause, until the connection is closed. The receiver then
/// gets a message.
fn slow_upstream(start: &'static str, piece: &'static [u8], pause: Duration) -> (SocketAddr, Receiver<()>) {
    let (tell, ended) = channel();
    let address = serve(move |mut stream| {
        while let Some(head) = read_head(&mut stream) {
            if head.starts_with("GET /quick") {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
                continue;
            }
            stream.write_all(start.as_bytes()).unwrap();
            if piece.is_empty() {
                wait_for_close(&mut stream);
            }
            while !piece.is_empty() && stream.write_all(piece).is_ok() {
                std::thread::park_timeout(pause);
            }
            let _ = tell.send(());
            return;
        }
    });
    (address, ended)
}

const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
const ENDLESS: &str = "HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n";
const LARGE: &[u8] = &[b'x'; 64 << 10];

#[test]
fn route_timeout_before_the_response_head_is_504() {
    let (tell, ended) = channel();
    let upstream = serve(move |mut stream| {
        while let Some(request) = read_request(&mut stream) {
            if request.target() == "/quick" {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
                continue;
            }
            tell.send(request).unwrap();
            wait_for_close(&mut stream);
            return;
        }
    });
    let gateway = gateway(upstream, "limits = [\"l\"]\n[limit.l]\nby = \"global\"\nquota = \"100/day\"");
    let mut client = gateway.client();
    for (index, (method, body)) in [("GET", &b""[..]), ("POST", b"body")].into_iter().enumerate() {
        assert_eq!(client.get("/quick").status, 200, "the upstream connection can be reused");
        let begun = monotonic();
        let reply = client.request(method, "/slow", &[], body);
        reply.assert_problem(504, method);
        assert_in_time(method, begun);
        let seen = ended.recv_timeout(MAX_WAIT).expect("a request");
        assert!(ended.try_recv().is_err(), "{method}: once");
        let problem = reply.json();
        assert!(problem["detail"].as_str().unwrap().contains("the timeout of its route"), "{problem}");
        assert_eq!(problem["request_id"], seen.headers("x-request-id")[0]);
        // The request that timed out is not refunded.
        assert_eq!(gateway.get("/quick").remaining("l"), 100 - 3 * (index as u64 + 1));
    }
}

#[test]
fn route_timeout_truncates_the_response() {
    for (what, start, piece, pause) in [
        ("chunks, little by little", CHUNKED, &b"1\r\na\r\n"[..], TIMEOUT / 50),
        ("chunks, silence", CHUNKED, b"", TIMEOUT),
        ("a length, little by little", ENDLESS, b"abc", TIMEOUT / 50),
        ("a length, silence", ENDLESS, b"", TIMEOUT),
        ("until the end of the connection", "HTTP/1.1 200 OK\r\n\r\n", b"abc", TIMEOUT / 50),
        ("as fast as it can", ENDLESS, LARGE, Duration::ZERO),
    ] {
        let (upstream, ended) = slow_upstream(start, piece, pause);
        let gateway = gateway(upstream, "");
        let mut client = gateway.client();
        let begun = monotonic();
        client.send(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
        assert_eq!(client.head().expect(what).status, 200, "{what}");
        let (mut sink, mut tail) = (vec![0; 1 << 20], Vec::new());
        loop {
            match client.stream.read(&mut sink) {
                Ok(0) => break,
                Ok(length) => tail = sink[length.saturating_sub(5)..length].to_vec(),
                // A client that keeps reading gets all bytes sent before the reset.
                Err(error) => {
                    assert!(piece == LARGE && error.kind() == ErrorKind::ConnectionReset, "{what}: {error}");
                    break;
                }
            }
        }
        assert_in_time(what, begun);
        assert_ne!(tail, b"0\r\n\r\n", "{what}: the truncated response must not look complete");
        ended.recv_timeout(MAX_WAIT).expect("the upstream request is cancelled");
    }
}

#[test]
fn route_timeout_applies_to_a_client_that_does_not_read() {
    let (upstream, ended) = slow_upstream(ENDLESS, LARGE, Duration::ZERO);
    let gateway = gateway(upstream, "");
    let mut client = gateway.client();
    let begun = monotonic();
    client.send(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
    // The route timeout ends the request long before `body_idle_timeout`.
    ended.recv_timeout(MAX_WAIT).expect("the upstream request is cancelled");
    assert_in_time("a client that does not read", begun);
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
fn route_timeout_resets_its_http2_stream_alone() {
    for (what, piece, pause) in
        [("it reads", &b"1\r\na\r\n"[..], TIMEOUT / 50), ("it does not read", LARGE, Duration::ZERO)]
    {
        let start = if piece == LARGE { ENDLESS } else { CHUNKED };
        let (upstream, ended) = slow_upstream(start, piece, pause);
        let gateway = gateway(upstream, "");
        let mut client = Http2::connect(gateway.address, &[]);
        let begun = monotonic();
        client.get(1, "/");
        while client.next().expect(what).kind != RST_STREAM {}
        assert_in_time(what, begun);
        ended.recv_timeout(MAX_WAIT).expect("the upstream request is cancelled");
        // The connection still serves other streams.
        client.get(3, "/quick");
        assert!(client.until(HEADERS, 3).is_some(), "{what}");
    }
}

/// An upstream that responds and counts its connections and requests.
fn counting() -> (SocketAddr, Arc<[AtomicUsize; 2]>) {
    let counts = Arc::<[AtomicUsize; 2]>::default();
    let count = counts.clone();
    let address = serve(move |mut stream| {
        count[0].fetch_add(1, Ordering::SeqCst);
        while read_request(&mut stream).is_some() {
            count[1].fetch_add(1, Ordering::SeqCst);
            stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n").unwrap();
        }
    });
    (address, counts)
}

#[test]
fn requests_within_route_timeout_keep_their_connections() {
    let (upstream, counts) = counting();
    let gateway = gateway(upstream, "");
    let mut client = gateway.client();
    let begun = monotonic();
    // All requests together take longer than the timeout. Each request has its own timeout.
    while begun.elapsed() < 2 * TIMEOUT {
        assert_eq!(client.get("/").text(), "ok");
        std::thread::park_timeout(TIMEOUT / 10);
    }
    assert_eq!(counts[0].load(Ordering::SeqCst), 1, "all requests use one connection");
    // The timeout does not apply to an idle client connection.
    std::thread::park_timeout(TIMEOUT + TIMEOUT / 2);
    assert_eq!(client.get("/").text(), "ok");
}

#[test]
fn websocket_outlives_route_timeout() {
    let upstream = serve(|mut stream| {
        if read_head(&mut stream).is_none() {
            return;
        }
        let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: chat/2\r\n\r\n";
        stream.write_all(switch.as_bytes()).unwrap();
        let mut byte = [0];
        while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
    });
    let gateway = gateway(upstream, "websocket = true");
    let mut client: Client = gateway.client();
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: chat/2\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 101);
    let begun = monotonic();
    while begun.elapsed() < 2 * TIMEOUT {
        client.send(b"x");
        let mut byte = [0];
        client.stream.read_exact(&mut byte).expect("the body continues");
        std::thread::park_timeout(TIMEOUT / 10);
    }
}

#[test]
fn queueing_counts_towards_route_timeout() {
    let (upstream, counts) = counting();
    // The limit would admit the second request only after the timeout.
    let limit = "limits = [\"l\"]\n[limit.l]\nby = \"global\"\nquota = \"2/3s\"\nburst = 1\nmax_wait = \"10s\"\n\
                 [[route]]\nname = \"free\"\npath = \"/free\"\nupstream = \"u\"";
    let gateway = gateway(upstream, limit);
    let mut client = gateway.client();
    assert_eq!(client.get("/").status, 200);
    client.get("/").assert_problem(504, "the request waited in the queue until the timeout");
    assert_eq!(client.get("/free").status, 200);
    // The request that timed out in the wait queue is not forwarded and closes no connection.
    assert_eq!(counts.each_ref().map(|count| count.load(Ordering::SeqCst)), [1, 2]);
}

/// Name of the case, first bytes, pause, remaining bytes, and the expected status.
type Upload = (&'static str, &'static str, Duration, &'static str, u16);

#[test]
fn client_that_withholds_its_body_is_408_without_refund() {
    const AT_ONCE: Duration = Duration::ZERO;
    // More than half of the timeout, but less than the whole timeout.
    const BEFORE_THE_END: Duration = Duration::from_millis(750);
    let cases: [Upload; 5] = [
        ("no byte of the body", "Content-Length: 5\r\n\r\n", AT_ONCE, "", 408),
        ("all but the last byte", "Content-Length: 5\r\n\r\nbody", AT_ONCE, "", 408),
        ("chunks without an end", "Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n", AT_ONCE, "", 408),
        ("the last byte just before the timeout", "Content-Length: 5\r\n\r\nbody", BEFORE_THE_END, "!", 408),
        ("all of the body: the upstream is slow", "Content-Length: 5\r\n\r\nbody!", AT_ONCE, "", 504),
    ];
    for (what, first, pause, rest, status) in cases {
        let (upstream, _ended) = slow_upstream("", b"", AT_ONCE);
        let limit = "limits = [\"l\"]\n[limit.l]\nby = \"ip\"\nalgorithm = \"fixed-window\"\n\
                     start = \"first-request\"\nquota = \"100/hour\"\nrefund_on = [\"5xx\", \"4xx\"]\n";
        let gateway = gateway(upstream, limit);
        let mut stream = TcpStream::connect(gateway.address).unwrap();
        stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
        stream.write_all(format!("POST /slow HTTP/1.1\r\nHost: a\r\n{first}").as_bytes()).unwrap();
        if !rest.is_empty() {
            std::thread::park_timeout(pause);
            // On a busy machine, the timeout may already have expired.
            let _ = stream.write_all(rest.as_bytes());
        }
        let head = read_head(&mut stream).unwrap();
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{what}: {head}");
        // The remaining quota shows whether the previous request was refunded.
        let left = if status == 504 { 99 } else { 98 };
        assert_eq!(gateway.get("/quick").remaining("l"), left, "{what}");
    }
}
