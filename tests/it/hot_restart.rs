//! Hot restart, and the interface to systemd: socket activation and notifications.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::support::client::Client;
use crate::support::gateway::{Gateway, binary};
use crate::support::reload::{ADMIN, ask, metric, says, with_admin};
use crate::support::server::{Behaviour, Server};
use crate::support::{MAX_WAIT, SetOnDrop, eventually, signal};

/// The process that a hot restart has started. Dropping this value kills the process.
pub(crate) struct Successor(String);

impl Successor {
    /// Wait until the process that replaces a gateway serves requests. Return this process.
    pub(crate) fn of(gateway: &Gateway) -> Successor {
        let id = || new_process_id(&gateway.log());
        eventually("another process serves", || id().is_some());
        Successor(id().unwrap())
    }

    pub(crate) fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([&format!("-{name}"), &self.0]).status().unwrap().success());
    }
}

/// Return the ID of the new process from the last log message of a hot restart.
fn new_process_id(log: &str) -> Option<String> {
    let (_, rest) = log.rsplit_once(r#""hot restart: the new process is serving","pid":"#)?;
    rest.split_once('}').map(|(id, _)| id.to_owned())
}

impl Drop for Successor {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-KILL", &self.0]).stderr(Stdio::null()).status();
    }
}

/// Replace the process of a gateway by hot restart, and wait until the old process has ended.
pub(crate) fn hot_restart(gateway: &mut Gateway) -> Successor {
    signal(&gateway.child, "USR2");
    let successor = Successor::of(gateway);
    assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
    successor
}

#[test]
fn hot_restart_under_load_fails_no_request() {
    let server = Server::start();
    let config = |body: &str| {
        let upstream = format!("[upstream.api]\nservers = [\"{}\"]\n", server.url());
        format!("{upstream}[[route]]\nname = \"api\"\npath = \"/api\"\nupstream = \"api\"\n{}", says(body))
    };
    let mut gateway = Gateway::start(&config("one"));
    let address = gateway.address;
    let (over, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..6)
            .map(|index| {
                let (over, answered) = (&over, &answered);
                scope.spawn(move || {
                    let path = ["/api", "/says"][index % 2];
                    let (mut client, mut statuses) = (Client::connect(address), Vec::new());
                    while !over.load(Ordering::SeqCst) {
                        let reply = client.get(path);
                        // The clients with the indexes 4 and 5 open a new connection for each request.
                        if index > 3 || reply.header("connection") == Some("close") {
                            client = Client::connect(address);
                        }
                        statuses.push(reply.status);
                        answered.fetch_add(1, Ordering::SeqCst);
                    }
                    statuses
                })
            })
            .collect();
        let end = SetOnDrop(&over);
        let more = |what: &str| {
            let before = answered.load(Ordering::SeqCst);
            eventually(what, || answered.load(Ordering::SeqCst) > before + 500);
        };
        more("requests are answered");
        // A reload would reject this change of `server.workers`. After a hot restart, the new process applies it.
        gateway.put(&format!("[server]\nworkers = 3\n{}", config("two")));
        let first = hot_restart(&mut gateway);
        more("the new process answers");
        assert_eq!(Client::connect(address).get("/says").text(), "two");
        drop(end);
        let statuses = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        drop(first);
        statuses
    });
    let failed = statuses.iter().filter(|status| **status != 200).count();
    println!("handover: {} requests, {failed} failed", statuses.len());
    assert_eq!(failed, 0);
}

