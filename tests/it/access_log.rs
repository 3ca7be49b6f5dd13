//! The access log: the fields of each record, the formats `json` and `text`, and the counter of lost records.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::support::admin_listener::{metric, with_admin};
use crate::support::client::Client;
use crate::support::frames::{Http2, RST_STREAM, frame};
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::Redis;
use crate::support::tokens::{Key, in_seconds, key_set};
use crate::support::upstream::{Upstream, read_request, serve};
use crate::support::{SetOnDrop, eventually};
use serde_json::{Value, json};

const JSON: &str = "[log]\nformat = \"json\"\naccess = \"access.log\"\n";
const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn written(gateway: &Gateway) -> String {
    fs::read_to_string(gateway.directory().join("access.log")).unwrap()
}

/// Wait until the access log contains `count` JSON records, and return them.
fn lines(gateway: &Gateway, count: usize) -> Vec<Value> {
    eventually("the lines are written", || written(gateway).lines().count() >= count);
    let lines: Vec<_> = written(gateway).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), count, "{lines:#?}");
    lines
}

#[allow(clippy::disallowed_methods)] // the test measures the system clock
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[test]
fn record_has_the_outcome_of_the_request_and_its_reason() {
    let upstream =
        Upstream::responding(|_| b"HTTP/1.1 201 Created\r\nx-used: 7\r\ncontent-length: 3\r\n\r\nabc".to_vec());
    let server = upstream.url().trim_start_matches("http://").to_owned();
    let gateway = Gateway::start(&format!(
        "{JSON}[client_ip]\ntrusted_proxies = [\"127.0.0.1/32\"]\n\
         [limit.hour]\nby = \"header:x-id\"\nquota = \"2/hour\"\nalgorithm = \"fixed-window\"\n\
         [limit.day]\nby = \"ip\"\nquota = \"1000/day\"\nalgorithm = \"fixed-window\"\n\
         [limit.trial]\nby = \"global\"\nquota = \"1/day\"\nalgorithm = \"fixed-window\"\nshadow = true\n\
         [limit.tokens]\nby = \"ip\"\nquota = \"1000/day\"\nalgorithm = \"fixed-window\"\ncost.response_header = \"x-used\"\n\
         [upstream.api]\nservers = [\"http://{server}\"]\n[upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n\
         [[route]]\nname = \"up\"\npath = \"/up/{{id}}\"\nupstream = \"api\"\nlimits = [\"hour\", \"day\", \"trial\", \"tokens\"]\n\
         [[route]]\nname = \"gone\"\npath = \"/gone\"\nupstream = \"gone\"\n\
         [[route]]\nname = \"own\"\npath = \"/own\"\nrespond = {{ status = 200 }}\n"
    ));
    let began = now();
    let mut client = gateway.client();
    let headers = [("x-id", "alice"), ("x-forwarded-for", "203.0.113.7"), ("x-request-id", "given-1")];
    let traced = [&headers[..], &[("traceparent", TRACEPARENT)]].concat();
    let statuses = [
        client.get_with("/up/1?token=planted", &traced).status,
        client.get_with("/up/2", &headers).status,
        client.get_with("/up/3", &headers).status,
        client.get("/gone").status,
        client.get("/own").status,
        client.get("/nowhere").status,
    ];
    assert_eq!(statuses, [201, 201, 429, 502, 200, 404]);
    let ended = now();
    let lines = lines(&gateway, 6);
    let line = &lines[0];
    for (field, expected) in [
        ("client", json!("203.0.113.7")),
        ("method", json!("GET")),
        ("path", json!("/up/1")),
        ("status", json!(201)),
        ("bytes", json!(3)),
        ("complete", json!(true)),
        ("route", json!("up")),
        ("outcome", json!("ok")),
        ("decision", json!("allowed")),
        ("decided_by", json!("store")),
        ("limit", json!("hour")),
        ("remaining", json!(1)),
        ("upstream", json!("api")),
        ("server", json!(server)),
        ("upstream_status", json!(201)),
        ("request_id", json!("given-1")),
        ("trace_id", json!("4bf92f3577b34da6a3ce929d0e0e4736")),
    ] {
        assert_eq!(line[field], expected, "{field} of {line:#}");
    }
    let times = ["duration_ms", "decision_ms", "upstream_ms"].map(|field| line[field].as_f64().unwrap());
    assert!(times[0] >= times[1] + times[2] && times.iter().all(|ms| *ms > 0.0), "{line:#}");
    assert!(times[0] <= (ended - began) * 1000.0, "ms: {line:#}");
    let starts: Vec<_> = lines.iter().map(|line| line["time"].as_f64().unwrap()).collect();
    assert!(starts.is_sorted() && starts[0] > began - 0.01 && starts[5] < ended + 0.01, "{began} {starts:?} {ended}");
    // For each limit, the record contains the hash of the identity that the limit counts. Different identities have
    // different hashes.
    let of = |line: &Value, place: usize| line["limits"][place].clone();
    assert_eq!(line["limits"].as_array().unwrap().len(), 4);
    let who = line["identity"].as_str().unwrap();
    assert!(who.len() == 32 && who.bytes().all(|byte| byte.is_ascii_hexdigit()), "{who}");
    assert_eq!(
        of(line, 0),
        json!({ "limit": "hour", "identity": who, "cost": 1, "decision": "allowed", "remaining": 1 })
    );
    assert_ne!(of(line, 1)["identity"], of(line, 0)["identity"]);
    assert_eq!(of(&lines[1], 0)["identity"], of(line, 0)["identity"]);
    assert_eq!(
        (&of(line, 3)["limit"], &of(line, 3)["cost"]),
        (&json!("tokens"), &json!(7)),
        "the cost in the response header `x-used`"
    );
    // The shadow limit `trial` would deny the second request.
    assert_eq!((&lines[1]["decision"], &lines[1]["shadow_denied"]), (&json!("shadow_denied"), &json!(["trial"])));
    assert_eq!(of(&lines[1], 2)["decision"], "shadow_denied");
    // The limit `hour` denies the third request. The record lists only this limit.
    let denied = &lines[2];
    assert_eq!(
        (&denied["status"], &denied["outcome"], &denied["decision"], &denied["limit"], &denied["remaining"]),
        (&json!(429), &json!("rate-limited"), &json!("denied"), &json!("hour"), &json!(0))
    );
    assert_eq!((&of(denied, 0)["decision"], &of(denied, 1)["decision"]), (&json!("denied"), &Value::Null));
    assert!(denied["upstream"].is_null() && denied["trace_id"].is_null(), "{denied:#}");
    // The gateway cannot connect to the upstream `gone`.
    let gone = &lines[3];
    assert_eq!(
        (&gone["outcome"], &gone["upstream"], &gone["server"], &gone["upstream_status"], &gone["decision"]),
        (&json!("upstream-connect-failure"), &json!("gone"), &json!("127.0.0.1:1"), &Value::Null, &Value::Null)
    );
    // Each record has a request ID, even if no upstream received the request.
    let ids: HashSet<_> = lines[3..].iter().map(|line| line["request_id"].as_str().unwrap()).collect();
    assert!(ids.len() == 3 && ids.iter().all(|id| id.len() == 36), "{ids:?}");
    assert!(!written(&gateway).contains("planted") && !written(&gateway).contains("alice"));
}

