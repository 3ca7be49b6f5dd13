//! Decisions for nginx and HAProxy, with the configurations of docs/how-to/decisions.md. tests/clients/decisions.py does the
//! same with Traefik, Caddy and Envoy.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;

use tempfile::TempDir;

use crate::support::client::Client;
use crate::support::eventually;
use crate::support::gateway::{CONSUMERS, Gateway};
use crate::support::pages::blocks;
use crate::support::redis::{Redis, free_port};
use crate::support::upstream::{Seen, Upstream};

/// Return the block with this first line on the page.
fn block(first_line: &str) -> String {
    let blocks = blocks("docs/how-to/decisions.md");
    let found = blocks.into_iter().find(|block| block.text.lines().next() == Some(first_line));
    found.unwrap_or_else(|| panic!("no block begins with `{first_line}`")).text
}

/// Start the gateway of the page. Its first listener is for nginx, its second for other proxies.
fn gateway(redis: &Redis, quota: &str) -> Gateway {
    let page = block("# decisions.toml");
    let store_start = page.find("[store]").unwrap();
    let store_end = page.find("[auth.keys]").unwrap();
    let config = format!("{}{}{}", &page[..store_start], redis.store(), &page[store_end..]);
    let config = config.replace("127.0.0.1:9190", "127.0.0.1:0").replace("127.0.0.1:9191", "127.0.0.1:0");
    Gateway::start_with(&config.replace("100/min", quota), &[("consumers.toml", CONSUMERS)])
}

/// A proxy in front of an application.
struct Proxy {
    address: SocketAddr,
    child: Child,
    _folder: TempDir,
}

impl Proxy {
    fn nginx(gateway: SocketAddr, application: &Upstream) -> Proxy {
        let folder = tempfile::tempdir().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let server = replace(&block("# nginx.conf"), "127.0.0.1:9190", gateway, address, application);
        let at = |name: &str| folder.path().join(name).display().to_string();
        let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {};\n", at(kind)))
            .concat();
        let text = format!(
            "daemon off; master_process off; pid {}; error_log {};\nevents {{}}\nhttp {{ access_log off;\n{paths}{server}}}\n",
            at("pid"),
            at("log")
        );
        let path = folder.path().join("nginx.conf");
        std::fs::write(&path, text).unwrap();
        Proxy::start("nginx", &["-c"], &path, address, folder)
    }

    fn haproxy(gateway: SocketAddr, application: &Upstream) -> Proxy {
        let folder = tempfile::tempdir().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let script = folder.path().join("decide.lua");
        std::fs::write(&script, block("-- decide.lua")).unwrap();
        let text = replace(&block("# haproxy.cfg"), "127.0.0.1:9191", gateway, address, application);
        let path = folder.path().join("haproxy.cfg");
        std::fs::write(&path, text.replace("decide.lua", &script.display().to_string())).unwrap();
        Proxy::start("haproxy", &["-db", "-q", "-f"], &path, address, folder)
    }

    fn start(program: &str, arguments: &[&str], config: &Path, address: SocketAddr, folder: TempDir) -> Proxy {
        let mut command = Command::new(program);
        command.env("PATH", format!("{}:/usr/sbin", std::env::var("PATH").unwrap())).args(arguments).arg(config);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.unwrap_or_else(|error| panic!("{error}: `make tools` installs {program}"));
        let mut proxy = Proxy { address, child, _folder: folder };
        eventually("the proxy listens", || {
            assert_eq!(proxy.child.try_wait().unwrap(), None, "{program} does not start");
            TcpStream::connect(address).is_ok()
        });
        proxy
    }

