//! `sluicegate top`, `inspect`, `reset` and `override` against a running gateway.

use std::net::TcpListener;
use std::process::Output;

use crate::support::gateway::{Gateway, binary};
use crate::support::redis::free_port;
use serde_json::{Value, json};

const TOKEN: &str = "open-sesame";

/// The hash of an identity.
const HASH: &str = "0123456789abcdef0123456789abcdef";

/// Arguments that select an identity of the limit `net`.
const NET: [&str; 3] = ["--limit", "net", "ip=127.0.0.1"];

fn config(admin: &str) -> String {
    format!(
        "{admin}[limit.one]\nby = \"header:x-id\"\nalgorithm = \"fixed-window\"\nquota = \"2/3650d\"\n\
         [limit.net]\nby = \"ip\"\nquota = \"1000/min\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"one\", \"net\"]\nrespond = {{ status = 200 }}\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\n[log]\naccess = \"off\"\n"
    )
}

/// Start a gateway. The configuration file contains the port of the admin listener, so that the commands can connect to
/// it.
fn start() -> Gateway {
    let port = free_port();
    Gateway::start(&config(&format!("[admin]\naddress = \"127.0.0.1:{port}\"\ntoken = \"{TOKEN}\"\n")))
}

fn run(gateway: &Gateway, arguments: &[&str]) -> Output {
    let path = gateway.directory().join("gateway.toml");
    binary().arg("--config").arg(path).args(arguments).env_remove("SLUICEGATE_ADMIN_TOKEN").output().unwrap()
}

fn output(gateway: &Gateway, arguments: &[&str]) -> String {
    let output = run(gateway, arguments);
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success() && err.is_empty(), "{arguments:?}: {out}{err}");
    assert!(!out.contains('\u{1b}'), "no colours in a pipe: {out}");
    out
}

fn said_json(gateway: &Gateway, arguments: &[&str]) -> Value {
    let text = output(gateway, &[arguments, &["--json"]].concat());
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn statuses(gateway: &Gateway, identity: &str, times: usize) -> Vec<u16> {
    let mut client = gateway.client();
    (0..times).map(|_| client.get_with("/r", &[("x-id", identity)]).status).collect()
}

/// Return the words of the first line that contains `word`.
fn words<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    let line = text.lines().find(|line| line.split_whitespace().any(|each| each == word));
    line.unwrap_or_else(|| panic!("no {word} in\n{text}")).split_whitespace().collect()
}

#[test]
fn commands_find_and_help_a_limited_client() {
    let gateway = start();
    assert!(output(&gateway, &["top"]).contains("no denials in the last 5 minutes: net, one"));
    assert_eq!(statuses(&gateway, "alice", 5), [200, 200, 429, 429, 429]);
    let top = output(&gateway, &["top"]);
    assert!(top.starts_with("one: denied 3 in the last 5 minutes\n"), "{top}");
    assert_eq!(words(&top, "COUNT"), ["COUNT", "CLIENT", "IDENTITY"]);
    let row = words(&top, "3");
    let row = if row.len() == 3 { row } else { words(top.split_once("IDENTITY").unwrap().1, "3") };
    assert_eq!((row[0], row[1], row[2].len()), ("3", "header:x-id=(hidden)", 32), "{top}");
    let hash = row[2].to_owned();
    let seen = said_json(&gateway, &["top", "--limit", "one", "--count", "1"]);
    assert_eq!(seen["limits"][0]["identities"][0]["identity"], hash, "{seen}");

    let all = output(&gateway, &["inspect", "header:x-id=alice", "ip=127.0.0.1"]);
    assert_eq!(&words(&all, "one")[..6], ["one", "denied", "2/3650d", "0", "of", "2"], "{all}");
    assert_eq!(&words(&all, "net")[..3], ["net", "allowed", "1000/min"], "{all}");
    let one = output(&gateway, &["inspect", "--limit", "one", &hash]);
    assert_eq!(words(&one, "one")[1], "denied", "{one}");
    assert_eq!(said_json(&gateway, &["inspect", "--limit", "one", "header:x-id=alice"])["limits"][0]["remaining"], 0);

    let reset = output(&gateway, &["reset", "--limit", "one", "header:x-id=alice"]);
    assert_eq!(reset, format!("identity {hash} was reset for the limit `one`\n"));
    assert_eq!(statuses(&gateway, "alice", 3), [200, 200, 429]);

    let set = [
        "override",
        "set",
        "--limit",
        "one",
        &hash,
        "--quota",
        "3/3650d",
        "--ttl",
        "2h",
        "--note",
        "asked\u{1b}[2J for it",
    ];
    let set = output(&gateway, &set);
    assert_eq!(&words(&set, "one")[..3], ["one", &*hash, "3/3650d"], "{set}");
    assert!(set.contains("asked\\u{1b}[2J for it"), "{set}");
    assert_eq!(statuses(&gateway, "alice", 2), [200, 429]);
    let list = said_json(&gateway, &["override", "list"]);
    assert_eq!((&list["overrides"][0]["identity"], &list["max_overrides"]), (&json!(hash), &json!(1000)), "{list}");
    assert_eq!(words(&output(&gateway, &["inspect", "--limit", "one", &hash]), "one")[4], "of");
    let removed = output(&gateway, &["override", "remove", "--limit", "one", &hash]);
    assert!(removed.contains("has its standard quota again"), "{removed}");
    assert!(output(&gateway, &["override", "list"]).contains("no override"), "{removed}");
}

