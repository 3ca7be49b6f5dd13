//! `sluicegate doctor` on real Redis servers: it finds faults, gives advice, and never hangs.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use crate::support::gateway::binary;
use crate::support::redis::{Redis, free_port};
use crate::support::resp::{Answer, FakeRedis};
use crate::support::{MAX_WAIT, signal, upstream};
use serde_json::Value;
use sluicegate::clock::monotonic;

/// All algorithms. The configuration has one limit per algorithm, so that the gateway needs all Redis permissions.
const KINDS: [&str; 6] =
    ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets", "sliding-log", "concurrency"];

struct Examined {
    code: Option<i32>,
    out: String,
}

/// Run `sluicegate doctor` for the store at `url`.
fn examine(url: &str, timeout: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Examined {
    run("doctor", "", url, timeout, arguments, variables)
}

/// Run a subcommand of `sluicegate` with a configuration that starts with `begin` and uses the store at `url`.
fn run(
    subcommand: &str,
    begin: &str,
    url: &str,
    timeout: &str,
    arguments: &[&str],
    variables: &[(&str, &str)],
) -> Examined {
    let limit = |kind: &&str| {
        let quota = if *kind == "concurrency" { "3" } else { "3/24h" };
        let usage = if *kind == "token-bucket" { "usage = true\n" } else { "" };
        format!("[limit.{kind}]\nby = \"ip\"\nalgorithm = \"{kind}\"\nquota = \"{quota}\"\n{usage}")
    };
    let limits: String = KINDS.iter().map(limit).collect();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    let config = format!(
        "{begin}[store]\nurl = \"{url}\"\ntimeout = \"{timeout}\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n{limits}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = {KINDS:?}\nrespond = {{ status = 200 }}\n"
    );
    std::fs::write(&path, config).unwrap();
    let mut command = binary();
    command.arg(subcommand).arg("--config").arg(&path).args(arguments);
    let output =
        command.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE").envs(variables.iter().copied()).output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    Examined { code: output.status.code(), out: String::from_utf8(output.stdout).unwrap() }
}

/// A check in the report of `doctor`: name, status, finding and advice.
type Check = (String, String, String, Option<String>);

/// Run `doctor` for a store with one Redis server. Return the exit code and the checks of this server.
fn checks_with(url: &str, timeout: &str) -> (Option<i32>, Vec<Check>) {
    let examined = examine(url, timeout, &["--json"], &[]);
    let report: Value = serde_json::from_str(&examined.out).unwrap();
    assert_eq!(report["ok"].as_bool(), Some(examined.code == Some(0)), "{report}");
    assert_eq!(report["servers"].as_array().unwrap().len(), 1, "{report}");
    let server = &report["servers"][0];
    assert!(url.contains(server["address"].as_str().unwrap()), "{report}");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let checks = server["checks"].as_array().unwrap().iter().map(|check| {
        assert_eq!(check.as_object().unwrap().len(), 4, "{check}");
        let advice = check["advice"].as_str().map(str::to_owned);
        assert_eq!(advice.is_none(), check["advice"].is_null(), "{check}");
        (text(&check["name"]), text(&check["status"]), text(&check["message"]), advice)
    });
    (examined.code, checks.collect())
}

/// Call [`checks_with`] with a timeout that is long enough on a busy machine.
fn checks(url: &str) -> (Option<i32>, Vec<Check>) {
    checks_with(url, "5s")
}

/// Run `doctor`. Return the exit code, and the status and the text of the check `name`.
fn check(url: &str, name: &str) -> (Option<i32>, String, String) {
    let (code, checks) = checks(url);
    let found = checks.iter().find(|check| check.0 == name).unwrap_or_else(|| panic!("no {name} in {checks:?}"));
    (code, found.1.clone(), format!("{} {}", found.2, found.3.as_deref().unwrap_or_default()))
}

fn command(redis: &Redis, words: &[&str]) {
    redis::cmd(words[0]).arg(&words[1..]).exec(&mut redis.connection()).unwrap_or_else(|e| panic!("{words:?}: {e}"));
}

/// Create the Redis user `name` with the ACL rules from `docs/how-to/redis.md` and the password `secret`. Return the
/// store URL with this user, and the ACL rules.
fn user_of_the_manual(redis: &Redis, name: &str) -> (String, Vec<String>) {
    let manual = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/how-to/redis.md")).unwrap();
    let start = format!("ACL SETUSER {name} ");
    let line = manual.lines().find_map(|line| line.trim().strip_prefix(&start)).expect("the manual has the user");
    let words: Vec<_> = line.split(' ').map(|word| word.replace(">…", ">secret")).collect();
    redis::cmd("ACL").arg("SETUSER").arg(name).arg(&words).exec(&mut redis.connection()).unwrap();
    (format!("redis://{name}:secret@127.0.0.1:{}/1", redis.port), words)
}

#[test]
fn doctor_passes_a_healthy_server_and_leaves_no_keys() {
    let redis = Redis::start();
    let (code, checks) = checks(&redis.url());
    let names = [
        "reachable",
        "version",
        "role",
        "memory",
        "policy",
        "evictions",
        "keys",
        "persistence",
        "script time",
        "round trip",
        "clock",
        "permissions",
        "scripts",
        "decisions",
    ];
    assert_eq!(checks.iter().map(|check| check.0.as_str()).collect::<Vec<_>>(), names);
    assert!(checks.iter().all(|check| check.1 == "ok"), "{checks:?}");
    assert_eq!(code, Some(0));
    for (name, expected) in [
        ("role", "master with 0 replicas"),
        ("policy", "noeviction"),
        ("keys", "0 keys under rl:, 0 without a TTL; the whole database (0 keys) was scanned"),
        ("persistence", "none; 0 overrides stored"),
        ("script time", "limit of 5000 ms"),
        ("round trip", "of 50 calls; store.timeout is 5000 ms"),
        ("clock", "no rate limit decision depends on the difference"),
        ("permissions", "26 commands"),
        ("scripts", "10 scripts"),
        ("decisions", "6 algorithms tried"),
    ] {
        let found = &checks.iter().find(|check| check.0 == name).unwrap().2;
        assert!(found.contains(expected), "{name}: {found}");
    }
    assert_eq!(redis.keys(), Vec::<String>::new(), "the trial calls leave a key");
    let table = examine(&redis.url(), "5s", &[], &[]);
    assert_eq!(table.code, Some(0), "{}", table.out);
    assert!(
        table.out.starts_with(&format!("redis at 127.0.0.1:{}\n  ok        reachable   ", redis.port)),
        "{}",
        table.out
    );
    assert!(table.out.ends_with("0 failed, 0 with a warning, 0 skipped\n"), "{}", table.out);
    let coloured = |variables| examine(&redis.url(), "5s", &[], variables).out.contains("\u{1b}[32mok");
    assert!(!table.out.contains('\u{1b}'), "colours are for terminals: {:?}", table.out);
    assert!(coloured(&[("CLICOLOR_FORCE", "1")]) && !coloured(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
    let manual = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/how-to/redis.md")).unwrap();
    for name in names {
        assert!(manual.contains(&format!("\n| {name} |")), "the manual does not explain {name}");
    }
}

#[test]
fn keys_of_the_prefix_without_ttl_are_reported() {
    let redis = Redis::start();
    command(&redis, &["SET", "elsewhere", "1"]);
    command(&redis, &["SET", "rl:{a}:fine", "1", "EX", "1000"]);
    let (code, status, found) = check(&redis.url(), "keys");
    assert_eq!((code, status.as_str()), (Some(0), "ok"), "{found}");
    assert!(found.starts_with("1 key under rl: of about ") && found.contains("(2 keys)"), "{found}");
    command(&redis, &["SET", "rl:{a}:planted", "1"]);
    let (code, status, found) = check(&redis.url(), "keys");
    assert_eq!((code, status.as_str()), (Some(1), "failed"), "{found}");
    assert!(found.contains("1 without a TTL") && found.contains("such as rl:{a}:planted"), "{found}");
}

#[test]
fn key_scan_is_bounded_and_reports_how_far_it_came() {
    let redis = Redis::start();
    command(&redis, &["EVAL", "for i = 1, 150000 do redis.call('SET', 'other:' .. i, '1') end", "0"]);
    let (code, status, found) = check(&redis.url(), "keys");
    assert_eq!((code, status.as_str()), (Some(0), "ok"), "{found}");
    let looked = found.split("about ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    assert!(looked.is_some_and(|looked| looked <= 100_000), "{found}");
    assert!(found.contains("keys of the database (150000 keys) were scanned"), "{found}");
}

#[test]
fn eviction_policy_and_evicted_keys_are_reported() {
    let redis = Redis::start();
    command(&redis, &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let (code, status, found) = check(&redis.url(), "policy");
    assert_eq!((code, status.as_str()), (Some(0), "warning"), "without maxmemory, Redis evicts nothing: {found}");
    command(&redis, &["CONFIG", "SET", "maxmemory", "8mb"]);
    for (policy, why) in
        [("allkeys-lru", "any key"), ("volatile-ttl", "expire soonest"), ("volatile-lru", "with a TTL")]
    {
        command(&redis, &["CONFIG", "SET", "maxmemory-policy", policy]);
        let (code, status, found) = check(&redis.url(), "policy");
        assert_eq!((code, status.as_str()), (Some(1), "failed"), "{found}");
        assert!(found.contains(why) && found.contains("8.0 MiB") && found.contains("noeviction"), "{found}");
    }
    // Each value is small compared with `maxmemory`. So Redis evicts one key at a time, and its memory usage stays
    // above the threshold of the warning.
    let large = "x".repeat(1 << 17);
    for number in 0..96 {
        command(&redis, &["SET", &format!("large-{number}"), &large, "EX", "1000"]);
    }
    let (_, status, found) = check(&redis.url(), "evictions");
    assert!(status == "warning" && !found.starts_with("0 keys") && found.contains("raise maxmemory"), "{found}");
    let (_, status, found) = check(&redis.url(), "memory");
    assert!(status == "warning" && found.contains("of 8.0 MiB used"), "{found}");
}

#[test]
fn short_time_limit_of_scripts_is_a_warning() {
    let redis = Redis::start();
    for (limit, expected) in [("99", "warning"), ("100", "ok"), ("0", "ok")] {
        command(&redis, &["CONFIG", "SET", "lua-time-limit", limit]);
        let (code, status, found) = check(&redis.url(), "script time");
        assert_eq!((code, status.as_str()), (Some(0), expected), "{found}");
    }
}

#[test]
fn full_server_with_noeviction_fails_the_trial_with_its_reason() {
    let redis = Redis::start();
    command(&redis, &["CONFIG", "SET", "maxmemory", "100kb"]);
    let (code, status, found) = check(&redis.url(), "decisions");
    assert_eq!((code, status.as_str()), (Some(1), "failed"), "{found}");
    assert!(found.contains("Redis is out of memory; raise its maxmemory"), "{found}");
}

#[test]
fn checks_without_permission_are_skipped_for_the_gateway_user() {
    let redis = Redis::start();
    let (url, _) = user_of_the_manual(&redis, "gateway");
    let (code, checks) = checks(&url);
    assert_eq!(code, Some(0), "{checks:?}");
    let left_out: Vec<_> = checks.iter().filter(|check| check.1 != "ok").collect();
    let expected = [
        ("memory", "+info"),
        ("policy", "+config|get"),
        ("evictions", "+info"),
        ("keys", "+pttl"),
        ("persistence", "+config|get"),
        ("script time", "+config|get"),
    ];
    assert_eq!(left_out.len(), expected.len(), "{left_out:?}");
    for (check, (name, right)) in left_out.iter().zip(expected) {
        assert_eq!((check.0.as_str(), check.1.as_str()), (name, "skipped"), "{check:?}");
        assert_eq!(check.2, format!("the user lacks the permission {right}"));
    }
}

#[test]
fn no_check_is_skipped_for_the_doctor_user() {
    let redis = Redis::start();
    command(&redis, &["SET", "rl:{a}:fine", "1", "EX", "1000"]);
    let (url, _) = user_of_the_manual(&redis, "doctor");
    let (code, checks) = checks(&url);
    assert_eq!(code, Some(0), "{checks:?}");
    assert!(checks.iter().all(|check| check.1 == "ok"), "{checks:?}");
    let role = &checks.iter().find(|check| check.0 == "role").unwrap().2;
    assert_eq!(role, "master with 0 replicas");
}

#[test]
fn each_missing_permission_of_the_manual_is_named() {
    let redis = Redis::start();
    let (url, words) = user_of_the_manual(&redis, "gateway");
    // The gateway works without these permissions. It ignores the replies to HELLO and CLIENT SETNAME, and needs SELECT
    // only for databases other than 0.
    let spare = ["+hello", "+client|setname", "+select"];
    let rights: Vec<_> = words.iter().filter(|word| word.starts_with('+') && !spare.contains(&word.as_str())).collect();
    assert_eq!(rights.len(), 26, "{rights:?}");
    for right in rights {
        command(&redis, &["ACL", "SETUSER", "gateway", &right.replacen('+', "-", 1)]);
        let (code, status, found) = check(&url, "permissions");
        assert_eq!((code, status.as_str()), (Some(1), "failed"), "{right}: {found}");
        assert!(found.contains(&format!("{right} ")) || found.contains(&format!("{right};")), "{right}: {found}");
        command(&redis, &["ACL", "SETUSER", "gateway", right]);
    }
    command(&redis, &["ACL", "SETUSER", "gateway", "resetkeys", "~other:*"]);
    let (_, status, found) = check(&url, "permissions");
    assert!(status == "failed" && found.contains("~PREFIX:*"), "{found}");
    let (_, status, found) = check(&url, "decisions");
    assert!(status == "failed" && found.contains("~PREFIX:*"), "{found}");
}

#[test]
fn stream_of_quota_events_needs_a_permission_and_its_key() {
    const STREAM: &str = "[notify.billing]\nstream = \"sluicegate:events\"\n\
                          [limit.events]\nby = \"ip\"\nquota = \"3/24h\"\nnotify = \"billing\"\n";
    let redis = Redis::start();
    let (url, _) = user_of_the_manual(&redis, "gateway");
    let permissions = |begin: &str| {
        let examined = run("doctor", begin, &url, "5s", &["--json"], &[]);
        let report: Value = serde_json::from_str(&examined.out).unwrap();
        let checks = report["servers"][0]["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["name"] == "permissions").unwrap();
        (examined.code, check["status"].as_str().unwrap().to_owned(), check.to_string())
    };
    for (grant, expected) in [
        ("+xadd", "failed"),
        // `+xadd` alone is not sufficient. The user also needs access to the key of the stream, because this key does
        // not start with the prefix of the limits.
        ("-xadd", "failed"),
        ("~sluicegate:events", "failed"),
        ("+xadd", "ok"),
        ("-xadd", "failed"),
    ] {
        command(&redis, &["ACL", "SETUSER", "gateway", grant]);
        let (code, status, found) = permissions(STREAM);
        assert_eq!((code, status.as_str()), (Some(i32::from(expected == "failed")), expected), "{grant}: {found}");
        let is_named = found.contains("missing: +xadd ~sluicegate:events (of ") && found.contains("ACL SETUSER");
        assert_eq!(is_named, expected == "failed", "{grant}: {found}");
    }
    let (code, status, found) = permissions("");
    assert_eq!((code, status.as_str()), (Some(0), "ok"), "without a stream: {found}");
}

/// Start a relay to the Redis server at `port`, and return the URL of the relay. The relay can delay replies of the
/// server. For each piece of data that it reads from the server, it calls `hold` with the number of the piece (from 0)
/// and its bytes.
fn relay(port: u16, hold: impl Fn(usize, &[u8]) + Send + Sync + 'static) -> String {
    let address = upstream::serve(move |mut client| {
        let mut server = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (mut requests, mut replies) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut requests, &mut server));
        let (mut buffer, mut piece) = ([0; 1 << 16], 0);
        while let Ok(count @ 1..) = replies.read(&mut buffer) {
            hold(piece, &buffer[..count]);
            piece += 1;
            if client.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
    });
    format!("redis://{address}/0")
}

#[test]
fn replica_and_old_server_fail() {
    let (master, replica) = (Redis::start(), Redis::start());
    command(&replica, &["REPLICAOF", "127.0.0.1", &master.port.to_string()]);
    let (code, status, found) = check(&replica.url(), "role");
    assert!(code == Some(1) && status == "failed" && found.contains("is a replica"), "{found}");
    let hello = |version: &str| {
        let words = ["server", "redis", "version", version, "role", "master", "mode", "standalone"];
        let words: String = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
        format!("*8\r\n{words}")
    };
    for (version, expected) in [("6.0.16", "failed"), ("6.2.0", "ok")] {
        let fake = FakeRedis::start(move |command| match command.words[0].as_str() {
            "HELLO" => Answer::Text(hello(version)),
            "ROLE" => Answer::Text("*1\r\n$8\r\nsentinel\r\n".to_owned()),
            _ => Answer::Usual,
        });
        let (_, status, found) = check(&fake.url(), "version");
        assert_eq!(status, expected, "{version}: {found}");
        assert!(found.starts_with(&format!("redis {version} ")), "{found}");
        let (_, status, found) = check(&fake.url(), "role");
        assert_eq!((status.as_str(), found.as_str()), ("failed", "sentinel set store.url to the address of a master"));
    }
}

#[test]
fn slow_round_trip_is_judged_by_store_timeout() {
    let redis = Redis::start();
    let url = relay(redis.port, |_, _| std::thread::sleep(Duration::from_millis(20)));
    for (timeout, expected, advice) in [
        ("1ms", "failed", "Redis replies later than store.timeout"),
        ("10ms", "failed", "Redis replies later than store.timeout"),
        ("60ms", "warning", "is too short for these round trips"),
        ("1h", "ok", ""),
    ] {
        let (_, checks) = checks_with(&url, timeout);
        let (_, status, found, said) = checks.iter().find(|check| check.0 == "round trip").unwrap();
        assert_eq!(status, expected, "{found}");
        assert!(said.as_deref().unwrap_or_default().contains(advice), "{said:?}");
        let median: f64 = found.strip_prefix("median ").unwrap().split(' ').next().unwrap().parse().unwrap();
        assert!(median >= 20.0, "{found}");
        if expected != "ok" {
            let needed = said.as_ref().unwrap().split("store.timeout to at least ").nth(1).unwrap();
            let needed: f64 = needed.split_once("ms").unwrap().0.parse().unwrap();
            assert!(needed >= 4.0 * median.floor() && needed <= 4.0 * median + 5.0, "{found}: {needed}");
        }
    }
}

#[test]
fn timeout_advice_is_at_least_50_ms() {
    let redis = Redis::start();
    let url = relay(redis.port, |_, _| std::thread::sleep(Duration::from_millis(2)));
    let (_, checks) = checks_with(&url, "1ms");
    let (_, status, found, said) = checks.iter().find(|check| check.0 == "round trip").unwrap();
    assert_eq!(status, "failed", "{found}");
    assert!(said.as_ref().unwrap().contains("set store.timeout to at least 50ms"), "{said:?}");
}

#[test]
fn slow_connecting_is_a_warning() {
    let redis = Redis::start();
    let url = relay(redis.port, |piece, _| {
        if piece == 0 {
            std::thread::park_timeout(Duration::from_millis(700));
        }
    });
    let (_, status, found) = check(&url, "reachable");
    assert!(status == "warning" && found.contains("set store.connect_timeout to at least 1"), "{found}");
}

#[test]
fn check_warns_of_a_timeout_that_is_too_short_for_the_round_trip() {
    let redis = Redis::start();
    // All replies together take longer than the timeout of `check` for a store that does not reply. But each single
    // reply arrives in time.
    let url = relay(redis.port, |_, _| std::thread::sleep(Duration::from_millis(30)));
    let said = run("check", "", &url, "50ms", &[], &[]);
    assert_eq!(said.code, Some(0), "{}", said.out);
    let warned = |text: &str| said.out.contains(text);
    // On a busy machine, the median may be longer than `store.timeout`.
    let (_, median) = said.out.split_once("round trip: median ").unwrap_or_else(|| panic!("{}", said.out));
    let median: f64 = median.split(' ').next().unwrap().parse().unwrap();
    let verdict =
        if median >= 50.0 { "Redis replies later than store.timeout" } else { "is too short for these round trips" };
    assert!(median >= 30.0 && warned("store.timeout is 50 ms") && warned(verdict), "{}", said.out);
    assert!(warned("set store.timeout to at least ") && !warned("does not answer in time"), "{}", said.out);
    let fine = run("check", "", &url, "5s", &["--strict"], &[]);
    assert!(!fine.out.contains("round trip"), "{}", fine.out);
    let offline = run("check", "", &url, "50ms", &["--offline"], &[]);
    assert!(!offline.out.contains("round trip"), "{}", offline.out);
}

#[test]
fn overrides_without_persistence_are_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let redis = Redis::start_as(&["--dir", directory.path().to_str().unwrap()]);
    let admin = "[admin]\naddress = \"127.0.0.1:0\"\ntoken = \"secret\"\n";
    let warns = |begin: &str, url: &str| {
        let out = run("doctor", begin, url, "5s", &["--json"], &[]).out;
        let report: Value = serde_json::from_str(&out).unwrap();
        let checks = report["servers"][0]["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["name"] == "persistence").unwrap();
        let checked = run("check", begin, url, "5s", &[], &[]).out;
        let warns = check["status"] == "warning";
        assert_eq!(checked.contains("persistence: none"), warns, "check reports the same: {checked}");
        if warns {
            let advice = check["advice"].as_str().unwrap();
            assert!(advice.contains("write back the overrides") && advice.contains("all gateways restart"), "{advice}");
        }
        (warns, check["message"].as_str().unwrap().to_owned())
    };
    let url = redis.url();
    assert_eq!(warns("", &url), (false, "none; 0 overrides stored".to_owned()), "overrides cannot be set");
    assert_eq!(warns(admin, &url), (true, "none; 0 overrides stored".to_owned()));
    let far = 4_000_000_000_000_000_u64;
    command(&redis, &["HSET", "rl:overrides", "size/a/1", &format!("{far} 5 {far} {{}}")]);
    command(&redis, &["HSET", "rl:overrides", "size/a/2", &format!("0 5 {far} ")]);
    assert_eq!(warns("", &url), (true, "none; 1 override stored".to_owned()), "other gateways can set overrides");
    command(&redis, &["CONFIG", "SET", "save", "3600 1"]);
    assert_eq!(warns(admin, &url), (false, "Redis writes snapshots (save 3600 1), but no append-only file".to_owned()));
    command(&redis, &["CONFIG", "SET", "save", ""]);
    command(&redis, &["CONFIG", "SET", "appendonly", "yes"]);
    assert_eq!(warns(admin, &url), (false, "append-only file".to_owned()));
    command(&redis, &["CONFIG", "SET", "appendonly", "no"]);
    // If the Redis user has no permission for INFO, the reply to CONFIG GET is sufficient to detect missing
    // persistence.
    let (url, _) = user_of_the_manual(&redis, "doctor");
    command(&redis, &["ACL", "SETUSER", "doctor", "-info"]);
    command(&redis, &["DEL", "rl:overrides"]);
    assert!(warns(admin, &url).0);
}

#[test]
fn hanging_server_is_abandoned_at_the_deadline() {
    let redis = Redis::start();
    signal(&redis.child, "STOP");
    let started = monotonic();
    let (code, checks) = checks(&redis.url());
    let took = started.elapsed();
    signal(&redis.child, "CONT");
    assert_eq!((code, checks.len()), (Some(1), 1), "{checks:?}");
    assert!(checks[0].2.contains("does not answer in time"), "{checks:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn server_that_stops_replying_gets_no_further_checks() {
    let redis = Redis::start();
    // TCP may split the replies into any number of pieces, so the relay recognizes the reply to delay by its content.
    let url = relay(redis.port, |_, reply| {
        if memchr::memmem::find(reply, b"lua-time-limit").is_some() {
            std::thread::park_timeout(MAX_WAIT);
        }
    });
    let (code, checks) = checks(&url);
    let (last, before) = checks.split_last().unwrap();
    assert_eq!(code, Some(1), "{checks:?}");
    // On a busy machine, the check of the connection can be a warning.
    assert!(before.len() > 1 && before.iter().all(|check| check.1 != "failed"), "{checks:?}");
    assert!(last.0 == "script time" && last.1 == "failed" && last.2.contains("does not answer in time"), "{checks:?}");
}

#[test]
fn unreachable_server_and_wrong_password_are_one_failed_check() {
    let redis = Redis::start();
    let port = free_port();
    for (url, expected) in [
        (format!("redis://127.0.0.1:{port}/0"), format!("nothing listens at 127.0.0.1:{port}; start Redis there")),
        (format!("redis://:wrong@127.0.0.1:{}/0", redis.port), "Redis rejects this user or password".to_owned()),
    ] {
        let (code, checks) = checks(&url);
        assert_eq!((code, checks.len()), (Some(1), 1), "{checks:?}");
        let (name, status, found, _) = &checks[0];
        assert_eq!((name.as_str(), status.as_str()), ("reachable", "failed"));
        assert!(found.starts_with(&expected), "{found}");
        let table = examine(&url, "5s", &[], &[]);
        assert_eq!(table.code, Some(1));
        assert!(table.out.contains("  failed    reachable  ") && table.out.contains(&expected), "{}", table.out);
        assert!(!table.out.contains("wrong@"), "{}", table.out);
    }
}

#[test]
fn memory_store_has_no_checks_and_invalid_file_exits_with_2() {
    let table = examine("memory:", "5s", &[], &[]);
    assert_eq!(
        (table.code, table.out.as_str()),
        (Some(0), "store: memory: the store is not Redis, so there is no server to check\n")
    );
    let report: Value = serde_json::from_str(&examine("memory:", "5s", &["--json"], &[]).out).unwrap();
    assert_eq!(report, serde_json::json!({ "ok": true, "servers": [] }));
    let output = binary().args(["doctor", "--config", "/none.toml"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
}
