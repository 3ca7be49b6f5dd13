//! Load balancing and failover: which server gets a request, what happens when a server fails, and how many requests
//! each server gets.
#![allow(clippy::disallowed_methods)] // waits use the system clock

use std::collections::HashMap;
use std::io::Write;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::Request;

use crate::hot_restart::hot_restart;
use crate::support::client::{Client, Reply, load};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::http2::Answer;
use crate::support::reload::{reloads, with_admin};
use crate::support::server::{Behaviour, Server};
use crate::support::upstream::{Upstream, read_head, serve};

/// Start a gateway with these servers. `lines` are further settings of the upstream.
fn gateway(servers: &[&Server], lines: &str) -> Gateway {
    let urls: Vec<_> = servers.iter().map(|server| format!("\"{}\"", server.url())).collect();
    gateway_of(&urls.join(", "), lines)
}

fn gateway_of(servers: &str, lines: &str) -> Gateway {
    Gateway::start(&format!(
        "[server]\nworkers = 2\n[upstream.api]\nservers = [{servers}]\n{lines}\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n"
    ))
}

fn weighted(servers: &[(&Server, u32)]) -> String {
    let servers: Vec<_> =
        servers.iter().map(|(server, weight)| format!("{{ url = \"{}\", weight = {weight} }}", server.url())).collect();
    servers.join(", ")
}

#[test]
fn round_robin_follows_weights() {
    let [one, two, three, none] = &Server::start_many();
    let servers = weighted(&[(one, 1), (two, 2), (three, 3), (none, 0)]);
    let gateway = gateway_of(&servers, "balance = \"round-robin\"");
    let statuses = load(&[gateway.address], 8, 600, "/", &[]);
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    let counts = [one, two, three, none].map(Server::count);
    assert_eq!(counts, [100, 200, 300, 0], "round-robin counts the requests of all workers");
}

#[test]
fn random_follows_weights() {
    for balance in ["random", "least-requests", "hash:x-absent"] {
        let [one, two] = &Server::start_many();
        let gateway = gateway_of(&weighted(&[(one, 1), (two, 3)]), &format!("balance = \"{balance}\""));
        // Send one request at a time: no server has more requests in flight than the other.
        let mut client = gateway.client();
        (0..2000).for_each(|_| assert_eq!(client.get("/").status, 200));
        // The expected count is 500, with a standard deviation of 19.4. A deviation of 7 standard deviations occurs
        // once in 10¹¹ runs.
        let count = one.count();
        assert!((364..=636).contains(&count), "{balance}: {count} of 2000 with a quarter of the weight");
        assert_eq!(count + two.count(), 2000);
    }
}

#[test]
fn least_requests_picks_the_less_loaded_server() {
    let [one, two] = &Server::start_many();
    let gateway = gateway(&[one, two], "balance = \"least-requests\"");
    one.set(Behaviour::Hang);
    two.set(Behaviour::Hang);
    let mut held = gateway.client();
    held.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("a request is queued", || one.count() + two.count() == 1);
    let (busy, free) = if one.count() == 1 { (one, two) } else { (two, one) };
    free.set(Behaviour::Respond(200));
    let mut client = gateway.client();
    (0..100).for_each(|_| assert_eq!(client.get("/").status, 200));
    assert_eq!(busy.count(), 1, "the busy server gets no further request");
    busy.set(Behaviour::Respond(200));
    assert_eq!(held.reply().unwrap().status, 200);
    // Finished requests do not count as load: both servers are used again.
    let before = busy.count();
    (0..100).for_each(|_| assert_eq!(client.get("/").status, 200));
    assert!(busy.count() >= before + 20, "{} of 100", busy.count() - before);
}

/// While no request ends, the servers fill up in proportion to their weights.
#[test]
fn requests_in_flight_follow_weights_with_every_policy() {
    const REQUESTS: usize = 50;
    for (balance, counts) in [
        ("least-requests", 9..=11),
        // A request without the header takes the less loaded server.
        ("hash:x-absent", 9..=11),
        ("round-robin", 10..=10),
        // The expected count is 10, with a standard deviation of 2.8.
        ("random", 0..=29),
    ] {
        for weights in [[1, 4], [4, 1]] {
            let servers = &Server::start_many::<2>();
            servers.iter().for_each(|server| server.set(Behaviour::Hang));
            let list = weighted(&[(&servers[0], weights[0]), (&servers[1], weights[1])]);
            let gateway = gateway_of(&list, &format!("balance = \"{balance}\""));
            let mut clients = Vec::new();
            for number in 1..=REQUESTS {
                let mut client = gateway.client();
                client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
                clients.push(client);
                eventually("the request is in flight", || servers.iter().map(Server::count).sum::<usize>() == number);
            }
            let light = servers[usize::from(weights[0] > weights[1])].count();
            assert!(counts.contains(&light), "{balance}, weights {weights:?}: {light} of {REQUESTS} requests");
            servers.iter().for_each(|server| server.set(Behaviour::Respond(200)));
            assert!(clients.iter_mut().all(|client| client.reply().unwrap().status == 200), "{balance}");
        }
    }
}

