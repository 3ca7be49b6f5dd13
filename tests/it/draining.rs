//! After SIGTERM, 200 requests in flight finish: requests over HTTP/1.1 and HTTP/2, and event streams (fault 27 in
//! docs/testing.md). New connections do not delay the end of the process, and connections in the listen backlog are
//! served. If `accept_grace` is set, the gateway continues to accept connections for this time after SIGTERM.
#![allow(clippy::disallowed_methods)] // a test measures a time

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::support::certificates::{NOW, Pair, TlsClient, tls};
use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::reload::{ADMIN, ask, reload, says};
use crate::support::server::{Behaviour, Server};
use crate::support::upstream;
use crate::support::{SetOnDrop, eventually, signal};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::version::TLS13;
use socket2::{Domain, Socket, Type};

const HTTP1: usize = 100;
const HTTP2: usize = 60;
const EVENTS: usize = 40;

#[test]
fn sigterm_with_two_hundred_requests_in_flight_fails_none() {
    let server = Server::start();
    server.set(Behaviour::Hang);
    let released = Arc::new((Mutex::new(false), Condvar::new()));
    let events = {
        let released = released.clone();
        upstream::serve(move |mut stream| {
            upstream::read_head(&mut stream);
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(format!("{head}c\r\ndata: one\r\n\n\r\n").as_bytes()).unwrap();
            let (lock, condition) = &*released;
            drop(condition.wait_while(lock.lock().unwrap(), |released| !*released).unwrap());
            stream.write_all(b"c\r\ndata: two\r\n\n\r\n0\r\n\r\n").unwrap();
        })
    };
    let mut gateway = Gateway::start(&format!(
        "[upstream.api]\nservers = [\"{}\"]\n[upstream.events]\nservers = [\"http://{events}\"]\n\
         [[route]]\nname = \"api\"\npath = \"/api\"\nupstream = \"api\"\n\
         [[route]]\nname = \"events\"\npath = \"/events\"\nupstream = \"events\"\n",
        server.url()
    ));
    let (address, mut replies) = (gateway.address, Vec::new());
    let mut clients: Vec<_> = (0..HTTP1).map(|_| gateway.client()).collect();
    clients.iter_mut().for_each(|client| client.send(b"GET /api HTTP/1.1\r\nHost: a\r\n\r\n"));
    let mut streams: Vec<_> = (0..EVENTS).map(|_| gateway.client()).collect();
    for stream in &mut streams {
        stream.send(b"GET /events HTTP/1.1\r\nHost: a\r\n\r\n");
        // The response headers have arrived. The upstream sends the rest of the response after the gateway has received
        // SIGTERM.
        replies.push(stream.head().unwrap());
    }
    let second = std::thread::spawn(move || {
        let executor = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        executor.block_on(async {
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let (sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            let mut requests = tokio::task::JoinSet::new();
            for _ in 0..HTTP2 {
                let mut sender = sender.clone();
                requests.spawn(async move {
                    let uri = format!("http://{address}/api");
                    let request = http::Request::get(uri).body(Empty::<&[u8]>::new()).unwrap();
                    let response = sender.send_request(request).await.unwrap();
                    let status = response.status().as_u16();
                    (status, response.into_body().collect().await.unwrap().to_bytes())
                });
            }
            requests.join_all().await
        })
    });
    eventually("all are in flight", || server.running() == HTTP1 + HTTP2);

    gateway.terminate();
    eventually("no new connection is accepted", || TcpStream::connect(address).is_err());
    server.set(Behaviour::Respond(200));
    *released.0.lock().unwrap() = true;
    released.1.notify_all();

    let mut failed = 0;
    for client in &mut clients {
        failed += usize::from(!client.reply().is_some_and(|reply| reply.status == 200 && reply.text() == "ok"));
    }
    failed += second.join().unwrap().iter().filter(|(status, body)| (*status, &body[..]) != (200, b"ok")).count();
    for (stream, head) in streams.iter_mut().zip(&replies) {
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut stream.stream, &mut rest).unwrap();
        let whole = rest.ends_with(b"data: two\r\n\n\r\n0\r\n\r\n");
        failed += usize::from(head.status != 200 || !whole);
    }
    println!("fault 27: {} in flight, {failed} failed", HTTP1 + HTTP2 + EVENTS);
    assert_eq!(failed, 0);
    assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
}

#[test]
fn new_connections_do_not_delay_the_end_after_sigterm() {
    let mut gateway = Gateway::start(&format!("[server]\nworkers = 1\n{}", says("x")));
    let (address, over, tries) = (gateway.address.into(), AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let end = SetOnDrop(&over);
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    // Use non-blocking sockets, because a full listen backlog would block a blocking connect.
                    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None).unwrap();
                    let _ = socket.connect(&address);
                    tries.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        eventually("connections arrive", || tries.load(Ordering::SeqCst) > 10_000);
        gateway.terminate();
        assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
        drop(end);
    });
}

