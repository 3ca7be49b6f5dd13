//! Configuration files: each invalid file is rejected with the messages in its `#!` lines, and each valid file is
//! accepted.

use std::io::Write;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::support::dns::{DnsAnswer, NameServer};
use crate::support::gateway::binary;
use serde_json::{Value, json};
use sluicegate::config::file::UnsetVariables;
use sluicegate::snapshot::CompiledConfig;
use sluicegate::tools::check::resolve_names;
use toml::de::{DeTable, DeValue};

fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config").join(folder);
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    files
}

fn check(path: &Path) -> (Option<i32>, String, String) {
    check_with(path, &[])
}

fn check_with(path: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output =
        binary().arg("check").args(arguments).arg("--config").arg(path).env("GIVEN", "127.0.0.1").output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// For each file, the report must contain the texts of the file's `#!` lines, in order.
#[test]
fn invalid_files_are_rejected_with_their_reason() {
    let files = files("invalid");
    assert!(files.len() >= 30, "{} files found", files.len());
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        let (code, _, report) = check(&path);
        assert_eq!(code, Some(2), "{}: exit code\n{report}", path.display());
        has_in_order(&path, &text, &report);
        let is_cause = |name: &&str| path.ends_with(name);
        let single =
            ["by_misspelled.toml", "misspelled_key.toml", "route_action_misspelled.toml", "unknown_table.toml"];
        if single.iter().any(is_cause) {
            assert_eq!(report.matches("error: ").count(), 1, "{}:\n{report}", path.display());
        }
    }
}

/// Assert that the report contains the texts of the file's `#!` lines, in order.
fn has_in_order(path: &Path, text: &str, report: &str) {
    let mut rest = report;
    let mut expectations = 0;
    for expected in text.lines().filter_map(|line| line.strip_prefix("#! ")) {
        let Some(at) = rest.find(expected) else {
            panic!("{}: the report does not contain next: {expected}\n\n{report}", path.display())
        };
        rest = &rest[at + expected.len()..];
        expectations += 1;
    }
    assert!(expectations > 0, "{} states no message", path.display());
}

/// Return the line and the column of each finding in a report.
fn places(report: &str) -> Vec<(u64, u64)> {
    let arrows = report.lines().filter_map(|line| line.trim_start().strip_prefix("--> "));
    let numbers = arrows.map(|place| {
        let mut parts = place.rsplit(':').map(|number| number.parse().unwrap());
        let (column, line) = (parts.next().unwrap(), parts.next().unwrap());
        (line, column)
    });
    numbers.collect()
}

/// Return the line and the column of each finding in the output of `--json`.
fn places_of(findings: &Value) -> Vec<(u64, u64)> {
    let place = |finding: &Value| Some((finding["line"].as_u64()?, finding["column"].as_u64()?));
    findings.as_array().unwrap().iter().filter_map(place).collect()
}

#[test]
fn suspicious_files_are_accepted_with_warnings() {
    let files = files("warned");
    assert!(files.len() >= 13, "{} files found", files.len());
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        // Without `--offline`, `check` also warns that no server listens at the addresses of these files.
        let is_online = ["#! warning: store:", "cannot connect", "does not resolve"];
        let is_online = is_online.iter().any(|part| text.contains(part));
        let check_with = |path: &Path, arguments: &[&str]| {
            check_with(path, &[arguments, if is_online { &[] } else { &["--offline"] }].concat())
        };
        let (code, out, report) = check_with(&path, &[]);
        assert_eq!((code, report.as_str()), (Some(0), ""), "{}", path.display());
        has_in_order(&path, &text, &out);
        // The report contains no other warnings than those in the `#!` lines.
        let stated = text.lines().filter(|line| line.starts_with("#! warning: ")).count();
        let total = if stated == 1 { "\n1 warning\n".to_owned() } else { format!("\n{stated} warnings\n") };
        assert!(out.matches("\nwarning: ").count() == stated && out.ends_with(&total), "{}\n{out}", path.display());
        assert_eq!(places(&out).len(), stated, "each warning has a position: {}\n{out}", path.display());
        // With `--strict`, the exit code is 1 if there are warnings.
        assert_eq!(check_with(&path, &["--strict"]).0, Some(1), "{}", path.display());
        let (code, json, _) = check_with(&path, &["--json", "--strict"]);
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((code, &json["ok"], &json["errors"]), (Some(1), &Value::Bool(false), &json!([])));
        assert_eq!(places_of(&json["warnings"]), places(&out), "{}", path.display());
        for warning in json["warnings"].as_array().unwrap() {
            assert_eq!(warning["file"], path.display().to_string());
            assert!(out.contains(warning["message"].as_str().unwrap()), "{warning}");
            assert!(warning["hint"].as_str().is_none_or(|hint| out.contains(hint)), "{warning}");
        }
    }
}

#[test]
fn check_json_reports_the_same_errors() {
    for path in files("invalid") {
        let (code, json, report) = check_with(&path, &["--json"]);
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((code, report.as_str(), &json["ok"]), (Some(2), "", &Value::Bool(false)), "{}", path.display());
        assert_eq!(places_of(&json["errors"]), places(&check(&path).2), "{}", path.display());
    }
}

#[test]
fn check_json_reports_the_guarantees_of_limits() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (code, out, _) = check_with(&root.join("gateway.toml"), &["--json", "--strict", "--offline"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &report["ok"]), (Some(0), &Value::Bool(true)), "the shipped configuration has a warning: {out}");
    let limit = |limit: &str, at_most: u64, window: f64, at_once: u64| {
        json!({
            "limit": limit, "tier": null, "consumer": null, "max_admitted": at_most, "unit": "requests", "window_seconds": window, "capacity": at_once, "prefetch": 0,
            "overdraft": false, "shadow": false,
        })
    };
    let limits = [limit("hourly", 2000, 3600.0, 1000), limit("per-ip", 19, 1.0, 10), limit("per-key", 100, 60.0, 100)];
    assert_eq!(report, json!({ "ok": true, "errors": [], "warnings": [], "notes": [], "limits": limits }));
}

