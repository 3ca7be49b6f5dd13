//! Forged and ambiguous identities: a client cannot get a second bucket or the bucket of another client. These are the
//! faults 6 and 9 to 13 in docs/testing.md.

use std::collections::HashSet;
use std::net::IpAddr;

use crate::support::MAX_WAIT;
use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::upstream::Upstream;
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};

/// The address of the trusted proxy. Do not trust all of 127.0.0.0/8, because this network contains all clients of
/// these tests.
const PROXY: &str = "127.0.0.9";

/// Return a limit per hour. The window starts with the first request, so it does not end during the test.
fn limit(name: &str, quota: u64, rest: &str) -> String {
    format!(
        "[limit.{name}]\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"{quota}/hour\"\n{rest}\n"
    )
}

fn route(name: &str, path: &str, limits: &str) -> String {
    format!(
        "[[route]]\nname = \"{name}\"\npath = \"{path}\"\nlimits = [{limits}]\nrespond = {{ status = 200, body = \"{name}\" }}\n"
    )
}

fn trusting() -> String {
    format!("[client_ip]\ntrusted_proxies = [\"{PROXY}/32\"]\n")
}

fn from(address: &str, gateway: &Gateway) -> Client {
    Client::connect_from(address.parse::<IpAddr>().unwrap(), gateway.address)
}

/// Send the requests in batches of 50. Return the number of responses with the status 200.
fn admitted(client: &mut Client, requests: &[Vec<u8>]) -> usize {
    let mut admitted = 0;
    for batch in requests.chunks(50) {
        client.send(&batch.concat());
        for _ in batch {
            let status = client.reply().expect("a response").status;
            assert!(matches!(status, 200 | 429), "{status}");
            admitted += usize::from(status == 200);
        }
    }
    admitted
}

/// Request targets that are equivalent (RFC 3986 §6.2.2): different spellings of one path and one host.
const SPELLINGS: [&str; 14] = [
    "/limited/7",
    "//limited/7",
    "/limited//7",
    "/./limited/./7",
    "/x/../limited/7",
    "/../limited/7",
    "/%6cimited/7",
    "/%6Cimi%74ed/%37",
    "/x/%2e%2E/limited/7",
    "/.//limited/y/..//7",
    "/limited/7?x=y",
    "/limited/7#fragment",
    "http://GATEWAY.test:81/limited/7",
    "https://gateway.test/limited/x/../%37?",
];

#[test]
fn all_spellings_of_a_path_share_one_bucket() {
    const QUOTA: u64 = 50;
    let gateway = Gateway::start(&format!(
        "{}{}{}",
        limit("per-route", QUOTA, "by = [\"ip\", \"route\", \"host\", \"path:id\"]"),
        route("limited", "/limited/{id}", "\"per-route\""),
        route("others", "/{*rest}", ""),
    ));
    let mut client = gateway.client();
    let requests: Vec<_> = (0..10)
        .flat_map(|_| SPELLINGS)
        .map(|target| format!("GET {target} HTTP/1.1\r\nHost: gateway.test\r\n\r\n").into_bytes())
        .collect();
    let first = admitted(&mut client, &requests[..40]);
    assert_eq!(first, 40);
    // Over HTTP/2, these request targets must share the same bucket.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let talk = async {
        let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
        let (mut sender, connection) =
            http2::handshake::<_, _, Empty<Bytes>>(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let mut admitted = 0;
        for target in SPELLINGS.iter().filter(|target| target.starts_with('/')) {
            let request = http::Request::get(format!("http://gateway.test{target}")).body(Empty::new()).unwrap();
            let response = sender.send_request(request).await.unwrap();
            admitted += u64::from(response.status() == 200);
            response.into_body().collect().await.unwrap();
        }
        admitted
    };
    let second =
        runtime.block_on(async { tokio::time::timeout(MAX_WAIT, talk).await.expect("a response over HTTP/2") });
    let third = admitted(&mut client, &requests);
    let total = first as u64 + second + third as u64;
    println!("fault 9: {} spellings, {total} of {} admitted", SPELLINGS.len(), requests.len() + 52);
    assert_eq!(total, QUOTA);
}

/// Delimiters that the gateway treats like their percent-encoded form in a path (RFC 3986 §3.3).
const DELIMITERS: &str = "!$&'()*+,;=:@";