    /// Connect from one of the addresses of the clients.
    fn client(&self, last: u8) -> Client {
        Client::connect_from(IpAddr::V4(Ipv4Addr::new(127, 0, 0, last)), self.address)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn replace(text: &str, endpoint: &str, gateway: SocketAddr, address: SocketAddr, application: &Upstream) -> String {
    text.replace(endpoint, &gateway.to_string())
        .replace("127.0.0.1:8080", &address.to_string())
        .replace("127.0.0.1:8000", &application.address.to_string())
}

/// Return all headers of a request that a server may take for `X-User`, with their values.
fn users(seen: &Seen) -> Vec<String> {
    let is_user = |line: &&str| {
        let name = line.split(':').next().unwrap_or_default().to_ascii_lowercase();
        name.replace(['_', '.'], "-") == "x-user"
    };
    seen.head.lines().skip(1).filter(is_user).map(str::to_owned).collect()
}

#[test]
fn one_limit_is_exact_over_nginx_and_haproxy() {
    let redis = Redis::start();
    let gateway = gateway(&redis, "100/day");
    let addresses = gateway.addresses();
    let application = Upstream::start();
    let proxies = [Proxy::nginx(addresses[0], &application), Proxy::haproxy(addresses[1], &application)];
    let send = |proxy: &Proxy| {
        let mut client = proxy.client(9);
        let mut admitted = 0;
        for index in 0..60 {
            let reply = client.get(&format!("/orders/{index}"));
            match reply.status {
                200 => admitted += 1,
                429 => assert!(reply.header("retry-after").is_some(), "{reply:?}"),
                status => panic!("{status}: {reply:?}"),
            }
            assert!(reply.header("ratelimit").is_some_and(|value| value.starts_with("\"per-client\";r=")), "{reply:?}");
        }
        admitted
    };
    let admitted: usize = thread::scope(|scope| {
        let threads: Vec<_> = proxies.iter().chain(&proxies).map(|proxy| scope.spawn(move || send(proxy))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!((admitted, application.count()), (100, 100), "240 requests of one client through both proxies");
    for proxy in &proxies {
        assert_eq!(proxy.client(10).get("/").status, 200, "another client has its own quota");
        let forged = [("X-Forwarded-For", "198.51.100.1"), ("X-Real-IP", "198.51.100.1")];
        assert_eq!(proxy.client(9).get_with("/", &forged).status, 429, "the address of a client cannot be forged");
    }
}

#[test]
fn forged_headers_reach_neither_the_decision_nor_the_application() {
    let redis = Redis::start();
    let gateway = gateway(&redis, "1000/day");
    let addresses = gateway.addresses();
    let application = Upstream::start();
    let proxies = [Proxy::nginx(addresses[0], &application), Proxy::haproxy(addresses[1], &application)];
    for proxy in &proxies {
        let known = proxy.client(9).get_with("/", &[("X-Api-Key", "demo-key"), ("X-User", "root")]);
        assert_eq!(known.status, 200, "{known:?}");
        let seen = users(&application.last());
        assert!(seen.len() == 1 && seen[0].eq_ignore_ascii_case("x-user: demo"), "{seen:?}");
        let forged: [&[(&str, &str)]; 7] = [
            &[("X-User", "root")],
            &[("x-user", "root"), ("X-USER", "admin")],
            &[("X_User", "root")],
            &[("X.User", "root")],
            &[("X-User", "")],
            &[("X-User", "root"), ("Connection", "close, X-User")],
            &[("X-Forwarded-Method", "GET"), ("X-Forwarded-Uri", "/"), ("X-Original-URI", "/"), ("X_USER", "root")],
        ];
        for headers in forged {
            let before = application.count();
            let reply = proxy.client(9).get_with("/forged", headers);
            if application.count() > before {
                let values = users(&application.last());
                let is_empty = |line: &String| line.split_once(':').is_some_and(|(_, value)| value.trim().is_empty());
                assert!(values.iter().all(is_empty), "{headers:?}: {values:?}");
            } else {
                assert!([400, 403].contains(&reply.status), "{headers:?}: {reply:?}");
            }
        }
        let absolute = "GET http://shop.example/a HTTP/1.1\r\nHost: shop.example\r\n\r\n";
        let mut client = proxy.client(9);
        client.send(absolute.as_bytes());
        assert_eq!(client.reply().unwrap().status, 200, "an absolute form has the path `/a`");
        let slash = proxy.client(9).get("/a%2F..%2Fb");
        assert!([400, 403].contains(&slash.status), "{slash:?}");
    }
}

#[test]
fn proxies_reject_requests_while_the_gateway_is_down() {
    let redis = Redis::start();
    let mut gateway = gateway(&redis, "1000/day");
    let addresses = gateway.addresses();
    let application = Upstream::start();
    let proxies = [Proxy::nginx(addresses[0], &application), Proxy::haproxy(addresses[1], &application)];
    assert!(proxies.iter().all(|proxy| proxy.client(9).get("/").status == 200));
    let before = application.count();
    gateway.terminate();
    gateway.wait();
    let statuses: Vec<_> = proxies.iter().map(|proxy| proxy.client(9).get("/").status).collect();
    assert_eq!((statuses, application.count()), (vec![500, 503], before));
}
