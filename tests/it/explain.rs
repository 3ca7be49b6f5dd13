//! `sluicegate explain`: its output matches the behaviour of the gateway, and errors explain invalid arguments.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::admin_listener::with_admin;
use crate::support::certificates::{Authority, NOW, Pair};
use crate::support::client::Client;
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::{Redis, free_port};
use crate::support::tokens::{Key, in_seconds, key_set};
use crate::support::upstream::Upstream;
use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderName, Request};
use serde_json::{Value, json};
use sluicegate::proxy::request::Peer;
use sluicegate::snapshot::CompiledConfig;
use sluicegate::tools::explain::Explainer;
use sluicegate::tools::explain::limits::RedisCounters;

/// A generator of random numbers. Its seed makes a run repeatable.
struct Random(u64);

impl Random {
    /// Return a number below `end`, computed by SplitMix64 (Steele, Lea and Flood, 2014).
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % end as u64) as usize
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn happens(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

const HOSTS: [&str; 4] = ["", "api.test", "*.test", "*.b.test"];
const PATHS: [&str; 7] =
    ["/v1/items", "/v1/items/{id}", "/v1/items/{id}/parts/{part}", "/v1/{*rest}", "/{*rest}", "/v1/items/me", "/{id}"];

/// Each element defines routes that share a path, by their methods and their required value of the header `x-version`.
/// An empty string means any. No two routes of an element are ambiguous.
const CHOICES: [&[(&str, &str)]; 4] = [
    &[("", "")],
    &[("\"GET\"", ""), ("\"POST\", \"PUT\"", "")],
    &[("", ""), ("", "2")],
    &[("\"GET\"", ""), ("\"GET\"", "1"), ("\"POST\"", "2")],
];

/// The windows are so long that no token refills while the test runs.
const LIMITS: [(&str, &str); 22] = [
    ("ip", "by = \"ip\"\nquota = \"16/day\"\n"),
    ("key", "by = \"api-key\"\nquota = \"6/day\"\non_missing = \"skip\"\ntiers = { pro = { quota = \"60/day\" } }\n"),
    ("needed", "by = \"header:x-user\"\nquota = \"10/day\"\nalgorithm = \"sliding-log\"\n"),
    ("instead", "by = \"header:x-user\"\non_missing = \"ip\"\nquota = \"8/day\"\nexempt = [\"header:x-user=root\"]\n"),
    ("pair", "by = [\"header:x-user\", \"ip\"]\non_missing = \"skip\"\nquota = \"4/day\"\n"),
    ("trial", "by = \"ip\"\nquota = \"5/day\"\nshadow = true\n"),
    ("writes", "by = \"ip\"\nquota = \"6/day\"\nmethods = [\"POST\", \"PUT\"]\ncost = 2\n"),
    ("user", "by = \"user:x-account\"\non_missing = \"ip\"\nquota = \"6/day\"\nannounce = false\n"),
    ("all", "by = [\"host\", \"method\", \"route\"]\nquota = \"40/day\"\nunit = \"tokens\"\n"),
    ("aligned", "by = [\"ip\", \"route\"]\nquota = \"30/6h\"\nalgorithm = \"fixed-window\"\n"),
    (
        "calendar",
        "by = [\"ip\", \"route\"]\nquota = \"20/month\"\nalgorithm = \"fixed-window\"\ntime_zone = \"Asia/Tokyo\"\n",
    ),
    (
        "first",
        "by = [\"ip\", \"route\"]\nquota = \"20/day\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\n",
    ),
    ("sliding", "by = [\"ip\", \"route\"]\nquota = \"20/day\"\nalgorithm = \"sliding-window\"\n"),
    ("parts", "by = [\"ip\", \"route\"]\nquota = \"20/day\"\nalgorithm = \"sliding-buckets\"\n"),
    ("refunded", "by = [\"ip\", \"route\"]\nquota = \"20/day\"\nrefund_on = [\"302\"]\n"),
    (PERMITS, "by = \"ip\"\nquota = \"3\"\nalgorithm = \"concurrency\"\n"),
    ("both", "by = [\"ip\", \"header:x-client\"]\nquota = \"9/day\"\n"),
    ("login", "by = \"basic\"\non_missing = \"skip\"\nquota = \"9/day\"\n"),
    ("subject", "by = \"jwt:sub\"\non_missing = \"skip\"\nquota = \"9/day\"\n"),
    ("tenant", "by = \"json:/tenant\"\non_missing = \"skip\"\nquota = \"9/day\"\n"),
    ("open-tenant", "by = [\"ip\", \"json:/tenant\"]\non_missing = \"ip\"\nquota = \"20/day\"\n"),
    (DEFERRED, "by = [\"ip\", \"route\"]\nquota = \"20/day\"\ncost = { response_header = \"x-tokens-used\" }\n"),
];

/// The concurrency limit, whose permits are released after the response.
const PERMITS: &str = "flight";
/// The limit whose cost is in the response of the upstream.
const DEFERRED: &str = "used";
/// The cost in the response of the upstream.
const COST_OF_RESPONSE: u64 = 3;

/// Access rules for a route. Clients have loopback addresses, or the addresses that a trusted proxy reports.
const ACCESS: [&str; 5] = [
    "",
    "",
    "",
    "deny = [\"127.0.0.3\", \"192.0.2.8/32\"]\n",
    "allow = [\"127.0.0.0/30\", \"192.0.2.0/24\"]\ndeny = [\"192.0.2.7\"]\n",
];

/// CORS policies for a route.
const CORS: [&str; 4] = [
    "",
    "",
    "cors = { origins = [\"*\"], headers = [\"*\"], max_age = \"1m\" }\n",
    "cors = { origins = [\"https://a.test\", \"https://*.b.test\"], methods = [\"*\"], credentials = true, expose = [\"x-by\"] }\n",
];

const KEYS: [&str; 4] = ["key-of-alice", "key-of-bob", "unknown-key", ""];

fn consumers() -> String {
    let hash = |key: &str| {
        let digest = digest(&SHA256, key.as_bytes());
        digest.as_ref().iter().fold("sha256:".to_owned(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        })
    };
    format!(
        "[[consumer]]\nname = \"alice\"\ntier = \"pro\"\nkeys = [\"{}\"]\n[[consumer]]\nname = \"bob\"\nkeys = [\"{}\"]\n",
        hash(KEYS[0]),
        hash(KEYS[1])
    )
}

/// Return a password file with the user `alice`, whose password is `right`.
fn password_file() -> String {
    let output = Command::new("htpasswd").args(["-nb", "-B", "-C", "4", "alice", "right"]).output();
    let output = output.expect("the test needs `htpasswd`; `make tools` installs it");
    String::from_utf8(output.stdout).unwrap()
}

fn basic_credentials(password: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("alice:{password}")))
}

