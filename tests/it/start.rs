//! Starting and stopping the gateway: the shipped configuration, the command line, ports in use, and signals.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::admin_listener::HERE;
use crate::support::certificates::{NOW, Pair, TlsClient, tls};
use crate::support::client::Client;
use crate::support::frames;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::free_port;
use crate::support::reload::{reloads, with_admin};
use crate::support::upstream::{self, Upstream};
use crate::support::{eventually, signal};
use rustls::version::TLS13;
use socket2::{Domain, Socket, Type};

const HELLO: &str = "[[route]]\nname = \"hello\"\npath = \"/hello\"\nrespond = { status = 200, body = \"hello\" }\n";

#[test]
fn socket_unit_has_the_address_of_the_packaged_configuration() {
    let read = |file| std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let (unit, config) = (read("ops/sluicegate.socket"), read("packaging/gateway.toml"));
    let addresses: Vec<_> = unit.lines().filter_map(|line| line.strip_prefix("ListenStream=")).collect();
    let [address] = addresses[..] else { panic!("one address: {unit}") };
    assert!(config.contains(&format!("[[listener]]\naddress = \"{address}\"\n")), "{address} in {config}");
}

#[test]
fn shipped_configuration_runs_without_redis_and_upstream() {
    // Use the shipped file with free ports, because other tests run at the same time.
    let shipped = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("gateway.toml")).unwrap();
    let consumers = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("consumers.toml")).unwrap();
    assert!(shipped.contains("address = \"127.0.0.1:8080\""));
    let config = shipped
        .replace("127.0.0.1:8080", "127.0.0.1:0")
        .replace("127.0.0.1:9180", "127.0.0.1:0")
        .replace("127.0.0.1:9000", &format!("127.0.0.1:{}", free_port()));
    let gateway = Gateway::start_with(&config, &[("consumers.toml", &consumers)]);
    let log = gateway.log();
    assert!(log.contains(&format!("listens on http://{}; admin on http://127.0.0.1:", gateway.address)), "{log}");
    let end = format!("; store: memory; 3 routes, 3 limits; try: curl -i http://{}/hello", gateway.address);
    assert!(log.contains(&end), "{log}");

    assert_eq!(gateway.get("/hello").text(), "hello\n");
    let report = gateway.client().get_with("/report", &[("x-api-key", "demo-key")]);
    assert_eq!(report.status, 200);
    assert!(report.header("ratelimit").unwrap().contains("\"per-key\";r=99;t=60"), "{report:?}");
    assert_eq!(gateway.get("/api/x").status, 502);
}

#[test]
fn example_of_the_start_has_a_method_of_its_route() {
    for (methods, expected) in [("", "curl -i http"), ("methods = [\"POST\"]\n", "curl -i -X POST http")] {
        let gateway = Gateway::start(&format!("{HELLO}{methods}"));
        let log = gateway.log();
        assert!(log.contains(&format!("try: {expected}://{}/hello", gateway.address)), "{log}");
    }
}

/// The log has the warnings of `check` after the start and after each reload.
#[test]
fn warnings_of_check_are_logged() {
    let config = |method: &str| format!("{HELLO}methods = [\"{method}\"]\n");
    let gateway = Gateway::start(&with_admin(&config("GTE")));
    let warning = |method: &str| format!("`{method}` is not a registered HTTP method");
    let count = |method: &str| gateway.log().matches(&warning(method)).count();
    assert_eq!((count("GTE"), count("PSOT")), (1, 0), "{}", gateway.log());
    reloads(&gateway, &config("PSOT"));
    eventually("the warning is logged", || count("PSOT") == 1);
    assert_eq!(count("GTE"), 1);
    let log = gateway.log();
    let line = log.lines().find(|line| line.contains("`PSOT`")).unwrap();
    assert!(line.contains("WARN") && line.contains("did you mean POST?") && line.contains("gateway.toml"), "{line}");
}

