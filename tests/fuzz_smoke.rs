//! Runs each fuzz target of `fuzz/` on mutated examples for 2 s, or for `FUZZ_SECONDS` seconds. This is fault 39 in
//! docs/testing.md.
//!
//! A failed run prints its seed and the smallest failing input that it found. `SEED=… cargo test --test fuzz_smoke`
//! repeats the run.

mod support;

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use sluicegate::clock::monotonic;
use support::random::seed;

#[path = "../fuzz/targets/access_log.rs"]
mod access_log;
#[path = "../fuzz/targets/authorization_call.rs"]
mod authorization_call;
#[path = "../fuzz/targets/canonical_path.rs"]
mod canonical_path;
#[path = "../fuzz/targets/conditions.rs"]
mod conditions;
#[path = "../fuzz/targets/configuration.rs"]
mod configuration;
#[path = "../fuzz/targets/credentials.rs"]
mod credentials;
#[path = "../fuzz/targets/descriptor_file.rs"]
mod descriptor_file;
#[path = "../fuzz/targets/field_writer.rs"]
mod field_writer;
#[path = "../fuzz/targets/form.rs"]
mod form;
#[path = "../fuzz/targets/forwarded.rs"]
mod forwarded;
#[path = "../fuzz/targets/head.rs"]
mod head;
#[path = "../fuzz/targets/htpasswd.rs"]
mod htpasswd;
#[path = "../fuzz/targets/import.rs"]
mod import;
#[path = "../fuzz/targets/json_body.rs"]
mod json_body;
#[path = "../fuzz/targets/key_set.rs"]
mod key_set;
#[path = "../fuzz/targets/llm.rs"]
mod llm;
#[path = "../fuzz/targets/origins.rs"]
mod origins;
#[path = "../fuzz/targets/proxy.rs"]
mod proxy;
#[path = "../fuzz/targets/ratelimit_call.rs"]
mod ratelimit_call;
#[path = "../fuzz/targets/rewrite.rs"]
mod rewrite;

/// One mutation of an example.
#[derive(Debug, Clone)]
enum Change {
    Insert(Index, Index),
    Replace(Index, Index),
    Byte(Index, u8),
    Delete(Index, u8),
    Repeat(Index, u8, u8),
    Cut(Index),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => any::<(Index, Index)>().prop_map(|(at, token)| Change::Insert(at, token)),
        2 => any::<(Index, Index)>().prop_map(|(at, token)| Change::Replace(at, token)),
        3 => any::<(Index, u8)>().prop_map(|(at, byte)| Change::Byte(at, byte)),
        2 => any::<(Index, u8)>().prop_map(|(at, length)| Change::Delete(at, length)),
        1 => any::<(Index, u8, u8)>().prop_map(|(at, length, times)| Change::Repeat(at, length, times)),
        1 => any::<Index>().prop_map(Change::Cut),
    ]
}

fn mutated(example: &[u8], tokens: &[&str], changes: &[Change]) -> Vec<u8> {
    let mut bytes = example.to_vec();
    for change in changes {
        let all = bytes.len();
        let place = |at: &Index| at.index(all + 1);
        let from = |at: &Index, length: usize| place(at)..(place(at) + length).min(all);
        match change {
            Change::Insert(at, token) => drop(bytes.splice(from(at, 0), token.get(tokens).bytes())),
            Change::Replace(at, token) => {
                let token = token.get(tokens);
                drop(bytes.splice(from(at, token.len()), token.bytes()));
            }
            Change::Byte(at, byte) => drop(bytes.splice(from(at, 1), [*byte])),
            Change::Delete(at, length) => drop(bytes.drain(from(at, usize::from(*length % 32)))),
            Change::Repeat(at, length, times) => {
                let piece = bytes[from(at, usize::from(*length))].repeat(usize::from(*times % 8));
                drop(bytes.splice(from(at, 0), piece));
            }
            Change::Cut(at) => bytes.truncate(place(at)),
        }
    }
    bytes
}

