//! A rolling restart of two gateways behind HAProxy, which polls `/readyz`: fault 58 in docs/testing.md.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::redis::free_port;
use crate::support::reload::says;
use crate::support::server::{Behaviour, Server};
use crate::support::{SetOnDrop, eventually};

/// An HAProxy process in front of two gateways. The test kills it at its end.
struct Balancer {
    address: SocketAddr,
    child: Child,
    _folder: tempfile::TempDir,
}

/// The ports of a gateway. A restarted gateway listens on the same ports.
#[derive(Clone, Copy)]
struct Ports {
    listener: u16,
    admin: u16,
}

impl Balancer {
    /// Start HAProxy with its default health checks: after three failed checks, a gateway is down. HAProxy does not
    /// retry, so the client gets an error if a gateway refuses a connection.
    fn start(gateways: &[Ports]) -> Balancer {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let servers = gateways.iter().enumerate().map(|(index, Ports { listener, admin })| {
            format!("  server gateway{index} 127.0.0.1:{listener} check port {admin} inter 1s\n")
        });
        let config = format!(
            "defaults\n  mode http\n  retries 0\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n\
             listen gateways\n  bind 127.0.0.1:{port}\n  balance roundrobin\n  option httpchk\n\
             \x20 http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host localhost hdr Authorization \"Bearer sesame\"\n\
             {}",
            servers.collect::<String>()
        );
        let path = folder.path().join("haproxy.cfg");
        std::fs::write(&path, config).unwrap();
        let mut command = Command::new("haproxy");
        command
            .env("PATH", format!("{}:/usr/sbin", std::env::var("PATH").unwrap()))
            .args(["-db", "-q", "-f"])
            .arg(path);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.expect("the test needs `haproxy`; `make tools` installs it");
        let mut balancer = Balancer { address: ([127, 0, 0, 1], port).into(), child, _folder: folder };
        eventually("HAProxy listens", || {
            assert_eq!(balancer.child.try_wait().unwrap(), None, "HAProxy does not start");
            TcpStream::connect(balancer.address).is_ok()
        });
        balancer
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Start a gateway that responds with its name to `/says`, and forwards `/slow` to the upstream.
fn start(name: &str, Ports { listener, admin }: Ports, upstream: &Server) -> Gateway {
    Gateway::start(&format!(
        "[server]\naccept_grace = \"5s\"\n[admin]\naddress = \"127.0.0.1:{admin}\"\ntoken = \"sesame\"\n\
         [[listener]]\naddress = \"127.0.0.1:{listener}\"\n[upstream.slow]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"slow\"\npath = \"/slow\"\nupstream = \"slow\"\n{}",
        upstream.url(),
        says(name)
    ))
}

/// The results of all clients.
#[derive(Default)]
struct Seen {
    /// Number of responses by the name of the gateway. Responses that come from the upstream do not contain this name.
    /// They are counted under `upstream`.
    responses: HashMap<String, usize>,
    failures: Vec<String>,
}

/// A client that sends one request after another until the end of the test.
struct Visitor<'a> {
    address: SocketAddr,
    path: &'a str,
    /// Whether the client opens a new connection for each request.
    reconnects: bool,
    seen: &'a Mutex<Seen>,
}

impl Visitor<'_> {
    fn run(&self, over: &AtomicBool) {
        let mut client = None;
        while !over.load(Ordering::SeqCst) {
            let mut connection = client.take().unwrap_or_else(|| Client::connect(self.address));
            let result = self.request(&mut connection);
            let mut seen = self.seen.lock().unwrap();
            match result {
                Ok(name) => {
                    *seen.responses.entry(name).or_default() += 1;
                    client = Some(connection).filter(|_| !self.reconnects);
                }
                Err(failure) => seen.failures.push(failure),
            }
        }
    }

    /// Send a request. Return the name of the gateway that responded.
    fn request(&self, client: &mut Client) -> Result<String, String> {
        let request = format!("GET {} HTTP/1.1\r\nHost: gateway.test\r\n\r\n", self.path);
        client.stream.get_mut().write_all(request.as_bytes()).map_err(|error| format!("{}: {error}", self.path))?;
        let reply = client.reply().ok_or_else(|| format!("{}: closed without a response", self.path))?;
        if reply.status != 200 || reply.header("connection").is_some() {
            return Err(format!("{}: {} {:?} {}", self.path, reply.status, reply.headers, reply.text()));
        }
        Ok(if self.path == "/says" { reply.text().to_owned() } else { "upstream".to_owned() })
    }
}

#[test]
fn rolling_restart_behind_a_polling_balancer_fails_no_request() {
    let upstream = Server::start();
    // The upstream responds after 200 ms, so requests are in flight whenever a gateway stops.
    upstream.set(Behaviour::RespondAfter(200));
    let ports = [(); 2].map(|()| Ports { listener: free_port(), admin: free_port() });
    let mut gateways = [start("a1", ports[0], &upstream), start("b1", ports[1], &upstream)];
    let balancer = Balancer::start(&ports);
    let (seen, over) = (Mutex::<Seen>::default(), AtomicBool::new(false));
    let count = |name: &str| seen.lock().unwrap().responses.get(name).copied().unwrap_or_default();
    std::thread::scope(|scope| {
        let end = SetOnDrop(&over);
        for (path, reconnects, clients) in
            [("/says", false, 3), ("/says", true, 2), ("/slow", false, 6), ("/slow", true, 4)]
        {
            for _ in 0..clients {
                let visitor = Visitor { address: balancer.address, path, reconnects, seen: &seen };
                let over = &over;
                scope.spawn(move || visitor.run(over));
            }
        }
        for (index, [old, new]) in [["a1", "a2"], ["b1", "b2"]].into_iter().enumerate() {
            eventually("the gateway is chosen", || count(old) > 100);
            let gateway = &mut gateways[index];
            gateway.terminate();
            eventually("the gateway has received the signal", || gateway.log().contains("/readyz returns 503"));
            // HAProxy has not yet detected that the gateway is stopping, and still connects to it. Without
            // `accept_grace`, the gateway would refuse these connections.
            let before = count(old);
            eventually("HAProxy still chooses the old gateway", || count(old) > before + 10);
            assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
            gateways[index] = start(new, ports[index], &upstream);
            eventually("HAProxy chooses the new gateway", || count(new) > 100);
        }
        drop(end);
    });
    let Seen { responses, failures } = seen.into_inner().unwrap();
    let total: usize = responses.values().sum();
    println!("fault 58: {total} requests during the restart of two gateways, {} failed", failures.len());
    assert!(failures.is_empty(), "{} failures: {:?}", failures.len(), &failures[..failures.len().min(5)]);
    let names: HashSet<_> = responses.keys().map(String::as_str).collect();
    assert_eq!(names, ["a1", "a2", "b1", "b2", "upstream"].into());
}