#[test]
fn all_spellings_of_a_resource_share_one_route_and_bucket() {
    let upstream = Upstream::start();
    let limits = limit("all", 1000, "by = [\"route\", \"host\", \"method\"]\nmethods = [\"POST\"]")
        + &limit("each", 1000, "by = \"path:id\"");
    let mut routes = format!("[upstream.api]\nservers = [\"{}\"]\n", upstream.url());
    let mut route = |name: &str, rest: &str| {
        routes.push_str(&format!(
            "[[route]]\nname = \"{name}\"\nupstream = \"api\"\nresponse_headers = {{ set = {{ x-route = \"{name}\" }} }}\n{rest}\n"
        ));
    };
    route("others", "path = \"/{*rest}\"");
    route("each", "path = \"/each/{id}\"\nlimits = [\"each\"]");
    route("stripped", "path = \"/v1:x/s/{*rest}\"\nstrip_prefix = \"/v1:x\"");
    route("rewritten", "path = \"/v1:x/r/{*rest}\"\nrewrite = \"/to%3A/{rest}\"");
    for (index, byte) in DELIMITERS.chars().enumerate() {
        // The path of a route cannot contain a literal `*`, so use a placeholder.
        let segment = if byte == '*' { "{star}".to_owned() } else { format!("{byte}x") };
        route(&format!("d{index}"), &format!("hosts = [\"api.test.\"]\npath = \"/d/{segment}\"\nlimits = [\"all\"]"));
    }
    let gateway = Gateway::start(&(limits + &routes));
    let mut client = gateway.client();
    let mut spellings = 0;
    for (index, byte) in DELIMITERS.chars().enumerate() {
        let (upper, lower) = (format!("%{:02X}", byte as u8), format!("%{:02x}", byte as u8));
        let mut left = 1000;
        let mut each = 1000;
        for (spelling, forwarded) in
            [(byte.to_string(), byte.to_string()), (upper.clone(), upper.clone()), (lower, upper.clone())]
        {
            for host in ["api.test", "API.test.", "api.test.:81", "Api.Test:81"] {
                let path = format!("/d/{spelling}%78");
                let reply = client.request("POST", &path, &[("Host", host)], b"");
                left -= 1;
                let what = format!("{host}{path}");
                assert_eq!((reply.header("x-route"), reply.status), (Some(&*format!("d{index}")), 200), "{what}");
                assert_eq!(reply.remaining("all"), left, "{what}");
                let seen = upstream.last();
                assert_eq!(seen.target(), format!("/d/{forwarded}x"), "{what}");
                let expected = host.replace(".:", ":");
                let expected = expected.strip_suffix('.').unwrap_or(&expected);
                assert_eq!((seen.headers("host"), seen.headers("x-forwarded-host")), (vec![expected], vec![expected]));
                spellings += 1;
            }
            each -= 1;
            assert_eq!(client.get(&format!("/each/a{spelling}")).remaining("each"), each, "{spelling}");
            assert_eq!(upstream.last().target(), format!("/each/a{forwarded}"));
            for (path, target) in [
                (format!("/v1{spelling}x/s/{spelling}"), format!("/s/{forwarded}")),
                (format!("/v1{spelling}x/r/{spelling}"), format!("/to%3A/{forwarded}")),
            ] {
                let target = if byte == ':' { target } else { path.replace(&*spelling, &forwarded) };
                client.get(&path);
                assert_eq!(upstream.last().target(), target, "{path}");
            }
        }
    }
    // The gateway rejects methods that are not in upper case, because routes and limits contain methods in upper case.
    let count = upstream.count();
    for method in
        ["post", "Post", "pOST", "POSt", "get", "Get", "delete", "put", "patch", "head", "options", "propfind"]
    {
        client.request(method, "/d/!x", &[("Host", "api.test")], b"").assert_problem(400, method);
        let request = http::Request::builder().method(method).uri("http://api.test/d/!x").body(&b""[..]).unwrap();
        assert_eq!(
            crate::support::http2::ask(gateway.address, [request])[0].status(),
            Some(400),
            "{method} over HTTP/2"
        );
        spellings += 2;
    }
    for host in ["api.test..", ".api.test", "api..test", ".", "..", "[::1.]", "[1]"] {
        client.request("POST", "/d/!x", &[("Host", host)], b"").assert_problem(400, host);
        spellings += 1;
    }
    assert_eq!(upstream.count(), count, "rejected requests are not forwarded");
    println!("fault 9: {spellings} spellings of resources");
}