/// Run a target on mutated examples until its time is over. Mutations insert `tokens` and change bytes.
fn fuzz(name: &str, examples: &[&[u8]], tokens: &[&str], target: fn(&[u8])) {
    let seconds = std::env::var("FUZZ_SECONDS").map_or(2, |text| text.parse().expect("FUZZ_SECONDS is a number"));
    let config = Config {
        cases: u32::MAX,
        max_global_rejects: 0,
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..Config::default()
    };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed()));
    let input = (any::<Index>(), prop::collection::vec(change(), 0..8));
    let (started, runs) = (monotonic(), std::cell::Cell::new(0_u64));
    let over = || started.elapsed() >= Duration::from_secs(seconds);
    let result = runner.run(&input, |(example, changes)| {
        // Reject a case to end the run: proptest aborts after the first rejection, because `max_global_rejects` is 0.
        if over() {
            return Err(TestCaseError::reject("the time is over"));
        }
        runs.set(runs.get() + 1);
        target(&mutated(example.get::<&[u8]>(examples), tokens, &changes));
        Ok(())
    });
    match result {
        Err(TestError::Abort(_)) if over() => {}
        Err(TestError::Fail(reason, (example, changes))) => {
            let bytes = mutated(example.get::<&[u8]>(examples), tokens, &changes);
            panic!("{name}: {reason}\nthe smallest failing input found: {}", bytes.escape_ascii());
        }
        other => panic!("{name}: {other:?}"),
    }
    println!("fault 39: {name}, {} runs, 0 findings", runs.get());
    assert!(runs.get() >= 50, "{name}: only {} runs", runs.get());
}

#[test]
fn canonical_paths() {
    let examples: [&[u8]; 8] =
        [b"/", b"/v1/7", b"/v1/a/b", b"/a/./b/../c", b"/%61dmin", b"//a//", b"/caf\xc3\xa9", b"/a%2fb%00\\"];
    let tokens = [
        "/", "//", ".", "..", "/./", "/../", "%2e", "%2E%2e", "%2f", "%5C", "%00", "%25", "%", "\\", "~", "%7E",
        "\u{e9}", "?", "#", ";", "%C3%A9", "%ff",
    ];
    fuzz("canonical path", &examples, &tokens, canonical_path::run);
}

/// An example is a byte that selects the log format, followed by log lines.
#[test]
fn access_logs() {
    let names = ["common", "combined", "caddy", "alb", "cloudfront", "sluicegate", "nginx"];
    let logs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/logs");
    let example = |(format, name): (usize, &&str)| {
        let log = std::fs::read(logs.join(format!("{name}.log"))).unwrap();
        [&[format as u8], &log[..]].concat()
    };
    let examples: Vec<_> = names.iter().enumerate().map(example).collect();
    let examples: Vec<_> = examples.iter().map(Vec::as_slice).collect();
    let tokens = [
        "\n",
        "\r\n",
        "\"",
        "\\\"",
        "\\",
        "\\x22",
        "\\u0000",
        "\\u",
        " ",
        "\t",
        "-",
        "[",
        "]",
        "{",
        "}",
        ":",
        ",",
        "null",
        "1e308",
        "-1",
        "0.1",
        "99999999999999999999",
        "\0",
        "\u{e9}",
        "::1",
        "[::1]:80",
        "GET",
        "HTTP/1.1",
        "http://",
        "/",
        "?",
        "#Fields: ",
        "10/Oct/2000:13:55:36 -0700",
        "2018-07-02T22:23:00Z",
    ];
    fuzz("access log", &examples, &tokens, access_log::run);
}

#[test]
fn rewrites() {
    let examples: [&[u8]; 10] = [
        b"\x007/a/b",
        b"\x017/a/b?c=d",
        b"\x027/a/",
        b"\x037/",
        b"\x04a&b=c/d;e?f",
        b"\x05%3f/%23?",
        b"\x03x//evil.test/..%252f",
        b"\x01x/%2e%2e/y/@evil.test",
        b"\x04.a/..b?\\\\evil.test",
        b"\x02caf\xc3\xa9/{id}?caf\xc3\xa9",
    ];
    let tokens = [
        "/",
        "//",
        ".",
        "..",
        "/../",
        "%2e",
        "%2f",
        "%5C",
        "%00",
        "%0d%0a",
        "%25",
        "%",
        "\\",
        "\u{e9}",
        "?",
        "#",
        ";",
        "&",
        "=",
        "+",
        "{rest}",
        "@",
        ":80",
        "evil.test",
    ];
    fuzz("rewrite", &examples, &tokens, rewrite::run);
}

