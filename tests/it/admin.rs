//! The admin listener: health, readiness, metrics and access control.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use crate::support::admin_listener::{HERE, ask, metric, with_admin};
use crate::support::client::Client;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::Redis;
use crate::support::reload;
use crate::support::server::{Behaviour, Server};
use crate::support::upstream::{Upstream, read_request, serve};
use crate::support::{MAX_WAIT, eventually};

const HELLO: &str = "[[route]]\nname = \"hello\"\npath = \"/hello\"\nrespond = { status = 200, body = \"hi\" }\n";

#[test]
fn metrics_count_requests_and_decisions() {
    let upstream = Upstream::responding(|seen| {
        let status = if seen.target() == "/up/bad" { "500 Oops" } else { "204 No Content" };
        format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").into_bytes()
    });
    let gateway = Gateway::start(&with_admin(&format!(
        "{HELLO}limits = [\"three\", \"shadow\"]\n\
         [limit.three]\nby = \"header:x-id\"\nquota = \"3/day\"\nalgorithm = \"fixed-window\"\n\
         [limit.shadow]\nby = \"global\"\nquota = \"1/day\"\nalgorithm = \"fixed-window\"\nshadow = true\n\
         [upstream.api]\nservers = [\"{}\"]\n[upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n\
         [[route]]\nname = \"up\"\npath = \"/up/{{*rest}}\"\nupstream = \"api\"\n\
         [[route]]\nname = \"gone\"\npath = \"/gone\"\nupstream = \"gone\"\n",
        upstream.url()
    )));
    let mut client = gateway.client();
    let statuses: Vec<_> = (0..5).map(|_| client.get_with("/hello", &[("x-id", "alice")]).status).collect();
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    assert_eq!(client.get("/nowhere").status, 404);
    assert_eq!([client.get("/up/good").status, client.get("/up/bad").status], [204, 500]);
    assert_eq!(gateway.get("/gone").status, 502);
    for (line, expected) in [
        ("http_requests_total{route=\"hello\",status=\"2xx\"}", 3.0),
        ("http_requests_total{route=\"hello\",status=\"4xx\"}", 2.0),
        ("http_requests_total{route=\"\",status=\"4xx\"}", 1.0),
        ("http_requests_total{route=\"up\",status=\"2xx\"}", 1.0),
        ("http_requests_total{route=\"up\",status=\"5xx\"}", 1.0),
        ("http_request_duration_seconds_count{route=\"hello\"}", 5.0),
        ("limit_decisions_total{limit=\"three\",decision=\"allowed\"}", 3.0),
        ("limit_decisions_total{limit=\"three\",decision=\"denied\"}", 2.0),
        ("limit_decisions_total{limit=\"shadow\",decision=\"allowed\"}", 1.0),
        ("limit_decisions_total{limit=\"shadow\",decision=\"shadow_denied\"}", 4.0),
        ("decision_duration_seconds_count", 5.0),
        ("upstream_requests_total{upstream=\"api\",status=\"2xx\"}", 1.0),
        ("upstream_requests_total{upstream=\"api\",status=\"5xx\"}", 1.0),
        ("upstream_requests_total{upstream=\"gone\",status=\"none\"}", 1.0),
        ("upstream_response_duration_seconds_bucket{le=\"+Inf\",upstream=\"api\"}", 2.0),
        ("connections", 1.0),
        ("connections_accepted_total", 2.0),
        ("connections_rejected_total", 0.0),
        ("access_log_dropped_total", 0.0),
        ("trace_spans_dropped_total", 0.0),
        ("store_up", 1.0),
    ] {
        assert_eq!(metric(&gateway, &format!("sluicegate_{line}")), expected, "{line}");
    }
    let page = ask(&gateway, "/metrics");
    assert!(!page.text().contains("alice"), "the metrics contain an identity: {}", page.text());
}

#[test]
fn responses_are_counted_by_status() {
    let (seen, requests) = mpsc::channel();
    let seen = Mutex::new(seen);
    let upstream = serve(move |mut stream| {
        while read_request(&mut stream).is_some() {
            seen.lock().unwrap().send(()).unwrap();
        }
    });
    let gateway = Gateway::start(&with_admin(&format!(
        "{HELLO}limits = [\"one\"]\n[limit.one]\nby = \"global\"\nquota = \"1/day\"\n\
         [upstream.api]\nservers = [\"http://{upstream}\"]\n[upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n\
         [[route]]\nname = \"up\"\npath = \"/up\"\nupstream = \"api\"\nmax_body = \"1KiB\"\n\
         [[route]]\nname = \"gone\"\npath = \"/gone\"\nupstream = \"gone\"\n"
    )));
    assert_eq!([gateway.get("/hello").status, gateway.get("/hello").status], [200, 429]);
    assert_eq!([gateway.get("/nowhere").status, gateway.get("/gone").status], [404, 502]);
    assert_eq!(gateway.client().request("POST", "/up", &[], &[b'x'; 2000]).status, 413);
    let many = "x".repeat(40 << 10);
    assert_eq!(gateway.client().get_with("/hello", &[("x-many", &many)]).status, 431);
    let mut malformed = gateway.client();
    malformed.send(b"GET /hello HTTP/1.1\r\nno colon\r\n\r\n");
    assert_eq!(malformed.reply().unwrap().status, 400);
    let mut aborted = gateway.client();
    aborted.send(b"GET /up HTTP/1.1\r\nhost: a\r\n\r\n");
    requests.recv().unwrap();
    drop(aborted);
    for (route, status) in
        [("hello", "429"), ("", "404"), ("gone", "502"), ("up", "413"), ("", "431"), ("", "400"), ("up", "499")]
    {
        let line = format!("sluicegate_http_responses_total{{route=\"{route}\",status=\"{status}\"}}");
        eventually(&line, || metric(&gateway, &line) == 1.0);
    }
    let page = ask(&gateway, "/metrics");
    let samples = page.text().lines().filter(|line| line.starts_with("sluicegate_http_responses_total{"));
    let sum: u64 = samples.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum();
    assert_eq!(sum, 7, "{}", page.text());
}

