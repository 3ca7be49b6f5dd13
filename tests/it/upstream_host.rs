//! The `Host` that servers of upstreams receive: `host` of an upstream and `upstream_host` of a route.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::reload::{reloads, with_admin};
use crate::support::upstream::{Upstream, read_head, serve};
use http::Request;

const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// A server that answers 421 to requests for other hosts than `host`, as servers with virtual hosts do.
fn only_for(host: String) -> Upstream {
    Upstream::responding(move |seen| match seen.headers("host") == [host.as_str()] {
        true => OK.to_vec(),
        false => b"HTTP/1.1 421 Misdirected Request\r\nContent-Length: 0\r\n\r\n".to_vec(),
    })
}

/// Return `Host` and `X-Forwarded-Host` of the last request.
fn hosts(upstream: &Upstream) -> [String; 2] {
    let seen = upstream.last();
    ["host", "x-forwarded-host"].map(|name| seen.headers(name).join(", "))
}

#[test]
fn host_is_that_of_client_server_or_name_over_both_protocols() {
    let upstream = Upstream::start();
    let address = upstream.address.to_string();
    let port = upstream.address.port();
    let config = format!(
        "[upstream.client]\nservers = [\"{url}\"]\n[upstream.server]\nservers = [\"{url}\"]\nhost = \"server\"\n\
         [upstream.name]\nservers = [\"http://localhost:{port}\"]\nhost = \"api.test:8443\"\n\
         [[route]]\nname = \"client\"\npath = \"/client\"\nupstream = \"client\"\n\
         [[route]]\nname = \"server\"\npath = \"/server\"\nupstream = \"server\"\n\
         [[route]]\nname = \"name\"\npath = \"/name\"\nupstream = \"name\"\n\
         [[route]]\nname = \"own\"\npath = \"/own\"\nupstream = \"server\"\nupstream_host = \"own.test\"\n\
         [[route]]\nname = \"back\"\npath = \"/back\"\nupstream = \"name\"\nupstream_host = \"client\"\n",
        url = upstream.url()
    );
    let gateway = Gateway::start(&with_admin(&config));
    let mut client = gateway.client();
    for (path, host) in [
        ("/client", "shop.test"),
        ("/server", &*address),
        ("/name", "api.test:8443"),
        ("/own", "own.test"),
        ("/back", "shop.test"),
    ] {
        assert_eq!(client.request("GET", path, &[("Host", "shop.test")], b"").status, 200);
        assert_eq!(hosts(&upstream), [host, "shop.test"], "{path} over HTTP/1.1");
        let request = Request::get(format!("http://shop.test{path}")).body(&b""[..]).unwrap();
        assert_eq!(http2::ask(gateway.addresses()[0], [request])[0].status(), Some(200));
        assert_eq!(hosts(&upstream), [host, "shop.test"], "{path} over HTTP/2");
    }
    // A reload changes the host, also on open connections.
    reloads(&gateway, &config.replace("host = \"server\"", "host = \"new.test\"").replace("own.test", "server"));
    assert_eq!(client.request("GET", "/server", &[("Host", "shop.test")], b"").status, 200);
    assert_eq!(hosts(&upstream), ["new.test", "shop.test"]);
    assert_eq!(client.request("GET", "/own", &[("Host", "shop.test")], b"").status, 200);
    assert_eq!(hosts(&upstream), [&*address, "shop.test"]);
}

#[test]
fn each_server_of_an_upstream_gets_its_own_host_on_retries_as_well() {
    // This server closes each connection after the headers of the request.
    let broken = serve(|mut stream| drop(read_head(&mut stream)));
    let whole = Upstream::start();
    let gateway = Gateway::start(&format!(
        "[server]\nworkers = 1\n[upstream.api]\nservers = [\"http://localhost:{}\", \"http://{}\"]\nhost = \"server\"\nretries = 1\n\
         balance = \"round-robin\"\n[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n",
        broken.port(),
        whole.address
    ));
    let mut client = gateway.client();
    for _ in 0..6 {
        assert_eq!(client.request("GET", "/", &[("Host", "shop.test")], b"").status, 200);
        assert_eq!(hosts(&whole), [&*whole.address.to_string(), "shop.test"]);
    }
}