#[test]
fn forwarded_fields() {
    let examples: [&[u8]; 8] = [
        b"\x00",
        b"\x01",
        b"\x00198.51.100.1, 10.0.0.2",
        b"\x00198.51.100.1\n10.0.0.2, fd00::1",
        b"\x00[2001:db8::1]:443, ::ffff:10.0.0.2",
        b"\x01for=198.51.100.1;proto=https, for=10.0.0.2",
        b"\x01For=\"[2001:db8::1]:80\";by=x\nfor=\"10.0.0.1\"",
        b"\x01for=198.51.100.1;host=\"a, for=10.0.0.3\"",
    ];
    let tokens = [
        ",",
        ", ",
        ";",
        "for=",
        "\"",
        "\\\"",
        "\n",
        "10.0.0.9",
        "198.51.100.9",
        "::1",
        "::ffff:10.0.0.1",
        "[fd00::1]",
        ":80",
        "unknown",
        "_x",
        "\t",
        "\u{a0}",
        "host=\"",
        "by=",
    ];
    fuzz("forwarded fields", &examples, &tokens, forwarded::run);
}

#[test]
fn origins_and_networks() {
    let examples: [&[u8]; 8] = [
        b"*\nhttps://a.test",
        b"https://app.example.com\nhttps://app.example.com",
        b"HTTPS://App.Example.com:443\nhttps://app.example.com",
        b"https://*.example.com:8443\nhttps://a.b.example.com:8443",
        b"http://[2001:db8::1]:80\nhttp://[2001:db8::1]",
        b"https://*.example.com\nhttps://a.example.com\nnull",
        b"10.0.0.0/8 # office\r\n2001:db8::/32\n",
        b"deny 192.0.2.1;\n::ffff:10.0.0.0/104\n",
    ];
    let tokens = [
        "\n",
        "https://",
        "http://",
        "*.",
        "*",
        "null",
        ".",
        ":443",
        ":80",
        ":8443",
        "/",
        "@",
        "#",
        "?",
        "[::1]",
        "a.",
        ".example.com",
        "example.com",
        "10.0.0.1",
        "/33",
        "\u{e9}",
        " ",
    ];
    fuzz("origins and networks", &examples, &tokens, origins::run);
}

#[test]
fn heads_to_identities() {
    let examples: [&[u8]; 8] = [
        b"GET /v1/7?id=1 HTTP/1.1\r\nHost: a.test\r\nX-User-Id: bob\r\nX-A: 1\r\nCookie: sid=7\r\n\r\n",
        b"GET http://x.b.test/a?id=%41+b HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\n\r\n",
        b"POST /get HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhelloGET /get HTTP/1.1\r\nHost: a\r\nX-Version: 2\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x.b.test\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nx: y\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: [::1]:80\r\nX-Forwarded-For: 192.0.2.1, 127.0.0.1\r\n\r\n",
        b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ];
    let tokens = [
        "\r\n",
        "\n",
        "\r",
        "\r\n\r\n",
        " ",
        "\t",
        ":",
        "\0",
        "%2f",
        "..",
        "/",
        "?",
        "&",
        "=",
        "#",
        "\u{e9}",
        "HTTP/1.1",
        "HTTP/1.0",
        "Host: b.test\r\n",
        "Connection: x-user-id\r\n",
        "Connection: close\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Content-Length: 3\r\n",
        "X-Forwarded-For: 192.0.2.1\r\n",
        "X_User_Id: eve\r\n",
        "Expect: 100-continue\r\n",
        "Upgrade: h2c\r\n",
        "Cookie: sid=8; sid\r\n",
        "TE: trailers\r\n",
        "gzip, ",
        "TRACE ",
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    ];
    fuzz("head, route, identity", &examples, &tokens, head::run);
}

/// A configuration with the keys for access control, authentication, routing and headers.
const ACCESS: &str = r#"[server]
block_unknown_hosts = true
[tiers]
from = "jwt:plan"
[[listener]]
name = "plain"
address = "127.0.0.1:0"
allow = ["10.0.0.0/8", "file:blocked.txt"]
deny = ["10.9.0.1"]
[auth.keys]
kind = "api-key"
header = ["authorization", "x-api-key"]
scheme = "Bearer"
consumers = "consumers.toml"
on_missing = "anonymous"
on_unknown = "accept"
forward_credential = true
[auth.users]
kind = "basic"
users = "htpasswd"
realm = "a \"realm\""
[auth.tokens]
kind = "jwt"
jwks_file = "jwks.json"
issuer = "https://issuer.test"
audience = "a"
claims = { scope = "write" }
[auth.sso]
kind = "forward"
url = "http://127.0.0.1:1/verify"
request_headers = ["cookie"]
response_headers = ["x-user"]
timeout = "2s"
on_error = "allow"
cache = { by = ["cookie"], ttl = "10s", max_entries = 10 }
[limit.l]
by = ["basic", "ip"]
quota = "10/s"
unit = "tokens"
announce = false
[upstream.u]
servers = ["http://127.0.0.1:1"]
client_cert_header = true
proxy_protocol = "v2"
[[route]]
name = "r"
hosts = ["a.test", "*.b.test"]
listeners = ["plain"]
path_regex = '/v(?<version>[0-9]+)/[a-z]{1,20}'
match = { headers = { x-plan = { prefix = "a" } }, query = { debug = { present = true } } }
trailing_slash = "redirect"
upstream = "u"
limits = ["l"]
require = ["keys", ["users", "tokens"]]
identify = ["sso"]
allow = ["10.0.0.0/8"]
deny = ["10.9.0.0/16"]
cors = { origins = ["https://a.test", "https://*.b.test"], methods = ["GET"], headers = ["x-a"], credentials = true, max_age = "10m", expose = ["x-total"] }
mirror = { upstream = "u", percent = 10, max_body = "64KiB", max_in_flight = 100 }
request_headers = { set = { x-user = "{consumer}" } }
response_headers = { set = { x-id = "{request_id}" }, on_errors = true }
[[route]]
name = "s"
path = "/"
redirect = { scheme = "https", port = 443, status = 308 }
"#;