#[test]
fn bytes_from_and_to_clients_are_counted() {
    let gateway = Gateway::start(&with_admin(HELLO));
    let mut client = gateway.client();
    let request = b"GET /hello HTTP/1.1\r\nHost: a\r\n\r\n";
    client.send(request);
    let reply = client.head().unwrap();
    let headers: usize = reply.headers.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
    let response = "HTTP/1.1 200 OK\r\n".len() + headers + "\r\nhi".len();
    let received = || metric(&gateway, "sluicegate_received_bytes_total");
    let sent = || metric(&gateway, "sluicegate_sent_bytes_total");
    // The client may have read the response before the gateway counts its bytes.
    eventually("the bytes are counted", || [received(), sent()] == [request.len() as f64, response as f64]);
}

#[test]
fn process_metrics_have_the_names_of_client_libraries() {
    let gateway = Gateway::start(&with_admin(HELLO));
    let page = ask(&gateway, "/metrics");
    let manual = std::fs::read_to_string(format!("{}/docs/reference/metrics.md", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let mut count = 0;
    for (name, kind) in page.text().lines().filter_map(|line| line.strip_prefix("# TYPE process_")?.split_once(' ')) {
        count += 1;
        assert!(manual.contains(&format!("| `process_{name}` | {kind} |")), "process_{name} is not documented");
    }
    assert_eq!(count, 6);
    let resident = metric(&gateway, "process_resident_memory_bytes");
    let (least, most) = (gateway.memory() as f64 / 2.0, gateway.memory() as f64 * 2.0);
    assert!((least..most).contains(&resident), "{resident}");
    let files = std::fs::read_dir(format!("/proc/{}/fd", gateway.child.id())).unwrap().count() as f64;
    let open = metric(&gateway, "process_open_fds");
    assert!((open - files).abs() <= 3.0, "{open} descriptors, {files} in /proc");
    eventually("CPU time", || {
        gateway.get("/hello");
        metric(&gateway, "process_cpu_seconds_total") > 0.0
    });
    let started = metric(&gateway, "process_start_time_seconds");
    assert_eq!(started, metric(&gateway, "sluicegate_start_time_seconds"));
}

#[test]
fn revision_identifies_the_content_of_the_configuration() {
    let revision = |gateway: &Gateway| {
        let page = ask(gateway, "/metrics");
        let line = page.text().lines().find(|line| line.starts_with("sluicegate_config_info")).unwrap().to_owned();
        let digits = line.split('"').nth(1).unwrap().to_owned();
        assert!(digits.len() == 8 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()), "{line}");
        digits
    };
    let first = Gateway::start(&with_admin(HELLO));
    let second = Gateway::start(&with_admin(HELLO));
    assert_eq!(revision(&first), revision(&second));
    // The hash has a key, because readers of the metrics could otherwise test guesses of secrets in the files.
    let with_secret = |secret: &str| {
        Gateway::start_by(&with_admin(&format!("{HELLO}[store]\nsecret = \"${{S}}\"\n")), |config| {
            let mut command = binary();
            command.arg("--config").arg(config).env("S", secret.repeat(32));
            command
        })
    };
    assert_eq!(revision(&with_secret("a")), revision(&with_secret("a")));
    assert_ne!(revision(&with_secret("a")), revision(&with_secret("b")));
    second.put(&with_admin(&HELLO.replace("hi", "ho")));
    eventually("the revision changes", || revision(&second) != revision(&first));
}

#[test]
fn routes_without_series_of_their_own_are_counted_together() {
    let route =
        |name: &str| format!("[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nrespond = {{ status = 200 }}\n");
    let routes: String = ["a", "b", "c"].map(route).concat();
    let config = |selected: &str| with_admin(&format!("[metrics]\nroutes = {selected}\n{routes}"));
    let gateway = Gateway::start(&config("[\"a\"]"));
    for path in ["/a", "/b", "/b", "/c", "/nowhere"] {
        gateway.get(path);
    }
    let labels = || {
        let page = ask(&gateway, "/metrics");
        let counts =
            page.text().lines().filter_map(|line| line.strip_prefix("sluicegate_http_requests_total{route=\""));
        let counts =
            counts.map(|line| (line.split('"').next().unwrap(), line.rsplit(' ').next().unwrap().parse().unwrap()));
        let mut sums = BTreeMap::<String, u64>::new();
        counts.for_each(|(route, count): (_, u64)| *sums.entry(route.to_owned()).or_default() += count);
        sums
    };
    let expected = |counts: &[(&str, u64)]| counts.iter().map(|(route, count)| ((*route).to_owned(), *count)).collect();
    assert_eq!(labels(), expected(&[("", 1), ("a", 1), ("other", 3)]));
    // A histogram of several routes is the sum of theirs.
    assert_eq!(metric(&gateway, "sluicegate_http_request_duration_seconds_count{route=\"other\"}"), 3.0);
    for (selected, counts) in
        [("\"none\"", &[("", 1), ("other", 4)][..]), ("\"all\"", &[("", 1), ("a", 1), ("b", 2), ("c", 1)])]
    {
        gateway.put(&config(selected));
        eventually(selected, || labels() == expected(counts));
    }
}

#[test]
fn size_of_the_metrics_need_not_depend_on_the_number_of_routes() {
    let route = |number: usize| {
        format!("[[route]]\nname = \"route-{number}\"\npath = \"/{number}\"\nrespond = {{ status = 200 }}\n")
    };
    let routes: String = (0..5000).map(route).collect();
    let size = |selected: &str| {
        let gateway = Gateway::start(&with_admin(&format!("[metrics]\nroutes = \"{selected}\"\n{routes}")));
        assert_eq!(gateway.get("/4999").status, 200);
        ask(&gateway, "/metrics").body.len()
    };
    let (all, none) = (size("all"), size("none"));
    assert!(all > 5_000_000 && none < 200_000, "{all} and {none} bytes");
}

#[test]
fn series_of_removed_routes_stay_until_they_are_more_than_a_thousand() {
    let config = |version: usize| {
        let route = |number: usize| {
            let name = format!("v{version}-{number}");
            format!("[[route]]\nname = \"{name}\"\npath = \"/{number}\"\nrespond = {{ status = 200 }}\n")
        };
        (0..600).map(route).collect::<String>()
    };
    let gateway = Gateway::start(&reload::with_admin(&config(0)));
    // A scrape holds the metrics that it writes, so there must be none during a reload.
    let versions = || {
        let page = reload::ask(&gateway, "GET", "/metrics");
        (0..4).filter(|version| page.text().contains(&format!("route=\"v{version}-0\""))).collect::<Vec<_>>()
    };
    for (version, expected) in [(1, &[0, 1][..]), (2, &[2]), (3, &[2, 3])] {
        let reply = reload::reload(&gateway, &config(version));
        assert_eq!((reply.status, versions()), (200, expected.to_vec()), "{}", reply.text());
    }
}

#[test]
fn number_of_series_depends_only_on_the_configuration() {
    let [server, dead] = &Server::start_many();
    dead.stop();
    let upstream = format!("[upstream.u]\nservers = [\"{}\", \"{}\"]\n", server.url(), dead.url());
    let limit = "[limit.l]\nby = \"ip\"\nquota = \"1/day\"\n";
    let route = "[[route]]\nname = \"r\"\npath = \"/r/{*x}\"\nupstream = \"u\"\nmax_body = \"1KiB\"\n\
                 [[route]]\nname = \"s\"\npath = \"/s\"\nlimits = [\"l\"]\nrespond = { status = 200 }\n";
    let gateway = Gateway::start(&with_admin(&format!("{limit}{upstream}{route}")));
    let count = |label: &str| ask(&gateway, "/metrics").text().lines().filter(|line| line.contains(label)).count();
    let (by_route, by_upstream) = ("route=\"r\"", "upstream=\"u\"");
    for number in 0..20 {
        assert_eq!(gateway.get(&format!("/r/{number}?{number}")).status, 200);
    }
    let before = (count(by_route), count(by_upstream));
    // docs/reference/metrics.md states these numbers. The upstream has two servers.
    assert_eq!(before, (40, 54 + 2 * 2));
    for number in 0..5 {
        let headers = [("authorization", &*format!("Bearer {number}"))];
        assert_eq!(gateway.client().request("POST", &format!("/r/{number}"), &headers, &[b'x'; 2000]).status, 413);
    }
    assert_eq!((count(by_route), count(by_upstream)), (before.0 + 1, before.1));
    assert!(count("route=\"s\"") == 40, "a route has no series of outcomes before the first one");
    assert_eq!((gateway.get("/s").status, gateway.get("/s").status), (200, 429));
    assert_eq!(count("route=\"s\""), 41);
}

#[test]
fn connections_to_upstreams_are_counted_by_result() {
    let server = Server::start();
    // Accepts connections, but does not answer the TLS handshake.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    // Responds without TLS.
    let plain = serve(|mut stream| drop(stream.write_all(b"HTTP/1.1 400 X\r\nContent-Length: 0\r\n\r\n")));
    let upstream = |name: &str, url: &str| {
        format!(
            "[upstream.{name}]\nservers = [\"{url}\"]\nconnect_timeout = \"200ms\"\n\
             [[route]]\nname = \"{name}\"\npath = \"/{name}\"\nupstream = \"{name}\"\n"
        )
    };
    let config = [
        "[server]\nworkers = 1\n".to_owned(),
        upstream("plain", &server.url()),
        upstream("refused", "http://127.0.0.1:1"),
        upstream("tls", &format!("https://{plain}")),
        upstream("silent", &format!("https://{}", silent.local_addr().unwrap())),
        upstream("named", &format!("http://localhost:{}", server.url().rsplit(':').next().unwrap())),
        upstream("unknown", "http://host.name.that.does.not.exist.invalid"),
    ];
    let gateway = Gateway::start(&with_admin(&config.concat()));
    let mut client = gateway.client();
    for (path, status) in
        [("/plain", 200), ("/plain", 200), ("/plain", 200), ("/refused", 502), ("/tls", 502), ("/silent", 502)]
    {
        assert_eq!(client.get(path).status, status, "{path}");
    }
    let connects = || {
        let all = labelled(ask(&gateway, "/metrics").text(), &["upstream_connects_total"]);
        all.into_iter().filter(|(_, count)| *count > 0).collect::<BTreeMap<_, _>>()
    };
    let expected = BTreeMap::from(
        [("plain", "ok"), ("refused", "failed"), ("silent", "abandoned"), ("tls", "tls")]
            .map(|(name, result)| (format!("upstream_connects_total{{upstream=\"{name}\",result=\"{result}\"}}"), 1)),
    );
    assert_eq!(connects(), expected);
    let open = || metric(&gateway, "sluicegate_upstream_connections{upstream=\"plain\"}");
    assert_eq!(open(), 1.0);
    server.stop();
    eventually("the connection is closed", || open() == 0.0);
    let lookups = |name: &str| {
        ["ok", "error"].map(|result| {
            let series = format!("sluicegate_upstream_dns_lookups_total{{upstream=\"{name}\",result=\"{result}\"}}");
            metric(&gateway, &series)
        })
    };
    eventually("the lookup fails", || lookups("unknown")[1] > 0.0);
    assert_eq!((lookups("unknown")[0], lookups("plain")), (0.0, [0.0, 0.0]));
    assert!(lookups("named")[0] > 0.0 && lookups("named")[1] == 0.0, "{:?}", lookups("named"));
    // A reload keeps the counters.
    gateway.put(&with_admin(&config.concat().replace("200ms", "300ms")));
    eventually("the reload", || metric(&gateway, "sluicegate_config_reloads_total{result=\"ok\"}") == 1.0);
    assert_eq!(connects(), expected);
}

#[test]
fn metrics_are_served_in_both_text_formats() {
    let gateway = Gateway::start(&with_admin(HELLO));
    let ask = |accept| Client::connect(gateway.admin()).get_with("/metrics", &[HERE, ("accept", accept)]);
    let (classic, open) = (ask("*/*"), ask("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
    assert_eq!(classic.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert!(classic.text().contains("# TYPE sluicegate_http_requests_total counter\n"), "{}", classic.text());
    assert_eq!(open.header("content-type"), Some("application/openmetrics-text; version=1.0.0; charset=utf-8"));
    assert!(open.text().contains("# TYPE sluicegate_http_requests counter\n"), "{}", open.text());
    assert!(open.text().ends_with("# EOF\n"));
}

#[test]
fn failing_store_and_fallback_decisions_are_visible() {
    let redis = Redis::start();
    let limits = "[limit.share]\nby = \"ip\"\nquota = \"2/day\"\nalgorithm = \"fixed-window\"\n\
                  [limit.open]\nby = \"ip\"\nquota = \"2/day\"\non_store_error = \"allow\"\n";
    let gateway =
        Gateway::start(&with_admin(&format!("{}{limits}{HELLO}limits = [\"share\", \"open\"]\n", redis.store())));
    assert_eq!(gateway.get("/hello").status, 200);
    assert_eq!(ask(&gateway, "/readyz").json()["status"], "ready");
    assert_eq!(metric(&gateway, "sluicegate_checks_total{answered_by=\"store\"}"), 1.0);
    assert_eq!(metric(&gateway, "sluicegate_store_round_trip_duration_seconds_count"), 1.0);
    assert_eq!(metric(&gateway, "sluicegate_store_calls_total"), 1.0);
    assert_eq!(metric(&gateway, "sluicegate_store_circuit_breaker_openings_total"), 0.0);
    drop(redis);
    eventually("the breaker opens", || {
        gateway.get("/hello");
        metric(&gateway, "sluicegate_store_up") == 0.0
    });
    assert_eq!(metric(&gateway, "sluicegate_store_circuit_breakers_open"), 1.0);
    assert_eq!(metric(&gateway, "sluicegate_store_circuit_breaker_openings_total"), 1.0);
    let ready = ask(&gateway, "/readyz");
    assert_eq!((ready.status, ready.json()["status"].as_str()), (200, Some("degraded")), "{}", ready.text());
    assert!(ready.json()["store"]["failing"][0].as_str().unwrap().starts_with("redis at"), "{}", ready.text());
    assert!(metric(&gateway, "sluicegate_store_failures_total{kind=\"failed\"}") > 0.0);
    eventually("the local share is used up", || gateway.get("/hello").status == 429);
    let all = || labelled(ask(&gateway, "/metrics").text(), &["limit_decisions_total"]);
    let mut new_client = Client::connect_from([127, 0, 0, 5].into(), gateway.address);
    for (what, status, share) in
        [("a new client", 200, "local_allowed"), ("a client over its share", 429, "local_denied")]
    {
        let before = all();
        let found = if status == 200 { new_client.get("/hello").status } else { gateway.get("/hello").status };
        assert_eq!(found, status, "{what}");
        let mut expected = before;
        for (limit, decision) in [("share", share), ("open", "store_error")] {
            *expected
                .entry(format!("limit_decisions_total{{limit=\"{limit}\",decision=\"{decision}\"}}"))
                .or_default() += 1;
        }
        assert_eq!(all(), expected, "{what}");
    }
}

#[test]
fn metrics_show_the_state_of_each_endpoint() {
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let upstream = Upstream::responding(move |seen| {
        if seen.target() == "/up" {
            held.lock().unwrap().recv().ok();
        }
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec()
    });
    let server = upstream.url().trim_start_matches("http://").to_owned();
    let gateway = Gateway::start(&with_admin(&format!(
        "[upstream.api]\nservers = [\"http://{server}\", \"http://127.0.0.1:1\"]\n\
         health_check = {{ path = \"/healthz\", interval = \"50ms\", unhealthy_threshold = 1 }}\n\
         [[route]]\nname = \"up\"\npath = \"/up\"\nupstream = \"api\"\n"
    )));
    let of = |name: &str, server: &str| {
        metric(&gateway, &format!("sluicegate_upstream_server_{name}{{upstream=\"api\",server=\"{server}\"}}"))
    };
    eventually("a server is abandoned", || of("up", "127.0.0.1:1") == 0.0);
    assert_eq!((of("up", &server), of("requests_in_flight", &server)), (1.0, 0.0));
    let mut client = gateway.client();
    client.send(b"GET /up HTTP/1.1\r\nhost: a\r\n\r\n");
    eventually("a request is in flight", || of("requests_in_flight", &server) == 1.0);
    let ready = ask(&gateway, "/readyz").json();
    let state = |place: usize| ready["upstreams"]["api"][place]["state"].as_str().unwrap().to_owned();
    assert_eq!(
        (state(0), state(1), &ready["status"]),
        ("healthy".to_owned(), "unhealthy".to_owned(), &"ready".into()),
        "{ready}"
    );
    release.send(()).unwrap();
    assert_eq!(client.reply().unwrap().status, 200);
    eventually("the request has ended", || of("requests_in_flight", &server) == 0.0);
}

#[test]
fn servers_that_were_never_reached_are_told_apart_from_healthy_and_unreachable_ones() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&with_admin(&format!(
        "[upstream.api]\nservers = [\"http://{}\", \"http://127.0.0.1:1\", {{ url = \"http://127.0.0.1:2\", weight = 0 }}]\n\
         balance = \"round-robin\"\n[[route]]\nname = \"up\"\npath = \"/up\"\nupstream = \"api\"\n",
        upstream.address
    )));
    let states = || {
        let ready = ask(&gateway, "/readyz").json();
        let servers = ready["upstreams"]["api"].as_array().unwrap().clone();
        servers.iter().map(|server| server["state"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let count =
        |state: &str| metric(&gateway, &format!("sluicegate_upstream_servers{{upstream=\"api\",state=\"{state}\"}}"));
    assert_eq!(states(), ["not checked"; 3]);
    assert_eq!((count("not checked"), count("healthy")), (3.0, 0.0));
    let mut client = gateway.client();
    eventually("both servers were tried", || {
        assert_eq!(client.get("/up").status, 200);
        states() == ["healthy", "unreachable", "not checked"]
    });
    for (state, expected) in [("healthy", 1.0), ("unreachable", 1.0), ("not checked", 1.0), ("ejected", 0.0)] {
        assert_eq!(count(state), expected, "{state}");
    }
}

#[test]
fn configured_token_is_required() {
    let gateway = Gateway::start(&with_admin(&format!("token = \"sesame\"\n{HELLO}")));
    let ask = |token: &str| Client::connect(gateway.admin()).get_with("/metrics", &[("authorization", token)]);
    for wrong in ["", "sesame", "Bearer sesam", "Bearer sesame ", "Bearer sesame2", "Basic sesame"] {
        let reply = ask(wrong);
        let expected = if wrong == "Bearer sesame " { 200 } else { 401 }; // trailing spaces are not part of the value
        assert_eq!(reply.status, expected, "{wrong:?}");
        assert!(!reply.text().contains("sesame"), "{}", reply.text());
    }
    assert_eq!(ask("bearer sesame").status, 200);
    assert!(!gateway.log().contains("sesame"), "{}", gateway.log());
}

#[test]
fn without_a_token_only_local_hosts_are_served() {
    let gateway = Gateway::start(&with_admin(HELLO));
    let port = gateway.admin().port();
    let ask = |path: &str, host: &str| Client::connect(gateway.admin()).get_with(path, &[("host", host)]).status;
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1", "127.9.9.9:80", "[::1]", &format!("[::1]:{port}")] {
        assert_eq!(ask("/metrics", host), 200, "{host}");
    }
    for host in [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "192.0.2.1",
        "[::2]",
        "",
        "local host",
        "[::1].evil",
        "[::1].evil.example:80",
        "[127.0.0.1]",
        "[[::1]]",
        "::1",
        "]127.0.0.1[",
        "[::1",
        "evil.example@localhost",
        "localhost@evil.example",
        "localhost:80@evil.example",
        "localhost:evil",
        "localhost:80:80",
        "localhost/",
        "localhost:99999",
    ] {
        for path in ["/metrics", "/readyz", "/api/top", "/"] {
            assert_eq!(ask(path, host), 403, "{host} {path}");
        }
        assert_eq!(ask("/healthz", host), 200, "{host}");
    }
    let mut client = Client::connect(gateway.admin());
    client.send(b"GET http://evil.example/metrics HTTP/1.1\r\nhost: localhost\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 403);
    // With a token, the Host header does not matter, because a malicious web page does not know the token.
    let gateway = Gateway::start(&with_admin(&format!("token = \"sesame\"\n{HELLO}")));
    let known = [("host", "gateway.example"), ("authorization", "Bearer sesame")];
    assert_eq!(Client::connect(gateway.admin()).get_with("/metrics", &known).status, 200);
}

#[test]
fn open_paths_need_no_token_and_name_no_server() {
    let config = |open: &str| with_admin(&format!("token = \"sesame\"\nopen = {open}\n{HELLO}"));
    let gateway = Gateway::start(&config("[\"/healthz\", \"/readyz\"]"));
    assert_eq!(ask(&gateway, "/readyz").text(), "{\"status\":\"ready\"}\n");
    assert_eq!(ask(&gateway, "/healthz").text(), "ok\n");
    for path in ["/metrics", "/api/status", "/readyz/"] {
        assert_eq!(ask(&gateway, path).status, 401, "{path}");
    }
    let known = [HERE, ("authorization", "Bearer sesame")];
    let all = Client::connect(gateway.admin()).get_with("/readyz", &known);
    assert_eq!(all.json()["store"]["name"], "memory");
    let gateway = Gateway::start(&config("[\"/healthz\"]"));
    assert_eq!(ask(&gateway, "/healthz").status, 200);
    assert_eq!(ask(&gateway, "/readyz").status, 401);
}

#[test]
fn unknown_admin_paths_and_methods_are_rejected() {
    let gateway = Gateway::start(&with_admin(HELLO));
    assert_eq!(ask(&gateway, "/healthz").text(), "ok\n");
    assert_eq!(ask(&gateway, "/metric").status, 404);
    let reply = Client::connect(gateway.admin()).request("POST", "/metrics", &[HERE], b"");
    assert_eq!((reply.status, reply.header("allow")), (405, Some("GET, HEAD")));
    // Other listeners do not serve `/metrics`.
    assert_eq!(gateway.get("/metrics").status, 404);
}

/// The gateway's own bodies end in a newline, so that a terminal shows the next prompt on a new line. The body of
/// `respond` is sent as configured.
#[test]
fn bodies_of_own_responses_end_in_a_newline() {
    let limited = "[limit.one]\nby = \"ip\"\nquota = \"1/day\"\n\
                   [[route]]\nname = \"one\"\npath = \"/one\"\nlimits = [\"one\"]\nrespond = { status = 200 }\n\
                   [[route]]\nname = \"gone\"\npath = \"/gone\"\nupstream = \"gone\"\n\
                   [upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n";
    let gateway = Gateway::start(&with_admin(&format!("{HELLO}{limited}")));
    assert_eq!(gateway.get("/hello").text(), "hi");
    assert_eq!(gateway.get("/one").status, 200);
    let mut replies: Vec<_> = [("/nowhere", 404), ("/one", 429), ("/gone", 502), ("/%zz", 400)]
        .map(|(path, status)| (path, status, gateway.get(path)))
        .into();
    let admin = [
        ("/", 200),
        ("/healthz", 200),
        ("/readyz", 200),
        ("/metrics", 200),
        ("/nowhere", 404),
        ("/api/nowhere", 404),
        ("/api/top", 200),
        ("/api/top?limit=two", 400),
        ("/api/identities?limit=two&ip=192.0.2.1", 404),
    ];
    replies.extend(admin.map(|(path, status)| (path, status, ask(&gateway, path))));
    for (path, status, reply) in replies {
        assert_eq!(reply.status, status, "{path}: {}", reply.text());
        assert!(reply.text().ends_with('\n'), "{path}: {}", reply.text());
    }
}

#[test]
fn draining_gateway_is_not_ready() {
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let upstream = Upstream::responding(move |_| {
        held.lock().unwrap().recv().ok();
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec()
    });
    let mut gateway = Gateway::start(&with_admin(&format!(
        "[upstream.api]\nservers = [\"{}\"]\n[[route]]\nname = \"up\"\npath = \"/up\"\nupstream = \"api\"\n",
        upstream.url()
    )));
    let mut client = gateway.client();
    client.send(b"GET /up HTTP/1.1\r\nhost: a\r\n\r\n");
    eventually("it is in flight", || upstream.count() == 1);
    gateway.terminate();
    eventually("it is logged", || ask(&gateway, "/readyz").status == 503);
    assert_eq!(ask(&gateway, "/readyz").json()["status"], "stopping");
    assert_eq!(ask(&gateway, "/healthz").status, 200);
    release.send(()).unwrap();
    assert_eq!(client.reply().unwrap().status, 200);
    assert!(gateway.wait().success());
}

/// Send requests for metrics without reading the responses, until the socket buffers of both sides are full.
fn never_reads(stream: &mut TcpStream) {
    stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let requests = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(10_000);
    // The gateway may have closed this connection to make room for a new one.
    if let Err(error) = stream.write_all(&requests) {
        use ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, WouldBlock};
        assert!(matches!(error.kind(), WouldBlock | TimedOut | BrokenPipe | ConnectionReset), "{error}");
    }
}

#[test]
fn idle_admin_connections_are_closed_for_new_ones() {
    let here: IpAddr = "127.0.0.1".parse().unwrap();
    let others: Vec<IpAddr> = (2..6).map(|last| [127, 0, 0, last].into()).collect();
    type Attack = fn(&mut TcpStream);
    let attacks: &[(&str, &[IpAddr], usize, Attack)] = &[
        ("silent, one peer", &[here], 200, |_| ()),
        ("silent, several peers", &others, 200, |_| ()),
        ("half a request", &[here], 200, |stream| stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: lo").unwrap()),
        ("answered and kept alive", &[here], 200, |stream| {
            stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        }),
        ("never read, one peer", &[here], 70, never_reads),
        ("never read, several peers", &others, 70, never_reads),
    ];
    for (what, peers, count, attack) in attacks {
        let gateway = Gateway::start(&with_admin(HELLO));
        let mut held = Vec::new();
        for index in 0..*count {
            let mut client = Client::connect_from(peers[index % peers.len()], gateway.admin());
            attack(client.stream.get_mut());
            held.push(client);
        }
        for path in ["/healthz", "/readyz", "/metrics"] {
            let reply = ask(&gateway, path);
            assert_eq!(reply.status, 200, "{what}: {path}: {}", reply.text());
        }
    }
}

#[test]
fn busy_admin_connections_leave_room_for_health_checks_and_other_peers() {
    let gateway = Gateway::start(&with_admin(&format!("token = \"sesame\"\n{HELLO}")));
    let known = [HERE, ("authorization", "Bearer sesame")];
    // The client never sends the request bodies, so each connection is busy until its timeout.
    let unfinished = b"POST /api/reset HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sesame\r\n\
                       content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n";
    let busy = || {
        let mut client = Client::connect(gateway.admin());
        client.send(unfinished);
        assert_eq!(client.head().unwrap().status, 100);
        client
    };
    let held: Vec<_> = (0..32).map(|_| busy()).collect();
    let mut late = Client::connect(gateway.admin());
    let reply = late.get_with("/metrics", &known);
    assert_eq!((reply.status, reply.header("connection")), (503, Some("close")), "{}", reply.text());
    assert_eq!(Client::connect(gateway.admin()).get_with("/healthz", &known).status, 200);
    let mut other = Client::connect_from([127, 0, 0, 2].into(), gateway.admin());
    assert_eq!(other.get_with("/metrics", &known).status, 200);
    drop(held);
    eventually("the queue has room again", || {
        Client::connect(gateway.admin()).get_with("/metrics", &known).status == 200
    });
}

#[test]
fn idle_admin_connection_is_closed_at_its_deadline() {
    let gateway = Gateway::start(&with_admin(HELLO));
    let mut silent = Client::connect(gateway.admin());
    let mut kept = Client::connect(gateway.admin());
    assert_eq!(kept.get_with("/healthz", &[HERE]).status, 200);
    let mut full = Client::connect(gateway.admin());
    never_reads(full.stream.get_mut());
    for (what, client) in [("silent", &mut silent), ("kept alive", &mut kept)] {
        client.stream.get_mut().set_read_timeout(Some(2 * MAX_WAIT)).unwrap();
        client.assert_closed(what);
    }
    eventually(
        "a client that never reads is closed",
        || matches!(full.stream.get_mut().write(b"GET"), Err(error) if error.kind() != ErrorKind::WouldBlock),
    );
}

/// Return all counters with labels whose value is not 0, for these metrics.
fn labelled(page: &str, names: &[&str]) -> BTreeMap<String, u64> {
    let lines = page.lines().filter_map(|line| line.strip_prefix("sluicegate_")?.rsplit_once(' '));
    let lines = lines.filter(|(series, _)| series.split_once('{').is_some_and(|(name, _)| names.contains(&name)));
    lines.map(|(series, value)| (series.to_owned(), value.parse().unwrap())).filter(|(_, value)| *value > 0).collect()
}

/// Each event has its own number of repetitions, so that a series with the count of another one is noticed.
#[test]
fn each_label_counts_its_own_events() {
    let ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    // Closes a connection after the second request, without a response to it.
    let stale = serve(move |mut stream| {
        if read_request(&mut stream).is_some() && stream.write_all(ok).is_ok() {
            read_request(&mut stream);
        }
    });
    let [resetting, live] = &Server::start_many();
    resetting.set(Behaviour::Reset);
    let statuses = Upstream::responding(|seen| {
        let status = seen.target().rsplit('/').next().unwrap();
        format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n").into_bytes()
    });
    let sso = Upstream::responding(|seen| match seen.headers("cookie")[..] {
        ["ok"] => b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_vec(),
        ["no"] => b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n".to_vec(),
        _ => b"invalid\r\n\r\n".to_vec(),
    });
    let limit = "by = \"global\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"";
    let route = |name: &str, rest: &str| format!("[[route]]\nname = \"{name}\"\npath = \"/{name}/{{*x}}\"\n{rest}\n");
    let upstream = |name: &str, servers: &str, rest: &str| {
        format!("[upstream.{name}]\nservers = [{servers}]\n{rest}\n") + &route(name, &format!("upstream = \"{name}\""))
    };
    let respond = "respond = { status = 200 }";
    let config = [
        "[server]\nworkers = 1\n".to_owned(),
        "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n".to_owned(),
        format!("[auth.sso]\nkind = \"forward\"\nurl = \"{}\"\ncache = {{ ttl = \"1h\" }}\n", sso.url()),
        format!("[limit.six]\n{limit}\nquota = \"6/24h\"\n[limit.trial]\n{limit}\nquota = \"2/24h\"\nshadow = true\n"),
        route("limited", &format!("limits = [\"six\", \"trial\"]\n{respond}")),
        route("keyed", &format!("require = [\"keys\"]\n{respond}")),
        route("closed", &format!("deny = [\"127.0.0.0/8\"]\n{respond}")),
        route("admitted", &format!("require = [\"sso\"]\n{respond}")),
        upstream("statuses", &format!("\"{}\"", statuses.url()), "") + "max_body = \"1KiB\"\n",
        upstream("stale", &format!("\"http://{stale}\""), ""),
        upstream("dead", "\"http://127.0.0.1:1\"", ""),
        upstream(
            "reset",
            &format!("\"{}\", \"{}\"", resetting.url(), live.url()),
            "balance = \"round-robin\"\nretries = 1",
        ),
        upstream("unsent", &format!("\"http://127.0.0.1:1\", \"{}\"", live.url()), "balance = \"round-robin\""),
    ]
    .concat();
    let consumers = format!("[[consumer]]\nname = \"a\"\nkeys = [\"sha256:{}\"]\n", "0".repeat(64));
    let gateway = Gateway::start_with(&reload::with_admin(&config), &[("consumers.toml", &consumers)]);
    let mut client = gateway.client();
    let mut ask = |path: &str, headers: &[(&str, &str)], times: usize| -> Vec<u16> {
        (0..times).map(|_| client.get_with(path, headers).status).collect()
    };
    assert_eq!(ask("/limited/x", &[], 10), [vec![200; 6], vec![429; 4]].concat());
    assert_eq!(ask("/keyed/x", &[], 3), [401; 3]);
    assert_eq!(ask("/closed/x", &[], 2), [403; 2]);
    assert_eq!(ask("/nowhere", &[], 5), [404; 5]);
    for (status, times) in [(200, 1), (302, 2), (404, 3), (500, 4)] {
        assert_eq!(ask(&format!("/statuses/{status}"), &[], times), vec![status; times]);
    }
    assert_eq!(ask("/stale/x", &[], 4), [200; 4]);
    assert_eq!(ask("/dead/x", &[], 2), [502; 2]);
    assert_eq!(ask("/reset/x", &[], 6), [200; 6]);
    assert_eq!(ask("/unsent/x", &[], 6), [200; 6]);
    assert_eq!(ask("/admitted/x", &[("cookie", "ok")], 4), [200; 4]);
    assert_eq!(ask("/admitted/x", &[("cookie", "no")], 2), [403; 2]);
    let failed = ask("/admitted/x", &[("cookie", "invalid")], 5);
    assert_eq!(failed, [503; 5]);
    for _ in 0..7 {
        assert_eq!(gateway.client().request("POST", "/statuses/200", &[], &[b'x'; 2000]).status, 413);
    }
    for _ in 0..6 {
        let mut malformed = gateway.client();
        malformed.send(b"GET / HTTP/1.1\r\nno colon\r\n\r\n");
        assert_eq!(malformed.reply().unwrap().status, 400);
    }
    for _ in 0..8 {
        assert_eq!(gateway.client().get_with("/", &[("x-many", &"x".repeat(40 << 10))]).status, 431);
    }
    live.set(Behaviour::Hang);
    for number in 1..=9 {
        let mut aborted = gateway.client();
        let before = live.running();
        aborted.send(b"GET /unsent/x HTTP/1.1\r\nHost: a\r\n\r\n");
        eventually("the request is in flight", || live.running() > before);
        drop(aborted);
        let line = "http_responses_total{route=\"unsent\",status=\"499\"}";
        eventually("it is counted", || reload::metric(&gateway, line) == f64::from(number));
    }
    reload::reloads(&gateway, &format!("{config}{}", route("more", respond)));
    for _ in 0..2 {
        assert_eq!(reload::reload(&gateway, &config.replace("respond", "respnd")).status, 422);
    }

    let page = reload::ask(&gateway, "GET", "/metrics");
    let names = [
        "http_requests_total",
        "http_responses_total",
        "http_request_outcomes_total",
        "limit_decisions_total",
        "upstream_requests_total",
        "upstream_retries_total",
        "upstream_failures_total",
        "forward_auth_requests_total",
        "config_reloads_total",
    ];
    let found = labelled(page.text(), &names);
    // The server that refuses connections is skipped for a second after each failure, so the number of failures depends
    // on the time.
    let unsent = found.get("upstream_retries_total{upstream=\"unsent\",reason=\"not_sent\"}").copied().unwrap_or(0);
    assert!((1..=15).contains(&unsent), "{unsent}");
    let mut expected = BTreeMap::new();
    let mut add = |name: &str, labels: &[(&str, &str)], value: u64| {
        let labels: Vec<_> = labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        expected.insert(format!("{name}{{{}}}", labels.join(",")), value);
    };
    for (route, status, value) in [
        ("limited", "2xx", 6),
        ("limited", "4xx", 4),
        ("keyed", "4xx", 3),
        ("closed", "4xx", 2),
        ("", "4xx", 5 + 6 + 8),
        ("statuses", "2xx", 1),
        ("statuses", "3xx", 2),
        ("statuses", "4xx", 3 + 7),
        ("statuses", "5xx", 4),
        ("stale", "2xx", 4),
        ("dead", "5xx", 2),
        ("reset", "2xx", 6),
        ("unsent", "2xx", 6),
        ("admitted", "2xx", 4),
        ("admitted", "4xx", 2),
        ("admitted", "5xx", 5),
    ] {
        add("http_requests_total", &[("route", route), ("status", status)], value);
    }
    for (route, status, value) in [
        ("limited", "429", 4),
        ("keyed", "401", 3),
        ("closed", "403", 2),
        ("", "404", 5),
        ("", "400", 6),
        ("", "431", 8),
        ("statuses", "404", 3),
        ("statuses", "413", 7),
        ("statuses", "500", 4),
        ("dead", "502", 2),
        ("unsent", "499", 9),
        ("admitted", "403", 2),
        ("admitted", "503", 5),
    ] {
        add("http_responses_total", &[("route", route), ("status", status)], value);
    }
    for (route, outcome, value) in [
        ("limited", "rate-limited", 4),
        ("keyed", "unauthenticated", 3),
        ("closed", "forbidden", 2),
        ("", "no-route", 5),
        ("statuses", "body-too-large", 7),
        ("dead", "upstream-connect-failure", 2),
        ("unsent", "client-aborted", 9),
        ("admitted", "forbidden", 2),
        ("admitted", "auth-unavailable", 5),
    ] {
        add("http_request_outcomes_total", &[("route", route), ("outcome", outcome)], value);
    }
    for (limit, decision, value) in
        [("six", "allowed", 6), ("six", "denied", 4), ("trial", "allowed", 2), ("trial", "shadow_denied", 8)]
    {
        add("limit_decisions_total", &[("limit", limit), ("decision", decision)], value);
    }
    for (upstream, status, value) in [
        ("statuses", "2xx", 1),
        ("statuses", "3xx", 2),
        ("statuses", "4xx", 3),
        ("statuses", "5xx", 4),
        ("stale", "2xx", 4),
        ("dead", "none", 2),
        ("reset", "2xx", 6),
        ("unsent", "2xx", 6),
        ("auth.sso", "2xx", 1),
        ("auth.sso", "4xx", 2),
        ("auth.sso", "none", 5),
    ] {
        add("upstream_requests_total", &[("upstream", upstream), ("status", status)], value);
    }
    for (upstream, reason, value) in
        [("stale", "stale_connection", 3), ("reset", "reset", resetting.count() as u64), ("unsent", "not_sent", unsent)]
    {
        add("upstream_retries_total", &[("upstream", upstream), ("reason", reason)], value);
    }
    for (upstream, reason, value) in [("dead", "connect", 2), ("auth.sso", "protocol", 5)] {
        add("upstream_failures_total", &[("upstream", upstream), ("reason", reason)], value);
    }
    for (result, value) in [("admitted", 1), ("cached", 3), ("denied", 2), ("error", 5)] {
        add("forward_auth_requests_total", &[("provider", "sso"), ("result", result)], value);
    }
    add("config_reloads_total", &[("result", "ok")], 1);
    add("config_reloads_total", &[("result", "error")], 2);
    assert_eq!(found, expected);
}