#[test]
fn help_and_version_are_printed() {
    let run = |arguments: &[&str]| {
        let output = binary().args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, out, _) = run(&["-V"]);
    assert_eq!((code, out.trim()), (Some(0), concat!("sluicegate ", env!("CARGO_PKG_VERSION"))));
    let (code, out, _) = run(&["--version"]);
    assert_eq!(code, Some(0));
    let lines: Vec<_> = out.lines().collect();
    let [name, commit, rustc, target, pgo] = lines[..] else { panic!("the version has five lines: {out}") };
    assert_eq!(name, concat!("sluicegate ", env!("CARGO_PKG_VERSION")));
    // Development builds contain no commit hash.
    assert_eq!(commit, "commit: unknown");
    assert!(rustc.starts_with("rustc: rustc 1."), "{rustc}");
    assert_eq!(target, format!("target: {}-unknown-linux-gnu", std::env::consts::ARCH));
    assert_eq!(pgo, "PGO: no");
    let (code, out, _) = run(&["--help"]);
    assert_eq!(code, Some(0));
    for word in ["run", "check", "--config <FILE>", "default: gateway.toml", "rate limits"] {
        assert!(out.contains(word), "--help lacks {word}:\n{out}");
    }
    let (code, _, err) = run(&["chekc"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("'check'"), "a hint for the typo: {err}");
}

/// The binary defines `malloc` itself. Otherwise it would use the slower one of libc, without an error.
#[test]
fn malloc_of_libc_is_replaced() {
    let output = Command::new("nm").args(["--dynamic", "--defined-only"]).arg(binary().get_program()).output().unwrap();
    let symbols = String::from_utf8(output.stdout).unwrap();
    let defined: Vec<_> = symbols.lines().filter_map(|line| line.rsplit(' ').next()).collect();
    for function in ["malloc", "calloc", "realloc", "free"] {
        assert!(defined.contains(&function), "{function} is not in {symbols}");
    }
}

#[test]
fn configuration_file_without_its_option_is_recognized() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("my conf"), "").unwrap();
    let run = |arguments: &[&str]| {
        let output = binary().current_dir(directory.path()).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for (arguments, hint) in [
        (&["my.toml"][..], "tip: if this is the configuration file, write --config my.toml"),
        (&["gateway.toml"], "write --config gateway.toml"),
        (&["check", "my.toml"], "write --config my.toml"),
        (&["my conf"], "write --config 'my conf'"),
        // If the directory contains a configuration, the hint names it.
        (&["check", "--config", "."], "name the file: --config ./gateway.toml"),
    ] {
        if arguments.contains(&".") {
            std::fs::write(directory.path().join("gateway.toml"), "").unwrap();
        }
        let (code, err) = run(arguments);
        assert!(code == Some(2) && err.contains(hint), "{arguments:?}: {err}");
    }
}

#[test]
fn errors_at_the_start_show_the_line_of_their_key() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap();
    let free = "[[listener]]\naddress = \"127.0.0.1:0\"\n";
    let in_use = "= help: another process listens on this address: stop that process, or choose another port";
    for (tables, line, error, help) in [
        (format!("{free}[[listener]]\naddress = \"{taken}\"\n"), 4, format!("cannot listen on {taken}: "), in_use),
        (format!("{free}[admin]\naddress = \"{taken}\"\n"), 4, format!("cannot listen on {taken}: "), in_use),
        (
            "[[listener]]\naddress = \"203.0.113.1:0\"\n".to_owned(),
            2,
            "cannot listen on 203.0.113.1:0: ".to_owned(),
            "= help: this machine does not have this address",
        ),
        (
            format!("{free}[admin]\nsocket = \"none/admin.sock\"\n"),
            4,
            "cannot open the admin socket ".to_owned(),
            "= help: set `socket` in [admin] to another path",
        ),
        (format!("{free}[log]\naccess = \"none/access.log\"\n"), 4, "cannot write the access log to ".to_owned(), ""),
    ] {
        std::fs::write(&path, format!("{tables}{HELLO}")).unwrap();
        let output = binary().arg("--config").arg(&path).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.starts_with(&format!("error: {error}")), "{text}");
        let place = format!("gateway.toml:{line}:");
        let shown = tables.lines().nth(line - 1).unwrap();
        assert!(text.contains(&place) && text.contains(&format!("{line} | {shown}\n")), "{text}");
        assert!(if help.is_empty() { !text.contains("= help:") } else { text.contains(help) }, "{text}");
    }
}

