//! `Proxy-Status` (RFC 9209) of the errors that the gateway generates.

use std::collections::BTreeSet;
use std::io::Write;

use crate::support::certificates::{Authority, NOW};
use crate::support::client::Reply;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::http2::{self, Answer};
use crate::support::pages;
use crate::support::reload::{reloads, with_admin};
use crate::support::tls_upstream::{TlsUpstream, server};
use crate::support::upstream::{Upstream, read_head, serve};
use http::Request;
use rustls::version::TLS13;

/// Return the rows of the table in the manual: each outcome with its error type.
fn documented() -> BTreeSet<(String, String)> {
    let page = pages::read("docs/reference/http.md");
    let section = page.split("\n### Proxy-Status\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let mut pairs = BTreeSet::new();
    for row in rows {
        let cells: Vec<_> = row.trim_matches(['|', ' ']).split(" | ").collect();
        let code = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
        for outcome in code(cells[1]) {
            pairs.insert((outcome, code(cells[0])[0].clone()));
        }
    }
    pairs
}

fn config(upstreams: &[(&str, String, &str)]) -> String {
    let mut text = String::from(
        "[log]\nformat = \"json\"\naccess = \"access.log\"\n[server]\nblock_unknown_hosts = true\nmax_uri = \"1KiB\"\n\
         body_idle_timeout = \"100ms\"\n[store]\nurl = \"redis://127.0.0.1:1\"\n\
         [client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n[auth.keys]\nkind = \"api-key\"\non_unknown = \"accept\"\n\
         [limit.store]\nby = \"global\"\nquota = \"1/s\"\non_store_error = \"deny\"\n\
         [limit.key]\nby = \"api-key\"\nquota = \"1/day\"\n[limit.header]\nby = \"header:x-tenant\"\nquota = \"1/s\"\n\
         [limit.once]\nby = \"global\"\nquota = \"1/day\"\n\
         [limit.cost]\nby = \"global\"\nquota = \"9/s\"\ncost = { request_header = \"x-cost\", max = 9 }\n",
    );
    let mut route = |name: &str, rest: &str| {
        text += &format!("[[route]]\nname = \"{name}\"\nhosts = [\"gateway.test\"]\npath = \"/{name}\"\n{rest}\n");
    };
    for (name, rest) in [
        ("store", "limits = [\"store\"]"),
        ("key", "identify = [\"keys\"]\nlimits = [\"key\"]"),
        ("header", "limits = [\"header\"]"),
        ("once", "limits = [\"once\"]"),
        ("cost", "limits = [\"cost\"]"),
        ("denied", "deny = [\"127.0.0.1\"]"),
        ("get", "methods = [\"GET\"]"),
        ("small", "max_body = \"1B\""),
    ] {
        route(name, &format!("{rest}\nrespond = {{ status = 200 }}"));
    }
    for (name, ..) in upstreams {
        let timeout = if *name == "slow" { "timeout = \"50ms\"" } else { "" };
        route(name, &format!("upstream = \"{name}\"\n{timeout}"));
    }
    for (name, url, rest) in upstreams {
        text += &format!("[upstream.{name}]\nservers = [\"{url}\"]\n{rest}\n");
    }
    text
}

#[test]
fn errors_have_the_type_of_the_manual() {
    let silent = serve(|mut stream| {
        read_head(&mut stream);
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let (received, arrivals) = std::sync::mpsc::channel();
    let full = serve(move |mut stream| {
        read_head(&mut stream);
        received.send(()).unwrap();
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let closing = serve(|mut stream| drop(read_head(&mut stream)));
    let invalid = Upstream::responding(|_| b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok".to_vec());
    let ca = Authority::new("ca");
    let tls = |name: &str| TlsUpstream::serve(server(&ca.server(&[name], NOW), None, &[], &[&TLS13]), |_| {});
    let untrusted = tls("127.0.0.1");
    let plain = Upstream::start();
    let own = Upstream::responding(|_| b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n".to_vec());
    let upstreams = [
        ("refused", "http://127.0.0.1:1".to_owned(), ""),
        ("silent", format!("http://{silent}"), "response_timeout = \"50ms\""),
        ("slow", format!("http://{silent}"), ""),
        ("full", format!("http://{full}"), "max_requests = 1"),
        ("closing", format!("http://{closing}"), ""),
        ("invalid", invalid.url(), ""),
        ("untrusted", format!("https://{}", untrusted.address), ""),
        ("plain", format!("https://{}", plain.address), ""),
        ("unresolved", "http://nowhere.invalid".to_owned(), ""),
        ("own", own.url(), ""),
    ];
    let gateway = Gateway::start(&config(&upstreams));
    let rows = documented();
    let record = |outcome: &str, status: u16, reply: &Reply| {
        assert_eq!(reply.status, status, "{outcome}: {reply:?}");
        let value = reply.header("proxy-status").unwrap_or_else(|| panic!("{outcome}: {reply:?}"));
        let error = value.strip_prefix("sluicegate;error=").unwrap_or_else(|| panic!("{outcome}: {value}"));
        assert!(rows.contains(&(outcome.to_owned(), error.to_owned())), "{outcome}: {error} is not in {rows:?}");
    };
    let get = |path: &str, headers: &[(&str, &str)]| gateway.client().get_with(path, headers);
    for (outcome, status, path, headers) in [
        ("forbidden", 403, "/denied", &[][..]),
        ("store-unavailable", 503, "/store", &[]),
        ("unauthenticated", 401, "/key", &[]),
        ("no-identity", 400, "/header", &[]),
        ("bad-cost", 400, "/cost", &[("x-cost", "much")]),
        ("no-route", 404, "/nowhere", &[]),
        ("unknown-host", 421, "/once", &[("host", "other.test")]),
        ("bad-path", 400, "/%00", &[]),
        ("bad-host", 400, "/once", &[("host", "a b")]),
        ("unsupported-transfer-coding", 501, "/once", &[("transfer-encoding", "gzip, chunked")]),
        ("upstream-connect-failure", 502, "/refused", &[]),
        ("upstream-connect-failure", 502, "/untrusted", &[]),
        ("upstream-connect-failure", 502, "/plain", &[]),
        ("no-healthy-upstream", 503, "/unresolved", &[]),
        ("upstream-reset", 502, "/closing", &[]),
        ("upstream-reset", 502, "/invalid", &[]),
        ("upstream-timeout", 504, "/silent", &[]),
        ("route-timeout", 504, "/slow", &[]),
    ] {
        record(outcome, status, &get(path, headers));
    }
    record("uri-too-long", 414, &get(&format!("/{}", "x".repeat(2000)), &[]));
    for (outcome, status, method, path) in [
        ("method-not-allowed", 405, "PUT", "/get"),
        ("unsupported-method", 501, "TRACE", "/get"),
        ("bad-method", 400, "get", "/get"),
    ] {
        record(outcome, status, &gateway.client().request(method, path, &[], b""));
    }
    record("body-too-large", 413, &gateway.client().request("POST", "/small", &[], b"two"));
    let mut client = gateway.client();
    client.send(b"POST /own HTTP/1.1\r\nHost: gateway.test\r\nContent-Length: 5\r\n\r\nab");
    record("client-timeout", 408, &client.reply().unwrap());
    let mut client = gateway.client();
    client.send(b"POST /own HTTP/1.1\r\nHost: gateway.test\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n");
    record("client-aborted", 400, &client.reply().unwrap());
    // A 502 that the upstream sends is not an error of the gateway.
    let reply = get("/own", &[]);
    assert_eq!((reply.status, reply.header("proxy-status")), (502, None));
    // The gateway's local share of the limit admits one request.
    eventually("the limit denies", || get("/once", &[]).status == 429);
    record("rate-limited", 429, &get("/once", &[]));
    // One request holds the only request permit of the server.
    let mut held = gateway.client();
    held.send(b"GET /full HTTP/1.1\r\nHost: gateway.test\r\n\r\n");
    arrivals.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
    record("upstream-overflow", 503, &get("/full", &[]));
    let many: Vec<_> = (0..101).map(|index| format!("x-{index}")).collect();
    let request = many.iter().fold(Request::get("http://gateway.test/once"), |request, name| request.header(name, "1"));
    let answers = http2::ask(gateway.address, [request.body(&b""[..]).unwrap()]);
    let Some(Answer::Response(status, headers, _)) = answers.into_iter().next() else { panic!("no response") };
    assert_eq!(status.as_u16(), 431);
    assert_eq!(headers["proxy-status"], "sluicegate;error=http_request_error");
    // The table has a row for every outcome of the access log, except for those that are not errors.
    let page = pages::read("docs/reference/access-log.md");
    let table = page.split("\n### Values of `outcome`\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let documented = table.lines().filter(|line| line.starts_with("| `"));
    let outcomes = documented.flat_map(|row| row.split(" | ").next().unwrap().split('`').skip(1).step_by(2));
    for outcome in outcomes.filter(|outcome| !["ok", "preflight"].contains(outcome)) {
        assert!(rows.iter().any(|(other, _)| other == outcome), "docs/reference/http.md: no row for {outcome}");
    }
}

#[test]
fn invalid_response_differs_from_a_closed_connection() {
    let upstream = |response: &'static [u8]| {
        let address = serve(move |mut stream| {
            read_head(&mut stream);
            let _ = stream.write_all(response);
        });
        format!("http://{address}")
    };
    let http1 = serve(|mut stream| {
        read_head(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        // Wait until the gateway closes the connection.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let upstreams = [
        ("closed", upstream(b""), ""),
        ("half", upstream(b"HTTP/1.1 200 OK\r\nX-Half: "), ""),
        ("status", upstream(b"HTTP/1.1 two hundred\r\n\r\n"), ""),
        ("noise", upstream(b"noise\r\n\r\n"), ""),
        ("lengths", upstream(b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok"), ""),
        ("http1", format!("http://{http1}"), "protocol = \"http2\""),
    ];
    let gateway = Gateway::start(&config(&upstreams));
    for (path, error) in [
        ("closed", "connection_terminated"),
        ("half", "connection_terminated"),
        ("status", "http_protocol_error"),
        ("noise", "http_protocol_error"),
        ("lengths", "http_protocol_error"),
        ("http1", "http_protocol_error"),
    ] {
        let reply = gateway.get(&format!("/{path}"));
        assert_eq!(reply.status, 502, "{path}");
        assert_eq!(reply.header("proxy-status"), Some(&*format!("sluicegate;error={error}")), "{path}");
    }
}

#[test]
fn header_can_be_switched_off() {
    let config = |value: &str| {
        format!("[server]\n{value}\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = {{ status = 200 }}\n")
    };
    let gateway = Gateway::start(&with_admin(&config("")));
    let header = || gateway.get("/nowhere").header("proxy-status").map(str::to_owned);
    assert_eq!(header().as_deref(), Some("sluicegate;error=destination_not_found"));
    assert_eq!(gateway.get("/").header("proxy-status"), None);
    reloads(&gateway, &config("proxy_status = false"));
    assert_eq!(header(), None);
}