#[test]
fn record_says_who_decided_while_the_store_fails() {
    let redis = Redis::start();
    let limits = "[limit.share]\nby = \"ip\"\nquota = \"2/day\"\nalgorithm = \"fixed-window\"\n\
                  [limit.open]\nby = \"ip\"\nquota = \"2/day\"\non_store_error = \"allow\"\n\
                  [limit.closed]\nby = \"ip\"\nquota = \"2/day\"\non_store_error = \"deny\"\n";
    let route = |name: &str, limits: &str| {
        format!("[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nrespond = {{ status = 200 }}\nlimits = [{limits}]\n")
    };
    let gateway = Gateway::start(&format!(
        "{JSON}{}{limits}{}{}{}",
        redis.store(),
        route("local", "\"share\", \"open\""),
        route("open", "\"open\""),
        route("closed", "\"closed\"")
    ));
    assert_eq!(gateway.get("/local").status, 200);
    drop(redis);
    let statuses = ["/local", "/local", "/local", "/open", "/closed"].map(|path| gateway.get(path).status);
    assert_eq!(statuses, [200, 200, 429, 200, 503]);
    let lines = lines(&gateway, 6);
    let told = |line: &Value| ["decision", "decided_by"].map(|field| line[field].as_str().unwrap_or("-").to_owned());
    assert_eq!(
        lines.iter().map(told).collect::<Vec<_>>(),
        [
            ["allowed", "store"],
            ["local_allowed", "local"],
            ["local_allowed", "local"],
            ["local_denied", "local"],
            ["store_error", "local"],
            ["store_error", "-"]
        ]
        .map(|words| words.map(str::to_owned))
    );
    assert_eq!(lines[1]["limits"][1]["decision"], "store_error", "{:#}", lines[1]);
    assert_eq!(lines[5]["outcome"], "store-unavailable");
}

