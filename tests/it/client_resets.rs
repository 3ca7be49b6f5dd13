//! Clients that reset their requests or disconnect before the response: how long such a request counts, and when the
//! gateway closes the connection.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::admin_listener::{metric, with_admin};
use crate::support::frames::{END_HEADERS, END_STREAM, GOAWAY, HEADERS, Http2, RST_STREAM, block, frame};
use crate::support::gateway::Gateway;
use crate::support::server::{Behaviour, Server};
use crate::support::upstream::{Upstream, read_head, serve};
use crate::support::{MAX_WAIT, eventually};
use sluicegate::clock::monotonic;

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
