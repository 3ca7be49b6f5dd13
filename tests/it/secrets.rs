//! Secrets in requests and in the configuration appear in no log, metric, page, trace or response (fault 40 in
//! docs/testing.md).

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::process::Command;

use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::{Redis, free_port};
use crate::support::reload::{ADMIN, ask};
use crate::support::tokens::{Key, encode, in_seconds, key_set};
use crate::support::upstream::Upstream;
use aws_lc_rs::digest::{SHA256, digest};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use prost::Message;
use serde_json::{Value, json};

/// Secrets contain this text, and nothing else does.
const MARK: &str = "planted";

/// Encoded secrets do not contain `MARK`. The test recognizes them by this many first bytes.
const START: usize = 20;

const FORMATS: [&str; 2] = ["json", "text"];

/// The secrets of the gateway's configuration, from its file or from the environment.
const OWN: [&str; 6] = [
    "planted-admin-token",
    "planted-store-password",
    "planted-store-secret",
    "planted-collector-key",
    "planted-url",
    "planted-user",
];

/// A request that contains secrets.
struct Planted {
    target: String,
    headers: Vec<(&'static str, String)>,
    secrets: Vec<String>,
}

fn planted(count: usize, signer: &Key) -> Vec<Planted> {
    let paths = ["/own", "/closed", "/up", "/gone", "/broken", "/by-token", "/nowhere", "/up%2Fodd"];
    (0..count).map(|number| one(number, paths[number / 10 % paths.len()], signer)).collect()
}

fn one(number: usize, path: &str, signer: &Key) -> Planted {
    let secret = format!("planted-{number:04}-{:x}", number.wrapping_mul(0x9e37_79b9));
    let (mut target, mut secrets) = (path.to_owned(), vec![secret.clone()]);
    let claims = json!({ "sub": secret, "exp": in_seconds(300), "iss": "planted" });
    let mut whole = |text: String| {
        secrets.extend(text.split('.').map(str::to_owned));
        text
    };
    let headers = match number % 10 {
        0 => vec![("x-api-key", secret)],
        1 => vec![("x-api-key", consumer_key(number))],
        2 => vec![("x-api-key", secret.clone()), ("x-api-key", format!("{secret}-too"))],
        3 => vec![("authorization", format!("Bearer {secret}"))],
        4 => vec![("authorization", format!("Bearer {}", whole(signer.token(&claims))))],
        5 => vec![("authorization", format!("Bearer {}x", whole(signer.token(&claims))))],
        6 => vec![("authorization", format!("Basic {}", whole(encode(format!("user:{secret}")))))],
        7 => vec![("cookie", format!("session={secret}; theme=dark"))],
        8 => {
            target = format!("{path}?api_key={secret}&token={secret}");
            vec![("x-tenant", secret)]
        }
        _ => vec![
            ("proxy-authorization", format!("Bearer {secret}")),
            ("x-cost", secret.clone()),
            ("connection", secret),
        ],
    };
    if number % 10 == 1 {
        secrets = vec![consumer_key(number)];
    }
    Planted { target, headers, secrets }
}

/// Return the API key of one of ten consumers.
fn consumer_key(number: usize) -> String {
    format!("planted-consumer-{}", number / 10 % 10)
}

fn consumers() -> String {
    let hash = |key: String| -> String {
        digest(&SHA256, key.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    };
    let one = |number: usize| {
        format!("[[consumer]]\nname = \"c{number}\"\nkeys = [\"sha256:{}\"]\n", hash(consumer_key(number * 10)))
    };
    (0..10).map(one).collect()
}

fn config(format: &str, port: u16, upstream: &Upstream, broken: &Upstream, collector: &Upstream) -> String {
    let limit = |name: &str, by: &str, rest: &str| {
        format!("[limit.{name}]\nby = \"{by}\"\nquota = \"5/day\"\nalgorithm = \"fixed-window\"\n{rest}\n")
    };
    let route = |name: &str, target: &str, limits: &str| {
        format!("[[route]]\nname = \"{name}\"\npath = \"/{name}\"\n{target}\nlimits = [{limits}]\n")
    };
    [
        format!("[log]\nformat = \"{format}\"\nlevel = \"trace\"\naccess = \"access.log\"\ntrace_endpoint = \"{}\"\n", collector.url()),
        "[admin]\naddress = \"127.0.0.1:0\"\ntoken = \"planted-admin-token\"\n".to_owned(),
        format!(
            "[store]\nurl = \"redis://default:planted-store-password@127.0.0.1:{port}/0\"\nsecret = \"planted-store-secret\"\n"
        ),
        "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_missing = \"anonymous\"\n".to_owned(),
        "[auth.tokens]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\nissuer = \"planted\"\n".to_owned(),
        "[client_ip]\ntrusted_proxies = [\"127.0.0.1/32\"]\n".to_owned(),
        limit("key", "api-key", ""),
        "[limit.closed]\nby = \"ip\"\nquota = \"1000000/day\"\non_store_error = \"deny\"\n".to_owned(),
        limit("token", "jwt:sub", ""),
        limit("tenant", "header:x-tenant", "on_missing = \"skip\""),
        limit("cookie", "cookie:session", "on_missing = \"skip\"\nshadow = true"),
        limit("query", "query:token", "on_missing = \"skip\"\ncost.request_header = \"x-cost\"\ncost.max = 9"),
        format!("[upstream.up]\nservers = [\"{}\"]\n", upstream.url()),
        format!("[upstream.broken]\nservers = [\"{}\"]\n", broken.url()),
        "[upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n".to_owned(),
        route("own", "identify = [\"keys\"]\nrespond = { status = 200 }", "\"key\", \"tenant\", \"cookie\", \"query\""),
        route("closed", "respond = { status = 200 }", "\"closed\""),
        route("up", "identify = [\"keys\"]\nupstream = \"up\"", "\"key\", \"query\""),
        route("gone", "upstream = \"gone\"", "\"tenant\""),
        route("broken", "upstream = \"broken\"", "\"tenant\""),
        route("by-token", "identify = [\"tokens\"]\nupstream = \"up\"", "\"token\""),
    ]
    .concat()
}

/// Collected output, each piece with its source.
#[derive(Default)]
struct Seen(Vec<(String, Vec<u8>)>);

impl Seen {
    fn add(&mut self, place: impl Into<String>, bytes: impl Into<Vec<u8>>) {
        self.0.push((place.into(), bytes.into()));
    }

    fn reply(&mut self, place: &str, reply: &Reply) {
        self.add(place, format!("{:?}", reply.headers));
        self.add(place, reply.body.clone());
    }

    /// Assert that the output contains no secret. All secrets contain `MARK`, except for encoded ones.
    fn assert_has_none_of(&self, secrets: &BTreeSet<String>) {
        let (marked, encoded): (Vec<_>, Vec<_>) = secrets.iter().partition(|secret| secret.contains(MARK));
        assert!(marked.len() > 800 && encoded.len() > 400, "{} and {}", marked.len(), encoded.len());
        let starts: HashSet<_> = encoded.iter().map(|secret| &secret.as_bytes()[..START]).collect();
        for (place, bytes) in &self.0 {
            let found = bytes.windows(MARK.len()).position(|part| part == MARK.as_bytes());
            let found = found.or_else(|| bytes.windows(START).position(|part| starts.contains(part)));
            if let Some(at) = found {
                let around = &bytes[at.saturating_sub(200)..bytes.len().min(at + 200)];
                panic!("a secret is in {place}: {}", String::from_utf8_lossy(around));
            }
        }
    }
}

#[test]
fn thousand_secrets_of_requests_appear_nowhere() {
    let signer = Key::ed("k");
    let requests = planted(1_000, &signer);
    let mut secrets: BTreeSet<_> = requests.iter().flat_map(|planted| planted.secrets.clone()).collect();
    // The header of a JWT is not a secret.
    secrets.remove(signer.token(&json!({})).split('.').next().unwrap());
    assert!(secrets.len() >= 1_000, "{}", secrets.len());
    secrets.extend(OWN.map(str::to_owned));
    let mut seen = Seen::default();
    for format in FORMATS {
        let port = free_port();
        let redis = Redis::start_with(port, &["--port", &port.to_string(), "--requirepass", "planted-store-password"]);
        let redis = redis.expect("a server with a password");
        let upstream = Upstream::start();
        let broken = Upstream::responding(|_| b"HTTP/1.1 planted-answer\r\n\r\n".to_vec());
        let collector = Upstream::start();
        let files = [("consumers.toml", &*consumers()), ("jwks.json", &*key_set(&[&signer]))];
        let text = config(format, port, &upstream, &broken, &collector);
        let mut gateway = Gateway::start_by_with(&text, &files, |path| {
            let mut command = binary();
            command.env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=planted-collector-key").arg("--config").arg(path);
            command
        });
        let mut statuses = BTreeSet::new();
        let mut send = |planted: &Planted, seen: &mut Seen| {
            let headers: Vec<_> = planted.headers.iter().map(|(name, value)| (*name, &**value)).collect();
            let reply = Client::connect(gateway.address).get_with(&planted.target, &headers);
            statuses.insert(reply.status);
            seen.reply("a response", &reply);
        };
        requests.iter().for_each(|planted| send(planted, &mut seen));
        let token = |said: &str| [("authorization", format!("Bearer {said}"))];
        for (path, said) in
            [("/metrics", OWN[0]), ("/readyz", OWN[0]), ("/", OWN[0]), ("/metrics", "planted-user"), ("/", "")]
        {
            let headers = token(said);
            let headers = headers.each_ref().map(|(name, value)| (*name, &**value));
            seen.reply(path, &Client::connect(gateway.admin()).get_with(path, &headers));
        }
        drop(redis);
        requests.iter().step_by(7).for_each(|planted| send(planted, &mut seen));
        eventually("the breaker opens", || gateway.log().contains("redis at"));
        gateway.terminate();
        assert!(gateway.wait().success());
        // The requests produce all of these statuses.
        for status in [200, 400, 401, 404, 429, 502, 503] {
            assert!(statuses.contains(&status), "no request has the status {status}: {statuses:?}");
        }
        let lines = fs::read_to_string(gateway.directory().join("access.log")).unwrap();
        assert_eq!(lines.lines().count(), 1_000 + 1_000_usize.div_ceil(7));
        seen.add("the access log", lines);
        seen.add("the log", gateway.log());
        let exported = collector.seen.lock().unwrap();
        assert!(exported.iter().all(|batch| batch.headers("x-key") == ["planted-collector-key"]));
        let spans = exported.iter().map(|batch| ExportTraceServiceRequest::decode(&*batch.body).unwrap());
        let spans = format!("{:?}", spans.collect::<Vec<_>>());
        assert!(spans.contains("sluicegate.decision"), "{spans}");
        seen.add("a trace", spans);
        for command in ["check", "doctor"] {
            let output = binary().arg(command).arg("--config").arg(gateway.directory().join("gateway.toml")).output();
            let output = output.unwrap();
            seen.add(command, [output.stdout, output.stderr].concat());
        }
    }
    seen.assert_has_none_of(&secrets);
}

#[test]
fn error_reports_show_no_secret() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    for faulty in [
        "[store]\nurl = \"redis://planted-user:planted/password@host:1/0\"",
        "[store]\nurl = \"redis://planted-user:planted@password@host:port/0\"",
        "[store]\nurl = \"redis+sentinel://a/m?sentinel_password=planted&typo=1\"",
        "[store]\nurl = \"redis://gw:planted@planted#rest@127.0.0.1:6379/0\"",
        "[store]\nurl = \"redis://:planted?b@127.0.0.1:6379\"",
        "[store]\nurl = \"gw:planted@127.0.0.1:6379\"",
        "[store]\npassword = \"planted\"\nsentinel = { password = \"planted\", typo = 1 }",
        "[store]\nurl = \"redis://:planted@127.0.0.1\"\npassword = \"planted\"",
        "[upstream.u]\nservers = [\"planted:planted@host:1\"]",
        "[upstream.u]\nservers = [{ url = \"http://planted:planted#@host:1\" }]",
        "[auth.a]\nkind = \"jwt\"\njwks_url = \"planted:planted@host/keys\"",
        "[notify.n]\nwebhook = \"hooks.example.com/planted\"\nsecret = \"x\"",
        "[store]\nsecret = [\"planted\"]",
        "[store]\nsekret = \"planted\"",
        "[store]\nsecret = \"planted\" + 1",
        "[admin]\naddress = \"127.0.0.1:0\"\ntokens = \"planted\"",
        "[admin]\naddress = \"0.0.0.0:1\"\ntoken = \"${NOBODY_HAS_SET_THIS}planted\"",
        "[upstream.u]\nservers = [\"http://planted:planted@host:1/path\"]",
        "[log]\ntrace_endpoint = \"http://planted:planted@host:1\"",
        "request_headers = { set = { authorization = \"Bearer planted\" }, foo = 1 }",
        "[store]\nurl = \"redis://host:port/0?pass=planted\"",
        "store = { timeout = \"x\", secret = \"planted\" }",
        "store = { timeout = \"x\", secret = \"planted",
        "[[route]]\nname = \"a\"\npath = \"a\"\nfoo = 1\nmatch = { headers = { x-a = { exact = \"b\" }, authorization = { exact = \"planted\" } }, foo = 1 }",
        "[[route]]\nname = \"a\"\npath = \"/a\"\nmatch.headers.authorization = { exact = \"planted\", foo = 1 }",
        "[[route]]\nname = \"a\"\npath = \"/a\"\nresponse_headers = { set-x = { set-cookie = \"planted\" } }",
        "[[route]]\nname = \"a\"\npath = \"/a\"\nredirect = { to = \"/b?token=planted\", foo = 1 }",
        "[server]\nmax_uri = \"http://planted@host/?pwd=planted\"",
    ] {
        let rest = "[[listener]]\naddress = \"127.0.0.1:0\"\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n";
        fs::write(&path, format!("{faulty}\n{rest}")).unwrap();
        for command in [&["check", "--config"][..], &["--config"]] {
            let output = Command::new(env!("CARGO_BIN_EXE_sluicegate")).args(command).arg(&path).output().unwrap();
            let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
            assert!(!output.status.success() && said.contains("error: "), "{faulty}:\n{said}");
            assert!(!said.contains("planted"), "{faulty}:\n{said}");
        }
    }
}

/// Collect the keys of a schema that take a string, each with the tables around it. `[]` stands for a list, `NAME` for
/// any name.
fn string_keys(schema: &Value, node: &Value, path: &[String], found: &mut Vec<Vec<String>>) {
    if path.len() > 8 {
        return;
    }
    if let Some(name) = node["$ref"].as_str() {
        return string_keys(schema, &schema["$defs"][name.trim_start_matches("#/$defs/")], path, found);
    }
    let below = |last: &str| [path, &[last.to_owned()]].concat();
    let is_string =
        node["type"] == "string" || node["type"].as_array().is_some_and(|all| all.contains(&json!("string")));
    if is_string {
        found.push(path.to_vec());
    }
    for kind in ["anyOf", "oneOf", "allOf"] {
        node[kind].as_array().into_iter().flatten().for_each(|one| string_keys(schema, one, path, found));
    }
    for (key, value) in node["properties"].as_object().into_iter().flatten() {
        string_keys(schema, value, &below(key), found);
    }
    if node["items"].is_object() {
        string_keys(schema, &node["items"], &below("[]"), found);
    }
    if node["additionalProperties"].is_object() {
        string_keys(schema, &node["additionalProperties"], &below("NAME"), found);
    }
}

/// Return a document that has this value at this path.
fn nested(path: &[String], value: &str) -> Value {
    match path.split_first() {
        None => json!(value),
        Some((first, rest)) if first == "[]" => json!([nested(rest, value)]),
        Some((first, rest)) => json!({ first: nested(rest, value) }),
    }
}

/// Return the keys that take a string, according to the schema of this file.
fn keys_of(file: &str) -> Vec<Vec<String>> {
    let path = format!("{}/docs/{file}.schema.json", env!("CARGO_MANIFEST_DIR"));
    let schema: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let mut keys = Vec::new();
    string_keys(&schema, &schema, &[], &mut keys);
    keys.sort();
    keys.dedup();
    keys
}

#[test]
fn secret_at_any_key_of_the_schema_is_not_reported() {
    let keys = keys_of("gateway");
    assert!(keys.len() > 80, "{} keys", keys.len());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    for key in &keys {
        for value in ["http://planted:planted@host/?pass=planted", "/?token=planted"] {
            // The unknown key `foo` makes sure that there is always an error.
            let mut written = nested(key, value);
            written["foo"] = json!("redis://planted@host");
            fs::write(&path, toml::to_string(&written).unwrap()).unwrap();
            for arguments in [&["check", "--offline"][..], &["check", "--offline", "--json"]] {
                let output = binary().args(arguments).arg("--config").arg(&path).output().unwrap();
                let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
                assert!(
                    !output.status.success() && (said.contains("unknown key") || said.contains(" must be ")),
                    "{key:?}:\n{said}"
                );
                assert!(!said.contains("planted"), "{key:?} = {value}:\n{said}");
            }
        }
    }
}

#[test]
fn secret_at_any_key_of_consumers_is_not_reported() {
    let keys = keys_of("consumers");
    assert!(keys.len() >= 4, "{keys:?}");
    let config = format!(
        "{ADMIN}[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
         [limit.key]\nby = \"api-key\"\nquota = \"1/s\"\ntiers = {{ gold = {{ quota = \"9/s\" }} }}\n\
         [[route]]\nname = \"own\"\npath = \"/own\"\nrespond = {{ status = 200 }}\nidentify = [\"keys\"]\nlimits = [\"key\"]\n"
    );
    let gateway = Gateway::start_with(&config, &[("consumers.toml", &consumers())]);
    let (path, file) = (gateway.directory().join("gateway.toml"), gateway.directory().join("consumers.toml"));
    let mut faults = 0;
    for key in &keys {
        let is_hash = key.iter().any(|name| name == "keys");
        for value in ["http://planted:planted@host/?pass=planted", "/?token=planted", "planted-key"] {
            // Names, tiers and quotas are not secret unless they look like a secret.
            if value == "planted-key" && !is_hash {
                continue;
            }
            let mut written = nested(key, value);
            // A consumer is validated completely only if it has a name. The unknown key `foo` makes sure that there is
            // always an error.
            if written["consumer"].is_null() {
                written["consumer"] = json!([{}]);
            }
            let consumer = &mut written["consumer"][0];
            if consumer["name"].is_null() {
                consumer["name"] = json!("acme");
            }
            written["foo"] = json!("redis://planted@host");
            fs::write(&file, toml::to_string(&written).unwrap()).unwrap();
            for arguments in [&["check", "--offline"][..], &["check", "--offline", "--json"], &[]] {
                let output = binary().args(arguments).arg("--config").arg(&path).output().unwrap();
                let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
                assert!(
                    !output.status.success() && (said.contains("unknown key") || said.contains(" must be ")),
                    "{key:?}:\n{said}"
                );
                assert!(!said.contains("planted"), "{key:?} = {value}:\n{said}");
            }
            let reply = ask(&gateway, "POST", "/api/reload");
            assert_eq!(reply.status, 422, "{key:?} = {value}: {}", reply.text());
            let shown = ask(&gateway, "GET", "/api/config");
            assert!(!shown.json()["last_error"].is_null(), "{}", shown.text());
            for reply in [reply, shown] {
                assert!(!reply.text().contains("planted"), "{key:?} = {value}:\n{}", reply.text());
            }
            faults += 1;
        }
    }
    assert!(faults > 2 * keys.len(), "{faults} of {keys:?}");
    let log = gateway.log();
    assert!(log.contains("unknown key") && !log.contains("planted"), "{log}");
}
