//! Mirroring: the gateway sends copies of requests to a second upstream, and the client never notices them.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::support::admin_listener::{metric, with_admin};
use crate::support::client::{Client, load};
use crate::support::gateway::Gateway;
use crate::support::redis::free_port;
use crate::support::reload;
use crate::support::server::{Behaviour, Server};
use crate::support::upstream::{Seen, Upstream, endless, read_head, read_request, serve};
use crate::support::{MAX_WAIT, assert_silent, eventually};

/// Forward all requests to `api` and mirror them to `next`. `mirror` and `route` are appended to their tables.
fn config(api: &str, next: &str, mirror: &str, route: &str) -> String {
    with_admin(&format!(
        "[upstream.api]\nservers = [\"{api}\"]\n[upstream.next]\nservers = [\"{next}\"]\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
         mirror = {{ upstream = \"next\"{mirror} }}\n{route}\n"
    ))
}

fn one_worker(config: &str) -> Gateway {
    Gateway::start(&format!("[server]\nworkers = 1\n{config}"))
}

fn dropped(gateway: &Gateway, reason: &str) -> f64 {
    metric(gateway, &format!("sluicegate_mirrored_requests_dropped_total{{route=\"all\",reason=\"{reason}\"}}"))
}

fn sent(gateway: &Gateway, result: &str) -> f64 {
    metric(gateway, &format!("sluicegate_mirrored_requests_total{{route=\"all\",result=\"{result}\"}}"))
}

fn in_flight(gateway: &Gateway) -> f64 {
    metric(gateway, "sluicegate_mirrored_requests_in_flight{route=\"all\"}")
}

/// Return the request line and the headers in lower case, without the headers in `names`.
fn head_without(seen: &Seen, names: &[&str]) -> BTreeSet<String> {
    let lines = seen.head.lines().filter(|line| !line.is_empty());
    let is_kept = |line: &&str| {
        line.split_once(": ").is_none_or(|(name, _)| !names.iter().any(|other| name.eq_ignore_ascii_case(other)))
    };
    lines.filter(is_kept).map(str::to_ascii_lowercase).collect()
}

#[test]
fn copy_is_the_forwarded_request_with_a_marker() {
    let (api, next) = (Upstream::start(), Upstream::start());
    let route = "strip_prefix = \"/v1\"\n\
                 request_headers = { set = { x-route = \"{route}\" }, remove = [\"x-secret\"] }\n";
    let path = config(&api.url(), &next.url(), "", route).replace("/{*rest}", "/v1/{*rest}");
    let gateway = Gateway::start(&path);
    let mut client = gateway.client();
    let headers = [("Authorization", "Bearer t"), ("X-Secret", "s"), ("Cookie", "a=1"), ("Host", "Shop.test:80")];
    assert_eq!(client.request("POST", "/v1/items?q=1", &headers, b"hello").status, 200);
    assert_eq!(client.get("/v1/plain").status, 200);
    client.send(
        b"PUT /v1/chunked HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n",
    );
    assert_eq!(client.reply().unwrap().status, 200);
    eventually("all requests are copied", || next.count() == 3);
    for forwarded in api.seen.lock().unwrap().iter() {
        let copies = next.seen.lock().unwrap();
        let copy = copies.iter().find(|copy| copy.target() == forwarded.target()).expect("a copy of each");
        assert_eq!(copy.headers("x-sluicegate-mirror"), ["1"]);
        assert!(forwarded.headers("x-sluicegate-mirror").is_empty(), "{}", forwarded.head);
        assert_eq!(copy.body, forwarded.body, "{}", copy.head);
        // The copy has a Content-Length, whether or not the original request was chunked.
        let framing = ["x-sluicegate-mirror", "content-length", "transfer-encoding"];
        assert_eq!(head_without(copy, &framing), head_without(forwarded, &framing));
        if !copy.body.is_empty() {
            assert_eq!(copy.headers("content-length"), [copy.body.len().to_string()]);
            assert!(copy.headers("transfer-encoding").is_empty());
        }
    }
    let first = api.seen.lock().unwrap()[0].clone();
    assert_eq!((first.target(), &first.headers("authorization")[..]), ("/items?q=1", &["Bearer t"][..]));
    assert!(first.headers("x-secret").is_empty());
    eventually("all copies got a response", || sent(&gateway, "responded") == 3.0);
    assert_eq!(metric(&gateway, "sluicegate_upstream_requests_total{upstream=\"next\",status=\"2xx\"}"), 3.0);
}

#[test]
fn client_gets_its_response_while_the_mirror_holds_the_copies() {
    let (api, next) = (Upstream::start(), Server::start());
    next.set(Behaviour::Hang);
    let gateway = Gateway::start(&config(&api.url(), &next.url(), "", ""));
    let mut client = gateway.client();
    for number in 1..=5 {
        let reply = client.request("POST", "/", &[], b"body");
        assert_eq!((reply.status, reply.text()), (200, "ok"));
        eventually("the mirror holds the copy", || next.running() == number);
    }
    assert_eq!((in_flight(&gateway), sent(&gateway, "responded")), (5.0, 0.0));
    next.set(Behaviour::Respond(503));
    eventually("no copy is in flight", || in_flight(&gateway) == 0.0);
    assert_eq!((sent(&gateway, "responded"), sent(&gateway, "failed")), (5.0, 0.0));
}

#[test]
fn failing_mirror_never_reaches_the_client_and_is_not_retried() {
    let api = Upstream::start();
    let [reset, other] = Server::start_many();
    reset.set(Behaviour::Reset);
    other.set(Behaviour::Reset);
    let (hanging, refusing) = (Server::start(), free_port());
    hanging.set(Behaviour::Hang);
    for (what, servers) in [
        ("refused", format!("[\"http://127.0.0.1:{refusing}\"]")),
        ("reset", format!("[\"{}\", \"{}\"]\nretries = 3", reset.url(), other.url())),
        ("silent", format!("[\"{}\"]\nresponse_timeout = \"50ms\"\nretries = 3", hanging.url())),
    ] {
        let text = config(&api.url(), "PLACE", "", "").replace("[\"PLACE\"]", &servers);
        let gateway = Gateway::start(&text);
        assert_eq!(gateway.get("/").status, 200, "{what}");
        eventually("the copy failed", || sent(&gateway, "failed") == 1.0);
        assert_eq!((in_flight(&gateway), sent(&gateway, "responded")), (0.0, 0.0), "{what}");
        assert_eq!(metric(&gateway, "sluicegate_upstream_requests_total{upstream=\"next\",status=\"none\"}"), 1.0);
    }
    assert_eq!(reset.count() + other.count(), 1, "a copy is not retried");
    assert_eq!(hanging.count(), 1);
}

#[test]
fn copies_beyond_max_in_flight_are_dropped_and_counted() {
    let (api, next) = (Upstream::start(), Server::start());
    next.set(Behaviour::Hang);
    let gateway = one_worker(&config(&api.url(), &next.url(), ", max_in_flight = 2", ""));
    let mut client = gateway.client();
    for _ in 0..5 {
        assert_eq!(client.get("/").status, 200);
    }
    assert_eq!(dropped(&gateway, "max_in_flight"), 3.0);
    eventually("the mirror holds two", || next.running() == 2);
    next.set(Behaviour::Respond(200));
    eventually("the copies are done", || in_flight(&gateway) == 0.0);
    assert_eq!(client.get("/").status, 200);
    eventually("there is room for another copy", || sent(&gateway, "responded") == 3.0);
    assert_eq!((next.count(), dropped(&gateway, "max_in_flight")), (3, 3.0));
}

#[test]
fn endless_response_of_a_mirror_is_cut_off() {
    let api = Upstream::start();
    let next = format!("http://{}", endless());
    let text = config(&api.url(), &next, "", "")
        .replace(&format!("[\"{next}\"]"), &format!("[\"{next}\"]\nresponse_timeout = \"100ms\""));
    let gateway = Gateway::start(&text);
    assert_eq!(gateway.get("/").status, 200);
    eventually("the mirror responded", || sent(&gateway, "responded") == 1.0);
    eventually("the copy ended", || in_flight(&gateway) == 0.0);
}

#[test]
fn bodies_are_copied_up_to_the_maximum() {
    let chunked = |chunks: &[&[u8]]| {
        let mut body = Vec::new();
        for chunk in chunks {
            body.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
            body.extend_from_slice(chunk);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(b"0\r\n\r\n");
        body
    };
    // With `request_buffer = "64KiB"`, bodies are buffered before they are forwarded. With `"0B"`, they are streamed.
    for buffer in ["64KiB", "0B"] {
        let (api, next) = (Upstream::start(), Upstream::start());
        let text = config(&api.url(), &next.url(), ", max_body = \"8B\"", "");
        let gateway = Gateway::start(&format!("[server]\nrequest_buffer = \"{buffer}\"\n{text}"));
        let mut client = gateway.client();
        let (mut too_large, mut copied) = (0.0, Vec::new());
        for body in [&b""[..], b"12345678", b"123456789"] {
            assert_eq!(client.request("POST", "/", &[], body).status, 200);
            if body.len() > 8 { too_large += 1.0 } else { copied.push(body.to_vec()) }
        }
        for chunks in [&[][..], &[&b"1234"[..], b"5678"], &[b"12345678", b"9"]] {
            let body = chunked(chunks);
            client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
            client.send(&body);
            assert_eq!(client.reply().unwrap().status, 200);
            let body = chunks.concat();
            if body.len() > 8 { too_large += 1.0 } else { copied.push(body) }
        }
        eventually("small bodies are copied", || next.count() == copied.len());
        let mut seen: Vec<_> = next.seen.lock().unwrap().iter().map(|copy| copy.body.clone()).collect();
        seen.sort();
        copied.sort();
        assert_eq!(seen, copied, "request_buffer = {buffer}");
        assert_eq!(dropped(&gateway, "max_body"), too_large, "request_buffer = {buffer}");
        assert_eq!(api.count(), 6, "all requests of the client arrive");
    }
}

#[test]
fn body_is_streamed_to_the_upstream_and_copied_when_it_is_complete() {
    let (first_chunk, arrived) = channel();
    let first_chunk = std::sync::Mutex::new(first_chunk);
    let api = serve(move |mut stream| {
        while read_head(&mut stream).is_some() {
            let mut chunk = vec![0; b"1000\r\n".len() + 4096 + 2];
            stream.read_exact(&mut chunk).unwrap();
            first_chunk.lock().unwrap().send(()).unwrap();
            let mut rest = vec![0; chunk.len() + b"0\r\n\r\n".len()];
            if stream.read_exact(&mut rest).is_err() {
                return;
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
        }
    });
    let next = Upstream::start();
    let gateway = Gateway::start(&config(&format!("http://{api}"), &next.url(), "", ""));
    let mut client = gateway.client();
    let chunk = |byte: u8| [b"1000\r\n", &[byte; 4096][..], b"\r\n"].concat();
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
    client.send(&chunk(b'a'));
    arrived.recv_timeout(MAX_WAIT).expect("the first chunk is forwarded at once");
    assert!(next.heads.lock().unwrap().is_empty(), "the copy is sent after the end of the body");
    client.send(&[chunk(b'b'), b"0\r\n\r\n".to_vec()].concat());
    assert_eq!(client.reply().unwrap().status, 200);
    eventually("the copy arrives", || next.count() == 1);
    assert_eq!(next.last().body, [[b'a'; 4096], [b'b'; 4096]].concat());

    // If the client closes the connection before the end of the body, no copy is sent.
    let mut leaving = gateway.client();
    leaving.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
    leaving.send(&chunk(b'a'));
    arrived.recv_timeout(MAX_WAIT).unwrap();
    drop(leaving);
    eventually("the body is incomplete", || dropped(&gateway, "incomplete") == 1.0);
    assert_eq!(next.heads.lock().unwrap().len(), 1);
}

#[test]
fn bodies_of_all_copies_are_bounded() {
    let (api, next) = (Upstream::start(), Server::start());
    // The gateway releases the buffer of a copy at the end of its request. Two incomplete uploads keep two buffers in
    // use.
    next.set(Behaviour::Hang);
    let text = config(&api.url(), &next.url(), ", max_body = \"1KiB\"", "");
    let gateway = one_worker(&format!("max_buffered = \"8KiB\"\nrequest_buffer = \"0B\"\n{text}"));
    let mut uploads: Vec<_> = (0..2).map(|_| gateway.client()).collect();
    for upload in &mut uploads {
        upload.send(b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 1024\r\n\r\n");
        upload.send(&[b'a'; 512]);
    }
    eventually("both uploads are forwarded", || api.heads.lock().unwrap().len() == 2);
    // The copies of the two uploads use a quarter of `max_buffered` (2 of 8 KiB), the maximum for all copies. The copy
    // of the next request is therefore dropped.
    assert_eq!(gateway.client().request("POST", "/", &[], b"x").status, 200);
    assert_eq!(dropped(&gateway, "max_buffered"), 1.0);
    assert_eq!(gateway.get("/without-body").status, 200);
    for upload in &mut uploads {
        upload.send(&[b'b'; 512]);
        assert_eq!(upload.reply().unwrap().status, 200);
    }
    next.set(Behaviour::Respond(200));
    eventually("all other requests are copied", || sent(&gateway, "responded") == 3.0 && in_flight(&gateway) == 0.0);
    assert_eq!(gateway.client().request("POST", "/", &[], b"x").status, 200);
    eventually("the bytes are free again", || sent(&gateway, "responded") == 4.0);
}

#[test]
fn percentage_of_requests_is_copied_exactly() {
    let (api, next) = (Upstream::start(), Upstream::start());
    for (percent, share) in [("12.5", 0.125), ("0.1", 0.001), ("0", 0.0)] {
        let mirror = format!(", percent = {percent}, max_in_flight = 100000");
        let gateway = Gateway::start(&config(&api.url(), &next.url(), &mirror, ""));
        let before = next.count();
        let statuses = load(&[gateway.address], 8, 4000, "/", &[]);
        assert!(statuses.iter().all(|status| *status == 200));
        eventually("all copies are done", || in_flight(&gateway) == 0.0);
        let (copies, due) = ((next.count() - before) as f64, 4000.0 * share);
        assert!((copies - due).abs() <= 4.0, "{percent} %: {copies} of 4000 requests copied, {due} expected");
        assert!(share > 0.0 || copies == 0.0);
    }
}

#[test]
fn upgrades_and_copies_are_not_mirrored() {
    let (api, next) = (Upstream::start(), Upstream::start());
    let proxies = "[client_ip]\ntrusted_proxies = [\"127.0.0.9\"]\n";
    let gateway = Gateway::start(&(config(&api.url(), &next.url(), "", "websocket = true") + proxies));
    let upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket")];
    assert_eq!(gateway.client().get_with("/", &upgrade).status, 200);
    assert_eq!(dropped(&gateway, "upgrade"), 1.0);
    // A request with the mirror header is never mirrored, so that gateways that mirror to each other cause no endless
    // loop. The header is forwarded only if it comes from a trusted proxy.
    for (client, seen) in [([127, 0, 0, 1], &[][..]), ([127, 0, 0, 9], &["1"])] {
        let mut client = Client::connect_from(client.into(), gateway.address);
        let marked = [("X-Sluicegate-Mirror", "1"), ("X_Sluicegate_Mirror", "1")];
        assert_eq!(client.get_with("/", &marked).status, 200);
        assert_eq!(api.last().headers("x-sluicegate-mirror"), seen);
        assert!(api.last().headers("x_sluicegate_mirror").is_empty());
    }
    assert_eq!((dropped(&gateway, "copy"), next.count()), (2.0, 0));
}

#[test]
fn rejected_requests_are_not_mirrored_and_copies_are_not_charged() {
    let (api, next) = (Upstream::start(), Upstream::start());
    let limit = "[limit.ip]\nby = \"ip\"\nquota = \"2/24h\"\n";
    let text = config(&api.url(), &next.url(), "", "limits = [\"ip\"]\nmax_body = \"4B\"\n") + limit;
    let gateway = Gateway::start(&text);
    let mut client = gateway.client();
    assert_eq!(client.request("POST", "/", &[], b"12345").status, 413);
    let mut client = gateway.client();
    for remaining in [1, 0] {
        assert_eq!(client.get("/").remaining("ip"), remaining);
    }
    assert_eq!(client.get("/").status, 429);
    eventually("the admitted requests are copied", || sent(&gateway, "responded") == 2.0);
    assert_eq!((api.count(), next.count()), (2, 2));
}

#[test]
fn copies_reach_an_http2_upstream() {
    let (api, next) = (Upstream::start(), Upstream::start());
    // A second gateway is in front of the mirror upstream. It accepts HTTP/2 with prior knowledge.
    let behind = Gateway::start(&format!(
        "[upstream.u]\nservers = [\"{}\"]\n[[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        next.url()
    ));
    let place = format!("[\"http://{}\"]", behind.address);
    let text = config(&api.url(), "PLACE", "", "").replace("[\"PLACE\"]", &format!("{place}\nprotocol = \"http2\""));
    let gateway = Gateway::start(&text);
    assert_eq!(gateway.client().request("POST", "/a?b=c", &[("Host", "shop.test")], b"hello").status, 200);
    eventually("the copy arrives", || next.count() == 1);
    let copy = next.last();
    assert_eq!(
        (copy.target(), &copy.headers("host")[..], &copy.body[..]),
        ("/a?b=c", &["shop.test"][..], &b"hello"[..])
    );
    assert_eq!(copy.headers("x-sluicegate-mirror"), ["1"]);
    assert_eq!(copy.headers("via"), ["1.1 sluicegate, 2.0 sluicegate"]);
}

#[test]
fn shutdown_waits_for_copies_within_drain_timeout() {
    let (held, holding) = channel();
    let (release, released) = channel();
    let (alive, was_alive) = channel();
    let channels = std::sync::Mutex::new((held, released, alive));
    let next = serve(move |mut stream| {
        let channels = channels.lock().unwrap();
        read_request(&mut stream).unwrap();
        channels.0.send(()).unwrap();
        channels.1.recv_timeout(MAX_WAIT).unwrap();
        // The gateway would close this connection if it exited. The connection stays open and silent, so the gateway is
        // still running.
        assert_silent(&mut stream, Duration::from_millis(300));
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
        channels.2.send(()).unwrap();
    });
    let api = Upstream::start();
    let text = config(&api.url(), &format!("http://{next}"), "", "");
    let mut gateway = one_worker(&text);
    let mut client = gateway.client();
    assert_eq!(client.get("/").status, 200);
    holding.recv_timeout(MAX_WAIT).unwrap();
    gateway.terminate();
    client.assert_closed("the gateway drains");
    release.send(()).unwrap();
    was_alive.recv_timeout(MAX_WAIT).expect("the gateway waits for the copy");
    assert!(gateway.wait().success());
    assert!(!gateway.log().contains("dropping copies"), "{}", gateway.log());

    let silent = Server::start();
    silent.set(Behaviour::Hang);
    let mut gateway = one_worker(&format!("drain_timeout = \"200ms\"\n{}", config(&api.url(), &silent.url(), "", "")));
    assert_eq!(gateway.get("/").status, 200);
    eventually("the mirror holds the copy", || silent.running() == 1);
    gateway.terminate();
    assert!(gateway.wait().success());
    assert!(gateway.log().contains("drain_timeout expired; dropping copies of mirrored requests"), "{}", gateway.log());
}

#[test]
fn request_of_an_http2_client_is_copied() {
    let (api, next) = (Upstream::start(), Upstream::start());
    let gateway = Gateway::start(&config(&api.url(), &next.url(), "", ""));
    // The client is a second gateway, which sends HTTP/2.
    let before = Gateway::start(&format!(
        "[upstream.u]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\n\
         [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        gateway.address
    ));
    let headers = [("Host", "shop.test"), ("Cookie", "a=1")];
    assert_eq!(before.client().request("POST", "/a?b=c", &headers, b"hello").status, 200);
    eventually("the copy arrives", || next.count() == 1);
    let (forwarded, copy) = (api.last(), next.last());
    assert_eq!(head_without(&copy, &["x-sluicegate-mirror"]), head_without(&forwarded, &[]));
    assert_eq!((&copy.body[..], &copy.headers("host")[..]), (&b"hello"[..], &["shop.test"][..]));
}

#[test]
fn reload_leaves_copies_in_flight() {
    let (api, next) = (Upstream::start(), Server::start());
    next.set(Behaviour::Hang);
    let text = config(&api.url(), &next.url(), "", "").replace("[admin]\naddress = \"127.0.0.1:0\"\n", "");
    let gateway = Gateway::start(&reload::with_admin(&text));
    assert_eq!(gateway.get("/").status, 200);
    eventually("the mirror holds the copy", || next.running() == 1);
    let without = text.lines().filter(|line| !line.starts_with("mirror = ")).collect::<Vec<_>>().join("\n");
    reload::reloads(&gateway, &without);
    assert_eq!(gateway.get("/").status, 200);
    next.set(Behaviour::Respond(200));
    let responded = "mirrored_requests_total{route=\"all\",result=\"responded\"}";
    eventually("the copy is done", || reload::metric(&gateway, responded) == 1.0);
    assert_eq!(next.count(), 1, "no copy with the new configuration");
}
