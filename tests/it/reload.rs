//! A reload applies a new configuration at once and completely, also to open connections. An invalid configuration
//! changes nothing.

use std::io::Read;
use std::net::{IpAddr, TcpListener};
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::support::admin_listener::{self, HERE};
use crate::support::certificates::Authority;
use crate::support::client::{Client, load};
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::{Redis, free_port};
use crate::support::reload::{ADMIN, ask, metric, reload, reloads, says, with_admin};
use crate::support::upstream::Upstream;
use crate::support::{eventually, signal};
use serde_json::Value;

#[test]
fn open_connections_use_the_new_configuration_for_the_next_request() {
    let old = format!("{}[[route]]\nname = \"old\"\npath = \"/old\"\nrespond = {{ status = 200 }}\n", says("one"));
    let gateway = Gateway::start(&with_admin(&old));
    let mut client = gateway.client();
    assert_eq!((client.get("/says").text(), client.get("/old").status, client.get("/new").status), ("one", 200, 404));
    let new = format!(
        "{}limits = [\"one\"]\n[limit.one]\nby = \"ip\"\nquota = \"1/day\"\nalgorithm = \"fixed-window\"\n\
         [[route]]\nname = \"new\"\npath = \"/new\"\nrespond = {{ status = 200 }}\n",
        says("two")
    );
    reloads(&gateway, &new);
    assert_eq!(
        (client.get("/says").text(), client.get("/says").status),
        ("two", 429),
        "the reload changes the body and adds a limit"
    );
    assert_eq!(
        (client.get("/new").status, client.get("/old").status),
        (200, 404),
        "the reload adds one route and removes another"
    );
    reloads(&gateway, &says("three"));
    assert_eq!(client.get("/says").text(), "three", "the reload removes the limit");
}

#[test]
fn renamed_file_and_sighup_reload_the_configuration() {
    let gateway = Gateway::start(&says("one"));
    gateway.put(&says("two"));
    eventually("a renamed file is used", || gateway.get("/says").text() == "two");
    std::fs::write(gateway.directory().join("gateway.toml"), "no toml").unwrap();
    eventually("a file written in place is used as well", || gateway.log().contains("stays in force"));
    // The file watcher does not see changes behind a symlink to another directory.
    let elsewhere = tempfile::tempdir().unwrap();
    let write = |body: &str| {
        let text = format!("{}[[listener]]\naddress = \"127.0.0.1:0\"\n[log]\naccess = \"off\"\n", says(body));
        std::fs::write(elsewhere.path().join("real"), text).unwrap();
    };
    write("three");
    symlink(elsewhere.path().join("real"), gateway.directory().join("link")).unwrap();
    std::fs::rename(gateway.directory().join("link"), gateway.directory().join("gateway.toml")).unwrap();
    eventually("the symlink is followed", || gateway.get("/says").text() == "three");
    write("four");
    signal(&gateway.child, "HUP");
    eventually("SIGHUP reloads", || gateway.get("/says").text() == "four");
}