/// An example is a byte that selects the route, followed by header lines.
#[test]
fn credentials_of_requests() {
    const WRITER: &str = "eyJhbGciOiJFZERTQSIsImtpZCI6ImsifQ.eyJzdWIiOiJhbGljZSIsInNjb3BlIjoicmVhZCB3cml0ZSIsImV4cCI6OTAwMDAwMDAwMH0.Gt6U5PqDz-4qSyxdV1gNO9jtykN0fWT-NrgdO2MpA6sJAfuUnZMli0QN-ihcOkvJu1uqClUXnQX8iMYcMIfECg";
    const READER: &str = "eyJhbGciOiJFZERTQSIsImtpZCI6ImsifQ.eyJzdWIiOiJtYWxsb3J5Iiwic2NvcGUiOiJyZWFkIiwiZXhwIjo5MDAwMDAwMDAwfQ.2-1TXiyY0ynR8DDiY5R51Hincs86B3noFe1TAYggrMNUBAwEhGq8hiSy6kO8ubmmc12uVzN2IDIC0KZj4ONwBA";
    let examples = [
        "\0authorization: Bearer sk-valid-0123456789".to_owned(),
        "\0x-api-key: sk-valid-0123456789\nauthorization: Basic dTpw".to_owned(),
        "\0x-api-key: sk-valid-0123456789\nauthorization: Bearer sk-other".to_owned(),
        format!("\u{1}authorization: Bearer {WRITER}"),
        format!("\u{1}authorization: bearer {READER}"),
        format!("\u{2}authorization: Bearer {WRITER}\nx-api-key: sk-valid-0123456789"),
        format!("\u{3}x-api-key: sk-valid-0123456789\nauthorization: Bearer {WRITER}"),
    ];
    let examples = examples.each_ref().map(|example| example.as_bytes());
    let tokens = [
        "\n",
        ":",
        " ",
        "\t",
        ".",
        "=",
        "Bearer ",
        "Basic ",
        "bearer\t",
        "authorization:",
        "x-api-key:",
        "x_api_key:",
        "sk-valid-0123456789",
        "sk-valid",
        WRITER,
        READER,
        "eyJhbGciOiJub25lIn0",
        "eyJhbGciOiJIUzI1NiJ9",
        "AAAA",
        "\u{e9}",
    ];
    fuzz("credentials", &examples, &tokens, credentials::run);
}

/// An example is a byte that selects the kinds of two conditions, followed by lines. The first two lines are the texts
/// of the conditions, and the other lines are values.
#[test]
fn route_conditions() {
    let examples: [&[u8]; 8] = [
        b"\x00gold\nfree\ngold",
        b"\x06go\nold\ngold\nsilver",
        b"\x0cg.*d\n/v(?<id>[0-9]+)/.*\n/v17/a/../b",
        b"\x0d(?i)GOLD|free\n\ngold",
        b"\x18\n\n",
        b"\x02\\bgold\\b\n(a|ab)(c|bcd)\nabcd\n/fixed",
        b"\x0b(?x) a # b\n^/[^/]*$\n/a%2fb",
        b"\x01caf\xc3\xa9\n\xff\ncaf\xc3\xa9 & more",
    ];
    let tokens = [
        "\n", "\u{0}", "\u{6}", "\u{c}", "\u{13}", ".*", "(?:", ")", "|", "[^/]+", "{2,3}", "{1000}", "\\z", "\\A",
        "^", "$", "(?x)", "(?m)", "(?s)", "(?-u)", "(?i)", "(?<id>", "#", "/", "/fixed", "..", "%2e", "&x-plan=", "+",
        "gold", "go", "\u{e9}",
    ];
    fuzz("route conditions", &examples, &tokens, conditions::run);
}