/// Each case has the `Cookie` headers of a request, and the result. The result is the number of requests that the
/// bucket of `victim` has counted, or the status of the rejection.
const COOKIES: &[(&[&str], Result<u64, u16>)] = &[
    (&["sid=victim"], Ok(1)),
    (&["a=1;sid=victim"], Ok(2)),
    (&["a=1;  sid=victim ;b=2"], Ok(3)),
    (&["xsid=other; sid=victim; sidx=other; SID=other"], Ok(4)),
    // From these cookies, Python, Go and PHP also read the value `victim`.
    (&["sid=\"victim\""], Ok(5)),
    (&["sid=%76ict%69m"], Ok(6)),
    (&["sid= victim"], Ok(7)),
    // If a space follows the name, some servers read the cookie `sid` and others read another cookie.
    (&["sid=x; sid =victim"], Err(400)),
    (&["sid =victim; sid=x"], Err(400)),
    (&["sid\t=victim"], Err(400)),
    (&["a=1; sid \t =victim"], Err(400)),
    // If a cookie occurs twice, some servers take the first one and others the last one.
    (&["sid=x; sid=victim"], Err(400)),
    (&["sid=victim; sid=victim"], Err(400)),
    (&["sid=; sid=victim"], Err(400)),
    (&["sid; sid=victim"], Err(400)),
    (&["sid=x", "sid=victim"], Err(400)),
    (&["sid=x", "a=1; sid =victim"], Err(400)),
    (&["sid="], Err(400)),
    (&["sid"], Err(400)),
    // Python decodes `\164` in quotes. Go rejects all the following values.
    (&["sid=\"vic\\164im\""], Err(400)),
    (&["sid=\"vic\\\"tim\""], Err(400)),
    (&["sid=victim\\"], Err(400)),
    (&["sid=\"victim"], Err(400)),
    (&["sid=victim\""], Err(400)),
    (&["sid=vic\ttim"], Err(400)),
    (&["sid=vict\u{ef}m"], Err(400)),
    // JavaScript trims no-break spaces around names and values.
    (&["sid=victim\u{a0}"], Err(400)),
    (&["sid=\u{a0}victim"], Err(400)),
    (&["sid\u{a0}=victim"], Err(400)),
    (&["\u{a0}sid=victim"], Err(400)),
    (&["a=1; \u{a0} sid=victim"], Err(400)),
    (&["xsid=victim"], Err(400)),
];

#[test]
fn all_spellings_of_a_session_cookie_share_one_bucket() {
    let gateway = Gateway::start(&format!(
        "{}{}{}",
        limit("per-session", 100, "by = \"cookie:sid\"\nexempt = [\"cookie:sid=of%20a%20friend\"]"),
        route("session", "/session", "\"per-session\""),
        route("others", "/{*rest}", ""),
    ));
    let mut client = gateway.client();
    for (lines, expected) in COOKIES {
        let headers: Vec<_> = lines.iter().map(|line| ("Cookie", *line)).collect();
        let reply = client.get_with("/session", &headers);
        match expected {
            Ok(served) => assert_eq!(reply.remaining("per-session"), 100 - served, "{lines:?}"),
            Err(status) => reply.assert_problem(*status, &format!("{lines:?}")),
        }
        for exempt in ["sid=of%20a%20friend", "sid=\"of a friend\""] {
            assert_eq!(client.get_with("/session", &[("Cookie", exempt)]).header("ratelimit"), None, "{exempt}");
        }
        // A route without a limit by cookie accepts these headers.
        assert_eq!(client.get_with("/others", &headers).status, 200, "{lines:?}");
    }
}

#[test]
fn cookie_lines_are_forwarded_as_one() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "{}[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nlimits = [\"per-session\"]\nupstream = \"api\"\n\
         [upstream.api]\nservers = [\"{}\"]\n",
        limit("per-session", 100, "by = \"cookie:sid\""),
        upstream.url(),
    ));
    let mut client = gateway.client();
    // The gateway joins `Cookie` headers, because gunicorn would join them with commas. Django would then see no cookie
    // `sid`, or one with the value `victim,`.
    for (lines, expected) in [
        (&["a=1", "sid=victim"][..], "a=1; sid=victim"),
        (&["sid=victim", "a=1", "b=2"], "sid=victim; a=1; b=2"),
        (&["", "sid=victim"], "sid=victim"),
        (&["sid=victim", ""], "sid=victim"),
    ] {
        let headers: Vec<_> = lines.iter().map(|line| ("Cookie", *line)).collect();
        assert_eq!(client.get_with("/", &headers).status, 200, "{lines:?}");
        let seen = upstream.seen.lock().unwrap().pop().unwrap();
        assert_eq!(seen.headers("cookie"), [expected], "{lines:?}");
    }
}