#[test]
fn text_format_has_the_same_fields() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "[log]\nformat = \"text\"\naccess = \"access.log\"\n[limit.hour]\nby = \"ip\"\nquota = \"1/hour\"\n\
         [upstream.api]\nservers = [\"{}\"]\n[[route]]\nname = \"up\"\npath = \"/up\"\nupstream = \"api\"\nlimits = [\"hour\"]\n",
        upstream.url()
    ));
    let mut client = gateway.client();
    assert_eq!([0, 1].map(|_| client.get_with("/up", &[("traceparent", TRACEPARENT)]).status), [200, 429]);
    eventually("the lines are written", || written(&gateway).lines().count() == 2);
    let text = written(&gateway);
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("20") && lines[0].split(' ').next().unwrap().ends_with('Z'), "{text}");
    for (line, words) in [
        (
            lines[0],
            " 127.0.0.1 GET /up 200 2 | route=up ok | decision=allowed | limit=hour remaining=0 identity=| decided_by=store|\
                     decision_ms=| upstream=api | upstream_ms=| server=127.0.0.1:| upstream_status=200 | request_id=| \
                     trace_id=4bf92f3577b34da6a3ce929d0e0e4736",
        ),
        (
            lines[1],
            " 127.0.0.1 GET /up 429 | route=up rate-limited | decision=denied | limit=hour remaining=0 | request_id=",
        ),
    ] {
        assert!(words.split('|').all(|word| line.contains(word)), "{line} lacks one of {words}");
    }
}

/// A route for each kind of credential.
#[test]
fn consumer_is_the_name_of_the_verified_client() {
    let server = Upstream::responding(|_| {
        b"HTTP/1.1 200 OK\r\nX-Login: carol\r\nX-Groups: staff\r\nContent-Length: 0\r\n\r\n".to_vec()
    });
    let key = Key::ed("ed");
    let gateway = Gateway::start_with(
        &format!(
            "[log]\naccess = {{ to = \"access.log\", fields = [\"default\", \"consumer\"] }}\n\
             [auth.tokens]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\n\
             [auth.sso]\nkind = \"forward\"\nurl = \"{}/verify\"\nresponse_headers = [\"x-name\", \"x-login\", \"x-groups\"]\n\
             [[route]]\nname = \"tokens\"\npath = \"/tokens\"\nidentify = [\"tokens\"]\nrespond = {{ status = 200 }}\n\
             [[route]]\nname = \"sso\"\npath = \"/sso\"\nrequire = [\"sso\"]\nrespond = {{ status = 200 }}\n",
            server.url()
        ),
        &[("jwks.json", &key_set(&[&key]))],
    );
    let named = format!("Bearer {}", key.token(&json!({"sub": "bob", "exp": in_seconds(300)})));
    let unnamed = format!("Bearer {}", key.token(&json!({"exp": in_seconds(300)})));
    let mut client = gateway.client();
    for (path, authorization) in
        [("/tokens", &*named), ("/tokens", &unnamed), ("/sso", &named), ("/tokens", "Basic eDp5")]
    {
        assert_eq!(client.get_with(path, &[("Authorization", authorization)]).status, 200, "{path}");
    }
    let consumers: Vec<_> = lines(&gateway, 4).iter().map(|line| line["consumer"].clone()).collect();
    assert_eq!(consumers, [json!("bob"), Value::Null, json!("carol"), Value::Null]);
}

/// Values of clients with quotes, backslashes, line breaks and characters that change how a line is shown.
const HOSTILE_AGENT: &str = "a\" 200 1 \"-\" \\x \t\u{9b}31m\u{202e}b";