#[test]
fn check_lists_the_quotas_of_consumers() {
    let (directory, path) = directory_with(
        "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
         [limit.rate]\nby = \"api-key\"\nquota = \"10/min\"\ntiers = { pro = { quota = \"20/min\" } }\n\
         [limit.all]\nby = \"api-key\"\nquota = \"100/hour\"\n[[route]]\nname = \"r\"\npath = \"/\"\n\
         identify = [\"keys\"]\nlimits = [\"rate\", \"all\"]\nrespond = { status = 200 }\n",
    );
    let consumers = |count: usize| {
        let consumer = |number: usize| {
            format!(
                "[[consumer]]\nname = \"c{number:02}\"\nkeys = [\"sha256:a{number:02}{:061}\", \"sha256:b{number:02}{:061}\"]\n\
                 limit.rate = {{ quota = \"{}/min\", burst = 5 }}\n",
                0,
                0,
                30 + number
            )
        };
        std::fs::write(directory.path().join("consumers.toml"), (0..count).map(consumer).collect::<String>()).unwrap();
    };
    consumers(2);
    let (code, out, _) = check(&path);
    let expected = "  all: at most 199 in any 60 minutes, 100 at once\n\
                    \x20 rate: at most 19 in any 60 s, 10 at once\n  rate, tier pro: at most 39 in any 60 s, 20 at once\n\
                    \x20 rate, consumer c00: at most 34 in any 60 s, 5 at once\n\
                    \x20 rate, consumer c01: at most 35 in any 60 s, 5 at once\n";
    assert!(code == Some(0) && out.contains(expected) && !out.contains("more quotas"), "{out}");
    consumers(21);
    let (_, out, _) = check(&path);
    assert!(out.contains("\n  and 1 more quota of consumers\n"), "{out}");
    consumers(25);
    let (_, out, _) = check(&path);
    assert_eq!(out.matches(", consumer c").count(), 20, "{out}");
    assert!(out.contains("consumer c19: ") && out.contains("\n  and 5 more quotas of consumers\n"), "{out}");
    let report: Value = serde_json::from_str(&check_with(&path, &["--json"]).1).unwrap();
    let of_consumers: Vec<_> =
        report["limits"].as_array().unwrap().iter().filter(|limit| limit["consumer"].is_string()).collect();
    assert_eq!(of_consumers.len(), 25, "{report:#}");
    let fields = ["limit", "tier", "consumer", "max_admitted", "capacity"].map(|field| &of_consumers[24][field]);
    assert_eq!(json!(fields), json!(["rate", null, "c24", 58, 5]));
}

#[test]
fn check_offline_does_not_connect_to_the_store() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config/warned/no_secret.toml");
    assert!(check(&path).1.contains("warning: store: nothing listens"));
    let (code, out, _) = check_with(&path, &["--offline"]);
    assert!(code == Some(0) && !out.contains("warning: store:"), "{out}");
}

#[test]
fn names_of_certificates_are_compared_with_the_addresses_of_this_machine() {
    let names = ["here.test", "away.test", "both.test", "gone.test", "silent.test"];
    let (_directory, path) = directory_with(&format!(
        "[acme]\naccept_terms = true\n[[listener]]\naddress = \"127.0.0.1:0\"\ntls = {{ acme = true, names = {names:?} }}\n"
    ));
    let dns = NameServer::start();
    dns.set_addresses("here.test", &["127.0.0.1", "::1"], 60);
    dns.set_addresses("away.test", &["203.0.113.7"], 60);
    dns.set_addresses("both.test", &["127.0.0.1", "203.0.113.8"], 60);
    dns.set_both("silent.test", &DnsAnswer::Nothing);
    let (config, file) = CompiledConfig::load_with_source(&path, &|_| None, UnsetVariables::Error).unwrap();
    let (warnings, notes) = resolve_names(&file.value, &config, &dns.resolver(&[])).unwrap();
    let notes: Vec<_> = notes.iter().map(|note| &*note.message).collect();
    let elsewhere = "which is no address of this machine: requests may still arrive through a load balancer or NAT";
    let expected = [
        format!("`away.test` resolves to 203.0.113.7, {elsewhere}"),
        format!("`both.test` resolves to 203.0.113.8, {elsewhere}"),
        "`here.test` resolves to this machine".to_owned(),
    ];
    assert_eq!(notes, expected);
    let text = std::fs::read_to_string(&path).unwrap();
    let warnings: Vec<_> =
        warnings.iter().map(|warning| (&text[warning.span.clone().unwrap()], &*warning.message)).collect();
    let invalid = "does not resolve, and the CA cannot validate it";
    assert_eq!(warnings[0], ("\"gone.test\"", &*format!("`gone.test` {invalid}: the name does not exist (NXDOMAIN)")));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    let (span, message) = warnings[1];
    assert!(span == "\"silent.test\"" && message.starts_with(&format!("`silent.test` {invalid}: no ")), "{message}");
    // With `--offline`, `check` resolves no DNS names.
    let (code, out, _) = check_with(&path, &["--offline"]);
    assert!(code == Some(0) && out.contains("were not resolved, because of `--offline`"), "{out}");
    assert!(out.contains("for away.test, both.test") && !out.contains("resolves to"), "{out}");
}

#[test]
fn colours_are_only_written_to_terminals() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config");
    for file in ["warned/limit_unused.toml", "invalid/by_missing.toml"] {
        let said = |variables: &[(&str, &str)]| {
            let mut command = binary();
            command.arg("check").arg("--config").arg(folder.join(file)).env_remove("NO_COLOR");
            let output = command.env_remove("CLICOLOR_FORCE").envs(variables.iter().copied()).output().unwrap();
            String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
        };
        assert!(!said(&[]).contains('\x1b'), "a pipe gets no colours");
        assert!(said(&[("CLICOLOR_FORCE", "1")]).contains('\x1b'), "colours can be requested");
        assert!(!said(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]).contains('\x1b'), "`NO_COLOR` takes precedence");
    }
}

#[test]
fn valid_files_are_accepted_by_check() {
    let files = files("valid");
    assert!(files.len() >= 3, "{} files found", files.len());
    for path in files {
        let (code, out, report) = check(&path);
        assert_eq!((code, report.as_str()), (Some(0), ""), "{}", path.display());
        assert!(out.contains(": valid: "), "{out}");
    }
}