#[test]
fn two_lines_of_a_limit_header_are_rejected() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "{}{}{}[upstream.api]\nservers = [\"{}\"]\n[[route]]\nname = \"others\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n",
        limit("per-tenant", 100, "by = \"header:x-tenant\""),
        limit("skipped", 100, "by = \"header:x-tenant\"\non_missing = \"skip\""),
        route("tenant", "/tenant", "\"per-tenant\"") + &route("skipped", "/skipped", "\"skipped\""),
        upstream.url(),
    ));
    let mut client = gateway.client();
    // If a header occurs twice, servers take the first value, the last one, or both joined with a comma.
    for lines in [["victim", "x"], ["x", "victim"], ["victim", "victim"], ["", "victim"], ["victim", ""]] {
        let headers = lines.map(|value| ("X-Tenant", value));
        for path in ["/tenant", "/skipped"] {
            client.get_with(path, &headers).assert_problem(400, &format!("{path} {lines:?}"));
        }
        // A route without a limit by header accepts these headers.
        assert_eq!(client.get_with("/others", &headers).status, 200, "{lines:?}");
    }
    assert_eq!(client.get_with("/tenant", &[("X-Tenant", "victim")]).remaining("per-tenant"), 99);
}

#[test]
fn forged_x_forwarded_for_gives_no_second_bucket() {
    const QUOTA: usize = 50;
    let gateway = Gateway::start(&format!(
        "{}{}{}",
        trusting(),
        limit("per-ip", QUOTA as u64, "by = \"ip\""),
        route("limited", "/limited", "\"per-ip\"")
    ));
    let request = |n: usize, client: &str, mapped: &str| {
        let junk = format!("{}.{}.{}.{}", n % 223 + 1, n % 251, n % 241, n % 239);
        // The first values are those of the client. The last value is the one that the proxy appends.
        let lines = match n % 12 {
            0 => format!("X-Forwarded-For: {client}\r\n"),
            1 => format!("X-Forwarded-For: {junk}, {client}\r\n"),
            2 => format!("X-Forwarded-For: {junk}\r\nX-Forwarded-For: {client}\r\n"),
            3 => format!("X-Forwarded-For: {client}:{}\r\n", 1024 + n),
            4 => format!("X-Forwarded-For: ::ffff:{client}\r\n"),
            5 => format!("X-Forwarded-For: [::ffff:{client}]:{}\r\n", 1024 + n),
            6 => format!("X-Forwarded-For: {mapped}\r\n"),
            7 => format!("X-Forwarded-For: {junk},\t {client} \t\r\n"),
            8 => format!("X-Forwarded-For: {client}, {PROXY}\r\n"),
            9 => format!("X-Forwarded-For: {junk}, {client}\r\nX-Forwarded-For: {PROXY}, ::ffff:{PROXY}\r\n"),
            10 => format!("X-Forwarded-For: \"x, {junk}, unknown, [{junk}, {client}\r\nX-Real-IP: {junk}\r\n"),
            _ => format!("x-forwarded-for: {junk}:80,{client}\r\nForwarded: for={junk}\r\nX_Forwarded_For: {junk}\r\n"),
        };
        format!("GET /limited HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n").into_bytes()
    };
    let all: Vec<_> = (0..1000).map(|n| request(n, "198.51.100.7", "::FFFF:C633:6407")).collect();
    let through_the_proxy = admitted(&mut from(PROXY, &gateway), &all);
    // An untrusted client sends the same headers. The gateway ignores them.
    let claimed: Vec<_> =
        (0..1000).map(|n| request(n, &format!("203.0.113.{}", n % 250), "::ffff:cb00:7101")).collect();
    let untrusted = admitted(&mut from("127.0.0.3", &gateway), &claimed);
    println!("fault 10: {through_the_proxy} of 1000 through a proxy, {untrusted} of 1000 of an untrusted client");
    assert_eq!((through_the_proxy, untrusted), (QUOTA, QUOTA));
    assert_eq!(
        from("127.0.0.4", &gateway).get("/limited").remaining("per-ip"),
        QUOTA as u64 - 1,
        "another client has its own bucket"
    );
}

