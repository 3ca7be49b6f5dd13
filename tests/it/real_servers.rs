//! Real servers (nginx, Node, Python): killed and restarted under load (fault 24 in docs/testing.md), and virtual hosts.
#![allow(clippy::disallowed_methods)] // waits use the system clock

use std::collections::HashSet;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::support::certificates::{Authority, NOW};
use crate::support::gateway::Gateway;
use crate::support::redis::free_port;
use crate::support::{SetOnDrop, eventually};

/// A Python server that appends the `x-id` header of each POST to a file, in one write.
const PYTHON: &str = r#"
import os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
seen = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(204)
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        os.write(seen, (self.headers["x-id"] + "\n").encode())
        self.do_GET()
    def log_message(self, *_): pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"#;

/// A Node server that appends the `x-id` header of each POST to a file. It closes connections after 5 s without a
/// request and announces this timeout in `Keep-Alive`.
const NODE: &str = r#"
const [port, seen] = process.argv.slice(1);
require("http").createServer((request, response) => {
    request.resume().on("end", () => {
        if (request.method === "POST") require("fs").appendFileSync(seen, request.headers["x-id"] + "\n");
        response.writeHead(204).end();
    });
}).listen(+port, "127.0.0.1");
"#;

/// A server that can be restarted on its port.
struct Server {
    port: u16,
    start: Box<dyn Fn(u16) -> Command>,
    child: Child,
}

impl Server {
    fn start(start: impl Fn(u16) -> Command + 'static) -> Server {
        let port = free_port();
        let child = spawn(&start, port);
        Server { port, start: Box::new(start), child }
    }