#[test]
fn old_process_finishes_its_requests_and_the_new_one_serves_the_admin_listener() {
    let server = Server::start();
    let route = "[[route]]\nname = \"api\"\npath = \"/api\"\nupstream = \"api\"\n";
    let config =
        |body: &str| format!("[upstream.api]\nservers = [\"{}\"]\n{route}{}", server.url(), with_admin(&says(body)));
    let mut gateway = Gateway::start(&config("old"));
    server.set(Behaviour::Hang);
    let mut held = gateway.client();
    held.send(b"GET /api HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("a request is in flight", || server.count() == 1);
    let mut idle = gateway.client();
    assert_eq!(idle.get("/says").status, 200);
    gateway.put(&format!("[server]\nworkers = 3\n{}", config("new")));
    signal(&gateway.child, "USR2");
    let _successor = Successor::of(&gateway);
    eventually("a request on an old connection gets Connection: close", || {
        let reply = idle.get("/says");
        assert_eq!((reply.status, reply.text()), (200, "old"));
        reply.header("connection") == Some("close")
    });
    idle.assert_closed("the response with Connection: close was the last one");
    for _ in 0..50 {
        assert_eq!(gateway.get("/says").status, 200);
        assert_eq!(ask(&gateway, "GET", "/readyz").json()["status"], "ready", "the old process gets no request");
    }
    eventually("the old process accepts no connections", || (0..20).all(|_| gateway.get("/says").text() == "new"));
    let config = ask(&gateway, "GET", "/api/config").json();
    assert_eq!(config["configuration"]["route"][1]["respond"]["body"], "new", "{config}");
    assert!(gateway.child.try_wait().unwrap().is_none(), "the old process waits for the request in flight");
    server.set(Behaviour::Respond(200));
    assert_eq!(held.reply().unwrap().status, 200);
    assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
}

#[test]
fn hot_restart_does_not_wait_for_accept_grace() {
    let server = Server::start();
    let route = "[[route]]\nname = \"api\"\npath = \"/api\"\nupstream = \"api\"\n";
    let mut gateway = Gateway::start(&format!(
        "[server]\naccept_grace = \"1h\"\n[upstream.api]\nservers = [\"{}\"]\n{route}{}",
        server.url(),
        with_admin(&says("x"))
    ));
    server.set(Behaviour::Hang);
    let mut held = gateway.client();
    held.send(b"GET /api HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("a request is in flight", || server.count() == 1);
    signal(&gateway.child, "USR2");
    let _successor = Successor::of(&gateway);
    eventually("the old process drains", || gateway.log().contains("stopping after the requests in flight"));
    for _ in 0..20 {
        assert_eq!(ask(&gateway, "GET", "/readyz").json()["status"], "ready");
    }
    server.set(Behaviour::Respond(200));
    assert_eq!(held.reply().unwrap().status, 200);
    assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
}

#[test]
fn failed_hot_restart_keeps_the_old_process() {
    let mut gateway = Gateway::start(&says("one"));
    gateway.put(&says("two").replace("respond", "respnd"));
    signal(&gateway.child, "USR2");
    eventually("it is logged", || gateway.log().contains("the new process exited before it was ready: exit status: 2"));
    assert!(gateway.log().contains("did you mean `respond`?"), "{}", gateway.log());
    for _ in 0..20 {
        assert_eq!(gateway.get("/says").text(), "one");
    }
    gateway.put(&says("three"));
    let _successor = hot_restart(&mut gateway);
    assert_eq!(gateway.get("/says").text(), "three");
}

#[test]
fn hot_restart_may_change_the_number_of_workers_and_be_repeated() {
    for (layout, before, after) in [("per-core", 4, 1), ("per-core", 1, 4), ("work-stealing", 2, 2)] {
        let config = |workers: u32| format!("[server]\nthreading = \"{layout}\"\nworkers = {workers}\n{}", says("x"));
        let mut gateway = Gateway::start(&config(before));
        gateway.put(&config(after));
        let first = hot_restart(&mut gateway);
        // 40 connections are enough to reach each listening socket of the gateway.
        let all = |what: &str| {
            for _ in 0..40 {
                assert_eq!(gateway.get("/says").status, 200, "{layout}, {before} to {after}: {what}");
            }
        };
        all("the second process");
        first.signal("USR2");
        eventually("a third one", || new_process_id(&gateway.log()).is_some_and(|id| id != first.0));
        let third = Successor(new_process_id(&gateway.log()).unwrap());
        eventually("the second has ended", || gateway.log().matches("stopped").count() == 2);
        all("the third process");
        third.signal("TERM");
        eventually("nothing listens", || std::net::TcpStream::connect(gateway.address).is_err());
    }
}

/// Start a gateway as systemd does: with a listening socket as file descriptor 3, and with the gateway's process ID in
/// the environment variable `LISTEN_PID`.
fn activated(config: &str, socket: TcpListener) -> Gateway {
    let socket = std::sync::Mutex::new(Some(socket));
    Gateway::start_socket(config, |path| {
        let mut command = Command::new("sh");
        let script = "export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$0\" \"$@\" 3<&0 0</dev/null";
        command.args(["-c", script]).arg(binary().get_program()).arg("--config").arg(path);
        command.stdin(OwnedFd::from(socket.lock().unwrap().take().unwrap()));
        command
    })
}

#[test]
fn systemd_socket_is_served_with_its_queued_connections() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address: SocketAddr = socket.local_addr().unwrap();
    // The client connects before the gateway's process exists.
    let mut early = Client::connect(address);
    early.send(b"GET /says HTTP/1.1\r\nHost: a\r\n\r\n");
    let config = format!("[server]\nworkers = 3\n[[listener]]\naddress = \"{address}\"\n{}", says("x"));
    let mut gateway = activated(&config, socket);
    assert_eq!(gateway.address, address);
    assert_eq!(early.reply().unwrap().status, 200);
    for _ in 0..20 {
        assert_eq!(gateway.get("/says").status, 200);
    }
    let _successor = hot_restart(&mut gateway);
    for _ in 0..20 {
        assert_eq!(gateway.get("/says").status, 200, "the next process uses the socket");
    }
}

#[test]
fn unused_inherited_socket_is_logged() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let gateway = activated(&format!("[[listener]]\naddress = \"[::1]:0\"\n{}", says("x")), socket);
    let address = address.to_string();
    let is_logged = |line: &str| line.contains("closed an inherited socket") && line.contains(&address);
    assert!(gateway.log().lines().any(is_logged), "{}", gateway.log());
    assert_eq!(gateway.get("/says").status, 200);
}