#[test]
fn addresses_of_one_ipv6_network_share_one_bucket() {
    const QUOTA: usize = 50;
    let gateway = Gateway::start(&format!(
        "{}{}{}",
        trusting(),
        limit("per-ip", QUOTA as u64, "by = \"ip\""),
        route("limited", "/limited", "\"per-ip\"")
    ));
    let mut client = from(PROXY, &gateway);
    let mut ask = |network: &str, count: usize| {
        let request = |n: usize| {
            // Three notations of IPv6 addresses: plain, in brackets with a port, and in upper case.
            let address = match n % 3 {
                0 => format!("{network}:{:x}:{n:x}::{:x}", n * 7, n + 1),
                1 => format!("[{network}:{n:x}:0:0:1]:443"),
                _ => format!("{}:0:{n:X}:0:1", network.to_uppercase()),
            };
            format!("GET /limited HTTP/1.1\r\nHost: a.test\r\nX-Forwarded-For: {address}\r\n\r\n").into_bytes()
        };
        admitted(&mut client, &(0..count).map(request).collect::<Vec<_>>())
    };
    let (one, both) = (ask("2001:db8:1:1", 1000), ask("2001:db8:1:2", 1000));
    println!("fault 11: {one} of 1000 addresses of one /64, {} with its neighbour", one + both);
    assert_eq!((one, both), (QUOTA, QUOTA));
}

/// API keys with characters that have a special meaning in Redis keys, lists in headers, escape sequences, shells, SQL
/// or Lua.
const KEYS: &[&[u8]] = &[
    b"a",
    b"A",
    b"a}b{c",
    b"{a}",
    b"}",
    b"{}:",
    b"a:b",
    b"a:b:c",
    b"rl:{a}:per-key",
    b"a,b",
    b"a, b",
    b"a;b",
    b"a\"b",
    b"\"a\"",
    b"a\\r\\nb",
    b"a%0d%0ab",
    b"a%00",
    b"a\tb",
    b"*",
    b"?",
    b"[a]",
    b"a\xff",
    b"a\xfe",
    b"\xe9",
    b"\xc3\xa9",
    b"../a",
    b"${HOME}",
    b"' or 1=1",
    b"redis.call('flushall')",
    b"sha256:ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",
    b"alice",
];

#[test]
fn api_keys_share_no_bucket_and_do_not_appear_in_redis() {
    let redis = Redis::start();
    // The hash is the SHA-256 hash of `alice-key`.
    let consumers = "[[consumer]]\nname = \"alice\"\nkeys = [\"sha256:72ee9d4355ccb9d3a4c9dbf37382e38e75c1b1a225b5bd1f729ee91bbda30c20\"]\n";
    let gateway = Gateway::start_with(
        &format!(
            "{}[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_unknown = \"accept\"\n{}{}",
            redis.store(),
            limit("per-key", 100, "by = \"api-key\""),
            route("keyed", "/keyed", "\"per-key\"").replace("limits", "identify = [\"keys\"]\nlimits")
        ),
        &[("consumers.toml", consumers)],
    );
    let mut client = gateway.client();
    let long = vec![b'x'; 30 << 10];
    let keys: Vec<&[u8]> = KEYS.iter().copied().chain([&long[..], &long[1..]]).collect();
    let mut ask = |lines: &[&[u8]]| {
        let lines: Vec<u8> = lines.iter().flat_map(|line| [line, &b"\r\n"[..]].concat()).collect();
        client.send(&[b"GET /keyed HTTP/1.1\r\nHost: a.test\r\n", &lines[..], b"\r\n"].concat());
        client.reply().unwrap()
    };
    for remaining in [99, 98, 97] {
        for key in &keys {
            let reply = ask(&[&[b"X-Api-Key: ", *key].concat()]);
            assert_eq!(reply.remaining("per-key"), remaining, "{}", key.escape_ascii());
        }
    }
    // Spaces around a value are not part of it (RFC 9110 §5.5).
    assert_eq!(ask(&[b"X-Api-Key:   a \t "]).remaining("per-key"), 96);
    let mut refused = 0;
    for (what, status, lines) in [
        ("two keys", 400, &[&b"X-Api-Key: a"[..], b"X-Api-Key: b"][..]),
        ("the same key twice", 400, &[b"X-Api-Key: a", b"x-api-key: a"]),
        ("nothing, then a key", 400, &[b"X-Api-Key:", b"X-Api-Key: a"]),
        ("a key, then nothing", 400, &[b"X-Api-Key: a", b"X-Api-Key:"]),
        ("no key", 401, &[]),
        ("an empty key", 401, &[b"X-Api-Key:"]),
        ("spaces", 401, &[b"X-Api-Key:  \t "]),
        ("an alias", 401, &[b"X_Api_Key: a"]),
        ("a dotted alias", 401, &[b"x.api.key: a"]),
        ("Authorization", 401, &[b"Authorization: Bearer a"]),
        ("Authorization of a scheme of ours", 401, &[b"Authorization: ApiKey a"]),
        ("a cookie", 401, &[b"Cookie: x-api-key=a"]),
    ] {
        ask(lines).assert_problem(status, what);
        refused += 1;
    }
    client.send(b"GET /keyed?x-api-key=a&X-Api-Key=a HTTP/1.1\r\nHost: a.test\r\n\r\n");
    client.reply().unwrap().assert_problem(401, "a key in the query");
    let names = redis.keys();
    let lengths: HashSet<_> = names.iter().map(String::len).collect();
    assert_eq!((names.len(), lengths.len()), (keys.len(), 1), "one Redis key per API key, all as long: {names:?}");
    for name in &names {
        assert!(name.starts_with("rl:{") && name.ends_with("}:states"), "{name}");
        assert!(name.bytes().all(|byte| byte.is_ascii_graphic()), "{name}");
    }
    redis.assert_every_key_expires();
    for line in [&b"X-Api-Key: a\0b"[..], b"X-Api-Key: a\rb", b"X-Api-Key: a\x0bb", b"X-Api-Key: a\x7fb"] {
        let mut client = gateway.client();
        client.send(&[b"GET /keyed HTTP/1.1\r\nHost: a.test\r\n", line, b"\r\n\r\n"].concat());
        assert_eq!(client.reply().unwrap().status, 400, "{}", line.escape_ascii());
        refused += 1;
    }
    let mut client = gateway.client();
    client.send(&[&b"GET /keyed HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: "[..], &[b'x'; 64 << 10], b"\r\n\r\n"].concat());
    assert_eq!(client.reply().unwrap().status, 431);
    assert_eq!(redis.keys().len(), keys.len(), "a rejected request leaves no key");
    println!("fault 12: {} keys, {refused} rejected requests, 0 shared buckets, key length {lengths:?}", keys.len());
}