#[test]
fn errors_of_admin_commands_are_one_sentence() {
    let gateway = start();
    let admin = format!("http://{}", gateway.admin());
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let unreachable = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let plain = file("plain.toml", &config(""));
    let elsewhere = file("elsewhere.toml", &config(&format!("[admin]\naddress = \"{}\"\n", &unreachable[7..])));
    let bad = file("bad.toml", "[limit]\nx = 1\n");
    let proxy = format!("http://{}", gateway.address);
    for (arguments, token, code, expected) in [
        (&["--config", &plain, "top"][..], "", 1, "has no [admin]"),
        (&["--config", &elsewhere, "top"], "", 1, "cannot connect to http://127.0.0.1:"),
        (&["--config", &bad, "top"], "", 2, "bad.toml"),
        (&["top", "--admin", &unreachable], "", 1, "cannot connect to"),
        (&["top", "--admin", &admin], "", 1, "rejects the token"),
        (&["top", "--admin", &admin], "wrong", 1, "SLUICEGATE_ADMIN_TOKEN"),
        (&["top", "--admin", &admin], TOKEN, 0, ""),
        (&["top", "--admin", &proxy], TOKEN, 1, &proxy[7..]),
        (&["top", "--admin", "https://127.0.0.1"], TOKEN, 1, "--admin must be a URL such as"),
        (&["top", "--admin", "localhost"], TOKEN, 1, "--admin must be a URL such as"),
        (&["top", "--admin", &admin, "--limit", "x"], TOKEN, 1, "unknown limit `x`: the limits are `net`, `one`"),
        (
            &["reset", "--admin", &admin, "--limit", "x", "ip=127.0.0.1"],
            TOKEN,
            1,
            "unknown limit `x`: the limits are `net`, `one`",
        ),
        (&["top", "--admin", &admin, "--count", "97"], TOKEN, 1, "--count must be an integer from 1 to 96"),
        (&["inspect", "--admin", &admin, "a", "b"], TOKEN, 1, "PART=VALUE"),
        (
            &["inspect", "--admin", &admin, "acme"],
            TOKEN,
            1,
            "name the identity by PART=VALUE for each of its parts, for example api-key=CONSUMER, or by its hash",
        ),
        (
            &["inspect", "--admin", &admin, "--limit", "one", "192.0.2.7"],
            TOKEN,
            1,
            "limit `one` counts by header:x-id, not by `ip`",
        ),
        (&["inspect", "--admin", &admin, "::1"], TOKEN, 0, ""),
        (&["inspect", "--admin", &admin, "sg_live_secret"], TOKEN, 1, "for example api-key=CONSUMER, or"),
        (&["inspect", "--admin", &admin, "acme_live_secret"], TOKEN, 1, "for example api-key=CONSUMER, or"),
        (
            &["inspect", "--admin", &admin, HASH],
            TOKEN,
            1,
            "the hash of an identity is valid only for one limit: add --limit, for example sluicegate inspect --limit \
             NAME 0123456789abcdef",
        ),
        (&["inspect", "--admin", &admin, "limit=one", "header:x-id=a"], TOKEN, 1, "use the option --limit"),
        (
            &["inspect", "--admin", &admin, "api-key=acme"],
            TOKEN,
            1,
            "no limit counts by `api-key`: limit `net` counts by ip; limit `one` counts by header:x-id (http",
        ),
        (
            &["inspect", "--admin", &admin, "header:x-id="],
            TOKEN,
            1,
            "no limit counts by exactly these parts: limit `net` counts by ip; limit `one`",
        ),
        (&["inspect", "--admin", &admin, "--cost", "0", "ip=::1"], TOKEN, 1, "--cost must be an integer from 1 to"),
        (
            &[&["override", "set", "--admin", &admin], &NET[..], &["--quota", "100 per minute", "--ttl", "1h"]]
                .concat(),
            TOKEN,
            1,
            "`100 per minute` is not a quota: did you mean \"100/min\"?",
        ),
        (
            &[&["override", "set", "--admin", &admin], &NET[..], &["--quota", "many", "--ttl", "1h"]].concat(),
            TOKEN,
            1,
            "`many` is not a quota: write COUNT/UNIT",
        ),
        (
            &[&["override", "set", "--admin", &admin], &NET[..], &["--quota", "limit", "--ttl", "1h"]].concat(),
            TOKEN,
            1,
            "sluicegate: `limit` is not a quota",
        ),
        (
            &[&["override", "set", "--admin", &admin], &NET[..], &["--quota", "9/s", "--ttl", "1y"]].concat(),
            TOKEN,
            1,
            "--ttl must be a duration from 5s to 31d",
        ),
        (&["inspect", "--admin", &admin, "ip=here"], TOKEN, 1, "is not an IP address"),
        (&["inspect", "--admin", &admin], TOKEN, 2, "PART=VALUE"),
        (
            &["reset", "--admin", &admin, "--limit", "one", "ip=127.0.0.1"],
            TOKEN,
            1,
            "limit `one` counts by header:x-id, not by `ip`",
        ),
    ] {
        let output = binary().args(arguments).env("SLUICEGATE_ADMIN_TOKEN", token).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {err}");
        assert!(err.contains(expected) && !err.contains(TOKEN), "{arguments:?}: {err}");
        assert!(
            !err.contains("/api/") && !err.contains("`identity`") && !err.contains("secret"),
            "{arguments:?}: {err}"
        );
    }
    // Without `admin.token`, reads are allowed and changes are rejected.
    let port = free_port();
    let open = Gateway::start(&config(&format!("[admin]\naddress = \"127.0.0.1:{port}\"\n")));
    assert!(output(&open, &["top"]).contains("no denials"));
    let output = run(&open, &["reset", "--limit", "one", "header:x-id=alice"]);
    assert!(String::from_utf8(output.stderr).unwrap().contains("set admin.token"));
}