#[test]
fn kubernetes_config_map_is_reloaded_with_its_files() {
    // Kubernetes mounts files through two symlinks: `gateway.toml` → `..data/gateway.toml`, and `..data` → a directory
    // with a generated name. All files change at the same time.
    let folder = tempfile::tempdir().unwrap();
    let key = |key: &str| {
        use aws_lc_rs::digest::{SHA256, digest};
        let hash: String = digest(&SHA256, key.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("\"sha256:{hash}\"")
    };
    for (name, body, tier) in [("..1", "one", "free"), ("..2", "two", "gold")] {
        std::fs::create_dir(folder.path().join(name)).unwrap();
        let config = format!(
            "[[listener]]\naddress = \"127.0.0.1:0\"\n[log]\naccess = \"off\"\n[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
             {}identify = [\"keys\"]\nlimits = [\"keys\"]\n[limit.keys]\nby = \"api-key\"\nquota = \"9/day\"\ntiers = {{ {tier} = {{ quota = \"5/day\" }} }}\n",
            says(body)
        );
        let consumers = format!("[[consumer]]\nname = \"c\"\ntier = \"{tier}\"\nkeys = [{}]\n", key(body));
        std::fs::write(folder.path().join(name).join("gateway.toml"), config).unwrap();
        std::fs::write(folder.path().join(name).join("consumers.toml"), consumers).unwrap();
    }
    symlink("..1", folder.path().join("..data")).unwrap();
    for name in ["gateway.toml", "consumers.toml"] {
        symlink(Path::new("..data").join(name), folder.path().join(name)).unwrap();
    }
    let gateway = Gateway::start_file(&folder.path().join("gateway.toml"));
    let ask = |key: &str| gateway.client().get_with("/says", &[("x-api-key", key)]);
    assert_eq!((ask("one").text(), ask("two").status), ("one", 401));
    symlink("..2", folder.path().join("..tmp")).unwrap();
    std::fs::rename(folder.path().join("..tmp"), folder.path().join("..data")).unwrap();
    eventually("the new ones apply", || ask("two").text() == "two");
    assert_eq!(ask("one").status, 401);
    // If the gateway had reloaded one file without the other, it would have logged an error.
    assert!(!gateway.log().contains("cannot reload"), "{}", gateway.log());
}

#[test]
fn invalid_file_changes_nothing_and_is_reported() {
    let gateway = Gateway::start(&with_admin(&says("one")));
    let shown = || ask(&gateway, "GET", "/api/config").json();
    assert!(shown()["last_error"].is_null() && shown()["loaded_at"].as_str().unwrap().ends_with('Z'), "{}", shown());
    let successful = |line: &str| metric(&gateway, &format!("config_last_reload_{line}"));
    let since = successful("success_timestamp_seconds");
    assert_eq!((successful("successful"), metric(&gateway, "config_reloads_total{result=\"error\"}")), (1.0, 0.0));

    let reply = reload(&gateway, &says("two").replace("respond", "respnd"));
    assert_eq!(reply.status, 422, "{}", reply.text());
    let parts = ["unknown key `respnd`", "gateway.toml:7:1", "respnd = { status = 200", "did you mean `respond`?"];
    for told in [reply.json()["error"].as_str().unwrap(), shown()["last_error"]["error"].as_str().unwrap()] {
        assert!(parts.iter().all(|part| told.contains(part)), "{told}");
    }
    eventually("the error is logged", || parts.iter().all(|part| gateway.log().contains(part)));
    assert_eq!(gateway.get("/says").text(), "one");
    assert_eq!((successful("successful"), successful("success_timestamp_seconds")), (0.0, since));
    assert!(metric(&gateway, "config_reloads_total{result=\"error\"}") >= 1.0);
    assert_eq!(shown()["configuration"]["route"][0]["respond"]["body"], "one", "the active configuration is shown");

    reloads(&gateway, &says("three"));
    assert_eq!(successful("successful"), 1.0);
    assert!(shown()["last_error"].is_null());
    assert_eq!(shown()["configuration"]["route"][0]["respond"]["body"], "three");
    std::fs::remove_file(gateway.directory().join("gateway.toml")).unwrap();
    let reply = ask(&gateway, "POST", "/api/reload");
    assert_eq!(reply.status, 422, "the configuration names a missing file");
    assert!(reply.text().contains("cannot be read"), "{}", reply.text());
    assert_eq!(gateway.get("/says").text(), "three");
}

#[test]
fn invalid_file_is_tried_once_and_other_files_are_reloaded() {
    let consumers = |digit: &str| format!("[[consumer]]\nname = \"a\"\nkeys = [\"sha256:{}\"]\n", digit.repeat(64));
    // The file watcher does not see changes behind a symlink to another directory.
    let (linked, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (link, target) = (linked.path().join("consumers.toml"), elsewhere.path().join("consumers.toml"));
    std::fs::write(&target, consumers("0")).unwrap();
    symlink(&target, &link).unwrap();
    let keys = format!("[auth.keys]\nkind = \"api-key\"\nconsumers = {link:?}\n");
    let config = |body: &str| with_admin(&format!("{keys}{}", says(body)));
    let gateway = Gateway::start(&config("one"));
    std::fs::write(&target, consumers("1")).unwrap();
    gateway.put(&config("two").replace("respond", "respnd"));
    assert_eq!(ask(&gateway, "POST", "/api/reload").status, 422);
    eventually("the other file is read again", || {
        gateway.log().lines().any(|line| line.contains("reloaded") && line.contains("consumers.toml"))
    });
    // Once for the request, and once for the changed file if it was noticed before.
    let tries = gateway.log().matches("cannot reload the configuration").count();
    assert!((1..=2).contains(&tries), "{}", gateway.log());
}

#[test]
fn keys_that_need_a_restart_are_rejected_by_name() {
    let base = |server: &str, admin: &str, store: &str, log: &str, listeners: &[&str], body: &str| {
        let listeners: String =
            listeners.iter().map(|address| format!("[[listener]]\naddress = \"{address}\"\n")).collect();
        format!(
            "[server]\n{server}\n{admin}[store]\n{store}\n[log]\naccess = \"off\"\n{log}\n{listeners}{}",
            says(body)
        )
    };
    let (server, store, log, listeners) = ("workers = 2", "prefix = \"a\"", "level = \"info\"", ["127.0.0.1:0"]);
    let gateway = Gateway::start(&base(server, ADMIN, store, log, &listeners, "one"));
    let other_admin = ADMIN.replace("127.0.0.1:0", "[::1]:0");
    let no_admin = "";
    for (config, keys) in [
        (base("workers = 3", ADMIN, store, log, &listeners, "two"), &["server.workers"][..]),
        (
            base("workers = 2\nthreading = \"work-stealing\"", ADMIN, store, log, &listeners, "two"),
            &["server.threading"],
        ),
        (base(server, &other_admin, store, log, &listeners, "two"), &["admin.address"]),
        (base(server, no_admin, store, log, &listeners, "two"), &["admin.address"]),
        (
            base(server, ADMIN, "prefix = \"b\"\ntimeout = \"1s\"", log, &listeners, "two"),
            &["store.prefix", "store.timeout"],
        ),
        (base(server, ADMIN, "prefix = \"a\"\nsecret = \"planted\"", log, &listeners, "two"), &["store.secret"]),
        (
            base(server, ADMIN, "prefix = \"a\"\nurl = \"redis://:planted@127.0.0.1:1\"", log, &listeners, "two"),
            &["store.url"],
        ),
        (base(server, ADMIN, store, "level = \"warn\"", &listeners, "two"), &["log.level"]),
        (base(server, ADMIN, store, log, &["127.0.0.1:0", "127.0.0.1:0"], "two"), &["listener.address"]),
        (base(server, ADMIN, store, log, &["[::1]:0"], "two"), &["listener.address"]),
    ] {
        gateway.put(&config);
        let reply = ask(&gateway, "POST", "/api/reload");
        assert_eq!(reply.status, 422, "{keys:?}: {}", reply.text());
        let error = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(error.starts_with(&format!("{} cannot change", keys.join(", "))), "{keys:?}: {error}");
        eventually("the error is logged", || gateway.log().contains(&error));
        assert!(!gateway.log().contains("planted"), "{}", gateway.log());
        assert_eq!(gateway.get("/says").text(), "one", "{keys:?}");
    }
    // A reload can change all other keys, even keys in the same tables as the keys above.
    gateway.put(&base(
        "workers = 2\nmax_uri = \"1KiB\"",
        &ADMIN.replace("sesame", "open"),
        store,
        log,
        &listeners,
        "two",
    ));
    assert_eq!(ask(&gateway, "POST", "/api/reload").status, 200);
    assert_eq!(gateway.get("/says").text(), "two");
    assert_eq!(ask(&gateway, "GET", "/healthz").status, 401, "the old token is rejected");
    let reply = Client::connect(gateway.admin()).get_with("/healthz", &[("authorization", "Bearer open")]);
    assert_eq!(reply.status, 200);
}

/// Write the gateway's configuration file and run `check` on it. Return its exit code and output.
fn checked(gateway: &Gateway, config: &str, arguments: &[&str]) -> (Option<i32>, String) {
    gateway.put_file("gateway.toml", config);
    check_file(&gateway.directory().join("gateway.toml"), arguments)
}

fn check_file(path: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = binary();
    command.arg("check").args(arguments).arg("--config").arg(path).env_remove("SLUICEGATE_ADMIN_TOKEN");
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

const REFUSED: &str = "warning: a reload will reject this file: ";

#[test]
fn check_warns_of_keys_that_a_reload_of_the_running_gateway_rejects() {
    let (admin, port, other, dead) = (free_port(), free_port(), free_port(), free_port());
    let base = format!(
        "[server]\nworkers = 2\n[admin]\naddress = \"127.0.0.1:{admin}\"\ntoken = \"sesame\"\n\
         [[listener]]\naddress = \"127.0.0.1:{port}\"\n{}[store]\nurl = \"rediss://127.0.0.1:{dead}\"\n\
         secret = \"planted secret of the store\"\n[log]\naccess = \"off\"\n",
        says("one")
    );
    let gateway = Gateway::start_with(&base, &[("ca.pem", &Authority::new("store").pem())]);
    assert!(!checked(&gateway, &base, &[]).1.contains(REFUSED), "the files have no difference");
    let add = |table: &str, line: &str| base.replacen(&format!("[{table}]\n"), &format!("[{table}]\n{line}\n"), 1);
    let change = |from: &str, to: &str| base.replacen(from, to, 1);
    let rows = [
        ("server.workers", change("workers = 2", "workers = 3")),
        ("server.threading", add("server", "threading = \"work-stealing\"")),
        ("listener.address", change(&format!("127.0.0.1:{port}"), &format!("127.0.0.1:{other}"))),
        ("admin.address", change(&format!("127.0.0.1:{admin}"), &format!("0.0.0.0:{admin}"))),
        ("store.url", change("rediss://127.0.0.1", "rediss://localhost")),
        ("store.tls", add("store", "tls = { ca = \"ca.pem\" }")),
        ("store.timeout", add("store", "timeout = \"60ms\"")),
        ("store.connect_timeout", add("store", "connect_timeout = \"2s\"")),
        ("store.connections", add("store", "connections = 2")),
        ("store.password", add("store", "password = \"planted password\"")),
        ("store.password_file", add("store", "password_file = \"ca.pem\"")),
        ("store.prefix", add("store", "prefix = \"other\"")),
        ("store.secret", change("planted secret of the store", "planted another secret of it")),
        ("store.denial_cache", add("store", "denial_cache = 1000")),
        ("store.max_memory_states", add("store", "max_memory_states = 100000")),
        ("log.format", add("log", "format = \"json\"")),
        ("log.level", add("log", "level = \"warn\"")),
        ("log.access", change("access = \"off\"", "access = \"stdout\"")),
        ("log.trace_endpoint", add("log", &format!("trace_endpoint = \"http://127.0.0.1:{dead}\""))),
    ];
    let schema =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/gateway.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    // All but the last key are valid only together with another key, which differs, too. A reload applies the last one.
    let other_keys =
        ["store.username", "store.sentinel", "log.trace_sample", "log.trace_resource", "store.gateway_count"];
    for table in ["store", "log"] {
        for key in schema["properties"][table]["properties"].as_object().unwrap().keys() {
            let key = format!("{table}.{key}");
            if other_keys.contains(&&*key) {
                continue;
            }
            assert!(rows.iter().any(|(row, _)| *row == key), "{key} has no case in this test");
        }
    }
    for (key, config) in rows {
        let (code, out) = checked(&gateway, &config, &[]);
        assert_eq!((code, out.matches(REFUSED).count()), (Some(0), 1), "{key}: {out}");
        let Some((_, warning)) = out.split_once(&format!("{REFUSED}`{key}` differs from the running gateway")) else {
            panic!("{key}: {out}")
        };
        // The warning shows the line of the key or, for an address, the line of its `[[listener]]`.
        let place = warning.split_once("gateway.toml:").unwrap().1;
        let line: usize = place.split(':').next().unwrap().parse().unwrap();
        let shown = config.lines().nth(line - 1).unwrap();
        let expected = if key == "listener.address" { "[[listener]]" } else { key.split_once('.').unwrap().1 };
        assert!(shown.starts_with(expected), "{key}: {shown}");
        assert!(!out.contains("planted"), "{key}: {out}");
        gateway.put(&config);
        let reply = ask(&gateway, "POST", "/api/reload");
        let error = reply.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(
            error.starts_with(&format!("{key} cannot change")),
            "a reload must reject the change of {key}: {}",
            reply.text()
        );
    }
    // The warning about a removed key shows the line of its table.
    let (_, out) = checked(&gateway, &change("access = \"off\"\n", ""), &[]);
    assert!(out.contains(&format!("{REFUSED}`log.access`")), "{out}");
    let (_, out) = checked(&gateway, &change("workers = 2", "workers = 3\nthreading = \"work-stealing\""), &[]);
    assert_eq!(out.matches(REFUSED).count(), 2, "each key has its own warning: {out}");
}

#[test]
fn reload_changes_the_number_of_gateways_before_and_during_an_outage() {
    let redis = Redis::start();
    let config = |gateways: u64| {
        format!(
            "[store]\nurl = \"{}\"\ngateway_count = {gateways}\n\
             [limit.l]\nby = \"global\"\nquota = \"40/24h\"\nalgorithm = \"sliding-log\"\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
            redis.url()
        )
    };
    let gateways = [(); 2].map(|()| Gateway::start(&with_admin(&config(1))));
    let scale = |text: String| gateways.iter().for_each(|gateway| reloads(gateway, &text));
    let admitted = |gateway: &Gateway| load(&[gateway.address], 1, 41, "/r", &[]).iter().filter(|&&s| s == 200).count();
    scale(config(4));
    let [two, four] = [2, 4].map(config);
    drop(redis);
    assert_eq!(gateways.each_ref().map(admitted), [10, 10], "a quarter of 40 in each gateway");
    scale(two);
    assert_eq!(gateways.each_ref().map(admitted), [10, 10], "a half, of which the first outage has used a quarter");
    scale(four);
    assert_eq!(gateways.each_ref().map(admitted), [0, 0], "more than a quarter is used");
}

#[test]
fn check_compares_only_with_a_gateway_that_runs_the_same_file() {
    let admin = free_port();
    let config = format!(
        "[admin]\naddress = \"127.0.0.1:{admin}\"\ntoken = \"sesame\"\n{}[log]\naccess = \"off\"\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\n",
        says("one")
    );
    // Start the gateway with a relative path to its configuration file.
    let gateway = Gateway::start_by(&config, |path| {
        let mut command = binary();
        command.current_dir(path.parent().unwrap()).args(["--config", "gateway.toml"]);
        command
    });
    let changed = config.replace("access = \"off\"", "access = \"off\"\nformat = \"json\"");
    let own = gateway.directory().join("gateway.toml");
    assert!(checked(&gateway, &changed, &[]).1.contains(REFUSED));
    let elsewhere = tempfile::tempdir().unwrap();
    // A link to the file is the same file.
    let link = elsewhere.path().join("link.toml");
    std::os::unix::fs::symlink(&own, &link).unwrap();
    assert!(check_file(&link, &[]).1.contains(REFUSED));
    let other = elsewhere.path().join("gateway.toml");
    std::fs::write(&other, &changed).unwrap();
    let (code, out) = check_file(&other, &["--strict"]);
    let note = format!(
        "note: the gateway at http://127.0.0.1:{admin} runs another file, {}, and was not compared",
        own.display()
    );
    assert!(code == Some(0) && out.contains(&note) && !out.contains(REFUSED), "{out}");
    assert!(out.contains("= help: to compare with this gateway, use --against"), "{out}");
    assert!(check_file(&other, &["--against"]).1.contains("need a restart"));
    // In a container, the gateway may see the file at a path that does not exist on this machine.
    std::fs::remove_file(&own).unwrap();
    assert!(check_file(&other, &[]).1.contains(REFUSED));
}

#[test]
fn check_skips_the_comparison_if_no_gateway_answers() {
    let admin = free_port();
    let base = format!("[admin]\naddress = \"127.0.0.1:{admin}\"\ntoken = \"sesame\"\n{}", says("one"));
    let base = format!("{base}[log]\naccess = \"off\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n");
    let other = base.replace("access = \"off\"", "access = \"off\"\nformat = \"json\"");
    let mut gateway = Gateway::start(&base);
    let (code, out) = checked(&gateway, &base, &["--strict"]);
    assert_eq!(code, Some(0), "the configurations are equal: {out}");
    let reloaded = base.replace("\"one\"", "\"two\"");
    assert_eq!(checked(&gateway, &reloaded, &["--strict"]).0, Some(0), "a reload can apply these changes");
    let (code, out) = checked(&gateway, &other, &["--strict"]);
    assert!(code == Some(1) && out.contains("`log.format` differs"), "{out}");
    let (code, out) = checked(&gateway, &other, &["--json"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (code, &report["ok"], report["warnings"].as_array().unwrap().len()),
        (Some(0), &true.into(), 1),
        "{out}"
    );
    let (code, out) = checked(&gateway, &other, &["--strict", "--offline"]);
    assert!(code == Some(0) && !out.contains(REFUSED), "{out}");
    let (code, out) = checked(&gateway, &other.replace("sesame", "open"), &["--strict"]);
    assert!(
        code == Some(0) && out.contains("note: the configuration was not compared with the running gateway"),
        "the gateway has another token: {out}"
    );
    let differences = Client::connect(gateway.admin()).request("GET", "/api/differences?salt=a", &[HERE], b"");
    assert_eq!(differences.status, 401);
    gateway.terminate();
    gateway.wait();
    let (code, out) = checked(&gateway, &other, &["--strict"]);
    assert!(code == Some(0) && !out.contains(REFUSED) && !out.contains("note:"), "no gateway is running: {out}");
    // The port accepts connections but does not respond.
    let _silent = TcpListener::bind(("127.0.0.1", admin)).unwrap();
    let (code, out) = checked(&gateway, &other, &["--strict"]);
    assert!(code == Some(0) && !out.contains(REFUSED) && !out.contains("note:"), "the port does not respond: {out}");
}

#[test]
fn log_of_a_reload_names_changed_keys_and_changed_files() {
    let keys =
        "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n[limit.l]\nby = \"ip\"\nquota = \"5/s\"\n";
    let config =
        format!("{keys}{}deny = [\"file:blocked.txt\"]\nresponse_headers.set = {{ x-a = \"planted\" }}\n", says("one"));
    let consumers = |digit: &str| format!("[[consumer]]\nname = \"a\"\nkeys = [\"sha256:{}\"]\n", digit.repeat(64));
    let files = [("consumers.toml", &*consumers("1")), ("blocked.txt", "192.0.2.1\n")];
    let gateway = Gateway::start_with(&with_admin(&config), &files);
    let lines = |message: &str| -> Vec<Value> {
        let lines = gateway.log();
        let lines = lines.lines().filter_map(|line| serde_json::from_str(line).ok());
        lines.filter(|line: &Value| line["message"] == message).collect()
    };
    let last_change = |count: usize| {
        eventually("the reload is logged", || lines("configuration reloaded").len() >= count);
        lines("configuration reloaded").last().unwrap()["changed"].clone()
    };
    let reply = ask(&gateway, "POST", "/api/reload");
    let file = gateway.directory().join("gateway.toml").display().to_string();
    assert_eq!((reply.status, &reply.json()["file"]), (200, &file.into()));
    assert_eq!(last_change(1), Value::Null, "no key has changed");
    gateway.put(&with_admin(&format!("{}[server]\nmax_uri = \"1KiB\"\n", config.replace("5/s", "6/s"))));
    assert_eq!(last_change(2), "limit.l, server.max_uri");
    // A changed secret is named without its value.
    gateway.put(&with_admin(&config.replace("planted", "secret")));
    assert_eq!(last_change(3), "limit.l, route.says, server.max_uri");
    let changes = ask(&gateway, "POST", "/api/reload").json()["changes"].to_string();
    let expected = "route `says`: response_headers.set.x-a \\\"***\\\" → \\\"***\\\"\"";
    assert!(changes.contains(expected), "{changes}");
    assert_eq!(lines("file reloaded").len(), 0, "{}", gateway.log());

    // A requested reload reads all files, even if the configuration is invalid. It logs only files with new content,
    // and files that are still invalid.
    gateway.put("no toml");
    let rejected = "cannot reload the configuration: the active configuration stays in force";
    eventually("the file is rejected", || !lines(rejected).is_empty());
    let broken = "cannot reload the file: its previous content stays in force";
    gateway.put_file("blocked.txt", "broken");
    eventually("the broken file is logged", || lines(broken).len() == 1);
    assert_eq!(ask(&gateway, "POST", "/api/reload").status, 422);
    // The file watcher reports the consumers before the networks.
    eventually("the broken file is logged again", || lines(broken).len() == 2);
    assert_eq!(lines("file reloaded").len(), 0, "{}", gateway.log());
    gateway.put_file("consumers.toml", &consumers("2"));
    eventually("the changed file is logged", || !lines("file reloaded").is_empty());
    gateway.put_file("consumers.toml", "broken");
    eventually("the broken file is logged", || lines(broken).len() == 3);
    // This content equals the last valid content of the file. The reload is logged, because the content in between was
    // invalid.
    gateway.put_file("consumers.toml", &consumers("2"));
    eventually("the corrected file is logged", || lines("file reloaded").len() == 2);
    assert!(lines("file reloaded")[0]["file"].as_str().unwrap().ends_with("consumers.toml"));
}

#[test]
fn rejected_include_does_not_reset_the_contents_of_other_files() {
    let config = with_admin(&format!(
        "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n{}require = [\"keys\"]\n",
        says("x")
    ));
    let gateway = Gateway::start_with(&config, &[("consumers.toml", &consumer_with_key("one"))]);
    let knows = |key: &str| gateway.client().get_with("/says", &[("x-api-key", key)]).status == 200;
    gateway.put_file("consumers.toml", &consumer_with_key("two"));
    eventually("the file is reloaded", || knows("two"));
    std::fs::create_dir(gateway.directory().join("more")).unwrap();
    gateway.put_file("more/a.toml", "[[route]]\nname = \"a\"\n");
    gateway.put(&format!("include = [\"more/*.toml\"]\n{config}"));
    eventually("the configuration is rejected", || gateway.log().contains("more/a.toml:1:1"));
    gateway.put_file("consumers.toml", &consumer_with_key("one"));
    eventually("the change back is applied", || knows("one") && !knows("two"));
    let reloads = || gateway.log().matches("\"file reloaded\"").count();
    eventually("both changes are logged", || reloads() >= 2);
    gateway.put_file("more/a.toml", &says("x").replace("says", "a"));
    eventually("the new directory is watched", || gateway.client().get_with("/a", &[]).status == 200);
    assert_eq!(reloads(), 2, "only changes are logged: {}", gateway.log());
}

/// Return a consumers file with one consumer.
fn consumer_with_key(key: &str) -> String {
    use aws_lc_rs::digest::{SHA256, digest};
    let hash: String = digest(&SHA256, key.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("[[consumer]]\nname = \"c\"\nkeys = [\"sha256:{hash}\"]\n")
}

#[test]
fn reload_needs_the_token() {
    let gateway = Gateway::start(&with_admin(&says("one")));
    gateway.put(&with_admin(&says("two")));
    assert_eq!(Client::connect(gateway.admin()).request("POST", "/api/reload", &[], b"").status, 401);
    let reply = ask(&gateway, "GET", "/api/reload");
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")));
    assert_eq!(ask(&gateway, "POST", "/api/config").status, 405);
    assert_eq!(ask(&gateway, "POST", "/api/reload").status, 200);
    assert_eq!(gateway.get("/says").text(), "two");

    let open = Gateway::start(&format!("[admin]\naddress = \"127.0.0.1:0\"\n{}", says("one")));
    let reply = Client::connect(open.admin()).request("POST", "/api/reload", &[HERE], b"");
    assert_eq!(reply.status, 403);
    assert!(reply.text().contains("set admin.token"), "{}", reply.text());
    assert_eq!(admin_listener::ask(&open, "/api/config").status, 200, "reading the configuration requires no token");
    assert_eq!(metric(&open, "config_reloads_total{result=\"ok\"}"), 0.0);
}

#[test]
fn files_of_the_new_configuration_are_watched() {
    let consumers = consumer_with_key;
    let config = |file: &str| {
        with_admin(&format!(
            "[auth.keys]\nkind = \"api-key\"\nconsumers = \"{file}\"\n{}identify = [\"keys\"]\nlimits = [\"keys\"]\n[limit.keys]\nby = \"api-key\"\nquota = \"1000/s\"\n",
            says("x")
        ))
    };
    let gateway = Gateway::start_with(&config("a"), &[("a", &consumers("one")), ("b", &consumers("two"))]);
    let knows = |key: &str| gateway.client().get_with("/says", &[("x-api-key", key)]).status == 200;
    assert!(knows("one") && !knows("two"));
    gateway.put(&config("b"));
    // Workers apply the new configuration one after the other.
    eventually("the other file applies", || knows("two") && !knows("one"));
    gateway.put_file("a", &consumers("three"));
    gateway.put_file("b", &consumers("four"));
    eventually("its changes are seen", || knows("four") && !knows("two"));
    assert!(!knows("three"), "the old file is not watched");
}

#[test]
fn reload_of_trusted_proxies_applies_to_open_connections() {
    let config = |trusted: &str| {
        format!(
            "[client_ip]\ntrusted_proxies = [{trusted}]\n{}limits = [\"ip\"]\n\
             [limit.ip]\nby = \"ip\"\nquota = \"1/day\"\nalgorithm = \"fixed-window\"\n",
            says("x")
        )
    };
    let gateway = Gateway::start(&with_admin(&config("")));
    let proxy: IpAddr = "127.0.0.9".parse().unwrap();
    let mut client = Client::connect_from(proxy, gateway.address);
    let mut from = |address: &str| client.get_with("/says", &[("x-forwarded-for", address)]).status;
    assert_eq!((from("192.0.2.1"), from("192.0.2.2")), (200, 429), "the proxy is not trusted");
    reloads(&gateway, &config("\"127.0.0.9\""));
    assert_eq!(
        (from("192.0.2.1"), from("192.0.2.2"), from("192.0.2.1")),
        (200, 200, 429),
        "the proxy is trusted after the first reload"
    );
    reloads(&gateway, &config(""));
    assert_eq!(from("192.0.2.3"), 429, "the proxy is not trusted after the second reload");
}

#[test]
fn request_ids_of_untrusted_proxies_are_replaced_after_a_reload() {
    let upstream = Upstream::start();
    let config = |trusted: &str| {
        format!(
            "[log]\naccess = \"stdout\"\n[client_ip]\ntrusted_proxies = [{trusted}]\n[upstream.up]\nservers = [\"{}\"]\n\
             [[route]]\nname = \"up\"\npath = \"/up\"\nupstream = \"up\"\n",
            upstream.url()
        )
    };
    let gateway = Gateway::start(&with_admin(&config("\"127.0.0.9\"")));
    let mut client = Client::connect_from("127.0.0.9".parse().unwrap(), gateway.address);
    let mut named = || {
        assert_eq!(client.get_with("/up", &[("x-request-id", "chosen")]).status, 200);
        upstream.last().headers("x-request-id").concat()
    };
    assert_eq!(named(), "chosen");
    reloads(&gateway, &config(""));
    assert_ne!(named(), "chosen", "the request id of the client is replaced");
}

#[test]
fn reload_raises_and_lowers_max_connections() {
    let config = |most: u32| format!("[server]\nmax_connections = {most}\n{}", says("x"));
    let gateway = Gateway::start(&with_admin(&config(2)));
    let figures = || (metric(&gateway, "connections"), metric(&gateway, "connections_max"));
    let answers = |client: &mut Client| client.get("/says").status;
    let mut clients: Vec<_> = (0..2).map(|_| gateway.client()).collect();
    assert!(clients.iter_mut().all(|client| answers(client) == 200));
    let mut waiting = gateway.client();
    waiting.send(b"GET /says HTTP/1.1\r\nHost: a\r\n\r\n");
    reloads(&gateway, &config(3));
    assert_eq!(waiting.reply().unwrap().status, 200, "one more connection is allowed");
    assert_eq!(figures(), (3.0, 3.0));
    reloads(&gateway, &config(1));
    assert_eq!(figures(), (3.0, 1.0));
    assert!(clients.iter_mut().all(|client| answers(client) == 200), "open connections stay");
    let mut waiting_again = gateway.client();
    waiting_again.send(b"GET /says HTTP/1.1\r\nHost: a\r\n\r\n");
    drop(clients);
    eventually("two connections are closed", || figures().0 == 1.0);
    waiting_again.stream.get_mut().set_nonblocking(true).unwrap();
    assert!(waiting_again.stream.get_mut().read(&mut [0]).is_err(), "no further connection is allowed");
    waiting_again.stream.get_mut().set_nonblocking(false).unwrap();
    drop(waiting);
    assert_eq!(waiting_again.reply().unwrap().status, 200, "a connection has become free");
    assert_eq!(figures(), (1.0, 1.0));
}

#[test]
fn raising_max_connections_while_too_many_are_open_loses_no_permit() {
    let config = |most: u32| format!("[server]\nmax_connections = {most}\nworkers = 1\n{}", says("x"));
    for steps in [&[1, 4][..], &[1, 2, 3, 4], &[3, 1, 4], &[1, 6, 4]] {
        let gateway = Gateway::start(&with_admin(&config(4)));
        let figures = || (metric(&gateway, "connections"), metric(&gateway, "connections_max"));
        let answered = |client: &mut Client| client.get("/says").status == 200;
        let mut clients: Vec<_> = (0..4).map(|_| gateway.client()).collect();
        assert!(clients.iter_mut().all(answered));
        for most in steps {
            reloads(&gateway, &config(*most));
            assert_eq!(figures(), (4.0, f64::from(*most)), "{steps:?}");
        }
        clients.pop();
        eventually("one connection is closed", || figures() == (3.0, 4.0));
        clients.clear();
        eventually("all connections are closed", || figures() == (0.0, 4.0));
        let mut clients: Vec<_> = (0..4).map(|_| gateway.client()).collect();
        assert!(clients.iter_mut().all(answered), "{steps:?}: four connections are served at the same time");
        let mut fifth = gateway.client();
        fifth.send(b"GET /says HTTP/1.1\r\nHost: a\r\n\r\n");
        eventually("the fifth waits", || gateway.log().contains("max_connections"));
        assert_eq!(figures(), (4.0, 4.0), "{steps:?}: no further connection is served");
        drop(clients);
        assert_eq!(fifth.reply().unwrap().status, 200);
    }
}

#[test]
fn reloaded_max_connections_counts_connections_of_before() {
    let config = |most: u32| format!("[server]\nmax_connections = {most}\nworkers = 1\n{}", says("x"));
    // Each case: the number of open connections, then the values of `max_connections` in the reloads. The initial value
    // is 4.
    let cases =
        [(4, &[1, 4][..]), (4, &[1, 2, 3, 4]), (4, &[3, 1, 4]), (3, &[1, 4]), (0, &[2]), (1, &[2]), (2, &[2, 3])];
    for (open, steps) in cases {
        let gateway = Gateway::start(&with_admin(&config(4)));
        let answered_client = || {
            let mut client = gateway.client();
            assert_eq!(client.get("/says").status, 200, "{open} open, {steps:?}");
            client
        };
        let mut clients: Vec<_> = (0..open).map(|_| answered_client()).collect();
        for most in steps {
            reloads(&gateway, &config(*most));
        }
        let most = *steps.last().unwrap();
        clients.extend((open..most).map(|_| answered_client()));
        let mut next = gateway.client();
        next.send(b"GET /says HTTP/1.1\r\nHost: a\r\n\r\n");
        eventually("the next connection waits", || gateway.log().contains("max_connections"));
        assert_eq!(metric(&gateway, "connections"), f64::from(most), "{open} open, {steps:?}");
        clients.pop();
        assert_eq!(
            next.reply().unwrap().status,
            200,
            "{open} open, {steps:?}: served after another connection is closed"
        );
    }
}

#[test]
fn reload_raises_and_lowers_max_connections_per_ip() {
    let config = |most: u32| format!("[server]\nmax_connections_per_ip = {most}\n{}", says("x"));
    let gateway = Gateway::start(&with_admin(&config(1)));
    let mut open = vec![gateway.client()];
    assert_eq!(open[0].get("/says").status, 200);
    gateway.client().assert_closed("a second connection");
    reloads(&gateway, &config(2));
    open.push(gateway.client());
    assert_eq!(open[1].get("/says").status, 200, "two connections are allowed");
    gateway.client().assert_closed("a third connection");
    reloads(&gateway, &config(1));
    assert!(open.iter_mut().all(|client| client.get("/says").status == 200), "open connections stay");
    gateway.client().assert_closed("another connection");
    reloads(&gateway, &config(0));
    let mut more: Vec<_> = (0..5).map(|_| gateway.client()).collect();
    assert!(more.iter_mut().all(|client| client.get("/says").status == 200), "0 disables the limit");
}

#[test]
fn rejected_file_is_visible_until_its_content_is_in_use() {
    let consumers = format!("[[consumer]]\nname = \"acme\"\nkeys = [\"sha256:{}\"]\n", "a".repeat(64));
    let [pem, key] = ["one.pem", "one.key"].map(|name| {
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certs").join(name)).unwrap()
    });
    let config = with_admin(&format!(
        "{}require = [\"keys\"]\ndeny = [\"file:blocked.txt\"]\n\
         [auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
         tls.certificates = [{{ cert = \"one.pem\", key = \"one.key\" }}]\n",
        says("one")
    ));
    let files = [("consumers.toml", &*consumers), ("blocked.txt", "192.0.2.1\n"), ("one.pem", &pem), ("one.key", &key)];
    let gateway = Gateway::start_with(&config, &files);
    let successful = |kind: &str| metric(&gateway, &format!("file_last_reload_successful{{kind=\"{kind}\"}}"));
    for (kind, file, valid) in [
        ("consumers", "consumers.toml", &*consumers),
        ("networks", "blocked.txt", "192.0.2.1\n"),
        ("certificate", "one.pem", &pem),
    ] {
        assert_eq!(successful(kind), 1.0, "{kind}");
        gateway.put_file(file, "[[[ broken\n");
        eventually("the rejected file is counted", || successful(kind) == 0.0);
        let shown = ask(&gateway, "GET", "/api/config").json()["rejected_files"].clone();
        assert_eq!((shown.as_array().unwrap().len(), &shown[0]["kind"]), (1, &kind.into()), "{shown}");
        assert!(shown[0]["file"].as_str().unwrap().ends_with(file), "{shown}");
        let admin = format!("http://{}", gateway.admin());
        let output =
            binary().args(["status", "--admin", &admin]).env("SLUICEGATE_ADMIN_TOKEN", "sesame").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains(&format!("{kind} file ")) && text.contains("its previous content is in use"), "{text}");
        // A file that is missing is not in use either. The same content as before the rejection is.
        std::fs::remove_file(gateway.directory().join(file)).unwrap();
        eventually("the missing file is reported", || {
            ask(&gateway, "GET", "/api/config").json()["rejected_files"][0]["error"]
                .as_str()
                .unwrap()
                .contains("cannot read")
        });
        gateway.put_file(file, valid);
        eventually("the file is in use again", || successful(kind) == 1.0);
        assert_eq!(ask(&gateway, "GET", "/api/config").json()["rejected_files"], Value::Array(Vec::new()));
    }
    // The content that is in use may disappear and come back unchanged.
    std::fs::remove_file(gateway.directory().join("blocked.txt")).unwrap();
    eventually("the missing file is counted", || successful("networks") == 0.0);
    gateway.put_file("blocked.txt", "192.0.2.1\n");
    eventually("the file is in use again", || successful("networks") == 1.0);
}