#[test]
fn forged_user_header_spends_no_quota_of_the_user() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "{}{}[upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"named\"\npath = \"/named\"\nlimits = [\"per-user\"]\nupstream = \"api\"\n{}",
        trusting(),
        limit("per-user", 100, "by = \"user:x-user-id\"\non_missing = \"ip\""),
        upstream.url(),
        route("answered", "/answered", "\"per-user\""),
    ));
    let alice = [("X-User-Id", "alice"), ("X-Forwarded-For", "198.51.100.1")];
    assert_eq!(from(PROXY, &gateway).get_with("/named", &alice).remaining("per-user"), 99);
    let spoofed = [
        "X-User-Id: alice\r\n",
        "x-user-id: alice\r\nX-User-Id: alice\r\n",
        "X_User_Id: alice\r\n",
        "X.User.Id: alice\r\nX-User-Id: alice\r\n",
        "X-Forwarded-For: 127.0.0.9\r\nX-User-Id: alice\r\n",
        "Forwarded: for=127.0.0.9\r\nX-User-Id: alice\r\n",
        "Connection: x-user-id\r\nX-User-Id: alice\r\n",
        "X-Real-IP: 127.0.0.9\r\nX-User-Id: ALICE\r\n",
    ];
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let gateway = &gateway;
            scope.spawn(move || {
                let requests: Vec<_> = (0..2500)
                    .map(|n| {
                        let lines = spoofed[n % spoofed.len()];
                        format!("GET /answered HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n").into_bytes()
                    })
                    .collect();
                let own = admitted(&mut from(&format!("127.0.0.{}", 20 + worker), gateway), &requests);
                assert_eq!(own, 100, "an untrusted client spends its own quota");
            });
        }
    });
    let reply = from(PROXY, &gateway).get_with("/named", &alice);
    println!("fault 13: 10000 spoofed requests, the victim's remaining is {}", reply.remaining("per-user"));
    assert_eq!(reply.remaining("per-user"), 98);
    // The gateway forwards the user header only in requests of the trusted proxy.
    for lines in spoofed {
        let mut untrusted = from("127.0.0.30", &gateway);
        untrusted.send(format!("GET /named HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n").as_bytes());
        assert_eq!(untrusted.reply().unwrap().status, 200, "{lines}");
        assert!(!upstream.last().head.to_lowercase().contains("alice"), "{lines}: {}", upstream.last().head);
    }
}