#[test]
fn service_manager_is_notified_of_state_changes() {
    let folder = tempfile::tempdir().unwrap();
    let socket = UnixDatagram::bind(folder.path().join("notify")).unwrap();
    socket.set_read_timeout(Some(MAX_WAIT)).unwrap();
    let told = || {
        let mut message = [0; 512];
        let length = socket.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..length]).trim().to_owned()
    };
    let path = folder.path().join("notify");
    let mut gateway = Gateway::start_by(&format!("{ADMIN}{}", says("one")), |config| {
        let mut command = binary();
        command.arg("--config").arg(config).env("NOTIFY_SOCKET", &path);
        command
    });
    assert_eq!(told(), "READY=1");
    signal(&gateway.child, "HUP");
    let message = told();
    let (reloading, since) = message.split_once('\n').unwrap();
    assert_eq!(reloading, "RELOADING=1");
    assert!(since.strip_prefix("MONOTONIC_USEC=").unwrap().parse::<u64>().unwrap() > 0, "{since}");
    assert_eq!(told(), "READY=1");
    signal(&gateway.child, "USR2");
    let successor = Successor::of(&gateway);
    assert_eq!(told(), "STATUS=hot restart: starting a new process");
    // The order of the two notifications is not defined.
    let mut both = [told(), told()];
    both.sort();
    assert_eq!(both, [format!("MAINPID={}\nSTATUS=", successor.0), "READY=1".to_owned()]);
    assert_eq!(gateway.wait().code(), Some(0));
    successor.signal("TERM");
    assert_eq!(told(), "STOPPING=1", "the new process sends it, not the old one");
}