#[test]
fn shipped_configuration_is_accepted() {
    let (code, out, report) = check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("gateway.toml"));
    assert_eq!((code, report.as_str()), (Some(0), ""));
    assert!(out.contains("3 routes, 3 limits"), "{out}");
    for guarantee in [
        "per-ip: at most 19 in any 1 s, 10 at once",
        "per-key: at most 100 in any 60 s, 100 at once",
        "hourly: at most 2000 in any 60 minutes, 1000 at once",
    ] {
        assert!(out.contains(guarantee), "{guarantee} is missing in\n{out}");
    }
}

#[test]
fn unusable_file_gives_one_error() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    for (path, expected) in [
        (directory.path().join("none.toml"), "cannot be read: No such file"),
        (directory.path().join("no.toml"), "or create one with `sluicegate init --config /"),
        (directory.path().to_owned(), "cannot be read: Is a directory"),
        (directory.path().to_owned(), "= help: name a file, not a directory"),
        (write("latin1.toml", b"# caf\xe9"), "convert the file to UTF-8"),
        (write("latin1_later.toml", b"# one\n[log]\n# caf\xe9\n"), "latin1_later.toml:3:6"),
        (write("utf16.toml", b"\xff\xfe[\0l\0"), "iconv -f utf-16 -t utf-8"),
        (write("broken.toml", b"[server\nworkers = 1\n"), "broken.toml:1:8"),
        (write("type.toml", b"[server]\nworkers = \"four\"\n"), "type.toml:2:11"),
        (write("empty.toml", b""), "there is no [[listener]]"),
    ] {
        let (code, _, report) = check(&path);
        assert_eq!(code, Some(2), "{}", path.display());
        assert!(report.contains(expected), "{}: {report}", path.display());
        let run = binary().arg("--config").arg(&path).output().unwrap();
        assert_eq!(run.status.code(), Some(2), "`run` rejects each file that `check` rejects: {}", path.display());
    }
}

#[test]
fn unset_variables_and_invalid_consumers_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join("people.toml"),
        "[[consumer]]\nname = \"a\"\nkeys = [\"secret-key\"]\ntier = \"pro\"\n[[consumer]]\nname = \"a\"\nnick = 1\n[[consumer]]\n",
    )
    .unwrap();
    let path = directory.path().join("gateway.toml");
    std::fs::write(
        &path,
        "[[listener]]\naddress = \"${NOT_GIVEN}:0\"\n[auth.keys]\nkind = \"api-key\"\nconsumers = \"people.toml\"\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n",
    )
    .unwrap();
    let (code, _, report) = check(&path);
    assert_eq!(code, Some(2));
    for expected in [
        "environment variable `NOT_GIVEN` is not set",
        "this is not the hash of a key",
        "people.toml:3:9",
        "no limit has a tier `pro`",
        "duplicate consumer `a`",
        "the first one is in line 1: list all keys of a consumer in one [[consumer]]",
        "unknown key `nick`",
        "a consumer needs a `name`",
    ] {
        assert!(report.contains(expected), "{expected} is missing in\n{report}");
    }
}

/// Return a directory with a configuration file, and the path of the file. The file contains `more`. It also contains a
/// listener and a route if `more` has none.
fn directory_with(more: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    let listener = if more.contains("[[listener]]") { "" } else { "[[listener]]\naddress = \"127.0.0.1:0\"\n" };
    let route = if more.contains("[[route]]") {
        ""
    } else {
        "[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n"
    };
    std::fs::write(&path, format!("{more}\n{listener}{route}")).unwrap();
    (directory, path)
}

#[test]
fn one_mistake_gives_one_error() {
    let consumers = "[[consumer]]\nname = \"a\"\nkeys = []\ntier = \"pro\"\nlimit = { l = { quota = \"2/s\" } }\n";
    let with_consumers = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n";
    let unset = "environment variable `NOT_GIVEN` is not set";
    for (more, expected) in [
        ("[[listener]]\naddress = \"${NOT_GIVEN}:0\"\n".to_owned(), unset),
        ("[admin]\naddress = \"0.0.0.0:1\"\ntoken = \"${NOT_GIVEN}\"\n".to_owned(), unset),
        ("[log]\nlevel = \"${NOT_GIVEN}\"\n".to_owned(), unset),
        ("[log]\nlevel = \"${GIVEN\"\n".to_owned(), "`${` without `}`"),
        ("[store]\nurl = \"${NOT_GIVEN}\"\n".to_owned(), unset),
        ("[store]\nurl = \"${NOT_GIVEN}\"\ntls = {}\n".to_owned(), unset),
        ("[upstream.u]\nservers = [\"${NOT_GIVEN}\"]\ntls = {}\n".to_owned(), unset),
        ("[auth.keys]\nkind = \"api-key\"\nconsumers = \"${NOT_GIVEN}\"\n".to_owned(), unset),
        ("[limit.l]\nby = [\"${NOT_GIVEN}\"]\nquota = \"1/s\"\n".to_owned(), unset),
        ("[upstream.u]\nservers = [{ url = \"${NOT_GIVEN}\", weight = 1 }]\n".to_owned(), unset),
        (
            format!(
                "{with_consumers}[limit.l]\nby = \"api-key\"\nquota = \"1/x\"\ntiers = {{ pro = {{ quota = \"9/s\" }} }}\n"
            ),
            "`x` is not a unit of time",
        ),
        (
            format!(
                "{with_consumers}[limit.l]\nby = \"api-key\"\nquota = \"1/s\"\ntiers = {{ pro = {{ quota = \"9/x\" }} }}\n"
            ),
            "`x` is not a unit of time",
        ),
        (
            "[client_ip]\ntrusted_proxies = [\"10.0.0\"]\n[limit.l]\nby = \"user:x-user\"\nquota = \"1/s\"\n"
                .to_owned(),
            "`10.0.0` is not an address or a network",
        ),
    ] {
        let (directory, path) = directory_with(&more);
        std::fs::write(directory.path().join("consumers.toml"), consumers).unwrap();
        let (code, _, report) = check(&path);
        assert!(code == Some(2) && report.contains(expected), "{more}:\n{report}");
        assert_eq!(report.matches("error: ").count(), 1, "{more}:\n{report}");
    }
}

/// A listener and a route, for files in which the mistake is elsewhere.
const REST: &str =
    "\n[[listener]]\naddress = \"127.0.0.1:0\"\n[[route]]\nname = \"r\"\npath = \"/r\"\nrespond = { status = 200 }\n";

