//! `sluicegate replay`: log formats, reports, and decisions equal to those of the gateway.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use crate::support::client::Client;
use crate::support::gateway::{Gateway, binary};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use sluicegate::snapshot::CompiledConfig;
use sluicegate::tools::replay::format::Format;
use sluicegate::tools::replay::resolve::ReplayRequest;
use sluicegate::tools::replay::simulator::ReplayDecision;
use sluicegate::tools::replay::{LogInput, ReadProgress, Replay, ReplayObserver, ReplayOptions};

fn logs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/logs")
}

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

/// Run `sluicegate replay` in the directory of the sample logs.
fn replay(arguments: &[&str]) -> Ran {
    binary().current_dir(logs()).arg("replay").args(arguments).output().unwrap().into()
}

/// Return the JSON report of `sluicegate replay`.
fn report(arguments: &[&str]) -> Value {
    let said = replay(&[arguments, &["--json"]].concat());
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    serde_json::from_str(&said.out).unwrap()
}

/// Write a log into a new directory. Return the directory and the path of the log.
fn log(content: &[u8]) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.log");
    std::fs::write(&path, content).unwrap();
    (directory, path.to_str().unwrap().to_owned())
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Return `count` log lines, one per second, from `clients` clients in turn.
fn lines(count: u64, clients: u64) -> Vec<String> {
    let line = |number: u64| {
        let (minute, second) = (number / 60, number % 60);
        format!(
            "192.0.2.{} - - [10/Oct/2000:13:{minute:02}:{second:02} +0000] \"GET / HTTP/1.1\" 200 1\n",
            number % clients
        )
    };
    (0..count).map(line).collect()
}

/// The log format of `nginx.log`.
const NGINX: &str =
    r#"$msec $remote_addr $host "$request" $status $request_time "$http_x_api_key" "$http_x_forwarded_for""#;

const PROPOSED: [&str; 4] = ["--by", "ip", "--limit", "per-ip=10/min"];

/// The report for each sample log equals its expected file. `UPDATE_GENERATED=1` rewrites the expected files.
#[test]
fn report_of_each_format_matches_its_file() {
    for (name, arguments) in [
        ("common", vec![]),
        ("combined", vec![]),
        ("nginx", vec!["--format", NGINX]),
        ("caddy", vec![]),
        ("alb", vec![]),
        ("cloudfront", vec![]),
        ("sluicegate", vec![]),
    ] {
        let file = format!("{name}.log");
        let said = replay(&[&[file.as_str()][..], &arguments].concat());
        assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{name}");
        let expected = logs().join(format!("{name}.txt"));
        if std::env::var_os("UPDATE_GENERATED").is_some() {
            std::fs::write(&expected, &said.out).unwrap();
        }
        assert_eq!(said.out, std::fs::read_to_string(expected).unwrap(), "{name}");
        for line in said.out.lines() {
            assert!(line.chars().count() <= 80, "{name}: wider than 80 columns: {line}");
        }
    }
}

/// The fields that `replay` reads from some log lines: time, duration, client, method and target, host, and status.
#[test]
fn entries_have_the_fields_of_their_lines() {
    let cases = [
        ("combined", 1, "2000-10-10T20:55:36Z", None, "192.0.2.10", "GET /v1/search?q=gate", None, 200),
        ("common", 3, "2000-10-10T20:55:38Z", None, "2001:db8::17", "GET /v1/users/7", None, 304),
        (
            NGINX,
            0,
            "2023-11-14T22:13:20.1Z",
            Some(23_000),
            "192.0.2.10",
            "GET /v1/search?q=1",
            Some("api.example.com"),
            200,
        ),
        (
            "caddy",
            1,
            "2022-03-09T21:30:01.5Z",
            Some(100_000),
            "192.0.2.10",
            "GET /v1/search?q=\"a\"",
            Some("api.example.com:8443"),
            200,
        ),
        (
            "caddy",
            2,
            "2022-03-09T21:30:01.5Z",
            Some(200_000),
            "2001:db8::17",
            "POST /v1/search",
            Some("api.example.com"),
            201,
        ),
        (
            "alb",
            1,
            "2018-07-02T22:22:48.364Z",
            Some(11_822_641),
            "192.168.131.39",
            "GET https://www.example.com:443/v1/search?q=1",
            None,
            200,
        ),
        (
            "alb",
            3,
            "2018-11-30T22:22:48.364Z",
            Some(11_822_641),
            "2001:db8::17",
            "GET http://www.example.com:80/",
            None,
            502,
        ),
        (
            "cloudfront",
            1,
            "2019-12-04T21:02:30.75Z",
            Some(250_000),
            "192.0.2.100",
            "GET /v1/search?q=1&r=2",
            Some("api.example.com"),
            200,
        ),
        ("sluicegate", 0, "2025-11-21T14:41:32.000123Z", Some(1500), "192.0.2.10", "GET /v1/search", None, 200),
    ];
    for (name, index, at, took_us, client, request, host, status) in cases {
        let file = if name == NGINX { "nginx" } else { name };
        let text = std::fs::read_to_string(logs().join(format!("{file}.log"))).unwrap();
        let mut format = Format::from_name(name).unwrap();
        let mut entries = text.lines().filter_map(|line| {
            format.parse(line.as_bytes()).unwrap().map(|entry| {
                let request = [entry.method, b" ", &*entry.target].concat();
                (entry.time_us, entry.duration_us, entry.client, request, entry.host.map(Cow::into_owned), entry.status)
            })
        });
        let at: jiff::Timestamp = at.parse().unwrap();
        let expected = (
            at.as_microsecond() as u64,
            took_us,
            Some(client.parse().unwrap()),
            request.as_bytes().to_vec(),
            host.map(|host| host.as_bytes().to_vec()),
            Some(status),
        );
        assert_eq!(entries.nth(index).unwrap(), expected, "{name}, {index}");
    }
}