/// A plaintext HTTP/2 server that answers 421 to requests for other hosts than `host`.
fn http2_only_for(host: impl Fn(SocketAddr) -> String) -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let host = host(address);
    listener.set_nonblocking(true).unwrap();
    let serve = async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let host = host.clone();
            tokio::spawn(async move {
                let mut requests = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((request, mut respond))) = requests.accept().await {
                    let is_host = request.uri().authority().is_some_and(|authority| authority.as_str() == host);
                    let is_right = is_host && !request.headers().contains_key("host");
                    let response = http::Response::builder().status(if is_right { 200 } else { 421 });
                    respond.send_response(response.body(()).unwrap(), true).unwrap();
                }
            });
        }
    };
    std::thread::spawn(|| {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(serve);
    });
    address
}

#[test]
fn authority_of_http2_upstreams_and_of_their_health_checks_follows_host() {
    let named = http2_only_for(|_| "api.test".to_owned());
    let one = http2_only_for(|address| address.to_string());
    let two = http2_only_for(|address| address.to_string());
    let check = "health_check = { path = \"/\", interval = \"100ms\", unhealthy_threshold = 1 }";
    let gateway = Gateway::start(&format!(
        "[upstream.named]\nservers = [\"http://{named}\"]\nprotocol = \"http2\"\nhost = \"api.test\"\n{check}\n\
         [upstream.own]\nservers = [\"http://{one}\", \"http://{two}\"]\nprotocol = \"http2\"\nhost = \"server\"\n{check}\n\
         [[route]]\nname = \"named\"\npath = \"/named\"\nupstream = \"named\"\n\
         [[route]]\nname = \"own\"\npath = \"/own\"\nupstream = \"own\"\n"
    ));
    let mut client = gateway.client();
    for path in ["/named", "/own", "/own", "/own", "/own"] {
        assert_eq!(client.request("GET", path, &[("Host", "shop.test")], b"").status, 200, "{path}");
    }
    // A failed check would make a server unhealthy at once. Wait until each has certainly been checked.
    let [fine, wrong] = [only_for("checked.test".to_owned()), only_for("other.test".to_owned())];
    let checked = Gateway::start(&format!(
        "[upstream.api]\nservers = [\"{}\", \"{}\"]\nhost = \"checked.test\"\n{check}\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n",
        fine.url(),
        wrong.url()
    ));
    eventually("both are checked", || fine.count() > 1 && checked.log().contains("unexpected status 421"));
    assert_eq!(checked.log().matches("server is unhealthy").count(), 1, "{}", checked.log());
    assert!(!gateway.log().contains("server is unhealthy"), "{}", gateway.log());
}

#[test]
fn copies_of_mirrored_requests_have_the_host_of_their_upstream() {
    let (api, same, named, server) = (Upstream::start(), Upstream::start(), Upstream::start(), Upstream::start());
    let route = |name: &str| {
        format!(
            "[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nupstream = \"api\"\nmirror = {{ upstream = \"{name}\" }}\n"
        )
    };
    let gateway = Gateway::start(&format!(
        "[upstream.api]\nservers = [\"{}\"]\nhost = \"api.test\"\n[upstream.same]\nservers = [\"{}\"]\n\
         [upstream.named]\nservers = [\"{}\"]\nhost = \"copy.test\"\n[upstream.server]\nservers = [\"{}\"]\nhost = \"server\"\n{}",
        api.url(),
        same.url(),
        named.url(),
        server.url(),
        ["same", "named", "server"].map(route).concat()
    ));
    let address = server.address.to_string();
    for (path, upstream, host) in
        [("/same", &same, "shop.test"), ("/named", &named, "copy.test"), ("/server", &server, &*address)]
    {
        assert_eq!(gateway.client().request("GET", path, &[("Host", "Shop.test.")], b"").status, 200);
        assert_eq!(hosts(&api), ["api.test", "Shop.test"]);
        eventually("the copy arrives", || upstream.count() == 1);
        let got: BTreeSet<_> = hosts(upstream).map(|host| host.to_lowercase()).into();
        assert_eq!(got, BTreeSet::from([host.to_owned(), "shop.test".to_owned()]), "{path}");
    }
}