#[test]
fn hash_balance_keeps_keys_on_their_server() {
    let servers = &Server::start_many::<4>();
    let gateway = gateway(&servers.iter().collect::<Vec<_>>(), "balance = \"hash:x-tenant\"");
    let owner = |key: &str| {
        let before: Vec<_> = servers.iter().map(Server::count).collect();
        assert_eq!(gateway.client().get_with("/", &[("x-tenant", key)]).status, 200);
        servers.iter().zip(before).position(|(server, before)| server.count() > before).unwrap()
    };
    let keys: Vec<_> = (0..80).map(|key| format!("tenant {key}")).collect();
    let owners: Vec<_> = keys.iter().map(|key| owner(key)).collect();
    for server in 0..4 {
        let own = owners.iter().filter(|owner| **owner == server).count();
        assert!((5..=40).contains(&own), "server {server} has {own} of 80 keys");
    }
    assert_eq!(keys.iter().map(|key| owner(key)).collect::<Vec<_>>(), owners, "each key stays on its server");
    servers[2].stop();
    for (key, before) in keys.iter().zip(&owners) {
        let now = owner(key);
        assert!(now != 2 && (*before == 2 || now == *before), "`{key}` went from {before} to {now}");
    }
    servers[2].start_again();
    eventually("the restarted server gets its keys again", || {
        keys.iter().zip(&owners).all(|(key, before)| owner(key) == *before)
    });
}

#[test]
fn stopped_server_fails_no_request() {
    let [gone, there] = &Server::start_many();
    gone.stop();
    // The gateway may also retry a POST on the other server, because the server that refused the connection received no
    // byte of the request.
    let gateway = gateway(&[gone, there], "balance = \"round-robin\"\nretries = 0");
    let mut client = gateway.client();
    for number in 0..200 {
        let method = if number % 2 == 0 { "GET" } else { "POST" };
        assert_eq!(client.request(method, "/", &[], b"").status, 200, "request {number}");
    }
    assert_eq!(there.count(), 200);
    assert_eq!(gateway.log().matches("server is unreachable").count(), 1, "{}", gateway.log());
    gone.start_again();
    let back = Instant::now();
    eventually("the restarted server is used again", || client.get("/").status == 200 && gone.count() > 0);
    assert!(back.elapsed() < Duration::from_secs(5), "after {:?}", back.elapsed());
}

#[test]
fn all_servers_down_is_502_until_one_is_back() {
    let [one, two] = &Server::start_many();
    let gateway = gateway(&[one, two], "");
    one.stop();
    two.stop();
    for _ in 0..3 {
        let reply = gateway.get("/");
        reply.assert_problem(502, "no server is reachable");
        assert!(!reply.text().contains("127.0.0.1"), "{}", reply.text());
    }
    two.start_again();
    assert_eq!(gateway.get("/").status, 200, "skipped servers are tried when no other is left");
}

#[test]
fn slow_connect_is_overtaken_by_another_server() {
    // This server never accepts a connection. Once its backlog is full, connection attempts neither succeed nor fail.
    let silent = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    silent.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
    silent.listen(0).unwrap();
    let silent = TcpListener::from(silent);
    let address = silent.local_addr().unwrap();
    let filling: Vec<_> = (0..4)
        .map(|_| {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            let _ = socket.connect(&address.into());
            socket
        })
        .collect();
    let there = Server::start();
    let servers = format!("\"http://{address}\", \"{}\"", there.url());
    let gateway = gateway_of(&servers, "balance = \"round-robin\"\nconnect_timeout = \"15s\"");
    let started = Instant::now();
    let mut client = gateway.client();
    for number in 0..20 {
        assert_eq!(client.request("POST", "/", &[], b"x").status, 200, "request {number}");
    }
    assert!(started.elapsed() < Duration::from_secs(12), "{:?}", started.elapsed());
    assert_eq!(there.count(), 20);
    drop(filling);
}

#[test]
fn broken_safe_requests_are_retried_on_another_server() {
    let [broken, there] = &Server::start_many();
    broken.set(Behaviour::Reset);
    let gateway = gateway(&[broken, there], "balance = \"round-robin\"\nretries = 1");
    let mut statuses = HashMap::<_, usize>::new();
    for number in 0..40 {
        let id = format!("post-{number}");
        let posted = gateway.client().request("POST", "/", &[("x-id", &id)], b"body");
        *statuses.entry(posted.status).or_default() += 1;
        assert_eq!(gateway.client().get("/").status, 200, "GET {number} succeeds");
    }
    assert_eq!(statuses.keys().copied().max(), Some(502), "{statuses:?}: the broken server gets some of the POSTs");
    let mut ids = HashMap::new();
    [broken, there].into_iter().for_each(|server| server.count_values("x-id", &mut ids));
    assert!(ids.len() == 40 && ids.values().all(|count| *count == 1), "each POST reaches exactly one server: {ids:?}");
}