/// The examples contain hashes that Apache's htpasswd wrote: with its default algorithm and with bcrypt.
#[test]
fn htpasswd_files() {
    const APR1: &str = "$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/";
    const BCRYPT: &str = "$2y$05$1YAV4cQ8jU2TeMYvqqe7SulqsE0lAVKqV9gG57pHwjZblwUax6Mh.";
    let examples = [
        format!("# users\n\nalice:{APR1}\r\nbob:{BCRYPT}\n"),
        format!("alice:{BCRYPT}:Alice\njos\u{e9}:{APR1}"),
        format!("alice:{APR1}\nalice:{BCRYPT}\n"),
        "bob:{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=\nbob:rqXexS6ZhobKA\n".to_owned(),
        String::new(),
    ];
    let examples = examples.each_ref().map(|example| example.as_bytes());
    let tokens = [
        "\n", "\r\n", ":", "#", " ", "$", "$apr1$", "$2y$", "$2a$05$", "$2x$05$", "$5$", "{SHA}", "$04$", "$16$",
        "$17$", "$+5$", "bob:", APR1, BCRYPT, "\u{e9}", "\0", "/", ".",
    ];
    fuzz("htpasswd file", &examples, &tokens, htpasswd::run);
}

/// The examples are JSON Web Key Sets, as issuers publish them.
#[test]
fn key_sets() {
    let examples: [&[u8]; 5] = [
        include_bytes!("certs/jwks.json"),
        include_bytes!("config/invalid/jwks_symmetric.json"),
        include_bytes!("config/invalid/jwks_twice.json"),
        include_bytes!("config/invalid/jwks_broken_key.json"),
        b"{\"keys\": []}",
    ];
    let tokens = [
        "{",
        "}",
        "[",
        "]",
        "\"",
        ":",
        ",",
        "null",
        "true",
        "1e308",
        "\\u0000",
        "\\ud800",
        "\"kty\":\"oct\"",
        "\"kty\":\"EC\"",
        "\"crv\":\"P-256\"",
        "\"crv\":\"Ed25519\"",
        "\"crv\":\"secp256k1\"",
        "\"alg\":\"none\"",
        "\"alg\":\"HS256\"",
        "\"use\":\"enc\"",
        "\"key_ops\":[\"verify\"]",
        "\"kid\":\"\"",
        "\"x\":\"\"",
        "\"e\":\"AQ\"",
        "AAAA",
        "=",
        "{\"keys\":",
    ];
    fuzz("key set", &examples, &tokens, key_set::run);
}

#[test]
fn authorization_calls() {
    let examples: [&[u8]; 2] = [
        b"\n\x2c\n\x0f\n\r\n\x0b\x12\t192.0.2.1\x22\x19\x12\x17\x12\x03GET\x1a\x08\n\x03a-b\x12\x01c\x22\x01/*\x01h2\x00",
        b"\n\x0e\x22\x0c\x12\nj\x08\n\x06\n\x01a\x1a\x01b",
    ];
    let tokens = [
        "\n",
        "\x12",
        "\x1a",
        "\x22",
        "*",
        "2",
        "j",
        "\n\0",
        "\x22\0",
        "\x12\x03GET",
        "\x1a\x08\n\x03a-b\x12\x01c",
        "\0",
    ];
    fuzz("calls of external authorization", &examples, &tokens, authorization_call::run);
}

#[test]
fn ratelimit_calls() {
    let examples: [&[u8]; 4] = [
        b"\n\x01n\x12\x01d\x1a\x14\n\x01k\x1a\x04\x08\x01\x10\x03\"\x03\n\x01l*\x04\n\x02\x1a\0",
        b"\n\x04edge\x12\x14\n\x12\n\x0bgeneric_key\x12\x03all",
        b"\n\x01d\x12\x12\n\x06\n\x01k\x12\x01v\x12\x04\x08\x05\x10\x02\x1a\0 \x01\x18\x07",
        b"\n(envoy.service.ratelimit.v3.RateLimitService",
    ];
    let tokens = [
        "\n",
        "\x12",
        "\x1a",
        "\x08",
        "\x10",
        "\x18",
        " \x01",
        "\0",
        "\x7f",
        "\u{80}\x01",
        "\n\0",
        "\x12\0",
        "\n\x01k",
    ];
    fuzz("rate limit calls", &examples, &tokens, ratelimit_call::run);
}