#[test]
fn selected_fields_are_logged_and_replay_reads_them() {
    let upstream = Upstream::start();
    let gateway = Gateway::start_with(
        &format!(
            "[log]\naccess = {{ to = \"access.log\", fields = [\"default\", \"host\", \"scheme\", \"protocol\", \"user_agent\", \"referer\", \"consumer\", \"bytes_received\"] }}\n\
             [auth.keys]\nkind = \"api-key\"\nheader = \"x-api-key\"\nconsumers = \"consumers.toml\"\n\
             [upstream.api]\nservers = [\"{}\"]\n[upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n\
             [limit.l]\nby = \"header:user-agent\"\nquota = \"9/hour\"\n\
             [[route]]\nname = \"up\"\npath = \"/up\"\nupstream = \"api\"\nrequire = [\"keys\"]\nlimits = [\"l\"]\n\
             [[route]]\nname = \"gone\"\npath = \"/gone\"\nupstream = \"gone\"\n",
            upstream.url()
        ),
        &[(
            "consumers.toml",
            "[[consumer]]\nname = \"alice\"\nkeys = [\"sha256:c48a01f49fd0f2cc404bc3cbbc80e91457a3d41bb429a695243de4c61794155c\"]\n",
        )],
    );
    let mut client = gateway.client();
    client.send(
        format!(
            "POST /up?q=secret HTTP/1.1\r\nHost: API.test:80\r\nX-Api-Key: demo-key\r\n\
             User-Agent: {HOSTILE_AGENT}\r\nReferer: https://a.test/from?token=secret#part\r\nContent-Length: 5\r\n\r\nhello"
        )
        .as_bytes(),
    );
    assert_eq!(client.reply().unwrap().status, 200);
    assert_eq!(client.get("/gone").status, 502);
    let mut second = Http2::connect(gateway.address, &[]);
    second.get(1, "/gone");
    let lines = lines(&gateway, 3);
    let fields = ["host", "scheme", "protocol", "user_agent", "referer", "consumer", "bytes_received", "reason"];
    let found = |line: &Value| json!(fields.map(|field| line[field].clone()));
    let expected = json!(["api.test", "http", "HTTP/1.1", HOSTILE_AGENT, "https://a.test/from", "alice", 5, null]);
    assert_eq!(found(&lines[0]), expected, "{:#}", lines[0]);
    assert!(lines[0]["upstream_status"] == 200 && lines[0]["upstream_ms"].as_f64().unwrap() > 0.0, "{:#}", lines[0]);
    assert_eq!(lines[2]["protocol"], "HTTP/2.0");
    for line in &lines[1..] {
        let reason = line["reason"].as_str().unwrap();
        assert!(reason.contains("upstream `gone`") && reason.contains("onnection refused"), "{line:#}");
    }
    let log = written(&gateway);
    assert!(log.is_ascii() && !log.contains("secret"), "{log}");
    let mut command = binary();
    command.args(["replay", "--json", "--config"]).arg(gateway.directory().join("gateway.toml"));
    let output = command.arg(gateway.directory().join("access.log")).output().unwrap();
    let report = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{report}{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["limits"]["l"]["requests"], 1, "the log has the identity of the limit: {report:#}");
}

#[test]
fn only_the_selected_fields_are_logged() {
    for (fields, expected) in
        [("[\"status\", \"path\"]", vec!["path", "status"]), ("[\"host\"]", vec!["host"]), ("[\"retries\"]", vec![])]
    {
        let gateway = Gateway::start(&format!(
            "[log]\naccess = {{ to = \"access.log\", fields = {fields} }}\n\
             [[route]]\nname = \"r\"\npath = \"/\"\nrespond.status = 200\n"
        ));
        assert_eq!(gateway.client().get("/").status, 200);
        let lines = lines(&gateway, 1);
        let names: Vec<_> = lines[0].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(names, expected);
    }
}