#[test]
fn report_shows_the_busiest_hours_and_clients() {
    let mut all = lines(3600, 7);
    // The request rate of one client rises far above the limit and falls again. Another client slightly exceeds the
    // limit.
    let more = |client: &str, minute: u64, count: u64| -> Vec<String> {
        let line = |number| {
            let second = number * 60 / count;
            format!("{client} - - [10/Oct/2000:13:{minute:02}:{second:02} +0000] \"GET / HTTP/1.1\" 200 1\n")
        };
        (0..count).map(line).collect()
    };
    all.extend((20..45).flat_map(|minute: u64| more("2001:db8::17", minute, 4 * (13 - minute.abs_diff(32)))));
    all.extend((40..55).flat_map(|minute| more("198.51.100.7", minute, 15)));
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("busy.log"), all.concat()).unwrap();
    let mut command = binary();
    command.current_dir(directory.path()).args(["replay", "busy.log", "--html", "busy.html"]).args(PROPOSED);
    let said: Ran = command.output().unwrap().into();
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let expected = logs().join("busy.txt");
    if std::env::var_os("UPDATE_GENERATED").is_some() {
        std::fs::write(&expected, &said.out).unwrap();
    }
    assert_eq!(said.out, std::fs::read_to_string(expected).unwrap());
    let page = std::fs::read_to_string(directory.path().join("busy.html")).unwrap();
    for part in ["<svg", "prefers-color-scheme: dark", "width=device-width", "2001:db8::", "4,501 requests"] {
        assert!(page.contains(part), "the page must contain {part}");
    }
    for part in ["http:", "https:", "<script", "@import", "url(", "src="] {
        assert!(!page.contains(part), "the page must not refer to other resources: {part}");
    }
}