#[test]
fn forms() {
    let examples: [&[u8]; 3] = [
        b"application/x-www-form-urlencoded\nuser=alice&user%5Bname%5D=a+b&password=%C3%A9",
        b"multipart/form-data; boundary=b\n--b\r\nContent-Disposition: form-data; name=\"user\"\r\n\r\nalice\r\n--b--\r\n",
        b"multipart/form-data; boundary=b\n--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"x\"\r\n\
          Content-Type: text/plain\r\n\r\nx\r\n--b\r\nContent-Disposition: form-data; name=\"user\"\r\n\r\na\r\n--b--",
    ];
    let tokens = [
        "&",
        "=",
        "%",
        "%75ser",
        "user",
        "User",
        "[",
        "]",
        "+",
        ";",
        "\r\n",
        "\n",
        "--b",
        "--",
        "\"",
        "\\",
        ": ",
        "name=",
        "filename*=",
        "Content-Transfer-Encoding: base64\r\n",
        "\0",
        "\u{e9}",
    ];
    fuzz("forms", &examples, &tokens, form::run);
}

#[test]
fn json_bodies() {
    let examples: [&[u8]; 6] = [
        b"\t\t/user\n{\"model\":\"gpt-5\",\"user\":7,\"a\":{\"b\":true}}",
        b"tools/call\tsearch\t/id\n{\"id\":1,\"method\":\"tools/call\",\"params\":{\"name\":\"search\"}}",
        b"tools/call\t=?base64?YQ==?=\t/x\n{\"id\":1,\"method\":\"tools/call\",\"params\":{\"name\":\"a\"}}",
        b"\t\t/1/id\n[{\"id\":1,\"method\":\"a\"},{\"id\":\"b\",\"result\":{}}]",
        b"tools/list\t\t/a~1b\n{\"method\":\"tools/list\",\"Method\":\"x\",\"a/b\":[1.5,null]}",
        b"\t\t/messages/0/role\n{\"max_tokens\":7,\"max_tokens\":8,\"messages\":[{\"role\":\"user\"}]}",
    ];
    let tokens = [
        "{",
        "}",
        "[",
        "]",
        "\"",
        ":",
        ",",
        "\\u0061",
        "\t",
        "\n",
        "null",
        "-1",
        "1e9",
        "true",
        "\"method\":",
        "\"Method\":\"x\",",
        "\"params\":{",
        "\"name\":\"",
        "\"id\":1,",
        "\"model\":",
        "\"stream\":1,",
        "=?base64?",
        "?=",
        "tools/call",
        "\u{17f}",
    ];
    fuzz("JSON bodies", &examples, &tokens, json_body::run);
}

#[test]
fn llm_requests_and_responses() {
    let examples: [&[u8]; 7] = [
        b"\x00{\"model\":\"m\",\"max_tokens\":7,\"n\":2,\"stream\":true,\"messages\":[{\"content\":\"hi\"}]}",
        b"\x01{\"generationConfig\":{\"maxOutputTokens\":9},\"contents\":[{\"parts\":[{\"inlineData\":{\"mimeType\":\"image/png\",\"data\":\"QUJD\"}}]}]}",
        b"\x01{\"options\":{\"num_predict\":-1},\"prompt\":[\"a\",\"b\"],\"stream_options\":{\"include_usage\":true}}",
        b"\x02data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\ndata: [DONE]\n\n",
        b"\x04event: message_start\r\ndata: {\"message\":{\"usage\":{\"input_tokens\":5,\"output_tokens\":1}}}\r\n\r\n",
        b"\x07[{\"usageMetadata\":{\"promptTokenCount\":4}},{\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"x\"}]}}]}]",
        b"\x05{\"response\":\"x\"}\n{\"done\":true,\"prompt_eval_count\":3,\"eval_count\":2}\n",
    ];
    let tokens = [
        "{",
        "}",
        "[",
        "]",
        "\"",
        ":",
        ",",
        "\\",
        "\\u0061",
        "\n",
        "\r",
        "\n\n",
        "data: ",
        "data:",
        "event: x\n",
        "null",
        "-1",
        "1e9",
        "\"usage\":",
        "\"max_tokens\":",
        "\"maxTokens\":5",
        "\"content\":\"",
        "\"type\":\"response.a.done\"",
        "\"stream\":true",
        "\u{e9}",
    ];
    fuzz("LLM requests and responses", &examples, &tokens, llm::run);
}