/// A template, the line that it writes, and the format with which `replay` reads the log.
#[test]
fn templates_write_lines_that_replay_reads() {
    let template = "'$client $msec \"$method $path\" $status $user_agent $outcome $duration_ms'";
    for (format, agent, replayed) in [
        ("\"combined\"", "\"a\\x22 200 1 \\x22-\\x22 \\x5Cx \\x09\\xC2\\x9B31m\\xE2\\x80\\xAEb\"", None),
        (
            template,
            " a\\x22\\x20200\\x201\\x20\\x22-\\x22\\x20\\x5Cx\\x20\\x09\\xC2\\x9B31m\\xE2\\x80\\xAEb ok ",
            Some(template),
        ),
    ] {
        let gateway = Gateway::start(&format!(
            "[log]\naccess = {{ to = \"access.log\", format = {format} }}\n\
             [limit.l]\nby = \"header:user-agent\"\nquota = \"1/hour\"\nalgorithm = \"fixed-window\"\n\
             [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nrespond.status = 200\nlimits = [\"l\"]\n"
        ));
        let mut client = gateway.client();
        for (path, agent, status) in [("/a%22b", HOSTILE_AGENT, 200), ("/c", HOSTILE_AGENT, 429), ("/d", "curl", 200)] {
            client.send(format!("GET {path}?q=secret HTTP/1.1\r\nHost: a\r\nUser-Agent: {agent}\r\n\r\n").as_bytes());
            assert_eq!(client.reply().unwrap().status, status);
        }
        eventually("the lines are written", || written(&gateway).lines().count() == 3);
        let log = written(&gateway);
        assert!(log.is_ascii() && !log.contains("secret") && log.starts_with("127.0.0.1 "), "{log}");
        assert!(log.lines().next().unwrap().contains(agent), "{log}");
        assert!(log.contains("GET /c") && log.contains("curl"), "{log}");
        let mut command = binary();
        command.args(["replay", "--json", "--config"]).arg(gateway.directory().join("gateway.toml"));
        if let Some(format) = replayed {
            command.args(["--format", format.trim_matches('\'')]);
        }
        let output = command.arg(gateway.directory().join("access.log")).output().unwrap();
        let report = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{report}{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_str(&report).unwrap();
        let limit = &report["limits"]["l"];
        assert_eq!((&limit["requests"], &limit["denied"]), (&json!(3), &json!(1)), "{report:#}");
    }
}

/// Gives the gateway a terminal as its standard output, and copies what the gateway writes to it to a file.
const TERMINAL: &str = "
import os, sys
master, slave = os.openpty()
if os.fork() == 0:
    os.close(slave)
    with open(sys.argv[1], 'wb', 0) as out:
        try:
            while data := os.read(master, 65536):
                out.write(data)
        except OSError:
            pass
    os._exit(0)
os.close(master)
os.dup2(slave, 1)
os.execv(sys.argv[2], sys.argv[2:])
";

#[test]
fn terminal_shows_one_colored_line_per_request() {
    for (no_color, green, yellow, end) in [(None, "\u{1b}[32m", "\u{1b}[33m", "\u{1b}[0m"), (Some("1"), "", "", "")] {
        let directory = tempfile::tempdir().unwrap();
        let shown = directory.path().join("terminal");
        let config = "[log]\nlevel = \"info\"\n[limit.hour]\nby = \"ip\"\nquota = \"1/hour\"\n\
                      [[route]]\nname = \"r\"\npath = \"/{*rest}\"\nrespond.status = 200\nlimits = [\"hour\"]\n";
        let gateway = Gateway::start_by(config, |path| {
            let mut command = Command::new("python3");
            command.args(["-c", TERMINAL]).arg(&shown).arg(binary().get_program()).arg("--config").arg(path);
            match no_color {
                Some(value) => command.env("NO_COLOR", value),
                None => command.env_remove("NO_COLOR"),
            };
            command
        });
        let mut client = gateway.client();
        assert_eq!(client.get("/a").status, 200);
        client.send("GET /\u{9b}31m\u{202e}b HTTP/1.1\r\nHost: a\r\n\r\n".as_bytes());
        assert_eq!(client.reply().unwrap().status, 429);
        let text = || fs::read_to_string(&shown).unwrap_or_default();
        eventually("both lines are shown", || text().matches("\r\n").count() == 2);
        let text = text();
        let lines: Vec<_> = text.split("\r\n").collect();
        assert!(lines[0].contains(&format!("Z {green}200{end} ")), "{text:?}");
        assert!(lines[0].ends_with("ms GET /a 0B 127.0.0.1 r hour=0"), "{text:?}");
        let expected = String::from(" GET /\\xC2\\x9B31m\\xE2\\x80\\xAEb ");
        assert!(lines[1].contains(&format!("{yellow}429{end}")) && lines[1].contains(&expected), "{text:?}");
        assert!(lines[1].contains(&format!("{yellow}rate-limited{end}")), "{text:?}");
    }
}

/// The upstream never responds. The HTTP/1.1 client closes the connection, and the HTTP/2 client resets the stream.
/// C1 control characters, direction marks and separators in the target of a malformed request, for which the record has
/// the path as received.
#[test]
fn characters_that_change_how_a_line_is_shown_are_escaped_in_each_format() {
    let hidden = "\u{85}\u{9b}31m\u{202e}\u{2066}\u{61c}\u{200f}\u{feff}\u{2028}\u{2029}";
    for (format, escaped) in [("json", "\\u0085\\u009b31m\\u202e"), ("text", "%C2%85%C2%9B31m%E2%80%AE")] {
        let log = format!("[log]\naccess = \"access.log\"\nformat = \"{format}\"\nlevel = \"debug\"\n");
        let gateway = Gateway::start(&format!("{log}[[route]]\nname = \"r\"\npath = \"/\"\nrespond.status = 200\n"));
        for path in [format!("/%zz{hidden}"), format!("/é{hidden}%2f"), format!("/{hidden}")] {
            let mut client = gateway.client();
            client.send(format!("GET {path} HTTP/1.1\r\nHost: a.test\r\n\r\n").as_bytes());
            assert!(matches!(client.reply().unwrap().status, 400 | 404), "{path}");
        }
        eventually("all records are written", || written(&gateway).lines().count() == 3);
        let records = written(&gateway);
        assert!(records.contains(&format!("/%zz{escaped}")) && records.contains(&format!("/é{escaped}")), "{records}");
        for text in [&records, &gateway.log()] {
            let shown = text.chars().find(|c| hidden.contains(*c) && !c.is_ascii());
            assert_eq!(shown, None, "{format}: {text}");
        }
    }
}

#[test]
fn client_abort_before_the_response_is_logged() {
    let (seen, requests) = mpsc::channel();
    let seen = Mutex::new(seen);
    let upstream = serve(move |mut stream| {
        while let Some(request) = read_request(&mut stream) {
            seen.lock().unwrap().send(request.target().to_owned()).unwrap();
        }
    });
    let gateway = Gateway::start(&format!(
        "{JSON}[limit.hour]\nby = \"ip\"\nquota = \"9/hour\"\n[upstream.api]\nservers = [\"http://{upstream}\"]\n\
         [[route]]\nname = \"up\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\nlimits = [\"hour\"]\n"
    ));
    let mut client = gateway.client();
    client.send(b"GET /h1 HTTP/1.1\r\nhost: a\r\n\r\n");
    assert_eq!(requests.recv().unwrap(), "/h1");
    drop(client);
    lines(&gateway, 1);
    let mut client = Http2::connect(gateway.address, &[]);
    client.get(1, "/h2");
    assert_eq!(requests.recv().unwrap(), "/h2");
    const CANCEL: u32 = 8;
    client.send(&frame(RST_STREAM, 0, 1, &CANCEL.to_be_bytes())).unwrap();
    for (line, path) in lines(&gateway, 2).iter().zip(["/h1", "/h2"]) {
        let found = ["path", "status", "outcome", "complete", "bytes", "route", "decision"].map(|field| &line[field]);
        assert_eq!(json!(found), json!([path, 499, "client-aborted", false, 0, "up", "allowed"]));
    }
}

#[test]
fn stuck_reader_drops_records_that_are_counted_and_fails_no_request() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // The gateway can open a named pipe for writing only while another process has it open for reading. The test opens
    // it for reading but reads nothing.
    let stuck = OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
    let mut gateway = Gateway::start(&with_admin(&format!(
        "[log]\nformat = \"json\"\naccess = \"{}\"\n\
         [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nrespond = {{ status = 200 }}\n",
        pipe.display()
    )));
    // The requests have records of more than 24 MB. The gateway's queue, the record that it is writing, and the pipe
    // hold less than 17 MiB together.
    let (path, requests) = (format!("/{}", "x".repeat(8_000)), 3_000_u64);
    let mut client = gateway.client();
    for _ in 0..requests {
        assert_eq!(client.get(&path).status, 200);
    }
    eventually("records are lost", || metric(&gateway, "sluicegate_access_log_dropped_total") > 0.0);
    assert!(gateway.log().contains("the queue is full: records are lost"), "{}", gateway.log());
    let mut reader = OpenOptions::new().read(true).open(&pipe).unwrap();
    drop(stuck);
    let text = Arc::<Mutex<Vec<u8>>>::default();
    let sink = text.clone();
    let reading = std::thread::spawn(move || {
        let mut part = vec![0; 1 << 20];
        while let Some(length) = reader.read(&mut part).ok().filter(|length| *length > 0) {
            sink.lock().unwrap().extend_from_slice(&part[..length]);
        }
    });
    let lines = || text.lock().unwrap().iter().filter(|byte| **byte == b'\n').count() as u64;
    let dropped = || metric(&gateway, "sluicegate_access_log_dropped_total") as u64;
    eventually("every line is written or counted", || lines() + dropped() == requests);
    assert!(lines() > requests / 4 && dropped() > requests / 20, "{} written, {} dropped", lines(), dropped());
    let counted = dropped();
    gateway.terminate();
    assert!(gateway.wait().success());
    reading.join().unwrap();
    let text = String::from_utf8(text.lock().unwrap().clone()).unwrap();
    let whole = text.lines().filter(|line| serde_json::from_str::<Value>(line).is_ok()).count() as u64;
    assert_eq!(whole + counted, requests, "no record is split");
}