#[test]
fn html_report_escapes_values_of_the_log() {
    let line = r#"192.0.2.1 - <script>alert(1)</script> [10/Oct/2000:13:00:00 +0000] "GET / HTTP/1.1" 200 1"#;
    let (directory, path) = log(format!("{line}\n{line}\n").as_bytes());
    let page = directory.path().join("page.html");
    let config = directory.path().join("gateway.toml");
    let text = r#"
[client_ip]
trusted_proxies = ["127.0.0.1"]
[[listener]]
address = "127.0.0.1:8080"
[limit.per-user]
quota = "1/min"
by = "user:x-user"
[[route]]
name = "all"
path = "/{*rest}"
limits = ["per-user"]
respond = { status = 200 }
"#;
    std::fs::write(&config, text).unwrap();
    let said = replay(&[
        &path,
        "--config",
        config.to_str().unwrap(),
        "--identity",
        "per-user=remote_user",
        "--html",
        page.to_str().unwrap(),
    ]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    assert!(said.out.contains("<script>alert(1)</script>"), "{}", said.out);
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;") && !page.contains("<script"), "{page}");
}

#[test]
fn report_masks_values_that_may_be_secrets() {
    let line = r#"1792000000.000 192.0.2.1 "GET /?token=secret-query HTTP/1.1" 200 "secret-header""#;
    let (directory, path) = log(format!("{line}\n{line}\n").as_bytes());
    let page = directory.path().join("page.html");
    let format = r#"$msec $remote_addr "$request" $status "$http_authorization""#;
    let common = [path.as_str(), "--format", format, "--limit", "per-user=1/min", "--html", page.to_str().unwrap()];
    let user = ["--identity", "per-user=http_authorization"];
    for more in [
        &["--by", "header:authorization"][..],
        &["--by", "query:token"],
        &["--by", "cookie:session", user[0], user[1]],
        &["--by", "header:x-user", user[0], user[1]],
    ] {
        let text = replay(&[&common, more].concat());
        assert_eq!((text.code, text.err.as_str()), (Some(0), ""), "{more:?} {}", text.out);
        let json = report(&[&common, more].concat());
        let worst = &json["limits"]["per-user"]["top_denied"][0];
        assert!(worst["identity"].as_str().unwrap().starts_with('#'), "{more:?} {json}");
        let page = std::fs::read_to_string(&page).unwrap();
        for shown in [text.out, json.to_string(), page] {
            assert!(!shown.contains("secret-"), "{more:?} {shown}");
        }
    }
}

#[test]
fn limits_without_an_identity_in_the_log_are_not_replayed() {
    let config = ["--config", "gateway.toml"];
    let keys = report(&[&["nginx.log", "--format", NGINX], &config[..]].concat());
    assert_eq!(keys["limits"]["per-key"]["identities"], 2, "two keys: {keys}");
    assert_eq!(keys["lines"]["no_identity"], 1, "one request without a key: {keys}");
    // `combined.log` does not contain the API key, so `replay` skips the limit `per-key`. It still replays `per-ip`.
    let unknown = report(&[&["combined.log"], &config[..]].concat());
    assert_eq!(unknown["limits"]["per-key"]["skipped"], "the header `x-api-key`");
    assert_eq!(unknown["limits"]["per-key"]["requests"], 0);
    let notes =
        unknown["limits"].as_object().unwrap().iter().map(|(name, limit)| (&**name, limit["notes"].to_string()));
    for (name, notes) in notes {
        assert_eq!(notes.contains("the log covers 6 s"), name == "per-ip", "{name}: {notes}");
    }
    assert_eq!(unknown["limits"]["per-ip"]["requests"], 4);
    let stands = report(&[&["combined.log", "--identity", "per-key=http_user_agent"], &config[..]].concat());
    assert_eq!(stands["limits"]["per-key"]["identities"], 2, "{stands}");
    // The chosen field may contain a secret key: the report shows a hash.
    let shown = stands["limits"]["per-key"]["top_denied"][0]["identity"].as_str().unwrap_or("#").to_owned();
    assert!(shown.starts_with('#'), "{shown}");
    let path = report(&[&["caddy.log", "--identity", "per-key=user_id"], &config[..]].concat());
    assert_eq!(path["limits"]["per-key"]["identities"], 1, "{path}");
    // The gateway's own log contains hashes that distinguish identities. It also contains the costs.
    let own = report(&[&["sluicegate.log"], &config[..]].concat());
    assert_eq!(own["limits"]["per-key"]["identities"], 2, "{own}");
    assert_eq!(own["limits"]["per-ip"]["identities"], 2, "{own}");
}

#[test]
fn invalid_arguments_are_reported() {
    for (arguments, expected) in [
        (&["nothing.log"][..], "nothing.log: No such file"),
        (
            &["common.log", "--config", "nothing.toml"],
            "to replay without a configuration, use: replay LOG --by ip --limit per-ip=600/min",
        ),
        (&["common.log", "--limit", "per-ipp=1/s"], "there is no limit `per-ipp`; the limits are per-ip, per-key"),
        (&["common.log", "--limit", "per-ip=fast"], "`per-ip=fast`: `fast` is not a quota"),
        (
            &["common.log", "--limit", "per-ip=100 per minute"],
            "`100 per minute` is not a quota: did you mean \"100/min\"?",
        ),
        (&["common.log", "--limit", "per-ip=1/s,burst=2"], "`per-ip` has no burst"),
        (
            &["common.log", "--by", "ip", "--limit", "per-ip=1/s,burst=0"],
            "`per-ip=1/s`: a burst of zero would deny every request: use a burst of 1 or more",
        ),
        (&["common.log", "--limit", "per-ip"], "NAME=QUOTA"),
        (
            &["common.log", "--identity", "per-key=nothing"],
            "has no field `nothing`; it has remote_addr, ident, remote_user",
        ),
        (&["common.log", "--identity", "unknown=status"], "there is no limit `unknown`"),
        (&["common.log", "--format", "iis"], "`iis` is not a format: use one of common, combined"),
        (&["common.log", "--format", "$remote_addr$status"], "are adjacent: separate them by text"),
        (&["common.log", "--format", "$remote_addr $status"], "the format has no time"),
        (&["common.log", "--by", "ip"], "--limit"),
        (&["common.log", "--by", "up", "--limit", "a=1/s"], "`up`"),
        (&["common.log", "--target", "200%"], "a share is a number from 0 % to 100 %"),
        (&["gateway.toml"], "the format of the log is unknown"),
        (&["gateway.toml", "--format", "common"], "no line of the logs could be parsed"),
    ] {
        let said = replay(arguments);
        assert_eq!(said.code, Some(2), "{arguments:?}\n{}{}", said.out, said.err);
        assert!(said.err.contains(expected), "{arguments:?}: no `{expected}` in\n{}", said.err);
    }
}

#[test]
fn logs_of_any_form_are_read_and_unreadable_lines_counted() {
    let whole = lines(60, 3).concat();
    let crlf = whole.replace('\n', "\r\n");
    let half = &whole[..whole.len() - 30];
    let junk = format!("junk\n{whole}\n\n\u{fffd}\n");
    let long = format!("{whole}{}\n", "x".repeat(2 << 20));
    for (what, content, requests, unreadable) in [
        ("plain", whole.clone().into_bytes(), 60, 0),
        ("CRLF", crlf.into_bytes(), 60, 0),
        ("compressed", gzip(whole.as_bytes()), 60, 0),
        ("two compressed in one", [gzip(whole.as_bytes()), gzip(whole.as_bytes())].concat(), 120, 0),
        ("a line that is cut off", half.as_bytes().to_vec(), 59, 1),
        ("junk between", junk.into_bytes(), 60, 2),
        ("a line that is too long", long.into_bytes(), 60, 1),
        ("nothing", Vec::new(), 0, 0),
    ] {
        let (_directory, path) = log(&content);
        let report = report(&[&[path.as_str()], &PROPOSED[..]].concat());
        assert_eq!(report["lines"]["requests"], requests, "{what}: {report}");
        assert_eq!(report["lines"]["unreadable"], unreadable, "{what}: {report}");
    }
    let (_directory, path) = log(&gzip(&lines(3000, 3).concat().into_bytes())[..4000]);
    let said = replay(&[&[path.as_str()], &PROPOSED[..]].concat());
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.out.contains("access.log cannot be read to its end"), "{}", said.out);
    let (_directory, path) = log(format!("{whole}junk\n").as_bytes());
    let said = replay(&[&[path.as_str()], &PROPOSED[..]].concat());
    assert!(said.out.replace("\n    ", " ").contains("access.log:61: not a line of this format"), "{}", said.out);
}