#[test]
fn post_is_never_repeated_while_servers_restart() {
    let servers = &Server::start_many::<3>();
    let gateway = gateway(&servers.iter().collect::<Vec<_>>(), "retries = 3\nconnect_timeout = \"5s\"");
    let done = AtomicBool::new(false);
    let answers = std::thread::scope(|scope| {
        let stop = crate::support::SetOnDrop(&done);
        let flapping = scope.spawn(|| {
            for server in servers.iter().cycle().take_while(|_| !done.load(Ordering::SeqCst)) {
                server.stop();
                server.start_again();
                server.set(Behaviour::Reset);
                server.set(Behaviour::Respond(200));
                // At least ten requests reach this server before the next server stops.
                let before = server.count();
                while server.count() < before + 10 && !done.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
            }
        });
        let clients: Vec<_> = (0..4)
            .map(|client| {
                let gateway = &gateway;
                scope.spawn(move || {
                    let mut connection = gateway.client();
                    let mut post = |number: usize| {
                        let id = format!("{client}-{number}");
                        connection.request("POST", "/", &[("x-id", &id)], id.as_bytes()).status
                    };
                    (0..500).map(&mut post).collect::<Vec<_>>()
                })
            })
            .collect();
        let answers: Vec<_> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        drop(stop);
        flapping.join().unwrap();
        answers
    });
    assert!(answers.iter().all(|status| matches!(status, 200 | 502)), "{answers:?}");
    let mut ids = HashMap::new();
    servers.iter().for_each(|server| server.count_values("x-id", &mut ids));
    let twice: Vec<_> = ids.iter().filter(|(_, count)| **count > 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
    let fine = answers.iter().filter(|status| **status == 200).count();
    assert!(ids.len() >= fine && fine > 1000, "{fine} of 2000 succeeded, the servers saw {} ids", ids.len());
}

#[test]
fn retry_budget_is_a_fifth_of_requests() {
    let servers = &Server::start_many::<3>();
    servers.iter().for_each(|server| server.set(Behaviour::Reset));
    let gateway = gateway(&servers.iter().collect::<Vec<_>>(), "retries = 10");
    let started = Instant::now();
    let statuses = load(&[gateway.address], 4, 1000, "/", &[]);
    assert!(statuses.iter().all(|status| *status == 502));
    // The retry budget allows at least 10 retries per second. The allowance of the first second is available at the
    // start.
    let most = 1200 + 10 * (started.elapsed().as_secs() as usize + 2);
    let seen: usize = servers.iter().map(Server::count).sum();
    assert!((1100..=most).contains(&seen), "{seen} attempts for 1000 requests, {most} allowed");
}

#[test]
fn consecutive_errors_eject_a_server_for_a_time() {
    let [ill, one, two] = &Server::start_many();
    ill.set(Behaviour::Respond(503));
    let gateway = gateway(
        &[ill, one, two],
        "balance = \"round-robin\"\noutlier_detection = { consecutive_errors = 3, base_ejection_time = \"2s\" }",
    );
    let mut client = gateway.client();
    let refused = (0..60).filter(|_| client.get("/").status == 503).count();
    assert_eq!((refused, ill.count()), (3, 3), "the server is ejected after three errors");
    assert!(gateway.log().contains("server is ejected after consecutive errors"), "{}", gateway.log());
    assert!(gateway.log().contains("\"errors\":3,"), "{}", gateway.log());
    ill.set(Behaviour::Respond(200));
    eventually("the ejected server is used again", || client.get("/").status == 200 && ill.count() > 3);
    assert!(gateway.log().contains("ejection of server ended"), "{}", gateway.log());
    // After each success, consecutive errors are counted from zero.
    for _ in 0..4 {
        ill.set(Behaviour::Respond(503));
        let before = ill.count();
        while ill.count() < before + 2 {
            client.get("/");
        }
        ill.set(Behaviour::Respond(200));
        while ill.count() < before + 3 {
            assert_eq!(client.get("/").status, 200);
        }
    }
    assert_eq!(gateway.log().matches("is ejected").count(), 1, "{}", gateway.log());
}

#[test]
fn response_timeouts_count_as_errors_for_ejection() {
    let [silent, one, two] = &Server::start_many();
    silent.set(Behaviour::Hang);
    let lines = "balance = \"round-robin\"\nresponse_timeout = \"200ms\"\noutlier_detection = { consecutive_errors = 2, base_ejection_time = \"60s\" }";
    let gateway = gateway(&[silent, one, two], lines);
    let mut client = gateway.client();
    let late = (0..30).filter(|_| client.get("/").status == 504).count();
    // On a busy machine, requests to other servers may time out as well. The silent server gets exactly two requests.
    assert_eq!(silent.count(), 2, "{late} of 30 were late");
    assert!(late >= 2);
}

#[test]
fn ejected_servers_are_used_when_most_are_out() {
    let servers = &Server::start_many::<3>();
    servers[..2].iter().for_each(|server| server.set(Behaviour::Respond(503)));
    let lines =
        "balance = \"round-robin\"\noutlier_detection = { consecutive_errors = 2, base_ejection_time = \"60s\" }";
    let gateway = gateway(&servers.iter().collect::<Vec<_>>(), lines);
    let mut client = gateway.client();
    (0..12).for_each(|_| drop(client.get("/")));
    assert!(gateway.log().contains("more than half of the servers are ejected or unhealthy"), "{}", gateway.log());
    let before: Vec<_> = servers.iter().map(Server::count).collect();
    (0..30).for_each(|_| drop(client.get("/")));
    let counts: Vec<_> = servers.iter().zip(before).map(|(server, before)| server.count() - before).collect();
    assert_eq!(counts, [10, 10, 10]);
}

#[test]
fn max_requests_bounds_requests_of_a_server() {
    let [one, two] = &Server::start_many();
    [one, two].into_iter().for_each(|server| server.set(Behaviour::RespondAfter(5)));
    let gateway = gateway(&[one, two], "max_requests = 3\nmax_queue = 100\nconnect_timeout = \"20s\"");
    let statuses = load(&[gateway.address], 24, 600, "/", &[]);
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    assert_eq!(
        [one.max_running(), two.max_running()],
        [3, 3],
        "max_requests applies to all workers together, and both servers reach it"
    );
}

#[test]
fn full_wait_queue_is_503_and_a_cancelled_request_leaves_it() {
    let server = Server::start();
    server.set(Behaviour::Hang);
    let gateway = gateway(&[&server], "max_requests = 1\nmax_queue = 2\nconnect_timeout = \"19s\"");
    let ask = || {
        let mut client = gateway.client();
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
        client.stream.get_ref().set_nonblocking(true).unwrap();
        client
    };
    let answered = |client: &Client| client.stream.get_ref().peek(&mut [0]).is_ok();
    let _first = ask();
    eventually("the server is busy", || server.running() == 1);
    let mut waiting: Vec<_> = (0..5).map(|_| ask()).collect();
    eventually("the full queue rejects three requests", || {
        waiting.iter().filter(|client| answered(client)).count() == 3
    });
    let (mut refused, mut in_line): (Vec<_>, Vec<_>) = waiting.drain(..).partition(answered);
    for client in &mut refused {
        client.stream.get_ref().set_nonblocking(false).unwrap();
        let reply = client.reply().unwrap();
        reply.assert_problem(503, "the queue is full");
        assert_eq!(reply.header("retry-after"), Some("1"));
    }
    // The client of one of the two queued requests closes its connection.
    drop(in_line.pop());
    let mut last = None;
    eventually("the queue has room for another one", || {
        let client = ask();
        let started = Instant::now();
        while !answered(&client) {
            if started.elapsed() > Duration::from_millis(300) {
                last = Some(client);
                return true;
            }
        }
        false
    });
    server.set(Behaviour::Respond(200));
    for mut client in in_line.into_iter().chain(last) {
        client.stream.get_ref().set_nonblocking(false).unwrap();
        assert_eq!(client.reply().unwrap().status, 200);
    }
    assert_eq!(server.count(), 3, "a cancelled request is not sent");
}

#[test]
fn queued_requests_time_out_with_connect_timeout() {
    let server = Server::start();
    server.set(Behaviour::Hang);
    let gateway = gateway(&[&server], "max_requests = 1\nmax_queue = 2\nconnect_timeout = \"300ms\"");
    let mut first = gateway.client();
    first.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("the server is busy", || server.running() == 1);
    let started = Instant::now();
    gateway.get("/").assert_problem(503, "the queue timeout expires");
    assert!(started.elapsed() >= Duration::from_millis(290), "{:?}", started.elapsed());
    server.set(Behaviour::Respond(200));
    assert_eq!(first.reply().unwrap().status, 200);
    assert_eq!(gateway.get("/").status, 200);
}

#[test]
fn request_permit_is_held_until_the_body_ends() {
    let head_only = crate::support::upstream::serve(|mut stream| {
        use std::io::Write;
        while crate::support::upstream::read_request(&mut stream).is_some() {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhal").unwrap();
        }
    });
    let gateway = gateway_of(&format!("\"http://{head_only}\""), "max_requests = 1");
    let mut client = gateway.client();
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 200);
    gateway.get("/").assert_problem(503, "the response is not complete");
    drop(client);
    eventually("a disconnected client releases its permit", || {
        let mut client = gateway.client();
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
        client.head().unwrap().status == 200
    });
}

