//! `/api/status` and `sluicegate status`: one page about the state of a running gateway.

use std::process::Command;

use crate::support::certificates::{NOW, Pair};
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::Redis;
use crate::support::reload::{ADMIN, ask};
use crate::support::server::{Behaviour, Server};
use serde_json::{Value, json};

/// A Python script that runs a command in a terminal of 70 columns.
const TERMINAL: &str = r#"
import fcntl, os, pty, struct, subprocess, sys, termios
terminal, inside = pty.openpty()
fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 70, 0, 0))
command = subprocess.Popen(sys.argv[1:], stdout=inside)
os.close(inside)
while True:
    try:
        text = os.read(terminal, 65536)
    except OSError:
        break
    sys.stdout.buffer.write(text)
sys.exit(command.wait())
"#;

/// A configuration with two listeners, two limits and two upstreams. `web` has the last server, `api` all others.
fn config(store: &str, servers: &[&Server]) -> String {
    let urls: Vec<_> = servers.iter().map(|server| server.url()).collect();
    let (web, api) = urls.split_last().unwrap();
    format!(
        "{ADMIN}socket = \"admin.sock\"\n{store}[limit.id]\nby = \"path:id\"\nalgorithm = \"fixed-window\"\n\
         quota = \"1/3650d\"\n[limit.idle]\nby = \"ip\"\nquota = \"1000/s\"\n[upstream.api]\nservers = {api:?}\n\
         balance = \"round-robin\"\noutlier_detection = {{ consecutive_errors = 1, base_ejection_time = \"1h\" }}\n\
         [[route]]\nname = \"api\"\npath = \"/api\"\nupstream = \"api\"\nlimits = [\"idle\"]\n\
         [upstream.web]\nservers = [\"{web}\"]\n[[route]]\nname = \"web\"\npath = \"/web\"\nupstream = \"web\"\n\
         [[route]]\nname = \"id\"\npath = \"/id/{{id}}\"\nlimits = [\"id\"]\nrespond = {{ status = 200 }}\n\
         [[listener]]\nname = \"inside\"\naddress = \"127.0.0.1:0\"\n[[listener]]\naddress = \"127.0.0.2:0\"\n\
         tls.certificates = [{{ cert = \"a.pem\", key = \"a.key\" }}]\n"
    )
}

fn start(store: &str, servers: &[&Server]) -> Gateway {
    let pair = Pair::server("gate.test", NOW);
    let files = [("a.pem", &*pair.cert), ("a.key", &*pair.key)];
    let gateway = Gateway::start_with(&config(store, servers), &files);
    let socket = gateway.directory().join("admin.sock");
    eventually("the admin socket has its name", || socket.exists());
    gateway
}

fn command(gateway: &Gateway, arguments: &[&str]) -> Command {
    let mut command = binary();
    command.args(["status", "--config"]).arg(gateway.directory().join("gateway.toml")).args(arguments);
    command.env_remove("SLUICEGATE_ADMIN_TOKEN").env_remove("RUNTIME_DIRECTORY").env_remove("COLUMNS");
    command
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success() && err.is_empty(), "{out}{err}");
    assert!(out.is_ascii() && !out.contains('\u{1b}'), "output to a pipe is plain ASCII: {out}");
    out
}

/// Return the words of the first line whose first word is `first`.
fn words<'a>(page: &'a str, first: &str) -> Vec<&'a str> {
    let lines = page.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines.into_iter().find(|words| words.first() == Some(&first)).unwrap_or_else(|| panic!("no {first} in\n{page}"))
}