#[test]
fn log_is_read_from_standard_input() {
    let mut child = binary()
        .args(["replay", "-", "--json"])
        .args(PROPOSED)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&gzip(lines(60, 3).concat().as_bytes())).unwrap();
    let report: Value = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!((&report["logs"][0], &report["lines"]["requests"]), (&Value::from("stdin"), &Value::from(60)));
}

/// `replay` processes log lines in the order of their time, whatever their order in one or several files.
#[test]
fn lines_out_of_order_are_sorted() {
    let all = lines(3000, 2);
    let whole = log(all.concat().as_bytes());
    let mixed: Vec<_> = all.chunks(500).flat_map(|chunk| chunk.iter().rev().cloned()).collect();
    let mixed = log(mixed.concat().as_bytes());
    let odd: Vec<_> = all.iter().skip(1).step_by(2).cloned().collect();
    let even: Vec<_> = all.iter().step_by(2).cloned().collect();
    let (odd, even) = (log(&gzip(odd.concat().as_bytes())), log(even.concat().as_bytes()));
    let counts = |logs: &[&str]| {
        let report = report(&[logs, &PROPOSED[..]].concat());
        let limit = &report["limits"]["per-ip"];
        assert_eq!(report["lines"]["late"], 0, "{logs:?}");
        [&limit["requests"], &limit["denied"], &limit["identities"], &limit["top_denied"], &limit["series"]]
            .map(Value::clone)
    };
    let expected = counts(&[&whole.1]);
    assert!(expected[1].as_u64() > Some(100), "{}", expected[1]);
    assert_eq!(counts(&[&mixed.1]), expected, "lines out of order");
    assert_eq!(counts(&[&odd.1, &even.1]), expected, "two logs");
    assert_eq!(counts(&[&even.1, &odd.1]), expected, "two logs in reverse order");
}