/// A header, how the gateway uses it, and the value that the upstream receives if a client sends it.
const GUARDED: [(&str, &str, Option<&str>); 8] = [
    ("x-api-key", "identifies the client", None),
    ("x-tenant", "is what a limit is by", Some("theirs")),
    ("x_odd-name", "is what a limit is by", Some("theirs")),
    ("x-plan", "chooses the route", Some("free")),
    ("x-gateway", "is set by the route", Some("ours")),
    ("x_under", "is set by the route", Some("ours")),
    ("x-gone", "is removed by the route", None),
    ("x-gone_too", "is removed by the route", None),
];

/// Characters of header names besides letters and digits (RFC 9110 §5.6.2). CGI, WSGI, PHP and lighttpd treat some or
/// all of them as equal.
const SEPARATORS: &str = "-_.!#$%&'*+^`|~";

#[test]
fn aliases_of_headers_that_the_gateway_uses_are_not_forwarded() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "[auth.keys]\nkind = \"api-key\"\non_unknown = \"accept\"\n{}{}{}[upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"others\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
         [[route]]\nname = \"free\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\nidentify = [\"keys\"]\nlimits = [\"key\", \"tenant\", \"odd\"]\n\
         match.headers.x-plan.exact = \"free\"\nrequest_headers = {{ set = {{ x-gateway = \"ours\", x_under = \"ours\" }}, remove = [\"x-gone\", \"x-gone_too\"] }}\n",
        limit("key", 100_000, "by = \"api-key\""),
        limit("tenant", 100_000, "by = \"header:x-tenant\""),
        limit("odd", 100_000, "by = \"header:x_odd-name\""),
        upstream.url(),
    ));
    let plain = |name: &str| name.replace(|letter: char| !letter.is_ascii_alphanumeric(), "-").to_lowercase();
    let value = |name: &str| if name == "x-plan" { "free" } else { "theirs" };
    let real: Vec<_> = GUARDED.iter().map(|(name, ..)| (*name, value(name))).collect();
    let mut client = gateway.client();
    let mut aliases = 0;
    for (name, why, _) in GUARDED {
        let spelled = |separator: char| name.replace(['-', '_'], &separator.to_string());
        for alias in SEPARATORS.chars().map(spelled).filter(|alias| alias != name) {
            for nominated in [false, true] {
                let what = format!("{alias}, an alias of {name}, which {why}; nominated: {nominated}");
                let title = alias.to_uppercase();
                let mut lines = real.clone();
                // Send the alias before and after the real header, because servers take the first or the last one.
                lines.insert(0, (&alias, "alias"));
                lines.push((&title, "alias"));
                let nomination = format!("{name}, {alias}");
                if nominated {
                    lines.push(("Connection", &nomination));
                }
                assert_eq!(client.get_with("/x", &lines).status, 200, "{what}");
                let mut heads = vec![upstream.last()];
                if !nominated {
                    let mut request = http::Request::get("http://a.test/x");
                    for (name, value) in &lines {
                        request = request.header(*name, *value);
                    }
                    let answers = crate::support::http2::ask(gateway.address, [request.body(&b""[..]).unwrap()]);
                    assert_eq!(answers[0].status(), Some(200), "{what}");
                    heads.push(upstream.last());
                }
                for seen in heads {
                    for (name, why, expected) in GUARDED {
                        let all = seen.head.lines().skip(1).filter_map(|line| line.split_once(": "));
                        let all: Vec<_> = all.filter(|(other, _)| plain(other) == plain(name)).collect();
                        let expected: Vec<_> = expected.iter().map(|value| (name, *value)).collect();
                        assert_eq!(all, expected, "{what}: {name}, which {why}, in {}", seen.head);
                    }
                    aliases += 1;
                }
            }
        }
    }
    // The gateway forwards headers whose names are similar but not aliases.
    client.get_with(
        "/x",
        &[
            ("x_other", "1"),
            ("x.api", "2"),
            ("xapikey", "3"),
            ("x-api-key-", "4"),
            ("x-plan", "free"),
            ("x-api-key", "k"),
            ("x-tenant", "t"),
            ("x_odd-name", "o"),
        ],
    );
    for (name, value) in [("x_other", "1"), ("x.api", "2"), ("xapikey", "3"), ("x-api-key-", "4")] {
        assert_eq!(upstream.last().headers(name), [value], "{name}");
    }
    println!("fault 6: {aliases} requests with aliases, 0 forwarded");
}