/// Mistakes of new users, as an addition to a valid file, each with the texts that the report must contain. A file that
/// contains `[[route]]` or `[[listener]]` is complete.
const MISTAKES: &[(&str, &[&str])] = &[
    // Values without quotes.
    (
        "[server]\nproxy_status = True",
        &["g.toml:2:16", "write `true`, in lower case and without quotes: proxy_status = true"],
    ),
    ("[server]\nproxy_status = off", &["write `true` or `false`"]),
    (
        "[server]\nproxy_status = \"yes\"",
        &["`proxy_status` must be `true` or `false`, not a string", "write `true` or `false`"],
    ),
    ("[server]\nproxy_status = 1", &["not an integer", "write `true` or `false`"]),
    ("[server]\nworkers = ${W}", &["variables work in strings: workers = \"${W}\""]),
    ("[client_ip]\ntrusted_proxies = ${W}", &["variables work in strings: trusted_proxies = [\"${W}\"]"]),
    ("[server]\nworkers = four", &["write a number: workers = 1"]),
    ("[server]\nworkers = \"4\"", &["`workers` must be an integer, not a string", "remove the quotes: workers = 4"]),
    ("[server]\nworkers = \"four\"", &["write a number from 0 to 1024"]),
    ("[server]\nworkers = 1.5", &["`workers` must be an integer, not a number with a fraction"]),
    ("[server]\nidle_timeout = 5s # short", &["put strings in quotes: idle_timeout = \"5s\""]),
    ("[server]\nidle_timeout: 5s", &["write `=` between key and value: idle_timeout = 5s"]),
    ("[server]\nidle_timeout = \"5s", &["a string ends on its line with the quote with which it starts"]),
    (
        "[server]\nworkers = ${W}\nidle_timeout = 5s\n[log]\nlevel = debug",
        &["workers = \"${W}\"", "idle_timeout = \"5s\"", "level = \"debug\""],
    ),
    (
        "[server]\nidle_timeout = \"30 seconds\"\nheader_timeout = \"5\"\nmax_uri = \"8k\"\nrequest_buffer = \"1MB\"",
        &["did you mean \"30s\"?", "did you mean \"5s\"?", "did you mean \"8KiB\"?", "did you mean \"1MiB\"?"],
    ),
    (
        "[server]\nworkers = 4;\nidle_timeout = 5s;\n[log]\nlevel = \"info\";",
        &["workers = 4", "idle_timeout = \"5s\"", "remove the `;`"],
    ),
    ("[server]\nworkers = $WORKERS", &["variables work in strings: workers = \"${WORKERS}\""]),
    ("[server\nworkers = 1", &["write [server]"]),
    ("[client_ip]\ntrusted_proxies = [\"10.0.0.0/8\"\nheader = \"forwarded\"", &["end the list with ]"]),
    ("[[server]]\nworkers = 1", &["`server` must be a table, not a list", "single brackets: [server]"]),
    (
        "[route.api]\nname = \"r\"\n[[listener]]\naddress = \"127.0.0.1:0\"",
        &["`route` must be a list, not a table", "write [[route]] with name = \"api\""],
    ),
    (
        "[limit.l]\nby = \"ip\"\nrequests_per_unit = 5\nunit = \"MINUTE\"",
        &["write quota = \"5/min\"", "`MINUTE` is a unit of time"],
    ),
    // Characters that look like others.
    (
        "[log]\nlevel = \u{201c}info\u{201d}",
        &["`\u{201c}` is a typographic quotation mark", "g.toml:2:9", "write level = \"info\""],
    ),
    (
        "[admin]\ntoken = \u{2018}hunter22hunter22\u{2019}",
        &["`\u{2018}` is a typographic quotation mark", "replace \u{2018} with \""],
    ),
    ("[log]\nlevel =\u{a0}\"info\"", &["column 8 has the character U+00A0 (no-break space)", "g.toml:2:8"]),
    ("[log]\nlevel\u{3000}= \"info\"", &["column 6 has the character U+3000 (ideographic space)"]),
    ("[log]\nlevel = \"info\u{200b}\"", &["unknown value", "remove the character, or replace it with a space"]),
    // Variables.
    (
        "[[listener]]\naddress = \"127.0.0.1:${PORT:25100}\"\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }",
        &["a default of the environment variable `PORT` follows `:-`", "write ${PORT:-25100}"],
    ),
    ("[log]\nlevel = \"${LEVEL-info}\"", &["write ${LEVEL:-info}"]),
    ("[admin]\naddress = \"127.0.0.1:1\"\ntoken = \"${T:hunter22hunter22}\"", &["write ${T:-value}"]),
    ("[log]\nlevel = \"${}\"", &["does not contain the name of an environment variable"]),
    ("[log]\nlevel = \"${NOT_UTF_8}\"", &["environment variable `NOT_UTF_8` is not valid UTF-8"]),
    (
        "[server]\nworkers = \"${WORD}\"",
        &["`workers` must be an integer", "set the environment variable in \"${WORD}\" to an integer"],
    ),
    // Other formats.
    (
        "---\nlisteners:\n  - address: 0.0.0.0:80\n[[route]]",
        &["this file looks like YAML, but the configuration is TOML", "`sluicegate init` creates"],
    ),
    ("{\n  \"listener\": []\n}\n[[route]]", &["this file looks like JSON"]),
    (
        "events {}\nhttp {\n  server {\n    listen 80;\n    location / { proxy_pass http://127.0.0.1:1; }\n  }\n}\n#[[route]]",
        &["looks like a configuration of nginx"],
    ),
    ("example.com {\n\treverse_proxy localhost:9000\n}\n#[[route]]", &["looks like a Caddyfile"]),
    (
        "frontend web\n  bind *:80\n  default_backend api\nbackend api\n  server a 127.0.0.1:1\n#[[route]]",
        &["looks like a configuration of HAProxy"],
    ),
    ("<VirtualHost *:80>\n</VirtualHost>\n#[[route]]", &["looks like XML"]),
    ("-----BEGIN CERTIFICATE-----\n#[[route]]", &["looks like a PEM file"]),
    // Tables in another form.
    (
        "[[limit]]\nname = \"l\"\nby = \"ip\"\nquota = \"1/x\"",
        &["`limit` must be a table, not a list", "[limit.NAME]", "`x` is not a unit of time"],
    ),
    ("[[upstream]]\nname = \"u\"\nservers = []", &["[upstream.NAME]", "upstream `u` has no servers"]),
    ("[limit]\nby = \"ip\"\nquota = \"1/s\"", &["the table `[limit]` has no name", "[limit.NAME]"]),
    ("[upstream]\napi = \"http://127.0.0.1:1\"", &["[upstream.api]", "servers = [\"http://127.0.0.1:1\"]"]),
    ("[limit]\nall = \"1/s\"", &["[limit.all]", "quota = \"1/s\""]),
    ("store = \"memory:\"", &["`store` must be a table, not a string", "[store]", "url = \"memory:\""]),
    ("upstream = \"http://127.0.0.1:1\"", &["[upstream.NAME]", "servers = [\"http://127.0.0.1:1\"]"]),
    (
        "[[listener]]\naddress = \"127.0.0.1:0\"\ntls = true\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }",
        &["`tls` must be a table, not a boolean", "write a table: tls = { certificates = [{ cert = "],
    ),
    (
        "[[listener]]\naddress = \"127.0.0.1:0\"\ntls = { cert = \"c.pem\", key = \"k.pem\" }\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }",
        &["unknown key `cert`", "certificates = [{ cert = \"c.pem\", key = \"k.pem\" }]"],
    ),
    (
        "[[listener]]\nport = 8080\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }",
        &["unknown key `port`", "address = \"127.0.0.1:8080\""],
    ),
    (
        "[[listener]]\naddress = \"0.0.0.0\"\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }",
        &["`0.0.0.0` has no port", "\"0.0.0.0:8080\""],
    ),
    (
        "[[listener]]\naddress = \"::1\"\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }",
        &["`::1` has no port", "\"[::1]:8080\""],
    ),
    (
        "[upstream.u]\nservers = \"http://127.0.0.1:1\"",
        &["write a list in brackets: servers = [\"http://127.0.0.1:1\"]"],
    ),
    // Words of other programs.
    ("[limit.l]\nby = \"client_ip\"\nquota = \"1/s\"", &["unknown identity `client_ip`", "did you mean `ip`?"]),
    ("[limit.l]\nby = \"$binary_remote_addr\"\nquota = \"1/s\"", &["did you mean `ip`?"]),
    (
        "[limit.l]\nby = \"ip\"\nmax = 100\nwindowMs = 60000",
        &["unknown key `max`", "write quota = \"100/min\"", "unknown key `windowMs`"],
    ),
    ("[limit.l]\nby = \"ip\"\nlimit = 100\nwindow = \"60s\"", &["write quota = \"100/60s\""]),
    ("[limit.l]\nby = \"ip\"\nrate = \"10r/s\"", &["write quota = \"10/s\""]),
    ("[limit.l]\nby = \"ip\"\nminute = 5", &["write quota = \"5/min\""]),
    ("[limit.l]\nby = \"ip\"\nquota = \"100\"", &["a unit of time is missing: \"100/min\""]),
    ("[limit.l]\nby = \"ip\"\nquota = 100", &["put the value in quotes: quota = \"100/min\""]),
    ("[limit.l]\nby = \"ip\"\nquota = \"1/s\"\nalgorithm = \"rolling_window\"", &["did you mean `sliding-window`?"]),
    ("[limit.l]\nby = \"ip\"\nquota = \"1/s\"\nalgorithm = \"sliding_window_log\"", &["did you mean `sliding-log`?"]),
    ("[upstream.u]\nurl = \"http://127.0.0.1:1\"", &["unknown key `url`", "write servers = [\"http://127.0.0.1:1\"]"]),
    ("[upstream.u]\nservers = [\"http://127.0.0.1:1\"]\nbalance = \"leastconn\"", &["did you mean `least-requests`?"]),
    ("[redis]\nhost = \"x\"", &["unknown key `redis`", "[store]"]),
    ("[store]\nhost = \"x\"", &["unknown key `host`", "write url = \"redis://HOST:6379/0\""]),
    ("[log]\nlog_format = \"json\"", &["the keys of [log] are format, level, access"]),
    ("[server]\nclient_max_body_size = \"1m\"", &["write max_body = \"1MiB\" in each [[route]]"]),
    (
        "[client_ip]\ntrusted_proxies = [\"10.*\", \"10.0.0.0/255.0.0.0\", \"192.168.1.x\", \"10.0.0.1:80\"]",
        &["\"10.0.0.0/8\"", "\"10.0.0.0/8\"", "\"192.168.1.0/24\"", "\"10.0.0.1\""],
    ),
    (
        "[auth.t]\nkind = \"jwt\"\nsecret = \"hunter22\"\nalgorithm = \"HS256\"",
        &[
            "unknown key `secret`",
            "shared secrets (HS256) are not supported",
            "jwks_url or jwks_file",
            "unknown key `algorithm`",
        ],
    ),
    ("[notify.ops]\nwebhok = \"https://x.test/\"", &["unknown key `webhok`", "did you mean `webhook`?"]),
    (
        "[[route]]\nname = \"r\"\npath = \"~ ^/x\"\nrespond = { status = 200 }\n[[listener]]\naddress = \"127.0.0.1:0\"",
        &["path_regex = \"^/x.*\"", "path = \"/x/{*rest}\""],
    ),
    (
        "[[route]]\nname = \"r\"\npath = \"PathPrefix(`/api`)\"\nrespond = { status = 200 }\n[[listener]]\naddress = \"127.0.0.1:0\"",
        &["write path = \"/api/{*rest}\""],
    ),
];