/// The suggested quota meets the target denial rate, and a quota smaller by one does not.
#[test]
fn suggested_quota_is_the_smallest_within_the_target() {
    let mut all = lines(3000, 2);
    let burst = |second: u64, count: usize| {
        let line = format!("192.0.2.0 - - [10/Oct/2000:14:00:{second:02} +0000] \"GET / HTTP/1.1\" 200 1\n");
        std::iter::repeat_n(line, count)
    };
    all.extend((0..9).flat_map(|second| burst(second * 5, 40 + second as usize)));
    let (_directory, path) = log(all.concat().as_bytes());
    for algorithm in ["token-bucket", "fixed-window", "sliding-window", "sliding-log"] {
        let denied = |quota: &str| {
            let limit = format!("per-ip={quota}");
            let arguments = [&path, "--by", "ip", "--algorithm", algorithm, "--limit", &limit, "--target", "0.5%"];
            let limit = report(&arguments)["limits"]["per-ip"].clone();
            (limit["denied"].as_u64().unwrap(), limit["requests"].as_f64().unwrap(), limit["suggestion"].clone())
        };
        let (_, requests, suggestion) = denied("10/min");
        let quota = suggestion["quota"].as_str().unwrap().to_owned();
        let count: u64 = quota.strip_suffix("/min").unwrap().parse().unwrap();
        assert!(count > 10, "{algorithm}: {quota}");
        let (enough, ..) = denied(&quota);
        assert_eq!(
            Some(enough),
            suggestion["denied"].as_u64(),
            "{algorithm}: the suggested quota denies as many requests as reported"
        );
        assert!((enough as f64) < 0.005 * requests, "{algorithm}: {quota} denies {enough}");
        let (too_many, _, again) = denied(&format!("{}/min", count - 1));
        assert!(too_many as f64 >= 0.005 * requests, "{algorithm}: a quota smaller by one denies {too_many}");
        assert_eq!(
            again["quota"],
            quota.as_str(),
            "{algorithm}: the suggestion does not depend on the configured quota"
        );
        assert_eq!(
            denied("5000/min").2["quota"],
            quota.as_str(),
            "{algorithm}: the suggestion is the same for a larger configured quota"
        );
    }
}

/// A request holds its permit for the duration in the log. A failed request is refunded.
#[test]
fn refunds_and_permits_apply_when_requests_end() {
    let config = "[[listener]]\naddress = \"127.0.0.1:0\"\n\
        [limit.at-once]\nby = \"global\"\nquota = \"2\"\nalgorithm = \"concurrency\"\n\
        [limit.paid]\nby = \"global\"\nquota = \"3/hour\"\nalgorithm = \"fixed-window\"\nrefund_on = [\"5xx\"]\n\
        [[route]]\nname = \"slow\"\npath = \"/slow\"\nlimits = [\"at-once\"]\nrespond = { status = 200 }\n\
        [[route]]\nname = \"paid\"\npath = \"/paid\"\nlimits = [\"paid\"]\nrespond = { status = 200 }\n";
    let line = |end: f64, took: f64, path: &str, status: u16| {
        format!("{end:.3} {took:.3} 192.0.2.1 \"GET {path} HTTP/1.1\" {status}\n")
    };
    // Two requests run from 0 to 10 s and from 1 to 3 s. The request at 2 s is denied, the one at 3.5 s is admitted.
    let slow =
        [(10.0, 10.0), (3.0, 2.0), (2.5, 0.5), (4.0, 0.5)].map(|(end, took)| line(1e9 + end, took, "/slow", 200));
    // Two of the six requests fail and are refunded when they end. The quota of 3 is used up when the sixth begins.
    let paid =
        [(20.0, 0.1, 200), (21.0, 0.1, 502), (22.0, 0.1, 503), (23.0, 0.1, 200), (24.0, 0.1, 200), (25.0, 0.1, 200)]
            .map(|(end, took, status)| line(1e9 + end, took, "/paid", status));
    let (directory, path) = log([slow.concat(), paid.concat()].concat().as_bytes());
    let file = directory.path().join("gateway.toml");
    std::fs::write(&file, config).unwrap();
    let format = "$msec $request_time $remote_addr \"$request\" $status";
    let arguments = [path.as_str(), "--config", file.to_str().unwrap(), "--format", format];
    let with_times = report(&arguments);
    assert_eq!(with_times["limits"]["at-once"]["denied"], 1, "{with_times}");
    assert_eq!(with_times["limits"]["paid"]["denied"], 1, "{with_times}");
    let without =
        report(&[path.as_str(), "--config", arguments[2], "--format", "$msec $x $remote_addr \"$request\" $s"]);
    assert_eq!(without["limits"]["at-once"]["skipped"], "the duration of requests", "{without}");
    assert_eq!(without["limits"]["paid"]["denied"], 3, "without `refund_on`, no request is refunded: {without}");
}