#[test]
fn configurations() {
    let limits: &[u8] = b"[[listener]]\naddress = \"${GIVEN}:0\"\n[limit.a]\nby = [\"ip\", \"path:id\"]\nquota = \"10/s\"\nburst = 3\nmax_wait = \"1s\"\n[limit.b]\nby = \"global\"\nalgorithm = \"concurrency\"\nquota = \"5\"\n[[route]]\nname = \"r\"\npath = \"/{id}\"\nlimits = [\"a\", \"b\"]\nrespond = { status = 200 }\n";
    let examples: [&[u8]; 5] = [
        include_bytes!("../gateway.toml"),
        limits,
        ACCESS.as_bytes(),
        include_bytes!("config/valid/everything.toml"),
        b"",
    ];
    let tokens = [
        "\"",
        "'",
        "\"\"\"",
        "[",
        "]",
        "[[",
        "{",
        "}",
        "=",
        "\n",
        "#",
        "\\",
        "${",
        "${X}",
        "${X:-",
        "0",
        "-1",
        "1e308",
        "9223372036854775807",
        "9223372036854775808",
        "\"1/s\"",
        "\"0/s\"",
        "\"1e6/month\"",
        "18446744073709551615/s",
        "\"5ms\"",
        "\"99999999999999d\"",
        "\"KiB\"",
        "true",
        "nan",
        "1979-05-27",
        "\u{e9}",
        "\u{0}",
        "\u{1f600}",
        "[limit.x]\n",
        "[[route]]\n",
        "algorithm = \"sliding-log\"\n",
        "tiers.free = { quota = \"1/s\" }\n",
        "path = \"/{*rest}\"\n",
        "by = []\n",
        "*.",
        "announce = false\n",
        "unit = \"tokens\"\n",
        "ratelimit_headers = [\"openai\", \"anthropic\"]\n",
        "include = [\"*.toml\"]\n",
        "path_regex = '/a/[0-9]+'\n",
        "path_regex = '(a{1000}){1000}'\n",
        "(?i)",
        "\\p{L}",
        "match = { headers = { x-a = { regex = 'a+' } } }\n",
        "{ present = true }",
        "{ absent = true }",
        "{ prefix = \"\" }",
        "{client_ip}",
        "{consumer}",
        "{{",
        "}}",
        "https://*.a.test",
        "https://a.test:443",
        "null",
        "10.0.0.0/33",
        "::ffff:10.0.0.1",
        "file:blocked.txt",
        "[auth.k]\nkind = \"basic\"\nusers = \"htpasswd\"\n",
        "require = [\"k\", [\"k\", \"t\"]]\n",
        "tiers.from = \"auth:x-plan\"\n",
    ];
    fuzz("configuration", &examples, &tokens, configuration::run);
}

#[test]
fn field_writer() {
    let one: Vec<u8> = (0..41).collect();
    let two: Vec<u8> = (0..82).map(|byte: u8| byte.wrapping_mul(37)).collect();
    let examples: [&[u8]; 4] = [b"", &one, &two, &[0xff; 123]];
    fuzz("field writer", &examples, &["\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}", "\u{1}"], field_writer::run);
}

#[test]
fn proxy_headers() {
    const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
    let v2 = |command: u8, family: u8, rest: &[u8]| [SIGNATURE, &[command, family, 0, rest.len() as u8], rest].concat();
    let ipv4 = [&[198, 51, 100, 1, 192, 0, 2, 1][..], &[0, 80, 1, 187]].concat();
    let ipv6: Vec<u8> = (0..36).collect();
    let with_more = v2(0x21, 0x11, &[&ipv4[..], b"\x02\x00\x04gate\x04\x00\x00"].concat());
    let examples: [&[u8]; 13] = [
        b"PROXY TCP4 198.51.100.1 192.0.2.1 12345 443\r\n",
        b"PROXY TCP4 198.51.100.1 192.0.2.1 0 65535\r\nGET / HTTP/1.1\r\n\r\n",
        // The next header is invalid, because a port has a sign.
        b"PROXY TCP4 198.51.100.1 192.0.2.1 +1 2\r\n",
        b"PROXY TCP6 2001:db8::1 2001:db8::ffff 1 2\r\n",
        b"PROXY TCP6 ::ffff:198.51.100.2 ::1 65535 1\r\n",
        b"PROXY UNKNOWN\r\n",
        b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n",
        b"PROXY UNKNOWN ffff::1 \n 2\r\n",
        &v2(0x21, 0x11, &ipv4),
        &v2(0x21, 0x21, &ipv6),
        &v2(0x20, 0x00, b""),
        &v2(0x21, 0x31, &[7; 216]),
        &with_more,
    ];
    let tokens = [
        "\r\n",
        "\r",
        "\n",
        " ",
        "  ",
        "+",
        "-",
        "0",
        "00",
        "65536",
        "PROXY ",
        "TCP4",
        "TCP6",
        "UNKNOWN",
        "::",
        "%1",
        "192.0.2.1",
        "2001:db8::1",
        "\u{0}",
        "!",
        "\u{11}",
        "\r\n\r\n\u{0}\r\nQUIT\n",
    ];
    fuzz("PROXY header", &examples, &tokens, proxy::run);
}