#[test]
fn dead_idle_connections_do_not_eject_their_server() {
    // The server responds to the first request of a connection. It closes the connection when it receives the second
    // one.
    let address = crate::support::upstream::serve(|mut stream| {
        if crate::support::upstream::read_request(&mut stream).is_some() {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
            crate::support::upstream::read_request(&mut stream);
        }
    });
    let gateway = gateway_of(
        &format!("\"http://{address}\""),
        "outlier_detection = { consecutive_errors = 1, base_ejection_time = \"60s\" }",
    );
    let mut client = gateway.client();
    let statuses: Vec<_> = (0..10).map(|_| client.get("/").status).collect();
    assert_eq!(statuses, [200; 10], "a GET is sent again on a new connection");
    // A POST is not retried. Every second POST fails on the pooled connection of the previous request.
    let statuses: Vec<_> = (0..4).map(|_| client.request("POST", "/", &[], b"x").status).collect();
    assert!(statuses.contains(&502) && statuses.contains(&200), "{statuses:?}");
    assert!(
        !gateway.log().contains("is ejected"),
        "the server responds on new connections and must not be ejected: {}",
        gateway.log()
    );
}

#[test]
fn server_with_idle_connections_is_ejected_by_failures_on_new_ones() {
    let servers @ [failing, _, _] = &Server::start_many();
    let gateway =
        gateway_by_one_worker(servers, "outlier_detection = { consecutive_errors = 2, base_ejection_time = \"60s\" }");
    let mut client = gateway.client();
    (0..6).for_each(|_| assert_eq!(client.get("/").status, 200));
    assert_eq!(servers.each_ref().map(Server::accepted), [1; 3], "each has one idle connection");
    failing.set(Behaviour::Reset);
    let failed = (0..30).filter(|_| client.get("/").status == 502).count();
    // The first request fails on an idle connection, which does not count as an error of the server, and then on a new
    // connection. The second request fails on a new connection only.
    assert_eq!((failed, failing.count()), (2, 2 + 3), "two requests fail: {}", gateway.log());
    assert!(gateway.log().contains("server is ejected after consecutive errors"), "{}", gateway.log());
    assert!(gateway.log().contains("\"errors\":2,"), "{}", gateway.log());
}