#[test]
fn unwritable_records_are_counted_and_do_not_flood_the_process_log() {
    let gateway = Gateway::start(&with_admin(
        "[log]\nformat = \"json\"\naccess = \"/dev/full\"\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n",
    ));
    // The writer fails once for each request, because each one waits until the record of the last one is lost.
    for number in 1..=15 {
        assert_eq!(gateway.get("/").status, 200);
        let lost = || metric(&gateway, "sluicegate_access_log_dropped_total");
        eventually("the lost record is counted", || lost() == f64::from(number));
    }
    assert_eq!(gateway.log().matches("cannot write the access log").count(), 10, "{}", gateway.log());
}

#[test]
fn renamed_file_is_reopened_without_losing_records() {
    let mut gateway = Gateway::start(&format!(
        "{JSON}[[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nrespond = {{ status = 200 }}\n"
    ));
    let folder = gateway.directory().to_owned();
    let log = folder.join("access.log");
    let (over, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for client in 0..2 {
            let (over, asked, address) = (&over, &asked, gateway.address);
            scope.spawn(move || {
                let mut connection = Client::connect(address);
                while !over.load(Ordering::SeqCst) {
                    let number = asked.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(connection.get(&format!("/{client}/{number}")).status, 200);
                }
            });
        }
        let _over = SetOnDrop(&over);
        for round in 0..20 {
            eventually("the file has content", || fs::metadata(&log).is_ok_and(|file| file.len() > 0));
            fs::rename(&log, folder.join(format!("access.log.{round}"))).unwrap();
            if round == 10 {
                // While a directory has the name of the log file, the gateway cannot create the file again.
                fs::create_dir(&log).unwrap();
                eventually("the failure is logged", || gateway.log().contains("cannot reopen the log file"));
                fs::remove_dir(&log).unwrap();
            }
        }
    });
    gateway.terminate();
    assert!(gateway.wait().success());
    let files = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path());
    let texts = files.filter(|path| name(path).starts_with("access.log")).map(|path| fs::read_to_string(path).unwrap());
    let texts: Vec<_> = texts.collect();
    assert!(texts.len() >= 20, "{} files", texts.len());
    let paths = texts.iter().flat_map(|text| text.lines()).map(|line| {
        serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{line}: {error}"))["path"].to_string()
    });
    let paths: Vec<_> = paths.collect();
    let distinct: HashSet<_> = paths.iter().collect();
    assert_eq!(
        (paths.len() as u64, distinct.len() as u64),
        (asked.load(Ordering::SeqCst), asked.load(Ordering::SeqCst))
    );
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