    fn restart(&mut self) {
        self.kill();
        self.child = spawn(&self.start, self.port);
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(start: &dyn Fn(u16) -> Command, port: u16) -> Child {
    let mut child = start(port).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("the server listens", || {
        assert_eq!(
            child.try_wait().unwrap(),
            None,
            "the server did not start; `make tools` installs nginx, Node and Python"
        );
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    child
}

fn python(seen: &Path) -> Server {
    let seen = seen.to_owned();
    Server::start(move |port| {
        let mut command = Command::new("python3");
        command.arg("-c").arg(PYTHON).arg(port.to_string()).arg(&seen);
        command
    })
}

fn node(seen: &Path) -> Server {
    let seen = seen.to_owned();
    Server::start(move |port| {
        let mut command = Command::new("node");
        command.arg("-e").arg(NODE).arg(port.to_string()).arg(&seen);
        command
    })
}

fn nginx(folder: &Path) -> Server {
    let folder = folder.to_owned();
    Server::start(move |port| {
        let at = |name: &str| folder.join(name).display().to_string();
        let text = format!(
            "daemon off; master_process off; pid {}; error_log {};\nevents {{}}\n\
             http {{ access_log off; client_body_temp_path {}; proxy_temp_path {}; fastcgi_temp_path {}; uwsgi_temp_path {}; \
             scgi_temp_path {};\nserver {{ listen 127.0.0.1:{port}; keepalive_requests 50; return 204; }} }}\n",
            at("pid"),
            at("log"),
            at("b"),
            at("p"),
            at("f"),
            at("u"),
            at("s"),
        );
        std::fs::write(folder.join("nginx.conf"), text).unwrap();
        let mut command = Command::new("nginx");
        command.env("PATH", format!("{}:/usr/sbin", std::env::var("PATH").unwrap())).arg("-c").arg(at("nginx.conf"));
        command
    })
}

#[test]
fn restarted_real_servers_fail_no_get_and_repeat_no_post() {
    let folder = tempfile::tempdir().unwrap();
    let seen = folder.path().join("seen");
    let mut servers = [python(&seen), nginx(folder.path()), node(&seen)];
    let urls: Vec<_> = servers.iter().map(|server| format!("http://127.0.0.1:{}", server.port)).collect();
    let gateway = Gateway::start(&format!(
        "[upstream.api]\nservers = {urls:?}\nretries = 2\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n"
    ));
    let (over, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (gets, posts) = std::thread::scope(|scope| {
        let ask = |thread: usize| {
            let (over, answered, gateway) = (&over, &answered, &gateway);
            move || {
                let (mut client, mut gets, mut posts) = (gateway.client(), 0, Vec::new());
                while !over.load(Ordering::SeqCst) {
                    let reply = client.get("/get");
                    assert_eq!(reply.status, 204, "{}", reply.text());
                    gets += 1;
                    answered.fetch_add(1, Ordering::SeqCst);
                    let id = format!("{thread}-{gets}");
                    let reply = client.request("POST", "/post", &[("x-id", &id)], b"something");
                    assert!(matches!(reply.status, 204 | 502), "{}", reply.text());
                    if reply.header("connection") == Some("close") {
                        // The server responded before it read the body, so the connection is closed.
                        client = gateway.client();
                    }
                    posts.push(reply.status);
                }
                (gets, posts)
            }
        };
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(ask(thread))).collect();
        {
            let _over = SetOnDrop(&over);
            // Restart one server at a time. With `retries = 2`, a request tries each of the three servers once.
            let served = || {
                let before = answered.load(Ordering::SeqCst);
                eventually("requests are served", || answered.load(Ordering::SeqCst) >= before + 100);
            };
            for _ in 0..5 {
                for server in &mut servers {
                    server.restart();
                    served();
                }
            }
        }
        let done: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        (
            done.iter().map(|(gets, _)| gets).sum::<i32>(),
            done.into_iter().flat_map(|(_, posts)| posts).collect::<Vec<_>>(),
        )
    });
    let seen = std::fs::read_to_string(&seen).unwrap();
    let ids: HashSet<_> = seen.lines().collect();
    assert_eq!(ids.len(), seen.lines().count(), "no POST reached the servers twice");
    let lost = posts.iter().filter(|status| **status == 502).count();
    println!(
        "fault 24: nginx, Node and Python killed 5 times each: {gets} GET, 0 errors; {} POST, {lost} times 502, none twice",
        posts.len()
    );
    assert!(!ids.is_empty() && gets > 20, "{gets} GET requests, {} POST requests recorded by the servers", ids.len());
}

/// nginx with two virtual hosts over TLS. Each answers with its name, and requests for other hosts get 421.
fn virtual_hosts(folder: &Path, ca: &Authority) -> Server {
    let hosts = ["localhost", "api.test"];
    for host in hosts {
        let pair = ca.server(&[host], NOW);
        std::fs::write(folder.join(format!("{host}.pem")), pair.cert).unwrap();
        std::fs::write(folder.join(format!("{host}.key")), pair.key).unwrap();
    }
    let folder = folder.to_owned();
    Server::start(move |port| {
        let at = |name: &str| folder.join(name).display().to_string();
        let tls = |host: &str| {
            format!(
                "ssl_certificate {}; ssl_certificate_key {};",
                at(&format!("{host}.pem")),
                at(&format!("{host}.key"))
            )
        };
        let named = |host: &str| {
            let tls = tls(host);
            format!("server {{ listen 127.0.0.1:{port} ssl; server_name {host}; {tls} return 200 {host}; }}\n")
        };
        let text = format!(
            "daemon off; master_process off; pid {}; error_log {};\nevents {{}}\n\
             http {{ access_log off; client_body_temp_path {}; proxy_temp_path {}; fastcgi_temp_path {}; uwsgi_temp_path {}; \
             scgi_temp_path {};\nserver {{ listen 127.0.0.1:{port} ssl default_server; {} return 421; }}\n{} }}\n",
            at("pid"),
            at("log"),
            at("b"),
            at("p"),
            at("f"),
            at("u"),
            at("s"),
            tls("localhost"),
            hosts.map(named).concat(),
        );
        std::fs::write(folder.join("nginx.conf"), text).unwrap();
        let mut command = Command::new("nginx");
        command.env("PATH", format!("{}:/usr/sbin", std::env::var("PATH").unwrap())).arg("-c").arg(at("nginx.conf"));
        command
    })
}

#[test]
fn virtual_hosts_of_nginx_are_reached_by_the_host_of_the_upstream() {
    let (ca, folder) = (Authority::new("ca"), tempfile::tempdir().unwrap());
    let nginx = virtual_hosts(folder.path(), &ca);
    let upstream = |name: &str, lines: &str| {
        format!(
            "[upstream.{name}]\nservers = [\"https://localhost:{}\"]\n{lines}\n\
             [[route]]\nname = \"{name}\"\npath = \"/{name}\"\nupstream = \"{name}\"\n",
            nginx.port
        )
    };
    let config = [
        upstream("client", "tls = { ca = \"ca.pem\" }"),
        upstream("server", "tls = { ca = \"ca.pem\" }\nhost = \"server\""),
        upstream("name", "tls = { ca = \"ca.pem\", server_name = \"api.test\" }\nhost = \"api.test\""),
    ];
    let gateway = Gateway::start_with(&config.concat(), &[("ca.pem", &ca.pem())]);
    let mut client = gateway.client();
    for (path, status, text) in [("/client", 421, ""), ("/server", 200, "localhost"), ("/name", 200, "api.test")] {
        let reply = client.request("GET", path, &[("Host", "shop.example")], b"");
        assert_eq!(reply.status, status, "{path}: {}", reply.text());
        assert!(reply.text().contains(text), "{path}: {}", reply.text());
    }
}