#[test]
fn server_lost_with_idle_connections_is_skipped_and_ejected() {
    let servers @ [gone, _, _] = &Server::start_many();
    let gateway =
        gateway_by_one_worker(servers, "outlier_detection = { consecutive_errors = 1, base_ejection_time = \"60s\" }");
    let mut client = gateway.client();
    (0..6).for_each(|_| assert_eq!(client.get("/").status, 200));
    gone.stop();
    for method in ["POST", "GET"] {
        (0..12).for_each(|_| drop(client.request(method, "/", &[], b"")));
    }
    assert!(gateway.log().contains("server is ejected after consecutive errors"), "{}", gateway.log());
    assert!(gateway.log().contains("\"errors\":1,"), "{}", gateway.log());
    gone.start_again();
    let before = gone.count();
    (0..12).for_each(|_| assert_eq!(client.get("/").status, 200));
    assert_eq!(gone.count(), before, "the server stays ejected for a minute");
}

#[test]
fn half_of_two_servers_may_be_ejected_and_not_both() {
    let servers @ [one, other] = &Server::start_many();
    let gateway =
        gateway_by_one_worker(servers, "outlier_detection = { consecutive_errors = 1, base_ejection_time = \"60s\" }");
    let mut client = gateway.client();
    one.set(Behaviour::Respond(503));
    let failed = (0..20).filter(|_| client.get("/").status == 503).count();
    assert_eq!((failed, one.count(), other.count()), (1, 1, 19), "the first error ejects the server");
    assert!(!gateway.log().contains("more than half"), "{}", gateway.log());
    other.set(Behaviour::Respond(503));
    assert_eq!(client.get("/").status, 503);
    assert!(gateway.log().contains("more than half of the servers are ejected or unhealthy"), "{}", gateway.log());
    let before = [one.count(), other.count()];
    (0..20).for_each(|_| assert_eq!(client.get("/").status, 503));
    assert_eq!([one.count(), other.count()], before.map(|count| count + 10), "both ejected servers are used");
}

#[test]
fn only_502_503_and_504_count_as_errors() {
    for (status, ejects) in
        [(502, true), (503, true), (504, true), (500, false), (501, false), (429, false), (404, false)]
    {
        let servers @ [failing, _, _] = &Server::start_many();
        failing.set(Behaviour::Respond(status));
        let gateway = gateway_by_one_worker(
            servers,
            "outlier_detection = { consecutive_errors = 2, base_ejection_time = \"60s\" }",
        );
        let mut client = gateway.client();
        let failed = (0..30).filter(|_| client.get("/").status == status).count();
        assert_eq!(failed, if ejects { 2 } else { 10 }, "{status}");
        assert_eq!(gateway.log().contains("is ejected"), ejects, "{status}");
    }
}