/// If the log contains no keys, consumers are recognized by name, or by the hash in the gateway's own log.
#[test]
fn consumers_are_replayed_with_their_own_quotas() {
    let config = "[[listener]]\naddress = \"127.0.0.1:0\"\n[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
        [limit.plan]\nby = \"api-key\"\nquota = \"1/hour\"\nalgorithm = \"fixed-window\"\n\
        [limit.plan.tiers.pro]\nquota = \"3/hour\"\n\
        [[route]]\nname = \"all\"\npath = \"/{*rest}\"\nidentify = [\"keys\"]\nlimits = [\"plan\"]\nrespond = { status = 200 }\n";
    let key = |digit: &str| format!("sha256:{}", digit.repeat(64));
    let consumers = format!(
        "[[consumer]]\nname = \"alice\"\ntier = \"pro\"\nkeys = [\"{}\"]\n[[consumer]]\nname = \"bob\"\nkeys = [\"{}\"]\n",
        key("a"),
        key("b")
    );
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("gateway.toml"), config).unwrap();
    std::fs::write(path("consumers.toml"), consumers).unwrap();
    let config = CompiledConfig::load(&directory.path().join("gateway.toml"), &|_| None).unwrap();
    let (mut by_name, mut by_hash) = (String::new(), String::new());
    for consumer in config.auth.consumers().iter() {
        let hash = String::from_utf8(consumer.identity(&config.hasher).to_hex().to_vec()).unwrap();
        let (name, time) = (&consumer.name, "10/Oct/2000:13:55:36 -0700");
        by_name += &format!("192.0.2.1 - {name} [{time}] \"GET / HTTP/1.1\" 200 1\n").repeat(5);
        by_hash += &format!(
            "{{\"time\":971211336.5,\"client\":\"192.0.2.1\",\"method\":\"GET\",\"path\":\"/\",\"status\":200,\
             \"limits\":[{{\"limit\":\"plan\",\"identity\":\"{hash}\"}}]}}\n"
        )
        .repeat(5);
    }
    std::fs::write(path("name.log"), by_name).unwrap();
    std::fs::write(path("hash.log"), by_hash).unwrap();
    let config = path("gateway.toml");
    for arguments in [
        &[path("name.log").as_str(), "--config", &config, "--identity", "plan=remote_user"][..],
        &[path("hash.log").as_str(), "--config", &config],
    ] {
        let report = report(arguments);
        assert_eq!(report["limits"]["plan"]["allowed"], 3 + 1, "{report}");
        assert_eq!(report["limits"]["plan"]["denied"], 2 + 4, "{report}");
    }
}

/// Record each decision under the time of its request.
#[derive(Default)]
struct Decisions(BTreeMap<u64, Vec<bool>>);

impl ReplayObserver for Decisions {
    fn on_decision(&mut self, event: &ReplayRequest, said: &[ReplayDecision]) {
        self.0.entry(event.time_us).or_default().push(said.iter().all(|said| *said == ReplayDecision::Allowed));
    }
}

/// A replay of a gateway's log against the gateway's own limits repeats each decision.
#[test]
fn replay_of_its_own_log_repeats_the_decisions() {
    let limits = "[limit.window]\nby = \"ip\"\nquota = \"40/2s\"\nalgorithm = \"fixed-window\"\n\
        [limit.bucket]\nby = [\"ip\", \"path:id\"]\nquota = \"50/s\"\nburst = 20\n\
        [limit.log]\nby = \"ip\"\nquota = \"60/s\"\nalgorithm = \"sliding-log\"\n";
    let routes = "[[route]]\nname = \"both\"\npath = \"/both/{id}\"\nlimits = [\"window\", \"bucket\"]\n\
        respond = { status = 200 }\n\
        [[route]]\nname = \"bucket\"\npath = \"/bucket/{id}\"\nlimits = [\"bucket\", \"log\"]\nrespond = { status = 200 }\n";
    let config = format!("[log]\nformat = \"json\"\naccess = \"access.log\"\n{limits}{routes}");
    let mut gateway = Gateway::start(&config);
    let address = gateway.address;
    let (clients, bursts, each) = (4_u8, 8, 100);
    std::thread::scope(|scope| {
        for client in 1..=clients {
            scope.spawn(move || {
                let mut connection =
                    Client::connect_from(std::net::Ipv4Addr::new(127, 0, 0, client % 2 + 1).into(), address);
                for number in 0..bursts * each {
                    let path = if number % 3 == 0 { "bucket" } else { "both" };
                    let reply = connection.get(&format!("/{path}/{}", number % 4));
                    assert!(matches!(reply.status, 200 | 429), "{}", reply.status);
                }
            });
        }
    });
    gateway.terminate();
    assert!(gateway.wait().success());
    let path = gateway.directory().join("access.log");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut made: BTreeMap<u64, Vec<bool>> = BTreeMap::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let at = (line["decided_at"].as_f64().unwrap() * 1e6).round() as u64;
        made.entry(at).or_default().push(line["status"] == 200);
    }
    let config = CompiledConfig::load(&gateway.directory().join("gateway.toml"), &|_| None).unwrap();
    let source = || vec![LogInput::open(&path, &ReadProgress::default()).unwrap()];
    let replay = Replay::new(config, &source(), &ReplayOptions::default()).unwrap();
    let mut decisions = Decisions::default();
    let outcome = replay.run(source(), None, &mut decisions);
    assert_eq!((outcome.statistics.requests, outcome.statistics.out_of_order), (u64::from(clients) * bursts * each, 0));
    // The order of requests at the same instant is unknown, so sort their decisions before the comparison.
    for said in made.values_mut().chain(decisions.0.values_mut()) {
        said.sort_unstable();
    }
    let allowed = made.values().flatten().filter(|allowed| **allowed).count();
    let all = made.values().flatten().count();
    assert!(allowed > 100 && all - allowed > 500, "{allowed} of {all} requests were allowed");
    assert_eq!(decisions.0, made);
}