/// Keys of a route that belong to other programs or have another form, each with the texts that the report must contain.
const MISTAKES_IN_ROUTES: &[(&str, &[&str])] = &[
    (
        "upstream = \"http://127.0.0.1:9000\"",
        &["`upstream` is the name of an upstream, not a URL", "define [upstream.NAME] with servers"],
    ),
    ("proxy_pass = \"http://127.0.0.1:9000\"", &["write upstream = \"NAME\""]),
    (
        "respond = { status = 200 }\ncors = true",
        &["`cors` must be a table, not a boolean", "cors = { origins = [\"https://app.example.com\"] }"],
    ),
    (
        "respond = { status = 200 }\ncors = { allow_origins = [\"https://a.test\"] }",
        &["write origins = [\"https://a.test\"]"],
    ),
    ("respond = { status = 200 }\nrate_limit = 10", &["write limits = [\"NAME\"], and define [limit.NAME]"]),
    ("respond = { status = 200 }\nrateLimit = 10", &["write limits = [\"NAME\"], and define [limit.NAME]"]),
    ("respond = { status = 200 }\nclient_max_body_size = \"1m\"", &["write max_body = \"1MiB\""]),
    ("respond = { status = 200 }\nproxy_set_header = \"Host x\"", &["write request_headers = { set = {"]),
    ("respond = { status = 200 }\nheader_up = \"Host x\"", &["write request_headers = { set = {"]),
    ("respond = { status = 200 }\nhost = \"a.example.com\"", &["write hosts = [\"a.example.com\"]"]),
    ("respond = { status = 200 }\nmethod = \"GET\"", &["write methods = [\"GET\"]"]),
    ("respond = { status = 200 }\nmethods = [\"GET,POST\"]", &["write each method as an item of the list"]),
    (
        "respond = { status = 200 }\nlimits = \"l\"",
        &["`limits` must be a list, not a string", "limits = [\"l\"]", "unknown limit `l`"],
    ),
    (
        "respond = { status = \"200\" }",
        &["`status` must be an integer, not a string", "remove the quotes: status = 200"],
    ),
    ("upstream = { servers = [\"http://127.0.0.1:1\"] }", &["define [upstream.NAME] with servers"]),
    ("respond = { status = 200 }\nlimits = [{ by = \"ip\" }]", &["define [limit.NAME] with this table"]),
    (
        "respond = { status = 200 }\nrequire = true",
        &["`require` must be a list, not a boolean", "write a list: require = [\"keys\""],
    ),
    ("respond = { status = 200 }\nenabled = true", &["to disable a table, remove it"]),
];