#[test]
fn ejected_server_returns_with_slow_start() {
    let servers @ [failing, _] = &Server::start_many();
    failing.set(Behaviour::Respond(503));
    let lines = "outlier_detection = { consecutive_errors = 1, base_ejection_time = \"100ms\" }\nslow_start = \"10m\"";
    let gateway = gateway_by_one_worker(servers, lines);
    let mut client = gateway.client();
    eventually("the server is ejected", || {
        client.get("/");
        gateway.log().contains("is ejected")
    });
    failing.set(Behaviour::Respond(200));
    eventually("the ejection is over", || {
        client.get("/");
        gateway.log().contains("ejection of server ended")
    });
    let before = failing.count();
    (0..220).for_each(|_| assert_eq!(client.get("/").status, 200));
    // At the start of `slow_start`, the server has a tenth of the other server's weight: 20 of 220 requests, and a few
    // more if the test takes minutes.
    let share = failing.count() - before;
    assert!((19..40).contains(&share), "{share} of 220");
}

#[test]
fn skipped_server_is_tried_when_all_others_failed() {
    let servers @ [one, other] = &Server::start_many();
    let gateway = gateway_by_one_worker(servers, "retries = 1");
    let mut client = gateway.client();
    one.stop();
    eventually("the unreachable server is skipped", || {
        assert_eq!(client.get("/").status, 200);
        gateway.log().contains("server is unreachable")
    });
    other.set(Behaviour::Reset);
    one.start_again();
    assert_eq!(client.get("/").status, 200, "no other server is left for the retry");
}

#[test]
fn drained_servers_do_not_count_for_the_ejection_bound() {
    let [one, two, drained, also_drained] = &Server::start_many();
    let servers = weighted(&[(one, 1), (two, 1), (drained, 0), (also_drained, 0)]);
    let gateway = gateway_of(
        &servers,
        "balance = \"round-robin\"\noutlier_detection = { consecutive_errors = 1, base_ejection_time = \"60s\" }",
    );
    [one, two].into_iter().for_each(|server| server.set(Behaviour::Respond(503)));
    let mut client = gateway.client();
    for _ in 0..20 {
        assert_eq!(client.get("/").status, 503);
    }
    assert_eq!((one.count(), two.count()), (10, 10), "both ejected servers are used");
    assert_eq!((drained.count(), also_drained.count()), (0, 0));
}

/// Start a gateway with one worker. It uses the servers in turn and keeps one connection to each of them.
fn gateway_by_one_worker(servers: &[Server], lines: &str) -> Gateway {
    let urls: Vec<_> = servers.iter().map(|server| format!("\"{}\"", server.url())).collect();
    Gateway::start(&format!(
        "[server]\nworkers = 1\n[upstream.api]\nservers = [{}]\nbalance = \"round-robin\"\n{lines}\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n",
        urls.join(", ")
    ))
}

#[test]
fn retried_request_is_the_original_one() {
    // The first connection is closed after the headers of its request. The third request of all connections is not
    // answered either, so that a reused connection is replaced.
    let heads = Arc::<Mutex<Vec<String>>>::default();
    let start = || {
        let record = heads.clone();
        serve(move |mut stream| {
            let is_first = record.lock().unwrap().is_empty();
            while let Some(head) = read_head(&mut stream) {
                let count = {
                    let mut heads = record.lock().unwrap();
                    heads.push(head);
                    heads.len()
                };
                if is_first || count == 3 || stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").is_err()
                {
                    return;
                }
            }
        })
    };
    let servers = [start(), start()].map(|address| format!("\"http://{address}\"")).join(", ");
    let headers = [
        ("host", "a.test"),
        ("x-request-id", "one"),
        ("accept", "text/html"),
        ("x-empty", ""),
        ("authorization", "Bearer s3cret"),
        ("accept", "caf\u{e9}; q=0.5"),
        ("cookie", "a=1; b=2"),
        ("x-long", &"y".repeat(9000)),
    ];
    for method in ["GET", "OPTIONS", "HEAD"] {
        heads.lock().unwrap().clear();
        let gateway = Gateway::start(&format!(
            "[server]\nworkers = 1\n[upstream.api]\nservers = [{servers}]\nretries = 1\n\
             [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n"
        ));
        let mut client = gateway.client();
        // The first request is retried on the other server, and the second one on another connection.
        for (what, before) in [("reset", 0), ("reused connection", 2)] {
            assert_eq!(client.request(method, "/a%20b/c?d=e&d", &headers, b"").status, 200, "{method}, {what}");
            let heads = heads.lock().unwrap();
            assert_eq!(heads.len(), before + 2, "{method}, {what}: the request was sent twice");
            assert_eq!(heads[before], heads[before + 1], "{method}, {what}");
            assert!(heads[before].starts_with(&format!("{method} /a%20b/c?d=e&d HTTP/1.1\r\n")), "{}", heads[before]);
        }
    }
}