#[test]
fn status_shows_each_part_of_the_gateway() {
    let redis = Redis::start();
    let [well, ill, gone] = &Server::start_many();
    let gateway = start(&redis.store(), &[well, ill, gone]);
    let page = output(&mut command(&gateway, &[]));
    assert!(page.ends_with("\nno denials in the last 5 minutes\n"), "{page}");

    ill.set(Behaviour::Reset);
    gone.stop();
    let addresses = gateway.addresses();
    let mut kept: Vec<_> = (0..3).map(|_| gateway.client()).collect();
    // A failed request ejects its server or marks it as unreachable.
    (0..6).for_each(|index| drop(kept[index % 3].get(["/api", "/web"][index % 2])));
    let mut statuses: Vec<_> = (0..6).map(|index| kept[index % 3].get("/id/a").status).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 429, 429, 429, 429, 429]);
    let _tls = std::net::TcpStream::connect(addresses[1]).unwrap();
    let json = |gateway: &Gateway| serde_json::from_str::<Value>(&output(&mut command(gateway, &["--json"]))).unwrap();
    eventually("the connection is counted", || json(&gateway)["listeners"][1]["connections"] == 1);

    let status = json(&gateway);
    assert_eq!(status["version"], env!("CARGO_PKG_VERSION"), "{status}");
    assert_eq!(status["pid"], gateway.child.id(), "{status}");
    assert_eq!((&status["health"]["status"], &status["connections"]["open"]), (&json!("ready"), &json!(4)), "{status}");
    let listener = |name: Value, index: usize, tls: bool, connections: usize| {
        json!({ "name": name, "address": addresses[index].to_string(), "tls": tls, "proxy_protocol": false,
                "connections": connections })
    };
    let listeners = [listener("inside".into(), 0, false, 3), listener(Value::Null, 1, true, 1)];
    assert_eq!(status["listeners"], json!(listeners), "{status}");
    let store = &status["store"];
    assert_eq!((&store["circuit_breaker"], &store["failing"]), (&json!("closed"), &json!([])), "{status}");
    let recent = &status["last_minute"];
    assert_eq!((&recent["denied"], recent["store_p99_ms"].as_f64().is_some()), (&json!(5), true), "{status}");
    assert!(recent["ms"].as_u64().unwrap() < 70_000 && recent["p99_ms"].is_number(), "{status}");
    assert_eq!(status["top_limits"][0]["limit"], "id", "{status}");
    assert_eq!(status["top_limits"].as_array().unwrap().len(), 1, "{status}");
    assert_eq!(status["certificates"][0]["names"], json!(["gate.test"]), "{status}");
    assert!(status["configuration"]["configuration"].is_null(), "{status}");

    let page = output(&mut command(&gateway, &[]));
    assert_eq!(&words(&page, "sluicegate")[1..2], [env!("CARGO_PKG_VERSION")], "{page}");
    assert!(page.lines().next().unwrap().contains("): ready, up "), "{page}");
    assert!(page.contains("loaded ") && page.contains("; 0 reloads, 0 rejected\n"), "{page}");
    let errors = recent["errors"].as_u64().unwrap();
    assert!(page.contains(&format!(" 5 denied, {errors} failed in ")) && page.contains(" ms, p99 "), "{page}");
    assert_eq!(words(&page, &addresses[0].to_string())[1..], ["inside", "no", "no", "3"], "{page}");
    assert_eq!(words(&page, &addresses[1].to_string())[1..], ["yes", "no", "1"], "{page}");
    assert_eq!(words(&page, "4")[..3], ["4", "of", &*status["connections"]["max"].to_string()], "{page}");
    let store = words(&page, "redis");
    assert_eq!(store[store.len() - 5..store.len() - 2], ["closed", "0", "times"], "{page}");
    let [ill, gone] = [ill, gone].map(|server| server.address.to_string());
    assert_eq!(words(&page, "api"), ["api", "1", "0", "1", "0", "0", "0", &*ill], "{page}");
    assert_eq!(words(&page, "web"), ["web", "0", "0", "0", "1", "0", "0", &*gone], "{page}");
    assert_eq!(words(&page, "gate.test")[1], "file", "{page}");
    assert_eq!(words(&page, "id")[..4], ["id", "5", "5", "path:id=a"], "{page}");

    // Like other commands, `status` accepts a URL, with the token in the environment.
    let url = format!("http://{}", gateway.admin());
    let elsewhere = |token: &str| {
        let mut command = command(&gateway, &["--admin", &url]);
        command.env("SLUICEGATE_ADMIN_TOKEN", token);
        command
    };
    assert!(output(&mut elsewhere("sesame")).contains("path:id=a"));
    let refused = elsewhere("wrong").output().unwrap();
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(1) && text.contains("rejects the token"), "{text}");
    kept.truncate(1);
    eventually("closed connections are not counted", || json(&gateway)["listeners"][0]["connections"] == 1);
}