/// The gateway forwards headers that it sets or trusts, even if `Connection` names them (RFC 9110 §7.6.1). A proxy in
/// front of the gateway may have forwarded the `Connection` header of a client.
#[test]
fn connection_header_and_aliases_do_not_alter_gateway_headers() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "{}{}[upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"named\"\npath = \"/{{*rest}}\"\nlimits = [\"per-user\"]\nupstream = \"api\"\n",
        trusting(),
        limit("per-user", 1_000_000, "by = \"user:x-user-id\"\non_missing = \"ip\""),
        upstream.url(),
    ));
    let names = [
        "host",
        "content-length",
        "x-user-id",
        "x-forwarded-for",
        "x-forwarded-proto",
        "x-forwarded-host",
        "x-forwarded-port",
        "forwarded",
        "x-real-ip",
        "x-request-id",
    ];
    let nominations = names.iter().flat_map(|name| {
        let title: String =
            name.split('-').map(|word| word[..1].to_uppercase() + &word[1..]).collect::<Vec<_>>().join("-");
        [
            format!("Connection: {name}"),
            format!("Connection: close, {},keep-alive", name.to_uppercase()),
            format!("Connection: ,\t{title} ,\r\nConnection: x\r\nConnection: {name}"),
            format!("Connection: \"{name}\", {name};q=1\r\nKeep-Alive: {name}\r\nProxy-Connection: {name}"),
        ]
    });
    let aliases = [
        "x_user_id",
        "X.User.Id",
        "x_forwarded_for",
        "x.forwarded.proto",
        "X_Forwarded-Host",
        "x_real_ip",
        "x_request.id",
        "content_length",
        "transfer.encoding",
    ]
    .map(|alias| format!("{alias}: 7"));
    let variants: Vec<_> = nominations.chain(aliases).collect();
    for (index, lines) in variants.iter().enumerate() {
        let said = "X-User-Id: bob\r\nX-Forwarded-For: 198.51.100.1\r\nX-Forwarded-Proto: https\r\n\
             X-Forwarded-Host: shop.test\r\nX-Forwarded-Port: 443\r\nForwarded: for=198.51.100.1\r\n\
             X-Real-IP: 198.51.100.1\r\nX-Request-Id: of-the-proxy\r\n";
        let request =
            format!("POST /{index} HTTP/1.1\r\nHost: a.test\r\n{said}{lines}\r\nContent-Length: 5\r\n\r\nhello");
        let mut proxy = from(PROXY, &gateway);
        proxy.send(request.as_bytes());
        assert_eq!(proxy.reply().unwrap().status, 200, "{lines}");
        let seen = upstream.last();
        for (name, values) in [
            ("host", &["a.test"][..]),
            ("content-length", &["5"]),
            ("x-user-id", &["bob"]),
            ("x-forwarded-for", &["198.51.100.1, 127.0.0.9"]),
            ("x-forwarded-proto", &["https"]),
            ("x-forwarded-host", &["shop.test"]),
            ("x-forwarded-port", &["443"]),
            ("forwarded", &["for=198.51.100.1, for=127.0.0.9"]),
            ("x-real-ip", &["198.51.100.1"]),
            ("x-request-id", &["of-the-proxy"]),
            ("connection", &[]),
            ("keep-alive", &[]),
            ("proxy-connection", &[]),
        ] {
            assert_eq!(seen.headers(name), values, "{lines}: {name} in {}", seen.head);
        }
        let folded = |line: &&str| line.split(':').next().unwrap().contains(['_', '.']);
        assert_eq!(seen.head.lines().skip(1).filter(folded).count(), 0, "{lines}: {}", seen.head);
        assert_eq!(seen.body, b"hello", "{lines}");
        // If the client is untrusted, the gateway removes these headers from the request and sets its own.
        let mut untrusted = from("127.0.0.3", &gateway);
        untrusted.send(request.as_bytes());
        assert_eq!(untrusted.reply().unwrap().status, 200, "{lines}");
        let seen = upstream.last();
        for (name, values) in [
            ("host", &["a.test"][..]),
            ("content-length", &["5"]),
            ("x-user-id", &[]),
            ("x-forwarded-for", &["127.0.0.3"]),
            ("x-forwarded-proto", &["http"]),
            ("x-forwarded-host", &["a.test"]),
            ("x-forwarded-port", &[]),
            ("forwarded", &[]),
            ("x-real-ip", &[]),
        ] {
            assert_eq!(seen.headers(name), values, "{lines}: {name} in {}", seen.head);
        }
        assert_ne!(seen.headers("x-request-id"), ["of-the-proxy"], "{lines}");
        assert_eq!(seen.headers("x-request-id").len(), 1, "{lines}");
    }
    println!("fault 6: {} variants, the headers of the gateway arrive unchanged", variants.len());
    assert!(variants.len() >= 40);
}