/// The report in the manual equals the actual output of `replay`.
#[test]
fn manual_shows_the_actual_report() {
    let manual = std::fs::read_to_string(logs().join("../../docs/how-to/tune-limits.md")).unwrap();
    let busy = std::fs::read_to_string(logs().join("busy.txt")).unwrap();
    assert!(manual.contains(&format!("```text\n{busy}```\n")), "{busy}");
}

/// `replay` reads the cost from the configuration. The cost that applied when the log was written does not matter.
#[test]
fn fixed_cost_is_read_from_the_configuration() {
    let config = |cost: u32| {
        format!(
            "[log]\nformat = \"json\"\naccess = \"access.log\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
             [limit.l]\nby = \"ip\"\nquota = \"10/day\"\nalgorithm = \"sliding-log\"\ncost = {cost}\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
        )
    };
    let mut gateway = Gateway::start(&config(1));
    let mut client = gateway.client();
    (0..10).for_each(|_| assert_eq!(client.get("/r").status, 200));
    gateway.terminate();
    assert!(gateway.wait().success());
    let proposed = gateway.directory().join("proposed.toml");
    let log = gateway.directory().join("access.log");
    for (cost, denied) in [(1, 0), (2, 5), (3, 7)] {
        std::fs::write(&proposed, config(cost)).unwrap();
        let report = report(&[log.to_str().unwrap(), "--config", proposed.to_str().unwrap()]);
        assert_eq!(report["limits"]["l"]["denied"], denied, "cost {cost}: {report}");
    }
}

/// If a request begins at the instant at which another one ends, the permit is free.
#[test]
fn permit_is_free_at_the_instant_at_which_its_request_ends() {
    let config = "[[listener]]\naddress = \"127.0.0.1:0\"\n\
        [limit.at-once]\nby = \"global\"\nquota = \"1\"\nalgorithm = \"concurrency\"\n\
        [[route]]\nname = \"slow\"\npath = \"/slow\"\nlimits = [\"at-once\"]\nrespond = { status = 200 }\n";
    let line = |end: f64, took: f64| format!("{end:.3} {took:.3} 192.0.2.1 \"GET /slow HTTP/1.1\" 200\n");
    // The first request takes from 0 to 2 s. The second one ends at 3 s and begins at 2 s or a millisecond earlier.
    for (took, denied) in [(1.0, 0), (1.001, 1)] {
        let (directory, path) = log((line(1e9 + 2.0, 2.0) + &line(1e9 + 3.0, took)).as_bytes());
        let file = directory.path().join("gateway.toml");
        std::fs::write(&file, config).unwrap();
        let format = "$msec $request_time $remote_addr \"$request\" $status";
        let report = report(&[path.as_str(), "--config", file.to_str().unwrap(), "--format", format]);
        assert_eq!(report["limits"]["at-once"]["denied"], denied, "{took} s: {report}");
    }
}