#[test]
fn mistakes_of_new_users_are_explained() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("g.toml");
    let route = |more: &&str| {
        format!("[[listener]]\naddress = \"127.0.0.1:0\"\n[[route]]\nname = \"r\"\npath = \"/r\"\n{more}\n")
    };
    let complete = |more: &&str| {
        let rest = if more.contains("[[listener]]") || more.contains("[[route]]") { "" } else { REST };
        format!("{more}\n{rest}")
    };
    let routes = MISTAKES_IN_ROUTES.iter().map(|(more, expected)| (route(more), expected));
    let files = MISTAKES.iter().map(|(more, expected)| (complete(more), expected));
    for (text, expected) in files.chain(routes) {
        std::fs::write(&path, &text).unwrap();
        let mut command = binary();
        command.args(["check", "--offline", "--config"]).arg(&path).env("WORD", "many");
        let output = command.env("NOT_UTF_8", std::ffi::OsStr::from_bytes(b"\xff\xfe")).output().unwrap();
        let report = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}\n{report}");
        let mut rest = &*report;
        for part in *expected {
            let Some(at) = rest.find(part) else { panic!("{text}\nthe report lacks: {part}\n{report}") };
            rest = &rest[at + part.len()..];
        }
        assert!(!report.contains("hunter22"), "{report}");
    }
}

#[test]
fn wrong_type_hides_no_other_error() {
    let (_directory, path) = directory_with(
        "[server]\nheader_timeout = \"soon\"\nworkers = \"many\"\n[limit.l]\nby = \"ipp\"\nquota = 100\n\
         [limit.m]\nby = 7\nquota = \"1/s\"\n[[listener]]\naddress = 80\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\nlimits = [\"absent\", 5]\n",
    );
    let (code, _, report) = check(&path);
    assert_eq!(code, Some(2));
    let expected = [
        "`soon` is not a duration",
        "`workers` must be an integer, not a string",
        "unknown identity `ipp`",
        "`quota` must be a string, not an integer",
        "`by` must be a string or a list of strings, not an integer",
        "`address` must be a string, not an integer",
        "unknown limit `absent`",
        "`limits` must be a string, not an integer",
    ];
    for text in expected {
        assert!(report.contains(text), "{text} is missing in\n{report}");
    }
    assert_eq!(report.matches("error: ").count(), expected.len(), "{report}");
}

/// The value of an environment variable has the type of its key: a number, a boolean, a date or a list.
#[test]
fn variables_have_the_type_of_their_key() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    let load = |text: &str| {
        std::fs::write(&path, text).unwrap();
        let variable = |name: &str| {
            Some(match name {
                "COUNT" => " 20 ".into(),
                "FLAG" => "false".into(),
                "PART" => "0.5".into(),
                "NETWORKS" => "10.0.0.0/8, 192.168.0.0/16".into(),
                "STATUSES" => "200,204".into(),
                "METHODS" => "GET,PUT".into(),
                _ => return None,
            })
        };
        CompiledConfig::load(&path, &variable).map(|config| format!("{config:?}")).map_err(|error| error.to_string())
    };
    let file = |values: [&str; 8]| {
        let [count, flag, part, networks, statuses, list, methods, cost] = values;
        format!(
            "[server]\nworkers = {count}\nproxy_status = {flag}\n[log]\naccess = {{ to = \"stdout\", sample = {part} }}\n\
             [client_ip]\ntrusted_proxies = {networks}\n[upstream.u]\nservers = [\"http://127.0.0.1:1\"]\n\
             health_check = {{ path = \"/\", status = {statuses} }}\n[limit.l]\nby = \"ip\"\nquota = \"50/s\"\n\
             burst = {count}\ncost = {cost}\nexempt = {list}\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
             [[route]]\nname = \"r\"\npath = \"/\"\nupstream = \"u\"\nlimits = [\"l\"]\nmethods = {methods}\n"
        )
    };
    let plain = file([
        "20",
        "false",
        "0.5",
        "[\"10.0.0.0/8\", \"192.168.0.0/16\"]",
        "[200, 204]",
        "[\"10.0.0.0/8\"]",
        "[\"GET\", \"PUT\"]",
        "20",
    ]);
    let variables = file([
        "\"${COUNT}\"",
        "\"${FLAG}\"",
        "\"${PART}\"",
        "[\"${NETWORKS}\"]",
        "[\"${STATUSES}\"]",
        "\"${EXEMPT:-10.0.0.0/8}\"",
        "\"${METHODS}\"",
        "\"${COUNT}\"",
    ]);
    let lists =
        variables.replace("[\"${NETWORKS}\"]", "\"${NETWORKS}\"").replace("[\"${STATUSES}\"]", "\"${STATUSES}\"");
    let config = |text: &str| {
        let text = load(text).unwrap_or_else(|error| panic!("{error}"));
        // Omit the text of the file, and the keyed hashes of the process.
        let start = text.find("server: ServerSettings").unwrap();
        let end = text.find("network_files").unwrap();
        text[start..end].to_owned() + text[text.find("upstreams: ").unwrap()..].split("hasher").next().unwrap()
    };
    assert_eq!(config(&variables), config(&plain));
    assert_eq!(config(&lists), config(&plain));
}

