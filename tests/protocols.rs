//! Header rules of routes; what old and patient clients get: HTTP/1.0, server-sent events.

mod support;

use std::net::SocketAddr;

use support::client::Reply;
use support::gateway::Gateway;
use support::upstream::Upstream;

fn gateway(upstream: SocketAddr, route: &str) -> Gateway {
    Gateway::start(&format!(
        "[upstream.u]\nservers = [\"http://{upstream}\"]\n\
         [limit.l]\nby = \"ip\"\nquota = \"100/24h\"\ncost.response_header = \"x-used\"\n\
         [[route]]\nname = \"r\"\npath = \"/r/{{*rest}}\"\nupstream = \"u\"\nlimits = [\"l\"]\n{route}\n\
         [[route]]\nname = \"own\"\npath = \"/own\"\nrespond = {{ status = 200, body = \"own\" }}\n{route}\n"
    ))
}

fn all<'a>(reply: &'a Reply, name: &str) -> Vec<&'a str> {
    reply.headers.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str()).collect()
}

#[test]
fn the_upstream_gets_what_the_rules_leave() {
    let upstream = Upstream::start();
    let rules = "request_headers = { set = { X-Gateway = \"sluice gate\", authorization = \"Basic eDp5\" }, \
                 remove = [\"x-debug\", \"X-Api-Key\", \"x-real-ip\"] }";
    let gateway = gateway(upstream.address, rules);
    let sent = [
        ("X-Debug", "1"),
        ("X-Debug", "2"),
        ("x-api-key", "secret"),
        ("Authorization", "Bearer a"),
        ("authorization", "Bearer b"),
        ("x-gateway", "theirs"),
        ("accept", "*/*"),
        // What the rules set is not the client's to take away.
        ("Connection", "x-gateway, authorization"),
    ];
    assert_eq!(gateway.client().get_with("/r/1", &sent).status, 200);
    let seen = upstream.last();
    for (name, values) in [
        ("x-debug", &[][..]),
        ("x-api-key", &[]),
        ("authorization", &["Basic eDp5"]),
        ("x-gateway", &["sluice gate"]),
        ("accept", &["*/*"]),
        ("x-forwarded-for", &["127.0.0.1"]),
        ("host", &["gateway.test"]),
    ] {
        assert_eq!(seen.headers(name), values, "{name}: {}", seen.head);
    }
}

#[test]
fn the_client_gets_what_the_rules_leave() {
    let upstream = Upstream::answering(|_| {
        b"HTTP/1.1 200 OK\r\nServer: secret/1.0\r\nX-Powered-By: a\r\nX-Powered-By: b\r\nRateLimit: \"theirs\";r=1\r\n\
          X-Used: 7\r\nX-Kept: 1\r\nCache-Control: public\r\nContent-Length: 2\r\n\r\nok"
            .to_vec()
    });
    let rules = "response_headers = { set = { cache-control = \"no-store\", x-new = \"1\" }, \
                 remove = [\"server\", \"x-powered-by\", \"ratelimit\", \"retry-after\", \"x-used\"] }";
    let gateway = gateway(upstream.address, rules);
    let reply = gateway.get("/r/1");
    for (name, values) in [
        ("server", &[][..]),
        ("x-powered-by", &[]),
        ("x-used", &[]),
        ("x-kept", &["1"]),
        ("cache-control", &["no-store"]),
        ("x-new", &["1"]),
        ("content-length", &["2"]),
    ] {
        assert_eq!(all(&reply, name), values, "{name}: {reply:?}");
    }
    assert_eq!(all(&reply, "ratelimit").len(), 1, "ours is added after theirs is removed: {reply:?}");
    assert_eq!(reply.remaining("l"), 93, "what is removed was counted before");
    let own = gateway.get("/own");
    assert_eq!((own.text(), own.header("x-new")), ("own", Some("1")), "own answers follow the rules");
    // A hundred are used up; what the gateway refuses is its own.
    let refused = (0..30).map(|_| gateway.get("/r/1")).find(|reply| reply.status == 429).expect("a denial");
    assert_eq!((refused.header("x-new"), refused.header("cache-control")), (None, Some("no-store")));
    assert!(refused.header("retry-after").is_some() && refused.header("ratelimit").is_some(), "{refused:?}");
}
