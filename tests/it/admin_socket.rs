//! The admin socket, `sluicegate reload` and `sluicegate check --against`.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::gateway::{Gateway, binary};
use crate::support::{eventually, signal};
use aws_lc_rs::digest::{SHA256, digest};
use serde_json::Value;

const SOCKET: &str = "[admin]\nsocket = \"admin.sock\"\n";

fn config(quota: &str, more: &str) -> String {
    format!(
        "[limit.id]\nby = \"header:x-id\"\nquota = \"{quota}\"\nalgorithm = \"fixed-window\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"id\"]\nrespond = {{ status = 200 }}\n{more}"
    )
}

fn command(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = binary();
    command.arg("--config").arg(directory.join("gateway.toml")).args(arguments);
    command.env_remove("SLUICEGATE_ADMIN_TOKEN").env_remove("RUNTIME_DIRECTORY");
    command
}

fn run(gateway: &Gateway, arguments: &[&str]) -> (Option<i32>, String) {
    said(&command(gateway.directory(), arguments).output().unwrap())
}

fn said(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap())
}

/// Wait until the admin socket accepts connections. The gateway may log its addresses earlier, so the log is not
/// sufficient.
fn await_socket(path: &Path) {
    eventually("the admin socket has its name", || std::os::unix::net::UnixStream::connect(path).is_ok());
}

/// Start a gateway with the environment variable `RUNTIME_DIRECTORY`. The gateway creates its admin socket in this
/// directory.
fn start_in(runtime_directory: &Path, config: &str) -> Gateway {
    let gateway = Gateway::start_by(config, |path| {
        let mut command = binary();
        command.arg("--config").arg(path).env("RUNTIME_DIRECTORY", runtime_directory);
        command
    });
    if !config.contains("\"off\"") {
        await_socket(&runtime_directory.join("admin.sock"));
    }
    gateway
}

#[test]
fn reload_reports_what_changed_and_fails_if_it_is_rejected() {
    let gateway = Gateway::start(&config("10/3650d", SOCKET));
    let socket = gateway.directory().join("admin.sock");
    await_socket(&socket);
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let (code, text) = run(&gateway, &["reload"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("no key has changed"), "{text}");

    gateway.put(&config("20/3650d", &format!("{SOCKET}[server]\ndrain_timeout = \"9s\"\n")));
    let (code, text) = run(&gateway, &["reload"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("reloaded; 2 differences\n"), "{text}");
    assert!(text.contains("\n  limit `id`: quota \"10/3650d\" → \"20/3650d\"\n"), "{text}");
    assert!(text.contains("\n  server.drain_timeout = \"9s\" added\n"), "{text}");
    let (code, text) = run(&gateway, &["reload", "--json"]);
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &json["result"], json["changes"].as_array().unwrap().len()), (Some(0), &"ok".into(), 2));

    let restart = format!("{}[store]\ntimeout = \"77ms\"\n", config("20/3650d", SOCKET));
    for (bad, error) in [
        (config("20/eon", SOCKET), "20/eon"),
        // This file is not valid TOML. `sluicegate reload` must find the admin socket of the gateway nevertheless.
        (format!("{SOCKET}= ="), "rejected"),
        (restart, "store.timeout cannot change while the gateway runs"),
    ] {
        gateway.put(&bad);
        let output = command(gateway.directory(), &["reload"]).env("RUNTIME_DIRECTORY", gateway.directory()).output();
        let (code, text) = said(&output.unwrap());
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains("the active configuration stays in force") && text.contains(error), "{error}: {text}");
    }
    assert_eq!(gateway.get("/r").status, 400, "a header is missing: the limit is in force");
}