/// Editors on Windows begin text files with a byte order mark.
#[test]
fn byte_order_marks_are_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let certs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certs");
    let put = |name: &str, content: &[u8]| {
        std::fs::write(directory.path().join(name), [b"\xef\xbb\xbf", content].concat()).unwrap();
    };
    for name in ["one.pem", "one.key", "jwks.json"] {
        put(name, &std::fs::read(certs.join(name)).unwrap());
    }
    put("consumers.toml", b"[[consumer]]\nname = \"a\"\nkeys = []\n");
    put("networks.txt", b"10.0.0.0/8\n");
    put(
        "gateway.toml",
        b"[[listener]]\naddress = \"127.0.0.1:0\"\nallow = [\"file:networks.txt\"]\n\
          tls.certificates = [{ cert = \"one.pem\", key = \"one.key\" }]\ntls.client_ca = \"one.pem\"\n\
          [auth.t]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\n\
          [auth.k]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
          [[route]]\nname = \"r\"\npath = \"/r\"\nrequire = [\"t\", \"k\"]\nrespond = { status = 200 }\n",
    );
    let (code, out, report) = check(&directory.path().join("gateway.toml"));
    assert_eq!((code, report.as_str()), (Some(0), ""), "{out}");
    assert!(!out.contains("warning: "), "{out}");
}

#[test]
fn leaky_bucket_is_explained() {
    let limit = "[limit.l]\nby = \"global\"\nquota = \"1/s\"\nalgorithm = \"leaky-bucket\"\n[[route]]\nname = \"r\"\n\
                 path = \"/r\"\nlimits = [\"l\"]\nrespond = { status = 200 }\n";
    let (_directory, path) = directory_with(limit);
    let (code, out, _) = check(&path);
    assert!(code == Some(0) && out.contains("note: `leaky-bucket` is the same as `token-bucket`"), "{out}");
    assert!(out.contains("max_wait = \"1s\""), "{out}");
}