/// The gateway's own log already has the client address that trusted proxies reported, so `replay` does not resolve it
/// again.
#[test]
fn client_of_the_gateways_own_log_is_no_proxy() {
    let mut gateway = Gateway::start(
        "[log]\nformat = \"json\"\naccess = \"access.log\"\n[client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
         [limit.l]\nby = \"ip\"\nquota = \"2/day\"\nalgorithm = \"sliding-log\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = { status = 200 }\n",
    );
    let mut client = gateway.client();
    let statuses = [(); 3].map(|()| client.get_with("/r", &[("x-forwarded-for", "127.0.0.7")]).status);
    assert_eq!(statuses, [200, 200, 429]);
    gateway.terminate();
    assert!(gateway.wait().success());
    let [log, config] = ["access.log", "gateway.toml"].map(|name| gateway.directory().join(name).display().to_string());
    let said = replay(&[&log, "--config", &config]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(
        !(said.out + &said.err).contains("trusted proxies"),
        "no advice about trusted proxies, as the log has the client address"
    );
    assert_eq!(report(&[&log, "--config", &config])["limits"]["l"]["denied"], 1);
}

/// Requests that access rules deny, and preflight requests, are not charged. The gateway's own log records the outcome
/// of each request. For logs of other servers, the access rules and the CORS settings of the configuration apply.
#[test]
fn denied_clients_and_preflights_are_not_charged() {
    let config = "[[listener]]\naddress = \"127.0.0.1:0\"\ndeny = [\"192.0.2.77\"]\n\
        [limit.all]\nby = \"global\"\nquota = \"100/hour\"\nalgorithm = \"fixed-window\"\n\
        [[route]]\nname = \"r\"\npath = \"/\"\nlimits = [\"all\"]\nrespond = { status = 200 }\n\
        deny = [\"192.0.2.66\"]\ncors.origins = [\"https://app.example.com\"]\n";
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("gateway.toml"), config).unwrap();
    let common = |client: &str, method: &str| {
        format!("{client} - - [10/Oct/2000:13:55:36 +0000] \"{method} / HTTP/1.1\" 200 1\n")
    };
    let denied = ["192.0.2.66", "192.0.2.77"].map(|client| common(client, "GET")).concat();
    let lines = [common("192.0.2.1", "GET"), common("192.0.2.1", "OPTIONS"), denied];
    std::fs::write(path("common.log"), lines.concat()).unwrap();
    let native = |client: &str, method: &str, outcome: &str| {
        format!(
            "{{\"time\":971211336.5,\"client\":\"{client}\",\"method\":\"{method}\",\"path\":\"/\",\"status\":200,\
             \"route\":\"r\",\"outcome\":\"{outcome}\"}}\n"
        )
    };
    let lines = [
        native("192.0.2.1", "GET", "ok"),
        native("192.0.2.1", "OPTIONS", "ok"),
        native("192.0.2.1", "OPTIONS", "preflight"),
        native("192.0.2.2", "GET", "forbidden"),
        native("192.0.2.66", "GET", "ok"),
    ];
    std::fs::write(path("native.log"), lines.concat()).unwrap();
    for (log, allowed, unlimited, forbidden) in [("common.log", 1, 1, 2), ("native.log", 2, 2, 1)] {
        let report = report(&[&path(log), "--config", &path("gateway.toml")]);
        assert_eq!(report["limits"]["all"]["allowed"], allowed, "{log}: {report}");
        let lines = &report["lines"];
        let expected = (&unlimited.into(), &forbidden.into());
        assert_eq!((&lines["unlimited"], &lines["forbidden"]), expected, "{log}: {report}");
    }
}

/// If unknown hosts are blocked, requests for them are not charged, unless the log does not contain hosts.
#[test]
fn blocked_hosts_are_not_charged() {
    let config = "[[listener]]\naddress = \"127.0.0.1:0\"\n[server]\nblock_unknown_hosts = true\n\
        [limit.all]\nby = \"global\"\nquota = \"100/hour\"\nalgorithm = \"fixed-window\"\n\
        [[route]]\nname = \"r\"\npath = \"/\"\nhosts = [\"a.test\"]\nlimits = [\"all\"]\nrespond = { status = 200 }\n\
        [[route]]\nname = \"other\"\npath = \"/{*rest}\"\nlimits = [\"all\"]\nrespond = { status = 200 }\n";
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("gateway.toml"), config).unwrap();
    let line = |host: &str| format!("971186136.5 192.0.2.1 {host} \"GET /x HTTP/1.1\" 200\n");
    std::fs::write(path("hosts.log"), [line("a.test"), line("x.test")].concat()).unwrap();
    let common = "192.0.2.1 - - [10/Oct/2000:13:55:36 +0000] \"GET /x HTTP/1.1\" 200 1\n";
    std::fs::write(path("common.log"), common).unwrap();
    let format = "$msec $remote_addr $host \"$request\" $status";
    let config = path("gateway.toml");
    let report_of = |log: &str, more: &[&str]| report(&[&[&*path(log), "--config", &config], more].concat());
    let with_hosts = report_of("hosts.log", &["--format", format]);
    let without = report_of("common.log", &[]);
    for (report, allowed, no_route) in [(with_hosts, 1, 1), (without, 1, 0)] {
        assert_eq!(report["limits"]["all"]["allowed"], allowed, "{report}");
        assert_eq!(report["lines"]["no_route"], no_route, "{report}");
    }
}