#[test]
fn port_in_use_is_named_and_not_shared() {
    let gateway = Gateway::start(HELLO);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    for taken in
        [gateway.address.to_string(), TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()]
    {
        let listener = TcpListener::bind(&taken);
        std::fs::write(&path, format!("{HELLO}[[listener]]\naddress = \"{taken}\"\n")).unwrap();
        let output = binary().arg("--config").arg(&path).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(&format!("cannot listen on {taken}")) && text.contains("another port"), "{text}");
        drop(listener);
    }
    assert_eq!(gateway.get("/hello").status, 200);
}

#[test]
fn every_listener_is_served_in_both_threading_models() {
    for layout in ["per-core", "work-stealing"] {
        let listeners = "[[listener]]\naddress = \"127.0.0.1:0\"\n[[listener]]\naddress = \"[::1]:0\"\n";
        let gateway = Gateway::start(&format!("[server]\nthreading = \"{layout}\"\nworkers = 3\n{listeners}{HELLO}"));
        let log = gateway.log();
        let addresses = log.split("listens on ").nth(1).unwrap().split(';').next().unwrap();
        let addresses: Vec<_> = addresses.split(", ").map(|address| address.trim_start_matches("http://")).collect();
        assert_eq!(addresses.len(), 2, "{log}");
        for address in addresses {
            // Open enough connections to reach the socket of every worker.
            for _ in 0..20 {
                let reply = crate::support::client::Client::connect(address.parse().unwrap()).get("/hello");
                assert_eq!(reply.status, 200, "{layout} {address}");
            }
        }
    }
}

