//! `sluicegate probe` against running, stopping and stopped gateways.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use crate::support::gateway::{Gateway, binary};
use crate::support::reload::says;
use crate::support::{eventually, signal};
use socket2::{Domain, SockAddr, Socket, Type};

const TOKEN: &str = "open-sesame";

/// Run the probe with this configuration and the valid token. Return its exit code and its output line.
fn probe(config: &Path, arguments: &[&str]) -> (i32, String) {
    probe_with(config, arguments, TOKEN)
}

fn probe_with(config: &Path, arguments: &[&str], token: &str) -> (i32, String) {
    let mut command = command(config, arguments);
    let output = command.env("SLUICEGATE_ADMIN_TOKEN", token).output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert_eq!(text.matches('\n').count(), 1, "one line: {text}");
    (output.status.code().unwrap(), text.trim_end().to_owned())
}

fn command(config: &Path, arguments: &[&str]) -> Command {
    let mut command = binary();
    command.args(["probe", "--config"]).arg(config).args(arguments);
    command.env_remove("SLUICEGATE_ADMIN_TOKEN").env_remove("RUNTIME_DIRECTORY");
    command
}

/// Start a gateway whose configuration uses environment variables that the probe does not have.
fn start(more: &str) -> Gateway {
    // If another process takes the port in the meantime, the gateway fails to start and logs the error.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = format!(
        "[admin]\naddress = \"127.0.0.1:${{PORT:-{port}}}\"\ntoken = \"${{SLUICEGATE_ADMIN_TOKEN}}\"\n\
         [store]\nsecret = \"${{SECRET_OF_THE_STORE}}\"\n[log]\nlevel = \"${{LEVEL_OF_THE_LOG}}\"\naccess = \"off\"\n\
         {more}{}",
        says("x")
    );
    Gateway::start_by(&config, |path| {
        let mut command = binary();
        command.arg("--config").arg(path).env("SLUICEGATE_ADMIN_TOKEN", TOKEN);
        command.env("SECRET_OF_THE_STORE", "s").env("LEVEL_OF_THE_LOG", "info");
        command
    })
}

#[test]
fn probe_succeeds_while_the_gateway_is_ready() {
    let mut gateway = start("[server]\naccept_grace = \"1h\"\n");
    let config = gateway.directory().join("gateway.toml");
    let url = format!("http://{}", gateway.admin());
    assert_eq!(probe(&config, &[]), (0, format!("{url}: ready")));
    assert_eq!(probe(&config, &["--live"]), (0, format!("{url}: ok")));
    let nowhere = Path::new("/nowhere/gateway.toml");
    assert_eq!(probe(nowhere, &["--url", &url, "--timeout", "10s"]), (0, format!("{url}: ready")));
    for token in ["", "wrong"] {
        let (code, line) = probe_with(&config, &["--live"], token);
        assert!(code == 1 && line.contains("rejects the token"), "{line}");
    }

    gateway.terminate();
    eventually("the gateway is stopping", || {
        probe(&config, &[]) == (1, format!("sluicegate: the gateway at {url} is not ready: stopping"))
    });
    assert_eq!(
        probe(&config, &["--live"]),
        (0, format!("{url}: ok")),
        "a stopping gateway is live and is not restarted"
    );
    gateway.terminate();
    assert!(gateway.wait().success(), "{}", gateway.log());
    for arguments in [&["--live"][..], &[]] {
        let (code, line) = probe(&config, arguments);
        assert!(code == 1 && line.contains(&format!("cannot connect to {url}")), "{line}");
    }
}