#[test]
fn connections_in_the_listen_backlog_at_sigterm_are_all_served() {
    const QUEUED: usize = 300;
    let pair = Pair::server("gate.test", NOW);
    let tls_client = tls(&[&pair.der], None, &[&TLS13]);
    for secure in [false, true] {
        let certificates = if secure { "tls.certificates = [{ cert = \"a.pem\", key = \"a.key\" }]\n" } else { "" };
        let mut gateway = Gateway::start_with(
            &format!("[server]\nworkers = 1\n{}[[listener]]\naddress = \"127.0.0.1:0\"\n{certificates}", says("x")),
            &[("a.pem", &*pair.cert), ("a.key", &*pair.key)],
        );
        // While the process is stopped, the kernel accepts connections into the listen backlog.
        signal(&gateway.child, "STOP");
        let mut queued: Vec<_> = (0..QUEUED).map(|_| gateway.client()).collect();
        if !secure {
            queued.iter_mut().for_each(|client| client.send(b"GET /says HTTP/1.1\r\nHost: a\r\n\r\n"));
        }
        gateway.terminate();
        signal(&gateway.child, "CONT");
        let status = |mut client: Client| match secure {
            false => client.reply().map(|reply| reply.status),
            true => {
                let stream = client.stream.into_inner();
                TlsClient::handshake_over(stream, &tls_client, "gate.test")
                    .ok()
                    .map(|mut client| client.get("/says").status)
            }
        };
        let served = queued.into_iter().map(status).filter(|status| *status == Some(200)).count();
        assert_eq!(served, QUEUED, "TLS: {secure}");
        assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
    }
}

/// Wait until the gateway has handled SIGTERM and `/readyz` returns 503.
fn await_stopping(gateway: &Gateway) {
    eventually("/readyz is 503", || {
        let ready = ask(gateway, "GET", "/readyz");
        assert_eq!(ready.json()["status"], if ready.status == 503 { "stopping" } else { "ready" });
        ready.status == 503
    });
}

#[test]
fn accept_grace_serves_as_before_until_another_signal() {
    let server = Server::start();
    let api = format!(
        "[upstream.api]\nservers = [\"{}\"]\n[[route]]\nname = \"api\"\npath = \"/api\"\nupstream = \"api\"\n",
        server.url()
    );
    let ready = "[[route]]\nname = \"ready\"\npath = \"/ready\"\nrespond = \"readiness\"\n";
    let mut gateway = Gateway::start(&format!("[server]\naccept_grace = \"1h\"\n{ADMIN}{}{api}{ready}", says("x")));
    let mut kept = gateway.client();
    assert_eq!(kept.get("/says").status, 200);
    let readiness = |gateway: &Gateway| {
        let reply = gateway.get("/ready");
        (reply.status, reply.text().to_owned())
    };
    assert_eq!(readiness(&gateway), (200, "ready\n".to_owned()));
    let changed = reload(&gateway, &format!("[server]\naccept_grace = \"1h\"\n{}{api}{ready}", says("y")));
    assert_eq!(changed.status, 200, "{}", changed.text());
    gateway.terminate();
    await_stopping(&gateway);
    assert_eq!(readiness(&gateway), (503, "not ready\n".to_owned()), "load balancers see it without the admin token");
    assert_eq!(ask(&gateway, "GET", "/healthz").status, 200, "the process must not be restarted");
    ["HUP", "USR2"].iter().for_each(|name| signal(&gateway.child, name));
    for _ in 0..50 {
        let replies = [kept.get("/says"), gateway.get("/says")];
        let is_served =
            |reply: &crate::support::client::Reply| (reply.status, reply.header("connection")) == (200, None);
        assert!(replies.iter().all(is_served), "{replies:?}");
    }
    server.set(Behaviour::Hang);
    let mut in_flight = gateway.client();
    in_flight.send(b"GET /api HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("a request is in flight", || server.running() == 1);

    signal(&gateway.child, "INT");
    eventually("a request on the kept connection gets Connection: close", || {
        let reply = kept.get("/says");
        assert_eq!(reply.status, 200);
        reply.header("connection") == Some("close")
    });
    eventually("no new connection is accepted", || TcpStream::connect(gateway.address).is_err());
    assert!(gateway.child.try_wait().unwrap().is_none(), "the gateway waits for the request in flight");
    server.set(Behaviour::Respond(200));
    assert_eq!(in_flight.reply().unwrap().status, 200);
    assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
    let log = gateway.log();
    let reloads = log.matches("configuration reloaded").count();
    assert!(reloads == 1 && !log.contains("hot restart"), "ignored signals: {log}");
}

#[test]
fn accept_grace_ends_by_itself_and_is_that_of_the_active_configuration() {
    let config = |grace: &str| format!("[server]\naccept_grace = \"{grace}\"\n{}", says("x"));
    let mut gateway = Gateway::start(&config("1h"));
    gateway.put(&config("1500ms"));
    eventually("the configuration is reloaded", || gateway.log().contains("configuration reloaded"));
    let started = Instant::now();
    gateway.terminate();
    assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
    let elapsed = started.elapsed();
    assert!(elapsed >= Duration::from_millis(1500), "{elapsed:?}");
}

#[test]
fn signal_during_the_drain_ends_the_process_at_once() {
    let server = Server::start();
    server.set(Behaviour::Hang);
    let mut gateway = Gateway::start(&format!(
        "[server]\ndrain_timeout = \"1h\"\n[upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"api\"\npath = \"/api\"\nupstream = \"api\"\n",
        server.url()
    ));
    let mut client = gateway.client();
    client.send(b"GET /api HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("a request is in flight", || server.running() == 1);
    gateway.terminate();
    eventually("the gateway drains", || gateway.log().contains("stopping after the requests in flight"));
    assert!(gateway.child.try_wait().unwrap().is_none(), "the gateway waits for the request in flight");
    gateway.terminate();
    assert_eq!(gateway.wait().code(), Some(1), "{}", gateway.log());
}