/// Run the `ExecReload` command of the systemd unit. `systemctl reload` prints the command's output and fails if the
/// command fails.
#[test]
fn reload_command_of_the_systemd_unit_reports_what_changed_and_what_is_wrong() {
    let runtime = tempfile::tempdir().unwrap();
    let gateway = start_in(runtime.path(), &config("10/3650d", ""));
    let unit = std::fs::read_to_string(format!("{}/ops/sluicegate.service", env!("CARGO_MANIFEST_DIR"))).unwrap();
    assert!(unit.contains("\nRuntimeDirectory=sluicegate\n"));
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecReload=")).unwrap();
    let line = line.replace("/usr/local/bin/sluicegate", binary().get_program().to_str().unwrap());
    let line = line.replace("/etc/sluicegate", gateway.directory().to_str().unwrap());
    let mut words = line.split(' ');
    let mut reload = Command::new(words.next().unwrap());
    reload.args(words).env("RUNTIME_DIRECTORY", runtime.path());
    let mut run = || said(&reload.output().unwrap());
    assert_eq!(run().0, Some(0));
    for (quota, expected) in [
        ("20/3650d", "reloaded; 1 difference\n  limit `id`: quota \"10/3650d\" → \"20/3650d\"\n"),
        ("30/3650d", "reloaded; 1 difference\n  limit `id`: quota \"20/3650d\" → \"30/3650d\"\n"),
    ] {
        gateway.put(&config("none", ""));
        let (code, text) = run();
        assert_eq!(code, Some(1), "{text}");
        let place = format!("{}:3:", gateway.directory().join("gateway.toml").display());
        for part in ["the active configuration stays in force", "`none` is not a quota", &place] {
            assert!(text.contains(part), "{part}: {text}");
        }
        gateway.put(&config(quota, ""));
        let (code, text) = run();
        assert_eq!(code, Some(0), "{text}");
        assert!(text.ends_with(expected), "{text}");
    }
}

#[test]
fn socket_is_removed_at_the_end_and_used_by_one_gateway_only() {
    let runtime = tempfile::tempdir().unwrap();
    let socket = runtime.path().join("admin.sock");
    let mut gateway = start_in(runtime.path(), &config("10/3650d", ""));
    assert!(socket.exists());
    let second = tempfile::tempdir().unwrap();
    let text = config("10/3650d", "[[listener]]\naddress = \"127.0.0.1:0\"\n");
    std::fs::write(second.path().join("gateway.toml"), text).unwrap();
    let output = command(second.path(), &[]).env("RUNTIME_DIRECTORY", runtime.path()).output().unwrap();
    let (code, text) = said(&output);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("admin.sock: another process listens on this socket"), "{text}");
    assert!(socket.exists(), "the socket of the first gateway stays");
    // A killed gateway leaves its socket file behind. The next gateway replaces this file.
    gateway.child.kill().unwrap();
    gateway.wait();
    assert!(socket.exists());
    let mut gateway = start_in(runtime.path(), &config("10/3650d", ""));
    let reload = || command(second.path(), &["reload"]).env("RUNTIME_DIRECTORY", runtime.path()).output().unwrap();
    assert_eq!(said(&reload()).0, Some(0));
    gateway.terminate();
    assert!(gateway.wait().success());
    assert_eq!(std::fs::read_dir(runtime.path()).unwrap().count(), 0);
    let (code, text) = said(&reload());
    assert!(code == Some(1) && text.contains("no admin socket of a running gateway was found"), "{text}");

    let off = start_in(runtime.path(), &config("10/3650d", "[admin]\nsocket = \"off\"\n"));
    assert_eq!(std::fs::read_dir(runtime.path()).unwrap().count(), 0, "{}", off.log());
}

#[test]
fn new_process_of_a_hot_restart_takes_the_socket() {
    let runtime = tempfile::tempdir().unwrap();
    let mut gateway = start_in(runtime.path(), &config("10/3650d", ""));
    let reload =
        || said(&command(gateway.directory(), &["reload"]).env("RUNTIME_DIRECTORY", runtime.path()).output().unwrap());
    // If the new process of a hot restart rejects the configuration, the old process keeps the admin socket.
    gateway.put(&config("none", ""));
    signal(&gateway.child, "USR2");
    eventually("a failed hot restart", || gateway.log().contains("hot restart failed"));
    assert_eq!(reload().0, Some(1));
    gateway.put(&config("10/3650d", ""));
    assert_eq!(reload().0, Some(0));
    signal(&gateway.child, "USR2");
    assert!(gateway.wait().success());
    let log = gateway.log();
    let line = log.lines().find(|line| line.contains("the new process is serving")).unwrap();
    let pid = serde_json::from_str::<Value>(line).unwrap()["pid"].to_string();
    let (code, text) =
        said(&command(gateway.directory(), &["reload"]).env("RUNTIME_DIRECTORY", runtime.path()).output().unwrap());
    assert!(Command::new("kill").arg(&pid).status().unwrap().success());
    assert_eq!(code, Some(0), "{text}");
    eventually("the new process has ended", || !runtime.path().join("admin.sock").exists());
}