/// The number of users in the password file. Each user logs in once, so that the gateway never has a cached password.
const USERS: usize = REQUESTS_PER_SEED;

/// Return a password file. The passwords of all users are `right`.
fn password_files() -> String {
    let line = password_file();
    let hash = line.trim_end().strip_prefix("alice").unwrap();
    (0..USERS).map(|number| format!("user{number}{hash}\n")).collect()
}

/// The servers and files to which a random configuration refers.
struct Environment {
    store: String,
    upstream: String,
    authentication_server: String,
    /// Folder with the certificates of the TLS listener.
    folder: PathBuf,
}

/// The providers of a route. `identify` providers do not require a credential.
const PROVIDERS: [&str; 9] = [
    "",
    "",
    "",
    "require = [\"required\"]\n",
    "require = [\"users\"]\n",
    "require = [\"tokens\"]\n",
    "require = [\"certificate\"]\n",
    "require = [\"server\"]\n",
    "require = [\"users\", \"tokens\"]\n",
];

/// Return a random configuration.
fn configuration(random: &mut Random, environment: &Environment) -> String {
    let Environment { store, upstream, authentication_server, folder } = environment;
    let path = |name: &str| folder.join(name).display().to_string();
    let unknown = random.of(&["reject", "anonymous", "accept"]);
    let mut text = format!(
        // Disable the denial cache, because a cached denial does not contain the state of the other limits.
        "{store}denial_cache = 0\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\ntls.client_ca = \"{}\"\n\
         tls.certificates = [{{ cert = \"{}\", key = \"{}\" }}]\n[server]\nworkers = 1\n[log]\nformat = \"json\"\naccess = \"access.log\"\n\
         [client_ip]\ntrusted_proxies = [\"127.0.0.2/32\", \"10.0.0.0/8\"]\n\
         [auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_unknown = \"{unknown}\"\n\
         [auth.required]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n[upstream.api]\nservers = [\"{upstream}\"]\n\
         [auth.users]\nkind = \"basic\"\nusers = \"htpasswd\"\n[auth.tokens]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\n\
         [auth.certificate]\nkind = \"client-cert\"\n[auth.server]\nkind = \"forward\"\n\
         url = \"{authentication_server}/verify\"\nrequest_headers = [\"cookie\"]\nresponse_headers = [\"x-login\"]\n",
        path("ca.pem"),
        path("server.pem"),
        path("server.key")
    );
    for (name, terms) in LIMITS {
        write!(text, "[limit.{name}]\n{terms}").unwrap();
    }
    let mut number = 0;
    for host in HOSTS {
        for path in PATHS {
            // With a probability of 50 %, a path of a host has no route of its own. Requests for it then match other
            // routes, or none.
            let choices = if random.happens(50) { random.of(&CHOICES) } else { &[] };
            for (methods, version) in choices {
                number += 1;
                let providers = random.of(&PROVIDERS);
                let is_possible = |name: &str| match name {
                    "login" => providers.contains("users"),
                    "subject" => providers.contains("tokens"),
                    // Do not combine the anonymous and the accepted keys of `identify` with other providers.
                    "key" => providers.is_empty() || providers.contains("\"required\""),
                    _ => true,
                };
                let limits: Vec<_> = LIMITS
                    .iter()
                    .map(|(name, _)| *name)
                    .filter(|name| {
                        is_possible(name) && random.happens(if matches!(*name, "login" | "subject") { 70 } else { 30 })
                    })
                    .collect();
                write!(text, "[[route]]\nname = \"r{number}\"\npath = \"{path}\"\nlimits = {limits:?}\n").unwrap();
                text +=
                    if limits.contains(&"key") && providers.is_empty() { "identify = [\"keys\"]\n" } else { providers };
                if !host.is_empty() {
                    writeln!(text, "hosts = [\"{host}\"]").unwrap();
                }
                if !methods.is_empty() {
                    writeln!(text, "methods = [{methods}]").unwrap();
                }
                if !version.is_empty() {
                    writeln!(text, "match.headers.x-version.exact = \"{version}\"").unwrap();
                }
                text += random.of(&ACCESS);
                text += random.of(&CORS);
                let rest = if path.contains("{*rest}") { "{rest}" } else { "" };
                text += &match random.below(4) {
                    0 => "respond = { status = 200, body = \"own\\n\" }\n".to_owned(),
                    1 => format!("redirect = {{ to = \"/else/{rest}\", status = 302 }}\n"),
                    2 if path.starts_with("/v1/") => "upstream = \"api\"\nstrip_prefix = \"/v1\"\n".to_owned(),
                    _ => "upstream = \"api\"\nrequest_headers = { set = { x-set = \"hidden\" }, remove = [\"x-user\"] }\n\
                          response_headers = { set = { x-by = \"us\" } }\n"
                        .to_owned(),
                };
            }
        }
    }
    text
}