#[test]
fn imports_of_nginx() {
    let examples: [&[u8]; 2] =
        [include_bytes!("import/nginx/site.conf"), b"map $http_a $b { default \"\"; ~x 1; }\nserver { return 301 /; }"];
    let tokens = [
        "location = /a { proxy_pass http://b/c; }",
        "location ~* ^/(a|b)$ { return 302 $scheme://x/$1; }",
        "limit_req zone=clients burst=3 delay=1;",
        "limit_conn downloads 2;",
        "map $remote_addr $per_client { 1.2.3.4 \"\"; default $uri; }",
        "geo $limited { 10.0.0.0/8 1; }",
        "listen 443 ssl proxy_protocol;",
        "server_name *.a ~b .c;",
        "proxy_set_header X-A \"${host}{b}\";",
        "add_header X-B $uri always;",
        "set $a http://b;",
        "rewrite ^/(.*)$ /$1 permanent;",
        "${",
        "\\",
        "\"",
        "'",
        "{",
        "}",
        ";",
        "#",
        "$",
        "\n",
        "\u{1b}",
    ];
    fuzz("imports of nginx", &examples, &tokens, import::nginx);
}

/// Parts of YAML that change its structure.
const YAML_TOKENS: [&str; 20] = [
    "\n", "  ", "- ", ": ", "{", "}", "[", "]", "\"", "'", "&a ", "*a", "<<: *a", "|", "#", "---\n", "~", "0", "${",
    "\u{1b}",
];

#[test]
fn imports_of_kubernetes() {
    let examples: [&[u8]; 2] =
        [include_bytes!("import/ingress-nginx/list.yaml"), include_bytes!("import/kubernetes/ingress.yaml")];
    fuzz("imports of Kubernetes", &examples, &YAML_TOKENS, import::kubernetes);
}

#[test]
fn imports_of_kong() {
    let examples: [&[u8]; 1] = [include_bytes!("import/kong/kong.yaml")];
    fuzz("imports of Kong", &examples, &YAML_TOKENS, import::kong);
}

#[test]
fn imports_of_ratelimit() {
    let examples: [&[u8]; 2] =
        [include_bytes!("import/ratelimit/edge.yaml"), include_bytes!("import/ratelimit/configmap.yaml")];
    fuzz("imports of envoyproxy/ratelimit", &examples, &YAML_TOKENS, import::ratelimit);
}

#[test]
fn descriptor_files() {
    let all_keys: &[u8] = b"domain: edge\ndescriptors:\n- key: user\n  value: a*\n  value_to_metric: true\n  share_threshold: true\n  \
        metadata: {a: {b: [1, true]}}\n  descriptors:\n  - key: path\n    detailed_metric: true\n    quota_mode: true\n    rate_limit:\n      \
        name: n\n      unit: week\n      requests_per_unit: 4\n      replaces: [{name: m}]\n- key: free\n  shadow_mode: true\n  \
        rate_limit: {unlimited: true}\n---\ndomain: edge\ndescriptors: []\n";
    let examples: [&[u8]; 2] = [include_bytes!("import/ratelimit/edge.yaml"), all_keys];
    let words =
        ["domain: a\n", "rate_limit:", "unit: second", "requests_per_unit: 0", "unlimited: true", "replaces:", "*"];
    fuzz("files of envoyproxy/ratelimit", &examples, &[&YAML_TOKENS[..], &words].concat(), descriptor_file::run);
}

#[test]
fn imports_of_traefik() {
    let examples: [&[u8]; 2] =
        [include_bytes!("import/traefik/dynamic.yml"), include_bytes!("import/traefik/static.toml")];
    let rules = ["`", "&& ", "|| ", "!", "(", ")", "Host(`a`)", "PathRegexp(`^/(a|b)`)", "Header(`a`, `b`)"];
    fuzz("imports of Traefik", &examples, &[&YAML_TOKENS[..], &rules].concat(), import::traefik);
}