#[test]
fn check_against_names_differences_restarts_ports_and_identities() {
    let gateway = Gateway::start(&config(
        "10/3650d",
        &format!("{SOCKET}[[route]]\nname = \"old\"\npath = \"/old\"\nrespond = {{ status = 200 }}\n"),
    ));
    let mut client = gateway.client();
    // The running gateway lists only identities that it has denied. So exceed the limit with the identity `a`.
    for _ in 0..12 {
        client.get_with("/r", &[("x-id", "a")]);
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let check = |text: &str, arguments: &[&str]| {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("gateway.toml"), text).unwrap();
        let socket = gateway.directory().join("admin.sock");
        let arguments = [&["check", "--against", socket.to_str().unwrap()], arguments].concat();
        said(&command(directory.path(), &arguments).output().unwrap())
    };
    let listener = "[log]\naccess = \"off\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n";
    let new_route = "[[route]]\nname = \"new\"\npath = \"/new\"\nrespond = { status = 200 }\n";
    let (code, text) = check(&config("5/3650d", &format!("{SOCKET}{new_route}{listener}")), &[]);
    assert_eq!(code, Some(0), "{text}");
    for expected in [
        "differences from the running gateway:\n  limit `id`: quota \"10/3650d\" → \"5/3650d\"\n  route `new`: added\n  route `old`: removed\n",
        "identities whose usage exceeds a new quota; their requests are denied until the usage has decreased:\n  limit `id`: header:x-id=(hidden) (",
        ") has used 10, but the new quota 5/3650d admits at most 5\n",
    ] {
        assert!(text.contains(expected), "{expected} is not in\n{text}");
    }
    assert!(!text.contains("restart"), "{text}");

    // If the window of a quota changes, the limit starts with new counters.
    let (code, text) = check(&config("5/30d", &format!("{SOCKET}{listener}")), &[]);
    assert!(code == Some(0) && !text.contains("known identities"), "{text}");

    let address = taken.local_addr().unwrap();
    let moved = format!("{SOCKET}[log]\naccess = \"off\"\n[[listener]]\naddress = \"{address}\"\n");
    let (code, text) = check(&config("10/3650d", &moved), &[]);
    assert_eq!(code, Some(2), "{text}");
    let rejected = "changed keys that need a restart (a reload would be rejected):\n  listener.address\n";
    assert!(text.contains(rejected), "{text}");
    let expected = format!("a restart would fail:\n  cannot listen on {address} while the gateway runs: ");
    assert!(text.contains(&expected), "{text}");
    let (code, text) = check(&config("10/3650d", &moved), &["--json"]);
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (code, &json["ok"], &json["against"]["restart"]),
        (Some(2), &false.into(), &serde_json::json!(["listener.address"]))
    );
    assert_eq!(json["against"]["unavailable"].as_array().unwrap().len(), 1);
}

/// Return a consumers file. Each consumer NAME has the key `key-of-NAME`, and further TOML lines for its tier or its
/// quotas.
fn consumers(all: &[(&str, &str)]) -> String {
    let entry = |(name, more): &(&str, &str)| {
        let hash = digest(&SHA256, format!("key-of-{name}").as_bytes());
        let digits: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[consumer]]\nname = \"{name}\"\nkeys = [\"sha256:{digits}\"]\n{more}\n")
    };
    all.iter().map(entry).collect()
}