#[test]
fn ignored_ejections_bring_no_unhealthy_server_back() {
    let server = |health: &'static str, status: &'static str| {
        Upstream::responding(move |seen| {
            let status = if seen.target() == "/healthz" { health } else { status };
            format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n").into_bytes()
        })
    };
    for unhealthy in 0..3 {
        let servers =
            [0, 1, 2].map(|index| if index == unhealthy { server("500", "200") } else { server("200", "503") });
        let urls: Vec<_> = servers.iter().map(Upstream::url).collect();
        let gateway = Gateway::start(&format!(
            "[upstream.api]\nservers = {urls:?}\nbalance = \"round-robin\"\n\
             health_check = {{ path = \"/healthz\", interval = \"50ms\", unhealthy_threshold = 1 }}\n\
             outlier_detection = {{ consecutive_errors = 1, base_ejection_time = \"1h\" }}\n\
             [[route]]\nname = \"all\"\npath = \"/x\"\nupstream = \"api\"\n"
        ));
        eventually("the server is unhealthy", || gateway.log().contains("server is unhealthy"));
        let mut client = gateway.client();
        // Both other servers are ejected by these requests. As no other server is left, their ejections are ignored.
        let statuses: Vec<_> = (0..20).map(|_| client.get("/x").status).collect();
        assert_eq!(statuses, [503; 20], "the unhealthy server {unhealthy} gets no request");
        assert!(gateway.log().contains("ejections are ignored"), "{}", gateway.log());
        let counts = servers
            .each_ref()
            .map(|server| server.seen.lock().unwrap().iter().filter(|seen| seen.target() == "/x").count());
        assert!((0..3).all(|index| (counts[index] > 0) == (index != unhealthy)), "{counts:?}");
    }
}

/// Return the name and the value of the cookie that a response sets.
fn set_cookie(reply: &Reply) -> Option<(String, String)> {
    let cookie = reply.header("set-cookie")?;
    let (name, value) = cookie.split(';').next().unwrap().split_once('=').unwrap();
    Some((name.to_owned(), value.to_owned()))
}

/// Return the index of the server that gets a request with this cookie, and the response.
fn served_by(gateway: &Gateway, servers: &[Server], cookie: &str) -> (usize, Reply) {
    let before: Vec<_> = servers.iter().map(Server::count).collect();
    let reply = gateway.client().request("GET", "/", &[("Cookie", cookie)], b"");
    (servers.iter().zip(before).position(|(server, before)| server.count() > before).unwrap(), reply)
}