#[test]
fn configuration_is_read_from_standard_input() {
    let mut command = binary();
    command.args(["check", "--config", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(REST.replace("200", "20").as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let report = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(2) && report.contains("-:7:22") && report.contains("20 is out of range"),
        "{report}"
    );
}

#[test]
fn words_of_other_programs_on_the_command_line_have_a_hint() {
    for (arguments, expected) in [
        (&["serve"][..], "write `sluicegate run`"),
        (&["validate"], "write `sluicegate check`"),
        (&["-t"], "write `sluicegate check`"),
        (&["version"], "write `sluicegate --version`"),
        (&["-f", "gateway.toml"], "write `--config FILE`"),
        (&["--port", "80"], "set `address` of a [[listener]]"),
        (&["stop"], "send SIGTERM"),
    ] {
        let output = binary().args(arguments).output().unwrap();
        let report = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && report.contains(expected), "{arguments:?}: {report}");
    }
}

const SECRETS: &str = "[admin]\naddress = \"127.0.0.1:1\"\ntoken = \"${NOT_GIVEN_TOKEN}\"\n\
                       [store]\nurl = \"redis://gateway:${NOT_GIVEN_PASSWORD}@127.0.0.1:1\"\nsecret = \"${NOT_GIVEN_SECRET}\"\n\
                       [auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n[limit.l]\nby = \"api-key\"\nquota = \"1/s\"\n\
                       [[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\nidentify = [\"keys\"]\nlimits = [\"l\"]\n";

#[test]
fn check_offline_accepts_unset_secrets_with_warnings() {
    let (directory, path) = directory_with(SECRETS);
    std::fs::write(directory.path().join("consumers.toml"), "[[consumer]]\nname = \"a\"\nkeys = []\n").unwrap();
    let (code, out, report) = check_with(&path, &["--offline"]);
    assert_eq!((code, report.as_str()), (Some(0), ""), "{out}");
    for name in ["TOKEN", "PASSWORD", "SECRET"] {
        assert!(out.contains(&format!("warning: environment variable `NOT_GIVEN_{name}` is not set")), "{out}");
    }
    assert!(out.ends_with("\n3 warnings\n"), "{out}");
    // Without `--offline`, `check` needs the values of the secrets.
    let (code, _, report) = check(&path);
    assert_eq!((code, report.matches("error: ").count()), (Some(2), 3), "{report}");
    // A URL that consists of one variable also counts as a secret. `check` needs all other values even with
    // `--offline`.
    let url = "[store]\nurl = \"${NOT_GIVEN}\"\n[log]\ntrace_endpoint = \"${NOT_GIVEN}\"\n";
    let (_directory, path) = directory_with(url);
    let (code, out, report) = check_with(&path, &["--offline"]);
    assert!(code == Some(0) && out.ends_with("\n2 warnings\n"), "{out}{report}");
    let (_directory, path) = directory_with("[[listener]]\naddress = \"${NOT_GIVEN}\"\n");
    assert_eq!(check_with(&path, &["--offline"]).0, Some(2));
}

#[test]
fn commands_need_only_their_part_of_the_environment() {
    let listener = "[[listener]]\naddress = \"${NOT_GIVEN_ADDRESS}\"\n";
    let (directory, path) = directory_with(&format!("{SECRETS}{listener}"));
    std::fs::write(directory.path().join("consumers.toml"), "[[consumer]]\nname = \"acme\"\nkeys = []\n").unwrap();
    let said = |arguments: &[&str], token: &str| {
        let mut command = binary();
        command.args(arguments).arg("--config").arg(&path).env("SLUICEGATE_ADMIN_TOKEN", token);
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, out, err) = said(&["key", "list"], "");
    assert!(code == Some(0) && out.contains("acme"), "{out}{err}");
    assert_eq!((err.matches("warning: ").count(), err.matches("error: ").count()), (4, 0), "{err}");
    // `top` accepts the configuration, and then cannot connect to the admin listener.
    let (code, _, err) = said(&["top"], "token");
    assert!(code == Some(1) && err.contains("cannot connect to http://127.0.0.1:1"), "{err}");
    // Without a token in the environment, `top` needs the token in the file.
    let (code, _, err) = said(&["top"], "");
    assert!(code == Some(2) && err.contains("error: environment variable `NOT_GIVEN_TOKEN` is not set"), "{err}");
    assert_eq!(err.matches("error: ").count(), 1, "{err}");
    // `key list` needs the path of the consumers file.
    let text = std::fs::read_to_string(&path).unwrap().replace("consumers.toml", "${NOT_GIVEN_FILE}");
    std::fs::write(&path, text).unwrap();
    let (code, _, err) = said(&["key", "list"], "");
    assert!(code == Some(2) && err.contains("`NOT_GIVEN_FILE` is not set"), "{err}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "no file is created");
}

/// Return the text with the key at this span renamed. If the key is the first part of a table header, rename it in all
/// table headers.
fn renamed(text: &str, span: &Range<usize>, name: &str) -> String {
    let old = &text[span.clone()];
    let renamed = format!("{}{name}{}", &text[..span.start], &text[span.end..]);
    let line = text[..span.start].rsplit('\n').next().unwrap_or_default();
    if line.trim_start_matches('[').is_empty() && line.starts_with('[') {
        let headers = ["[[", "["]
            .map(|bracket| [".", "]"].map(|end| (format!("\n{bracket}{old}{end}"), format!("\n{bracket}{name}{end}"))));
        return headers.iter().flatten().fold(format!("\n{text}"), |text, (from, to)| text.replace(from, to));
    }
    renamed
}

fn keys_of(table: &DeTable<'_>, keys: &mut Vec<Range<usize>>) {
    for (key, value) in table {
        keys.push(key.span());
        values_of(value.get_ref(), keys);
    }
}

fn values_of(value: &DeValue<'_>, keys: &mut Vec<Range<usize>>) {
    match value {
        DeValue::Table(table) => keys_of(table, keys),
        DeValue::Array(items) => items.iter().for_each(|item| values_of(item.get_ref(), keys)),
        _ => {}
    }
}

/// Rename each key of `valid/everything.toml`, and each key of the tables in `more`, which this file lacks. Each key is
/// renamed twice: to a misspelling of the key, and to a name that resembles no key.
#[test]
fn unknown_key_gives_one_error() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config/valid/everything.toml");
    let more = "[auth.files]\nkind = \"basic\"\nusers = \"../invalid/limit_by_another_provider.htpasswd\"\n\
                [auth.server]\nkind = \"forward\"\nurl = \"http://127.0.0.1:1/verify\"\ncache = { ttl = \"10s\" }\n\
                [notify.hook]\nwebhook = \"http://127.0.0.1:1/hook\"\nsecret = \"whsec_a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=\"\n\
                [limit.told]\nby = \"ip\"\nquota = \"10/day\"\nnotify = { to = \"hook\", at = [80] }\n\
                [limit.llm]\nby = \"ip\"\nquota = \"10000/day\"\ncost = { llm = \"auto\" }\nunit = \"tokens\"\n\
                [[route]]\nname = \"asked\"\npath = \"/asked\"\nrequire = [\"server\"]\nupstream = \"api\"\n\
                [[route]]\nname = \"upgraded\"\npath = \"/upgraded\"\nredirect = { scheme = \"https\" }\n";
    let text = format!("{}\n{more}", std::fs::read_to_string(&path).unwrap());
    let table = DeTable::parse(&text).unwrap();
    let mut spans = Vec::new();
    keys_of(table.get_ref(), &mut spans);
    spans.sort_by_key(|span| span.start);
    spans.dedup();
    let load = |text: String| CompiledConfig::from_text(&path, text, &|_| None).map(drop);
    if let Err(error) = load(text.clone()) {
        panic!("{error}");
    }
    let (mut faulty, mut tested) = (Vec::new(), 0);
    for span in spans {
        let key = text[span.clone()].to_owned();
        for name in [format!("{key}x"), "zzzzzzzz".to_owned()] {
            let Err(error) = load(renamed(&text, &span, &name)) else { continue };
            let error = error.to_string();
            // Skip names that the administrator chooses, and keys of maps, because any name is valid for them.
            if !error.contains(&format!("error: unknown key `{name}`")) {
                continue;
            }
            tested += 1;
            if error.matches("error: ").count() != 1 {
                faulty.push(format!("{key} as {name}:\n{error}"));
            }
        }
    }
    assert!(tested > 250, "{tested}");
    assert!(faulty.is_empty(), "{} of {tested} keys:\n{}", faulty.len(), faulty.join("\n\n"));
}

/// Return the seconds of user CPU time that `check` needs for a configuration with this number of routes.
fn cpu_time_of_check(routes: usize) -> f64 {
    let route = |number: usize| {
        format!(
            "[[route]]\nname = \"r{number}\"\npath = \"/v{}/{number}/{{id}}\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
            number % 7
        )
    };
    let tables: String = (0..routes).map(route).collect();
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    write!(file, "[[listener]]\naddress = \"127.0.0.1:1\"\n[client_ip]\ntrusted_proxies = []\n[limit.l]\nby = \"ip\"\nquota = \"1/s\"\n{tables}").unwrap();
    // `times` of the shell prints the CPU time of its children, which does not depend on the load of the machine.
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "\"$0\" check --offline --config \"$1\" > /dev/null && times"]);
    let output = shell.arg(binary().get_program()).arg(file.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let times = String::from_utf8(output.stdout).unwrap();
    let user = times.lines().last().unwrap().split_whitespace().next().unwrap();
    let (minutes, seconds) = user.trim_end_matches('s').split_once('m').unwrap();
    minutes.parse::<f64>().unwrap() * 60.0 + seconds.parse::<f64>().unwrap()
}

/// `check` and reloads compare no route with all others.
#[test]
fn time_of_check_is_proportional_to_the_number_of_routes() {
    let [few, many] = [2000, 10_000].map(cpu_time_of_check);
    println!("check: {few} s for 2,000 routes, {many} s for 10,000");
    assert!(many < 12.0 * few, "{few} s for 2,000 routes, {many} s for 10,000");
}