/// `check --against` compares the usage of each consumer with the consumer's new quota. This quota comes from
/// `consumers.toml`, from the consumer's tier or from an override.
#[test]
fn check_against_names_consumers_above_their_own_new_quota() {
    let config = |all: u32, gold: u32, anonymous: u32| {
        format!(
            "{SOCKET}[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_missing = \"anonymous\"\n\
             [limit.calls]\nby = \"api-key\"\nalgorithm = \"fixed-window\"\nquota = \"{all}/3650d\"\n\
             tiers = {{ gold = {{ quota = \"{gold}/3650d\" }}, anonymous = {{ quota = \"{anonymous}/3650d\" }} }}\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nidentify = [\"keys\"]\nlimits = [\"calls\"]\n\
             respond = {{ status = 200 }}\n[log]\naccess = \"off\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n"
        )
    };
    let own = "limit.calls = { quota = \"14/3650d\" }";
    let before = [("plain", ""), ("gold", "tier = \"gold\""), ("own", own), ("given", ""), ("gone", ""), ("idle", "")];
    let old = config(10, 20, 30);
    let gateway = Gateway::start_with(&old, &[("consumers.toml", &consumers(&before))]);
    let socket = gateway.directory().join("admin.sock");
    await_socket(&socket);
    let (code, text) = run(
        &gateway,
        &[
            "override",
            "set",
            "--admin",
            socket.to_str().unwrap(),
            "--limit",
            "calls",
            "api-key=given",
            "--quota",
            "50/3650d",
            "--ttl",
            "1h",
        ],
    );
    assert_eq!(code, Some(0), "{text}");
    let send = |name: &str, times: usize, status: u16| {
        let key = format!("key-of-{name}");
        let headers = [("x-api-key", &*key)];
        let headers = if name.is_empty() { &[][..] } else { &headers };
        let mut client = gateway.client();
        let mut last = 0;
        (0..times).for_each(|_| last = client.get_with("/r", headers).status);
        assert_eq!(last, status, "{name}");
    };
    // Usage of the limit `calls` after each call of `send`, in the same order: 9 of 10, 18 of 20, 12 of 14, 12 of 50
    // and 9 of 10 requests. The anonymous client has used 30 of 30.
    send("plain", 9, 200);
    send("gold", 18, 200);
    send("own", 12, 200);
    send("given", 12, 200);
    send("gone", 9, 200);
    // The last request exceeds the limit. The gateway therefore knows the address of the anonymous client.
    send("", 31, 429);

    let check = |config: &str, all: &[(&str, &str)]| {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("gateway.toml"), config).unwrap();
        std::fs::write(directory.path().join("consumers.toml"), consumers(all)).unwrap();
        let arguments = ["check", "--json", "--against", socket.to_str().unwrap()];
        let (code, text) = said(&command(directory.path(), &arguments).output().unwrap());
        assert_eq!(code, Some(0), "{text}");
        let json: Value = serde_json::from_str(&text).unwrap();
        let over = json["against"]["over_quota"].as_array().unwrap().iter().map(|over| {
            let [limit, identity] = ["limit", "identity"].map(|key| over[key].as_str().unwrap());
            let identity = identity.split(" (").next().unwrap();
            format!(
                "{limit}: {identity}: {} of {}, {}",
                over["used"],
                over["capacity"],
                over["quota"].as_str().unwrap()
            )
        });
        over.collect::<Vec<_>>()
    };
    let none: [String; 0] = [];
    assert_eq!(check(&old, &before), none, "no quota has changed");
    // The default quota applies to `plain`, `gone` and `idle`. `given` keeps its override.
    let over = check(&config(5, 20, 30), &before);
    assert_eq!(over, ["calls: api-key=gone: 9 of 5, 5/3650d", "calls: api-key=plain: 9 of 5, 5/3650d"]);
    let over = check(&config(10, 17, 30), &before);
    assert_eq!(over, ["calls: api-key=gold: 18 of 17, 17/3650d"]);
    let over = check(&config(10, 20, 29), &before);
    assert_eq!(over, ["calls: anonymous=127.0.0.1: 30 of 29, 29/3650d"]);
    // The command does not report larger quotas or changes of other configuration keys.
    assert_eq!(check(&config(11, 21, 31), &before), none);
    assert_eq!(check(&old.replace("[[route]]", "announce = false\n[[route]]"), &before), none);

    // A consumers file with other tiers and quotas. It does not contain `gone`, and the running gateway does not know
    // `new`.
    let after = [
        ("plain", "tier = \"gold\""),
        ("gold", ""),
        ("own", "limit.calls = { quota = \"11/3650d\" }"),
        ("given", "limit.calls = { quota = \"1/3650d\" }"),
        ("idle", "limit.calls = { quota = \"1/3650d\" }"),
        ("new", ""),
    ];
    let over = check(&old, &after);
    assert_eq!(over, ["calls: api-key=gold: 18 of 10, 10/3650d", "calls: api-key=own: 12 of 11, 11/3650d"]);
    // If the window, the algorithm or the limit key changes, the limit starts with new counters.
    for (old_text, new_text) in [
        ("quota = \"10/3650d\"\ntiers", "quota = \"1/30d\"\ntiers"),
        (
            "by = \"api-key\"\nalgorithm = \"fixed-window\"\nquota = \"10/",
            "by = \"api-key\"\nalgorithm = \"sliding-log\"\nquota = \"1/",
        ),
        (
            "by = \"api-key\"\nalgorithm = \"fixed-window\"\nquota = \"10/",
            "by = [\"api-key\", \"host\"]\nalgorithm = \"fixed-window\"\nquota = \"1/",
        ),
    ] {
        let new = old.replace(old_text, new_text);
        assert_ne!(new, old);
        let over = check(&new, &before);
        assert!(over.iter().all(|over| !over.contains("plain")), "{new_text}: {over:?}");
    }
}