/// A probe must not fail because the configuration file was edited. Otherwise, Kubernetes would restart a gateway that
/// still runs with its previous configuration, and the gateway could not start again.
#[test]
fn probe_does_not_depend_on_a_valid_configuration() {
    let gateway = start("");
    let config = gateway.directory().join("gateway.toml");
    let valid = std::fs::read_to_string(&config).unwrap();
    for broken in ["[upstream]\nx = 1\n", "= =\n", "[[route]\n", "[limit.x]\nquota = 5/s\n", "name = \"unclosed\n"] {
        for text in [format!("{valid}{broken}"), format!("{broken}{valid}")] {
            std::fs::write(&config, &text).unwrap();
            let (code, line) = probe(&config, &["--live"]);
            assert_eq!(code, 0, "{line}: {text}");
        }
    }
}

#[test]
fn probe_finds_the_admin_socket() {
    let gateway = Gateway::start(&format!("[admin]\nsocket = \"admin.sock\"\n{}", says("x")));
    let config = gateway.directory().join("gateway.toml");
    let socket = gateway.directory().join("admin.sock");
    let ready = (0, format!("{}: ready", socket.display()));
    eventually("the socket has its name", || socket.exists());
    assert_eq!(probe(&config, &[]), ready);
    assert_eq!(probe(Path::new("/nowhere"), &["--url", socket.to_str().unwrap()]), ready);
    // systemd passes the directory of the socket in `RUNTIME_DIRECTORY`.
    let mut by_directory = command(Path::new("/nowhere"), &[]);
    let output = by_directory.env("RUNTIME_DIRECTORY", gateway.directory()).output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stdout).unwrap()), (Some(0), format!("{}\n", ready.1)));

    // The backlog of the socket is full: a blocking connect would wait forever, because the stopped gateway accepts no
    // connection.
    signal(&gateway.child, "STOP");
    let connect = || {
        let client = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None).unwrap();
        client.connect(&SockAddr::unix(&socket).unwrap()).map(|()| client)
    };
    let queued: Vec<_> = std::iter::from_fn(|| connect().ok()).collect();
    assert!(queued.len() > 50, "{}", queued.len());
    let probe = command(&config, &["--timeout", "200ms"]);
    let output = Command::new("timeout").arg("15").arg(probe.get_program()).args(probe.get_args()).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(&format!("cannot connect to {}", socket.display())), "{text}");
}

#[test]
fn probe_fails_in_time_if_there_is_no_response() {
    let gateway = start("");
    let config = gateway.directory().join("gateway.toml");
    signal(&gateway.child, "STOP");
    let (code, line) = probe(&config, &["--timeout", "200ms"]);
    assert!(code == 1 && line.contains("does not respond"), "{line}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gateway.toml");
    let (code, line) = probe(&file, &[]);
    assert!(code == 1 && line.contains("gateway.toml cannot be read: No such file"), "{line}");
    for (admin, expected) in [
        ("", "gateway.toml has no address in [admin]; name the gateway with --admin"),
        ("[admin]\naddress = \"127.0.0.1:${NO_PORT}\"\n", "gateway.toml has no address in [admin]"),
        ("[admin]\nsocket = \"admin.sock\"\n", "no gateway listens on the admin socket"),
        ("[admin]\nsocket = \"off\"\n", "gateway.toml has no address in [admin]"),
    ] {
        std::fs::write(&file, admin).unwrap();
        let (code, line) = probe(&file, &[]);
        assert!(code == 1 && line.contains(expected), "{line}");
    }
    let elsewhere = format!("http://{}", gateway.address);
    signal(&gateway.child, "CONT");
    let (code, line) = probe(&config, &["--url", &elsewhere]);
    assert!(code == 1 && line.contains("is not a Sluicegate admin listener (404 Not Found)"), "{line}");
    for (arguments, expected) in [
        (["--timeout", "0s"], "a duration with ms, s, m, h or d"),
        (["--timeout", "soon"], "a duration with ms, s, m, h or d"),
    ] {
        let output = command(&config, &arguments).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && text.contains(expected), "{text}");
    }
    let (code, line) = probe(&config, &["--admin", "localhost"]);
    assert!(code == 1 && line.contains("--admin must be a URL such as"), "{line}");
}