#[test]
fn last_records_are_written_before_the_process_ends() {
    for _ in 0..3 {
        let mut gateway =
            Gateway::start(&format!("{JSON}[[route]]\nname = \"r\"\npath = \"/\"\nrespond = {{ status = 200 }}\n"));
        let mut client = gateway.client();
        (0..200).for_each(|_| assert_eq!(client.get("/").status, 200));
        drop(client);
        gateway.terminate();
        assert!(gateway.wait().success());
        assert_eq!(written(&gateway).lines().count(), 200);
    }
}

#[test]
fn file_format_does_not_depend_on_the_terminal() {
    let config = "[log]\naccess = \"access.log\"\n[[route]]\nname = \"r\"\npath = \"/r\"\nrespond = { status = 200 }\n";
    // The command `script` gives the gateway a terminal as standard error, and copies its output to the test. `timeout`
    // kills the gateway after 60 s in case the test does not stop it.
    let on_terminal = |path: &Path| {
        let line = format!("exec timeout 60 {} --config {}", env!("CARGO_BIN_EXE_sluicegate"), path.display());
        let mut outer = Command::new("sh");
        outer.args(["-c", &format!("exec script -qefc '{line}' /dev/null >&2")]);
        outer
    };
    for mut gateway in [Gateway::start(config), Gateway::start_by(config, on_terminal)] {
        assert_eq!(gateway.get("/r").status, 200);
        let path = gateway.directory().join("access.log");
        let line = || fs::read_to_string(&path).ok().and_then(|text| Some(text.lines().next()?.to_owned()));
        eventually("the record is written", || line().is_some());
        let record = line().unwrap();
        gateway.terminate();
        gateway.wait();
        assert!(serde_json::from_str::<Value>(&record).is_ok(), "{record}");
    }
}