/// Metrics and the script of the packages tell whether a hot restart has succeeded. `systemctl` is replaced by a script
/// that sends the signal, and reads the notifications as systemd does.
#[test]
fn result_of_a_hot_restart_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let mut gateway = Gateway::start_by(&with_admin(&says("one")), |config| {
        let mut command = binary();
        command.arg("--config").arg(config).env("NOTIFY_SOCKET", &path);
        command
    });
    let state = folder.path().join("state");
    let write =
        |pid: &str, status: &str| std::fs::write(&state, format!("MainPID={pid}\nStatusText={status}\n")).unwrap();
    write(&gateway.child.id().to_string(), "");
    let state_path = state.clone();
    std::thread::spawn(move || {
        let mut fields = std::collections::BTreeMap::new();
        let mut message = [0; 4096];
        while let Ok(length) = socket.recv(&mut message) {
            for line in String::from_utf8_lossy(&message[..length]).lines() {
                match line.split_once('=').unwrap() {
                    ("MAINPID", pid) => fields.insert("MainPID", pid.to_owned()),
                    ("STATUS", text) => fields.insert("StatusText", text.to_owned()),
                    _ => None,
                };
            }
            let before = std::fs::read_to_string(&state_path).unwrap();
            let lines = before.lines().map(|line| {
                let (name, value) = line.split_once('=').unwrap();
                format!("{name}={}\n", fields.get(name).map_or(value, |value| &**value))
            });
            let text: String = lines.collect();
            let next = state_path.with_extension("next");
            std::fs::write(&next, text).unwrap();
            std::fs::rename(next, &state_path).unwrap();
        }
    });
    let systemctl = folder.path().join("systemctl");
    let state = state.display();
    let text = format!(
        "#!/bin/sh\ncase $1 in\nshow) sed -n \"s/^${{2#--property=}}=//p\" {state};;\n\
         kill) kill -USR2 $(sed -n s/^MainPID=//p {state});;\nesac\n"
    );
    std::fs::write(&systemctl, text).unwrap();
    std::fs::set_permissions(&systemctl, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let counts = |gateway: &Gateway| {
        ["ok", "error"].map(|result| metric(gateway, &format!("hot_restarts_total{{result=\"{result}\"}}")))
    };
    let script = || {
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/hot-restart"));
        let search = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
        let output = command.env("PATH", search).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(counts(&gateway), [0.0, 0.0]);
    gateway.put(&with_admin(&says("two").replace("respond", "respnd")));
    let (code, error) = script();
    assert_eq!(code, Some(1));
    assert!(error.starts_with("sluicegate.service: hot restart failed: the new process exited before"), "{error}");
    assert_eq!(counts(&gateway), [0.0, 1.0]);
    gateway.put(&with_admin(&says("three")));
    assert_eq!(script(), (Some(0), String::new()));
    let _successor = Successor::of(&gateway);
    assert_eq!(gateway.wait().code(), Some(0));
    assert_eq!(counts(&gateway), [1.0, 0.0], "the counters of the new process");
}

/// Return the inodes of all sockets that listen on this address.
fn listening_sockets(address: SocketAddr) -> BTreeSet<String> {
    let SocketAddr::V4(address) = address else { panic!("{address} is not an IPv4 address") };
    let local = format!("{:08X}:{:04X}", u32::from_le_bytes(address.ip().octets()), address.port());
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    // The columns are: number, local address, remote address, state (0A: LISTEN), …, inode.
    let listening = rows.filter(|row| row.get(1) == Some(&&*local) && row.get(3) == Some(&"0A"));
    listening.map(|row| row[9].to_owned()).collect()
}

#[test]
fn every_number_of_listening_sockets_is_inherited() {
    // Each listener has one socket per worker, and the admin listener has one more.
    for (listeners, workers, has_admin) in [
        (1, 1, false),
        (1, 1, true),
        (2, 1, true),
        (2, 2, false),
        (2, 2, true),
        (3, 2, false),
        (4, 1, true),
        (1, 8, true),
    ] {
        let table = |index: usize| format!("[[listener]]\nname = \"l{index}\"\naddress = \"127.0.0.1:0\"\n");
        let route = |index: usize, body: &str| {
            format!(
                "[[route]]\nname = \"r{index}\"\npath = \"/says\"\nlisteners = [\"l{index}\"]\n\
                 respond = {{ status = 200, body = \"{body} {index}\" }}\n"
            )
        };
        let config = |body: &str| {
            let tables: String = (0..listeners).map(table).collect();
            let routes: String = (0..listeners).map(|index| route(index, body)).collect();
            let admin = if has_admin { ADMIN } else { "" };
            format!("[server]\nworkers = {workers}\n{admin}{tables}{routes}")
        };
        let mut gateway = Gateway::start(&config("old"));
        let addresses = gateway.addresses();
        let sockets = || addresses.iter().map(|address| listening_sockets(*address)).collect::<Vec<_>>();
        let before = sockets();
        assert!(before.iter().all(|sockets| sockets.len() == workers), "{before:?}");
        let what = format!("{listeners} listeners, {workers} workers, admin listener: {has_admin}");
        // Connections are distributed over the sockets of a listener, so several requests reach each worker.
        let all_say = |body: &str| {
            for (index, address) in addresses.iter().enumerate() {
                for _ in 0..6 * workers {
                    assert_eq!(Client::connect(*address).get("/says").text(), format!("{body} {index}"), "{what}");
                }
            }
        };
        all_say("old");
        gateway.put(&config("new"));
        let first = hot_restart(&mut gateway);
        all_say("new");
        if has_admin {
            assert_eq!(ask(&gateway, "GET", "/readyz").status, 200, "{what}");
        }
        gateway.put(&config("third"));
        first.signal("USR2");
        eventually("a third process serves", || new_process_id(&gateway.log()).is_some_and(|id| id != first.0));
        let _third = Successor(new_process_id(&gateway.log()).unwrap());
        eventually("the second has ended", || gateway.log().matches("stopped").count() == 2);
        all_say("third");
        assert_eq!(sockets(), before, "{what}: a socket that is closed resets its waiting connections");
        assert!(!gateway.log().contains("inherited socket"), "{what}: {}", gateway.log());
    }
}