#[test]
fn top_is_printed_again_while_it_is_watched() {
    use std::io::{BufRead, BufReader};
    let gateway = Gateway::start(&config(&format!("[admin]\naddress = \"127.0.0.1:{}\"\n", free_port())));
    let mut command = binary();
    command.args(["top", "--watch", "--admin", &format!("http://{}", gateway.admin())]);
    let mut watch = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(Result::unwrap);
    for _ in 0..2 {
        assert_eq!(lines.next().unwrap(), "no denials in the last 5 minutes: net, one");
    }
    // The command ends when its output is closed.
    drop(lines);
    assert!(watch.wait().unwrap().code().is_some());
}

#[test]
fn probe_prints_the_report_of_the_gateway_as_json() {
    let gateway = Gateway::start(&config(&format!("[admin]\naddress = \"127.0.0.1:{}\"\n", free_port())));
    let admin = format!("http://{}", gateway.admin());
    let probe = |arguments: &[&str]| {
        let output = binary().arg("probe").args(arguments).output().unwrap();
        (output.status.code(), serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap())
    };
    let (code, report) = probe(&["--admin", &admin, "--json"]);
    assert_eq!((code, &report["ok"], &report["status"]), (Some(0), &true.into(), &"ready".into()), "{report}");
    assert_eq!(report["report"]["store"]["name"], "memory", "{report}");
    let (code, report) = probe(&["--url", &admin, "--live", "--json"]);
    assert_eq!((code, &report["ok"], &report["status"]), (Some(0), &true.into(), &"ok".into()), "{report}");
}