#[test]
fn status_shows_a_rejected_reload_and_the_revision_of_the_configuration() {
    let server = Server::start();
    let gateway = start("", &[&server, &server]);
    let revision =
        |gateway: &Gateway| ask(gateway, "GET", "/api/config").json()["revision"].as_str().unwrap().to_owned();
    let first = revision(&gateway);
    assert!(first.len() == 12 && first.chars().all(|digit| digit.is_ascii_hexdigit()), "{first}");
    let page = output(&mut command(&gateway, &[]));
    assert!(page.contains(&format!("  revision {first}, loaded ")), "{page}");
    assert_eq!(words(&page, "memory"), ["memory"], "no circuit breaker: {page}");

    gateway.put(&config("", &[&server, &server]).replace("1/3650d", "1/eon"));
    eventually("the reload is rejected", || gateway.log().contains("cannot reload"));
    let page = output(&mut command(&gateway, &[]));
    assert!(page.contains("; 0 reloads, 1 rejected\n"), "{page}");
    assert!(page.contains("  the last reload was rejected ") && page.contains("1/eon"), "{page}");
    assert_eq!(revision(&gateway), first, "the active configuration has not changed");

    // Changes of comments and of the secret token do not change the revision.
    let same =
        config("", &[&server, &server]).replace("sesame", "thistle").replace("[limit.id]", "# a comment\n[limit.id]");
    gateway.put(&same);
    eventually("the configuration is reloaded", || gateway.log().matches("configuration reloaded").count() == 1);
    let page = output(&mut command(&gateway, &[]));
    assert!(page.contains(&format!("revision {first}, ")) && page.contains("; 1 reload, 1 rejected\n"), "{page}");
    assert!(!page.contains("was rejected"), "{page}");
    gateway.put(&same.replace("1/3650d", "2/3650d"));
    eventually("the configuration is reloaded", || gateway.log().matches("configuration reloaded").count() == 2);
    assert!(!output(&mut command(&gateway, &[])).contains(&first));
}

#[test]
fn status_fits_the_width_of_the_terminal() {
    let servers = Server::start_many::<9>();
    servers.iter().for_each(Server::stop);
    let gateway = start("", &servers.iter().collect::<Vec<_>>());
    (0..8).for_each(|_| drop(gateway.get("/api")));
    (0..3).for_each(|_| drop(gateway.get("/id/a-client-with-a-long-name-that-does-not-fit-into-a-narrow-terminal")));
    let whole = output(&mut command(&gateway, &[]));
    let longest = |page: &str| page.split_once("\n\n").unwrap().1.lines().map(str::len).max().unwrap();
    assert!(longest(&whole) > 120, "output to a pipe has tables: {whole}");
    for width in [40, 60, 80, 100] {
        let page = output(command(&gateway, &[]).env("COLUMNS", width.to_string()));
        assert!(longest(&page) <= width, "{width}: {page}");
        assert_eq!(words(&page, "UPSTREAM"), ["UPSTREAM", "api"], "{page}");
        assert_eq!(words(&page, "UNHEALTHY"), ["UNHEALTHY", "0"], "{page}");
        let shown = |text: &str| page.split_whitespace().collect::<String>().contains(text);
        assert!(servers.iter().all(|server| shown(&server.address.to_string())), "nothing is cut: {page}");
        assert!(shown("a-client-with-a-long-name-that-does-not-fit-into-a-narrow-terminal"), "{page}");
    }
    let mut top = binary();
    top.args(["top", "--admin", &format!("http://{}", gateway.admin())]).env("SLUICEGATE_ADMIN_TOKEN", "sesame");
    let page = output(top.env("COLUMNS", "60"));
    assert_eq!(words(&page, "COUNT"), ["COUNT", "2"], "other commands print lists, too: {page}");
    let terminal = |color: bool| {
        let mut python = Command::new("python3");
        python.arg("-c").arg(TERMINAL).arg(binary().get_program()).arg("status").arg("--config");
        python.arg(gateway.directory().join("gateway.toml")).env_remove("COLUMNS").env("TERM", "xterm");
        if color {
            python.env_remove("NO_COLOR")
        } else {
            python.env("NO_COLOR", "1")
        };
        let output = python.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().replace("\r\n", "\n")
    };
    let page = terminal(false);
    assert!((61..=70).contains(&longest(&page)) && !page.contains('\u{1b}'), "{page}");
    assert!(terminal(true).contains("\u{1b}[31m"), "an upstream without healthy servers is red");
}

#[test]
fn status_of_a_gateway_whose_store_is_down() {
    let mut redis = Redis::start();
    let server = Server::start();
    let gateway = start(&redis.store(), &[&server, &server]);
    redis.child.kill().unwrap();
    redis.child.wait().unwrap();
    let json = || serde_json::from_str::<Value>(&output(&mut command(&gateway, &["--json"]))).unwrap();
    eventually("the circuit breaker is open", || {
        gateway.get("/id/a");
        json()["store"]["circuit_breaker"] == "open"
    });
    assert_eq!(json()["store"]["circuit_breaker_openings"], 1);
    let page = output(&mut command(&gateway, &[]));
    assert!(page.lines().next().unwrap().contains("): degraded, up "), "{page}");
    let row = words(&page, "redis").join(" ");
    assert!(row.contains(" open 1 time ") && row.matches("127.0.0.1").count() == 2, "{page}");
}