#[test]
fn requests_in_flight_finish_after_sigterm_and_new_connections_are_refused() {
    let (release, released) = std::sync::mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let slow = upstream::serve(move |mut stream| {
        upstream::read_head(&mut stream);
        released.lock().unwrap().recv().unwrap();
        std::io::Write::write_all(&mut stream, b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone").unwrap();
    });
    let route = "[[route]]\nname = \"slow\"\npath = \"/slow\"\nupstream = \"slow\"\n";
    let mut gateway = Gateway::start(&format!("[upstream.slow]\nservers = [\"http://{slow}\"]\n{route}{HELLO}"));
    let mut clients: Vec<_> = (0..4).map(|_| gateway.client()).collect();
    for client in &mut clients {
        client.send(b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n");
    }
    let mut idle = gateway.client();
    assert_eq!(idle.get("/hello").status, 200);

    gateway.terminate();
    eventually("the idle connection is closed", || idle.stream.get_mut().read(&mut [0]).is_ok_and(|count| count == 0));
    eventually("no new connection is accepted", || std::net::TcpStream::connect(gateway.address).is_err());
    assert!(gateway.child.try_wait().unwrap().is_none(), "the gateway waits for the running request");

    for _ in &clients {
        release.send(()).unwrap();
    }
    for client in &mut clients {
        let reply = client.reply().expect("a response to the running request");
        assert_eq!((reply.status, reply.text()), (200, "done"));
    }
    assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
}

#[test]
fn drain_ends_with_its_timeout_and_ctrl_c_drains_too() {
    let silent = upstream::serve(|mut stream| {
        upstream::read_head(&mut stream);
        let _ = stream.read(&mut [0]);
    });
    let config = format!(
        "[server]\ndrain_timeout = \"300ms\"\n[upstream.silent]\nservers = [\"http://{silent}\"]\n\
         [[route]]\nname = \"silent\"\npath = \"/{{*rest}}\"\nupstream = \"silent\"\n"
    );
    let mut gateway = Gateway::start(&config);
    let mut client = gateway.client();
    client.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    signal(&gateway.child, "INT");
    assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
    assert!(client.reply().is_none(), "the request was cut off");
}

#[test]
fn connections_without_a_request_are_closed() {
    // `header_timeout` closes connections without a complete request. The longer `idle_timeout` closes the last
    // connection.
    let gateway = Gateway::start(&format!("[server]\nheader_timeout = \"1s\"\nidle_timeout = \"1500ms\"\n{HELLO}"));
    let starts = [&b""[..], b"GET /hel", b"PRI * HTTP/2.0\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"];
    let clients = starts.map(|start| {
        let mut client = gateway.client();
        client.send(start);
        (start, client)
    });
    for (start, mut client) in clients {
        let mut rest = Vec::new();
        // The gateway may send GOAWAY over HTTP/2 first. If the connection stays open, the read times out.
        client.stream.read_to_end(&mut rest).unwrap_or_else(|error| panic!("{start:?} is kept open: {error}"));
    }
    let mut client = gateway.client();
    assert_eq!(client.get("/hello").status, 200);
    assert!(client.reply().is_none(), "the idle connection is closed");
}

/// On a reused connection, `idle_timeout` applies to the pause before a request, and `header_timeout` to its headers.
#[test]
fn slow_head_on_a_reused_connection_has_header_timeout() {
    let settings = "[server]\nheader_timeout = \"2s\"\nidle_timeout = \"1h\"\n";
    let gateway = &Gateway::start(&format!("{settings}{HELLO}"));
    let field = frames::block("GET", "/hello", &[]);
    let (first, half) = field.split_at(10);
    let head = |flags, part: &[u8]| frames::frame(frames::HEADERS, flags, 3, part);
    let rest = frames::frame(frames::CONTINUATION, frames::END_HEADERS, 3, half);
    let cases: &[(&str, bool, Vec<u8>)] = &[
        ("half a line", false, b"GET /hel".to_vec()),
        ("half a field", false, b"GET /hello HTTP/1.1\r\nHost: h\r\nx: ".to_vec()),
        ("a first byte", false, b"G".to_vec()),
        ("HEADERS without END_HEADERS", true, head(frames::END_STREAM, first)),
        ("half a HEADERS frame", true, head(frames::END_STREAM | frames::END_HEADERS, &field)[..20].to_vec()),
        ("half a CONTINUATION", true, [head(frames::END_STREAM, first), rest[..12].to_vec()].concat()),
    ];
    std::thread::scope(|scope| {
        for (what, is_http2, part) in cases {
            scope.spawn(move || {
                let mut stream = match is_http2 {
                    true => {
                        let mut client = frames::Http2::connect(gateway.address, &[]);
                        client.get(1, "/hello");
                        assert!(client.until(frames::DATA, 1).is_some(), "{what}");
                        client.stream
                    }
                    false => {
                        let mut client = gateway.client();
                        assert_eq!(client.get("/hello").status, 200, "{what}");
                        client.stream.into_inner()
                    }
                };
                // This pause is longer than `header_timeout`, but no request has begun.
                crate::support::assert_silent_but_for_settings(&mut stream, Duration::from_secs(3), what);
                stream.write_all(part).unwrap();
                stream.set_read_timeout(Some(crate::support::MAX_WAIT)).unwrap();
                let end = stream.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
                assert!(matches!(end, Ok(_) | Err(ErrorKind::ConnectionReset)), "{what} is kept open: {end:?}");
            });
        }
    });
}

fn plain_and_tls_listener(server: &str) -> (Gateway, Pair) {
    let pair = Pair::server("one.test", NOW);
    let listeners = "[[listener]]\naddress = \"127.0.0.1:0\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
                     tls.certificates = [{ cert = \"one.pem\", key = \"one.key\" }]\n";
    let config = format!("[log]\nlevel = \"debug\"\n[server]\n{server}\n{listeners}{HELLO}");
    let gateway = Gateway::start_with(&config, &[("one.pem", &pair.cert), ("one.key", &pair.key)]);
    (gateway, pair)
}

/// Wait until connections were suspended `count` times since the start.
fn wait_for_suspensions(gateway: &Gateway, count: usize) {
    let suspensions = || gateway.log().matches("idle connection suspended").count();
    eventually("idle connections are suspended", || suspensions() >= count);
    assert_eq!(suspensions(), count);
}

/// Clients must not notice that an idle connection frees its buffers.
#[test]
fn suspended_connections_serve_further_requests() {
    let (gateway, pair) = plain_and_tls_listener("header_timeout = \"30s\"\nidle_timeout = \"1h\"");
    // hyper keeps the upgrade that a request asked for, so this connection is never suspended. It is the oldest one: if
    // it were suspended, it would be the first.
    let mut refused = gateway.client();
    let upgrade = [("connection", "upgrade"), ("upgrade", "h2c")];
    assert_eq!(refused.get_with("/hello", &upgrade).status, 200);
    let mut plain = gateway.client();
    let client = tls(&[&pair.der], None, &[&TLS13]);
    let mut over_tls = TlsClient::handshake(&client, gateway.addresses()[1], "one.test").unwrap();
    for round in 1..=2 {
        assert_eq!((plain.get("/hello").status, over_tls.get("/hello").status), (200, 200));
        wait_for_suspensions(&gateway, 2 * round);
    }
    let reply = plain.get("/hello");
    assert_eq!((reply.status, reply.text(), reply.header("connection")), (200, "hello", None));
    assert_eq!(over_tls.get("/hello").status, 200);
    let reply = refused.get_with("/hello", &upgrade);
    assert_eq!((reply.status, reply.header("connection")), (200, None));
}

#[test]
fn suspension_keeps_the_first_part_of_a_request() {
    let (gateway, _) = plain_and_tls_listener("header_timeout = \"30s\"\nidle_timeout = \"1h\"");
    let mut client = gateway.client();
    client.send(b"GET /hello HTTP/1.1\r\nHost: h\r\n\r\nGET /hello HT");
    assert_eq!(client.reply().unwrap().text(), "hello");
    wait_for_suspensions(&gateway, 1);
    client.send(b"TP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(client.reply().unwrap().text(), "hello");
}

#[test]
fn suspended_connections_have_timeouts_and_are_drained() {
    let (gateway, _) = plain_and_tls_listener("header_timeout = \"2s\"\nidle_timeout = \"1h\"");
    let (impatient, _) = plain_and_tls_listener("header_timeout = \"2s\"\nidle_timeout = \"12s\"");
    let connect = |gateway: &Gateway| {
        let mut client = gateway.client();
        assert_eq!(client.get("/hello").status, 200);
        client
    };
    let [mut slow, mut drained, mut half] = [(); 3].map(|()| connect(&gateway));
    let mut idle = connect(&impatient);
    wait_for_suspensions(&impatient, 1);
    crate::support::assert_silent(idle.stream.get_mut(), Duration::from_millis(500));
    idle.assert_closed("`idle_timeout` applies");
    wait_for_suspensions(&gateway, 3);
    slow.send(b"GET /hel");
    slow.assert_closed("`header_timeout` applies");
    // Both are closed long before `drain_timeout`.
    half.send(b"GET /hel");
    gateway.terminate();
    half.assert_closed("the gateway drains, and a part of a request has arrived");
    drained.assert_closed("the gateway drains");
}

#[test]
fn idle_connections_free_their_buffers() {
    let (gateway, _) = plain_and_tls_listener("idle_timeout = \"1h\"");
    let clients: Vec<_> = (0..500)
        .map(|_| {
            let mut client = gateway.client();
            assert_eq!(client.get("/hello").status, 200);
            client
        })
        .collect();
    let memory = gateway.memory();
    // hyper's read buffers take 8 KiB per connection, so about 4 MB. The allocator returns freed memory to the kernel
    // only while the process allocates memory, so another client sends requests.
    let mut busy = gateway.client();
    eventually("the connections free their buffers", || {
        (0..500).for_each(|_| assert_eq!(busy.get("/hello").status, 200));
        gateway.memory() + 2_000_000 < memory
    });
    drop(clients);
}

/// A request body that arrives after the response does not begin another request: only `idle_timeout` applies.
#[test]
fn drained_upload_is_no_slow_head() {
    let settings = "[server]\nheader_timeout = \"1s\"\nidle_timeout = \"1h\"\n";
    let gateway = Gateway::start(&format!("{settings}{HELLO}"));
    let mut client = gateway.client();
    client.send(b"POST /hello HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 200);
    client.send(&[b'x'; 50]);
    std::thread::park_timeout(Duration::from_millis(100));
    client.send(&[b'x'; 50]);
    crate::support::assert_silent(client.stream.get_mut(), Duration::from_secs(3));
    assert_eq!(client.get("/hello").status, 200);
}

#[test]
fn access_log_has_one_record_per_request_and_no_secrets() {
    let upstream = Upstream::start();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.log");
    for format in ["json", "text"] {
        let config = format!(
            "[log]\nformat = \"{format}\"\naccess = \"{}\"\n[auth.keys]\nkind = \"api-key\"\non_unknown = \"accept\"\n\
             [limit.one]\nby = \"api-key\"\nquota = \"1/hour\"\n\
             [upstream.up]\nservers = [\"{}\"]\n[[route]]\nname = \"up\"\npath = \"/up\"\nupstream = \"up\"\nidentify = [\"keys\"]\nlimits = [\"one\"]\n",
            path.display(),
            upstream.url()
        );
        let mut gateway = Gateway::start(&config);
        for _ in 0..2 {
            gateway.client().get_with("/up?token=planted-1", &[("x-api-key", "planted-2")]);
        }
        gateway.get("/none");
        gateway.terminate();
        gateway.wait();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        for (line, words) in
            lines.iter().zip([["200", "up", "ok"], ["429", "up", "rate-limited"], ["404", "none", "no-route"]])
        {
            assert!(words.iter().all(|word| line.contains(word)), "{line} lacks one of {words:?}");
        }
        assert!(!(text + &gateway.log()).contains("planted"), "the log must not contain secrets");
        std::fs::remove_file(&path).unwrap();
    }
}

/// A child process that is killed at the end of the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Pairs of listeners on the same port: `check` rejects exactly the pairs that `run` cannot bind.
#[test]
fn check_rejects_listeners_that_cannot_bind_together() {
    let has_ipv6 = TcpListener::bind("[::1]:0").is_ok();
    let maps =
        Socket::new(Domain::IPV6, Type::STREAM, None).and_then(|socket| socket.only_v6()).is_ok_and(|only| !only);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    for (one, other, collide) in [
        ("0.0.0.0", "127.0.0.1", true),
        ("127.0.0.1", "0.0.0.0", true),
        ("127.0.0.1", "127.0.0.2", false),
        ("[::]", "[::1]", true),
        ("[::1]", "[::]", true),
        ("[::]", "0.0.0.0", maps),
        ("0.0.0.0", "[::]", maps),
        ("[::]", "127.0.0.1", maps),
        ("[::1]", "127.0.0.1", false),
        ("[::1]", "0.0.0.0", false),
        ("[::ffff:127.0.0.1]", "127.0.0.1", true),
        ("[::ffff:127.0.0.1]", "[::1]", false),
    ] {
        if !has_ipv6 && (one.starts_with('[') || other.starts_with('[')) {
            continue;
        }
        let port = free_port();
        let listener = |host: &str| format!("[[listener]]\naddress = \"{host}:{port}\"\n");
        std::fs::write(&path, format!("{}{}{HELLO}[log]\naccess = \"off\"\n", listener(one), listener(other))).unwrap();
        let mut run = Killed(binary().arg("--config").arg(&path).stderr(Stdio::piped()).spawn().unwrap());
        let lines = BufReader::new(run.0.stderr.take().unwrap()).lines().map(Result::unwrap);
        let said = lines.take_while(|line| !line.contains("listens on")).collect::<Vec<_>>().join("\n");
        drop(run);
        assert_eq!(said.contains("cannot listen on"), collide, "{one} and {other}: {said}");
        let check = binary().args(["check", "--offline", "--config"]).arg(&path).output().unwrap();
        let (code, report) = (check.status.code(), String::from_utf8(check.stderr).unwrap());
        assert_eq!(code, Some(if collide { 2 } else { 0 }), "{one} and {other}: {report}");
        if collide {
            let message = format!("{other}:{port} is already used by the [[listener]] on {one}:{port} in line 2");
            assert!(report.contains(&message) && report.contains("gateway.toml:4:11"), "{one} and {other}: {report}");
        }
    }
}

/// A closed or unread standard error delays neither requests nor the end of the process.
#[test]
fn blocked_standard_error_delays_neither_requests_nor_shutdown() {
    for (what, is_full) in [("the other end is closed", false), ("the other end is not read", true)] {
        let (mut log, other_end) = UnixStream::pair().unwrap();
        if is_full {
            log.set_nonblocking(true).unwrap();
            while log.write(&[b'x'; 1 << 10]).is_ok() {}
            while log.write(b"x").is_ok() {}
            log.set_nonblocking(false).unwrap();
        }
        let (port, admin) = (free_port(), free_port());
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gateway.toml");
        let config = format!(
            "{HELLO}[admin]\naddress = \"127.0.0.1:{admin}\"\n[server]\nworkers = 1\n[log]\naccess = \"off\"\n\
             [upstream.none]\nservers = [\"http://127.0.0.1:{}\"]\n[[route]]\nname = \"none\"\npath = \"/none\"\nupstream = \"none\"\n\
             [[listener]]\naddress = \"127.0.0.1:{port}\"\n",
            free_port()
        );
        std::fs::write(&path, &config).unwrap();
        let mut command = binary();
        command.arg("--config").arg(&path).stderr(OwnedFd::from(log));
        let mut gateway = Killed(command.spawn().unwrap());
        // Drop this process's copy of the gateway's end of the socket pair, so that only the gateway holds this end.
        drop(command);
        eventually("the gateway accepts connections", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        let other_end = is_full.then_some(other_end);
        let mut client = Client::connect(([127, 0, 0, 1], port).into());
        for _ in 0..3 {
            assert_eq!(
                client.get("/none").status,
                502,
                "{what}: the request is served although its log record is lost"
            );
            assert_eq!(client.get("/hello").status, 200, "{what}");
        }
        // The gateway logs reloads in a thread that serves no requests.
        std::fs::write(&path, "no toml").unwrap();
        signal(&gateway.0, "HUP");
        eventually("the reload is over", || {
            Client::connect(([127, 0, 0, 1], admin).into()).get_with("/api/config", &[HERE]).json()["last_error"]
                .is_object()
        });
        signal(&gateway.0, "TERM");
        let mut status = None;
        eventually("the gateway ends", || {
            status = gateway.0.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().code(), Some(0), "{what}");
        drop(other_end);
    }
}