#[test]
fn sticky_cookie_keeps_a_client_on_its_server() {
    let servers = Server::start_many::<3>();
    let urls: Vec<_> = servers.iter().map(Server::url).collect();
    let config = |timeout: &str| {
        format!(
            "[store]\nsecret = \"0123456789abcdef0123456789abcdef\"\n[upstream.api]\nservers = {urls:?}\nbalance = \"sticky\"\n\
             response_timeout = \"{timeout}\"\n\
             sticky_cookie = {{ name = \"place\", path = \"/\", max_age = \"1h\", secure = true, same_site = \"strict\" }}\n\
             [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n"
        )
    };
    let mut gateway = Gateway::start(&with_admin(&config("20s")));
    let (first, reply) = served_by(&gateway, &servers, "other=1");
    let (name, value) = set_cookie(&reply).expect("a cookie");
    let attributes = "; Path=/; Max-Age=3600; Secure; HttpOnly; SameSite=Strict";
    assert_eq!(reply.header("set-cookie"), Some(&*format!("place={value}{attributes}")));
    assert!(name == "place" && value.len() == 16, "{value}");
    let cookie = format!("other=1; place={value}; more=2");
    // Another gateway with the same secret, and a reload, keep the server.
    let other = Gateway::start(&with_admin(&config("20s")));
    for gateway in [&gateway, &other] {
        for _ in 0..10 {
            let (index, reply) = served_by(gateway, &servers, &cookie);
            assert_eq!((index, reply.header("set-cookie")), (first, None));
        }
    }
    // A hot restart and a restart keep it as well. The key of the cookies is derived from `store.secret`.
    reloads(&gateway, &config("21s"));
    assert_eq!(served_by(&gateway, &servers, &cookie).0, first);
    let _successor = hot_restart(&mut gateway);
    for _ in 0..10 {
        let (index, reply) = served_by(&gateway, &servers, &cookie);
        assert_eq!((index, reply.header("set-cookie")), (first, None), "after a hot restart");
    }
    let mut stopped = other;
    stopped.terminate();
    stopped.wait();
    let restarted = Gateway::start(&with_admin(&config("20s")));
    for _ in 0..10 {
        let (index, reply) = served_by(&restarted, &servers, &cookie);
        assert_eq!((index, reply.header("set-cookie")), (first, None), "after a restart");
    }
    // Another secret makes other cookies.
    let changed = Gateway::start(&with_admin(&config("20s").replace("0123456789abcdef0", "f123456789abcdef0")));
    assert!(set_cookie(&served_by(&changed, &servers, &cookie).1).is_some(), "a cookie of another secret");
    // HTTP/2 clients may send each cookie in its own header (RFC 9113 §8.2.3).
    for cookies in [&[&*cookie][..], &["other=1", &format!("place={value}"), "more=2"]] {
        let before: Vec<_> = servers.iter().map(Server::count).collect();
        let request = Request::get("http://shop.test/");
        let request = cookies.iter().fold(request, |request, cookie| request.header("cookie", *cookie));
        let answer = http2::ask(gateway.address, [request.body(&b""[..]).unwrap()]).remove(0);
        let Answer::Response(_, headers, _) = answer else { panic!("{answer:?}") };
        assert!(!headers.contains_key("set-cookie"), "{headers:?}");
        assert_eq!(servers.iter().zip(before).position(|(server, before)| server.count() > before), Some(first));
    }
    // Cookies that the gateway has not made select no server.
    for wrong in ["place=1", "place=127.0.0.1", "place=00000000000000ff", "place=\u{e9}", "place", "xplace=1"] {
        let (_, reply) = served_by(&gateway, &servers, wrong);
        assert!(set_cookie(&reply).is_some(), "{wrong}");
    }
    // If the server is down, the client gets another one, and stays there.
    servers[first].stop();
    let (second, reply) = served_by(&gateway, &servers, &cookie);
    let (_, moved) = set_cookie(&reply).expect("a new cookie");
    assert!(second != first && moved != value);
    servers[first].start_again();
    for _ in 0..5 {
        assert_eq!(served_by(&gateway, &servers, &format!("place={moved}")).0, second);
    }
}

#[test]
fn sticky_cookie_belongs_to_its_upstream_and_outlives_a_busy_server() {
    let servers = Server::start_many::<2>();
    let urls: Vec<_> = servers.iter().map(Server::url).collect();
    let upstream = |name: &str| {
        format!(
            "[upstream.{name}]\nservers = {urls:?}\nbalance = \"sticky\"\nmax_requests = 1\nsticky_cookie = {{ name = \"at\" }}\n\
             [[route]]\nname = \"{name}\"\npath = \"/{name}\"\nupstream = \"{name}\"\n"
        )
    };
    let store = "[store]\nsecret = \"0123456789abcdef0123456789abcdef\"\n";
    let gateway = Gateway::start(&format!("{store}{}{}", upstream("one"), upstream("two")));
    let ask = |path: &str, cookie: &str| {
        let reply = gateway.client().request("GET", path, &[("Cookie", cookie)], b"");
        (reply.status, set_cookie(&reply).map(|(_, value)| value))
    };
    let (_, Some(value)) = ask("/one", "") else { panic!("a new client gets a cookie") };
    let cookie = format!("at={value}");
    assert_eq!(ask("/one", &cookie), (200, None));
    assert!(ask("/two", &cookie).1.is_some(), "the cookie of another upstream selects no server");
    // While the server of the cookie has `max_requests` in flight, another server gets the request.
    let before = servers.each_ref().map(Server::count);
    ask("/one", &cookie);
    let own = servers.iter().zip(before).position(|(server, before)| server.count() > before).unwrap();
    servers[own].set(Behaviour::Hang);
    let mut busy = gateway.client();
    busy.send(format!("GET /one HTTP/1.1\r\nHost: a\r\nCookie: {cookie}\r\n\r\n").as_bytes());
    eventually("the server is busy", || servers[own].running() == 1);
    assert_eq!(ask("/one", &cookie), (200, None), "the client keeps its cookie");
}

#[test]
fn hash_of_a_cookie_ignores_all_other_cookies() {
    let servers = Server::start_many::<4>();
    let urls: Vec<_> = servers.iter().map(|server| format!("\"{}\"", server.url())).collect();
    let gateway = gateway_of(&urls.join(", "), "balance = \"hash:cookie:session\"");
    let mut used = HashMap::new();
    for session in 0..30 {
        let (index, reply) = served_by(&gateway, &servers, &format!("session={session}; a=1"));
        for other in ["b=2; ", "session2=7; c=3; "] {
            assert_eq!(served_by(&gateway, &servers, &format!("{other}session={session}")).0, index);
        }
        assert_eq!(reply.header("set-cookie"), None);
        *used.entry(index).or_insert(0) += 1;
    }
    assert!(used.len() > 1, "{used:?}");
}