/// If an identity consists of several parts, `check --against` queries the running gateway by these parts. A query by
/// hash would not use the tier of the consumer.
#[test]
fn check_against_knows_the_tier_of_denied_identities_of_several_parts() {
    let config = |quota: u32, gold: u32| {
        format!(
            "{SOCKET}[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
             [limit.routes]\nby = [\"api-key\", \"route\"]\nalgorithm = \"fixed-window\"\nquota = \"{quota}/3650d\"\n\
             tiers = {{ gold = {{ quota = \"{gold}/3650d\" }} }}\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nidentify = [\"keys\"]\nlimits = [\"routes\"]\n\
             respond = {{ status = 200 }}\n[log]\naccess = \"off\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n"
        )
    };
    let all = consumers(&[("plain", ""), ("gold", "tier = \"gold\"")]);
    let gateway = Gateway::start_with(&config(5, 9), &[("consumers.toml", &all)]);
    let socket = gateway.directory().join("admin.sock");
    await_socket(&socket);
    for name in ["plain", "gold"] {
        let key = format!("key-of-{name}");
        (0..10).for_each(|_| drop(gateway.client().get_with("/r", &[("x-api-key", &key)])));
    }
    for (quota, gold, expected) in [
        (4, 9, &["limit `routes`: api-key=plain route=r ("][..]),
        (5, 8, &["limit `routes`: api-key=gold route=r ("]),
        (6, 9, &[]),
        (4, 8, &["limit `routes`: api-key=gold route=r (", "limit `routes`: api-key=plain route=r ("]),
    ] {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("gateway.toml"), config(quota, gold)).unwrap();
        std::fs::write(directory.path().join("consumers.toml"), &all).unwrap();
        let arguments = ["check", "--against", socket.to_str().unwrap()];
        let (code, text) = said(&command(directory.path(), &arguments).output().unwrap());
        assert_eq!(code, Some(0), "{text}");
        let over: Vec<_> = text.lines().filter(|line| line.contains(" has used ")).collect();
        assert_eq!(over.len(), expected.len(), "{text}");
        for (line, start) in over.iter().zip(expected) {
            assert!(line.trim_start().starts_with(start), "{line} does not start with {start}");
        }
        assert!(
            !text.contains("api-key=gold") || text.contains("has used 9, but the new quota 8/3650d admits at most 8"),
            "{text}"
        );
    }
}