#[test]
fn control_characters_of_a_model_name_never_split_a_record() {
    let upstream = Upstream::responding(|_| {
        let body = "{\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}";
        let length = body.len();
        format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}")
            .into_bytes()
    });
    // All control characters, the separators of lines and paragraphs, and all kinds of white space.
    let characters: Vec<char> = ('\0'..='\u{3000}').filter(|c| c.is_control() || c.is_whitespace()).collect();
    assert!(characters.len() > 80, "{characters:?}");
    for format in ["text", "json"] {
        let gateway = Gateway::start(&format!(
            "[log]\nformat = \"{format}\"\naccess = \"access.log\"\n\
             [limit.l]\nby = \"ip\"\nquota = \"1000000/hour\"\nunit = \"tokens\"\ncost = {{ llm = \"auto\" }}\n\
             [upstream.u]\nservers = [\"{}\"]\n\
             [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nlimits = [\"l\"]\nupstream = \"u\"\n",
            upstream.url()
        ));
        let mut client = gateway.client();
        for character in &characters {
            let body = json!({"model": format!("a{character}status=200{character}"), "max_tokens": 5}).to_string();
            assert_eq!(client.request("POST", "/v1/chat/completions", &[], body.as_bytes()).status, 200);
        }
        eventually("all records are written", || written(&gateway).matches("request_id").count() == characters.len());
        let log = written(&gateway);
        // Readers of the log may treat each of these characters as the end of a line.
        let is_break = |c: char| c.is_control() || ['\u{2028}', '\u{2029}'].contains(&c);
        let records: Vec<_> = log.strip_suffix('\n').unwrap().split(is_break).collect();
        if format == "json" {
            assert_eq!(log.lines().count(), characters.len());
            for (line, character) in log.lines().zip(&characters) {
                let record: Value = serde_json::from_str(line).unwrap();
                assert_eq!(record["model"], format!("a{character}status=200{character}"));
            }
            continue;
        }
        assert_eq!(records.len(), characters.len(), "{log}");
        let fields = records[0].split_whitespace().count();
        for (record, character) in records.iter().zip(&characters) {
            assert!(record.contains(" POST /v1/chat/completions 200 "), "{character:?}: {record}");
            assert!(record.contains(" model=a_status=200_ tokens.input="), "{character:?}: {record}");
            assert_eq!(record.split_whitespace().count(), fields, "{character:?}: {record}");
        }
    }
}