/// A random request, and the client address that it comes from.
#[derive(Debug)]
struct Asked {
    from: Ipv4Addr,
    method: &'static str,
    target: String,
    headers: Vec<(&'static str, String)>,
    body: &'static str,
}

/// Bodies of requests. Only half of them are JSON.
const BODIES: [&str; 4] = ["{\"tenant\":\"a\"}", "{\"tenant\":7,\"more\":[1,2]}", "{\"tenant\":", "text"];

/// Return a random request. `user` is a user who has not logged in yet, and `token` is a valid token.
fn request(random: &mut Random, user: usize, token: &str) -> Asked {
    let segment = |random: &mut Random| random.of(&["items", "me", "7", "parts", "a%2Db", "", ".", "..", "v1"]);
    let mut target = random.of(&["/v1/items", "/v1/items/7", "/v1/items/7/parts/8", "/v1", ""]).to_owned();
    for _ in 0..random.below(3) {
        target = format!("{target}/{}", segment(random));
    }
    if target.is_empty() {
        target.push('/');
    }
    if random.happens(3) {
        target.push_str("%2f");
    }
    if random.happens(30) {
        target.push_str("?q=1&q=2");
    }
    let host = random.of(&["api.test", "API.test:8080", "x.test", "x.b.test", "other.example", "127.0.0.1", "a_b@c"]);
    let mut headers = vec![("host", host.to_owned())];
    if random.happens(60) {
        headers.push(("x-user", random.of(&["ann", "ben", "root", ""]).to_owned()));
    }
    if random.happens(40) {
        headers.push(("x-api-key", random.of(&KEYS).to_owned()));
    }
    if random.happens(40) {
        headers.push(("x-forwarded-for", random.of(&["192.0.2.7", "192.0.2.8, 10.1.2.3", "nonsense"]).to_owned()));
    }
    if random.happens(50) {
        headers.push(("x-client", random.of(&["a", "b"]).to_owned()));
    }
    match random.below(6) {
        0 => headers.push(("authorization", format!("Basic {}", STANDARD.encode(format!("user{user}:right"))))),
        1 => headers.push(("authorization", format!("Basic {}", STANDARD.encode(format!("user{user}:wrong"))))),
        2 => headers.push(("authorization", format!("Bearer {token}"))),
        3 => headers.push(("authorization", format!("Bearer {token}x"))),
        _ => {}
    }
    if random.happens(50) {
        headers.push(("cookie", random.of(&["s=ann", "s=ben", "other=1"]).to_owned()));
    }
    if random.happens(30) {
        headers.push(("x-account", random.of(&["17", "18"]).to_owned()));
    }
    if random.happens(40) {
        headers.push(("x-version", random.of(&["1", "2", "3"]).to_owned()));
    }
    if random.happens(20) {
        headers.push(("connection", "x-hop".to_owned()));
        headers.push(("x-hop", "1".to_owned()));
    }
    if random.happens(40) {
        headers.push(("origin", random.of(&["https://a.test", "https://x.b.test", "https://c.test"]).to_owned()));
    }
    if random.happens(30) {
        headers.push(("access-control-request-method", random.of(&["GET", "PUT", "DELETE"]).to_owned()));
        headers.push(("access-control-request-headers", "x-user".to_owned()));
    }
    let method = random.of(&["GET", "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]);
    let body = if matches!(method, "POST" | "PUT") && random.happens(60) { random.of(&BODIES) } else { "" };
    Asked { from: Ipv4Addr::new(127, 0, 0, random.of(&[1, 2, 3])), method, target, headers, body }
}

/// Return the explanation of a request.
fn explained(config: &CompiledConfig, remote: &RedisCounters, asked: &Asked) -> Value {
    let mut request = Request::builder().method(asked.method).uri(&asked.target);
    for (name, value) in &asked.headers {
        request = request.header(*name, value);
    }
    let peer = Peer::new(asked.from.into(), "http", config);
    let explainer = Explainer { config, counters: remote, body: asked.body.as_bytes(), max_other_routes: usize::MAX };
    serde_json::to_value(explainer.explain(&request.body(()).unwrap(), &peer)).unwrap()
}

/// Return the cost of a limit, or null if the response determines the cost.
fn known_cost(limit: &Value) -> &Value {
    if limit["limit"] == DEFERRED { &Value::Null } else { &limit["cost"] }
}

/// Return the parts of an explanation that the access log contains, in the same form as [`logged`].
fn as_logged(facts: &Value) -> Value {
    let limits = facts["limits"].as_array().unwrap().iter().filter(|limit| limit["usage"].is_object()).map(|limit| {
        let standing = &limit["usage"];
        let left =
            if standing["remaining_after"].is_null() { &standing["remaining"] } else { &standing["remaining_after"] };
        let remaining = if limit["shadow"] == true { &Value::Null } else { left };
        json!([limit["limit"], limit["identity"], known_cost(limit), standing["decision"], remaining])
    });
    let status = facts["response"]["status"].as_u64().unwrap_or(200);
    json!([
        facts["method"],
        facts["client"]["address"],
        facts["route"]["route"],
        status,
        facts["response"]["outcome"],
        limits.collect::<Vec<_>>()
    ])
}

/// Return the parts of an access log record that [`as_logged`] returns for an explanation. If no route matched, use the
/// client's address in the explanation instead of the one in the record.
fn logged(line: &Value, facts: &Value) -> Value {
    let limits = line["limits"].as_array().into_iter().flatten();
    let limits = limits.map(|limit| {
        json!([limit["limit"], limit["identity"], known_cost(limit), limit["decision"], limit["remaining"]])
    });
    let client = if line["route"].is_null() { &facts["client"]["address"] } else { &line["client"] };
    json!([line["method"], client, line["route"], line["status"], line["outcome"], limits.collect::<Vec<_>>()])
}

/// Return the headers that the upstream must receive according to the explanation.
fn upstream_headers(asked: &Asked, facts: &Value) -> BTreeSet<String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let list = |name: &str| facts["upstream"][name].as_array().unwrap().clone();
    let set: Vec<_> = list("set_headers").iter().map(|field| text(&field["name"])).collect();
    let removed: Vec<_> = list("removed_headers").iter().map(text).collect();
    let stays = |name: &&str| !set.iter().chain(&removed).any(|other| other == name);
    let kept = asked.headers.iter().filter(|(name, _)| stays(name)).map(|(name, value)| format!("{name}: {value}"));
    let changed = list("set_headers").into_iter().map(|field| {
        let name = text(&field["name"]);
        let value = match name.as_str() {
            // The explanation cannot know the generated request ID.
            "x-request-id" => "made".to_owned(),
            "x-set" => {
                assert!(field["value"].is_null(), "a configured value may be a secret");
                "hidden".to_owned()
            }
            _ => text(&field["value"]),
        };
        format!("{name}: {value}")
    });
    kept.chain(changed).map(|line| line.trim_end().to_owned()).collect()
}

fn headers_of(head: &str) -> BTreeSet<String> {
    let lines = head.lines().skip(1).filter_map(|line| line.split_once(':'));
    let lines = lines.map(|(name, value)| match name.to_ascii_lowercase() {
        id if id == "x-request-id" => format!("{id}: made"),
        name => format!("{name}: {}", value.trim()).trim_end().to_owned(),
    });
    lines.collect()
}

/// Response headers that must be in the explanation if and only if they are in the response.
const HEADERS: [&str; 14] = [
    "ratelimit",
    "ratelimit-policy",
    "retry-after",
    "location",
    "allow",
    "x-by",
    "proxy-status",
    "vary",
    "access-control-allow-origin",
    "access-control-allow-credentials",
    "access-control-allow-methods",
    "access-control-allow-headers",
    "access-control-expose-headers",
    "access-control-max-age",
];

/// A limit in a RateLimit header.
#[derive(Debug)]
struct RateLimit {
    name: String,
    remaining: u64,
    /// Seconds until the reset. A concurrency limit has no such time.
    reset: Option<u64>,
}

fn limits_of(field: &str) -> Vec<RateLimit> {
    let parse = |member: &str| {
        let (name, parameters) = member.split_once(";r=").unwrap();
        let (remaining, reset) = parameters.split_once(";t=").unzip();
        RateLimit {
            name: name.trim_matches('"').to_owned(),
            remaining: remaining.unwrap_or(parameters).parse().unwrap(),
            reset: reset.map(|seconds| seconds.parse().unwrap()),
        }
    };
    field.split(", ").map(parse).collect()
}

/// Return the remaining permits of the limit [`PERMITS`] before a request, or `None` if the limit does not apply.
fn free_permits(facts: &Value) -> Option<u64> {
    let limits = facts["limits"].as_array().unwrap();
    limits.iter().find(|limit| limit["limit"] == PERMITS)?["usage"]["remaining"].as_u64()
}

/// Check that the access log record of a request for which an authentication server decided contains the limits that the
/// explanation reports: those that the gateway checked before it called the server.
fn assert_first_call_is_logged(line: &Value, facts: &Value) {
    let logged: Vec<_> = line["limits"].as_array().into_iter().flatten().collect();
    for limit in facts["limits"].as_array().unwrap().iter().filter(|limit| limit["usage"].is_object()) {
        let found = logged.iter().find(|entry| entry["limit"] == limit["limit"]);
        let found = found.unwrap_or_else(|| panic!("{} is not logged: {line:#}\n{facts:#}", limit["limit"]));
        assert_eq!(found["identity"], limit["identity"], "{line:#}\n{facts:#}");
        assert_eq!(known_cost(found), known_cost(limit), "{line:#}\n{facts:#}");
        // If the server denied the request, the charges of the first call are kept.
        if line["outcome"] == "unauthenticated" && limit["shadow"] == false {
            assert_eq!(found["remaining"], limit["usage"]["remaining_after"], "{line:#}\n{facts:#}");
        }
    }
    if line["outcome"] == "unauthenticated" {
        let checked = facts["limits"].as_array().unwrap().iter().filter(|limit| limit["usage"].is_object());
        assert_eq!(checked.count(), logged.len(), "{line:#}\n{facts:#}");
    }
}

const REQUESTS_PER_SEED: usize = 250;

/// Compare the explanations of random requests with what the gateway does: 1,000 requests, or `REQUESTS`.
#[test]
fn explanation_matches_the_gateway_for_random_requests() {
    let requests = std::env::var("REQUESTS").map_or(1000, |requests| requests.parse().unwrap());
    let key = Key::ed("key");
    // A response to HEAD has no body.
    let upstream = Upstream::responding(|seen| {
        let body = if seen.head.starts_with("HEAD ") { "" } else { "ok" };
        format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Tokens-Used: {COST_OF_RESPONSE}\r\n\r\n{body}").into_bytes()
    });
    let server = Upstream::responding(|seen| match seen.headers("cookie")[..] {
        [cookie] if cookie.starts_with("s=") => {
            format!("HTTP/1.1 200 OK\r\nX-Login: {}\r\nContent-Length: 0\r\n\r\n", &cookie[2..]).into_bytes()
        }
        _ => b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Session\r\nContent-Length: 0\r\n\r\n".to_vec(),
    });
    let (authority, pair) = (Authority::new("ours"), Pair::server("gate.test", NOW));
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in [("server.pem", &*pair.cert), ("server.key", &pair.key), ("ca.pem", &authority.pem())] {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    let passwords = password_files();
    let (mut outcomes, mut undecided, mut denied, mut sent, mut routes) = (BTreeSet::new(), 0, 0, 0, BTreeSet::new());
    let mut announced = BTreeSet::new();
    for seed in 1..=(requests / REQUESTS_PER_SEED) as u64 {
        let random = &mut Random(seed);
        let redis = Redis::start();
        let environment = Environment {
            store: redis.store(),
            upstream: upstream.url(),
            authentication_server: server.url(),
            folder: folder.path().to_owned(),
        };
        let config = configuration(random, &environment);
        let files = [("consumers.toml", &*consumers()), ("htpasswd", &passwords), ("jwks.json", &key_set(&[&key]))];
        let gateway = Gateway::start_with(&config, &files);
        let token = key.token(&json!({ "sub": "alice", "exp": in_seconds(100_000) }));
        let file = gateway.directory().join("gateway.toml");
        let compiled = CompiledConfig::load(&file, &|_| None).unwrap();
        let remote = RedisCounters::open(&compiled).unwrap().unwrap();
        // A compiled configuration remembers a wrong password for 10 s, and then rejects it without a permit.
        let explained_again = |asked: &Asked| match asked.headers.iter().any(|(_, value)| value.starts_with("Basic ")) {
            true => explained(&CompiledConfig::load(&file, &|_| None).unwrap(), &remote, asked),
            false => explained(&compiled, &remote, asked),
        };
        let mut said = Vec::new();
        for number in 0..REQUESTS_PER_SEED {
            let asked = request(random, number, &token);
            let facts = explained(&compiled, &remote, &asked);
            assert!(facts["counters_unavailable"].is_null(), "{facts:#}");
            let (before, asked_before) = (upstream.count(), server.count());
            let headers: Vec<_> = asked.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let mut client = Client::connect_from(IpAddr::V4(asked.from), gateway.addresses()[0]);
            let reply = client.request(asked.method, &asked.target, &headers, asked.body.as_bytes());
            let is_undecided = facts["response"]["outcome"] == "undecided";
            // If a limit has just denied an equal request, the gateway denies it again without the server.
            let is_called = server.count() > asked_before;
            assert!(
                is_called == is_undecided || is_undecided && reply.status == 429,
                "seed {seed}: {asked:?}\n{facts:#}"
            );
            if is_undecided {
                undecided += 1;
                eventually("the permit of the request is released", || {
                    free_permits(&explained_again(&asked)) == free_permits(&facts)
                });
                said.push((asked, facts));
                continue;
            }
            assert_eq!(upstream.count() > before, facts["upstream"].is_object(), "seed {seed}: {asked:?}\n{facts:#}");
            if facts["upstream"].is_object() {
                sent += 1;
                let request = upstream.last();
                assert_eq!(request.target(), facts["upstream"]["target"], "seed {seed}: {asked:?}");
                assert_eq!(headers_of(&request.head), upstream_headers(&asked, &facts), "seed {seed}: {asked:?}");
            } else if asked.method != "HEAD" && reply.status != 429 {
                assert_eq!(reply.text(), facts["response"]["body"], "seed {seed}: {asked:?}");
            }
            for field in facts["response"]["headers"].as_array().unwrap() {
                let (name, value) = (field["name"].as_str().unwrap(), field["value"].as_str());
                match (name, value) {
                    // The explanation hides configured values. For these headers, check only that the response
                    // contains them.
                    (_, None) => assert!(reply.header(name).is_some(), "seed {seed}: {name} of {asked:?}"),
                    // The request comes some milliseconds after the explanation, so that the times in seconds may
                    // differ by one.
                    ("ratelimit", Some(value)) => {
                        let (said, sent) = (limits_of(value), limits_of(reply.header(name).unwrap()));
                        announced.extend(said.iter().map(|limit| limit.name.clone()));
                        let is_same = |(said, sent): (&RateLimit, &RateLimit)| match &*said.name {
                            // The upstream states the cost in a response header, which is unknown before the request
                            // is sent.
                            DEFERRED if facts["upstream"].is_object() => {
                                sent.remaining == said.remaining.saturating_sub(COST_OF_RESPONSE)
                            }
                            _ => {
                                let times = said.reset.zip(sent.reset);
                                sent.remaining == said.remaining
                                    && said.reset.is_some() == sent.reset.is_some()
                                    && times.is_none_or(|(said, sent)| said.abs_diff(sent) <= 1)
                            }
                        };
                        let names =
                            |limits: &[RateLimit]| Vec::from_iter(limits.iter().map(|limit| limit.name.clone()));
                        assert!(
                            names(&said) == names(&sent) && said.iter().zip(&sent).all(is_same),
                            "seed {seed}: {said:?}, sent {sent:?} for {asked:?}"
                        );
                    }
                    ("retry-after", Some(value)) => {
                        let (said, waited) =
                            (value.parse::<i64>().unwrap(), reply.header(name).unwrap().parse::<i64>());
                        assert!((said - waited.unwrap()).abs() <= 60, "seed {seed}: {said} s before {asked:?}");
                    }
                    (name, Some(value)) => {
                        let is_sent = reply.headers.iter().any(|(key, sent)| key == name && sent == value);
                        assert!(is_sent, "seed {seed}: {name} of {asked:?}\n{facts:#}");
                    }
                }
            }
            for name in HEADERS {
                let is_said =
                    facts["response"]["headers"].as_array().unwrap().iter().any(|field| field["name"] == name);
                assert_eq!(is_said, reply.header(name).is_some(), "seed {seed}: {name} of {asked:?}\n{facts:#}");
            }
            eventually("the permit of the request is released", || {
                free_permits(&explained_again(&asked)) == free_permits(&facts)
            });
            said.push((asked, facts));
        }
        let log = || std::fs::read_to_string(gateway.directory().join("access.log")).unwrap();
        eventually("all lines are written", || log().lines().count() >= said.len());
        for (line, (asked, facts)) in log().lines().zip(&said) {
            let line: Value = serde_json::from_str(line).unwrap();
            if facts["response"]["outcome"] == "undecided" {
                assert_first_call_is_logged(&line, facts);
                continue;
            }
            assert_eq!(logged(&line, facts), as_logged(facts), "seed {seed}: {asked:?}\n{line:#}\n{facts:#}");
            outcomes.insert(line["outcome"].as_str().unwrap().to_owned());
            routes.insert(format!("{seed} {}", line["route"]));
            denied += usize::from(line["status"] == 429);
        }
        // For three of the requests, run the command `sluicegate explain`. With the same counters in Redis, its
        // explanation must match the one of the library.
        for (asked, _) in said.iter().rev().filter(|(asked, _)| !asked.headers[0].1.contains('@')).take(3) {
            let facts = explained_again(asked);
            let mut command = binary();
            command.args(["explain", "--json", "--all", "--config"]).arg(&file);
            command.args(["--ip", &asked.from.to_string(), asked.method]);
            command.arg(format!("http://{}{}", asked.headers[0].1, asked.target));
            for (name, value) in &asked.headers[1..] {
                command.args(["-H", &format!("{name}: {value}")]);
            }
            command.args(["-d", asked.body]);
            let output = command.output().unwrap();
            let by_command: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(as_logged(&by_command), as_logged(&facts), "seed {seed}: {asked:?}");
        }
    }
    // The random requests cover denials, forwarded requests, authentication servers and routes.
    let covered = (denied > 20, sent > 40, undecided > 10, routes.len() > 30);
    assert_eq!(covered, (true, true, true, true), "{denied} denied, {sent} sent, {undecided} undecided, {routes:?}");
    // Only few random requests are admitted with a credential or a body.
    let is_rare = |name: &str| matches!(name, "key" | "login" | "subject" | "tenant" | "open-tenant");
    let in_headers = |(name, terms): &&(&str, &str)| !terms.contains("shadow") && *name != "user" && !is_rare(name);
    for (name, _) in LIMITS.iter().filter(in_headers) {
        assert!(announced.contains(*name), "{name} is not among {announced:?}");
    }
    let expected = [
        "ok",
        "rate-limited",
        "no-identity",
        "unauthenticated",
        "bad-body",
        "method-not-allowed",
        "bad-path",
        "bad-host",
        "forbidden",
        "preflight",
    ];
    for outcome in expected {
        assert!(outcomes.contains(outcome), "{outcome} is not among {outcomes:?}");
    }
}

/// `sluicegate explain` changes no counter.
#[test]
fn explain_charges_nothing() {
    let redis = Redis::start();
    let config = format!(
        "{}[[listener]]\naddress = \"127.0.0.1:0\"\n[limit.once]\nby = \"ip\"\nquota = \"1/day\"\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nlimits = [\"once\"]\nrespond = {{ status = 200 }}\n",
        redis.store()
    );
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gateway.toml");
    std::fs::write(&file, config).unwrap();
    for _ in 0..3 {
        let output = binary().args(["explain", "GET", "http://a/", "--json", "--config"]).arg(&file).output().unwrap();
        let facts: Value = serde_json::from_slice(&output.stdout).unwrap();
        let standing = &facts["limits"][0]["usage"];
        assert_eq!((&standing["remaining"], &standing["remaining_after"]), (&json!(1), &json!(0)), "{facts:#}");
        assert_eq!(redis.keys(), Vec::<String>::new());
    }
}

/// Explain costs that the gateway knows only when the response arrives, and costs that exceed the quota.
#[test]
fn deferred_costs_and_costs_that_never_fit_are_explained() {
    let redis = Redis::start();
    let upstream = Upstream::responding(|_| b"HTTP/1.1 200 OK\r\nx-used: 3\r\ncontent-length: 0\r\n\r\n".to_vec());
    let gateway = Gateway::start(&format!(
        "{}[client_ip]\ntrusted_proxies = [\"127.0.0.1/32\"]\n\
         [limit.later]\nby = \"ip\"\nquota = \"4/day\"\ncost.response_header = \"x-used\"\n\
         [limit.stated]\nby = \"ip\"\nquota = \"5/day\"\ncost.request_header = \"x-cost\"\ncost.max = 100\n\
         [upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"later\"\npath = \"/later\"\ncost = 2\nlimits = [\"later\"]\nupstream = \"u\"\n\
         [[route]]\nname = \"stated\"\npath = \"/stated\"\nlimits = [\"stated\"]\nupstream = \"u\"\n",
        redis.store(),
        upstream.url()
    ));
    let explain = |path: &str, more: &[&str]| -> Value {
        let mut command = binary();
        command.args(["explain", "--json", "--config"]).arg(gateway.directory().join("gateway.toml")).args(more);
        let output = command.args(["GET", &format!("http://a{path}")]).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    for (left, decision) in [(4, "allowed"), (1, "allowed"), (0, "denied")] {
        eventually("used tokens are charged", || explain("/later", &[])["limits"][0]["usage"]["remaining"] == left);
        let facts = explain("/later", &[]);
        let limit = &facts["limits"][0];
        assert_eq!((&limit["post_paid"], &limit["cost"]), (&json!(true), &json!(1)), "{facts:#}");
        assert_eq!(facts["decision"], decision, "{facts:#}");
        if decision == "allowed" {
            assert_eq!(limit["usage"]["remaining_after"], left, "{facts:#}");
            assert_eq!(gateway.get("/later").status, 200);
        }
    }

    let facts = explain("/stated", &["-H", "x-cost: 6"]);
    let standing = &facts["limits"][0]["usage"];
    assert_eq!((&facts["decision"], &facts["response"]["status"]), (&json!("denied"), &json!(429)), "{facts:#}");
    assert_eq!((&standing["remaining"], &standing["retry_seconds"]), (&json!(5), &Value::Null), "{facts:#}");
    let facts = explain("/stated", &["-H", "x-cost: 5"]);
    assert_eq!((&facts["decision"], &facts["limits"][0]["cost"]), (&json!("allowed"), &json!(5)), "{facts:#}");
}

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/explain")
}

/// The output for each request must equal the file with the expected output. With `UPDATE_GENERATED=1`, the test rewrites these
/// files.
#[test]
fn output_of_each_request_matches_its_file() {
    for (name, arguments) in [
        ("allowed", &["GET", "https://api.example.com/v1//users/./7?full=1", "-H", "X-Api-Key: key-of-alice"][..]),
        (
            "proxied",
            &["POST", "http://api.example.com/v1/users/7", "--ip", "10.0.0.1", "-H", "X-Forwarded-For: 192.0.2.7"],
        ),
        ("refused", &["GET", "http://api.example.com/v1/search", "-H", "X-Api-Key: unknown-key"]),
        ("strange", &["DELETE", "http://[2001:db8::1]:8080/ping", "--ip", "2001:db8::7", "--all"]),
        ("moved", &["GET", "http://www.example.com/old/page"]),
        (
            "conditions",
            &["GET", "https://api.example.com/plan?debug=1&p=x", "-H", "x-plan: gold", "-c", "routing.toml", "--all"],
        ),
        ("redirected", &["GET", "http://a.example.com/x?y", "-c", "routing.toml"]),
        ("another-listener", &["PUT", "http://a.example.com/PLAN", "--listener", "internal", "-c", "routing.toml"]),
    ] {
        let mut command = binary();
        command.current_dir(samples()).arg("explain").args(arguments).arg("--offline");
        let output = command.output().unwrap();
        let (said, wrong) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert_eq!((output.status.code(), wrong.as_str()), (Some(0), ""), "{name}");
        let expected = samples().join(format!("{name}.txt"));
        if std::env::var_os("UPDATE_GENERATED").is_some() {
            std::fs::write(&expected, &said).unwrap();
        }
        assert_eq!(said, std::fs::read_to_string(expected).unwrap(), "{name}");
        for line in said.lines() {
            assert!(line.chars().count() <= 80, "{name}: wider than 80 columns: {line}");
        }
        assert!(!said.contains("key-of"), "{name} shows a key");
    }
}

#[test]
fn invalid_arguments_are_reported() {
    for (arguments, expected) in [
        (&["GET", "/v1/users"][..], "has no host: give the whole URL, such as http://localhost/v1/users"),
        (
            &["GET", "api.example.com/v1"],
            "has no scheme: write http://api.example.com/v1 or https://api.example.com/v1",
        ),
        (&["get", "http://a/"], "write the method in upper case: GET"),
        (&["http://a/", "GET"], "write the method before the URL"),
        (&["GET", "http://a/", "-H", "x-api-key"], "-H 'x-api-key' is not a header: write -H 'name: value'"),
        (&["GET", "http://2001:db8::1/"], "an IPv6 address needs brackets in a URL"),
        (
            &["GET", "http://a/", "--ip", "192.0.2.7:80"],
            "--ip 192.0.2.7:80 is not an address: write an address such as 192.0.2.7",
        ),
        (&["GET", "http://a/", "--ip", "localhost"], "--ip localhost is not an address"),
    ] {
        let output = binary().current_dir(samples()).arg("explain").args(arguments).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && said.contains(expected), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    }
}

/// A gateway without Redis has its counters in memory. `explain` reads them from the admin listener.
#[test]
fn memory_store_counters_are_read_from_the_running_gateway() {
    let rest = "[limit.once]\nby = \"ip\"\nquota = \"3/day\"\n[[route]]\nname = \"r\"\npath = \"/\"\nlimits = [\"once\"]\n\
        respond = { status = 200 }\n";
    let gateway = Gateway::start(&with_admin(rest));
    let file = gateway.directory().join("gateway.toml");
    let explain = |file: &Path| -> Value {
        let output = binary().args(["explain", "GET", "http://a/", "--json", "--config"]).arg(file).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    // The admin address in the file is `127.0.0.1:0`, so `explain` does not know the port.
    let facts = explain(&file);
    assert!(
        facts["counters_unavailable"].as_str().unwrap().contains("in the memory of the running gateway"),
        "{facts:#}"
    );
    assert_eq!((&facts["decision"], &facts["limits"][0]["effective_quota"]["quota"]), (&Value::Null, &json!("3/day")));
    let text = std::fs::read_to_string(&file).unwrap();
    // Write a copy of the file with the port, because the gateway would reload a change of its own file.
    let file = gateway.directory().join("asked.toml");
    std::fs::write(&file, text.replacen("127.0.0.1:0", &gateway.admin().to_string(), 1)).unwrap();
    let explain = || explain(&file);
    for left in [3, 2, 1] {
        let standing = &explain()["limits"][0]["usage"];
        assert_eq!((&standing["decision"], &standing["remaining"]), (&json!("allowed"), &json!(left)));
        assert_eq!(gateway.get("/").status, 200);
    }
    let facts = explain();
    assert_eq!((&facts["decision"], &facts["response"]["status"]), (&json!("denied"), &json!(429)), "{facts:#}");
    let names: Vec<_> = facts["response"]["headers"].as_array().unwrap().iter().map(|field| &field["name"]).collect();
    assert!(names.contains(&&json!(HeaderName::from_static("retry-after").as_str())), "{names:?}");
}

/// Requests with invalid credentials are charged to limits by address. They get 401 while these limits admit them, then
/// 429.
#[test]
fn invalid_credentials_over_the_ip_limit_are_explained_as_answered() {
    let keys = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n[limit.ip]\nby = \"ip\"\nquota = \"2/day\"\n\
                algorithm = \"fixed-window\"\nstart = \"first-request\"\n[limit.key]\nby = \"api-key\"\nquota = \"9/day\"\n\
                tiers = { pro = { quota = \"60/day\" } }\n";
    for (what, limits, header) in [
        ("unknown key", "\"ip\", \"key\"", Some(("x-api-key", "unknown-key"))),
        ("the credential's limit first", "\"key\", \"ip\"", Some(("x-api-key", "unknown-key"))),
        ("no key", "\"ip\", \"key\"", None),
    ] {
        let admin = format!("[admin]\naddress = \"127.0.0.1:{}\"\n", free_port());
        let route = format!(
            "[[route]]\nname = \"r\"\npath = \"/\"\nidentify = [\"keys\"]\nlimits = [{limits}]\nrespond = {{ status = 200 }}\n"
        );
        let config = format!("{admin}{keys}{route}");
        let gateway = Gateway::start_with(&config, &[("consumers.toml", &consumers())]);
        let explained = || -> Value {
            let mut command = binary();
            command.args(["explain", "GET", "http://a/", "--json", "--config"]);
            command.arg(gateway.directory().join("gateway.toml"));
            command.args(header.iter().flat_map(|(name, value)| ["-H".to_owned(), format!("{name}: {value}")]));
            serde_json::from_slice(&command.output().unwrap().stdout).unwrap()
        };
        let headers: Vec<_> = header.into_iter().collect();
        for expected in [401, 401, 429, 429] {
            let facts = explained();
            assert_eq!(facts["response"]["status"], expected, "{what}: {facts:#}");
            assert_eq!(gateway.client().get_with("/", &headers).status, expected, "{what}");
        }
    }
}

/// Run `sluicegate explain --json` with these arguments and the configuration of a running gateway.
fn explained_by_command(gateway: &Gateway, arguments: &[&str]) -> Value {
    let mut command = binary();
    command.args(["explain", "--json", "--config"]).arg(gateway.directory().join("gateway.toml")).args(arguments);
    serde_json::from_slice(&command.output().unwrap().stdout).unwrap()
}

/// A wrong password is rejected with 401, even if a limit also needs a header that the request does not have. With the
/// right password, the missing header is the reason for the rejection, and the request is not charged.
#[test]
fn wrong_password_is_401_although_a_limit_needs_a_missing_header() {
    let redis = Redis::start();
    let gateway = Gateway::start_with(
        &format!(
            "{}[auth.users]\nkind = \"basic\"\nusers = \"htpasswd\"\n\
             [limit.pair]\nby = [\"ip\", \"header:x-client\"]\nquota = \"9/day\"\n[limit.ip]\nby = \"ip\"\nquota = \"6/day\"\n\
             [[route]]\nname = \"r\"\npath = \"/\"\nrequire = [\"users\"]\nlimits = [\"pair\", \"ip\"]\n\
             respond = {{ status = 200 }}\n",
            redis.store()
        ),
        &[("htpasswd", &password_file())],
    );
    let send = |password: &str, more: &[(&str, &str)]| {
        let authorization = basic_credentials(password);
        let headers: Vec<_> = [("authorization", authorization.as_str())].iter().chain(more).copied().collect();
        let lines: Vec<_> = headers.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        let arguments: Vec<_> =
            ["GET", "http://a/"].into_iter().chain(lines.iter().flat_map(|line| ["-H", line])).collect();
        let facts = explained_by_command(&gateway, &arguments);
        let reply = gateway.client().get_with("/", &headers);
        assert_eq!(facts["response"]["status"], reply.status, "{password} {more:?}: {facts:#}");
        let left = |name: &str| {
            let limits = facts["limits"].as_array().unwrap();
            limits.iter().find(|limit| limit["limit"] == name).unwrap()["usage"]["remaining"].as_u64()
        };
        (reply.status, left("pair"), left("ip"))
    };
    assert_eq!(send("wrong", &[]), (401, None, Some(6)));
    assert_eq!(send("right", &[]), (400, None, Some(5)));
    assert_eq!(send("wrong", &[("x-client", "a")]), (401, Some(9), Some(5)), "the 400 was refunded, the 401 was not");
    assert_eq!(send("right", &[("x-client", "a")]), (200, Some(8), Some(4)));
}

/// The limits that the gateway checks before it calls an authentication server are explained with their quota, cost and
/// usage. They include concurrency limits.
#[test]
fn limits_before_an_authentication_server_are_explained_with_their_usage() {
    let redis = Redis::start();
    let server = Upstream::start();
    let gateway = Gateway::start(&format!(
        "{}[auth.sso]\nkind = \"forward\"\nurl = \"{}/verify\"\nresponse_headers = [\"x-user\"]\n\
         [limit.flight]\nby = \"ip\"\nquota = \"2\"\nalgorithm = \"concurrency\"\n\
         [limit.user]\nby = \"auth:x-user\"\nquota = \"9/day\"\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nrequire = [\"sso\"]\nlimits = [\"flight\", \"user\"]\n\
         respond = {{ status = 200 }}\n",
        redis.store(),
        server.url()
    ));
    let facts = explained_by_command(&gateway, &["GET", "http://a/"]);
    assert_eq!(
        (&facts["response"]["outcome"], &facts["decision"]),
        (&json!("undecided"), &json!("allowed")),
        "{facts:#}"
    );
    let [flight, user] = &facts["limits"].as_array().unwrap()[..] else { panic!("{facts:#}") };
    assert_eq!((&flight["effective_quota"]["quota"], &flight["cost"]), (&json!("2"), &json!(1)), "{facts:#}");
    let usage = &flight["usage"];
    assert_eq!((&usage["remaining"], &usage["remaining_after"]), (&json!(2), &json!(1)), "{facts:#}");
    assert_eq!(
        (&user["skipped"], &user["usage"]),
        (&json!("the request is not authenticated"), &Value::Null),
        "{facts:#}"
    );
}
